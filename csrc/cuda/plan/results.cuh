// The device planner writes the chosen schedule: merge groups, partial states, queues, items.
#pragma once

#include "cuda/plan/context.cuh"
#include "cuda/plan/prefix.cuh"
#include "cuda/plan/ranges.cuh"
#include "cuda/plan/trials.cuh"
#include "plan/rules/merges.h"
#include "plan/rules/sharing.h"

namespace jax_attn {

// Input: a schedule, its tiles, and the tiling if these share. Output: the sections of the plan.
// Call Count first, then MakeRecords, then Write.
template <class Context>
class PlanResults {
  static constexpr i32 kNumThreads = Context::kNumThreads;

 public:
  __device__ PlanResults(Context& c, const typename Context::Tiles& tiles,
                         const SharedTiling& tiling, const PlanSchedule& schedule)
      : c_(c),
        p_(c.p),
        rules_(c.rules),
        tiles_(tiles),
        tiling_(tiling),
        schedule_(schedule),
        chunks_(schedule.chunks) {}

  // Also numbers, for one kv head, the merge groups and partial states in front of each tile.
  __device__ PlanCounts Count() {
    PlanCounts n = {};
    n.num_items = num_chunks() * i64{num_heads()};
    if (tiles_.shares()) {
      CountShared(&n);
    } else if (num_chunks() != num_tiles()) {
      CountParts(&n, [&](i32 i) { return Parts(NumGroups(i), chunks_.SplitsOf(i)); });
    }
    records_ = c_.template Take<uint4>(4ll * num_chunks());
    return n;
  }

  // Makes what chunks become, whichever queues they go to: those of keys first, first + step, ...
  __device__ void MakeRecords(i32 first, i32 step) {
    if (c_.thread() == kNumThreads - 1) LookAtPages();
#pragma unroll 1
    for (i32 k = first; k < num_chunks(); k += step) {
      const i32 chunk = ChunkOfKey(chunks_.keys[k]);
      const i32 i = TileOfChunk(num_tiles(), chunks_, num_chunks(), chunk);
      const UnitTile cut_tile = TileAt(i);
      const QueryTile& t = tiles_.tiles[cut_tile.tile];
      const i32 split = chunk - chunks_.chunk_base[i];
      const i32 splits = chunks_.NumChunksOf(i);
      i32 begin, end;
      if (schedule_.has_ranges()) {
        begin = RangeBegin(chunks_, schedule_.inner, t, i, split);
        end = RangeEnd(chunks_, schedule_.inner, t, i, split, splits);
      } else {
        const TileCut cut = chunks_.cuts[i];
        begin = cut.Begin(t, split);
        end = cut.End(t, split);
      }
      const i32 num_rows = t.qo_len * rules_.group_size;
      i32 first_row = 0, first_group = 0;
      i32 group_step = 1, num_units = 1;
      // 64 bits: whether the capacities hold them is checked when all else is known.
      const auto row_of = [&] {
        return static_cast<i32>(num_heads() * rows_before_[i] + i64{split} * num_rows);
      };
      if (splits > 1) {
        first_row = row_of();
        group_step = NumMergeGroups(rules_, t, splits);
        first_group = num_heads() * GroupsBefore(i) + MergeGroupOfSplit(group_step, split);
      }
      // Shared prefixes: partial states of units, which may be in tiles that are not cut.
      bool partial = splits > 1;
      const TileSharing sharing = tiles_.SharingOf(i);
      if (sharing.partial()) {
        partial = true;
        first_row = row_of();
        first_group = sharing.shared() ? sharing.first_unit : sharing.unit;
        group_step = tiling_.num_units;
        num_units = static_cast<i32>(Largest(1, sharing.num_units));
      } else {
        first_group += NumUnitGroups();
      }
      const i32 num_groups = partial ? num_units : 0;
      uint4* record = records_ + k;
      record[0] = Words(t.first_token, t.qo_len, 0, t.tile);
      record[num_chunks()] = Words(begin, end, t.kv_base, t.q_pos);
      record[2 * num_chunks()] = partial ? Words(first_row, first_group, t.request, num_groups)
                                         : Words(-1, -1, t.request, 0);
      record[3 * num_chunks()] =
          partial ? Words(static_cast<i32>(i64{num_rows} * splits), group_step, cut_tile.unit, 0)
                  : Words(0, 0, cut_tile.unit, 0);
    }
  }

