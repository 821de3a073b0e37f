"""The operations under JAX's transformations: each works, or refuses in one sentence."""

import os
import subprocess
import sys
import textwrap

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import jax_attn as ja
from helpers.attention_cases import Case, build
from helpers.backends import on_every_platform
from helpers.checking import assert_same_bits
from helpers.jaxprs import equations
from helpers.mesh_checks import run_on_cpus

CASE = Case("", (1, 17, 5), (300, 17, 40), num_layers=2)


def prepare(backend, case=CASE):
    batch = build(case)
    plan = ja.plan(backend.spec(**case.spec_fields()), **batch.lengths.plan_arguments())
    return plan, batch


@on_every_platform
def test_jit_and_eager_give_the_same_bits(backend):
    plan, b = prepare(backend)
    eager = ja.attention(b.q, b.k, b.v, plan, layer=1)
    jitted = jax.jit(ja.attention)(b.q, b.k, b.v, plan, layer=1)
    assert_same_bits("o", eager, jitted)


@on_every_platform
def test_ahead_of_time_compilation(backend):
    plan, b = prepare(backend)
    compiled = jax.jit(ja.attention).lower(b.q, b.k, b.v, plan, layer=jnp.int32(1)).compile()
    assert_same_bits(
        "o",
        compiled(b.q, b.k, b.v, plan, layer=jnp.int32(1)),
        ja.attention(b.q, b.k, b.v, plan, layer=1),
    )


@on_every_platform
def test_scan_over_layers(backend):
    plan, b = prepare(backend)
    k, v = (np.nan_to_num(x) for x in (b.k, b.v))
    k[0], v[0] = k[1][::-1], v[1][::-1]

    def body(total, layer):
        return total + ja.attention(b.q, k, v, plan, layer=layer), None

    o, _ = jax.jit(lambda: jax.lax.scan(body, jnp.zeros(b.q.shape), jnp.arange(2)))()
    want = ja.attention(b.q, k, v, plan, layer=0) + ja.attention(b.q, k, v, plan, layer=1)
    assert_same_bits("o", o, want)


@on_every_platform
def test_while_loop(backend):
    plan, b = prepare(backend)

    def loop(q):
        def body(state):
            i, q = state
            return i + 1, ja.attention(q, b.k, b.v, plan, layer=1)

        return jax.lax.while_loop(lambda state: state[0] < 3, body, (0, q))[1]

    want = b.q
    for _ in range(3):
        want = ja.attention(want, b.k, b.v, plan, layer=1)
    assert_same_bits("o", jax.jit(loop)(b.q), want)


def test_eval_shape_needs_no_data():
    spec = ja.AttentionSpec(
        8, 2, 64, 32, max_batch=9, max_qo_tokens=11, max_kv_pages=40, target="sm_90"
    )
    shape = jax.ShapeDtypeStruct
    plan = ja.AttentionPlan(shape((spec.plan_words,), jnp.int32), spec)
    pages = [shape((3, 50, 16, 2, d), jnp.bfloat16) for d in (64, 32)]
    new = [shape((11, 2, d), jnp.bfloat16) for d in (64, 32)]
    q = shape((11, 8, 64), jnp.bfloat16)

    def step(pages, new, q, plan, layer):
        pages = ja.append_kv(*pages, *new, plan, layer=layer)
        return pages, ja.attention(q, *pages, plan, layer=layer, return_lse=True)

    got_pages, (o, lse) = jax.eval_shape(step, pages, new, q, plan, shape((), jnp.int32))
    assert [p.shape for p in got_pages] == [p.shape for p in pages]
    assert (o.shape, o.dtype) == ((11, 8, 32), jnp.bfloat16)
    assert (lse.shape, lse.dtype) == ((11, 8), jnp.float32)
    o, lse = jax.eval_shape(
        ja.merge_states, shape((4, 3, 2, 8), jnp.float16), shape((4, 3, 2), jnp.float32)
    )
    assert (o.shape, o.dtype, lse.shape, lse.dtype) == ((3, 2, 8), jnp.float16, (3, 2), jnp.float32)


