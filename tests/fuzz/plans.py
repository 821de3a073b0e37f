"""Runs the C++ fuzzer of planners and plans, tests/csrc/fuzz/fuzz_plan.cc."""

from __future__ import annotations

import subprocess
from pathlib import Path

from .search import DATA

PARTS = ("batches", "damaged")
ROOT = Path(__file__).parents[2]


def find_binary() -> Path | None:
    """The fuzzer that was built last, with sanitizers or without."""
    found = [*ROOT.glob("build/*/fuzz_plan"), *ROOT.glob("build/sanitize/*/fuzz_plan")]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def run(
    part: str, seed: int, cases: int | None, seconds: float | None, binary: Path | None = None
) -> str:
    """Returns what the fuzzer reports in its last line.

    A case that fails is written to tests/data/fuzz, where ctest finds it.

    Raises:
      AssertionError: a case failed, or there is no fuzzer.
    """
    binary = binary or find_binary()
    if binary is None:
        raise AssertionError("fuzz_plan is missing: `make fuzz` builds it")
    amount = f"--cases={cases}" if cases else f"--seconds={max(1, round(seconds or 1))}"
    command = [str(binary), part, f"--seed={seed}", amount, f"--out={DATA}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise AssertionError(f"exit status {done.returncode}\n{done.stdout}")
    return (done.stdout.strip().splitlines() or ["nothing"])[-1]
