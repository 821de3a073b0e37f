// References of the exponents of a row, where loops of sm90 look for maxima.
#pragma once

namespace jax_attn {

// How far a logit may exceed the reference of its row's exponents where maxima are looked for:
// until then the reference stays, sums are far from overflow, and nearly every step is spared the
// rescaling of o (FlashAttention-4's observation). Each row decides for itself, so its bits do not
// depend on its neighbours; for rows that keep their reference the factor is exactly 1.
inline constexpr float kReferenceSlack = 8.0f;

// The reference of a row that has not seen any logit: below all of them, and finite, so that -inf
// is still below.
inline constexpr float kNoReference = -3.402823466e38f;

}  // namespace jax_attn
