"""AttentionSpec, the static half of a batch."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from typing import Any, Literal, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn import _core, _environment
from jax_attn._spec import tuning
from jax_attn._spec.formats import DTYPES, E4M3, FLOAT8, FORMATS, FOUR_BITS, HEAD_SCALED, row_bytes
from jax_attn._spec.target import LARGEST_HEAD_DIM, TARGETS, default_target, parse_target
from jax_attn._variant.variant import Variant

# (target, kv_dtype) pairs whose kernels multiply 8-bit values.
_EIGHT_BIT_PRODUCTS = (("cpu", "int8"), ("sm_90", E4M3))
_SCHEDULES = ("balanced", "fixed_split", "no_split", "auto")  # order of Schedule
_MAX_INT32 = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """The static half of a batch: everything that selects a kernel or fixes an array's shape.

    One compiled kernel and one set of buffers serve every batch of a spec. Lengths and page tables
    are data in the plan, so new ones never recompile. Lengths are in tokens.

    Heads and dtypes
        num_qo_heads, num_kv_heads: the group size, num_qo_heads / num_kv_heads, is 1 to 128
            (docs/spec.md has the limits on CUDA).
        head_dim_qk, head_dim_vo: 1 to 512 (docs/spec.md has the limits on CUDA). Any but a multiple
            of 8 is padded with zeros inside: rows of pages have the padding, as kv_shapes says.
            head_dim_vo None: head_dim_qk.
        mla: multi-head latent attention with absorbed projections (DeepSeek-V2, arXiv 2405.04434,
            section 2.1). There is one KV head, and v is the first head_dim_vo columns of k. So the
            cache is one array, a kernel reads each of its rows once for both, and v is None
            everywhere. Up to 128 query heads, head_dim_qk up to 576, head_dim_vo up to 512. On
            CUDA: bfloat16 or float16, head_dim_qk a multiple of 16, head_dim_vo of 128.
        dtype: dtype of q, k, v and o: bfloat16, float16 or float32. Accumulation is float32.
        kv_dtype: format of k and v or of their pages (docs/formats.md): None (dtype),
            float8_e4m3fn, float8_e5m2, int8, mxfp4, nvfp4 or int4. Formats other than float8 are
            for pages only, and not with mla. append_kv takes k_new and v_new in dtype. An element
            of float8 or nvfp4 stands for its value times the k_scale or v_scale of its head; with
            mla, times k_scale, both as key and as value. Formats other than float8 also have scales
            in the pages, which append_kv computes; their pages are bytes, with the shapes of
            kv_shapes. On CUDA: a 16-bit dtype, rows padded to multiples of 16 elements, and for
            these formats pages whose sizes are multiples of 16 bytes.
        q_dtype: dtype of q: None (dtype) or, if kv_dtype is float8_e4m3fn, the same. o has dtype.
        eight_bit_products: True: q and P are rounded to 8-bit values of kv_dtype, too, and matmuls
            multiply these (docs/formats.md says how and what it costs). Needs int8 on a CPU or
            float8_e4m3fn on sm_90, and a softmax. False: quantized values are converted to dtype,
            and the formats of k and v are the only source of quantization errors.
    Logits
        sm_scale: logits = sm_scale * (q . k). None: 1 / sqrt(head_dim_qk). Required with mla: the
            model's scale for its heads before absorption.
        logits_soft_cap: c > 0: logits = c * tanh(logits / c), before the masks. 0: off.
        causal: a query token sees no later position; the same as window_right=0. Query token i of
            a request is at position kv_len - qo_len + i.
        window_left, window_right: a query token at position p sees positions
            [p - window_left, p + window_right]. -1: no limit on that side.
        variant: custom logits and masks, a jax_attn.Variant, or None. It gets the logits after the
            soft cap. The causal mask and windows apply in addition to its mask.
    Storage
        page_size: tokens per page. None: k and v are ragged arrays, not a paged cache.
        fresh_kv: attention reads the keys and values of the query tokens from k_new and v_new, and
            those of earlier tokens from the pages. It does not read what the pages hold for the
            query tokens, so append_kv may run before it, after it or never.
        num_pages: pages in the pool of one layer. The planner refuses page ids beyond it. None: the
            planner refuses only negative ids, and attention on a CPU checks the rest.
    Capacities (they fix shapes and never change the bits of a result)
        max_batch: requests. max_qo_tokens: query tokens, and exactly the rows of q and o.
        max_kv_pages: entries of page_indices (paged). max_kv_tokens: rows of k and v (ragged).
        max_items, max_partial_rows: sizes of sections of the plan and of the workspace. None:
            enough for any batch; with fixed_split, enough for any batch of decodes. If one
            overflows, the planner raises and names it.
        max_steps: capacity of step lists, for masks that save work. `plan` then takes a block_map,
            and each query tile visits only those steps of tile_kv keys that its rows see according
            to the map. (max_batch + max_qo_tokens // query tokens of the largest tile) *
            ceil(longest kv_len / tile_kv) entries hold any batch. If a batch overflows them, the
            planner says how many it needs. None: no step lists.
    Schedule
        schedule: "balanced": chunks of at most the average load of a queue (FlashInfer, arXiv
            2501.01005, Algorithm 1). If that leaves queues uneven: equal ranges (LeanAttention,
            arXiv 2405.10480), other chunks, or whole tiles, whichever is predicted to be fastest.
            "fixed_split": chunks of kv_split tokens. The bits of a request do not depend on the
            other requests of the batch.
            "no_split": keys are not split (FlashAttention-2, arXiv 2307.08691).
            "auto": tries chunks twice as long, too.
        kv_split: tokens per chunk of fixed_split, a multiple of the kernel's tile_kv. None: 1024.
        share_prefixes: the planner looks for requests whose first pages have the same ids, and
            attends to the shared keys once for all of them if it predicts a speed-up. With
            fixed_split this changes no bits. None: True for a paged cache, except with no_split,
            with max_steps, or with a variant that reads the request, position, row or lengths of a
            query, which differ between the queries of a shared prefix. With max_steps, True shares
            the leading steps that the map shows in full to every query, so the variant's mask (not
            its logits) may read these; this is not supported with fixed_split.
        typical_kv_len: keys of most requests, which may choose another kernel: on Hopper, ragged
            requests of up to 256 keys have one of their own. Results are right for any length, in
            other bits. None: unknown.
        target: "cpu", or "sm_90" and the like. None: the current jax.default_backend().
        num_ctas: queues of the plan, and the grid of the launch. None: from the device.

    Raises ValueError for an argument out of range, NotImplementedError for a legal one that no
    kernel supports.

    >>> import jax_attn as ja
    >>> spec = ja.AttentionSpec(4, 2, 64, page_size=16, max_qo_tokens=8, max_kv_pages=8)
    >>> spec.q_shape, spec.sm_scale
    ((8, 4, 64), 0.125)
    >>> ja.AttentionSpec(4, 3, 64)
    Traceback (most recent call last):
    ValueError: AttentionSpec: num_qo_heads: expected a multiple of num_kv_heads=3, got 4.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int | None = None
    mla: bool = False
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    q_dtype: str | None = None
    eight_bit_products: bool = False
    causal: bool = True
    window_left: int = -1
    window_right: int = -1
    logits_soft_cap: float = 0.0
    sm_scale: float | None = None
    variant: Variant | None = None
    page_size: int | None = 16
    fresh_kv: bool = False
    num_pages: int | None = None
    max_batch: int = 256
    max_qo_tokens: int = 4096
    max_kv_pages: int | None = None
    max_kv_tokens: int | None = None
    max_items: int | None = None
    max_partial_rows: int | None = None
    max_steps: int | None = None
    schedule: Literal["balanced", "fixed_split", "no_split", "auto"] = "balanced"
    kv_split: int | None = None
    share_prefixes: bool | None = None
    typical_kv_len: int | None = None
    target: str | None = None
    num_ctas: int | None = None

    def __post_init__(self) -> None:
        def settle(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        for field in dataclasses.fields(self):
            if isinstance(value := getattr(self, field.name), np.generic):
                settle(field.name, value.item())  # specs are hashed, and written to files
        settle("dtype", _dtype_name(self.dtype))
        for name in ("kv_dtype", "q_dtype"):
            settle(name, self._operand_dtype(name))  # None is the only form of "same as dtype"
        if self.q_dtype == E4M3 != self.kv_dtype:
            _refuse("q_dtype", f"None unless kv_dtype={E4M3!r}", self.q_dtype)
        for name in ("mla", "causal", "fresh_kv", "eight_bit_products"):
            if not isinstance(getattr(self, name), bool):
                _refuse(name, "True or False", getattr(self, name))
        for name in ("num_qo_heads", "num_kv_heads", "max_batch", "max_qo_tokens"):
            _require_int(name, getattr(self, name), 1)
        if self.num_qo_heads % self.num_kv_heads:
            _refuse(
                "num_qo_heads", f"a multiple of num_kv_heads={self.num_kv_heads}", self.num_qo_heads
            )
        if self.head_dim_vo is None:
            settle("head_dim_vo", self.head_dim_qk)
        for name in ("head_dim_qk", "head_dim_vo"):
            _require_int(name, getattr(self, name), 1)
        for name in ("window_left", "window_right"):
            _require_int(name, getattr(self, name), -1)
        if self.causal and self.window_right > 0:
            _refuse("window_right", "-1 or 0 with causal=True", self.window_right)
        if self.window_right == 0:
            settle("causal", True)
        settle("logits_soft_cap", _finite("logits_soft_cap", self.logits_soft_cap))
        if self.logits_soft_cap < 0:
            _refuse("logits_soft_cap", "a finite number >= 0; 0 is none", self.logits_soft_cap)
        if self.sm_scale is None and self.mla:
            _refuse("sm_scale", "the model's scale with mla=True, such as (128 + 64) ** -0.5", None)
        if self.sm_scale is None:
            settle("sm_scale", float(self.head_dim_qk) ** -0.5)
        settle("sm_scale", _finite("sm_scale", self.sm_scale))
        if not isinstance(self.variant, (Variant, type(None))):
            _refuse("variant", "a jax_attn.Variant or None", self.variant)
        self._settle_storage(settle)
        settle("target", default_target() if self.target is None else self.target)
        if not isinstance(self.target, str):
            _refuse("target", TARGETS, self.target)
        parse_target(self.target)  # raises for an unknown target
        self._check_head_dims()
        if self.variant is not None and self.variant.transforms:
            self._check_transforms(self.variant)
        self._check_group()
        if self.mla:
            self._check_mla()
        if self.is_quantized:
            self._check_quantized()
        if self.eight_bit_products:
            self._check_eight_bit_products()
        self._settle_schedule(settle)

    def _check_head_dims(self) -> None:
        largest, where, multiple = LARGEST_HEAD_DIM, "", 8 if self.mla else 1
        if self.mla:
            where = " with mla=True"
        elif self.target != "cpu":
            largest, where = _core.largest_cuda_head_dim(self._shape_for_core), " on CUDA"
            if largest < LARGEST_HEAD_DIM:
                fields = ("kv_dtype", "q_dtype", "fresh_kv", "eight_bit_products")
                given = [f"{name}={x!r}" for name in fields if (x := getattr(self, name))]
                where += f" with {', '.join(given)}"
        for name, limit in (
            ("head_dim_qk", 576 if self.mla else largest),
            ("head_dim_vo", largest),
        ):
            head_dim = getattr(self, name)
            if head_dim % multiple or head_dim > limit:
                multiples = "multiples of 8 " if self.mla else ""
                raise NotImplementedError(
                    f"AttentionSpec: {name}: {multiples}up to {limit} are supported{where}, got"
                    f" {head_dim}."
                )

    def _check_group(self) -> None:
        largest, where = 128, ""
        if self.target != "cpu" and not self.mla:
            largest = _core.largest_cuda_group(self._shape_for_core)
            if largest < 128:
                where = f" with dtype={self.dtype!r}, these head dims and target={self.target!r}"
        if self.group_size > largest:
            raise NotImplementedError(
                f"AttentionSpec: num_qo_heads / num_kv_heads: 1 to {largest} are supported{where},"
                f" got {self.group_size}."
            )

    def _check_mla(self) -> None:
        if self.num_kv_heads != 1:
            _refuse("num_kv_heads", "1 with mla=True, the latent head", self.num_kv_heads)
        if self.value_dim > self.head_dim_qk:
            _refuse(
                "head_dim_vo",
                f"at most head_dim_qk={self.head_dim_qk} with mla=True, which takes v from k",
                self.value_dim,
            )
        if self.target == "cpu":
            return
        if self.dtype == "float32":
            raise NotImplementedError(
                "AttentionSpec: dtype: with mla=True bfloat16 and float16 are supported on CUDA,"
                " got float32."
            )
        for name, multiple in (("head_dim_qk", 16), ("head_dim_vo", 128)):
            if getattr(self, name) % multiple:
                raise NotImplementedError(
                    f"AttentionSpec: {name}: with mla=True multiples of {multiple} are supported on"
                    f" CUDA, got {getattr(self, name)}."
                )

    def _operand_dtype(self, name: str) -> str | None:
        given = getattr(self, name)
        formats = FORMATS[1:] if name == "kv_dtype" else (E4M3,)
        if isinstance(given, str) and given in formats:
            return given
        dtype = self.dtype if given is None else _plain_name(given)
        if dtype not in (self.dtype, *formats):
            raise NotImplementedError(
                f"AttentionSpec: {name}: {self.dtype}, as dtype, and {', '.join(formats)} are"
                f" supported, got {dtype}."
            )
        return None if dtype == self.dtype else dtype

    def _check_quantized(self) -> None:
        if self.mla and self.kv_dtype not in FLOAT8:
            raise NotImplementedError(
                f"AttentionSpec: kv_dtype: with mla=True {self.dtype}, as dtype,"
                f" {' and '.join(FLOAT8)} are supported, got {self.kv_dtype}, whose rows have"
                " scales of their own, which v would have to share."
            )
        if self.mla and self.q_dtype is not None:
            raise NotImplementedError(
                "AttentionSpec: q_dtype: with mla=True None is supported, got"
                f" {self.q_dtype}; leave q in {self.dtype}."
            )
        if self.page_size is None and self.kv_dtype not in FLOAT8:
            raise NotImplementedError(
                f"AttentionSpec: kv_dtype: with page_size=None {self.dtype}, as dtype,"
                f" {' and '.join(FLOAT8)} are supported, got {self.kv_dtype}, whose rows"
                " append_kv makes."
            )
        if self.fresh_kv and self.q_dtype is not None:
            raise NotImplementedError(
                "AttentionSpec: fresh_kv: with kv_dtype supported with q_dtype=None, got True with"
                f" q_dtype={self.q_dtype!r}; append the new tokens first."
            )
        if self.fresh_kv and self.eight_bit_products and self.target != "cpu":
            raise NotImplementedError(
                "AttentionSpec: fresh_kv: with eight_bit_products supported on a CPU, got True on"
                f" {self.target}; append the new tokens first."
            )
        if self.target == "cpu":
            return
        if self.dtype == "float32":
            raise NotImplementedError(
                f"AttentionSpec: dtype: with kv_dtype={self.kv_dtype!r} bfloat16 and float16 are"
                " supported on CUDA, got float32."
            )
        # Kernels copy vectors of 16 bytes, which may cross rows but not pages.
        for shape in self.kv_shapes(self.page_size or 1):
            if self.kv_dtype not in FLOAT8 and shape is not None and math.prod(shape) % 16:
                raise NotImplementedError(
                    f"AttentionSpec: page_size: with kv_dtype={self.kv_dtype!r} pages of a multiple"
                    f" of 16 bytes are supported on CUDA, got {math.prod(shape)} bytes with"
                    f" page_size={self.page_size}; page_size=16 does with any heads."
                )

    def _check_eight_bit_products(self) -> None:
        if (self.target, self.kv_dtype) not in _EIGHT_BIT_PRODUCTS:
            raise NotImplementedError(
                "AttentionSpec: eight_bit_products: supported with kv_dtype='int8' on a CPU and"
                f" with kv_dtype={E4M3!r} on sm_90, got True with kv_dtype={self.kv_dtype!r} on"
                f" {self.target}; leave it False, which multiplies in dtype."
            )
        if self.mla:
            raise NotImplementedError(
                "AttentionSpec: eight_bit_products: supported with mla=False, got True with"
                " mla=True; leave it False, which multiplies in dtype."
            )
        if self.target == "sm_90" and self.value_dim > 192:
            raise NotImplementedError(
                "AttentionSpec: eight_bit_products: supported with a head_dim_vo up to 192 on"
                f" sm_90, got True with {self.head_dim_vo}; leave it False, which multiplies in"
                " dtype."
            )
        if self.variant is not None and not self.variant.normalizes:
            raise NotImplementedError(
                "AttentionSpec: eight_bit_products: supported with a variant with softmax, got True"
                " with normalize='none'; leave it False, which multiplies in dtype."
            )

    def _check_transforms(self, variant: Variant) -> None:
        dims = {"q": self.head_dim_qk, "k": self.head_dim_qk}
        dims |= {"v": self.value_dim, "o": self.value_dim}
        for name, transform in variant.transforms.items():
            if transform.dim != dims[name]:
                _refuse(
                    "variant",
                    f"{name} of {dims[name]} elements, the spec's head_dim; give Variant head_dim",
                    transform.dim,
                )
        if self.padded is not self:
            raise NotImplementedError(
                "AttentionSpec: variant: transforms of head dims that need no padding, such as"
                f" multiples of 8, are supported, got {self.head_dim_qk} and {self.value_dim}."
            )
        of_rows = [name for name in ("k", "v") if name in variant.transforms]
        if of_rows and self.mla:
            raise NotImplementedError(
                f"AttentionSpec: variant: {of_rows[0]} is supported with mla=False, got True; the"
                " latent is both key and value: transform q and o."
            )
        if of_rows and self.kv_dtype is not None:
            raise NotImplementedError(
                f"AttentionSpec: variant: {of_rows[0]} is supported with kv_dtype=None, got"
                f" {self.kv_dtype!r}; quantize transformed keys and values."
            )
        on_cuda = parse_target(self.target)[0] > 0
        if (
            of_rows
            and self.is_paged
            and on_cuda
            and (self.dtype == "float32" or max(dims.values()) > 256)
        ):
            raise NotImplementedError(
                f"AttentionSpec: variant: {of_rows[0]} of pages on {self.target} is supported with"
                f" bfloat16 or float16 and head dims up to 256, got {self.dtype} and"
                f" {max(dims.values())}."
            )
        if "q" in variant.transforms and self.q_dtype is not None:
            raise NotImplementedError(
                f"AttentionSpec: variant: q is supported with q_dtype=None, got {self.q_dtype!r};"
                " transform q before you quantize it."
            )

    def _settle_storage(self, settle: Any) -> None:
        """Require exactly the capacities of the storage: pages or tokens."""
        if self.fresh_kv and self.page_size is None:
            _refuse("fresh_kv", "False with page_size=None; append the new tokens to k and v", True)
        if self.fresh_kv and self.mla:
            raise NotImplementedError(
                "AttentionSpec: fresh_kv: supported with mla=False, got True with mla=True; append"
                " the new tokens to the cache before attention."
            )
        if self.page_size is None:
            if self.max_kv_tokens is None:
                _refuse("max_kv_tokens", "the rows of k and v with page_size=None", None)
            for name in ("max_kv_pages", "num_pages"):
                if getattr(self, name) is not None:
                    _refuse(name, "None with page_size=None", getattr(self, name))
            _require_int("max_kv_tokens", self.max_kv_tokens, 0)
            return
        _require_int("page_size", self.page_size, 1)
        if self.max_kv_tokens is not None:
            _refuse(
                "max_kv_tokens", "None for a paged cache; give max_kv_pages", self.max_kv_tokens
            )
        if self.max_kv_pages is None:
            _refuse("max_kv_pages", "the capacity of page_indices, in pages", None)
        _require_int("max_kv_pages", self.max_kv_pages, 0)
        if self.num_pages is not None:
            _require_int("num_pages", self.num_pages, 0)

    def _settle_schedule(self, settle: Any) -> None:
        if not isinstance(self.schedule, str) or self.schedule not in _SCHEDULES:
            _refuse("schedule", " or ".join(_SCHEDULES), self.schedule)
        has_lists = self.max_steps is not None
        can_share = self.is_paged and self.schedule != "no_split"
        if has_lists and self.share_prefixes is True:
            if self.schedule == "fixed_split":
                raise NotImplementedError(
                    "AttentionSpec: share_prefixes: with max_steps, True is supported with"
                    " schedule='balanced' or 'auto', got 'fixed_split'."
                )
        elif has_lists:
            can_share = False  # unless requested
        variant = self.variant
        if variant is not None and (
            variant.logits_need_own_rows if has_lists else variant.needs_own_rows
        ):
            if self.share_prefixes is True:
                raise NotImplementedError(
                    "AttentionSpec: share_prefixes: with a variant that asks for the request, the"
                    " position, the row or the lengths of a query, None and False are supported,"
                    " got True. With max_steps, its mask may ask for them."
                )
            can_share = False
        if not isinstance(self.share_prefixes, (bool, type(None))):
            _refuse("share_prefixes", "True, False or None", self.share_prefixes)
        if self.share_prefixes and not can_share:
            _refuse("share_prefixes", "False or None without pages or with no_split", True)
        settle("share_prefixes", can_share if self.share_prefixes is None else self.share_prefixes)
        for name in ("num_ctas", "max_items", "max_partial_rows", "max_steps", "typical_kv_len"):
            if getattr(self, name) is not None:
                _require_int(name, getattr(self, name), 1)
        if self.schedule == "fixed_split":
            settle("kv_split", 1024 if self.kv_split is None else self.kv_split)
            _require_int("kv_split", self.kv_split, 1)
            tile_kv = self.kernel_config["tile_kv"]
            if self.kv_split is not None and self.kv_split % tile_kv:
                _refuse("kv_split", f"a multiple of the kernel's tile_kv={tile_kv}", self.kv_split)
        elif self.kv_split is not None:
            _refuse("kv_split", "None unless schedule='fixed_split'", self.kv_split)

    def __getstate__(self) -> dict[str, Any]:
        """State for copies and pickles: the fields, without cached properties."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def to_fields(self) -> dict[str, Any]:
        """The fields as JSON values, for files."""
        variant = self.variant and self.variant.to_fields()
        return {**self.__getstate__(), "variant": variant}

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> AttentionSpec:
        """The spec of to_fields' result, which may be untrusted. Raises like AttentionSpec."""
        variant = fields.get("variant")
        if variant is None:
            return cls(**fields)
        known = {"words", "names"}
        if not isinstance(variant, dict) or not known <= set(variant) <= known | {"transforms"}:
            _refuse("variant", "words and names", variant)
        return cls(**{**fields, "variant": Variant.from_words(**variant)})

    @property
    def group_size(self) -> int:
        """Number of query heads per KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @functools.cached_property
    def heads_per_item(self) -> int:
        """Query heads per work item: group_size; with mla a block of heads (csrc/select)."""
        return -(-self.num_qo_heads // self.problem.spec["num_kv_heads"])

    @property
    def dtype_of_q(self) -> str:
        """The name of the dtype of q."""
        return self.q_dtype or self.dtype

    @property
    def dtype_of_kv(self) -> str:
        """The name of the dtype of k and v, or of their pages: uint8 for 4-bit formats."""
        return "uint8" if self.kv_dtype in FOUR_BITS else self.kv_dtype or self.dtype

    @property
    def is_quantized(self) -> bool:
        """Whether k and v are quantized to kv_dtype."""
        return self.kv_dtype is not None

    @property
    def has_head_scales(self) -> bool:
        """Whether k and v have a k_scale and v_scale per head: float8 and nvfp4."""
        return self.kv_dtype in HEAD_SCALED

    @property
    def is_paged(self) -> bool:
        """Whether k and v are a paged cache; otherwise they are ragged arrays."""
        return self.page_size is not None

    @property
    def value_dim(self) -> int:
        """head_dim_vo as an int: __post_init__ replaces None."""
        assert self.head_dim_vo is not None
        return self.head_dim_vo

    @functools.cached_property
    def padded_dims(self) -> tuple[int, int]:
        """head_dim_qk and head_dim_vo, rounded up to what kernels and rows of pages have."""
        multiple = 16 if self.is_quantized and self.target != "cpu" else 8
        if self.mla:
            multiple = 1  # checked
        qk, vo = (-(-dim // multiple) * multiple for dim in (self.head_dim_qk, self.value_dim))
        return qk, vo

    @functools.cached_property
    def padded(self) -> AttentionSpec:
        """The spec whose head dims are padded_dims. Plans of the two are the same."""
        dims = self.padded_dims
        if dims == (self.head_dim_qk, self.value_dim):
            return self
        return dataclasses.replace(self, head_dim_qk=dims[0], head_dim_vo=dims[1])

    @functools.cached_property
    def kernel_spec(self) -> AttentionSpec:
        """The spec with what kernels run of its variant. Plans of the two are the same.

        The transforms of q and o run outside, in jnp. So do those of ragged k and v, once a row.
        """
        if self.variant is None:
            return self
        variant = self.variant.with_transforms(("k", "v") if self.is_paged else ())
        if variant is self.variant:
            return self
        return dataclasses.replace(self, variant=variant)

    @property
    def has_backward_kernel(self) -> bool:
        """Whether kernels compute gradients. Else jnp does: with transforms of pages, and with head
        dims beyond 256 on GPUs whose multiprocessors have less than 164 KB of shared memory."""
        if self.kernel_spec.variant is not None and self.kernel_spec.variant.transforms:
            return False
        if self.target == "cpu":
            return True
        largest = _core.largest_cuda_backward_head_dim(parse_target(self.target)[0])
        return max(self.padded_dims) <= largest

    @property
    def q_shape(self) -> tuple[int, int, int]:
        """The shape of q: [max_qo_tokens, num_qo_heads, head_dim_qk]."""
        return self.max_qo_tokens, self.num_qo_heads, self.head_dim_qk

    @property
    def o_shape(self) -> tuple[int, int, int]:
        """The shape of o: [max_qo_tokens, num_qo_heads, head_dim_vo]."""
        return self.max_qo_tokens, self.num_qo_heads, self.value_dim

    def kv_shapes(self, *lead: int) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """The shapes of k, [*lead, num_kv_heads, head_dim_qk], and v; None for v with mla.

        Rows of pages are padded to a multiple of 8 elements, of 16 with a kv_dtype on CUDA.
        A row of int8 has head_dim + 4 bytes in place of head_dim. A row of mxfp4, nvfp4 or int4 has
        head_dim / 2 bytes, plus 1 for every 32 elements, 1 for every 16, or 2 for every 32.

        lead: (max_kv_tokens,) for ragged arrays, (num_pages, page_size) for pages.
        """
        rows = (*lead, self.num_kv_heads)
        qk, vo = self.padded_dims if self.is_paged else (self.head_dim_qk, self.value_dim)
        k = (*rows, row_bytes(self.kv_dtype, qk))
        return k, None if self.mla else (*rows, row_bytes(self.kv_dtype, vo))

    def empty_pages(
        self, num_pages: int, num_layers: int | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns k_pages and v_pages, zeros; None for v_pages with mla. For a paged cache.

        Shapes are those of kv_shapes(num_pages, page_size), after [num_layers] if given.
        """
        if self.page_size is None:
            _refuse("page_size", "the tokens of a page for empty_pages", None)
        lead = (num_pages, self.page_size)
        k_shape, v_shape = self.kv_shapes(*(lead if num_layers is None else (num_layers, *lead)))
        dtype = self.dtype_of_kv
        return jnp.zeros(k_shape, dtype), None if v_shape is None else jnp.zeros(v_shape, dtype)

    @property
    def new_kv_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """The shapes of k_new, [max_qo_tokens, num_kv_heads, head_dim_qk], and v_new or None."""
        rows = (self.max_qo_tokens, self.num_kv_heads)
        return (*rows, self.head_dim_qk), None if self.mla else (*rows, self.value_dim)

    @property
    def _shape_for_core(self) -> dict[str, Any]:
        """The fields of the spec in C++ that say what a kernel must have room for."""
        return {
            "num_qo_heads": self.num_qo_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim_qk": self.padded_dims[0],
            "head_dim_vo": self.padded_dims[1],
            "mla": int(self.mla),
            "dtype": DTYPES.index(self.dtype),
            "q_format": FORMATS.index(self.q_dtype),
            "kv_format": FORMATS.index(self.kv_dtype),
            "fresh_kv": int(self.fresh_kv),
            "eight_bit_products": int(self.eight_bit_products),
            "arch": parse_target(self.target)[0],
        }

    @functools.cached_property
    def problem(self) -> _core.Problem:
        """The spec in C++, with the kernel configuration that csrc/select chose."""
        overrides = {
            name: getattr(self, name)
            for name in ("num_ctas", "max_items", "max_partial_rows")
            if getattr(self, name) is not None
        }
        arch, num_processors = parse_target(self.target)
        spec = self._shape_for_core | {
            "window_left": self.window_left,
            "window_right": 0 if self.causal else self.window_right,
            "logits_soft_cap": self.logits_soft_cap,
            "sm_scale": self.sm_scale,
            "page_size": self.page_size or 0,
            "max_batch": self.max_batch,
            "max_qo_tokens": self.max_qo_tokens,
            "max_kv_pages": self.max_kv_pages or 0,
            "max_kv_tokens": self.max_kv_tokens or 0,
            "num_pages": -1 if self.num_pages is None else self.num_pages,
            "schedule": _SCHEDULES.index(self.schedule),
            "kv_split": self.kv_split or 0,
            "share_prefixes": int(bool(self.share_prefixes)),
            "max_steps": self.max_steps or 0,
            "typical_kv_len": self.typical_kv_len or 0,
            "num_processors": num_processors,
        }
        problem = _core.Problem(spec, overrides, self.program_words, self.transform_words)
        if arch:
            tuning.refuse_foreign_gpu(arch)
        if arch and not self.eight_bit_products:  # these have no fallback loop
            _tell_fallback(arch, FORMATS.index(self.q_dtype))
        if _environment.print_config:
            print(_explain(self, problem))
        return problem

    @property
    def program_words(self) -> list[int]:
        """The words of the variant's program as kernels run it; empty without one."""
        variant = self.kernel_spec.variant
        return [] if variant is None else list(variant.words)

    @property
    def transform_words(self) -> list[list[int]]:
        """The words of the transforms of k and v that kernels run."""
        variant = self.kernel_spec.variant
        found = {} if variant is None else variant.transforms
        return [list(found[name].words) if name in found else [] for name in ("k", "v")]

    @functools.cached_property
    def problem_words(self) -> np.ndarray:
        """The FFI attribute with spec and configuration: int64 words."""
        return np.asarray(self.problem.words, np.int64)

    @functools.cached_property
    def kernel_config(self) -> dict[str, int]:
        """Tiles, queues, costs and capacities of the chosen kernel (KernelConfig, csrc/spec.h)."""
        return self.problem.config

    @functools.cached_property
    def layout(self) -> dict[str, int]:
        """Where each section of the plan buffer begins, in int32 words."""
        return self.problem.layout

    @property
    def plan_words(self) -> int:
        """Size of a plan buffer, in int32 words."""
        return self.layout["num_words"]

    @functools.cached_property
    def workspace_words(self) -> int:
        """Size of the workspace of one attention call, in words of 4 bytes."""
        return self.problem.workspace_words


@functools.cache
def _tell_fallback(arch: int, q_format: int) -> None:
    """Warn once per architecture that its main loop is a fallback, made for another one."""
    if sentence := _core.describe_fallback(arch, q_format):
        logging.getLogger("jax_attn").warning("jax_attn: %s", sentence)


def _explain(spec: AttentionSpec, problem: _core.Problem) -> str:
    """The kernel configuration that csrc/select chose: each field with its reason."""
    chosen = problem.config

    def value(field: str) -> str:
        tiles = range(chosen["num_tiles"])
        if f"{field}_0" in chosen:
            return " ".join(str(chosen[f"{field}_{i}"]) for i in tiles)
        return str(chosen.get(field, ""))

    reasons = problem.reasons
    lines = [f"  {what:<14} {value(what):<12} {why}" for what, why in reasons]
    told = {what for what, _ in reasons} | {f"{what}_{i}" for what, _ in reasons for i in range(3)}
    rest = " ".join(f"{field}={value}" for field, value in chosen.items() if field not in told)
    if spec.variant is not None:
        lines += ["  variant", *(f"    {line}" for line in spec.variant.lines())]
    return "\n".join([f"jax_attn: {spec}", *lines, f"  and {rest}"])


def dtype_code(dtype: Any, argument: str = "AttentionSpec: dtype") -> int:
    """The number of a dtype in csrc/spec.h (DType).

    Raises NotImplementedError, which names `argument`, for a dtype that no kernel supports.
    """
    return DTYPES.index(_dtype_name(dtype, argument))


def _dtype_name(dtype: Any, argument: str = "AttentionSpec: dtype") -> str:
    name = _plain_name(dtype)
    if name not in DTYPES:
        raise NotImplementedError(
            f"{argument}: {', '.join(DTYPES)} are supported, got {name}"
            + (f"; {name} is for kv_dtype and q_dtype." if name == E4M3 else ".")
        )
    return name


def _plain_name(dtype: Any) -> str:
    """The name of a dtype in any form; the repr of anything else."""
    try:
        return "None" if dtype is None else jax.numpy.dtype(dtype).name
    except TypeError:
        return repr(dtype)


def _finite(name: str, value: Any) -> float:
    if isinstance(value, jax.core.Tracer):
        _refuse(name, "a number known while tracing, for it selects the kernel", value)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(value, (np.ndarray, jax.Array)) and value.shape == ():
        is_number, value = value.dtype.kind in "fiu", value.item()
    if not is_number or not np.isfinite(value):
        _refuse(name, "a finite number", value)
    return float(value)


def _require_int(name: str, value: Any, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        _refuse(name, "an integer", value)
    if not minimum <= value <= _MAX_INT32:
        _refuse(name, f"an integer in [{minimum}, 2^31)", value)


def _refuse(name: str, expected: str, got: Any) -> NoReturn:
    raise ValueError(f"AttentionSpec: {name}: expected {expected}, got {got!r}.")
