#include "cpu/kernel_table.h"
#include "cpu/simd_avx512.h"

namespace jax_attn {
constexpr CpuKernels kKernelsAvx512Bf16 = {
    "avx512_bf16", {&kTypeKernels<Avx512Bf16, Bf16>, &kAvx512F16, &kAvx512F32}};
}  // namespace jax_attn
