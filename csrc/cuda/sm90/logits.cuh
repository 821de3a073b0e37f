// Logits as the loops of sm90 leave them to their softmax, whatever the rows of a wgmma are.
#pragma once

#include "cuda/common/variant.cuh"

namespace jax_attn {

// From q . k to logits.
template <class Traits>
class Logits {
 public:
  // Whether Transform does nothing, and q . k are compared as they are. A scale that is not
  // positive would turn the maximum around, so it is applied at once.
  static constexpr bool kScalesLater =
      !BuiltInVariant<Traits::kHasSoftCap>::Type::kTransformsLogits && Traits::kPositiveScale;

  __device__ __forceinline__ explicit Logits(const AttentionParams& p) : p_(p) {}

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
          s[j][c] = Variant::kTransformsLogits ? variant.Logit(s[j][c])
                                               : s[j][c] * (p_.sm_scale * kLog2E);
        }
      }
    }
  }
  __device__ __forceinline__ float scale() const {
    return kScalesLater ? p_.sm_scale * kLog2E : 1.0f;
  }

 private:
  using Variant = typename BuiltInVariant<Traits::kHasSoftCap>::Type;
  const AttentionParams& p_;
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
