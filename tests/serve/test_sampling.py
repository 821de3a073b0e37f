"""Sampling against a plain numpy oracle: possible tokens, their frequency, changes of state."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_attn.serve._engine import sampling
from jax_attn.serve._scheduling.request import SamplingParams

VOCAB, SLOTS, ROWS = 83, 9, 8  # neither a multiple of 32 nor a power of two


def params(**kwargs) -> SamplingParams:
    return SamplingParams(max_tokens=100, **kwargs)


def probabilities(logits, p: SamplingParams, tokens=(), num_prompt=0, allowed=None) -> np.ndarray:
    """The oracle: the distribution that `sample` must draw from, in float64, by sorting."""
    scores = np.float64(logits)
    for token, bias in p.logit_bias:
        scores[token] += bias
    output = list(tokens[num_prompt:])
    for token in set(tokens):
        r = p.repetition_penalty
        scores[token] = scores[token] / r if scores[token] > 0 else scores[token] * r
    for token in set(output):
        scores[token] -= p.frequency_penalty * output.count(token) + p.presence_penalty
    if allowed is not None:
        scores[[t for t in range(len(scores)) if t not in allowed]] = -np.inf
    if p.temperature == 0:
        return np.eye(len(scores))[np.argmax(scores)]
    x = np.exp((scores - scores.max()) / p.temperature)
    if p.top_k:
        x[x < np.sort(x)[::-1][min(p.top_k, len(x)) - 1]] = 0
    x /= x.sum()
    order = np.argsort(-x, kind="stable")
    before = np.append(0, np.cumsum(x[order])[:-1])  # mass of likelier tokens
    x[order[before >= p.top_p]] = 0
    x[x < p.min_p * x.max()] = 0
    return x / x.sum()


class Batch:
    """Rows for `sample`, each a sequence in a slot of its own."""

    def __init__(self, rows, *, state=None):
        """rows: row -> dict(logits, params, slot, position, tokens, num_prompt, allowed)."""
        self.state = state or sampling.init_state(SLOTS, VOCAB)
        self.rows = np.zeros((ROWS, sampling.ROW_WORDS), np.int32)
        self.records = sampling.as_records(self.rows)
        self.mask = sampling.allow_all(ROWS, VOCAB)
        in_slots = sampling.SlotParams(SLOTS)
        slots, positions = [SLOTS] * ROWS, [0] * ROWS
        self.logits = np.zeros((ROWS, VOCAB), np.float32)
        for i, row in rows.items():
            p, slot = row["params"], row.get("slot", i)
            self.logits[i] = row["logits"]
            in_slots.set(slot, p)
            slots[i], positions[i] = slot, row.get("position", 0)
            if sampling.keeps_state(p):
                arrays = sampling.slot_arrays(
                    p, row.get("tokens", ()), row.get("num_prompt", 0), VOCAB
                )
                self.state = sampling.set_slot(self.state, slot, *arrays)
            if row.get("allowed") is not None:
                forbidden = [t for t in range(VOCAB) if t not in row["allowed"]]
                sampling.forbid(self.mask[i], forbidden)
        self.kind = in_slots.fill(self.rows, slots, positions)

    def sample(self, kind=None):
        self.state, sampled = sampling.sample(
            self.state,
            jnp.asarray(self.logits),
            self.rows.copy(),
            self.mask,
            kind=kind or self.kind,
        )
        return sampled


HISTORY = [5, 6, 7, 5, 10, 11, 11, 11, 5]
CASES = {
    "plain": (params(), None),
    "cold": (params(temperature=0.3), None),
    "hot": (params(temperature=2.5), None),
    "top_k": (params(top_k=5), None),
    "top_k_1": (params(top_k=1), None),
    "top_k_all": (params(top_k=500), None),
    "top_p": (params(top_p=0.7), None),
    "top_p_tiny": (params(top_p=1e-6), None),
    "min_p": (params(min_p=0.2), None),
    "top_k_then_p": (params(top_k=4, top_p=0.6), None),
    "all_filters": (params(top_k=12, top_p=0.9, min_p=0.05, temperature=1.5), None),
    "repetition": (params(repetition_penalty=1.9), None),
    "presence": (params(presence_penalty=1.7), None),
    "frequency": (params(frequency_penalty=0.9), None),
    "penalties": (
        params(repetition_penalty=0.7, presence_penalty=-0.5, frequency_penalty=0.4, top_k=20),
        None,
    ),
    "bias": (params(logit_bias=((3, 4.0), (5, -100.0), (82, 3.0), (3, 1.0))), None),
    "mask": (params(), {1, 5, 31, 32, 64, 82}),
    "mask_and_all": (
        params(top_p=0.8, logit_bias=((32, 1.5),), repetition_penalty=1.2),
        {1, 5, 31, 32, 64, 82},
    ),
    "greedy": (params(temperature=0), None),
    "greedy_full": (
        params(temperature=0, frequency_penalty=2.0, logit_bias=((8, 2.0),), logprobs=3),
        {5, 8, 11, 82},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_distribution(name):
    """A chi-square test over 4,000 positions; tokens of probability 0 never come."""
    p, allowed = CASES[name]
    logits = np.random.default_rng(1).normal(0, 1.6, VOCAB).astype(np.float32)
    expected = probabilities(logits, p, HISTORY, 4, allowed)
    row = {
        "logits": logits,
        "params": p,
        "tokens": HISTORY,
        "num_prompt": 4,
        "allowed": allowed,
    }
    batch = Batch(dict.fromkeys(range(ROWS), row))
    history = np.asarray(batch.state.counts).copy()
    num_draws, counts = 4000, np.zeros(VOCAB)
    for begin in range(0, num_draws, ROWS):
        batch.records["position"][:] = begin + np.arange(ROWS)
        counts += np.bincount(np.asarray(batch.sample().tokens), minlength=VOCAB)
        batch.state = batch.state._replace(counts=jnp.array(history))  # undoes the draw's count
    assert not counts[expected == 0].any()
    likely = expected * num_draws >= 5
    wanted = num_draws * np.append(expected[likely], expected[~likely].sum())
    got = np.append(counts[likely], counts[~likely].sum())
    chi2 = ((got - wanted) ** 2 / np.maximum(wanted, 1)).sum()
    df = likely.sum()
    assert chi2 < df + 5 * np.sqrt(2 * df), (chi2, df)


def test_counts_grow_with_the_output():
    """Penalties see sampled tokens, not only those set on admission."""
    p = params(temperature=0, frequency_penalty=1.0, presence_penalty=0.25)
    logits = np.random.default_rng(2).normal(0, 1, VOCAB).astype(np.float32)
    tokens = list(HISTORY)
    row = {"logits": logits, "params": p, "slot": 7, "tokens": tokens, "num_prompt": 4}
    batch = Batch({2: row})
    for position in range(30):
        expected = probabilities(logits, p, tokens, 4).argmax()
        batch.records["position"][2] = position
        token = int(batch.sample().tokens[2])
        assert token == expected
        assert int(batch.state.last_tokens[7]) == token
        tokens.append(token)
    assert len(set(tokens[9:])) > 3


def test_a_row_depends_on_nothing_but_itself():
    """Any permutation of rows and slots, any neighbours, any kind: the same tokens."""
    rng = np.random.default_rng(3)
    rows = {}
    for i, (p, allowed) in enumerate(list(CASES.values())[:ROWS] + list(CASES.values())[-1:]):
        if i < ROWS:
            p = dataclasses.replace(p, seed=int(rng.integers(2**63)) * 2)
            logits = rng.normal(0, 1, VOCAB).astype(np.float32)
            rows[i] = {"logits": logits, "params": p, "position": i, "allowed": allowed}
    expected = np.asarray(Batch(rows).sample("full").tokens)
    for _ in range(5):
        where, slots = rng.permutation(ROWS), rng.permutation(SLOTS)
        mixed = {int(where[i]): rows[i] | {"slot": int(slots[i])} for i in rows}
        got = np.asarray(Batch(mixed).sample("full").tokens)
        np.testing.assert_array_equal(got[where], expected)
    for i, row in rows.items():
        assert int(Batch({3: row}).sample().tokens[3]) == expected[i]


def test_kinds_agree():
    """A row gets the same token from the more expensive executables."""
    logits = np.random.default_rng(4).normal(0, 1, VOCAB).astype(np.float32)
    plain = {
        i: {"logits": logits, "params": params(seed=i), "position": 7 * i} for i in range(ROWS)
    }
    for position in range(50):
        batches = [Batch(plain) for _ in range(2)]
        for batch in batches:
            batch.records["position"][:] += position
        assert batches[0].kind == "temperature"
        np.testing.assert_array_equal(batches[0].sample().tokens, batches[1].sample("full").tokens)
    for p in (params(top_p=0.8, seed=2), params(top_k=9, min_p=0.01, seed=3)):
        filtered = {i: {"logits": logits, "params": p, "position": i} for i in range(ROWS)}
        assert Batch(filtered).kind == "filtered"
        np.testing.assert_array_equal(
            Batch(filtered).sample().tokens, Batch(filtered).sample("full").tokens
        )
    greedy = {0: {"logits": logits, "params": params(temperature=0)}}
    for kind in sampling.KINDS:
        assert int(Batch(greedy).sample(kind).tokens[0]) == logits.argmax()


def test_a_repeated_token_of_negative_score_falls():
    """Division would raise it."""
    logits = np.full(VOCAB, -1.0, np.float32)
    logits[5], logits[6] = -0.9, -0.95
    row = {"logits": logits, "params": params(temperature=0, repetition_penalty=1.5)}
    tokens = Batch({0: row | {"tokens": [5], "num_prompt": 1}}).sample().tokens
    assert int(tokens[0]) == 6


def test_seeds_and_positions_matter():
    logits = np.zeros(VOCAB, np.float32)
    seeds = [0, 1, 2**32, 2**32 + 1, 2**63, 2**64 - 1, -1, 12345678901234567890]
    batch = Batch({i: {"logits": logits, "params": params(seed=s)} for i, s in enumerate(seeds)})
    drawn = []
    for position in range(40):
        batch.records["position"][:] = position
        drawn.append(np.asarray(batch.sample().tokens))
    drawn = np.stack(drawn).T
    assert len({tuple(row) for row in drawn}) == len(seeds) - 1  # -1 is 2^64 - 1
    assert all(len(set(row)) > 20 for row in drawn)


def test_ties_at_the_border_stay():
    logits = np.full(VOCAB, -5, np.float32)
    logits[[3, 9, 40]] = 1.0
    rows = {i: {"logits": logits, "params": params(top_k=2, seed=i)} for i in range(ROWS)}
    batch = Batch(rows)
    seen = set()
    for position in range(20):
        batch.records["position"][:] = position
        seen |= set(np.asarray(batch.sample().tokens).tolist())
    assert seen == {3, 9, 40}


def test_tiny_temperature_is_greedy():
    logits = np.random.default_rng(5).normal(0, 5, VOCAB).astype(np.float32)
    p = params(temperature=1e-38, seed=3)
    assert int(Batch({0: {"logits": logits, "params": p}}).sample().tokens[0]) == logits.argmax()


def test_logprobs():
    """The model's own logits count, without bias, penalties and filters."""
    rng = np.random.default_rng(6)
    logits = rng.normal(0, 2, (2, VOCAB)).astype(np.float32)
    p = params(logprobs=5, temperature=0.5, top_k=3, logit_bias=((7, 50.0),))
    sampled = Batch({i: {"logits": logits[i], "params": p} for i in range(2)}).sample()
    for i in range(2):
        x = np.float64(logits[i])
        expected = x - np.log(np.exp(x).sum())
        assert int(sampled.tokens[i]) == 7
        np.testing.assert_allclose(sampled.logprobs[i], expected[7], atol=1e-5)
        order = np.argsort(-expected)[: sampling.MAX_LOGPROBS]
        np.testing.assert_array_equal(sampled.top_tokens[i], order)
        np.testing.assert_allclose(sampled.top_logprobs[i], expected[order], atol=1e-5)


