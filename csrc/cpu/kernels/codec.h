// Quantized rows of keys and values: how append encodes them, and how they are decoded. Internal
// linkage: see kernels.h.
//
// A row belongs to one token and head: its quantized values, then its scales if it has its own
// (params.h, FormatOf). Intermediate values are never f32 subnormals, because XLA's threads flush
// them to 0.
#pragma once

#include "cpu/simd/simd_types.h"

namespace jax_attn {
namespace {

// Limits for a quantized row: CheckSpec allows head dims up to kMaxCodedDim.
constexpr i64 kMaxCodedDim = 576, kMaxCodeRowBytes = kMaxCodedDim + 8;

constexpr uint32_t kInfBits = 0x7f800000, kNanBits = 0x7fc00000;

inline uint32_t MagnitudeOf(float x) { return BitsOf(x) & 0x7fffffff; }

template <typename T>
uint32_t LargestMagnitude(const T* x, i64 n) {
  uint32_t largest = 0;  // the bits of NaN are larger than those of infinity
  for (i64 i = 0; i < n; ++i) {
    const uint32_t bits = MagnitudeOf(ToF32(x[i]));
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

// to = x, rounded to T.
template <class Isa, typename X, typename T>
void StoreElements(const X* x, i64 n, T* to) {
  for (i64 i = 0; i < n; i += Isa::kWidth) {
    const int lanes = static_cast<int>(Min(Isa::kWidth, n - i));
    Isa::StoreFirst(to + i, Isa::LoadFirst(x + i, lanes), lanes);
  }
}

// --- formats of exponent and mantissa

// The bf16 of a positive number with kMantissa bits of mantissa, including subnormals.
template <int kMantissa, int kBias>
constexpr uint32_t SmallFloat(uint32_t bits) {
  uint32_t exponent = bits >> kMantissa, mantissa = bits & ((1 << kMantissa) - 1);
  if (exponent == 0) {
    if (mantissa == 0) return 0;
    for (exponent = 1; mantissa >> kMantissa == 0; mantissa <<= 1) --exponent;
    mantissa -= 1 << kMantissa;
  }
  return (exponent + 127 - kBias) << 7 | mantissa << (7 - kMantissa);
}

template <class Magnitude>
constexpr ByteTable MakeByteTable(Magnitude magnitude) {
  ByteTable table{};
  for (uint32_t i = 0; i < 128; ++i) {
    table.low[i] = static_cast<uint8_t>(magnitude(i) & 0xff);
    table.high[i] = static_cast<uint8_t>(magnitude(i) >> 8);
  }
  return table;
}
constexpr ByteTable kE4m3Table =
    MakeByteTable([](uint32_t x) { return x == 0x7f ? kNanBits >> 16 : SmallFloat<3, 7>(x); });
constexpr ByteTable kE5m2Table = MakeByteTable([](uint32_t x) {
  return x > 0x7c ? kNanBits >> 16 : x == 0x7c ? kInfBits >> 16 : SmallFloat<2, 15>(x);
});

// Whether quantized values become elements of T by table look-up.
template <class Isa, typename T>
constexpr bool kLooksUp = Isa::kLooksUp && IsBf16<T>;

template <class Isa, typename T>
JAX_ATTN_INLINE void DecodeE4m3(const char* from, i64 n, T* to) {
  if constexpr (kLooksUp<Isa, T>) {
    Isa::LookUp(kE4m3Table, from, n, to);
  } else {
    StoreElements<Isa>(reinterpret_cast<const E4m3*>(from), n, to);
  }
}

// A format that is decoded to pairs defines
//   CanPair(row, head_dim)              whether the scales of a row allow it
//   LookUpPair<Isa>(a, b, head_dim, to) two rows: to(column, x) takes 16 pairs of elements
// head_dim is a multiple of 64.
template <const ByteTable& kTable>
struct BytePairs {
  static bool CanPair(const char*, i64) { return true; }
  template <class Isa, class To>
  JAX_ATTN_INLINE static void LookUpPair(const char* a, const char* b, i64 head_dim, To&& to) {
    Isa::PairLookUp(kTable, a, b, head_dim, to);
  }
};

// --- e5m2: half of an f16

inline uint8_t ToE5m2(float x) { return ToFloat8<2, 0x7b>(x); }  // 57344: below infinity

template <class Isa, typename T>
JAX_ATTN_INLINE void DecodeE5m2(const char* from, i64 n, T* to) {
  if constexpr (kLooksUp<Isa, T>) return Isa::LookUp(kE5m2Table, from, n, to);
  F16 x[kMaxCodedDim];
  for (i64 i = 0; i < n; ++i) x[i].bits = static_cast<uint16_t>(static_cast<uint8_t>(from[i]) << 8);
  StoreElements<Isa>(x, n, to);
}

// --- int8; the scale is the largest magnitude of the row / 127

constexpr float kLeastScale = 0x1p-126f;  // dot products with it are normal numbers

template <typename T>
void EncodeInt8(const T* from, i64 n, char* to) {
  const uint32_t largest = LargestMagnitude(from, n);
  // A row that contains NaN or infinity becomes NaN.
  float scale = FromBits(kNanBits);
  if (largest < kInfBits) {
    scale = FromBits(largest) / 127.0f;
    scale = scale > kLeastScale ? scale : kLeastScale;
  }
  for (i64 i = 0; i < n; ++i) {
    const float x = largest < kInfBits ? ToF32(from[i]) / scale : 0.0f;
    const float nearest = (x + kRoundMagic) - kRoundMagic;
    to[i] = static_cast<char>(static_cast<int32_t>(nearest));
  }
  memcpy(to + n, &scale, sizeof(scale));
}

template <class Isa, typename T>
JAX_ATTN_INLINE void DecodeInt8(const char* from, i64 n, T* to) {
  float scale, x[kMaxCodedDim];
  memcpy(&scale, from + n, sizeof(scale));
  if constexpr (kLooksUp<Isa, T>) return Isa::ScaleInt8(from, n, scale, to);
  for (i64 i = 0; i < n; ++i) x[i] = static_cast<float>(static_cast<int8_t>(from[i])) * scale;
  StoreElements<Isa>(x, n, to);
}

struct Int8Pairs {
  static bool CanPair(const char*, i64) { return true; }
  template <class Isa, class To>
  JAX_ATTN_INLINE static void LookUpPair(const char* a, const char* b, i64 head_dim, To&& to) {
    float of_a, of_b;
    memcpy(&of_a, a + head_dim, sizeof(of_a));
    memcpy(&of_b, b + head_dim, sizeof(of_b));
    Isa::PairInt8(a, b, head_dim, of_a, of_b, to);
  }
};

// --- 4-bit formats: blocks with their own scales, which a Codec writes and reads

// Encodes a row block by block with Codec::EncodeBlock: a 4-bit value for each element, and a scale
// per block.
template <class Codec, typename T>
void EncodeNibbles(const T* from, i64 head_dim, float head_scale, char* to) {
  constexpr KvFormat kFormat = FormatOf(Codec::kFormat);
  uint8_t codes[kMaxCodedDim];
  char* scales = to + head_dim / 2;
  for (i64 d = 0; d < head_dim; d += kFormat.block, scales += kFormat.scale_bytes) {
    Codec::EncodeBlock(from + d, Min(kFormat.block, head_dim - d), head_scale, codes + d, scales);
  }
  for (i64 d = 0; d < head_dim; d += kFormat.span) {
    const i64 half = Min(kFormat.span, head_dim - d) / 2;
    for (i64 i = d; i < d + half; ++i) *to++ = static_cast<char>(codes[i] | codes[half + i] << 4);
  }
}

// Decodes a span of 2 * half elements.
template <class Codec, class Isa, typename T>
JAX_ATTN_INLINE void DecodeSpan(const char* from, i64 half, const char* scales, T* to) {
  constexpr KvFormat kFormat = FormatOf(Codec::kFormat);
  typename Codec::Element x[kFormat.span];
  for (i64 i = 0; i < half; ++i) {
    const uint32_t pair = static_cast<uint8_t>(from[i]);
    x[i] = Codec::ElementOf(pair & 15);
    x[half + i] = Codec::ElementOf(pair >> 4);
  }
  for (i64 d = 0; d < 2 * half; d += kFormat.block, scales += kFormat.scale_bytes) {
    const auto scale = Isa::Set(Codec::ScaleOf(scales));
    const i64 end = Min(d + kFormat.block, 2 * half);
    for (i64 i = d; i < end; i += Isa::kWidth) {
      const int lanes = static_cast<int>(Min(Isa::kWidth, end - i));
      auto element = Isa::LoadFirst(x + i, lanes);
      if constexpr (Codec::kUnit != 1.0f) element = Isa::Mul(element, Isa::Set(Codec::kUnit));
      Isa::StoreFirst(to + i, Isa::Mul(element, scale), lanes);
    }
  }
}

template <class Codec, class Isa, typename T>
JAX_ATTN_INLINE void DecodeNibbles(const char* from, i64 head_dim, T* to) {
  constexpr KvFormat kFormat = FormatOf(Codec::kFormat);
  const char* scales = from + head_dim / 2;
  i64 d = 0;
  if constexpr (kLooksUp<Isa, T>) {
    d = Codec::template LookUp<Isa>(from, scales, head_dim / kFormat.span, to) * kFormat.span;
  }
  const auto scales_at = [&](i64 at) { return scales + at / kFormat.block * kFormat.scale_bytes; };
  for (; d + kFormat.span <= head_dim; d += kFormat.span) {  // loops of known length
    DecodeSpan<Codec, Isa>(from + d / 2, kFormat.span / 2, scales_at(d), to + d);
  }
  if (d < head_dim) {
    DecodeSpan<Codec, Isa>(from + d / 2, (head_dim - d) / 2, scales_at(d), to + d);
  }
}

// 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign.
struct E2m1Codes {
  // Read as f16, the values are the elements times 2^-14, including subnormals.
  using Element = F16;
  static constexpr float kUnit = 0x1p14f;
  static F16 ElementOf(uint32_t code) {
    return {static_cast<uint16_t>((code & 7) << 9 | (code & 8) << 12)};
  }
  // The nearest value, ties to even; magnitudes beyond 6 saturate to 6.
  static uint8_t CodeOf(float x) {
    const float y = FromBits(MagnitudeOf(x));
    const int code = (y > 0.25f) + (y >= 0.75f) + (y > 1.25f) + (y >= 1.75f) + (y > 2.5f) +
                     (y >= 3.5f) + (y > 5.0f);
    return static_cast<uint8_t>(code | static_cast<int>(BitsOf(x) >> 28 & 8));
  }
};

// --- mxfp4: e2m1 times 2^(scale - 127); a scale of 255 is NaN

// Exponents for which half the scale is a number in f16, or a normal number in f32.
template <typename T>
constexpr uint32_t kLeastMxScale = 3;
template <>
constexpr uint32_t kLeastMxScale<F16> = 104;

// The smallest power of two that, times 6, is at least all magnitudes: no value saturates.
template <typename T>
uint32_t MxScale(const T* from, i64 n) {
  const uint32_t largest = LargestMagnitude(from, n);
  if (largest >= kInfBits) return 255;
  const int32_t exponent =
      static_cast<int32_t>(largest >> 23) - ((largest & 0x7fffff) > 0x400000 ? 1 : 2);
  const int32_t least = static_cast<int32_t>(kLeastMxScale<T>);
  return static_cast<uint32_t>(exponent > least ? exponent : least);
}

// Elements as if the scale were 2^(kMxTop - 127), the largest scale for which all are finite.
constexpr int kMxTop = 252;
constexpr NibbleTable MakeMxTable() {
  NibbleTable table{{}, {}, kMxTop};
  for (uint32_t i = 1; i < 8; ++i) {
    const uint32_t bits = SmallFloat<1, 1>(i) + ((kMxTop - 127) << 7);
    table.low[i] = table.low[8 + i] = static_cast<uint8_t>(bits & 0xff);
    table.high[i] = static_cast<uint8_t>(bits >> 8);
    table.high[8 + i] = static_cast<uint8_t>(bits >> 8 | 0x80);
  }
  return table;
}
constexpr NibbleTable kMxTable = MakeMxTable();

// Whether any of four bytes is below n <= 128.
constexpr bool AnyByteBelow(uint32_t bytes, uint32_t n) {
  return ((bytes - 0x01010101u * n) & ~bytes & 0x80808080u) != 0;
}
// Whether all elements of the blocks are 0 or normal numbers.
inline bool AreNormal(const char* scales, i64 blocks) {
  static_assert(kMxTop == 252, "of bytes from 2 to 252");
  bool out = false;
  i64 i = 0;
  for (; i + 4 <= blocks; i += 4) {
    uint32_t four;
    memcpy(&four, scales + i, sizeof(four));
    out |= AnyByteBelow(four, 2) || AnyByteBelow(~four, 3);
  }
  for (; i < blocks; ++i) out |= static_cast<uint8_t>(scales[i]) - 2u > kMxTop - 2u;
  return !out;
}

struct Mxfp4 : E2m1Codes {
  static constexpr i32 kFormat = kMxfp4Format;
  template <typename T>
  static void EncodeBlock(const T* from, i64 n, float, uint8_t* codes, char* to) {
    const uint32_t scale = MxScale(from, n);
    const float inverse = scale == 255 ? 0.0f : FromBits((254 - scale) << 23);
    for (i64 i = 0; i < n; ++i) codes[i] = CodeOf(ToF32(from[i]) * inverse);
    *to = static_cast<char>(scale);
  }
  static float ScaleOf(const char* from) {
    const uint32_t exponent = static_cast<uint8_t>(*from);
    return FromBits(exponent == 255 ? kNanBits : exponent << 23);
  }
  // Decodes whole spans; returns how many are done.
  template <class Isa>
  JAX_ATTN_INLINE static i64 LookUp(const char* codes, const char* scales, i64 spans, Bf16* to) {
    if (!AreNormal(scales, spans)) return 0;
    Isa::LookUpHalves(kMxTable, codes, scales, spans, to);
    return spans;
  }
  static bool CanPair(const char* row, i64 head_dim) {
    return AreNormal(row + head_dim / 2, head_dim / kBlock);
  }
  template <class Isa, class To>
  JAX_ATTN_INLINE static void LookUpPair(const char* a, const char* b, i64 head_dim, To&& to) {
    Isa::PairMxfp4(kMxTable, a, b, a + head_dim / 2, b + head_dim / 2, head_dim / kBlock, to);
  }

 private:
  static constexpr i64 kBlock = FormatOf(kFormat).block;
};

// --- nvfp4: e2m1 times a scale of e4m3, and the scale of the head

struct Nvfp4 : E2m1Codes {
  static constexpr i32 kFormat = kNvfp4Format;
  template <typename T>
  static void EncodeBlock(const T* from, i64 n, float head_scale, uint8_t* codes, char* to) {
    const uint32_t largest = LargestMagnitude(from, n);
    if (largest >= kInfBits) {
      memset(codes, 0, static_cast<size_t>(n));
      *to = 0x7f;  // NaN
      return;
    }
    const uint8_t bits = ToE4m3(FromBits(largest) / (6.0f * head_scale)).bits;
    const E4m3 scale = {bits > 1 ? bits : uint8_t{1}};
    float step = ToF32(scale) * head_scale;
    step = step > kLeastScale ? step : kLeastScale;
    for (i64 i = 0; i < n; ++i) codes[i] = CodeOf(ToF32(from[i]) / step);
    *to = static_cast<char>(scale.bits);
  }
  static float ScaleOf(const char* from) { return ToF32(E4m3{static_cast<uint8_t>(*from)}); }
  template <class Isa>
  JAX_ATTN_INLINE static i64 LookUp(const char* codes, const char* scales, i64 spans, Bf16* to) {
    return Isa::LookUpNvfp4(codes, scales, spans, to);
  }
  static bool CanPair(const char* row, i64 head_dim) {
    bool all = true;
    for (i64 i = 0; i < head_dim / 16; i += 4) {
      uint32_t scales;
      memcpy(&scales, row + head_dim / 2 + i, sizeof(scales));
      all &= ArePositive(scales | u64{scales} << 32);
    }
    return all;
  }
  template <class Isa, class To>
  JAX_ATTN_INLINE static void LookUpPair(const char* a, const char* b, i64 head_dim, To&& to) {
    Isa::PairNvfp4(a, b, a + head_dim / 2, b + head_dim / 2, head_dim / 64, to);
  }
};

// --- int4: integers from -8 to 7 times an f16 scale

struct Int4 {
  static constexpr i32 kFormat = kInt4Format;
  using Element = float;
  static constexpr float kUnit = 1;
  static float ElementOf(uint32_t code) {
    return static_cast<float>(static_cast<int32_t>(code ^ 8) - 8);
  }
  // The element with the largest magnitude becomes -8; of two with both signs, the negative one. So
  // the scale has the opposite sign, and its magnitude is the smallest that is at least an eighth
  // of that element.
  template <typename T>
  static void EncodeBlock(const T* from, i64 n, float, uint8_t* codes, char* to) {
    uint32_t largest = 0;  // magnitude, then sign
    for (i64 i = 0; i < n; ++i) {
      const uint32_t bits = BitsOf(ToF32(from[i])), rotated = bits << 1 | bits >> 31;
      largest = rotated > largest ? rotated : largest;
    }
    F16 scale = {0x7e00};
    memset(codes, 0, static_cast<size_t>(n));
    if (largest >> 1 < kInfBits) {
      scale = ScaleFor(FromBits(largest >> 1) * 0.125f, largest > 0 && (largest & 1) == 0);
      const float factor = ToF32(scale);
      for (i64 i = 0; i < n; ++i) {
        float x = ToF32(from[i]) / factor;
        x = x > -8.0f ? x : -8.0f;
        x = x < 7.0f ? x : 7.0f;
        codes[i] = static_cast<uint8_t>(static_cast<int32_t>((x + kRoundMagic) - kRoundMagic) & 15);
      }
    }
    memcpy(to, &scale, sizeof(scale));
  }
  static F16 ScaleFor(float magnitude, bool is_negative) {
    F16 scale = ToF16(magnitude);
    if (ToF32(scale) < magnitude) ++scale.bits;
    if (scale.bits < 1) scale.bits = 1;
    if (scale.bits > 0x7bff) scale.bits = 0x7bff;
    if (is_negative) scale.bits |= 0x8000;
    return scale;
  }
  static float ScaleOf(const char* from) {
    F16 scale;
    memcpy(&scale, from, sizeof(scale));
    return ToF32(scale);
  }
  template <class Isa>
  JAX_ATTN_INLINE static i64 LookUp(const char* codes, const char* scales, i64 spans, Bf16* to) {
    return Isa::LookUpInt4(codes, scales, spans, to);
  }
  static bool CanPair(const char*, i64) { return true; }
  template <class Isa, class To>
  JAX_ATTN_INLINE static void LookUpPair(const char* a, const char* b, i64 head_dim, To&& to) {
    Isa::PairInt4(a, b, a + head_dim / 2, b + head_dim / 2, head_dim / 64, to);
  }
};

// --- rows of any format

// Encodes head_dim elements, with the scales that the row has for them. scale: that of their head,
// if the format has one.
template <typename T>
void EncodeRow(i32 format, const T* from, i64 head_dim, float scale, char* to) {
  switch (format) {
    case kInt8Format:
      return EncodeInt8(from, head_dim, to);
    case kMxfp4Format:
      return EncodeNibbles<Mxfp4>(from, head_dim, scale, to);
    case kNvfp4Format:
      return EncodeNibbles<Nvfp4>(from, head_dim, scale, to);
    case kInt4Format:
      return EncodeNibbles<Int4>(from, head_dim, scale, to);
    case kE5m2Format:
      for (i64 d = 0; d < head_dim; ++d) {
        to[d] = static_cast<char>(ToE5m2(ToF32(from[d]) / scale));
      }
      return;
    default:
      for (i64 d = 0; d < head_dim; ++d) {
        to[d] = static_cast<char>(ToE4m3(ToF32(from[d]) / scale).bits);
      }
  }
}

// A compile-time number.
template <i64 kNumber>
struct Fixed {
  constexpr operator i64() const { return kNumber; }
};

// Calls fn(head_dim); the most frequent head_dim is a constant, so that its loops are unrolled.
template <class Fn>
JAX_ATTN_INLINE auto WithDim(i64 head_dim, Fn&& fn) {
  return head_dim == 128 ? fn(Fixed<128>()) : fn(head_dim);
}

// Decodes rows, without the scale of their head, rounded to T. ForRows(decode) calls decode(codes,
// elements) for each row; each format has its own loop, so that its tables stay in registers. Dim:
// i64, or Fixed.
template <class Isa, typename T, typename Dim, class ForRows>
JAX_ATTN_INLINE void DecodeRows(i32 format, Dim head_dim, ForRows&& for_rows) {
  const auto nibbles = [&](auto codec) __attribute__((always_inline)) {
    for_rows([=](const char* from, T* to) __attribute__((always_inline)) {
      DecodeNibbles<decltype(codec), Isa>(from, head_dim, to);
    });
  };
  switch (format) {
    case kInt8Format:
      return for_rows([=](const char* from, T* to)
                          __attribute__((always_inline)) { DecodeInt8<Isa>(from, head_dim, to); });
    case kMxfp4Format:
      return nibbles(Mxfp4());
    case kNvfp4Format:
      return nibbles(Nvfp4());
    case kInt4Format:
      return nibbles(Int4());
    case kE5m2Format:
      return for_rows([=](const char* from, T* to)
                          __attribute__((always_inline)) { DecodeE5m2<Isa>(from, head_dim, to); });
    default:
      return for_rows([=](const char* from, T* to)
                          __attribute__((always_inline)) { DecodeE4m3<Isa>(from, head_dim, to); });
  }
}

}  // namespace
}  // namespace jax_attn
