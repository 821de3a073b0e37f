"""The command line's use of the machine: pages of the kv cache, open files."""

import dataclasses
import gc
import hashlib
import json
import resource
import socket
import subprocess
import sys

import jax
import pytest

pytest.importorskip("uvicorn", reason="needs the extra `serve`")

from tokenizers import Tokenizer

from helpers import model_cases
from jax_attn import models
from jax_attn.serve import __main__ as main
from jax_attn.serve import _command, _loading
from jax_attn.serve import _sizing as sizing
from jax_attn.serve._engine import device, progress
from jax_attn.serve._engine.async_engine import AsyncEngine
from jax_attn.serve._http import http_server
from jax_attn.serve._options import engine_config, key_limits, parse
from jax_attn.serve._scheduling.protocols import Limits

PAGE_BYTES = 98304  # of the bundled model, 16 tokens in f32
VOCAB = 4096  # of the bundled model


@pytest.fixture(scope="module")
def model(whole_model):
    """Here numbers of pages are those of all its layers."""
    return whole_model


class Allocator:
    """Stands in for AsyncEngine and fits only a number of pages."""

    def __init__(self, num_pages: int, message: str = "RESOURCE_EXHAUSTED: out of memory"):
        self.num_pages, self.message, self.asked = num_pages, message, []

    def __call__(self, model, config, processes=None, draft_model=None, vision=None):
        self.asked.append(config.num_pages)
        self.draft_model = draft_model
        if config.num_pages > self.num_pages:
            raise jax.errors.JaxRuntimeError(self.message)
        self.limits = Limits(16 * config.num_pages, config.max_running, config.max_waiting)
        return self


class FakeGpu:
    """A GPU with `limit` bytes besides those of 32 rows of logits."""

    def __init__(self, limit: int, in_use: int):
        limit += 32 * VOCAB * sizing._SAMPLING_BYTES
        self._stats = {"bytes_limit": limit, "bytes_in_use": in_use}

    def memory_stats(self):
        return self._stats


def make(model, monkeypatch, allocator, *options, device=None):
    monkeypatch.setattr(sizing, "AsyncEngine", allocator)
    monkeypatch.setattr(jax, "local_devices", lambda: [device or FakeGpu(2000 * PAGE_BYTES, 0)])
    return sizing.make_engine(model, parse(["--dtype", "float32", *options]))


def test_pages_are_what_is_free_less_a_margin(model, monkeypatch):
    allocator = Allocator(10**9)
    device = FakeGpu(3000 * PAGE_BYTES, 1000 * PAGE_BYTES)
    make(model, monkeypatch, allocator, device=device)
    assert allocator.asked == [1700]


def test_pages_that_the_allocator_cannot_give_are_done_without(model, monkeypatch, caplog):
    caplog.set_level("INFO", "jax_attn.serve")
    allocator = Allocator(1400)
    make(model, monkeypatch, allocator)
    assert allocator.asked == [1700, 1530, 1377]
    assert "1377 pages of 16 tokens" in caplog.text


def test_pages_that_the_device_fails_to_make_later_are_done_without(model, monkeypatch):
    """JAX makes arrays asynchronously, so the check must wait for them before any other code."""
    init_pages, asked = device.models.init_pages, []

    class Missing:
        def block_until_ready(self):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    def init(config, specs, num_pages):
        if num_pages == 1:  # for its size
            return init_pages(config, specs, num_pages)
        asked.append(num_pages)
        return init_pages(config, specs, num_pages) if len(asked) > 1 else (Missing(), Missing())

    monkeypatch.setattr(device.models, "init_pages", init)
    monkeypatch.setattr(sizing, "_default_num_pages", lambda *_: 200)
    sizing.make_engine(model, parse(["--dtype", "float32"]))
    assert asked == [200, 180]


def test_pages_that_were_asked_for_must_fit(model, monkeypatch):
    allocator = Allocator(1400)
    with pytest.raises(ValueError, match="--num-pages: expected .* got 1500 pages of 98304 bytes"):
        make(model, monkeypatch, allocator, "--num-pages", "1500")
    assert allocator.asked == [1500]
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        make(model, monkeypatch, Allocator(10, "INTERNAL: another error"), "--num-pages", "1500")


