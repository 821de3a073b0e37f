// The kernels of the backward pass without a GPU: in emulation, on plans of the real planner,
// against the CPU kernels, which have their own tests.
#include "emulation/cuda_emulation.h"
// The header above stands in for CUDA and must come first.
#include "cuda/backward_cuda_cases.h"
#include "cuda/sm80/backward.cuh"
#include "part.h"

namespace jax_attn {
namespace {

template <class Traits>
void RunBackwardInPart(const Case& c, unsigned seed, Poison poison, Tables tables) {
  using Body = BackwardBody<Traits>;
  RunBackward<Traits>(c, seed, poison, tables,
                      [](const Case& c, const AttentionSpec& spec, const BackwardCudaParams& given,
                         std::mt19937& random) {
                        BackwardCudaParams params = given;
                        // As without the Hopper kernel.
                        params.needs_portable = params.run_ends = nullptr;
                        params.page_lens = nullptr;
                        Emulate<Body>(c, params, kBackwardReadPlan, random);
                        if (spec.paged()) Emulate<Body>(c, params, kBackwardLinkPages, random);
                        Emulate<Body>(c, params, kBackwardRows, random);
                      });
  std::printf("%s: %d warps, keys %d by %d, queries %d by %d\n", c.name,
              Body::kNumThreads / kWarpSize, Body::KeysPass::kOwned, Body::KeysPass::kStep,
              Body::QueriesPass::kOwned, Body::QueriesPass::kStep);
}

template <class Traits>
void RunBackward(const Case& c, unsigned seed, Poison poison = kNone, Tables tables = kOfCase) {
  g_part.has_asked = true;
  if constexpr (InPart<Traits>()) {
    if (TakesCase<Traits>()) RunBackwardInPart<Traits>(c, seed, poison, tables);
  }
}

template <class Traits>
void RunDamaged(const char* name) {
  const Case c = {.name = name, .requests = {{20, 30}, {3, 17}}};
  RunDamagedHeaders<Traits>(
      c, [&](const AttentionSpec&, const BackwardCudaParams& params, std::mt19937& random) {
        for (const i32 phase : {kBackwardReadPlan, kBackwardLinkPages, kBackwardRows}) {
          Emulate<BackwardBody<Traits>>(c, params, phase, random);
        }
      });
}

int RunAll() {
  const std::vector<Request> mixed = {{45, 70}, {3, 5}, {1, 200}, {0, 9}, {5, 2}, {1, 0}};
  const std::vector<Request> documents = {{70, 70}, {150, 150}, {1, 1}};
  // A prompt and its answers; one has a query before its first key.
  const std::vector<Request> group = {{96, 96}, {20, 116}, {33, 129}, {40, 136}, {20, 110}};
  // Tables of more than one block have the first one's pages.
  const std::vector<Request> scattered = {{70, 170}, {20, 116}, {33, 129}, {9, 90}, {40, 64}};
  const std::vector<Request> long_ones = {{70, 400}, {150, 300}, {2, 500}, {0, 9}, {1, 300}};
  using Ragged64 = Kernel<ShapeOf<64, 64, 4, 0, false, true, false>, 90>::Traits;
  using Ragged128 = Kernel<ShapeOf<128, 128, 2, 0, false, true, false>, 90>::Traits;
  using Page16 = Kernel<ShapeOf<64, 64, 2, 16, false, true, false>, 90>::Traits;
  using OddShape = ShapeOf<40, 72, 5, 5, true, true, true>;
  using Odd = Kernel<OddShape, 90>::Traits;
  using OddF32 = Kernel<OddShape, 120, kElementF32>::Traits;
  // Two warps; dk and dv take an iteration each.
  using Wide = Kernel<ShapeOf<256, 256, 1, 16, false, true, false>, 120>::Traits;
  RunBackward<Ragged64>({.name = "documents, d64", .requests = documents}, 1);
  RunBackward<Ragged128>({.name = "documents, d128", .requests = documents}, 2);
  RunBackward<Ragged64>({.name = "mixed, sinks", .requests = mixed, .sinks = true}, 3);
  RunBackward<Ragged64>({.name = "empty", .requests = {}}, 4);
  RunBackward<Ragged64>(
      {.name = "full", .requests = {{45, 70}, {130, 30}}, .window_right = 1 << 29}, 5);
  RunBackward<Page16>({.name = "pages", .requests = mixed}, 6);
  RunBackward<Page16>({.name = "a prompt's pages", .requests = group, .prefix = 96}, 7);
  RunBackward<Page16>({.name = "a tree of prefixes, split",
                       .requests = kForest,
                       .kv_split = 64,
                       .prefix = 256,
                       .half_prefix = 64},
                      8);
  RunBackward<Page16>({.name = "pages at other places", .requests = scattered}, 9, kNone,
                      kScattered);
  const Case odd = {.name = "windows, soft cap, sinks, odd sizes",
                    .requests = {{100, 130}, {7, 3}, {0, 9}, {40, 200}, {1, 0}},
                    .window_left = 30,
                    .window_right = 3,
                    .soft_cap = 3.0,
                    .sinks = true};
  RunBackward<Odd>(odd, 10);
  RunBackward<OddF32>(odd, 11);
  const Case odd_pages = {.name = "odd pages at other places",
                          .requests = scattered,
                          .window_left = 40,
                          .soft_cap = 3.0};
  RunBackward<Odd>(odd_pages, 12, kNone, kScattered);
  RunBackward<OddF32>(odd_pages, 13, kNone, kScattered);
  RunBackward<Wide>({.name = "d256", .requests = {{40, 90}, {20, 20}}, .kv_heads = 1}, 14);
  // With a soft cap an infinite logit becomes finite.
  using Cap = Kernel<ShapeOf<64, 64, 4, 0, false, true, true>, 90>::Traits;
  using CapF32 = Kernel<ShapeOf<64, 64, 4, 0, false, true, true>, 90, kElementF32>::Traits;
  // Rows that see two steps of keys; dv has its own iteration.
  using WideCap = Kernel<ShapeOf<256, 256, 1, 16, false, true, true>, 120>::Traits;
  for (const Poison poison : {kInfiniteQ, kInfiniteK}) {
    const Case c = {
        .name = "infinite, soft cap", .requests = {{64, 128}}, .soft_cap = 3.0, .kv_heads = 1};
    RunBackward<Cap>(c, 60 + poison, poison);
    RunBackward<CapF32>(c, 60 + poison, poison);
    RunBackward<WideCap>(c, 60 + poison, poison);
  }
  // A NaN of dk is one of dv, too, though dv has its own iteration.
  for (const Poison poison : {kNanLse, kNanD}) {
    RunBackward<Wide>({.name = "not finite, d256", .requests = {{40, 90}, {20, 20}}, .kv_heads = 1},
                      65 + poison, poison);
  }
  // Two warps have the same rows: Gemma 4's heads on devices with 228 and 164 KB, and dims whose
  // second half is no whole one, or whose dk and dv fit one iteration.
  using Far = Kernel<ShapeOf<512, 512, 2, 16, false, true, false>, 90>::Traits;
  using FarOf80 = Kernel<ShapeOf<512, 512, 8, 0, false, true, false>, 80>::Traits;
  using FarF32 = Kernel<ShapeOf<512, 512, 1, 16, false, true, false>, 90, kElementF32>::Traits;
  using OddFarShape = ShapeOf<264, 40, 5, 5, true, true, true>;
  using OddFar = Kernel<OddFarShape, 90>::Traits;
  using OddFarF32 = Kernel<OddFarShape, 80, kElementF32>::Traits;
  using FarValues = Kernel<Listed<ShapeOf<64, 408, 3, 0, false, true, false>>, 80>::Traits;
  RunBackward<Far>(
      {.name = "a prompt's pages, d512", .requests = group, .kv_heads = 1, .prefix = 96}, 90);
  RunBackward<FarOf80>({.name = "d512, 164 KB", .requests = {{9, 40}, {1, 70}}, .kv_heads = 1}, 91);
  RunBackward<FarF32>({.name = "d512, f32", .requests = {{40, 90}, {20, 20}}, .kv_heads = 1}, 92);
  RunBackward<OddFar>(odd, 93);
  RunBackward<OddFarF32>(odd_pages, 94, kNone, kScattered);
  RunBackward<FarValues>({.name = "lists, d64x408", .requests = long_ones, .kv_heads = 1}, 95);
  for (const Poison poison : {kInfiniteQ, kInfiniteDo, kNanLse, kNanD, kNanK, kInfiniteV}) {
    const Case c = {.name = "not finite, d512", .requests = {{40, 90}, {20, 20}}, .kv_heads = 1};
    RunBackward<Far>(c, 95 + poison, poison);
  }
  // Step lists whose steps are no blocks of keys and whose tiles are no blocks of rows.
  using Lists = Kernel<Listed<ShapeOf<64, 64, 4, 0, false, true, false>>, 90>::Traits;
  using ListsOfPages = Kernel<Listed<ShapeOf<128, 128, 2, 16, false, false, false>>, 90>::Traits;
  using OddLists = Kernel<Listed<OddShape>, 90>::Traits;
  using OddListsF32 = Kernel<Listed<OddShape>, 120, kElementF32>::Traits;
  RunBackward<Lists>({.name = "lists", .requests = long_ones, .sinks = true}, 70);
  RunBackward<Lists>({.name = "lists, split", .requests = long_ones, .kv_split = 64}, 71);
  RunBackward<ListsOfPages>({.name = "lists, pages", .requests = long_ones, .window_right = -1},
                            72);
  RunBackward<ListsOfPages>(
      {.name = "lists, pages at other places", .requests = scattered, .window_right = -1}, 73,
      kNone, kScattered);
  RunBackward<OddLists>(odd, 74);
  RunBackward<OddListsF32>(odd, 75);
  RunBackward<OddListsF32>(odd_pages, 76, kNone, kScattered);
  for (const Poison poison : {kNanQ, kNanK, kInfiniteV}) {
    RunBackward<Lists>({.name = "lists, not finite", .requests = long_ones}, 80 + poison, poison);
  }
  for (const Poison poison :
       {kNanQ, kInfiniteQ, kInfiniteDo, kNanLse, kInfiniteLse, kNanD, kNanK, kInfiniteV}) {
    RunBackward<Ragged64>({.name = "not finite", .requests = {{30, 40}, {60, 70}}, .kv_heads = 1},
                          20 + poison, poison);
  }
  for (const Poison poison : {kNanQ, kNanK, kInfiniteV}) {
    const Case windows = {.name = "not finite, window, pages",
                          .requests = {{80, 90}, {60, 70}},
                          .window_left = 9,
                          .soft_cap = 3.0,
                          .kv_heads = 1};
    RunBackward<Odd>(windows, 30 + poison, poison);
    RunBackward<OddF32>(windows, 40 + poison, poison);
  }
  RunDamaged<Ragged64>("damaged headers");
  RunDamaged<Page16>("damaged headers, pages");
  if (g_failures > 0) std::printf("%d failures\n", g_failures);
  return g_failures > 0;
}

}  // namespace
}  // namespace jax_attn

int main() { return jax_attn::RunAll(); }
