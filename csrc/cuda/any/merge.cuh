// Folds states of the same rows: o = sum_i exp(lse_i - lse) * o_i. Memory bound.
#pragma once

#include "cuda/common/state.cuh"
#include "cuda/common/types.cuh"

namespace jax_attn {

template <class Traits>
struct MergeBody {
  using E = Element<Traits::kDtype>;
  static constexpr int kNumThreads = 256;
  static constexpr int kSmemBytes = 0;
  static constexpr int kMinCtasPerSm = 4;
  static constexpr bool kIsF32 = Traits::kDtype == kElementF32;
  static constexpr int kVectorElements = 16 / E::kBytes;

  __device__ __forceinline__ static void Run(const MergeParams& p) {
    if (p.head_dim_vo % kVectorElements == 0) {
      Fold<kVectorElements>(p);
    } else {
      Fold<1>(p);
    }
  }

  // kWidth elements a thread and step; the threads of a CTA cover whole rows.
  template <int kWidth>
  __device__ __forceinline__ static void Fold(const MergeParams& p) {
    const int row_parts = p.head_dim_vo / kWidth;
    const int row_threads = Min(row_parts, kNumThreads);
    const int rows = kNumThreads / row_threads;  // of a CTA and step
    const int first_part = threadIdx.x % row_threads, first_row = threadIdx.x / row_threads;
    if (first_row >= rows) return;
    for (i64 row = static_cast<i64>(blockIdx.x) * rows + first_row; row < p.num_rows;
         row += static_cast<i64>(gridDim.x) * rows) {
      for (int part = first_part; part < row_parts; part += row_threads) {
        FoldPart<kWidth>(p, row, part);
      }
    }
  }

  // States are read four at a time: all loads of four states are under way before the first is
  // used.
  template <int kWidth>
  __device__ __forceinline__ static void FoldPart(const MergeParams& p, i64 row, int part) {
    constexpr int kBatch = 4;
    const i64 at = row * p.head_dim_vo + part * kWidth;
    const i64 state_elements = p.num_rows * p.head_dim_vo;
    float max_lse = -Infinity(), sum = 0.0f;  // in natural log: a single state comes out exactly
    float o[kWidth] = {};
    for (int first = 0; first < p.num_states; first += kBatch) {
      float lse[kBatch];
      Elements<kWidth> x[kBatch];
      float new_max = max_lse;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        lse[i] = -Infinity();
        if (first + i < p.num_states) {
          lse[i] = p.lse_parts[(first + i) * p.num_rows + row];
          x[i] = Load<kWidth>(p.o_parts, (first + i) * state_elements + at);
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) new_max = fmaxf(new_max, lse[i]);
      const float factor = Weight(max_lse, new_max);
      max_lse = new_max;
      sum *= factor;
#pragma unroll
      for (int c = 0; c < kWidth; ++c) o[c] *= factor;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (lse[i] != -Infinity()) {  // else o counts for nothing, whatever it is
          const float weight = Weight(lse[i], max_lse);
          sum += weight;
#pragma unroll
          for (int c = 0; c < kWidth; ++c) o[c] = fmaf(weight, x[i].Float(c), o[c]);
        }
      }
    }
    const RowResult result = FinishRow({0.0f, sum}, -Infinity());
#pragma unroll
    for (int c = 0; c < kWidth; ++c) o[c] *= result.o_scale;
    Store<kWidth>(p.o, at, o);
    if (part == 0) p.lse[row] = max_lse + result.lse_log2 * kLn2;
  }

  __device__ __forceinline__ static float Weight(float lse, float max_lse) {
    return Exp2((lse - FiniteMax(max_lse)) * kLog2E);
  }

  // Elements as they are in memory, which takes the fewest registers.
  template <int kWidth>
  struct Elements {
    u32 words[kWidth == 1 ? 1 : 4];

    __device__ __forceinline__ float Float(int c) const {
      if constexpr (kIsF32) {
        return __uint_as_float(words[c]);
      } else {
        return E::ToFloat(static_cast<u16>(words[c / 2] >> (c % 2 * 16)));
      }
    }
  };

  template <int kWidth>
  __device__ __forceinline__ static Elements<kWidth> Load(const void* array, i64 at) {
    if constexpr (kWidth > 1) {
      const uint4 v = LoadConstant16(static_cast<const char*>(array) + at * E::kBytes);
      return {{v.x, v.y, v.z, v.w}};
    } else if constexpr (kIsF32) {
      return {{static_cast<const u32*>(array)[at]}};
    } else {
      return {{static_cast<const u16*>(array)[at]}};
    }
  }

  template <int kWidth>
  __device__ __forceinline__ static void Store(void* array, i64 at, const float (&x)[kWidth]) {
    if constexpr (kWidth == 1) {
      if constexpr (kIsF32) {
        static_cast<float*>(array)[at] = x[0];
      } else {
        static_cast<u16*>(array)[at] = static_cast<u16>(E::Pack(x[0], 0.0f));
      }
    } else if constexpr (kIsF32) {
      Store4<kElementF32>(array, at, make_float4(x[0], x[1], x[2], x[3]));
    } else {
      *reinterpret_cast<uint4*>(static_cast<u16*>(array) + at) = make_uint4(
          E::Pack(x[0], x[1]), E::Pack(x[2], x[3]), E::Pack(x[4], x[5]), E::Pack(x[6], x[7]));
    }
  }
};

}  // namespace jax_attn
