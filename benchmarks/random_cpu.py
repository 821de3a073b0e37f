"""A drawn workload (random_workloads.py) on a CPU: ours, jax.nn and torch.

Ours is one call over a plan. The peers get each group of requests with equal lengths as one dense
call, without padding, and all calls of a batch are timed together. Beside torch, jax.nn is left
out where there are more than MAX_GROUPS groups, since it compiles a program for each.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_attn as ja
from benchmarks.workloads import Workload

try:
    import torch
    from torch.nn.attention.bias import causal_lower_right
except ImportError:  # a peer, not a dependency
    torch = None

MAX_GROUPS = 4

Group = tuple[int, int, int]  # requests, queries of each, keys of each


def runs(w: Workload, dtype: str) -> dict[str, Callable[[], Any]]:
    """Returns a call by peer. Each gives o, in training also the gradients of q, k and v."""
    counts = collections.Counter(zip(w.qo_lens, w.kv_lens, strict=True))
    groups = [(count, *lengths) for lengths, count in counts.items()]
    found = {"ours": _ours(w, dtype)}
    if len(groups) <= MAX_GROUPS or torch is None:
        found["jax.nn"] = _jax_nn(w, dtype, groups)
    if torch is not None:
        found["torch SDPA"] = _torch(w, dtype, groups)
    return found


def _normal(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def _ours(w: Workload, dtype: str) -> Callable[[], Any]:
    spec = ja.AttentionSpec(
        w.num_qo_heads,
        w.num_kv_heads,
        w.head_dim,
        dtype=dtype,
        page_size=w.page_size,
        causal=w.causal,
        max_batch=w.batch_size,
        max_qo_tokens=w.nnz_qo,
        target="cpu",
        **({"max_kv_pages": w.num_pages} if w.page_size else {"max_kv_tokens": sum(w.kv_lens)}),
    )
    table = (w.page_indptr, w.page_indices()) if w.page_size else ()
    plan = jax.device_put(ja.plan(spec, w.qo_indptr, w.kv_lens, *table))
    rows = (w.num_pages, w.page_size) if w.page_size else (sum(w.kv_lens),)
    q = _normal(0, (w.nnz_qo, w.num_qo_heads, w.head_dim), dtype)
    k, v = (_normal(i, (*rows, w.num_kv_heads, w.head_dim), dtype) for i in (1, 2))

    def attend(q: Any, k: Any, v: Any) -> Any:
        return ja.attention(q, k, v, plan)

    step = jax.jit(_step(attend, w, _normal(3, q.shape, dtype)))
    return lambda: jax.block_until_ready(step(q, k, v))


def _step(attend: Callable[..., Any], w: Workload, d_o: Any) -> Callable[..., Any]:
    if w.kind != "backward":
        return attend

    def step(*operands: Any) -> Any:
        o, pull = jax.vjp(attend, *operands)
        return o, pull(d_o)

    return step


def _dense(w: Workload, dtype: str, groups: list[Group]) -> list[list[jax.Array]]:
    """q, k and v of each group: [requests, tokens, heads, head_dim]."""
    return [
        [
            _normal(i, (count, tokens, heads, w.head_dim), dtype)
            for i, (tokens, heads) in enumerate(
                ((qo, w.num_qo_heads), (kv, w.num_kv_heads), (kv, w.num_kv_heads))
            )
        ]
        for count, qo, kv in groups
    ]


def _jax_nn(w: Workload, dtype: str, groups: list[Group]) -> Callable[[], Any]:
    dense = _dense(w, dtype, groups)

    def attend(q: Any, k: Any, v: Any) -> Any:
        qo, kv = q.shape[1], k.shape[1]
        if not w.causal or qo == 1:
            return jax.nn.dot_product_attention(q, k, v)
        if qo == kv:
            return jax.nn.dot_product_attention(q, k, v, is_causal=True)
        mask = np.arange(kv) <= np.arange(qo)[:, None] + kv - qo
        return jax.nn.dot_product_attention(q, k, v, mask=jnp.asarray(mask)[None, None])

    @jax.jit
    def step(dense: Any) -> Any:
        return [_step(attend, w, jnp.ones_like(q))(q, k, v) for q, k, v in dense]

    return lambda: jax.block_until_ready(step(dense))


def _torch(w: Workload, dtype: str, groups: list[Group]) -> Callable[[], Any]:
    kind = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    dense = [
        [torch.tensor(np.asarray(x, np.float32)).to(kind).transpose(1, 2).contiguous() for x in one]
        for one in _dense(w, dtype, groups)
    ]
    gqa = w.num_qo_heads != w.num_kv_heads
    trains = w.kind == "backward"

    def attend(q: Any, k: Any, v: Any) -> Any:
        qo, kv = q.shape[2], k.shape[2]
        if not w.causal or qo == 1:
            how: dict[str, Any] = {}
        elif qo == kv:
            how = {"is_causal": True}
        else:
            how = {"attn_mask": causal_lower_right(qo, kv)}
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=gqa, **how)

    def run() -> Any:
        if not trains:
            with torch.no_grad():
                return [attend(*one) for one in dense]
        results = []
        for one in dense:
            for x in one:
                x.requires_grad_()
            o = attend(*one)
            results.append(torch.autograd.grad(o, one, torch.ones_like(o)))
        return results

    return run
