// Variants in the MLA kernels of sm_90a, without a GPU.
#include "cuda_emulation.h"
#include "cuda_emulation_sm90.h"
// The above stand in for CUDA and come first.
#include "attention_cuda_cases.h"
#include "sm90_kernels.h"
#include "variant_cuda_cases.h"

int main() { return jax_attn::RunVariantMlaCases<jax_attn::Sm90MlaDecode, 192>(); }
