// Variants in the attention kernel of sm_90a, without a GPU.
#include "emulation/cuda_emulation.h"
#include "emulation/cuda_emulation_sm90.h"
// The headers above stand in for CUDA and must come first.
#include "cuda/attention_cuda_cases.h"
#include "emulation/sm90_kernels.h"
#include "variant/variant_cuda_cases.h"

int main() {
  using namespace jax_attn;
  RunVariantDecodes<Sm90Kernel<false, 32, 1>>();
  // By TMA, with one tile M.
  RunVariant<Sm90Kernel<true, 64>, ShapeWith<64, 4, 64, false, false, variant::DocumentsVariant>>(
      {{.name = "TMA, documents",
        .requests = {{70, 300}, {150, 150}, {3, 200}},
        .nan_values = true},
       Documents(),
       3},
      1);
  RunVariant<Sm90Kernel<true, 64>, Listed<FullWith<64, 4, 64, variant::CausalVariant>>>(
      {{.name = "TMA, lists",
        .requests = {{70, 300}, {150, 450}, {3, 200}},
        .window_right = -1,
        .nan_values = true},
       Causal(),
       200},
      2);
  RunVariant<Sm90Kernel<false, 32, 1>, Listed<FullWith<64, 4, 16, variant::CausalVariant>>>(
      {{.name = "decodes alone, lists",
        .requests = {{1, 130}, {1, 1}, {1, 64}, {0, 9}, {1, 0}, {2, 300}},
        .window_right = -1,
        .nan_values = true},
       Causal()},
      3);
  return RunVariantCases<Sm90Kernel<false, 32>>();
}
