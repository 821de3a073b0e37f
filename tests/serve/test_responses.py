"""/v1/responses with a fake engine: items in and out, events, stored responses."""

import json

import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")
openai = pytest.importorskip("openai", reason="needs the extra `test`")

from pydantic import BaseModel, TypeAdapter  # noqa: E402

from helpers.serve.fake_engine import FakeEngine, fake_model  # noqa: E402
from helpers.serve.live_server import KEYS, eventually, serving  # noqa: E402
from jax_attn.serve._openai import responses_api  # noqa: E402
from jax_attn.serve._openai.bounds import KeyLimits  # noqa: E402
from jax_attn.serve._openai.response_store import BoundedStore, StoredResponse  # noqa: E402

PATH = "/v1/responses"
HELLO = {"input": "hello", "max_output_tokens": 4}
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
# Shows everything that it gets, and supports thoughts and calls.
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.reasoning_content %}<think>"
    "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]"
    "{% endfor %}{{ m.name or '' }};{% endfor %}"
    '{% if tools %}<tool_call>{"arguments": 1}{% endif %}{{ reasoning_effort or "" }}'
    "{# splits at </think> #}"
)
TOOL = {
    "type": "function",
    "name": "f",
    "parameters": {
        "type": "object",
        "properties": {"x": {"type": "integer"}},
        "required": ["x"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest.fixture
def server(tmp_path):
    """A server whose engine answers server.engine.says."""
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    engine = FakeEngine(fake_model().tokenizer)
    engine.limits.max_model_len = 1024
    engine.says = "It is 4."
    with serving(engine, directory=tmp_path) as server:
        yield server


def prompt_of(server) -> str:
    seq = server.engine.submitted[-1]
    return server.engine.tokenizer.decode(seq.tokens[: seq.num_prompt], skip_special_tokens=False)


def is_valid(response) -> None:
    """Validates with the client's own types, which the client itself does not do."""
    plain = response if isinstance(response, dict) else response.model_dump(warnings=False)
    if plain.get("usage"):  # newer types need prices of caches
        plain["usage"]["input_tokens_details"]["cache_write_tokens"] = 0
    TypeAdapter(openai.types.responses.Response).validate_python(plain)


# ---- one answer --------------------------------------------------------------------------------


def test_text(server, client):
    response = client.responses.create(
        model="tiny",
        input="What is 2 + 2?",
        instructions="Be brief.",
        max_output_tokens=50,
        temperature=0.5,
        top_p=0.9,
        metadata={"a": "b"},
        extra_body={"top_k": 7, "seed": 3},
    )
    is_valid(response)
    assert response.id.startswith("resp_") and response.status == "completed"
    assert response.output_text == "It is 4." and response.metadata == {"a": "b"}
    (message,) = response.output
    assert (message.role, message.status) == ("assistant", "completed")
    params = server.engine.submitted[-1].params
    assert (params.max_tokens, params.temperature, params.top_p) == (50, 0.5, 0.9)
    assert (params.top_k, params.seed) == (7, 3)
    assert (response.temperature, response.top_p, response.max_output_tokens) == (0.5, 0.9, 50)
    assert prompt_of(server) == "system: Be brief.;user: What is 2 + 2?;"
    usage = response.usage
    assert usage.input_tokens == server.engine.submitted[-1].num_prompt
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.output_tokens_details.reasoning_tokens == 0
    assert response.incomplete_details is None and response.error is None


def test_items(server):
    """All kinds. Consecutive thoughts, text and calls become one message."""
    items = [
        {"role": "developer", "content": "D"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "U"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x",
         "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "A", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x":1}',
         "id": "fc_1", "status": "completed"},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c2", "output": "O2"},
        {"type": "function_call_output", "call_id": "c1",
         "output": [{"type": "input_text", "text": "O1"}]},
        {"type": "function_call", "call_id": "c3", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c3", "output": ""},
        {"role": "assistant", "content": "first"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]  # fmt: skip
    assert server.post(PATH, {"input": items, "reasoning": {"effort": "low"}}).status == 200
    assert prompt_of(server) == (
        'system: D;user: U;assistant: <think>Hm.</think>A[f {"x": 1}][g {}];'
        "tool: O2g;tool: O1f;assistant: [g {}];tool: g;assistant: first;assistant: No.;low"
    )


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         "input", "pictures are not supported by this server"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
         "input[0].content[0].type", "'input_file'"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id", "required"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search' is not supported"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": ""}]},
         "input[0].call_id", "no function_call has it"),
        ({"input": []}, "input", "at least 1"),
        ({"input": None}, "input", "required"),
        ({"background": True, "stream": True}, "background", "needs stream: false"),
        ({"background": True, "store": False}, "background", "needs stream: false"),
        ({"conversation": "c", "previous_response_id": "r"}, "conversation", "only one of"),
        ({"include": ["file_search_call.results"]}, "include[0]", "encrypted_content"),
        ({"top_logprobs": 20, "max_output_tokens": 900}, "max_output_tokens", "are more than"),
        ({"truncation": "auto"}, "truncation", "disabled"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "file_search"}}, "tool_choice.type",
         "'file_search' is not supported"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format", "schema belongs to"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "none"}}}},
         "text.format", ""),
        ({"max_output_tokens": 2000}, "input", "2000 in the completion"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
        ({"max_output_tokens": 5, "min_tokens": 6}, "min_tokens", "more than max_output_tokens"),
        ({"temperature": "1"}, "temperature", "number"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "at most 16"),
        ({"model": "other"}, "model", "is not served here"),
        ({"previous_response_id": "resp_x"}, "previous_response_id", "not found"),
        ({"stream_options": {}}, "stream_options", "needs stream"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_refused_is_named(server, change, param, words):
    answer = server.post(PATH, HELLO | change)
    assert answer.status == (404 if param in ("model", "previous_response_id") else 400)
    error = answer.error
    assert error["param"] == param and words in error["message"], error
    assert "messages" not in error["message"] and not server.engine.live


def test_unknown_fields(server):
    odd = {"mood": 1, "input": [{"role": "user", "content": "a", "mood": 1}]}
    assert server.post(PATH, HELLO | odd).status == 200
    with serving(strict=True) as strict:
        for change, param in ((odd, "input[0].mood"), ({"mood": 1}, "mood")):
            answer = strict.post(PATH, HELLO | change)
            assert answer.status == 400 and answer.error["param"] == param
            assert answer.error["code"] == "unknown_parameter"


@pytest.mark.parametrize(("says", "deadline"), [("", None), ("", 0.05)])
def test_incomplete(server, says, deadline):
    server.engine.says, server.engine.delay = says, 0.02
    body = {"input": "a", "max_output_tokens": 4 if deadline is None else 900}
    response = server.post(PATH, body | {"deadline": deadline}).json
    is_valid(response)
    details = response["incomplete_details"]
    assert response["status"] == response["output"][0]["status"] == "incomplete"
    assert details["reason"] == "max_output_tokens"
    assert details["stop_reason"] == (None if deadline is None else "deadline")


def test_an_empty_answer_has_a_message(server):
    server.engine.says = "<think>\nHm.</think>"
    (thoughts,) = server.post(PATH, HELLO | {"max_output_tokens": 50}).json["output"]
    assert thoughts["content"][0]["text"] == "Hm."
    body = {"input": "a", "max_output_tokens": 9, "text": {"format": {"type": "json_object"}}}
    server.engine.says = "<think></think>"
    (message,) = server.post(PATH, body).json["output"]
    assert message["type"] == "message" and message["content"][0]["text"] == ""


# ---- thoughts, calls, response formats ---------------------------------------------------------


def test_thoughts_and_calls(server, client):
    server.engine.says = f"<think>\nLet me see.\n</think>\n\nSo: {CALL}\n{CALL}"
    request = {"model": "tiny", "input": "hello", "tools": [TOOL], "max_output_tokens": 200}
    response = client.responses.create(**request)
    is_valid(response)
    thoughts, message, *calls = response.output
    assert thoughts.content[0].text == "Let me see." and message.content[0].text == "So:"
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("f", {"x": 1})] * 2
    assert len({call.call_id for call in calls}) == 2
    details = response.usage.output_tokens_details
    assert 3 < details.reasoning_tokens < response.usage.output_tokens - 30
    one = client.responses.create(**request, parallel_tool_calls=False)
    assert len(one.output) == 3
    # The call's result, with the stored response and with all items sent again.
    prompts = []
    outputs = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
        for call in calls
    ]
    client.responses.create(model="tiny", input=outputs, previous_response_id=response.id)
    prompts.append(prompt_of(server))
    by_hand = [{"role": "user", "content": "hello"}, *response.output, *outputs]
    client.responses.create(model="tiny", input=by_hand)
    prompts.append(prompt_of(server))
    assert (
        prompts[0]
        == prompts[1]
        == (
            'user: hello;assistant: <think>Let me see.</think>So:[f {"x": 1}][f {"x": 1}];'
            "tool: donef;tool: donef;"
        )
    )


def test_demanded_calls_follow_the_schema(server, client):
    for choice in ("required", {"type": "function", "name": "f"}):
        client.responses.create(model="tiny", input="a", tools=[TOOL], tool_choice=choice)
        assert '"x"' in server.engine.submitted[-1].params.grammar
    client.responses.create(model="tiny", input="a", tools=[TOOL], tool_choice="none")
    assert server.engine.submitted[-1].params.grammar is None
    other = {"type": "function", "name": "g"}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [other]}
    for choice in (other, allowed):
        answer = server.post(PATH, HELLO | {"tools": [TOOL], "tool_choice": choice})
        assert answer.status == 400 and "'g' is none of the tools" in answer.error["message"]


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools(server, client, mode):
    names = {"f": {"type": "function", "name": "f"}, "h": {"type": "custom", "name": "h"}}
    tools = [TOOL, TOOL | {"name": "g"}, names["h"]]
    choice = {"type": "allowed_tools", "mode": mode, "tools": list(names.values())}
    server.engine.says = CALL
    response = client.responses.create(model="tiny", input="a", tools=tools, tool_choice=choice)
    is_valid(response)
    assert response.output[0].name == "f" and response.tool_choice.mode == mode
    grammar = server.engine.submitted[-1].params.grammar
    assert [f'\\"{name}\\"' in grammar for name in "fgh"] == [True, False, True]


