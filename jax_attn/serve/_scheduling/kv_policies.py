"""What sequences keep of the kv cache, by names: the values of --kv-policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from jax_attn.serve._scheduling.prompt_policy import PromptPolicy
from jax_attn.serve._scheduling.streaming import Streaming, StreamingPages

KvPolicy: TypeAlias = Streaming | PromptPolicy

EXAMPLES = ("streaming:sinks=4,window=2000", "snapkv:keep=1024,window=32", "h2o:keep=1024")

# For each policy: what makes it, the values that it takes, and those that it needs.
_MADE: dict[str, tuple[Callable[..., KvPolicy], set[str], set[str]]] = {
    "streaming": (Streaming, {"sinks", "window"}, set()),
    "snapkv": (PromptPolicy.snapkv, {"keep", "window"}, {"keep"}),
    "h2o": (PromptPolicy.h2o, {"keep"}, {"keep"}),
}


def parse(text: str) -> KvPolicy:
    """From "streaming:sinks=4,window=2000"; a value that is missing has its default.

    Raises ValueError: another policy or name, a value that is no number or out of range, or none
        for one without a default.
    """
    kind, _, given = text.partition(":")
    make, known, needed = _MADE.get(kind, (None, set[str](), set[str]()))
    values: dict[str, int] = {}
    for part in filter(None, given.split(",")):
        name, _, value = part.partition("=")
        if name not in known or name in values or not value.isdecimal():
            make = None
            break
        values[name] = int(value)
    if make is None or needed - values.keys():
        raise ValueError(f"expected {', '.join(EXAMPLES[:-1])} or {EXAMPLES[-1]}, got {text!r}")
    return make(**values)


def num_pages_needed(policy: KvPolicy, page_size: int) -> int:
    """Pages that a pool needs at least: all that a sequence may hold, or those of a prompt of one
    page more than it keeps, and of what it keeps."""
    if isinstance(policy, Streaming):
        return StreamingPages(policy, page_size).max_pages
    return 2 * policy.num_pages(page_size) + 1