CACHED = textwrap.dedent(
    """
    import sys
    import jax, jax.numpy as jnp, numpy as np
    import jax.monitoring
    import jax_attn as ja

    hits = []
    jax.monitoring.register_event_listener(
        lambda event, **_: hits.append(event) if event.endswith("cache_hits") else None)
    spec = ja.AttentionSpec(4, 2, 64, dtype="float32", max_batch=2, max_qo_tokens=4, max_kv_pages=4)
    plan = ja.plan(spec, [0, 3], [40], [0, 3], [2, 0, 1])
    q = jnp.linspace(-1, 1, 4 * 4 * 64).reshape(4, 4, 64)
    pages = jnp.sin(jnp.arange(3 * 16 * 2 * 64.0)).reshape(3, 16, 2, 64)
    attend = jax.jit(lambda *arguments: ja.attention(*arguments, return_lse=True))
    del hits[:]
    o, lse = attend(q, pages, pages, plan)
    print(len(hits), np.asarray(o[:3]).tobytes().hex())
    """
)


def test_an_executable_from_the_persistent_cache_runs_in_a_fresh_process(tmp_path):
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    command = [sys.executable, "-c", CACHED]
    outputs = [
        subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=True)
        for _ in range(2)
    ]
    (first_hits, first_o), (second_hits, second_o) = (x.stdout.split() for x in outputs)
    assert first_hits == "0" and second_hits == "1"
    assert second_o == first_o


EXPORTED = textwrap.dedent(
    """
    import pathlib, sys
    import jax.export, numpy as np
    import jax_attn as ja

    folder = pathlib.Path(sys.argv[1])
    exported = jax.export.deserialize(bytearray((folder / "step").read_bytes()))
    plan = ja.AttentionPlan.load(folder / "plan.npz")
    arrays = np.load(folder / "arrays.npz")
    k, o = exported.call(*(arrays[name] for name in ("q", "k", "new")), plan)
    np.testing.assert_array_equal(k, arrays["k_out"])
    np.testing.assert_array_equal(o, arrays["o"])
    print("done")
    """
)


