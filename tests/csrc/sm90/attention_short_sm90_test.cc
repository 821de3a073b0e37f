// The attention kernel of sm_90a for short sequences, with one consumer, without a GPU.
#include "emulation/cuda_emulation.h"
#include "emulation/cuda_emulation_sm90.h"
// The headers above stand in for CUDA and must come first.
#include "sm90/attention_sm90_cases.h"

namespace jax_attn {
namespace {

template <class Kernel>
void RunShortCases() {
  // Tiles that begin with few rows, or have all 64; items of one step and of more than a ring has
  // slots; requests without keys, and without tokens.
  const std::vector<Request> prompts = {{77, 77}, {197, 197}, {1, 1},    {64, 64},  {0, 9},
                                        {20, 0},  {300, 300}, {17, 130}, {129, 129}};
  RunCase<Kernel, ShapeOf<64, 64, 4, 0, false, true, false>>(
      {.name = "short, causal", .requests = prompts, .num_ctas = 5}, 1);
  RunCase<Kernel, ShapeOf<64, 64, 1, 0, false, false, false>>(
      {.name = "short, full, one CTA", .requests = prompts, .window_right = -1, .num_ctas = 1}, 2);
  RunCase<Kernel, ShapeOf<128, 128, 7, 0, false, true, false>>(
      {.name = "short, groups of 7, splits", .requests = prompts, .sinks = true, .kv_split = 256},
      3);
  RunCase<Kernel, ShapeOf<128, 128, 16, 16, false, true, false>>(
      {.name = "short, groups of 16, page 16",
       .requests = {{1, 300}, {50, 130}, {4, 700}, {9, 9}},
       .num_ctas = 2},
      4);
  RunCase<Kernel, ShapeOf<40, 40, 5, 5, true, true, true>>(
      {.name = "short, windows, soft cap, sinks, odd sizes",
       .requests = {{45, 70}, {3, 5}, {1, 200}, {100, 103}},
       .window_left = 30,
       .window_right = 4,
       .soft_cap = 3.0,
       .sinks = true,
       .kv_split = 64},
      5);
  RunCase<Kernel, ShapeOf<72, 72, 1, 0, false, false, false>>({.name = "short, head_dim 72, sharp",
                                                               .requests = prompts,
                                                               .window_right = -1,
                                                               .num_ctas = 3,
                                                               .sharpness = 10},
                                                              6);
  RunCase<Kernel, ShapeOf<128, 64, 2, 0, true, true, false>>({.name = "short, NaN values",
                                                              .requests = {{150, 400}, {70, 70}},
                                                              .window_left = 50,
                                                              .nan_values = true,
                                                              .num_ctas = 2},
                                                             7);
  RunCase<Kernel, ShapeOf<64, 64, 4, 16, false, true, false>>(
      {.name = "short, shared prefixes", .requests = kForest, .prefix = 256, .half_prefix = 64}, 8);
  RunFarCase<Kernel, ShapeOf<64, 64, 2, 0, false, true, false>>(
      {.name = "short, far logits", .requests = {{70, 200}, {130, 130}, {1, 90}}, .num_ctas = 2},
      9);
}

}  // namespace
}  // namespace jax_attn

int main() {
  using namespace jax_attn;
  RunShortCases<Sm90KernelOf<false, Sm90ShortTiles>>();
  RunShortCases<Sm90KernelOf<true, Sm90ShortTiles>>();
  if (g_failures > 0) std::printf("%d failures\n", g_failures);
  return g_failures > 0;
}
