"""Which arrays of a trainer's tree are weights of the model, and their names there."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jax_attn import models
from jax_attn.models._layers.weight_updates import named


def filtered(
    params: Any,
    filter: Callable[[str, Any], bool] | None,
    names: Callable[[str], str | None] | Mapping[str, str] | None,
) -> Any:
    """The arrays by the model's names. Without filter and names it is `params` itself.

    Raises ValueError: two arrays get one name.
    """
    if filter is None and names is None:
        return params
    rename = names.get if isinstance(names, Mapping) else names
    found: dict[str, Any] = {}
    for name, array in named(params).items():
        if filter is not None and not filter(name, array):
            continue
        new = name if rename is None else rename(name)
        if new is None:
            continue
        if new in found:
            raise ValueError(f"update_params: names: expected a name for each, got {new} twice.")
        found[new] = array
    return found


def read_lora(
    adapter: str | os.PathLike[str] | Mapping[str, Any],
    config: Mapping[str, Any] | None,
    model: models.ModelConfig,
) -> models.LoraWeights:
    """See LLM.load_lora. Raises ValueError."""
    if isinstance(adapter, Mapping):
        if config is None:
            raise ValueError("load_lora: config: expected one beside tensors, got None.")
        return models.make_lora(config, adapter, model)
    if config is not None:
        raise ValueError("load_lora: config: expected None, as a directory has its own.")
    return models.load_lora(Path(adapter), model)
