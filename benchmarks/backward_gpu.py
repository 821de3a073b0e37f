"""The backward pass on a GPU, causal, bf16: TFLOP/s of five products, beside cuDNN and torch.

python -m benchmarks.backward_gpu [--out FILE]
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_attn as ja
from benchmarks import device_clock
from benchmarks.digest import sources_digest
from benchmarks.report import log
from jax_attn import gradients, reference

try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError:
    torch = None

TOKENS, HEADS = 16384, 32
SHAPES = [(4096, 128), (8192, 128), (16384, 128), (16384, 64)]  # length, head_dim
GROUP, PREFIX, OWN = 8, 8192, 1024
GROUP_HEADS, PAGE_SIZE = 8, 16
CALLS = 3  # that are timed together
REPEATS = 5


def flops(qo_lens: Any, kv_lens: Any, heads: int, head_dim: int) -> float:
    """Of one product, causal: the queries are a request's last tokens."""
    qo, kv = np.asarray(qo_lens, float), np.asarray(kv_lens, float)
    return 2 * float((qo * (kv - qo / 2)).sum()) * heads * head_dim


def median_us(run: Callable[[], Any], calls: int = CALLS) -> float:
    def burst(num_calls: int) -> list[Any]:
        return [run() for _ in range(num_calls)]

    jax.block_until_ready(burst(2))
    times = (
        device_clock.elapsed_us(lambda: burst(1), lambda: burst(calls)) for _ in range(REPEATS)
    )
    return statistics.median(times) / calls


class Planned:
    """A batch of ours, ragged or over page tables, with what its backward pass needs."""

    def __init__(
        self,
        qo_lens: Any,
        kv_lens: Any,
        heads: int,
        head_dim: int,
        tables: list[np.ndarray] | None = None,
    ):
        qo_indptr = np.concatenate([[0], np.cumsum(qo_lens)])
        num_tokens, num_keys = int(qo_indptr[-1]), int(np.sum(kv_lens))
        make_spec = functools.partial(
            ja.AttentionSpec, heads, heads, head_dim, max_batch=len(qo_lens),
            max_qo_tokens=num_tokens,
        )  # fmt: skip
        rows: tuple[int, ...]
        if tables is None:
            spec = make_spec(page_size=None, max_kv_tokens=num_keys)
            plan, rows = ja.plan(spec, qo_indptr, kv_lens), (num_keys,)
        else:
            page_indptr = np.concatenate([[0], np.cumsum([len(table) for table in tables])])
            pages = np.concatenate(tables)
            num_pages = int(pages.max()) + 1
            spec = make_spec(page_size=PAGE_SIZE, max_kv_pages=len(pages), num_pages=num_pages)
            plan = ja.plan(spec, qo_indptr, kv_lens, page_indptr, pages)
            rows = num_pages, PAGE_SIZE
        self.plan = plan = jax.device_put(plan)
        keys = jax.random.split(jax.random.key(6), 4)
        q_shape, kv_shape = (num_tokens, heads, head_dim), (*rows, heads, head_dim)
        self.q, self.k, self.v, self.d_o = (
            jax.random.normal(key, shape, jnp.bfloat16)
            for key, shape in zip(keys, (q_shape, kv_shape, kv_shape, q_shape), strict=True)
        )

        @jax.jit
        def forward(q: Any, k: Any, v: Any) -> Any:
            return ja.attention(q, k, v, plan, return_lse=True)

        @jax.jit
        def backward(q: Any, k: Any, v: Any, d_o: Any, o: Any, lse: Any) -> Any:
            d = gradients.row_sums(o, d_o, jnp.zeros_like(lse))
            return gradients.gradients(q, k, v, plan.buffer, jnp.int32(0), lse, d, d_o, plan.spec)

        @jax.jit
        def train(q: Any, k: Any, v: Any, d_o: Any) -> Any:
            o, vjp = jax.vjp(lambda q, k, v: ja.attention(q, k, v, plan), q, k, v)
            return o, vjp(d_o)

        self.forward = lambda: forward(self.q, self.k, self.v)
        o, lse = self.forward()
        self.backward = lambda: backward(self.q, self.k, self.v, self.d_o, o, lse)
        self.train = lambda: train(self.q, self.k, self.v, self.d_o)


def check(head_dim: int) -> None:
    """By the kernels that are timed, ragged, against the float64 reference; raises."""
    lens = np.array([150, 1, 140])
    indptr = np.concatenate([[0], np.cumsum(lens)])
    spec = ja.AttentionSpec(
        2, 2, head_dim, page_size=None, max_batch=3, max_qo_tokens=300, max_kv_tokens=291
    )
    plan = ja.plan(spec, indptr, lens)
    keys = jax.random.split(jax.random.key(1), 4)
    shapes = (300, 2, head_dim), (291, 2, head_dim), (291, 2, head_dim), (300, 2, head_dim)
    q, k, v, d_o = (
        jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)
    )

    @jax.jit
    def train(q: Any, k: Any, v: Any, d_o: Any) -> Any:
        return jax.vjp(lambda q, k, v: ja.attention(q, k, v, plan), q, k, v)[1](d_o)

    expect = functools.partial(
        reference.attention_vjp,
        np.asarray(d_o),
        np.zeros((300, 2), np.float32),
        np.asarray(q),
        np.asarray(k),
        np.asarray(v),
        qo_indptr=indptr,
        kv_lens=lens,
        spec=plan.spec,
    )
    got, want, sizes = train(q, k, v, d_o), expect()[:3], expect(magnitudes=True)[:3]
    for i, name in enumerate(("dq", "dk", "dv")):
        error = np.abs(np.asarray(got[i], np.float64) - want[i])
        error /= sizes[i] + 1e-3 * sizes[i].max()
        if not error.max() < 2.5 * float(jnp.finfo(jnp.bfloat16).eps):
            raise AssertionError(f"d{head_dim}: {name}: relative error {error.max()}")
    log(f"d{head_dim}: dq, dk, dv agree with the float64 reference")


