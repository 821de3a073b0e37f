"""Page tables of KV heads: every head of a request has pages and a length of its own.

A page holds keys of one head, so a head that keeps fewer keys gives pages back: SnapKV, H2O and
RazorAttention keep other keys in each head (docs/head_tables.md). The plan has every head of a
request as a request of one KV head: number r * num_kv_heads + h is head h of request r. So one
launch serves all heads, and the planner balances heads of different lengths.

Pools are [num_pages, page_size, 1, head_dim]. Keys that were dropped leave no hole: a head's keys
lie one behind the other. They must have been rotated before, by their positions in the text. Query
tokens come after all keys of a head, so each sees those that the head kept.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn._ops.attention import attention as _attention
from jax_attn._ops.kv_cache import append_kv as _append_kv
from jax_attn._plan.plan import AttentionPlan
from jax_attn._plan.plan import plan as _plan
from jax_attn._spec.spec import AttentionSpec

__all__ = ["HeadPlan", "append_kv", "attention", "plan", "spec"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadPlan:
    """A plan whose requests are the heads of requests. A pytree.

    rows: [num_kv_heads * max_qo_tokens] i32, or None. The row of q, as [token, kv head], that each
        row of the plan is. None: they are the same, as no request has several query tokens.
    num_kv_heads: heads of a request. Static.
    """

    plan: AttentionPlan
    rows: jax.Array | np.ndarray | None
    num_kv_heads: int = dataclasses.field(metadata={"static": True})


def spec(
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    max_batch: int,
    max_qo_tokens: int,
    **fields: Any,
) -> AttentionSpec:
    """The AttentionSpec of one KV head, for max_batch requests of num_kv_heads heads.

    max_kv_pages, among the `fields` of AttentionSpec, counts the pages of all heads.

    Raises ValueError as AttentionSpec does, or if num_kv_heads does not divide num_qo_heads.
    """
    if num_kv_heads < 1 or num_qo_heads % num_kv_heads:
        raise ValueError(
            "head_tables.spec: num_qo_heads: expected a multiple of num_kv_heads ="
            f" {num_kv_heads}, got {num_qo_heads}."
        )
    fields = {"share_prefixes": False} | fields
    return AttentionSpec(
        num_qo_heads // num_kv_heads,
        1,
        head_dim,
        max_batch=max_batch * num_kv_heads,
        max_qo_tokens=max_qo_tokens * num_kv_heads,
        **fields,
    )


def plan(
    spec: AttentionSpec, qo_indptr: Any, kv_lens: Any, page_indptr: Any, page_indices: Any
) -> HeadPlan:
    """Plan a batch on the host.

    spec: from `spec`.
    qo_indptr: [batch_size + 1], integers, tokens. As in jax_attn.plan.
    kv_lens: [batch_size, num_kv_heads], integers, tokens. Keys of each head, new ones included.
    page_indptr: [batch_size * num_kv_heads + 1], integers, pages: request by request, head by head.
    page_indices: [nnz_pages], integers. The pages of the heads, in this order.

    Raises ValueError for arrays that do not fit, and as jax_attn.plan does: its requests are heads.
    """
    qo_indptr, kv_lens = np.asarray(qo_indptr), np.asarray(kv_lens)
    if kv_lens.ndim != 2 or qo_indptr.shape != (len(kv_lens) + 1,):
        raise ValueError(
            "head_tables.plan: kv_lens: expected [batch_size, num_kv_heads], with qo_indptr"
            f" [batch_size + 1], got {list(kv_lens.shape)} and {list(qo_indptr.shape)}."
        )
    heads = kv_lens.shape[1]
    if heads < 1 or spec.max_qo_tokens % heads or spec.max_batch % heads:
        raise ValueError(
            "head_tables.plan: kv_lens: expected as many columns as head_tables.spec had"
            f" num_kv_heads, got {heads} for {spec.max_batch} requests of one head."
        )
    qo_lens = np.diff(qo_indptr)
    if qo_indptr[0] != 0 or (qo_lens < 0).any():
        raise ValueError(
            "head_tables.plan: qo_indptr: expected offsets that begin with 0 and never decrease,"
            f" got {qo_indptr.tolist()}."
        )
    head_indptr = np.append(0, np.cumsum(np.repeat(qo_lens, heads)))
    made = _plan(spec, head_indptr, kv_lens.reshape(-1), page_indptr, page_indices)
    if (qo_lens <= 1).all():
        return HeadPlan(made, None, heads)
    rows = np.arange(spec.max_qo_tokens, dtype=np.int32)
    for begin, end in itertools.pairwise(qo_indptr):
        table = rows[begin * heads : end * heads].reshape(-1, heads)
        rows[begin * heads : end * heads] = table.T.reshape(-1)
    return HeadPlan(made, rows, heads)


def attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    plan: HeadPlan,
    *,
    layer: Any = None,
    variant_operands: Mapping[str, Any] | None = None,
) -> jax.Array:
    """Attention of a whole batch, over each head's own keys.

    q: [max_qo_tokens, num_qo_heads, head_dim], the spec's dtype.
    k_pages, v_pages: [num_pages, page_size, 1, head_dim], or stacked with `layer`.
    layer, variant_operands: as in jax_attn.attention. A variant sees the heads of a group only,
        and heads of requests as requests.

    Returns o: [max_qo_tokens, num_qo_heads, head_dim], q's dtype. Differentiable as
    jax_attn.attention is.

    Raises ValueError if q has another shape, and as jax_attn.attention does.
    """
    x = _by_heads(q, plan, "attention", "q", plan.plan.spec.num_qo_heads)
    o = _attention(x, k_pages, v_pages, plan.plan, layer=layer, variant_operands=variant_operands)
    if plan.rows is not None:
        o = jnp.zeros_like(o).at[plan.rows].set(o, unique_indices=True)
    return o.reshape(*q.shape[:2], o.shape[-1])


def append_kv(
    k_pages: jax.Array,
    v_pages: jax.Array,
    k_new: jax.Array,
    v_new: jax.Array,
    plan: HeadPlan,
    *,
    layer: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Write new keys and values to the end of each head's pages, in place as jax_attn.append_kv.

    k_new, v_new: [max_qo_tokens, num_kv_heads, head_dim], the dtype of the pages.

    Raises ValueError if k_new or v_new has another shape, and as jax_attn.append_kv does.
    """
    k, v = (
        _by_heads(x, plan, "append_kv", name, 1) for name, x in (("k_new", k_new), ("v_new", v_new))
    )
    return _append_kv(k_pages, v_pages, k, v, plan.plan, layer=layer)


def _by_heads(x: jax.Array, plan: HeadPlan, op: str, name: str, group: int) -> jax.Array:
    """[tokens, heads, head_dim] as [rows of the plan, heads of a group, head_dim]."""
    rows = plan.plan.spec.max_qo_tokens
    expected = (rows // plan.num_kv_heads, plan.num_kv_heads * group)
    if x.ndim != 3 or x.shape[:2] != expected:
        raise ValueError(
            f"head_tables.{op}: {name}: expected [{expected[0]}, {expected[1]}, head_dim], the"
            f" max_qo_tokens of head_tables.spec and heads of head_tables.plan, got"
            f" {list(x.shape)}."
        )
    x = x.reshape(rows, group, x.shape[2])
    return x if plan.rows is None else x[jnp.asarray(plan.rows)]
