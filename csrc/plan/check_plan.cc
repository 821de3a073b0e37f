#include <algorithm>
#include <string>
#include <vector>

#include "plan/check.h"
#include "plan/plan.h"
#include "plan/rules/merges.h"
#include "plan/rules/sharing.h"

namespace jax_attn {
namespace {

std::string At(const char* section, int64_t i) {
  return std::string(section) + "[" + std::to_string(i) + "]";
}

Status Refuse(const std::string& what, const std::string& expected, int64_t got) {
  return Status::Error("plan: " + what + ": expected " + expected + ", got " + std::to_string(got) +
                       ".");
}

Status Refuse(const char* section, int64_t i, const char* field, const std::string& expected,
              int64_t got) {
  return Refuse(At(section, i) + "." + field, expected, got);
}

std::string Between(int64_t least, int64_t most) {
  return std::to_string(least) + " to " + std::to_string(most);
}

std::string Equal(int64_t value, const std::string& what) {
  return std::to_string(value) + ", " + what;
}

const PlanHeader& HeaderOf(const PlanLayout& layout, const int32_t* plan) {
  return *reinterpret_cast<const PlanHeader*>(plan + layout.header);
}

struct KvSpan {
  int64_t begin, end;
};

class PlanChecker {
 public:
  PlanChecker(const AttentionProblem& problem, const PlanLayout& layout, const int32_t* plan)
      : spec_(problem.spec),
        config_(problem.config),
        rules_(MakePlanRules(problem)),
        header_(HeaderOf(layout, plan)),
        group_size_(problem.spec.group_size()),
        queue_indptr_(plan + layout.queue_indptr),
        qo_indptr_(plan + layout.qo_indptr),
        kv_lens_(plan + layout.kv_lens),
        kv_indptr_(plan + layout.kv_indptr),
        partial_rows_(plan + layout.partial_rows),
        qo_indices_(plan + layout.qo_indices),
        steps_(plan + layout.steps),
        items_(reinterpret_cast<const WorkItem*>(plan + layout.items)),
        groups_(reinterpret_cast<const MergeGroup*>(plan + layout.merge_groups)) {}

  // Checks a plan whose batch is already checked. Each check relies on those before it.
  Status Run() {
    JAX_ATTN_RETURN_IF_ERROR(CheckQueues());
    JAX_ATTN_RETURN_IF_ERROR(CheckGroups());
    JAX_ATTN_RETURN_IF_ERROR(CheckParents());
    JAX_ATTN_RETURN_IF_ERROR(CheckStates());
    JAX_ATTN_RETURN_IF_ERROR(CheckItems());
    JAX_ATTN_RETURN_IF_ERROR(CheckSpans());
    return CheckRows();
  }

 private:
  static constexpr int32_t kNone = -1;

  Status CheckQueues() const {
    if (queue_indptr_[0] != 0) return Refuse("queue_indptr[0]", "0", queue_indptr_[0]);
    for (int64_t c = 1; c <= config_.num_ctas; ++c) {
      if (queue_indptr_[c] < queue_indptr_[c - 1]) {
        return Refuse(At("queue_indptr", c),
                      "offsets that never decrease (the one before is " +
                          std::to_string(queue_indptr_[c - 1]) + ")",
                      queue_indptr_[c]);
      }
    }
    return Status::Ok();
  }

  // ---- merge groups and the states they read

