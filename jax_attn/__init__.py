"""Attention for LLM serving and training in JAX: plan on the host, run inside jit."""

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

if find_spec("jax_attn._core") is None:
    raise ImportError(
        "jax_attn: the compiled module jax_attn._core is missing: this is a source folder"
        f" ({__path__[0]}); install it with `pip install -e .`, or start Python elsewhere."
    )

from jax_attn import masks, mla, parallel, reference
from jax_attn._dense.dense import dot_product_attention
from jax_attn._ops.attention import attention, item_times
from jax_attn._ops.export import export_checks
from jax_attn._ops.kv_cache import append_kv, append_rotated
from jax_attn._ops.merge import merge_state, merge_states, state_from_triplet, state_to_triplet
from jax_attn._plan.plan import AttentionPlan, PlanBucket, plan
from jax_attn._spec.spec import AttentionSpec
from jax_attn._variant.program import At
from jax_attn._variant.variant import Variant
from jax_attn._xla.jit import precompile

try:
    __version__ = version("jax_attn")
except PackageNotFoundError:  # a source folder with the compiled module in it
    __version__ = "0+unknown"

__all__ = [
    "At",
    "AttentionPlan",
    "AttentionSpec",
    "PlanBucket",
    "Variant",
    "append_kv",
    "append_rotated",
    "attention",
    "dot_product_attention",
    "export_checks",
    "item_times",
    "masks",
    "merge_state",
    "merge_states",
    "mla",
    "parallel",
    "plan",
    "precompile",
    "reference",
    "state_from_triplet",
    "state_to_triplet",
]
