"""A request that leaves one engine and goes on in another: its tokens, pages and states.

The tokens that follow are those of one engine; with batch_invariant, in bits. Full pages go to the
other engine's prefix cache, from where the request takes them as any other does. What is beyond the
last full page, or the last checkpoint of recurrent states, is read again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import struct
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn.serve._engine.plain_types import check_types
from jax_attn.serve._scheduling.events import TokenEvent, TokenLogprob
from jax_attn.serve._scheduling.request import FinishReason, SamplingParams, Sequence

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

    @classmethod
    def ended(cls, seq: Sequence, version: str, page_size: int) -> HandedOver:
        """What stands for a sequence that has ended before it could go: its prompt alone."""
        return cls(
            tokens=seq.tokens[: seq.num_prompt],
            num_prompt=seq.num_prompt,
            params=seq.params,
            namespace=seq.namespace,
            tenant=seq.tenant,
            priority=seq.priority,
            adapter_name=seq.adapter_name,
            seconds_left=None,
            version=version,
            page_size=page_size,
            pages=[],
            states=[],
        )

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
        with _reading():
            return cls._read(data)

    @classmethod
    def read_so_far(cls, data: bytes) -> dict[str, Any]:
        """`so_far` alone. Raises ValueError as `from_bytes`."""
        with _reading():
            so_far = cls._read_header(data)[0]["so_far"]
            if not isinstance(so_far, dict):
                raise ValueError(f"so_far: expected a dictionary, got {repr(so_far)[:100]}")
            return so_far

    @classmethod
    def _read_header(cls, data: bytes) -> tuple[dict[str, Any], int]:
        """The plain fields, and where the arrays begin."""
        if not data.startswith(_MAGIC):
            raise ValueError(f"they begin with {bytes(data[:16])!r}")
        at = len(_MAGIC) + _LENGTH.size
        (length,) = _LENGTH.unpack_from(data, len(_MAGIC))
        return json.loads(data[at : at + length]), at + length

    @classmethod
    def _read(cls, data: bytes) -> HandedOver:
        plain, at = cls._read_header(data)

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
        handed = cls(**plain | {"params": SamplingParams(**params)})
        check_types(handed.params)
        check_types(handed)
        return handed

    def go_on_as(self, seq: Sequence) -> None:
        """Takes its place and rights from a sequence of the same request, read again elsewhere.

        The seed stays: a request without one has got one where it began.

        Raises ValueError: it is another request.
        """
        params = dataclasses.replace(
            seq.params, seed=self.params.seed, prompt_logprobs=self.params.prompt_logprobs
        )
        same = {
            "prompt": seq.tokens == self.tokens[: self.num_prompt],
            "parameters": params == self.params,
            "adapter": seq.adapter_name == self.adapter_name,
        }
        for name, is_same in same.items():
            if not is_same:
                raise ValueError(
                    f"import_request: {name}: expected those of the request that was exported, got"
                    " others; both servers need the same model and defaults."
                )
        self.namespace, self.tenant, self.priority = seq.namespace, seq.tenant, seq.priority

    def event(self, seq_id: str) -> TokenEvent:
        """The output so far as one event of a sequence, if `so_far` has it.

        Raises ValueError: it does not, or not that of `tokens`.
        """
        try:
            plain = self.so_far["event"] | {"seq_id": seq_id, "admitted": None}
            plain["logprobs"] = read_logprobs(plain["logprobs"])
            if plain["finish_reason"] is not None:
                plain["finish_reason"] = FinishReason(plain["finish_reason"])
            event = TokenEvent(**plain)
            check_types(event)
            if event.finish_reason is None and event.tokens != self.tokens[self.num_prompt :]:
                raise ValueError("its tokens are not those of the request")
            return event
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"import_request: expected a request of another server, got so_far: {error}."
            ) from None

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


def read_logprobs(plain: Any) -> list[TokenLogprob] | None:
    """Logprobs, also as JSON brings them; None: none were asked for."""
    if plain is None:
        return None
    return [
        TokenLogprob(token, logprob, tuple((each, value) for each, value in top))
        for token, logprob, top in plain
    ]


def _text(arrays: list[tuple[tuple[int, ...], Any]]) -> str:
    return " and ".join(f"{list(shape)} {dtype.name}" for shape, dtype in arrays) or "none"


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """Has bytes that cannot be read raise ValueError."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, struct.error) as error:
        raise ValueError(
            f"import_request: expected bytes of export_request, got others: {error}."
        ) from None
