"""The whole server under abuse: disconnects, nonsense, preemption, ten times too many requests.

The engine is the real one, on a small random model, behind HTTP. In the end nothing may be left: no
page held, no lock, no stream, no memory.
"""

import asyncio
import collections
import contextlib
import dataclasses
import gc
import json
import random
import time
from collections.abc import Iterable

import jax
import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")

from helpers import model_cases
from helpers.serve import attackers
from helpers.serve.bystander import bystanding
from helpers.serve.live_server import (
    KEYS,
    OPERATOR_KEY,
    Answer,
    ServerProcess,
    ask,
    eventually,
    key_options,
    serving,
)
from helpers.serve.small_engine import hold
from jax_attn import models
from jax_attn.serve._engine.async_engine import AsyncEngine
from jax_attn.serve._engine.engine import Engine
from jax_attn.serve._engine.engine_config import EngineConfig

# Three running sequences need more pages than there are: each has up to 14.
CONFIG = EngineConfig(
    num_pages=28, page_size=4, max_running=12, max_step_tokens=32, max_waiting=100
)
WITH_STATES = dataclasses.replace(CONFIG, num_states=30, checkpoint_tokens=8, max_drafts=2)
WITH_BURSTS = dataclasses.replace(CONFIG, burst_steps=3)
OVERLOADED = dataclasses.replace(CONFIG, max_waiting=10)
NUM_CLIENTS = 32
MAX_GROWTH = 24 << 20  # bytes of the process, server and clients, from a tenth of the soak on


@pytest.fixture(scope="module")
def model(directory, tokenizer):
    config = dataclasses.replace(
        models.load_config(directory), hidden_size=32, intermediate_size=64, num_qo_heads=2,
        num_kv_heads=1, head_dim=16, sm_scale=0.25,
    )  # fmt: skip
    config = dataclasses.replace(config, layers=config.layers[:1])
    params = models.random_params(config, jax.random.key(0), "float32")
    return models.Model(config, params, tokenizer)


@pytest.fixture(scope="module")
def device(model):
    engine = Engine(model, CONFIG)
    engine.warm_up()
    return engine.device


@pytest.fixture(scope="module")
def hybrid(tokenizer):
    """(model, warm device) of a layer with states and one with keys and values."""
    raw = model_cases.CONFIGS["qwen3.5"] | {
        "vocab_size": tokenizer.get_vocab_size(), "eos_token_id": 0, "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
    }  # fmt: skip
    config = models.parse_config(raw)
    params = models.random_params(config, jax.random.key(0), "float32")
    model = models.Model(config, params, tokenizer)
    engine = Engine(model, WITH_STATES)
    engine.warm_up()
    return model, engine.device


@contextlib.contextmanager
def serving_real(model, device, config):
    engine = AsyncEngine(model, config)
    engine._engine.device = device
    with serving(engine) as server:
        eventually(lambda: engine.ready)
        yield server, engine
        eventually(lambda: is_at_rest(engine))
        check_nothing_is_left(engine)


def is_at_rest(engine: AsyncEngine) -> bool:
    stats = engine.stats()
    return not (stats["waiting"] or stats["running"] or engine._engine.has_work)


def check_nothing_is_left(engine: AsyncEngine) -> None:
    inner, stats = engine._engine, engine.stats()
    assert engine.ready and engine.failure is None
    inner.scheduler.check_integrity()
    assert stats["pages_used"] == 0
    assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]
    assert not any(view.locks for view in inner.scheduler.cache.walk())
    if (states := stats["states"]) is not None:
        assert states["used"] == 0 and states["free"] + states["cached"] == WITH_STATES.num_states
    assert not inner._outputs.live and not engine._recipients
    inner.scheduler.cache.evict(stats["pages_cached"])
    assert inner.scheduler.allocator.num_free == stats["pages_total"]
    assert inner.device.num_compiles_after_warm_up == 0


# ---- clients -----------------------------------------------------------------------------------


