// Plans whose merges are trees, which the planner writes only for large merges.
#pragma once

#include <algorithm>
#include <vector>

#include "params.h"

namespace jax_attn {

// Turns each merge group into a tree if possible: one group per batch of its partial states, with
// the old group as parent; a last batch of one state stays with the parent. Items with several
// groups keep them, and groups that do not begin with a full batch are unchanged. The results must
// keep their bits.
inline void MakeMergeTrees(const std::vector<int32_t>& partial_rows, WorkItem* items, int num_items,
                           std::vector<MergeGroup>* groups) {
  const auto num_groups = static_cast<int>(groups->size());
  std::vector<bool> is_shared(num_groups, false);
  for (int i = 0; i < num_items; ++i) {
    if (!IsShared(items[i])) continue;
    std::fill_n(is_shared.begin() + items[i].merge_idx, items[i].num_groups, true);
  }
  std::vector<int> num_partials(num_groups, 0), first_child(num_groups, 0);
  for (int g = 0; g < num_groups; ++g) {
    MergeGroup parent = (*groups)[g];
    if (is_shared[g] || parent.first_offset > 0 || parent.parent >= 0 || IsParent(parent)) {
      continue;
    }
    num_partials[g] = parent.num_partials;
    first_child[g] = static_cast<int>(groups->size());
    for (int i = 0; i + 1 < num_partials[g]; i += kReduceBatch) {
      MergeGroup child = parent;
      child.num_partials = std::min(num_partials[g] - i, kReduceBatch);
      child.partials_begin += i;
      child.parent = g;
      groups->push_back(child);
    }
    parent.num_partials = (num_partials[g] + kReduceBatch - 1) / kReduceBatch;
    parent.partials_step = kReduceBatch;
    (*groups)[g] = parent;
  }
  for (int i = 0; i < num_items; ++i) {
    WorkItem& item = items[i];
    if (item.num_groups != 1 || num_partials[item.merge_idx] == 0) continue;
    const auto begin = partial_rows.begin() + (*groups)[item.merge_idx].partials_begin;
    const int n = num_partials[item.merge_idx];
    const auto at = static_cast<int>(std::find(begin, begin + n, item.partial_row) - begin);
    if (at % kReduceBatch == 0 && at == n - 1) continue;
    item.merge_idx = first_child[item.merge_idx] + at / kReduceBatch;
  }
}

}  // namespace jax_attn
