"""Heads split over a mesh axis with shard_map: each device attends for its own heads, without
collectives."""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2 " + os.environ.get(
    "XLA_FLAGS", ""
)

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_attn as ja

num_devices, num_qo_heads, num_kv_heads = 2, 8, 4
mesh = jax.make_mesh((num_devices,), ("heads",), devices=jax.devices("cpu")[:num_devices])
spec = ja.AttentionSpec(
    num_qo_heads=num_qo_heads // num_devices,  # the heads of one device
    num_kv_heads=num_kv_heads // num_devices,
    head_dim_qk=64,
    dtype="float32",
    page_size=16,
    max_batch=2,
    max_qo_tokens=16,
    max_kv_pages=8,
    target="cpu",
)
batch = (
    np.array([0, 9, 10]),
    np.array([30, 64]),
    np.array([0, 2, 6]),
    np.array([5, 0, 3, 1, 4, 2]),
)
plan = ja.plan(spec, *batch)  # lengths are the same on every device, so the plan is too

by_head, pages_by_head = P(None, "heads", None), P(None, None, "heads", None)
keys = jax.random.split(jax.random.key(0), 2)
q = jax.random.normal(keys[0], (16, num_qo_heads, 64))
kv = jax.random.normal(keys[1], (2, 6, 16, num_kv_heads, 64))
q = jax.device_put(q, NamedSharding(mesh, by_head))
k_pages, v_pages = (jax.device_put(x, NamedSharding(mesh, pages_by_head)) for x in kv)

attend = jax.jit(
    jax.shard_map(
        ja.attention,
        mesh=mesh,
        in_specs=(by_head, pages_by_head, pages_by_head, P()),
        out_specs=by_head,
    )
).lower(q, k_pages, v_pages, plan)
attend = attend.compile()
o = attend(q, k_pages, v_pages, plan)
assert "all-gather" not in attend.as_text() and "all-reduce" not in attend.as_text()

expected, _ = ja.reference.attention(np.array(q), *np.array(kv), *batch, spec=spec)
np.testing.assert_allclose(o, expected, rtol=1e-5, atol=1e-5)
print(f"{num_qo_heads} heads on {num_devices} devices, no collective:", o.sharding)
