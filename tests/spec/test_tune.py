"""python -m jax_attn.tune, and the file that JAX_ATTN_TUNING names."""

import dataclasses
import json
import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import jax_attn as ja
from jax_attn import _core, _environment, tune
from jax_attn._spec import tuning

NONE = tuning.Device(-1, "nothing")
H100 = tuning.Device(90, "NVIDIA H100 80GB HBM3")


@pytest.fixture(autouse=True)
def nothing_tuned():
    yield
    tuning.Tuning(NONE).use()


def _spec(target: str, **options: object) -> ja.AttentionSpec:
    fields = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim_qk": 128, "max_kv_pages": 64}
    return ja.AttentionSpec(**(fields | options), target=target)  # type: ignore[arg-type]


def test_numbers_are_those_of_one_kernel_of_one_processor(monkeypatch, capsys):
    specs = {"sm_90": {}, "sm_80": {}, "cpu": {}, "sm_90:132": {"kv_dtype": "float8_e4m3fn"}}
    before = {target: _spec(target, **options).kernel_config for target, options in specs.items()}
    tuning.Tuning(H100, {"hopper.item_cost": 77, "hopper.kv_cost_1": 19}).use()
    after = {target: _spec(target, **options).kernel_config for target, options in specs.items()}
    assert after["sm_90"]["item_cost"] == 77 and after["sm_90"]["kv_cost_1"] == 19
    assert after["sm_90"]["split_cost"] == before["sm_90"]["split_cost"]
    for target in ("sm_80", "cpu", "sm_90:132"):
        assert after[target] == before[target]
    monkeypatch.setattr(_environment, "print_config", True)
    assert _spec("sm_90").kernel_config
    told = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()[1:]}
    assert f"tuned on {H100.name}" in told["item_cost"] and "tuned" in told["kv_cost"]
    assert "tuned" not in told["split_cost"]
    # No GPU kernel has a third tile.
    with pytest.raises(ValueError, match=r"got hopper\.kv_cost_2; tune again"):
        tuning.Tuning(H100, {"hopper.kv_cost_2": 19}).use()


def test_numbers_of_a_cpu_are_those_of_a_dtype():
    before = _spec("cpu").kernel_config
    numbers = {
        "bfloat16.min_chunk": 64,
        "bfloat16.decode_queues": 2,
        "bfloat16.flops_per_us": 600_000,
    }
    tuning.Tuning(dataclasses.replace(NONE, arch=0), numbers).use()
    after = _spec("cpu").kernel_config
    assert after["min_chunk"] == 64 and after["kv_cost_2"] < before["kv_cost_2"]
    decodes = _spec("cpu", max_qo_tokens=4, max_batch=4).kernel_config["num_ctas"]
    assert decodes == 2 * len(os.sched_getaffinity(0))
    assert _spec("cpu", dtype="float32").kernel_config["min_chunk"] == before["min_chunk"]


def test_instruction_sets():
    """Decodes have the bits of the chosen instruction set, other items those of the best one."""
    best = _core.supported_cpu_isas()[-1]
    rng = np.random.default_rng(0)
    shapes = (40, 4, 64), (400, 2, 64), (400, 2, 64)
    q, k, v = (rng.standard_normal(shape).astype(jnp.bfloat16) for shape in shapes)

    def run() -> tuple[bytes, bytes]:
        spec = ja.AttentionSpec(
            4, 2, 64, page_size=None, max_batch=2, max_qo_tokens=40, max_kv_tokens=400, target="cpu"
        )
        plan = ja.plan(spec, np.array([0, 1, 40]), np.array([200, 100]))  # too short for splits
        o = np.asarray(ja.attention(q, k, v, plan))
        return o[:1].tobytes(), o[1:].tobytes()

    alone = {}
    for isa in _core.supported_cpu_isas():
        _core.set_cpu_isa(isa)
        alone[isa] = run()
    _core.set_cpu_isa("")
    for other in _core.supported_cpu_isas()[:-1]:
        rule = tuning.IsaRule(best, "bfloat16", "plain", 3, other)
        tuning.Tuning(dataclasses.replace(NONE, arch=0), isas=(rule,)).use()
        told = dict(_spec("cpu").problem.reasons)["isa"]
        assert told.startswith(f"{best}; {other} for items of up to 3 rows")
        assert run() == (alone[other][0], alone[best][1])
        fixed = _spec("cpu", schedule="fixed_split").problem.reasons
        assert dict(fixed)["isa"].startswith(f"{best}: ")


