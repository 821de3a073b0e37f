// Sixteen f32 lanes: AVX-512 F, BW, DQ, VL; and the same with AVX512-BF16's pair products and the
// permutations of bytes of AVX512-VBMI.
// The vocabulary is documented in simd_baseline.h.
#pragma once

// GCC 12's own header initialises undefined vectors with themselves and then warns about it
// wherever they are inlined (GCC bug 105593), so for the rest of the file that includes this one.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <immintrin.h>

#include "cpu/simd/simd_types.h"

namespace jax_attn {
namespace {

struct Avx512 {
  using Vec = __m512;
  static constexpr int kWidth = 16;
  static constexpr int kRows = 12;  // 24 accumulators, 2 of b, 1 of a: 27 of 32 registers
  static constexpr int kVecs = 2;
  static constexpr int kWidePanels = 2;  // 6 x 64: 24 accumulators, 4 of b, 1 of a
  static constexpr bool kBf16Dot = false;
  static constexpr bool kTiles = false;
  static constexpr bool kLooksUp = false;
  static constexpr bool kFloorExp2 = false;
  static constexpr bool kFuses = true;  // Fma rounds once
  static constexpr bool kMasksLanes = true;
  static constexpr int kLaneCodes = 2;
  static constexpr int kCodeColumns = kWidth;

  static Vec Zero() { return _mm512_setzero_ps(); }
  static Vec Set(float x) { return _mm512_set1_ps(x); }
  static Vec Broadcast(const void* p) {
    float x;
    memcpy(&x, p, 4);
    return _mm512_set1_ps(x);
  }

