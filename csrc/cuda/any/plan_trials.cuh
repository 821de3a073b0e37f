// Ways to cut the tiles of the device planner: chunks, sorted in the order in which queues take
// them.
#pragma once

#include "cuda/any/plan_tiles.cuh"

namespace jax_attn {

// Where a chunk of one head unit went: a queue, and how many went there before it.
struct __align__(8) PlanSlot {
  i32 queue, place;
};

// One way to cut and hand out the tiles.
struct PlanTrial {
  i32* chunk_base;  // [num_tiles + 1] first chunk of a tile
  u64* keys;        // [num_chunks, to a power of two] in the order of rules.h
  i64* costs;       // [num_chunks] in the order of keys
  PlanSlot* slots;  // [num_chunks * num_units] in the order of keys, sections head by head
  i32* filled;      // [num_queues] chunks of a queue
  i64* loads;       // [num_queues] for whoever assigns chunks
};

static_assert(kMaxChunks == 1ll << kChunkBits, "a key holds any chunk");

template <class Traits, bool kGeneral>
class PlanTrials : public PlanTiles<Traits, kGeneral> {
  using Base = PlanTiles<Traits, kGeneral>;

 public:
  using typename Base::Cta;
  struct Trial {
    PlanTrial arrays;
    i64 cost;  // of all chunks of all units
    i32 num_chunks;
    i32 longest_cost;
  };
  struct Shared {
    typename Cta::WarpSums warp_sums;
    Trial trials[1 + kNumRetries];
    i64 makespan[1 + kNumRetries];
  };
  static constexpr int kArenaBytes =
      (Traits::kSmemBytes - static_cast<int>(sizeof(Shared))) / 16 * 16;

  __device__ PlanTrials(const PlanParams& p, unsigned char* smem)
      : Base(p, smem, kArenaBytes, reinterpret_cast<Shared*>(smem + kArenaBytes)->warp_sums),
        shared_(*reinterpret_cast<Shared*>(smem + kArenaBytes)) {}

 protected:
  using Base::CostOf, Base::CutOf, Base::first_tile_, Base::kNumThreads, Base::num_tiles_,
      Base::Prefix, Base::rules_, Base::SharingOf, Base::Sort, Base::SortSize, Base::span_cost_,
      Base::Sum, Base::thread_, Base::tiles_;

  __device__ PlanTrial TakeTiles() {
    PlanTrial trial = {};
    trial.chunk_base = this->template Take<i32>(num_tiles_ + 1);
    trial.filled = this->template Take<i32>(rules_.num_queues);
    trial.loads = this->template Take<i64>(rules_.num_queues);
    return trial;
  }
  __device__ void TakeChunks(PlanTrial* trial, i32 num_chunks) {
    trial->keys = this->template Take<u64>(SortSize(num_chunks));
    trial->costs = this->template Take<i64>(num_chunks);
    trial->slots = this->template Take<PlanSlot>(static_cast<i64>(num_chunks) * rules_.num_units);
  }

  __device__ i32 TileOfChunk(const PlanTrial& trial, i32 num_chunks, i32 chunk) const {
    return num_chunks == num_tiles_ ? chunk : LastAtMost(trial.chunk_base, num_tiles_, chunk);
  }

  __device__ static i64 SplitsOf(const PlanTrial& trial, i32 i) {  // 0: not cut
    const i64 splits = trial.chunk_base[i + 1] - trial.chunk_base[i];
    return splits > 1 ? splits : 0;
  }

  // First chunks of all tiles; returns their number.
  __device__ i64 CutByLength(const PlanTrial& trial, i32 longest_cost) {
    return Prefix(num_tiles_, trial.chunk_base,
                  [&](i32 i) { return static_cast<i64>(CutOf(longest_cost, i).num_splits); });
  }

  // Sorts the chunks, heaviest first; returns the cost of all.
  __device__ i64 SortChunks(const PlanTrial& trial, i32 num_chunks, i32 longest_cost) {
    const i32 size = SortSize(num_chunks);
    const i64 cost = Sum(size, [&](i32 c) {
      if (c >= num_chunks) {
        trial.keys[c] = ~0ull;
        return 0ll;
      }
      const i32 i = TileOfChunk(trial, num_chunks, c);
      const QueryTile& t = tiles_[i];
      const TileCut cut = CutOf(longest_cost, i);
      const i32 split = c - trial.chunk_base[i];
      const i64 kv_tokens = cut.End(t, split) - cut.Begin(t, split);
      const i64 cost = CostOf(i, kv_tokens, cut.num_splits);
      const i64 first = SharingOf(i).shared() ? kSharedFirst : 0;
      trial.keys[c] = t.section > 0 ? SectionKey(t.section, c) : ChunkKey(cost + first, c);
      return cost;
    });
    Sort(trial.keys, size);
#pragma unroll 1
    for (i32 k = thread_; k < num_chunks; k += kNumThreads) {
      const i32 c = ChunkOfKey(trial.keys[k]);
      const i32 i = TileOfChunk(trial, num_chunks, c);
      const QueryTile& t = tiles_[i];
      const TileCut cut = CutOf(longest_cost, i);
      const i32 split = c - trial.chunk_base[i];
      trial.costs[k] = CostOf(i, cut.End(t, split) - cut.Begin(t, split), cut.num_splits);
    }
    __syncthreads();
    return cost * rules_.num_units;
  }

