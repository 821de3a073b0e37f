"""Chat templates: from messages to the text that a model was trained to continue.

They are Jinja files of the model directory, run as transformers runs them: in a sandbox without
access to attributes that begin with an underscore or to anything that changes its arguments.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from jax_attn.serve._chat import harmony, reasoning, strict_json
from jax_attn.serve._chat.tools import format_of


class ChatTemplateError(ValueError):
    """The template does not compile, refuses the messages, or fails on them."""


MAX_CHARS = 1 << 24  # of the rendered text: four times the longest body
MAX_SECONDS = 10.0


class ChatTemplate:
    """A model's compiled templates. Without any, `render` raises.

    tool_format: how the templates have the model write tool calls; None: not at all, or in an
    unknown format.
    thinks, writes_channels: how they have it write its thoughts (see reasoning, harmony).
    source: of the template that serves requests without tools; "": there is none.
    """

    def __init__(self, sources: Mapping[str, str], variables: Mapping[str, Any]):
        """sources: templates by name. A single template serves every request, whatever its name.
        Otherwise "tool_use", if present, serves requests with tools, and "default" the others. A
        request may name another one.

        variables: variables that templates expect beside the messages, such as bos_token.
        """
        self._variables = dict(variables)
        if len(sources) > 1 and "default" not in sources:
            raise ChatTemplateError(
                f"chat_template: expected one named 'default', got {', '.join(sorted(sources))}"
            )
        self._compiled = {name: _compile(source) for name, source in sources.items()}
        default = "default" if "default" in sources else next(iter(sources), None)
        self._template = self._compiled.get(default or "")
        self._with_tools = self._compiled.get("tool_use", self._template)
        self.source = source = sources.get(default or "", "")
        self.tool_format = format_of(sources.get("tool_use", source))
        self.thinks = reasoning.thinks(source)
        self.writes_channels = harmony.writes_channels(source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        name: str | None = None,
        continues: bool = False,
    ) -> str:
        """Renders the prompt, up to where the assistant's answer begins.

        variables: more variables for this rendering. They do not replace messages or tools.
        tools: descriptions of functions that the model may call.
        name: of the template; None: chosen as the constructor describes.
        continues: end at the end of the last message's content instead.

        Raises:
          ChatTemplateError: the template fails, or the text exceeds MAX_CHARS or MAX_SECONDS.
        """
        template = self._template if tools is None else self._with_tools
        if name is not None:
            template = self._named(name)
        if template is None:
            raise ChatTemplateError(
                "the model directory has no chat template (chat_template.jinja, or chat_template "
                "in tokenizer_config.json); use /v1/completions"
            )
        pieces, num_chars, end = [], 0, time.monotonic() + MAX_SECONDS
        try:
            for piece in template.generate(
                {
                    "add_generation_prompt": True,
                    "documents": None,
                    **self._variables,
                    **(variables or {}),
                    "messages": messages,
                    "tools": tools,
                }
            ):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > MAX_CHARS:
                    raise ChatTemplateError(f"the chat template wrote over {MAX_CHARS} characters")
                if time.monotonic() > end:
                    raise ChatTemplateError(f"the chat template took over {MAX_SECONDS:g} s")
        except ChatTemplateError:
            raise
        except Exception as error:  # a template can raise any exception
            raise ChatTemplateError(f"the chat template failed: {error}") from error
        # Half a surrogate pair, from the arguments of a call, has no tokens.
        text = "".join(pieces).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return _open_end(text, messages[-1].get("content")) if continues else text

    def _named(self, name: str) -> jinja2.Template:
        if name not in self._compiled:
            names = ", ".join(map(repr, sorted(self._compiled))) or "none"
            raise ChatTemplateError(
                f"chat_template: expected the name of one of the model's ({names}), got "
                f"{name[:100]!r}"
            )
        return self._compiled[name]


def _open_end(text: str, content: Any) -> str:
    """Cuts the rendered text at the end of the last message's content, as transformers does."""
    stripped = content.strip() if isinstance(content, str) else ""
    begin = text.rfind(stripped)
    if begin < 0 or not stripped:
        raise ChatTemplateError(
            "continue_final_message: expected a template that writes the content of the last "
            "message, and a content that is not empty"
        )
    kept = content.lstrip()
    return text[: begin + len(kept if text.startswith(kept, begin) else stripped)]


def load(directory: str | Path) -> ChatTemplate:
    """Reads chat_template.jinja or, without it, chat_template in tokenizer_config.json.

    The templates in additional_chat_templates are read too. Each is named after its file.

    Raises:
      ChatTemplateError: the template does not compile, or a file cannot be read.
    """
    config = tokenizer_config(directory)
    file = Path(directory) / "chat_template.jinja"
    source: Any = config.get("chat_template")
    if file.is_file():
        source = file.read_text(encoding="utf-8")
    sources = {} if source is None else {"default": source}
    if isinstance(source, list):  # several, each with a name
        try:
            sources = {entry["name"]: entry["template"] for entry in source}
        except (KeyError, TypeError):
            sources = {"default": source}
    for file in sorted((Path(directory) / "additional_chat_templates").glob("*.jinja")):
        sources[file.stem] = file.read_text(encoding="utf-8")
    if not all(isinstance(text, str) for text in (*sources, *sources.values())):
        raise ChatTemplateError(
            f"{directory}: chat_template: expected a text, or a list of objects with name and "
            "template"
        )
    variables = {
        # A special token is a string or an object that holds the string.
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in config.items()
        if name.endswith("_token") and isinstance(value, (str, dict))
    }
    return ChatTemplate(sources, variables)


def tokenizer_config(directory: str | Path) -> dict[str, Any]:
    """tokenizer_config.json, or {} where there is none. Raises ChatTemplateError."""
    path = Path(directory) / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ChatTemplateError(f"{path}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ChatTemplateError(f"{path}: expected an object, got {type(config).__name__}")
    return config


def _compile(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ChatTemplateError(f"the chat template does not compile: {error}") from error


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks what to train on; here it is only its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, **kwargs: Any) -> str:
    # Jinja's own escapes for HTML.
    return strict_json.sendable(json.dumps(value, ensure_ascii=ensure_ascii, **kwargs))


def _raise(message: str) -> NoReturn:
    raise ChatTemplateError(f"the chat template refuses these messages: {message}")