@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        ({"hopper.item_cost": 5000}, "hopper.item_cost: expected 0 to 4096, got 5000"),
        ({"hopper.min_chunk": 0}, "hopper.min_chunk: expected 1 to"),
        ({"hopper.rows": 1}, "expected kernels and fields of this version, got hopper.rows"),
        ({"blackwell.item_cost": 1}, "got blackwell.item_cost"),
        ({"item_cost": 1}, "got item_cost"),
        ({"float32.item_cost": 1}, "got float32.item_cost"),  # a CPU's number in a GPU's file
    ],
)
def test_numbers_that_no_kernel_has(number, sentence):
    before = _spec("sm_90").kernel_config
    with pytest.raises(ValueError, match=sentence):
        tuning.Tuning(H100, number).use()
    assert _spec("sm_90").kernel_config == before


def _file(**changes: object) -> str:
    device = {"arch": 0, "name": tuning.this_cpu().name}
    good = {"format": 1, "device": device, "numbers": {}, "isas": [], "measured": []}
    return json.dumps(good | changes)


_RULE = {"best": "amx", "dtype": "bfloat16", "kv_format": "plain", "up_to_rows": 1, "isa": "avx2"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "\xff",
        "[" * 100_000,
        " " * (1 << 20) + "{}",
        _file(format=2),
        _file(more=1),
        _file(device={"arch": 0}),
        _file(device={"arch": "0", "name": "x"}),
        _file(device={"arch": True, "name": "x"}),
        _file(numbers=[]),
        _file(numbers={"float32.item_cost": 1.5}),
        _file(numbers={"float32.item_cost": True}),
        _file(numbers={"float32.item_cost": 1 << 70}),
        _file(isas=[{}]),
        _file(isas=[_RULE | {"dtype": "int3"}]),
        _file(isas=[_RULE | {"up_to_rows": 0}]),
        _file(isas=[_RULE | {"up_to_rows": 1025}]),
        _file(isas=[_RULE | {"up_to_rows": 1.5}]),
        _file(isas=[_RULE | {"isa": 3}]),
    ],
)
def test_damaged_files_are_refused(tmp_path, text):
    path = tmp_path / "tuning.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"JAX_ATTN_TUNING: expected a file of .*; tune again"):
        tuning.read(str(path))


@pytest.mark.parametrize("rows", [1, 1024])
def test_a_file_is_read_as_it_was_written(tmp_path, rows):
    rule = tuning.IsaRule(**_RULE | {"up_to_rows": rows})
    written = tuning.Tuning(tuning.Device(0, "x"), {"float32.item_cost": 5}, (rule,))
    written.write(tmp_path / "tuning.json")
    assert tuning.read(str(tmp_path / "tuning.json")) == written


def _import(path: object, code: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"import jax_attn as ja\n{code}"],
        env=os.environ | {"JAX_ATTN_TUNING": str(path), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=240,
    )


_PRINT = """
spec = ja.AttentionSpec(8, 8, 64, max_kv_pages=4, target="cpu")
print(spec.kernel_config["item_cost"])
"""


def test_the_file_in_another_process(tmp_path):
    path = tmp_path / "tuning.json"
    path.write_text(_file(numbers={"bfloat16.item_cost": 21}))
    done = _import(path, _PRINT)
    assert done.stdout.split() == ["21"], done.stderr
    path.write_text(_file(device={"arch": 0, "name": "a Zen 9"}))
    done = _import(path)
    assert "expected numbers of" in done.stderr and "those of 'a Zen 9'" in done.stderr
    path.write_text(_file(numbers={"bfloat16.rows": 21}))
    assert "got bfloat16.rows; tune again" in _import(path).stderr
    path.write_text(_file(isas=[_RULE | {"isa": "sve9"}]))
    assert "isas: expected some of" in _import(path).stderr
    assert "No such file" in _import(tmp_path / "none.json").stderr
    # The file is for a GPU, whose name is compared once there is one: specs of CPUs keep the
    # built-in numbers.
    path.write_text(_file(device=dataclasses.asdict(H100), numbers={"hopper.item_cost": 21}))
    name = "from jax_attn._spec import tuning\nprint(tuning._CURRENT.device.name)"
    assert _import(path, _PRINT + name).stdout.splitlines() == ["8", H100.name]


