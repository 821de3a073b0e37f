// Stream-K in the device planner: all tiles in one line, cut into equal ranges, one for each queue.
#pragma once

#include "cuda/plan/trials.cuh"
#include "plan/rules/cuts.h"
#include "plan/rules/order.h"

namespace jax_attn {

// Borders of a chunk in a schedule by ranges.
__device__ __forceinline__ i32 RangeBegin(const PlanChunks& chunks, const i32* inner,
                                          const QueryTile& t, i32 i, i32 split) {
  return split == 0 ? t.kv_begin : inner[chunks.chunk_base[i] - i + split - 1];
}
__device__ __forceinline__ i32 RangeEnd(const PlanChunks& chunks, const i32* inner,
                                        const QueryTile& t, i32 i, i32 split, i32 splits) {
  return split + 1 == splits ? t.kv_end : inner[chunks.chunk_base[i] - i + split];
}

// Stream-K for tiles of one size that share nothing. If the fullest queue has less than `makespan`,
// it replaces the schedule and returns true.
template <class Context>
__device__ __forceinline__ bool TryRanges(Context& c, const typename Context::Tiles& tiles,
                                          i64 makespan, PlanSchedule* schedule) {
  constexpr i32 kNumThreads = Context::kNumThreads;
  const PlanRules& rules = c.rules;
  const i32 num_tiles = tiles.num_tiles;
  const int thread = c.thread();
  PlanChunks chunks = TakeTileArrays(c, num_tiles);
  i64* places = c.template Take<i64>(num_tiles + 1);
  const i64 line = c.cta.Prefix(num_tiles, places, [&](i32 i) {
    const QueryTile& t = tiles.tiles[i];
    return ItemCost(rules, t, t.kv_end - t.kv_begin, false);
  });
  const RangeCut ranges = MakeRangeCut(rules, tiles.tiles[0], line);
  // Borders 1 to num_ranges - 1 are entries 0 to n - 1 here.
  const i32 n = ranges.num_ranges - 1;
  i32* tile_of = c.template Take<i32>(n + 1);  // tile of each border
  i32* positions = c.template Take<i32>(n + 1);
  i32* cut_tiles = c.template Take<i32>(n + 1);
  i32* num_inner = c.template Take<i32>(n + 1);
  i32* inner = c.template Take<i32>(n + 1);

  // First guess: every border has a tile of its own. Then it uses the tiles of the first guess.
#pragma unroll 1
  for (i32 b = thread; b <= n; b += kNumThreads) cut_tiles[b] = b;
  __syncthreads();
#pragma unroll 1
  for (int guess = 0; guess < 2; ++guess) {
    const i32 all_cut_tiles = cut_tiles[n];
#pragma unroll 1
    for (i32 b = thread; b < n; b += kNumThreads) {
      const i64 place = BorderOffset(ranges, b + 1, cut_tiles[b + 1], all_cut_tiles);
      tile_of[b] = LastAtMost(places, num_tiles, place);
      positions[b] = BorderPosition(rules, tiles.tiles[tile_of[b]], places[tile_of[b]], place);
    }
    __syncthreads();
    if (guess > 0) break;
    c.cta.Prefix(n, cut_tiles,
                 [&](i32 b) { return static_cast<i64>(b == 0 || tile_of[b] != tile_of[b - 1]); });
  }
  // Borders that cut a tile, each once.
  auto is_inner = [&](i32 b) {
    const QueryTile& t = tiles.tiles[tile_of[b]];
    if (positions[b] <= t.kv_begin || positions[b] >= t.kv_end) return false;
    return b == 0 || tile_of[b] != tile_of[b - 1] || positions[b] != positions[b - 1];
  };
  c.cta.Prefix(n, num_inner, [&](i32 b) { return static_cast<i64>(is_inner(b)); });
#pragma unroll 1
  for (i32 b = thread; b < n; b += kNumThreads) {
    if (num_inner[b + 1] > num_inner[b]) inner[num_inner[b]] = positions[b];
  }
  // Entries of `tile_of` below i.
  auto borders_before = [&](i32 i) {
    return n == 0 || tile_of[0] >= i ? 0 : LastAtMost(tile_of, n, i - 1) + 1;
  };
#pragma unroll 1
  for (i32 i = thread; i <= num_tiles; i += kNumThreads) {
    chunks.chunk_base[i] = i + num_inner[borders_before(i)];
  }
  __syncthreads();
  const i32 num_chunks = chunks.chunk_base[num_tiles];
  TakeChunkArrays(c, num_chunks, &chunks);

  // The queue of a chunk: the number of borders at or before its beginning.
  const i64 num_split = c.cta.Sum(num_chunks, [&](i32 k) {
    const i32 i = TileOfChunk(tiles, chunks, num_chunks, k);
    const i32 split = k - chunks.chunk_base[i];
    const i32 splits = chunks.NumChunksOf(i);
    const QueryTile& t = tiles.tiles[i];
    const i32 begin = RangeBegin(chunks, inner, t, i, split);
    i32 queue = borders_before(i);
#pragma unroll 1
    while (queue < n && tile_of[queue] == i && positions[queue] <= begin) ++queue;
    chunks.slots[k].queue = queue;
    const i64 kv_tokens = RangeEnd(chunks, inner, t, i, split, splits) - begin;
    chunks.keys[k] = ChunkKey(0, k);
    chunks.costs[k] = ItemCost(rules, t, kv_tokens, splits > 1);
    return static_cast<i64>(splits > 1);
  });
#pragma unroll 1
  for (i32 q = thread; q < rules.num_queues; q += kNumThreads) chunks.filled[q] = 0;
  __syncthreads();
  // The first chunk of each queue, kept in `loads` for the others.
#pragma unroll 1
  for (i32 k = thread; k < num_chunks; k += kNumThreads) {
    const i32 queue = chunks.slots[k].queue;
    if (k == 0 || chunks.slots[k - 1].queue != queue) chunks.loads[queue] = k;
  }
  __syncthreads();
#pragma unroll 1
  for (i32 k = thread; k < num_chunks; k += kNumThreads) {
    const i32 queue = chunks.slots[k].queue;
    chunks.slots[k].place = k - static_cast<i32>(chunks.loads[queue]);
    const bool last = k == num_chunks - 1 || chunks.slots[k + 1].queue != queue;
    if (last) chunks.filled[queue] = k - static_cast<i32>(chunks.loads[queue]) + 1;
  }
  __syncthreads();
  bool lighter = true;
  i64 fullest = 0;
#pragma unroll 1
  for (i32 q = thread; q < rules.num_queues; q += kNumThreads) {
    i64 load = 0;
#pragma unroll 1
    for (i32 j = 0; j < chunks.filled[q]; ++j) {
      load += chunks.costs[static_cast<i32>(chunks.loads[q]) + j];
    }
    lighter &= load < makespan;
    if constexpr (Context::kGeneral) fullest = Largest(fullest, load);
  }
  const bool rejected = num_split * rules.num_kv_heads > rules.max_balanced_partials;
  if (__syncthreads_or(!lighter) || rejected) return false;
  if constexpr (Context::kGeneral) fullest = c.cta.MostOf(fullest);
  *schedule = {chunks, num_chunks, fullest, inner};
  return true;
}

}  // namespace jax_attn
