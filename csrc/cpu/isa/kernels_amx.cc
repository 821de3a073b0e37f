#include "cpu/isa/kernel_table.h"
#include "cpu/simd/simd_amx.h"

namespace jax_attn {
constexpr CpuKernels kKernelsAmx = {
    "amx",
    {{&kTypeKernels<Amx, Bf16>, &kAvx512F16, &kAvx512F32},
     {&kTypeKernels<Amx, Bf16, E4m3>, &kAvx512F16E4m3, &kAvx512F32E4m3}},
    {&kCodeKernels<Amx, Bf16>, &kCodeKernels<Amx, F16>, &kCodeKernels<Amx, float>},
    {&kBackwardKernels<Amx, Bf16>, &kAvx512BackwardF16, &kAvx512BackwardF32},
    {&kAmxProductBf16, &kAvx512ProductF16, &kAvx512ProductF32},
    {&kAvx512LoraBf16, &kAvx512LoraF16, &kAvx512LoraF32}};
}  // namespace jax_attn
