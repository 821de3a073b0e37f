"""The records of a plan's buffer: the int32 fields of csrc/params.h, in order."""

from __future__ import annotations

from typing import Any

import numpy as np

HEADER_FIELDS = (
    "magic", "version", "batch_size", "nnz_qo", "num_items", "num_merge_groups",
    "num_partial_rows", "nnz_kv", "max_page_id", "num_partials", "num_shared_tokens",
    "fault", "fault_at", "fault_got", "fault_expected", "num_steps",
)  # fmt: skip
WORK_ITEM = np.dtype([(name, np.int32) for name in (
    "first_token", "qo_len", "kv_head", "tile", "kv_begin", "kv_end", "kv_base", "q_pos",
    "partial_row", "merge_idx", "request", "num_groups",
)])  # fmt: skip
MERGE_GROUP = np.dtype([(name, np.int32) for name in (
    "qo_begin", "qo_len", "kv_head", "num_partials", "partials_begin",
    "partials_step", "parent", "first_offset",
)])  # fmt: skip


def is_shared(items: Any) -> Any:
    """Whether an item (or each item of an array) has query tokens of several requests.

    qo_indices lists these tokens.
    """
    return items["num_groups"] > 1


def is_final(items: Any) -> Any:
    """Whether an item (or each item of an array) writes o and lse itself."""
    return items["num_groups"] == 0
