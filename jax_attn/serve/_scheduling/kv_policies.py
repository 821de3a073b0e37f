"""What sequences keep of the kv cache, and what decodes read of it, by names: the values of
--kv-policy and --kv-select."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from jax_attn.serve._scheduling.prompt_policy import PromptPolicy
from jax_attn.serve._scheduling.quest import Quest
from jax_attn.serve._scheduling.streaming import Streaming, StreamingPages

KvPolicy: TypeAlias = Streaming | PromptPolicy

EXAMPLES = ("streaming:sinks=4,window=2000", "snapkv:keep=1024,window=32", "h2o:keep=1024")

SELECT_EXAMPLES = ("quest:pages=64",)

# For each policy: what makes it, the values that it takes, and those that it needs.
_Made: TypeAlias = dict[str, tuple[Callable[..., Any], set[str], set[str]]]
_MADE: _Made = {
    "streaming": (Streaming, {"sinks", "window"}, set()),
    "snapkv": (PromptPolicy.snapkv, {"keep", "window"}, {"keep"}),
    "h2o": (PromptPolicy.h2o, {"keep"}, {"keep"}),
}
_SELECTIONS: _Made = {"quest": (Quest, {"pages"}, {"pages"})}


def parse(text: str) -> KvPolicy:
    """From "streaming:sinks=4,window=2000"; a value that is missing has its default.

    Raises ValueError: another policy or name, a value that is no number or out of range, or none
        for one without a default.
    """
    policy: KvPolicy = _parse(text, _MADE, EXAMPLES)
    return policy


def parse_selection(text: str) -> Quest:
    """From "quest:pages=64". Raises as `parse`."""
    selection: Quest = _parse(text, _SELECTIONS, SELECT_EXAMPLES)
    return selection


def _parse(text: str, made: _Made, examples: tuple[str, ...]) -> Any:
    kind, _, given = text.partition(":")
    make, known, needed = made.get(kind, (None, set[str](), set[str]()))
    values: dict[str, int] = {}
    for part in filter(None, given.split(",")):
        name, _, value = part.partition("=")
        if name not in known or name in values or not value.isdecimal():
            make = None
            break
        values[name] = int(value)
    if make is None or needed - values.keys():
        *others, last = examples
        several = f"{', '.join(others)} or " if others else ""
        raise ValueError(f"expected {several}{last}, got {text!r}")
    return make(**values)


def num_pages_needed(policy: KvPolicy, page_size: int) -> int:
    """Pages that a pool needs at least: all that a sequence may hold, or those of a prompt of one
    page more than it keeps, and of what it keeps."""
    if isinstance(policy, Streaming):
        return StreamingPages(policy, page_size).max_pages
    return 2 * policy.num_pages(page_size) + 1
