"""Rewrites the marked blocks of README.md from what they quote: readme_tables.py [--check].

    <!-- begin: results -->     benchmarks/results/*.json: every measured number in README
    <!-- begin: quickstart -->  examples/quickstart.py, which CI runs

--check changes nothing and fails if a block differs from its source.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"


def quickstart() -> str:
    code = (ROOT / "examples" / "quickstart.py").read_text()
    return f"```python\n{code}```"


def results() -> str:
    files = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    return "\n\n".join(table(json.loads(path.read_text()), path.name) for path in files)


def table(result: dict, name: str) -> str:
    """One results file as a heading and a folded Markdown table.

    result: {"device", "driver", "jax", "date", "sources_digest", "rows": [{"workload", "median_us",
    "floor_us", "gbps", "tflops", "peers": {name: us}}]}. A row may lack all but the first two.
    """
    lines = [
        f"**{result['device']}**, jax {result['jax']}, {result['date']},"
        f" sources {result['sources_digest']}, from `benchmarks/results/{name}`:",
        "",
        f"<details><summary>{len(result['rows'])} workloads</summary>",
        "",
        "| workload | µs | floor, µs | GB/s | TFLOP/s | best peer in the same run, µs |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in result["rows"]:
        peers = row.get("peers") or {}
        best = min(peers, key=peers.get, default=None)
        cells = [
            row["workload"],
            *(number(row.get(field)) for field in ("median_us", "floor_us", "gbps", "tflops")),
            "" if best is None else f"{peers[best]:.1f} {best}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", "</details>"])


def number(value: float | None) -> str:
    return f"{value:.1f}" if value else ""


def rewritten(text: str) -> str:
    for name, content in {"results": results(), "quickstart": quickstart()}.items():
        begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        text, found = pattern.subn(lambda _, block=f"{begin}\n{content}\n{end}": block, text)
        if found != 1:
            raise SystemExit(f"README.md: expected one block {begin} ... {end}, got {found}")
    return text


def main(arguments: list[str]) -> None:
    text = README.read_text()
    new_text = rewritten(text)
    if arguments == ["--check"]:
        if new_text != text:
            raise SystemExit("README.md is out of date: run python build_tools/readme_tables.py")
    else:
        README.write_text(new_text)


if __name__ == "__main__":
    main(sys.argv[1:])
