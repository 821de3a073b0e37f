"""LoRA adapters over HTTP: named as models, loaded and unloaded by operators."""

import dataclasses

import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")

from helpers import lora
from helpers.serve.fake_engine import FakeEngine, fake_model
from helpers.serve.live_server import eventually, serving
from helpers.serve.small_engine import CONFIG
from jax_attn import models
from jax_attn.serve import _options
from jax_attn.serve._engine.async_engine import AsyncEngine

OPERATOR, CLIENT = "operator-key-0123456789", "client-key-0123456789ab"
AS_OPERATOR, AS_CLIENT = ({"Authorization": f"Bearer {key}"} for key in (OPERATOR, CLIENT))
KEYS = {"api_keys": (CLIENT,), "operator_keys": (OPERATOR,)}
BODY = {"prompt": "def main(", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def directories(model, tmp_path_factory):
    """Adapters `a` and `b`, and `wrong`, which is of another model."""
    top = tmp_path_factory.mktemp("adapters")
    for name in "ab":
        lora.write(top / name, lora.CONFIG, lora.tensors(model.config, name))
    wrong = {name: x[:, :-1] for name, x in lora.tensors(model.config, "a").items()}
    lora.write(top / "wrong", lora.CONFIG, wrong)
    return top


def test_routes_are_off_and_for_operators(directories):
    with serving(**KEYS) as off:
        for answer in (
            off.post("/v1/loras", {"name": "a", "path": "a"}, **AS_OPERATOR),
            off.request("DELETE", "/v1/loras/a", **AS_OPERATOR),
        ):
            assert (answer.status, answer.error["code"]) == (404, "weights_are_fixed")
    with serving(weights_directory=directories, **KEYS) as server:
        body = {"name": "a", "path": "a"}
        assert server.post("/v1/loras", body).status == 401
        assert server.post("/v1/loras", body, **AS_CLIENT).error["code"] == "operators_only"
        answer = server.request("DELETE", "/v1/loras/a", **AS_CLIENT)
        assert (answer.status, answer.error["code"]) == (403, "operators_only")
        assert server.request("DELETE", "/v1/loras/a", **AS_OPERATOR).status == 404
        for wrong, field in (
            ({"name": "a", "path": ".."}, "path"),
            ({"name": "", "path": "a"}, "name"),
            ({"name": "tiny", "path": "a"}, "name"),  # the model
            ({"path": "a"}, "name"),
        ):
            answer = server.post("/v1/loras", wrong, **AS_OPERATOR)
            assert (answer.status, answer.error["param"]) == (400, field)


def test_an_adapter_may_not_have_a_models_name():
    with pytest.raises(ValueError, match="lora: expected a name that no model has, got 'tiny'"):
        with serving(adapters=("tiny",)):
            pass


def test_requests_name_the_adapter(directories):
    engine = FakeEngine(fake_model().tokenizer)
    with serving(engine, adapters=("a",)) as server:
        cards = {card["id"]: card["parent"] for card in server.get("/v1/models").json["data"]}
        assert cards == {"tiny": None, "a": "tiny"}
        assert server.get("/v1/models/a").json["parent"] == "tiny"
        messages = [{"role": "user", "content": "x"}]
        for path, body in (
            ("/v1/completions", BODY),
            ("/v1/chat/completions", {"messages": messages, "max_tokens": 8}),
            ("/v1/responses", {"input": "x", "max_output_tokens": 16}),
        ):
            for name, adapter in (("a", "a"), ("tiny", ""), (None, "")):
                answer = server.post(path, body | {"model": name} if name else body)
                assert answer.status == 200 and answer.json["model"] == (adapter or "tiny")
                assert engine.submitted[-1].adapter_name == adapter
        assert server.post("/v1/completions", BODY | {"model": "b"}).status == 404


def test_adapters_come_and_go(model, directories):
    engine = AsyncEngine(model, dataclasses.replace(CONFIG, max_loras=1))
    keys = {"weights_directory": directories, **KEYS}

    def text(server, name):
        answer = server.post("/v1/completions", BODY | {"model": name}, **AS_CLIENT)
        assert answer.status == 200, answer.body
        return answer.json["choices"][0]["text"]

    def load(server, name, path):
        return server.post("/v1/loras", {"name": name, "path": path}, **AS_OPERATOR)

    with serving(engine, models.BUNDLED, **keys) as server:
        eventually(lambda: engine.ready)
        plain = text(server, "tiny")
        answer = load(server, "a", "a")
        assert answer.ok and (answer.json["id"], answer.json["parent"]) == ("a", "tiny")
        with_a = text(server, "a")
        assert with_a != plain == text(server, "tiny")
        full, wrong = load(server, "b", "b"), load(server, "a", "wrong")
        assert full.status == 400 and "at most 1 adapters" in full.error["message"]
        assert wrong.status == 400 and "expected shape" in wrong.error["message"]
        assert text(server, "a") == with_a
        assert server.request("DELETE", "/v1/loras/a", **AS_OPERATOR).ok
        assert server.post("/v1/completions", BODY | {"model": "a"}, **AS_CLIENT).status == 404
        assert load(server, "b", "b").ok and text(server, "b") not in (plain, with_a)
        engine.unload_lora("b").result()  # after HTTP has found the name
        answer = server.post("/v1/completions", BODY | {"model": "b"}, **AS_CLIENT)
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")


def test_options(capsys):
    for argv, sentence in (
        (["--lora", "a"], "argument --lora: expected NAME=DIR, got 'a'"),
        (["--lora", "a=/x", "--lora", "a=/y"], "--lora: expected a name for each, got a, a"),
        (["--lora", "a=/x", "--embedding-model", "/e"], "--lora: expected --model, got"),
        (["--max-loras", "1", "--distributed"], "--max-loras: expected a server of one process"),
    ):
        with pytest.raises(SystemExit):
            _options.parse(argv)
        assert sentence in capsys.readouterr().err
    args = _options.parse(["--lora", "a=/x", "--lora", "b=/y=z"])
    assert [(name, str(path)) for name, path in args.lora] == [("a", "/x"), ("b", "/y=z")]
    assert args.max_loras == 2
