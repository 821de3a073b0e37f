"""Decoder models in plain JAX on jax_attn's public operations, from Hugging Face directories.

    config, params, tokenizer = models.load(models.BUNDLED, dtype="float32")
    specs = models.attention_specs(
        config, dtype="float32", max_batch=8, max_qo_tokens=64, max_kv_pages=512
    )
    k_pages, v_pages = models.init_pages(config, specs, num_pages=512)
    step = jax.jit(models.forward, static_argnames="config", donate_argnames=("k_pages", "v_pages"))

    batch = (qo_indptr, kv_lens, page_indptr, page_indices)
    plans = tuple(jax_attn.plan(spec, *batch) for spec in specs)
    logits, k_pages, v_pages = step(
        params, config, tokens, positions, k_pages, v_pages, plans, logit_rows
    )

`forward` runs any mix of prefill, chunked prefill and decode over a paged cache.
`reference_forward` runs one sequence with dense attention, as the oracle. families.py lists the
supported models and the options that are refused.

`fetch` downloads a directory from the Hugging Face Hub. `BUNDLED` is the directory of the model
that is installed with the package.

Loading needs the packages of the extra `models`: pip install 'jax_attn[models]'.
"""

from jax_attn.models._config.config import LayerKind, ModelConfig
from jax_attn.models._config.directory import BUNDLED, ModelDirectoryError
from jax_attn.models._config.families import load_config, parse_config
from jax_attn.models._config.rope import LinearScaling, Llama3Scaling, Rope, rotate
from jax_attn.models._embedding.embedding import (
    EmbeddingBatch,
    EmbeddingModel,
    embed,
    load_embedding,
)
from jax_attn.models._embedding.encoder import EncoderConfig
from jax_attn.models._layers.decoder import attention_specs, forward, init_pages, reference_forward
from jax_attn.models._layers.tensor_parallel import TensorParallel
from jax_attn.models._loading.hub import fetch
from jax_attn.models._loading.loading import Model, load
from jax_attn.models._weights.weights import Params, load_params, pack_params, random_params

__all__ = [
    "BUNDLED",
    "EmbeddingBatch",
    "EmbeddingModel",
    "EncoderConfig",
    "LayerKind",
    "LinearScaling",
    "Llama3Scaling",
    "Model",
    "ModelConfig",
    "ModelDirectoryError",
    "Params",
    "Rope",
    "TensorParallel",
    "attention_specs",
    "embed",
    "fetch",
    "forward",
    "init_pages",
    "load",
    "load_config",
    "load_embedding",
    "load_params",
    "pack_params",
    "parse_config",
    "random_params",
    "reference_forward",
    "rotate",
]
