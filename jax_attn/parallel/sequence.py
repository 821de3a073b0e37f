"""Attention of sequences split over devices, by a ring of keys or an exchange of heads."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, Literal, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core as jax_core
from jax.interpreters import ad, mlir
from jax.sharding import PartitionSpec as P

from jax_attn._dense.dense import soft_cap_of, window_of
from jax_attn._ops import gradients
from jax_attn._ops.attention import attention
from jax_attn._ops.operands import as_known, check_array
from jax_attn._plan.plan import AttentionPlan, plan, traced_int32
from jax_attn._spec.spec import AttentionSpec
from jax_attn._xla.attention_operands import BackwardOperands
from jax_attn._xla.transforms import is_in_shard_map, jvp_of, varying_alike
from jax_attn.parallel._common import add_sinks, check_axis, mapped, windows

Order = Literal["striped", "contiguous"]
Exchange = Literal["ring", "heads"]


@dataclasses.dataclass(frozen=True)
class SequenceShards:
    """The static half of packed documents whose tokens are split over a mesh axis.

    spec: ragged (page_size=None), for all tokens; the heads that one device has. max_qo_tokens =
        max_kv_tokens, a multiple of axis_size. max_batch: documents. Causal or not, windows, soft
        cap. The schedule applies to each step.
    axis_name, axis_size: the mesh axis over which tokens are split.
    order: which tokens a device has. "striped": device i has tokens i, i + axis_size, ... of all
        documents back to back (Striped Attention, arXiv 2311.09431), so causal work is balanced to
        within a token per document. "contiguous": each device has one consecutive part of the
        tokens. Causal work is then balanced only with a left window. Use it with windows, where
        keys then go only to neighbouring devices, and without causal masks.
    exchange: "ring": keys and values go around; each device attends to those it has while the next
        ones arrive, and merges the states (Ring Attention, arXiv 2310.01889). "heads": an
        all-to-all gives each device all tokens of its part of the heads, and another one returns o
        (DeepSpeed Ulysses, arXiv 2309.14509). None: "heads" if the axis divides query and KV heads
        and this sends at most twice the bytes of a ring (at most the same bytes if a window
        shortens the ring); else "ring".
    heads_axis_name: another mesh axis over which heads are split, or None. Only the PartitionSpecs
        of arrays depend on it.
    num_rows: rows of a dense batch. Each row is one document, all have equal length, and each is
        split over the axis. 1: all tokens are one row, with any documents.

    Raises ValueError for sizes that the axis does not divide, NotImplementedError for pages, mla,
    float8_e4m3fn, variants and max_steps.
    """

    spec: AttentionSpec
    axis_name: str
    axis_size: int
    order: Order = "striped"
    exchange: Exchange | None = None
    heads_axis_name: str | None = None
    num_rows: int = 1

    def __post_init__(self) -> None:
        spec, size = self.spec, self.axis_size
        if not isinstance(spec, AttentionSpec):
            raise TypeError(
                f"SequenceShards: spec: expected an AttentionSpec, got {type(spec).__name__}."
            )
        for name in ("axis_size", "num_rows"):
            count = getattr(self, name)
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                _refuse(name, "a whole number of at least 1", count)
        if self.order not in ("striped", "contiguous"):
            _refuse("order", "'striped' or 'contiguous'", self.order)
        if self.exchange not in ("ring", "heads", None):
            _refuse("exchange", "'ring', 'heads' or None", self.exchange)
        for is_wrong, what in (
            (spec.is_paged, f"page_size=None is supported, got {spec.page_size}"),
            (spec.mla, "mla=False is supported, got True; expand the keys and values"),
            (spec.is_quantized, f"kv_dtype=None is supported, got {spec.kv_dtype}"),
            (spec.variant is not None, "variant=None is supported, got a Variant"),
            (spec.max_steps is not None, f"max_steps=None is supported, got {spec.max_steps}"),
        ):
            if is_wrong:
                raise NotImplementedError(f"SequenceShards: spec: {what}.")
        tokens = spec.max_qo_tokens
        if spec.max_kv_tokens != tokens:
            _refuse("spec", f"max_kv_tokens=max_qo_tokens={tokens}", spec.max_kv_tokens)
        if tokens % (size * self.num_rows):
            unit = f"axis_size={size}" + f" * num_rows={self.num_rows}" * (self.num_rows > 1)
            _refuse("spec", f"max_qo_tokens that are a multiple of {unit}", tokens)
        if self.exchange == "heads" and not self._can_exchange_heads:
            _refuse(
                "exchange",
                f"'ring' where axis_size={size} does not divide the query heads of one device, or"
                " neither divides the KV heads nor is a multiple of them",
                "'heads'",
            )

    @property
    def _can_exchange_heads(self) -> bool:
        spec, size = self.spec, self.axis_size
        fits = spec.num_kv_heads % size == 0 or size % spec.num_kv_heads == 0
        return fits and spec.num_qo_heads % size == 0

    @property
    def tokens_each(self) -> int:
        """Number of tokens that one device has."""
        return self.spec.max_qo_tokens // self.axis_size

    @functools.cached_property
    def algorithm(self) -> Exchange:
        """The exchange: `exchange`, or the one chosen if it is None."""
        if self.exchange is not None:
            return self.exchange
        spec, size = self.spec, self.axis_size
        if spec.num_kv_heads % size or spec.num_qo_heads % size:
            return "ring"
        around = self.num_hops * spec.num_kv_heads * size
        across = (size - 1) * (spec.num_kv_heads + spec.num_qo_heads)
        # Factor 2 measured without windows on two and four GPUs (docs/notes/devices.md): a ring
        # hides its transfers, but waits for its neighbours and merges states.
        worth = 2 if self.num_hops == size - 1 else 1
        return "heads" if across <= worth * around else "ring"

    @functools.cached_property
    def steps(self) -> tuple[tuple[int, AttentionSpec], ...]:
        """The steps of a ring: (distance, spec) for each step in which devices attend.

        At distance t, device i has the keys of device i - t. Steps in which no device sees a key
        are left out.
        """
        spec, size = self.spec, self.axis_size
        left, right = windows(spec)
        stride, length = self._stride, self.tokens_each // self.num_rows
        found = []
        for distance in range(size):
            shift = distance * (1 if self.order == "striped" else length)
            # Computed for keys of an earlier device; those of a later one (axis_size further on)
            # have the same width.
            width = -1
            if left >= 0 and right >= 0:
                width = (left - shift) // stride + (right + shift) // stride
                if width < 0:
                    continue
            # Contiguous order: the nearest key of an earlier device is shift - length + 1 away, and
            # keys of later devices are hidden if right == 0.
            is_behind = distance > 0 and left >= 0 and shift - length + 1 > left
            if self.order == "contiguous" and is_behind and right == 0:
                continue
            changes: dict[str, Any] = {"window_left": -1, "window_right": -1, "causal": right >= 0}
            if left >= 0:
                changes["window_left"] = width if right >= 0 else 0
            changes |= {"max_qo_tokens": self.tokens_each, "max_kv_tokens": self.tokens_each}
            step = dataclasses.replace(spec, **changes)
            if size > 1 and spec.num_ctas is None and spec.target != "cpu":
                # Leave SMs for the kernel that sends keys. With a full grid the last CTAs wait for
                # the first to end: 65,536 tokens on four H100s took 18.2 ms with 132 CTAs, 15.8 ms
                # with 124.
                num_ctas = step.kernel_config["num_ctas"]
                step = dataclasses.replace(step, num_ctas=num_ctas - num_ctas // 16)
            found.append((distance, step))
        return tuple(found)

    @property
    def num_hops(self) -> int:
        """Number of times that a ring sends keys and values to the next device."""
        return self.steps[-1][0]

    @property
    def _stride(self) -> int:
        """Distance in positions between two consecutive tokens of a device."""
        return self.axis_size if self.order == "striped" else 1

    @functools.cached_property
    def heads_spec(self) -> AttentionSpec:
        """Spec of a device's attention after an exchange of heads."""
        num_qo_heads = self.spec.num_qo_heads // self.axis_size
        num_kv_heads = max(1, self.spec.num_kv_heads // self.axis_size)
        return dataclasses.replace(self.spec, num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads)

    @property
    def array_spec(self) -> P:
        """PartitionSpec of q, k, v and o, [max_qo_tokens, heads, head_dim], and of lse."""
        return P(self.axis_name, self.heads_axis_name)

    @property
    def plan_spec(self) -> P:
        """PartitionSpec of a SequencePlan. In a ring each device has a separate plan."""
        return P(self.axis_name) if self.algorithm == "ring" else P()

    @property
    def positions(self) -> np.ndarray:
        """[max_qo_tokens]. The token in each row of the arrays.

        `tokens[positions]` is in the order of the devices, and `o[np.argsort(positions)]` is back
        in the order of the tokens.
        """
        tokens = np.arange(self.spec.max_qo_tokens).reshape(self.num_rows, -1)
        if self.order == "striped":
            return tokens.reshape(-1, self.axis_size).T.reshape(-1)
        each = tokens.reshape(self.num_rows, self.axis_size, -1)
        return each.swapaxes(0, 1).reshape(-1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SequencePlan:
    """The schedules of all devices, made by plan_sequence.

    buffers: for each step [axis_size, words], i32; inside shard_map [1, words], for this device.
        With an exchange of heads a single [1, words], the same for all devices. Split them with
        SequenceShards.plan_spec.
    shards: static.
    """

    buffers: tuple[Any, ...]
    shards: SequenceShards = dataclasses.field(metadata={"static": True})

    def step_plan(self, step: int, device: int = 0) -> AttentionPlan:
        """The plan by which a device attends in a step; inside shard_map the only device is 0."""
        shards = self.shards
        spec = shards.steps[step][1] if shards.algorithm == "ring" else shards.heads_spec
        return AttentionPlan(self.buffers[step][device], spec)


# ---- plans ---------------------------------------------------------------------------------------


def plan_sequence(shards: SequenceShards, indptr: Any = None) -> SequencePlan:
    """Schedule documents whose tokens are split over a mesh axis.

    indptr: [num_documents + 1], i32. Document d has tokens [indptr[d], indptr[d + 1]), in the order
        of tokens, not of devices; tokens from indptr[-1] on are padding. A token sees only its own
        document. None: each row is one document.

    Inside shard_map over the axis, each device plans its own part in the compiled function.
    Elsewhere the result has the plans of all devices, as host arrays if indptr is a host array.

    Raises ValueError for an indptr that does not begin with 0, decreases, or ends beyond
    max_qo_tokens. For a traced indptr, `plan`'s error comes at run time on CPU; on CUDA the plans
    are faulty.
    """
    if not isinstance(shards, SequenceShards):
        raise TypeError(
            f"plan_sequence: shards: expected SequenceShards, got {type(shards).__name__}."
        )
    tokens = shards.spec.max_qo_tokens
    if indptr is None:
        indptr = np.arange(shards.num_rows + 1) * (tokens // shards.num_rows)
    elif shards.num_rows > 1:
        raise ValueError(
            "plan_sequence: indptr: expected None with num_rows > 1, where each row is a document,"
            " got an array."
        )
    is_in_shard_map("plan_sequence", indptr)
    is_manual = shards.axis_name in jax.sharding.get_abstract_mesh().manual_axes
    is_traced = is_manual or isinstance(indptr, jax.core.Tracer)
    xp: Any = jnp if is_traced else np
    borders = traced_int32(jnp.asarray(indptr)) if is_traced else np.asarray(indptr)
    if borders.ndim != 1 or not len(borders):
        raise ValueError(
            f"plan_sequence: indptr: expected [num_documents + 1], got {list(borders.shape)}."
        )
    is_bad = (borders[0] != 0) | (xp.diff(borders) < 0).any() | (borders[-1] > tokens)
    if not is_traced and is_bad:
        raise ValueError(
            "plan_sequence: indptr: expected offsets from 0 that never decrease, up to"
            f" max_qo_tokens={tokens}, got {borders.tolist()[:8]}{'...' * (len(borders) > 8)}."
        )
    if shards.algorithm == "heads":
        lens = xp.diff(borders)
        whole = plan(shards.heads_spec, borders, lens, kv_indptr=borders)
        return SequencePlan((whole.buffer[None],), shards)
    # All devices refuse bad borders together: otherwise some would wait for one that failed.
    local = functools.partial(_own_borders, xp, shards, borders, is_bad if is_traced else None)
    devices = [lax.axis_index(shards.axis_name)] if is_manual else range(shards.axis_size)
    buffers = [
        xp.stack([_plan_step(xp, shards, local, device, *step) for device in devices])
        for step in shards.steps
    ]
    return SequencePlan(tuple(buffers), shards)


def _own_borders(xp: Any, shards: SequenceShards, borders: Any, is_bad: Any, device: Any) -> Any:
    """The documents' borders in the rows of a device. Bad borders are not changed."""
    if shards.order == "striped":
        own = (borders - device + shards.axis_size - 1) // shards.axis_size
    else:
        length = shards.tokens_each // shards.num_rows
        row, place = xp.divmod(borders, length * shards.axis_size)
        own = row * length + xp.clip(place - device * length, 0, length)
    return own if is_bad is None else xp.where(is_bad, borders, own)


def _plan_step(
    xp: Any, shards: SequenceShards, local: Any, device: Any, distance: int, spec: AttentionSpec
) -> Any:
    """The plan for a device's tokens and the keys that have come from `distance` devices before it.

    Token r of a device is at position stride * r + begin of its row. So among another device's keys
    it sees [r - floor((left + begin_k - begin_q) / stride), r + floor((right + begin_q - begin_k) /
    stride)], which is a causal mask or a window with a shifted offset.
    """
    left, right = windows(shards.spec)
    stride, other = shards._stride, (device - distance) % shards.axis_size
    rows, keys = local(device), local(other)
    ahead = device - other
    if shards.order == "contiguous":
        ahead = ahead * (shards.tokens_each // shards.num_rows)
    offsets = rows[:-1] - keys[:-1]
    if right >= 0:
        offsets = offsets + (right + ahead) // stride
    elif left >= 0:
        offsets = offsets - (left - ahead) // stride
    lens = xp.diff(keys)
    return plan(spec, rows, lens, kv_indptr=keys, q_offsets=offsets.astype(np.int32)).buffer


# ---- inside shard_map ----------------------------------------------------------------------------


def attend_sequence(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    plan: SequencePlan,
    *,
    sinks: jax.Array | None = None,
    return_lse: bool = False,
    mesh: jax.sharding.Mesh | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Self-attention of packed documents whose tokens are split over a mesh axis.

    q: [max_qo_tokens / axis_size, num_qo_heads, head_dim_qk], this device's tokens in the order of
        SequenceShards.positions. k, v: likewise, with num_kv_heads, and head_dim_vo.
    sinks: [num_qo_heads], f32, or None; counted once.
    return_lse: also return lse.
    mesh: None inside shard_map. Otherwise the arrays are global, in the order of positions, and
        each device of the mesh processes its part.

    Returns o, and with return_lse lse, of this device's tokens. Differentiable in q, k, v and
    sinks, lse included, as jax_attn.attention is. In the backward pass of a ring, keys and values
    go around once more, together with their gradients in f32. A device holds the keys and values of
    two devices at a time: those it attends to and those that arrive.

    The same inputs and plan give the same bits. Raises like jax_attn.attention.
    """
    op = "attend_sequence"
    if not isinstance(plan, SequencePlan):
        raise TypeError(
            f"{op}: plan: expected a SequencePlan, which plan_sequence makes, got"
            f" {type(plan).__name__}."
        )
    shards = plan.shards
    check_axis(op, "SequenceShards", shards.axis_name, shards.axis_size, mesh)
    if mesh is not None:
        tokens = shards.array_spec
        arrays = {
            "q": (q, tokens),
            "k": (k, tokens),
            "v": (v, tokens),
            "plan": (plan, shards.plan_spec),
            "sinks": (sinks, P(shards.heads_axis_name)),
        }
        call = functools.partial(attend_sequence, return_lse=return_lse)
        return mapped(op, call, mesh, arrays, (tokens, tokens) if return_lse else tokens)
    is_in_shard_map(op, (q, k, v, sinks))
    if sinks is not None:
        sinks = check_array(op, "sinks", sinks, (shards.spec.num_qo_heads,), "float32")
    if shards.algorithm == "heads":
        o, lse = _attend_heads(q, k, v, plan, sinks)
    else:
        ring = varying_alike((q, k, v, tuple(x[0] for x in plan.buffers)))
        o, lse = _ring(shards, ring)
        if sinks is not None:
            o, lse = add_sinks(o, lse, sinks)
    return (o, lse) if return_lse else o


def _attend_heads(
    q: jax.Array, k: jax.Array, v: jax.Array, plan: SequencePlan, sinks: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    shards = plan.shards
    size, name = shards.axis_size, shards.axis_name
    if shards.spec.num_kv_heads < size:
        k, v = (jnp.repeat(x, size // shards.spec.num_kv_heads, axis=1) for x in (k, v))
    # Tokens in order are [rows, devices, length] or, if striped, [tokens of a device, devices, 1].
    major = shards.num_rows if shards.order == "contiguous" else shards.tokens_each

    def to_heads(x: jax.Array) -> jax.Array:
        """[tokens of the device, heads, ...] -> [all tokens in order, heads of the device, ...]."""
        x = jnp.moveaxis(x.reshape(x.shape[0], size, -1, *x.shape[2:]), 1, 0)
        x = lax.all_to_all(x, name, split_axis=0, concat_axis=0)
        tokens = jnp.moveaxis(x.reshape(size, major, -1, *x.shape[2:]), 0, 1)
        return tokens.reshape(-1, *x.shape[2:])

    def to_tokens(x: jax.Array) -> jax.Array:
        """Undo to_heads."""
        tokens = jnp.moveaxis(x.reshape(major, size, -1, *x.shape[1:]), 1, 0)
        x = tokens.reshape(size, -1, *x.shape[1:])
        x = jnp.moveaxis(lax.all_to_all(x, name, split_axis=0, concat_axis=0), 0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])

    if sinks is not None:
        sinks = sinks.reshape(size, -1)[lax.axis_index(name)]
    whole = AttentionPlan(plan.buffers[0][0], shards.heads_spec)
    q, k, v = map(to_heads, (q, k, v))
    o, lse = attention(q, k, v, whole, sinks=sinks, return_lse=True)
    return to_tokens(o), to_tokens(lse)


def _shift(shards: SequenceShards, arrays: Any, distance: int) -> Any:
    """Send the arrays of each device i to device i + distance."""
    size = shards.axis_size
    if distance % size == 0:
        return arrays
    pairs = [(i, (i + distance) % size) for i in range(size)]
    return jax.tree.map(lambda x: lax.ppermute(x, shards.axis_name, pairs), arrays)


Ring = tuple[jax.Array, jax.Array, jax.Array, tuple[jax.Array, ...]]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _ring(shards: SequenceShards, ring: Ring) -> tuple[jax.Array, jax.Array]:
    """o and lse of this device's rows by a ring. ring: q, k, v, the device's plan of each step."""
    return _by_steps(shards, *ring)


def _by_steps(
    shards: SequenceShards, q: jax.Array, k: jax.Array, v: jax.Array, buffers: Any
) -> tuple[jax.Array, jax.Array]:
    """As _ring; JAX differentiates it step by step."""

    def visit(spec: AttentionSpec, buffer: Any, hop: int, keys: Any, state: Any) -> Any:
        (k, v), (o, lse) = keys, state
        new = attention(q, k, v, AttentionPlan(buffer, spec), return_lse=True)
        return _merge(o, lse, *new)

    zeros = jnp.zeros((*q.shape[:2], v.shape[2]), jnp.float32)
    nothing = zeros, jnp.full(q.shape[:2], -jnp.inf, jnp.float32)
    o, lse = _go_around(shards, buffers, (k, v), nothing, visit)
    return o.astype(q.dtype), lse


def _go_around(
    shards: SequenceShards, buffers: Any, keys: Any, carry: Any, visit: Callable[..., Any]
) -> Any:
    """Update carry = visit(spec, buffer, hop, keys, carry) at each step of the ring; return it.

    buffers: one per step. keys: the device's own keys and values. hop: distance from the step
        before, static.

    The next keys travel while visit runs. Equal steps run in a loop: if they were unrolled, XLA
    might send all keys first, and a device would hold those of all devices.
    """
    places = [distance for distance, _ in shards.steps]
    hops = [b - a for a, b in itertools.pairwise([0, *places, places[-1]])]
    steps = [(spec, hops[i], hops[i + 1]) for i, (_, spec) in enumerate(shards.steps)]
    first = 0
    for (spec, hop, next_hop), same in itertools.groupby(steps):

        def step(
            state: Any, buffer: Any, spec: Any = spec, hop: int = hop, next_hop: int = next_hop
        ) -> Any:
            keys, carry = state
            coming = _shift(shards, keys, next_hop)
            return (coming, visit(spec, buffer, hop, keys, carry)), None

        last = first + len(list(same))
        if last - first == 1:
            (keys, carry), _ = step((keys, carry), buffers[first])
        else:
            (keys, carry), _ = lax.scan(step, (keys, carry), jnp.stack(buffers[first:last]))
        first = last
    return carry


def _merge(
    o: jax.Array, lse: jax.Array, o_step: jax.Array, lse_step: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The merged state; o stays in f32 over all steps.

    XLA fuses this; merge_state would need both states in f32 in one array.
    """
    is_empty = jnp.isneginf(lse) & jnp.isneginf(lse_step)
    # -inf - -inf is NaN, and so is its derivative, even where it is not selected.
    lse, lse_step = (jnp.where(is_empty, 0.0, x) for x in (lse, lse_step))
    # Not exp(lse - total): far from 0, total is the larger one alone.
    rise = lse_step - lse
    old, new = (jax.nn.sigmoid(x)[..., None] for x in (-rise, rise))
    total = jnp.where(is_empty, -jnp.inf, jnp.logaddexp(lse, lse_step))
    return old * o + new * o_step.astype(jnp.float32), total


@_ring.defjvp
def _ring_jvp(shards: SequenceShards, primals: Any, tangents: Any) -> Any:
    gradients.check_differentiable(shards.steps[0][1])
    (ring,), ((*moved, _),) = primals, tangents
    o, lse = _ring(shards, ring)
    o, lse = checkpoint_name(o, gradients.O_NAME), checkpoint_name(lse, gradients.LSE_NAME)
    q, k, v, buffers = ring
    return (o, lse), tuple(_tangents_p.bind(q, k, v, *buffers, o, lse, *moved, shards=shards))


# Tangents of o and lse, step by step. Its transpose in the tangents is one more ring.
# Operands: q, k, v, the plan of each step, o, lse, and the tangents of q, k and v.
_tangents_p = jax_core.Primitive("jax_attn_ring_tangents")
_tangents_p.multiple_results = True


def _split_tangents(arrays: Any) -> tuple[Ring, Any, Any, Any]:
    """The ring, o, lse, and the tangents."""
    q, k, v, *buffers, o, lse, d_q, d_k, d_v = arrays
    return (q, k, v, tuple(buffers)), o, lse, (d_q, d_k, d_v)


def _of_arrays(shards: SequenceShards, buffers: Any) -> Callable[..., Any]:
    return lambda q, k, v: _by_steps(shards, q, k, v, buffers)


def _tangents(*arrays: jax.Array, shards: SequenceShards) -> list[jax.Array]:
    (q, k, v, buffers), _, _, moved = _split_tangents(arrays)
    return [*jax.jvp(_of_arrays(shards, buffers), (q, k, v), moved)[1]]


def _tangents_transpose(cotangents: Any, *arrays: Any, shards: SequenceShards) -> Any:
    ring, o, lse, moved = _split_tangents(arrays)
    found = _ring_gradients(shards, ring, o, lse, *map(ad.instantiate_zeros, cotangents))
    of_moved = zip(moved, found, strict=True)
    none = [None] * (len(arrays) - len(moved))
    return none + [d if ad.is_undefined_primal(x) else None for x, d in of_moved]


_tangents_p.def_impl(_tangents)
_tangents_p.def_abstract_eval(lambda *avals, shards: list(avals[-5:-3]))
ad.primitive_jvps[_tangents_p] = functools.partial(jvp_of, _tangents)
ad.primitive_transposes[_tangents_p] = _tangents_transpose
mlir.register_lowering(_tangents_p, mlir.lower_fun(_tangents, multiple_results=True))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _ring_gradients(
    shards: SequenceShards, ring: Ring, o: jax.Array, lse: jax.Array, d_o: Any, d_lse: Any
) -> tuple[jax.Array, ...]:
    """Gradients of the ring, step by step, from the lse and o of all steps (FlashAttention-2)."""
    q, k, v, buffers = ring
    d = gradients.row_sums(o, d_o, d_lse, shards.steps[0][1].target)

    def visit(spec: AttentionSpec, buffer: Any, hop: int, keys: Any, carry: Any) -> Any:
        d_q, *d_keys = carry
        d_keys = _shift(shards, d_keys, hop)
        k, v = keys
        operands = BackwardOperands(
            q=q, k=k, v=v, plan_buffer=buffer, layer=jnp.int32(0), lse=lse, d=d, d_o=d_o
        )
        more = gradients.gradients(operands, spec)
        return tuple(x + y for x, y in zip((d_q, *d_keys), more, strict=True))

    nothing = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
    d_q, *d_keys = _go_around(shards, buffers, (k, v), nothing, visit)
    d_k, d_v = _shift(shards, d_keys, -shards.num_hops)
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype)


@_ring_gradients.defjvp
def _second_derivatives(shards: SequenceShards, primals: Any, tangents: Any) -> Any:
    """o and lse follow from q, k and v, so that their tangents say nothing more."""
    (*arrays, buffers), _, _, *cotangents = primals
    (*of_arrays, _), _, _, *of_cotangents = tangents

    def run(arrays: Any, cotangents: Any) -> Any:
        return jax.vjp(_of_arrays(shards, buffers), *arrays)[1](tuple(cotangents))

    moved = jax.jvp(run, (arrays, cotangents), (of_arrays, of_cotangents))[1]
    return _ring_gradients(shards, *primals), moved


def _refuse(name: str, expected: str, got: Any) -> NoReturn:
    raise ValueError(f"SequenceShards: {name}: expected {expected}, got {got!r}.")


# ---- dense batches -------------------------------------------------------------------------------


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mesh: jax.sharding.Mesh,
    axis_name: str,
    batch_axis_name: str | None = None,
    heads_axis_name: str | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    exchange: Exchange | None = None,
    return_residual: bool = False,
    logits_soft_cap: float | None = None,
    residual_dtype: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """jax_attn.dot_product_attention for sequences split over a mesh axis, inside or outside jit.

    query: [batch, T, num_qo_heads, head_dim], bf16 | f16 | f32, tokens in order.
    key: [batch, T, num_kv_heads, head_dim]. value: [batch, T, num_kv_heads, head_dim_vo].
    mesh, axis_name: T is split over this axis.
    batch_axis_name, heads_axis_name: mesh axes over which batch and heads are split, or None.
    scale, is_causal, local_window_size, return_residual, logits_soft_cap, residual_dtype: as for
        jax_attn.dot_product_attention.
    exchange: as for SequenceShards.

    With is_causal, a ring over contiguous tokens would leave the first device idle. So if
    axis_size squared divides T and there is no left window, an all-to-all brings the tokens into
    striped order first, and another one brings o back. To avoid this in training, keep tokens
    striped and call attend_sequence.

    Returns o: [batch, T, num_qo_heads, head_dim_vo], and with return_residual lse: [batch, T,
    num_qo_heads] in residual_dtype, split as query is. Differentiable as attend_sequence is.
    Raises ValueError for arrays that do not fit each other or the mesh.
    """
    op = "parallel.dot_product_attention"
    of_names = {"query": query, "key": key, "value": value}
    query, key, value = (as_known(op, *pair) for pair in of_names.items())
    shapes = [x.shape for x in (query, key, value)]
    fits = all(len(x) == 4 for x in shapes) and shapes[1][:3] == shapes[2][:3]
    if not fits or shapes[0][:2] != shapes[1][:2] or shapes[0][3] != shapes[1][3]:
        raise ValueError(
            f"{op}: query, key, value: expected [batch, T, num_qo_heads, head_dim], [batch, T,"
            " num_kv_heads, head_dim], and the same but for head_dim, got"
            f" {', '.join(str(list(x)) for x in shapes)}."
        )
    (batch, length, num_qo_heads, head_dim), (num_kv_heads, head_dim_vo) = shapes[0], shapes[2][2:]
    sizes = {None: 1, **mesh.shape}
    for what, name, counts in (
        ("T", axis_name, (length,)),
        ("batch", batch_axis_name, (batch,)),
        ("heads", heads_axis_name, (num_qo_heads, num_kv_heads)),
    ):
        if name not in sizes:
            raise ValueError(f"{op}: mesh: expected an axis {name!r}, got {dict(mesh.shape)}.")
        for count in counts:
            if not count or count % sizes[name]:
                raise ValueError(
                    f"{op}: query, key, value: expected {what} in a number that the {sizes[name]}"
                    f" devices of axis {name!r} divide, got {count}."
                )
    rows, heads = batch // sizes[batch_axis_name], sizes[heads_axis_name]
    left, right = window_of(op, local_window_size, is_causal)
    spec = AttentionSpec(
        num_qo_heads=num_qo_heads // heads,
        num_kv_heads=num_kv_heads // heads,
        head_dim_qk=head_dim,
        head_dim_vo=head_dim_vo,
        dtype=query.dtype.name,
        causal=right == 0,
        window_left=left,
        window_right=right,
        sm_scale=scale,
        logits_soft_cap=soft_cap_of(op, logits_soft_cap),
        page_size=None,
        max_batch=rows,
        max_qo_tokens=rows * length,
        max_kv_tokens=rows * length,
    )
    size = sizes[axis_name]
    is_uneven = right == 0 and left < 0  # work of a ring over contiguous tokens
    if (
        exchange is None
        and is_uneven
        and not (spec.num_kv_heads % size or spec.num_qo_heads % size)
    ):
        exchange = "heads"  # striping would send as much, before the ring
    shards = SequenceShards(
        spec, axis_name, size, "contiguous", exchange, heads_axis_name, num_rows=rows
    )
    is_restriped = is_uneven and shards.algorithm == "ring" and length % size**2 == 0
    if is_restriped:
        shards = dataclasses.replace(shards, order="striped", exchange="ring")
    stripe = functools.partial(_change_order, shards) if is_restriped else lambda x, to: x

    def on_device(query: Any, key: Any, value: Any, plan: Any) -> Any:
        dense = [stripe(x, "striped") for x in (query, key, value)]
        q, k, v = (x.reshape(-1, *x.shape[2:]) for x in dense)
        state = attend_sequence(q, k, v, plan, return_lse=True)
        return tuple(stripe(x.reshape(rows, -1, *x.shape[1:]), "contiguous") for x in state)

    arrays_spec = P(batch_axis_name, axis_name, heads_axis_name)
    arrays = {
        "query": (query, arrays_spec),
        "key": (key, arrays_spec),
        "value": (value, arrays_spec),
        "plan": (_plan_of_rows(shards), shards.plan_spec),
    }
    o, lse = mapped(op, on_device, mesh, arrays, (arrays_spec, arrays_spec))
    lse = lse.astype(query.dtype if residual_dtype is None else residual_dtype)
    return (o, lse) if return_residual else o


@functools.lru_cache(maxsize=128)
def _plan_of_rows(shards: SequenceShards) -> SequencePlan:
    return plan_sequence(shards)


def _change_order(shards: SequenceShards, x: jax.Array, to: Order) -> jax.Array:
    """Convert [rows, length of a device, ...] from one order of tokens to the other."""
    rows, size = x.shape[0], shards.axis_size
    cut = (-1, size) if to == "striped" else (size, -1)
    x = x.reshape(rows, *cut, *x.shape[2:])
    at = 2 if to == "striped" else 1
    x = lax.all_to_all(jnp.moveaxis(x, at, 0), shards.axis_name, split_axis=0, concat_axis=0)
    return jnp.moveaxis(x, 0, 3 - at).reshape(rows, -1, *x.shape[3:])
