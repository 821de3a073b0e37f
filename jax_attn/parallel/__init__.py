"""Attention over the devices of a mesh, on JAX's own collectives."""

from jax_attn.parallel.stripes import (
    KvStripes,
    StripedPlan,
    append_stripes,
    attend_stripes,
    plan_stripes,
)

__all__ = [
    "KvStripes",
    "StripedPlan",
    "append_stripes",
    "attend_stripes",
    "plan_stripes",
]
