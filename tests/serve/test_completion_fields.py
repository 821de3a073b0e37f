"""best_of, suffix and prediction: fields of OpenAI's that change what the engine gets."""

import json

import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")

from helpers.serve import live_server
from helpers.serve.fake_engine import FakeEngine, fake_model
from helpers.serve.live_server import serving

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def server():
    with serving() as server:
        yield server


@pytest.mark.parametrize("config", [{"add_bos_token": True}, {"add_bos_token": False}, {}])
def test_the_tokenizers_config_says_whether_a_token_precedes_a_prompt(tmp_path, config):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    model = fake_model()
    expected = model.tokenizer.encode("import os", add_special_tokens=False).ids
    if config.get("add_bos_token"):
        expected = [model.config.bos_token, *expected]
    with serving(directory=tmp_path) as server:
        assert server.post(PATH, {"prompt": "import os", "max_tokens": 1}).status == 200
        (seq,) = server.engine.submitted
    assert seq.tokens[: seq.num_prompt] == expected


def test_best_of_returns_the_likeliest(server, monkeypatch):
    """The means of the five choices are -5, -1, -4, -2 and -3; prompts are apart."""
    means = [-5.0, -1.0, -4.0, -2.0, -3.0]

    def logprob(seq):
        return means[int(seq.id.rpartition("-")[2]) % 5]

    monkeypatch.setattr(server.engine, "logprob_of", logprob)
    body = {"prompt": ["import os", "def f("], "n": 2, "best_of": 5, "max_tokens": 4, "seed": 3}
    begin = len(server.engine.submitted)
    answer = server.post(PATH, body | {"logprobs": 0}).json
    assert len(server.engine.submitted) - begin == 10
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    found = [choice["logprobs"]["token_logprobs"][0] for choice in answer["choices"]]
    assert found == [-1.0, -2.0, -1.0, -2.0]
    assert answer["usage"]["completion_tokens"] == 40  # all that were generated
    plain = server.post(PATH, body).json
    assert [choice["text"] for choice in plain["choices"]] == [
        choice["text"] for choice in answer["choices"]
    ]
    assert all(choice["logprobs"] is None for choice in plain["choices"])
    whole = server.post(PATH, body | {"n": 5, "best_of": None}).json
    assert whole["choices"][1]["text"] == plain["choices"][0]["text"]
    assert server.post(PATH, body | {"best_of": 65}).error["param"] == "best_of"


@pytest.mark.parametrize(
    ("marks", "prompt"),
    [
        (
            ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>"],
            "<|fim_prefix|>import <|fim_suffix|> as x<|fim_middle|>",
        ),
        (
            ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"],
            "<fim_prefix>import <fim_suffix> as x<fim_middle>",
        ),
        (
            ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],
            "<｜fim▁begin｜>import <｜fim▁hole｜> as x<｜fim▁end｜>",
        ),
        (["[PREFIX]", "[SUFFIX]"], "[SUFFIX] as x[PREFIX]import "),
    ],
    ids=["qwen", "starcoder", "deepseek", "codestral"],
)
def test_a_suffix_for_models_that_know_one(monkeypatch, marks, prompt):
    def with_marks():
        model = fake_model()
        model.tokenizer.add_special_tokens(marks)
        model.config.vocab_size += len(marks)
        return model

    monkeypatch.setattr(live_server, "fake_model", with_marks)
    with serving(FakeEngine(with_marks().tokenizer)) as server:
        assert server.get("/v1/models").json["data"][0]["features"][-1] == "fill_in_the_middle"
        body = {"prompt": "import ", "suffix": " as x", "max_tokens": 3}
        assert server.post(PATH, body).status == 200
        seq = server.engine.submitted[-1]
        tokenizer = server.engine.tokenizer
        shown = tokenizer.decode(seq.tokens[: seq.num_prompt], skip_special_tokens=False)
        assert shown == f"<|endoftext|>{prompt}"  # its first token comes first
        assert {tokenizer.id_to_token(token) for token in seq.params.stop_token_ids} == set(marks)
        theirs = {"model": "tiny", "prompt": "import ", "suffix": " as x", "stream": False}
        assert server.post("/api/generate", theirs).status == 200
        assert server.engine.submitted[-1].tokens[: seq.num_prompt] == seq.tokens[: seq.num_prompt]
        assert "insert" in server.post("/api/show", {"model": "tiny"}).json["capabilities"]
        assert server.post(PATH, body | {"suffix": ""}).status == 200
        assert server.engine.submitted[-1].num_prompt < seq.num_prompt - 2


@pytest.mark.parametrize("path", [PATH, "/api/generate"])
def test_a_suffix_for_other_models(server, path):
    answer = server.post(path, {"model": "tiny", "prompt": "a", "suffix": "b"})
    assert answer.status == 400
    assert b"suffix: the model has no tokens for filling in the middle" in answer.body


@pytest.mark.parametrize(
    "content", ["import os", [{"type": "text", "text": "import"}, {"type": "text", "text": " os"}]]
)
def test_a_prediction_becomes_tokens(server, content):
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    prediction = {"type": "content", "content": content}
    answer = server.post("/v1/chat/completions", body | {"prediction": prediction})
    assert answer.status == 200
    tokens = server.engine.tokenizer.encode("import os", add_special_tokens=False).ids
    assert server.engine.submitted[-1].predicted == tokens
