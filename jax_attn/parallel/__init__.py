"""Attention over the devices of a mesh, with JAX's collectives."""

from jax_attn.parallel.kv_shards import (
    KvShardPlan,
    KvShards,
    append_kv_shards,
    attend_kv_shards,
    plan_kv_shards,
)
from jax_attn.parallel.sequence import (
    SequencePlan,
    SequenceShards,
    attend_sequence,
    dot_product_attention,
    plan_sequence,
)

__all__ = [
    "KvShardPlan",
    "KvShards",
    "SequencePlan",
    "SequenceShards",
    "append_kv_shards",
    "attend_kv_shards",
    "attend_sequence",
    "dot_product_attention",
    "plan_kv_shards",
    "plan_sequence",
]
