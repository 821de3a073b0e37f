// One online softmax step of one row. Internal linkage: see kernels.h.
#pragma once

#include "cpu/simd/simd_math.h"

namespace jax_attn {
namespace {

// How scores become base-2 logits.
struct LogitRule {
  float q_sign;      // q is multiplied by it when loaded, so that scale_log2 is positive
  float scale_log2;  // base-2 logit = scale_log2 * score
  float cap_log2;    // with a cap: cap_log2 * tanh(cap_in * score); 0: no cap
  float cap_in;

  // The rule for scores whose logits are `scale` times those of this rule.
  LogitRule Scaled(float scale) const {
    LogitRule rule = *this;
    (cap_log2 != 0 ? rule.cap_in : rule.scale_log2) *= scale;
    return rule;
  }
};

// The largest finite number in place of inf: inf * 0 would be NaN.
inline float Finite(float x) { return x > 0x1.fffffep127f ? 0x1.fffffep127f : x; }

inline LogitRule MakeLogitRule(float sm_scale, float logits_soft_cap) {
  LogitRule rule{};
  const float magnitude = sm_scale < 0 ? -sm_scale : sm_scale;
  rule.q_sign = sm_scale > 0 ? 1.0f : sm_scale < 0 ? -1.0f : 0.0f;
  rule.scale_log2 = magnitude > 0 ? Finite(magnitude * kLog2e) : 1.0f;
  if (logits_soft_cap > 0) {
    rule.cap_log2 = Finite(logits_soft_cap * kLog2e);
    rule.cap_in = magnitude > 0 ? magnitude / logits_soft_cap : 1.0f;
    rule.scale_log2 = 1.0f;
  }
  return rule;
}

// The rule for natural logits, which have no scales.
constexpr LogitRule kNaturalRule = {1.0f, kLog2e, 0.0f, 0.0f};
constexpr int kMaxTileRows = 32;
constexpr float kNoScales[kMaxTileRows] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                           1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

// How far the base-2 logits of a row may exceed the running max that its exponents use. With tiles,
// sums of P up to 2^8 are as exact as those up to 1, and few blocks rescale what was before them.
template <class Isa>
constexpr float kSlackLog2 = Isa::kTiles ? 8.0f : 0.0f;

// Applies the soft cap to one row's scores s[begin, end), masks the columns outside `seen` (empty
// if its begin >= its end), and returns their maximum.
template <class Isa>
JAX_ATTN_INLINE float BlockMax(const LogitRule& rule, i64 begin, i64 end, Range seen, float* s) {
  using Vec = typename Isa::Vec;
  constexpr i64 kWidth = Isa::kWidth;
  if (rule.cap_log2 != 0) {
    for (i64 j = begin; j < end; j += kWidth) {
      const Vec x = Tanh<Isa>(Isa::Mul(Isa::Set(rule.cap_in), Isa::Load(s + j)));
      Isa::Store(s + j, Isa::Mul(Isa::Set(rule.cap_log2), x));
    }
  }
  if (seen.begin > begin || seen.end < end) {
    const auto mask = [&](i64 j) __attribute__((always_inline)) {
      const int lo = static_cast<int>(seen.begin - j), hi = static_cast<int>(seen.end - j);
      Isa::Store(s + j, Isa::KeepLanes(Isa::Load(s + j), lo, hi));
    };
    for (i64 j = begin; j < Min(end, seen.begin); j += kWidth) mask(j);
    for (i64 j = Max(begin, seen.end / kWidth * kWidth); j < end; j += kWidth) mask(j);
  }
  Vec max = Isa::Set(kNegInf);
  for (i64 j = begin; j < end; j += kWidth) max = Isa::Max(max, Isa::Load(s + j));
  return Isa::ReduceMax(max);
}

// Exponents are fma(score, scale_log2, -base) with base = 2 * max_log4, the rounded base-2 logit of
// the running max. The product is not rounded, so the exponent of the running max itself is the
// rounding error of base: below 2^-4 while |base| < kFarLog2, and the same factor in P, sums and
// lse, so results stay exact. Of larger logits it would be anything up to the range of f32, and
// beyond 2.36e38 base itself overflows. A row whose running max is that far from 0 subtracts the
// maximum of the block from its scores first, which is exact where it counts. Without FMA, where
// the product is rounded, too, rows do so earlier.
template <class Isa>
constexpr float kFarLog2 = Isa::kFuses ? 0x1p20f : 0x1p8f;
// Up to here the rounding error of base is below 2^4, so that P may have it as a factor. Beyond,
// logits that differ at all differ by 32, and the error is left out.
constexpr float kUnitLog2 = 0x1p28f;

// The base of a row whose running max is far from 0, or that has none. Subtracts the maximum of the
// block from its scores. Not inlined, and in one piece, so that the usual way keeps its registers.
template <class Isa>
__attribute__((noinline, cold)) float PrepareFarRow(float scale_log2, float block_max,
                                                    float max_log4, i64 begin, i64 end, float* s) {
  if (block_max == kNegInf) return 0.0f;  // no visible key in the block; -inf - -inf would be NaN
  const float scale_log4 = 0.5f * scale_log2, block_log4 = Rounded(block_max * scale_log4);
  float more_log4 = block_log4 - max_log4;
  if (__builtin_fabsf(block_log4) < 0.5f * kUnitLog2) {
    more_log4 += __builtin_fmaf(block_max, scale_log4, -block_log4);
  }
  for (i64 j = begin; j < end; j += Isa::kWidth) {
    Isa::Store(s + j, Isa::Sub(Isa::Load(s + j), Isa::Set(block_max)));
  }
  return -2.0f * more_log4;
}

// The exponent that takes sums from an old running max to a new one.
JAX_ATTN_INLINE float FallLog2(float old_max_log4, float max_log4) {
  // -inf: no visible key so far. As 0, or -inf - -inf would be NaN.
  return 2.0f * (old_max_log4 - (max_log4 == kNegInf ? 0.0f : max_log4));
}

// Turns a row's scores s[begin, end) into what Exponentials takes, and moves its running max.
// Returns the base.
template <class Isa>
JAX_ATTN_INLINE float PrepareRow(const LogitRule& rule, i64 begin, i64 end, Range seen,
                                 float* max_log4, float* s) {
  const float block_max = BlockMax<Isa>(rule, begin, end, seen, s);
  const float block_log4 = Rounded(block_max * (0.5f * rule.scale_log2));
  float max = *max_log4;
  if (block_log4 > max + 0.5f * kSlackLog2<Isa>) *max_log4 = max = block_log4;
  const float base = 2.0f * max;
  if (__builtin_expect(!(__builtin_fabsf(base) < kFarLog2<Isa>), 0)) {
    return PrepareFarRow<Isa>(rule.scale_log2, block_max, max, begin, end, s);
  }
  return base;
}

// p[begin, end) = 2^(scale_log2 * s - base); returns their sum.
template <class Isa, typename P>
JAX_ATTN_INLINE float Exponentials(float scale_log2, float base, i64 begin, i64 end, const float* s,
                                   P* p) {
  using Vec = typename Isa::Vec;
  Vec sum = Isa::Zero();
  const Vec scale = Isa::Set(scale_log2), minus_base = Isa::Set(-base);
  for (i64 j = begin; j < end; j += Isa::kWidth) {
    const Vec pj = Weights<Isa>(Isa::Fma(Isa::Load(s + j), scale, minus_base));
    sum = Isa::Add(sum, pj);
    Isa::Store(p + j, pj);
  }
  return Isa::ReduceAdd(sum);
}

// One online softmax step of n <= kMaxTileRows rows, each with its own scale. Replaces the scores
// in columns [begin, end) by P, stored at p (p = s allowed); P of masked columns is 0. alpha:
// factor that rescales the sums of earlier blocks. begin and end are multiples of kWidth. The rows
// go through each phase together, so that their latencies overlap. Prefetches during 2 bytes of
// work per score.
template <class Isa, typename P, class Fetch>
JAX_ATTN_KERNEL void SoftmaxTile(const LogitRule& rule, const float* scales, i64 n, i64 begin,
                                 i64 end, const Range* seen, float* s, i64 lds, P* p, i64 ldp,
                                 RowState* states, float* alpha, Fetch& fetch) {
  alignas(64) float fall[kMaxTileRows] = {};
  float base[kMaxTileRows];
  for (i64 r = 0; r < n; ++r) {
    fetch.Bytes(end - begin);
    const float old_max = states[r].max_log4;
    base[r] = PrepareRow<Isa>(rule.Scaled(scales[r]), begin, end, seen[r], &states[r].max_log4,
                              s + r * lds);
    fall[r] = FallLog2(old_max, states[r].max_log4);
  }
  for (i64 r = 0; r < n; r += Isa::kWidth) Isa::Store(fall + r, Exp2<Isa>(Isa::Load(fall + r)));
  for (i64 r = 0; r < n; ++r) {
    fetch.Bytes(end - begin);
    const float sum = Exponentials<Isa>(rule.Scaled(scales[r]).scale_log2, base[r], begin, end,
                                        s + r * lds, p + r * ldp);
    states[r].sum = states[r].sum * fall[r] + sum;
    alpha[r] = fall[r];
  }
}

// The same, one row per step, interleaved with matmuls. Each row follows the step that finds its
// running max. Also rescales o [n, o_columns]. logits(r): turns the scores of row r into logits.
template <class Isa, typename P, class Logits>
struct SoftmaxRows {
  Logits logits;
  const LogitRule* rule;
  const float* scales;
  i64 n, begin, end;
  const Range* seen;
  float* s;
  i64 lds;
  P* p;
  i64 ldp;
  RowState* states;
  float* o;
  i64 o_columns;
  float base;  // of row `done`
  i64 done;

