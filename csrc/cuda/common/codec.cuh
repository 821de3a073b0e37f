// Rows of keys and values as codes, in the formats that become the kernel's 16-bit type in shared
// memory: how append makes them, and what they stand for. The same bits as in cpu/codec.h. (e4m3 is
// multiplied from registers, see e4m3.cuh.)
//
// A row is that of one token and head: its codes, then its scales if it has its own.
#pragma once

#include "cuda/common/e4m3.cuh"
#include "cuda/common/math.cuh"

namespace jax_attn {

// --- decode: eight bytes of codes at a time ---

// A code is the high byte of an f16.
template <int kDtype>
__device__ __forceinline__ uint4 DecodeE5m2(u32 low, u32 high) {
  return make_uint4(FromF16x2<kDtype>(__byte_perm(low, 0, 0x1404)),
                    FromF16x2<kDtype>(__byte_perm(low, 0, 0x3424)),
                    FromF16x2<kDtype>(__byte_perm(high, 0, 0x1404)),
                    FromF16x2<kDtype>(__byte_perm(high, 0, 0x3424)));
}

template <int kDtype>
__device__ __forceinline__ uint4 DecodeInt8(u32 low, u32 high, float scale) {
  using E = Element<kDtype>;
  // With its highest bit flipped a code is n = code + 128, and 2^23 + n has the bits 0x4b000000 +
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

// A scale of mxfp4 as factors of two elements at once. It is one of bf16, but most are none of f16:
// there it is the product of two. The first of these is exact, and what the second rounds is what
// the scale itself would.
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

// The low halves of the bytes are elements of the first half of a block, the high halves those of
// the second.
template <int kDtype>
__device__ __forceinline__ void DecodeMxfp4(u32 low, u32 high, u32 exponent, uint4& first,
                                            uint4& second) {
  // High and low bytes of 0, 0.5, 1, 1.5 and of 2, 3, 4, 6.
  constexpr bool kIsBf16 = kDtype == kElementBf16;
  constexpr u32 kHighs[2] = {kIsBf16 ? 0x3f3f3f00 : 0x3e3c3800, kIsBf16 ? 0x40404040 : 0x46444240};
  constexpr u32 kLows[2] = {kIsBf16 ? 0xc0800000 : 0, kIsBf16 ? 0xc0804000 : 0};
  const MxFactors<kDtype> factors(exponent);
  u32 of_first[4], of_second[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 word = i < 2 ? low : high;
    // Four codes are the digits of a byte permutation; their signs go to the highest bits of bytes.
    const u32 digits = (word & 0x77777777u) >> i % 2 * 16;
    const u32 signs = __byte_perm(word, word << 4, i % 2 == 0 ? 0x1504 : 0x3726) & 0x80808080u;
    const u32 highs = __byte_perm(kHighs[0], kHighs[1], digits & 0xffff) | signs;
    const u32 lows = __byte_perm(kLows[0], kLows[1], digits & 0xffff);
    of_first[i] = factors.Times(__byte_perm(lows, highs, 0x6240));
    of_second[i] = factors.Times(__byte_perm(lows, highs, 0x7351));
  }
  first = make_uint4(of_first[0], of_first[1], of_first[2], of_first[3]);
  second = make_uint4(of_second[0], of_second[1], of_second[2], of_second[3]);
}

// --- encode: a warp a row, a lane eight elements ---

template <int kDtype>
__device__ __forceinline__ void EightElements(const uint4& bits, float (&x)[8]) {
  const u32 pairs[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x[i] = Element<kDtype>::ToFloat(static_cast<u16>(pairs[i / 2] >> i % 2 * 16));
  }
}

// With kHeadScale: the nearest, ties to even; what is beyond the largest value, 448 or 57344,
// becomes that. NaN stays NaN.
template <int kFormat>
__device__ __forceinline__ u32 ToCode(float x) {
  static_assert(kFormat == kE4m3Format || kFormat == kE5m2Format);
  constexpr int kMantissa = kFormat == kE4m3Format ? 3 : 2, kShift = 23 - kMantissa;
  constexpr u32 kBias = (1 << (6 - kMantissa)) - 1, kNan = 0x7f;
  constexpr u32 kLargest = kFormat == kE4m3Format ? kNan - 1 : 0x7b;  // e5m2: below infinity
  // A code's bits at the place of f32's are those of its value but for the bias of the exponent.
  constexpr u32 kBiases = (127 - kBias) << 23;
  // Of this magnitude f32 has as many fraction bits as a subnormal code.
  constexpr u32 kSameFraction = (127 + 23 - kMantissa + 1 - kBias) << 23;
  const u32 bits = __float_as_uint(x), magnitude = bits & 0x7fffffff;
  u32 code;
  if (magnitude > 0x7f800000) {
    code = kNan;
  } else if (magnitude >= (kLargest << kShift) + kBiases) {
    code = kLargest;
  } else if (magnitude < kBiases + (1 << 23)) {  // subnormal: the sum is rounded
    code = __float_as_uint(__uint_as_float(magnitude) + __uint_as_float(kSameFraction)) -
           kSameFraction;
  } else {
    code = (magnitude - kBiases + (1 << (kShift - 1)) - 1 + (magnitude >> kShift & 1)) >> kShift;
  }
  return code | (bits >> 24 & 0x80);
}

// Eight elements over the scale of their head.
template <int kFormat, int kDtype>
__device__ __forceinline__ uint2 EncodeEight(const uint4& bits, float scale) {
  float x[8];
  EightElements<kDtype>(bits, x);
  u32 codes[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 8; ++i) codes[i / 4] |= ToCode<kFormat>(x[i] / scale) << i % 4 * 8;
  return make_uint2(codes[0], codes[1]);
}

// The nearest, ties to an even code.
__device__ __forceinline__ u32 ToE2m1(float x) {
  const u32 bits = __float_as_uint(x);
  const float y = __uint_as_float(bits & 0x7fffffff);
  const u32 code = (y > 0.25f) + (y >= 0.75f) + (y > 1.25f) + (y >= 1.75f) + (y > 2.5f) +
                   (y >= 3.5f) + (y > 5.0f);
  return code | (bits >> 28 & 8);
}

// Writes eight bytes, which rows of a length that is no multiple of 4 have anywhere.
__device__ __forceinline__ void StoreCodes(unsigned char* to, i64 row_bytes, u32 low, u32 high) {
  if (row_bytes % 4 == 0) {
    reinterpret_cast<u32*>(to)[0] = low;
    reinterpret_cast<u32*>(to)[1] = high;
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) to[i] = static_cast<unsigned char>((i < 4 ? low : high) >> i % 4 * 8);
}

// Writes a row with scales of its own to `to`, by a whole warp. Lane l has elements [8 l, 8 l + 8)
// of the row in x, zeros beyond its end.
template <int kFormat, int kDtype>
__device__ __forceinline__ void EncodeRow(const float (&x)[8], int head_dim, unsigned char* to) {
  constexpr int kInfinity = 0x7f800000;
  const int lane = threadIdx.x % kWarpSize, first = 8 * lane;
  const i64 row_bytes = CodeRowBytes(kFormat, head_dim);
  int largest = 0;  // of magnitudes, as bits: those of NaN are beyond infinity
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    largest = Max(largest, static_cast<int>(__float_as_uint(x[i]) & 0x7fffffff));
  }
  if constexpr (kFormat == kInt8Format) {
    largest = static_cast<int>(WarpMax(static_cast<u32>(largest)));
    const bool is_finite = largest < kInfinity;
    const float of_largest = __int_as_float(largest) / 127.0f;
    const float least = __uint_as_float(0x00800000);  // 2^-126: products with it are normal
    const float scale = is_finite ? fmaxf(of_largest, least) : __uint_as_float(0x7fc00000);
    u32 codes[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
      const float nearest = ((is_finite ? x[i] / scale : 0.0f) + kMagic) - kMagic;
      codes[i / 4] |= (static_cast<u32>(static_cast<int>(nearest)) & 0xff) << i % 4 * 8;
    }
    if (first < head_dim) StoreCodes(to + first, row_bytes, codes[0], codes[1]);
    if (lane == 0) *reinterpret_cast<float*>(to + head_dim) = scale;
  } else {
    constexpr int kBlock = FormatOf(kFormat).block;
    static_assert(kFormat == kMxfp4Format && kBlock == 32, "four lanes a block");
    largest = Max(largest, __shfl_xor_sync(kFullWarp, largest, 1));
    largest = Max(largest, __shfl_xor_sync(kFullWarp, largest, 2));
    const bool is_finite = largest < kInfinity;
    // The smallest power of two whose 6-fold is no less than all magnitudes, and half of which the
    // type has as a number, f32 as a normal one.
    const int exponent = (largest >> 23) - ((largest & 0x7fffff) > 0x400000 ? 1 : 2);
    const int scale = is_finite ? Max(exponent, kDtype == kElementF16 ? 104 : 3) : 255;
    const float inverse = is_finite ? __uint_as_float(static_cast<u32>(254 - scale) << 23) : 0.0f;
    u32 codes = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) codes |= ToE2m1(x[i] * inverse) << 4 * i;
    // Byte i of a block has codes i and half + i.
    const int block = first / kBlock, in_block = first % kBlock;
    const int half = Min(kBlock, head_dim - block * kBlock) / 2;
    const u32 others = __shfl_sync(kFullWarp, codes, lane + half / 8);
    if (first >= head_dim) return;
    if (in_block == 0) to[head_dim / 2 + block] = static_cast<unsigned char>(scale);
    if (in_block >= half) return;
    u32 pairs[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const u32 pair = (codes >> 4 * i & 15) | (others >> 4 * i & 15) << 4;
      pairs[i / 4] |= pair << i % 4 * 8;
    }
    StoreCodes(to + block * (kBlock / 2) + in_block, row_bytes, pairs[0], pairs[1]);
  }
}

}  // namespace jax_attn
