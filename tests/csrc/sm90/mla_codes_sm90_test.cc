// The MLA kernels of sm_90a over quantized latent rows, without a GPU.
#include "emulation/cuda_emulation.h"
#include "emulation/cuda_emulation_sm90.h"
// The headers above stand in for CUDA and must come first.
#include "cuda/mla_codes_cases.h"
#include "emulation/sm90_kernels.h"

namespace jax_attn {
namespace {

template <int kFormat>
void RunLatentCodes() {
  using Kernel = Sm90MlaDecode;
  RunCodes<Kernel, MlaShapeOf<128, 128, 5, 16, false, true, false>, kFormat>(kCodesOfFewHeads, 1);
  RunCodes<Kernel, MlaShapeOf<320, 128, 26, 7, true, true, true>, kFormat>(
      {.name = "26 heads, window, soft cap",
       .requests = {{2, 150}, {1, 33}, {3, 20}},
       .window_left = 60,
       .window_right = 3,
       .soft_cap = 3.0,
       .kv_heads = 1,
       .kv_split = 64,
       .qo_heads = 26},
      2);
  RunCodes<Kernel, MlaShapeOf<576, 512, 16, 64, false, true, false>, kFormat>(
      {.name = "DeepSeek's, 16 heads",
       .requests = {{1, 300}, {2, 165}, {1, 64}, {0, 3}, {1, 700}},
       .num_ctas = 2,
       .kv_heads = 1,
       .qo_heads = 16,
       .sharpness = 8},
      3);
  RunCodes<Kernel, MlaShapeOf<192, 128, 5, 16, false, true, false>, kFormat>(kCodesOfPrefixes, 5);
  RunCodes<Kernel, MlaShapeOf<576, 512, 26, 0, false, true, false>, kFormat>(
      {.name = "DeepSeek's, 77 heads in 3 blocks, ragged, shared out",
       .requests = {{1, 400}, {2, 140}},
       .num_ctas = 8,
       .kv_heads = 3,
       .qo_heads = 77},
      4);
}

}  // namespace
}  // namespace jax_attn

int main() {
  using namespace jax_attn;
  RunLatentCodes<kE4m3Format>();
  RunLatentCodes<kE5m2Format>();
  if (g_failures == 0) std::printf("mla_codes_sm90_test: ok\n");
  return g_failures > 0;
}
