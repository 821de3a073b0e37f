#include "cpu/isa/product_table.h"
#include "cpu/simd/simd_neon.h"

namespace jax_attn {
constexpr CpuProductKernels kNeonProductBf16 = kProductKernels<Neon, Bf16>;
constexpr CpuProductKernels kNeonProductF16 = kProductKernels<Neon, F16>;
constexpr CpuProductKernels kNeonProductF32 = kProductKernels<Neon, float>;
}  // namespace jax_attn
