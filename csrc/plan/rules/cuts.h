// Where tiles are cut: by length, or by ranges of equal cost.
#pragma once

#include "plan/rules/costs.h"

namespace jax_attn {

// --- by length ---

// Borders of a tile's chunks lie at first + i * length.
struct TileCut {
  i32 first, length, num_splits;

  i32 Begin(const QueryTile& t, i32 split) const {
    return static_cast<i32>(Largest(t.kv_begin, first + split * i64{length}));
  }
  i32 End(const QueryTile& t, i32 split) const {
    return static_cast<i32>(Least(t.kv_end, first + (split + i64{1}) * length));
  }
};

// kBalanced: FlashInfer, Algorithm 1 (arXiv 2501.01005, section 3.3.1): no chunk is longer than an
// ideally balanced queue, L = total cost / queues, so that handing chunks out heaviest first leaves
// every queue close to L. The remainder of a cut tile stays short on purpose: it fills gaps.
// total_span_cost: of all tiles. twice_divisor: chunks of at most 2 / twice_divisor of L. No
// smaller limit in any case: tiles that are cut have at most twice_divisor chunks a queue, which is
// what capacities and a device planner's scratch have room for.
inline i64 LongestChunkCost(const PlanRules& rules, i64 total_span_cost, i32 twice_divisor) {
  const i64 queues = static_cast<i64>(rules.num_queues) * twice_divisor;
  return 2 * total_span_cost * rules.num_units / queues;
}
inline constexpr i64 kUncut = 1ll << 62;  // longest chunks where no tile is cut

// longest_cost: of kBalanced.
// kFixedSplit counts from position 0, or from the beginning of a step list: borders depend on
// nothing but the position, so a request has the same partial states, and after the ordered merge
// the same bits, in any batch. kNoSplit: FlashAttention-2 (arXiv 2307.08691, section 3.2), one item
// per query tile and head.
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

// What any tile's span may cost where kBalanced cuts none at first; -1: it does. Where tiles are no
// more than queues, queues are uneven by what the longest tile is above the mean, and to even that
// out costs every queue an item and two states. Measured (H200, mla/128x4096/16): 187 us with 118
// of 128 tiles cut in two, 156 us without.
inline i64 LongestWholeCost(const PlanRules& rules, i64 num_tiles, i64 longest_cost) {
  if (num_tiles * rules.num_units > rules.num_queues) return -1;
  const i64 fixed = i64{rules.item_cost} + 2 * rules.split_cost;
  return longest_cost + fixed * rules.kv_cost[0];
}
// Longest chunks of the first schedule, if it were longest_cost for what is cut. longest_span_cost:
// of all tiles.
inline i64 FirstLongestCost(const PlanRules& rules, i64 num_tiles, i64 longest_span_cost,
                            i64 longest_cost) {
  return longest_span_cost > LongestWholeCost(rules, num_tiles, longest_cost) ? longest_cost
                                                                              : kUncut;
}

// --- by ranges ---

// LeanAttention (arXiv 2405.10480, section 4), the stream-K of attention: all tiles in one line,
// cut into as many contiguous ranges of equal cost as there are queues. A range ends inside a tile,
// so queues are balanced to a kv step, at the price of at most one more partial state a queue.
//
// The line measures every tile as one whole item. A border adds one item, and what is cut at all
// pays for a merge: with F(b) the number of different tiles among those of borders 1 to b,
//     cost left of border b = place(b) + (b - 1) * cut + F(b) * split,
// which shall be b / ranges of the total. F comes from a first guess that every border lies in a
// tile of its own; a better one would move a border by less than a split costs.
struct RangeCut {
  i64 line;        // length of the line
  i32 num_ranges;  // at most the number of queues, at least 1
  i64 cut, split;  // costs of the item that a border adds, and of a tile's being cut
};

// t: any of the tiles, which are of one height.
inline RangeCut MakeRangeCut(const PlanRules& rules, const QueryTile& t, i64 line) {
  RangeCut r;
  r.line = line;
  r.cut = ItemCost(rules, t, 0, true);
  r.split = r.cut - ItemCost(rules, t, 0, false);
  // Ranges not shorter than the shortest chunk, and places that never decrease.
  const i64 shortest = Largest(1, Largest(static_cast<i64>(rules.min_chunk) * t.kv_cost, r.split));
  r.num_ranges = static_cast<i32>(Largest(1, Least(rules.num_queues, (line - r.cut) / shortest)));
  return r;
}

// Place of border b, 0 < b < num_ranges, on the line. cut_tiles: F(b); all_cut_tiles: that of the
// last border.
inline i64 BorderOffset(const RangeCut& r, i32 b, i32 cut_tiles, i32 all_cut_tiles) {
  const i64 total = r.line + (r.num_ranges - 1) * r.cut + all_cut_tiles * r.split;
  const i64 each = total / r.num_ranges, left = total % r.num_ranges;
  const i64 part = b * each + b * left / r.num_ranges;  // b * total / num_ranges, in 64 bits
  return Largest(0, part - (b - 1) * r.cut - cut_tiles * r.split);
}

// The kv position of a border that lies at `place`, in a tile that begins at tile_place: the
// nearest step; the tile's nearer end where a piece too short to be worth it would be cut off.
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
