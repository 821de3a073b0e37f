// Variants in the portable attention kernel of csrc/cuda, without a GPU.
#include "emulation/cuda_emulation.h"
// The header above stands in for CUDA and must come first.
#include "emulation/sm80_kernels.h"
#include "variant/variant_cuda_cases.h"

int main() { return jax_attn::RunVariantCases<jax_attn::Sm80Kernel>(); }