def test_verbosity_is_a_hint(server):
    for verbosity in ("low", "medium", "high"):
        answer = server.post(PATH, HELLO | {"text": {"verbosity": verbosity}})
        assert answer.status == 200, answer.body


def test_parse(server, client):
    class Sum(BaseModel):
        value: int

    server.engine.says = '{"value": 4}'
    response = client.responses.parse(model="tiny", input="2 + 2", text_format=Sum)
    assert response.output_parsed == Sum(value=4)
    assert '"value"' in server.engine.submitted[-1].params.grammar
    assert response.text.format.type == "json_schema" and response.text.format.name == "Sum"


def test_a_grammar_that_gets_stuck(server):
    server.engine.stuck = {"0"}
    body = HELLO | {"text": {"format": {"type": "json_object"}}, "max_output_tokens": 50}
    answer = server.post(PATH, body)
    assert answer.status == 400 and answer.error["param"] == "text.format"
    *_, last = stream_of(server, body)
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "invalid_prompt"
    is_valid(last["response"])


# ---- streams -----------------------------------------------------------------------------------


def stream_of(server, body) -> list[dict]:
    """Each event's data, whose type is the event's name."""
    answer = server.post(PATH, body | {"stream": True})
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/event-stream")
    events = []
    *parts, end = answer.body.decode().split("\n\n")
    assert end == ""
    for part in parts:
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def test_events_of_a_text(server):
    server.engine.says = "It is four, I think."
    first, second, *middle, last = stream_of(server, HELLO | {"max_output_tokens": 50})
    assert first["type"] == "response.created" and second["type"] == "response.in_progress"
    assert first["response"]["status"] == "in_progress" and first["response"]["output"] == []
    assert last["type"] == "response.completed"
    is_valid(last["response"])
    names = [event["type"].removeprefix("response.") for event in middle]
    assert list(dict.fromkeys(names)) == [
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done",
    ]  # fmt: skip
    text = "".join(event.get("delta", "") for event in middle)
    assert text == server.engine.says == middle[-3]["text"] == middle[-2]["part"]["text"]
    assert names.count("output_text.delta") > 3
    (item,) = last["response"]["output"]
    assert item == middle[-1]["item"] and item["id"] == middle[0]["item"]["id"]
    assert {event["item_id"] for event in middle[1:-1]} == {item["id"]}


