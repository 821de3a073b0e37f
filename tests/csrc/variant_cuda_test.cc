// Variants in the portable attention kernel of csrc/cuda, without a GPU.
#include "cuda_emulation.h"
// The above stands in for CUDA and comes first.
#include "cuda/sm80/attention.cuh"
#include "variant_cuda_cases.h"

namespace jax_attn {
namespace {

struct Sm80Kernel : NoTensorMaps {
  template <class Shape>
  struct Traits : Shape {
    static constexpr int kArch = 90;
    static constexpr int kNumTiles = 2, kTileQ0 = 16, kTileQ1 = 128, kTileQ2 = 0;
    static constexpr int kTileKv = 64, kNumWarps = 4, kNumStages = 4;
  };
  template <class Shape>
  using Body = AttentionBody<Traits<Shape>>;
};

}  // namespace
}  // namespace jax_attn

int main() { return jax_attn::RunVariantCases<jax_attn::Sm80Kernel>(); }