  static Vec Load(const float* p) { return _mm512_loadu_ps(p); }
  static Vec Load(const Bf16* p) {
    return Widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static Vec Load(const F16* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static Vec Load(const E4m3* p) {
    return Widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  template <typename T>
  static void LoadTwo(const T* p, Vec* v) {
    v[0] = Load(p);
    v[1] = Load(p + kWidth);
  }
  static Vec LoadFirst(const E4m3* p, int n) { return Widen(_mm_maskz_loadu_epi8(First16(n), p)); }
  static Vec LoadFirst(const float* p, int n) { return _mm512_maskz_loadu_ps(First16(n), p); }
  static Vec LoadFirst(const Bf16* p, int n) {
    return Widen(_mm256_maskz_loadu_epi16(First16(n), p));
  }
  static Vec LoadFirst(const F16* p, int n) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(First16(n), p));
  }

  static void Store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
  static void Store(Bf16* p, Vec v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), Narrow(v));
  }
  static void Store(F16* p, Vec v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), NarrowF16(v));
  }
  template <typename T>
  static void StoreTwo(T* p, Vec a, Vec b) {
    Store(p, a);
    Store(p + kWidth, b);
  }
  static void StoreFirst(float* p, Vec v, int n) { _mm512_mask_storeu_ps(p, First16(n), v); }
  static void StoreFirst(Bf16* p, Vec v, int n) {
    _mm256_mask_storeu_epi16(p, First16(n), Narrow(v));
  }
  static void StoreFirst(F16* p, Vec v, int n) {
    _mm256_mask_storeu_epi16(p, First16(n), NarrowF16(v));
  }

  static Vec Add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
  static Vec Sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
  static Vec Mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
  static Vec Div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
  static Vec Fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
  static Vec Max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
  static Vec Abs(Vec a) { return _mm512_abs_ps(a); }
  static Vec CopySign(Vec x, Vec s) {
    const Vec sign = _mm512_set1_ps(-0.0f);
    return _mm512_or_ps(_mm512_andnot_ps(sign, x), _mm512_and_ps(sign, s));
  }
  static Vec SelectLess(Vec a, Vec b, Vec yes, Vec no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
  }

  static Vec Round(Vec x) {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static Vec ScaleByPow2(Vec y, Vec n) { return _mm512_scalef_ps(y, n); }
  // ScaleByPow2(y, n), or 0 where a < b, whatever y and n are there.
  static Vec ScaleUnlessLess(Vec a, Vec b, Vec y, Vec n) {
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ), y, n);
  }

  static Vec KeepLanes(Vec x, int lo, int hi) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __mmask16 above = _mm512_cmp_epi32_mask(lane, _mm512_set1_epi32(lo), _MM_CMPINT_NLT);
    const __mmask16 inside =
        _mm512_mask_cmp_epi32_mask(above, lane, _mm512_set1_epi32(hi), _MM_CMPINT_LT);
    return _mm512_mask_blend_ps(inside, _mm512_set1_ps(kNegInf), x);
  }

  static float First(Vec v) { return _mm512_cvtss_f32(v); }
  static float ReduceAdd(Vec v) { return _mm512_reduce_add_ps(v); }
  static float ReduceMax(Vec v) { return _mm512_reduce_max_ps(v); }
  static bool AnyNan(Vec v) { return _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q) != 0; }

  static void TransposeLoad(const char* const* rows, ptrdiff_t offset, int n, Vec* out) {
    const __mmask16 mask = First16(n);
    JAX_ATTN_UNROLL
    for (int i = 0; i < 16; ++i) out[i] = _mm512_maskz_loadu_ps(mask, rows[i] + offset);
    Transpose(out);
  }
  static Vec LoadLanes(const void* p, int n) { return _mm512_maskz_loadu_ps(First16(n), p); }
  static void Interleave(Vec a, Vec b, Vec* first, Vec* second) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    *first = _mm512_permutex2var_ps(a, low, b);
    *second = _mm512_permutex2var_ps(a, _mm512_add_epi32(low, _mm512_set1_epi32(8)), b);
  }
  static Vec PairLow(Vec pairs) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(pairs), 16));
  }
  static Vec PairHigh(Vec pairs) {
    return _mm512_and_ps(pairs,
                         _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(0xffff0000))));
  }
  // Each of four steps doubles the width of the parts that are in place: 32, 64, 128, 256 bits.
  static void Transpose(Vec* r) {
    Vec t[16];
    JAX_ATTN_UNROLL
    for (int i = 0; i < 16; i += 2) {
      t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
      t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    // r[4 i + j]: lane j of every 128-bit part, for rows 4 i to 4 i + 3.
    JAX_ATTN_UNROLL
    for (int i = 0; i < 16; i += 4) {
      r[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
      r[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
      r[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
      r[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    // Parts 0 and 1, then parts 2 and 3, of rows 0 to 7 and of rows 8 to 15.
    JAX_ATTN_UNROLL
    for (int i = 0; i < 16; i += 8) {
      JAX_ATTN_UNROLL
      for (int j = 0; j < 4; ++j) {
        t[i + j] = _mm512_shuffle_f32x4(r[i + j], r[i + 4 + j], 0x88);      // parts 0, 2
        t[i + 4 + j] = _mm512_shuffle_f32x4(r[i + j], r[i + 4 + j], 0xdd);  // parts 1, 3
      }
    }
    JAX_ATTN_UNROLL
    for (int j = 0; j < 4; ++j) {
      r[j] = _mm512_shuffle_f32x4(t[j], t[8 + j], 0x88);            // part 0: columns 0 to 3
      r[8 + j] = _mm512_shuffle_f32x4(t[j], t[8 + j], 0xdd);        // part 2: columns 8 to 11
      r[4 + j] = _mm512_shuffle_f32x4(t[4 + j], t[12 + j], 0x88);   // part 1
      r[12 + j] = _mm512_shuffle_f32x4(t[4 + j], t[12 + j], 0xdd);  // part 3
    }
  }

  static Vec LoadCodes(const char* p) {
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_cvtepi8_epi16(codes));
  }
  static void PairCodes(const char* const* rows, i64 offset, int n, Vec* to) {
    const __m128i low = _mm_maskz_loadu_epi8(First16(n), rows[0] + offset);
    const __m128i high = _mm_maskz_loadu_epi8(First16(n), rows[1] + offset);
    const __m256i pairs =
        _mm256_set_m128i(_mm_unpackhi_epi8(low, high), _mm_unpacklo_epi8(low, high));
    to[0] = _mm512_castsi512_ps(_mm512_cvtepi8_epi16(pairs));
  }
  static Vec DotShorts(Vec a, Vec b, Vec acc) {
    const __m512i sums = _mm512_madd_epi16(_mm512_castps_si512(a), _mm512_castps_si512(b));
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(acc), sums));
  }
  static Vec FromInt(Vec v) { return _mm512_cvtepi32_ps(_mm512_castps_si512(v)); }
  static void StoreCodes(char* to, Vec x) {
    const __m256i half = _mm512_cvtepi32_epi16(_mm512_castps_si512(x));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), half);
  }
  static void StoreManyCodes(char* to, const Vec* x) {
    JAX_ATTN_UNROLL
    for (int i = 0; i < 64 / kWidth; ++i) StoreCodes(to + i * kWidth * 2, x[i]);
  }

 protected:
  static __mmask16 First16(int n) { return static_cast<__mmask16>((1u << n) - 1); }
  static Vec Widen(__m256i half) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }
  // Converts via f16, see simd_avx2.h.
  static Vec Widen(__m128i codes) {
    const __m256i high = _mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 8);
    const __m256i half = _mm256_and_si256(_mm256_srai_epi16(high, 1), _mm256_set1_epi16(-0x4080));
    const __m256i largest = _mm256_set1_epi16(0x3f80);  // NaN
    const __m256i nan = _mm256_cmpeq_epi16(_mm256_and_si256(half, largest), largest);
    const __m256i with_nan =
        _mm256_or_si256(half, _mm256_and_si256(nan, _mm256_set1_epi16(0x4000)));
    return _mm512_mul_ps(_mm512_cvtph_ps(with_nan), _mm512_set1_ps(0x1p8f));
  }
  static __m256i Narrow(Vec v) {
    const __m512i u = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
    const __m512i quiet = _mm512_or_si512(u, _mm512_set1_epi32(0x400000));
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(
        _mm512_srli_epi32(_mm512_mask_blend_epi32(nan, rounded, quiet), 16));
  }
  static __m256i NarrowF16(Vec v) {
    return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
};

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__) && defined(__AVX512VNNI__)
struct Avx512Bf16 : Avx512 {
  static constexpr bool kBf16Dot = true;
  static constexpr bool kLooksUp = true;
  static constexpr int kLaneCodes = 4;
  static constexpr int kCodeColumns = 64;

