"""python -m jax_attn.serve batch IN.jsonl OUT.jsonl: answers a file of requests, without a port.

The files have OpenAI's batch format. A line of IN is {"custom_id", "method", "url", "body"}; a line
of OUT is {"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}, in the
order in which requests end. Requests go through the same application as over HTTP.

If OUT has answers already, as after a kill, only the other requests are run. A line that was cut is
removed first.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from starlette.applications import Starlette

from jax_attn.serve._engine.progress import progress_bar
from jax_attn.serve._http.batch_run import BatchError, BatchRun, Line, answered, read_input
from jax_attn.serve._http.server import create_app
from jax_attn.serve._http.settings import ServerConfig
from jax_attn.serve._loading import Loaded, load_all
from jax_attn.serve._openai.bounds import KeyLimits
from jax_attn.serve._options import parse_batch

log = logging.getLogger("jax_attn.serve")

_MOST = 1 << 62
_NO_LIMITS = KeyLimits(_MOST, _MOST, _MOST, _MOST, _MOST, _MOST, _MOST)
_MAX_BODY_BYTES = 1 << 30


def main(argv: list[str]) -> int:
    args = parse_batch(argv, __doc__)
    try:
        with _opened(args.output) as output:
            lines = read_input(args.input, str(args.input), _MAX_BODY_BYTES)
            num_done = len(lines)
            for custom_id in answered(output, str(args.output), log.warning):
                if lines.pop(custom_id, None) is None:
                    raise BatchError(
                        f"{args.output}: expected answers to requests of {args.input}, got one to"
                        f" {custom_id[:100]!r}; use another file"
                    )
            num_done -= len(lines)
            if num_done:
                log.info("%d requests of %d are answered already", num_done, num_done + len(lines))
            if not lines:
                return 0
            return _run(args, list(lines.values()), num_done, output)
    except (OSError, ValueError, NotImplementedError) as error:
        print(f"jax_attn.serve: {error}", file=sys.stderr)
        return 1


# ---- the files ---------------------------------------------------------------------------------


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """The file of answers, for this process alone."""
    with path.open("a+b") as output:
        try:
            fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BatchError(f"{path}: expected no other process to write it") from None
        yield output


# ---- the run -----------------------------------------------------------------------------------


def _run(args: argparse.Namespace, lines: list[Line], num_done: int, output: BinaryIO) -> int:
    loaded = load_all(args)
    config = ServerConfig(
        model_directory=loaded.directory,
        model_name=loaded.name,
        model_aliases=loaded.aliases,
        strict=args.strict,
        generation_config=args.generation_config == "auto",
        key_limits=_NO_LIMITS,
        access_log=False,
        adapters=tuple(name for name, _ in args.lora),
        vision=loaded.vision,
        max_body_bytes=_MAX_BODY_BYTES,
    )
    app = create_app(loaded.engine, loaded.model, config, loaded.embedding)
    batch = _Batch(app, loaded, lines, args.input, output)
    total = num_done + len(lines)
    with progress_bar("batch", "request", total, initial=num_done) as bar:
        status = asyncio.run(batch.run(bar))
    output.flush()
    os.fsync(output.fileno())
    left = total - num_done - batch.num_written
    log.info("%d answers, %d with errors; %d left", batch.num_written, batch.num_errors, left)
    return status


class _Batch:
    """The run of some lines, which signals stop."""

    def __init__(
        self,
        app: Starlette,
        loaded: Loaded,
        lines: list[Line],
        source: Path,
        output: BinaryIO,
    ):
        self._app, self._output = app, output
        window = 64
        if loaded.engine is not None:
            limits = loaded.engine.limits
            window = int(limits.max_running + limits.max_waiting // 2)
        self._run = BatchRun(app, source, lines, self._write, window)
        self.num_written = self.num_errors = 0
        self._bar: Any = None

    async def run(self, bar: Any) -> int:
        """Returns the exit status: 0 if every request has an answer."""
        self._bar = bar
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self._app.router.lifespan_context(self._app))
            work = asyncio.create_task(self._run.run())
            loop = asyncio.get_running_loop()
            stopped = False

            def stop() -> None:
                nonlocal stopped
                stopped = True
                work.cancel()

            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, stop)
            try:
                await work
            except asyncio.CancelledError:
                if not stopped:
                    raise
                log.warning("stopped; run it again to go on")
                return 1
        return 1 if self._run.has_failed else 0

    def _write(self, status: int, line: bytes) -> None:
        self._output.write(line)
        self._output.flush()
        self.num_written += 1
        self.num_errors += status != 200
        self._bar.update()
