#include "cpu/isa/linear_table.h"
#include "cpu/simd/simd_avx512.h"

namespace jax_attn {
constexpr CpuLinearTable kLinearAvx512 = MakeLinearTable<Avx512>();
}  // namespace jax_attn
