#include "cpu/isa/linear_table.h"
#include "cpu/simd/simd_neon.h"

namespace jax_attn {
constexpr CpuLinearTable kLinearNeon = MakeLinearTable<Neon>();
}  // namespace jax_attn
