// Where tiles are split: by length, or by ranges of equal cost.
#pragma once

#include "plan/rules/costs.h"

namespace jax_attn {

// --- by length ---

// Borders of a tile's chunks are at first + i * length.
struct TileCut {
  i32 first, length, num_splits;

  i32 Begin(const QueryTile& t, i32 split) const {
    return static_cast<i32>(Largest(t.kv_begin, first + split * i64{length}));
  }
  i32 End(const QueryTile& t, i32 split) const {
    return static_cast<i32>(Least(t.kv_end, first + (split + i64{1}) * length));
  }
};

// kBalanced: FlashInfer, Algorithm 1 (arXiv 2501.01005, section 3.3.1). No chunk is longer than an
// ideally balanced queue, L = total cost / queues, so that assigning chunks heaviest first leaves
// every queue close to L. The remainder of a split tile stays short on purpose: it fills gaps.
// total_span_cost: over all tiles. twice_divisor: chunks are at most 2 / twice_divisor of L. The
// limit is never smaller, so split tiles have at most twice_divisor chunks per queue; capacities
// and the device planner's scratch rely on this.
inline i64 LongestChunkCost(const PlanRules& rules, i64 total_span_cost, i32 twice_divisor) {
  const i64 queues = static_cast<i64>(rules.num_queues) * twice_divisor;
  return 2 * total_span_cost * rules.num_units / queues;
}
inline constexpr i64 kUncut = 1ll << 62;  // longest chunks if no tile is split
// A limit in tokens, the same for tiles of any size, in the place of a cost.
inline constexpr i64 ChunksOfTokens(i32 tokens) { return -i64{tokens}; }

// kBalanced: the length of chunks in tokens of a tile M. longest_cost: a cost or ChunksOfTokens.
// kv_cost: of the tile.
inline i32 ChunkLength(const PlanRules& rules, i64 longest_cost, i32 tile, i32 kv_cost) {
  const i64 limit = longest_cost < 0 ? -longest_cost : longest_cost / kv_cost + 1;
  const i32 tokens = static_cast<i32>(Least(kPositionLimit, limit));
  const i32 rounded = (tokens + rules.tile_kv - 1) / rules.tile_kv * rules.tile_kv;
  return static_cast<i32>(Largest(rounded, rules.min_chunk[tile]));
}

// longest_cost: as in ChunkLength. kFixedSplit counts from position 0, or from the beginning of a
// step list: borders depend only on the position, so a request has the same partial states and,
// after the ordered merge, the same bits in any batch. kNoSplit: FlashAttention-2 (arXiv
// 2307.08691, section 3.2), one item per query tile and head.
inline TileCut CutTile(const PlanRules& rules, i64 longest_cost, const QueryTile& t) {
  TileCut cut = {t.kv_begin, rules.kv_split, 1};
  if (rules.schedule == kBalanced) {
    cut.length = ChunkLength(rules, longest_cost, t.tile, t.kv_cost);
  } else if (rules.schedule == kFixedSplit) {
    if (rules.max_steps == 0) cut.first = t.kv_begin / rules.kv_split * rules.kv_split;
  }
  if (t.kv_end - cut.first > cut.length) {
    cut.num_splits = (t.kv_end - cut.first - 1) / cut.length + 1;
  }
  return cut;
}

// The largest span cost of a tile up to which kBalanced splits no tile at first; -1: it splits. If
// there are no more tiles than queues, the imbalance is the longest tile's excess over the mean,
// and removing it costs every queue an item and two states. Measured (H200, mla/128x4096/16): 187
// us with 118 of 128 tiles split in two, 156 us without.
inline i64 LongestWholeCost(const PlanRules& rules, i64 num_tiles, i64 longest_cost) {
  if (num_tiles * rules.num_units > rules.num_queues) return -1;
  const i64 fixed = i64{rules.item_cost} + 2 * rules.split_cost[0];
  return longest_cost + fixed * rules.kv_cost[0];
}
// Longest chunks of the first schedule, given the limit longest_cost for split tiles.
// longest_span_cost: over all tiles.
inline i64 FirstLongestCost(const PlanRules& rules, i64 num_tiles, i64 longest_span_cost,
                            i64 longest_cost) {
  return longest_span_cost > LongestWholeCost(rules, num_tiles, longest_cost) ? longest_cost
                                                                              : kUncut;
}

// --- by ranges ---

// LeanAttention (arXiv 2405.10480, section 4), stream-K for attention: all tiles on one line, cut
// into as many contiguous ranges as there are queues. A range may end inside a tile, at a kv step,
// so queues are balanced to about one step, at the price of at most one cut per queue. The line has
// each tile once for every head unit (rules/units.h).
//
// A range is as long as its queue's capacity allows, in the planners' model of time, with items and
// states. The capacity is the least one that is found to hold the line.
struct RangeStart {
  i32 tile;  // on the line
  i32 kv;    // the first position left of it
};

// The end of a piece of a tile that begins at kv and costs at most `left`; kv: no piece is worth
// it.
inline i32 PieceEnd(const PlanRules& rules, const QueryTile& t, i32 kv, i64 left) {
  left -= ItemCost(rules, t, 0, true);
  if (left < static_cast<i64>(rules.min_chunk[t.tile]) * t.kv_cost) return kv;
  const i64 end = Least(kv + left / t.kv_cost, static_cast<i64>(t.kv_end) - 1);
  const i64 border = end / rules.tile_kv * rules.tile_kv;
  return border - kv < Largest(1, rules.min_chunk[t.tile]) ? kv : static_cast<i32>(border);
}

// Where the range ends that begins at `at`. places: [num_tiles + 1], where tiles begin on the line,
// in costs of whole tiles. tile_at(i): tile i of the line.
template <class TileAt>
inline RangeStart RangeEndOf(const PlanRules& rules, const i64* places, i32 num_tiles,
                             TileAt tile_at, RangeStart at, i64 capacity) {
  i64 left = capacity;
  i32 i = at.tile;
  if (i == num_tiles) return at;
  const QueryTile& first = tile_at(i);
  if (at.kv > first.kv_begin) {
    const i64 rest = ItemCost(rules, first, static_cast<i64>(first.kv_end) - at.kv, true);
    if (rest > left) return {i, PieceEnd(rules, first, at.kv, left)};
    left -= rest;
    ++i;
  }
  const i64 place = places[i];
  if (i < num_tiles && places[i + 1] - place <= left) {
    i += LastAtMost(places + i, num_tiles - i + 1, place + left);
  }
  if (i == num_tiles) return {i, 0};
  const QueryTile& t = tile_at(i);
  return {i, PieceEnd(rules, t, t.kv_begin, left - (places[i] - place))};
}

// Whether the queues hold the line.
template <class TileAt>
inline bool RangesFit(const PlanRules& rules, const i64* places, i32 num_tiles, TileAt tile_at,
                      i64 capacity) {
  RangeStart at = {0, tile_at(0).kv_begin};
  for (i32 q = 0; q < rules.num_queues && at.tile < num_tiles; ++q) {
    at = RangeEndOf(rules, places, num_tiles, tile_at, at, capacity);
  }
  return at.tile == num_tiles;
}

// Capacities that are tried, from the mean load on, below the makespan of another schedule.
inline constexpr i32 kNumCapacities = 128;
inline i64 RangeCapacity(const PlanRules& rules, i64 line, i64 makespan, i32 i) {
  const i64 mean = CeilDivide(line, rules.num_queues);
  return mean + Largest(0, makespan - mean) * i / kNumCapacities;
}

// The first capacity that fits, by bisection; kNumCapacities: none. The device planner has asked
// all of them before, so both must ask in the same order.
template <class Fits>
inline i32 LeastCapacity(Fits fits) {
  i32 first = 0, count = kNumCapacities;
  while (count > 0) {
    const i32 half = count / 2;
    if (fits(first + half)) {
      count = half;
    } else {
      first += half + 1;
      count -= half + 1;
    }
  }
  return first;
}

}  // namespace jax_attn