  Status CheckGroups() {
    for (int64_t g = 0; g < header_.num_merge_groups; ++g) {
      const MergeGroup& group = groups_[g];
      const auto refuse = [&](const char* field, const std::string& expected, int64_t got) {
        return Refuse("merge_groups", g, field, expected, got);
      };
      if (group.qo_begin < 0 || group.qo_begin >= header_.nnz_qo) {
        return refuse("qo_begin", Between(0, int64_t{header_.nnz_qo} - 1), group.qo_begin);
      }
      const int64_t most_tokens =
          Least(TallestTileTokens(rules_), int64_t{header_.nnz_qo} - group.qo_begin);
      if (group.qo_len < 1 || group.qo_len > most_tokens) {
        return refuse("qo_len", Between(1, most_tokens), group.qo_len);
      }
      if (group.kv_head < 0 || group.kv_head >= spec_.num_kv_heads) {
        return refuse("kv_head", Between(0, spec_.num_kv_heads - 1), group.kv_head);
      }
      const bool may_be_parent = !rules_.shares_reductions;
      if (group.partials_step != 1 && !(may_be_parent && group.partials_step == kReduceBatch)) {
        return refuse("partials_step", may_be_parent ? "1, or 8 of a parent" : "1",
                      group.partials_step);
      }
      if (group.num_partials < 1 || group.partials_begin < 0 ||
          LastSlot(group) >= header_.num_partials) {
        return refuse(
            "partials_begin",
            "entries within the " + std::to_string(header_.num_partials) +
                " of partial_rows for num_partials = " + std::to_string(group.num_partials),
            group.partials_begin);
      }
      if (group.parent < -1 || group.parent >= header_.num_merge_groups) {
        return refuse("parent", Between(-1, int64_t{header_.num_merge_groups} - 1), group.parent);
      }
      const int32_t last_place = spec_.schedule == kFixedSplit ? kReduceBatch - 1 : 0;
      const bool is_alone = !IsParent(group) && group.parent < 0;
      if (group.first_offset < 0 || group.first_offset > (is_alone ? last_place : 0)) {
        return refuse("first_offset", Between(0, is_alone ? last_place : 0), group.first_offset);
      }
    }
    return Status::Ok();
  }

  // Finds which group reads each entry of partial_rows first: exactly one group, and never a parent
  // where a child reads it. A parent reads what its children leave at their first entry.
  Status CheckParents() {
    reader_.assign(header_.num_partials, kNone);
    int64_t num_children = 0, num_found = 0;
    for (int32_t g = 0; g < header_.num_merge_groups; ++g) {
      const MergeGroup& group = groups_[g];
      num_children += group.parent >= 0;
      if (IsParent(group)) continue;
      for (int32_t i = 0; i < group.num_partials; ++i) {
        int32_t& reader = reader_[group.partials_begin + i];
        if (reader != kNone) return RefuseReader(g, group.partials_begin + i, reader);
        reader = g;
      }
    }
    for (int32_t g = 0; g < header_.num_merge_groups; ++g) {
      const MergeGroup& group = groups_[g];
      if (!IsParent(group)) continue;
      if (group.parent >= 0) {
        return Refuse("merge_groups", g, "parent", "-1 of a parent", group.parent);
      }
      for (int64_t i = 0; i < group.num_partials; ++i) {
        const int64_t slot = group.partials_begin + i * kReduceBatch;
        int32_t& reader = reader_[slot];
        if (reader == kNone) {
          reader = g;
          continue;
        }
        const MergeGroup& child = groups_[reader];
        const bool is_child = child.parent == g && child.partials_begin == slot &&
                              child.qo_begin == group.qo_begin && child.qo_len == group.qo_len &&
                              child.kv_head == group.kv_head;
        if (!is_child) return RefuseReader(g, slot, reader);
        ++num_found;
      }
    }
    // Children are distinct because their first entries are.
    if (num_found != num_children) {
      for (int32_t g = 0; g < header_.num_merge_groups; ++g) {
        const i32 parent = groups_[g].parent;
        if (parent >= 0 && !IsChild(g)) {
          return Refuse("merge_groups", g, "parent", "a group that reads its result, or -1",
                        parent);
        }
      }
    }
    const auto unread = std::find(reader_.begin(), reader_.end(), kNone);
    if (unread == reader_.end()) return Status::Ok();
    return Refuse("header.num_partials", "entries of partial_rows that a merge group reads each",
                  header_.num_partials);
  }

  Status RefuseReader(int32_t g, int64_t slot, int32_t reader) const {
    return Refuse("merge_groups", g, "partials_begin",
                  "entries of its own, or what its children leave, of which " +
                      At("partial_rows", slot) + " is one of merge group " + std::to_string(reader),
                  groups_[g].partials_begin);
  }

  bool IsChild(int32_t g) const {
    const MergeGroup& parent = groups_[groups_[g].parent];
    const int64_t behind = int64_t{groups_[g].partials_begin} - parent.partials_begin;
    return IsParent(parent) && behind >= 0 && behind % kReduceBatch == 0 &&
           behind / kReduceBatch < parent.num_partials;
  }

