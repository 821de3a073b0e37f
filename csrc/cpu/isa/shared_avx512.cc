// What every table with AVX-512 takes, whatever it has for bf16.
#include "cpu/isa/kernel_table.h"
#include "cpu/simd/simd_avx512.h"

namespace jax_attn {
constexpr CpuTypeKernels kAvx512F16 = MakeTypeKernels<Avx512, F16, F16>();
constexpr CpuTypeKernels kAvx512F32 = MakeTypeKernels<Avx512, float, float>();
constexpr CpuTypeKernels kAvx512F16E4m3 = MakeTypeKernels<Avx512, F16, E4m3>();
constexpr CpuTypeKernels kAvx512F32E4m3 = MakeTypeKernels<Avx512, float, E4m3>();
constexpr CpuBackwardKernels kAvx512BackwardF16 = kBackwardKernels<Avx512, F16>;
constexpr CpuBackwardKernels kAvx512BackwardF32 = kBackwardKernels<Avx512, float>;
constexpr CpuLoraKernels kAvx512LoraBf16 = kLoraKernels<Avx512, Bf16>;
constexpr CpuLoraKernels kAvx512LoraF16 = kLoraKernels<Avx512, F16>;
constexpr CpuLoraKernels kAvx512LoraF32 = kLoraKernels<Avx512, float>;
}  // namespace jax_attn
