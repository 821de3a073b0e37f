"""The operations of recurrent layers that have states: over slots, and on one sequence alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp

import jax_attn as ja
from jax_attn.models._config.recurrent import NormedTogether, Recurrent

_L2_EPS = 1e-6
Activation = Literal["silu"] | None


class States(NamedTuple):
    """The states of all recurrent layers, in slots. Each array is a pool of jax_attn's operations.

    conv: [layers, slots, width - 1, channels], in the dtype of activations. See short_convolution.
      None: layers have no convolution.
    recurrent: [layers, slots, num_v_heads, dim_k, dim_v] f32. See linear_attention. None: layers
      have convolutions alone.
    """

    conv: jax.Array | None
    recurrent: jax.Array | None


class Recurrence(Protocol):
    """What a layer calls. `index` is its number among the recurrent layers."""

    index: int

    def convolve(
        self, x: jax.Array, weight: jax.Array, bias: jax.Array | None, activation: Activation
    ) -> jax.Array:
        """Convolves x [n, channels] with weight [channels, width], see ja.short_convolution."""
        ...

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array | None
    ) -> jax.Array:
        """Applies the rule: q, k [n, num_qk_heads, head_dim_k], v [n, num_v_heads, head_dim_v] ->
        like v.

        g: [n, num_v_heads (, head_dim_k)] f32, log of the decay. beta: [n, num_v_heads] f32; None:
        1.
        """
        ...


class Paged:
    """Over slots of states, which `states` then has anew."""

    def __init__(self, states: States, plan: ja.StatePlan):
        self.states, self.plan, self.index = states, plan, 0

    def convolve(
        self, x: jax.Array, weight: jax.Array, bias: jax.Array | None, activation: Activation
    ) -> jax.Array:
        assert self.states.conv is not None
        y, conv = ja.short_convolution(
            x, weight, bias, self.states.conv, self.plan, activation=activation, layer=self.index
        )
        self.states = self.states._replace(conv=conv)
        return y

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array | None
    ) -> jax.Array:
        assert self.states.recurrent is not None
        o, recurrent = ja.linear_attention(
            q, k, v, g, beta, self.states.recurrent, self.plan, layer=self.index
        )
        self.states = self.states._replace(recurrent=recurrent)
        return o


class InWaves:
    """For training: plans one after the other over consecutive tokens, from states of zeros.

    A wave reads states that earlier ones have written: answers go on from those of their prompts.
    """

    def __init__(self, sizes: Recurrent, plans: tuple[ja.StatePlan, ...]):
        self._sizes, self._plans, self.index = sizes, plans, 0

    def convolve(
        self, x: jax.Array, weight: jax.Array, bias: jax.Array | None, activation: Activation
    ) -> jax.Array:
        shape = weight.shape[1] - 1, x.shape[1]
        states, ys = jnp.zeros((self._plans[0].spec.num_slots, *shape), x.dtype), []
        for plan, (rows,) in self._waves(x):
            y, states = ja.short_convolution(
                rows, weight, bias, states, plan, activation=activation
            )
            ys.append(y)
        return jnp.concatenate(ys)

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array | None
    ) -> jax.Array:
        rule = self._sizes.rule
        assert rule is not None
        shape = self._plans[0].spec.num_slots, *rule.state_shape
        states, os = jnp.zeros(shape, jnp.float32), []
        beta = jnp.ones(v.shape[:2], jnp.float32) if beta is None else beta
        for plan, rows in self._waves(q, k, v, g, beta):
            of_q, of_k, of_v, of_g, of_beta = rows
            o, states = ja.linear_attention(of_q, of_k, of_v, of_g, of_beta, states, plan)
            os.append(o)
        return jnp.concatenate(os)

    def _waves(self, *arrays: jax.Array) -> Iterator[tuple[ja.StatePlan, list[jax.Array]]]:
        begin = 0
        for plan in self._plans:
            end = begin + plan.spec.max_tokens
            yield plan, [x[begin:end] for x in arrays]
            begin = end


class TokenByToken:
    """On one sequence from its beginning, as the oracle."""

    def __init__(self, sizes: Recurrent):
        self._sizes, self.index = sizes, 0

    def convolve(
        self, x: jax.Array, weight: jax.Array, bias: jax.Array | None, activation: Activation
    ) -> jax.Array:
        width = weight.shape[1]
        padded = jnp.pad(x.astype(jnp.float32), ((width - 1, 0), (0, 0)))
        taps = [padded[i : i + len(x)] * weight[:, i].astype(jnp.float32) for i in range(width)]
        y = sum(taps[1:], taps[0])
        if bias is not None:
            y += bias.astype(jnp.float32)[None]
        return (jax.nn.silu(y) if activation else y).astype(x.dtype)

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array | None
    ) -> jax.Array:
        rule = self._sizes.rule
        assert rule is not None
        q, k = (x.astype(jnp.float32) for x in (q, k))
        if rule.l2_norm:
            q, k = _unit(q), _unit(k)
        per_head = rule.num_v_heads // rule.num_qk_heads
        q, k = (jnp.repeat(x, per_head, axis=1) for x in (q, k))
        g = g.reshape(*g.shape[:2], -1)  # for each channel, or one for all
        beta = jnp.ones(v.shape[:2], jnp.float32) if beta is None else beta

        def step(state: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
            q, k, v, g, beta = token
            state = jnp.exp(g)[:, :, None] * state
            new = v - jnp.einsum("hkv,hk->hv", state, k) if rule.delta_rule else v
            state += k[:, :, None] * (beta[:, None] * new)[:, None]
            return state, jnp.einsum("hkv,hk->hv", state, q)

        zeros = jnp.zeros(rule.state_shape, jnp.float32)
        scale = rule.head_dim_k**-0.5 if rule.scale is None else rule.scale
        return jax.lax.scan(step, zeros, (q * scale, k, v.astype(jnp.float32), g, beta))[1].astype(
            v.dtype
        )


def mean_of_squares(x: jax.Array, together: NormedTogether | None) -> jax.Array:
    """The mean of the squares of the last axis, [..., 1]; with those of other devices."""
    mean = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    if together is None:
        return mean
    means = jax.lax.all_gather(mean, together.axis_name)
    device = jax.lax.axis_index(together.axis_name)
    first = device // together.count * together.count
    return jnp.mean(jax.lax.dynamic_slice_in_dim(means, first, together.count), axis=0)


def _unit(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + _L2_EPS)
