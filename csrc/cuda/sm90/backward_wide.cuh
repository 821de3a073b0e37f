// The consumers of the backward pass on sm_90a for head dims beyond 128, up to 256 (backward.cuh).
//
// A block has 64 keys: dk and dv of more would not fit registers. Both consumers have all of them,
// and divide the products instead:
//   consumer 0:  S^T = k q^T       P^T, and to consumer 1 the factors of dP - d    dv += P^T d_o
//   consumer 1:  dP^T = v d_o^T    dS^T, and through shared memory for dq          dk += dS^T q
// Each computes about half of the columns of dq = dS k. Consumer 1 has dS^T first, and computes its
// half in the same step; consumer 0 in its next step, so that it need not wait. While one waits or
// computes exponentials, the other has products.
//
// Factors are f32: rounded to 16 bits they would add as much error to dS as its own rounding.
#pragma once

#include "cuda/sm90/backward_consumer.cuh"

namespace jax_attn {

template <class Traits>
class HopperBackwardWideConsumer : HopperBackwardConsumerBase<Traits> {
 public:
  using Base = HopperBackwardConsumerBase<Traits>;
  using Base::Base, Base::kKeys, Base::kRows;
  using typename Base::E;
  using typename Base::Fragments;
  using typename Base::K;
  using typename Base::O;
  using typename Base::Q;
  using typename Base::S;
  using typename Base::Shape;
  using typename Base::SumsOfK;
  using typename Base::SumsOfV;
  using typename Base::Tile;
  using typename Base::Unit;
  using typename Base::V;

  __device__ __forceinline__ void Run() {
    if (consumer_ == 0) {
      this->RunUnits([&](const Unit& unit) { SumValues(unit); });
    } else {
      this->RunUnits([&](const Unit& unit) { SumKeys(unit); });
    }
  }

 private:
  using Base::Arrive;
  using Base::p_, Base::f_, Base::shared_, Base::consumer_, Base::thread_;

  // --- consumer 0 ---

  __device__ __forceinline__ void SumValues(const Unit& unit) {
    SumsOfV d_v = {};
    const Unit* last = this->RunSteps(
        unit,
        [&](const Unit& part, int tile, bool is_first) { StepOfValues(part, tile, is_first, d_v); },
        [&] { AddSlopesBefore(); });
    if (!this->template Write<Shape::kVoDim>(p_.d_v, *last, 1.0f, d_v)) {
      MaxRelaxed(p_.needs_portable, 1);
    }
  }

  __device__ __forceinline__ void StepOfValues(const Unit& unit, int tile, bool is_first,
                                               SumsOfV& d_v) {
    const int slot = this->slot_.slot;
    const u32 q_at = Uniform(SharedAddress(shared_.q[slot]));
    const bool boxed = this->FitsTma(tile * kRows, kRows, unit.source.qo_len);
    WaitBarrier(SharedAddress(this->Barriers().full + slot), this->slot_.parity);
    if (!boxed) FenceSharedForWgmma();
    Tile s = {};
    WgmmaFence();
    Base::template Dot<Shape::kQkDim, K, Q>(SharedAddress(shared_.k), 0, q_at, s);
    WgmmaCommit();
    const bool seen_by_all = this->IsSeenByAll(unit, tile);
    WgmmaWait<0>();
    PinRegisters(s);

    Fragments p;
    if (seen_by_all) {
      this->template Weigh<false>(unit, tile, slot, s, p);
    } else {
      this->template Weigh<true>(unit, tile, slot, s, p);
    }
    if constexpr (!Traits::kHasSoftCap) Pack(s, p);
    Arrive(this->Barriers().empty + slot);
    HandOverWeights(s);

    const int o_slot = this->o_slot_.slot;
    WaitBarrier(SharedAddress(this->WideBarriers().full_o + o_slot), this->o_slot_.parity);
    if (!boxed) FenceSharedForWgmma();
    PinRegisters(p);
    PinRegisters(d_v);
    WgmmaFence();
    Base::template Add<O>(p, Uniform(SharedAddress(shared_.d_o[o_slot])), d_v);
    WgmmaCommit();

    // dq of the step before. Meaningless in a unit's first step.
    const RingCursor<2> before = Base::Before(this->slot_);
    float d_q[8 * Shape::kBlocks0][4] = {};
    WaitForSlopes(before);
    WgmmaFence();
    DotSlopes(before.slot, 0, d_q);
    WgmmaCommit();
    WgmmaWait<1>();
    PinRegisters(d_v);
    Arrive(this->WideBarriers().empty_o + o_slot);
    WgmmaWait<0>();
    PinRegisters(d_q);
    if (!is_first) HandOver(before, d_q);
    this->slot_.Advance();
    this->o_slot_.Advance();
  }

