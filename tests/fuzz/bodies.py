"""Requests made from the server's own openapi.json: valid, nearly valid, and far from valid.

They use plain `random`, because a hundred thousand of them should take minutes. For the same
schemas hypothesis takes 10 to 40 ms a request, schemathesis 15 to 45 ms, this module 0.1 ms.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import string
from collections.abc import Callable, Iterator
from typing import Any

from jax_attn.serve._http import openapi

DESCRIPTION = openapi.describe()
# Without routes that are off by default, those of models that score, and those of one object.
_OTHERS = ("/v1/weights", "/v1/loras", "/v1/files", "/v1/batches", "/v1/hand_over")
_OTHERS += ("/v1/rerank", "/v1/score", "/classify", "/v1/conversations/{id}")
PATHS = [
    path
    for path, item in DESCRIPTION["paths"].items()
    if "requestBody" in item.get("post", {}) and not path.startswith(_OTHERS)
]
GETS = [path for path, item in DESCRIPTION["paths"].items() if "get" in item]
# Requests that are answered with 200, so that only a changed part can be wrong.
EXAMPLES: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"prompt": "import", "max_tokens": 3, "n": 2, "stop": ["x"], "seed": 1},
        {"prompt": [[1, 2], [3]], "max_tokens": 2, "logprobs": 2, "echo": True, "stream": True},
        {"prompt": ["a", "b"], "max_tokens": 2, "regex": "[ab]", "logit_bias": {"7": 1}},
    ],
    "/v1/chat/completions": [
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3},
        {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "content": "b"},
            ],
            "max_completion_tokens": 2,
            "logprobs": True,
            "top_logprobs": 1,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ],
    "/v1/messages": [
        {
            "model": "tiny",
            "max_tokens": 2,
            "messages": [{"role": "user", "content": "a"}],
            "thinking": {"type": "disabled"},
            "stop_sequences": ["x"],
        },
        {
            "model": "tiny",
            "max_tokens": 3,
            "system": [{"type": "text", "text": "a"}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "a", "signature": ""},
                        {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "c", "content": "b"}],
                },
            ],
            "stream": True,
        },
    ],
    "/v1/messages/count_tokens": [
        {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "system": "b"}
    ],
    "/v1/responses": [
        {"input": "a", "max_output_tokens": 2, "metadata": {"a": "b"}},
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "b"},
            ],
            "instructions": "a",
            "max_output_tokens": 3,
            "text": {"format": {"type": "json_object"}},
            "stream": True,
        },
    ],
    "/v1/embeddings": [
        {"input": "a"},
        {"input": [[1, 2], [3]], "encoding_format": "base64", "dimensions": 2},
    ],
    "/v1/responses/input_tokens": [{"input": "a", "instructions": "b"}],
    "/v1/conversations": [{"items": [{"role": "user", "content": "a"}], "metadata": {"a": "b"}}],
    "/api/chat": [
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": "a"}],
            "options": {"num_predict": 2, "temperature": 0.5, "stop": ["x"]},
        }
    ],
    "/api/generate": [
        {"model": "tiny", "prompt": "a", "stream": False, "options": {"num_predict": 2}}
    ],
    "/api/show": [{"model": "tiny"}],
    "/api/embed": [{"model": "vectors", "input": "a"}, {"model": "vectors", "input": ["a", "b"]}],
    "/api/embeddings": [{"model": "vectors", "prompt": "a"}],
    "/tokenize": [{"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}],
    "/detokenize": [{"tokens": [1, 2]}],
}


@dataclasses.dataclass(frozen=True)
class Request:
    method: str
    path: str
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"body": self.body.decode("latin-1")}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Request:
        headers = tuple((name, value) for name, value in data["headers"])
        return cls(data["method"], data["path"], data["body"].encode("latin-1"), headers)


def post(path: str, body: Any) -> Request:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode(errors="surrogatepass")
    return Request("POST", path, raw, (("content-type", "application/json"),))


def request(rng: random.Random) -> Request:
    # Few grammars: one takes as long as ten requests of the other kinds.
    kinds = [by_schema, near_example, inside_example, broken_bytes, odd, grammar]
    return rng.choices(kinds, weights=[20, 20, 20, 20, 15, 5])[0](rng)


# ---- valid requests ----------------------------------------------------------------------------


def referred(ref: str) -> dict[str, Any]:
    return DESCRIPTION["components"]["schemas"][ref.rsplit("/", 1)[1]]


def schema_of(path: str) -> dict[str, Any]:
    """The schema of a route's body."""
    content = DESCRIPTION["paths"][path]["post"]["requestBody"]["content"]
    return referred(content["application/json"]["schema"]["$ref"])


