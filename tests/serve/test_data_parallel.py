"""Several engines of one model behind one queue: where requests go, and what a failure costs."""

import asyncio
import contextlib
import dataclasses

import jax
import numpy as np
import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")

from helpers.mesh_checks import run_on_cpus
from helpers.serve.live_server import eventually
from helpers.serve.small_engine import CONFIG, sequence
from jax_attn.serve import _options, _sizing
from jax_attn.serve._engine.async_engine import AsyncEngine
from jax_attn.serve._engine.engine import Engine
from jax_attn.serve._engine.replicas import Replicas, _prompt
from jax_attn.serve._openai.metrics import Metrics
from jax_attn.serve._scheduling.admission import QueueFull
from jax_attn.serve._scheduling.pictures import Picture
from jax_attn.serve._scheduling.protocols import EngineStopped, Limits
from jax_attn.serve._scheduling.request import FinishReason, Sequence

PROMPT = [0, *range(100, 140)]
SMALL = dataclasses.replace(CONFIG, max_waiting=20, max_running=4)


@pytest.fixture(scope="module")
def devices(model):
    """Two warm devices; on this machine they are one."""
    engines = [Engine(model, SMALL) for _ in range(2)]
    for engine in engines:
        engine.warm_up()
    return [engine.device for engine in engines]


@pytest.fixture
def replicas(model, devices):
    engines = [AsyncEngine(model, SMALL) for _ in devices]
    for engine, device in zip(engines, devices, strict=True):
        engine._engine.device = device
    return Replicas(engines)


@contextlib.asynccontextmanager
async def started(replicas):
    replicas.start()
    await asyncio.to_thread(eventually, lambda: replicas.ready or replicas.failure)
    try:
        yield
    finally:
        await replicas.stop(drain=False)


async def answer(replicas, seq):
    events = [event async for event in replicas.generate([seq])]
    return [token for event in events for token in event.tokens], events[-1]


def on_which(replicas) -> list[int]:
    return [engine.stats()["prompt_tokens"] for engine in replicas._engines]


def test_equal_prefixes_go_to_one_replica_and_others_to_the_idle_one(replicas):
    async def run():
        async with started(replicas):
            assert replicas.limits == Limits(512, 8, 40, num_replicas=2)
            first, _ = await answer(replicas, sequence(PROMPT))
            assert on_which(replicas) == [41, 0]
            for _ in range(3):
                again, event = await answer(replicas, sequence(PROMPT))
                assert again == first
            assert on_which(replicas) == [4 * 41, 0]
            assert replicas.order(sequence([5, *PROMPT]))[0] == 0  # all are idle
            # Those that come together share a replica before anything is cached, and others do not.
            seqs = [sequence([7, *PROMPT], max_tokens=2) for _ in range(3)]
            others = [sequence([8, *PROMPT], max_tokens=2) for _ in range(2)]
            await asyncio.gather(*(answer(replicas, seq) for seq in [*seqs, *others]))
            assert on_which(replicas) == [4 * 41 + 3 * 42, 2 * 42]
            # Another tenant has nothing there.
            assert replicas._engines[0].num_cached_tokens(sequence(PROMPT)) == 40
            mine = sequence(PROMPT)
            mine.namespace = "other"
            assert replicas._engines[0].num_cached_tokens(mine) == 0
            total = replicas.stats()
            assert total["prompt_tokens"] == sum(on_which(replicas)) and total["compilations"] == 0
            assert total["pages_total"] == 2 * CONFIG.num_pages and len(total["replicas"]) == 2
            # A request's last token is sent before its pages are given back.
            await asyncio.to_thread(eventually, lambda: replicas.stats()["pages_used"] == 0)
            text = Metrics(replicas).text().decode()
            assert 'jax_attn_prompt_tokens_total{replica="1"} 84.0' in text
            assert 'jax_attn_pages{replica="0",state="used"} 0.0' in text
            assert 'jax_attn_replica_failed{replica="0"} 0.0' in text
            snapshot = await replicas.snapshot()
            assert len(snapshot["pages"]["states"]) == snapshot["pages"]["total"] == 128
            tree = snapshot["tree"]
            assert all(node["parent"] is None or node["parent"] < i for i, node in enumerate(tree))

    asyncio.run(run())


