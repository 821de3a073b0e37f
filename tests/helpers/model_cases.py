"""Small models of every family, with weights that any machine can make again.

tests/data/model_logits.npz holds what transformers computes for them (make_model_logits.py).
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from helpers.paths import DATA
from jax_attn.models._config.config import ModelConfig
from jax_attn.models._config.families import load_config
from jax_attn.models._weights.tensors import file_shapes

LOGITS = DATA / "model_logits.npz"
NUM_TOKENS = 44
LOGITS_EVERY = 6  # rows of the logits that LOGITS holds

_COMMON = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_theta": 10000.0}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
}
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "head_dim": 16, "sliding_window": 7}

# config.json of each, mostly as transformers 5 writes it; "4" marks the keys of transformers 4.
# Soft caps and windows are small: what they do must show within NUM_TOKENS.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": False, "rope_theta": 10000.0},
    "llama bias tied, llama3 rope": {
        "model_type": "llama",
        "attention_bias": True,
        "tie_word_embeddings": True,
        "head_dim": 16,
        "rope_parameters": _LLAMA3_ROPE,
    },
    "llama mha, linear rope": {
        "model_type": "llama",
        "num_key_value_heads": 4,
        "rope_theta": 1000.0,
        "rope_scaling": {"type": "linear", "factor": 4.0},
    },
    "mistral window": {"model_type": "mistral", "sliding_window": 7, "rope_theta": 10000.0},
    "mistral mqa": {
        "model_type": "mistral",
        "num_key_value_heads": 1,
        "head_dim": 16,
        "sliding_window": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "qwen2 tied": {
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
        "sliding_window": 7,
        "use_sliding_window": False,
    },
    "qwen2 windows above": {
        "model_type": "qwen2",
        "num_hidden_layers": 4,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
        "rope_theta": 10000.0,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 24, "rope_theta": 1e6},
    "qwen3 bias, layer_types": {
        "model_type": "qwen3",
        "head_dim": 16,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 9,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "rope_theta": 10000.0,
    },
    "gemma2": {
        "model_type": "gemma2",
        **_GEMMA,
        "num_hidden_layers": 5,
        "query_pre_attn_scalar": 5,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 6.0,
    },
    "gemma2 no caps, bias": {
        "model_type": "gemma2",
        **_GEMMA,
        "num_hidden_layers": 2,
        "attention_bias": True,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": False,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        **_GEMMA,
        "num_hidden_layers": 4,
        "query_pre_attn_scalar": 24,
        "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "gemma3 of transformers 4": {
        "model_type": "gemma3_text",
        **_GEMMA,
        "num_hidden_layers": 5,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 16,
        "sliding_window_pattern": 2,
        "final_logit_softcapping": 6.0,
        "rope_theta": 1000.0,
        "rope_local_base_freq": 50.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "mixtral window": {"model_type": "mixtral", "sliding_window": 7, **_EXPERTS},
    "mixtral tied, mha": {
        "model_type": "mixtral",
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
        "num_local_experts": 3,
        "num_experts_per_tok": 1,
        "rope_theta": 1000.0,
    },
    "qwen3 moe": {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "rope_theta": 10000.0,
    },
    "qwen3 moe, some dense": {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 5,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 9,
        "rope_parameters": _YARN_ROPE,
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        "head_dim": 16,
        "num_hidden_layers": 4,
        **_EXPERTS,
        "num_local_experts": 5,
        "sliding_window": 7,
        "swiglu_limit": 0.9,
        "rope_parameters": _YARN_ROPE | {"truncate": False},
    },
    "gpt-oss mxfp4": {
        "model_type": "gpt_oss",
        "hidden_size": 64,
        "intermediate_size": 96,
        "head_dim": 16,
        "num_hidden_layers": 2,
        **_EXPERTS,
        "sliding_window": 7,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    },
    "deepseek v2": {
        "model_type": "deepseek_v2",
        **_LATENT,
        "q_lora_rank": None,
        "topk_method": "greedy",
        "n_routed_experts": 4,
        "rope_theta": 10000.0,
    },
    "deepseek v2 groups, yarn": {
        "model_type": "deepseek_v2",
        **_LATENT,
        "topk_method": "group_limited_greedy",
        "n_routed_experts": 12,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 1.7,
        "rope_parameters": _YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 0.9},
    },
    "deepseek v3": {
        "model_type": "deepseek_v3",
        **_LATENT,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "num_nextn_predict_layers": 0,
        "rope_parameters": _YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "deepseek v3 halves": {
        "model_type": "deepseek_v3",
        **_LATENT,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 0.8,
        "rope_interleave": False,
        "first_k_dense_replace": 0,
        "rope_theta": 100.0,
    },
    "phi3": {"model_type": "phi3", "sliding_window": 9, "pad_token_id": 0},
    "phi3 long, partial": {
        "model_type": "phi3",
        "hidden_size": 64,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 16,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 6,
            "long_factor": [1.0, 1.1, 1.5, 2.0, 4.0, 8.0],
        },
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    },
    "phi3 short": {
        "model_type": "phi3",
        "original_max_position_embeddings": 128,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.2, 1.4, 1.6],
            "long_factor": [1.0, 2.0, 4.0, 8.0],
        },
        "pad_token_id": 0,
    },
    "olmo2": {"model_type": "olmo2", "rope_theta": 10000.0},
    "olmo2 bias, yarn": {
        "model_type": "olmo2",
        "attention_bias": True,
        "num_key_value_heads": 4,
        "rope_parameters": _YARN_ROPE | {"mscale": 1.5, "mscale_all_dim": 0.5, "truncate": False},
    },
    "granite": {
        "model_type": "granite",
        "attention_multiplier": 0.4,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.7,
        "logits_scaling": 1.7,
        "tie_word_embeddings": True,
        "rope_theta": 10000.0,
    },
    "granite bias, dynamic": {
        "model_type": "granite",
        "attention_bias": True,
        "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0},
    },
    "smollm3": {
        "model_type": "smollm3",
        "no_rope_layer_interval": 2,
        "rope_theta": 5e4,
        "pad_token_id": 0,
    },
    "smollm3 windows": {
        "model_type": "smollm3",
        "num_hidden_layers": 4,
        "no_rope_layers": [0, 1, 1, 0],
        "use_sliding_window": True,
        "sliding_window": 9,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        "pad_token_id": 0,
    },
}
CONFIGS = {name: _COMMON | config for name, config in CONFIGS.items()}


def tokens() -> np.ndarray:
    return np.random.RandomState(0).randint(0, _COMMON["vocab_size"], NUM_TOKENS)


def random_tensors(config: ModelConfig, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """All tensors of the files. The legacy generator: its numbers never change."""
    tensors = {}
    for name, shape in file_shapes(config).items():
        random = np.random.RandomState(zlib.crc32(name.encode()))
        if name.endswith(("_blocks", "_scales")):  # of MXFP4; scales of 2 ** -4 and around it
            low, high = (0, 256) if name.endswith("_blocks") else (122, 125)
            tensors[name] = random.randint(low, high, shape).astype(np.uint8)
            continue
        normal = random.standard_normal(shape)
        is_norm = name.endswith("norm.weight")
        tensors[name] = ((1 - config.norm_offset if is_norm else 0) + 0.3 * normal).astype(dtype)
    return tensors


def write(directory: Path, raw: dict[str, Any], dtype: Any = np.float32) -> ModelConfig:
    """Writes config.json and model.safetensors; returns what the former says."""
    from safetensors.numpy import save_file

    (directory / "config.json").write_text(json.dumps(raw))
    config = load_config(directory)
    save_file(random_tensors(config, dtype), directory / "model.safetensors")
    return config
