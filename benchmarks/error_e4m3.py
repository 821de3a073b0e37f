"""Accuracy of a KV cache in float8_e4m3fn compared with bfloat16, on CPU.

    python -m benchmarks.error_e4m3

q, k and v are drawn in float64, and float64 attention over them is the truth. A row names the
stored formats. `stored` is the error of float64 attention over the rounded operands, which no
kernel can avoid. `kernel` is the error of jax_attn.attention on them. Both are norm(o - truth) /
norm(truth) over all rows. `lse` is the largest error of a log-sum-exp. docs/notes/e4m3.md has the
table.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

import jax_attn as ja
from jax_attn import reference

E4M3, BF16 = reference.E4M3, jnp.bfloat16
HEADS, KV_HEADS, DIM = 8, 2, 128


def draw(data: str, rng: np.random.Generator, tokens: int, heads: int, part: str) -> np.ndarray:
    """Draws q, k or v as in a model, [tokens, heads, DIM]."""
    x = rng.normal(size=(tokens, heads, DIM))
    if data == "heavy tails":  # Student's t, 3 degrees of freedom
        x = rng.standard_t(3, size=x.shape) / np.sqrt(3)
    elif data == "outlier channels" and part != "v":  # a few dimensions of k far larger than others
        channels = rng.choice(DIM, 4, replace=False)
        x[..., channels] *= 30 if part == "k" else 0.2
        x[..., channels] += 60 if part == "k" else 0
    elif data == "sharp" and part == "q":
        x *= 4
    return x


def scale_of(x: np.ndarray, how: str) -> np.ndarray | None:
    """Returns scales [heads] that map the largest element to 448, or None."""
    return (np.abs(x).max(axis=(0, 2)) / 448).astype(np.float32) if how == "scaled" else None


def measure(data: str, qo_len: int, kv_len: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    q = draw(data, rng, qo_len, HEADS, "q")
    k, v = (draw(data, rng, kv_len, KV_HEADS, part) for part in "kv")
    visible = reference.visible_keys(qo_len, kv_len, kv_len - qo_len, -1, 0)
    truth, truth_lse = reference.attention_dense(q, k, v, visible)
    rows = []
    for q_type, kv_type, how in (
        (BF16, BF16, ""),
        (BF16, E4M3, "scale 1"),
        (BF16, E4M3, "scaled"),
        (E4M3, E4M3, "scaled"),
    ):
        scales, stored = {}, {}
        for name, x, dtype in (("q", q, q_type), ("k", k, kv_type), ("v", v, kv_type)):
            scale = scale_of(x, how) if dtype == E4M3 else None
            stored[name] = reference.quantize(x, scale) if dtype == E4M3 else x.astype(BF16)
            if scale is not None:
                scales[f"{name}_scale"] = scale
        exact = [
            reference.dequantize(x, scales.get(f"{name}_scale"), np.float64).astype(np.float64)
            for name, x in stored.items()
        ]
        stored_o, _ = reference.attention_dense(*exact, visible)
        spec = ja.AttentionSpec(
            num_qo_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim_qk=DIM,
            kv_dtype=kv_type,
            q_dtype=q_type,
            page_size=None,
            max_batch=1,
            max_qo_tokens=qo_len,
            max_kv_tokens=kv_len,
            target="cpu",
        )
        plan = ja.plan(spec, [0, qo_len], [kv_len])
        o, lse = ja.attention(*stored.values(), plan, return_lse=True, **scales)
        size = np.linalg.norm(truth)
        rows.append(
            {
                "data": data,
                "shape": f"{qo_len} of {kv_len}",
                "q": jnp.dtype(q_type).name,
                "kv": jnp.dtype(kv_type).name,
                "scales": how,
                "stored": float(np.linalg.norm(stored_o - truth) / size),
                "kernel": float(np.linalg.norm(np.asarray(o, np.float64) - truth) / size),
                "lse": float(np.abs(np.asarray(lse, np.float64) - truth_lse).max()),
            }
        )
    return rows


def main() -> None:
    print("| data | queries of keys | q | k, v | scales | stored | kernel | lse |")
    print("| --- | --- | --- | --- | --- | ---: | ---: | ---: |")
    for data in ("normal", "sharp", "heavy tails", "outlier channels"):
        for shape in ((1, 4096), (256, 512)):
            for row in measure(data, *shape):
                errors = " | ".join(f"{row[name]:.2%}" for name in ("stored", "kernel"))
                words = " | ".join(row[name] for name in ("data", "shape", "q", "kv", "scales"))
                print(f"| {words} | {errors} | {row['lse']:.4f} |")


if __name__ == "__main__":
    main()
