// Four f32 lanes of AArch64's Advanced SIMD. The vocabulary is documented in simd_baseline.h.
#pragma once

#include <arm_neon.h>

#include "cpu/simd/simd_types.h"

namespace jax_attn {
namespace {

struct Neon {
  using Vec = float32x4_t;
  static constexpr int kWidth = 4;
  static constexpr int kRows = 6;  // 24 accumulators, 4 of b, 1 of a: 29 of 32 registers
  static constexpr int kVecs = 4;
  static constexpr int kWidePanels = 1;
  static constexpr bool kBf16Dot = false;
  static constexpr bool kTiles = false;
  static constexpr bool kLooksUp = false;
  static constexpr bool kFloorExp2 = false;
  static constexpr bool kFuses = true;  // Fma rounds once
  static constexpr bool kMasksLanes = false;
  static constexpr int kLaneCodes = 2;
  static constexpr int kCodeColumns = kWidth;

  static Vec Zero() { return vdupq_n_f32(0); }
  static Vec Set(float x) { return vdupq_n_f32(x); }
  static Vec Broadcast(const void* p) {
    float x;
    memcpy(&x, p, 4);
    return vdupq_n_f32(x);
  }

  static Vec Load(const float* p) { return vld1q_f32(p); }
  static Vec Load(const Bf16* p) { return vreinterpretq_f32_u32(vshll_n_u16(LoadHalf(p), 16)); }
  static Vec Load(const F16* p) { return vcvt_f32_f16(vreinterpret_f16_u16(LoadHalf(p))); }
  // Converts via f16, see simd_avx2.h.
  static Vec Load(const E4m3* p) {
    uint32_t four;
    memcpy(&four, p, 4);
    const uint16x4_t codes = vget_low_u16(vmovl_u8(vcreate_u8(four)));
    const uint16x4_t rest = vand_u16(codes, vdup_n_u16(0x7f));
    const uint16x4_t sign = vshl_n_u16(vand_u16(codes, vdup_n_u16(0x80)), 8);
    const uint16x4_t nan = vand_u16(vceq_u16(rest, vdup_n_u16(0x7f)), vdup_n_u16(0x4000));
    const uint16x4_t half = vorr_u16(vorr_u16(vshl_n_u16(rest, 7), sign), nan);
    return vmulq_n_f32(vcvt_f32_f16(vreinterpret_f16_u16(half)), 0x1p8f);
  }
  template <typename T>
  static void LoadTwo(const T* p, Vec* v) {
    v[0] = Load(p);
    v[1] = Load(p + kWidth);
  }
  // n is 4: head dims are multiples of 8.
  template <typename T>
  static Vec LoadFirst(const T* p, int) {
    return Load(p);
  }

  static void Store(float* p, Vec v) { vst1q_f32(p, v); }
  static void Store(Bf16* p, Vec v) {
    const uint32x4_t u = vreinterpretq_u32_f32(v);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(vaddq_u32(u, vdupq_n_u32(0x7fff)), odd);
    const uint32x4_t quiet = vorrq_u32(u, vdupq_n_u32(0x400000));
    const uint16x4_t half = vshrn_n_u32(vbslq_u32(vceqq_f32(v, v), rounded, quiet), 16);
    memcpy(p, &half, 8);
  }
  static void Store(F16* p, Vec v) {
    const float16x4_t half = vcvt_f16_f32(v);
    memcpy(p, &half, 8);
  }
  template <typename T>
  static void StoreTwo(T* p, Vec a, Vec b) {
    Store(p, a);
    Store(p + kWidth, b);
  }
  template <typename T>
  static void StoreFirst(T* p, Vec v, int) {
    Store(p, v);
  }

  static Vec Add(Vec a, Vec b) { return vaddq_f32(a, b); }
  static Vec Sub(Vec a, Vec b) { return vsubq_f32(a, b); }
  static Vec Mul(Vec a, Vec b) { return vmulq_f32(a, b); }
  static Vec Div(Vec a, Vec b) { return vdivq_f32(a, b); }
  static Vec Fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
  static Vec Max(Vec a, Vec b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
  static Vec Abs(Vec a) { return vabsq_f32(a); }
  static Vec CopySign(Vec x, Vec s) { return vbslq_f32(vdupq_n_u32(0x80000000), s, x); }
  static Vec SelectLess(Vec a, Vec b, Vec yes, Vec no) {
    return vbslq_f32(vcltq_f32(a, b), yes, no);
  }

  static Vec Round(Vec x) { return vrndnq_f32(x); }
  static Vec ScaleByPow2(Vec y, Vec n) {
    const int32x4_t shifted = vshlq_n_s32(vcvtq_s32_f32(n), 23);
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(y), shifted));
  }

