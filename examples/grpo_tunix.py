"""GRPO with Tunix, whose prompts run on the engine: only `rollout_engine` is new.

Needs `pip install 'jax_attn[tunix]'`; without it the script says so and ends.
"""

import functools
import sys

import jax
import numpy as np

try:
    import optax
    from tunix.models.llama3 import model as llama3
    from tunix.models.llama3.params import create_model_from_safe_tensors
    from tunix.rl import rl_cluster
    from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
    from tunix.rl.rollout.base_rollout import RolloutConfig
except ModuleNotFoundError as error:
    print(f"this example needs pip install 'jax_attn[tunix]': {error}")
    sys.exit()

from tokenizers import Tokenizer

from jax_attn import models
from jax_attn.integrations.tunix import Rollout

num_steps, group, answer_len = 6, 8, 16


class TinyTokenizer:
    """The bundled model's tokenizer, with the methods that Tunix needs."""

    def __init__(self):
        self._tokenizer = Tokenizer.from_file(str(models.BUNDLED / "tokenizer.json"))

    def encode(self, text, **_):
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids, **_):
        return self._tokenizer.decode(list(map(int, ids)))

    def bos_id(self):
        return 0

    def eos_id(self):
        return 0

    def pad_id(self):
        return 1


config = models.load_config(models.BUNDLED)
mesh = jax.make_mesh(
    (1, 1), ("fsdp", "tp"), devices=jax.devices()[:1],
    axis_types=(jax.sharding.AxisType.Auto,) * 2,
)  # fmt: skip
with mesh:
    actor = create_model_from_safe_tensors(
        str(models.BUNDLED),
        llama3.ModelConfig(
            num_layers=config.num_layers,
            vocab_size=config.vocab_size,
            embed_dim=config.hidden_size,
            hidden_dim=config.intermediate_size,
            num_heads=config.num_qo_heads,
            head_dim=config.head_dim,
            num_kv_heads=config.num_kv_heads,
            rope_theta=config.layers[0].rope.theta,
            norm_eps=config.rms_norm_eps,
            weight_tying=config.tie_embeddings,
        ),
        mesh,
        dtype=np.float32,
    )

rewards = []


def reward(prompts, completions, **_):
    """The share of a completion's letters that are lower-case e."""
    found = [text.count("e") / max(1, len(text)) for text in completions]
    rewards.append(np.mean(found))
    return found


cluster = rl_cluster.RLCluster(
    actor=actor,
    tokenizer=TinyTokenizer(),
    cluster_config=rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys((rl_cluster.Role.ACTOR, rl_cluster.Role.ROLLOUT), mesh),
        rollout_engine=functools.partial(
            Rollout, model=models.BUNDLED, dtype="float32", max_running=32, max_step_tokens=64
        ),
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=optax.adam(1e-3), eval_every_n_steps=1000, max_steps=num_steps
        ),
        rollout_config=RolloutConfig(
            max_tokens_to_generate=answer_len, max_prompt_length=16, temperature=1.0,
            kv_cache_size=64, return_logprobs=True,
        ),
    ),
)  # fmt: skip
learner = GRPOLearner(
    cluster, GRPOConfig(num_generations=group, num_iterations=1, beta=0.0), reward
)
batch = {"prompts": np.array(["def main(", "class Reader:", "import os", "for name in"])}
learner.train([batch] * num_steps)
print("rewards:", ", ".join(f"{each:.3f}" for each in rewards))
rollout = cluster.rollout
assert rollout.llm.version == str(1 + num_steps), rollout.llm.version
assert rewards[-1] > rewards[0] + 0.05, "the model has learned nothing"
rollout.llm.close()
