// The MLA kernel of sm_90a, without a GPU.
#include "cuda_emulation.h"
#include "cuda_emulation_sm90.h"
// The above stand in for CUDA and come first.
#include "attention_cuda_cases.h"
#include "cuda/sm90/mla.cuh"

namespace jax_attn {
namespace {

// As select/cuda.cc has it.
struct Sm90Mla : NoTensorMaps {
  template <class Shape>
  struct Traits : Shape {
    static constexpr int kArch = 90;
    static constexpr int kNumTiles = 1, kTileQ0 = 64, kTileQ1 = 0, kTileQ2 = 0;
    static constexpr int kTileKv = 64, kNumWarps = 12, kNumStages = 0;
  };
  template <class Shape>
  using Body = HopperMlaBody<Traits<Shape>>;
};

}  // namespace
}  // namespace jax_attn

int main() {
  using namespace jax_attn;
  return RunMlaCases<Sm90Mla, 128, 192>();
}
