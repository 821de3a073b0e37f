// Chunked linear attention on every architecture from sm_80 on: mma.sync, ldmatrix, cp.async.
// Up to four launches, see LinearPhase.
#pragma once

#include "cuda/common/linear_scan.cuh"
#include "cuda/sm80/linear_starts.cuh"
#include "cuda/sm80/linear_terms.cuh"

namespace jax_attn {

template <class Traits, class Products>
using LinearPhaseBody = typename Conditional<
    Traits::kPhase == kLinearTerms, LinearTermsPhase<Traits>,
    typename Conditional<
        Traits::kPhase == kLinearMaps, LinearMapsPhase<Traits, Products>,
        typename Conditional<Traits::kPhase == kLinearStarts, LinearStartsPhase<Traits>,
                             LinearOutputsPhase<Traits, Products>>::Type>::Type>::Type;

template <class Traits>
using LinearChunksBody = LinearPhaseBody<Traits, MmaProducts<Traits::kDtype>>;

}  // namespace jax_attn
