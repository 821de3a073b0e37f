"""A user's own logits and masks: functions of scalars, traced once to a program for the kernels."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import source_info_util  # the one place that knows the line of an equation
from jax.extend import core as jax_core

from jax_attn import _core

_OP = "Variant"
_NORMALIZE = ("none", "softmax")  # order of normalizes in csrc/variant/program.h
F32, I32, BOOL = range(3)  # order of VariantType
_TYPE_NAMES = ("f32", "i32", "bool")
_LEVELS = ("call", "row", "key", "logit")  # order of VariantLevel
# Order of OperandType, and the type that elements have in the program.
_OPERAND_TYPES = {
    "float32": F32,
    "bfloat16": F32,
    "float16": F32,
    "int32": I32,
    "uint8": I32,
    "bool": BOOL,
}
_WORDS = [word for word, *_ in _core.variant_ops]  # of operations, by number
_CODES = {word: code for code, word in enumerate(_WORDS)}
_RULE_CONST, _RULE_AT, _RULE_LOAD, _RULE_DIM = range(4)  # order of VariantRule


@dataclasses.dataclass(frozen=True)
class At:
    """Which logit a function is asked about. Every field is an i32 scalar.

    head, kv_head: of q, and of k and v. request: its number in the batch.
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
# Those that the queries of a shared prefix do not have in common.
_OWN_ROWS = ("request", "q_pos", "q_row", "q_len", "kv_len")
jax.tree_util.register_dataclass(At, FACTS, [])


