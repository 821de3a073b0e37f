"""A server of several devices, in one process and in several.

It has the tokens of one device, and all its processes end together.
"""

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import numpy as np
import pytest

from helpers.paths import EXAMPLES

pytest.importorskip("starlette", reason="needs the extra `serve`")

from helpers.mesh_checks import xla_flags
from helpers.serve.live_server import HANG_SECONDS, SAFE_PATH, START_SECONDS, eventually
from helpers.serve.ports import free_port
from jax_attn.serve._engine import processes as module
from jax_attn.serve._engine.processes import Processes, Record, pack, unpack

SIZES = ["--max-running", "2", "--max-step-tokens", "16", "--num-pages", "40"]
# Through the sampler's state, masks, prefix hits and several chunks.
BODIES = [
    {"prompt": "import os\nimport", "max_tokens": 12, "temperature": 0},
    {"prompt": "import os\nimport sys\n\n" * 4, "max_tokens": 8, "temperature": 0},
    # Always token 3000, whose embedding process 1 has: logprobs show if it sampled that, too.
    {"prompt": "x = ", "max_tokens": 9, "frequency_penalty": 1.5, "logit_bias": {"3000": 100},
     "temperature": 0, "logprobs": 1},
    {"prompt": "x = ", "max_tokens": 9, "temperature": 0, "regex": "[a-z]{4,9}"},
]  # fmt: skip


def environment(num_devices: int) -> dict[str, str]:
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags(num_devices)}


@contextlib.contextmanager
def started(directory, options, environments):
    """Starts a process for each of the options; yields processes and their output so far."""
    logs = [directory / f"log{i}" for i in range(len(options))]
    command = [sys.executable, *SAFE_PATH, "-m", "jax_attn.serve", "--port", "0", *SIZES]
    processes = []
    try:
        for log, of_one, env in zip(logs, options, environments, strict=True):
            with open(log, "wb") as file:
                processes.append(
                    subprocess.Popen([*command, *of_one], env=env, stdout=file, stderr=file)
                )
        yield processes, lambda: [log.read_text(errors="replace") for log in logs]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def options_of(port: int, count: int, *more: str) -> list[list[str]]:
    meeting = ["--coordinator", f"127.0.0.1:{port}", "--num-processes", str(count)]
    return [[*meeting, "--process-id", str(i), *more] for i in range(count)]


def wait_for(pattern: str, text, processes) -> re.Match:
    deadline = time.monotonic() + START_SECONDS
    while not (found := re.search(pattern, text())):
        assert time.monotonic() < deadline, text()
        assert processes[0].poll() is None, text()
        time.sleep(0.05)
    return found


def answers(url: str) -> tuple[list[str], list[float]]:
    """Texts, and the logprobs of requests that ask for them."""
    texts, logprobs = [], []
    for body in BODIES:
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=HANG_SECONDS) as response:
            choice = json.load(response)["choices"][0]
            texts.append(choice["text"])
            logprobs += (choice["logprobs"] or {"token_logprobs": []})["token_logprobs"]
    return texts, logprobs