  // States do not overlap and lie within the workspace. Rows are counted in tokens of group_size
  // rows each.
  Status CheckStates() {
    int64_t num_rows = 0;
    state_at_.assign(header_.num_partial_rows / group_size_, kNone);
    for (int32_t slot = 0; slot < header_.num_partials; ++slot) {
      const int64_t row = partial_rows_[slot], tokens = groups_[reader_[slot]].qo_len;
      const int64_t last = header_.num_partial_rows - tokens * group_size_;
      if (row < 0 || row > last || row % group_size_ != 0) {
        return Refuse(At("partial_rows", slot),
                      "a multiple of " + std::to_string(group_size_) + ", " + Between(0, last),
                      row);
      }
      const auto begin = state_at_.begin() + row / group_size_, end = begin + tokens;
      const auto taken = std::find_if(begin, end, [](int32_t x) { return x != kNone; });
      if (taken != end) {
        return Refuse(At("partial_rows", slot), "rows apart from those of the other states", row);
      }
      std::fill(begin, end, kInside);
      *begin = slot;
      num_rows += tokens * group_size_;
    }
    if (num_rows == header_.num_partial_rows) return Status::Ok();
    return Refuse("header.num_partial_rows", Equal(num_rows, "those of all states"),
                  header_.num_partial_rows);
  }

  // ---- items

  Status CheckItems() {
    int32_t shared_end = 0;
    writer_.assign(header_.num_partials, kNone);
    for (int32_t i = 0; i < header_.num_items; ++i) {
      const WorkItem& item = items_[i];
      JAX_ATTN_RETURN_IF_ERROR(CheckShape(i, item));
      JAX_ATTN_RETURN_IF_ERROR(CheckRequestOf(i, item));
      if (!IsFinal(item)) JAX_ATTN_RETURN_IF_ERROR(CheckGroupsOf(i, item));
      if (IsShared(item)) shared_end = std::max(shared_end, item.first_token + item.qo_len);
    }
    if (shared_end != header_.num_shared_tokens) {
      return Refuse("header.num_shared_tokens", Equal(shared_end, "those of shared items"),
                    header_.num_shared_tokens);
    }
    const auto missing = std::find(writer_.begin(), writer_.end(), kNone);
    if (missing == writer_.end()) return Status::Ok();
    const int64_t slot = missing - writer_.begin();
    return Status::Error("plan: items: expected one that writes the state at " +
                         At("partial_rows", slot) + " = " + std::to_string(partial_rows_[slot]) +
                         ", for which merge group " + std::to_string(reader_[slot]) +
                         " waits, got none.");
  }

  Status CheckShape(int32_t i, const WorkItem& item) const {
    const auto refuse = [&](const char* field, const std::string& expected, int64_t got) {
      return Refuse("items", i, field, expected, got);
    };
    if (item.kv_head < 0 || item.kv_head >= spec_.num_kv_heads) {
      return refuse("kv_head", Between(0, spec_.num_kv_heads - 1), item.kv_head);
    }
    if (item.tile < 0 || item.tile >= config_.num_tiles) {
      return refuse("tile", Between(0, config_.num_tiles - 1), item.tile);
    }
    const bool is_shared = IsShared(item);
    const int64_t tokens = is_shared ? header_.num_shared_tokens : header_.nnz_qo;
    if (item.first_token < 0 || item.first_token >= tokens) {
      return refuse("first_token", Between(0, tokens - 1), item.first_token);
    }
    const int64_t most = Least(rules_.tile_tokens[item.tile], tokens - item.first_token);
    if (item.qo_len < 1 || item.qo_len > most) {
      return refuse("qo_len", Between(1, most), item.qo_len);
    }
    if (item.num_groups < 0 || item.num_groups > item.qo_len) {
      return refuse("num_groups", Between(0, item.qo_len), item.num_groups);
    }
    const bool is_final = IsFinal(item);
    if (is_final ? item.partial_row != -1 : item.partial_row < 0) {
      return refuse("partial_row", is_final ? "-1 of a final item" : "a row of the workspace",
                    item.partial_row);
    }
    const int64_t last_idx = is_final ? -1 : int64_t{header_.num_merge_groups} - item.num_groups;
    if (item.merge_idx < (is_final ? -1 : 0) || item.merge_idx > last_idx) {
      return refuse("merge_idx", is_final ? "-1 of a final item" : Between(0, last_idx),
                    item.merge_idx);
    }
    return Status::Ok();
  }

