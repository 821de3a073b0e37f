"""The HTTP server with a fake engine: routes, limits, errors, streams, disconnects."""

import asyncio
import base64
import contextlib
import json
import logging
import socket
import time
from importlib import metadata

import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")
pytest.importorskip("uvicorn", reason="needs the extra `serve`")

from helpers.serve.fake_engine import FakeEngine, fake_model
from helpers.serve.live_server import HANG_SECONDS, eventually, joined, post_bytes, serving
from jax_attn.serve._http import auth, keys, openapi
from jax_attn.serve._http import server as server_module
from jax_attn.serve._http.connection import Connection, DiscardBody, _Turns
from jax_attn.serve._http.fair_loop import MOST
from jax_attn.serve._openai import answers, prepare, schemas
from jax_attn.serve._openai.bounds import KeyLimits
from jax_attn.serve._scheduling.tenants import namespace

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = {"prompt": "import os", "max_tokens": 4}
HELLO_CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


@pytest.fixture(scope="module")
def server():
    with serving() as server:
        yield server


@pytest.fixture
def slow_server():
    """20 ms a token, and room for two sequences."""
    with serving(FakeEngine(fake_model().tokenizer, delay=0.02, max_waiting=2)) as server:
        yield server


# ---- answers -----------------------------------------------------------------------------------


def test_completion(server):
    answer = server.post(COMPLETIONS, HELLO | {"seed": 1})
    assert answer.status == 200
    body = answer.json
    assert body["object"] == "text_completion" and body["model"] == "tiny"
    assert answer.headers["x-request-id"] == body["id"]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["length"]
    seq = server.engine.submitted[-1]
    assert seq.tokens[0] == 0 and seq.params.max_tokens == 4
    assert body["usage"] == {
        "prompt_tokens": seq.num_prompt,
        "completion_tokens": 4,
        "total_tokens": seq.num_prompt + 4,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    again = server.post(COMPLETIONS, HELLO | {"seed": 1}).json
    assert again["choices"] == body["choices"] and again["id"] != body["id"]


def test_stream_adds_up_to_the_whole(server):
    body = HELLO | {"max_tokens": 9, "seed": 2, "n": 3, "logprobs": 2}
    body["stream_options"] = {"include_usage": True}
    *chunks, done = server.events(COMPLETIONS, body)
    assert done == "[DONE]"
    *chunks, last = map(json.loads, chunks)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 27
    del body["stream_options"]
    whole = server.post(COMPLETIONS, body).json
    for choice in whole["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["length"]
        for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert sum((c["logprobs"][key] for c in mine), []) == choice["logprobs"][key]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert len({choice["text"] for choice in whole["choices"]}) == 3  # seeds differ


def test_stop_string(server):
    whole = server.post(COMPLETIONS, HELLO | {"seed": 3}).json["choices"][0]["text"]
    stop = {"seed": 3, "max_tokens": 50, "stop": [whole[-4:]]}
    answer = server.post(COMPLETIONS, HELLO | stop).json["choices"][0]
    assert answer["finish_reason"] == "stop" and whole.startswith(answer["text"])
    *chunks, _ = server.events(COMPLETIONS, HELLO | stop)
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == answer["text"]
    assert choices[-1]["finish_reason"] == "stop"


def test_no_usage_unless_asked(server):
    *chunks, _ = server.events(COMPLETIONS, HELLO)
    assert all(json.loads(chunk)["usage"] is None for chunk in chunks)


def test_chat_stream(server):
    *chunks, done = server.events(CHAT, HELLO_CHAT)
    assert done == "[DONE]"
    deltas = [json.loads(chunk)["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    assert all(delta["role"] is None for delta in deltas[1:])
    assert json.loads(chunks[0])["object"] == "chat.completion.chunk"


def test_chat_uses_the_template(server):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    answer = server.post(CHAT, {"messages": messages})
    assert answer.status == 200
    seq = server.engine.submitted[-1]
    text = server.engine.tokenizer.decode(seq.tokens, skip_special_tokens=False)
    assert text == "<|endoftext|># Be brief.\n# a\n# b\n"
    # The default is what the context leaves.
    assert seq.params.max_tokens == server.engine.limits.max_model_len - seq.num_prompt


def test_thoughts_go_to_the_template(tmp_path):
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.reasoning_content or 'none' }}: {{ m.content }};{% endfor %}"
    )
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "because"},
        {"role": "assistant", "content": "c", "reasoning_content": None},
    ]
    with serving(directory=tmp_path) as server:
        assert server.post(CHAT, {"messages": messages, "max_tokens": 2}).status == 200
        seq = server.engine.submitted[-1]
        prompt = server.engine.tokenizer.decode(seq.tokens[: seq.num_prompt])
    assert prompt == "none: a;because: b;none: c;"


def test_variables_for_the_template(server):
    more = {"messages": [], "self": 1, "enable_thinking": False, "": None}
    assert server.post(CHAT, HELLO_CHAT | {"chat_template_kwargs": more}).status == 200
    seq = server.engine.submitted[-1]
    assert "hello" in server.engine.tokenizer.decode(seq.tokens)