def test_logprobs_of_what_is_sampled_from():
    rng = np.random.default_rng(5)
    logits = rng.normal(size=VOCAB).astype(np.float32)
    changes = {"logprobs": 5, "temperature": 0.5, "top_k": 3, "logit_bias": ((7, 2.0),)}
    rows = {
        0: {"logits": logits, "params": params(logprobs_of="sampled", **changes)},
        1: {"logits": logits, "params": params(logprobs_of="model", **changes)},
    }
    sampled = Batch(rows).sample()
    p = probabilities(logits, rows[0]["params"]), np.exp(logits) / np.exp(logits).sum()
    for i, row in enumerate(p):
        token = sampled.tokens[i]
        np.testing.assert_allclose(sampled.logprobs[i], np.log(row[token]), atol=1e-5)
        largest = np.sort(row)[::-1][:3]
        np.testing.assert_allclose(sampled.top_logprobs[i][:3], np.log(largest), atol=1e-5)


@pytest.mark.parametrize("kind", sampling.KINDS)
def test_greedy_beside_a_row_with_a_mask(kind):
    """One token is masked in one row of many: only that row takes its second-best token."""
    logits = np.random.default_rng(5).normal(0, 1, VOCAB).astype(np.float32)
    best, second = np.argsort(-logits)[:2]
    rows = {i: {"logits": logits, "params": params(temperature=0)} for i in range(ROWS)}
    rows[6]["allowed"] = set(range(VOCAB)) - {best}
    tokens = np.asarray(Batch(rows).sample(kind).tokens)
    assert tokens.tolist() == [second if i == 6 else best for i in range(ROWS)]


