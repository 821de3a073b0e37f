"""A snapshot of the engine for people: requests, pages, prefix tree and the last step."""

from __future__ import annotations

import itertools
import time
from typing import Any

from jax_attn.serve._scheduling.events import StepStats
from jax_attn.serve._scheduling.scheduler import Scheduler
from jax_attn.serve._scheduling.step_plan import StepPlan

_MAX_SHOWN = 500  # entries of the queue, and of the tree
_MAX_TOKENS = 64  # first tokens of a node


def snapshot(scheduler: Scheduler, stats: StepStats, plan: StepPlan | None) -> dict[str, Any]:
    """Makes the snapshot as JSON-able data. plan: of the last step."""
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
                "num_pages": scheduler.memory.num_held(seq),
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


def _page_states(scheduler: Scheduler) -> str:
    """A letter a page: f free, c cached, l cached and locked by a running sequence, u private."""
    states = bytearray(scheduler.allocator.allocated().translate(_FREE_OR_CACHED))
    for seq in scheduler.running:
        for page in seq.pages:
            states[page] = _PRIVATE
        for i, page in enumerate(scheduler.memory.pages_by_text(seq)):
            states[page] = _LOCKED if i < seq.num_shared else _PRIVATE
    return states.decode()


_FREE_OR_CACHED = b"fc".ljust(256)  # indexed by whether a page is allocated
_LOCKED, _PRIVATE = b"lu"


def _tree(scheduler: Scheduler) -> list[dict[str, Any]]:
    """Nodes of the tree, parents first.

    A parent is an index into the list. The root has no pages.
    """
    nodes = list(itertools.islice(scheduler.cache.walk(), _MAX_SHOWN))
    index = {node.id: i for i, node in enumerate(nodes)}
    return [
        {
            "namespace": node.namespace,
            "parent": None if node.parent is None else index[node.parent],
            # Without those of pictures, which have no text.
            "tokens": [x for x in memoryview(node.key).cast("i")[:_MAX_TOKENS] if x >= 0],
            "locks": node.locks,
            "num_pages": node.num_pages,
        }
        for node in nodes
    ]
