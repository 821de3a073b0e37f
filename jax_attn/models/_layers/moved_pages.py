"""Copies of pages whose keys are rotated to other positions: RoPE (arXiv 2104.09864)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn.models._config.config import ModelConfig
from jax_attn.models._config.rope import Rope, rotate
from jax_attn.models._layers.decoder import Pages


def why_not_moved(config: ModelConfig) -> str | None:
    """Why keys of the model cannot be rotated from one position to another; None: they can."""
    if config.why_not_all_keys is not None:
        return config.why_not_all_keys
    if any(kind.temperature is not None for kind in config.layers):
        return "queries scaled by their position"
    if config.qk_norm_after_rope:
        return "norms of keys after RoPE"
    return None


def move_keys(
    config: ModelConfig,
    k_pages: Pages,
    v_pages: Pages,
    sources: jax.Array,
    targets: jax.Array,
    distances: jax.Array,
) -> tuple[Pages, Pages]:
    """Copies pages `sources` to `targets`, with keys as they would be `distances` tokens later.

    For models without `why_not_moved`, and a cache of their dtype.

    Args:
      k_pages, v_pages: see `Pages`.
      sources, targets, distances: [n] i32, n static. If targets has a page twice, the last counts.
        No page is in both.
    """
    group_of: list[list[Rope | None]] = [[None] * num for num in config.page_groups]
    head_dims = [0] * len(group_of)
    for place, kind in zip(config.kv_places, config.layers, strict=True):
        if place is not None and not kind.shares_kv:
            group_of[place.group][place.layer] = kind.rope
            head_dims[place.group] = config.of(kind).head_dim

    def copied(pages: jax.Array, turn: Any) -> jax.Array:
        taken = [lax.dynamic_index_in_dim(pages, sources[i], 1) for i in range(len(sources))]
        turned = jnp.stack([turn(page[:, 0], i) for i, page in enumerate(taken)])

        # Without a loop XLA for CPUs fuses reads into writes, and then copies all pages.
        def put(i: jax.Array, pages: jax.Array) -> jax.Array:
            return lax.dynamic_update_index_in_dim(pages, turned[i], targets[i], 1)

        return lax.fori_loop(0, len(taken), put, pages)

    new_k = []
    for pages, ropes, head_dim in zip(_tuple(k_pages), group_of, head_dims, strict=True):
        cos, sin = (jnp.stack(x) for x in zip(*(_turns(r, head_dim, distances) for r in ropes)))  # noqa: B905

        def turned(page: jax.Array, i: int, cos: Any = cos, sin: Any = sin) -> jax.Array:
            rows = page.reshape(len(page), -1, page.shape[-1])  # [layers, slots * heads, head_dim]
            return rotate(rows, (cos[:, i], sin[:, i])).reshape(page.shape)[:, None]

        new_k.append(copied(pages, turned))
    new_v = [copied(pages, lambda page, _: page[:, None]) for pages in _tuple(v_pages)]
    if isinstance(k_pages, tuple):
        return tuple(new_k), tuple(new_v)
    return new_k[0], new_v[0]


def _tuple(pages: Pages) -> tuple[jax.Array, ...]:
    return pages if isinstance(pages, tuple) else (pages,)


def _turns(rope: Rope | None, head_dim: int, distances: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos, sin of a rotation by `distances` [n]: [n, head_dim / 2] f32. Keys have the amplitude of
    RoPE already."""
    if rope is None:
        shape = (*distances.shape, head_dim // 2)
        return jnp.ones(shape), jnp.zeros(shape)
    frequencies = jnp.asarray(rope.frequencies(head_dim), jnp.float32)
    angles = distances[:, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)
