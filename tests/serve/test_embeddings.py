"""/v1/embeddings over HTTP, with small models of every pooling."""

import base64
import contextlib
import threading
import time
import types

import numpy as np
import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")
pytest.importorskip("uvicorn", reason="needs the extra `serve`")

from helpers import embedding_cases
from helpers.serve.bystander import bystanding
from helpers.serve.live_server import (
    KEYS,
    ServerProcess,
    eventually,
    key_options,
    post_bytes,
    serving,
    serving_encoder,
)
from jax_attn import models
from jax_attn.serve._engine.embedder import Embedder, _chunk
from jax_attn.serve._openai import embeddings
from jax_attn.serve._openai.bounds import KeyLimits
from jax_attn.serve._scheduling.protocols import EmbedderStopped

ROUTE = "/v1/embeddings"
TOLERANCE = 1e-5
NUM_TRIES = 3  # as in test_neighbours.py
LONG = {
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "max_position_embeddings": 8194,
}


def load(tmp_path_factory, name: str) -> models.EmbeddingModel:
    directory = tmp_path_factory.mktemp("model")
    return models.load_embedding(embedding_cases.write(directory, name), "float32")


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return load(tmp_path_factory, "bert mean")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return load(tmp_path_factory, "qwen3")


@pytest.fixture(scope="module")
def server(bert):
    with serving_encoder(bert) as server:
        yield server


@pytest.fixture(scope="module")
def qwen_server(qwen):
    with serving_encoder(qwen) as server:
        yield server


def vectors_of(model, sequences) -> np.ndarray:
    batch = models.EmbeddingBatch.make(model, sequences, 96, 8)
    return np.asarray(models.embed(model, batch))[: len(sequences)]


def vectors(answer) -> np.ndarray:
    assert answer.ok, answer.body
    data = answer.json["data"]
    assert [entry["index"] for entry in data] == list(range(len(data)))
    assert {entry["object"] for entry in data} == {"embedding"}
    return np.array([entry["embedding"] for entry in data], np.float32)


# ---- answers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "sequences"),
    [
        ("w5 w6", [[1, 5, 6, 2]]),
        (["w5", "w7 nothing-like-it w8"], [[1, 5, 2], [1, 7, 0, 0, 0, 0, 0, 8, 2]]),
        ([5, 6], [[5, 6]]),
        ([[5], [6, 7, 8.0]], [[5], [6, 7, 8]]),
    ],
)
def test_every_kind_of_input(server, bert, given, sequences):
    answer = server.post(ROUTE, {"model": "vectors", "input": given, "user": "me"})
    assert np.abs(vectors(answer) - vectors_of(bert, sequences)).max() < TOLERANCE
    n = sum(map(len, sequences))
    assert answer.json["usage"] == {"prompt_tokens": n, "total_tokens": n}
    assert answer.json["object"] == "list" and answer.json["model"] == "vectors"
    assert answer.headers["cache-control"] == "no-store"


def test_texts_longer_than_the_tokenizers_own_limit_are_not_cut(server, bert):
    answer = server.post(ROUTE, {"input": " ".join(["w9"] * 40)})
    assert np.abs(vectors(answer) - vectors_of(bert, [[1, *[9] * 40, 2]])).max() < TOLERANCE


def test_base64_is_little_endian_float32(server):
    floats = vectors(server.post(ROUTE, {"input": ["w5", "w6"]}))
    answer = server.post(ROUTE, {"input": ["w5", "w6"], "encoding_format": "base64"})
    decoded = [base64.b64decode(entry["embedding"]) for entry in answer.json["data"]]
    assert (np.array([np.frombuffer(each, "<f4") for each in decoded]) == floats).all()


def test_dimensions_are_cut_and_of_length_one(qwen_server):
    whole = vectors(qwen_server.post(ROUTE, {"input": "w5 w6"}))[0]
    (cut,) = vectors(qwen_server.post(ROUTE, {"input": "w5 w6", "dimensions": 5}))
    assert np.allclose(cut, whole[:5] / np.linalg.norm(whole[:5]), atol=1e-6)
    assert len(vectors(qwen_server.post(ROUTE, {"input": "w5", "dimensions": 32}))[0]) == 32


def test_more_inputs_than_a_batch_holds(server, bert):
    sequences = [[1 + i % 40, i % 7] for i in range(150)]
    got = vectors(server.post(ROUTE, {"input": sequences}))
    for i in (0, 63, 64, 149):
        assert np.abs(got[i] - vectors_of(bert, [sequences[i]])[0]).max() < TOLERANCE


