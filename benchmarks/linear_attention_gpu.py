"""Linear attention and short convolutions on a GPU: device time beside the jnp path and FLA.

    python -m benchmarks.linear_attention_gpu [--peers [jnp,fla]] [NAME ...]

NAMEs are beginnings of rows' names.

A line a row, in us: ours, the time of the bytes that must move at the rate of a copy, and with
--peers the jnp path and flash-linear-attention, if it is installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_attn as ja
from benchmarks import timing
from jax_attn._ops import linear_attention, short_convolution
from jax_attn._ops.linear_kernel import LinearCall, LinearOperands

DIM, LAYERS = 128, 4  # layers: more states than a cache holds
COPY_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True)
class Row:
    batch: int
    qo_len: int
    qk_heads: int
    v_heads: int
    state_dtype: str = "bfloat16"
    decay: str = "head"
    width: int = 0  # of a convolution; 0: linear attention
    calls: int = 8
    log_decay: float = -0.3  # decays are exp of this times |a normal number|
    backward: bool = False  # gradients, without the forward pass

    @property
    def channels(self) -> int:
        return (2 * self.qk_heads + self.v_heads) * DIM

    @property
    def tokens(self) -> int:
        return self.batch * self.qo_len

    @property
    def spec(self) -> ja.LinearAttentionSpec:
        return ja.LinearAttentionSpec(
            self.tokens, self.batch, self.batch, max_qo_len=self.qo_len,
            num_qk_heads=self.qk_heads, num_v_heads=self.v_heads, head_dim_k=DIM, head_dim_v=DIM,
            decay=self.decay, l2_norm=True, state_dtype=self.state_dtype,
        )  # fmt: skip

    @property
    def bytes(self) -> int:
        """States are read and written, q, k, v, g and beta are read, o is written.

        For gradients: also those of o and the states are read, and those of all arrays written.
        """
        if self.width:
            return 2 * 2 * self.channels * (self.tokens + self.batch * (self.width - 1))
        size = 2 if self.state_dtype == "bfloat16" else 4
        of_token = 2 * (self.channels + self.v_heads * DIM) + 4 * self.v_heads
        of_token += 4 * self.v_heads * (DIM if self.decay == "channel" else 1)
        return (1 + self.backward) * (
            2 * size * self.batch * self.v_heads * DIM * DIM + self.tokens * of_token
        )


ROWS = {
    "decode_64_bf16": Row(64, 1, 16, 32),
    "decode_64_f32": Row(64, 1, 16, 32, "float32"),
    "decode_256_bf16": Row(256, 1, 16, 32),
    "decode_8_bf16": Row(8, 1, 16, 32, calls=32),
    "decode_8_f32": Row(8, 1, 16, 32, "float32", calls=32),
    "decode_1_bf16": Row(1, 1, 16, 32, calls=32),
    "decode_64_kda": Row(64, 1, 32, 32, "float32", "channel"),
    "drafts_64x4_bf16": Row(64, 4, 16, 32),
    "drafts_64x8_f32": Row(64, 8, 16, 32, "float32"),
    "convolution_64x1": Row(64, 1, 16, 32, width=4, calls=32),
    "convolution_1x8192": Row(1, 8192, 16, 32, width=4),
    "convolution_1x65536_2_8": Row(1, 65536, 2, 8, width=4),
    "prefill_1x2048_2_8": Row(1, 2048, 2, 8, "float32", calls=8),
    "prefill_1x8192_2_8": Row(1, 8192, 2, 8, "float32", calls=8),
    "prefill_1x65536_2_8": Row(1, 65536, 2, 8, "float32", calls=1),
    "prefill_4x4096_16_32": Row(4, 4096, 16, 32, "float32", calls=2),
    "prefill_1x8192_16_32": Row(1, 8192, 16, 32, "float32", calls=2),
    "prefill_1x2048_2_8_slow": Row(1, 2048, 2, 8, "float32", calls=2, log_decay=-1e-3),
    "prefill_1x8192_2_8_slow": Row(1, 8192, 2, 8, "float32", calls=2, log_decay=-1e-3),
    "prefill_1x65536_2_8_slow": Row(1, 65536, 2, 8, "float32", calls=1, log_decay=-1e-3),
    "backward_1x2048_16_32": Row(1, 2048, 16, 32, "float32", calls=2, backward=True),
    "backward_1x8192_16_32": Row(1, 8192, 16, 32, "float32", calls=1, backward=True),
    "backward_4x4096_16_32": Row(4, 4096, 16, 32, "float32", calls=1, backward=True),
    "backward_1x8192_2_8": Row(1, 8192, 2, 8, "float32", calls=1, backward=True),
    "backward_1x2048_kda": Row(1, 2048, 32, 32, "float32", "channel", calls=1, backward=True),
    "backward_1x8192_kda": Row(1, 8192, 32, 32, "float32", "channel", calls=1, backward=True),
    "prefill_1x8192_kda": Row(1, 8192, 32, 32, "float32", "channel", calls=1),
}


def arrays(row: Row) -> list[jax.Array]:
    """q, k, v, g, beta, drawn on the device."""
    keys = jax.random.split(jax.random.key(0), 5)
    t, heads = row.tokens, row.v_heads
    shapes = [(t, row.qk_heads, DIM)] * 2 + [(t, heads, DIM)]
    q, k, v = (jax.random.normal(keys[i], shapes[i], "bfloat16") for i in range(3))
    of_g = (t, heads, DIM) if row.decay == "channel" else (t, heads)
    g = row.log_decay * jnp.abs(jax.random.normal(keys[3], of_g))
    return [q, k, v, g, jax.nn.sigmoid(jax.random.normal(keys[4], (t, heads)))]


def plan_of(row: Row) -> ja.StatePlan:
    slots = np.arange(row.batch)
    return ja.plan_linear_attention(row.spec, row.qo_len * np.arange(row.batch + 1), slots, slots)


def time_steps(row: Row, step: Callable[..., Any], pool: jax.Array, given: Any) -> float:
    """Time of step(given, pool, layer) -> (result, pool), one after the other."""

    def make_chain(num_calls: int) -> Callable[[], Any]:
        @jax.jit
        def chain(given: Any, pool: jax.Array) -> Any:
            results = []
            for i in range(num_calls):
                o, pool = step(given, pool, i % LAYERS)
                results.append(o)
            return results, pool

        return functools.partial(chain, given, pool)

    return timing.time_chain(make_chain, row.calls).us


def ours(row: Row) -> float:
    plan = plan_of(row)
    if row.width:
        return time_steps(row, *convolution(row, plan, ja.short_convolution))
    pool = jax.random.normal(jax.random.key(1), (LAYERS, *row.spec.state_shape), row.state_dtype)

    def step(given: Any, pool: jax.Array, layer: int) -> Any:
        return ja.linear_attention(*given, pool, plan, layer=layer)

    if row.backward:
        return time_gradients(row, step, pool)
    return time_steps(row, step, pool, arrays(row))


def time_gradients(row: Row, step: Callable[..., Any], pool: jax.Array) -> float:
    """Time of the gradients of a step, of which XLA leaves out the forward pass."""

    def backward(given: Any, d_pool: jax.Array, layer: int) -> Any:
        *operands, d_o, pool = given

        def forward(operands: Any, pool: jax.Array) -> Any:
            return step(operands, pool, layer)

        gradients, d_pool = jax.vjp(forward, operands, pool)[1]((d_o, d_pool))
        return gradients, d_pool

    given = arrays(row)
    return time_steps(row, backward, jnp.ones_like(pool), (*given, given[2], pool))


def in_jnp(row: Row) -> float:
    plan = plan_of(row)
    if row.width:
        static = short_convolution._Static(row.spec, True, True)

        def convolve(x: Any, weight: Any, bias: Any, pool: Any, plan: Any, **at: Any) -> Any:
            operands = short_convolution._Operands(x, weight, bias, pool)
            return short_convolution._in_jnp(
                static, operands, jnp.asarray(plan.buffer), jnp.int32(at["layer"])
            )

        return time_steps(row, *convolution(row, plan, convolve))
    call = LinearCall("linear_attention", row.spec, "t", "l s", linear_attention._in_jnp)
    pool = jax.random.normal(jax.random.key(1), (LAYERS, *row.spec.state_shape), row.state_dtype)

    def step(given: Any, pool: jax.Array, layer: int) -> Any:
        buffer = jnp.asarray(plan.buffer)
        return call.in_jnp(call, LinearOperands(*given, pool), buffer, jnp.int32(layer))

    if row.backward:
        return time_gradients(row, step, pool)
    return time_steps(row, step, pool, arrays(row))


def convolution(row: Row, plan: ja.StatePlan, convolve: Callable[..., Any]) -> tuple[Any, ...]:
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (row.tokens, row.channels), "bfloat16")
    weight = jax.random.normal(keys[1], (row.channels, row.width))
    shape = (LAYERS, row.batch, row.width - 1, row.channels)
    pool = jax.random.normal(keys[2], shape, "bfloat16")

    def step(given: Any, pool: jax.Array, layer: int) -> Any:
        x, weight = given
        return convolve(x, weight, None, pool, plan, activation="silu", layer=layer)

    return step, pool, (x, weight)


def by_fla(row: Row) -> float:
    """Its kernels of prefill and decode, without a pool: states are one array."""
    import torch
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
    from triton.testing import do_bench

    def tensor(x: jax.Array) -> Any:
        found = torch.from_dlpack(x)
        return found.reshape(row.batch, row.qo_len, *found.shape[1:]).contiguous()

    q, k, v, g, beta = (tensor(x) for x in arrays(row))
    shape = (row.batch, row.v_heads, DIM, DIM)
    state = torch.randn(shape, device="cuda", dtype=getattr(torch, row.state_dtype))
    run = fused_recurrent_gated_delta_rule if row.qo_len <= 8 else chunk_gated_delta_rule
    keywords = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    if row.backward:
        inputs = [x.requires_grad_() for x in (q, k, v, g, beta, state)]
        results = run(*inputs[:5], **keywords)
        weights = [torch.ones_like(x) for x in results]

        def backward() -> None:
            torch.autograd.grad(results, inputs, weights, retain_graph=True)

        return 1e3 * do_bench(backward, return_mode="median")
    return 1e3 * do_bench(lambda: run(q, k, v, g, beta, **keywords), return_mode="median")


# Bytes a us of a copy by the driver, read and written, where it was measured: XLA's own copies are
# slower.
COPY_RATES = {"NVIDIA H200": 4.3e6}


def copy_rate() -> float:
    """Bytes a us of a copy by XLA, read and written."""
    x = jnp.ones((LAYERS, COPY_BYTES // 8), "bfloat16")

    def make_chain(num_calls: int) -> Callable[[], Any]:
        @jax.jit
        def chain(x: jax.Array) -> jax.Array:
            for _ in range(num_calls):
                x = jax.lax.optimization_barrier(x + 1)
            return x

        return functools.partial(chain, x)

    return 2 * x.nbytes / timing.time_chain(make_chain, 4).us


def measured(what: Callable[[Row], float], row: Row) -> str:
    try:
        return f"{what(row):10.1f}"
    except Exception as error:  # a row that one of them cannot run does not end the others
        return f"  {type(error).__name__}: {str(error).splitlines()[0][:60]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", default=[""])
    parser.add_argument("--peers", nargs="?", const="jnp,fla", default="", help="of jnp, fla; both")
    arguments = parser.parse_args()
    device = jax.devices()[0].device_kind
    rate = COPY_RATES.get(device) or copy_rate()
    has_fla = importlib.util.find_spec("fla") is not None
    print(f"{device}: copy {rate / 1e6:.2f} TB/s", flush=True)
    print(f"{'row':<26}{'ours':>10}{'bytes':>10}{'ratio':>7}{'jnp':>10}{'FLA':>10}", flush=True)
    for name, row in ROWS.items():
        if not name.startswith(tuple(arguments.names)):
            continue
        floor = row.bytes / rate
        own = measured(ours, row)
        ratio = f"{float(own) / floor:7.2f}" if own.strip()[0].isdigit() else "       "
        print(f"{name:<26}{own}{floor:10.1f}{ratio}", end="", flush=True)
        uses_fla = has_fla and "fla" in arguments.peers and not row.width and row.decay == "head"
        jnp_time = measured(in_jnp, row) if "jnp" in arguments.peers else " " * 10
        print(jnp_time, measured(by_fla, row) if uses_fla else "", flush=True)


if __name__ == "__main__":
    main()
