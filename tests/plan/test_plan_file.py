"""Saved plans: what loads, and what is refused."""

import io
import json
import subprocess
import sys
import zipfile

import jax
import numpy as np
import pytest

import jax_attn as ja
from helpers.attention_cases import Case, make_plan
from jax_attn._spec.target import parse_target

CASE = Case("", (1, 40, 0), (5000, 60, 0), num_ctas=8)


@pytest.mark.parametrize("target", ("cpu", "sm_80", "sm_90:132"))
@pytest.mark.parametrize("num_ctas", (None, 3))
def test_a_loaded_plan_equals_the_saved_one(tmp_path, target, num_ctas):
    plan = make_plan(CASE, target, num_ctas=num_ctas)
    path = tmp_path / "a plan"  # as named; no suffix is appended
    plan.save(path)
    again = ja.AttentionPlan.load(path)
    assert again.spec == plan.spec and hash(again.spec) == hash(plan.spec)
    np.testing.assert_array_equal(again.buffer, plan.buffer)
    assert again.describe() == plan.describe()


def test_a_loaded_plan_runs(tmp_path):
    plan = make_plan(CASE, dtype="float32")
    plan.save(tmp_path / "plan.npz")
    again = ja.AttentionPlan.load(tmp_path / "plan.npz")
    spec = plan.spec
    q = jax.random.normal(jax.random.key(0), spec.q_shape)
    k, v = (
        jax.random.normal(jax.random.key(1), shape)
        for shape in spec.kv_shapes(spec.max_kv_pages, spec.page_size)
    )
    np.testing.assert_array_equal(ja.attention(q, k, v, again), ja.attention(q, k, v, plan))


def test_the_number_of_queues_is_kept_where_there_are_more_processors(tmp_path, monkeypatch):
    import os

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(5), raising=False)
    parse_target.cache_clear()
    plan = make_plan(CASE, num_ctas=None)
    assert plan.spec.kernel_config["num_ctas"] % 5 == 0
    plan.save(tmp_path / "plan.npz")
    monkeypatch.undo()
    parse_target.cache_clear()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2), raising=False)
    again = ja.AttentionPlan.load(tmp_path / "plan.npz")
    parse_target.cache_clear()
    assert again.spec.num_ctas == plan.spec.kernel_config["num_ctas"]
    np.testing.assert_array_equal(again.items(), plan.items())


def rewritten(tmp_path, change):
    """Saves a plan whose contents went through `change`."""
    path = tmp_path / "plan.npz"
    make_plan(CASE).save(path)
    with np.load(path) as file:
        about, buffer = json.loads(str(file["about"])), file["buffer"]
    about, buffer = change(about, buffer)
    np.savez(path, about=np.array(json.dumps(about)), buffer=buffer)
    return path


def with_magic(buffer, magic):
    return np.concatenate([np.array([magic], np.int32), buffer[1:]])


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda a, b: (a | {"format": 7}, b), ("expected format 1", "got 7")),
        (lambda a, b: (a | {"plan_version": 1}, b), ("plan_version", "got 1", "plan the batch")),
        (lambda a, b: (a | {"spec": a["spec"] | {"wings": 2}}, b), ("fields", "wings")),
        (
            lambda a, b: (a | {"kernel_config": a["kernel_config"] | {"tile_kv": 48}}, b),
            ("kernel configuration", "tile_kv", "got 48"),
        ),
        (lambda a, b: (a, b[:-1]), ("expected a buffer of int32[", "got int32[")),
        (lambda a, b: (a, b.astype(np.int64)), ("expected a buffer of int32[", "got int64[")),
        (lambda a, b: (a, with_magic(b, 5)), ("begins with", "got 5,")),
    ],
)
def test_another_version_is_refused(tmp_path, change, words):
    with pytest.raises(ValueError, match="^AttentionPlan.load: ") as refusal:
        ja.AttentionPlan.load(rewritten(tmp_path, change))
    for word in words:
        assert word in str(refusal.value)


