"""What a model's parts have to offer, where they come from a library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jax_attn.models._config.quantized_files import Quantization


class CheckpointConfig(Protocol):
    """What the files of a model are checked against, beside its tensors: ModelConfig has it, and
    EncoderConfig."""

    @property
    def family(self) -> str: ...

    @property
    def tensor_prefix(self) -> str:
        """Of all names in the files."""
        ...

    @property
    def quantization(self) -> Quantization | None: ...


class Encoding(Protocol):
    """tokenizers.Encoding."""

    @property
    def ids(self) -> list[int]: ...


class Tokenizer(Protocol):
    """tokenizers.Tokenizer, as far as it is used. Arguments and results are the library's."""

    def no_truncation(self) -> None: ...

    def no_padding(self) -> None: ...

    def encode_batch_fast(
        self, input: list[str], /, *, add_special_tokens: bool
    ) -> Sequence[Encoding]: ...

    def decode(self, ids: Sequence[int], /, *, skip_special_tokens: bool) -> str: ...

    def decode_batch(
        self, sequences: list[list[int]], /, *, skip_special_tokens: bool
    ) -> list[str]: ...

    def token_to_id(self, token: str, /) -> int | None: ...

    def id_to_token(self, id: int, /) -> str | None: ...

    def get_vocab(self) -> dict[str, int]: ...

    def get_added_tokens_decoder(self) -> Mapping[int, Any]:
        """Id -> tokenizers.AddedToken, with `content` and `special`."""
        ...

    def to_str(self) -> str:
        """tokenizer.json."""
        ...
