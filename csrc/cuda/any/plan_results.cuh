// The device planner writes the chosen schedule: merge groups, partial states, queues, items.
#pragma once

#include "cuda/any/plan_choice.cuh"

namespace jax_attn {

template <class Traits, bool kGeneral>
class PlanResults : public PlanChoice<Traits, kGeneral> {
  using Base = PlanChoice<Traits, kGeneral>;

 public:
  using Base::Base;

 protected:
  using Base::by_ranges_, Base::chosen_, Base::kNumThreads, Base::kNumWarps, Base::num_chunks_,
      Base::num_tiles_, Base::NumStates, Base::p_, Base::Prefix, Base::RangeBegin, Base::RangeEnd,
      Base::rules_, Base::several_heights_, Base::shared_tiling_, Base::sharing_, Base::SharingOf,
      Base::SourceOf, Base::SplitsOf, Base::StateRows, Base::Sum, Base::thread_, Base::TileOfChunk,
      Base::tiles_;
  using typename Base::SlotSource;

  // Also numbers, for one kv head, the merge groups and partial states that come before a tile.
  __device__ PlanCounts Count() {
    const i64 heads = rules_.num_kv_heads;
    PlanCounts n = {};
    n.num_items = num_chunks_ * heads;
    if constexpr (kGeneral) {
      if (sharing_ != nullptr) return CountShared();
    }
    if (num_chunks_ == num_tiles_) return n;
    groups_before_ = this->template Take<i32>(num_tiles_ + 1);
    partials_before_ = this->template Take<i32>(num_tiles_ + 1);
    rows_before_ = this->template Take<i64>(num_tiles_ + 1);
    n.num_merge_groups = heads * Prefix(num_tiles_, groups_before_,
                                        [&](i32 i) { return static_cast<i64>(NumGroups(i)); });
    n.num_partials =
        heads * Prefix(num_tiles_, partials_before_, [&](i32 i) { return SplitsOf(chosen_, i); });
    n.num_partial_rows = heads * Prefix(num_tiles_, rows_before_, [&](i32 i) {
                           return SplitsOf(chosen_, i) * tiles_[i].qo_len * rules_.group_size;
                         });
    return n;
  }

  // Merge groups of a tile that shares nothing, for one kv head.
  __device__ i64 NumGroups(i32 i) const {
    const i32 splits = static_cast<i32>(SplitsOf(chosen_, i));
    return splits > 0 ? NumMergeGroups(rules_, tiles_[i], splits) : 0;
  }

  // Likewise with shared prefixes. Merge groups of units come before all others, their partial
  // states after all others.
  __device__ PlanCounts CountShared() {
    const i64 heads = rules_.num_kv_heads;
    const i32 num_units = shared_tiling_.num_units;
    PlanCounts n = {};
    n.num_items = num_chunks_ * heads;
    groups_before_ = this->template Take<i32>(num_tiles_ + 1);
    partials_before_ = this->template Take<i32>(num_tiles_ + 1);
    rows_before_ = this->template Take<i64>(num_tiles_ + 1);
    unit_partials_before_ = this->template Take<i32>(num_units + 1);
    const auto own_splits = [&](i32 i) {
      return SharingOf(i).partial() ? 0ll : SplitsOf(chosen_, i);
    };
    n.num_merge_groups = heads * (num_units + Prefix(num_tiles_, groups_before_, [&](i32 i) {
                                    return SharingOf(i).partial() ? 0ll : NumGroups(i);
                                  }));
    n.num_partials = heads * Prefix(num_tiles_, partials_before_, own_splits);
    n.num_partials += heads * Prefix(num_units, unit_partials_before_, [&](i32 u) {
                        i64 partials = NumStates(chosen_, shared_tiling_.unit_tiles[u]);
#pragma unroll 1
                        for (i32 level = 0; level < shared_tiling_.num_levels; ++level) {
                          const i32 i = shared_tiling_.places[level * num_units + u].tile;
                          if (i >= 0) partials += NumStates(chosen_, i);
                        }
                        return partials;
                      });
    n.num_partial_rows =
        heads * Prefix(num_tiles_, rows_before_, [&](i32 i) { return StateRows(chosen_, i); });
    num_shared_tokens_ = static_cast<i32>(Sum(num_tiles_, [&](i32 i) {
      return SharingOf(i).num_units > 1 ? static_cast<i64>(tiles_[i].qo_len) : 0ll;
    }));
    return n;
  }

