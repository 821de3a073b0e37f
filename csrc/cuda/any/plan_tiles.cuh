// The device planner's input: a batch, checked, and its query tiles; how a tile is cut and what a
// chunk of it costs.
#pragma once

#include "cuda/any/plan_cta.cuh"
#include "cuda/any/prefix.cuh"
#include "cuda/common/math.cuh"
#include "plan/rules.h"

namespace jax_attn {

// The device planner is one class in layers, a file each; see plan.cuh.
// kGeneral: prefixes may be told, PlanParams::levels, and the schedule may be kAuto.
template <class Traits, bool kGeneral>
class PlanTiles : public PlanCta<Traits::kNumThreads, kGeneral> {
  using Base = PlanCta<Traits::kNumThreads, kGeneral>;

 public:
  using Cta = Base;

  __device__ PlanTiles(const PlanParams& p, unsigned char* arena, int arena_bytes,
                       typename Cta::WarpSums& warp_sums)
      : Cta(arena, arena_bytes, p.scratch, warp_sums), p_(p), rules_(p.rules), in_(p.inputs) {}

 protected:
  using Base::FirstFault, Base::kNumThreads, Base::Prefix, Base::Sum, Base::thread_;

  __device__ PlanFault Check() {
    return FirstFault(
        static_cast<i32>(in_.batch_size), [&](i32 r) { return CheckRequest(rules_, in_, r); },
        CheckBatch(rules_, in_));
  }

  __device__ PlanFault CheckLevels() {
    const PrefixLevels& levels = p_.levels;
    const i32 num_borders = levels.num_prefixes + 1;
    const PlanFault fault = FirstFault(levels.num_levels * num_borders, [&](i32 i) {
      return CheckBorder(in_, levels, i / num_borders, i % num_borders);
    });
    if (fault.code != kNoFault || levels.num_levels == 0) return fault;
    return FirstFault(static_cast<i32>(in_.batch_size),
                      [&](i32 r) { return CheckPrefixLens(in_, levels, r); });
  }

  __device__ void CopyLengths() {
#pragma unroll 1
    for (i32 r = thread_; r <= in_.batch_size; r += kNumThreads) {
      p_.qo_indptr[r] = in_.qo_indptr[r];
      p_.kv_indptr[r] = in_.kv_indptr[r];
      if (r < in_.batch_size) p_.kv_lens[r] = in_.kv_lens[r];
    }
  }

  __device__ void MakeTiles() {
    const i32 batch_size = static_cast<i32>(in_.batch_size);
    i32* first_tile = this->template Take<i32>(batch_size + 1);  // of each request
    num_tiles_ = static_cast<i32>(Prefix(batch_size, first_tile, [&](i32 r) {
      return static_cast<i64>(NumTilesOf(rules_, in_.qo_indptr[r + 1] - in_.qo_indptr[r]));
    }));
    QueryTile* tiles = this->template Take<QueryTile>(num_tiles_);
    span_cost_ = Sum(num_tiles_, [&](i32 i) {
      const i32 request = LastAtMost(first_tile, batch_size, i);
      tiles[i] = MakeTile(rules_, LengthsOf(in_, request), request, i - first_tile[request]);
      return SpanCost(tiles[i]);
    });
    tiles_ = tiles;
    first_tile_ = first_tile;
    bool other_height = false;
#pragma unroll 1
    for (i32 i = thread_; i < num_tiles_; i += kNumThreads) {
      other_height |= tiles[i].tile != tiles[0].tile;
    }
    several_heights_ = __syncthreads_or(other_height);
  }

  // With shared prefixes longest_cost is the number of a SharedTrial.
  __device__ TileCut CutOf(i32 longest_cost, i32 i) const {
    if constexpr (kGeneral) {
      if (sharing_ != nullptr) {
        return SharedCut(longest_cost, i);
      }
    }
    return CutTile(rules_, longest_cost, tiles_[i]);
  }

  __device__ __noinline__ TileCut SharedCut(i32 trial, i32 i) const {
    const i64 span_cost =
        sharing_[i].shared() ? shared_tiling_.shared_span_cost : shared_tiling_.span_cost;
    return CutSharedTile(rules_, tiles_[i], sharing_[i], span_cost, kSharedTrials[trial]);
  }

  __device__ i64 CostOf(i32 i, i64 kv_tokens, i32 num_splits) const {
    if constexpr (kGeneral) {
      if (sharing_ != nullptr) {
        return ChunkCost(rules_, tiles_[i], sharing_[i], num_splits, kv_tokens);
      }
    }
    return ItemCost(rules_, tiles_[i], kv_tokens, num_splits > 1);
  }

  // What the tile is besides; of a batch without sharing: nothing.
  __device__ TileSharing SharingOf(i32 i) const {
    if constexpr (kGeneral) {
      if (sharing_ != nullptr) return sharing_[i];
    }
    return {0, -1, 0, 0};
  }

  __device__ void UseSharedTiles() {
    tiles_ = shared_tiling_.tiles;
    num_tiles_ = shared_tiling_.num_tiles;
    sharing_ = shared_tiling_.sharing;
  }

  const PlanParams& p_;
  const PlanRules& rules_;
  const PlanInputs& in_;

  i32 num_tiles_ = 0;
  const QueryTile* tiles_ = nullptr;  // [num_tiles]
  i64 span_cost_ = 0;
  bool several_heights_ = false;
  const i32* first_tile_ = nullptr;  // [batch_size + 1] of each request

  // With levels only. sharing: [num_tiles] of the tiles in use; null: a flat schedule.
  const TileSharing* sharing_ = nullptr;
  SharedTiling shared_tiling_ = {};
};

}  // namespace jax_attn
