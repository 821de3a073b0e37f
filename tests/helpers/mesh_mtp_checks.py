"""The checks of mesh_checks.py for drafts of multi-token prediction."""

from __future__ import annotations

from typing import Any

import jax

from helpers import mtp_cases
from jax_attn import models
from jax_attn.serve._engine.engine import Engine
from jax_attn.serve._engine.engine_config import EngineConfig
from jax_attn.serve._scheduling.request import SamplingParams, Sequence

PROMPT = [5, 9, 200, 31, 7, 7, 12, 90, 4]
LIMITS = {"num_pages": 40, "page_size": 4, "max_running": 8, "max_step_tokens": 24}


def answer(
    model: models.Model, layer: models.Model, **more: Any
) -> tuple[list[int], list[tuple[int, ...]], float]:
    """The tokens that follow PROMPT, all drafts, and the share of right ones."""
    engine = Engine(model, EngineConfig(**LIMITS, max_drafts=3, **more), draft_model=layer)
    engine.warm_up()
    drafting = engine.draft_model
    drafting.cost, drafting.gain = 0.0, 1.0
    draft, made = drafting.draft, []

    def watched(entries: list[Any], newest: jax.Array) -> None:
        draft(entries, newest)
        made.extend(entry.drafts for entry in entries if entry.drafts)

    drafting.draft = watched
    params = SamplingParams(max_tokens=21, temperature=0, ignore_eos=True)
    seq = Sequence("a", "a", list(PROMPT), params)
    engine.submit([seq])
    while engine.has_work:
        engine.step()
    stats = engine.stats()
    return seq.tokens[len(PROMPT) :], made, stats["draft_tokens_taken"] / stats["draft_tokens"]


def check() -> None:
    """Over two devices, and on one that is not the first, drafts are those of one device."""
    several = {"tensor_parallel": 2}, {"devices": (jax.devices()[1],)}
    for name in ("qwen3.5", "glm4 moe", "deepseek v3"):
        model, layer = mtp_cases.make(mtp_cases.CONFIGS[name])
        expected = answer(model, layer)
        assert len(expected[1]) >= 3
        for more in several:
            assert answer(model, layer, **more) == expected, (name, more)
    model, layer, tokens = mtp_cases.always_right("qwen3.5", "hidden", PROMPT, 21)
    for more in several:
        found, made, right = answer(model, layer, **more)
        assert found == tokens and right == 1 and len(made) >= 3
