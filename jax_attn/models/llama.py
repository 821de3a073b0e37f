"""The Llama family on jax_attn, loaded from Hugging Face directories.

    config, params, tokenizer = llama.load("models/tiny-llama-stdlib", dtype="float32")
    spec = llama.attention_spec(config, max_batch=8, max_qo_tokens=64, max_kv_pages=512)
    k_pages, v_pages = llama.init_pages(config, spec, num_pages=512)
    step = jax.jit(llama.forward, static_argnames="config", donate_argnames=("k_pages", "v_pages"))

    plan = jax_attn.plan(spec, qo_indptr, kv_lens, page_indptr, page_indices)
    logits, k_pages, v_pages = step(
        params, config, tokens, positions, k_pages, v_pages, plan, logit_rows
    )

`forward` runs any mix of prefill, chunked prefill and decode over a paged cache, and
`reference_forward` one sequence with dense attention, to check it against.

Needs the packages of the extra `models`: pip install 'jax_attn[models]'.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

import jax_attn as ja

Params: TypeAlias = dict[str, Any]
"""embed [vocab, hidden], final_norm [hidden], head [hidden, vocab] unless tied, and layers: a dict
of stacked weights, [num_layers, in, out] or [num_layers, hidden]."""


class ModelDirectoryError(ValueError):
    """A model directory that does not fit: which file, what was expected, what is there."""


# ---- configuration -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretching of the long RoPE wavelengths. Field names are those of config.json."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_embeddings: bool
    max_positions: int
    bos_token: int | None
    eos_tokens: tuple[int, ...]


def load_config(directory: str | Path) -> LlamaConfig:
    """Reads config.json, as transformers 4 or 5 writes it.

    Raises:
      ModelDirectoryError: a key is missing, or asks for something this model does not do.
    """
    path = Path(directory) / "config.json"
    raw = _read_json(path)

    def need(key: str) -> Any:
        if key not in raw:
            raise ModelDirectoryError(f"{path}: key '{key}' is missing")
        return raw[key]

    def expect(key: str, expected: Any, got: Any) -> None:
        if got != expected:
            raise ModelDirectoryError(f"{path}: {key}: expected {expected!r}, got {got!r}")

    expect("model_type", "llama", raw.get("model_type"))
    expect("hidden_act", "silu", raw.get("hidden_act", "silu"))
    expect("attention_bias", False, raw.get("attention_bias", False))
    expect("mlp_bias", False, raw.get("mlp_bias", False))
    expect("quantization_config", None, raw.get("quantization_config"))

    # transformers 5 keeps everything about RoPE in one dict; 4 kept the base outside of it.
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    scaling = None
    if rope_type == "llama3":
        fields = [field.name for field in dataclasses.fields(RopeScaling)]
        if missing := [name for name in fields if name not in rope]:
            raise ModelDirectoryError(f"{path}: rope_scaling: key '{missing[0]}' is missing")
        scaling = RopeScaling(**{name: rope[name] for name in fields})
    elif rope_type != "default":
        raise ModelDirectoryError(
            f"{path}: rope_type: expected 'default' or 'llama3', got {rope_type!r}"
        )

    num_qo_heads = need("num_attention_heads")
    num_kv_heads = raw.get("num_key_value_heads") or num_qo_heads
    if num_qo_heads % num_kv_heads:
        raise ModelDirectoryError(
            f"{path}: num_attention_heads: expected a multiple of num_key_value_heads "
            f"{num_kv_heads}, got {num_qo_heads}"
        )
    eos = raw.get("eos_token_id")
    return LlamaConfig(
        vocab_size=need("vocab_size"),
        hidden_size=need("hidden_size"),
        intermediate_size=need("intermediate_size"),
        num_layers=need("num_hidden_layers"),
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim=raw.get("head_dim") or need("hidden_size") // num_qo_heads,
        rms_norm_eps=need("rms_norm_eps"),
        rope_theta=rope.get("rope_theta", raw.get("rope_theta", 10000.0)),
        rope_scaling=scaling,
        tie_embeddings=raw.get("tie_word_embeddings", False),
        max_positions=need("max_position_embeddings"),
        bos_token=raw.get("bos_token_id"),
        eos_tokens=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
    )


# ---- weights -----------------------------------------------------------------------------------


class Model(NamedTuple):
    config: LlamaConfig
    params: Params
    tokenizer: Any  # tokenizers.Tokenizer


def load(directory: str | Path, dtype: str = "bfloat16") -> Model:
    """Loads a Hugging Face directory of the Llama family.

    Args:
      directory: config.json, tokenizer.json, and model.safetensors or the shards that
        model.safetensors.index.json names. Weights may be bf16, f16 or f32.
      dtype: of the weights in memory, and so of the activations.

    Raises:
      ModelDirectoryError: a file, key or tensor is missing or does not fit; names it.
    """
    from tokenizers import Tokenizer

    config = load_config(directory)
    path = _existing(Path(directory) / "tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelDirectoryError(f"{path}: not a tokenizer: {error}") from error
    return Model(config, load_params(directory, config, dtype), tokenizer)


def load_params(directory: str | Path, config: LlamaConfig, dtype: str = "bfloat16") -> Params:
    """Reads and stacks the weights. Arguments and errors: `load`."""
    directory = Path(directory)
    shapes = _tensor_shapes(config)
    tensors: dict[str, np.ndarray] = {}
    for path in _weight_files(directory):
        tensors |= _read_tensors(path, shapes)
    if missing := sorted(shapes.keys() - tensors.keys()):
        raise ModelDirectoryError(
            f"{directory}: tensor '{missing[0]}' is missing, with {len(missing) - 1} more"
        )

    def matrix(name: str) -> np.ndarray:
        return tensors[name].T  # [out, in] in the file

    def stack(name: str, read: Callable[[str], np.ndarray] = matrix) -> jax.Array:
        layers = range(config.num_layers)
        return jnp.asarray(
            np.stack([read(f"model.layers.{i}.{name}.weight") for i in layers]), dtype
        )

    params: Params = {
        "embed": jnp.asarray(tensors["model.embed_tokens.weight"], dtype),
        "final_norm": jnp.asarray(tensors["model.norm.weight"], dtype),
        "layers": {
            "attention_norm": stack("input_layernorm", tensors.__getitem__),
            "mlp_norm": stack("post_attention_layernorm", tensors.__getitem__),
            **{name: stack(f"self_attn.{name}_proj") for name in "qkvo"},
            **{name: stack(f"mlp.{name}_proj") for name in ("gate", "up", "down")},
        },
    }
    if not config.tie_embeddings:
        params["head"] = jnp.asarray(matrix("lm_head.weight"), dtype)
    return params


def _tensor_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that belongs in the files, as torch shapes it: matrices are [out, in]."""
    d, ff = config.hidden_size, config.intermediate_size
    q_size = config.num_qo_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (config.vocab_size, d),
        "model.norm": (d,),
    }
    if not config.tie_embeddings:
        shapes["lm_head"] = (config.vocab_size, d)
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm": (d,),
            f"{layer}.post_attention_layernorm": (d,),
            f"{layer}.self_attn.q_proj": (q_size, d),
            f"{layer}.self_attn.k_proj": (kv_size, d),
            f"{layer}.self_attn.v_proj": (kv_size, d),
            f"{layer}.self_attn.o_proj": (d, q_size),
            f"{layer}.mlp.gate_proj": (ff, d),
            f"{layer}.mlp.up_proj": (ff, d),
            f"{layer}.mlp.down_proj": (d, ff),
        }
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def _weight_files(directory: Path) -> list[Path]:
    whole, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if not index.is_file():
        raise ModelDirectoryError(f"{directory}: neither {whole.name} nor {index.name} is there")
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelDirectoryError(f"{index}: key 'weight_map' is missing")
    return [_existing(directory / name) for name in sorted(set(weight_map.values()))]


