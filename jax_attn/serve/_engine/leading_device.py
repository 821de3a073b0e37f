"""A device of several processes: process 0 sends its calls, and the others repeat them.

Every process gives its devices the same executables in the same order, with the same arguments.
Only process 0 makes decisions and reads results.
"""

from __future__ import annotations

from typing import Any, NoReturn

import jax
import numpy as np

from jax_attn import models
from jax_attn.models._layers.weight_updates import Update as WeightUpdate
from jax_attn.serve._engine import sampling
from jax_attn.serve._engine.buckets import Batch
from jax_attn.serve._engine.device import Device, DeviceConfig, Scores
from jax_attn.serve._engine.processes import Processes, ProcessesError
from jax_attn.serve._scheduling.request import SamplingParams


class LeadingDevice(Device):
    """The Device of process 0. One thread calls it."""

    def __init__(self, processes: Processes, model: models.Model, config: DeviceConfig):
        self._processes = processes
        self._is_made = False
        super().__init__(model, config)
        self._is_made = True
        held = processes.gather("held", super().bytes_held())
        self._held = {int(device): n for of_one in held for device, n in of_one.items()}

    def bytes_held(self) -> dict[int, int]:
        """See Device.bytes_held. Covers the devices of all processes."""
        return dict(self._held)

    def reset(self) -> None:
        """Raises ProcessesError after a failure: the other processes may have failed elsewhere."""
        if self._is_made:
            raise ProcessesError("A step failed, and the server is of several processes.")
        super().reset()

    def free_pages(self) -> None:
        if self._is_made:
            raise ProcessesError("sleep: expected a server of one process, got several.")
        super().free_pages()

    def plan_update(self, params: Any, *, partial: bool) -> list[WeightUpdate]:
        raise ProcessesError("update_params: expected a server of one process, got several.")

    def shapes_of_copies(self) -> tuple[Any, Any]:
        raise ProcessesError("a hand-over: expected a server of one process, got several.")

    def set_lora(self, slot: int, weights: models.LoraWeights) -> None:
        raise ProcessesError("lora: expected a server of one process, got several.")

    def forward(self, batch: Batch, newest: jax.Array | None = None) -> Scores:
        assert newest is None  # the other processes do not have it
        bucket = self.buckets.index(batch.bucket)
        self._processes.send("forward", bucket, arrays=[batch.words])
        return super().forward(batch)

    def set_state(
        self, slot: int, params: SamplingParams, tokens: list[int], num_prompt: int
    ) -> None:
        self._processes.send(
            "set_state", slot, num_prompt, params.logit_bias, arrays=[np.array(tokens, np.int32)]
        )
        super().set_state(slot, params, tokens, num_prompt)

    def sample(
        self, scores: Scores, kind: sampling.Kind, mask: np.ndarray | None
    ) -> sampling.Sampled:
        self._processes.send("sample", kind, arrays=[] if mask is None else [mask])
        return super().sample(scores, kind, mask)

    def copy_pages(self, copies: list[tuple[int, int]]) -> None:
        self._processes.send("copy_pages", arrays=[np.array(copies, np.int32)])
        super().copy_pages(copies)

    def _run_all(self) -> None:
        self._processes.meet("compiled")
        super()._run_all()


def follow(device: Device, processes: Processes) -> NoReturn:
    """Runs a process other than 0: compiles, and repeats the calls of process 0."""
    processes.gather("held", device.bytes_held())
    device.compile_all()
    processes.meet("compiled")
    scores: Scores | None = None
    for call, plain, arrays in processes.records():
        match call:
            case "forward":
                (bucket,) = plain
                scores = device.forward(Batch(device.buckets[bucket], arrays[0], "greedy", [], {}))
            case "sample":
                assert scores is not None
                device.sample(scores, plain[0], arrays[0] if arrays else None)
            case "copy_pages":
                device.copy_pages([(source, page) for source, page in arrays[0].tolist()])
            case "set_state":
                slot, num_prompt, bias = plain
                params = SamplingParams(
                    max_tokens=1, logit_bias=tuple((token, value) for token, value in bias)
                )
                device.set_state(slot, params, arrays[0].tolist(), num_prompt)
    raise AssertionError("the records never end")
