// Logits as the loops of sm90 leave them to their softmax, whatever the rows of a wgmma are.
#pragma once

#include "cuda/common/e4m3.cuh"
#include "cuda/common/variant.cuh"
#include "cuda/common/work.cuh"

namespace jax_attn {

// What the keys of an item are multiplied by: of e4m3, a scale of their head.
template <class Traits>
__device__ __forceinline__ float KeyScale(const AttentionParams& p, int index) {
  if constexpr (Traits::kKvIsE4m3)
    return LogitScaleOfHead(p.k_scale, ItemRecord(p, index).kv_head());
  return 1.0f;
}

// From q . k to logits.
template <class Traits>
class Logits {
 public:
  // Whether Transform does nothing, and q . k are compared as they are. A scale that is not
  // positive would turn the maximum around, so it is applied at once.
  static constexpr bool kScalesLater =
      !BuiltInVariant<Traits::kHasSoftCap>::Type::kTransformsLogits && Traits::kPositiveScale;

  // k_scale: see KeyScale.
  __device__ __forceinline__ explicit Logits(const AttentionParams& p, float k_scale = 1.0f)
      : p_(p), k_scale_(k_scale) {}

  // After it, s * scale() is the logit in log2 units; of the first num_tiles.
  template <int kTiles>
  __device__ __forceinline__ void Transform(float (&s)[kTiles][4], int num_tiles = kTiles) const {
    if constexpr (!kScalesLater) {
      const Variant variant(p_);
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        if (j >= num_tiles) break;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          s[j][c] = Variant::kTransformsLogits ? variant.Logit(s[j][c] * k_scale_)
                                               : s[j][c] * (p_.sm_scale * kLog2E * k_scale_);
        }
      }
    }
  }
  __device__ __forceinline__ float scale() const {
    return kScalesLater ? p_.sm_scale * kLog2E * k_scale_ : 1.0f;
  }

 private:
  using Variant = typename BuiltInVariant<Traits::kHasSoftCap>::Type;
  const AttentionParams& p_;
  const float k_scale_;
};

// How far a logit may exceed the reference of its row's exponents where maxima are looked for:
// until then the reference stays, sums are far from overflow, and nearly every step is spared the
// rescaling of o (FlashAttention-4's observation). Each row decides for itself, so its bits do not
// depend on its neighbours; for rows that keep their reference the factor is exactly 1.
inline constexpr float kReferenceSlack = 8.0f;

// The reference of a row that has not seen any logit: below all of them, and finite, so that -inf
// is still below.
inline constexpr float kNoReference = -3.402823466e38f;

// Whether rows of an item may see different tokens.
template <class Traits>
inline constexpr bool kRowsMayDiffer = Traits::kHasWindowLeft || Traits::kHasWindowRight;

}  // namespace jax_attn
