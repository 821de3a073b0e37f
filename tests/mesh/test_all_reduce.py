"""parallel.all_reduce over CPU devices; over GPUs in test_mesh_cuda.py, emulated in
tests/csrc/cuda/all_reduce_cuda_test.cc and all_reduce_threads_test.cc."""

import importlib

import jax.numpy as jnp
import numpy as np
import pytest

from helpers.mesh_checks import run_on_cpus


@pytest.mark.parametrize("num_devices", [2, 4])
def test_values(num_devices):
    run_on_cpus(num_devices, f"import mesh_all_reduce_checks as m; m.check_values({num_devices})")


def test_gradients_and_errors():
    run_on_cpus(2, "import mesh_all_reduce_checks as m; m.check_gradients(2); m.check_errors(2)")


def test_norms_follow_sums():
    run_on_cpus(2, "import mesh_all_reduce_checks as m; m.check_models(2)")


@pytest.mark.parametrize(
    ("shape", "group", "norm", "rows", "threads", "vectors", "two_shot"),
    [
        ((2, 5, 264), 3, (False, 0.0, 1e-6, False), (1, 2640), 352, 1, False),
        ((3, 5, 264), 3, (True, 0.5, 1e-5, False), (15, 264), 64, 1, False),
        ((3, 5, 264), 3, (True, 0.5, 1e-5, True), (15, 264), 64, 1, False),
        ((192, 4128), 8, (True, 0.0, 1e-5, False), (192, 4128), 288, 2, True),
    ],
)
def test_what_the_kernel_is_told(shape, group, norm, rows, threads, vectors, two_shot, monkeypatch):
    module = importlib.import_module("jax_attn.parallel.all_reduce")
    told = {}

    def kernel(operands, **attributes):
        told.update(attributes)
        x, residual, *weight = operands
        assert x.shape == residual.shape == rows and [w.shape for w in weight] == weights
        scales = [jnp.arange(rows[0], dtype=jnp.float32)] if attributes["quantizes"] else []
        return (x + residual, *([x, *scales] if weight else []))

    monkeypatch.setattr(module.ffi, "all_reduce", kernel)
    norm = module._Norm(*norm)
    x = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.bfloat16)
    weights = [shape[-1:]] if norm.has_norm else []
    operands = (x, x, *(jnp.ones(w, x.dtype) for w in weights))
    groups = (tuple(range(group)), tuple(range(group, 2 * group)))
    found = module._by_kernel(operands, groups, norm, True, 2.5)
    total, *more = found if norm.has_norm else (found,)
    assert total.shape == shape and (total == 2 * x).all()
    if norm.has_norm:
        assert (more[0] == x).all()
    if norm.quantize:
        assert (more[1] == np.arange(rows[0]).reshape(shape[:-1])).all()
    assert told["devices"].tolist() == list(range(2 * group)) and told["group_size"] == group
    assert (told["num_threads"], told["vectors"]) == (threads, vectors)
    assert told["two_shot"] == two_shot and told["limit"] == 2500
    pieces = -(-rows[0] // group) if two_shot else rows[0]
    assert told["num_ctas"] == min(pieces, module._core.all_reduce_ctas)
    assert (told["residual"], told["norm"]) == (True, norm.has_norm)
    assert (told["norm_offset"], told["eps"]) == (np.float32(norm.offset), np.float32(norm.eps))
