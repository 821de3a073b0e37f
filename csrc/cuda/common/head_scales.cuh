// Scales of heads of quantized q, k and v, as they enter logits and results.
#pragma once

#include "cuda/common/math.cuh"

namespace jax_attn {

// q_scale or k_scale of a head. NaN if it is not positive: maxima of products would not be maxima
// of logits.
__device__ __forceinline__ float LogitScaleOfHead(const float* scales, int head) {
  if (scales == nullptr) return 1.0f;
  const float scale = scales[head];
  return scale > 0.0f ? scale : __uint_as_float(0x7fffffff);
}

// The head of k and v in memory that a kv head of the plan reads. With MLA all blocks of heads read
// head 0.
template <class Traits>
__device__ __forceinline__ int StoredHead(int kv_head) {
  return Traits::kIsMla ? 0 : kv_head;
}

// The factor of a final row of o, with v_scale.
template <class Traits>
__device__ __forceinline__ float WithValueScale(const AttentionParams& p, int kv_head,
                                                float o_scale) {
  if constexpr (FormatOf(Traits::kKvFormat).has_head_scale) {
    if (p.v_scale != nullptr) return o_scale * p.v_scale[StoredHead<Traits>(kv_head)];
  }
  return o_scale;
}

}  // namespace jax_attn
