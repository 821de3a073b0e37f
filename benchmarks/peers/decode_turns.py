"""What a peer of bench_engine's decodes on a CPU does: it answers on stdout what stdin asks for.

The first line of stdin is a JSON object: config, the object of a config.json, and dtype. The answer
has a note, the versions of what is measured. Each other line asks for steps: clients, context, the
tokens of each prompt, and steps. The answer is the time of each step: {"us": [...]}.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol


class Batch(Protocol):
    """Sequences that decode together, begun with random prompts."""

    def step(self) -> None: ...
    def close(self) -> None: ...


def serve(
    note: str,
    load_model: Callable[[dict[str, Any], str], Any],
    make_batch: Callable[[Any, int, int], Batch],
) -> None:
    """load_model: of a config and a dtype. make_batch: of a model, clients and context."""
    model = load_model(**json.loads(sys.stdin.readline()))
    print(json.dumps({"note": note}), flush=True)
    key, batch = None, None
    for line in sys.stdin:
        asked = json.loads(line)
        if key != (asked["clients"], asked["context"]):
            if batch is not None:
                batch.close()
            key = asked["clients"], asked["context"]
            batch = make_batch(model, *key)
            batch.step()
        assert batch is not None
        us = []
        for _ in range(asked["steps"]):
            begin = time.perf_counter()
            batch.step()
            us.append(1e6 * (time.perf_counter() - begin))
        print(json.dumps({"us": us}), flush=True)