def valid_request(rng: random.Random) -> dict:
    """Prompts with few different beginnings, so that they share pages; up to 54 tokens in all."""
    prompt = [1 + rng.randrange(3)] * rng.randrange(1, 12) + [rng.randrange(4096)] * rng.randrange(
        4
    )
    body = {"prompt": prompt, "max_tokens": rng.randrange(1, 41), "ignore_eos": True}
    body |= {"n": rng.choice((1, 1, 1, 2)), "temperature": rng.choice((0, 1)), "seed": 1}
    if rng.random() < 0.05:
        body |= {"regex": "[a-d]{3}", "ignore_eos": False, "max_tokens": 19}
    if rng.random() < 0.1:
        body |= {"presence_penalty": 1, "logit_bias": {"7": 2}}
    if rng.random() < 0.1:
        body |= {"echo": True, "logprobs": rng.randrange(3)}
        body["max_tokens"] *= rng.randrange(2)
    if rng.random() < 0.1:
        body["cache_salt"] = str(rng.randrange(3))
    return body


def invalid_request(rng: random.Random) -> dict | bytes:
    return rng.choice(
        [
            b"{",
            b"[1, 2",
            b'"' + b"x" * 5000,
            {},
            {"prompt": []},
            {"prompt": "a", "max_tokens": -1},
            {"prompt": "a", "max_tokens": 10**9},
            {"prompt": [10**7]},
            {"prompt": "a", "n": 1000},
            {"prompt": "a", "temperature": "hot"},
            {"prompt": "a", "json_schema": {"type": "no such"}},
            {"prompt": "a", "regex": "("},
            {"prompt": "a", "stream": "perhaps"},
            {"prompt": "a " * 3000},
        ]
    )


def check_answer(body: dict, answer: Answer) -> None:
    assert answer.status == 200, answer
    if body.get("stream"):
        events = [line[6:] for line in answer.body.splitlines() if line.startswith(b"data: ")]
        assert events.pop() == b"[DONE]"
        chunks = [json.loads(event) for event in events]
        usage = chunks.pop()["usage"]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    else:
        whole = json.loads(answer.body)
        usage, choices = whole["usage"], whole["choices"]
        reasons = [choice["finish_reason"] for choice in choices]
    assert len(reasons) == body["n"]
    assert usage["prompt_tokens"] == len(body["prompt"])
    if "regex" not in body:
        assert set(reasons) == {"length"}
        assert usage["completion_tokens"] == body["n"] * body["max_tokens"]
        if "echo" in body:
            num_tokens = sum(len(choice["logprobs"]["tokens"]) for choice in choices)
            assert num_tokens == body["n"] * (len(body["prompt"]) + body["max_tokens"])