def by_schema(rng: random.Random) -> Request:
    path = rng.choice(PATHS)
    return post(path, value(rng, schema_of(path)))


_WORD = string.ascii_letters + string.digits + "_-"
# Hypothesis could make these from any pattern; the description has only two patterns.
_PATTERNS: dict[str, Callable[[random.Random], str]] = {
    "^[0-9]{1,9}$": lambda rng: str(rng.randrange(10 ** rng.randrange(1, 10))),
    "^[a-zA-Z0-9_-]{1,64}$": lambda rng: "".join(rng.choices(_WORD, k=rng.choice((1, 5, 64)))),
}
_NO_RULES = {"title", "description", "default", "additionalProperties", "contentMediaType"}


def value(rng: random.Random, schema: dict[str, Any]) -> Any:
    """Makes a value that fits a JSON schema, for the part of the language that pydantic uses."""
    match schema:
        case {"$ref": ref}:
            return value(rng, referred(ref))
        case {"anyOf": kinds} | {"oneOf": kinds}:
            return value(rng, rng.choice(kinds))
        case {"not": {}}:  # unsupported
            return anything(rng)
        case {"const": only}:
            return only
        case {"enum": options}:
            return rng.choice(options)
        case {"type": "null"}:
            return None
        case {"type": "boolean"}:
            return rng.random() < 0.5
        case {"type": "string", "pattern": pattern}:
            return _PATTERNS[pattern](rng)
        case {"type": "string"}:
            return text(rng, schema.get("minLength", 0), min(schema.get("maxLength", 20), 20))
        case {"type": "integer"}:
            return integer(rng, schema)
        case {"type": "number"}:
            return integer(rng, schema) if rng.random() < 0.5 else real(rng, schema)
        case {"type": "array"}:
            shortest, longest = schema.get("minItems", 0), min(schema.get("maxItems", 5), 5)
            return [value(rng, schema["items"]) for _ in range(rng.randint(shortest, longest))]
        case {"type": "object", "properties": properties}:
            required = schema.get("required", [])
            # Usually few fields: fields that exclude each other would otherwise refuse all
            # requests.
            share = rng.choice((0.05, 0.05, 0.2, 0.5))
            names = [name for name in properties if name in required or rng.random() < share]
            return {name: value(rng, properties[name]) for name in names}
        case {"type": "object", "patternProperties": patterns}:
            ((pattern, inner),) = patterns.items()
            return {_PATTERNS[pattern](rng): value(rng, inner) for _ in range(rng.randrange(5))}
        case {"type": "object", "additionalProperties": dict(inner)}:
            return {text(rng, 0, 8): value(rng, inner) for _ in range(rng.randrange(5))}
        case {"type": "object"}:
            return {key(rng): anything(rng) for _ in range(rng.randrange(5))}
    assert schema.keys() <= _NO_RULES, f"the generator does not know {schema}"
    return anything(rng)


def text(rng: random.Random, shortest: int, longest: int) -> str:
    alphabet = rng.choice(
        [string.printable, "ab ", "é漢🙂\u0301\u202e\ufeff", "\0\x1b\x7f\x85\u2028", "{}%<|>$\\"]
    )
    return "".join(rng.choices(alphabet, k=rng.randint(shortest, longest)))


def integer(rng: random.Random, schema: dict[str, Any]) -> int:
    least = schema.get("minimum", schema.get("exclusiveMinimum", -5))
    most = schema.get("maximum", schema.get("exclusiveMaximum", least + 10) - 1)
    least, most = math.ceil(least), math.floor(most)
    # Mostly small numbers: with max_tokens and n at their caps, nothing else would be tested.
    if rng.random() < 0.7:
        most = min(most, least + 8)
    return rng.choice((least, most, rng.randint(least, most), rng.randint(least, most)))


