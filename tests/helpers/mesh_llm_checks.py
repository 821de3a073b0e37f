"""The checks of mesh_checks.py for LLM: weights from other meshes, bits over devices."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax._src.array import ArrayImpl
from jax.sharding import NamedSharding, PartitionSpec

from helpers import lora, trainers
from helpers.model_cases import shallow
from helpers.small_llm import SMALL
from jax_attn import LLM, SamplingParams, models


def check_resharding() -> None:
    """New weights from a trainer's mesh to the engine's, without a copy on the host."""
    model = models.load(models.BUNDLED, dtype="float32")
    new = jax.tree.map(lambda x: np.asarray(x) * np.float32(1.05), model.params)
    devices = jax.devices()
    with LLM(model, **SMALL, tensor_parallel=2, devices=devices[2:]) as llm:
        engine = llm._runtime.engine("")._engine
        expected = jax.tree.leaves(engine.device._split.split_params(new, packed=True))
        executables = dict(engine.device._executables)
        before = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, temperature=0))
        for of in (devices, devices[:2], devices[2:], devices[3:1:-1], devices[:1], devices[2:3]):
            sharding = NamedSharding(
                jax.make_mesh((len(of),), ("fsdp",), devices=of), PartitionSpec("fsdp")
            )
            params = jax.tree.map(lambda x, to=sharding: jax.device_put(x, to), new)
            with _no_host_copies():
                llm.update_params(params)
            for a, b in zip(expected, engine.device._weights, strict=True):
                assert a.sharding == b.sharding
                np.testing.assert_array_equal(a, b)
            llm.update_params(model.params)
        assert engine.device._executables == executables
        after = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, temperature=0))
        assert after[0].tokens == before[0].tokens


class _no_host_copies:
    """Arrays cannot be read by the host meanwhile."""

    def __enter__(self) -> None:
        self._value = ArrayImpl._value

        def refuse(array: object) -> None:
            raise AssertionError("an array was copied to the host")

        ArrayImpl._value = property(refuse)

    def __exit__(self, *_: object) -> None:
        ArrayImpl._value = self._value


def check_bits(num_devices: int, *dtypes: str) -> None:
    """With batch_invariant sampler, scorer and trainer have the same bits, whatever runs beside."""
    prompt, fields = "def add(a, b):\n    return", {"temperature": 0.7}
    for dtype in dtypes:
        model = shallow(models.load(models.BUNDLED, dtype=dtype))
        params = SamplingParams(
            n=2, max_tokens=20, seed=3, logprobs=True, ignore_eos=True, **fields
        )
        options = {"tensor_parallel": num_devices, "batch_invariant": True}
        with LLM(model, directory=models.BUNDLED, **SMALL, **options) as llm:
            [alone] = llm.generate(prompt, params)
            beside = llm.generate([prompt, "x", "class A", "import os\n"], params)[0]
            kv_split = llm.kv_split
            for one, other in zip(alone.completions, beside.completions, strict=True):
                assert one.tokens == other.tokens
                sampled = one.token_logprobs()
                np.testing.assert_array_equal(other.token_logprobs(), sampled)
                [score] = llm.score([alone.prompt_tokens + one.tokens], params)
                np.testing.assert_array_equal(score.logprobs[-20:], sampled)
        _check_trainer(num_devices, model, alone, kv_split, dtype, fields)


def _check_trainer(
    num_devices: int, model: Any, output: Any, kv_split: int | None, dtype: str, fields: Any
) -> None:
    """Bits of the sampler, and gradients close to those of one device without packed weights."""
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((num_devices,), ("heads",), axis_types=auto)
    split = models.TensorParallel(model.config, mesh, "heads")
    everywhere = jax.device_put(model.params, NamedSharding(mesh, PartitionSpec()))
    batch = trainers.group(split.config, output, kv_split, dtype)
    found, gradients = trainers.logprobs_and_gradients(
        split.train_forward, everywhere, batch, **fields
    )
    sampled = np.concatenate([each.token_logprobs() for each in output.completions])
    np.testing.assert_array_equal(found, sampled)
    if dtype != "float32":
        return
    batch = trainers.group(model.config, output, kv_split, dtype)
    forward = lambda params, *rest: models.train_forward(params, model.config, *rest)  # noqa: E731
    _, expected = trainers.logprobs_and_gradients(forward, model.params, batch, **fields)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * abs(b).max())


def check_adapters() -> None:
    """Adapters over two devices give what one device gives."""
    model = shallow(models.load(models.BUNDLED, dtype="float32"))
    prompt = list(range(300, 340))
    found = []
    for num_devices in (1, 2):
        with LLM(model, **SMALL, max_loras=2, tensor_parallel=num_devices) as llm:
            for name in "ab":
                llm.load_lora(name, lora.tensors(model.config, name), config=lora.CONFIG)
            each = [
                SamplingParams(logprobs_of="model", temperature=1.0, adapter=name)
                for name in ("a", "", "b")
            ]
            found.append([llm.score([prompt], params)[0].logprobs for params in each])
            assert llm.stats()["compilations"] == 0
    for one, two in zip(*found, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-4)
    assert abs(found[0][0] - found[0][1]).max() > 0.1


def check_hand_over() -> None:
    """A request goes on over another mesh, with its pages: from device to device, and as bytes."""
    model, devices = shallow(models.load(models.BUNDLED, dtype="float32")), jax.devices()
    options = SMALL | {"max_running": 2, "max_step_tokens": 8}
    params = SamplingParams(max_tokens=8, temperature=0)
    with (
        LLM(model, **options, devices=devices[:1]) as one,
        LLM(model, **options, devices=devices[1:], tensor_parallel=2) as two,
    ):
        for i, (source, target, in_bytes) in enumerate(
            [(one, two, False), (two, one, False), (one, two, True), (two, one, True)]
        ):
            prompt = [i, *range(300, 320)]  # that the target has not seen
            [alone] = source.generate([prompt], params)
            before = target.stats()["prefix_hit_tokens"]
            handed = source.export_request(prompt, params, num_tokens=3)
            told = target.import_request(handed.to_bytes() if in_bytes else handed)
            assert told.tokens == alone.tokens, i
            hits = target.stats()["prefix_hit_tokens"] - before
            assert hits >= 16, (i, hits)  # of two pages
