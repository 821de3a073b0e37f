#include "cpu/isa/linear_table.h"
#include "cpu/simd/simd_baseline.h"

namespace jax_attn {
constexpr CpuLinearTable kLinearBaseline = MakeLinearTable<Baseline>();
}  // namespace jax_attn
