"""Attention for LLM serving and training in JAX: plan on the host, run inside jit."""

from jax_attn import reference
from jax_attn.attention import attention, dot_product_attention
from jax_attn.jit import precompile
from jax_attn.kv_cache import append_kv
from jax_attn.merge import merge_state, merge_states
from jax_attn.plan import AttentionPlan, plan
from jax_attn.spec import AttentionSpec

__all__ = [
    "AttentionPlan",
    "AttentionSpec",
    "append_kv",
    "attention",
    "dot_product_attention",
    "merge_state",
    "merge_states",
    "plan",
    "precompile",
    "reference",
]
