"""csrc/select: which kernel a target gets, and the reasons it gives."""

import itertools
import logging
import os
import types

import jax
import pytest

import jax_attn as ja
from jax_attn import _core, _environment
from jax_attn._spec import spec as spec_module
from jax_attn._spec import target

# Fields of the kernel configuration for which JAX_ATTN_PRINT_CONFIG=1 must give a reason.
_CHOSEN = {"tile_q", "tile_kv", "num_ctas", "item_cost", "split_cost", "kv_cost"}
_CHOSEN_FOR_CUDA = {"main_loop", "cached_tokens"}


def _spec(target: str, **options: object) -> ja.AttentionSpec:
    fields = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim_qk": 128, "max_kv_pages": 64}
    return ja.AttentionSpec(**(fields | options), target=target)  # type: ignore[arg-type]


_MLA = {
    "mla": True,
    "num_qo_heads": 128,
    "num_kv_heads": 1,
    "head_dim_qk": 576,
    "head_dim_vo": 512,
    "sm_scale": 192**-0.5,
}


@pytest.mark.parametrize("target", ["cpu", "sm_80", "sm_89", "sm_90", "sm_100", "sm_121", "sm_150"])
@pytest.mark.parametrize("options", [{}, {"dtype": "float32"}, _MLA])
def test_every_choice_says_why(target, options, monkeypatch, capsys):
    monkeypatch.setattr(_environment, "print_config", True)
    chosen = _spec(target, **options).kernel_config
    lines = capsys.readouterr().out.splitlines()
    told = {line.split()[0]: line for line in lines[1:]}
    expected = _CHOSEN | {"device"} | (_CHOSEN_FOR_CUDA if target != "cpu" else {"isa"})
    assert expected <= told.keys()
    tiles = range(chosen["num_tiles"])
    assert " ".join(str(chosen[f"tile_q_{i}"]) for i in tiles) in told["tile_q"]
    assert str(chosen["item_cost"]) in told["item_cost"]
    last = lines[-1]  # fields without a reason; no field appears twice
    assert all(f" {field}=" in last for field in ("num_warps", "max_items"))
    assert not any(f" {field}=" in last for field in told)


def test_short_requests():
    """Short ragged requests have Hopper's kernel with one consumer and several CTAs."""
    fields = {"page_size": None, "max_kv_tokens": 4096, "max_kv_pages": None}
    usual = _spec("sm_90", **fields).kernel_config
    for head_dim, ctas in ((64, 3), (128, 2)):
        short = _spec("sm_90", **fields, head_dim_qk=head_dim, typical_kv_len=256).kernel_config
        assert (short["main_loop"], short["num_warps"], short["tile_q_0"]) == (1, 8, 64)
        assert (short["num_tiles"], short["tile_kv"]) == (1, 64)
        assert short["num_ctas"] == ctas * usual["num_ctas"]
        assert short["item_cost"] < usual["item_cost"]
    assert _spec("sm_90", **fields, typical_kv_len=257).kernel_config == usual
    others = [
        {"kv_dtype": "float8_e4m3fn"},
        {"head_dim_qk": 256},
        {"schedule": "fixed_split", "kv_split": 128},
        {"num_qo_heads": 1024},
        {"page_size": 16, "max_kv_tokens": None, "max_kv_pages": 64},
        {"max_steps": 64},
        {"dtype": "float32"},
        {"max_qo_tokens": 8},  # decodes
    ]
    for other in others:
        options = fields | other
        expected = _spec("sm_90", **options).kernel_config
        assert _spec("sm_90", **options, typical_kv_len=64).kernel_config == expected, other
    with pytest.raises(ValueError, match="typical_kv_len"):
        _spec("sm_90", **fields, typical_kv_len=0)


def test_chunks_of_tall_tiles():
    """Only plans with several tiles have a larger min_chunk for those after the first."""
    for options, expected in (({}, 256), ({"max_qo_tokens": 8}, 0), ({"num_qo_heads": 1024}, 0)):
        assert _spec("sm_90", **options).kernel_config["min_tall_chunk"] == expected, options


