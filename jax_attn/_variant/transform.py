"""Functions of the vectors of a head, traced to programs (csrc/variant/transform.h)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import source_info_util  # the only source of an equation's line
from jax.extend import core as jax_core

from jax_attn import _core
from jax_attn._variant.operations import DTYPES, OPERATIONS, cast, load
from jax_attn._variant.program import (
    BOOL,
    F32,
    I32,
    OP,
    OPERAND_TYPES,
    TYPE_NAMES,
    WORDS,
    Declared,
    constant_value,
    fold,
    refuse,
)
from jax_attn._variant.trace import (
    CALLS,
    RULES,
    Operand,
    as_integers,
    kind_of,
    operands_of,
    tracing_errors,
)

NAMES = ("q", "k", "v", "o")  # order of the transforms of a variant
# What `at` has for the vectors of a query, and for those of a key.
_QUERY_FACTS = ("head", "kv_head", "request", "q_pos", "q_row", "q_len", "kv_len")
_KEY_FACTS = ("kv_head", "request", "kv_pos", "kv_row", "q_len", "kv_len")
FACTS_OF = {"q": _QUERY_FACTS, "k": _KEY_FACTS, "v": _KEY_FACTS, "o": _QUERY_FACTS}

# Operations on vectors, beyond those on scalars, which work lane by lane (kTransformOps there).
_VECTOR_WORDS = _core.transform_ops
_OPS = dict(enumerate(WORDS)) | dict(enumerate(_VECTOR_WORDS, _core.first_transform_op))
_CODES = {word: code for code, word in _OPS.items()}
_MAX_ARGS = _core.max_transform_args
_MAX_VALUES = _core.max_transform_values


class Lanes(NamedTuple):
    """Lanes [offset, offset + length) of a value."""

    value: int
    offset: int
    length: int


class Line(NamedTuple):
    """One value of a program: `length` lanes.

    own: the bits of a const; the first lane of x; the pool's first entry of a table or pick; the
    operand of a load or product.
    """

    op: str
    kind: int
    length: int
    own: int
    args: tuple[Lanes, ...]  # an argument of length 1 stands for all lanes


class Transform:
    """The program of a function of a vector of a head. Equal programs are equal."""

    def __init__(
        self, words: Sequence[int], operand_types: Sequence[tuple[str, int]], name: str
    ) -> None:
        if not all(type(word) is int and -(2**63) <= word < 2**63 for word in words):
            refuse("transforms", "integers of 64 bits", words)
        types = [[*OPERAND_TYPES].index(dtype) for dtype, _ in operand_types]
        ranks = [rank for _, rank in operand_types]
        try:
            _core.check_transform(list(words), types, ranks)
        except ValueError as error:
            raise ValueError(f"{OP}: {name}: {error}") from None
        self.words = tuple(words)
        size = 5 + 3 * _MAX_ARGS
        self.dim, num_lines, num_results, num_pool = self.words[1:5]
        rest = iter(self.words[5:])
        self.lines: list[Line] = []
        for _ in range(num_lines):
            code, kind, length, own, num_args, *args = itertools.islice(rest, size)
            lanes = tuple(Lanes(*args[3 * i : 3 * i + 3]) for i in range(num_args))
            self.lines.append(Line(_OPS[code], kind, length, own, lanes))
        self.results = [Lanes(*itertools.islice(rest, 3)) for _ in range(num_results)]
        self.pool = np.asarray([*itertools.islice(rest, num_pool)], np.int32)
        facts = FACTS_OF[name]
        if foreign := [x.op for x in self.lines if x.op in _ALL_FACTS and x.op not in facts]:
            refuse(name, f"a program that reads {', '.join(facts)}", foreign[0])

    def __eq__(self, other: object) -> bool:
        return self.words == other.words if isinstance(other, Transform) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.words)

    @property
    def facts(self) -> set[str]:
        """The fields of `at` that the program reads."""
        return {x.op for x in self.lines if x.op in _ALL_FACTS}

    @property
    def has_products(self) -> bool:
        return any(x.op.startswith("product") for x in self.lines)

    def text(self, names: Sequence[str]) -> list[str]:
        """The program: one line per value. names: of the operands."""

        def shown(lanes: Lanes) -> str:
            line = self.lines[lanes.value]
            if line.op == "const":
                return str(constant_value(line.kind, line.own))
            name = line.op if line.op in _ALL_FACTS else f"v{lanes.value}"
            if lanes.length == line.length:
                return name
            return f"{name}[{lanes.offset}:{lanes.offset + lanes.length}]"

        lines = []
        for i, x in enumerate(self.lines):
            if x.op == "const" or x.op in _ALL_FACTS:
                continue
            args = ", ".join(shown(a) for a in x.args)
            if x.op == "x":
                text = f"x[{x.own}:{x.own + x.length}]"
            elif x.op == "load":
                text = f"{names[x.own]}[{args}]"
            elif x.op.startswith("product"):
                text = f"{x.op}({args}, {names[x.own]})"
            else:
                text = f"{x.op}({args})"
            lines.append(f"v{i}: {TYPE_NAMES[x.kind]}[{x.length}] = {text}")
        return [*lines, f"result = {', '.join(shown(r) for r in self.results)}"]

    def evaluate(
        self, x: jax.Array, facts: Mapping[str, Any], operands: Sequence[jax.Array]
    ) -> jax.Array:
        """The result for one vector, in jnp.

        x: [head_dim], f32. facts: field of `at` -> i32 scalar. operands: in the variant's order.
        """
        values: list[jax.Array] = []

        def lanes_of(lanes: Lanes) -> jax.Array:
            value = values[lanes.value]
            if lanes.length == value.shape[0]:
                return value
            return value[lanes.offset : lanes.offset + lanes.length]

        for line in self.lines:
            args = [lanes_of(a) for a in line.args]
            values.append(self._value(line, args, x, facts, operands))
        return jnp.concatenate([lanes_of(r) for r in self.results])

    def _value(
        self,
        line: Line,
        args: list[jax.Array],
        x: jax.Array,
        facts: Mapping[str, Any],
        operands: Sequence[jax.Array],
    ) -> jax.Array:
        op, dtype = line.op, DTYPES[line.kind]
        if op == "x":
            return x[line.own : line.own + line.length]
        if op in _ALL_FACTS:
            return jnp.reshape(facts[op], 1)
        if op == "const":
            return jnp.asarray(constant_value(line.kind, line.own))[None]
        if op == "iota":
            return jnp.arange(line.length, dtype=jnp.int32)
        if op == "table":
            bits = self.pool[line.own : line.own + line.length]
            return jnp.asarray(bits.view(np.float32) if line.kind == F32 else bits, dtype)
        if op == "pick":
            return jnp.concatenate(args)[self.pool[line.own : line.own + line.length]]
        if op in _REDUCTIONS:
            return _REDUCTIONS[op](args[0])[None]
        if op == "load":
            indices = list(jnp.broadcast_arrays(*args)) if args else []
            return jnp.reshape(load(operands[line.own], indices), line.length).astype(dtype)
        if op.startswith("product"):
            vector, *indices = args
            lead = tuple(i[0] for i in indices)
            matrix = _load_matrix(operands[line.own], lead).astype(jnp.float32)
            matrix = matrix.T if op == "product_t" else matrix
            return jnp.dot(vector, matrix, precision="highest")
        if op == "cast":
            return cast(args[0], self.lines[line.args[0].value].kind, line.kind)
        return OPERATIONS[op](*jnp.broadcast_arrays(*args))


def _load_matrix(array: jax.Array, lead: Sequence[Any]) -> jax.Array:
    clamped = tuple(jnp.clip(i, 0, n - 1) for i, n in zip(lead, array.shape, strict=False))
    return array[clamped]


_REDUCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "sum": jnp.sum,
    "largest": jnp.max,
    "smallest": jnp.min,
}
_ALL_FACTS = ("head", "kv_head", "request", "q_pos", "kv_pos", "q_row", "kv_row", "q_len", "kv_len")


# ---- tracing -------------------------------------------------------------------------------------


class _Refs(NamedTuple):
    """A traced array: which lane of which value each element is. Both: i32 of the array's shape."""

    value: np.ndarray
    lane: np.ndarray


