"""The program of a variant: scalar operations, as kernels run them (csrc/variant)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np

from jax_attn import _core

OP = "Variant"
NORMALIZE = ("none", "softmax")  # order of normalizes in csrc/variant/program.h
F32, I32, BOOL = range(3)  # order of VariantType
TYPE_NAMES = ("f32", "i32", "bool")
LEVELS = ("call", "row", "key", "logit")  # order of VariantLevel
# Order of OperandType, and the type that elements have in the program.
OPERAND_TYPES = {
    "float32": F32,
    "bfloat16": F32,
    "float16": F32,
    "int32": I32,
    "uint8": I32,
    "bool": BOOL,
}
WORDS = [word for word, *_ in _core.variant_ops]  # names of operations, by number
_CODES = {word: code for code, word in enumerate(WORDS)}
RULE_CONST, RULE_AT, RULE_LOAD, RULE_DIM = range(4)  # order of VariantRule


@dataclasses.dataclass(frozen=True)
class At:
    """The logit for which a variant's function is called. Every field is an i32 scalar.

    head, kv_head: head of q, and of k and v. request: its number in the batch.
    q_pos, kv_pos: positions in the request of the query token and of the key.
    q_row: the row of q. kv_row: ragged: the row of k; paged: page id * page_size + slot.
    q_len, kv_len: query tokens and keys of the request.
    """

    head: Any
    kv_head: Any
    request: Any
    q_pos: Any
    kv_pos: Any
    q_row: Any
    kv_row: Any
    q_len: Any
    kv_len: Any


FACTS = tuple(field.name for field in dataclasses.fields(At))
# Fields that differ between the queries of a shared prefix.
OWN_ROWS = ("request", "q_pos", "q_row", "q_len", "kv_len")
jax.tree_util.register_dataclass(At, FACTS, [])


def refuse(name: str, expected: str, got: Any) -> NoReturn:
    raise ValueError(f"{OP}: {name}: expected {expected}, got {got!r:.100}.")


class Instruction(NamedTuple):
    """One value of a program (csrc/variant/program.h)."""

    op: str
    kind: int  # its type: f32, i32, bool
    args: tuple[int, ...]
    level: str  # what it depends on: "call", "row", "key" or "logit"

    @property
    def num_own_args(self) -> int:
        """Number of leading args that are not values."""
        return _num_own_args(self.op, len(self.args))

    @property
    def value_args(self) -> tuple[int, ...]:
        """The args that are values."""
        return self.args[self.num_own_args :]


def _num_own_args(op: str, num_args: int) -> int:
    rule = _core.variant_ops[_CODES[op]][1]
    if rule in (RULE_CONST, RULE_AT, RULE_DIM):
        return num_args
    return 1 if rule == RULE_LOAD else 0


def constant_value(kind: int, bits: int) -> np.generic:
    return np.int32(bits).view(np.float32) if kind == F32 else (np.int32, np.bool_)[kind - 1](bits)


class Declared(NamedTuple):
    number: int
    dtype: str
    rank: int


class Builder:
    """A program under construction; equal values are merged."""

    def __init__(self, operands: tuple[Declared, ...]) -> None:
        self._operands = operands
        self._values: dict[tuple[str, int, tuple[int, ...]], int] = {}

    def add(self, op: str, kind: int, *args: int) -> int:
        if op in _FOLDS and None not in (known := [self.constant_of(arg) for arg in args]):
            return self.constant(fold(op, known), kind)
        return self._values.setdefault((op, kind, args), len(self._values))

    def select(self, kind: int, which: int, yes: int, no: int) -> int:
        if (known := self.constant_of(which)) is not None:
            return yes if known else no
        return no if yes == no else self.add("select", kind, which, yes, no)

    def kind(self, value: int) -> int:
        return list(self._values)[value][1]

    def constant_of(self, value: int) -> Any:
        op, kind, args = list(self._values)[value]
        return constant_value(kind, args[0]) if op == "const" else None

    def constant(self, value: Any, kind: int) -> int:
        if kind == F32:
            return self.add("const", kind, int(np.float32(value).view(np.int32)))
        return self.add("const", kind, int(value))

    def words(
        self, normalizes: int, logits: int, visible: int, kept: Sequence[int] = ()
    ) -> tuple[tuple[int, ...], list[int]]:
        """The program as words, and the new numbers of `kept`.

        It has only the values that the results and `kept` need, in dependency order.
        """
        values = list(self._values)
        numbers: dict[int, int] = {}
        order: list[int] = []

        def visit(value: int) -> None:
            if value in numbers:
                return
            op, _, args = values[value]
            for arg in args[_num_own_args(op, len(args)) :]:
                visit(arg)
            numbers[value] = len(order)
            order.append(value)

        results = []
        for value in (logits, visible):
            if value >= 0:
                visit(value)
            results.append(numbers.get(value, -1))
        for value in kept:
            visit(value)
        if len(order) > _core.max_instructions:
            raise NotImplementedError(
                f"{OP}: up to {_core.max_instructions} values are supported, got {len(order)}."
            )
        dtypes = list(OPERAND_TYPES)
        words = [_core.program_version, normalizes, *results, len(self._operands)]
        for operand in self._operands:
            words += [dtypes.index(operand.dtype), operand.rank]
        words.append(len(order))
        for value in order:
            op, kind, args = values[value]
            num_own = _num_own_args(op, len(args))
            line = [*args[:num_own], *(numbers[a] for a in args[num_own:])]
            words += [_CODES[op], kind, *line]
            words += [0] * (_core.max_instruction_args - len(line))
        return tuple(words), [numbers[value] for value in kept]


def fold(op: str, known: Sequence[Any]) -> Any:
    """The result of an operation on constants; None: it is left to the program."""
    with np.errstate(all="ignore"):
        return None if op not in _FOLDS else _FOLDS[op](*known)


# Constant folding.
_FOLDS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "sign": np.sign,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
}
