#include "cpu/isa/product_table.h"
#include "cpu/simd/simd_amx.h"

namespace jax_attn {
constexpr CpuProductKernels kAmxProductBf16 = kProductKernels<Amx, Bf16>;
}  // namespace jax_attn
