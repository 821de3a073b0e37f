"""Bad input is refused before anything runs, in one sentence: op, argument, expected, got.

Each table row has a call, the exact exception type, and words that the sentence must hold.
"""

import copy
import dataclasses
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_attn as ja
from helpers.backends import on_every_platform
from jax_attn import _environment

FIELDS = {
    "num_qo_heads": 4,
    "num_kv_heads": 2,
    "head_dim_qk": 64,
    "dtype": "float32",
    "page_size": 16,
    "max_batch": 3,
    "max_qo_tokens": 8,
    "max_kv_pages": 10,
    "target": "cpu",
}
E4M3 = "float8_e4m3fn"
_CUDA = {"kv_dtype": E4M3, "dtype": "bfloat16", "target": "sm_90"}
RAGGED = {"page_size": None, "max_kv_pages": None, "max_kv_tokens": 30}


def check(call, exception, *words):
    with pytest.raises(Exception) as caught:
        call()
    assert type(caught.value) is exception, repr(caught.value)
    message = str(caught.value)
    for word in words:
        assert word in message, f"{word!r} is not in: {message}"


def table(*rows):
    return pytest.mark.parametrize("row", [pytest.param(row[1:], id=row[0]) for row in rows])


# ---- AttentionSpec -------------------------------------------------------------------------------

_EG = ("expected", "got")


