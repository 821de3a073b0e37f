"""The list of attention cases that all backends share, and the poisoned arrays of a case.

A case is data: lengths, heads, masks, schedule. `build` turns it into numpy arrays in which
everything that must not matter (unused slots and pages, padding rows, the tail of page_indices) is
NaN or 2147480000. `expected` computes the float64 truth and the error bound of each output row.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np

import jax_attn as ja
from jax_attn import reference

POISON_ID = 2147480000
E4M3 = "float8_e4m3fn"

# Lengths that mix everything a server may see in one step: decodes, chunked prefills, a prefill
# from nothing, a request without new tokens, one without any token, and more queries than keys.
MIXED_QO = (1, 0, 17, 1, 64, 5, 130, 1, 3)
MIXED_KV = (33, 16, 17, 0, 129, 2, 300, 1025, 700)


@dataclass(frozen=True)
class Case:
    name: str
    qo_lens: tuple[int, ...] = MIXED_QO
    kv_lens: tuple[int, ...] = MIXED_KV
    num_qo_heads: int = 4
    num_kv_heads: int = 2
    head_dim_qk: int = 64
    head_dim_vo: int | None = None
    mla: bool = False  # v is None: values are the first head_dim_vo columns of k
    dtype: str = "float32"
    # float8_e4m3fn with scales for every head, or int8; None: dtype.
    kv_dtype: str | None = None
    q_dtype: str | None = None
    eight_bit_products: bool = False
    causal: bool = True
    window_left: int = -1
    window_right: int = -1
    logits_soft_cap: float = 0.0
    sm_scale: float | None = None
    page_size: int | None = 16
    schedule: str = "balanced"
    kv_split: int | None = None
    num_ctas: int | None = None
    num_layers: int | None = None  # stacked paged cache; the case reads the last layer
    sinks: bool = False
    q_offsets: tuple[int, ...] | None = None
    contents: tuple[str, ...] = ("normal", "count")  # see _contents
    repeats: int = 2  # runs whose bits must be equal
    # A radix tree: requests whose strings share a prefix share branch_tokens of pages per letter.
    branches: tuple[str, ...] | None = None
    branch_tokens: int = 256
    share_prefixes: bool | None = None

    def spec_fields(self) -> dict[str, Any]:
        """Arguments of AttentionSpec, with capacities a little larger than the batch needs."""
        names = (
            "num_qo_heads num_kv_heads head_dim_qk head_dim_vo mla dtype kv_dtype q_dtype causal "
            "eight_bit_products window_left window_right logits_soft_cap sm_scale page_size "
            "schedule kv_split num_ctas share_prefixes"
        )
        fields = {name: getattr(self, name) for name in names.split()}
        fields["max_batch"] = len(self.kv_lens) + 2
        fields["max_qo_tokens"] = sum(self.qo_lens) + 3
        if self.page_size is None:
            fields["max_kv_tokens"] = sum(self.kv_lens) + len(self.kv_lens) + 4
        else:
            pages = sum(-(-n // self.page_size) for n in self.kv_lens)
            fields["max_kv_pages"] = pages + len(self.kv_lens) + 5
        if self.schedule == "fixed_split":  # the default has space for decodes only
            chunks = [
                (-(-kv_len // self.kv_split) + 1) * qo_len
                for qo_len, kv_len in zip(self.qo_lens, self.kv_lens, strict=True)
            ]
            # mla: blocks of at least 8 q heads replace the kv heads; the last block is padded.
            head_blocks = -(-self.num_qo_heads // 8) if self.mla else self.num_kv_heads
            fields["max_items"] = (sum(chunks) + 1) * head_blocks
            fields["max_partial_rows"] = (sum(chunks) + 1) * (self.num_qo_heads + 64 * self.mla)
        return fields


@dataclass
class Lengths:
    """Host arrays of one batch, as jax_attn.plan takes them."""

    qo_indptr: np.ndarray  # [batch_size + 1] i32
    kv_lens: np.ndarray  # [batch_size] i32
    page_indptr: np.ndarray | None  # [batch_size + 1] i32
    page_indices: np.ndarray | None  # [max_kv_pages] i32, the tail poisoned
    kv_indptr: np.ndarray | None  # ragged: [batch_size + 1] i32, with a gap row after each request
    q_offsets: np.ndarray | None

    def plan_arguments(self) -> dict[str, np.ndarray]:
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: value for name, value in given.items() if value is not None}


@dataclass
class Batch:
    lengths: Lengths
    q: np.ndarray  # [max_qo_tokens, num_qo_heads, head_dim_qk], padding rows NaN
    k: np.ndarray  # pages or ragged rows, everything unused NaN
    v: np.ndarray | None  # None: mla
    sinks: np.ndarray | None  # [num_qo_heads] f32
    layer: int | None
    # q_scale, k_scale, v_scale of the float8_e4m3fn operands; int8 rows hold their own scales.
    scales: dict[str, np.ndarray]
    # The same numbers request by request, for tests that must know where each came from.
    k_rows: list[np.ndarray]  # [kv_len, num_kv_heads, head_dim_qk]
    v_rows: list[np.ndarray]


def make_plan(case: Case, target: str = "cpu", **more: Any) -> ja.AttentionPlan:
    """Plans the case's lengths. more: further arguments of AttentionSpec."""
    lengths, _ = make_lengths(case, np.random.default_rng(0))
    spec = ja.AttentionSpec(**(case.spec_fields() | more), target=target)
    plan = ja.plan(spec, **lengths.plan_arguments())
    spec.problem.check_plan(plan.buffer, -1)  # must accept every plan that a planner makes
    return plan


