// Quantizes and dequantizes rows of keys and values, in every format: append quantizes, and kernels
// dequantize to their 16-bit type in shared memory. The bits are those of cpu/kernels/codec.h.
// (e4m3 may also be multiplied from registers, see e4m3.cuh.)
//
// A row belongs to one token and head: its quantized values, then its scales if it has its own.
#pragma once

#include "cuda/common/e4m3.cuh"
#include "cuda/common/math.cuh"

namespace jax_attn {

// --- dequantize: eight bytes at a time ---

// An e5m2 is the high byte of an f16.
template <int kDtype>
__device__ __forceinline__ uint4 DequantizeE5m2(u32 low, u32 high) {
  return make_uint4(FromF16x2<kDtype>(__byte_perm(low, 0, 0x1404)),
                    FromF16x2<kDtype>(__byte_perm(low, 0, 0x3424)),
                    FromF16x2<kDtype>(__byte_perm(high, 0, 0x1404)),
                    FromF16x2<kDtype>(__byte_perm(high, 0, 0x3424)));
}

// Dequantizes float8, e4m3 or e5m2.
template <class Traits>
__device__ __forceinline__ uint4 DequantizeFloat8(u32 low, u32 high) {
  if constexpr (Traits::kKvFormat == kE5m2Format) {
    return DequantizeE5m2<Traits::kDtype>(low, high);
  } else {
    static_assert(Traits::kKvFormat == kE4m3Format, "float8");
    uint4 x;
    UnpackE4m3<Traits>(low, x.x, x.y);
    UnpackE4m3<Traits>(high, x.z, x.w);
    return x;
  }
}

template <int kDtype>
__device__ __forceinline__ uint4 DequantizeInt8(u32 low, u32 high, float scale) {
  using E = Element<kDtype>;
  // With its highest bit flipped a value is n = value + 128, and 2^23 + n has the bits 0x4b000000 +
  // n.
  const u32 flipped[2] = {low ^ 0x80808080u, high ^ 0x80808080u};
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const u32 bits = __byte_perm(flipped[i / 4], 0x4b000000u, 0x7440u + i % 4);
    x[i] = (__uint_as_float(bits) - (8388608.0f + 128.0f)) * scale;
  }
  return make_uint4(E::Pack(x[0], x[1]), E::Pack(x[2], x[3]), E::Pack(x[4], x[5]),
                    E::Pack(x[6], x[7]));
}

// Values of four bits: the low halves of eight bytes belong to one block, the high halves to
// another or to the same. Pairs: two elements from the low halves of two neighbouring bytes, and
// two from the high halves; i: which two of the four bytes. Factors: scales of a block.

// 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign.
template <int kDtype>
__device__ __forceinline__ void E2m1Pairs(u32 word, int i, u32& first, u32& second) {
  // High and low bytes of 0, 0.5, 1, 1.5 and of 2, 3, 4, 6.
  constexpr bool kIsBf16 = kDtype == kElementBf16;
  constexpr u32 kHighs[2] = {kIsBf16 ? 0x3f3f3f00 : 0x3e3c3800, kIsBf16 ? 0x40404040 : 0x46444240};
  constexpr u32 kLows[2] = {kIsBf16 ? 0xc0800000 : 0, kIsBf16 ? 0xc0804000 : 0};
  // Four values are the digits of a byte permutation. Their signs go to the highest bits of bytes.
  const u32 digits = (word & 0x77777777u) >> i * 16;
  const u32 signs = __byte_perm(word, word << 4, i == 0 ? 0x1504 : 0x3726) & 0x80808080u;
  const u32 highs = __byte_perm(kHighs[0], kHighs[1], digits & 0xffff) | signs;
  const u32 lows = __byte_perm(kLows[0], kLows[1], digits & 0xffff);
  first = __byte_perm(lows, highs, 0x6240);
  second = __byte_perm(lows, highs, 0x7351);
}

