// The MLA kernels of sm_90a, without a GPU.
#include "emulation/cuda_emulation.h"
#include "emulation/cuda_emulation_sm90.h"
// The headers above stand in for CUDA and must come first.
#include "cuda/attention_cuda_cases.h"
#include "emulation/sm90_kernels.h"

namespace jax_attn {
namespace {

// Numbers of heads and page sizes, with one query token and several.
template <class Kernel, int kHeads, int kPage>
void RunDecodeCase(const char* name) {
  RunCase<Kernel, MlaShapeOf<576, 512, kHeads, kPage, false, true, false>>(
      {.name = name,
       .requests = {{1, 300}, {2, 131}, {5, 70}, {0, 3}, {1, 64}},
       .num_ctas = 2,
       .kv_heads = 1,
       .qo_heads = kHeads,
       .sharpness = 8},
      31);
}

// A running max that rises, in some cases in every step, and logits that are far below 0.
template <class Kernel, int kHeads, int kPage>
void RunReferenceCases() {
  using Shape = MlaShapeOf<576, 512, kHeads, kPage, false, true, false>;
  Case c = {.name = "mla, very sharp",
            .requests = {{1, 700}, {1, 130}, {2, 390}},
            .num_ctas = 1,
            .kv_heads = 1,
            .qo_heads = kHeads,
            .sharpness = 250};
  RunCase<Kernel, Shape>(c, 32);
  c.name = "mla, maxima that rise late";
  c.sharpness = 10;
  c.late_keys = 5;
  RunCase<Kernel, Shape>(c, 33);
  c.name = "mla, logits far below 0";
  c.sharpness = 30;
  c.late_keys = 0;
  c.low = true;
  RunCase<Kernel, Shape>(c, 34);
}

// More than 32 heads, as in select/cuda.cc: a token is a tile.
void RunManyHeadsCases() {
  RunDecodeCase<Sm90Mla, 64, 64>("mla, 64 heads, page 64");
  RunDecodeCase<Sm90Mla, 39, 1>("mla, 39 heads, page 1");
  RunReferenceCases<Sm90Mla, 64, 3>();
  RunFarCase<Sm90Mla, MlaShapeOf<128, 128, 64, 16, false, true, false>>(
      {.name = "mla, far logits, 64 heads",
       .requests = {{1, 300}, {2, 150}, {1, 71}},
       .num_ctas = 2,
       .kv_heads = 1,
       .qo_heads = 64},
      35);
  RunCase<Sm90Mla, MlaShapeOf<128, 128, 64, 16, false, true, false>>(
      {.name = "mla, 64 heads, empty", .requests = {}, .kv_heads = 1, .qo_heads = 64}, 2);
  RunCase<Sm90Mla, MlaShapeOf<128, 128, 48, 1, false, true, false>>(
      {.name = "mla, 48 heads, many tokens, page 1, NaN",
       .requests = {{4, 90}, {30, 70}, {1, 40}, {3, 2}},
       .sinks = true,
       .nan_values = true,
       .num_ctas = 2,
       .kv_heads = 1,
       .qo_heads = 48},
      3);
  RunCase<Sm90Mla, MlaShapeOf<192, 128, 39, 7, true, true, true>>(
      {.name = "mla, 77 heads in 2 blocks, window, soft cap",
       .requests = {{2, 150}, {1, 33}, {3, 20}},
       .window_left = 60,
       .window_right = 3,
       .soft_cap = 3.0,
       .kv_heads = 2,
       .kv_split = 64,
       .qo_heads = 77},
      4);
  RunCase<Sm90Mla, MlaShapeOf<576, 512, 64, 0, false, true, false>>(
      {.name = "mla, 128 heads, tiles in two",
       .requests = {{1, 700}, {1, 650}, {1, 720}},
       .num_ctas = 12,
       .kv_heads = 2,
       .qo_heads = 128},
      9);
  RunCase<Sm90Mla, MlaShapeOf<576, 512, 63, 64, false, true, false>>(
      {.name = "mla, large states, shared out",
       .requests = {{1, 1400}},
       .num_ctas = 20,
       .kv_heads = 2,
       .qo_heads = 125},
      10);
}

}  // namespace
}  // namespace jax_attn

int main() {
  using namespace jax_attn;
  RunDecodeCase<Sm90MlaDecode, 1, 1>("mla decode, 1 head");
  RunDecodeCase<Sm90MlaDecode, 8, 64>("mla decode, 8 heads, page 64");
  RunDecodeCase<Sm90MlaDecode, 17, 64>("mla decode, 17 heads, page 64");
  RunDecodeCase<Sm90MlaDecode, 32, 1>("mla decode, 32 heads, page 1");
  RunDecodeCase<Sm90MlaDecode, 16, 1>("mla decode, 16 heads, page 1");
  RunDecodeCase<Sm90MlaDecode, 16, 64>("mla decode, 16 heads, page 64");
  RunDecodeCase<Sm90MlaDecode, 32, 16>("mla decode, 32 heads, page 16");
  RunReferenceCases<Sm90MlaDecode, 16, 64>();
  RunManyHeadsCases();
  return RunMlaCases<Sm90MlaDecode, 128, 192>();
}