def test_a_call_that_is_cut_in_a_stream(server, client):
    """Its item is incomplete, and the conversation that goes on has no such call."""
    server.engine.says = f"So: {CALL}\n{CALL}"
    num_tokens = len(server.engine.tokenizer.encode(server.engine.says).ids)
    body = {"input": "a", "tools": [TOOL], "max_output_tokens": num_tokens - 8}
    events = stream_of(server, body)
    last = events[-1]["response"]
    is_valid(last)
    assert last["status"] == "incomplete"
    assert [item["type"] for item in last["output"]] == ["message", *["function_call"] * 2]
    assert [item["status"] for item in last["output"][1:]] == ["completed", "incomplete"]
    assert '{"x": 1}'.startswith(last["output"][2]["arguments"])
    assert [e["item"] for e in events if e["type"].endswith("item.done")] == last["output"]
    answer = {"type": "function_call_output", "output": "done"}
    answer["call_id"] = last["output"][1]["call_id"]
    client.responses.create(model="tiny", input=[answer], previous_response_id=last["id"])
    assert prompt_of(server) == 'user: a;assistant: So:[f {"x": 1}];tool: donef;'

    made = client.conversations.create()
    cut = stream_of(server, body | {"conversation": made.id})[-1]["response"]
    assert cut["output"][2]["status"] == "incomplete"
    items = list(client.conversations.items.list(made.id, order="asc"))
    assert [item.type for item in items] == ["message", "message", "function_call"]
    answer["call_id"] = cut["output"][1]["call_id"]
    client.responses.create(model="tiny", input=[answer], conversation=made.id)
    assert prompt_of(server) == 'user: a;assistant: So:[f {"x": 1}];tool: donef;'


