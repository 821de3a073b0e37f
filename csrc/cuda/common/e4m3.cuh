// float8_e4m3fn: a sign, 4 bits of exponent with a bias of 7, 3 of mantissa; no infinities, and NaN
// where exponent and mantissa are all ones. Every value is one of bf16 and of f16, too.
//
// Tensor cores multiply these: e4m3 becomes the type of q in registers, ahead of mma.sync.
#pragma once

#include "cuda/common/types.cuh"

namespace jax_attn {

// --- to 16 bits ---

// A code's exponent and mantissa, moved to the bits where a 16-bit type has its own, are the value
// times a power of two, subnormals too; a product puts that right. Only NaN needs its own bits.
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

// Two elements from the codes in the high bytes of both halves of x.
template <int kDtype>
__device__ __forceinline__ u32 E4m3HighBytes(u32 x) {
  using Bits = E4m3Bits<kDtype>;
  u32 y = (x >> Bits::kShift) & InBothHalves(Bits::kMagnitude);
  y += ((y + InBothHalves(Bits::kLowest)) & InBothHalves(Bits::kCarry)) * Bits::kNan;
  const u32 minus_zero = InBothHalves(0x8000);
  return Element<kDtype>::FmaX2(y | (x & minus_zero), InBothHalves(Bits::kFactor), minus_zero);
}

// From sm_89 on there is an instruction for f16, from which this makes the type of q.
template <int kDtype>
__device__ __forceinline__ u32 FromF16x2(u32 x) {
  if constexpr (kDtype == kElementF16) return x;
  return PackBf16(F16ToFloat(static_cast<u16>(x)), F16ToFloat(static_cast<u16>(x >> 16)));
}

// Four codes a, b, c, d, a in the lowest byte, as the pairs (a, c) and (b, d).
template <class Traits>
__device__ __forceinline__ void UnpackE4m3Alternate(u32 codes, u32& a_c, u32& b_d) {
  if constexpr (Traits::kArch >= 89) {
    const u32 sorted = __byte_perm(codes, 0, 0x3120);
    a_c = FromF16x2<Traits::kDtype>(E4m3ToF16x2(static_cast<u16>(sorted)));
    b_d = FromF16x2<Traits::kDtype>(E4m3HighToF16x2(sorted));
  } else {
    a_c = E4m3HighBytes<Traits::kDtype>(codes << 8);
    b_d = E4m3HighBytes<Traits::kDtype>(codes);
  }
}

// The same as the pairs (a, b) and (c, d).
template <class Traits>
__device__ __forceinline__ void UnpackE4m3(u32 codes, u32& a_b, u32& c_d) {
  if constexpr (Traits::kArch >= 89) {
    a_b = FromF16x2<Traits::kDtype>(E4m3ToF16x2(static_cast<u16>(codes)));
    c_d = FromF16x2<Traits::kDtype>(E4m3HighToF16x2(codes));
  } else {
    UnpackE4m3Alternate<Traits>(__byte_perm(codes, 0, 0x3120), a_b, c_d);
  }
}

// The highest bit of every byte that is NaN.
__device__ __forceinline__ u32 E4m3NanBits(u32 codes) {
  return ((codes & 0x7f7f7f7f) + 0x01010101) & 0x80808080;
}
__device__ __forceinline__ u32 E4m3NanBits(uint4 x) {
  return E4m3NanBits(x.x) | E4m3NanBits(x.y) | E4m3NanBits(x.z) | E4m3NanBits(x.w);
}

}  // namespace jax_attn
