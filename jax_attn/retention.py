"""Which keys of a prompt each KV head keeps: SnapKV, H2O, and attention sinks with a window.

The functions are plain JAX, for one request after its prefill. Queries and keys are as attention
multiplies them: rotated. `compact` gathers what is kept, and `head_tables` attends to it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

__all__ = ["compact", "compensation", "heavy_hitters", "select", "sinks_and_window", "snapkv"]

_CHUNK = 256  # query tokens whose weights are in memory at once


def snapkv(
    q: jax.Array, k: jax.Array, budget: int, *, sm_scale: float | None = None, pool: int = 7
) -> jax.Array:
    """The keys that the last queries of the prompt look at (SnapKV, arXiv 2404.14469, section 4).

    The weights of the window's queries are summed over queries and query heads of the group, and
    averaged over `pool` neighbours ahead of the window, so that keys stay with those around them.
    The window's own keys always stay.

    q: [window, num_qo_heads, head_dim], floats. The last queries of the prompt.
    k: [num_tokens, num_kv_heads, head_dim], floats. All keys of the prompt.
    budget: keys to keep, the window's among them.
    pool: an odd number of keys.

    Returns [num_kv_heads, budget], i32: positions in ascending order.

    Raises ValueError: the budget is below the window or above the prompt, pool is even, or the
        shapes do not fit each other.
    """
    _check_shapes("snapkv", q, k)
    window = len(q)
    _check_budget("snapkv", budget, window, len(k))
    _check_pool("snapkv", pool)
    sums = _weights(q, k, len(k) - window, sm_scale)
    return select(sums, len(k), budget, recent=window, pool=pool)


def heavy_hitters(
    q: jax.Array, k: jax.Array, budget: int, *, recent: int, sm_scale: float | None = None
) -> jax.Array:
    """The keys with the largest sums of weights over the whole prompt, and the `recent` last ones
    (H2O, arXiv 2306.14048, section 4, after prefill).

    q: [num_tokens, num_qo_heads, head_dim], k: [num_tokens, num_kv_heads, head_dim], floats.
    budget: keys to keep, the recent ones among them.

    Returns [num_kv_heads, budget], i32: positions in ascending order.

    Raises ValueError: the budget is below `recent` or above the prompt, or the shapes do not fit
        each other.
    """
    _check_shapes("heavy_hitters", q, k)
    if len(q) != len(k):
        raise ValueError(
            f"retention.heavy_hitters: q: expected the {len(k)} tokens of k, got {len(q)}."
        )
    _check_budget("heavy_hitters", budget, recent, len(k))
    sums = sum(
        _weights(q[begin : begin + _CHUNK], k, begin, sm_scale)
        for begin in range(0, len(q), _CHUNK)
    )
    return select(jnp.asarray(sums), len(k), budget, recent=recent)


def select(
    sums: jax.Array, num_tokens: jax.Array | int, budget: int, *, recent: int, pool: int = 1
) -> jax.Array:
    """The keys with the largest sums of weights, and the `recent` last ones: the choice of `snapkv`
    and `heavy_hitters`, for sums that were made elsewhere.

    sums: [num_kv_heads, n], floats, of which the first num_tokens count.
    num_tokens: of the prompt, at least `budget`; may be traced.
    budget, recent: as in `heavy_hitters`. pool: as in `snapkv`. Static.

    Returns [num_kv_heads, budget], i32: positions in ascending order.

    Raises ValueError: the budget is below `recent` or above n, or pool is even.
    """
    _check_budget("select", budget, recent, sums.shape[1])
    _check_pool("select", pool)
    at = jnp.arange(sums.shape[1])
    is_older = at < num_tokens - recent
    pooled = jnp.where(is_older, sums, 0)
    if pool > 1:
        pooled = jax.lax.reduce_window(pooled, 0.0, jax.lax.add, (1, pool), (1, 1), "SAME")
    others = jnp.where(at < num_tokens, jnp.inf, -jnp.inf)
    _, best = jax.lax.top_k(jnp.where(is_older, pooled, others), budget)
    return jnp.sort(best, axis=1).astype(jnp.int32)


def sinks_and_window(num_tokens: int, sinks: int, window: int) -> jax.Array:
    """[sinks + window] i32: the first positions and the last ones (StreamingLLM, arXiv 2309.17453;
    RazorAttention, arXiv 2407.15891, in heads that do not retrieve).

    Raises ValueError: there are fewer tokens, or one of the numbers is negative.
    """
    if sinks < 0 or window < 0 or sinks + window > num_tokens:
        raise ValueError(
            "retention.sinks_and_window: sinks, window: expected 0 or more each and at most"
            f" num_tokens = {num_tokens} together, got {sinks} and {window}."
        )
    first, last = jnp.arange(sinks), jnp.arange(num_tokens - window, num_tokens)
    return jnp.concatenate([first, last]).astype(jnp.int32)


def compact(x: jax.Array, kept: jax.Array) -> jax.Array:
    """The kept rows of each head, one behind the other.

    x: [num_tokens, num_kv_heads, head_dim].
    kept: [num_kv_heads, budget], integers: positions.

    Returns [num_kv_heads, budget, head_dim], the dtype of x.

    Raises ValueError: the shapes do not fit each other.
    """
    _check_kept("compact", x, kept)
    return jax.vmap(lambda rows, at: rows[at], in_axes=(1, 0))(x, kept)


def compensation(x: jax.Array, kept: jax.Array) -> jax.Array:
    """The means of the keys, or values, that were dropped: RazorAttention's compensation token. Its
    logit gets the log of their number added, so that it counts as all of them.

    x: [num_tokens, num_kv_heads, head_dim], floats.
    kept: [num_kv_heads, budget], integers: positions, fewer than num_tokens and each once.

    Returns [num_kv_heads, head_dim], the dtype of x. Sums are f32.

    Raises ValueError: the shapes do not fit each other, or nothing was dropped.
    """
    _check_kept("compensation", x, kept)
    if kept.shape[1] >= len(x):
        raise ValueError(
            f"retention.compensation: kept: expected fewer than the {len(x)} tokens of x, got"
            f" {kept.shape[1]}."
        )
    heads = jnp.arange(x.shape[1])
    is_dropped = jnp.ones(x.shape[:2], bool).at[kept, heads[:, None]].set(False)
    total = jnp.where(is_dropped[..., None], x, 0).sum(0, dtype=jnp.float32)
    return (total / (len(x) - kept.shape[1])).astype(x.dtype)


def _weights(q: jax.Array, k: jax.Array, first: int, sm_scale: float | None) -> jax.Array:
    """[num_kv_heads, num_tokens]: sums of the causal softmax over queries from position `first`."""
    num, kv_heads = len(q), k.shape[1]
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    grouped = q.reshape(num, kv_heads, -1, q.shape[-1]).astype(jnp.float32)
    logits = scale * jnp.einsum("qhgd,khd->hgqk", grouped, k.astype(jnp.float32))
    sees = jnp.arange(len(k)) <= first + jnp.arange(num)[:, None]
    return jax.nn.softmax(jnp.where(sees, logits, -jnp.inf), axis=-1).sum((1, 2))


def _check_budget(op: str, budget: int, fewest: int, most: int) -> None:
    if not max(1, fewest) <= budget <= most:
        raise ValueError(
            f"retention.{op}: budget: expected between {max(1, fewest)} and the {most} tokens of"
            f" the prompt, got {budget}."
        )


def _check_pool(op: str, pool: int) -> None:
    if pool < 1 or pool % 2 == 0:
        raise ValueError(f"retention.{op}: pool: expected an odd number, got {pool}.")


def _check_shapes(op: str, q: jax.Array, k: jax.Array) -> None:
    if q.ndim != 3 or k.ndim != 3 or q.shape[2] != k.shape[2] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"retention.{op}: q, k: expected [tokens, heads, head_dim] with the same head_dim and a"
            f" number of query heads that KV heads divide, got {list(q.shape)} and {list(k.shape)}."
        )


def _check_kept(op: str, x: jax.Array, kept: jax.Array) -> None:
    if x.ndim != 3 or kept.ndim != 2 or kept.shape[0] != x.shape[1]:
        raise ValueError(
            f"retention.{op}: kept: expected [num_kv_heads, budget] for x [num_tokens,"
            f" num_kv_heads, head_dim], got {list(kept.shape)} and {list(x.shape)}."
        )
