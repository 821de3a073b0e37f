"""Attributes of a call are outside data, too: from an exported executable, or made by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_attn as ja
from helpers.attention_cases import Case, make_plan
from jax_attn import _core
from jax_attn._xla import ffi
from jax_attn._xla.attention_operands import BackwardOperands

CASE = Case("", (1, 20), (40, 33), num_ctas=2)
PLAN = make_plan(CASE)
SPEC = PLAN.spec
WORDS = ["version", *SPEC.problem.spec, *SPEC.problem.config]
VALUES = (0, -1, 1, 2, 3, 7, 100, 257, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, -(2**31), -(2**63))

f32 = np.float32
K_SHAPE, V_SHAPE = SPEC.kv_shapes(1, 40, SPEC.page_size)
K_NEW, V_NEW = (np.ones(shape, f32) for shape in SPEC.kv_shapes(SPEC.max_qo_tokens))


def struct(shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def attention(words, workspace_words):
    call = jax.ffi.ffi_call(
        "jax_attn_attention",
        (struct(SPEC.o_shape), struct(SPEC.o_shape[:2]), struct((workspace_words,), jnp.int32)),
    )
    arrays = np.ones(SPEC.q_shape, f32), np.ones(K_SHAPE, f32), np.ones(V_SHAPE, f32)
    return call(*arrays, PLAN.buffer, np.int32(0), problem=words, poison=False)


def append_kv(words, _):
    call = jax.ffi.ffi_call(
        "jax_attn_append_kv",
        (struct(K_SHAPE), struct(V_SHAPE)),
        input_output_aliases={0: 0, 4: 1},
    )
    pages = jnp.ones(K_SHAPE), jnp.ones(V_SHAPE)
    return call(pages[0], K_NEW, PLAN.buffer, np.int32(0), pages[1], V_NEW, problem=words)


def plan(words, _):
    call = jax.ffi.ffi_call(
        "jax_attn_plan", (struct((SPEC.plan_words,), jnp.int32), struct((16,), jnp.int32))
    )
    lengths = ([0, 1, 21], [40, 33], [0, 3, 6], list(range(6)), [39, 13])
    return call(
        *(np.array(x, np.int32) for x in lengths),
        problem=words,
        levels=False,
        q_block=np.int64(0),
        kv_block=np.int64(0),
    )


OPS = pytest.mark.parametrize("op", [attention, append_kv, plan])


def sentence_of(call):
    """The call's error message, or None."""
    try:
        jax.block_until_ready(call())
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        return str(error)
    return None


def test_any_number_of_a_problem():
    """Each number of a problem is refused by its name, or makes a problem with a layout.

    CheckProblem decides, and the handlers call it, too.
    """
    spec, config = SPEC.problem.spec, SPEC.problem.config
    refused = set()
    for name in (*spec, *config):
        for value in VALUES:
            changed = spec | config | {name: value}
            try:
                problem = _core.Problem(
                    {n: changed[n] for n in spec}, {n: changed[n] for n in config}
                )
                assert 0 < problem.layout["num_words"] < 2**31
                assert 0 < problem.workspace_words < 2**42
            except ValueError as error:
                assert str(error).startswith("AttentionSpec: ") and "expected" in str(error)
                refused |= {name} if f"AttentionSpec: {name}: " in str(error) else set()
    doubles = {"sm_scale", "logits_soft_cap"}  # any finite number is valid
    computed = {"max_merge_groups", "max_partials", "max_shared_tokens"}
    assert {*spec, *config} - refused <= doubles | computed


@pytest.mark.parametrize("op, step", [(attention, 1), (append_kv, 7), (plan, 7)])
def test_words_of_the_problem(op, step):
    """Each call is compiled, so there are few values, and few words for some handlers."""
    words = np.asarray(SPEC.problem.words, np.int64)
    assert len(words) == len(WORDS) + 2  # the numbers of words of transforms of k and v
    assert sentence_of(lambda: op(words, SPEC.workspace_words)) is None
    for i, name in list(enumerate(WORDS))[1::step]:
        other = words.copy()
        other[i] = 2**62 if name != "sm_scale" else 0x7FF << 52
        sentence = sentence_of(lambda: op(other, SPEC.workspace_words))  # noqa: B023
        if name not in ("tile_q_2", "logits_soft_cap"):
            assert f"{op.__name__}: attribute problem: {name}: expected" in sentence


@OPS
def test_other_numbers_of_words(op):
    words = np.asarray(SPEC.problem.words, np.int64)
    for bad in (words[:0], words[:1], words[:-1], np.append(words, 0)):
        assert "attribute problem" in sentence_of(lambda: op(bad, SPEC.workspace_words))  # noqa: B023


def test_random_words():
    """Several words at once, some with values from other offsets."""
    rng = np.random.default_rng(0)
    words = np.asarray(SPEC.problem.words, np.int64)
    for _ in range(20):
        other = words.copy()
        for i in rng.integers(1, len(words), rng.integers(1, 5)):
            other[i] = rng.choice([*VALUES, *words[1:]])
        sentence = sentence_of(lambda: attention(other, SPEC.workspace_words))  # noqa: B023
        assert sentence is None or "attention: " in sentence


