#include "cpu/isa/linear_table.h"
#include "cpu/simd/simd_avx2.h"

namespace jax_attn {
constexpr CpuLinearTable kLinearAvx2 = MakeLinearTable<Avx2>();
}  // namespace jax_attn
