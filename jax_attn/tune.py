"""Measure the planner's cost numbers on this processor, in about a minute.

    python -m jax_attn.tune --out tuning.json
    JAX_ATTN_TUNING=tuning.json python serve.py

The built-in numbers were measured on one CPU and one GPU (csrc/select/devices.cc). This program
tries other values on a few batches. It halves and doubles each number alone, and tries the measured
rates of the kernels. On a CPU it also finds the fastest instruction set for items with few rows. A
number is replaced only if two measurements show a gain. The others keep their built-in values.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_attn as ja
from jax_attn import _core
from jax_attn._spec import tuning

_PAGE_SIZE = 16
_SEEN, _CONFIRMED = 0.985, 0.99  # new time / old time: first measurement, second measurement
_ISA_GAIN = 0.97


@dataclasses.dataclass(frozen=True)
class Batch:
    """Lengths in tokens. Each request's last qo_len tokens are queries."""

    name: str
    qo_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_qo_heads: int = 32
    num_kv_heads: int = 8
    causal: bool = True


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much to measure.

    batches: the first one has decodes only.
    seconds: time to compare two values on one batch.
    """

    head_dim: int
    batches: tuple[Batch, ...]
    wide: Batch  # decodes with 16 query heads per KV head: compute-bound
    prompt: Batch
    few_rows: int  # kv length of four decodes that compare instruction sets: beyond caches
    seconds: float


def _prompt(name: str, num_tokens: int, num_heads: int, size: int = 1) -> Batch:
    lens = (num_tokens,) * size
    return Batch(name, lens, lens, num_heads, num_heads, causal=False)


CPU = Effort(
    128,
    (
        Batch("8 decodes", (1,) * 8, (4096, 1300, 700, 2048, 96, 512, 3000, 256)),
        Batch("a long decode", (1,), (16384,)),
        Batch("6 decodes and a chunk", (1,) * 6 + (192,), (1024, 96, 2000, 512, 1024, 700, 1500)),
        Batch("3 prompts", (500, 150, 800), (500, 150, 800)),
    ),
    Batch("wide decodes", (1,) * 2, (4096,) * 2, 16, 1),
    _prompt("a prompt", 768, 8),
    4096,
    0.1,
)
_ZIPF = tuple(32768 // (i + 1) + 64 for i in range(64))
GPU = Effort(
    128,
    (
        Batch("64 decodes", (1,) * 64, _ZIPF),
        Batch("a long decode", (1,), (131072,)),
        Batch("64 decodes and chunks", (1,) * 64 + (1024,) * 2, (*_ZIPF, 4096, 2048)),
        Batch("8 prompts", (300, 4000, 1000, 2500, 700, 1500, 512, 3000),
              (300, 4000, 1000, 2500, 700, 1500, 512, 3000)),
    ),
    Batch("wide decodes", (1,) * 64, (4096,) * 64, 16, 1),
    _prompt("prompts", 4096, 16, 4),
    0,
    0.05,
)  # fmt: skip


def log(text: str) -> None:
    print(text, flush=True)


# ---- a batch, compiled ----


class Call:
    """One batch, planned and compiled with the numbers in use now.

    spec: the spec with these numbers.
    calls: attention calls in one run, one after the other.
    """

    def __init__(
        self,
        batch: Batch,
        head_dim: int,
        dtype: str,
        kv_dtype: str | None = None,
        calls: int = 1,
    ):
        self.batch, self.calls = batch, calls
        pages = [-(-kv_len // _PAGE_SIZE) for kv_len in batch.kv_lens]
        self.spec = ja.AttentionSpec(
            batch.num_qo_heads,
            batch.num_kv_heads,
            head_dim,
            dtype=dtype,
            kv_dtype=kv_dtype,
            causal=batch.causal,
            page_size=_PAGE_SIZE,
            max_batch=len(batch.qo_lens),
            max_qo_tokens=sum(batch.qo_lens),
            max_kv_pages=sum(pages),
            share_prefixes=False,
        )
        rng = np.random.default_rng(0)
        plan = ja.plan(
            self.spec,
            np.cumsum([0, *batch.qo_lens]),
            np.array(batch.kv_lens),
            np.cumsum([0, *pages]),
            rng.permutation(sum(pages)),
        )
        keys = jax.random.split(jax.random.key(0), 3)
        q = jax.random.normal(keys[0], self.spec.q_shape, jnp.float32).astype(dtype)
        kv = [
            jax.random.normal(key, shape, jnp.float32).astype(self.spec.dtype_of_kv)
            for key, shape in zip(
                keys[1:], self.spec.kv_shapes(sum(pages), _PAGE_SIZE), strict=True
            )
            if shape is not None
        ]
        self._arguments = jax.device_put((q, *kv, plan))
        self._compile()

    def _compile(self) -> None:
        def chain(q: jax.Array, k: jax.Array, v: jax.Array, plan: ja.AttentionPlan) -> jax.Array:
            # Each call waits for the one before.
            return jax.lax.fori_loop(0, self.calls, lambda _, q: ja.attention(q, k, v, plan), q)

        # Specs that differ only in tuned numbers are equal: do not reuse an earlier trace.
        jax.clear_caches()
        self._run = jax.jit(chain).lower(*self._arguments).compile()
        jax.block_until_ready(self._run(*self._arguments))

    def run(self) -> float:
        """Run once, wait for the result, and return seconds per call."""
        begin = time.perf_counter()
        jax.block_until_ready(self._run(*self._arguments))
        return (time.perf_counter() - begin) / self.calls

    def lengthen(self, seconds: float) -> None:
        """Use enough calls in a run to take `seconds`, so that host overhead is small."""
        self.calls = max(1, math.ceil(seconds / max(self.run(), 1e-7)))
        if self.calls > 1:
            self._compile()


def _in_turns(runs: Sequence[Callable[[], float]], seconds: float) -> list[list[float]]:
    """Run each in turn until `seconds` have passed, at least three times. Returns their times."""
    times: list[list[float]] = [[] for _ in runs]
    end = time.perf_counter() + seconds
    while len(times[0]) < 3 or time.perf_counter() < end:
        for run, taken in zip(runs, times, strict=True):
            taken.append(run())
    return times


# ---- the planner's numbers ----


class _Search:
    """Search for better numbers of one kernel, one at a time."""

    def __init__(self, found: tuning.Tuning, effort: Effort, dtype: str, kv_dtype: str | None):
        self.found = found  # for all kernels so far
        self._effort = effort
        self._dtype, self._kv_dtype = dtype, kv_dtype
        self._num_calls: dict[Batch, int] = {}
        self.name = kv_dtype or dtype
        self._calls = {batch: self._call(batch) for batch in effort.batches}
        config = self._calls[effort.batches[0]].spec.kernel_config
        if found.device.arch == 0:
            self.kernel = dtype
        else:
            self.kernel = ("hopper" if config["main_loop"] else "portable") + (
                "_e4m3" if kv_dtype else ""
            )
        self._fields = {name: config[name] for name in ("min_chunk", "item_cost", "split_cost")}
        if found.device.arch == 0:
            threads = self._calls[effort.batches[0]].spec.problem.spec["num_processors"]
            self._fields["decode_queues"] = config["num_ctas"] // threads

    def _call(self, batch: Batch) -> Call:
        known = self._num_calls.get(batch)
        call = Call(batch, self._effort.head_dim, self._dtype, self._kv_dtype, known or 1)
        if known is None and self.found.device.arch:
            call.lengthen(2e-3)
        self._num_calls[batch] = call.calls
        return call

    def run(self) -> None:
        self._try_rates()
        for field, built_in in self._fields.items():
            for factor in (0.5, 2.0):
                value = max(1, round(built_in * factor))
                while self._try({field: value}) and built_in / 8 < value < built_in * 8:
                    value = max(1, round(value * factor))

    def _try_rates(self) -> None:
        """Try the measured rates of decodes and prompts in place of the built-in rates."""
        effort = self._effort
        longest = max(self._calls.values(), key=lambda call: max(call.batch.kv_lens))
        calls = [longest, self._call(effort.wide), self._call(effort.prompt)]
        times = [min(taken) for taken in _in_turns([call.run for call in calls], effort.seconds)]
        spec = calls[0].spec
        if self.found.device.arch == 0:
            threads = spec.problem.spec["num_processors"]
            row_bytes = 2 * spec.head_dim_qk * jnp.dtype(spec.dtype_of_kv).itemsize
            streamed = sum(longest.batch.kv_lens) * spec.num_kv_heads * row_bytes
            rates = [streamed, *map(_flops, calls[1:])]
            names = ("bytes_per_us", "low_flops_per_us", "flops_per_us")
            self._try(
                {
                    name: max(1, round(amount / (1e6 * seconds * threads)))
                    for name, amount, seconds in zip(names, rates, times, strict=True)
                }
            )
            return
        config = calls[2].spec.kernel_config
        if config["num_tiles"] < 2:
            return
        # Time of a prompt's tile and 16 kv tokens, relative to that of a decode.
        rows, tall_rows = config["tile_q_0"], config["tile_q_1"]
        decode = times[0] / (sum(longest.batch.kv_lens) * spec.num_kv_heads)
        prompt = calls[2].batch
        tiles = sum(
            math.ceil(qo_len / tall_rows) * kv_len
            for qo_len, kv_len in zip(prompt.qo_lens, prompt.kv_lens, strict=True)
        )
        cost = 16 * times[2] / (tiles * prompt.num_kv_heads) / decode
        if rows < tall_rows:
            self._try({"kv_cost_1": max(1, round(cost))})

    def _try(self, fields: dict[str, int]) -> bool:
        """Keep the numbers if they are faster in two measurements. Returns whether they were."""
        told = ", ".join(f"{field} {value}" for field, value in fields.items())
        first = self._compare(fields)
        if first is None:
            return False
        ratio, calls = first
        taken = ratio < _SEEN and self._time(calls) < _CONFIRMED
        log(f"  {self.name:<14} {told:<60} {ratio:5.3f} x {'taken' if taken else ''}")
        if taken:
            self.found = self._with(fields)
            self._calls |= calls
        self.found.use()
        return taken

    def _with(self, fields: dict[str, int]) -> tuning.Tuning:
        named = {f"{self.kernel}.{name}": value for name, value in fields.items()}
        return dataclasses.replace(self.found, numbers=self.found.numbers | named)

    def _compare(self, fields: dict[str, int]) -> tuple[float, dict[Batch, Call]] | None:
        """(time with `fields` / time without, new calls), or None if no batch's plan changes."""
        self._with(fields).use()
        calls = {}
        for batch, old in self._calls.items():
            spec = dataclasses.replace(old.spec)
            if spec.kernel_config != old.spec.kernel_config:
                calls[batch] = self._call(batch)
        return (self._time(calls), calls) if calls else None

    def _time(self, calls: dict[Batch, Call]) -> float:
        """Geometric mean of new time / old time over all batches; 1 for unchanged plans."""
        logs = []
        for batch, new in calls.items():
            old = self._calls[batch]
            new_times, old_times = _in_turns([new.run, old.run], self._effort.seconds)
            pairs = zip(new_times, old_times, strict=True)
            logs.append(math.log(statistics.median(a / b for a, b in pairs)))
        return math.exp(sum(logs) / len(self._calls))

    def report(self) -> list[dict[str, Any]]:
        """Time each batch with built-in and with tuned numbers, alternating."""
        rows = []
        built_in = tuning.Tuning(self.found.device)
        for batch, after in self._calls.items():
            built_in.use()
            before = self._call(batch)

            def run(call: Call, numbers: tuning.Tuning) -> float:
                numbers.use()  # instruction sets are looked up when a kernel runs
                return call.run()

            runs = [
                functools.partial(run, before, built_in),
                functools.partial(run, after, self.found),
            ]
            times = _in_turns(runs, 2 * self._effort.seconds)
            old, new = (1e6 * statistics.median(taken) for taken in times)
            log(f"  {self.name:<14} {batch.name:<24} {old:10.1f} {new:10.1f} {new / old:8.3f}")
            rows.append(
                {
                    "batch": batch.name,
                    "dtype": self.name,
                    "before_us": round(old, 1),
                    "after_us": round(new, 1),
                }
            )
        return rows


