// The recurrence of linear attention without a GPU: cuda/any/linear_attention.cuh runs in
// emulation.
#include "emulation/cuda_emulation.h"
// The header above stands in for CUDA and must come first.
#include "cuda/any/linear_attention.cuh"
#include "cuda/linear_attention_cuda_cases.h"
#include "part.h"

namespace jax_attn {
namespace {

template <class Traits>
void RunTraits(int longest) {
  g_part.has_asked = true;
  if constexpr (InPart<Traits>()) {
    using Body = LinearRecurrenceBody<Traits>;
    for (const LinearCase& c : LinearBatches(longest)) {
      if (!TakesCase<Traits>()) continue;
      RunLinearCase<Traits>(c, {2e-5}, [&](const LinearAttentionParams& p) {
        // A CTA for each unit, and fewer.
        const int units = Max(p.plan.max_chunks, 1) * p.num_v_heads * Body::kTiles;
        const int ctas = p.num_v_heads == 3 ? 5 : units;
        emulation::machine.Launch(ctas, Body::kNumThreads, 1, [&] { Body::Run(p); });
      });
    }
  }
}

}  // namespace
}  // namespace jax_attn

int main() {
  using namespace jax_attn;
  constexpr int kB = kElementBf16, kH = kElementF16, kF = kElementF32;
  // Type, dims, decay, delta rule, norm, bf16 states, columns of a CTA.
  RunTraits<LinearTraits<kB, 128, 128, kHeadDecay, true, true, true>>(20);
  RunTraits<LinearTraits<kB, 128, 128, kHeadDecay, true, true, false>>(20);
  RunTraits<LinearTraits<kF, 64, 40, kChannelDecay, true, false, false>>(35);
  RunTraits<LinearTraits<kH, 72, 136, kNoDecay, false, false, true>>(11);
  RunTraits<LinearTraits<kB, 8, 8, kChannelDecay, false, true, true>>(70);
  RunTraits<LinearTraits<kF, 16, 256, kHeadDecay, false, false, true>>(9);
  RunTraits<LinearTraits<kB, 256, 72, kHeadDecay, true, false, false>>(9);
  RunTraits<LinearTraits<kF, 256, 64, kNoDecay, true, true, true, 64>>(9);
  RunTraits<LinearTraits<kB, 136, 72, kHeadDecay, true, true, true, 64>>(
      9);  // rows behind the last
  RunTraits<LinearTraits<kB, 136, 8, kChannelDecay, true, false, false, 64>>(9);
  RunTraits<LinearTraits<kH, 40, 200, kChannelDecay, true, true, false, 64>>(9);
  if (g_failures == 0) std::printf("linear_attention_cuda_test: ok\n");
  return g_failures != 0;
}
