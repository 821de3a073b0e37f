// The planner inside the graph. Follows plan/rules.h and writes the bits that plan/schedule.cc
// does.
//
// CTA 0 schedules; the others check page ids and copy them into the plan, which is most of its
// bytes. The CTA that finishes last writes the header. A batch that the host planner would refuse
// leaves a faulty plan: kFaultyPlanMagic, no items, and the fault in the header.
//
// Everything is done by all threads at once but one thing: each chunk goes to the queue that has
// the least then. All kv heads have the same lengths, so that is a few hundred chunks for the 33
// queues of a head (H200), held in the registers of one warp.
#pragma once

#include "cuda/any/plan_cta.cuh"
#include "cuda/any/prefix.cuh"
#include "cuda/common/math.cuh"
#include "plan/rules.h"

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

// kGeneral: prefixes may be told, PlanParams::levels, and the schedule may be kAuto.
template <class Traits, bool kGeneral>
class PlanScheduler : PlanCta<Traits::kNumThreads> {
  using Cta = PlanCta<Traits::kNumThreads>;

 public:
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

  __device__ PlanScheduler(const PlanParams& p, unsigned char* smem)
      : Cta(smem, kArenaBytes, p.scratch, reinterpret_cast<Shared*>(smem + kArenaBytes)->warp_sums),
        p_(p),
        rules_(p.rules),
        in_(p.inputs),
        shared_(*reinterpret_cast<Shared*>(smem + kArenaBytes)) {}

  // Writes everything but the header's magic, version and max_page_id.
  __device__ void Run() {
    PlanFault fault = Check();
    if constexpr (kGeneral) {
      if (fault.code == kNoFault) fault = CheckLevels();
    }
    PlanCounts counts = {};
    if (fault.code == kNoFault) {
      CopyLengths();
      MakeTiles();
      if constexpr (kGeneral) {
        fault = ChooseGeneral();
      } else {
        fault = Choose();
      }
      if (fault.code == kNoFault) counts = Count();
      if (fault.code == kNoFault) fault = CheckCapacities(rules_, counts);
      if (fault.code == kNoFault) Write(counts);
    }
    if (thread_ == 0) {
      PlanHeader& h = *p_.header;
      h.fault = fault.code;
      h.fault_at = fault.at;
      h.fault_got = fault.got;
      h.fault_expected = fault.expected;
      h.batch_size = static_cast<i32>(in_.batch_size);
      h.nnz_qo = in_.qo_indptr[in_.batch_size];
      h.nnz_kv = in_.kv_indptr[in_.batch_size];
      h.num_items = static_cast<i32>(counts.num_items);
      h.num_merge_groups = static_cast<i32>(counts.num_merge_groups);
      h.num_partials = static_cast<i32>(counts.num_partials);
      h.num_partial_rows = static_cast<i32>(counts.num_partial_rows);
      if constexpr (kGeneral) h.num_shared_tokens = num_shared_tokens_;
    }
  }

 private:
  using Cta::FirstFault;
  using Cta::kNumThreads;
  using Cta::kNumWarps;
  using Cta::MostOf;
  using Cta::Prefix;
  using Cta::Sort;
  using Cta::SortSize;
  using Cta::Sum;
  using Cta::thread_;
  using Cta::WarpMax64;

  // --- requests and tiles ---

