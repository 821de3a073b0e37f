"""The start of an engine: few shapes are compiled first, the others while it serves."""

import asyncio
import dataclasses
import functools
import os
import stat
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.serve.small_engine import CONFIG, sequence
from jax_attn import _environment
from jax_attn.serve import _executable_cache
from jax_attn.serve._engine import compilations
from jax_attn.serve._engine.async_engine import AsyncEngine
from jax_attn.serve._engine.engine import Engine

pytestmark = pytest.mark.skipif(
    "jax.default_backend() != 'cpu'", reason="elsewhere all shapes are compiled first"
)

SIZES = dataclasses.replace(CONFIG, max_running=4, max_step_tokens=16)  # 1, 4 and 16 tokens


@pytest.fixture(scope="module")
def compiled(model):
    """All executables of SIZES, by name: engines of these tests need not compile them again."""
    engine = Engine(model, SIZES)
    engine.warm_up()
    return engine.device._executables


def reuse(device, compiled, monkeypatch, work=lambda name: None):
    """Has a device take `compiled` instead of compiling. work: called with the name before."""
    make = device._tasks

    def task(name):
        def compile():
            work(name)
            return compiled[name]

        return compile

    monkeypatch.setattr(device, "_tasks", lambda some: {name: task(name) for name in make(some)})


def serve(engine, *seqs) -> tuple[list[list[int]], set[str]]:
    """The output of the sequences, and the names of the buckets that ran."""
    engine.submit(seqs)
    names = set()
    while engine.has_work:
        engine.step()
        if engine.step_stats.bucket is not None:
            names.add(engine.step_stats.bucket)
    return [seq.tokens[seq.num_prompt :] for seq in seqs], names - {""}


def requests():
    """Greedy, seeded and filtered, some with prompts of several steps."""
    long = [0, *range(300, 340)]
    return [
        sequence(max_tokens=6),
        sequence(long, max_tokens=6, temperature=1.0, seed=7),
        sequence(max_tokens=6, temperature=0.8, seed=11, top_k=20, top_p=0.9),
    ]


def test_any_step_runs_in_the_first_buckets_with_the_same_tokens(model, compiled, monkeypatch):
    engine = Engine(model, SIZES)
    device = engine.device
    reuse(device, compiled, monkeypatch)
    names = engine.warm_up_first()
    assert [name for name in names if name.startswith(("forward", "sample"))] == [
        "forward, 4 tokens x 4 sequences",
        "forward, 16 tokens x 4 sequences",
        "sample, 4 sequences, greedy",
        "sample, 4 sequences, full",
    ]
    assert engine.stats()["buckets_left"] == 1
    early, ran = serve(engine, *requests())
    alone, ran_alone = serve(engine, sequence(max_tokens=6))
    assert ran | ran_alone == {"4 tokens x 4 sequences", "16 tokens x 4 sequences"}
    made = []
    device.compile_later(lambda: made.append(None))
    # Two that sample for the first buckets; a forward, and four that sample.
    assert len(made) == 7 and device.is_complete and engine.stats()["buckets_left"] == 0
    late, _ = serve(engine, *requests())
    late_alone, ran = serve(engine, sequence(max_tokens=6))
    assert "1 tokens x 1 sequences" in ran
    assert (early, alone) == (late, late_alone)


def test_what_ends_a_compilation_leaves_the_rest(model, monkeypatch):
    device, ended, begun = Engine(model, SIZES).device, threading.Event(), []

    def compile(i):
        begun.append(i)
        if i < 499:  # the last one is first
            ended.wait(30)
            time.sleep(0.01)

    def progress(*_):
        ended.set()
        raise KeyboardInterrupt

    tasks = {f"{i}": functools.partial(compile, i) for i in range(500)}
    monkeypatch.setattr(device, "_tasks", lambda some: dict(tasks))
    with pytest.raises(KeyboardInterrupt):
        device.warm_up(progress)
    assert len(begun) < 500


def test_a_batch_invariant_engine_has_all_from_the_start(model, monkeypatch):
    """Its bits cannot depend on what is compiled."""
    engine = Engine(model, dataclasses.replace(SIZES, num_pages=240, batch_invariant=True))
    monkeypatch.setattr(engine.device, "_warm_up", lambda tasks, progress: [*tasks])
    assert len(engine.device.buckets) == 1
    assert engine.warm_up_first() == [*engine.device._tasks(engine.device.buckets)]