def _flops(call: Call) -> int:
    batch = call.batch
    tokens = sum(q * kv for q, kv in zip(batch.qo_lens, batch.kv_lens, strict=True))
    return 2 * tokens * batch.num_qo_heads * (call.spec.head_dim_qk + call.spec.value_dim)


# ---- instruction sets of a CPU ----


def _isa_rule(kv_dtype: str | None, effort: Effort) -> tuple[tuning.IsaRule, ...]:
    """Find an instruction set that is faster than the best one for bfloat16 items with few rows.

    Returns its rule, or () if there is none.
    """
    isas = [isa for isa in _core.supported_cpu_isas() if isa != "baseline"][-3:]
    best = isas[-1]
    faster: dict[str, int] = {}  # instruction set -> rows up to which it is faster than `best`
    leading = dict.fromkeys(isas[:-1], True)
    for rows in (1, 2, 4, 8, 16):
        batch = Batch(f"{rows} rows", (1,) * 4, (effort.few_rows,) * 4, 8 * rows, 8)
        call = Call(batch, effort.head_dim, "bfloat16", kv_dtype)

        def run(isa: str, call: Call = call) -> float:
            _core.set_cpu_isa(isa)
            return call.run()

        try:
            runs = [lambda isa=isa: run(isa) for isa in isas]
            times = _in_turns(runs, len(isas) * effort.seconds)
        finally:
            _core.set_cpu_isa("")
        ratios = {
            isa: statistics.median(a / b for a, b in zip(taken, times[-1], strict=True))
            for isa, taken in zip(isas[:-1], times, strict=False)
        }
        told = ", ".join(f"{isa} {ratio:5.3f} x {best}" for isa, ratio in ratios.items())
        log(f"  {kv_dtype or 'bfloat16':<14} items of {rows:>2} rows: {told}")
        for isa, ratio in ratios.items():
            leading[isa] = leading[isa] and ratio < _ISA_GAIN
            if leading[isa]:
                faster[isa] = rows
    if not faster:
        return ()
    isa = max(faster, key=lambda isa: faster[isa])
    return (tuning.IsaRule(best, "bfloat16", kv_dtype or "plain", faster[isa], isa),)