def test_models_are_both_listed(server):
    cards = {card["id"]: card["max_model_len"] for card in server.get("/v1/models").json["data"]}
    assert cards["vectors"] == 64 and "tiny" in cards
    card = server.get("/v1/models/vectors").json
    assert card["max_model_len"] == 64 and card["features"] == ["embeddings"]
    assert server.get("/v1/models/tiny").json["features"] == ["completions", "chat"]
    assert server.get("/v1/models/other").status == 404


def test_metrics_and_log(server, caplog):
    caplog.set_level("INFO", "jax_attn.serve.access")

    def value(name: str) -> float:
        lines = server.get("/metrics").body.decode().splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(name + " "))

    completed = 'jax_attn_requests_total{outcome="completed"}'
    before = value("jax_attn_embedding_tokens_total"), value(completed)
    assert server.post(ROUTE, {"input": [[5] * 9, [6]]}).ok
    after = value("jax_attn_embedding_tokens_total"), value(completed)
    assert after == (before[0] + 10, before[1] + 1)
    (line,) = [r.message for r in caplog.records if ROUTE in r.message]
    assert "status=200 prompt_tokens=10 output_tokens=0 queue_s=0." in line


# ---- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status", "param", "code", "words"),
    [
        ({}, 400, "input", "missing_required_parameter", "input"),
        ({"input": ""}, 400, "input", "string_below_min_length", "input"),
        ({"input": ["w5", ""]}, 400, "input[1]", "string_below_min_length", "input[1]"),
        ({"input": []}, 400, "input", "array_below_min_length", "input"),
        ({"input": [[]]}, 400, "input[0]", "invalid_value", "no tokens"),
        ({"input": 5}, 400, "input", None, "expected a text, a list of tokens"),
        ({"input": [[5], "w5"]}, 400, "input[1]", None, "expected a list of tokens"),
        ({"input": [["w5"]]}, 400, None, None, "expected a token"),
        ({"input": [48]}, 400, "input", "invalid_value", "beyond the vocabulary of 48"),
        ({"input": [-1]}, 400, None, None, "expected a token"),
        (
            {"input": [[5], [5] * 65]},
            400,
            "input[1]",
            "context_length_exceeded",
            "maximum context length is 64 tokens. However, your input[1] resulted in 65 tokens",
        ),
        ({"input": " ".join(["w5"] * 63)}, 400, "input", "context_length_exceeded", "65 tokens"),
        ({"input": "w5 " * 100_000}, 400, "input", "context_length_exceeded", "over 128 tokens"),
        ({"input": ["w5"] * 2049}, 400, "input", "array_above_max_length", "2048"),
        ({"input": [[5] * 64] * 2048 + [[5]]}, 400, "input", "array_above_max_length", "2048"),
        ({"input": "w5", "model": "tiny"}, 404, "model", "model_not_found", "'vectors' does"),
        ({"input": "w5", "dimensions": 16}, 400, "dimensions", "invalid_value", "cannot be cut"),
        ({"input": "w5", "dimensions": 0}, 400, "dimensions", "integer_below_min_value", "1"),
        ({"input": "w5", "encoding_format": "int8"}, 400, "encoding_format", None, "'float'"),
    ],
)
def test_what_is_wrong_is_said(server, body, status, param, code, words):
    answer = server.post(ROUTE, body)
    assert answer.status == status, answer.body
    error = answer.error
    assert error["type"] == "invalid_request_error" and words in error["message"]
    assert param is None or error["param"] == param
    assert code is None or error["code"] == code


def test_dimensions_that_the_model_has_not(qwen_server):
    error = qwen_server.post(ROUTE, {"input": "w5", "dimensions": 33}).error
    assert error["param"] == "dimensions" and "expected 1 to 32, got 33" in error["message"]


def test_tokens_of_one_request_are_bounded(server, monkeypatch):
    monkeypatch.setattr(embeddings, "MAX_REQUEST_TOKENS", 100)
    assert server.post(ROUTE, {"input": [[5] * 50] * 2}).ok
    error = server.post(ROUTE, {"input": [[5] * 50] * 2 + [[6]]}).error
    assert error["message"] == "input: more than 100 tokens in one request"


def test_bytes_of_vectors_are_bounded(bert):
    limits = KeyLimits(requests=9, choices=9, embedding_bytes=32 * 4 * 2)
    with serving_encoder(bert, key_limits=limits) as server:
        assert server.post(ROUTE, {"input": [[5], [6]]}).ok
        error = server.post(ROUTE, {"input": [[5], [6], [7]]}).error
        assert error["code"] == "too_many_embedding_bytes"
        assert server.post(ROUTE, {"input": [[5], [6]]}).ok  # all limits were given back


