"""Files of a model directory, and the error for a directory that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jax_attn import _core


def _bundled() -> Path:
    """The bundled model: installed beside the extension, or in data/ of a source folder."""
    name = "tiny-llama-stdlib"
    installed = Path(_core.__file__).parent / "models" / name
    return (
        installed
        if (installed / "config.json").is_file()
        else Path(__file__).parents[3] / "data" / name
    )


BUNDLED = _bundled()


class ModelDirectoryError(ValueError):
    """A model directory cannot be used. Names the file, what was expected and what was found."""


def existing_directory(directory: str | Path) -> Path:
    path = Path(directory)
    if path.suffix == ".gguf":
        raise ModelDirectoryError(
            f"{directory}: expected a directory with safetensors, got a GGUF file; GGUF is not read"
        )
    if not path.is_dir():
        raise ModelDirectoryError(
            f"{directory}: expected a directory, got {'a file' if path.exists() else 'none'};"
            " models.fetch downloads a model of the Hugging Face Hub and returns its directory"
        )
    return path


def existing(path: Path) -> Path:
    if not path.is_file():
        raise ModelDirectoryError(f"{path}: no such file")
    return path


def read_json(path: Path, kind: type = dict) -> Any:
    """The object, or the list, in a JSON file. Raises ModelDirectoryError."""
    existing(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelDirectoryError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, kind):
        expected = "an object" if kind is dict else "a list"
        raise ModelDirectoryError(f"{path}: expected {expected}, got {type(value).__name__}")
    return value
