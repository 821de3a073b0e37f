"""The checks of mesh_checks.py for LLM: weights from other meshes, bits over devices."""

from __future__ import annotations

import jax
import numpy as np
from jax._src.array import ArrayImpl
from jax.sharding import NamedSharding, PartitionSpec

from helpers import lora
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
        expected = jax.tree.leaves(engine.device._split.split_params(new))
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


def check_bits(num_devices: int, dtype: str) -> None:
    """Sampler and scorer have the same bits with batch_invariant, whatever runs beside."""
    with LLM(
        models.BUNDLED, **SMALL, dtype=dtype, tensor_parallel=num_devices, batch_invariant=True
    ) as llm:
        params = SamplingParams(max_tokens=20, seed=3, logprobs=True)
        [alone] = llm.generate("def add(a, b):", params)
        beside = llm.generate(["def add(a, b):", "x", "class A", "import os\n", "y"], params)[0]
        tokens = alone.prompt_tokens + alone.tokens
        [score] = llm.score([tokens], params)
        sampled = alone.completions[0].token_logprobs()
        assert beside.tokens == alone.tokens
        np.testing.assert_array_equal(beside.completions[0].token_logprobs(), sampled)
        np.testing.assert_array_equal(score.logprobs[-20:], sampled)


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