@pytest.mark.parametrize("kind", sampling.KINDS)
def test_void_rows_and_nan(kind):
    """A void row changes no slot; NaN logits give -1 and affect no neighbour."""
    logits = np.random.default_rng(7).normal(0, 1, VOCAB).astype(np.float32)
    bad = np.where(np.arange(VOCAB) == 9, np.nan, logits)
    p = params(temperature=0)
    batch = Batch({1: {"logits": logits, "params": p}, 4: {"logits": bad, "params": p}})
    sampled = batch.sample(kind)
    assert int(sampled.tokens[4]) == -1
    assert int(sampled.tokens[1]) == logits.argmax()
    expected = np.zeros(SLOTS, np.int32)
    expected[[1, 4]] = logits.argmax(), -1
    np.testing.assert_array_equal(batch.state.last_tokens, expected)
    assert int((batch.state.counts[np.array([0, 2, 3, 5, 6, 7, 8])] != 0).sum()) == 0


def test_what_a_slot_held_before_is_forgotten():
    """Biases and counts of a sequence that left do not reach the next one in its slot."""
    logits = np.random.default_rng(8).normal(0, 1, VOCAB).astype(np.float32)
    old = params(logit_bias=((3, 50.0),), frequency_penalty=1.0)
    batch = Batch({0: {"logits": logits, "params": old, "slot": 4, "tokens": [7] * 9}})
    assert int(batch.sample().tokens[0]) == 3
    new = params(top_k=1)
    batch = Batch({0: {"logits": logits, "params": new, "slot": 4}}, state=batch.state)
    assert int(batch.sample().tokens[0]) == logits.argmax()


