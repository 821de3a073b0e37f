"""A process that compiles grammars before the server does, to measure the cost.

Compiling cannot be interrupted, and a hundred characters may need minutes and gigabytes. This
process can be killed, and ends itself when a grammar takes more than allowed. It is run by path, so
it imports neither jax_attn nor JAX. It exchanges lines of JSON on stdin and stdout:

    {"tokenizer": text, "n_vocab": int, "eos": [int], "limits": {...}, "seconds": s, "bytes": n}
    -> {}
    {"grammar": text}  -> {"error": text or "", "bytes": what the compiled grammar keeps}
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Any

import llguidance


def main() -> None:
    os.nice(15)
    setup: dict[str, Any] = json.loads(sys.stdin.readline())
    tokenizer = llguidance.LLTokenizer(
        setup["tokenizer"], n_vocab=setup["n_vocab"], eos_token=setup["eos"]
    )
    limits = llguidance.LLParserLimits(**setup["limits"])
    seconds, num_bytes = setup["seconds"], setup["bytes"]
    del setup
    _answer({})
    for line in sys.stdin:
        grammar = json.loads(line)["grammar"]
        before = _resident_bytes()
        _limit_data(num_bytes)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # CPU time; the signal ends the process
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        signal.setitimer(signal.ITIMER_PROF, 0)
        error = matcher.get_error() if matcher.is_error() else ""
        _answer({"error": error, "bytes": max(0, _resident_bytes() - before)})


def _limit_data(more: int) -> None:
    """Limits private memory beyond the current amount. The allocator ends the process above it."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as file:
            data = int(file.read().split()[5]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_DATA, (data + more, hard))


def _resident_bytes() -> int:
    if sys.platform != "linux":
        return 0
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _answer(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