class _Matrix(NamedTuple):
    """The last two axes of an operand, which only a product may read."""

    operand: int
    lead: tuple[Lanes, ...]
    shape: tuple[int, ...]
    transposed: bool


# Concrete arrays are constants that are not yet in the program.
_Array = _Refs | _Matrix | np.ndarray


class _Builder:
    """A program under construction; equal values are merged.

    The rules for scalars (trace.RULES) also run on it: its numbers stand for lanes.
    """

    def __init__(self) -> None:
        self._lines: list[Line] = []
        self._values: dict[Line, int] = {}  # the index of each
        self._numbers: dict[Lanes, int] = {}
        self._lanes: list[Lanes] = []
        self.pool: list[int] = []

    # What the rules call.

    def add(self, op: str, kind: int, *args: int) -> int:
        lanes = tuple(self._lanes[a] for a in args)
        known = [self.constant_of(arg) for arg in args]
        if None not in known and (found := fold(op, known)) is not None:
            return self.constant(found, kind)
        length = max((x.length for x in lanes), default=1)
        return self.number(self.line(op, kind, length, 0, lanes))

    def select(self, kind: int, which: int, yes: int, no: int) -> int:
        if (known := self.constant_of(which)) is not None:
            return yes if known else no
        return no if yes == no else self.add("select", kind, which, yes, no)

    def kind(self, number: int) -> int:
        return self._lines[self._lanes[number].value].kind

    def constant_of(self, number: int) -> Any:
        line = self._lines[self._lanes[number].value]
        return constant_value(line.kind, line.own) if line.op == "const" else None

    def constant(self, value: Any, kind: int) -> int:
        bits = int(np.float32(value).view(np.int32)) if kind == F32 else int(value)
        return self.number(self.line("const", kind, 1, bits))

    # Lanes and their numbers.

    def number(self, lanes: Lanes) -> int:
        if lanes not in self._numbers:
            self._numbers[lanes] = len(self._lanes)
            self._lanes.append(lanes)
        return self._numbers[lanes]

    def lanes(self, number: int) -> Lanes:
        return self._lanes[number]

    def line(
        self, op: str, kind: int, length: int, own: int, args: tuple[Lanes, ...] = ()
    ) -> Lanes:
        line = Line(op, kind, length, own, args)
        value = self._values.setdefault(line, len(self._lines))
        if value == len(self._lines):
            self._lines.append(line)
        return Lanes(value, 0, length)

    def entries(self, words: Sequence[int]) -> int:
        """Where the pool has these words."""
        size = len(words)
        for at in range(len(self.pool) - size + 1):
            if self.pool[at : at + size] == list(words):
                return at
        self.pool += words
        return len(self.pool) - size

    # From arrays to lanes and back.

    def lanes_of(self, array: _Refs | np.ndarray) -> Lanes:
        """The elements of an array, in order, as lanes of one value."""
        if isinstance(array, np.ndarray):
            return self._constants(array.ravel())
        value, lane = array.value.ravel(), array.lane.ravel()
        size = len(value)
        runs = _runs(value, lane)
        if len(runs) == 1:
            return runs[0]
        if (value == value[0]).all() and (lane == lane[0]).all():
            return Lanes(int(value[0]), int(lane[0]), 1)
        sources = list(dict.fromkeys(value.tolist()))
        while len(sources) > _MAX_ARGS:  # join some of them first
            joined, rest = sources[:_MAX_ARGS], sources[_MAX_ARGS:]
            lengths = [self._lines[s].length for s in joined]
            args = tuple(Lanes(s, 0, n) for s, n in zip(joined, lengths, strict=True))
            own = self.entries(range(sum(lengths)))
            kind = self._lines[joined[0]].kind
            whole = self.line("pick", kind, sum(lengths), own, args).value
            starts = dict(zip(joined, np.cumsum([0, *lengths[:-1]]), strict=True))
            for source, start in starts.items():
                lane = np.where(value == source, lane + start, lane)
            value = np.where(np.isin(value, joined), whole, value)
            sources = [whole, *rest]
        lengths = [self._lines[s].length for s in sources]
        starts = dict(zip(sources, np.cumsum([0, *lengths[:-1]]), strict=True))
        picks = [int(starts[v] + at) for v, at in zip(value.tolist(), lane.tolist(), strict=True)]
        args = tuple(Lanes(s, 0, n) for s, n in zip(sources, lengths, strict=True))
        return self.line("pick", self._lines[sources[0]].kind, size, self.entries(picks), args)

    def _constants(self, flat: np.ndarray) -> Lanes:
        kind = {"f": F32, "i": I32, "b": BOOL}[flat.dtype.kind]
        if (flat == flat[0]).all():
            return self._lanes[self.constant(flat[0], kind)]
        if kind == I32 and flat[0] >= 0 and (np.diff(flat) == 1).all():
            first, size = int(flat[0]), len(flat)
            return Lanes(self.line("iota", I32, first + size, 0).value, first, size)
        bits = flat.astype(np.float32).view(np.int32) if kind == F32 else flat.astype(np.int32)
        return self.line("table", kind, len(flat), self.entries(bits.tolist()))

    def refs(self, lanes: Lanes, shape: tuple[int, ...]) -> _Refs:
        size = int(np.prod(shape))
        lane = np.arange(size) if lanes.length > 1 else np.zeros(size, int)
        return _Refs(np.full(shape, lanes.value), (lane + lanes.offset).reshape(shape))

    def words(self, dim: int, results: list[Lanes]) -> tuple[int, ...]:
        """The program as words: only the values that the results need, in dependency order."""
        numbers: dict[int, int] = {}
        order: list[Line] = []

        def visit(value: int) -> None:
            if value in numbers:
                return
            line = self._lines[value]
            for arg in line.args:
                visit(arg.value)
            numbers[value] = len(order)
            order.append(line)

        for result in results:
            visit(result.value)
        if len(order) > _MAX_VALUES:
            raise NotImplementedError(
                f"{OP}: a transform of up to {_MAX_VALUES} values is supported, got {len(order)}."
            )
        if len(self.pool) > _core.max_transform_pool:
            raise NotImplementedError(
                f"{OP}: a transform with up to {_core.max_transform_pool} constants is supported,"
                f" got {len(self.pool)}; make arrays operands."
            )
        head = [_core.transform_version, dim, len(order), len(results), len(self.pool)]
        words = list(head)
        for line in order:
            args = [word for a in line.args for word in (numbers[a.value], a.offset, a.length)]
            args += [0] * (3 * _MAX_ARGS - len(args))
            words += [_CODES[line.op], line.kind, line.length, line.own, len(line.args), *args]
        for result in results:
            words += [numbers[result.value], result.offset, result.length]
        return (*words, *self.pool)


