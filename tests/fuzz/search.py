"""The loop of all parts: makes cases from a seed, shrinks and keeps the first that fails."""

from __future__ import annotations

import dataclasses
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

DATA = Path(__file__).parents[1] / "data" / "fuzz"
SHRINK_SECONDS = 60.0


class Part(Protocol):
    """One kind of input, and the checks for it."""

    name: str

    def case(self, rng: random.Random) -> Any: ...

    def run(self, cases: list[Any]) -> None:
        """Runs cases. Raises AssertionError if one of them fails."""

    def smaller(self, case: Any) -> Iterator[Any]: ...

    def check_at_end(self) -> None:
        """Raises AssertionError if anything is left of the cases that ran."""

    def to_json(self, case: Any) -> Any: ...

    def from_json(self, data: Any) -> Any: ...


@dataclasses.dataclass
class Failure(Exception):
    part: str
    seed: int
    index: int
    message: str
    path: Path

    def __str__(self) -> str:
        return (
            f"{self.part}: seed {self.seed}, case {self.index}: {self.message}\n"
            f"the smallest that fails so: {self.path}"
        )


def search(
    part: Part,
    seed: int,
    num_cases: int | None = None,
    seconds: float | None = None,
    at_once: int = 1,
    directory: Path = DATA,
) -> int:
    """Runs cases and returns their number. Case i of a seed never depends on the limits given.

    Raises:
      Failure: the first case that fails, shrunk and written to a file.
    """
    end = time.monotonic() + (seconds if seconds is not None else float("inf"))
    done = 0
    while time.monotonic() < end and (num_cases is None or done < num_cases):
        size = at_once if num_cases is None else min(at_once, num_cases - done)
        cases = [part.case(random.Random(f"{seed} {done + i}")) for i in range(size)]
        message = error_of(part, cases)
        if message is not None:
            raise failure_of(part, seed, done, cases, message, directory)
        done += size
    part.check_at_end()
    return done


def error_of(part: Part, cases: list[Any]) -> str | None:
    try:
        part.run(cases)
    except AssertionError as error:
        return str(error) or type(error).__name__
    return None


def failure_of(
    part: Part, seed: int, first: int, cases: list[Any], message: str, directory: Path
) -> Failure:
    index = first
    for i, case in enumerate(cases):  # the case of this batch that fails alone
        if (alone := error_of(part, [case])) is not None:
            cases, message, index = [shrunk(part, case)], alone, first + i
            break
    folder = directory / part.name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{seed}-{index}.json"
    path.write_text(json.dumps([part.to_json(case) for case in cases], indent=1) + "\n")
    return Failure(part.name, seed, index, message, path)


def shrunk(part: Part, case: Any) -> Any:
    """Shrinks greedily: takes the first simpler case that also fails, and repeats."""
    end = time.monotonic() + SHRINK_SECONDS
    while time.monotonic() < end:
        for simpler in part.smaller(case):
            if time.monotonic() > end:
                return case
            if error_of(part, [simpler]) is not None:
                case = simpler
                break
        else:
            break
    return case


def replay(part: Part, path: Path) -> None:
    """Raises AssertionError if the case in the file still fails."""
    part.run([part.from_json(data) for data in json.loads(path.read_text())])
