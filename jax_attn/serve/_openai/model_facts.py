"""What /v1/models and Ollama's routes say about the model that is served."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jax_attn import models

_WEIGHTS = "*.safetensors"


@dataclass(frozen=True)
class ModelFacts:
    family: str  # model_type of config.json
    quantization: str | None  # method of the files' quantized matrices; None: they have none
    num_bytes: int  # of the files with weights
    modified: float  # seconds since 1970: when the newest of them was written

    @staticmethod
    def of(config: models.ModelConfig, directory: Path) -> ModelFacts:
        found = [path.stat() for path in directory.glob(_WEIGHTS)]
        return ModelFacts(
            config.family,
            config.quantization.method if config.quantization is not None else None,
            sum(each.st_size for each in found),
            max((each.st_mtime for each in found), default=0.0),
        )
