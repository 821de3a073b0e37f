// Rows of keys and values as codes: how append makes them, and what they stand for. Internal
// linkage: see kernels.h.
//
// A row is that of one token and head: its codes, then its scales if it has its own (params.h,
// FormatOf). No f32 subnormals on the way: threads of XLA take them for 0.
#pragma once

#include "cpu/simd_types.h"

namespace jax_attn {
namespace {

// Of a row with codes: CheckSpec allows head dims up to it.
constexpr i64 kMaxCodedDim = 576, kMaxCodeRowBytes = kMaxCodedDim + 8;

constexpr uint32_t kInfBits = 0x7f800000, kNanBits = 0x7fc00000;

inline uint32_t MagnitudeOf(float x) { return BitsOf(x) & 0x7fffffff; }

template <typename T>
uint32_t LargestMagnitude(const T* x, i64 n) {
  uint32_t largest = 0;  // of NaN, larger than that of infinity
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

// The bf16 of a positive number with kMantissa bits of mantissa, which holds subnormal ones too.
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

// Whether codes become elements of T by tables.
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

// --- e5m2: half of an f16

inline uint8_t ToE5m2(float x) { return ToFloat8<2, 0x7b>(x); }  // 57344: below infinity

template <class Isa, typename T>
JAX_ATTN_INLINE void DecodeE5m2(const char* from, i64 n, T* to) {
  if constexpr (kLooksUp<Isa, T>) return Isa::LookUp(kE5m2Table, from, n, to);
  F16 x[kMaxCodedDim];
  for (i64 i = 0; i < n; ++i) x[i].bits = static_cast<uint16_t>(static_cast<uint8_t>(from[i]) << 8);
  StoreElements<Isa>(x, n, to);
}

// --- int8, whose scale is the largest magnitude of the row over 127

constexpr float kLeastScale = 0x1p-126f;  // products with it are normal

template <typename T>
void EncodeInt8(const T* from, i64 n, char* to) {
  const uint32_t largest = LargestMagnitude(from, n);
  // A row with NaN or infinity is NaN.
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

// --- mxfp4: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign, times 2^(scale - 127); a scale of 255 is NaN

// Blocks of n <= 32: byte i has codes i and n / 2 + i.
constexpr i64 kMxBlock = FormatOf(kMxfp4Format).block;

// Exponents such that f16 has, or f32 has as normal numbers, half the scale.
template <typename T>
constexpr uint32_t kLeastMxScale = 3;
template <>
constexpr uint32_t kLeastMxScale<F16> = 104;

// The smallest power of two whose 6-fold is no less than all magnitudes: no code saturates.
template <typename T>
uint32_t MxScale(const T* from, i64 n) {
  const uint32_t largest = LargestMagnitude(from, n);
  if (largest >= kInfBits) return 255;
  const int32_t exponent =
      static_cast<int32_t>(largest >> 23) - ((largest & 0x7fffff) > 0x400000 ? 1 : 2);
  const int32_t least = static_cast<int32_t>(kLeastMxScale<T>);
  return static_cast<uint32_t>(exponent > least ? exponent : least);
}

// The nearest, ties to an even code.
inline uint8_t ToE2m1(float x) {
  const float y = FromBits(MagnitudeOf(x));
  const int code = (y > 0.25f) + (y >= 0.75f) + (y > 1.25f) + (y >= 1.75f) + (y > 2.5f) +
                   (y >= 3.5f) + (y > 5.0f);
  return static_cast<uint8_t>(code | static_cast<int>(BitsOf(x) >> 28 & 8));
}
template <typename T>
void EncodeMxfp4(const T* from, i64 head_dim, char* to) {
  char* scales = to + head_dim / 2;
  for (i64 d = 0; d < head_dim; d += kMxBlock, from += kMxBlock, to += kMxBlock / 2) {
    const i64 half = Min(kMxBlock, head_dim - d) / 2;
    const uint32_t scale = MxScale(from, 2 * half);
    const float inverse = scale == 255 ? 0.0f : FromBits((254 - scale) << 23);
    for (i64 i = 0; i < half; ++i) {
      const uint8_t low = ToE2m1(ToF32(from[i]) * inverse);
      const uint8_t high = ToE2m1(ToF32(from[half + i]) * inverse);
      to[i] = static_cast<char>(low | high << 4);
    }
    *scales++ = static_cast<char>(scale);
  }
}

// A block of 2 half elements. The codes as f16 are the elements times 2^-14, subnormals too.
template <class Isa, typename T>
JAX_ATTN_INLINE void DecodeMxBlock(const char* from, i64 half, uint8_t exponent, T* to) {
  const auto scale = Isa::Set(FromBits(exponent == 255 ? kNanBits : uint32_t{exponent} << 23));
  F16 x[kMxBlock];
  for (i64 i = 0; i < half; ++i) {
    const uint32_t pair = static_cast<uint8_t>(from[i]);
    x[i].bits = static_cast<uint16_t>((pair & 7) << 9 | (pair & 8) << 12);
    x[half + i].bits = static_cast<uint16_t>((pair & 0x70) << 5 | (pair & 0x80) << 8);
  }
  for (i64 i = 0; i < 2 * half; i += Isa::kWidth) {
    const int lanes = static_cast<int>(Min(Isa::kWidth, 2 * half - i));
    const auto element = Isa::Mul(Isa::LoadFirst(x + i, lanes), Isa::Set(0x1p14f));
    Isa::StoreFirst(to + i, Isa::Mul(element, scale), lanes);
  }
}

// Codes as if the scale were 2^(kMxTop - 127), which is the largest for which all are finite.
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

// Whether all elements of the blocks are 0 or normal numbers.
inline bool AreNormal(const char* scales, i64 blocks) {
  uint32_t out = 0;
  for (i64 i = 0; i < blocks; ++i) {
    out |= static_cast<uint8_t>(scales[i]) - 2u > kMxTop - 2u;
  }
  return out == 0;
}

template <class Isa, typename T>
JAX_ATTN_INLINE void DecodeMxfp4(const char* from, i64 head_dim, T* to) {
  const char* scales = from + head_dim / 2;
  i64 d = 0;
  if constexpr (kLooksUp<Isa, T>) {
    const i64 blocks = head_dim / kMxBlock;
    if (AreNormal(scales, blocks)) {
      Isa::LookUpHalves(kMxTable, from, scales, blocks, to);
      d = blocks * kMxBlock;
      scales += blocks;
    }
  }
  for (; d + kMxBlock <= head_dim; d += kMxBlock) {  // loops of known length
    DecodeMxBlock<Isa>(from + d / 2, kMxBlock / 2, static_cast<uint8_t>(*scales++), to + d);
  }
  if (d < head_dim) {
    DecodeMxBlock<Isa>(from + d / 2, (head_dim - d) / 2, static_cast<uint8_t>(*scales), to + d);
  }
}

// --- rows of any format

// to = the codes of head_dim elements, with the scales that they have in the row. scale: of their
// head, with kHeadScale.
template <typename T>
void EncodeRow(i32 format, const T* from, i64 head_dim, float scale, char* to) {
  switch (format) {
    case kInt8Format:
      return EncodeInt8(from, head_dim, to);
    case kMxfp4Format:
      return EncodeMxfp4(from, head_dim, to);
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

// What the codes of rows stand for, but for the scale of their head, rounded to T. ForRows(decode)
// calls decode(codes, elements) for each; a loop of a format's own keeps its tables in registers.
template <class Isa, typename T, class ForRows>
JAX_ATTN_INLINE void DecodeRows(i32 format, i64 head_dim, ForRows&& for_rows) {
  switch (format) {
    case kInt8Format:
      return for_rows([=](const char* from, T* to)
                          __attribute__((always_inline)) { DecodeInt8<Isa>(from, head_dim, to); });
    case kMxfp4Format:
      return for_rows([=](const char* from, T* to)
                          __attribute__((always_inline)) { DecodeMxfp4<Isa>(from, head_dim, to); });
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
