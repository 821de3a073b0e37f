// Prefixes that requests share, level by level, as given with a batch.
#pragma once

#include "plan/rules/integers.h"

namespace jax_attn {

inline const i32* BordersOf(const PrefixLevels& levels, i32 level) {
  return levels.request_indptr + static_cast<i64>(level) * (levels.num_prefixes + 1);
}
// The prefix at this level that request r has.
inline i32 PrefixOf(const PrefixLevels& levels, i32 level, i64 r) {
  return LastAtMost(BordersOf(levels, level), levels.num_prefixes, r);
}
inline i32 PrefixLen(const PrefixLevels& levels, i32 level, i32 i) {
  return levels.prefix_lens[static_cast<i64>(level) * levels.num_prefixes + i];
}

// An earlier request than r, and the leading pages that both have in common.
struct CommonPages {
  i32 request, num_pages;
};
inline CommonPages CommonPagesOf(const PlanRules& rules, const PlanInputs& in,
                                 const PrefixLevels& levels, i32 r) {
  CommonPages common = {r - 1, 0};
  if (in.qo_indptr[r + 1] == in.qo_indptr[r]) return common;
  while (common.request >= 0 && in.qo_indptr[common.request + 1] == in.qo_indptr[common.request]) {
    --common.request;
  }
  for (i32 level = 0; level < levels.num_levels && common.request >= 0; ++level) {
    const i32 i = PrefixOf(levels, level, r);
    if (common.request < BordersOf(levels, level)[i]) break;  // then deeper levels differ, too
    const i32 num_pages = PrefixLen(levels, level, i) / rules.page_size;
    common.num_pages = static_cast<i32>(Largest(common.num_pages, num_pages));
  }
  return common;
}

}  // namespace jax_attn
