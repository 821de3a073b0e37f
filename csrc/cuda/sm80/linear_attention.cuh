// Chunked linear attention on every architecture from sm_80 on: mma.sync, ldmatrix, cp.async.
// Three launches, see linear_terms.cuh and common/linear_scan.cuh.
#pragma once

#include "cuda/common/linear_scan.cuh"
#include "cuda/sm80/linear_terms.cuh"

namespace jax_attn {

template <class Traits, class Products>
using LinearPhaseBody = typename Conditional<
    Traits::kPhase == kLinearTerms, LinearTermsPhase<Traits>,
    typename Conditional<Traits::kPhase == kLinearMaps, LinearMapsPhase<Traits, Products>,
                         LinearOutputsPhase<Traits, Products>>::Type>::Type;

template <class Traits>
using LinearChunksBody = LinearPhaseBody<Traits, MmaProducts<Traits::kDtype>>;

}  // namespace jax_attn
