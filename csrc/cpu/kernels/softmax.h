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

inline LogitRule MakeLogitRule(float sm_scale, float logits_soft_cap) {
  LogitRule rule{};
  const float magnitude = sm_scale < 0 ? -sm_scale : sm_scale;
  rule.q_sign = sm_scale > 0 ? 1.0f : sm_scale < 0 ? -1.0f : 0.0f;
  rule.scale_log2 = magnitude > 0 ? magnitude * kLog2e : 1.0f;
  if (logits_soft_cap > 0) {
    rule.cap_log2 = logits_soft_cap * kLog2e;
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

// The running max of a row after a block, from the one before it.
template <class Isa>
JAX_ATTN_INLINE float NewReference(float block_max, float old_max) {
  return block_max > old_max + kSlackLog2<Isa> ? block_max : old_max;
}

// The same, from the row's scores.
template <class Isa>
JAX_ATTN_INLINE float MaskedMax(const LogitRule& rule, i64 begin, i64 end, Range seen,
                                float old_max, float* s) {
  return NewReference<Isa>(BlockMax<Isa>(rule, begin, end, seen, s) * rule.scale_log2, old_max);
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
  alignas(64) float fall[kMaxTileRows] = {};  // old maximum - new one
  float base[kMaxTileRows];
  for (i64 r = 0; r < n; ++r) {
    fetch.Bytes(end - begin);
    const float old_max = states[r].max_log2;
    const float max =
        MaskedMax<Isa>(rule.Scaled(scales[r]), begin, end, seen[r], old_max, s + r * lds);
    states[r].max_log2 = max;
    // -inf: no visible key so far. As 0, or -inf - -inf would be NaN.
    base[r] = max == kNegInf ? 0.0f : max;
    fall[r] = old_max - base[r];
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
    const float old_max = state.max_log2;
    const float max =
        MaskedMax<Isa>(rule->Scaled(scales[r]), begin, end, seen[r], old_max, s + r * lds);
    base = max == kNegInf ? 0.0f : max;
    if (max == old_max) return;
    state.max_log2 = max;
    if (old_max == kNegInf) return;  // nothing to rescale
    const auto fall = Exp2<Isa>(Isa::Set(old_max - base));
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
