"""A context too long for one device: KV shards over a mesh axis, decode steps in one executable.

Each device attends to its own keys for every query. One exchange of states per step merges the
results.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4 " + os.environ.get(
    "XLA_FLAGS", ""
)

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding

import jax_attn as ja
from jax_attn import parallel

num_devices, num_qo_heads, num_kv_heads, head_dim, steps = 4, 8, 2, 64, 5
mesh = jax.make_mesh(
    (num_devices,), ("kv",), devices=jax.devices("cpu")[:num_devices], axis_types=(AxisType.Auto,)
)
spec = ja.AttentionSpec(
    num_qo_heads,
    num_kv_heads,
    head_dim,
    dtype="float32",
    page_size=64,  # each device has 16 of the slots, its KV shard
    max_batch=3,
    max_qo_tokens=3,
    max_kv_pages=90,
    target="cpu",
)
kv_shards = parallel.KvShards(spec, "kv", num_devices)

# The page table of one device. Device i holds slots [16 * i, 16 * (i + 1)) of every page.
kv_lens = np.array([5000, 17, 300])
page_indptr = np.array([0, 79, 80, 85])
page_indices = np.random.default_rng(0).permutation(90)[:85]
keys = jax.random.split(jax.random.key(0), 3)
q = jax.random.normal(keys[0], (steps, 3, num_qo_heads, head_dim))
new = jax.random.normal(keys[1], (2, steps, 3, num_kv_heads, head_dim))
pages = jax.random.normal(keys[2], (2, 90, 64, num_kv_heads, head_dim))
by_slot = NamedSharding(mesh, kv_shards.pages_spec(is_stacked=False))
k_pages, v_pages = (jax.device_put(x, by_slot) for x in pages)


def decode(make_plan, append, attend, q, new, k_pages, v_pages):
    """Decodes `steps` tokens per request: plans, appends and attends inside a scan."""

    def step(carry, inputs):
        kv_lens, k_pages, v_pages = carry
        q, k_new, v_new = inputs
        kv_lens += 1
        plan = make_plan(np.arange(4), kv_lens, page_indptr, page_indices)
        k_pages, v_pages = append(k_pages, v_pages, k_new, v_new, plan)
        return (kv_lens, k_pages, v_pages), attend(q, k_pages, v_pages, plan)

    carry = jnp.asarray(kv_lens - 1), k_pages, v_pages
    return jax.lax.scan(step, carry, (q, *new))[1]


def on_each_device(*arrays):
    calls = parallel.append_kv_shards, parallel.attend_kv_shards
    return decode(lambda *batch: parallel.plan_kv_shards(kv_shards, *batch), *calls, *arrays)


everywhere = jax.sharding.PartitionSpec()
sharded = jax.jit(
    jax.shard_map(
        on_each_device,
        mesh=mesh,
        in_specs=(everywhere, everywhere, by_slot.spec, by_slot.spec),
        out_specs=everywhere,
    )
)
o = sharded(q, new, k_pages, v_pages)
one_device = jax.jit(
    lambda *x: decode(lambda *b: ja.plan(spec, *b), ja.append_kv, ja.attention, *x)
)
np.testing.assert_allclose(o, one_device(q, new, *pages), rtol=1e-5, atol=1e-5)
held = k_pages.addressable_shards[0].data.nbytes / k_pages.nbytes
print(f"{steps} steps over {kv_lens.sum()} tokens; each device holds {held:.0%} of the cache")
