"""Options, fields and limits in the pages are those of the code."""

import argparse
import dataclasses
import inspect
import re
import tomllib

import pytest

import jax_attn as ja
from helpers.paths import ROOT
from jax_attn import _core
from jax_attn._spec.formats import DTYPES, FORMATS, row_bytes
from jax_attn._spec.spec import _SCHEDULES
from jax_attn._variant.program import FACTS
from jax_attn.models._config.quantized_files import _METHODS
from jax_attn.models._embedding.embedding import ENCODERS
from jax_attn.models._families.parse import FAMILIES
from jax_attn.serve import _options
from jax_attn.serve._chat import chat
from jax_attn.serve._engine import embedder
from jax_attn.serve._grammar import grammar, token_masks
from jax_attn.serve._http import batches, bodies, files, http_server, openapi
from jax_attn.serve._http.connection import Connection
from jax_attn.serve._http.settings import ServerConfig
from jax_attn.serve._openai import bounds, embeddings, limits, schemas
from jax_attn.serve._openai.errors import ApiError


def rows(page: str, heading: str) -> dict[str, list[str]]:
    """The first table below a heading: first cell, without its code marks -> the other cells."""
    text = (ROOT / page).read_text()
    part = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", text, re.DOTALL | re.MULTILINE)
    assert part, f"{page} has no heading {heading}"
    lines = re.search(r"(^\|.*\n)+", part[1], re.MULTILINE)[0].splitlines()[2:]
    table = {}
    for line in lines:
        first, *cells = (cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])
        table[first.replace("`", "")] = cells
    return table


