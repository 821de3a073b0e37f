// Four f32 lanes in the compiler's own vector types: SSE2 on x86-64, the native vectors elsewhere.
//
// This file also defines the vocabulary; simd_avx2.h, simd_avx512.h and simd_neon.h implement it
// in their instruction sets. An Isa has
//   Vec, kWidth      f32 lanes of one register
//   kRows, kVecs     register tile of the matmul: kRows x (kVecs * kWidth) accumulators
//   kWidePanels      panels that prefill multiplies at once, with 1 / kWidePanels of kRows
//   kBf16Dot         Dot() multiplies pairs of bf16 and adds both products in f32
//   kLooksUp         quantized values become bf16 by table look-up (codec.h, simd_avx512.h)
//   kTiles           dot products of pairs use tiles (matrix_tiles.h, simd_amx.h)
//   kLaneCodes       8-bit values per 32-bit lane in dot products: 4, or 2 as 16 bits each
//   kMasksLanes      ScaleUnlessLess(), in one instruction with a mask
//   kCodeColumns     columns that PairCodes takes at once
// Everything here has internal linkage (see kernels.h).
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "cpu/simd/simd_types.h"

namespace jax_attn {
namespace {

struct Baseline {
  typedef float Vec __attribute__((vector_size(16)));
  typedef int32_t Int __attribute__((vector_size(16)));
  static constexpr int kWidth = 4;
  static constexpr int kRows = 4;
  static constexpr int kVecs = 2;
  static constexpr int kWidePanels = 1;
  static constexpr bool kBf16Dot = false;
  static constexpr bool kTiles = false;
  static constexpr bool kLooksUp = false;
  static constexpr bool kFloorExp2 = false;
  static constexpr bool kFuses = false;  // Fma rounds once
  static constexpr bool kMasksLanes = false;
  static constexpr int kLaneCodes = 2;
  static constexpr int kCodeColumns = kWidth;

  static Vec Zero() { return Vec{0, 0, 0, 0}; }
  static Vec Set(float x) { return Vec{x, x, x, x}; }

  // The 32 bits at p, in every lane.
  static Vec Broadcast(const void* p) {
    float x;
    memcpy(&x, p, 4);
    return Set(x);
  }

  // kWidth elements from unaligned memory, as f32.
  static Vec Load(const float* p) {
    Vec v;
    memcpy(&v, p, sizeof(v));
    return v;
  }
  static Vec Load(const Bf16* p) { return Vec{ToF32(p[0]), ToF32(p[1]), ToF32(p[2]), ToF32(p[3])}; }
  static Vec Load(const F16* p) { return Vec{ToF32(p[0]), ToF32(p[1]), ToF32(p[2]), ToF32(p[3])}; }
  static Vec Load(const E4m3* p) {
    typedef uint8_t Codes __attribute__((vector_size(4)));
    Codes codes;
    memcpy(&codes, p, sizeof(codes));
    const Int x = __builtin_convertvector(codes, Int), rest = x & 0x7f;
    const Vec small = __builtin_convertvector(rest, Vec) * Set(0x1p-9f);
    Vec magnitude = Blend(rest < 8, small, (Vec)((rest << 20) + 0x3c000000));
    magnitude = Blend(rest == 0x7f, Set(__builtin_nanf("")), magnitude);
    return (Vec)((Int)magnitude | ((x & 0x80) << 24));
  }
  // 2 * kWidth elements.
  template <typename T>
  static void LoadTwo(const T* p, Vec* v) {
    v[0] = Load(p);
    v[1] = Load(p + kWidth);
  }

  // The first n elements, n in [1, kWidth] and a multiple of 8 or kWidth; the other lanes are 0.
  template <typename T>
  static Vec LoadFirst(const T* p, int) {
    return Load(p);
  }

  static void Store(float* p, Vec v) { memcpy(p, &v, sizeof(v)); }
  static void Store(Bf16* p, Vec v) {
    for (int i = 0; i < kWidth; ++i) p[i] = ToBf16(v[i]);
  }
  static void Store(F16* p, Vec v) {
    for (int i = 0; i < kWidth; ++i) p[i] = ToF16(v[i]);
  }
  template <typename T>
  static void StoreTwo(T* p, Vec a, Vec b) {
    Store(p, a);
    Store(p + kWidth, b);
  }
  template <typename T>
  static void StoreFirst(T* p, Vec v, int) {
    Store(p, v);
  }

  static Vec Add(Vec a, Vec b) { return a + b; }
  static Vec Sub(Vec a, Vec b) { return a - b; }
  static Vec Mul(Vec a, Vec b) { return a * b; }
  static Vec Div(Vec a, Vec b) { return a / b; }
  // a * b + c, rounded once where the machine can.
  static Vec Fma(Vec a, Vec b, Vec c) { return a * b + c; }
  // The larger; b where either is NaN.
  static Vec Max(Vec a, Vec b) { return Blend(a > b, a, b); }
  static Vec Abs(Vec a) { return (Vec)((Int)a & 0x7fffffff); }
  // x with the sign of s.
  static Vec CopySign(Vec x, Vec s) {
    return (Vec)(((Int)x & 0x7fffffff) | ((Int)s & static_cast<int32_t>(0x80000000)));
  }
  // a < b ? yes : no, lane by lane; `no` where a or b is NaN.
  static Vec SelectLess(Vec a, Vec b, Vec yes, Vec no) { return Blend(a < b, yes, no); }

