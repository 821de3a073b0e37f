"""Requests of hostile clients: one attacker for each known way to hurt other clients.

An attacker is a coroutine that takes a `Target`. It ends by itself within some seconds, whatever
the server does. It raises AssertionError if the server answers with a 5xx, with an error that is no
sentence, or not at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import random
import resource
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from helpers.serve.live_server import Answer, ask

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, EMBEDDINGS = "/v1/responses", "/v1/embeddings"
BODY = 4 << 20  # bytes, the largest body that the server reads
FINAL = (200, 400, 401, 403, 404, 408, 409, 413, 415, 422, 429, 431)
SLOW_SECONDS = 3.0  # how long an attacker that holds something stays
LONGEST_SECONDS = 20.0  # an attacker without an answer leaves after this time


@dataclass
class Target:
    port: int
    key: str  # API key of the attacker's tenant
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    stay: float = SLOW_SECONDS

    async def post(self, path: str, body: dict | bytes, expected=FINAL, **headers) -> Answer | None:
        """Posts a body. None: the attacker left before an answer. A 429 is always accepted."""
        headers = {"Authorization": f"Bearer {self.key}"} | headers
        try:
            async with asyncio.timeout(LONGEST_SECONDS):
                answer = await ask(self.port, body, path, **headers)
        except TimeoutError:
            return None
        except ConnectionError:
            # Refused by its head. With "Connection: close" uvicorn does not wait for the rest of
            # the body. Sending the rest then resets the connection, sometimes before the answer is
            # read.
            assert len(body if isinstance(body, bytes) else json.dumps(body)) > 1 << 16
            return None
        check(answer, {*expected, 429})
        return answer

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    def head(self, path: str, length: int) -> bytes:
        return (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {self.key}\r\nContent-Length: {length}\r\n\r\n"
        ).encode()


def check(answer: Answer, expected=FINAL) -> None:
    assert answer.status in expected, (answer.status, answer.body[:500])
    if answer.status >= 400:
        error = answer.error
        assert error.keys() == {"message", "type", "param", "code", "reason"} and error["message"]
        assert len(answer.body) < 2000, len(answer.body)
    for line in answer.body.split(b"\n") if b"server_error" in answer.body else ():
        # An error in the middle of a stream has no status.
        assert not line.startswith(b'data: {"error"') or b'"server_error"' not in line, line[:500]


Attacker = Callable[[Target], Awaitable[object]]
ATTACKERS: dict[str, Attacker] = {}
HEAVY: set[str] = set()  # attackers that cost the machine a second or more, refused or not


def attacker(*, heavy: bool = False) -> Callable[[Attacker], Attacker]:
    def add(function: Attacker) -> Attacker:
        ATTACKERS[function.__name__] = function
        if heavy:
            HEAVY.add(function.__name__)
        return function

    return add


# ---- bodies ------------------------------------------------------------------------------------


@functools.cache
def repeated(begin: bytes, each: bytes, end: bytes) -> bytes:
    """begin, then `each` as often as fits the longest body, then end."""
    return begin + each * ((BODY - len(begin) - len(end)) // len(each)) + end


@attacker(heavy=True)
async def negative_tokens(target: Target):
    """Would give 1.4 M validation errors, if all were collected."""
    await target.post(COMPLETIONS, repeated(b'{"prompt":[0', b",-1", b"]}"), {400})


@attacker(heavy=True)
async def tokens_of_all_kinds(target: Target):
    """Like negative_tokens, but each error has its own sentence: texts, floats, lists, objects."""
    body = repeated(b'{"prompt":[0', b',"a",1.5,[],{},null,true,1e400', b"]}")
    await target.post(COMPLETIONS, body, {400})


@attacker(heavy=True)
async def lists_of_tokens(target: Target):
    await target.post(COMPLETIONS, repeated(b'{"prompt":[[0]', b",[-1]", b"]}"), {400})


@attacker(heavy=True)
async def too_many_tokens(target: Target):
    """Sends too many tokens, each of them valid."""
    for path, name in ((COMPLETIONS, b"prompt"), ("/detokenize", b"tokens")):
        await target.post(path, repeated(b'{"%b":[0' % name, b",1", b"]}"))


@attacker(heavy=True)
async def unknown_keys(target: Target):
    body = b"{" + b",".join(b'"k%d":%d' % (i, i) for i in range(250_000)) + b"}"
    await target.post(COMPLETIONS, body, {400})


@attacker(heavy=True)
async def errors_in_messages(target: Target):
    """A message is one of several kinds, and pydantic gives a reason for each kind."""
    await target.post(CHAT, repeated(b'{"messages":[{}', b',{"role":"u"}', b"]}"), {400})


@attacker(heavy=True)
async def errors_in_parts(target: Target):
    body = repeated(b'{"messages":[{"role":"user","content":[{}', b",{}", b"]}]}")
    await target.post(CHAT, body, {400})


@attacker(heavy=True)
async def huge_numbers(target: Target):
    """Python turns decimal digits into an integer in quadratic time."""
    for name in (b"prompt", b"user", b"metadata"):
        await target.post(COMPLETIONS, repeated(b'{"%b":[' % name, b"9", b"]}"))


@attacker(heavy=True)
async def nesting(target: Target):
    for name in (b"prompt", b"json_schema", b"user", b"chat_template_kwargs"):
        for begin, end in ((b"[", b"]"), (b'{"a":', b"}")):
            depth = BODY // (len(begin) + len(end)) - 20
            body = b'{"prompt":"a","%b":%b1%b}' % (name, begin * depth, end * depth)
            await target.post(COMPLETIONS, body)
        body = b'{"prompt":"a","%b":%b1%b}' % (name, b'{"a":' * 150, b"}" * 150)
        await target.post(COMPLETIONS, body)


@attacker(heavy=True)
async def ignored_fields(target: Target):
    """Fields that are accepted and ignored are still parsed."""
    body = repeated(b'{"prompt":"a","max_tokens":1,"metadata":[{}', b",{}", b"]}")
    await target.post(COMPLETIONS, body)


@attacker(heavy=True)
async def huge_texts(target: Target):
    """Sends a huge text to every route that tokenizes."""
    text = repeated(b"", b"a b. ", b"")[:-400]
    for path, begin, end in [
        (COMPLETIONS, b'{"prompt":"', b'"}'),
        (CHAT, b'{"messages":[{"role":"user","content":"', b'"}]}'),
        ("/tokenize", b'{"prompt":"', b'"}'),
        ("/tokenize", b'{"messages":[{"role":"user","content":"', b'"}]}'),
    ]:
        await target.post(path, begin + text + end, {400, 413})


@attacker(heavy=True)
async def texts_without_a_space(target: Target):
    """Sends one word of 4 MB, and letters of three bytes each."""
    for letter in (b"a", "漢".encode(), b"\\u0000"):
        await target.post(COMPLETIONS, repeated(b'{"prompt":"', letter, b'"}'), {400, 413})


@attacker(heavy=True)
async def many_texts(target: Target):
    """Sends many texts, each as long as allowed."""
    body = {"prompt": ["a b. " * 400] * 64, "max_tokens": 1}
    await target.post(COMPLETIONS, body)


@attacker(heavy=True)
async def many_messages(target: Target):
    messages = [{"role": "user", "content": "a b. " * 300}] * 2048
    await target.post(CHAT, {"messages": messages}, {400, 413})


@attacker(heavy=True)
async def template_variables(target: Target):
    """Sends a megabyte of template variables."""
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "chat_template_kwargs": {"x": ["a" * 100] * 20_000},
        "max_tokens": 1,
    }
    await target.post(CHAT, body)


@attacker(heavy=True)
async def errors_in_items(target: Target):
    """Sends an input item of one of many kinds, and a text, a tool and a format of 4 MB."""
    for raw in (
        repeated(b'{"input":[{}', b',{"type":"m"}', b"]}"),
        repeated(b'{"input":[{"role":"user","content":[{}', b',{"type":"input_text"}', b"]}]}"),
        repeated(b'{"input":"a","tools":[{}', b",{}", b"]}"),
    ):
        await target.post(RESPONSES, raw, {400})
    await target.post(RESPONSES, repeated(b'{"input":"', b"a b. ", b'"}'), {400, 413})
    await target.post(RESPONSES, repeated(b'{"input":"a","metadata":{"a":"', b"b", b'"}}'), {400})


@attacker(heavy=True)
async def stored_responses(target: Target):
    """Stores the longest responses allowed, and continues from them."""
    body = {"input": "a b. " * 300, "max_output_tokens": 2, "store": True}
    answers = await asyncio.gather(*(target.post(RESPONSES, body) for _ in range(40)))
    for answer in answers[:8]:
        if answer is not None and answer.ok:
            more = body | {"input": "a", "previous_response_id": answer.json["id"]}
            await target.post(RESPONSES, more)


@attacker(heavy=True)
async def vectors_of_much(target: Target):
    """Asks for many embeddings; a server without an embedding model answers 404."""
    text = "a b. " * 1500
    for raw in (
        repeated(b'{"input":[0', b",-1", b"]}"),
        repeated(b'{"input":[[0]', b",[-1]", b"]}"),
        repeated(b'{"input":["a"', b',"a"', b"]}"),
        repeated(b'{"input":"', b"a b. ", b'"}'),
        json.dumps({"input": [text] * 64}).encode(),
        json.dumps({"input": [[5] * 500] * 500, "encoding_format": "base64"}).encode(),
    ):
        await target.post(EMBEDDINGS, raw)


@attacker()
async def broken_json(target: Target):
    await target.post(COMPLETIONS, target.rng.choice([b"{", b"\xff", b"[" * 99_999, b""]), {400})


@attacker()
async def invalid(target: Target):
    """Sends common small mistakes."""
    body = target.rng.choice(
        [
            {},
            {"prompt": []},
            {"prompt": "a", "max_tokens": -1},
            {"prompt": "a", "max_tokens": 10**9},
            {"prompt": [10**7]},
            {"prompt": "a", "n": 1000},
            {"prompt": "a", "temperature": "hot"},
            {"prompt": "a", "stop": ["a"] * 17},
            {"prompt": "a", "json_schema": {"type": "no such"}},
            {"prompt": "a", "regex": "("},
            {"prompt": "a", "grammar": "start: nothing"},
            {"prompt": "a", "priority": -100_000},
        ]
    )
    await target.post(COMPLETIONS, body, {400})


# ---- grammars ----------------------------------------------------------------------------------

AMBIGUOUS = 'start: s\ns: s s s | s s | /[a-z ]/ | ""'


@attacker(heavy=True)
async def ambiguous_grammar(target: Target):
    """Sends a grammar whose masks take a second and more."""
    body = {"prompt": "a", "grammar": AMBIGUOUS, "n": 4, "max_tokens": 200, "ignore_eos": True}
    await target.post(COMPLETIONS, body, {200, 400})


@attacker(heavy=True)
async def ambiguous_streams(target: Target):
    """Streams one by one; a stream that has begun cannot fail with a status."""
    body = {"prompt": "a", "grammar": AMBIGUOUS, "max_tokens": 200, "stream": True}
    await asyncio.gather(*(target.post(COMPLETIONS, body) for _ in range(4)))


@attacker(heavy=True)
async def slow_schemas(target: Target):
    """Schemas that take seconds to compile; each differs, so that no cache helps."""
    number = 999_983 - 2 * target.rng.randrange(5000)
    body = {"prompt": "a", "max_tokens": 1}
    for schema in [
        {"type": "integer", "multipleOf": number},
        {"type": "number", "multipleOf": number / 1000},
        {"type": "string", "pattern": f"^(a|b|ab|ba){{{number % 1000}}}$"},
        {"type": "array", "minItems": 9000 + number % 1000, "items": {"type": "integer"}},
    ]:
        await target.post(COMPLETIONS, body | {"json_schema": schema}, {200, 400})


@attacker(heavy=True)
async def many_slow_schemas(target: Target):
    """Sends more slow schemas at once than the compiling pool has threads."""
    await asyncio.gather(
        *(
            target.post(
                COMPLETIONS,
                {"prompt": "a", "json_schema": {"type": "integer", "multipleOf": 990_001 + 2 * i}},
                {200, 400, 429},
            )
            for i in range(12)
        )
    )


@attacker(heavy=True)
async def regex_bombs(target: Target):
    for regex in (
        "((a{1,100}){1,100}){1,100}",
        "(.*a){20}",
        "([a-z]+[0-9]*)+x" * 20,
        f"(a|b|ab){{{target.rng.randrange(900, 999)}}}",
        r"(?:\p{L}|\p{N}){500}",
    ):
        await target.post(COMPLETIONS, {"prompt": "a", "regex": regex, "max_tokens": 30})


@attacker(heavy=True)
async def wide_schemas(target: Target):
    """Schemas with alternatives, properties and references up to the cap on characters."""
    tag = target.rng.randrange(1 << 30)
    names = [f"p{tag}_{i}" for i in range(900)]
    recursive = {"anyOf": [{"$ref": "#"}, {"type": "null"}]}
    for schema in (
        {"enum": names * 3},
        {"type": "object", "properties": {name: {"type": "string"} for name in names}},
        {"oneOf": [{"const": name} for name in names]},
        {"type": "object", "properties": dict.fromkeys(names[:200], recursive)},
        {"allOf": [{"pattern": f"{name}.*"} for name in names[:100]]},
    ):
        body = {"prompt": "a", "json_schema": schema, "max_tokens": 20}
        await target.post(COMPLETIONS, body, {200, 400})


@attacker(heavy=True)
async def many_tools(target: Target):
    function = {"parameters": {"type": "object", "properties": {"x": {"enum": ["y" * 400]}}}}
    tools = [
        {
            "type": "function",
            "function": function | {"name": f"f{i}_{target.rng.randrange(1 << 30)}"},
        }
        for i in range(128)
    ]
    body = {"messages": [{"role": "user", "content": "a"}], "tools": tools}
    await target.post(CHAT, body | {"tool_choice": "required", "max_tokens": 20})


# ---- answers -----------------------------------------------------------------------------------


@attacker(heavy=True)
async def many_logprobs(target: Target):
    """Asks for 41 MB of answer, which takes seconds to write."""
    body = {"prompt": "a", "n": 16, "max_tokens": 2000, "logprobs": 20, "ignore_eos": True}
    await target.post(COMPLETIONS, body)
    chat = {"messages": [{"role": "user", "content": "a"}], "n": 16, "max_tokens": 1900}
    chat |= {"logprobs": True, "top_logprobs": 20, "ignore_eos": True}
    await target.post(CHAT, chat)


@attacker(heavy=True)
async def scored_prompts(target: Target):
    body = {"prompt": [[5] * 2000] * 64, "echo": True, "logprobs": 1, "max_tokens": 0}
    await target.post(COMPLETIONS, body)


@attacker(heavy=True)
async def prompt_logprobs(target: Target):
    """Asks for the most alternatives for each token of the longest and most prompts allowed."""
    for num_prompts, num_tokens, num_top in ((64, 2000, 20), (1, 2000, 20), (16, 100, 20)):
        body = {"prompt": [[5] * num_tokens] * num_prompts, "prompt_logprobs": num_top}
        await target.post(COMPLETIONS, body | {"max_tokens": 1})
    messages = [{"role": "user", "content": "a b. " * 300}]
    await target.post(CHAT, {"messages": messages, "prompt_logprobs": 20, "max_tokens": 1})


@attacker(heavy=True)
async def repeats_itself(target: Target):
    """A prompt of one repeated phrase, whose continuation gets many drafts (if drafts are on)."""
    body = {"prompt": "a b c d " * 200, "n": 16, "max_tokens": 400, "ignore_eos": True}
    await target.post(COMPLETIONS, body | {"temperature": 0, "logit_bias": {"5": 100}})


@attacker(heavy=True)
async def long_choices(target: Target):
    """Asks for the most and the longest choices allowed, not in a stream."""
    body = {"prompt": "a", "n": 64, "max_tokens": 2000, "ignore_eos": True}
    await target.post(COMPLETIONS, body)


@attacker(heavy=True)
async def min_tokens(target: Target):
    body = {"prompt": "a", "min_tokens": 300, "max_tokens": 300, "n": 8}
    await target.post(COMPLETIONS, body)


@attacker(heavy=True)
async def costly_sampling(target: Target):
    """Asks for every kind of sampling work that a step can do for a sequence."""
    body = {
        "prompt": "a",
        "n": 16,
        "max_tokens": 200,
        "top_k": 2,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.3,
        "presence_penalty": 1,
        "frequency_penalty": 1,
        "logit_bias": {str(i): 1 for i in range(300)},
        "stop": [f"{'never ' * 40}{i}" for i in range(16)],
        "stop_token_ids": list(range(64)),
        "logprobs": 5,
        "seed": 1,
    }
    await target.post(COMPLETIONS, body)


@attacker(heavy=True)
async def stops_that_nearly_match(target: Target):
    """Text is held back while it may still become one of the stop strings."""
    stops = [" " * 255 + chr(97 + i) for i in range(16)]
    body = {"prompt": "a", "logit_bias": {"199": 100}, "max_tokens": 800, "n": 16, "stop": stops}
    await target.post(COMPLETIONS, body | {"ignore_eos": True})


@attacker(heavy=True)
async def letters_that_never_end(target: Target):
    """Half a UTF-8 letter again and again: text is held back until the letter is whole."""
    tokens = {str(token): 100 for token in (195, 226, 240)}
    body = {"prompt": "a", "logit_bias": tokens, "max_tokens": 1500, "n": 8, "ignore_eos": True}
    await target.post(COMPLETIONS, body | {"stream": True})


# ---- the queue ---------------------------------------------------------------------------------


@attacker(heavy=True)
async def full_queue(target: Target):
    """1,024 sequences of one key, with the highest priority if the key may ask for it."""
    body = {"prompt": "a", "n": 64, "max_tokens": 64, "ignore_eos": True, "priority": -1000}
    posts = [asyncio.create_task(target.post(COMPLETIONS, body)) for _ in range(24)]
    await asyncio.wait(posts, timeout=LONGEST_SECONDS)
    for post in posts:
        post.cancel()
    results = await asyncio.gather(*posts, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result


@attacker(heavy=True)
async def wrong_requests_while_the_queue_is_full(target: Target):
    """Invalid requests at a full queue are refused early, for the queue or for their fault."""
    text = repeated(b'{"prompt":"', b"a b. ", b'"}')
    await asyncio.gather(*(target.post(COMPLETIONS, text) for _ in range(8)))


@attacker()
async def salts(target: Target):
    body = {"prompt": "a " * 200, "cache_salt": str(target.rng.random()), "max_tokens": 1}
    await target.post(COMPLETIONS, body)


@attacker()
async def short_deadline(target: Target):
    await target.post(COMPLETIONS, {"prompt": "a" * 500, "deadline": 1e-6, "max_tokens": 9})


@attacker()
async def leaves_at_once(target: Target):
    body = {"prompt": "a", "n": 16, "max_tokens": 500, "ignore_eos": True, "stream": True}
    key = f"Bearer {target.key}"
    with contextlib.suppress(ConnectionError):
        await ask(target.port, body, leave_after=target.rng.randrange(3), Authorization=key)


def allow_many_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# ---- connections -------------------------------------------------------------------------------


@contextlib.contextmanager
def deaf(target: Target, request: bytes) -> Iterator[socket.socket]:
    """A connection with a tiny receive buffer that the client does not read."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.connect(("127.0.0.1", target.port))
        connection.sendall(request)
        yield connection


