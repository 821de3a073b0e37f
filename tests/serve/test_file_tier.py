"""Pages that leave the host's memory for files and come back, also after a restart."""

import dataclasses
import itertools
import math
import stat
import threading
import types

import jax
import pytest

pytest.importorskip("llguidance", reason="needs the extra `serve`")
pytest.importorskip("prometheus_client", reason="needs the extra `serve`")

from helpers.serve import engine_runs
from jax_attn.serve import _options, _sizing
from jax_attn.serve._engine.engine import Engine
from jax_attn.serve._engine.engine_config import EngineConfig
from jax_attn.serve._engine.file_store import FileStore
from jax_attn.serve._openai.metrics import Metrics
from jax_attn.serve._scheduling.events import FIRST_VERSION
from jax_attn.serve._scheduling.file_tier import Values, has_pictures, names
from jax_attn.serve._scheduling.request import FinishReason, SamplingParams, Sequence

# The device holds one prompt and a half, the host one. One shape for all steps.
CONFIG = EngineConfig(
    num_pages=12, page_size=8, max_running=2, max_step_tokens=8, batch_invariant=True
)
HOST_PAGES = 8
PROMPTS = [[(7 * i * i + 31 * j) % 900 for i in range(60)] for j in range(5)]

ids = itertools.count()


@pytest.fixture(scope="module")
def plain(model):
    """Without a host tier."""
    engine = Engine(model, CONFIG)
    engine.warm_up()
    return engine


@pytest.fixture(scope="module")
def expected(plain):
    return [run(plain, prompt)[:2] for prompt in PROMPTS]


@pytest.fixture
def made(model, tmp_path):
    """Makes engines that share a directory, one after the other."""
    engines = []

    def make(most_bytes=1 << 30, owners=None, digest="model", was_killed=False, **fields):
        if was_killed:
            engines.clear()
        while engines:
            engines.pop().close()
        store = FileStore(tmp_path / "cache", most_bytes, digest, owners)
        fields = {"num_host_pages": HOST_PAGES, "files": store} | fields
        engine = Engine(model, dataclasses.replace(CONFIG, **fields))
        engine.device.compile_all()
        engines.append(engine)
        return engine

    yield make
    while engines:
        engines.pop().close()


def run(engine, *prompts, **fields):
    """(tokens, logprobs, cached tokens, reason) of the last."""
    return engine_runs.run(engine, *prompts, **fields)[-1]


def flushed(engine):
    """The numbers, once all is written."""
    copies = engine.scheduler.memory.files._files
    with copies._changed:
        assert copies._changed.wait_for(lambda: not copies._waiting_bytes, 60)
    return engine.stats()["files"]


def fill(engine, prompts=PROMPTS, **fields):
    for prompt in prompts:
        run(engine, prompt, **fields)
    return flushed(engine)


def test_pages_come_back_after_a_restart(made, expected):
    stored = fill(made())["stored"]
    assert stored == 16  # of the 35 full pages; 8 are on the host, and 11 on the device
    engine = made()  # closing the other one wrote these
    assert engine.stats()["files"]["cached"] == 35
    for prompt, wanted in zip(PROMPTS, expected, strict=True):
        found = run(engine, prompt)
        assert found[:2] == wanted and found[2] == 56
    assert engine.stats()["files"]["returned"] == 35


def test_a_server_that_was_killed_finds_what_left_its_memory(made, expected):
    engine = made()
    fill(engine)
    engine.close(keep=False)
    engine = made(was_killed=True)
    found = [run(engine, prompt) for prompt in PROMPTS]
    assert [x[:2] for x in found] == expected
    assert [x[2] for x in found] == [56, 56, 0, 0, 0]


def test_pages_come_back_while_the_server_runs(made, expected):
    engine = made()
    for _ in range(2):
        for prompt, wanted in zip(PROMPTS, expected, strict=True):
            assert run(engine, prompt)[:2] == wanted
            flushed(engine)
    counts = engine.stats()["files"]
    assert counts["returned"] >= len(PROMPTS) * 6
    # What comes back and leaves again is not written twice.
    assert counts["stored"] == counts["cached"] <= len(PROMPTS) * 8


