"""plan_linear_attention: which tokens and which states of a pool belong to which request.

The same code plans on the host (numpy) and inside jit (jax.numpy), so both give the same bits.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn._plan.plan import int32_array
from jax_attn._spec.state_spec import StateSpec

_OP = "plan_linear_attention"
# Words of the header.
BATCH_SIZE, NUM_TOKENS, NUM_CHUNKS, FAULT, FAULT_AT = range(5)
_HEADER_WORDS = 8
# Columns of a chunk. FIRST: 1 if the state before the chunk is that of READ_SLOT, else the one
# after the chunk before. WRITE_SLOT: where the state after the chunk goes; -1: nowhere.
BEGIN, LENGTH, FIRST, READ_SLOT, WRITE_SLOT, REQUEST = range(6)

# (argument, what is expected of entry i)
_FAULTS = (
    ("", ""),
    ("qo_indptr", "offsets from 0 that do not fall"),
    ("qo_indptr", "at most max_tokens tokens in all; raise max_tokens of the spec"),
    ("qo_indptr", "at most max_qo_len tokens a request; raise max_qo_len of the spec"),
    ("read_slots", "a slot in [-1, num_slots)"),
    ("write_slots", "a slot in [-1, num_slots)"),
    ("commit_lens", "a number of tokens in [0, qo_len]"),
    ("checkpoints", "a request of the batch"),
    ("checkpoints", "a position in [0, qo_len] of its request"),
    ("checkpoints", "a slot in [-1, num_slots)"),
    ("write_slots and checkpoints", "each slot written once"),
    ("read_slots", "a slot that no other request writes"),
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StatePlan:
    """The requests of a batch. Pass it to a jitted function like any array.

    buffer: [spec.plan_words], i32. The only pytree leaf.
    spec: static. A StateSpec or a LinearAttentionSpec.

    >>> import jax_attn as ja
    >>> spec = ja.StateSpec(max_tokens=8, max_batch=2, num_slots=4)
    >>> plan = ja.plan_linear_attention(spec, [0, 5], [-1], [0])
    >>> plan.section("qo_indptr").tolist()
    [0, 5, 5]
    """

    buffer: Any
    spec: StateSpec = dataclasses.field(metadata={"static": True})

    def section(self, name: str) -> Any:
        """A section of the buffer (StateSpec.plan_sections), also inside jit."""
        begin = 0
        for section, words in self.spec.plan_sections.items():
            if section == name:
                return self.buffer[begin : begin + words]
            begin += words
        raise KeyError(name)

    def fault(self) -> str:
        """What is wrong with the batch of a plan that was made inside jit; "" if nothing is.

        Reads the buffer on the host.
        """
        code, at = np.asarray(self.section("header"))[[FAULT, FAULT_AT]]
        if code == 0:
            return ""
        argument, expected = _FAULTS[code]
        return f"{_OP}: {argument}[{at}]: expected {expected}."


def plan_linear_attention(
    spec: StateSpec,
    qo_indptr: Any,
    read_slots: Any,
    write_slots: Any,
    *,
    commit_lens: Any = None,
    checkpoints: Any = None,
) -> StatePlan:
    """Describe one batch on the host or, for traced arrays, inside a compiled function.

    spec: a LinearAttentionSpec, or a StateSpec for short convolutions alone.
    qo_indptr: [batch_size + 1], i32. Tokens of request r are rows [qo_indptr[r], qo_indptr[r + 1]).
        A request may have none: its state is copied from its read slot to its write slot.
    read_slots: [batch_size], i32. The state before the first token; -1: zeros.
    write_slots: [batch_size], i32. Where the state goes; -1: nowhere. May be the read slot.
    commit_lens: [batch_size], i32, tokens. The state after this many tokens goes to the write slot;
        None: after all. Tokens behind it, such as drafts, get outputs and change no state.
    checkpoints: [num_checkpoints, 3], i32: request, position, slot. The state after `position`
        tokens of the request (of this call) also goes to `slot`; -1: nowhere (padding).

    A slot is written at most once, and a slot that a request writes is read by no other request.
    Slots that nobody names are never touched. Rows behind the last request are padding: o is 0.

    Raises ValueError that names argument, expected and got before anything runs. Inside jit a bad
    batch makes the plan faulty: outputs over it are NaN, no state is written, and `plan.fault()`
    says why.

    >>> import numpy as np
    >>> import jax_attn as ja
    >>> spec = ja.StateSpec(max_tokens=8, max_batch=2, num_slots=4)
    >>> plan = ja.plan_linear_attention(spec, np.array([0, 5, 6]), [-1, 2], [0, 2])
    >>> plan.buffer.shape == (spec.plan_words,), plan.fault()
    (True, '')
    """
    if not isinstance(spec, StateSpec):
        raise TypeError(
            f"{_OP}: spec: expected a LinearAttentionSpec or StateSpec, got {type(spec).__name__}."
        )
    given = (qo_indptr, read_slots, write_slots, commit_lens, checkpoints)
    traced = any(isinstance(a, jax.core.Tracer) for a in given)
    xp = jnp if traced else np
    indptr = int32_array(xp, "qo_indptr", qo_indptr, op=_OP)
    if len(indptr) == 0:
        raise ValueError(f"{_OP}: qo_indptr: expected [batch_size + 1] offsets, got none.")
    batch_size = len(indptr) - 1
    slots = {"read_slots": read_slots, "write_slots": write_slots}
    if commit_lens is not None:
        slots["commit_lens"] = commit_lens
    arrays = {}
    for name, value in slots.items():
        arrays[name] = int32_array(xp, name, value, op=_OP)
        if len(arrays[name]) != batch_size:
            raise ValueError(
                f"{_OP}: {name}: expected {batch_size} entries, one a request of qo_indptr, got"
                f" {len(arrays[name])}."
            )
    marks = _checkpoints(xp, checkpoints)
    for name, got, most, field in (
        ("qo_indptr", batch_size, spec.max_batch, "max_batch"),
        ("checkpoints", len(marks), spec.max_checkpoints, "max_checkpoints"),
    ):
        if got > most:
            what = "requests" if field == "max_batch" else "rows"
            raise ValueError(
                f"{_OP}: {name}: expected at most {field} = {most} {what}, got {got}; raise"
                f" {field} of the {type(spec).__name__}."
            )
    # An indptr that falls gives lengths without meaning; the fault below says so.
    lens = xp.diff(indptr)
    commits = arrays.get("commit_lens", lens)
    batch = _Batch(indptr, lens, arrays["read_slots"], arrays["write_slots"], commits, marks)
    code, at = _find_fault(xp, spec, batch)
    if not traced and code:
        argument, expected = _FAULTS[int(code)]
        raise ValueError(
            f"{_OP}: {argument}[{int(at)}]: expected {expected}, got"
            f" {_got(spec, batch, int(code), int(at))}."
        )
    return StatePlan(_pack(xp, spec, batch, code, at), spec)


def words_of_sequences(batch: int, seq: int, chunk: int) -> tuple[jax.Array, int, int]:
    """A plan of sequences of one length, each with the slot of its number, where its chunks begin,
    and how many they are.

    chunk: tokens of a chunk. Kernels of CPUs, and those that go token by token, take chunks of any
    length. Nothing in the plan is a constant of the traced program, since a function that XLA
    partitions may have none.
    """
    num = max(1, -(-seq // max(chunk, 1)))  # chunks of a sequence
    word = jnp.arange(_HEADER_WORDS, dtype=jnp.int32)
    header = jnp.where(word == NUM_CHUNKS, batch * num, 0 * word)
    header = jnp.where(word == NUM_TOKENS, batch * seq, header)
    index = jnp.arange(batch * num, dtype=jnp.int32)
    number, done = index // num, index % num * chunk
    is_last = index % num == num - 1
    columns = (
        number * seq + done,
        jnp.where(is_last, seq - done, chunk),
        jnp.where(index % num == 0, 1, 0),
        number,
        jnp.where(is_last, number, -1),
        number,
    )
    words = jnp.concatenate([header, jnp.stack(columns, axis=1).reshape(-1)])
    return words, _HEADER_WORDS, batch * num


@dataclasses.dataclass(frozen=True)
class _Batch:
    indptr: Any  # [batch_size + 1]
    lens: Any  # [batch_size]
    read_slots: Any
    write_slots: Any
    commits: Any
    marks: Any  # [num_checkpoints, 3]


def _checkpoints(xp: Any, value: Any) -> Any:
    if value is None:
        return xp.zeros((0, 3), np.int32)
    shape = np.shape(value)
    if len(shape) != 2 or shape[1] != 3:
        raise ValueError(
            f"{_OP}: checkpoints: expected [num_checkpoints, 3] of request, position, slot, got"
            f" {list(shape)}."
        )
    return int32_array(xp, "checkpoints", xp.reshape(value, -1), op=_OP).reshape(-1, 3)


def _find_fault(xp: Any, spec: StateSpec, batch: _Batch) -> tuple[Any, Any]:
    """(code, index) of the first fault, (0, 0) if there is none."""
    batch_size, slots = len(batch.lens), spec.num_slots
    request, position, slot = batch.marks.T
    counts = slot >= 0
    if batch_size:
        length = batch.lens[xp.clip(request, 0, batch_size - 1)]
    else:
        length = xp.zeros_like(position)
    written = xp.concatenate([batch.write_slots, slot])
    writer = xp.concatenate([xp.arange(batch_size, dtype=np.int32), request])
    index = xp.arange(len(written))
    same = (written[:, None] == written[None, :]) & (index[:, None] > index[None, :])
    others = batch.read_slots[:, None] == written[None, :]
    others &= xp.arange(batch_size)[:, None] != writer[None, :]
    others &= (batch.read_slots >= 0)[:, None]
    bad_offsets = xp.concatenate([batch.indptr[:1] != 0, batch.lens < 0])
    is_bad = (
        bad_offsets,
        xp.concatenate([batch.indptr[-1:] > spec.max_tokens]),
        batch.lens > spec.max_qo_len,
        (batch.read_slots < -1) | (batch.read_slots >= slots),
        (batch.write_slots < -1) | (batch.write_slots >= slots),
        (batch.commits < 0) | (batch.commits > batch.lens),
        counts & ((request < 0) | (request >= batch_size)),
        counts & ((position < 0) | (position > length)),
        (slot < -1) | (slot >= slots),
        (same & (written >= 0)[:, None]).any(axis=1),
        others.any(axis=1),
    )
    code, at = xp.zeros((), np.int32), xp.zeros((), np.int32)
    for number in range(len(is_bad), 0, -1):
        flags = is_bad[number - 1]
        if len(flags) == 0:
            continue
        found = flags.any()
        code = xp.where(found, np.int32(number), code)
        at = xp.where(found, flags.argmax().astype(np.int32), at)
    return code, at


def _got(spec: StateSpec, batch: _Batch, code: int, at: int) -> str:
    if code == 1:
        return f"{batch.indptr[0] if at == 0 else batch.indptr[[at - 1, at]].tolist()}"
    if code == 2:
        return f"{batch.indptr[-1]} (max_tokens = {spec.max_tokens})"
    if code == 3:
        return f"{batch.lens[at]} (max_qo_len = {spec.max_qo_len})"
    if code in (4, 11):
        return f"{batch.read_slots[at]} (num_slots = {spec.num_slots})"
    if code == 5:
        return f"{batch.write_slots[at]} (num_slots = {spec.num_slots})"
    if code == 6:
        return f"{batch.commits[at]} of {batch.lens[at]}"
    if code == 10:
        return f"slot {np.concatenate([batch.write_slots, batch.marks[:, 2]])[at]} twice"
    return f"{batch.marks[at].tolist()}"


def _pack(xp: Any, spec: StateSpec, batch: _Batch, code: Any, at: Any) -> Any:
    batch_size = len(batch.lens)
    rest = spec.max_batch - batch_size
    ok = code == 0
    total = xp.where(ok, batch.indptr[-1], 0)
    # A faulty plan has no work. Its words must still stay in range.
    indptr = xp.where(ok, batch.indptr, 0)
    indptr = xp.concatenate([indptr, xp.broadcast_to(total, (rest,))])

    def padded(values: Any, filler: int) -> Any:
        values = xp.where(ok, values, filler)
        return xp.concatenate([values, xp.full((rest,), filler, np.int32)])

    read, write = padded(batch.read_slots, -1), padded(batch.write_slots, -1)
    commits = padded(batch.commits, 0)
    chunks, num_chunks = _chunks(xp, spec, indptr, read, write, commits, batch.marks, ok)
    header = xp.stack(
        [xp.asarray(x, np.int32) for x in (batch_size, total, num_chunks, code, at, 0, 0, 0)]
    )
    sections = (header, indptr, read, write, commits, chunks.reshape(-1))
    return xp.concatenate([x.astype(np.int32) for x in sections])


def _chunks(
    xp: Any, spec: StateSpec, indptr: Any, read: Any, write: Any, commits: Any, marks: Any, ok: Any
) -> tuple[Any, Any]:
    """[max_chunks, 6]: each request cut where a state is written, and then every spec.chunk tokens.

    Without max_batch there is nothing to cut.
    """
    size, most = spec.chunk, spec.max_chunks
    num = spec.max_batch
    if num == 0 or most == 0:
        empty = xp.broadcast_to(xp.asarray([0, 0, 1, -1, -1, -1], np.int32), (most, 6))
        return empty, xp.zeros((), np.int32)
    lens = xp.diff(indptr)
    every = xp.arange(num, dtype=np.int32)
    nowhere = xp.full((num,), -1, np.int32)
    is_mark = ok & (marks[:, 2] >= 0)
    # A cut (request, position, slot): the state there goes to slot. Padding cuts nothing: it is at
    # the end of the last request.
    request = xp.concatenate([every, every, xp.where(is_mark, marks[:, 0], num - 1)])
    position = xp.concatenate([commits, lens, xp.where(is_mark, marks[:, 1], lens[num - 1])])
    slot = xp.concatenate([write, nowhere, xp.where(is_mark, marks[:, 2], -1)])
    order = xp.lexsort((slot, position, request))
    request, position, slot = request[order], position[order], slot[order]
    is_next = xp.concatenate([xp.zeros(1, bool), request[1:] == request[:-1]])
    before = xp.where(is_next, xp.concatenate([position[:1], position[:-1]]), 0)
    length = position - before
    counts = xp.where((length == 0) & (slot >= 0), 1, -(-length // size))
    ends = xp.cumsum(counts)
    index = xp.arange(most)
    piece = xp.clip(xp.searchsorted(ends, index, side="right"), 0, len(ends) - 1)
    is_live = index < ends[-1]
    done = (index - (ends - counts)[piece]) * size
    of = request[piece]
    columns = (
        xp.where(is_live, indptr[of] + before[piece] + done, 0),
        xp.where(is_live, xp.minimum(length[piece] - done, size), 0),
        xp.where(is_live, xp.concatenate([xp.ones(1, bool), of[1:] != of[:-1]]), True),
        xp.where(is_live, read[of], -1),
        xp.where(is_live & (done + size >= length[piece]), slot[piece], -1),
        xp.where(is_live, of, -1),
    )
    return xp.stack([c.astype(np.int32) for c in columns], axis=1), ends[-1]
