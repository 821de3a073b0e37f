// The backward pass of sm_90a over pages, without a GPU: requests share a prompt's pages, and
// gradients of its keys sum over all of them.
#include "emulation/cuda_emulation.h"
#include "emulation/cuda_emulation_sm90.h"
// The headers above stand in for CUDA and must come first.
#include "sm90/backward_sm90_cases.h"

namespace jax_attn {
namespace {

int RunAll() {
  const std::vector<Request> mixed = {{45, 70}, {3, 5}, {1, 200}, {0, 9}, {5, 2}, {1, 0}};
  // A prompt of two blocks and a part, and answers; one has no queries, one a query before its
  // first key.
  const std::vector<Request> group = {{280, 280}, {90, 350}, {130, 370}, {0, 290},
                                      {64, 330},  {1, 257},  {300, 280}};
  // The first request has a partial page, of which others have more tokens.
  const std::vector<Request> grown = {{100, 100}, {50, 150}, {20, 104}, {60, 140}};
  const std::vector<Request> groups = {{200, 200}, {60, 260}, {70, 330}, {0, 300}, {40, 340},
                                       {9, 350},   {30, 30},  {1, 400},  {5, 5},   {150, 150}};
  const std::vector<Request> scattered = {{70, 170}, {20, 116}, {33, 129}, {9, 90}, {40, 64}};
  using Page16 = ShapeOf<128, 128, 1, 16, false, true, false>;
  using Page1 = ShapeOf<64, 64, 2, 1, false, true, false>;
  using Page24 = ShapeOf<64, 64, 2, 24, false, true, false>;
  using Page256 = ShapeOf<128, 128, 1, 256, false, true, false>;
  using Full = ShapeOf<128, 128, 3, 16, false, false, false>;
  using Odd = ShapeOf<64, 64, 5, 5, true, true, true>;
  using Odd128 = ShapeOf<128, 128, 2, 64, true, true, true>;
  Run<Page16>({.name = "mixed, sinks", .requests = mixed, .sinks = true}, 1, true);
  Run<Page16>({.name = "empty", .requests = {}}, 2, true);
  const Case prompt = {.name = "a prompt's pages", .requests = group, .kv_heads = 1, .prefix = 256};
  Run<Page16>(prompt, 3, true);
  Run<Page16>(prompt, 4, false);
  const Case tree = {.name = "prefixes that end within a block",
                     .requests = group,
                     .kv_heads = 1,
                     .prefix = 160,
                     .half_prefix = 64};
  Run<Page16>(tree, 5, true);
  Run<Page1>(tree, 6, true);
  Run<Page24>(tree, 7, true);
  Run<Page16>({.name = "a page that others fill", .requests = grown, .prefix = 112}, 8, true);
  Run<Page256>({.name = "pages of two blocks", .requests = group, .kv_heads = 1, .prefix = 256}, 9,
               true);
  Run<Page16>({.name = "groups", .requests = groups, .kv_heads = 1}, 10, true, kNone,
              kGroupsOfThree);
  Run<Page1>({.name = "groups", .requests = groups, .kv_heads = 1}, 11, true, kNone,
             kGroupsOfThree);
  Run<Full>({.name = "groups, full",
             .requests = {{45, 270}, {130, 230}, {20, 300}, {65, 140}},
             .window_right = -1,
             .kv_heads = 1},
            12, true, kNone, kGroupsOfThree);
  const Case odd = {.name = "groups, windows, soft cap, sinks",
                    .requests = groups,
                    .window_left = 150,
                    .window_right = 3,
                    .soft_cap = 3.0,
                    .sinks = true,
                    .kv_heads = 1};
  Run<Odd>(odd, 13, true, kNone, kGroupsOfThree);
  Run<Odd128>(odd, 14, true, kNone, kGroupsOfThree);
  for (unsigned seed = 30; seed < 36; ++seed) {
    std::mt19937 random(seed);
    std::vector<Request> trees(7);
    for (Request& r : trees) {
      r.qo_len = static_cast<int>(random() % 4 == 0 ? 0 : random() % 150);
      r.kv_len = static_cast<int>(random() % 5 == 0 ? random() % 20 : 100 + random() % 250);
    }
    const Case c = {.name = "trees", .requests = trees, .kv_heads = 1};
    if (seed % 2 == 0) Run<Page1>(c, seed, true, kNone, kTrees);
    if (seed % 2 == 1) Run<Page24>(c, seed, true, kNone, kTrees);
    if (seed % 3 == 0) Run<Page16>(c, seed, true, kNone, kTrees);
  }
  Run<Page16>({.name = "pages at other places", .requests = scattered, .kv_heads = 1}, 15, true,
              kNone, kScattered);
  Run<Page16>({.name = "the same places, no prefix", .requests = scattered, .kv_heads = 1}, 16,
              true, kNone, kAllButTheFirst);
  for (const Poison poison : {kNanQ, kInfiniteDo, kNanLse, kNanK, kInfiniteV}) {
    Run<Page1>({.name = "not finite",
                .requests = {{60, 60}, {60, 70}, {40, 90}},
                .kv_heads = 1,
                .prefix = 60},
               20 + poison, true, poison);
  }
  RunDamaged<Page16>();
  if (g_failures > 0) std::printf("%d failures\n", g_failures);
  return g_failures > 0;
}

}  // namespace
}  // namespace jax_attn

int main() { return jax_attn::RunAll(); }
