// The counterpart of softmax.h for int8 dot products: from i32 sums to quantized P, and from the
// i32 sums of P V to o. Internal linkage: see kernels.h.
//
// Integer sums are exact, and everything else is done row by row by separate functions. So a row
// has the same bits whatever tiles multiply it, and on each instruction set, except for the last
// bits of its exponentials.
#pragma once

#include "cpu/kernels/reduce.h"
#include "cpu/kernels/softmax.h"

namespace jax_attn {
namespace {

// Element type of rows of q and o: the int8 kernels are the same for each type.
struct ElementRows {
  i64 bytes;                                            // of one element
  void (*load)(const void* row, i64 n, float* to);      // to f32
  void (*encode)(const void* row, i64 n, char* codes);  // quantizes as append does
  void (*store)(const AttentionParams& p, i64 token, i64 head, RowState state, const float* o);
};

// Buffers of one thread; rows as in Buffers.
struct CodeBuffers {
  float* factors;     // [score_rows] what one unit of quantized P stands for, in this block
  i32* bias;          // [rows] excess in the sums of a row of q with keys
  float* sums;        // [score_rows, o_columns] i32, P V of the block
  float* key_scales;  // [heads, tile_kv]
  // [tile_kv] of one head, 0 if not finite; and the largest scale up to a token.
  float *value_scales, *largest_scales;
  float* query;  // [head_dim_qk] a row of q
  char* fresh;   // with k_new: [tile_kv, heads] quantized keys, then values
};

// The scale stored behind the quantized values of a row.
inline float ScaleOfRow(const char* row, i64 head_dim) {
  float scale;
  memcpy(&scale, row + head_dim, sizeof(scale));
  return scale;
}

// Rows of q below it count as 0: so the scales of logits are normal numbers.
constexpr float kLeastQuery = 0x1p-90f;

// Quantizes x[0, n), with zeros up to `padded` values; returns the scale, NaN if an element is not
// finite. *sum: of the quantized values.
template <class Isa>
JAX_ATTN_KERNEL float EncodeQuery(const float* x, i64 n, i64 padded, char* to, i32* sum) {
  using Vec = typename Isa::Vec;
  constexpr i64 kWidth = Isa::kWidth, kBytes = 4 / Isa::kLaneCodes;
  Vec largest = Isa::Zero(), bad = Isa::Zero();
  for (i64 d = 0; d < n; d += kWidth) {
    const Vec v = Isa::LoadFirst(x + d, static_cast<int>(Min(kWidth, n - d)));
    largest = Isa::Max(largest, Isa::Abs(v));
    bad = Isa::Fma(v, Isa::Zero(), bad);
  }
  const bool is_finite = !Isa::AnyNan(bad);
  const float most = is_finite ? Isa::ReduceMax(largest) : 0.0f;
  const float scale = most > kLeastQuery ? most / 127.0f : 1.0f;
  memset(to, 0, static_cast<size_t>(padded * kBytes));
  Vec all = Isa::Zero();
  for (i64 d = 0; is_finite && most > kLeastQuery && d < n; d += kWidth) {
    const int lanes = static_cast<int>(Min(kWidth, n - d));
    const Vec magic = Isa::Set(kRoundMagic);
    const Vec codes = Isa::Add(Isa::Div(Isa::LoadFirst(x + d, lanes), Isa::Set(scale)), magic);
    all = Isa::Add(all, Isa::Sub(codes, magic));
    if (lanes == kWidth) {
      Isa::StoreCodes(to + d * kBytes, codes);
    } else {
      char last[kWidth * kBytes];
      Isa::StoreCodes(last, codes);
      memcpy(to + d * kBytes, last, static_cast<size_t>(lanes * kBytes));
    }
  }
  *sum = static_cast<i32>(Isa::ReduceAdd(all));
  return is_finite ? scale : __builtin_nanf("");
}

// Turns a row's sums, s[begin, end), into scores with the scales of keys; returns the largest.
template <class Isa, bool kBias>
JAX_ATTN_INLINE float SumsToScores(i64 begin, i64 end, i32 bias, const float* key_scales,
                                   float* s) {
  const auto more = Isa::Set(static_cast<float>(bias));
  auto max = Isa::Set(kNegInf);
  for (i64 j = begin; j < end; j += Isa::kWidth) {
    auto x = Isa::FromInt(Isa::Load(s + j));
    if constexpr (kBias) x = Isa::Add(x, more);  // exact: all are below 2^24
    x = Isa::Mul(x, Isa::Load(key_scales + j));
    max = Isa::Max(max, x);
    Isa::Store(s + j, x);
  }
  return Isa::ReduceMax(max);
}

// Scales of the values of a block, [tile_kv] each: 0 where not finite.
struct ValueScales {
  const float *scales, *largest_so_far;
  i64 begin;  // first token, within the block