def test_an_exported_step_runs_in_a_fresh_process(tmp_path):
    spec = ja.AttentionSpec(
        4, 2, 64, dtype="float32", max_batch=2, max_qo_tokens=4, max_kv_pages=4, target="cpu"
    )
    plan = ja.plan(spec, [0, 3], [40], [0, 3], [2, 0, 1])

    @jax.jit
    def step(q, k, new, plan):
        k, v = ja.append_kv(k, k, new, new, plan)
        o = ja.attention(q, k, v, plan)
        return k, o + ja.dot_product_attention(q, new, new)

    rng = np.random.default_rng(0)
    shapes = {"q": (4, 4, 64), "k": (3, 16, 2, 64), "new": (4, 2, 64)}
    arrays = {n: rng.normal(size=shape).astype(np.float32) for n, shape in shapes.items()}
    with pytest.raises(ValueError, match="no compatibility guarantees"):
        jax.export.export(step)(*arrays.values(), plan)
    exported = jax.export.export(step, disabled_checks=ja.export_checks())(*arrays.values(), plan)
    (tmp_path / "step").write_bytes(exported.serialize())
    plan.save(tmp_path / "plan.npz")
    k_out, o = step(*arrays.values(), plan)
    np.savez(tmp_path / "arrays.npz", **arrays, k_out=k_out, o=o)
    done = subprocess.run(
        [sys.executable, "-c", EXPORTED, tmp_path],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0 and done.stdout.strip().endswith("done"), done.stderr[-4000:]


def test_no_call_has_an_operand_without_elements():
    """XLA of jax 0.11 crashes over an empty operand in a shard_map that is not under jit."""
    latent = {"num_kv_heads": 1, "head_dim_qk": 48, "head_dim_vo": 32, "mla": True, "sm_scale": 1.0}
    case = Case("", (1, 17), (300, 40), kv_dtype="float8_e4m3fn", **latent)
    batch, spec = build(case), ja.AttentionSpec(**case.spec_fields(), target="cpu")
    ragged = Case("", (1, 17), (300, 40), page_size=None)
    spec_of_ragged = ja.AttentionSpec(**ragged.spec_fields(), target="cpu")

    def step(q, k, new, lengths, lengths_of_ragged, scale):
        plan = ja.plan(spec, **lengths)
        k, _ = ja.append_kv(k, None, new, None, plan, k_scale=scale)
        o = ja.attention(q, k, None, plan, k_scale=scale)
        return o, ja.plan(spec_of_ragged, **lengths_of_ragged).buffer

    new = np.zeros((spec.max_qo_tokens, 1, 48), np.float32)
    lengths = [
        {k: v for k, v in build(c).lengths.plan_arguments().items() if v is not None}
        for c in (case, ragged)
    ]
    scale = np.ones(1, np.float32)
    jaxpr = jax.make_jaxpr(step)(batch.q, batch.k, new, *lengths, scale)
    calls = [e for e in equations(jaxpr.jaxpr) if e.primitive.name == "custom_vmap_call"]
    assert len(calls) == 4
    for call in calls:
        assert all(x.aval.size for x in call.invars), call


# ---- vmap ---------------------------------------------------------------------------------------


def call_with_a_batch_axis(op, plan, b):
    """The operation as a function of one array, and two arrays for it."""
    if op == "attention":
        return lambda q: ja.attention(q, b.k, b.v, plan, layer=1), np.stack([b.q, b.q + 1])
    if op == "append_kv":
        new = np.ones((len(b.q), 2, 64), np.float32)
        return lambda n: ja.append_kv(b.k, b.v, n, n, plan, layer=1), np.stack([new, 2 * new])
    if op == "append_rotated":
        n, num_heads = len(b.q), b.q.shape[1] + 2 * b.k.shape[-2]
        angles = (np.ones((n, 32), np.float32),) * 2
        qkv = np.ones((2, n, num_heads * 64), np.float32)
        return lambda x: ja.append_rotated(x, *angles, b.k, b.v, plan, layer=1), qkv
    lengths = b.lengths.plan_arguments()
    lens = np.array(lengths.pop("kv_lens"), np.int32)
    return lambda x: ja.plan(plan.spec, kv_lens=x, **lengths).buffer, np.stack([lens, lens])


@on_every_platform
@pytest.mark.parametrize("op", ["attention", "append_kv", "append_rotated", "plan"])
def test_vmap_refuses_in_one_sentence(op, backend):
    call, x = call_with_a_batch_axis(op, *prepare(backend))
    for run in (jax.vmap(call), jax.jit(jax.vmap(call))):
        with pytest.raises(NotImplementedError, match=f"^{op}: vmap: not supported; .* plan"):
            run(x)


@on_every_platform
def test_vmap_of_a_merge(backend):
    rng = np.random.default_rng(0)
    lse = rng.normal(size=(3, 5, 2)).astype(np.float32)
    o = rng.normal(size=(2, 3, 5, 2, 8)).astype(np.float32)
    got = jax.vmap(lambda o: ja.merge_states(o, lse))(o)
    for i in range(2):
        for name, a, want in zip(("o", "lse"), got, ja.merge_states(o[i], lse), strict=True):
            assert_same_bits(name, a[i], want)


# ---- gradients ----------------------------------------------------------------------------------


@on_every_platform
@pytest.mark.parametrize("op", ["append_kv", "append_rotated"])
def test_what_has_no_gradient_refuses_in_one_sentence(op, backend):
    plan, b = prepare(backend)
    call, x = call_with_a_batch_axis(op, plan, b)
    for transform in (jax.grad, lambda f: lambda x: jax.jvp(f, (x,), (x,))):
        loss = transform(lambda x: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(call(x))))
        for run in (loss, jax.jit(loss), jax.checkpoint(loss)):
            with pytest.raises(
                NotImplementedError, match=f"^{op}: gradients: not supported; .* to attention or"
            ):
                run(x[0])


@on_every_platform
def test_a_loss_may_use_attention_that_it_does_not_differentiate(backend):
    plan, b = prepare(backend)

    def loss(w):
        o = ja.attention(jax.lax.stop_gradient(b.q * w), b.k, b.v, plan, layer=1)
        return jnp.sum(w * o)

    gradient = jax.jit(jax.grad(loss))(1.0)
    want = np.asarray(ja.attention(b.q, b.k, b.v, plan, layer=1)).sum()
    np.testing.assert_allclose(gradient, want, rtol=1e-4)