  // An item reads q rows of its own request and only keys that this request has. A shared item
  // belongs to several requests and reads the pages of the first one.
  Status CheckRequestOf(int32_t i, const WorkItem& item) const {
    const auto refuse = [&](const char* field, const std::string& expected, int64_t got) {
      return Refuse("items", i, field, expected, got);
    };
    if (item.request < 0 || item.request >= header_.batch_size) {
      return refuse("request", Between(0, int64_t{header_.batch_size} - 1), item.request);
    }
    const bool is_shared = IsShared(item);
    const int64_t first = QueryRow(item, qo_indices_, 0);
    const int64_t end = first + (is_shared ? 1 : item.qo_len);
    if (first < qo_indptr_[item.request] || end > qo_indptr_[item.request + 1]) {
      return refuse("request", "that of its query tokens, from row " + std::to_string(first),
                    item.request);
    }
    if (item.kv_base != kv_indptr_[item.request]) {
      return refuse("kv_base", Equal(kv_indptr_[item.request], "where its request begins"),
                    item.kv_base);
    }
    const int64_t tokens =
        IsListed() ? header_.num_steps * config_.tile_kv : int64_t{kv_lens_[item.request]};
    if (item.kv_end < 0 || item.kv_end > tokens) {
      return refuse("kv_end",
                    Between(0, tokens) + (IsListed() ? " by header.num_steps" : " by kv_lens"),
                    item.kv_end);
    }
    if (item.kv_begin < 0 || item.kv_begin > item.kv_end) {
      return refuse("kv_begin", Between(0, item.kv_end), item.kv_begin);
    }
    if (item.q_pos <= -kPositionLimit || item.q_pos > kPositionLimit - item.qo_len) {
      return refuse("q_pos", "positions in (-2^30, 2^30)", item.q_pos);
    }
    if (IsListed()) JAX_ATTN_RETURN_IF_ERROR(CheckSteps(i, item));
    if (!is_shared || HasEmptyList(item)) return Status::Ok();
    if (spec_.fresh_kv && KeysOf(item).end > CachedTokens(item.request)) {
      return refuse(
          "kv_end",
          "at most the cached tokens of its request, " + std::to_string(CachedTokens(item.request)),
          item.kv_end);
    }
    if (!EveryRowSees(item, item.q_pos)) {
      return refuse("q_pos", "one from which every row sees all of a shared item's keys",
                    item.q_pos);
    }
    return Status::Ok();
  }

  bool HasEmptyList(const WorkItem& item) const {
    return IsListed() && item.kv_begin == item.kv_end;
  }

  // The span from the first to the last key of an item whose step list is not empty.
  KvSpan KeysOf(const WorkItem& item) const {
    if (!IsListed()) return {item.kv_begin, item.kv_end};
    const int64_t tile_kv = config_.tile_kv;
    const int64_t first = steps_[item.kv_begin / tile_kv] >> 1;
    const int64_t last = steps_[item.kv_end / tile_kv - 1] >> 1;
    return {first * tile_kv, std::min<int64_t>(kv_lens_[item.request], (last + 1) * tile_kv)};
  }

  // Steps ascend, and the item's rows see part of each. Items of other heads have the same steps.
  Status CheckSteps(int32_t i, const WorkItem& item) const {
    const int64_t tile_kv = config_.tile_kv;
    for (const char* field : {"kv_begin", "kv_end"}) {
      const int32_t place = field[3] == 'b' ? item.kv_begin : item.kv_end;
      if (place % tile_kv == 0) continue;
      return Refuse("items", i, field, "a multiple of tile_kv = " + std::to_string(tile_kv), place);
    }
    const auto same = [&](const WorkItem& before) {
      return before.kv_begin == item.kv_begin && before.kv_end == item.kv_end &&
             before.request == item.request && before.q_pos == item.q_pos &&
             before.qo_len == item.qo_len;
    };
    if (i > 0 && same(items_[i - 1])) return Status::Ok();
    const KvSpan visible = VisibleSpan(item);
    const int64_t first = item.kv_begin / tile_kv, end = item.kv_end / tile_kv;
    int64_t least = visible.begin / tile_kv;
    const int64_t most = CeilDivide(visible.end, tile_kv) - 1;
    for (int64_t e = first; e < end; ++e) {
      const int64_t step = steps_[e] >> 1;
      if (step < least || step > most) {
        return Refuse(At("steps", e),
                      "a step, times 2, of " + Between(least, most) + " for " + At("items", i),
                      steps_[e]);
      }
      least = step + 1;
    }
    return Status::Ok();
  }

