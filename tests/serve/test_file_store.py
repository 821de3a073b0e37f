"""The files of the prefix cache: what a kill, damage, other files and little room do to them."""

import hashlib
import itertools
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("tqdm", reason="needs the extra `serve`")

from jax_attn.serve._engine import file_store
from jax_attn.serve._engine.file_store import MAGIC, FileStore

MOST = 1 << 30


def name_of(i, kind="page"):
    return f"{hashlib.sha256(str(i).encode()).hexdigest()}.{kind}"


def arrays_of(i, size=1000):
    rng = np.random.default_rng(i)
    return [
        rng.standard_normal((3, size), np.float32).astype(ml_dtypes.bfloat16),
        rng.integers(0, 255, (2, 5), np.uint8),
        np.array(i, np.int32),
    ]


def same(one, other):
    return all(
        x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
        for x, y in zip(one, other, strict=True)
    )


@pytest.fixture
def open_store(tmp_path):
    stores = []

    def make(most_bytes=MOST, model="m"):
        while stores:
            stores.pop().leave()
        store = FileStore(tmp_path / "cache", most_bytes, model)
        store.join()
        stores.append(store)
        return store

    yield make
    while stores:
        stores.pop().leave()


def test_round_trip(open_store):
    store = open_store()
    for i in range(5):
        store.write(name_of(i), arrays_of(i))
    for again in (store, open_store()):
        assert len(again) == 5 and name_of(3) in again and name_of(9) not in again
        for i in range(5):
            assert same(again.read(name_of(i)), arrays_of(i))
        assert again.read(name_of(9)) is None
    float8 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    store = open_store()
    store.write(name_of("f8", "state"), [float8, np.zeros((0, 3), np.float32)])
    assert same(store.read(name_of("f8", "state")), [float8, np.zeros((0, 3), np.float32)])


def test_the_least_recently_used_make_room(open_store, tmp_path):
    store = open_store()
    store.write(name_of(0), arrays_of(0))
    size = store.counts()["bytes"]
    assert size == (tmp_path / "cache" / name_of(0)).stat().st_size
    most = 4 * size + 100
    store = open_store(most)
    for i in range(1, 4):
        store.write(name_of(i), arrays_of(i))
    assert store.read(name_of(0)) is not None
    store.touch([name_of(2), name_of(1)])
    store.write(name_of(4), arrays_of(4))  # 3 goes
    counts = store.counts()
    assert (counts["cached"], counts["evicted"]) == (4, 1) and counts["bytes"] <= most
    assert [name_of(i) in store for i in range(5)] == [True, True, True, False, True]
    # Times of use outlive the process, and a smaller budget holds at once: 0, then 1 go.
    store = open_store(2 * size + 100)
    assert [name_of(i) in store for i in range(5)] == [False, False, True, False, True]
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {
        "lock", name_of(2), name_of(4)
    }  # fmt: skip


def test_an_entry_larger_than_all_room(open_store):
    store = open_store(20_000)
    store.write(name_of(0), arrays_of(0))
    store.write(name_of(1), arrays_of(1, size=10_000))
    assert name_of(0) in store and name_of(1) not in store
    assert store.counts()["bytes"] <= 20_000


def flip(path, at):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0x10
    path.write_bytes(raw)


def with_header(path, **fields):
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<I", raw, 8)
    header = json.dumps(json.loads(raw[12 : 12 + length]) | fields).encode()
    path.write_bytes(MAGIC + struct.pack("<I", len(header)) + header + raw[12 + length :])


