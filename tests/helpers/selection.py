"""A covering selection of tests, for `make test`: --covering SECONDS.

1. Every test function of at most COSTLY seconds takes part: with all its sets of parameters where
   these take at most WHOLE seconds together, else with one.
2. Then sets of parameters are added that have pairs of values which no selected test of their file
   has yet, most pairs a second first, until the selected tests are expected to take SECONDS of
   processor time. A value belongs to an argument, to a field of a dataclass (a Case) other
   than its name, or to an element of a tuple. These may be of functions of at most DEAREST
   seconds; the dearer ones start servers, engines or meshes.

Costs are recorded, not measured, so every machine selects the same tests. costs.json has the
seconds of one set of parameters of each function that takes a twentieth of a second or more. To
record the functions of a run again: python -m pytest --record-costs ..., on an idle machine.
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

from helpers.paths import DATA, ROOT

COSTS = DATA / "costs.json"
COSTLY, DEAREST = 0.4, 1.0  # seconds
WHOLE = 0.5
CHEAP = 0.02  # seconds of a test that is not in costs.json
_RECORDED = 0.05

Pair = tuple[Any, ...]


def function_of(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def cost_of(item: pytest.Item, costs: dict[str, float]) -> float:
    return costs.get(function_of(item.nodeid), CHEAP)


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
    """The pairs of values of an item; an object's pairs are made once."""

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
    """Selects tests of `items` by the rule above."""
    pairs_of, pairs = _Pairs(), {}
    by_function: dict[str, list[pytest.Item]] = collections.defaultdict(list)
    items = [item for item in items if cost_of(item, costs) <= DEAREST]
    for item in items:
        pairs[item] = pairs_of.of(item)
        if cost_of(item, costs) <= COSTLY:
            by_function[function_of(item.nodeid)].append(item)
    seen: dict[str, set[Pair]] = collections.defaultdict(set)  # file -> covered pairs
    selected: set[pytest.Item] = set()
    spent = 0.0

    def file_of(item: pytest.Item) -> str:
        return item.nodeid.partition("::")[0]

    def take(item: pytest.Item) -> None:
        nonlocal spent
        selected.add(item)
        seen[file_of(item)] |= pairs[item]
        spent += cost_of(item, costs)

    # Functions with few sets first: functions with many can still add the missing pairs.
    for tests in sorted(by_function.values(), key=len):
        if sum(cost_of(item, costs) for item in tests) <= WHOLE:
            for item in tests:
                take(item)
        else:
            take(max(tests, key=lambda item: len(pairs[item] - seen[file_of(item)])))

    def gain(item: pytest.Item) -> float:
        return len(pairs[item] - seen[file_of(item)]) / cost_of(item, costs)

    # The gain of an item only shrinks, so a recomputed best item stays the best one.
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
    return json.loads(COSTS.read_text())


def processor_seconds() -> float:
    """Processor time of this process and of its ended children."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _exists(function: str) -> bool:
    file, _, name = function.partition("::")
    path = ROOT / file
    return path.exists() and f"def {name.rpartition('::')[2]}(" in path.read_text()


def write_costs(seconds: Iterable[tuple[str, float]]) -> None:
    """Writes costs.json. Functions that did not run keep their costs as long as they exist.

    seconds: (id, seconds) of each test that ran; a function costs its median.
    """
    by_function = collections.defaultdict(list)
    for nodeid, cost in seconds:
        by_function[function_of(nodeid)].append(cost)
    costs = {name: cost for name, cost in read_costs().items() if _exists(name)}
    costs |= {name: sorted(each)[len(each) // 2] for name, each in by_function.items()}
    kept = {name: round(cost, 2) for name, cost in sorted(costs.items()) if cost >= _RECORDED}
    COSTS.write_text(json.dumps(kept, indent=1) + "\n")