  int64_t CachedTokens(int32_t r) const {
    return int64_t{kv_lens_[r]} - (qo_indptr_[r + 1] - qo_indptr_[r]);
  }

  // Whether every row sees all keys of the item if its first query token is at position `first`.
  // Step lists: without the mask.
  bool EveryRowSees(const WorkItem& item, int64_t first) const {
    if (HasEmptyList(item)) return true;
    const int64_t last = first + item.qo_len - 1, tile_kv = config_.tile_kv;
    const KvSpan keys = KeysOf(item);
    for (int64_t e = item.kv_begin / tile_kv; IsListed() && e < item.kv_end / tile_kv; ++e) {
      if (steps_[e] & 1) return false;
    }
    return (spec_.window_right < 0 || first + spec_.window_right >= keys.end - 1) &&
           (spec_.window_left < 0 || last - spec_.window_left <= keys.begin);
  }

  // An item's tokens are those of its merge groups, in order, and its workspace rows are the ones
  // that these groups read.
  Status CheckGroupsOf(int32_t i, const WorkItem& item) {
    const bool is_shared = IsShared(item);
    int64_t token = 0;
    for (int32_t g = item.merge_idx; g < item.merge_idx + item.num_groups; ++g) {
      const MergeGroup& group = groups_[g];
      const bool is_alone = group.parent < 0 && !IsParent(group) && group.first_offset == 0;
      bool same = group.kv_head == item.kv_head && group.qo_len <= item.qo_len - token &&
                  (!is_shared || is_alone);
      if (is_shared) {
        const int32_t* rows = qo_indices_ + item.first_token + token;
        for (int32_t t = 0; same && t < group.qo_len; ++t) same = rows[t] == group.qo_begin + t;
      } else {
        same = same && group.qo_begin == item.first_token && group.qo_len == item.qo_len;
      }
      if (!same) {
        return Refuse("items", i, "merge_idx",
                      "merge groups of its query tokens and kv head, which " +
                          At("merge_groups", g) + " is not",
                      item.merge_idx);
      }
      const int64_t row = item.partial_row + token * group_size_;
      const int32_t slot = SlotAt(row);
      if (slot < 0 || reader_[slot] != g || writer_[slot] != kNone) {
        return Refuse(
            "items", i, "partial_row",
            "rows that merge group " + std::to_string(g) + " reads and no other item writes",
            item.partial_row);
      }
      writer_[slot] = i;
      token += group.qo_len;
    }
    if (token == item.qo_len) return Status::Ok();
    return Refuse("items", i, "num_groups",
                  "merge groups of all its " + std::to_string(item.qo_len) + " query tokens",
                  item.num_groups);
  }

  // The entry of partial_rows whose state begins at this workspace row; negative: none.
  int32_t SlotAt(int64_t row) const {
    const bool is_there = row % group_size_ == 0 && row < header_.num_partial_rows;
    return is_there ? state_at_[row / group_size_] : kNone;
  }

  // ---- results

  // The keys that at least one row of a tile sees, clipped as in MakeTile.
  KvSpan VisibleSpan(const WorkItem& item) const {
    int64_t begin = 0, end = kv_lens_[item.request];
    const int64_t first = item.q_pos, last = first + item.qo_len - 1;
    if (spec_.window_left >= 0) begin = std::max(begin, first - spec_.window_left);
    if (spec_.window_right >= 0) end = std::min(end, last + spec_.window_right + 1);
    return end > begin ? KvSpan{begin, end} : KvSpan{0, 0};
  }

