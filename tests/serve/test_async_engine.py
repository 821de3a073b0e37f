"""The engine's thread, from asyncio: streams, cancellation, drain, failures."""

import asyncio
import collections
import contextlib
import dataclasses
import json
import random
import threading
import time
from pathlib import Path

import pytest

from helpers.serve import tokenizer_kinds
from helpers.serve.small_engine import CONFIG, hold, make_engine, sequence, warm_device
from jax_attn.serve._engine.async_engine import AsyncEngine
from jax_attn.serve._grammar import grammar
from jax_attn.serve._scheduling.admission import QueueFull
from jax_attn.serve._scheduling.protocols import EngineStopped
from jax_attn.serve._scheduling.request import FinishReason, Sequence


@pytest.fixture(scope="module")
def device(model):
    return warm_device(model)


@pytest.fixture
def engine(model, device):
    return make_engine(model, device)


@contextlib.asynccontextmanager
async def running(engine: AsyncEngine, drain: bool = True):
    engine.start()
    try:
        yield engine
    finally:
        await engine.stop(drain)
    assert not engine._thread.is_alive()
    if engine.failure is None:
        check_drained(engine)


def is_awaited(engine: AsyncEngine) -> bool:
    """True if the engine keeps anything for events to come."""
    inboxes = [inbox for loop, inbox in engine._inboxes._by_loop.items() if not loop.is_closed()]
    return bool(engine._recipients) or any(inbox.sequences for inbox in inboxes)


def check_drained(engine: AsyncEngine) -> None:
    stats = engine.stats()
    assert stats["running"] == stats["waiting"] == stats["pages_used"] == 0
    assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]
    engine._engine.scheduler.check_integrity()
    assert not is_awaited(engine)


async def collect(engine: AsyncEngine, *seqs: Sequence) -> dict[str, tuple[list[int], str]]:
    tokens: dict[str, list[int]] = {seq.id: [] for seq in seqs}
    reasons = {}
    async for event in engine.generate(seqs):
        assert event.seq_id not in reasons
        tokens[event.seq_id] += event.tokens
        if event.finish_reason is not None:
            reasons[event.seq_id] = event.finish_reason
    return {seq.id: (tokens[seq.id], reasons[seq.id]) for seq in seqs}


def test_streams(engine):
    """Each caller gets the events of its own sequences, token by token."""

    async def main():
        async with running(engine):
            (alone,) = (await collect(engine, sequence())).values()
            results = await asyncio.gather(
                *(collect(engine, *(sequence() for _ in range(1 + i % 3))) for i in range(9))
            )
            for result in results:
                assert all(one == alone for one in result.values())
            assert len(alone[0]) == 20 and alone[1] is FinishReason.LENGTH
            assert not is_awaited(engine)  # nothing is kept of finished sequences

    asyncio.run(main())
    assert engine.stats()["generated_tokens"] == 20 * (1 + 18)


def test_a_slow_reader_gets_more_at_once(engine):
    """The same tokens, texts and logprobs in fewer events."""

    async def main():
        async with running(engine):
            whole = [event async for event in engine.generate([sequence(logprobs=1)])]
            events = []
            async for event in engine.generate([sequence(logprobs=1), sequence()]):
                events.append(event)
                deadline = time.monotonic() + 240
                while engine.stats()["running"] and time.monotonic() < deadline:
                    time.sleep(0.01)  # blocks the event loop
            assert len(events) <= 4
            logged, plain = (
                [event for event in events if (event.logprobs is None) == is_plain]
                for is_plain in (False, True)
            )
            for parts in (logged, plain):
                assert sum((e.tokens for e in parts), []) == sum((e.tokens for e in whole), [])
                assert "".join(e.text for e in parts) == "".join(e.text for e in whole)
                assert parts[0].num_cached_tokens is not None
                assert parts[-1].finish_reason is FinishReason.LENGTH
            assert [x for e in logged for x in e.logprobs] == [x for e in whole for x in e.logprobs]

    asyncio.run(main())


