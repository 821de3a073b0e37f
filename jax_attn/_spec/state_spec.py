"""StateSpec and LinearAttentionSpec: the static half of a batch over a pool of recurrent states."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NoReturn

import jax.numpy as jnp

from jax_attn._spec.formats import DTYPES

MAX_HEAD_DIM = 256
MAX_CONVOLUTION_WIDTH = 8
CHUNK = 64
# With a decay per channel, products inside a chunk need exp(g_i - g_j) for each channel, so chunks
# are short.
CHANNEL_CHUNK = 16
_MAX_INT32 = 2**31 - 1
_DECAYS = ("none", "head", "channel")
_STATE_DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class StateSpec:
    """The capacities of a batch of requests that each have a state in a pool.

    Enough for models whose only recurrent states are those of short convolutions.

    max_tokens: rows of the packed token arrays.
    max_batch: requests of a batch.
    num_slots: states in the pool.
    max_qo_len: most tokens of a request in one call. None: max_tokens. A small number (1 for
        decode, up to 8 for drafts) selects code that computes all requests side by side.
    max_checkpoints: states that a batch writes besides the one of each request.
    chunk_tokens: tokens that are computed together. None: the fastest number. 1: one after the
        other, so that the bits of a request do not depend on how it is cut into calls; prompts
        take 2.5 times as long on CPUs.

    Raises ValueError for a field out of range.

    >>> import jax_attn as ja
    >>> ja.StateSpec(max_tokens=8, max_batch=2, num_slots=4).max_qo_len
    8
    """

    max_tokens: int
    max_batch: int
    num_slots: int
    _: dataclasses.KW_ONLY
    max_qo_len: int | None = None
    max_checkpoints: int = 0
    chunk_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.max_qo_len is None:
            object.__setattr__(self, "max_qo_len", self.max_tokens)
        for name, least in (
            ("max_tokens", 0),
            ("max_batch", 0),
            ("num_slots", 0),
            ("max_qo_len", 0),
            ("max_checkpoints", 0),
        ):
            self._require_int(name, least)
        if self.chunk_tokens is not None and not 1 <= self.chunk_tokens <= CHUNK:
            self._refuse("chunk_tokens", f"1 to {CHUNK}, or None", self.chunk_tokens)

    def _require_int(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
            self._refuse(name, f"an integer in [{least}, 2^31)", value)

    def _refuse(self, name: str, expected: str, got: Any) -> NoReturn:
        raise ValueError(f"{type(self).__name__}: {name}: expected {expected}, got {got!r}.")

    @property
    def chunk(self) -> int:
        """Tokens of a chunk."""
        return CHUNK if self.chunk_tokens is None else self.chunk_tokens

    @property
    def max_chunks(self) -> int:
        """Chunks of the batch that has the most of them."""
        pieces = 2 * self.max_batch + self.max_checkpoints
        return self.max_tokens // self.chunk + pieces

    @property
    def plan_sections(self) -> dict[str, int]:
        """Names and words of the sections of a plan's buffer, in their order."""
        return {
            "header": 8,
            "qo_indptr": self.max_batch + 1,
            "read_slots": self.max_batch,
            "write_slots": self.max_batch,
            "commit_lens": self.max_batch,
            "chunks": 6 * self.max_chunks,
        }

    @property
    def chunks_begin(self) -> int:
        """The first word of a plan's last section, the chunks."""
        return self.plan_words - self.plan_sections["chunks"]

    @property
    def plan_words(self) -> int:
        """Length of a plan's buffer in 32-bit words."""
        return sum(self.plan_sections.values())