@attacker()
async def reads_nothing(target: Target):
    body = {"prompt": "a", "n": 4, "max_tokens": 1900, "ignore_eos": True, "stream": True}
    raw = json.dumps(body | {"logprobs": 20}).encode()
    with deaf(target, target.head(COMPLETIONS, len(raw)) + raw):
        await asyncio.sleep(target.stay)


@attacker()
async def reads_slowly(target: Target):
    raw = json.dumps(
        {"prompt": "a", "max_tokens": 500, "ignore_eos": True, "stream": True, "logprobs": 5}
    ).encode()
    with deaf(target, target.head(COMPLETIONS, len(raw)) + raw) as connection:
        connection.setblocking(False)
        for _ in range(20):
            await asyncio.sleep(target.stay / 20)
            with contextlib.suppress(BlockingIOError, ConnectionError):
                connection.recv(64)


@attacker(heavy=True)
async def chunks_of_a_byte(target: Target):
    """Bodies in chunks of a byte, from many connections: work for each byte that is sent."""

    async def send() -> None:
        _, writer = await target.connect()
        head = target.head(COMPLETIONS, 0)
        head = head.replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
        with contextlib.suppress(ConnectionError), contextlib.closing(writer):
            writer.write(head)
            for _ in range(40):
                writer.write(b"1\r\n \r\n" * 10_000)
                await writer.drain()

    async with asyncio.timeout(LONGEST_SECONDS):
        await asyncio.gather(*(send() for _ in range(20)))