  // The states of a result cover all keys that its rows see, each once, in order.
  Status CheckSpans() const {
    for (int32_t g = 0; g < header_.num_merge_groups; ++g) {
      const MergeGroup& group = groups_[g];
      if (group.parent >= 0) continue;
      const int32_t end = EndOfEntries(group);
      // The last state is the tile's own, at its own positions.
      const WorkItem& own = items_[writer_[end - 1]];
      const KvSpan visible =
          IsListed() ? KvSpan{items_[writer_[group.partials_begin]].kv_begin, own.kv_end}
                     : VisibleSpan(own);
      if (group.first_offset != FirstPlace(visible.begin)) {
        return Refuse("merge_groups", g, "first_offset",
                      Equal(FirstPlace(visible.begin), "by its first key"), group.first_offset);
      }
      int64_t next = visible.begin, last_step = -1;
      const WorkItem* before = nullptr;
      for (int32_t slot = group.partials_begin; slot < end; ++slot) {
        const int32_t i = writer_[slot];
        const WorkItem& item = items_[i];
        // Each tile has one step list; with shared prefixes a result comes from several tiles.
        const bool is_other_list =
            IsListed() && spec_.share_prefixes && before != nullptr &&
            (before->first_token != item.first_token || before->num_groups != item.num_groups ||
             before->q_pos != item.q_pos);
        if (item.kv_begin != next && !is_other_list) {
          return Refuse("items", i, "kv_begin", Equal(next, "where the state before it ends"),
                        item.kv_begin);
        }
        if (IsListed() && item.kv_begin < item.kv_end) {
          const int64_t e = item.kv_begin / config_.tile_kv;
          if (steps_[e] >> 1 <= last_step) {
            return Refuse(At("steps", e), "a later step than the state before it has", steps_[e]);
          }
          last_step = steps_[item.kv_end / config_.tile_kv - 1] >> 1;
        }
        before = &item;
        // A prefix shared by only one request has made-up positions, too.
        const bool all_see = (!IsListed() || spec_.share_prefixes) &&
                             EveryRowSees(item, item.q_pos) && EveryRowSees(item, own.q_pos);
        if (item.num_groups == 1 && item.q_pos != own.q_pos && !all_see) {
          return Refuse("items", i, "q_pos",
                        Equal(own.q_pos, "as of " + At("items", writer_[end - 1])), item.q_pos);
        }
        next = item.kv_end;
      }
      if (IsShared(own) || next != visible.end) {
        return Refuse("items", writer_[end - 1], "kv_end",
                      Equal(visible.end, "the last key that its rows see"), own.kv_end);
      }
    }
    return Status::Ok();
  }

  bool IsListed() const { return rules_.max_steps > 0; }

  // Same as FirstReduceOffset.
  int32_t FirstPlace(int64_t kv_begin) const {
    if (spec_.schedule != kFixedSplit || IsListed()) return 0;
    return static_cast<int32_t>(kv_begin / spec_.kv_split % kReduceBatch);
  }

  static int64_t LastSlot(const MergeGroup& group) {
    return group.partials_begin + (int64_t{group.num_partials} - 1) * group.partials_step;
  }

  // End (exclusive) of a final group's entries in partial_rows, its children's included.
  int32_t EndOfEntries(const MergeGroup& group) const {
    const auto last = static_cast<int32_t>(LastSlot(group));
    const MergeGroup& reader = groups_[reader_[last]];
    return IsParent(reader) ? last + 1 : reader.partials_begin + reader.num_partials;
  }