def _read_tensors(
    path: Path, shapes: dict[str, tuple[int, ...]]
) -> Iterable[tuple[str, np.ndarray]]:
    """The tensors of one file, each checked against `shapes`."""
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise ModelDirectoryError(f"{path}: not a safetensors file: {error}") from error
    with file:
        for name in file.keys():
            # Old exports carry the RoPE table; tied ones may carry the head a second time.
            if name.endswith("rotary_emb.inv_freq") or (
                name == "lm_head.weight" and name not in shapes
            ):
                continue
            if name not in shapes:
                raise ModelDirectoryError(
                    f"{path}: tensor '{name}' is no part of a Llama with this config"
                )
            header = file.get_slice(name)
            shape, dtype = tuple(header.get_shape()), header.get_dtype()
            if shape != shapes[name]:
                raise ModelDirectoryError(
                    f"{path}: tensor '{name}': expected shape {shapes[name]}, got {shape}"
                )
            if dtype not in ("BF16", "F16", "F32"):
                raise ModelDirectoryError(
                    f"{path}: tensor '{name}': expected dtype BF16, F16 or F32, got {dtype}"
                )
            yield name, file.get_tensor(name)


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise ModelDirectoryError(f"{path}: no such file")
    return path


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_existing(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelDirectoryError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelDirectoryError(f"{path}: expected an object, got {type(value).__name__}")
    return value


# ---- forward -----------------------------------------------------------------------------------


def attention_spec(config: LlamaConfig, **kwargs: Any) -> ja.AttentionSpec:
    """The model's attention; `kwargs` are the capacities and other fields of AttentionSpec."""
    return ja.AttentionSpec(
        num_qo_heads=config.num_qo_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim_qk=config.head_dim,
        **kwargs,
    )


def init_pages(
    config: LlamaConfig, spec: ja.AttentionSpec, num_pages: int
) -> tuple[jax.Array, jax.Array]:
    """k_pages, v_pages: [num_layers, num_pages, page_size, num_kv_heads, head_dim], zeros."""
    shape = (config.num_layers, num_pages, spec.page_size, config.num_kv_heads, config.head_dim)
    return jnp.zeros(shape, spec.dtype), jnp.zeros(shape, spec.dtype)


def forward(
    params: Params,
    config: LlamaConfig,
    tokens: jax.Array,
    positions: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    plan: ja.AttentionPlan,
    logit_rows: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One step of a batch: appends the tokens to the cache, and attends over it.

    Args:
      params: as `load_params` gives them; their dtype must be that of plan.spec.
      config: static.
      tokens: [max_qo_tokens] i32. Packed, request after request, as the plan's qo_indptr says; what
        stands in the padding is ignored.
      positions: [max_qo_tokens] i32. Of each token in its sequence: kv_len - qo_len + i.
      k_pages, v_pages: [num_layers, num_pages, page_size, num_kv_heads, head_dim]. Written in
        place where they are donated.
      plan: of a causal, paged spec with the model's heads.
      logit_rows: [n] i32. The tokens to compute logits for, usually the last of each request.

    Returns:
      logits: [n, vocab_size] f32.
      k_pages, v_pages: with the new tokens.
    """
    angles = rope_angles(config, positions)

    def layer(carry, inputs):
        x, k_pages, v_pages = carry
        weights, idx = inputs

        # The stacked cache and an index, never a slice: slicing it would make XLA copy it.
        def attend(q, k, v):
            pages = ja.append_kv(k_pages, v_pages, k, v, plan, layer=idx)
            return ja.attention(q, *pages, plan, layer=idx), pages

        x, pages = _layer(x, weights, config, angles, attend)
        return (x, *pages), None

    (x, k_pages, v_pages), _ = jax.lax.scan(
        layer,
        (params["embed"][tokens], k_pages, v_pages),
        (params["layers"], jnp.arange(config.num_layers)),
    )
    return _logits(x[logit_rows], params, config), k_pages, v_pages


def reference_forward(params: Params, config: LlamaConfig, tokens: jax.Array) -> jax.Array:
    """Logits [len, vocab_size] f32 of one sequence tokens [len] i32, by dense causal attention."""
    angles = rope_angles(config, jnp.arange(tokens.shape[0]))

    def attend(q, k, v):
        k, v = (jnp.repeat(x, config.num_qo_heads // config.num_kv_heads, axis=1) for x in (k, v))
        scores = jnp.einsum("qhd,khd->hqk", q, k, preferred_element_type=jnp.float32)
        scores = scores / math.sqrt(config.head_dim)
        scores = jnp.where(jnp.tri(tokens.shape[0], dtype=bool), scores, -jnp.inf)
        return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores).astype(v.dtype), v), None

    def layer(x, weights):
        return _layer(x, weights, config, angles, attend)

    x, _ = jax.lax.scan(layer, params["embed"][tokens], params["layers"])
    return _logits(x, params, config)


def _layer(
    x: jax.Array,
    weights: Params,
    config: LlamaConfig,
    angles: tuple[jax.Array, jax.Array],
    attend: Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]],
) -> tuple[jax.Array, Any]:
    """x: [n, hidden] -> x, state, where attend(q, k, v) -> o [n, num_qo_heads, head_dim], state."""
    h = _rms_norm(x, weights["attention_norm"], config)
    q, k, v = ((h @ weights[name]).reshape(len(x), -1, config.head_dim) for name in "qkv")
    o, state = attend(_rotate(q, angles), _rotate(k, angles), v)
    x = x + o.reshape(len(x), -1) @ weights["o"]
    h = _rms_norm(x, weights["mlp_norm"], config)
    return x + (jax.nn.silu(h @ weights["gate"]) * (h @ weights["up"])) @ weights["down"], state


def _logits(x: jax.Array, params: Params, config: LlamaConfig) -> jax.Array:
    x = _rms_norm(x, params["final_norm"], config)
    head = params["embed"].T if config.tie_embeddings else params["head"]
    return jnp.dot(x, head, preferred_element_type=jnp.float32)


def _rms_norm(x: jax.Array, weight: jax.Array, config: LlamaConfig) -> jax.Array:
    x32 = x.astype(jnp.float32)
    variance = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    return (x32 * jax.lax.rsqrt(variance + config.rms_norm_eps)).astype(x.dtype) * weight


# ---- RoPE --------------------------------------------------------------------------------------


def rope_frequencies(config: LlamaConfig) -> np.ndarray:
    """[head_dim / 2] f64, radians a token. Scaling: the Llama 3.1 release, `apply_scaling`.

    Wavelengths that fit often into the original context are kept, those that do not fit are
    stretched by `factor`, and the ones between are blended.
    """
    exponents = np.arange(0, config.head_dim, 2) / config.head_dim
    frequencies = config.rope_theta**-exponents
    if (scaling := config.rope_scaling) is None:
        return frequencies
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def rope_angles(config: LlamaConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos, sin: [n, 1, head_dim / 2] f32 of positions [n]; the same for all layers."""
    frequencies = jnp.asarray(rope_frequencies(config), jnp.float32)
    angles = positions[:, None, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def _rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates x: [n, heads, head_dim], pairing element i with i + head_dim / 2."""
    cos, sin = angles
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
