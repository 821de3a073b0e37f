"""The operands of attention as one record, from the public call to the custom call."""

from __future__ import annotations

import dataclasses
from typing import Any, Generic, Literal, TypeVar

import jax

from jax_attn._spec.spec import AttentionSpec
from jax_attn._xla.transforms import HeadSplit, Operand, operand_of

T = TypeVar("T")  # jax.Array, or a description of one


def _operand(
    head_axis: int | None = None,
    heads: Literal["num_qo_heads", "num_kv_heads"] | None = None,
    *,
    name: str | None = None,
    paged_name: str | None = None,
    **options: Any,
) -> Any:
    """A field of AttentionOperands, and how a mesh may split it.

    head_axis, heads: the head axis, and the spec's field with the number of heads. None: every
        device has the whole array.
    name, paged_name: name in error messages if it is not the field's; the same for a paged spec.
    """
    about = {"head_axis": head_axis, "heads": heads, "name": name, "paged_name": paged_name}
    return dataclasses.field(metadata=about, **options)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionOperands(Generic[T]):
    """The operands of one attention call, with shapes and dtypes as in jax_attn.attention.

    The custom call takes the operands in the order of the fields (csrc/ffi/attention.cc reads
    them); None means no operand. The record is a pytree, so it can also hold a description or the
    gradient of each operand.
    """

    q: T = _operand(1, "num_qo_heads")
    k: T = _operand(-2, "num_kv_heads", paged_name="k_pages")
    v: T | None = _operand(-2, "num_kv_heads", paged_name="v_pages")  # None with mla
    plan_buffer: T | None = _operand(name="plan", default=None)  # None: not yet checked
    layer: T | None = _operand(default=None)
    k_new: T | None = _operand(1, "num_kv_heads", default=None)
    v_new: T | None = _operand(1, "num_kv_heads", default=None)
    sinks: T | None = _operand(0, "num_qo_heads", default=None)
    q_scale: T | None = _operand(0, "num_qo_heads", default=None)
    k_scale: T | None = _operand(0, "num_kv_heads", default=None)
    v_scale: T | None = _operand(0, "num_kv_heads", default=None)
    variant: tuple[T, ...] = _operand(name="variant_operands", default=())  # in its order


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardOperands(Generic[T]):
    """The operands of one backward call, in the order of its custom call.

    lse: from the forward pass. d: the result of row_sums. d_o: cotangent of o.
    """

    q: T
    k: T
    v: T
    plan_buffer: T
    layer: T
    lse: T
    d: T
    d_o: T
    variant: tuple[T, ...] = ()


def split_by_head(
    operands: AttentionOperands[jax.Array], spec: AttentionSpec, num_parts: int
) -> HeadSplit:
    """How the arrays of a call are split by head. spec: the spec of one of num_parts parts."""
    of_fields: dict[str, Any] = {}
    for field in dataclasses.fields(operands):
        about, value = field.metadata, getattr(operands, field.name)
        name = (about["paged_name"] if spec.is_paged else None) or about["name"] or field.name
        heads = 0 if about["heads"] is None else getattr(spec, about["heads"])
        if field.name == "variant":
            names = () if spec.variant is None else spec.variant.names
            of_fields[field.name] = tuple(
                operand_of(spec, f"{name}[{own!r}]", x, None, 0)
                for own, x in zip(names, value, strict=True)
            )
        elif value is not None:
            of_fields[field.name] = operand_of(spec, name, value, about["head_axis"], heads)
        else:
            of_fields[field.name] = None
    results = (
        Operand("o", 3, 1, spec.num_qo_heads),
        Operand("lse", 2, 1, spec.num_qo_heads),
    )
    return HeadSplit(spec, AttentionOperands(**of_fields), results, num_parts)