def test_too_little_memory_for_a_step(model, monkeypatch):
    allocator = Allocator(10)
    with pytest.raises(ValueError, match="got 32 pages"):  # 512 tokens
        make(model, monkeypatch, allocator, device=FakeGpu(40 * PAGE_BYTES, 20 * PAGE_BYTES))


def test_less_memory_than_the_longest_sequence_would_take(model, monkeypatch):
    allocator = Allocator(100)
    engine = make(model, monkeypatch, allocator, device=FakeGpu(100 * PAGE_BYTES, 0))
    assert engine.limits.max_model_len == 16 * 85 < model.config.max_positions


def test_as_many_open_files_as_clients():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        http_server.allow_many_connections()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert hard == before[1]
        if hard != resource.RLIM_INFINITY:
            assert soft == min(hard, http_server._MAX_FILES)
        http_server.allow_many_connections()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_limits_of_a_key():
    """By default a key may use the whole engine; each option lowers one limit."""
    limits = key_limits(parse(["--max-waiting", "10", "--max-running", "4"]))
    assert (limits.requests, limits.choices) == (14, 14)
    options = ["--max-requests-per-key", "1", "--max-choices-per-key", "2"]
    options += ["--max-tokens-per-key", "3", "--max-running-per-key", "4"]
    args = parse(options)
    assert dataclasses.astuple(key_limits(args))[:3] == (1, 2, 3)
    assert engine_config(100, args).tenant_limits.max_running == 4


def test_no_more_connections_than_files(caplog):
    assert http_server.limited_connection(100, 1000).max_connections == 100
    assert http_server.limited_connection(101, 1000).max_of_address == 51
    assert not caplog.records
    assert (
        http_server.limited_connection(8192, 1024).max_connections
        == 1024 - http_server._OTHER_FILES
    )
    assert "may open 1024 files" in caplog.text


def test_what_is_there_when_the_engine_is_ready_is_not_collected_again(model, monkeypatch):
    counts = []

    def count(engine):  # before the first step; then the server ends
        counts.append(gc.get_freeze_count())
        raise RuntimeError("enough")

    monkeypatch.setattr(models, "load", lambda *args, **kwargs: model)
    monkeypatch.setattr("jax_attn.serve._engine.engine.Engine.warm_up_first", lambda *args: [])
    monkeypatch.setattr(AsyncEngine, "_turn", count)
    try:
        assert main.main(["--port", "0", "--max-running", "2", "--max-step-tokens", "16"]) == 1
    finally:
        gc.unfreeze()
    assert counts[0] > 10_000


def test_an_engine_that_fails_ends_the_server(model, monkeypatch, caplog):
    """The exit status reports it."""

    def fail(engine, progress=None):
        raise RuntimeError("no memory for a step")

    monkeypatch.setattr(models, "load", lambda *args, **kwargs: model)
    monkeypatch.setattr("jax_attn.serve._engine.engine.Engine.warm_up_first", fail)
    assert main.main(["--port", "0", "--max-running", "2", "--max-step-tokens", "16"]) == 1
    assert "no memory for a step" in caplog.text


@pytest.mark.parametrize(
    ("backend", "options", "running", "tokens", "chunks"),
    [
        ("cpu", [], 32, 512, (32, 32)),
        ("gpu", [], 256, 2048, (256, 512)),
        ("gpu", ["--max-step-tokens", "128"], 128, 128, (256, 512)),
        ("gpu", ["--max-running", "4", "--prefill-chunk", "64"], 4, 2048, (64, 64)),
        ("gpu", ["--batch-invariant"], 32, 512, (512, 512)),
    ],
)
def test_what_a_step_has_room_for(monkeypatch, backend, options, running, tokens, chunks):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    args = parse(options)
    assert (args.max_running, args.max_step_tokens) == (running, tokens)
    assert (args.prefill_chunk, args.max_prefill_chunk) == chunks


def test_a_shorter_context(model, caplog):
    args = parse(["--max-model-len", "100", "--dtype", "float32"])
    assert _loading.load(models.BUNDLED, args).config.max_positions == 100
    with pytest.raises(ValueError, match="--max-model-len: expected at most the model's 2048, got"):
        _loading.load(models.BUNDLED, parse(["--max-model-len", "2049"]))


