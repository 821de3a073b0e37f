"""Plans are data from outside: checks cover all that a kernel follows, and accepted plans run.

`attention_cases.make_plan` shows that the checks accept every plan the tests make.
"""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_attn as ja
from helpers.attention_cases import Case, build, make_plan
from jax_attn import _environment
from jax_attn._plan.records import HEADER_FIELDS, MERGE_GROUP, WORK_ITEM

PREFIX = Case(
    "",
    (1,) * 6 + (2, 3),
    (1100,) * 6 + (1200, 0),
    num_qo_heads=8,
    branches=("aaaa",) * 5 + ("",) * 3,
    num_ctas=3,
)
CASES = {
    "mixed": Case("", num_ctas=3),
    "fixed": Case(
        "", (3, 40, 1), (900, 700, 300), schedule="fixed_split", kv_split=128, window_left=200
    ),
    "ragged": Case("", (1, 30, 4), (500, 600, 0), page_size=None, num_ctas=4),
    "prefix": PREFIX,
    "tree": Case("", (16,), (40000,), 16, 2, 128, dtype="bfloat16", num_ctas=40),
    "offsets": Case("", (1, 20, 3), (200, 300, 99), q_offsets=(50, 99, -2), causal=False),
    "mla": Case(
        "", (1, 2), (900, 70), 5, 1, 64, 48, mla=True, sm_scale=0.1, num_ctas=3, page_size=7
    ),
}
CUDA = {"sm_90:132": ("mixed", "prefix"), "sm_80:108": ("fixed",)}
EVERY_CASE = [("cpu", name) for name in CASES]
EVERY_CASE += [(target, name) for target, names in CUDA.items() for name in names]

# Words that may change to an equally valid value: where one queue ends and the next begins, a
# taller tile, positions from which an item's rows still see all of it. Also data that nothing in a
# plan contradicts: other pages, and keys that no row sees.
FREE = {
    ("queue_indptr", ""),
    ("kv_lens", ""),
    ("page_indices", ""),
    ("items", "tile"),
    ("items", "q_pos"),
}


@functools.cache
def plan_of(target, name):
    return make_plan(CASES[name], target)


def words_of(plan):
    """(section, field, offset in the buffer) of every live word."""
    layout, header = plan.spec.layout, plan.header()
    for i, field in enumerate(HEADER_FIELDS[:11]):
        yield "header", field, layout["header"] + i
    batch_size = header["batch_size"]
    lengths = {
        "queue_indptr": plan.spec.kernel_config["num_ctas"] + 1,
        "qo_indptr": batch_size + 1,
        "kv_lens": batch_size,
        "kv_indptr": batch_size + 1,
        "partial_rows": header["num_partials"],
        "qo_indices": header["num_shared_tokens"],
        "page_indices": header["nnz_kv"] if plan.spec.is_paged else 0,
    }
    for section, length in lengths.items():
        for i in range(length):
            yield section, "", layout[section] + i
    for section, record in (("items", WORK_ITEM), ("merge_groups", MERGE_GROUP)):
        for i in range(header[f"num_{section}"] * len(record.names)):
            yield section, record.names[i % len(record.names)], layout[section] + i


def refusal(plan, num_pages=-1):
    """The error message, or None."""
    try:
        plan.spec.problem.check_plan(plan.buffer, num_pages)
    except ValueError as error:
        return str(error)
    return None


def damaged(plan, *changes):
    """A copy of the plan with words changed. changes: (offset, value)."""
    buffer = plan.buffer.copy()
    for at, value in changes:
        buffer[at] = value
    return dataclasses.replace(plan, buffer=buffer)


@pytest.mark.parametrize("target, name", EVERY_CASE)
def test_a_word_that_is_changed_is_refused_or_as_good(target, name):
    """Changes every word as a flipped bit, an overflow or a stale buffer would."""
    plan = plan_of(target, name)
    plan = damaged(plan)  # a copy
    accepted, refused = collections.Counter(), collections.Counter()
    for section, field, at in words_of(plan):
        old = int(plan.buffer[at])
        values = {old + 1, old - 1, old ^ 4, old ^ (1 << 20), 0, -1, 1, 2**30, -(2**31), 2**31 - 1}
        for value in values - {old, 2**31, -(2**31) - 1}:
            plan.buffer[at] = value
            sentence = refusal(plan)
            if sentence is None:
                accepted[section, field] += 1
            else:
                refused[section, field] += 1
                assert sentence.startswith("plan: ") and "expected" in sentence
                assert "got" in sentence, sentence
        plan.buffer[at] = old
    assert refusal(plan) is None
    assert set(accepted) <= FREE, accepted
    assert {word[:2] for word in words_of(plan)} - FREE <= set(refused)