@table(
    ("heads_ratio", {"num_qo_heads": 5}, ValueError, "num_qo_heads", "num_kv_heads", *_EG, "5"),
    ("no_heads", {"num_qo_heads": 0}, ValueError, "num_qo_heads", *_EG),
    ("negative_kv_heads", {"num_kv_heads": -2}, ValueError, "num_kv_heads", *_EG),
    ("group", {"num_qo_heads": 258}, NotImplementedError, "num_qo_heads", "128", "129"),
    (
        "group_cuda",
        {"num_qo_heads": 130, "head_dim_qk": 256, "dtype": "bfloat16", "target": "sm_89:142"},
        *(NotImplementedError, "num_qo_heads", "1 to 64", "bfloat16", "sm_89:142", "65"),
    ),
    ("head_dim", {"head_dim_qk": 513}, NotImplementedError, "head_dim_qk", "512", "513"),
    ("head_dim_mla", {"head_dim_qk": 576, "head_dim_vo": 512}, NotImplementedError, "576", "512"),
    ("head_dim_vo", {"head_dim_vo": 520}, NotImplementedError, "head_dim_vo", "512", "520"),
    (
        "head_dim_cuda",
        {
            **{"head_dim_qk": 264, "dtype": "bfloat16", "target": "sm_90a:132"},
            **{"kv_dtype": "int8", "page_size": 16, "max_kv_pages": 4, "max_kv_tokens": None},
        },
        *(NotImplementedError, "head_dim_qk", "256 are supported on CUDA with kv_dtype='int8'"),
    ),
    (
        "head_dim_cuda_q",
        {
            "head_dim_vo": 264,
            "q_dtype": E4M3,
            "kv_dtype": E4M3,
            "dtype": "float16",
            "target": "sm_80",
        },
        *(NotImplementedError, "head_dim_vo", "256 are supported on CUDA", "q_dtype=", "264"),
    ),
    ("head_dim_0", {"head_dim_qk": 0}, ValueError, "head_dim_qk", *_EG),
    ("head_dim_float", {"head_dim_qk": 64.0}, ValueError, "head_dim_qk", "integer", "64.0"),
    ("f64", {"dtype": "float64"}, NotImplementedError, "dtype", "bfloat16", "float64"),
    ("int8", {"dtype": "int8"}, NotImplementedError, "dtype", "bfloat16", "int8"),
    ("no_dtype", {"dtype": None}, NotImplementedError, "dtype", "bfloat16", "got None"),
    ("dtype_name", {"dtype": "bf16"}, NotImplementedError, "dtype", "bfloat16", "'bf16'"),
    ("kv_dtype_name", {"kv_dtype": "fp8"}, NotImplementedError, "kv_dtype", E4M3, "'fp8'"),
    ("causal", {"causal": None}, ValueError, "causal", "True or False", *_EG, "None"),
    ("mla", {"mla": "no"}, ValueError, "mla", "True or False", *_EG, "'no'"),
    ("window_left", {"window_left": -2}, ValueError, "window_left", *_EG, "-2"),
    ("window_right", {"window_right": 3}, ValueError, "window_right", "causal", *_EG, "3"),
    ("cap", {"logits_soft_cap": -1.0}, ValueError, "logits_soft_cap", *_EG),
    ("cap_nan", {"logits_soft_cap": float("nan")}, ValueError, "logits_soft_cap", *_EG),
    ("no_cap", {"logits_soft_cap": None}, ValueError, "logits_soft_cap", *_EG, "None"),
    ("scale", {"sm_scale": float("inf")}, ValueError, "sm_scale", *_EG),
    ("scale_nan", {"sm_scale": np.float32("nan")}, ValueError, "sm_scale", *_EG, "nan"),
    ("scale_name", {"sm_scale": "auto"}, ValueError, "sm_scale", *_EG, "'auto'"),
    ("scales", {"sm_scale": np.ones(2)}, ValueError, "sm_scale", *_EG),
    ("page_size", {"page_size": 0}, ValueError, "page_size", *_EG, "0"),
    ("page_size_bool", {"page_size": True}, ValueError, "page_size", *_EG),
    ("no_pages", {"max_kv_pages": None}, ValueError, "max_kv_pages", *_EG),
    ("tokens_of_pages", {"max_kv_tokens": 5}, ValueError, "max_kv_tokens", "max_kv_pages"),
    ("no_tokens", RAGGED | {"max_kv_tokens": None}, ValueError, "max_kv_tokens", *_EG),
    ("pages_of_ragged", RAGGED | {"max_kv_pages": 4}, ValueError, "max_kv_pages", *_EG),
    ("batch", {"max_batch": 0}, ValueError, "max_batch", *_EG),
    ("too_large", {"max_qo_tokens": 2**31}, ValueError, "max_qo_tokens", *_EG),
    ("num_pages", {"num_pages": -1}, ValueError, "num_pages", *_EG),
    ("schedule", {"schedule": "best"}, ValueError, "schedule", "balanced", "'best'"),
    ("split", {"kv_split": 128}, ValueError, "kv_split", "fixed_split", "128"),
    ("split_0", {"schedule": "fixed_split", "kv_split": 0}, ValueError, "kv_split", *_EG),
    ("split_odd", {"schedule": "fixed_split", "kv_split": 100}, ValueError, "kv_split", "tile_kv"),
    ("target", {"target": "tpu"}, ValueError, "target", "cpu", "sm_90", "tpu"),
    ("target_int", {"target": 90}, ValueError, "target", "sm_90", "90"),
    ("old_gpu", {"target": "sm_70"}, NotImplementedError, "target", "sm_80", "sm_70"),
    ("ctas", {"num_ctas": 0}, ValueError, "num_ctas", *_EG),
    ("target_list", {"target": ["cpu"]}, ValueError, "target", "sm_90", *_EG, "['cpu']"),
    ("target_digits", {"target": "sm_²"}, ValueError, "target", "sm_90", *_EG, "sm_²"),
    ("target_count", {"target": "sm_90:" + "9" * 5000}, ValueError, "target", "sm_90:132", *_EG),
    ("schedules", {"schedule": np.array(["a", "b"])}, ValueError, "schedule", *_EG),
    ("share_1", {"share_prefixes": 1}, ValueError, "share_prefixes", "True, False or None", *_EG),
    ("shares", {"share_prefixes": np.ones(2)}, ValueError, "share_prefixes", *_EG),
    ("fnuz", {"kv_dtype": "float8_e4m3fnuz"}, NotImplementedError, "kv_dtype", "fnuz", "got"),
    ("kv_f16", {"kv_dtype": "float16"}, NotImplementedError, "kv_dtype", "float32", "float16"),
    (
        "q_of_16_bits",
        {"q_dtype": "bfloat16"},
        NotImplementedError,
        "q_dtype",
        "float32",
        "bfloat16",
    ),
    ("only_q", {"q_dtype": E4M3}, ValueError, "q_dtype", "kv_dtype", *_EG),
    ("e4m3_dtype", {"dtype": E4M3}, NotImplementedError, "dtype", "bfloat16", E4M3, "kv_dtype"),
    (
        "int8_mla",
        {"kv_dtype": "int8", "mla": True, "num_kv_heads": 1, "sm_scale": 0.1},
        *(NotImplementedError, "kv_dtype", "mla", "int8"),
    ),
    ("e4m3_f32", _CUDA | {"dtype": "float32"}, NotImplementedError, "dtype", E4M3, "float32"),
)
def test_spec(row):
    changed, exception, *words = row
    check(lambda: ja.AttentionSpec(**(FIELDS | changed)), exception, "AttentionSpec", *words)


_MOST = 2**31 - 1


@table(
    ("scale", {"sm_scale": 1e300}, "sm_scale", "float32"),
    ("cap", {"logits_soft_cap": 1e300}, "logits_soft_cap", "float32"),
    ("heads", {"num_qo_heads": 2**30, "num_kv_heads": 2**30}, "num_qo_heads", *_EG, "1073741824"),
    ("queues", {"num_ctas": 2**21}, "num_ctas", *_EG, "2097152"),
    ("processors", {"target": "sm_90:0"}, "num_processors", *_EG, "0"),
    ("items", {"max_items": _MOST}, "capacities", "2^31", "max_items", *_EG),
    ("batch", {"max_batch": _MOST, "max_qo_tokens": _MOST}, "lower max_batch", *_EG),
    ("chunks", {"schedule": "fixed_split", "max_kv_pages": _MOST}, "max_kv_pages", *_EG),
    (
        "tokens",  # 2^62 tokens
        {"schedule": "fixed_split", "max_kv_pages": _MOST, "page_size": _MOST},
        *("lower", *_EG),
    ),
)
def test_capacities_that_no_plan_has(row):
    """Computing with such capacities does not overflow, and no memory of that size is allocated."""
    changed, *words = row
    make = functools.partial(ja.AttentionSpec, **(FIELDS | changed))
    check(lambda: make().plan_words, ValueError, "AttentionSpec: ", *words)


