"""The kernel cache and precompile with the real NVRTC, no GPU; the rest is in tests/csrc/jit."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_attn as ja
from jax_attn import _core, _environment
from jax_attn._xla import jit

ARCH = 90
SPEC = ja.AttentionSpec(
    num_qo_heads=8,
    num_kv_heads=2,
    head_dim_qk=72,  # no other test compiles it
    max_batch=4,
    max_qo_tokens=16,
    max_kv_pages=32,
    target="sm_90",
)

# A process with only the extension: prepares one kernel and prints the outcome.
CHILD = """
import importlib.util, json, os, sys
extension, nvrtc, cache_dir, dtype, user, log = json.loads(sys.argv[1])
spec = importlib.util.spec_from_file_location("jax_attn._core", extension)
core = importlib.util.module_from_spec(spec)
spec.loader.exec_module(core)
core.set_jit_paths(nvrtc, [], cache_dir)
core.set_compile_log(log)
if user:
    core.merge_source(90, dtype).compile()  # opens NVRTC, which that user may not reach
    os.setuid(user)
sys.stdin.readline()  # so that several processes can start at once
result = [core.prepare_merge(90, dtype) for _ in range(2)][0]
print(json.dumps([result, core.jit_stats()]))
"""


def start(
    cache_dir: str,
    nvrtc: list[str] | None = None,
    dtype: int = 0,
    user: int = 0,
    prefix: tuple[str, ...] = (),
    log: bool = False,
) -> subprocess.Popen[str]:
    """Starts CHILD.

    user: the user id that the process takes on; 0: unchanged. prefix: a command that runs it. log:
    print which kernels it compiles.
    """
    nvrtc = jit.nvrtc_candidates() if nvrtc is None else nvrtc
    arguments = [_core.__file__, nvrtc, cache_dir, dtype, user, log]
    command = [*prefix, sys.executable, "-c", CHILD, json.dumps(arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[dict, dict, str]:
    """(what prepare_merge returned first, jit_stats, stderr)"""
    out, err = process.communicate("go\n", timeout=240)
    assert process.returncode == 0, err
    result, stats = json.loads(out)
    return result, stats, err


def entries(cache_dir: pathlib.Path) -> list[pathlib.Path]:
    """Everything in the cache, temporary folders too."""
    return sorted(cache_dir.iterdir())


@pytest.fixture(scope="module")
def nvrtc() -> None:
    try:
        _core.merge_source(ARCH, 0).compile()
    except RuntimeError as error:
        if "pip install" not in str(error):
            raise
        pytest.skip("NVRTC is not installed")


@pytest.fixture
def cache_dir(tmp_path: pathlib.Path, nvrtc: None) -> pathlib.Path:
    return tmp_path / "not" / "there" / "yet"


def test_second_process_reads_what_the_first_compiled(cache_dir):
    first, stats, err = finish(start(str(cache_dir)))
    assert first["origin"] == "compiled" and err == ""
    assert stats["compiled"] == 1 and stats["memory_hits"] == 1 and stats["disk_hits"] == 0
    assert stats["compile_ms"] > 0

    second, stats, _ = finish(start(str(cache_dir)))
    assert second["origin"] == "disk"
    assert stats["compiled"] == 0 and stats["disk_hits"] == 1

    [entry] = entries(cache_dir)
    assert entry.name.startswith("merge-sm_90a-bf16-")
    assert str(entry) == first["cache_path"] == second["cache_path"]
    source = _core.merge_source(ARCH, 0)
    assert (entry / "kernel.cu").read_text() == source.text
    cubin, _ = source.compile()
    assert (entry / "kernel.cubin").read_bytes() == cubin  # NVRTC is deterministic
    assert first["num_threads"] % 32 == 0 and first["num_threads"] > 0


def test_log_says_why_a_kernel_was_compiled(cache_dir):
    number = r"[0-9]+\.[0-9]+"
    first, _, err = finish(start(str(cache_dir), log=True))
    why = r"disk cache: miss; no other merge kernel is known"
    assert re.fullmatch(rf"jax_attn: compiled {first['name']} in {number} s \({why}\)\n", err)
    other, _, err = finish(start(str(cache_dir), dtype=1, log=True))
    why = r"disk cache: miss; nearest key differs in: dtype bf16 -> f16"
    assert re.fullmatch(rf"jax_attn: compiled {other['name']} in {number} s \({why}\)\n", err)
    again, _, err = finish(start(str(cache_dir), dtype=1, log=True))
    why = r"disk cache: hit"
    assert re.fullmatch(rf"jax_attn: loaded {again['name']} in {number} ms \({why}\)\n", err)


@pytest.mark.parametrize("damage", ["truncate", "flip", "no_meta", "empty_folder"])
def test_damaged_entry_is_rebuilt(cache_dir, damage):
    finish(start(str(cache_dir)))
    [entry] = entries(cache_dir)
    cubin = (entry / "kernel.cubin").read_bytes()
    if damage == "truncate":
        (entry / "kernel.cubin").write_bytes(cubin[:-7])
    elif damage == "flip":
        (entry / "kernel.cubin").write_bytes(cubin[:-1] + bytes([cubin[-1] ^ 1]))
    elif damage == "no_meta":
        (entry / "meta").unlink()
    else:
        for file in entry.iterdir():
            file.unlink()
    result, stats, err = finish(start(str(cache_dir)))
    assert result["origin"] == "compiled" and stats["corrupt"] == 1 and err == ""
    assert entries(cache_dir) == [entry]
    assert (entry / "kernel.cubin").read_bytes() == cubin
    assert finish(start(str(cache_dir)))[0]["origin"] == "disk"


@pytest.mark.parametrize("damaged", [False, True])
def test_racing_processes_all_succeed(cache_dir, damaged):
    if damaged:
        finish(start(str(cache_dir)))
        (entries(cache_dir)[0] / "kernel.cubin").write_bytes(b"")
    processes = [start(str(cache_dir)) for _ in range(4)]
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        result, _, err = finish(process)
        assert result["origin"] in ("compiled", "disk") and err == ""
    assert len(entries(cache_dir)) == 1
    assert finish(start(str(cache_dir)))[0]["origin"] == "disk"


def test_unwritable_folder_keeps_kernels_in_memory(tmp_path, nvrtc):
    (tmp_path / "file").write_text("not a folder")
    result, stats, err = finish(start(str(tmp_path / "file" / "cache")))
    assert result["origin"] == "compiled" and result["cache_path"] == ""
    assert stats["memory_hits"] == 1
    assert err.count("kept in memory only") == 1 and "JAX_ATTN_CACHE_DIR" in err


def only_in_memory(result: dict, stats: dict, err: str, why: str) -> bool:
    """True if the kernel is in memory only and one sentence says why."""
    assert result["origin"] == "compiled" and result["cache_path"] == "" and stats["corrupt"] == 0
    [line] = err.splitlines()
    assert line.startswith("jax_attn: compiled kernels are kept in memory only: ")
    assert why in line and line.endswith(".") and "JAX_ATTN_CACHE_DIR" in line
    return True


def test_renamed_entry_is_a_miss(cache_dir):
    finish(start(str(cache_dir), dtype=0))
    [entry] = entries(cache_dir)
    other, _, _ = finish(start(str(cache_dir), dtype=1))
    shutil.rmtree(other["cache_path"])
    entry.rename(other["cache_path"])
    again, stats, err = finish(start(str(cache_dir), dtype=1))
    assert again["origin"] == "compiled" and stats["disk_hits"] == 0 and err == ""
    assert again["cache_path"] == other["cache_path"]
    cubin, _ = _core.merge_source(ARCH, 1).compile()
    [entry] = entries(cache_dir)
    assert (entry / "kernel.cubin").read_bytes() == cubin


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_folder_that_others_may_write_is_no_cache(cache_dir, mode):
    finish(start(str(cache_dir)))
    before = entries(cache_dir)
    cache_dir.parent.parent.chmod(0o755)
    cache_dir.chmod(mode)
    for folder in cache_dir.parents:
        if folder.owner() == cache_dir.owner() and folder.stat().st_mode & 0o77 == 0:
            folder.chmod(0o755)  # opens pytest's private parent folders
    why = f"{cache_dir} can be written by other users (its mode is {mode:o})"
    assert only_in_memory(*finish(start(str(cache_dir))), why)
    assert entries(cache_dir) == before


@pytest.fixture
def open_folder(nvrtc):
    """A folder that other users can enter, with another user's id."""
    if os.geteuid() != 0:
        pytest.skip("only root can take on another user's id")
    with tempfile.TemporaryDirectory() as name:
        pathlib.Path(name).chmod(0o755)
        yield pathlib.Path(name), 12345


