// Row state of mma.sync kernels, and a step of the online softmax on accumulators.
#pragma once

#include "cuda/common/logits.cuh"
#include "cuda/common/state.cuh"
#include "cuda/common/types.cuh"

namespace jax_attn {

// Rows of 16-bit elements in shared memory. head_dim is padded with zeros to a multiple of 16, and
// the row to an odd number of 16-byte chunks. This keeps ldmatrix and the copies free of bank
// conflicts, while every address is a base plus a constant.
template <int kHeadDim>
struct RowLayout {
  static constexpr int kPadded = CeilDiv(kHeadDim, 16) * 16;
  static constexpr int kChunks = kPadded / 8;        // chunks of 16 bytes that are copied
  static constexpr int kLiveChunks = kHeadDim / 8;   // chunks with data
  static constexpr int kPitch = 16 * (kChunks | 1);  // bytes
};

// A factor for each row of a warp; ScaleOfRow also takes one factor for all rows.
template <int kMTiles>
struct RowScales {
  float of[kMTiles][2];
};
__device__ __forceinline__ float ScaleOfRow(float scale, int, int) { return scale; }
template <int kMTiles>
__device__ __forceinline__ float ScaleOfRow(const RowScales<kMTiles>& scales, int mt, int h) {
  return scales.of[mt][h];
}

// State of a warp's rows after the kv tokens seen so far. Registers are laid out as accumulators of
// mma.sync: index h is row 8h + lane / 4 of 16-row tile mt; o[mt][j][2h + c] is column 8j + 2 *
// (lane % 4) + c of that row.
template <int kMTiles, int kOTiles>
struct TileState {
  float max_log4[kMTiles][2];  // running max; may lag the maximum, see UpdateMax
  float sum[kMTiles][2];       // over this lane's columns only, until the end of the item
  float o[kMTiles][kOTiles][4];

  // running_max: LogitStage::InitialMax.
  __device__ __forceinline__ void Reset(float running_max) {
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        max_log4[mt][h] = running_max;
        sum[mt][h] = 0.0f;
      }
#pragma unroll
      for (int j = 0; j < kOTiles; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) o[mt][j][c] = 0.0f;
      }
    }
  }

  // Moves to a new running max: multiplies sums and o by 4^(old - new).
  __device__ __forceinline__ void Rescale(const float (&new_max)[kMTiles][2]) {
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float factor = StateWeight(max_log4[mt][h], new_max[mt][h]);
        max_log4[mt][h] = new_max[mt][h];
        sum[mt][h] *= factor;
#pragma unroll
        for (int j = 0; j < kOTiles; ++j) {
          o[mt][j][2 * h] *= factor;
          o[mt][j][2 * h + 1] *= factor;
        }
      }
    }
  }
};

// --- softmax ---

// The running max of a row follows its maximum only when that has grown by more than a factor of
// 2^8. Sums stay far from overflow, and nearly every step skips the rescaling of o
// (FlashAttention-4's observation). Each row decides for itself, so its bits do not depend on its
// neighbours. A row that keeps its running max has a factor of exactly 1. Scores of far rows become
// FarScore.
template <class Traits, class Scale, int kMTiles, int kSTiles, int kOTiles>
__device__ __forceinline__ void UpdateMax(const Scale& scale, float (&s)[kMTiles][kSTiles][4],
                                          TileState<kMTiles, kOTiles>& state) {
  if constexpr (!LogitStage<Traits>::kNormalizes) return;
  constexpr float kSlack = 4.0f;  // in base 4
  float new_max[kMTiles][2];
  bool grows = false;
#pragma unroll
  for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float step_max = fmaxf(s[mt][0][2 * h], s[mt][0][2 * h + 1]);
#pragma unroll
      for (int j = 1; j < kSTiles; ++j) {
        step_max = fmaxf(step_max, fmaxf(s[mt][j][2 * h], s[mt][j][2 * h + 1]));
      }
      step_max = QuadMax(step_max) * (0.5f * ScaleOfRow(scale, mt, h));
      // False if both are -inf, where the difference is NaN.
      const bool row_grows = step_max - state.max_log4[mt][h] > kSlack;
      new_max[mt][h] = row_grows ? step_max : state.max_log4[mt][h];
      grows |= row_grows || IsFar(new_max[mt][h]);
    }
  }
  if (!__any_sync(kFullWarp, grows)) return;
  state.Rescale(new_max);
#pragma unroll
  for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (!IsFar(new_max[mt][h])) continue;
      const float row_scale = ScaleOfRow(scale, mt, h), inverse = 1.0f / row_scale;
#pragma unroll
      for (int j = 0; j < kSTiles; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = s[mt][j][2 * h + c];
          x = FarScore(x, row_scale, inverse, new_max[mt][h]);
        }
      }
    }
  }
}

// p = 2^(logit - running max), added to the sums. The accumulators of two neighbouring 8-column
// tiles, packed, are operand a of P V as they are.
template <class Traits, class Scale, int kMTiles, int kSTiles, int kOTiles>
__device__ __forceinline__ void Exponentiate(const Scale& scales,
                                             const float (&s)[kMTiles][kSTiles][4],
                                             TileState<kMTiles, kOTiles>& state,
                                             u32 (&p)[kMTiles][kSTiles / 2][4]) {
#pragma unroll
  for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float base = BaseOf(state.max_log4[mt][h]);
      const float scale = ScaleOfRow(scales, mt, h);
#pragma unroll
      for (int j = 0; j < kSTiles; ++j) {
        const float left = LogitStage<Traits>::Weight(s[mt][j][2 * h], scale, base);
        const float right = LogitStage<Traits>::Weight(s[mt][j][2 * h + 1], scale, base);
        state.sum[mt][h] += left;
        state.sum[mt][h] += right;
        p[mt][j / 2][j % 2 * 2 + h] = Element<Traits::kDtype>::Pack(left, right);
      }
    }
  }
}

}  // namespace jax_attn