def test_the_next_turn_after_a_restart(made, plain):
    turns = [list(prompt) for prompt in PROMPTS]
    for _ in range(2):
        engine, cached = made(), []
        for i, turn in enumerate(turns):
            tokens, *more, num_cached, _ = run(engine, turn)
            assert (tokens, *more) == run(plain, turn)[:2]
            cached.append(num_cached)
            turns[i] = turn + tokens
        flushed(engine)
    assert cached[:2] == [56, 56]


def test_others_run_while_files_are_read(made, expected, monkeypatch):
    fill(made())
    engine, gate = made(), threading.Event()
    read = FileStore.read

    def late(self, name):
        assert gate.wait(60)
        return read(self, name)

    monkeypatch.setattr(FileStore, "read", late)
    params = SamplingParams(4, temperature=1.0, seed=3, ignore_eos=True)
    waits = Sequence("waits", "waits", list(PROMPTS[0]), params)
    engine.submit([waits])
    assert not engine.step() and not waits.num_computed
    other = Sequence("other", "other", [5] * 20, params)
    engine.submit([other])
    while not other.finish_reason:
        engine.step()
    assert not waits.num_computed
    gate.set()
    while engine.has_work:
        engine.step()
    assert waits.num_cached == 56 and waits.tokens[60:] == expected[0][0]


class EndsWhenLookedAt:
    """A read that ends between two looks of the engine's thread."""

    def __init__(self, values):
        self._values, self._num_looks = values, 0

    def done(self):
        self._num_looks += 1
        return self._num_looks > 1

    def result(self):
        return self._values.result(60)


def test_a_read_may_end_at_any_time(made, expected, monkeypatch):
    fill(made())
    engine = made()
    copies = engine.scheduler.memory.files._files
    read = copies.read
    monkeypatch.setattr(copies, "read", lambda *args: EndsWhenLookedAt(read(*args)))
    found = run(engine, PROMPTS[0])
    assert found[:2] == expected[0] and found[2] == 56


def test_two_prompts_share_a_read(made):
    fill(made())
    engine = made()
    run(engine, PROMPTS[0], PROMPTS[0][:40])
    assert engine.stats()["files"]["returned"] == 7


def test_a_disk_that_does_not_answer_is_not_waited_for(made, expected, monkeypatch):
    fill(made())
    engine, gate = made(), threading.Event()
    monkeypatch.setattr(FileStore, "read", lambda self, name: gate.wait(60) and None)
    monkeypatch.setattr("jax_attn.serve._scheduling.file_tier._LATE_SECONDS", 0.01)
    for i in range(2):  # the second does not ask at all
        found = run(engine, PROMPTS[i])
        assert found[:2] == expected[i] and found[2] == 0
    gate.set()


def test_a_damaged_page_ends_the_prefix(made, expected, tmp_path, caplog):
    fill(made())
    engine = made()
    key = Sequence("x", "x", PROMPTS[0], SamplingParams(1)).key(56)
    name = [*names("", key, 0, 8)][3]
    path = tmp_path / "cache" / f"{name}.page"
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.write_bytes(raw)
    caplog.clear()
    found = run(engine, PROMPTS[0])
    assert found[:2] == expected[0] and found[2] == 24
    assert [record.message for record in caplog.records if "removed" in record.message] == [
        f"removed {name}.page of the file cache: its bytes are not those that were written"
    ]
    assert not path.exists() and engine.stats()["files"]["damaged"] == 1


def test_owners_salts_and_models_keep_apart(made):
    owners = {"key0": "A" * 64, "key1": "B" * 64}
    fill(made(owners=owners), namespace="key0/salt", tenant="key0")
    engine = made(owners=owners)
    for namespace in ("key1/salt", "key0", "key0/other", "salt", "key2/salt"):
        assert run(engine, PROMPTS[0], namespace=namespace)[2] == 0, namespace
    # The keys are in another order now: names of tenants are not those of their owners.
    engine = made(owners={"key0": "B" * 64, "key1": "A" * 64})
    assert run(engine, PROMPTS[1], namespace="key0/salt")[2] == 0
    assert run(engine, PROMPTS[1], namespace="key1/salt")[2] == 56
    engine = made(owners=owners, digest="another model")
    assert run(engine, PROMPTS[1], namespace="key0/salt")[2] == 0


