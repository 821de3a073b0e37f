"""Every public function in each of JAX's modes. test_mesh_matrix.py has meshes.

The calls come from the lists of public names: a name without a call fails.
"""

import dataclasses

import jax
import jax.export
import numpy as np
import pytest

import jax_attn as ja
from helpers import entry_points, mesh_matrix
from helpers.entry_points import CASES, compare, with_slopes
from jax_attn import models


def test_every_public_name_has_a_case():
    known = {*CASES, *mesh_matrix.BUILDERS, *entry_points.OTHERS}
    assert entry_points.public_names() == known
    assert {*CASES} - {*mesh_matrix.BUILDERS} == {*mesh_matrix.NOT_ON_MESHES}


def run_on_device(call, entry):
    """Under jit, with arrays that are on the device: nothing is sent there."""
    arrays = jax.device_put(entry.arrays)
    compiled = jax.jit(call)
    with jax.transfer_guard("disallow"):
        return compiled(*arrays)


def run_eagerly(call, entry):
    return call(*jax.device_put(entry.arrays))


def run_without_jit(call, entry):
    with jax.disable_jit():
        return call(*jax.device_put(entry.arrays))


def run_and_debug_nans(call, entry):
    """Eagerly, because under jit only results are looked at."""
    with jax.debug_nans(True):
        return call(*jax.device_put(entry.arrays))


def run_checkpointed(call, entry):
    again = dataclasses.replace(entry, call=jax.checkpoint(entry.call))
    return jax.jit(with_slopes(again))(*entry.arrays)


def run_exported(call, entry):
    export = jax.export.export(jax.jit(call), disabled_checks=ja.export_checks())
    return jax.export.deserialize(export(*entry.arrays).serialize()).call(*entry.arrays)


def run_in(enter):
    def run(call, entry):
        with enter():
            return jax.jit(call)(*entry.arrays)

    return run


MODES = {
    "transfer_guard": run_on_device,
    "eager": run_eagerly,
    "disable_jit": run_without_jit,
    "debug_nans": run_and_debug_nans,
    "checkpoint": run_checkpointed,
    "export": run_exported,
    **{name: run_in(enter) for name, enter in entry_points.CONTEXTS.items()},
}


@pytest.mark.parametrize(
    "name,case", [(name, case) for name, cases in CASES.items() for case in cases]
)
def test_modes(name, case):
    """Values and gradients are those of plain jit, in every mode and mapped 0, 1 or 2 times."""
    entry = CASES[name][case]
    call = with_slopes(entry)
    want = jax.jit(call)(*entry.arrays)
    for mode, run in MODES.items():
        try:
            compare(run(call, entry), want)
        except Exception as error:
            raise AssertionError(f"{mode}: {type(error).__name__}: {error}") from error
    shapes = jax.eval_shape(call, *entry.arrays)
    assert shapes == jax.eval_shape(lambda: want)
    for size in (0, 1, 2):
        check_mapped(entry, call, want, size)


def check_mapped(entry, call, want, size):
    first = jax.tree.map(lambda x: np.broadcast_to(x, (size, *np.shape(x))), entry.arrays[0])
    mapped = jax.jit(jax.vmap(call, in_axes=(0, *[None] * (len(entry.arrays) - 1))))
    if entry.vmap is not None:
        with pytest.raises(NotImplementedError, match=entry.vmap):
            mapped(first, *entry.arrays[1:])
        return
    got = mapped(first, *entry.arrays[1:])
    assert all(len(x) == size for x in jax.tree.leaves(got))
    for i in range(size):
        compare(jax.tree.map(lambda x, i=i: x[i], got), want)


@pytest.mark.parametrize("mode", entry_points.CONTEXTS)
def test_a_model(mode):
    config, params, _ = models.load(models.BUNDLED, dtype="float32")
    fields = {"dtype": "float32", "max_batch": 3, "max_qo_tokens": 6, "max_kv_pages": 8}
    specs = models.attention_specs(config, page_size=4, **fields)
    pages = models.init_pages(config, specs, num_pages=8)
    plans = tuple(ja.plan(spec, *entry_points.PAGED) for spec in specs)
    tokens, positions, rows = np.int32([1, 2, 3, 4, 0, 0]), np.int32([0, 1, 2, 4, 0, 0]), [2, 3]
    batch = tokens, positions, *pages, plans, np.int32(rows)

    def run():
        return jax.jit(models.forward, static_argnames="config")(params, config, *batch)

    want = run()
    with entry_points.CONTEXTS[mode]():
        compare(run(), want)
