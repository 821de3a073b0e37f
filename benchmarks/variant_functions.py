"""Variants shared by tests, benchmarks and kernel checks: functions of scalars."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import jax_attn as ja

# ---- logits


def alibi(score: Any, at: Any, slopes: Any) -> Any:
    return score - slopes[at.head] * (at.q_pos - at.kv_pos)


def t5_bias(score: Any, at: Any, table: Any) -> Any:
    distance = jnp.maximum(at.q_pos - at.kv_pos, 0)
    far = 16 + (jnp.log(jnp.maximum(distance, 1) / 16.0) * 7.69).astype(jnp.int32)
    return score + table[jnp.where(distance < 16, distance, jnp.minimum(far, 31)), at.head]


def soft_cap_of(cap: float) -> Callable[..., Any]:
    def soft_cap(score: Any, at: Any) -> Any:
        return cap * jnp.tanh(score / cap)

    return soft_cap


def sigmoid_of(shift: float) -> Callable[..., Any]:
    """Returns a function that makes a score a weight, for normalize="none"."""

    def sigmoid(score: Any, at: Any) -> Any:
        return jax.nn.sigmoid(score - shift)

    return sigmoid


def dense_bias(score: Any, at: Any, bias: Any) -> Any:
    return score + bias[at.request, at.head, at.q_pos, at.kv_pos]


# ---- masks


def causal(at: Any) -> Any:
    return at.kv_pos <= at.q_pos


def documents(at: Any, q_doc: Any, kv_doc: Any) -> Any:
    return q_doc[at.q_row] == kv_doc[at.kv_row]


def documents_of_rows(at: Any, doc: Any) -> Any:
    """Document mask for the case that rows of q are also the rows of k."""
    return doc[at.q_row] == doc[at.kv_row]


def prefix_lm(at: Any, prefix: Any) -> Any:
    return (at.kv_pos < prefix[at.request]) | (at.kv_pos <= at.q_pos)


def tree(at: Any, ancestors: Any) -> Any:
    place = at.kv_pos - (at.kv_len - at.q_len)
    return (place < 0) | ((ancestors[at.q_row] >> place) & 1 != 0)


def variant_of(
    known: Mapping[str, Any], logits: Any = None, mask: Any = None, normalize: Any = "softmax"
) -> tuple[ja.Variant, dict[str, Any]]:
    """Returns the variant and its operands: the known operands that the functions name."""
    functions = [f for f in (logits, mask) if f is not None]
    named = {name for f in functions for name in inspect.signature(f).parameters}
    operands = {name: x for name, x in known.items() if name in named}
    return ja.Variant(logits, mask, normalize, operands), operands