  // What the slots of the chosen schedule become, whichever queues they go to.
  __device__ void TakeRecords() {
    records_ = this->template Take<uint4>(4ll * num_chunks_ * rules_.num_units);
  }
  __device__ void MakeRecords(i32 first, i32 step) {
    const i32 num_slots = num_chunks_ * rules_.num_units;
#pragma unroll 1
    for (i32 s = first; s < num_slots; s += step) {
      const SlotSource source = SourceOf(chosen_, num_chunks_, s);
      const i32 chunk = ChunkOfKey(chosen_.keys[source.key]);
      const i32 unit = source.unit;
      const i32 i = TileOfChunk(chosen_, num_chunks_, chunk);
      const QueryTile& t = tiles_[i];
      const i32 split = chunk - chosen_.chunk_base[i];
      const i32 splits = chosen_.chunk_base[i + 1] - chosen_.chunk_base[i];
      i32 begin, end;
      if (by_ranges_) {
        begin = RangeBegin(chosen_, t, i, split);
        end = RangeEnd(chosen_, t, i, split, splits);
      } else {
        const TileCut cut = chosen_.cuts[i];
        begin = cut.Begin(t, split);
        end = cut.End(t, split);
      }
      const i32 num_rows = t.qo_len * rules_.group_size;
      i32 first_row = 0, first_group = 0;
      i32 group_step = 1, num_units = 1;
      if (splits > 1) {
        first_row = static_cast<i32>(rules_.num_kv_heads * rows_before_[i]) + split * num_rows;
        group_step = NumMergeGroups(rules_, t, splits);
        first_group =
            rules_.num_kv_heads * groups_before_[i] + MergeGroupOfSplit(group_step, split);
      }
      // With shared prefixes: partial states of units, which may be of tiles that are not cut.
      bool partial = splits > 1;
      if constexpr (kGeneral) {
        const TileSharing sharing = SharingOf(i);
        if (sharing.partial()) {
          partial = true;
          first_row = static_cast<i32>(rules_.num_kv_heads * rows_before_[i]) + split * num_rows;
          first_group = sharing.shared() ? sharing.first_unit : sharing.unit;
          group_step = shared_tiling_.num_units;
          num_units = static_cast<i32>(Largest(1, sharing.num_units));
        } else {
          first_group += NumUnitGroups();
        }
      }
      const i32 num_groups = partial ? num_units : 0;
      uint4* record = records_ + s;
      record[0] = Words(t.qo_begin, t.qo_len, unit, t.tile);
      record[num_slots] = Words(begin, end, t.kv_base, t.q_pos);
      record[2 * num_slots] = partial ? Words(first_row, first_group, t.request, num_groups)
                                      : Words(-1, -1, t.request, 0);
      record[3 * num_slots] =
          partial ? Words(num_rows * splits, group_step, 0, 0) : Words(0, 0, 0, 0);
    }
  }

  __device__ void Write(const PlanCounts& counts) {
    if constexpr (kGeneral) {
      TakeRecords();
      MakeRecords(thread_, kNumThreads);
      if (sharing_ != nullptr) WriteUnits();
    }
    if (counts.num_merge_groups > 0) WriteMergeGroups();
    i32* chunks_before =
        this->template Take<i32>(rules_.num_queues + 1);  // those of the queues before
    Prefix(rules_.num_queues, chunks_before,
           [&](i32 q) { return static_cast<i64>(chosen_.filled[q]); });
#pragma unroll 1
    for (i32 cta = thread_; cta <= rules_.num_ctas; cta += kNumThreads) {
      p_.queue_indptr[cta] = QueueBegin(chunks_before, cta);
    }
    WriteItems(chunks_before);
  }

