"""Quest (arXiv 2406.10774): of its pages a decode reads those that its query may look at most.

The bounds of a page are the least and the greatest of its keys, in each channel. They follow from
the page alone, so they stay on the device and go nowhere: a step computes those of the pages that
it fills, and whoever writes whole pages calls `bound_pages`. A page that is not full is the last of
its request, which is always read.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import jax_attn as ja

DENSE_LAYERS = 2  # the first ones, which read all pages, as in the paper
_BYTES_AT_ONCE = 64 << 20  # of the bounds that a layer gathers


def init_bounds(k_pages: jax.Array) -> jax.Array:
    """Returns bounds of empty pages: [num_layers - DENSE_LAYERS, num_pages, 2, num_kv_heads,
    head_dim], the least keys before the greatest. k_pages: see `Pages`, one group."""
    num_layers, num_pages, _, *row = k_pages.shape
    shape = max(0, num_layers - DENSE_LAYERS), num_pages, 2, *row
    return jnp.zeros(shape, k_pages.dtype)


def bound_pages(bounds: jax.Array, k_pages: jax.Array, pages: jax.Array) -> jax.Array:
    """Returns bounds with those of some pages in all layers. Written in place if donated.

    pages: [n] i32. Full ones.
    """
    return lax.fori_loop(0, len(bounds), lambda i, x: _bound(x, i, k_pages, pages), bounds)


def _bound(
    bounds: jax.Array, idx: jax.Array | int, k_pages: jax.Array, pages: jax.Array
) -> jax.Array:
    """pages: those out of range are ignored."""
    keys = k_pages[jnp.full(len(pages), idx + DENSE_LAYERS), pages]
    return bounds.at[idx, pages].set(jnp.stack([keys.min(1), keys.max(1)], 1), mode="drop")


class SelectedRows(NamedTuple):
    """What a step needs to select pages.

    full_pages: [n] i32. Pages that the step fills; numbers out of range are ignored.
    requests: [max_batch, 4] i32. Of each request that selects: its row of q, where its pages begin
      in the full table, their number, and where the selected ones begin in their table. The number
      of a request that reads all its pages is 0.
    plan: of all requests; those that select have `num_pages` pages, any full ones and the last.
    num_pages, longest: static. longest: the most pages of a request.
    """

    full_pages: jax.Array
    requests: jax.Array
    plan: ja.AttentionPlan
    num_pages: int
    longest: int


class PageSelection:
    """Selects pages in the layers of one step, in their order.

    bounds: as `init_bounds` makes them; afterwards with the step's pages.
    """

    def __init__(self, bounds: jax.Array, rows: SelectedRows):
        self.bounds = bounds
        self._rows = rows

    def plan(
        self, layer: int, q: jax.Array, k_pages: jax.Array, whole: ja.AttentionPlan
    ) -> ja.AttentionPlan:
        """The plan of a layer, once its new keys are in k_pages. whole: of all pages."""
        if layer < DENSE_LAYERS:
            return whole
        idx, rows = layer - DENSE_LAYERS, self._rows
        self.bounds = _bound(self.bounds, idx, k_pages, rows.full_pages)
        table = _pages_of(whole)
        begin, num, target = rows.requests[:, 1:].T
        best = self._best(idx, q, table)
        found = table[begin[:, None] + best]
        at = target[:, None] + jnp.arange(rows.num_pages)
        at = jnp.where(num[:, None] > 0, at, len(table))
        return rows.plan.with_pages(_pages_of(rows.plan).at[at].set(found, mode="drop"))

    def _best(self, idx: int, q: jax.Array, table: jax.Array) -> jax.Array:
        """[max_batch, num_pages] i32, ascending: indices of pages in the part of each request."""
        rows, sm_scale = self._rows, self._rows.plan.spec.sm_scale
        assert sm_scale is not None
        heads, head_dim = self.bounds.shape[3:]
        page = jnp.arange(rows.longest)

        def of_request(request: jax.Array) -> jax.Array:
            row, begin, num, _ = request
            least_greatest = self.bounds[idx, table[begin + page]][..., : q.shape[-1]]
            of_heads = q[row].reshape(heads, -1, q.shape[-1])
            # The largest q k of any k within the bounds.
            parts = jnp.stack([jnp.minimum(of_heads, 0), jnp.maximum(of_heads, 0)])
            # One product with zeros for other KV heads: on CPUs a third of the time of one a head.
            own = jnp.eye(heads, dtype=q.dtype)
            parts = jnp.einsum("shgd,hk->shdkg", parts, own).reshape(least_greatest[0].size, -1)
            logits = sm_scale * jnp.dot(
                least_greatest.reshape(rows.longest, -1), parts, preferred_element_type=jnp.float32
            )
            is_full = (page < num - 1)[:, None]
            # What each head would give a page, so that heads with large logits do not decide alone.
            weights = jax.nn.softmax(jnp.where(is_full, logits, -1e30), axis=0).sum(1)
            weights = jnp.where(is_full[:, 0], weights, -1)
            weights = jnp.where(page == num - 1, jnp.inf, weights)
            return jnp.sort(lax.top_k(weights, rows.num_pages)[1])

        num_bytes = rows.longest * 2 * heads * head_dim * self.bounds.dtype.itemsize
        at_once = max(1, _BYTES_AT_ONCE // num_bytes)
        if at_once >= len(rows.requests):
            return jax.vmap(of_request)(rows.requests)
        return lax.map(of_request, rows.requests, batch_size=at_once)


def _pages_of(plan: ja.AttentionPlan) -> jax.Array:
    """[max_kv_pages] i32, the plan's page table."""
    begin, num = plan.spec.layout["page_indices"], plan.spec.max_kv_pages
    assert num is not None
    return plan.buffer[begin : begin + num]
