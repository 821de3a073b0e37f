"""Pages that leave the device for the host's memory and come back."""

import dataclasses
import random
import types

import jax
import numpy as np
import pytest

pytest.importorskip("llguidance", reason="needs the extra `serve`")
pytest.importorskip("prometheus_client", reason="needs the extra `serve`")

from helpers.serve.engine_runs import run
from helpers.serve.small_engine import on_device
from jax_attn.serve import _options, _sizing
from jax_attn.serve._engine.engine import Engine
from jax_attn.serve._engine.engine_config import EngineConfig
from jax_attn.serve._openai.metrics import Metrics
from jax_attn.serve._scheduling.host_tier import HostTier, Move, Moves, PageCopy
from jax_attn.serve._scheduling.request import FinishReason, SamplingParams, Sequence

# The pool holds one prompt and a half. One shape for all steps: it compiles once, and bits are
# comparable.
CONFIG = EngineConfig(
    num_pages=12, page_size=8, max_running=2, max_step_tokens=8, batch_invariant=True
)
PROMPTS = [[(7 * i * i + 31 * j) % 900 for i in range(60)] for j in range(4)]


@pytest.fixture(scope="module")
def warm(model):
    engine = Engine(model, dataclasses.replace(CONFIG, num_host_pages=32))
    engine.warm_up()
    return engine


@pytest.fixture
def engine(warm):
    host = warm.scheduler.memory.host
    host.call_tokens = host.page_tokens = 0.0  # whatever was measured on this machine
    host.is_open = True
    warm.scheduler.cache.clear()
    return warm


@pytest.fixture(scope="module")
def plain(model, warm):
    """Without a host tier, on a device of the same executables."""
    return on_device(model, warm.device, CONFIG)


def test_pages_come_back_with_their_bits(engine, plain):
    expected = [run(plain, prompt)[0][:2] for prompt in PROMPTS]
    num_compiles = engine.device.num_compiles_after_warm_up
    first = [run(engine, prompt)[0] for prompt in PROMPTS]
    again = [run(engine, prompt)[0] for prompt in PROMPTS]
    for one, other, wanted in zip(first, again, expected, strict=True):
        assert one[:2] == wanted and other[:2] == wanted
        assert one[2] == 0 and other[2] == 56  # seven of the eight pages, as the last is not full
    stats = engine.stats()["host"]
    assert stats["stored"] >= stats["returned"] >= 4 * 4
    assert engine.device.num_compiles_after_warm_up == num_compiles
    # Two at once, of which each needs pages of the other's.
    both = run(engine, PROMPTS[0][:40], PROMPTS[1][:40])
    assert [each[2] for each in both] == [32, 32]


def test_moves_of_pages_run_in_their_order(engine):
    """On the device, to the host and back, each of which may need what the one before it wrote."""
    run(engine, PROMPTS[0])
    rng, device = random.Random(0), engine.device
    pages, host_pages = [*range(8)], [*range(3)]
    before, _ = device.take(pages, [])
    values = dict(zip(pages, jax.device_get(before), strict=True))
    on_host = {}
    moves = [Move(True, page, page) for page in host_pages]
    for _ in range(40):
        page, host_page = rng.choice(pages), rng.choice(host_pages)
        moves.append(
            rng.choice(
                [
                    PageCopy(rng.choice(pages), page),
                    Move(True, page, host_page),
                    Move(False, page, host_page),
                ]
            )
        )
    for move in moves:
        if isinstance(move, PageCopy):
            values[move.page] = values[move.source]
        elif move.to_host:
            on_host[move.host_page] = values[move.page]
        else:
            values[move.page] = on_host[move.host_page]
    device.move(moves)
    after, _ = device.take(pages, [])
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(after), [*values.values()])


def test_namespaces_and_adapters_keep_apart(engine):
    for prompt in PROMPTS:
        run(engine, prompt, namespace="mine")
    assert run(engine, PROMPTS[0], namespace="yours")[0][2] == 0
    assert run(engine, PROMPTS[0], namespace="mine")[0][2] == 56


def test_the_next_turn_of_many_conversations(engine):
    turns = [list(prompt) for prompt in PROMPTS]
    cached = 0
    for _ in range(3):
        for i, turn in enumerate(turns):
            ((tokens, _, num_cached, _),) = run(engine, turn[-80:])
            cached += num_cached
            turns[i] = turn + tokens
    assert cached > 0