def _runs(value: np.ndarray, lane: np.ndarray) -> list[Lanes]:
    """The elements as stretches of lanes."""
    borders = np.flatnonzero((np.diff(value) != 0) | (np.diff(lane) != 1)) + 1
    starts = [0, *borders.tolist()]
    stops = [*borders.tolist(), len(value)]
    return [Lanes(int(value[a]), int(lane[a]), b - a) for a, b in zip(starts, stops, strict=True)]


_take_p = jax_core.Primitive("jax_attn_take")
_take_p.def_abstract_eval(
    lambda *_, operand, kind, shape: jax.core.ShapedArray(
        shape, (jnp.float32, jnp.int32, jnp.bool_)[kind]
    )
)
_matrix_p = jax_core.Primitive("jax_attn_matrix")
_matrix_p.def_abstract_eval(lambda *_, operand, shape: jax.core.ShapedArray(shape, jnp.float32))


class _Vectors(Operand):
    """An operand while a function of vectors is traced: indexed by scalars, vectors and slices."""

    def __init__(self, name: str, declared: Declared, shape: tuple[int, ...]) -> None:
        super().__init__(name, declared)
        self._shape = shape

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    def __jax_array__(self) -> Any:
        return self[()]

    def __getitem__(self, indices: Any) -> Any:
        number, dtype, rank = self._declared
        indices = indices if isinstance(indices, tuple) else (indices,)
        if len(indices) > rank:
            refuse(self._name, f"up to {rank} indices, one an axis", f"{len(indices)} indices")
        indices += (slice(None),) * (rank - len(indices))
        arrays = [
            np.arange(n, dtype=np.int32)[i] if isinstance(i, slice) else as_integers(self._name, i)
            for i, n in zip(indices, self._shape, strict=True)
        ]
        whole = [isinstance(i, slice) for i in indices]
        kind = OPERAND_TYPES[dtype]
        if rank >= 2 and whole[-2:] == [True, True] and not any(x.ndim for x in arrays[:-2]):
            if arrays[-1].size != self._shape[-1] or arrays[-2].size != self._shape[-2]:
                refuse(self._name, "whole axes where two are sliced", indices)
            if kind != F32:
                refuse(self._name, "floats in a matrix", dtype)
            return _matrix_p.bind(*arrays[:-2], operand=number, shape=self._shape[-2:])
        if any(x.ndim > 1 for x in arrays) or sum(whole) > 1:
            refuse(self._name, "scalars and vectors as indices, and at most one slice", indices)
        shape = np.broadcast_shapes(*(x.shape for x in arrays))
        return _take_p.bind(*arrays, operand=number, kind=kind, shape=shape)

    @property
    def value(self) -> Any:
        return self if self._declared.rank else self[()]


