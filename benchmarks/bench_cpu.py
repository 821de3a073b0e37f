"""CPU kernels compared with jax.nn and, if torch is installed, torch SDPA: `make bench`.

All calls run in one process, interleaved (ours, jax.nn, torch, ours, ...), so that drift of the
machine's speed affects all alike. Before each timed call the process does three things. It rests
until the threads of the previous peer have stopped spinning. It makes the same call once, because
idle cores take up to a millisecond to wake. It empties the caches, because floors are memory
floors. Prefill is dense. Decode is paged with pages of 16 for us, and dense for the peers, which
have no pages. Writes benchmarks/results/cpu-ISA.json, where ISA is the instruction set that ran, so
each kind of processor has a file.

--random N --seed S takes drawn workloads instead (random_workloads.py, random_cpu.py), half of them
in f32, and prints the distribution of best peer / ours.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_attn as ja
from benchmarks import random_cpu, random_workloads
from benchmarks.digest import sources_digest
from benchmarks.variant_functions import (
    alibi,
    causal,
    dense_bias,
    documents_of_rows,
    soft_cap_of,
    t5_bias,
)
from benchmarks.workloads import Workload
from jax_attn import reference
from jax_attn._spec.tuning import this_cpu

try:
    import torch
except ImportError:  # a peer, not a dependency
    torch = None

RESULTS = Path(__file__).with_name("results")
PAGE_SIZE = 16
NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128  # of decodes
FORMATS = ("float8_e4m3fn", "float8_e5m2", "int8", "mxfp4", "nvfp4", "int4")
PREFILL_HEADS = 8
REST_S = 0.02  # OpenMP and XLA threads spin for some milliseconds before they sleep
CACHE_BYTES = 96 << 20  # more than a last-level cache holds


def wall_us(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    run()
    return 1e6 * (time.perf_counter() - begin)


def medians_us(runs: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """Runs all functions interleaved until the time is over, at least 5 rounds."""
    for run in runs.values():
        run()
        run()
    samples: dict[str, list[float]] = {name: [] for name in runs}
    other = np.ones(CACHE_BYTES // 4, np.float32)
    begin = time.perf_counter()
    while len(next(iter(samples.values()))) < 5 or time.perf_counter() - begin < seconds:
        for name, run in runs.items():
            time.sleep(REST_S)
            run()
            other.max()
            samples[name].append(wall_us(run))
    return {name: statistics.median(values) for name, values in samples.items()}


def read_bytes_per_us() -> float:
    """Measures read-only bandwidth: one thread per core, each over its own memory beyond caches."""
    threads = [np.ones(48 << 20, np.float32) for _ in range(len_processors())]

    def run() -> None:
        workers = [threading.Thread(target=np.dot, args=(x, x)) for x in threads]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    us = min(wall_us(run) for _ in range(8))
    return sum(x.nbytes for x in threads) / us


def matmul_flops_per_us(dtype: str) -> float:
    n = 2048
    x = jax.random.normal(jax.random.key(0), (n, n), dtype)
    multiply = jax.jit(jnp.matmul)
    multiply(x, x).block_until_ready()
    return 2 * n**3 / min(wall_us(lambda: multiply(x, x).block_until_ready()) for _ in range(5))


def len_processors() -> int:
    return ja.AttentionSpec(1, 1, 8, page_size=None, max_kv_tokens=1, target="cpu").problem.spec[
        "num_processors"
    ]


def processor() -> str:
    """Returns the processor's name, the instruction set in use and the number of threads."""
    name = this_cpu().name.rpartition(", ")[0]  # after the comma: its best instruction set
    return f"{name}, {ja._core.cpu_isa()} on {len_processors()} threads"