  using Avx512::LoadTwo;
  // One load of a line, and one permutation of bytes a vector in place of widening and a shift.
  static void LoadTwo(const Bf16* p, Vec* v) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    // The bytes 2 i and 2 i + 1 go to the upper half of lane i.
    const __m512i low = _mm512_add_epi32(_mm512_mullo_epi32(lane, _mm512_set1_epi32(0x02020000)),
                                         _mm512_set1_epi32(0x01000000));
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(0x20200000));
    const __mmask64 upper = 0xcccccccccccccccc;
    const __m512i x = _mm512_loadu_si512(p);
    v[0] = _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi8(upper, low, x));
    v[1] = _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi8(upper, high, x));
  }

  using Avx512::StoreTwo;
  // One instruction and one store of a line, which a load of the line can take from the store.
  // Numbers below 2^-126 become 0.
  static void StoreTwo(Bf16* p, Vec a, Vec b) {
    _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(b, a));
  }

  static Vec LoadCodes(const char* p) { return _mm512_loadu_ps(p); }
  // Columns are in the order of OrderCodeColumns, in which unpacking leaves them.
  JAX_ATTN_INLINE static void PairCodes(const char* const* rows, i64 offset, int n, Vec* to) {
    const auto load = [&](int row) __attribute__((always_inline)) {
      const char* from = rows[row] + offset;
      return n == 64 ? _mm512_loadu_si512(from)
                     : _mm512_maskz_loadu_epi8((__mmask64{1} << n) - 1, from);
    };
    const __m512i a = load(0), b = load(1), c = load(2), d = load(3);
    const __m512i low[2] = {_mm512_unpacklo_epi8(a, b), _mm512_unpacklo_epi8(c, d)};
    const __m512i high[2] = {_mm512_unpackhi_epi8(a, b), _mm512_unpackhi_epi8(c, d)};
    to[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(low[0], low[1]));
    to[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(low[0], low[1]));
    to[2] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(high[0], high[1]));
    to[3] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(high[0], high[1]));
  }
  // Puts four vectors of columns from PairCodes in the order of the columns.
  static void OrderCodeColumns(float* c) {
    Vec x[4];
    JAX_ATTN_UNROLL
    for (int i = 0; i < 4; ++i) x[i] = Load(c + i * kWidth);
    const Vec a = _mm512_shuffle_f32x4(x[0], x[1], 0x44),
              b = _mm512_shuffle_f32x4(x[0], x[1], 0xee);
    const Vec d = _mm512_shuffle_f32x4(x[2], x[3], 0x44),
              e = _mm512_shuffle_f32x4(x[2], x[3], 0xee);
    Store(c, _mm512_shuffle_f32x4(a, d, 0x88));
    Store(c + kWidth, _mm512_shuffle_f32x4(a, d, 0xdd));
    Store(c + 2 * kWidth, _mm512_shuffle_f32x4(b, e, 0x88));
    Store(c + 3 * kWidth, _mm512_shuffle_f32x4(b, e, 0xdd));
  }
  // a is signed. The instruction takes unsigned numbers on one side, so b counts as 128 more than
  // it is: the caller starts its sum with kKeyBias times the sum of a.
  static constexpr int kKeyBias = -128;
  static Vec DotKeys(Vec a, Vec b, Vec acc) {
    const __m512i more = _mm512_xor_si512(_mm512_castps_si512(b), _mm512_set1_epi32(0x80808080));
    return _mm512_castsi512_ps(
        _mm512_dpbusd_epi32(_mm512_castps_si512(acc), more, _mm512_castps_si512(a)));
  }
  static Vec DotValues(Vec a, Vec b, Vec acc) {
    return _mm512_castsi512_ps(_mm512_dpbusd_epi32(_mm512_castps_si512(acc), _mm512_castps_si512(a),
                                                   _mm512_castps_si512(b)));
  }
  static void StoreCodes(char* to, Vec x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(_mm512_castps_si512(x)));
  }
  // Stores the low bytes of lanes: one permutation per vector.
  JAX_ATTN_INLINE static void StoreManyCodes(char* to, const Vec* x) {
    const __m512i lanes =
        _mm512_setr_epi32(0x0c080400, 0x1c181410, 0x2c282420, 0x3c383430, 0x0c080400, 0x1c181410,
                          0x2c282420, 0x3c383430, 0x0c080400, 0x1c181410, 0x2c282420, 0x3c383430,
                          0x0c080400, 0x1c181410, 0x2c282420, 0x3c383430);
    __m512i codes = _mm512_setzero_si512();
    JAX_ATTN_UNROLL
    for (int i = 0; i < 4; ++i) {
      const __mmask64 part = __mmask64{0xffff} << 16 * i;
      codes = _mm512_mask_permutexvar_epi8(codes, part, lanes, _mm512_castps_si512(x[i]));
    }
    _mm512_storeu_si512(to, codes);
  }

  // to[i] = codes[i] as a bf16: the magnitude looked up by its low 7 bits, and its sign.
  JAX_ATTN_INLINE static void LookUp(const ByteTable& table, const char* codes, i64 n, Bf16* to) {
    const __m512i low[2] = {_mm512_load_si512(table.low), _mm512_load_si512(table.low + 64)};
    const __m512i high[2] = {_mm512_load_si512(table.high), _mm512_load_si512(table.high + 64)};
    const __m512i signs = _mm512_set1_epi8(static_cast<char>(0x80));
    // Groups of eight bytes, so that unpacking leaves words in order.
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    const auto words = [&](__m512i x, __m512i* first,
                           __m512i* second) __attribute__((always_inline)) {
      x = _mm512_permutexvar_epi64(order, x);
      const __m512i l = _mm512_permutex2var_epi8(low[0], x, low[1]);
      const __m512i magnitude = _mm512_permutex2var_epi8(high[0], x, high[1]);
      const __m512i h = _mm512_ternarylogic_epi32(magnitude, x, signs, 0xf8);  // or the sign
      *first = _mm512_unpacklo_epi8(l, h);
      *second = _mm512_unpackhi_epi8(l, h);
    };
    __m512i first, second;
    i64 i = 0;
    for (; i + 64 <= n; i += 64) {
      words(_mm512_loadu_si512(codes + i), &first, &second);
      _mm512_storeu_si512(to + i, first);
      _mm512_storeu_si512(to + i + 32, second);
    }
    if (i < n) {
      const int left = static_cast<int>(n - i);
      words(_mm512_maskz_loadu_epi8((__mmask64{1} << left) - 1, codes + i), &first, &second);
      _mm512_mask_storeu_epi16(to + i, First32(left), first);
      _mm512_mask_storeu_epi16(to + i + 32, First32(left - 32), second);
    }
  }

  // 64 columns at a time of two rows of LookUp's quantized values: to(column, x) takes 16 columns,
  // whose lanes hold the bf16 of a in the low half and of b in the high half.
  template <class To>
  JAX_ATTN_INLINE static void PairLookUp(const ByteTable& table, const char* a, const char* b,
                                         i64 n, To&& to) {
    const __m512i low[2] = {_mm512_load_si512(table.low), _mm512_load_si512(table.low + 64)};
    const __m512i high[2] = {_mm512_load_si512(table.high), _mm512_load_si512(table.high + 64)};
    const __m512i signs = _mm512_set1_epi8(static_cast<char>(0x80));
    // Groups of four bytes, so that unpacking twice leaves columns in order.
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const auto words = [&](i64 column, __m512i x) __attribute__((always_inline)) {
      const __m512i l = _mm512_permutex2var_epi8(low[0], x, low[1]);
      const __m512i magnitude = _mm512_permutex2var_epi8(high[0], x, high[1]);
      const __m512i h = _mm512_ternarylogic_epi32(magnitude, x, signs, 0xf8);  // or the sign
      to(column, _mm512_castsi512_ps(_mm512_unpacklo_epi8(l, h)));
      to(column + 16, _mm512_castsi512_ps(_mm512_unpackhi_epi8(l, h)));
    };
    for (i64 i = 0; i < n; i += 64) {
      const __m512i x = _mm512_permutexvar_epi32(order, _mm512_loadu_si512(a + i));
      const __m512i y = _mm512_permutexvar_epi32(order, _mm512_loadu_si512(b + i));
      words(i, _mm512_unpacklo_epi8(x, y));
      words(i + 32, _mm512_unpackhi_epi8(x, y));
    }
  }

  // The same for a's int8 values times their scale, rounded, and for b's.
  template <class To>
  JAX_ATTN_INLINE static void PairInt8(const char* a, const char* b, i64 n, float of_a, float of_b,
                                       To&& to) {
    const Vec a_factor = _mm512_set1_ps(of_a), b_factor = _mm512_set1_ps(of_b);
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i order = _mm512_or_si512(_mm512_or_si512(lane, _mm512_slli_epi32(lane, 16)),
                                          _mm512_set1_epi32(16 << 16));
    const auto scaled = [&](const char* p, Vec factor) __attribute__((always_inline)) {
      const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
      return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x)), factor);
    };
    for (i64 i = 0; i < n; i += 16) {
      const __m512i x =
          (__m512i)_mm512_cvtne2ps_pbh(scaled(b + i, b_factor), scaled(a + i, a_factor));
      to(i, _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, x)));
    }
  }

  // to[i] = codes[i] * scale, rounded.
  JAX_ATTN_INLINE static void ScaleInt8(const char* codes, i64 n, float scale, Bf16* to) {
    const Vec factor = _mm512_set1_ps(scale);
    const auto scaled = [&](__m128i x) __attribute__((always_inline)) {
      return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x)), factor);
    };
    const auto load = [](const char* p) __attribute__((always_inline)) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    };
    i64 i = 0;
    for (; i + 32 <= n; i += 32) {
      const __m512bh x = _mm512_cvtne2ps_pbh(scaled(load(codes + i + 16)), scaled(load(codes + i)));
      _mm512_storeu_si512(to + i, (__m512i)x);
    }
    for (; i < n; i += 16) {
      const __mmask16 mask = First16(static_cast<int>(Min(16, n - i)));
      const __m256bh x = _mm512_cvtneps_pbh(scaled(_mm_maskz_loadu_epi8(mask, codes + i)));
      _mm256_mask_storeu_epi16(to + i, mask, (__m256i)x);
    }
  }

  // Blocks of 32 4-bit values, where byte i of 16 holds values i and 16 + i: bf16 from the
  // table, divided by 2^(table.top - scale of the block), unless they are 0.
  JAX_ATTN_INLINE static void LookUpHalves(const NibbleTable& table, const char* codes,
                                           const char* scales, i64 blocks, Bf16* to) {
    const auto table_of = [](const uint8_t* bytes) __attribute__((always_inline)) {
      return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes)));
    };
    const __m512i low = table_of(table.low), high = table_of(table.high);
    // Order of the 128-bit parts: the first halves of two blocks, the second halves, and both
    // again.
    const __m512i order = _mm512_setr_epi64(0, 2, 1, 3, 0, 2, 1, 3), rest = _mm512_set1_epi8(15);
    const auto words = [&](__m256i x, __m512i* first,
                           __m512i* second) __attribute__((always_inline)) {
      const __m512i bytes = _mm512_permutexvar_epi64(order, _mm512_castsi256_si512(x));
      const __m512i halves = _mm512_and_si512(_mm512_mask_srli_epi64(bytes, 0xf0, bytes, 4), rest);
      const __m512i l = _mm512_shuffle_epi8(low, halves), h = _mm512_shuffle_epi8(high, halves);
      *first = _mm512_unpacklo_epi8(l, h);
      *second = _mm512_unpackhi_epi8(l, h);
    };
    // Stores block i and the next one; shift: what is subtracted from their words, given twice
    // each.
    const auto store = [&](i64 i, bool both, const int32_t* shift) __attribute__((always_inline)) {
      const char* from = codes + 16 * i;
      __m512i first, second;
      words(both ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))
                 : _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))),
            &first, &second);
      _mm512_storeu_si512(to + 32 * i, _mm512_subs_epu16(first, _mm512_set1_epi32(shift[0])));
      if (!both) return;
      _mm512_storeu_si512(to + 32 * i + 32, _mm512_subs_epu16(second, _mm512_set1_epi32(shift[1])));
    };
    i64 i = 0;
    for (; i + 4 <= blocks; i += 4) {
      int32_t four;
      memcpy(&four, scales + i, 4);
      const __m128i less =
          _mm_sub_epi32(_mm_set1_epi32(table.top), _mm_cvtepu8_epi32(_mm_cvtsi32_si128(four)));
      alignas(16) int32_t shift[4];
      _mm_store_si128(reinterpret_cast<__m128i*>(shift),
                      _mm_or_si128(_mm_slli_epi32(less, 7), _mm_slli_epi32(less, 23)));
      asm volatile("" : "+m"(shift));  // a broadcast from memory is free
      store(i, true, shift);
      store(i + 2, true, shift + 2);
    }
    for (; i < blocks; i += 2) {
      const auto shift_of = [&](i64 block) {
        return (table.top - static_cast<uint8_t>(scales[block])) * 0x00800080;
      };
      const bool both = i + 1 < blocks;
      const int32_t shift[2] = {shift_of(i), both ? shift_of(i + 1) : 0};
      store(i, both, shift);
    }
  }

  // 64 4-bit values, where byte i of 32 holds values i and 32 + i: bf16 from two tables of 32
  // words. Bit 4 of the table index comes from the lane in `first` or `second`, 0x0100 or 0x2120.
  JAX_ATTN_INLINE static void LookUpSpan(const char* codes, __m512i first, __m512i second,
                                         __m512i table, __m512i other, Bf16* to) {
    // Each byte twice, for the low and the high byte of a word: the indices are 2 code and 2 code +
    // 1.
    const __m512i twice = _mm512_permutexvar_epi8(
        Twice(), _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)codes)));
    const __m512i places = _mm512_set1_epi8(30);
    const __m512i low = _mm512_ternarylogic_epi32(_mm512_slli_epi16(twice, 1), places, first, 0xea);
    const __m512i high =
        _mm512_ternarylogic_epi32(_mm512_srli_epi16(twice, 3), places, second, 0xea);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi8(low, table));
    _mm512_storeu_si512(to + 32, _mm512_permutexvar_epi8(high, other));
  }
  static __m512i Twice() {
    const __m512i words = _mm512_setr_epi64(
        0x0003000200010000, 0x0007000600050004, 0x000b000a00090008, 0x000f000e000d000c,
        0x0013001200110010, 0x0017001600150014, 0x001b001a00190018, 0x001f001e001d001c);
    return _mm512_or_si512(words, _mm512_slli_epi16(words, 8));
  }

  // Spans of 64 e2m1 values, each 16 with an e4m3 scale, as long as scales are positive. Returns
  // the number of spans done.
  JAX_ATTN_INLINE static i64 LookUpNvfp4(const char* codes, const char* scales, i64 spans,
                                         Bf16* to) {
    // The elements for a scale s are 0, s / 2, s, t = 1.5 s, 2 s, 2 t, 4 s, 4 t: words of s and t
    // with other exponents. The exponent of e4m3 read as f16 is 8 less.
    const __m512 factors = _mm512_mask_mov_ps(_mm512_set1_ps(384), 0x00ff, _mm512_set1_ps(256));
    // Bytes of a vector of f32: the high words of lane b are s of block b, those of 8 + b are t.
    const __m256i words = _mm256_setr_epi8(0, 0, 2, 3, 2, 3, 34, 35, 2, 3, 34, 35, 2, 3, 34, 35, 0,
                                           0, 2, 3, 2, 3, 34, 35, 2, 3, 34, 35, 2, 3, 34, 35);
    const __m512i of_two = _mm512_inserti64x4(_mm512_castsi256_si512(words),
                                              _mm256_add_epi8(words, _mm256_set1_epi8(4)), 1);
    const __m128i powers = _mm_setr_epi16(0, -0x80, 0, 0, 0x80, 0x80, 0x100, 0x100);
    const __m128i negative = _mm_xor_si128(powers, _mm_set1_epi16(static_cast<int16_t>(0x8000)));
    const __m512i shifts =
        _mm512_broadcast_i64x4(_mm256_set_m128i(negative, powers));  // of each block's 16 words
    const __m512i upper =
        _mm512_mask_mov_epi16(_mm512_set1_epi16(0x0100), 0xffff0000, _mm512_set1_epi16(0x2120));
    const auto table = [&](__m512i x, int block) __attribute__((always_inline)) {
      const __m512i at = _mm512_add_epi8(of_two, _mm512_set1_epi8(static_cast<char>(4 * block)));
      return _mm512_add_epi16(_mm512_maskz_permutexvar_epi8(0xfffcfffcfffcfffc, at, x), shifts);
    };
    i64 i = 0;
    for (; i < spans; i += 2, codes += 64, scales += 8, to += 128) {
      const bool both = i + 1 < spans;
      u64 bytes;
      if (both) {
        memcpy(&bytes, scales, 8);
      } else {
        uint32_t four;
        memcpy(&four, scales, 4);
        bytes = four * 0x0000000100000001ull;
      }
      if (!ArePositive(bytes)) break;
      const __m256i f16 =
          _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_set1_epi64x(static_cast<int64_t>(bytes))), 7);
      const __m512i x = _mm512_castps_si512(_mm512_mul_ps(_mm512_cvtph_ps(f16), factors));
      LookUpSpan(codes, upper, upper, table(x, 0), table(x, 2), to);
      if (both) LookUpSpan(codes + 32, upper, upper, table(x, 4), table(x, 6), to + 64);
    }
    return Min(i, spans);
  }

  // 16 columns of two rows, from 16 bytes of each: lane i has the elements of byte i of a and of b.
  // The bf16 of a is in the low half, that of b in the high half. Tables have 16 words for a, then
  // for b.
  JAX_ATTN_INLINE static void LookUpPairs(const char* a, const char* b, __m512i low_table,
                                          __m512i high_table, Vec* low, Vec* high) {
    const auto load = [](const char* p) __attribute__((always_inline)) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    };
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i four_times = _mm512_add_epi32(
        _mm512_mullo_epi32(lane, _mm512_set1_epi32(0x01010101)), _mm512_set1_epi32(0x10100000));
    const __m512i bytes = _mm512_permutexvar_epi8(
        four_times, _mm512_castsi256_si512(_mm256_set_m128i(load(b), load(a))));
    const __m512i places = _mm512_set1_epi8(30), first = _mm512_set1_epi32(0x21200100);
    const __m512i of_low =
        _mm512_ternarylogic_epi32(_mm512_slli_epi16(bytes, 1), places, first, 0xea);
    const __m512i of_high =
        _mm512_ternarylogic_epi32(_mm512_srli_epi16(bytes, 3), places, first, 0xea);
    *low = _mm512_castsi512_ps(_mm512_permutexvar_epi8(of_low, low_table));
    *high = _mm512_castsi512_ps(_mm512_permutexvar_epi8(of_high, high_table));
  }

  // LookUpNvfp4 for spans of two rows whose scales are positive; to(column, x) takes 16 columns.
  template <class To>
  JAX_ATTN_INLINE static void PairNvfp4(const char* a, const char* b, const char* a_scales,
                                        const char* b_scales, i64 spans, To&& to) {
    // Lanes of s for a's blocks, then for b's, with t in their high words.
    const __m256i words = _mm256_setr_epi8(0, 0, 0, 1, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 0, 0,
                                           1, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3);
    const __m512i of_both = _mm512_inserti64x4(_mm512_castsi256_si512(words),
                                               _mm256_add_epi8(words, _mm256_set1_epi8(32)), 1);
    const __m128i powers = _mm_setr_epi16(0, -0x80, 0, 0, 0x80, 0x80, 0x100, 0x100);
    const __m128i negative = _mm_xor_si128(powers, _mm_set1_epi16(static_cast<int16_t>(0x8000)));
    const __m512i shifts = _mm512_broadcast_i64x4(_mm256_set_m128i(negative, powers));
    const auto table = [&](__m512i x, int block) __attribute__((always_inline)) {
      const __m512i at = _mm512_add_epi8(of_both, _mm512_set1_epi8(static_cast<char>(4 * block)));
      return _mm512_add_epi16(_mm512_maskz_permutexvar_epi8(0xfffcfffcfffcfffc, at, x), shifts);
    };
    const auto span = [&](i64 i, __m512i x, int block) __attribute__((always_inline)) {
      Vec low, high;
      LookUpPairs(a + 32 * i, b + 32 * i, table(x, block), table(x, block + 2), &low, &high);
      to(64 * i, low);
      to(64 * i + 32, high);
      LookUpPairs(a + 32 * i + 16, b + 32 * i + 16, table(x, block + 1), table(x, block + 3), &low,
                  &high);
      to(64 * i + 16, low);
      to(64 * i + 48, high);
    };
    for (i64 i = 0; i < spans; i += 2) {
      const bool both = i + 1 < spans;
      const size_t num = both ? 8 : 4;
      int64_t of_a = 0, of_b = 0;
      memcpy(&of_a, a_scales + 4 * i, num);
      memcpy(&of_b, b_scales + 4 * i, num);
      const __m256i f16 = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_set_epi64x(of_b, of_a)), 7);
      const __m512 s = _mm512_mul_ps(_mm512_cvtph_ps(f16), _mm512_set1_ps(256));
      const __m512i t = _mm512_castps_si512(_mm512_mul_ps(s, _mm512_set1_ps(1.5f)));
      const __m512i x =
          _mm512_mask_mov_epi16(t, 0x55555555, _mm512_srli_epi32(_mm512_castps_si512(s), 16));
      span(i, x, 0);
      if (both) span(i + 1, x, 4);
    }
  }

  // LookUpHalves for blocks of two rows, in the same way.
  template <class To>
  JAX_ATTN_INLINE static void PairMxfp4(const NibbleTable& table, const char* a, const char* b,
                                        const char* a_scales, const char* b_scales, i64 blocks,
                                        To&& to) {
    const auto table_of = [](const uint8_t* bytes) __attribute__((always_inline)) {
      return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes)));
    };
    // Words of the 16 table entries, twice.
    const __m512i order = _mm512_setr_epi64(0, 0, 1, 1, 0, 0, 1, 1);
    const __m512i words =
        _mm512_unpacklo_epi8(_mm512_permutexvar_epi64(order, table_of(table.low)),
                             _mm512_permutexvar_epi64(order, table_of(table.high)));
    for (i64 i = 0; i < blocks; ++i) {
      const auto shift_of = [&](const char* scales) __attribute__((always_inline)) {
        const int less = (table.top - static_cast<uint8_t>(scales[i])) * 0x80;
        return _mm512_set1_epi16(static_cast<int16_t>(less));
      };
      const __m512i shift = _mm512_mask_mov_epi16(shift_of(b_scales), 0xffff, shift_of(a_scales));
      const __m512i both = _mm512_subs_epu16(words, shift);
      Vec low, high;
      LookUpPairs(a + 16 * i, b + 16 * i, both, both, &low, &high);
      to(32 * i, low);
      to(32 * i + 16, high);
    }
  }

  // LookUpInt4 for spans of two rows, in the same way.
  template <class To>
  JAX_ATTN_INLINE static void PairInt4(const char* a, const char* b, const char* a_scales,
                                       const char* b_scales, i64 spans, To&& to) {
    const Vec numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
    for (i64 i = 0; i < spans; ++i) {
      int32_t of_a, of_b;
      memcpy(&of_a, a_scales + 4 * i, 4);
      memcpy(&of_b, b_scales + 4 * i, 4);
      alignas(16) float scale[4];
      _mm_store_ps(scale, _mm_cvtph_ps(_mm_setr_epi32(of_a, of_b, 0, 0)));
      asm volatile("" : "+m"(scale));  // a broadcast from memory is free
      const auto table = [&](int block) __attribute__((always_inline)) {
        return (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(numbers, Set(scale[2 + block])),
                                            _mm512_mul_ps(numbers, Set(scale[block])));
      };
      const __m512i first = table(0), second = table(1);
      Vec low, high;
      for (i64 half = 0; half < 2; ++half) {
        const i64 at = 32 * i + 16 * half;
        LookUpPairs(a + at, b + at, first, second, &low, &high);
        to(64 * i + 16 * half, low);
        to(64 * i + 16 * half + 32, high);
      }
    }
  }

  // Spans of 64 integers from -8 to 7, each 32 with an f16 scale.
  JAX_ATTN_INLINE static i64 LookUpInt4(const char* codes, const char* scales, i64 spans,
                                        Bf16* to) {
    const Vec numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
    const __m512i lower = _mm512_set1_epi16(0x0100), upper = _mm512_set1_epi16(0x2120);
    const auto span = [&](i64 i, const float* scale) __attribute__((always_inline)) {
      const __m512i table = (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(numbers, Set(scale[1])),
                                                         _mm512_mul_ps(numbers, Set(scale[0])));
      LookUpSpan(codes + 32 * i, lower, upper, table, table, to + 64 * i);
    };
    for (i64 i = 0; i < spans; i += 2) {
      const bool both = i + 1 < spans;
      int64_t halves = 0;
      both ? memcpy(&halves, scales + 4 * i, 8) : memcpy(&halves, scales + 4 * i, 4);
      alignas(16) float scale[4];
      _mm_store_ps(scale, _mm_cvtph_ps(_mm_cvtsi64_si128(halves)));
      asm volatile("" : "+m"(scale));  // a broadcast from memory is free
      span(i, scale);
      if (both) span(i + 1, scale + 2);
    }
    return spans;
  }

  // acc + a.low * b.low + a.high * b.high in f32; subnormal inputs count as 0.
  static Vec DotBf16(Vec a, Vec b, Vec acc) {
    return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
  }
  static Vec MaskLanes(Vec x, uint32_t mask) {
    return _mm512_and_ps(x, _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(mask))));
  }
  // Lane i: elements 2 i and 2 i + 1 of a, as bf16, for i < n; 0 beyond.
  static Vec LoadPairs(const E4m3* a, int n) {
    const __mmask32 mask = static_cast<__mmask32>((u64{1} << 2 * n) - 1);
    return _mm512_castsi512_ps(ToBf16x32(_mm256_maskz_loadu_epi8(mask, a)));
  }
  // Lane i: a[i] in the low half, b[i] in the high half, for i < n; 0 beyond.
  static Vec PairRows(const Bf16* a, const Bf16* b, int n) {
    const __mmask16 mask = static_cast<__mmask16>((1u << n) - 1);
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, a));
    const __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, b));
    return _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
  }
  static Vec PairRows(const E4m3* a, const E4m3* b, int n) {
    const __mmask16 mask = static_cast<__mmask16>((1u << n) - 1);
    const __m128i low = _mm_maskz_loadu_epi8(mask, a), high = _mm_maskz_loadu_epi8(mask, b);
    return _mm512_castsi512_ps(
        ToBf16x32(_mm256_set_m128i(_mm_unpackhi_epi8(low, high), _mm_unpacklo_epi8(low, high))));
  }
  // The same for 2 * kWidth lanes, in two vectors.
  static void PairRows(const E4m3* a, const E4m3* b, Vec* x) {
    x[0] = PairRows(a, b, kWidth);
    x[1] = PairRows(a + kWidth, b + kWidth, kWidth);
  }
  static void PairRows(const Bf16* a, const Bf16* b, Vec* x) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i low = _mm512_or_si512(_mm512_or_si512(lane, _mm512_slli_epi32(lane, 16)),
                                        _mm512_set1_epi32(32 << 16));
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    const __m512i u = _mm512_loadu_si512(a), w = _mm512_loadu_si512(b);
    x[0] = _mm512_castsi512_ps(_mm512_permutex2var_epi16(u, low, w));
    x[1] = _mm512_castsi512_ps(_mm512_permutex2var_epi16(u, high, w));
  }

 private:
  static __mmask32 First32(int n) {
    return n >= 32 ? ~__mmask32{0} : n <= 0 ? 0 : (__mmask32{1} << n) - 1;
  }
  static __m512i ToBf16x32(__m256i codes) {
    const __m512i x = _mm512_cvtepu8_epi16(codes), rest = _mm512_and_si512(x, Each16(0x7f));
    const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(rest, 4), Each16(0x3c00));
    // The eight values without an exponent: multiples of 2^-9.
    const __m512i small = _mm512_broadcast_i32x4(
        _mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
    __m512i y = _mm512_mask_permutexvar_epi16(normal, _mm512_cmplt_epu16_mask(rest, Each16(8)),
                                              rest, small);
    y = _mm512_mask_mov_epi16(y, _mm512_cmpeq_epi16_mask(rest, Each16(0x7f)), Each16(0x7fc0));
    return _mm512_or_si512(y, _mm512_slli_epi16(_mm512_and_si512(x, Each16(0x80)), 8));
  }
  static __m512i Each16(int x) { return _mm512_set1_epi16(static_cast<int16_t>(x)); }
};
#endif

}  // namespace
}  // namespace jax_attn
