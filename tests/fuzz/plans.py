"""The C++ fuzzer of planners and plans, tests/csrc/fuzz_plan.cc."""

from __future__ import annotations

import subprocess
from pathlib import Path

PARTS = ("batches", "damaged")
ROOT = Path(__file__).parents[2]


DATA = ROOT / "tests" / "data" / "fuzz" / "plans"


def find_binary() -> Path | None:
    """The one that was built last, under sanitizers or not."""
    found = [*ROOT.glob("build/*/fuzz_plan"), *ROOT.glob("build/sanitize/*/fuzz_plan")]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def run(
    part: str,
    seed: int,
    cases: int | None,
    seconds: float | None,
    binary: Path | None = None,
    folder: Path = DATA,
) -> str:
    """What it reports in its last line. folder: for the cases that fail.

    Raises:
      CalledProcessError: a case failed, and what it printed says which.
    """
    binary = binary or find_binary()
    if binary is None:
        raise AssertionError("fuzz_plan is missing: `make fuzz` builds it")
    folder.mkdir(parents=True, exist_ok=True)
    # Mod 2^31: what any way of reading a number takes.
    command = [str(binary), part, f"--seed={seed % 2**31}"]
    command.append(f"--cases={cases}" if cases else f"--seconds={max(1, round(seconds or 1))}")
    command.append(f"--out={folder}")
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return (done.stdout.strip().splitlines() or ["nothing"])[-1]
