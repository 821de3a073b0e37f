"""A model from a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax

from jax_attn.models._config.config import ModelConfig
from jax_attn.models._config.directory import ModelDirectoryError, existing
from jax_attn.models._config.families import load_config
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
    """Loads a Hugging Face directory; config.json's model_type says of which family.

    Args:
      directory: config.json, tokenizer.json, and model.safetensors or the shards that
        model.safetensors.index.json names. Weights may be bf16, f16 or f32, or matrices quantised
        as config.json's quantization_config says (docs/models.md); those stay in their bits.
      dtype: of all other weights in memory, and so of the activations.
      progress: is told how many numbers of the files are read, and how many there are.
      in_panels: matrices that a step multiplies as the products of a CPU read them (Params). The
        engine makes them so anyway, but of weights that it is given otherwise it keeps a copy.

    Raises:
      ModelDirectoryError: a file, key or tensor is missing or does not fit; names it.
    """
    config = load_config(directory)
    tokenizer = load_tokenizer(directory)
    params = load_params(directory, config, dtype, progress, in_panels=in_panels)
    return Model(config, params, tokenizer)


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """Of tokenizer.json. Raises ModelDirectoryError."""
    import tokenizers

    path = existing(Path(directory) / "tokenizer.json")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelDirectoryError(f"{path}: not a tokenizer: {error}") from error