def make_lengths(case: Case, rng: np.random.Generator) -> tuple[Lengths, int]:
    """The host arrays and the number of pages (paged) or rows (ragged) the pool must have."""
    fields = case.spec_fields()
    kv_lens = np.array(case.kv_lens, np.int32)
    qo_indptr = _indptr(case.qo_lens)
    q_offsets = None if case.q_offsets is None else np.array(case.q_offsets, np.int32)
    if case.page_size is None:
        kv_indptr = _indptr(kv_lens + 1)
        lengths = Lengths(qo_indptr, kv_lens, None, None, kv_indptr, q_offsets)
        return lengths, fields["max_kv_tokens"]
    used = -(-kv_lens // case.page_size)
    is_causal = case.causal or case.window_right == 0
    if is_causal and q_offsets is None and (np.diff(qo_indptr) > kv_lens).any():
        q_offsets = kv_lens - np.diff(qo_indptr)  # plan refuses such lengths without it
    # Some requests own a page they do not use yet. Nothing reads its id.
    reserved = (np.arange(len(kv_lens)) % 3 == 1).astype(np.int32)
    page_indptr = _indptr(used + reserved)
    num_pages = int(used.sum()) + 3
    ids = rng.permutation(num_pages).astype(np.int32)
    page_indices = np.full(fields["max_kv_pages"], POISON_ID, np.int32)
    first_ids: dict[Any, int] = {}
    for r, n in enumerate(used):
        path = "" if case.branches is None else case.branches[r]
        for i in range(n):
            end = (i + 1) * case.page_size
            depth = -(-end // case.branch_tokens)
            is_shared = depth <= len(path) and end <= case.kv_lens[r]
            page = (path[:depth] if is_shared else r, i)
            page_indices[page_indptr[r] + i] = ids[first_ids.setdefault(page, len(first_ids))]
    return Lengths(qo_indptr, kv_lens, page_indptr, page_indices, None, q_offsets), num_pages


def build(case: Case, content: str = "normal", seed: int = 0) -> Batch:
    """Arrays of a case, poisoned wherever the kernel must not read."""
    rng = np.random.default_rng([seed, sum(case.kv_lens), case.head_dim_qk])
    lengths, pool = make_lengths(case, rng)
    is_int8 = case.kv_dtype == "int8"  # encoded at the end
    q_dtype = jnp.dtype(case.q_dtype or case.dtype)
    kv_dtype = jnp.dtype(case.dtype if is_int8 else case.kv_dtype or case.dtype)
    d_qk, d_vo = case.head_dim_qk, case.head_dim_vo or case.head_dim_qk
    nnz_qo, nnz_kv = sum(case.qo_lens), sum(case.kv_lens)
    q_live = np.empty((nnz_qo, case.num_qo_heads, d_qk))
    k_live = np.empty((nnz_kv, case.num_kv_heads, d_qk))
    v_live = np.empty((nnz_kv, case.num_kv_heads, d_vo))
    positions = np.concatenate([[], *(np.arange(n) for n in case.kv_lens)]).astype(int)
    _contents(content, rng, positions, q_live, k_live, v_live)
    if case.mla and content == "count":
        k_live[..., :d_vo] = v_live
    elif case.mla:
        v_live = k_live[..., :d_vo]

    q = np.full((case.spec_fields()["max_qo_tokens"], case.num_qo_heads, d_qk), np.nan, q_dtype)
    scales = _scales(case, rng)
    if content.startswith("far_"):
        if (largest := float(jnp.finfo(q_dtype).max)) < 1e5:  # f16, e4m3
            q_live *= largest / np.maximum(largest, np.abs(q_live))
            k_live *= min(largest, 0.25 * float(jnp.finfo(kv_dtype).max))
        elif "k_scale" in scales:  # products of what is stored must be finite
            q_live *= 0.2
    for array, name in ((q_live, "q_scale"), (k_live, "k_scale"), (v_live, "v_scale")):
        if name in scales:
            array /= scales[name][:, None]
    q[:nnz_qo] = q_live
    shape = (pool,) if case.page_size is None else (pool, case.page_size)
    k = np.full((*shape, *k_live.shape[1:]), np.nan, kv_dtype)
    v = np.full((*shape, *v_live.shape[1:]), np.nan, kv_dtype)
    places = kv_places(lengths, case.page_size)
    k[places], v[places] = k_live, v_live
    k_live, v_live = k[places], v[places]  # a shared page keeps the last request's rows
    if case.mla:
        v = None
    if is_int8:
        with np.errstate(invalid="ignore"):
            k, v = (np.asarray(reference.quantize(x, None, "int8")) for x in (k, v))
    if case.num_layers is not None:
        poison = -1 if is_int8 else np.nan  # the scales are NaN, too
        k = np.stack([np.full_like(k, poison)] * (case.num_layers - 1) + [k])
        v = v if v is None else np.stack([np.full_like(v, poison)] * (case.num_layers - 1) + [v])
    sinks = rng.normal(size=case.num_qo_heads).astype(np.float32) if case.sinks else None
    layer = None if case.num_layers is None else case.num_layers - 1
    borders = np.cumsum(case.kv_lens)[:-1]
    rows = (
        np.split(x.astype(kv_dtype), borders) if len(case.kv_lens) else [] for x in (k_live, v_live)
    )
    return Batch(lengths, q, k, v, sinks, layer, scales, *rows)


def _scales(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Scales that differ by head and are no powers of two; e4m3 holds k and v divided by theirs."""
    heads = {}
    if case.kv_dtype == E4M3:
        heads |= {"k_scale": case.num_kv_heads, "v_scale": case.num_kv_heads}
        if case.mla:  # values are columns of k
            del heads["v_scale"]
    if case.q_dtype is not None:
        heads["q_scale"] = case.num_qo_heads
    return {name: rng.uniform(0.3, 3, n).astype(np.float32) for name, n in heads.items()}


def kv_places(lengths: Lengths, page_size: int | None) -> tuple[np.ndarray, ...]:
    """Position of each kv token of the batch: (page, slot) arrays, or (row,) if ragged."""
    rows, pages, slots = [], [], []
    for r, n in enumerate(lengths.kv_lens):
        pos = np.arange(n)
        if page_size is None:
            rows.append(lengths.kv_indptr[r] + pos)
        else:
            pages.append(lengths.page_indices[lengths.page_indptr[r] + pos // page_size])
            slots.append(pos % page_size)
    parts = (rows,) if page_size is None else (pages, slots)
    return tuple(np.concatenate([[], *part]).astype(int) for part in parts)


def _contents(name, rng, positions, q, k, v):
    """Fills q [nnz_qo, ...], k and v [nnz_kv, ...]; positions: [nnz_kv] kv position of each row.

    normal  logits and values of the size a model has.
    peaky   a few keys take all the weight.
    count   every logit is 0 and value j is the one-hot row of j mod head_dim_vo: o counts the
            visible keys of each residue and lse is the log of their number, so one key too many,
            too few or counted twice shows, wherever it is.
    rising  logits grow with the position: every step of an online softmax rescales.
    falling the first keys take all the weight.
    huge    visible logits near -5e5 whose differences are exact (with sm_scale 1).
    far_*   logits of FAR sizes, another for each row, that are equal or far apart; see _far.
    """
    rng.standard_normal(out=q)
    rng.standard_normal(out=k)
    rng.standard_normal(out=v)
    if name == "peaky":
        q *= 4
    elif name == "count":
        q[:] = 0
        v[:] = 0
        v[np.arange(len(v)), :, positions % v.shape[-1]] = 1
    elif name in ("rising", "falling"):
        # In the last dimension, so that a dot product adds its one large term last.
        q[..., -1] = np.sqrt(q.shape[-1])
        k[..., -1] = (0.02 if name == "rising" else -0.02) * positions[:, None]
    elif name == "huge":
        q[:] = k[:] = 0
        q[..., 0], k[..., 0] = 512, -1024
        q[..., 1], k[..., 1] = 1, rng.integers(-2, 3, size=k.shape[:-1])
    elif name.startswith("far_"):
        _far(name, positions, q, k)
    elif name != "normal":
        raise ValueError(name)


# Sizes of logits: denormals, what models have, what masks add, and the end of f32.
FAR = (1e-40, 1e-38, 1e-3, 3.0, 1e4, 1e5, 1e6, 3e7, 4.2e9, 1e10, 1e12, 1e20, 1e30, 3.3e38)
FAR_CONTENTS = ("far_equal", "far_begin", "far_end", "far_steps")


def _far(name, positions, q, k):
    """Logits of row i: FAR[i] or -FAR[i] times a factor of its key, in the last dimension.

    far_equal  the factor is 1 everywhere
    far_begin  1 for the first 70 keys, 0 after them: left padding
    far_end    0 for the first 70 keys, 1 after them
    far_steps  four factors by turns, up and down
    """
    row, head = np.indices(q.shape[:2])
    at = 5 * row + 3 * head
    q[:] = k[:] = 0
    q[..., -1] = np.asarray(FAR)[at % len(FAR)] * np.where(at // len(FAR) % 2, -1, 1)
    factor = {
        "far_equal": np.ones(len(positions)),
        "far_begin": positions < 70,
        "far_end": positions >= 70,
        "far_steps": np.array([-1, -0.5, 1, 0.25])[positions // 24 % 4],
    }[name]
    k[..., -1] = factor[:, None]


@functools.lru_cache(maxsize=8)
def built(case: Case, content: str) -> Batch:
    return build(case, content)


@dataclass
class Expected:
    o: np.ndarray  # [max_qo_tokens, num_qo_heads, head_dim_vo] f64
    lse: np.ndarray  # [max_qo_tokens, num_qo_heads] f64
    o_bound: np.ndarray  # [max_qo_tokens, num_qo_heads] largest error allowed in a row
    lse_bound: np.ndarray  # [max_qo_tokens, num_qo_heads]


@functools.lru_cache(maxsize=8)
def expected(case: Case, content: str) -> Expected:
    return expect(case, built(case, content))


def expect(
    case: Case,
    batch: Batch,
    variant: ja.Variant | None = None,
    operands: dict[str, np.ndarray] | None = None,
) -> Expected:
    spec = SimpleNamespace(
        variant=variant,
        causal=case.causal,
        window_left=case.window_left,
        window_right=case.window_right,
        logits_soft_cap=case.logits_soft_cap,
        sm_scale=case.sm_scale,
        head_dim_vo=case.head_dim_vo,
        dtype=case.dtype,
        kv_dtype=case.kv_dtype,
        eight_bit_products=case.eight_bit_products,
    )

    def run(*qkv):
        return reference.attention(
            *qkv,
            **batch.lengths.plan_arguments(),
            spec=spec,
            layer=batch.layer,
            sinks=batch.sinks,
            variant_operands=operands,
            **batch.scales,
        )

    def exact(x):
        return x if x is None or x.dtype == np.int8 else x.astype(np.float64)

    o, lse = run(*(exact(x) for x in (batch.q, batch.k, batch.v)))
    plain_o, _ = run(batch.q, batch.k, batch.v)
    bound = o_bound(o, plain_o, case.dtype)
    if case.eight_bit_products:
        bound = bound + weight_bound(case, batch, lse, variant, operands)
    dtype = "float32" if case.eight_bit_products else case.dtype  # of logits: all roundings
    of_lse = lse_bound(lse, dtype)
    if case.kv_dtype == "int8" and not case.eight_bit_products:
        # Kernels round a key's code times its scale to the dtype of q. Here is what that alone does
        # to lse: 2.7e-3 for one bfloat16 key. plain_o has it, too. e4m3 is exact in any dtype.
        rounded = reference.dequantize(batch.k, None, jnp.dtype(case.dtype))
        _, rounded_lse = run(exact(batch.q), exact(rounded), exact(batch.v))
        of_lse = of_lse + np.abs(
            np.subtract(rounded_lse, lse, out=np.zeros_like(lse), where=rounded_lse != lse)
        )
    return Expected(o, lse, bound, of_lse)


def weight_bound(case: Case, batch: Batch, lse: np.ndarray, *variant: Any) -> np.ndarray:
    """[max_qo_tokens, num_qo_heads] Bound on the change of o by quantizing the softmax weights.

    A quantized weight is a multiple of 1/255 of (the largest weight of a step that the row sees)
    times (the largest scale of a value there). Its error is at most half of that, and it multiplies
    a quantized value. Chunks cut steps, which can only make the largest weight smaller.
    """
    assert case.kv_dtype == "int8" and variant in ((), (None, None)), "not modelled"
    spec = ja.AttentionSpec(**case.spec_fields(), target="cpu")
    step, dim = spec.kernel_config["tile_kv"], spec.value_dim
    layer = () if batch.layer is None else (batch.layer,)
    k = reference.dequantize(batch.k[layer], None, np.float64)
    codes = np.abs(batch.v[layer][..., :dim].astype(np.float64))
    scales = np.ascontiguousarray(batch.v[layer][..., dim:]).view(np.float32)[..., 0]
    bound = np.zeros(lse.shape)
    group = case.num_qo_heads // case.num_kv_heads
    lengths = batch.lengths
    for rows, places, visible, _ in reference._requests(
        lengths.qo_indptr, lengths.kv_lens, lengths.page_indptr, lengths.page_indices,
        lengths.kv_indptr, lengths.q_offsets, case.page_size or 0, spec,
    ):  # fmt: skip
        q = reference.quantize_queries(batch.q[rows].astype(np.float64), "int8")
        for head in range(case.num_qo_heads):
            at = (*places, head // group)
            logits = spec.sm_scale * q[:, head] @ k[at].T
            if case.logits_soft_cap:
                logits = case.logits_soft_cap * np.tanh(logits / case.logits_soft_cap)
            with np.errstate(invalid="ignore"):
                weights = np.where(visible, np.exp(logits - lse[rows, head][:, None]), 0)
            for begin in range(0, visible.shape[1], step):
                part = slice(begin, begin + step)
                seen = visible[:, part]
                largest = np.where(seen, scales[at][part], 0).max(axis=1, initial=0)
                largest = largest * weights[:, part].max(axis=1, initial=0)
                bound[rows, head] += largest / 510 * (seen @ codes[at][part]).max(axis=1, initial=0)
    return 1.001 * bound


def o_bound(o: np.ndarray, plain_o: np.ndarray, dtype: str) -> np.ndarray:
    """Per row: twice the error of the plain implementation in the same dtype, plus one ulp."""
    plain_error = np.abs(plain_o.astype(np.float64) - o).max(axis=-1)
    ulp = 1e-5 if dtype == "float32" else float(jnp.finfo(dtype).eps)
    return 2 * plain_error + ulp * np.abs(o).max(axis=-1) + 1e-30


def lse_bound(lse: np.ndarray, dtype: str) -> np.ndarray:
    """1e-3 (1e-5 for f32 inputs), plus the float32 rounding of a large lse."""
    size = np.where(np.isfinite(lse), np.abs(lse), 0)
    return (1e-5 if dtype == "float32" else 1e-3) + size * 2.0**-21


def _indptr(lens) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)


# ---- the list ------------------------------------------------------------------------------------

SCHEDULES = (
    ("balanced", None),
    ("fixed_split", 128),
    ("no_split", None),
)
DTYPES = ("float32", "bfloat16", "float16")
SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}

MASKS = {
    "causal": {"causal": True},
    "full": {"causal": False},
    "left0": {"causal": True, "window_left": 0},
    "left1": {"causal": True, "window_left": 1},
    "left15": {"causal": True, "window_left": 15},
    "left16": {"causal": True, "window_left": 16},
    "left100": {"causal": True, "window_left": 100},
    "left63_full": {"causal": False, "window_left": 63},
    "right0": {"causal": False, "window_right": 0},
    "right1": {"causal": False, "window_right": 1},
    "right64": {"causal": False, "window_right": 64},
    "both": {"causal": False, "window_left": 17, "window_right": 5},
    "both_long": {"causal": False, "window_left": 128, "window_right": 65},
    "cap": {"logits_soft_cap": 2.0},
    "cap_full_window": {"causal": False, "logits_soft_cap": 30.0, "window_left": 40},
    "scale": {"sm_scale": 0.31},
    "huge_window": {"causal": False, "window_left": 2**31 - 1, "window_right": 2**31 - 1},
}


def _lengths_cases():
    # Decodes with each kv_len in 1 .. 2 * tile + 1 once (tiles are at most 128 keys).
    every = tuple(range(1, 258))
    for dtype in DTYPES:
        for schedule, split in SCHEDULES:
            yield Case(
                f"every_kv_len-{schedule}-{SHORT[dtype]}",
                qo_lens=(1,) * 257,
                kv_lens=every,
                dtype=dtype,
                schedule=schedule,
                kv_split=split,
                page_size=7,
            )
        # The same lengths as short prefills, whose rows end inside and across tiles.
        yield Case(
            f"every_kv_len_5_queries-{SHORT[dtype]}",
            qo_lens=(5,) * 131,
            kv_lens=tuple(range(1, 132)),
            dtype=dtype,
            head_dim_qk=24,
        )
    qo = (0, 1, 2, 7, 17, 37, 63, 64, 65, 127, 128, 129, 0)
    for name, extra in (("from_nothing", 0), ("after_1", 1), ("after_96", 96), ("short_kv", -5)):
        for dtype in DTYPES:
            yield Case(
                f"qo_lens_{name}-{SHORT[dtype]}",
                qo_lens=qo,
                kv_lens=tuple(max(0, n + extra) for n in qo),
                dtype=dtype,
                contents=("normal", "count", "rising", "falling"),
            )
    yield Case("prefill_577", (577,), (577,), dtype="bfloat16", head_dim_qk=128)
    yield Case("prefill_577_of_1023", (577, 1), (1023, 1023), page_size=48)
    yield Case("kv_lens", (1,) * 11, (0, 1, 15, 16, 17, 33, 96, 97, 1023, 1025, 8191))
    yield Case("kv_lens_3_queries", (3,) * 11, (0, 1, 15, 16, 17, 33, 96, 97, 1023, 1025, 2047))
    yield Case("kv_lens_full", (7,) * 8, (0, 1, 15, 16, 17, 33, 96, 1025), causal=False)
    for batch_size, qo_len in ((0, 0), (1, 1), (1, 33), (3, 1), (3, 2), (157, 1), (157, 2)):
        kv_lens = tuple((37 * r) % 211 for r in range(batch_size))
        yield Case(f"batch_{batch_size}x{qo_len}", (qo_len,) * batch_size, kv_lens)
    yield Case("no_queries", (0, 0, 0), (5, 0, 77))
    yield Case("no_keys", (3, 1, 40), (0, 0, 0), contents=("normal",))
    yield Case("no_keys_sinks", (3, 1, 40), (0, 0, 0), sinks=True, contents=("normal",))
    yield Case("zeros_everywhere", (0, 1, 0, 0, 9, 0), (0, 0, 0, 5, 30, 0))


def _shape_cases():
    for page_size in (1, 3, 5, 7, 16, 48, 64):
        for dtype in ("float32", "bfloat16"):
            yield Case(f"page_size_{page_size}-{SHORT[dtype]}", page_size=page_size, dtype=dtype)
    for group in range(1, 17):
        dtype = DTYPES[group % 3]
        yield Case(
            f"group_{group}-{SHORT[dtype]}",
            num_qo_heads=2 * group,
            num_kv_heads=2,
            head_dim_qk=32,
            dtype=dtype,
            contents=("normal", "count") if group % 3 == 0 else ("normal", "rising"),
        )
    for group in (20, 48, 71, 128):  # MQA
        yield Case(
            f"group_{group}-bf16",
            num_qo_heads=group,
            num_kv_heads=1,
            head_dim_qk=64,
            dtype="bfloat16",
            qo_lens=(1, 0, 3, 40),
            kv_lens=(133, 9, 70, 300),
            contents=("normal", "count"),
        )
    for num_kv_heads, group in ((1, 1), (1, 5), (3, 1), (5, 7), (8, 4), (16, 1)):
        yield Case(
            f"heads_{num_kv_heads}x{group}",
            num_qo_heads=num_kv_heads * group,
            num_kv_heads=num_kv_heads,
            head_dim_qk=16,
        )
    head_dims = [(d, d) for d in (8, 24, 64, 80, 96, 112, 128, 192, 256)]
    head_dims += [(192, 128), (64, 128), (128, 64), (8, 256), (256, 8), (24, 80), (72, 104)]
    for i, (d_qk, d_vo) in enumerate(head_dims):
        for dtype in ("float32", DTYPES[1 + i % 2]):
            yield Case(
                f"head_dim_{d_qk}_{d_vo}-{SHORT[dtype]}",
                head_dim_qk=d_qk,
                head_dim_vo=d_vo,
                dtype=dtype,
            )
    wide = {"qo_lens": (1, 0, 3, 40), "kv_lens": (133, 9, 70, 300)}
    for i, (d_qk, d_vo) in enumerate(((264, 264), (320, 512), (512, 512))):
        for dtype in DTYPES:
            yield Case(
                f"head_dim_{d_qk}_{d_vo}-{SHORT[dtype]}",
                **wide,
                head_dim_qk=d_qk,
                head_dim_vo=d_vo,
                dtype=dtype,
                window_left=(-1, 50, -1)[i],
                contents=("normal", "count"),
            )
    for dtype in DTYPES:
        yield Case(f"stacked-{SHORT[dtype]}", num_layers=3, dtype=dtype, page_size=5)
    yield Case("stacked_one_layer", num_layers=1)


def _prefix_cases():
    tree = ("ab", "ab", "abc", "a", "d", "", "abc", "a", "dd", "ab")
    kv_lens = (600, 577, 900, 300, 400, 33, 801, 257, 600, 512)
    # Few queues, so that sharing prefixes pays on every target.
    lengths = {"qo_lens": (1,) * 10, "kv_lens": kv_lens, "branches": tree, "num_ctas": 3}
    for dtype in DTYPES:
        yield Case(f"prefix_{SHORT[dtype]}", **lengths, dtype=dtype, head_dim_qk=128)
    yield Case("prefix_page1", **lengths, page_size=1)
    yield Case("prefix_page5", **lengths, page_size=5, num_qo_heads=7, num_kv_heads=1, sinks=True)
    yield Case("prefix_full_cap", **lengths, causal=False, logits_soft_cap=3.0)
    yield Case("prefix_window", **lengths, window_left=650, num_layers=2)
    yield Case("prefix_right", **lengths, causal=False, window_right=70, q_offsets=(500,) * 10)
    yield Case("prefix_many_queues", **(lengths | {"num_ctas": 9}), repeats=10)
    yield Case("prefix_vo", **lengths, head_dim_qk=64, head_dim_vo=128, num_qo_heads=32)
    for split in (128, 256):
        yield Case(f"prefix_fixed_split_{split}", **lengths, schedule="fixed_split", kv_split=split)
    # Speculation (several tokens a request, tiles of several requests) beside prompts.
    mixed = lengths | {"qo_lens": (4, 1, 5, 3, 40, 0, 7, 1, 150, 2), "num_ctas": 2}
    yield Case("prefix_mixed", **mixed, num_qo_heads=8)
    yield Case("prefix_mixed_bf16", **mixed, num_qo_heads=8, dtype="bfloat16")
    yield Case("prefix_many", (1,) * 70, (530,) * 70, branches=("ab",) * 40 + ("ac",) * 30)


def _mask_cases():
    contents = ("normal", "count", "peaky")
    for name, mask in MASKS.items():
        for dtype in ("float32", "bfloat16"):
            yield Case(f"mask_{name}-{SHORT[dtype]}", **mask, dtype=dtype, contents=contents)
        yield Case(f"mask_{name}-ragged", **mask, page_size=None, contents=contents)
        yield Case(f"mask_{name}-sinks", **mask, sinks=True, contents=contents)
        yield Case(
            f"mask_{name}-fixed_split",
            **mask,
            schedule="fixed_split",
            kv_split=128,
            sinks=name in ("causal", "both"),
        )
    offsets = (0, 16, -3, 0, 65, 40, 170, -2, 2000)
    for name in ("causal", "both", "left16", "right64", "left63_full"):
        yield Case(f"q_offsets_{name}", **MASKS[name], q_offsets=offsets)
        yield Case(f"q_offsets_{name}-f16", **MASKS[name], q_offsets=offsets, dtype="float16")
    # Windows that lie wholly outside the kv of some rows: these rows see nothing.
    yield Case(
        "window_outside",
        qo_lens=(4, 4, 70, 4),
        kv_lens=(20, 20, 20, 300),
        q_offsets=(-10, 18, -30, 500),
        causal=False,
        window_left=3,
        window_right=3,
        sinks=True,
    )
    for page_size, dtype, (schedule, split) in itertools.product(
        (16, None), ("float32", "bfloat16"), SCHEDULES
    ):
        where = "paged" if page_size else "ragged"
        yield Case(
            f"huge_logits_{where}_{schedule}-{SHORT[dtype]}",
            qo_lens=(1, 33, 130),
            kv_lens=(830, 60, 500),
            page_size=page_size,
            sm_scale=1.0,
            dtype=dtype,
            schedule=schedule,
            kv_split=split,
            num_ctas=7,
            contents=("huge",),
        )


def _e4m3_cases():
    """float8_e4m3fn keys, values and queries with every dtype, mask, storage and schedule."""
    kv = {"kv_dtype": E4M3, "contents": ("normal", "rising")}
    for dtype in DTYPES:
        short = SHORT[dtype]
        for q_dtype in (None, E4M3):
            queries = "_q" if q_dtype else ""
            more = kv | {"dtype": dtype, "q_dtype": q_dtype}
            yield Case(f"e4m3{queries}-{short}", **more, head_dim_qk=128, sinks=True)
            yield Case(f"e4m3{queries}_ragged-{short}", **more, page_size=None, causal=False)
        more = kv | {"dtype": dtype}
        yield Case(f"e4m3_80_112-{short}", **more, head_dim_qk=80, head_dim_vo=112, page_size=1)
        yield Case(f"e4m3_count-{short}", **more | {"contents": ("count",)}, page_size=5)
        yield Case(f"e4m3_cap-{short}", **more, logits_soft_cap=2.0, sinks=True, num_layers=2)
        yield Case(f"e4m3_split-{short}", **more, schedule="fixed_split", kv_split=128)
    more = kv | {"dtype": "bfloat16"}
    for name in ("left16", "both", "left63_full"):
        yield Case(f"e4m3_mask_{name}", **more, **MASKS[name], page_size=7)
    for page_size in (3, 64):
        yield Case(f"e4m3_page_size_{page_size}", **more, page_size=page_size)
    for group in (1, 5, 16):
        yield Case(f"e4m3_group_{group}", **more, num_qo_heads=2 * group, q_dtype=E4M3)
    for d_qk, d_vo in ((16, 32), (192, 128), (256, 256), (96, 16), (512, 512)):
        yield Case(f"e4m3_head_dim_{d_qk}_{d_vo}", **more, head_dim_qk=d_qk, head_dim_vo=d_vo)
    yield Case("e4m3_negative_scale", **more, sm_scale=-0.1)
    lens = tuple(range(1, 140))
    yield Case("e4m3_every_kv_len", (1,) * 139, lens, **more)
    branches = ("ab", "ab", "abc", "a")
    lens = (600, 577, 900, 300)
    yield Case("e4m3_prefix", (1,) * 4, lens, branches=branches, num_ctas=2, **more)
    yield Case(
        "e4m3_no_keys", (3, 1, 40), (0, 0, 0), **more | {"contents": ("normal",)}, sinks=True
    )


def _schedule_cases():
    contents = ("normal", "count", "rising", "falling")
    for schedule, split in (*SCHEDULES, ("fixed_split", 256), ("fixed_split", 384)):
        for num_ctas in (None, 1, 3, 33):
            yield Case(
                f"schedule_{schedule}_{split or ''}_ctas_{num_ctas}",
                qo_lens=(1, 1, 40, 1, 0, 2, 140),
                kv_lens=(4100, 17, 1300, 0, 64, 2047, 1500),
                num_qo_heads=5,
                num_kv_heads=1,
                schedule=schedule,
                kv_split=split,
                num_ctas=num_ctas,
                page_size=3,
                repeats=10 if num_ctas == 33 else 2,
                contents=contents if num_ctas in (None, 33) else ("count",),
            )
    for dtype in ("bfloat16", "float16"):
        yield Case(
            f"one_long_request-{SHORT[dtype]}",
            (1,),
            (8191,),
            num_qo_heads=8,
            num_kv_heads=2,
            head_dim_qk=128,
            dtype=dtype,
            repeats=10,
        )
    yield Case("one_long_request_sinks", (2,), (8191,), sinks=True, contents=contents)
    yield Case("one_long_request_window", (3,), (8191,), window_left=4000, contents=contents)
    yield Case("one_long_request_ragged", (3,), (5000,), page_size=None, contents=contents)
    yield Case(
        "long_and_many_short",
        (1,) * 40,
        (8191,) + tuple(3 * r for r in range(39)),
        num_qo_heads=7,
        num_kv_heads=1,
        head_dim_qk=80,
        dtype="bfloat16",
    )


def random_case(seed: int) -> Case:
    """A random combination of features and lengths; the list above holds the deliberate ones."""
    rng = np.random.default_rng([seed, 20251121])

    def pick(*options):
        return options[rng.integers(len(options))]

    def length(largest):
        return int(pick(0, 1, rng.integers(1, 20), rng.integers(0, largest), 64, 128, 129))

    batch_size = int(rng.integers(0, 9))
    group, num_kv_heads = int(rng.integers(1, 17)), int(pick(1, 1, 2, 3, 4))
    if group * num_kv_heads > 24:
        num_kv_heads = 1
    right = int(pick(-1, -1, 1, 33, 200))
    schedule, split = SCHEDULES[rng.integers(3)]
    page_size = pick(None, 1, 2, 7, 16, 16, 33, 128)
    return Case(
        f"seed_{seed}",
        qo_lens=tuple(length(150) for _ in range(batch_size)),
        kv_lens=tuple(length(int(pick(300, 300, 2500))) for _ in range(batch_size)),
        num_qo_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim_qk=8 * int(rng.integers(1, 17)),
        head_dim_vo=8 * int(rng.integers(1, 17)),
        dtype=pick(*DTYPES),
        causal=bool(right == -1 and rng.random() < 0.6),
        window_left=int(pick(-1, -1, 0, 5, 64, 100, 700)),
        window_right=right,
        logits_soft_cap=float(pick(0, 0, 3.0, 50.0)),
        sm_scale=pick(None, None, 0.2, -0.1),
        page_size=page_size,
        schedule=schedule,
        kv_split=split,
        num_ctas=pick(None, None, 1, 5, 40),
        num_layers=None if page_size is None else pick(None, 2),
        sinks=bool(rng.random() < 0.3),
        q_offsets=pick(None, tuple(int(x) for x in rng.integers(-20, 400, batch_size))),
        contents=(pick("normal", "count", "peaky"), pick("rising", "falling", "count")),
        branches=pick(None, tuple(pick("", "a", "ab", "aba") for _ in range(batch_size))),
        branch_tokens=int(pick(130, 256)),
    )


CASES: tuple[Case, ...] = (
    *_lengths_cases(),
    *_shape_cases(),
    *_mask_cases(),
    *_prefix_cases(),
    *_e4m3_cases(),
    *_schedule_cases(),
)
assert len({case.name for case in CASES}) == len(CASES)