def test_compiling_later_is_not_counted_but_a_shape_that_changes_is(model, compiled):
    engine = Engine(model, SIZES)
    device = engine.device
    device._executables |= {name: x for name, x in compiled.items() if "1 tokens" not in name}
    device.warm_up_first()
    assert device.num_buckets_left == 1
    seen = []
    # The calling thread expects its own compilations, and not those of others.
    other = threading.Thread(target=lambda: jax.jit(lambda x: x + 41.5)(jnp.ones(3)))
    device.compile_later(lambda: seen.append(device.num_compiles_after_warm_up))
    assert seen == [0] and device.num_compiles_after_warm_up == 0
    other.start()
    other.join()
    assert device.num_compiles_after_warm_up > 0


def test_each_compilation_outside_of_expected_counts_once():
    def compile(number):
        before = compilations.num_unexpected()
        jax.jit(lambda x: x * number)(np.float32(1))
        return compilations.num_unexpected() - before

    assert compile(0.25) == 1
    with compilations.expected():
        with compilations.expected():
            assert compile(0.5) == 0
        assert compile(0.75) == 0
    assert compile(1.25) == 1


def test_it_serves_while_it_compiles(model, compiled, monkeypatch):
    """Requests are answered while another bucket is being compiled; a stop does not wait for the
    rest."""
    engine = AsyncEngine(model, SIZES)
    begun, may_go_on, names = threading.Event(), threading.Event(), []

    def work(name):
        names.append(name)
        if engine.ready:
            begun.set()
            assert may_go_on.wait(240)

    reuse(engine._engine.device, compiled, monkeypatch, work)

    async def main():
        engine.start()
        try:
            await asyncio.to_thread(begun.wait, 240)
            events = [event async for event in engine.generate([sequence(max_tokens=3)])]
            assert sum(len(event.tokens) for event in events) == 3
            assert engine.ready and engine.stats()["buckets_left"] == 1
            num_begun = len(names)
            engine.begin_stop(drain=False)
        finally:
            may_go_on.set()
            await engine.stop(drain=False)
        assert len(names) == num_begun and not engine._compiling.is_alive()

    asyncio.run(main())


def test_compiling_waits_for_a_moment_without_requests(model, compiled, monkeypatch):
    """Otherwise a stream goes at half its speed in the first seconds of a server."""
    engine = AsyncEngine(model, SIZES)
    engine.seconds_beside_steps = 3600
    reuse(engine._engine.device, compiled, monkeypatch)
    left = []  # shapes, after each step
    engine.on_stats = lambda stats: left.append(stats["buckets_left"])

    async def main():
        engine.start()
        try:
            [_ async for _ in engine.generate([sequence(max_tokens=20)])]
            assert len(left) >= 20 and set(left[:20]) == {1}
            await asyncio.to_thread(engine._compiling.join, 240)
            assert engine._engine.device.num_buckets_left == 0
        finally:
            await engine.stop(drain=True)

    asyncio.run(main())


def test_the_first_request_comes_before_the_rest_is_compiled(model, compiled, monkeypatch):
    """Clients that wait for the start send it at once."""
    engine = AsyncEngine(model, SIZES)
    engine.seconds_until_steps = engine.seconds_beside_steps = 3600
    ready, num_steps, counts = threading.Event(), [], []
    engine.on_ready = ready.set

    def work(name):
        if engine.ready:
            counts.append(len(num_steps))

    reuse(engine._engine.device, compiled, monkeypatch, work)
    engine.on_stats = lambda stats: num_steps.append(stats["running"])

    async def main():
        engine.start()
        try:
            await asyncio.to_thread(ready.wait, 240)
            await asyncio.sleep(0.1)  # in which the rest could begin
            [_ async for _ in engine.generate([sequence(max_tokens=20)])]
            await asyncio.to_thread(engine._compiling.join, 240)
        finally:
            await engine.stop(drain=True)

    asyncio.run(main())
    assert counts and min(counts) >= 20


