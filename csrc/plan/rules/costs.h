// The planners' model of time. Costs are in 1/16 kv token of tile_q[0].
//
// An item takes item_cost + kv tokens * kv_cost[tile] / 16, and split_cost more if its state is
// merged, in kv tokens of tile_q[0]; a queue takes the sum of its items, a schedule what its
// fullest queue takes. FlashInfer's (arXiv 2501.01005, section 3.3.1, Algorithm 1) is alpha * l_q +
// beta * l_kv of a tile: here l_q is put into kv_cost, because the height of a tile decides whether
// memory or arithmetic is its limit, and item_cost is what is left of alpha * l_q. LeanAttention's
// (arXiv 2405.10480, section 4) is the number of its iterations over tiles of equal size: kv_cost
// alone. Neither has a price for states. The numbers are data of each device, with what they were
// measured by: csrc/select.
#pragma once

#include "plan/rules/tiles.h"

namespace jax_attn {

// Of kv_tokens for a tile; split: the state goes through the workspace and a merge.
inline i64 ItemCost(const PlanRules& rules, const QueryTile& t, i64 kv_tokens, bool split) {
  const i64 fixed = rules.item_cost + (split ? rules.split_cost : 0);
  return fixed * rules.kv_cost[0] + kv_tokens * t.kv_cost;
}

// What a tile adds to the total that CutTile's chunks are a part of.
inline i64 SpanCost(const QueryTile& t) {
  return static_cast<i64>(t.kv_end - t.kv_begin) * t.kv_cost;
}

// SpanCost of all tiles of a batch may exceed 64 bits; sums of this do not.
inline constexpr int kCoarseBits = 16;
inline i64 CoarseSpanCost(const QueryTile& t) { return SpanCost(t) >> kCoarseBits; }

}  // namespace jax_attn
