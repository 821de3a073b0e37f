"""parallel.all_reduce over CPU devices; over GPUs in test_mesh_cuda.py, emulated in
tests/csrc/cuda/all_reduce_cuda_test.cc and all_reduce_threads_test.cc."""

import pytest

from helpers.mesh_checks import run_on_cpus


@pytest.mark.parametrize("num_devices", [2, 4])
def test_values(num_devices):
    run_on_cpus(num_devices, f"import mesh_all_reduce_checks as m; m.check_values({num_devices})")


def test_gradients_and_errors():
    run_on_cpus(2, "import mesh_all_reduce_checks as m; m.check_gradients(2); m.check_errors(2)")


def test_norms_follow_sums():
    run_on_cpus(2, "import mesh_all_reduce_checks as m; m.check_models(2)")
