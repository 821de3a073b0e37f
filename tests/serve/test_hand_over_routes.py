"""/v1/hand_over: off, refused, and requests that one server begins and another goes on with."""

import asyncio
import contextlib
import dataclasses
import json
import re
import subprocess
import sys
import threading

import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")

from helpers.paths import ROOT
from helpers.serve.fake_engine import FakeEngine, fake_model
from helpers.serve.live_server import OPERATOR_KEY, ServerProcess, eventually, key_options, serving
from helpers.serve.remote import remote
from helpers.serve.small_engine import CONFIG, hold, sequence
from jax_attn.serve import _options
from jax_attn.serve._engine.async_engine import AsyncEngine
from jax_attn.serve._engine.hand_over import _LENGTH, _MAGIC, HandedOver
from jax_attn.serve._engine.replicas import Replicas
from jax_attn.serve._openai.bounds import KeyLimits
from jax_attn.serve._scheduling.protocols import EngineStopped

OPERATOR, CLIENT = "operator-key-0123456789", "client-key-0123456789ab"
KEYS = {"api_keys": (CLIENT,), "operator_keys": (OPERATOR,)}
HAND_OVER, GO_ON = "/v1/hand_over", "/v1/hand_over/continue"
BYTES, JSON = "application/octet-stream", "application/json"
LIMITS = dataclasses.replace(CONFIG, batch_invariant=True)
BODY = {"prompt": "def add(a, b):\n    return a + b\n\n\ndef", "max_tokens": 12, "temperature": 0.9}


def post(server, path: str, body, media_type: str = JSON):
    return server.post(path, body, Content_Type=media_type, Authorization=f"Bearer {OPERATOR}")


def code_of(answer) -> tuple[int, str]:
    return answer.status, answer.error["code"]


@contextlib.contextmanager
def server_of(engine, model, **config):
    with serving(engine, model=model, **config) as server:
        eventually(lambda: server.get("/health").ok)
        yield server


def test_routes_are_off_and_for_operators(capsys):
    engine = FakeEngine(fake_model().tokenizer)
    with serving(engine, **KEYS) as server:
        for path in (HAND_OVER, GO_ON):
            assert code_of(post(server, path, {})) == (404, "no_hand_over")
    with serving(engine, max_hand_over_bytes=1 << 20, **KEYS) as server:
        for path in (HAND_OVER, GO_ON):
            assert server.post(path, {}).status == 401
            answer = server.post(path, {}, Authorization=f"Bearer {CLIENT}")
            assert code_of(answer) == (403, "operators_only")
        assert post(server, GO_ON, {}).status == 415
        assert post(server, GO_ON, bytes(2 << 20), BYTES).status == 413
        assert code_of(post(server, GO_ON, b"no", BYTES)) == (400, "not_handed_over")
        for body in ({"path": "/v1/embeddings", "body": {}}, {"path": "/v1/completions"}):
            assert post(server, HAND_OVER, body).status == 400
        two = {"path": "/v1/completions", "body": BODY | {"n": 2}}
        assert "one choice, got 2" in post(server, HAND_OVER, two).error["message"]
        wrong = {"path": "/v1/completions", "body": BODY | {"temperature": -1}}
        assert "temperature" in post(server, HAND_OVER, wrong).error["message"]
    with pytest.raises(SystemExit):
        _options.parse(["--hand-over-bytes", "1000"])
    assert "--hand-over-bytes: expected --operator-key-file" in capsys.readouterr().err


def test_the_answer_of_one_server(model):
    engine = AsyncEngine(model, LIMITS)
    with server_of(engine, model, max_hand_over_bytes=1 << 24, **KEYS) as server:
        path, bodies = "/v1/completions", []
        for more in ({"seed": 3, "logprobs": 2}, {"seed": 4, "stream": True}, {"max_tokens": 1}):
            body = BODY | {"return_token_ids": True} | more
            for num_tokens in (1, 5):
                request = {"path": path, "body": body, "num_tokens": num_tokens}
                moving = post(server, HAND_OVER, request)
                assert moving.ok, moving.body
                eventually(lambda: engine.stats()["running"] == 0)
                answer = post(server, GO_ON, moving.body, BYTES)
                assert answer.ok, answer.body
                bodies.append((body, answer.body))
        for body, answer in bodies:
            if "seed" in body:
                assert output(answer) == output(post(server, path, body).body)
        chat = {"messages": [{"role": "user", "content": "add"}], "max_tokens": 6, "seed": 1}
        chat |= {"logprobs": True}
        request = {"path": "/v1/chat/completions", "body": chat}
        moving = post(server, HAND_OVER, request)
        assert moving.ok, moving.body
        answer = post(server, GO_ON, moving.body, BYTES)
        assert output(answer.body) == output(post(server, request["path"], chat).body)
        # Without a seed the two servers would draw others.
        request = {"path": path, "body": BODY, "num_tokens": 4}
        moving = post(server, HAND_OVER, request).body
        seed = HandedOver.from_bytes(moving).params.seed
        answer = post(server, GO_ON, moving, BYTES).body
        assert output(answer) == output(post(server, path, BODY | {"seed": seed}).body)
        # Bytes of another request are refused.
        forged = HandedOver.from_bytes(moving)
        forged.so_far |= {"body": BODY | {"seed": 9, "max_tokens": 3}}
        refused = post(server, GO_ON, forged.to_bytes(), BYTES)
        assert code_of(refused) == (400, "not_handed_over")
        assert b"parameters: expected those of the request that was exported" in refused.body
    small = {"path": path, "body": BODY}
    with server_of(AsyncEngine(model, LIMITS), model, max_hand_over_bytes=1000, **KEYS) as server:
        assert code_of(post(server, HAND_OVER, small)) == (413, "too_many_bytes")