  __device__ PlanFault Check() {
    PlanFault fault = CheckBatch(rules_, in_);
#pragma unroll 1
    for (int every = kNumThreads;; every = 1) {  // if one thread finds a fault, all find the first
#pragma unroll 1
      for (i32 r = every > 1 ? thread_ : 0; r < in_.batch_size; r += every) {
        const PlanFault f = CheckRequest(rules_, in_, r);
        if (IsBefore(f, fault)) fault = f;
      }
      if (!__syncthreads_or(fault.code != kNoFault) || every == 1) return fault;
    }
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

  // --- schedules ---

  // With shared prefixes longest_cost is a divisor, that of CutSharedTile.
  __device__ TileCut CutOf(i32 longest_cost, i32 i) const {
    if constexpr (kGeneral) {
      if (sharing_ != nullptr) {
        return SharedCut(longest_cost, i);
      }
    }
    return CutTile(rules_, longest_cost, tiles_[i]);
  }

  __device__ __noinline__ TileCut SharedCut(i32 divisor, i32 i) const {
    const i64 span_cost =
        sharing_[i].shared() ? shared_tiling_.shared_span_cost : shared_tiling_.span_cost;
    return CutSharedTile(rules_, tiles_[i], sharing_[i], span_cost, divisor);
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

  // By one warp: every chunk, once for each unit, goes to the least loaded queue, the first of
  // equal ones. Returns the load of the fullest.
  __device__ i64 Deal(const PlanTrial& trial, i32 num_chunks, i64 total_cost) {
    // A queue that takes a chunk had no more than the mean; another one may be asked what it would
    // have.
    i64 most = 0;
#pragma unroll 1
    for (i32 k = thread_ % kWarpSize; k < num_chunks; k += kWarpSize) {
      most = Largest(most, trial.costs[k]);
    }
    most = WarpMax64(most);
    const i64 queues = rules_.num_queues;
    i32 bits = 0;
#pragma unroll 1
    while (1 << bits < queues) ++bits;
    if (bits < 16 && total_cost + (2 * most + 1) * queues < queues << (32 - bits)) {
      if (rules_.num_queues <= 2 * kWarpSize) return DealInRegisters<2>(trial, num_chunks, bits);
      if (rules_.num_queues <= 10 * kWarpSize) return DealInRegisters<10>(trial, num_chunks, bits);
    }
    return DealInMemory(trial, num_chunks);
  }

  // Code is read from memory, too: once for flat schedules and for those that share.
  __device__ i64 DealTrial(const Trial& t) {
    if constexpr (kGeneral) return DealOnce(t);
    return Deal(t.arrays, t.num_chunks, t.cost);
  }
  __device__ __noinline__ i64 DealOnce(const Trial& t) {
    return Deal(t.arrays, t.num_chunks, t.cost);
  }

  // A lane holds queues lane, lane + 32, ... as load << bits | queue, so that the least key is the
  // queue that takes the next chunk. Many take theirs at once: with the queues in order, one that
  // has less than every queue would have after taking a chunk (the first the first, the second the
  // second, ...) takes its own whatever the others do. Where that are few, one after the other.
  template <int kQueues>
  __device__ i64 DealInRegisters(const PlanTrial& trial, i32 num_chunks, i32 bits) {
    constexpr i32 kFew = 4, kAlone = 16;
    const int lane = thread_ % kWarpSize;
    const i32 num_queues = rules_.num_queues;
    const i32 num_slots = num_chunks * rules_.num_units;
    u32* shown = reinterpret_cast<u32*>(trial.loads);  // [num_queues, to a multiple of 4] all keys
    u32 keys[kQueues];
    i32 filled[kQueues];
#pragma unroll
    for (int j = 0; j < kQueues; ++j) {
      const i32 queue = lane + j * kWarpSize;
      keys[j] = queue < num_queues ? static_cast<u32>(queue) : ~0u;
      filled[j] = 0;
    }
    auto cost_of = [&](i32 slot) {
      return static_cast<u32>(trial.costs[SourceOf(trial, num_chunks, slot).key]) << bits;
    };
    auto take = [&](int j, i32 slot, u32 cost) {
      trial.slots[slot] = {lane + j * kWarpSize, filled[j]++};
      keys[j] += cost;
    };
    i32 next = 0;
#pragma unroll 1
    while (next < num_slots) {
      const i32 last = Min(num_queues, num_slots - next);
#pragma unroll
      for (int j = 0; j < kQueues; ++j) {
        if (lane + j * kWarpSize < (num_queues + 3) / 4 * 4) shown[lane + j * kWarpSize] = keys[j];
      }
      __syncwarp();
      i32 rank[kQueues] = {};
#pragma unroll kQueues <= 2 ? 3 : 1
      for (i32 q = 0; q < num_queues; q += 4) {
        const uint4 four = *reinterpret_cast<const uint4*>(shown + q);
#pragma unroll
        for (int j = 0; j < kQueues; ++j) {
          rank[j] += (four.x < keys[j]) + (four.y < keys[j]);
          rank[j] += (four.z < keys[j]) + (four.w < keys[j]);
        }
      }
      u32 costs[kQueues], least = ~0u;
#pragma unroll
      for (int j = 0; j < kQueues; ++j) {
        costs[j] = rank[j] < last ? cost_of(next + rank[j]) : 0;
        if (rank[j] < last && keys[j] + costs[j] < least) least = keys[j] + costs[j];
      }
      least = WarpMin(least);
      i32 taken = 0;
#pragma unroll
      for (int j = 0; j < kQueues; ++j) {
        const bool takes = rank[j] < last && (keys[j] < least || rank[j] == 0);
        if (takes) take(j, next + rank[j], costs[j]);
        taken += __popc(__ballot_sync(kFullWarp, takes));
      }
      next += taken;
      if (taken > kFew) continue;
      const i32 count = Min(kAlone, num_slots - next);
      const u32 mine = lane < count ? cost_of(next + lane) : 0;
#pragma unroll 1
      for (i32 i = 0; i < count; ++i) {
        const u32 cost = __shfl_sync(kFullWarp, mine, i);
        u32 first = keys[0];
#pragma unroll
        for (int j = 1; j < kQueues; ++j) first = first < keys[j] ? first : keys[j];
        first = WarpMin(first);
#pragma unroll
        for (int j = 0; j < kQueues; ++j) {
          if (keys[j] == first) take(j, next + i, cost);
        }
      }
      next += count;
    }
    u32 fullest = 0;
#pragma unroll
    for (int j = 0; j < kQueues; ++j) {
      const i32 queue = lane + j * kWarpSize;
      if (queue >= num_queues) continue;
      trial.filled[queue] = filled[j];
      fullest = fullest > keys[j] ? fullest : keys[j];
    }
    return WarpMax(fullest) >> bits;
  }

  // Any loads, any number of queues.
  __device__ i64 DealInMemory(const PlanTrial& trial, i32 num_chunks) {
    const int lane = thread_ % kWarpSize;
    const i32 each = static_cast<i32>(CeilDivide(rules_.num_queues, kWarpSize));
    const i32 begin = Min(lane * each, rules_.num_queues);
    const i32 end = Min(begin + each, rules_.num_queues);
#pragma unroll 1
    for (i32 q = begin; q < end; ++q) trial.loads[q] = trial.filled[q] = 0;
    const i32 num_slots = num_chunks * rules_.num_units;
#pragma unroll 1
    for (i32 s = 0; s < num_slots; ++s) {
      const i64 cost = trial.costs[SourceOf(trial, num_chunks, s).key];
      u64 least = ~0ull;
      i32 queue = 0;
#pragma unroll 1
      for (i32 q = begin; q < end; ++q) {
        if (static_cast<u64>(trial.loads[q]) >= least) continue;
        least = static_cast<u64>(trial.loads[q]);
        queue = q;
      }
      const u32 high = WarpMin(static_cast<u32>(least >> 32));
      const bool near = least >> 32 == high;
      const u32 low = WarpMin(near ? static_cast<u32>(least) : ~0u);
      const u32 winners = __ballot_sync(kFullWarp, near && static_cast<u32>(least) == low);
      if ((winners >> lane & 1) != 0 && (winners & ((1u << lane) - 1)) == 0) {
        trial.slots[s] = {queue, trial.filled[queue]++};
        trial.loads[queue] += cost;
      }
    }
    u64 fullest = 0;
#pragma unroll 1
    for (i32 q = begin; q < end; ++q) {
      fullest = static_cast<u64>(Largest(static_cast<i64>(fullest), trial.loads[q]));
    }
    return WarpMax64(static_cast<i64>(fullest));
  }

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

  // Decides on a schedule, as WriteSchedule and Rebalance in plan/schedule.cc do: the first trial
  // if it will do, else ranges, or all retries of Algorithm 1 at once, a warp each.
  __device__ PlanFault Choose() {
    i32 num_trials = 1;
    i64 total_cost = 0;
#pragma unroll 1
    for (i32 first = 0; first < num_trials; ++first) {
#pragma unroll 1
      for (i32 r = first; r < num_trials; ++r) {
        if (const PlanFault f = MakeTrial(r); f.code != kNoFault) return f;
      }
#pragma unroll 1
      for (i32 r = first + thread_ / kWarpSize; r < num_trials; r += kNumWarps) {
        const Trial& t = shared_.trials[r];
        const i64 makespan = t.num_chunks < 0 ? 0 : DealTrial(t);
        if (thread_ % kWarpSize == 0) shared_.makespan[r] = makespan;
      }
      __syncthreads();
      if (first > 0) break;
      total_cost = shared_.trials[0].cost;
      if (rules_.schedule != kBalanced ||
          IsBalanced(shared_.makespan[0], total_cost, rules_.num_queues)) {
        break;
      }
      if (rules_.num_units == 1 && !several_heights_) {
        TakeTrial(0);
        TryRanges(shared_.makespan[0]);
        return {};
      }
      num_trials = 1 + kNumRetries;
    }
    TakeTrial(ChooseTrial(num_trials, total_cost));
    return {};
  }

  // Of the trials up to the first that is balanced or has too many splits.
  __device__ i32 ChooseTrial(i32 num_trials, i64 total_cost) const {
    i32 best = 0;
#pragma unroll 1
    for (i32 r = 1; r < num_trials && shared_.trials[r].num_chunks >= 0; ++r) {
      if (IsWorthMoreSplits(shared_.makespan[r], shared_.makespan[best])) best = r;
      if (IsBalanced(shared_.makespan[best], total_cost, rules_.num_queues)) break;
    }
    return best;
  }

  __device__ void TakeTrial(i32 r) {
    if constexpr (kGeneral) makespan_ = shared_.makespan[r];
    chosen_ = shared_.trials[r].arrays;
    num_chunks_ = shared_.trials[r].num_chunks;
    longest_cost_ = shared_.trials[r].longest_cost;
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

  // --- shared prefixes, as WriteSchedule in plan/schedule.cc decides ---

  __device__ PlanFault ChooseGeneral() {
    const QueryTile* flat = tiles_;
    const i32 num_flat = num_tiles_;
    PrefixForest<Cta> forest(*this, p_, flat, num_flat, first_tile_);
    bool shares = rules_.schedule != kNoSplit && forest.Share(&shared_tiling_);
    PlanTrial chosen = {};
    i32 num_chunks = 0, divisor = 0;
    i64 makespan = 0;
    if (shares) {
      const i64 flat_cost = Sum(
          num_flat, [&](i32 i) { return ItemCost(rules_, flat[i], 0, false) + SpanCost(flat[i]); });
      UseSharedTiles();
      if (const PlanFault f = ChooseShared(&shares); f.code != kNoFault) return f;
      if (shares && makespan_ <= flat_cost * rules_.num_units / rules_.num_queues) return {};
      chosen = chosen_;
      num_chunks = num_chunks_;
      divisor = longest_cost_;
      makespan = makespan_;
      tiles_ = flat;
      num_tiles_ = num_flat;
      sharing_ = nullptr;
    }
    const PlanFault f = Choose();
    if (f.code == kNoFault && rules_.fewer_splits) TryFewerSplits();
    if (!shares || (f.code == kNoFault && makespan_ < makespan)) return f;
    UseSharedTiles();
    chosen_ = chosen;
    num_chunks_ = num_chunks;
    longest_cost_ = divisor;
    by_ranges_ = false;
    return {};
  }

  // As in plan/schedule.cc.
  __device__ void TryFewerSplits() {
#pragma unroll 1
    for (i32 r = 0; r < kNumFewerSplits && num_chunks_ > num_tiles_; ++r) {
      Trial t = {};
      t.longest_cost = LongestOfFewer(rules_, span_cost_, r);
      t.arrays = TakeTiles();
      t.num_chunks = static_cast<i32>(CutByLength(t.arrays, t.longest_cost));
      TakeChunks(&t.arrays, t.num_chunks);
      t.cost = SortChunks(t.arrays, t.num_chunks, t.longest_cost);
      if (thread_ == 0) shared_.trials[r] = t;
      __syncthreads();
      if (thread_ < kWarpSize) {
        const i64 makespan = DealTrial(shared_.trials[r]);
        if (thread_ == 0) shared_.makespan[r] = makespan;
      }
      __syncthreads();
      if (shared_.makespan[r] >= makespan_) continue;
      TakeTrial(r);
      by_ranges_ = false;
    }
  }

  __device__ void UseSharedTiles() {
    tiles_ = shared_tiling_.tiles;
    num_tiles_ = shared_tiling_.num_tiles;
    sharing_ = shared_tiling_.sharing;
  }

  __device__ PlanFault ChooseShared(bool* found) {
    const i32 num_trials = rules_.schedule == kBalanced ? kNumSharedTrials : 1;
#pragma unroll 1
    for (i32 r = 0; r < num_trials; ++r) {
      if (const PlanFault f = MakeSharedTrial(r); f.code != kNoFault) return f;
    }
#pragma unroll 1
    for (i32 r = thread_ / kWarpSize; r < num_trials; r += kNumWarps) {
      const Trial& t = shared_.trials[r];
      const i64 makespan = t.num_chunks < 0 ? 0 : DealTrial(t);
      if (thread_ % kWarpSize == 0) shared_.makespan[r] = makespan;
    }
    __syncthreads();
    i32 best = -1;
#pragma unroll 1
    for (i32 r = 0; r < num_trials; ++r) {
      if (shared_.trials[r].num_chunks < 0) continue;
      if (best < 0 || shared_.makespan[r] < shared_.makespan[best]) best = r;
    }
    *found = best >= 0;
    if (*found) TakeTrial(best);
    __syncthreads();  // the trials of a flat schedule come to the same place
    return {};
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

  // Stream-K. Replaces the chosen schedule if its fullest queue has less than `makespan`.
  __device__ void TryRanges(i64 makespan) {
    PlanTrial trial = TakeTiles();
    i64* places = this->template Take<i64>(num_tiles_ + 1);
    const i64 line = Prefix(num_tiles_, places, [&](i32 i) {
      const QueryTile& t = tiles_[i];
      return ItemCost(rules_, t, t.kv_end - t.kv_begin, false);
    });
    const RangeCut ranges = MakeRangeCut(rules_, tiles_[0], line);
    // Borders, 1 to num_ranges - 1, are entries 0 to n - 1 here.
    const i32 n = ranges.num_ranges - 1;
    i32* tiles = this->template Take<i32>(n + 1);
    i32* positions = this->template Take<i32>(n + 1);
    i32* cut_tiles = this->template Take<i32>(n + 1);
    i32* num_inner = this->template Take<i32>(n + 1);
    inner_ = this->template Take<i32>(n + 1);

    // First guess: every border in a tile of its own. Then with the tiles of the first guess.
#pragma unroll 1
    for (i32 b = thread_; b <= n; b += kNumThreads) cut_tiles[b] = b;
    __syncthreads();
#pragma unroll 1
    for (int guess = 0; guess < 2; ++guess) {
      const i32 all_cut_tiles = cut_tiles[n];
#pragma unroll 1
      for (i32 b = thread_; b < n; b += kNumThreads) {
        const i64 place = BorderPlace(ranges, b + 1, cut_tiles[b + 1], all_cut_tiles);
        tiles[b] = LastAtMost(places, num_tiles_, place);
        positions[b] = BorderPosition(rules_, tiles_[tiles[b]], places[tiles[b]], place);
      }
      __syncthreads();
      if (guess > 0) break;
      Prefix(n, cut_tiles,
             [&](i32 b) { return static_cast<i64>(b == 0 || tiles[b] != tiles[b - 1]); });
    }
    // Those that cut a tile, each once.
    auto is_inner = [&](i32 b) {
      const QueryTile& t = tiles_[tiles[b]];
      if (positions[b] <= t.kv_begin || positions[b] >= t.kv_end) return false;
      return b == 0 || tiles[b] != tiles[b - 1] || positions[b] != positions[b - 1];
    };
    Prefix(n, num_inner, [&](i32 b) { return static_cast<i64>(is_inner(b)); });
#pragma unroll 1
    for (i32 b = thread_; b < n; b += kNumThreads) {
      if (num_inner[b + 1] > num_inner[b]) inner_[num_inner[b]] = positions[b];
    }
    // Entries of `tiles` below i.
    auto borders_before = [&](i32 i) {
      return n == 0 || tiles[0] >= i ? 0 : LastAtMost(tiles, n, i - 1) + 1;
    };
#pragma unroll 1
    for (i32 i = thread_; i <= num_tiles_; i += kNumThreads) {
      trial.chunk_base[i] = i + num_inner[borders_before(i)];
    }
    __syncthreads();
    const i32 num_chunks = trial.chunk_base[num_tiles_];
    TakeChunks(&trial, num_chunks);

    // Queue of a chunk: the borders at or before its begin.
    const i64 num_split = Sum(num_chunks, [&](i32 c) {
      const i32 i = TileOfChunk(trial, num_chunks, c);
      const i32 split = c - trial.chunk_base[i];
      const i32 splits = trial.chunk_base[i + 1] - trial.chunk_base[i];
      const QueryTile& t = tiles_[i];
      const i32 begin = RangeBegin(trial, t, i, split);
      i32 queue = borders_before(i);
#pragma unroll 1
      while (queue < n && tiles[queue] == i && positions[queue] <= begin) ++queue;
      trial.slots[c].queue = queue;
      const i64 kv_tokens = RangeEnd(trial, t, i, split, splits) - begin;
      trial.keys[c] = ChunkKey(0, c);
      trial.costs[c] = ItemCost(rules_, t, kv_tokens, splits > 1);
      return static_cast<i64>(splits > 1);
    });
#pragma unroll 1
    for (i32 q = thread_; q < rules_.num_queues; q += kNumThreads) trial.filled[q] = 0;
    __syncthreads();
    // The first chunk of a queue, kept in `loads` for the others.
#pragma unroll 1
    for (i32 c = thread_; c < num_chunks; c += kNumThreads) {
      const i32 queue = trial.slots[c].queue;
      if (c == 0 || trial.slots[c - 1].queue != queue) trial.loads[queue] = c;
    }
    __syncthreads();
#pragma unroll 1
    for (i32 c = thread_; c < num_chunks; c += kNumThreads) {
      const i32 queue = trial.slots[c].queue;
      trial.slots[c].place = c - static_cast<i32>(trial.loads[queue]);
      const bool last = c == num_chunks - 1 || trial.slots[c + 1].queue != queue;
      if (last) trial.filled[queue] = c - static_cast<i32>(trial.loads[queue]) + 1;
    }
    __syncthreads();
    bool lighter = true;
    i64 fullest = 0;
#pragma unroll 1
    for (i32 q = thread_; q < rules_.num_queues; q += kNumThreads) {
      i64 load = 0;
#pragma unroll 1
      for (i32 k = 0; k < trial.filled[q]; ++k) {
        load += trial.costs[static_cast<i32>(trial.loads[q]) + k];
      }
      lighter &= load < makespan;
      if constexpr (kGeneral) fullest = Largest(fullest, load);
    }
    const bool rejected = num_split * rules_.num_kv_heads > rules_.max_balanced_partials;
    if (__syncthreads_or(!lighter) || rejected) return;
    if constexpr (kGeneral) makespan_ = MostOf(fullest);
    chosen_ = trial;
    num_chunks_ = num_chunks;
    by_ranges_ = true;
  }

  // Borders of a chunk of a schedule by ranges.
  __device__ i32 RangeBegin(const PlanTrial& trial, const QueryTile& t, i32 i, i32 split) const {
    return split == 0 ? t.kv_begin : inner_[trial.chunk_base[i] - i + split - 1];
  }
  __device__ i32 RangeEnd(const PlanTrial& trial, const QueryTile& t, i32 i, i32 split,
                          i32 splits) const {
    return split + 1 == splits ? t.kv_end : inner_[trial.chunk_base[i] - i + split];
  }

  // --- results ---

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
    n.num_merge_groups = heads * Prefix(num_tiles_, groups_before_, [&](i32 i) {
                           return static_cast<i64>(SplitsOf(chosen_, i) > 0);
                         });
    n.num_partials =
        heads * Prefix(num_tiles_, partials_before_, [&](i32 i) { return SplitsOf(chosen_, i); });
    n.num_partial_rows = heads * Prefix(num_tiles_, rows_before_, [&](i32 i) {
                           return SplitsOf(chosen_, i) * tiles_[i].qo_len * rules_.group_size;
                         });
    return n;
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
                                    return static_cast<i64>(own_splits(i) > 0);
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

  __device__ void Write(const PlanCounts& counts) {
    if constexpr (kGeneral) {
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
      group[1] = Words(begin, 0, 0, 0);
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
      uint4* group = reinterpret_cast<uint4*>(p_.merge_groups + NumUnitGroups() +
                                              heads * groups_before_[i] + head);
      group[0] = Words(t.qo_begin, t.qo_len, head, splits);
      group[1] = Words(partials_begin, 0, 0, 0);
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
    // As in plan/schedule.cc: when heights mix, the second half of the grid begins with small
    // tiles.
    bool both_ends = several_heights_;
    if constexpr (kGeneral) both_ends = both_ends && sharing_ == nullptr;
    const i32 first_backwards = both_ends ? rules_.num_ctas / 2 : rules_.num_ctas;
    const i32 each = rules_.heads_per_unit;
    const i32 num_slots = num_chunks_ * rules_.num_units;
#pragma unroll 1
    for (i32 s = thread_; s < num_slots; s += kNumThreads) {
      const SlotSource source = SourceOf(chosen_, num_chunks_, s);
      const i32 chunk = ChunkOfKey(chosen_.keys[source.key]);
      const i32 unit = source.unit;
      const PlanSlot slot = chosen_.slots[s];
      const i32 i = TileOfChunk(chosen_, num_chunks_, chunk);
      const QueryTile& t = tiles_[i];
      const i32 split = chunk - chosen_.chunk_base[i];
      const i32 splits = chosen_.chunk_base[i + 1] - chosen_.chunk_base[i];
      i32 begin, end;
      if (by_ranges_) {
        begin = RangeBegin(chosen_, t, i, split);
        end = RangeEnd(chosen_, t, i, split, splits);
      } else {
        const TileCut cut = CutOf(longest_cost_, i);
        begin = cut.Begin(t, split);
        end = cut.End(t, split);
      }
      const i32 rows = t.qo_len * rules_.group_size;
      i32 first_row = 0, first_group = 0;
      if (splits > 1) {
        first_row = static_cast<i32>(rules_.num_kv_heads * rows_before_[i]) + split * rows;
        first_group = rules_.num_kv_heads * groups_before_[i];
      }
      // With shared prefixes: partial states of units, which may be of tiles that are not cut.
      bool partial = splits > 1;
      i32 group_step = 1, num_groups = 1;
      if constexpr (kGeneral) {
        const TileSharing sharing = SharingOf(i);
        if (sharing.partial()) {
          partial = true;
          first_row = static_cast<i32>(rules_.num_kv_heads * rows_before_[i]) + split * rows;
          first_group = sharing.shared() ? sharing.first_unit : sharing.unit;
          group_step = shared_tiling_.num_units;
          num_groups = static_cast<i32>(Largest(1, sharing.num_units));
        } else {
          first_group += NumUnitGroups();
        }
      }
      const i32 filled = chosen_.filled[slot.queue];
      const i32 queues_begin = rules_.num_partitions * chunks_before[slot.queue];
#pragma unroll 1
      for (i32 p = 0; p < rules_.num_partitions; ++p) {
        const i32 cta = slot.queue * rules_.num_partitions + p;
        const i32 place = cta < first_backwards ? slot.place : filled - slot.place - 1;
        const i32 at = (queues_begin + p * filled + place) * each;
#pragma unroll 1
        for (i32 h = 0; h < each; ++h) {
          const i32 head = (p * rules_.num_units + unit) * each + h;
          uint4* item = reinterpret_cast<uint4*>(p_.items + at + h);
          item[0] = Words(t.qo_begin, t.qo_len, head, t.tile);
          item[1] = Words(begin, end, t.kv_base, t.q_pos);
          item[2] = partial ? Words(first_row + head * rows * splits,
                                    first_group + head * group_step, t.request, num_groups)
                            : Words(-1, -1, t.request, 0);
        }
      }
    }
  }

  const PlanParams& p_;
  const PlanRules& rules_;
  const PlanInputs& in_;
  Shared& shared_;

  i32 num_tiles_ = 0;
  const QueryTile* tiles_ = nullptr;  // [num_tiles]
  i64 span_cost_ = 0;
  bool several_heights_ = false;

  PlanTrial chosen_ = {};
  i32 num_chunks_ = 0;
  i32 longest_cost_ = 0;
  bool by_ranges_ = false;
  const i32* first_tile_ = nullptr;  // [batch_size + 1] of each request
  i32* inner_ = nullptr;             // by ranges: the positions that cut a tile, in order

  i32* groups_before_ = nullptr;    // [num_tiles + 1], these three for one kv head
  i32* partials_before_ = nullptr;  // [num_tiles + 1]
  i64* rows_before_ = nullptr;      // [num_tiles + 1]

  // With levels only. sharing: [num_tiles] of the tiles in use; null: a flat schedule.
  const TileSharing* sharing_ = nullptr;
  SharedTiling shared_tiling_ = {};
  i64 makespan_ = 0;  // of the chosen schedule
  i32 num_shared_tokens_ = 0;
  i32* unit_partials_before_ = nullptr;  // [num_units + 1], for one kv head
};

// --- page ids ---

// The request that entry `at` of page_indices belongs to.
__device__ __forceinline__ i32 RequestOfPage(const PlanInputs& in, i32 at) {
  return LastAtMost(in.kv_indptr, static_cast<i32>(in.batch_size), at);
}

// CommonPagesOf, of levels that need not be right.
__device__ __noinline__ CommonPages CommonPagesWithin(const PlanParams& p, i32 request) {
  if (p.levels.num_levels == 0) return {0, 0};
  return CommonPagesOf(p.rules, p.inputs, p.levels, request);
}

// CTAs 1 and on. Until the header is written, max_page_id counts from 1 and `version` holds the
// complement of the first entry that is out of range; 0: none. With levels, so does `reserved` of
// the first that is not the same as in the request before.
template <bool kGeneral>
__device__ __forceinline__ void CopyPages(const PlanParams& p) {
  const PlanInputs& in = p.inputs;
  const i32 batch_size = static_cast<i32>(in.batch_size);
  const i64 limit = PageIdLimit(p.rules);
  const i64 capacity = Least(p.rules.max_kv, in.num_page_indices);
  const i32 count = static_cast<i32>(Largest(0, Least(capacity, in.kv_indptr[batch_size])));
  u32 largest = 0, first_bad = 0;
  const i64 step = 4ll * (gridDim.x - 1) * blockDim.x;
#pragma unroll 1
  for (i64 base = 4ll * ((blockIdx.x - 1) * blockDim.x + threadIdx.x); base < count; base += step) {
    const i32 at = static_cast<i32>(base);
    i32 ids[4];
    const i32 num = Min(4, count - at);
    if (num == 4) {
      const uint4 v = LoadConstant16(in.page_indices + at);
      *reinterpret_cast<uint4*>(p.page_indices + at) = v;
      ids[0] = static_cast<i32>(v.x);
      ids[1] = static_cast<i32>(v.y);
      ids[2] = static_cast<i32>(v.z);
      ids[3] = static_cast<i32>(v.w);
    } else {
#pragma unroll
      for (i32 j = 0; j < 3; ++j) {
        if (j >= num) continue;
        ids[j] = in.page_indices[at + j];
        p.page_indices[at + j] = ids[j];
      }
    }
    if (batch_size == 0) continue;
    i32 request = RequestOfPage(in, at);
    CommonPages common = {};
    if constexpr (kGeneral) common = CommonPagesWithin(p, request);
#pragma unroll
    for (i32 j = 0; j < 4; ++j) {
      if (j >= num) continue;
#pragma unroll 1
      while (request + 1 < batch_size && in.kv_indptr[request + 1] <= at + j) {
        ++request;
        if constexpr (kGeneral) common = CommonPagesWithin(p, request);
      }
      const i64 mine = static_cast<i64>(at) + j - in.kv_indptr[request];
      if (mine < 0 || mine >= NumPages(p.rules, in.kv_lens[request])) continue;
      const u32 id = static_cast<u32>(ids[j]);
      if constexpr (kGeneral) {
        const i64 other = mine < common.num_pages ? in.kv_indptr[common.request] + mine : at + j;
        if (other >= 0 && other < count && in.page_indices[other] != ids[j]) {
          MaxRelaxed(&p.header->reserved, ~static_cast<u32>(at + j));
        }
      }
      if (id < limit) {
        largest = largest > id + 1 ? largest : id + 1;
      } else {
        const u32 complement = ~static_cast<u32>(at + j);
        first_bad = first_bad > complement ? first_bad : complement;
      }
    }
  }
  largest = WarpMax(largest);
  first_bad = WarpMax(first_bad);
  if (threadIdx.x % kWarpSize != 0) return;
  if (largest > 0) MaxRelaxed(&p.header->max_page_id, largest);
  if (first_bad > 0) MaxRelaxed(&p.header->version, first_bad);
}

// --- the kernel ---

template <class Traits, bool kGeneral>
struct PlanBodyOf {
  static constexpr int kNumThreads = Traits::kNumThreads;
  static constexpr int kSmemBytes = Traits::kSmemBytes;
  static constexpr int kMinCtasPerSm = 1;

  __device__ __forceinline__ static void Run(const PlanParams& p) {
    extern __shared__ __align__(128) unsigned char smem[];
    if (blockIdx.x == 0) {
      PlanScheduler<Traits, kGeneral>(p, smem).Run();
    } else {
      CopyPages<kGeneral>(p);
    }
    __syncthreads();
    // `magic` counts arrivals until then.
    const bool last = threadIdx.x == 0 &&
                      AddAcquireRelease(&p.header->magic, 1) == static_cast<i32>(gridDim.x) - 1;
    if (__syncthreads_or(last)) Finish(p);
  }

  __device__ __forceinline__ static void Finish(const PlanParams& p) {
    PlanHeader& h = *p.header;
    PlanFault fault = {};
    if (threadIdx.x == 0) {
      fault = {LoadCoherent(&h.fault), LoadCoherent(&h.fault_at), LoadCoherent(&h.fault_got),
               LoadCoherent(&h.fault_expected)};
      if (const i32 complement = LoadCoherent(&h.version); complement != 0) {
        const i32 at = ~complement;
        const PlanFault page =
            MakeFault(kFaultPageId, at, p.inputs.page_indices[at], RequestOfPage(p.inputs, at));
        if (IsBefore(page, fault)) fault = page;
      }
      if constexpr (kGeneral) {
        if (const i32 complement = LoadCoherent(&h.reserved); complement != 0) {
          const i32 at = ~complement;
          const i32 request = RequestOfPage(p.inputs, at);
          const CommonPages common = CommonPagesWithin(p, request);
          const i32 other = p.inputs.kv_indptr[common.request] + at - p.inputs.kv_indptr[request];
          const PlanFault page = MakeFault(kFaultPrefixPages, at, p.inputs.page_indices[at],
                                           p.inputs.page_indices[other]);
          if (IsBefore(page, fault)) fault = page;
          h.reserved = 0;
        }
      }
    }
    const bool faulty = __syncthreads_or(fault.code != kNoFault);
    if (faulty) {
#pragma unroll 1
      for (i32 cta = threadIdx.x; cta <= p.rules.num_ctas; cta += kNumThreads) {
        p.queue_indptr[cta] = 0;
      }
    }
    if (threadIdx.x != 0) return;
    if (faulty) {
      h = {};
      h.fault = fault.code;
      h.fault_at = fault.at;
      h.fault_got = fault.got;
      h.fault_expected = fault.expected;
      h.max_page_id = -1;
    } else {
      h.max_page_id = static_cast<i32>(static_cast<u32>(LoadCoherent(&h.max_page_id)) - 1);
    }
    h.magic = faulty ? kFaultyPlanMagic : kPlanMagic;
    h.version = kPlanVersion;
  }
};

template <class Traits>
using PlanBody = PlanBodyOf<Traits, false>;
template <class Traits>
using GeneralPlanBody = PlanBodyOf<Traits, true>;

}  // namespace jax_attn
