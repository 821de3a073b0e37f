"""Checks that run in a process with several devices.

`run_on_cpus` runs them on CPU devices, `run_on_gpus` on all GPUs there are (test_mesh_cuda.py).
"""

from __future__ import annotations

import dataclasses
import functools
import os
import socket
import subprocess
import sys
from collections import Counter
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from collectives import collectives, executed
from jax.sharding import NamedSharding

import jax_attn as ja
from helpers.attention_cases import CASES, Case, build, expect, random_case
from helpers.checking import assert_close_state, assert_same_bits
from helpers.paths import ROOT, TESTS
from jax_attn import _environment, parallel

# heads x kv
MESHES = {"1x2": (1, 2), "2x1": (2, 1), "2x2": (2, 2), "1x4": (1, 4), "3": (1, 3)}


def xla_flags(num_devices: int) -> str:
    """XLA_FLAGS of this process, plus the number of CPU devices."""
    count = f"--xla_force_host_platform_device_count={num_devices}"
    return f"{os.environ.get('XLA_FLAGS', '')} {count}"


def environment(num_devices: int) -> dict[str, str]:
    """Environment of a process with that many CPU devices; it can import tests/ and benchmarks/."""
    folders = [TESTS, *(x for x in TESTS.iterdir() if x.is_dir()), ROOT / "benchmarks"]
    paths = *map(str, folders), os.environ.get("PYTHONPATH")
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": xla_flags(num_devices),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }


def run_on_cpus(num_devices: int, program: str, timeout: int = 300) -> None:
    """Runs a program on CPU devices and waits for its end."""
    start = "from helpers import lowering; lowering.lower_quickly()\n"
    _run(environment(num_devices), start + program, timeout)


