"""examples/train_tiny_llama.py: training with our kernels beside jax.nn's attention."""

import importlib.util
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.backends import on_every_platform
from helpers.paths import EXAMPLES


@pytest.fixture
def example():
    pytest.importorskip("tokenizers", reason="needs the extra `models`")
    spec = importlib.util.spec_from_file_location("train", EXAMPLES / "train_tiny_llama.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "train", module)  # dataclasses look it up
        spec.loader.exec_module(module)
        yield module


def losses_of(example, steps=12):
    """Loss of each step on the same windows of tokens; half the tokens follow from earlier ones."""
    recipe = example.Recipe(batch=4, warmup_steps=4)
    params = example.init_params(example.TINY, jax.random.key(0))
    state = params, *(jax.tree.map(jnp.zeros_like, params) for _ in range(2))
    windows = np.random.default_rng(0).integers(0, 64, (steps, 1, recipe.batch, 65))
    windows[..., 1::2] = windows[..., :-1:2]
    step = example.make_train_chunk(example.TINY, recipe)
    losses = []
    for i, window in enumerate(windows):
        state, loss = step(state, window, i, steps)
        losses.append(float(loss))
    return losses


@on_every_platform
def test_the_loss_follows_that_of_jax_nn(example, backend, monkeypatch):
    got = losses_of(example)
    plain = SimpleNamespace(dot_product_attention=jax.nn.dot_product_attention)
    monkeypatch.setattr(example, "ja", plain)
    want = losses_of(example)
    assert want[-1] < want[0] - 0.3  # it learns
    tolerance = 2e-2 if backend.platform == "gpu" else 1e-4  # bfloat16 on a GPU
    np.testing.assert_allclose(got, want, rtol=tolerance)
