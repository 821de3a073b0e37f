"""How to sample: the fields of a request, for callers in Python."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

from jax_attn.serve._grammar import grammar
from jax_attn.serve._openai.prepare import seed_of_choice
from jax_attn.serve._scheduling import request


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample the completions of a prompt. Neutral values turn a feature off.

    n: completions of each prompt.
    max_tokens: of a completion; None: up to the model's limit. 0: the prompt is only read.
    min_tokens: no end of sequence and no stop before so many.
    temperature, top_k, top_p, min_p, repetition_penalty: None: the default of the model's
      generation_config.json, or no effect. temperature 0 takes the likeliest token.
    presence_penalty, frequency_penalty: OpenAI's.
    seed: None: random for each prompt. With a seed all prompts of a call share it; pass a list of
      SamplingParams for different ones. Choices of a prompt have seeds that follow from it.
    logprobs: True: the logprob of each token; k: also those of the k likeliest, at most 20.
    prompt_logprobs: likewise for the prompt's tokens. Such a prompt bypasses the prefix cache.
    logprobs_of: "sampled": logprobs are of the distribution sampled from: after bias, penalties,
      grammar, temperature and filters. At temperature 0 one token has all probability. "model":
      they are of the model's own logits, as the server's. For a prompt's tokens, "sampled" applies
      temperature, top_k, top_p and min_p.
    stop, stop_token_ids: strings and tokens that end a text. include_stop: the text has them.
    logit_bias: added to the logits of tokens.
    ignore_eos: the end-of-sequence token does not end a text.
    skip_special_tokens: in the text.
    json_schema, regex, grammar, choice: at most one; the text follows a JSON schema (an object or a
      text), a regular expression, a Lark grammar, or is one of several texts.
    priority: lower runs first. deadline: seconds from the call, after which a text ends.
    cache_salt: prefixes are shared only between requests with the same salt.
    adapter: the name of a LoRA adapter (LLM.load_lora); "": the model itself.

    Raises:
      ValueError: a value outside of its range; the message begins with the field's name.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logprobs: bool | int | None = None
    prompt_logprobs: bool | int | None = None
    logprobs_of: Literal["sampled", "model"] = "sampled"
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop: bool = False
    logit_bias: Mapping[int, float] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    json_schema: Mapping[str, Any] | str | bool | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: Sequence[str] | None = None
    priority: int = 0
    deadline: float | None = None
    cache_salt: str = ""
    adapter: str = ""

    def __post_init__(self) -> None:
        for name, (what, holds) in _KINDS.items():
            value = getattr(self, name)
            if not holds(value):
                raise ValueError(f"{name}: expected {what}, got {value!r:.100}")
        if self.n < 1:
            raise ValueError(f"n: expected at least 1, got {self.n}")
        if self.deadline is not None and not self.deadline > 0:
            raise ValueError(f"deadline: expected seconds above 0, got {self.deadline!r}")
        given = [name for name in _CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{given[0]}: expected one constraint, got {given[1]} too")
        self.of_sequence({}, self.max_tokens or max(self.min_tokens, 1), 0)

    def fields(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of the engine's SamplingParams that all sequences of a prompt share.

        defaults: of the fields that are None, by name.
        """
        top, prompt_top = _number(self.logprobs), _number(self.prompt_logprobs)
        asked = [k for k in (top, prompt_top) if k is not None]
        return {
            "min_tokens": self.min_tokens,
            **{
                name: defaults.get(name, neutral) if value is None else value
                for name, neutral in _DEFAULTS.items()
                for value in (getattr(self, name),)
            },
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logprobs": max(asked, default=None),
            "prompt_logprobs": prompt_top is not None,
            "logprobs_of": self.logprobs_of,
            "stop_token_ids": tuple(self.stop_token_ids),
            "stop": (self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            "logit_bias": tuple((self.logit_bias or {}).items()),
            "ignore_eos": self.ignore_eos,
            "skip_special_tokens": self.skip_special_tokens,
            "include_stop": self.include_stop,
            "grammar": self._grammar(),
        }

    def of_sequence(
        self, defaults: Mapping[str, Any], max_tokens: int, seed: int
    ) -> request.SamplingParams:
        """The engine's SamplingParams. Raises ValueError."""
        return request.SamplingParams(max_tokens=max_tokens, seed=seed, **self.fields(defaults))

    def seeds(self) -> list[int]:
        """A seed for each of the n completions of a prompt."""
        seed = secrets.randbits(63) if self.seed is None else int(self.seed)
        return [seed_of_choice(seed, choice) for choice in range(self.n)]

    @property
    def num_top(self) -> int | None:
        """The likeliest tokens to report for each token; None: no logprobs."""
        return _number(self.logprobs)

    @property
    def num_prompt_top(self) -> int | None:
        return _number(self.prompt_logprobs)

    @property
    def has_grammar(self) -> bool:
        return any(getattr(self, name) is not None for name in _CONSTRAINTS)

    def _grammar(self) -> str | None:
        """The grammar's text, which the engine compiles. Raises ValueError."""
        if self.json_schema is not None:
            schema = self.json_schema
            return grammar.from_json_schema(
                schema if isinstance(schema, (str, bool)) else dict(schema)
            )
        if self.regex is not None:
            return grammar.from_regex(self.regex)
        if self.grammar is not None:
            return grammar.from_lark(self.grammar)
        return None if self.choice is None else grammar.from_choices(list(self.choice))


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_list_of(holds: Callable[[Any], bool], value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(map(holds, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_biases(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        _is_integer(token) and _is_number(bias) for token, bias in value.items()
    )


def _or_none(what: str, holds: Callable[[Any], bool]) -> tuple[str, Callable[[Any], bool]]:
    return f"{what} or None", lambda value: value is None or holds(value)


_INTEGER, _NUMBER = ("an integer", _is_integer), ("a number", _is_number)
_ASKED = _or_none("True, False, an integer", lambda x: isinstance(x, Integral))

# What a field's value must be, for fields where a wrong one would fail later: amid a step, which
# other callers share, or not at all.
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("n", "min_tokens", "priority"), _INTEGER),
    **dict.fromkeys(("max_tokens", "top_k", "seed"), _or_none(*_INTEGER)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), _NUMBER),
    **dict.fromkeys(
        ("temperature", "top_p", "min_p", "repetition_penalty", "deadline"), _or_none(*_NUMBER)
    ),
    **dict.fromkeys(("logprobs", "prompt_logprobs"), _ASKED),
    "stop": ("a text or texts", lambda x: isinstance(x, str) or _is_list_of(_is_text, x)),
    "stop_token_ids": ("a list of integers", lambda x: _is_list_of(_is_integer, x)),
    "logit_bias": _or_none("a map from integers to numbers", _are_biases),
    "choice": _or_none("a list of texts", lambda x: bool(x) and _is_list_of(_is_text, x)),
    **dict.fromkeys(("regex", "grammar"), _or_none("a text", _is_text)),
    **dict.fromkeys(("cache_salt", "adapter"), ("a text", _is_text)),
}

_CONSTRAINTS = ("json_schema", "regex", "grammar", "choice")

# Fields whose None is a default of the model, and their neutral values.
_DEFAULTS = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


def _number(asked: bool | int | None) -> int | None:
    """The likeliest tokens of a field: None for False and None, 0 for True."""
    if asked is None or asked is False:
        return None
    return 0 if asked is True else asked
