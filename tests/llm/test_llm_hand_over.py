"""LLM.export_request and import_request, in one process and between two."""

import asyncio
import re
import subprocess
import sys
import threading
from concurrent.futures import Future

import pytest

pytest.importorskip("llguidance", reason="needs the extra `serve`")

from helpers.mesh_checks import run_on_cpus
from helpers.paths import ROOT
from helpers.small_llm import SMALL, check_at_rest
from jax_attn import LLM, AsyncLLM, SamplingParams, models
from jax_attn.llm import HandedOver
from jax_attn.llm._hand_over import start_export, start_import
from jax_attn.serve._scheduling.admission import QueueFull
from jax_attn.serve._scheduling.protocols import EngineStopped

PROMPT = "def add(a, b):\n    return a + b\n\n\ndef"
OPTIONS = SMALL | {"max_step_tokens": 8, "batch_invariant": True}
PARAMS = SamplingParams(
    max_tokens=12, temperature=0.9, seed=4, logprobs=True, prompt_logprobs=True, stop="%%%"
)


@pytest.fixture(scope="module")
def llm(model):
    with LLM(model, directory=models.BUNDLED, **OPTIONS) as made:
        yield made


def test_the_output_of_one_llm(llm, model):
    [alone] = llm.generate(PROMPT, PARAMS)

    async def main():
        async with AsyncLLM(model, directory=models.BUNDLED, **OPTIONS) as other:
            for num_tokens in (1, 5):
                handed = llm.export_request(PROMPT, PARAMS, num_tokens=num_tokens)
                assert num_tokens <= len(handed.tokens) - handed.num_prompt < 12
                assert await other.import_request(handed) == alone
                handed = await other.export_request(PROMPT, PARAMS, num_tokens=num_tokens)
                assert llm.import_request(handed.to_bytes()) == alone
            await asyncio.to_thread(check_at_rest, other.llm)

    asyncio.run(main())
    check_at_rest(llm)


def test_between_meshes():
    run_on_cpus(3, "import mesh_llm_checks as m; m.check_hand_over()")


def test_a_text_that_ends_before(llm):
    params = SamplingParams(max_tokens=3, temperature=0)
    [alone] = llm.generate(PROMPT, params)
    handed = llm.export_request(PROMPT, params, num_tokens=3)
    assert not handed.pages and handed.so_far["completion"]["finish_reason"] == "length"
    assert llm.import_request(HandedOver.from_bytes(handed.to_bytes())).tokens == alone.tokens
    check_at_rest(llm)


def test_refused(llm):
    for keywords, sentence in (
        ({"num_tokens": 0}, "export_request: num_tokens: expected at least 1, got 0"),
        ({"params": SamplingParams(n=2)}, "export_request: n: expected 1, got 2"),
    ):
        with pytest.raises(ValueError, match=sentence):
            llm.export_request(PROMPT, **keywords)
    with pytest.raises(ValueError, match="import_request: expected bytes of export_request"):
        llm.import_request(b"x")
    handed = llm.export_request(PROMPT, PARAMS)
    handed.version = "7"
    with pytest.raises(ValueError, match="expected weights of version '0', got '7'"):
        llm.import_request(handed)
    handed.so_far = {}
    with pytest.raises(ValueError, match="expected what export_request has returned"):
        llm.import_request(handed)
    check_at_rest(llm)


def stopped(*args):
    raise EngineStopped("The engine does not run.")


def test_an_engine_that_stops_meanwhile(llm, monkeypatch):
    handed = llm.export_request(PROMPT, PARAMS)
    engine = llm._runtime.engine("")
    for name, start, arguments in (
        ("export_request", start_export, (PROMPT, PARAMS, 1)),
        ("import_request", start_import, (handed,)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(engine, name, stopped)
            done, *_ = start(llm._runtime, *arguments)
            with pytest.raises(EngineStopped, match="does not run"):
                done.result(timeout=30)


def test_an_import_that_waits_for_room(llm, monkeypatch):
    handed = llm.export_request(PROMPT, PARAMS)
    engine, timers, tries = llm._runtime.engine(""), [], []

    class Timer:
        def __init__(self, seconds, function):
            timers.append(function)

        def start(self):
            pass

    def full(*args):
        tries.append(args)
        refused = Future()
        refused.set_exception(QueueFull("full"))
        return refused

    monkeypatch.setattr(threading, "Timer", Timer)
    monkeypatch.setattr(engine, "import_request", full)
    done, _, cancel = start_import(llm._runtime, handed)
    timers.pop()()
    assert len(tries) == 2
    cancel()
    timers.pop()()
    assert len(tries) == 2 and not timers and done.done()
    done, *_ = start_import(llm._runtime, handed)
    monkeypatch.setattr(engine, "import_request", stopped)
    timers.pop()()
    with pytest.raises(EngineStopped, match="does not run"):
        done.result(timeout=0)


def test_the_two_processes_of_the_page(tmp_path):
    text = (ROOT / "docs/replicas.md").read_text(encoding="utf-8")
    (program,) = re.findall(
        r"^```python\n(import multiprocessing.*?)^```$", text, re.DOTALL | re.MULTILINE
    )
    (tmp_path / "two.py").write_text(program, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, tmp_path / "two.py"], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0 and "the same text" in done.stdout, done.stderr[-3000:]
