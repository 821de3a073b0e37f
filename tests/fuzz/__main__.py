"""python -m tests.fuzz: all parts, each for its share of the time, from a seed that it prints.

--part routes     requests made up from the server's own openapi.json, in this process
--part http       the same over HTTP, to the command with the bundled model and an encoder
--part sockets    bytes on the socket
--part calls      tool calls with random arguments, written and read, through tokenizers
--part logits     logits of any finite size, through every family of CPU kernels
--part batches    batches at and beyond every limit, through the planners (C++)
--part damaged    plans with flipped words (C++)
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from . import plans
from .search import Failure, search

PARTS = ("routes", "http", "sockets", "calls", "logits", "batches", "damaged")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, help="for all parts together (60)")
    parser.add_argument("--cases", type=int, help="of each part, instead of a time")
    parser.add_argument("--seed", type=int, help="of a run that is to be repeated (random)")
    parser.add_argument("--part", choices=PARTS, action="append", help="instead of all")
    parser.add_argument("--binary", type=Path, help="the C++ fuzzer (in the newest build)")
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if args.seed is None else args.seed
    parts = args.part or PARTS
    seconds = None if args.cases else (args.seconds or 60.0) / len(parts)
    print(f"seed {seed}", flush=True)
    failed = False
    for part in parts:
        begin = time.monotonic()
        try:
            if part in plans.PARTS:
                report = plans.run(part, seed, args.cases, seconds, args.binary)
            else:
                report = _RUNS[part](seed, args.cases, seconds)
        except (Failure, AssertionError) as failure:
            print(f"{part}: FAILED: {failure}", flush=True)
            failed = True
        else:
            print(f"{part}: {report}, {time.monotonic() - begin:.0f} s", flush=True)
    return failed


def _routes(seed: int, cases: int | None, seconds: float | None) -> str:
    from .routes import RoutesInProcess

    with contextlib.closing(RoutesInProcess()) as part:
        number = search(part, seed, cases, seconds)
        return f"{number} requests, {dict(sorted(part.statuses.items()))}"


def _http(seed: int, cases: int | None, seconds: float | None) -> str:
    from helpers.serve.live_server import KEYS, ServerProcess, key_options

    from .routes import RoutesOverHttp, write_embedding_model

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "vectors").mkdir()
        write_embedding_model(directory / "vectors")
        options = "--embedding-model", "vectors"
        server = ServerProcess(directory, *key_options(directory), *options)
        with contextlib.closing(server):
            server.wait_until_ready()
            part = RoutesOverHttp(server, KEYS[0])
            number = search(part, seed, cases, seconds)
    return f"{number} requests, {dict(sorted(part.statuses.items()))}"


def _sockets(seed: int, cases: int | None, seconds: float | None) -> str:
    from .sockets import Sockets

    with contextlib.closing(Sockets()) as part:
        number = search(part, seed, cases, seconds, at_once=64)
        return f"{number} conversations, {dict(sorted(part.statuses.items()))}"


def _calls(seed: int, cases: int | None, seconds: float | None) -> str:
    from .tool_calls import ToolCalls

    part = ToolCalls()
    number = search(part, seed, cases, seconds)
    return f"{number} answers, {dict(sorted(part.done.items()))}"


def _logits(seed: int, cases: int | None, seconds: float | None) -> str:
    from .logits import Logits

    part = Logits()
    number = search(part, seed, cases, seconds)
    return f"{number} batches, {dict(sorted(part.done.items()))}"


_RUNS: dict[str, Callable[[int, int | None, float | None], str]] = {
    "routes": _routes,
    "http": _http,
    "sockets": _sockets,
    "calls": _calls,
    "logits": _logits,
}

if __name__ == "__main__":
    sys.exit(main())
