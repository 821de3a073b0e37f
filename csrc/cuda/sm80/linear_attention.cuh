// Chunked linear attention on every architecture from sm_80 on: mma.sync, ldmatrix, cp.async.
// Up to four launches, and four for gradients: see LinearPhase.
#pragma once

#include "cuda/common/linear_gradient_scan.cuh"
#include "cuda/common/linear_scan.cuh"
#include "cuda/sm80/linear_channel_gradients.cuh"
#include "cuda/sm80/linear_channel_terms.cuh"
#include "cuda/sm80/linear_gradients.cuh"
#include "cuda/sm80/linear_starts.cuh"
#include "cuda/sm80/linear_terms.cuh"

namespace jax_attn {

template <class Traits, class Products, int kPhase>
struct LinearPhaseOf;
template <class Traits, class Products>
struct LinearPhaseOf<Traits, Products, kLinearTerms> {
  using Body =
      typename Conditional<Traits::kDecay == kChannelDecay, LinearChannelTermsPhase<Traits>,
                           LinearTermsPhase<Traits>>::Type;
};
template <class Traits, class Products>
struct LinearPhaseOf<Traits, Products, kLinearMaps> {
  using Body = LinearMapsPhase<Traits, Products>;
};
template <class Traits, class Products>
struct LinearPhaseOf<Traits, Products, kLinearStarts> {
  using Body = LinearStartsPhase<Traits>;
};
template <class Traits, class Products>
struct LinearPhaseOf<Traits, Products, kLinearOutputs> {
  using Body = LinearOutputsPhase<Traits, Products>;
};
template <class Traits, class Products>
struct LinearPhaseOf<Traits, Products, kLinearGradientTerms>
    : LinearPhaseOf<Traits, Products, kLinearTerms> {};
template <class Traits, class Products>
struct LinearPhaseOf<Traits, Products, kLinearStates> {
  using Body = LinearStatesPhase<Traits, Products>;
};
template <class Traits, class Products>
struct LinearPhaseOf<Traits, Products, kLinearStateGradients> {
  using Body = LinearStateGradientsPhase<Traits, Products>;
};
template <class Traits, class Products>
struct LinearPhaseOf<Traits, Products, kLinearGradients> {
  using Body =
      typename Conditional<Traits::kDecay == kChannelDecay, LinearChannelGradientsPhase<Traits>,
                           LinearGradientsPhase<Traits>>::Type;
};

template <class Traits, class Products>
using LinearPhaseBody = typename LinearPhaseOf<Traits, Products, Traits::kPhase>::Body;

template <class Traits>
using LinearChunksBody = LinearPhaseBody<Traits, MmaProducts<Traits::kDtype>>;

}  // namespace jax_attn