@dataclasses.dataclass(frozen=True)
class LinearAttentionSpec(StateSpec):
    """The static half of a batch of linear attention: what selects a kernel or fixes a shape.

    One token of a v head, with the state S [head_dim_k, head_dim_v] in f32:

        S <- diag(exp(g)) S
        S <- S + k (beta (v - S^T k))^T    with delta_rule; without it S <- S + beta k v^T
        o  = scale * S^T q

    Gated delta rule (arXiv 2412.06464): decay "head", delta_rule. KDA (arXiv 2510.26692): decay
    "channel", delta_rule. Mamba-2 (arXiv 2405.21060): decay "head", no delta_rule, q = C, k = B,
    v = dt * x, scale = 1. Lightning attention: decay "head" with a constant g.

    num_qk_heads, num_v_heads: v head h uses q and k head h // (num_v_heads / num_qk_heads).
    head_dim_k, head_dim_v: multiples of 8 up to 256.
    decay: "none", "head" (g is a number a v head) or "channel" (a number a channel of k).
    delta_rule: see above.
    l2_norm: q and k are divided by sqrt(sum of squares + 1e-6) first, before scale.
    scale: None: 1 / sqrt(head_dim_k).
    dtype: of q, k, v and o: bfloat16, float16 or float32. Sums are f32.
    state_dtype: of the pool: float32 or bfloat16. A state is rounded only when it is written.
    Other fields: see StateSpec.

    Raises ValueError for a field out of range, NotImplementedError for an unsupported head_dim or
    dtype.

    >>> import jax_attn as ja
    >>> spec = ja.LinearAttentionSpec(
    ...     8, 2, 4, num_qk_heads=1, num_v_heads=2, head_dim_k=64, head_dim_v=128
    ... )
    >>> spec.state_shape, spec.scale
    ((4, 2, 64, 128), 0.125)
    """

    _: dataclasses.KW_ONLY
    num_qk_heads: int
    num_v_heads: int
    head_dim_k: int
    head_dim_v: int
    decay: Literal["none", "head", "channel"] = "head"
    delta_rule: bool = True
    l2_norm: bool = False
    scale: float | None = None
    dtype: Any = "bfloat16"
    state_dtype: Any = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_qk_heads", "num_v_heads"):
            self._require_int(name, 1)
        if self.num_v_heads % self.num_qk_heads:
            self._refuse(
                "num_v_heads", f"a multiple of num_qk_heads = {self.num_qk_heads}", self.num_v_heads
            )
        for name in ("head_dim_k", "head_dim_v"):
            self._require_int(name, 1)
            if getattr(self, name) % 8 or getattr(self, name) > MAX_HEAD_DIM:
                raise NotImplementedError(
                    f"LinearAttentionSpec: {name}: multiples of 8 up to {MAX_HEAD_DIM} are"
                    f" supported, got {getattr(self, name)}."
                )
        if self.decay not in _DECAYS:
            self._refuse("decay", '"none", "head" or "channel"', self.decay)
        for name in ("delta_rule", "l2_norm"):
            if not isinstance(getattr(self, name), bool):
                self._refuse(name, "a bool", getattr(self, name))
        scale = self.head_dim_k**-0.5 if self.scale is None else self.scale
        is_number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
        if not is_number or not math.isfinite(scale):
            self._refuse("scale", "a finite number or None", scale)
        object.__setattr__(self, "scale", float(scale))
        for name, known in (("dtype", DTYPES), ("state_dtype", _STATE_DTYPES)):
            try:
                found = jnp.dtype(getattr(self, name)).name
            except TypeError:
                found = repr(getattr(self, name))
            if found not in known:
                raise NotImplementedError(
                    f"LinearAttentionSpec: {name}: {', '.join(known)} are supported, got {found}."
                )
            object.__setattr__(self, name, found)

    @property
    def chunk(self) -> int:
        """Tokens of a chunk."""
        if self.chunk_tokens is not None:
            return self.chunk_tokens
        return CHANNEL_CHUNK if self.decay == "channel" else CHUNK

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """[num_slots, num_v_heads, head_dim_k, head_dim_v] of the pool, without layers."""
        return self.num_slots, self.num_v_heads, self.head_dim_k, self.head_dim_v

    @property
    def decay_shape(self) -> tuple[int, ...] | None:
        """[max_tokens, num_v_heads (, head_dim_k)] of g; None without a decay."""
        if self.decay == "none":
            return None
        of_head = (self.head_dim_k,) if self.decay == "channel" else ()
        return self.max_tokens, self.num_v_heads, *of_head
