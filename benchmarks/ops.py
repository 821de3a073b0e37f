"""Our operations and the device's ceilings, as chains for timing.time_chain."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_attn as ja
from benchmarks import timing
from benchmarks.report import Ceilings, Row
from benchmarks.workloads import READ_BYTES, Workload
from jax_attn import _core, reference
from jax_attn._spec.formats import FOUR_BITS

# Alternating data sets must be several times larger than the last-level cache (60 MB on an H200);
# otherwise repeated calls would read the cache instead of memory.
ROTATE_BYTES = 256 << 20
MLA_SCALE = (128 + 64) ** -0.5  # DeepSeek-V3's heads, before absorption
NOMINAL = Ceilings(bytes_per_us=4e6, flops_per_us=3e8)  # only for choosing the length of a chain


KV_DTYPES = {"bf16": None, "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"} | {
    name: name for name in ("int8", *FOUR_BITS)
}


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def uncaptured() -> dict[str, Any] | None:
    """Returns options without command buffers: launches on one stream, in program order."""
    return {"xla_gpu_enable_command_buffer": ""} if on_gpu() else None


@functools.partial(jax.jit, static_argnums=0)
def _normal(shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    return jax.random.normal(key, shape, jnp.bfloat16)


def normal(shape: tuple[int, ...], num: int = 1, seed: int = 0) -> list[jax.Array]:
    """Returns `num` random bf16 arrays. The rbg generator fills gigabytes in milliseconds.

    One executable an array: XLA takes half a minute for one that fills 64 of them.
    """
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), num)
    return [_normal(tuple(shape), key) for key in keys]


# ---- specs -------------------------------------------------------------------------------------


def parse_variant(text: str) -> dict[str, Any]:
    """Parses "num_ctas=132,num_stages=4,schedule=no_split" to a dict; integers where they parse."""
    pairs = [item.split("=", 1) for item in text.split(",") if item]
    return {k: int(v) if v.lstrip("-").isdigit() else v for k, v in pairs}


def make_spec(workload: Workload, variant: dict[str, Any], target: str | None = None):
    """Returns the spec whose capacities are exactly the batch's sizes.

    variant: fields of AttentionSpec, or of KernelConfig (csrc/spec.h) for tuning.
    """
    fields = {f.name for f in dataclasses.fields(ja.AttentionSpec)}
    of_spec = {name: value for name, value in variant.items() if name in fields}
    of_kernel = {name: value for name, value in variant.items() if name not in fields}
    if workload.page_size is None:
        storage: dict[str, Any] = {"max_kv_tokens": sum(workload.kv_lens)}
    else:
        storage = {"max_kv_pages": workload.num_page_indices, "num_pages": workload.num_pages}
    arguments = {
        "num_qo_heads": workload.num_qo_heads,
        "num_kv_heads": workload.num_kv_heads,
        "head_dim_qk": workload.head_dim,
        "head_dim_vo": workload.head_dim_vo,
        "mla": workload.head_dim_latent is not None,
        "causal": workload.causal,
        "page_size": workload.page_size,
        "kv_dtype": KV_DTYPES[workload.kv_dtype],
        "q_dtype": KV_DTYPES[workload.q_dtype],
        "eight_bit_products": workload.eight_bit_products,
        "max_batch": workload.batch_size,
        "max_qo_tokens": workload.nnz_qo,
        "target": target,
        **storage,
        **of_spec,
    }
    if workload.head_dim_latent is not None:
        arguments["sm_scale"] = MLA_SCALE
    spec = ja.AttentionSpec(**arguments)
    if of_kernel:
        # Tuning only: the configuration is chosen by csrc/select and has no public override.
        problem = spec.problem
        unknown = of_kernel.keys() - problem.config.keys()
        if unknown:
            raise SystemExit(f"--variant: {sorted(unknown)}: known are {sorted(problem.config)}")
        settled = {n: getattr(spec, n) for n in ("num_ctas", "max_items", "max_partial_rows")}
        of_kernel |= {name: value for name, value in settled.items() if value is not None}
        spec.__dict__["problem"] = _core.Problem(problem.spec, of_kernel)
    return spec


def plan_arguments(workload: Workload) -> tuple[Any, ...]:
    lengths = workload.qo_indptr, np.asarray(workload.kv_lens, np.int32)
    if workload.page_size is None:
        return lengths
    return *lengths, workload.page_indptr, workload.page_indices()


def make_plan(workload: Workload, spec: Any) -> Any:
    return ja.plan(spec, *plan_arguments(workload))


def plan_us(workload: Workload, spec: Any, repeats: int = 101) -> float:
    """Returns the median time of jax_attn.plan on the host, Python included."""
    arguments = plan_arguments(workload)
    return timing.median_us(lambda: ja.plan(spec, *arguments).buffer, repeats)


def plan_chain(workload: Workload, spec: Any, *, plans: bool) -> Callable[[int], Callable[[], Any]]:
    """Chains of plans of traced arrays. A zero from each plan's header is added to the next plan's
    lengths, so the plans depend on each other. plans=False: only the additions, as a baseline."""
    arguments = [jnp.asarray(x, jnp.int32) for x in plan_arguments(workload)]
    buffer = jnp.asarray(make_plan(workload, spec).buffer)
    zero = spec.layout["header"] + 11  # PlanHeader.fault

    def make_chain(num_calls: int) -> Callable[[], Any]:
        @jax.jit
        def run(qo_indptr: Any, kv_lens: Any, buffer: Any, *pages: Any) -> Any:
            for _ in range(num_calls):
                if plans:
                    buffer = ja.plan(spec, qo_indptr, kv_lens, *pages).buffer
                kv_lens = kv_lens + buffer[zero]
            return kv_lens, buffer

        qo_indptr, kv_lens, *pages = arguments
        return lambda: run(qo_indptr, kv_lens, buffer, *pages)

    return make_chain


# ---- attention ---------------------------------------------------------------------------------


@dataclasses.dataclass
class AttentionData:
    """Inputs of one workload, in several sets that calls alternate between.

    paged: k, v [num_sets, num_pages, page_size, num_kv_heads, head_dim], the set is the layer;
    mla: no v.
    ragged: lists of num_sets arrays [nnz_kv, num_kv_heads, head_dim].
    """

    workload: Workload
    q: jax.Array
    k: Any
    v: Any
    num_sets: int

    def kv(self, index: int) -> tuple[Any, Any, int | None]:
        """Returns k, v and layer of call `index`."""
        index %= self.num_sets
        if self.workload.page_size is None:
            return self.k[index], self.v[index], None
        return self.k, self.v, index


def make_data(workload: Workload) -> AttentionData:
    w = workload
    num_sets = max(2, min(64, -(-ROTATE_BYTES // max(w.kv_bytes, 1)))) if on_gpu() else 2
    (q,) = normal((w.nnz_qo, w.num_qo_heads, w.head_dim))
    row = (w.num_kv_heads, w.head_dim)
    if w.page_size is None:
        k = normal((sum(w.kv_lens), *row), num_sets, seed=1)
        v = normal((sum(w.kv_lens), *row), num_sets, seed=2)
    elif w.head_dim_latent is not None:
        (k,), v = normal((num_sets, w.num_pages, w.page_size, *row), seed=1), None
    else:
        k, v = normal((num_sets, w.num_pages, w.page_size, *row), 2, seed=1)
    if w.kv_dtype != "bf16":
        k, v = (jax.tree.map(functools.partial(_codes, w.kv_dtype), a) for a in (k, v))
    if w.q_dtype != "bf16":
        q = _codes(w.q_dtype, q)
    return AttentionData(w, q, k, v, num_sets)


@functools.partial(jax.jit, static_argnums=0)
def _codes(kv_dtype: str, x: jax.Array) -> jax.Array:
    """Quantizes normal data x to rows of a format; 4-bit formats get random values, scales 1/4."""
    if kv_dtype == "int8":
        scale = jnp.abs(x).max(axis=-1, keepdims=True).astype(jnp.float32) / 127
        codes = jnp.round(x / scale).astype(jnp.int8)
        return jnp.concatenate([codes, jax.lax.bitcast_convert_type(scale[..., 0], jnp.int8)], -1)
    if kv_dtype in FOUR_BITS:
        half, (block, _) = x.shape[-1] // 2, FOUR_BITS[kv_dtype]
        codes = jax.lax.bitcast_convert_type(x[..., :half], jnp.uint16).astype(jnp.uint8)
        quarter = {"mxfp4": [125], "nvfp4": [0x28], "int4": [0, 0x34]}[kv_dtype]
        scales = jnp.tile(jnp.array(quarter, jnp.uint8), -(-x.shape[-1] // block))
        scales = jnp.broadcast_to(scales, (*x.shape[:-1], len(scales)))
        return jnp.concatenate([codes, scales], -1)
    return x.astype(KV_DTYPES[kv_dtype])


def _numbers(kv_dtype: str, rows: jax.Array) -> jax.Array:
    """Dequantizes rows."""
    if rows.dtype in (jnp.int8, jnp.uint8):
        rows = jnp.asarray(reference.dequantize(np.asarray(rows), None, np.float32, kv_dtype))
    return rows.astype(jnp.float32)


def attention_chain(
    data: AttentionData, spec: Any, plan: Any
) -> Callable[[int], Callable[[], Any]]:
    """Makes chains of attention calls, with only those calls in the executable.

    Decode: each call's o is the next call's q. This true dependency lets the calls be captured in
    one CUDA graph and still run in order. Otherwise every call gets the same q, because values
    matter: o shrinks toward the mean of v, and tensor cores run cooler on that. Every o is a
    result. Each call has its own plan operand, so no two calls are the same expression. The calls
    stay ordinary launches of one stream.
    """
    linked = data.workload.kind in ("decode", "shared_prefix")
    buffer = jax.device_put(plan.buffer)

    def make_chain(num_calls: int) -> Callable[[], Any]:
        def linked_calls(q: Any, k: Any, v: Any, plans: Any) -> Any:
            operands = dataclasses.replace(data, k=k, v=v)
            for i in range(num_calls):
                q = _attend(q, operands.kv(i), dataclasses.replace(plan, buffer=plans[0]))
            return q

        def separate_calls(q: Any, k: Any, v: Any, plans: Any) -> Any:
            operands = dataclasses.replace(data, k=k, v=v)
            return [
                _attend(q, operands.kv(i), dataclasses.replace(plan, buffer=plans[i]))
                for i in range(num_calls)
            ]

        if linked:
            run = jax.jit(linked_calls)
        else:
            run = jax.jit(separate_calls, compiler_options=uncaptured())
        plans = [buffer] * (1 if linked else num_calls)
        return lambda: run(data.q, data.k, data.v, plans)

    return make_chain


def gradient_chain(
    attend: Callable[..., Any], arrays: Any, d_o: list[jax.Array]
) -> Callable[[int], Callable[[], Any]]:
    """Makes chains of backward passes of attend(*arrays): one forward pass, then the gradients of
    all arrays for each of n values of d_o."""

    def make_chain(num_calls: int) -> Callable[[], Any]:
        @functools.partial(jax.jit, compiler_options=uncaptured())
        def run(arrays: Any, d_o: Any) -> Any:
            _, pull = jax.vjp(attend, *arrays)
            return [pull(x) for x in d_o]

        return lambda: run(arrays, d_o[:num_calls])

    return make_chain


def backward_chain(
    workload: Workload, plan: Any, num_calls: int
) -> Callable[[int], Callable[[], Any]]:
    """Makes our backward chain, for up to 2 * num_calls calls."""
    data = make_data(workload)
    k, v, layer = data.kv(0)
    if layer is not None:
        k, v = k[layer], v[layer]
    d_o = normal(data.q.shape, 2 * num_calls, seed=3)
    return gradient_chain(lambda *qkv: ja.attention(*qkv, plan), (data.q, k, v), d_o)


def _attend(q: Any, kv: tuple[Any, Any, int | None], plan: Any) -> Any:
    k, v, layer = kv
    return ja.attention(q, k, v, plan, layer=layer)


def attention_chain_length(workload: Workload) -> int:
    if not on_gpu():
        return 2
    expected = workload.floor_us(NOMINAL.bytes_per_us, NOMINAL.flops_per_us) + 5
    if workload.kind in ("decode", "shared_prefix"):
        return timing.chain_length(expected, 8, 160)
    return timing.chain_length(expected, 2, 16)


def relative_error(data: AttentionData, o: jax.Array) -> float:
    """Returns ‖o - exact‖ / ‖exact‖ over a few query rows; exact is float32 from the same inputs.

    Rows: the first and last token of the longest request, and the last token of the first and of
    the last request. o: result for set 0.
    """
    w = data.workload
    longest = int(np.argmax(w.kv_lens))
    samples = [(longest, w.qo_lens[longest] - 1)]
    if w.kv_lens[longest] <= 131072:
        last = w.batch_size - 1
        samples += [(longest, 0), (0, w.qo_lens[0] - 1), (last, w.qo_lens[last] - 1)]
    samples = sorted(set(samples))
    width = max(w.kv_lens)
    rows = np.zeros((len(samples), width), np.int32)  # rows of k and v, one per token
    visible = np.zeros(len(samples), np.int32)
    tokens = np.zeros(len(samples), np.int32)
    for s, (request, token) in enumerate(samples):
        kv_len, qo_len = w.kv_lens[request], w.qo_lens[request]
        position = np.arange(kv_len)
        if w.page_size is None:
            rows[s, :kv_len] = w.kv_indptr[request] + position
        else:
            pages = w.page_indices()[w.page_indptr[request] + position // w.page_size]
            rows[s, :kv_len] = pages.astype(np.int64) * w.page_size + position % w.page_size
        visible[s] = kv_len - qo_len + token + 1 if w.causal else kv_len
        tokens[s] = w.qo_indptr[request] + token
    k, v, layer = data.kv(0)
    scale = w.head_dim**-0.5
    if w.head_dim_latent is not None:
        v, scale = k[..., : w.head_dim_latent], MLA_SCALE
    if layer is not None:
        k, v = k[layer], v[layer]
    k, v = (_numbers(w.kv_dtype, a.reshape(-1, *a.shape[-2:])[rows]) for a in (k, v))
    exact = _exact_rows(data.q[tokens], k, v, visible, scale)
    difference = o[tokens].astype(jnp.float32) - exact
    return float(jnp.linalg.norm(difference) / jnp.linalg.norm(exact))


@functools.partial(jax.jit, compiler_options={"xla_gpu_autotune_level": 0} if on_gpu() else None)
def _exact_rows(q: Any, k: Any, v: Any, visible: Any, scale: float) -> Any:
    """q: [num_samples, num_qo_heads, head_dim]; k, v: [num_samples, width, num_kv_heads, ...]."""
    num_samples, num_qo_heads, head_dim = q.shape
    num_kv_heads = k.shape[-2]
    q = q.astype(jnp.float32).reshape(num_samples, num_kv_heads, -1, head_dim)
    highest = jax.lax.Precision.HIGHEST
    logits = jnp.einsum("shgd,skhd->shgk", q, k, precision=highest) * scale
    seen = jnp.arange(k.shape[1]) < visible[:, None]
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], logits, -jnp.inf))
    o = jnp.einsum("shgk,skhd->shgd", weights, v, precision=highest)
    return o.reshape(num_samples, num_qo_heads, -1)


# ---- append and merge --------------------------------------------------------------------------


def append_chain(workload: Workload, spec: Any, plan: Any) -> Callable[[int], Callable[[], Any]]:
    """Makes chains of appends to the layers of one donated cache. spec, plan: also of a step."""
    w = workload
    num_layers = max(2, min(64, -(-ROTATE_BYTES // w.bytes))) if on_gpu() else 2
    row = (w.num_kv_heads, w.head_dim)
    pool = (num_layers, w.num_pages, w.page_size, *row)
    while num_layers > 2 and np.prod(pool) * 4 > 4 << 30:  # bytes of k and v
        num_layers //= 2
        pool = (num_layers, *pool[1:])
    cache = normal(pool, 2, seed=1)
    k_new, v_new = normal((w.nnz_qo, *row), 2, seed=2)
    buffer = jax.device_put(plan.buffer)

    def make_chain(num_calls: int) -> Callable[[], Any]:
        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def run(k: Any, v: Any, k_new: Any, v_new: Any, buffer: Any) -> Any:
            on_device = dataclasses.replace(plan, buffer=buffer)
            for i in range(num_calls):
                k, v = ja.append_kv(k, v, k_new, v_new, on_device, layer=i % num_layers)
            return k, v

        def call() -> Any:
            cache[:] = run(*cache, k_new, v_new, buffer)
            return cache

        return call

    return make_chain


def merge_chain(workload: Workload) -> Callable[[int], Callable[[], Any]]:
    """Makes chains of merges of distinct states: ordinary launches, every result kept."""
    w = workload
    rows = (w.num_states, w.nnz_qo, w.num_qo_heads)

    def make_chain(num_calls: int) -> Callable[[], Any]:
        o_parts = normal((*rows, w.head_dim), num_calls, seed=1)
        lse_parts = [a.astype(jnp.float32) for a in normal(rows, num_calls, seed=2)]
        run = jax.jit(
            lambda o, lse: [ja.merge_states(a, b) for a, b in zip(o, lse, strict=True)],
            compiler_options=uncaptured(),
        )
        return lambda: run(o_parts, lse_parts)

    return make_chain


# ---- ceilings ----------------------------------------------------------------------------------


def _measure_reads() -> tuple[int, dict[str, float]]:
    """The bytes of an array, and the time of each way to read it, µs."""
    width = 1 << 16
    (data,) = normal((READ_BYTES // (2 * width) if on_gpu() else 32, width))
    forms = {
        "xla_sum": lambda a: jnp.sum(a, dtype=jnp.float32),
        "xla_row_max": lambda a: jnp.max(a, axis=1),
        "xla_xor": lambda a: jax.lax.reduce(
            jax.lax.bitcast_convert_type(a.reshape(-1, 2), jnp.uint32),
            np.uint32(0),
            jax.lax.bitwise_xor,
            (0,),
        ),
    }
    read_us = {}
    for name, form in forms.items():
        run = jax.jit(form)
        read_us[name] = _in_flight_us(functools.partial(run, data), 8)
    return data.nbytes, read_us


def read_bytes_per_us() -> float:
    """The device's read-only bandwidth."""
    num_bytes, read_us = _measure_reads()
    return num_bytes / min(read_us.values())