DAMAGES = {
    "its bytes": lambda path: flip(path, -1),
    "the magic": lambda path: flip(path, 0),
    "the length of the header": lambda path: flip(path, 11),
    "the header": lambda path: flip(path, 13),
    "cut within the arrays": lambda path: os.truncate(path, path.stat().st_size - 7),
    "cut within the header": lambda path: os.truncate(path, 40),
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "another model": lambda path: with_header(path, model="other"),
    "another name": lambda path: with_header(path, name=name_of(7)),
    "a dtype that there is not": lambda path: with_header(path, arrays=[["float99", [1]]]),
    "a shape that is none": lambda path: with_header(path, arrays=[["float32", [-5]]]),
    "a shape beyond all memory": lambda path: with_header(path, arrays=[["float32", [1 << 50]]]),
    "objects": lambda path: with_header(path, arrays=[["object", [1]]]),
    "no list": lambda path: with_header(path, arrays=7),
    "a checksum that is none": lambda path: with_header(path, checksum=None),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_removed(open_store, tmp_path, caplog, damage):
    store = open_store()
    for i in range(2):
        store.write(name_of(i), arrays_of(i))
    path = tmp_path / "cache" / name_of(0)
    DAMAGES[damage](path)
    damaged = path.read_bytes()
    assert store.read(name_of(0)) is None
    assert store.counts()["damaged"] == 1 and name_of(0) not in store and not path.exists()
    assert store.read(name_of(0)) is None  # it is simply not there now
    assert len(caplog.records) == 1 and path.name in caplog.text
    path.write_bytes(damaged)
    caplog.clear()
    store = open_store()
    if damage != "its bytes":  # which only reading sees
        assert not path.exists() and len(caplog.records) == 1
    assert store.read(name_of(0)) is None
    assert same(store.read(name_of(1)), arrays_of(1))
    assert store.counts()["cached"] == 1


def test_other_files_are_not_touched(open_store, tmp_path, caplog):
    directory = tmp_path / "cache"
    directory.mkdir()
    kept = ["notes.txt", "a.page", f"{'0' * 64}.txt", f"{'g' * 64}.page", "b.page.1.part"]
    for name in kept:
        (directory / name).write_text("mine")
    (directory / "sub").mkdir()
    (directory / f"{name_of(1)}.77.part").write_text("begun")
    store = open_store()
    store.write(name_of(0), arrays_of(0))
    open_store(most_bytes=1)
    names = {path.name for path in directory.iterdir()}
    assert names == {*kept, "sub", "lock"}
    assert caplog.messages == [
        f"removed 1 files of {directory} that are damaged, or of another model"
    ]


def test_links_and_folders_of_these_names(open_store, tmp_path):
    directory, outside = tmp_path / "cache", tmp_path / "outside"
    outside.write_text("mine")
    directory.mkdir()
    (directory / name_of(0)).symlink_to(outside)
    (directory / name_of(1)).mkdir()
    store = open_store()
    assert len(store) == 0 and store.read(name_of(1)) is None
    assert outside.read_text() == "mine"


def test_one_server_at_a_time(open_store, tmp_path):
    store = open_store()
    with pytest.raises(ValueError, match="--file-cache: expected a directory that no other server"):
        FileStore(tmp_path / "cache", MOST, "m")
    assert not store.join()
    store.leave()
    with pytest.raises(ValueError, match="no other server"):
        FileStore(tmp_path / "cache", MOST, "m")


def test_a_thread_changes_no_entry_once_the_lock_is_given_back(open_store, tmp_path, monkeypatch):
    """Another server may have the folder by then."""
    store, path = open_store(15_000), tmp_path / "cache" / name_of(0)
    store.write(name_of(0), arrays_of(0))
    flip(path, -1)

    def late(*args, **kwargs):  # the last user leaves while a file is written
        if not store._held.closed:
            store.leave()
        return open(*args, **kwargs)

    monkeypatch.setattr(file_store, "open", late, raising=False)
    store.write(name_of(1), arrays_of(1))
    assert store.read(name_of(0)) is None
    store.write(name_of(2), arrays_of(2, size=2000))  # for which another one would have to go
    assert {each.name for each in path.parent.iterdir()} == {"lock", name_of(0)}


def test_a_folder_of_another_user(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(ValueError, match="--file-cache: .*: it is another user's"):
        FileStore(tmp_path, MOST, "m")


def test_a_write_that_fails_leaves_nothing(open_store, tmp_path, monkeypatch):
    store = open_store()

    def fail(self, target):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.rename", fail)
        with pytest.raises(OSError, match="No space"):
            store.write(name_of(0), arrays_of(0))
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["lock"]
    assert store.counts()["bytes"] == 0
    store.write(name_of(0), arrays_of(0))
    assert same(store.read(name_of(0)), arrays_of(0))


def test_threads(open_store):
    """Two write, two read, in little room: what is read is what was written."""
    store = open_store()
    store.write(name_of(0), arrays_of(0))
    store = open_store(10 * store.counts()["bytes"])
    wrong = []

    def work(seed, writes):
        rng = np.random.default_rng(seed)
        for i in rng.integers(0, 30, 150).tolist():
            if writes:
                store.write(name_of(i), arrays_of(i))
            elif (found := store.read(name_of(i))) is not None and not same(found, arrays_of(i)):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i, i < 2)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = store.counts()
    assert not wrong and counts["damaged"] == 0 and 0 < counts["cached"] <= 10
    again = open_store()
    assert again.counts()["cached"] == counts["cached"]
    assert again.counts()["bytes"] == counts["bytes"]


WRITER = """
import itertools, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from test_file_store import arrays_of, name_of
from jax_attn.serve._engine.file_store import FileStore

store = FileStore(Path(sys.argv[1]), 1 << 26, "m")
first = int(sys.argv[3])
print("ready", flush=True)
for i in itertools.count(first):
    store.write(name_of(i), arrays_of(i, 100_000))
    print(i, flush=True)
"""


def test_a_kill_loses_one_entry_at_most(open_store, tmp_path):
    """Processes that do nothing but write are killed at any moment, one after the other."""
    directory, rng = tmp_path / "cache", np.random.default_rng(1)
    here = os.path.dirname(__file__)
    first = 0
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(directory), here, str(first)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout.readline() == "ready\n"
        written = []
        for line in itertools.islice(process.stdout, 6):
            written.append(int(line))
        time.sleep(rng.uniform(0, 0.01))
        process.send_signal(signal.SIGKILL)
        written += map(int, process.stdout.read().split())
        process.wait()
        store = open_store()
        for i in written:
            assert same(store.read(name_of(i)), arrays_of(i, 100_000)), i
        # It may have written one more, and not have said so.
        held = [i for i in range(written[-1] + 3) if name_of(i) in store]
        assert written[-1] <= held[-1] <= written[-1] + 1 and len(held) == held[-1] + 1
        assert store.counts()["damaged"] == 0
        assert not list(directory.glob("*.part"))
        store.leave()
        first = held[-1] + 1