  i32 num_shared_tokens_ = 0;

 private:
  __device__ i32 QueueBegin(const i32* chunks_before, i32 cta) const {
    const i32 q = cta / rules_.num_partitions, p = cta % rules_.num_partitions;
    const i32 before = rules_.num_partitions * chunks_before[q];
    return rules_.heads_per_unit * (p == 0 ? before : before + p * chosen_.filled[q]);
  }

  // Merge groups of units, and the rows of q of shared tiles.
  __device__ void WriteUnits() {
    const i32 heads = rules_.num_kv_heads, num_units = shared_tiling_.num_units;
    const i32 all_partials = unit_partials_before_[num_units];
#pragma unroll 1
    for (i32 task = thread_; task < num_units * heads; task += kNumThreads) {
      const i32 u = task / heads, head = task % heads;
      const QueryTile& t = tiles_[shared_tiling_.unit_tiles[u]];
      const i32 begin =
          heads * partials_before_[num_tiles_] + head * all_partials + unit_partials_before_[u];
      i32 end = begin;
      // Those of tile i, whose states have the unit's rows from query token `token` on.
      const auto add = [&](i32 i, i32 token) {
        const i32 splits = static_cast<i32>(NumStates(chosen_, i));
        const i32 rows = tiles_[i].qo_len * rules_.group_size;
        const i32 first = static_cast<i32>(heads * rows_before_[i]) + head * rows * splits;
#pragma unroll 1
        for (i32 s = 0; s < splits; ++s) {
          p_.partial_rows[end++] = first + s * rows + token * rules_.group_size;
        }
      };
#pragma unroll 1
      for (i32 level = 0; level < shared_tiling_.num_levels; ++level) {
        const SharedTiling::Place place = shared_tiling_.places[level * num_units + u];
        if (place.tile >= 0) add(place.tile, place.token);
      }
      add(shared_tiling_.unit_tiles[u], 0);
      uint4* group = reinterpret_cast<uint4*>(p_.merge_groups + head * num_units + u);
      group[0] = Words(t.qo_begin, t.qo_len, head, end - begin);
      group[1] = Words(begin, 1, -1, 0);
    }
#pragma unroll 1
    for (i32 i = thread_; i < num_tiles_; i += kNumThreads) {
      const TileSharing sharing = SharingOf(i);
      if (sharing.num_units < 2) continue;
      i32 at = tiles_[i].qo_begin;
#pragma unroll 1
      for (i32 u = sharing.first_unit; u < sharing.first_unit + sharing.num_units; ++u) {
        const QueryTile& unit = tiles_[shared_tiling_.unit_tiles[u]];
#pragma unroll 1
        for (i32 k = 0; k < unit.qo_len; ++k) p_.qo_indices[at++] = unit.qo_begin + k;
      }
    }
  }

  // Merge groups that come before those of tiles: of units.
  __device__ i32 NumUnitGroups() const {
    if constexpr (kGeneral) {
      if (sharing_ != nullptr) return rules_.num_kv_heads * shared_tiling_.num_units;
    }
    return 0;
  }

