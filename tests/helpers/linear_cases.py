"""Batches for linear attention and short convolutions, with poison wherever nothing may look."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

import jax_attn as ja

POISON = np.float32(np.nan)


@dataclasses.dataclass(frozen=True)
class LinearCase:
    lens: tuple[int, ...] = (5, 0, 70, 1)
    read: tuple[int, ...] = (-1, 3, 0, 5)
    write: tuple[int, ...] = (1, 2, 0, -1)
    commit: tuple[int, ...] | None = None
    checkpoints: tuple[tuple[int, int, int], ...] = ()
    num_slots: int = 8
    padding: int = 3  # rows without a token
    qk_heads: int = 1
    v_heads: int = 2
    dim_k: int = 8
    dim_v: int = 16
    decay: str = "head"
    delta_rule: bool = True
    l2_norm: bool = True
    dtype: str = "float32"
    state_dtype: str = "float32"
    g: float | None = None  # None: random
    beta: float | None = None  # None: random
    same_keys: bool = False
    max_qo_len: int | None = None

    @property
    def qo_indptr(self) -> np.ndarray:
        return np.cumsum([0, *self.lens]).astype(np.int32)

    @property
    def spec(self) -> ja.LinearAttentionSpec:
        return ja.LinearAttentionSpec(
            sum(self.lens) + self.padding,
            len(self.lens) + 1,
            self.num_slots,
            max_qo_len=self.max_qo_len,
            max_checkpoints=len(self.checkpoints) + bool(self.checkpoints),
            num_qk_heads=self.qk_heads,
            num_v_heads=self.v_heads,
            head_dim_k=self.dim_k,
            head_dim_v=self.dim_v,
            decay=self.decay,
            delta_rule=self.delta_rule,
            l2_norm=self.l2_norm,
            dtype=self.dtype,
            state_dtype=self.state_dtype,
        )

    @property
    def batch(self) -> dict[str, Any]:
        """Data of the plan, as keywords of the reference."""
        found: dict[str, Any] = {
            "qo_indptr": self.qo_indptr,
            "read_slots": np.array(self.read, np.int32),
            "write_slots": np.array(self.write, np.int32),
        }
        if self.commit is not None:
            found["commit_lens"] = np.array(self.commit, np.int32)
        if self.checkpoints:
            found["checkpoints"] = np.array(self.checkpoints, np.int32)
        return found

    def plan(self) -> ja.StatePlan:
        return ja.plan_linear_attention(self.spec, **self.batch)

    def arrays(self, seed: int = 0) -> dict[str, np.ndarray | None]:
        """q, k, v, g, beta, states. Padding rows, and slots that nobody reads, hold NaN."""
        spec, rng = self.spec, np.random.default_rng(seed)
        tokens, live = spec.max_tokens, sum(self.lens)

        def rows(*shape: int) -> np.ndarray:
            x = rng.standard_normal((tokens, *shape)).astype(np.float32)
            x[live:] = POISON
            return x

        q, k = rows(self.qk_heads, self.dim_k), rows(self.qk_heads, self.dim_k)
        if self.same_keys:
            k[:live] = k[:1] if live else 0
        v = rows(self.v_heads, self.dim_v)
        g = None
        if self.decay != "none":
            shape = (self.v_heads, self.dim_k)[: 1 + (self.decay == "channel")]
            g = -np.abs(rows(*shape)) * 0.3 if self.g is None else np.full((tokens, *shape), self.g)
        beta = 1 / (1 + np.exp(-rows(self.v_heads)))
        if self.beta is not None:
            beta = np.full(beta.shape, self.beta)
        states = np.full(spec.state_shape, POISON, np.float32)
        for slot in set(self.read) - {-1}:
            states[slot] = rng.standard_normal(spec.state_shape[1:])
        cast = {"q": q, "k": k, "v": v}
        found: dict[str, np.ndarray | None] = {
            name: x.astype(np.dtype(ja_dtype(self.dtype))) for name, x in cast.items()
        }
        found["g"] = None if g is None else g.astype(np.float32)
        found["beta"] = beta.astype(np.float32)
        found["states"] = states.astype(ja_dtype(self.state_dtype))
        return found


def ja_dtype(name: str) -> Any:
    import ml_dtypes

    return getattr(ml_dtypes, name) if name == "bfloat16" else np.dtype(name)


CASES = {
    "mixed": LinearCase(),
    "odd_lengths": LinearCase((63, 64, 65, 127, 1), (-1,) * 5, (0, 1, 2, 3, 4)),
    "grouped": LinearCase(qk_heads=2, v_heads=6, dim_k=24, dim_v=8),
    "mamba": LinearCase(delta_rule=False, l2_norm=False),
    "no_decay": LinearCase(decay="none"),
    "linear": LinearCase(decay="none", delta_rule=False),
    "kda": LinearCase(decay="channel"),
    "gla": LinearCase(decay="channel", delta_rule=False),
    "bf16": LinearCase(dtype="bfloat16", state_dtype="bfloat16"),
    "f16": LinearCase(dtype="float16"),
    "largest_dims": LinearCase(
        (9, 1), (-1, 1), (0, 1), num_slots=2, v_heads=1, dim_k=256, dim_v=256
    ),
    "wide_values": LinearCase(dim_v=256, decay="channel", state_dtype="bfloat16"),
    "qwen": LinearCase(
        (1, 1, 66), (-1, 1, 2), (0, 1, 2), num_slots=3, dim_k=128, dim_v=128, dtype="bfloat16"
    ),
    "bf16_chunks": LinearCase(  # two requests read one slot
        (65, 0, 130, 3),
        (-1, 3, 0, 0),
        (1, 2, -1, 4),
        checkpoints=((2, 70, 5),),
        v_heads=4,
        qk_heads=2,
        dim_k=64,
        dim_v=72,
        dtype="bfloat16",
        state_dtype="bfloat16",
    ),
    "mamba_chunks": LinearCase(
        dim_k=128, dim_v=64, delta_rule=False, l2_norm=False, dtype="bfloat16"
    ),
    "kda_chunks": LinearCase(
        (65, 0, 130, 3),
        (-1, 3, 0, 5),
        (1, 2, 0, 4),
        checkpoints=((2, 70, 6), (2, 96, 7)),
        decay="channel",
        v_heads=4,
        qk_heads=2,
        dim_k=64,
        dim_v=72,
        dtype="bfloat16",
    ),
    "f16_chunks": LinearCase((65, 0, 130, 3), write=(1, 2, -1, 4), dim_k=64, dtype="float16"),
    "kda_chunks_far": LinearCase(decay="channel", dim_k=128, dtype="bfloat16", g=-20.0),
    "g_zero": LinearCase(g=-1e-7),
    "g_far": LinearCase(g=-20.0),
    "kda_far": LinearCase(decay="channel", g=-20.0),
    "beta_0": LinearCase(beta=0.0),
    "beta_1": LinearCase(beta=1.0),
    "repeated_keys": LinearCase(same_keys=True, beta=1.0, g=-1e-3),
    "decode": LinearCase((1, 1, 0, 1), max_qo_len=1),
    "drafts": LinearCase((8, 3, 5, 1), (-1, 3, 0, 5), (1, 3, 0, 2), (2, 0, 5, 1), max_qo_len=8),
    "drafts_in_order": LinearCase((8, 3, 70, 1), (-1, 3, 0, 5), (1, 3, 0, 2), (2, 0, 65, 1)),
    "checkpoints": LinearCase(
        checkpoints=((2, 64, 4), (2, 13, 6), (0, 0, 7), (2, 70, 2)), write=(1, -1, 0, -1)
    ),
    "kda_checkpoints": LinearCase(decay="channel", checkpoints=((2, 33, 4), (0, 5, 6))),
    "nothing": LinearCase((0, 0), (0, -1), (1, 2), padding=0),
    "no_requests": LinearCase((), (), ()),
}
