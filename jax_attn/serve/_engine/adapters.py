"""The LoRA adapters that an engine has, by name, and their places on the device."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from jax_attn import models
from jax_attn.serve._engine.device import Device
from jax_attn.serve._scheduling.request import Adapter, Sequence, UnknownAdapter


class LoadedAdapters:
    """Gives adapters places. One that was unloaded keeps its place until no sequence uses it."""

    def __init__(self, max_loras: int):
        self._max_loras = max_loras
        self._by_name: dict[str, Adapter] = {}
        self._numbers = itertools.count()

    @property
    def names(self) -> list[str]:
        return list(self._by_name)

    def find(self, name: str) -> Adapter | None:
        """The adapter of a sequence; "" is none. Raises UnknownAdapter."""
        if not name:
            return None
        if name not in self._by_name:
            raise UnknownAdapter(f"adapter: expected one of {self._known()}, got {name!r}.")
        return self._by_name[name]

    def load(
        self, name: str, weights: models.LoraWeights, device: Device, live: Iterable[Sequence]
    ) -> None:
        """Loads an adapter, also in place of another of its name, which its sequences keep.

        live: all sequences that have not ended.

        Raises ValueError: there is no place, or it does not fit; nothing has changed.
        """
        if not self._max_loras:
            raise ValueError("lora: expected --max-loras of at least 1 to load adapters, got 0.")
        if not name or "\0" in name:
            raise ValueError(f"lora: expected a name, got {name!r}.")
        used = {seq.adapter.slot for seq in live if seq.adapter is not None}
        used |= {adapter.slot for other, adapter in self._by_name.items() if other != name}
        free = sorted(set(range(self._max_loras)) - used)
        if not free:
            raise ValueError(
                f"lora: expected at most {self._max_loras} adapters, the --max-loras, got"
                f" {name!r} too; unload one, and wait for its requests."
            )
        device.set_lora(free[0], weights)
        self._by_name[name] = Adapter(free[0], next(self._numbers))

    def unload(self, name: str) -> None:
        """New sequences cannot have it; those there are go on. Raises UnknownAdapter."""
        self.find(name)
        self._by_name.pop(name, None)

    def _known(self) -> str:
        return ", ".join(map(repr, self._by_name)) or "none, as there are no adapters"
