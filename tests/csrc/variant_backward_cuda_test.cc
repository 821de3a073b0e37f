// Variants in the backward pass on CUDA devices, without a GPU: generated text in emulation, against
// the CPU kernels, which have tests of their own.
#include "cuda_emulation.h"
// The above stands in for CUDA and comes first.
#include "backward_cuda_cases.h"
#include "cuda/sm80/backward.cuh"
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
void Run(const GradientCase& c, unsigned seed, Poison poison = kNone) {
  using Body = BackwardBody<Traits>;
  RunBackward<Traits>(
      c.base, seed, poison, c.scatters,
      [](const Case& c, const AttentionSpec& spec, const BackwardCudaParams& params,
         std::mt19937& random) {
        if (params.is_not_finite != nullptr) {
          std::printf("FAILED %s: variants have the portable kernel alone\n", c.name);
          ++g_failures;
        }
        Emulate<Body>(c, params, kBackwardReadPlan, random);
        if (spec.paged()) Emulate<Body>(c, params, kBackwardLinkPages, random);
        Emulate<Body>(c, params, kBackwardRows, random);
      },
      c.gradient, c.range);
  std::printf("%s: %d warps, keys %d by %d, queries %d by %d\n", c.base.name,
              Body::kNumThreads / kWarpSize, Body::KeysPass::kOwned, Body::KeysPass::kStep,
              Body::QueriesPass::kOwned, Body::QueriesPass::kStep);
}

template <int kDim, int kGroup, int kPage, bool kCap, class V, int kArch = 90,
          int kElement = kElementBf16>
using Causal_ = typename Kernel<With<ShapeOf<kDim, kDim, kGroup, kPage, false, true, kCap>, V>,
                                kArch, kElement>::Traits;
template <int kDim, int kGroup, int kPage, class V, int kArch = 90, int kElement = kElementBf16>
using Full = typename Kernel<With<ShapeOf<kDim, kDim, kGroup, kPage, false, false, false>, V>,
                             kArch, kElement>::Traits;

int RunAll() {
  const std::vector<Request> mixed = {{45, 70}, {3, 5}, {1, 200}, {0, 9}, {5, 5}, {1, 1}};
  const std::vector<Request> prompts = {{70, 70}, {150, 150}, {3, 100}, {17, 17}};
  // Tables of more than one block name the first one's pages.
  const std::vector<Request> scattered = {{70, 170}, {20, 116}, {33, 129}, {9, 90}, {40, 64}};
  const std::vector<Request> group = {{96, 96}, {20, 116}, {33, 129}, {40, 136}, {20, 110}};
  Run<Causal_<64, 4, 0, false, variant::AlibiGradient>>(
      {{.name = "alibi, ragged", .requests = prompts, .sinks = true}, PlainGradient(Alibi())}, 1);
  Run<Causal_<128, 2, 16, false, variant::AlibiGradient>>(
      {{.name = "alibi, d128, pages", .requests = mixed}, PlainGradient(Alibi())}, 2);
  return g_failures > 0;
}

}  // namespace
}  // namespace jax_attn

int main() { return jax_attn::RunAll(); }