def test_loops_of_devices():
    """Hopper's main loop runs only on Hopper; shared memory limits the portable loop's tiles."""
    chosen = {t: _spec(t).kernel_config for t in ("sm_80", "sm_86", "sm_90", "sm_100", "sm_120")}
    assert {t: c["main_loop"] for t, c in chosen.items() if c["main_loop"]} == {"sm_90": 1}
    assert _spec("sm_90", dtype="float32").kernel_config["main_loop"] == 0
    e4m3 = {"kv_dtype": "float8_e4m3fn"}
    assert _spec("sm_90", **e4m3).kernel_config["main_loop"] == 1
    portable = [_spec("sm_100", **e4m3), _spec("sm_90", **e4m3, q_dtype="float8_e4m3fn")]
    for spec in portable:
        assert spec.kernel_config["main_loop"] == 0
        assert spec.kernel_config["num_stages"] > chosen["sm_100"]["num_stages"]
    for heads, kv_dtype in itertools.product((16, 128), (None, "float8_e4m3fn", "float8_e5m2")):
        latent = _MLA | {"num_qo_heads": heads, "kv_dtype": kv_dtype}
        hopper = _spec("sm_90", **latent).kernel_config
        assert hopper["main_loop"] == 1
        assert hopper["tile_q_0"] == (16 if heads == 16 else 64 if kv_dtype is None else 32)
        assert _spec("sm_100", **latent).kernel_config["main_loop"] == 0
    assert chosen["sm_80"]["tile_q_1"] == 128 and chosen["sm_86"]["tile_q_1"] == 64
    assert chosen["sm_100"]["num_stages"] > chosen["sm_80"]["num_stages"]
    # The architecture's usual GPU, unless the target names the number of SMs.
    assert chosen["sm_90"]["num_ctas"] == 132 and chosen["sm_80"]["num_ctas"] == 2 * 108
    assert _spec("sm_90:114").kernel_config["num_ctas"] == 114


def test_batches_of_decodes_alone():
    """Hopper's decode kernel: for capacities whose rows of a kv head always fit its tile."""

    def tiles(**options: object) -> list[int]:
        config = _spec("sm_90", **options).kernel_config
        return [config[f"tile_q_{i}"] for i in range(config["num_tiles"])]

    assert tiles(max_qo_tokens=8) == tiles(max_qo_tokens=8, share_prefixes=True) == [32]
    assert tiles(max_qo_tokens=9) == [32, 128] and tiles(max_qo_tokens=9, head_dim_qk=64) == [
        32,
        192,
    ]
    assert tiles(max_qo_tokens=2, num_kv_heads=2) == [32]
    assert tiles(max_qo_tokens=3, num_kv_heads=2) == [32, 128]
    # Steps and queues are those of larger batches, so a row's bits are the same.
    few, many = (_spec("sm_90", max_qo_tokens=n).kernel_config for n in (8, 9))
    assert all(few[f] == many[f] for f in ("tile_kv", "num_ctas", "min_chunk", "kv_cost_0"))
    # One tile M, whatever the capacities.
    assert tiles(max_qo_tokens=1, schedule="fixed_split", kv_split=256) == [64]


def test_items_of_prompts_cost_more():
    """Ragged keys are prompts' on Hopper: their items begin and end slowly."""

    def item_cost(target: str = "sm_90", head_dim: int = 128, **options: object) -> int:
        ragged = {"page_size": None, "max_kv_pages": None, "max_kv_tokens": 4096}
        given = ragged | {"head_dim_qk": head_dim} | options
        return _spec(target, **given).kernel_config["item_cost"]

    paged = _spec("sm_90").kernel_config["item_cost"]
    assert item_cost() == item_cost(head_dim=64) == item_cost(max_qo_tokens=4) > paged
    assert item_cost(head_dim=192) == paged
    assert item_cost("sm_80") == _spec("sm_80").kernel_config["item_cost"]


def test_portable_loop_says_once_that_it_serves(caplog):
    spec_module._tell_fallback.cache_clear()
    with caplog.at_level(logging.WARNING, "jax_attn"):
        for target in ("sm_100", "sm_100", "sm_97", "sm_90", "sm_80", "cpu"):
            assert _spec(target).problem
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2, told
    assert "sm_100 (B200): the portable main loop (mma.sync) serves" in told[0]
    assert "tcgen05" in told[0]
    with caplog.at_level(logging.WARNING, "jax_attn"):
        assert _spec("sm_90", kv_dtype="float8_e4m3fn").problem
        assert len(caplog.records) == 2
        assert _spec("sm_90", kv_dtype="float8_e4m3fn", q_dtype="float8_e4m3fn").problem
    e4m3 = caplog.records[-1].getMessage()
    assert len(caplog.records) == 3 and "sm_90 (H100, H200)" in e4m3 and "float8_e4m3fn" in e4m3
    assert "sm_97 (unknown)" in told[1] and "csrc/select/devices.cc" in told[1]


def test_a_target_without_a_number_has_that_of_this_gpu(monkeypatch):
    gpu = types.SimpleNamespace(compute_capability="9.0", core_count=99)
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(5 + pid), raising=False)
    parse = target.parse_target.__wrapped__  # not from its cache, nor into it
    for backend, of_sm_90 in (("gpu", 99), ("cpu", _core.default_processors(90))):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        assert target.default_target() == {"gpu": "sm_90", "cpu": "cpu"}[backend]
        assert parse("sm_90") == (90, of_sm_90) and parse("sm_90:7") == (90, 7)
        assert parse("sm_80") == (80, _core.default_processors(80))
        assert parse("cpu") == (0, 5)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.raises(NotImplementedError, match="backend 'tpu': cpu and CUDA are supported"):
        target.default_target()
