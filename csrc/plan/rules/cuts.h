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

// longest_cost: for kBalanced. kFixedSplit counts from position 0, or from the beginning of a step
// list: borders depend only on the position, so a request has the same partial states and, after
// the ordered merge, the same bits in any batch. kNoSplit: FlashAttention-2 (arXiv 2307.08691,
// section 3.2), one item per query tile and head.
inline TileCut CutTile(const PlanRules& rules, i64 longest_cost, const QueryTile& t) {
  TileCut cut = {t.kv_begin, rules.kv_split, 1};
  if (rules.schedule == kBalanced) {
    const i32 tokens = static_cast<i32>(Least(kPositionLimit, longest_cost / t.kv_cost + 1));
    const i32 rounded = (tokens + rules.tile_kv - 1) / rules.tile_kv * rules.tile_kv;
    cut.length = static_cast<i32>(Largest(rounded, rules.min_chunk));
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
  const i64 fixed = i64{rules.item_cost} + 2 * rules.split_cost;
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
// into as many contiguous ranges of equal cost as there are queues. A range may end inside a tile,
// so queues are balanced to one kv step, at the price of at most one more partial state per queue.
//
// The line measures every tile as one whole item. A border adds one item, and each tile that is
// split pays for a merge. With F(b), the number of different tiles that contain borders 1 to b, the
// cost left of border b is place(b) + (b - 1) * cut + F(b) * split, and it must equal b / ranges of
// the total. F comes from a first guess in which every border lies in a different tile; a better
// guess would move a border by less than a split costs.
struct RangeCut {
  i64 line;        // length of the line
  i32 num_ranges;  // at most the number of queues, at least 1
  i64 cut, split;  // costs of the item that a border adds, and of splitting a tile
};

// t: any of the tiles, which all have the same tile M.
inline RangeCut MakeRangeCut(const PlanRules& rules, const QueryTile& t, i64 line) {
  RangeCut r;
  r.line = line;
  r.cut = ItemCost(rules, t, 0, true);
  r.split = r.cut - ItemCost(rules, t, 0, false);
  // Ranges are not shorter than the shortest chunk, so border positions never decrease.
  const i64 shortest = Largest(1, Largest(static_cast<i64>(rules.min_chunk) * t.kv_cost, r.split));
  r.num_ranges = static_cast<i32>(Largest(1, Least(rules.num_queues, (line - r.cut) / shortest)));
  return r;
}

// Position of border b on the line, 0 < b < num_ranges. cut_tiles: F(b); all_cut_tiles: F of the
// last border.
inline i64 BorderOffset(const RangeCut& r, i32 b, i32 cut_tiles, i32 all_cut_tiles) {
  const i64 total = r.line + (r.num_ranges - 1) * r.cut + all_cut_tiles * r.split;
  const i64 each = total / r.num_ranges, left = total % r.num_ranges;
  const i64 part = b * each + b * left / r.num_ranges;  // b * total / num_ranges, in 64 bits
  return Largest(0, part - (b - 1) * r.cut - cut_tiles * r.split);
}

// The kv position of a border at `place` on the line, in a tile that begins at tile_place: the
// nearest step, or the tile's nearer end if the piece cut off would be too short to be worth it.
inline i32 BorderPosition(const PlanRules& rules, const QueryTile& t, i64 tile_place, i64 place) {
  const i64 whole = ItemCost(rules, t, 0, false);
  const i64 fits = t.kv_begin + Largest(0, place - tile_place - whole) / t.kv_cost;
  const i64 border = (fits + rules.tile_kv / 2) / rules.tile_kv * rules.tile_kv;
  const bool near_begin = border - t.kv_begin < rules.min_chunk;
  const bool near_end = t.kv_end - border < rules.min_chunk;
  if (near_begin && near_end)
    return border - t.kv_begin < t.kv_end - border ? t.kv_begin : t.kv_end;
  return near_begin ? t.kv_begin : near_end ? t.kv_end : static_cast<i32>(border);
}

}  // namespace jax_attn
