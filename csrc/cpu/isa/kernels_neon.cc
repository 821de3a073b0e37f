#include "cpu/isa/kernel_table.h"
#include "cpu/simd/simd_neon.h"

namespace jax_attn {
constexpr CpuKernels kKernelsNeon =
    MakeKernels<Neon>("neon", {&kNeonProductBf16, &kNeonProductF16, &kNeonProductF32});
}  // namespace jax_attn