def test_another_file_is_refused(tmp_path):
    path = tmp_path / "plan.npz"
    make_plan(CASE).save(path)
    whole = path.read_bytes()
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    np.save(tmp_path / "array.npy", np.zeros(3))
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "text").write_text("not a plan")
    (tmp_path / "cut").write_bytes(whole[: len(whole) // 2])
    middle = len(whole) // 2
    damaged = whole[:middle] + bytes(x ^ 0x55 for x in whole[middle : middle + 40])
    (tmp_path / "damaged").write_bytes(damaged + whole[middle + 40 :])
    for name in ("other.npz", "array.npy", "empty", "text", "cut", "damaged"):
        with pytest.raises(ValueError, match="expected a file of AttentionPlan.save, got"):
            ja.AttentionPlan.load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        ja.AttentionPlan.load(tmp_path / "none")


LOAD = "^AttentionPlan.load: "


@pytest.mark.parametrize(
    "section, offset, value, words",
    [
        ("page_indices", 0, 2**27, ("page_indices[0]: expected 0 to ", "got 134217728")),
        ("header", 4, 10**6, ("header.num_items: expected 0 to ", "got 1000000")),
        ("items", 12 + 5, 4000, ("items[1].kv_end: expected ", "got 4000")),
        ("merge_groups", 3, 999, ("merge_groups[0].partials_begin: expected ", "999")),
        ("kv_lens", 1, -7, ("kv_lens[1]: expected a length >= 0", "got -7")),
    ],
)
def test_a_damaged_plan_is_refused(tmp_path, section, offset, value, words):
    """test_check_plan.py checks everything that kernels follow."""

    def change(about, buffer):
        buffer[make_plan(CASE).spec.layout[section] + offset] = value
        return about, buffer

    path = rewritten(tmp_path, change)
    with pytest.raises(ValueError, match=LOAD) as refusal:
        ja.AttentionPlan.load(path)
    for word in (str(path), *words):
        assert word in str(refusal.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda a: [a],
        lambda a: None,
        lambda a: "plan",
        lambda a: 10**400,
        lambda a: a | {"spec": 3},
        lambda a: a | {"spec": [["num_qo_heads", 4]]},
        lambda a: a | {"kernel_config": None},
        lambda a: a | {"kernel_config": {}},
        lambda a: a | {"kernel_config": {"num_ctas": "8"}},
        lambda a: a | {"kernel_config": a["kernel_config"] | {"num_ctas": 2**80}},
        lambda a: {k: x for k, x in a.items() if k != "spec"},
        lambda a: a | {"format": [1]},
        lambda a: a | {"format": {"a": float("nan")}},
    ],
)
def test_an_about_of_another_kind_is_refused(tmp_path, change):
    with pytest.raises(ValueError, match=LOAD) as refusal:
        ja.AttentionPlan.load(rewritten(tmp_path, lambda a, b: (change(a), b)))
    assert len(str(refusal.value)) < 2000


@pytest.mark.parametrize("value", [None, -1, 2**31, 2**62, 2.5, True, "7", [7], {"a": 7}, "sm_²"])
def test_a_field_of_another_kind_is_refused(tmp_path, value):
    """Each field in turn: one error sentence, or a valid spec, whose plan differs."""
    original = make_plan(CASE)
    for field in type(original.spec).__dataclass_fields__:
        path = rewritten(tmp_path, lambda a, b: (a | {"spec": a["spec"] | {field: value}}, b))  # noqa: B023
        try:
            assert ja.AttentionPlan.load(path).header() == original.header()
        except ValueError as error:
            assert str(error).startswith("AttentionPlan.load: "), error


def entry(text):
    data = io.BytesIO()
    np.save(data, np.array(text))
    return data.getvalue()


def npy(header, data=b""):
    text = repr(header).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data


def hostile_files():
    """(name, about.npy, buffer.npy) of damaged files; None: as saved."""
    i4 = {"descr": "<i4", "fortran_order": False}
    yield "nested", entry("[" * 50000), None
    yield "not json", entry("{"), None
    yield "bytes", entry(b"{}"), None
    pickle = b"cos\nsystem\n"
    yield "pickle", npy({"descr": "|O", "fortran_order": False, "shape": ()}, pickle), None
    yield "pickled words", None, npy(i4 | {"descr": "|O", "shape": (3,)}, pickle)
    yield "claims", None, npy(i4 | {"shape": (2**40,)}, b"1234")
    yield "negative", None, npy(i4 | {"shape": (-4,)}, b"1234")
    yield "no header", None, b"abcdefghijkl"
    yield "code", None, npy("__import__('os').abort()")
    yield "version", None, b"\x93NUMPY\x09\x00" + bytes(100)
    yield "big header", None, b"\x93NUMPY\x02\x00\xff\xff\xff\x7f" + bytes(100)
    yield (
        "code points",
        npy({"descr": "<U2", "fortran_order": False, "shape": ()}, b"\xff" * 8),
        None,
    )
    yield "long", entry("[" + " " * (1 << 20)), None
    yield "twice as long", None, npy(i4 | {"shape": (1 << 20,)}, bytes(1 << 22))


def test_a_hostile_file_is_refused(tmp_path):
    path = tmp_path / "plan.npz"
    make_plan(CASE).save(path)
    with np.load(path) as file:
        saved = [entry(file[name]) for name in ("about", "buffer")]
    for compression in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2):
        for name, *entries in hostile_files():
            with zipfile.ZipFile(path, "w", compression) as archive:
                for i, member in enumerate(("about.npy", "buffer.npy")):
                    archive.writestr(member, saved[i] if entries[i] is None else entries[i])
            with pytest.raises(ValueError, match=LOAD) as refusal:
                ja.AttentionPlan.load(path)
            assert len(str(refusal.value)) < 2000, name


