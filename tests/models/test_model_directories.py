"""Hugging Face directories: what is read from them, and how those that do not fit are refused."""

import dataclasses
import json
import math
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import model_cases
from jax_attn import models
from jax_attn.models._weights.tensors import file_shapes

safetensors_numpy = pytest.importorskip("safetensors.numpy")
pytest.importorskip("tokenizers")

SHIPPED = models.BUNDLED
LLAMA = model_cases.CONFIGS["llama"]
LLAMA3_ROPE = model_cases.CONFIGS["llama bias tied, llama3 rope"]["rope_parameters"]


@pytest.fixture
def llama_dir(tmp_path: Path) -> Path:
    """A directory that loads, for tests to damage."""
    model_cases.write(tmp_path, LLAMA)
    (tmp_path / "tokenizer.json").write_bytes((SHIPPED / "tokenizer.json").read_bytes())
    return tmp_path


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, jnp.bfloat16])
def test_dtypes_of_files(llama_dir, dtype):
    config = model_cases.write(llama_dir, LLAMA, dtype)
    params = models.load(llama_dir, "float32").params
    assert {w.dtype for w in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    k_proj = model_cases.random_tensors(config, dtype)["model.layers.1.self_attn.k_proj.weight"]
    q_size = config.num_qo_heads * config.head_dim
    k = params["layers"][1]["qkv"][:, q_size : q_size + config.num_kv_heads * config.head_dim]
    np.testing.assert_array_equal(k, k_proj.astype(np.float32).T)


def test_loading_holds_one_weight_beside_the_model(tmp_path):
    """And says how far it is."""
    raw = LLAMA | {"num_hidden_layers": 12, "hidden_size": 256, "intermediate_size": 512}
    config = model_cases.write(tmp_path, raw, np.float32)
    largest = 2 * 256 * 512 * 4  # gate and up
    whole = sum(map(math.prod, file_shapes(config).values())) * 4
    seen = []
    models.load_params(tmp_path, config, "float16")  # what else loading keeps, it keeps now
    tracemalloc.start()
    try:
        params = models.load_params(
            tmp_path, config, "float16", lambda *numbers: seen.append(numbers)
        )
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Arrays of JAX are not traced. A weight: its parts, side by side, in another dtype.
    assert peak < 3 * largest < whole / 4, (peak, largest, whole)
    assert seen == sorted(seen) and seen[-1] == (whole // 4, whole // 4)
    assert len(params["layers"]) == 12


def test_tied_head_is_the_embedding(llama_dir):
    write_json(llama_dir / "config.json", LLAMA | {"tie_word_embeddings": True})
    params = models.load(llama_dir, "float32").params  # the file's lm_head.weight is passed over
    assert "head" not in params
    config = models.load_config(llama_dir)
    untied = dataclasses.replace(config, tie_embeddings=False)
    np.testing.assert_array_equal(
        models.reference_forward(params, config, np.arange(9)),
        models.reference_forward(params | {"head": params["embed"].T}, untied, np.arange(9)),
    )


def test_missing_keys_have_the_defaults_of_transformers():
    left_out = {"num_key_value_heads", "rope_theta", "tie_word_embeddings"}
    config = models.parse_config({k: v for k, v in LLAMA.items() if k not in left_out})
    assert (config.num_kv_heads, config.head_dim) == (4, 8)
    assert config.kinds == (models.LayerKind(models.Rope(10000.0)),)
    assert not config.tie_embeddings and config.bos_token is None and config.eos_tokens == ()

    mistral = models.parse_config(LLAMA | {"model_type": "mistral"})
    assert [kind.window for kind in mistral.kinds] == [4096]

    gemma = LLAMA | {"model_type": "gemma2", "sliding_window": 7, "tie_word_embeddings": None}
    del gemma["tie_word_embeddings"], gemma["rope_theta"]
    config = models.parse_config(gemma)
    assert (config.head_dim, config.sm_scale, config.embedding_scale) == (256, 1 / 16, 32**0.5)
    assert (config.attention_soft_cap, config.logit_soft_cap) == (50.0, 30.0)
    assert config.tie_embeddings and [kind.window for kind in config.layers] == [7, None, 7]

    config = models.parse_config(gemma | {"model_type": "gemma3_text", "num_hidden_layers": 8})
    assert (config.attention_soft_cap, config.logit_soft_cap) == (0.0, 0.0)
    local, full = config.kinds
    assert local == models.LayerKind(models.Rope(1e4), 7) and full.rope == models.Rope(1e6)
    assert [i for i, kind in enumerate(config.layers) if kind == full] == [5]


def test_end_of_turn_tokens_come_from_generation_config(llama_dir):
    write_json(llama_dir / "config.json", LLAMA | {"bos_token_id": 1, "eos_token_id": 2})
    assert models.load_config(llama_dir).eos_tokens == (2,)
    write_json(llama_dir / "generation_config.json", {"eos_token_id": [7, 2]})
    config = models.load_config(llama_dir)
    assert config.bos_token == 1 and config.eos_tokens == (2, 7)


# What of a config.json on the hub has a meaning here, and how many numbers the weights are.
PUBLISHED = {
    "Llama 3.1 8B": (
        8_030_261_248,
        {
            "model_type": "llama",
            "attention_bias": False,
            "bos_token_id": 128000,
            "eos_token_id": [128001, 128008, 128009],
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            "vocab_size": 128256,
        },
    ),
    "Mistral 7B": (
        7_241_732_096,
        {
            "model_type": "mistral",
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
            "tie_word_embeddings": False,
            "vocab_size": 32000,
        },
    ),
    "Qwen2.5 7B": (
        7_615_616_512,
        {
            "model_type": "qwen2",
            "hidden_act": "silu",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "max_position_embeddings": 32768,
            "max_window_layers": 28,
            "num_attention_heads": 28,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "sliding_window": 131072,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "vocab_size": 152064,
        },
    ),
    "Qwen3 0.6B": (
        596_049_920,
        {
            "model_type": "qwen3",
            "attention_bias": False,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "max_position_embeddings": 40960,
            "max_window_layers": 28,
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
    ),
    "Gemma 2 2B": (
        2_614_341_888,
        {
            "model_type": "gemma2",
            "attention_bias": False,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "max_position_embeddings": 8192,
            "num_attention_heads": 8,
            "num_hidden_layers": 26,
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-06,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
            "vocab_size": 256000,
        },
    ),
    "Gemma 3 1B": (
        999_885_952,
        {
            "model_type": "gemma3_text",
            "attention_bias": False,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "max_position_embeddings": 32768,
            "num_attention_heads": 4,
            "num_hidden_layers": 26,
            "num_key_value_heads": 1,
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-06,
            "rope_local_base_freq": 10000,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "vocab_size": 262144,
        },
    ),
    "Gemma 3 4B, its text model": (
        3_880_263_168,
        {
            "model_type": "gemma3",
            "eos_token_id": [1, 106],
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
        },
    ),
    "gpt-oss 20B": (
        20_914_757_184,
        {
            "model_type": "gpt_oss",
            "attention_bias": True,
            "eos_token_id": 200002,
            "experts_per_token": 4,
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 2880,
            "initial_context_length": 4096,
            "intermediate_size": 2880,
            "max_position_embeddings": 131072,
            "num_attention_heads": 64,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 24,
            "num_key_value_heads": 8,
            "num_local_experts": 32,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "rope_type": "yarn",
                "truncate": False,
            },
            "rope_theta": 150000,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
            "tie_word_embeddings": False,
            "vocab_size": 201088,
        },
    ),
    "Mixtral 8x7B": (
        46_702_792_704,
        {
            "model_type": "mixtral",
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "num_attention_heads": 32,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "vocab_size": 32000,
        },
    ),
    "Qwen3 30B-A3B": (
        30_532_122_624,
        {
            "model_type": "qwen3_moe",
            "attention_bias": False,
            "bos_token_id": 151643,
            "decoder_sparse_step": 1,
            "eos_token_id": 151645,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "max_position_embeddings": 40960,
            "max_window_layers": 48,
            "mlp_only_layers": [],
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
    ),
    "Phi-4 mini": (
        3_836_021_760,
        {
            "model_type": "phi3",
            "attention_bias": False,
            "bos_token_id": 199999,
            "eos_token_id": 199999,
            "full_attn_mod": 1,
            "hidden_act": "silu",
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "num_attention_heads": 24,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 0.75,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "long_factor": [1.0] * 48,
                "short_factor": [1.0] * 48,
                "type": "longrope",
            },
            "rope_theta": 10000.0,
            "sliding_window": 262144,
            "tie_word_embeddings": True,
            "vocab_size": 200064,
        },
    ),
    "SmolLM3 3B": (
        3_075_098_624,
        {
            "model_type": "smollm3",
            "attention_bias": False,
            "bos_token_id": 128000,
            "eos_token_id": 128012,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "layer_types": ["full_attention"] * 36,
            "max_position_embeddings": 65536,
            "mlp_bias": False,
            "no_rope_layer_interval": 4,
            "no_rope_layers": [1, 1, 1, 0] * 9,
            "num_attention_heads": 16,
            "num_hidden_layers": 36,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 5000000.0,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "vocab_size": 128256,
        },
    ),
    "OLMo-2 7B": (
        7_298_617_344,
        {
            "model_type": "olmo2",
            "attention_bias": False,
            "eos_token_id": 100257,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "max_position_embeddings": 4096,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 500000,
            "tie_word_embeddings": False,
            "vocab_size": 100352,
        },
    ),
    "DeepSeek V2 Lite": (
        15_706_484_224,
        {
            "model_type": "deepseek_v2",
            "attention_bias": False,
            "aux_loss_alpha": 0.001,
            "bos_token_id": 100000,
            "eos_token_id": 100001,
            "first_k_dense_replace": 1,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "kv_lora_rank": 512,
            "max_position_embeddings": 163840,
            "moe_intermediate_size": 1408,
            "moe_layer_freq": 1,
            "n_group": 1,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "num_attention_heads": 16,
            "num_experts_per_tok": 6,
            "num_hidden_layers": 27,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 40,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
                "original_max_position_embeddings": 4096,
                "type": "yarn",
            },
            "rope_theta": 10000,
            "routed_scaling_factor": 1.0,
            "scoring_func": "softmax",
            "tie_word_embeddings": False,
            "topk_group": 1,
            "topk_method": "greedy",
            "v_head_dim": 128,
            "vocab_size": 102400,
        },
    ),
    "DeepSeek V3, without quantisation": (
        671_026_419_200,
        {
            "model_type": "deepseek_v3",
            "attention_bias": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "first_k_dense_replace": 3,
            "hidden_act": "silu",
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "kv_lora_rank": 512,
            "max_position_embeddings": 163840,
            "moe_intermediate_size": 2048,
            "moe_layer_freq": 1,
            "n_group": 8,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_attention_heads": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 61,
            "num_key_value_heads": 128,
            "num_nextn_predict_layers": 1,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 40,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
                "type": "yarn",
            },
            "rope_theta": 10000,
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "tie_word_embeddings": False,
            "topk_group": 4,
            "topk_method": "noaux_tc",
            "v_head_dim": 128,
            "vocab_size": 129280,
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(name):
    num_weights, raw = PUBLISHED[name]
    config = models.parse_config(raw)
    assert sum(math.prod(shape) for shape in file_shapes(config).values()) == num_weights
    for target in ("cpu", "sm_90:132"):
        specs = models.attention_specs(
            config, max_batch=64, max_qo_tokens=64, max_kv_pages=4096, target=target
        )
        assert len(specs) == (2 if config.family.startswith(("gemma", "gpt_oss")) else 1)
        assert all(spec.kernel_config for spec in specs)


def test_text_model_of_a_gemma3_with_images(tmp_path):
    text = model_cases.CONFIGS["gemma3 of transformers 4"]
    images = {"model_type": "gemma3", "eos_token_id": [1, 106], "vision_config": {"num_layers": 9}}
    write_json(tmp_path / "config.json", images | {"text_config": text})
    config = models.load_config(tmp_path)
    assert config.eos_tokens == (1, 106)
    tensors = model_cases.random_tensors(config)
    in_file = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    in_file["vision_tower.head.probe"] = in_file["multi_modal_projector.x"] = np.zeros(3)
    safetensors_numpy.save_file(in_file, tmp_path / "model.safetensors")
    params = models.load_params(tmp_path, config, "float32")
    logits = models.reference_forward(params, config, model_cases.tokens())
    expected = np.load(model_cases.LOGITS)["gemma3 of transformers 4"]
    np.testing.assert_allclose(logits[:: model_cases.LOGITS_EVERY], expected, atol=1e-4)


# ---- misfits -----------------------------------------------------------------------------------


def edit_config(**changes):
    """An edit that sets keys of config.json, and drops those set to `...`."""

    def edit(path: Path) -> None:
        config = {k: v for k, v in (LLAMA | changes).items() if v is not ...}
        write_json(path / "config.json", config)

    return edit


def edit_tensors(edit):
    def edit_file(path: Path) -> None:
        tensors = model_cases.random_tensors(models.load_config(path))
        edit(tensors)
        safetensors_numpy.save_file(tensors, path / "model.safetensors")

    return edit_file


def lose_shard(path: Path) -> None:
    (path / "model.safetensors").unlink()
    weight_map = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    write_json(path / "model.safetensors.index.json", weight_map)


def name_weights(name: object):
    """An index that names a file elsewhere, which is there."""

    def edit(path: Path) -> None:
        (path.parent / "elsewhere").mkdir(exist_ok=True)
        (path / "model.safetensors").rename(path.parent / "elsewhere" / "model.safetensors")
        named = str(name).replace("<parent>", str(path.parent))
        weight_map = {"weight_map": {"model.norm.weight": named}}
        write_json(path / "model.safetensors.index.json", weight_map)

    return edit


def only_pickled(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


KEY = "model.layers.2.mlp.up_proj.weight"
GEMMA3 = {"model_type": "gemma3_text", "sliding_window": 7}
MISFITS = {
    "no config": (
        lambda path: (path / "config.json").unlink(),
        "config.json: no such file",
    ),
    "config is not JSON": (
        lambda path: (path / "config.json").write_text("{"),
        "config.json: not JSON",
    ),
    "missing key": (edit_config(hidden_size=...), "key 'hidden_size' is missing"),
    "no model type": (edit_config(model_type=...), "key 'model_type' is missing"),
    "state space model": (
        edit_config(model_type="mamba"),
        "model_type: expected 'llama', 'mistral', 'qwen2', 'qwen3', 'qwen3_moe', 'mixtral', "
        "'gpt_oss', 'deepseek_v2', 'deepseek_v3', 'phi3', 'olmo2', 'granite', 'smollm3', 'gemma2', "
        "'gemma3_text' or 'gemma3', "
        "got 'mamba'",
    ),
    "not a number": (edit_config(vocab_size="48"), "vocab_size: expected a number > 0, got '48'"),
    "not an integer": (
        edit_config(num_hidden_layers=2.5),
        "num_hidden_layers: expected an integer, got 2.5",
    ),
    "not a flag": (
        edit_config(tie_word_embeddings="no"),
        "tie_word_embeddings: expected False or True, got 'no'",
    ),
    "mlp bias": (edit_config(mlp_bias=True), "mlp_bias: expected False, got True"),
    "activation": (edit_config(hidden_act="gelu"), "hidden_act: expected 'silu', got 'gelu'"),
    "quantized": (
        edit_config(quantization_config={"bits": 4}),
        "quantization_config: key 'quant_method' is missing",
    ),
    "heads": (
        edit_config(num_key_value_heads=3),
        "num_attention_heads: expected a multiple of num_key_value_heads 3, got 4",
    ),
    "rope type": (
        edit_config(rope_scaling={"type": "mrope", "factor": 2.0}),
        "rope_type: expected 'default', 'longrope', 'linear', 'dynamic', 'llama3' or 'yarn', got "
        "'mrope'",
    ),
    "rope key": (
        edit_config(rope_scaling={"rope_type": "llama3", "factor": 2.0}),
        "rope_scaling: key 'low_freq_factor' is missing",
    ),
    "rope number": (
        edit_config(rope_scaling={"rope_type": "linear", "factor": 0}),
        "rope_scaling: factor: expected a number > 0, got 0",
    ),
    "partial rope": (
        edit_config(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}),
        "partial_rotary_factor: expected 1.0, got 0.5",
    ),
    "partial rope outside": (
        edit_config(partial_rotary_factor=0.5),
        "partial_rotary_factor: expected 1.0, got 0.5",
    ),
    "yarn without a length": (
        edit_config(rope_scaling={"type": "yarn", "factor": 2.0}),
        "rope_scaling: key 'original_max_position_embeddings' is missing",
    ),
    "yarn with a word": (
        edit_config(
            rope_scaling={
                "type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": 64,
                "truncate": "no",
            }
        ),
        "rope_scaling: truncate: expected False or True, got 'no'",
    ),
    "longrope of another head_dim": (
        edit_config(
            model_type="phi3",
            original_max_position_embeddings=64,
            rope_scaling={"type": "su", "short_factor": [1.0], "long_factor": [1.0]},
        ),
        "rope_scaling: short_factor: expected a list of 4 numbers > 0, got [1.0]",
    ),
    "quantized experts": (
        edit_config(model_type="gpt_oss", quantization_config={"quant_method": "fp8"}),
        "quantization_config: quant_method: 'fp8' is not supported with model_type 'gpt_oss'",
    ),
    "layers without rope": (
        edit_config(model_type="smollm3", no_rope_layers=[1, 0]),
        "no_rope_layers: expected 3 times 0 or 1, got [1, 0]",
    ),
    "window of a Llama": (edit_config(sliding_window=7), "sliding_window: expected None, got 7"),
    "no window": (
        edit_config(model_type="gemma2"),
        "key 'sliding_window' is missing",
    ),
    "layer types": (
        edit_config(**GEMMA3, layer_types=["full_attention"] * 2),
        "layer_types: expected 3 entries, got 2",
    ),
    "layer type": (
        edit_config(**GEMMA3, layer_types=["chunked_attention"] * 3),
        "layer_types: expected 'full_attention' or 'sliding_attention', got 'chunked_attention'",
    ),
    "windows that are off": (
        edit_config(model_type="qwen3", layer_types=["sliding_attention"] * 3),
        "layer_types: expected 'full_attention', got 'sliding_attention'",
    ),
    "bidirectional": (
        edit_config(**GEMMA3, use_bidirectional_attention=True),
        "use_bidirectional_attention: expected False or None, got True",
    ),
    "soft cap of Gemma 3": (
        edit_config(**GEMMA3, attn_logit_softcapping=50.0),
        "attn_logit_softcapping: expected None, got 50.0",
    ),
    "no weights": (
        lambda path: (path / "model.safetensors").unlink(),
        "neither model.safetensors nor model.safetensors.index.json is there",
    ),
    "pickled weights": (
        only_pickled,
        "model.safetensors.index.json is there; convert pytorch_model.bin to safetensors",
    ),
    "lost shard": (lose_shard, "model-00001-of-00002.safetensors: no such file"),
    "absolute shard": (
        name_weights("<parent>/elsewhere/model.safetensors"),
        "expected names of files in this directory, got",
    ),
    "shard above": (
        name_weights("../elsewhere/model.safetensors"),
        r"expected names of files in this directory, got '../elsewhere/model.safetensors'",
    ),
    "shard behind a folder": (
        name_weights("a/../../elsewhere/model.safetensors"),
        "expected names of files in this directory, got",
    ),
    "shard without a name": (name_weights(5), "5: no such file"),
    "not safetensors": (
        lambda path: (path / "model.safetensors").write_bytes(b"\x80\x02}q\x00."),
        "model.safetensors: not a safetensors file",
    ),
    "missing tensor": (edit_tensors(lambda t: t.pop(KEY)), f"tensor '{KEY}' is missing"),
    "extra tensor": (
        edit_tensors(lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.zeros(32)})),
        "tensor 'model.layers.0.self_attn.q_proj.bias' is no part of a llama model",
    ),
    "shape": (
        edit_tensors(lambda t: t.update({KEY: np.zeros([40, 23], np.float32)})),
        f"tensor '{KEY}': expected shape (40, 32), got (40, 23)",
    ),
    "dtype": (
        edit_tensors(lambda t: t.update({KEY: np.zeros([40, 32], np.int8)})),
        f"tensor '{KEY}': expected dtype BF16, F16 or F32, got I8",
    ),
    "no tokenizer": (
        lambda path: (path / "tokenizer.json").unlink(),
        "tokenizer.json: no such file",
    ),
    "not a tokenizer": (
        lambda path: (path / "tokenizer.json").write_text("{}"),
        "tokenizer.json: not a tokenizer",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_misfits_are_refused_in_one_sentence(llama_dir, name):
    models.load(llama_dir)
    edit, message = MISFITS[name]
    edit(llama_dir)
    with pytest.raises(models.ModelDirectoryError) as error:
        models.load(llama_dir)
    assert message in str(error.value)
    assert str(error.value).count(str(llama_dir)) == 1 and "\n" not in str(error.value)


def test_every_tensor_is_needed(tmp_path):
    """Of the family with the most of them; what is left out is named."""
    config = model_cases.write(tmp_path, model_cases.CONFIGS["gemma3"])
    for name in file_shapes(config):
        tensors = model_cases.random_tensors(config)
        del tensors[name]
        safetensors_numpy.save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(models.ModelDirectoryError, match=name):
            models.load_params(tmp_path, config)


# ---- RoPE --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scaling", [{}, LLAMA3_ROPE, LLAMA3_ROPE | {"factor": 32.0, "low_freq_factor": 2.0}]
)
def test_rope_frequencies_formula(scaling):
    """One frequency at a time, by wavelength, as the Llama 3.1 model card tells it."""
    config = models.parse_config(LLAMA | {"rope_parameters": scaling | {"rope_theta": 10000.0}})
    expected = []
    for i in range(64):
        frequency = 1 / 10000.0 ** (2 * i / 128)
        if scaling:
            wavelength = 2 * math.pi / frequency
            original = scaling["original_max_position_embeddings"]
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            if wavelength > original / low:
                frequency /= scaling["factor"]
            elif wavelength > original / high:
                smooth = (original / wavelength - low) / (high - low)
                frequency *= (1 - smooth) / scaling["factor"] + smooth
        expected.append(frequency)
    np.testing.assert_allclose(config.kinds[0].rope.frequencies(128), expected, rtol=1e-12)
