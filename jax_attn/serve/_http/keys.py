"""API keys, and the addresses that only this machine reaches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

_MIN_KEY_CHARS = 16
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def read_keys(path: str | Path) -> tuple[str, ...]:
    """Reads one key a line. Blank lines and lines that begin with # are skipped.

    Keys come from a file because command lines and environments show up in process lists and crash
    reports.

    Raises:
      ValueError: there is no key, or one that is too short or cannot be sent in a header.
    """
    lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ValueError(f"{path}: no API key in this file")
    return checked_keys(keys, str(path))


def checked_keys(keys: Sequence[str], where: str) -> tuple[str, ...]:
    """Raises ValueError for a key that is too short or cannot be sent in a header."""
    for number, key in enumerate(keys, 1):
        if len(key) < _MIN_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
            raise ValueError(
                f"{where}: key {number}: expected at least {_MIN_KEY_CHARS} printable ASCII "
                "characters without spaces"
            )
    return tuple(keys)


def tenants(keys: Iterable[str], operator_keys: Iterable[str] = ()) -> dict[str, str]:
    """Maps the owner that each key stands for to its tenant.

    The owner is the SHA-256 of the key, in hexadecimal. It stays the same when other keys come or
    go. The tenant says where the key is in the list.
    """
    found: dict[str, str] = {}
    for name, group in (("operator", operator_keys), ("key", keys)):
        for i, key in enumerate(group):
            found.setdefault(digest(key.encode()).hex(), f"{name}{i}")
    return found


def is_loopback(host: str) -> bool:
    return host in _LOOPBACK


def digest(key: bytes) -> bytes:
    """Digests have equal length; compare_digest would reveal the length of a key."""
    return hashlib.sha256(key).digest()
