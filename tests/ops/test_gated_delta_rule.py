"""gated_delta_rule: the drop-in on [batch, seq, heads, dim]."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_attn as ja
from helpers.backends import on_every_platform
from helpers.mesh_checks import run_on_cpus
from helpers.paths import DATA
from jax_attn import _core
from jax_attn._plan.state_plan import words_of_sequences


def arrays_of(batch=2, seq=70, qk=2, v=4, dim_k=8, dim_v=16, channel=False):
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    g = -np.abs(draw(batch, seq, v, *[dim_k] * channel)) * 0.3
    beta = 1 / (1 + np.exp(-draw(batch, seq, v)))
    q, k = draw(batch, seq, qk, dim_k), draw(batch, seq, qk, dim_k)
    return q, k, draw(batch, seq, v, dim_v), g, beta, draw(batch, v, dim_k, dim_v)


@jax.jit
def run(q, k, v, g, beta, state):
    return ja.gated_delta_rule(q, k, v, g, beta, initial_state=state, l2_norm=True)


def reference(q, k, v, g, beta, state):
    batch, seq = q.shape[:2]
    spec = ja.LinearAttentionSpec(
        batch * seq, batch, batch, num_qk_heads=q.shape[2], num_v_heads=v.shape[2],
        head_dim_k=q.shape[3], head_dim_v=v.shape[3], l2_norm=True, dtype="float32",
        decay="channel" if g.ndim == 4 else "head",
    )  # fmt: skip
    flat = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v, g, beta)]
    slots = np.arange(batch)
    o, states = ja.reference.linear_attention(
        *flat, state, seq * np.arange(batch + 1), slots, slots, spec=spec
    )
    return o.reshape(v.shape), states


@on_every_platform
@pytest.mark.parametrize("seq,channel", [(1, False), (63, False), (129, False), (35, True)])
def test_against_the_recurrence(seq, channel, backend):
    arrays = arrays_of(seq=seq, channel=channel)
    for found, expected in zip(run(*arrays), reference(*arrays), strict=True):
        np.testing.assert_allclose(found, expected, atol=3e-5)


RECORDED = np.load(DATA / "linear_attention.npz")


@on_every_platform
@pytest.mark.parametrize("name", sorted({key.split("/")[0] for key in RECORDED}))
def test_against_transformers(name, backend):
    """tests/data/make_linear_attention.py has recorded its torch functions."""
    case = {k.split("/")[1]: RECORDED[k] for k in RECORDED if k.startswith(f"{name}/")}
    o, state = ja.gated_delta_rule(
        *(case[n] for n in ("q", "k", "v", "g", "beta")),
        initial_state=case.get("state"),
        l2_norm=bool(case["l2_norm"]),
    )
    np.testing.assert_allclose(o, case["o"], atol=2e-5)
    np.testing.assert_allclose(state, case["final_state"], atol=2e-5)


@on_every_platform
def test_no_tokens(backend):
    arrays = arrays_of(seq=0)
    o, state = run(*arrays)
    assert o.shape == (2, 0, 4, 16)
    np.testing.assert_array_equal(state, arrays[-1])


@on_every_platform
@pytest.mark.parametrize("seq", [65, 150])
def test_gradients_of_a_decay_a_channel(seq, backend):
    """In bfloat16, on GPUs by kernels, against those of the recurrence in float32; by norms."""
    shapes = {"seq": seq, "dim_k": 128, "dim_v": 64, "channel": True}
    q, k, v, *rest = arrays_of(**shapes)
    given = (*(jnp.asarray(x, "bfloat16") for x in (q, k, v)), *rest)

    def by_tokens(q, k, v, g, beta, state):
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        q, k = (x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
        q, k = (jnp.repeat(x, v.shape[2] // x.shape[2], axis=2) for x in (q * 128**-0.5, k))

        def step(state, token):
            q, k, v, g, beta = token
            state = jnp.exp(g)[..., None] * state
            change = beta[..., None] * (v - jnp.einsum("bhd,bhde->bhe", k, state))
            state += k[..., None] * change[..., None, :]
            return state, jnp.einsum("bhd,bhde->bhe", q, state)

        tokens = [jnp.swapaxes(x, 0, 1) for x in (q, k, v, g, beta)]
        state, o = jax.lax.scan(step, state, tokens)
        return jnp.swapaxes(o, 0, 1), state

    weights = [np.random.default_rng(1).standard_normal(x.shape) for x in (v, rest[-1])]

    def loss(of, *arrays):
        return sum((w * x).sum() for w, x in zip(weights, of(*arrays), strict=True))

    with jax.default_matmul_precision("highest"):
        expected = jax.jit(jax.grad(functools.partial(loss, by_tokens), range(6)))(*given)
    before = _core.jit_stats()["linear_gradient_launches"]
    found = jax.jit(jax.grad(functools.partial(loss, run), range(6)))(*given)
    assert (_core.jit_stats()["linear_gradient_launches"] > before) == (backend.platform == "gpu")
    for which, x, y in zip(("q", "k", "v", "g", "beta", "state"), found, expected, strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.linalg.norm(x - y) <= 1.5e-2 * np.linalg.norm(y), which


@on_every_platform
def test_vmap_and_remat(backend):
    arrays = arrays_of(batch=4)

    def loss(*arrays):
        o, state = run(*arrays)
        return jnp.sin(o).sum() + jnp.cos(state).sum()

    plain = jax.jit(jax.grad(loss, range(6)))(*arrays)
    policy = jax.checkpoint_policies.save_only_these_names("linear_attention_o")
    remat = jax.jit(jax.grad(jax.checkpoint(loss, policy=policy), range(6)))(*arrays)
    split = [x.reshape(2, 2, *x.shape[1:]) for x in arrays]
    mapped = jax.jit(jax.vmap(jax.grad(loss, range(6))))(*split)
    for a, b, c in zip(plain, remat, mapped, strict=True):
        assert np.isfinite(a).all() and (np.asarray(a) != 0).any()
        np.testing.assert_allclose(a, b, atol=1e-4)
        np.testing.assert_allclose(a, np.reshape(c, a.shape), atol=1e-4)


def test_bad_input():
    q, k, v, g, beta, state = arrays_of()
    for arrays, sentence in (
        ((q[0], k, v, g, beta, state), "q: expected float32[batch, seq, heads, dim]"),
        ((q, k[:, :3], v, g, beta, state), "k: expected [2, 70, 2, 8] as in q"),
        ((q, k, v, g[:, 1:], beta, state), "g: expected [2, 70, 4] or [2, 70, 4, 8]"),
        ((q, k, v, g, beta, state[:1]), "initial_state: expected [2, 4, 8, 16]"),
        ((q, k, v[:, :, :3], g[:, :, :3], beta[:, :, :3], state[:, :3]), "num_v_heads"),
    ):
        with pytest.raises(ValueError) as error:
            run(*arrays)
        assert sentence in str(error.value)


def check_mesh_of_batch_and_heads():
    """Values and gradients on four devices. No device gets what another has."""
    mesh = jax.make_mesh((2, 2), ("batch", "heads"))
    arrays = arrays_of()
    specs = (*[P("batch", None, "heads")] * 5, P("batch", "heads"))
    placed = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True)]

    @jax.jit
    def both(*arrays):
        loss = lambda *x: sum(jnp.sum(jnp.sin(part)) for part in run(*x))  # noqa: E731
        return run(*arrays), jax.grad(loss, tuple(range(6)))(*arrays)

    text = both.lower(*placed).compile().as_text()
    assert "all-gather" not in text and "collective-permute" not in text
    found, expected = (jax.tree.leaves(both(*x)) for x in (placed, arrays))
    for a, b in zip(found, expected, strict=True):
        assert len(a.sharding.device_set) == 4
        np.testing.assert_allclose(a, b, atol=2e-5 * max(1, np.abs(b).max()))


def test_mesh_of_batch_and_heads():
    run_on_cpus(4, "import test_gated_delta_rule as t; t.check_mesh_of_batch_and_heads()")


def test_sequences_are_cut_into_chunks():
    words, begin, num = words_of_sequences(2, 130, 64)
    found = np.asarray(words)[begin:].reshape(num, 6).tolist()
    assert found == [
        [begin, length, int(first), slot, slot if last else -1, slot]
        for slot in range(2)
        for begin, length, first, last in (
            (130 * slot, 64, True, False),
            (130 * slot + 64, 64, False, False),
            (130 * slot + 128, 2, False, True),
        )
    ]
    whole, begin, num = words_of_sequences(2, 130, 130)
    assert (num, np.asarray(whole)[begin:].tolist()) == (
        2,
        [0, 130, 1, 0, 0, 0, 130, 130, 1, 1, 1, 1],
    )
