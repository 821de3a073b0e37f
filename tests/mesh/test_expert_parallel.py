"""Experts over devices: results of one device, bytes, shares of memory; engines that share them."""

import re

import jax
import pytest

from helpers.mesh_checks import run_on_cpus

pytest.importorskip("llguidance", reason="needs the extra `serve`")

from helpers import model_cases
from jax_attn import models
from jax_attn.models._layers import expert_exchange
from jax_attn.serve import _options
from jax_attn.serve._engine.engine_config import EngineConfig


def run(num_devices: int, call: str) -> None:
    run_on_cpus(num_devices, f"import mesh_expert_checks as m; m.{call}")


def test_the_exchange():
    run(4, "check_exchange(4)")


def test_padding_stays():
    run(2, "check_padding(2)")


@pytest.mark.parametrize(
    ("num_devices", "name", "one_round_bytes"),
    [(4, "qwen3 moe", None), (2, "deepseek v2 groups, yarn", 0),
     pytest.param(4, "deepseek v3", 0, marks=pytest.mark.slow),
     pytest.param(2, "gpt-oss", 0, marks=pytest.mark.slow),
     pytest.param(2, "llama4", None, marks=pytest.mark.slow),
     pytest.param(2, "nemotron-h moe", 0, marks=pytest.mark.slow),
     pytest.param(8, "qwen3 moe", 0, marks=pytest.mark.slow)],
)  # fmt: skip
def test_attention_by_data(num_devices, name, one_round_bytes):
    run(num_devices, f"check_by_data({name!r}, {num_devices}, {one_round_bytes})")


@pytest.mark.parametrize(
    ("num_devices", "name"),
    [(2, "qwen3 moe"), pytest.param(4, "deepseek v3", marks=pytest.mark.slow)],
)
def test_attention_by_heads(num_devices, name):
    run(num_devices, f"check_by_heads({name!r}, {num_devices})")


def test_devices_of_engines_that_share_experts():
    run(2, "check_devices('qwen3 moe', 2)")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("num_devices", "name"),
    [(2, "deepseek v3"), pytest.param(4, "qwen3 moe", marks=pytest.mark.slow)],
)
def test_engines_that_share_experts(num_devices, name):
    run_on_cpus(
        num_devices,
        f"import mesh_expert_checks as m; m.check_replicas({name!r}, {num_devices})",
        timeout=850,
    )


@pytest.mark.timeout(900)
def test_an_engine_by_heads():
    run_on_cpus(
        2,
        "import mesh_model_checks as m; m.check_family('deepseek v2', (2, 1), expert_parallel=1)",
        timeout=850,
    )


def test_the_capacity_of_a_round():
    few = expert_exchange._ONE_ROUND_BYTES // (8 * 4096)
    assert expert_exchange.capacity_of(10**6, few, 8, 4096) == few
    assert expert_exchange.capacity_of(8000, few + 1, 8, 4096) == min(few + 1, 1250)
    assert expert_exchange.capacity_of(8, 10**9, 8, 4096) == 2


MESH = jax.sharding.AbstractMesh((3,), ("experts",))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("llama", "whole: expected a model with experts, got llama"),
     ("qwen3 moe, some dense", "mesh: expected experts in a number that the 3 devices of axis")],
)  # fmt: skip
def test_what_cannot_be_shared(name, sentence):
    config = models.parse_config(model_cases._COMMON | model_cases.CONFIGS[name])
    with pytest.raises(ValueError, match=re.escape(f"ExpertParallel: {sentence}")):
        models.ExpertParallel(config, MESH, "experts")


def test_heads_without_experts():
    config = models.parse_config(model_cases._COMMON | model_cases.CONFIGS["llama"])
    mesh = jax.sharding.AbstractMesh((2,), ("heads",))
    with pytest.raises(ValueError, match="exchanges_experts: expected False for a model without"):
        models.TensorParallel(config, mesh, "heads", exchanges_experts=True)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [("", "expected --tensor-parallel or --data-parallel of more than 1"),
     ("--data-parallel 2 --tensor-parallel 2", "expected no --tensor-parallel with"),
     ("--data-parallel 2 --max-loras 1", "expected no --max-loras with --data-parallel"),
     ("--data-parallel 2 --draft-model x", "expected no --draft-model with")],
)  # fmt: skip
def test_options_that_do_not_fit(options, sentence, capsys):
    with pytest.raises(SystemExit):
        _options.parse(["--expert-parallel", *options.split()])
    assert f"--expert-parallel: {sentence}" in capsys.readouterr().err


def test_an_engine_alone():
    with pytest.raises(ValueError, match="EngineConfig: expert_parallel: expected False with"):
        EngineConfig(num_pages=10, expert_parallel=True)
