"""A request that leaves one engine and goes on in another: its tokens, pages and states.

The tokens that follow are those of one engine; with batch_invariant, in bits. Full pages go to the
other engine's prefix cache, from where the request takes them as any other does. What is beyond the
last full page, or the last checkpoint of recurrent states, is read again.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn.serve._scheduling.request import SamplingParams

_MAGIC = b"jax_attn request 1\n"
_LENGTH = struct.Struct("<Q")
_ARRAYS = ("pages", "states")


@dataclasses.dataclass
class HandedOver:
    """A request between two engines. `to_bytes` and `from_bytes` carry it to another process.

    tokens: the prompt and the output so far. version: of the weights.
    page_size: tokens of a page. pages: of the leading tokens, each arrays [num_layers, ...].
    states: recurrent states after these tokens, one pytree of arrays; [] without.
    seconds_left: until the deadline. so_far: what the caller has received, which engines pass on.
    """

    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    namespace: str
    tenant: str
    priority: int
    adapter_name: str
    seconds_left: float | None
    version: str
    page_size: int
    pages: list[Any]
    states: list[Any]
    so_far: dict[str, Any] = dataclasses.field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """A header in JSON, and the arrays. The prompt is in them, as it was given."""
        parts = {name: [jax.tree.leaves(x) for x in getattr(self, name)] for name in _ARRAYS}
        kinds = {
            name: [[(x.dtype.name, x.shape) for x in leaves] for leaves in part]
            for name, part in parts.items()
        }
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        plain |= kinds | {"params": dataclasses.asdict(self.params)}
        header = json.dumps(plain).encode()
        arrays = [np.asarray(x) for part in parts.values() for leaves in part for x in leaves]
        return b"".join([_MAGIC, _LENGTH.pack(len(header)), header, *(x.tobytes() for x in arrays)])

    @classmethod
    def from_bytes(cls, data: bytes) -> HandedOver:
        """Undoes `to_bytes`. A page is a list of its arrays.

        Raises ValueError: they are not its bytes, or not all of them.
        """
        try:
            return cls._read(data)
        except (ValueError, TypeError, KeyError, AttributeError, struct.error) as error:
            raise ValueError(
                f"import_request: expected bytes of export_request, got others: {error}."
            ) from None

    @classmethod
    def _read(cls, data: bytes) -> HandedOver:
        if not data.startswith(_MAGIC):
            raise ValueError(f"they begin with {bytes(data[:16])!r}")
        at = len(_MAGIC) + _LENGTH.size
        (length,) = _LENGTH.unpack_from(data, len(_MAGIC))
        plain = json.loads(data[at : at + length])
        at += length

        def read(name: str, shape: list[int]) -> np.ndarray:
            nonlocal at
            dtype = jnp.dtype(name)
            begin, at = at, at + dtype.itemsize * math.prod(shape)
            if not begin <= at <= len(data):
                raise ValueError("the end is missing")
            return np.frombuffer(data[begin:at], dtype).reshape(shape)

        for name in _ARRAYS:
            plain[name] = [[read(*kind) for kind in leaves] for leaves in plain[name]]
        if at < len(data):
            raise ValueError(f"{len(data) - at} bytes are too many")
        params = plain["params"]
        params |= {name: tuple(params[name]) for name in ("stop_token_ids", "stop")}
        params["logit_bias"] = tuple((token, bias) for token, bias in params["logit_bias"])
        return cls(**plain | {"params": SamplingParams(**params)})

    def check(self, version: str, page_size: int, shapes: tuple[Any, Any]) -> None:
        """Raises ValueError unless it fits an engine. shapes: Device.shapes_of_copies."""
        if self.version != version:
            raise ValueError(
                f"import_request: expected weights of version {version!r}, got {self.version!r}."
            )
        if not 1 <= self.num_prompt <= len(self.tokens):
            raise ValueError(
                f"import_request: num_prompt: expected 1 to {len(self.tokens)}, got"
                f" {self.num_prompt}."
            )
        if len(self.tokens) - self.num_prompt >= max(self.params.max_tokens, 1):
            raise ValueError(
                f"import_request: tokens: expected less output than max_tokens ="
                f" {self.params.max_tokens}, got {len(self.tokens) - self.num_prompt} tokens."
            )
        if self.pages and self.page_size != page_size:
            raise ValueError(
                f"import_request: expected pages of {page_size} tokens, got {self.page_size}."
            )
        if len(self.pages) * page_size > len(self.tokens):
            raise ValueError(
                f"import_request: expected pages of at most {len(self.tokens)} tokens, got"
                f" {len(self.pages)}."
            )
        for name, shape in zip(_ARRAYS, shapes, strict=True):
            expected = [(x.shape, x.dtype) for x in jax.tree.leaves(shape)]
            for each in getattr(self, name):
                got = [(x.shape, x.dtype) for x in jax.tree.leaves(each)]
                if got != expected:
                    raise ValueError(
                        f"import_request: {name}: expected {_text(expected)}, got {_text(got)};"
                        " both engines need the same model and cache."
                    )


def _text(arrays: list[tuple[tuple[int, ...], Any]]) -> str:
    return " and ".join(f"{list(shape)} {dtype.name}" for shape, dtype in arrays) or "none"
