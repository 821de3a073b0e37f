"""The table of docs/notes/targets.md: benchmarks/targets.toml beside benchmarks/results/."""

import fnmatch
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
Row = dict[str, Any]
Rows = dict[str, Row]  # workload -> row


class Metric(NamedTuple):
    unit: str
    less_is_better: bool
    value: Callable[[Row, Rows], float]


METRICS = {
    "us": Metric("µs", True, lambda row, _: row["median_us"]),
    "seconds": Metric("s", True, lambda row, _: row["median_us"] / 1e6),
    "tflops": Metric("TFLOP/s", False, lambda row, _: row["tflops"]),
    "tb_per_s": Metric("TB/s", False, lambda row, _: row["gbps"] / 1e3),
    "of_floor": Metric("x floor", True, lambda row, _: row["median_us"] / row["floor_us"]),
    "of_ragged": Metric(
        "x ragged",
        False,
        lambda row, rows: rows[row["workload"].rpartition("/")[0]]["median_us"] / row["median_us"],
    ),
    "of_peer": Metric(
        "x time of the peer", True, lambda row, _: row["median_us"] / min(row["peers"].values())
    ),
    "idle_percent": Metric("% idle", True, lambda row, _: row["idle_percent_without_profiler"]),
    "percent_of_matmul": Metric(
        "% of the matmul ceiling", False, lambda row, _: row["percent_of_matmul_ceiling"]
    ),
    "p99_of_median": Metric(
        "x median between tokens, P99",
        True,
        lambda row, _: row["inter_token_p99_ms"] / row["inter_token_p50_ms"],
    ),
    "of_ideal_hits": Metric(
        "x ideal prefix hits", False, lambda row, _: row["hit_rate_over_ideal"]
    ),
}


class Target(NamedTuple):
    workload: str  # and its file in brackets, where the group has several
    metric: Metric
    wanted: float
    measured: float | None  # None: the results file lacks the row
    peer: str  # our time over that of the best peer in the same run; "": there is none
    why: str  # anchor of the paragraph

    @property
    def shortfall(self) -> float:
        """By which share it is short; 0 or less: met."""
        assert self.measured is not None
        ratio = self.measured / self.wanted
        return ratio - 1 if self.metric.less_is_better else 1 - ratio


def read_targets() -> list[Target]:
    found = []
    for group in tomllib.loads((BENCHMARKS / "targets.toml").read_text()).values():
        files = group.get("files", ["h200"])
        for file in files:
            path = BENCHMARKS / "results" / f"{file}.json"
            rows = {row["workload"]: row for row in json.loads(path.read_text())["rows"]}
            for name in METRICS.keys() & group.keys():
                metric = METRICS[name]
                for pattern, wanted in group[name].items():
                    fitting = [rows[workload] for workload in fnmatch.filter(rows, pattern)]
                    worst = max if metric.less_is_better else min
                    measured = worst((metric.value(row, rows) for row in fitting), default=None)
                    peer = beside(fitting[0]) if fitting else ""
                    label = pattern if len(files) == 1 else f"{pattern} ({file})"
                    found.append(Target(label, metric, wanted, measured, peer, group["why"]))
    return found


def beside(row: Row) -> str:
    peers = row["peers"]
    best = min(peers, key=peers.get, default=None)
    return "" if best is None else f"{row['median_us'] / peers[best]:.2f} x {best}"


def table() -> str:
    """Returns the missed targets, ordered as in targets.toml, then the names of met ones."""
    targets = read_targets()
    missing = [t.workload for t in targets if t.measured is None]
    known = [t for t in targets if t.measured is not None]
    short = [t for t in known if t.shortfall > 0]
    lines = [
        f"{len(known) - len(short)} of {len(known)} targets are met by the record in `results/`.",
        "",
        "| short of its target | target | measured | by | time beside the best peer | why |",
        "| --- | ---: | ---: | ---: | --- | --- |",
    ]
    for t in short:
        lines.append(
            f"| {t.workload} | {number(t.wanted)} {t.metric.unit} | {number(t.measured)} |"
            f" {t.shortfall:.1%} | {t.peer} | [{t.why.replace('-', ' ')}](#{t.why}) |"
        )
    lines += ["", "<details><summary>Met: measured, target</summary>", ""]
    lines += [
        f"- {t.workload}: {number(t.measured)}, {number(t.wanted)} {t.metric.unit}"
        for t in known
        if t.shortfall <= 0
    ]
    lines += ["", "</details>"]
    if missing:
        lines += ["", f"Not in this record: {', '.join(missing)}."]
    return "\n".join(lines)


def number(value: float | None) -> str:
    assert value is not None
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
