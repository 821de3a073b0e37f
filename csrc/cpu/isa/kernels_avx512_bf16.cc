#include "cpu/isa/kernel_table.h"
#include "cpu/simd/simd_avx512.h"

namespace jax_attn {
constexpr CpuBackwardKernels kAvx512Bf16BackwardBf16 = kBackwardKernels<Avx512Bf16, Bf16>;
constexpr CpuKernels kKernelsAvx512Bf16 = {
    "avx512_bf16",
    {{&kTypeKernels<Avx512Bf16, Bf16>, &kAvx512F16, &kAvx512F32},
     {&kTypeKernels<Avx512Bf16, Bf16, E4m3>, &kAvx512F16E4m3, &kAvx512F32E4m3}},
    {&kCodeKernels<Avx512Bf16, Bf16>, &kCodeKernels<Avx512Bf16, F16>,
     &kCodeKernels<Avx512Bf16, float>},
    {&kAvx512Bf16BackwardBf16, &kAvx512BackwardF16, &kAvx512BackwardF32},
    {&kAvx512Bf16ProductBf16, &kAvx512ProductF16, &kAvx512ProductF32},
    {&kAvx512LoraBf16, &kAvx512LoraF16, &kAvx512LoraF32}};
}  // namespace jax_attn