def test_without_an_embedding_model():
    with serving() as server:
        answer = server.post(ROUTE, {"input": "w5"})
        assert answer.status == 404 and answer.error["code"] == "model_not_found"
        assert "--embedding-model" in answer.error["message"]


def test_two_models_of_one_name(bert):
    with (
        pytest.raises(ValueError, match="two models are called 'tiny'"),
        serving(embedding=(bert, Embedder(bert, "tiny"))),
    ):
        pass


@pytest.mark.parametrize(
    ("num_tokens", "each", "chunk"), [(256, 1, 256), (256, 5, 128), (256, 9, 64), (256, 99, 32)]
)
def test_pieces_have_at_most_so_many_operations(num_tokens, each, chunk):
    model = types.SimpleNamespace(operations=lambda n: each if n == num_tokens else 0)
    assert _chunk(model, num_tokens, 1000) == chunk
    assert _chunk(model, num_tokens, each * num_tokens) == num_tokens


# ---- the embedder ------------------------------------------------------------------------------


class Held:
    """Holds each batch of an embedder until it is told to go on, and records the batches."""

    def __init__(self, embedder, monkeypatch):
        self.batches: list[list[tuple[str, list[int]]]] = []
        self._gate = threading.Semaphore(0)
        compute = embedder._compute

        def held(batch):
            self.batches.append([(job.tenant, job.sequences[row]) for job, row in batch])
            self._gate.acquire()
            compute(batch)

        monkeypatch.setattr(embedder, "_compute", held)

    def release(self, n: int = 1000) -> None:
        self._gate.release(n)


@pytest.fixture
def embedder(bert):
    embedder = Embedder(bert, "vectors")
    ready = threading.Event()
    embedder.start(ready.set)
    assert ready.wait(240)
    yield embedder
    embedder.stop()


def test_requests_are_combined_up_to_the_budget(embedder, bert, monkeypatch):
    held = Held(embedder, monkeypatch)
    first = embedder.submit("", [[5]])
    eventually(lambda: held.batches)
    jobs = [embedder.submit("", [[i] * 30]) for i in range(1, 21)]
    held.release()
    for job in (first, *jobs):
        job.done.result(240)
    assert [len(batch) for batch in held.batches] == [1, 17, 3]  # of 512 tokens at most
    for i, job in enumerate(jobs, 1):
        assert np.abs(job.vectors - vectors_of(bert, [[i] * 30])).max() < TOLERANCE


def test_tenants_and_their_requests_take_turns(embedder, monkeypatch):
    held = Held(embedder, monkeypatch)
    embedder.submit("a", [[1]])
    eventually(lambda: held.batches)
    jobs = [
        embedder.submit("a", [[2] * 64] * 100),
        embedder.submit("a", [[3]]),
        embedder.submit("b", [[4]]),
    ]
    held.release()
    for job in jobs:
        job.done.result(240)
    order = [tokens[0] for _, tokens in held.batches[1]]
    assert order[:4] == [2, 4, 3, 2]
    assert [tenant for tenant, _ in held.batches[1]][:2] == ["a", "b"]


def test_whoever_leaves_is_forgotten(embedder, monkeypatch):
    held = Held(embedder, monkeypatch)
    embedder.submit("a", [[1]])
    eventually(lambda: held.batches)
    gone, stays = embedder.submit("a", [[2]] * 200), embedder.submit("a", [[3]])
    embedder.cancel(gone)
    held.release()
    stays.done.result(240)
    assert held.batches[1:] == [[("a", [3])]]
    assert not gone.done.done()


def test_a_client_that_leaves_is_seen(server, monkeypatch):
    held = Held(server.embedder, monkeypatch)
    with server.connect(post_bytes(ROUTE, {"input": [[2]] * 500})):
        eventually(lambda: held.batches)
    eventually(lambda: not server.is_busy)
    held.release()
    assert vectors(server.post(ROUTE, {"input": [3]})).shape == (1, 32)
    assert len(held.batches) == 2  # one for each request


def test_a_batch_that_fails_fails_alone(server, monkeypatch, caplog):
    vectors_of_batch = server.embedder._vectors

    def fail(sequences, *others):
        if [7] in sequences:
            raise RuntimeError("no memory")
        return vectors_of_batch(sequences, *others)

    monkeypatch.setattr(server.embedder, "_vectors", fail)
    answer = server.post(ROUTE, {"input": [7]})
    assert answer.status == 500 and answer.error["type"] == "server_error"
    assert "no memory" not in answer.error["message"]
    assert server.post(ROUTE, {"input": [8]}).ok


