"""Products of 8-bit codes: what is refused; on CPUs, attention over int8."""

from __future__ import annotations

import pytest

import jax_attn as ja

E4M3 = "float8_e4m3fn"


def _spec(**fields):
    names = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 64, "max_kv_pages": 8}
    return ja.AttentionSpec(**(names | {"target": "cpu", "eight_bit_products": True} | fields))


# --- the choice


@pytest.mark.parametrize(("target", "kv_dtype"), [("cpu", "int8"), ("sm_90", E4M3)])
def test_the_choice_is_of_the_spec(target, kv_dtype):
    fields = {"target": target, "kv_dtype": kv_dtype}
    spec, plain = _spec(**fields), _spec(**fields, eight_bit_products=False)
    assert spec != plain and not (spec.problem_words == plain.problem_words).all()
    assert ja.AttentionSpec.from_fields(spec.to_fields()) == spec
    assert spec.kv_shapes(3, 16) == plain.kv_shapes(3, 16)


@pytest.mark.parametrize(
    ("fields", "got"),
    [
        ({}, "kv_dtype=None on cpu"),
        ({"kv_dtype": E4M3}, f"kv_dtype='{E4M3}' on cpu"),
        ({"kv_dtype": "mxfp4"}, "kv_dtype='mxfp4' on cpu"),
        ({"kv_dtype": "int8", "target": "sm_90"}, "kv_dtype='int8' on sm_90"),
        ({"kv_dtype": "float8_e5m2", "target": "sm_90"}, "kv_dtype='float8_e5m2' on sm_90"),
        ({"kv_dtype": E4M3, "target": "sm_80"}, f"kv_dtype='{E4M3}' on sm_80"),
        ({"mla": True, "num_kv_heads": 1, "sm_scale": 0.1}, "kv_dtype=None on cpu"),
    ],
)
def test_formats_that_are_not_multiplied_are_refused(fields, got):
    with pytest.raises(NotImplementedError) as error:
        _spec(**fields)
    message = str(error.value)
    for words in ("AttentionSpec: eight_bit_products: supported with", got, "leave it False"):
        assert words in message and message.endswith("."), message


def test_weights_of_any_sign_are_refused():
    variant = ja.Variant(logits=lambda s, _: s, normalize="none")
    with pytest.raises(NotImplementedError, match="eight_bit_products:.*normalize='none'"):
        _spec(kv_dtype="int8", variant=variant)


def test_it_is_true_or_false():
    with pytest.raises(ValueError, match="eight_bit_products: expected True or False, got 8"):
        _spec(kv_dtype="int8", eight_bit_products=8)


@pytest.mark.parametrize(
    ("field", "value"), [("kv_format", 0), ("kv_format", 1), ("arch", 90), ("arch", 80)]
)
def test_damaged_words_are_refused(field, value):
    """Of an executable from outside: csrc/plan/check_problem.cc."""
    spec = _spec(kv_dtype="int8")
    fields = spec.problem.spec | {field: value}
    with pytest.raises(ValueError, match="eight_bit_products: expected 0 to 0, got 1"):
        ja._core.Problem(fields, {}, [])
    assert ja._core.Problem(spec.problem.spec, {}, []).words == spec.problem.words