def test_names_that_a_process_alone_knows_stay_out(made):
    engine = made()
    files = engine.scheduler.memory.files
    assert files.owner("a/\0" + "3\0") is None  # an adapter
    assert files.owner("a/\0new weights") is None
    assert files.owner("a/salt") == "a/salt"
    key = Sequence("x", "x", [1, 2, 3], SamplingParams(1)).key(3)
    assert not has_pictures(key)
    assert has_pictures(key + (-1).to_bytes(4, "little", signed=True))


def test_pages_with_pictures_are_not_written(made):
    engine = made()
    stored = fill(engine, PROMPTS[:2])["stored"]
    copies = engine.scheduler.memory.files._files
    (page,), _ = engine.device.take([0], [])
    of_picture = (-1).to_bytes(4, "little", signed=True) * 8
    for key, num in ((of_picture, 0), (bytes(32), 1)):
        copies.write("me", key, [page], is_state=False)
        assert flushed(engine)["stored"] == stored + num


def test_names_depend_on_all_before():
    key = Sequence("x", "x", PROMPTS[0], SamplingParams(1)).key(60)
    whole = [*names("me", key, 0, 8)]
    assert len({*whole}) == 7
    for begin in range(8):
        assert [*names("me", key, begin, 8)] == whole[begin:]
    assert not {*whole} & {*names("you", key, 0, 8)}
    other = [*names("me", b"\1" + key[1:], 0, 8)]
    assert not {*whole} & {*other}


def test_the_rule(made):
    fill(made())
    engine = made()
    files = engine.scheduler.memory.files
    files.page_tokens = 8.0  # as long as computing its tokens
    assert run(engine, PROMPTS[0])[2] == 0
    files.page_tokens = 7.9
    assert run(engine, PROMPTS[1])[2] == 56
    files.page_tokens, stored = math.inf, flushed(engine)["stored"]
    fill(engine, [[i] + PROMPTS[0] for i in range(4)])
    assert engine.stats()["files"]["stored"] == stored


def test_the_warm_up_measures_the_disk(made, tmp_path):
    engine = made()
    engine.warm_up()
    files = engine.scheduler.memory.files
    assert 0 < files.page_tokens < math.inf and files.token_seconds > 0
    assert engine.stats()["files"]["cached"] == 0
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["lock"]


def test_a_full_disk_is_said_once(made, expected, monkeypatch, caplog):
    engine = made()

    def fail(self, name, arrays):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FileStore, "write", fail)
    assert fill(engine)["stored"] == 0
    said = [record.message for record in caplog.records if "--file-cache" in record.message]
    assert said == ["--file-cache: nothing is written any more: [Errno 28] No space left on device"]
    assert run(engine, PROMPTS[0])[:2] == expected[0]


def test_new_weights_have_no_files(made, model):
    engine = made()
    fill(engine)
    norm = {"final_norm": 2 * model.params["final_norm"]}
    engine.update_params(norm, None, partial=True)
    stored = flushed(engine)["stored"]
    assert run(engine, PROMPTS[0])[2] == 0
    assert fill(engine)["stored"] == stored
    engine.update_params(norm, FIRST_VERSION, partial=True)
    assert run(engine, PROMPTS[0])[2] == 0


def test_a_failed_step_writes_nothing(made, expected, monkeypatch):
    engine = made()
    fill(engine, PROMPTS[:2])
    before = flushed(engine)["stored"]

    def fail(batch):
        raise RuntimeError("broken")

    engine.submit([Sequence("y", "y", PROMPTS[0], SamplingParams(2, temperature=0))])
    with monkeypatch.context() as patch:
        patch.setattr(engine.device, "forward", fail)
        with pytest.raises(RuntimeError):
            while True:
                engine.step()
    engine.recover("The engine failed.")
    assert engine.stats()["host"]["cached"] == 0
    assert flushed(engine)["stored"] <= before + HOST_PAGES
    found = run(engine, PROMPTS[0])
    assert found[:2] == expected[0] and found[3] is FinishReason.LENGTH


