// Attention states: how a row's (max, sum, o) becomes a result, and how states of one row become
// one. Everything is in base 2 here; lse leaves in natural log.
#pragma once

#include "cuda/common/math.cuh"

namespace jax_attn {

// A row's result: o = o_scale * (o that is not normalised).
struct RowResult {
  float o_scale;
  float lse_log2;
};

// Direct items and merges both end in it. The sink is one more logit without a value; -inf: none. A
// row that saw no key is (0, -inf) and gets no sink. NaN passes through.
__device__ __forceinline__ RowResult FinishRow(RowState state, float sink_log2) {
  if (state.sum == 0.0f) return {0.0f, -Infinity()};
  if (sink_log2 == -Infinity()) {
    return {Reciprocal(state.sum), state.max_log2 + Log2(state.sum)};
  }
  const float max_log2 = fmaxf(state.max_log2, sink_log2);
  const float own = Exp2(state.max_log2 - max_log2);
  const float sum = fmaf(own, state.sum, Exp2(sink_log2 - max_log2));
  return {own * Reciprocal(sum), max_log2 + Log2(sum)};
}

__device__ __forceinline__ float SinkLog2(const AttentionParams& p, int qo_head) {
  return p.sinks != nullptr ? p.sinks[qo_head] * kLog2E : -Infinity();
}

// Stores what an item knows of a row besides o, and returns what o is to be multiplied by: a final
// row (at: its index in lse) gets its result, another one (at: its row of the workspace) keeps its
// state as it is.
__device__ __forceinline__ float WriteState(const AttentionParams& p, bool final, i64 at,
                                            int qo_head, bool writes, RowState state) {
  if (!final) {
    if (writes) p.partial_states[at] = state;
    return 1.0f;
  }
  const RowResult result = FinishRow(state, SinkLog2(p, qo_head));
  if (writes) p.lse[at] = result.lse_log2 * kLn2;
  return result.o_scale;
}

// The weight of a state in a sum of states with reference `max_log2`.
__device__ __forceinline__ float StateWeight(float state_max_log2, float max_log2) {
  return Exp2(state_max_log2 - FiniteMax(max_log2));
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

}  // namespace jax_attn
