// Tiles of a batch with shared prefixes: which ones share, what sharing costs, how they are split.
#pragma once

#include "plan/rules/cuts.h"
#include "plan/rules/order.h"

namespace jax_attn {

// Extra fields of a tile in a batch with shared prefixes. A unit is the only tile of a request, or
// the part of it that is not shared.
struct TileSharing {
  i32 state_cost;  // cost of a state beyond split_cost[0], likewise in kv tokens of tile_q[0]
  i32 unit;        // index of the unit if shared tiles cover part of its span; else -1
  i32 first_unit, num_units;  // shared tile: the units whose tokens it has, in order; else 0

  bool shared() const { return num_units > 0; }
  bool partial() const { return unit >= 0 || shared(); }  // never final, even if not split
};

inline i32 TallestTileTokens(const PlanRules& rules) {
  return rules.tile_tokens[rules.num_tiles - 1];
}

// Length n of the positions [0, n) that every row of the tile sees, and that the made-up q_pos of a
// shared tile lets every row see. At least one token of a unit stays its own, and so do fresh
// tokens.
inline i64 ShareableTokens(const PlanRules& rules, const SharingRules& sharing,
                           const PlanInputs& in, const QueryTile& t) {
  i64 n = static_cast<i64>(t.kv_end) - 1;
  if (sharing.fresh_kv) n = Least(n, static_cast<i64>(in.kv_lens[t.request]) - t.qo_len);
  if (rules.window_right >= 0) n = Least(n, static_cast<i64>(t.q_pos) + rules.window_right + 1);
  if (rules.window_left >= 0) {
    if (static_cast<i64>(t.q_pos) + t.qo_len - 1 > rules.window_left) return 0;
    n = Least(n, static_cast<i64>(rules.window_left) + 2 - TallestTileTokens(rules));
  }
  return n;
}

// Latest end of a shared span that may end at `tokens`.
inline i32 SharedEnd(const SharingRules& sharing, i64 tokens) {
  return static_cast<i32>(tokens / sharing.alignment * sharing.alignment);
}

// Cost of writing and reading back a state, in kv tokens of tile_q[0]. Half of what its bytes would
// cost, because it stays in a cache.
inline i32 StateCost(const PlanRules& rules, const SharingRules& sharing, i64 num_tokens) {
  return static_cast<i32>(num_tokens * rules.state_bytes / sharing.token_bytes);
}

// Cost of an item whose state goes through the workspace, as in all tiles that share. state_cost
// counts the rows of the state, so split_cost is that of the smallest tile.
inline i64 PartialCost(const PlanRules& rules, const QueryTile& t, i32 state_cost, i64 kv_tokens) {
  const i64 of_state = static_cast<i64>(rules.split_cost[0]) + state_cost;
  return ItemCost(rules, t, kv_tokens, false) + of_state * rules.kv_cost[0];
}

// Makes a shared tile of `tokens` query tokens over [kv_begin, kv_end); the caller sets
// first_token. first: the tile of its first request.
inline QueryTile MakeSharedTile(const PlanRules& rules, const SharingRules& sharing,
                                const QueryTile& first, i32 tokens, i32 kv_begin, i32 kv_end) {
  QueryTile t = first;
  t.qo_len = tokens;
  t.tile = PickTile(rules, tokens);
  t.kv_begin = kv_begin;
  t.kv_end = kv_end;
  t.q_pos = kv_end - 1;
  t.kv_cost = rules.kv_cost[t.tile];
  if (sharing.cost_by_rows) {
    const i64 rows = static_cast<i64>(tokens) * rules.group_size;
    t.kv_cost =
        static_cast<i32>(Largest(rules.kv_cost[0], t.kv_cost * rows / sharing.tile_rows[t.tile]));
  }
  return t;
}

inline i64 ChunkCost(const PlanRules& rules, const QueryTile& t, const TileSharing& s,
                     i32 num_splits, i64 kv_tokens) {
  if (!s.partial()) return ItemCost(rules, t, kv_tokens, num_splits > 1);
  return PartialCost(rules, t, s.state_cost, kv_tokens);
}

// Parameters of one trial of CutSharedTile. Own chunks of kBalanced are at most 2 / twice_divisor
// of a queue's share of them. Shared chunks are at most a queue's share, so some queues have two;
// with `fewer`, they are about as long as the share on average, so that hardly any queue has two.
//
// With `leaves_empty`, queues without a shared chunk stay empty. If such queues finished own chunks
// early, they would leave their merges to the last chunk of the shared prefix, which ends while all
// others begin to read their own keys: each step of a merge waits behind those reads. Measured
// (H200): where 4 of 132 queues had no shared chunk, one of four such chunks took 8 us longer at
// prefix/128x8192+256, and 14 us at 64x32768+256, and the work after it ended last.
struct SharedTrial {
  i32 twice_divisor;
  bool fewer, leaves_empty;
};
inline constexpr int kNumSharedTrials = 7;
inline constexpr SharedTrial kSharedTrials[kNumSharedTrials] = {
    {2, false, false}, {1, false, false}, {4, false, false}, {2, true, true},
    {2, true, false},  {1, true, true},   {1, true, false}};

// total_span_cost: sum over all shared tiles if t is shared, else over all others. Shared chunks
// and own chunks are spread over the queues separately, because queues begin with the shared ones:
// each queue gets its part of both.
inline TileCut CutSharedTile(const PlanRules& rules, const QueryTile& t, const TileSharing& s,
                             i64 total_span_cost, SharedTrial trial) {
  TileCut cut = CutTile(rules, 0, t);
  if (rules.schedule != kBalanced) return cut;
  const i64 queues = static_cast<i64>(rules.num_queues) * (s.shared() ? 2 : trial.twice_divisor);
  const i64 fair = 2 * total_span_cost * rules.num_units / (queues * t.kv_cost) + 1;
  // Writing a large state costs as much as many keys.
  const i64 fixed = 2 * PartialCost(rules, t, s.partial() ? s.state_cost : 0, 0) / t.kv_cost;
  const bool fewer = s.shared() && trial.fewer;
  const i64 longest =
      Largest(Largest(fair, rules.min_chunk[t.tile]), s.shared() && !fewer ? fixed : 0);
  const i64 len = static_cast<i64>(t.kv_end) - t.kv_begin;
  // Pieces of equal length: a short remainder costs as much in states as a long one.
  const i64 pieces = Largest(1, fewer ? len / longest : CeilDivide(len, longest));
  const i64 steps = CeilDivide(CeilDivide(len, pieces), rules.tile_kv);
  cut.length = static_cast<i32>(Largest(1, steps) * rules.tile_kv);
  cut.num_splits = static_cast<i32>(Largest(1, CeilDivide(len, cut.length)));
  return cut;
}

// If there are more shared tiles than allowed, those nodes are kept that save the most: span length
// times number of units.
inline i64 SharingWeight(i64 kv_tokens, i64 num_units) {
  return Least(kSectionFirst - 1, kv_tokens * num_units);
}

// Capacity: shared tiles of a plan for this many requests.
inline i64 MaxSharedTiles(i64 num_requests) {
  return Least(Largest(64, num_requests / 2), kMaxLevels * num_requests);
}

// Rows of all partial states of a kBalanced plan that shares: as many as without sharing.
inline i64 MaxSharedRows(const PlanRules& rules) {
  return rules.max_balanced_partials * TallestTileTokens(rules) * rules.group_size;
}

}  // namespace jax_attn