def test_compiling_does_not_wait_for_ever(model, compiled, monkeypatch):
    engine = AsyncEngine(model, SIZES)
    engine.seconds_beside_steps = 0.01
    reuse(engine._engine.device, compiled, monkeypatch)
    left = []  # shapes, after each step

    def on_stats(stats):
        if stats["running"]:
            engine._compiling.join(240)  # this thread takes no step meanwhile, and is not at rest
            left.append(engine._engine.device.num_buckets_left)

    engine.on_stats = on_stats

    async def main():
        engine.start()
        try:
            [_ async for _ in engine.generate([sequence(max_tokens=3)])]
        finally:
            await engine.stop(drain=True)

    asyncio.run(main())
    assert left and set(left) == {0}


def test_a_stop_does_not_wait_for_a_turn_to_compile(model, compiled, monkeypatch):
    engine = AsyncEngine(model, SIZES)
    engine.seconds_beside_steps = 3600
    reuse(engine._engine.device, compiled, monkeypatch)

    async def main():
        engine.start()
        events = engine.generate([sequence(max_tokens=40)])
        await anext(events)
        await engine.stop(drain=False)
        await events.aclose()

    asyncio.run(main())
    assert not engine._compiling.is_alive()


def test_all_shapes_may_come_first(model, compiled, monkeypatch):
    """As `jax_attn.LLM` has it."""
    engine = AsyncEngine(model, SIZES)
    engine.serves_early = False
    left = []
    engine.on_ready = lambda: left.append(engine._engine.device.num_buckets_left)
    reuse(engine._engine.device, compiled, monkeypatch)

    async def main():
        engine.start()
        await engine.stop(drain=True)

    asyncio.run(main())
    assert left == [0]


def test_a_bucket_that_does_not_compile_is_done_without(model, compiled, monkeypatch, caplog):
    engine = AsyncEngine(model, SIZES)

    def work(name):
        if name.startswith("forward, 1 "):
            raise RuntimeError("no memory")

    reuse(engine._engine.device, compiled, monkeypatch, work)

    async def main():
        engine.start()
        try:
            [_ async for _ in engine.generate([sequence(max_tokens=2)])]
            await asyncio.to_thread(engine._compiling.join, 240)
            [_ async for _ in engine.generate([sequence(max_tokens=2)])]
            assert engine.ready and engine.stats()["buckets_left"] == 1
        finally:
            await engine.stop(drain=True)

    asyncio.run(main())
    assert "1 shapes of a step are not compiled" in caplog.text and engine.failure is None


# ---- executables on disk -----------------------------------------------------------------------


@pytest.fixture
def jax_cache(monkeypatch):
    """JAX's options, which are put back."""
    names = (
        "jax_compilation_cache_dir",
        "jax_compilation_cache_max_size",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
        "jax_logging_level",
    )
    before = {name: getattr(jax.config, name) for name in names}
    monkeypatch.setattr(_executable_cache, "_hide_preferences", lambda: None)
    jax.config.update("jax_compilation_cache_dir", None)
    yield jax.config
    for name, value in before.items():
        jax.config.update(name, value)


def test_executables_are_kept_in_a_folder_of_ones_own(jax_cache, tmp_path, monkeypatch):
    monkeypatch.setattr(_environment, "cache_dir", str(tmp_path / "c"))
    _executable_cache.use_cache()
    (folder,) = (tmp_path / "c").iterdir()
    assert jax_cache.jax_compilation_cache_dir == str(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    # A choice of the user's stays.
    jax.config.update("jax_compilation_cache_dir", "/elsewhere")
    _executable_cache.use_cache()
    assert jax_cache.jax_compilation_cache_dir == "/elsewhere"


@pytest.mark.parametrize("where", ["", "c", "c/xla"])
def test_a_folder_that_others_can_write_is_not_used(
    where, jax_cache, tmp_path, monkeypatch, caplog
):
    cache = tmp_path / "c"
    monkeypatch.setattr(_environment, "cache_dir", str(cache))
    monkeypatch.setattr(_executable_cache, "_machine", lambda: "here")
    (cache / "xla-here").mkdir(parents=True)
    os.chmod(tmp_path / where.replace("xla", "xla-here"), 0o777)
    _executable_cache.use_cache()
    assert jax_cache.jax_compilation_cache_dir is None
    assert "can be written by other users; see JAX_ATTN_CACHE_DIR" in caplog.text


def test_no_folder_no_cache(jax_cache, monkeypatch):
    monkeypatch.setattr(_environment, "cache_dir", "")
    _executable_cache.use_cache()
    assert jax_cache.jax_compilation_cache_dir is None