// Integers from -8 to 7.
template <int kDtype>
__device__ __forceinline__ void Int4Pairs(u32 word, int i, u32& first, u32& second) {
  using E = Element<kDtype>;
  // With its highest bit flipped a value is n = value + 8, and 2^7 + n or 2^10 + n has n as its low
  // bits in the type.
  constexpr bool kIsBf16 = kDtype == kElementBf16;
  constexpr u32 kMagic = InBothHalves(kIsBf16 ? 0x4300 : 0x6400);
  constexpr u32 kLess = InBothHalves(kIsBf16 ? 0xc308 : 0xe408), kMask = InBothHalves(0x000f);
  constexpr u32 kOne = InBothHalves(kIsBf16 ? 0x3f80 : 0x3c00);
  const u32 bytes = __byte_perm(word ^ 0x88888888u, 0, i == 0 ? 0x4140 : 0x4342);
  first = E::FmaX2((bytes & kMask) | kMagic, kOne, kLess);
  second = E::FmaX2((bytes >> 4 & kMask) | kMagic, kOne, kLess);
}

// An mxfp4 scale as factors of two elements at once. It is a bf16, but mostly not an f16: there it
// is the product of two f16. The first product is exact, and the second rounds as the scale itself
// would.
template <int kDtype>
class MxFactors {
 public:
  __device__ __forceinline__ explicit MxFactors(u32 exponent) {
    const bool is_nan = exponent == 255;
    if constexpr (kDtype == kElementBf16) {
      first_ = InBothHalves(is_nan ? 0x7fc0 : exponent << 7);
    } else {
      const int power = static_cast<int>(exponent) - 127, first = Clamp(power, -14, 12);
      first_ = InBothHalves(static_cast<u32>(first + 15) << 10);
      const u32 second = static_cast<u32>(Clamp(power - first, -14, 15) + 15);
      second_ = InBothHalves(is_nan ? 0x7e00 : second << 10);
    }
  }
  __device__ __forceinline__ u32 Times(u32 x) const {
    using E = Element<kDtype>;
    const u32 minus_zero = InBothHalves(0x8000);
    x = E::FmaX2(x, first_, minus_zero);
    return kDtype == kElementBf16 ? x : E::FmaX2(x, second_, minus_zero);
  }

 private:
  u32 first_, second_ = 0;
};

// A scale that is a number of the type, in both halves. Products of nvfp4 are exact.
template <int kDtype>
struct OneFactor {
  u32 factor;
  __device__ __forceinline__ u32 Times(u32 x) const {
    return Element<kDtype>::FmaX2(x, factor, InBothHalves(0x8000));
  }
};

// A f16 scale for bf16 elements: its first 8 bits and the rest, so that a sum of two products is
// rounded once. Both have its sign, so that zeros get it.
class SplitFactor {
 public:
  __device__ __forceinline__ explicit SplitFactor(u16 scale) {
    const float x = F16ToFloat(scale);
    const u32 bits = __float_as_uint(x), first = bits & 0xffff0000u;
    const bool is_finite = (bits & 0x7f800000) != 0x7f800000;
    const float rest = is_finite ? x - __uint_as_float(first) : x;
    first_ = InBothHalves(first >> 16);
    rest_ = InBothHalves((__float_as_uint(rest) | (bits & 0x80000000u)) >> 16);
  }
  __device__ __forceinline__ u32 Times(u32 x) const {
    using E = Element<kElementBf16>;
    return E::FmaX2(x, first_, E::FmaX2(x, rest_, InBothHalves(0x8000)));
  }

 private:
  u32 first_, rest_;
};

// Loads the scales of eight bytes of values for DequantizeNibbles. Their low halves belong to block
// `low_block`.
template <int kFormat>
__device__ __forceinline__ u32 LoadBlockScales(const unsigned char* scales, int low_block,
                                               int high_block) {
  if constexpr (kFormat == kMxfp4Format) {  // both blocks are the same
    return scales[low_block];
  } else if constexpr (kFormat == kNvfp4Format) {
    return u32{scales[low_block]} << 8 | u32{scales[high_block]} << 24;
  } else {
    static_assert(kFormat == kInt4Format, "a format of four bits");
    const u16* halves = reinterpret_cast<const u16*>(scales);
    return u32{halves[low_block]} | u32{halves[high_block]} << 16;
  }
}

