"""Masks that save work: a function for single logits, and a class for each block of logits.

    same_document = masks.document_ids(ids)
    spec = AttentionSpec(..., variant=same_document.variant(), max_steps=4096)
    block_map = same_document.block_map(spec, qo_indptr, kv_lens)
    p = plan(spec, qo_indptr, kv_lens, block_map=block_map)
    o = attention(q, k, v, p, variant_operands=same_document.operands)

The causal mask and windows of the spec apply as well. `a & b`, `a | b` and `~a` are masks, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn._spec.spec import AttentionSpec
from jax_attn._variant import intervals
from jax_attn._variant.intervals import Interval
from jax_attn._variant.program import At
from jax_attn._variant.variant import Variant

__all__ = [
    "HIDDEN",
    "MIXED",
    "VISIBLE",
    "Batch",
    "BlockMap",
    "Mask",
    "block_sparse",
    "block_sparse_pages",
    "custom_mask",
    "document_ids",
    "page_positions",
    "prefix_lm",
    "tree",
]

# Classes of a block, as bits. Bit 0: some pair may be visible. Bit 1: some pair may be hidden. The
# class of several blocks together is the OR of theirs.
VISIBLE, HIDDEN, MIXED = 1, 2, 3


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockMap:
    """The effect of a mask on blocks of q_block query tokens and kv_block positions.

    classes: [num_row_blocks, num_kv_blocks], u8. VISIBLE: every pair is visible. HIDDEN: no pair is
        visible. MIXED: some are, or it is not known. Row block i has rows [i * q_block,
        (i + 1) * q_block) of q. Column j has positions [j * kv_block, (j + 1) * kv_block) of each
        row's own request.
    q_block, kv_block: tokens. Divisors of tile M (query tile rows) and of tile_kv work best.

    A plan trusts the map: only mixed blocks run the mask of the spec's variant. If the variant has
    no mask, mixed blocks are fully visible.

    A pytree: new classes never recompile, whether made inside jit or passed to it.
    """

    classes: Any
    q_block: int = dataclasses.field(default=64, metadata={"static": True})
    kv_block: int = dataclasses.field(default=128, metadata={"static": True})

    @classmethod
    def of_dense(cls, visible: Any, q_block: int = 64, kv_block: int = 128) -> BlockMap:
        """The block map of a dense mask.

        visible: [num_rows, num_positions], bool, host or traced. Rows of q by key positions.
        """
        rows, columns = visible.shape
        xp = jax.numpy if isinstance(visible, jax.Array) else np
        padding = (-rows % q_block, -columns % kv_block)
        blocks = [
            xp.pad(x, [(0, n) for n in padding]).reshape(
                (rows + padding[0]) // q_block, q_block, -1, kv_block
            )
            for x in (visible, ~visible)
        ]
        some, hidden = (x.any((1, 3)).astype(np.uint8) for x in blocks)
        return cls(some * VISIBLE + hidden * HIDDEN, q_block, kv_block)


@dataclasses.dataclass(frozen=True)
class Batch:
    """The rows and keys of a batch, block by block, as `Mask.block_map` reads them.

    facts: field of variant.At -> the interval of its values in each block. Rows beyond the batch do
        not count.
    is_live: [num_row_blocks, q_block], bool. Rows of q that belong to the batch.
    """

    xp: Any
    facts: dict[str, Interval]
    is_live: Any
    q_block: int
    kv_block: int
    num_columns: int


_Classes = Callable[[Batch], Any]


@dataclasses.dataclass(frozen=True)
class Mask:
    """A mask: which query token sees which key.

    function: fn(at, ...) -> bool, as the mask of a `Variant`.
    operands: name -> array. The arrays that the function reads; pass them to attention as
        variant_operands. Host or traced; new contents compile nothing.
    classes: fn(batch) -> [num_row_blocks, num_kv_blocks], u8, for a mask whose block classes can be
        computed exactly. None: the function is run on intervals (_variant/intervals.py).
    """

    function: Callable[..., Any]
    operands: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    classes: _Classes | None = None

    def variant(self, **more: Any) -> Variant:
        """A Variant with this mask.

        more: other arguments of Variant. Its operands are added to those of the mask.
        """
        operands = dict(self.operands) | dict(more.pop("operands", {}))
        return Variant(mask=self.function, operands=operands, **more)

    def block_map(
        self,
        spec: AttentionSpec,
        qo_indptr: Any,
        kv_lens: Any,
        *,
        kv_indptr: Any = None,
        q_offsets: Any = None,
        max_kv_len: int | None = None,
        q_block: int = 64,
        kv_block: int = 128,
    ) -> BlockMap:
        """The block map of this mask for a batch, made on the host or inside jit.

        qo_indptr, kv_lens, kv_indptr, q_offsets: as for `plan`.
        max_kv_len: number of positions the map covers. None: the longest of kv_lens; for traced
            lengths, the spec's capacity of keys.
        q_block, kv_block: tokens of a block.
        """
        batch = _batch(
            spec, qo_indptr, kv_lens, kv_indptr, q_offsets, max_kv_len, q_block, kv_block
        )
        found = self._classes_of(batch)
        shape = (len(batch.is_live), batch.num_columns)
        return BlockMap(batch.xp.broadcast_to(found, shape), q_block, kv_block)

    def _classes_of(self, batch: Batch) -> Any:
        if self.classes is not None:
            return self.classes(batch)
        visible, hidden = intervals.classes(self.variant(), batch.facts, self.operands)
        return visible.astype(np.uint8) * VISIBLE + hidden.astype(np.uint8) * HIDDEN

    def __and__(self, other: Mask) -> Mask:
        return self._with(other, lambda a, b: a & b, HIDDEN)

    def __or__(self, other: Mask) -> Mask:
        return self._with(other, lambda a, b: a | b, VISIBLE)

    def __invert__(self) -> Mask:
        names = tuple(self.operands)

        def function(at: At, **operands: Any) -> Any:
            return ~self.function(at, **{name: operands[name] for name in names})

        def classes(batch: Batch) -> Any:
            found = self._classes_of(batch)
            return (found >> 1) | (found & 1) << 1

        return Mask(function, self.operands, classes)

    def _with(self, other: Mask, operation: Callable[[Any, Any], Any], decides: int) -> Mask:
        """Combine two masks.

        decides: the class that decides the result if either mask has it.
        """
        mine = tuple(self.operands)
        theirs: dict[str, str] = {}
        for name in other.operands:
            unique, count = name, 1
            while unique in mine or unique in theirs.values():
                unique, count = f"{name}_{count}", count + 1
            theirs[name] = unique

        def function(at: At, **operands: Any) -> Any:
            a = self.function(at, **{name: operands[name] for name in mine})
            b = other.function(at, **{name: operands[theirs[name]] for name in theirs})
            return operation(a, b)

        def classes(batch: Batch) -> Any:
            a, b = self._classes_of(batch), other._classes_of(batch)
            return (a | b) & decides | (a & b) & (MIXED - decides)

        renamed = {theirs[name]: array for name, array in other.operands.items()}
        return Mask(function, dict(self.operands) | renamed, classes)


def _batch(
    spec: AttentionSpec,
    qo_indptr: Any,
    kv_lens: Any,
    kv_indptr: Any,
    q_offsets: Any,
    max_kv_len: int | None,
    q_block: int,
    kv_block: int,
) -> Batch:
    arguments = (qo_indptr, kv_lens, kv_indptr, q_offsets)
    traced = any(isinstance(x, jax.core.Tracer) for x in arguments)
    xp: Any = jnp if traced else np
    qo, lens = (xp.asarray(x).astype(np.int32) for x in (qo_indptr, kv_lens))
    batch_size = len(lens)
    if kv_indptr is None:
        kv_indptr = xp.concatenate([xp.zeros(1, np.int32), xp.cumsum(lens).astype(np.int32)])
    starts = xp.asarray(kv_indptr).astype(np.int32)[:-1]
    offsets = lens - (qo[1:] - qo[:-1]) if q_offsets is None else xp.asarray(q_offsets)
    if max_kv_len is None:
        room = (spec.max_kv_pages or 0) * (spec.page_size or 0) + (spec.max_kv_tokens or 0)
        max_kv_len = room if traced else int(lens.max(initial=0))
    num_rows, num_columns = -(-spec.max_qo_tokens // q_block), -(-max_kv_len // kv_block)
    row = xp.arange(num_rows * q_block, dtype=np.int32).reshape(num_rows, q_block)
    is_live = row < qo[-1]
    # Inside jit the default search is a loop, which would be a loop of kernels on a GPU.
    method = {"method": "scan_unrolled"} if traced else {}
    request = xp.searchsorted(qo, row.reshape(-1), side="right", **method).reshape(row.shape) - 1
    request = request.clip(0, max(0, batch_size - 1)).astype(np.int32)
    of_request = {"request": xp.arange(batch_size), "q_len": qo[1:] - qo[:-1], "kv_len": lens}
    of_request |= {"kv_start": starts, "q_offset": offsets}
    if batch_size == 0:
        of_request = {name: xp.zeros(1, np.int32) for name in of_request}
        qo = xp.zeros(2, np.int32)
    of_request = {name: x.astype(np.int32) for name, x in of_request.items()}
    rows = {name: x[request] for name, x in of_request.items()}
    rows["q_row"] = row
    rows["q_pos"] = rows["q_offset"] + row - qo[request]

    def over(name: str, width: int | None = None) -> Interval:
        values = rows[name]
        if batch_size == 1 and name in of_request:  # the same for all blocks
            return Interval(of_request[name].reshape(1, 1), of_request[name].reshape(1, 1), 0)
        low = xp.where(is_live, values, 2**31 - 1).min(1, keepdims=True).astype(np.int32)
        high = xp.where(is_live, values, -(2**31)).max(1, keepdims=True).astype(np.int32)
        none = ~is_live.any(1, keepdims=True)
        return Interval(xp.where(none, 0, low), xp.where(none, 0, high), width)

    facts = {name: over(name) for name in ("request", "q_pos", "q_len", "kv_len")}
    facts["q_row"] = dataclasses.replace(over("q_row"), width=q_block - 1)
    facts["q_pos"] = dataclasses.replace(facts["q_pos"], width=q_block - 1)
    first = (xp.arange(num_columns, dtype=np.int32) * kv_block).reshape(1, -1)
    last = xp.minimum(first + (kv_block - 1), xp.maximum(lens.max(initial=0) - 1, first))
    facts["kv_pos"] = Interval(first, last.astype(np.int32), kv_block - 1)
    if not spec.is_paged:
        start = over("kv_start")
        high = start.hi + facts["kv_pos"].hi
        facts["kv_row"] = Interval(start.lo + first, high, kv_block - 1)
    return Batch(xp, facts, is_live, q_block, kv_block, num_columns)


# ---- common masks --------------------------------------------------------------------------------


def document_ids(q_ids: Any, kv_ids: Any = None) -> Mask:
    """A mask for packed documents: queries see the keys of their own document only.

    q_ids: [rows of q], i32. The document of each query token.
    kv_ids: [rows of k], i32, for a ragged spec, or [batch_size, positions], i32. The document of
        each key. None: q_ids, for q and k with the same rows, as in training.
    """

    def function(at: At, q_ids: Any, kv_ids: Any) -> Any:
        theirs = kv_ids[at.kv_row] if kv_ids.ndim == 1 else kv_ids[at.request, at.kv_pos]
        return q_ids[at.q_row] == theirs

    return Mask(function, {"q_ids": q_ids, "kv_ids": q_ids if kv_ids is None else kv_ids})


def prefix_lm(prefix_lens: Any) -> Mask:
    """A prefix-LM mask: a query sees its request's prefix and every key not after itself.

    The spec must have causal=False.

    prefix_lens: [batch_size], i32, tokens. Prefix length of each request.

    >>> import numpy as np
    >>> import jax_attn as ja
    >>> mask = ja.masks.prefix_lm(np.array([4], np.int32))
    >>> spec = ja.AttentionSpec(
    ...     4, 2, 64, page_size=16, max_qo_tokens=8, max_kv_pages=1, max_steps=8,
    ...     variant=mask.variant(),
    ... )
    >>> batch = np.array([0, 8]), np.array([8])
    >>> mask.block_map(spec, *batch, q_block=4, kv_block=4).classes.tolist()  # MIXED is 3
    [[1, 2], [1, 3]]
    """

    def function(at: At, prefix_lens: Any) -> Any:
        return (at.kv_pos < prefix_lens[at.request]) | (at.kv_pos <= at.q_pos)

    return Mask(function, {"prefix_lens": prefix_lens})


def tree(parents: Any, qo_indptr: Any) -> Mask:
    """A mask for draft trees: a draft token sees the cached tokens, itself and its ancestors.

    parents: [rows of q], host integers. Index of each query token's parent within its request. A
        parent comes before its token; -1: the token follows the cached tokens.
    qo_indptr: [batch_size + 1], host integers, as for `plan`.

    Raises ValueError for a parent that does not come before its token.
    """
    parents, starts = np.asarray(parents), np.asarray(qo_indptr)
    num_rows = int(starts[-1]) if len(starts) else 0
    lens = np.diff(starts)
    longest = int(lens.max(initial=1))
    request = np.repeat(np.arange(len(lens)), lens)
    number = np.arange(num_rows) - starts[request]
    bad = np.flatnonzero((parents[:num_rows] >= number) | (parents[:num_rows] < -1))
    if len(parents) < num_rows or len(bad):
        at = int(bad[0]) if len(bad) else len(parents)
        raise ValueError(
            f"masks.tree: parents[{at}]: expected -1 or a number below {number[at]}, the token's"
            f" own in its request, got {parents[at] if len(bad) else 'none'}."
        )
    ancestors = np.zeros((max(1, len(parents)), -(-longest // 32)), np.uint32)
    for row in range(num_rows):
        if parents[row] >= 0:
            ancestors[row] = ancestors[row - number[row] + parents[row]]
        ancestors[row, number[row] // 32] |= np.uint32(1 << (number[row] % 32))

    def function(at: At, ancestors: Any) -> Any:
        draft = at.kv_pos - (at.kv_len - at.q_len)
        word = ancestors[at.q_row, draft >> 5]
        return (draft < 0) | (((word >> (draft & 31)) & 1) != 0)

    return Mask(function, {"ancestors": ancestors.view(np.int32)})


def custom_mask(visible: Any, qo_indptr: Any, kv_lens: Any) -> Mask:
    """Any mask, given as one bit for each pair of a query token and a key of its request.

    visible: [sum(qo_len * kv_len)], bool, host. The masks of the requests one after the other, each
        row by row (FlashInfer's custom_mask). Or [bytes], u8: the same as bits, lowest bit first,
        each request beginning at a new byte (FlashInfer's packed_custom_mask).
    qo_indptr, kv_lens: host integers, as for `plan`.

    Raises ValueError for a wrong number of elements or a traced array.
    """
    for name, array in (("visible", visible), ("qo_indptr", qo_indptr), ("kv_lens", kv_lens)):
        if isinstance(array, jax.core.Tracer):
            raise ValueError(
                f"masks.custom_mask: {name}: expected a host array, got a traced one; make the mask"
                " outside of jit, and hand its operands in."
            )
    starts, lens = np.asarray(qo_indptr, np.int64), np.asarray(kv_lens, np.int64)
    visible = np.asarray(visible)
    sizes = np.diff(starts) * lens
    is_packed = visible.dtype == np.uint8
    need = int((-(-sizes // 8)).sum() if is_packed else sizes.sum())
    if visible.dtype not in (np.bool_, np.uint8) or visible.shape != (need,):
        raise ValueError(
            f"masks.custom_mask: visible: expected bool[{int(sizes.sum())}], or uint8 of packed"
            f" bits, for these lengths, got {visible.dtype}{list(visible.shape)}."
        )
    if (sizes >= 2**31).any():
        raise NotImplementedError(
            "masks.custom_mask: visible: fewer than 2^31 bits of a request are supported, got"
            f" {int(sizes.max())}."
        )
    parts = np.split(visible, np.cumsum(-(-sizes // 8) if is_packed else sizes)[:-1])
    if is_packed:
        dense = [
            np.unpackbits(part, bitorder="little")[:n].astype(bool)
            for part, n in zip(parts, sizes, strict=True)
        ]
    else:
        dense, parts = parts, [np.packbits(part, bitorder="little") for part in parts]
    indptr = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int32)

    def function(at: At, bits: Any, first_byte: Any, first_row: Any) -> Any:
        bit = (at.q_row - first_row[at.request]) * at.kv_len + at.kv_pos
        return ((bits[first_byte[at.request] + (bit >> 3)] >> (bit & 7)) & 1) != 0

    def classes(batch: Batch) -> Any:
        shape = len(batch.is_live), batch.num_columns
        found = np.zeros(shape, np.uint8)
        for r, part in enumerate(dense):
            if not part.size:
                continue
            mine = part.reshape(-1, lens[r])
            columns = np.arange(0, lens[r], batch.kv_block)
            first, end = int(starts[r]), int(starts[r + 1])
            cuts = np.arange(first // batch.q_block * batch.q_block, end, batch.q_block)
            rows = np.maximum(cuts - first, 0)
            at = (
                slice(first // batch.q_block, first // batch.q_block + len(rows)),
                slice(len(columns)),
            )
            for value, kind in ((mine, VISIBLE), (~mine, HIDDEN)):
                some = np.logical_or.reduceat(value, columns, 1)
                found[at] |= np.logical_or.reduceat(some, rows, 0).astype(np.uint8) * kind
        return found

    bits = np.concatenate([*parts, np.zeros(1, np.uint8)])  # operands are never empty
    operands = {"bits": bits, "first_byte": indptr[:-1], "first_row": starts[:-1].astype(np.int32)}
    return Mask(function, operands, classes)


def block_sparse(indptr: Any, indices: Any, rows: int, columns: int, num_columns: int) -> Mask:
    """A block-sparse mask in CSR form: blocks of `rows` query tokens and `columns` positions.

    indptr: [num_block_rows + 1], indices: [nnz], host integers. Block row i has rows [i * rows,
        (i + 1) * rows) of q and sees block columns indices[indptr[i] : indptr[i + 1]].
    rows, columns: tokens of a block, at least 1 (1: vector sparse).
    num_columns: number of block columns. Nothing is visible beyond the last block row or column.

    Raises ValueError for an index out of range or an indptr that does not fit the indices.

    >>> import numpy as np
    >>> import jax_attn as ja
    >>> mask = ja.masks.block_sparse(np.array([0, 1, 3]), np.array([0, 0, 1]), 4, 4, 2)
    >>> spec = ja.AttentionSpec(
    ...     4, 2, 64, page_size=16, max_qo_tokens=8, max_kv_pages=1, max_steps=8,
    ...     variant=mask.variant(),
    ... )
    >>> batch = np.array([0, 8]), np.array([8])
    >>> mask.block_map(spec, *batch, q_block=4, kv_block=4).classes.tolist()  # VISIBLE, HIDDEN
    [[1, 2], [1, 1]]

    Work is saved in whole kernel steps (tile_kv keys). For narrower columns see block_sparse_pages.
    """
    indptr, indices = _check_blocks("block_sparse", indptr, indices, rows, columns, num_columns)
    num_rows = len(indptr) - 1
    # One extra row and word, all hidden: indices beyond the last are clamped to them.
    dense = np.zeros((num_rows + 1, (-(-num_columns // 32) + 1) * 32), bool)
    dense[np.repeat(np.arange(num_rows), np.diff(indptr)), indices] = True
    bits = np.packbits(dense, axis=1, bitorder="little").view("<i4")

    def function(at: At, bits: Any) -> Any:
        column = at.kv_pos // columns
        return ((bits[at.q_row // rows, column >> 5] >> (column & 31)) & 1) != 0

    def classes(batch: Batch) -> Any:
        blocks = dense[:num_rows, :num_columns]
        shape = len(batch.is_live), batch.num_columns
        return _coarser(_coarser(blocks, rows, batch.q_block, shape[0]).T, columns, batch.kv_block,
                        shape[1]).T  # fmt: skip

    return Mask(function, {"bits": bits}, classes)


def block_sparse_pages(
    indptr: Any, indices: Any, rows: int, columns: int, num_columns: int, num_rows: int, kv_len: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The blocks of block_sparse as pages: work is saved however narrow the columns are.

    Each block row becomes a request, and its block columns the request's pages (FlashInfer's BSR,
    arXiv 2501.01005, section 3.1). For keys k of one sequence, [kv_len, num_kv_heads, head_dim],
    the pool is k padded to num_columns * columns rows and reshaped to [num_columns, columns,
    num_kv_heads, head_dim]; likewise v.

    indptr, indices, rows, columns, num_columns: as for block_sparse.
    num_rows, kv_len: tokens of q and of k. The last block row and column may be cut short.

    Returns qo_indptr, kv_lens, page_indptr and page_indices for `plan`, with a spec of
    page_size=columns and causal=False. Positions count the visible keys of a row.

    Raises ValueError as block_sparse, and if num_rows or kv_len does not fit the blocks.

    >>> import numpy as np
    >>> import jax_attn as ja
    >>> ja.masks.block_sparse_pages(np.array([0, 1, 3]), np.array([2, 0, 2]), 4, 2, 3, 7, 5)
    (array([0, 4, 7]), array([1, 3]), array([0, 1, 3]), array([2, 0, 2]))
    """
    op = "block_sparse_pages"
    indptr, indices = _check_blocks(op, indptr, indices, rows, columns, num_columns)
    num_block_rows = len(indptr) - 1
    for name, got, size, num in (
        ("num_rows", num_rows, rows, num_block_rows),
        ("kv_len", kv_len, columns, num_columns),
    ):
        if not (num - 1) * size < got <= num * size:
            raise ValueError(
                f"masks.{op}: {name}: expected {max(0, (num - 1) * size + 1)} to {num * size} for"
                f" {num} blocks of {size}, got {got}."
            )
    # Ascending, so that a column that is cut short is a request's last page; each once.
    keys = np.unique(np.repeat(np.arange(num_block_rows), np.diff(indptr)) * num_columns + indices)
    block_rows, pages = np.divmod(keys, num_columns)
    page_indptr = np.searchsorted(block_rows, np.arange(num_block_rows + 1))
    missing = np.zeros(num_block_rows, int)
    missing[block_rows[pages == num_columns - 1]] = num_columns * columns - kv_len
    kv_lens = np.diff(page_indptr) * columns - missing
    qo_indptr = np.minimum(np.arange(num_block_rows + 1) * rows, num_rows)
    return qo_indptr, kv_lens, page_indptr, pages


def _check_blocks(
    op: str, indptr: Any, indices: Any, rows: int, columns: int, num_columns: int
) -> tuple[np.ndarray, np.ndarray]:
    indptr, indices = np.asarray(indptr), np.asarray(indices)
    for name, tokens in (("rows", rows), ("columns", columns)):
        if tokens < 1:
            raise ValueError(f"masks.{op}: {name}: expected tokens >= 1, got {tokens}.")
    if len(indptr) == 0 or indptr[0] != 0 or (np.diff(indptr) < 0).any():
        raise ValueError(f"masks.{op}: indptr: expected ascending numbers from 0 on, got {indptr}.")
    if indptr[-1] != len(indices):
        raise ValueError(
            f"masks.{op}: indices: expected indptr[-1] = {indptr[-1]} block columns, got"
            f" {len(indices)}."
        )
    bad = np.flatnonzero((indices < 0) | (indices >= num_columns))
    if len(bad):
        raise ValueError(
            f"masks.{op}: indices[{bad[0]}]: expected a block column in [0, {num_columns}),"
            f" got {indices[bad[0]]}."
        )
    return indptr, indices


def page_positions(
    q_positions: Any,
    page_starts: Any,
    page_size: int,
    *,
    window_left: int = -1,
    window_right: int = 0,
) -> Mask:
    """A causal mask or a window over pages with gaps, as after AttentionPlan.with_pages.

    The spec must have causal=False and no window: those would count selected tokens.

    q_positions: [rows of q], i32. Position of each query token.
    page_starts: [num_pages], i32, by page id. Position of the first slot of each page of the pool.
    window_left, window_right: a query at position p sees positions [p - window_left, p +
        window_right]. -1: no limit on that side; window_right=0 is causal.
    """

    def function(at: At, q_positions: Any, page_starts: Any) -> Any:
        key = page_starts[at.kv_row // page_size] + at.kv_row % page_size
        behind = q_positions[at.q_row] - key
        sees = behind == behind
        if window_left >= 0:
            sees &= behind <= window_left
        if window_right >= 0:
            sees &= behind >= -window_right
        return sees

    return Mask(function, {"q_positions": q_positions, "page_starts": page_starts})


def _coarser(blocks: np.ndarray, size: int, new_size: int, num: int) -> np.ndarray:
    """Merge blocks of `size` tokens into `num` blocks of new_size tokens along the first axis.

    blocks: bool, or classes. Returns classes; blocks beyond the last are HIDDEN.
    """
    if blocks.dtype == np.bool_:
        blocks = np.where(blocks, VISIBLE, HIDDEN).astype(np.uint8)
    first = np.arange(num) * new_size // size
    end = -(-(np.arange(1, num + 1) * new_size) // size)
    padded = np.concatenate([blocks, np.full((1, blocks.shape[1]), HIDDEN, np.uint8)])
    found = np.zeros((num, blocks.shape[1]), np.uint8)
    for step in range(int((end - first).max(initial=0))):
        at = np.minimum(np.minimum(first + step, end - 1), len(blocks))
        found |= padded[at]
    return found


def check_block_map(spec: AttentionSpec, block_map: Any) -> None:
    """Raise ValueError for a map that does not fit the spec, TypeError if it is no BlockMap."""
    op = "plan: block_map"
    if block_map is None:
        if spec.max_steps is not None:
            raise ValueError(f"{op}: expected one for a spec with max_steps, got None.")
        return
    if not isinstance(block_map, BlockMap):
        raise TypeError(f"{op}: expected a jax_attn.masks.BlockMap, got {type(block_map)}.")
    if spec.max_steps is None:
        raise ValueError(
            f"{op}: expected None for a spec with max_steps=None, got one; give the spec room for"
            " step lists: max_steps, in steps of tile_kv keys that query tiles visit."
        )
    for name in ("q_block", "kv_block"):
        tokens = getattr(block_map, name)
        if isinstance(tokens, bool) or not isinstance(tokens, int) or not 0 < tokens < 2**31:
            raise ValueError(f"{op}: {name}: expected a number of tokens >= 1, got {tokens!r}.")
    dtype = getattr(block_map.classes, "dtype", None)
    shape: tuple[int, ...] = getattr(block_map.classes, "shape", ())
    num_rows = -(-spec.max_qo_tokens // block_map.q_block)
    if dtype != np.uint8 or len(shape) != 2 or shape[0] < num_rows:
        raise ValueError(
            f"{op}: classes: expected uint8[at least {num_rows} rows of blocks, for max_qo_tokens ="
            f" {spec.max_qo_tokens} at q_block = {block_map.q_block}; columns], got {dtype}"
            f"{list(shape)}."
        )
