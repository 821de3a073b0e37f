// Variants in the backward pass on CUDA devices, without a GPU: generated text in emulation,
// against the CPU kernels, which have their own tests.
#include "emulation/cuda_emulation.h"
// The header above stands in for CUDA and must come first.
#include "cuda/backward_cuda_cases.h"
#include "cuda/sm80/backward.cuh"
#include "part.h"
#include "printed_variants.h"

namespace jax_attn {
namespace {

struct GradientCase {
  Case base;
  VariantGradient gradient;
  int range = 3;  // i32 operands are in [0, range)
  bool scatters = false;
};

template <class Traits>
void RunInPart(const GradientCase& c, unsigned seed, Poison poison) {
  using Body = BackwardBody<Traits>;
  RunBackward<Traits>(
      c.base, seed, poison, c.scatters ? kScattered : kOfCase,
      [](const Case& c, const AttentionSpec& spec, const BackwardCudaParams& params,
         std::mt19937& random) {
        if (params.needs_portable != nullptr) {
          std::printf("FAILED %s: variants have the portable kernel alone\n", c.name);
          ++g_failures;
        }
        Emulate<Body>(c, params, kBackwardReadPlan, random);
        if (spec.paged()) Emulate<Body>(c, params, kBackwardLinkPages, random);
        Emulate<Body>(c, params, kBackwardRows, random);
        if (!Body::kHasElements) return;
        for (const i32 phase : {kBackwardBounds, kBackwardOperands, kBackwardToOperands}) {
          Emulate<Body>(c, params, phase, random);
        }
      },
      c.gradient, c.range);
  std::printf("%s: %d warps, keys %d by %d, queries %d by %d\n", c.base.name,
              Body::kNumThreads / kWarpSize, Body::KeysPass::kOwned, Body::KeysPass::kStep,
              Body::QueriesPass::kOwned, Body::QueriesPass::kStep);
}

template <class Traits>
void Run(const GradientCase& c, unsigned seed, Poison poison = kNone) {
  g_part.has_asked = true;
  if constexpr (InPart<Traits>()) {
    if (TakesCase<Traits>()) RunInPart<Traits>(c, seed, poison);
  }
}

// With the spec's causal mask, or without.
template <int kDim, int kGroup, int kPage, class V, bool kCap = false, int kElement = kElementBf16>
using Masked = typename Kernel<With<ShapeOf<kDim, kDim, kGroup, kPage, false, true, kCap>, V>, 90,
                               kElement>::Traits;
template <int kDim, int kGroup, int kPage, class V>
using ListedMasked =
    typename Kernel<Listed<With<ShapeOf<kDim, kDim, kGroup, kPage, false, true, false>, V>>,
                    90>::Traits;
template <int kDim, int kGroup, int kPage, class V, int kElement = kElementBf16>
using Full = typename Kernel<With<ShapeOf<kDim, kDim, kGroup, kPage, false, false, false>, V>, 90,
                             kElement>::Traits;
// With windows and a soft cap.
template <class V>
using OddShape = With<ShapeOf<40, 72, 5, 5, true, true, true>, V>;
template <class V>
using Odd = typename Kernel<OddShape<V>, 90>::Traits;
template <class V>
using OddF32 = typename Kernel<OddShape<V>, 120, kElementF32>::Traits;

int RunAll() {
  const std::vector<Request> mixed = {{45, 70}, {3, 5}, {1, 200}, {0, 9}, {5, 2}, {1, 0}};
  const std::vector<Request> prompts = {{70, 70}, {150, 170}, {3, 100}, {17, 17}};
  // A prompt and its answers; one has a query before its first key.
  const std::vector<Request> group = {{96, 96}, {20, 116}, {33, 129}, {40, 136}, {20, 110}};
  // Tables of more than one block have the first one's pages.
  const std::vector<Request> scattered = {{70, 170}, {20, 116}, {33, 129}, {9, 90}, {40, 64}};
  using variant::DocumentsGradient;
  Run<Masked<64, 4, 0, variant::AlibiGradient>>(
      {{.name = "alibi, ragged, sinks", .requests = prompts, .sinks = true}, AlibiGradient()}, 1);
  Run<Masked<128, 2, 16, variant::AlibiGradient>>(
      {{.name = "alibi, d128, pages", .requests = mixed}, AlibiGradient()}, 2);
  Run<Masked<64, 2, 16, variant::AlibiGradient>>(
      {{.name = "alibi, a prompt's pages", .requests = group, .prefix = 96}, AlibiGradient()}, 3);
  Run<Masked<64, 2, 16, variant::AlibiGradient>>(
      {{.name = "alibi, pages at other places", .requests = scattered}, AlibiGradient(), 3, true},
      4);
  const Case odd = {.name = "relative bias, windows, soft cap, sinks, odd sizes",
                    .requests = {{100, 130}, {7, 3}, {0, 9}, {40, 200}, {1, 0}},
                    .window_left = 30,
                    .window_right = 3,
                    .soft_cap = 3.0,
                    .sinks = true};
  Run<Odd<variant::RelativeBiasGradient>>({odd, BiasGradient(RelativeBias())}, 5);
  Run<OddF32<variant::RelativeBiasGradient>>({odd, BiasGradient(RelativeBias())}, 6);
  Run<Full<48, 1, 0, variant::DenseBiasGradient>>(
      {{.name = "dense bias, ragged", .requests = prompts, .window_right = -1},
       BiasGradient(DenseBias())},
      7);
  Run<Masked<64, 4, 16, variant::CapGradient>>(
      {{.name = "soft cap by hand", .requests = mixed, .sharpness = 5}, CapGradient()}, 8);
  Run<Masked<64, 4, 16, variant::CapGradient, true>>(
      {{.name = "soft cap by hand, of a soft cap", .requests = prompts, .soft_cap = 3.0},
       CapGradient()},
      9);
  Run<Full<64, 4, 16, variant::SigmoidGradient>>(
      {{.name = "sigmoid, window by mask", .requests = prompts, .window_right = -1},
       SigmoidGradient()},
      10);
  Run<Full<64, 4, 16, variant::SigmoidGradient, kElementF32>>(
      {{.name = "sigmoid, f32", .requests = prompts, .window_right = -1}, SigmoidGradient()}, 11);
  Run<Masked<64, 4, 16, variant::FunctionsGradient>>(
      {{.name = "functions of the C library", .requests = mixed}, PlainGradient(Functions())}, 19);
  Run<Masked<64, 4, 1, variant::LinearGradient, true>>(
      {{.name = "linear, of a soft cap", .requests = mixed, .soft_cap = 3.0},
       PlainGradient(Linear())},
      12);
  Run<Full<64, 2, 0, DocumentsGradient>>(
      {{.name = "documents, ragged", .requests = prompts, .window_right = -1},
       PlainGradient(Documents())},
      13);
  Run<Masked<128, 4, 16, DocumentsGradient>>(
      {{.name = "documents, d128, pages at other places", .requests = scattered, .sinks = true},
       PlainGradient(Documents()),
       3,
       true},
      14);
  Run<Full<64, 4, 16, variant::PrefixLmGradient>>(
      {{.name = "prefix-LM", .requests = mixed, .window_right = -1}, PlainGradient(PrefixLm()), 60},
      15);
  Run<Full<64, 2, 16, variant::PrefixLmGradient>>(
      {{.name = "prefix-LM, pages at other places", .requests = scattered, .window_right = -1},
       PlainGradient(PrefixLm()),
       100,
       true},
      19);
  Run<Full<64, 2, 16, variant::DenseBiasGradient>>(
      {{.name = "dense bias, pages at other places", .requests = scattered, .window_right = -1},
       BiasGradient(DenseBias()),
       3,
       true},
      20);
  Run<Full<64, 4, 16, variant::TreeGradient>>(
      {{.name = "tree of drafts", .requests = {{7, 300}, {16, 90}, {1, 40}}, .window_right = -1},
       TreeGradient(),
       1 << 30},
      16);
  // The bias depends on keys alone, so that plans share prefixes.
  Run<Masked<64, 4, 16, variant::KeyBiasGradient>>({{.name = "bias of keys, shared prefixes",
                                                     .requests = kForest,
                                                     .prefix = 256,
                                                     .half_prefix = 64},
                                                    BiasGradient(KeyBias())},
                                                   17);
  // Step lists with operands, and a mask that applies only to marked steps.
  const std::vector<Request> long_ones = {{70, 400}, {150, 300}, {2, 500}, {0, 9}, {1, 300}};
  Run<ListedMasked<64, 4, 0, variant::AlibiGradient>>(
      {{.name = "lists, alibi, ragged, splits", .requests = long_ones, .kv_split = 64},
       AlibiGradient()},
      60);
  Run<ListedMasked<128, 2, 16, DocumentsGradient>>(
      {{.name = "lists, documents, pages at other places", .requests = scattered},
       PlainGradient(Documents()),
       3,
       true},
      61);
  Run<typename Kernel<Listed<OddShape<variant::RelativeBiasGradient>>, 90>::Traits>(
      {odd, BiasGradient(RelativeBias())}, 62);
  Run<typename Kernel<Listed<OddShape<variant::RelativeBiasGradient>>, 120, kElementF32>::Traits>(
      {odd, BiasGradient(RelativeBias())}, 63);
  Run<ListedMasked<64, 4, 16, variant::SigmoidGradient>>(
      {{.name = "lists, sigmoid, window by mask", .requests = long_ones}, SigmoidGradient()}, 64);
  for (const Poison poison : {kNanQ, kInfiniteDo, kNanK}) {
    Run<ListedMasked<128, 2, 16, DocumentsGradient>>(
        {{.name = "lists, documents, not finite", .requests = long_ones},
         PlainGradient(Documents())},
        65 + poison, poison);
  }
  // Two warps; dk and dv take an iteration each.
  using Wide =
      typename Kernel<With<ShapeOf<256, 256, 1, 16, false, true, false>, variant::AlibiGradient>,
                      120>::Traits;
  Run<Wide>(
      {{.name = "alibi, d256", .requests = {{40, 90}, {20, 20}}, .kv_heads = 1}, AlibiGradient()},
      18);
  // Two warps have the same rows, whose terms count once.
  using Far =
      typename Kernel<With<ShapeOf<512, 320, 1, 16, false, true, false>, variant::AlibiGradient>,
                      90>::Traits;
  Run<Far>({{.name = "alibi, d512x320", .requests = {{40, 90}, {20, 20}}, .kv_heads = 1},
            AlibiGradient()},
           19);
#define JAX_ATTN_RANDOM(i)                                                         \
  Run<Masked<40, 4, i % 2 == 0 ? 16 : 5, variant::RandomGradient##i, i % 3 == 0>>( \
      {{.name = "random " #i,                                                      \
        .requests = mixed,                                                         \
        .window_right = 40,                                                        \
        .soft_cap = i % 3 == 0 ? 4.0 : 0.0,                                        \
        .sinks = i % 2 == 1},                                                      \
       PlainGradient(RandomProgram(i)),                                            \
       60},                                                                        \
      30 + i)
  JAX_ATTN_RANDOM(0);
  JAX_ATTN_RANDOM(1);
  JAX_ATTN_RANDOM(2);
  JAX_ATTN_RANDOM(3);
  JAX_ATTN_RANDOM(4);
  JAX_ATTN_RANDOM(5);
#undef JAX_ATTN_RANDOM
  for (const Poison poison :
       {kNanQ, kInfiniteQ, kInfiniteDo, kNanLse, kInfiniteLse, kNanD, kNanK, kInfiniteV}) {
    const unsigned seed = 40 + poison;
    const Case ragged = {.name = "not finite", .requests = {{30, 40}, {60, 70}}, .kv_heads = 1};
    Run<Masked<64, 4, 0, variant::AlibiGradient>>({ragged, AlibiGradient()}, seed, poison);
    Case full = {.name = "not finite, documents",
                 .requests = {{30, 40}, {60, 70}},
                 .window_right = -1,
                 .kv_heads = 1};
    Run<Full<64, 2, 0, DocumentsGradient>>({full, PlainGradient(Documents())}, seed, poison);
    Run<Full<64, 4, 16, variant::SigmoidGradient>>({full, SigmoidGradient()}, seed, poison);
  }
  for (const Poison poison : {kNanQ, kNanK, kInfiniteV}) {
    const Case pages = {.name = "not finite, pages at other places", .requests = scattered};
    Run<Masked<64, 4, 16, DocumentsGradient>>({pages, PlainGradient(Documents()), 3, true},
                                              50 + poison, poison);
  }
  if (g_failures > 0) std::printf("%d failures\n", g_failures);
  return g_failures > 0;
}

}  // namespace
}  // namespace jax_attn

int main() { return jax_attn::RunAll(); }
