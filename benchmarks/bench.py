"""The frame of every benchmark: parts that may fail, collected rows, a table and a results file."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from typing import Any

from benchmarks import ops, report
from benchmarks.report import Ceilings, Row, log


class Bench:
    """One run. `rows` collects the rows; a part that fails is skipped and named in `failures`."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.rows: list[Row] = []
        self.failures: list[str] = []
        self.ceilings = Ceilings(ops.NOMINAL.bytes_per_us, ops.NOMINAL.flops_per_us)

    def run(self) -> None:
        raise NotImplementedError

    def write(self) -> None:
        """Writes the results file, if the run has one."""
        raise NotImplementedError

    def guard(self, name: str, action: Callable[[], Any]) -> bool:
        """Runs `action` and returns whether it succeeded."""
        try:
            action()
            return True
        except Exception as error:
            self.fail(name, f"{type(error).__name__}: {' '.join(str(error).split())[:600]}")
            return False

    def fail(self, name: str, message: str) -> None:
        self.failures.append(f"{name}: {message}")
        log(f"FAILED {name}: {message}")

    def measure_ceilings(self, *, sustained: bool = False) -> None:
        self.ceilings, rows = ops.measure_ceilings(sustained=sustained)
        self.rows += rows
        log(
            f"ceilings: read {self.ceilings.bytes_per_us / 1e6:.2f} TB/s,"
            f" bf16 matmul {self.ceilings.flops_per_us / 1e6:.0f} TFLOP/s"
        )

    def main(self) -> int:
        """Runs the benchmark and returns the exit status."""
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # sent by `timeout`
        try:
            self.run()
        except KeyboardInterrupt:
            self.fail("interrupted", "rows so far follow")
        self.write()
        print(report.table(self.rows, self.ceilings))
        for failure in self.failures:
            print(f"FAILED {failure}")
        sys.stdout.flush()
        return 1 if self.failures else 0
