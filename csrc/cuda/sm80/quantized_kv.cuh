// Quantized keys and values for mma.sync. Most formats are dequantized in shared memory. e4m3 can
// also stay there as it is: it becomes the type of q in registers, right before it is multiplied,
// and the order of dimensions in Q K^T and of columns in o is what ldmatrix gives.
#pragma once

#include "cuda/common/e4m3.cuh"
#include "cuda/common/quantized_rows.cuh"
#include "cuda/common/state.cuh"
#include "cuda/common/work.cuh"
#include "cuda/sm80/softmax.cuh"

namespace jax_attn {

// --- rows to 16 bits, in shared memory ---

// Dequantizes num_rows rows, by one warp. position: kv position of the first row.
template <class Traits, int kHeadDim, int kNumRows>
__device__ __forceinline__ void DequantizeRows(
    const unsigned char* quantized,
    const QuantizedRowOffsets<QuantizedRowLayout<Traits::kKvFormat, kHeadDim>>& offsets,
    int position, int lane, unsigned char* to) {
  using Layout = QuantizedRowLayout<Traits::kKvFormat, kHeadDim>;
  static_assert(kHeadDim % 16 == 0, "rows without padding, and whole units of 16 values");
  using Unit = QuantizedUnit<Traits, kHeadDim>;
  constexpr int kUnits = Unit::kUnits;
#pragma unroll 2
  for (int i = lane; i < kNumRows * kUnits; i += kWarpSize) {
    const int row = i / kUnits;
    const int unit = (kWarpSize % kUnits == 0 ? lane : i) % kUnits;  // often one unit for all rows
    typename Unit::Vectors vectors;
    Unit(quantized + row * Layout::kPitch + offsets.At(position + row), unit).Dequantize(vectors);
    uint4* elements = reinterpret_cast<uint4*>(to + row * RowLayout<kHeadDim>::kPitch);
#pragma unroll
    for (int v = 0; v < Unit::kVectors; ++v) elements[Unit::VectorIndex(unit, v)] = vectors[v];
  }
}

// --- e4m3 that is multiplied from registers ---

// Rows of q that are multiplied with e4m3 keys. head_dim is padded to a multiple of 32, as in
// E4m3RowLayout. A lane loads 8 bytes of each of 8 rows; rows an odd number of 32 bytes apart keep
// a half warp free of bank conflicts.
template <int kHeadDim>
struct E4m3QueryLayout {
  static constexpr int kPadded = CeilDiv(kHeadDim, 32) * 32;
  static constexpr int kChunks = kPadded / 8;
  static constexpr int kLiveChunks = kHeadDim / 8;
  static constexpr int kPitch = 32 * (kChunks / 2 | 1);
};

// Rows of e4m3. One ldmatrix loads four 8 x 16 byte matrices: two 16-element steps of K, or four
// 8-column tiles of V.
template <int kHeadDim>
struct E4m3RowLayout {
  static constexpr int kPadded = CeilDiv(kHeadDim, 32) * 32;
  static constexpr int kChunks = kPadded / 16;
  static constexpr int kLiveChunks = kHeadDim / 16;
  static constexpr int kPitch = 16 * (kChunks | 1);
};

// --- qk ---

// Loads 16 dimensions of 16 rows of 16-bit q, from row `first` on. A lane has dimensions 4 t to 4 t
// + 3 of the 16, t = lane % 4, as it has of K.
template <int kPitch>
__device__ __forceinline__ void LoadE4m3QFragment(u32 (&a)[4], const unsigned char* rows, int first,
                                                  int kk, int lane) {
  const unsigned char* q = rows + (first + lane / 4) * kPitch + kk * 32 + lane % 4 * 8;
  const uint2 upper = *reinterpret_cast<const uint2*>(q);
  const uint2 lower = *reinterpret_cast<const uint2*>(q + 8 * kPitch);
  a[0] = upper.x;
  a[1] = lower.x;
  a[2] = upper.y;
  a[3] = lower.y;
}

// s += Q K^T. load_q(a, mt, kk): operand a of row tile mt, dimensions from 16 kk on.
// ldmatrix gives lane t of a row four neighbouring e4m3 of each 16, 4 t to 4 t + 3. So the
// dimensions of a product come in another order, which q has as well. Four matrices are 32 tokens
// of one product, or, with 16 tokens, two products.
template <class Traits, int kQkSteps, int kPitch, int kMTiles, int kSTiles, class LoadQ>
__device__ __forceinline__ void MultiplyE4m3Qk(u32 k_rows, int lane, LoadQ load_q,
                                               float (&s)[kMTiles][kSTiles][4]) {
  constexpr int kSteps = kSTiles % 4 == 0 ? 1 : 2;
  const int matrix = lane / 8;
  const u32 k = k_rows + (matrix / kSteps * 8 + lane % 8) * kPitch + matrix % kSteps * 16;
#pragma unroll
  for (int kk = 0; kk < kQkSteps; kk += kSteps) {
    u32 a[kSteps][kMTiles][4];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int mt = 0; mt < kMTiles; ++mt) load_q(a[i][mt], mt, kk + i);
    }
#pragma unroll
    for (int j = 0; j < kSTiles; j += 4 / kSteps) {
      u32 quantized[4];
      LoadMatrix4(quantized, k + j * 8 * kPitch + kk * 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        u32 b0, b1;
        UnpackE4m3<Traits>(quantized[i], b0, b1);
#pragma unroll
        for (int mt = 0; mt < kMTiles; ++mt) {
          Element<Traits::kDtype>::Mma(s[mt][j + i / kSteps], a[i % kSteps][mt], b0, b1);
        }
      }
    }
  }
}

