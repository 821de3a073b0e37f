// AVX-512 with BF16, and the tiles of AMX-BF16. The vocabulary is documented in simd_baseline.h and
// below.
#pragma once

#include "cpu/simd/simd_avx512.h"

namespace jax_attn {
namespace {

struct Amx : Avx512Bf16 {
  static constexpr bool kTiles = true;
  static constexpr int kRows = 32;  // two tiles
  static constexpr int kWidePanels = 1;
  static constexpr bool kFloorExp2 = true;
  static constexpr int kKeyBias = 0;

  // x - floor(x).
  static Vec FloorFraction(Vec x) {
    return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  }
  // y * 2^floor(x); 0 where x < -125, where results could be subnormal.
  static Vec ScaleByFloor(Vec y, Vec x) {
    const __mmask16 counts = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-125.0f), _CMP_NLT_UQ);
    return _mm512_maskz_scalef_ps(counts, y, x);
  }

  using Avx512Bf16::Store;
  // One instruction. It treats subnormal numbers as 0, as the tiles do.
  static void Store(Bf16* p, Vec v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(v));
  }

  // Configures the tiles of MultiplyTiles (matrix_tiles.h) for 1 to 32 rows and 1 to 16 columns per
  // tile: tiles of c and a have these rows, those of a with 64 bytes each; b has 16 rows; c and b
  // have the columns.
  static void ConfigureTiles(i64 rows, i64 columns) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    const uint8_t first = static_cast<uint8_t>(rows < 16 ? rows : 16);
    const uint8_t second = static_cast<uint8_t>(rows > 16 ? rows - 16 : 1);
    const uint8_t of[8] = {first, first, second, second, first, second, 16, 16};
    for (int i = 0; i < 8; ++i) {
      config.rows[i] = of[i];
      config.bytes[i] = static_cast<uint16_t>(i == 4 || i == 5 ? 64 : 4 * columns);
    }
    asm volatile("ldtilecfg %0" : : "m"(config));
  }
  static void ReleaseTiles() { asm volatile("tilerelease"); }

  // Tile kTile: sets it to 0; loads and stores its rows, which are this many bytes apart.
  template <int kTile>
  JAX_ATTN_INLINE static void TileZero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
  }
  template <int kTile>
  JAX_ATTN_INLINE static void TileLoad(const void* from, i64 bytes) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(bytes), "i"(kTile) : "memory");
  }
  template <int kTile>
  JAX_ATTN_INLINE static void TileStore(void* to, i64 bytes) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(bytes), "i"(kTile) : "memory");
  }
  // c[m, n] += sum over k of a[m, 2 k] b[k, 2 n] + sum over k of a[m, 2 k + 1] b[k, 2 n + 1].
  template <int kC, int kA, int kB>
  JAX_ATTN_INLINE static void TileDot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
  }
  // The same for 8-bit quantized values, four per lane, summed in i32: b is signed, a is signed or
  // unsigned.
  template <int kC, int kA, int kB>
  JAX_ATTN_INLINE static void TileDotKeys() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
  }
  template <int kC, int kA, int kB>
  JAX_ATTN_INLINE static void TileDotValues() {
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
  }
};

}  // namespace
}  // namespace jax_attn
