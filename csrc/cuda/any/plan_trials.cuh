// Ways to cut the tiles of the device planner: chunks, sorted in the order in which queues take
// them.
#pragma once

#include "cuda/any/plan_pages.cuh"
#include "cuda/any/plan_tiles.cuh"

namespace jax_attn {

// Where a chunk of one head unit went: a queue, and how many went there before it.
struct __align__(8) PlanSlot {
  i32 queue, place;
};

// Step lists of some tiles, one behind the other.
struct StepLists {
  i32 num_words, num_steps;
  const i32* first_word;   // [num_tiles + 1] of each tile
  const StepWord* words;   // [num_words]
  const i32* first_entry;  // [num_words + 1] of each word
};

// One way to cut and hand out the tiles.
struct PlanTrial {
  i32* chunk_base;  // [num_tiles + 1] first chunk of a tile
  TileCut* cuts;    // [num_tiles] unless by ranges
  u64* keys;        // [num_chunks, to a power of two] in the order of rules.h
  i64* costs;       // [num_chunks] in the order of keys
  PlanSlot* slots;  // [num_chunks * num_units] in the order of keys; sections as SlotsOf says
  u32* weights;     // [num_chunks * num_units] costs of slots as dealers add them, or their keys
  i32* filled;      // [num_queues] chunks of a queue
  union {           // for whoever assigns chunks
    i64* loads;     // [num_queues]
    u32* counts;    // see DealInRegisters
  };
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
    // Of the queue in the keys by which chunks are dealt, 31 bits with a load above; negative: the
    // queues are too many, or the loads may be too large.
    i32 key_bits;
    // With kGeneral: from this slot on queues that have none get none.
    i32 leaves_empty_from;
  };
  static constexpr int kMostTrials =
      kGeneral ? Max(1 + kNumRetries, kNumSharedTrials) : 1 + kNumRetries;
  struct Shared {
    typename Cta::WarpTotals warp_totals;
    Trial trials[kMostTrials];
    i64 makespan[kMostTrials];
    PlanCounts counts;
    StepLists lists[2];  // of the flat tiles, and of those with shared prefixes
    bool others_done;    // CTAs 1 and on, and what they found
    PageFindings found;
  };
  static constexpr int kArenaBytes =
      (Traits::kSmemBytes - static_cast<int>(sizeof(Shared))) / 16 * 16;

  __device__ PlanTrials(const PlanParams& p, unsigned char* smem)
      : Base(p, smem, kArenaBytes, reinterpret_cast<Shared*>(smem + kArenaBytes)->warp_totals),
        shared_(*reinterpret_cast<Shared*>(smem + kArenaBytes)) {}

 protected:
  using Base::CostOf, Base::CutOf, Base::first_tile_, Base::ClampToWord, Base::kNumThreads,
      Base::longest_span_cost_, Base::num_tiles_, Base::Prefix, Base::rules_, Base::SharingOf,
      Base::PlaceOf, Base::Sort, Base::SortSize, Base::span_cost_, Base::Sum, Base::thread_,
      Base::tiles_, Base::Total;
  using typename Base::Totals;

  static constexpr i32 kNoSlot = kMaxInt32;

  // Chunks are dealt by a team of warps, one on each scheduler of a multiprocessor, so that several
  // trials are at once, or the rest of the CTA does something else.
  static constexpr int kTeamWarps = Min(4, Base::kNumWarps);
  // Short keys: 31 bits.
  static constexpr int kShortChunkBits = 9;
  static constexpr u32 kShortCosts = 1u << (31 - kShortChunkBits), kNoShortKey = 0x7fffffff;
  static_assert(kNumThreads <= 1 << kShortChunkBits, "a short key holds a chunk");

  // Queues of a lane at most, and what their counts take, for two rounds.
  static constexpr int kMostQueues = 9;
  static constexpr i32 kMostCounts = 2 * ((kMostQueues + 1) / 2) * kWarpSize * kTeamWarps;

  __device__ PlanTrial TakeTiles() {
    PlanTrial trial = {};
    trial.chunk_base = this->template Take<i32>(num_tiles_ + 1);
    trial.cuts = this->template Take<TileCut>(num_tiles_);
    trial.filled = this->template Take<i32>(rules_.num_queues);
    trial.loads = this->template Take<i64>(Largest(rules_.num_queues, kMostCounts / 2));
    return trial;
  }
  __device__ void TakeChunks(PlanTrial* trial, i32 num_chunks) {
    trial->keys = this->template Take<u64>(SortSize(num_chunks));
    trial->costs = this->template Take<i64>(num_chunks);
    trial->slots = this->template Take<PlanSlot>(static_cast<i64>(num_chunks) * rules_.num_units);
    trial->weights = this->template Take<u32>(static_cast<i64>(num_chunks) * rules_.num_units);
  }

