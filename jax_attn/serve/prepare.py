"""From the body of a request to sequences for the engine: templates, tokens, grammars, checks.

All of it may take a while (a long prompt, a large schema), so the server runs it in a thread.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax_attn.serve import chat, grammar, schemas
from jax_attn.serve.errors import ApiError, bad_field
from jax_attn.serve.request import SamplingParams, Sequence


@dataclass(frozen=True)
class Caller:
    tenant: str  # whose key it is; "" without keys
    arrival: float  # of the request, time.monotonic()


@dataclass(frozen=True)
class Prepared:
    """A checked request. Choice i of prompt p is sequences[p * n + i], and has that index."""

    id: str
    model: str
    prompts: list[list[int]]
    echoes: list[str]  # what precedes the text of each prompt's choices
    sequences: list[Sequence]
    arrival: float  # time.monotonic()

    @property
    def num_choices(self) -> int:
        return len(self.sequences) // len(self.prompts)


class Preparer:
    def __init__(self, model: Any, engine: Any, directory: str | Path, name: str):
        """model: as `jax_attn.models.load` gives it; name: as clients call it.

        Raises:
          chat.ChatTemplateError: the directory's template does not compile.
        """
        self.name = name
        self.max_model_len: int = engine.limits.max_model_len
        self._max_waiting: int = engine.limits.max_waiting
        self._check_grammar = engine.check_grammar
        self._tokenizer = model.tokenizer
        self._vocab_size = model.config.vocab_size
        self._template = chat.load(directory)
        add_bos = chat.tokenizer_config(directory).get("add_bos_token", False)
        self._bos = model.config.bos_token if add_bos else None

    def completion(self, body: schemas.CompletionRequest, caller: Caller) -> Prepared:
        """Raises: ApiError."""
        self.check_model(body.model)
        prompt = body.prompt
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            prompt = [prompt]  # type: ignore[assignment]
        prompts = [self.encode(p) if isinstance(p, str) else self._checked(p) for p in prompt]  # type: ignore[arg-type]
        echoes = [""] * len(prompts)
        if body.echo:
            echoes = [p if isinstance(p, str) else self.decode(p) for p in prompt]  # type: ignore[arg-type]
        params = self._params(body, body.logprobs)
        return self._prepared(
            "cmpl", body, prompts, echoes, "prompt", body.max_tokens, params, caller
        )

    def chat(self, body: schemas.ChatCompletionRequest, caller: Caller) -> Prepared:
        """Raises: ApiError."""
        self.check_model(body.model)
        prompt = self.encode_messages(body.messages, body.chat_template_kwargs)
        max_tokens = body.max_completion_tokens or body.max_tokens
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        params = self._params(body, logprobs)
        return self._prepared(
            "chatcmpl", body, [prompt], [""], "messages", max_tokens, params, caller
        )

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.name:
            raise ApiError(
                404,
                f"model: {name[:200]!r} is not served here, {self.name!r} is",
                param="model",
                code="model_not_found",
            )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        tokens = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and self._bos is not None and tokens[:1] != [self._bos]:
            tokens = [self._bos, *tokens]
        return tokens

    def encode_messages(
        self, messages: list[schemas.Message], variables: dict[str, Any]
    ) -> list[int]:
        try:
            text = self._template.render([_plain(message) for message in messages], variables)
        except chat.ChatTemplateError as error:
            raise bad_field("messages", str(error)) from None
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(self._checked(tokens, "tokens"), skip_special_tokens=False)

    def _checked(self, tokens: list[int], field: str = "prompt") -> list[int]:
        if (largest := max(tokens, default=0)) >= self._vocab_size:
            raise bad_field(
                field, f"token {largest} is beyond the vocabulary of {self._vocab_size}"
            )
        return tokens

    def _params(self, body: schemas._Sampling, logprobs: int | None) -> dict[str, Any]:
        """SamplingParams' fields, but for those that differ between sequences."""
        self._checked(body.stop_token_ids, "stop_token_ids")
        bias = {int(token): value for token, value in body.logit_bias.items()}
        self._checked(list(bias), "logit_bias")
        return {
            "min_tokens": body.min_tokens,
            "temperature": body.temperature,
            "top_k": max(body.top_k, 0),
            "top_p": body.top_p,
            "min_p": body.min_p,
            "repetition_penalty": body.repetition_penalty,
            "presence_penalty": body.presence_penalty,
            "frequency_penalty": body.frequency_penalty,
            "logprobs": logprobs,
            "stop_token_ids": tuple(body.stop_token_ids),
            "stop": body.stop_strings,
            "logit_bias": tuple(bias.items()),
            "ignore_eos": body.ignore_eos,
            "grammar": self._grammar(body),
        }

    def _grammar(self, body: schemas._Sampling) -> str | None:
        field = "json_schema"
        try:
            if body.regex is not None:
                field, text = "regex", grammar.from_regex(body.regex)
            elif body.grammar is not None:
                field, text = "grammar", grammar.from_lark(body.grammar)
            else:
                schema: Any = body.json_schema
                if (format := body.response_format) is not None and format.type != "text":
                    field = "response_format"
                    wanted = format.json_schema
                    schema = {"type": "object"} if wanted is None else wanted.schema_
                if schema is None:
                    return None
                if len(json.dumps(schema)) > schemas.MAX_GRAMMAR_CHARS:
                    raise bad_field(field, f"more than {schemas.MAX_GRAMMAR_CHARS} characters")
                text = grammar.from_json_schema(schema)
            self._check_grammar(text)
        except grammar.GrammarError as error:
            raise bad_field(field, str(error)) from None
        return text

    def _prepared(
        self,
        prefix: str,
        body: schemas._Sampling,
        prompts: list[list[int]],
        echoes: list[str],
        field: str,
        max_tokens: int | None,
        params: dict[str, Any],
        caller: Caller,
    ) -> Prepared:
        most = min(self._max_waiting, schemas.MAX_CHOICES)
        if len(prompts) * body.n > most:
            raise bad_field(
                "n", f"{len(prompts)} prompts x n = {body.n} are more than {most} sequences"
            )
        request_id = f"{prefix}-{secrets.token_hex(12)}"
        seed = secrets.randbits(63) if body.seed is None else body.seed
        sequences: list[Sequence] = []
        for prompt in prompts:
            room = self.max_model_len - len(prompt)
            if not prompt:
                raise bad_field(field, "no tokens")
            if room < 1:
                raise bad_field(
                    field,
                    f"{len(prompt)} tokens leave no room for output: the model's context is "
                    f"{self.max_model_len} tokens",
                )
            if max_tokens is not None and max_tokens > room:
                raise bad_field(
                    "max_tokens",
                    f"{len(prompt)} prompt tokens and {max_tokens} more are beyond the model's "
                    f"context of {self.max_model_len} tokens",
                )
            if body.min_tokens > (max_tokens or room):
                raise bad_field("min_tokens", f"more than max_tokens, {max_tokens or room}")
            for choice in range(body.n):
                sequences.append(
                    Sequence(
                        id=f"{request_id}-{len(sequences)}",
                        request_id=request_id,
                        tokens=list(prompt),
                        params=SamplingParams(
                            max_tokens=max_tokens or room, seed=_seed(seed, choice), **params
                        ),
                        namespace=namespace(caller.tenant, body.cache_salt),
                        priority=body.priority,
                        deadline=None if body.deadline is None else caller.arrival + body.deadline,
                        arrival=caller.arrival,
                    )
                )
        return Prepared(request_id, self.name, prompts, echoes, sequences, caller.arrival)


def namespace(tenant: str, salt: str) -> str:
    """The part of the prefix cache that only this tenant's requests with this salt can hit."""
    return f"{tenant}/{salt}" if salt else tenant  # no name of a tenant has a slash


def _seed(seed: int, choice: int) -> int:
    """Far apart, so that no choice of seed s is another choice of seed s + 1. Choice 0 is s."""
    return (seed + choice * 0x9E3779B97F4A7C15) % 2**64


def _plain(message: schemas.Message) -> dict[str, str]:
    content = message.content
    if not isinstance(content, str):
        content = "\n".join(part.text for part in content)
    # Templates know the older word.
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": content}