  // Splits x, |x| < 2^22, into the nearest integer and 2^integer applied to `y` in [0.5, 2):
  // Round gives the former as f32, ScaleByPow2 multiplies y by 2^n without rounding.
  static Vec Round(Vec x) { return (x + Set(kRoundMagic)) - Set(kRoundMagic); }
  static Vec ScaleByPow2(Vec y, Vec n) {
    return (Vec)((Int)y + (__builtin_convertvector(n, Int) << 23));
  }

  // Lanes [lo, hi) of x; -inf in the others.
  static Vec KeepLanes(Vec x, int lo, int hi) {
    const Int lane = {0, 1, 2, 3};
    return Blend((lane >= lo) & (lane < hi), x, Set(kNegInf));
  }

  static float First(Vec v) { return v[0]; }
  static float ReduceAdd(Vec v) { return (v[0] + v[2]) + (v[1] + v[3]); }
  // The largest lane; unspecified if one is NaN.
  static float ReduceMax(Vec v) {
    const float a = v[0] > v[2] ? v[0] : v[2], b = v[1] > v[3] ? v[1] : v[3];
    return a > b ? a : b;
  }
  static bool AnyNan(Vec v) { return v[0] != v[0] || v[1] != v[1] || v[2] != v[2] || v[3] != v[3]; }

  // Reads 32-bit lanes [0, n), n <= kWidth and a multiple of 4, at `offset` bytes into kWidth rows;
  // out[i] has lane i of every row.
  static void TransposeLoad(const char* const* rows, ptrdiff_t offset, int, Vec* out) {
    Vec r[4];
    for (int i = 0; i < 4; ++i) memcpy(&r[i], rows[i] + offset, 16);
    for (int i = 0; i < 4; ++i) out[i] = Vec{r[0][i], r[1][i], r[2][i], r[3][i]};
  }
  // The first n 32-bit lanes at p, n as above; 0 in the others.
  static Vec LoadLanes(const void* p, int) { return Load(static_cast<const float*>(p)); }
  // a0 b0 a1 b1 ...
  static void Interleave(Vec a, Vec b, Vec* first, Vec* second) {
    *first = Vec{a[0], b[0], a[1], b[1]};
    *second = Vec{a[2], b[2], a[3], b[3]};
  }
  // The two bf16 of each 32-bit lane, low half first.
  static Vec PairLow(Vec pairs) { return (Vec)((Int)pairs << 16); }
  static Vec PairHigh(Vec pairs) { return (Vec)((Int)pairs & static_cast<int32_t>(0xffff0000)); }
  // Transposes kWidth rows.
  static void Transpose(Vec* r) {
    const Vec a = r[0], b = r[1], c = r[2], d = r[3];
    for (int i = 0; i < 4; ++i) r[i] = Vec{a[i], b[i], c[i], d[i]};
  }

  // kWidth lanes of kLaneCodes signed quantized values each, in order.
  static Vec LoadCodes(const char* p) {
    typedef int8_t Codes __attribute__((vector_size(8)));
    Codes codes;
    memcpy(&codes, p, sizeof(codes));
    return (Vec) __builtin_convertvector(codes, Shorts);
  }
  // Quantized values of columns [0, n) of kLaneCodes rows; n <= kCodeColumns is a multiple of 8 or
  // kWidth. Each lane has the values of one column, in kCodeColumns / kWidth vectors.
  static void PairCodes(const char* const* rows, i64 offset, int, Vec* to) {
    const auto lanes = [&](int row) {
      typedef int8_t Codes __attribute__((vector_size(4)));
      Codes codes;
      memcpy(&codes, rows[row] + offset, sizeof(codes));
      return __builtin_convertvector(codes, Int);
    };
    to[0] = (Vec)((lanes(0) & 0xffff) | (lanes(1) << 16));
  }
  // acc + both products, in i32.
  static Vec DotShorts(Vec a, Vec b, Vec acc) {
    const Int x = (Int)a, y = (Int)b;
    return (Vec)((Int)acc + (x << 16 >> 16) * (y << 16 >> 16) + (x >> 16) * (y >> 16));
  }
  // Converts the lanes, as i32, to f32.
  static Vec FromInt(Vec v) { return __builtin_convertvector((Int)v, Vec); }
  // Stores kWidth quantized values as the dot products take them; x is the values plus kRoundMagic.
  static void StoreCodes(char* to, Vec x) {
    typedef int16_t Half __attribute__((vector_size(8)));
    const Half half = __builtin_convertvector((Int)x, Half);
    memcpy(to, &half, sizeof(half));
  }
  // The same for 64 / kWidth vectors.
  static void StoreManyCodes(char* to, const Vec* x) {
    for (int i = 0; i < 64 / kWidth; ++i) StoreCodes(to + i * kWidth * 2, x[i]);
  }

 private:
  typedef int16_t Shorts __attribute__((vector_size(16)));
  static Vec Blend(Int mask, Vec yes, Vec no) {
    return (Vec)((mask & (Int)yes) | (~mask & (Int)no));
  }
};

}  // namespace
}  // namespace jax_attn
