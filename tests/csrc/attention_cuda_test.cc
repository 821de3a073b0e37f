// The portable attention kernel of csrc/cuda, without a GPU.
#include "cuda_emulation.h"
// The above stands in for CUDA and comes first.
#include "attention_cuda_cases.h"
#include "cuda/sm80/attention.cuh"

namespace jax_attn {
namespace {

// As select/cuda.cc has it for head_dim 128 on sm_90, which runs it when it has to.
struct Sm80Kernel {
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

int main() { return jax_attn::RunAllCases<jax_attn::Sm80Kernel>(); }
