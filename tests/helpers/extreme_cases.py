"""Families of kernels, with the fewest cases that have logits of any finite size."""

from helpers.attention_cases import E4M3, Case

LATENT = {"mla": True, "num_kv_heads": 1, "head_dim_qk": 576, "head_dim_vo": 512, "sm_scale": 0.07}
PREFIX = {"branches": ("ab", "ab", "abc", "a"), "num_ctas": 2}
LENS = {"qo_lens": (1, 33, 0, 1), "kv_lens": (300, 180, 9, 70)}
DECODES = {"qo_lens": (1, 1, 1, 1), "kv_lens": (600, 577, 900, 300)}
SPLIT = {"schedule": "fixed_split", "kv_split": 128, **LENS}
FAMILIES = [
    *(Case(f"paged-{dtype}", dtype=dtype, **LENS) for dtype in ("float32", "bfloat16", "float16")),
    Case("ragged", page_size=None, **LENS),
    Case("ragged_bf16_d128", page_size=None, dtype="bfloat16", head_dim_qk=128, **LENS),
    Case("decodes_bf16_d128", dtype="bfloat16", head_dim_qk=128, num_qo_heads=8, **DECODES),
    Case("split", **SPLIT),
    Case("split_bf16", dtype="bfloat16", **SPLIT),
    Case("sinks", sinks=True, **LENS),
    Case("negative_scale", sm_scale=-0.25, **LENS),
    Case("small_scale", sm_scale=1e-6, **LENS),
    Case("cap", logits_soft_cap=30.0, dtype="bfloat16", **LENS),
    Case("window", window_left=50, **LENS),
    Case("prefix", **PREFIX, **DECODES),
    Case("e4m3", kv_dtype=E4M3, dtype="bfloat16", head_dim_qk=128, **LENS),
    Case("e4m3_q", kv_dtype=E4M3, q_dtype=E4M3, dtype="bfloat16", head_dim_qk=128, **LENS),
    Case("int8", kv_dtype="int8", dtype="bfloat16", **LENS),
    Case("int8_products", kv_dtype="int8", eight_bit_products=True, **LENS),
    Case("mla", **LATENT, num_qo_heads=16, dtype="bfloat16", **LENS),
    Case("mla_e4m3", **LATENT, num_qo_heads=8, dtype="bfloat16", kv_dtype=E4M3, **DECODES),
]