def test_ready_only_when_compiled(engine, monkeypatch):
    may_compile = threading.Event()
    warm_up = engine._engine.warm_up_first
    monkeypatch.setattr(
        engine._engine, "warm_up_first", lambda show: may_compile.wait(240) and warm_up(show)
    )

    async def main():
        assert not engine.ready
        async with running(engine):
            assert not engine.ready
            request = asyncio.create_task(collect(engine, sequence()))  # waits for it
            await asyncio.sleep(0.05)
            assert not engine.ready and not request.done()
            may_compile.set()
            await request
            assert engine.ready
        assert not engine.ready

    asyncio.run(main())


def test_stop_while_compiling(engine, monkeypatch):
    """A stop ends with the executable that is being compiled, not with the last one."""
    compiled = []

    def warm_up(progress):
        for i in range(20_000):  # would take minutes
            progress(i, 20_000, "something")
            time.sleep(0.01)
            compiled.append(i)

    monkeypatch.setattr(engine._engine, "warm_up_first", warm_up)

    async def main():
        engine.start()
        request = asyncio.create_task(collect(engine, sequence()))
        await asyncio.sleep(0.05)
        await engine.stop(drain=False)
        with pytest.raises(EngineStopped):
            await request

    asyncio.run(main())
    assert len(compiled) < 20_000 and engine.failure is None and not engine.ready


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_a_client_that_leaves(engine, how, monkeypatch):
    """Its sequences end before another step has begun; other clients are not affected."""
    leaving = [sequence(max_tokens=400) for _ in range(3)]
    hold(
        monkeypatch,
        engine,
        lambda: leaving[0].num_output > 3 and leaving[0].finish_reason is None,
        lambda: engine._commands,
    )

    async def main():
        async with running(engine):
            stay = asyncio.create_task(collect(engine, sequence(max_tokens=200)))
            events = engine.generate(leaving)
            await anext(events)
            while leaving[0].num_output <= 3:
                await asyncio.sleep(0.001)
            if how == "close":
                await events.aclose()
            else:
                task = asyncio.create_task(anext(events))
                await asyncio.sleep(0)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
                    await task
                await events.aclose()
            num_output = leaving[0].num_output
            result = await stay
            assert len(next(iter(result.values()))[0]) == 200
            assert all(seq.finish_reason is FinishReason.ABORT for seq in leaving)
            assert leaving[0].num_output <= num_output + 2

    asyncio.run(main())


def test_a_client_that_leaves_at_once(engine, monkeypatch):
    """The client leaves before the thread has seen the request."""
    all_gone = threading.Event()
    hold(monkeypatch, engine, lambda: True, all_gone.is_set)

    async def main():
        async with running(engine):
            for _ in range(20):
                task = asyncio.create_task(collect(engine, sequence(max_tokens=400)))
                await asyncio.sleep(0)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            all_gone.set()
            await collect(engine, sequence())
            assert engine.stats()["generated_tokens"] < 20 + 20

    asyncio.run(main())


def test_refusals(engine):
    """A request is refused as a whole, by an exception and not by events; the engine goes on."""

    async def main():
        async with running(engine):
            with pytest.raises(ValueError, match="max_tokens"):
                await collect(engine, sequence(), sequence(max_tokens=5000))
            with pytest.raises(grammar.GrammarError, match="unclosed group"):
                await collect(engine, sequence(grammar=grammar.from_regex("(")))
            with pytest.raises(grammar.GrammarError, match="unclosed group"):  # already failed
                await collect(engine, sequence(grammar=grammar.from_regex("(")))
            await collect(engine, sequence(grammar=grammar.from_regex("(a)")))
            with pytest.raises(QueueFull):
                await collect(engine, *(sequence() for _ in range(51)))
            await collect(engine, sequence())

    asyncio.run(main())


