// Tiles of a batch with shared prefixes: which share, what that costs, how they are cut.
#pragma once

#include "plan/rules/cuts.h"
#include "plan/rules/order.h"

namespace jax_attn {

// What a tile is besides, in a batch with shared prefixes. A unit is the one tile of a request, or
// what of it nobody shares.
struct TileSharing {
  i32 state_cost;             // of a state beyond split_cost, likewise in kv tokens of tile_q[0]
  i32 unit;                   // its index, if shared tiles have a part of its span; else -1
  i32 first_unit, num_units;  // shared tile: whose tokens it has, in order; else 0

  bool shared() const { return num_units > 0; }
  bool partial() const { return unit >= 0 || shared(); }  // never final, even if it is not cut
};

inline i32 TallestTileTokens(const PlanRules& rules) {
  return rules.tile_tokens[rules.num_tiles - 1];
}

// Positions [0, n) that every row of the tile sees, and that the made-up q_pos of a shared tile
// lets every row see. At least one token of a unit stays its own, and so do fresh ones.
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

// Where a shared span ends at the latest that may end at `tokens`.
inline i32 SharedEnd(const SharingRules& sharing, i64 tokens) {
  return static_cast<i32>(tokens / sharing.alignment * sharing.alignment);
}

// Writing and reading back a state, in kv tokens of tile_q[0]. Half of what its bytes would cost:
// it stays in a cache.
inline i32 StateCost(const PlanRules& rules, const SharingRules& sharing, i64 num_tokens) {
  return static_cast<i32>(num_tokens * rules.state_bytes / sharing.token_bytes);
}

// Of an item whose state goes through the workspace, as it does in all tiles that share.
inline i64 PartialCost(const PlanRules& rules, const QueryTile& t, i32 state_cost, i64 kv_tokens) {
  return ItemCost(rules, t, kv_tokens, true) + static_cast<i64>(state_cost) * rules.kv_cost[0];
}

// Of `tokens` query tokens over [kv_begin, kv_end); first_token is still to be set. first: the tile
// of its first request.
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

// What CutSharedTile is tried with. Own chunks of kBalanced are at most 2 / twice_divisor of what a
// queue has of them. Shared chunks are at most what a queue has of them, so some queues have two;
// or, with `fewer`, about as much on average, so that hardly any has.
//
// With `leaves_empty` queues without a shared chunk stay empty. Own chunks that such a queue is
// done with early leave their folds to the last chunk of what they share, which ends while all
// others begin to read keys of their own: each step of a fold waits behind those. Measured (H200):
// where 4 of 132 queues had none, one of four such chunks took 8 us longer at prefix/128x8192+256,
// and 14 us at 64x32768+256, and what came behind it ended last.
struct SharedTrial {
  i32 twice_divisor;
  bool fewer, leaves_empty;
};
inline constexpr int kNumSharedTrials = 7;
inline constexpr SharedTrial kSharedTrials[kNumSharedTrials] = {
    {2, false, false}, {1, false, false}, {4, false, false}, {2, true, true},
    {2, true, false},  {1, true, true},   {1, true, false}};

// total_span_cost: of all shared tiles if t is one, of all others if it is not. Shared chunks and
// own chunks are spread over the queues apart from each other, because queues begin with the
// former: each gets its part of both.
inline TileCut CutSharedTile(const PlanRules& rules, const QueryTile& t, const TileSharing& s,
                             i64 total_span_cost, SharedTrial trial) {
  TileCut cut = CutTile(rules, 0, t);
  if (rules.schedule != kBalanced) return cut;
  const i64 queues = static_cast<i64>(rules.num_queues) * (s.shared() ? 2 : trial.twice_divisor);
  const i64 fair = 2 * total_span_cost * rules.num_units / (queues * t.kv_cost) + 1;
  // A large state costs as much as many keys.
  const i64 fixed = 2 * PartialCost(rules, t, s.partial() ? s.state_cost : 0, 0) / t.kv_cost;
  const bool fewer = s.shared() && trial.fewer;
  const i64 longest = Largest(Largest(fair, rules.min_chunk), s.shared() && !fewer ? fixed : 0);
  const i64 len = static_cast<i64>(t.kv_end) - t.kv_begin;
  // Of equal length: a short remainder costs as much in states as a long one.
  const i64 pieces = Largest(1, fewer ? len / longest : CeilDivide(len, longest));
  const i64 steps = CeilDivide(CeilDivide(len, pieces), rules.tile_kv);
  cut.length = static_cast<i32>(Largest(1, steps) * rules.tile_kv);
  cut.num_splits = static_cast<i32>(Largest(1, CeilDivide(len, cut.length)));
  return cut;
}

// Where there are more shared tiles than may be, those nodes stay that save the most: the length of
// a node's span times its units.
inline i64 SharingWeight(i64 kv_tokens, i64 num_units) {
  return Least(kSectionFirst - 1, kv_tokens * num_units);
}

// Shared tiles of a plan for that many requests.
inline i64 MaxSharedTiles(i64 num_requests) {
  return Least(Largest(64, num_requests / 2), kMaxLevels * num_requests);
}

// Rows of all partial states of a plan of kBalanced that shares: as many as without.
inline i64 MaxSharedRows(const PlanRules& rules) {
  return rules.max_balanced_partials * TallestTileTokens(rules) * rules.group_size;
}

}  // namespace jax_attn
