"""Markdown tables of benchmarks/results/*.json: result_tables.py prints all of them.

README has ten rows (readme_tables.py). docs/performance.md has all rows when `make docs` builds it
(docs/conf.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
Row = dict[str, Any]

# README's ten rows: file, workload and description. They have one row of each kind of work, among
# them three for which a peer is faster.
HIGHLIGHTS = (
    ("h100", "decode/64x4096", "Decode", "64 requests of 4,096 tokens"),
    ("h100", "decode/64xzipf", "Decode", "64 requests of very unequal lengths"),
    ("h100", "decode/8x1024", "Decode", "8 requests of 1,024 tokens"),
    ("h100", "mixed/128x1@2048+4x512@4096", "Mixed batch", "128 decodes, 4 prompt chunks of 512"),
    ("h100", "prefix/128x8192+256", "Shared prefix", "128 decodes share 8,192 tokens"),
    ("h100", "prefill/4x4096/16/d128/causal", "Causal prefill", "4 prompts of 4,096 tokens"),
    ("h100", "prefill/64x256/16/d128/causal", "Causal prefill", "64 prompts of 256 tokens"),
    ("h100", "mla/128x4096/128", "MLA decode", "128 requests of 4,096 tokens"),
    ("h100", "backward/1x16384/16/d128/causal", "Gradients, causal", "1 prompt of 16,384 tokens"),
    (
        "cpu-avx512_bf16",
        "cpu/decode/8x2048/32-8/d128/float32/page16",
        "Decode on a CPU",
        "8 requests of 2,048 tokens, float32",
    ),
)
MACHINES = {"h100": "H100", "cpu-avx512_bf16": "2 CPU threads, Zen 5"}

# The rows that docs/performance.md shows unfolded.
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
    "backward/4x4096/16/d128/causal",
    "backward/2x8192/16/d128/causal",
    "backward/1x16384/16/d128/causal",
    "backward/1x16384/32/d64/causal",
    "mla/128x4096/128",
    "plan/256xzipf",
    "cpu/decode/8x2048/32-8/d128/bfloat16/page16",
    "cpu/decode/8x2048/32-8/d128/float32/page16",
    "cpu/prefill/1x2048/8/d128/bfloat16/causal",
    "cpu/prefill/1x2048/8/d128/float32/causal",
]

# How the names of peers in results are written in README.
_PEER_WORDS = {
    "flashinfer": "FlashInfer",
    "torch": "PyTorch",
    "cudnn": "cuDNN",
    "dense": "(dense cache)",
    "tc": "tensor cores",
    "fa2": "FA2",
    "fa3": "FA3",
    "mla": "MLA",
}


class Highlight(NamedTuple):
    """One of the ten rows. Times in µs."""

    kind: str
    batch: str
    machine: str
    ours: float
    peer: str
    peer_us: float
    floor: float


def highlights() -> list[Highlight]:
    found = []
    for file, workload, kind, batch in HIGHLIGHTS:
        row = next((r for r in read(file)["rows"] if r["workload"] == workload), None)
        if row is None:
            raise SystemExit(f"benchmarks/results/{file}.json: no row {workload}, which README has")
        peer = best_peer(row)
        words = " ".join(_PEER_WORDS.get(word, word) for word in peer.split())
        if workload.startswith("cpu/decode/"):
            words += " (dense cache)"  # bench_cpu.py: peers have no pages
        times = row["median_us"], words, row["peers"][peer], row["floor_us"]
        found.append(Highlight(kind, batch, MACHINES[file], *times))
    return found


def highlights_table() -> str:
    """Returns README's ten rows, and how many of all rows on the H100 the best peer wins."""
    lines = [
        "| batch | ours | best peer | peer / ours | floor | machine |",
        "| --- | ---: | --- | ---: | ---: | --- |",
    ]
    for row in highlights():
        cells = [
            f"{row.kind}: {row.batch}",
            duration(row.ours),
            f"{duration(row.peer_us)} {row.peer}",
            f"{row.peer_us / row.ours:.2f}",
            duration(row.floor),
            row.machine,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"{_tally()} {_measured()}"])


def _tally() -> str:
    result = read("h100")
    ratios = {  # our time to that of the best peer that is not jax_attn itself
        row["workload"]: row["median_us"] / min(times)
        for row in result["rows"]
        if not row["workload"].startswith("ceiling")
        and (times := [us for peer, us in row["peers"].items() if not peer.startswith("ours")])
    }
    ahead = sum(ratio <= 1 for ratio in ratios.values())
    behind = max(ratios, key=lambda workload: ratios[workload])
    return (
        f"On the H100, {len(ratios)} workloads have a peer. jax_attn is at least as fast as the"
        f" best peer in {ahead} of them and slower in {len(ratios) - ahead}; the worst is"
        f" `{behind}` at {ratios[behind]:.2f} times the peer's time."
    )


def _measured() -> str:
    """When, with what and of which sources README's rows were measured."""
    records = []
    for file, machine in MACHINES.items():
        result = read(file)
        driver = f", driver {result['driver']}" if not file.startswith("cpu") else ""
        records.append(
            f"{machine}: {result['date']}{driver}, jax {result['jax']}, sources"
            f" `{result['sources_digest']}`"
        )
    return f"Measured on the {'; on '.join(records)}."


