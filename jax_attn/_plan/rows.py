"""Which token each row of q is."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn._plan.plan import checked_new_tokens, int32_array

_MAX_LEN = 2**30  # as of plan


class Rows(NamedTuple):
    """The query tokens of a batch, row by row. All arrays are int32.

    request: [max_qo_tokens]. batch_size in padding rows.
    position: [max_qo_tokens]. kv_len - qo_len + i for query token i of a request; 0 in padding.
    last: [batch_size]. The row of each request's last query token; max_qo_tokens for a request
        without query tokens.
    """

    request: Any
    position: Any
    last: Any


def rows(qo_indptr: Any, kv_lens: Any, max_qo_tokens: int) -> Rows:
    """Return the request and the position of each row of q, and the last row of each request.

    qo_indptr, kv_lens: [batch_size + 1], [batch_size], i32: the arguments of `plan`.
    max_qo_tokens: the rows of q, an int, as in the AttentionSpec.

    Returns Rows of host arrays for host arrays, of traced arrays for traced ones. Numbers of
    padding are one beyond the others. So x.at[rows].set() and jax.ops.segment_sum leave them out,
    and x[rows] of JAX gives the last element; numpy's raises.

    Raises ValueError for lengths that `plan` refuses. Traced lengths are not checked here: the plan
    made of them is. Whatever they are, request is in [0, batch_size].

    >>> import numpy as np
    >>> import jax_attn as ja
    >>> request, position, last = ja.rows(np.array([0, 3, 4]), np.array([3, 20]), 6)
    >>> request.tolist(), position.tolist(), last.tolist()
    ([0, 0, 0, 1, 2, 2], [0, 1, 2, 19, 0, 0], [2, 3])
    """
    if isinstance(max_qo_tokens, bool) or not isinstance(max_qo_tokens, (int, np.integer)):
        raise TypeError(
            f"rows: max_qo_tokens: expected an int, got {type(max_qo_tokens).__name__}; it is a"
            " shape, as in the AttentionSpec."
        )
    if not 0 <= max_qo_tokens < 2**31:
        raise ValueError(f"rows: max_qo_tokens: expected 0 to 2^31 - 1, got {max_qo_tokens}.")
    traced = any(isinstance(x, jax.core.Tracer) for x in (qo_indptr, kv_lens))
    xp: Any = jnp if traced else np
    lens = int32_array(xp, "kv_lens", kv_lens, op="rows")
    qo = int32_array(xp, "qo_indptr", qo_indptr, len(lens) + 1, op="rows")
    row: Any = xp.arange(max_qo_tokens, dtype=np.int32)
    if traced:
        # On a GPU the default search is a loop of kernels.
        request: Any = jnp.searchsorted(qo[1:], row, side="right", method="scan_unrolled")
        request = request.astype(np.int32)
    else:
        _check(qo, lens, max_qo_tokens)
        counts = np.append(np.diff(qo), max_qo_tokens - qo[-1])
        request = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    # A row's position less the row is the same in all rows of a request.
    offsets = xp.append(lens - qo[1:], np.int32(0))
    position = xp.where(row < qo[-1], row + offsets[request], np.int32(0))
    last = xp.where(qo[1:] > qo[:-1], qo[1:] - np.int32(1), np.int32(max_qo_tokens))
    return Rows(request, position, last)


def _check(qo: np.ndarray, lens: np.ndarray, max_qo_tokens: int) -> None:
    if qo[0] != 0:
        raise ValueError(f"rows: qo_indptr[0]: expected 0, got {qo[0]}.")
    if (falls := qo[1:] < qo[:-1]).any():
        at = int(falls.argmax()) + 1
        raise ValueError(
            f"rows: qo_indptr[{at}]: expected offsets that never decrease (qo_indptr[{at - 1}] is"
            f" {qo[at - 1]}), got {qo[at]}."
        )
    if qo[-1] > max_qo_tokens:
        raise ValueError(
            f"rows: qo_indptr[-1] (query tokens): expected at most max_qo_tokens = {max_qo_tokens},"
            f" got {qo[-1]}; raise max_qo_tokens."
        )
    limits = ((lens < 0, "a length >= 0"), (lens >= _MAX_LEN, "a length below 2^30"))
    for is_bad, expected in limits:
        if is_bad.any():
            at = int(is_bad.argmax())
            raise ValueError(f"rows: kv_lens[{at}]: expected {expected}, got {lens[at]}.")
    checked_new_tokens(qo, lens, op="rows")