def attend(case, plan):
    batch = build(case)
    call = jax.jit(functools.partial(ja.attention, return_lse=True))
    arrays = {"k": batch.k, "v": batch.v}
    if case.num_layers is not None:
        arrays["layer"] = case.num_layers - 1
    return call(batch.q, plan=plan, **arrays)


@pytest.mark.parametrize("name", ["mixed", "fixed", "prefix", "ragged", "offsets"])
def test_what_is_accepted_has_the_same_bits(name):
    """Accepted changes of items and queues leave the bits of the results.

    Other lengths and pages are left out: they make another batch. So does another position of a
    tile that has no neighbour, neither of its request nor of another head.
    """
    case = CASES[name]
    plan = plan_of("cpu", name)
    want_o, want_lse = (np.asarray(x) for x in attend(case, plan))
    rng = np.random.default_rng(0)
    words = [w for w in words_of(plan) if w[:2] in FREE - {("kv_lens", ""), ("page_indices", "")}]
    tried = 0
    for i in rng.permutation(len(words)):
        at = words[i][2]
        other = damaged(plan, (at, int(plan.buffer[at]) + int(rng.integers(1, 4))))
        if refusal(other) is None and tried < 10:
            o, lse = attend(case, other)
            np.testing.assert_array_equal(o, want_o)
            np.testing.assert_array_equal(lse, want_lse)
            tried += 1
    assert tried >= 3


def place(plan, section, index=0, field=""):
    record = {"items": WORK_ITEM, "merge_groups": MERGE_GROUP}.get(section)
    if section == "header":
        return plan.spec.layout[section] + HEADER_FIELDS.index(field)
    step, offset = (len(record.names), record.names.index(field)) if record else (1, 0)
    return plan.spec.layout[section] + index * step + offset


@pytest.mark.parametrize(
    "section, index, field, value, words",
    [
        ("header", 0, "num_items", 10**6, ("header.num_items", "expected 0 to ", "1000000")),
        ("header", 0, "batch_size", -1, ("header.batch_size", "got -1")),
        ("header", 0, "max_page_id", 2**27, ("header.max_page_id", "got 134217728")),
        ("queue_indptr", 1, "", 10**6, ("queue_indptr[2]", "1000000", "never decrease")),
        ("kv_lens", 4, "", 10**6, ("request 4", "1000000", "pages")),
        ("page_indices", 0, "", 2**27, ("page_indices[0]", "expected 0 to 146", "got 134217728")),
        ("items", 5, "kv_end", 10**6, ("items[5].kv_end", "by kv_lens", "got 1000000")),
        ("items", 5, "tile", 3, ("items[5].tile", "expected 0 to 2", "got 3")),
        ("items", 5, "request", 900, ("items[5].request", "expected 0 to 8", "got 900")),
        ("merge_groups", 1, "num_partials", 99, ("merge_groups[1].partials_begin", "within the 4")),
        ("merge_groups", 1, "parent", 1, ("merge_groups[1].parent", "got 1")),
        ("partial_rows", 2, "", 7, ("partial_rows[2]", "a multiple of 2", "got 7")),
    ],
)
def test_the_sentence_names_section_index_expected_and_got(section, index, field, value, words):
    plan = plan_of("cpu", "mixed")
    sentence = refusal(damaged(plan, (place(plan, section, index, field), value)))
    for word in words:
        assert word in sentence


def test_groups_of_words():
    """Refuses damage that is consistent word by word but not as a whole."""
    plan = plan_of("cpu", "mixed")
    items, groups, rows = plan.items(), plan.merge_groups(), plan.partial_rows()
    split = np.flatnonzero(items["num_groups"] == 1)
    a, b = split[np.argsort(items["kv_begin"][split])][:2]
    final = np.flatnonzero(items["num_groups"] == 0)
    at = functools.partial(place, plan)

    for changes, words in (
        # Two items of one state, none of another: a merge group would wait forever.
        ([(at("items", a, "partial_row"), items["partial_row"][b])], ("partial_row",)),
        # States that overlap.
        ([(at("partial_rows", 1), rows[0])], ("partial_rows[1]", "apart")),
        # A group that is its own parent, and two that are each other's.
        ([(at("merge_groups", i, "parent"), 1 - i) for i in (0, 1)], ("parent",)),
        # Two items write the same rows.
        (
            [(at("items", final[1], f), items[f][final[0]]) for f in WORK_ITEM.names],
            ("query tokens that nobody else writes",),
        ),
        # Keys in two states, and keys in none.
        (
            [(at("items", a, "kv_end"), items["kv_end"][a] + 16)],
            ("where the state before it ends",),
        ),
        (
            [(at("items", a, "kv_end"), items["kv_end"][a] - 16)],
            ("where the state before it ends",),
        ),
        # Counts that fit the capacities but exceed what exists.
        ([(at("header", 0, "num_items"), len(items) + 1)], ("queue_indptr", "num_items")),
        ([(at("header", 0, "num_merge_groups"), len(groups) + 1)], ("merge_groups[2]",)),
    ):
        sentence = refusal(damaged(plan, *changes))
        assert sentence, changes
        for word in words:
            assert word in sentence, sentence


