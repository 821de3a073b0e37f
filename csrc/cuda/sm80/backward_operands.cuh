// Gradients of a variant's operands. The gradient of an element is the sum of dS times the
// derivative of the logit by it, over all logits that read it, in all units. Terms are rounded to
// integers, in a unit that follows from the largest of them all, which a launch of its own finds
// first. So no order of additions changes the bits.
#pragma once

#include "cuda/sm80/backward_pass.cuh"

namespace jax_attn {

// Three launches: count and bound the terms, sum them as integers, convert to f32.

// The power of two that makes integers of an operand's terms, so that the sum of all of them fits
// 61 bits. num_loads: loads of the operand in a logit.
__device__ __forceinline__ int OperandScale(const BackwardCudaParams& p, int operand,
                                            int num_loads) {
  const int bound = LoadConstant(p.operand_bounds + operand);
  const auto* num_terms = reinterpret_cast<const i32*>(p.num_terms);
  const int high = LoadConstant(num_terms + 1), low = LoadConstant(num_terms);
  const int term_bits = (high != 0 ? 64 - __clz(high) : 32 - __clz(low)) + 32 - __clz(num_loads);
  return Clamp(60 - term_bits - ((bound >> 23) - 126), -126, 126);
}
__device__ __forceinline__ float PowerOfTwo(int exponent) {
  return __int_as_float((exponent + 127) << 23);
}
// Marks a sum with a term that is not finite.
inline constexpr i64 kNotFiniteSum = i64{1} << 62;

// The pass over rows of q for the operands that are differentiated.
template <class Traits>
class OperandsPass : public BackwardPass<Traits, false, true> {
  using Base = BackwardPass<Traits, false, true>;
  using Base::f_, Base::p_, Base::shared_, Base::state_;
  using Base::FirstRow, Base::Lane, Base::Thread;
  using Base::kCountsNot, Base::kIsNotFinite, Base::kMTiles, Base::kSTiles, Base::kStep,
      Base::kWarpRows;
  using typename Base::L1, typename Base::L2, typename Base::Stream, typename Base::Tile,
      typename Base::Variant;

 public:
  using Base::Base, Base::kOwned;
  using typename Base::Shared;

  __device__ __forceinline__ void Run() {
    Runs runs;
#pragma unroll
    for (int e = 0; e < Variant::kNumElements; ++e) {
      runs.offsets[e] = -1;
      runs.sums[e] = runs.largest[e] = 0.0f;
    }
    this->careful_ = true;
    this->LoadOwned();
    this->RecomputeOwned();
    this->PutFacts(state_.unit.request, 0);
    this->FindSpans(state_.own, 0, [](int) { return true; });
    this->RunSteps(state_.own, false,
                   [&](int slot, int begin, bool)
                       __attribute__((always_inline)) { AddTerms(slot, begin, runs); });
#pragma unroll
    for (int e = 0; e < Variant::kNumElements; ++e) EndRun(e, runs);
    if (p_.phase != kBackwardBounds) return;
#pragma unroll
    for (int e = 0; e < Variant::kNumElements; ++e) {
      const u32 largest = WarpMax(__float_as_uint(runs.largest[e]));
      if (Lane() == 0) MaxRelaxed(p_.operand_bounds + Variant::OperandOf(e), largest);
    }
    if (Thread() == 0) AddRelaxed(p_.num_terms, static_cast<i64>(kOwned) * state_.own.kv_len);
  }

 private:
  // Consecutive terms of one element. They are added up as f32 before they become one integer. A
  // lane goes through keys in order.
  struct Runs {
    i64 offsets[Max(Variant::kNumElements, 1)];  // -1: none
    float sums[Max(Variant::kNumElements, 1)];
    float largest[Max(Variant::kNumElements, 1)];  // largest finite term, for kBackwardBounds
  };

  __device__ __forceinline__ void EndRun(int e, Runs& runs) const {
    const float sum = runs.sums[e];
    const bool is_finite = sum - sum == 0.0f;
    if (runs.offsets[e] < 0) return;
    if (p_.phase == kBackwardBounds) {
      if (is_finite) runs.largest[e] = fmaxf(runs.largest[e], fabsf(sum));
      return;
    }
    const int operand = Variant::OperandOf(e);
    i64* const to = p_.operand_sums[operand] + runs.offsets[e];
    if (!is_finite) {
      MaxRelaxed(to, kNotFiniteSum);
    } else if (sum != 0.0f) {
      const int scale = OperandScale(p_, operand, Variant::kNumElements);
      AddRelaxed(to, __float2ll_rn(sum * PowerOfTwo(scale)));
    }
  }

