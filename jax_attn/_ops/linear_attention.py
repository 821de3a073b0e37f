"""linear_attention: prefill, chunked prefill, decode and drafts over a pool of states."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_attn import _core, _environment
from jax_attn._ops.linear_chunks import chunk_terms, next_state
from jax_attn._ops.linear_kernel import LinearCall, LinearOperands, attend
from jax_attn._ops.operands import (
    as_array,
    check_array,
    check_layer,
    checked_layer,
    layer_operand,
    with_default_promotion,
)
from jax_attn._plan import state_plan
from jax_attn._plan.state_plan import StatePlan
from jax_attn._spec.state_spec import LinearAttentionSpec, StateSpec

_OP = "linear_attention"
O_NAME = "linear_attention_o"


@with_default_promotion
def linear_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array | None,
    beta: jax.Array | None,
    states: jax.Array,
    plan: StatePlan,
    *,
    layer: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Linear attention of a batch of requests, each with a state in a pool.

    The recurrence, and what the fields of the spec mean, is in LinearAttentionSpec. Computed in
    chunks (arXiv 2412.06464, section 3.3). Sums are f32. Differentiable in q, k, v, g, beta and
    states. Rows behind the last request may have any value; their o is 0.

    q, k: [max_tokens, num_qk_heads, head_dim_k] in spec.dtype. Packed tokens of all requests.
    v: [max_tokens, num_v_heads, head_dim_v] in spec.dtype.
    g: [max_tokens, num_v_heads], f32, <= 0: natural log of the decay; with decay "channel"
        [max_tokens, num_v_heads, head_dim_k]; None for decay "none".
    beta: [max_tokens, num_v_heads], f32. None: 1.
    states: [num_slots, num_v_heads, head_dim_k, head_dim_v] in spec.state_dtype, or with `layer`
        [num_layers, num_slots, ...]. Donate it: it is updated in place where XLA can.
    plan: from plan_linear_attention, with a LinearAttentionSpec.
    layer: i32 scalar, the layer of a stacked pool; may be traced. None: there is no layer axis.

    Returns o: [max_tokens, num_v_heads, head_dim_v] in spec.dtype, and the new states. Raises
    ValueError for shapes or dtypes that do not fit. A checkpoint policy of jax.checkpoint knows o
    as "linear_attention_o".

    A prompt of three tokens without decay or delta rule: the state is the sum of k v^T.

    >>> import jax.numpy as jnp
    >>> import jax_attn as ja
    >>> spec = ja.LinearAttentionSpec(
    ...     3, 1, 1, num_qk_heads=1, num_v_heads=1, head_dim_k=8, head_dim_v=8, dtype="float32",
    ...     decay="none", delta_rule=False, scale=1.0,
    ... )
    >>> plan = ja.plan_linear_attention(spec, [0, 3], read_slots=[-1], write_slots=[0])
    >>> ones, states = jnp.ones((3, 1, 8)), jnp.zeros(spec.state_shape)
    >>> o, states = ja.linear_attention(ones, ones, ones, None, None, states, plan)
    >>> o[:, 0, 0].tolist(), states[0, 0, 0, 0].item()
    ([8.0, 16.0, 24.0], 3.0)
    """
    spec = spec_of_plan(_OP, plan)
    if not isinstance(spec, LinearAttentionSpec):
        raise TypeError(
            f"{_OP}: plan: expected a plan of a LinearAttentionSpec, got one of a"
            f" {type(spec).__name__}."
        )
    tokens, heads = spec.max_tokens, spec.num_v_heads
    of_keys = (tokens, spec.num_qk_heads, spec.head_dim_k)
    q, k = (check_array(_OP, n, x, of_keys, spec.dtype) for n, x in (("q", q), ("k", k)))
    v = check_array(_OP, "v", v, (tokens, heads, spec.head_dim_v), spec.dtype)
    if (g is None) != (spec.decay == "none"):
        raise ValueError(
            f"{_OP}: g: expected {'None' if g is not None else 'an array'} for a spec with"
            f" decay={spec.decay!r}, got {'None' if g is None else 'an array'}."
        )
    if g is not None:
        assert spec.decay_shape is not None
        g = check_array(_OP, "g", g, spec.decay_shape, "float32")
    if beta is not None:
        beta = check_array(_OP, "beta", beta, (tokens, heads), "float32")
    states, index = check_pool(_OP, states, layer, spec.state_shape, spec.state_dtype, plan)
    slots = "s" if layer is None else "l s"
    call = LinearCall(_OP, spec, "t", slots, _in_jnp)
    operands = LinearOperands(q, k, v, g, beta, states)
    o, states = attend(call, operands, jnp.asarray(plan.buffer), index)
    return checkpoint_name(o, O_NAME), states