def run_on_gpus(program: str, timeout: int = 300) -> None:
    """Runs a program on all GPUs and waits for its end. f32 matmuls are not rounded to TF32."""
    env = environment(1)
    del env["JAX_PLATFORMS"], env["XLA_FLAGS"]  # these are for CPUs
    env |= {
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        "NCCL_NVLS_ENABLE": "0",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    _run(env, program, timeout)


def _run(env: dict[str, str], program: str, timeout: int) -> None:
    command = [sys.executable, "-X", "faulthandler", "-c", program + "\nprint('done')"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0 and done.stdout.strip().endswith("done"), (
        f"exit status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-6000:]}"
    )


def run_in_processes(num_processes: int, devices_each: int, program: str) -> None:
    """Runs a program in processes of one runtime (jax.distributed) and waits for all of them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = environment(devices_each)
    start = "import jax; jax.distributed.initialize('127.0.0.1:{}', {}, {})\n"
    commands = [
        [sys.executable, "-c", start.format(port, num_processes, i) + program + "\nprint('done')"]
        for i in range(num_processes)
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    running = [subprocess.Popen(command, env=env, **pipes) for command in commands]
    try:
        for process in running:
            output, _ = process.communicate(timeout=240)
            assert process.returncode == 0 and "done" in output, output[-4000:]
    finally:
        for process in running:
            process.kill()


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def make_spec(*heads: int, **fields: Any) -> ja.AttentionSpec:
    """A spec for the platform on which the checks run."""
    return ja.AttentionSpec(*heads, **fields, target=None if on_gpu() else "cpu")


def meshes() -> dict[str, tuple[int, int]]:
    """The entries of MESHES that have enough devices."""
    return {name: shape for name, shape in MESHES.items() if prod(shape) <= len(jax.devices())}


def make_mesh(num_heads: int, num_kv: int) -> jax.sharding.Mesh:
    auto = (jax.sharding.AxisType.Auto,) * 2
    devices = jax.devices()[: num_heads * num_kv]
    return jax.make_mesh((num_heads, num_kv), ("heads", "kv"), devices=devices, axis_types=auto)


# ---- KV shards -----------------------------------------------------------------------------------


def kv_shard_cases() -> list[Case]:
    """The paged cases of the shared list, for KV shards.

    Cases with logits near -5e5 are left out. Devices exchange states whose lse is f32, and the ulp
    there is 1/32: the weights of the devices are known to 3 % only.
    """
    cases = [*CASES, *map(random_case, range(60))]
    return [
        case
        for case in cases
        if case.page_size is not None and "huge" not in case.contents and has_kernel(case)
    ]


def has_kernel(case: Case) -> bool:
    """True if there is a kernel: CUDA has none for f32 with e4m3, by design."""
    return not on_gpu() or case.dtype != "float32" or case.kv_dtype is None


def check_kv_shards(mesh_name: str, part: int, num_parts: int) -> None:
    """Runs cases part, part + num_parts, ... on one mesh."""
    with _environment.poisoned():
        for case in kv_shard_cases()[part::num_parts]:
            check_kv_shard_case(case, MESHES[mesh_name])


def check_kv_shard_case(case: Case, shape: tuple[int, int]) -> None:
    num_heads, num_kv = shape
    if case.num_kv_heads % num_heads:
        num_heads = 1
    case = dataclasses.replace(case, page_size=case.page_size * num_kv)
    fields = case.spec_fields()
    fields["num_qo_heads"] //= num_heads
    fields["num_kv_heads"] //= num_heads
    spec = make_spec(**fields)
    mesh = make_mesh(num_heads, num_kv)
    kv_shards = parallel.KvShards(spec, "kv", num_kv, "heads")
    for content in case.contents:
        batch = build(case, content)
        lengths = batch.lengths.plan_arguments()
        plan = parallel.plan_kv_shards(kv_shards, **lengths)
        pages = kv_shards.pages_spec(is_stacked=batch.layer is not None)
        put = lambda x, spec: x if x is None else jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
        k, v = put(batch.k, pages), put(batch.v, pages)

        @jax.jit
        def attend(q, k, v, plan, sinks, layer, scales):
            return parallel.attend_kv_shards(
                q, k, v, plan, sinks=sinks, layer=layer, return_lse=True, mesh=mesh, **scales
            )

        layer = None if batch.layer is None else jnp.int32(batch.layer)
        results = [attend(batch.q, k, v, plan, batch.sinks, layer, batch.scales) for _ in range(2)]
        (o, lse), again = results
        want = expect(case, batch)
        # States are rounded to the dtype before they are merged.
        slack = 1 if case.dtype == "float32" else 2
        try:
            assert_close_state(o, lse, want.o, want.lse, slack * want.o_bound, want.lse_bound)
            assert_same_bits("o", again[0], o)
            assert_same_bits("lse", again[1], lse)
        except AssertionError as error:
            raise AssertionError(f"{case.name}, {content}, {shape}: {error}") from None


DECODES = Case("decodes", (1, 1, 1, 1), (700, 33, 1, 1025), num_qo_heads=8, page_size=64)
CHUNKS = Case("chunks", (1, 150, 0, 37, 1), (700, 300, 40, 37, 90), num_qo_heads=8, page_size=24)


def _arrays(kv_shards, mesh, batch):
    pages = NamedSharding(mesh, kv_shards.pages_spec(is_stacked=batch.layer is not None))
    return jax.device_put(batch.k, pages), batch.v if batch.v is None else jax.device_put(
        batch.v, pages
    )


def check_bytes(*dtypes: str) -> None:
    """Checks one collective a layer: rows x heads x (head_dim + 1) words for any context length."""
    for dtype in dtypes or ("float32", "bfloat16"):
        for case in (DECODES, CHUNKS, dataclasses.replace(DECODES, kv_lens=(7000, 33, 1, 1))):
            case = dataclasses.replace(case, dtype=dtype)
            for num_heads, num_kv in set(meshes().values()) & {(1, 2), (1, 4), (2, 2)}:
                _check_bytes_of(case, num_heads, num_kv)


def _check_bytes_of(case: Case, num_heads: int, num_kv: int) -> None:
    fields = case.spec_fields()
    rows = fields["max_qo_tokens"] = -(-fields["max_qo_tokens"] // 4) * 4
    heads = fields["num_qo_heads"] = fields["num_qo_heads"] // num_heads
    fields["num_kv_heads"] //= num_heads
    mesh = make_mesh(num_heads, num_kv)
    kv_shards = parallel.KvShards(make_spec(**fields), "kv", num_kv, "heads")
    batch = build(case)
    arrays = _arrays(kv_shards, mesh, batch)
    plan = parallel.plan_kv_shards(kv_shards, **batch.lengths.plan_arguments())
    plan = jax.device_put(plan, NamedSharding(mesh, kv_shards.plan_spec))
    q = np.resize(batch.q, (rows, *batch.q.shape[1:]))
    q = jax.device_put(q, NamedSharding(mesh, kv_shards.rows_spec))
    state = rows * heads * (case.head_dim_qk * jnp.dtype(case.dtype).itemsize + 4)
    whole = None
    for scatter in (None, "heads", "rows"):
        attend = jax.jit(
            lambda q, k, v, plan, scatter=scatter: parallel.attend_kv_shards(
                q, k, v, plan, scatter=scatter, mesh=mesh
            )
        )
        compiled = attend.lower(q, *arrays, plan).compile()
        found = collectives(compiled.as_text())
        kind, size = ("all-gather", num_kv * state) if scatter is None else ("all-to-all", state)
        assert found == [(kind, size)], (case.name, scatter, found, kind, size)
        o = compiled(q, *arrays, plan)
        sharding = NamedSharding(mesh, kv_shards.o_spec(scatter))
        assert o.sharding.is_equivalent_to(sharding, o.ndim), (o.sharding, sharding)
        whole = o if whole is None else whole
        assert_same_bits(f"scatter={scatter}", o, whole)


def check_loops(mesh_name: str) -> None:
    """Checks decode steps with plans made on the devices, in scan and in while_loop: appends,
    attends.

    The truth is one device with the same page table.
    """
    num_heads, num_kv = MESHES[mesh_name]
    mesh = make_mesh(num_heads, num_kv)
    page_size, steps, batch_size, pages_each = 4 * num_kv, 14, 3, 8
    fields = dict(  # noqa: C408
        head_dim_qk=16,
        dtype="float32",
        page_size=page_size,
        max_batch=batch_size,
        max_qo_tokens=12,
        max_kv_pages=batch_size * pages_each,
    )
    one = make_spec(4, 2, **fields)
    kv_shards = parallel.KvShards(
        make_spec(4 // num_heads, 2 // num_heads, **fields), "kv", num_kv, "heads"
    )
    rng = np.random.default_rng(0)
    q, k_new, v_new = (
        rng.normal(size=(steps, 12, heads, 16)).astype(np.float32) for heads in (4, 2, 2)
    )
    pages = np.zeros((2, 2, 30, page_size, 2, 16), np.float32)
    pages[:] = np.nan
    table = rng.permutation(30)[: batch_size * pages_each].astype(np.int32)
    # A chunk of 7, 1 and 4 tokens, then decodes of 3 requests a step; one of them ends early.
    qo_lens = np.array([[7, 1, 4]] + [[1, 1, 1]] * 6 + [[1, 0, 1]] * (steps - 7), np.int32)

    def lengths(step, kv_lens):
        qo_len = jnp.asarray(qo_lens)[step]
        kv_lens = kv_lens + qo_len
        page_indptr = np.arange(batch_size + 1) * pages_each
        return kv_lens, (jnp.append(0, jnp.cumsum(qo_len)), kv_lens, page_indptr, table)

    def loop(kind, make_plan, append, attend, q, k_new, v_new, k, v):
        def body(step, carry):
            k, v, kv_lens, os = carry
            kv_lens, batch = lengths(step, kv_lens)
            plan = make_plan(*batch)
            k, v = append(k, v, k_new[step], v_new[step], plan, layer=1)
            o = attend(q[step], k, v, plan, layer=1)
            return k, v, kv_lens, os.at[step].set(o)

        carry = k, v, jnp.zeros(batch_size, jnp.int32), jnp.zeros(q.shape, q.dtype)
        if kind == "scan":
            return jax.lax.scan(lambda c, i: (body(i, c), None), carry, jnp.arange(steps))[0]
        loop = jax.lax.while_loop(
            lambda c: c[0] < steps, lambda c: (c[0] + 1, *body(c[0], c[1:])), (0, *carry)
        )
        return loop[1:]

    one_device = (lambda *batch: ja.plan(one, *batch)), ja.append_kv, ja.attention
    sharded = (
        (lambda *batch: parallel.plan_kv_shards(kv_shards, *batch)),
        parallel.append_kv_shards,
        parallel.attend_kv_shards,
    )
    rows, cache = (None, *kv_shards.rows_spec), kv_shards.pages_spec(is_stacked=True)
    rows = jax.sharding.PartitionSpec(*rows)
    everywhere = jax.sharding.PartitionSpec()
    for kind in ("scan", "while_loop"):
        want = jax.jit(lambda *x, kind=kind: loop(kind, *one_device, *x))(q, k_new, v_new, *pages)
        step = jax.jit(
            jax.shard_map(
                lambda *x, kind=kind: loop(kind, *sharded, *x),
                mesh=mesh,
                in_specs=(rows, rows, rows, cache, cache),
                out_specs=(cache, cache, everywhere, rows),
                check_vma=False,
            )
        )
        compiled = step.lower(q, k_new, v_new, *pages).compile()
        kinds = [kind for kind, _ in collectives(compiled.as_text())]
        assert kinds == ["all-gather"] * (num_kv > 1), kinds
        got = compiled(
            *(jax.device_put(x, NamedSharding(mesh, rows)) for x in (q, k_new, v_new)),
            *(jax.device_put(x, NamedSharding(mesh, cache)) for x in pages),
        )
        again = step(q, k_new, v_new, *pages)
        for name, a, b, c in zip(("k", "v", "kv_lens", "o"), got, want, again, strict=True):
            if name == "o":
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
            else:
                assert_same_bits(name, a, b)
            assert_same_bits(name, c, a)


def check_plans() -> None:
    """Checks that plans made inside shard_map have the bits of the host's, prefix levels too.

    A GPU does not search for shared prefixes: without levels its plans are those of the host that
    is told that nothing is shared. The plans that attend are those of the host that searches.
    """
    size = min(4, len(jax.devices()))
    mesh = make_mesh(1, size)
    tree = dict(  # noqa: C408
        qo_lens=(1,) * 10,
        branches=("ab", "ab", "abc", "a", "d", "", "abc", "a", "dd", "ab"),
        kv_lens=(600, 577, 900, 300, 400, 33, 801, 257, 600, 512),
        num_ctas=3,
        page_size=64,
    )
    levels = [([0, 4, 6, 8, 10], [256, 0, 256, 0]), ([0, 3, 4, 6, 7, 8, 10], [512, 0, 0, 0, 0, 0])]
    cases = (
        (DECODES, None),
        (CHUNKS, None),
        (dataclasses.replace(CHUNKS, causal=False), None),
        (dataclasses.replace(CHUNKS, window_left=31), None),
        (dataclasses.replace(CHUNKS, causal=False, window_left=31, window_right=9), None),
        (dataclasses.replace(CHUNKS, q_offsets=(-3, 100, 0, 5, 2000)), None),
        (Case("tree", **tree), None),
        (Case("tree", window_left=2000, **tree), None),
        (Case("tree", window_left=2000, **tree), [tuple(map(np.array, level)) for level in levels]),
        (Case("tree", **tree), [tuple(map(np.array, level)) for level in levels]),
        (Case("tree", **(tree | {"qo_lens": (1, 1, 400, 1, 3, 2, 1, 1, 90, 1)})),
         [tuple(map(np.array, level)) for level in levels]),
    )  # fmt: skip
    for case, prefix_levels in cases:
        batch = build(case)
        kv_shards = parallel.KvShards(make_spec(**case.spec_fields()), "kv", size)
        lengths = batch.lengths.plan_arguments()
        host = parallel.plan_kv_shards(kv_shards, **lengths, prefix_levels=prefix_levels)
        for device in range(size):
            for plan in (host.attend_plan(device), host.append_plan(device)):
                plan.spec.problem.check_plan(np.ascontiguousarray(plan.buffer), -1)
        if prefix_levels and case.window_left < 0:
            groups = [host.attend_plan(d).items()["num_groups"].max() for d in range(size)]
            # A GPU has so many CTAs that it cuts no request of these lengths.
            assert size < 4 or on_gpu() or max(groups) > 1, groups
        make = jax.shard_map(
            lambda lengths, kv_shards=kv_shards, levels=prefix_levels: parallel.plan_kv_shards(
                kv_shards, **lengths, prefix_levels=levels
            ),
            mesh=mesh, in_specs=jax.sharding.PartitionSpec(), out_specs=kv_shards.plan_spec,
        )  # fmt: skip
        inside, same = jax.jit(make)(lengths), host
        if on_gpu() and prefix_levels is None:
            same = parallel.plan_kv_shards(kv_shards, **lengths, prefix_levels=())
        assert_same_bits("attend", inside.attend_buffers, same.attend_buffers)
        assert_same_bits("append", inside.append_buffers, same.append_buffers)
        o, lse = parallel.attend_kv_shards(
            batch.q, *_arrays(kv_shards, mesh, batch), host, return_lse=True, mesh=mesh
        )
        want = expect(case, batch)
        assert_close_state(o, lse, want.o, want.lse, want.o_bound, want.lse_bound)


def check_latent() -> None:
    """Checks MLA and MQA: every device of the heads axis has the one kv head; keys are split."""
    size = min(4, len(jax.devices()))
    latent = {"num_kv_heads": 1, "head_dim_qk": 48, "head_dim_vo": 32, "mla": True, "sm_scale": 0.2}
    if on_gpu():  # CUDA has kernels for DeepSeek's sizes
        latent |= {"head_dim_qk": 576, "head_dim_vo": 512, "dtype": "bfloat16"}
    for case, num_heads in (
        (Case("mla", num_qo_heads=8, page_size=20, **latent), 2),
        (Case("mla_chunk", (150, 1), (500, 90), num_qo_heads=4, page_size=8, sinks=True,
              **latent), 2),
        (Case("mla_e4m3", num_qo_heads=8, page_size=8, kv_dtype="float8_e4m3fn", **latent), 2),
        (Case("mqa", num_qo_heads=8, num_kv_heads=1, page_size=4), 1),
    ):  # fmt: skip
        batch = build(case)
        fields = case.spec_fields()
        fields["num_qo_heads"] //= num_heads
        mesh = make_mesh(num_heads, size // num_heads)
        spec = make_spec(**fields)
        kv_shards = parallel.KvShards(spec, "kv", size // num_heads, "heads")
        plan = parallel.plan_kv_shards(kv_shards, **batch.lengths.plan_arguments())
        want = expect(case, batch)
        for scatter in (None, "heads"):
            o, lse = parallel.attend_kv_shards(
                batch.q, *_arrays(kv_shards, mesh, batch), plan, sinks=batch.sinks, scatter=scatter,
                return_lse=True, mesh=mesh, **batch.scales,
            )  # fmt: skip
            assert_close_state(o, lse, want.o, want.lse, want.o_bound, want.lse_bound)


def check_appends() -> None:
    """Checks that the shards of all devices together are what one device appends, e4m3 too."""
    cases = (DECODES, CHUNKS, Case("short", (5, 130), (2, 300), page_size=12),
             dataclasses.replace(CHUNKS, kv_dtype="float8_e4m3fn", num_layers=2))  # fmt: skip
    for case in filter(has_kernel, cases):
        batch = build(case)
        one = make_spec(**case.spec_fields())
        rng = np.random.default_rng(1)
        k_new, v_new = (
            rng.normal(size=(one.max_qo_tokens, 2, 64)).astype(np.float32) for _ in "kv"
        )
        options = {name: batch.scales[name] for name in ("k_scale", "v_scale") if batch.scales}
        options["layer"] = batch.layer
        plan = ja.plan(one, **batch.lengths.plan_arguments())
        want = ja.append_kv(batch.k, batch.v, k_new, v_new, plan, **options)
        for num_heads, num_kv in set(meshes().values()) & {(1, 2), (1, 4), (2, 2)}:
            fields = case.spec_fields() | {"num_qo_heads": 8 // num_heads}
            fields["num_kv_heads"] = 2 // num_heads
            mesh = make_mesh(num_heads, num_kv)
            spec = make_spec(**fields)
            kv_shards = parallel.KvShards(spec, "kv", num_kv, "heads")
            plan = parallel.plan_kv_shards(kv_shards, **batch.lengths.plan_arguments())
            append = jax.jit(
                lambda k, v, k_new, v_new, plan, mesh=mesh, options=options: (
                    parallel.append_kv_shards(k, v, k_new, v_new, plan, mesh=mesh, **options)
                ),
                donate_argnums=(0, 1),
            )
            arrays = (*_arrays(kv_shards, mesh, batch), k_new, v_new, plan)
            assert not collectives(append.lower(*arrays).compile().as_text())
            for name, a, b in zip(("k", "v"), append(*arrays), want, strict=True):
                assert_same_bits(f"{case.name}: {name}", a, b)


# ---- sequences -----------------------------------------------------------------------------------

# Documents back to back, with an empty one, then padding.
_DOCUMENTS = np.cumsum([0, 1, 100, 0, 37, 2, 150, 3])
_MASKS = (
    {},
    {"causal": False},
    {"window_left": 20},
    {"window_left": 1},
    {"window_left": 0},
    {"window_left": 60, "logits_soft_cap": 3.0},
    {"causal": False, "window_right": 7},
    {"causal": False, "window_left": 9},
    {"causal": False, "window_left": 70, "window_right": 90},
    {"causal": False, "window_left": 0, "window_right": 1},
)


def sequence_cases() -> list[dict]:
    heads = ((4, 4), (8, 4), (8, 2), (4, 1))
    return [
        {"heads": heads[i % len(heads)], "order": order, "exchange": exchange, **masks}
        for exchange in ("ring", "heads")
        for order in ("striped", "contiguous")
        for i, masks in enumerate(_MASKS)
    ]


def check_sequences(first: int, step: int, on_all_meshes: bool = False) -> None:
    """Checks state and gradients of cases first, first + step, ... against one device and again."""
    with _environment.poisoned():
        for i, case in list(enumerate(sequence_cases()))[first::step]:
            there = meshes()
            one_mesh = [list(there)[(i + i // 10) % len(there)]]
            for mesh_name in there if on_all_meshes else one_mesh:
                try:
                    _check_sequence(case, *there[mesh_name])
                except AssertionError as error:
                    raise AssertionError(f"{case}, {mesh_name}: {error}") from None


def _check_sequence(case: dict, num_heads: int, size: int) -> None:
    masks = dict(case)
    (qo_heads, kv_heads), order, exchange = (
        masks.pop(name) for name in ("heads", "order", "exchange")
    )
    if kv_heads % num_heads:
        num_heads = 1
    own_qo, own_kv = qo_heads // num_heads, kv_heads // num_heads
    if exchange == "heads" and (own_qo % size or (own_kv % size and size % own_kv)):
        exchange = "ring"
    tokens = -(-296 // size) * size
    fields = {"dtype": "float32", "page_size": None, "max_batch": 9, **masks}
    fields |= {"max_qo_tokens": tokens, "max_kv_tokens": tokens}
    one = make_spec(qo_heads, kv_heads, 16, 24, **fields)
    spec = make_spec(own_qo, own_kv, 16, 24, **fields)
    mesh = make_mesh(num_heads, size)
    shards = parallel.SequenceShards(spec, "kv", size, order, exchange, "heads")
    rng = np.random.default_rng(0)
    shapes = ((qo_heads, 16), (kv_heads, 16), (kv_heads, 24), (qo_heads, 24), (qo_heads,))
    q, k, v, d_o, d_lse = (rng.normal(size=(tokens, *x)).astype(np.float32) for x in shapes)
    for x in (q, k, v, d_o, d_lse):
        x[_DOCUMENTS[-1] :] = 0 if x is d_o or x is d_lse else np.nan
    sinks = rng.normal(size=qo_heads).astype(np.float32)
    lens = np.diff(_DOCUMENTS)

    def loss(attend, d_o, d_lse, *arrays):
        o, lse = attend(*arrays)
        finite = jnp.where(jnp.isneginf(lse), 0, lse)
        return jnp.sum(o * d_o) + jnp.sum(finite * d_lse), (o, lse)

    def run(attend, *arrays):
        return jax.value_and_grad(
            lambda *x: loss(attend, d_o_here, d_lse_here, *x), (0, 1, 2, 3), has_aux=True
        )(*arrays)

    d_o_here, d_lse_here = d_o, d_lse
    whole = ja.plan(one, _DOCUMENTS, lens, kv_indptr=_DOCUMENTS)
    (_, want), want_grads = run(
        lambda q, k, v, sinks: ja.attention(q, k, v, whole, sinks=sinks, return_lse=True),
        q, k, v, sinks,
    )  # fmt: skip
    at = shards.positions
    plan = parallel.plan_sequence(shards, _DOCUMENTS)
    placed = [
        jax.device_put(x[at], NamedSharding(mesh, shards.array_spec)) for x in (q, k, v, d_o, d_lse)
    ]
    d_o_here, d_lse_here = placed[3:]
    step = jax.jit(
        lambda q, k, v, sinks, plan: run(
            lambda q, k, v, sinks: parallel.attend_sequence(
                q, k, v, plan, sinks=sinks, return_lse=True, mesh=mesh
            ),
            q, k, v, sinks,
        )
    )  # fmt: skip
    (_, got), grads = step(*placed[:3], sinks, plan)
    (_, again), grads_again = step(*placed[:3], sinks, plan)
    assert got[0].sharding.spec == shards.array_spec, got[0].sharding
    live = slice(0, _DOCUMENTS[-1])
    back = np.argsort(at)
    names = ("o", "lse", "d_q", "d_k", "d_v", "d_sinks")
    results = [*got, *grads], [*want, *want_grads], [*again, *grads_again]
    for name, a, b, c in zip(names, *results, strict=True):
        assert_same_bits(name, c, a)
        a, b = np.asarray(a), np.asarray(b)
        if name != "d_sinks":
            a, b = a[back][live], b[live]
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5, err_msg=name)


def listed_sequences() -> list[Case]:
    """The shared list as documents that attend to themselves.

    Heads, masks, dtypes, schedules and contents are the cases'; lengths of keys are cut to 300. MLA
    and quantized cases are left out, because sequences refuse them, and logits near -5e5 (see
    kv_shard_cases).
    """
    found: dict[Case, Case] = {}
    for case in [*CASES, *map(random_case, range(60))]:
        if case.mla or case.kv_dtype or case.q_dtype or "huge" in case.contents:
            continue
        lens = tuple(min(n, 300) for n in case.kv_lens[:12])
        alone = {"page_size": None, "num_layers": None, "q_offsets": None, "branches": None}
        case = dataclasses.replace(
            case, qo_lens=lens, kv_lens=lens, share_prefixes=None, repeats=2, **alone
        )
        found.setdefault(dataclasses.replace(case, name=""), case)
    return list(found.values())


def check_listed_sequences(mesh_name: str, first: int, step: int) -> None:
    """Checks cases first, first + step, ... on one mesh against the truth, and again."""
    with _environment.poisoned():
        for i, case in list(enumerate(listed_sequences()))[first::step]:
            for content in case.contents:
                try:
                    _check_listed_sequence(case, content, i, *MESHES[mesh_name])
                except (AssertionError, ValueError, NotImplementedError) as error:
                    raise AssertionError(f"{case}, {content}, {mesh_name}: {error}") from error


def _check_listed_sequence(case: Case, content: str, index: int, num_heads: int, size: int) -> None:
    if case.num_kv_heads % num_heads:
        num_heads = 1
    batch = build(case, content)
    live = sum(case.qo_lens)
    tokens = -(-(live + 1) // size) * size
    fields = case.spec_fields() | {"max_qo_tokens": tokens, "max_kv_tokens": tokens}
    fields["num_qo_heads"] //= num_heads
    fields["num_kv_heads"] //= num_heads
    spec, mesh = make_spec(**fields), make_mesh(num_heads, size)
    order = ("striped", "contiguous")[index % 2]
    shards = parallel.SequenceShards(spec, "kv", size, order, "ring", "heads")
    if index % 3 == 2 and shards._can_exchange_heads:
        shards = dataclasses.replace(shards, exchange="heads")
    plan = parallel.plan_sequence(shards, np.append(0, np.cumsum(case.qo_lens)).astype(np.int32))

    def place(rows: np.ndarray) -> jax.Array:
        whole = np.full((tokens, *rows.shape[1:]), np.nan, case.dtype)
        whole[:live] = rows[:live]
        return jax.device_put(whole[shards.positions], NamedSharding(mesh, shards.array_spec))

    # k and v have a gap after each request.
    k, v = (
        np.concatenate([x[:0], *r]) for x, r in ((batch.k, batch.k_rows), (batch.v, batch.v_rows))
    )
    attend = jax.jit(
        lambda q, k, v, plan, sinks: parallel.attend_sequence(
            q, k, v, plan, sinks=sinks, return_lse=True, mesh=mesh
        )
    )
    arrays = place(batch.q), place(k), place(v), plan, batch.sinks
    got, again = attend(*arrays), attend(*arrays)
    for name, a, b in zip(("o", "lse"), got, again, strict=True):
        assert_same_bits(name, b, a)
    back = np.argsort(shards.positions)[:live]
    o, lse = (np.asarray(x)[back] for x in got)
    want = expect(case, batch)
    slack = 1 if case.dtype == "float32" else 2
    assert_close_state(
        o, lse, want.o[:live], want.lse[:live], slack * want.o_bound[:live], want.lse_bound[:live]
    )


def check_sequence_bytes() -> None:
    """Checks traffic: each kv block once around, or an all-to-all; no device gathers all keys."""
    tokens, heads, kv_heads = 4096, 8, 4
    fields = {"dtype": "float32", "page_size": None, "max_batch": 4}
    fields |= {"max_qo_tokens": tokens, "max_kv_tokens": tokens}
    temporaries = {}
    for size in sorted({2, min(4, len(jax.devices()))}):
        devices = jax.devices()[:size]
        auto = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((size,), ("kv",), devices=devices, axis_types=auto)
        block = tokens // size * kv_heads * 32 * 4
        rows = block * heads // kv_heads
        for exchange, order, window in (
            ("ring", "striped", -1), ("heads", "striped", -1), ("ring", "contiguous", 100),
        ):  # fmt: skip
            spec = make_spec(heads, kv_heads, 32, window_left=window, **fields)
            shards = parallel.SequenceShards(spec, "kv", size, order, exchange)
            plan = parallel.plan_sequence(shards, [0, tokens // 3, tokens])
            sharding = NamedSharding(mesh, shards.array_spec)
            q, k = (
                jax.ShapeDtypeStruct((tokens, n, 32), np.float32, sharding=sharding)
                for n in (heads, kv_heads)
            )

            def attend(q, k, v, plan, mesh=mesh):
                return parallel.attend_sequence(q, k, v, plan, mesh=mesh)

            compiled = jax.jit(attend).lower(q, k, k, plan).compile()
            text = compiled.as_text()
            found = executed(text)
            hop = ("collective-permute", block)
            if exchange == "heads":
                travels = Counter({("all-to-all", rows): 2, ("all-to-all", block): 2})
            else:
                hops = 1 if order == "contiguous" else size - 1  # windows reach the neighbour
                assert shards.num_hops == hops
                travels = Counter({hop: 2 * hops})
            assert volume(found) == volume(travels), (shards, found, travels)
            if exchange == "ring" and size == 4 and window < 0:
                # 2 of the 3 hops are a loop: XLA cannot send the keys of all hops at once.
                assert len(collectives(text)) <= 4, text
                temporaries[exchange] = compiled.memory_analysis().temp_size_in_bytes

            def o_and_sum(*x, attend=attend):
                o = attend(*x)
                # Squares: XLA does not send known values, such as the ones in the gradient of a
                # sum.
                return (o * o).sum(), o

            both = jax.grad(o_and_sum, (0, 1, 2), has_aux=True)
            found = executed(jax.jit(both).lower(q, k, k, plan).compile().as_text())
            if exchange == "heads":  # the backward pass sends as much again
                travels += travels
            else:  # k and v again, which share the first hop; their gradients; and one hop home.
                travels = Counter({hop: 2 * hops + 2 * (hops - 1) + 2 * (hops + 1)})
            assert volume(found) == volume(travels), (shards, found, travels)
    if not temporaries:
        return
    # Old and new state in f32; the local keys and values, and those that arrive and leave.
    states = 2 * tokens // 4 * heads * (32 + 1) * 4
    spec = make_spec(heads, kv_heads, 32, **fields)
    workspace = 4 * spec.workspace_words
    assert temporaries["ring"] < states + 3 * 2 * block + 2 * workspace, temporaries


def volume(executed: Counter[tuple[str, int]]) -> Counter[str]:
    """Bytes by kind of collective. On GPUs XLA merges transfers that leave at the same time."""
    total = Counter()
    for (kind, num_bytes), times in executed.items():
        total[kind] += num_bytes * times
    return total


def check_sequence_plans() -> None:
    """Checks that plans made in shard_map have the host's bits and that a bad batch is refused."""
    for case in sequence_cases()[::3]:
        masks = dict(case)
        (qo_heads, kv_heads), order, exchange = (
            masks.pop(name) for name in ("heads", "order", "exchange")
        )
        size = min(4, len(jax.devices()))
        if exchange == "heads" and qo_heads % 4:
            continue
        tokens = {"max_qo_tokens": 296, "max_kv_tokens": 296}
        spec = make_spec(qo_heads, kv_heads, 16, dtype="float32", page_size=None,
                                max_batch=9, **tokens, **masks)  # fmt: skip
        shards = parallel.SequenceShards(spec, "kv", size, order, exchange)
        host = parallel.plan_sequence(shards, _DOCUMENTS)
        for step, buffers in enumerate(host.buffers):
            for device in range(len(buffers)):
                own = host.step_plan(step, device)
                own.spec.problem.check_plan(np.ascontiguousarray(own.buffer), -1)
        make = jax.jit(
            jax.shard_map(
                lambda indptr, shards=shards: parallel.plan_sequence(shards, indptr),
                mesh=make_mesh(1, size),
                in_specs=jax.sharding.PartitionSpec(),
                out_specs=shards.plan_spec,
                check_vma=False,
            )
        )
        # Only indptr goes in: XLA may be unable to leave out an unused input.
        lowered = make.lower(_DOCUMENTS).as_text()
        assert "manual_computation(%arg0) " in lowered, lowered
        for a, b in zip(make(_DOCUMENTS).buffers, host.buffers, strict=True):
            assert_same_bits("buffer", a, b)
    if on_gpu():
        return  # a CUDA kernel cannot raise
    for bad in ([0, 5, 4], [0, 297], [1, 5], [0, 3, 2, 10]):
        try:
            jax.block_until_ready(make(np.array(bad, np.int32)))
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            assert "plan: " in str(error), error
        else:
            raise AssertionError(bad)


def check_dense_sequences(first: int = 0, step: int = 1) -> None:
    """Checks that dense batches split over batch, sequence and heads match one device.

    Takes cases first, first + step, ...
    """
    rng = np.random.default_rng(0)
    batch, length = 2, 64
    devices = jax.devices()[:8]
    auto = (jax.sharding.AxisType.Auto,) * 3
    cases = (
        ((1, 4, 1), (8, 2), {"is_causal": True}, {"all-to-all", "collective-permute"}),
        ((2, 2, 2), (8, 4), {"is_causal": True}, {"all-to-all"}),
        ((2, 4, 1), (4, 4), {"is_causal": True, "local_window_size": 10}, {"collective-permute"}),
        ((1, 2, 1), (2, 1), {"scale": 0.3, "local_window_size": (3, 30)}, {"collective-permute"}),
        ((1, 1, 1), (8, 2), {"is_causal": True}, set()),
        ((1, 2, 1), (4, 1), {"is_causal": True}, {"all-to-all", "collective-permute"}),
    )
    for shape, heads, options, kinds in cases[first::step]:
        if prod(shape) > len(jax.devices()):
            continue
        names = "data", "sequence", "heads"
        mesh = jax.make_mesh(shape, names, devices=devices[: prod(shape)], axis_types=auto)
        arrays = [
            rng.normal(size=(batch, length, n, 16)).astype(np.float32) for n in (*heads, heads[1])
        ]
        spec = jax.sharding.PartitionSpec(*names)
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays]
        over = {"mesh": mesh, "axis_name": "sequence", "batch_axis_name": "data",
                "heads_axis_name": "heads"}  # fmt: skip

        def split(q, k, v, options=options, over=over):
            return parallel.dot_product_attention(q, k, v, **options, **over, return_residual=True)

        def whole(q, k, v, options=options):
            options = {name: x for name, x in options.items() if name != "exchange"}
            return ja.dot_product_attention(q, k, v, **options, return_residual=True)

        def loss(attend, *arrays):
            o, lse = attend(*arrays)
            return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.cos(lse)), (o, lse)

        def run(attend, *arrays, loss=loss):
            of_all = functools.partial(loss, attend)
            return jax.value_and_grad(of_all, (0, 1, 2), has_aux=True)(*arrays)

        step = jax.jit(split)
        text = step.lower(*placed).compile().as_text()
        assert {kind for kind, _ in collectives(text)} == kinds, (shape, collectives(text))
        (_, got), grads = jax.jit(lambda *x: run(split, *x))(*placed)
        assert got[0].sharding.is_equivalent_to(NamedSharding(mesh, spec), 4)
        (_, want), want_grads = run(whole, *arrays)
        for a, b in zip((*got, *grads), (*want, *want_grads), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5, err_msg=str(options))