  // Every row of o and lse is written once: by a final item or by a final merge group.
  Status CheckRows() {
    written_.assign(int64_t{header_.nnz_qo} * spec_.num_kv_heads, 0);
    first_pos_.assign(header_.batch_size, kNone);
    for (int32_t i = 0; i < header_.num_items; ++i) {
      const WorkItem& item = items_[i];
      if (!IsFinal(item)) continue;
      const KvSpan visible = IsListed() ? KvSpan{item.kv_begin, item.kv_end} : VisibleSpan(item);
      if (item.kv_begin != visible.begin) {
        return Refuse("items", i, "kv_begin", Equal(visible.begin, "the first key its rows see"),
                      item.kv_begin);
      }
      if (item.kv_end != visible.end) {
        return Refuse("items", i, "kv_end", Equal(visible.end, "the last key its rows see"),
                      item.kv_end);
      }
      JAX_ATTN_RETURN_IF_ERROR(CheckPositions(i));
      JAX_ATTN_RETURN_IF_ERROR(
          Write("items", i, "first_token", item.kv_head, item.first_token, item.qo_len));
    }
    for (int32_t g = 0; g < header_.num_merge_groups; ++g) {
      const MergeGroup& group = groups_[g];
      if (group.parent >= 0) continue;
      JAX_ATTN_RETURN_IF_ERROR(CheckPositions(writer_[EndOfEntries(group) - 1]));
      JAX_ATTN_RETURN_IF_ERROR(
          Write("merge_groups", g, "qo_begin", group.kv_head, group.qo_begin, group.qo_len));
    }
    const auto missing = std::find(written_.begin(), written_.end(), 0);
    if (missing == written_.end()) return Status::Ok();
    const int64_t at = missing - written_.begin();
    return Status::Error("plan: items: expected one that writes query token " +
                         std::to_string(at % header_.nnz_qo) + ", kv head " +
                         std::to_string(at / header_.nnz_qo) + ", got none.");
  }

  // All tiles of a request, and all heads, have its tokens at the same positions.
  Status CheckPositions(int32_t i) {
    const WorkItem& item = items_[i];
    const int32_t behind = item.first_token - qo_indptr_[item.request];
    int32_t& other = first_pos_[item.request];  // an item of the request
    if (other == kNone) other = i;
    const WorkItem& first = items_[other];
    const int64_t expected =
        int64_t{first.q_pos} - (first.first_token - qo_indptr_[item.request]) + behind;
    if (item.q_pos == expected) return Status::Ok();
    return Refuse("items", i, "q_pos", Equal(expected, "as " + At("items", other) + " has it"),
                  item.q_pos);
  }

  Status Write(const char* section, int64_t i, const char* field, int64_t head, int64_t begin,
               int64_t len) {
    const auto first = written_.begin() + head * header_.nnz_qo + begin;
    if (std::find(first, first + len, 1) != first + len) {
      return Refuse(section, i, field, "query tokens that nobody else writes", begin);
    }
    std::fill(first, first + len, 1);
    return Status::Ok();
  }

  static constexpr int32_t kInside = -2;  // state rows after its first token

