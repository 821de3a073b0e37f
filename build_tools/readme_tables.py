"""Rewrites the marked blocks of documents from what they quote: readme_tables.py [--check].

    README.md
    <!-- begin: results -->     benchmarks/results/*.json: every measured number in README
    <!-- begin: serving -->     of them, *-engine.json and *-serve.json
    <!-- begin: quickstart -->  examples/quickstart.py, which CI runs

    benchmarks/NOTES.md
    <!-- begin: targets -->     benchmarks/targets.toml beside benchmarks/results/*.json

--check changes nothing and fails if a block differs from its source, or a link leads nowhere.
"""

import json
import re
import sys
from pathlib import Path

import targets

ROOT = Path(__file__).resolve().parents[1]

# What a reader wants to see first; everything else is folded.
SHOWN = [
    "decode/64x4096",
    "decode/128x2048",
    "decode/64x4096/page1",
    "decode/64xzipf",
    "decode/128xzipf",
    "decode/1x1024",
    "mixed/128x1@2048+4x512@4096",
    "mixed/128x1@8192+1x4096@8192",
    "mixed/speculative-64x8@4096",
    "prefix/128x8192+256",
    "prefill/4x4096/16/d128/causal",
    "prefill/4x4096/16/d128/full",
    "prefill/4x4096/8/d256/causal",
    "mla/128x4096/128",
    "plan/256xzipf",
    "cpu/decode/8x2048/32-8/d128/bfloat16/page16",
    "cpu/decode/8x2048/32-8/d128/float32/page16",
    "cpu/prefill/1x2048/8/d128/bfloat16/causal",
    "cpu/prefill/1x2048/8/d128/float32/causal",
]


def quickstart() -> str:
    code = (ROOT / "examples" / "quickstart.py").read_text()
    return f"```python\n{code}```"


def results() -> str:
    names = set(ROOT.glob("benchmarks/results/*.json")) - set(serving_files())
    return "\n\n".join(table(json.loads(path.read_text()), path.name) for path in sorted(names))


def serving_files() -> list[Path]:
    """The engine's files, then the servers'."""
    folder = ROOT / "benchmarks" / "results"
    return [*sorted(folder.glob("*-engine.json")), *sorted(folder.glob("*-serve.json"))]


def serving() -> str:
    parts = []
    for path in serving_files():
        result = json.loads(path.read_text())
        lines = engine_lines if path.stem.endswith("-engine") else http_lines
        parts.append("\n".join([heading(result, path.name), "", *lines(result["rows"])]))
    return "\n\n".join(parts)


def heading(result: dict, name: str) -> str:
    return (
        f"**{result['device']}**, jax {result['jax']}, {result['date']},"
        f" sources {result['sources_digest']}, from `benchmarks/results/{name}`:"
    )