def measure_ceilings(*, sustained: bool = False) -> tuple[Ceilings, list[Row]]:
    """Measures read-only bandwidth (best of a few XLA reductions) and an 8192^3 bf16 matmul.

    sustained: times the matmul at the clock of a device at its power limit (bursts.py).
    """
    num_bytes, read_us = _measure_reads()
    best = min(read_us, key=read_us.__getitem__)
    size = 8192 if on_gpu() else 512
    a, b = normal((size, size), 2)
    b = (b / np.sqrt(size)).astype(jnp.bfloat16)

    def make_chain(num_calls: int) -> Callable[[], Any]:
        @jax.jit
        def run(a: Any, b: Any) -> Any:
            for _ in range(num_calls):
                a = a @ b
            return a

        return lambda: run(a, b)

    matmul = timing.time_chain(make_chain, 4, sustained=True)
    matmul_us = matmul.sustained_us if sustained else matmul.us
    flops = 2.0 * size**3
    rows = [
        Row(
            "ceiling/read",
            read_us[best],
            bytes=num_bytes,
            min_bytes=num_bytes,
            more={"best": best, **{f"{n}_us": round(us, 1) for n, us in read_us.items()}},
        ),
        Row("ceiling/matmul", matmul_us, flops=flops, sustained_us=matmul.sustained_us),
    ]
    return Ceilings(num_bytes / read_us[best], flops / matmul_us), rows


def _in_flight_us(run: Callable[[], Any], num_runs: int) -> float:
    """Returns the device time of one run, from n and 2n runs dispatched without waiting."""

    def make_chain(num_calls: int) -> Callable[[], Any]:
        return lambda: [run() for _ in range(num_calls)]

    return timing.time_chain(make_chain, num_runs).us
