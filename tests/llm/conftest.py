import numpy as np
import pytest
from safetensors.numpy import load_file

from helpers.small_llm import SMALL
from jax_attn import LLM, models


@pytest.fixture(scope="session")
def model():
    return models.load(models.BUNDLED, dtype="float32")


@pytest.fixture(scope="session")
def files():
    """The tensors of the model's files, by name, in float32."""
    tensors = load_file(models.BUNDLED / "model.safetensors")
    return {name: tensor.astype(np.float32) for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def llm(model):
    with LLM(model, directory=models.BUNDLED, **SMALL) as made:
        yield made