  const AttentionSpec& spec_;
  const KernelConfig& config_;
  const PlanRules rules_;
  const PlanHeader& header_;
  const int64_t group_size_;
  const int32_t *queue_indptr_, *qo_indptr_, *kv_lens_, *kv_indptr_, *partial_rows_, *qo_indices_,
      *steps_;
  const WorkItem* items_;
  const MergeGroup* groups_;
  std::vector<int32_t> reader_;     // [num_partials] merge group that reads the state first
  std::vector<int32_t> writer_;     // [num_partials] item that writes it
  std::vector<int32_t> state_at_;   // [num_partial_rows / group_size] entry of partial_rows
  std::vector<char> written_;       // [num_kv_heads, nnz_qo]
  std::vector<int32_t> first_pos_;  // [batch_size] first item found for the request
};

// Checks in constant time: the plan's header, counts against capacities, and the last entry of
// every indptr. A faulty plan returns the sentence of its fault.
Status CheckPlanHeader(const AttentionProblem& problem, const int32_t* plan, int64_t num_pages) {
  const AttentionSpec& spec = problem.spec;
  const KernelConfig& config = problem.config;
  const PlanLayout layout = MakePlanLayout(problem);
  const PlanHeader& h = HeaderOf(layout, plan);
  if (h.magic == kFaultyPlanMagic) {
    JAX_ATTN_RETURN_IF_ERROR(
        DescribeFault(problem, {h.fault, h.fault_at, h.fault_got, h.fault_expected}));
  }
  if (h.magic != kPlanMagic || h.version != kPlanVersion) {
    return Status::Error(
        "plan: expected a buffer made by jax_attn.plan of this version, whose "
        "header begins with " +
        std::to_string(kPlanMagic) + ", " + std::to_string(kPlanVersion) + ", got " +
        std::to_string(h.magic) + ", " + std::to_string(h.version) + ".");
  }
  const struct {
    const char* name;
    int64_t value, most;
  } counts[] = {
      {"header.batch_size", h.batch_size, spec.max_batch},
      {"header.nnz_qo", h.nnz_qo, spec.max_qo_tokens},
      {"header.num_items", h.num_items, config.max_items},
      {"header.num_merge_groups", h.num_merge_groups, config.max_merge_groups},
      {"header.num_partial_rows", h.num_partial_rows, config.max_partial_rows},
      {"header.nnz_kv", h.nnz_kv, spec.paged() ? spec.max_kv_pages : spec.max_kv_tokens},
      {"header.num_partials", h.num_partials, config.max_partials},
      {"header.num_shared_tokens", h.num_shared_tokens, config.max_shared_tokens},
      {"header.num_steps", h.num_steps, spec.max_steps},
  };
  for (const auto& count : counts) {
    if (count.value < 0 || count.value > count.most) {
      return Refuse(count.name, Between(0, count.most), count.value);
    }
  }
  const struct {
    const char* name;
    int64_t at;
    const char* count;
    int64_t expected;
  } ends[] = {
      {"queue_indptr", config.num_ctas, "num_items", h.num_items},
      {"qo_indptr", h.batch_size, "nnz_qo", h.nnz_qo},
      {spec.paged() ? "page_indptr" : "kv_indptr", h.batch_size, "nnz_kv", h.nnz_kv},
  };
  const int64_t sections[] = {layout.queue_indptr, layout.qo_indptr, layout.kv_indptr};
  for (int i = 0; i < 3; ++i) {
    const int32_t end = plan[sections[i] + ends[i].at];
    if (end != ends[i].expected) {
      return Refuse(At(ends[i].name, ends[i].at),
                    Equal(ends[i].expected, std::string("header.") + ends[i].count), end);
    }
  }
  if (num_pages < 0) num_pages = spec.num_pages;
  const int64_t most_id = !spec.paged() ? -1 : num_pages < 0 ? kMaxInt32 : num_pages - 1;
  if (h.max_page_id >= -1 && h.max_page_id <= most_id) return Status::Ok();
  return Refuse("header.max_page_id",
                "page ids below the pool's " + std::to_string(most_id + 1) + " pages",
                h.max_page_id);
}

}  // namespace

Status CheckPlanBatch(const AttentionProblem& problem, const int32_t* plan, int64_t num_pages) {
  JAX_ATTN_RETURN_IF_ERROR(CheckPlanHeader(problem, plan, num_pages));
  const PlanLayout layout = MakePlanLayout(problem);
  const PlanHeader& header = HeaderOf(layout, plan);
  PlanInputs in = {};
  in.qo_indptr = plan + layout.qo_indptr;
  in.kv_lens = plan + layout.kv_lens;
  in.kv_indptr = plan + layout.kv_indptr;
  in.page_indices = plan + layout.page_indices;
  in.batch_size = header.batch_size;
  in.num_page_indices = header.nnz_kv;
  const PlanRules rules = MakePlanRules(problem);
  int32_t largest = -1;
  if (const PlanFault fault = CheckInputs(rules, in, &largest); fault.code != kNoFault) {
    return DescribeFault(problem, fault);
  }
  if (largest == header.max_page_id) return Status::Ok();
  // Entries that hold no token of a request may have any value.
  for (int64_t r = 0; r < header.batch_size && largest > header.max_page_id; ++r) {
    const int32_t begin = in.kv_indptr[r], end = begin + NumPages(rules, in.kv_lens[r]);
    for (int32_t i = begin; i < end; ++i) {
      if (in.page_indices[i] > header.max_page_id) {
        return Refuse(At("page_indices", i),
                      Between(0, header.max_page_id) + " by header.max_page_id",
                      in.page_indices[i]);
      }
    }
  }
  return Refuse("header.max_page_id", Equal(largest, "the largest of page_indices"),
                header.max_page_id);
}

Status CheckPlan(const AttentionProblem& problem, const int32_t* plan, int64_t num_pages) {
  JAX_ATTN_RETURN_IF_ERROR(CheckPlanBatch(problem, plan, num_pages));
  return PlanChecker(problem, MakePlanLayout(problem), plan).Run();
}

}  // namespace jax_attn
