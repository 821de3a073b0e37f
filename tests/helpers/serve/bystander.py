"""A well-behaved client that streams one completion after the other; nothing may slow it down.

It runs in its own process, so that it sees the server's pauses and not the attackers'. `python
bystander.py PORT KEY` writes a line for each event: a letter (s: sent, t: text came, e: ended; or
the status of a refusal) and the time on time.monotonic's clock.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

# With logprobs every token is an event, even if it ends in half a letter.
REQUEST = {"prompt": "import os\n", "max_tokens": 1900, "ignore_eos": True, "logprobs": 0}


@dataclass
class Seen:
    """What the bystander saw between two times, in seconds."""

    longest_gap: float  # between two events of a stream
    longest_start: float  # from sending a request to its first event
    num_events: int
    refusals: list[str]


class Bystander:
    def __init__(self, port: int, key: str):
        command = [sys.executable, __file__, str(port), key]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._lines: list[tuple[str, float]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._process.stdout:
            what, _, when = line.partition(" ")
            self._lines.append((what, float(when)))

    def seen(self, begin: float, end: float) -> Seen:
        """Summarizes a period, including gaps that began before it or have not ended."""
        # A request or gap that has not ended is counted as ending now.
        lines = [*self._lines, ("now", min(end, time.monotonic()))]
        steps = [(a, b) for a, b in pairwise(lines) if b[1] >= begin and a[1] <= end]
        gaps = [b[1] - a[1] for a, b in steps if a[0] == "t" and b[0] in ("t", "now")]
        starts = [b[1] - a[1] for a, b in steps if a[0] == "s"]
        refusals = [what for what, when in lines if what.isdigit() and begin <= when <= end]
        return Seen(
            max(gaps, default=0.0),
            max(starts, default=0.0),
            sum(begin <= when <= end and what == "t" for what, when in lines),
            refusals,
        )

    @property
    def is_streaming(self) -> bool:
        return self._lines[-1:] != [] and self._lines[-1][0] == "t"

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        self._process.stdout.close()


@contextlib.contextmanager
def bystanding(port: int, key: str) -> Iterator[Bystander]:
    """Runs a bystander, which streams from the beginning of the block."""
    bystander = Bystander(port, key)
    try:
        deadline = time.monotonic() + 60
        while not bystander.is_streaming:
            assert time.monotonic() < deadline, "no stream has begun"
            time.sleep(0.01)
        yield bystander
    finally:
        bystander.close()


def say(what: object) -> None:
    print(what, time.monotonic(), flush=True)


def main(port: int, key: str) -> None:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    body = json.dumps(REQUEST | {"stream": True})
    while True:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
            with contextlib.closing(connection):
                say("s")
                connection.request("POST", "/v1/completions", body, headers)
                response = connection.getresponse()
                if response.status != 200:
                    say(response.status)
                    time.sleep(0.1)
                    continue
                last = b""
                while line := response.readline():
                    if line.startswith(b"data: "):
                        say("t")
                        last = line
                say("e" if last == b"data: [DONE]\n" else 999)
        except (OSError, http.client.HTTPException):
            say(999)  # the connection was refused or cut
            time.sleep(0.1)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