def test_events_of_thoughts_and_calls(server, client):
    """The client can assemble the events, and knows the type of each."""
    server.engine.says = f"<think>Hm, hm.</think>So: {CALL}"
    request = {"input": "a", "tools": [TOOL], "max_output_tokens": 200}
    events = stream_of(server, request)
    adapter = TypeAdapter(openai.types.responses.ResponseStreamEvent)
    for event in events:
        if "response" in event:
            is_valid(event["response"])
        adapter.validate_python(event)
    names = dict.fromkeys(event["type"].removeprefix("response.") for event in events)
    assert {
        "reasoning_text.delta", "reasoning_text.done", "function_call_arguments.delta",
        "function_call_arguments.done",
    } <= names.keys()  # fmt: skip
    items = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert items == events[-1]["response"]["output"]
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]
    pieces = [e["delta"] for e in events if e["type"].endswith("function_call_arguments.delta")]
    assert "".join(pieces) == items[-1]["arguments"] == '{"x": 1}' and len(pieces) > 3
    with client.responses.stream(model="tiny", **request) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    assert final.output_text == "So:" and final.output[2].parsed_arguments == {"x": 1}


def test_a_stream_that_is_cut_short(server):
    server.engine.says = ""
    *_, last = stream_of(server, HELLO)
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"]["reason"] == "max_output_tokens"