def check_bits(run: Callable[[], Any], repeats: int = 20) -> None:
    first = run()
    for _ in range(repeats):
        same = [bool(jnp.array_equal(a, b)) for a, b in zip(first, run(), strict=True)]
        if not all(same):
            raise AssertionError(f"dq, dk, dv have the same bits: {same}")


def jax_cudnn(length: int, head_dim: int) -> dict[str, float]:
    shape = TOKENS // length, length, HEADS, head_dim
    keys = jax.random.split(jax.random.key(2), 4)
    q, k, v, d_o = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys)
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")

    forward = jax.jit(attend)

    @jax.jit
    def train(q: Any, k: Any, v: Any, d_o: Any) -> Any:
        o, vjp = jax.vjp(attend, q, k, v)
        return o, vjp(d_o)

    both = median_us(lambda: train(q, k, v, d_o))
    return {"backward": both - median_us(lambda: forward(q, k, v)), "both": both}


def of_torch(backend: Any, length: int, head_dim: int) -> dict[str, float]:
    shape = TOKENS // length, HEADS, length, head_dim
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    q, k, v = (torch.randn(shape, **options).requires_grad_() for _ in range(3))
    d_o = torch.randn(shape, **options)

    def time_us(run: Callable[[], Any]) -> float:
        times = []
        for _ in range(REPEATS + 1):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            run()  # hides what the host does
            begin.record()
            for _ in range(CALLS):
                run()
            end.record()
            torch.cuda.synchronize()
            times.append(1e3 * begin.elapsed_time(end) / CALLS)
        return statistics.median(times[1:])

    def attend() -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    with sdpa_kernel(backend):
        o = attend()
        backward = time_us(lambda: torch.autograd.grad(o, (q, k, v), d_o, retain_graph=True))
        return {
            "backward": backward,
            "both": time_us(lambda: torch.autograd.grad(attend(), (q, k, v), d_o)),
        }


def dense(length: int, head_dim: int) -> dict[str, Any]:
    lens = [length] * (TOKENS // length)
    ours = Planned(lens, lens, HEADS, head_dim)
    check_bits(ours.backward)
    us: dict[str, dict[str, float]] = {
        "ours": {"backward": median_us(ours.backward), "both": median_us(ours.train)}
    }
    del ours
    peers: dict[str, Callable[[], dict[str, float]]] = {
        "jax.nn cudnn": lambda: jax_cudnn(length, head_dim)
    }
    if torch is not None:
        for name, backend in (
            ("torch cudnn", SDPBackend.CUDNN_ATTENTION),
            ("torch flash", SDPBackend.FLASH_ATTENTION),
        ):
            peers[name] = functools.partial(of_torch, backend, length, head_dim)
    for name, measure in peers.items():
        try:
            us[name] = measure()
        except Exception as error:  # what a peer lacks is no failure of ours
            log(f"{name}: {str(error).splitlines()[0][:100]}")
        if torch is not None:
            torch.cuda.empty_cache()
    one = flops(lens, lens, HEADS, head_dim)
    name = f"causal d{head_dim} {len(lens)}x{length}"
    for who, times in us.items():
        log(
            f"{name:22} {who:14} backward {times['backward']:7.0f} us"
            f" {5 * one / times['backward'] / 1e6:5.0f} TFLOP/s, with forward"
            f" {times['both']:7.0f} us {7 * one / times['both'] / 1e6:5.0f}"
        )
    return {"workload": name, "us": us, "tflops": 5 * one / us["ours"]["backward"] / 1e6}


def group() -> dict[str, Any]:
    """Answers to one prompt, whose prompt is attended once; beside it as many whole sequences."""
    num_prefix, num_own = PREFIX // PAGE_SIZE, OWN // PAGE_SIZE
    prompt = np.arange(num_prefix)
    tables = [prompt] + [
        np.concatenate([prompt, num_prefix + i * num_own + np.arange(num_own)])
        for i in range(GROUP)
    ]
    qo, kv = [PREFIX] + [OWN] * GROUP, [PREFIX] + [PREFIX + OWN] * GROUP
    whole = [PREFIX + OWN] * GROUP
    us = {}
    for name, batch in (
        ("shared, pages", (qo, kv, GROUP_HEADS, 128, tables)),
        ("not shared, ragged", (whole, whole, GROUP_HEADS, 128)),
    ):
        planned = Planned(*batch)
        us[name] = {"backward": median_us(planned.backward), "both": median_us(planned.train)}
        log(f"group G={GROUP} P={PREFIX} R={OWN}: {name:20} {us[name]}")
    shared, apart = us.values()
    ratio = {what: apart[what] / shared[what] for what in shared}
    log(f"group: not shared / shared {ratio}")
    return {"workload": f"group{GROUP}x{PREFIX}+{OWN}", "us": us, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    for head_dim in (64, 128):
        check(head_dim)
    rows = [dense(*shape) for shape in SHAPES]
    rows.append(group())
    if arguments.out:
        result = {
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "sources_digest": sources_digest(),
            "rows": rows,
        }
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
