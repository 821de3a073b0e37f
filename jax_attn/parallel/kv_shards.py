"""Decode with KV shards: each device holds a part of every page, and the states are merged."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_attn._ops.attention import attention
from jax_attn._ops.kv_cache import append_kv
from jax_attn._ops.merge import merge_states
from jax_attn._ops.operands import check_array
from jax_attn._plan.plan import AttentionPlan, plan, traced_int32
from jax_attn._plan.records import HEADER_FIELDS
from jax_attn._plan.search import searchsorted
from jax_attn._spec.spec import AttentionSpec
from jax_attn._xla.transforms import is_in_shard_map, refusing
from jax_attn.parallel._common import add_sinks, check_axis, mapped, windows

_FAULT_WORD = HEADER_FIELDS.index("fault")


@dataclasses.dataclass(frozen=True)
class KvShards:
    """The static half of a batch whose KV cache is sharded over a mesh axis.

    A KV shard is the part of the cache on one device of the axis. Its tokens are interleaved by
    stripes: a page of page_size tokens is cut into axis_size stripes of equal length, and device i
    has stripe i of every page. As one array, k_pages is split along its slots. So all devices use
    the page table of a single device, and the lengths of a sequence on two devices differ by at
    most one stripe.

    spec: page_size, capacities and masks as on one device; the heads that one device has.
        page_size must be a multiple of axis_size. Large pages make planning cheaper for requests
        with many query tokens: a request is planned as one part per page that these tokens touch.
    axis_name, axis_size: the mesh axis over which the pages are sharded.
    heads_axis_name: another mesh axis over which heads are split, or None. Only the PartitionSpecs
        of arrays depend on it.

    Raises ValueError for a page_size that the axis does not divide, NotImplementedError for ragged
    keys, for fresh_kv, and for a variant that reads positions, rows or lengths.
    """

    spec: AttentionSpec
    axis_name: str
    axis_size: int
    heads_axis_name: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.spec, AttentionSpec):
            raise TypeError(
                f"KvShards: spec: expected an AttentionSpec, got {type(self.spec).__name__}."
            )
        size = self.axis_size
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            _refuse("axis_size", "the number of devices of the axis, at least 1", size)
        if self.spec.page_size is None:
            raise NotImplementedError(
                "KvShards: spec: a paged cache is supported, got page_size=None."
            )
        if self.spec.fresh_kv:
            raise NotImplementedError(
                "KvShards: spec: fresh_kv=False is supported, got True; append the new tokens to"
                " the pages first."
            )
        if self.spec.variant is not None and self.spec.variant.reads_places:
            raise NotImplementedError(
                "KvShards: spec: a variant that reads no positions, rows or lengths is supported,"
                " as a device counts those of its own part, got one that does; use one KV shard."
            )
        if self.spec.variant is not None and "o" in self.spec.variant.transforms:
            raise NotImplementedError(
                "KvShards: spec: a variant without o is supported, as o is that of all devices only"
                " after the merge, got one with it; transform the result."
            )
        if self.spec.page_size % size:
            _refuse(
                "spec", f"a page_size that is a multiple of axis_size={size}", self.spec.page_size
            )

    @property
    def stripe_len(self) -> int:
        """Tokens of each page in one KV shard."""
        assert self.spec.page_size is not None
        return self.spec.page_size // self.axis_size

    @property
    def rows_spec(self) -> P:
        """PartitionSpec of q: every device of the axis has all rows."""
        return P(None, self.heads_axis_name)

    @property
    def new_spec(self) -> P:
        """PartitionSpec of k_new and v_new: every device of the axis has all rows."""
        return P(None, None if self.spec.mla else self.heads_axis_name)

    @property
    def kv_heads_spec(self) -> P:
        """PartitionSpec of k_scale and v_scale."""
        return P(None if self.spec.mla else self.heads_axis_name)

    def o_spec(self, scatter: Literal["heads", "rows"] | None = None) -> P:
        """PartitionSpec of the results of attend_kv_shards."""
        if scatter == "rows":
            return P(self.axis_name, self.heads_axis_name)
        if scatter == "heads":
            heads = self.heads_axis_name
            return P(None, (heads, self.axis_name) if heads else self.axis_name)
        return self.rows_spec

    @property
    def plan_spec(self) -> P:
        """PartitionSpec of a KvShardPlan: each device has a separate plan."""
        return P(self.axis_name)

    def pages_spec(self, *, is_stacked: bool) -> P:
        """PartitionSpec of k_pages and v_pages; is_stacked: with a leading [num_layers]."""
        lead = (None,) * (1 + is_stacked)
        # mla has a single latent head, which every device has.
        return P(*lead, self.axis_name, None if self.spec.mla else self.heads_axis_name)

    @functools.cached_property
    def attend_spec(self) -> AttentionSpec:
        """Spec of the parts that one device plans and attends to."""
        spec = self.spec
        assert spec.page_size is not None and spec.max_kv_pages is not None
        tokens, page = spec.max_qo_tokens, spec.page_size
        left, right = windows(spec)
        num_parts, kv_pages = spec.max_batch, spec.max_kv_pages
        if left >= 0:  # one part per row, with the pages that its window touches
            num_parts = tokens
            if right >= 0:
                kv_pages = min(kv_pages, (left + right + page) // page + 1)
            kv_pages *= tokens
        elif right >= 0:
            most = (tokens + page - 2) // page + 1  # pages that the tokens of one request touch
            num_parts = min(tokens, self._num_touched_pages())
            kv_pages *= most
        return dataclasses.replace(
            spec,
            page_size=self.stripe_len,
            max_batch=num_parts,
            max_kv_pages=kv_pages,
            causal=right == 0,
            window_left=left,
            window_right=right,
        )

    @functools.cached_property
    def append_spec(self) -> AttentionSpec:
        """Spec of the parts that one device appends.

        A part has new tokens of one stripe of the device, or tokens of other KV shards.
        """
        num_parts = min(
            self.spec.max_qo_tokens, 2 * self._num_touched_pages() + self.spec.max_batch
        )
        return self._unscheduled(
            page_size=self.stripe_len, max_batch=num_parts, max_kv_pages=num_parts
        )

    @functools.cached_property
    def check_spec(self) -> AttentionSpec:
        """Spec used to validate the caller's batch."""
        return self._unscheduled()

    def _num_touched_pages(self) -> int:
        """Upper bound of the pages that new tokens touch in a batch.

        A request of n tokens touches at most (n + page_size - 2) // page_size + 1 pages.
        """
        batch, page_size = self.spec.max_batch, self.spec.page_size
        assert page_size is not None
        return batch + (self.spec.max_qo_tokens + batch * (page_size - 2)) // page_size

    def _unscheduled(self, **changes: Any) -> AttentionSpec:
        return dataclasses.replace(
            self.spec,
            schedule="no_split",
            kv_split=None,
            share_prefixes=False,
            max_items=None,
            max_partial_rows=None,
            **changes,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KvShardPlan:
    """The schedules of all devices of an axis, made by plan_kv_shards.

    attend_buffers, append_buffers: [axis_size, words], i32; inside shard_map [1, words], for this
        device. Split them over the axis with KvShards.plan_spec.
    kv_shards: static.
    """

    attend_buffers: Any
    append_buffers: Any
    kv_shards: KvShards = dataclasses.field(metadata={"static": True})

    def attend_plan(self, device: int = 0) -> AttentionPlan:
        """The plan by which a device attends; inside shard_map the only device is 0."""
        return AttentionPlan(self.attend_buffers[device], self.kv_shards.attend_spec)

    def append_plan(self, device: int = 0) -> AttentionPlan:
        """The plan by which a device appends; inside shard_map the only device is 0."""
        return AttentionPlan(self.append_buffers[device], self.kv_shards.append_spec)


# ---- plans ---------------------------------------------------------------------------------------


def plan_kv_shards(
    kv_shards: KvShards,
    qo_indptr: Any,
    kv_lens: Any,
    page_indptr: Any,
    page_indices: Any,
    *,
    q_offsets: Any = None,
    prefix_levels: Sequence[tuple[Any, Any]] | None = None,
) -> KvShardPlan:
    """jax_attn.plan for a batch whose KV cache is sharded over a mesh axis.

    The arguments are those of jax_attn.plan on one device: lengths and positions of whole requests.

    Inside shard_map over the axis, each device plans for its own KV shard in the compiled function.
    Elsewhere the result has the plans of all devices, as host arrays if the arguments are host
    arrays. As in jax_attn.plan, the planner on CUDA devices does not search for shared prefixes:
    without prefix_levels its bits equal those of the host planner with prefix_levels=(), where
    nothing is shared.

    prefix_levels: as in jax_attn.plan. With a left window nothing is shared by given levels.

    Raises like jax_attn.plan for the given batch.
    """
    if not isinstance(kv_shards, KvShards):
        raise TypeError(
            f"plan_kv_shards: kv_shards: expected KvShards, got {type(kv_shards).__name__}."
        )
    given = (qo_indptr, kv_lens, page_indptr, page_indices)
    is_in_shard_map("plan_kv_shards", given)
    checked = plan(
        kv_shards.check_spec if prefix_levels is None else kv_shards.spec,
        *given,
        q_offsets=q_offsets,
        prefix_levels=prefix_levels,
    )
    is_manual = kv_shards.axis_name in jax.sharding.get_abstract_mesh().manual_axes
    is_traced = is_manual or not isinstance(checked.buffer, np.ndarray)
    xp: Any = jnp if is_traced else np
    convert = (lambda x: traced_int32(jnp.asarray(x))) if is_traced else np.asarray
    qo, lens, indptr, pages = (convert(x) for x in given)
    offsets = lens - xp.diff(qo) if q_offsets is None else convert(q_offsets)
    levels = [(convert(borders), convert(lens)) for borders, lens in prefix_levels or ()]
    if is_traced:  # a kernel cannot raise: pass the fault on to all plans
        qo = xp.where(checked.buffer[_FAULT_WORD] == 0, qo, -1)
    batch = _Batch(qo, lens, indptr, xp.append(pages, 0).astype(np.int32), offsets)
    devices = [lax.axis_index(kv_shards.axis_name)] if is_manual else range(kv_shards.axis_size)
    attend, append = [], []
    for device in devices:
        parts = _attended_parts(xp, kv_shards, batch, device)
        levels_of_parts = None
        if prefix_levels is not None:
            # With a left window the pages of a part begin where its window does.
            used = levels if kv_shards.attend_spec.window_left < 0 else []
            levels_of_parts = [_level_of_parts(xp, kv_shards, parts, *level) for level in used]
        attend.append(_plan_parts(xp, kv_shards.attend_spec, parts, levels_of_parts))
        parts = _appended_parts(xp, kv_shards, batch, device)
        append.append(_plan_parts(xp, kv_shards.append_spec, parts, None))
    return KvShardPlan(xp.stack(attend), xp.stack(append), kv_shards)


class _Batch(NamedTuple):
    """The arguments of plan_kv_shards as int32 arrays of numpy or jax.numpy."""

    qo_indptr: Any
    kv_lens: Any
    page_indptr: Any
    page_indices: Any  # with one extra entry at the end, never read
    q_offsets: Any


class _Parts(NamedTuple):
    """The batch as one device plans it: consecutive parts of requests, in the KV shard's tokens."""

    qo_indptr: Any  # [num_parts + 1]
    kv_lens: Any  # [num_parts]
    q_offsets: Any  # [num_parts]
    first_page: Any  # [num_parts], an index into page_indices of the batch
    page_indices: Any  # those of the batch
    of_request: Any  # [batch_size + 1]. Parts of request r: [of_request[r], of_request[r + 1])


class _Rows(NamedTuple):
    """Query tokens. Entries beyond the batch have arbitrary values."""

    request: Any
    position: Any
    is_live: Any
    is_first: Any  # whether it is the first token of a request

    @classmethod
    def of(cls, xp: Any, batch: _Batch, first_position: Any, num_rows: int) -> _Rows:
        row = xp.arange(num_rows, dtype=np.int32)
        borders = batch.qo_indptr
        last = len(batch.kv_lens) - 1
        request = xp.clip(searchsorted(xp, borders[1:], row, side="right"), 0, last)
        position = first_position[request] + row - borders[request]
        return cls(request, position, row < borders[-1], row == borders[request])


def _attended_parts(xp: Any, kv_shards: KvShards, batch: _Batch, device: Any) -> _Parts:
    """Cut requests into parts whose rows see the KV shard's keys by the masks of attend_spec.

    Causal: let c be the number of whole pages before a row. In this KV shard the row sees the
    tokens of c stripes, and those of stripe c up to its own position (all of them if its position
    is behind the stripe). Take the rows from one beginning of a stripe to the next, with kv_len =
    (c + 1) * stripe_len. Each row sees one key more than the row before until it sees them all,
    which is a causal mask. These rows are one part.

    Left window: it begins in one stripe and ends in another, so each row is a part. The pages of
    the part start with the one in which the window begins, and q_offset is chosen so that the
    window begins at the right token.
    """
    spec, length, page = kv_shards.attend_spec, kv_shards.stripe_len, kv_shards.spec.page_size
    assert page is not None
    left, right = spec.window_left, spec.window_right
    if not len(batch.kv_lens):
        return _no_parts(xp, batch)

    def own(count: Any) -> Any:
        """Number of this KV shard's tokens among the first `count` positions."""
        count = xp.maximum(count, 0)
        return count // page * length + xp.clip(count % page - device * length, 0, length)

    if left < 0 and right < 0:
        kv_lens = own(batch.kv_lens)
        of_request = xp.arange(len(batch.kv_lens) + 1)
        first_page = batch.page_indptr[:-1]
        return _Parts(batch.qo_indptr, kv_lens, kv_lens, first_page, batch.page_indices, of_request)
    rows = _Rows.of(xp, batch, batch.q_offsets, spec.max_qo_tokens)
    cycle = (rows.position + right - device * length) // page
    starts = rows.is_live
    if left < 0:
        starts = starts & (rows.is_first | _changes(xp, cycle))
    begin, first = _begins(xp, batch, starts, spec.max_batch)
    request, position = rows.request[first], rows.position[first]
    all_keys = batch.kv_lens[request]
    if left < 0:
        seen = xp.clip((cycle[first] + 1) * length, 0, own(all_keys))
        place = (position + right - device * length) % page
        offset = xp.where(seen > 0, cycle[first] * length + place - right, 0)
        skipped = xp.zeros_like(seen)
    else:
        hidden = own(position - left)
        seen = own(all_keys if right < 0 else xp.minimum(all_keys, position + right + 1))
        skipped = hidden // length
        seen = xp.where(seen > hidden, seen - skipped * length, 0)
        offset = hidden - skipped * length + left
    return _finish_parts(
        xp, batch, begin, xp.where(begin[:-1] < begin[1:], seen, 0), offset,
        batch.page_indptr[request] + skipped,
    )  # fmt: skip


def _appended_parts(xp: Any, kv_shards: KvShards, batch: _Batch, device: Any) -> _Parts:
    """Cut new tokens into parts.

    A part has the new tokens of one stripe of this KV shard, or those between two such stripes,
    which are not stored here (kv_len 0).
    """
    spec, length, page = kv_shards.append_spec, kv_shards.stripe_len, kv_shards.spec.page_size
    assert page is not None
    if not len(batch.kv_lens):
        return _no_parts(xp, batch)
    first_new = batch.kv_lens - xp.diff(batch.qo_indptr)
    rows = _Rows.of(xp, batch, first_new, spec.max_qo_tokens)
    index, place = rows.position // page, rows.position % page - device * length
    is_own = (rows.position >= 0) & (place >= 0) & (place < length)
    stripe = xp.where(is_own, index, -1)
    starts = rows.is_live & (rows.is_first | _changes(xp, stripe))
    begin, first = _begins(xp, batch, starts, spec.max_batch)
    kv_lens = xp.where(is_own[first], place[first] + xp.diff(begin), 0)
    first_page = batch.page_indptr[rows.request[first]] + index[first]
    kv_lens = xp.where(begin[:-1] < begin[1:], kv_lens, 0)
    return _finish_parts(xp, batch, begin, kv_lens, kv_lens, first_page)


def _no_parts(xp: Any, batch: _Batch) -> _Parts:
    none = xp.zeros(0, np.int32)
    return _Parts(batch.qo_indptr, none, none, none, batch.page_indices, xp.zeros(1, np.int32))


def _changes(xp: Any, values: Any) -> Any:
    """Whether each value differs from the one before; True for the first."""
    return xp.append(True, values[1:] != values[:-1])


def _begins(xp: Any, batch: _Batch, starts: Any, num_parts: int) -> tuple[Any, Any]:
    """qo_indptr of parts that begin at the rows where `starts` is True, and their first rows.

    Surplus parts have no rows.
    """
    begin = searchsorted(xp, xp.cumsum(starts), xp.arange(1, num_parts + 2), side="left")
    begin = xp.minimum(begin, batch.qo_indptr[-1])
    return begin, xp.clip(begin[:-1], 0, len(starts) - 1)


def _finish_parts(
    xp: Any, batch: _Batch, begin: Any, kv_lens: Any, q_offsets: Any, first_page: Any
) -> _Parts:
    of_request = searchsorted(xp, begin[:-1], batch.qo_indptr, side="left")
    return _Parts(begin, kv_lens, q_offsets, first_page, batch.page_indices, of_request)


def _level_of_parts(
    xp: Any, kv_shards: KvShards, parts: _Parts, request_indptr: Any, prefix_lens: Any
) -> tuple[Any, Any]:
    """A level of prefix_levels for parts instead of requests, limited to keys they all see."""
    num_parts, num_prefixes = len(parts.kv_lens), len(prefix_lens)
    is_last = request_indptr >= len(parts.of_request) - 1
    borders = xp.where(is_last, num_parts, parts.of_request[request_indptr])
    assert kv_shards.spec.page_size is not None
    lens = prefix_lens // kv_shards.spec.page_size * kv_shards.stripe_len
    # The first rows of a request may see less than its prefix.
    prefix = xp.clip(
        searchsorted(xp, borders[1:], xp.arange(num_parts), side="right"), 0, num_prefixes - 1
    )
    kv_lens = xp.where(xp.diff(parts.qo_indptr) > 0, parts.kv_lens, 2**30)
    if xp is np:
        lens = lens.copy()
        np.minimum.at(lens, prefix, kv_lens)
    else:
        lens = lens.at[prefix].min(kv_lens)
    return borders, lens


def _plan_parts(
    xp: Any, spec: AttentionSpec, parts: _Parts, levels: list[tuple[Any, Any]] | None
) -> Any:
    """The buffer of a plan for the parts."""
    assert spec.page_size is not None
    num_pages = -(-parts.kv_lens // spec.page_size)
    page_indptr = xp.append(np.int32(0), xp.cumsum(num_pages))
    if len(parts.kv_lens):
        total = page_indptr[-1] if xp is np else spec.max_kv_pages
        entry = xp.arange(total)
        part = searchsorted(xp, page_indptr[1:], entry, side="right")
        part = xp.minimum(part, len(parts.kv_lens) - 1)
        at = parts.first_page[part] + entry - page_indptr[part]
        pages = parts.page_indices[xp.clip(at, 0, len(parts.page_indices) - 1)]
    else:
        pages = parts.page_indices[:0]
    return plan(
        spec, parts.qo_indptr, parts.kv_lens, page_indptr, pages,
        q_offsets=parts.q_offsets, prefix_levels=levels,
    ).buffer  # fmt: skip


# ---- inside shard_map ----------------------------------------------------------------------------


def append_kv_shards(
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    k_new: jax.Array,
    v_new: jax.Array | None,
    plan: KvShardPlan,
    *,
    layer: Any = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """jax_attn.append_kv for a sharded KV cache: each device writes the tokens of its KV shard.

    k_pages: [num_pages, page_size / axis_size, num_kv_heads, head_dim_qk], this device's KV shard,
        or stacked with a leading [num_layers] and `layer`. v_pages: likewise; None with mla.
    k_new: [max_qo_tokens, num_kv_heads, head_dim_qk]. v_new: [max_qo_tokens, num_kv_heads,
        head_dim_vo]. All new tokens, on every device.
    layer, k_scale, v_scale: as for jax_attn.append_kv.
    mesh: None inside shard_map. Otherwise the arrays are global, with whole pages of page_size, and
        each device of the mesh processes its part.

    Returns k_pages and v_pages. No communication. Raises like jax_attn.append_kv.
    """
    kv_shards = _kv_shards_of("append_kv_shards", plan, mesh)
    if mesh is None:
        is_in_shard_map("append_kv_shards", (k_pages, v_pages, k_new, v_new))
        append: Any = append_kv  # its overloads cannot express an optional v
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        return append(k_pages, v_pages, k_new, v_new, plan.append_plan(), layer=layer, **scales)
    pages = kv_shards.pages_spec(is_stacked=layer is not None)
    heads = kv_shards.kv_heads_spec
    arrays = {
        "k_pages": (k_pages, pages),
        "v_pages": (v_pages, pages),
        "k_new": (k_new, kv_shards.new_spec),
        "v_new": (v_new, kv_shards.new_spec),
        "plan": (plan, kv_shards.plan_spec),
        "layer": (layer, P()),
        "k_scale": (k_scale, heads),
        "v_scale": (v_scale, heads),
    }
    out_specs = pages, None if v_pages is None else pages
    return mapped("append_kv_shards", append_kv_shards, mesh, arrays, out_specs)


def attend_kv_shards(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    plan: KvShardPlan,
    *,
    layer: Any = None,
    sinks: jax.Array | None = None,
    q_scale: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    scatter: Literal["heads", "rows"] | None = None,
    return_lse: bool = False,
    mesh: jax.sharding.Mesh | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """jax_attn.attention for a batch whose KV cache is sharded over a mesh axis.

    Each device attends from all query rows to the keys of its KV shard. Then the devices exchange
    states once and merge them in the order of the axis (Helix parallelism, arXiv 2507.07120;
    LeanAttention, arXiv 2405.10480). The size of the exchange does not depend on the context
    length.

    q: [max_qo_tokens, num_qo_heads, head_dim_qk], the same on every device of the axis.
    k_pages, v_pages: this device's KV shard, as for append_kv_shards.
    layer, q_scale, k_scale, v_scale: as for jax_attn.attention.
    sinks: [num_qo_heads], f32, or None; counted once.
    scatter: None: every device gets all of o, by an all-gather. "heads", "rows": device i of the
        axis gets part i of axis_size of the query heads, or of the rows, by an all-to-all that
        sends max_qo_tokens * num_qo_heads * (head_dim_vo + 1) words at most. Use "heads" before an
        output projection whose rows are split by head, with an all-reduce.
    return_lse: also return lse.
    mesh: None inside shard_map. Otherwise the arrays are global, with whole pages of page_size, and
        each device of the mesh processes its part.

    Returns o, and with return_lse lse, as jax_attn.attention does, for all rows and heads or for
    this device's part. The same inputs and plan give the same bits on every device.

    Not differentiable in q, k_pages and v_pages: NotImplementedError. Raises like
    jax_attn.attention, and ValueError if the axis does not divide the scattered heads
    or rows.
    """
    op = "attend_kv_shards"
    kv_shards = _kv_shards_of(op, plan, mesh)
    if mesh is None:
        is_in_shard_map(op, (q, k_pages, v_pages))
    parts = {"rows": kv_shards.spec.max_qo_tokens, "heads": kv_shards.spec.num_qo_heads}
    if scatter is not None and scatter not in parts:
        raise ValueError(f"{op}: scatter: expected 'heads', 'rows' or None, got {scatter!r}.")
    if scatter is not None and parts[scatter] % kv_shards.axis_size:
        raise ValueError(
            f"{op}: scatter: expected {scatter} of one device that are a multiple of"
            f" axis_size={kv_shards.axis_size}, got {parts[scatter]}; use scatter=None."
        )
    options = {
        "layer": layer, "sinks": sinks, "q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale
    }  # fmt: skip
    if mesh is not None:
        pages = kv_shards.pages_spec(is_stacked=layer is not None)
        heads = dict.fromkeys(("sinks", "q_scale"), P(kv_shards.heads_axis_name))
        heads |= dict.fromkeys(("k_scale", "v_scale"), kv_shards.kv_heads_spec)
        rows = kv_shards.o_spec(scatter)
        arrays = {
            "q": (q, kv_shards.rows_spec),
            "k_pages": (k_pages, pages),
            "v_pages": (v_pages, pages),
            "plan": (plan, kv_shards.plan_spec),
        }
        for name, value in options.items():
            arrays[name] = value, heads.get(name, P())
        call = functools.partial(attend_kv_shards, scatter=scatter, return_lse=return_lse)
        return mapped(op, call, mesh, arrays, (rows, rows) if return_lse else rows)
    own_sinks = options.pop("sinks")
    if own_sinks is not None:
        own_sinks = check_array(op, "sinks", own_sinks, (kv_shards.spec.num_qo_heads,), "float32")
    state = attention(q, k_pages, v_pages, plan.attend_plan(), return_lse=True, **options)
    o, lse = _merge_over(state, (kv_shards.axis_name, kv_shards.axis_size, scatter))
    if own_sinks is not None:
        if scatter == "heads":
            own_sinks = own_sinks.reshape(kv_shards.axis_size, -1)[
                lax.axis_index(kv_shards.axis_name)
            ]
        o, lse = add_sinks(o, lse, own_sinks)
    return (o, lse) if return_lse else o


def _merged(
    state: tuple[jax.Array, jax.Array], static: tuple[str, int, str | None]
) -> tuple[jax.Array, jax.Array]:
    """The state over the keys of all devices of the axis, with one collective.

    state: o: [n, num_heads, head_dim_vo] and lse: [n, num_heads], f32.
    static: name and size of the axis, and `scatter` of attend_kv_shards.

    Returns arrays like those of the state, or a part.
    """
    (o, lse), (axis_name, axis_size, scatter) = state, static
    if axis_size == 1:
        return o, lse
    # Send integers: XLA on CPU sends bfloat16 as float32, which changes the bits of a NaN.
    words = _as_words(o), _as_words(lse[..., None])
    sent = jnp.concatenate(words, axis=-1)
    if scatter is None:
        # All devices get the same, which a shard_map with check_vma=True wants to know.
        is_checked = axis_name in jax.typeof(sent).manual_axis_type.varying
        states = lax.all_gather(sent, axis_name, to="invarying" if is_checked else "varying")
    else:
        cut = ("rows", "heads").index(scatter)
        shape = (*sent.shape[:cut], axis_size, -1, *sent.shape[cut + 1 :])
        pieces = jnp.moveaxis(sent.reshape(shape), cut, 0)
        states = lax.all_to_all(pieces, axis_name, split_axis=0, concat_axis=0)
    lses = lax.bitcast_convert_type(states[..., -1], jnp.float32)
    return merge_states(_from_words(states[..., :-1], o.dtype), lses)


# Integers have no gradients, so that JAX would take the gradients of what is sent for 0.
_merge_over = refusing(
    "attend_kv_shards",
    _merged,
    vmap="put the batch into the plan, one request per element",
    gradients="train with attend_sequence, which splits sequences over devices (docs/devices.md)",
)


def _as_words(x: jax.Array) -> jax.Array:
    """An array [..., n] of 2- or 4-byte elements as [..., words], u32."""
    per_word = 4 // x.dtype.itemsize
    pairs = x if per_word == 1 else x.reshape(*x.shape[:-1], -1, per_word)
    return lax.bitcast_convert_type(pairs, jnp.uint32)


def _from_words(words: jax.Array, dtype: Any) -> jax.Array:
    """Undo _as_words."""
    return lax.bitcast_convert_type(words, dtype).reshape(*words.shape[:-1], -1)


def _kv_shards_of(op: str, plan: Any, mesh: Any) -> KvShards:
    """The KvShards of the plan. Raises if its axis does not match the mesh."""
    if not isinstance(plan, KvShardPlan):
        raise TypeError(
            f"{op}: plan: expected a KvShardPlan, which plan_kv_shards makes, got"
            f" {type(plan).__name__}."
        )
    kv_shards = plan.kv_shards
    check_axis(op, "KvShards", kv_shards.axis_name, kv_shards.axis_size, mesh)
    return kv_shards


def _refuse(name: str, expected: str, got: Any) -> NoReturn:
    raise ValueError(f"KvShards: {name}: expected {expected}, got {got!r}.")