def engine_lines(rows: list[dict]) -> list[str]:
    """Rows of bench_engine.py: a step, a whole load, or a mean time to first token."""
    lines = [
        "| workload | ms | floor, ms | tokens/s | TFLOP/s | device idle, % | beside it, ms |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        if row["workload"].startswith("serve/") and "#" not in row["workload"]:
            tokens = row.get("output_tokens_per_s", row.get("tokens_per_s"))
            idle = row.get("idle_percent_without_profiler")
            cells = [
                row["workload"].removeprefix("serve/"),
                milliseconds(row["median_us"]),
                milliseconds(row.get("floor_us")),
                f"{tokens:.0f}" if tokens else "",
                number(row.get("tflops")),
                "" if idle is None else f"{max(0.0, idle):.1f}",
                ", ".join(f"{milliseconds(us)} {peer}" for peer, us in row["peers"].items()),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def http_lines(rows: list[dict]) -> list[str]:
    """Rows of bench_serve.py."""
    lines = [
        "| workload | tokens/s | first token, P50 and P99, ms | between tokens, P50 and P99, ms"
        " | beside it |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        beside = [
            f"{peer}: {1e6 / us:.0f} tokens/s"
            if "tokens_per_s" in row
            else f"{peer}: {milliseconds(us)} ms"
            for peer, us in row["peers"].items()
        ]
        mean = f"{row['ttft_mean_ms']:.1f} (mean)" if "ttft_mean_ms" in row else ""
        hits = f"prefix hits {row['hit_rate']:.3f} of {row['ideal']:.3f}" if mean else ""
        if "requests_per_s" in row:
            beside.insert(0, f"{row['requests_per_s']:.1f} requests/s")
        cells = [
            row["workload"].removeprefix("http/"),
            f"{row['tokens_per_s']:.0f}" if "tokens_per_s" in row else "",
            mean or f"{row['ttft_p50_ms']:.1f}, {row['ttft_p99_ms']:.1f}",
            "" if mean else f"{row['inter_token_p50_ms']:.1f}, {row['inter_token_p99_ms']:.1f}",
            "; ".join([*beside, hits] if hits else beside),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def milliseconds(us: float | None) -> str:
    return f"{us / 1e3:.2f}" if us else ""


def table(result: dict, name: str) -> str:
    """One results file as a heading, a table and a longer, folded one.

    result: {"device", "driver", "jax", "date", "sources_digest", "rows": [{"workload", "median_us",
    "floor_us", "gbps", "tflops", "peers": {name: us}}]}. A row may lack all but the first two.
    """
    rows = result["rows"]
    shown = [row for row in rows if row["workload"] in SHOWN]
    return "\n".join(
        [
            heading(result, name),
            "",
            *table_lines(shown),
            "",
            f"<details><summary>All {len(rows)} rows</summary>",
            "",
            *table_lines(rows),
            "",
            "</details>",
        ]
    )


def table_lines(rows: list[dict]) -> list[str]:
    sustained = any("sustained_us" in row for row in rows)
    lines = [
        "| workload | µs | floor, µs | GB/s | TFLOP/s | best peer in the same run, µs |"
        + sustained * " sustained, µs | that peer's |",
        "| --- | ---: | ---: | ---: | ---: | --- |" + sustained * " ---: | ---: |",
    ]
    for row in rows:
        peers = row.get("peers") or {}
        best = min(peers, key=peers.get, default=None)
        name = row["workload"]
        if name.startswith("compile/"):
            name = name.rpartition("-")[0]  # without the hash of its cache entry
        cells = [
            name,
            *(number(row.get(field)) for field in ("median_us", "floor_us", "gbps", "tflops")),
            "" if best is None else f"{peers[best]:.1f} {best}",
        ]
        if sustained:
            peers = row.get("peers_sustained") or {}
            cells.append(number(row.get("sustained_us")))
            cells.append(f"{peers[best]:.1f}" if best in peers else "")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def number(value: float | None) -> str:
    return f"{value:.1f}" if value else ""


def rewritten(text: str, contents: dict[str, str], document: str) -> str:
    for name, content in contents.items():
        begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        text, found = pattern.subn(lambda _, block=f"{begin}\n{content}\n{end}": block, text)
        if found != 1:
            raise SystemExit(f"{document}: expected one block {begin} ... {end}, got {found}")
    return text


def broken_links(document: Path) -> list[str]:
    """Links of a document to files that are not there, or to headings that no file has."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if "://" not in link:
            path, _, anchor = link.partition("#")
            target = document.parent / path if path else document
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(f"{document.name}: {link}")
    return broken


def anchors(document: Path) -> set[str]:
    """What GitHub calls its headings."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def main(arguments: list[str]) -> None:
    documents = {
        "README.md": {"results": results(), "serving": serving(), "quickstart": quickstart()},
        "benchmarks/NOTES.md": {"targets": targets.table()},
    }
    for document, contents in documents.items():
        text = (ROOT / document).read_text()
        new_text = rewritten(text, contents, document)
        if arguments != ["--check"]:
            (ROOT / document).write_text(new_text)
        elif new_text != text:
            raise SystemExit(f"{document} is out of date: run python build_tools/readme_tables.py")
    if broken := [link for document in documents for link in broken_links(ROOT / document)]:
        raise SystemExit("links that lead nowhere: " + ", ".join(broken))


if __name__ == "__main__":
    main(sys.argv[1:])
