"""gated_delta_rule: linear attention on [batch, seq, heads, dim], for training code."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_attn._ops.linear_attention import O_NAME
from jax_attn._ops.linear_chunks import chunk_terms, next_state
from jax_attn._ops.linear_kernel import LinearCall, LinearOperands, attend
from jax_attn._ops.operands import as_array, with_default_promotion
from jax_attn._spec.state_spec import LinearAttentionSpec

_OP = "gated_delta_rule"


@with_default_promotion
def gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array | None,
    beta: jax.Array | None,
    *,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    l2_norm: bool = False,
    delta_rule: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """The gated delta rule (arXiv 2412.06464) over whole sequences; KDA and Mamba-2, too.

    The recurrence is in LinearAttentionSpec. Differentiable in all arrays; under vmap,
    jax.checkpoint, and on meshes that split batch or heads.

    q, k: [batch, seq, num_qk_heads, head_dim_k], bf16 | f16 | f32.
    v: [batch, seq, num_v_heads, head_dim_v] in q's dtype. num_v_heads is a multiple of
        num_qk_heads.
    g: [batch, seq, num_v_heads], <= 0, natural log of the decay; [batch, seq, num_v_heads,
        head_dim_k]: one a channel of k (KDA); None: no decay.
    beta: [batch, seq, num_v_heads]. None: 1.
    scale: None: 1 / sqrt(head_dim_k).
    initial_state: [batch, num_v_heads, head_dim_k, head_dim_v]. None: zeros.
    l2_norm: q and k are divided by sqrt(sum of squares + 1e-6) first.
    delta_rule: False: S <- S + beta k v^T (Mamba-2, GLA).

    Returns o: [batch, seq, num_v_heads, head_dim_v] in v's dtype, and the final state [batch,
    num_v_heads, head_dim_k, head_dim_v], f32. Raises ValueError for shapes or dtypes that do not
    fit.

    >>> import jax.numpy as jnp
    >>> import jax_attn as ja
    >>> x, beta = jnp.ones((1, 5, 1, 8)) / 8**0.5, jnp.ones((1, 5, 1))
    >>> o, state = ja.gated_delta_rule(x, x, x, jnp.zeros((1, 5, 1)), beta, scale=1.0)
    >>> bool(jnp.allclose(o, x, atol=1e-6))  # the state maps the key to its last value
    True
    """
    q, k, v = (as_array(_OP, n, x) for n, x in (("q", q), ("k", k), ("v", v)))
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4 or x.dtype != q.dtype:
            raise ValueError(
                f"{_OP}: {name}: expected {q.dtype}[batch, seq, heads, dim], got"
                f" {x.dtype}{list(x.shape)}."
            )
    batch, seq, qk_heads, dim_k = q.shape
    heads, dim_v = v.shape[2:]
    if k.shape != q.shape or v.shape[:2] != q.shape[:2]:
        name, x, like = ("k", k, q.shape) if k.shape != q.shape else ("v", v, q.shape[:2])
        raise ValueError(f"{_OP}: {name}: expected {list(like)} as in q, got {list(x.shape)}.")
    shapes: dict[str, tuple[Any, tuple[tuple[int, ...], ...]]] = {
        "g": (g, ((batch, seq, heads), (batch, seq, heads, dim_k))),
        "beta": (beta, ((batch, seq, heads),)),
        "initial_state": (initial_state, ((batch, heads, dim_k, dim_v),)),
    }
    given: dict[str, Any] = {}
    for name, (x, legal) in shapes.items():
        given[name] = None if x is None else as_array(_OP, name, x).astype(jnp.float32)
        if x is not None and given[name].shape not in legal:
            wanted = " or ".join(str(list(shape)) for shape in legal)
            raise ValueError(f"{_OP}: {name}: expected {wanted}, got {list(given[name].shape)}.")
    g, beta, state = given.values()
    spec = LinearAttentionSpec(
        seq, 1, 0,
        num_qk_heads=qk_heads, num_v_heads=heads, head_dim_k=dim_k, head_dim_v=dim_v,
        decay="none" if g is None else "channel" if g.ndim == 4 else "head",
        delta_rule=delta_rule, l2_norm=l2_norm, scale=scale, dtype=q.dtype,
    )  # fmt: skip
    if state is None:
        state = jnp.zeros((batch, heads, dim_k, dim_v), jnp.float32)
    call = LinearCall(_OP, spec, "b t", "b", _in_jnp)
    o, state = attend(call, LinearOperands(q, k, v, g, beta, state))
    return checkpoint_name(o, O_NAME), state


def _in_jnp(call: LinearCall, operands: LinearOperands) -> tuple[jax.Array, jax.Array]:
    *arrays, state = operands
    batch, seq = operands.v.shape[:2]
    size = max(1, min(call.spec.chunk, seq))
    count = -(-seq // size)

    def cut(x: Any) -> Any:
        """[count, batch, size, ...]: chunks, the last one padded with zeros."""
        if x is None:
            return None
        x = jnp.pad(x, ((0, 0), (0, count * size - seq), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(batch, count, size, *x.shape[2:]), 1, 0)

    cuts = [cut(x) for x in arrays]
    terms = chunk_terms(call.spec, cuts[0], cuts[1], cuts[2], cuts[3], cuts[4])

    def step(state: jax.Array, terms: Any) -> tuple[jax.Array, jax.Array]:
        o, state = next_state(terms, state)
        return state, o

    state, o = lax.scan(step, state, terms)
    o = jnp.moveaxis(o, 0, 1).reshape(batch, count * size, *operands.v.shape[2:])[:, :seq]
    return o.astype(operands.v.dtype), state
