"""A small AsyncEngine on a warm device, and sequences for it."""

import itertools
import time
from collections.abc import Callable

from jax_attn.serve._engine.async_engine import AsyncEngine
from jax_attn.serve._engine.engine import Engine
from jax_attn.serve._engine.engine_config import EngineConfig
from jax_attn.serve._scheduling.request import SamplingParams, Sequence

CONFIG = EngineConfig(
    num_pages=64, page_size=8, max_running=8, max_step_tokens=8, max_waiting=50, max_grammars=2
)

_ids = itertools.count()


def warm_device(model):
    engine = Engine(model, CONFIG)
    engine.warm_up()
    return engine.device


def make_engine(model, device, config: EngineConfig = CONFIG) -> AsyncEngine:
    """An engine that is not started. device: from `warm_device`."""
    made = AsyncEngine(model, config)
    made._engine.device = device
    return made


def on_device(model, device, config: EngineConfig) -> Engine:
    """An engine on a device that others had, with what that has compiled."""
    engine = Engine(model, config)
    engine.device = device
    return engine


def hold(
    monkeypatch, engine: AsyncEngine, when: Callable[[], bool], until: Callable[[], bool]
) -> None:
    """Holds a step of the engine where `when` holds, until `until` does.

    What a test does between the two is in time on any machine.
    """
    forward = engine._engine.device.forward

    def held(batch):
        if when():
            deadline = time.monotonic() + 240
            while not until():
                assert time.monotonic() < deadline, "did not happen in time"
                time.sleep(0.001)
        return forward(batch)

    monkeypatch.setattr(engine._engine.device, "forward", held)


def sequence(tokens=(0, 593, 633, 199, 593), **kwargs) -> Sequence:
    params = SamplingParams(**{"max_tokens": 20, "temperature": 0, "ignore_eos": True} | kwargs)
    name = f"s{next(_ids)}"
    return Sequence(name, name, list(tokens), params, arrival=time.monotonic())


class FixedDrafts:
    """A source of drafts that proposes one text, right or wrong."""

    def __init__(self, tokens):
        self.tokens = tokens

    def propose(self, seq, most):
        return self.tokens[seq.num_output + seq.num_in_flight :][:most]

    def settle(self, num_drafts, num_taken):
        pass
