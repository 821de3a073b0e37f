// Ways to cut the tiles of the device planner: chunks, sorted in the order in which queues take
// them. A trial of tiles is written to its place in shared memory and then dealt.
#pragma once

#include "cuda/plan/context.cuh"
#include "plan/rules/checks.h"
#include "plan/rules/choice.h"
#include "plan/rules/sharing.h"

namespace jax_attn {

// --- arrays ---

template <class Context>
__device__ __forceinline__ PlanChunks TakeTileArrays(Context& c, i32 num_tiles) {
  PlanChunks chunks = {};
  chunks.chunk_base = c.template Take<i32>(num_tiles + 1);
  chunks.cuts = c.template Take<TileCut>(num_tiles);
  chunks.filled = c.template Take<i32>(c.rules.num_queues);
  chunks.loads = c.template Take<i64>(Largest(c.rules.num_queues, Context::kMostCounts / 2));
  return chunks;
}
template <class Context>
__device__ __forceinline__ void TakeChunkArrays(Context& c, i32 num_chunks, i64 num_slots,
                                                PlanChunks* chunks) {
  chunks->keys = c.template Take<u64>(Context::Cta::SortSize(num_chunks));
  chunks->costs = c.template Take<i64>(num_chunks);
  chunks->slots = c.template Take<PlanSlot>(num_slots);
  chunks->weights = c.template Take<u32>(num_slots);
}

// The tile that a chunk is cut from. num_tiles: NumCutTiles.
__device__ __forceinline__ i32 TileOfChunk(i32 num_tiles, const PlanChunks& chunks, i32 num_chunks,
                                           i32 chunk) {
  return num_chunks == num_tiles ? chunk : LastAtMost(chunks.chunk_base, num_tiles, chunk);
}

// The slots of key k: `first` is for head unit 0; those of the other units follow, `step` apart.
struct SlotsOfKey {
  i32 first, step;
};
template <class Tiles>
__device__ __forceinline__ SlotsOfKey SlotsOf(const PlanRules& rules, const Tiles& tiles,
                                              const PlanChunks& chunks, i32 num_chunks, i32 k) {
  const i32 units = rules.num_units;
  if (units == 1 || !IsSectionKey(chunks.keys[k])) return {k * units, 1};
  const i32 chunk = ChunkOfKey(chunks.keys[k]);
  const QueryTile& tile = tiles.tiles[TileOfChunk(tiles.num_tiles, chunks, num_chunks, chunk)];
  const i32 request = tile.request;
  const i32 first = chunks.chunk_base[tiles.first_tile[request]];
  const i32 count = chunks.chunk_base[tiles.first_tile[request + 1]] - first;
  const i32 within = first + count - 1 - chunk;  // the section's last chunk comes first
  const bool last = k - within + count == num_chunks;
  if (last && GoesByWeight(rules, tile.section)) return {k * units, 1};
  return {(k - within) * units + within, count};
}

// Partial states of a tile, for one kv head, and their rows.
template <class Tiles>
__device__ __forceinline__ i64 NumStates(const Tiles& tiles, const PlanChunks& chunks, i32 i) {
  const i64 splits = chunks.NumChunksOf(i);
  return splits > 1 || tiles.SharingOf(i).partial() ? splits : 0;
}
template <class Tiles>
__device__ __forceinline__ i64 StateRows(const PlanRules& rules, const Tiles& tiles,
                                         const PlanChunks& chunks, i32 i) {
  return NumStates(tiles, chunks, i) * tiles.tiles[i].qo_len * rules.group_size;
}

template <class Context>
__device__ __forceinline__ i64 NumSplitChunks(Context& c, const typename Context::Tiles& tiles,
                                              const PlanChunks& chunks) {
  return c.cta.Sum(tiles.num_tiles, [&](i32 i) { return chunks.SplitsOf(i); });
}

// --- cuts ---

template <class Tiles>
__device__ __noinline__ TileCut CutSharedTileOf(const PlanRules& rules, const Tiles& tiles,
                                                i32 trial, i32 i) {
  const TileSharing& sharing = tiles.sharing[i];
  const i64 span_cost = sharing.shared() ? tiles.shared_span_cost : tiles.span_cost;
  return CutSharedTile(rules, tiles.tiles[i], sharing, span_cost, kSharedTrials[trial]);
}

// With shared prefixes longest_cost is the number of a SharedTrial.
template <class Tiles>
__device__ __forceinline__ TileCut CutOf(const PlanRules& rules, const Tiles& tiles,
                                         i64 longest_cost, i32 i) {
  if (tiles.shares()) return CutSharedTileOf(rules, tiles, static_cast<i32>(longest_cost), i);
  return CutTile(rules, longest_cost, tiles.tiles[i]);
}

template <class Tiles>
__device__ __forceinline__ i64 CostOf(const PlanRules& rules, const Tiles& tiles, i32 i,
                                      i64 kv_tokens, i32 num_splits) {
  if (tiles.shares()) {
    return ChunkCost(rules, tiles.tiles[i], tiles.sharing[i], num_splits, kv_tokens);
  }
  return ItemCost(rules, tiles.tiles[i], kv_tokens, num_splits > 1);
}

template <class Context>
__device__ __forceinline__ i64 CutInline(Context& c, const typename Context::Tiles& tiles,
                                         i64 longest_cost, const PlanChunks& chunks) {
  return c.cta.Prefix(tiles.num_tiles, chunks.chunk_base, [&](i32 i) {
    const TileCut cut = CutOf(c.rules, tiles, longest_cost, i);
    chunks.cuts[i] = cut;
    return static_cast<i64>(cut.num_splits);
  });
}
// Code is read from memory, too: one copy serves flat schedules and schedules that share.
template <class Context>
__device__ __noinline__ i64 CutOnce(Context& c, const typename Context::Tiles& tiles,
                                    i64 longest_cost, const PlanChunks& chunks) {
  return CutInline(c, tiles, longest_cost, chunks);
}
// Cuts all tiles and finds their first chunks. Returns the number of chunks.
template <class Context>
__device__ __forceinline__ i64 CutByLength(Context& c, const typename Context::Tiles& tiles,
                                           i64 longest_cost, const PlanChunks& chunks) {
  if constexpr (Context::kGeneral) return CutOnce(c, tiles, longest_cost, chunks);
  return CutInline(c, tiles, longest_cost, chunks);
}

// --- order ---

template <class Context>
__device__ __forceinline__ void SortInline(Context& c, const typename Context::Tiles& tiles,
                                           PlanTrial* t) {
  constexpr i32 kNumThreads = Context::kNumThreads;
  // Short keys have 31 bits.
  constexpr i32 kShortChunkBits = 9;
  constexpr u32 kShortCosts = 1u << (31 - kShortChunkBits), kNoShortKey = 0x7fffffff;
  static_assert(kNumThreads <= 1 << kShortChunkBits, "a short key holds a chunk");
  using Totals = typename Context::Cta::Totals;
  const PlanRules& rules = c.rules;
  const int thread = c.thread();
  const PlanChunks& chunks = t->chunks;
  const i32 num_chunks = t->num_chunks, size = Context::Cta::SortSize(num_chunks);
  // Slots do not exist yet. Their memory holds short keys, if every thread has at most one chunk,
  // else costs.
  const bool few = num_chunks <= kNumThreads;
  u32* short_keys = reinterpret_cast<u32*>(chunks.slots);
  i64* unsorted = reinterpret_cast<i64*>(chunks.slots);
  i64 cost = 0;
  u64 key = 0;
  const Totals totals = c.cta.Total(size, [&](i32 k, Totals* mine) {
    if (k >= num_chunks) {
      chunks.keys[k] = ~0ull;
      if (few && k < (num_chunks + 3) / 4 * 4) short_keys[k] = kNoShortKey;
      return;
    }
    const i32 i = TileOfChunk(tiles.num_tiles, chunks, num_chunks, k);
    const QueryTile& tile = tiles.tiles[i];
    const TileCut cut = chunks.cuts[i];
    const i32 split = k - chunks.chunk_base[i];
    const i64 kv_tokens = cut.End(tile, split) - cut.Begin(tile, split);
    cost = CostOf(rules, tiles, i, kv_tokens, cut.num_splits);
    const bool shared = tiles.SharingOf(i).shared();
    const i32 section = t->by_weight ? 0 : tile.section;
    key = section > 0 ? SectionKey(section, k) : ChunkKey(cost, k, shared);
    chunks.keys[k] = key;
    mine->sum += cost;
    const u32 word = ClampToWord(cost);
    mine->most[0] = static_cast<u32>(Largest(mine->most[0], word));
    if (!few) {
      unsorted[k] = cost;
      return;
    }
    // Short keys have the same order as long as there are no sections, no shared chunks and no high
    // costs.
    const bool fits = section == 0 && !shared && word < kShortCosts;
    mine->most[1] |= !fits;
    short_keys[k] = (kShortCosts - 1 - word) << kShortChunkBits | static_cast<u32>(k);
  });
  t->cost = totals.sum * rules.num_units;
  const i64 longest = totals.most[0];  // if it is clamped, it is still too large for a key
  if (few) {
    i32* counts = reinterpret_cast<i32*>(chunks.weights);
    const i32 place = totals.most[1] == 0 ? c.cta.PlaceOf(short_keys, num_chunks, counts)
                                          : c.cta.PlaceOf(chunks.keys, num_chunks, counts);
    if (thread < num_chunks) {  // the chunk that the thread still holds
      chunks.keys[place] = key;
      chunks.costs[place] = cost;
    }
  } else {
    c.cta.Sort(chunks.keys, size);
#pragma unroll 1
    for (i32 k = thread; k < num_chunks; k += kNumThreads) {
      chunks.costs[k] = unsorted[ChunkOfKey(chunks.keys[k])];
    }
  }
  __syncthreads();
  // A queue that takes a chunk had at most the mean before; for another one it is asked what it
  // would have. A key holds a load and a queue.
  const i64 queues = rules.num_queues;
  i32 bits = 0;
#pragma unroll 1
  while (1 << bits < queues) ++bits;
  const bool fits = queues <= Context::kMostQueues * kWarpSize &&
                    t->cost + (2 * longest + 1) * queues < queues << (31 - bits);
  t->key_bits = fits ? bits : -1;
#pragma unroll 1
  for (i32 k = thread; k < num_chunks; k += kNumThreads) {
    const SlotsOfKey slots = SlotsOf(rules, tiles, chunks, num_chunks, k);
    const u32 weight = fits ? static_cast<u32>(chunks.costs[k]) << bits : static_cast<u32>(k);
#pragma unroll 1
    for (i32 u = 0; u < rules.num_units; ++u) {
      chunks.weights[slots.first + u * slots.step] = weight;
    }
  }
}

template <class Context>
__device__ __noinline__ void SortOnce(Context& c, const typename Context::Tiles& tiles,
                                      PlanTrial* t) {
  SortInline(c, tiles, t);
}
// Cuts t by length and sorts its chunks into slots, heaviest first.
template <class Context>
__device__ __forceinline__ void SortChunks(Context& c, const typename Context::Tiles& tiles,
                                           PlanTrial* t) {
  if constexpr (Context::kGeneral) return SortOnce(c, tiles, t);
  SortInline(c, tiles, t);
}

// --- trials ---

inline constexpr i32 kNoSlot = kMaxInt32;

// Trial r, for all threads.
template <class Context>
__device__ __forceinline__ void Publish(Context& c, i32 r, const PlanTrial& t) {
  if (c.thread() == 0) c.shared.trials[r] = t;
  __syncthreads();
}

// How trial r cuts tiles that share nothing: the first schedule, retries, fewer splits.
template <class Tiles>
__device__ __forceinline__ Retry TrialOf(const PlanRules& rules, const Tiles& tiles, i32 r) {
  if (r >= kFirstOfFewer) {
    return {LongestOfFewer(rules, tiles.span_cost, r - kFirstOfFewer), false, 0};
  }
  const i64 first = FirstLongestCost(rules, tiles.num_tiles, tiles.longest_span_cost,
                                     LongestChunkCost(rules, tiles.span_cost, 2));
  if (r == 0) return {first, false, 0};
  const bool large = HaveLargeStates(tiles.several_tile_sizes, tiles.tiles[0]);
  return RetryOf(rules, tiles.span_cost, first, large, r - 1);
}

// Trial r of Algorithm 1, for tiles that share nothing. than: the makespan that a retry must beat;
// 0: it need not.
template <class Context>
__device__ __forceinline__ PlanFault MakeTrial(Context& c, const typename Context::Tiles& tiles,
                                               i32 r, i64 than) {
  const PlanRules& rules = c.rules;
  PlanTrial t = {};
  t.leaves_empty_from = kNoSlot;
  t.chunks = TakeTileArrays(c, tiles.num_tiles);
  const Retry cut = tiles.num_tiles > 0 ? TrialOf(rules, tiles, r) : Retry{kUncut, false, 0};
  t.by_weight = cut.by_weight;
  t.margin = cut.margin;
  const i64 num_chunks = CutByLength(c, tiles, cut.longest_cost, t.chunks);
  // In balanced schedules scratch can hold any first cut (LongestChunkCost), and retries are
  // counted.
  if (rules.schedule != kBalanced) {
    if (num_chunks >= kMaxChunks) return MakeFault(kFaultChunks, 0, num_chunks);
    const i64 num_items = num_chunks * rules.num_kv_heads;
    if (num_items > rules.max_items) return MakeFault(kFaultItems, 0, num_items);
  }
  t.num_chunks = static_cast<i32>(num_chunks);
  const i64 num_split = r > 0 ? NumSplitChunks(c, tiles, t.chunks) : 0;
  const auto may_win = [&] {
    const i64 fixed =
        (num_chunks - tiles.num_tiles) * rules.item_cost + num_split * rules.split_cost[0];
    const i64 cost = WholeCost(rules, tiles.num_tiles, tiles.span_cost) +
                     fixed * rules.kv_cost[0] * rules.num_units;
    return MayBeWorthMoreSplits(t.margin, cost, rules.num_queues, than);
  };
  if (num_split * rules.num_kv_heads > rules.max_balanced_partials || (than > 0 && !may_win())) {
    t.num_chunks = -1;
  } else {
    TakeChunkArrays(c, t.num_chunks, num_chunks * rules.num_units, &t.chunks);
    SortChunks(c, tiles, &t);
  }
  Publish(c, r, t);
  return {};
}

// kSharedTrials[r], for tiles with shared prefixes.
template <class Context>
__device__ __forceinline__ PlanFault MakeSharedTrial(Context& c,
                                                     const typename Context::Tiles& tiles, i32 r) {
  const PlanRules& rules = c.rules;
  PlanTrial t = {};
  t.chunks = TakeTileArrays(c, tiles.num_tiles);
  const i64 num_chunks = CutByLength(c, tiles, r, t.chunks);
  bool fits = num_chunks < kMaxChunks;
  if (rules.schedule != kBalanced) {
    if (fits && num_chunks * rules.num_kv_heads > rules.max_items) {
      return MakeFault(kFaultItems, 0, num_chunks * rules.num_kv_heads);
    }
  } else {
    const i64 heads = rules.num_kv_heads;
    const i64 num_rows =
        c.cta.Sum(tiles.num_tiles, [&](i32 i) { return StateRows(rules, tiles, t.chunks, i); });
    fits = fits && NumSplitChunks(c, tiles, t.chunks) * heads <= rules.max_balanced_partials &&
           num_rows * heads <= MaxSharedRows(rules);
  }
  t.num_chunks = fits ? static_cast<i32>(num_chunks) : -1;
  t.leaves_empty_from = kNoSlot;
  if (rules.schedule == kBalanced && kSharedTrials[r].leaves_empty) {
    const i64 num_shared = c.cta.Sum(tiles.num_tiles, [&](i32 i) {
      return tiles.SharingOf(i).shared() ? i64{t.chunks.cuts[i].num_splits} : i64{0};
    });
    t.leaves_empty_from = static_cast<i32>(num_shared) * rules.num_units;
  }
  if (fits) {
    TakeChunkArrays(c, t.num_chunks, num_chunks * rules.num_units, &t.chunks);
    SortChunks(c, tiles, &t);
  }
  Publish(c, r, t);
  return {};
}

// Trial r after it was dealt.
template <class Context>
__device__ __forceinline__ PlanSchedule ScheduleOf(const Context& c, i32 r) {
  const PlanTrial& t = c.shared.trials[r];
  return {t.chunks, t.num_chunks, c.shared.makespan[r], nullptr, t.by_weight};
}

}  // namespace jax_attn
