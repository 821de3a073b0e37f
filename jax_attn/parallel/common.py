"""What the ways to split attention over devices have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jax_attn.spec import AttentionSpec

_NO_LIMIT = 2**30  # positions are below it: a window of that size hides nothing


def windows(spec: AttentionSpec) -> tuple[int, int]:
    """window_left and window_right; -1 where they hide nothing."""
    left, right = spec.window_left, 0 if spec.causal else spec.window_right
    return (-1 if left >= _NO_LIMIT else left), (-1 if right >= _NO_LIMIT else right)


def add_sinks(o: jax.Array, lse: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The state with an extra logit that has no value; a row that sees no key stays as it is."""
    total = jnp.where(jnp.isneginf(lse), -jnp.inf, jnp.logaddexp(lse, sinks))
    weight = jnp.exp(jnp.where(jnp.isneginf(lse), 0.0, lse - total))
    return (o * weight[..., None]).astype(o.dtype), total


def mapped(
    call: Callable[..., Any],
    mesh: jax.sharding.Mesh,
    arrays: tuple[Any, ...],
    options: dict[str, Any],
    specs: tuple[Any, ...],
    option_specs: dict[str, P],
    out_specs: Any,
) -> Any:
    """call(*arrays, **options) by shard_map; some of the options may be None."""
    given = {name: value for name, value in options.items() if value is not None}
    return jax.shard_map(
        lambda arrays, given: call(*arrays, **given),
        mesh=mesh,
        in_specs=(specs, {name: option_specs[name] for name in given}),
        out_specs=out_specs,
        check_vma=False,  # what an all-gather leaves is the same everywhere
    )(arrays, given)