def test_overload(engine, monkeypatch):
    """Ten times what fits: some requests are refused at once, and all accepted ones are served."""
    warm_up = engine._engine.warm_up_first

    def warm_up_while_all_come(progress):
        while len(engine._commands) < 500:
            time.sleep(0.001)
        return warm_up(progress)

    monkeypatch.setattr(engine._engine, "warm_up_first", warm_up_while_all_come)

    async def main():
        async with running(engine):

            async def client():
                try:
                    return await collect(engine, sequence(max_tokens=3))
                except QueueFull:
                    return None

            results = await asyncio.gather(*(client() for _ in range(500)))
            served = [result for result in results if result is not None]
            assert len(served) == 50
            for result in served:
                assert [len(tokens) for tokens, _ in result.values()] == [3]

    asyncio.run(main())


@pytest.mark.parametrize("drain", [True, False])
def test_stop(engine, drain, monkeypatch):
    seqs = [sequence(max_tokens=60) for _ in range(20)]
    hold(monkeypatch, engine, lambda: seqs[0].num_output, lambda: engine._stopping)

    async def main():
        engine.start()
        tasks = [asyncio.create_task(collect(engine, seq)) for seq in seqs]
        while not seqs[0].num_output:
            await asyncio.sleep(0.001)
        await engine.stop(drain)
        results = [next(iter(result.values())) for result in await asyncio.gather(*tasks)]
        if drain:
            assert {(len(tokens), reason) for tokens, reason in results} == {
                (60, FinishReason.LENGTH)
            }
        else:
            assert {reason for _, reason in results} == {FinishReason.ABORT}
        with pytest.raises(EngineStopped):
            await collect(engine, sequence())

    asyncio.run(main())
    check_drained(engine)


def test_a_step_that_raises_ends_what_ran(engine, monkeypatch):
    """The sequences end with their own error; the engine goes on."""
    forward, seq, failed = engine._engine.device.forward, sequence(max_tokens=200), []

    def fail_once(batch):
        if seq.num_output >= 5 and not failed:
            failed.append(seq.num_output)
            raise RuntimeError("something about the device")
        return forward(batch)

    monkeypatch.setattr(engine._engine.device, "forward", fail_once)

    async def main():
        async with running(engine):
            events = [event async for event in engine.generate([seq])]
            assert events[-1].finish_reason is FinishReason.ERROR
            assert events[-1].error == "The engine failed: RuntimeError."
            assert engine.ready
            ((tokens, _),) = (await collect(engine, sequence())).values()
            assert len(tokens) == 20

    asyncio.run(main())


@pytest.mark.parametrize("where", ["running", "waiting"])
def test_a_scheduler_without_a_step_for_what_is_left(engine, where, monkeypatch, caplog):
    """The engine logs it and ends the sequences that could never go on; no thread spins."""
    scheduler = engine._engine.scheduler
    schedule, add, stuck = scheduler.schedule, scheduler.add, []

    def schedule_nothing(now):
        return None if any(seq in getattr(scheduler, where) for seq in stuck) else schedule(now)

    monkeypatch.setattr(scheduler, "schedule", schedule_nothing)
    monkeypatch.setattr(scheduler, "add", lambda *seqs: add(*seqs) or stuck.extend(seqs))

    async def main():
        async with running(engine):
            ((_, reason),) = (await collect(engine, sequence())).values()
            assert reason is FinishReason.ERROR
            assert f"1 {where}" in caplog.text and "none is in flight" in caplog.text
            stuck.clear()
            monkeypatch.undo()
            ((tokens, _),) = (await collect(engine, sequence())).values()
            assert len(tokens) == 20 and engine.ready

    asyncio.run(asyncio.wait_for(main(), 240))
    check_drained(engine)


