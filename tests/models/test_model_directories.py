"""Hugging Face directories: what is read from them, and how invalid ones are refused."""

import dataclasses
import json
import math
import re
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import model_cases
from jax_attn import models
from jax_attn.models._config.keys import one_of
from jax_attn.models._families.parse import FAMILIES
from jax_attn.models._weights import weight_files
from jax_attn.models._weights.tensors import file_shapes

safetensors_numpy = pytest.importorskip("safetensors.numpy")
pytest.importorskip("tokenizers")

SHIPPED = models.BUNDLED
LLAMA = model_cases.CONFIGS["llama"]
HEAD = "lm_head.weight"
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
    """Loading also reports its progress."""
    raw = LLAMA | {"num_hidden_layers": 12, "hidden_size": 256, "intermediate_size": 512}
    config = model_cases.write(tmp_path, raw, np.float32)
    largest = 2 * 256 * 512 * 4  # gate and up
    whole = sum(map(math.prod, file_shapes(config).values())) * 4
    seen = []
    models.load_params(tmp_path, config, "float16")  # fills loading's caches before measuring
    tracemalloc.start()
    try:
        params = models.load_params(
            tmp_path, config, "float16", lambda *numbers: seen.append(numbers)
        )
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # tracemalloc does not see JAX's arrays. One weight: its parts, joined, in another dtype.
    assert peak < 3 * largest < whole / 4, (peak, largest, whole)
    assert seen == sorted(seen) and seen[-1] == (whole // 4, whole // 4)
    assert len(params["layers"]) == 12


def test_tied_head_is_the_embedding(llama_dir):
    write_json(llama_dir / "config.json", LLAMA | {"tie_word_embeddings": True})
    edit_tensors(lambda t: t.pop("lm_head.weight", None))(llama_dir)
    config, params, _ = models.load(llama_dir, "float32")
    assert "head" not in params
    logits = models.reference_forward(params, config, np.arange(9))
    np.testing.assert_array_equal(
        logits,
        models.reference_forward(params | {"head": params["embed"].T}, config, np.arange(9)),
    )
    edit_tensors(lambda t: t.update({HEAD: t["model.embed_tokens.weight"]}))(llama_dir)
    assert "head" not in models.load(llama_dir, "float32").params


@pytest.mark.parametrize("with_head", [False, True])
def test_a_tied_head_alone_is_the_embedding(llama_dir, with_head):
    write_json(llama_dir / "config.json", LLAMA | {"tie_word_embeddings": True})
    edit_tensors(lambda t: None)(llama_dir)
    config, expected, _ = models.load(llama_dir, "float32")
    edit_tensors(lambda t: t.update({HEAD: t.pop("model.embed_tokens.weight")}))(llama_dir)
    got = models.load_params(llama_dir, config, "float32", with_head=with_head)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    edit_tensors(lambda t: t.pop("model.embed_tokens.weight"))(llama_dir)
    with pytest.raises(models.ModelDirectoryError, match=r"'model.embed_tokens.weight' is missing"):
        models.load_params(llama_dir, config)


def test_gguf_is_refused(llama_dir):
    (llama_dir / "model.safetensors").unlink()
    (llama_dir / "model-q4.gguf").write_bytes(b"GGUF")
    with pytest.raises(models.ModelDirectoryError, match="GGUF files are not read, only safetens"):
        models.load(llama_dir)
    with pytest.raises(models.ModelDirectoryError, match="got a GGUF file; GGUF is not read"):
        models.load(llama_dir / "model-q4.gguf")


@pytest.mark.parametrize("in_panels", [False, True])
def test_another_head_in_the_file_wins_over_a_tied_one(llama_dir, in_panels, monkeypatch):
    """As in transformers. An embedding model uses neither."""
    monkeypatch.setattr(weight_files, "_COMPARED", 5 * 32)  # rows are compared in several blocks
    raw = LLAMA | {"tie_word_embeddings": True}
    write_json(llama_dir / "config.json", raw)

    def change_last_row(tensors):
        tensors[HEAD] = tensors["model.embed_tokens.weight"].copy()
        tensors[HEAD][-1, -1] += 1

    edit_tensors(change_last_row)(llama_dir)
    config, params, _ = models.load(llama_dir, "float32", in_panels=in_panels)
    got = models.reference_forward(params, config, np.arange(9))
    write_json(llama_dir / "config.json", LLAMA)
    untied, params, _ = models.load(llama_dir, "float32", in_panels=in_panels)
    expected = models.reference_forward(params, untied, np.arange(9))
    np.testing.assert_array_equal(got, expected)
    assert "head" not in models.load_params(llama_dir, config, with_head=False)


def test_longrope_has_short_factors_where_no_sequence_is_longer_than_the_original():
    raw = model_cases.CONFIGS["phi3 long, partial"]
    config = models.parse_config(raw)
    assert config.short_context == 16
    short, long = (raw["rope_scaling"][f"{name}_factor"] for name in ("short", "long"))
    theta = 1e4 ** -(np.arange(6) / 6)
    for limit, factors in ((16, short), (17, long), (128, long)):
        limited = config.limited(limit)
        assert limited.max_positions == limit
        assert limited.short_context == (16 if factors is long else None)
        for kind in limited.layers:
            np.testing.assert_allclose(kind.rope.frequencies(16)[:6], theta / factors)
            assert kind.rope.scaling.amplitude == config.layers[0].rope.scaling.amplitude
    assert models.parse_config(LLAMA).limited(16).layers == models.parse_config(LLAMA).layers


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

    def without(name, *left_out):
        raw = model_cases.CONFIGS[name]
        return models.parse_config({k: v for k, v in raw.items() if k not in left_out})

    exaone = without("exaone4", "sliding_window")
    assert [kind.window for kind in exaone.layers] == [4096, None, 4096]
    assert without("glm4 moe", "moe_intermediate_size").experts.intermediate_size == 1408


@pytest.mark.parametrize("fraction", [0.01, 1.01])
def test_proportional_rope_turns_a_part_of_a_head(fraction):
    raw = model_cases.CONFIGS["gemma4"]
    rope = {"rope_type": "proportional", "partial_rotary_factor": fraction, "rope_theta": 1e3}
    ropes = raw["rope_parameters"] | {"full_attention": rope}
    with pytest.raises(models.ModelDirectoryError, match="expected a part of the 24 dimensions"):
        models.parse_config(raw | {"rope_parameters": ropes})


def test_positions_of_pictures_have_three_parts_if_any_layer_turns_by_them():
    config = models.parse_config(LLAMA)
    assert config.position_parts == 1
    (kind,) = config.kinds
    in_three = dataclasses.replace(kind, rope=dataclasses.replace(kind.rope, sections=(2, 1, 1)))
    none = dataclasses.replace(kind, rope=None)
    for kinds, parts in (((in_three, kind, none), 3), ((none, none, none), 1)):
        assert dataclasses.replace(config, layers=kinds).position_parts == parts


def test_end_of_turn_tokens_come_from_generation_config(llama_dir):
    write_json(llama_dir / "config.json", LLAMA | {"bos_token_id": 1, "eos_token_id": 2})
    assert models.load_config(llama_dir).eos_tokens == (2,)
    write_json(llama_dir / "generation_config.json", {"eos_token_id": [7, 2]})
    config = models.load_config(llama_dir)
    assert config.bos_token == 1 and config.eos_tokens == (2, 7)


# The keys of config.json files on the hub that have a meaning here, and the number of weights.
PUBLISHED = {
    "Pythia 1.4B": (
        1_414_647_808,
        {
            "model_type": "gpt_neox",
            "attention_bias": True,
            "hidden_act": "gelu",
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "layer_norm_eps": 1e-05,
            "max_position_embeddings": 2048,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "rotary_emb_base": 10000,
            "rotary_pct": 0.25,
            "tie_word_embeddings": False,
            "use_parallel_residual": True,
            "vocab_size": 50304,
        },
    ),
    "StableLM 3B 4E1T": (
        2_795_443_200,
        {
            "model_type": "stablelm",
            "hidden_act": "silu",
            "hidden_size": 2560,
            "intermediate_size": 6912,
            "layer_norm_eps": 1e-05,
            "max_position_embeddings": 4096,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000,
            "tie_word_embeddings": False,
            "use_qkv_bias": False,
            "vocab_size": 50304,
        },
    ),
    "StarCoder2 3B": (
        3_030_371_328,
        {
            "model_type": "starcoder2",
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 3072,
            "intermediate_size": 12288,
            "max_position_embeddings": 16384,
            "norm_epsilon": 1e-05,
            "norm_type": "layer_norm",
            "mlp_type": "default",
            "num_attention_heads": 24,
            "num_hidden_layers": 30,
            "num_key_value_heads": 2,
            "rope_theta": 999999.4420358813,
            "sliding_window": 4096,
            "use_bias": True,
            "vocab_size": 49152,
        },
    ),
    "Phi 3.5 MoE": (
        41_873_153_344,
        {
            "model_type": "phimoe",
            "attention_bias": True,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 6400,
            "lm_head_bias": True,
            "max_position_embeddings": 131072,
            "num_attention_heads": 32,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 16,
            "rms_norm_eps": 1e-05,
            "rope_theta": 10000.0,
            "router_jitter_noise": 0.01,
            "sliding_window": 131072,
            "tie_word_embeddings": False,
            "vocab_size": 32064,
        },
    ),
    "Command R+": (
        103_810_674_688,
        {
            "model_type": "cohere",
            "hidden_size": 12288,
            "intermediate_size": 33792,
            "logit_scale": 0.8333333333333334,
            "max_position_embeddings": 8192,
            "num_attention_heads": 96,
            "num_hidden_layers": 64,
            "num_key_value_heads": 8,
            "rope_theta": 75000000.0,
            "use_qk_norm": True,
            "vocab_size": 256000,
        },
    ),
    "Hunyuan A13B": (
        80_393_183_232,
        {
            "model_type": "hunyuan_v1_moe",
            "hidden_size": 4096,
            "intermediate_size": 3072,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_experts": 64,
            "moe_topk": [8] * 32,
            "num_shared_expert": [1] * 32,
            "moe_intermediate_size": [3072] * 32,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-05,
            "tie_word_embeddings": True,
            "vocab_size": 128167,
            "use_qk_norm": True,
            "use_cla": False,
            "rope_theta": 10000.0,
            "rope_scaling": {
                "alpha": 1000.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "type": "dynamic",
            },
        },
    ),
    "Qwen3-VL 2B (its text model)": (
        1_720_574_976,
        {
            "model_type": "qwen3_vl",
            "image_token_id": 151655,
            "text_config": {
                "attention_bias": False,
                "bos_token_id": 151643,
                "eos_token_id": 151645,
                "head_dim": 128,
                "hidden_act": "silu",
                "hidden_size": 2048,
                "intermediate_size": 6144,
                "max_position_embeddings": 262144,
                "model_type": "qwen3_vl_text",
                "num_attention_heads": 16,
                "num_hidden_layers": 28,
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-06,
                "rope_scaling": {
                    "mrope_interleaved": True,
                    "mrope_section": [24, 20, 20],
                    "rope_type": "default",
                },
                "rope_theta": 5000000,
                "tie_word_embeddings": True,
                "vocab_size": 151936,
            },
            "tie_word_embeddings": True,
        },
    ),
    "Qwen1.5 MoE A2.7B": (
        14_315_784_192,
        {
            "model_type": "qwen2_moe",
            "decoder_sparse_step": 1,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "max_position_embeddings": 8192,
            "max_window_layers": 21,
            "moe_intermediate_size": 1408,
            "norm_topk_prob": False,
            "num_attention_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 24,
            "num_key_value_heads": 16,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "shared_expert_intermediate_size": 5632,
            "sliding_window": 32768,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
    ),
    "GLM 4 9B": (
        9_400_279_040,
        {
            "model_type": "glm4",
            "attention_bias": True,
            "head_dim": 128,
            "hidden_size": 4096,
            "intermediate_size": 13696,
            "max_position_embeddings": 32768,
            "num_attention_heads": 32,
            "num_hidden_layers": 40,
            "num_key_value_heads": 2,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-05,
            "rope_theta": 10000.0,
            "vocab_size": 151552,
        },
    ),
    "ERNIE 4.5 0.3B": (
        360_748_032,
        {
            "model_type": "ernie4_5",
            "head_dim": 128,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "max_position_embeddings": 131072,
            "num_attention_heads": 16,
            "num_hidden_layers": 18,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-05,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "use_bias": False,
            "vocab_size": 103424,
        },
    ),
    "MiniMax M2": (
        228_689_764_864,
        {
            "model_type": "minimax_m2",
            "head_dim": 128,
            "hidden_size": 3072,
            "intermediate_size": 1536,
            "max_position_embeddings": 196608,
            "num_attention_heads": 48,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 62,
            "num_key_value_heads": 8,
            "num_local_experts": 256,
            "qk_norm_type": "per_layer",
            "rms_norm_eps": 1e-06,
            "rope_theta": 5000000,
            "rotary_dim": 64,
            "scoring_func": "sigmoid",
            "shared_intermediate_size": 0,
            "use_qk_norm": True,
            "use_routing_bias": True,
            "vocab_size": 200064,
        },
    ),
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
    "Gemma 3n, transformers' defaults": (6_835_235_568, {"model_type": "gemma3n_text"}),
    # The numbers of weights are those of transformers' models with these sizes.
    "Gemma 4, sizes of E2B": (
        4_628_569_379,
        {
            "model_type": "gemma4",
            "text_config": {
                "model_type": "gemma4_text",
                "hidden_size": 1536,
                "intermediate_size": 6144,
                "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
                "num_hidden_layers": 35,
                "num_key_value_heads": 1,
                "num_kv_shared_layers": 20,
                "use_double_wide_mlp": True,
            },
        },
    ),
    "Gemma 4, sizes of 26B-A4B": (
        25_233_141_790,
        {
            "model_type": "gemma4_text",
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "hidden_size": 2816,
            "hidden_size_per_layer_input": 0,
            "intermediate_size": 2112,
            "moe_intermediate_size": 704,
            "num_attention_heads": 16,
            "num_experts": 128,
            "num_global_key_value_heads": 2,
            "num_hidden_layers": 30,
            "num_key_value_heads": 8,
            "top_k_experts": 8,
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
    "Kimi Linear 48B A3B": (
        49_122_681_728,
        {
            "model_type": "kimi_linear",
            "first_k_dense_replace": 1,
            "head_dim": 72,
            "hidden_act": "silu",
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "kv_lora_rank": 512,
            "linear_attn_config": {
                "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
                "head_dim": 128,
                "kda_layers": [i for i in range(1, 27) if i % 4],
                "num_heads": 32,
                "short_conv_kernel_size": 4,
            },
            "mla_use_nope": True,
            "model_max_length": 1048576,
            "moe_intermediate_size": 1024,
            "moe_layer_freq": 1,
            "moe_renormalize": True,
            "moe_router_activation_func": "sigmoid",
            "num_attention_heads": 32,
            "num_expert_group": 1,
            "num_experts": 256,
            "num_experts_per_token": 8,
            "num_hidden_layers": 27,
            "num_key_value_heads": 32,
            "num_nextn_predict_layers": 0,
            "num_shared_experts": 1,
            "q_lora_rank": None,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "routed_scaling_factor": 2.446,
            "tie_word_embeddings": False,
            "topk_group": 1,
            "use_grouped_topk": True,
            "v_head_dim": 128,
            "vocab_size": 163840,
        },
    ),
    "Falcon-H1 0.5B": (
        521_411_104,
        {
            "model_type": "falcon_h1",
            "head_dim": 64,
            "hidden_size": 1024,
            "intermediate_size": 2048,
            "mamba_d_conv": 4,
            "mamba_d_head": 64,
            "mamba_d_ssm": 1536,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "mamba_n_heads": 24,
            "mamba_rms_norm": False,
            "max_position_embeddings": 16384,
            "num_attention_heads": 8,
            "num_hidden_layers": 36,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-05,
            "rope_theta": 100000000000.0,
            "tie_word_embeddings": False,
            "vocab_size": 32784,
        },
    ),
    "Nemotron 3 Nano 30B A3B": (
        31_577_940_288,
        {
            "model_type": "nemotron_h",
            "conv_kernel": 4,
            "head_dim": 128,
            "hidden_size": 2688,
            "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
            "intermediate_size": 1856,
            "layer_norm_epsilon": 1e-05,
            "mamba_head_dim": 64,
            "mamba_num_heads": 64,
            "max_position_embeddings": 262144,
            "moe_intermediate_size": 1856,
            "moe_shared_expert_intermediate_size": 3712,
            "n_group": 1,
            "n_groups": 8,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "norm_eps": 1e-05,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_experts_per_tok": 6,
            "num_key_value_heads": 2,
            "routed_scaling_factor": 2.5,
            "ssm_state_size": 128,
            "tie_word_embeddings": False,
            "topk_group": 1,
            "vocab_size": 131072,
        },
    ),
    "Granite 4.0 H Tiny": (
        6_939_037_248,
        {
            "model_type": "granitemoehybrid",
            "hidden_size": 1536,
            "intermediate_size": 512,
            "layer_types": ["attention" if i % 10 == 5 else "mamba" for i in range(40)],
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "mamba_n_heads": 48,
            "max_position_embeddings": 131072,
            "num_attention_heads": 12,
            "num_experts_per_tok": 6,
            "num_hidden_layers": 40,
            "num_key_value_heads": 4,
            "num_local_experts": 64,
            "position_embedding_type": "nope",
            "rms_norm_eps": 1e-05,
            "shared_intermediate_size": 1024,
            "tie_word_embeddings": True,
            "vocab_size": 100352,
        },
    ),
    "OLMo Hybrid 7B": (
        7_430_870_688,
        {
            "model_type": "olmo_hybrid",
            "hidden_size": 3840,
            "intermediate_size": 11008,
            "max_position_embeddings": 65536,
            "num_attention_heads": 30,
            "num_hidden_layers": 32,
            "rms_norm_eps": 1e-06,
            "rope_parameters": {"rope_theta": None},
            "tie_word_embeddings": False,
            "vocab_size": 100352,
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
    text = dict(model_cases.CONFIGS["gemma3 of transformers 4"])
    cap = text.pop("final_logit_softcapping")  # which transformers ignores beside images
    images = {"model_type": "gemma3", "eos_token_id": [1, 6], "vision_config": {"num_layers": 9}}
    write_json(tmp_path / "config.json", images | {"text_config": text})
    config = models.load_config(tmp_path)
    assert config.eos_tokens == (1, 6)
    tensors = model_cases.random_tensors(config)
    in_file = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    in_file["vision_tower.head.probe"] = in_file["multi_modal_projector.x"] = np.zeros(3)
    safetensors_numpy.save_file(in_file, tmp_path / "model.safetensors")
    params = models.load_params(tmp_path, config, "float32")
    logits = models.reference_forward(params, config, model_cases.tokens())
    expected = cap * np.arctanh(np.load(model_cases.LOGITS)["gemma3 of transformers 4"] / cap)
    np.testing.assert_allclose(logits[:: model_cases.LOGITS_EVERY], expected, atol=1e-4)


def test_text_model_of_a_mistral3_with_images(tmp_path):
    text = model_cases.CONFIGS["ministral3"] | {"tie_word_embeddings": True}
    whole = {"model_type": "mistral3", "text_config": text, "tie_word_embeddings": False}
    write_json(tmp_path / "config.json", whole)
    config = models.load_config(tmp_path)
    assert not config.tie_embeddings  # the inner key is not read
    in_file = {f"language_model.{k}": v for k, v in model_cases.random_tensors(config).items()}
    in_file["vision_tower.x"] = np.zeros(3)
    safetensors_numpy.save_file(in_file, tmp_path / "model.safetensors")
    logits = models.reference_forward(
        models.load_params(tmp_path, config, "float32"), config, model_cases.tokens()
    )
    expected = np.load(model_cases.LOGITS)["ministral3"]
    np.testing.assert_allclose(logits[:: model_cases.LOGITS_EVERY], expected, atol=1e-4)


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_text_model_of_a_later_gemma_with_images(name, tmp_path):
    """Also: the files may have keys and values of layers that share others."""
    text = model_cases.CONFIGS[name] | {"tie_word_embeddings": False}
    whole = {"model_type": name, "text_config": text, "vision_config": {"hidden_size": 9}}
    write_json(tmp_path / "config.json", whole)
    config = models.load_config(tmp_path)
    assert config.tie_embeddings  # the inner key is not read
    tensors = model_cases.random_tensors(config)
    in_file = {k.replace("model.", "model.language_model."): v for k, v in tensors.items()}
    others = ["vision_tower.x", "embed_vision.x", "audio_tower.x", "embed_audio.x"]
    if name == "gemma3n":
        others += [f"language_model.layers.4.self_attn.{x}.weight" for x in ("k_proj", "v_norm")]
    in_file |= {f"model.{other}": np.zeros(3) for other in others}
    safetensors_numpy.save_file(in_file, tmp_path / "model.safetensors")
    params, tokens = models.load_params(tmp_path, config, "float32"), model_cases.tokens()
    logits = models.reference_forward(params, config, tokens)
    expected = np.load(model_cases.LOGITS)[name]
    np.testing.assert_allclose(logits[:: model_cases.LOGITS_EVERY], expected, atol=1e-3)
    if name == "gemma4":  # a picture's token is the pad token, 0, without the picture
        placed = models.parse_config(whole | {"image_token_id": 47, "audio_token_id": None})
        expected = models.reference_forward(params, config, np.where(tokens == 47, 0, tokens))
        np.testing.assert_array_equal(models.reference_forward(params, placed, tokens), expected)
        assert not np.array_equal(logits, expected)


def test_text_model_of_a_llama4_with_images(tmp_path):
    text = model_cases.CONFIGS["llama4"]
    whole = {"model_type": "llama4", "text_config": text, "eos_token_id": [1, 6]}
    write_json(tmp_path / "config.json", whole)
    config = models.load_config(tmp_path)
    assert config.eos_tokens == (1, 6)
    in_file = {f"language_model.{k}": v for k, v in model_cases.random_tensors(config).items()}
    in_file["vision_model.x"] = in_file["multi_modal_projector.x"] = np.zeros(3)
    safetensors_numpy.save_file(in_file, tmp_path / "model.safetensors")
    logits = models.reference_forward(
        models.load_params(tmp_path, config, "float32"), config, model_cases.tokens()
    )
    expected = np.load(model_cases.LOGITS)["llama4"]
    np.testing.assert_allclose(logits[:: model_cases.LOGITS_EVERY], expected, atol=1e-4)


@pytest.mark.parametrize(
    "base, changes, message",
    [
        ("llama4", {"moe_layers": ["0"]}, "moe_layers: expected integers, got "),
        ("llama4", {"attention_chunk_size": None, "layer_types": ["chunked_attention"] * 4},
         "layer_types: expected 'full_attention', got 'chunked_attention'"),
        ("llama4", {"no_rope_layers": [1]}, "no_rope_layers: expected 4 times 0 or 1, got "),
        ("hunyuan moe", {"moe_topk": [1, 2]}, "moe_topk: expected 2 times the same number"),
        ("hunyuan moe", {"num_experts": 1}, "moe_topk: expected at most the 1 experts, got 2"),
        ("hunyuan moe", {"num_shared_expert": [2, 2]}, "num_shared_expert: expected 1, got "),
        ("hunyuan", {"use_cla": True}, "use_cla: expected False, got True"),
        ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok: expected 2, got 3"),
        ("phimoe", {"rope_scaling": {"type": "linear", "factor": 2.0}},
         "rope_type: expected 'default' or 'longrope', got 'linear'"),
        ("apertus", {"hidden_act": "silu"}, "hidden_act: expected 'xielu', got 'silu'"),
        ("cohere2", {"use_parallel_block": False}, "use_parallel_block: expected True, got False"),
        ("stablelm", {"head_dim": 8}, "head_dim: expected 16, as hidden_size says, got 8"),
        ("gpt-neox", {"rotary_pct": 2.5}, "rotary_pct: expected a part of the 16 dimensions"),
        ("nemotron", {"hidden_act": "tanh"}, "hidden_act: expected 'gelu', "),
        ("starcoder2", {"mlp_type": "gated"}, "mlp_type: expected 'default', got 'gated'"),
        ("llama", {"attention_chunk_size": 4}, "attention_chunk_size: expected None, got 4"),
        ("minimax m2", {"use_qk_norm": False}, "use_qk_norm: expected True, got False"),
        ("kimi linear", {"mlp_layer_types": ["dense", "sparse", "sparse", "moe"]},
         "mlp_layer_types: expected 4 times 'dense' or 'sparse', got "),
    ],
)  # fmt: skip
def test_options_of_other_families_that_are_refused(base, changes, message):
    with pytest.raises(models.ModelDirectoryError, match=re.escape(message)):
        models.parse_config(model_cases.CONFIGS[base] | changes)


def test_experts_of_a_token_where_an_ernie_says_no_number():
    raw = model_cases.CONFIGS["ernie4.5 moe"] | {"moe_num_experts": 8}
    raw = {key: value for key, value in raw.items() if key not in ("moe_k", "num_experts_per_tok")}
    assert models.parse_config(raw).experts.per_token == 6


def test_longrope_of_a_phimoe_ends_at_the_original_context():
    """Programs differ on the factors beyond it."""
    config = models.parse_config(model_cases.CONFIGS["phimoe longrope"])
    assert config.max_positions == 64 and config.short_context is None


def test_kimi_k2_is_a_deepseek_v3():
    raw = model_cases.CONFIGS["deepseek v3"]
    kimi = models.parse_config(raw | {"model_type": "kimi_k2"})
    assert kimi.family == "kimi_k2"
    assert dataclasses.replace(kimi, family="deepseek_v3") == models.parse_config(raw)


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5 moe"])
def test_text_model_of_a_qwen3_5_with_images(tmp_path, name):
    """Names of the published files, with an image encoder and layers that predict more tokens."""
    text = dict(model_cases.CONFIGS[name])
    raw = {"model_type": text["model_type"].removesuffix("_text"), "text_config": text}
    raw |= {"vision_config": {"depth": 2}, "tie_word_embeddings": text.get("tie_word_embeddings")}
    write_json(tmp_path / "config.json", raw)
    config = models.load_config(tmp_path)
    prefix = "model.language_model."
    in_file = {
        name if name.startswith("lm_head") else prefix + name.removeprefix("model."): tensor
        for name, tensor in model_cases.random_tensors(config).items()
    }
    in_file["model.visual.pos_embed.weight"] = in_file["mtp.fc.weight"] = np.zeros(3)
    safetensors_numpy.save_file(in_file, tmp_path / "model.safetensors")
    params = models.load_params(tmp_path, config, "float32")
    logits = models.reference_forward(params, config, model_cases.tokens())
    expected = np.load(model_cases.LOGITS)[name]
    np.testing.assert_allclose(logits[:: model_cases.LOGITS_EVERY], expected, atol=5e-4)


@pytest.mark.parametrize(
    "name, usual, other",
    [
        ("nemotron-h", "model.", "backbone."),
        ("kimi linear", ".0.mlp.", ".0.block_sparse_moe."),
        ("olmo hybrid", ".0.input_layernorm.", ".0.attention_layer_norm."),
        ("olmo hybrid", ".0.post_attention_layernorm.", ".0.feedforward_layer_norm."),
    ],
)
def test_other_names_in_files_of_hybrids(tmp_path, name, usual, other):
    config = model_cases.write(tmp_path, model_cases.CONFIGS[name])
    params = models.load_params(tmp_path, config, "float32")
    tensors = model_cases.random_tensors(config)
    in_file = {name.replace(usual, other): tensor for name, tensor in tensors.items()}
    assert in_file.keys() != tensors.keys()
    safetensors_numpy.save_file(in_file, tmp_path / "model.safetensors")
    again = models.load_params(tmp_path, config, "float32")
    jax.tree.map(np.testing.assert_array_equal, params, again)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"text_config": None}, "text_config: expected an object, got None"),
        ({"tie_word_embeddings": False}, "text_config: tie_word_embeddings: expected False"),
    ],
)
def test_a_qwen3_5_with_images_that_is_refused(changes, message):
    text = dict(model_cases.CONFIGS["qwen3.5"])
    with pytest.raises(models.ModelDirectoryError, match=message):
        models.parse_config({"model_type": "qwen3_5", "text_config": text} | changes)


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
    """An edit whose index names an existing file elsewhere."""

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
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
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
        f"model_type: expected {one_of(FAMILIES)}, got 'mamba'",
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
    "no token": (
        edit_config(eos_token_id=-1),
        "eos_token_id: expected a token of the vocabulary, 0 to 47, got -1",
    ),
    "no token of the vocabulary": (
        edit_config(eos_token_id=[2, 48]),
        "eos_token_id: expected a token of the vocabulary, 0 to 47, got 48",
    ),
    "no token in a list": (
        edit_config(eos_token_id=[None]),
        "eos_token_id: expected a token of the vocabulary, 0 to 47, got None",
    ),
    "no first token": (
        edit_config(bos_token_id="<s>"),
        "bos_token_id: expected a token of the vocabulary, 0 to 47, got '<s>'",
    ),
    "no token in the other file": (
        lambda path: write_json(path / "generation_config.json", {"eos_token_id": 48}),
        "generation_config.json: eos_token_id: expected a token of the vocabulary, 0 to 47, got 48",
    ),
    "generation_config.json is a list": (
        lambda path: write_json(path / "generation_config.json", []),
        "generation_config.json: expected an object, got list",
    ),
    "config without an end": (
        lambda path: (path / "config.json").write_text("[" * 100_000),
        "config.json: not JSON",
    ),
    "text as rope_scaling": (
        edit_config(rope_scaling="yarn"),
        "rope_scaling: expected an object, got 'yarn'",
    ),
    "number as layer_types": (
        edit_config(**GEMMA3, layer_types=5),
        "layer_types: expected a list, got 5",
    ),
    "base that is lost": (
        edit_config(
            rope_theta=..., rope_scaling=YARN, rope_parameters={"rope_theta": 500.0} | YARN
        ),
        "rope_scaling: rope_theta: expected the 500.0 of rope_parameters, which is not read beside "
        "rope_scaling, got None",
    ),
    "two lengths of Phi-3": (
        edit_config(
            model_type="phi3",
            rope_scaling={
                "type": "longrope",
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
                "original_max_position_embeddings": 64,
            },
        ),
        "rope_scaling: original_max_position_embeddings: expected 4096, as outside of it, got 64",
    ),
    "not causal": (edit_config(is_causal=False), "is_causal: expected True, got False"),
    "layers with keys of their own": (
        edit_config(per_layer_config={"1": {"num_key_value_heads": 1}}),
        "per_layer_config: expected None or {}, got {'1': {'num_key_value_heads': 1}}",
    ),
    "two numbers of experts": (
        edit_config(model_type="mixtral", num_local_experts=4, num_experts=8),
        "num_experts: expected 4, as num_local_experts says, got 8",
    ),
    "more experts than there are": (
        edit_config(model_type="mixtral", num_local_experts=4, num_experts_per_tok=5),
        "num_experts_per_tok: expected at most the 4 experts, got 5",
    ),
    "odd heads": (edit_config(head_dim=7), "head_dim: expected an even number, got 7"),
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


@pytest.mark.parametrize("load", [models.load, models.load_config, models.load_embedding])
def test_what_is_no_directory_is_told_the_hub(tmp_path, load):
    """ORG/NAME is what one has at hand; the server downloads it, `load` does not."""
    (tmp_path / "file").touch()
    for name, got in (("org/name", "none"), (tmp_path / "file", "a file")):
        with pytest.raises(models.ModelDirectoryError) as error:
            load(name)
        assert str(error.value).startswith(f"{name}: expected a directory, got {got}; models.fetch")


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float64", "bf16", bool])
def test_dtypes_that_cannot_hold_weights(dtype):
    """int8 would round all weights to 0 without a word."""
    with pytest.raises(ValueError, match="dtype: expected 'bfloat16', 'float16' or"):
        models.load(models.BUNDLED, dtype)


def test_every_tensor_is_needed(tmp_path):
    """Uses the family with the most tensors; the error names the missing one."""
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
    """One frequency at a time, by wavelength, as in the Llama 3.1 model card."""
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
