"""Limits on the cost of one client for the others: how much work runs before others run.

Tests count work instead of time where possible, as the machine may have other things to do.
"""

import asyncio
import contextlib
import itertools
import json
import selectors
import socket
import threading
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")

from pydantic import ValidationError

from helpers.serve.fake_engine import MODEL, FakeEngine, TokenLogprob, fake_model
from helpers.serve.live_server import eventually, serving
from jax_attn.serve._http import bodies, fair_loop
from jax_attn.serve._http import server as server_module
from jax_attn.serve._http.body_threads import BodyThreads
from jax_attn.serve._http.fair_loop import FairSelector
from jax_attn.serve._http.settings import ServerConfig
from jax_attn.serve._openai import answers, fields, response_format, schemas
from jax_attn.serve._openai.access_log import Record
from jax_attn.serve._openai.bounds import MAX_SCORES, KeyLimits
from jax_attn.serve._openai.errors import ApiError
from jax_attn.serve._openai.limits import Limiter
from jax_attn.serve._openai.logprobs import ChatScores, CompletionScores, TokenJson
from jax_attn.serve._openai.metrics import Metrics
from jax_attn.serve._openai.prepare import Caller, Preparer
from jax_attn.serve._scheduling.events import TokenEvent
from jax_attn.serve._scheduling.request import FinishReason
from jax_attn.serve._text import memory
from jax_attn.serve._text.token_bytes import TokenBytes

MAX_BYTES = ServerConfig(MODEL, "tiny").max_body_bytes


def long(begin: bytes, each: bytes, end: bytes) -> bytes:
    """A body of the greatest length that is read."""
    return begin + each * ((MAX_BYTES - len(begin) - len(end)) // len(each)) + end


# ---- bodies ------------------------------------------------------------------------------------

CHAT = b'{"messages": [{"role": "user", "content": '


@pytest.mark.parametrize(
    ("model", "raw", "param"),
    [
        (schemas.CompletionRequest, long(b'{"prompt": [0', b",-1", b"]}"), "prompt[1]"),
        (schemas.CompletionRequest, long(b'{"prompt": [0', b",true", b"]}"), "prompt[1]"),
        (schemas.CompletionRequest, long(b'{"prompt": [[0', b",9e9", b"]]}"), "prompt[0][1]"),
        (schemas.CompletionRequest, long(b'{"prompt": ["a"', b",0", b"]}"), "prompt[1]"),
        (schemas.CompletionRequest, long(b'{"prompt": "a", "stop": [0', b",0", b"]}"), "stop[0]"),
        (schemas.CompletionRequest, long(b'{"stop_token_ids":[0', b",-1", b"]}"), "stop_token_ids"),
        (schemas.DetokenizeRequest, long(b'{"tokens": [0', b",-1", b"]}"), "tokens[1]"),
        (schemas.ChatCompletionRequest, long(b'{"messages": [0', b",0", b"]}"), "messages[0]"),
        (
            schemas.ChatCompletionRequest,
            long(CHAT + b"[0", b",0", b"]}]}"),
            "messages[0].content[0]",
        ),
        (schemas.ChatCompletionRequest, long(CHAT + b'"", "x": [0', b",0", b"]}]}"), None),
        (schemas.TokenizeRequest, long(b'{"messages": [0', b",0", b"]}"), "messages[0]"),
    ],
    ids=lambda value: value[:30].decode() if isinstance(value, bytes) else "",
)
def test_a_body_of_errors_is_refused_at_the_first(model, raw, param, monkeypatch):
    counts = []

    def count(error: ValidationError, body):
        counts.append(error.error_count())
        return from_validation(error, body)

    from_validation = bodies.from_validation
    monkeypatch.setattr(bodies, "from_validation", count)
    with pytest.raises(ApiError) as refused:
        bodies.parse(raw, model)
    assert refused.value.status == 400 and param in (None, refused.value.param)
    assert len(str(refused.value)) < 300
    assert counts[0] <= len(model.model_fields)


@pytest.mark.parametrize("model", [schemas.CompletionRequest, schemas.ChatCompletionRequest])
def test_unknown_fields_are_refused_at_the_first(model, monkeypatch):
    raw = json.dumps({f"field{i}": 0 for i in range(bodies.MAX_KEYS - 1)}).encode()
    with pytest.raises(ApiError) as refused:
        bodies.parse(raw, model)
    assert refused.value.code == "unknown_parameter" and refused.value.param == "field0"
    biases = {str(i): 101 for i in range(bodies.MAX_KEYS - 10)}
    with pytest.raises(ApiError, match="at most 300 entries"):
        bodies.parse(json.dumps({"prompt": "a", "logit_bias": biases}).encode(), model)


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (long(b'{"prompt": [0', b",[]", b"]}"), "lists and objects"),
        (long(b'{"prompt": [0', b",{}", b"]}"), "lists and objects"),
        (long(b'{"user": [', b"[" * 99 + b"]" * 99 + b",", b"0]}"), "lists and objects"),
        (long(b'{"user": ["\\\\", "\\\\\\"[", ', b"[],", b"0]}"), "lists and objects"),
        (long(b"{", b'"a":0,', b'"b":0}'), "keys"),
        (long(b'{"', b'":0,"', b'":0}'), "keys"),
    ],
    ids=["lists", "objects", "deep", "behind escapes", "keys", "empty keys"],
)
def test_what_would_take_long_to_parse_is_not_parsed(raw, what, monkeypatch):
    monkeypatch.setattr(bodies, "from_json", lambda *args, **kwargs: pytest.fail("parsed"))
    with pytest.raises(ApiError, match=f"expected at most 65536 {what}"):
        bodies.parse(raw, schemas.CompletionRequest)