  // Call it after MakeRecords of all chunks.
  __device__ void Write(const PlanCounts& counts) {
    if (tiles_.shares()) WriteUnits();
    if (counts.num_merge_groups > 0) WriteMergeGroups();
    // Chunks of the queues before.
    i32* chunks_before = c_.template Take<i32>(rules_.num_queues + 1);
    c_.cta.Prefix(rules_.num_queues, chunks_before,
                  [&](i32 q) { return static_cast<i64>(chunks_.filled[q]); });
#pragma unroll 1
    for (i32 cta = c_.thread(); cta <= rules_.num_ctas; cta += kNumThreads) {
      p_.queue_indptr[cta] = QueueBegin(chunks_before, cta);
    }
    WriteItems(chunks_before);
  }

  // Query tokens of shared tiles of several requests; after Count.
  __device__ i32 num_shared_tokens() const { return num_shared_tokens_; }

 private:
  __device__ i32 num_chunks() const { return schedule_.num_chunks; }
  __device__ bool by_unit() const { return schedule_.has_ranges(); }
  __device__ i32 num_tiles() const { return NumCutTiles(rules_, tiles_, by_unit()); }
  // Tile i of those that are cut, which share nothing if they belong to units.
  __device__ UnitTile TileAt(i32 i) const { return CutTileAt(rules_, tiles_, by_unit(), i); }
  // Heads that have a chunk.
  __device__ i32 num_heads() const { return NumHeadsOf(rules_, by_unit() ? 0 : kEveryUnit); }

  // Looks whether the other CTAs are done, as they mostly are long before this one. Then they need
  // not be waited for.
  __device__ void LookAtPages() {
    c_.shared.others_done =
        LoadAcquire(UnwrittenHeader::NumDone(p_.header)) == static_cast<i32>(gridDim.x) - 1;
    c_.shared.found = FindingsOf<Context::kGeneral>(p_);
  }

  // --- counts ---

  // parts(i): merge groups and partial states of a tile, without those of units.
  template <class PartsOf>
  __device__ void CountParts(PlanCounts* n, PartsOf parts) {
    const i64 heads = num_heads();
    parts_before_ = c_.template Take<i64>(num_tiles() + 1);
    rows_before_ = c_.template Take<i64>(num_tiles() + 1);
    const i64 num_parts = c_.cta.StartPrefix(num_tiles(), parts_before_, parts);
    n->num_merge_groups = heads * GroupsIn(num_parts);
    n->num_partials = heads * PartialsIn(num_parts);
    n->num_partial_rows = heads * c_.cta.Prefix(num_tiles(), rows_before_, [&](i32 i) {
      if (!by_unit()) return StateRows(rules_, tiles_, chunks_, i);
      return chunks_.SplitsOf(i) * tiles_.tiles[TileAt(i).tile].qo_len * rules_.group_size;
    });
  }

  // Merge groups and partial states, each fewer than kMaxChunks, in one number.
  __device__ static i64 Parts(i64 groups, i64 partials) { return groups << 32 | partials; }
  __device__ static i32 GroupsIn(i64 parts) { return static_cast<i32>(parts >> 32); }
  __device__ static i32 PartialsIn(i64 parts) { return static_cast<i32>(parts); }
  __device__ i32 GroupsBefore(i32 i) const { return GroupsIn(parts_before_[i]); }
  __device__ i32 PartialsBefore(i32 i) const { return PartialsIn(parts_before_[i]); }

  // Merge groups of a tile that shares nothing, for one kv head.
  __device__ i64 NumGroups(i32 i) const {
    const i32 splits = static_cast<i32>(chunks_.SplitsOf(i));
    return splits > 0 ? NumMergeGroups(rules_, tiles_.tiles[TileAt(i).tile], splits) : 0;
  }

  // The same with shared prefixes. Merge groups of units come first, their partial states last.
  __device__ void CountShared(PlanCounts* n) {
    const i64 heads = rules_.num_kv_heads;
    const i32 num_units = tiling_.num_units;
    unit_partials_before_ = c_.template Take<i32>(num_units + 1);
    CountParts(n, [&](i32 i) {
      return tiles_.SharingOf(i).partial() ? 0 : Parts(NumGroups(i), chunks_.SplitsOf(i));
    });
    n->num_merge_groups += heads * num_units;
    n->num_partials += heads * c_.cta.Prefix(num_units, unit_partials_before_, [&](i32 u) {
      i64 partials = NumStates(tiles_, chunks_, tiling_.unit_tiles[u]);
#pragma unroll 1
      for (i32 level = 0; level < tiling_.num_levels; ++level) {
        const i32 i = tiling_.places[level * num_units + u].tile;
        if (i >= 0) partials += NumStates(tiles_, chunks_, i);
      }
      return partials;
    });
    num_shared_tokens_ = static_cast<i32>(c_.cta.Sum(num_tiles(), [&](i32 i) {
      return tiles_.SharingOf(i).num_units > 1 ? static_cast<i64>(tiles_.tiles[i].qo_len) : 0ll;
    }));
  }