def test_steps_that_always_raise_end_the_engine(engine, monkeypatch):
    def fail(batch):
        raise RuntimeError("the device is gone")

    told, ready = [], []
    engine.on_ready = lambda: ready.append(engine.ready)
    engine.on_failure = lambda: told.append(engine.failure)

    async def main():
        async with running(engine):
            await collect(engine, sequence())
            monkeypatch.setattr(engine._engine.device, "forward", fail)
            # All at once: the engine would not run for a request that came after the last failure.
            results = await collect(engine, *(sequence() for _ in range(30)))
            assert not engine.ready and "gone" in str(engine.failure)
            assert all(result == ([], FinishReason.ERROR) for result in results.values())
            with pytest.raises(EngineStopped):
                await collect(engine, sequence())

    asyncio.run(main())
    assert told == [engine.failure] and ready == [False]


def test_a_warm_up_that_raises(engine, monkeypatch):
    def fail(progress):
        while not engine._commands:  # a request that waits for it
            time.sleep(0.001)
        raise RuntimeError("no memory")

    monkeypatch.setattr(engine._engine, "warm_up_first", fail)

    async def main():
        async with running(engine):
            with pytest.raises(EngineStopped):
                await collect(engine, sequence())
            assert not engine.ready and "no memory" in str(engine.failure)

    asyncio.run(main())


def test_an_event_loop_that_is_gone(engine, monkeypatch):
    """Its requests are aborted; other callers are not affected."""
    seq = sequence(max_tokens=500)
    loop = asyncio.new_event_loop()
    hold(monkeypatch, engine, lambda: seq.num_output > 3, loop.is_closed)
    engine.start()
    events = engine.generate([seq])
    loop.run_until_complete(anext(events))
    loop.close()  # and no caller closes the iterator

    async def main():
        await collect(engine, sequence())
        await engine.stop(drain=True)

    asyncio.run(main())
    assert seq.finish_reason is FinishReason.ABORT
    check_drained(engine)


def test_snapshot(engine):
    async def main():
        async with running(engine):
            assert (await engine.snapshot())["requests"] == []
            # A snapshot is made after a step, if it was requested before. On a busy machine that
            # may take more than one try.
            seen = {}
            while seen.keys() < {"requests", "entries"}:
                async for _ in engine.generate([sequence(max_tokens=40) for _ in range(2)]):
                    snapshot = json.loads(json.dumps(await engine.snapshot()))
                    assert len(snapshot["requests"]) <= 2
                    if len(snapshot["requests"]) == 2:
                        seen["requests"] = snapshot
                    if len(snapshot["step"]["entries"]) == 2:
                        seen["entries"] = snapshot
            while (await engine.snapshot())["requests"]:  # until the thread is at rest
                await asyncio.sleep(0.01)
        assert (await engine.snapshot())["requests"] == []
        assert set((await engine.snapshot())["pages"]["states"]) == {"f", "c"}

    asyncio.run(main())


def test_a_snapshot_is_made_only_where_somebody_looks(engine, monkeypatch):
    """A snapshot of a large cache takes milliseconds, which delay requests and events."""
    made = []
    monkeypatch.setattr(engine._engine, "snapshot", lambda: made.append(1) or {"requests": []})

    async def main():
        async with running(engine):
            for _ in range(2):
                async for _ in engine.generate([sequence(max_tokens=4)]):
                    pass
            assert not made
            await engine.snapshot()
            while not made:
                await asyncio.sleep(0.01)
                await engine.snapshot()

    asyncio.run(main())


def test_limits(engine):
    assert engine.limits.max_model_len == 64 * 8  # the pool is less than the model's context
    assert (engine.limits.max_running, engine.limits.max_waiting) == (8, 50)


