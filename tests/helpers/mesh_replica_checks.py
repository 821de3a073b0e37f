"""The checks of mesh_checks.py for engines behind one queue, each on devices of its own."""

from __future__ import annotations

import asyncio
from typing import Any

import jax

from helpers.model_cases import shallow
from helpers.serve.live_server import eventually
from helpers.serve.small_engine import sequence
from jax_attn import models
from jax_attn.serve import _options, _sizing

OPTIONS = "--max-running 2 --max-step-tokens 8 --page-size 8 --num-pages 32 --dtype float32"


def check_devices(options: str, num_devices: int) -> None:
    """Checks where pages and weights are, answers, and that a failure is of one engine."""
    model = shallow(models.load(models.BUNDLED, "float32"))
    replicas = _sizing.make_replicas(model, _options.parse(f"{options} {OPTIONS}".split()))
    engines = [each._engine for each in replicas._engines]
    held = [[*engine.device.bytes_held()] for engine in engines]
    assert [device for of_one in held for device in of_one] == [
        device.id for device in jax.devices()[:num_devices]
    ]

    async def answer(prompt: list[int]) -> tuple[list[int], str | None]:
        events = [event async for event in replicas.generate([sequence(prompt, max_tokens=6)])]
        return [token for event in events for token in event.tokens], events[-1].error

    def fail(batch: Any) -> None:
        raise RuntimeError("broken")

    async def run() -> None:
        replicas.start()
        await asyncio.to_thread(eventually, lambda: replicas.ready or replicas.failure)
        assert replicas.failure is None, replicas.failure
        prompts = [[i, *range(100, 120)] for i in range(len(engines))]
        found = await asyncio.gather(*map(answer, prompts))
        # Prompts that have nothing in common go to engines that have nothing to do.
        assert [each.stats()["prompt_tokens"] for each in replicas._engines] == [21] * len(engines)
        engines[0].device.forward = fail
        while replicas._engines[0].failure is None:
            again = await asyncio.gather(*map(answer, prompts))
            assert again[1:] == found[1:]
            assert again[0] == found[0] or "The engine failed" in again[0][1], again[0]
        assert await asyncio.gather(*map(answer, prompts)) == found
        await replicas.stop(drain=True)

    asyncio.run(run())