def test_chat_logprobs(server):
    answer = server.post(CHAT, HELLO_CHAT | {"logprobs": True, "top_logprobs": 2}).json
    choice = answer["choices"][0]
    entries = choice["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in entries] == [2] * 4
    assert b"".join(bytes(e["bytes"]) for e in entries).decode() == choice["message"]["content"]


def test_many_prompts(server):
    ids = server.engine.tokenizer.encode("class A:").ids
    answer = server.post(COMPLETIONS, {"prompt": [ids, [1, 2, 3]], "n": 2, "echo": True}).json
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    starts = [choice["text"].startswith("class A:") for choice in answer["choices"]]
    assert starts == [True, True, False, False]
    assert answer["usage"]["prompt_tokens"] == len(ids) + 3  # once for both choices
    assert answer["usage"]["completion_tokens"] == 4 * 16


def test_echo_with_logprobs(server):
    """lm-evaluation-harness asks so: logprobs of the prompt's tokens, then of the output's."""
    text = "class É:\n    pass"
    ids = server.engine.tokenizer.encode(text).ids
    body = {"prompt": [ids, ids[:3]], "echo": True, "logprobs": 2, "max_tokens": 2, "seed": 1}
    answer = server.post(COMPLETIONS, body).json
    for choice, prompt in zip(answer["choices"], (ids, ids[:3]), strict=True):
        n, found = len(prompt), choice["logprobs"]
        assert found["token_logprobs"] == [None, *[-4.0] * (n - 1), -0.5, -0.5]
        assert found["top_logprobs"][0] is None
        # The token is added if it is not among the likeliest.
        assert [len(top) for top in found["top_logprobs"][1:]] == [3] * (n - 1) + [2, 2]
        for token, logprob, top in list(zip(*list(found.values())[:3], strict=True))[1:]:
            assert top[token] == logprob
        assert len(found["text_offset"]) == n + 2
    choice = answer["choices"][0]
    assert choice["text"].startswith(text)
    offsets, tokens = (choice["logprobs"][key] for key in ("text_offset", "tokens"))
    assert any(token.startswith("bytes:") for token in tokens)
    for offset, token in zip(offsets, tokens, strict=True):
        assert token.startswith("bytes:") or choice["text"][offset:].startswith(token)

    *chunks, _ = server.events(COMPLETIONS, body)
    for choice in answer["choices"]:
        mine = [json.loads(chunk)["choices"][0] for chunk in chunks]
        mine = [c for c in mine if c["index"] == choice["index"]]
        assert (
            sum((c["logprobs"]["token_logprobs"] for c in mine), [])
            == (choice["logprobs"]["token_logprobs"])
        )
        assert (
            sum((c["logprobs"]["text_offset"] for c in mine), [])
            == (choice["logprobs"]["text_offset"])
        )


def test_echo_alone(server):
    """max_tokens 0 returns the prompt, and nothing more."""
    body = {"prompt": "class A:", "echo": True, "logprobs": 0, "max_tokens": 0}
    answer = server.post(COMPLETIONS, body).json
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("class A:", "length")
    begin, *tokens = choice["logprobs"]["tokens"]  # the former is not in the text
    assert (begin, "".join(tokens)) == ("<|endoftext|>", "class A:")
    assert choice["logprobs"]["text_offset"][:3] == [0, 0, len(tokens[0])]
    assert answer["usage"]["completion_tokens"] == 0 < answer["usage"]["prompt_tokens"]
    *chunks, _ = server.events(COMPLETIONS, body)
    assert [json.loads(chunk)["choices"] for chunk in chunks] == [answer["choices"]]
    # The prompt may fill the context.
    full = {"prompt": [1] * server.engine.limits.max_model_len}
    assert server.post(COMPLETIONS, full | {"max_tokens": 0}).status == 200
    assert server.post(COMPLETIONS, full | {"max_tokens": 1}).error["param"] == "prompt"


def test_logprobs_are_bounded(server, monkeypatch):
    """The bound counts echoed prompts, and the output of all choices."""
    monkeypatch.setattr(prepare, "MAX_SCORES", 3 * 20 * 6)
    prompts = {"prompt": [[1] * 10] * 2, "n": 3, "echo": True, "max_tokens": 0}
    outputs = {"prompt": [[1] * 10] * 2, "n": 3, "max_tokens": 10}
    for body in (prompts, outputs):
        assert server.post(COMPLETIONS, body | {"logprobs": 5}).status == 200
        assert server.post(COMPLETIONS, body | {"logprobs": 6}).error["param"] == "logprobs"
    assert server.post(COMPLETIONS, prompts | {"logprobs": 6, "echo": False}).status == 200
    chat = HELLO_CHAT | {"logprobs": True, "top_logprobs": 5}
    assert server.post(CHAT, chat | {"max_tokens": 60}).status == 200
    assert server.post(CHAT, chat | {"max_tokens": 61}).error["param"] == "logprobs"
    # Without max_tokens, the limit is what the context and this bound leave.
    del chat["max_tokens"]
    answer = server.post(CHAT, chat | {"n": 2}).json
    assert [len(choice["logprobs"]["content"]) for choice in answer["choices"]] == [30, 30]


def test_a_whole_answer_says_how_long_it_is(server):
    for path, body in ((COMPLETIONS, HELLO), (CHAT, HELLO_CHAT)):
        answer = server.post(path, body)
        assert int(answer.headers["content-length"]) == len(answer.body)


def test_cached_tokens(server):
    answer = server.post(COMPLETIONS, {"prompt": [[5] * 40, [6] * 4], "n": 2}).json
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}


def test_sampling_fields_arrive(server):
    body = HELLO | {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "seed": -7,
        "stop": "xyz",
        "stop_token_ids": [9],
        "logit_bias": {"17": -100},
        "min_tokens": 2,
        "ignore_eos": True,
        "priority": 3,
        "deadline": 60,
        "user": "ignored",
        "suffix": None,
        "best_of": None,
    }
    assert server.post(COMPLETIONS, body).status == 200
    seq = server.engine.submitted[-1]
    params = seq.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 0, 0.1)
    assert params.repetition_penalty == 1.1
    assert (params.presence_penalty, params.frequency_penalty) == (0.2, 0.3)
    assert params.seed % 2**64 == -7 % 2**64
    assert params.stop == ("xyz",) and params.stop_token_ids == (9,)
    assert params.logit_bias == ((17, -100.0),) and params.ignore_eos and params.min_tokens == 2
    assert seq.priority == 3 and abs(seq.deadline - seq.arrival - 60) < 1e-6


def test_neighbours_of_what_is_refused(server):
    same = {"max_tokens": 4, "max_completion_tokens": 4}
    assert server.post(CHAT, HELLO_CHAT | same).status == 200
    assert server.post(COMPLETIONS, HELLO | {"top_p": 0}).status == 200
    assert 0 < server.engine.submitted[-1].params.top_p < 1e-5  # the likeliest token alone


def test_null_is_absent(server):
    for path, model, base in [
        (COMPLETIONS, schemas.CompletionRequest, HELLO),
        (CHAT, schemas.ChatCompletionRequest, HELLO_CHAT),
    ]:
        names = [field.alias or name for name, field in model.model_fields.items()]
        assert server.post(path, dict.fromkeys(names) | base).status == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_token_ids(server, path):
    """Whole or in events, also of choices and prompts of which an event may have no text."""
    body = {"n": 2, "seed": 1, "max_tokens": 9, "return_token_ids": True}
    body |= {"prompt": ["import os", "class A"]} if path == COMPLETIONS else HELLO_CHAT | body
    whole = server.post(path, body).json
    seqs = {int(seq.id.rpartition("-")[2]): seq for seq in server.engine.submitted[-4:]}
    chunks = [json.loads(event) for event in server.events(path, body)[:-1]]
    for choice in whole["choices"]:
        index, parts = choice["index"], []
        prompts = [choice.get("prompt_token_ids") or whole.get("prompt_token_ids")]
        for chunk in chunks:
            (part,) = chunk["choices"]
            if part["index"] == index:
                parts += part["token_ids"]
                prompts += filter(
                    None, [part.get("prompt_token_ids") or chunk.get("prompt_token_ids")]
                )
        assert parts == choice["token_ids"] and len(parts) == 9
        if path == COMPLETIONS:
            text = server.engine.tokenizer.decode(parts)
            assert text.split() == choice["text"].split()
        assert prompts == [seqs[index].tokens[: seqs[index].num_prompt]] * 2
    assert whole["usage"]["completion_tokens"] == 9 * len(whole["choices"])
    for choice in server.post(path, body | {"return_token_ids": False}).json["choices"]:
        assert choice["token_ids"] is None


