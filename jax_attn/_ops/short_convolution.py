"""short_convolution: causal depthwise convolutions whose last inputs are states in a pool."""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jax_attn._ops.linear_attention import (
    check_pool,
    read_states,
    scatter,
    spec_of_plan,
    with_fault,
    write_states,
)
from jax_attn._ops.operands import as_array, check_array, with_default_promotion
from jax_attn._plan import state_plan
from jax_attn._plan.search import searchsorted
from jax_attn._plan.state_plan import StatePlan
from jax_attn._spec.formats import DTYPES
from jax_attn._spec.state_spec import MAX_CONVOLUTION_WIDTH, StateSpec
from jax_attn._spec.target import gpu_target
from jax_attn._xla import ffi

_OP = "short_convolution"


@with_default_promotion
def short_convolution(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    states: jax.Array,
    plan: StatePlan,
    *,
    activation: Literal["silu"] | None = None,
    layer: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """A causal depthwise convolution of each request, from the inputs before its first token.

    y[t, c] = activation(bias[c] + sum_i weight[c, i] * x[t - (width - 1) + i, c]), as torch's
    Conv1d with groups = num_channels. Sums are f32. Differentiable in x, weight, bias and states.
    Rows behind the last request may have any value; their y is 0.

    x: [max_tokens, num_channels], bf16 | f16 | f32. Packed tokens of all requests.
    weight: [num_channels, width] in a float dtype, width 1 to 8. The last column is that of the
        token itself.
    bias: [num_channels] or None.
    states: [num_slots, width - 1, num_channels] in x's dtype, or with `layer` [num_layers,
        num_slots, ...]: the last inputs, the oldest first.
    plan: from plan_linear_attention, with any spec. Slots, commit_lens and checkpoints are those of
        linear_attention.
    activation: "silu" or None.
    layer: i32 scalar, the layer of a stacked pool; may be traced. None: there is no layer axis.

    Returns y: [max_tokens, num_channels] in x's dtype, and the new states. Raises ValueError for
    shapes or dtypes that do not fit.

    >>> import jax.numpy as jnp
    >>> import jax_attn as ja
    >>> plan = ja.plan_linear_attention(ja.StateSpec(3, 1, 1), [0, 3], [-1], [0])
    >>> x, weight = jnp.array([[1.0], [2.0], [3.0]]), jnp.array([[10.0, 1.0]])
    >>> y, states = ja.short_convolution(x, weight, None, jnp.zeros((1, 1, 1)), plan)
    >>> y[:, 0].tolist(), states.item()
    ([1.0, 12.0, 23.0], 3.0)
    """
    spec = spec_of_plan(_OP, plan)
    x, weight = as_array(_OP, "x", x), as_array(_OP, "weight", weight)
    if x.ndim != 2 or x.dtype.name not in DTYPES:
        raise ValueError(
            f"{_OP}: x: expected [max_tokens, num_channels] of {', '.join(DTYPES)}, got"
            f" {x.dtype}{list(x.shape)}."
        )
    channels = x.shape[1]
    x = check_array(_OP, "x", x, (spec.max_tokens, channels), x.dtype.name)
    is_width = weight.ndim == 2 and 1 <= weight.shape[1] <= MAX_CONVOLUTION_WIDTH
    if not is_width or weight.shape[0] != channels or weight.dtype.kind in "iub":
        raise ValueError(
            f"{_OP}: weight: expected [{channels}, width] floats with width 1 to"
            f" {MAX_CONVOLUTION_WIDTH}, got {weight.dtype}{list(weight.shape)}."
        )
    if bias is not None:
        bias = as_array(_OP, "bias", bias)
        if bias.shape != (channels,):
            raise ValueError(f"{_OP}: bias: expected [{channels}], got {list(bias.shape)}.")
    if activation not in (None, "silu"):
        raise ValueError(f'{_OP}: activation: expected "silu" or None, got {activation!r}.')
    past = weight.shape[1] - 1
    shape = (spec.num_slots, past, channels)
    states, index = check_pool(_OP, states, layer, shape, x.dtype.name, plan)
    static = _Static(spec, activation == "silu", layer is not None)
    operands = _Operands(x, weight, bias, states)
    y, states = _convolve(static, operands, jnp.asarray(plan.buffer), index)
    return y, states


class _Operands(NamedTuple):
    """The arrays that a call is differentiated by."""

    x: jax.Array
    weight: jax.Array
    bias: jax.Array | None
    states: jax.Array


class _Static(NamedTuple):
    spec: StateSpec
    has_silu: bool
    is_stacked: bool  # states have an axis of layers


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _convolve(
    static: _Static, operands: _Operands, buffer: jax.Array, layer: jax.Array
) -> tuple[jax.Array, jax.Array]:
    def by_kernel(arch: int, operands: _Operands, buffer: jax.Array, layer: jax.Array) -> Any:
        spec = static.spec
        assert spec.max_qo_len is not None
        return ffi.short_convolution(
            *operands,
            buffer,
            layer,
            chunks_begin=spec.chunks_begin,
            max_qo_len=spec.max_qo_len,
            silu=static.has_silu,
            arch=arch,
        )

    gpu = gpu_target()
    on_gpu = {} if gpu is None else {"cuda": functools.partial(by_kernel, gpu[0])}
    return jax.lax.platform_dependent(
        operands,
        buffer,
        layer,
        cpu=functools.partial(by_kernel, 0),
        **on_gpu,
        default=functools.partial(_in_jnp, static),
    )


@_convolve.defjvp
def _tangents(static: _Static, primals: Any, tangents: Any) -> Any:
    operands, buffer, layer = primals
    run = lambda operands: _in_jnp(static, operands, buffer, layer)  # noqa: E731
    _, moved = jax.jvp(run, (operands,), (tangents[0],))
    return _convolve(static, operands, buffer, layer), moved


def _in_jnp(
    static: _Static, operands: _Operands, buffer: jax.Array, index: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, weight, bias, states = operands
    spec, channels, past = static.spec, x.shape[1], weight.shape[1] - 1
    plan = StatePlan(buffer, spec)
    if not static.is_stacked:
        states = states[None]
    indptr = jnp.asarray(plan.section("qo_indptr"))
    read = jnp.asarray(plan.section("read_slots"))
    chunks = jnp.asarray(plan.section("chunks")).reshape(-1, 6)
    row = jnp.arange(spec.max_tokens)
    request = jnp.clip(searchsorted(jnp, indptr, row) - 1, 0, spec.max_batch - 1)
    is_token = row < indptr[-1]
    x = jnp.where(is_token[:, None], x, 0)  # 0 times a NaN of padding would be one of the gradients

    def inputs(request: Any, at: Any) -> jax.Array:
        """Input `at` of a request, counted from its first token in this call; before it, states."""
        begin = indptr[request]
        token = jnp.clip(begin + at, 0, max(spec.max_tokens - 1, 0))
        new = x[token] if spec.max_tokens else jnp.zeros((*at.shape, channels), x.dtype)
        if past == 0:
            return new
        # The whole state of a slot is read once per request, not once per token.
        first = read_states(states, index, read)
        old = first[request, jnp.clip(at + past, 0, past - 1)]
        return jnp.where((at >= 0)[..., None], new, old)

    if spec.max_batch and spec.max_tokens:
        taps = weight.astype(jnp.float32)
        at = row - indptr[request]
        y = jnp.zeros(x.shape, jnp.float32)
        for i in range(past + 1):
            y += taps[:, i] * inputs(request, at - past + i).astype(jnp.float32)
        if bias is not None:
            y += bias.astype(jnp.float32)
        y = jax.nn.silu(y) if static.has_silu else y
        y = scatter(y[:, None], row[:, None], is_token[:, None], x)
        if past:
            of = jnp.maximum(chunks[:, state_plan.REQUEST], 0)
            end = chunks[:, state_plan.BEGIN] + chunks[:, state_plan.LENGTH] - indptr[of]
            kept = inputs(of[:, None], end[:, None] - past + jnp.arange(past))
            states = write_states(states, index, chunks[:, state_plan.WRITE_SLOT], kept)
    else:
        y = jnp.zeros(x.shape, x.dtype)
        if spec.max_batch and past:  # no tokens: copies
            kept = read_states(states, index, read)
            write = jnp.asarray(plan.section("write_slots"))
            states = write_states(states, index, write, kept)
    return with_fault(y, plan), states if static.is_stacked else states[0]