@attacker()
async def sends_slowly(target: Target):
    """Sends headers, then a body, byte by byte, and leaves in the middle."""
    raw = target.head(COMPLETIONS, 100) + b'{"prompt": "a'
    _, writer = await target.connect()
    with contextlib.suppress(ConnectionError), contextlib.closing(writer):
        for i in range(target.rng.randrange(len(raw))):
            writer.write(raw[i : i + 1])
            if i % 10 == 0:
                await asyncio.sleep(target.stay / 30)


@attacker()
async def asks_for_nothing(target: Target):
    writers = [(await target.connect())[1] for _ in range(20)]
    await asyncio.sleep(target.stay)
    for writer in writers:
        writer.close()


@attacker(heavy=True)
async def three_thousand_connections(target: Target):
    """Opens silent connections. Some may be refused or cut; all other clients go on."""
    allow_many_files()
    writers = []
    for _ in range(3000):
        with contextlib.suppress(OSError):
            writers.append((await target.connect())[1])
    await asyncio.sleep(target.stay)
    for writer in writers:
        writer.close()


@attacker()
async def resets(target: Target):
    """Resets connections (RST) in the middle of a body and of an answer."""
    raw = json.dumps({"prompt": "a", "max_tokens": 100, "stream": True}).encode()
    request = target.head(COMPLETIONS, len(raw)) + raw
    for length in (len(request) // 2, len(request)):
        _, writer = await target.connect()
        writer.write(request[:length])
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        await asyncio.sleep(0.01)
        linger = b"\1\0\0\0\0\0\0\0"
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()


@attacker()
async def pipelines(target: Target):
    """Sends fifty requests at once and awaits one answer; the tenant's other work may delay it."""
    raw = json.dumps({"prompt": "a", "max_tokens": 2}).encode()
    reader, writer = await target.connect()
    with contextlib.closing(writer), contextlib.suppress(ConnectionError, TimeoutError):
        writer.write((target.head(COMPLETIONS, len(raw)) + raw) * 50)
        async with asyncio.timeout(LONGEST_SECONDS):
            status = await reader.readline()
            assert status.split()[1:2] in ([b"200"], [b"429"]), status  # the queue may be full


@attacker(heavy=True)
async def pipelines_that_need_no_engine(target: Target):
    """Thousands of requests of a millisecond each, from few connections."""
    request = b"GET /version HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %b\r\n\r\n"

    async def send() -> None:
        reader, writer = await target.connect()
        with contextlib.closing(writer), contextlib.suppress(ConnectionError, TimeoutError):
            writer.write(request % target.key.encode() * 2000)
            async with asyncio.timeout(target.stay):
                while await reader.read(1 << 16):
                    pass

    await asyncio.gather(*(send() for _ in range(20)))


@attacker(heavy=True)
async def connects_again_and_again(target: Target):
    """A hundred clients that ask, do not wait for the answer, and connect anew."""

    async def connect() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(target.stay):
                while True:
                    with contextlib.suppress(ConnectionError):
                        _, writer = await target.connect()
                        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                        writer.close()

    await asyncio.gather(*(connect() for _ in range(100)))


@attacker(heavy=True)
async def many_prompts(target: Target):
    """Prompts of 600 tokens that want one token each, from 200 connections."""
    free = asyncio.Semaphore(200)

    async def send(number: int) -> None:
        async with free:
            body = {"prompt": f"{number} " + "a b c " * 200, "max_tokens": 1}
            await target.post(COMPLETIONS, body)

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(2 * target.stay):
            await asyncio.gather(*map(send, range(400)))


@attacker()
async def no_http(target: Target):
    junk = target.rng.choice(
        [b"\x16\x03\x01\x02\x00\x01", b"\0" * 50, b"GET\r\n\r\n", b"\xff\r\n\r\n"]
    )
    reader, writer = await target.connect()
    with contextlib.closing(writer), contextlib.suppress(ConnectionError):
        writer.write(junk)
        writer.write_eof()
        async with asyncio.timeout(LONGEST_SECONDS):
            raw = await reader.read()
        assert not raw or b" 400 " in raw.partition(b"\r\n")[0], raw


@attacker()
async def bad_keys(target: Target):
    for value in (
        b"Basic \xe9",
        b"Basic !",
        b"Bearer \xff\xfe",
        b"Bearer",
        b"x" * 9000,
        b"Basic ==",
    ):
        raw = b"Authorization: " + value + b"\r\n"
        answer = await ask(target.port, {"prompt": "a"}, head=raw)
        check(answer, {401, 400, 403, 431, 200} if not target.key else {401, 400, 431})


@attacker()
async def strange_ids(target: Target):
    for value in (b"a" * 9000, b"\xff\xfe", b'"; DROP', b"%0d%0aX: y", b"", b"\x1b[31m"):
        raw = b"X-Request-Id: " + value + f"\r\nAuthorization: Bearer {target.key}\r\n".encode()
        check(await ask(target.port, {"prompt": "a", "max_tokens": 1}, head=raw))


@attacker()
async def looks_around(target: Target):
    """Asks for routes that do not generate, and for unknown ones."""
    for path in (
        "/debug/state",
        "/metrics",
        "/v1/models/" + "%00" * 2000,
        "/" + "../" * 99,
        "/?" + "a" * 9000,
    ):
        key = f"Bearer {target.key}"
        answer = await ask(target.port, None, path, Authorization=key)
        assert answer.status in FINAL, answer.status


@attacker(heavy=True)
async def polls(target: Target):
    """Repeats the most expensive requests that need no prompt."""
    key = f"Bearer {target.key}"
    for _ in range(20):
        await asyncio.gather(
            *(ask(target.port, None, "/debug/state", Authorization=key) for _ in range(10))
        )
