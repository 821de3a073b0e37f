"""Adds the output of separate peer runs to the rows of a results file.

    python -m benchmarks.peers.fa4_attention >fa4.txt
    python -m benchmarks.add_peers results/h200.json fa4.txt

Each line is a line printed by benchmarks/peers. A time goes to the row of its workload, an error to
`missing_peers`; other lines are ignored. A time of a workload without a row is an error.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks import report


def add_peers(result: dict[str, Any], lines: list[str]) -> None:
    """Updates `result`, the object of a results file. Raises KeyError if a row is missing."""
    rows = {row["workload"]: row for row in result["rows"]}
    for line in lines:
        found = json.loads(line) if line.startswith("{") else {}
        if "error" in found:
            missing = result.setdefault("missing_peers", [])
            missing.append(f"{found['peer']}, {found['workload']}: {found['error']}")
        elif "us" in found:
            row = rows[found["workload"]]
            row["peers"][found["peer"]] = round(found["us"], 2)
            if "sustained_us" in found:
                sustained = row.setdefault("peers_sustained", {})
                sustained[found["peer"]] = round(found["sustained_us"], 2)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.add_peers")
    parser.add_argument("result", type=Path, help="results file, changed in place")
    parser.add_argument("printed", type=Path, nargs="+", help="what peers printed")
    arguments = parser.parse_args()
    result = json.loads(arguments.result.read_text())
    for path in arguments.printed:
        add_peers(result, path.read_text().splitlines())
    report.write_json(arguments.result, result)


if __name__ == "__main__":
    main()