  void Start() {
    done = 0;
    FindBase(0);
  }

  // Computes P of row `done`, and the running max of the next row.
  JAX_ATTN_KERNEL void Row() {
    const i64 r = done++;
    const float row_base = base;
    if (done < n) FindBase(done);
    states[r].sum += Exponentials<Isa>(rule->Scaled(scales[r]).scale_log2, row_base, begin, end,
                                       s + r * lds, p + r * ldp);
  }

 private:
  JAX_ATTN_INLINE void FindBase(i64 r) {
    logits(r);
    RowState& state = states[r];
    const float old_max = state.max_log4;
    base =
        PrepareRow<Isa>(rule->Scaled(scales[r]), begin, end, seen[r], &state.max_log4, s + r * lds);
    if (state.max_log4 == old_max || old_max == kNegInf) return;  // nothing to rescale
    const auto fall = Exp2<Isa>(Isa::Set(FallLog2(old_max, state.max_log4)));
    state.sum *= Isa::First(fall);
    float* row = o + r * o_columns;
    for (i64 d = 0; d < o_columns; d += Isa::kWidth) {
      Isa::Store(row + d, Isa::Mul(fall, Isa::Load(row + d)));
    }
  }
};

// Without softmax: copies scores to P and zeroes the masked columns.
template <class Isa, typename P>
JAX_ATTN_KERNEL void KeepWeights(i64 n, i64 begin, i64 end, const Range* seen, const float* s,
                                 i64 lds, P* p, i64 ldp, float* alpha) {
  for (i64 r = 0; r < n; ++r) {
    for (i64 j = begin; j < end; j += Isa::kWidth) {
      const int lo = static_cast<int>(Max(seen[r].begin - j, 0));
      const int hi = static_cast<int>(Min(seen[r].end - j, Isa::kWidth));
      alignas(64) float x[Isa::kWidth];
      for (int i = 0; i < Isa::kWidth; ++i) x[i] = i >= lo && i < hi ? s[r * lds + j + i] : 0.0f;
      Isa::Store(p + r * ldp + j, Isa::Load(x));
    }
    alpha[r] = 1.0f;
  }
}

}  // namespace
}  // namespace jax_attn