# ---- the program ----


def tune(device: tuning.Device, effort: Effort) -> tuning.Tuning:
    """Measure this device and log progress."""
    found = tuning.Tuning(device)
    found.use()
    if device.arch == 0 and len(_core.supported_cpu_isas()) > 2:
        log("Instruction sets, for items of few rows:")
        rules = _isa_rule(None, effort) + _isa_rule("float8_e4m3fn", effort)
        found = dataclasses.replace(found, isas=rules)
        found.use()
    formats: list[tuple[str, str | None]] = [("bfloat16", None)]
    formats += [("float32", None)] if device.arch == 0 else [("bfloat16", "float8_e4m3fn")]
    log("The planner's numbers, one at a time; time with it / without:")
    searches = []
    for dtype, kv_dtype in formats:
        search = _Search(found, effort, dtype, kv_dtype)
        search.run()
        found = search.found
        searches.append(search)
    log(f"  {'':<14} {'batch':<24} {'before, us':>10} {'after, us':>10}    ratio")
    measured = [row for search in searches for row in search.report()]
    return dataclasses.replace(found, measured=tuple(measured))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program with command-line arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m jax_attn.tune",
        description="Measures the planner's numbers on the processor at hand and writes them to a "
        "file for JAX_ATTN_TUNING.",
    )
    parser.add_argument("--out", default="tuning.json", help="the file; default: tuning.json")
    path = parser.parse_args(arguments).out
    begin = time.perf_counter()
    with open(path, "a"):  # fail before the measurement if the path cannot be written
        pass
    is_cpu = jax.default_backend() == "cpu"
    device = tuning.this_cpu() if is_cpu else tuning.this_gpu()
    log(f"jax_attn.tune: {device.name}")
    result = tune(device, CPU if is_cpu else GPU)
    result.write(path)
    log(f"{path}: {len(result.numbers)} numbers, {len(result.isas)} instruction sets, in"
        f" {time.perf_counter() - begin:.0f} s. Use it: JAX_ATTN_TUNING={path}")  # fmt: skip


if __name__ == "__main__":
    main()