@on_every_platform
def test_merge_under_checkpoint_and_grad(backend):
    rng = np.random.default_rng(0)
    o, lse = (
        rng.normal(size=(2, 5, 2, 8)).astype(np.float32),
        rng.normal(size=(2, 5, 2)).astype(np.float32),
    )

    def loss(o, lse):
        merged, merged_lse = ja.merge_states(o, lse)
        return jnp.sum(merged**2) + jnp.sum(merged_lse)

    want = jax.grad(loss, argnums=(0, 1))(o, lse)
    got = jax.jit(jax.grad(jax.checkpoint(loss), argnums=(0, 1)))(o, lse)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


# ---- sharding -----------------------------------------------------------------------------------

SHARDED = textwrap.dedent(
    """
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import NamedSharding, PartitionSpec as P
    import jax_attn as ja

    assert len(jax.devices()) == 2
    auto = {"axis_types": (jax.sharding.AxisType.Auto,)}
    mesh = jax.make_mesh((2,), ("heads",), **auto)
    fields = dict(head_dim_qk=64, dtype="float32", max_batch=4, max_qo_tokens=40, max_kv_pages=200)
    batch = [0, 1, 34, 35], [1500, 60, 300], [0, 94, 98, 117], np.arange(117)
    whole = ja.plan(ja.AttentionSpec(8, 4, **fields), *batch)
    half = ja.plan(ja.AttentionSpec(4, 2, **fields), *batch)
    rng = np.random.default_rng(0)
    q = rng.normal(size=(40, 8, 64)).astype(np.float32)
    new = rng.normal(size=(40, 4, 64)).astype(np.float32)
    k, v = (rng.normal(size=(2, 600, 16, 4, 64)).astype(np.float32) for _ in "kv")

    def step(k, v, q, new, plan):
        k, v = ja.append_kv(k, v, new, new, plan, layer=1)
        return k, v, *ja.attention(q, k, v, plan, layer=1, return_lse=True)

    want = jax.jit(step)(k, v, q, new, whole)
    rows, pages = P(None, "heads"), P(None, None, None, "heads")
    sharded = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=(pages, pages, rows, rows, P()),
                      out_specs=(pages, pages, rows, rows), check_vma=CHECK_VMA),
        donate_argnums=(0, 1))
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    arguments = put(k, pages), put(v, pages), put(q, rows), put(new, rows), put(half, P())
    compiled = sharded.lower(*arguments).compile()
    text = compiled.as_text()
    for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert collective not in text, collective
    assert compiled.memory_analysis().temp_size_in_bytes < k.nbytes / 4
    got = sharded(*arguments)
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)

    # kv spans over the mesh: each device attends to its own rows, the states merge by collectives.
    kv_mesh = jax.make_mesh((2,), ("kv",), **auto)
    ragged = ja.AttentionSpec(4, 2, causal=False, page_size=None, head_dim_qk=64, dtype="float32",
                              max_batch=1, max_qo_tokens=3, max_kv_tokens=64)
    everything = ja.AttentionSpec(4, 2, causal=False, page_size=None, head_dim_qk=64,
                                  dtype="float32", max_batch=1, max_qo_tokens=3, max_kv_tokens=128)
    q = rng.normal(size=(3, 4, 64)).astype(np.float32)
    k, v = (rng.normal(size=(128, 2, 64)).astype(np.float32) for _ in "kv")
    part = ja.plan(ragged, [0, 3], [64])

    def attend(q, k, v, plan):
        o, lse = ja.attention(q, k, v, plan, return_lse=True)
        return ja.merge_states(jax.lax.all_gather(o, "kv"), jax.lax.all_gather(lse, "kv"))

    parallel = jax.jit(jax.shard_map(attend, mesh=kv_mesh, in_specs=(P(), P("kv"), P("kv"), P()),
                                     out_specs=P(), check_vma=False))
    o, lse = parallel(q, k, v, part)
    want_o, want_lse = ja.attention(q, k, v, ja.plan(everything, [0, 3], [128]), return_lse=True)
    np.testing.assert_allclose(o, want_o, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6)
    """
)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_over_heads_and_over_kv(check_vma):
    run_on_cpus(2, SHARDED.replace("CHECK_VMA", str(check_vma)))


