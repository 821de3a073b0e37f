"""A model from a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax

from jax_attn.models._config.config import ModelConfig
from jax_attn.models._config.directory import ModelDirectoryError, existing
from jax_attn.models._families.parse import load_config
from jax_attn.models._weights.protocols import Tokenizer
from jax_attn.models._weights.weights import Params, load_params


class Model(NamedTuple):
    config: ModelConfig
    params: Params
    tokenizer: Tokenizer


def load(
    directory: str | Path,
    dtype: jax.typing.DTypeLike = "bfloat16",
    progress: Callable[[int, int], None] | None = None,
    *,
    in_panels: bool = False,
) -> Model:
    """Loads a Hugging Face directory; config.json's model_type selects the family.

    Args:
      directory: config.json, tokenizer.json, and model.safetensors or the shards that
        model.safetensors.index.json names. Weights may be bf16, f16 or f32, or matrices quantized
        by config.json's quantization_config (docs/models.md); those stay quantized in memory.
      dtype: dtype of all other weights in memory, and so of the activations.
      progress: called with the number of elements read so far, and the number in all files.
      in_panels: store the matrices of a step in the layout of the CPU's matmul kernels (Params).
        The engine converts other weights itself, but then holds a second copy of them.

    Raises:
      ModelDirectoryError: a file, key or tensor is missing or does not fit; names it.
    """
    config = load_config(directory)
    tokenizer = load_tokenizer(directory)
    params = load_params(directory, config, dtype, progress, in_panels=in_panels)
    return Model(config, params, tokenizer)


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """Loads tokenizer.json. Raises ModelDirectoryError."""
    import tokenizers

    path = existing(Path(directory) / "tokenizer.json")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelDirectoryError(f"{path}: not a tokenizer: {error}") from error
