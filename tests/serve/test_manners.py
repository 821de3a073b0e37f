"""What clients written for OpenAI, vLLM or an agent framework send and expect."""

import json
import logging

import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")

from helpers.serve.fake_engine import FakeEngine, fake_model
from helpers.serve.live_server import eventually, serving
from jax_attn.serve._openai.bounds import KeyLimits
from jax_attn.serve._openai.fields import UnknownFields
from jax_attn.serve._openai.prepare import sampling_defaults

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = {"prompt": "import os", "max_tokens": 4}
MANY = KeyLimits(requests=9, choices=200)
HELLO_CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


@pytest.fixture(scope="module")
def server():
    with serving() as server:
        yield server


def last(server):
    return server.engine.submitted[-1]


def prompt_of(server) -> str:
    seq = last(server)
    return server.engine.tokenizer.decode(seq.tokens[: seq.num_prompt], skip_special_tokens=False)


# ---- fields ------------------------------------------------------------------------------------


def test_unknown_fields_are_read_past_with_one_warning_each(caplog):
    """Unknown fields at any depth of the body."""
    message = {"role": "user", "content": [{"type": "text", "text": "a", "mood": 1}], "mood": 2}
    body = {"messages": [message], "max_tokens": 2, "mood": 3, "temper": {"a": [1] * 9}}
    with serving() as server, caplog.at_level(logging.WARNING, "jax_attn.serve"):
        for _ in range(3):
            assert server.post(CHAT, body).status == 200
        server.post("/tokenize", {"prompt": "a", "mood": 1})
    told = [record.getMessage() for record in caplog.records if "unknown" in record.getMessage()]
    assert len(told) == len(set(told)) == 5
    assert sum("'mood'" in line for line in told) == 4 and all("--strict" in line for line in told)


