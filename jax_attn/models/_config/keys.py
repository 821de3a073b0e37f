"""Keys of a config.json, with an error message for each unusable value."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jax_attn.models._config.directory import ModelDirectoryError


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
        """Returns a positive number. The default also replaces null."""
        value = self.need(key) if default is None else self.get(key)
        return self.check_number(key, default if value is None else value)

    def size(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if not isinstance(value, int):
            raise self.error(f"{key}: expected an integer, got {value!r}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        self.expect(key, default, not default)
        return bool(self.get(key, default))

    def expect(self, key: str, *allowed: Any) -> None:
        """Raises unless the value is one of `allowed`; a missing key counts as the first."""
        if (got := self.get(key, allowed[0])) not in allowed:
            raise self.error(f"{key}: expected {one_of(allowed)}, got {got!r}")

    def check_number(self, key: str, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise self.error(f"{key}: expected a number > 0, got {value!r}")
        return value


def one_of(values: Iterable[Any]) -> str:
    *others, last = map(repr, values)
    return f"{', '.join(others)} or {last}" if others else last
