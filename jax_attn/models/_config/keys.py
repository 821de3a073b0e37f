"""Keys of a config.json, with an error message for each unusable value."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jax_attn.models._config.directory import ModelDirectoryError

_SMALLEST, _LARGEST = 1e-37, 1e38  # numbers become f32
_LARGEST_SIZE = 2**31 - 1  # of the i32 in which positions and tokens are counted


class Keys:
    """The keys of a config.json, as transformers 4 or 5 writes it."""

    def __init__(self, raw: dict[str, Any], path: Path | str):
        self.raw, self.path = raw, path

    def error(self, message: str) -> ModelDirectoryError:
        return ModelDirectoryError(f"{self.path}: {message}")

    def get(self, key: str, default: Any = None) -> Any:
        return self.raw.get(key, default)

    def need(self, key: str) -> Any:
        if key not in self.raw:
            raise self.error(f"key '{key}' is missing")
        return self.raw[key]

    def number(self, key: str, default: float | None = None) -> Any:
        """Returns a positive number. `default` is that of a missing key; None: it is needed."""
        return self.check_number(key, self.need(key) if default is None else self.get(key, default))

    def size(self, key: str, default: int | None = None) -> int:
        """Returns a positive integer, see `number`."""
        return self.check_size(key, self.number(key, default))

    def size_or_none(self, key: str, default: int | None = None) -> int | None:
        """Returns a positive integer, None for null, and `default` for a missing key."""
        return None if self.get(key, default) is None else self.size(key, default)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """Returns a list of so many positive numbers."""
        value = self.need(key)
        is_list = isinstance(value, list) and len(value) == count
        if not is_list or not all(_is_number(x) and _SMALLEST <= x <= _LARGEST for x in value):
            raise self.error(f"{key}: expected a list of {count} numbers > 0, got {value!r}")
        return tuple(value)

    def count(self, key: str, default: int) -> int:
        """Returns an integer of 0 or more; `default` for a missing key."""
        value = self.get(key, default)
        if type(value) is not int or value < 0:
            raise self.error(f"{key}: expected an integer >= 0, got {value!r}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        self.expect(key, default, not default)
        return bool(self.get(key, default))

    def items(self, key: str) -> list[Any] | None:
        """Returns a list, or None for null and for a missing key."""
        value = self.get(key)
        if value is not None and not isinstance(value, list):
            raise self.error(f"{key}: expected a list, got {value!r}")
        return value

    def inner(self, key: str) -> Keys | None:
        """Returns the keys of an object, or None for null and for a missing key."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(f"{key}: expected an object, got {value!r}")
        return Keys(value, f"{self.path}: {key}")

    def token(self, key: str, vocab_size: int) -> int | None:
        """Returns a token id, or None for null and for a missing key."""
        value = self.get(key)
        return None if value is None else self._check_token(key, value, vocab_size)

    def tokens(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """Returns the token ids of an integer, of a list, or of null or a missing key: none."""
        value = self.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        return tuple(self._check_token(key, token, vocab_size) for token in ids)

    def _check_token(self, key: str, value: Any, vocab_size: int) -> int:
        if type(value) is not int or not 0 <= value < vocab_size:
            raise self.error(
                f"{key}: expected a token of the vocabulary, 0 to {vocab_size - 1}, got {value!r}"
            )
        return value

    def name_of(self, *names: str) -> str:
        """Returns which of several names of one key is used: the first if none is.

        Raises if two of them have different values.
        """
        used = [name for name in names if name in self.raw]
        for name in used[1:]:
            if self.raw[name] != self.raw[used[0]]:
                raise self.error(
                    f"{name}: expected {self.raw[used[0]]!r}, as {used[0]} says, got "
                    f"{self.raw[name]!r}"
                )
        return used[0] if used else names[0]

    def expect(self, key: str, *allowed: Any) -> None:
        """Raises unless the value is one of `allowed`; a missing key counts as the first."""
        got = self.get(key, allowed[0])
        # In Python True is 1, but here a flag is no number.
        if not any(
            got == each and isinstance(got, bool) == isinstance(each, bool) for each in allowed
        ):
            raise self.error(f"{key}: expected {one_of(allowed)}, got {got!r}")

    def head_dim(
        self, hidden_size: int, num_heads: int, factor: int = 1, name: str = "num_attention_heads"
    ) -> int:
        """Returns the size of a head, a multiple of `factor`. name: the key of num_heads."""
        if hidden_size % (factor * num_heads):
            times = "" if factor == 1 else f"{factor} x "
            raise self.error(
                f"hidden_size: expected a multiple of {times}{name} {num_heads}, got {hidden_size}"
            )
        return hidden_size // num_heads

    def check_number(self, key: str, value: Any) -> Any:
        if not _is_number(value) or not value > 0:
            raise self.error(f"{key}: expected a number > 0, got {value!r}")
        if not _SMALLEST <= value <= _LARGEST:
            raise self.error(
                f"{key}: expected a number from {_SMALLEST} to {_LARGEST}, got {value!r}"
            )
        return value

    def check_size(self, key: str, value: Any) -> int:
        if not isinstance(self.check_number(key, value), int):
            raise self.error(f"{key}: expected an integer, got {value!r}")
        if value > _LARGEST_SIZE:
            raise self.error(f"{key}: expected at most {_LARGEST_SIZE}, got {value}")
        return int(value)


# Keys with which transformers changes layers, files or cache of any model, and harmless values.
_CHANGES: dict[str, tuple[Any, ...]] = {
    "per_layer_config": (None, {}),
    "transformers_weights": (None,),
    "kv_sharing_modes": (None,),
    "attention_chunk_size": (None,),
}
# By model_type, those that a family reads itself.
_READ = {"gemma4_text": "per_layer_config"} | dict.fromkeys(
    ("llama4", "llama4_text"), "attention_chunk_size"
)


def refuse_changes_of_any_family(keys: Keys, model_type: str) -> None:
    """Refuses keys with which transformers changes any model, unless this one reads them."""
    for key, harmless in _CHANGES.items():
        if key != _READ.get(model_type):
            keys.expect(key, *harmless)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def one_of(values: Iterable[Any]) -> str:
    *others, last = map(repr, values)
    return f"{', '.join(others)} or {last}" if others else last
