"""What one client may cost the others: how much is worked on at once, before another has a turn.

Counted rather than timed wherever that says the same, as the machine may have other things to do.
"""

import asyncio
import json
import threading
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")

from pydantic import ValidationError

from helpers.serve.fake_engine import MODEL, FakeEngine, TokenLogprob, fake_model
from helpers.serve.live_server import serving
from jax_attn.serve._http import bodies
from jax_attn.serve._http.body_threads import Lanes
from jax_attn.serve._http.server import ServerConfig
from jax_attn.serve._openai import answers, fields, response_format, schemas
from jax_attn.serve._openai.access_log import Record
from jax_attn.serve._openai.errors import ApiError
from jax_attn.serve._openai.limits import Gate, KeyLimits
from jax_attn.serve._openai.logprobs import ChatScores, CompletionScores, TokenJson
from jax_attn.serve._openai.metrics import Metrics
from jax_attn.serve._openai.prepare import Caller, Preparer
from jax_attn.serve._scheduling.events import TokenEvent
from jax_attn.serve._scheduling.request import FinishReason
from jax_attn.serve._text.token_bytes import TokenBytes

MAX_BYTES = ServerConfig(MODEL, "tiny").max_body_bytes


def long(begin: bytes, each: bytes, end: bytes) -> bytes:
    """A body of the longest length that is read."""
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
    """So that other threads have turns; and the first bad one is found wherever it is."""
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
    """A tokenizer that counts the characters and tokens that it is given."""

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
    """None that has room in the context is refused: 16 spaces are a token of this model."""
    preparer.max_model_len = 60_000
    text = " " * 700_000
    prepared = preparer.completion(schemas.CompletionRequest(prompt=text), Caller("", 0.0))
    (tokens,) = prepared.prompts
    assert 40_000 < len(tokens) < 60_000
    assert tokens[1:] == preparer._tokenizer._tokenizer.encode(text, add_special_tokens=False).ids
    with pytest.raises(ApiError, match="maximum context length is 60000"):
        preparer.completion(schemas.CompletionRequest(prompt=text * 2), Caller("", 0.0))


def test_other_threads_run_while_a_text_is_cut_into_tokens(preparer):
    """A call that holds Python's lock lets another thread have a turn before it and one after it.
    Where a machine is so busy that the thread has no more in a call, another call is made."""
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
    """How often the event loop turns within a `with` block."""

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
    """All that an answer may have, in one event, as those of a prompt come."""
    tokens = TokenJson(TokenBytes(fake_model().tokenizer))
    scores = kind(tokens) if kind is ChatScores else kind(tokens, 0)
    num_tokens = schemas.MAX_SCORES // 21
    sizes = []

    async def send(message):
        sizes.append(len(message["body"]))

    async def run():
        with Turns() as turns:
            choice = answers._Choice(scores)
            await answers._add_scores(choice, entries(num_tokens, 20))
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
    """An engine: a token of each choice a step, which takes a turn of the event loop."""

    limits = SimpleNamespace(max_waiting=64)

    def __init__(self, num_steps: int, step=lambda: asyncio.sleep(0), text: str = "a"):
        """step: what is awaited before each."""
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
    ticket = Gate(engine, KeyLimits(1, 64)).enter("", queues=False)
    record = Record("req-1", False)
    arguments = engine, prepared, Metrics(engine), ticket, record
    return answers.ChoicesAnswer(style, *arguments, stream=True, include_usage=False)


async def connected():
    await asyncio.Event().wait()


@pytest.mark.parametrize("num_choices", [1, 32])
def test_the_event_loop_turns_once_a_step_and_once_in_eight_events(preparer, num_choices):
    """A turn for each event was a third of what the loop did for a token."""
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
    """Nor does an event begin before it is sent."""
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


# ---- turns -------------------------------------------------------------------------------------


class Engine:
    limits = KeyLimits(1, 1)

    def stats(self):
        return {"waiting": 0}


def test_a_ticket_holds_all_or_nothing():
    gate = Gate(Engine(), KeyLimits(requests=2, choices=5, tokens=10))
    first, second = (gate.enter("a", queues=False) for _ in range(2))
    with pytest.raises(ApiError) as refused:
        gate.enter("a", queues=False)
    assert (refused.value.status, refused.value.code) == (429, "too_many_requests")
    assert gate.enter("b", queues=False)  # has limits of its own
    first.take(choices=3, tokens=9)
    for amounts in ({"choices": 3}, {"choices": 2, "tokens": 2}):
        with pytest.raises(ApiError):
            second.take(**amounts)
    second.take(choices=2, tokens=1)
    assert gate.held("a") == {"requests": 2, "choices": 5, "tokens": 10}
    first.give_back("tokens")
    first.leave()
    first.leave()
    assert gate.held("a") == {"requests": 1, "choices": 2, "tokens": 1}
    second.leave()
    assert not gate.held("a")


def test_long_bodies_go_one_at_a_time_and_tenants_in_turn():
    """And short ones do not wait for them."""
    gate, order, now = Gate(Engine(), KeyLimits(99, 99)), [], [0]
    go_on = threading.Event()

    def work(name):
        now[0] += 1
        assert now == [1]
        go_on.wait()
        order.append(name)
        now[0] -= 1

    async def run():
        lanes = Lanes()
        jobs = []
        for name in ("a0", "a1", "a2", "a3", "b0", "b1", "c0"):
            ticket = gate.enter(name[0], queues=False)
            jobs.append(asyncio.create_task(lanes.run(ticket, 1 << 20, work, name)))
            await asyncio.sleep(0)
        jobs[2].cancel()
        ticket = gate.enter("a", queues=False)
        assert await lanes.run(ticket, 100, lambda: "short") == "short"
        go_on.set()
        await asyncio.gather(*jobs, return_exceptions=True)
        lanes.close()

    asyncio.run(run())
    assert order == ["a0", "a1", "b0", "c0", "a3", "b1"]


def test_short_bodies_of_a_tenant_do_not_wait_for_a_thousand_of_another():
    gate, begun = Gate(Engine(), KeyLimits(2000, 99)), []
    go_on = threading.Event()

    def work(name):
        begun.append(name)
        go_on.wait()

    async def run():
        lanes = Lanes()
        jobs = [
            asyncio.create_task(lanes.run(gate.enter(name, queues=False), 10, work, name))
            for name in ["a"] * 1000 + ["b"]
        ]
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(*jobs)
        lanes.close()

    asyncio.run(run())
    assert len(begun) == 1001 and begun.index("b") < 10


def test_a_neighbours_stream_goes_on():
    """While one client sends the longest bodies of every kind, another's stream has its tokens: at
    least one in each second of this process's time, which passes only while it has a core."""
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
            for _ in range(3):  # what holds others up does so each time
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


# Seconds of all cores together. What test_neighbours.py holds an idle machine to is a fourth of it.
LONGEST_GAP = 1.0
