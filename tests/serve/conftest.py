from pathlib import Path

import pytest

from jax_attn import models


@pytest.fixture(scope="session")
def directory() -> Path:
    """Of the bundled model."""
    return models.BUNDLED


@pytest.fixture(scope="session")
def model(directory):
    return models.load(directory, dtype="float32")


@pytest.fixture(scope="session")
def tokenizer(directory):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(directory / "tokenizer.json"))
