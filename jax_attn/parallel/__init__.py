"""Attention over the devices of a mesh, with JAX's collectives."""

from jax_attn.parallel.all_reduce import all_reduce, check_all_reduces
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
    "all_reduce",
    "append_kv_shards",
    "attend_kv_shards",
    "attend_sequence",
    "check_all_reduces",
    "dot_product_attention",
    "plan_kv_shards",
    "plan_sequence",
]