def ready_url(logs, processes) -> str:
    url = wait_for(r"running on (http://\S+)", lambda: logs()[0], processes)[1]
    wait_for("ready; compiled", lambda: logs()[0], processes)
    eventually(lambda: is_ready(url))  # with several replicas the other ones are, too
    return url


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=HANG_SECONDS):
            return True
    except urllib.error.HTTPError as error:
        assert error.code == 503
        return False


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    directory = tmp_path_factory.mktemp("alone")
    with started(directory, [["--dtype", "float32"]], [environment(1)]) as (alone, logs):
        return answers(ready_url(logs, alone))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("num_processes", "num_devices", "split"),
    [
        (1, 2, ("--tensor-parallel", "2")),
        (1, 2, ("--context-parallel", "2", "--page-size", "16")),
        (2, 1, ("--tensor-parallel", "2")),
        (1, 2, ("--data-parallel", "2")),
        pytest.param(
            2,
            2,
            ("--tensor-parallel", "2", "--context-parallel", "2", "--page-size", "16"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_answers_are_those_of_one_device(tmp_path, one_device, num_processes, num_devices, split):
    """In one process, and in several; over HTTP."""
    expected, expected_logprobs = one_device
    options = [["--dtype", "float32", *split]]
    if num_processes > 1:
        options = options_of(free_port(), num_processes, *options[0])
    environments = [environment(num_devices)] * num_processes
    with started(tmp_path, options, environments) as (processes, logs):
        url = ready_url(logs, processes)
        texts, logprobs = answers(url)
        assert texts == expected
        assert len(logprobs) == 9
        np.testing.assert_allclose(logprobs, expected_logprobs, atol=1e-3)
        with urllib.request.urlopen(f"{url}/metrics") as response:
            held = re.findall(r"^jax_attn_device_bytes{.*} (.*)$", response.read().decode(), re.M)
        assert len(held) == num_processes * num_devices and len(set(held)) == 1
        # A signal to any of them ends all, without an error.
        processes[-1].send_signal(signal.SIGTERM)
        assert {process.wait(HANG_SECONDS) for process in processes} == {0}, logs()
        assert "Traceback" not in "".join(logs())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("dead", [1, 0])
def test_a_killed_process_ends_the_others(tmp_path, dead):
    options = options_of(free_port(), 2, "--tensor-parallel", "2")
    with started(tmp_path, options, [environment(1)] * 2) as (processes, logs):
        wait_for(r"running on (http://\S+)", lambda: logs()[0], processes)
        processes[dead].kill()
        assert processes[1 - dead].wait(HANG_SECONDS) == 1, logs()
        named = (
            rf"process 1 \(.*, pid {processes[1].pid}\) is dead" if dead else "process 0 is gone"
        )
        assert re.search(rf"^jax_attn.serve: .*{named}", logs()[1 - dead], re.M), logs()


class Store:
    """The key-value store of two processes; the other process has only set `keys`."""

    def __init__(self, keys):
        self.keys = {f"{module._ROOT}/{key}": value for key, value in keys.items()}
        self.dir_error = None
        self.is_closed = False

    def key_value_set(self, key, value, allow_overwrite):
        self.keys[key] = value

    def blocking_key_value_get(self, key, milliseconds):
        deadline = time.monotonic() + milliseconds / 1000
        while key not in self.keys:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return self.keys[key]

    def key_value_dir_get(self, folder):
        if self.is_closed:
            threading.Event().wait()
        if self.dir_error is not None:
            raise self.dir_error
        return [(key, value) for key, value in self.keys.items() if key.startswith(folder)]

    def key_value_delete(self, folder):
        pass


@pytest.fixture
def store(monkeypatch):
    """The store of process 0 after process 1 has set its name."""
    store = Store({"name/1": "elsewhere, pid 5", "beat/1": "[1, 0, false]"})
    monkeypatch.setattr(module.jax.distributed, "initialize", lambda *args, **options: None)
    monkeypatch.setattr(module.jax, "process_index", lambda: 0)
    monkeypatch.setattr(module.jax, "process_count", lambda: 2)
    monkeypatch.setattr(module.distributed.global_state, "client", store)
    monkeypatch.setattr(module.Processes, "_catch_aborts", lambda self: None)
    monkeypatch.setattr(module, "_BEAT_SECONDS", 0.01)
    yield store
    store.is_closed = True


def test_who_has_a_name_has_beaten(store):
    Processes(None, None, None, 5)
    names = [key.removeprefix(f"{module._ROOT}/") for key in store.keys]
    assert names.index("beat/0") < names.index("name/0")


@pytest.fixture
def ended(monkeypatch):
    """A queue of the exits that this process would have made: status and sentence."""
    ended = queue.SimpleQueue()

    def end(status, sentence):
        ended.put((status, sentence))
        threading.Event().wait()

    monkeypatch.setattr(module, "_exit", end)
    return ended


def test_a_watch_that_fails_ends_the_process(store, ended):
    """Without the watch, no process would notice that another one is dead."""
    Processes(None, None, None, 5)
    store.dir_error = RuntimeError("the store is gone\nin C++")
    status, sentence = ended.get(timeout=HANG_SECONDS)
    assert status == 1 and re.fullmatch(
        r"process 0 \(.*\): jax_attn watch: the store is gone", sentence
    )


def test_a_leader_that_is_silent_is_dead(store, ended, monkeypatch):
    """Stopped, or on a machine that is gone: its connections may stay open."""
    monkeypatch.setattr(module.jax, "process_index", lambda: 1)
    monkeypatch.setattr(module, "_SILENCE_SECONDS", 0.1)
    for key, text in (("name/0", "elsewhere, pid 4"), ("beat/0", "[1, 0, false]")):
        store.key_value_set(f"{module._ROOT}/{key}", text, True)
    Processes(None, None, None, 5)
    status, sentence = ended.get(timeout=HANG_SECONDS)
    assert status == 1 and re.fullmatch(
        r"process 0 \(elsewhere, pid 4\) is dead: silent for 0.1 s\.", sentence
    )


def test_who_goes_when_told_has_not_failed(store, ended, monkeypatch):
    """The watch of process 0 sees the end of process 1 before the thread that waits for it."""
    processes = Processes(None, None, None, 5)

    def go(self):
        store.key_value_set(f"{module._ROOT}/gone/1", json.dumps([0, ""]), True)
        time.sleep(0.5)  # fifty heartbeats

    monkeypatch.setattr(Processes, "_await_others", go)
    threading.Thread(target=processes.end, args=(0,), daemon=True).start()
    assert ended.get(timeout=HANG_SECONDS) == (0, "")
    assert json.loads(store.keys[f"{module._ROOT}/end/0"]) == [0, ""]


def launched(launcher: str, index: int, port: int) -> dict[str, str]:
    """The environment variables that the launcher sets."""
    if launcher == "slurm":
        return {
            "SLURM_JOB_ID": str(port), "SLURM_STEP_NODELIST": "localhost",
            "SLURM_NTASKS": "2", "SLURM_PROCID": str(index), "SLURM_LOCALID": str(index),
        }  # fmt: skip
    return {
        "OMPI_MCA_orte_hnp_uri": f"{4096 * port}.0;tcp://127.0.0.1:1",
        "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": str(index),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(index),
    }  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.parametrize("launcher", ["flags", "slurm", "open mpi"])
def test_unequal_options(tmp_path, launcher):
    port, split = free_port(), ["--tensor-parallel", "2"]
    if launcher == "flags":
        options, environments = options_of(port, 2, *split), [environment(1)] * 2
    else:
        options = [["--distributed", *split], ["--distributed", *split]]
        environments = [environment(1) | launched(launcher, i, port) for i in range(2)]
    options[1] += ["--page-size", "8"]
    with started(tmp_path, options, environments) as (processes, logs):
        assert [process.wait(HANG_SECONDS) for process in processes] == [1, 1], logs()
        sentence = "jax_attn.serve: process 1: --page-size: expected 16, as process 0 has, got 8\n"
        assert all(sentence in log for log in logs()), logs()
        assert "Traceback" not in "".join(logs())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("launcher", ["flags", pytest.param("slurm", marks=pytest.mark.slow)])
def test_the_training_example(launcher):
    """Its own assertions compare it with one device."""
    example, port = EXAMPLES / "train_on_mesh.py", free_port()
    options, environments = options_of(port, 2), [environment(2)] * 2
    if launcher == "slurm":
        options = [["--distributed"]] * 2
        environments = [environment(2) | launched(launcher, i, port) for i in range(2)]
    running = [
        subprocess.Popen(
            [sys.executable, *SAFE_PATH, str(example), *of_one],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for of_one, env in zip(options, environments, strict=True)
    ]
    try:
        for process in running:
            output = process.communicate(timeout=HANG_SECONDS)[0]
            assert process.returncode == 0 and "loss by step: " in output, output
    finally:
        for process in running:
            process.kill()


@pytest.mark.parametrize(
    ("split", "sentence"),
    [
        ("--tensor-parallel", "TensorParallel: mesh: expected KV heads in a number that the 3 dev"),
        ("--context-parallel", "EngineConfig: page_size: expected a multiple of context_parallel"),
    ],
)
def test_a_mesh_that_does_not_divide(tmp_path, split, sentence):
    options = [[split, "3", "--page-size", "16"]]
    with started(tmp_path, options, [environment(3)]) as (processes, logs):
        assert processes[0].wait(HANG_SECONDS) == 1, logs()
        assert f"jax_attn.serve: {sentence}" in logs()[0] and "Traceback" not in logs()[0]


@pytest.mark.parametrize("present", [0, 1])
def test_a_process_that_does_not_come(tmp_path, present):
    options = [options_of(free_port(), 2, "--start-seconds", "4")[present]]
    with started(tmp_path, options, [environment(1)]) as (processes, logs):
        assert processes[0].wait(HANG_SECONDS) == 1, logs()
        assert "the processes did not find each other within 4 seconds; start one" in logs()[0]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--coordinator", "h:1", "--process-id", "0"], "expected --coordinator, --num-processes"),
        (["--distributed", *options_of(1, 2)[0]], "expected --coordinator, --num-processes"),
        ([*options_of(1, 2)[0], "--process-id", "2"], "--process-id: expected less than 2, got 2"),
    ],
)
def test_options_that_do_not_go_together(options, sentence, capsys):
    from jax_attn.serve import __main__ as main

    with pytest.raises(SystemExit):
        main.main(options)
    assert sentence in capsys.readouterr().err


def test_records_survive_the_way():
    rng = np.random.default_rng(0)
    words = rng.integers(-9, 9, 5000).astype(np.int32)
    records = [
        Record("forward", (3,), (words,)),
        Record("set_state", (1, 2, ((5, 0.1),)), (words[:0], np.float32([[0.5], [np.nan]]))),
        Record("sample", ("greedy",), ()),
    ]
    for some in (records, records[1:]):  # compressed, and not
        got = unpack(pack(some))
        assert [r.call for r in got] == [r.call for r in some]
        for a, b in zip(got, some, strict=True):
            assert json.dumps(a.plain) == json.dumps(b.plain)
            for x, y in zip(a.arrays, b.arrays, strict=True):
                assert x.dtype == y.dtype
                np.testing.assert_array_equal(x, y)
