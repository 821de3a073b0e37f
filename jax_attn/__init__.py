"""Attention for LLM serving and training in JAX: plan on the host, run inside jit.

`LLM`, `AsyncLLM` and `SamplingParams` are those of jax_attn.llm, which is imported at their first
use: it needs the extra `serve`.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if find_spec("jax_attn._core") is None:
    raise ImportError(
        "jax_attn: the compiled module jax_attn._core is missing: this is a source folder"
        f" ({__path__[0]}); install it with `pip install -e .`, or start Python elsewhere."
    )

from jax_attn import head_tables, masks, mla, parallel, reference, retention
from jax_attn._dense.dense import dot_product_attention
from jax_attn._ops.attention import attention, item_times
from jax_attn._ops.export import export_checks
from jax_attn._ops.gated_delta_rule import gated_delta_rule
from jax_attn._ops.kv_cache import append_kv, append_rotated
from jax_attn._ops.linear_attention import linear_attention
from jax_attn._ops.merge import merge_state, merge_states, state_from_triplet, state_to_triplet
from jax_attn._ops.short_convolution import short_convolution
from jax_attn._plan.fixed_batch import FixedBatch, fixed_batch
from jax_attn._plan.plan import AttentionPlan, PlanBucket, plan
from jax_attn._plan.rows import Rows, rows
from jax_attn._plan.state_plan import StatePlan, plan_linear_attention
from jax_attn._spec.spec import AttentionSpec
from jax_attn._spec.state_spec import LinearAttentionSpec, StateSpec
from jax_attn._variant.program import At
from jax_attn._variant.variant import Variant
from jax_attn._xla.jit import precompile

if TYPE_CHECKING:
    from jax_attn.llm import LLM as LLM
    from jax_attn.llm import AsyncLLM as AsyncLLM
    from jax_attn.llm import SamplingParams as SamplingParams

try:
    __version__ = version("jax_attn")
except PackageNotFoundError:  # a source folder with the compiled module in it
    __version__ = "0+unknown"

__all__ = [
    "At",
    "AttentionPlan",
    "AttentionSpec",
    "FixedBatch",
    "LinearAttentionSpec",
    "PlanBucket",
    "Rows",
    "StatePlan",
    "StateSpec",
    "Variant",
    "append_kv",
    "append_rotated",
    "attention",
    "dot_product_attention",
    "export_checks",
    "fixed_batch",
    "gated_delta_rule",
    "head_tables",
    "item_times",
    "linear_attention",
    "masks",
    "merge_state",
    "merge_states",
    "mla",
    "parallel",
    "plan",
    "plan_linear_attention",
    "precompile",
    "reference",
    "retention",
    "rows",
    "short_convolution",
    "state_from_triplet",
    "state_to_triplet",
]

_OF_LLM = ("LLM", "AsyncLLM", "SamplingParams")


def __getattr__(name: str) -> Any:
    if name in _OF_LLM:
        return getattr(import_module("jax_attn.llm"), name)
    raise AttributeError(f"module 'jax_attn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_OF_LLM})