def test_numbers_that_are_not_finite_are_no_answer(server, monkeypatch):
    vectors_of_batch = server.embedder._vectors
    monkeypatch.setattr(
        server.embedder, "_vectors", lambda *args: vectors_of_batch(*args) * np.float32(np.nan)
    )
    answer = server.post(ROUTE, {"input": [7]})
    assert answer.status == 500 and "not finite" in answer.error["message"]


def test_a_model_that_cannot_be_compiled(bert, monkeypatch):
    embedder = Embedder(bert, "vectors")

    def fail(*args):
        raise RuntimeError("no memory")

    monkeypatch.setattr(embedder, "_vectors", fail)
    told = threading.Event()
    embedder.on_failure = told.set
    with serving(embedding=(bert, embedder)) as server:
        assert told.wait(240)
        assert server.get("/health").json["status"] == "failed"
        assert server.post(ROUTE, {"input": [7]}).status == 503
    with pytest.raises(EmbedderStopped):
        embedder.submit("", [[1]])


def test_nothing_is_compiled_while_it_serves(embedder, monkeypatch):
    from jax_attn.serve._engine import compilations

    before = compilations.num_unexpected()
    for n in (1, 31, 33, 64):
        embedder.submit("", [[5] * n] * 20).done.result(240)
    assert compilations.num_unexpected() == before


def test_stopping_tells_whoever_waits(bert, monkeypatch):
    embedder = Embedder(bert, "vectors")
    embedder.start(lambda: None)
    held = Held(embedder, monkeypatch)
    embedder.submit("", [[1]])
    eventually(lambda: held.batches)
    waits = embedder.submit("", [[2]])
    stopping = threading.Thread(target=embedder.stop)
    stopping.start()
    held.release()
    with pytest.raises(EmbedderStopped, match="the server stops"):
        waits.done.result(240)
    stopping.join(240)


# ---- the official client, and a process ----------------------------------------------------------


def test_openais_client(server, bert):
    openai = pytest.importorskip("openai", reason="needs the extra `test`")
    client = server.client()
    expected = vectors_of(bert, [[1, 5, 6, 2], [1, 7, 2]])
    for more in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        answer = client.embeddings.create(model="vectors", input=["w5 w6", "w7"], **more)
        got = [each.embedding for each in answer.data]
        if more.get("encoding_format") == "base64":
            got = [np.frombuffer(base64.b64decode(each), "<f4") for each in got]
        assert np.abs(np.array(got) - expected).max() < TOLERANCE
        assert answer.usage.total_tokens == 7
    with pytest.raises(openai.BadRequestError, match="cannot be cut"):
        client.embeddings.create(model="vectors", input="w5", dimensions=4)
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="text-embedding-3-small", input="w5")


def test_ollamas_client(server, bert):
    """Both of its routes; long texts are cut, unless that is refused."""
    ollama = pytest.importorskip("ollama", reason="needs the extra `test`")
    client = ollama.Client(host=server.url)
    expected = vectors_of(bert, [[1, 5, 6, 2], [1, 7, 2]])
    answer = client.embed("vectors:latest", ["w5 w6", "w7"])
    assert np.abs(np.array(answer.embeddings) - expected).max() < TOLERANCE
    assert (answer.model, answer.prompt_eval_count) == ("vectors", 7)
    one = client.embed("vectors", "w7", keep_alive=0, options={"num_ctx": 1})
    assert np.abs(np.array(one.embeddings) - expected[1:]).max() < TOLERANCE
    old = client.embeddings("vectors", "w7")
    assert np.abs(np.array(old.embedding) - expected[1]).max() < TOLERANCE
    limit = bert.config.max_positions
    cut = vectors_of(bert, [[1, *[5] * (limit - 2), 2]])
    for length in (limit - 1, 1 << 17):
        long = client.embed("vectors", "w5 " * length)
        assert np.abs(np.array(long.embeddings) - cut).max() < TOLERANCE
        assert long.prompt_eval_count == limit
    for refused, words in [
        (lambda: client.embed("vectors", "w5 " * limit, truncate=False), "input"),
        (lambda: client.embed("vectors", "w5", dimensions=4), "dimensions.*cannot be cut"),
        (lambda: client.embed("other", "w5"), "'other' makes no embeddings here"),
        (lambda: client.embed("vectors", ["w5", ""]), "input"),
        (lambda: client.embeddings("vectors", ""), "prompt"),
    ]:
        with pytest.raises(ollama.ResponseError, match=words):
            refused()


