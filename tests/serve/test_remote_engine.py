"""The engine over a socket: the same behaviour as AsyncEngine, and the loss of either side."""

import asyncio
import contextlib
import pickle
import socket
import threading

import pytest

from helpers.serve.remote import remote
from helpers.serve.small_engine import hold, make_engine, sequence, warm_device
from jax_attn.serve._grammar import grammar
from jax_attn.serve._ipc.remote_engine import RemoteEngine
from jax_attn.serve._ipc.wire import Wire, receive
from jax_attn.serve._scheduling.admission import QueueFull
from jax_attn.serve._scheduling.events import FIRST_VERSION, TokenEvent, TokenLogprob
from jax_attn.serve._scheduling.protocols import EngineStopped
from jax_attn.serve._scheduling.request import FinishReason, Sequence


@pytest.fixture(scope="module")
def device(model):
    return warm_device(model)


@pytest.fixture
def engine(model, device):
    return make_engine(model, device)


async def until_ready(client: RemoteEngine) -> None:
    while not client.ready:
        await asyncio.sleep(0.001)


async def collect(engine, *seqs: Sequence) -> dict[str, list[TokenEvent]]:
    events: dict[str, list[TokenEvent]] = {seq.id: [] for seq in seqs}
    async for event in engine.generate(seqs):
        events[event.seq_id].append(event)
    assert all(each[-1].finish_reason for each in events.values())
    return events


def joined(events: list[TokenEvent]) -> TokenEvent:
    first, *rest = events
    for event in rest:
        first.extend(event)
    return first


@pytest.mark.parametrize("given", ([], [0], [1], [2], [0, 1], [1, 2], [0, 1, 2]))
def test_joined_events_have_a_version_for_each_token(given):
    """given: the events that have versions; a token of the others is of the first weights."""
    events = [TokenEvent("a", [i] * (i + 1), str(i)) for i in range(3)]
    for i in given:
        events[i].versions = [f"step {i}"] * (i + 1)
    whole = joined(events)
    assert (whole.tokens, whole.text) == ([0, 1, 1, 2, 2, 2], "012")
    expected = [f"step {i}" if i in given else FIRST_VERSION for i in whole.tokens]
    assert whole.versions == (expected if given else None)


def test_what_arrives_is_what_was_sent(engine):
    """Every field of every event, for several callers at once."""
    kinds = [
        {"logprobs": 2, "prompt_logprobs": True},
        {"grammar": grammar.from_regex("[a-d]{3}"), "ignore_eos": False},
        {"stop_token_ids": (199,), "ignore_eos": False},
        {"max_tokens": 0},
    ]

    async def through(client) -> list[TokenEvent]:
        answers = await asyncio.gather(
            *(collect(client, sequence(**kind), sequence(**kind)) for kind in kinds)
        )
        return [joined(events) for answer in answers for events in answer.values()]

    async def main():
        async with remote(engine) as client:
            await until_ready(client)
            far = await through(client)
            near = await through(engine)
            for a, b in zip(far, near, strict=True):
                assert a.tokens == b.tokens and a.text == b.text
                assert a.finish_reason is b.finish_reason
                assert a.num_cached_tokens is not None and a.admitted is not None
                assert (a.logprobs is None) == (b.logprobs is None)
                for x, y in zip(a.logprobs or (), b.logprobs or (), strict=True):
                    assert isinstance(x, TokenLogprob) and x.token == y.token
            assert client.stats() == engine.stats()
            assert (await client.snapshot())["requests"] == []
            assert client.limits == engine.limits

    asyncio.run(main())


def test_refusals(engine):
    """The same exceptions with the same sentences; the engine goes on."""

    async def main():
        async with remote(engine) as client:
            for seqs, error, sentence in [
                ([sequence(max_tokens=5000)], ValueError, "max_tokens"),
                ([sequence(grammar=grammar.from_regex("("))], grammar.GrammarError, "unclosed"),
                ([sequence() for _ in range(51)], QueueFull, "."),
            ]:
                with pytest.raises(error, match=sentence) as raised:
                    await collect(client, *seqs)
                assert type(raised.value) is error
            await collect(client, sequence())

    asyncio.run(main())


def test_a_mistake_of_ours_is_in_the_log(engine, monkeypatch, caplog):
    def fail(seqs, compiled):
        raise KeyError("a mistake")

    async def main():
        async with remote(engine) as client:
            monkeypatch.setattr(engine._engine, "submit", fail)
            with pytest.raises(RuntimeError, match="KeyError: 'a mistake'"):
                await collect(client, sequence())

    asyncio.run(main())
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("when", ["compiling", "running", "at once"])
def test_a_client_that_leaves(engine, when, monkeypatch):
    """Its sequences end, even while a grammar compiles; other clients are not affected."""
    scheduler = engine._engine.scheduler
    hold(
        monkeypatch,
        engine,
        lambda: len(scheduler.running) == engine.stats()["running"] == 2,  # and told so
        lambda: engine._commands,
    )

    async def main():
        async with remote(engine) as client:
            await until_ready(client)
            stays = asyncio.create_task(collect(client, sequence(max_tokens=200)))
            leaving = sequence(
                max_tokens=400,
                grammar=grammar.from_regex("[a-z]{300}") if when == "compiling" else None,
            )
            task = asyncio.create_task(collect(client, leaving))
            await asyncio.sleep(0)
            if when == "running":
                while client.stats()["running"] < 2:
                    await asyncio.sleep(0.001)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await stays
            assert client.stats()["running"] == client.stats()["waiting"] == 0
            assert client.stats()["generated_tokens"] < 400

    asyncio.run(main())


