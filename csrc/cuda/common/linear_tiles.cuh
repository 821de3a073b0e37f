// Tiles of chunked linear attention in shared memory, and products of registers with them.
//
// A tile has 64 rows, tokens or channels, of bf16 or f16. Its columns are in parts of 64, whose
// rows have 128 bytes, in the swizzle that wgmma reads: 16-byte vector c of row r is in place c ^ r
// % 8. So ldmatrix, which reads 8 rows at once, meets no bank twice either.
#pragma once

#include "cuda/common/math.cuh"
#include "cuda/common/types.cuh"

namespace jax_attn {

inline constexpr int kPartBytes = kLinearTokens * 128;

// Offset of an element in a tile.
constexpr __host__ __device__ int SwizzledByte(int row, int column) {
  return column / 64 * kPartBytes + row * 128 + ((column / 8 ^ row) & 7) * 16 + column % 8 * 2;
}

// Copies rows [first, first + length) of an array of rows of `pitch` elements, from `column` on, to
// a tile; with kColumns columns, those from `columns` on and further rows become 0.
template <int kColumns, int kNumThreads>
__device__ __forceinline__ void LoadTile(u32 tile, const void* array, i64 first, int length,
                                         i64 pitch, i64 column, int columns) {
  constexpr int kVectors = kColumns / 8, kRows = kNumThreads / kVectors;  // of one pass
  static_assert(kNumThreads % kVectors == 0 && kRows % 8 == 0, "passes have the same places");
  const int thread = Opaque(static_cast<int>(threadIdx.x)) % kNumThreads;
  const int vector = thread % kVectors;
  int row = thread / kVectors;
  const u16* from = static_cast<const u16*>(array) + (first + row) * pitch + column + vector * 8;
  u32 to = tile + SwizzledByte(row, vector * 8);
#pragma unroll
  for (int i = 0; i < kLinearTokens / kRows; ++i) {
    const bool valid = row < length && vector * 8 < columns;
    CopyAsync16(to, valid ? static_cast<const void*>(from) : array, valid);
    row += kRows;
    from += kRows * pitch;
    to += kRows * 128;
  }
}

// Copies a lower triangle (LowerIndex) to a tile of 64 columns. Blocks of 16 x 16 above the
// diagonal become 0.
template <int kNumThreads>
__device__ __forceinline__ void LoadLowerTile(u32 tile, const unsigned short* triangle) {
  const int thread = Opaque(static_cast<int>(threadIdx.x)) % kNumThreads;
#pragma unroll
  for (int i = 0; i < CeilDiv(kLinearTokens * 8, kNumThreads); ++i) {
    const int at = i * kNumThreads + thread, row = at / 8, column = at % 8 * 8;
    const bool valid = column / 16 <= row / 16;
    CopyAsync16(tile + SwizzledByte(row, column), triangle + (valid ? LowerIndex(row, column) : 0),
                valid);
  }
}

// Fragments of operand a of mma.m16n8k16, [kSteps], from accumulators of 16 rows and 16 kSteps
// columns.
template <int kDtype, int kSteps>
__device__ __forceinline__ void ToFragments(const float (&x)[2 * kSteps][4], u32 (&a)[kSteps][4]) {
#pragma unroll
  for (int i = 0; i < 2 * kSteps; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      a[i / 2][i % 2 * 2 + half] = Element<kDtype>::Pack(x[i][2 * half], x[i][2 * half + 1]);
    }
  }
}

// The value of a half of two packed elements.
template <int kDtype>
__device__ __forceinline__ float HalfOf(u32 pair, int half) {
  return Element<kDtype>::ToFloat(static_cast<u16>(half == 0 ? pair & 0xffff : pair >> 16));
}

// sum + the products of the elements of two vectors.
template <int kDtype>
__device__ __forceinline__ float AddProducts(const uint4& x, const uint4& y, float sum) {
  const u32 of_x[4] = {x.x, x.y, x.z, x.w}, of_y[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    sum = fmaf(HalfOf<kDtype>(of_x[i / 2], i % 2), HalfOf<kDtype>(of_y[i / 2], i % 2), sum);
  }
  return sum;
}

// Fragments of x - (its fragments `high`).
template <int kDtype, int kSteps>
__device__ __forceinline__ void RestFragments(const float (&x)[2 * kSteps][4],
                                              const u32 (&high)[kSteps][4], u32 (&low)[kSteps][4]) {
#pragma unroll
  for (int i = 0; i < 2 * kSteps; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const u32 pair = high[i / 2][i % 2 * 2 + half];
      low[i / 2][i % 2 * 2 + half] = Element<kDtype>::Pack(
          x[i][2 * half] - HalfOf<kDtype>(pair, 0), x[i][2 * half + 1] - HalfOf<kDtype>(pair, 1));
    }
  }
}

