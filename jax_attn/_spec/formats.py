"""Storage formats of elements. Names are in the order of their numbers in csrc."""

DTYPES = ("bfloat16", "float16", "float32")  # DType in csrc/spec.h
E4M3 = "float8_e4m3fn"
E5M2 = "float8_e5m2"
NVFP4 = "nvfp4"
# FormatCode in csrc/params.h; None is the dtype.
FORMATS = (None, E4M3, E5M2, "int8", "mxfp4", NVFP4, "int4")
FLOAT8 = (E4M3, E5M2)  # also for ragged arrays; the others keep scales in the rows of their pages
HEAD_SCALED = (*FLOAT8, NVFP4)
# 4-bit formats, in pages of uint8: (elements that share a scale, bytes of the scale).
FOUR_BITS = {"mxfp4": (32, 1), NVFP4: (16, 1), "int4": (32, 2)}


def row_bytes(kv_dtype: str | None, head_dim: int) -> int:
    """Stored length of a row of k or v: elements, or bytes for int8 and 4-bit formats."""
    if kv_dtype in FOUR_BITS:
        block, scale_bytes = FOUR_BITS[kv_dtype]
        return head_dim // 2 + -(-head_dim // block) * scale_bytes
    return head_dim + 4 if kv_dtype == "int8" else head_dim