@pytest.mark.parametrize("each", [b"1234567,", b'"",', b" "], ids=["numbers", "strings", "spaces"])
def test_a_long_body_is_long_in_strings_alone(each, monkeypatch):
    """As pictures are: a server that reads them takes longer bodies."""
    text = b"a" * (5 * MAX_BYTES)
    assert bodies.parse(b'["%b"]' % text, Anything).root == [text.decode()]
    raw = b"[%b 0]" % (each * (MAX_BYTES // len(each) + 1))
    monkeypatch.setattr(bodies, "from_json", lambda *args, **kwargs: pytest.fail("parsed"))
    with pytest.raises(ApiError, match="expected at most 4194304 bytes outside of strings"):
        bodies.parse(raw, Anything)


def test_what_is_in_strings_is_no_structure():
    """A program has more brackets and colons than any request has lists and keys."""
    text = ('[{":' * 5 + "\\" * 3 + '"\\"') * 50_000
    body = bodies.parse(json.dumps({"prompt": text}).encode(), schemas.CompletionRequest)
    assert body.prompt == text
    text = '\\"' * 100_000 + "[" * 100_000
    assert bodies.parse(json.dumps([text, {}]).encode(), Anything).root == [text, {}]


class Anything(schemas.BaseModel):
    root: list

    @schemas.model_validator(mode="before")
    @classmethod
    def wrap(cls, value):
        return {"root": value}


def test_tokens_are_checked_in_slices():
    """Other threads run between slices, and the first bad token is found wherever it is."""
    most = fields._TOKENS_AT_A_TIME
    for bad in (0, most - 1, most, 2 * most + 5):
        for value in (-1, 2**31, True, 1.5, "1", None, [1]):
            tokens = [7] * (2 * most + 6)
            tokens[bad] = value
            with pytest.raises(ApiError) as refused:
                bodies.parse(json.dumps({"tokens": tokens}).encode(), schemas.DetokenizeRequest)
            assert refused.value.param == f"tokens[{bad}]"
    tokens = [0, 2**31 - 1] * most
    body = bodies.parse(json.dumps({"tokens": tokens}).encode(), schemas.DetokenizeRequest)
    assert body.tokens == tokens


def test_one_body_is_parsed_at_a_time(monkeypatch):
    now, most = [0], [0]

    def parse(raw, **kwargs):
        now[0] += 1
        most[0] = max(now)
        time.sleep(0.01)
        now[0] -= 1
        return {"tokens": []}

    monkeypatch.setattr(bodies, "from_json", parse)
    threads = [
        threading.Thread(target=bodies.parse, args=(b"", schemas.DetokenizeRequest))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]


# ---- texts -------------------------------------------------------------------------------------


class Counting:
    """A tokenizer that counts the characters and tokens it is given."""

    def __init__(self, tokenizer):
        self._tokenizer, self.num_chars, self.longest = tokenizer, 0, 0

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def encode_batch_fast(self, texts, **kwargs):
        self.num_chars += sum(map(len, texts))
        self.longest = max(self.longest, *map(len, texts))
        return self._tokenizer.encode_batch_fast(texts, **kwargs)

    def encode(self, *args, **kwargs):
        pytest.fail("Tokenizer.encode keeps all threads waiting")

    def decode(self, *args, **kwargs):
        pytest.fail("Tokenizer.decode keeps all threads waiting")


@pytest.fixture
def preparer():
    model = fake_model()
    engine = FakeEngine(model.tokenizer)
    model.tokenizer = Counting(model.tokenizer)
    limits = KeyLimits.default(engine.limits.max_waiting, engine.limits.max_running)
    return Preparer(model, engine, MODEL, ["tiny"], limits, {})


def test_a_text_that_is_far_too_long_is_not_cut_into_tokens(preparer):
    text = "a b " * (MAX_BYTES // 4 - 100)
    caller = Caller("", 0.0)
    for prepare, body in [
        (preparer.completion, schemas.CompletionRequest(prompt=text)),
        (preparer.completion, schemas.CompletionRequest(prompt=[text])),
        (preparer.chat, schemas.ChatCompletionRequest.model_validate(chat(text))),
    ]:
        preparer._tokenizer.num_chars = 0
        with pytest.raises(ApiError, match="resulted in over 512 tokens") as refused:
            prepare(body, caller)
        assert refused.value.status == 400 and refused.value.param in ("prompt", "messages")
        assert preparer._tokenizer.num_chars < 100_000
    with pytest.raises(ApiError, match="over 524288 tokens"):
        preparer.tokenize(schemas.TokenizeRequest(prompt=text))
    assert preparer._tokenizer.longest < 100_000
    with pytest.raises(ApiError, match="at most 262144 tokens"):
        preparer.detokenize(schemas.DetokenizeRequest(tokens=[5] * 300_000))


def chat(text: str) -> dict:
    return {"messages": [{"role": "user", "content": text}]}


def test_a_long_text_of_few_tokens_is_taken(preparer):
    """A text that fits the context is never refused: 16 spaces are one token of this model."""
    preparer.max_model_len = 60_000
    text = " " * 700_000
    prepared = preparer.completion(schemas.CompletionRequest(prompt=text), Caller("", 0.0))
    (tokens,) = prepared.prompts
    assert 40_000 < len(tokens) < 60_000
    assert tokens[1:] == preparer._tokenizer._tokenizer.encode(text, add_special_tokens=False).ids
    with pytest.raises(ApiError, match="maximum context length is 60000"):
        preparer.completion(schemas.CompletionRequest(prompt=text * 2), Caller("", 0.0))


def test_other_threads_run_while_a_text_is_cut_into_tokens(preparer):
    """A tokenizer call that held Python's lock would let other threads run only before and after.

    On a busy machine the other thread may not run more often within one call; then another call is
    made.
    """
    turns, most, done = 0, 0, threading.Event()
    encode = preparer._tokenizer.encode_batch_fast

    def beat():
        nonlocal turns
        while not done.wait(0.0005):
            turns += 1

    def count(*args, **kwargs):
        nonlocal most
        before = turns
        tokens = encode(*args, **kwargs)
        most = max(most, turns - before)
        return tokens

    preparer._tokenizer.encode_batch_fast = count
    preparer.max_model_len = 1 << 20
    thread = threading.Thread(target=beat)
    thread.start()
    for _ in range(30):
        preparer.completion(
            schemas.CompletionRequest(prompt="import os " * 150_000, max_tokens=1), Caller("", 0.0)
        )
        if most > 2:
            break
    done.set()
    thread.join()
    assert most > 2


def test_echoes_are_bounded(preparer):
    preparer.max_model_len = 1 << 20
    body = schemas.CompletionRequest(prompt="a " * 40_000, echo=True, n=32)
    assert len(preparer.completion(body, Caller("", 0.0)).sequences) == 32
    body.prompt *= 2
    with pytest.raises(ApiError) as refused:
        preparer.completion(body, Caller("", 0.0))
    assert refused.value.param == "echo"


# ---- log-probabilities -------------------------------------------------------------------------


def entries(num_tokens: int, num_top: int) -> list[TokenLogprob]:
    return [
        TokenLogprob(300 + i % 100, -0.5, tuple((400 + j, -1.0 - j) for j in range(num_top)))
        for i in range(num_tokens)
    ]


class Turns:
    """Counts the iterations of the event loop within a `with` block."""

    num = 0

    def __enter__(self):
        self._task = asyncio.create_task(self._count())
        return self

    def __exit__(self, *_):
        self._task.cancel()

    async def _count(self):
        while True:
            self.num += 1
            await asyncio.sleep(0)


@pytest.mark.parametrize("kind", [ChatScores, CompletionScores])
def test_others_have_turns_while_log_probabilities_are_written(kind):
    """The most log-probabilities an answer may have, in one event, as for a prompt."""
    tokens = TokenJson(TokenBytes(fake_model().tokenizer))
    scores = kind(tokens) if kind is ChatScores else kind(tokens, 0)
    num_tokens = MAX_SCORES // 21
    sizes = []

    async def send(message):
        sizes.append(len(message["body"]))

    async def run():
        with Turns() as turns:
            choice = answers._Choice(scores)
            await answers.add_scores(choice, entries(num_tokens, 20))
            assert turns.num >= num_tokens // 64
            turns_before = turns.num
            pieces = scores.take()
            num_bytes = sum(map(len, pieces))
            await answers.send_pieces(send, pieces)
            assert turns.num - turns_before >= num_bytes >> 17
        return b"".join(pieces)

    found = json.loads(asyncio.run(run()))
    if kind is ChatScores:
        schemas.ChatLogprobs.model_validate(found)
        assert len(found["content"]) == num_tokens
    else:
        schemas.CompletionLogprobs.model_validate(found)
        assert [len(column) for column in found.values()] == [num_tokens] * 4
    assert max(sizes) <= 1 << 16 and sum(sizes) < 1 << 25


def test_log_probabilities_that_are_no_numbers():
    scores = ChatScores(TokenJson(TokenBytes(fake_model().tokenizer)))
    scores.add([TokenLogprob(300, float("-inf"), ((301, float("nan")),))])
    (entry,) = json.loads(b"".join(scores.take()))["content"]
    assert entry["logprob"] is None and entry["top_logprobs"][0]["logprob"] is None
    assert json.loads(b"".join(scores.take())) == {"content": []}


# ---- streams -----------------------------------------------------------------------------------


class Steps:
    """An engine with a token of each choice a step; a step takes an iteration of the event loop."""

    limits = SimpleNamespace(max_waiting=64, num_replicas=1)

    def __init__(self, num_steps: int, step=lambda: asyncio.sleep(0), text: str = "a"):
        """step: awaited before each step."""
        self._num_steps, self._step, self._text = num_steps, step, text

    def stats(self):
        return {"waiting": 0}

    async def generate(self, seqs):
        for step in range(self._num_steps):
            await self._step()
            for seq in seqs:
                reason = FinishReason.LENGTH if step == self._num_steps - 1 else None
                yield TokenEvent(seq.id, [300], self._text, finish_reason=reason)


def stream(preparer, engine, **fields):
    body = schemas.CompletionRequest(prompt="a", stream=True, **fields)
    prepared = preparer.completion(body, Caller("", 0.0))
    style = response_format.CompletionStyle(
        prepared, False, TokenJson(TokenBytes(fake_model().tokenizer))
    )
    ticket = Limiter(engine, KeyLimits(1, 64)).enter("", queues=False)
    record = Record("req-1", False)
    arguments = engine, prepared, Metrics(engine), ticket, record
    return answers.ChoicesAnswer(style, *arguments, stream=True, include_usage=False)


async def connected():
    await asyncio.Event().wait()


@pytest.mark.parametrize("num_choices", [1, 32])
def test_the_event_loop_turns_once_a_step_and_once_in_eight_events(preparer, num_choices):
    """One iteration for each event took a third of the event loop's time for a token."""
    num_steps, bodies_sent = 50, []

    async def send(message):
        bodies_sent.append(message.get("body", b""))

    async def run():
        with Turns() as turns:
            await stream(preparer, Steps(num_steps), n=num_choices)({}, connected, send)
        return turns.num

    num_turns = asyncio.run(run())
    assert b"".join(bodies_sent).count(b"data: {") == num_steps * num_choices
    num_wanted = num_steps * (1 + num_choices / 8)
    assert num_wanted - 10 <= num_turns <= num_wanted + 10


def test_a_sign_of_life_comes_between_events_and_not_within_one(preparer, monkeypatch):
    """An event does not begin before the keep-alive is sent, either."""
    monkeypatch.setattr(answers, "KEEP_ALIVE_SECONDS", 0.01)
    is_sending, sent, is_told = False, b"", asyncio.Event()

    async def send(message):
        nonlocal is_sending, sent
        assert not is_sending
        is_sending = True
        await asyncio.sleep(0.02)
        is_sending = False
        sent += message.get("body", b"")
        if message.get("body") == b": waiting\n\n":
            is_told.set()

    async def step():
        is_told.clear()
        await is_told.wait()

    engine = Steps(6, step, text="a" * 200_000)  # in four pieces
    asyncio.run(stream(preparer, engine)({}, connected, send))
    *events, done, end = sent.decode().split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    comments = [event for event in events if event == ": waiting"]
    texts = [json.loads(event.removeprefix("data: ")) for event in events if event not in comments]
    assert len(comments) >= 6 and len(texts) == 6


# ---- taking turns ------------------------------------------------------------------------------


class Engine:
    limits = KeyLimits(1, 1)

    def stats(self):
        return {"waiting": 0}


def test_a_ticket_holds_all_or_nothing():
    limiter = Limiter(Engine(), KeyLimits(requests=2, choices=5, tokens=10))
    first, second = (limiter.enter("a", queues=False) for _ in range(2))
    with pytest.raises(ApiError) as refused:
        limiter.enter("a", queues=False)
    assert (refused.value.status, refused.value.code) == (429, "too_many_requests")
    assert limiter.enter("b", queues=False)  # b has its own limits
    first.take(choices=3, tokens=9)
    for amounts in ({"choices": 3}, {"choices": 2, "tokens": 2}):
        with pytest.raises(ApiError):
            second.take(**amounts)
    second.take(choices=2, tokens=1)
    assert limiter.held("a") == {"requests": 2, "choices": 5, "tokens": 10}
    first.give_back("tokens")
    first.leave()
    first.leave()
    assert limiter.held("a") == {"requests": 1, "choices": 2, "tokens": 1}
    second.leave()
    assert not limiter.held("a")


def test_long_bodies_go_one_at_a_time_and_tenants_in_turn():
    """Short bodies do not wait for them."""
    limiter, order, now = Limiter(Engine(), KeyLimits(99, 99)), [], [0]
    go_on = threading.Event()

    def work(name):
        now[0] += 1
        assert now == [1]
        go_on.wait()
        order.append(name)
        now[0] -= 1

    async def run():
        threads = BodyThreads()
        jobs = []
        for name in ("a0", "a1", "a2", "a3", "b0", "b1", "c0"):
            ticket = limiter.enter(name[0], queues=False)
            jobs.append(asyncio.create_task(threads.run(ticket, 1 << 20, work, name)))
            await asyncio.sleep(0)
        jobs[2].cancel()
        ticket = limiter.enter("a", queues=False)
        assert await threads.run(ticket, 100, lambda: "short") == "short"
        go_on.set()
        await asyncio.gather(*jobs, return_exceptions=True)
        threads.close()

    asyncio.run(run())
    assert order == ["a0", "a1", "b0", "c0", "a3", "b1"]


def test_ready_connections_take_turns():
    """A turn has few of them, and always the engine's wire; every one gets its turn."""
    pairs = [socket.socketpair() for _ in range(50)]
    with contextlib.ExitStack() as stack:
        for end in itertools.chain(*pairs):
            stack.enter_context(end)
        for _, theirs in pairs:
            theirs.send(b"a")
        wire = pairs[25][0].fileno()
        selector = stack.enter_context(FairSelector(wire))
        for ours, _ in pairs:
            selector.register(ours, selectors.EVENT_READ)
        turns: dict[int, list[int]] = {}
        for turn in range(70):
            (first, _), *others = selector.select(0)
            assert first.fd == wire and len(others) == fair_loop.MOST
            for key, _ in others:
                turns.setdefault(key.fd, []).append(turn)
        assert len(turns) == 49
        for each in turns.values():
            assert max(b - a for a, b in itertools.pairwise([0, *each, 69])) <= 2 * 7
        for ours, _ in pairs[fair_loop.MOST :]:
            ours.recv(1)
        assert len(selector.select(0)) == fair_loop.MOST


def test_two_turns_have_twice_as_many_connections():
    pairs = [socket.socketpair() for _ in range(2 * fair_loop.MOST)]
    with contextlib.ExitStack() as stack:
        for end in itertools.chain(*pairs):
            stack.enter_context(end)
        selector = stack.enter_context(FairSelector())
        for ours, theirs in pairs:
            theirs.send(b"a")
            selector.register(ours, selectors.EVENT_READ)
        turns = [{key.fd for key, _ in selector.select(0)} for _ in range(2)]
        assert turns[0] | turns[1] == {ours.fileno() for ours, _ in pairs}
        assert len(turns[0]) == len(turns[1]) == fair_loop.MOST


@pytest.mark.parametrize("num_each", [1, 6])
def test_streams_go_on_while_many_connections_ask(monkeypatch, num_each):
    """Each turn of the loop begins few requests, however many connections have one, or several."""
    begun = [0]
    health = server_module._Server.version

    async def counted(self, request):
        begun[0] += 1
        return await health(self, request)

    monkeypatch.setattr(server_module._Server, "version", counted)
    most, loop = 0, fair_loop.new_loop()
    run_once = loop._run_once

    def one_turn():
        nonlocal most
        before = begun[0]
        run_once()
        most = max(most, begun[0] - before)

    monkeypatch.setattr(loop, "_run_once", one_turn)
    with serving(loop=loop) as server:
        with server.paused(), contextlib.ExitStack() as stack:
            request = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
            connections = [
                stack.enter_context(contextlib.closing(server.connect(request * num_each)))
                for _ in range(40)
            ]
            stack = stack.pop_all()
        eventually(lambda: begun[0] == 40 * num_each)
        for connection in connections:
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
        stack.close()
    assert most <= 3 * fair_loop.MOST


def test_the_memory_of_many_bodies_goes_back(monkeypatch):
    """Once for so many bytes, long or short, and not while nothing is sent."""
    given_back = []
    monkeypatch.setattr(memory, "give_back", lambda: given_back.append(1))

    async def run():
        threads, limiter = BodyThreads(), Limiter(Engine(), KeyLimits(99, 99))
        for num_bytes in (3 << 20, 1 << 20, 1000, *[1 << 16] * 63):
            ticket = limiter.enter("a", queues=False)
            await threads.run(ticket, num_bytes, lambda: None)
        threads.close()

    asyncio.run(run())
    assert len(given_back) == 1


def test_short_bodies_of_a_tenant_do_not_wait_for_a_thousand_of_another():
    limiter, begun = Limiter(Engine(), KeyLimits(2000, 99)), []
    go_on = threading.Event()

    def work(name):
        begun.append(name)
        go_on.wait()

    async def run():
        threads = BodyThreads()
        jobs = [
            asyncio.create_task(threads.run(limiter.enter(name, queues=False), 10, work, name))
            for name in ["a"] * 1000 + ["b"]
        ]
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(*jobs)
        threads.close()

    asyncio.run(run())
    assert len(begun) == 1001 and begun.index("b") < 10


def test_a_neighbours_stream_goes_on():
    """One client sends the longest bodies of every kind; another client's stream gets its tokens.

    It gets at least one in each second of this process's CPU time, which passes only while the
    process has a core.
    """
    engine = FakeEngine(fake_model().tokenizer, delay=0.005, max_waiting=64)
    engine.limits.max_model_len = 100_000
    attacks = [
        ("/v1/completions", long(b'{"prompt": [0', b",-1", b"]}")),
        ("/v1/completions", long(b'{"prompt": [0', b",0", b"]}")),
        ("/v1/completions", long(b'{"prompt": [0', b",[]", b"]}")),
        ("/v1/completions", long(b'{"prompt": "', b"a ", b'"}')),
        ("/tokenize", long(b'{"prompt": "', b"a ", b'"}')),
        ("/detokenize", long(b'{"tokens": [0', b",9", b"]}")),
        ("/v1/chat/completions", long(CHAT + b"[0", b",0", b"]}]}")),
        ("/v1/chat/completions", long(CHAT + b'"', b"a ", b'"}]}')),
    ]
    gaps = {}
    with serving(engine) as server:
        times, done = [], threading.Event()

        def watch():
            while not done.is_set():
                body = {"prompt": "a", "max_tokens": 5000, "stream": True, "ignore_eos": True}
                raw = json.dumps(body).encode()
                head = "POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n"
                head += f"Host: localhost\r\nContent-Length: {len(raw)}\r\n\r\n"
                with server.connect(head.encode() + raw) as connection:
                    while not done.is_set() and connection.recv(1 << 16):
                        times.append(time.process_time())

        thread = threading.Thread(target=watch)
        thread.start()
        while len(times) < 10:
            time.sleep(0.01)
        for path, raw in attacks:
            for _ in range(3):  # a delay of ours occurs in every try
                begin = time.process_time()
                answer = server.post(path, raw)
                end = time.process_time()
                assert answer.status == 400, answer.body
                inside = [begin, *(t for t in times if begin < t < end), end]
                gap = max(b - a for a, b in zip(inside, inside[1:], strict=False))
                gaps[path, raw[:30]] = min(gap, gaps.get((path, raw[:30]), gap))
                if gap < LONGEST_GAP:
                    break
        done.set()
        thread.join()
    assert max(gaps.values()) < LONGEST_GAP, gaps


# Seconds of CPU time of all cores. test_neighbours.py allows a fourth of it on an idle machine.
LONGEST_GAP = 1.0
