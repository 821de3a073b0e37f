// The planners' model of time. Costs are in 1/16 kv token of tile_q[0].
//
// An item takes item_cost + kv tokens * kv_cost[tile] / 16, plus split_cost[tile] if its state is
// merged, in kv tokens of tile_q[0]. A queue takes the sum of its items; a schedule takes as long
// as its fullest queue. FlashInfer's model (arXiv 2501.01005, section 3.3.1, Algorithm 1) is alpha
// * l_q + beta * l_kv of a tile. Here l_q is part of kv_cost, because tile M decides whether memory
// or arithmetic is the limit, and item_cost is the rest of alpha * l_q. LeanAttention's model
// (arXiv 2405.10480, section 4) is the number of iterations over tiles of equal size: kv_cost
// alone. Neither has a cost of states. The numbers are data of each device, listed with their
// measurements: csrc/select.
#pragma once

#include "plan/rules/tiles.h"

namespace jax_attn {

// Cost of kv_tokens for a tile; split: the state goes through the workspace and a merge.
inline i64 ItemCost(const PlanRules& rules, const QueryTile& t, i64 kv_tokens, bool split) {
  const i64 fixed = rules.item_cost + (split ? rules.split_cost[t.tile] : 0);
  return fixed * rules.kv_cost[0] + kv_tokens * t.kv_cost;
}

// A tile's part of the total from which CutTile derives the chunk limit.
inline i64 SpanCost(const QueryTile& t) {
  return static_cast<i64>(t.kv_end - t.kv_begin) * t.kv_cost;
}

// The sum of SpanCost over a batch may overflow 64 bits; sums of costs shifted right by this do
// not.
inline constexpr int kCoarseBits = 16;
inline i64 CoarseSpanCost(const QueryTile& t) { return SpanCost(t) >> kCoarseBits; }

}  // namespace jax_attn