  __device__ i32 TileOfChunk(const PlanTrial& trial, i32 num_chunks, i32 chunk) const {
    return num_chunks == num_tiles_ ? chunk : LastAtMost(trial.chunk_base, num_tiles_, chunk);
  }

  __device__ static i64 SplitsOf(const PlanTrial& trial, i32 i) {  // 0: not cut
    const i64 splits = trial.chunk_base[i + 1] - trial.chunk_base[i];
    return splits > 1 ? splits : 0;
  }

  // The slots of key k: `first` is for head unit 0, those of the other units follow, `step` apart.
  struct SlotsOfKey {
    i32 first, step;
  };
  __device__ SlotsOfKey SlotsOf(const PlanTrial& trial, i32 num_chunks, i32 k) const {
    const i32 units = rules_.num_units;
    if (units == 1 || !IsSectionKey(trial.keys[k])) return {k * units, 1};
    const i32 chunk = ChunkOfKey(trial.keys[k]);
    const QueryTile& tile = tiles_[TileOfChunk(trial, num_chunks, chunk)];
    const i32 request = tile.request;
    const i32 first = trial.chunk_base[first_tile_[request]];
    const i32 count = trial.chunk_base[first_tile_[request + 1]] - first;
    const i32 within = first + count - 1 - chunk;  // the section's last chunk comes first
    const bool last = k - within + count == num_chunks;
    if (last && GoesByWeight(rules_, tile.section)) return {k * units, 1};
    return {(k - within) * units + within, count};
  }

  // Cuts of all tiles, and their first chunks; returns the number of chunks.
  __device__ i64 CutByLength(const PlanTrial& trial, i64 longest_cost) {
    if constexpr (kGeneral) return CutOnce(trial, longest_cost);
    return CutInline(trial, longest_cost);
  }

  // The chunks of t, cut by length, become sorted slots, heaviest first.
  __device__ void SortChunks(Trial* t) {
    if constexpr (kGeneral) return SortOnce(t);
    SortInline(t);
  }

 private:
  // Code is read from memory, too: once for flat schedules and for those that share.
  __device__ __noinline__ i64 CutOnce(const PlanTrial& trial, i64 longest_cost) {
    return CutInline(trial, longest_cost);
  }
  __device__ __noinline__ void SortOnce(Trial* t) { SortInline(t); }

  __device__ i64 CutInline(const PlanTrial& trial, i64 longest_cost) {
    return Prefix(num_tiles_, trial.chunk_base, [&](i32 i) {
      const TileCut cut = CutOf(longest_cost, i);
      trial.cuts[i] = cut;
      return static_cast<i64>(cut.num_splits);
    });
  }

  __device__ void SortInline(Trial* t) {
    const PlanTrial& trial = t->arrays;
    const i32 num_chunks = t->num_chunks, size = SortSize(num_chunks);
    // Slots are not yet: in their place, short keys if every thread has a chunk at most, else
    // costs.
    const bool few = num_chunks <= kNumThreads;
    u32* short_keys = reinterpret_cast<u32*>(trial.slots);
    i64* unsorted = reinterpret_cast<i64*>(trial.slots);
    i64 cost = 0;
    u64 key = 0;
    const Totals totals = Total(size, [&](i32 c, Totals* mine) {
      if (c >= num_chunks) {
        trial.keys[c] = ~0ull;
        if (few && c < (num_chunks + 3) / 4 * 4) short_keys[c] = kNoShortKey;
        return;
      }
      const i32 i = TileOfChunk(trial, num_chunks, c);
      const QueryTile& tile = tiles_[i];
      const TileCut cut = trial.cuts[i];
      const i32 split = c - trial.chunk_base[i];
      const i64 kv_tokens = cut.End(tile, split) - cut.Begin(tile, split);
      cost = CostOf(i, kv_tokens, cut.num_splits);
      const bool shared = SharingOf(i).shared();
      key = tile.section > 0 ? SectionKey(tile.section, c) : ChunkKey(cost, c, shared);
      trial.keys[c] = key;
      mine->sum += cost;
      const u32 word = ClampToWord(cost);
      mine->most[0] = static_cast<u32>(Largest(mine->most[0], word));
      if (!few) {
        unsorted[c] = cost;
        return;
      }
      // In the same order, as long as there are neither sections, nor shared chunks, nor high
      // costs.
      const bool fits = tile.section == 0 && !shared && word < kShortCosts;
      mine->most[1] |= !fits;
      short_keys[c] = (kShortCosts - 1 - word) << kShortChunkBits | static_cast<u32>(c);
    });
    t->cost = totals.sum * rules_.num_units;
    const i64 longest = totals.most[0];  // clamped, it is too large for a key all the same
    if (few) {
      i32* counts = reinterpret_cast<i32*>(trial.weights);
      const i32 place = totals.most[1] == 0 ? PlaceOf(short_keys, num_chunks, counts)
                                            : PlaceOf(trial.keys, num_chunks, counts);
      if (thread_ < num_chunks) {  // the chunk that the thread still has
        trial.keys[place] = key;
        trial.costs[place] = cost;
      }
    } else {
      Sort(trial.keys, size);
#pragma unroll 1
      for (i32 k = thread_; k < num_chunks; k += kNumThreads) {
        trial.costs[k] = unsorted[ChunkOfKey(trial.keys[k])];
      }
    }
    __syncthreads();
    // A queue that takes a chunk had no more than the mean; another one may be asked what it would
    // have. A key holds a load and a queue.
    const i64 queues = rules_.num_queues;
    i32 bits = 0;
#pragma unroll 1
    while (1 << bits < queues) ++bits;
    const bool fits = queues <= kMostQueues * kWarpSize &&
                      t->cost + (2 * longest + 1) * queues < queues << (31 - bits);
    t->key_bits = fits ? bits : -1;
#pragma unroll 1
    for (i32 k = thread_; k < num_chunks; k += kNumThreads) {
      const SlotsOfKey slots = SlotsOf(trial, num_chunks, k);
      const u32 weight = fits ? static_cast<u32>(trial.costs[k]) << bits : static_cast<u32>(k);
#pragma unroll 1
      for (i32 u = 0; u < rules_.num_units; ++u) {
        trial.weights[slots.first + u * slots.step] = weight;
      }
    }
  }