def test_strict_refuses_unknown_fields():
    with serving(strict=True) as server:
        for path, base, change, param in [
            (COMPLETIONS, HELLO, {"no_such_field": 1}, "no_such_field"),
            (COMPLETIONS, HELLO, {"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
            (CHAT, {}, {"messages": [{"role": "user", "content": "a", "x": 1}]}, "messages[0].x"),
        ]:
            answer = server.post(path, base | change)
            assert answer.status == 400 and answer.error["param"] == param
            assert answer.error["code"] == "unknown_parameter"


def test_made_up_names_do_not_fill_the_log(caplog):
    fields = UnknownFields()
    with caplog.at_level(logging.WARNING, "jax_attn.serve"):
        for i in range(10 * fields.MOST):
            fields.see("CompletionRequest", f"{i}\n" + "a" * 1000)
    assert len(caplog.records) == fields.MOST
    assert max(len(record.getMessage()) for record in caplog.records) < 200
    assert "\n" not in caplog.records[0].getMessage()


@pytest.mark.parametrize(
    "change",
    [
        {"content": None},
        {"content": None, "reasoning": "because"},
        {"content": "a", "reasoning_details": [{"type": "x"}], "refusal": None},
        {"content": [{"type": "refusal", "refusal": "No."}]},
        {"content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {
            "content": None,
            "tool_calls": [
                {
                    "index": 0,
                    "id": "c",
                    "type": "function",
                    "function": {"name": "f", "arguments": "{}"},
                }
            ],
        },
    ],
    ids=repr,
)
def test_answers_come_back_in_any_shape(server, change, caplog):
    messages = [*HELLO_CHAT["messages"], {"role": "assistant", "cache_control": {}, **change}]
    messages.append({"role": "tool", "tool_call_id": "c", "content": None})
    messages.append({"role": "user", "content": "b"})
    with caplog.at_level(logging.WARNING, "jax_attn.serve"):
        assert server.post(CHAT, HELLO_CHAT | {"messages": messages}).status == 200
    assert not caplog.records
    assert ("No." in prompt_of(server)) == ("refusal" in str(change["content"]))


def test_whole_floats_are_integers(server):
    """JavaScript writes integers this way."""
    body = {"prompt": [5.0, 6, 7.0], "max_tokens": 5.0, "n": 2.0, "seed": 1e3, "top_k": 40.0}
    answer = server.post(COMPLETIONS, body | {"stop_token_ids": [9.0], "logprobs": 1.0})
    assert answer.status == 200 and len(answer.json["choices"]) == 2
    seq = server.engine.submitted[-2]
    assert seq.tokens[:3] == [5, 6, 7] and all(type(token) is int for token in seq.tokens)
    params = seq.params
    assert (params.max_tokens, params.seed, params.top_k) == (5, 1000, 40)
    for change in ({"max_tokens": 5.5}, {"prompt": [5.5]}, {"n": "2"}, {"n": 1e300}):
        assert server.post(COMPLETIONS, HELLO | change).status == 400


def test_an_empty_stop_is_none(server):
    assert server.post(COMPLETIONS, HELLO | {"stop": ""}).status == 200
    assert last(server).params.stop == ()


def test_more_choices_than_one_replica_has_room_for():
    engine = FakeEngine(fake_model().tokenizer, max_waiting=36)
    engine.limits.num_replicas = 4  # with room for 9 sequences each
    with serving(engine) as server:
        answer = server.post(COMPLETIONS, HELLO | {"n": 30})
        assert answer.status == 200 and len(answer.json["choices"]) == 30


def test_more_prompts_than_the_queue_holds_are_work():
    """The engine gets them in parts and in order, for whole answers and for streams."""
    engine = FakeEngine(fake_model().tokenizer, max_waiting=8)
    prompts = [[5, 6, 7 + i] for i in range(70)]
    body = {"prompt": prompts, "n": 2, "max_tokens": 2, "seed": 1, "echo": True}
    with serving(engine, key_limits=MANY) as server:
        most, generate = [0], engine.generate

        async def counted(seqs):
            async for event in generate(seqs):
                most[0] = max(most[0], len(engine.live))
                yield event

        engine.generate = counted
        answer = server.post(COMPLETIONS, body).json
        assert [choice["index"] for choice in answer["choices"]] == list(range(140))
        assert answer["usage"]["completion_tokens"] == 280 and most[0] <= 8
        by_prompt = {tuple(seq.tokens[:3]) for seq in engine.submitted}
        assert len(by_prompt) == 70
        *chunks, done = server.events(COMPLETIONS, body)
        assert done == "[DONE]"
        texts = [""] * 140
        for chunk in map(json.loads, chunks):
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == [choice["text"] for choice in answer["choices"]]
        refused = server.post(COMPLETIONS, body | {"n": 3})
        assert refused.status == 400 and "210 in one request" in refused.error["message"]
        eventually(lambda: not engine.live)


def test_many_prompts_wait_for_a_queue_that_others_fill():
    """The request is refused only if none of its prompts has begun."""
    engine = FakeEngine(fake_model().tokenizer, delay=0.005, max_waiting=8)
    body = {"prompt": [[5, 6]] * 20, "max_tokens": 3}
    with serving(engine, key_limits=MANY) as server:
        generate, calls = engine.generate, []

        def sometimes_full(seqs):
            calls.append(len(seqs))
            engine.limits.max_waiting = 0 if len(calls) in (2, 3, 5) else 8
            return generate(seqs)

        engine.generate = sometimes_full
        assert len(server.post(COMPLETIONS, body).json["choices"]) == 20
        assert len(calls) > 5
        engine.generate = generate
        engine.live |= {f"other{i}": 0 for i in range(8)}
        answer = server.post(COMPLETIONS, body)
        assert answer.status == 429 and answer.error["reason"] == "queue_full"


def test_one_of_many_prompts_that_fails_ends_all():
    with serving(key_limits=MANY) as server:
        body = {"prompt": ["a"] * 99 + [FakeEngine.FAIL], "max_tokens": 9}
        answer = server.post(COMPLETIONS, body)
        assert answer.status == 500 and not server.engine.live


# ---- vLLM's names ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "fits"),
    [
        ({"guided_json": {"type": "integer"}}, "integer"),
        ({"guided_json": '{"type": "integer"}'}, "integer"),
        ({"guided_regex": "[xyz]+"}, "[xyz]"),
        ({"guided_grammar": 'start: "abc"'}, "abc"),
        ({"guided_choice": ["yes", 'n"o']}, 'n\\"o'),
        ({"structured_outputs": {"json": {"type": "integer"}}}, "integer"),
        ({"structured_outputs": {"json_object": True}}, "object"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes"),
        ({"structured_outputs": {"regex": "[xyz]+"}}, "[xyz]"),
    ],
    ids=repr,
)
def test_structured_output(server, field, fits):
    for path, base in ((COMPLETIONS, HELLO), (CHAT, HELLO_CHAT)):
        assert server.post(path, base | field).status == 200
        assert fits in last(server).params.grammar


def test_switches_of_the_text(server):
    body = HELLO | {"skip_special_tokens": False, "include_stop_str_in_output": True}
    assert server.post(COMPLETIONS, body | {"add_special_tokens": False}).status == 200
    params = last(server).params
    assert not params.skip_special_tokens and params.include_stop
    assert prompt_of(server) == "import os"


def test_truncated_prompts(server):
    limit = server.engine.limits.max_model_len
    body = {"prompt": [[*range(1, 51)], [9]], "max_tokens": 4, "echo": True}
    assert server.post(COMPLETIONS, body | {"truncate_prompt_tokens": 7}).status == 200
    first, second = server.engine.submitted[-2:]
    assert first.tokens[: first.num_prompt] == [*range(44, 51)] and second.num_prompt == 1
    long = {"prompt": [5] * 400, "max_tokens": 10, "truncate_prompt_tokens": -1}
    assert server.post(COMPLETIONS, long).status == 200
    assert last(server).num_prompt == limit - 10
    chat = {"messages": [{"role": "user", "content": "word " * 300}], "truncate_prompt_tokens": 9}
    assert server.post(CHAT, chat | {"max_tokens": 2}).status == 200
    assert last(server).num_prompt == 9


def test_prompt_logprobs(server):
    body = {"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 2, "prompt_logprobs": 2, "seed": 1}
    plain = server.post(COMPLETIONS, body).json["choices"]
    scored = server.post(COMPLETIONS, body | {"logprobs": 1}).json["choices"]
    for choice, prompt in zip(plain, body["prompt"], strict=True):
        begin, *rest = choice["prompt_logprobs"]
        assert begin is None and len(rest) == len(prompt) - 1 and choice["logprobs"] is None
        for token, found in zip(prompt[1:], rest, strict=True):
            assert found.keys() == {"4000", "4001", str(token)}
            assert found["4001"]["rank"] == 2 and found["4001"]["logprob"] == -1.1
            assert found[str(token)]["rank"] is None and found[str(token)]["decoded_token"]
    for choice in scored:  # the output's are listed apart
        assert len(choice["prompt_logprobs"]) >= 2
        assert len(choice["logprobs"]["tokens"]) == 2
    chat = server.post(CHAT, HELLO_CHAT | {"prompt_logprobs": 0}).json
    (choice,) = chat["choices"]
    assert len(choice["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


def test_the_last_message_is_continued(tmp_path):
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    messages = [*HELLO_CHAT["messages"], {"role": "assistant", "content": " The answer is "}]
    body = {"messages": messages, "max_tokens": 2}
    with serving(directory=tmp_path) as server:
        for change, prompt in [
            ({"continue_final_message": True}, "<user>hello</s><assistant>The answer is"),
            (
                {"add_generation_prompt": False},
                "<user>hello</s><assistant>The answer is</s>",
            ),
            ({}, "<user>hello</s><assistant>The answer is</s><assistant>"),
        ]:
            assert server.post(CHAT, body | change).status == 200
            assert prompt_of(server) == prompt


# ---- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (COMPLETIONS, {"prompt": [1] * 250, "max_tokens": 50}, "you requested 300 tokens (250 in"),
        (COMPLETIONS, {"prompt": "word " * 500, "max_tokens": 1}, "Please reduce the length"),
        (COMPLETIONS, {"prompt": "word " * 100_000}, "resulted in over 512 tokens"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "word " * 300}]},
            "your messages resulted",
        ),
        (CHAT, HELLO_CHAT | {"max_tokens": 300}, "300 in the completion"),
    ],
    ids=range(5),
)
def test_context_overflow_in_openais_words(server, path, body, words):
    """LiteLLM and agents look for the code or these words."""
    answer = server.post(path, body)
    assert answer.status == 400 and answer.error["code"] == "context_length_exceeded"
    assert answer.error["type"] == "invalid_request_error"
    assert answer.error["param"] == ("prompt" if path == COMPLETIONS else "messages")
    message = answer.error["message"]
    assert "maximum context length is 256 tokens" in message and words in message


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"max_tokens": "4"}, "invalid_type"),
        ({"prompt": None}, "missing_required_parameter"),
        ({"n": 65}, "integer_above_max_value"),
        ({"temperature": -1}, "decimal_below_min_value"),
        ({"bad_words": ["x"]}, "unsupported_parameter"),
        ({"cache_salt": "a" * 257}, "string_above_max_length"),
        ({"prompt": []}, "array_below_min_length"),
    ],
)
def test_codes_are_openais(server, change, code):
    assert server.post(COMPLETIONS, HELLO | change).error["code"] == code


