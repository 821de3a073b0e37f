// The portable MLA kernel over quantized latent rows, without a GPU: the CPU kernels' results, and
// the bits of dequantized plain pages.
#include "emulation/cuda_emulation.h"
// The header above stands in for CUDA and must come first.
#include "cuda/mla_codes_cases.h"
#include "emulation/sm80_kernels.h"

namespace jax_attn {
namespace {

template <class Kernel, int kFormat>
void RunFormat() {
  RunCodes<Kernel, MlaShapeOf<144, 128, 5, 16, false, true, false>, kFormat>(kCodesOfFewHeads, 1);
  RunCodes<Kernel, MlaShapeOf<176, 128, 26, 7, true, true, true>, kFormat>(
      {.name = "77 heads in 3 blocks, window, soft cap",
       .requests = {{2, 150}, {1, 33}, {3, 20}},
       .window_left = 60,
       .window_right = 3,
       .soft_cap = 3.0,
       .kv_heads = 3,
       .kv_split = 64,
       .qo_heads = 77},
      2);
  RunCodes<Kernel, MlaShapeOf<144, 128, 5, 16, false, true, false>, kFormat>(kCodesOfPrefixes, 5);
  RunCodes<Kernel, MlaShapeOf<576, 512, 16, 64, false, true, false>, kFormat>(
      {.name = "DeepSeek's, 16 heads",
       .requests = {{1, 200}, {2, 165}},
       .kv_heads = 1,
       .qo_heads = 16},
      3);
  RunCodes<Kernel, MlaShapeOf<576, 512, 32, 0, false, true, false>, kFormat>(
      {.name = "DeepSeek's, 64 heads, ragged, shared out",
       .requests = {{1, 700}, {1, 40}},
       .num_ctas = 8,
       .kv_heads = 2,
       .qo_heads = 63},
      4);
}

}  // namespace
}  // namespace jax_attn

int main() {
  using namespace jax_attn;
  RunFormat<Sm80Mla, kE4m3Format>();
  RunFormat<Sm86Mla, kE4m3Format>();
  RunFormat<Sm80Mla, kE5m2Format>();
  if (g_failures == 0) std::printf("mla_codes_cuda_test: ok\n");
  return g_failures > 0;
}
