"""The rollout for Tunix, with stand-ins for its base class and flax: names, layouts, padding.

examples/grpo_tunix.py runs it with Tunix itself, where that is installed.
"""

import dataclasses
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("llguidance", reason="needs the extra `serve`")

from helpers.small_llm import SMALL
from jax_attn import SamplingParams, models


@dataclasses.dataclass
class RolloutConfig:
    max_tokens_to_generate: int = 6
    temperature: float = 1.0
    top_p: float | None = 1.0
    top_k: int | None = None
    seed: jax.Array | None = None
    max_prompt_length: int = 16
    eos_tokens: list[int] | None = None


@dataclasses.dataclass
class RolloutOutput:
    text: list
    logits: list | None
    tokens: list
    left_padded_prompt_tokens: np.ndarray
    logprobs: list | None


class Tokenizer:
    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def encode(self, text):
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def dedup_bos_ids(self, ids):
        return ids[1:] if ids[:2] == [5, 5] else ids

    def bos_id(self):
        return 5

    def eos_id(self):
        return 0

    def pad_id(self):
        return 1


@pytest.fixture(scope="module")
def tunix():
    """jax_attn.integrations.tunix over the stand-ins."""
    base = types.SimpleNamespace(
        BaseRollout=object, RolloutConfig=RolloutConfig, RolloutOutput=RolloutOutput
    )
    nnx = types.SimpleNamespace(
        state=lambda actor, kind: actor, Param="Param", State=dict, filter_state=lambda s, t: s
    )
    modules = {
        "flax": types.SimpleNamespace(nnx=nnx),
        "flax.nnx": nnx,
        "tunix": types.ModuleType("tunix"),
        "tunix.rl": types.ModuleType("tunix.rl"),
        "tunix.rl.rollout": types.SimpleNamespace(base_rollout=base),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        import jax_attn.integrations.tunix as made

        yield made
        sys.modules.pop("jax_attn.integrations.tunix")


def actor_of(files, config):
    """The weights as Tunix's Llama 3 has them: nested, heads on an axis of their own."""
    d, size = config.hidden_size, config.head_dim
    tensors = {name.removeprefix("model."): jnp.asarray(x) for name, x in files.items()}

    def layer(i):
        of = {n.removeprefix(f"layers.{i}."): x for n, x in tensors.items() if f"layers.{i}." in n}
        attention = {
            f"{x}_proj": {"w": {"value": of[f"self_attn.{x}_proj.weight"].T.reshape(d, -1, size)}}
            for x in "qkv"
        }
        attention["o_proj"] = {"w": of["self_attn.o_proj.weight"].T.reshape(-1, size, d)}
        mlp = {
            f"{x}_proj": {"kernel": of[f"mlp.{x}_proj.weight"].T} for x in ("gate", "up", "down")
        }
        norms = ("input_layernorm", "post_attention_layernorm")
        return {n: {"w": of[f"{n}.weight"]} for n in norms} | {"attn": attention, "mlp": mlp}

    return {
        "embedder": {"input_embedding": tensors["embed_tokens.weight"]},
        "final_norm": {"w": tensors["norm.weight"]},
        "layers": {i: layer(i) for i in range(config.num_layers)},
    }


@pytest.fixture(scope="module")
def rollout(tunix, model, files):
    changed = {name: x * np.float32(1.03) for name, x in files.items()}
    made = tunix.Rollout(
        actor_of(changed, model.config),
        Tokenizer(model.tokenizer),
        None,
        RolloutConfig(),
        model=models.BUNDLED,
        dtype="float32",
        **SMALL,
    )
    yield made
    made.llm.close()


def test_the_engine_has_the_actors_weights(rollout, model, files):
    assert rollout.llm.version == "1" and rollout.model() is None
    found = rollout.llm.score([[5, 6, 7, 8]])[0].logprobs
    expected = models.reference_forward(
        jax.tree.map(lambda x: x * np.float32(1.03), model.params), model.config, jnp.arange(5, 9)
    )
    expected = jax.nn.log_softmax(expected)[np.arange(3), np.arange(6, 9)]
    np.testing.assert_allclose(found, expected, atol=5e-5)
    rollout.update_params(actor_of(files, model.config), ("Param",))
    assert rollout.llm.version == "2"


def test_tokens_are_padded_as_tunix_has_them(rollout):
    config = RolloutConfig(seed=jax.random.PRNGKey(3), temperature=0.8, top_k=50)
    prompts = ["def main(", "x", "x"]
    output = rollout.generate(prompts, config)
    assert output.left_padded_prompt_tokens.shape == (3, 16)
    lengths = [1 + len(rollout._tokenizer.encode(prompt)) for prompt in prompts]
    for row, length in zip(output.left_padded_prompt_tokens, lengths, strict=True):
        assert (row[:-length] == 1).all() and row[-length] == 5
    assert output.tokens[1].tolist() != output.tokens[2].tolist()  # a group's members differ
    again = rollout.generate(prompts, config)
    assert [t.tolist() for t in again.tokens] == [t.tolist() for t in output.tokens]
    completions = np.full((3, 8), 1)
    for row, tokens in zip(completions, output.tokens, strict=True):
        row[: len(tokens)] = tokens
    found = rollout.get_per_token_logps(
        jnp.asarray(output.left_padded_prompt_tokens), jnp.asarray(completions)
    )
    assert found.shape == (3, 8)
    for row, logprobs in zip(np.asarray(found), output.logprobs, strict=True):
        np.testing.assert_allclose(row[: len(logprobs)], logprobs, atol=2e-5)
        assert not row[len(logprobs) :].any()
    stopped = rollout.generate(["x"], RolloutConfig(eos_tokens=[int(output.tokens[1][0])]))
    assert len(stopped.tokens[0]) >= 1
    assert (rollout.pad_id(), rollout.eos_id()) == (1, 0)


def test_what_does_not_fit_is_a_sentence(tunix, rollout):
    with pytest.raises(ValueError, match="expected at most max_prompt_length = 2 tokens, got"):
        rollout.generate(["def main("], RolloutConfig(max_prompt_length=2))
    with pytest.raises(ValueError, match="expected whole weights, got a LoRA adapter"):
        rollout.update_params({"layers": {0: {"w_lora_a": jnp.zeros((2, 2))}}})
    with pytest.raises(ValueError, match="expected a weight of Tunix's Llama 3, Qwen 2 or Qwen 3"):
        rollout.update_params({"tower": jnp.zeros(2)})
    with pytest.raises(ValueError, match="expected no further options, got .'beam'."):
        rollout.generate(["x"], RolloutConfig(), beam=2)
    assert rollout.llm.generate("x", SamplingParams(max_tokens=1))