def test_random_groups_of_words_never_pass_for_another_plan():
    """Changes two to six words at once, partly to words from other offsets."""
    rng = np.random.default_rng(0)
    for name in CASES:
        plan = plan_of("cpu", name)
        words = list(words_of(plan))
        for _ in range(500):
            chosen = [words[i] for i in rng.choice(len(words), rng.integers(2, 7), replace=False)]
            changes = [(at, plan.buffer[words[rng.integers(len(words))][2]]) for *_, at in chosen]
            changed = {w[:2] for w, (at, x) in zip(chosen, changes, strict=True)
                       if x != plan.buffer[at]}  # fmt: skip
            if changed - FREE:
                assert refusal(damaged(plan, *changes)) is not None, (name, chosen, changes)


def test_the_pool_bounds_page_ids():
    plan = plan_of("cpu", "mixed")
    largest = plan.header()["max_page_id"]
    assert refusal(plan, largest + 1) is None
    for num_pages in (largest, 0):
        assert f"below the pool's {num_pages} pages" in refusal(plan, num_pages)
    assert "expected int32[" in refusal(dataclasses.replace(plan, buffer=plan.buffer[:-1]))


OPS = pytest.mark.parametrize("op", ["attention", "append_kv", "append_rotated"])
SMALL = Case("", (1, 2), (40, 33), num_ctas=2)


def call_of(op, plan):
    spec, num_pages = plan.spec, 40
    k_shape, v_shape = spec.kv_shapes(num_pages, spec.page_size)
    k, v, q = jnp.ones(k_shape), jnp.ones(v_shape), jnp.ones(spec.q_shape)
    k_new, v_new = (jnp.ones(shape) for shape in spec.kv_shapes(spec.max_qo_tokens))
    if op == "attention":
        return lambda plan: ja.attention(q, k, v, plan)
    if op == "append_kv":
        return lambda plan: ja.append_kv(k, v, k_new, v_new, plan)
    angles = jnp.ones((spec.max_qo_tokens, spec.head_dim_qk // 2))
    qkv = jnp.ones((spec.max_qo_tokens, 8 * 64))
    return lambda plan: ja.append_rotated(qkv, angles, angles, k, v, plan)


@OPS
def test_a_damaged_plan_is_refused_on_cpu_whatever_made_it(op):
    """The check runs without JAX_ATTN_CHECK: it costs less than a hundredth of the kernel."""
    plan = make_plan(SMALL)
    call = jax.jit(call_of(op, plan))
    jax.block_until_ready(call(plan))
    fields = [("kv_lens", 1, "", 2**29), ("page_indices", 0, "", 39), ("qo_indptr", 1, "", -5)]
    fields += [("header", 0, "nnz_qo", 1)]
    if op == "attention":
        fields += [("items", 0, "kv_base", 2**30), ("queue_indptr", 1, "", -1)]
        fields += [("header", 0, "num_items", 1)]
    for section, index, field, value in fields:
        bad = damaged(plan, (place(plan, section, index, field), value))
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError)) as caught:
            jax.block_until_ready(call(bad))
        assert f"{op}: plan: " in str(caught.value) and "got" in str(caught.value)
    jax.block_until_ready(call(plan))


@OPS
@pytest.mark.parametrize("is_jitted", [False, True])
def test_check_looks_at_every_word(op, is_jitted, monkeypatch):
    """JAX_ATTN_CHECK=1 on any device also checks words that append does not follow."""
    monkeypatch.setattr(_environment, "check", True)
    plan = make_plan(SMALL)
    call = jax.jit(call_of(op, plan)) if is_jitted else call_of(op, plan)
    jax.block_until_ready(call(plan))
    bad = damaged(plan, (place(plan, "items", 1, "kv_head"), 7))
    # XLA turns the callback's error into one of these.
    errors = (jax.errors.JaxRuntimeError, ValueError) if is_jitted else ValueError
    with pytest.raises(errors, match=rf"{op}: plan: items\[1\].kv_head: expected 0 to 1, got 7"):
        jax.block_until_ready(call(bad))


@OPS
def test_the_kernel_waits_for_the_check(op, monkeypatch):
    """The callback returns the kernel's layer, so that no runtime starts the kernel before it."""
    monkeypatch.setattr(_environment, "check", True)
    plan = make_plan(SMALL)
    equations = jax.make_jaxpr(call_of(op, plan))(plan).jaxpr.eqns
    (checked,) = (e.outvars[0] for e in equations if e.primitive.name == "pure_callback")
    assert any(checked in e.invars for e in equations if "pure_callback" not in e.primitive.name)