def torch_attention(q: Any, k: Any, v: Any, causal: bool) -> Callable[[], Any]:
    """Makes a torch SDPA call. q, k, v: [batch, tokens, heads, head_dim]."""
    dtype = torch.bfloat16 if q.dtype == jnp.bfloat16 else torch.float32
    to = [torch.tensor(np.asarray(a, np.float32)).to(dtype).transpose(1, 2) for a in (q, k, v)]
    to = [a.contiguous() for a in to]
    gqa = to[0].shape[1] != to[1].shape[1]

    def run() -> Any:
        with torch.no_grad():
            return torch.nn.functional.scaled_dot_product_attention(
                *to, is_causal=causal, enable_gqa=gqa
            )

    return run


def jax_attention(q: Any, k: Any, v: Any, causal: bool) -> Callable[[], Any]:
    attend = jax.jit(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=causal))
    return lambda: attend(q, k, v).block_until_ready()


def with_torch(runs: dict[str, Callable[[], Any]], *operands: Any) -> dict[str, Callable[[], Any]]:
    return runs | ({"torch SDPA": torch_attention(*operands)} if torch else {})


def prefill(
    dtype: str,
    length: int,
    causal: bool,
    batch: int = 1,
    num_qo_heads: int = PREFILL_HEADS,
    num_kv_heads: int = PREFILL_HEADS,
    head_dim: int = HEAD_DIM,
) -> tuple[str, dict[str, Any], float, float]:
    keys = jax.random.split(jax.random.key(1), 3)
    heads = (num_qo_heads, num_kv_heads, num_kv_heads)
    q, k, v = (
        jax.random.normal(key, (batch, length, num_heads, head_dim), dtype)
        for key, num_heads in zip(keys, heads, strict=True)
    )
    ours = jax.jit(lambda q, k, v: ja.dot_product_attention(q, k, v, is_causal=causal))
    runs = {
        "ours": lambda: ours(q, k, v).block_until_ready(),
        "jax.nn": jax_attention(q, k, v, causal),
    }
    flops = 4 * batch * length**2 * num_qo_heads * head_dim / (2 if causal else 1)
    group = f"{num_qo_heads}" + (f"-{num_kv_heads}" if num_kv_heads != num_qo_heads else "")
    shape = f"{batch}x{length}/{group}/d{head_dim}"
    name = f"cpu/prefill/{shape}/{dtype}/{'causal' if causal else 'full'}"
    return name, with_torch(runs, q, k, v, causal), 2 * (q.nbytes + k.nbytes), flops