def test_caches_of_root_and_of_users(open_folder):
    folder, user = open_folder
    root_s, users = folder / "root", folder / "user"
    finish(start(str(root_s)))
    result, _, err = finish(start(str(root_s), user=user))  # as from an image
    assert result["origin"] == "disk" and err == ""
    done = finish(start(str(root_s), user=user, dtype=1))
    assert only_in_memory(*done, f"cannot create {root_s}/.tmp-")

    users.mkdir()
    os.chown(users, user, user)
    assert finish(start(str(users), user=user))[0]["origin"] == "compiled"
    assert finish(start(str(users), user=user))[0]["origin"] == "disk"
    why = f"{users} belongs to user {user}, neither to root nor to user 0"
    assert only_in_memory(*finish(start(str(users))), why)
    why = f"{users} belongs to user {user}, neither to root nor to user {user + 1}"
    assert only_in_memory(*finish(start(str(users), user=user + 1)), why)


def test_read_only_and_vanished_homes(open_folder):
    folder, user = open_folder
    home = folder / "home"
    home.mkdir()
    os.chown(home, user, user)
    home.chmod(0o555)
    cache_dir = home / ".cache" / "jax_attn"
    done = finish(start(str(cache_dir), user=user))
    assert only_in_memory(*done, f"cannot create {home}/.cache: Permission denied")
    home.rmdir()
    done = finish(start(str(cache_dir), user=user))
    assert only_in_memory(*done, f"cannot create {home}: Permission denied")


