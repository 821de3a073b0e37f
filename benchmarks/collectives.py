"""The collectives of a compiled module, read from its HLO."""

from __future__ import annotations

import collections
import re
from math import prod

_KINDS = r"all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
_BITS = {"f32": 32, "s32": 32, "u32": 32, "bf16": 16, "f16": 16, "u16": 16, "pred": 8, "u8": 8}


def collectives(text: str) -> list[tuple[str, int]]:
    """Returns (kind, bytes of the results on one device) for every collective of a module.

    The result of an asynchronous start op holds its operands, its results and scalars of the
    runtime. An all-reduce start holds only its results.
    """
    found = []
    for shapes, kind, start in re.findall(rf" = (.*?) ({_KINDS})(-start)?\(", text):
        arrays = re.findall(r"(\w+)\[([\d,]*)\]", shapes)
        if start and kind != "all-reduce":
            arrays = [x for x in arrays if x[1]]
            arrays = arrays[len(arrays) // 2 :]
        size = sum(_BITS[t] // 8 * prod(map(int, filter(None, d.split(",")))) for t, d in arrays)
        found.append((kind, size))
    return found


def executed(text: str) -> collections.Counter[tuple[str, int]]:
    """Returns how often each of `collectives` runs; a loop's body counts once per iteration."""
    bodies = dict(re.findall(r"^(?:ENTRY )?%?([\w.-]+) [^\n]*\{\n(.*?)^\}", text, re.M | re.S))
    calls: dict[str, list[tuple[str, int]]] = collections.defaultdict(list)
    for caller, body in bodies.items():
        for line in body.splitlines():
            turns = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
            for callee in re.findall(r"(?:body|calls|to_apply)=%?([\w.-]+)", line):
                calls[callee].append((caller, int(turns[1]) if turns else 1))
    (entry,) = re.findall(r"^ENTRY %?([\w.-]+)", text, re.M)

    def runs(name: str) -> int:
        return 1 if name == entry else sum(n * runs(caller) for caller, n in calls[name])

    found: collections.Counter[tuple[str, int]] = collections.Counter()
    for name, body in bodies.items():
        for collective in collectives(body):
            found[collective] += runs(name)
    return found
