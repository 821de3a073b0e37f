#include "cpu/isa/product_table.h"
#include "cpu/simd/simd_avx512.h"

namespace jax_attn {
constexpr CpuProductKernels kAvx512Bf16ProductBf16 = kProductKernels<Avx512Bf16, Bf16>;
}  // namespace jax_attn
