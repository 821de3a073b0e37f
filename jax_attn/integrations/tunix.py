"""Tunix (google-tunix): `LLM` as the rollout engine of its RL cluster.

    cluster_config = rl_cluster.ClusterConfig(
        rollout_engine=functools.partial(Rollout, model="DIR or ORG/NAME", max_running=64), ...
    )

The model is loaded from files of Hugging Face; the actor's weights replace its own at the start and
after each step. Actors are Tunix's Llama 3, Qwen 2 and Qwen 3; for others pass `names`.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.rl.rollout import base_rollout

from jax_attn import models
from jax_attn.llm import LLM, SamplingParams
from jax_attn.models._layers.weight_updates import named

# Names of Tunix's models, and those of the model's files. `{}` is the layer.
_NAMES = {
    "embedder.input_embedding": "model.embed_tokens.weight",
    "final_norm.w": "model.norm.weight",
    "lm_head.w": "lm_head.weight",
    **{
        f"layers.{{}}.{theirs}": f"model.layers.{{}}.{ours}"
        for theirs, ours in {
            "input_layernorm.w": "input_layernorm.weight",
            "post_attention_layernorm.w": "post_attention_layernorm.weight",
            "attn.q_norm.w": "self_attn.q_norm.weight",
            "attn.k_norm.w": "self_attn.k_norm.weight",
            **{f"attn.{x}_proj.w": f"self_attn.{x}_proj.weight" for x in "qkvo"},
            **{f"attn.{x}_bias": f"self_attn.{x}_proj.bias" for x in "qkv"},
            **{f"mlp.{x}_proj.kernel": f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")},
        }.items()
    },
}
_LAYER = re.compile(r"(?<=layers\.)\d+(?=\.)")


class Rollout(base_rollout.BaseRollout):  # type: ignore[misc]
    """Runs Tunix's prompts on an `LLM`. Log-probabilities are of the distribution sampled from.

    llm: the engine, for its other calls.
    """

    def __init__(
        self,
        rollout_actor: Any,
        tokenizer: Any,
        mesh: jax.sharding.Mesh | None,
        rollout_config: base_rollout.RolloutConfig,
        *,
        model: str | os.PathLike[str] | models.Model,
        names: Callable[[str, jax.Array], tuple[str, jax.Array] | None] | None = None,
        **options: Any,
    ):
        """Called by Tunix's cluster; bind `model`, `names` and options with functools.partial.

        model, options: of LLM. A mesh of several devices splits the model over all of them.
        names: (name, array) of the actor -> name and array of the model's files; None: it is left
          out.

        Raises:
          ValueError: an option, or a weight of the actor, does not fit.
        """
        self._tokenizer, self._config = tokenizer, rollout_config
        self._names = names or of_files
        self.mesh = mesh
        if mesh is not None and mesh.size > 1:
            options = {"tensor_parallel": mesh.size, "devices": [*mesh.devices.flat]} | options
        self.llm = LLM(model, **options)
        self.update_params(nnx.state(rollout_actor, nnx.Param))

    def generate(
        self, prompts: list[str], rollout_config: base_rollout.RolloutConfig, **kwargs: Any
    ) -> base_rollout.RolloutOutput:
        """Completes prompts. Raises ValueError for one longer than max_prompt_length."""
        if kwargs:
            raise ValueError(f"Rollout.generate: expected no further options, got {[*kwargs]}.")
        self._config = config = rollout_config
        tokens = [self._encoded(prompt, config) for prompt in prompts]
        seeds: list[int | None] = [None] * len(tokens)
        if config.seed is not None:
            # Each prompt has its own seed: Tunix repeats a prompt for each member of its group.
            keys = jax.random.split(config.seed, len(tokens))
            if jnp.issubdtype(keys.dtype, jax.dtypes.prng_key):
                keys = jax.random.key_data(keys)
            words = np.asarray(keys)[:, -2:]
            seeds = [int(high) << 32 | int(low) for high, low in words]
        stops = config.eos_tokens
        params = [
            SamplingParams(
                max_tokens=config.max_tokens_to_generate,
                temperature=config.temperature,
                top_p=1.0 if config.top_p is None else config.top_p,
                top_k=0 if config.top_k is None else max(config.top_k, 0),
                min_p=0.0,
                repetition_penalty=1.0,
                seed=seed,
                logprobs=True,
                ignore_eos=stops is not None,
                stop_token_ids=stops or (),
            )
            for seed in seeds
        ]
        outputs = self.llm.generate(tokens, params, progress=False)
        longest = config.max_prompt_length
        padded = np.full((len(tokens), longest), self.pad_id(), np.int32)
        for row, prompt in zip(padded, tokens, strict=True):
            row[longest - len(prompt) :] = prompt
        completions = [output.completions[0] for output in outputs]
        if failed := [each.error for each in completions if each.error is not None]:
            raise RuntimeError(f"Rollout.generate: {failed[0]}")
        return base_rollout.RolloutOutput(
            text=[each.text for each in completions],
            logits=None,
            tokens=[np.array(each.tokens, np.int32) for each in completions],
            left_padded_prompt_tokens=padded,
            logprobs=[each.token_logprobs() for each in completions],
        )

    def _encoded(self, prompt: str, config: base_rollout.RolloutConfig) -> list[int]:
        """The tokens that Tunix's own sampler makes of a prompt."""
        bos = self._tokenizer.bos_id()
        tokens = [bos] * bool(bos) + list(self._tokenizer.encode(prompt))
        tokens = list(self._tokenizer.dedup_bos_ids(tokens))
        if len(tokens) > config.max_prompt_length:
            raise ValueError(
                f"Rollout.generate: prompts: expected at most max_prompt_length ="
                f" {config.max_prompt_length} tokens, got {len(tokens)}; they are not cut."
            )
        return tokens

    def get_per_token_logps(
        self, prompt_tokens: jax.Array, completion_tokens: jax.Array
    ) -> jax.Array:
        """[n, completion length] f32, of the distribution sampled from; 0 for padding.

        prompt_tokens: [n, length], padded on the left. completion_tokens: padded on the right.
        """
        prompts, completions = np.asarray(prompt_tokens), np.asarray(completion_tokens)
        pad, sequences, lengths = self.pad_id(), [], []
        for prompt, completion in zip(prompts, completions, strict=True):
            length = _unpadded(completion, pad, self.eos_id())
            begin = int(np.argmax(prompt != pad))
            sequences.append([*prompt[begin:].tolist(), *completion[:length].tolist()])
            lengths.append(length)
        config = self._config
        params = SamplingParams(
            temperature=config.temperature or 1.0,
            top_p=1.0 if config.top_p is None else config.top_p,
            top_k=0 if config.top_k is None else max(config.top_k, 0),
            min_p=0.0,
        )
        found = np.zeros(completions.shape, np.float32)
        scores = self.llm.score(sequences, params, progress=False)
        for row, score, length in zip(found, scores, lengths, strict=True):
            row[:length] = score.logprobs[len(score.logprobs) - length :]
        return jnp.asarray(found)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Replaces the engine's weights, all of them without filter_types.

        filter_types: of nnx; the weights of other variables stay as they are.

        Raises:
          ValueError: a weight does not fit or is missing, or they are LoRA's.
        """
        if filter_types is not None and isinstance(params, nnx.State):
            params = nnx.filter_state(params, filter_types)
        found = {}
        for name, array in named(params).items():
            if "lora" in name:
                raise ValueError(
                    f"Rollout.update_params: {name}: expected whole weights, got a LoRA adapter;"
                    " merge it first."
                )
            if (of_file := self._names(name, array)) is not None:
                found[of_file[0]] = of_file[1]
        self.llm.update_params(found, partial=filter_types not in (None, (nnx.Param,)))

    def pad_id(self) -> int:
        """The tokenizer's."""
        return int(self._tokenizer.pad_id())

    def eos_id(self) -> int:
        """The tokenizer's."""
        return int(self._tokenizer.eos_id())

    def model(self) -> None:
        """None: the engine has no flax module. So Tunix gives it new weights after each step."""
        return None