ON_MESH = textwrap.dedent(
    """
    import re
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    from helpers.mesh_checks import collectives
    import jax_attn as ja

    rng = np.random.default_rng(0)
    qkv = [rng.normal(size=(4, 20, n, 32)).astype(np.float32) for n in (8, 4, 4)]
    lengths = {"query_seq_lengths": [20, 3, 0, 7], "key_value_seq_lengths": [5, 20, 7, 1]}

    def check(name, compute, arrays, spec, others=(), sums=False):
        # spec: of the arrays, but for the last ones, which have those of others. sums: XLA may add
        # what each device has of a result.
        want = compute(*arrays)
        mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.KIND,) * 2)
        specs = [spec] * (len(arrays) - len(others)) + list(others)
        split = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs)]
        with jax.set_mesh(mesh):
            compiled = jax.jit(compute).lower(*split).compile()
            eager = jax.tree.leaves(compute(*split))
        text = compiled.as_text()
        for op in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
            assert op not in text or (sums and op == "all-reduce"), (name, spec, op)
        for a, b, c in zip(jax.tree.leaves(compiled(*split)), eager, jax.tree.leaves(want)):
            np.testing.assert_allclose(a, c, rtol=1e-6, atol=1e-6, err_msg=f"{name} {spec}")
            np.testing.assert_allclose(b, c, rtol=1e-6, atol=1e-6, err_msg=f"{name} {spec}")
            assert any(b.sharding.spec) or (sums and 1 in b.shape), (name, spec)

    def loss(q, k, v, **options):
        return jnp.sum(jnp.sin(ja.dot_product_attention(q, k, v, **options)))

    slope = jax.grad(loss, argnums=(0, 1, 2))
    batch, heads, both = P("data"), P(None, None, "model"), P("data", None, "model")
    for spec in (batch, heads, both, P(None, None, ("data", "model"))):
        check("o", ja.dot_product_attention, qkv, spec)
        check("gradients", slope, qkv, spec)
    for spec in (batch, heads, both):
        check("lengths", lambda *x: ja.dot_product_attention(*x, **lengths), qkv, spec)
        check("gradients", lambda *x: slope(*x, **lengths), qkv, spec)
    # Arrays that a call reads besides: where the rows are, or one for all.
    mask, bias = rng.random((4, 1, 20, 20)) < 0.8, rng.normal(size=(1, 8, 1, 20))
    more = *qkv, bias.astype(np.float32), mask, np.int32([5, 20, 7, 1])

    def masked(q, k, v, bias, mask, lengths):
        return ja.dot_product_attention(q, k, v, bias, mask, key_value_seq_lengths=lengths)

    others = P(None, "model"), batch, batch
    check("masked", jax.jit(masked), more, both, others)
    slope_of = jax.jit(jax.grad(lambda *x: jnp.sum(jnp.sin(masked(*x))), argnums=(0, 1, 2, 3)))
    check("gradients with bias", slope_of, more, both, others, sums=True)
    states = qkv[0], qkv[0][..., 0]
    for spec in (P(None, "data"), heads, P(None, "data", "model")):
        check("merge", ja.merge_states, states, spec)

    def few_kv_heads(q):
        return ja.dot_product_attention(q, *(x[:, :, :2] for x in qkv[1:]))

    def one_kv_head(q):
        return ja.dot_product_attention(q, *(x[:, :, :1] for x in qkv[1:]))

    # Otherwise it is refused, and nothing is gathered.
    for compute, arrays, spec in (
        (ja.dot_product_attention, qkv, P(None, "data")),
        (few_kv_heads, qkv[:1], P(None, None, ("data", "model"))),
        (one_kv_head, qkv[:1], heads),
        (ja.merge_states, states, P("data")),
    ):
        try:
            check("others", compute, arrays, spec)
            raise AssertionError(spec)
        except ValueError as error:  # itself, where XLA's partitioner finds it, too
            assert re.match("\\w+: sharding: expected ", str(error)), error

    # What takes a plan, of one device's heads, runs where the heads are; pages stay in place.
    mesh = jax.make_mesh((2, 2), ("other", "model"), axis_types=(AxisType.KIND,) * 2)
    fields = {"head_dim_qk": 32, "dtype": "float32", "max_batch": 2, "max_qo_tokens": 6}
    paged = fields | {"max_kv_pages": 9, "page_size": 16}
    whole, half = (ja.AttentionSpec(8 // n, 4 // n, **paged) for n in (1, 2))
    batch = [0, 5, 6], [9, 120], [0, 1, 9], np.arange(9)
    rows, pages = P(None, "model"), P(None, None, None, "model")

    def put(x, spec):
        return jax.device_put(x, NamedSharding(mesh, spec))

    def arrays(rows, pages):
        numbers = np.random.default_rng(1)
        shapes = (6, 8, 32), (6, 4, 32), (6, 4, 32), (2, 900, 16, 4, 32), (2, 900, 16, 4, 32)
        arrays = [numbers.normal(size=shape).astype(np.float32) for shape in shapes]
        return [put(x, rows if x.ndim == 3 else pages) for x in arrays], arrays

    # A variant that reads no head is the same for all of them.
    def documents(at, doc):
        return doc[at.kv_pos % 7] != doc[at.q_row]

    doc = np.int32(rng.integers(0, 3, 7))
    for fields_of, is_fine in (
        ({"mask": documents, "operands": {"doc": doc}}, True),
        ({"logits": lambda score, at: score * at.head}, False),
    ):
        variant = ja.Variant(**fields_of)
        read = {name: doc for name in variant.names}
        part, one = (
            ja.plan(ja.AttentionSpec(8 // n, 4 // n, **paged, variant=variant), *batch)
            for n in (2, 1)
        )
        attend = jax.jit(lambda *x: ja.attention(*x, layer=1, variant_operands=read))
        (q, _, _, k, v), (whole_q, _, _, whole_k, whole_v) = arrays(rows, pages)
        try:
            with jax.set_mesh(mesh):
                got = attend(q, k, v, part)
            assert is_fine and "model" in got.sharding.spec, got.sharding
            np.testing.assert_array_equal(got, attend(whole_q, whole_k, whole_v, one))
        except NotImplementedError as error:
            assert not is_fine and "variant: one that reads head" in str(error), error

    def step(plan, q, k_new, v_new, k, v):
        k, v = ja.append_kv(k, v, k_new, v_new, plan, layer=1)
        return k, v, *ja.attention(q, k, v, plan, layer=1, sinks=jnp.arange(8.0), return_lse=True)

    def rotated(plan, q, k_new, v_new, k, v):
        pack = lambda *x: jnp.concatenate([a.reshape(6, -1) for a in x], axis=1)
        qkv = jax.shard_map(pack, mesh=mesh, in_specs=(rows,) * 3, out_specs=rows)(q, k_new, v_new)
        angles = jnp.ones((6, 16))
        q, k, v = ja.append_rotated(qkv, jnp.cos(angles), jnp.sin(angles), k, v, plan, layer=0)
        return k, v, ja.attention(q, k, v, plan, layer=0)

    def scanned(plan, q, k_new, v_new, k, v):
        def body(pages, layer):
            pages = ja.append_kv(*pages, k_new, v_new, plan, layer=layer)
            return pages, ja.attention(q, *pages, plan, layer=layer)

        return jax.lax.scan(body, (k, v), jnp.arange(2))

    def rotated_whole(plan, q, k_new, v_new, k, v):
        turn = lambda x: jnp.concatenate([a * c - b * s, b * c + a * s], -1)
        c, s = jnp.cos(1.0), jnp.sin(1.0)
        a, b = jnp.split(q, 2, -1)
        q = turn(q)
        a, b = jnp.split(k_new, 2, -1)
        k, v = ja.append_kv(k, v, turn(k_new), v_new, plan, layer=0)
        return k, v, ja.attention(q, k, v, plan, layer=0)

    def slopes(plan, q, k_new, v_new, k, v):
        def loss(q, k, v, sinks):
            o, lse = ja.attention(q, k, v, plan, layer=1, sinks=sinks, return_lse=True)
            return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.cos(lse))

        return jax.grad(loss, argnums=(1, 2, 0, 3))(q, k, v, q[0, :, 0])

    cases = (step, step), (rotated, rotated_whole), (scanned, scanned), (slopes, slopes)
    for compute, compute_whole in cases:
        split, plain = arrays(rows, pages)
        want = jax.jit(compute_whole)(ja.plan(whole, *batch), *plain)
        plan = ja.plan(half, *batch)
        with jax.set_mesh(mesh):
            jitted = jax.jit(compute, donate_argnums=(4, 5))
            compiled = jitted.lower(plan, *split).compile()
            eager = compute(plan, *split)
            got = compiled(plan, *split)
        assert not collectives(compiled.as_text()), compute
        if compute is not slopes:  # which has gradients of all pages
            assert compiled.memory_analysis().temp_size_in_bytes < plain[3].nbytes / 4, compute
        for name, a, b, c in zip("kvos", jax.tree.leaves(got), jax.tree.leaves(eager),
                                 jax.tree.leaves(want)):
            np.testing.assert_allclose(a, c, rtol=1e-5, atol=1e-5, err_msg=f"{compute} {name}")
            np.testing.assert_allclose(b, c, rtol=1e-5, atol=1e-5, err_msg=f"{compute} {name}")
            assert "model" in a.sharding.spec and "model" in b.sharding.spec

    # Sinks that every device has get their gradient whole.
    def summed(sinks, plan, q, k, v):
        return ja.attention(q, k, v, plan, layer=1, sinks=sinks).sum()

    split, plain = arrays(rows, pages)
    want = jax.grad(summed)(jnp.ones(8), ja.plan(whole, *batch), plain[0], *plain[3:])
    with jax.set_mesh(mesh):
        got = jax.jit(jax.grad(summed))(jnp.ones(8), plan, split[0], *split[3:])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)

    # Otherwise it refuses. Explicit: when called. Auto: eagerly when called, else XLA does.
    plans = ja.plan(half, *batch), ja.plan(whole, *batch)
    everywhere = P()
    for plan, rows_spec, pages_spec in (
        (plans[1], rows, pages),
        (plans[1], P("model"), everywhere),
        (plans[0], everywhere, everywhere),
        (plans[0], rows, P(None, "model")),
        (plans[0], P("other", "model"), pages),
        (plans[0], P(None, ("other", "model")), pages),
        (plans[0], P(None, "other"), pages),
    ):
        split, _ = arrays(rows_spec, pages_spec)
        for attend in (step, jax.jit(step)):
            try:
                with jax.set_mesh(mesh):
                    attend(plan, *split)
                raise AssertionError((rows_spec, pages_spec))
            except NotImplementedError as error:
                assert re.match("(attention: q|append_kv: k_\\w+): expected .*docs/devices.md",
                                str(error)), error
    # Heads that are no multiple of the spec's.
    try:
        with jax.set_mesh(mesh):
            ja.attention(put(np.zeros((6, 6, 32), np.float32), P()), *split[3:], plans[0], layer=1)
        raise AssertionError
    except ValueError as error:
        assert str(error).startswith("attention: q: expected float32[6, 4, 32] as"), error
    """
)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_dense_attention_and_merges_stay_where_a_mesh_has_them(kind):
    run_on_cpus(4, ON_MESH.replace("KIND", kind))


