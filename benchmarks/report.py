"""Result rows, the table on stdout and the file in results/."""

from __future__ import annotations

import dataclasses
import datetime
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import jax

from benchmarks.digest import sources_digest
from benchmarks.workloads import Workload

RESULTS = Path(__file__).with_name("results")
_BEGIN = time.perf_counter()


def log(message: str) -> None:
    print(f"[{time.perf_counter() - _BEGIN:6.1f} s] {message}", flush=True)


def elapsed_s() -> float:
    return time.perf_counter() - _BEGIN


@dataclasses.dataclass
class Ceilings:
    """Measured ceilings of the device in this run: bytes and operations per microsecond."""

    bytes_per_us: float
    flops_per_us: float


@dataclasses.dataclass
class Row:
    """One measurement. `more`: further fields, with the unit in the name."""

    workload: str
    median_us: float
    bytes: float = 0  # for the rate: K and V only for attention, by convention
    flops: float = 0
    min_bytes: float = 0  # for the floor: each input read once, each output written once
    peers: dict[str, float] = dataclasses.field(default_factory=dict)
    sustained_us: float | None = None  # without rests, if power is a limit (bursts.py)
    peers_sustained: dict[str, float] = dataclasses.field(default_factory=dict)
    anchor_us: float | None = None
    parts_floor_us: float | None = None  # for a sequence of parts: sum of floors
    more: dict[str, Any] = dataclasses.field(default_factory=dict)

    def floor_us(self, ceilings: Ceilings) -> float | None:
        """Returns the floor; None if nothing is moved or multiplied, as in a compilation."""
        if self.parts_floor_us is not None:
            return self.parts_floor_us
        us = max(self.min_bytes / ceilings.bytes_per_us, self.flops / ceilings.flops_per_us)
        return us or None

    def to_json(self, ceilings: Ceilings) -> dict[str, Any]:
        floor_us = self.floor_us(ceilings)
        return {
            "workload": self.workload,
            "median_us": round(self.median_us, 2),
            "floor_us": None if floor_us is None else round(floor_us, 2),
            "gbps": round(self.bytes / self.median_us / 1e3, 1),
            "tflops": round(self.flops / self.median_us / 1e6, 1),
            "peers": {name: round(us, 2) for name, us in self.peers.items()},
            **self._sustained(),
            **self.more,
        }

    def _sustained(self) -> dict[str, Any]:
        if self.sustained_us is None:
            return {}
        peers = {name: round(us, 2) for name, us in self.peers_sustained.items()}
        return {"sustained_us": round(self.sustained_us, 2), "peers_sustained": peers}


def workload_row(workload: Workload, us: float, **more: Any) -> Row:
    return Row(
        workload=workload.id,
        median_us=us,
        bytes=workload.kv_bytes or workload.bytes,
        flops=workload.flops,
        min_bytes=workload.bytes,
        anchor_us=workload.anchor_us,
        more=more,
    )


def table(rows: list[Row], ceilings: Ceilings) -> str:
    """Returns one line per row: ours, the floor, their ratio, the rate, this run's best peer."""
    head = ("workload", "ours us", "floor", "% floor", "GB/s", "TFLOP/s", "best peer", "peer/ours")
    lines = [head]
    for row in rows:
        us, floor = row.median_us, row.floor_us(ceilings)
        peer, peer_us = min(row.peers.items(), key=lambda p: p[1], default=("", None))
        if peer_us is None and row.anchor_us is not None:
            peer, peer_us = "(anchor)", row.anchor_us
        lines.append(
            (
                row.workload,
                f"{us:.1f}",
                "" if floor is None else f"{floor:.1f}",
                "" if floor is None else f"{100 * floor / us:.0f}",
                f"{row.bytes / us / 1e3:.0f}" if row.bytes else "",
                f"{row.flops / us / 1e6:.0f}" if row.flops > 1e6 * us else "",
                "" if peer_us is None else f"{peer_us:.1f} {peer}",
                "" if peer_us is None else f"{peer_us / us:.2f}",
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i in (0, 6) else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def best_peer_ratios(rows: list[Row]) -> dict[str, float]:
    """Returns the best peer's time over ours, for each row with a peer."""
    return {row.workload: min(row.peers.values()) / row.median_us for row in rows if row.peers}


def device_name() -> str:
    """`NVIDIA H200` -> `h200`."""
    kind = jax.local_devices()[0].device_kind.lower()
    return kind.removeprefix("nvidia ").replace(" ", "-")


def driver_version() -> str | None:
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def write(path: Path, rows: list[Row], ceilings: Ceilings, **more: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {
        "device": device_name(),
        "driver": driver_version(),
        "jax": jax.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "sources_digest": sources_digest(jax.local_devices()[0].platform),
        **more,
    }
    write_json(path, head | {"rows": [row.to_json(ceilings) for row in rows]})


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Writes a results file, one row per line."""
    fields = [f' "{name}": {json.dumps(value)}' for name, value in result.items() if name != "rows"]
    lines = ",\n".join("  " + json.dumps(row) for row in result["rows"])
    path.write_text("{\n" + ",\n".join(fields) + ',\n "rows": [\n' + lines + "\n ]\n}\n")