def test_the_code_of_a_429_is_openais():
    """Clients that see this code wait and try again; another field names the limit."""
    limits = KeyLimits(requests=9, choices=9, tokens=100)
    with serving(key_limits=limits) as server:
        server.engine.live |= {f"other{i}": 0 for i in range(40)}
        error = server.post(COMPLETIONS, HELLO).error
    assert (error["code"], error["reason"]) == ("rate_limit_exceeded", "queue_full")
    assert error["type"] == "requests"
    with serving() as server:
        assert server.post(COMPLETIONS, {}).error["reason"] is None


# ---- the model's defaults ----------------------------------------------------------------------


def test_sampling_defaults_of_the_model(tmp_path):
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": 0}))
    with serving(directory=tmp_path) as server:
        assert server.post(COMPLETIONS, HELLO | {"top_k": None}).status == 200
        params = last(server).params
        assert (params.temperature, params.top_k, params.top_p) == (0.6, 20, 0.95)
        asked = {"temperature": 1, "top_k": 0, "top_p": 1}
        assert server.post(COMPLETIONS, HELLO | asked).status == 200
        params = last(server).params
        assert (params.temperature, params.top_k, params.top_p) == (1, 0, 1)
    with serving(directory=tmp_path, generation_config=False) as server:
        assert server.post(COMPLETIONS, HELLO).status == 200
        assert last(server).params.temperature == 1 and last(server).params.top_k == 0
    assert sampling_defaults(tmp_path / "nowhere") == {}
    path.write_text('{"top_p": 2}')
    with pytest.raises(ValueError, match="generation_config.json: top_p: .*got 2"):
        sampling_defaults(tmp_path)


