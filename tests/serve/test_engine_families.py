"""The engine on other families than the bundled model's: experts, sinks, latent attention."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest

pytest.importorskip("llguidance", reason="needs the extra `serve`")

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import model_cases

from jax_attn import models
from jax_attn.serve.engine import Engine, EngineConfig
from jax_attn.serve.request import SamplingParams, Sequence

BUNDLED = models.BUNDLED


@pytest.mark.parametrize("name", ["gpt-oss", "deepseek v2 groups, yarn"])
def test_greedy_tokens_are_those_of_the_reference(name):
    tokenizer = models.load(BUNDLED, "float32").tokenizer
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": 0}
    raw = model_cases.CONFIGS[name] | sizes
    config = models.parse_config(raw)
    params = models.random_params(config, jax.random.key(0), "float32")
    limits = EngineConfig(num_pages=40, page_size=4, max_running=3, max_step_tokens=16)
    engine = Engine(models.Model(config, params, tokenizer), limits)
    engine.warm_up()
    prompts = [[5, 9, 200, 31, 7, 7, 12, 90, 4], [5, 9, 200, 31, 1], [77]]
    sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    engine.submit([Sequence(str(i), str(i), list(x), sampling) for i, x in enumerate(prompts)])
    answers = [[] for _ in prompts]
    while engine.has_work:
        for event in engine.step():
            answers[int(event.seq_id)] += event.tokens
    for tokens, answer in zip(prompts, answers, strict=True):
        assert len(answer) == 8
        logits = models.reference_forward(params, config, np.array(tokens + answer))
        assert np.argmax(logits, -1)[len(tokens) - 1 : -1].tolist() == answer