def test_specs_and_plans_are_copied_and_pickled():
    spec = ja.AttentionSpec(**FIELDS)
    plan = ja.plan(spec, **BATCH)
    for copied in (copy.deepcopy(plan), copy.copy(plan), pickle.loads(pickle.dumps(plan))):
        assert copied.spec == spec and hash(copied.spec) == hash(spec)
        np.testing.assert_array_equal(copied.buffer, plan.buffer)
        assert copied.describe() == plan.describe()


def test_a_traced_scale():
    make = jax.jit(lambda scale: ja.AttentionSpec(**FIELDS, sm_scale=scale).plan_words)
    check(lambda: make(0.1), ValueError, "AttentionSpec", "sm_scale", "tracing", *_EG)


def test_numbers_of_numpy_and_jax_make_the_same_spec():
    """A spec is hashed and written to files, so its numbers become Python's."""
    plain = ja.AttentionSpec(**FIELDS, sm_scale=0.125, causal=True)
    fields = {n: np.int64(x) if isinstance(x, int) else x for n, x in FIELDS.items()}
    for scale in (np.float32(0.125), np.array(0.125), jnp.float32(0.125)):
        spec = ja.AttentionSpec(**fields, sm_scale=scale, causal=np.True_)
        assert spec == plain and repr(spec) == repr(plain) and hash(spec) == hash(plain)


# ---- plan ----------------------------------------------------------------------------------------

BATCH = {
    "qo_indptr": [0, 1, 4],
    "kv_lens": [20, 17],
    "page_indptr": [0, 2, 4],
    "page_indices": [0, 1, 2, 3],
}


@table(
    ("decreasing", {"qo_indptr": [0, 3, 2]}, "qo_indptr[2]", *_EG, "2"),
    ("not_from_0", {"qo_indptr": [1, 2, 4]}, "qo_indptr[0]", *_EG, "1"),
    ("negative", {"qo_indptr": [-1, 2, 4]}, "qo_indptr[0]", *_EG, "-1"),
    ("short", {"qo_indptr": [0, 4]}, "qo_indptr", *_EG, "3", "2"),
    ("empty", {"qo_indptr": []}, "qo_indptr", *_EG),
    ("rank", {"qo_indptr": [[0, 1, 4]]}, "qo_indptr", "1-d", *_EG),
    ("float", {"kv_lens": [20.0, 17.0]}, "kv_lens", "integer", *_EG, "float"),
    ("bool", {"kv_lens": [True, False]}, "kv_lens", "integer", *_EG, "bool"),
    ("negative_len", {"kv_lens": [20, -1]}, "kv_lens[1]", *_EG, "-1"),
    ("int64", {"kv_lens": [20, 2**31]}, "kv_lens", *_EG, "2147483648"),
    ("too_few_pages", {"kv_lens": [20, 33]}, "request 1", "3 pages", "33", *_EG, "2"),
    ("longest", {"kv_lens": [2**31 - 1, 3]}, "kv_lens[0]", *_EG),
    ("pages_decrease", {"page_indptr": [0, 4, 2]}, "page_indptr[2]", *_EG),
    ("pages_short", {"page_indices": [0, 1, 2]}, "page_indices", *_EG, "4", "3"),
    ("negative_page", {"page_indices": [0, 1, -5, 3]}, "page_indices[2]", "request 1", *_EG, "-5"),
    ("no_table", {"page_indptr": None}, "page_indptr", *_EG),
    ("two_tables", {"kv_indptr": [0, 1, 2]}, "kv_indptr", *_EG),
    (
        "max_batch",
        {"qo_indptr": [0] * 5, "kv_lens": [0] * 4, "page_indptr": [0] * 5},
        *("max_batch", *_EG, "3", "4", "raise"),
    ),
    ("max_qo_tokens", {"qo_indptr": [0, 1, 9]}, "max_qo_tokens", *_EG, "8", "9", "raise"),
    (
        "max_kv_pages",
        {"page_indptr": [0, 2, 11], "page_indices": list(range(11))},
        *("max_kv_pages", *_EG, "10", "11", "raise"),
    ),
    ("offsets", {"q_offsets": [1]}, "q_offsets", *_EG, "2", "1"),
    ("ragged_list", {"kv_lens": [20, [17]]}, "kv_lens", "1-d integer", *_EG, "[20, [17]]"),
    ("object", {"qo_indptr": [0, None, 4]}, "qo_indptr", "integer", *_EG),
    ("levels", {"prefix_levels": 5}, "prefix_levels", "pairs", *_EG, "5"),
    ("level", {"prefix_levels": [([0, 2],)]}, "prefix_levels", "pairs", *_EG),
    ("level_none", {"prefix_levels": [None]}, "prefix_levels", "pairs", *_EG),
    ("level_int64", {"prefix_levels": [([0, 2**40], [16])]}, "prefix_levels[0]", "int32", *_EG),
    ("offset_overflow", {"q_offsets": [0, 2**31 - 1]}, "q_offsets[1]", *_EG),
)
def test_plan(row):
    changed, *words = row
    spec = ja.AttentionSpec(**FIELDS)
    check(lambda: ja.plan(spec, **(BATCH | changed)), ValueError, "plan", *words)