  // The largest scale that a row sees.
  JAX_ATTN_INLINE float Largest(Range seen) const {
    if (seen.begin <= begin) return largest_so_far[seen.end - 1];
    float largest = 0;
    for (i64 t = seen.begin; t < seen.end; ++t) largest = scales[t] > largest ? scales[t] : largest;
    return largest;
  }
  // The same if a variant has computed the logits s[begin, end), which are -inf where it hides
  // keys.
  template <class Isa>
  float LargestWithLogit(i64 begin, i64 end, const float* s) const {
    const auto lowest = Isa::Set(kNegInf);
    auto largest = Isa::Zero();
    for (i64 t = begin; t < end; t += Isa::kWidth) {
      const auto scale = Isa::Load(scales + t);
      largest = Isa::Max(largest, Isa::SelectLess(lowest, Isa::Load(s + t), scale, Isa::Zero()));
    }
    return Isa::ReduceMax(largest);
  }
};

// As kFarLog2, for codes of P: what their largest value takes is a polynomial in the rounding error
// of the base, which is below 2^-7 here.
template <class Isa>
constexpr float kFarCodesLog2 = Isa::kFuses ? 0x1p17f : kFarLog2<Isa>;

// One online softmax step of a row with the scores s[begin, end), of which the largest is
// max_score; s is overwritten if that is far from 0. P times the scales of values is rounded to
// multiples of 1/255 of the largest P times the largest scale; the multiples go to p, 0 where the
// row does not see the key. Earlier sums must be rescaled by *alpha; the multiples stand for
// themselves times *factor.
template <class Isa>
JAX_ATTN_INLINE void WeighCodes(float scale_log2, float max_score, float largest_scale, i64 begin,
                                i64 end, const float* value_scales, float* s, char* p,
                                RowState* state, float* alpha, float* factor) {
  using Vec = typename Isa::Vec;
  constexpr i64 kBytes = 4 / Isa::kLaneCodes, kAtOnce = 64 / Isa::kWidth;
  const float old_max = state->max_log4, scale_log4 = 0.5f * scale_log2;
  const float block_max = Rounded(max_score * scale_log4);
  const float max = block_max > old_max + 0.5f * kSlackLog2<Isa> ? block_max : old_max;
  // -inf: no key so far has a finite logit. Replaced by 0, or -inf - -inf would be NaN.
  const float base = max == kNegInf ? 0.0f : max,
              block_base = block_max == kNegInf ? base : block_max;
  // Smaller values count as 0.
  constexpr float kLeast = 0x1p-100f;
  float minus_block_base = -2.0f * block_base;
  // The logarithm of the largest P, not exactly 0 since block_base is rounded.
  float excess = 0.0f;
  if (block_max != kNegInf) {
    excess = 2.0f *
             Isa::First(Isa::Fma(Isa::Set(max_score), Isa::Set(scale_log4), Isa::Set(-block_base)));
  }
  float share_log2 = 2.0f * (block_base - base);
  if (__builtin_expect(!(__builtin_fabsf(minus_block_base) < kFarCodesLog2<Isa>), 0)) {
    // The largest P is 1, and what PrepareFarRow leaves of the base goes into the block's factor.
    const float minus_share = PrepareFarRow<Isa>(scale_log2, max_score, base, begin, end, s);
    if (block_max != kNegInf) share_log2 = -minus_share;
    minus_block_base = excess = 0.0f;
  }
  const Vec scale = Isa::Set(scale_log2), minus_base = Isa::Set(minus_block_base);
  const float x = kLn2 * excess;  // so small that 2^excess is within 2^-21
  const float largest = largest_scale * (1.0f + x + x * x * 0.5f);
  const Vec inverse = Isa::Set(largest > kLeast ? 255.0f / largest : 0.0f);
  const Vec magic = Isa::Set(kRoundMagic);
  Vec sum = Isa::Zero();
  const auto code = [&](i64 j) __attribute__((always_inline)) {
    const Vec weight = Weights<Isa>(Isa::Fma(Isa::Load(s + j), scale, minus_base));
    sum = Isa::Add(sum, weight);
    return Isa::Fma(Isa::Mul(weight, Isa::Load(value_scales + j)), inverse, magic);
  };
  i64 j = begin;
  for (; j + 64 <= end; j += 64) {
    Vec codes[kAtOnce];
    JAX_ATTN_UNROLL
    for (i64 i = 0; i < kAtOnce; ++i) codes[i] = code(j + i * Isa::kWidth);
    Isa::StoreManyCodes(p + j * kBytes, codes);
  }
  for (; j < end; j += Isa::kWidth) Isa::StoreCodes(p + j * kBytes, code(j));
  const auto exp2 = [](float x) __attribute__((always_inline)) {
    return x == 0 ? 1.0f : Isa::First(Weights<Isa>(Isa::Set(x)));
  };
  const float fall = max == old_max ? 1.0f : exp2(2.0f * (old_max - base));
  const float share = exp2(share_log2);
  state->max_log4 = max;
  state->sum = state->sum * fall + Isa::ReduceAdd(sum) * share;
  *alpha = fall;
  *factor = largest > kLeast ? share * (largest / 255.0f) : 0.0f;
}

// The softmax step of a row from its sums. logits(): turns the scores into logits, if `has_logits`.
template <class Isa, bool kBias, class Logits>
JAX_ATTN_KERNEL void WeighRow(const LogitRule& rule, bool has_logits, Logits&& logits, i64 begin,
                              i64 end, Range seen, i32 bias, const float* key_scales,
                              const ValueScales& values, float* s, char* p, RowState* state,
                              float* alpha, float* factor) {
  constexpr i64 kBytes = 4 / Isa::kLaneCodes;
  if (seen.begin >= seen.end) {
    memset(p + begin * kBytes, 0, static_cast<size_t>((end - begin) * kBytes));
    *alpha = 1.0f;
    *factor = 0.0f;
    return;
  }
  float max = SumsToScores<Isa, kBias>(begin, end, bias, key_scales, s);
  if (has_logits) logits();
  if (has_logits || rule.cap_log2 != 0 || seen.begin > begin || seen.end < end) {
    max = BlockMax<Isa>(rule, begin, end, seen, s);
  }
  const float largest =
      has_logits ? values.template LargestWithLogit<Isa>(begin, end, s) : values.Largest(seen);
  WeighCodes<Isa>(rule.scale_log2, max, largest, begin, end, values.scales, s, p, state, alpha,
                  factor);
}

// o[n, columns] = alpha o + factor sums, row by row.
template <class Isa>
JAX_ATTN_KERNEL void AddSums(i64 n, i64 columns, const float* alpha, const float* factors,
                             const float* sums, i64 lds, float* o, i64 ldo) {
  for (i64 r = 0; r < n; ++r, sums += lds, o += ldo) {
    const auto fall = Isa::Set(alpha[r]), factor = Isa::Set(factors[r]);
    if (alpha[r] == 1.0f) {
      if (factors[r] == 0.0f) continue;
      for (i64 d = 0; d < columns; d += Isa::kWidth) {
        const auto x = Isa::FromInt(Isa::Load(sums + d));
        Isa::Store(o + d, Isa::Fma(factor, x, Isa::Load(o + d)));
      }
    } else {
      for (i64 d = 0; d < columns; d += Isa::kWidth) {
        const auto x = Isa::FromInt(Isa::Load(sums + d));
        Isa::Store(o + d, Isa::Fma(factor, x, Isa::Mul(fall, Isa::Load(o + d))));
      }
    }
  }
}

// The softmax step of the rows of a tile, row by row, interleaved with matmuls: as SoftmaxRows.
template <class Isa, bool kBias, class Logits>
struct CodeRows {
  Logits logits;
  const LogitRule* rule;
  const float* scales;
  i64 n, begin, end;
  const Range* seen;
  const i32* bias;
  const float* key_scales;
  ValueScales values;
  float* s;
  i64 lds;
  char* p;
  i64 p_bytes;  // from one row to the next
  RowState* states;
  float *alpha, *factors;
  i64 done;

  void Start() { done = 0; }

  JAX_ATTN_KERNEL void Row() {
    const i64 r = done++;
    WeighRow<Isa, kBias>(
        rule->Scaled(scales[r]), logits.pass != nullptr, [&] { logits(r); }, begin, end, seen[r],
        bias[r], key_scales, values, s + r * lds, p + r * p_bytes, states + r, alpha + r,
        factors + r);
  }
};

}  // namespace
}  // namespace jax_attn