  static Vec KeepLanes(Vec x, int lo, int hi) {
    const int32_t lanes[4] = {0, 1, 2, 3};
    const int32x4_t lane = vld1q_s32(lanes);
    const uint32x4_t inside =
        vandq_u32(vcgeq_s32(lane, vdupq_n_s32(lo)), vcltq_s32(lane, vdupq_n_s32(hi)));
    return vbslq_f32(inside, x, vdupq_n_f32(kNegInf));
  }

  static float First(Vec v) { return vgetq_lane_f32(v, 0); }
  static float ReduceAdd(Vec v) { return vaddvq_f32(v); }
  static float ReduceMax(Vec v) { return vmaxnmvq_f32(v); }
  static bool AnyNan(Vec v) { return vminvq_u32(vceqq_f32(v, v)) == 0; }

  static void TransposeLoad(const char* const* rows, ptrdiff_t offset, int, Vec* out) {
    JAX_ATTN_UNROLL
    for (int i = 0; i < 4; ++i) memcpy(&out[i], rows[i] + offset, 16);
    Transpose(out);
  }
  static Vec LoadLanes(const void* p, int) {
    Vec v;
    memcpy(&v, p, 16);
    return v;
  }
  static void Interleave(Vec a, Vec b, Vec* first, Vec* second) {
    *first = vzip1q_f32(a, b);
    *second = vzip2q_f32(a, b);
  }
  static Vec PairLow(Vec pairs) {
    return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(pairs), 16));
  }
  static Vec PairHigh(Vec pairs) {
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(pairs), vdupq_n_u32(0xffff0000)));
  }
  static void Transpose(Vec* r) {
    const float32x4x2_t a = vtrnq_f32(r[0], r[1]), b = vtrnq_f32(r[2], r[3]);
    r[0] = vcombine_f32(vget_low_f32(a.val[0]), vget_low_f32(b.val[0]));
    r[1] = vcombine_f32(vget_low_f32(a.val[1]), vget_low_f32(b.val[1]));
    r[2] = vcombine_f32(vget_high_f32(a.val[0]), vget_high_f32(b.val[0]));
    r[3] = vcombine_f32(vget_high_f32(a.val[1]), vget_high_f32(b.val[1]));
  }

  static Vec LoadCodes(const char* p) {
    return vreinterpretq_f32_s16(vmovl_s8(vld1_s8(reinterpret_cast<const int8_t*>(p))));
  }
  static void PairCodes(const char* const* rows, i64 offset, int, Vec* to) {
    const auto codes = [&](int row) {
      uint32_t four;
      memcpy(&four, rows[row] + offset, 4);
      return vmovl_s8(vcreate_s8(four));
    };
    to[0] = vreinterpretq_f32_s16(vzip1q_s16(codes(0), codes(1)));
  }
  static Vec DotShorts(Vec a, Vec b, Vec acc) {
    const int16x8_t x = vreinterpretq_s16_f32(a), y = vreinterpretq_s16_f32(b);
    const int32x4_t low = vmull_s16(vget_low_s16(x), vget_low_s16(y));
    const int32x4_t sums = vpaddq_s32(low, vmull_high_s16(x, y));
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(acc), sums));
  }
  static Vec FromInt(Vec v) { return vcvtq_f32_s32(vreinterpretq_s32_f32(v)); }
  static void StoreCodes(char* to, Vec x) {
    const int16x4_t half = vmovn_s32(vreinterpretq_s32_f32(x));
    memcpy(to, &half, 8);
  }
  static void StoreManyCodes(char* to, const Vec* x) {
    JAX_ATTN_UNROLL
    for (int i = 0; i < 64 / kWidth; ++i) StoreCodes(to + i * kWidth * 2, x[i]);
  }

 private:
  static uint16x4_t LoadHalf(const void* p) {
    uint16x4_t half;
    memcpy(&half, p, 8);
    return half;
  }
};

}  // namespace
}  // namespace jax_attn