template <int kFormat, int kDtype>
__device__ __forceinline__ void DequantizeNibbles(u32 low, u32 high, u32 scales, uint4& first,
                                                  uint4& second) {
  u32 of_first[4], of_second[4];
  const auto times = [&](const auto& low_factor, const auto& high_factor) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 word = i < 2 ? low : high;
      u32 a, b;
      if constexpr (kFormat == kInt4Format) {
        Int4Pairs<kDtype>(word, i % 2, a, b);
      } else {
        E2m1Pairs<kDtype>(word, i % 2, a, b);
      }
      of_first[i] = low_factor.Times(a);
      of_second[i] = high_factor.Times(b);
    }
  };
  if constexpr (kFormat == kMxfp4Format) {
    const MxFactors<kDtype> factors(scales);
    times(factors, factors);
  } else if constexpr (kFormat == kNvfp4Format) {
    const u32 pair = E4m3HighBytes<kDtype>(scales);
    times(OneFactor<kDtype>{__byte_perm(pair, 0, 0x1010)},
          OneFactor<kDtype>{__byte_perm(pair, 0, 0x3232)});
  } else {
    static_assert(kFormat == kInt4Format, "a format of four bits");
    const u16 low_scale = static_cast<u16>(scales), high_scale = static_cast<u16>(scales >> 16);
    if constexpr (kDtype == kElementBf16) {
      times(SplitFactor(low_scale), SplitFactor(high_scale));
    } else {
      times(OneFactor<kDtype>{InBothHalves(low_scale)},
            OneFactor<kDtype>{InBothHalves(high_scale)});
    }
  }
  first = make_uint4(of_first[0], of_first[1], of_first[2], of_first[3]);
  second = make_uint4(of_second[0], of_second[1], of_second[2], of_second[3]);
}

// --- quantize: a warp a row, a lane eight elements ---

constexpr float kLeastScale = 0x1p-126f;    // products with it are normal numbers
constexpr float kRoundMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer

template <int kDtype>
__device__ __forceinline__ void EightElements(const uint4& bits, float (&x)[8]) {
  const u32 pairs[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x[i] = Element<kDtype>::ToFloat(static_cast<u16>(pairs[i / 2] >> i % 2 * 16));
  }
}

// Rounds to float8: to nearest, ties to even. Magnitudes above the largest value, 448 or 57344,
// become that. NaN stays NaN.
template <int kFormat>
__device__ __forceinline__ u32 ToFloat8(float x) {
  static_assert(kFormat == kE4m3Format || kFormat == kE5m2Format);
  constexpr int kMantissa = kFormat == kE4m3Format ? 3 : 2, kShift = 23 - kMantissa;
  constexpr u32 kBias = (1 << (6 - kMantissa)) - 1, kNan = 0x7f;
  constexpr u32 kLargest = kFormat == kE4m3Format ? kNan - 1 : 0x7b;  // e5m2: just below infinity
  // Bits of a float8 at the position of f32's are those of its value, except for the bias of the
  // exponent.
  constexpr u32 kBiases = (127 - kBias) << 23;
  // At this magnitude f32 has as many fraction bits as a subnormal float8.
  constexpr u32 kSameFraction = (127 + 23 - kMantissa + 1 - kBias) << 23;
  const u32 bits = __float_as_uint(x), magnitude = bits & 0x7fffffff;
  u32 code;
  if (magnitude > 0x7f800000) {
    code = kNan;
  } else if (magnitude >= (kLargest << kShift) + kBiases) {
    code = kLargest;
  } else if (magnitude < kBiases + (1 << 23)) {  // subnormal: the addition rounds
    code = __float_as_uint(__uint_as_float(magnitude) + __uint_as_float(kSameFraction)) -
           kSameFraction;
  } else {
    code = (magnitude - kBiases + (1 << (kShift - 1)) - 1 + (magnitude >> kShift & 1)) >> kShift;
  }
  return code | (bits >> 24 & 0x80);
}

