"""Keys of Mamba-2's layers, as Bamba, Falcon-H1 and Granite 4 write them."""

from __future__ import annotations

import math
from typing import Any

from jax_attn.models._config.keys import Keys
from jax_attn.models._config.recurrent import Mamba2


def read(keys: Keys, inner_size: int | None = None, **options: Any) -> Mamba2:
    """inner_size: None: hidden_size times mamba_expand. options: other fields of Mamba2."""
    bias = keys.flag("mamba_proj_bias", False)
    if inner_size is None:
        inner_size = keys.size("mamba_expand", 2) * keys.size("hidden_size")
    num_heads = keys.size("mamba_n_heads", 128)
    if keys.get("mamba_d_head", "auto") == "auto":
        head_dim = inner_size // num_heads
    else:
        head_dim = keys.size("mamba_d_head")
    if num_heads * head_dim != inner_size:
        raise keys.error(
            f"mamba_n_heads, mamba_d_head: expected a product of {inner_size} channels, got "
            f"{num_heads} * {head_dim}"
        )
    common = {
        "num_heads": num_heads,
        "head_dim": head_dim,
        "num_groups": keys.size("mamba_n_groups", 1),
        "state_dim": keys.size("mamba_d_state", 256),
        "conv_width": keys.size("mamba_d_conv", 4),
        "conv_bias": keys.flag("mamba_conv_bias", True),
        "in_bias": bias,
        "out_bias": bias,
        "dt_range": time_step_limit(keys),
    }
    return checked(keys, "mamba_n_groups", **(common | options))


def checked(keys: Keys, of_groups: str, **sizes: Any) -> Mamba2:
    """of_groups: the key of num_groups."""
    found = Mamba2(**sizes)
    if found.num_heads % found.num_groups:
        raise keys.error(
            f"{of_groups}: expected a divisor of the {found.num_heads} heads, got "
            f"{found.num_groups}"
        )
    return found


def time_step_limit(keys: Keys, name: str = "time_step_limit") -> tuple[float, float]:
    """Returns the least and the largest step; all positive ones without the key `name`."""
    limit = keys.get(name, [0.0, math.inf])
    numbers = [_tagged(x) for x in limit] if isinstance(limit, list) else []
    if len(numbers) != 2 or not all(type(x) in (int, float) for x in numbers):
        raise keys.error(f"{name}: expected two numbers, got {limit!r}")
    low, high = numbers
    if not 0 <= low < high:
        raise keys.error(f"{name}: expected 0 <= the first < the second, got {limit!r}")
    return low, high


def _tagged(x: Any) -> Any:
    """transformers writes infinity as an object, as JSON has no such number."""
    return math.inf if x == {"__float__": "Infinity"} else x
