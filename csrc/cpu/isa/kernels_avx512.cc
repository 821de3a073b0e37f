#include "cpu/isa/kernel_table.h"
#include "cpu/simd/simd_avx512.h"

namespace jax_attn {
constexpr CpuKernels kKernelsAvx512 = {
    "avx512",
    {{&kTypeKernels<Avx512, Bf16>, &kAvx512F16, &kAvx512F32},
     {&kTypeKernels<Avx512, Bf16, E4m3>, &kAvx512F16E4m3, &kAvx512F32E4m3}},
    {&kCodeKernels<Avx512, Bf16>, &kCodeKernels<Avx512, F16>, &kCodeKernels<Avx512, float>},
    {&kBackwardKernels<Avx512, Bf16>, &kAvx512BackwardF16, &kAvx512BackwardF32},
    {&kAvx512ProductBf16, &kAvx512ProductF16, &kAvx512ProductF32},
    {&kAvx512LoraBf16, &kAvx512LoraF16, &kAvx512LoraF32}};
}  // namespace jax_attn