def decode(dtype: str, batch: int, length: int) -> tuple[str, dict[str, Any], float, float]:
    keys = jax.random.split(jax.random.key(2), 3)
    q = jax.random.normal(keys[0], (batch, 1, NUM_QO_HEADS, HEAD_DIM), dtype)
    shape = (batch, length, NUM_KV_HEADS, HEAD_DIM)
    k, v = (jax.random.normal(key, shape, dtype) for key in keys[1:])
    ids = np.random.default_rng(0).permutation(batch * length // PAGE_SIZE)
    runs = {
        "ours": _paged_decode(dtype, np.split(ids, batch), [length] * batch),
        "jax.nn": jax_attention(q, k, v, False),
    }
    flops = 4 * batch * length * NUM_QO_HEADS * HEAD_DIM
    name = f"cpu/decode/{batch}x{length}/32-8/d128/{dtype}/page16"
    return name, with_torch(runs, q, k, v, False), k.nbytes + v.nbytes, flops


def decode_format(
    dtype: str, batch: int, length: int, kv_dtype: str, products: bool = False
) -> tuple[Any, ...]:
    """Decodes over a quantized cache, with the dtype's cache as peer. products: 8-bit matmuls."""
    fields = {"kv_dtype": kv_dtype, "eight_bit_products": products}
    tables = np.split(np.random.default_rng(0).permutation(batch * length // PAGE_SIZE), batch)
    runs = {
        "ours": _paged_decode(dtype, tables, [length] * batch, **fields),
        f"ours, {dtype}": _paged_decode(dtype, tables, [length] * batch),
    }
    spec = ja.AttentionSpec(1, 1, HEAD_DIM, kv_dtype=kv_dtype, max_kv_pages=1, target="cpu")
    row_bytes = spec.kv_shapes()[0][-1] * jnp.dtype(spec.dtype_of_kv).itemsize
    num_rows = batch * length * NUM_KV_HEADS
    flops = 4 * batch * length * NUM_QO_HEADS * HEAD_DIM
    name = f"cpu/decode/{batch}x{length}/32-8/d128/{dtype}/page16/{kv_dtype}"
    name += "/products" if products else ""
    return name, runs, 2 * num_rows * row_bytes, flops


def _paged_decode(
    dtype: str, tables: list[np.ndarray], lengths: list[int], **options: Any
) -> Callable[[], Any]:
    """Makes one decode step of ours. tables: page ids of each request."""
    batch, num_pages = len(lengths), 1 + max(int(table.max()) for table in tables)
    keys = jax.random.split(jax.random.key(3), 3)
    q = jax.random.normal(keys[0], (batch, NUM_QO_HEADS, HEAD_DIM), dtype)
    kv_dtype = options.get("kv_dtype")
    pool = (num_pages, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
    k, v = (jax.random.normal(key, pool, dtype) for key in keys[1:])
    if kv_dtype is not None:
        # Quantize a few pages and repeat them: the reference needs a hundred times their memory.
        repeats = -(-num_pages // 32)
        k, v = (
            jnp.tile(reference.quantize(np.asarray(x[:32]), None, kv_dtype), (repeats, 1, 1, 1))
            for x in (k, v)
        )
    page_indptr = np.concatenate([[0], np.cumsum([len(table) for table in tables])])
    spec = ja.AttentionSpec(
        NUM_QO_HEADS,
        NUM_KV_HEADS,
        HEAD_DIM,
        dtype=dtype,
        page_size=PAGE_SIZE,
        max_batch=batch,
        max_qo_tokens=batch,
        max_kv_pages=int(page_indptr[-1]),
        target="cpu",
        **options,
    )
    plan = ja.plan(spec, np.arange(batch + 1), lengths, page_indptr, np.concatenate(tables))
    attend = jax.jit(ja.attention)
    return lambda: attend(q, k, v, plan).block_until_ready()


def shared_prefix(dtype: str, batch: int, prefix: int, own: int) -> tuple[Any, ...]:
    """Requests that begin with the same pages; the peer is the same without sharing."""
    num_shared, num_own = prefix // PAGE_SIZE, own // PAGE_SIZE
    ids = np.random.default_rng(0).permutation(num_shared + batch * num_own)
    tables = [
        np.concatenate([ids[:num_shared], pages]) for pages in np.split(ids[num_shared:], batch)
    ]
    lengths = [prefix + own] * batch
    runs = {
        "ours": _paged_decode(dtype, tables, lengths),
        "ours, not shared": _paged_decode(dtype, tables, lengths, share_prefixes=False),
    }
    row_bytes = 2 * NUM_KV_HEADS * HEAD_DIM * jnp.dtype(dtype).itemsize
    flops = 4 * sum(lengths) * NUM_QO_HEADS * HEAD_DIM
    name = f"cpu/prefix/{batch}x{prefix}+{own}/32-8/d128/{dtype}/page16"
    return name, runs, (prefix + batch * own) * row_bytes, flops


def skewed(dtype: str, batch: int, length: int) -> tuple[Any, ...]:
    """Zipf-distributed lengths; the peer has as many tokens in requests of equal length."""
    z = np.minimum(np.random.default_rng(0).zipf(1.5, batch), 200)
    pages = np.maximum(1, (z / z.sum() * batch * length / PAGE_SIZE).astype(int))
    equal = np.full(batch, pages.sum() // batch)

    def run(num_pages: np.ndarray) -> Callable[[], Any]:
        ids = np.random.default_rng(0).permutation(num_pages.sum())
        tables = np.split(ids, np.cumsum(num_pages)[:-1])
        return _paged_decode(dtype, tables, (PAGE_SIZE * num_pages).tolist())

    tokens = PAGE_SIZE * int(pages.sum())
    row_bytes = 2 * NUM_KV_HEADS * HEAD_DIM * jnp.dtype(dtype).itemsize
    name = f"cpu/decode/{batch}xzipf{length}/32-8/d128/{dtype}/page16"
    flops = 4 * tokens * NUM_QO_HEADS * HEAD_DIM
    return name, {"ours": run(pages), "ours, equal lengths": run(equal)}, tokens * row_bytes, flops


# ---- forward and backward: each run gives o and the gradients of q, k and v


def _train(attend: Callable[..., Any], q: Any, k: Any, v: Any) -> Callable[[], Any]:
    d_o = jax.random.normal(jax.random.key(4), (*q.shape[:-1], v.shape[-1]), q.dtype)

    @jax.jit
    def step(q: Any, k: Any, v: Any) -> Any:
        o, vjp = jax.vjp(attend, q, k, v)
        return o, vjp(d_o)

    return lambda: jax.block_until_ready(step(q, k, v))


def _train_torch(q: Any, k: Any, v: Any) -> Callable[[], Any]:
    dtype = torch.bfloat16 if q.dtype == jnp.bfloat16 else torch.float32
    to = [torch.tensor(np.asarray(a, np.float32)).to(dtype).transpose(1, 2) for a in (q, k, v)]
    to = [a.contiguous().requires_grad_() for a in to]
    d_o = torch.randn_like(to[0])

    def run() -> Any:
        o = torch.nn.functional.scaled_dot_product_attention(*to, is_causal=True)
        return torch.autograd.grad(o, to, d_o)

    return run


def _train_dense(dtype: str, batch: int, length: int) -> tuple[Callable[[], Any], Any]:
    keys = jax.random.split(jax.random.key(5), 3)
    shape = (batch, length, PREFILL_HEADS, HEAD_DIM)
    q, k, v = (jax.random.normal(key, shape, dtype) for key in keys)
    attend = functools.partial(ja.dot_product_attention, is_causal=True)
    return _train(attend, q, k, v), (q, k, v)


def _train_planned(
    dtype: str, qo_lens: Any, kv_lens: Any, tables: list[np.ndarray] | None = None
) -> Callable[[], Any]:
    """Trains on ragged keys or, with `tables` (page ids of each request), on pages."""
    qo_indptr = np.concatenate([[0], np.cumsum(qo_lens)])
    num_tokens, num_keys = int(qo_indptr[-1]), int(np.sum(kv_lens))
    heads = PREFILL_HEADS, PREFILL_HEADS, HEAD_DIM
    make_spec = functools.partial(
        ja.AttentionSpec,
        *heads,
        dtype=dtype,
        max_batch=len(qo_lens),
        max_qo_tokens=num_tokens,
        target="cpu",
    )
    if tables is None:
        spec = make_spec(page_size=None, max_kv_tokens=num_keys)
        plan, rows = ja.plan(spec, qo_indptr, kv_lens), (num_keys,)
    else:
        page_indptr = np.concatenate([[0], np.cumsum([len(table) for table in tables])])
        pages = np.concatenate(tables)
        num_pages = int(pages.max()) + 1
        spec = make_spec(page_size=PAGE_SIZE, max_kv_pages=len(pages), num_pages=num_pages)
        plan, rows = ja.plan(spec, qo_indptr, kv_lens, page_indptr, pages), (num_pages, PAGE_SIZE)
    keys = jax.random.split(jax.random.key(6), 3)
    q = jax.random.normal(keys[0], (num_tokens, PREFILL_HEADS, HEAD_DIM), dtype)
    k, v = (jax.random.normal(key, (*rows, PREFILL_HEADS, HEAD_DIM), dtype) for key in keys[1:])
    return _train(lambda q, k, v: ja.attention(q, k, v, plan), q, k, v)


def _train_flops(qo_lens: Any, kv_lens: Any) -> float:
    """Floating-point operations of causal attention: two matmuls forward, five backward."""
    qo, kv = np.asarray(qo_lens, float), np.asarray(kv_lens, float)
    return 7 * 2 * float((qo * (kv - qo / 2)).sum()) * PREFILL_HEADS * HEAD_DIM


def backward(dtype: str, batch: int, length: int) -> tuple[Any, ...]:
    ours, (q, k, v) = _train_dense(dtype, batch, length)
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True)
    runs = {"ours": ours, "jax.nn": _train(attend, q, k, v)}
    if torch:
        runs["torch SDPA"] = _train_torch(q, k, v)
    lens = [length] * batch
    return (
        f"cpu/backward/{batch}x{length}/8/d128/{dtype}/causal",
        runs,
        10 * q.nbytes,
        _train_flops(lens, lens),
    )


def ragged_backward(dtype: str, batch: int, mean: int) -> tuple[Any, ...]:
    """Uniform lengths from 1 to twice the mean; the peer pads them to the longest."""
    lens = np.random.default_rng(0).integers(1, 2 * mean, batch)
    padded, _ = _train_dense(dtype, batch, int(lens.max()))
    runs = {"ours": _train_planned(dtype, lens, lens), "ours, padded": padded}
    row_bytes = PREFILL_HEADS * HEAD_DIM * jnp.dtype(dtype).itemsize
    return (
        f"cpu/backward/{batch}xuniform{mean}/8/d128/{dtype}/causal",
        runs,
        10 * int(lens.sum()) * row_bytes,
        _train_flops(lens, lens),
    )


def packed_backward(dtype: str, documents: int, length: int) -> tuple[Any, ...]:
    """Packed documents. The peers use the dense entry: a batch of as many documents, and one
    sequence with as much work, which reads and writes less."""
    lens = [length] * documents
    whole = round(length * documents**0.5 / 16) * 16
    batch, _ = _train_dense(dtype, documents, length)
    one, _ = _train_dense(dtype, 1, whole)
    row_bytes = PREFILL_HEADS * HEAD_DIM * jnp.dtype(dtype).itemsize
    return (
        f"cpu/backward/packed{documents}x{length}/8/d128/{dtype}/causal",
        {
            "ours": _train_planned(dtype, lens, lens),
            f"ours, {documents}x{length}": batch,
            f"ours, 1x{whole}": one,
        },
        10 * documents * length * row_bytes,
        _train_flops(lens, lens),
    )


def group_backward(dtype: str, group: int, prefix: int, own: int) -> tuple[Any, ...]:
    """Answers that share one prompt, attended once; the peer has as many whole sequences."""
    num_prefix, num_own = prefix // PAGE_SIZE, own // PAGE_SIZE
    prompt = np.arange(num_prefix)
    tables = [prompt] + [
        np.concatenate([prompt, num_prefix + i * num_own + np.arange(num_own)])
        for i in range(group)
    ]
    qo, kv = [prefix] + [own] * group, [prefix] + [prefix + own] * group
    lens = [prefix + own] * group
    row_bytes = PREFILL_HEADS * HEAD_DIM * jnp.dtype(dtype).itemsize
    return (
        f"cpu/backward/group{group}x{prefix}+{own}/8/d128/{dtype}/causal",
        {
            "ours": _train_planned(dtype, qo, kv, tables),
            "ours, not shared": _train_planned(dtype, lens, lens),
        },
        10 * (prefix + group * own) * row_bytes,
        _train_flops(qo, kv),
    )


# ---- variants: a user's functions


def variant(dtype: str, length: int, name: str) -> tuple[Any, ...]:
    """A user's function; the peer is the built-in equivalent or, if there is none, no variant."""
    logits, mask, operands, built_in = _variants(length, dtype)[name]
    q, k, v = jax.random.normal(
        jax.random.key(4), (3, length, PREFILL_HEADS, HEAD_DIM), jnp.dtype(dtype)
    )

    def run(own: ja.Variant | None, **options: Any) -> Callable[[], Any]:
        spec = ja.AttentionSpec(
            PREFILL_HEADS,
            PREFILL_HEADS,
            HEAD_DIM,
            dtype=dtype,
            page_size=None,
            max_batch=1,
            max_qo_tokens=length,
            max_kv_tokens=length,
            variant=own,
            target="cpu",
            **({"causal": False} | options),
        )
        plan = jax.device_put(ja.plan(spec, [0, length], [length]))
        given = {n: jnp.asarray(x) for n, x in operands.items()} if own else None
        attend = jax.jit(
            lambda q, k, v, plan, given: ja.attention(q, k, v, plan, variant_operands=given)
        )
        return lambda: attend(q, k, v, plan, given).block_until_ready()

    own = ja.Variant(logits, mask, operands=operands)
    runs = {"ours": run(own), "built in" if built_in else "no variant": run(None, **built_in)}
    if name == "bias":
        runs["jax.nn"] = _jax_bias(q, k, v, operands["bias"])
        if torch:
            runs["torch SDPA"] = _torch_bias(q, k, v, operands["bias"])
    flops = 4 * length**2 * PREFILL_HEADS * HEAD_DIM
    return f"cpu/variant/{name}/1x{length}/8/d128/{dtype}", runs, 4 * q.nbytes, flops


def _jax_bias(q: Any, k: Any, v: Any, bias: np.ndarray) -> Callable[[], Any]:
    one = [x[None] for x in (q, k, v)]
    attend = jax.jit(lambda q, k, v, bias: jax.nn.dot_product_attention(q, k, v, bias=bias))
    on_device = jnp.asarray(bias)
    return lambda: attend(*one, on_device).block_until_ready()


def _torch_bias(q: Any, k: Any, v: Any, bias: np.ndarray) -> Callable[[], Any]:
    dtype = torch.bfloat16 if q.dtype == jnp.bfloat16 else torch.float32
    to = [torch.tensor(np.asarray(a, np.float32)).to(dtype) for a in (q, k, v)]
    to = [a.transpose(0, 1)[None].contiguous() for a in to]
    attn_mask = torch.tensor(np.asarray(bias, np.float32)).to(dtype)

    def run() -> Any:
        with torch.no_grad():
            return torch.nn.functional.scaled_dot_product_attention(*to, attn_mask=attn_mask)

    return run


def _variants(
    length: int, dtype: str
) -> dict[str, tuple[Any, Any, dict[str, np.ndarray], dict[str, Any]]]:
    """Returns logits, mask, operands and the built-in equivalent's AttentionSpec fields, if any."""
    rng = np.random.default_rng(0)
    heads = np.arange(1, PREFILL_HEADS + 1)
    array = rng.normal(size=(1, PREFILL_HEADS, length, length) if length <= 2048 else (1, 1, 1, 1))
    return {
        "causal": (None, causal, {}, {"causal": True}),
        "window": (
            None,
            lambda at: (at.kv_pos <= at.q_pos) & (at.q_pos - at.kv_pos <= 1024),
            {},
            {"causal": True, "window_left": 1024},
        ),
        "soft_cap": (soft_cap_of(30.0), None, {}, {"logits_soft_cap": 30.0}),
        "alibi": (alibi, None, {"slopes": np.float32(2.0**-heads)}, {}),
        "t5": (
            t5_bias,
            None,
            {"table": rng.normal(size=(32, PREFILL_HEADS)).astype(np.float32)},
            {},
        ),
        "documents": (
            None,
            documents_of_rows,
            {"doc": np.int32(np.arange(length) * 16 // length)},
            {},
        ),
        "bias": (dense_bias, None, {"bias": array.astype(jnp.dtype(dtype))}, {}),
    }


def drawn(dtype: str, workload: Workload) -> tuple[Any, ...]:
    size = jnp.dtype(dtype).itemsize // 2  # floors of a Workload are those of bf16
    name = f"{workload.id}/{dtype}"
    return name, random_cpu.runs(workload, dtype), size * workload.bytes, workload.flops


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0, help="a workload, all peers together")
    parser.add_argument("--only", default="", help="workloads whose name contains this; no file")
    isa = ja._core.cpu_isa()
    parser.add_argument("--random", type=int, default=0, metavar="N", help="N drawn workloads")
    parser.add_argument("--seed", type=int, default=0, help="of --random")
    parser.add_argument(
        "--out", type=Path, help="result file instead of results/cpu-ISA.json; --random: none"
    )
    arguments = parser.parse_args()

    read = read_bytes_per_us()
    matmul = {dtype: matmul_flops_per_us(dtype) for dtype in ("float32", "bfloat16")}
    print(f"isa {isa}, {len_processors()} threads, read {read / 1e3:.1f} GB/s, matmul")
    print({dtype: f"{rate / 1e3:.0f} GFLOP/s" for dtype, rate in matmul.items()})
    rows = []
    computes: tuple[Callable[..., Any], ...] = (
        drawn,
        prefill,
        backward,
        ragged_backward,
        packed_backward,
        group_backward,
    )
    workloads = [
        (make, dtype, *shape)
        for dtype in ("float32", "bfloat16")
        for make, shapes in (
            (decode, [(1, 16384), (8, 2048)]),
            (shared_prefix, [(32, 4096, 128)]),
            (skewed, [(16, 1024)]),
            (
                prefill,
                [
                    (512, True),
                    (2048, True),
                    (2048, False),
                    (701, False, 3, 12, 12, 64),
                    (1531, True, 1, 16, 4),
                    (2048, True, 1, 8, 8, 96),
                    (2048, True, 1, 8, 8, 256),
                ],
            ),
            (backward, [(1, 2048), (4, 512)]),
            (ragged_backward, [(16, 512)]),
            (packed_backward, [(16, 512)]),
            (group_backward, [(8, 1024, 128)]),
        )
        for shape in shapes
    ]
    names = ("causal", "window", "soft_cap", "alibi", "t5", "documents")
    workloads += [(variant, "float32", 4096, name) for name in names]
    workloads += [(variant, dtype, 2048, "bias") for dtype in ("float32", "bfloat16")]
    workloads += [(decode_format, "bfloat16", 8, 2048, kv_dtype) for kv_dtype in FORMATS]
    workloads.append((decode_format, "bfloat16", 8, 2048, "int8", True))
    if arguments.random:
        bounds = random_workloads.CPU_BOUNDS
        workloads = [
            (drawn, ("float32", "bfloat16")[i % 2], workload)
            for i, workload in enumerate(
                random_workloads.draw(arguments.random, arguments.seed, bounds=bounds)
            )
        ]
    ratios = {}
    for make, dtype, *shape in workloads:
        name, runs, num_bytes, flops = make(dtype, *shape)
        if arguments.only not in name:
            continue
        us = medians_us(runs, arguments.seconds)
        ours = us.pop("ours")
        floor = max(num_bytes / read, flops / matmul["float32"] if make in computes else 0)
        rows.append(
            {
                "workload": name,
                "median_us": round(ours, 1),
                "floor_us": round(floor, 1),
                "gbps": round(num_bytes / ours / 1e3, 2),
                "tflops": round(flops / ours / 1e6, 4),
                "peers": {peer: round(value, 1) for peer, value in us.items()},
            }
        )
        best = min(us.values())
        ratios[name] = best / ours
        print(
            f"{name:48s} {ours:9.0f} us  {num_bytes / ours / 1e3:6.1f} GB/s"
            f" {flops / ours / 1e3:7.1f} GFLOP/s  floor {floor:8.0f}  peers {us}"
            f"  best peer / ours {best / ours:.2f}",
            flush=True,
        )
    result = {
        "device": processor(),
        "driver": "torch " + torch.__version__ if torch else "",
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
        "sources_digest": sources_digest("cpu"),
        "read_gbps": round(read / 1e3, 1),
        "rows": rows,
    }
    if arguments.random:
        print(random_workloads.distribution(ratios))
        if arguments.out is None:
            return
        result |= {"seed": arguments.seed}
    if arguments.only:
        return
    if arguments.out is None:
        arguments.out = RESULTS / f"cpu-{isa}.json"
    arguments.out.parent.mkdir(exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
