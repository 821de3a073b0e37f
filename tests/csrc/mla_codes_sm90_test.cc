// The MLA kernels of sm_90a over latent rows of codes, without a GPU.
#include "cuda_emulation.h"
#include "cuda_emulation_sm90.h"
// The above stand in for CUDA and come first.
#include "mla_codes_cases.h"
#include "sm90_kernels.h"

namespace jax_attn {
namespace {

// Up to 32 heads.
template <int kFormat>
void RunFewHeads() {
  using Kernel = Sm90MlaDecode;
  RunCodes<Kernel, MlaShapeOf<128, 128, 5, 16, false, true, false>, kFormat>(
      {.name = "5 heads, NaN, sinks",
       .requests = {{1, 130}, {1, 1}, {0, 9}, {1, 0}, {2, 200}, {9, 40}},
       .sinks = true,
       .nan_values = true,
       .kv_heads = 1,
       .qo_heads = 5},
      1);
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
  RunCodes<Kernel, MlaShapeOf<192, 128, 5, 16, false, true, false>, kFormat>(
      {.name = "5 heads, shared prefixes",
       .requests = {{1, 300}, {1, 290}, {2, 330}, {1, 257}, {1, 400}, {1, 310}},
       .num_ctas = 2,
       .kv_heads = 1,
       .qo_heads = 5,
       .prefix = 256},
      5);
}

// More: blocks of up to 64, a token a tile.
template <int kFormat>
void RunManyHeads() {
  using Kernel = Sm90Mla;
  RunCodes<Kernel, MlaShapeOf<128, 128, 48, 1, false, true, false>, kFormat>(
      {.name = "48 heads, many tokens, page 1, NaN",
       .requests = {{4, 90}, {30, 70}, {1, 40}, {3, 2}, {2, 0}},
       .sinks = true,
       .nan_values = true,
       .num_ctas = 2,
       .kv_heads = 1,
       .qo_heads = 48},
      11);
  RunCodes<Kernel, MlaShapeOf<192, 128, 39, 7, true, true, true>, kFormat>(
      {.name = "77 heads in 2 blocks, window, soft cap",
       .requests = {{2, 150}, {1, 33}, {3, 20}},
       .window_left = 60,
       .window_right = 3,
       .soft_cap = 3.0,
       .kv_heads = 2,
       .kv_split = 64,
       .qo_heads = 77},
      12);
  RunCodes<Kernel, MlaShapeOf<576, 512, 64, 0, false, true, false>, kFormat>(
      {.name = "DeepSeek's, 128 heads, tiles in two",
       .requests = {{1, 700}, {1, 650}, {1, 720}},
       .num_ctas = 12,
       .kv_heads = 2,
       .qo_heads = 128},
      13);
  RunCodes<Kernel, MlaShapeOf<576, 512, 63, 64, false, true, false>, kFormat>(
      {.name = "DeepSeek's, 125 heads, large states, shared out",
       .requests = {{1, 1400}},
       .num_ctas = 20,
       .kv_heads = 2,
       .qo_heads = 125,
       .sharpness = 8},
      14);
}

}  // namespace
}  // namespace jax_attn

int main() {
  using namespace jax_attn;
  RunFewHeads<kE4m3Format>();
  RunFewHeads<kE5m2Format>();
  RunManyHeads<kE4m3Format>();
  RunManyHeads<kE5m2Format>();
  if (g_failures == 0) std::printf("mla_codes_sm90_test: ok\n");
  return g_failures > 0;
}
