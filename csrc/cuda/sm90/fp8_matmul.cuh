// E4m3 products by wgmma, at twice the rate of 16 bits: Q K^T and P V. K is multiplied as it lies
// in memory. These products need two things besides:
//   - 8-bit operands b must have their rows along k. Rows of V are tokens, so the producer
//   transposes them in shared memory (ValueTransposer).
//   - Operand a must be e4m3: q (QuantizedQuery), and P in the order of tokens that the
//   accumulators of Q K^T have (TileRows::PackFp8).
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

// Extra columns behind those of v: one of ones, the others zeros. The first one sums up a row's
// rounded P. A P that is rounded up counts as much in this sum as in o. So a row that sees one key
// gets its value exactly, and rows that see few keys lose little. Tensor cores sum the products of
// a step; steps are added in f32, because the tensor cores would lose small addends beside a sum of
// many steps.
inline constexpr int kSumColumns = 8;

// Transposes a warp's rows of an e4m3 tile: kNumRows tokens from first_row on. A row of the result
// is a column of v, with the tokens of a step as bytes. In each 16 tokens, byte 4q + 2a + c is
// token 8a + 2q + c, so that the packed accumulators of Q K^T are operand a as they are. Padding
// columns are zeros in both.
//
// ldmatrix moves pairs of columns. A lane gets two tokens by two columns twice, and byte
// permutations make four tokens of a column. Lanes of the lower half take the odd column second,
// those of the upper half first, so the eight rows that stmatrix writes at once hit different
// banks.
template <class Traits, int kNumRows>
class ValueTransposer {
 public:
  __device__ __forceinline__ ValueTransposer(int first_row, int lane) {
    const int matrix = lane / 8, i = lane % 8;
    // For the upper two matrices: the second line of 16 tokens, or, where a warp has only 16
    // tokens, the second 16 columns.
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

  template <class Tile, class Quantized>
  __device__ __forceinline__ void Convert(const unsigned char* quantized,
                                          unsigned char* tile) const {
    constexpr int kColumns = PaddedValues<Traits>();
    constexpr int kUnits = kColumns / kUnitColumns, kBatch = PowerOfTwoDivisor(kUnits, 4);
    static_assert(Tile::kBlocks == 1 && Quantized::kPadded * 2 >= kColumns, "one block of tokens");
    const u32 from = SharedAddress(quantized) + from_, to = SharedAddress(tile) + to_;
#pragma unroll
    for (int first = 0; first < kUnits; first += kBatch) {
      u32 r[kBatch][4];
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        const int chunk = (first + u) * kUnitColumns / 16;  // of the quantized row
        LoadMatrix4Transposed(r[u], (from ^ chunk % 8 * 16) + chunk / 8 * Quantized::kBlockBytes);
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

  // Writes the columns behind those of v, which Convert leaves as they are. Called by the 128
  // threads of a producer.
  __device__ __forceinline__ static void AddSumColumns(unsigned char* tile, int thread) {
    static_assert(kSumColumns * 128 == 128 * sizeof(uint2), "a vector of each thread");
    const u32 ones = thread < 16 ? 0x38383838 : 0;  // 1.0 in e4m3, in the first column
    *reinterpret_cast<uint2*>(tile + PaddedValues<Traits>() * 128 + thread * 8) =
        make_uint2(ones, ones);
  }

 private:
  // A warp transposes 32 tokens by 16 columns at once, or 16 by 32.
  static constexpr bool kByTokens = kNumRows == 32;
  static_assert(kByTokens || kNumRows == 16, "a quarter of a step");
  static constexpr int kUnitColumns = kByTokens ? 16 : 32;

  u32 from_, to_;  // bytes from the beginning of a tile
  u32 first_bytes_, second_bytes_;
};

// --- queries ---

// q as e4m3 with one scale a row: scales[h] belongs to row 8h + lane / 4 of a warp's 16. 16-bit q
// is quantized in place, with the largest magnitude of a row as 448. Each warp quantizes the rows
// that its own part of the product reads. The caller fences once it has waited for K as well.
template <class Traits>
class QuantizedQuery {
 public:
  float scales[2];

  // q: the consumer's tile. Its rows are the item's rows from first_row on.
  __device__ __forceinline__ QuantizedQuery(const AttentionParams& p, const ItemRecord& item,
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
  static constexpr int kUnits = CeilDiv(Traits::kHeadDimQk, 32) * 2;  // units of 16 elements

  // Byte offset, in a row of the tile, of the lane's four elements of num_bytes each within the 16
  // elements from 16 * i on. Its number modulo 8 is lane / 4.
  __device__ __forceinline__ static u32 At(int i, int num_bytes, int lane) {
    constexpr int kBlockBytes = 64 * 128;
    const int column = i * 16 * num_bytes;  // bytes
    const int chunk = column % 128 / 16 + lane % 4 * (4 * num_bytes) / 16;
    return static_cast<u32>(column / 128 * kBlockBytes + (chunk ^ lane / 4) * 16 +
                            lane % 4 * (4 * num_bytes) % 16);
  }

  __device__ __forceinline__ void Round(unsigned char* row, int h, int lane) {
    uint2 pairs[kUnits];
    float most = 0x1p-100f;  // for rows of zeros: a scale is positive
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
    const float quantized_one = 448.0f * Reciprocal(most);
    __syncwarp();  // all lanes have read
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      float x[4];
      Unpack(pairs[i], x);
#pragma unroll
      for (int c = 0; c < 4; ++c) x[c] *= quantized_one;
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
