"""A trainer's log-probabilities of a group of answers that an engine sampled, with gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

import jax_attn as ja
from jax_attn import models
from jax_attn.llm import BATCH_INVARIANT, token_logprobs

PAGE = 8


class Batch(NamedTuple):
    """Arguments of train_forward after the weights, and the tokens that `rows` predict."""

    tokens: Any
    positions: Any
    plans: tuple[ja.AttentionPlan, ...]
    rows: Any
    answers: Any


def group(config: models.ModelConfig, output: Any, kv_split: int | None, dtype: str) -> Batch:
    """The prompt's whole pages as a request, and one for each answer, whose table begins with them.

    config: of one device's part. output: of completions with as many tokens each.
    """
    prompt, answers = output.prompt_tokens, [each.tokens for each in output.completions]
    shared, num = (len(prompt) - 1) // PAGE * PAGE, len(answers[0])
    own = [prompt[shared:] + answer[:-1] for answer in answers]
    own_len = len(own[0])
    padding = [0] * (-own_len % PAGE)
    tokens = np.array(prompt[:shared] + [x for each in own for x in each + padding], np.int32)
    room = own_len + len(padding)
    pages = np.arange(len(tokens) // PAGE)
    first, rest = pages[: shared // PAGE], pages[shared // PAGE :].reshape(len(own), -1)
    tables = [first, *(np.append(first, each) for each in rest)]
    qo_indptr = np.cumsum([0, shared, *[room] * len(own)])
    kv_lens = [shared, *[shared + room] * len(own)]
    page_indptr, page_indices = np.cumsum([0, *map(len, tables)]), np.concatenate(tables)
    specs = models.train_specs(
        config, dtype=dtype, page_size=PAGE, max_batch=len(tables), max_qo_tokens=len(tokens),
        max_kv_pages=len(page_indices), schedule="fixed_split", kv_split=kv_split,
    )  # fmt: skip
    plans = tuple(ja.plan(spec, qo_indptr, kv_lens, page_indptr, page_indices) for spec in specs)
    positions = ja.rows(qo_indptr, kv_lens, len(tokens)).position
    begins = shared + np.arange(len(own)) * room + own_len - num
    rows = begins[:, None] + np.arange(num)
    return Batch(tokens, positions, plans, rows.reshape(-1), np.concatenate(answers))


def logprobs_and_gradients(
    forward: Callable[..., jax.Array], params: models.Params, batch: Batch, **fields: Any
) -> tuple[Any, models.Params]:
    """The answers' log-probabilities, and the gradients of a weighted sum of them.

    forward: as train_forward without `config`. fields: of token_logprobs.
    """

    def loss(params: models.Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        *arguments, answers = batch
        found = token_logprobs(forward(params, *arguments), answers, **fields)
        return found @ np.cos(np.arange(len(answers), dtype=np.float32)), found

    run = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=BATCH_INVARIANT)
    (_, found), gradients = run(params, batch)
    return found, gradients
