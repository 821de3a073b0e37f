"""Whole chat templates: which format of tool calls each has, and that its own calls are read."""

import json

import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")

from helpers.serve.written_calls import DIRECTORY, FORMATS, ONE_CALL, shown, template
from jax_attn.serve._chat.harmony import HarmonySplitter
from jax_attn.serve._chat.tools import HARMONY, ToolParser, format_of

NONE = sorted(path.stem for path in (DIRECTORY / "none").glob("*.jinja"))
CALLS = [
    (
        "get_weather",
        '{"city": "Paris </tool_call> é", "days": [1, -2.5], "at": {"x": 1e999, "y": true}}',
    ),
    ("do-nothing", "{}"),
]
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]


def test_every_template_has_a_row():
    assert sorted(path.stem for path in DIRECTORY.glob("*.jinja")) == sorted(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
def test_format(name):
    loaded = template(name)
    assert loaded.tool_format == FORMATS[name]
    assert loaded.thinks == (name in ("qwen3", "deepseek_r1", "deepseek_v3.1"))
    assert loaded.writes_channels == (name == "gpt_oss")
    assert "get_weather" in loaded.render([{"role": "user", "content": "hi"}], {}, TOOLS) or (
        name.startswith("deepseek")  # tools are put into the system message by hand
    )


@pytest.mark.parametrize("name", NONE)
def test_other_formats_are_not_taken_for_one(name):
    assert format_of((DIRECTORY / "none" / f"{name}.jinja").read_text(encoding="utf-8")) is None


@pytest.mark.parametrize("name", FORMATS)
def test_calls_that_a_template_shows_are_read(name):
    """What the model sees of its past calls is what the server reads from its answers."""
    calls = CALLS[:1] if name in ONE_CALL else CALLS
    text = shown(name, calls)
    if FORMATS[name] == HARMONY:
        splitter = HarmonySplitter()
        found = [*splitter.push(text).calls, *splitter.flush().calls]
    else:
        parser = ToolParser(FORMATS[name])
        found = [*parser.push(text)[1], *parser.flush()[1]]
    got = [(call.name, json.loads(call.arguments)) for call in found]
    assert got == [(each, json.loads(arguments)) for each, arguments in calls], text
