"""An event loop in which many connections that are ready do not delay streams."""

from __future__ import annotations

import asyncio
import selectors

MOST = 8  # connections of a turn; a request takes the loop a millisecond or two


def new_loop(first: int | None = None) -> asyncio.AbstractEventLoop:
    """first: the file that each turn looks at, such as the engine's wire; None: no file."""
    return asyncio.SelectorEventLoop(FairSelector(first))


class FairSelector(selectors.DefaultSelector):
    """Gives a few of the files that are ready at a time, in turn.

    asyncio does all that is ready before it looks again. Of a thousand connections with a request
    each, that takes seconds, in which no stream goes on.
    """

    def __init__(self, first: int | None = None):
        super().__init__()
        self._first, self._served = first, set[int]()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready: list[tuple[selectors.SelectorKey, int]] = super().select(timeout)
        if len(ready) <= MOST:
            return ready
        first = [each for each in ready if each[0].fd == self._first]
        others = [each for each in ready if each[0].fd != self._first]
        waiting = [each for each in others if each[0].fd not in self._served]
        if (missing := MOST - len(waiting)) > 0:  # then another round begins
            again = [each for each in others if each[0].fd in self._served][:missing]
            self._served = {key.fd for key, _ in again}
            return first + waiting + again
        self._served |= {key.fd for key, _ in waiting[:MOST]}
        return first + waiting[:MOST]