def test_prompts_with_other_pictures_have_nothing_in_common(replicas):
    def of(value: int, name: str) -> Sequence:
        pixels = np.full((32, 64, 3), value, np.uint8).tobytes()
        seq = sequence([0, *[7] * 32, 9])
        seq.pictures = (Picture(1, 4, 8, 32, 64, pixels),)
        seq.id = name
        return seq

    async def submit(seq: Sequence) -> None:
        with pytest.raises(ValueError, match="this .* model reads texts only"):
            await replicas.submit([seq], recipient=None)
        replicas._unfinished[1][seq.id] = _prompt(seq)

    async def run():
        async with started(replicas):
            await submit(of(1, "a"))
            same, other = of(1, "b"), of(2, "c")
            for seq in (same, other):
                seq.number_pictures(replicas._picture_numbers.of)
            assert replicas.order(same)[0] == 1 and replicas.order(other)[0] == 0
            assert replicas._engines[1]._engine.picture_numbers is replicas._picture_numbers

    asyncio.run(run())


def test_a_replica_that_is_ahead_gets_no_more(replicas):
    """Its lead is 4 requests at most, whatever it has cached."""

    async def run():
        async with started(replicas):
            await answer(replicas, sequence(PROMPT))
            for i in range(6):
                seq = sequence(PROMPT)
                assert replicas.order(seq)[0] == int(i > 4)
                replicas._unfinished[0][seq.id] = _prompt(seq)

    asyncio.run(run())


def test_a_failure_is_of_one_replica(replicas, monkeypatch):
    def fail(batch):
        raise RuntimeError("broken")

    async def run():
        async with started(replicas):
            healthy = sequence([9, *PROMPT], max_tokens=25)
            monkeypatch.setattr(replicas._engines[0]._engine.device, "forward", fail)
            ended = []
            for _ in range(3):  # it gives up after three failures
                lost, kept = await asyncio.gather(
                    answer(replicas, sequence(PROMPT)), answer(replicas, sequence([9, *PROMPT]))
                )
                ended += [lost[1], kept[1]]
            reasons = [event.finish_reason for event in ended]
            assert reasons == [FinishReason.ERROR, FinishReason.LENGTH] * 3
            eventually(lambda: replicas._engines[0].failure)
            assert replicas.ready and replicas.failure is None
            tokens, event = await answer(replicas, healthy)
            assert len(tokens) == 25 and event.error is None
            text = Metrics(replicas).text().decode()
            assert 'jax_attn_replica_failed{replica="0"} 1.0' in text
            told = []
            replicas.on_failure = lambda: told.append(True)
            monkeypatch.setattr(replicas._engines[1]._engine.device, "forward", fail)
            for _ in range(3):
                await answer(replicas, sequence(PROMPT))
            eventually(lambda: told)
            assert isinstance(replicas.failure, RuntimeError) and not replicas.ready
            with pytest.raises(EngineStopped):
                await answer(replicas, sequence(PROMPT))

    asyncio.run(run())


@pytest.mark.parametrize(
    ("options", "num_devices"),
    [("--data-parallel 2", 2),
     pytest.param("--data-parallel 2 --tensor-parallel 2", 4, marks=pytest.mark.slow)],
)  # fmt: skip
def test_engines_on_devices_of_their_own(options, num_devices):
    check = f"check_devices({options!r}, {num_devices})"
    run_on_cpus(num_devices, f"import mesh_replica_checks as m; m.{check}")


def test_the_queue_of_all_is_full_when_each_is(replicas):
    async def run():
        async with started(replicas):
            for engine in replicas._engines:
                await asyncio.wrap_future(engine.pause(end=False))
            seqs = [sequence(PROMPT, max_tokens=1) for _ in range(41)]
            tasks = [asyncio.create_task(answer(replicas, seq)) for seq in seqs]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            (refused,) = done
            assert isinstance(refused.exception(), QueueFull)
            assert replicas.stats()["waiting"] <= 40
            for engine in replicas._engines:
                await asyncio.wrap_future(engine.resume())
            await asyncio.gather(*(task for task in tasks if task is not refused))
            assert not any(replicas._unfinished)

    asyncio.run(run())


def test_a_client_that_leaves(replicas):
    async def run():
        async with started(replicas):
            events = replicas.generate([sequence(PROMPT, max_tokens=200)])
            await anext(events)
            await events.aclose()
            assert not any(replicas._unfinished)
            eventually(lambda: replicas.stats()["running"] == 0)

    asyncio.run(run())


def test_refused(model):
    num = len(jax.devices()) + 1
    args = _options.parse(["--data-parallel", str(num)])
    with pytest.raises(ValueError, match=f"--data-parallel: expected at most {num - 1}, as JAX"):
        _sizing.make_replicas(model, args)
    with pytest.raises(ValueError, match="--data-parallel: expected an option of the engine"):
        _options.from_keywords({"data_parallel": 2})