def forged(data: bytes, *path: str | int, value) -> bytes:
    """The bytes with another value in their header."""
    begin = len(_MAGIC) + _LENGTH.size
    end = begin + _LENGTH.unpack_from(data, len(_MAGIC))[0]
    plain = json.loads(data[begin:end])
    place = plain
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    header = json.dumps(plain).encode()
    return _MAGIC + _LENGTH.pack(len(header)) + header + data[end:]


FORGED = [
    (("so_far",), None),
    (("so_far",), "x"),
    (("so_far", "path"), []),
    (("so_far", "path"), 5),
    (("so_far", "body"), 5),
    (("tokens",), None),
    (("tokens", -1), 1.5),
    (("tokens", -1), "a"),
    (("tokens", -1), 5),  # not what the event has
    (("num_prompt",), 3.0),
    (("seconds_left",), "x"),
    (("params", "seed"), "x"),
    (("params", "seed"), 1.5),
    (("params", "seed"), None),
    (("params", "min_tokens"), False),
    (("so_far", "event", "tokens"), 5),
    (("so_far", "event", "tokens"), [1, 2]),
    (("so_far", "event", "text"), 5),
    (("so_far", "event", "logprobs"), [[1, "x", []]]),
    (("so_far", "event", "error"), 5),
    (("so_far", "event", "num_cached_tokens"), "x"),
    (("so_far", "event", "versions"), 5),
]


def test_forged_bytes_are_refused_and_harm_nobody(model):
    engine = AsyncEngine(model, LIMITS)
    with server_of(engine, model, max_hand_over_bytes=1 << 24, **KEYS) as server:
        request = {"path": "/v1/completions", "body": BODY | {"logprobs": 1}, "num_tokens": 3}
        data = post(server, HAND_OVER, request).body
        assert post(server, GO_ON, data, BYTES).ok
        num_steps = engine.stats()["steps"]
        for path, value in FORGED:
            answer = post(server, GO_ON, forged(data, *path, value=value), BYTES)
            assert answer.status == 400, (path, value, answer.body)
        deep = b'{"so_far":' + b"[" * 100_000
        deep = _MAGIC + _LENGTH.pack(len(deep)) + deep
        assert code_of(post(server, GO_ON, deep, BYTES)) == (400, "not_handed_over")
        assert engine.stats()["steps"] == num_steps


def output(answer: bytes) -> list:
    """The choices of a whole answer; the texts and reasons of a streamed one."""
    if not answer.startswith(b"data: "):
        return json.loads(answer)["choices"]
    events = [json.loads(x) for x in re.findall(r"data: (\{.*\})", answer.decode())]
    choices = [event["choices"][0] for event in events if event["choices"]]
    return ["".join(x["text"] for x in choices), [x["finish_reason"] for x in choices][-1]]


def test_a_client_that_leaves_and_bytes_that_never_come(model, monkeypatch):
    engine, held = AsyncEngine(model, LIMITS), threading.Event()
    moves = {"max_hand_over_bytes": 1 << 24, "key_limits": KeyLimits(requests=1, choices=1)}

    def begin(path: str, media_type: str, length: int, body: bytes = b""):
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {OPERATOR}\r\n"
        head += f"Content-Type: {media_type}\r\nContent-Length: {length}\r\n\r\n"
        return server.connect(head.encode() + body)

    with server_of(engine, model, **moves, **KEYS) as server:
        request = {"path": "/v1/completions", "body": BODY, "num_tokens": 11}
        raw = json.dumps(request).encode()
        with monkeypatch.context() as patch:
            # The first step ends once the engine has been told that the client is gone.
            hold(patch, engine, lambda: held.set() or True, lambda: bool(engine._commands))
            with begin(HAND_OVER, JSON, len(raw), raw):
                assert held.wait(60)
            eventually(lambda: engine.stats()["running"] == 0 and not engine._commands)
        eventually(
            lambda: post(server, HAND_OVER, request).ok
        )  # the only one that the key may have
        monkeypatch.setattr("jax_attn.serve._http.server._MOVE_SECONDS", 0.01)
        with begin(GO_ON, BYTES, 100) as connection:
            assert b" 408 " in connection.recv(1000)
        assert code_of(post(server, GO_ON, b"no", BYTES)) == (400, "not_handed_over")