def test_plan_wants_a_spec():
    for spec in (None, FIELDS):
        check(lambda: ja.plan(spec, **BATCH), TypeError, "plan: spec", "AttentionSpec", *_EG)  # noqa: B023


def test_plan_knows_the_pool_if_the_spec_does():
    spec = ja.AttentionSpec(**FIELDS, num_pages=4)
    ja.plan(spec, **BATCH)
    bad = BATCH | {"page_indices": [0, 4, 2, 3]}
    check(lambda: ja.plan(spec, **bad), ValueError, "page_indices[1]", "request 0", "4)", *_EG)


@table(
    ("table", {"page_indptr": [0, 1, 2], "page_indices": [0, 1]}, "page_indptr", "page_size=None"),
    ("rows", {"kv_indptr": [0, 19, 37]}, "kv_lens[0]", *_EG, "19", "20"),
    ("decreasing", {"kv_indptr": [5, 0, 37]}, "kv_indptr[1]", *_EG),
    ("capacity", {"kv_lens": [20, 18]}, "max_kv_tokens", *_EG, "37", "38", "raise"),
    ("overflow", {"kv_lens": [2**30, 2**30]}, "kv_indptr", *_EG),
)
def test_ragged_plan(row):
    changed, *words = row
    spec = ja.AttentionSpec(**(FIELDS | RAGGED | {"max_kv_tokens": 37}))
    batch = {"qo_indptr": [0, 1, 4], "kv_lens": [20, 17]}
    check(lambda: ja.plan(spec, **(batch | changed)), ValueError, "plan", *words)


def test_fixed_split_names_the_capacity_that_a_prefill_needs():
    """The default fits any decode batch; the error tells a prefill what to raise, until it fits."""
    fields = FIELDS | {"schedule": "fixed_split", "kv_split": 128, "max_qo_tokens": 400}
    fields |= {"max_kv_pages": 40, "num_qo_heads": 16}
    batch = [0, 400], [600], [0, 38], list(range(38))
    for _ in range(5):
        try:
            plan = ja.plan(ja.AttentionSpec(**fields), *batch)
            break
        except ValueError as error:
            named = [n for n in ("max_items", "max_partial_rows") if f"raise {n}" in str(error)]
            assert len(named) == 1, error
            assert "expected at most" in str(error)
            fields[named[0]] = int(str(error).split("got ")[1].split(";")[0])
    else:
        pytest.fail("still refused after raising what it named")
    assert len(plan.merge_groups()) > 0


# ---- attention and append ------------------------------------------------------------------------


def operands(backend, **changed):
    spec = backend.spec(**{n: x for n, x in FIELDS.items() if n != "target"})
    given = {
        "q": jnp.ones((8, 4, 64)),
        "k": jnp.ones((2, 9, 16, 2, 64)),
        "v": jnp.ones((2, 9, 16, 2, 64)),
        "plan": ja.plan(spec, **BATCH),
        "layer": 1,
    }
    return given | changed


_ones = functools.partial(np.ones, dtype=np.float32)
_CACHE = (2, 9, 16, 2, 64)


@table(
    ("q_rows", {"q": _ones((4, 4, 64))}, "q", "[8, 4, 64]", *_EG, "[4, 4, 64]"),
    ("q_heads", {"q": _ones((8, 2, 64))}, "q", *_EG),
    ("q_batch_axis", {"q": _ones((1, 8, 4, 64))}, "q", *_EG, "no batch axis", "are packed"),
    ("q_dtype", {"q": np.ones((8, 4, 64), np.float16)}, "q", *_EG, "float16", "astype('float32')"),
    ("no_q", {"q": None}, "q", "an array", *_EG, "None"),
    ("q_text", {"q": "q"}, "q", "an array", *_EG, "str"),
    ("no_k", {"k": None}, "k_pages", "an array", *_EG, "None"),
    ("k_heads_first", {"k": _ones((2, 9, 2, 16, 64))}, "k", *_EG, "[2, 9, 2, 16, 64]", "transpose"),
    ("k_rank", {"k": _ones(_CACHE[1:])}, "k", *_EG, "layer"),
    ("k_no_layer", {"layer": None}, "k", *_EG, "layer"),
    ("k_page_size", {"k": _ones((2, 9, 8, 2, 64))}, "k", *_EG),
    ("k_heads", {"k": _ones((2, 9, 16, 4, 64))}, "k", *_EG),
    ("k_dtype", {"k": np.ones(_CACHE, np.float16)}, "k", "float32", *_EG, "float16"),
    ("v_pages", {"v": _ones((2, 8, 16, 2, 64))}, "v", *_EG),
    ("v_layers", {"v": _ones((3, 9, 16, 2, 64))}, "v", *_EG),
    ("v_dim", {"v": _ones((2, 9, 16, 2, 32))}, "v", *_EG),
    ("layer_high", {"layer": 2}, "layer", "[0, 2)", *_EG, "2"),
    ("layer_negative", {"layer": -1}, "layer", *_EG, "-1"),
    ("layer_float", {"layer": 1.0}, "layer", "integer", *_EG),
    ("layer_array", {"layer": np.array([0, 1])}, "layer", *_EG),
    ("sinks_shape", {"sinks": _ones(2)}, "sinks", "[4]", *_EG, "[2]"),
    ("sinks_dtype", {"sinks": np.ones(4, np.float16)}, "sinks", "float32", *_EG),
)
@on_every_platform
def test_attention(row, backend):
    changed, *words = row
    call = functools.partial(ja.attention, **operands(backend, **changed))
    check(call, ValueError, "attention", *words)
    check(jax.jit(call), ValueError, "attention", *words)  # also at trace time


