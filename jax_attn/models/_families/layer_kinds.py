"""The kinds of layers: windows by layer_types."""

from __future__ import annotations

from collections.abc import Iterable

from jax_attn.models._config.config import LayerKind
from jax_attn.models._config.keys import Keys, one_of
from jax_attn.models._config.rope import Rope

_MOST_LAYERS = 10_000  # a list has an entry for each, before any file is compared
FULL, SLIDING = "full_attention", "sliding_attention"


def count(keys: Keys) -> int:
    number = keys.size("num_hidden_layers")
    if number > _MOST_LAYERS:
        raise keys.error(f"num_hidden_layers: expected at most {_MOST_LAYERS}, got {number}")
    return number


def all_full(keys: Keys, rope: Rope) -> list[LayerKind]:
    """Returns the layers of a family without windows."""
    keys.expect("sliding_window", None)  # transformers' models ignore it, but not their caches
    return equal(keys, rope, None)


def equal(keys: Keys, rope: Rope, window: int | None) -> list[LayerKind]:
    expected = FULL if window is None else SLIDING
    for name in keys.items("layer_types") or ():
        if name != expected:
            raise keys.error(f"layer_types: expected {expected!r}, got {name!r}")
    return [LayerKind(rope, window)] * count(keys)


def have_rope(keys: Keys) -> list[bool]:
    """Returns which layers have RoPE, by no_rope_layers or no_rope_layer_interval."""
    num_layers = count(keys)
    interval = keys.size("no_rope_layer_interval", 4)
    # Despite the key's name, 1 means that the layer has RoPE.
    has_rope = keys.items("no_rope_layers") or [
        int((i + 1) % interval != 0) for i in range(num_layers)
    ]
    if len(has_rope) < num_layers or not all(x in (0, 1) for x in has_rope):
        raise keys.error(f"no_rope_layers: expected {num_layers} times 0 or 1, got {has_rope!r}")
    return [bool(x) for x in has_rope[:num_layers]]


def all_but_each(keys: Keys, period: int) -> list[str]:
    """Returns types of layers: windows in all layers but each `period`-th."""
    return [SLIDING if (i + 1) % period else FULL for i in range(count(keys))]


def by_type(
    keys: Keys, types: list[str], rope: Rope, window: int | None, sliding_rope: Rope | None = None
) -> list[LayerKind]:
    """Returns the kind of each layer by layer_types or, if that is missing, by `types`.

    window: of sliding layers; None: no layer may be one. sliding_rope: theirs, if it is another.
    """
    kinds = {FULL: LayerKind(rope)}
    if window is not None:
        kinds[SLIDING] = LayerKind(sliding_rope or rope, window)
    return by_name(keys, types, kinds)


def by_name(keys: Keys, types: list[str], kinds: dict[str, LayerKind]) -> list[LayerKind]:
    """Returns the kind of each layer by the names of layer_types; without them, by `types`."""
    return [kinds[name] for name in names(keys, types, kinds)]


def names(keys: Keys, types: list[str], kinds: Iterable[str]) -> list[str]:
    """Returns layer_types or, if that is missing, `types`. kinds: the names that may be there."""
    named = keys.items("layer_types") or types
    if len(named) != len(types):
        raise keys.error(f"layer_types: expected {len(types)} entries, got {len(named)}")
    for name in named:
        if not isinstance(name, str) or name not in kinds:
            raise keys.error(f"layer_types: expected {one_of(kinds)}, got {name!r}")
    return named


def hybrid(keys: Keys, types: list[str], kinds: dict[str, LayerKind]) -> list[LayerKind]:
    """As by_name. Raises if no layer has attention."""
    layers = by_name(keys, types, kinds)
    if not any(kind.attention for kind in layers):
        raise keys.error(
            f"layer_types: expected {FULL!r} in one of num_hidden_layers {len(layers)}, got none"
        )
    return layers
