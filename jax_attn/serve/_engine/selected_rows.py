"""The host's part of page selection: which rows of a step select, and the plan that they share.

Lengths do not depend on which pages are selected, so the host plans, and the device changes the
page table of the plan in each layer: see models' `selected_pages`.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import jax_attn as ja
from jax_attn.models._layers.selected_pages import SelectedRows, init_bounds
from jax_attn.serve._scheduling.step_plan import ScheduledSequence


@dataclass(frozen=True)
class SelectedShape:
    """The capacities of a bucket's `SelectedRows`. spec: of the plan over selected pages."""

    num_pages: int
    longest: int
    spec: ja.AttentionSpec

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Words of the parts that `unpack` takes."""
        spec = self.spec
        assert spec.page_size is not None and spec.max_qo_tokens is not None
        num_full = min(spec.max_qo_tokens, spec.max_qo_tokens // spec.page_size + spec.max_batch)
        return num_full, 4 * spec.max_batch, spec.plan_words

    def unpack(self, full_pages: Any, requests: Any, plan: Any) -> SelectedRows:
        plan = ja.AttentionPlan(plan, self.spec)
        return SelectedRows(full_pages, requests.reshape(-1, 4), plan, self.num_pages, self.longest)


def bytes_of_bounds(k_pages: jax.ShapeDtypeStruct) -> int:
    """Bytes of the bounds of the pages."""
    bounds = jax.eval_shape(init_bounds, k_pages)
    return int(bounds.size * bounds.dtype.itemsize)


def of_outputs(entries: Seq[ScheduledSequence]) -> np.ndarray:
    """[n] bool. Which entries are one token of an output, and so may select pages."""
    return np.array([e.num_tokens == 1 and e.begin >= e.seq.num_prompt for e in entries], bool)


def fill(rows: SelectedRows, batch: tuple[np.ndarray, ...], may_select: np.ndarray) -> None:
    """Fills in what a step selects. batch: as Batch.lengths. may_select: see `of_outputs`."""
    qo_indptr, kv_lens, page_indptr, page_indices = batch
    spec, begins = rows.plan.spec, page_indptr[:-1]
    page_size, num_all = spec.page_size, spec.num_pages
    assert page_size is not None
    num_used = -(-kv_lens // page_size)
    selects = may_select & (num_used > rows.num_pages)
    num_read = np.where(selects, rows.num_pages, num_used).astype(np.int32)
    indptr = np.zeros(len(num_read) + 1, np.int32)
    num_read.cumsum(out=indptr[1:])
    read = page_indices[_ranges(begins, num_read)]
    lens = (kv_lens - (num_used - num_read) * page_size).astype(np.int32)
    ja.plan(spec, qo_indptr, lens, indptr, read, buffer=rows.plan.buffer)

    num_selecting = np.where(selects, num_used, 0)
    rows.requests[: len(selects)] = np.stack(
        [qo_indptr[:-1], begins, num_selecting, indptr[:-1]], axis=1
    )
    rows.requests[len(selects) :] = 0
    first = (kv_lens - np.diff(qo_indptr)) // page_size
    full = page_indices[_ranges(begins + first, kv_lens // page_size - first)]
    rows.full_pages[: len(full)], rows.full_pages[len(full) :] = full, num_all


def _ranges(begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """begins[0], begins[0] + 1, ..., lengths[0] of them; then those of the others."""
    ends = lengths.cumsum()
    return np.arange(lengths.sum()) + (begins - ends + lengths).repeat(lengths)