// Quantizes eight elements, divided by the scale of their head.
template <int kFormat, int kDtype>
__device__ __forceinline__ uint2 QuantizeEight(const uint4& bits, float scale) {
  float x[8];
  EightElements<kDtype>(bits, x);
  u32 quantized[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 8; ++i) quantized[i / 4] |= ToFloat8<kFormat>(x[i] / scale) << i % 4 * 8;
  return make_uint2(quantized[0], quantized[1]);
}

// Rounds to the nearest e2m1, ties to even.
__device__ __forceinline__ u32 ToE2m1(float x) {
  const u32 bits = __float_as_uint(x);
  const float y = __uint_as_float(bits & 0x7fffffff);
  const u32 code = (y > 0.25f) + (y >= 0.75f) + (y > 1.25f) + (y >= 1.75f) + (y > 2.5f) +
                   (y >= 3.5f) + (y > 5.0f);
  return code | (bits >> 28 & 8);
}

// Writes eight bytes. Rows whose length is not a multiple of 4 are not aligned.
__device__ __forceinline__ void StoreEightBytes(unsigned char* to, i64 row_bytes, u32 low,
                                                u32 high) {
  if (row_bytes % 4 == 0) {
    reinterpret_cast<u32*>(to)[0] = low;
    reinterpret_cast<u32*>(to)[1] = high;
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) to[i] = static_cast<unsigned char>((i < 4 ? low : high) >> i % 4 * 8);
}

// scales: of heads, or null: 1.
template <int kFormat>
__device__ __forceinline__ float HeadScaleOf(const float* scales, int head) {
  return FormatOf(kFormat).has_head_scale && scales != nullptr ? scales[head] : 1.0f;
}

__device__ __forceinline__ u32 Larger(u32 a, u32 b) { return a > b ? a : b; }

template <int kLanes>
__device__ __forceinline__ u32 LargestOfLanes(u32 x) {
#pragma unroll
  for (int i = 1; i < kLanes; i *= 2) x = Larger(x, __shfl_xor_sync(kFullWarp, x, i));
  return x;
}

// Values of four bits for a lane's elements, the first one lowest, and the scale of their block. A
// block lies in a few neighbouring lanes.
struct EightNibbles {
  u32 quantized, scale;
};

template <int kFormat, int kDtype>
__device__ __forceinline__ EightNibbles QuantizeNibbles(const float (&x)[8], float head_scale) {
  constexpr u32 kInfinity = 0x7f800000;
  constexpr bool kIsInt4 = kFormat == kInt4Format;
  u32 largest = 0;  // largest magnitude as bits; NaN is above infinity
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const u32 bits = __float_as_uint(x[i]);
    // int4: with the sign below the magnitude.
    largest = Larger(largest, kIsInt4 ? bits << 1 | bits >> 31 : bits & 0x7fffffff);
  }
  largest = LargestOfLanes<FormatOf(kFormat).block / 8>(largest);
  const u32 magnitude = kIsInt4 ? largest >> 1 : largest;
  const bool is_finite = magnitude < kInfinity;
  EightNibbles eight = {};
  const auto put = [&](auto quantize) {
#pragma unroll
    for (int i = 0; i < 8; ++i) eight.quantized |= quantize(x[i]) << 4 * i;
  };
  if constexpr (kFormat == kMxfp4Format) {
    // The smallest power of two whose 6-fold is at least all magnitudes, and whose half is a number
    // of the type, in f32 a normal one.
    const int exponent =
        static_cast<int>(largest >> 23) - ((largest & 0x7fffff) > 0x400000 ? 1 : 2);
    const u32 scale = static_cast<u32>(Max(exponent, kDtype == kElementF16 ? 104 : 3));
    eight.scale = is_finite ? scale : 255;
    const float inverse = is_finite ? __uint_as_float((254 - scale) << 23) : 0.0f;
    put([=](float x) { return ToE2m1(x * inverse); });
    return eight;
  }
  if constexpr (kFormat == kNvfp4Format) {
    eight.scale = 0x7f;  // NaN
    if (!is_finite) return eight;
    const float wanted = __uint_as_float(magnitude) / (6.0f * head_scale);
    eight.scale = Larger(ToFloat8<kE4m3Format>(wanted), 1);
    using E = Element<kElementBf16>;
    const float scale = E::ToFloat(static_cast<u16>(E4m3HighBytes<kElementBf16>(eight.scale << 8)));
    const float step = fmaxf(scale * head_scale, kLeastScale);
    put([=](float x) { return ToE2m1(x / step); });
  }
  if constexpr (kIsInt4) {
    eight.scale = 0x7e00;  // NaN
    if (!is_finite) return eight;
    // -8 is the element with the largest magnitude; if both signs have it, the negative one.
    const float eighth = __uint_as_float(magnitude) * 0.125f;
    u32 scale = PackF16(eighth, 0.0f) & 0xffff;
    if (F16ToFloat(static_cast<u16>(scale)) < eighth) ++scale;
    scale = scale < 0x7bff ? Larger(scale, 1) : 0x7bff;
    eight.scale = scale | (largest > 0 && (largest & 1) == 0 ? 0x8000 : 0);
    const float factor = F16ToFloat(static_cast<u16>(eight.scale));
    put([=](float x) {
      const float y = fminf(fmaxf(x / factor, -8.0f), 7.0f);
      return static_cast<u32>(static_cast<int>((y + kRoundMagic) - kRoundMagic)) & 15;
    });
  }
  return eight;
}

