// Quantized weights of a matmul (models/quantized.py), dequantized in registers to the 16-bit type
// of x, two rows of a column at a time: an operand of mma.sync.
//
// A weight is (quantized - zero) * scale, rounded once to f16. For bf16 it is rounded once from a
// product with an error of at most 2^-14: a f32 scale is multiplied as the sum of two bf16. e4m3
// NaN count as 480 and -480, as in XLA's matmul.
#pragma once

#include "cuda/common/e4m3.cuh"

namespace jax_attn {

// Quantized values of one column in both halves of a word: row k in the low one, row k + 1 in the
// high one. Other bits hold their neighbours. `a` and `b` have four columns.
__device__ __forceinline__ u32 ColumnOf(u32 a, u32 b, int column) {
  return __byte_perm(a, b, 0x4400u + 0x1111u * static_cast<u32>(column));
}

// Where a format's quantized values lie in the halves, how they become 16-bit numbers, and the
// factor of these.
template <int kFormat, int kDtype>
struct WeightBits;

template <int kDtype>
struct WeightBits<kInt4Weights, kDtype> {
  static constexpr int kPerByte = 2;
  // n as the bits of a 16-bit number is n times the smallest subnormal, 2^-133 or 2^-24. Times the
  // factor that is n / 2^6 or n / 2^9; the scale has the rest of the power.
  static constexpr bool kIsBf16 = kDtype == kElementBf16;
  static constexpr u32 kFactor = kIsBf16 ? 0x7f00 : 0x7800;  // 2^127, 2^15
  static constexpr float kUnit = kIsBf16 ? 0x1p-6f : 0x1p-9f, kScaleFactor = 1 / kUnit;

  __device__ static u32 Column(u32 word, int column) { return ColumnOf(word, word >> 4, column); }
  __device__ static u32 Bits(u32 halves) { return halves & InBothHalves(0x000f); }
};

template <int kDtype>
struct WeightBits<kE2m1Weights, kDtype> {
  static constexpr int kPerByte = 2;
  // As E4m3Bits: exponent and mantissa are shifted to those of the type.
  static constexpr int kShift = kDtype == kElementBf16 ? 6 : 3;  // from the highest bits of 16
  static constexpr u32 kMagnitude = 0x7000 >> kShift;
  static constexpr u32 kFactor = kDtype == kElementBf16 ? 0x7e80 : 0x7400;  // 2^126, 2^14

  __device__ static u32 Column(u32 word, int column) { return ColumnOf(word << 4, word, column); }
  __device__ static u32 Bits(u32 halves) {
    return (halves >> kShift & InBothHalves(kMagnitude)) | (halves & InBothHalves(0x8000));
  }
};

template <int kDtype>
struct WeightBits<kE4m3Weights, kDtype> : E4m3Bits<kDtype> {
  using Base = E4m3Bits<kDtype>;
  static constexpr int kPerByte = 1;
  // f16: the factor goes into the scale, which is f32.
  static constexpr float kScaleFactor = kDtype == kElementBf16 ? 1.0f : 0x1p8f;

  __device__ static u32 Bits(u32 halves) {
    return (halves >> Base::kShift & InBothHalves(Base::kMagnitude)) |
           (halves & InBothHalves(0x8000));
  }
};

// Factors of the weights of one column and group, and the zero that is subtracted first.
template <int kFormat, int kDtype>
class WeightFactors {
 public:
  using Quantized = WeightBits<kFormat, kDtype>;
  using E = Element<kDtype>;

  // scale: bits of an f32; kE2m1Weights: an exponent. zero: of kInt4Weights, else 0.
  __device__ __forceinline__ void Set(u32 scale, u32 zero) {
    if constexpr (kFormat == kE2m1Weights) {
      // f16: the sum with the factor's exponent is no subnormal, as 2^-127 would be.
      const u32 of_bf16 = InBothHalves(scale == 0 ? 0x40 : scale << 7);
      first_ = kDtype == kElementF16 ? (scale + 14) << 23 : of_bf16;
    } else {
      if constexpr (kFormat == kInt4Weights) {
        const float less = -Quantized::kUnit * static_cast<float>(static_cast<int>(zero));
        minus_zeros_ = E::Pack(less, less);
      }
      // A power of two: exact.
      const float factor = __uint_as_float(scale) * Quantized::kScaleFactor;
      first_ = __float_as_uint(factor);
      if constexpr (kDtype == kElementBf16) {
        first_ = __byte_perm(first_, 0, 0x3232);
        const float rest = factor - __uint_as_float(first_ & 0xffff0000u);
        rest_ = E::Pack(rest, rest);
      }
    }
  }

  // Dequantizes the two values in the halves.
  __device__ __forceinline__ u32 Dequantize(u32 halves) const {
    const u32 minus_zero = InBothHalves(0x8000);
    u32 x = Quantized::Bits(halves);
    if constexpr (kFormat == kInt4Weights) {
      x = E::FmaX2(x, InBothHalves(Quantized::kFactor), minus_zeros_);
    } else if constexpr (kDtype == kElementBf16) {
      x = E::FmaX2(x, InBothHalves(Quantized::kFactor), minus_zero);
    }
    if constexpr (kDtype == kElementF16) {
      const float factor = __uint_as_float(first_);
      return E::Pack(E::ToFloat(static_cast<u16>(x)) * factor,
                     E::ToFloat(static_cast<u16>(x >> 16)) * factor);
    } else if constexpr (kFormat == kE2m1Weights) {
      return E::FmaX2(x, first_, minus_zero);
    } else {
      return E::FmaX2(x, first_, E::FmaX2(x, rest_, minus_zero));
    }
  }

 private:
  // In both halves of the word, except f16's first_, which is an f32.
  u32 first_ = 0, rest_ = 0, minus_zeros_ = 0;
};

}  // namespace jax_attn