class Variant:
    """Logits and masks of your own: functions of scalars, which run inside of the kernels.

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
    normalize: "softmax". "none": o is the sum of logits times values, where a key that is not seen
        has no part; there is no lse, and no sinks.
    operands: name -> array, or anything else with a dtype and a shape: what the functions read
        besides. Each function takes those that it names after `at`. Up to 8, with up to 4 axes, of
        float32, bfloat16 or float16 (read as f32), int32 or uint8 (as i32) or bool. An operand
        without axes is a scalar. Others are indexed, one i32 scalar an axis: slopes[at.head]. An
        index out of range is clamped to the nearest in range, also a negative one, so an axis of
        length 1 broadcasts. operand.shape has i32 scalars. Only dtype and number of axes belong to
        the variant: `attention` gets the arrays themselves, as variant_operands, and new contents
        and lengths compile nothing.

    The functions are traced here, once, by JAX, to a program of at most 128 scalar operations in
    f32, i32 and bool: arithmetic, comparisons, jnp.where, exp, exp2, log, log1p, tanh, logistic,
    sqrt, rsqrt, abs, sign, floor, ceil, minimum, maximum, powers of constant integers, integer
    division, bit operations and casts. Variants with equal programs are equal. str() shows the
    program.

    Raises NotImplementedError, with the primitive and your line, for what a program cannot say;
    ValueError for arguments that do not fit each other.
    """

    words: tuple[int, ...]  # csrc/variant/words.h
    names: tuple[str, ...]  # of the operands, in order
    logits: Callable[..., Any] | None  # None, too, of a variant that was read from a file
    mask: Callable[..., Any] | None

    def __init__(
        self,
        logits: Callable[..., Any] | None = None,
        mask: Callable[..., Any] | None = None,
        normalize: Literal["softmax", "none"] = "softmax",
        operands: Mapping[str, Any] | None = None,
    ) -> None:
        if normalize not in _NORMALIZE:
            _refuse("normalize", '"softmax" or "none"', normalize)
        if logits is None and mask is None and normalize == "softmax":
            _refuse("logits, mask", "at least one function", None)
        for name, function in (("logits", logits), ("mask", mask)):
            if function is not None and not callable(function):
                _refuse(name, "a function or None", function)
        declared = _declare(operands or {})
        builder = Builder(tuple(declared.values()))
        results = [-1, -1]
        for i, (name, function) in enumerate((("logits", logits), ("mask", mask))):
            if function is not None:
                results[i] = builder.trace(name, function, declared)
        words, _ = builder.words(_NORMALIZE.index(normalize), results[0], results[1])
        self._settle(words, tuple(declared), logits, mask)

    @classmethod
    def from_words(cls, words: Sequence[int], names: Sequence[str]) -> Variant:
        """The variant of a program that was written before. It has no Python functions.

        words, names: those of another Variant. Raises ValueError for words that are no program.
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
            _refuse("words", "integers of 64 bits", words)
        if not words:
            _refuse("words", "those of a program", words)
        if not all(isinstance(name, str) for name in names):
            _refuse("names", "strings", names)
        try:
            self._levels = _core.program_levels(list(words))
        except ValueError as error:
            raise ValueError(f"{_OP}: {error}") from None
        self.words, self.names, self.logits, self.mask = words, names, logits, mask
        if len(names) != len(self.operand_types) or len(set(names)) != len(names):
            _refuse("names", f"{len(self.operand_types)} different ones", names)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Variant):
            return NotImplemented
        return self.words == other.words and self.names == other.names

    def __hash__(self) -> int:
        return hash((self.words, self.names))

    def __reduce__(self) -> Any:
        """Of copies and pickles: the program, not the functions."""
        return Variant.from_words, (self.words, self.names)

    @property
    def normalizes(self) -> bool:
        """Whether weights are a softmax of the logits."""
        return self.words[1] == 1

    @property
    def operand_types(self) -> tuple[tuple[str, int], ...]:
        """(dtype, number of axes) of each operand, in order."""
        pairs = self.words[5 : 5 + 2 * self.words[4]]
        dtypes = list(_OPERAND_TYPES)
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
            if rule == _RULE_LOAD:
                num_args = 1 + self.operand_types[args[0]][1]
            elif rule in (_RULE_CONST, _RULE_DIM):
                num_args = 1 + (rule == _RULE_DIM)
            lines.append(Instruction(_WORDS[code], kind, tuple(args[:num_args]), _LEVELS[level]))
        return lines

    @property
    def results(self) -> tuple[int, int]:
        """The values that are the logit and the mask; -1: the score, True."""
        return self.words[2], self.words[3]

    @property
    def needs_own_rows(self) -> bool:
        """Whether it asks for what the queries of a shared prefix do not have in common."""
        return any(x.op in _OWN_ROWS for x in self.instructions)

    @property
    def logits_need_own_rows(self) -> bool:
        """Whether the logits do, which is all that counts where the mask hides nothing."""
        instructions = self.instructions
        is_read = [i == self.results[0] for i in range(len(instructions))]
        for i, x in reversed(list(enumerate(instructions))):
            if is_read[i] and x.op in _OWN_ROWS:
                return True
            values = x.args[1:] if x.op == "load" else () if x.op in ("const", "dim") else x.args
            for value in values if is_read[i] else ():
                is_read[value] = True
        return False

    @property
    def reads_heads(self) -> bool:
        """Whether it depends on the number of a head."""
        return any(x.op in ("head", "kv_head") for x in self.instructions)

    def __str__(self) -> str:
        """The program: a line a value, with how often it is computed."""
        return "\n".join(self.lines())

    def __repr__(self) -> str:
        softmax = _NORMALIZE[self.words[1]]
        return f"Variant(<{len(self.instructions)} values>, {softmax!r}, operands={self.names})"

    def lines(self) -> list[str]:
        instructions = self.instructions

        def shown(value: int) -> str:
            x = instructions[value]
            if x.op == "const":
                return str(_constant(x.kind, x.args[0]))
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
            lines.append(f"{f'v{i}: {_TYPE_NAMES[x.kind]} = {text}':<44} per {x.level}")
        logits, visible = self.results
        result = "score" if logits < 0 else shown(logits)
        lines.append(f"{'logit' if self.normalizes else 'weight'} = {result}")
        if visible >= 0:
            lines.append(f"visible = {shown(visible)}")
        return lines

    def apply(self, score: Any, at: At, operands: Mapping[str, Any]) -> tuple[Any, Any]:
        """(logits, visible) of many logits at once, by the Python functions under vmap.

        score: an array, f32 or f64.
        at: of i32 arrays that broadcast to its shape.
        operands: the arrays by name.

        Either result is None without its function. For the reference: kernels run the program.
        """
        logits_value, visible_value = self.results
        if (logits_value >= 0 and self.logits is None) or (
            visible_value >= 0 and self.mask is None
        ):
            raise NotImplementedError(
                f"{_OP}: apply: variants made of Python functions are supported, got one that was"
                " read from a file."
            )
        shape = np.shape(score)
        # Padded to a power of two, so that batches of many lengths compile few functions.
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
    values = {name: of[name].value for name in _wanted("", function, of)}
    return jax.vmap(lambda *a: jnp.asarray(function(*a, **values)))(*arguments)


class Instruction(NamedTuple):
    """One value of a program (csrc/variant/program.h)."""

    op: str
    kind: int  # its type: f32, i32, bool
    args: tuple[int, ...]
    level: str  # what it depends on: "call", "row", "key" or "logit"

    @property
    def num_own_args(self) -> int:
        """How many of args, the first ones, are not values."""
        rule = _core.variant_ops[_CODES[self.op]][1]
        if rule in (_RULE_CONST, _RULE_AT, _RULE_DIM):
            return len(self.args)
        return 1 if rule == _RULE_LOAD else 0


def _constant(kind: int, bits: int) -> np.generic:
    return np.int32(bits).view(np.float32) if kind == F32 else (np.int32, np.bool_)[kind - 1](bits)


def _refuse(name: str, expected: str, got: Any) -> NoReturn:
    raise ValueError(f"{_OP}: {name}: expected {expected}, got {got!r:.100}.")


# ---- operands ------------------------------------------------------------------------------------


class Declared(NamedTuple):
    number: int
    dtype: str
    rank: int


def _declare(operands: Mapping[str, Any]) -> dict[str, Declared]:
    if not isinstance(operands, Mapping):
        _refuse("operands", "a dict of name: array", operands)
    if len(operands) > _core.max_variant_operands:
        raise NotImplementedError(
            f"{_OP}: operands: up to {_core.max_variant_operands} are supported, got"
            f" {len(operands)}."
        )
    declared = {}
    for number, (name, array) in enumerate(operands.items()):
        if not isinstance(name, str) or not name.isidentifier():
            _refuse("operands", "names that are Python identifiers", name)
        if not hasattr(array, "dtype") or not hasattr(array, "shape"):
            array = np.asarray(array)
            if array.dtype.kind == "f":
                array = array.astype(np.float32)
            elif array.dtype.kind == "i":
                array = array.astype(np.int32)
        dtype, rank = jnp.dtype(array.dtype).name, len(array.shape)
        if dtype not in _OPERAND_TYPES:
            raise NotImplementedError(
                f"{_OP}: operands: {name}: {', '.join(_OPERAND_TYPES)} are supported, got {dtype};"
                " cast it."
            )
        if rank > _core.max_operand_rank:
            raise NotImplementedError(
                f"{_OP}: operands: {name}: up to {_core.max_operand_rank} axes are supported, got"
                f" {rank}."
            )
        declared[name] = Declared(number, dtype, rank)
    return declared


def _wanted(what: str, function: Callable[..., Any], operands: Mapping[str, Any]) -> list[str]:
    """The operands that a function takes, by its signature."""
    first = 1 if what == "mask" else 2
    parameters = list(inspect.signature(function).parameters.values())
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return list(operands)
    keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = [p for p in parameters[first if what else 0 :] if p.kind in keyword]
    wanted = [p.name for p in named if p.name in operands]
    missing = [p.name for p in named if p.name not in operands and p.default is p.empty]
    if what and missing:
        _refuse(what, f"a function of its operands ({', '.join(operands) or 'none'})", missing)
    return wanted


_load_p = jax_core.Primitive("jax_attn_load")
_load_p.def_abstract_eval(
    lambda *_, operand, kind: jax.core.ShapedArray((), (jnp.float32, jnp.int32, jnp.bool_)[kind])
)
_dim_p = jax_core.Primitive("jax_attn_dim")
_dim_p.def_abstract_eval(lambda *, operand, axis: jax.core.ShapedArray((), jnp.int32))


class _Operand:
    """An operand while a function is traced: indexing is all there is."""

    def __init__(self, name: str, declared: Declared) -> None:
        self._name, self._declared = name, declared
        self.ndim, self.dtype = declared.rank, jnp.dtype(declared.dtype)

    @property
    def shape(self) -> tuple[Any, ...]:
        number, _, rank = self._declared
        return tuple(_dim_p.bind(operand=number, axis=axis) for axis in range(rank))

    def __getitem__(self, indices: Any) -> Any:
        number, dtype, rank = self._declared
        indices = indices if isinstance(indices, tuple) else (indices,)
        if len(indices) != rank:
            _refuse(self._name, f"{rank} indices, one an axis", f"{len(indices)} indices")
        indices = [_index(self._name, i) for i in indices]
        return _load_p.bind(*indices, operand=number, kind=_OPERAND_TYPES[dtype])

    @property
    def value(self) -> Any:
        return self if self._declared.rank else self[()]


class _Indexed:
    """An operand for the reference: an array with the same indexing."""

    def __init__(self, array: jax.Array) -> None:
        kind = _OPERAND_TYPES[array.dtype.name]
        self._array = array.astype((jnp.float32, jnp.int32, jnp.bool_)[kind])
        self.shape, self.ndim, self.dtype = array.shape, array.ndim, array.dtype

    def __getitem__(self, indices: Any) -> Any:
        indices = indices if isinstance(indices, tuple) else (indices,)
        clamped = tuple(
            jnp.clip(_index("", i), 0, n - 1) for i, n in zip(indices, self.shape, strict=True)
        )
        return self._array[clamped]

    @property
    def value(self) -> Any:
        return self if self.ndim else self._array


def _index(name: str, index: Any) -> Any:
    is_number = not isinstance(index, (slice, list, type(None), type(Ellipsis)))
    index = jnp.asarray(index) if is_number else index
    if not is_number or index.shape or index.dtype.kind not in "iub":
        _refuse(name, "integer scalars as indices", index)
    return index.astype(jnp.int32)


# ---- tracing -------------------------------------------------------------------------------------


class Builder:
    """Values of the program so far; equal ones are one."""

    def __init__(self, operands: tuple[Declared, ...]) -> None:
        self._operands = operands
        self._values: dict[tuple[str, int, tuple[int, ...]], int] = {}

    # Values, each a number.

    def add(self, op: str, kind: int, *args: int) -> int:
        if (fold := _FOLDS.get(op)) is not None:
            known = [self.constant_of(arg) for arg in args]
            if None not in known:
                with np.errstate(all="ignore"):
                    return self.constant(fold(*known), kind)
        return self._values.setdefault((op, kind, args), len(self._values))

    def kind(self, value: int) -> int:
        return list(self._values)[value][1]

    def constant_of(self, value: int) -> Any:
        op, kind, args = list(self._values)[value]
        return _constant(kind, args[0]) if op == "const" else None

    def constant(self, value: Any, kind: int) -> int:
        if kind == F32:
            return self.add("const", kind, int(np.float32(value).view(np.int32)))
        return self.add("const", kind, int(value))

    # From functions to values.

    def trace(self, what: str, function: Callable[..., Any], declared: dict[str, Declared]) -> int:
        """The value that the function returns."""
        wanted = _wanted(what, function, declared)
        facts = At(**{fact: jax.ShapeDtypeStruct((), jnp.int32) for fact in FACTS})
        score = jax.ShapeDtypeStruct((), jnp.float32)
        arguments = (score, facts) if what == "logits" else (facts,)

        def call(*arguments: Any) -> Any:
            operands = {name: _Operand(name, declared[name]).value for name in wanted}
            result = function(*arguments, **operands)
            if result is None or isinstance(result, (tuple, list, dict)):
                _refuse(what, "a function that returns a scalar", result)
            result = jnp.asarray(result)
            if result.shape:
                _refuse(what, "a function that returns a scalar", result)
            if what == "mask" and result.dtype != jnp.bool_:
                _refuse(what, "a function that returns a bool", str(result.dtype))
            if what == "logits" and result.dtype == jnp.bool_:
                _refuse(what, "a function that returns a number", str(result.dtype))
            return result if what == "mask" else result.astype(jnp.float32)

        try:
            with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
                closed = jax.make_jaxpr(call)(*arguments)
        except (
            jax.errors.ConcretizationTypeError,
            jax.errors.TracerArrayConversionError,
            jax.errors.TracerIntegerConversionError,
        ) as error:
            raise NotImplementedError(
                f"{_OP}: {what}: Python control flow and numpy on traced values are not supported"
                f" at {_raised_at(error)}; use jnp.where and jnp functions, and make an array that"
                " they index one of the operands."
            ) from None
        except TypeError as error:
            if _Operand.__name__ not in str(error):
                raise
            raise NotImplementedError(
                f"{_OP}: {what}: operands are supported where they are indexed, name[i, ...], one"
                f" element at a time, got one as a whole at {_raised_at(error)}."
            ) from None
        names = ("score", *FACTS) if what == "logits" else FACTS
        values = [self.add(name, F32 if name == "score" else I32) for name in names]
        (result,) = self._run(what, closed.jaxpr, closed.consts, values)
        return result

    def _run(self, what: str, jaxpr: Any, consts: Sequence[Any], values: Sequence[int]) -> Any:
        known: dict[Any, int] = dict(zip(jaxpr.invars, values, strict=True))
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            if isinstance(const, jax.core.Tracer) or np.shape(const):
                raise NotImplementedError(
                    f"{_OP}: {what}: closing over {jax.typeof(const)} is not supported; make it one"
                    " of the operands."
                )
            known[var] = self.constant(np.asarray(const), _kind(what, var.aval, None))

        def read(atom: Any, eqn: Any) -> int:
            if isinstance(atom, jax_core.Literal):
                return self.constant(atom.val, _kind(what, atom.aval, eqn))
            return known[atom]

        for eqn in jaxpr.eqns:
            for inner in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
                if inner in eqn.params:
                    break
            if inner in eqn.params and eqn.primitive.name in _CALLS:
                body = eqn.params[inner]
                closed = body if hasattr(body, "consts") else jax_core.ClosedJaxpr(body, ())
                arguments = [read(x, eqn) for x in eqn.invars]
                results = self._run(what, closed.jaxpr, closed.consts, arguments)
            else:
                (out,) = eqn.outvars if len(eqn.outvars) == 1 else (None,)
                rule = _RULES.get(eqn.primitive.name)
                if rule is None or out is None:
                    _unsupported(what, f"the primitive {eqn.primitive.name}", eqn)
                kind = _kind(what, out.aval, eqn)
                arguments = [read(x, eqn) for x in eqn.invars]
                value = rule(self, kind, eqn.params, *arguments)
                if value is None:
                    _unsupported(what, f"the primitive {eqn.primitive.name} with {eqn}", eqn)
                results = [value]
            known.update(zip(eqn.outvars, results, strict=True))
        return [read(x, None) for x in jaxpr.outvars]

    def words(
        self, normalizes: int, logits: int, visible: int, kept: Sequence[int] = ()
    ) -> tuple[tuple[int, ...], list[int]]:
        """Those of the values that the results and `kept` need, in the order in which they need
        them; and the numbers of `kept` there."""
        values = list(self._values)
        numbers: dict[int, int] = {}
        order: list[int] = []

        def visit(value: int) -> None:
            if value in numbers:
                return
            op, _, args = values[value]
            for arg in self._value_args(op, args):
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
                f"{_OP}: up to {_core.max_instructions} values are supported, got {len(order)}."
            )
        dtypes = list(_OPERAND_TYPES)
        words = [_core.program_version, normalizes, *results, len(self._operands)]
        for operand in self._operands:
            words += [dtypes.index(operand.dtype), operand.rank]
        words.append(len(order))
        for value in order:
            op, kind, args = values[value]
            of_values = self._value_args(op, args)
            own = args[: len(args) - len(of_values)]
            line = [*own, *(numbers[a] for a in of_values)]
            words += [_CODES[op], kind, *line]
            words += [0] * (_core.max_instruction_args - len(line))
        return tuple(words), [numbers[value] for value in kept]

    @staticmethod
    def _value_args(op: str, args: tuple[int, ...]) -> tuple[int, ...]:
        rule = _core.variant_ops[_CODES[op]][1]
        if rule in (_RULE_CONST, _RULE_AT, _RULE_DIM):
            return ()
        return args[1:] if rule == _RULE_LOAD else args


# What is known while tracing.
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

# Primitives that stand for what is inside of them.
_CALLS = {
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "checkpoint",
    "remat",
    "remat2",
}


def _kind(what: str, aval: Any, eqn: Any) -> int:
    kinds = {"float32": F32, "int32": I32, "bool": BOOL}
    if aval.shape or aval.dtype.name not in kinds:
        _unsupported(what, f"a value of {aval.str_short()}", eqn)
    return kinds[aval.dtype.name]


def _unsupported(what: str, thing: str, eqn: Any) -> NoReturn:
    known = ", ".join(name for name in sorted(_RULES) if not name.startswith("jax_attn"))
    line = "" if eqn is None else f" at {source_info_util.summarize(eqn.source_info)}"
    raise NotImplementedError(
        f"{_OP}: {what}: {thing}{line} is not supported; scalars of float32, int32 and bool are,"
        f" indexed operands, and the primitives {known}."
    )


def _raised_at(error: BaseException) -> str:
    found, trace = "an unknown line", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if _is_users(file):
            found = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def _is_users(file: str) -> bool:
    return file != __file__ and source_info_util.is_user_filename(file)


_Rule = Callable[..., "int | None"]


def _same(op: str) -> _Rule:
    return lambda b, kind, params, *args: b.add(op, kind, *args)


def _compare(op: str, swaps: bool = False) -> _Rule:
    def rule(b: Builder, kind: int, params: Any, x: int, y: int) -> int:
        return b.add(op, BOOL, *((y, x) if swaps else (x, y)))

    return rule


def _identity(b: Builder, kind: int, params: Any, x: int, *_: int) -> int:
    return x


def _cast(b: Builder, kind: int, params: Any, x: int) -> int:
    if b.kind(x) == kind:
        return x
    if kind == F32 and (known := b.constant_of(x)) is not None:
        return b.constant(known, kind)
    return b.add("cast", kind, x)


def _select(b: Builder, kind: int, params: Any, which: int, *cases: int) -> int | None:
    if len(cases) == 1:
        return cases[0]
    if len(cases) > 2:
        return None
    which = _cast(b, BOOL, params, which)
    if (known := b.constant_of(which)) is not None:
        return cases[int(known)]
    return b.add("select", kind, which, cases[1], cases[0])


def _clamp(b: Builder, kind: int, params: Any, low: int, x: int, high: int) -> int:
    return b.add("min", kind, b.add("max", kind, low, x), high)


def _integer_pow(b: Builder, kind: int, params: Any, x: int) -> int:
    """By squaring."""
    power = abs(params["y"])
    result, square = None, x
    while power:
        if power & 1:
            result = square if result is None else b.add("mul", kind, result, square)
        power >>= 1
        if power:
            square = b.add("mul", kind, square, square)
    one = b.constant(1, kind)
    result = one if result is None else result
    return result if params["y"] >= 0 else b.add("div", kind, one, result)


def _round(b: Builder, kind: int, params: Any, x: int) -> int:
    """To the nearest: ties away from zero, as lax does unless told, or to even."""
    if int(params["rounding_method"]) == 1:
        return b.add("round", kind, x)
    magnitude = b.add("abs", kind, x)
    whole = b.add("floor", kind, magnitude)
    half = b.add("le", BOOL, b.constant(0.5, kind), b.add("sub", kind, magnitude, whole))
    up = b.add("select", kind, half, b.add("add", kind, whole, b.constant(1, kind)), whole)
    negative = b.add("lt", BOOL, x, b.constant(0, kind))
    return b.add("select", kind, negative, b.add("neg", kind, up), up)


def _is_finite(b: Builder, kind: int, params: Any, x: int) -> int:
    return b.add("lt", BOOL, b.add("abs", F32, x), b.constant(np.inf, F32))


def _load(b: Builder, kind: int, params: Any, *indices: int) -> int:
    return b.add("load", kind, params["operand"], *indices)


def _stop_gradient(b: Builder, kind: int, params: Any, x: int) -> int:
    """A cast to its own type, which has no derivative."""
    return b.add("cast", kind, x) if kind == F32 else x


def _dim(b: Builder, kind: int, params: Any) -> int:
    return b.add("dim", kind, params["operand"], params["axis"])


# What becomes of each primitive: rule(builder, type of the result, parameters, arguments).
_RULES: dict[str, _Rule] = {
    **{
        name: _same(name)
        for name in (
            *("neg", "abs", "sign", "floor", "ceil", "exp", "exp2", "log", "log1p", "tanh"),
            *("logistic", "sqrt", "rsqrt", "not", "add", "sub", "mul", "div", "rem", "min", "max"),
            *("and", "or", "xor"),
        )
    },
    "shift_left": _same("shl"),
    "shift_right_arithmetic": _same("sar"),
    "shift_right_logical": _same("shr"),
    "eq": _compare("eq"),
    "ne": _compare("ne"),
    "lt": _compare("lt"),
    "le": _compare("le"),
    "gt": _compare("lt", swaps=True),
    "ge": _compare("le", swaps=True),
    "select_n": _select,
    "clamp": _clamp,
    "convert_element_type": _cast,
    "integer_pow": _integer_pow,
    "square": lambda b, kind, params, x: b.add("mul", kind, x, x),
    "round": _round,
    "is_finite": _is_finite,
    "copy": _identity,
    "copy_p": _identity,
    "squeeze": _identity,
    "reshape": _identity,
    "broadcast_in_dim": _identity,
    "stop_gradient": _stop_gradient,
    "jax_attn_load": _load,
    "jax_attn_dim": _dim,
}
