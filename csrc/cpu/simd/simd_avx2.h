// Eight f32 lanes: AVX2, FMA, F16C. The vocabulary is documented in simd_baseline.h.
#pragma once

#include <immintrin.h>

#include "cpu/simd/simd_types.h"

namespace jax_attn {
namespace {

struct Avx2 {
  using Vec = __m256;
  static constexpr int kWidth = 8;
  static constexpr int kRows = 6;  // 12 accumulators, 2 of b, 1 of a: 15 of 16 registers
  static constexpr int kVecs = 2;
  static constexpr int kWidePanels = 1;
  static constexpr bool kBf16Dot = false;
  static constexpr bool kTiles = false;
  static constexpr bool kLooksUp = false;
  static constexpr bool kFloorExp2 = false;
  static constexpr bool kFuses = true;  // Fma rounds once
  static constexpr bool kMasksLanes = false;
  static constexpr int kLaneCodes = 2;
  static constexpr int kCodeColumns = kWidth;

  static Vec Zero() { return _mm256_setzero_ps(); }
  static Vec Set(float x) { return _mm256_set1_ps(x); }
  static Vec Broadcast(const void* p) {
    float x;
    memcpy(&x, p, 4);
    return _mm256_set1_ps(x);
  }

  static Vec Load(const float* p) { return _mm256_loadu_ps(p); }
  static Vec Load(const Bf16* p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  }
  static Vec Load(const F16* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  // Converts via f16, whose exponent has a bias of 15 where e4m3 has 7. That conversion handles
  // subnormals in any mode of the thread.
  static Vec Load(const E4m3* p) {
    const __m128i codes = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const __m128i high = _mm_slli_epi16(codes, 8);
    const __m128i half = _mm_and_si128(_mm_srai_epi16(high, 1), _mm_set1_epi16(-0x4080));
    const __m128i largest = _mm_set1_epi16(0x3f80);  // NaN
    const __m128i nan = _mm_cmpeq_epi16(_mm_and_si128(half, largest), largest);
    const __m128i with_nan = _mm_or_si128(half, _mm_and_si128(nan, _mm_set1_epi16(0x4000)));
    return _mm256_mul_ps(_mm256_cvtph_ps(with_nan), _mm256_set1_ps(0x1p8f));
  }
  template <typename T>
  static void LoadTwo(const T* p, Vec* v) {
    v[0] = Load(p);
    v[1] = Load(p + kWidth);
  }
  // n is 8: head dims are multiples of 8.
  template <typename T>
  static Vec LoadFirst(const T* p, int) {
    return Load(p);
  }

  static void Store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
  static void Store(Bf16* p, Vec v) {
    const __m256i u = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
    const Vec nan = _mm256_cmp_ps(v, v, _CMP_UNORD_Q);
    const __m256i wide =
        _mm256_srli_epi32(_mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(rounded),
                                                               _mm256_castsi256_ps(quiet), nan)),
                          16);
    const __m128i half =
        _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), half);
  }
  static void Store(F16* p, Vec v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
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

  static Vec Add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
  static Vec Sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
  static Vec Mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
  static Vec Div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
  static Vec Fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
  static Vec Max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
  static Vec Abs(Vec a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
  static Vec CopySign(Vec x, Vec s) {
    const Vec sign = _mm256_set1_ps(-0.0f);
    return _mm256_or_ps(_mm256_andnot_ps(sign, x), _mm256_and_ps(sign, s));
  }
  static Vec SelectLess(Vec a, Vec b, Vec yes, Vec no) {
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
  }

  static Vec Round(Vec x) {
    return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static Vec ScaleByPow2(Vec y, Vec n) {
    const __m256i shifted = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(y), shifted));
  }

  static Vec KeepLanes(Vec x, int lo, int hi) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(lo), lane);
    const __m256i inside =
        _mm256_andnot_si256(below, _mm256_cmpgt_epi32(_mm256_set1_epi32(hi), lane));
    return _mm256_blendv_ps(_mm256_set1_ps(kNegInf), x, _mm256_castsi256_ps(inside));
  }

  static float First(Vec v) { return _mm256_cvtss_f32(v); }
  static float ReduceAdd(Vec v) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
  }
  static float ReduceMax(Vec v) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
  }
  static bool AnyNan(Vec v) { return _mm256_movemask_ps(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)) != 0; }

  // n is 8 or 4.
  static void TransposeLoad(const char* const* rows, ptrdiff_t offset, int n, Vec* out) {
    // Rows i and i + 4 share a register, so that only four-lane shuffles remain.
    Vec r[4], s[4];
    const auto load = [&](int row, int half) {
      return _mm_loadu_ps(reinterpret_cast<const float*>(rows[row] + offset + half * 16));
    };
    JAX_ATTN_UNROLL
    for (int half = 0; half < 2; ++half) {
      if (half * 4 >= n) return;
      JAX_ATTN_UNROLL
      for (int i = 0; i < 4; ++i) {
        r[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(load(i, half)), load(i + 4, half), 1);
      }
      Transpose4(r, s);
      JAX_ATTN_UNROLL
      for (int i = 0; i < 4; ++i) out[half * 4 + i] = s[i];
    }
  }
  static Vec LoadLanes(const void* p, int n) {
    const float* lanes = static_cast<const float*>(p);
    return n == 8 ? _mm256_loadu_ps(lanes) : _mm256_zextps128_ps256(_mm_loadu_ps(lanes));
  }
  static void Interleave(Vec a, Vec b, Vec* first, Vec* second) {
    const Vec low = _mm256_unpacklo_ps(a, b), high = _mm256_unpackhi_ps(a, b);
    *first = _mm256_permute2f128_ps(low, high, 0x20);
    *second = _mm256_permute2f128_ps(low, high, 0x31);
  }
  static Vec PairLow(Vec pairs) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(pairs), 16));
  }
  static Vec PairHigh(Vec pairs) {
    return _mm256_and_ps(pairs,
                         _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(0xffff0000))));
  }
  static void Transpose(Vec* r) {
    Vec half[4], s[4];
    Vec out[8];
    JAX_ATTN_UNROLL
    for (int h = 0; h < 2; ++h) {
      JAX_ATTN_UNROLL
      for (int i = 0; i < 4; ++i) {
        half[i] = h == 0 ? _mm256_permute2f128_ps(r[i], r[i + 4], 0x20)
                         : _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
      }
      Transpose4(half, s);
      JAX_ATTN_UNROLL
      for (int i = 0; i < 4; ++i) out[h * 4 + i] = s[i];
    }
    JAX_ATTN_UNROLL
    for (int i = 0; i < 8; ++i) r[i] = out[i];
  }

  static Vec LoadCodes(const char* p) {
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_cvtepi8_epi16(codes));
  }
  static void PairCodes(const char* const* rows, i64 offset, int, Vec* to) {
    const auto load = [&](int row) {
      return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(rows[row] + offset));
    };
    to[0] = _mm256_castsi256_ps(_mm256_cvtepi8_epi16(_mm_unpacklo_epi8(load(0), load(1))));
  }
  static Vec DotShorts(Vec a, Vec b, Vec acc) {
    const __m256i sums = _mm256_madd_epi16(_mm256_castps_si256(a), _mm256_castps_si256(b));
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(acc), sums));
  }
  static Vec FromInt(Vec v) { return _mm256_cvtepi32_ps(_mm256_castps_si256(v)); }
  static void StoreCodes(char* to, Vec x) {
    const __m256i codes = _mm256_srai_epi32(_mm256_slli_epi32(_mm256_castps_si256(x), 16), 16);
    const __m128i half =
        _mm_packs_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), half);
  }
  static void StoreManyCodes(char* to, const Vec* x) {
    JAX_ATTN_UNROLL
    for (int i = 0; i < 64 / kWidth; ++i) StoreCodes(to + i * kWidth * 2, x[i]);
  }

 private:
  // 4 x 4 transposes of both 128-bit halves.
  static void Transpose4(const Vec* r, Vec* out) {
    const Vec t0 = _mm256_unpacklo_ps(r[0], r[1]), t1 = _mm256_unpackhi_ps(r[0], r[1]);
    const Vec t2 = _mm256_unpacklo_ps(r[2], r[3]), t3 = _mm256_unpackhi_ps(r[2], r[3]);
    out[0] = _mm256_shuffle_ps(t0, t2, 0x44);
    out[1] = _mm256_shuffle_ps(t0, t2, 0xee);
    out[2] = _mm256_shuffle_ps(t1, t3, 0x44);
    out[3] = _mm256_shuffle_ps(t1, t3, 0xee);
  }
};

}  // namespace
}  // namespace jax_attn
