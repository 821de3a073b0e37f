#include "cpu/isa/kernel_table.h"
#include "cpu/simd/simd_avx2.h"

namespace jax_attn {
constexpr CpuKernels kKernelsAvx2 = MakeKernels<Avx2>("avx2");
}  // namespace jax_attn