def test_a_stream_that_fails(server):
    server.engine.says = ""
    body = {"input": [{"role": "user", "content": "a"}], "max_output_tokens": 50}
    server.engine._fail_tokens = server.engine.tokenizer.encode(";").ids
    *_, last = stream_of(server, body)
    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "asked to fail"}
    assert server.get(f"{PATH}/{last['response']['id']}").status == 404
    answer = server.post(PATH, body)
    assert answer.status == 500 and answer.error["type"] == "server_error"


def test_a_client_that_leaves(server):
    server.engine.says, server.engine.holds_at = "", 3
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        stream = client.responses.create(model="tiny", input="a", stream=True)
        event = next(iter(stream))
        eventually(lambda: server.engine.live)
        stream.close()
    eventually(lambda: not server.engine.live)
    assert event.type == "response.created"
    assert server.get(f"{PATH}/{event.response.id}").status == 404
    outcome = b'requests_total{outcome="disconnected"} 1'
    eventually(lambda: outcome in server.get("/metrics").body)


# ---- stored responses --------------------------------------------------------------------------


def test_a_conversation(server, client):
    first = client.responses.create(model="tiny", input="one", instructions="I1")
    second = client.responses.create(
        model="tiny", input="two", previous_response_id=first.id, instructions="I2"
    )
    third = client.responses.create(model="tiny", input="three", previous_response_id=second.id)
    assert prompt_of(server) == (
        "user: one;assistant: It is 4.;user: two;assistant: It is 4.;user: three;"
    )
    assert third.previous_response_id == second.id
    found = client.responses.retrieve(second.id)
    assert found == second
    client.responses.delete(second.id)
    for gone in (
        lambda: client.responses.retrieve(second.id),
        lambda: client.responses.delete(second.id),
        lambda: client.responses.create(input="a", previous_response_id=second.id),
        lambda: client.responses.cancel(second.id),
    ):
        with pytest.raises(openai.NotFoundError, match="not found: it is not yours, was not"):
            gone()
    # Earlier responses need not be stored.
    client.responses.create(model="tiny", input="a", previous_response_id=third.id)
    assert "user: two" in prompt_of(server)
    with pytest.raises(openai.BadRequestError, match="it has ended"):
        client.responses.cancel(third.id)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_the_text_alone(server, stream):
    server.engine.says = "<think>Hm.</think>It is 4."
    more = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    body = {"input": "a", "max_output_tokens": 60} | more
    if stream:
        events = stream_of(server, body)
        response = events[-1]["response"]
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        entries = [entry for event in deltas for entry in event["logprobs"]]
        assert entries == response["output"][1]["content"][0]["logprobs"]
    else:
        response = server.post(PATH, body).json
        entries = response["output"][1]["content"][0]["logprobs"]
    is_valid(response)
    assert "".join(entry["token"] for entry in entries) == "It is 4."
    assert entries[0]["logprob"] == -0.5 and len(entries[0]["top_logprobs"]) == 2
    assert response["top_logprobs"] == 2
    none = server.post(PATH, HELLO).json["output"][-1]["content"][0]
    assert none["logprobs"] == []


