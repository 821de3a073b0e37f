"""AttentionPlan: a schedule in one int32 buffer that compiled functions take as an argument."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn import _core, _environment
from jax_attn._plan import file as plan_file
from jax_attn._plan import plot
from jax_attn._plan.memory import plan_memory
from jax_attn._plan.records import HEADER_FIELDS, MERGE_GROUP, WORK_ITEM, is_final, is_shared
from jax_attn._spec.spec import AttentionSpec
from jax_attn._xla import ffi
from jax_attn.masks import BlockMap, check_block_map

_INT32 = np.dtype(np.int32)
_MAX_PREFIXES = 2**23 - 1  # per level: the planner sorts prefixes of all levels by keys of 26 bits


class PlanBucket(NamedTuple):
    """The key by which Unified Attention groups batches: batches of a bucket need the same work.

    phase: see AttentionPlan.phase.
    num_qo_tokens: query tokens of the batch.
    num_shared_pages: distinct pages that shared items read.
    num_unique_pages: distinct pages that other items read.
    num_logits: requests with query tokens; each needs the logits of its last token.
    """

    phase: str
    num_qo_tokens: int
    num_shared_pages: int
    num_unique_pages: int
    num_logits: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionPlan:
    """The schedule of a batch. Pass it to a jitted function like any array.

    A pytree: new contents never recompile.

    buffer: [spec.plan_words], i32. The only pytree leaf; its shape depends only on capacities.
    spec: static. So a plan always matches the kernel that runs it.

    The methods read the buffer on the host, so they need a concrete plan, not one inside jit.

    In the example, two decodes over 5 and 20 keys give one item each, for the only KV head.

    >>> import numpy as np
    >>> import jax_attn as ja
    >>> spec = ja.AttentionSpec(4, 1, 64, page_size=16, max_qo_tokens=2, max_kv_pages=4)
    >>> lens, page_indptr = np.array([5, 20]), np.array([0, 1, 3])
    >>> plan = ja.plan(spec, np.arange(3), lens, page_indptr, np.array([7, 2, 4]))
    >>> sorted(plan.items()[["request", "kv_begin", "kv_end"]].tolist())
    [(0, 0, 5), (1, 0, 20)]
    >>> plan.bucket()
    PlanBucket(phase='--u', num_qo_tokens=2, num_shared_pages=0, num_unique_pages=3, num_logits=2)
    """

    buffer: Any
    spec: AttentionSpec = dataclasses.field(metadata={"static": True})

    def _section(self, name: str, num_words: int) -> np.ndarray:
        begin = self.spec.layout[name]
        return np.asarray(self.buffer)[begin : begin + num_words]

    def header(self) -> dict[str, int]:
        """The header's counts by name: batch_size, nnz_qo, num_items, num_merge_groups, ..."""
        words = self._section("header", len(HEADER_FIELDS))
        return dict(zip(HEADER_FIELDS, words.tolist(), strict=True))

    @property
    def nnz_qo(self) -> Any:
        """The query tokens, [] i32; rows of q beyond them are padding. Also of a traced plan."""
        return self.buffer[self.spec.layout["header"] + HEADER_FIELDS.index("nnz_qo")]

    def fault(self) -> str:
        """Why a plan made on a GPU is faulty (bad input, capacity overflow); "" if it is sound.

        The text is the ValueError that planning on the host would have raised.
        """
        header = self.header()
        words = (header[name] for name in ("fault", "fault_at", "fault_got", "fault_expected"))
        return self.spec.problem.plan_fault(*words)

    def queue_indptr(self) -> np.ndarray:
        """[num_ctas + 1]. Queue c has items()[queue_indptr[c] : queue_indptr[c + 1]]."""
        return self._section("queue_indptr", self.spec.kernel_config["num_ctas"] + 1)

    def items(self) -> np.ndarray:
        """[num_items], structured. The work items, with the fields of WorkItem in csrc/params.h.

        num_groups: 0 for an item that writes its results itself. Above 1 for an item that several
            requests share; its query tokens are qo_indices()[first_token : first_token + qo_len].
        kv_begin, kv_end: positions; with max_steps, indices into steps() times tile_kv.
        """
        num_words = self.header()["num_items"] * WORK_ITEM.itemsize // 4
        return self._section("items", num_words).view(WORK_ITEM)

    def merge_groups(self) -> np.ndarray:
        """[num_merge_groups], structured. The fields of MergeGroup in csrc/params.h."""
        num_words = self.header()["num_merge_groups"] * MERGE_GROUP.itemsize // 4
        return self._section("merge_groups", num_words).view(MERGE_GROUP)

    def partial_rows(self) -> np.ndarray:
        """[num_partials]. Workspace row at which each partial result begins.

        Those of merge group g are partial_rows()[g.partials_begin :: g.partials_step][:
        g.num_partials], in kv order.
        """
        return self._section("partial_rows", self.header()["num_partials"])

    def qo_indices(self) -> np.ndarray:
        """[num_shared_tokens]. Rows of q for the query tokens of shared items."""
        return self._section("qo_indices", self.header()["num_shared_tokens"])

    def steps(self) -> np.ndarray:
        """[num_steps], i32. The step lists of all query tiles, concatenated (max_steps only).

        An entry is 2 * step + 1 if the mask is applied, 2 * step if it hides nothing. Item i visits
        entries kv_begin / tile_kv to kv_end / tile_kv.
        """
        return self._section("steps", self.header()["num_steps"])

    def _kv_spans(self, items: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(item, begin, end) of the position spans that items visit: one per item, or its steps.

        begin and end may reach beyond the keys that the item's rows see.
        """
        begin, end = items["kv_begin"], items["kv_end"]
        if self.spec.max_steps is None:
            return np.arange(len(items)), begin, end
        tile_kv = self.spec.kernel_config["tile_kv"]
        counts = (end - begin) // tile_kv
        item = np.repeat(np.arange(len(items)), counts)
        first = np.cumsum(counts) - counts
        entry = np.arange(len(item)) + np.repeat(begin // tile_kv - first, counts)
        start = (self.steps()[entry] >> 1) * tile_kv
        kv_lens = self._section("kv_lens", self.spec.max_batch)
        return item, start, np.minimum(start + tile_kv, kv_lens[items["request"]][item])

    def _steps_without_mask(self) -> int:
        """Number of entries that step lists would have if the map hid nothing."""
        spec, items = self.spec, self.items()
        tile_kv = spec.kernel_config["tile_kv"]
        # A shared prefix has its entries once, not once per request.
        shared = items[is_shared(items) & (items["kv_head"] == 0)]
        counts = (shared["kv_end"] - shared["kv_begin"]) // tile_kv
        num_saved = int((counts * (shared["num_groups"] - 1)).sum())
        # Take the first item in the lists for each set of query tokens. If a tile has a prefix to
        # itself, that item comes later, and its positions are not real ones.
        items = items[~is_shared(items)]
        items = items[np.lexsort((items["kv_end"], items["kv_begin"], items["first_token"]))]
        _, first = np.unique(items["first_token"], return_index=True)
        items = items[first]
        q_pos, qo_len = items["q_pos"].astype(np.int64), items["qo_len"]
        end = self._section("kv_lens", spec.max_batch)[items["request"]]
        begin = np.zeros_like(end)
        if spec.window_left >= 0:
            begin = np.maximum(begin, q_pos - spec.window_left)
        if spec.causal or spec.window_right >= 0:
            end = np.minimum(end, q_pos + qo_len + max(0, spec.window_right))
        steps = np.where(end > begin, -(-end // tile_kv) - begin // tile_kv, 0)
        return int(steps.sum()) - num_saved

    def item_costs(self) -> np.ndarray:
        """[num_items]. The planner's cost of each item, in kv tokens of the smallest tile."""
        config, items = self.spec.kernel_config, self.items()
        kv_cost = np.array([config[f"kv_cost_{i}"] for i in range(3)])
        item_kv_cost = kv_cost[items["tile"]]
        if config["cost_by_rows"]:
            tile_rows = np.array([config[f"tile_q_{i}"] for i in range(3)])[items["tile"]]
            by_rows = item_kv_cost * (items["qo_len"] * self.spec.heads_per_item) // tile_rows
            by_rows = np.maximum(kv_cost[0], by_rows)
            item_kv_cost = np.where(is_shared(items), by_rows, item_kv_cost)
        kv_tokens = (items["kv_end"] - items["kv_begin"]).astype(np.int64)
        split_cost = np.full(3, config["split_cost"])
        if not is_shared(items).any():  # else states cost by their rows
            split_cost[1:] = config["tall_split_cost"] or config["split_cost"]
        fixed = config["item_cost"] + split_cost[items["tile"]] * ~is_final(items)
        return fixed + kv_tokens * item_kv_cost / kv_cost[0]

    def queue_costs(self) -> np.ndarray:
        """[num_ctas]. Predicted load of each queue: the sum of its item_costs()."""
        ends = np.concatenate([[0], np.cumsum(self.item_costs())])
        indptr = self.queue_indptr()
        return ends[indptr[1:]] - ends[indptr[:-1]]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write spec and buffer to a file (npz), for `load` and `python -m jax_attn.inspect`."""
        plan_file.write(path, np.asarray(self.buffer), self.spec)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> AttentionPlan:
        """Read a saved plan. It equals the plan that was saved and runs like it.

        The number of queues is kept, even on a machine with another number of processors. The file
        may be untrusted: every word that kernels rely on is checked. Page ids are checked against
        the spec's num_pages; if that is None, attention on a CPU checks them against the pool.

        Raises ValueError for a file that is no plan, for a damaged plan (with section, index,
        expected and got), and if this version of jax_attn plans or configures kernels differently.
        """
        return cls(*plan_file.read(path))

    def plot(self, path: str | os.PathLike[str], *, item_times: Any = None) -> None:
        """Draw the timeline of every queue: predicted, or measured if item_times are given.

        path: .html writes a standalone page that describes the item under the pointer. .png, .svg
            and .pdf need matplotlib: `pip install 'jax_attn[plot]'`.
        item_times: [num_items, 2], seconds. Begin and end of each item, from any common zero.

        Each bar is an item; its colour is the request. Shared items (query rows of several
        requests) are hatched. A line leads from each partial state to the item that completes its
        merge group.
        """
        plot.draw(self, path, item_times)

    def with_pages(self, page_indices: Any) -> AttentionPlan:
        """The same schedule over other pages, without planning again.

        Use it for page selection, or for a separate page table per layer. It costs a copy of the
        buffer. It works inside jit, too, where the pages may differ from layer to layer.

        page_indices: [n], i32. Page ids in the order of the plan's page_indptr. page_indptr and all
            lengths stay the same. As for `plan`, entries that hold none of a request's kv_len
            tokens, and entries beyond page_indptr[-1], may have any value.

        Positions count through the pages in the order listed. If selected pages leave gaps, a
        causal mask stays correct if the pages of the query tokens come last, but a window counts
        selected tokens. For true positions use masks.page_positions.

        Raises ValueError for a ragged plan, for fewer entries than the plan's pages, or for a page
        id out of range. Raises NotImplementedError for a spec with share_prefixes=True, because
        requests that share work might no longer have the same pages. For traced arrays with such
        contents the plan is faulty: attention on a CPU raises the error; for CUDA see `plan`.
        """
        spec, op = self.spec, "AttentionPlan.with_pages"
        if not spec.is_paged:
            raise ValueError(f"{op}: plan: expected one over pages, got page_size=None.")
        if spec.share_prefixes:
            raise NotImplementedError(
                f"{op}: plan: supported with share_prefixes=False in the spec, got True: items of a"
                " shared prefix read the pages of one request for all."
            )
        traced = any(isinstance(x, jax.core.Tracer) for x in (self.buffer, page_indices))
        xp = jnp if traced else np
        pages = int32_array(xp, "page_indices", page_indices, op=op)
        buffer = xp.asarray(self.buffer)
        pages, largest, fault = _place_pages(xp, spec, buffer, pages)
        header_begin, begin = spec.layout["header"], spec.layout["page_indices"]
        at = header_begin + HEADER_FIELDS.index("max_page_id")
        if not traced:
            if fault[0]:
                sentence = spec.problem.plan_fault(*(int(word) for word in fault))
                raise ValueError(sentence.replace("plan:", f"{op}:", 1))
            new = plan_memory(spec, None)
            new[:] = buffer
            new[begin : begin + len(pages)], new[at] = pages, largest
            return AttentionPlan(new, spec)
        buffer = buffer.at[begin : begin + len(pages)].set(pages).at[at].set(largest)
        faulty = (
            jnp.zeros(len(HEADER_FIELDS), np.int32)
            .at[:2]
            .set(np.array([_core.faulty_plan_magic, _core.plan_version], np.int32))
        )
        fault_at = HEADER_FIELDS.index("fault")
        faulty = faulty.at[at - header_begin].set(-1)
        faulty = faulty.at[fault_at : fault_at + 4].set(jnp.stack(fault))
        num_queues = spec.kernel_config["num_ctas"] + 1
        for name, words in (("header", faulty), ("queue_indptr", jnp.zeros(num_queues, np.int32))):
            begin, end = spec.layout[name], spec.layout[name] + len(words)
            buffer = buffer.at[begin:end].set(jnp.where(fault[0] > 0, words, buffer[begin:end]))
        return AttentionPlan(buffer, spec)

    def phase(self) -> str:
        """Three letters, as in vLLM's unified attention, with "-" for a kind that does not occur.

        `c`: items with a causal border, where a query token does not see later tokens of its chunk.
        `s`: spans shared by requests. `u`: spans of one request that all rows of an item see.
        Decodes are "--u", decodes with a common prefix "-su", and these with a prompt "csu".
        """
        items = self.items()
        shared = is_shared(items)
        item, begin, end = self._kv_spans(items)
        cuts = np.zeros(len(items), bool)
        np.logical_or.at(cuts, item, (items["q_pos"][item] < end - 1) & (begin < end))
        is_causal = cuts & (self.spec.causal & ~shared)
        have = is_causal.any(), shared.any(), (~is_causal & ~shared).any()
        return "".join(letter if x else "-" for letter, x in zip("csu", have, strict=True))

    def bucket(self) -> PlanBucket:
        """The batch's sizes that determine the cost of a step. A ragged batch has no pages."""
        header, shared = self.header(), is_shared(self.items())
        qo_lens = np.diff(self._section("qo_indptr", header["batch_size"] + 1))
        return PlanBucket(
            self.phase(),
            header["nnz_qo"],
            self._num_pages(shared),
            self._num_pages(~shared),
            int((qo_lens > 0).sum()),
        )

    def _num_pages(self, chosen: np.ndarray) -> int:
        """Number of distinct pages that the chosen items read."""
        page_size, items = self.spec.page_size, self.items()[chosen]
        if page_size is None:
            return 0
        indices = self._section("page_indices", self.header()["nnz_kv"])
        item, kv_begin, kv_end = self._kv_spans(items)
        if self.spec.fresh_kv:  # pages with only new tokens are not read
            batch_size = self.header()["batch_size"]
            qo_lens = np.diff(self._section("qo_indptr", batch_size + 1))
            cached = self._section("kv_lens", batch_size) - qo_lens
            kv_end = np.minimum(kv_end, cached[items["request"][item]])
        spans = np.stack([items["kv_base"][item], kv_begin, kv_end], axis=1)
        base, kv_begin, kv_end = np.unique(spans[kv_begin < kv_end], axis=0).T
        begin, end = base + kv_begin // page_size, base - (-kv_end // page_size)
        return len(set().union(*(indices[b:e].tolist() for b, e in zip(begin, end, strict=True))))

    def describe(self) -> str:
        """A text summary of the schedule: items, queues, imbalance, splits, workspace.

        Occupancy is what LeanAttention calls so: the mean load of the queues over the fullest.

        For a faulty plan, the text says what is wrong with its batch.
        """
        if fault := self.fault():
            return fault
        spec, config = self.spec, self.spec.kernel_config
        header, items = self.header(), self.items()
        lengths = np.diff(self.queue_indptr())
        costs = self.queue_costs()
        mean = costs.mean() if costs.size else 0.0
        tiles = [config[f"tile_q_{i}"] for i in range(config["num_tiles"])]
        per_tile = np.bincount(items["tile"], minlength=len(tiles))
        kv_tokens = items["kv_end"] - items["kv_begin"]
        groups = self.merge_groups()
        num_children = int((groups["parent"] >= 0).sum())
        bucket = self.bucket()
        storage = f"pages of {spec.page_size}" if spec.is_paged else "ragged kv"
        lines = [
            f"plan: {spec.schedule} for {spec.target}, {header['batch_size']} requests,"
            f" {header['nnz_qo']} query tokens, {spec.num_qo_heads}/{spec.num_kv_heads} heads,"
            f" {storage}",
            f"  items          {header['num_items']} of {config['max_items']}: "
            + ", ".join(f"{n} of {rows} rows" for n, rows in zip(per_tile, tiles, strict=True)),
            f"  phase          {bucket.phase}",
            f"  bucket         {bucket.num_qo_tokens} query tokens, {bucket.num_shared_pages} pages"
            f" shared, {bucket.num_unique_pages} of one request each, {bucket.num_logits} logits",
            f"  kv span        {_range(kv_tokens)} tokens an item, {int(kv_tokens.sum())} in all",
            f"  queues         {len(lengths)}, {_range(lengths)} items each,"
            f" {int((lengths == 0).sum())} empty",
            f"  imbalance      {costs.max() / mean if mean else 1.0:.3f}"
            " (predicted load of the fullest queue / mean), occupancy"
            f" {mean / costs.max() if mean else 1.0:.3f}",
            f"  split tiles    {len(groups) - num_children} row groups in {header['num_partials']}"
            f" partial states, {header['num_partial_rows']} of {config['max_partial_rows']} rows"
            + (f", first folded by {num_children} merge groups" if num_children else ""),
            *self._tell_steps(),
            f"  plan           {4 * spec.plan_words} bytes",
            f"  workspace      {4 * spec.workspace_words} bytes",
        ]
        if spec.variant is not None:
            lines += ["  variant", *(f"    {line}" for line in spec.variant.lines())]
        return "\n".join(lines)

    def _tell_steps(self) -> list[str]:
        if self.spec.max_steps is None:
            return []
        words, most = self.steps(), self._steps_without_mask()
        skipped = 100 * (1 - len(words) / most) if most else 0.0
        return [
            f"  steps          {len(words)} of {most} ({skipped:.1f} % skipped),"
            f" {int((words & 1).sum())} masked, room for {self.spec.max_steps}"
        ]


def plan(
    spec: AttentionSpec,
    qo_indptr: Any,
    kv_lens: Any,
    page_indptr: Any = None,
    page_indices: Any = None,
    *,
    kv_indptr: Any = None,
    q_offsets: Any = None,
    prefix_levels: Sequence[tuple[Any, Any]] | None = None,
    block_map: BlockMap | None = None,
    buffer: np.ndarray | None = None,
) -> AttentionPlan:
    """Schedule one batch on the host or, for traced arrays, inside a compiled function.

    qo_indptr: [batch_size + 1], i32. Query tokens of request r are rows
        [qo_indptr[r], qo_indptr[r + 1]) of q. A request may have none.
    kv_lens: [batch_size], i32, tokens. Keys of each request, the new ones included. With pages and
        a causal mask at least its query tokens, unless q_offsets are given: a causal query without
        keys is nearly always a forgotten token. 0 is legal for a request without query tokens.
    page_indptr: [batch_size + 1], i32, pages (paged). Offsets into page_indices; a request may own
        more pages than kv_len needs.
    page_indices: [>= page_indptr[-1]], i32 (paged). Page ids; only the first
        ceil(kv_len / page_size) of a request are read, the rest may have any value.
    kv_indptr: [batch_size + 1], i32, tokens (ragged). Rows of k and v of each request; None: the
        requests lie back to back, cumsum(kv_lens).
    q_offsets: [batch_size], i32. kv position of each request's first query token; None:
        kv_len - qo_len, as in decode and chunked prefill. Positions stay within (-2^30, 2^30).
    prefix_levels: the shared prefixes, level by level, outermost first (at most 8). None: the
        planner finds them from equal leading pages, if spec.share_prefixes. Each level is a pair of
        arrays, i32:
        request_indptr: [num_prefixes + 1], requests, from 0 to batch_size. Requests
            [request_indptr[i], request_indptr[i + 1]) have prefix i. The range may be empty, so
            arrays of one shape serve any batch. Each border of a level is also a border of the next
            level.
        prefix_lens: [num_prefixes], tokens from position 0. That many leading tokens of these
            requests lie in the same pages, counted in whole pages; 0: nothing is shared.
        Requests without query tokens are skipped. A prefix is shared only if the cost model
        predicts a speed-up. FlashInfer's multi-level cascade (arXiv 2501.01005, section 3.1.2)
        takes the same information as a qo_indptr and a page table per level.
    block_map: the blocks of queries and keys that a mask hides or shows, for a spec with max_steps,
        else None. Hidden blocks get no work, like blocks that the causal mask and windows hide.
    buffer: [spec.plan_words], i32. Host memory for the plan; every word is written. It may be the
        buffer of a plan that is no longer read, or part of a larger array. None: the memory of an
        earlier plan of the spec that is no longer referenced, else new memory.

    Returns a plan. For host arrays its buffer is a host array: pass it to a jitted function as it
    is, or device_put it once if many functions use it. For traced arrays it has the same bits, so a
    whole decode loop, planning included, can be one executable. On CPU the host planner runs inside
    it. On CUDA a kernel plans and does not search for shared prefixes: without prefix_levels its
    bits equal those of the host planner with prefix_levels=(), where nothing is shared.

    Raises ValueError that names argument, expected and got (and the capacity to raise) before
    anything runs. For traced arrays on CPU the same sentence comes at run time, as the exception
    that JAX raises for a failing custom call (JaxRuntimeError or ValueError).

    Plans made inside jit on CUDA cannot raise. For bad input the plan is faulty: attention over it
    gives NaN in every row of o and lse, append_kv writes nothing, and nothing is read out of
    bounds. `plan.fault()` and `plan.describe()` give the reason once the buffer is on the host.
    With JAX_ATTN_CHECK=1 attention and append_kv raise it. For traced arrays, only with
    JAX_ATTN_CHECK=1 is a kv_len refused that does not count the query tokens.

    The example has two requests in pages of 16 tokens: a prompt of 5 tokens, and a decode over 20
    keys.

    >>> import numpy as np
    >>> import jax_attn as ja
    >>> spec = ja.AttentionSpec(4, 2, 64, page_size=16, max_qo_tokens=8, max_kv_pages=8)
    >>> qo_indptr, kv_lens = np.array([0, 5, 6]), np.array([5, 20])
    >>> plan = ja.plan(spec, qo_indptr, kv_lens, np.array([0, 1, 3]), np.array([7, 2, 4]))
    >>> plan.header()["nnz_qo"], plan.buffer.shape == (spec.plan_words,)
    (6, True)

    The second request needs two pages.

    >>> ja.plan(spec, qo_indptr, kv_lens, np.array([0, 1, 2]), np.array([7, 2]))
    Traceback (most recent call last):
    ValueError: ...
    """
    if not isinstance(spec, AttentionSpec):
        raise TypeError(f"plan: spec: expected an AttentionSpec, got {type(spec).__name__}.")
    if spec.is_paged:
        if page_indptr is None or page_indices is None or kv_indptr is not None:
            given = _given(page_indptr=page_indptr, page_indices=page_indices, kv_indptr=kv_indptr)
            raise ValueError(
                "plan: page_indptr, page_indices: expected both, and no kv_indptr, for a spec with"
                f" page_size={spec.page_size}, got {given}."
            )
    elif page_indptr is not None or page_indices is not None:
        given = _given(page_indptr=page_indptr, page_indices=page_indices, kv_indptr=kv_indptr)
        raise ValueError(
            "plan: page_indptr, page_indices: expected none for a spec with page_size=None, got"
            f" {given}."
        )
    starts = ("page_indptr", page_indptr) if spec.is_paged else ("kv_indptr", kv_indptr)
    arguments: tuple[Any, ...] = (qo_indptr, kv_lens, starts[1], page_indices, q_offsets)
    if prefix_levels is not None:
        _check_levels(prefix_levels)
        arguments += tuple(array for level in prefix_levels for array in level)
    check_block_map(spec, block_map)
    if block_map is not None:
        arguments += (block_map.classes,)
    traced = any(isinstance(a, jax.core.Tracer) for a in arguments)
    xp = jnp if traced else np
    lens = int32_array(xp, "kv_lens", kv_lens)
    qo = int32_array(xp, "qo_indptr", qo_indptr, len(lens) + 1)
    if starts[1] is None:
        # int64 on the host: a sum that overflows int32 must be refused, not wrapped.
        total = np.cumsum(lens, dtype=np.int64) if xp is np else jnp.cumsum(lens)
        starts = ("kv_indptr", xp.concatenate([xp.zeros(1, total.dtype), total]))
    indptr = int32_array(xp, *starts, len(lens) + 1)
    # Not made from a list: XLA's partitioner (jax 0.11.2) crashes on constants that are not read.
    no_pages = xp.empty(0, np.int32) if page_indices is None else page_indices
    pages = int32_array(xp, "page_indices", no_pages)
    offsets = None if q_offsets is None else int32_array(xp, "q_offsets", q_offsets, len(lens))
    levels = None if prefix_levels is None else _levels(xp, prefix_levels, spec)
    if spec.is_paged and spec.causal and offsets is None:
        lens = checked_new_tokens(qo, lens) if not traced else _traced_new_tokens(qo, lens)
    if not traced:
        buffer = plan_memory(spec, buffer)
        request_indptr, prefix_lens = levels or (None, None)
        classes, q_block, kv_block = None, 0, 0
        if block_map is not None:
            classes = np.ascontiguousarray(block_map.classes)
            q_block, kv_block = block_map.q_block, block_map.kv_block
        spec.problem.plan(
            qo, lens, indptr, pages, offsets, request_indptr, prefix_lens,
            classes, q_block, kv_block, buffer,
        )  # fmt: skip
        return AttentionPlan(buffer, spec)
    if buffer is not None:
        raise ValueError("plan: buffer: expected None for traced arrays, got an array.")
    if len(lens) > spec.max_batch:  # shapes are checked here
        raise ValueError(
            f"plan: batch_size: expected at most max_batch = {spec.max_batch}, got {len(lens)};"
            " raise max_batch of the AttentionSpec."
        )
    if offsets is None:
        offsets = lens - jnp.diff(qo)
    return AttentionPlan(ffi.plan(qo, lens, indptr, pages, offsets, levels, block_map, spec), spec)


def checked_new_tokens(qo_indptr: Any, kv_lens: Any, op: str = "plan") -> Any:
    """kv_lens. Raises ValueError if a request has fewer keys than query tokens."""
    qo_indptr, kv_lens = np.asarray(qo_indptr), np.asarray(kv_lens)
    qo_lens = qo_indptr[1:] - qo_indptr[:-1]
    too_short = (kv_lens < qo_lens) & (kv_lens >= 0)  # the planner refuses negative lengths
    if too_short.any():
        r = too_short.argmax()
        else_pass = ", or pass q_offsets=kv_lens - qo_lens if queries are to see no key"
        raise ValueError(
            f"{op}: kv_lens[{r}]: expected at least {qo_lens[r]}, the number of query tokens of the"
            f" request, got {kv_lens[r]}; kv_lens count the new tokens, too: add them"
            f"{else_pass if op == 'plan' else ''}."
        )
    return kv_lens


def _traced_new_tokens(qo_indptr: jax.Array, kv_lens: jax.Array) -> jax.Array:
    """The same at run time, in checked mode. The planner reads the result, so it waits for it."""
    if not _environment.check:
        return kv_lens
    shape = jax.ShapeDtypeStruct(kv_lens.shape, kv_lens.dtype)
    checked = jax.pure_callback(
        checked_new_tokens, shape, qo_indptr, kv_lens, vmap_method="sequential"
    )
    assert isinstance(checked, jax.Array)
    return checked


def _place_pages(
    xp: Any, spec: AttentionSpec, buffer: Any, pages: Any
) -> tuple[Any, Any, tuple[Any, Any, Any, Any]]:
    """Lay out new pages in a plan.

    Returns the section page_indices with these `pages`, max_page_id, and the words of a PlanFault
    (code 0: no fault).
    """
    assert spec.max_kv_pages is not None and spec.page_size is not None
    begin = {name: spec.layout[name] for name in ("header", "kv_lens", "kv_indptr")}
    header = buffer[begin["header"] : begin["header"] + len(HEADER_FIELDS)]
    batch_size, nnz_kv = (header[HEADER_FIELDS.index(x)] for x in ("batch_size", "nnz_kv"))
    num_given = len(pages)
    pages = pages[: spec.max_kv_pages]
    pages = xp.pad(pages, (0, spec.max_kv_pages - len(pages)))
    indptr = buffer[begin["kv_indptr"] : begin["kv_indptr"] + spec.max_batch + 1]
    indptr = xp.where(xp.arange(spec.max_batch + 1) <= batch_size, indptr, nnz_kv)
    entry = xp.arange(spec.max_kv_pages)
    request = (xp.searchsorted(indptr, entry, side="right") - 1).clip(0, spec.max_batch - 1)
    used = -(-buffer[begin["kv_lens"] : begin["kv_lens"] + spec.max_batch] // spec.page_size)
    offset = entry - indptr[request]
    is_live = (entry < nnz_kv) & (offset >= 0) & (offset < used[request])
    is_bad = is_live & (pages < 0)
    if spec.num_pages is not None:
        is_bad |= is_live & (pages >= spec.num_pages)
    at = is_bad.argmax() if spec.max_kv_pages else 0
    bad_page = [xp.where(is_bad.any(), _core.fault_page_id, 0), at]
    bad_page += [pages[at], request[at]] if spec.max_kv_pages else [0, 0]
    too_few = [_core.fault_page_indices, 0, num_given, nnz_kv]
    fault = [
        xp.where(num_given < nnz_kv, a, b).astype(np.int32)
        for a, b in zip(too_few, bad_page, strict=True)
    ]
    largest = xp.where(is_live, pages, -1).max(initial=-1)
    return xp.where(entry < nnz_kv, pages, 0), largest, tuple(fault)


def _check_levels(prefix_levels: Any) -> None:
    is_list = isinstance(prefix_levels, (list, tuple))
    for level in prefix_levels if is_list else ():
        if not isinstance(level, (list, tuple)) or len(level) != 2:
            is_list = False
    if not is_list:
        raise ValueError(
            "plan: prefix_levels: expected a list of pairs (request_indptr, prefix_lens), got"
            f" {prefix_levels!r:.100}."
        )


def _levels(
    xp: Any, prefix_levels: Sequence[tuple[Any, Any]], spec: AttentionSpec
) -> tuple[Any, Any]:
    """The levels as two arrays, padded with prefixes that have no requests."""
    if prefix_levels and not spec.share_prefixes:
        raise ValueError(
            "plan: prefix_levels: expected None for a spec with share_prefixes=False, got"
            f" {len(prefix_levels)} levels."
        )
    if len(prefix_levels) > _core.max_levels:
        raise ValueError(
            f"plan: prefix_levels: expected at most {_core.max_levels} levels, got"
            f" {len(prefix_levels)}."
        )
    pairs = []
    for i, (borders, lens) in enumerate(prefix_levels):
        lens = int32_array(xp, f"prefix_levels[{i}] prefix_lens", lens)
        name = f"prefix_levels[{i}] request_indptr"
        borders = int32_array(xp, name, borders)
        most = min(max(1, spec.max_batch), _MAX_PREFIXES)
        if len(borders) != len(lens) + 1 or not 1 <= len(lens) <= most:
            raise ValueError(
                f"plan: {name}: expected one entry more than prefix_lens, which has 1 to max_batch"
                f" = {spec.max_batch} and fewer than 2^23, got {len(borders)} and {len(lens)}."
            )
        pairs.append((borders, lens))
    most = max((len(lens) for _, lens in pairs), default=0)
    borders = [xp.pad(b, (0, most + 1 - len(b)), mode="edge") for b, _ in pairs]
    lens = [xp.pad(x, (0, most - len(x))) for _, x in pairs]
    if not pairs:
        return xp.zeros((0, 1), np.int32), xp.zeros((0, 0), np.int32)
    return xp.stack(borders), xp.stack(lens)


def _given(**arguments: Any) -> str:
    return ", ".join(name for name, value in arguments.items() if value is not None) or "none"


def int32_array(xp: Any, name: str, value: Any, length: int | None = None, op: str = "plan") -> Any:
    """`value` as a 1-d int32 array of `xp`, numpy on the host or jax.numpy for traced ones."""
    if xp is np and type(value) is np.ndarray and value.dtype is _INT32 and value.ndim == 1:
        if length in (None, len(value)) and value.flags.c_contiguous:
            return value
    try:
        array = value if xp is np and type(value) is np.ndarray else xp.asarray(value)
    except (TypeError, ValueError, OverflowError):  # nested lists of unequal lengths, objects
        raise ValueError(
            f"{op}: {name}: expected a 1-d integer array, got {value!r:.100}."
        ) from None
    if array.size == 0 and array.dtype.kind == "f":  # from an empty list
        array = array.astype(np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"{op}: {name}: expected a 1-d integer array, got {array.dtype}{list(array.shape)}."
        )
    if not isinstance(array.shape[0], int) and name != "page_indices":
        raise NotImplementedError(
            f"{op}: {name}: a length that is known while tracing is supported, got a symbolic one,"
            f" {array.shape[0]}; export with as many requests as max_batch, some without tokens."
        )
    if length is not None and len(array) != length:
        raise ValueError(
            f"{op}: {name}: expected {length} entries for a batch of"
            f" {length - (name != 'q_offsets')}, got {len(array)}."
        )
    if xp is jnp:
        return traced_int32(array)
    if array.dtype == np.int32:
        return array if array.flags.c_contiguous else np.ascontiguousarray(array)
    if array.size:
        for extreme in (array.max(), array.min()):
            if not -(2**31) <= extreme < 2**31:
                raise ValueError(f"{op}: {name}: expected values that fit int32, got {extreme}.")
    return array.astype(np.int32)


def traced_int32(array: Any) -> jax.Array:
    """The array as int32. Values that overflow saturate, so they stay out of any valid range."""
    if array.dtype in (np.uint32, np.uint64):
        array = jnp.minimum(array, np.array(2**31 - 1, array.dtype))
    elif array.dtype == np.int64:
        array = jnp.clip(array, -(2**31), 2**31 - 1)
    return array.astype(np.int32)


def _range(values: np.ndarray) -> str:
    return f"{values.min()}..{values.max()}" if values.size else "0..0"
