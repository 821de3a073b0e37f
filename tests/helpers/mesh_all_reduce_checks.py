"""Checks of parallel.all_reduce that run in a process with several devices, as mesh_checks.py."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from helpers.mesh_checks import make_mesh, on_gpu
from jax_attn import _core, models, parallel
from jax_attn.models._layers import decoder

# rows, columns, dtype, residual, norm, quantize
CASES = (
    (1, 64, "bfloat16", True, True, False),
    (7, 4096, "bfloat16", True, True, False),
    (300, 320, "float16", False, True, True),
    (5, 8192, "bfloat16", True, True, True),
    (33, 1000, "float32", True, False, False),
    (2, 24, "float32", False, True, False),
    (3, 40, "float16", False, False, False),
    (520, 512, "bfloat16", True, True, False),
)


def mapped(around: jax.sharding.Mesh, **options: Any) -> Any:
    """A function of the parts of all devices, [num_devices, rows, columns], residual and weight.
    Returns what each device has, one after the other."""

    def call(x: Any, residual: Any, weight: Any) -> Any:
        given = {"mesh": around, "residual": residual, "norm_weight": weight, **options}
        results = parallel.all_reduce(x[0], "heads", **given)
        return jax.tree.map(lambda y: y[None], results)

    return jax.jit(
        jax.shard_map(
            call,
            mesh=around,
            in_specs=(P("heads"), P(), P()),
            out_specs=P("heads"),
            check_vma=False,
        )
    )


def arrays(num_devices: int, case: Any, seed: int = 0) -> tuple[Any, Any, Any]:
    rows, columns, dtype, has_residual, has_norm, _ = case
    rng = np.random.default_rng(seed)
    x, residual, weight = (
        jnp.asarray(rng.standard_normal(shape, np.float32), dtype)
        for shape in ((num_devices, rows, columns), (rows, columns), (columns,))
    )
    return x, residual if has_residual else None, weight if has_norm else None


def wanted(x: Any, residual: Any, weight: Any, eps: float, offset: float) -> tuple[Any, Any]:
    """The total in the documented order, and the norm in f64."""
    parts = np.asarray(x, np.float32)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    total = np.asarray(total.astype(x.dtype))
    if residual is not None:
        total = (np.asarray(residual, np.float32) + total.astype(np.float32)).astype(x.dtype)
    if weight is None:
        return total, None
    x64 = total.astype(np.float64)
    scale = offset + np.asarray(weight, np.float64)
    return total, x64 / np.sqrt(np.mean(x64**2, -1, keepdims=True) + eps) * scale


def check_values(num_devices: int) -> None:
    mesh = make_mesh(num_devices, 1)
    for case in CASES:
        x, residual, weight = arrays(num_devices, case)
        quantize = case[-1]
        call = mapped(mesh, quantize=quantize, eps=1e-5, norm_offset=0.5)
        before = _core.jit_stats()["all_reduce_launches"]
        results = jax.tree.leaves(call(x, residual, weight))
        launches = _core.jit_stats()["all_reduce_launches"] - before
        assert launches == (num_devices if on_gpu() else 0), (case, launches)
        total, normed = wanted(x, residual, weight, 1e-5, 0.5)
        for result in results:  # the same bits on all devices
            whole = np.asarray(result).view(np.uint8)
            np.testing.assert_array_equal(whole, np.broadcast_to(whole[:1], whole.shape))
        np.testing.assert_array_equal(np.asarray(results[0][0]), total, err_msg=str(case))
        if quantize:
            codes, scales = (np.asarray(y[0], np.float32) for y in results[1:])
            error = np.abs(codes * scales[:, None] - normed)
            assert np.all(error <= 0.07 * np.abs(normed) + scales[:, None] * 2**-9), case
            np.testing.assert_allclose(np.abs(codes).max(-1), 448, err_msg=str(case))
        elif normed is not None:
            tolerance = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 8e-3}[x.dtype.name]
            got = np.asarray(results[1][0], np.float64)
            np.testing.assert_allclose(got, normed, rtol=tolerance, atol=tolerance / 10)


def check_gradients(num_devices: int) -> None:
    """Gradients are those of psum, the residual and the norm, written out."""
    mesh = make_mesh(num_devices, 1)
    x, residual, weight = arrays(num_devices, (3, 32, "float32", True, True, False))

    def plain(x: Any, residual: Any, weight: Any) -> Any:
        total = residual + jax.lax.psum(x, "heads")
        variance = jnp.mean(total * total, axis=-1, keepdims=True)
        return total, total / jnp.sqrt(variance + 1e-6) * weight

    def fused(x: Any, residual: Any, weight: Any) -> Any:
        given = {"residual": residual, "norm_weight": weight, "mesh": mesh}
        return parallel.all_reduce(x, "heads", **given)

    def gradients(call: Any) -> Any:
        def loss(x: Any, residual: Any, weight: Any) -> Any:
            total, normed = call(x[0], residual, weight)
            return jnp.sum(jnp.sin(total) + jnp.cos(normed))

        of_all = jax.grad(loss, (0, 1, 2))
        specs = P("heads"), P(), P()
        return jax.jit(
            jax.shard_map(of_all, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)
        )(x, residual, weight)

    for got, want in zip(gradients(fused), gradients(plain), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def check_errors(num_devices: int) -> None:
    """Each wrong argument is one sentence; check_vma=True falls back to XLA's sum."""
    mesh = make_mesh(num_devices, 1)
    x, residual, weight = arrays(num_devices, (2, 16, "bfloat16", True, True, False))

    def sentence(*changed: Any, **options: Any) -> str:
        try:
            mapped(mesh, **options).lower(*changed)
        except ValueError as error:
            return str(error)
        raise AssertionError(f"no error for {options}")

    own, wide = (x, residual, weight), weight.astype(jnp.float32)
    other = jax.make_mesh((1,), ("heads",), devices=jax.devices()[:1])
    for words, arguments, options in (
        ("mesh: expected that of the shard_map", own, {"mesh": other}),
        ("residual: expected bfloat16[2, 16], got", (x, residual[:1], weight), {}),
        ("norm_weight: expected bfloat16[16], got float32", (x, residual, wide), {}),
        ("norm_weight: expected bfloat16[16], got", (x, residual, weight[:8]), {}),
        ("quantize: expected norm_weight", (x, residual, None), {"quantize": True}),
        ("timeout: expected seconds above 0", own, {"timeout": 0.0}),
        ("timeout: expected seconds above 0, up to 1e+06", own, {"timeout": 1e17}),
        ("x: expected [..., columns] of", (x.astype(jnp.int32), None, None), {}),
    ):
        got = sentence(*arguments, **options)
        assert got.startswith(f"all_reduce: {words}"), (words, got)
        assert "\n" not in got and got.endswith(".")
    try:
        parallel.all_reduce(x, "heads")
    except ValueError as error:
        assert "expected an axis of the jax.shard_map around the call" in str(error)
    else:
        raise AssertionError("no error outside of shard_map")
    checked = jax.shard_map(
        lambda x: parallel.all_reduce(x[0], "heads", mesh=mesh),
        mesh=mesh, in_specs=P("heads"), out_specs=P(),
    )  # fmt: skip
    np.testing.assert_array_equal(jax.jit(checked)(x), wanted(x, None, None, 0, 0)[0])
    parallel.check_all_reduces()


