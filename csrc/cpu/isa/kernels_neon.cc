#include "cpu/isa/kernel_table.h"
#include "cpu/simd/simd_neon.h"

namespace jax_attn {
constexpr CpuKernels kKernelsNeon = MakeKernels<Neon>("neon");
}  // namespace jax_attn