def test_tokens_as_token_ids(server):
    """Log-probabilities name tokens by ids, as vLLM does, and keep their offsets and bytes."""
    body = {"max_tokens": 5, "seed": 3, "return_token_ids": True}
    plain = server.post(COMPLETIONS, HELLO | body | {"logprobs": 1}).json["choices"][0]
    asked = HELLO | body | {"logprobs": 1, "return_tokens_as_token_ids": True}
    whole = server.post(COMPLETIONS, asked).json["choices"][0]
    assert whole["text"] == plain["text"]
    expected = [f"token_id:{token}" for token in whole["token_ids"]]
    assert whole["logprobs"]["tokens"] == expected
    assert all(
        name in top for name, top in zip(expected, whole["logprobs"]["top_logprobs"], strict=True)
    )
    assert whole["logprobs"]["text_offset"] == plain["logprobs"]["text_offset"]
    asked = HELLO_CHAT | body | {"logprobs": True, "return_tokens_as_token_ids": True}
    whole = server.post(CHAT, asked).json["choices"][0]
    entries = whole["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{t}" for t in whole["token_ids"]]
    said = b"".join(bytes(entry["bytes"]) for entry in entries).decode()
    assert said == whole["message"]["content"]


def test_deadline(slow_server):
    answer = slow_server.post(COMPLETIONS, HELLO | {"max_tokens": 200, "deadline": 0.1}).json
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["stop_reason"] == "deadline"
    assert 0 < answer["usage"]["completion_tokens"] < 150


@pytest.mark.parametrize(
    "field",
    [
        {"json_schema": {"type": "integer"}},
        {"json_schema": True},
        {"regex": "[a-z]+"},
        {"grammar": 'start: "a" | "b"'},
        {"response_format": {"type": "json_object"}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "strict": True, "schema": {"type": "array"}},
            }
        },
    ],
    ids=lambda field: "-".join(field),
)
def test_grammars(server, field):
    assert server.post(CHAT, HELLO_CHAT | field).status == 200
    assert server.engine.submitted[-1].params.grammar


def test_the_schema_of_huggingface_hub_is_followed(server):
    format = {"type": "json_object", "value": {"title": "mark", "type": "object"}}
    assert server.post(CHAT, HELLO_CHAT | {"response_format": format}).status == 200
    assert "mark" in server.engine.submitted[-1].params.grammar
    answer = server.post(CHAT, HELLO_CHAT | {"response_format": format | {"type": "text"}})
    assert answer.status == 400 and answer.error["param"] == "response_format"


def test_text_format_is_no_grammar(server):
    assert server.post(CHAT, HELLO_CHAT | {"response_format": {"type": "text"}}).status == 200
    assert server.engine.submitted[-1].params.grammar is None


def test_cache_salt_and_namespace(server):
    for salt in ("", "a", "b"):
        assert server.post(COMPLETIONS, HELLO | {"cache_salt": salt}).status == 200
    names = [seq.namespace for seq in server.engine.submitted[-3:]]
    assert names[0] == "" and len(set(names)) == 3
    assert namespace("key0", "x") != namespace("key1", "x")
    # No salt of one tenant can spell another tenant's name.
    assert namespace("key1", "x") != namespace("", "key1/x") != namespace("key1", "")


def test_tokenize_round_trip(server):
    text = "def f():\n    return 'é'"
    answer = server.post("/tokenize", {"prompt": text}).json
    assert answer["tokens"][0] == 0 and answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 256
    plain = server.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json
    assert plain["tokens"] == answer["tokens"][1:]
    assert server.post("/detokenize", {"tokens": plain["tokens"]}).json == {"prompt": text}
    chat = server.post("/tokenize", {"messages": HELLO_CHAT["messages"]}).json
    assert (
        server.post("/detokenize", {"tokens": chat["tokens"]}).json["prompt"].endswith("# hello\n")
    )


def test_models(server):
    listed = server.get("/v1/models").json
    assert [card["id"] for card in listed["data"]] == ["tiny"]
    assert server.get("/v1/models/tiny").json == listed["data"][0]
    assert server.get("/v1/models/other").status == 404


def test_version(server):
    assert server.get("/version").json == {"version": metadata.version("jax_attn")}


def test_aliases():
    with serving(model_aliases=("gpt-4o",)) as server:
        assert [card["id"] for card in server.get("/v1/models").json["data"]] == ["tiny", "gpt-4o"]
        assert server.get("/v1/models/gpt-4o").json["id"] == "gpt-4o"
        for name in ("tiny", "gpt-4o"):
            assert server.post(COMPLETIONS, HELLO | {"model": name}).json["model"] == "tiny"
        assert server.post(COMPLETIONS, HELLO | {"model": "gpt-4"}).status == 404


def test_metrics(server):
    server.post(COMPLETIONS, HELLO)
    server.post(COMPLETIONS, {"prompt": 5})
    answer = server.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    lines = dict(
        line.rsplit(" ", 1) for line in answer.body.decode().splitlines() if line[0] != "#"
    )
    assert lines['jax_attn_pages{state="cached"}'] == "14.0"
    assert lines["jax_attn_prefix_hit_tokens_total"] == "400.0"
    assert lines['jax_attn_device_bytes{device="1"}'] == "4096.0"
    assert lines["jax_attn_preemptions_total"] == "1.0"
    assert lines["jax_attn_compilations_total"] == "0.0"
    assert lines["jax_attn_draft_tokens_taken_total"] == "12.0"
    assert lines['jax_attn_step_seconds_total{phase="wait"}'] == "1.4"
    assert float(lines['jax_attn_requests_total{outcome="completed"}']) >= 1
    assert float(lines['jax_attn_requests_total{outcome="invalid"}']) >= 1
    first = float(lines["jax_attn_time_to_first_token_seconds_count"])
    assert 1 <= first < float(lines["jax_attn_inter_token_latency_seconds_count"])


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/responses", {"input": "a", "max_output_tokens": 9}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 9}),
    ],
)
def test_one_event_of_a_stream_is_measured(route, body):
    """One event of a request is measured, after its first token."""
    with serving() as server:

        def num_measured() -> float:
            lines = server.get("/metrics").body.decode().splitlines()
            (line,) = [x for x in lines if x.startswith("jax_attn_first_event_seconds_count")]
            return float(line.rpartition(" ")[2])

        server.engine.holds_at = 0
        connection = server.connect(post_bytes(route, body | {"stream": True}))
        eventually(lambda: server.engine.live)
        assert num_measured() == 0
        server.engine.holds_at = None
        eventually(lambda: num_measured() == 1)
        eventually(lambda: not server.engine.live)
        assert num_measured() == 1
        connection.close()


def test_openapi_describes_every_route(server):
    description = server.get("/openapi.json").json
    routes = {route.path.replace("{name:path}", "{model}") for route in server.app.routes}
    assert set(description["paths"]) == routes
    text = json.dumps(description)
    for name in text.split("#/components/schemas/")[1:]:
        assert name.split('"')[0] in description["components"]["schemas"]


def test_openapi_is_made_when_it_is_wanted(monkeypatch):
    made, describe = [], openapi.describe
    monkeypatch.setattr(openapi, "describe", lambda: made.append(None) or describe())
    openapi.as_json.cache_clear()
    with serving() as server:
        assert not made
        answers = [server.get("/openapi.json").body for _ in range(2)]
    assert len(made) == 1 and answers[0] == answers[1]


def test_page_allows_its_own_script_only(server):
    answer = server.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert policy.count("sha256-") == 2
    assert b"http://" not in answer.body and b"https://" not in answer.body


# ---- refusals ----------------------------------------------------------------------------------

