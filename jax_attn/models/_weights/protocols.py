"""Protocols of the parts of a model that other modules or libraries provide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jax_attn.models._config.quantized_files import Quantization


class CheckpointConfig(Protocol):
    """The fields of a config that loading checks files against. ModelConfig and EncoderConfig have
    them."""

    @property
    def family(self) -> str: ...

    @property
    def tensor_prefix(self) -> str:
        """The prefix of all names in the files."""
        ...

    @property
    def quantization(self) -> Quantization | None: ...


class Encoding(Protocol):
    """The used part of tokenizers.Encoding."""

    @property
    def ids(self) -> list[int]: ...

    @property
    def type_ids(self) -> list[int]:
        """For each token, 1 in the second text of a pair, otherwise 0."""
        ...


class Tokenizer(Protocol):
    """The used part of tokenizers.Tokenizer. Arguments and results are the library's."""

    def no_truncation(self) -> None: ...

    def no_padding(self) -> None: ...

    def encode_batch_fast(
        self, input: Sequence[str] | Sequence[tuple[str, str]], /, *, add_special_tokens: bool
    ) -> Sequence[Encoding]: ...

    def decode(self, ids: Sequence[int], /, *, skip_special_tokens: bool) -> str: ...

    def decode_batch(
        self, sequences: list[list[int]], /, *, skip_special_tokens: bool
    ) -> list[str]: ...

    def token_to_id(self, token: str, /) -> int | None: ...

    def id_to_token(self, id: int, /) -> str | None: ...

    def get_vocab(self) -> dict[str, int]: ...

    def get_added_tokens_decoder(self) -> Mapping[int, Any]:
        """Returns id -> tokenizers.AddedToken, with `content` and `special`."""
        ...

    def to_str(self) -> str:
        """Returns the text of tokenizer.json."""
        ...
