"""RoPE's keys, as transformers 4 or 5 writes them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jax_attn.models._config.keys import Keys, one_of
from jax_attn.models._config.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    Rope,
    Scaling,
    YarnScaling,
)
from jax_attn.models._families import layer_kinds, shared

# The fields of these classes are the keys of config.json. _long_rope() handles "longrope".
_SCALINGS: dict[str, type[LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling]] = {
    "linear": LinearScaling,
    "dynamic": DynamicScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
}


def read(
    keys: Keys,
    default_theta: float = 10000.0,
    *,
    head_dim: int | None = None,
    default: dict[str, Any] | None = None,
    default_fraction: float | None = None,
    interleaved: bool = False,
) -> Rope:
    """Reads RoPE as transformers does: rope_scaling, then rope_parameters, then `default`.

    transformers 5 stores all settings in rope_parameters; transformers 4 stores the base outside.
    default: the settings of a config with neither. default_fraction: partial_rotary_factor of a
    config without it; None: all of a head rotates. interleaved: see Rope.
    """
    settings = settings_of(keys, default)
    set_original_length(keys, settings)
    if default_fraction is not None:
        keys = Keys({"partial_rotary_factor": default_fraction} | keys.raw, keys.path)
    rope = parse(settings, keys, default_theta, head_dim or shared.head_dim_of(keys))
    if rope.fraction != 1 and default_fraction is None:
        raise settings.error(f"partial_rotary_factor: expected 1.0, got {rope.fraction!r}")
    return dataclasses.replace(rope, interleaved=interleaved)


def by_layer_type(
    keys: Keys, head_dim: int, theta: float, sliding: Keys, sliding_theta: float
) -> tuple[Rope, Rope]:
    """Returns RoPE of the layers with full attention, and of those with a window.

    rope_parameters has an object for each; rope_scaling is that of full attention.

    theta, sliding_theta: those of a config without them. sliding: the keys with the base of layers
      with a window, if it is outside of rope_parameters.
    """
    ropes: dict[str, Keys] = {}
    both = keys.inner("rope_parameters")
    for kind in (layer_kinds.FULL, layer_kinds.SLIDING):
        inner = both.inner(kind) if both else None
        ropes[kind] = Keys({}, f"{keys.path}: rope_parameters") if inner is None else inner
    for name in both.raw if both else ():  # transformers 5
        if name not in ropes:
            raise keys.error(f"rope_parameters: expected {one_of(ropes)}, got {name!r}")
    full = ropes[layer_kinds.FULL]
    if (scaling := keys.inner("rope_scaling")) is not None:
        full = Keys(full.raw | scaling.raw, scaling.path)
        if full.get("rope_type") is None and "type" in full.raw:
            raise full.error("key 'rope_type' is missing, as transformers does not read 'type'")
    found = []
    for rope, outside, default in (
        (full, keys, theta),
        (ropes[layer_kinds.SLIDING], sliding, sliding_theta),
    ):
        found.append(each := parse(rope, outside, default, head_dim))
        if each.fraction != 1:
            raise rope.error(f"partial_rotary_factor: expected 1.0, got {each.fraction!r}")
        # transformers reads it at another place.
        if rope.get("truncate") is False:
            raise rope.error("truncate: expected True, got False")
    return found[0], found[1]


def settings_of(keys: Keys, default: dict[str, Any] | None) -> Keys:
    """Returns a copy of the settings in rope_scaling or rope_parameters."""
    scaling, parameters = keys.inner("rope_scaling"), keys.inner("rope_parameters")
    if scaling is None or not scaling.raw:
        chosen = parameters or Keys(default or {}, f"{keys.path}: rope_parameters")
        return Keys(dict(chosen.raw), chosen.path)
    if parameters is not None:
        # transformers forgets rope_parameters, and so the base in it.
        for name in ("rope_theta", "partial_rotary_factor"):
            lost = parameters.get(name)
            if lost not in (None, scaling.get(name, keys.get(name))):
                raise scaling.error(
                    f"{name}: expected the {lost!r} of rope_parameters, which is not read beside "
                    f"rope_scaling, got {scaling.get(name, keys.get(name))!r}"
                )
    return Keys(dict(scaling.raw), scaling.path)


def take_sections(settings: Keys, default: list[int]) -> tuple[int, int, int]:
    """Takes the sections of positions with three parts out of the settings, see Rope."""
    settings.expect("mrope_interleaved", True)  # transformers ignores it
    settings.raw.pop("mrope_interleaved", None)
    found = settings.raw.pop("mrope_section", default)
    is_list = isinstance(found, list) and len(found) == 3
    if not is_list or not all(type(x) is int and x >= 0 for x in found):
        raise settings.error(f"mrope_section: expected three integers >= 0, got {found!r}")
    time, row, column = found
    return time, row, column


def proportional(settings: Keys, head_dim: int) -> Rope:
    """Reads RoPE of Gemma 4: 'default', or 'proportional'. Nothing is read outside of it."""
    for name in settings.raw:
        if name not in ("rope_type", "rope_theta", "partial_rotary_factor", "factor"):
            raise settings.error(f"key '{name}' is not supported")
    settings.expect("rope_type", "default", "proportional")
    fraction = settings.number("partial_rotary_factor", 1.0)
    theta = settings.number("rope_theta")
    if settings.get("rope_type", "default") == "default":
        settings.expect("partial_rotary_factor", None, 1.0)  # transformers ignores it
        settings.expect("factor", None, 1.0)
        return Rope(theta)
    rotating = int(fraction * head_dim // 2)
    if fraction > 1 or not rotating:
        raise settings.error(
            f"partial_rotary_factor: expected a part of the {head_dim} dimensions of a head,"
            f" got {fraction!r}"
        )
    return Rope(theta, ProportionalScaling(settings.number("factor", 1.0), rotating))


def set_original_length(keys: Keys, settings: Keys) -> None:
    """Moves original_max_position_embeddings into the settings; that outside wins."""
    if settings.get("rope_type", settings.get("type")) in ("llama3", "yarn", "longrope"):
        name = "original_max_position_embeddings"
        if name in keys.raw:
            settings.raw[name] = keys.number(name)


def parse(settings: Keys, keys: Keys, default_theta: float, head_dim: int) -> Rope:
    """Parses settings. keys: of the config, which has what is not inside."""

    def inside_or_outside(name: str, default: float) -> Any:
        inside = settings.get(name)
        where = keys if inside is None else settings
        value = where.get(name)
        return where.check_number(name, default if value is None else value)

    theta = inside_or_outside("rope_theta", default_theta)
    fraction = inside_or_outside("partial_rotary_factor", 1.0)
    rotary_dim = rotary_dim_of(keys, "partial_rotary_factor", fraction, head_dim)
    rope_type = settings.get("rope_type", settings.get("type", "default"))
    own = {
        key: value
        for key, value in settings.raw.items()
        if key not in ("rope_type", "type", "rope_theta", "partial_rotary_factor")
        # transformers takes null for False.
        and (value is not None or key == "truncate")
    }
    scaling: Scaling | None = None
    if rope_type == "longrope":
        scaling = _long_rope(Keys(own, settings.path), keys, rotary_dim // 2)
    elif isinstance(rope_type, str) and rope_type in _SCALINGS:
        scaling = _scaling(Keys(own, settings.path), rope_type)
    elif rope_type != "default":
        known = ["default", "longrope", *_SCALINGS]
        raise settings.error(f"rope_type: expected {one_of(known)}, got {rope_type!r}")
    elif own:
        raise settings.error(f"key '{[*own][0]}' is not supported with 'default'")
    if isinstance(scaling, YarnScaling) and not theta > 1:
        raise settings.error(f"rope_theta: expected a number > 1 with 'yarn', got {theta!r}")
    return Rope(theta, scaling, fraction)


def rotary_dim_of(keys: Keys, name: str, fraction: float, head_dim: int) -> int:
    """Returns the dimensions of a head that rotate; `name`: the key of their share."""
    rotary_dim = int(head_dim * fraction)
    if fraction > 1 or rotary_dim % 2 or not rotary_dim:
        raise keys.error(
            f"{name}: expected a part of the {head_dim} dimensions of head_dim that is an even "
            f"number, got {fraction!r}"
        )
    return rotary_dim


def _scaling(settings: Keys, rope_type: str) -> Scaling:
    fields = {field.name: field for field in dataclasses.fields(_SCALINGS[rope_type])}
    for name in settings.raw:
        if name not in fields:
            raise settings.error(f"key '{name}' is not supported with {rope_type!r}")
        if fields[name].type != "bool":
            settings.number(name)
        else:
            settings.flag(name)
    for name, field in fields.items():
        if field.default is dataclasses.MISSING:
            settings.need(name)
    scaling = _SCALINGS[rope_type](**settings.raw)
    if isinstance(scaling, Llama3Scaling) and scaling.high_freq_factor < scaling.low_freq_factor:
        raise settings.error(
            f"high_freq_factor: expected at least low_freq_factor {scaling.low_freq_factor!r}, "
            f"got {scaling.high_freq_factor!r}"
        )
    return scaling


def _long_rope(settings: Keys, keys: Keys, num_factors: int) -> LongRopeScaling:
    """Reads LongRoPE; a missing `factor` defaults to the ratio of the two lengths."""
    names = "short_factor", "long_factor", "original_max_position_embeddings"
    for name in settings.raw:
        if name not in (*names, "factor", "attention_factor"):
            raise settings.error(f"key '{name}' is not supported with 'longrope'")
    for name in names:
        settings.need(name)
    original = settings.number("original_max_position_embeddings")
    if not original > 1:
        raise settings.error(
            f"original_max_position_embeddings: expected a number > 1, got {original!r}"
        )
    served = keys.size("max_position_embeddings")
    factor = settings.number("factor", served / original)
    amplitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return LongRopeScaling(
        settings.numbers("short_factor", num_factors),
        settings.numbers("long_factor", num_factors),
        original,
        settings.number("attention_factor", amplitude),
        is_long=served > original,
    )