def real(rng: random.Random, schema: dict[str, Any]) -> float:
    least = schema.get("minimum", schema.get("exclusiveMinimum", -1e9))
    most = schema.get("maximum", schema.get("exclusiveMaximum", 1e9))
    choice = rng.choice((float(least), float(most), rng.uniform(least, most), 5e-324, 0.1 + 0.2))
    fits = least <= choice <= most
    fits &= choice != schema.get("exclusiveMinimum") and choice != schema.get("exclusiveMaximum")
    return choice if fits else rng.uniform(least, most)


# Keys of any object, and keys with a meaning for Python, for templates and for JSON Schema.
_KEYS = [
    "self", "messages", "bos_token", "type", "$ref", "properties", "items", "anyOf", "pattern",
    "__class__", "loop", "required", "enum", "const", "multipleOf", "minItems", "maxLength",
    "format",
]  # fmt: skip
# At and beyond the limits of the types that a value may be converted to.
EXTREMES = [
    -(2**63) - 1, -(2**63), -(2**31) - 1, -1, 0, 1, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1,
    2**63, 2**64, 10**400, -0.0, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, math.nan, 0.5,
    1.0, "", "a", "\0", "\ud800", "\U0010ffff", "\u202e", "a" * 300, "string", "object", "#", "#/a",
    [], [[]], {}, [None], [0], {"a": {}}, None, True, False,
]  # fmt: skip


def key(rng: random.Random) -> str:
    return rng.choice(_KEYS) if rng.random() < 0.6 else text(rng, 0, 8)


