"""Attention error, perplexity and decode time by format of the paged cache, on CPU.

    python -m benchmarks.error_formats

Perplexity: the bundled model over 2,000 tokens of the Python standard library, in four parts, each
read in one prefill over a cache of the format. Error: norm(o - truth) / norm(truth) of one query
over 4096 keys; truth is float64 attention over the drawn q, k and v. Head scales map the largest
element of a head to the largest value of the format; for the model they are 1. "int8 products":
with eight_bit_products, which also quantizes q and P. Time: a decode of 8 requests with 2048 keys,
32 query and 8 KV heads, formats interleaved, the best of 100 each. docs/notes/e4m3.md has the
table.
"""

from __future__ import annotations

import inspect
import textwrap
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_attn as ja
from benchmarks.error_e4m3 import draw
from jax_attn import models, reference
from jax_attn._spec.formats import HEAD_SCALED
from jax_attn.models._layers import decoder

FORMATS = (
    *(None, "float8_e4m3fn", "float8_e5m2", "int8", "int8 products", "mxfp4", "nvfp4", "int4"),
)
DIM, PAGE = 128, 16
DATA = ("normal", "sharp", "heavy tails", "outlier channels")


def fields_of(name: str | None) -> dict[str, Any]:
    """Returns the AttentionSpec fields of a format."""
    kv_dtype, _, products = (name or "").partition(" ")
    return {"kv_dtype": kv_dtype or None, "eight_bit_products": bool(products)}


def make_spec(name: str | None, heads: int, kv_heads: int, **more: Any) -> ja.AttentionSpec:
    sizes = {"num_qo_heads": heads, "num_kv_heads": kv_heads, "head_dim_qk": DIM}
    return ja.AttentionSpec(**sizes, **fields_of(name), page_size=PAGE, target="cpu", **more)


def largest(kv_dtype: str) -> float:
    return 6.0 * 448 if kv_dtype == "nvfp4" else float(jnp.finfo(kv_dtype).max)


def as_pages(x: np.ndarray, name: str | None) -> tuple[np.ndarray, np.ndarray | None]:
    """Converts x [tokens, heads, DIM] to pages of the format, and head scales if it has them."""
    kv_dtype = fields_of(name)["kv_dtype"]
    x = x.reshape(-1, PAGE, *x.shape[1:])
    if kv_dtype is None:
        return x.astype(jnp.bfloat16), None
    scale = None
    if kv_dtype in HEAD_SCALED:
        scale = (np.abs(x).max(axis=(0, 1, 3)) / largest(kv_dtype)).astype(np.float32)
    return np.asarray(reference.quantize(x.astype(jnp.bfloat16), scale, kv_dtype)), scale


def error(data: str, name: str | None, num_keys: int = 4096) -> float:
    rng = np.random.default_rng(0)
    q = draw(data, rng, 1, 8, "q")
    k, v = (draw(data, rng, num_keys, 2, part) for part in "kv")
    visible = reference.visible_keys(1, num_keys, num_keys - 1, -1, 0)
    truth, _ = reference.attention_dense(q, k, v, visible)
    num_pages = num_keys // PAGE
    spec = make_spec(name, 8, 2, max_batch=1, max_qo_tokens=1, max_kv_pages=num_pages)
    plan = ja.plan(spec, [0, 1], [num_keys], [0, num_pages], np.arange(num_pages, dtype=np.int32))
    (k, k_scale), (v, v_scale) = (as_pages(x, name) for x in (k, v))
    o = ja.attention(q.astype(jnp.bfloat16), k, v, plan, k_scale=k_scale, v_scale=v_scale)
    return float(np.linalg.norm(np.asarray(o, np.float64) - truth) / np.linalg.norm(truth))


def decode(name: str | None, batch: int = 8, num_keys: int = 2048) -> Any:
    """Returns a compiled call of the decode."""
    rng = np.random.default_rng(0)
    num_pages = batch * num_keys // PAGE
    spec = make_spec(name, 32, 8, max_batch=batch, max_qo_tokens=batch, max_kv_pages=num_pages)
    lens = np.full(batch, num_keys, np.int32)
    indptr = np.arange(batch + 1, dtype=np.int32)
    ids = np.arange(num_pages, dtype=np.int32)
    plan = ja.plan(spec, indptr, lens, indptr * (num_keys // PAGE), ids)
    x = rng.normal(size=(PAGE * 32, 8, DIM))
    pages = np.tile(as_pages(x, name)[0], (num_pages // 32, 1, 1, 1))
    q = jnp.asarray(rng.normal(size=(batch, 32, DIM)), jnp.bfloat16)
    k, v = jnp.array(pages), jnp.array(pages)
    call = jax.jit(lambda q, k, v: ja.attention(q, k, v, plan))
    return lambda: call(q, k, v).block_until_ready()


def perplexity(name: str | None, part: int = 500, num_parts: int = 4) -> float:
    """Returns exp of the mean negative log-likelihood of all tokens but the first of each part."""
    model = models.load(models.BUNDLED)
    ids = model.tokenizer.encode(inspect.getsource(textwrap) + inspect.getsource(inspect)).ids
    num_pages = -(-part // PAGE)
    limits = {"max_batch": 1, "max_qo_tokens": part, "max_kv_pages": num_pages}
    specs = decoder.attention_specs(
        model.config, **fields_of(name), page_size=PAGE, target="cpu", **limits
    )
    plans = tuple(
        ja.plan(spec, [0, part], [part], [0, num_pages], np.arange(num_pages)) for spec in specs
    )
    positions = jnp.arange(part)

    @jax.jit
    def losses(params: Any, tokens: jax.Array) -> jax.Array:
        pages = decoder.init_pages(model.config, specs, num_pages)
        logits, _, _ = decoder.forward(
            params, model.config, tokens, positions, *pages, plans, positions
        )
        return -jnp.take_along_axis(jax.nn.log_softmax(logits[:-1]), tokens[1:, None], 1)

    parts = np.int32(ids[: part * num_parts]).reshape(num_parts, part)
    return float(np.exp(np.mean([losses(model.params, tokens) for tokens in parts])))


def main() -> None:
    calls = {name: decode(name) for name in FORMATS}
    best = dict.fromkeys(FORMATS, np.inf)
    for _ in range(100):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - start)
    print(f"| k, v | bytes a token and head | {' | '.join(DATA)} | perplexity | decode, ms |")
    print(f"| --- | ---: | {'---: | ' * len(DATA)}---: | ---: |")
    for name in FORMATS:
        row = make_spec(name, 1, 1, max_kv_pages=1)
        width = row.kv_shapes()[0][-1] * jnp.dtype(row.dtype_of_kv).itemsize
        errors = " | ".join(f"{error(data, name):.2%}" for data in DATA)
        told = f"{perplexity(name):.3f} | {best[name] * 1e3:.2f}"
        print(f"| {name or 'bfloat16'} | {width} | {errors} | {told} |")


if __name__ == "__main__":
    main()
