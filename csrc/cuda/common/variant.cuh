// What may happen to a logit between q . k and the masks. A variant is a struct of this shape; its
// text may come from a user. Identity hooks cost nothing: the kernel asks the constants first.
#pragma once

#include "cuda/common/math.cuh"

namespace jax_attn {

// No transform: the kernel folds sm_scale into the exponent of the softmax.
struct IdentityVariant {
  static constexpr bool kTransformsLogits = false;
  __device__ explicit IdentityVariant(const AttentionParams&) {}
  __device__ float Logit(float qk) const { return qk; }
};

// cap * tanh(sm_scale * qk / cap), in log2 units. tanh(x) = 1 - 2 / (exp(2x) + 1) is within 2e-7 of
// exact, that is 1e-5 of a logit for caps up to 50; tanh.approx would be off by 0.02.
struct SoftCapVariant {
  static constexpr bool kTransformsLogits = true;
  __device__ explicit SoftCapVariant(const AttentionParams& p)
      : slope(2.0f * kLog2E * p.sm_scale / p.logits_soft_cap),
        cap_log2(p.logits_soft_cap * kLog2E) {}
  __device__ float Logit(float qk) const {
    return cap_log2 * fmaf(-2.0f, Reciprocal(Exp2(slope * qk) + 1.0f), 1.0f);
  }
  float slope, cap_log2;
};

template <bool kHasSoftCap>
struct BuiltInVariant {
  using Type = IdentityVariant;
};
template <>
struct BuiltInVariant<true> {
  using Type = SoftCapVariant;
};

}  // namespace jax_attn