def test_longrope_of_a_shorter_context(tmp_path, caplog):
    """Its factors are those that transformers uses; the log says if they may be others."""
    raw = model_cases.CONFIGS["phi3 long, partial"] | {"eos_token_id": 2}
    model_cases.write(tmp_path, raw)
    (tmp_path / "tokenizer.json").symlink_to(models.BUNDLED / "tokenizer.json")
    (long,) = _loading.load(tmp_path, parse(["--dtype", "float32"])).config.kinds
    assert "--max-model-len 16" in caplog.text
    caplog.clear()
    (short,) = _loading.load(tmp_path, parse(["--max-model-len", "16"])).config.kinds
    assert long.rope.scaling.is_long and not short.rope.scaling.is_long and not caplog.text


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"eos_token_id": None}, "config.json: eos_token_id: expected a token that ends texts, "),
        ({"head_dim": 2048}, "config.json: AttentionSpec: head_dim_qk: "),
        ({"layer_types": 5}, "config.json: layer_types: expected a list, got 5"),
    ],
)
def test_a_model_that_cannot_be_served_is_one_sentence(tmp_path, changes, sentence):
    """It names the file and the key, before any weights are read."""
    raw = model_cases.CONFIGS["llama"] | {"eos_token_id": 2} | changes
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(models.ModelDirectoryError) as error:
        _loading.load(tmp_path, parse([]))
    said = str(error.value)
    assert said.startswith(f"{tmp_path}/{sentence}") and "\n" not in said, said


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--api-key", "short"], "--api-key: key 1: expected at least 16"),
        (["--model", "no-such-directory"], "expected a directory, or ORG/NAME"),
        (["--model", str(models.BUNDLED), "--revision", "x"], "has no revision"),
    ],
)
def test_what_cannot_be_served_is_one_sentence(capsys, options, sentence):
    assert main.main(["--port", "0", *options]) == 1
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("host", ["http://a.example", "a.example:80", "a.example/b", "x@b", ""])
def test_a_host_of_pictures_that_is_no_host(capsys, host):
    """A URL would never match it."""
    with pytest.raises(SystemExit):
        parse(["--allow-image-urls", host])
    assert f"expected a host such as example.com, got {host!r}" in capsys.readouterr().err
    assert parse(["--allow-image-urls", "A.example"]).allow_image_urls == ["A.example"]


def test_a_port_that_is_no_port(capsys):
    for port in ("80000", "-1"):
        with pytest.raises(SystemExit):
            main.main([f"--port={port}"])
        said = capsys.readouterr().err
        assert f"--port: expected a number from 0 to 65535, got {port}" in said


