// The portable attention kernel of csrc/cuda, without a GPU.
#include "cuda_emulation.h"
// The above stands in for CUDA and comes first.
#include "attention_cuda_cases.h"
#include "cuda/sm80/attention.cuh"

namespace jax_attn {
namespace {

// As select/cuda.cc has it for head_dim 128 on sm_90, which runs it when it has to.
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

// The same for fixed_split.
struct OneHeightKernel : NoTensorMaps {
  template <class Shape>
  struct Traits : Sm80Kernel::Traits<Shape> {
    static constexpr int kNumTiles = 1, kTileQ0 = 64, kTileQ1 = 0;
  };
  template <class Shape>
  using Body = AttentionBody<Traits<Shape>>;
};

void RunFixedSplit() {
  RunCase<OneHeightKernel, ShapeOf<64, 64, 4, 16, false, true, false>>(
      {.name = "shared prefixes, fixed split",
       .requests = kForest,
       .kv_split = 64,
       .prefix = 256,
       .half_prefix = 64},
      11);
}

}  // namespace
}  // namespace jax_attn

int main() {
  jax_attn::RunFixedSplit();
  return jax_attn::RunAllCases<jax_attn::Sm80Kernel>();
}
