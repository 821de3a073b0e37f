"""Sampling on the device: one jitted function from logits to tokens, with static shapes.

    state, slots = init_state(max_running, vocab_size), SlotParams(max_running)
    slots.set(slot, params)                                      # once for a sequence
    state = set_slot(state, slot, *slot_arrays(params, tokens, num_prompt, vocab_size))
    kind = slots.fill(rows, the_slots, positions)                # the sequences of a step
    as_records(rows)["given"][i] = token                         # not sampled, but scored
    state, sampled = sample(state, logits, rows, allow_all(len(rows), vocab_size), kind=kind)

A token depends only on its logits, its parameters, its seed and its position in the output, not on
other rows or the slot. The order of operations: logit bias, penalties, mask, temperature, top-k,
top-p of what is left, min-p. Tokens with equal logits are kept or removed together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn.serve._scheduling.request import SamplingParams

BATCH_INVARIANT: dict[str, str] = {"xla_cpu_experimental_ynn_fusion_type": ""}
"""Options of XLA for jax.jit(..., compiler_options=). With them the bits of a row do not depend on
the number of rows on CPUs; since jaxlib 0.10.2 XLA otherwise sums rows in an order that does. An
engine with batch_invariant is compiled with them, and a trainer with its bits is, too
(docs/rl.md)."""

MAX_LOGPROBS = 20  # the most alternatives a request may ask for
MAX_LOGIT_BIAS = 300  # entries of a sequence, the limit of OpenAI's API

_LANES = 128  # sums of a row that run side by side; a power of 2

# Bit of SamplerState.counts: the token is in the prompt. Lower bits count it in the output.
_IN_PROMPT = 1 << 30

Kind = Literal["greedy", "temperature", "filtered", "full"]
"""What the rows of a step need; the most expensive of them picks the executable. "filtered" adds
top-k, top-p and min-p, "full" bias, penalties and logprobs."""

KINDS: tuple[Kind, ...] = ("greedy", "temperature", "filtered", "full")


class SamplerState(NamedTuple):
    """The device's data for each slot. `sample` and `set_slot` donate it and update it in place.

    last_tokens: [max_running] i32. The newest token; the next forward pass reads it here.
    counts: [max_running, vocab] i32. How often a token is in the output, plus _IN_PROMPT.
    bias_tokens, bias_values: [max_running, MAX_LOGIT_BIAS] i32, f32. Padding is token `vocab`.
    All fields but last_tokens are those of the slot's last sequence with `keeps_state`.
    """

    last_tokens: jax.Array
    counts: jax.Array
    bias_tokens: jax.Array
    bias_values: jax.Array


class Sampled(NamedTuple):
    """One row for each row of the logits. All but `tokens` are None unless kind is "full".

    tokens: [rows] i32. -1 where the logits hold NaN.
    logprobs: [rows] f32. Of `tokens`, or of the row's given token, under the softmax of the model's
    own logits, or in the distribution sampled from (SamplingParams.logprobs_of).
    top_tokens, top_logprobs: [rows, MAX_LOGPROBS] i32, f32. The likeliest first.
    """

    tokens: jax.Array
    logprobs: jax.Array | None = None
    top_tokens: jax.Array | None = None
    top_logprobs: jax.Array | None = None


def joined(steps: Sequence[Sampled]) -> Sampled:
    """The results of several steps of one kind, of the host: the rows of each follow the last."""
    if len(steps) == 1:
        return steps[0]
    parts: Any = zip(*steps, strict=True)
    whole: list[Any] = [None if of[0] is None else np.concatenate(of) for of in parts]
    return Sampled(*whole)


@partial(jax.jit, static_argnums=(0, 1))  # one executable: else each array is one or two
def init_state(max_running: int, vocab_size: int) -> SamplerState:
    return SamplerState(
        last_tokens=jnp.zeros(max_running, jnp.int32),
        counts=jnp.zeros((max_running, vocab_size), jnp.int32),
        bias_tokens=jnp.full((max_running, MAX_LOGIT_BIAS), vocab_size, jnp.int32),
        bias_values=jnp.zeros((max_running, MAX_LOGIT_BIAS), jnp.float32),
    )


# ---- the host's side ---------------------------------------------------------------------------


def check(params: SamplingParams) -> None:
    """Raises ValueError if there are more logprobs or biases than the arrays hold."""
    if (params.logprobs or 0) > MAX_LOGPROBS:
        raise ValueError(f"logprobs: expected at most {MAX_LOGPROBS}, got {params.logprobs}.")
    if len(params.logit_bias) > MAX_LOGIT_BIAS:
        raise ValueError(
            f"logit_bias: expected at most {MAX_LOGIT_BIAS} entries, got {len(params.logit_bias)}."
        )


def kind_of(params: SamplingParams) -> Kind:
    """The cheapest kind that serves `params`."""
    if params.logprobs is not None or keeps_state(params):
        return "full"
    if params.temperature <= 0:
        return "greedy"
    filtered = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    return "filtered" if filtered else "temperature"


def keeps_state(params: SamplingParams) -> bool:
    """Whether the sequence needs `set_slot` before its first sample in a slot."""
    return bool(params.logit_bias) or has_penalties(params)


def has_penalties(params: SamplingParams) -> bool:
    """Whether its samples depend on the tokens before."""
    penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty - 1)
    return any(penalties)


def slot_arrays(
    params: SamplingParams, tokens: Sequence[int], num_prompt: int, vocab_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The arguments of `set_slot`: counts [vocab], bias_tokens, bias_values [MAX_LOGIT_BIAS].

    params: passed by `check`. tokens: prompt, then output.
    """
    counts = np.bincount(tokens[num_prompt:], minlength=vocab_size).astype(np.int32)
    counts[tokens[:num_prompt]] |= _IN_PROMPT
    bias_tokens = np.full(MAX_LOGIT_BIAS, vocab_size, np.int32)
    bias_values = np.zeros(MAX_LOGIT_BIAS, np.float32)
    for i, (token, value) in enumerate(params.logit_bias):
        bias_tokens[i], bias_values[i] = token, value
    return counts, bias_tokens, bias_values