LONG = schemas.MAX_GRAMMAR_CHARS + 1


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        (COMPLETIONS, {"prompt": None}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": [5000]}, "prompt"),
        (COMPLETIONS, {"prompt": [[1], [-1]]}, "prompt[1][0]"),
        (COMPLETIONS, {"prompt": [1] * 256}, "prompt"),
        (COMPLETIONS, {"prompt": ["a"] * 1025}, "prompt"),
        (COMPLETIONS, {"max_tokens": "4"}, "max_tokens"),
        (COMPLETIONS, {"max_tokens": 255}, "prompt"),  # the prompt is too long, too
        (COMPLETIONS, {"min_tokens": 5}, "min_tokens"),
        (COMPLETIONS, {"n": 0}, "n"),
        (COMPLETIONS, {"n": 65}, "n"),
        (COMPLETIONS, {"n": True}, "n"),
        (COMPLETIONS, {"temperature": -1}, "temperature"),
        (COMPLETIONS, {"top_p": -0.1}, "top_p"),
        (COMPLETIONS, {"stop": ["a"] * 17}, "stop"),
        (COMPLETIONS, {"stop": "a" * 257}, "stop"),
        (COMPLETIONS, {"stop": ["a", ""]}, "stop[1]"),
        (COMPLETIONS, {"stop_token_ids": [4096]}, "stop_token_ids"),
        (COMPLETIONS, {"logit_bias": {"4096": 1}}, "logit_bias"),
        (COMPLETIONS, {"logit_bias": {"x": 1}}, "logit_bias.x"),
        (COMPLETIONS, {"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"max_tokens": -1}, "max_tokens"),
        (COMPLETIONS, {"max_tokens": 0, "min_tokens": 1}, "min_tokens"),
        (COMPLETIONS, {"suffix": "x"}, "suffix"),
        (COMPLETIONS, {"n": 3, "best_of": 2}, "best_of"),
        (COMPLETIONS, {"best_of": 2, "stream": True}, "best_of"),
        (COMPLETIONS, {"suffix": "x", "echo": True}, "suffix"),
        (COMPLETIONS, {"suffix": "x", "prompt": [5]}, "suffix"),
        (CHAT, {"prediction": {"type": "content", "content": "a"}, "n": 2}, "prediction"),
        (COMPLETIONS, {"stream_options": {"include_usage": True}}, "stream_options"),
        (COMPLETIONS, {"bad_words": ["x"]}, "bad_words"),
        (COMPLETIONS, {"prompt_logprobs": 2, "stream": True}, "prompt_logprobs"),
        (COMPLETIONS, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        (COMPLETIONS, {"guided_choice": []}, "guided_choice"),
        (COMPLETIONS, {"guided_choice": ["a" * LONG]}, "guided_choice"),
        (COMPLETIONS, {"guided_regex": "("}, "guided_regex"),
        (COMPLETIONS, {"guided_json": "{"}, "guided_json"),
        (COMPLETIONS, {"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs"),
        (COMPLETIONS, {"guided_json": {}, "structured_outputs": {"regex": "a"}}, "grammar"),
        (COMPLETIONS, {"structured_outputs": {"json": {}, "regex": "a"}}, "grammar"),
        (COMPLETIONS, {"regex": "("}, "regex"),
        (COMPLETIONS, {"regex": "a" * LONG}, "regex"),
        (COMPLETIONS, {"grammar": "start: nothing"}, "grammar"),
        (COMPLETIONS, {"json_schema": {"type": "no such type"}}, "json_schema"),
        (COMPLETIONS, {"json_schema": {"enum": ["a" * LONG]}}, "json_schema"),
        (COMPLETIONS, {"json_schema": {}, "regex": "a"}, "grammar"),
        (COMPLETIONS, {"response_format": {"type": "json_schema"}}, "response_format"),
        (COMPLETIONS, {"response_format": {"type": "xml"}}, "response_format.type"),
        (COMPLETIONS, {"cache_salt": "a" * 257}, "cache_salt"),
        (COMPLETIONS, {"deadline": 0}, "deadline"),
        (COMPLETIONS, {"seed": 2**63}, "seed"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
        (CHAT, {"max_completion_tokens": 3}, "max_tokens"),
        (CHAT, {"max_tokens": None, "max_completion_tokens": 255}, "messages"),
        (CHAT, {"max_tokens": 0}, "max_tokens"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools[0].function"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"chat_template": "rag"}, "chat_template"),
        (CHAT, {"reasoning_effort": "x" * 33}, "reasoning_effort"),
        (
            CHAT,
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        (
            CHAT,
            {"continue_final_message": True, "messages": [{"role": "user", "content": ""}]},
            "continue_final_message",
        ),
        (CHAT, {"messages": [{"role": "tool", "content": ""}]}, "messages[0].tool_call_id"),
        (CHAT, {"modalities": ["audio"]}, "modalities[0]"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].image_url.url",
        ),
        ("/tokenize", {"messages": HELLO_CHAT["messages"]}, "prompt"),  # beside prompt
        ("/detokenize", {"tokens": [4096]}, "tokens"),
    ],
)
def test_400_names_the_field(server, path, change, param):
    base = {COMPLETIONS: HELLO, CHAT: HELLO_CHAT, "/tokenize": {"prompt": "a"}}.get(path, {})
    num_before = len(server.engine.submitted)
    answer = server.post(path, base | change)
    assert answer.status == 400, answer.body
    assert answer.error["param"] == param, answer.error
    assert answer.error["type"] == "invalid_request_error"
    assert param.split("[")[0].split(".")[0] in answer.error["message"]
    assert len(answer.body) < 1000
    assert len(server.engine.submitted) == num_before


def test_an_image_is_refused_by_its_name(server, caplog):
    """The check comes before its fields count as unknown ones."""
    part = {"type": "image_url", "image_url": {"url": "data:,"}}
    for role, words in (
        ("user", "pictures are not supported by this server, which reads texts only"),
        ("assistant", "'image_url' is not supported by this server"),
    ):
        answer = server.post(CHAT, {"messages": [{"role": role, "content": [part]}]})
        assert answer.status == 400 and answer.error["code"] == "unsupported_parameter"
        assert words in answer.error["message"]
    assert "unknown field" not in caplog.text


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'{"prompt": "\\ud800"}', b"\xff", b"[" * 100_000, b'{"n":' * 9999],
    ids=repr,
)
def test_400_for_what_is_no_object(server, body):
    answer = server.post(COMPLETIONS, body)
    assert answer.status == 400 and answer.error["message"]


def test_neutral_values_of_unsupported_fields(server):
    assert server.post(COMPLETIONS, HELLO | {"n": 2, "best_of": 2}).status == 200
    neutral = {"tools": [], "tool_choice": "none", "functions": None, "parallel_tool_calls": True}
    assert server.post(CHAT, HELLO_CHAT | neutral).status == 200


def test_404(server):
    answer = server.post(COMPLETIONS, HELLO | {"model": "gpt-4"})
    assert answer.status == 404 and answer.error["code"] == "model_not_found"
    assert answer.error["param"] == "model"
    assert server.get("/v2/models").error["type"] == "invalid_request_error"
    assert server.get(COMPLETIONS).status == 405


def test_415_keeps_web_pages_of_others_out(server):
    answer = server.post(COMPLETIONS, json.dumps(HELLO).encode(), Content_Type="text/plain")
    assert answer.status == 415


def test_no_chat_template(tmp_path):
    with serving(directory=tmp_path) as server:
        answer = server.post(CHAT, HELLO_CHAT)
        assert answer.status == 400 and "chat template" in answer.error["message"]
        assert answer.error["param"] == "messages"


def test_413_before_and_while_reading():
    with serving(max_body_bytes=1000) as server:
        assert server.post(COMPLETIONS, {"prompt": "a" * 900}).status == 200
        answer = server.post(COMPLETIONS, {"prompt": "a" * 1100})
        assert answer.status == 413 and answer.error["code"] == "body_too_large"
        # The length alone is enough.
        head = (
            f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        )
        with server.connect(f"{head}Content-Length: 1001\r\n\r\n".encode()) as connection:
            assert b" 413 " in connection.recv(1000).split(b"\r\n")[0]
        # Without a length, and never ending: the answer comes while the body is still sent.
        with server.connect(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode()) as connection:
            for _ in range(11):
                connection.sendall(b"64\r\n" + b"[" * 100 + b"\r\n")
            assert b" 413 " in connection.recv(1000).split(b"\r\n")[0]


def test_408_for_a_body_that_does_not_come():
    with serving(body_timeout=0.2) as server:
        raw = post_bytes(COMPLETIONS, HELLO)
        with server.connect(raw[:-5]) as connection:
            assert b" 408 " in connection.recv(1000).split(b"\r\n")[0]


@pytest.mark.parametrize("sent", [b"", b"GET /health HTT", b"before"], ids=str)
def test_a_connection_that_asks_for_nothing_is_closed(server, sent, monkeypatch):
    """Also one that sends its headers byte by byte, and one that had an answer before."""
    monkeypatch.setattr(Connection, "head_seconds", 0.3)
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    begin = time.monotonic()
    with server.paused():
        connection = server.connect(request if sent == b"before" else sent)
    with connection:
        received = b""
        while sent == b"before" and b'{"status":"ok"}' not in received:
            received += connection.recv(1000)
        connection.settimeout(0.1)
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < begin + HANG_SECONDS:
                with contextlib.suppress(TimeoutError):
                    assert connection.recv(1000) == b""
                    break
                connection.sendall(b"a")
            else:
                pytest.fail("still open")
    assert time.monotonic() - begin >= 0.3


def test_a_long_answer_is_not_taken_for_silence(slow_server, monkeypatch):
    monkeypatch.setattr(Connection, "head_seconds", 0.05)
    with slow_server.paused():
        connection = slow_server.connect(post_bytes(COMPLETIONS, HELLO | {"max_tokens": 20}))
    with connection:
        assert b" 200 " in connection.recv(1000).split(b"\r\n")[0]


def test_header_cap(server):
    with server.connect(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 20000) as connection:
        assert b" 400 " in connection.recv(1000).split(b"\r\n")[0]


def test_429_when_the_queue_is_full(slow_server):
    slow_server.engine.holds_at = 3
    with slow_server.connect(post_bytes(COMPLETIONS, HELLO | {"n": 2, "max_tokens": 200})):
        eventually(lambda: len(slow_server.engine.live) == 2)
        for stream in (False, True):
            answer = slow_server.post(COMPLETIONS, HELLO | {"stream": stream})
            assert answer.status == 429 and answer.error["reason"] == "queue_full"
            assert int(answer.headers["retry-after"]) >= 1
    eventually(lambda: not slow_server.engine.live)
    slow_server.engine.holds_at = None
    assert slow_server.post(COMPLETIONS, HELLO).status == 200
    assert b'requests_total{outcome="rejected"} 2.0' in slow_server.get("/metrics").body


def test_a_full_queue_comes_before_the_body(monkeypatch):
    """The refusal comes before the body is read, parsed, rendered and tokenized."""
    engine = FakeEngine(fake_model().tokenizer, delay=0.02, max_waiting=2)
    engine.limits.max_running = 1
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with serving(engine) as server:
        monkeypatch.setattr(engine, "stats", lambda: {"waiting": 2})
        with server.connect(post_bytes(COMPLETIONS, HELLO)) as connection:
            assert b" 200 " in connection.recv(1000).split(b"\r\n")[0]  # it holds nothing yet
        engine.holds_at = 3
        with server.connect(post_bytes(COMPLETIONS, HELLO | {"n": 2, "max_tokens": 200})):
            eventually(lambda: len(engine.live) == 2)
            with server.connect(f"{head}Content-Length: 1000\r\n\r\n".encode()) as connection:
                received = connection.recv(1000)
                while b"\r\n\r\n{" not in received:
                    received += connection.recv(1000)
                assert b" 429 " in received.split(b"\r\n")[0] and b"queue_full" in received


@pytest.mark.parametrize(
    ("limit", "change"),
    [
        ("requests", {}),
        ("choices", {"n": 2}),
        ("tokens", {"prompt": [5] * 8}),
    ],
)
def test_429_says_which_limit_of_a_key(limit, change):
    body = HELLO | {"max_tokens": 200} | change
    most = {"requests": 2, "choices": 4, "tokens": 16}
    limits = KeyLimits(**{"requests": 9, "choices": 9, limit: most[limit]})
    engine = FakeEngine(fake_model().tokenizer)
    engine.holds_at = 3  # steps, so that sequences of two tokens end
    with serving(engine, api_keys=KEYS, key_limits=limits) as server:
        auth = "".join(f"{name}: {value}\r\n" for name, value in bearer(KEYS[0]).items())
        raw = post_bytes(COMPLETIONS, body).replace(b"\r\n", f"\r\n{auth}".encode(), 1)
        with server.connect(raw), server.connect(raw):
            eventually(lambda: len(engine.live) == 2 * body.get("n", 1))
            answer = server.post(COMPLETIONS, body, **bearer(KEYS[0]))
            assert answer.status == 429 and answer.error["reason"] == f"too_many_{limit}"
            assert f"at most {most[limit]} of one key" in answer.error["message"]
            assert int(answer.headers["retry-after"]) >= 1
            assert server.post(COMPLETIONS, body | {"max_tokens": 2}, **bearer(KEYS[1])).ok
        eventually(lambda: not engine.live)
        assert server.post(COMPLETIONS, body | {"max_tokens": 2}, **bearer(KEYS[0])).ok
        eventually(lambda: not server.app.state.server.limiter.held("key0"))


def test_a_request_that_is_more_than_all_may_be_is_400():
    """Another try would not help."""
    limits = KeyLimits(requests=9, choices=2, tokens=16)
    with serving(key_limits=limits) as server:
        for change in ({"n": 3}, {"prompt": [5] * 17}):
            answer = server.post(COMPLETIONS, HELLO | change)
            assert answer.status == 400 and "in one request" in answer.error["message"]
            assert "retry-after" not in answer.headers
        assert not server.app.state.server.limiter.held("")


def test_log_probabilities_that_are_held_are_bounded():
    """Whole answers hold them until the end; streams hold none."""
    limits = KeyLimits(requests=9, choices=9, scores=200)
    body = HELLO | {"max_tokens": 50, "logprobs": 3}
    with serving(key_limits=limits) as server:
        assert server.post(COMPLETIONS, body).ok
        answer = server.post(COMPLETIONS, body | {"n": 2})
        assert answer.status == 429 and answer.error["reason"] == "too_many_scores"
        assert len(server.events(COMPLETIONS, body | {"n": 2})) > 50
        eventually(lambda: not server.app.state.server.limiter.held(""))
        assert len(server.engine.aborted) == 2 and not server.engine.live


def test_bodies_that_are_held_are_bounded():
    """Short bodies go through, and refused ones hold nothing."""
    limits = KeyLimits(requests=100, choices=100, body_bytes=1 << 20)
    long = {"prompt": "a" * (700 << 10)}
    with serving(key_limits=limits) as server:
        with server.connect(post_bytes(COMPLETIONS, long)[:-1]) as connection:
            eventually(lambda: server.app.state.server.limiter.held("")["body_bytes"] > 600_000)
            answer = server.post(COMPLETIONS, long)
            assert answer.status == 429 and answer.error["reason"] == "too_many_body_bytes"
            assert server.post(COMPLETIONS, HELLO).status == 200
            connection.sendall(b"}")
            assert b" 400 " in connection.recv(1000).split(b"\r\n")[0]  # too many tokens
        eventually(lambda: not server.app.state.server.limiter.held(""))


def test_503_until_ready_while_draining_and_after_a_failure():
    with serving() as server:
        for change, status in [
            (lambda: setattr(server.engine, "ready", False), "compiling"),
            (lambda: server.app.state.server.drain(), "draining"),
            (lambda: setattr(server.engine, "failure", RuntimeError("x")), "failed"),
        ]:
            assert server.get("/health").status == (200 if status == "compiling" else 503)
            change()
            health = server.get("/health")
            assert health.status == 503 and health.json == {"status": status}
            answer = server.post(COMPLETIONS, HELLO)
            assert answer.status == 503 and answer.headers["retry-after"]
            assert server.get("/metrics").status == 200
            assert server.get("/debug/state").json["status"] == status


def test_a_failing_request_fails_alone(server):
    body = HELLO | {"prompt": FakeEngine.FAIL, "max_tokens": 9}
    answer = server.post(COMPLETIONS, body)
    assert answer.status == 500 and answer.error["message"] == "asked to fail"
    *_, error, done = server.events(COMPLETIONS, body)
    assert json.loads(error)["error"]["message"] == "asked to fail" and done == "[DONE]"
    assert not server.engine.live
    assert server.post(COMPLETIONS, HELLO).status == 200


def test_a_grammar_that_gets_stuck_is_the_clients_fault(server):
    """The error belongs to one choice, not to all."""
    body = HELLO | {"max_tokens": 9, "regex": "[a-z ]+"}
    server.engine.stuck = {"0"}
    answer = server.post(COMPLETIONS, body)
    assert answer.status == 400 and answer.error["code"] == "invalid_grammar"
    assert (answer.error["param"], answer.error["type"]) == ("regex", "invalid_request_error")
    assert answer.error["message"] == "regex: grammar: too complex."
    *_, error, done = server.events(COMPLETIONS, body)
    assert json.loads(error)["error"]["code"] == "invalid_grammar" and done == "[DONE]"

    answer = server.post(COMPLETIONS, body | {"n": 2})
    assert answer.status == 200
    assert [choice["finish_reason"] for choice in answer.json["choices"]] == ["length"] * 2
    assert [choice["stop_reason"] for choice in answer.json["choices"]] == ["error", None]
    server.engine.stuck = {"0", "1"}
    assert server.post(COMPLETIONS, body | {"n": 2}).status == 400
    assert not server.engine.live
    server.engine.stuck = set()  # other tests use the server, too


def test_the_engine_stops_at_work(slow_server):
    """The drain takes too long: running and new requests get an error."""
    slow_server.engine.holds_at = 2
    with slow_server.connect(
        post_bytes(COMPLETIONS, HELLO | {"stream": True, "max_tokens": 200})
    ) as connection:
        eventually(lambda: 2 in slow_server.engine.live.values())
        slow_server.engine.aborts = True
        slow_server.engine.holds_at = None
        received = b""
        while b"[DONE]" not in received:
            received += connection.recv(65536)
    assert b'"code":"draining"' in received
    answer = slow_server.post(COMPLETIONS, HELLO)
    assert answer.status == 503 and answer.error["code"] == "draining"
    slow_server.engine.stopped = True
    assert slow_server.post(COMPLETIONS, HELLO).status == 503


def test_a_bug_is_500_without_its_text(server, monkeypatch, caplog):
    def explode(*args):
        raise RuntimeError("the secret is 42")

    monkeypatch.setattr(server.engine, "generate", explode)
    caplog.set_level(logging.CRITICAL, "uvicorn.error")
    answer = server.post(COMPLETIONS, HELLO)
    assert answer.status == 500 and b"42" not in answer.body


# ---- disconnects -------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_disconnect_aborts_at_once(slow_server, path, stream):
    base = HELLO if path == COMPLETIONS else HELLO_CHAT
    body = base | {"n": 2, "max_tokens": 200, "stream": stream}
    engine = slow_server.engine
    engine.holds_at = 3
    connection = slow_server.connect(post_bytes(path, body))
    eventually(lambda: list(engine.live.values()) == [3, 3])
    connection.close()
    eventually(lambda: not engine.live)
    assert len(engine.aborted) == 2
    eventually(
        lambda: b'requests_total{outcome="disconnected"} 1.0' in slow_server.get("/metrics").body
    )


def test_disconnect_in_the_body(server):
    with server.connect(post_bytes(COMPLETIONS, HELLO)[:-5]):
        pass
    assert server.post(COMPLETIONS, HELLO).status == 200


def test_a_client_that_does_not_read_stops_nobody(slow_server):
    with slow_server.connect(post_bytes(COMPLETIONS, HELLO | {"stream": True, "max_tokens": 30})):
        assert slow_server.post(COMPLETIONS, HELLO).status == 200


def test_a_client_that_does_not_read_is_cut(monkeypatch):
    """Its request ends, for streams and for whole answers."""
    monkeypatch.setattr(Connection, "write_seconds", 0.2)
    for stream in (False, True):
        with serving() as server:
            body = HELLO_CHAT | {"n": 32, "max_tokens": 200, "stream": stream}
            body |= {"logprobs": True, "top_logprobs": 20}  # 10 MB
            with socket.socket() as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                connection.connect(("127.0.0.1", server.port))
                connection.sendall(post_bytes(CHAT, body))
                outcome = b'requests_total{outcome="disconnected"} 1.0'
                eventually(lambda: outcome in server.get("/metrics").body)  # noqa: B023
            assert not server.engine.live
            assert not server.app.state.server.limiter.held("")


def test_a_slow_reader_gets_all(monkeypatch):
    """Each read of the client restarts its time limit."""
    timers, pause_writing = [], Connection.pause_writing

    def pause(connection):
        pause_writing(connection)
        timers.append(connection._write_timer)

    monkeypatch.setattr(Connection, "pause_writing", pause)
    monkeypatch.setattr(Connection, "write_seconds", HANG_SECONDS)
    body = HELLO_CHAT | {"n": 32, "max_tokens": 200}
    body |= {"logprobs": True, "top_logprobs": 20}  # 10 MB, more than sockets hold
    with serving() as server, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(post_bytes(CHAT, body))
        head, _, received = connection.recv(65536).partition(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        while len(received) < length and (more := connection.recv(65536)):
            received += more
            time.sleep(0.01)
        assert len(json.loads(received)["choices"]) == 32
        eventually(lambda: timers and all(timer.cancelled() for timer in timers))


def test_a_stream_that_waits_shows_that_it_lives(monkeypatch):
    """Also before the first token. Clients ignore the comments."""
    monkeypatch.setattr(answers, "KEEP_ALIVE_SECONDS", 0.05)
    engine = FakeEngine(fake_model().tokenizer)
    body = HELLO | {"stream": True, "max_tokens": 3}
    with serving(engine) as server:
        engine.holds_at, received = 0, b""
        with server.connect(post_bytes(COMPLETIONS, body)) as connection:
            while not received.endswith(b"\r\n0\r\n\r\n") and (more := connection.recv(65536)):
                received += more
                before, _, after = received.partition(b"data: {")
                if engine.holds_at == 0 and before.count(b": waiting") >= 2:
                    engine.holds_at = 1
                if engine.holds_at == 1 and after.count(b": waiting") >= 2:
                    engine.holds_at = None
    events = joined(received.partition(b"\r\n\r\n")[2]).split(b"\n\n")
    kinds = [event.partition(b":")[0] for event in events[:-2]]
    assert events[-2:] == [b"data: [DONE]", b""]
    assert kinds.count(b"data") == 3 and kinds.index(b"data") >= 2
    assert kinds[kinds.index(b"data") + 1 :].count(b"") >= 2


def test_connections_are_capped(server, monkeypatch):
    """A refused client gets a sentence, and closed connections make room."""
    for name, most in (("max_connections", 3), ("max_of_address", 2)):
        eventually(lambda: not server.num_connections)
        with monkeypatch.context() as patch, contextlib.ExitStack() as stack:
            patch.setattr(Connection, name, most)
            for _ in range(most):
                stack.enter_context(server.connect(b"GET /health HTTP/1.1\r\n"))
            eventually(lambda: server.num_connections == most)  # noqa: B023
            answer = server.get("/health")
            assert answer.status == 429 and answer.error["reason"] == "too_many_connections"
            assert f"{most} connections" in answer.error["message"]
            stack.close()
            eventually(lambda: not server.num_connections)
            assert server.get("/health").status == 200


# ---- keys and hosts ----------------------------------------------------------------------------

KEYS = ("a-key-of-one-tenant", "another-tenants-key")


@pytest.fixture(scope="module")
def locked_server():
    with serving(api_keys=KEYS) as server:
        yield server


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_every_route_but_health_needs_a_key(locked_server):
    for route in locked_server.app.routes:
        for path in (route.path, route.path + "/"):
            for method in sorted(route.methods | {"OPTIONS", "PUT"}):
                answer = locked_server.request(method, path)
                expected = path == "/health"
                assert (answer.status != 401) == expected, (method, path)
    assert locked_server.get("/nothing/here").status == 401
    assert locked_server.get("//health").status == 401
    assert locked_server.get("/health").status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": KEYS[0]},
        bearer(""),
        bearer(KEYS[0][:-1]),
        bearer(KEYS[0] + "x"),
        bearer(KEYS[0].upper()),
        bearer(" ".join(KEYS)),
        {"Authorization": "Basic " + base64.b64encode(KEYS[0].encode()).decode()},
        {"Authorization": "Basic !"},
        {"Authorization": "Basic \xe9"},
        {"Authorization": "Bearer \xe9"},
    ],
    ids=str,
)
def test_wrong_keys(locked_server, headers):
    answer = locked_server.get("/v1/models", **headers)
    assert answer.status == 401 and answer.error["code"] == "invalid_api_key"
    assert answer.error["type"] == "invalid_request_error"
    assert answer.headers["www-authenticate"].startswith("Bearer")


def test_a_list_that_is_too_long_is_said_to_be(server):
    answer = server.post(COMPLETIONS, HELLO | {"stop": ["a"] * 17})
    assert "at most 16 items" in answer.error["message"]


def test_right_keys(locked_server):
    basic = "Basic " + base64.b64encode(b"anyone:" + KEYS[1].encode()).decode()
    for headers in (bearer(KEYS[0]), bearer(KEYS[1]), {"Authorization": basic}):
        assert locked_server.get("/v1/models", **headers).status == 200
    assert locked_server.get("/").headers["www-authenticate"].startswith("Basic")


def test_a_key_is_a_namespace(locked_server):
    for key in KEYS:
        assert locked_server.post(COMPLETIONS, HELLO, **bearer(key)).status == 200
    assert [seq.namespace for seq in locked_server.engine.submitted[-2:]] == ["key0", "key1"]


OPERATOR = "the-key-of-an-operator"


@pytest.fixture(scope="module")
def operated_server():
    with serving(api_keys=KEYS, operator_keys=(OPERATOR,)) as server:
        yield server


def test_a_tenant_sees_nothing_of_others(locked_server):
    """Neither ids, lengths, prompts nor totals."""
    state = locked_server.get("/debug/state", **bearer(KEYS[1])).json
    assert [node["text"] for node in state["tree"]] == ["secret"]
    assert state["requests"] == [] and not state.keys() & {"step", "stats"}
    assert state["pages"].keys() == {"page_size"}
    state = locked_server.get("/debug/state", **bearer(KEYS[0])).json
    assert state["tree"] == [] and state["requests"] == []
    answer = locked_server.get("/metrics", **bearer(KEYS[0]))
    assert answer.status == 403 and "--operator-key-file" in answer.error["message"]


def test_a_tenant_sees_its_own(locked_server, monkeypatch):
    whole = locked_server.engine.picture()
    names = ["key0", "key0/salt", "key1", "key01", "key1/key0"]
    requests = [
        entry | {"namespace": name, "id": name}
        for entry, name in zip(whole["requests"], names, strict=True)
    ]
    node = {"locks": 0, "num_pages": 1}
    tree = [
        node | {"namespace": "key1", "parent": None, "tokens": [300]},
        node | {"namespace": "key0", "parent": None, "tokens": [301]},
        node | {"namespace": "key1", "parent": 0, "tokens": [302]},
        node | {"namespace": "key0", "parent": 1, "tokens": [303]},
    ]
    shown = whole | {"requests": requests, "tree": tree}
    monkeypatch.setattr(locked_server.engine, "picture", lambda: shown)
    monkeypatch.setattr(server_module, "VIEW_SECONDS", -1)
    for key, ids in [(KEYS[0], ["key0", "key0/salt"]), (KEYS[1], ["key1", "key1/key0"])]:
        state = locked_server.get("/debug/state", **bearer(key)).json
        assert [entry["id"] for entry in state["requests"]] == ids
        assert [node["parent"] for node in state["tree"]] == [None, 0]
        assert all(node["text"] for node in state["tree"]) and "namespace" not in json.dumps(state)


def test_a_view_is_not_made_for_every_poll(locked_server, monkeypatch):
    """A view of a tree of thousands takes some milliseconds on the engine's and this thread."""
    snapshot, times = locked_server.engine.picture, []

    def count():
        times.append(time.monotonic())
        return snapshot()

    monkeypatch.setattr(locked_server.engine, "picture", count)
    monkeypatch.setattr(server_module, "VIEW_SECONDS", 60)
    locked_server.app.state.server._views.clear()
    for key in KEYS * 5:
        assert locked_server.get("/debug/state", **bearer(key)).json["status"] == "ok"
    assert len(times) == 2  # each sees its own
    monkeypatch.setattr(server_module, "VIEW_SECONDS", -1)
    assert locked_server.get("/debug/state", **bearer(KEYS[0])).ok and len(times) == 3


def test_an_operator_sees_all_but_the_texts_of_others(operated_server):
    state = operated_server.get("/debug/state", **bearer(OPERATOR)).json
    assert len(state["requests"]) == 5 and len(state["tree"]) == 4
    assert not [node for node in state["tree"] if "text" in node]
    assert state["stats"] and state["pages"]["states"]
    assert operated_server.get("/metrics", **bearer(OPERATOR)).status == 200
    assert operated_server.get("/metrics", **bearer(KEYS[0])).status == 403
    assert operated_server.post(COMPLETIONS, HELLO, **bearer(OPERATOR)).status == 200


def test_who_is_alone_sees_all(server):
    """Without keys on a loopback address, and with the only key."""
    state = server.get("/debug/state").json
    assert len([node for node in state["tree"] if "text" in node]) == 3 and state["stats"]
    with serving(api_keys=KEYS[:1]) as only:
        assert only.get("/debug/state", **bearer(KEYS[0])).json["stats"]
        assert only.get("/metrics", **bearer(KEYS[0])).status == 200


def test_strangers_see_nothing():
    """Without a key, on an address that others can reach."""
    with serving(is_public=True) as public:
        for path in ("/debug/state", "/metrics"):
            answer = public.get(path)
            assert answer.status == 403 and "--api-key-file" in answer.error["message"]
        assert public.post(COMPLETIONS, HELLO).status == 200


def test_the_body_of_a_stranger_is_not_read(locked_server):
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"
    with locked_server.connect(head.encode()) as connection:
        assert b" 401 " in connection.recv(1000).split(b"\r\n")[0]


def test_who_still_sends_reads_the_error(locked_server, monkeypatch):
    """Closing a connection with unread data would reset it."""
    monkeypatch.setattr(DiscardBody, "seconds", HANG_SECONDS)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    with locked_server.connect(f"{head}Content-Length: 60000\r\n\r\n".encode()) as connection:
        for _ in range(20):
            time.sleep(0.01)
            connection.sendall(b"x" * 3000)
        received = b""
        while more := connection.recv(1000):
            received += more
        assert b" 401 " in received.split(b"\r\n")[0] and received.endswith(b"}")


def test_compare_is_constant_time_and_complete(monkeypatch):
    """Every key is compared in full by the constant-time function, whichever matches."""
    compared = []

    def compare(a, b):
        compared.append((a, b))
        return a == b

    monkeypatch.setattr(auth.hmac, "compare_digest", compare)
    middleware = auth.Authenticate(None, KEYS, ())
    for key in (*KEYS, "neither"):
        compared.clear()
        middleware._tenant(key.encode())
        assert len(compared) == len(KEYS)
        assert {len(side) for pair in compared for side in pair} == {32}


def test_host_of_others():
    with serving(check_host=True) as server:
        for host in ("localhost:1", "127.0.0.1", "[::1]:8000", "LOCALHOST"):
            assert server.get("/health", Host=host).status == 200
        for host in ("evil.example", "localhost.evil.example:8000", "[::2]", ""):
            assert server.get("/v1/models", Host=host).status == 403


ORIGIN = "http://localhost:3000"


def test_web_pages_of_allowed_origins():
    """A browser asks before it posts JSON or sends a key; a page sees only what it may."""
    asks = {"Access-Control-Request-Method": "POST"}
    asks["Access-Control-Request-Headers"] = "authorization, content-type"
    with serving(api_keys=KEYS, allowed_origins=(ORIGIN,)) as server:
        answer = server.request("OPTIONS", CHAT, Origin=ORIGIN, **asks)
        assert answer.status == 200
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        assert "authorization" in answer.headers["access-control-allow-headers"].lower()
        for key, status in ((KEYS[0], 200), ("another", 401)):
            answer = server.post(CHAT, HELLO_CHAT, Origin=ORIGIN, **bearer(key))
            assert answer.status == status
            assert answer.headers["access-control-allow-origin"] == ORIGIN
        answer = server.request("OPTIONS", CHAT, Origin="http://evil.example", **asks)
        assert "access-control-allow-origin" not in answer.headers


def test_no_web_pages_of_others(server):
    for origin in (ORIGIN, "null"):
        answer = server.post(CHAT, HELLO_CHAT, Origin=origin)
        assert "access-control-allow-origin" not in answer.headers


def test_key_files(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"# tenants\n\n{KEYS[0]}\n  {KEYS[1]}\n")
    assert keys.read_keys(path) == KEYS
    for text in ("", "# only a comment\n", "short\n", "with a space in the middle\n"):
        path.write_text(text)
        with pytest.raises(ValueError, match="keys"):
            keys.read_keys(path)


def test_a_pipelined_request_has_time_of_its_own(slow_server, monkeypatch):
    """The timer for the next request does not apply to one that has arrived."""
    monkeypatch.setattr(Connection, "head_seconds", 0.2)
    body = HELLO | {"max_tokens": 30}  # half a second
    with slow_server.paused():
        connection = slow_server.connect(post_bytes(COMPLETIONS, body) * 2)
    with connection:
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    assert received.count(b'"finish_reason":"length"') == 2


def test_a_turn_that_fails_is_the_last_of_no_others(caplog):
    called = []

    async def main():
        turns = _Turns(asyncio.get_running_loop())
        for number in range(3 * MOST):
            turns.wait(lambda number=number: called.append(1 // (number % 2)))
        for _ in range(5):
            await asyncio.sleep(0)
        turns.wait(lambda: called.append(2))
        await asyncio.sleep(0)

    asyncio.run(main())
    assert called == [1] * (3 * MOST // 2) + [2]
    assert caplog.text.count("ZeroDivisionError") == len(caplog.records) > 0


def test_pipelined_and_broken_http(server):
    for raw in (b"\x00\x01\r\n\r\n", b"GET\r\n\r\n"):
        with server.connect(raw) as connection:
            assert b" 400 " in connection.recv(1000).split(b"\r\n")[0]
    with server.connect(post_bytes(COMPLETIONS, HELLO) * 2) as connection:
        connection.shutdown(socket.SHUT_WR)
        received = b"".join(iter(lambda: connection.recv(65536), b""))
        assert received.count(b"HTTP/1.1 200") in (0, 1, 2)
    assert server.get("/health").status == 200