@table(
    ("k_is_f32", {"k": _ones(_CACHE)}, "k_pages", E4M3, *_EG, "float32"),
    ("k_is_e5m2", {"k": _ones(_CACHE).astype("float8_e5m2")}, "k_pages", E4M3, *_EG, "e5m2"),
    ("q_is_e4m3", {"q": _ones((8, 4, 64)).astype(E4M3)}, "q", "bfloat16", *_EG, E4M3),
    ("k_scale", {"k_scale": _ones(4)}, "k_scale", "float32[2]", *_EG, "[4]"),
    ("v_scale_of_all", {"v_scale": _ones(())}, "v_scale", "float32[2]", *_EG, "[]"),
    (
        "v_scale_dtype",
        {"v_scale": np.ones(2, jnp.bfloat16)},
        "v_scale",
        "float32",
        *_EG,
        "bfloat16",
    ),
    ("q_scale", {"q_scale": _ones(4)}, "q_scale", "q_dtype", E4M3, *_EG, "(4,)"),
)
@on_every_platform
def test_e4m3_attention(row, backend):
    changed, *words = row
    fields = {n: x for n, x in FIELDS.items() if n != "target"}
    spec = backend.spec(**fields | {"dtype": "bfloat16", "kv_dtype": E4M3})
    pages = jnp.ones(_CACHE, E4M3)
    given = {"q": jnp.ones((8, 4, 64), "bfloat16"), "k": pages, "v": pages, "layer": 1}
    given |= {"plan": ja.plan(spec, **BATCH)}
    ja.attention(**given, k_scale=_ones(2))
    call = functools.partial(ja.attention, **(given | changed))
    check(call, ValueError, "attention", *words)
    check(jax.jit(call), ValueError, "attention", *words)


@on_every_platform
def test_scales_of_what_is_not_e4m3(backend):
    given = operands(backend)
    new, scales = _ones((8, 2, 64)), {"k_scale": _ones(2)}
    check(lambda: ja.attention(**given, **scales), ValueError, "attention", "k_scale", E4M3, *_EG)
    call = functools.partial(ja.append_kv, given["k"], given["v"], new, new, given["plan"], layer=1)
    check(lambda: call(**scales), ValueError, "append_kv", "k_scale", "kv_dtype", E4M3, *_EG)


@on_every_platform
def test_attention_wants_a_plan(backend):
    given = operands(backend)
    given["plan"] = given["plan"].buffer
    check(lambda: ja.attention(**given), TypeError, "attention", "plan", "AttentionPlan", *_EG)
    whole = operands(backend)["plan"]
    for plan, words in (
        (dataclasses.replace(whole, spec=None), ("AttentionPlan of NoneType",)),
        (dataclasses.replace(whole, buffer=whole.buffer[:-1]), ("plan: expected a buffer of",)),
        (dataclasses.replace(whole, buffer=whole.buffer.astype(np.int64)), ("got int64[",)),
        (dataclasses.replace(whole, buffer=whole.buffer.tolist()), ("expected a buffer of",)),
        (dataclasses.replace(whole, buffer=None), ("expected a buffer of",)),
    ):
        exception = TypeError if plan.spec is None else ValueError
        check(lambda: ja.attention(**given | {"plan": plan}), exception, "attention", *words)  # noqa: B023
    new = _ones((8, 2, 64))
    call = functools.partial(ja.append_kv, given["k"], given["v"], new, new, layer=1)
    check(lambda: call(None), TypeError, "append_kv", "plan", "AttentionPlan", *_EG, "None")


@on_every_platform
def test_a_pool_of_another_size_than_the_spec_says(backend):
    given = operands(backend)
    spec = dataclasses.replace(given["plan"].spec, num_pages=20)
    given["plan"] = ja.plan(spec, **BATCH)
    check(lambda: ja.attention(**given), ValueError, "attention", "k", "20", *_EG)


@on_every_platform
def test_ragged_attention(backend):
    fields = {n: x for n, x in (FIELDS | RAGGED).items() if n != "target"}
    plan = ja.plan(backend.spec(**fields), [0, 2], [9])
    q, k = _ones((8, 4, 64)), _ones((30, 2, 64))
    ja.attention(q, k, k, plan)
    check(lambda: ja.attention(q, k, k, plan, layer=0), ValueError, "attention", "layer", *_EG)
    check(
        lambda: ja.attention(q, k[:9], k, plan), ValueError, "attention", "k", "[30, 2, 64]", *_EG
    )
    check(lambda: ja.append_kv(k, k, k, k, plan), ValueError, "append_kv", "page", *_EG)