class Facts:
    """`at` of a function of vectors: the fields that it may read, i32 scalars."""

    def __init__(self, **facts: Any) -> None:
        self.__dict__.update(facts)


def trace(
    what: str,
    function: Callable[..., Any],
    dim: int,
    declared: dict[str, Declared],
    shapes: Mapping[str, tuple[int, ...]],
) -> Transform | None:
    """The program of a function of vectors; None if it returns its argument.

    what: "q", "k", "v" or "o". dim: elements of its vectors. shapes: of the operands. Raises as
    Variant does.
    """
    wanted = operands_of(what, function, declared)
    facts = FACTS_OF[what]

    def call(x: jax.Array, *scalars: Any) -> Any:
        operands = {name: _Vectors(name, declared[name], shapes[name]).value for name in wanted}
        result = function(x, Facts(**dict(zip(facts, scalars, strict=True))), **operands)
        if result is None or isinstance(result, (tuple, list, dict)):
            refuse(what, f"a function that returns a vector of {dim}", result)
        result = jnp.asarray(result)
        if result.shape != (dim,) or result.dtype == jnp.bool_:
            refuse(what, f"a function that returns {dim} numbers", jax.typeof(result).str_short())
        return result.astype(jnp.float32)

    arguments = [jax.ShapeDtypeStruct((dim,), jnp.float32)]
    arguments += [jax.ShapeDtypeStruct((), jnp.int32)] * len(facts)
    known = f"at has {', '.join(facts)} in {what}"
    with tracing_errors(what, known, Facts):
        closed = jax.make_jaxpr(call)(*arguments)
    builder = _Builder()
    lane = np.arange(dim)
    whole = builder.line("x", F32, dim, 0)
    scalars = [builder.refs(builder.line(fact, I32, 1, 0), ()) for fact in facts]
    x = _Refs(np.full(dim, whole.value), lane)
    (result,) = _run(builder, what, closed.jaxpr, closed.consts, [x, *scalars])
    if isinstance(result, np.ndarray):
        result = builder.refs(builder.lanes_of(result), (dim,))
    runs = _runs(result.value, result.lane)
    if runs == [whole]:
        return None
    if len(runs) > _core.max_transform_results:
        runs = [builder.lanes_of(result)]
    if len(runs) == 1 and runs[0].length == 1:  # the same in all lanes
        zero = builder.number(builder.line("table", F32, dim, builder.entries([0] * dim)))
        runs = [builder.lanes(builder.add("add", F32, builder.number(runs[0]), zero))]
    types = [(x.dtype, x.rank) for x in declared.values()]
    return Transform(builder.words(dim, runs), types, what)