async def soak(port: int, num_requests: int, at_tenth) -> collections.Counter:
    """at_tenth(i) is called after each tenth of the requests, while no client runs."""
    rng = random.Random(0)
    outcomes: collections.Counter = collections.Counter()

    async def one(seed: int) -> None:
        rng = random.Random(seed)
        kind = rng.random()
        if kind < 0.05:
            answer = await ask(port, invalid_request(rng))
            assert answer.status == 400, answer
            outcomes["invalid"] += 1
            return
        body = valid_request(rng)
        if kind < 0.25:
            await ask(port, body | {"stream": True}, leave_after=rng.randrange(4))
            outcomes["left"] += 1
            return
        if rng.random() < 0.5:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        check_answer(body, await ask(port, body))
        outcomes["answered"] += 1

    async def client(seeds) -> None:
        for seed in seeds:  # one iterator for all clients
            await one(seed)

    for i in range(10):
        seeds = iter([rng.randrange(1 << 60) for _ in range(num_requests // 10)])
        await asyncio.gather(*(client(seeds) for _ in range(NUM_CLIENTS)))
        at_tenth(i)
    return outcomes


# ---- the command, among attackers --------------------------------------------------------------

# Shares of the clients' actions. Attacks that cost a machine a second or more are few, so that the
# others also run.
LEAVES, ATTACKS, HEAVY_ATTACKS = 0.2, 0.1, 0.003
MAX_ATTACKED_GROWTH = 48 << 20  # bytes of the server, over the second half
light = sorted(attackers.ATTACKERS.keys() - attackers.HEAVY)
heavy = sorted(attackers.HEAVY)


async def abuse(port: int, seeds: Iterable[int], outcomes: collections.Counter) -> None:
    """One client of many; `seeds` is one iterator for all of them."""
    for seed in seeds:
        rng = random.Random(seed)
        key, kind = rng.choice(KEYS), rng.random()
        target = attackers.Target(port, KEYS[0], rng, stay=0.3)
        if kind < HEAVY_ATTACKS:
            name = rng.choice(heavy)
            await attackers.ATTACKERS[name](target)
            outcomes["heavy attack"] += 1
        elif kind < ATTACKS:
            await attackers.ATTACKERS[rng.choice(light)](target)
            outcomes["attack"] += 1
        else:
            body = valid_request(rng) | {"priority": rng.randrange(-9, 9)}
            if "regex" not in body:  # short, so that there are many requests
                body["max_tokens"] %= 9
            authorization = {"Authorization": f"Bearer {key}"}
            if kind < ATTACKS + LEAVES:
                leave_after = rng.randrange(4)
                await ask(port, body | {"stream": True}, leave_after=leave_after, **authorization)
                outcomes["left"] += 1
                continue
            if rng.random() < 0.5:
                body |= {"stream": True, "stream_options": {"include_usage": True}}
            answer = await ask(port, body, **authorization)
            if answer.status != 429:  # the queue is full, or the tenant's share of it
                check_answer(body, answer)
            outcomes["refused" if answer.status == 429 else "answered"] += 1


@pytest.mark.parametrize(
    ("num_requests", "options"),
    [
        pytest.param(1200, (), marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
        pytest.param(
            1200, ("--max-drafts", "4"), marks=[pytest.mark.slow, pytest.mark.timeout(1800)]
        ),
        pytest.param(100_000, (), marks=[pytest.mark.hours, pytest.mark.timeout(6 * 3600)]),
    ],
    ids=["1200", "1200-drafts", "100000"],
)
def test_soak_with_attackers(tmp_path, num_requests, options):
    """Two tenants and a bystander, all attackers; one client in five leaves before the end."""
    server = ServerProcess(tmp_path, *key_options(tmp_path), *options)
    rng = random.Random(0)
    outcomes: collections.Counter = collections.Counter()
    memory, gaps = [], []

    async def tenth() -> None:
        seeds = iter([rng.randrange(1 << 60) for _ in range(num_requests // 10)])
        await asyncio.gather(*(abuse(server.port, seeds, outcomes) for _ in range(NUM_CLIENTS)))

    with contextlib.closing(server):
        server.wait_until_ready()
        for _ in range(10):
            with bystanding(server.port, KEYS[1]) as bystander:
                begin = time.monotonic()
                asyncio.run(tenth())
                seen = bystander.seen(begin, time.monotonic())
            assert seen.num_events and not seen.refusals
            eventually(server.is_at_rest)
            pages = {state: server.metric(f'jax_attn_pages{{state="{state}"}}') for state in PAGES}
            gaps.append(seen.longest_gap)
            memory.append(server.resident_bytes())
            print(f"{dict(outcomes)}, {memory[-1] / 1e6:.0f} MB, longest gap {gaps[-1]:.2f} s")
            assert pages["used"] == 0
        state = json.loads(server.get("/debug/state", OPERATOR_KEY)[1])
        assert pages["free"] + pages["cached"] == state["pages"]["total"]
        assert "u" not in state["pages"]["states"] and "l" not in state["pages"]["states"]
        assert server.metric('jax_attn_requests_total{outcome="failed"}') == 0
        assert server.metric("jax_attn_compilations_total") == 0
        assert "Traceback" not in server.log()
    assert outcomes.total() == num_requests
    assert outcomes["answered"] > num_requests / 3 and outcomes["heavy attack"]
    assert 0.15 < outcomes["left"] / num_requests < 0.25
    assert max(memory[5:]) - memory[5] < MAX_ATTACKED_GROWTH


PAGES = ("free", "cached", "used")


def resident_bytes() -> int:
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.parametrize(
    "num_requests",
    [120, 400, pytest.param(8_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
)
def test_soak(model, device, num_requests):
    check_soak(model, device, CONFIG, num_requests)


def test_soak_with_bursts(model, device):
    check_soak(model, device, WITH_BURSTS, 200)


@pytest.mark.parametrize(
    "num_requests",
    [120, pytest.param(4_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
)
def test_soak_of_a_hybrid(hybrid, num_requests):
    check_soak(*hybrid, WITH_STATES, num_requests)


def check_soak(model, device, config, num_requests):
    memory = []
    with serving_real(model, device, config) as (server, engine):

        def at_tenth(i):
            eventually(lambda: is_at_rest(engine))
            engine._engine.scheduler.check_integrity()
            memory.append(resident_bytes())

        outcomes = asyncio.run(soak(server.port, num_requests, at_tenth))
        stats = engine.stats()
        metrics = server.get("/metrics").body.decode()
    print(f"{dict(outcomes)}, {stats['preemptions']} preemptions, {stats['steps']} steps")
    print("resident MB after each tenth:", [round(m / 1e6, 1) for m in memory])
    assert outcomes.total() == num_requests
    assert 0.03 < outcomes["invalid"] / num_requests < 0.08
    assert 0.15 < outcomes["left"] / num_requests < 0.25
    assert stats["preemptions"] > num_requests / 200
    assert stats["prefix_hit_tokens"] > 0 and stats["jump_forward_tokens"] >= 0
    assert f'outcome="invalid"}} {outcomes["invalid"]:.1f}' in metrics
    assert max(memory[1:]) - memory[0] < MAX_GROWTH


def test_overload(model, device, monkeypatch):
    """Ten times what may run and wait: each request is refused at once, or answered in full."""
    most = OVERLOADED.max_waiting
    num_waiting, tasks = [], []
    body = {"prompt": [5] * 8, "max_tokens": 16, "ignore_eos": True, "n": 1}

    async def overload(port: int, engine: AsyncEngine) -> list[Answer]:
        num_requests = 10 * (OVERLOADED.max_running + most)
        tasks.extend(asyncio.create_task(ask(port, body)) for _ in range(num_requests))
        return await asyncio.gather(*tasks)

    with serving_real(model, device, OVERLOADED) as (server, engine):
        engine.on_stats = lambda stats: num_waiting.append(stats["waiting"])
        # The engine works once a request has been refused.
        hold(monkeypatch, engine, lambda: True, lambda: any(task.done() for task in tasks))
        answers = asyncio.run(overload(server.port, engine))
        eventually(lambda: is_at_rest(engine))  # the numbers come after a step's events
        stats, metrics = engine.stats(), server.get("/metrics").body.decode()
        # Afterwards all is as before.
        check_answer(body, asyncio.run(ask(server.port, body)))
    accepted = [answer for answer in answers if answer.status == 200]
    refused = [answer for answer in answers if answer.status == 429]
    assert len(accepted) + len(refused) == len(answers)
    assert len(accepted) >= most and len(refused) > 0
    # Preempted sequences wait, too, and are never refused.
    assert 0 < max(num_waiting) <= most + OVERLOADED.max_running
    for answer in accepted:
        check_answer(body, answer)
    assert all("retry-after" in answer.headers for answer in refused)
    assert f'outcome="completed"}} {len(accepted):.1f}' in metrics
    assert f'outcome="rejected"}} {len(refused):.1f}' in metrics
    assert stats["generated_tokens"] == 16 * len(accepted)