def test_one_kv_head_a_device():
    run_on_cpus(2, "import test_transforms as t; t.check_one_kv_head_a_device()")


def check_one_kv_head_a_device():
    """Grouped queries: Shardy rejects a size for a factor that is an axis of k and v."""
    spec = ja.AttentionSpec(
        4, 1, 16, dtype="float32", page_size=None, max_qo_tokens=20, max_kv_tokens=30, max_batch=1
    )
    plan = ja.plan(spec, np.array([0, 20]), np.array([30]))
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    by_head = jax.NamedSharding(mesh, jax.P(None, "heads"))
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.normal(size=(tokens, heads, 16)).astype(np.float32)
        for tokens, heads in ((20, 8), (30, 2), (30, 2))
    )
    slope = jax.value_and_grad(lambda q, k, v: ja.attention(q, k, v, plan).sum(), (0, 1, 2))
    split = jax.jit(slope)(*(jax.device_put(x, by_head) for x in (q, k, v)))
    one_by_one = [
        slope(q[:, 4 * i : 4 * i + 4], k[:, i : i + 1], v[:, i : i + 1]) for i in range(2)
    ]
    np.testing.assert_allclose(split[0], sum(o for o, _ in one_by_one), rtol=1e-5)
    for got, *want in zip(split[1], *(slopes for _, slopes in one_by_one), strict=True):
        np.testing.assert_array_equal(got, np.concatenate(want, 1))
