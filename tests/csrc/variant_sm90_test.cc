// Variants in the attention kernel of sm_90a, without a GPU.
#include "cuda_emulation.h"
#include "cuda_emulation_sm90.h"
// The above stand in for CUDA and come first.
#include "attention_cuda_cases.h"
#include "sm90_kernels.h"
#include "variant_cuda_cases.h"

int main() { return jax_attn::RunVariantCases<jax_attn::Sm90Kernel<false, 32>>(); }
