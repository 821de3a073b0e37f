"""A covering selection of tests, for `make test`: --covering SECONDS.

1. Every test function takes part, with one set of its parameters.
2. Then sets of parameters are added that bring pairs of values which no selected test of their file
   has, most pairs a second first, until the selected tests are expected to take SECONDS of
   processor time. A value is that of an argument, of a field of a dataclass (a Case), or of a
   tuple's element.

Costs are recorded, not measured, so every machine selects the same tests. costs.json has the
seconds of one set of parameters of each function that takes a quarter of a second or more. To
record it again: python -m pytest --record-costs, on an idle machine.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
import json
import resource
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from helpers.paths import DATA

COSTS = DATA / "costs.json"
_CHEAP = 0.05  # seconds of a test that costs.json does not have
_RECORDED = 0.25

Pair = tuple[Any, ...]


def function_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _values(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            if field.name != "name":
                yield f"{name}.{field.name}", repr(getattr(value, field.name))
    elif isinstance(value, tuple):
        for i, element in enumerate(value):
            yield f"{name}[{i}]", getattr(element, "__name__", None) or repr(element)
    else:
        yield name, getattr(value, "__name__", None) or repr(value)


class _Pairs:
    """The pairs of values of an item; those of an object are made once."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, int], list[tuple[str, str]]] = {}

    def of(self, item: pytest.Item) -> frozenset[Pair]:
        callspec = getattr(item, "callspec", None)
        if callspec is None:
            return frozenset()
        values: list[tuple[str, str]] = []
        for name, value in callspec.params.items():
            key = name, id(value)
            if key not in self._values:
                self._values[key] = list(_values(name, value))
            values += self._values[key]
        pairs = itertools.combinations(sorted(set(values)), 2)
        return frozenset(pairs) if len(values) > 1 else frozenset((value,) for value in values)


def covering(items: list[pytest.Item], seconds: float, costs: dict[str, float]) -> set[pytest.Item]:
    """The selected ones of `items`, by the rule above."""
    pairs_of, pairs = _Pairs(), {}
    by_function: dict[str, list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        pairs[item] = pairs_of.of(item)
        by_function[function_of(item)].append(item)
    seen: dict[str, set[Pair]] = collections.defaultdict(set)  # file -> pairs that are covered
    selected: set[pytest.Item] = set()
    spent = 0.0

    def file_of(item: pytest.Item) -> str:
        return item.nodeid.partition("::")[0]

    def take(item: pytest.Item) -> None:
        nonlocal spent
        selected.add(item)
        seen[file_of(item)] |= pairs[item]
        spent += costs.get(function_of(item), _CHEAP)

    # Functions with few sets first: those with many can make up for what these leave out.
    for tests in sorted(by_function.values(), key=len):
        take(max(tests, key=lambda item: len(pairs[item] - seen[file_of(item)])))

    def gain(item: pytest.Item) -> float:
        new = len(pairs[item] - seen[file_of(item)])
        return new / costs.get(function_of(item), _CHEAP)

    # What an item brings only shrinks, so the best one is known once it has been looked at again.
    heap = [(-gain(item), i) for i, item in enumerate(items) if item not in selected]
    heapq.heapify(heap)
    while heap and spent < seconds:
        last, i = heapq.heappop(heap)
        now = gain(items[i])
        if now <= 0:
            continue
        if now < -last:
            heapq.heappush(heap, (-now, i))
            continue
        take(items[i])
    return selected


def read_costs() -> dict[str, float]:
    return json.loads(COSTS.read_text()) if COSTS.is_file() else {}


def processor_seconds() -> float:
    """Of this process and of its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def write_costs(seconds: Iterable[tuple[str, float]]) -> None:
    """seconds: of each test, by its id. A function costs what its median set of parameters does."""
    by_function = collections.defaultdict(list)
    for nodeid, cost in seconds:
        by_function[nodeid.partition("[")[0]].append(cost)
    medians = {name: sorted(costs)[len(costs) // 2] for name, costs in by_function.items()}
    kept = {name: round(cost, 2) for name, cost in sorted(medians.items()) if cost >= _RECORDED}
    COSTS.write_text(json.dumps(kept, indent=1) + "\n")