def test_a_gpu_of_another_name(monkeypatch):
    monkeypatch.setattr(tuning, "_CURRENT", tuning.Tuning(H100))
    monkeypatch.setattr(tuning.jax, "default_backend", lambda: "gpu")
    for name, arch, refused in (
        (H100.name, 90, False),
        ("NVIDIA GH200", 90, True),
        ("NVIDIA B200", 100, False),  # the spec is for another machine
    ):
        tuning.refuse_foreign_gpu.cache_clear()
        device = tuning.Device(arch, name)
        monkeypatch.setattr(tuning, "this_gpu", lambda device=device: device)
        if refused:
            with pytest.raises(ValueError, match=f"expected numbers of '{name}'"):
                tuning.refuse_foreign_gpu(90)
        else:
            tuning.refuse_foreign_gpu(90)
    tuning.refuse_foreign_gpu.cache_clear()


def _tiny() -> tune.Effort:
    return tune.Effort(
        16,
        (
            tune.Batch("decodes", (1, 1), (40, 300), 4, 2),
            tune.Batch("a chunk", (1, 20), (100, 50), 4, 2),
        ),
        tune.Batch("wide", (1,), (64,), 16, 1),
        tune.Batch("a prompt", (32,), (32,), 2, 2, causal=False),
        64,
        1e-3,
    )


def test_the_program_takes_what_gains_twice(monkeypatch, tmp_path, capsys):
    """The program takes a change only if it gains in both measurements.

    With made-up times, half of split_cost gains only the first time, and two and four times
    item_cost gain both times. Calls whose times are made up are not compiled, but for the first.
    """
    device = tuning.this_cpu()
    looks: list[tuple[str, int]] = []

    def made_up(self, calls):
        batch, call = next(iter(calls.items()))
        new, old = call.spec.kernel_config, self._calls[batch].spec.kernel_config
        if new["split_cost"] < old["split_cost"]:
            looks.append((self.name, new["split_cost"]))
            return 0.5 if len(looks) % 2 else 1.0
        return 0.9 if old["item_cost"] < new["item_cost"] <= 32 else 1.1

    compiled = set()
    compile_call = tune.Call._compile

    def compile_first(call):
        kind = call.batch, call.spec.dtype, call.spec.kv_dtype
        if kind in compiled:
            call._run = lambda *arguments: arguments[0]
            return
        compiled.add(kind)
        compile_call(call)

    monkeypatch.setattr(tune.Call, "_compile", compile_first)
    monkeypatch.setattr(tune._Search, "_time", made_up)
    found = tune.tune(device, _tiny())
    assert looks == [("bfloat16", 4), ("bfloat16", 4), ("float32", 4), ("float32", 4)]
    assert found.numbers == {"bfloat16.item_cost": 32, "float32.item_cost": 32}
    assert [row["batch"] for row in found.measured] == ["decodes", "a chunk"] * 2
    out = capsys.readouterr().out
    assert "item_cost 16" in out and "decode_queues 8" in out and "taken" in out
    path = tmp_path / "tuning.json"
    found.write(path)
    assert tuning.read(str(path)) == found
    assert _import(path, _PRINT).stdout.split() == ["32"]


def test_tuned_numbers_change_no_result():
    """Other costs make other items, but attention is the same to rounding."""
    spec = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 32, "dtype": "float32"}
    spec |= {"max_batch": 2, "max_qo_tokens": 2, "max_kv_pages": 320, "target": "cpu"}
    rng = np.random.default_rng(0)
    lens = np.array([5000, 60])
    pages = -(-lens // 16)
    kv = rng.standard_normal((2, pages.sum(), 16, 2, 32), np.float32)
    q = rng.standard_normal((2, 4, 32), np.float32)
    results, items = [], []
    for numbers in ({}, {"float32.min_chunk": 16, "float32.decode_queues": 16}):
        tuning.Tuning(dataclasses.replace(NONE, arch=0), numbers).use()
        plan = ja.plan(
            ja.AttentionSpec(**spec), np.array([0, 1, 2]), lens, np.cumsum([0, *pages]),
            np.arange(pages.sum()),
        )  # fmt: skip
        items.append(plan.header()["num_items"])
        results.append(np.asarray(ja.attention(q, kv[0], kv[1], plan)))
    assert items[0] != items[1]
    np.testing.assert_allclose(*results, atol=1e-5)