@pytest.mark.parametrize("drain", [True, False])
def test_stop(engine, drain, monkeypatch):
    hold(monkeypatch, engine, lambda: engine.stats()["running"], lambda: engine._stopping)

    async def main():
        async with remote(engine) as client:
            tasks = [
                asyncio.create_task(collect(client, sequence(max_tokens=60))) for _ in range(20)
            ]
            while not client.stats()["running"]:
                await asyncio.sleep(0.001)
            stopping = asyncio.create_task(client.stop(drain))
            await asyncio.sleep(0)
            assert not client.ready
            with pytest.raises(EngineStopped):
                await collect(client, sequence())
            answers = [joined(*answer.values()) for answer in await asyncio.gather(*tasks)]
            await stopping
        reasons = {answer.finish_reason for answer in answers}
        if drain:
            assert reasons == {FinishReason.LENGTH}
            assert {len(answer.tokens) for answer in answers} == {60}
        else:
            assert FinishReason.ABORT in reasons

    asyncio.run(main())


def test_an_engine_that_gives_up(engine, monkeypatch):
    def fail(batch):
        raise RuntimeError("the device is gone")

    told, ready = [], []

    async def main():
        async with remote(engine) as client:
            client.on_failure = lambda: told.append(str(client.failure))
            client.on_ready = lambda: ready.append(client.ready)
            await collect(client, sequence())
            monkeypatch.setattr(engine._engine.device, "forward", fail)
            answers = await collect(client, *(sequence() for _ in range(30)))
            assert {each[-1].finish_reason for each in answers.values()} == {FinishReason.ERROR}
            while not told:
                await asyncio.sleep(0.001)
            assert not client.ready
            for call in (collect(client, sequence()), client.snapshot()):
                with pytest.raises(EngineStopped):
                    await call

    asyncio.run(main())
    assert told == ["the device is gone"] and ready == [False]


def test_a_process_that_dies():
    """Every waiting call gets an error, for the first token or for an answer."""

    async def main():
        ours, theirs = socket.socketpair()
        client, told = RemoteEngine(Wire(ours), None, {}), []
        client.on_failure = lambda: told.append(client.failure)
        client.start()
        client._on_ready()
        accepted, waiting = (asyncio.create_task(collect(client, sequence())) for _ in range(2))
        picture = asyncio.create_task(client.snapshot())
        await asyncio.sleep(0.01)
        client._on_answer(0, None, None)
        await asyncio.sleep(0)
        theirs.close()
        ((event,),) = (await accepted).values()
        assert event.finish_reason is FinishReason.ERROR and event.error == "The engine failed."
        for task in (waiting, picture):
            with pytest.raises(EngineStopped):
                await task
        assert not client.ready and len(told) == 1
        await client.stop(drain=True)

    asyncio.run(asyncio.wait_for(main(), 240))


def test_messages_that_the_other_side_does_not_read_yet():
    """More than sockets hold: no sender waits, and all messages arrive whole and in order."""
    messages = [(i, bytes([i % 251]) * (i * 37 % 5_000)) for i in range(3_000)]
    messages[7] = (7, b"x" * 5_000_000)

    async def main():
        ours, theirs = socket.socketpair()
        sender, reader, received, ended = Wire(ours), Wire(theirs), [], asyncio.Event()
        sender.attach(lambda message: None, lambda: None)
        for message in messages:
            sender.send(message)
        reader.attach(received.append, ended.set)
        threads = [
            threading.Thread(target=lambda: [sender.send("late") for _ in range(500)])
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        while len(received) < len(messages) + 1_000:
            await asyncio.sleep(0.001)
        assert [message for message in received if message != "late"] == messages
        sender.close()
        await ended.wait()
        reader.send("nobody is there")  # no effect
        reader.close()

    asyncio.run(asyncio.wait_for(main(), 240))


def test_one_message_and_no_byte_of_the_next():
    ours, theirs = socket.socketpair()
    with ours, theirs:

        async def main():
            wire = Wire(ours.dup())
            wire.attach(lambda message: None, lambda: None)
            wire.send({"a": 1})
            wire.send("next")

        asyncio.run(main())
        assert receive(theirs) == {"a": 1} and receive(theirs) == "next"


def test_parts_of_a_request_survive_the_wire():
    seq = sequence(stop=("x",), logit_bias=((1, 2.0),))
    copy = pickle.loads(pickle.dumps(seq))
    assert copy.tokens == seq.tokens and copy.params == seq.params and copy.packed() == seq.packed()