// A block of 16 x 16 elements of a tile as operand a of mma.
__device__ __forceinline__ void LoadA(u32 (&a)[4], u32 tile, int row, int column) {
  const int lane = Opaque(static_cast<int>(threadIdx.x)) % kWarpSize;
  LoadMatrix4(a, tile + SwizzledByte(row + lane % 16, column + lane / 16 * 8));
}
// The transpose of a block of 16 x 16 elements as operand a.
__device__ __forceinline__ void LoadTransposedA(u32 (&a)[4], u32 tile, int row, int column) {
  const int lane = Opaque(static_cast<int>(threadIdx.x)) % kWarpSize;
  LoadMatrix4Transposed(
      a, tile + SwizzledByte(row + lane / 16 * 8 + lane % 8, column + lane / 8 % 2 * 8));
}
// A block of 16 x 16 elements, of which rows are the columns of operand b: b[0], b[1] are those of
// the first 8 rows.
__device__ __forceinline__ void LoadRowsB(u32 (&b)[4], u32 tile, int row, int column) {
  const int lane = Opaque(static_cast<int>(threadIdx.x)) % kWarpSize;
  LoadMatrix4(b, tile + SwizzledByte(row + lane / 16 * 8 + lane % 8, column + lane / 8 % 2 * 8));
}
// The same where rows are the rows of operand b: b[0], b[1] are the first 8 columns.
__device__ __forceinline__ void LoadColumnsB(u32 (&b)[4], u32 tile, int row, int column) {
  const int lane = Opaque(static_cast<int>(threadIdx.x)) % kWarpSize;
  LoadMatrix4Transposed(b, tile + SwizzledByte(row + lane % 16, column + lane / 16 * 8));
}

// 1 over the norm of a row of a tile of kK columns, or 1 where q and k are taken as they are.
template <class Traits, int kK>
__device__ __forceinline__ float NormFactor(const unsigned char* tile, int row) {
  if constexpr (!Traits::kHasL2Norm) return 1.0f;
  float sum = 0.0f;
#pragma unroll
  for (int vector = 0; vector < kK / 8; ++vector) {
    const uint4 x = *reinterpret_cast<const uint4*>(tile + SwizzledByte(row, vector * 8));
    sum = AddProducts<Traits::kDtype>(x, x, sum);
  }
  return ReciprocalRoot(sum + kL2NormEpsilon);
}

template <int kTiles>
__device__ __forceinline__ void SetZero(float (&x)[kTiles][4]) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int c = 0; c < 4; ++c) x[i][c] = 0.0f;
  }
}

// Products of the 16 rows that a warp has in registers with tiles, by mma.sync. WgmmaProducts
// (sm90/linear_attention.cuh) has the same functions: there operands are ready and pinned before
// Start, and a product is done after a Wait for all but groups committed after its own. Results are
// pinned then.
template <int kDtype>
struct MmaProducts {
  using E = Element<kDtype>;

  // Warps copy their own tiles.
  static constexpr bool kHasProducer = false;
  template <int kStages>
  struct Ring {};

  __device__ __forceinline__ static void Start() {}
  template <int kTiles>
  __device__ __forceinline__ static void Pin(float (&)[kTiles][4]) {}
  template <int kSteps>
  __device__ __forceinline__ static void Pin(u32 (&)[kSteps][4]) {}
  __device__ __forceinline__ static void Commit() {}
  template <int kPending>
  __device__ __forceinline__ static void Wait() {}
  __device__ __forceinline__ static void FenceTiles() {}

  // Writes two 8 x 8 matrices transposed, side by side, to 8 rows of a tile. Before, a lane has
  // elements 2 * (l % 4) and the next of row l / 4 of each.
  __device__ __forceinline__ static void StoreTransposed(unsigned char* tile, int row, int column,
                                                         u32 first, u32 second) {
    const int lane = Opaque(static_cast<int>(threadIdx.x)) % kWarpSize;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = SwizzledByte(row + lane % 4 * 2 + i % 2, column + lane / 4 + i / 2 * 8);
      const u32 pair = i / 2 == 0 ? first : second;
      *reinterpret_cast<u16*>(tile + at) = static_cast<u16>(pair >> 16 * (i % 2));
    }
  }

  // x[16, 64] = (kAdds ? x : 0) + a[16, 16 kSteps] tile[64, 16 kSteps]^T. kLower: of a tile of 64
  // columns, those above its diagonal are 0.
  template <bool kAdds, bool kLower, int kSteps>
  __device__ __forceinline__ static void Rows(float (&x)[8][4], const u32 (&a)[kSteps][4],
                                              u32 tile) {
    if constexpr (!kAdds) SetZero(x);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int j = kLower ? k : 0; j < 4; ++j) {
        u32 b[4];
        LoadRowsB(b, tile, 16 * j, 16 * k);
        E::Mma(x[2 * j], a[k], b[0], b[1]);
        E::Mma(x[2 * j + 1], a[k], b[2], b[3]);
      }
    }
  }

  // x[16, 8 kTiles] = (kAdds ? x : 0) + a[16, 64] tile[64, 8 kTiles].
  template <bool kAdds, bool kLower, int kTiles>
  __device__ __forceinline__ static void Columns(float (&x)[kTiles][4], const u32 (&a)[4][4],
                                                 u32 tile) {
    if constexpr (!kAdds) SetZero(x);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int j = 0; j < (kLower ? k + 1 : kTiles / 2); ++j) {
        u32 b[4];
        LoadColumnsB(b, tile, 16 * k, 16 * j);
        E::Mma(x[2 * j], a[k], b[0], b[1]);
        E::Mma(x[2 * j + 1], a[k], b[2], b[3]);
      }
    }
  }
};

}  // namespace jax_attn