def test_attributes_of_merge():
    def merge(dtype, **changed):
        o = np.ones((2, 3, 4, 8), f32)
        call = jax.ffi.ffi_call("jax_attn_merge_states", (struct((3, 4, 8)), struct((3, 4))))
        return lambda: call(o, o[..., 0], arch=0, dtype=dtype, poison=False, **changed)

    assert sentence_of(merge(2)) is None
    for dtype in (-1, 3, 4, 2**31, 2**62, -(2**63)):
        words = f"merge_states: attribute dtype: expected 0 to 2, got {dtype}"
        assert words in sentence_of(merge(dtype))
    for dtype in (0, 1):
        assert "merge_states: o_parts: expected" in sentence_of(merge(dtype))


def test_the_backward_pass_of_what_has_none():
    """Fresh keys, for example, would be read from pages."""
    spec = dataclasses.replace(SPEC, share_prefixes=False, fresh_kv=True)
    rows = np.ones(spec.o_shape[:2], f32)
    operands = BackwardOperands(
        q=np.ones(spec.q_shape, f32),
        k=np.ones(K_SHAPE, f32),
        v=np.ones(V_SHAPE, f32),
        plan_buffer=np.zeros(spec.plan_words, np.int32),
        layer=np.int32(0),
        lse=rows,
        d=rows,
        d_o=np.ones(spec.o_shape, f32),
    )
    sentence = sentence_of(lambda: ffi.backward(operands, spec))
    assert "attention's backward pass: spec: " in sentence


def test_a_tampered_export_is_refused():
    """The attribute's words are in the blob unchanged."""

    def attend(q, k, v, buffer):
        import jax_attn as ja

        return ja.attention(q, k, v, ja.AttentionPlan(buffer, SPEC))

    arrays = np.ones(SPEC.q_shape, f32), np.ones(K_SHAPE[1:], f32), np.ones(V_SHAPE[1:], f32)
    checks = [jax.export.DisabledSafetyCheck.custom_call("jax_attn_attention")]
    exported = jax.export.export(jax.jit(attend), disabled_checks=checks)(*arrays, PLAN.buffer)
    blob = exported.serialize()
    words = np.asarray(SPEC.problem.words, np.int64)
    begin = blob.find(words.tobytes())
    assert begin >= 0, "the blob keeps the words in another form"
    place = begin + 8 * WORDS.index("num_tiles")
    other = blob[:place] + np.int64(99).tobytes() + blob[place + 8 :]
    sentence = sentence_of(
        lambda: jax.export.deserialize(bytearray(other)).call(*arrays, PLAN.buffer)
    )
    assert "attention: attribute problem: num_tiles: expected 1 to 3, got 99" in sentence


@pytest.mark.parametrize(
    "changed, name",
    [
        ({"tile_q_0": 0}, "tile_q_0"),
        ({"num_tiles": 4}, "num_tiles"),
        ({"kv_cost_1": 0}, "kv_cost_1"),
        ({"heads_per_unit": 0}, "heads_per_unit"),
        ({"max_items": 2**40}, "max_items"),
    ],
)
def test_a_problem_is_checked_where_it_is_made(changed, name):
    with pytest.raises(ValueError, match=f"^AttentionSpec: {name}: expected"):
        _core.Problem(SPEC.problem.spec, SPEC.kernel_config | changed)


def test_words_of_a_program():
    """Any words give an error sentence or a program that runs within its bounds."""
    variant = ja.Variant(
        logits=lambda score, at, slopes: score - slopes[at.head] * (at.q_pos - at.kv_pos),
        mask=lambda at, slopes: slopes[at.kv_row] < 2,
        operands={"slopes": np.ones(4, f32)},
    )
    planned = make_plan(CASE, variant=variant)
    words = np.asarray(planned.spec.problem.words, np.int64)
    begin = len(words) - len(variant.words)
    call = jax.ffi.ffi_call(
        "jax_attn_attention",
        (
            struct(SPEC.o_shape),
            struct(SPEC.o_shape[:2]),
            struct((planned.spec.workspace_words,), jnp.int32),
        ),
    )
    arrays = np.ones(SPEC.q_shape, f32), np.ones(K_SHAPE, f32), np.ones(V_SHAPE, f32)

    def run(words, *operands):
        operands = operands or (np.zeros(0, f32), np.ones(4, f32))
        inputs = (*arrays, planned.buffer, np.int32(0), *operands)
        return sentence_of(lambda: call(*inputs, problem=words, poison=False))

    assert run(words) is None
    refused = 0
    rng = np.random.default_rng(0)
    for i in range(begin, len(words), 3):
        other = words.copy()
        other[i] = rng.choice([-1, 0, 1, 3, 8, 11, 127, 2**31, 2**62])
        sentence = run(other)
        assert sentence is None or "attribute problem: program: " in sentence or "oper" in sentence
        refused += sentence is not None
    assert refused > 10
    empty, slopes = np.zeros(0, f32), np.ones(4, f32)
    for operands in ((empty,), (empty, slopes, slopes), (empty, empty), (empty, slopes[None])):
        assert "attention: " in run(words, *operands)
    assert "operand 0" in run(words, empty, np.ones(4, np.int32))
    shared = words.copy()
    shared[WORDS.index("share_prefixes")] = 1
    assert "share_prefixes: expected 0 with a variant" in run(shared)
