"""A process that compiles grammars before the server does, to measure the cost.

Compiling cannot be interrupted, and a hundred characters may need minutes and gigabytes. This
process can be killed, and ends itself when a grammar takes more than allowed. It is run by path, so
it imports neither jax_attn nor JAX. It exchanges lines of JSON on stdin and stdout:

    {"tokens": [text], "special": [int], "eos": [int], "limits": {...}, "seconds": s, "bytes": n}
    -> {}
    (each byte of a token is a character of its text)
    {"grammar": text}  -> {"error": text or "", "bytes": what the compiled grammar keeps}
"""

from __future__ import annotations

import ctypes
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
    tokenizer = llguidance.LLTokenizer(_Vocabulary(setup), eos_token=setup["eos"])
    limits = llguidance.LLParserLimits(**setup["limits"])
    seconds, num_bytes = setup["seconds"], setup["bytes"]
    del setup
    _answer({})
    for line in sys.stdin:
        grammar = json.loads(line)["grammar"]
        before = _used_bytes()
        _limit_data(num_bytes)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # CPU time; the signal ends the process
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        signal.setitimer(signal.ITIMER_PROF, 0)
        error = matcher.get_error() if matcher.is_error() else ""
        _answer({"error": error, "bytes": max(0, _used_bytes() - before)})
        del matcher  # before the next one is measured


class _Vocabulary(llguidance.TokenizerWrapper):
    """The tokens, as `vocabulary` has them. Compiling splits no text into them."""

    def __init__(self, setup: dict[str, Any]):
        self.is_tokenizer_wrapper, self.bos_token_id = True, None
        self.tokens = [text.encode("latin-1") for text in setup["tokens"]]
        self.special_token_ids, self.eos_token_id = setup["special"], setup["eos"][0]

    def __call__(self, text: str) -> list[int]:
        return []


def _limit_data(more: int) -> None:
    """Limits private memory beyond the current amount. The allocator ends the process above it."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as file:
            data = int(file.read().split()[5]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_DATA, (data + more, hard))


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


def _used_bytes() -> int:
    """Allocated bytes, of glibc; otherwise resident ones, or 0.

    A grammar that uses the memory of an earlier one changes no resident bytes.
    """
    if sys.platform != "linux":
        return 0
    if (mallinfo2 := getattr(ctypes.CDLL(None), "mallinfo2", None)) is not None:
        mallinfo2.restype = _Mallinfo2
        found = mallinfo2()
        return int(found.uordblks + found.hblkhd)
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _answer(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