@table(
    ("k_new_rows", {"k_new": _ones((4, 2, 64))}, "k_new", *_EG),
    ("v_new_dim", {"v_new": _ones((8, 2, 32))}, "v_new", *_EG),
    ("v_new_dtype", {"v_new": np.ones((8, 2, 64), np.float16)}, "v_new", *_EG),
    ("k_pages", {"k_pages": _ones((2, 9, 8, 2, 64))}, "k_pages", *_EG),
    ("rank", {"k_pages": _ones(_CACHE[1:])}, "k_pages", "layer", *_EG),
    ("v_pages", {"v_pages": _ones((2, 8, 16, 2, 64))}, "v_pages", *_EG),
    ("layer", {"layer": 2}, "layer", "[0, 2)", *_EG),
)
@on_every_platform
def test_append(row, backend):
    changed, *words = row
    given = operands(backend)
    given = {
        "k_pages": given["k"],
        "v_pages": given["v"],
        "k_new": _ones((8, 2, 64)),
        "v_new": _ones((8, 2, 64)),
        "plan": given["plan"],
        "layer": 1,
    } | changed
    check(lambda: ja.append_kv(**given), ValueError, "append_kv", *words)


_QKV = {name: _ones((2, 5, 2, 16)) for name in ("query", "key", "value")}


@table(
    ("batch", {"key": _ones((1, 5, 2, 16))}, ValueError, "key", *_EG, "[1, 5, 2, 16]"),
    ("head_dim", {"query": _ones((2, 5, 2, 8))}, ValueError, "query", *_EG, "[2, 5, 2, 8]"),
    ("dtypes", {"key": np.ones((2, 5, 2, 16), jnp.bfloat16)}, ValueError, "key", *_EG, "bfloat16"),
    ("lens", {"query_seq_lengths": [5, 6]}, ValueError, "query_seq_lengths", *_EG, "[0, 5]", "6"),
    ("half", {"key_value_seq_lengths": [1, 1.5]}, ValueError, "key_value_seq_lengths", *_EG, "1.5"),
    ("few", {"key_value_seq_lengths": [1]}, ValueError, "key_value_seq_lengths", "2", *_EG, "[1]"),
    ("window", {"local_window_size": (-3, 0)}, ValueError, "local_window_size", *_EG, "(-3, 0)"),
    ("windows", {"local_window_size": (1, 2, 3)}, ValueError, "local_window_size", *_EG),
)
def test_dot_product_attention(row):
    changed, exception, *words = row
    given = _QKV | changed
    check(lambda: ja.dot_product_attention(**given), exception, "dot_product_attention", *words)


def test_a_traced_scale_of_dot_product_attention_that_is_no_number():
    call = jax.jit(lambda scale: ja.dot_product_attention(**_QKV, scale=scale))
    words = "dot_product_attention", "scale", "expected a number"
    check(lambda: call(np.ones(4, np.float32)), ValueError, *words, "float32[4]")
    check(lambda: call(np.array(True)), ValueError, *words, "bool[]")


def test_item_times_inside_jit():
    given = {"q": _ones((8, 4, 64)), "k": _ones(_CACHE), "v": _ones(_CACHE), "layer": 1}
    given["plan"] = ja.plan(ja.AttentionSpec(**FIELDS), **BATCH)
    check(lambda: jax.jit(ja.item_times)(**given), ValueError, "item_times", "jit", *_EG)


# Data that only a run sees: the CPU handlers always refuse it, in a value error's words.


def run_time(call, *words):
    """Checks a handler's error, which XLA turns into one of two types, by where it ran."""
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError)) as caught:
        jax.block_until_ready(call())
    for word in ("INVALID_ARGUMENT", *words):
        assert word in str(caught.value)


CPU = pytest.mark.parametrize("op", ["attention", "append_kv", "append_rotated"])


def call_of(op, plan, layer=1, num_pages=9):
    ones = functools.partial(jnp.ones, dtype="float32")
    k, v = ones((2, num_pages, 16, 2, 64)), ones((2, num_pages, 16, 2, 64))
    q, new = ones((8, 4, 64)), ones((8, 2, 64))
    if op == "attention":
        call = jax.jit(lambda plan, layer: ja.attention(q, k, v, plan, layer=layer))
    elif op == "append_rotated":
        rotated = ones((8, 8 * 64)), ones((8, 32)), ones((8, 32))
        call = jax.jit(lambda plan, layer: ja.append_rotated(*rotated, k, v, plan, layer=layer))
    else:
        call = jax.jit(lambda plan, layer: ja.append_kv(k, v, new, new, plan, layer=layer))
    return lambda: call(plan, layer if isinstance(layer, np.ndarray) else jnp.int32(layer))


@CPU
def test_traced_layer_out_of_range(op):
    plan = ja.plan(ja.AttentionSpec(**FIELDS), **BATCH)
    for layer in (2, -1, 2**31 - 1):
        run_time(call_of(op, plan, layer), op, "layer", "[0, 2)", str(layer))


