#include "cpu/isa/product_table.h"
#include "cpu/simd/simd_baseline.h"

namespace jax_attn {
constexpr CpuProductKernels kBaselineProductBf16 = kProductKernels<Baseline, Bf16>;
constexpr CpuProductKernels kBaselineProductF16 = kProductKernels<Baseline, F16>;
constexpr CpuProductKernels kBaselineProductF32 = kProductKernels<Baseline, float>;
}  // namespace jax_attn
