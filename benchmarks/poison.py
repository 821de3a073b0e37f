"""The cost of non-finite values: time of a batch with a poisoned prompt compared with a clean one.

    python -m benchmarks.poison [--prompt 16384] [--decodes 64] [--kv_len 4096] [--repeats 15]

One causal prompt and decodes of clean requests share a call, as in an engine. Measured are the
prompt alone, the decodes alone, and both. A NaN in one request must not slow the others measurably:
`ratio` is relative to the clean batch. Also checks that the other requests' results keep their
bits. Times are medians of a whole call, launch included.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jax_attn as ja
from benchmarks import timing

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
Poison = Callable[[np.ndarray, int], None]


def one_column(v: np.ndarray, n: int) -> None:
    v[3, :, 5] = np.nan


def one_token(v: np.ndarray, n: int) -> None:
    v[3] = np.nan


def middle_token(v: np.ndarray, n: int) -> None:
    v[n // 2 + 77] = np.nan


def middle_on(v: np.ndarray, n: int) -> None:
    v[n // 2 + 77 :] = np.nan


def every_token(v: np.ndarray, n: int) -> None:
    v[:] = np.nan


def infinities(v: np.ndarray, n: int) -> None:
    v[..., ::3], v[..., 1::3] = np.inf, -np.inf


POISONS: dict[str, Poison] = {
    "NaN, column 5 of token 3": one_column,
    "NaN, token 3": one_token,
    "NaN, a token in the middle": middle_token,
    "NaN, from the middle on": middle_on,
    "NaN, every token": every_token,
    "infinities, every token": infinities,
}


def measure(qo_lens: list[int], kv_lens: list[int], poisoned: int | None, repeats: int) -> None:
    """Times a batch. poisoned: the request with non-finite values; None: only the clean time."""
    rng = np.random.default_rng(0)
    pages = [-(-n // PAGE) for n in kv_lens]
    page_indptr = np.concatenate([[0], np.cumsum(pages)])
    spec = ja.AttentionSpec(
        num_qo_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim_qk=DIM,
        dtype="bfloat16",
        page_size=PAGE,
        max_batch=len(qo_lens),
        max_qo_tokens=sum(qo_lens),
        max_kv_pages=sum(pages),
    )
    qo_indptr = np.concatenate([[0], np.cumsum(qo_lens)])
    plan = ja.plan(spec, qo_indptr, kv_lens, page_indptr, np.arange(sum(pages)))
    q = jnp.asarray(rng.normal(size=(sum(qo_lens), HEADS, DIM)), jnp.bfloat16)
    shape = (sum(pages), PAGE, KV_HEADS, DIM)
    k = jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
    clean_v = rng.normal(size=shape).astype(np.float32)
    attend = jax.jit(lambda v: ja.attention(q, k, v, plan))

    def run(v: np.ndarray) -> tuple[float, np.ndarray]:
        on_device = jnp.asarray(v, jnp.bfloat16)
        time_us = timing.median_us(lambda: attend(on_device), repeats)
        return time_us, np.asarray(attend(on_device)).view(np.uint16)

    batch = f"{qo_lens[0]} of {kv_lens[0]}" + (f" + {len(qo_lens) - 1}" if len(qo_lens) > 1 else "")
    clean_us, clean_o = run(clean_v)
    print(f"| {batch} | clean | {clean_us:.0f} | 1.00 |", flush=True)
    if poisoned is None:
        return
    rows = np.ones(sum(qo_lens), bool)
    rows[qo_indptr[poisoned] : qo_indptr[poisoned + 1]] = False
    for name, poison in POISONS.items():
        v = clean_v.copy()
        first = page_indptr[poisoned] * PAGE
        tokens = v.reshape(-1, KV_HEADS, DIM)[first : first + kv_lens[poisoned]]
        poison(tokens, kv_lens[poisoned])
        time_us, o = run(v)
        assert np.array_equal(o[rows], clean_o[rows]), f"{name}: results of other requests differ"
        print(f"| {batch} | {name} | {time_us:.0f} | {time_us / clean_us:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompt", type=int, default=16384, help="tokens of the prompt")
    parser.add_argument("--decodes", type=int, default=64, help="requests beside it")
    parser.add_argument("--kv_len", type=int, default=4096, help="tokens of each of these")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    decodes = [1] * args.decodes, [args.kv_len] * args.decodes
    print("| batch | values of one request | us | ratio |")
    print("| --- | --- | ---: | ---: |")
    measure([args.prompt], [args.prompt], 0, args.repeats)
    measure([args.prompt, *decodes[0]], [args.prompt, *decodes[1]], 0, args.repeats)
    measure(*decodes, 0, args.repeats)
    measure([5, *decodes[0]], [args.kv_len, *decodes[1]], 0, args.repeats)  # speculation


if __name__ == "__main__":
    main()