  // Adds the terms of a step. Each lane has a row, or half of the keys of one.
  __device__ __forceinline__ void AddTerms(int slot, int begin, Runs& runs) {
    if (this->IsSecondOfRows()) return;  // each term counts once
    Stream& stream = shared_.stream[slot];
    Tile products;
    this->template Dot<L1>(shared_.own1, stream.rows1, products);
    PutProducts(products, shared_.s);
    this->template Dot<L2>(shared_.own2, stream.rows2, products);
    PutProducts(products, shared_.d_p);
    __syncwarp();
    constexpr int kKeys = kStep * kWarpRows / kWarpSize;  // for each lane
    const int row = FirstRow() + Lane() % kWarpRows, first = Lane() / kWarpRows * kKeys;
    const int low = Max(shared_.spans[row][0] - begin, first);
    const int high = Min(shared_.spans[row][1] - begin, first + kKeys);
    const int kind = shared_.own_kind[row];
    const float lse_log2 = shared_.lse_log2[row], d = shared_.d[row];
    const auto of_row =
        Variant::OfRow(f_, this->FactsOfRow(state_.unit.block * kOwned + row), begin);
#pragma unroll 1
    for (int i = kind == kCountsNot ? high : low; i < high; ++i) {
      const BackwardKeyFacts<Traits> at = this->FactsOfKey(begin, i, (begin + i) / 8 * 8);
      const auto of_key = Variant::OfKey(f_, at);
      const u32 step_class = this->ClassOf(slot, row, 0, i);
      if (step_class == kStepHidden) continue;
      if constexpr (Variant::kHasMask) {
        if (step_class == kStepMasked && !Variant::IsVisible(f_, of_row, of_key, at)) continue;
      }
      float score = shared_.s[row][i], d_logit = shared_.d_p[row][i];
      if constexpr (Traits::kHasSoftCap) {
        score = this->Tanh(score) * f_.logits_soft_cap;
      } else {
        score *= f_.sm_scale;
      }
      if constexpr (Variant::kNormalizes) {
        float slope;
        const float logit = Variant::Differentiate(f_, of_row, of_key, at, score, slope);
        d_logit = this->WeightOf(logit, kLog2E, lse_log2) * (d_logit - d);
      }
      if (kind == kIsNotFinite) d_logit = __uint_as_float(kFullWarp);
      i64 offsets[Variant::kNumElements];
      float partials[Variant::kNumElements];
      Variant::Partials(f_, of_row, of_key, at, score, offsets, partials);
#pragma unroll
      for (int e = 0; e < Variant::kNumElements; ++e) {
        if (offsets[e] != runs.offsets[e]) {
          EndRun(e, runs);
          runs.offsets[e] = offsets[e];
          runs.sums[e] = 0.0f;
        }
        runs.sums[e] = fmaf(d_logit, partials[e], runs.sums[e]);
      }
    }
    __syncwarp();  // products are about to be overwritten
  }

  __device__ __forceinline__ void PutProducts(const Tile& c, float (&to)[kOwned][kStep + 1]) const {
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float* row = to[FirstRow() + mt * 16 + h * 8 + Lane() / 4] + 2 * (Lane() % 4);
#pragma unroll
        for (int j = 0; j < kSTiles; ++j) {
          row[8 * j] = c[mt][j][2 * h];
          row[8 * j + 1] = c[mt][j][2 * h + 1];
        }
      }
    }
  }
};

// Converts sums to f32; without a plan to NaN.
template <class Traits>
__device__ __forceinline__ void LeaveOperands(const BackwardCudaParams& p, bool is_plan, int thread,
                                              int num_threads) {
  using Variant = typename Traits::Variant;
#pragma unroll 1
  for (int operand = 0; operand < kMaxVariantOperands; ++operand) {
    i64* const sums = p.operand_sums[operand];
    if (sums == nullptr) continue;
    const float unit = PowerOfTwo(-OperandScale(p, operand, Variant::kNumElements));
    for (i64 i = thread; i < p.num_operand_elements[operand]; i += num_threads) {
      const bool is_finite = is_plan && sums[i] < kNotFiniteSum / 2;
      const float x = static_cast<float>(sums[i]) * unit;
      sums[i] = is_finite ? __float_as_uint(x) : kFullWarp;
    }
  }
}

}  // namespace jax_attn
