// Merges states of the same rows: o = sum_i exp(lse_i - lse) * o_i. Memory bound.
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

  // Each thread has four vectors in flight: of four states of a row, or of two states of two rows.
  __device__ __forceinline__ static void Run(const MergeParams& p) {
    if (p.head_dim_vo % kVectorElements != 0) {
      Fold<1, 1, 4>(p);
    } else if (MergeRows(p) == 2) {
      Fold<kVectorElements, 2, 2>(p);
    } else {
      Fold<kVectorElements, 1, 4>(p);
    }
  }

  // Each thread merges kWidth elements of kRows rows at a time, kBatch states at a time. The
  // threads of a CTA cover whole rows.
  template <int kWidth, int kRows, int kBatch>
  __device__ __forceinline__ static void Fold(const MergeParams& p) {
    const int row_parts = p.head_dim_vo / kWidth;
    const int row_threads = Min(row_parts, kNumThreads);
    const int rows = kNumThreads / row_threads;  // rows of a CTA, side by side
    const int first_part = threadIdx.x % row_threads, first_row = threadIdx.x / row_threads;
    if (first_row >= rows) return;
    for (i64 row = static_cast<i64>(blockIdx.x) * rows * kRows + first_row; row < p.num_rows;
         row += static_cast<i64>(gridDim.x) * rows * kRows) {
      for (int part = first_part; part < row_parts; part += row_threads) {
        ReducePart<kWidth, kRows, kBatch>(p, row, rows, part);
      }
    }
  }

  // Merges rows first_row, first_row + row_step, ...: all loads of a batch of states are in flight
  // before the first is used.
  template <int kWidth, int kRows, int kBatch>
  __device__ __forceinline__ static void ReducePart(const MergeParams& p, i64 first_row,
                                                    int row_step, int part) {
    // lse in natural log: a single state stays exact.
    float max_lse[kRows], sum[kRows] = {}, o[kRows][kWidth] = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r) max_lse[r] = -Infinity();
    for (int first = 0; first < p.num_states; first += kBatch) {
      float lse[kRows][kBatch];
      Elements<kWidth> x[kRows][kBatch];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const i64 row = first_row + r * row_step;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          lse[r][i] = -Infinity();
          if (first + i < p.num_states && row < p.num_rows) {
            const i64 at = (first + i) * p.num_rows + row;
            lse[r][i] = p.lse_parts[at];
            x[r][i] = Load<kWidth>(p.o_parts, at * p.head_dim_vo + part * kWidth);
          }
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) AddBatch(lse[r], x[r], max_lse[r], sum[r], o[r]);
      if (kRows > 1) break;  // there are no more states than a batch has
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const i64 row = first_row + r * row_step;
      if (row >= p.num_rows) return;
      const RowResult result = FinishRow({0.0f, sum[r]}, -Infinity());
#pragma unroll
      for (int c = 0; c < kWidth; ++c) o[r][c] *= result.o_scale;
      Store<kWidth>(p.o, row * p.head_dim_vo + part * kWidth, o[r]);
      if (part == 0) p.lse[row] = max_lse[r] + result.lse;
    }
  }

  template <int kBatch, class X, int kWidth>
  __device__ __forceinline__ static void AddBatch(const float (&lse)[kBatch], const X (&x)[kBatch],
                                                  float& max_lse, float& sum, float (&o)[kWidth]) {
    float new_max = max_lse;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) new_max = fmaxf(new_max, lse[i]);
    const float factor = Weight(max_lse, new_max);
    max_lse = new_max;
    sum *= factor;
#pragma unroll
    for (int c = 0; c < kWidth; ++c) o[c] *= factor;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (lse[i] != -Infinity()) {  // else o must not count, whatever it is
        const float weight = Weight(lse[i], max_lse);
        sum += weight;
#pragma unroll
        for (int c = 0; c < kWidth; ++c) o[c] = fmaf(weight, x[i].Float(c), o[c]);
      }
    }
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
      StoreVector(static_cast<u16*>(array) + at,
                  make_uint4(E::Pack(x[0], x[1]), E::Pack(x[2], x[3]), E::Pack(x[4], x[5]),
                             E::Pack(x[6], x[7])));
    }
  }
};

}  // namespace jax_attn
