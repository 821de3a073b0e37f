"""A server in a separate process, and a client that uses little processor time."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

START_SECONDS = 600  # start-up limit, for a server that compiles a large model


@dataclasses.dataclass
class Answer:
    """One request, as seen by its client. Times are in seconds of time.perf_counter."""

    sent: float
    status: int = 0
    times: list[float] = dataclasses.field(default_factory=list)  # of chunks with text
    num_tokens: int = 0
    num_cached: int = 0

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


@dataclasses.dataclass(frozen=True)
class Client:
    url: str

    def get(self, path: str, body: Any = None) -> str:
        """Returns the answer's text. A request with a body is a POST."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.read().decode()

    def metrics(self) -> dict[str, float]:
        lines = (line for line in self.get("/metrics").splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    async def generate(self, prompt: list[int], max_tokens: int, **fields: Any) -> Answer:
        """Streams a completion over its own connection."""
        body = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **fields,
        }
        payload = json.dumps(body).encode()
        where = urlsplit(self.url)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {where.netloc}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
        )
        answer, last = Answer(time.perf_counter()), b""
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        try:
            writer.write(head.encode() + payload)
            answer.status = int((await reader.readline()).split()[1])
            # The server writes each event at once, so chunked encoding does not split its lines.
            async for line in reader:
                if line.startswith(b"data: {"):
                    answer.times.append(time.perf_counter())
                    last = line
        finally:
            writer.close()
        if answer.status == 200:
            answer.times.pop()  # the chunk with the usage has no text
            usage = json.loads(last.removeprefix(b"data: "))["usage"]
            answer.num_tokens = usage["completion_tokens"]
            answer.num_cached = usage["prompt_tokens_details"]["cached_tokens"]
        return answer


@contextlib.contextmanager
def running_server(*options: str, cache: str) -> Iterator[Client]:
    """Runs `python -m jax_attn.serve` with these options on a free port until the block ends.

    cache: directory of XLA's compilation cache, so the next server with these shapes starts faster.
    """
    kept = {
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "jax_attn.serve", "--port", "0", *options],
            env=os.environ | kept,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            yield _wait_until_ready(process, log)
        finally:
            process.terminate()
            process.wait(60)


def _wait_until_ready(process: subprocess.Popen[bytes], log: Any) -> Client:
    begin = time.monotonic()
    while time.monotonic() - begin < START_SECONDS and process.poll() is None:
        time.sleep(0.2)
        log.seek(0)
        if found := re.search(r"running on (http://\S+)", log.read()):
            client = Client(found[1])
            with contextlib.suppress(OSError):
                client.get("/health")
                return client
    log.seek(0)
    raise RuntimeError(f"the server did not start: {log.read()[-2000:]}")
