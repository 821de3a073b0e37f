// Cases of the attention kernel of sm_90a, in addition to those of attention_cuda_cases.h; include
// the emulation first.
#pragma once

#include "cuda/attention_cuda_cases.h"
#include "emulation/sm90_kernels.h"

namespace jax_attn {
namespace {

template <int kDimQk, int kDimVo, int kGroup, int kPage, bool kLeft, bool kCap>
using E4m3Shape = E4m3Of<ShapeOf<kDimQk, kDimVo, kGroup, kPage, kLeft, true, kCap>, false>;

template <class Kernel>
void RunE4m3Cases() {
  const std::vector<Request> decode = {{1, 130}, {1, 1}, {0, 9}, {1, 0}, {1, 65}, {2, 300}};
  const std::vector<Request> mixed = {{45, 70}, {3, 5}, {1, 200}, {5, 2}};
  // Items of all three kinds, with more steps than both rings have slots, and some with none.
  const std::vector<Request> by_turns = {{45, 600}, {12, 300},  {1, 917},  {20, 150}, {4, 0},
                                         {16, 700}, {100, 100}, {3, 1400}, {12, 12},  {10, 640}};
  RunCase<Kernel, E4m3Shape<128, 128, 4, 16, false, false>>(
      {.name = "e4m3, decode", .requests = decode, .sinks = true, .kv_split = 64}, 1);
  RunCase<Kernel, E4m3Shape<128, 128, 4, 16, false, false>>(
      {.name = "e4m3, tall and low items by turns", .requests = by_turns, .num_ctas = 1}, 2);
  RunCase<Kernel, E4m3Shape<64, 64, 4, 64, false, false>>(
      {.name = "e4m3, head_dim 64, page 64", .requests = by_turns, .num_ctas = 2}, 3);
  RunCase<Kernel, E4m3Shape<48, 80, 5, 5, true, true>>({.name = "e4m3, window, soft cap, odd sizes",
                                                        .requests = mixed,
                                                        .window_left = 30,
                                                        .soft_cap = 3.0,
                                                        .sinks = true,
                                                        .kv_split = 64},
                                                       4);
  RunCase<Kernel, E4m3Shape<48, 48, 5, 5, true, false>>(
      {.name = "e4m3, NaN values", .requests = mixed, .window_left = 50, .nan_values = true}, 5);
  RunCase<Kernel, E4m3Shape<96, 96, 1, 16, true, false>>({.name = "e4m3, NaN values, TMA",
                                                          .requests = {{150, 400}, {70, 70}},
                                                          .window_left = 50,
                                                          .nan_values = true},
                                                         6);
  RunCase<Kernel, E4m3Shape<192, 128, 2, 0, false, false>>(
      {.name = "e4m3, long chunk, ragged", .requests = {{150, 900}, {64, 70}}, .kv_heads = 1}, 7);
  RunCase<Kernel, E4m3Shape<192, 192, 1, 16, false, false>>(
      {.name = "e4m3, head_dim 192", .requests = {{80, 300}, {1, 500}}}, 8);
  RunCase<Kernel, E4m3Shape<256, 256, 3, 1, false, false>>(
      {.name = "e4m3, head_dim 256, page 1", .requests = {{1, 300}, {50, 330}}, .num_ctas = 2}, 9);
  RunCase<Kernel, E4m3Shape<128, 128, 2, 16, false, false>>(
      {.name = "e4m3, maxima that rise late",
       .requests = {{70, 600}, {3, 500}, {1, 900}, {20, 300}},
       .num_ctas = 2,
       .sharpness = 10,
       .late_keys = 3},
      10);
  RunFarCase<Kernel, E4m3Shape<64, 64, 4, 16, false, false>>(
      {.name = "e4m3, far logits", .requests = kForest}, 12);
  RunCase<Kernel, E4m3Shape<64, 64, 4, 16, false, false>>({.name = "e4m3, shared prefixes",
                                                           .requests = kForest,
                                                           .kv_split = 64,
                                                           .prefix = 256,
                                                           .half_prefix = 64},
                                                          11);
}

// Consumers of a joint item leave it one by one if their rows' keys end in different steps.
template <class Kernel>
void RunEarlyCases() {
  // Some rows see one step of an item, or nothing.
  const std::vector<Request> prompts = {{450, 450}, {1, 300}, {200, 500}, {150, 60}, {130, 1100},
                                        {70, 70},   {3, 400}, {193, 193}, {64, 200}};
  RunCase<Kernel, ShapeOf<64, 64, 1, 16, false, true, false>>(
      {.name = "head_dim 64, consumers leave early",
       .requests = prompts,
       .num_ctas = 2,
       .kv_heads = 1},
      1);
  RunCase<Kernel, ShapeOf<48, 48, 1, 5, true, true, true>>(
      {.name = "consumers leave early, windows, soft cap, page 5",
       .requests = prompts,
       .window_left = 150,
       .window_right = 40,
       .soft_cap = 3.0,
       .kv_heads = 1,
       .kv_split = 128},
      2);
  RunCase<Kernel, ShapeOf<64, 64, 1, 16, true, true, false>>({.name = "consumers leave early, NaN",
                                                              .requests = {{190, 500}, {70, 70}},
                                                              .window_left = 50,
                                                              .nan_values = true,
                                                              .num_ctas = 1},
                                                             3);
  RunCase<Kernel, ShapeOf<256, 256, 1, 0, false, true, false>>(
      {.name = "head_dim 256, consumers leave early",
       .requests = {{300, 300}, {2, 200}, {128, 333}, {100, 100}},
       .num_ctas = 1,
       .kv_heads = 1,
       .sharpness = 10},
      4);
  RunCase<Kernel, ShapeOf<256, 256, 1, 16, false, true, false>>(
      {.name = "head_dim 256, consumers leave early, splits",
       .requests = {{150, 170}, {128, 333}},
       .num_ctas = 2,
       .kv_heads = 1,
       .kv_split = 64},
      5);
  RunCase<Kernel, Fresh<ShapeOf<64, 64, 1, 16, false, true, false>>>(
      {.name = "consumers leave early, fresh",
       .requests = {{150, 170}, {128, 333}, {9, 90}},
       .num_ctas = 1,
       .kv_heads = 1},
      6);
  RunCase<Kernel, E4m3Shape<256, 256, 1, 16, false, false>>(
      {.name = "e4m3, consumers leave early",
       .requests = {{150, 170}, {128, 333}, {9, 90}},
       .num_ctas = 1,
       .kv_heads = 1},
      7);
}

}  // namespace
}  // namespace jax_attn