def test_traced_integers_of_64_bits_do_not_wrap():
    """2^32 + 1 would become 1."""
    spec = ja.AttentionSpec(**FIELDS)
    with jax.enable_x64(True):
        for wide in (2**32 + 1, -(2**32) + 1, np.uint64(2**63 + 1), 2**31 + 1):
            wide = np.asarray(wide)
            call = call_of("attention", ja.plan(spec, **BATCH), layer=wide)
            run_time(call, "attention", "layer", "[0, 2)")
            make = jax.jit(lambda *lengths: ja.plan(spec, *lengths).buffer)
            kv_lens = np.array([20, wide], wide.dtype)
            arrays = BATCH | {"kv_lens": kv_lens}
            run_time(lambda: make(*map(np.asarray, arrays.values())), "plan", "kv_lens[1]")  # noqa: B023


@CPU
def test_page_ids_beyond_the_pool(op):
    plan = ja.plan(ja.AttentionSpec(**FIELDS), **(BATCH | {"page_indices": [0, 1, 2, 9]}))
    run_time(call_of(op, plan), op, "page", "9")


@CPU
def test_a_buffer_that_is_no_plan(op):
    plan = ja.plan(ja.AttentionSpec(**FIELDS), **BATCH)
    for content in (0, -1, 12345):
        bad = dataclasses.replace(plan, buffer=np.full_like(plan.buffer, content))
        run_time(call_of(op, bad), op, "plan")


@on_every_platform
@CPU
def test_check_looks_at_data_on_every_device(op, backend, monkeypatch):
    """JAX_ATTN_CHECK=1 is for platforms whose handlers never read device data."""
    monkeypatch.setattr(_environment, "check", True)
    spec = backend.spec(**{n: x for n, x in FIELDS.items() if n != "target"})
    good = ja.plan(spec, **BATCH)
    jax.block_until_ready(call_of(op, good)())
    bad_pages = ja.plan(spec, **(BATCH | {"page_indices": [0, 1, 2, 9]}))
    no_plan = dataclasses.replace(good, buffer=np.zeros_like(good.buffer))
    for call, word in (
        (call_of(op, good, layer=2), "layer"),
        (call_of(op, bad_pages), "page"),
        (call_of(op, no_plan), "plan"),
    ):
        with pytest.raises(Exception, match=f"{op}.*{word}"):
            jax.block_until_ready(call())
            jax.effects_barrier()


def test_a_traced_plan_refuses_at_run_time():
    spec = ja.AttentionSpec(**FIELDS)
    plan = jax.jit(lambda *lengths: ja.plan(spec, *lengths).buffer)
    arrays = {name: np.array(x, np.int32) for name, x in BATCH.items()}
    plan(*arrays.values())
    for changed, words in (
        ({"qo_indptr": [0, 3, 2]}, ("qo_indptr[2]",)),
        ({"kv_lens": [20, 33]}, ("request 1",)),
        ({"qo_indptr": [0, 1, 9]}, ("max_qo_tokens",)),
    ):
        bad = arrays | {name: np.array(x, np.int32) for name, x in changed.items()}
        run_time(functools.partial(plan, *bad.values()), "plan", *words)


# ---- merge ---------------------------------------------------------------------------------------


@table(
    ("rank", (_ones((3, 2, 8)), _ones((3, 2))), ValueError, "o_parts", *_EG),
    ("no_columns", (_ones((2, 3, 2, 0)), _ones((2, 3, 2))), ValueError, "o_parts", *_EG),
    ("lse", (_ones((2, 3, 2, 8)), _ones((2, 3, 4))), ValueError, "lse_parts", *_EG),
    (
        "lse_dtype",
        (_ones((2, 3, 2, 8)), np.ones((2, 3, 2), np.float16)),
        *(ValueError, "lse_parts", "float32", *_EG),
    ),
    (
        "int",
        (np.ones((2, 3, 2, 8), np.int32), _ones((2, 3, 2))),
        *(NotImplementedError, "merge_states: o_parts", "float32", "int32"),
    ),
)
def test_merge_states(row):
    arguments, exception, *words = row
    check(lambda: ja.merge_states(*arguments), exception, *words)


def test_merge_of_no_arrays():
    check(lambda: ja.merge_states(None, None), ValueError, "merge_states: o_parts", *_EG, "None")
    check(lambda: ja.merge_states("a", "b"), ValueError, "merge_states: o_parts", *_EG, "str")
    check(lambda: ja.merge_state(1.0, 1.0, 1.0, 1.0), ValueError, "merge_state: o_a", *_EG, "[]")
    lists = [[[1.0] * 8]], [[0.0]]
    assert ja.merge_state(*lists, *lists)[0].shape == (1, 1, 8)


def test_merge_state_of_unlike_states():
    o, lse = _ones((3, 2, 8)), _ones((3, 2))
    check(lambda: ja.merge_state(o, lse, o[:1], lse[:1]), ValueError, "merge_state", "o_b", *_EG)
    check(lambda: ja.merge_state(o, lse, o, lse[:1]), ValueError, "merge_state", "lse_b", *_EG)
    half = o.astype(np.float16)
    check(lambda: ja.merge_state(o, lse, half, lse), ValueError, "merge_state", "o_b", *_EG)