  // --- sections ---

  __device__ i32 QueueBegin(const i32* chunks_before, i32 cta) const {
    const i32 q = cta / rules_.num_partitions, p = cta % rules_.num_partitions;
    const i32 before = rules_.num_partitions * chunks_before[q];
    return rules_.heads_per_unit * (p == 0 ? before : before + p * chunks_.filled[q]);
  }

  // Writes merge groups of units, and the rows of q of shared tiles.
  __device__ void WriteUnits() {
    const i32 heads = rules_.num_kv_heads, num_units = tiling_.num_units;
    const i32 all_partials = unit_partials_before_[num_units];
#pragma unroll 1
    for (i32 task = c_.thread(); task < num_units * heads; task += kNumThreads) {
      const i32 u = task / heads, head = task % heads;
      const QueryTile& t = tiles_.tiles[tiling_.unit_tiles[u]];
      const i32 begin =
          heads * PartialsBefore(num_tiles()) + head * all_partials + unit_partials_before_[u];
      i32 end = begin;
      // Adds tile i, whose states have the unit's rows from query token `token` on.
      const auto add = [&](i32 i, i32 token) {
        const i32 splits = static_cast<i32>(NumStates(tiles_, chunks_, i));
        const i32 rows = tiles_.tiles[i].qo_len * rules_.group_size;
        const i32 first = static_cast<i32>(heads * rows_before_[i]) + head * rows * splits;
#pragma unroll 1
        for (i32 s = 0; s < splits; ++s) {
          p_.partial_rows[end++] = first + s * rows + token * rules_.group_size;
        }
      };
#pragma unroll 1
      for (i32 level = 0; level < tiling_.num_levels; ++level) {
        const SharedTiling::Place place = tiling_.places[level * num_units + u];
        if (place.tile >= 0) add(place.tile, place.token);
      }
      add(tiling_.unit_tiles[u], 0);
      uint4* group = reinterpret_cast<uint4*>(p_.merge_groups + head * num_units + u);
      group[0] = Words(t.first_token, t.qo_len, head, end - begin);
      group[1] = Words(begin, 1, -1, 0);
    }
#pragma unroll 1
    for (i32 i = c_.thread(); i < num_tiles(); i += kNumThreads) {
      const TileSharing sharing = tiles_.SharingOf(i);
      if (sharing.num_units < 2) continue;
      i32 at = tiles_.tiles[i].first_token;
#pragma unroll 1
      for (i32 u = sharing.first_unit; u < sharing.first_unit + sharing.num_units; ++u) {
        const QueryTile& unit = tiles_.tiles[tiling_.unit_tiles[u]];
#pragma unroll 1
        for (i32 k = 0; k < unit.qo_len; ++k) p_.qo_indices[at++] = unit.first_token + k;
      }
    }
  }

  // Merge groups of units, which come before those of tiles.
  __device__ i32 NumUnitGroups() const {
    return tiles_.shares() ? rules_.num_kv_heads * tiling_.num_units : 0;
  }

  __device__ void WriteMergeGroups() {
    const i32 heads = num_heads();
#pragma unroll 1
    for (i32 task = c_.thread(); task < num_tiles() * heads; task += kNumThreads) {
      const i32 i = task / heads, idx = task % heads;
      const i32 splits = static_cast<i32>(chunks_.SplitsOf(i));
      if (splits == 0 || (!by_unit() && tiles_.SharingOf(i).partial())) continue;
      const UnitTile cut_tile = TileAt(i);
      const QueryTile& t = tiles_.tiles[cut_tile.tile];
      const i32 head = HeadOf(rules_, cut_tile.unit, idx);
      const i32 partials_begin = heads * PartialsBefore(i) + idx * splits;
      const i32 num_groups = NumMergeGroups(rules_, t, splits);
      const i32 first_group = NumUnitGroups() + heads * GroupsBefore(i) + idx * num_groups;
      uint4* group = reinterpret_cast<uint4*>(p_.merge_groups + first_group);
      const i32 step = num_groups > 1 ? kReduceBatch : 1;
      group[0] = Words(t.first_token, t.qo_len, head, (splits + step - 1) / step);
      group[1] = Words(partials_begin, step, -1, FirstReduceOffset(rules_, t));
#pragma unroll 1
      for (i32 g = 1; g < num_groups; ++g) {
        const i32 s = (g - 1) * kReduceBatch;
        group += sizeof(MergeGroup) / sizeof(uint4);
        group[0] = Words(t.first_token, t.qo_len, head, Min(kReduceBatch, splits - s));
        group[1] = Words(partials_begin + s, 1, first_group, 0);
      }
      const i32 rows = t.qo_len * rules_.group_size;
      const i32 first = static_cast<i32>(heads * rows_before_[i]) + idx * rows * splits;
#pragma unroll 1
      for (i32 s = 0; s < splits; ++s) p_.partial_rows[partials_begin + s] = first + s * rows;
    }
  }

