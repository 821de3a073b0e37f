"""/debug/state: what of the engine's snapshot a tenant may see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def seen_by(
    snapshot: dict[str, Any],
    owns: Callable[[str], bool],
    sees_all: bool,
    decode: Callable[[list[list[int]]], list[str]],
) -> dict[str, Any]:
    """What of a snapshot a tenant may see: its own requests and prefixes, and their texts.

    owns: whether a namespace is the tenant's.
    sees_all: the numbers of everybody's, too. Others' texts are nobody's to see.
    decode: gives the texts of nodes' tokens.
    """

    def is_mine(entry: dict[str, Any]) -> bool:
        return owns(entry["namespace"])

    seen = snapshot if sees_all else {"pages": {"page_size": snapshot["pages"]["page_size"]}}
    requests = [entry for entry in snapshot["requests"] if sees_all or is_mine(entry)]
    tree = list[dict[str, Any]]()
    index = dict[int, int]()  # of shown nodes, by their place in the whole tree
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