def check_processes() -> None:
    """Checks that each process of a global mesh has its own devices' results, equal to one
    device's.
    """
    num_processes = jax.process_count()
    assert num_processes > 1 and len(jax.local_devices()) < len(jax.devices())
    size = len(jax.devices())
    mesh = make_mesh(1, size)
    rng = np.random.default_rng(0)  # the same in every process
    tokens = 16 * size
    fields = {"dtype": "float32", "max_qo_tokens": tokens, "max_batch": 3}

    def place(x, spec):
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    def check(got, want):
        for shard in got.addressable_shards:
            np.testing.assert_allclose(shard.data, want[shard.index], rtol=2e-5, atol=2e-5)

    q, k, v = (rng.normal(size=(tokens, n, 16)).astype(np.float32) for n in (8, 4, 4))
    indptr = np.array([0, tokens - 20, tokens - 3])
    ragged = make_spec(8, 4, 16, page_size=None, max_kv_tokens=tokens, **fields)
    want = ja.attention(q, k, v, ja.plan(ragged, indptr, np.diff(indptr), kv_indptr=indptr))
    for exchange in ("ring", "heads"):
        shards = parallel.SequenceShards(ragged, "kv", size, "striped", exchange)
        plan = jax.tree.map(
            lambda x, shards=shards: place(x, shards.plan_spec),
            parallel.plan_sequence(shards, indptr),
        )
        placed = [place(x[shards.positions], shards.array_spec) for x in (q, k, v)]
        o = jax.jit(lambda *x: parallel.attend_sequence(*x, mesh=mesh))(*placed, plan)
        check(o, np.asarray(want)[shards.positions])
    paged = make_spec(8, 4, 16, page_size=2 * size, max_kv_pages=9, **fields)
    kv_shards = parallel.KvShards(paged, "kv", size)
    pages = rng.normal(size=(2, 9, 2 * size, 4, 16)).astype(np.float32)
    lengths = np.array([0, 1, 9]), np.array([3 * size, 9]), np.array([0, 4, 9]), np.arange(9)
    want = ja.attention(q, *pages, ja.plan(paged, *lengths))
    plan = parallel.plan_kv_shards(kv_shards, *lengths)
    plan = jax.tree.map(lambda x: place(x, kv_shards.plan_spec), plan)
    placed = [place(x, kv_shards.pages_spec(is_stacked=False)) for x in pages]
    attend = jax.jit(lambda *x: parallel.attend_kv_shards(*x, mesh=mesh))
    check(attend(place(q, kv_shards.rows_spec), *placed, plan), np.asarray(want))