def test_metrics_have_both_tiers(engine):
    for prompt in PROMPTS:
        run(engine, prompt)
    served = types.SimpleNamespace(ready=True, stats=engine.stats)
    text, host = Metrics(served).text().decode(), engine.stats()["host"]
    for name, value in (
        ('host_pages{state="cached"}', host["cached"]),
        ('host_pages{state="free"}', 32 - host["cached"]),
        ("host_pages_stored_total", host["stored"]),
        ("host_pages_returned_total", host["returned"]),
    ):
        assert f"\njax_attn_{name} {float(value)}\n" in text


def test_new_weights_forget_all(engine, model):
    for prompt in PROMPTS:
        run(engine, prompt)
    assert engine.stats()["host"]["cached"]
    engine.update_params({"final_norm": model.params["final_norm"]}, None, partial=True)
    assert engine.stats()["host"]["cached"] == engine.stats()["pages_cached"] == 0
    assert run(engine, PROMPTS[0])[0][2] == 0


def test_what_is_dearer_than_computing_stays_away(engine):
    host = engine.scheduler.memory.host
    for prompt in PROMPTS:
        run(engine, prompt)
    host.call_tokens, host.page_tokens = 7 * 8.0, 1.0
    assert run(engine, PROMPTS[0])[0][2] == 0
    host.page_tokens = 8.0  # nothing is worth keeping
    stored = host.num_stored
    run(engine, PROMPTS[1])
    assert host.num_stored == stored


def test_the_rule():
    host = HostTier(4, Moves())
    assert host.keeps(8) and host.is_sooner(1, 8) and not host.is_sooner(0, 0)
    host.call_tokens, host.page_tokens = 20.0, 3.0
    assert not host.is_sooner(4, 32) and host.is_sooner(5, 40)
    host.is_open = False
    assert not host.keeps(8) and not host.is_sooner(100, 800)


def test_a_host_without_memory_costs_one_step(engine, monkeypatch):
    for prompt in PROMPTS[:2]:
        run(engine, prompt)
    params = SamplingParams(2, temperature=0, ignore_eos=True)
    engine.submit([Sequence("x", "x", PROMPTS[2], params)])

    def fail(moves):
        raise MemoryError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(engine.device, "move", fail)
        with pytest.raises(MemoryError):
            for _ in range(20):
                engine.step()
        (event,) = engine.recover("The engine failed.")
        assert (event.finish_reason, event.error) == (FinishReason.ERROR, "The engine failed.")
        assert run(engine, PROMPTS[0])[0][3] is FinishReason.LENGTH  # without the host
        assert run(engine, PROMPTS[1])[0][3] is FinishReason.LENGTH
    engine.scheduler.check_integrity()
    assert engine.stats()["host"]["cached"] == 0


def test_a_failed_step_forgets_all(engine, monkeypatch):
    for prompt in PROMPTS:
        run(engine, prompt)
    engine.submit([Sequence("y", "y", PROMPTS[0], SamplingParams(2, temperature=0))])

    def fail(batch):
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(engine.device, "forward", fail)
        with pytest.raises(RuntimeError):
            engine.step()
        engine.recover("The engine failed.")
    assert engine.stats()["host"]["cached"] == engine.stats()["pages_cached"] == 0
    assert run(engine, PROMPTS[1])[0][2] == 0


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"prefix_cache": False}, "--host-cache-bytes: expected --prefix-cache beside it"),
        ({"host_cache_bytes": 1 << 60}, "--host-cache-bytes: expected at most"),
        ({"host_cache_bytes": 100}, "--host-cache-bytes: expected at least 32768, the bytes"),
    ],
)
def test_refused(model, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        args = _options.from_keywords({"host_cache_bytes": 1 << 20} | options)
        _sizing.make_engine(model, args)


def test_engines_share_the_bytes(model):
    args = _options.parse(["--dtype", "float32", "--page-size", "8", "--data-parallel", "2"])
    args.host_cache_bytes = 10 * (page := _sizing.bytes_of_page(model.config, args))
    assert _sizing._host_capacities(model.config, args) == {"num_host_pages": 5}
    sentence = f"expected at least {2 * page}, the bytes of a page for each of 2 engines, got"
    for args.host_cache_bytes in (2 * page - 1, 1):
        with pytest.raises(ValueError, match=f"{sentence} {args.host_cache_bytes}"):
            _sizing._host_capacities(model.config, args)
