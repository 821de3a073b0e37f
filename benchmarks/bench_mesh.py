"""Models, keys and sequences over the GPUs of one host, compared with one GPU in the same run.

    python -m benchmarks.bench_mesh                          -> results/<device>-x<number>.json
    python -m benchmarks.bench_mesh --select kv,exchange     those rows only, no file
    python -m benchmarks.bench_mesh --tiny --platform cpu    small shapes: tries the script

Each row names its number of devices N. `of_linear` is the time of one device divided by N times the
time of N devices. Calls are dispatched back to back without waiting, as in a server or a training
loop, and timed by the host's clock around many of them. `collectives` and `collective_bytes` are
per call (per layer, if a call is one layer), from its compiled HLO. `collective_us` comes from a
profile; `hidden_us` is the part of it in which the same device also computes.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PARTS = ("exchange", "kv", "sequence/65536", "heads", "sequence/262144")
SHRINK = 256  # --tiny
MODEL_ERROR = 5e-2  # of logits: 32 layers, whose sums are rounded to bf16 at other points
LAYERS_A_CHAIN = 16  # kv rows: layers that share the host's cost of a call
BUSY_S = 0.1  # length of a round
ROUNDS = 7


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_mesh",
        description=__doc__.splitlines()[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--devices", type=int, default=None, help="how many; default: all (--platform cpu: 2)")
    add("--select", default="", help=f"parts, comma separated, of {', '.join(PARTS)}")
    add("--budget", type=float, default=540, help="seconds after which nothing new starts")
    add("--out", type=Path, default=None, help="result file instead of results/<device>-xN.json")
    add("--tiny", action="store_true", help="lengths / 256: tries the script on any machine")
    add("--platform", choices=("cpu", "gpu"), default=None, help="what jax runs on")
    return parser.parse_args()


ARGUMENTS = parse_arguments() if __name__ == "__main__" else None
if ARGUMENTS is not None:
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # no multicast, which needs extra privileges
    if ARGUMENTS.platform == "cpu":
        count = f"--xla_force_host_platform_device_count={ARGUMENTS.devices or 2}"
        os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": count}

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402

import jax_attn as ja  # noqa: E402
from benchmarks import device_trace, ops, report  # noqa: E402
from benchmarks.bench import Bench  # noqa: E402
from benchmarks.collectives import executed  # noqa: E402
from benchmarks.report import Row, log  # noqa: E402
from benchmarks.shapes import SHAPES  # noqa: E402
from jax_attn import models, parallel  # noqa: E402
from jax_attn.parallel import kv_shards  # noqa: E402

EVERYWHERE = PartitionSpec()


@dataclasses.dataclass(frozen=True)
class Call:
    """A compiled function and the arrays for repeated calls.

    donated: indices of the donated arrays. The function's last results replace them.
    """

    compiled: Any
    arrays: list[Any]
    donated: tuple[int, ...] = ()

    def __call__(self) -> Any:
        """Calls and returns the results, except those that replace donated arrays."""
        results = self.compiled(*self.arrays)
        if not self.donated:
            return results
        (*results,) = results
        for position in reversed(self.donated):
            self.arrays[position] = results.pop()
        return results


def compile_call(function: Any, *arrays: Any, donated: tuple[int, ...] = ()) -> Call:
    jitted = jax.jit(function, donate_argnums=donated)
    return Call(jitted.lower(*arrays).compile(), list(arrays), donated)


def steady_us(call: Callable[[], Any]) -> tuple[float, float]:
    """Returns median and interquartile range, over rounds, of the time of one of many calls."""

    def round_s(count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            last = call()
            if not ops.on_gpu():  # collectives of several runs would block each other's threads
                jax.block_until_ready(last)
        jax.block_until_ready(last)
        return time.perf_counter() - begin

    round_s(1)  # loads the kernels, captures graphs
    once = round_s(1)
    count = max(1, min(64, round(BUSY_S / once)))
    if count > 1:
        round_s(count)
    times = [1e6 * round_s(count) / count for _ in range(ROUNDS if count > 1 else 3)]
    low, middle, high = statistics.quantiles(times, n=4)
    return middle, high - low


def communication(call: Call, num_layers: int = 1) -> dict[str, Any]:
    """Returns the collectives of one layer and their bytes."""
    found = executed(call.compiled.as_text())
    kinds: collections.Counter[str] = collections.Counter()
    for (kind, _), count in found.items():
        kinds[kind] += count
    return {
        "collectives": {kind: round(n / num_layers, 2) for kind, n in sorted(kinds.items())},
        "collective_bytes": sum(size * n for (_, size), n in found.items()) // num_layers,
    }


def overlap(call: Callable[[], Any]) -> dict[str, Any]:
    """Returns the time of one call's collectives on the first GPU, and the hidden part of it."""
    if not ops.on_gpu():
        return {}
    events = device_trace.record_events(lambda: jax.block_until_ready([call() for _ in range(3)]))
    sends = [x for x in events if "nccl" in x.name.lower() or "P2P" in x.name]
    works = [x for x in events if x not in sends]
    for x in events[-40:]:
        kind = "send" if x in sends else "work"
        begin = x.begin_us - events[0].begin_us
        log(f"profile: {begin:9.1f} + {x.end_us - x.begin_us:8.1f} us {kind} {x.name[:70]}")
    both = device_trace.covered_us(sends) + device_trace.covered_us(works)
    hidden = both - device_trace.covered_us(events)
    fields = {"collective_us": device_trace.covered_us(sends), "hidden_us": hidden,
              "work_us": device_trace.covered_us(works),
              "span_us": events[-1].end_us - events[0].begin_us}  # fmt: skip
    return {f"profile_{name}": round(us / 3, 1) for name, us in fields.items()}


