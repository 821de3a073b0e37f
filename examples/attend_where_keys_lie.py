"""A context larger than the device's memory: cold pages stay in the host's, where the CPU attends.

A decode step of one request. The device attends its own pages while the CPU attends the others, and
the two states merge. The other way, which moves cold pages to the device in each step, is timed
beside it: `--tokens 131072 --layers 4` on a GPU says which is faster there.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

import jax_attn as ja

parser = argparse.ArgumentParser()
parser.add_argument("--tokens", type=int, default=2048, help="cold ones, of each layer")
parser.add_argument("--hot", type=int, default=1024, help="tokens on the device, of each layer")
parser.add_argument("--layers", type=int, default=2)
arguments = parser.parse_args()

device, host = jax.devices()[0], jax.devices("cpu")[0]
page_size, dtype = 64, jnp.bfloat16 if device.platform == "gpu" else jnp.float32
heads = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim_qk": 128, "dtype": str(dtype.dtype)}


def batch(num_tokens, target):
    """The plan of one query over all pages of a part. Nothing is masked: all of it is past."""
    num_pages = num_tokens // page_size
    spec = ja.AttentionSpec(
        **heads, page_size=page_size, max_batch=1, max_qo_tokens=1, max_kv_pages=num_pages,
        causal=False, target=target,
    )  # fmt: skip
    return ja.plan(spec, [0, 1], [num_tokens], [0, num_pages], np.arange(num_pages))


def pages(key, num_tokens, where):
    """Keys and values of all layers: [layers][k, v] of [num_pages, page_size, 8, 128]."""
    shape = num_tokens // page_size, page_size, 8, 128
    with jax.default_device(where):
        keys = jax.random.split(jax.random.key(key), 2 * arguments.layers)
        made = [jax.device_put(jax.random.normal(x, shape, dtype), where) for x in keys]
    return [made[i : i + 2] for i in range(0, len(made), 2)]


attend = jax.jit(lambda q, kv, plan: ja.attention(q, *kv, plan, return_lse=True))
merge = jax.jit(ja.merge_state)
hot, cold = pages(0, arguments.hot, device), pages(1, arguments.tokens, host)
hot_plan = jax.device_put(batch(arguments.hot, None), device)
cold_plan = jax.device_put(batch(arguments.tokens, "cpu"), host)
moved_plan = jax.device_put(batch(arguments.tokens, None), device)
on_device = jax.sharding.SingleDeviceSharding(device)
pinned = jax.device_put(cold, on_device.with_memory_kind("pinned_host"))
with jax.default_device(device):
    q = jax.random.normal(jax.random.key(2), (1, 32, 128), dtype)


def where_they_lie(q, layer):
    of_hot = attend(q, hot[layer], hot_plan)  # runs while the CPU works
    of_cold = attend(jax.device_put(q, host), cold[layer], cold_plan)
    return merge(*of_hot, *jax.device_put(of_cold, device))


def moved(q, layer):
    kv = jax.device_put(pinned[layer], on_device)
    return merge(*attend(q, hot[layer], hot_plan), *attend(q, kv, moved_plan))


def step(way):
    """A layer's result is the next one's query."""
    x = q
    for layer in range(arguments.layers):
        x, _ = way(x, layer)
        x = x.astype(dtype) * 8
    return jax.block_until_ready(x)


def seconds_of(way):
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        step(way)
        times.append(time.perf_counter() - begin)
    return min(times)


error = np.abs(np.asarray(step(where_they_lie) - step(moved), np.float32)).max()
assert error < (2e-5 if dtype == jnp.float32 else 5e-2), error
lies, moves = seconds_of(where_they_lie), seconds_of(moved)
cold_bytes = arguments.layers * arguments.tokens * 2 * 8 * 128 * dtype.dtype.itemsize
print(
    f"{cold_bytes / 1e6:.0f} MB of cold keys and values: {1e3 * lies:.2f} ms where they lie,"
    f" {1e3 * moves:.2f} ms moved, of which {device.platform} is the device"
)
