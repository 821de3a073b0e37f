"""Models and engine with heads over a mesh axis: one device's tokens, and shares of memory."""

import re

import jax
import pytest

from helpers.mesh_checks import run_on_cpus

pytest.importorskip("llguidance", reason="needs the extra `serve`")

from helpers import model_cases
from jax_attn import models
from jax_attn.serve._engine.engine_config import EngineConfig


@pytest.mark.parametrize(
    ("num_devices", "first", "step"), [(2, 5, 20), (2, 15, 20), (4, 4, 34), (4, 19, 34)]
)
def test_models(num_devices, first, step):
    run_on_cpus(
        4,
        f"import mesh_model_checks as m; m.check_models({num_devices}, {first}, {step})",
    )


@pytest.mark.parametrize(("first", "step"), [(17, 10), (22, 20)])
def test_models_with_kv_shards(first, step):
    run_on_cpus(4, f"import mesh_model_checks as m; m.check_models(2, {first}, {step}, 2)")


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_all_models_with_kv_shards():
    program = "import mesh_model_checks as m; m.check_models(2, num_kv_shards=2)"
    run_on_cpus(4, program, timeout=1900)


@pytest.mark.slow
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("num_devices", [2, 4])
def test_all_models(num_devices):
    program = f"import mesh_model_checks as m; m.check_models({num_devices})"
    run_on_cpus(4, program, timeout=1900)


THREE = "num_attention_heads=6, num_key_value_heads=3, hidden_size=96, intermediate_size=48"


def test_a_model_over_three_devices():
    run_on_cpus(3, f"import mesh_model_checks as m; m.check_models(3, 0, 100, {THREE})")


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_all_models_over_three_devices():
    run_on_cpus(
        3,
        f"import mesh_model_checks as m; m.check_models(3, 0, 2, {THREE})",
        timeout=1900,
    )


@pytest.mark.parametrize("split", [(2, 2), (2, 1)])
def test_engine(split):
    run_on_cpus(4, f"import mesh_model_checks as m; m.check_engine({split})")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "split",
    [(2, 1), pytest.param((1, 2), marks=pytest.mark.slow),
     pytest.param((2, 2), marks=pytest.mark.slow)],
)  # fmt: skip
def test_all_features_of_an_engine(split):
    run_on_cpus(4, f"import mesh_model_checks as m; m.check_features({split})", timeout=850)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["deepseek v2 groups, yarn", "gpt-oss", "qwen3.5"])
def test_an_engine_of_another_family(name):
    run_on_cpus(
        2,
        f"import mesh_model_checks as m; m.check_family({name!r}, (2, 1))",
        timeout=850,
    )


def test_training_by_batch():
    run_on_cpus(2, "import mesh_model_checks as m; m.check_training('qwen3.5')")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["deepseek v2 groups, yarn", "qwen3 moe, some dense"])
def test_an_engine_of_another_family_with_kv_shards(name):
    run_on_cpus(
        4,
        f"import mesh_model_checks as m; m.check_family({name!r}, (1, 2), (2, 2))",
        timeout=850,
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_engine_over_more_devices():
    run_on_cpus(
        4,
        "import mesh_model_checks as m; m.check_engine((4, 1), (1, 2), (1, 4))",
        timeout=800,
    )


@pytest.mark.parametrize(
    ("name", "num_devices", "sentence"),
    [
        ("llama", 3, "KV heads in a number that the 3 devices of axis 'heads' divide or a divisor"),
        (
            "mistral mqa",
            3,
            "query heads in a number that the 3 devices of axis 'heads' divide,",
        ),
        ("mixtral tied, mha", 2, "experts in a number that the 2 devices"),
    ],
)
def test_an_axis_that_does_not_divide(name, num_devices, sentence):
    config = models.parse_config(model_cases._COMMON | model_cases.CONFIGS[name])
    mesh = jax.sharding.AbstractMesh((num_devices,), ("heads",))
    with pytest.raises(ValueError, match=re.escape(f"TensorParallel: mesh: expected {sentence}")):
        models.TensorParallel(config, mesh, "heads")


def test_more_devices_than_there_are():
    from jax_attn.serve._engine.device import Device, DeviceConfig

    config = models.parse_config(model_cases._COMMON | model_cases.CONFIGS["llama"])
    params = models.random_params(config, jax.random.key(0), "float32")
    model = models.Model(config, params, None)
    there = len(jax.devices())
    with pytest.raises(ValueError, match=f"tensor_parallel: expected at most {there}, the devices"):
        Device(model, DeviceConfig(None, tensor_parallel=there + 1))


@pytest.mark.parametrize("count", [0, -1])
@pytest.mark.parametrize("name", ["tensor_parallel", "context_parallel"])
def test_fewer_than_one_device(name, count):
    with pytest.raises(ValueError, match=f"EngineConfig: {name}: expected at least 1, got"):
        EngineConfig(num_pages=10, **{name: count})


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"page_size": 16}, "page_size: expected a multiple of context_parallel = 3, got 16."),
        ({"page_size": 24, "batch_invariant": True}, "batch_invariant: expected False with"),
    ],
)
def test_what_kv_shards_do_not_fit(fields, sentence):
    with pytest.raises(ValueError, match=f"EngineConfig: {sentence}"):
        EngineConfig(num_pages=10, context_parallel=3, **fields)


def test_drafts_of_multi_token_prediction():
    run_on_cpus(2, "import mesh_mtp_checks as m; m.check()")