 protected:
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

  __device__ i64 LongestCostOf(i32 r) {
    const i64 longest_cost = LongestChunkCost(rules_, span_cost_, r == 0 ? 2 : RetryDivisor(r - 1));
    if (r > 0) return longest_cost;
    return FirstLongestCost(rules_, num_tiles_, longest_span_cost_, longest_cost);
  }

  // Cuts the tiles and sorts the chunks. num_chunks < 0: more splits than a retry may have.
  __device__ PlanFault MakeTrial(i32 r) {
    Trial t = {};
    t.leaves_empty_from = kNoSlot;
    t.arrays = TakeTiles();
    const i64 num_chunks = CutByLength(t.arrays, LongestCostOf(r));
    // Of balanced ones scratch holds any first cut (LongestChunkCost), and retries are counted.
    if (rules_.schedule != kBalanced) {
      if (num_chunks >= kMaxChunks) return MakeFault(kFaultChunks, 0, num_chunks);
      const i64 num_items = num_chunks * rules_.num_kv_heads;
      if (num_items > rules_.max_items) return MakeFault(kFaultItems, 0, num_items);
    }
    t.num_chunks = static_cast<i32>(num_chunks);
    if (r > 0 && NumSplitChunks(t.arrays) * rules_.num_kv_heads > rules_.max_balanced_partials) {
      t.num_chunks = -1;
    } else {
      TakeChunks(&t.arrays, t.num_chunks);
      SortChunks(&t);
    }
    if (thread_ == 0) shared_.trials[r] = t;
    __syncthreads();
    return {};
  }

  // num_chunks < 0: the trial has more parts than a plan may.
  __device__ PlanFault MakeSharedTrial(i32 r) {
    Trial t = {};
    t.arrays = TakeTiles();
    const i64 num_chunks = CutByLength(t.arrays, r);
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
    t.leaves_empty_from = kNoSlot;
    if (rules_.schedule == kBalanced && kSharedTrials[r].leaves_empty) {
      const i64 num_shared = Sum(num_tiles_, [&](i32 i) {
        return SharingOf(i).shared() ? i64{t.arrays.cuts[i].num_splits} : i64{0};
      });
      t.leaves_empty_from = static_cast<i32>(num_shared) * rules_.num_units;
    }
    if (fits) {
      TakeChunks(&t.arrays, t.num_chunks);
      SortChunks(&t);
    }
    if (thread_ == 0) shared_.trials[r] = t;
    __syncthreads();
    return {};
  }

  __device__ void TakeTrial(i32 r) {
    if constexpr (kGeneral) makespan_ = shared_.makespan[r];
    chosen_ = shared_.trials[r].arrays;
    num_chunks_ = shared_.trials[r].num_chunks;
  }

  Shared& shared_;

  PlanTrial chosen_ = {};
  i32 num_chunks_ = 0;
  i64 makespan_ = 0;  // with kGeneral
};

}  // namespace jax_attn
