#include "cpu/isa/kernel_table.h"
#include "cpu/simd/simd_baseline.h"

namespace jax_attn {
constexpr CpuKernels kKernelsBaseline = MakeKernels<Baseline>("baseline");
}  // namespace jax_attn
