// Products of e4m3 codes by wgmma, at twice the rate of 16 bits: q with k, and weights with v. Keys
// are multiplied as they lie in memory. What these products need besides:
//   - operand b with its rows along k, of 8-bit types the only way: values, whose rows are tokens,
//     are transposed in shared memory by the producer (ValueTransposer);
//   - operand a of codes: q (QueryCodes), and weights, in the order in which the accumulators of
//     q . k have them (TileRows::PackCodes).
#pragma once

#include "cuda/common/head_scales.cuh"
#include "cuda/common/work.cuh"
#include "cuda/sm90/pipeline.cuh"

namespace jax_attn {

// 16-bit columns of a row of q as it lies in memory.
template <class Traits>
constexpr __host__ __device__ int QueryColumns() {
  return Traits::kQFormat == kE4m3Format ? Traits::kHeadDimQk / 2 : Traits::kHeadDimQk;
}

// --- values ---

template <class Traits>
constexpr __host__ __device__ int PaddedValues() {
  return 64 * CeilDiv(Traits::kHeadDimVo, 64);
}

// Behind the columns of v that of ones, and zeros: what a row's weights add up to once they are
// codes. A weight that is rounded up counts as much in that sum as in o, so a row that sees one key
// has its value exactly, and rows that see few lose little. The products of a step are summed by
// the tensor cores, steps in f32: next to a sum of many steps the tensor cores would lose the
// addends.
inline constexpr int kSumColumns = 8;

// Transposes a warp's rows of a tile of codes, kNumRows tokens from first_row on: a row of the
// result is a column of v, and has the tokens of a step as bytes. Of each 16 tokens byte 4q + 2a +
// c is token 8a + 2q + c, so that the accumulators of q . k, packed, are operand a as they are.
// Columns of padding are zeros there and here.
//
// ldmatrix has pairs of columns as its elements; of what it gives to a lane, two tokens by two
// columns twice, a permutation of bytes makes four tokens of a column. Lanes of the lower half take
// the odd column second, those of the upper half first: so the eight rows that stmatrix writes at
// once meet in no bank.
template <class Traits, int kNumRows>
class ValueTransposer {
 public:
  __device__ __forceinline__ ValueTransposer(int first_row, int lane) {
    const int matrix = lane / 8, i = lane % 8;
    // Of lines of 16 tokens, or, where a warp has no more than these, of 16 columns: that of the
    // upper two matrices.
    const int second = matrix / 2;
    const int token = first_row + matrix % 2 * 8 + i + (kByTokens ? second * 16 : 0);
    from_ = static_cast<u32>(token * 128 + (i ^ (kByTokens ? 0 : second)) * 16);
    const int column = 2 * i + ((i >= 4) != (matrix % 2 != 0) ? 1 : 0);
    const int chunk = first_row / 16 + (kByTokens ? second : 0);
    to_ = static_cast<u32>((column + (kByTokens ? 0 : second * 16)) * 128 +
                           (chunk ^ column % 8) * 16);
    const bool upper = lane >= 16;
    first_bytes_ = upper ? 0x7531 : 0x6420;
    second_bytes_ = upper ? 0x6420 : 0x7531;
  }

