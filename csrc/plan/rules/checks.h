// Which batches are faulty, and which fault is reported. plan/fault.cc has the sentences.
#pragma once

#include "plan/rules/costs.h"
#include "plan/rules/prefix_levels.h"
#include "plan/rules/tiles.h"

namespace jax_attn {

inline PlanFault MakeFault(PlanFaultCode code, i64 at, i64 got, i64 expected = 0) {
  return {code, static_cast<i32>(Least(at, kMaxInt32)), static_cast<i32>(Least(got, kMaxInt32)),
          static_cast<i32>(expected)};
}

// The fault that planners report is the one with the smallest (code, at).
inline bool IsBefore(const PlanFault& a, const PlanFault& b) {
  if (b.code == kNoFault) return a.code != kNoFault;
  return a.code != kNoFault && (a.code < b.code || (a.code == b.code && a.at < b.at));
}

// Faults of the batch as a whole.
inline PlanFault CheckBatch(const PlanRules& rules, const PlanInputs& in) {
  const i64 first_qo = in.qo_indptr[0], first_kv = in.kv_indptr[0];
  const i64 nnz_qo = in.qo_indptr[in.batch_size], nnz_kv = in.kv_indptr[in.batch_size];
  if (first_qo != 0) return MakeFault(kFaultQoIndptrBegin, 0, first_qo);
  if (nnz_qo > rules.max_qo_tokens) return MakeFault(kFaultQoTokens, 0, nnz_qo);
  if (first_kv < 0) return MakeFault(kFaultKvIndptrBegin, 0, first_kv);
  if (nnz_kv > rules.max_kv) return MakeFault(kFaultKvCapacity, 0, nnz_kv);
  if (rules.page_size > 0 && nnz_kv > in.num_page_indices) {
    return MakeFault(kFaultPageIndices, 0, in.num_page_indices, nnz_kv);
  }
  return {};
}

// Faults of request r and its entries r + 1 of the offsets.
inline PlanFault CheckRequest(const PlanRules& rules, const PlanInputs& in, i64 r) {
  const i64 qo_begin = in.qo_indptr[r], qo_end = in.qo_indptr[r + 1];
  const i64 kv_begin = in.kv_indptr[r], kv_end = in.kv_indptr[r + 1];
  const i64 kv_len = in.kv_lens[r];
  if (qo_end < qo_begin) return MakeFault(kFaultQoIndptrOrder, r + 1, qo_end, qo_begin);
  if (kv_end < kv_begin) return MakeFault(kFaultKvIndptrOrder, r + 1, kv_end, kv_begin);
  if (kv_len < 0) return MakeFault(kFaultKvLenNegative, r, kv_len);
  if (kv_len >= kPositionLimit) return MakeFault(kFaultKvLenTooLarge, r, kv_len);
  const i64 qo_len = qo_end - qo_begin;
  const i64 first = in.q_offsets != nullptr ? in.q_offsets[r] : kv_len - qo_len;
  if (first <= -kPositionLimit || first + qo_len > kPositionLimit) {
    return MakeFault(kFaultQueryPositions, r, first);
  }
  if (rules.page_size > 0) {
    if (NumPages(rules, static_cast<i32>(kv_len)) > kv_end - kv_begin) {
      return MakeFault(kFaultKvOfRequest, r, kv_end - kv_begin, kv_len);
    }
  } else if (kv_len > kv_end - kv_begin) {
    return MakeFault(kFaultKvOfRequest, r, kv_len, kv_end - kv_begin);
  }
  return {};
}

inline PlanFault MakeLevelFault(PlanFaultCode code, i32 level, i64 entry, i64 got, i64 expected) {
  return MakeFault(code, entry * kMaxLevels + level, got, expected);
}

// Faults of entry i of a level's request_indptr.
inline PlanFault CheckBorder(const PlanInputs& in, const PrefixLevels& levels, i32 level, i32 i) {
  const i32* borders = BordersOf(levels, level);
  const i32 n = levels.num_prefixes, border = borders[i];
  if (i == 0 && border != 0) return MakeLevelFault(kFaultPrefixBegin, level, i, border, 0);
  if (i > 0 && border < borders[i - 1]) {
    return MakeLevelFault(kFaultPrefixOrder, level, i, border, borders[i - 1]);
  }
  if (i == n && border != in.batch_size) {
    return MakeLevelFault(kFaultPrefixEnd, level, i, border, in.batch_size);
  }
  if (level == 0) return {};
  const i32 outer = BordersOf(levels, level - 1)[i];
  const i32 nearest = borders[LastAtMost(borders, n + 1, outer)];
  if (nearest == outer) return {};
  return MakeLevelFault(kFaultPrefixNesting, level, i, nearest, outer);
}

// Faults of request r's prefix lengths at every level.
inline PlanFault CheckPrefixLens(const PlanInputs& in, const PrefixLevels& levels, i64 r) {
  if (in.qo_indptr[r + 1] == in.qo_indptr[r]) return {};
  for (i32 level = 0; level < levels.num_levels; ++level) {
    const i32 len = PrefixLen(levels, level, PrefixOf(levels, level, r));
    if (len < 0 || len > in.kv_lens[r]) {
      return MakeLevelFault(kFaultPrefixLen, level, r, len, in.kv_lens[r]);
    }
  }
  return {};
}

// Faults of a batch's number of query tiles (capacity), before any tile is made. Each tile is at
// least one item per head. If there are few tiles, the exact need of the schedule is found out
// later and reported.
inline PlanFault CheckTiles(const PlanRules& rules, i64 num_tiles) {
  constexpr i64 kFew = 1 << 16;
  if (num_tiles >= kMaxQueryTiles) return MakeFault(kFaultTiles, 0, num_tiles);
  const i64 num_items = num_tiles * rules.num_kv_heads;
  if (num_tiles <= kFew || num_items <= rules.max_items) return {};
  return MakeFault(kFaultItems, 0, num_items);
}

// coarse_cost: the sum over all tiles.
inline PlanFault CheckCost(const PlanRules& rules, i64 coarse_cost) {
  if (coarse_cost <= (kMaxTotalCost >> kCoarseBits) / rules.num_units) return {};
  constexpr int kGotBits = 32 + 4 - kCoarseBits;  // 2^32 kv tokens of 16 each
  return MakeFault(kFaultCost, 0, (coarse_cost >> kGotBits) * rules.num_units);
}
// Whether the sum of costs can overflow and must be computed. longest: upper bound on the cost of a
// tile; 2^32 - 1 also stands for more.
inline bool MayCostTooMuch(const PlanRules& rules, i64 num_tiles, i64 longest) {
  return longest == 0xffffffffll || num_tiles * longest > kMaxTotalCost / rules.num_units;
}

// Whether the map covers all positions that rows of the tile may see.
inline PlanFault CheckMapColumns(const BlockMap& map, const QueryTile& t) {
  if (t.kv_begin == t.kv_end || (t.kv_end - 1) / map.kv_block < map.num_columns) return {};
  return MakeFault(kFaultMapColumns, t.request, map.num_columns, t.kv_end);
}

// Capacity check of the lists of all tiles, after CheckMapColumns.
inline PlanFault CheckSteps(const PlanRules& rules, i64 num_steps) {
  return num_steps > rules.max_steps ? MakeFault(kFaultSteps, 0, num_steps) : PlanFault{};
}

// Entries that a schedule needs in a plan's sections.
struct PlanCounts {
  i64 num_items, num_merge_groups, num_partials, num_partial_rows;
};

inline PlanFault CheckCapacities(const PlanRules& rules, const PlanCounts& n) {
  if (n.num_items > rules.max_items) return MakeFault(kFaultItems, 0, n.num_items);
  if (n.num_merge_groups > rules.max_merge_groups) {  // half of the items at most
    return MakeFault(kFaultMergeGroups, 0, 2 * n.num_merge_groups);
  }
  if (n.num_partials > rules.max_partials) return MakeFault(kFaultPartials, 0, n.num_partials);
  if (n.num_partial_rows > rules.max_partial_rows) {
    return MakeFault(kFaultPartialRows, 0, n.num_partial_rows);
  }
  return {};
}

}  // namespace jax_attn