def check_models(num_devices: int) -> None:
    """A model whose norms follow its sums has the logits of one whose norms are computed apart."""
    from helpers import model_cases

    mesh = make_mesh(num_devices, 1)
    config = models.parse_config(model_cases._COMMON | model_cases.CONFIGS["llama"])
    split = models.TensorParallel(config, mesh, "heads")
    assert decoder._norms_follow_sums(split.config)
    parts = split.split_params(models.random_params(config, jax.random.key(0), "float32"))
    specs = jax.tree.map(lambda x: x.sharding.spec, parts)
    tokens = jnp.arange(9) % config.vocab_size

    def logits() -> Any:
        forward = functools.partial(models.reference_forward, config=split.config)
        return jax.jit(
            jax.shard_map(
                lambda params, tokens: forward(params, tokens=tokens),
                mesh=mesh, in_specs=(specs, P()), out_specs=P(), check_vma=False,
            )
        )  # fmt: skip

    together = logits()(parts, tokens)
    decoder._norms_follow_sums = lambda config: False
    np.testing.assert_allclose(together, logits()(parts, tokens), rtol=1e-5, atol=1e-5)


def check_repeats(num_devices: int, num_repeats: int) -> None:
    """Several executables in flight, in a random order, each with calls in a loop: every result has
    the bits of the first."""
    mesh = make_mesh(num_devices, 1)
    num_loops = 10
    spread = jax.sharding.NamedSharding(mesh, P("heads"))
    everywhere = jax.sharding.NamedSharding(mesh, P())

    def executable(case: Any) -> tuple[Any, Any]:
        x, residual, weight = arrays(num_devices, case)
        x = jax.device_put(x, spread)
        residual, weight = jax.device_put((residual, weight), everywhere)

        def step(_: Any, carry: Any) -> Any:
            x, residual, weight = carry
            given = {"mesh": mesh, "residual": residual, "norm_weight": weight}
            total, normed = parallel.all_reduce(x, "heads", **given)
            return (x + normed) / 2, total / 2, weight

        def call(x: Any, residual: Any, weight: Any) -> Any:
            x, total, _ = jax.lax.fori_loop(0, num_loops, step, (x[0], residual, weight))
            return x[None], total[None]

        specs = P("heads"), P(), P()
        run = jax.jit(
            jax.shard_map(
                call, mesh=mesh, in_specs=specs, out_specs=P("heads"), check_vma=False
            )
        )  # fmt: skip
        return run, (x, residual, weight)

    cases = [case for case in CASES if case[3] and case[4] and not case[5]]
    cases += [(64, 4096, "bfloat16", True, True, False), (3, 2048, "float16", True, True, False)]
    executables = [executable(case) for case in cases]
    first = [run(*given) for run, given in executables]

    @jax.jit
    def differs(a: Any, b: Any) -> Any:
        return sum(jnp.sum(x != y) for x, y in zip(a, b, strict=True))

    rng = np.random.default_rng(0)
    counts = []
    for _ in range(max(1, num_repeats // num_loops)):
        i = rng.integers(len(executables))
        run, given = executables[i]
        counts.append(differs(run(*given), first[i]))
        if len(counts) % 64 == 0 or not on_gpu():  # on CPUs, runs would wait for each other
            jax.block_until_ready(counts)
    assert not np.any(jax.device_get(counts)), "bits differ from those of the first run"
    for _, total in first:
        values = np.asarray(total, np.float32)
        assert np.all(np.isfinite(values))
        assert np.all(values == values[:1])
    parallel.check_all_reduces()


def check_late_device(num_devices: int) -> None:
    """A device that comes much too late is an error in one sentence, and nobody hangs.

    The process cannot sum by the kernel afterwards, so this is the last check of a process.
    """
    mesh = make_mesh(num_devices, 1)
    x, residual, weight = arrays(num_devices, (64, 4096, "bfloat16", True, True, False))

    def late(x: Any, residual: Any, weight: Any) -> Any:
        # 2 ms a turn, or more. The host waits for each.
        turns = jnp.where(jax.lax.axis_index("heads") == num_devices - 1, 200, 0)
        square = jnp.full((4096, 4096), 1e-4 * x[0, 0, 0], jnp.float32)
        waste = jax.lax.fori_loop(0, turns, lambda i, y: jnp.tanh(y @ square), square)[0, 0]
        given = {"mesh": mesh, "residual": residual, "norm_weight": weight, "timeout": 0.05}
        total, normed = parallel.all_reduce(x[0] + (0 * waste).astype(x.dtype), "heads", **given)
        return total[None], normed[None]

    specs = P("heads"), P(), P()
    run = jax.jit(
        jax.shard_map(late, mesh=mesh, in_specs=specs, out_specs=P("heads"), check_vma=False)
    )
    total, _ = run(x, residual, weight)
    assert np.any(np.isnan(np.asarray(total[0], np.float32)))
    for again in (parallel.check_all_reduces, lambda: run(x, residual, weight)):
        try:
            jax.block_until_ready(again())
        except RuntimeError as error:
            assert "late or gone" in str(error), error
        else:
            raise AssertionError("no error")
