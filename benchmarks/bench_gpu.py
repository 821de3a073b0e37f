"""GPU benchmarks: ours, the peers and the device's ceilings, measured in one run.

    python -m benchmarks.bench_gpu            every workload, peers, -> results/<device>.json
    python -m benchmarks.bench_gpu --quick    six workloads, no peers, no file: for tuning
    python -m benchmarks.bench_gpu --random 40 --seed 1
                                              40 drawn workloads (random_workloads.py), peers, and
                                              the distribution of best peer / ours
timing.py defines how a time is taken, ops.py the chains. docs/notes/ has the expected results.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

QUICK = (
    "decode/64x4096",
    "decode/128x2048",
    "decode/64xzipf",
    "decode/8x1024",
    "mixed/128x1@2048+4x512@4096",
    "prefill/4x4096/16/d128/causal",
)
PEERS = {  # in the order they are measured: the fastest ones before the budget ends
    "flashinfer": "flashinfer_attention",
    "torch": "torch_attention",
    "jax": "jax_attention",
    "fa4": "fa4_attention",
    "ejkernel": "ejkernel_attention",
}
SHRINK = 64  # --tiny


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_gpu",
        description=__doc__.splitlines()[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="six workloads, no peers, no result file; < 60 s")
    add("--select", default="", help='workload ids, comma separated; "decode/*" is a prefix')
    add("--random", type=int, default=0, metavar="N", help="N drawn workloads instead of the list")
    add("--seed", type=int, default=0, help="of --random")
    add(
        "--variant",
        action="append",
        default=[],
        metavar="FIELD=VALUE,...",
        help="fields of AttentionSpec or of the kernel configuration to override; may be repeated:"
        " each variant is measured on the same data, as workload#variant. '' is the default one",
    )
    add("--peers", default=None, help="comma separated peers, or none; default: all (quick: none)")
    add("--steps", action=argparse.BooleanOptionalAction, help="decode steps (default: not quick)")
    add("--compile-for", default=None, help="measure compile times for this target, e.g. sm_90")
    add("--check", action=argparse.BooleanOptionalAction, default=True, help="compare with f32")
    add("--budget", type=float, default=540, help="seconds after which nothing new starts")
    add("--out", type=Path, default=None, help="result file instead of results/<device>.json")
    add("--tiny", action="store_true", help="lengths / 64: tries the script on any machine")
    add("--platform", choices=("cpu", "gpu"), default=None, help="what jax runs on")
    return parser.parse_args()


ARGUMENTS = parse_arguments() if __name__ == "__main__" else None
if ARGUMENTS is not None:
    # Set before jax is imported. The peers' processes share the memory. The kernel cache is empty,
    # so a run measures a fresh machine.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if ARGUMENTS.platform == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
    _cache = tempfile.TemporaryDirectory(prefix="jax_attn_bench_")
    os.environ["JAX_ATTN_CACHE_DIR"] = _cache.name

import jax  # noqa: E402

from benchmarks import (  # noqa: E402
    compile_time,
    decode_step,
    ops,
    random_workloads,
    report,
    timing,
    workloads,
)
from benchmarks.bench import Bench  # noqa: E402
from benchmarks.bursts import Timing  # noqa: E402
from benchmarks.report import Row, log  # noqa: E402
from jax_attn import _core  # noqa: E402


class GpuBench(Bench):
    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments)
        self.missing_peers: list[str] = []
        self.data: ops.AttentionData | None = None
        self.build_log = tempfile.TemporaryFile("w+")
        self.variants = [ops.parse_variant(text) for text in arguments.variant or [""]]
        select = [name for name in arguments.select.split(",") if name]
        quick = QUICK if arguments.quick and not select else ()
        shrink = SHRINK if arguments.tiny else 1
        self.workloads = (
            random_workloads.draw(arguments.random, arguments.seed, select, shrink)
            if arguments.random
            else workloads.load(select or quick, shrink=shrink)
        )
        peers = arguments.peers
        if peers is None:
            peers = "" if arguments.quick else ",".join(PEERS)
        self.peers = [name for name in peers.split(",") if name and name != "none"]
        if unknown := set(self.peers) - PEERS.keys():
            raise SystemExit(f"--peers: {sorted(unknown)}: known are {sorted(PEERS)}")

    def run(self) -> None:
        a = self.arguments
        kind = jax.devices()[0].device_kind
        log(f"{kind}, driver {report.driver_version()}, jax {jax.__version__}")
        if not a.quick or a.compile_for:
            self.guard("compile times", self.compile_times)
        plans = [w for w in self.workloads if w.kind == "plan"]
        for workload in plans:  # first, because the peers' compilers load the host for minutes
            self.guard(workload.id, lambda w=workload: self.measure_plan(w))
        build = self.start_build()
        self.guard("ceilings", self.measure_ceilings)
        steps = not a.quick if a.steps is None else a.steps
        for workload in (w for w in self.workloads if w not in plans):
            if report.elapsed_s() > a.budget:
                self.fail("budget", f"{a.budget} s are over before {workload.id}")
                break
            if workload.kind == "step" and not steps:
                continue
            variants = self.variants if workload.kind in workloads.ATTENTION_KINDS else [{}]
            for variant in variants:
                self.guard(workload.id, lambda w=workload, v=variant: self.measure(w, v))
        log(f"kernels: {_core.jit_stats()}")
        self.guard("peers", lambda: self.collect_peers(build))

    def miss(self, peer: str, message: str) -> None:
        """Notes a peer that is missing or did not finish. This is not a failure of ours."""
        self.missing_peers.append(f"{peer}: {message}")
        log(f"MISSING {peer}: {message}")

    # ---- parts ---------------------------------------------------------------------------------

    def compile_times(self) -> None:
        target = self.arguments.compile_for or (None if ops.on_gpu() else "")
        if target == "":
            return
        chosen = [w for w in self.workloads if w.kind in workloads.ATTENTION_KINDS]
        specs = {ops.make_spec(w, {}, target=target) for w in chosen}
        kernels, second = compile_time.measure(list(specs), Path(os.environ["JAX_ATTN_CACHE_DIR"]))
        for kernel in kernels:
            more = {
                "origin": kernel["origin"],
                "cubin_bytes": kernel["cubin_bytes"],
                "compiled_in_second_process": second["compiled"],
            }
            row = Row(f"compile/{kernel['name']}", 1e3 * kernel["processor_ms"], more=more)
            self.rows.append(row)
            log(f"{row.workload}: {kernel['processor_ms']:.0f} ms, {kernel['origin']}")
        log(f"second process: {second['compiled']} compiled, {second['disk_hits']} from disk")

    def measure(self, workload: workloads.Workload, variant: dict[str, Any]) -> None:
        if workload.kind == "merge":
            chain = timing.time_chain(ops.merge_chain(workload), 8 if ops.on_gpu() else 2)
            self.add(workload, variant, chain)
            return
        if workload.kind == "backward":
            self.add(workload, variant, self.time_backward(workload))
            if workload.shared_len:
                whole = self.time_backward(workload.unshared())
                self.rows[-1].peers["ours, not shared"] = whole.us
                log(f"{workload.id}: {whole.us:.2f} us, not shared")
            return
        spec = ops.make_spec(workload, variant)
        plan = ops.make_plan(workload, spec)
        if workload.kind == "append":
            chain = timing.time_chain(ops.append_chain(workload, spec, plan), self.append_calls())
            self.add(workload, variant, chain)
        elif workload.kind == "step":
            layer_us = self.layer_us(workload)
            for row in decode_step.bench_step(workload, spec, plan, layer_us):
                self.rows.append(row)
        else:
            self.measure_attention(workload, variant, spec, plan)

    def time_backward(self, workload: workloads.Workload) -> Timing:
        plan = ops.make_plan(workload, ops.make_spec(workload, {}))
        num_calls = ops.attention_chain_length(workload)
        chain = ops.backward_chain(workload, plan, num_calls)
        return timing.time_chain(chain, num_calls, sustained=workload.sustained)

    def measure_plan(self, workload: workloads.Workload) -> None:
        spec = ops.make_spec(workload, {})
        # A tenth of a second, so that first-time costs of a process do not affect the median.
        us = ops.plan_us(workload, spec, repeats=2001)
        self.rows.append(Row(workload.id, round(us, 1)))
        log(f"{workload.id}: {us:.1f} us on the host")
        if not ops.on_gpu():
            return
        chain = timing.time_chain(ops.plan_chain(workload, spec, plans=True), 32)
        link = timing.time_chain(ops.plan_chain(workload, spec, plans=False), 32)
        more = {"spread_us": round(chain.spread, 2), "link_us": round(link.us, 2)}
        self.rows.append(Row(f"{workload.id}/device", round(chain.us - link.us, 2), more=more))
        log(f"{workload.id}: {chain.us - link.us:.1f} us on the device, {more}")

    def measure_attention(
        self, workload: workloads.Workload, variant: dict[str, Any], spec: Any, plan: Any
    ) -> None:
        data = self.data_of(workload)
        make_chain = ops.attention_chain(data, spec, plan)
        once = make_chain(1)
        more: dict[str, Any] = {}
        if self.arguments.check:
            more["error"] = float(f"{ops.relative_error(data, _first(once())):.2e}")
        num_calls = ops.attention_chain_length(workload)
        chain = timing.time_chain(make_chain, num_calls, sustained=workload.sustained)
        more["single_call_us"] = round(timing.median_us(once), 1)
        more["plan_host_us"] = round(ops.plan_us(workload, spec), 1)
        if not more.get("error", 0) < workload.max_error:
            self.fail(workload.id, f"wrong result: relative error {more['error']}")
        self.add(workload, variant, chain, **more)

    def data_of(self, workload: workloads.Workload) -> ops.AttentionData:
        """Returns the inputs of a workload, cached while its variants are measured."""
        if self.data is None or self.data.workload != workload:
            self.data = None  # frees the last one's gigabytes first
            self.data = ops.make_data(workload)
        return self.data

    def append_calls(self) -> int:
        return 32 if ops.on_gpu() else 2

    def layer_us(self, workload: workloads.Workload) -> float | None:
        """Returns attention plus append time of one layer, each from its own chain."""
        spec = ops.make_spec(workload, {})
        plan = ops.make_plan(workload, spec)
        num_calls = 32 if ops.on_gpu() else 2
        attention = ops.attention_chain(ops.make_data(workload), spec, plan)
        append = ops.append_chain(workload, spec, plan)
        attention_us = timing.time_chain(attention, num_calls).us
        append_us = timing.time_chain(append, num_calls).us
        log(f"{workload.id}: attention {attention_us:.2f} us, append {append_us:.2f} us a layer")
        return attention_us + append_us

    def add(
        self, workload: workloads.Workload, variant: dict[str, Any], chain: Timing, **more: Any
    ) -> None:
        us, more = chain.us, {"spread_us": round(chain.spread, 2), **more}
        row = report.workload_row(workload, us, **more)
        row.sustained_us = chain.sustained_us
        if variant:
            row.workload += "#" + ",".join(f"{k}={v}" for k, v in variant.items())
        self.rows.append(row)
        rate = f"{row.bytes / us / 1e3:.0f} GB/s" + (
            f", {row.flops / us / 1e6:.0f} TFLOP/s" if row.flops > us * 1e6 else ""
        )
        if chain.sustained_us is not None:
            rate += f", sustained {chain.sustained_us:.2f} us"
        log(f"{row.workload}: {us:.2f} us, floor {row.floor_us(self.ceilings):.1f}, {rate}, {more}")

    # ---- peers ---------------------------------------------------------------------------------

    def start_build(self) -> subprocess.Popen[Any] | None:
        """Starts FlashInfer's nvcc build, which runs while ours are measured; it needs no GPU."""
        if "flashinfer" not in self.peers or not ops.on_gpu():
            return None
        return _start_peer("flashinfer", ["--build-only"], self.build_log)

    def collect_peers(self, build: subprocess.Popen[Any] | None) -> None:
        """Measures each peer alone on the device, in its own process."""
        self.data = None
        a = self.arguments
        names = ",".join(workload.id for workload in self.workloads)
        for name in self.peers:
            left = self.arguments.budget - report.elapsed_s()
            if name == "flashinfer" and build is not None:
                try:
                    build.wait(max(left - 30, 1))
                except subprocess.TimeoutExpired:
                    build.kill()
                self.build_log.seek(0)
                log(f"{name} build: " + " ".join(self.build_log.read().split())[-600:])
                left = self.arguments.budget - report.elapsed_s()
            if left < 20 or (build is not None and build.poll()):
                self.miss(name, "no time left" if left < 20 else "its modules did not build")
                continue
            options = ["--select", names, "--budget", f"{left - 15:.0f}"]
            if a.tiny:
                options += ["--shrink", str(SHRINK)]
            if a.random:
                options += ["--random", str(a.random), "--seed", str(a.seed)]
            self.read_peer(name, _start_peer(name, options), left)
        read = [row for row in self.rows if row.workload == "ceiling/read"]
        if read and read[0].peers:  # floors use the fastest read bandwidth
            best_us = min(read[0].median_us, *read[0].peers.values())
            self.ceilings.bytes_per_us = read[0].bytes / best_us

    def read_peer(self, name: str, process: subprocess.Popen[Any], timeout_s: float) -> None:
        timer = threading.Timer(max(timeout_s, 1), process.kill)
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            found = json.loads(line) if line.startswith("{") else {"note": line.strip()[:300]}
            log(
                f"{name}: "
                + ", ".join(f"{k} {v:.1f}" if isinstance(v, float) else v for k, v in found.items())
            )
            if "error" in found:
                self.missing_peers.append(f"{found['peer']}, {found['workload']}: {found['error']}")
            for row in self.rows:
                if "us" in found and row.workload.split("#")[0] == found["workload"]:
                    row.peers[found["peer"]] = found["us"]
                    if "sustained_us" in found:
                        row.peers_sustained[found["peer"]] = found["sustained_us"]
        timer.cancel()
        if process.wait():
            self.miss(name, f"ended with {process.returncode}")

    # ---- the end -------------------------------------------------------------------------------

    def write(self) -> None:
        a = self.arguments
        path = a.out or report.RESULTS / f"{report.device_name()}.json"
        if a.random:
            print(random_workloads.distribution(report.best_peer_ratios(self.rows)))
        if a.out or not (a.quick or a.tiny or a.select or a.variant or a.random):
            more = {"failures": self.failures, "missing_peers": self.missing_peers}
            report.write(path, self.rows, self.ceilings, **more)
            log(f"wrote {path}")


def _start_peer(name: str, options: list[str], output: Any = None) -> subprocess.Popen[Any]:
    command = [sys.executable, "-m", f"benchmarks.peers.{PEERS[name]}", *options]
    pipe = subprocess.PIPE if output is None else output
    return subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, bufsize=1)


def _first(o: Any) -> Any:
    return o[0] if isinstance(o, list) else o


if __name__ == "__main__":
    assert ARGUMENTS is not None
    sys.exit(GpuBench(ARGUMENTS).main())