  // dq of a unit's last step.
  __device__ __forceinline__ void AddSlopesBefore() {
    const RingCursor<2> before = Base::Before(this->slot_);
    float d_q[8 * Shape::kBlocks0][4] = {};
    WaitForSlopes(before);
    WgmmaFence();
    DotSlopes(before.slot, 0, d_q);
    WgmmaCommit();
    WgmmaWait<0>();
    PinRegisters(d_q);
    HandOver(before, d_q);
  }

  __device__ __forceinline__ static void Pack(const Tile& s, Fragments& p) {
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        p[j / 2][j % 2 * 2 + h] = E::Pack(s[j][2 * h], s[j][2 * h + 1]);
      }
    }
  }

  __device__ __forceinline__ void HandOverWeights(const Tile& s) {
    WaitBarrier(SharedAddress(&this->WideBarriers().empty_weights), weights_.parity ^ 1);
    float* to = shared_.wide.weights + Opaque(thread_) * 4;
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      *reinterpret_cast<float4*>(to + j * 512) = make_float4(s[j][0], s[j][1], s[j][2], s[j][3]);
    }
    Arrive(&this->WideBarriers().full_weights);
    weights_.Advance();
  }

  // --- consumer 1 ---

  __device__ __forceinline__ void SumKeys(const Unit& unit) {
    SumsOfK d_k = {};
    const Unit* last = this->RunSteps(
        unit, [&](const Unit& part, int tile, bool) { StepOfKeys(part, tile, d_k); }, [] {});
    if (!this->template Write<Shape::kQkDim>(p_.d_k, *last, f_.sm_scale, d_k)) {
      MaxRelaxed(p_.needs_portable, 1);
    }
  }

  __device__ __forceinline__ void StepOfKeys(const Unit& unit, int tile, SumsOfK& d_k) {
    const int slot = this->slot_.slot, o_slot = this->o_slot_.slot;
    const bool boxed = this->FitsTma(tile * kRows, kRows, unit.source.qo_len);
    WaitBarrier(SharedAddress(this->WideBarriers().full_o + o_slot), this->o_slot_.parity);
    if (!boxed) FenceSharedForWgmma();
    Tile d_p = {};
    WgmmaFence();
    Base::template Dot<Shape::kVoDim, V, O>(SharedAddress(shared_.v), 0,
                                            Uniform(SharedAddress(shared_.d_o[o_slot])), d_p);
    WgmmaCommit();
    WaitBarrier(SharedAddress(&this->WideBarriers().full_weights), weights_.parity);
    WgmmaWait<0>();
    PinRegisters(d_p);

    Fragments d_s;
    MakeSlopes(o_slot, d_p, d_s);
    Arrive(this->WideBarriers().empty_o + o_slot);
    Arrive(&this->WideBarriers().empty_weights);
    weights_.Advance();
    // The buffer is free: consumer 0 handed this step's weights over behind its dq of two steps
    // ago.
    this->StoreSlopes(Uniform(SharedAddress(shared_.d_s[slot])), d_s);
    FenceSharedForWgmma();
    Arrive(this->Barriers().full_slopes + slot);

    WaitBarrier(SharedAddress(this->Barriers().full + slot), this->slot_.parity);
    if (!boxed) FenceSharedForWgmma();
    PinRegisters(d_s);
    PinRegisters(d_k);
    WgmmaFence();
    Base::template Add<Q>(d_s, Uniform(SharedAddress(shared_.q[slot])), d_k);
    WgmmaCommit();
    if constexpr (Shape::kBlocks1 > 0) {
      float d_q[8 * Shape::kBlocks1][4] = {};
      WaitForSlopes(this->slot_);
      WgmmaFence();
      DotSlopes(slot, Shape::kBlocks0, d_q);
      WgmmaCommit();
      WgmmaWait<1>();
      PinRegisters(d_k);
      Arrive(this->Barriers().empty + slot);
      WgmmaWait<0>();
      PinRegisters(d_q);
      HandOver(this->slot_, d_q);
    } else {
      WgmmaWait<0>();
      PinRegisters(d_k);
      Arrive(this->Barriers().empty + slot);
    }
    this->slot_.Advance();
    this->o_slot_.Advance();
  }

  __device__ __forceinline__ void MakeSlopes(int o_slot, const Tile& d_p, Fragments& d_s) const {
    const float* d = shared_.d[o_slot] + 2 * (this->Lane() % 4);
    const float* weights = shared_.wide.weights + Opaque(thread_) * 4;
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      const float2 x = *reinterpret_cast<const float2*>(d + 8 * j);
      const float4 factor = *reinterpret_cast<const float4*>(weights + j * 512);
      d_s[j / 2][j % 2 * 2] = E::Pack(factor.x * (d_p[j][0] - x.x), factor.y * (d_p[j][1] - x.y));
      d_s[j / 2][j % 2 * 2 + 1] =
          E::Pack(factor.z * (d_p[j][2] - x.x), factor.w * (d_p[j][3] - x.y));
    }
  }

  // --- both ---

  __device__ __forceinline__ void WaitForSlopes(const RingCursor<2>& at) const {
    WaitBarrier(SharedAddress(this->Barriers().full_slopes + at.slot), at.parity);
  }

  // Blocks of dq from first_block on.
  template <int kTiles>
  __device__ __forceinline__ void DotSlopes(int slot, int first_block,
                                            float (&d_q)[kTiles][4]) const {
    const u64 a = S::TransposedDescriptor(Uniform(SharedAddress(shared_.d_s[slot])), 0);
    const u64 b = K::Right(K::TransposedDescriptor(SharedAddress(shared_.k), 0), first_block);
#pragma unroll
    for (int kk = 0; kk < kKeys / 16; ++kk) {
      Wgmma<8 * kTiles, Traits::kDtype>::TransposedSharedATransposedB(d_q, S::AlongRows(a, kk),
                                                                      K::AlongRows(b, kk), kk > 0);
    }
  }

  // Hands blocks of dq over to a writer, one after the other through this consumer's buffer.
  template <int kTiles>
  __device__ __forceinline__ void HandOver(const RingCursor<2>& at, const float (&d_q)[kTiles][4]) {
#pragma unroll
    for (int block = 0; block < kTiles / 8; ++block) {
      WaitBarrier(SharedAddress(this->Barriers().empty_sums + consumer_), sums_.parity ^ 1);
      float* to = shared_.sums[consumer_] + Opaque(thread_) * 4;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float (&x)[4] = d_q[8 * block + j];
        *reinterpret_cast<float4*>(to + j * 512) = make_float4(x[0], x[1], x[2], x[3]);
      }
      FenceSharedForWgmma();
      Arrive(this->Barriers().full_sums + 2 * at.slot + consumer_);
      sums_.Advance();
    }
  }

  RingCursor<1> weights_, sums_;
};

}  // namespace jax_attn