@pytest.mark.parametrize("num", [1, 2])
def test_over_the_wire(model, num, monkeypatch):
    engines = [AsyncEngine(model, LIMITS) for _ in range(num)]
    engine = engines[0] if num == 1 else Replicas(engines)
    abort, aborted = engine.abort, set()
    monkeypatch.setattr(engine, "abort", lambda ids: aborted.update(ids) or abort(ids))

    def make(max_tokens=12):
        return sequence(range(100, 130), max_tokens=max_tokens)

    async def main():
        async def events(source):
            found = [event async for event in source]
            return [token for event in found for token in event.tokens], found

        async with remote(engine) as client:
            alone, _ = await events(client.generate([make()]))
            data = await client.hand_over(make(), 3, {"mine": 1})
            assert HandedOver.read_so_far(data)["mine"] == 1
            tokens, found = await events(client.go_on(data, make()))
            assert tokens == alone and len(found[0].tokens) >= 3
            assert found[0].num_cached_tokens is not None and found[-1].finish_reason == "length"
            # One that ends before it goes has nothing left to do.
            ended = await client.hand_over(make(max_tokens=2), 5, {})
            assert not HandedOver.from_bytes(ended).pages
            assert (await events(client.go_on(ended, make(max_tokens=2))))[0] == alone[:2]
            with pytest.raises(ValueError, match="prompt: expected those of the request"):
                await events(client.go_on(data, sequence([1, 2, 3])))
            with pytest.raises(ValueError, match="prompt: expected"):
                await client.hand_over(sequence([10**6]), 1, {})
            # A client that leaves ends its request.
            long = make(max_tokens=400)
            leaves = asyncio.create_task(client.hand_over(long, 399, {}))
            await asyncio.to_thread(eventually, lambda: client.stats()["running"] == 1)
            leaves.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaves
            await asyncio.to_thread(eventually, lambda: client.stats()["running"] == 0)
            await client.stop(drain=True)
            assert long.id in aborted
            with pytest.raises(EngineStopped):
                await client.hand_over(make(), 1, {})

    asyncio.run(main())


def test_a_replica_that_ends_it_leaves_it_to_another(model, monkeypatch):
    engines = [AsyncEngine(model, LIMITS) for _ in range(2)]
    replicas = Replicas(engines)

    async def main():
        for engine in engines:
            engine.start()
        try:
            alone = await engines[1].hand_over(sequence(), 3, {})
            tried = []

            async def ends(seq, num_tokens, so_far):  # as one that is paused meanwhile
                tried.append(seq.id)
                seq.tokens.append(7)
                raise EngineStopped("The engine does not run.")

            monkeypatch.setattr(engines[0], "hand_over", ends)
            monkeypatch.setattr(replicas, "order", lambda seq: [0, 1])
            data = await replicas.hand_over(sequence(), 3, {})
            assert tried
            here, there = HandedOver.from_bytes(data), HandedOver.from_bytes(alone)
            assert (here.num_prompt, here.tokens[:8]) == (there.num_prompt, there.tokens[:8])
        finally:
            await replicas.stop(drain=False)

    asyncio.run(main())


def test_two_servers_of_the_page(tmp_path):
    """docs/replicas.md: one process reads prompts, the other writes answers."""
    text = (ROOT / "docs/replicas.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"^```python\n(import json.*?)^```$", text, re.DOTALL | re.MULTILINE)
    (command,) = re.findall(r"^python -m jax_attn.serve (.*--hand-over-bytes.*)$", text, re.M)
    options = command.replace("--model DIR ", "").replace("--port 8001 ", "").split()
    options += [*key_options(tmp_path), "--max-step-tokens", "8", "--max-running", "2"]
    servers = [
        ServerProcess(tmp_path, *options, "--num-pages", "64", log=tmp_path / f"log{i}")
        for i in range(2)
    ]
    try:
        for server in servers:
            server.wait_until_ready()
        for old, server in zip(("8001", "8002"), servers, strict=True):
            program = program.replace(f"http://127.0.0.1:{old}", server.url)
        (tmp_path / "router.py").write_text(program, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, tmp_path / "router.py", OPERATOR_KEY],
            capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        assert done.returncode == 0 and "the same text" in done.stdout, done.stderr[-3000:]
    finally:
        for server in servers:
            server.close()