// Quantizes a row with scales of its own to `to`, by a whole warp. Lane l has elements [8 l, 8 l +
// 8) of the row in x, zeros behind its end. head_scale: for formats that have one.
template <int kFormat, int kDtype>
__device__ __forceinline__ void QuantizeRowByWarp(const float (&x)[8], int head_dim,
                                                  float head_scale, unsigned char* to) {
  constexpr int kInfinity = 0x7f800000;
  const int lane = threadIdx.x % kWarpSize, first = 8 * lane;
  const i64 row_bytes = QuantizedRowBytes(kFormat, head_dim);
  if constexpr (kFormat == kInt8Format) {
    int largest = 0;  // largest magnitude as bits; NaN is above infinity
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      largest = Max(largest, static_cast<int>(__float_as_uint(x[i]) & 0x7fffffff));
    }
    largest = static_cast<int>(WarpMax(static_cast<u32>(largest)));
    const bool is_finite = largest < kInfinity;
    const float of_largest = __int_as_float(largest) / 127.0f;
    const float scale = is_finite ? fmaxf(of_largest, kLeastScale) : __uint_as_float(0x7fc00000);
    u32 quantized[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float nearest = ((is_finite ? x[i] / scale : 0.0f) + kRoundMagic) - kRoundMagic;
      quantized[i / 4] |= (static_cast<u32>(static_cast<int>(nearest)) & 0xff) << i % 4 * 8;
    }
    if (first < head_dim) StoreEightBytes(to + first, row_bytes, quantized[0], quantized[1]);
    if (lane == 0) *reinterpret_cast<float*>(to + head_dim) = scale;
  } else {
    constexpr int kBlock = FormatOf(kFormat).block, kSpan = FormatOf(kFormat).span;
    const auto [quantized, scale] = QuantizeNibbles<kFormat, kDtype>(x, head_scale);
    const int begin = first / kSpan * kSpan, in_span = first - begin;
    const int half = Min(kSpan, head_dim - begin) / 2;
    const u32 others = __shfl_sync(kFullWarp, quantized, lane + half / 8);
    if (first >= head_dim) return;
    if (first % kBlock == 0) {
      unsigned char* scales = to + head_dim / 2;
      if constexpr (FormatOf(kFormat).scale_bytes == 2) {
        reinterpret_cast<u16*>(scales)[first / kBlock] = static_cast<u16>(scale);
      } else {
        scales[first / kBlock] = static_cast<unsigned char>(scale);
      }
    }
    if (in_span >= half) return;
    u32 pairs[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const u32 pair = (quantized >> 4 * i & 15) | (others >> 4 * i & 15) << 4;
      pairs[i / 4] |= pair << i % 4 * 8;
    }
    StoreEightBytes(to + begin / 2 + in_span, row_bytes, pairs[0], pairs[1]);
  }
}

}  // namespace jax_attn
