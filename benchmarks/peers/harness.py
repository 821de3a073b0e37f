"""Shared by the peers: arguments, output, and timing of torch code with CUDA graphs."""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Callable
from typing import Any

from benchmarks import bursts, random_workloads
from benchmarks.bursts import Timing
from benchmarks.workloads import Workload, load

ROTATE_BYTES = 256 << 20  # as in ops.py: alternating data sets are larger than the cache


class Peer:
    """The process of a peer: its selected workloads and its output."""

    def __init__(self, **flags: str) -> None:
        """Parses arguments. flags: name of a further on/off option -> its help."""
        parser = argparse.ArgumentParser()
        parser.add_argument("--select", default="", help="workload ids, comma separated")
        parser.add_argument("--shrink", type=int, default=1, help="divides all lengths")
        parser.add_argument("--random", type=int, default=0, help="so many drawn workloads")
        parser.add_argument("--seed", type=int, default=0, help="of --random")
        parser.add_argument("--budget", type=float, default=300, help="seconds for measuring")
        for name, text in flags.items():
            parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=text)
        self.arguments = parser.parse_args()
        self._begin = time.perf_counter()

    def workloads(self, *kinds: str) -> list[Workload]:
        a = self.arguments
        select = [name for name in a.select.split(",") if name]
        if a.random:
            drawn = random_workloads.draw(a.random, a.seed, select, a.shrink)
            return [w for w in drawn if not kinds or w.kind in kinds]
        every = load(select, kinds, a.shrink)
        return [w for w in every if w.kv_dtype == "bf16"]  # peers are measured in bf16 only

    def require(self, module: str) -> Any:
        """Imports the peer's package. If that fails, prints one line and exits."""
        try:
            return importlib.import_module(module)
        except Exception as error:
            self.report(workload="every row", peer=module, error=_sentence(error))
            raise SystemExit(0) from None

    def report(self, **fields: Any) -> None:
        print(json.dumps(fields), flush=True)

    def measure(self, workload: str, peer: str, take: Callable[[], Timing]) -> bool:
        """Measures; returns whether it worked. An unsupported workload prints a line, no more."""
        if time.perf_counter() - self._begin > self.arguments.budget:
            self.report(workload=workload, peer=peer, error="no time left")
            return False
        try:
            timing = take()
            more = {} if timing.sustained_us is None else {"sustained_us": timing.sustained_us}
            self.report(workload=workload, peer=peer, us=timing.us, **more)
            return True
        except Exception as error:
            self.report(workload=workload, peer=peer, error=_sentence(error))
            return False


def _sentence(error: Exception) -> str:
    words = [word.rpartition("/")[2] for word in str(error).split()]  # no paths
    return f"{type(error).__name__}: {' '.join(words)[:200]}"


def is_dense(workload: Workload) -> bool:
    """Whether a call on [batch, len, heads, head_dim] computes the workload: equal lengths, and one
    query or as many queries as keys. With fewer queries, "causal" of such calls is not the
    bottom-right mask."""
    w = workload
    if len(set(w.kv_lens)) > 1 or len(set(w.qo_lens)) > 1:
        return False
    if w.kind == "decode":
        return w.qo_lens[0] == 1
    return w.page_size is None and w.qo_lens[0] == w.kv_lens[0]


def num_sets(workload: Workload) -> int:
    return max(2, min(64, -(-ROTATE_BYTES // max(workload.kv_bytes, 1))))


def time_graph(run: Callable[[int], Any], expected_us: float, *, sustained: bool = False) -> Timing:
    """Returns the device time of run(i), the i-th call in a CUDA graph; i selects its data set.

    The protocol is ours: a graph of n calls and one of 2n, so the launch cost cancels, with the
    same rests. Times come from CUDA events.
    """
    import torch

    num_calls = max(2, min(160, round(bursts.TARGET_US / max(expected_us, 1.0))))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graphs = []
    with torch.cuda.stream(stream):
        run(0)  # warm: modules load, workspaces grow
        run(1)
        torch.cuda.synchronize()
        for count in (num_calls, 2 * num_calls):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for i in range(count):
                    run(i)
            graphs.append(graph)

    def replay_us(graph: Any) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return 1e3 * begin.elapsed_time(end)

    for graph in graphs * 2:
        replay_us(graph)
    short, long = graphs
    return bursts.measure(
        lambda: replay_us(short), lambda: replay_us(long), num_calls, sustained=sustained
    )


def expected_us(workload: Workload) -> float:
    """Returns a rough estimate, for choosing the length of a chain."""
    return workload.floor_us(4e6, 4e8) + 5
