#include "cpu/isa/product_table.h"
#include "cpu/simd/simd_avx2.h"

namespace jax_attn {
constexpr CpuProductKernels kAvx2ProductBf16 = kProductKernels<Avx2, Bf16>;
constexpr CpuProductKernels kAvx2ProductF16 = kProductKernels<Avx2, F16>;
constexpr CpuProductKernels kAvx2ProductF32 = kProductKernels<Avx2, float>;
}  // namespace jax_attn
