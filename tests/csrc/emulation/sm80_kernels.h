// The portable kernels as in select/cuda.cc, emulated; include the emulation first.
#pragma once

#include "cuda/attention_cuda_cases.h"
#include "cuda/sm80/attention.cuh"
#include "cuda/sm80/wide.cuh"

namespace jax_attn {
namespace {

// For head_dim 128 on sm_90, where it is the fallback.
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

// Sm80Kernel for fixed_split.
struct OneHeightKernel : NoTensorMaps {
  template <class Shape>
  struct Traits : Sm80Kernel::Traits<Shape> {
    static constexpr int kNumTiles = 1, kTileQ0 = 64, kTileQ1 = 0;
  };
  template <class Shape>
  using Body = AttentionBody<Traits<Shape>>;
};

template <int kTheArch, int kSmall, int kTall, int kKv>
struct Sm80MlaOf : NoTensorMaps {
  template <class Shape>
  struct Traits : Shape {
    static constexpr int kArch = kTheArch;
    static constexpr int kNumTiles = 2, kTileQ0 = Shape::kGroupSize > kSmall ? kTall : kSmall,
                         kTileQ1 = kTall, kTileQ2 = 0;
    static constexpr int kTileKv = kKv, kNumWarps = 8, kNumStages = 0;
  };
  template <class Shape>
  using Body = WideBody<Traits<Shape>>;
};

// Heads of more than 256 columns; the larger of two tiles alone where kSmall is 0.
template <int kTheArch, int kSmall, int kTall, int kKv>
struct WideOf : NoTensorMaps {
  template <class Shape>
  struct Traits : Shape {
    static constexpr int kArch = kTheArch;
    static constexpr int kNumTiles = kSmall > 0 ? 2 : 1, kTileQ0 = kSmall > 0 ? kSmall : kTall;
    static constexpr int kTileQ1 = kSmall > 0 ? kTall : 0, kTileQ2 = 0;
    static constexpr int kTileKv = kKv, kNumWarps = 8, kNumStages = 0;
  };
  template <class Shape>
  using Body = WideBody<Traits<Shape>>;
};

// On sm_90, whose second tile is as tall as the device allows, and for the least shared memory.
using Sm80Mla = Sm80MlaOf<90, 16, 64, 32>;
using Sm86Mla = Sm80MlaOf<86, 16, 32, 16>;

}  // namespace
}  // namespace jax_attn
