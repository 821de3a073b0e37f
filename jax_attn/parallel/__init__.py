"""Attention over the devices of a mesh, with JAX's collectives."""

from jax_attn.parallel.kv_shards import (
    KvStripes,
    StripedPlan,
    append_stripes,
    attend_stripes,
    plan_stripes,
)
from jax_attn.parallel.sequence import (
    SequencePlan,
    SequenceShards,
    attend_sequence,
    dot_product_attention,
    plan_sequence,
)

__all__ = [
    "KvStripes",
    "SequencePlan",
    "SequenceShards",
    "StripedPlan",
    "append_stripes",
    "attend_sequence",
    "attend_stripes",
    "dot_product_attention",
    "plan_sequence",
    "plan_stripes",
]