def coded(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def written(value: object) -> str:
    """A default as the tables write it."""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


# ---- the library --------------------------------------------------------------------------------


def test_every_field_of_the_spec_has_its_default():
    table = rows("docs/spec.md", "Fields of AttentionSpec")
    fields = dataclasses.fields(ja.AttentionSpec)
    assert list(table) == [field.name for field in fields]
    for field in fields:
        default = field.default
        shown = f'"{default}"' if isinstance(default, str) else repr(default)
        expected = "" if default is dataclasses.MISSING else f"`{shown}`"
        assert table[field.name][0] == expected, field.name


def test_the_values_of_fields_are_those_of_the_code():
    table = rows("docs/spec.md", "Fields of AttentionSpec")

    def named(field):
        return [text.strip('"') for text in coded(table[field][1]) if text.startswith('"')]

    assert named("dtype") == list(DTYPES)
    assert named("kv_dtype") == list(FORMATS[1:])
    assert named("schedule") == list(_SCHEDULES)


def test_every_argument_of_plan_is_there_in_its_order():
    assert list(rows("docs/spec.md", "Arguments of plan")) == list(
        inspect.signature(ja.plan).parameters
    )


CPU = {"max_kv_pages": 1, "target": "cpu"}
GPU = {"max_kv_pages": 1, "target": "sm_90"}
MLA = {"mla": True, "sm_scale": 0.1}


@pytest.mark.parametrize(
    ("field", "words", "heads", "more"),
    [
        ("num_qo_heads", "1 to 128 for each KV head", (128, 1, 64), CPU),
        ("num_qo_heads", "1 to 128 for each KV head", (128, 1, 576, 512), CPU | MLA),
        ("num_qo_heads", "1 to 128 for each KV head", (128, 1, 256), GPU),
        ("head_dim_qk", "1 to 512", (2, 1, 512), GPU),
        ("head_dim_qk", "1 to 512", (2, 1, 512), GPU | {"kv_dtype": "float8_e4m3fn"}),
        ("head_dim_qk", "1 to 512", (2, 1, 512), CPU | {"kv_dtype": "int8"}),
        ("head_dim_qk", "with `mla` a multiple of 8 up to 576", (2, 1, 576, 512), CPU | MLA),
        ("head_dim_vo", "with `mla` a multiple of 8 up to 512", (2, 1, 576, 512), GPU | MLA),
    ],
)
def test_limits_of_the_spec_are_exact(field, words, heads, more):
    """The largest value is accepted, and the next one is refused."""
    assert words in rows("docs/spec.md", "Fields of AttentionSpec")[field][1]
    given = dict(
        zip(("num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo"), heads, strict=False)
    )
    spec = ja.AttentionSpec(**given, **more)
    step = {"num_qo_heads": 1, "head_dim_qk": 16, "head_dim_vo": 128}[field]
    with pytest.raises(NotImplementedError):
        ja.AttentionSpec(**given | {field: getattr(spec, field) + step}, **more)


@pytest.mark.parametrize(
    ("target", "dtype", "head_dim", "largest"),
    [
        ("cpu", "float32", 512, 128),
        ("sm_90", "bfloat16", 256, 128),
        ("sm_80", "float16", 256, 128),
        ("sm_100", "bfloat16", 256, 128),
        ("sm_89", "bfloat16", 176, 128),
        ("sm_89", "bfloat16", 184, 64),
        ("sm_90", "bfloat16", 264, 64),
        ("sm_80", "bfloat16", 512, 64),
        ("sm_120", "bfloat16", 512, 32),
        ("sm_120", "float32", 512, 16),
    ],
)
def test_the_table_of_query_heads_is_exact(target, dtype, head_dim, largest):
    fields = {"dtype": dtype, "max_kv_pages": 1, "target": target}
    spec = ja.AttentionSpec(largest, 1, head_dim, **fields)
    assert spec.kernel_config["tile_q_0"] >= largest
    with pytest.raises(NotImplementedError, match=f"1 to {largest} are supported"):
        ja.AttentionSpec(largest + 1, 1, head_dim, **fields)


def test_the_limits_of_api_and_readme_are_those_of_the_spec():
    for page, heading in (
        ("docs/api.md", "What is supported, in detail"),
        ("README.md", "What is supported"),
    ):
        table = rows(page, heading)
        heads = table["heads"][0]
        assert "128 query heads per KV head" in heads and "512" in heads
        assert (
            "up to 128 query heads" in table["MLA"][0] or "1 to 128 query heads" in table["MLA"][0]
        )
        assert not [name for name in DTYPES if name not in table["dtypes"][0]]
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        versions = table["versions"][0]
        oldest = re.search(
            r">=([\d.]+\d)", next(x for x in project["dependencies"] if x.startswith("jax"))
        )
        assert f"jax {oldest[1].removesuffix('.0')} to" in versions
        assert (
            f"Python {project['requires-python'].removeprefix('>=').split(',')[0]} to" in versions
        )


def test_bytes_of_formats():
    for name, (size, pages, *_) in rows("docs/formats.md", "More formats").items():
        kv_dtype = None if name.startswith("None") else name.strip('"')
        length = row_bytes(kv_dtype, 128)
        assert coded(pages)[0].endswith(f", {length}]") if coded(pages) else f", {length}]" in pages
        assert int(size) == length * (2 if kv_dtype is None else 1), name
    table = rows("docs/formats.md", "More formats")
    assert [name.strip('"') for name in table][1:] == list(FORMATS[1:])


def test_limits_of_variants():
    text = (ROOT / "docs/variants.md").read_text()
    assert f"at most {_core.max_instructions} values" in text
    rank = _core.max_operand_rank
    assert f"Up to {_core.max_variant_operands} operands, each of at most {rank} axes" in text
    facts = [name for row in rows("docs/variants.md", "The functions") for name in row.split(", ")]
    assert sorted(facts) == sorted(FACTS)


def test_families_and_quantized_formats():
    families = [name for row in rows("docs/models.md", "Models") for name in names_of(row)]
    assert sorted(families) == sorted(FAMILIES)
    encoders = [
        name for row in rows("docs/models.md", "Embedding models") for name in names_of(row)
    ]
    assert sorted(encoders) == sorted(ENCODERS)
    assert sorted(rows("docs/models.md", "Quantized weights")) == sorted(_METHODS)


def names_of(cell: str) -> list[str]:
    """Names of families, without what is in brackets after them."""
    plain = re.sub(r"\(.*?\)", "", cell)
    return [] if plain.startswith("every ") else [name.strip() for name in plain.split(",")]


# ---- the server ---------------------------------------------------------------------------------


@pytest.fixture
def actions(monkeypatch) -> dict[str, argparse.Action]:
    """The server's options by their first name."""

    class Parsed(Exception):
        pass

    def stop(parser, argv):
        raise Parsed(parser)

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        with pytest.raises(Parsed) as found:
            _options.parse([])
    return {action.option_strings[0]: action for action in found.value.args[0]._actions}


def option_rows() -> dict[str, list[str]]:
    """A row for each option of the table; a row's defaults are in the order of its options."""
    table = {}
    for names, (default, meaning) in rows("docs/server.md", "Options").items():
        options = [name.split()[0] for name in names.split(", ")]
        options = [name for name in options if not name.startswith("--no-")]
        defaults = default.split(", ")
        for i, option in enumerate(options):
            own = defaults[i] if len(defaults) == len(options) > 1 else default
            table[option] = [own, f"{names} {meaning}"]
    return table


def test_options_have_their_defaults_and_choices(actions):
    table = option_rows()
    assert sorted(table) == sorted(set(actions) - {"-h", "--help"})
    cpu, gpu = _options._ON_CPU, _options._ON_GPU
    settled = {
        "--max-running": f"{cpu.max_running}; on a GPU {gpu.max_running}",
        "--max-step-tokens": f"{cpu.max_step_tokens}; on a GPU {gpu.max_step_tokens}",
        "--prefill-chunk": f"{cpu.prefill_chunk}; on a GPU {gpu.prefill_chunk}",
        "--max-tokens-per-key": written(bounds.KeyLimits.tokens),
        "--max-drafts": f"0: off; with `--draft-model` {_options._DRAFTS}",
    }
    for option, (default, meaning) in table.items():
        action = actions[option]
        assert not [x for x in action.choices or () if x not in f"{default} {meaning}"], option
        if option in settled:
            assert action.default is None and default == settled[option], option
        elif isinstance(action.default, bool):
            assert default == ("on" if action.default else "off"), option
        elif action.default is not None and action.default != []:
            assert default.replace(",", "") == str(action.default), option
        else:
            assert default, option
    batch_invariant = _options._BATCH_INVARIANT
    assert (
        f"{batch_invariant.max_running} sequences and {batch_invariant.max_step_tokens} tokens"
        in table["--batch-invariant"][1]
    )
    half = Connection.max_connections // 2
    assert Connection.max_of_address == half and "half of them" in table["--max-connections"][1]


def test_a_request_beyond_a_key_is_400_and_more_requests_are_429():
    table = option_rows()
    for option, name in (("--max-choices-per-key", "choices"), ("--max-tokens-per-key", "tokens")):
        assert "More are a 429; one request that has more by itself is a 400" in table[option][1]
        limiter = limits.Limiter(None, bounds.KeyLimits(requests=9, choices=5, tokens=5))
        with pytest.raises(ApiError) as alone:
            limiter.enter("a", queues=False).take(**{name: 6})
        limiter.enter("a", queues=False).take(**{name: 3})
        with pytest.raises(ApiError) as together:
            limiter.enter("a", queues=False).take(**{name: 3})
        assert (alone.value.status, together.value.status) == (400, 429)
    limiter = limits.Limiter(None, bounds.KeyLimits(requests=1, choices=5))
    limiter.enter("a", queues=False)
    with pytest.raises(ApiError) as one_more:
        limiter.enter("a", queues=False)
    assert one_more.value.status == 429 and "a 429" in table["--max-requests-per-key"][1]


def test_the_routes_are_those_of_the_server():
    promised = {
        tuple(route.split())
        for row in rows("docs/server.md", "Routes")
        for route in row.split(", ")
    }
    paths = openapi.describe()["paths"]
    methods = {(method, path) for path, item in paths.items() for method in item}
    served = {(method.upper(), path) for method, path in methods if method != "parameters"}
    assert promised == served


def test_limits_of_requests():
    seconds, per_token = token_masks._BUDGET_SECONDS, token_masks._BUDGET_SECONDS_TOKEN
    key_limits = bounds.KeyLimits(1, 1)
    promised = {
        "body": [f"{ServerConfig.max_body_bytes >> 20} MiB", f"{ServerConfig.body_timeout:.0f} s",
                 f"{bodies.MAX_PLAIN_BYTES >> 20} MiB outside of strings",
                 f"{written(bodies.MAX_CONTAINERS)} lists", f"{written(bodies.MAX_KEYS)} keys"],
        "file of /v1/files": [f"{files.MAX_FILE_BYTES >> 20} MiB", f"{files._UPLOAD_SECONDS} s",
                 f"{files._MAX_UPLOADS} at a time", f"{written(files.MAX_FILES)} files",
                 f"{files.MAX_OWNER_BYTES >> 30} GiB"],
        "batch": [f"{written(batches.MAX_REQUESTS)} lines", f"{batches.MAX_UNENDED} of a key"],
        "chat template": [f"{chat.MAX_CHARS >> 20} Mi", f"{chat.MAX_SECONDS:.0f} s"],
        "request line and headers": [f"{http_server._MAX_HEADER_BYTES >> 10} KiB",
                                     f"{Connection.head_seconds:.0f} s"],
        "prompts of a request": [written(schemas.MAX_PROMPTS)],
        "n": [str(schemas.MAX_CHOICES)],
        "messages, tools": [f"{written(schemas.MAX_MESSAGES)} messages",
                            f"{schemas.MAX_TOOLS} tools"],
        "stop": [f"{schemas.MAX_STOP_STRINGS} strings of {schemas.MAX_STOP_CHARS} characters",
                 f"{schemas.MAX_STOP_TOKENS} `stop_token_ids`"],
        "logit_bias": [f"{schemas.MAX_LOGIT_BIAS} entries"],
        "logprobs": [f"{schemas.MAX_LOGPROBS} per token", written(bounds.MAX_SCORES)],
        "embeddings, scores": [f"{written(embeddings.MAX_INPUTS)} inputs",
                       f"{written(embeddings.MAX_REQUEST_TOKENS)} tokens of a request",
                       f"{written(embedder.MAX_TOKENS)} tokens of an input",
                       f"{key_limits.embedding_bytes >> 20} MiB"],
        "pictures": [f"{bounds.MAX_PICTURES} of a request",
                     f"{key_limits.picture_bytes >> 20} MiB of pixels"],
        "JSON schema, regular expression, grammar": [
            f"{written(schemas.MAX_GRAMMAR_CHARS)} characters",
            f"{grammar.MAX_GRAMMAR_SECONDS:.0f} s and {grammar.MAX_GRAMMAR_BYTES >> 20} MB",
            f"{seconds:.0f} s + {1000 * per_token:.0f} ms per token"],
        "deadline": [f"{written(schemas.MAX_DEADLINE_SECONDS)} s"],
        "a client that does not read": [f"{Connection.write_seconds:.0f} s"],
    }  # fmt: skip
    table = rows("docs/operations.md", "Safety")
    for what, words in promised.items():
        assert not [word for word in words if word not in table[what][0]], what
    assert set(table) - set(promised) == {"text", "queue"}  # of the model, and of an option


def test_fields_of_the_page_are_fields_that_do_something():
    """Checks the tables of fields of a request for text, in one of the two routes."""
    defined = openapi.describe()["components"]["schemas"]
    named = [name for row in field_rows() for name in row]
    assert len(named) > 15
    for name in named:
        found = [
            defined[body]["properties"][name].get("description")
            for body in ("CompletionRequest", "ChatCompletionRequest")
            if name in defined[body]["properties"]
        ]
        assert set(found) - {"not supported"}, name


def field_rows() -> list[list[str]]:
    text = (ROOT / "docs/server.md").read_text().split("\n## Responses\n")[0]
    tables = re.findall(r"^\| field \| what it does \|\n.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [coded(line.split("|")[1]) for table in tables for line in table.splitlines()]