def _run(
    builder: _Builder,
    what: str,
    jaxpr: Any,
    consts: Sequence[Any],
    values: Sequence[_Array],
    where: str = "",
) -> list[Any]:
    """The results of a jaxpr. where: the user's line, for equations that do not know it."""
    known: dict[Any, _Array] = dict(zip(jaxpr.invars, values, strict=True))
    for var, const in zip(jaxpr.constvars, consts, strict=True):
        if isinstance(const, jax.core.Tracer):
            _unsupported(what, f"closing over the traced {jax.typeof(const)}", where)
        known[var] = np.asarray(const)

    def read(atom: Any) -> _Array:
        return np.asarray(atom.val) if isinstance(atom, jax_core.Literal) else known[atom]

    for eqn in jaxpr.eqns:
        arguments = [read(x) for x in eqn.invars]
        line = source_info_util.summarize(eqn.source_info) or where
        inner = next((n for n in ("jaxpr", "call_jaxpr", "fun_jaxpr") if n in eqn.params), None)
        if inner is not None and eqn.primitive.name in CALLS:
            body = eqn.params[inner]
            closed = body if hasattr(body, "consts") else jax_core.ClosedJaxpr(body, ())
            results = _run(builder, what, closed.jaxpr, closed.consts, arguments, line)
        else:
            results = _step(builder, what, eqn, arguments, line)
        known.update(zip(eqn.outvars, results, strict=True))
    return [read(x) for x in jaxpr.outvars]


