"""GRPO in one process: the engine samples, a trainer learns, and the new weights go back in place.

The toy task: answers of tokens with even ids. The trainer computes the group of answers to a prompt
as one batch, in which the prompt's full pages are computed once, forward and backward: the page
table of each answer begins with them, as the sampler's does. All groups share one executable.
"""

import jax
import jax.numpy as jnp
import numpy as np

import jax_attn as ja
from jax_attn import models
from jax_attn.llm import token_logprobs

prompts = [
    f'def {name}(self, path, mode="r"):\n    """Return the {name} of the file at path."""\n    '
    for name in ("size", "name", "owner", "lines")
]
group, answer_len, page_size, num_steps, rate = 8, 16, 16, 5, 1e-3
model = models.load(models.BUNDLED, "float32")
config, params = model.config, model.params
llm = ja.LLM(model, directory=models.BUNDLED, max_running=32, max_step_tokens=64, num_pages=256)
sampling = ja.SamplingParams(
    n=group, max_tokens=answer_len, temperature=1.0, ignore_eos=True, logprobs=True
)

# ---- the trainer: a request for the prompt's full pages, and one for each answer with the rest

shared_len, own_len = 2 * page_size, 2 * page_size  # at most; of each answer
num_tokens = shared_len + group * own_len
[spec] = models.train_specs(
    config, dtype="float32", page_size=page_size, max_batch=1 + group, max_qo_tokens=num_tokens,
    max_kv_pages=shared_len // page_size + group * (shared_len + own_len) // page_size,
)  # fmt: skip


def batch(output):
    """The arrays of one prompt's group: tokens, positions, plan, rows that predict the answers."""
    prompt = output.prompt_tokens
    shared = (len(prompt) - 1) // page_size * page_size
    own = np.zeros((group, own_len), np.int32)
    rest = len(prompt) - shared
    assert shared <= shared_len and rest + answer_len <= own_len
    own[:, :rest] = prompt[shared:]
    own[:, rest : rest + answer_len] = [each.tokens for each in output.completions]
    tokens, end = np.zeros(num_tokens, np.int32), shared + own.size
    tokens[:end] = np.concatenate([prompt[:shared], own.reshape(-1)])
    pages = np.arange(end // page_size)
    first, each = pages[: shared // page_size], pages[shared // page_size :].reshape(group, -1)
    tables = [first, *(np.append(first, of_answer) for of_answer in each)]
    qo_indptr = np.cumsum([0, shared, *[own_len] * group])
    kv_lens = [shared, *[shared + own_len] * group]
    page_indptr = np.cumsum([0, *map(len, tables)])
    plan = ja.plan(spec, qo_indptr, kv_lens, page_indptr, np.concatenate(tables))
    positions = ja.rows(qo_indptr, kv_lens, num_tokens).position
    # Row i predicts token i + 1 of its request.
    rows = shared + np.arange(group)[:, None] * own_len + rest - 1 + np.arange(answer_len)
    return tokens, positions, plan, rows.reshape(-1)


def loss(params, tokens, positions, plan, rows, answers, advantages):
    """Also returns the answers' log-probabilities: [group * answer_len]."""
    logits = models.train_forward(params, config, tokens, positions, (plan,), rows)
    found = token_logprobs(logits, answers)
    # The policy that sampled is the one that learns, so the ratio of GRPO is 1 and its gradient
    # that of the log-probability.
    return -jnp.mean(jnp.repeat(advantages, answer_len) * found), found


gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))


@jax.jit
def adam(params, gradients, moments, step):
    gradients = jax.tree.map(lambda *each: sum(each) / len(each), *gradients)
    means, squares = moments
    means = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, means, gradients)
    squares = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, squares, gradients)

    def move(x, m, s):
        return x - rate * (m / (1 - 0.9**step)) / (jnp.sqrt(s / (1 - 0.99**step)) + 1e-8)

    return jax.tree.map(move, params, means, squares), (means, squares)


moments = (jax.tree.map(jnp.zeros_like, params),) * 2
rewards = []
for step in range(1, num_steps + 1):
    outputs = llm.generate(prompts, sampling)
    gradients, of_step, differences = [], [], []
    for output in outputs:
        answers = np.array([each.tokens for each in output.completions])
        reward = (answers % 2 == 0).mean(axis=1)
        advantages = (reward - reward.mean()) / (reward.std() + 1e-6)
        (_, found), gradients_of_group = gradient(
            params, *batch(output), answers.reshape(-1), advantages
        )
        gradients.append(gradients_of_group)
        of_step.append(reward.mean())
        sampled = np.concatenate([each.token_logprobs() for each in output.completions])
        differences.append(abs(found - sampled).max())
    params, moments = adam(params, gradients, moments, step)
    version = llm.update_params(params)
    rewards.append(np.mean(of_step))
    print(f"step {step}: reward {rewards[-1]:.3f}, weights {version}")
    print(f"  sampler and trainer differ by at most {max(differences):.1e} in log-probability")
    assert max(differences) < 1e-3
print(f"the trainer compiled {gradient._cache_size()} executable for {len(prompts)} prompts")
assert rewards[-1] > rewards[0] + 0.1, "the model has learned nothing"
llm.close()
