// The tiles of AMX in C++, so that code for them (cpu/kernels/matrix_tiles.h) runs on any machine.
#pragma once

#include <math.h>
#include <string.h>

#include "cpu/isa/kernel_table.h"
#include "cpu/isa/product_table.h"
#include "cpu/simd/simd_baseline.h"

namespace jax_attn {
namespace {

struct EmulatedTiles {
  int rows = 0;     // of c and a, as configured; 0: not configured
  int columns = 0;  // of c and b
  float c[4][16][16];
  uint16_t a[2][16][32], b[2][16][32];  // or 8-bit values
};

inline EmulatedTiles& Tiles() {
  static thread_local EmulatedTiles tiles;
  return tiles;
}

struct AmxEmulated : Baseline {
  static constexpr int kRows = 32, kVecs = 8;  // panels of 32 columns
  static constexpr bool kBf16Dot = true, kTiles = true, kFloorExp2 = true;
  static constexpr int kLaneCodes = 4, kKeyBias = 0;

  static Vec LoadCodes(const char* p) { return Load(reinterpret_cast<const float*>(p)); }
  static void PairCodes(const char* const* rows, i64 offset, int, Vec* to) {
    char codes[16];
    for (int i = 0; i < 16; ++i) codes[i] = rows[i % 4][offset + i / 4];
    to[0] = LoadCodes(codes);
  }
  static void StoreCodes(char* to, Vec x) {
    for (int i = 0; i < kWidth; ++i) to[i] = static_cast<char>(((Int)x)[i]);
  }
  static void StoreManyCodes(char* to, const Vec* x) {
    for (int i = 0; i < 64 / kWidth; ++i) StoreCodes(to + i * kWidth, x[i]);
  }

  static Vec FloorFraction(Vec x) {
    Vec v = Zero();
    for (int i = 0; i < kWidth; ++i) v[i] = isinf(x[i]) ? 0.0f : x[i] - floorf(x[i]);
    return v;
  }
  static Vec ScaleByFloor(Vec y, Vec x) {
    Vec v = Zero();
    for (int i = 0; i < kWidth; ++i) {
      v[i] = x[i] < -125 ? 0.0f : isnan(x[i]) ? x[i] : ldexpf(y[i], static_cast<int>(floorf(x[i])));
    }
    return v;
  }

  static Vec MaskLanes(Vec x, uint32_t mask) { return (Vec)((Int)x & static_cast<int32_t>(mask)); }
  template <typename T>
  static Vec PairRows(const T* a, const T* b, int n) {
    Vec v = Zero();
    for (int i = 0; i < n; ++i) v[i] = Pair(a[i], b[i]);
    return v;
  }
  template <typename T>
  static void PairRows(const T* a, const T* b, Vec* x) {
    x[0] = PairRows(a, b, kWidth);
    x[1] = PairRows(a + kWidth, b + kWidth, kWidth);
  }
  static Vec LoadPairs(const E4m3* a, int n) {
    Vec v = Zero();
    for (int i = 0; i < n; ++i) v[i] = Pair(a[2 * i], a[2 * i + 1]);
    return v;
  }

