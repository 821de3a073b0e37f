// Variants in the portable MLA kernel of csrc/cuda, without a GPU.
#include "cuda_emulation.h"
// The above stands in for CUDA and comes first.
#include "cuda/sm80/mla.cuh"
#include "variant_cuda_cases.h"

namespace jax_attn {
namespace {

struct Sm80Mla : NoTensorMaps {
  template <class Shape>
  struct Traits : Shape {
    static constexpr int kArch = 90;
    static constexpr int kNumTiles = 2, kTileQ0 = 16, kTileQ1 = 64, kTileQ2 = 0;
    static constexpr int kTileKv = 32, kNumWarps = 8, kNumStages = 0;
  };
  template <class Shape>
  using Body = MlaBody<Traits<Shape>>;
};

}  // namespace
}  // namespace jax_attn

int main() { return jax_attn::RunVariantMlaCases<jax_attn::Sm80Mla, 144>(); }
