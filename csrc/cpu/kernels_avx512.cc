#include "cpu/kernel_table.h"
#include "cpu/simd_avx512.h"

namespace jax_attn {

constexpr CpuTypeKernels kAvx512F16 = MakeTypeKernels<Avx512, F16>();
constexpr CpuTypeKernels kAvx512F32 = MakeTypeKernels<Avx512, float>();
constexpr CpuKernels kKernelsAvx512 = {"avx512",
                                       {&kTypeKernels<Avx512, Bf16>, &kAvx512F16, &kAvx512F32}};

}  // namespace jax_attn