# ---- arrays with another sharding ---------------------------------------------------------------


def check_shardings(explicit: bool) -> None:
    """Checks that replicated arrays are cut and that arrays with another sharding are refused.

    That holds in jit and outside, and for gradients. Nothing is gathered.
    """
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2, 2), ("heads", "kv"), axis_types=(kind,) * 2)
    P = jax.sharding.PartitionSpec
    tokens = {"max_qo_tokens": 8, "dtype": "float32", "max_batch": 1}
    paged = make_spec(2, 1, 16, page_size=4, max_kv_pages=6, **tokens)
    kv_shards = parallel.KvShards(paged, "kv", 2, "heads")
    sharded = parallel.plan_kv_shards(kv_shards, [0, 8], [20], [0, 5], [4, 2, 0, 1, 3])
    ragged = make_spec(2, 1, 16, page_size=None, max_kv_tokens=8, **tokens)
    shards = parallel.SequenceShards(ragged, "kv", 2, "striped", "ring", "heads")
    sequence = parallel.plan_sequence(shards, [0, 8])
    rng = np.random.default_rng(0)
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    make = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    pages, rows = make(6, 4, 2, 16), make(8, 2, 16)
    dense = {"axis_name": "kv", "heads_axis_name": "heads", "exchange": "ring"}
    cases = {
        "attend_kv_shards": (
            lambda q, k_pages, v_pages: parallel.attend_kv_shards(
                q, k_pages, v_pages, sharded, mesh=mesh
            ),
            {"q": make(8, 4, 16), "k_pages": pages, "v_pages": pages + 1},
            {"all-gather": 1},
            ({"k_pages": P("kv")}, {"v_pages": P(None, None, "kv")}, {"q": P("kv")},
             {"k_pages": P(None, "kv", None, "heads")}, {"q": P(None, ("heads", "kv"))}),
        ),
        "append_kv_shards": (
            lambda k_pages, v_pages, k_new, v_new: parallel.append_kv_shards(
                k_pages, v_pages, k_new, v_new, sharded, mesh=mesh
            )[0],
            {"k_pages": pages, "v_pages": pages, "k_new": rows, "v_new": rows},
            {},
            ({"k_pages": P("heads")}, {"v_new": P("kv")}),
        ),
        "attend_sequence": (
            lambda q, k, v: parallel.attend_sequence(q, k, v, sequence, mesh=mesh),
            {"q": make(8, 4, 16), "k": rows, "v": rows + 1},
            {"collective-permute": 2},
            ({"q": P("heads")}, {"k": P(None, "kv")}, {"v": P(("heads", "kv"))}),
        ),
        "parallel.dot_product_attention": (
            lambda query, key, value: parallel.dot_product_attention(
                query, key, value, mesh=mesh, **dense
            ),
            {"query": make(2, 8, 4, 16), "key": make(2, 8, 2, 16), "value": make(2, 8, 2, 16)},
            {"collective-permute": 2},
            ({"query": P("kv")}, {"key": P(None, "heads")}),
        ),
    }  # fmt: skip
    for op, (call, arrays, kinds, refused) in cases.items():
        everywhere = {name: put(x, P()) for name, x in arrays.items()}
        # Only XLA knows the sharding of another operation's result.
        jitted = jax.jit(lambda x, call=call: call(**{name: 2 * x[name] / 2 for name in x}))
        compiled = jitted.lower(everywhere).compile()
        found = collectives(compiled.as_text())
        assert Counter(kind for kind, _ in found) == kinds, (op, found)
        want = call(**arrays)
        np.testing.assert_allclose(compiled(everywhere), want, rtol=1e-5, atol=1e-6)
        for bad in refused:
            ((name, spec),) = bad.items()
            split = {name: put(arrays[name], spec)}
            sentence = f"{op}: {name}: expected an array that is split as "
            for form in (lambda x, call=call: call(**x), jitted):
                raises(sentence, form, everywhere | split)
    call, arrays, *_ = cases["attend_sequence"]
    # A gradient that is split by tokens in another way.
    if not explicit:  # with explicit sharding the product itself raises
        weights = put(make(8, 4, 16), P("heads"))
        gradient = jax.jit(jax.grad(lambda x, w: jnp.sum(w * call(**x))))
        raises("attend_sequence: gradient: expected an", gradient, arrays, weights)


