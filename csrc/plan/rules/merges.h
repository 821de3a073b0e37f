// How partial states of a tile are merged: one merge group, or a tree of them.
#pragma once

#include "plan/rules/tiles.h"

namespace jax_attn {

// One CTA merges a group at 80 to 100 bytes/ns (H200, derived from 64 bytes per clock between L2
// and an SM; 50 before batches were prefetched), while the other CTAs wait or have finished. Beyond
// this many bytes, about 6 us, batches are shared among CTAs; a second level costs 2 to 3 us for an
// arrival, a record and the first answer from L2. Decodes of few rows stay below: their merges are
// limited by latency, not by bytes.
//
// With shares_reductions each CTA has two rows of 64 states of 512 columns, 5 us (H200,
// mla/1x65536/128: 63 us; 134 us as a tree, whose first level has whole batches).
inline constexpr i64 kOneFoldBytes = 512 << 10;

// Offset of a tile's first partial state within the batches of a merge. With kFixedSplit a chunk
// has the same offset in any tile, because a row must have the same bits in any tile.
inline i32 FirstReduceOffset(const PlanRules& rules, const QueryTile& t) {
  if (rules.max_steps > 0) return 0;
  return rules.schedule == kFixedSplit ? t.kv_begin / rules.kv_split % kReduceBatch : 0;
}

// Number of merge groups of a split tile, for one kv head: one, or a parent plus one for each
// batch. A last batch of one state has no group: its item arrives at the parent itself. Fewer than
// two full batches gain nothing, and tiles that do not begin with a full batch are rare.
inline i32 NumMergeGroups(const PlanRules& rules, const QueryTile& t, i32 num_splits) {
  const i64 bytes = static_cast<i64>(num_splits) * t.qo_len * rules.state_bytes;
  if (rules.shares_reductions || num_splits < 2 * kReduceBatch || bytes <= kOneFoldBytes) return 1;
  if (FirstReduceOffset(rules, t) > 0) return 1;
  return 1 + (num_splits + kReduceBatch - 2) / kReduceBatch;
}

// The merge group of a chunk, among those of its tile and kv head. The first group is the parent,
// if there is one.
inline i32 MergeGroupOfSplit(i32 num_groups, i32 split) {
  const i32 group = 1 + split / kReduceBatch;
  return group < num_groups ? group : 0;
}

// Upper bound for any plan: at most one final group per tile and kv head, and with n >= 16 partial
// states at most n / 6 groups that have a parent. Each group has at least two partial states.
inline i64 MaxMergeGroups(i64 max_final, i64 max_partials) {
  return Least(max_partials / 2 + 1, max_final + max_partials / 6);
}

}  // namespace jax_attn
