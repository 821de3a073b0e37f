from pathlib import Path

import pytest

from helpers.model_cases import shallow
from jax_attn import models


@pytest.fixture(scope="session")
def directory() -> Path:
    """Directory of the bundled model."""
    return models.BUNDLED


@pytest.fixture(scope="session")
def whole_model(directory):
    return models.load(directory, dtype="float32")


@pytest.fixture(scope="session")
def model(whole_model):
    """The bundled model with two layers, which compiles and runs in less time."""
    return shallow(whole_model)


@pytest.fixture(scope="session")
def tokenizer(directory):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(directory / "tokenizer.json"))


@pytest.fixture
def client(server):
    """OpenAI's client of a module's own `server`."""
    with server.client() as client:
        yield client
