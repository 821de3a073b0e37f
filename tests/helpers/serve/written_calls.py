"""Tool calls as models write them: directly in a format, or as a chat template shows past ones."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from jax_attn.serve._chat import tools
from jax_attn.serve._chat.chat import ChatTemplate
from jax_attn.serve._openai import schemas
from jax_attn.serve._openai.messages import for_template

Call = tuple[str, str]  # name, arguments as JSON


class Number(str):
    """A number in JSON, with all its digits."""


def loads(text: str) -> Any:
    return json.loads(text, parse_int=Number, parse_float=Number)


DIRECTORY = Path(__file__).parents[2] / "data" / "chat_templates"
FORMATS = {
    "qwen2.5": tools.TAGGED,
    "qwen3": tools.TAGGED,
    "hermes2_pro": tools.TAGGED,
    "llama3.1": tools.BARE,
    "mistral_7b_v0.3": tools.LISTED_SPACE,
    "mistral_nemo": tools.LISTED,
    "mistral_small_3.1": tools.LISTED_SPACE,
    "mistral_small_3.2": tools.NAMED_ID,
    "devstral_small_2507": tools.NAMED,
    "deepseek_v3": tools.DEEPSEEK_V3,
    "deepseek_r1": tools.DEEPSEEK_V3,
    "deepseek_v3.1": tools.DEEPSEEK,
    "gpt_oss": tools.HARMONY,
    "functiongemma": tools.FUNCTION_GEMMA,
    "gemma4": tools.GEMMA_4,
}
ONE_CALL = {"llama3.1", "gpt_oss"}  # these templates show one call in a message
_QUESTION = "Q U E S T I O N"
# What precedes the answer in the prompt, where no mark begins a call; and what ends it.
_BEFORE = {"llama3.1": "assistant<|end_header_id|>\n\n", "gpt_oss": "<|start|>assistant"}
_BEHIND = ("<|eot_id|>", "<|im_end|>\n", "<｜end▁of▁sentence｜>", "<end_of_turn>\n", "<turn|>\n")


@functools.cache
def template(name: str) -> ChatTemplate:
    source = (DIRECTORY / f"{name}.jinja").read_text(encoding="utf-8")
    return ChatTemplate({"default": source}, {"bos_token": "", "eos_token": ""})


def messages(calls: list[Call], content: str = "") -> list[dict[str, Any]]:
    """A conversation that ends with the calls, as the server gives it to templates."""
    made = [
        {"id": f"call0000{i}", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    bodies = [
        schemas.PlainMessage(role="user", content=_QUESTION),
        schemas.PastAnswer.model_validate(
            {"role": "assistant", "content": content, "tool_calls": made}
        ),
    ]
    return [for_template(body, "messages", False) for body in bodies]


def shown(name: str, calls: list[Call], content: str = "") -> str:
    """The answer with the calls, as the template shows it when the conversation goes on."""
    text = template(name).render(messages(calls, content), {"add_generation_prompt": False}, [])
    answer = text.split(_QUESTION)[1]
    if (before := _BEFORE.get(name)) is not None:
        answer = answer.partition(before)[2]
    for end in _BEHIND:
        answer = answer.removesuffix(end)
    return answer


def written(format: tools.ToolFormat, calls: list[Call]) -> str:
    """The calls as the format describes them."""
    if format == tools.HARMONY:
        return "<|start|>assistant".join(
            f"{format.before_name}{name}{format.before_arguments}{arguments}<|call|>"
            for name, arguments in calls
        )
    between = "; " if format.between is None else format.between
    return format.opening + between.join(_one(format, *call) for call in calls) + format.closing


def _one(format: tools.ToolFormat, name: str, arguments: str) -> str:
    before = (format.before_name + name + format.before_arguments).replace("#" * 9, "123abcDEF")
    if format.quote:
        arguments = as_gemma(loads(arguments), format.quote)
    return before + arguments + format.behind


def as_gemma(value: Any, quote: str) -> str:
    if isinstance(value, Number):
        return str(value)
    if isinstance(value, str):
        return quote + value + quote
    if isinstance(value, list):
        return f"[{','.join(as_gemma(item, quote) for item in value)}]"
    if isinstance(value, dict):
        pairs = (f"{key}:{as_gemma(item, quote)}" for key, item in value.items())
        return f"{{{','.join(pairs)}}}"
    return json.dumps(value)
