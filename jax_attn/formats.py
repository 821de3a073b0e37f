"""What elements are stored as: names in the order of csrc's numbers."""

DTYPES = ("bfloat16", "float16", "float32")  # DType in csrc/spec.h
E4M3 = "float8_e4m3fn"
E5M2 = "float8_e5m2"
FORMATS = (None, E4M3, E5M2, "int8", "mxfp4")  # FormatCode in csrc/params.h; None is the dtype
HEAD_SCALED = (E4M3, E5M2)  # the others have their scales in the rows of the pages
