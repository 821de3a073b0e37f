#include "cpu/isa/kernel_table.h"
#include "cpu/simd/simd_avx2.h"

namespace jax_attn {
constexpr CpuKernels kKernelsAvx2 =
    MakeKernels<Avx2>("avx2", {&kAvx2ProductBf16, &kAvx2ProductF16, &kAvx2ProductF32});
}  // namespace jax_attn
