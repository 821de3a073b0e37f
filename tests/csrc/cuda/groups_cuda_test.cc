// The portable attention kernel with more than 16 query heads for each kv head, without a GPU.
#include "emulation/cuda_emulation.h"
// The header above stands in for CUDA and must come first.
#include "emulation/sm80_kernels.h"

namespace jax_attn {
namespace {

// kSecond 0: one tile. 8 warps: 128 rows of wide values, 16 rows each.
template <int kFirst, int kSecond, int kWarps>
struct TilesOf : NoTensorMaps {
  template <class Shape>
  struct Traits : Sm80Kernel::Traits<Shape> {
    static constexpr int kArch = 80, kNumWarps = kWarps;
    static constexpr int kNumTiles = kSecond > 0 ? 2 : 1, kTileQ0 = kFirst, kTileQ1 = kSecond;
  };
  template <class Shape>
  using Body = AttentionBody<Traits<Shape>>;
};
using TwoTallTiles = TilesOf<64, 128, 4>;
using OneTallTile = TilesOf<128, 0, 4>;
using EightWarps = TilesOf<128, 0, 8>;

int RunGroups() {
  const std::vector<Request> mixed = {{1, 130}, {9, 70}, {0, 9}, {1, 0}, {2, 300}, {5, 2}};
  RunCase<TwoTallTiles, ShapeOf<64, 64, 20, 16, true, true, false>>(
      {.name = "20 heads, window, NaN values",
       .requests = mixed,
       .window_left = 50,
       .nan_values = true,
       .kv_heads = 1},
      1);
  RunCase<OneTallTile, ShapeOf<40, 40, 71, 5, false, true, true>>(
      {.name = "71 heads, soft cap, sinks, page 5",
       .requests = mixed,
       .soft_cap = 3.0,
       .sinks = true,
       .kv_heads = 1,
       .kv_split = 64},
      2);
  RunCase<EightWarps, ShapeOf<256, 256, 71, 16, false, true, false>>(
      {.name = "71 wide heads", .requests = mixed, .kv_heads = 1, .kv_split = 64}, 3);
  RunCase<EightWarps, E4m3Of<ShapeOf<192, 192, 128, 1, false, true, false>, false>>(
      {.name = "128 heads, e4m3, page 1", .requests = {{2, 130}, {1, 70}}, .kv_heads = 1}, 4);
  if (g_failures > 0) std::printf("%d failures\n", g_failures);
  return g_failures > 0;
}

}  // namespace
}  // namespace jax_attn

int main() { return jax_attn::RunGroups(); }
