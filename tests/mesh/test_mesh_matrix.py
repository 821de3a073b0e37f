"""Every public function on meshes of two CPU devices (helpers/mesh_matrix.py)."""

import pytest

from helpers.mesh_checks import run_on_cpus
from helpers.mesh_matrix import BUILDERS

START = "from helpers import mesh_matrix\n"
DENSE = ("jax_attn.dot_product_attention",)
SHARDS = tuple(name for name in BUILDERS if "parallel" in name)
REST = tuple(name for name in BUILDERS if name not in (*DENSE, *SHARDS))


@pytest.mark.parametrize("names", [DENSE, SHARDS, REST], ids=["dense", "shards", "rest"])
def test_every_way_to_be_on_a_mesh(names):
    run_on_cpus(2, START + f"mesh_matrix.check({names})")


def test_modes_of_what_needs_a_mesh():
    run_on_cpus(2, START + f"mesh_matrix.check_modes({SHARDS})")


def test_with_gspmd():
    """XLA's other partitioner, with JAX_USE_SHARDY_PARTITIONER=0."""
    program = "import jax; jax.config.update('jax_use_shardy_partitioner', False)\n" + START
    run_on_cpus(2, program + f"mesh_matrix.check({(*BUILDERS,)}, lambda way: way == 'Auto')")


@pytest.mark.parametrize("names", [DENSE, SHARDS, REST], ids=["dense", "shards", "rest"])
def test_some_axes_manual(names):
    run_on_cpus(4, START + f"mesh_matrix.check_partly_manual({names})")


def test_forward_mode_and_second_derivatives():
    names = ("jax_attn.parallel.attend_sequence", "jax_attn.parallel.dot_product_attention")
    run_on_cpus(2, START + f"mesh_matrix.check_derivatives({names})")