def test_full_disk(tmp_path, nvrtc):
    mount = 'mount -t tmpfs -o size=16k none {0} && exec "$@"'
    in_full_disk = ("unshare", "-rm", "sh", "-c", mount.format(tmp_path), "sh")
    probe = subprocess.run([*in_full_disk, "true"], capture_output=True, text=True)
    if probe.returncode != 0:
        pytest.skip(f"no file system of a few bytes: {probe.stderr.strip()}")
    # Nothing is left of the failed write; a second one fails for the same lack of space.
    result, stats, err = finish(start(str(tmp_path / "cache"), prefix=in_full_disk))
    assert only_in_memory(result, stats, err, "No space left on device")


# ---- configuration of the cache folder -----------------------------------------------------------


def cache_dir_of(monkeypatch: pytest.MonkeyPatch, **env: str) -> str:
    for name in ("JAX_ATTN_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    return _environment._cache_dir()


def test_cache_folder_of_the_environment(monkeypatch, tmp_path):
    of = functools.partial(cache_dir_of, monkeypatch)
    assert of(HOME="/h") == "/h/.cache/jax_attn"
    assert of(HOME="/h", XDG_CACHE_HOME="/x") == "/x/jax_attn"
    assert of(HOME="/h", XDG_CACHE_HOME="") == of(HOME="/h", XDG_CACHE_HOME="x")
    assert of(HOME="/h", XDG_CACHE_HOME="x") == "/h/.cache/jax_attn"
    assert of(HOME="/h", JAX_ATTN_CACHE_DIR="") == ""  # no cache
    assert of(HOME="/h", JAX_ATTN_CACHE_DIR="~/c") == "/h/c"
    monkeypatch.chdir(tmp_path)
    assert of(JAX_ATTN_CACHE_DIR="c") == str(tmp_path / "c")  # absolute: chdir has no effect
    with pytest.raises(
        ValueError, match=r"JAX_ATTN_CACHE_DIR: expected a path in UTF-8, got '/\\udc"
    ):
        of(JAX_ATTN_CACHE_DIR="/\udcff")


def test_no_home(monkeypatch, nvrtc):
    """The environment and the system have no home folder, as for users of containers."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    folder = cache_dir_of(monkeypatch)
    assert only_in_memory(*finish(start(folder)), f"{folder} is no absolute path (is HOME set?)")
    assert not os.path.lexists(folder)


# ---- precompile ---------------------------------------------------------------------------------

FORKS = """
import dataclasses, os, signal
import numpy as np
import jax_attn as ja
spec = ja.AttentionSpec(8, 2, 72, max_batch=4, max_qo_tokens=16, max_kv_pages=32, target="sm_90")
assert len(ja.precompile(spec)) == 6  # the threads that do it are there, and wait for more
pid = os.fork()
if pid == 0:
    signal.alarm(100)  # a deadlock ends in a signal
    other = dataclasses.replace(spec, head_dim_qk=40)
    assert ja.precompile(other)[0].origin == "compiled"
    assert ja.precompile(spec)[0].origin == "disk"
    host = dataclasses.replace(spec, target="cpu")
    ja.plan(host, [0, 1, 3], [20, 30], [0, 2, 4], np.arange(4))
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert ja.precompile(spec)[0].origin == "memory"
"""


def test_precompile_and_plan_in_a_forked_child(cache_dir):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKS],
        env=os.environ | {"JAX_ATTN_CACHE_DIR": str(cache_dir)},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr


def test_no_cache_folder(nvrtc):
    result, _, err = finish(start(""))
    assert result["origin"] == "compiled" and result["cache_path"] == "" and err == ""


def test_missing_nvrtc_says_what_to_install(tmp_path):
    process = start(str(tmp_path), nvrtc=["/nonexistent/libnvrtc.so.13"])
    _, err = process.communicate("go\n", timeout=240)
    assert "RuntimeError" in err and "pip install 'jax-attn[cuda13]'" in err
    assert "/nonexistent/libnvrtc.so.13" in err


@pytest.fixture
def cache_dir_here(cache_dir: pathlib.Path):
    _core.set_jit_paths(jit.nvrtc_candidates(), [], str(cache_dir))
    yield cache_dir
    _core.set_jit_paths(jit.nvrtc_candidates(), [], _environment.cache_dir)


def test_precompile_without_gpu(cache_dir_here):
    kernels = ja.precompile([SPEC, SPEC])
    assert [kernel.name.split("-")[:2] for kernel in kernels] == [
        ["attention", "sm_90a"],
        ["plan", "sm_90a"],  # for given prefix levels
        ["plan", "sm_90a"],
        ["append", "sm_90a"],
        ["append_rotated", "sm_90a"],
        ["merge", "sm_90a"],
    ]
    attention = kernels[0]  # other tests of this process may have compiled the others
    assert attention.origin == "compiled" and attention.milliseconds > 0
    assert pathlib.Path(attention.cache_path, "kernel.cu").exists()
    assert pathlib.Path(attention.cache_path) in entries(cache_dir_here)
    assert all(kernel.origin == "memory" for kernel in ja.precompile(SPEC))
    [other, *_] = ja.precompile(SPEC, target="sm_80")
    assert other.name.startswith("attention-sm_80-") and other.origin == "compiled"


def test_switches_of_the_compile_log(cache_dir_here, capfd, monkeypatch):
    """JAX_ATTN_LOG_COMPILE and jax_log_compiles, with small kernels that no other test compiles."""

    def line(arch: int, dtype: int) -> str:
        job = functools.partial(_core.prepare_merge, arch, dtype)
        monkeypatch.setattr(jit, "jobs_of", lambda spec: {"merge": job})
        [kernel] = ja.precompile(SPEC)
        assert kernel.origin == "compiled"
        return capfd.readouterr().err

    assert line(87, 0) == ""
    with jax.log_compiles():
        # Or another architecture's, if another test of this process compiled it.
        nearest = (
            r"\(disk cache: miss; nearest key differs in: (dtype bf16 -> f16|arch \d+ -> 87)\)"
        )
        assert re.search(nearest, line(87, 1))
    with monkeypatch.context() as patch:
        patch.setattr(_environment, "log_compile", True)
        assert re.search(r"nearest key differs in: arch \d+ -> 88\)", line(88, 0))
    assert line(88, 1) == ""


def test_a_traced_call_starts_its_compile(cache_dir_here, monkeypatch):
    """Tracing starts it before XLA sees the call, so the kernel is ready or on its way."""
    spec = dataclasses.replace(SPEC, head_dim_qk=80, dtype="float32")  # no other test compiles it
    k, v = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in spec.kv_shapes(4, 16))
    q = jax.ShapeDtypeStruct(spec.q_shape, jnp.float32)
    plan = ja.plan(spec, [0, 1], [5], [0, 1], [0])
    trace = functools.partial(jax.eval_shape, ja.attention, q, k, v, plan)
    trace()  # on a machine without a GPU
    assert jit._start.cache_info().currsize == 0
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    jax.clear_caches()
    trace()
    try:
        [started] = jit._start(jit._jobs_of_operation, "attention", spec, ())
        assert started.result()["origin"] == "compiled"
        assert _core.prepare_attention(spec.problem)["origin"] == "memory"
    finally:
        jit._start.cache_clear()


# No other test compiles it.
LINEAR = ja.LinearAttentionSpec(
    4, 4, 4, max_qo_len=1, num_qk_heads=1, num_v_heads=2, head_dim_k=24, head_dim_v=16
)


def test_precompile_linear_attention(cache_dir_here):
    [kernel] = ja.precompile(LINEAR, target="sm_90")
    assert kernel.name.startswith("linear_attention-sm_90a-") and kernel.origin == "compiled"
    # The launches of a chunked loop compile side by side.
    prefill = dataclasses.replace(LINEAR, max_tokens=4096, max_qo_len=4096)
    names = jit._jobs_of_linear_spec(prefill, "sm_90:132")
    assert len(names) > 1 and kernel.name not in names
    with pytest.raises(ValueError, match="precompile: target: expected a CUDA target, got 'cpu'"):
        ja.precompile(LINEAR)


def test_traced_linear_layers_start_their_compile(cache_dir_here, monkeypatch):
    """What is traced is what precompile and the handler of the call prepare."""
    plan = ja.plan_linear_attention(LINEAR, [0, 1, 2], [0, 1], [0, 1])
    array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    q, v = array((4, 1, 24)), array((4, 2, 16))
    g = jax.ShapeDtypeStruct(LINEAR.decay_shape, jnp.float32)
    states = jax.ShapeDtypeStruct(LINEAR.state_shape, jnp.float32)
    x, inputs = array((4, 8)), array((4, 2, 8))
    weight = jax.ShapeDtypeStruct((8, 3), jnp.float32)
    started: list[str] = []
    monkeypatch.setattr(
        jit, "_start", lambda jobs, *arguments: started.extend(jobs(*arguments).keys())
    )

    def trace():
        jax.eval_shape(lambda *of: ja.linear_attention(*of, plan), q, q, v, g, g, states)
        jax.eval_shape(lambda *of: ja.short_convolution(*of, plan), x, weight, None, inputs)

    trace()  # on a machine without a GPU
    assert started == []
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for module in ("_ops.linear_kernel", "_ops.short_convolution"):
        monkeypatch.setattr(f"jax_attn.{module}.gpu_target", lambda: (90, 132))
    jax.clear_caches()
    trace()
    convolution = _core.short_convolution_source(90, 0, 3, False).name
    assert set(started) == {*jit._jobs_of_linear_spec(LINEAR, "sm_90:132"), convolution}


def test_kernels_compile_at_the_same_time(cache_dir_here, monkeypatch):
    pool = ThreadPoolExecutor(2)  # also on one core
    monkeypatch.setattr(jit, "_pool", lambda: pool)
    specs = [dataclasses.replace(SPEC, dtype="float32", head_dim_qk=dim) for dim in (88, 104)]
    begin = time.perf_counter()
    kernels = [kernel for kernel in ja.precompile(specs) if kernel.origin == "compiled"]
    elapsed = 1e3 * (time.perf_counter() - begin)
    assert len(kernels) >= 2
    assert elapsed < sum(kernel.milliseconds for kernel in kernels)


def test_precompile_refuses_a_cpu_target():
    spec = ja.AttentionSpec(
        num_qo_heads=8, num_kv_heads=2, head_dim_qk=64, max_kv_pages=32, target="cpu"
    )
    with pytest.raises(ValueError, match=r'expected a CUDA target, got \'cpu\'.*target="sm_90"'):
        ja.precompile(spec)


def test_toolkit_of_the_environment_is_searched(monkeypatch):
    monkeypatch.setattr(_environment, "cuda_toolkits", ["/opt/some_cuda"])
    candidates = jit.nvrtc_candidates()
    assert "/opt/some_cuda/lib64/libnvrtc.so.13" in candidates
    assert candidates[-2:] == ["libnvrtc.so.13", "libnvrtc.so.12"]  # last: the loader's search


# --- on a GPU: needs a real driver ---

NUM_CALLS = 8  # in one jit; XLA captures runs of 5 and more


@jax.jit
def chained_calls(q, k_pages, v_pages, plan):
    for _ in range(NUM_CALLS):
        q = ja.attention(q, k_pages, v_pages, plan)
    return q


def decode_operands(device: jax.Device) -> tuple:
    """(q, k_pages, v_pages, plan) of a decode batch of long and short requests, on the device."""
    target = "cpu" if device.platform == "cpu" else None
    spec = ja.AttentionSpec(
        num_qo_heads=8,
        num_kv_heads=2,
        head_dim_qk=64,
        max_batch=4,
        max_qo_tokens=4,
        max_kv_pages=1024,
        target=target,
    )
    kv_lens = np.array([9000, 17, 1, 400], np.int32)
    page_indptr = np.concatenate([[0], np.cumsum(-(-kv_lens // 16))]).astype(np.int32)
    num_pages = int(page_indptr[-1])
    plan = ja.plan(spec, np.arange(5, dtype=np.int32), kv_lens, page_indptr, np.arange(num_pages))
    rng = np.random.default_rng(0)
    shapes = [(4, 8, 64), (num_pages, 16, 2, 64), (num_pages, 16, 2, 64)]
    arrays = [rng.standard_normal(shape, np.float32).astype(jnp.bfloat16) for shape in shapes]
    return jax.device_put((*arrays, plan), device)


def gpus() -> list[jax.Device]:
    try:
        return jax.local_devices(backend="gpu")
    except RuntimeError as error:
        pytest.skip(f"no GPU: {str(error).splitlines()[0]}")


@pytest.mark.cuda
def test_replays_do_not_enter_execute():
    """XLA captures the calls: the handler's host code runs for a trace, not for a replay."""
    q, *rest = decode_operands(gpus()[0])

    def launches_of(num_steps: int) -> int:
        before = _core.jit_stats()["attention_launches"]
        for _ in range(num_steps):
            chained_calls(q, *rest).block_until_ready()
        return _core.jit_stats()["attention_launches"] - before

    assert launches_of(5) >= NUM_CALLS  # the counter counts
    assert launches_of(50) < 50 * NUM_CALLS / 10  # nearly all of 50 steps are replays


@pytest.mark.cuda
def test_every_device_runs_its_own_copy():
    devices = gpus()
    if len(devices) < 2:
        pytest.skip("needs two GPUs")
    loaded = _core.jit_stats()["loaded"]
    operands = [decode_operands(device) for device in devices]
    results = [chained_calls(*each) for each in operands]  # all in flight at once
    assert [result.devices() for result in results] == [{device} for device in devices]
    for result in results[1:]:
        np.testing.assert_array_equal(np.asarray(result), np.asarray(results[0]))
    assert _core.jit_stats()["loaded"] > loaded
