"""A picture of the engine for people to look at: requests, pages, prefix tree, the last step."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

from jax_attn.serve._scheduling.events import StepStats
from jax_attn.serve._scheduling.scheduler import Scheduler
from jax_attn.serve._scheduling.step_plan import StepPlan

_MAX_SHOWN = 500  # of the queue, and of the tree
_MAX_TOKENS = 64  # of a node, the first


def snapshot(scheduler: Scheduler, stats: StepStats, plan: StepPlan | None) -> dict[str, Any]:
    """JSON-able. plan: of the last step."""
    now = time.monotonic()
    return {
        "step": {
            "number": stats.index,
            "bucket": stats.bucket,
            "num_tokens": stats.num_tokens,
            "entries": [
                {"id": entry.seq.id, "num_tokens": entry.num_tokens, "samples": entry.samples}
                for entry in (plan.entries if plan else ())
            ],
        },
        "requests": [
            {
                "id": seq.id,
                "status": str(seq.status),
                "namespace": seq.namespace,
                "num_prompt": seq.num_prompt,
                "num_output": seq.num_output,
                "num_cached": seq.num_cached,
                "num_computed": seq.num_computed,
                "num_pages": len(seq.pages),
                "priority": seq.priority,
                "age": now - seq.arrival,
            }
            for seq in [*scheduler.running, *scheduler.waiting[:_MAX_SHOWN]]
        ],
        "pages": {
            "page_size": scheduler.config.page_size,
            "total": scheduler.config.num_pages,
            "states": _page_states(scheduler),
        },
        "tree": _tree(scheduler),
    }


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


def _page_states(scheduler: Scheduler) -> str:
    """A letter a page: f free, c cached, l cached and locked by a running sequence, u private."""
    states = bytearray(scheduler.allocator.allocated().translate(_FREE_OR_CACHED))
    for seq in scheduler.running:
        for i, page in enumerate(seq.pages):
            states[page] = _LOCKED if i < seq.num_shared else _PRIVATE
    return states.decode()


_FREE_OR_CACHED = b"fc".ljust(256)  # by whether a page is allocated
_LOCKED, _PRIVATE = b"lu"


def _tree(scheduler: Scheduler) -> list[dict[str, Any]]:
    """Nodes, parents first; a parent is an index into the list. The root has no pages."""
    nodes = list(itertools.islice(scheduler.cache.walk(), _MAX_SHOWN))
    index = {node.id: i for i, node in enumerate(nodes)}
    return [
        {
            "namespace": node.namespace,
            "parent": None if node.parent is None else index[node.parent],
            "tokens": memoryview(node.key).cast("i")[:_MAX_TOKENS].tolist(),
            "locks": node.locks,
            "num_pages": node.num_pages,
        }
        for node in nodes
    ]
