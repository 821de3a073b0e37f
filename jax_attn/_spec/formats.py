"""What elements are stored as: names in the order of csrc's numbers."""

DTYPES = ("bfloat16", "float16", "float32")  # DType in csrc/spec.h
E4M3 = "float8_e4m3fn"
E5M2 = "float8_e5m2"
NVFP4 = "nvfp4"
# FormatCode in csrc/params.h; None is the dtype.
FORMATS = (None, E4M3, E5M2, "int8", "mxfp4", NVFP4, "int4")
FLOAT8 = (E4M3, E5M2)  # of ragged arrays, too; the others have scales in the rows of their pages
HEAD_SCALED = (*FLOAT8, NVFP4)
# Codes of four bits, in pages of uint8: elements that share a scale, and its bytes.
FOUR_BITS = {"mxfp4": (32, 1), NVFP4: (16, 1), "int4": (32, 2)}


def row_bytes(kv_dtype: str | None, head_dim: int) -> int:
    """Length of a row of k or v as it is stored: bytes of int8 and codes of four bits."""
    if kv_dtype in FOUR_BITS:
        block, scale_bytes = FOUR_BITS[kv_dtype]
        return head_dim // 2 + -(-head_dim // block) * scale_bytes
    return head_dim + 4 if kv_dtype == "int8" else head_dim
