"""Which keys of a prompt each KV head keeps: SnapKV, H2O, and attention sinks with a window.

The functions are plain JAX, for one request after its prefill. Queries and keys are as attention
multiplies them: rotated. `compact` gathers what is kept, and `head_tables` attends to it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

__all__ = ["compact", "compensation", "heavy_hitters", "sinks_and_window", "snapkv"]

_CHUNK = 256  # query tokens whose weights are in memory at once


def snapkv(
    q: jax.Array, k: jax.Array, budget: int, *, sm_scale: float | None = None, pool: int = 7
) -> jax.Array:
    """The keys that the last queries of the prompt look at (SnapKV, arXiv 2404.14469, section 4).

    The weights of the window's queries are summed over queries and query heads of the group, and
    averaged over `pool` neighbours, so that keys stay with those around them. The window's own keys
    always stay.

    q: [window, num_qo_heads, head_dim]. The last queries of the prompt.
    k: [num_tokens, num_kv_heads, head_dim]. All keys of the prompt.
    budget: keys to keep, the window's among them.
    pool: an odd number of keys.

    Returns [num_kv_heads, budget], i32: positions in ascending order.

    Raises ValueError: the budget is below the window or above the prompt, or pool is even.
    """
    window = len(q)
    _check("snapkv", budget, window, len(k))
    if pool < 1 or pool % 2 == 0:
        raise ValueError(f"retention.snapkv: pool: expected an odd number, got {pool}.")
    sums = _weights(q, k, len(k) - window, sm_scale)
    padded = jnp.pad(sums, ((0, 0), (pool // 2, pool // 2)))
    ends = jnp.pad(jnp.cumsum(padded, 1), ((0, 0), (1, 0)))
    return _best(ends[:, pool:] - ends[:, :-pool], budget, window)


def heavy_hitters(
    q: jax.Array, k: jax.Array, budget: int, *, recent: int, sm_scale: float | None = None
) -> jax.Array:
    """The keys with the largest sums of weights over the whole prompt, and the `recent` last ones
    (H2O, arXiv 2306.14048, section 4, after prefill).

    q: [num_tokens, num_qo_heads, head_dim], k: [num_tokens, num_kv_heads, head_dim].
    budget: keys to keep, the recent ones among them.

    Returns [num_kv_heads, budget], i32: positions in ascending order.

    Raises ValueError: the budget is below `recent` or above the prompt.
    """
    _check("heavy_hitters", budget, recent, len(k))
    sums = sum(
        _weights(q[begin : begin + _CHUNK], k, len(k) - len(q) + begin, sm_scale)
        for begin in range(0, len(q), _CHUNK)
    )
    return _best(jnp.asarray(sums), budget, recent)


def sinks_and_window(num_tokens: int, sinks: int, window: int) -> jax.Array:
    """[sinks + window] i32: the first positions and the last ones (StreamingLLM, arXiv 2309.17453;
    RazorAttention, arXiv 2407.15891, in heads that do not retrieve).

    Raises ValueError: there are fewer tokens.
    """
    _check("sinks_and_window", sinks + window, 0, num_tokens)
    first, last = jnp.arange(sinks), jnp.arange(num_tokens - window, num_tokens)
    return jnp.concatenate([first, last]).astype(jnp.int32)


def compact(x: jax.Array, kept: jax.Array) -> jax.Array:
    """The kept rows of each head, one behind the other.

    x: [num_tokens, num_kv_heads, head_dim], kept: [num_kv_heads, budget].

    Returns [num_kv_heads, budget, head_dim].
    """
    return jax.vmap(lambda rows, at: rows[at], in_axes=(1, 0))(x, kept)


def compensation(x: jax.Array, kept: jax.Array) -> jax.Array:
    """The means of the keys, or values, that were dropped: RazorAttention's compensation token. Its
    logit gets the log of their number added, so that it counts as all of them.

    x: [num_tokens, num_kv_heads, head_dim], kept: [num_kv_heads, budget], with fewer than
        num_tokens.

    Returns [num_kv_heads, head_dim].
    """
    total = x.astype(jnp.float32).sum(0) - compact(x, kept).astype(jnp.float32).sum(1)
    return (total / (len(x) - kept.shape[1])).astype(x.dtype)


def _weights(q: jax.Array, k: jax.Array, first: int, sm_scale: float | None) -> jax.Array:
    """[num_kv_heads, num_tokens]: sums of the causal softmax over queries from position `first`."""
    num, kv_heads = len(q), k.shape[1]
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    grouped = q.reshape(num, kv_heads, -1, q.shape[-1]).astype(jnp.float32)
    logits = scale * jnp.einsum("qhgd,khd->hgqk", grouped, k.astype(jnp.float32))
    sees = jnp.arange(len(k)) <= first + jnp.arange(num)[:, None]
    return jax.nn.softmax(jnp.where(sees, logits, -jnp.inf), axis=-1).sum((1, 2))


def _best(sums: jax.Array, budget: int, num_last: int) -> jax.Array:
    """The positions with the largest sums, and the last ones, in ascending order."""
    is_last = jnp.arange(sums.shape[1]) >= sums.shape[1] - num_last
    _, best = jax.lax.top_k(jnp.where(is_last, jnp.inf, sums), budget)
    return jnp.sort(best, axis=1).astype(jnp.int32)


def _check(op: str, budget: int, fewest: int, most: int) -> None:
    if not max(1, fewest) <= budget <= most:
        raise ValueError(
            f"retention.{op}: budget: expected between {max(1, fewest)} and the {most} tokens of"
            f" the prompt, got {budget}."
        )