def _step(builder: _Builder, what: str, eqn: Any, arguments: list[Any], where: str) -> list[Any]:
    """The results of an equation."""
    name, params = eqn.primitive.name, eqn.params
    if name == "jax_attn_take":
        indices = tuple(builder.lanes_of(a) for a in arguments)
        length = int(np.prod(params["shape"]))
        lanes = builder.line("load", params["kind"], length, params["operand"], indices)
        return [builder.refs(lanes, params["shape"])]
    if name == "jax_attn_matrix":
        lead = tuple(builder.lanes_of(a) for a in arguments)
        return [_Matrix(params["operand"], lead, params["shape"], False)]
    matrices = [a for a in arguments if isinstance(a, _Matrix)]
    if matrices and name == "transpose":
        (m,) = matrices
        return [m._replace(shape=m.shape[::-1], transposed=not m.transposed)]
    if matrices:
        return [_product(builder, what, eqn, arguments, where)]
    if all(isinstance(a, np.ndarray) for a in arguments):
        with jax.ensure_compile_time_eval(), jax.enable_x64(False):
            found = eqn.primitive.bind(*(jnp.asarray(a) for a in arguments), **params)
        return [np.asarray(x) for x in (found if eqn.primitive.multiple_results else [found])]
    for var in eqn.outvars:
        kind_of(what, var.aval, eqn)
    if name in _SHAPE_RULES:
        return [_moved(builder, what, eqn, arguments, where)]
    if name == "split":
        return _split(arguments[0], params)
    if name in _REDUCED:
        return [_reduced(builder, what, eqn, arguments[0], where)]
    if any(0 in var.aval.shape for var in eqn.outvars):
        _unsupported(what, f"the primitive {name} of an array without elements", where)
    rule = RULES.get(name)
    if rule is None or len(eqn.outvars) != 1:
        _unsupported(what, f"the primitive {name}", where)
    (out,) = eqn.outvars
    kind = kind_of(what, out.aval, eqn)
    numbers = [builder.number(builder.lanes_of(a)) for a in arguments]
    found = rule(builder, kind, params, *numbers)
    if found is None:
        _unsupported(what, f"the primitive {name} with {eqn}", where)
    return [builder.refs(builder.lanes(found), out.aval.shape)]


# Primitives that only move elements, with constant places.
_SHAPE_RULES = {
    "slice",
    "squeeze",
    "reshape",
    "broadcast_in_dim",
    "concatenate",
    "stack",  # jax 0.10.2 and later; before, jnp.stack was a concatenation
    "rev",
    "transpose",
    "expand_dims",
    "gather",
    "dynamic_slice",
    "copy",
    "pad",
}


def _moved(builder: _Builder, what: str, eqn: Any, arguments: list[Any], where: str) -> _Refs:
    """The same movement of the numbers of the elements, by JAX itself."""
    places: list[Any] = []
    table: list[tuple[int, int]] = []
    indexes = eqn.primitive.name in ("gather", "dynamic_slice")
    for i, argument in enumerate(arguments):
        is_constant = isinstance(argument, np.ndarray)
        if indexes and is_constant == (i == 0):
            _unsupported(
                what, "an index that is not constant, of an array that is no operand", where
            )
        if indexes and i > 0:
            places.append(argument)
            continue
        if is_constant:
            argument = builder.refs(builder.lanes_of(argument), argument.shape)
        base = len(table)
        table += zip(argument.value.ravel().tolist(), argument.lane.ravel().tolist(), strict=True)
        places.append(np.arange(base, len(table), dtype=np.int32).reshape(argument.value.shape))
    with jax.ensure_compile_time_eval(), jax.enable_x64(False):
        found = np.asarray(eqn.primitive.bind(*(jnp.asarray(p) for p in places), **eqn.params))
    pairs = np.asarray(table)[found]
    return _Refs(pairs[..., 0], pairs[..., 1])


