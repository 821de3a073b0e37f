"""Everything static of a batch of fixed size."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from jax_attn._spec.spec import AttentionSpec


class FixedBatch(NamedTuple):
    """What a loop over a batch of fixed size needs beside tokens and lengths.

    spec: the AttentionSpec.
    pages: k_pages and v_pages, zeros, as of AttentionSpec.empty_pages.
    page_table: page_indptr [batch_size + 1] and page_indices, i32, host arrays. Request r has pages
        r * pages_each to (r + 1) * pages_each.
    """

    spec: AttentionSpec
    pages: tuple[jax.Array, jax.Array | None]
    page_table: tuple[np.ndarray, np.ndarray]


def fixed_batch(
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim_qk: int,
    *,
    batch_size: int,
    max_kv_len: int,
    num_layers: int | None = None,
    max_qo_tokens: int | None = None,
    page_size: int = 16,
    **fields: Any,
) -> FixedBatch:
    """Return spec, pages and page table for a batch of fixed size: room for max_kv_len tokens each.

    Every request owns ceil(max_kv_len / page_size) pages from the start, so a loop needs no
    allocator: only lengths change from step to step.

    num_qo_heads, num_kv_heads, head_dim_qk, page_size: as for AttentionSpec.
    batch_size: requests. max_kv_len: tokens of the longest request, prompt and answer.
    num_layers: for stacked pages [num_layers, ...]. None: pages of one layer.
    max_qo_tokens: query tokens of a step. None: batch_size, for decodes.
    fields: further fields of AttentionSpec, such as dtype. max_batch, num_pages and max_kv_pages
        follow from the sizes; max_kv_pages may be given if plans attend to fewer pages.

    Raises ValueError for a size below 1, and what AttentionSpec raises.

    >>> import jax_attn as ja
    >>> spec, (k_pages, v_pages), page_table = ja.fixed_batch(
    ...     4, 2, 64, batch_size=2, max_kv_len=40, num_layers=3
    ... )
    >>> plan = ja.plan(spec, [0, 1, 2], [1, 33], *page_table)
    >>> k_pages.shape, plan.header()["nnz_qo"]
    ((3, 6, 16, 2, 64), 2)
    """
    if set(fields) & {"max_batch", "num_pages"}:
        raise TypeError(
            "fixed_batch: max_batch, num_pages: expected neither, for they follow from batch_size,"
            " max_kv_len and page_size; for a pool of another size make an AttentionSpec."
        )
    sizes = {"batch_size": batch_size, "max_kv_len": max_kv_len, "page_size": page_size}
    sizes |= {} if num_layers is None else {"num_layers": num_layers}
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
            raise ValueError(f"fixed_batch: {name}: expected an integer >= 1, got {size!r}.")
    pages_each = -(-max_kv_len // page_size)
    num_pages = int(batch_size * pages_each)
    spec = AttentionSpec(
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size=page_size,
        num_pages=num_pages,
        max_batch=batch_size,
        max_qo_tokens=batch_size if max_qo_tokens is None else max_qo_tokens,
        **{"max_kv_pages": num_pages} | fields,
    )
    page_indices = np.arange(num_pages, dtype=np.int32)
    page_table = np.arange(0, num_pages + 1, pages_each, dtype=np.int32), page_indices
    return FixedBatch(spec, spec.empty_pages(num_pages, num_layers), page_table)