  // Which chunk, in the order of keys, and which head unit a slot is for.
  struct SlotSource {
    i32 key, unit;
  };
  __device__ SlotSource SourceOf(const PlanTrial& trial, i32 num_chunks, i32 slot) const {
    const i32 units = rules_.num_units;
    if (units == 1) return {slot, 0};
    const i32 key = slot / units;
    if (!IsSectionKey(trial.keys[key])) return {key, slot - key * units};
    const i32 chunk = ChunkOfKey(trial.keys[key]);
    const i32 request = tiles_[TileOfChunk(trial, num_chunks, chunk)].request;
    const i32 first = trial.chunk_base[first_tile_[request]];
    const i32 count = trial.chunk_base[first_tile_[request + 1]] - first;
    const i32 begin = key - (first + count - 1 - chunk);  // the section's last chunk comes first
    const i32 within = slot - begin * units;
    return {begin + within % count, within / count};
  }

  // Partial states of a tile, for one kv head.
  __device__ i64 NumStates(const PlanTrial& trial, i32 i) const {
    const i64 splits = trial.chunk_base[i + 1] - trial.chunk_base[i];
    return splits > 1 || SharingOf(i).partial() ? splits : 0;
  }
  __device__ i64 StateRows(const PlanTrial& trial, i32 i) const {
    return NumStates(trial, i) * tiles_[i].qo_len * rules_.group_size;
  }

  __device__ i64 NumSplitChunks(const PlanTrial& trial) {
    return Sum(num_tiles_, [&](i32 i) { return SplitsOf(trial, i); });
  }

  // Cuts the tiles and sorts the chunks. num_chunks < 0: more splits than a retry may have.
  __device__ PlanFault MakeTrial(i32 r) {
    Trial t = {};
    t.longest_cost = LongestChunkCost(rules_, span_cost_, r == 0 ? 2 : kRetryDivisors[r - 1]);
    t.arrays = TakeTiles();
    const i64 num_chunks = CutByLength(t.arrays, t.longest_cost);
    if (r == 0) {
      if (num_chunks >= kMaxChunks) return MakeFault(kFaultChunks, 0, num_chunks);
      // Other schedules have no retries; balanced ones never need more here than scratch has.
      if (rules_.schedule != kBalanced && num_chunks * rules_.num_kv_heads > rules_.max_items) {
        return MakeFault(kFaultItems, 0, num_chunks * rules_.num_kv_heads);
      }
    }
    t.num_chunks = static_cast<i32>(num_chunks);
    if (r > 0 && NumSplitChunks(t.arrays) * rules_.num_kv_heads > rules_.max_balanced_partials) {
      t.num_chunks = -1;
    } else {
      TakeChunks(&t.arrays, t.num_chunks);
      t.cost = SortChunks(t.arrays, t.num_chunks, t.longest_cost);
    }
    if (thread_ == 0) shared_.trials[r] = t;
    __syncthreads();
    return {};
  }

  // num_chunks < 0: the trial has more parts than a plan may.
  __device__ PlanFault MakeSharedTrial(i32 r) {
    Trial t = {};
    t.longest_cost = SharedDivisor(r);
    t.arrays = TakeTiles();
    const i64 num_chunks = CutByLength(t.arrays, t.longest_cost);
    bool fits = num_chunks < kMaxChunks;
    if (rules_.schedule != kBalanced) {
      if (fits && num_chunks * rules_.num_kv_heads > rules_.max_items) {
        return MakeFault(kFaultItems, 0, num_chunks * rules_.num_kv_heads);
      }
    } else {
      const i64 heads = rules_.num_kv_heads;
      const i64 num_rows = Sum(num_tiles_, [&](i32 i) { return StateRows(t.arrays, i); });
      fits = fits && NumSplitChunks(t.arrays) * heads <= rules_.max_balanced_partials &&
             num_rows * heads <= MaxSharedRows(rules_);
    }
    t.num_chunks = fits ? static_cast<i32>(num_chunks) : -1;
    if (fits) {
      TakeChunks(&t.arrays, t.num_chunks);
      t.cost = SortChunks(t.arrays, t.num_chunks, t.longest_cost);
    }
    if (thread_ == 0) shared_.trials[r] = t;
    __syncthreads();
    return {};
  }

  __device__ void TakeTrial(i32 r) {
    if constexpr (kGeneral) makespan_ = shared_.makespan[r];
    chosen_ = shared_.trials[r].arrays;
    num_chunks_ = shared_.trials[r].num_chunks;
    longest_cost_ = shared_.trials[r].longest_cost;
  }

  Shared& shared_;

  PlanTrial chosen_ = {};
  i32 num_chunks_ = 0;
  i32 longest_cost_ = 0;
  i64 makespan_ = 0;  // with kGeneral
};

}  // namespace jax_attn
