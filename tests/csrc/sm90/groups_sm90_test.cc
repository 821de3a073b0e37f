// The attention kernel of sm_90a with more than 32 query heads for each kv head, without a GPU.
#include "emulation/cuda_emulation.h"
#include "emulation/cuda_emulation_sm90.h"
// The headers above stand in for CUDA and must come first.
#include "emulation/sm90_kernels.h"

namespace jax_attn {
namespace {

// One tile for all consumers.
struct OneTallTile : Sm90Kernel<true, 64> {
  template <class Shape>
  struct Traits : Sm90Tiles<64, 2>::Traits<Shape> {
    static constexpr int kNumTiles = 1, kTileQ0 = Sm90Tiles<64, 2>::Traits<Shape>::kTileQ1;
    static constexpr int kTileQ1 = 0;
  };
  template <class Shape>
  using Body = HopperAttentionBody<Traits<Shape>>;
};

int RunGroups() {
  const std::vector<Request> mixed = {{1, 130}, {9, 70}, {0, 9}, {1, 0}, {2, 300}, {5, 2}};
  // Warps whose rows are of one token: all of them, or the last one of a tile.
  RunCase<Sm90Kernel<true, 32>, ShapeOf<64, 64, 16, 16, false, true, false>>(
      {.name = "16 heads, NaN values", .requests = {{9, 40}, {5, 2}}, .nan_values = true}, 5);
  RunCase<Sm90Kernel<true, 32>, ShapeOf<64, 64, 4, 16, true, true, false>>(
      {.name = "one token of a tile, window, NaN values",
       .requests = {{13, 31}, {25, 100}},
       .window_left = 9,
       .nan_values = true},
      6);
  RunCase<Sm90Kernel<true, 64>, ShapeOf<64, 64, 48, 16, true, true, false>>(
      {.name = "48 heads, window, NaN values",
       .requests = mixed,
       .window_left = 50,
       .nan_values = true,
       .kv_heads = 1},
      1);
  RunCase<OneTallTile, ShapeOf<64, 64, 71, 16, false, true, true>>(
      {.name = "71 heads, soft cap, sinks",
       .requests = mixed,
       .soft_cap = 3.0,
       .sinks = true,
       .kv_heads = 1,
       .kv_split = 128},
      2);
  RunCase<OneTallTile, ShapeOf<128, 128, 128, 1, false, true, false>>(
      {.name = "128 heads, page 1", .requests = {{2, 130}, {1, 70}}, .kv_heads = 1}, 3);
  RunCase<OneTallTile, E4m3Of<ShapeOf<128, 128, 71, 16, false, true, false>, false>>(
      {.name = "71 heads, e4m3", .requests = mixed, .kv_heads = 1}, 4);
  if (g_failures > 0) std::printf("%d failures\n", g_failures);
  return g_failures > 0;
}

}  // namespace
}  // namespace jax_attn

int main() { return jax_attn::RunGroups(); }
