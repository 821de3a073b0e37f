"""The thread that gives a device its calls."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import jax


class Inline(Executor):
    """Runs each call at once, in the thread that submits it."""

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(call(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def make_dispatcher() -> Executor:
    """Runs calls one after the other, in the order in which they are submitted.

    On a GPU in a thread of its own: XLA takes 1.1 to 1.7 ms to launch the kernels of a step, most
    of that without Python's lock, and the engine's thread has tokens to retire meanwhile. On a CPU
    waking a thread for each call costs one client a fifth of its tokens, and many gain nothing.
    """
    return Inline() if jax.default_backend() == "cpu" else make_thread()


def make_thread() -> Executor:
    return ThreadPoolExecutor(1, "jax_attn dispatch")
