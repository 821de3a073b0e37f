"""Stores what clients may refer to later: the most recently used, in bounded memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


@dataclass(frozen=True)
class StoredResponse:
    body: bytes  # JSON, as it was sent
    # JSON: the conversation up to and including it, as chat messages without instructions. It is
    # complete, so that no response needs another one to be continued.
    messages: bytes
    items: bytes = b""  # JSON: the items of its request

    @property
    def num_bytes(self) -> int:
        return len(self.body) + len(self.messages) + len(self.items)


class Sized(Protocol):
    @property
    def num_bytes(self) -> int: ...


Stored = TypeVar("Stored", bound=Sized)


class BoundedStore(Generic[Stored]):
    """Values by tenant and identifier. Thread-safe.

    When it is full, the tenant that holds most of it loses its least recently used values. So a
    tenant that stores much does not affect the others.
    """

    def __init__(self, max_bytes: int = 64 << 20, max_count: int = 8192):
        self._max_bytes, self._max_count = max_bytes, max_count
        self._tenants: dict[str, OrderedDict[str, Stored]] = {}
        self._num_bytes: dict[str, int] = {}  # by tenant
        self._lock = threading.Lock()

    def put(self, tenant: str, id: str, value: Stored) -> None:
        """Stores a value, in place of one with the same identifier."""
        with self._lock:
            if id in self._tenants.get(tenant, {}):
                self._drop(tenant, id)
            self._tenants.setdefault(tenant, OrderedDict())[id] = value
            self._num_bytes[tenant] = self._num_bytes.get(tenant, 0) + value.num_bytes
            while sum(self._num_bytes.values()) > self._max_bytes:
                self._drop_oldest(max(self._tenants, key=self._num_bytes.__getitem__))
            while sum(map(len, self._tenants.values())) > self._max_count:
                self._drop_oldest(max(self._tenants, key=lambda name: len(self._tenants[name])))

    def get(self, tenant: str, id: str) -> Stored | None:
        """Returns a value and marks it as used; None: it is unknown or was dropped."""
        with self._lock:
            values = self._tenants.get(tenant, OrderedDict())
            if id in values:
                values.move_to_end(id)
            return values.get(id)

    def remove(self, tenant: str, id: str) -> bool:
        """Removes a value. Returns whether it was there."""
        with self._lock:
            is_there = id in self._tenants.get(tenant, {})
            if is_there:
                self._drop(tenant, id)
            return is_there

    def _drop_oldest(self, tenant: str) -> None:
        self._drop(tenant, next(iter(self._tenants[tenant])))

    def _drop(self, tenant: str, id: str) -> None:
        self._num_bytes[tenant] -= self._tenants[tenant].pop(id).num_bytes
        if not self._tenants[tenant]:
            del self._tenants[tenant], self._num_bytes[tenant]
