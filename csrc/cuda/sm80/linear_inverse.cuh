// T = (I + A)^-1 of a chunk of linear attention, A strictly lower triangular of 64 rows.
//
// The delicate step is the inverse T of the unit lower triangular I + A. Powers of A may be large
// where T is not (repeated keys), so it is computed by substitution: blocks of 16 x 16 on the
// diagonal in f32, and of T (I + A) = I, from the diagonal to the left,
//   T[i, j] = -(sum over k of T[i, k] A[k, j], j < k <= i) T[j, j]
// by mma of bf16 pairs, high + low, whose products have an error of some 2^-16.
#pragma once

#include "cuda/common/linear_tiles.cuh"

namespace jax_attn {

// A below the diagonal blocks, and on the diagonal blocks of T, as high + low.
struct LinearPairs {
  alignas(1024) unsigned char high[kPartBytes];
  alignas(1024) unsigned char low[kPartBytes];

  // Two neighbours of a row.
  __device__ __forceinline__ void Set(int row, int column, float x, float y) {
    const int at = SwizzledByte(row, column);
    const u32 pair = PackBf16(x, y);
    *reinterpret_cast<u32*>(high + at) = pair;
    *reinterpret_cast<u32*>(low + at) =
        PackBf16(x - HalfOf<kElementBf16>(pair, 0), y - HalfOf<kElementBf16>(pair, 1));
  }
};

// For four warps, of which each has a row of blocks. kDtype: of the result.
template <int kDtype>
class LinearInverse {
  using E = Element<kDtype>;
  static constexpr int kBlocks = kLinearTokens / 16;

 public:
  // diagonal: blocks of A on it.
  __device__ __forceinline__ LinearInverse(LinearPairs& pairs, const float (&diagonal)[4][16][16],
                                           int warp)
      : pairs_(pairs), diagonal_(diagonal), warp_(warp) {}

  // Writes the inverse of the warp's block of I + A on the diagonal. Lanes l and l + 16 have column
  // l.
  __device__ __forceinline__ void InvertDiagonal() {
    const int lane = Lane();
    __syncwarp();
    const float (&a)[16][16] = diagonal_[warp_];
    const int column = lane % 16;
    float x[16];
#pragma unroll
    for (int row = 0; row < 16; ++row) {
      float sum = row == column ? 1.0f : 0.0f;
#pragma unroll
      for (int i = 0; i < row; ++i) sum = fmaf(-a[row][i], x[i], sum);
      x[row] = sum;
    }
    unsigned char* const tile = lane < 16 ? pairs_.high : pairs_.low;
#pragma unroll
    for (int row = 0; row < 16; ++row) {
      const u32 high = PackBf16(x[row], 0.0f) & 0xffff;
      const u32 low = PackBf16(x[row] - HalfOf<kElementBf16>(high, 0), 0.0f);
      *reinterpret_cast<u16*>(tile + SwizzledByte(16 * warp_ + row, 16 * warp_ + column)) =
          static_cast<u16>(lane < 16 ? high : low);
    }
  }

  // Computes the warp's rows of T from the diagonal to the left, and writes T diag(beta), or T.
  template <bool kScales>
  __device__ __forceinline__ void Substitute(const float (&beta)[kLinearTokens],
                                             unsigned short* solve) {
    const u32 high_tile = SharedAddress(pairs_.high), low_tile = SharedAddress(pairs_.low);
    u32 high[kBlocks][4], low[kBlocks][4];  // blocks of T
#pragma unroll
    for (int j = kBlocks - 1; j >= 0; --j) {
      if (j > warp_) continue;
      float t[2][4];
      if (j == warp_) {
        LoadA(high[j], high_tile, 16 * warp_, 16 * j);
        LoadA(low[j], low_tile, 16 * warp_, 16 * j);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            t[i / 2][i % 2 * 2 + c] =
                HalfOf<kElementBf16>(high[j][i], c) + HalfOf<kElementBf16>(low[j][i], c);
          }
        }
      } else {
        float sum[2][4];
        SetZero(sum);
#pragma unroll
        for (int k = j + 1; k < kBlocks; ++k) {
          if (k > warp_) break;
          MultiplyPairs(sum, high[k], low[k], 16 * k, 16 * j);
        }
        u32 sum_high[1][4], sum_low[1][4];
        ToFragments<kElementBf16, 1>(sum, sum_high);
        RestFragments<kElementBf16, 1>(sum, sum_high, sum_low);
        SetZero(t);
        MultiplyPairs(t, sum_high[0], sum_low[0], 16 * j, 16 * j);
#pragma unroll
        for (int i = 0; i < 8; ++i) t[i / 4][i % 4] = -t[i / 4][i % 4];
        u32 t_high[1][4], t_low[1][4];
        ToFragments<kElementBf16, 1>(t, t_high);
        RestFragments<kElementBf16, 1>(t, t_high, t_low);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          high[j][i] = t_high[0][i];
          low[j][i] = t_low[0][i];
        }
      }
      WriteBlock<kScales>(beta, j, t, solve);
    }
  }

 private:
  __device__ __forceinline__ static int Lane() {
    return Opaque(static_cast<int>(threadIdx.x)) % kWarpSize;
  }

  // x += a b for a block b of the tiles, whose rows are those of operand b.
  __device__ __forceinline__ void MultiplyPairs(float (&x)[2][4], const u32 (&high)[4],
                                                const u32 (&low)[4], int row, int column) {
    u32 b_high[4], b_low[4];
    LoadColumnsB(b_high, SharedAddress(pairs_.high), row, column);
    LoadColumnsB(b_low, SharedAddress(pairs_.low), row, column);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      MmaBf16(x[i], low, b_high[2 * i], b_high[2 * i + 1]);
      MmaBf16(x[i], high, b_low[2 * i], b_low[2 * i + 1]);
      MmaBf16(x[i], high, b_high[2 * i], b_high[2 * i + 1]);
    }
  }

  template <bool kScales>
  __device__ __forceinline__ void WriteBlock(const float (&beta)[kLinearTokens], int block,
                                             const float (&t)[2][4], unsigned short* solve) {
    const int lane = Lane();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 16 * warp_ + lane / 4 + i % 2 * 8;
      const int column = 16 * block + i / 2 * 8 + lane % 4 * 2;
      const float factors[2] = {kScales ? beta[column] : 1.0f, kScales ? beta[column + 1] : 1.0f};
      *reinterpret_cast<u32*>(solve + LowerIndex(row, column)) =
          E::Pack(t[i / 2][i % 2 * 2] * factors[0], t[i / 2][i % 2 * 2 + 1] * factors[1]);
    }
  }

  LinearPairs& pairs_;
  const float (&diagonal_)[4][16][16];
  const int warp_;
};

}  // namespace jax_attn