def test_a_port_in_use_is_said_before_a_model_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr(_command, "load_all", lambda args: pytest.fail("loaded"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main.main(["--port", str(port)]) == 1
    said = capsys.readouterr().err
    assert (
        f"--port: expected an address to listen on, got 127.0.0.1:{port}: Address already" in said
    )


def test_options_are_shown_in_groups(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    top, *groups = capsys.readouterr().out.split("\n\n")[1:]
    assert "--help" in top and top.count("  --") == 0
    titles = [group.partition(":")[0] for group in groups]
    assert titles[0] == "models" and titles[-1] == "log and traces" and len(titles) == 8


def test_progress_in_a_file_is_a_line_now_and_then(monkeypatch, caplog):
    """None for work that is short, and no bar that is drawn again and again."""
    caplog.set_level("INFO")
    for seconds, expected in [(0.0, 3), (1000.0, 0)]:
        monkeypatch.setattr(progress, "SECONDS", seconds)
        caplog.clear()
        with progress.progress_bar("compile", "executable", 3) as bar:
            for i in range(3):
                bar.set_postfix_str(f"executable {i}")
                bar.update()
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) >= expected and bool(lines) == bool(expected)
        assert all(line.startswith("compile: ") and "\r" not in line for line in lines)
        assert not expected or "compile: 3 of 3 executables in " in lines[-1]


def test_a_draft_model_of_other_tokens(model, tmp_path, capsys):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(models.BUNDLED / name)
    text = (models.BUNDLED / "tokenizer.json").read_text("utf-8")
    tokenizer = Tokenizer.from_str(text)
    tokenizer.add_tokens(["another"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert main.main(["--port", "0", "--draft-model", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "--draft-model: expected one with the tokens of " in said
    assert str(models.BUNDLED) in said and str(tmp_path) in said and said.count("\n") == 1


def test_how_many_drafts():
    assert parse([]).max_drafts == 0
    assert parse(["--max-drafts", "7"]).max_drafts == 7
    assert parse(["--draft-model", "x"]).max_drafts == 4
    assert parse(["--draft-model", "x", "--max-drafts", "2"]).max_drafts == 2


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--max-drafts", "0"], "--draft-model: expected --max-drafts of at least 1"),
        (["--distributed"], "--draft-model: expected a server of one process"),
    ],
)
def test_options_that_exclude_a_draft_model(capsys, options, sentence):
    with pytest.raises(SystemExit):
        parse(["--draft-model", "x", *options])
    assert sentence in capsys.readouterr().err


def test_models_of_the_command_line(capsys):
    assert parse([]).model == str(models.BUNDLED)
    assert parse(["--embedding-model", "x"]).model is None
    for options in (["--draft-model", "x"], ["--distributed"], ["--served-model-name", "a", "b"]):
        with pytest.raises(SystemExit):
            parse(["--embedding-model", "x", *options])
        assert f"{options[0]}: expected " in capsys.readouterr().err


def test_a_draft_model_has_as_many_pages(model, monkeypatch):
    """The draft model has pages of its own, beside those of the model."""
    allocator = Allocator(10**9)
    monkeypatch.setattr(sizing, "AsyncEngine", allocator)
    monkeypatch.setattr(jax, "local_devices", lambda: [FakeGpu(2000 * PAGE_BYTES, 0)])
    args = parse(["--dtype", "float32", "--draft-model", "x"])
    sizing.make_engine(model, args, draft_model=model)
    assert allocator.asked == [850] and allocator.draft_model is model


def test_names_and_keys_of_the_command_line(model, monkeypatch, tmp_path):
    (tmp_path / "keys").write_text("a-key-that-is-in-a-file\n")
    configs = []

    def stop(engine, setup, process, processes):
        configs.append(setup.config)
        return 1

    monkeypatch.setattr(models, "load", lambda *args, **kwargs: model)
    monkeypatch.setattr(_command, "_run", stop)
    keys = ["--api-key", "a-key-of-the-line", "--api-key-file", str(tmp_path / "keys")]
    names = ["--served-model-name", "gpt-4o", "tiny"]
    small = ["--max-running", "2", "--max-step-tokens", "16", "--num-pages", "200"]
    assert main.main([*keys, *names, *small]) == main.main(small) == 1
    first, second = configs
    assert first.api_keys == ("a-key-of-the-line", "a-key-that-is-in-a-file")
    assert (first.model_name, first.model_aliases) == ("gpt-4o", ("tiny",))
    assert (second.model_name, second.model_aliases) == ("tiny-llama-stdlib", ())
    assert not second.strict and second.generation_config


def test_more_rows_leave_less_room_for_pages(model, monkeypatch):
    allocator = Allocator(10**9)
    make(model, monkeypatch, allocator, "--max-running", "64", device=FakeGpu(3000 * PAGE_BYTES, 0))
    more = 32 * VOCAB * sizing._SAMPLING_BYTES
    assert allocator.asked == [int(0.85 * (3000 * PAGE_BYTES - more)) // PAGE_BYTES]


def test_files_of_the_prefix_cache_belong_to_keys(monkeypatch, tmp_path):
    """Not to names of tenants, which say where a key is in a list."""
    (tmp_path / "keys").write_text("a-key-of-one-tenant\nanother-tenants-key")
    seen = []

    def stop(args):
        seen.append(args.owners)
        raise ValueError("enough")

    monkeypatch.setattr(_command, "load_all", stop)
    assert main.main(["--port", "0", "--api-key-file", str(tmp_path / "keys")]) == 1
    assert main.main(["--port", "0"]) == 1
    (owners, none) = seen
    assert none == {} and set(owners) == {"key0", "key1"}
    assert owners["key0"] == hashlib.sha256(b"a-key-of-one-tenant").hexdigest()


def test_the_process_of_the_engine_does_not_import_what_answers_http():
    """The two processes import at the same time, so it would start half a second later."""
    names = imported_by("_command")
    assert "jax_attn.serve._engine.engine" in names
    assert not names & {"pydantic", "starlette", "uvicorn", "h11", "jinja2"}


def test_the_process_that_answers_http_starts_before_the_imports_of_the_other():
    assert not any("models" in name or "_engine" in name for name in imported_by("__main__"))


def imported_by(module: str) -> set[str]:
    """The modules that a module of the server imports."""
    code = f"import sys, jax_attn.serve.{module}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split())
