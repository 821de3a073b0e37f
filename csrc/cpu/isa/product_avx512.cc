#include "cpu/isa/product_table.h"
#include "cpu/simd/simd_avx512.h"

namespace jax_attn {
constexpr CpuProductKernels kAvx512ProductBf16 = kProductKernels<Avx512, Bf16>;
constexpr CpuProductKernels kAvx512ProductF16 = kProductKernels<Avx512, F16>;
constexpr CpuProductKernels kAvx512ProductF32 = kProductKernels<Avx512, float>;
}  // namespace jax_attn
