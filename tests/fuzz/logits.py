"""Logits of any finite size, through every family of kernels and every instruction set of the CPU.

A case is a family of tests/helpers/extreme_cases.py with other lengths, heads and capacities, and a
kind of contents: logits from denormals to the end of float32, ties, and rows that see one key. o
and lse must be within the bounds of the reference in float64.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

from helpers.attention_cases import FAR_CONTENTS
from helpers.attention_cases import Case as Attention
from helpers.attention_checks import check
from helpers.backends import Backend
from helpers.extreme_cases import FAMILIES
from jax_attn import _core

_FAMILIES = {case.name: case for case in FAMILIES}
_CONTENTS = (*FAR_CONTENTS, "count", "normal", "peaky", "rising", "falling")
_LENS = (0, 1, 1, 2, 7, 16, 17, 33, 64, 65, 130, 300)


@dataclasses.dataclass(frozen=True)
class Case:
    family: str
    isa: str
    content: str
    fields: tuple[tuple[str, Any], ...]  # of Attention, instead of the family's

    def attention(self) -> Attention:
        fields = dict(self.fields) | {"contents": (self.content,), "repeats": 1}
        return dataclasses.replace(_FAMILIES[self.family], **fields)


class Logits:
    name = "logits"

    def __init__(self) -> None:
        self.done: Counter[str] = Counter()

    def case(self, rng: random.Random) -> Case:
        family = rng.choice(list(_FAMILIES))
        of = _FAMILIES[family]
        fields: dict[str, Any] = {}
        if of.branches is None:
            num_requests = rng.randint(1, 4)
            fields["kv_lens"] = tuple(rng.choice(_LENS) for _ in range(num_requests))
            fields["qo_lens"] = tuple(min(n, rng.choice(_LENS)) for n in fields["kv_lens"])
            fields["num_ctas"] = rng.choice((None, 1, 3))
        if of.schedule == "fixed_split":
            fields["kv_split"] = rng.choice((128, 256, 384))
        if not of.mla:
            fields["num_qo_heads"] = of.num_kv_heads * rng.choice((1, 2, 3, 8))
        isa = rng.choice(_core.supported_cpu_isas())
        content = rng.choice(_CONTENTS)
        return Case(family, isa, content, tuple(sorted(fields.items())))

    def run(self, cases: list[Case]) -> None:
        for case in cases:
            backend = Backend("cpu", case.isa)
            with backend.active():
                check(case.attention(), backend)
            self.done[case.family] += 1

    def smaller(self, case: Case) -> Iterator[Case]:
        fields = dict(case.fields)
        for i in range(len(fields.get("kv_lens", ()))):
            without = {
                name: (*fields[name][:i], *fields[name][i + 1 :]) for name in ("kv_lens", "qo_lens")
            }
            if without["kv_lens"]:
                yield dataclasses.replace(case, fields=tuple(sorted((fields | without).items())))
        for name in fields.keys() - {"kv_lens", "qo_lens"}:
            less = {key: value for key, value in fields.items() if key != name}
            yield dataclasses.replace(case, fields=tuple(sorted(less.items())))

    def check_at_end(self) -> None:
        pass

    def to_json(self, case: Case) -> Any:
        return dataclasses.asdict(case) | {"fields": dict(case.fields)}

    def from_json(self, data: Any) -> Case:
        fields = {key: tuple(v) if isinstance(v, list) else v for key, v in data["fields"].items()}
        return Case(data["family"], data["isa"], data["content"], tuple(sorted(fields.items())))
