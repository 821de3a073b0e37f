"""/debug/state: the part of the engine's snapshot that a tenant may see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def seen_by(
    snapshot: dict[str, Any],
    owns: Callable[[str], bool],
    sees_all: bool,
    decode: Callable[[list[list[int]]], list[str]],
) -> dict[str, Any]:
    """The part of a snapshot that a tenant may see: its own requests and prefixes with their texts.

    owns: whether a namespace is the tenant's.
    sees_all: include the numbers of all tenants. Texts of other tenants are never shown.
    decode: gives the text of a node's tokens.
    """

    def is_mine(entry: dict[str, Any]) -> bool:
        return owns(entry["namespace"])

    seen = snapshot if sees_all else {"pages": {"page_size": snapshot["pages"]["page_size"]}}
    requests = [entry for entry in snapshot["requests"] if sees_all or is_mine(entry)]
    tree = list[dict[str, Any]]()
    index = dict[int, int]()  # shown nodes, by their index in the whole tree
    for i, node in enumerate(snapshot["tree"]):
        if not (sees_all or is_mine(node)):
            continue
        index[i] = len(tree)
        shown = _without(node, "tokens", "namespace")
        shown["parent"] = None if node["parent"] is None else index.get(node["parent"])
        tree.append(shown)
    mine = [i for i in index if is_mine(snapshot["tree"][i])]
    texts = decode([snapshot["tree"][i]["tokens"] for i in mine])
    for i, text in zip(mine, texts, strict=True):
        tree[index[i]]["text"] = text
    return seen | {
        "requests": [_without(entry, "namespace") | {"mine": is_mine(entry)} for entry in requests],
        "tree": tree,
    }


def _without(data: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in data.items() if key not in keys}
