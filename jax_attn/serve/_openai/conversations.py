"""/v1/conversations: lists of items that responses continue, in bounded memory."""

from __future__ import annotations

import dataclasses
import json
import secrets
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jax_attn.serve._openai import response_schemas as rs
from jax_attn.serve._openai import schemas
from jax_attn.serve._openai.errors import ApiError, bad_field
from jax_attn.serve._openai.response_items import page, shown
from jax_attn.serve._openai.response_store import BoundedStore


@dataclass(frozen=True)
class StoredConversation:
    id: str
    created: int
    metadata: Mapping[str, str]
    items: tuple[bytes, ...] = ()  # JSON of each

    @property
    def num_bytes(self) -> int:
        named = sum(len(key) + len(value) for key, value in self.metadata.items())
        return sum(map(len, self.items)) + 64 * len(self.items) + 4 * named + 512

    def shown(self) -> rs.Conversation:
        return rs.Conversation(id=self.id, created_at=self.created, metadata=dict(self.metadata))

    def parsed(self) -> list[dict[str, Any]]:
        return list(map(json.loads, self.items))


class Conversations:
    """The conversations of all tenants. Thread-safe."""

    def __init__(self, store: BoundedStore[StoredConversation] | None = None):
        self._store = store or BoundedStore[StoredConversation]()
        self._lock = threading.Lock()  # of what reads a conversation and puts another in its place

    def create(self, tenant: str, body: rs.ConversationRequest) -> rs.Conversation:
        items = tuple(_dump(shown(body.items)))
        id = f"conv_{secrets.token_hex(12)}"
        made = StoredConversation(id, int(time.time()), body.metadata, items)
        self._store.put(tenant, id, made)
        return made.shown()

    def get(self, tenant: str, id: str, param: str | None = None) -> StoredConversation:
        """Raises ApiError, 404."""
        if (found := self._store.get(tenant, id)) is None:
            raise ApiError(
                404,
                f"conversation {id[:64]!r} not found: it is not yours, was deleted, or had to make "
                "room for newer ones",
                param=param or "conversation_id",
                code="conversation_not_found",
            )
        return found

    def update(self, tenant: str, id: str, body: rs.ConversationUpdate) -> rs.Conversation:
        """Replaces the metadata. Raises ApiError, 404."""
        return self._change(tenant, id, metadata=body.metadata).shown()

    def delete(self, tenant: str, id: str) -> rs.DeletedConversation:
        """Raises ApiError, 404."""
        self.get(tenant, id)
        self._store.remove(tenant, id)
        return rs.DeletedConversation(id=id)

    def items(self, tenant: str, id: str, query: Mapping[str, str]) -> bytes:
        """A part of the items, as JSON. Raises ApiError."""
        return page(self.get(tenant, id).parsed(), query)

    def item(self, tenant: str, id: str, item: str) -> dict[str, Any]:
        """Raises ApiError, 404."""
        for each in self.get(tenant, id).parsed():
            if each["id"] == item:
                return each
        raise _no_item(item)

    def add(self, tenant: str, id: str, body: rs.ItemsRequest) -> bytes:
        """Adds items. Returns them as a list, in JSON. Raises ApiError."""
        new = shown(body.items)
        self.append(tenant, id, new)
        return page(new, {"order": "asc", "limit": "100"})

    def append(self, tenant: str, id: str, new: Iterable[dict[str, Any]]) -> None:
        """Adds items. Raises ApiError, also if there are too many."""
        with self._lock:
            items = (*self.get(tenant, id).items, *_dump(new))
            if len(items) > schemas.MAX_MESSAGES:
                raise bad_field(
                    "items",
                    f"a conversation has at most {schemas.MAX_MESSAGES}, got {len(items)}",
                )
            self._put(tenant, id, items=items)

    def remove(self, tenant: str, id: str, item: str) -> rs.Conversation:
        """Removes an item. Raises ApiError, 404."""
        with self._lock:
            parsed = self.get(tenant, id).parsed()
            left = [each for each in parsed if each["id"] != item]
            if len(left) == len(parsed):
                raise _no_item(item)
            return self._put(tenant, id, items=tuple(_dump(left))).shown()

    def _change(self, tenant: str, id: str, **fields: Any) -> StoredConversation:
        with self._lock:
            return self._put(tenant, id, **fields)

    def _put(self, tenant: str, id: str, **fields: Any) -> StoredConversation:
        changed = dataclasses.replace(self.get(tenant, id), **fields)
        self._store.put(tenant, id, changed)
        return changed


def _no_item(id: str) -> ApiError:
    return ApiError(404, f"item {id[:64]!r} not found", param="item_id", code="item_not_found")


def _dump(items: Iterable[dict[str, Any]]) -> Iterable[bytes]:
    return (json.dumps(item).encode() for item in items)
