// Stream-K in the device planner: all tiles in one line, cut into ranges of equal cost, one for
// each queue. The line has each tile once for every head unit.
#pragma once

#include "cuda/plan/trials.cuh"
#include "plan/rules/cuts.h"
#include "plan/rules/order.h"
#include "plan/rules/units.h"

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

// Where ranges begin, for a line of tiles of head units. Each thread tries one capacity.
struct RangeBorders {
  i32* tile_of;    // [num_queues] tile of border q + 1, which ends queue q; num_tiles: beyond all
  i32* positions;  // [num_queues]
};
template <class Context>
__device__ __forceinline__ bool FindBorders(Context& c, const typename Context::Tiles& tiles,
                                            i32 num_tiles, i64 makespan, RangeBorders* borders) {
  constexpr i32 kNumThreads = Context::kNumThreads;
  const PlanRules& rules = c.rules;
  i64* places = c.template Take<i64>(num_tiles + 1);
  i32* fits = c.template Take<i32>(kNumCapacities);
  borders->tile_of = c.template Take<i32>(rules.num_queues);
  borders->positions = c.template Take<i32>(rules.num_queues);
  const auto tile_at = [&](i32 i) -> const QueryTile& {
    return tiles.tiles[CutTileAt(rules, tiles, true, i).tile];
  };
  const i64 line = c.cta.Prefix(num_tiles, places, [&](i32 i) {
    const QueryTile& t = tile_at(i);
    return ItemCost(rules, t, t.kv_end - t.kv_begin, false);
  });
#pragma unroll 1
  for (i32 k = c.thread(); k < kNumCapacities; k += kNumThreads) {
    fits[k] = RangesFit(rules, places, num_tiles, tile_at, RangeCapacity(rules, line, makespan, k));
  }
  __syncthreads();
  const i32 least = LeastCapacity([&](i32 k) { return fits[k] != 0; });
  if (least == kNumCapacities) return false;
  if (c.thread() == 0) {
    const i64 capacity = RangeCapacity(rules, line, makespan, least);
    RangeStart at = {0, tile_at(0).kv_begin};
#pragma unroll 1
    for (i32 q = 0; q < rules.num_queues; ++q) {
      at = RangeEndOf(rules, places, num_tiles, tile_at, at, capacity);
      borders->tile_of[q] = at.tile;
      borders->positions[q] = at.kv;
    }
  }
  __syncthreads();
  return true;
}

// Stream-K for tiles that share nothing. If the fullest queue has less than `makespan`, it replaces
// the schedule and returns true.
template <class Context>
__device__ __forceinline__ bool TryRanges(Context& c, const typename Context::Tiles& tiles,
                                          i64 makespan, PlanSchedule* schedule) {
  constexpr i32 kNumThreads = Context::kNumThreads;
  const PlanRules& rules = c.rules;
  const i32 num_tiles = NumCutTiles(rules, tiles, true);
  const int thread = c.thread();
  RangeBorders borders;
  if (!FindBorders(c, tiles, num_tiles, makespan, &borders)) return false;
  const i32 *tile_of = borders.tile_of, *positions = borders.positions;
  const auto tile_at = [&](i32 i) -> const QueryTile& {
    return tiles.tiles[CutTileAt(rules, tiles, true, i).tile];
  };
  const i32 n = rules.num_queues;
  PlanChunks chunks = TakeTileArrays(c, num_tiles);
  i32* num_inner = c.template Take<i32>(n + 1);
  i32* inner = c.template Take<i32>(n);
  // Borders that cut a tile, each once: an empty queue repeats a border.
  auto is_inner = [&](i32 b) {
    if (tile_of[b] == num_tiles || positions[b] == tile_at(tile_of[b]).kv_begin) return false;
    return b == 0 || tile_of[b] != tile_of[b - 1] || positions[b] != positions[b - 1];
  };
  c.cta.Prefix(n, num_inner, [&](i32 b) { return static_cast<i64>(is_inner(b)); });
#pragma unroll 1
  for (i32 b = thread; b < n; b += kNumThreads) {
    if (num_inner[b + 1] > num_inner[b]) inner[num_inner[b]] = positions[b];
  }
  // Entries of `tile_of` below i.
  auto borders_before = [&](i32 i) {
    return tile_of[0] >= i ? 0 : LastAtMost(tile_of, n, i - 1) + 1;
  };
#pragma unroll 1
  for (i32 i = thread; i <= num_tiles; i += kNumThreads) {
    chunks.chunk_base[i] = i + num_inner[borders_before(i)];
  }
  __syncthreads();
  const i32 num_chunks = chunks.chunk_base[num_tiles];
  TakeChunkArrays(c, num_chunks, num_chunks, &chunks);

  // The queue of a chunk: the number of borders at or before its beginning.
#pragma unroll 1
  for (i32 k = thread; k < num_chunks; k += kNumThreads) {
    const i32 i = TileOfChunk(num_tiles, chunks, num_chunks, k);
    const i32 split = k - chunks.chunk_base[i];
    const i32 splits = chunks.NumChunksOf(i);
    const QueryTile& t = tile_at(i);
    const i32 begin = RangeBegin(chunks, inner, t, i, split);
    i32 queue = borders_before(i);
#pragma unroll 1
    while (queue < n && tile_of[queue] == i && positions[queue] <= begin) ++queue;
    chunks.slots[k].queue = queue;
    const i64 kv_tokens = RangeEnd(chunks, inner, t, i, split, splits) - begin;
    chunks.keys[k] = ChunkKey(0, k);
    chunks.costs[k] = ItemCost(rules, t, kv_tokens, splits > 1);
  }
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
  i64 fullest = 0;
#pragma unroll 1
  for (i32 q = thread; q < rules.num_queues; q += kNumThreads) {
    i64 load = 0;
#pragma unroll 1
    for (i32 j = 0; j < chunks.filled[q]; ++j) {
      load += chunks.costs[static_cast<i32>(chunks.loads[q]) + j];
    }
    fullest = Largest(fullest, load);
  }
  fullest = c.cta.MostOf(fullest);
  const bool several = tiles.several_tile_sizes;
  const i64 margin = MarginOfSplits(HaveLargeStates(several, tiles.tiles[0]));
  if (!AreRangesWorthIt(rules, several, margin, fullest, makespan)) return false;
  *schedule = {chunks, num_chunks, fullest, inner, false};
  return true;
}

}  // namespace jax_attn
