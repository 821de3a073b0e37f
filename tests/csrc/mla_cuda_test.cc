// The portable MLA kernel of csrc/cuda, without a GPU.
#include "cuda_emulation.h"
// The above stands in for CUDA and comes first.
#include "attention_cuda_cases.h"
#include "cuda/sm80/mla.cuh"

namespace jax_attn {
namespace {

// As select/cuda.cc has it: for sm_90, whose second tile is as tall as the device allows, and for
// the least shared memory.
template <int kTheArch, int kSmall, int kTall, int kKv>
struct Sm80Mla : NoTensorMaps {
  template <class Shape>
  struct Traits : Shape {
    static constexpr int kArch = kTheArch;
    static constexpr int kNumTiles = 2, kTileQ0 = Shape::kGroupSize > kSmall ? kTall : kSmall,
                         kTileQ1 = kTall, kTileQ2 = 0;
    static constexpr int kTileKv = kKv, kNumWarps = 8, kNumStages = 0;
  };
  template <class Shape>
  using Body = MlaBody<Traits<Shape>>;
};

}  // namespace
}  // namespace jax_attn

int main() {
  using namespace jax_attn;
  return RunMlaCases<Sm80Mla<90, 16, 64, 32>, 144, 176>() |
         RunMlaCases<Sm80Mla<86, 16, 32, 16>, 144, 176>();
}