def test_input_items_and_their_tokens(server, client):
    items = [
        {"role": "user", "content": "U", "id": "msg_mine"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "H"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "A"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "O"},
    ]
    counted = client.responses.input_tokens.count(model="tiny", input=items, instructions="I")
    response = client.responses.create(model="tiny", input=items, instructions="I")
    assert counted.input_tokens == response.usage.input_tokens
    listed = list(client.responses.input_items.list(response.id, limit=2, order="asc"))
    kinds = ["message", "reasoning", "message", "function_call", "function_call_output"]
    assert [item.type for item in listed] == kinds and listed[0].id == "msg_mine"
    assert len({item.id for item in listed}) == 5
    assert listed[0].content[0].type == "input_text" and listed[2].content[0].text == "A"
    newest = client.responses.input_items.list(response.id, limit=2)
    assert [item.type for item in newest.data] == kinds[:2:-1] and newest.has_more
    for limit in (5, 6):
        whole = client.responses.input_items.list(response.id, limit=limit)
        assert len(whole.data) == 5 and not whole.has_more
    first = prompt_of(server)
    again = [item.model_dump(warnings=False) for item in listed]
    client.responses.create(model="tiny", input=again, instructions="I")
    assert prompt_of(server) == first  # what is read back may be sent again, thoughts included
    for query, words in [
        ("limit=0", "1 to 100"),
        ("limit=0000005", "1 to 100"),  # seven digits are not read
        ("limit=" + "9" * 5000, "1 to 100"),
        ("order=up", "asc or desc"),
        ("after=x", "no it"),
    ]:
        answer = server.get(f"{PATH}/{response.id}/input_items?{query}")
        assert answer.status == 400 and words in answer.error["message"]
    assert server.get(f"{PATH}/x/input_items").status == 404


def test_references_to_items_of_earlier_outputs(server, client):
    """They are the items: clients send them instead of items that are stored."""
    server.engine.says = f"<think>\nHm.\n</think>\n\nSo: {CALL}"
    asked = {"model": "tiny", "tools": [TOOL]}
    first = client.responses.create(input="one", **asked)
    thoughts, message, call = first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    server.engine.says = "Yes."
    second = client.responses.create(
        input=[{"role": "user", "content": "one"}, *map(reference, first.output), result], **asked
    )
    wanted = 'user: one;assistant: <think>Hm.</think>So:[f {"x": 1}];tool: donef;'
    assert prompt_of(server).startswith(wanted)
    listed = list(client.responses.input_items.list(second.id, order="asc"))
    assert [item.id for item in listed[1:4]] == [thoughts.id, message.id, call.id]
    assert listed[2].content[0].text == "So:"  # they are listed whole
    third = [*map(reference, [*first.output[2:], *second.output]), {"role": "user", "content": "b"}]
    counted = client.responses.input_tokens.count(model="tiny", input=third)
    used = client.responses.create(model="tiny", input=third).usage
    assert counted.input_tokens == used.input_tokens
    assert prompt_of(server) == 'assistant: [f {"x": 1}];assistant: Yes.;user: b;'


def reference(item) -> dict:
    return {"type": "item_reference", "id": item.id}


def test_references_that_lead_nowhere(server, client, monkeypatch):
    first = client.responses.create(model="tiny", input="one")
    asked = reference(first.output[0])
    answer = server.post(PATH, {"input": [asked, asked]})
    assert answer.status == 400 and "input[0] is the same item" in answer.error["message"]
    kept = client.responses.create(model="tiny", input="one", store=False).output[0]
    deleted = client.responses.create(model="tiny", input="one")
    client.responses.delete(deleted.id)
    other = asked["id"][:-1] + "1"
    for id in ("msg_1", "", kept.id, deleted.output[0].id, other):
        answer = server.post(PATH, {"input": [asked, {"type": "item_reference", "id": id}]})
        assert answer.status == 404 and answer.error["code"] == "item_not_found", id
        assert answer.error["param"] == "input[1].id"
    conversation = server.post("/v1/conversations", {"items": [asked]})
    assert conversation.status == 400 and "'item_reference'" in conversation.error["message"]
    monkeypatch.setattr(responses_api, "_MAX_REFERRED_BYTES", 100)
    answer = server.post(PATH, {"input": [asked]})
    assert answer.status == 400 and "use previous_response_id" in answer.error["message"]


def test_events_of_a_stored_response_are_refused(server, client):
    """A client that waits for them would get none, and no error."""
    first = client.responses.create(model="tiny", input="one")
    with pytest.raises(openai.BadRequestError, match="stream"):
        client.responses.retrieve(first.id, stream=True)
    assert client.responses.retrieve(first.id, stream=False) == first


