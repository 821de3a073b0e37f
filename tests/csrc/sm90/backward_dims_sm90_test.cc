// The backward pass of sm_90a for head dims that are padded, differ, or are wide, in emulation.
#include "emulation/cuda_emulation.h"
#include "emulation/cuda_emulation_sm90.h"
// The headers above stand in for CUDA and must come first.
#include "sm90/backward_sm90_cases.h"

namespace jax_attn {
namespace {

template <int kQk, int kVo, int kGroup, int kPage = 0>
using Causal = ShapeOf<kQk, kVo, kGroup, kPage, false, true, false>;
template <int kQk, int kVo, int kGroup, int kPage = 0>
using Odd = ShapeOf<kQk, kVo, kGroup, kPage, true, true, true>;

int RunAll() {
  const std::vector<Request> mixed = {{45, 70}, {3, 5}, {1, 200}, {0, 9}, {5, 2}, {1, 0}};
  const Case documents = {
      .name = "documents", .requests = {{150, 150}, {1, 1}, {100, 100}}, .kv_heads = 1};
  const Case causal = {.name = "mixed, sinks", .requests = mixed, .sinks = true};
  const Case odd = {.name = "windows, soft cap, sinks",
                    .requests = {{100, 230}, {7, 3}, {0, 9}, {40, 100}, {1, 0}},
                    .window_left = 30,
                    .window_right = 3,
                    .soft_cap = 3.0,
                    .sinks = true,
                    .kv_heads = 1};
  // Padded to the sizes that had a kernel first.
  Run<Causal<40, 40, 2>>(documents, 1, true);
  Run<Causal<80, 80, 2>>(documents, 2, true);
  Run<Causal<96, 96, 1>>(causal, 3, false);
  Run<Odd<104, 104, 2>>(odd, 4, true);
  Run<Causal<64, 128, 2>>(documents, 5, true);
  Run<Odd<112, 32, 1>>(odd, 6, false);
  // Wide.
  Run<Causal<192, 128, 1>>(documents, 7, true);
  Run<Causal<192, 128, 1>>({.name = "long", .requests = {{400, 400}}, .kv_heads = 1}, 14, true);
  Run<Causal<192, 128, 1>>(causal, 8, false);
  Run<Causal<256, 256, 2>>(documents, 9, true);
  Run<Odd<256, 256, 2>>(odd, 10, true);
  Run<Odd<136, 64, 1>>(odd, 11, false);
  Run<Causal<64, 256, 3>>(causal, 12, true);
  const Case full = {.name = "full",
                     .requests = {{45, 170}, {130, 30}},
                     .window_right = -1,
                     .num_ctas = 5,
                     .kv_heads = 1};
  Run<ShapeOf<192, 192, 1, 0, false, false, false>>(full, 13, true);
  for (const Poison poison :
       {kNanQ, kInfiniteDo, kNanLse, kInfiniteLse, kNanD, kNanK, kInfiniteV}) {
    const Case c = {.name = "not finite", .requests = {{30, 40}, {60, 70}}, .kv_heads = 1};
    Run<Causal<192, 128, 1>>(c, 20 + poison, true, poison);
  }
  // Over pages that requests share; a prefix ends within a block.
  const Case tree = {.name = "pages of a prompt",
                     .requests = {{130, 130}, {90, 200}, {0, 140}, {64, 180}, {1, 107}},
                     .kv_heads = 1,
                     .prefix = 96,
                     .half_prefix = 32};
  Run<Causal<96, 96, 1, 16>>(tree, 40, true);
  Run<Causal<192, 128, 1, 16>>(tree, 41, true);
  Run<Causal<256, 256, 1, 1>>(tree, 42, true);
  Run<Odd<160, 160, 2, 256>>(
      {.name = "groups, windows, soft cap, sinks",
       .requests = {{200, 200}, {60, 260}, {70, 330}, {0, 300}, {40, 340}, {9, 350}},
       .window_left = 150,
       .window_right = 3,
       .soft_cap = 3.0,
       .sinks = true,
       .kv_heads = 1},
      43, true, kNone, kGroupsOfThree);
  RunDamaged<Causal<192, 128, 1>>();
  if (g_failures > 0) std::printf("%d failures\n", g_failures);
  return g_failures > 0;
}

}  // namespace
}  // namespace jax_attn

int main() { return jax_attn::RunAll(); }