@jax.jit
def _bits_differ(a: Any, b: Any) -> Any:
    words = {2: jnp.uint16, 4: jnp.uint32}[a.dtype.itemsize]
    a, b = (jax.lax.bitcast_convert_type(x, words) for x in (a, b))
    return (a != b).any()


@jax.jit
def _relative_error(got: Any, want: Any) -> Any:
    got, want = (x.astype(jnp.float32) for x in (got, want))
    return jnp.linalg.norm((got - want).reshape(-1)) / jnp.linalg.norm(want.reshape(-1))


class MeshBench(Bench):
    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments)
        self.size = arguments.devices or len(jax.devices())
        if not 2 <= self.size <= len(jax.devices()):
            raise SystemExit(
                f"--devices: expected 2 to {len(jax.devices())}, the devices there are, got"
                f" {self.size}."
            )
        self.shrink = SHRINK if arguments.tiny else 1
        self.selected = [x for x in arguments.select.split(",") if x]
        if unknown := set(self.selected) - set(PARTS):
            raise SystemExit(f"--select: expected parts of {', '.join(PARTS)}, got {unknown}.")
        self.mesh = jax.make_mesh(
            (self.size,), ("x",), devices=jax.devices()[: self.size], axis_types=(AxisType.Auto,)
        )
        self.target = None if ops.on_gpu() else "cpu"

    def run(self) -> None:
        log(f"{self.size} x {jax.devices()[0].device_kind}, jax {jax.__version__}")
        self.guard("ceilings", self.measure_ceilings)
        for part in PARTS:
            if self.selected and part not in self.selected:
                continue
            name, _, tokens = part.partition("/")
            method = getattr(self, f"measure_{name}")
            self.guard(part, lambda m=method, t=tokens: m(int(t) // self.shrink) if t else m())

    def is_over(self, what: str) -> bool:
        over = report.elapsed_s() > self.arguments.budget
        if over:
            self.fail("budget", f"{self.arguments.budget} s are over before {what}")
        return over

    def put(self, array: Any, spec: PartitionSpec) -> Any:
        return jax.device_put(array, NamedSharding(self.mesh, spec))

    def mapped(self, function: Any, in_specs: Any, out_specs: Any) -> Any:
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def add(
        self, name: str, size: int, call: Callable[[], Any], calls: int = 1, **fields: Any
    ) -> Row:
        """Adds the row `name/xN`. bytes, flops: per device. calls: measured calls in one `call`."""
        us, spread = steady_us(call)
        more = fields.pop("more", {})
        row = Row(f"{name}/x{size}", us / calls, more={"spread_us": round(spread / calls, 2)})
        row = dataclasses.replace(row, **fields, more=row.more | more)
        one = [x.median_us for x in self.rows if x.workload == f"{name.split('@')[0]}/x1"]
        if size > 1 and one:
            row.more["of_linear"] = round(one[0] / (size * row.median_us), 3)
        self.rows.append(row)
        log(f"{row.workload}: {row.median_us:.1f} us, {row.more}")
        return row

    def check(
        self, name: str, call: Callable[[], Any], want: Any, most: float = 1e-2
    ) -> dict[str, Any]:
        """Checks that repeats are bit-equal, and bounds the error relative to one device."""
        got, again = (jax.tree.leaves(jax.block_until_ready(call())) for _ in range(2))
        if any(_bits_differ(*pair) for pair in zip(got, again, strict=True)):
            self.fail(name, "two runs gave different bits")
        del again
        errors = [
            float(f"{_relative_error(x, jax.device_put(w, x.sharding)):.2e}")
            for x, w in zip(got, jax.tree.leaves(want), strict=True)
        ]
        if not max(errors) < most:
            self.fail(name, f"wrong result: relative errors {errors} to one device")
        return {"error": max(errors)}

    # ---- keys ----------------------------------------------------------------------------------

    def measure_exchange(self) -> None:
        """Measures the all-gather or all-to-all of states, and their merge, for one layer."""
        for rows, heads, width in ((1, 32, 128), (8, 32, 128), (1, 128, 512)):
            o = self.put(*ops.normal((rows, heads, width)), EVERYWHERE)
            for scatter in (None, "heads"):

                def chain(o: Any, heads: int = heads, scatter: Any = scatter) -> Any:
                    lse = jnp.zeros(o.shape[:2], jnp.float32)
                    for _ in range(LAYERS_A_CHAIN):
                        part, _ = kv_shards._merge_over("x", self.size, scatter, o, lse)
                        repeats = heads // part.shape[1]
                        o = jnp.tile(part, (1, repeats, 1))
                    return o

                call = compile_call(self.mapped(chain, EVERYWHERE, EVERYWHERE), o)
                name = f"exchange/{rows}x{heads}x{width}/{scatter or 'all'}"
                more = communication(call, LAYERS_A_CHAIN)
                self.add(name, self.size, call, LAYERS_A_CHAIN, more=more)

    def measure_kv(self) -> None:
        for batch, context, shape in (
            (1, 1 << 20, (32, 8, 128, 128)),
            (8, 1 << 17, (32, 8, 128, 128)),
            (1, 1 << 19, (128, 1, 576, 512)),
        ):
            kind = "mla" if shape[1] == 1 else f"{shape[0]}-{shape[1]}"
            name = f"kv/{batch}x{context}/{kind}"
            if not self.is_over(name):
                self.guard(
                    name,
                    lambda n=name, b=batch, c=context, s=shape: self.measure_keys(
                        n, b, c // self.shrink, *s
                    ),
                )

    def measure_keys(
        self, name: str, batch: int, context: int, heads: int, kv_heads: int, width: int, out: int
    ) -> None:
        """Measures decodes of a layer: all keys on one device, and KV shards."""
        size, is_mla = self.size, kv_heads == 1
        pages_each = context // (64 * size)
        num_pages = batch * pages_each
        fields: dict[str, Any] = {"max_batch": batch, "max_qo_tokens": batch}
        if is_mla:
            fields |= {"mla": True, "sm_scale": ops.MLA_SCALE}
        large = np.random.default_rng(0).permutation(num_pages)
        small = (large[:, None] * size + np.arange(size)).reshape(-1)
        indptr = np.arange(batch + 1)
        lens = np.full(batch, context)

        def spec(page_size: int, pages: int) -> Any:
            return ja.AttentionSpec(
                heads, kv_heads, width, out, page_size=page_size, max_kv_pages=pages,
                num_pages=pages, target=self.target, **fields,
            )  # fmt: skip

        (q,) = ops.normal((batch, heads, width))
        keys = ops.normal((num_pages * size, 64, kv_heads, width), 1 if is_mla else 2, seed=1)
        num_bytes = sum(x.nbytes for x in keys)

        def chain(attend: Any, q: Any, keys: Any, plan: Any) -> Any:
            for _ in range(LAYERS_A_CHAIN):
                o = attend(q, *keys, *[None] * (2 - len(keys)), plan)
                q = jnp.concatenate([o, q[..., out:]], axis=-1) if out < width else o
            return o

        one = spec(64, num_pages * size)
        plan = ja.plan(one, indptr, lens, indptr * pages_each * size, small)
        plan = dataclasses.replace(plan, buffer=jax.device_put(plan.buffer))
        once = jax.jit(ja.attention)(q, *keys, *[None] * (2 - len(keys)), plan)
        call = compile_call(lambda *x: chain(ja.attention, *x), q, keys, plan)
        self.add(name, 1, call, LAYERS_A_CHAIN, bytes=num_bytes, min_bytes=num_bytes)

        kv_shards = parallel.KvShards(spec(64 * size, num_pages), "x", size)
        striped = kv_shards.pages_spec(is_stacked=False)
        whole = [x.reshape(num_pages, -1, *x.shape[2:]) for x in keys]
        arrays = [self.put(x, striped) for x in whole]
        del keys, whole, call
        lengths = indptr, lens, indptr * pages_each, large
        plans = self.put(parallel.plan_kv_shards(kv_shards, *lengths), kv_shards.plan_spec)
        q = self.put(q, EVERYWHERE)
        specs = EVERYWHERE, [striped] * len(arrays), kv_shards.plan_spec
        first = compile_call(
            self.mapped(
                lambda q, keys, plan: parallel.attend_kv_shards(
                    q, *keys, *[None] * (2 - len(keys)), plan
                ), specs, EVERYWHERE,
            ), q, arrays, plans,
        )  # fmt: skip
        more = self.check(name, first, once) | communication(first)
        call = compile_call(
            self.mapped(lambda *x: chain(parallel.attend_kv_shards, *x), specs, EVERYWHERE),
            q, arrays, plans,
        )  # fmt: skip
        share = num_bytes / size
        row = self.add(name, size, call, LAYERS_A_CHAIN, bytes=share, min_bytes=share, more=more)
        row.more |= overlap(call)
        expected = size * batch * heads * (2 * out + 4)
        if (more["collectives"], more["collective_bytes"]) != ({"all-gather": 1}, expected):
            self.fail(name, f"expected one all-gather of {expected} bytes, got {more}")
        planned = compile_call(
            self.mapped(lambda *x: parallel.plan_kv_shards(kv_shards, *x), EVERYWHERE,
                        kv_shards.plan_spec),
            *(self.put(np.asarray(x, np.int32), EVERYWHERE) for x in lengths),
        )  # fmt: skip
        self.add(f"{name}/plans", size, planned)

    # ---- heads ---------------------------------------------------------------------------------

    def measure_heads(self) -> None:
        raw = dict(SHAPES["llama-3.1-8b"])
        if self.shrink > 1:
            sizes = {"vocab_size": 512, "hidden_size": 512, "intermediate_size": 256}
            raw |= sizes | {"num_hidden_layers": 2}
        config = models.parse_config(raw)
        # All layers share the first layer's weights, which are far larger than any cache.
        first = models.parse_config(raw | {"num_hidden_layers": 1})
        params = models.random_params(first, jax.random.key(0), "bfloat16")
        split = models.TensorParallel(config, self.mesh, "x")
        parts = split.split_params(params)
        for name, qo_lens, context in (
            ("heads/decode/64x1024", [1] * 64, 1024),
            ("heads/decode/8x1024", [1] * 8, 1024),
            ("heads/prefill/4x2048", [2048 // self.shrink] * 4, 2048),
        ):
            if not self.is_over(name):
                self.guard(
                    name,
                    lambda n=name, q=qo_lens, c=context: self.measure_model(
                        n, config, split, params, parts, q, max(32, c // self.shrink)
                    ),
                )

    def measure_model(
        self, name: str, config: Any, split: Any, params: Any, parts: Any, qo_lens: Any,
        context: int,
    ) -> None:  # fmt: skip
        batch, tokens = len(qo_lens), sum(qo_lens)
        pages_each = context // 16
        fields = {"dtype": "bfloat16", "page_size": 16, "max_batch": batch, "target": self.target}
        fields |= {"max_qo_tokens": tokens, "max_kv_pages": batch * pages_each}
        borders = np.append(0, np.cumsum(qo_lens))
        table = np.random.default_rng(0).permutation(batch * pages_each)
        lengths = borders, np.full(batch, context), np.arange(batch + 1) * pages_each, table
        positions = np.concatenate([np.arange(context - n, context) for n in qo_lens])
        rest = [
            np.random.default_rng(1).integers(0, config.vocab_size, tokens).astype(np.int32),
            positions.astype(np.int32),
        ]
        rows = (borders[1:] - 1).astype(np.int32)
        layers = config.num_layers
        want = None
        for size in (1, self.size):
            own = config if size == 1 else split.config
            weights = params if size == 1 else parts
            weights = weights | {"layers": weights["layers"] * layers}
            specs = models.attention_specs(own, **fields)
            plans = tuple(ja.plan(spec, *lengths) for spec in specs)
            if size == 1:
                pages = models.init_pages(own, specs, batch * pages_each)
                put = jax.device_put
            else:
                pages = split.init_pages(specs, batch * pages_each)
                put = lambda x: self.put(x, EVERYWHERE)  # noqa: E731
            arrays = [weights, *map(put, rest), *pages, jax.tree.map(put, plans), put(rows)]
            forward: Any = lambda params, *x, own=own: models.forward(params, own, *x)  # noqa: E731
            if size > 1:
                spec_of = jax.tree.map(lambda x: x.sharding.spec, weights)
                cache = split.pages_spec
                specs_in = (spec_of, EVERYWHERE, EVERYWHERE, cache, cache, EVERYWHERE, EVERYWHERE)
                forward = self.mapped(forward, specs_in, (EVERYWHERE, cache, cache))
            call = compile_call(forward, *arrays, donated=(3, 4))
            more = {} if size == 1 else communication(call)
            if want is None:
                want = np.asarray(call()[0])
            else:
                more |= self.check(name, lambda c=call: c()[0], want, MODEL_ERROR)
            row = self.add(name, size, call, more=more)
            if size > 1:
                row.more |= overlap(call)

    # ---- tokens --------------------------------------------------------------------------------

    def measure_sequence(self, tokens: int) -> None:
        cuts = np.sort(np.random.default_rng(0).choice(tokens, 23, replace=False))
        for kind, indptr in (
            ("packed", np.concatenate([[0], cuts, [tokens]])),
            ("causal", np.array([0, tokens])),
        ):
            for direction in ("forward", "both"):
                name = f"sequence/{tokens * self.shrink}/{kind}/{direction}"
                if not self.is_over(name):
                    self.guard(
                        name,
                        lambda n=name, i=indptr, d=direction: self.measure_documents(n, i, d),
                    )

    def measure_documents(self, name: str, indptr: Any, direction: str) -> None:
        """Measures packed documents on one device, and split with either exchange."""
        tokens, lens = int(indptr[-1]), np.diff(indptr)
        spec = ja.AttentionSpec(
            32, 8, 128, page_size=None, max_batch=len(lens), max_qo_tokens=tokens,
            max_kv_tokens=tokens, target=self.target,
        )  # fmt: skip
        q, d_o = ops.normal((tokens, 32, 128), 2)
        k, v = ops.normal((tokens, 8, 128), 2, seed=1)
        flops = 2.0 * 32 * 128 * float((lens.astype(float) ** 2).sum())
        flops *= 1 if direction == "forward" else 3.5

        def step(attend: Any, q: Any, k: Any, v: Any, d_o: Any, plan: Any) -> Any:
            if direction == "forward":
                return attend(q, k, v, plan)
            o, pull = jax.vjp(lambda *x: attend(*x, plan), q, k, v)
            return o, *pull(d_o)

        plan = ja.plan(spec, indptr, lens, kv_indptr=indptr)
        plan = dataclasses.replace(plan, buffer=jax.device_put(plan.buffer))
        call = compile_call(lambda *x: step(ja.attention, *x), q, k, v, d_o, plan)
        self.add(name, 1, call, flops=flops)
        want = call()
        del call
        for exchange in ("ring", "heads"):
            shards = parallel.SequenceShards(spec, "x", self.size, "striped", exchange)
            at = shards.positions
            arrays = [self.put(x[at], shards.array_spec) for x in (q, k, v, d_o)]
            plans = self.put(parallel.plan_sequence(shards, indptr), shards.plan_spec)
            specs = [shards.array_spec] * 4
            results = shards.array_spec
            if direction != "forward":
                results = (results,) * 4
            call = compile_call(
                self.mapped(
                    lambda *x: step(parallel.attend_sequence, *x),
                    (*specs, shards.plan_spec), results,
                ), *arrays, plans,
            )  # fmt: skip
            sought = jax.tree.map(lambda x, at=at: x[at], want)
            more = self.check(name, call, sought) | communication(call)
            del sought
            row = self.add(f"{name}@{exchange}", self.size, call, flops=flops / self.size,
                           more=more)  # fmt: skip
            if tokens <= 1 << 16:
                row.more |= overlap(call)

    # ---- results -------------------------------------------------------------------------------

    def write(self) -> None:
        a, device = self.arguments, f"{report.device_name()}-x{self.size}"
        path = a.out or report.RESULTS / f"{device}.json"
        if a.out or not (a.tiny or a.select):
            head = {"device": device, "failures": self.failures}
            report.write(path, self.rows, self.ceilings, **head)
            log(f"wrote {path}")


if __name__ == "__main__":
    assert ARGUMENTS is not None
    sys.exit(MeshBench(ARGUMENTS).main())
