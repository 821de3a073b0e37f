"""Custom logits and masks: functions of scalars, traced once to a program for the kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn import _core
from jax_attn._variant.program import (
    FACTS,
    LEVELS,
    NORMALIZE,
    OP,
    OPERAND_TYPES,
    OWN_ROWS,
    RULE_CONST,
    RULE_DIM,
    RULE_LOAD,
    TYPE_NAMES,
    WORDS,
    At,
    Builder,
    Instruction,
    constant_value,
    refuse,
)
from jax_attn._variant.trace import as_index, declare, operands_of, trace


class Variant:
    """Custom logits and masks: functions of scalars that run inside the kernels.

    >>> import jax.numpy as jnp
    >>> import jax_attn as ja
    >>> def alibi(score, at, slopes):
    ...     return score - slopes[at.head] * (at.q_pos - at.kv_pos)
    >>> slopes = 2.0 ** -jnp.arange(1, 9)
    >>> variant = ja.Variant(logits=alibi, operands={"slopes": slopes})
    >>> variant == ja.Variant(logits=alibi, operands={"slopes": slopes / 2})  # one program
    True
    >>> spec = ja.AttentionSpec(8, 2, 64, variant=variant, max_qo_tokens=8, max_kv_pages=8)

    logits: fn(score, at, ...) -> the logit, f32. score: sm_scale * (q . k) after the scales of
        float8_e4m3fn and the spec's soft cap. at: an `At`. None: the score.
    mask: fn(at, ...) -> bool, True where the query sees the key. Causality and windows of the spec
        apply as well. None: True.
    normalize: "softmax", or "none": o is the sum over visible keys of logit times value; there is
        no lse, and sinks are not supported.
    operands: name -> array, or anything else with a dtype and a shape. Extra inputs of the
        functions; each function takes the operands that it names after `at`. Up to 8 operands of up
        to 4 axes, float32, bfloat16 or float16 (read as f32), int32 or uint8 (read as i32) or bool.
        An operand without axes is a scalar. Others are indexed with one i32 scalar per axis:
        slopes[at.head]. An index out of range, also a negative one, is clamped to the nearest in
        range, so an axis of length 1 broadcasts. operand.shape has i32 scalars. Only dtype and
        number of axes belong to the variant. The arrays are passed to `attention` as
        variant_operands; new contents and lengths compile nothing.

    JAX traces the functions once, here, to a program of at most 128 scalar operations in f32, i32
    and bool: arithmetic, comparisons, jnp.where, jnp.select, exp, exp2, expm1, log, log1p, powers,
    sqrt, rsqrt, cbrt, sin, cos, tan and their inverses, sinh, cosh, tanh, erf, erfc, logistic, abs,
    sign, floor, ceil, minimum, maximum, integer division, bit operations and casts. Variants with
    equal programs are equal. str() shows the program.

    Raises NotImplementedError, with the primitive and your source line, for an operation that a
    program does not have; ValueError for arguments that do not fit each other.
    """

    words: tuple[int, ...]  # csrc/variant/words.h
    names: tuple[str, ...]  # names of the operands, in order
    logits: Callable[..., Any] | None  # None also for a variant read from a file
    mask: Callable[..., Any] | None

    def __init__(
        self,
        logits: Callable[..., Any] | None = None,
        mask: Callable[..., Any] | None = None,
        normalize: Literal["softmax", "none"] = "softmax",
        operands: Mapping[str, Any] | None = None,
    ) -> None:
        if normalize not in NORMALIZE:
            refuse("normalize", '"softmax" or "none"', normalize)
        if logits is None and mask is None and normalize == "softmax":
            refuse("logits, mask", "at least one function", None)
        for name, function in (("logits", logits), ("mask", mask)):
            if function is not None and not callable(function):
                refuse(name, "a function or None", function)
        declared = declare(operands or {})
        builder = Builder(tuple(declared.values()))
        results = [-1, -1]
        for i, (name, function) in enumerate((("logits", logits), ("mask", mask))):
            if function is not None:
                results[i] = trace(builder, name, function, declared)
        words, _ = builder.words(NORMALIZE.index(normalize), results[0], results[1])
        self._settle(words, tuple(declared), logits, mask)

    @classmethod
    def from_words(cls, words: Sequence[int], names: Sequence[str]) -> Variant:
        """The variant of a saved program. It has no Python functions.

        words, names: fields of another Variant. Raises ValueError for words that are no program.
        """
        variant = cls.__new__(cls)
        variant._settle(tuple(words), tuple(names), None, None)
        return variant

    def _settle(
        self,
        words: tuple[int, ...],
        names: tuple[str, ...],
        logits: Callable[..., Any] | None,
        mask: Callable[..., Any] | None,
    ) -> None:
        if not all(type(word) is int and -(2**63) <= word < 2**63 for word in words):
            refuse("words", "integers of 64 bits", words)
        if not words:
            refuse("words", "those of a program", words)
        if not all(isinstance(name, str) for name in names):
            refuse("names", "strings", names)
        try:
            self._levels = _core.program_levels(list(words))
        except ValueError as error:
            raise ValueError(f"{OP}: {error}") from None
        self.words, self.names, self.logits, self.mask = words, names, logits, mask
        if len(names) != len(self.operand_types) or len(set(names)) != len(names):
            refuse("names", f"{len(self.operand_types)} different ones", names)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Variant):
            return NotImplemented
        return self.words == other.words and self.names == other.names

    def __hash__(self) -> int:
        return hash((self.words, self.names))

    def __reduce__(self) -> Any:
        """State for copies and pickles: the program, without the functions."""
        return Variant.from_words, (self.words, self.names)

    @property
    def normalizes(self) -> bool:
        """Whether P is a softmax of the logits."""
        return self.words[1] == 1

    @property
    def operand_types(self) -> tuple[tuple[str, int], ...]:
        """(dtype, number of axes) of each operand, in order."""
        pairs = self.words[5 : 5 + 2 * self.words[4]]
        dtypes = list(OPERAND_TYPES)
        return tuple((dtypes[pairs[i]], pairs[i + 1]) for i in range(0, len(pairs), 2))

    @property
    def instructions(self) -> list[Instruction]:
        """The values of the program, in order."""
        rest = self.words[6 + 2 * self.words[4] :]
        size = 2 + _core.max_instruction_args
        lines = []
        for i, level in enumerate(self._levels):
            code, kind, *args = rest[i * size : (i + 1) * size]
            _, rule, num_args, _ = _core.variant_ops[code]
            if rule == RULE_LOAD:
                num_args = 1 + self.operand_types[args[0]][1]
            elif rule in (RULE_CONST, RULE_DIM):
                num_args = 1 + (rule == RULE_DIM)
            lines.append(Instruction(WORDS[code], kind, tuple(args[:num_args]), LEVELS[level]))
        return lines

    @property
    def results(self) -> tuple[int, int]:
        """The numbers of the logit's and the mask's values; -1: the score, and True."""
        return self.words[2], self.words[3]

    @property
    def needs_own_rows(self) -> bool:
        """Whether it reads fields that differ between the queries of a shared prefix."""
        return any(x.op in OWN_ROWS for x in self.instructions)

    @property
    def logits_need_own_rows(self) -> bool:
        """Whether the logits do; only this matters in blocks where the mask hides nothing."""
        instructions = self.instructions
        is_read = [i == self.results[0] for i in range(len(instructions))]
        for i, x in reversed(list(enumerate(instructions))):
            if is_read[i] and x.op in OWN_ROWS:
                return True
            for value in x.value_args if is_read[i] else ():
                is_read[value] = True
        return False

    @property
    def reads_heads(self) -> bool:
        """Whether it reads the number of a head."""
        return any(x.op in ("head", "kv_head") for x in self.instructions)

    @property
    def reads_places(self) -> bool:
        """Whether it reads the place of a query or of a key, or lengths: anything but the head."""
        return any(x.op in FACTS and x.op not in ("head", "kv_head") for x in self.instructions)

    def __str__(self) -> str:
        """The program: one line per value, with how often it is computed."""
        return "\n".join(self.lines())

    def __repr__(self) -> str:
        softmax = NORMALIZE[self.words[1]]
        return f"Variant(<{len(self.instructions)} values>, {softmax!r}, operands={self.names})"

    def lines(self) -> list[str]:
        instructions = self.instructions

        def shown(value: int) -> str:
            x = instructions[value]
            if x.op == "const":
                return str(constant_value(x.kind, x.args[0]))
            return x.op if x.op in FACTS or x.op == "score" else f"v{value}"

        lines = []
        for name, (dtype, rank) in zip(self.names, self.operand_types, strict=True):
            lines.append(f"operand {name}: {dtype}[{', '.join('?' * rank)}]")
        for i, x in enumerate(instructions):
            if shown(i) != f"v{i}":
                continue
            if x.op == "load":
                indices = ", ".join(shown(a) for a in x.args[1:])
                text = self.names[x.args[0]] + (f"[{indices}]" if x.args[1:] else "")
            elif x.op == "dim":
                text = f"{self.names[x.args[0]]}.shape[{x.args[1]}]"
            else:
                text = f"{x.op}({', '.join(shown(a) for a in x.args)})"
            lines.append(f"{f'v{i}: {TYPE_NAMES[x.kind]} = {text}':<44} per {x.level}")
        logits, visible = self.results
        result = "score" if logits < 0 else shown(logits)
        lines.append(f"{'logit' if self.normalizes else 'weight'} = {result}")
        if visible >= 0:
            lines.append(f"visible = {shown(visible)}")
        return lines

    def apply(self, score: Any, at: At, operands: Mapping[str, Any]) -> tuple[Any, Any]:
        """(logits, visible) for many logits at once, by the Python functions under vmap.

        Used by the reference; kernels run the program.

        score: an array, f32 or f64.
        at: i32 arrays that broadcast to the shape of score.
        operands: name -> array.

        A result is None if the variant does not have its function.
        """
        logits_value, visible_value = self.results
        if (logits_value >= 0 and self.logits is None) or (
            visible_value >= 0 and self.mask is None
        ):
            raise NotImplementedError(
                f"{OP}: apply: variants made of Python functions are supported, got one that was"
                " read from a file."
            )
        shape = np.shape(score)
        # Pad to a power of two, so that batches of many lengths compile few functions.
        size = 1 << max(0, int(np.prod(shape)) - 1).bit_length()
        score, at = jax.tree.map(
            lambda x: np.resize(np.broadcast_to(x, shape), size), (np.asarray(score), at)
        )
        operands = {name: np.asarray(operands[name]) for name in self.names}

        def evaluate(function: Callable[..., Any], *arguments: Any) -> Any:
            return _mapped(function, operands, *arguments)[: int(np.prod(shape))].reshape(shape)

        logits = None if self.logits is None else evaluate(self.logits, score, at)
        visible = None if self.mask is None else evaluate(self.mask, at)
        return logits, visible


@functools.partial(jax.jit, static_argnums=0)
def _mapped(function: Callable[..., Any], operands: dict[str, Any], *arguments: Any) -> Any:
    of = {name: _Indexed(array) for name, array in operands.items()}
    values = {name: of[name].value for name in operands_of("", function, of)}
    return jax.vmap(lambda *a: jnp.asarray(function(*a, **values)))(*arguments)


class _Indexed:
    """An operand for the reference: an array with the same indexing."""

    def __init__(self, array: jax.Array) -> None:
        kind = OPERAND_TYPES[array.dtype.name]
        self._array = array.astype((jnp.float32, jnp.int32, jnp.bool_)[kind])
        self.shape, self.ndim, self.dtype = array.shape, array.ndim, array.dtype

    def __getitem__(self, indices: Any) -> Any:
        indices = indices if isinstance(indices, tuple) else (indices,)
        clamped = tuple(
            jnp.clip(as_index("", i), 0, n - 1) for i, n in zip(indices, self.shape, strict=True)
        )
        return self._array[clamped]

    @property
    def value(self) -> Any:
        return self if self.ndim else self._array