# ---- thoughts ----------------------------------------------------------------------------------

QWEN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
    '{% if tools %}<tool_call>{"arguments": 1}{% endif %}'
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{# splits at </think> #}"
)
R1 = "{% for m in messages %}{{ m.content }};{% endfor %}<think>\n{# </think> #}"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def speaking(directory, template: str, says: str):
    (directory / "chat_template.jinja").write_text(template)
    engine = FakeEngine(fake_model().tokenizer)
    engine.says = says
    return serving(engine, directory=directory)


def streamed(server, body) -> dict[str, str]:
    *chunks, done = server.events(CHAT, body)
    assert done == "[DONE]"
    deltas = [json.loads(chunk)["choices"][0]["delta"] for chunk in chunks]
    assert all(None in (d["content"], d["reasoning_content"]) or d["content"] for d in deltas)
    names = ("content", "reasoning_content")
    return {name: "".join(delta[name] or "" for delta in deltas) for name in names}


@pytest.mark.parametrize(
    ("template", "says", "thought", "said"),
    [
        (QWEN, "<think>\nLet me see.\n</think>\n\nIt is 4.", "Let me see.", "It is 4."),
        (QWEN, "It is </think> 4.", "", "It is </think> 4."),
        (R1, "Let me see.\n</think>\n\nIt is 4.", "Let me see.", "It is 4."),
        (R1, "Let me", "Let me", ""),
    ],
)
def test_thoughts_are_apart(tmp_path, template, says, thought, said):
    body = HELLO_CHAT | {"max_tokens": 100}
    with speaking(tmp_path, template, says) as server:
        message = server.post(CHAT, body).json["choices"][0]["message"]
        assert (message["reasoning_content"] or "", message["content"] or "") == (thought, said)
        assert streamed(server, body) == {"content": said, "reasoning_content": thought}
        hidden = server.post(CHAT, body | {"include_reasoning": False}).json["choices"][0]
        assert hidden["message"]["reasoning_content"] is None
        assert (hidden["message"]["content"] or "") == said


