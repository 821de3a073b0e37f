"""Stored bytes and a rotation, worked out by hand from the definitions of the formats.

Kernels and the oracle are compared with each other elsewhere; both could misread a definition. So
here are numbers that no code has made.
"""

import jax.numpy as jnp
import numpy as np
import pytest

import jax_attn as ja
from helpers.backends import on_every_platform
from jax_attn import models, reference


def codes(text: str) -> list[int]:
    return list(bytes.fromhex(text))


# Per format: what is appended, what it becomes, and its bytes. Values are exact in bfloat16.
GOLDEN = {
    # 1 sign, 4 exponent (bias 7), 3 mantissa bits; largest 448; ties to even.
    "float8_e4m3fn": (
        [1, -1, 448, 1000, 2**-9, 0, 1.0625, 1.1875, -448, 2, 0.5, 3, 17, 19, -0.5, 2**-10],
        [1, -1, 448, 448, 2**-9, 0, 1, 1.25, -448, 2, 0.5, 3, 16, 20, -0.5, 0],
        codes("38 B8 7E 7E 01 00 38 3A FE 40 30 44 58 5A B0 00"),
    ),
    # 1 sign, 5 exponent (bias 15), 2 mantissa bits; largest 57344.
    "float8_e5m2": (
        [1, -2, 57344, 99840, 2**-16, 0, 1.125, 1.375, 3, -0.5, 6, 5, 5.5, 4.5, -57344, 2**-17],
        [1, -2, 57344, 57344, 2**-16, 0, 1, 1.5, 3, -0.5, 6, 5, 6, 4, -57344, 0],
        codes("3C C0 7B 7B 01 00 3C 3E 42 B8 46 45 46 44 FB 00"),
    ),
    # The scale is 254 / 127 = 2, a little-endian float32 behind the integers.
    "int8": (
        [254, -254, 2, -2, 3, 1, 5, 0, 254, 100, -100, 4, -6, 10, 128, -128],
        [254, -254, 2, -2, 4, 0, 4, 0, 254, 100, -100, 4, -6, 10, 128, -128],
        codes("7F 81 01 FF 02 00 02 00 7F 32 CE 02 FD 05 40 C0 00 00 00 40"),
    ),
    # Codes 0 to 7 are 0, .5, 1, 1.5, 2, 3, 4, 6; 8 is the sign. Byte i of a block of n has elements
    # i (low) and n / 2 + i. Scales: 2 is 2^(128 - 127), as 6 * 2 = 12; 1/32 is 2^(122 - 127), as
    # 6 / 32 = .1875.
    "mxfp4": (
        [0, 1, 2, 3, 4, 6, 8, 12, -0.0, -1, -2, -3, -4, -6, -8, -12]
        + [12, 8, 6, 4, 3, 2, 1, 0, -12, -8, -6, -4, -3, -2, -1, 0]
        + [3 / 16, 1 / 16, -1 / 32, 5 / 128, 1 / 128, 5 / 32, -3 / 128, 7 / 128]
        + [1 / 32, 1 / 64, 3 / 64, 3 / 32, -1 / 8, -3 / 16, 0, 1 / 16],
        [0, 1, 2, 3, 4, 6, 8, 12, -0.0, -1, -2, -3, -4, -6, -8, -12]
        + [12, 8, 6, 4, 3, 2, 1, 0, -12, -8, -6, -4, -3, -2, -1, 0]
        + [3 / 16, 1 / 16, -1 / 32, 1 / 32, 0, 1 / 8, -1 / 32, 1 / 16]
        + [1 / 32, 1 / 64, 3 / 64, 3 / 32, -1 / 8, -3 / 16, 0, 1 / 16],
        codes("70 61 52 43 34 25 16 07 F8 E9 DA CB BC AD 9E 0F")
        + codes("27 14 3A 52 E0 F6 0A 44 80 7A"),
    ),
    # The same codes. A scale of 16 elements is e4m3: 12 / 6 = 2 is 40, 21 / 6 = 3.5 is 46.
    "nvfp4": (
        [0, 1, 2, 3, 4, 6, 8, 12, -1, -2, -3, -4, -6, -8, -12, 5]
        + [21, 3.5, 7, 10.5, 14, -5.25, -1.75, 0]
        + [1.75, 5.25, -3.5, -7, -10.5, -14, -21, 17.5],
        [0, 1, 2, 3, 4, 6, 8, 12, -1, -2, -3, -4, -6, -8, -12, 4]
        + [21, 3.5, 7, 10.5, 14, -5.25, -1.75, 0]
        + [1.75, 5.25, -3.5, -7, -10.5, -14, -21, 14],
        codes("70 21 42 53 64 B5 96 07 19 3A AB CC DD EE FF 64 40 46"),
    ),
    # Two's complement of 4 bits. Scales are little-endian float16: -8 / -8 = 1 is 3C00, and
    # 16 / -8 = -2 is C000.
    "int4": (
        [-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7]
        + [7, 6.5, -6.5, 5.5, 0.5, 1.5, -0.5, 0, 1, 2, 3, 4, -1, -2, -3, 7]
        + [16, -14, 2, -2, 0, 1, 3, -15, 4, 6, 8, 10, 12, 14, -4, -6],
        [-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7]
        + [7, 6, -6, 6, 0, 2, 0, 0, 1, 2, 3, 4, -1, -2, -3, 7]
        + [16, -14, 2, -2, 0, 0, 4, -14, 4, 6, 8, 10, 12, 14, -4, -6],
        codes("18 29 3A 4B FC ED DE 7F 80 71 F2 13 04 05 E6 77 E7 D6 CA B6 A0 92 20 30")
        + codes("00 3C 00 C0"),
    ),
}
HEAD_SCALED = ("float8_e4m3fn", "float8_e5m2", "nvfp4")
SCALES = np.array([1, 0.5], np.float32)  # of two heads: the second has halves of the values


