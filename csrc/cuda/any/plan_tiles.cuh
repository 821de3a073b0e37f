// The device planner's input: a batch, checked, and its query tiles; how a tile is cut and what a
// chunk of it costs.
#pragma once

#include "cuda/any/plan_cta.cuh"
#include "cuda/any/prefix.cuh"
#include "cuda/common/math.cuh"
#include "plan/rules.h"

namespace jax_attn {

// The device planner is one class in layers, a file each; see plan.cuh.
// kGeneral: prefixes may be told, PlanParams::levels, the schedule may be kAuto, and tiles may have
// step lists.
template <class Traits, bool kGeneral>
class PlanTiles : public PlanCta<Traits::kNumThreads, kGeneral> {
  using Base = PlanCta<Traits::kNumThreads, kGeneral>;

 public:
  using Cta = Base;

  __device__ PlanTiles(const PlanParams& p, unsigned char* arena, int arena_bytes,
                       typename Cta::WarpTotals& warp_totals)
      : Cta(arena, arena_bytes, p.scratch, warp_totals), p_(p), rules_(p.rules), in_(p.inputs) {}

 protected:
  using Base::FirstFault, Base::kNumThreads, Base::MostOf, Base::Prefix, Base::Sum, Base::thread_,
      Base::Total;
  using typename Base::Totals;

  // Lengths, on their way into the plan, come from memory all at once; what is checked and used
  // after that is near.
  __device__ PlanFault Check() {
    CopyLengths();
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
      const i32 qo = in_.qo_indptr[r], kv = in_.kv_indptr[r];
      const i32 kv_len = r < in_.batch_size ? in_.kv_lens[r] : 0;
      p_.qo_indptr[r] = qo;
      p_.kv_indptr[r] = kv;
      if (r < in_.batch_size) p_.kv_lens[r] = kv_len;
    }
  }

  __device__ PlanFault MakeTiles() {
    const i32 batch_size = static_cast<i32>(in_.batch_size);
    i32* first_tile = this->template Take<i32>(batch_size + 1);  // of each request
    const i64 num_tiles = Prefix(batch_size, first_tile, [&](i32 r) {
      return static_cast<i64>(NumTilesOf(rules_, in_.qo_indptr[r + 1] - in_.qo_indptr[r]));
    });
    if (const PlanFault f = CheckTiles(rules_, num_tiles); f.code != kNoFault) return f;
    num_tiles_ = static_cast<i32>(num_tiles);
    QueryTile* tiles = this->template Take<QueryTile>(num_tiles_);
    const Totals totals = Total(num_tiles_, [&](i32 i, Totals* mine) {
      i32 request = i;  // where every request before has one tile
      if (i >= batch_size || first_tile[i] != i || first_tile[i + 1] == i) {
        request = LastAtMost(first_tile, batch_size, i);
      }
      const QueryTile t =
          MakeTile(rules_, LengthsOf(in_, request), request, i - first_tile[request]);
      tiles[i] = t;
      const i64 cost = SpanCost(t);
      mine->sum += cost;
      mine->most[0] = static_cast<u32>(Largest(mine->most[0], ClampToWord(cost)));
      mine->most[1] = static_cast<u32>(Largest(mine->most[1], t.tile));
      mine->most[2] = static_cast<u32>(Largest(mine->most[2], kMaxTiles - t.tile));
    });
    tiles_ = tiles;
    first_tile_ = first_tile;
    span_cost_ = totals.sum;
    longest_span_cost_ = totals.most[0];
    several_heights_ = num_tiles_ > 0 && totals.most[1] + totals.most[2] != kMaxTiles;
    if (!MayCostTooMuch(rules_, num_tiles_, totals.most[0])) return {};
    i64 longest = 0;
    const i64 coarse_cost = Sum(num_tiles_, [&](i32 i) {
      longest = Largest(longest, SpanCost(tiles[i]));
      return CoarseSpanCost(tiles[i]);
    });
    longest_span_cost_ = MostOf(longest);
    return CheckCost(rules_, coarse_cost);
  }

  __device__ static u32 ClampToWord(i64 x) { return static_cast<u32>(Least(x, 0xffffffffll)); }

  // With shared prefixes longest_cost is the number of a SharedTrial.
  __device__ TileCut CutOf(i64 longest_cost, i32 i) const {
    if constexpr (kGeneral) {
      if (sharing_ != nullptr) {
        return SharedCut(static_cast<i32>(longest_cost), i);
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
  QueryTile* tiles_ = nullptr;  // [num_tiles]
  i64 span_cost_ = 0;
  i64 longest_span_cost_ = 0;
  bool several_heights_ = false;
  const i32* first_tile_ = nullptr;  // [batch_size + 1] of each request

  // With levels only. sharing: [num_tiles] of the tiles in use; null: a flat schedule.
  const TileSharing* sharing_ = nullptr;
  SharedTiling shared_tiling_ = {};
};

}  // namespace jax_attn
