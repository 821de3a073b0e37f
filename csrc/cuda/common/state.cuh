// Attention states: turns a row's (max, sum, o) into a result, and reduces several states of a row
// to one. Running maxima are in base 4 here, see RowState; lse leaves in natural log.
#pragma once

#include "cuda/common/math.cuh"

namespace jax_attn {

// A row's result: o = o_scale * (unnormalised o).
struct RowResult {
  float o_scale;
  float lse;  // natural log
};

// log(sum * 4^max_log4), finite where both are: constants are rounded, so the largest finite logits
// could leave the range of f32. NaN stays NaN.
__device__ __forceinline__ float LogOfState(RowState state) {
  const float lse = fmaf(state.max_log4, kLn4, Log2(state.sum) * kLn2);
  return lse < -kLargestFloat ? -kLargestFloat : lse > kLargestFloat ? kLargestFloat : lse;
}

// Used by final items and by merges. The sink is one more logit without a value; -inf: none. A row
// that saw no key becomes (0, -inf) and gets no sink. NaN passes through.
__device__ __forceinline__ RowResult FinishRow(RowState state, float sink_log4) {
  const bool sees = state.sum != 0.0f;
  if (sink_log4 == -Infinity()) {  // selects, not branches: they run at the end of every item
    return {sees ? Reciprocal(state.sum) : 0.0f, sees ? LogOfState(state) : -Infinity()};
  }
  if (!sees) return {0.0f, -Infinity()};
  const float max_log4 = fmaxf(state.max_log4, sink_log4);
  const float own = Exp2(2.0f * (state.max_log4 - max_log4));
  const float sum = fmaf(own, state.sum, Exp2(2.0f * (sink_log4 - max_log4)));
  return {own * Reciprocal(sum), LogOfState({max_log4, sum})};
}

// The same for a row of attention. Without softmax o stays as it is, and lse has no meaning.
template <class Traits>
__device__ __forceinline__ RowResult FinishAttentionRow(RowState state, float sink_log4) {
  if constexpr (!Traits::Variant::kNormalizes) return {1.0f, 0.0f};
  return FinishRow(state, sink_log4);
}

__device__ __forceinline__ float SinkLog4(const AttentionParams& p, int qo_head) {
  return p.sinks != nullptr ? p.sinks[qo_head] * kLog4E : -Infinity();
}

// Stores lse of a final row (at: index in lse), or the state of another row (at: row of the
// workspace). Returns the factor that o must be multiplied by.
template <class Traits>
__device__ __forceinline__ float WriteState(const AttentionParams& p, bool final, i64 at,
                                            int qo_head, bool writes, RowState state) {
  if (!final) {
    // Without softmax all states have weight 1, so that merges add them.
    if constexpr (!Traits::Variant::kNormalizes) state = {0.0f, 1.0f};
    if (writes) p.partial_states[at] = state;
    return 1.0f;
  }
  const RowResult result = FinishAttentionRow<Traits>(state, SinkLog4(p, qo_head));
  if (writes) p.lse[at] = result.lse;
  return result.o_scale;
}

// The weight of a state in a sum of states with maximum `max_log4`.
__device__ __forceinline__ float StateWeight(float state_max_log4, float max_log4) {
  return Exp2(2.0f * (state_max_log4 - FiniteMax(max_log4)));
}

__device__ __forceinline__ void Scale(float4& x, float factor) {
  x.x *= factor;
  x.y *= factor;
  x.z *= factor;
  x.w *= factor;
}

__device__ __forceinline__ void Accumulate(float4& sum, float weight, float4 x) {
  sum.x = fmaf(weight, x.x, sum.x);
  sum.y = fmaf(weight, x.y, sum.y);
  sum.z = fmaf(weight, x.z, sum.z);
  sum.w = fmaf(weight, x.w, sum.w);
}

// A row's (max, sum), and four columns of its unnormalised o.
struct PartialState {
  RowState row;
  float4 o;
};

__device__ __forceinline__ PartialState IdentityState() {
  return {{-Infinity(), 0.0f}, make_float4(0, 0, 0, 0)};
}

// Reduces one batch of states to a single state, all at once. Many states are reduced batch by
// batch (kReduceBatch in params.h), and the results are added one after the other. Both are exact
// where a state is the identity. few: all but the first kFewStates are the identity.
inline constexpr int kFewStates = 4;
template <int kStates>
__device__ __forceinline__ PartialState SumOfStates(const PartialState (&states)[kStates],
                                                    bool few = false) {
  constexpr int kFew = kStates < kFewStates ? kStates : kFewStates;
  PartialState sum = IdentityState();
  auto take_max = [&](const PartialState& state) {
    sum.row.max_log4 = fmaxf(sum.row.max_log4, state.row.max_log4);
  };
  auto add = [&](const PartialState& state) {
    const float weight = StateWeight(state.row.max_log4, sum.row.max_log4);
    sum.row.sum = fmaf(weight, state.row.sum, sum.row.sum);
    Accumulate(sum.o, weight, state.o);
  };
#pragma unroll
  for (int i = 0; i < kFew; ++i) take_max(states[i]);
  if (!few) {
#pragma unroll
    for (int i = kFew; i < kStates; ++i) take_max(states[i]);
  }
#pragma unroll
  for (int i = 0; i < kFew; ++i) add(states[i]);
  if (!few) {
#pragma unroll
    for (int i = kFew; i < kStates; ++i) add(states[i]);
  }
  return sum;
}

__device__ __forceinline__ void Combine(PartialState& all, const PartialState& state) {
  const float max_log4 = fmaxf(all.row.max_log4, state.row.max_log4);
  const float factor = StateWeight(all.row.max_log4, max_log4);
  const float weight = StateWeight(state.row.max_log4, max_log4);
  all.row = {max_log4, fmaf(weight, state.row.sum, all.row.sum * factor)};
  Scale(all.o, factor);
  Accumulate(all.o, weight, state.o);
}

}  // namespace jax_attn
