// exp2, tanh and erf on Isa::Vec. Internal linkage: see kernels.h.
#pragma once

#include "cpu/simd/simd_types.h"

namespace jax_attn {
namespace {

// x, a product that the compiler must round: it may not become part of a multiply-add.
template <class V>
JAX_ATTN_INLINE V Rounded(V x) {
#if defined(__aarch64__)
  __asm__("" : "+w"(x));
#else
  __asm__("" : "+x"(x));
#endif
  return x;
}

// 2^x for x <= 0, within 1 ulp; exactly 1 at 0, exactly 0 below -125, NaN for NaN.
// A minimax polynomial of degree 6 on [-1/2, 1/2] whose constant term is held at 1.
template <class Isa>
JAX_ATTN_INLINE typename Isa::Vec Exp2(typename Isa::Vec x) {
  using Vec = typename Isa::Vec;
  const Vec lowest = Isa::Set(-125.0f);
  // -inf would make the fraction NaN; with lane masks the last step drops it.
  const Vec clamped = Isa::kMasksLanes ? x : Isa::Max(lowest, x);
  const Vec n = Isa::Round(clamped);
  const Vec f = Isa::Sub(clamped, n);
  Vec y = Isa::Set(1.5353361959569156e-4f);
  y = Isa::Fma(y, f, Isa::Set(1.3398873852565885e-3f));
  y = Isa::Fma(y, f, Isa::Set(9.61843691766262e-3f));
  y = Isa::Fma(y, f, Isa::Set(5.5503323674201965e-2f));
  y = Isa::Fma(y, f, Isa::Set(2.4022647738456726e-1f));
  y = Isa::Fma(y, f, Isa::Set(6.931471824645996e-1f));
  y = Isa::Fma(y, f, Isa::Set(1.0f));
  if constexpr (Isa::kMasksLanes) {
    return Isa::ScaleUnlessLess(x, lowest, y, n);
  } else {
    return Isa::SelectLess(x, lowest, Isa::Zero(), Isa::ScaleByPow2(y, n));
  }
}

// P of a softmax: 2^x with relative error 2^-22, otherwise like Exp2, though x may be as large as
// the exponents of f32 allow. An Isa with kFloorExp2 has instructions that split x at its floor and
// scale the result: 8 operations instead of the 12 of Exp2.
template <class Isa>
JAX_ATTN_INLINE typename Isa::Vec Weights(typename Isa::Vec x) {
  if constexpr (Isa::kFloorExp2) {
    using Vec = typename Isa::Vec;
    // Minimax on [0, 1), with the constant term fixed at 1.
    const Vec f = Isa::FloorFraction(x);
    Vec y = Isa::Set(1.8671303987503052e-3f);
    y = Isa::Fma(y, f, Isa::Set(9.017029777169228e-3f));
    y = Isa::Fma(y, f, Isa::Set(5.579991266131401e-2f));
    y = Isa::Fma(y, f, Isa::Set(2.4016444385051727e-1f));
    y = Isa::Fma(y, f, Isa::Set(6.931512951850891e-1f));
    y = Isa::Fma(y, f, Isa::Set(1.0f));
    return Isa::ScaleByFloor(y, x);
  } else {
    return Exp2<Isa>(x);
  }
}

// tanh(x) within a few ulp: 1 - 2 / (e^2|x| + 1), and the odd Taylor polynomial below 0.35, where
// that difference would cancel.
template <class Isa>
JAX_ATTN_INLINE typename Isa::Vec Tanh(typename Isa::Vec x) {
  using Vec = typename Isa::Vec;
  const Vec magnitude = Isa::Abs(x);
  // e^-2|x|, so that Exp2's range suffices: tanh = (1 - e) / (1 + e).
  const Vec e = Exp2<Isa>(Isa::Mul(magnitude, Isa::Set(-2.0f * kLog2e)));
  const Vec one = Isa::Set(1.0f);
  const Vec large = Isa::Div(Isa::Sub(one, e), Isa::Add(one, e));
  const Vec x2 = Isa::Mul(x, x);
  Vec series = Isa::Set(-1382.0f / 155925);
  series = Isa::Fma(series, x2, Isa::Set(62.0f / 2835));
  series = Isa::Fma(series, x2, Isa::Set(-17.0f / 315));
  series = Isa::Fma(series, x2, Isa::Set(2.0f / 15));
  series = Isa::Fma(series, x2, Isa::Set(-1.0f / 3));
  const Vec small = Isa::Fma(Isa::Mul(series, x2), magnitude, magnitude);
  return Isa::CopySign(Isa::SelectLess(magnitude, Isa::Set(0.35f), small, large), x);
}

// erf(x) within a few ulp: x times a rational function of x^2, minimax on [0, 3.92]; erf is +-1 in
// f32 beyond.
template <class Isa>
JAX_ATTN_INLINE typename Isa::Vec Erf(typename Isa::Vec x) {
  using Vec = typename Isa::Vec;
  const Vec most = Isa::Set(3.92f), magnitude = Isa::Abs(x);
  const Vec near = Isa::SelectLess(most, magnitude, Isa::CopySign(most, x), x);  // keeps NaN
  const Vec x2 = Isa::Mul(near, near);
  Vec p = Isa::Set(2.0500851860560942e-6f);
  p = Isa::Fma(p, x2, Isa::Set(2.8488380485214293e-4f));
  p = Isa::Fma(p, x2, Isa::Set(3.7656514905393124e-3f));
  p = Isa::Fma(p, x2, Isa::Set(5.274882912635803e-2f));
  p = Isa::Fma(p, x2, Isa::Set(1.9040723145008087e-1f));
  p = Isa::Fma(p, x2, Isa::Set(1.1283791065216064f));
  Vec q = Isa::Set(3.8091751775937155e-5f);
  q = Isa::Fma(q, x2, Isa::Set(1.1625444749370217e-3f));
  q = Isa::Fma(q, x2, Isa::Set(1.496928557753563e-2f));
  q = Isa::Fma(q, x2, Isa::Set(1.1410943418741226e-1f));
  q = Isa::Fma(q, x2, Isa::Set(5.020767450332642e-1f));
  q = Isa::Fma(q, x2, Isa::Set(1.0f));
  return Isa::Div(Isa::Mul(near, p), q);
}

}  // namespace
}  // namespace jax_attn
