"""The checks of meshes on GPUs: those meshes for which there are enough devices."""

import jax
import pytest

from helpers.mesh_checks import run_on_gpus


@pytest.fixture(autouse=True)
def gpus():
    try:
        count = len(jax.devices("gpu"))
    except RuntimeError as error:
        pytest.skip(f"no GPU: {str(error).splitlines()[0]}")
    if count < 2:
        pytest.skip("needs two GPUs")


@pytest.mark.cuda
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "call",
    [
        "check_kv_shards('1x2', 0, 16)",
        "check_kv_shards('2x1', 1, 16)",
        "check_bytes()",
        "check_loops('1x2')",
        "check_plans()",
        "check_latent()",
        "check_appends()",
        "check_sequences(0, 5, True)",
        "check_sequence_bytes()",
        "check_sequence_plans()",
        "check_dense_sequences()",
    ],
)
def test(call):
    run_on_gpus(f"import mesh_checks as m; m.{call}", timeout=550)


@pytest.mark.cuda
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "call",
    [
        "check_values(2)",
        "check_gradients(2)",
        "check_errors(2)",
        "check_repeats(2, 3000)",
        "check_models(2)",
        "check_late_device(2)",
    ],
)
def test_all_reduce(call):
    run_on_gpus(f"import mesh_all_reduce_checks as m; m.{call}", timeout=550)


@pytest.mark.cuda
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "call",
    ["check_models(2, 0, 25)", "check_models(1, 0, 25, 2)", "check_engine((2, 1), (1, 2))"],
)
def test_models(call):
    run_on_gpus(f"import mesh_model_checks as m; m.{call}", timeout=550)


@pytest.mark.cuda
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "call",
    [
        "check_by_data('qwen3 moe', 2)",
        "check_by_data('glm4 moe', 2, 0)",
        "check_by_heads('qwen3 moe', 2)",
        "check_devices('qwen3 moe', 2)",
    ],
)
def test_experts(call):
    """Families without MLA: the checks are in f32, in which CUDA kernels have none."""
    run_on_gpus(f"import mesh_expert_checks as m; m.{call}", timeout=550)