  static void ConfigureTiles(i64 rows, i64 columns) {
    Tiles().rows = static_cast<int>(rows);
    Tiles().columns = static_cast<int>(columns);
  }
  static void ReleaseTiles() { Tiles().rows = 0; }
  template <int kTile>
  static void TileZero() {
    memset(Tiles().c[kTile], 0, sizeof(Tiles().c[kTile]));
  }
  template <int kTile>
  static void TileLoad(const void* from, i64 bytes) {
    char* to = kTile < 4   ? reinterpret_cast<char*>(Tiles().c[kTile % 4])
               : kTile < 6 ? reinterpret_cast<char*>(Tiles().a[kTile % 2])
                           : reinterpret_cast<char*>(Tiles().b[kTile % 2]);
    for (int r = 0; r < RowsOf(kTile); ++r) {
      memcpy(to + r * 64, static_cast<const char*>(from) + r * bytes, RowBytesOf(kTile));
    }
  }
  template <int kTile>
  static void TileStore(void* to, i64 bytes) {
    for (int r = 0; r < RowsOf(kTile); ++r) {
      memcpy(static_cast<char*>(to) + r * bytes, Tiles().c[kTile][r], RowBytesOf(kTile));
    }
  }
  template <int kC, int kA, int kB>
  static void TileDot() {
    EmulatedTiles& t = Tiles();
    for (int m = 0; m < RowsOf(kC); ++m) {
      for (int n = 0; n < t.columns; ++n) {
        float first = 0, second = 0;
        for (int k = 0; k < 16; ++k) {
          first = fmaf(Value(t.a[kA % 2][m][2 * k]), Value(t.b[kB % 2][k][2 * n]), first);
          second = fmaf(Value(t.a[kA % 2][m][2 * k + 1]), Value(t.b[kB % 2][k][2 * n + 1]), second);
        }
        t.c[kC][m][n] += first + second;
      }
    }
  }

  template <int kC, int kA, int kB>
  static void TileDotKeys() {
    DotCodes<int8_t>(kC, kA, kB);
  }
  template <int kC, int kA, int kB>
  static void TileDotValues() {
    DotCodes<uint8_t>(kC, kA, kB);
  }

 private:
  // 8-bit values of a have type A.
  template <typename A>
  static void DotCodes(int c, int a, int b) {
    EmulatedTiles& t = Tiles();
    for (int m = 0; m < RowsOf(c); ++m) {
      const A* row = reinterpret_cast<const A*>(t.a[a % 2][m]);
      for (int n = 0; n < t.columns; ++n) {
        int32_t sum;
        memcpy(&sum, &t.c[c][m][n], 4);
        for (int k = 0; k < 64; ++k) {
          sum += row[k] * reinterpret_cast<const int8_t*>(t.b[b % 2][k / 4])[4 * n + k % 4];
        }
        memcpy(&t.c[c][m][n], &sum, 4);
      }
    }
  }

  // Rows as simd_amx.h configures them. A matmul without a configuration computes nothing.
  static int RowsOf(int tile) {
    const int rows = Tiles().rows;
    if (tile >= 6) return rows == 0 ? 0 : 16;
    const bool is_second = tile == 2 || tile == 3 || tile == 5;
    return is_second ? (rows > 16 ? rows - 16 : 0) : (rows < 16 ? rows : 16);
  }
  static size_t RowBytesOf(int tile) {
    const bool is_a = tile == 4 || tile == 5;
    return is_a ? 64 : 4 * static_cast<size_t>(Tiles().columns);
  }
  static float Value(uint16_t bits) { return ToF32(Bf16{bits}); }
  template <typename T>
  static float Pair(T a, T b) {
    const auto bits = [](T x) -> uint32_t {
      if constexpr (IsBf16<T>)
        return x.bits;
      else
        return ToBf16(ToF32(x)).bits;
    };
    return FromBits(bits(a) | bits(b) << 16);
  }
};

const CpuKernels kKernelsAmxEmulated = {
    "amx, emulated",
    {{&kTypeKernels<AmxEmulated, Bf16>, kKernelsBaseline.of[0][1], kKernelsBaseline.of[0][2]},
     {&kTypeKernels<AmxEmulated, Bf16, E4m3>, kKernelsBaseline.of[1][1],
      kKernelsBaseline.of[1][2]}},
    {&kCodeKernels<AmxEmulated, Bf16>, &kCodeKernels<AmxEmulated, F16>,
     &kCodeKernels<AmxEmulated, float>},
    {&kBackwardKernels<AmxEmulated, Bf16>, kKernelsBaseline.backward[1],
     kKernelsBaseline.backward[2]},
    {&kProductKernels<AmxEmulated, Bf16>, kKernelsBaseline.product[1], kKernelsBaseline.product[2]},
    {kKernelsBaseline.lora[0], kKernelsBaseline.lora[1], kKernelsBaseline.lora[2]}};

}  // namespace
}  // namespace jax_attn