def test_a_command_that_comes_at_the_very_end(engine):
    """It comes while waiting commands are answered, from the event loop or from a command."""
    told = []
    engine._commands.append(lambda: engine._command(lambda: told.append(2), must=False))
    engine._commands.append(lambda: told.append(1))
    engine._end()
    assert told == [1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_soak(model, device):
    """5,000 short requests, one in five leaving, one in twenty invalid, too few pages for all.

    test_soak.py has 8,000 over HTTP.
    """
    rng = random.Random(0)
    texts = [grammar.from_regex(pattern) for pattern in ("[a-z]{3}", "(", "forced text", "a|b")]

    def request() -> Sequence:
        params = {
            "max_tokens": rng.choice([1, 1, 1, 2, 2, 3, 3, 5, 8, 40]),
            "seed": rng.randrange(9),
        }
        params |= rng.choice([{}, {"temperature": 0.7}, {"top_p": 0.5}, {"presence_penalty": 1.0}])
        if rng.random() < 0.05:
            params["max_tokens"] = rng.choice([5000, 10**9])
        elif rng.random() < 0.1:
            params["grammar"] = rng.choice(texts)
        head = rng.choice([[1, 2, 3] * 12, [rng.randrange(4096) for _ in range(8)]])
        tokens = head[: rng.randrange(1, len(head) + 1)] + [rng.randrange(4096)]
        return sequence(tokens, **params)

    async def client(engine, counts):
        seq, leaves = request(), rng.random() < 0.2
        try:
            async with contextlib.aclosing(engine.generate([seq])) as events:
                async for event in events:
                    if event.finish_reason is not None:
                        counts[event.finish_reason] += 1
                    elif leaves:
                        counts["left"] += 1
                        break
        except (ValueError, QueueFull) as error:
            counts[type(error).__name__] += 1

    async def main():
        made = make_engine(model, device, dataclasses.replace(CONFIG, num_pages=16))
        counts: collections.Counter[str] = collections.Counter()
        memory = []
        async with running(made):
            for _ in range(5):

                async def worker():
                    for _ in range(25):
                        await client(made, counts)

                await asyncio.gather(*(worker() for _ in range(40)))
                memory.append(resident_megabytes())
        return counts, memory, made.stats()

    counts, memory, stats = asyncio.run(main())
    assert sum(counts.values()) == 5_000
    assert counts["left"] > 500 and counts["ValueError"] > 125 and counts["GrammarError"] > 50
    assert counts[FinishReason.ERROR] == counts[FinishReason.ABORT] == 0
    assert stats["preemptions"] > 12
    assert device.num_compiles_after_warm_up == 0
    assert memory[-1] < memory[2] + 30, memory


def resident_megabytes() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def test_a_text_goes_on_from_the_prompt(model, device):
    """SentencePiece's first space is in the text of a completion, and not of an answer."""
    tokenizer = tokenizer_kinds.llama()
    made = make_engine(model._replace(tokenizer=tokenizer), device)
    prompt = tokenizer.encode("the", add_special_tokens=False).ids

    async def text(**options) -> str:
        text = grammar.from_regex("    name")
        seq = sequence(prompt, grammar=text, ignore_eos=False, **options)
        return "".join([event.text async for event in made.generate([seq])])

    async def run() -> None:
        made.start()
        assert await text() == "    name"
        assert await text(goes_on=False) == "   name"
        await made.stop(drain=True)

    asyncio.run(run())


def test_a_tokenizer_with_more_tokens_than_the_model(model, device):
    """As Gemma 3 1B's: the engine starts, and grammars work."""
    tokenizer = tokenizer_kinds.with_added(tokenizer_kinds.byte_level(), {"<image>": ("special",)})
    assert tokenizer.get_vocab_size() > model.config.vocab_size
    made = make_engine(model._replace(tokenizer=tokenizer), device)

    async def run() -> None:
        made.start()
        seq = sequence(grammar=grammar.from_regex("a <image> b"), ignore_eos=False)
        assert "".join([event.text async for event in made.generate([seq])]) == "a <image> b"
        await made.stop(drain=True)

    asyncio.run(run())
