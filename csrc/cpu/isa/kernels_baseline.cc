#include "cpu/isa/kernel_table.h"
#include "cpu/simd/simd_baseline.h"

namespace jax_attn {
constexpr CpuKernels kKernelsBaseline = MakeKernels<Baseline>(
    "baseline", {&kBaselineProductBf16, &kBaselineProductF16, &kBaselineProductF32});
}  // namespace jax_attn
