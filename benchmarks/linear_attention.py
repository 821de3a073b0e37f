"""Linear attention on a CPU beside transformers' torch functions and a plain copy.

    python -m benchmarks.linear_attention

Needs torch and transformers. One line a measurement: the best of several runs, in ms.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

import jax_attn as ja
from jax_attn._ops import gated_delta_rule
from jax_attn._ops.linear_kernel import LinearCall, LinearOperands

SEQ, QK_HEADS, V_HEADS, DIM, DECODES = 2048, 16, 32, 128, 8


def best(call: Callable[[], Any], runs: int = 3) -> float:
    """Least time of a call in ms, after one that is not counted."""
    call()
    times = []
    for _ in range(runs):
        begin = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - begin))
    return min(times)


def arrays(tokens: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = ((QK_HEADS, DIM), (QK_HEADS, DIM), (V_HEADS, DIM), (V_HEADS,), (V_HEADS,))
    q, k, v, g, beta = (rng.standard_normal((tokens, *s)).astype(np.float32) for s in shapes)
    return [q, k, v, -0.3 * np.abs(g), 1 / (1 + np.exp(-beta))]


def spec_of(tokens: int, requests: int, dtype: str, **fields: Any) -> ja.LinearAttentionSpec:
    return ja.LinearAttentionSpec(
        tokens, requests, requests, num_qk_heads=QK_HEADS, num_v_heads=V_HEADS, head_dim_k=DIM,
        head_dim_v=DIM, l2_norm=True, dtype=dtype, **fields,
    )  # fmt: skip


def prefill(dtype: str) -> None:
    spec = spec_of(SEQ, 1, dtype)
    plan = ja.plan_linear_attention(spec, [0, SEQ], [-1], [0])
    given = [jnp.asarray(x, dtype if i < 3 else "float32") for i, x in enumerate(arrays(SEQ))]
    states = jnp.zeros(spec.state_shape)
    call = jax.jit(ja.linear_attention)
    ours = best(lambda: jax.block_until_ready(call(*given, states, plan)))
    tensors = [torch.tensor(x)[None] for x in arrays(SEQ)]
    tensors[:2] = [x.repeat_interleave(V_HEADS // QK_HEADS, dim=2) for x in tensors[:2]]
    if dtype == "bfloat16":
        tensors[:3] = [x.bfloat16() for x in tensors[:3]]
    with torch.no_grad():
        keywords = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        theirs = best(lambda: torch_chunk_gated_delta_rule(*tensors, **keywords))
    print(f"prefill {dtype}: {ours:.1f}, torch {theirs:.1f}, ratio {theirs / ours:.2f}", flush=True)


def decode() -> None:
    spec = spec_of(DECODES, DECODES, "bfloat16", max_qo_len=1)
    slots = np.arange(DECODES)
    plan = ja.plan_linear_attention(spec, np.arange(DECODES + 1), slots, slots)
    given = [jnp.asarray(x, "bfloat16" if i < 3 else None) for i, x in enumerate(arrays(DECODES))]
    call = jax.jit(ja.linear_attention, donate_argnums=5)
    pool = [jnp.zeros(spec.state_shape)]

    def step() -> None:
        o, pool[0] = call(*given, pool[0], plan)
        jax.block_until_ready((o, pool[0]))

    copied = np.zeros(spec.state_shape, np.float32), np.ones(spec.state_shape, np.float32)
    # In turns, and of many: both are short, so that other work of the machine shows.
    pairs = [(best(step, 10), best(lambda: np.copyto(*copied), 10)) for _ in range(30)]
    ours, copy = (min(times) for times in zip(*pairs, strict=True))
    print(f"decode of {DECODES}: {ours:.2f}, copy {copy:.2f}, ratio {copy / ours:.2f}", flush=True)


def training() -> None:
    """Beside the same gradients in jax.numpy, which platforms without kernels run."""
    given = [jnp.asarray(x)[None] for x in arrays(SEQ)]
    spec = spec_of(SEQ, 1, "float32")
    call = LinearCall("gated_delta_rule", spec, "b t", "b", gated_delta_rule._in_jnp)
    state = jnp.zeros(spec.state_shape)

    def ours(*given: jax.Array) -> jax.Array:
        return (ja.gated_delta_rule(*given, l2_norm=True)[0] ** 2).sum()

    def in_jnp(*given: jax.Array) -> jax.Array:
        return (gated_delta_rule._in_jnp(call, LinearOperands(*given, state))[0] ** 2).sum()

    times = []
    for loss in (ours, in_jnp):
        gradients = jax.jit(jax.grad(loss, (0, 1, 2, 3, 4)))
        times.append(best(lambda call=gradients: jax.block_until_ready(call(*given)), 5))
    print(
        f"forward and backward float32: {times[0]:.0f}, jnp {times[1]:.0f}, ratio"
        f" {times[1] / times[0]:.2f}",
        flush=True,
    )


def convolution(tokens: int, requests: int) -> None:
    """All channels of q, k and v, width 4; beside a plain copy of the inputs."""
    channels = (2 * QK_HEADS + V_HEADS) * DIM
    spec = ja.StateSpec(tokens, requests, requests)
    slots = np.arange(requests)
    indptr = np.arange(requests + 1) * (tokens // requests)
    plan = ja.plan_linear_attention(spec, indptr, slots, slots)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((tokens, channels)), "bfloat16")
    weight = jnp.asarray(rng.standard_normal((channels, 4)), "float32")
    pool = [jnp.zeros((requests, 3, channels), "bfloat16")]
    call = jax.jit(
        lambda x, pool, plan: ja.short_convolution(x, weight, None, pool, plan, activation="silu"),
        donate_argnums=1,
    )

    def step() -> None:
        y, pool[0] = call(x, pool[0], plan)
        jax.block_until_ready((y, pool[0]))

    copied = np.zeros(x.shape, np.int16), np.ones(x.shape, np.int16)
    ours, copy = best(step, 10), best(lambda: np.copyto(*copied), 10)
    print(f"convolution of {tokens} tokens: {ours:.2f}, copy {copy:.2f}", flush=True)


if __name__ == "__main__":
    decode()
    convolution(DECODES, DECODES)
    convolution(SEQ, 1)
    prefill("float32")
    prefill("bfloat16")
    training()
