"""linear_attention against the token-by-token recurrence in float64."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_attn as ja
from helpers.backends import on_every_backend, on_every_isa, on_every_platform
from helpers.linear_cases import CASES, LinearCase
from jax_attn import _core, _environment
from jax_attn._ops import linear_attention, linear_kernel
from jax_attn._ops.linear_kernel import LinearCall, LinearOperands
from jax_attn._xla import jit

TOLERANCE = {"float32": 3e-5, "float16": 4e-3, "bfloat16": 3e-2}
NAMES = ("q", "k", "v", "g", "beta", "states")


@jax.jit
def run(arrays, plan):
    return ja.linear_attention(*(arrays[name] for name in NAMES), plan)


def assert_near(found, expected, tolerance, what=""):
    found = np.asarray(found, np.float64)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected), err_msg=what)
    size = np.nanmax(np.abs(expected), initial=1.0)
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * size, err_msg=what)


@on_every_backend
@pytest.mark.parametrize("name", CASES)
def test_against_the_recurrence(name, backend):
    case = CASES[name]
    arrays = case.arrays()
    o, states = run(arrays, case.plan())
    expected = ja.reference.linear_attention(
        *(arrays[n] for n in NAMES), spec=case.spec, **case.batch
    )
    assert o.dtype == case.dtype and states.dtype == case.state_dtype
    assert_near(o, expected[0], TOLERANCE[case.dtype], "o")
    state_tolerance = max(TOLERANCE[case.state_dtype], 3e-5)
    if backend.platform == "gpu" and case.dtype != "float32":
        state_tolerance = (
            TOLERANCE[case.dtype] / 3
        )  # what chunks add to a state is a 16-bit product
    assert_near(states, expected[1], state_tolerance, "states")
    again = run(arrays, case.plan())
    assert np.asarray(o).tobytes() == np.asarray(again[0]).tobytes()


@pytest.mark.parametrize(
    "case",
    [
        *(CASES[name] for name in ("mixed", "kda_checkpoints", "drafts", "drafts_in_order")),
        LinearCase((1,), (0,), (0,), num_slots=1, padding=0),
        LinearCase((3, 2), (0, -1), (0, -1), num_slots=1, max_qo_len=3),
    ],
)
def test_the_form_in_jnp_against_the_recurrence(case):
    """What platforms without kernels run, and what second derivatives go through."""
    call = LinearCall("linear_attention", case.spec, "t", "s", linear_attention._in_jnp)
    arrays, plan = case.arrays(), case.plan()
    operands = LinearOperands(**arrays)
    found = jax.jit(functools.partial(linear_attention._in_jnp, call))(
        operands, jnp.asarray(plan.buffer), jnp.int32(0)
    )
    expected = ja.reference.linear_attention(
        *(arrays[n] for n in NAMES), spec=case.spec, **case.batch
    )
    for what, a, b in zip(("o", "states"), found, expected, strict=True):
        assert_near(a, b, TOLERANCE[case.dtype], what)


@pytest.mark.parametrize("name", ["mixed", "checkpoints", "drafts", "nothing", "kda_checkpoints"])
def test_plan_inside_jit_has_the_same_bits(name):
    case = CASES[name]
    batch = {key: jnp.asarray(value) for key, value in case.batch.items()}
    traced = jax.jit(lambda batch: ja.plan_linear_attention(case.spec, **batch).buffer)(batch)
    np.testing.assert_array_equal(case.plan().buffer, traced)


@on_every_platform
def test_layers_of_a_stacked_pool_in_a_scan(backend):
    case = CASES["mixed"]
    arrays, plan = case.arrays(), case.plan()
    pool = jnp.stack([arrays["states"], arrays["states"] * 2, arrays["states"] * 3])

    def step(pool, layer):
        o, pool = ja.linear_attention(*(arrays[n] for n in NAMES[:-1]), pool, plan, layer=layer)
        return pool, o

    pool, o = jax.jit(lambda pool: jax.lax.scan(step, pool, jnp.arange(3)))(pool)
    for layer in range(3):
        scaled = {**arrays, "states": arrays["states"] * np.float32(layer + 1)}
        expected = run(scaled, plan)
        np.testing.assert_allclose(o[layer], expected[0], atol=1e-5)
        np.testing.assert_allclose(pool[layer], expected[1], atol=1e-5)


@on_every_platform
def test_decodes_in_a_while_loop_plan_inside(backend):
    case = LinearCase((1, 1), (0, 1), (0, 1), padding=0, max_qo_len=1)
    arrays = case.arrays()

    def step(carry):
        i, states = carry
        plan = ja.plan_linear_attention(case.spec, jnp.arange(3) + 0 * i, [0, 1], [0, 1])
        _, states = ja.linear_attention(*(arrays[n] for n in NAMES[:-1]), states, plan)
        return i + 1, states

    _, found = jax.jit(lambda s: jax.lax.while_loop(lambda c: c[0] < 3, step, (0, s)))(
        arrays["states"]
    )
    states = arrays["states"]
    for _ in range(3):
        _, states = ja.reference.linear_attention(
            *(arrays[n] for n in NAMES[:-1]), states, spec=case.spec, **case.batch
        )
    assert_near(found, states, 1e-5)


@on_every_platform
def test_nan_stays_in_its_request(backend):
    case = CASES["mixed"]
    arrays = case.arrays()
    clean, clean_states = run(arrays, case.plan())
    for name in ("q", "k", "v", "g", "beta"):
        arrays = case.arrays()
        arrays[name][2] = np.nan  # a token of request 0
        o, states = run(arrays, case.plan())
        np.testing.assert_array_equal(o[5:], clean[5:])
        np.testing.assert_array_equal(np.asarray(states)[[0, 2]], clean_states[jnp.array([0, 2])])
        assert np.isnan(np.asarray(o[2])).any()


@on_every_platform
def test_chunks_of_a_prompt_are_a_prompt(backend):
    whole = LinearCase((90,), (-1,), (0,), padding=0)
    arrays = whole.arrays()
    expected, expected_states = run(arrays, whole.plan())
    plan = ja.plan_linear_attention
    states, parts = arrays["states"], []
    for begin, end in ((0, 17), (17, 18), (18, 90)):
        rolled = {n: None if x is None else np.roll(x, -begin, axis=0) for n, x in arrays.items()}
        now = plan(whole.spec, [0, end - begin], [-1 if begin == 0 else 0], [0])
        o, states = run({**rolled, "states": states}, now)
        parts.append(o[: end - begin])
    np.testing.assert_allclose(np.concatenate(parts), expected, atol=2e-5)
    np.testing.assert_allclose(states[0], expected_states[0], atol=2e-5)


@on_every_isa
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_no_cut_changes_bits_if_tokens_are_computed_one_by_one(backend, decay):
    whole = LinearCase((90,), (-1,), (0,), padding=0, decay=decay)
    arrays, bits = whole.arrays(), {}
    for chunk_tokens in (1, None):
        spec = dataclasses.replace(whole.spec, chunk_tokens=chunk_tokens)
        for cuts in ((0, 90), (0, 17, 18, 19, 90)):
            states, parts = arrays["states"], []
            for begin, end in itertools.pairwise(cuts):
                rolled = {
                    n: None if x is None else np.roll(x, -begin, axis=0) for n, x in arrays.items()
                }
                slots = [-1 if begin == 0 else 0], [0]
                plan = ja.plan_linear_attention(spec, [0, end - begin], *slots)
                o, states = run({**rolled, "states": states}, plan)
                parts.append(np.asarray(o)[: end - begin])
            bits[chunk_tokens, cuts[1]] = np.concatenate(parts).tobytes(), states.tobytes()
    assert bits[1, 90] == bits[1, 17]
    assert bits[None, 90] != bits[None, 17]  # why there is a choice


@on_every_platform
def test_a_request_alone_has_the_same_bits(backend):
    case = CASES["mixed"]
    arrays, spec = case.arrays(), case.spec
    o, _ = run(arrays, case.plan())
    alone = ja.plan_linear_attention(spec, [0, 70], [0], [0])
    rolled = {
        n: x if n == "states" or x is None else np.roll(x, -5, axis=0) for n, x in arrays.items()
    }
    np.testing.assert_array_equal(run(rolled, alone)[0][:70], o[5:75])


@on_every_platform
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_bits_depend_on_no_other_request(backend, decay, dtype):
    """A long prompt, which devices may split, among others in any order; so is each of them."""
    lens, reads, writes = (300, 40, 1, 70), (-1, 3, 0, 5), (1, 2, 0, 5)
    case = LinearCase(lens, reads, writes, dim_k=64, dim_v=64, decay=decay, dtype=dtype)
    arrays, begins, found = case.arrays(), case.qo_indptr, {}
    for order in ((0,), (1,), (2,), (3,), (0, 1, 2, 3), (3, 2, 1, 0), (1, 0), (2, 3, 0)):
        rows = np.concatenate([np.arange(begins[i], begins[i + 1]) for i in order])
        padding = np.full(case.spec.max_tokens - len(rows), begins[-1])  # NaN
        at = np.concatenate([rows, padding])
        given = {n: x if n == "states" else x[at] for n, x in arrays.items()}
        ends = np.cumsum([0, *(lens[i] for i in order)])
        slots = [reads[i] for i in order], [writes[i] for i in order]
        o, states = run(given, ja.plan_linear_attention(case.spec, ends, *slots))
        for i, begin, end in zip(order, ends, ends[1:], strict=False):
            bits = np.asarray(o)[begin:end].tobytes(), np.asarray(states)[writes[i]].tobytes()
            assert found.setdefault(i, bits) == bits, (i, order)


BAD = {
    "offsets": ({"qo_indptr": [0, 3, 2]}, "qo_indptr[2]: expected offsets from 0"),
    "begin": ({"qo_indptr": [1, 2, 3]}, "qo_indptr[0]: expected offsets from 0"),
    "tokens": ({"qo_indptr": [0, 3, 12]}, "raise max_tokens of the spec, got 12"),
    "length": ({"qo_indptr": [0, 6, 6]}, "raise max_qo_len of the spec, got 6"),
    "read": ({"read_slots": [0, 4]}, "read_slots[1]: expected a slot in [-1, num_slots), got 4"),
    "write": ({"write_slots": [-2, 1]}, "write_slots[0]: expected a slot in [-1"),
    "commit": ({"commit_lens": [4, 0]}, "commit_lens[0]: expected a number of tokens"),
    "request": ({"checkpoints": [[2, 0, 3]]}, "checkpoints[0]: expected a request"),
    "position": ({"checkpoints": [[0, 4, 3]]}, "checkpoints[0]: expected a position"),
    "slot": ({"checkpoints": [[0, 1, 4]]}, "checkpoints[0]: expected a slot"),
    "twice": ({"write_slots": [1, 1]}, "expected each slot written once, got slot 1 twice"),
    "marked": ({"checkpoints": [[0, 1, 1]]}, "expected each slot written once, got slot 1 twice"),
    "read_by_other": ({"read_slots": [0, 0], "write_slots": [0, -1]}, "no other request writes"),
    "entries": ({"read_slots": [0]}, "read_slots: expected 2 entries"),
    "many": ({"qo_indptr": [0] * 4}, "read_slots: expected 3 entries"),
    "form": ({"checkpoints": [[0, 1]]}, "expected [num_checkpoints, 3]"),
    "marks": ({"checkpoints": [[0, 1, -1]] * 2}, "raise max_checkpoints"),
}
GOOD = {"qo_indptr": [0, 3, 5], "read_slots": [0, -1], "write_slots": [0, 1]}


@pytest.fixture(scope="module")
def small():
    return ja.LinearAttentionSpec(
        8, 2, 4, max_qo_len=5, max_checkpoints=1, num_qk_heads=1, num_v_heads=1, head_dim_k=8,
        head_dim_v=8, dtype="float32",
    )  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_plans(small, name):
    change, sentence = BAD[name]
    with pytest.raises(ValueError, match="^plan_linear_attention: ") as error:
        ja.plan_linear_attention(small, **GOOD | change)
    assert sentence in str(error.value) and str(error.value).count("\n") == 0
    assert "qo_indptr" in change and len(change["qo_indptr"]) == 4 or error.value.args


@on_every_platform
def test_bad_plan_inside_jit_writes_nothing(small, backend):
    arrays = {n: np.ones((8, 1, 8), np.float32) for n in ("q", "k", "v")}
    arrays |= {n: np.zeros((8, 1), np.float32) for n in ("g", "beta")}
    arrays["states"] = np.ones((4, 1, 8, 8), np.float32)

    @jax.jit
    def planned(write, arrays):
        plan = ja.plan_linear_attention(small, jnp.array([0, 3, 5]), [-1, -1], write)
        return plan, run(arrays, plan)

    plan, (o, states) = planned(jnp.array([1, 1]), arrays)
    assert plan.fault().startswith("plan_linear_attention: write_slots")
    assert np.isnan(o).all() and (states == 1).all()
    plan, (o, states) = planned(jnp.array([1, 2]), arrays)
    assert plan.fault() == "" and np.isfinite(o).all() and not (states == 1).all()


@on_every_platform
def test_check_looks_at_data_on_every_device(small, backend, monkeypatch):
    monkeypatch.setattr(_environment, "check", True)
    few = np.ones((8, 1), np.float32)
    arrays = [*[np.ones((8, 1, 8), np.float32)] * 3, few, few, np.ones((2, 4, 1, 8, 8), np.float32)]

    @jax.jit
    def call(buffer, layer):
        plan = ja.plan_linear_attention(small, **GOOD)
        plan = dataclasses.replace(plan, buffer=buffer)
        return ja.linear_attention(*arrays, plan, layer=layer)

    good = ja.plan_linear_attention(small, **GOOD).buffer
    jax.block_until_ready(call(good, 1))
    wrong, faulty = good.copy(), good.copy()
    wrong[small.chunks_begin + 3] = 4
    faulty[3:5] = 5, 1
    for buffer, layer, words in (
        (good, 2, "layer: expected an index"),
        (wrong, 0, "plan: expected chunk 0 to name rows and slots"),
        (faulty, 0, r"write_slots\[1\]: expected a slot"),
    ):
        with pytest.raises(Exception, match=f"linear_attention: .*{words}"):
            jax.block_until_ready(call(buffer, layer))
            jax.effects_barrier()


def test_bad_arrays(small):
    plan = ja.plan_linear_attention(small, **GOOD)
    x, few = np.ones((8, 1, 8), np.float32), np.ones((8, 1), np.float32)
    good = {
        "q": x,
        "k": x,
        "v": x,
        "g": few,
        "beta": few,
        "states": np.ones((4, 1, 8, 8), np.float32),
    }
    for change, sentence in (
        ({"q": x[:7]}, "linear_attention: q: expected float32[8, 1, 8]"),
        ({"v": x.astype(np.float16)}, "linear_attention: v: expected float32"),
        ({"g": None}, "linear_attention: g: expected an array for a spec with decay='head'"),
        ({"beta": x}, "linear_attention: beta: expected float32[8, 1]"),
        ({"states": good["states"][:3]}, "linear_attention: states: expected float32[4, 1, 8, 8]"),
        ({"layer": 0}, "linear_attention: states: expected [num_layers, 4, 1, 8, 8]"),
    ):
        with pytest.raises(ValueError) as error:
            ja.linear_attention(**good | change, plan=plan)
        assert sentence in str(error.value)
    with pytest.raises(TypeError, match=r"linear_attention: plan: expected a plan"):
        ja.linear_attention(**good, plan=None)
    for number in (0, 65):
        with pytest.raises(
            ValueError, match=f"StateSpec: chunk_tokens: expected 1 to 64, .* {number}"
        ):
            ja.StateSpec(8, 2, 4, chunk_tokens=number)
    with pytest.raises(NotImplementedError, match="head_dim_k: multiples of 8"):
        ja.LinearAttentionSpec(8, 2, 4, num_qk_heads=1, num_v_heads=1, head_dim_k=12, head_dim_v=8)


def test_gradients_against_differences():
    case = LinearCase((5, 0, 9), (-1, 3, 0), (1, 2, 0), decay="head", padding=2)
    arrays, plan = case.arrays(), case.plan()
    arrays = {n: np.nan_to_num(x) for n, x in arrays.items()}
    rng = np.random.default_rng(1)
    weights = [rng.standard_normal(x.shape) for x in (arrays["v"], arrays["states"])]

    @jax.jit
    @jax.grad
    def gradients(arrays):
        found = run(arrays, plan)
        return sum((w.astype(np.float32) * x).sum() for w, x in zip(weights, found, strict=True))

    def loss(arrays):
        found = ja.reference.linear_attention(
            *(arrays[n] for n in NAMES), spec=case.spec, **case.batch
        )
        return sum((w * x).sum() for w, x in zip(weights, found, strict=True))

    found = gradients(arrays)
    for name in NAMES:
        way = rng.standard_normal(arrays[name].shape)
        moved = [
            {**arrays, name: arrays[name].astype(np.float64) + s * 1e-5 * way} for s in (1, -1)
        ]
        slope = (loss(moved[0]) - loss(moved[1])) / 2e-5
        assert (np.asarray(found[name], np.float64) * way).sum() == pytest.approx(slope, rel=1e-3)


def weighted(found, weights):
    return sum(jnp.where(w == 0, 0, w * x).sum() for w, x in zip(weights, found, strict=True))


@jax.jit
@jax.grad
def gradients_of_call(arrays, plan, weights):
    return weighted(run(arrays, plan), weights)


@functools.cache
def gradients_in_jnp(name):
    """Arrays of a case, weights of its results, and gradients of their sum without kernels."""
    case, rng = CASES[name], np.random.default_rng(1)
    call = LinearCall("linear_attention", case.spec, "t", "s", linear_attention._in_jnp)
    arrays, buffer = case.arrays(), jnp.asarray(case.plan().buffer)
    weights = [rng.standard_normal(arrays[n].shape).astype(np.float32) for n in ("v", "states")]
    written = {*case.write, *(slot for _, _, slot in case.checkpoints)}
    for slot in range(case.num_slots):
        if slot not in written | {*case.read}:
            weights[1][slot] = 0  # its state is NaN

    @jax.jit
    @jax.grad
    def gradients(arrays):
        operands = LinearOperands(**arrays)
        return weighted(linear_attention._in_jnp(call, operands, buffer, jnp.int32(0)), weights)

    clean = {n: None if x is None else np.nan_to_num(x) for n, x in arrays.items()}
    return arrays, weights, gradients(clean)


@on_every_isa
@pytest.mark.parametrize("name", ["mixed", "grouped", "mamba", "kda", "checkpoints", "decode"])
def test_gradients_of_kernels(name, backend):
    """Against those of the same call in jax.numpy, which other platforms run."""
    arrays, weights, expected = gradients_in_jnp(name)
    found = gradients_of_call(arrays, CASES[name].plan(), weights)
    for which in NAMES:
        assert_near(found[which], np.asarray(expected[which], np.float64), 1e-4, which)


@on_every_platform
@pytest.mark.parametrize("name", ["qwen", "bf16_chunks", "mamba_chunks", "kda_chunks"])
def test_gradients_of_16_bits(name, backend):
    """By norms: chunks round the operands of products."""
    arrays, weights, expected = gradients_in_jnp(name)
    before = _core.jit_stats()["linear_gradient_launches"]
    found, again = (gradients_of_call(arrays, CASES[name].plan(), weights) for _ in range(2))
    assert (_core.jit_stats()["linear_gradient_launches"] > before) == (backend.platform == "gpu")
    for which in NAMES:
        x, y = (np.asarray(of[which], np.float64) for of in (found, expected))
        assert np.linalg.norm(x - y) <= 1.5e-2 * np.linalg.norm(y), which
        assert np.asarray(found[which]).tobytes() == np.asarray(again[which]).tobytes(), which


def test_second_derivatives():
    """All orders of forward and reverse, and the slope of the gradient."""
    rng = np.random.default_rng(3)
    q, k, v = (jnp.asarray(rng.standard_normal((1, 5, 1, 8)), "float32") for _ in range(3))
    g, beta = -jnp.ones((1, 5, 1)), jnp.full((1, 5, 1), 0.5)

    def loss(x):
        return (ja.gated_delta_rule(q * x, k * x / 4, v * x, g * x, beta * x)[0] ** 2).sum()

    first = jax.jit(jax.grad(loss))
    expected = (first(1.01) - first(0.99)) / 0.02
    for second in (jax.grad(jax.grad(loss)), jax.jacfwd(first), jax.grad(jax.jacfwd(loss))):
        np.testing.assert_allclose(jax.jit(second)(1.0), expected, rtol=2e-3)


def test_a_gpu_is_asked_for_the_gradients_that_are_called(monkeypatch):
    """By traces: what decides on kernels of gradients, and their call, mean the same problem."""
    asked = []
    problem = jit.linear_problem

    def recorded(*arrays, target, **numbers):
        asked.append((target, problem(*arrays, target=target, **numbers)))
        return asked[-1][1]

    monkeypatch.setattr(linear_kernel, "gpu_target", lambda: (90, 132))
    monkeypatch.setattr(jit, "linear_problem", recorded)

    def loss(q, k, v, g, beta):
        return ja.gated_delta_rule(q, k, v, g, beta)[0].astype(jnp.float32).sum()

    def found(dtype, seq, *channels):
        rows = [jax.ShapeDtypeStruct((2, seq, heads, 64), dtype) for heads in (2, 2, 4)]
        factors = [jax.ShapeDtypeStruct((2, seq, 4, *of), jnp.float32) for of in (channels, ())]
        asked.clear()
        jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2, 3, 4)))(*rows, *factors)
        words = [words for target, words in asked if target == (90, 132)]
        assert all(each == words[0] for each in words)
        has_kernels = bool(_core.linear_gradient_sources(words[0]))
        assert len(words) == 2 + has_kernels, "forward, the question, and gradients"
        return has_kernels

    assert found("bfloat16", 130) and found("bfloat16", 130, 64)
    assert not found("bfloat16", 1) and not found("float32", 130)


def test_gradients_never_cross_requests():
    case = CASES["mixed"]
    arrays, plan = case.arrays(), case.plan()

    def loss(arrays):
        return run(arrays, plan)[0][:5].sum()  # request 0

    found = jax.grad(loss)(arrays)
    for name in ("q", "k", "v", "g", "beta"):
        assert np.isfinite(found[name]).all(), name
        assert (np.asarray(found[name][5:]) == 0).all(), name
        assert (np.asarray(found[name][:5]) != 0).any(), name
    assert (np.asarray(found["states"]) == 0).all()


def test_vmap():
    case = CASES["mixed"]
    plan, both = case.plan(), [case.arrays(seed) for seed in (1, 2)]
    stacked = {n: np.stack([arrays[n] for arrays in both]) for n in NAMES}
    o, states = jax.vmap(lambda arrays: run(arrays, plan))(stacked)
    for i, arrays in enumerate(both):
        expected = run(arrays, plan)
        np.testing.assert_allclose(o[i], expected[0], atol=1e-5)
        np.testing.assert_allclose(states[i], expected[1], atol=1e-5)