def anything(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.random()
    if depth > 3 or kind < 0.5:
        return rng.choice(EXTREMES)
    if kind < 0.65:
        return text(rng, 0, 20)
    if kind < 0.8:
        return [anything(rng, depth + 1) for _ in range(rng.randrange(5))]
    return {key(rng): anything(rng, depth + 1) for _ in range(rng.randrange(5))}


# ---- nearly valid, and invalid -----------------------------------------------------------------


def near_example(rng: random.Random) -> Request:
    """Replaces fields of a request that is answered with 200 by values of the right kind or not."""
    path = rng.choice(PATHS)
    properties = schema_of(path)["properties"]
    names = rng.sample(sorted(properties), min(rng.choice((1, 1, 2, 3)), len(properties)))
    changes = {
        name: value(rng, properties[name]) if rng.random() < 0.5 else anything(rng)
        for name in names
    }
    return post(path, rng.choice(EXAMPLES[path]) | changes)


def inside_example(rng: random.Random) -> Request:
    """Replaces or removes a value somewhere inside, or adds one."""
    path = rng.choice(PATHS)
    body = json.loads(json.dumps(rng.choice(EXAMPLES[path])))
    holder: Any = body
    while True:
        names = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        if not names:
            return post(path, body)
        name = rng.choice(names)
        if not isinstance(holder[name], dict | list) or rng.random() < 0.3:
            break
        holder = holder[name]
    change = rng.random()
    if change < 0.15:
        del holder[name]
    elif change < 0.3 and isinstance(holder, dict):
        holder[key(rng)] = anything(rng)
    elif change < 0.3:
        holder.append(anything(rng))
    else:
        holder[name] = anything(rng)
    return post(path, body)


def broken_bytes(rng: random.Random) -> Request:
    path = rng.choice(PATHS)
    raw = json.dumps(rng.choice(EXAMPLES[path])).encode()
    begin, end = sorted(rng.randrange(len(raw) + 1) for _ in range(2))
    if rng.random() < 0.7:
        end = begin + rng.randrange(3)
    junk = rng.choice([b"", b"\0", b"\xff", b'"', b"{", b"}", b"\\u", b"\\", b",", b"1e999", b"//"])
    return post(path, raw[:begin] + junk * rng.choice((1, 1, 9)) + raw[end:])


_GRAMMARS: dict[str, Callable[[random.Random], Any]] = {
    "regex": lambda rng: "".join(
        rng.choices(
            [*"ab(){}[]|*+?.,\\1290^$-é", "(?:", "[^", "\\p{L}", "{2,3}"], k=rng.randrange(12)
        )
    ),
    "grammar": lambda rng: "start: " + " ".join(
        rng.choices(
            ['"a"', "s", "\ns:", "|", "/[ab]/", "*", "+", "?", "(", ")", "~ 3", "%ignore", "\nA:",
             "A", "%json {}", '%regex {"a": 1}', "start", "\n", '"', "<|endoftext|>"],
            k=rng.randrange(12),
        )
    ),
    "json_schema": anything,
}  # fmt: skip


def grammar(rng: random.Random) -> Request:
    field = rng.choice(sorted(_GRAMMARS))
    return post("/v1/completions", {"prompt": "a", "max_tokens": 2, field: _GRAMMARS[field](rng)})


_METHODS = ["GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "Q"]
_HEADERS = [
    "content-type", "authorization", "host", "origin", "accept", "x-request-id", "accept-encoding",
    "access-control-request-method", "content-encoding", "cookie", "forwarded", "range",
]  # fmt: skip
_HEADER_VALUES = [
    "application/json", "application/json; charset=\xe9", "Bearer x", "Basic \xe9", "Basic Og==",
    "*", "null", "a,b", "bytes=0-1", "gzip", "localhost", "[::1", "a" * 5000, "", "\x01", "\xff",
]  # fmt: skip


def odd(rng: random.Random) -> Request:
    """Makes requests with other methods, paths and headers."""
    path = rng.choice(
        [*PATHS, *GETS, "/v1/weights", "/nothing/here", "//", "/%00", "/v1/models/%ff", "/../x"]
    )
    if rng.random() < 0.3:
        path += "/" + "".join(rng.choices(string.ascii_letters + "%./;=&", k=rng.randrange(9)))
    if rng.random() < 0.3:
        path += "?" + "".join(rng.choices(string.printable[:94].replace("#", ""), k=9))
    headers = [(rng.choice(_HEADERS), rng.choice(_HEADER_VALUES)) for _ in range(rng.randrange(4))]
    body = rng.choice([b"", b"{}", b'{"prompt":"a"}', b"\0", b"[" * 2000])
    return Request(rng.choice(_METHODS), path, body, tuple(headers))


# ---- shrinking ---------------------------------------------------------------------------------


def smaller(request: Request) -> Iterator[Request]:
    """Yields simpler requests; those that leave out most come first."""
    if request.headers[1:]:
        for i in range(len(request.headers)):
            headers = request.headers[:i] + request.headers[i + 1 :]
            yield dataclasses.replace(request, headers=headers)
    try:
        body = json.loads(request.body)
    except (ValueError, RecursionError):
        for raw in smaller_bytes(request.body):
            yield dataclasses.replace(request, body=raw)
        return
    for simpler in smaller_value(body):
        yield dataclasses.replace(request, body=json.dumps(simpler).encode(errors="surrogatepass"))


def smaller_bytes(raw: bytes) -> Iterator[bytes]:
    size = len(raw) // 2
    while size:
        for begin in range(0, len(raw), size):
            yield raw[:begin] + raw[begin + size :]
        size //= 2


def smaller_value(old: Any) -> Iterator[Any]:
    if isinstance(old, dict):
        for name in old:
            yield {other: each for other, each in old.items() if other != name}
        for name, inner in old.items():
            for simpler in smaller_value(inner):
                yield old | {name: simpler}
    elif isinstance(old, list):
        if len(old) > 1:
            yield from (old[: len(old) // 2], old[len(old) // 2 :])
        for i, inner in enumerate(old):
            yield old[:i] + old[i + 1 :]
            for simpler in smaller_value(inner):
                yield [*old[:i], simpler, *old[i + 1 :]]
    elif isinstance(old, str) and old:
        yield from (old[: len(old) // 2], old[len(old) // 2 :]) if len(old) > 1 else ("",)
    elif isinstance(old, int | float) and not isinstance(old, bool) and abs(old) > 1:
        yield 0
        if math.isfinite(old):
            yield int(old) // 2
