"""The bundled model without paged attention: static batches, padded dense caches and
jax.nn.dot_product_attention.

    python -m benchmarks.peers.jax_nn_decoder --model DIR --batch 8 --prompt 128 --output 64 128

All sequences of a batch start together and run until the longest output ends; surplus tokens are
discarded. There is no server, no streaming and no stop condition: tokens stay on the device until a
batch is done. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn import models
from jax_attn.models._layers import decoder

Caches = list[tuple[jax.Array, jax.Array]]  # per layer: k, v [batch, len, heads, head_dim]


@functools.partial(jax.jit, static_argnames="config", donate_argnames="caches")
def forward(params: Any, config: Any, tokens: Any, begin: Any, caches: Caches) -> Any:
    """Returns each next token, and caches. tokens: [batch, new]. begin: tokens in the caches."""
    batch_size, num_new = tokens.shape
    positions = jnp.tile(begin + jnp.arange(num_new), batch_size)
    caches = list(caches)

    def attend(qkv: Any, weights: Any, place: Any, kind: Any) -> Any:
        q, k, v = (
            a.reshape(batch_size, num_new, *a.shape[1:])
            for a in decoder._rotated_heads(qkv, weights, positions, config, kind)
        )
        pages = [
            jax.lax.dynamic_update_slice(cache, new, (0, begin, 0, 0))
            for cache, new in zip(caches[place.layer], (k, v), strict=True)
        ]
        if num_new > 1:  # a prompt: the caches are empty
            o = jax.nn.dot_product_attention(q, k, v, scale=config.sm_scale, is_causal=True)
        else:
            lengths = jnp.full(batch_size, begin + 1, jnp.int32)
            o = jax.nn.dot_product_attention(
                q, *pages, scale=config.sm_scale, key_value_seq_lengths=lengths
            )
        caches[place.layer] = tuple(pages)
        return o.reshape(-1, *o.shape[2:])

    x = decoder._layers(tokens.reshape(-1), params, config, attend)
    last = x.reshape(batch_size, num_new, -1)[:, -1]
    return jnp.argmax(decoder._logits(last, params, config), axis=-1)[:, None], caches


def run_batch(model: Any, prompts: np.ndarray, num_steps: int, cache_len: int) -> jax.Array:
    """Generates [batch, num_steps] greedy tokens. One cache_len for all batches compiles once."""
    config, params = model.config, model.params
    batch_size, prompt_len = prompts.shape
    shape = (batch_size, cache_len, config.num_kv_heads, config.head_dim)
    dtype = params["embed"].dtype
    caches: Caches = [(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in config.layers]
    token, caches = forward(params, config, prompts, np.int32(0), caches)
    tokens = [token]
    for step in range(num_steps - 1):
        token, caches = forward(params, config, token, np.int32(prompt_len + step), caches)
        tokens.append(token)
    return jnp.concatenate(tokens, axis=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--prompt", type=int, required=True, help="tokens")
    parser.add_argument(
        "--output", type=int, nargs=2, required=True, help="tokens, uniform between"
    )
    parser.add_argument("--seconds", type=float, default=8)
    args = parser.parse_args()
    model = models.load(args.model, dtype="float32")
    generator = np.random.default_rng(0)
    low, high = args.output

    def wave() -> int:
        """Runs one batch and returns the number of requested tokens."""
        lengths = generator.integers(low, high + 1, args.batch)
        prompts = generator.integers(1, model.config.vocab_size, (args.batch, args.prompt))
        tokens = run_batch(model, prompts.astype(np.int32), max(lengths), args.prompt + high)
        jax.block_until_ready(tokens)
        return int(lengths.sum())

    wave()
    begin, num_tokens = time.perf_counter(), 0
    while time.perf_counter() - begin < args.seconds:
        num_tokens += wave()
    seconds = time.perf_counter() - begin
    print(json.dumps({"batch": args.batch, "tokens_per_s": round(num_tokens / seconds, 1)}))


if __name__ == "__main__":
    main()