  __device__ static uint4 Words(i32 x, i32 y, i32 z, i32 w) {
    return make_uint4(static_cast<u32>(x), static_cast<u32>(y), static_cast<u32>(z),
                      static_cast<u32>(w));
  }

  // Writes items of 48 bytes, 16 a lane, so that warps write whole lines. First it finds which
  // chunk and head each word belongs to.
  __device__ void WriteItems(const i32* chunks_before) {
    const bool both_ends = tiles_.several_tile_sizes && !tiles_.shares();
    const i32 partitions = rules_.num_partitions, each = rules_.heads_per_unit;
    const i32 num_items = num_chunks() * num_heads();
    const i32 units = by_unit() ? 1 : rules_.num_units;  // that a chunk has
    ItemSource* sources = c_.template Take<ItemSource>(num_items);
#pragma unroll 1
    for (i32 k = c_.thread(); k < num_chunks(); k += kNumThreads) {
      const SlotsOfKey slots =
          by_unit() ? SlotsOfKey{k, 1} : SlotsOf(rules_, tiles_, chunks_, num_chunks(), k);
#pragma unroll 1
      for (i32 u = 0; u < units; ++u) {
        const PlanSlot slot = chunks_.slots[slots.first + u * slots.step];
        const i32 before = chunks_before[slot.queue], filled = chunks_.filled[slot.queue];
#pragma unroll 1
        for (i32 p = 0; p < partitions; ++p) {
          const bool backwards =
              both_ends && BeginsWithSmallTiles(rules_.num_ctas, slot.queue * partitions + p);
          const i32 place = backwards ? filled - slot.place - 1 : slot.place;
          const i32 first = each * (partitions * before + p * filled + place);
          const i32 idx = (p * units + u) * each;
#pragma unroll 1
          for (i32 h = 0; h < each; ++h) sources[first + h] = {k, idx + h};
        }
      }
    }
    __syncthreads();
    constexpr int kParts = sizeof(WorkItem) / sizeof(uint4);
    const int lane = c_.thread() % kWarpSize;
    uint4* items = reinterpret_cast<uint4*>(p_.items);
#pragma unroll 1
    for (i32 first = c_.thread() - lane; first < num_items; first += kNumThreads) {
#pragma unroll
      for (int k = 0; k < kParts; ++k) {
        const i32 word = lane + k * kWarpSize, item = first + word / kParts, part = word % kParts;
        if (item >= num_items) continue;
        const ItemSource source = sources[item];
        const uint4* record = records_ + source.key;
        uint4 words = record[part * num_chunks()];
        if (part == 0) {
          const i32 unit =
              by_unit() ? static_cast<i32>(record[kParts * num_chunks()].z) : kEveryUnit;
          words.z = static_cast<u32>(HeadOf(rules_, unit, source.idx));
        }
        if (part == 2) {
          const uint4 step = record[kParts * num_chunks()];
          words.x += source.idx * step.x;
          words.y += source.idx * step.y;
        }
        items[kParts * first + word] = words;
      }
    }
  }

  struct __align__(8) ItemSource {
    i32 key, idx;  // idx: of the head, among those that have the chunk
  };

  Context& c_;
  const PlanParams& p_;
  const PlanRules& rules_;
  const typename Context::Tiles& tiles_;
  const SharedTiling& tiling_;
  const PlanSchedule& schedule_;
  const PlanChunks& chunks_;

  // [4, num_chunks] in the order of keys: the three parts of an item of the first head; the
  // increments of row and group from head to head, and the head unit.
  uint4* records_ = nullptr;

  i64* parts_before_ = nullptr;          // [num_tiles + 1] this and the next for one kv head
  i64* rows_before_ = nullptr;           // [num_tiles + 1]
  i32* unit_partials_before_ = nullptr;  // [num_units + 1] the same; only with levels
  i32 num_shared_tokens_ = 0;
};

}  // namespace jax_attn