def duration(us: float) -> str:
    """Formats a duration with three or four digits and a unit."""
    if us >= 1000:
        return f"{us / 1000:.2f} ms"
    return f"{us:.1f} µs" if us >= 1 else f"{us:.2f} µs"


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def best_peer(row: Row) -> str:
    """Returns the name of the run's fastest peer; "" if there is none."""
    peers = row.get("peers") or {}
    return min(peers, key=peers.get, default="")


def attention_tables() -> str:
    """Returns the results of bench_cpu.py and bench_gpu.py: a heading, a table and a folded table.

    A file: {"device", "driver", "jax", "date", "sources_digest", "rows": [{"workload", "median_us",
    "floor_us", "gbps", "tflops", "peers": {name: us}}]}. A row may lack all but the first two.
    """
    paths = sorted(set(RESULTS.glob("*.json")) - {*_serving_files(), *paper_files()})
    return "\n\n".join(_attention_table(path) for path in paths)


def serving_tables() -> str:
    """Every result of bench_engine.py, then every one of bench_serve.py."""
    parts = []
    for path in _serving_files():
        result = read(path.stem)
        lines = _engine_lines if path.stem.endswith("-engine") else _http_lines
        parts.append("\n".join([_heading(result, path.name), "", *lines(result["rows"])]))
    return "\n\n".join(parts)


def _serving_files() -> list[Path]:
    return [*sorted(RESULTS.glob("*-engine.json")), *sorted(RESULTS.glob("*-serve.json"))]


def paper_files() -> list[Path]:
    """Results of benchmarks/papers.py, which docs/papers.md has (paper_tables.py)."""
    return sorted(RESULTS.glob("*-papers.json"))


def _heading(result: dict[str, Any], name: str) -> str:
    return (
        f"**{result['device']}**, jax {result['jax']}, {result['date']},"
        f" sources {result['sources_digest']}, from `benchmarks/results/{name}`:"
    )


def _engine_lines(rows: list[Row]) -> list[str]:
    """Rows of bench_engine.py: a step, a whole load, or a mean time to first token."""
    lines = [
        "| workload | ms | floor, ms | tokens/s | TFLOP/s | device idle, % | peer, ms |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        if row["workload"].startswith("serve/") and "#" not in row["workload"]:
            tokens = row.get("output_tokens_per_s", row.get("tokens_per_s"))
            idle = row.get("idle_percent_without_profiler")
            cells = [
                row["workload"].removeprefix("serve/"),
                _milliseconds(row["median_us"]),
                _milliseconds(row.get("floor_us")),
                f"{tokens:.0f}" if tokens else "",
                _number(row.get("tflops")),
                "" if idle is None else f"{max(0.0, idle):.1f}",
                ", ".join(f"{_milliseconds(us)} {peer}" for peer, us in row["peers"].items()),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _http_lines(rows: list[Row]) -> list[str]:
    """Rows of bench_serve.py."""
    lines = [
        "| workload | tokens/s | first token, P50 and P99, ms | between tokens, P50 and P99, ms"
        " | also |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        also = [
            f"{peer}: {1e6 / us:.0f} tokens/s"
            if "tokens_per_s" in row
            else f"{peer}: {_milliseconds(us)} ms"
            for peer, us in row["peers"].items()
        ]
        mean = f"{row['ttft_mean_ms']:.1f} (mean)" if "ttft_mean_ms" in row else ""
        hits = f"prefix hits {row['hit_rate']:.3f} of {row['ideal']:.3f}" if mean else ""
        if "requests_per_s" in row:
            also.insert(0, f"{row['requests_per_s']:.1f} requests/s")
        cells = [
            row["workload"].removeprefix("http/"),
            f"{row['tokens_per_s']:.0f}" if "tokens_per_s" in row else "",
            mean or f"{row['ttft_p50_ms']:.1f}, {row['ttft_p99_ms']:.1f}",
            "" if mean else f"{row['inter_token_p50_ms']:.1f}, {row['inter_token_p99_ms']:.1f}",
            "; ".join([*also, hits] if hits else also),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _attention_table(path: Path) -> str:
    result = read(path.stem)
    rows = result["rows"]
    shown = [row for row in rows if row["workload"] in SHOWN]
    return "\n".join(
        [
            _heading(result, path.name),
            "",
            *_attention_lines(shown),
            "",
            f"<details><summary>All {len(rows)} rows</summary>",
            "",
            *_attention_lines(rows),
            "",
            "</details>",
        ]
    )


def _attention_lines(rows: list[Row]) -> list[str]:
    sustained = any("sustained_us" in row for row in rows)
    lines = [
        "| workload | µs | floor, µs | GB/s | TFLOP/s | best peer, µs |"
        + sustained * " sustained, µs | sustained peer, µs |",
        "| --- | ---: | ---: | ---: | ---: | --- |" + sustained * " ---: | ---: |",
    ]
    for row in rows:
        best = best_peer(row)
        name = row["workload"]
        if name.startswith("compile/"):
            name = name.rpartition("-")[0]  # without the hash of its cache entry
        cells = [
            name,
            *(_number(row.get(field)) for field in ("median_us", "floor_us", "gbps", "tflops")),
            f"{row['peers'][best]:.1f} {best}" if best else "",
        ]
        if sustained:
            peers = row.get("peers_sustained") or {}
            cells.append(_number(row.get("sustained_us")))
            cells.append(f"{peers[best]:.1f}" if best in peers else "")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _milliseconds(us: float | None) -> str:
    return f"{us / 1e3:.2f}" if us else ""


def _number(value: float | None) -> str:
    return "" if not value else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


if __name__ == "__main__":
    print(attention_tables(), serving_tables(), sep="\n\n")