def test_rows_are_filled_anew():
    """A slot's parameters are those of the last sequence in it, and unused rows are void."""
    slots, rows = sampling.SlotParams(SLOTS), np.full((ROWS, sampling.ROW_WORDS), 77, np.int32)
    slots.set(2, params(logit_bias=((1, 1.0),)))
    slots.set(2, params(top_k=3, temperature=0.5, seed=2**32 + 5))
    slots.set(7, params(temperature=0, presence_penalty=1.5))
    assert slots.fill(rows, [2, SLOTS], [9, 1]) == "filtered"
    row = sampling.as_records(rows)[0]
    assert [row[x].tolist() for x in ("slot", "top_k", "seed")] == [2, 3, [1, 5]]
    assert [row[x] for x in ("position", "state_slot", "given")] == [9, SLOTS, -1]
    assert [row[x] for x in ("temperature", "top_p", "min_p")] == [0.5, 1, 0]
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    assert [row[x] for x in penalties] == [1, 0, 0]
    void = sampling.as_records(rows[1:])
    assert (void["slot"] == SLOTS).all() and (void["state_slot"] == SLOTS).all()
    assert (rows[2:] == rows[2]).all()
    assert slots.fill(rows, [7], [0]) == "full" and sampling.as_records(rows)["state_slot"][0] == 7
    assert slots.fill(rows, [], []) == "greedy" and (rows == rows[0]).all()


def test_masks():
    mask = sampling.allow_all(2, VOCAB)
    sampling.forbid(mask[0], [0, 31, 63, 82])
    assert mask.shape == (2, 3) and mask[0].view(np.uint32).tolist() == [
        0x7FFFFFFE, 0x7FFFFFFF, 0xFFFFFFFF ^ 1 << 18
    ]  # fmt: skip
    assert (mask[1] == -1).all()


def test_bits_of_logprobs_do_not_depend_on_the_number_of_rows():
    logits = 4 * jax.random.normal(jax.random.key(0), (32, 5000))
    logits = logits.at[:, 7].set(-jnp.inf)
    whole = np.asarray(jax.jit(sampling._log_softmax)(logits))
    np.testing.assert_allclose(whole, jax.nn.log_softmax(logits), rtol=1e-6, atol=1e-5)
    for num in range(1, 9):
        np.testing.assert_array_equal(jax.jit(sampling._log_softmax)(logits[:num]), whole[:num])


def test_too_many_biases():
    p = params(logit_bias=tuple((i, 1.0) for i in range(sampling.MAX_LOGIT_BIAS + 1)))
    with pytest.raises(ValueError, match="logit_bias: expected at most 300"):
        sampling.check(p)