_NO_TOKEN = 2**31 - 1
# How one row of the logits is sampled. It goes to the device as i32 words, [ROW_WORDS].
ROW = np.dtype(
    [
        ("slot", np.int32),  # of the sequence; max_running: the result is dropped
        ("top_k", np.int32),
        ("seed", np.int32, 2),  # the upper word, then the lower
        ("position", np.int32),  # of the sampled token in the output
        ("state_slot", np.int32),  # the slot whose counts and biases apply; max_running: none
        # Kind "full": the token whose logprob is wanted; -1: that of the sampled one.
        ("given", np.int32),
        # A nonzero number that the rows of a sequence with drafts share; 0: no drafts.
        ("chain", np.int32),
        ("draft", np.int32),  # the draft before this row; _NO_TOKEN: none
        # Kind "full": 1: logprobs are of the distribution sampled from; 0: of the model's logits.
        ("of_sampled", np.int32),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("repetition_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
    ]
)
ROW_WORDS = ROW.itemsize // 4


def as_records(rows: np.ndarray) -> np.ndarray:
    """Views rows [num_rows, ROW_WORDS] i32 as [num_rows] ROW, to name fields.

    Copy whole rows as words: numpy copies records field by field, in ten times the time.
    """
    return rows.view(ROW)[:, 0]


def _fields(rows: jax.Array) -> dict[str, jax.Array]:
    """The fields of rows [num_rows, ROW_WORDS] i32, by name: [num_rows], seed: [num_rows, 2]."""
    assert ROW.fields is not None
    columns = {}
    for name, (dtype, offset, *_) in ROW.fields.items():
        begin, end = offset // 4, (offset + dtype.itemsize) // 4
        column = rows[:, begin:end] if dtype.shape else rows[:, begin]
        if dtype.base == np.float32:
            column = jax.lax.bitcast_convert_type(column, jnp.float32)
        columns[name] = column
    return columns


class SlotParams:
    """The sampling parameters of the sequence in each slot, as `sample` takes them."""

    def __init__(self, max_running: int):
        self.max_running = max_running
        self._rows = np.zeros((max_running + 1, ROW_WORDS), np.int32)
        self._records = as_records(self._rows)
        self._kinds = np.zeros(max_running + 1, np.int8)  # indices into KINDS
        # A void row: greedy, and its result is dropped.
        self.set(max_running, SamplingParams(max_tokens=1, temperature=0))

    def set(self, slot: int, params: SamplingParams) -> None:
        """Sets the parameters of the sequence that now has `slot`."""
        seed = params.seed % 2**64
        row = {
            "slot": slot,
            "seed": np.array([seed >> 32, seed % 2**32], np.uint32).view(np.int32),
            "position": 0,
            "state_slot": slot if keeps_state(params) else self.max_running,
            "given": -1,
            "chain": 0,
            "draft": _NO_TOKEN,
            "of_sampled": int(params.logprobs_of == "sampled"),
        }
        # The other fields are those of SamplingParams.
        self._records[slot] = tuple(
            row[name] if name in row else getattr(params, name) for name in ROW.names or ()
        )
        self._kinds[slot] = KINDS.index(kind_of(params))

    def fill_scored(self, rows: np.ndarray, slot: int, tokens: Sequence[int]) -> None:
        """Fills in rows that score given tokens with the parameters of the sequence in `slot`.

        rows: [len(tokens), ROW_WORDS] i32. Counts and biases do not apply.
        """
        rows[:] = self._rows[slot]
        fields = as_records(rows)
        fields["slot"] = fields["state_slot"] = self.max_running
        fields["given"] = tokens

    def fill(self, rows: np.ndarray, slots: Sequence[int], positions: Sequence[int]) -> Kind:
        """Fills in rows: row i samples output token positions[i] of the sequence in slots[i].

        Rows with slot max_running, and rows after the last slot, are void. Returns the most
        expensive kind.

        rows: [num_rows, ROW_WORDS] i32, at least as many as slots.
        """
        n = len(slots)
        rows[:n] = self._rows[slots]
        as_records(rows)["position"][:n] = positions
        rows[n:] = self._rows[self.max_running]
        return KINDS[int(self._kinds[slots].max(initial=0))]


def allow_all(num_rows: int, vocab_size: int) -> np.ndarray:
    """A mask that allows all: [num_rows, ceil(vocab / 32)] i32, a bit a token, lowest bit first."""
    return np.full((num_rows, -(-vocab_size // 32)), -1, np.int32)


def forbid(row_mask: np.ndarray, tokens: Iterable[int]) -> None:
    """Clears the bits of `tokens` in a mask [ceil(vocab / 32)] i32."""
    for token in tokens:
        row_mask[token // 32] &= ~np.array(1 << token % 32, np.uint32).view(np.int32)


# ---- the device's side -------------------------------------------------------------------------


@partial(jax.jit, donate_argnames="state")
def set_slot(
    state: SamplerState,
    slot: jax.Array,
    counts: jax.Array,
    bias_tokens: jax.Array,
    bias_values: jax.Array,
) -> SamplerState:
    """Writes the arrays of `slot_arrays` into a slot."""
    return state._replace(
        counts=state.counts.at[slot].set(counts),
        bias_tokens=state.bias_tokens.at[slot].set(bias_tokens),
        bias_values=state.bias_values.at[slot].set(bias_values),
    )


@partial(jax.jit, donate_argnames="state", static_argnames=("kind", "has_drafts"))
def sample(
    state: SamplerState,
    logits: jax.Array,
    rows: jax.Array,
    mask: jax.Array,
    *,
    kind: Kind,
    has_drafts: bool = False,
) -> tuple[SamplerState, Sampled]:
    """Samples a token from each row of logits [num_rows, vocab] f32.

    rows: [num_rows, ROW_WORDS] i32, the words of ROW, from SlotParams.fill.
    mask: as `allow_all` and `forbid` make it.
    has_drafts: some rows may follow drafts.

    Returns the state, with the tokens counted and in last_tokens[slot], and the samples. For a
    sequence with drafts too many tokens are counted: if it has penalties, call `set_slot` again.
    """
    row = _fields(rows)
    temperature = row["temperature"][:, None]
    scores = logits
    if kind == "full":
        scores = _penalized(state, row, has_drafts, scores)
    if kind == "greedy":
        tokens = jax.lax.platform_dependent(scores, mask, cpu=_greedy_on_cpu, default=_greedy)
    else:
        scores = _masked(scores, mask)
        scaled = _scaled(scores, temperature)
        if kind != "temperature":
            scaled = _filtered(scaled, row["top_k"], row["top_p"][:, None], row["min_p"][:, None])
        noisy = scaled + _noise(row["seed"], row["position"], logits.shape[1])
        tokens = _argmax(jnp.where(temperature > 0, noisy, scores))
    if kind == "full":
        one_token = jnp.where(jnp.arange(logits.shape[1]) == tokens[:, None], 0, -jnp.inf)
        of_sampled = jnp.where(temperature > 0, scaled, one_token)
        tokens = jnp.where(row["given"] < 0, tokens, row["given"])
    tokens = jnp.where(jnp.any(jnp.isnan(logits), axis=1), -1, tokens)

    state = state._replace(last_tokens=state.last_tokens.at[row["slot"]].set(tokens, mode="drop"))
    if kind != "full":
        return state, Sampled(tokens)
    state = state._replace(counts=state.counts.at[row["state_slot"], tokens].add(1, mode="drop"))
    logprobs = _log_softmax(jnp.where(row["of_sampled"][:, None] > 0, of_sampled, logits))
    top_logprobs, top_tokens = jax.lax.top_k(logprobs, min(MAX_LOGPROBS, logits.shape[1]))
    chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=1)[:, 0]
    return state, Sampled(tokens, chosen, top_tokens.astype(jnp.int32), top_logprobs)


def token_logprobs(
    logits: jax.Array,
    tokens: jax.Array,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> jax.Array:
    """The log-probabilities of tokens in the distribution that the engine samples from.

    Differentiable in `logits`; which tokens the filters remove is a constant. The bits are those
    of the engine's logprobs if the bits of the logits are. The defaults give those of the model's
    own logits (SamplingParams.logprobs_of "model").

    logits: [n, vocab] f32. tokens: [n] i32. temperature: above 0. Returns [n] f32.
    """
    scores = logits
    if (temperature, top_k, top_p, min_p) != (1.0, 0, 1.0, 0.0):
        # As data, as in the sampler: XLA multiplies by the reciprocal of a constant.
        scores = _scaled(logits, jax.lax.optimization_barrier(jnp.float32(temperature)))
        of_row = jnp.full(len(logits), top_k, jnp.int32), jnp.float32(top_p), jnp.float32(min_p)
        kept = jax.lax.stop_gradient(_filtered(jax.lax.stop_gradient(scores), *of_row))
        scores = jnp.where(jnp.isneginf(kept), -jnp.inf, scores)
    return jnp.take_along_axis(_log_softmax(scores), tokens[:, None], axis=1)[:, 0]


def _log_softmax(x: jax.Array) -> jax.Array:
    """jax.nn.log_softmax of rows, whose bits do not depend on the number of rows.

    The sampler and a trainer have different numbers, and XLA sums a row in an order that depends on
    that. Here lanes are summed from the first to the last, then in halves.
    """
    x = jax.lax.optimization_barrier(x)  # one computation, whatever surrounds it
    top = jax.lax.stop_gradient(x.max(axis=1, keepdims=True))
    shifted = x - jnp.where(jnp.isfinite(top), top, 0)
    powers = jnp.pad(jnp.exp(shifted), ((0, 0), (0, -x.shape[1] % _LANES)))
    sums = powers.reshape(len(x), -1, _LANES).sum(axis=1)
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return shifted - jnp.log(sums)


def _scaled(scores: jax.Array, temperature: jax.Array) -> jax.Array:
    """Divides by temperatures [rows, 1] or []; of 0 by 1. The maximum of each row becomes 0."""
    # At most 0, so the smallest temperature gives -inf beside a 0, never inf or NaN.
    most = jax.lax.stop_gradient(jnp.max(scores, axis=1, keepdims=True))
    scores = scores - most
    divisor = jnp.where(temperature > 0, temperature, 1)
    # Since jaxlib 0.10.2 XLA multiplies by the reciprocal of a row's divisor: an ulp off what a
    # trainer's one temperature gives. So each element has its own.
    return scores / jnp.where(jnp.isnan(scores), scores, divisor)


def _greedy(scores: jax.Array, mask: jax.Array) -> jax.Array:
    """The likeliest allowed token: [rows] i32."""
    return _argmax(_masked(scores, mask))


def _greedy_on_cpu(scores: jax.Array, mask: jax.Array) -> jax.Array:
    """Like _greedy, but skips a mask that forbids nothing.

    That takes 10 ms instead of 24 for 32 rows and 151,936 tokens, in a step of 140 ms (2 cores).
    """
    return jax.lax.cond(jnp.all(mask == -1), lambda: _argmax(scores), lambda: _greedy(scores, mask))


def _masked(scores: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.where(_unpack(mask, scores.shape[1]), scores, -jnp.inf)


def _argmax(scores: jax.Array) -> jax.Array:
    """The first maximum: [rows] i32.

    Two plain reductions, as XLA's own argmax takes four times as long on a CPU.
    """
    best = jnp.max(scores, axis=1, keepdims=True)
    tokens = jnp.arange(scores.shape[1], dtype=jnp.int32)
    return jnp.min(jnp.where(scores == best, tokens, scores.shape[1] - 1), axis=1)


def _penalized(
    state: SamplerState, row: dict[str, jax.Array], has_drafts: bool, scores: jax.Array
) -> jax.Array:
    """Applies bias, HF's repetition penalty, OpenAI's two. Neutral values change no bit."""
    position, chain, draft = row["position"], row["chain"], row["draft"]
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    repetition, presence, frequency = (row[name][:, None] for name in penalties)

    def of_slot(x: jax.Array) -> jax.Array:
        return x.at[row["state_slot"]].get(mode="fill", fill_value=0)

    bias_tokens, bias_values = of_slot(state.bias_tokens), of_slot(state.bias_values)
    which = jnp.arange(len(scores))[:, None]
    scores = scores.at[which, bias_tokens].add(bias_values, mode="drop")
    counts = of_slot(state.counts)
    if has_drafts:  # if the sample after them counts, so do they
        is_behind = (chain[:, None] == chain) & (chain > 0) & (position[:, None] >= position)
        counts = counts.at[which, draft[None, :]].add(is_behind.astype(jnp.int32), mode="drop")
    repeated = jnp.where(scores > 0, scores / repetition, scores * repetition)
    scores = jnp.where(counts > 0, repeated, scores)
    in_output = (counts & ~_IN_PROMPT).astype(jnp.float32)
    return scores - frequency * in_output - presence * (in_output > 0)


def _unpack(mask: jax.Array, vocab_size: int) -> jax.Array:
    """Unpacks a mask: [rows, words] i32 -> [rows, vocab] bool."""
    bits = (mask[:, :, None] >> jnp.arange(32)) & 1
    return bits.reshape(len(mask), -1)[:, :vocab_size] == 1


def _filtered(scaled: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """Sets tokens that top-k, top-p or min-p remove to -inf. scaled: [rows, vocab], maximum 0."""
    order = _sortable(scaled)
    vocab_size = scaled.shape[1]
    wanted = jnp.where(top_k > 0, jnp.minimum(top_k, vocab_size), vocab_size)[:, None]
    keep = order >= _threshold(order, jnp.ones_like(scaled), wanted.astype(jnp.float32))
    weights = jnp.where(keep, jnp.exp(scaled), 0)
    mass = jnp.where(top_p < 1, top_p * jnp.sum(weights, axis=1, keepdims=True), 0)
    # Without top-p any threshold that keeps a token would do.
    keep &= (order >= _threshold(order, weights, mass)) | (top_p >= 1)
    keep &= jnp.exp(scaled) >= min_p  # relative to the likeliest token, whose exp is 1
    return jnp.where(keep, scaled, -jnp.inf)


def _sortable(x: jax.Array) -> jax.Array:
    """Maps floats to u32 in the same order."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jax.lax.bitcast_convert_type(bits ^ ((bits >> 31) | -(2**31)), jnp.uint32)


def _threshold(order: jax.Array, weights: jax.Array, wanted: jax.Array) -> jax.Array:
    """[rows, 1] u32: the largest t such that the weights of order >= t sum to at least `wanted`.

    A radix select with 32 sums per row, for top-k (weights of one) and top-p (probabilities). It is
    far cheaper than the usual sort of a whole vocabulary.
    """

    def add_bit(i: jax.Array, t: jax.Array) -> jax.Array:
        candidate = t | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        total = jnp.sum(jnp.where(order >= candidate, weights, 0), axis=1, keepdims=True)
        return jnp.where(total >= wanted, candidate, t)

    return jax.lax.fori_loop(0, 32, add_bit, jnp.zeros((len(order), 1), jnp.uint32))


def _noise(seed: jax.Array, position: jax.Array, vocab_size: int) -> jax.Array:
    """Gumbel noise [rows, vocab] f32 of (seed, position) alone; argmax(logits + noise) samples."""

    def row(seed: jax.Array, position: jax.Array) -> jax.Array:
        words = jax.lax.bitcast_convert_type(seed, jnp.uint32)
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(key, position), (vocab_size,), jnp.float32)

    return jax.vmap(row)(seed, position)
