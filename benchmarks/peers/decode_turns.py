"""The protocol of peers of bench_engine's CPU decodes: requests on stdin, answers on stdout.

The first line of stdin is a JSON object: config, the object of a config.json, and dtype. Its answer
is a note with the versions of the measured packages. Each later line asks for steps: clients,
context (tokens of each prompt) and steps. Its answer is the time of each step: {"us": [...]}.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol


class Batch(Protocol):
    """Sequences that decode together, started with random prompts."""

    def step(self) -> None: ...
    def close(self) -> None: ...


def serve(
    note: str,
    load_model: Callable[[dict[str, Any], str], Any],
    make_batch: Callable[[Any, int, int], Batch],
) -> None:
    """Answers requests. load_model(config, dtype). make_batch(model, clients, context)."""
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