def test_flipped_bytes_are_refused_or_harmless(tmp_path):
    """Flips bytes of the file itself: zip directory, headers and compressed data."""
    path = tmp_path / "plan.npz"
    plan = make_plan(CASE)
    plan.save(path)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    loaded = 0
    for _ in range(400):
        data = bytearray(whole)
        for at in rng.integers(0, len(data), rng.integers(1, 4)):
            data[at] ^= 1 << rng.integers(8)
        path.write_bytes(data[: rng.integers(1, len(data))] if rng.random() < 0.1 else data)
        try:
            np.testing.assert_array_equal(ja.AttentionPlan.load(path).buffer, plan.buffer)
            loaded += 1
        except ValueError as error:
            assert str(error).startswith("AttentionPlan.load: ")
    assert loaded < 200  # dates and similar bytes


def test_what_a_file_claims_takes_no_memory(tmp_path):
    """Zip bombs of 256 MB of zeros in 1 MB, in a process that may take 60 MB more."""
    plan = make_plan(CASE)
    plan.save(tmp_path / "plan.npz")
    with np.load(tmp_path / "plan.npz") as file:
        about, buffer = entry(file["about"]), entry(file["buffer"])
    for name, members in {
        "words": {"about.npy": about, "buffer.npy": None},
        "about": {"about.npy": None, "buffer.npy": buffer},
        "more": {"about.npy": about, "buffer.npy": buffer, "other.npy": None},
    }.items():
        with zipfile.ZipFile(tmp_path / name, "w", zipfile.ZIP_DEFLATED, True, 1) as archive:
            for member, data in members.items():
                with archive.open(member, "w") as file:
                    file.write(buffer[:128] if data is None else data)
                    for _ in range(0 if data is not None else 1 << 4):
                        file.write(bytes(1 << 24))
    program = """
import resource, sys
import jax_attn as ja
used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    try:
        ja.AttentionPlan.load(path)
    except ValueError as error:
        print(str(error).split(":")[0])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used) >> 10)
"""
    paths = [str(tmp_path / name) for name in ("words", "about", "more")]
    done = subprocess.run(
        [sys.executable, "-c", program, *paths], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    *refusals, megabytes = done.stdout.split()
    assert refusals[:2] == ["AttentionPlan.load"] * 2
    assert int(megabytes) < 60
