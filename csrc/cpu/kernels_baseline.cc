#include "cpu/kernel_table.h"
#include "cpu/simd_baseline.h"

namespace jax_attn {
constexpr CpuKernels kKernelsBaseline = MakeKernels<Baseline>("baseline");
}  // namespace jax_attn