def test_beside_a_decoder(tmp_path, qwen):
    """Both models in one process, and tenants with keys."""
    directory = tmp_path / "qwen"
    directory.mkdir()
    embedding_cases.write(directory, "qwen3")
    options = ["--max-running", "4", "--max-step-tokens", "32", "--embedding-model", "qwen"]
    options += ["--model", str(models.BUNDLED)]
    server = ServerProcess(tmp_path, *key_options(tmp_path), *options)
    with contextlib.closing(server):
        server.wait_until_ready()
        client = server.client(KEYS[0])
        stream = client.completions.create(
            model="tiny-llama-stdlib", prompt="import os", max_tokens=200, stream=True,
            stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
        )  # fmt: skip
        next(iter(stream))
        answer = client.embeddings.create(model="qwen", input=[[5, 6, 7]], dimensions=8)
        (expected,) = vectors_of(qwen, [[5, 6, 7]])[:, :8]
        expected = expected / np.linalg.norm(expected)
        assert np.abs(np.array(answer.data[0].embedding) - expected).max() < TOLERANCE
        *_, last = stream
        assert last.usage.completion_tokens == 200
        assert server.metric("jax_attn_compilations_total") == 0
        assert server.metric("jax_attn_embedding_tokens_total") == 3
        assert {card.id for card in client.models.list()} == {"tiny-llama-stdlib", "qwen"}
        server.process.terminate()
        assert server.process.wait(240) == 0, server.log()


@pytest.mark.parametrize("names", [[], ["--served-model-name", "vectors"]])
def test_alone(tmp_path, qwen, names):
    """Without --model: text routes are refused in OpenAI's way, and all else works."""
    directory = tmp_path / "qwen"
    directory.mkdir()
    embedding_cases.write(directory, "qwen3")
    options = [*key_options(tmp_path), "--embedding-model", "qwen", *names]
    name = names[1] if names else "qwen"
    openai = pytest.importorskip("openai", reason="needs the extra `test`")
    server = ServerProcess(tmp_path, *options)
    with contextlib.closing(server):
        server.wait_until_ready()
        client = server.client(KEYS[0])
        answer = client.embeddings.create(model=name, input=[[5, 6, 7]])
        (expected,) = vectors_of(qwen, [[5, 6, 7]])
        assert np.abs(np.array(answer.data[0].embedding) - expected).max() < TOLERANCE
        assert server.metric("jax_attn_embedding_tokens_total") == 3
        assert [card.id for card in client.models.list()] == [name]
        assert client.models.retrieve(name).id == name
        with pytest.raises(openai.NotFoundError, match=f"'x' is not served here, '{name}' is"):
            client.models.retrieve("x")
        for ask in (
            lambda: client.completions.create(model=name, prompt="a"),
            lambda: client.chat.completions.create(model=name, messages=[]),
            lambda: client.responses.create(model=name, input="a"),
            lambda: client.post("/../tokenize", body={"prompt": "a"}, cast_to=object),
        ):
            with pytest.raises(openai.NotFoundError, match="no model for texts") as caught:
                ask()
            assert caught.value.code == "model_not_found"
        server.process.terminate()
        assert server.process.wait(240) == 0, server.log()


# ---- effects on others -------------------------------------------------------------------------


@pytest.mark.alone
@pytest.mark.timeout(600)
def test_another_stream_waits_at_most_250_ms(tmp_path):
    """Beside inputs of 8,192 tokens, and requests of many tokens, of a model as wide as MiniLM."""
    directory = tmp_path / "long"
    directory.mkdir()
    embedding_cases.write(directory, "xlm-roberta", **LONG)
    options = [*key_options(tmp_path), "--embedding-model", "long"]
    options += ["--model", str(models.BUNDLED)]
    server = ServerProcess(tmp_path, *options)
    with contextlib.closing(server):
        server.wait_until_ready()
        client = server.client(KEYS[0]).with_options(timeout=120)
        for inputs in ([[7] * 8192], [[7] * 250] * 100):
            with bystanding(server.port, KEYS[1]) as bystander:
                for _ in range(NUM_TRIES):
                    server.forget_peak()
                    before = server.resident_bytes()
                    begin = time.monotonic()
                    client.embeddings.create(model="long", input=inputs)
                    seen = bystander.seen(begin, time.monotonic())
                    growth = server.peak_bytes() - before
                    print(f"longest gap {seen.longest_gap * 1e3:.0f} ms, {growth / 1e6:.0f} MB")
                    assert growth < 300_000_000
                    if seen.longest_gap <= 0.25:
                        break
                else:
                    pytest.fail(f"the stream waited {seen.longest_gap:.2f} s")