  template <class Tile, class Codes>
  __device__ __forceinline__ void Convert(const unsigned char* codes, unsigned char* tile) const {
    constexpr int kColumns = PaddedValues<Traits>();
    constexpr int kUnits = kColumns / kUnitColumns, kBatch = PowerOfTwoDivisor(kUnits, 4);
    static_assert(Tile::kBlocks == 1 && Codes::kPadded * 2 >= kColumns, "one block of tokens");
    const u32 from = SharedAddress(codes) + from_, to = SharedAddress(tile) + to_;
#pragma unroll
    for (int first = 0; first < kUnits; first += kBatch) {
      u32 r[kBatch][4];
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        const int chunk = (first + u) * kUnitColumns / 16;  // of the row of codes
        LoadMatrix4Transposed(r[u], (from ^ chunk % 8 * 16) + chunk / 8 * Codes::kBlockBytes);
      }
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        const u32 x[4] = {__byte_perm(r[u][0], r[u][1], first_bytes_),
                          __byte_perm(r[u][0], r[u][1], second_bytes_),
                          __byte_perm(r[u][2], r[u][3], first_bytes_),
                          __byte_perm(r[u][2], r[u][3], second_bytes_)};
        StoreMatrix4(to + (first + u) * (kUnitColumns * 128), x);
      }
    }
  }

  // The columns behind those of v, which Convert leaves as they are. By the 128 threads of a
  // producer.
  __device__ __forceinline__ static void AddSumColumns(unsigned char* tile, int thread) {
    static_assert(kSumColumns * 128 == 128 * sizeof(uint2), "a vector of each thread");
    const u32 ones = thread < 16 ? 0x38383838 : 0;  // 1, in the first column
    *reinterpret_cast<uint2*>(tile + PaddedValues<Traits>() * 128 + thread * 8) =
        make_uint2(ones, ones);
  }

 private:
  // What a warp takes at once: 32 tokens by 16 columns, or 16 by 32.
  static constexpr bool kByTokens = kNumRows == 32;
  static_assert(kByTokens || kNumRows == 16, "a quarter of a step");
  static constexpr int kUnitColumns = kByTokens ? 16 : 32;

  u32 from_, to_;  // bytes from the begin of a tile
  u32 first_bytes_, second_bytes_;
};

// --- queries ---

// What the codes of q stand for: times scales[h], of row 8h + lane / 4 of a warp's 16. q of 16 bits
// becomes codes in its place, of a warp's rows, which its share of a product reads, by the warp,
// with the largest magnitude of a row as 448. The caller fences, once it has waited for K as well.
template <class Traits>
class QueryCodes {
 public:
  float scales[2];

  // q: the consumer's tile, whose rows are the item's from first_row on.
  __device__ __forceinline__ QueryCodes(const AttentionParams& p, const ItemRecord& item,
                                        unsigned char* q, int first_row, int thread) {
    const int lane = thread % kWarpSize, row = thread / kWarpSize * 16 + lane / 4;
    if constexpr (Traits::kQFormat == kE4m3Format) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int head =
            item.kv_head() * Traits::kGroupSize + (first_row + row + 8 * h) % Traits::kGroupSize;
        scales[h] = LogitScaleOfHead(p.q_scale, head);
      }
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h) Round(q + (row + 8 * h) * 128, h, lane);
    }
  }

 private:
  using E = Element<Traits::kDtype>;
  static constexpr int kUnits = CeilDiv(Traits::kHeadDimQk, 32) * 2;  // of 16 elements

  // Byte of the lane's four elements of 16 from 16 * i on, of num_bytes bytes each, in its row of
  // the tile. Its number modulo 8 is lane / 4.
  __device__ __forceinline__ static u32 At(int i, int num_bytes, int lane) {
    constexpr int kBlockBytes = 64 * 128;
    const int column = i * 16 * num_bytes;  // bytes
    const int chunk = column % 128 / 16 + lane % 4 * (4 * num_bytes) / 16;
    return static_cast<u32>(column / 128 * kBlockBytes + (chunk ^ lane / 4) * 16 +
                            lane % 4 * (4 * num_bytes) % 16);
  }

  __device__ __forceinline__ void Round(unsigned char* row, int h, int lane) {
    uint2 pairs[kUnits];
    float most = 0x1p-100f;  // of a row of zeros: a scale is positive
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      pairs[i] = *reinterpret_cast<const uint2*>(row + At(i, 2, lane));
      float x[4];
      Unpack(pairs[i], x);
#pragma unroll
      for (int c = 0; c < 4; ++c) most = fmaxf(most, fmaxf(x[c], -x[c]));
    }
    most = QuadMax(most);
    scales[h] = most * (1.0f / 448.0f);
    const float codes_of_one = 448.0f * Reciprocal(most);
    __syncwarp();  // all have read
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      float x[4];
      Unpack(pairs[i], x);
#pragma unroll
      for (int c = 0; c < 4; ++c) x[c] *= codes_of_one;
      *reinterpret_cast<u32*>(row + At(i, 1, lane)) = PackE4m3(x[0], x[1], x[2], x[3]);
    }
  }
  __device__ __forceinline__ static void Unpack(uint2 pairs, float (&x)[4]) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      x[c] = E::ToFloat(static_cast<u16>((c < 2 ? pairs.x : pairs.y) >> c % 2 * 16));
    }
  }
};

}  // namespace jax_attn