def raises(sentence: str, call: Any, *arguments: Any) -> None:
    try:
        jax.block_until_ready(call(*arguments))
    except NotImplementedError as error:  # itself, where XLA's partitioner finds it, too
        assert str(error).startswith(sentence), (sentence, error)
    else:
        raise AssertionError(sentence)


def check_bad_batches() -> None:
    """Checks that a bad batch planned inside jit raises `plan`'s sentence about the whole batch."""
    mesh = make_mesh(1, 2)
    fields = {"page_size": 8, "max_batch": 2, "max_qo_tokens": 4, "max_kv_pages": 9}
    spec = make_spec(4, 2, 16, dtype="float32", **fields)
    kv_shards = parallel.KvShards(spec, "kv", 2)

    def step(q, k, v, *lengths):
        plan = parallel.plan_kv_shards(kv_shards, *lengths)
        k, v = parallel.append_kv_shards(k, v, q[:, :2], q[:, 2:], plan)
        return parallel.attend_kv_shards(q, k, v, plan, scatter="heads"), k, v

    pages, all_of_it = kv_shards.pages_spec(is_stacked=False), jax.sharding.PartitionSpec()
    step = jax.jit(
        jax.shard_map(  # shard_map checks that results vary over the axis
            step,
            mesh=mesh,
            in_specs=(all_of_it, pages, pages, *[all_of_it] * 4),
            out_specs=(kv_shards.o_spec("heads"), pages, pages),
        )
    )
    q, k = np.ones((4, 4, 16), np.float32), np.zeros((5, 8, 2, 16), np.float32)
    good = [np.array(x, np.int32) for x in ([0, 1, 4], [9, 12], [0, 2, 4], [0, 1, 2, 3])]
    assert np.isfinite(step(q, k, k, *good)[0]).all()
    for argument, bad, sentence in (
        (1, [9, 99], "plan: page_indptr: request 1: expected at least 13 pages for kv_len 99 at"),
        (0, [0, 3, 2], "plan: qo_indptr[2]: expected offsets that never decrease"),
        (3, [0, 1, 2, -7], "plan: page_indices[3] of request 1: expected a page id >= 0, got -7"),
    ):
        batch = list(good)
        batch[argument] = np.array(bad, np.int32)
        try:
            jax.block_until_ready(step(q, k, k, *batch))
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            assert sentence in str(error), error
        else:
            raise AssertionError(sentence)