def test_metrics(made):
    engine = made()
    fill(engine)
    run(engine, PROMPTS[0])
    flushed(engine)
    served = types.SimpleNamespace(ready=True, stats=engine.stats)
    text, files = Metrics(served).text().decode(), engine.stats()["files"]
    for name, value in (
        ("file_cache_entries", files["cached"]),
        ("file_cache_bytes", files["bytes"]),
        ("file_pages_stored_total", files["stored"]),
        ("file_pages_returned_total", files["returned"]),
        ("file_pages_left_out_total", 0),
        ("file_cache_entries_evicted_total", 0),
        ("file_cache_entries_damaged_total", 0),
    ):
        assert f"\njax_attn_{name} {float(value)}\n" in text, name


@pytest.mark.parametrize("fields", [{"kv_dtype": "float8_e4m3fn"}, {"max_drafts": 3}], ids=str)
def test_pages_of_other_kinds(made, fields):
    first = run(made(**fields), PROMPTS[0])
    again = run(made(**fields), PROMPTS[0])
    assert again[:2] == first[:2] and (first[2], again[2]) == (0, 56)


def test_two_engines_of_one_server_share_the_files(model, made, tmp_path):
    first = made()
    store = first.config.files
    second = Engine(model, first.config)
    fill(first)
    for prompt in PROMPTS[:2]:
        key = Sequence("x", "x", prompt, SamplingParams(1)).key(56)
        read = second.scheduler.memory.files.ask("", key, 0, 0, False)
        assert len(read.values.result(60).pages) == 7
    counts = [engine.stats()["files"] for engine in (first, second)]
    assert [x["cached"] for x in counts] == [16, 0]  # said once, so that a sum is right
    second.close(keep=False)
    with pytest.raises(ValueError, match="no other server uses"):
        FileStore(tmp_path / "cache", 1 << 30, "model")
    first.close()
    assert store.counts()["cached"] == 35


def test_what_waits_for_the_disk_has_a_limit(made, monkeypatch):
    engine, gate = made(), threading.Event()
    write = FileStore.write
    monkeypatch.setattr(FileStore, "write", lambda *args: gate.wait(60) and write(*args))
    copies = engine.scheduler.memory.files._files
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(copies._page))
    monkeypatch.setattr("jax_attn.serve._engine.file_copies._MOST_WAITING", 3 * size)
    for prompt in PROMPTS:
        run(engine, prompt)
    assert copies._waiting_bytes <= 3 * size
    gate.set()
    counts = flushed(engine)
    assert counts["left_out"] and counts["stored"] == counts["cached"] >= 3


def test_reads_that_have_begun_end_after_close(made, monkeypatch):
    engine, gate, read = made(), threading.Event(), FileStore.read
    monkeypatch.setattr(FileStore, "read", lambda *args: gate.wait(60) and read(*args))
    copies = engine.scheduler.memory.files._files
    reads = [copies.read([f"{i:064x}.page"] * 6, None) for i in range(3)]
    engine.close(keep=False)
    engine.scheduler.memory.cache.files = None
    gate.set()
    assert [each.result(60) for each in reads] == [Values([])] * 3


def test_files_are_private(made, tmp_path):
    fill(made())
    directory = tmp_path / "cache"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    modes = {stat.S_IMODE(path.stat().st_mode) for path in directory.glob("*.page")}
    assert modes == {0o600}


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"file_cache_bytes": None}, "--file-cache: expected --file-cache-bytes beside it"),
        ({"host_cache_bytes": 0}, "--file-cache: expected --host-cache-bytes beside it"),
        ({"file_cache_bytes": 100}, "--file-cache-bytes: expected at least"),
        ({"file_cache": "/dev/null/x"}, "--file-cache: expected a directory to read and write"),
    ],
)
def test_refused(model, tmp_path, options, sentence):
    given = {"host_cache_bytes": 1 << 20, "file_cache": tmp_path / "x", "file_cache_bytes": 1 << 20}
    with pytest.raises(ValueError, match=sentence):
        _sizing.make_engine(model, _options.from_keywords(given | options))