def of_files(name: str, array: jax.Array) -> tuple[str, jax.Array]:
    """From a weight of Tunix's Llama 3, Qwen 2 or Qwen 3 to that of the model's files.

    Raises:
      ValueError: the name is not one of theirs.
    """
    [layer] = _LAYER.findall(name) or [""]
    pattern = _NAMES.get(_LAYER.sub("{}", name, count=1))
    if pattern is None:
        raise ValueError(
            f"Rollout.update_params: {name}: expected a weight of Tunix's Llama 3, Qwen 2 or Qwen"
            " 3; pass names=, a function to those of the model's files."
        )
    if name == "embedder.input_embedding" or array.ndim == 1:
        return pattern.format(layer), array
    return pattern.format(layer), _as_torch(array, is_output=name.endswith("o_proj.w"))


@functools.partial(jax.jit, static_argnames="is_output")
def _as_torch(array: jax.Array, is_output: bool) -> jax.Array:
    """[in, out], [in, heads, size] or (is_output) [heads, size, out] -> [out, in], or bias [n]."""
    if array.ndim == 2:
        return array.T
    shape = (-1, array.shape[-1]) if is_output else (array.shape[0], -1)
    return array.reshape(shape).T


def _unpadded(completion: np.ndarray, pad: int, eos: int) -> int:
    """The length of a completion: up to its first end of sequence, which the padding may be too."""
    ends = np.flatnonzero(completion == eos)
    if len(ends):
        return int(ends[0]) + 1
    kept = np.flatnonzero(completion != pad)
    return int(kept[-1]) + 1 if len(kept) else 0


__all__ = ["Rollout", "of_files"]
