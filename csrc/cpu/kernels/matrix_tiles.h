// The matmul of an Isa with tiles (AMX), in place of the register tile of gemm.h. Internal linkage:
// see kernels.h.
//
// Tiles multiply panels of pairs (Format::kDot) and of quads of 8-bit values unchanged: a step is a
// row of the tile of b. One instruction multiplies kTileSteps steps. For pairs it adds up the first
// numbers and the second numbers, each in the order of depth, then adds both sums to c. So the bits
// of an element of c depend on where depth is cut into tiles: at multiples of kTileSteps from the
// start of a head dim, or of a block of tokens. Callers pad with zeros where depth ends within a
// tile. Sums of 8-bit values are i32 and exact.
#pragma once

#include "cpu/simd/simd_types.h"

namespace jax_attn {
namespace {

constexpr int kTileRows = 16;   // of one tile
constexpr i64 kTileSteps = 16;  // pairs of depth in one tile
constexpr i64 kTileDepth = 2 * kTileSteps;

// The tile configuration of this thread; no rows: tiles are not in use.
struct TileShape {
  i64 rows, columns;  // of c; columns of a tile
};
inline TileShape& ConfiguredTiles() {
  static thread_local TileShape shape{0, 0};
  return shape;
}

// Configures the tiles for matmuls of this many rows (up to two tiles of them) and columns.
template <class Isa>
void UseTilesOf(i64 rows, i64 columns = kTileRows) {
  TileShape& shape = ConfiguredTiles();
  if (shape.rows == rows && shape.columns == columns) return;
  shape = {rows, columns};
  Isa::ConfigureTiles(rows, columns);
}

// c[r, :] *= scale[r], where scales differ from 1.
template <class Isa>
JAX_ATTN_KERNEL void ScaleRows(i64 rows, i64 columns, const float* scale, float* c, i64 ldc) {
  for (i64 r = 0; r < rows; ++r, c += ldc) {
    if (scale[r] == 1.0f) continue;
    const auto factor = Isa::Set(scale[r]);
    for (i64 j = 0; j < columns; j += Isa::kWidth) {
      Isa::Store(c + j, Isa::Mul(factor, Isa::Load(c + j)));
    }
  }
}

// No work of the vector unit while tiles are multiplied.
struct NoVectorWork {
  void Step() {}
};

// c[rows, 2 * kTileRows columns] (+)= a b for 1 to 2 * kTileRows rows: tiles 0 to 3 are c, 4 and 5
// a, 6 and 7 b. lda, ldc: f32 lanes between rows; b: the first step of the panel; step_bytes: from
// one step to the next. steps: a multiple of kTileSteps. kNarrow: c has kTileRows columns.
// work.Step() is called once every kTileSteps steps.
template <class Isa, bool kNarrow, class Work>
JAX_ATTN_INLINE void MultiplyTiles(i64 rows, const float* a, i64 lda, const char* b, i64 step_bytes,
                                   i64 steps, bool zero, float* c, i64 ldc, Work& work) {
  const i64 a_bytes = lda * 4, c_bytes = ldc * 4;
  const bool both = rows > kTileRows;
  float* low = c + kTileRows * ldc;
  if (zero) {
    Isa::template TileZero<0>();
    if constexpr (!kNarrow) Isa::template TileZero<1>();
    if (both) {
      Isa::template TileZero<2>();
      if constexpr (!kNarrow) Isa::template TileZero<3>();
    }
  } else {
    Isa::template TileLoad<0>(c, c_bytes);
    if constexpr (!kNarrow) Isa::template TileLoad<1>(c + kTileRows, c_bytes);
    if (both) {
      Isa::template TileLoad<2>(low, c_bytes);
      if constexpr (!kNarrow) Isa::template TileLoad<3>(low + kTileRows, c_bytes);
    }
  }
  for (i64 k = 0; k < steps; k += kTileSteps, a += kTileSteps, b += kTileSteps * step_bytes) {
    Isa::template TileLoad<4>(a, a_bytes);
    Isa::template TileLoad<6>(b, step_bytes);
    Isa::template TileDot<0, 4, 6>();
    if constexpr (!kNarrow) {
      Isa::template TileLoad<7>(b + 64, step_bytes);
      Isa::template TileDot<1, 4, 7>();
    }
    if (both) {
      Isa::template TileLoad<5>(a + kTileRows * lda, a_bytes);
      Isa::template TileDot<2, 5, 6>();
      if constexpr (!kNarrow) Isa::template TileDot<3, 5, 7>();
    }
    work.Step();
  }
  Isa::template TileStore<0>(c, c_bytes);
  if constexpr (!kNarrow) Isa::template TileStore<1>(c + kTileRows, c_bytes);
  if (both) {
    Isa::template TileStore<2>(low, c_bytes);
    if constexpr (!kNarrow) Isa::template TileStore<3>(low + kTileRows, c_bytes);
  }
}

// Rows of keys in memory as two tiles of a, each of kTileRows rows that are `bytes` apart.
struct KeyTiles {
  const char* rows[2];
  i64 bytes[2];
};

// c[2 * kTileRows, columns] = a b, for as many columns as the tiles are configured for: tiles 0 and
// 1 are c, whose rows are kTileRows lanes apart, 4 and 5 a, 6 b, with `columns` lanes a row. The
// sums are those of MultiplyTiles with the operands exchanged, in the same order. step() is called
// four times a tile of depth.
template <class Isa, class Step>
JAX_ATTN_INLINE void MultiplyKeyTiles(const KeyTiles& a, const float* b, i64 columns, i64 steps,
                                      float* c, Step&& step) {
  Isa::template TileZero<0>();
  Isa::template TileZero<1>();
  for (i64 k = 0; k < steps; k += kTileSteps) {
    Isa::template TileLoad<6>(b + k * columns, columns * 4);
    step();
    Isa::template TileLoad<4>(a.rows[0] + k * 4, a.bytes[0]);
    step();
    Isa::template TileDot<0, 4, 6>();
    Isa::template TileLoad<5>(a.rows[1] + k * 4, a.bytes[1]);
    step();
    Isa::template TileDot<1, 5, 6>();
    step();
  }
  Isa::template TileStore<0>(c, kTileRows * 4);
  Isa::template TileStore<1>(c + kTileRows * kTileRows, kTileRows * 4);
}

// Prefetches during the steps of tiles.
template <class Fetch, i64 kStepBytes>
struct FetchWork {
  Fetch& fetch;
  void Step() { fetch.Bytes(kStepBytes); }
};

// GemmRows (gemm.h) with tiles, for panels of kColumns columns.
template <class Isa, int kColumns, class Fetch>
JAX_ATTN_KERNEL void GemmTiles(i64 rows, const float* a, i64 lda, const char* panels,
                               i64 panel_bytes, i64 num_panels, i64 steps, bool zero,
                               const float* scale, float* c, i64 ldc, Fetch& fetch) {
  static_assert(kColumns == kTileRows || kColumns == 2 * kTileRows);
  UseTilesOf<Isa>(rows);
  Fetch ahead = fetch;  // keeps it in registers
  FetchWork<Fetch, 4 * kColumns * kTileSteps> work{ahead};
  if (scale) ScaleRows<Isa>(rows, num_panels * kColumns, scale, c, ldc);
  for (i64 j = 0; j < num_panels; ++j, panels += panel_bytes, c += kColumns) {
    MultiplyTiles<Isa, kColumns == kTileRows>(rows, a, lda, panels, 4 * kColumns, steps, zero, c,
                                              ldc, work);
  }
  fetch = ahead;
}

// Releases the tiles: a context switch of a thread that holds them costs more.
template <class Isa>
void ReleaseTiles() {
  if constexpr (Isa::kTiles) {
    if (ConfiguredTiles().rows == 0) return;
    ConfiguredTiles() = {0, 0};
    Isa::ReleaseTiles();
  }
}

}  // namespace
}  // namespace jax_attn