  __device__ void WriteMergeGroups() {
    const i32 heads = rules_.num_kv_heads;
#pragma unroll 1
    for (i32 task = thread_; task < num_tiles_ * heads; task += kNumThreads) {
      const i32 i = task / heads, head = task % heads;
      const i32 splits = static_cast<i32>(SplitsOf(chosen_, i));
      if (splits == 0) continue;
      if constexpr (kGeneral) {
        if (SharingOf(i).partial()) continue;
      }
      const QueryTile& t = tiles_[i];
      const i32 partials_begin = heads * partials_before_[i] + head * splits;
      const i32 num_groups = NumMergeGroups(rules_, t, splits);
      const i32 first_group = NumUnitGroups() + heads * groups_before_[i] + head * num_groups;
      uint4* group = reinterpret_cast<uint4*>(p_.merge_groups + first_group);
      const i32 step = num_groups > 1 ? kFoldBatch : 1;
      group[0] = Words(t.qo_begin, t.qo_len, head, (splits + step - 1) / step);
      group[1] = Words(partials_begin, step, -1, FirstFoldPlace(rules_, t));
#pragma unroll 1
      for (i32 g = 1; g < num_groups; ++g) {
        const i32 s = (g - 1) * kFoldBatch;
        group += sizeof(MergeGroup) / sizeof(uint4);
        group[0] = Words(t.qo_begin, t.qo_len, head, Min(kFoldBatch, splits - s));
        group[1] = Words(partials_begin + s, 1, first_group, 0);
      }
      const i32 rows = t.qo_len * rules_.group_size;
      const i32 first = static_cast<i32>(heads * rows_before_[i]) + head * rows * splits;
#pragma unroll 1
      for (i32 s = 0; s < splits; ++s) p_.partial_rows[partials_begin + s] = first + s * rows;
    }
  }

  __device__ static uint4 Words(i32 x, i32 y, i32 z, i32 w) {
    return make_uint4(static_cast<u32>(x), static_cast<u32>(y), static_cast<u32>(z),
                      static_cast<u32>(w));
  }

  __device__ void WriteItems(const i32* chunks_before) {
    const i32 num_slots = num_chunks_ * rules_.num_units;
    i32* order = this->template Take<i32>(num_slots);  // slots, queue by queue
#pragma unroll 1
    for (i32 s = thread_; s < num_slots; s += kNumThreads) {
      const PlanSlot slot = chosen_.slots[s];
      order[chunks_before[slot.queue] + slot.place] = s;
    }
    __syncthreads();
    CopyItems(chunks_before, order);
  }

  // By a warp for each queue: items of 48 bytes, 16 a lane.
  __device__ void CopyItems(const i32* chunks_before, const i32* order) const {
    // As in plan/schedule.cc: when heights mix, the second half of the grid begins with small
    // tiles.
    bool both_ends = several_heights_;
    if constexpr (kGeneral) both_ends = both_ends && sharing_ == nullptr;
    const i32 first_backwards = both_ends ? rules_.num_ctas / 2 : rules_.num_ctas;
    const i32 partitions = rules_.num_partitions, each = rules_.heads_per_unit;
    const i32 num_slots = num_chunks_ * rules_.num_units;
#pragma unroll 1
    for (i32 cta = thread_ / kWarpSize; cta < rules_.num_ctas; cta += kNumWarps) {
      const i32 queue = cta / partitions, p = cta % partitions;
      const i32 before = chunks_before[queue], filled = chosen_.filled[queue];
      uint4* items = reinterpret_cast<uint4*>(p_.items + each * (partitions * before + p * filled));
#pragma unroll 1
      for (i32 i = thread_ % kWarpSize; i < 3 * each * filled; i += kWarpSize) {
        const i32 item = i / 3, part = i - 3 * item;
        const i32 place = each > 1 ? item / each : item;
        const i32 slot = order[before + (cta < first_backwards ? place : filled - place - 1)];
        const i32 first_head = p * rules_.num_units * each + item - place * each;
        const uint4* record = records_ + slot;
        uint4 words = record[part * num_slots];
        if (part == 0) words.z = words.z * each + first_head;
        if (part == 2) {
          const u32 head = record[0].z * each + first_head;
          const uint4 step = record[3 * num_slots];
          words.x += head * step.x;
          words.y += head * step.y;
        }
        items[i] = words;
      }
    }
  }

  // [4, num_slots], slots in the order of keys: the three parts of an item of the first head, with
  // a unit instead of the head, and what row and group grow by from head to head.
  uint4* records_ = nullptr;

  i32* groups_before_ = nullptr;         // [num_tiles + 1], these three for one kv head
  i32* partials_before_ = nullptr;       // [num_tiles + 1]
  i64* rows_before_ = nullptr;           // [num_tiles + 1]
  i32* unit_partials_before_ = nullptr;  // [num_units + 1], likewise, with levels only
};

}  // namespace jax_attn
