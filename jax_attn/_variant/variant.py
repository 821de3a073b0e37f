"""Custom logits, masks and transforms of vectors, traced once to programs for the kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn import _core
from jax_attn._variant import transform
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
from jax_attn._variant.trace import as_index, as_integers, declare, operands_of, trace
from jax_attn._variant.transform import Transform


class Variant:
    """Custom logits, masks and transforms: functions that run inside the kernels.

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
    q, k, v, o: fn(x, at, ...) -> the vector that takes the place of x. x: [head_dim], f32, of one
        token and head: of q, of k and v as they are stored, of o before it is returned. at: of q
        and o head, kv_head, request, q_pos, q_row, q_len and kv_len of an `At`; of k and v kv_head,
        request, kv_pos, kv_row, q_len and kv_len. None: x.
    head_dim: of x, which q, k, v and o need: an int, or that of q and k and that of v and o.
    normalize: "softmax", or "none": o is the sum over visible keys of logit times value; there is
        no lse, and sinks are not supported.
    operands: name -> array, or anything else with a dtype and a shape. Extra inputs of the
        functions; each function takes the operands that it names after `at`. Up to 8 operands of up
        to 4 axes, float32, bfloat16 or float16 (read as f32), int32 or uint8 (read as i32) or bool.
        An operand without axes is a scalar. Others are indexed with one i32 scalar per axis:
        slopes[at.head]. An index out of range, also a negative one, is clamped to the nearest in
        range, so an axis of length 1 broadcasts. operand.shape has i32 scalars. Functions of
        vectors may also index with vectors and slices, and multiply x by a matrix in q and o;
        slices have the lengths of this array. Else only dtype and number of axes belong to the
        variant. The arrays are passed to `attention` as
        variant_operands; new contents and lengths compile nothing.

    JAX traces the functions once, here, to a program of at most 128 scalar operations in f32, i32
    and bool: arithmetic, comparisons, jnp.where, jnp.select, exp, exp2, expm1, log, log1p, powers,
    sqrt, rsqrt, cbrt, sin, cos, tan and their inverses, sinh, cosh, tanh, erf, erfc, logistic, abs,
    sign, floor, ceil, minimum, maximum, integer division, bit operations and casts. Variants with
    equal programs are equal. str() shows the program.

    Functions of vectors also move elements (slices, jnp.concatenate, jnp.stack, reshapes) and
    reduce them (jnp.sum, jnp.mean, jnp.max); they have at most 128 values of any length.

    Raises NotImplementedError, with the primitive and your source line, for an operation that a
    program does not have; ValueError for arguments that do not fit each other.
    """

    words: tuple[int, ...]  # csrc/variant/words.h
    names: tuple[str, ...]  # names of the operands, in order
    logits: Callable[..., Any] | None  # None also for a variant read from a file
    mask: Callable[..., Any] | None
    transforms: dict[str, Transform]  # those of "q", "k", "v" and "o" that change something
    functions: dict[str, Callable[..., Any]]  # of the same; empty for a variant from a file

    def __init__(
        self,
        logits: Callable[..., Any] | None = None,
        mask: Callable[..., Any] | None = None,
        normalize: Literal["softmax", "none"] = "softmax",
        operands: Mapping[str, Any] | None = None,
        *,
        q: Callable[..., Any] | None = None,
        k: Callable[..., Any] | None = None,
        v: Callable[..., Any] | None = None,
        o: Callable[..., Any] | None = None,
        head_dim: int | tuple[int, int] | None = None,
    ) -> None:
        if normalize not in NORMALIZE:
            refuse("normalize", '"softmax" or "none"', normalize)
        vectors = {"q": q, "k": k, "v": v, "o": o}
        functions = {"logits": logits, "mask": mask, **vectors}
        if not any(functions.values()) and normalize == "softmax":
            refuse("logits, mask, q, k, v, o", "at least one function", None)
        for name, function in functions.items():
            if function is not None and not callable(function):
                refuse(name, "a function or None", function)
        dims = _head_dims(head_dim, any(vectors.values()))
        declared = declare(operands or {})
        builder = Builder(tuple(declared.values()))
        results = [-1, -1]
        for i, (name, function) in enumerate((("logits", logits), ("mask", mask))):
            if function is not None:
                results[i] = trace(builder, name, function, declared)
        words, _ = builder.words(NORMALIZE.index(normalize), results[0], results[1])
        shapes = {name: np.shape(array) for name, array in (operands or {}).items()}
        self.transforms, self.functions = {}, {}
        for name, function in vectors.items():
            if function is None:
                continue
            traced = transform.trace(name, function, dims[name], declared, shapes)
            if traced is not None:
                self.transforms[name], self.functions[name] = traced, function
        self._settle(words, tuple(declared), logits, mask)

    @classmethod
    def from_words(
        cls,
        words: Sequence[int],
        names: Sequence[str],
        transforms: Mapping[str, Sequence[int]] | None = None,
    ) -> Variant:
        """The variant of a saved program. It has no Python functions.

        words, names: fields of another Variant. transforms: the words of its transforms, by name.
        Raises ValueError for words that are no program.
        """
        variant = cls.__new__(cls)
        variant.transforms, variant.functions = {}, {}
        variant._settle(tuple(words), tuple(names), None, None)
        given = {} if transforms is None else transforms
        if not isinstance(given, Mapping) or not set(given) <= set(transform.NAMES):
            refuse("transforms", "those of q, k, v and o", given)
        variant.transforms = {
            name: Transform(given[name], variant.operand_types, name)
            for name in transform.NAMES
            if name in given
        }
        return variant

    def to_fields(self) -> dict[str, Any]:
        """The arguments of from_words, as JSON values."""
        fields: dict[str, Any] = {"words": self.words, "names": self.names}
        if self.transforms:
            fields["transforms"] = {name: x.words for name, x in self.transforms.items()}
        return fields

    def with_transforms(self, names: Sequence[str]) -> Variant | None:
        """The same with no transforms but these; None if nothing is left."""
        kept = {name: x for name, x in self.transforms.items() if name in names}
        if kept == self.transforms:
            return self
        if not kept and not self.has_program:
            return None
        variant = Variant.from_words(self.words, self.names)
        variant.logits, variant.mask, variant.transforms = self.logits, self.mask, kept
        variant.functions = {n: f for n, f in self.functions.items() if n in kept}
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
        mine, theirs = ((x.words, x.names, sorted(x.transforms.items())) for x in (self, other))
        return mine == theirs

    def __hash__(self) -> int:
        return hash((self.words, self.names, *self.transforms.items()))

    def __reduce__(self) -> Any:
        """State for copies and pickles: the programs, without the functions."""
        return Variant.from_words, tuple(self.to_fields().values())

    @property
    def has_program(self) -> bool:
        """Whether it has logits or a mask, or no softmax."""
        return self.results != (-1, -1) or not self.normalizes

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
        return any(x.op in OWN_ROWS for x in self.instructions) or self.rows_need_own_rows

    @property
    def rows_need_own_rows(self) -> bool:
        """Whether the transforms of keys and values do."""
        facts = [x.facts for name, x in self.transforms.items() if name in ("k", "v")]
        return any(not fields.isdisjoint(OWN_ROWS) for fields in facts)

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
        return self.rows_need_own_rows

    @property
    def reads_heads(self) -> bool:
        """Whether it reads the number of a head."""
        return not self._facts.isdisjoint(("head", "kv_head"))

    @property
    def reads_places(self) -> bool:
        """Whether it reads the place of a query or of a key, or lengths: anything but the head."""
        return bool(self._facts - {"head", "kv_head"})

    @property
    def _facts(self) -> set[str]:
        """The fields of `at` that any function reads."""
        facts = {x.op for x in self.instructions if x.op in FACTS}
        return facts.union(*(x.facts for x in self.transforms.values()))

    @property
    def reads_kv_rows(self) -> bool:
        """Whether it numbers the rows of the cache, in 32 bits."""
        return "kv_row" in self._facts

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
        for name, one in self.transforms.items():
            lines += [f"{name}({name}: f32[{one.dim}], at)"]
            lines += [f"  {line}" for line in one.text(self.names)]
        if not self.has_program:
            return lines
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

    def apply_transform(
        self, name: str, x: Any, facts: Mapping[str, Any], operands: Mapping[str, Any]
    ) -> Any:
        """A transform of many vectors, by the Python function under vmap; x if there is none.

        Used by the reference; kernels run the program.

        x: [..., head_dim], f32 or f64. facts: field of `at` -> i32 array that broadcasts to [...].
        """
        if name not in self.transforms:
            return x
        if name not in self.functions:
            raise NotImplementedError(
                f"{OP}: apply: variants made of Python functions are supported, got one that was"
                " read from a file."
            )
        names = transform.FACTS_OF[name]
        flat = [np.broadcast_to(facts[fact], np.shape(x)[:-1]).ravel() for fact in names]
        rows = np.asarray(x).reshape(-1, np.shape(x)[-1])
        arrays = {key: np.asarray(operands[key]) for key in self.names}
        found = _mapped_vectors(self.functions[name], names, arrays, rows, *flat)
        return np.asarray(found).reshape(np.shape(x))


def _head_dims(head_dim: Any, is_needed: bool) -> dict[str, int]:
    """The elements of the vectors of q, k, v and o."""
    if not is_needed and head_dim is None:
        return {}
    pair = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)
    if len(pair) != 2 or not all(type(x) is int and 0 < x <= 512 for x in pair):
        refuse("head_dim", "elements of a vector, or those of q, k and of v, o", head_dim)
    qk, vo = pair
    return {"q": qk, "k": qk, "v": vo, "o": vo}


@functools.partial(jax.jit, static_argnums=(0, 1))
def _mapped_vectors(
    function: Callable[..., Any],
    facts: tuple[str, ...],
    operands: dict[str, Any],
    x: Any,
    *scalars: Any,
) -> Any:
    of = {name: _IndexedVectors(array) for name, array in operands.items()}
    values = {name: of[name].value for name in operands_of("", function, of)}

    def one(x: Any, *scalars: Any) -> Any:
        at = transform.Facts(**dict(zip(facts, scalars, strict=True)))
        return jnp.asarray(function(x, at, **values)).astype(x.dtype)

    return jax.vmap(one)(x, *scalars)


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


class _IndexedVectors(_Indexed):
    """The same for functions of vectors."""

    def __jax_array__(self) -> Any:
        return self._array

    def __getitem__(self, indices: Any) -> Any:
        indices = indices if isinstance(indices, tuple) else (indices,)
        clamped = tuple(
            i if isinstance(i, slice) else jnp.clip(as_integers("", i), 0, n - 1)
            for i, n in zip(indices, self.shape, strict=False)
        )
        return self._array[clamped]