def test_in_the_background(server, client):
    server.engine.says, server.engine.holds_at = "", 3
    begun = client.responses.create(model="tiny", input="a", background=True, max_output_tokens=9)
    is_valid(begun)
    assert begun.background and begun.status in ("queued", "in_progress")
    eventually(lambda: client.responses.retrieve(begun.id).status == "in_progress")
    with pytest.raises(openai.BadRequestError, match="has not ended"):
        client.responses.create(model="tiny", input="b", previous_response_id=begun.id)
    server.engine.holds_at = None
    eventually(lambda: client.responses.retrieve(begun.id).status == "incomplete")
    assert client.responses.retrieve(begun.id).usage.output_tokens == 9
    server.engine.says = "Yes."
    client.responses.create(model="tiny", input="b", previous_response_id=begun.id)
    with pytest.raises(openai.BadRequestError, match="it has ended"):
        client.responses.cancel(begun.id)


def test_the_background_is_left(server, client):
    server.engine.says, server.engine.holds_at = "", 3
    ask = {"model": "tiny", "input": "a", "background": True}
    first, second = (client.responses.create(**ask) for _ in range(2))
    eventually(lambda: len(server.engine.live) == 2)
    assert client.responses.cancel(first.id).status == "cancelled"
    assert client.responses.cancel(first.id).status == "cancelled"
    assert client.responses.retrieve(first.id).status == "cancelled"
    client.responses.delete(second.id)
    eventually(lambda: not server.engine.live)
    assert server.get(f"{PATH}/{second.id}").status == 404
    server.engine.holds_at = None
    server.engine._fail_tokens = server.engine.tokenizer.encode(";").ids
    third = client.responses.create(**ask)
    eventually(lambda: client.responses.retrieve(third.id).status == "failed")
    assert client.responses.retrieve(third.id).error.message == "asked to fail"
    assert not server.app.state.server.limiter.held("")


def test_a_conversation_object(server, client):
    made = client.conversations.create(
        items=[{"role": "user", "content": "one"}], metadata={"a": "b"}
    )
    assert made.metadata == {"a": "b"} and made.id.startswith("conv_")
    server.engine.says = "<think>Hm.</think>It is 4."
    first = client.responses.create(model="tiny", input="two", conversation=made.id)
    assert first.conversation.id == made.id
    is_valid(first)
    client.responses.create(model="tiny", input="three", conversation={"id": made.id}, store=False)
    assert prompt_of(server) == (
        "user: one;user: two;assistant: <think>Hm.</think>It is 4.;user: three;"
    )
    items = list(client.conversations.items.list(made.id, order="asc", limit=3))
    kinds = ["message", "message", "reasoning", "message", "message", "reasoning", "message"]
    assert [item.type for item in items] == kinds
    assert client.conversations.items.retrieve(items[2].id, conversation_id=made.id).id
    client.conversations.items.delete(items[0].id, conversation_id=made.id)
    added = client.conversations.items.create(made.id, items=[{"role": "user", "content": "four"}])
    assert added.data[0].content[0].text == "four"
    client.responses.create(model="tiny", input="five", conversation=made.id)
    assert prompt_of(server).startswith("user: two;") and "user: four;user: five" in prompt_of(
        server
    )
    assert client.conversations.update(made.id, metadata={"c": "d"}).metadata == {"c": "d"}
    assert client.conversations.retrieve(made.id).metadata == {"c": "d"}
    assert client.conversations.delete(made.id).deleted
    for gone in (
        lambda: client.conversations.retrieve(made.id),
        lambda: client.responses.create(model="tiny", input="a", conversation=made.id),
        lambda: client.conversations.items.list(made.id),
    ):
        with pytest.raises(openai.NotFoundError, match="not found: it is not yours, was deleted"):
            gone()
    with pytest.raises(openai.BadRequestError, match="items"):
        client.conversations.create(items=[{"role": "user", "content": "a"}] * 21)