def rows_of(kv_dtype):
    """[1, 2, head_dim] of two heads: appended and stored values; [1, 2, n] bytes."""
    given, stored, expected = (np.array(x) for x in GOLDEN[kv_dtype])
    by_head = SCALES if kv_dtype in HEAD_SCALED else np.ones(2)
    given, stored = (np.float32(x * by_head[:, None])[None] for x in (given, stored))
    return given, stored, np.tile(expected.astype(np.uint8), (1, 2, 1))


def plan_of(backend, kv_dtype, head_dim):
    spec = backend.spec(
        num_qo_heads=2, num_kv_heads=2, head_dim_qk=head_dim, dtype="bfloat16", kv_dtype=kv_dtype,
        max_batch=1, max_qo_tokens=1, max_kv_pages=1,
    )  # fmt: skip
    return spec, ja.plan(spec, [0, 1], [1], [0, 1], [1])


@pytest.mark.parametrize("kv_dtype", GOLDEN)
def test_the_oracle_writes_and_reads_them(kv_dtype):
    given, stored, expected = rows_of(kv_dtype)
    scale = SCALES if kv_dtype in HEAD_SCALED else None
    written = np.asarray(reference.quantize(given, scale, kv_dtype))
    np.testing.assert_array_equal(written.view(np.uint8), expected)
    np.testing.assert_array_equal(
        reference.dequantize(written, scale, np.float32, kv_dtype), stored
    )


@on_every_platform
@pytest.mark.parametrize("kv_dtype", GOLDEN)
def test_append_writes_them(kv_dtype, backend):
    given, _, expected = rows_of(kv_dtype)
    spec, plan = plan_of(backend, kv_dtype, given.shape[-1])
    scales = {"k_scale": SCALES, "v_scale": SCALES} if kv_dtype in HEAD_SCALED else {}
    new = given.astype(jnp.bfloat16)
    for pages in ja.append_kv(*spec.empty_pages(3), new, new, plan, **scales):
        pages = np.asarray(pages).view(np.uint8)
        np.testing.assert_array_equal(pages[1, :1], expected)
        assert not pages[1, 1:].any() and not pages[::2].any()


@on_every_platform
@pytest.mark.parametrize("kv_dtype", GOLDEN)
def test_attention_reads_them(kv_dtype, backend):
    """Over one key o is its value."""
    given, stored, expected = rows_of(kv_dtype)
    spec, plan = plan_of(backend, kv_dtype, given.shape[-1])
    scales = {"k_scale": SCALES, "v_scale": SCALES} if kv_dtype in HEAD_SCALED else {}
    pages = np.zeros(spec.kv_shapes(3, 16)[0], jnp.dtype(spec.dtype_of_kv))
    pages.view(np.uint8)[1, 0] = expected
    q = np.ones(spec.q_shape, jnp.bfloat16)
    o = ja.attention(q, pages, pages, plan, **scales)
    np.testing.assert_array_equal(np.float32(o), stored)


@on_every_platform
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rotation(dtype, backend):
    """Element i is paired with i + head_dim / 2, and turns by (a cos - b sin, b cos + a sin)."""
    spec = backend.spec(
        num_qo_heads=1, num_kv_heads=1, head_dim_qk=16, dtype=dtype, max_batch=1, max_qo_tokens=1,
        max_kv_pages=1,
    )  # fmt: skip
    plan = ja.plan(spec, [0, 1], [1], [0, 1], [0])
    # Quarter turns, half turns, and turns by 0, of pairs (a, b).
    cos = np.float32([[0, 0, -1, 1, 0, -1, 1, 0]])
    sin = np.float32([[1, -1, 0, 0, 1, 0, 0, -1]])
    q = [1, 2, 3, 4, 5, 6, 7, 8, 10, 20, 30, 40, 50, 60, 70, 80]
    turned = [-10, 20, -3, 4, -50, -6, 7, 80, 1, -2, -30, 40, 5, -60, 70, -8]
    qkv = np.array([[*q, *np.array(q[::-1]), *q]]).astype(jnp.dtype(dtype))
    got_q, k_pages, v_pages = ja.append_rotated(qkv, cos, sin, *spec.empty_pages(1), plan)
    np.testing.assert_array_equal(np.float32(got_q)[0, 0], turned)
    k = [-8, 7, -60, 50, -4, -30, 20, 1, 80, -70, -6, 5, 40, -3, 2, -10]
    np.testing.assert_array_equal(np.float32(k_pages)[0, 0, 0], k)
    np.testing.assert_array_equal(np.float32(v_pages)[0, 0, 0], q)


def test_a_rotation_of_a_model():
    """Position 2, base 10,000, head_dim 4: pairs (0, 2) and (1, 3) turn by 2 and by 0.02."""
    angles = models.Rope(10000.0).angles(4, jnp.array([2]))
    got = models.rotate(jnp.array([[[1.0, 2.0, 3.0, 4.0]]]), angles)
    # cos 2 = -.41614684, sin 2 = .90929743; cos .02 = .99980001, sin .02 = .01999867
    want = [
        1 * -0.41614684 - 3 * 0.90929743,
        2 * 0.99980001 - 4 * 0.01999867,
        3 * -0.41614684 + 1 * 0.90929743,
        4 * 0.99980001 + 2 * 0.01999867,
    ]
    np.testing.assert_allclose(got[0, 0], want, rtol=1e-6)
