"""A layer's experts over the GPUs of one host: by all-to-all, by an all-reduce, and on one GPU.

    python -m benchmarks.expert_devices [--devices N] [--calls 4] [--tiny]

The layer is the router and experts of Qwen3-30B-A3B (2,048 wide, 128 experts of 768, 8 a token),
in bfloat16. "one" is all tokens on one device. The others have as many tokens on all devices
together: "data" (each device its own tokens, ExpertParallel), "heads" (all devices all tokens, and
TensorParallel's all-reduce) and "parts" (heads, but each device sends a part of the tokens). With
"skewed" all tokens choose the same experts, which are on one device: the worst that can be. Each
call feeds the next one. Bytes are those of the results of collectives on one device, from the HLO.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from typing import Any

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # no multicast, which needs extra privileges

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import timing
from benchmarks.collectives import executed
from jax_attn import models
from jax_attn.models._layers import decoder

_ROUNDS = 7
_TOKENS = {"even": (128, 1024, 8192), "skewed": (1024,)}


def _config(tiny: bool) -> models.ModelConfig:
    shrink = 16 if tiny else 1
    return models.parse_config(
        {
            "model_type": "qwen3_moe", "vocab_size": 256, "hidden_size": 2048 // shrink,
            "intermediate_size": 6144 // shrink, "num_hidden_layers": 1,
            "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
            "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
            "moe_intermediate_size": 768 // shrink, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
            "max_position_embeddings": 4096, "hidden_act": "silu", "tie_word_embeddings": False,
            "bos_token_id": 0, "eos_token_id": 0,
        }
    )  # fmt: skip


def _weights(config: models.ModelConfig, dtype: str, skewed: bool) -> dict[str, Any]:
    assert config.experts is not None
    count, hidden = config.experts.count, config.hidden_size
    size = config.experts.intermediate_size
    keys = jax.random.split(jax.random.key(0), 3)

    def random(key: Any, *shape: int) -> jax.Array:
        return (jax.random.normal(key, shape, jnp.float32) * shape[-2] ** -0.5).astype(dtype)

    router = random(keys[0], hidden, count)
    return {
        "router": router * 0 if skewed else router,  # of equal ones the first are chosen
        "expert_gate_up": random(keys[1], count, hidden, 2 * size),
        "expert_down": random(keys[2], count, size, hidden),
    }


def _chain(config: models.ModelConfig, calls: int) -> Any:
    def chain(x: jax.Array, weights: dict[str, Any]) -> jax.Array:
        for _ in range(calls):
            y = x + decoder._experts(x, weights, config)
            scale = jax.lax.rsqrt(jnp.square(y.astype(jnp.float32)).mean(-1, keepdims=True) + 1e-6)
            x = (y * scale).astype(x.dtype)
        return x

    return chain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=None)
    parser.add_argument("--calls", type=int, default=4)
    parser.add_argument("--tiny", action="store_true", help="tries the script on any machine")
    arguments = parser.parse_args()
    devices = jax.devices()[: arguments.devices]
    num, calls = len(devices), arguments.calls
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((num,), ("x",), devices=devices, axis_types=auto)
    config = _config(arguments.tiny)
    dtype = "float32" if arguments.tiny else "bfloat16"
    ways = {
        "data": (dataclasses.replace(config, experts_axis="x"), P("x")),
        "heads": (dataclasses.replace(config, heads_axis="x", heads_mesh=mesh), P()),
        "parts": (
            dataclasses.replace(config, heads_axis="x", heads_mesh=mesh, experts_axis="x"), P(),
        ),
    }  # fmt: skip
    print(f"{num} x {devices[0].device_kind}, jax {jax.__version__}, us a layer")
    names = ["one", *ways]
    print(f"{'tokens':>8} {'routing':>8} " + " ".join(f"{name:>9}" for name in names) + "  bytes")
    for skewed in (False, True):
        whole = jax.device_put(_weights(config, dtype, skewed), devices[0])
        specs = {name: P("x") if name.startswith("expert_") else P() for name in whole}
        split = jax.device_put(whole, {n: NamedSharding(mesh, spec) for n, spec in specs.items()})
        routing = "skewed" if skewed else "even"
        for tokens in _TOKENS[routing][: 1 if arguments.tiny else None]:
            x = jax.random.normal(jax.random.key(1), (tokens, config.hidden_size), dtype)
            x = jax.device_put(x, devices[0])
            one = jax.jit(_chain(config, calls)).lower(x, whole).compile()
            want = np.asarray(one(x, whole), np.float32)
            row = [timing.median_us(lambda: one(x, whole), _ROUNDS) / calls]  # noqa: B023
            sent = []
            for name, (own, spec) in ways.items():
                run = jax.shard_map(
                    _chain(own, calls), mesh=mesh, in_specs=(spec, specs), out_specs=spec,
                    check_vma=False,
                )  # fmt: skip
                given = jax.device_put(x, NamedSharding(mesh, spec))
                call = jax.jit(run).lower(given, split).compile()
                got = np.asarray(call(given, split), np.float32)
                error = np.linalg.norm(got - want) / np.linalg.norm(want)
                # Roundings change which of two nearly equal experts some tokens choose.
                assert error < 0.3, (name, tokens, error)
                us = timing.median_us(lambda: call(given, split), _ROUNDS)  # noqa: B023
                row.append(us / calls)
                found = executed(call.as_text())
                size = sum(size * n for (_, size), n in found.items()) // calls
                sent.append(f"{name} {size}")
            print(
                f"{tokens:>8} {routing:>8} " + " ".join(f"{us:9.1f}" for us in row) + "  "
                + ", ".join(sent), flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
