"""The tables of docs/papers.md: figures beside the papers', of benchmarks/results/*.json.

readme_tables.py writes them into the page.
"""

from __future__ import annotations

from typing import Any

import result_tables

_TTFT = "serve/llama-3.1-8b/ttft/64x2048+128"
# Paper, result file, workload, peer. Rows of *-papers.json need no entry.
FIGURES = (
    ("FlashInfer", "h100", "decode/64x4096", "flashinfer decode tc"),
    ("FlashInfer", "h100", "decode/64xzipf", "flashinfer persistent"),
    ("FlashInfer", "h100", "prefill/4x4096/16/d128/causal", "flashinfer fa3"),
    ("FlashAttention-3", "h100", "prefill/1x16384/16/d128/full", "flashinfer fa3"),
    ("FlashAttention-2", "h100", "prefill/1x16384/16/d128/full", "torch flash"),
    ("FlashDecoding", "h100", "decode/1x131072", "flashinfer decode"),
    ("PagedAttention", "h100", "decode/64x4096", "jax.nn cudnn dense"),
    ("Cascade, Hydragen", "h100", "prefix/128x8192+256", "flashinfer cascade"),
    ("Attention states", "h100", "prefix/64x32768+256", "flashinfer decode"),
    ("Attention states", "h100", "prefix/64x32768+256", "flashinfer decode tc"),
    ("RadixAttention", "h100-engine", _TTFT, "without prefix cache"),
    ("Unified Attention", "h100", "mixed/128x1@2048+4x512@4096", "flashinfer persistent"),
    ("Sarathi-Serve", "h100", "mixed/128x1@8192+1x4096@8192", "flashinfer persistent"),
    ("SpecInfer, Medusa, EAGLE", "h100", "mixed/speculative-64x8@4096", "flashinfer fa2"),
    ("MLA, FlashMLA", "h100", "mla/128x4096/128", "flashinfer mla fa3"),
    ("MLA, FlashMLA", "h100", "mla/128x4096/16", "flashinfer mla fa3"),
    ("RingAttention", "h100-x4", "sequence/65536/causal/forward@ring/x4", ""),
)
PARTS = {
    "lean": "LeanAttention",
    "parallel": "FlashInfer, parallel generation",
    "states": "Attention states",
    "unified": "Unified Attention",
    "streaming": "StreamingLLM",
    "jump": "Jump-forward",
}
MACHINES = {"h100": "H100", "h100-engine": "H100", "h100-x4": "4 H100"}


def figures() -> str:
    """Ours beside a peer or beside another setting of ours, and the ratio of their times."""
    lines = [
        "| paper | row | ours | beside it | ratio | also | machine |",
        "| --- | --- | ---: | --- | ---: | --- | --- |",
    ]
    for paper, file, workload, peer in FIGURES:
        row = _row(file, workload)
        lines.append(_line(paper, row, "", [peer] if peer else [], _also(row), MACHINES[file]))
    for path in result_tables.paper_files():
        result = result_tables.read(path.stem)
        clock = result["device"].upper()
        if result["clock"] == "processor time":
            clock = f"CPU, {result['threads']} thread, processor time"
        for row in result["rows"]:
            part = row["workload"].split("/")[0]
            if part in PARTS:
                lines.append(
                    _line(PARTS[part], row, row["ours"], [*row["peers"]], _also(row), clock)
                )
    sources = [
        f"`benchmarks/results/{path.name}` ({result.get('processor', result['device'])},"
        f" {result['date']}, sources `{result['sources_digest']}`)"
        for path in result_tables.paper_files()
        if (result := result_tables.read(path.stem))
    ]
    lines += ["", f"Rows of `benchmarks/papers.py` are from {', '.join(sources)}."]
    return "\n".join(lines)


def planned() -> str:
    """LeanAttention's random samples: what the planner predicts of each schedule."""
    lines = []
    for path in result_tables.paper_files()[:1]:  # plans do not depend on who makes them
        result = result_tables.read(path.stem)
        lines += [
            f"{result['samples']} batches for `{result['planned_for']}`, {result['date']}, sources"
            f" `{result['sources_digest']}`:",
            "",
            "| schedule | occupancy, mean | least | load over that of `balanced`, mean | most |",
            "| --- | ---: | ---: | ---: | ---: |",
        ]
        for name, values in result["planned"].items():
            numbers = " | ".join(f"{value:.2f}" for value in values.values())
            lines.append(f"| `{name}` | {numbers} |")
    return "\n".join(lines)


def _row(file: str, workload: str) -> dict[str, Any]:
    for row in result_tables.read(file)["rows"]:
        if row["workload"] == workload:
            return row
    raise SystemExit(f"benchmarks/results/{file}.json: no row {workload}, which docs/papers.md has")


def _line(
    paper: str, row: dict[str, Any], ours: str, peers: list[str], also: str, machine: str
) -> str:
    us = row["median_us"]
    beside = ", ".join(f"{result_tables.duration(row['peers'][name])} {name}" for name in peers)
    ratios = ", ".join(f"{row['peers'][name] / us:.2f}" for name in peers)
    time = f"{result_tables.duration(us)} {ours}".rstrip()
    return f"| {paper} | `{row['workload']}` | {time} | {beside} | {ratios} | {also} | {machine} |"


def _also(row: dict[str, Any]) -> str:
    """Rates of the row, where they are what the paper gives."""
    found = []
    if row["tflops"] >= 250:
        found.append(f"{row['tflops']:.0f} TFLOP/s")
    elif row["gbps"] >= 1000:
        found.append(f"{row['gbps']:.0f} GB/s")
    if "hit_rate" in row:
        found.append(f"hit rate {row['hit_rate']:.3f} of {row['ideal']:.3f}")
    if "of_linear" in row:
        found.append(f"{row['of_linear']:.2f} of linear")
    if "steps" in row and isinstance(row["steps"], dict):
        found += [f"{count} steps {name}" for name, count in row["steps"].items()]
    if "occupancy" in row:
        found.append("occupancy " + ", ".join(f"{n} {x:.2f}" for n, x in row["occupancy"].items()))
    return "; ".join(found)