# ---- environment ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name,value", [("JAX_ATTN_CHECK", "yes"), ("JAX_ATTN_POISON", "2"), ("JAX_ATTN_CPU_ISA", "mmx")]
)
def test_environment(name, value):
    import os
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-c", "import jax_attn"],
        env=os.environ | {name: value},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ValueError: {name}: expected ") and value in last


# ---- query tokens without keys, or without a slot of their own -----------------------------------

FORGOTTEN = (
    r"plan: kv_lens\[1\]: expected at least 5, the number of query tokens of the request, got {};"
    " kv_lens count the new tokens, too: add them, or pass q_offsets"
)


def batch_of(qo_lens, kv_lens):
    """Arguments of plan, two pages a request."""
    n, arrays = len(kv_lens), {"qo_indptr": np.append(0, np.cumsum(qo_lens)), "kv_lens": kv_lens}
    arrays |= {"page_indptr": 2 * np.arange(n + 1), "page_indices": np.arange(2 * n)}
    return {name: np.asarray(x, np.int32) for name, x in arrays.items()}


def spec_of_rows(**more):
    fields = {"max_batch": 3, "max_qo_tokens": 8, "page_size": 16, "target": "cpu"}
    fields |= {"dtype": "float32", "max_kv_pages": 6}
    return ja.AttentionSpec(2, 1, 16, **(fields | more))


@pytest.mark.parametrize("kv_len", [0, 3, 4])
@pytest.mark.parametrize("fields", [{}, {"fresh_kv": True}, {"window_left": 3}], ids=str)
def test_new_tokens_that_kv_lens_do_not_count(fields, kv_len, monkeypatch):
    spec, arrays = spec_of_rows(**fields), batch_of([1, 5], [20, kv_len])
    with pytest.raises(ValueError, match=FORGOTTEN.format(kv_len)):
        ja.plan(spec, **arrays)
    traced = jax.jit(lambda arrays: ja.plan(spec, **arrays).buffer)(arrays)
    on_purpose = ja.plan(spec, **arrays, q_offsets=arrays["kv_lens"] - [1, 5])
    np.testing.assert_array_equal(traced, on_purpose.buffer)
    monkeypatch.setattr(_environment, "check", True)
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=FORGOTTEN.format(kv_len)):
        jax.block_until_ready(jax.jit(lambda arrays: ja.plan(spec, **arrays).buffer)(arrays))


def test_a_decode_without_its_own_key():
    with pytest.raises(ValueError, match=r"plan: kv_lens\[0\]: expected at least 1, the number of"):
        ja.plan(spec_of_rows(), **batch_of([1, 0], [0, 7]))


@pytest.mark.parametrize("is_checked", [False, True])
def test_queries_that_may_see_no_key(is_checked, monkeypatch):
    monkeypatch.setattr(_environment, "check", is_checked)
    few = batch_of([0, 5, 2], [0, 3, 2])
    full = spec_of_rows(causal=False)  # an encoder's keys
    ragged = spec_of_rows(page_size=None, max_kv_pages=None, max_kv_tokens=5)
    for make in (lambda f: f, jax.jit):
        make(lambda: ja.plan(full, **few).buffer)()
        make(lambda: ja.plan(ragged, few["qo_indptr"], few["kv_lens"]).buffer)()
        make(lambda: ja.plan(spec_of_rows(), **batch_of([0, 5], [0, 5])).buffer)()
        make(lambda: ja.plan(spec_of_rows(), **few, q_offsets=np.int32([0, -2, 0])).buffer)()


@pytest.mark.parametrize("is_jitted", [False, True])
@pytest.mark.parametrize("op", ["append_kv", "append_rotated"])
@pytest.mark.parametrize(
    "changed, words",
    [
        (
            {"page_indices": [4, 1, 2, 3, 4, 5]},
            "page_indices: expected a slot of its own for each query token, got slot 15 of page 4"
            " for tokens of requests 0 and 2; give one of them a copy",
        ),
        ({"kv_lens": [16, 3, 16]}, r"kv_lens\[1\]: expected at least 5, the number .* got 3;"),
    ],
    ids=["one slot for two", "no slot"],
)
def test_slots_are_checked(changed, words, op, is_jitted, monkeypatch):
    spec = spec_of_rows(causal=False)
    arrays = batch_of([1, 5, 2], [16, 20, 16])
    pages = jnp.zeros((6, 16, 1, 16))
    rows, angles = jnp.ones((8, 1, 16)), jnp.ones((8, 8))

    def call(plan):
        if op == "append_kv":
            return ja.append_kv(pages, pages, rows, rows, plan)
        return ja.append_rotated(jnp.ones((8, 64)), angles, angles, pages, pages, plan)

    bad = arrays | {name: np.int32(x) for name, x in changed.items()}
    jax.block_until_ready(call(ja.plan(spec, **bad)))
    monkeypatch.setattr(_environment, "check", True)
    call = jax.jit(call) if is_jitted else call
    jax.block_until_ready(call(ja.plan(spec, **arrays)))
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=f"{op}: plan: {words}"):
        jax.block_until_ready(call(ja.plan(spec, **bad)))