def test_conversations_of_another_tenant():
    with serving(api_keys=KEYS) as server:
        keys = [{"Authorization": f"Bearer {key}"} for key in KEYS]
        id = server.post("/v1/conversations", {}, **keys[0]).json["id"]
        for path in (f"/v1/conversations/{id}", f"/v1/conversations/{id}/items"):
            assert [server.get(path, **key).status for key in keys] == [200, 404]


def test_not_stored(server):
    response = server.post(PATH, HELLO | {"store": False}).json
    assert response["store"] is False
    assert server.get(f"{PATH}/{response['id']}").status == 404


def test_streams_are_kept(server):
    *_, last = stream_of(server, HELLO)
    stored = server.get(f"{PATH}/{last['response']['id']}")
    assert stored.json == last["response"] and stored.headers["cache-control"] == "no-store"


def test_of_another_tenant():
    def key(i):
        return {"Authorization": f"Bearer {KEYS[i]}"}

    with serving(api_keys=KEYS) as server:
        mine = server.post(PATH, HELLO, **key(0)).json["id"]
        path = f"{PATH}/{mine}"
        assert server.get(path).status == 401
        assert server.get(path, **key(1)).status == 404
        assert server.request("DELETE", path, **key(1)).status == 404
        item = server.get(path, **key(0)).json["output"][0]["id"]
        asked = {"input": [{"type": "item_reference", "id": item}]}
        assert [server.post(PATH, asked, **key(i)).status for i in range(2)] == [200, 404]
        answer = server.post(PATH, HELLO | {"previous_response_id": mine}, **key(1))
        assert answer.status == 404 and answer.error["code"] == "previous_response_not_found"
        assert server.get(path, **key(0)).status == 200
        deleted = server.request("DELETE", path, **key(0)).json
        assert deleted == {"id": mine, "object": "response", "deleted": True}


def test_limits_are_those_of_other_routes():
    limits = KeyLimits(requests=9, choices=9, tokens=30)
    with serving(key_limits=limits) as server:
        answer = server.post(PATH, HELLO | {"input": "word " * 40})
        assert answer.status == 400 and "prompt tokens" in answer.error["message"]
        server.engine.live |= {f"other{i}": 0 for i in range(40)}
        answer = server.post(PATH, HELLO)
        assert answer.status == 429 and answer.error["reason"] == "queue_full"
        assert 'requests_total{outcome="rejected"} 1' in server.get("/metrics").body.decode()


def stored(num_bytes: int) -> StoredResponse:
    return StoredResponse(b"a" * num_bytes, b"")


def test_the_store_forgets_what_was_not_used_for_longest():
    store = BoundedStore(max_bytes=100, max_count=3)
    for name in "abc":
        store.put("t", name, stored(30))
    assert store.get("t", "a") is not None
    store.put("t", "d", stored(1))  # by count
    assert [store.get("t", name) is not None for name in "abcd"] == [True, False, True, True]
    store.put("t", "e", stored(70))  # by bytes: a and c go; d is small
    assert [store.get("t", name) is not None for name in "acde"] == [False, False, True, True]
    store.put("t", "f", stored(101))  # larger than the store
    assert not any(store.get("t", name) for name in "adef")
    store.put("t", "g", stored(100))
    assert store.get("t", "g") and store.remove("t", "g") and not store.remove("t", "g")


def test_one_tenant_does_not_crowd_out_another():
    store = BoundedStore(max_bytes=100, max_count=10)
    store.put("quiet", "q", stored(20))
    for i in range(50):
        store.put("loud", str(i), stored(10))
    assert store.get("quiet", "q") and not store.get("loud", "0") and store.get("loud", "49")
    assert store.get("quiet", "49") is None
    many = BoundedStore(max_bytes=1000, max_count=5)
    many.put("quiet", "q", stored(500))
    for i in range(50):
        many.put("loud", str(i), stored(1))
    assert many.get("quiet", "q") and many.get("loud", "49") and not many.get("loud", "45")
