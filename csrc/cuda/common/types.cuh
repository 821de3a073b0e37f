// Element types: storage, conversions and the tensor core instruction of each.
#pragma once

#include "cuda/common/ptx.cuh"

namespace jax_attn {

// Values of spec.h's DType.
inline constexpr int kElementBf16 = 0;
inline constexpr int kElementF16 = 1;
inline constexpr int kElementF32 = 2;

template <int kDtype>
struct Element;

template <>
struct Element<kElementBf16> {
  static constexpr int kBytes = 2;
  __device__ static u32 Pack(float low, float high) { return PackBf16(low, high); }
  __device__ static float ToFloat(u16 bits) { return __uint_as_float(u32{bits} << 16); }
  __device__ static void Mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    MmaBf16(c, a, b0, b1);
  }
  __device__ static u32 FmaX2(u32 a, u32 b, u32 c) { return FmaBf16x2(a, b, c); }
  __device__ static bool IsFinite(u32 bits) { return (bits & 0x7f80) != 0x7f80; }
};

template <>
struct Element<kElementF16> {
  static constexpr int kBytes = 2;
  __device__ static u32 Pack(float low, float high) { return PackF16(low, high); }
  __device__ static float ToFloat(u16 bits) { return F16ToFloat(bits); }
  __device__ static void Mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    MmaF16(c, a, b0, b1);
  }
  __device__ static u32 FmaX2(u32 a, u32 b, u32 c) { return FmaF16x2(a, b, c); }
  __device__ static bool IsFinite(u32 bits) { return (bits & 0x7c00) != 0x7c00; }
};

template <>
struct Element<kElementF32> {
  static constexpr int kBytes = 4;
};

// Writes four neighbouring elements of `array`, from index `at` (a multiple of 4) on.
template <int kDtype>
__device__ __forceinline__ void Store4(void* array, i64 at, float4 x) {
  if constexpr (kDtype == kElementF32) {
    *reinterpret_cast<float4*>(static_cast<float*>(array) + at) = x;
  } else {
    using E = Element<kDtype>;
    StoreVector(static_cast<u16*>(array) + at, make_uint2(E::Pack(x.x, x.y), E::Pack(x.z, x.w)));
  }
}

}  // namespace jax_attn
