// Converts float8_e4m3fn to 16 bits in registers, for mma.sync and for scales: a sign, 4 bits of
// exponent with a bias of 7, 3 bits of mantissa, no infinities, and NaN where exponent and mantissa
// are all ones. Every value is also a bf16 and an f16.
#pragma once

#include "cuda/common/types.cuh"

namespace jax_attn {

// --- to 16 bits ---

// Exponent and mantissa of e4m3, shifted to those of a 16-bit type, are the value times a power of
// two, for subnormals too. One multiplication corrects that. Only NaN needs its own bits.
template <int kDtype>
struct E4m3Bits;

template <>
struct E4m3Bits<kElementBf16> {
  static constexpr int kShift = 4;  // from the high byte of 16 bits
  static constexpr u32 kMagnitude = 0x07f0, kLowest = 0x0010, kCarry = 0x0800;
  static constexpr u32 kNan = 15;         // carry * 15: all bits of an exponent from the carry on
  static constexpr u32 kFactor = 0x7b80;  // 2^120
};
template <>
struct E4m3Bits<kElementF16> {
  static constexpr int kShift = 1;
  static constexpr u32 kMagnitude = 0x3f80, kLowest = 0x0080, kCarry = 0x4000;
  static constexpr u32 kNan = 1;
  static constexpr u32 kFactor = 0x5c00;  // 2^8
};

__device__ constexpr u32 InBothHalves(u32 x) { return x << 16 | x; }

// Converts the e4m3 in the high bytes of both halves of x.
template <int kDtype>
__device__ __forceinline__ u32 E4m3HighBytes(u32 x) {
  using Bits = E4m3Bits<kDtype>;
  u32 y = (x >> Bits::kShift) & InBothHalves(Bits::kMagnitude);
  y += ((y + InBothHalves(Bits::kLowest)) & InBothHalves(Bits::kCarry)) * Bits::kNan;
  const u32 minus_zero = InBothHalves(0x8000);
  return Element<kDtype>::FmaX2(y | (x & minus_zero), InBothHalves(Bits::kFactor), minus_zero);
}

// Converts f16 to the kernel's type. From sm_89 on an instruction converts e4m3 to f16.
template <int kDtype>
__device__ __forceinline__ u32 FromF16x2(u32 x) {
  if constexpr (kDtype == kElementF16) return x;
  return PackBf16(F16ToFloat(static_cast<u16>(x)), F16ToFloat(static_cast<u16>(x >> 16)));
}

// Converts four e4m3 a, b, c, d, a in the lowest byte, to the pairs (a, c) and (b, d).
template <class Traits>
__device__ __forceinline__ void UnpackE4m3Alternate(u32 quantized, u32& a_c, u32& b_d) {
  if constexpr (Traits::kArch >= 89) {
    const u32 sorted = __byte_perm(quantized, 0, 0x3120);
    a_c = FromF16x2<Traits::kDtype>(E4m3ToF16x2(static_cast<u16>(sorted)));
    b_d = FromF16x2<Traits::kDtype>(E4m3HighToF16x2(sorted));
  } else {
    a_c = E4m3HighBytes<Traits::kDtype>(quantized << 8);
    b_d = E4m3HighBytes<Traits::kDtype>(quantized);
  }
}

// Converts them to the pairs (a, b) and (c, d).
template <class Traits>
__device__ __forceinline__ void UnpackE4m3(u32 quantized, u32& a_b, u32& c_d) {
  if constexpr (Traits::kArch >= 89) {
    a_b = FromF16x2<Traits::kDtype>(E4m3ToF16x2(static_cast<u16>(quantized)));
    c_d = FromF16x2<Traits::kDtype>(E4m3HighToF16x2(quantized));
  } else {
    UnpackE4m3Alternate<Traits>(__byte_perm(quantized, 0, 0x3120), a_b, c_d);
  }
}

// Sets the highest bit of every byte that is NaN.
__device__ __forceinline__ u32 E4m3NanBits(u32 quantized) {
  return ((quantized & 0x7f7f7f7f) + 0x01010101) & 0x80808080;
}
__device__ __forceinline__ u32 E4m3NanBits(uint4 x) {
  return E4m3NanBits(x.x) | E4m3NanBits(x.y) | E4m3NanBits(x.z) | E4m3NanBits(x.w);
}

}  // namespace jax_attn
