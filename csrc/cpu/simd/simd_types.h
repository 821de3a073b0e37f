// Storage types of the kernels and their scalar conversions. Internal linkage: see kernels.h.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "params.h"

// Loops over a register tile must unroll completely, or the accumulators spill to memory.
#if defined(__clang__)
#define JAX_ATTN_UNROLL _Pragma("clang loop unroll(full)")
#else
#define JAX_ATTN_UNROLL _Pragma("GCC unroll 64")
#endif

#define JAX_ATTN_INLINE inline __attribute__((always_inline))
// Kernels are not inlined, so that registers are allocated for their loops alone.
#define JAX_ATTN_KERNEL __attribute__((noinline))

namespace jax_attn {
namespace {

struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};
struct E4m3 {
  uint8_t bits;
};

// Keys and values as rows of int8 values with a scale, multiplied as int8.
struct Int8 {
  int8_t code;
};

template <typename T>
constexpr bool IsBf16 = false;
template <>
constexpr bool IsBf16<Bf16> = true;

template <typename T>
constexpr bool IsInt8 = false;
template <>
constexpr bool IsInt8<Int8> = true;

// Formats of keys and values with quantized elements: their C++ type by FormatCode.
template <typename T>
constexpr bool IsCode = false;
template <>
constexpr bool IsCode<E4m3> = true;

// Tables by byte: the bf16 of the magnitudes of 8-bit values, and of signed 4-bit values.
struct ByteTable {
  alignas(64) uint8_t low[128], high[128];
};
struct NibbleTable {
  alignas(16) uint8_t low[16], high[16];
  int top;  // table values are those for a scale of 2^(top - 127)
};

// Whether every byte of x is a positive e4m3 number: x - 1 detects 0, x + 1 detects 0x7f.
constexpr bool ArePositive(u64 x) {
  constexpr u64 kOnes = 0x0101010101010101, kHighest = 0x8080808080808080;
  return ((x | (x + kOnes) | (x - kOnes)) & kHighest) == 0;
}

template <bool kFirst, class First, class Second>
auto& EitherOf(First& first, Second& second) {
  if constexpr (kFirst) {
    return first;
  } else {
    return second;
  }
}

// std::conditional, without its header: see kernels.h. CUDA has its own in cuda/common/math.cuh.
template <bool kFirst, class First, class Second>
struct Conditional {
  using Type = First;
};
template <class First, class Second>
struct Conditional<false, First, Second> {
  using Type = Second;
};

constexpr i64 kCacheLine = 64;
constexpr float kNegInf = -__builtin_inff();
constexpr float kLog2e = 1.44269504088896340736f;
constexpr float kLn2 = 0.69314718055994530942f;
constexpr float kLog4e = 0.5f * kLog2e, kLn4 = 2.0f * kLn2;
constexpr float kRoundMagic = 12582912.0f;  // 1.5 * 2^23: adding it leaves no fraction bits

constexpr i64 Min(i64 a, i64 b) { return a < b ? a : b; }
constexpr i64 Max(i64 a, i64 b) { return a > b ? a : b; }
constexpr i64 CeilDiv(i64 a, i64 b) { return (a + b - 1) / b; }
constexpr i64 RoundUp(i64 a, i64 b) { return CeilDiv(a, b) * b; }

inline uint32_t BitsOf(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}
inline float FromBits(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}

inline float ToF32(float x) { return x; }
inline float ToF32(Bf16 x) { return FromBits(uint32_t{x.bits} << 16); }
inline float ToF32(F16 x) {
  const uint32_t sign = uint32_t{x.bits & 0x8000u} << 16, rest = x.bits & 0x7fffu;
  if (rest >= 0x7c00) return FromBits(sign | 0x7f800000 | rest << 13);  // inf, NaN
  if (rest < 0x0400) return FromBits(sign | BitsOf(static_cast<float>(rest) * 0x1p-24f));
  return FromBits(sign | ((rest << 13) + 0x38000000));
}
// Avoids f32 subnormals: XLA's threads flush them to 0.
inline float ToF32(E4m3 x) {
  const uint32_t sign = uint32_t{x.bits & 0x80u} << 24, rest = x.bits & 0x7fu;
  if (rest == 0x7f) return FromBits(sign | 0x7fc00000);
  if (rest < 0x08) return FromBits(sign | BitsOf(static_cast<float>(rest) * 0x1p-9f));
  return FromBits(sign | ((rest << 20) + 0x3c000000));
}

// Round to nearest even; NaN stays NaN.
inline Bf16 ToBf16(float x) {
  const uint32_t u = BitsOf(x);
  if ((u & 0x7fffffff) > 0x7f800000) return {static_cast<uint16_t>(u >> 16 | 0x40)};
  return {static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16)};
}
inline F16 ToF16(float x) {
  const uint32_t u = BitsOf(x), magnitude = u & 0x7fffffff;
  const uint32_t sign = u >> 16 & 0x8000;
  uint32_t rest;
  if (magnitude > 0x7f800000) {
    rest = 0x7e00;
  } else if (magnitude >= 0x477ff000) {  // rounds to 2^16 or more
    rest = 0x7c00;
  } else if (magnitude < 0x38800000) {  // subnormal: adding 2^-1 leaves 24 fraction bits, rounded
    rest = BitsOf(FromBits(magnitude) + 0.5f) - 0x3f000000;
  } else {
    rest = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
  }
  return {static_cast<uint16_t>(sign | rest)};
}
// Converts to 8 bits with kMantissa bits of mantissa. Values beyond kLargest, an 8-bit code,
// saturate to it.
template <int kMantissa, uint32_t kLargest>
inline uint8_t ToFloat8(float x) {
  constexpr int kShift = 23 - kMantissa;
  constexpr uint32_t kBias = (1 << (6 - kMantissa)) - 1;
  // Bits of the code, shifted to f32's bit positions, are those of its value except for the
  // exponent bias.
  constexpr uint32_t kBiases = (127 - kBias) << 23;
  // At this magnitude f32 has as many fraction bits as a subnormal code.
  constexpr uint32_t kSameFraction = (127 + 23 - kMantissa + 1 - kBias) << 23;
  const uint32_t u = BitsOf(x), magnitude = u & 0x7fffffff;
  uint32_t rest;
  if (magnitude > 0x7f800000) {
    rest = 0x7f;
  } else if (magnitude >= (kLargest << kShift) + kBiases) {
    rest = kLargest;
  } else if (magnitude < kBiases + (1 << 23)) {  // subnormal: the sum is rounded
    rest = BitsOf(FromBits(magnitude) + FromBits(kSameFraction)) - kSameFraction;
  } else {
    rest = (magnitude - kBiases + (1 << (kShift - 1)) - 1 + (magnitude >> kShift & 1)) >> kShift;
  }
  return static_cast<uint8_t>((u >> 24 & 0x80) | rest);
}
inline E4m3 ToE4m3(float x) { return {ToFloat8<3, 0x7e>(x)}; }  // 448

}  // namespace
}  // namespace jax_attn
