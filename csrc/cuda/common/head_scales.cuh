// Scales of heads of quantized q, k and v: where they enter logits and results.
#pragma once

#include "cuda/common/math.cuh"

namespace jax_attn {

// q_scale or k_scale of a head. NaN where it is not positive: the maximum of the products would not
// be that of the logits.
__device__ __forceinline__ float LogitScaleOfHead(const float* scales, int head) {
  if (scales == nullptr) return 1.0f;
  const float scale = scales[head];
  return scale > 0.0f ? scale : __uint_as_float(0x7fffffff);
}

// A kv head of the plan among those that k and v have in memory: one of mla's blocks of heads.
template <class Traits>
__device__ __forceinline__ int StoredHead(int kv_head) {
  return Traits::kIsMla ? 0 : kv_head;
}

// What a final row of o is multiplied by.
template <class Traits>
__device__ __forceinline__ float WithValueScale(const AttentionParams& p, int kv_head,
                                                float o_scale) {
  if constexpr (FormatOf(Traits::kKvFormat).has_head_scale) {
    if (p.v_scale != nullptr) return o_scale * p.v_scale[StoredHead<Traits>(kv_head)];
  }
  return o_scale;
}

}  // namespace jax_attn