def spec_of_plan(op: str, plan: Any) -> StateSpec:
    """The spec of a plan. Raises TypeError if it is none, ValueError for a wrong buffer."""
    if not isinstance(plan, StatePlan):
        raise TypeError(
            f"{op}: plan: expected a plan from plan_linear_attention, got {type(plan).__name__}."
        )
    shape, dtype = (getattr(plan.buffer, name, None) for name in ("shape", "dtype"))
    if shape != (plan.spec.plan_words,) or dtype != jnp.int32:
        raise ValueError(
            f"{op}: plan: expected a buffer of int32[{plan.spec.plan_words}] as its spec says, got"
            f" {dtype}{list(shape or ())}."
        )
    return plan.spec


def check_pool(
    op: str, states: Any, layer: Any, shape: tuple[int, ...], dtype: str, plan: StatePlan
) -> tuple[jax.Array, jax.Array]:
    """The pool, which has an axis of layers if there is a layer, and the index of the layer.

    With JAX_ATTN_CHECK=1 the words of the plan and the layer are checked on any device before the
    kernel runs.
    """
    states = as_array(op, "states", states)
    if layer is not None:
        if states.ndim != len(shape) + 1:
            raise ValueError(
                f"{op}: states: expected [num_layers, {', '.join(map(str, shape))}] with a layer,"
                f" got {list(states.shape)}."
            )
        shape = (states.shape[0], *shape)
    states = check_array(op, "states", states, shape, dtype)
    num_layers = 1 if layer is None else states.shape[0]
    index = layer_operand(op, layer, num_layers)
    if not _environment.check:
        return states, index

    def check(buffer: np.ndarray, layer: int) -> None:
        if fault := StatePlan(buffer, plan.spec).fault():
            raise ValueError(f"{op}: {fault}")
        spec = plan.spec
        _core.check_state_plan(op, buffer, spec.chunks_begin, spec.max_tokens, spec.num_slots)
        check_layer(op, layer, num_layers)

    return states, checked_layer(check, jnp.asarray(plan.buffer), index)


def takes_requests_at_once(spec: StateSpec) -> bool:
    """Whether each request is one chunk that writes one state: decode and drafts."""
    assert spec.max_qo_len is not None
    return spec.max_qo_len <= spec.chunk and spec.max_checkpoints == 0


def rows_of_requests(plan: StatePlan) -> tuple[jax.Array, jax.Array]:
    """[max_batch, max_qo_len] of row numbers, and which of them are tokens."""
    indptr = jnp.asarray(plan.section("qo_indptr"))
    at = jnp.arange(plan.spec.max_qo_len)
    return indptr[:-1, None] + at, at < jnp.diff(indptr)[:, None]