def test_calls_are_looked_for_outside_of_thoughts(tmp_path):
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    says = f"<think>Should I {call}?</think>\n\nSo: {call}"
    with speaking(tmp_path, QWEN, says) as server:
        choice = server.post(CHAT, HELLO_CHAT | {"tools": TOOLS, "max_tokens": 150}).json
        (choice,) = choice["choices"]
    assert len(choice["message"]["tool_calls"]) == 1 and choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == f"Should I {call}?"
    assert choice["message"]["content"] == "So:"


def test_reasoning_effort_reaches_the_template(tmp_path):
    template = "{{ reasoning_effort or 'any' }}"
    template += "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
    with speaking(tmp_path, template, "a") as server:
        for effort, prompt in (("low", "low"), ("none", "noneFalse"), (None, "any")):
            assert server.post(CHAT, HELLO_CHAT | {"reasoning_effort": effort}).status == 200
            assert prompt_of(server) == prompt


def test_a_demanded_shape_is_no_thought(tmp_path):
    """A prompt that opens the thoughts closes them for a response format."""
    with speaking(tmp_path, R1, '{"a": 1}') as server:
        body = HELLO_CHAT | {"response_format": {"type": "json_object"}, "max_tokens": 30}
        message = server.post(CHAT, body).json["choices"][0]["message"]
        assert message["content"] == '{"a": 1}' and message["reasoning_content"] is None
        assert prompt_of(server) == "hello;<think>\n\n</think>\n\n"


HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.thinking }}{{ m.content }}<|end|>"
    "{% endfor %}<|start|>assistant{# <|channel|> functions #}"
)


def test_channels(tmp_path):
    """The channels of gpt-oss."""
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    final = f"{thought}<|channel|>final<|message|>It is 4."
    call = f'{thought}<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{"x": 1}}'
    body = HELLO_CHAT | {"max_tokens": 150, "tools": TOOLS}
    with speaking(tmp_path, HARMONY, final) as server:
        message = server.post(CHAT, body).json["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "It is 4.")
        assert streamed(server, body) == {"content": "It is 4.", "reasoning_content": "Hm."}
        server.engine.says = call
        choice = server.post(CHAT, body).json["choices"][0]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
        (made,) = choice["message"]["tool_calls"]
        assert made["function"] == {"name": "f", "arguments": '{"x": 1}'}
        # With thoughts and calls, its template takes no content.
        past = {"role": "assistant", "tool_calls": [made], "content": "So:", "reasoning": "Hm."}
        messages = [*HELLO_CHAT["messages"], past]
        assert server.post(CHAT, HELLO_CHAT | {"messages": messages}).status == 200
        assert "<|message|>Hm.<|end|>" in prompt_of(server)
        # A response format is answered at once, without thoughts.
        server.engine.says = "{}"
        shape = {"response_format": {"type": "json_object"}}
        message = server.post(CHAT, HELLO_CHAT | shape).json["choices"][0]["message"]
        assert message["content"] == "{}"
        assert prompt_of(server).endswith("<|start|>assistant<|channel|>final<|message|>")


def test_templates_have_names(tmp_path):
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("found: {{ messages }}")
    with speaking(tmp_path, "plain", "a") as server:
        for change, begin in (({"chat_template": "rag"}, "found: "), ({}, "plain")):
            assert server.post(CHAT, HELLO_CHAT | change).status == 200
            assert prompt_of(server).startswith(begin)
        answer = server.post(CHAT, HELLO_CHAT | {"chat_template": "{{ 1 }}"})
        assert answer.status == 400 and "'default', 'rag'" in answer.error["message"]
        assert answer.error["param"] == "chat_template"
