// The kernels of sm_90a as in select/cuda.cc, emulated; include the emulation first.
#pragma once

#include "cuda/attention_cuda_cases.h"
#include "cuda/sm90/attention.cuh"
#include "cuda/sm90/mla.cuh"
#include "cuda/sm90/mla_decode.cuh"

namespace jax_attn {
namespace {

// kTiles: 1 is the decode kernel.
template <int kSmallTile, int kTiles>
struct Sm90Tiles {
  template <class Shape>
  struct Traits : Shape {
    static constexpr int kArch = 90;
    static constexpr bool kIsQuantized = Shape::kKvFormat != kPlainFormat;
    static constexpr bool kConverts = kIsQuantized && !Shape::kFp8Matmul;
    static constexpr int kNumConsumers = Shape::kHeadDimVo > 64 || kIsQuantized ? 2 : 3;
    static constexpr int kNumProducers = kConverts && Shape::kHeadDimVo <= 192 ? 2 : 1;
    static constexpr int kNumTiles = kTiles, kTileQ0 = kSmallTile;
    static constexpr int kTileQ1 = kTiles == 1 ? 0 : 64 * kNumConsumers, kTileQ2 = 0;
    static constexpr int kNumWarps = kTiles == 1 ? 16 : 4 * (kNumConsumers + kNumProducers);
    static constexpr int kTileKv =
        Shape::kHeadDimVo > 128 || (kConverts && Shape::kHeadDimQk > 128) ? 64 : 128;
    static constexpr int kNumStages = 0;
  };
  template <class Shape>
  using Body = HopperAttentionBody<Traits<Shape>>;
};

// One consumer, for short sequences.
struct Sm90ShortTiles {
  template <class Shape>
  struct Traits : Shape {
    static constexpr int kArch = 90;
    static constexpr int kNumTiles = 1, kTileQ0 = 64, kTileQ1 = 0, kTileQ2 = 0;
    static constexpr int kTileKv = 64, kNumWarps = 8, kNumStages = 0;
  };
  template <class Shape>
  using Body = HopperAttentionBody<Traits<Shape>>;
};

// The launch decides on TMA maps: the kernel is the same with and without, and compiles once.
template <bool kUsesTma, class Tiles>
struct Sm90KernelOf : Tiles {
  template <class Shape>
  using Traits = typename Tiles::template Traits<Shape>;

  template <class Shape>
  static void AddTensorMaps(const AttentionSpec& spec, i64 num_rows, AttentionParams* p) {
    constexpr int kTmaRows = HopperShape<Traits<Shape>>::kTmaRows;
    p->num_layers = 1;
    p->has_tensor_maps = kUsesTma && kTmaRows > 0;
    auto bits_of = [](const emulation::TmaArray& array) {
      TensorMap bits = {};
      std::memcpy(&bits, &array, sizeof(array));
      return bits;
    };
    auto map = [&](const void* array, i64 head_dim, i64 rows) {
      if (spec.quantized()) head_dim /= 2;  // a column is two values
      return bits_of({static_cast<u16*>(const_cast<void*>(array)), 1, static_cast<u64>(rows),
                      static_cast<u64>(spec.num_kv_heads), static_cast<u64>(head_dim), kTmaRows,
                      1});
    };
    constexpr int kGroup = Shape::kGroupSize;
    p->has_o_map = kUsesTma && 16 % kGroup == 0;
    p->o_map = bits_of({static_cast<u16*>(p->o), 1, static_cast<u64>(spec.max_qo_tokens),
                        static_cast<u64>(spec.num_qo_heads), static_cast<u64>(spec.head_dim_vo),
                        16 / kGroup, kGroup});
    p->k_map = map(p->k, spec.head_dim_qk, num_rows);
    p->v_map = map(p->v, spec.head_dim_vo, num_rows);
    p->k_new_map = map(p->k_new, spec.head_dim_qk, spec.max_qo_tokens);
    p->v_new_map = map(p->v_new, spec.head_dim_vo, spec.max_qo_tokens);
  }
};

template <bool kUsesTma, int kSmallTile, int kTiles = 2>
using Sm90Kernel = Sm90KernelOf<kUsesTma, Sm90Tiles<kSmallTile, kTiles>>;

// More than 32 heads.
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

// Up to 32 heads.
struct Sm90MlaDecode : NoTensorMaps {
  template <class Shape>
  struct Traits : Shape {
    static constexpr int kArch = 90;
    static constexpr int kNumTiles = Shape::kGroupSize > 16 ? 1 : 2;
    static constexpr int kTileQ0 = Shape::kGroupSize > 16 ? 32 : 16;
    static constexpr int kTileQ1 = kNumTiles == 2 ? 32 : 0, kTileQ2 = 0;
    static constexpr int kTileKv = 64, kNumWarps = 12, kNumStages = 0;
  };
  template <class Shape>
  using Body = HopperMlaDecodeBody<Traits<Shape>>;
};

}  // namespace
}  // namespace jax_attn
