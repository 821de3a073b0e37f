"""StreamingLLM in the engine: tokens are those of a dense reference that masks the same keys."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.paths import EXAMPLES
from jax_attn import models
from jax_attn.models._layers import decoder
from jax_attn.serve._engine.engine import Engine
from jax_attn.serve._engine.engine_config import EngineConfig
from jax_attn.serve._scheduling.request import FinishReason, SamplingParams, Sequence
from jax_attn.serve._scheduling.streaming import Streaming, StreamingPages

PAGE, SINKS, WINDOW = 4, 6, 40  # so 8 sinks, and blocks of 4
CONFIG = EngineConfig(
    num_pages=80, page_size=PAGE, max_running=4, max_step_tokens=16,
    kv_policy=Streaming(SINKS, WINDOW),
)  # fmt: skip
LONGEST = 160

ids = itertools.count()


@pytest.fixture(scope="module")
def device(model):
    engine = Engine(model, dataclasses.replace(CONFIG, max_drafts=2))
    engine.warm_up()
    return engine.device


@pytest.fixture
def make_engine(model, device):
    def make(**changes) -> Engine:
        engine = Engine(model, dataclasses.replace(CONFIG, **changes))
        engine.device = device
        device.reset()
        return engine

    return make


@pytest.fixture(scope="module")
def best_tokens(model):
    """tokens -> the token that the reference chooses after each, [len], and by how much it leads."""

    def run(tokens):
        logits = np.asarray(reference(model, jnp.asarray(tokens, jnp.int32)))
        first, second = np.sort(logits, axis=1)[:, :-3:-1].T
        return logits.argmax(1), first - second

    return run


def reference(model, tokens):
    """Logits of StreamingLLM as its paper has it: a token's row has positions in the cache."""
    config = model.config
    index = np.arange(len(tokens))
    # What the module `streaming` says, written out: blocks of 4, the window before the block.
    starts = np.maximum(0, index // 4 * 4 - WINDOW) // PAGE * PAGE
    starts = np.maximum(starts, 8)
    visible = (index[None] < 8) | (index[None] >= starts[:, None])
    visible &= index[None] <= index[:, None]

    def attend(qkv, weights, place, kind):
        out = []
        for start in np.unique(starts):
            positions = np.where(index < 8, index, index - start + 8)
            q, k, v = decoder._rotated_heads(qkv, weights, jnp.asarray(positions), config, kind)
            k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
            rows = starts == start
            scores = config.sm_scale * jnp.einsum("qhd,khd->hqk", q[rows], k)
            scores = jnp.where(visible[rows], scores, -jnp.inf)
            out.append(jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), v))
        return jnp.concatenate(out)

    x = decoder._layers(tokens, model.params, config, attend, states=None)
    return decoder._logits(x, model.params, config)


def prompt(model, begin: int, length: int) -> list[int]:
    text = (EXAMPLES / "prompts" / "ast.py.txt").read_text("utf-8")
    return [0, *model.tokenizer.encode(text).ids[begin : begin + length - 1]]


def sequence(tokens, max_tokens: int = 24, **kwargs) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, **kwargs)
    return Sequence(f"s{next(ids)}", "r", list(tokens), params)


def run(engine, *seqs):
    engine.submit(seqs)
    most = 0
    while engine.has_work:
        for event in engine.step():
            assert event.error is None
        engine.scheduler.check_integrity()
        most = max(most, *(engine.scheduler.memory.num_held(seq) for seq in seqs))
    assert all(seq.finish_reason is FinishReason.LENGTH for seq in seqs)
    return most


def check(best_tokens, seq):
    best, lead = best_tokens(seq.tokens)
    chosen = np.array(seq.tokens[seq.num_prompt :])
    rows = slice(seq.num_prompt - 1, len(seq.tokens) - 1)
    wrong = (best[rows] != chosen) & (lead[rows] > 1e-3)
    assert not wrong.any(), np.flatnonzero(wrong)


@pytest.mark.parametrize("num_prompt, max_tokens", [(10, 120), (100, 40)])
def test_tokens_are_those_of_the_reference(model, make_engine, best_tokens, num_prompt, max_tokens):
    engine = make_engine()
    seq = sequence(prompt(model, 50, num_prompt), max_tokens)
    most = run(engine, seq)
    check(best_tokens, seq)
    assert most < len(seq.tokens) / PAGE - 5
    assert engine.stats()["dropped_pages"] >= (len(seq.tokens) - 8 - WINDOW) // PAGE - 3
    assert engine.device.num_compiles_after_warm_up == 0
