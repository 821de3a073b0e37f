"""Bodies made up from the server's own description, and worse ones: no answer is ever a 5xx."""

import json
import math

import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live_server import serving

from jax_attn.serve import openapi

PATHS = [path for path, item in openapi.describe()["paths"].items() if "post" in item]
EXAMPLES = {
    "/v1/completions": {"prompt": "import", "max_tokens": 3, "n": 2, "stop": ["x"], "seed": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1, 2]},
}
quick = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.fixture(scope="module")
def server():
    with serving() as server:
        yield server


DESCRIPTION = openapi.describe()


def referred(ref: str) -> dict:
    return DESCRIPTION["components"]["schemas"][ref.rsplit("/", 1)[1]]


def schema_of(path: str) -> dict:
    """The schema of a route's body."""
    content = DESCRIPTION["paths"][path]["post"]["requestBody"]["content"]
    return referred(content["application/json"]["schema"]["$ref"])


def values(schema: dict) -> st.SearchStrategy:
    """What fits a JSON schema, as far as pydantic makes use of the language."""
    known = {"title", "description", "default", "additionalProperties", "contentMediaType"}
    match schema:
        case {"$ref": ref}:
            return values(referred(ref))
        case {"anyOf": kinds} | {"oneOf": kinds}:
            return st.one_of(*map(values, kinds))
        case {"const": value}:
            return st.just(value)
        case {"enum": options}:
            return st.sampled_from(options)
        case {"type": "null"}:
            return st.none()
        case {"type": "boolean"}:
            return st.booleans()
        case {"type": "string"}:
            longest = min(schema.get("maxLength", 20), 20)
            return st.text(min_size=schema.get("minLength", 0), max_size=longest)
        case {"type": "integer"}:
            return integers(schema)
        case {"type": "number"}:
            return st.one_of(integers(schema), floats(schema))
        case {"type": "array"}:
            longest = min(schema.get("maxItems", 5), 5)
            shortest = schema.get("minItems", 0)
            return st.lists(values(schema["items"]), min_size=shortest, max_size=longest)
        case {"type": "object", "properties": properties}:
            required = schema.get("required", [])
            return st.fixed_dictionaries(
                {name: values(properties[name]) for name in required},
                optional={
                    name: values(properties[name]) for name in set(properties) - set(required)
                },
            )
        case {"type": "object", "patternProperties": patterns}:
            ((pattern, inner),) = patterns.items()
            return st.dictionaries(
                st.from_regex(pattern, fullmatch=True), values(inner), max_size=4
            )
        case {"type": "object"}:
            return st.dictionaries(keys, json_values, max_size=4)
    assert schema.keys() <= known, f"the strategy does not know {schema}"
    return json_values


def integers(schema: dict) -> st.SearchStrategy:
    least = schema.get("minimum", schema.get("exclusiveMinimum", -5))
    most = schema.get("maximum", schema.get("exclusiveMaximum", least + 10) - 1)
    # Small numbers more often than not: with max_tokens and n at their caps nothing else is tested.
    return st.integers(math.ceil(least), min(math.floor(most), math.ceil(least) + 8)) | st.integers(
        math.ceil(least), math.floor(most)
    )


def floats(schema: dict) -> st.SearchStrategy:
    return st.floats(
        schema.get("minimum", schema.get("exclusiveMinimum")),
        schema.get("maximum", schema.get("exclusiveMaximum")),
        exclude_min="exclusiveMinimum" in schema,
        exclude_max="exclusiveMaximum" in schema,
    )


# Of any object; and those that mean something to Python, to templates and to JSON Schema.
keys = st.text(max_size=8) | st.sampled_from(
    ["self", "messages", "bos_token", "type", "$ref", "properties", "items", "anyOf", "pattern"]
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=10,
)


def check(server, path: str, raw: bytes) -> int:
    answer = server.post(path, raw)
    assert answer.status < 500, (answer.status, answer.body, raw)
    if answer.status != 200:
        assert set(answer.error) == {"message", "type", "param", "code"}
        assert answer.error["message"]
    return answer.status


def encode(body) -> bytes:
    return json.dumps(body).encode(errors="surrogatepass")


@pytest.mark.parametrize("path", PATHS)
def test_bodies_by_the_description(server, path):
    statuses = set()

    @quick
    @given(values(schema_of(path)))
    def run(body):
        statuses.add(check(server, path, encode(body)))

    run()
    assert 200 in statuses and statuses <= {200, 400, 404}
    assert not server.engine.live


@pytest.mark.parametrize("path", PATHS)
def test_examples_with_one_field_changed(server, path):
    """Near misses, most of which pass the schema of all other fields."""
    fields = sorted(schema_of(path)["properties"])
    statuses = set()

    @quick
    @given(st.sampled_from(fields), json_values, st.booleans())
    def run(field, value, by_description):
        body = EXAMPLES[path] | {field: value}
        statuses.add(check(server, path, encode(body)))

    run()
    assert {200, 400} <= statuses


@pytest.mark.parametrize("path", PATHS)
def test_broken_json(server, path):
    raw = json.dumps(EXAMPLES[path]).encode()

    @quick
    @given(st.integers(0, len(raw) - 1), st.integers(0, len(raw)), st.binary(max_size=6))
    def run(begin, end, junk):
        check(server, path, raw[:begin] + junk + raw[max(begin, end) :])

    run()


@settings(quick, max_examples=40)
@given(st.data())
def test_any_regex_and_schema(server, data):
    field = data.draw(st.sampled_from(["regex", "grammar", "json_schema"]))
    value = data.draw(json_values if field == "json_schema" else st.text(max_size=30))
    check(server, "/v1/completions", encode({"prompt": "a", "max_tokens": 2, field: value}))


def test_still_alive(server):
    assert server.get("/health").status == 200
    assert server.post("/v1/completions", EXAMPLES["/v1/completions"]).status == 200