// --- pv ---

// o += P V. v: where this lane's rows of V begin, row-major.
// The transposing ldmatrix moves 16 bits, two neighbouring e4m3 of a token. Even columns of 16 are
// the operand of one 8-column tile, odd ones of the next.
template <class Traits, int kPitch, int kMTiles, int kPSteps, int kOTiles>
__device__ __forceinline__ void MultiplyE4m3Pv(u32 v, const u32 (&p)[kMTiles][kPSteps][4],
                                               float (&o)[kMTiles][kOTiles][4]) {
  using E = Element<Traits::kDtype>;
#pragma unroll
  for (int kk = 0; kk < kPSteps; ++kk) {
#pragma unroll
    for (int j = 0; j < kOTiles; j += 4) {
      u32 quantized[4];
      LoadMatrix4Transposed(quantized, v + kk * 16 * kPitch + j * 8);
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        u32 even[2], odd[2];
        UnpackE4m3Alternate<Traits>(quantized[i], even[0], odd[0]);
        UnpackE4m3Alternate<Traits>(quantized[i + 1], even[1], odd[1]);
#pragma unroll
        for (int mt = 0; mt < kMTiles; ++mt) {
          E::Mma(o[mt][j + i], p[mt][kk], even[0], even[1]);
          E::Mma(o[mt][j + i + 1], p[mt][kk], odd[0], odd[1]);
        }
      }
    }
  }
}

// Column of o[mt][j][2h + c].
__device__ __forceinline__ int E4m3Column(int j, int c, int lane) {
  return j / 2 * 16 + lane % 4 * 4 + 2 * c + j % 2;
}

// The columns that a lane has in two tiles are neighbours.
template <int kOTiles>
__device__ __forceinline__ float4 NeighboursOf(const float (&o)[kOTiles][4], int j, int h) {
  return make_float4(o[j][2 * h], o[j + 1][2 * h], o[j][2 * h + 1], o[j + 1][2 * h + 1]);
}

// Writes rows 8 h + lane / 4 of a 16-row tile: final ones to o, others to partial_o.
template <class Traits, int kOTiles>
__device__ __forceinline__ void WriteE4m3Row(const AttentionParams& p, const float (&o)[kOTiles][4],
                                             int h, int lane, bool final, i64 at, float o_scale) {
#pragma unroll
  for (int j = 0; j < Traits::kHeadDimVo / 8; j += 2) {
    float4 x = NeighboursOf(o, j, h);
    Scale(x, o_scale);
    const i64 column = at * Traits::kHeadDimVo + E4m3Column(j, 0, lane);
    if (final) {
      Store4<Traits::kDtype>(p.o, column, x);
    } else {
      Store4<kElementF32>(p.partial_o, column, x);
    }
  }
}

}  // namespace jax_attn
