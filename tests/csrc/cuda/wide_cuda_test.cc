// The portable attention kernel for heads of more than 256 columns, without a GPU.
#include "emulation/cuda_emulation.h"
// The header above stands in for CUDA and must come first.
#include "emulation/sm80_kernels.h"

namespace jax_attn {
namespace {

int RunWideCases() {
  const std::vector<Request> decode = {{1, 130}, {1, 1},  {1, 64}, {0, 9},
                                       {1, 0},   {1, 65}, {2, 300}};
  const std::vector<Request> mixed = {{45, 70}, {3, 5}, {1, 200}, {5, 2}};
  // Gemma 4's global layers, on devices with 228, 164 and 100 KB of shared memory.
  using Gemma = ShapeOf<512, 512, 8, 16, false, true, false>;
  RunCase<WideOf<90, 16, 64, 32>, Gemma>(
      {.name = "wide, decode", .requests = decode, .kv_split = 64}, 1);
  RunCase<WideOf<90, 16, 64, 32>, Gemma>({.name = "wide, mixed", .requests = mixed}, 2);
  RunFarCase<WideOf<90, 16, 64, 32>, Gemma>(
      {.name = "wide, far logits", .requests = {{20, 170}, {1, 130}}, .kv_heads = 1}, 3);
  RunCase<WideOf<90, 16, 64, 32>, Gemma>({.name = "wide, shared prefixes",
                                          .requests = {{1, 300}, {1, 290}, {2, 330}, {1, 257}},
                                          .num_ctas = 2,
                                          .kv_heads = 1,
                                          .prefix = 256},
                                         4);
  RunCase<WideOf<80, 16, 64, 16>, Gemma>(
      {.name = "wide, 164 KB, infinities", .requests = mixed, .infinite_values = true}, 5);
  RunCase<WideOf<86, 16, 32, 16>, Gemma>(
      {.name = "wide, 100 KB, sinks, sharp", .requests = mixed, .sinks = true, .sharpness = 10}, 6);
  // Dims that fill neither a pair of tiles nor a part of o; pages, windows, soft caps.
  RunCase<WideOf<90, 32, 64, 32>, ShapeOf<264, 328, 20, 5, true, true, true>>(
      {.name = "wide, odd dims, window, soft cap, NaN values",
       .requests = mixed,
       .window_left = 30,
       .window_right = 4,
       .soft_cap = 3.0,
       .sinks = true,
       .nan_values = true,
       .kv_split = 64},
      7);
  RunCase<WideOf<86, 16, 32, 16>, ShapeOf<512, 72, 1, 0, true, false, false>>(
      {.name = "wide, ragged, full, NaN values",
       .requests = {{130, 100}, {1, 33}, {20, 0}},
       .window_left = 20,
       .window_right = -1,
       .nan_values = true},
      8);
  RunCase<WideOf<80, 0, 64, 16>, ShapeOf<64, 512, 64, 1, false, true, false>>(
      {.name = "wide values, 64 heads, one tile",
       .requests = {{2, 130}, {1, 70}},
       .kv_heads = 1,
       .kv_split = 64},
      9);
  RunCase<WideOf<90, 16, 64, 32>, Fresh<ShapeOf<320, 512, 4, 16, true, true, false>>>(
      {.name = "wide, fresh", .requests = mixed, .window_left = 40, .nan_values = true}, 10);
  // Quantized rows.
  RunCase<WideOf<90, 16, 64, 32>, E4m3Of<Gemma, false>>(
      {.name = "wide, e4m3", .requests = decode, .sinks = true, .kv_split = 64}, 11);
  RunCase<WideOf<86, 16, 32, 16>, E4m3Of<ShapeOf<272, 496, 3, 7, true, true, false>, false>>(
      {.name = "wide, e4m3, odd dims, window, NaN values",
       .requests = mixed,
       .window_left = 50,
       .nan_values = true},
      12);
  RunCase<WideOf<80, 16, 64, 16>, CodesOf<Gemma, kE5m2Format>>(
      {.name = "wide, e5m2", .requests = mixed}, 13);
  if (g_failures > 0) std::printf("%d failures\n", g_failures);
  return g_failures > 0;
}

}  // namespace
}  // namespace jax_attn

int main() { return jax_attn::RunWideCases(); }
