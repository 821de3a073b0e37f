// Weights as codes (models/quantized.py), decoded in registers to the 16-bit type of x, two rows of
// a column at a time: an operand of mma.sync.
//
// A decoded weight is (code - zero) * scale, rounded once to f16. To bf16 it is rounded once from a
// product that is off by a 2^-14th at most: a scale of f32 is multiplied as the sum of two numbers
// of bf16. Codes of e4m3 that are NaN count as 480 and -480, as they do in XLA's product.
#pragma once

#include "cuda/common/e4m3.cuh"

namespace jax_attn {

// Codes of one column in both halves of a word: row k in the low one, row k + 1 in the high one,
// each with what its neighbours left in other bits. `a` and `b` have four columns.
__device__ __forceinline__ u32 ColumnOf(u32 a, u32 b, int column) {
  return __byte_perm(a, b, 0x4400u + 0x1111u * static_cast<u32>(column));
}

// Where a format's codes lie in the halves, how they become numbers of the 16-bit type, and what
// these are times.
template <int kFormat, int kDtype>
struct WeightCodes;

template <int kDtype>
struct WeightCodes<kInt4Weights, kDtype> {
  static constexpr int kPerByte = 2;
  // 2^7 + n or 2^10 + n has n as its low bits in the type.
  static constexpr u32 kMagic = kDtype == kElementBf16 ? 0x4300 : 0x6400;

  __device__ static u32 Column(u32 word, int column) { return ColumnOf(word, word >> 4, column); }
  __device__ static u32 Bits(u32 halves) {
    return (halves & InBothHalves(0x000f)) | InBothHalves(kMagic);
  }
};

template <int kDtype>
struct WeightCodes<kE2m1Weights, kDtype> {
  static constexpr int kPerByte = 2;
  // As of e4m3 (E4m3Bits): exponent and mantissa at the bits of the type's own.
  static constexpr int kShift = kDtype == kElementBf16 ? 6 : 3;  // from the highest bits of 16
  static constexpr u32 kMagnitude = 0x7000 >> kShift;
  static constexpr u32 kFactor = kDtype == kElementBf16 ? 0x7e80 : 0x7400;  // 2^126, 2^14
  static constexpr float kWideFactor = 0x1p14f;                             // of f16

  __device__ static u32 Column(u32 word, int column) { return ColumnOf(word << 4, word, column); }
  __device__ static u32 Bits(u32 halves) {
    return (halves >> kShift & InBothHalves(kMagnitude)) | (halves & InBothHalves(0x8000));
  }
};

template <int kDtype>
struct WeightCodes<kE4m3Weights, kDtype> : E4m3Bits<kDtype> {
  using Base = E4m3Bits<kDtype>;
  static constexpr int kPerByte = 1;
  static constexpr float kWideFactor = 0x1p8f;  // of f16

  __device__ static u32 Bits(u32 halves) {
    return (halves >> Base::kShift & InBothHalves(Base::kMagnitude)) |
           (halves & InBothHalves(0x8000));
  }
};

// What the weights of a column and group are times, and what is subtracted before.
template <int kFormat, int kDtype>
class WeightFactors {
 public:
  using Codes = WeightCodes<kFormat, kDtype>;
  using E = Element<kDtype>;

  // scale: the bits of an f32, or of kE2m1Weights an exponent. zero: at most 127, of kInt4Weights.
  __device__ __forceinline__ void Set(u32 scale, u32 zero) {
    if constexpr (kFormat == kInt4Weights) {
      subtrahend_ = InBothHalves(Codes::kMagic | 0x8000) | InBothHalves(zero);
    }
    if constexpr (kDtype == kElementF16) {
      if constexpr (kFormat == kE2m1Weights) {
        first_ = (scale + 14) << 23;  // no subnormal number, as 2^-127 is
      } else if constexpr (kFormat == kE4m3Weights) {
        first_ = __float_as_uint(__uint_as_float(scale) * Codes::kWideFactor);
      } else {
        first_ = scale;
      }
    } else if constexpr (kFormat == kE2m1Weights) {
      first_ = InBothHalves(scale == 0 ? 0x40 : scale << 7);  // 2^-127 is subnormal
    } else {
      first_ = __byte_perm(scale, 0, 0x3232);
      const float rest = __uint_as_float(scale) - __uint_as_float(first_ & 0xffff0000u);
      rest_ = E::Pack(rest, rest);
    }
  }

  // Two weights from the codes in the halves.
  __device__ __forceinline__ u32 Decode(u32 halves) const {
    const u32 minus_zero = InBothHalves(0x8000);
    u32 x = Codes::Bits(halves);
    if constexpr (kFormat == kInt4Weights) {
      x = E::FmaX2(x, InBothHalves(kDtype == kElementBf16 ? 0x3f80 : 0x3c00), subtrahend_);
    }
    if constexpr (kDtype == kElementF16) {
      const float scale = __uint_as_float(first_);
      return E::Pack(E::ToFloat(static_cast<u16>(x)) * scale,
                     E::ToFloat(static_cast<u16>(x >> 16)) * scale);
    } else {
      if constexpr (kFormat != kInt4Weights) {
        x = E::FmaX2(x, InBothHalves(Codes::kFactor), minus_zero);
      }
      if constexpr (kFormat == kE2m1Weights) return E::FmaX2(x, first_, minus_zero);
      return E::FmaX2(x, first_, E::FmaX2(x, rest_, minus_zero));
    }
  }

 private:
  u32 first_, rest_, subtrahend_;  // bf16: of both halves; f16: first_ is an f32
};

}  // namespace jax_attn