def rows_of_chunks(plan: StatePlan) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Chunks [max_chunks, 6], and of each the row numbers and which of them are tokens."""
    chunks = jnp.asarray(plan.section("chunks")).reshape(-1, 6)
    at = jnp.arange(plan.spec.chunk)
    rows = chunks[:, state_plan.BEGIN, None] + at
    return chunks, rows, at < chunks[:, state_plan.LENGTH, None]


def gather(x: Any, rows: jax.Array, is_token: jax.Array) -> Any:
    """Rows of x; 0 where there is no token, whatever x has there."""
    if x is None:
        return None
    if x.shape[0] == 0:
        return jnp.zeros((*rows.shape, *x.shape[1:]), x.dtype)
    mask = is_token.reshape(*is_token.shape, *[1] * (x.ndim - 1))
    return jnp.where(mask, x[jnp.where(is_token, rows, 0)], 0)


def scatter(values: jax.Array, rows: jax.Array, is_token: jax.Array, like: jax.Array) -> jax.Array:
    """Packed rows, in the dtype and of the number of `like`; 0 where there is no token."""
    o = jnp.zeros((like.shape[0], *values.shape[2:]), like.dtype)
    where = jnp.where(is_token, rows, like.shape[0])
    return o.at[where].set(values.astype(like.dtype), mode="drop")


def read_states(states: jax.Array, layer: jax.Array, slots: jax.Array) -> jax.Array:
    """[..., state], the states of slots; zeros for -1."""
    if states.shape[1] == 0:
        return jnp.zeros((*slots.shape, *states.shape[2:]), states.dtype)
    mask = (slots >= 0).reshape(*slots.shape, *[1] * (states.ndim - 2))
    return jnp.where(mask, states[layer, jnp.maximum(slots, 0)], 0)


def write_states(
    states: jax.Array, layer: jax.Array, slots: jax.Array, values: jax.Array
) -> jax.Array:
    """The pool with values in slots; nothing is written for -1."""
    where = jnp.where(slots >= 0, slots, states.shape[1])
    return states.at[layer, where].set(values.astype(states.dtype), mode="drop")


def with_fault(o: jax.Array, plan: StatePlan) -> jax.Array:
    """o, or NaN if the plan is faulty. A faulty plan names no slots, so the pool is unchanged."""
    code = jnp.asarray(plan.section("header"))[state_plan.FAULT]
    return jnp.where(code == 0, o, jnp.nan)


def _in_jnp(
    call: LinearCall, operands: LinearOperands, buffer: jax.Array, layer: jax.Array
) -> tuple[jax.Array, jax.Array]:
    *arrays, states = operands
    is_stacked = call.slots == "l s"
    compute = _side_by_side if takes_requests_at_once(call.spec) else _in_order
    plan = StatePlan(buffer, call.spec)
    given: list[Any] = [*arrays, states if is_stacked else states[None], plan, layer]
    o, states = compute(call.spec, *given)
    return o, states if is_stacked else states[0]


def _side_by_side(
    spec: LinearAttentionSpec, q: Any, k: Any, v: Any, g: Any, beta: Any, states: Any, plan: Any,
    layer: Any,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    rows, is_token = rows_of_requests(plan)
    commits = jnp.asarray(plan.section("commit_lens"))
    q, k, values, g, beta = (gather(x, rows, is_token) for x in (q, k, v, g, beta))
    terms = chunk_terms(spec, q, k, values, g, beta, commits)
    before = read_states(states, layer, jnp.asarray(plan.section("read_slots")))
    o, after = next_state(terms, before.astype(jnp.float32), commits)
    states = write_states(states, layer, jnp.asarray(plan.section("write_slots")), after)
    return with_fault(scatter(o, rows, is_token, v), plan), states


def _in_order(
    spec: LinearAttentionSpec, q: Any, k: Any, v: Any, g: Any, beta: Any, states: Any, plan: Any,
    layer: Any,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    chunks, rows, is_token = rows_of_chunks(plan)
    q, k, values, g, beta = (gather(x, rows, is_token) for x in (q, k, v, g, beta))
    terms = chunk_terms(spec, q, k, values, g, beta)

    def step(carry: Any, chunk: Any) -> Any:
        states, state = carry
        words, terms = chunk
        first = read_states(states, layer, words[state_plan.READ_SLOT]).astype(jnp.float32)
        state = jnp.where(words[state_plan.FIRST] == 1, first, state)
        o, state = next_state(terms, state)
        states = write_states(states, layer, words[state_plan.WRITE_SLOT], state)
        return (states, state), o

    begin = jnp.zeros(spec.state_shape[1:], jnp.float32)
    (states, _), o = lax.scan(step, (states, begin), (chunks, terms))
    return with_fault(scatter(o, rows, is_token, v), plan), states
