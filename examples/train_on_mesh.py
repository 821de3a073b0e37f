"""Training steps of one attention layer, with requests and tokens split over a mesh: no all-gather.

The mesh has four CPU devices, of this process or of 2 or 4 processes. Start each process with
--coordinator HOST:PORT --num-processes N --process-id I, or under Slurm or Open MPI with
--distributed.
"""

import argparse
import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_attn import parallel

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--coordinator", help="HOST:PORT of process 0")
parser.add_argument("--num-processes", type=int)
parser.add_argument("--process-id", type=int)
parser.add_argument("--distributed", action="store_true", help="a launcher says the rest")
args = parser.parse_args()
# Do both before JAX initializes its devices.
if args.distributed or args.coordinator:  # XLA_FLAGS sets the devices per process
    jax.distributed.initialize(args.coordinator, args.num_processes, args.process_id)
else:
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=4 {flags}"

batch, length, num_qo_heads, num_kv_heads, head_dim = 4, 300, 4, 2, 32
width = num_qo_heads * head_dim
mesh = jax.make_mesh(
    (2, 2), ("data", "sequence"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices("cpu")[:4]
)
over_mesh = partial(
    parallel.dot_product_attention, mesh=mesh, axis_name="sequence", batch_axis_name="data"
)


def loss(weights, x, y, attend):
    q, k, v = ((x @ w).reshape(batch, length, -1, head_dim) for w in (weights["q"], *weights["kv"]))
    o = attend(q, k, v, is_causal=True).reshape(batch, length, width)
    return jnp.mean((o @ weights["o"] - y) ** 2)


@partial(jax.jit, static_argnames="attend")
def step(weights, x, y, attend=over_mesh):
    value, gradients = jax.value_and_grad(loss)(weights, x, y, attend)
    return value, jax.tree.map(lambda w, g: w - 30.0 * g, weights, gradients)


keys = jax.random.split(jax.random.key(0), 5)
normal = partial(jax.random.normal, dtype=jnp.float32)
weights = {
    "q": normal(keys[0], (width, width)) * width**-0.5,
    "kv": normal(keys[1], (2, width, num_kv_heads * head_dim)) * width**-0.5,
    "o": normal(keys[2], (width, width)) * width**-0.5,
}
x, y = normal(keys[3], (batch, length, width)), normal(keys[4], (batch, length, width))
weights = jax.device_put(weights, NamedSharding(mesh, P()))  # on every device
# Each device has half of the tokens of half of the requests.
x, y = jax.device_put((x, y), NamedSharding(mesh, P("data", "sequence")))

value, new_weights = step(weights, x, y)
expected, expected_weights = step(weights, x, y, jax.nn.dot_product_attention)
np.testing.assert_allclose(value, expected, rtol=1e-5)
for a, b in zip(jax.tree.leaves(new_weights), jax.tree.leaves(expected_weights), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)

# The only collectives: weight gradients are summed, and heads are exchanged for tokens.
text = step.lower(weights, x, y).compile().as_text()
assert "all-reduce" in text and "all-to-all" in text and "all-gather" not in text

weights, losses = new_weights, [float(value)]
for _ in range(5):
    value, weights = step(weights, x, y)
    losses.append(float(value))
assert losses[-1] < losses[0]
print("loss by step:", *(f"{value:.4f}" for value in losses))