def _split(array: _Refs, params: Any) -> list[_Refs]:
    borders = np.cumsum(params["sizes"])[:-1]
    parts = (np.split(x, borders, axis=params["axis"]) for x in array)
    return [_Refs(value, lane) for value, lane in zip(*parts, strict=True)]


_REDUCED = {"reduce_sum": "sum", "reduce_max": "largest", "reduce_min": "smallest"}


def _reduced(builder: _Builder, what: str, eqn: Any, array: _Refs, where: str) -> _Refs:
    axes = eqn.params["axes"]
    kept = [axis for axis in range(array.value.ndim) if axis not in axes]
    value, lane = (x.transpose((*kept, *axes)) for x in array)
    shape = value.shape[: len(kept)]
    rows = int(np.prod(shape))
    kind = kind_of(what, eqn.outvars[0].aval, eqn)
    if kind != F32:
        _unsupported(what, f"the primitive {eqn.primitive.name} of {TYPE_NAMES[kind]}", where)
    results = []
    for one_value, one_lane in zip(value.reshape(rows, -1), lane.reshape(rows, -1), strict=True):
        lanes = builder.lanes_of(_Refs(one_value, one_lane))
        if lanes.length == 1 and len(one_value) > 1:  # one lane, many times
            _unsupported(what, "a reduction of equal elements", where)
        op = _REDUCED[eqn.primitive.name]
        results.append(builder.line(op, kind, 1, 0, (lanes,)) if lanes.length > 1 else lanes)
    found = np.asarray([[r.value, r.offset] for r in results]).reshape(*shape, 2)
    return _Refs(found[..., 0], found[..., 1])


def _product(builder: _Builder, what: str, eqn: Any, arguments: list[Any], where: str) -> _Refs:
    """A vector times a matrix of an operand: dot_general."""
    if eqn.primitive.name != "dot_general":
        _unsupported(what, f"a matrix in the primitive {eqn.primitive.name}", where)
    if what in ("k", "v"):
        raise NotImplementedError(
            f"{OP}: {what}: a product with a matrix at {where} is not supported; it is in q and o:"
            " q . (W k) = (W^T q) . k."
        )
    (left, right), (batch, _) = eqn.params["dimension_numbers"]
    which = 0 if isinstance(arguments[0], _Matrix) else 1
    matrix, vector = arguments[which], arguments[1 - which]
    axes = (left, right)[which]
    is_vector = (
        not isinstance(vector, _Matrix)
        and np.ndim(vector if isinstance(vector, np.ndarray) else vector.value) == 1
    )
    if batch or len(axes) != 1 or not is_vector:
        _unsupported(what, "a product other than of a vector and a matrix", where)
    lanes = builder.lanes_of(vector)
    if lanes.length != matrix.shape[axes[0]]:
        _unsupported(what, "a product of a constant vector and a matrix", where)
    transposed = (axes[0] == 1) != matrix.transposed
    (out,) = eqn.outvars
    op = "product_t" if transposed else "product"
    length = int(np.prod(out.aval.shape))
    found = builder.line(op, F32, length, matrix.operand, (lanes, *matrix.lead))
    return builder.refs(found, out.aval.shape)


def _unsupported(what: str, thing: str, where: str) -> NoReturn:
    moves, sums = ", ".join(sorted(_SHAPE_RULES)), ", ".join(_REDUCED)
    raise NotImplementedError(
        f"{OP}: {what}: {thing} at {where or 'an unknown line'} is not supported; elementwise"
        f" operations, {moves}, {sums} and, in q and o, products with the matrix of an operand are."
    )


# ---- many vectors --------------------------------------------------------------------------------


def apply(
    transform: Transform,
    x: jax.Array,
    by_head: Mapping[str, Any],
    by_row: Mapping[str, Any],
    operands: Sequence[jax.Array],
) -> jax.Array:
    """The transform of rows of vectors, in f32.

    x: [rows, heads, head_dim]. by_head, by_row: fields of `at`, [heads] and [rows].
    """

    def one(x: jax.Array, heads: Any, rows: Any) -> jax.Array:
        return transform.evaluate(x, {**heads, **rows}, operands)

    of_heads = jax.vmap(one, (0, 0, None))
    return jax.vmap(of_heads, (0, None, 0))(x.astype(jnp.float32), dict(by_head), dict(by_row))
