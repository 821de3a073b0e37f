// The definition of a correct plan, independent of the planners: intervals of kv positions and of
// query tokens, so that lengths of 2^30 cost no more than others.
#include <algorithm>
#include <cstring>
#include <map>

#include "fuzz/fuzz_case.h"
#include "plan/rules/integers.h"

namespace jax_attn::fuzz {
namespace {

// Query tokens [begin, end), rows of q, that one item attends over [kv_begin, kv_end).
struct Piece {
  int64_t begin, end, kv_begin, kv_end;
};

// The positions [begin, end) of its request that a token sees.
struct Seen {
  int64_t begin, end;
};

class Cover {
 public:
  Cover(const Case& c, const AttentionProblem& problem, const std::vector<int32_t>& plan)
      : c_(c), problem_(problem), spec_(problem.spec), layout_(MakePlanLayout(problem)) {
    std::memcpy(&header_, plan.data() + layout_.header, sizeof(header_));
    queue_indptr_ = plan.data() + layout_.queue_indptr;
    items_ = reinterpret_cast<const WorkItem*>(plan.data() + layout_.items);
    groups_ = reinterpret_cast<const MergeGroup*>(plan.data() + layout_.merge_groups);
    partial_rows_ = plan.data() + layout_.partial_rows;
    qo_indices_ = plan.data() + layout_.qo_indices;
    plan_ = plan.data();
  }

  std::string Check() {
    if (std::string s = CheckSections(); !s.empty()) return s;
    pieces_.resize(spec_.num_kv_heads);
    final_.resize(spec_.num_kv_heads);
    for (int64_t i = 0; i < header_.num_items; ++i) {
      if (std::string s = CheckItem(items_[i]); !s.empty()) {
        return Text("item %lld: ", static_cast<long long>(i)) + s;
      }
    }
    if (std::string s = CheckRows(); !s.empty()) return s;
    if (std::string s = CheckGroups(); !s.empty()) return s;
    for (int64_t head = 0; head < spec_.num_kv_heads; ++head) {
      std::string s = IsListed() ? CheckLists(pieces_[head]) : CheckPieces(&pieces_[head]);
      if (s.empty()) s = CheckFinal(&final_[head]);
      if (!s.empty()) return Text("head %lld: ", static_cast<long long>(head)) + s;
    }
    return "";
  }

 private:
  int64_t QueryBegin(int64_t r) const { return c_.qo_indptr[r]; }
  int64_t RequestOf(int64_t token) const {
    const auto after = std::upper_bound(c_.qo_indptr.begin(), c_.qo_indptr.end(), token);
    return after - c_.qo_indptr.begin() - 1;
  }
  int64_t PositionOf(int64_t r, int64_t token) const {
    const int64_t qo_len = c_.qo_indptr[r + 1] - c_.qo_indptr[r];
    const int64_t first = c_.q_offsets.empty() ? c_.kv_lens[r] - qo_len : c_.q_offsets[r];
    return first + token - c_.qo_indptr[r];
  }
  Seen SeenBy(int64_t r, int64_t token) const {
    const int64_t at = PositionOf(r, token);
    Seen seen = {0, c_.kv_lens[r]};
    if (spec_.window_left >= 0) seen.begin = std::max(seen.begin, at - spec_.window_left);
    if (spec_.window_right >= 0) seen.end = std::min(seen.end, at + spec_.window_right + 1);
    if (seen.end <= seen.begin) seen = {0, 0};
    return seen;
  }

  std::string CheckSections() const {
    const KernelConfig& config = problem_.config;
    if (header_.magic != kPlanMagic || header_.version != kPlanVersion) return "header";
    if (header_.batch_size != c_.batch_size() || header_.nnz_qo != c_.qo_indptr.back() ||
        header_.nnz_kv != c_.kv_indptr.back()) {
      return "header: not of this batch";
    }
    if (header_.num_items > config.max_items || header_.num_partials > config.max_partials ||
        header_.num_merge_groups > config.max_merge_groups ||
        header_.num_partial_rows > config.max_partial_rows ||
        header_.num_shared_tokens > config.max_shared_tokens) {
      return "header: a count above its capacity";
    }
    int32_t largest = -1;
    for (int64_t r = 0; r < c_.batch_size() && spec_.paged(); ++r) {
      const int64_t begin = c_.kv_indptr[r];
      const int64_t used = (c_.kv_lens[r] + spec_.page_size - 1) / spec_.page_size;
      for (int64_t i = begin; i < begin + used; ++i)
        largest = std::max(largest, c_.page_indices[i]);
    }
    if (header_.max_page_id != largest) return "header: max_page_id";
    const auto same = [&](int64_t at, const std::vector<int32_t>& words, size_t n) {
      return std::equal(words.begin(), words.begin() + static_cast<std::ptrdiff_t>(n), plan_ + at);
    };
    if (!same(layout_.qo_indptr, c_.qo_indptr, c_.qo_indptr.size()) ||
        !same(layout_.kv_lens, c_.kv_lens, c_.kv_lens.size()) ||
        !same(layout_.kv_indptr, c_.kv_indptr, c_.kv_indptr.size()) ||
        (spec_.paged() &&
         !same(layout_.page_indices, c_.page_indices, static_cast<size_t>(header_.nnz_kv)))) {
      return "the batch is not what the plan holds";
    }
    if (queue_indptr_[0] != 0 || queue_indptr_[config.num_ctas] != header_.num_items) {
      return "queue_indptr: ends";
    }
    for (int64_t q = 0; q < config.num_ctas; ++q) {
      if (queue_indptr_[q] > queue_indptr_[q + 1]) return "queue_indptr: order";
    }
    return "";
  }

  bool SamePages(int64_t r, int64_t other, int64_t kv_begin, int64_t kv_end) const {
    for (int64_t p = kv_begin / spec_.page_size; p * spec_.page_size < kv_end; ++p) {
      if (c_.page_indices[c_.kv_indptr[r] + p] != c_.page_indices[c_.kv_indptr[other] + p]) {
        return false;
      }
    }
    return true;
  }

  std::string CheckItem(const WorkItem& item) {
    if (item.tile < 0 || item.tile >= problem_.config.num_tiles || item.qo_len < 1 ||
        int64_t{item.qo_len} * spec_.group_size() > problem_.config.tile_q[item.tile]) {
      return Text("%d tokens in tile %d", item.qo_len, item.tile);
    }
    if (item.kv_head < 0 || item.kv_head >= spec_.num_kv_heads) return "kv_head";
    if (item.kv_begin < 0 || item.kv_begin > item.kv_end) return "span";
    const bool shared = IsShared(item);
    if (IsFinal(item) != (item.partial_row < 0) || IsFinal(item) != (item.merge_idx < 0)) {
      return "partial_row, merge_idx, num_groups";
    }
    if (!shared) {
      const int64_t r = RequestOf(item.first_token);
      if (item.first_token < 0 || item.first_token >= c_.qo_indptr.back() ||
          int64_t{item.first_token} + item.qo_len > c_.qo_indptr[r + 1]) {
        return "query tokens";
      }
      // A shared tile may belong to one whole request only: its position is made up then.
      const bool real = item.q_pos == PositionOf(r, item.first_token);
      if (item.request != r || item.kv_base != c_.kv_indptr[r]) return "request";
      if (!real && !(item.num_groups == 1 && spec_.share_prefixes &&
                     AllSee(item, r, item.first_token, item.qo_len, 0))) {
        return Text("q_pos %d", item.q_pos);
      }
      return AddPiece(item, item.first_token, item.qo_len, item.merge_idx, 0);
    }
    if (item.first_token < 0 || item.first_token + item.qo_len > header_.num_shared_tokens) {
      return "qo_indices";
    }
    if (item.merge_idx + item.num_groups > header_.num_merge_groups) return "merge groups";
    int64_t token = 0;
    for (int32_t g = item.merge_idx; g < item.merge_idx + item.num_groups; ++g) {
      const MergeGroup& group = groups_[g];
      if (group.qo_len < 1 || token + group.qo_len > item.qo_len) return "tokens of merge groups";
      for (int64_t k = 0; k < group.qo_len; ++k) {
        if (qo_indices_[item.first_token + token + k] != group.qo_begin + k) return "qo_indices";
      }
      const int64_t r = RequestOf(group.qo_begin);
      if (group.qo_begin < 0 || int64_t{group.qo_begin} + group.qo_len > c_.qo_indptr[r + 1]) {
        return "query tokens";
      }
      if (token == 0 && (item.request != r || item.kv_base != c_.kv_indptr[r])) return "request";
      const Seen keys = KeysOf(item);
      if (!SamePages(item.request, r, keys.begin, keys.end)) return "pages are not the same";
      if (!AllSee(item, r, group.qo_begin, group.qo_len, token)) return "not seen by all rows";
      if (std::string s = AddPiece(item, group.qo_begin, group.qo_len, g, token); !s.empty()) {
        return s;
      }
      token += group.qo_len;
    }
    return token == item.qo_len ? "" : "tokens without a merge group";
  }

  // Whether every row sees the whole span, and q_pos agrees.
  bool AllSee(const WorkItem& item, int64_t r, int64_t qo_begin, int64_t qo_len,
              int64_t token) const {
    if (item.kv_begin == item.kv_end) return true;
    const Seen keys = KeysOf(item);
    for (int64_t k : {int64_t{0}, qo_len - 1}) {  // borders of windows grow with the token
      const Seen seen = SeenBy(r, qo_begin + k);
      if (seen.begin > keys.begin || seen.end < keys.end) return false;
      const int64_t at = int64_t{item.q_pos} + token + k;
      if (spec_.window_left >= 0 && at - spec_.window_left > keys.begin) return false;
      if (spec_.window_right >= 0 && at + spec_.window_right + 1 < keys.end) return false;
      // Masks need positions, and these are made up.
      if (IsListed() && ClassOf(qo_begin + k, keys.begin, keys.end) != kSomeVisible) return false;
    }
    for (int64_t e = item.kv_begin; IsListed() && e < item.kv_end; e += problem_.config.tile_kv) {
      if (StepEntryAt(e) & 1) return false;
    }
    // Keys of the batch's own tokens are read only by their own requests.
    return !spec_.fresh_kv || keys.end <= c_.kv_lens[r] - (QueryBegin(r + 1) - QueryBegin(r));
  }

  bool IsListed() const { return spec_.max_steps > 0; }
  // place: offset of an item's entry, in tokens along the lists.
  int32_t StepEntryAt(int64_t place) const {
    return plan_[layout_.steps + place / problem_.config.tile_kv];
  }
  // From the first to the last key of an item.
  Seen KeysOf(const WorkItem& item) const {
    if (!IsListed() || item.kv_begin == item.kv_end) return {item.kv_begin, item.kv_end};
    const int64_t step = problem_.config.tile_kv;
    const int64_t first = StepEntryAt(item.kv_begin) >> 1, last = StepEntryAt(item.kv_end - 1) >> 1;
    return {first * step, std::min<int64_t>(c_.kv_lens[item.request], (last + 1) * step)};
  }

  // token: token of the item where the piece begins.
  std::string AddPiece(const WorkItem& item, int64_t qo_begin, int64_t qo_len, int32_t group,
                       int64_t token) {
    pieces_[item.kv_head].push_back({qo_begin, qo_begin + qo_len, item.kv_begin, item.kv_end});
    if (IsFinal(item)) {
      final_[item.kv_head].push_back({qo_begin, qo_begin + qo_len});
      return "";
    }
    if (group >= header_.num_merge_groups) return "merge_idx";
    const MergeGroup& g = groups_[group];
    if (g.qo_begin != qo_begin || g.qo_len != qo_len || g.kv_head != item.kv_head) {
      return "its merge group is of other rows";
    }
    const int64_t row = item.partial_row + token * spec_.group_size();
    const int64_t end = row + qo_len * spec_.group_size();
    if (end > header_.num_partial_rows) return "partial_row";
    const bool is_empty = IsListed() && item.kv_begin == item.kv_end;  // it may come at the end
    states_.push_back({row, end, group, is_empty ? kPositionLimit : KeysOf(item).begin});
    return "";
  }

  // Each row of partial states belongs to one item.
  std::string CheckRows() {
    std::sort(states_.begin(), states_.end(),
              [](const State& a, const State& b) { return a.row < b.row; });
    for (size_t i = 1; i < states_.size(); ++i) {
      if (states_[i].row < states_[i - 1].end) return "rows of partial states overlap";
    }
    return "";
  }

  std::string CheckGroups() {
    // First rows that arrive at a group, with the start of their keys.
    std::vector<std::map<int64_t, int64_t>> arrivals(header_.num_merge_groups);
    for (const State& s : states_) arrivals[s.group][s.row] = s.kv_begin;
    for (int pass = 0; pass < 2; ++pass) {  // groups without children, then those with children
      for (int64_t g = 0; g < header_.num_merge_groups; ++g) {
        const MergeGroup& group = groups_[g];
        const bool is_parent = IsParent(group);
        if (is_parent != (pass == 1)) continue;
        const std::string at = Text("merge group %lld: ", static_cast<long long>(g));
        if (is_parent && (group.partials_step != kReduceBatch || group.parent >= 0)) {
          return at + "partials_step";
        }
        const int64_t last =
            group.partials_begin + int64_t{group.num_partials - 1} * group.partials_step;
        if (group.num_partials < (group.parent >= 0 ? 1 : 1) || group.partials_begin < 0 ||
            last >= header_.num_partials) {
          return at + "partials";
        }
        if (static_cast<int64_t>(arrivals[g].size()) != group.num_partials) {
          return at + Text("%d partials, %zu arrive", group.num_partials, arrivals[g].size());
        }
        int64_t before = -1;
        for (int32_t i = 0; i < group.num_partials; ++i) {
          const int32_t row = partial_rows_[group.partials_begin + i * group.partials_step];
          const auto found = arrivals[g].find(row);
          if (found == arrivals[g].end()) return at + "a row that nobody writes";
          if (found->second < before) return at + "not in kv order";
          before = found->second;
        }
        const int32_t first = partial_rows_[group.partials_begin];
        if (group.parent >= header_.num_merge_groups) return at + "parent";
        if (group.parent >= 0) {
          const MergeGroup& parent = groups_[group.parent];
          if (parent.qo_begin != group.qo_begin || parent.qo_len != group.qo_len ||
              parent.kv_head != group.kv_head || !IsParent(parent)) {
            return at + "parent is of other rows";
          }
          arrivals[group.parent][first] = arrivals[g][first];
        } else {
          final_[group.kv_head].push_back({group.qo_begin, int64_t{group.qo_begin} + group.qo_len});
        }
      }
    }
    return "";
  }

  // Every token sees each of its keys in exactly one piece.
  std::string CheckPieces(std::vector<Piece>* pieces) const {
    std::vector<int64_t> borders(c_.qo_indptr.begin(), c_.qo_indptr.end());
    for (const Piece& p : *pieces) {
      borders.push_back(p.begin);
      borders.push_back(p.end);
    }
    std::sort(borders.begin(), borders.end());
    borders.erase(std::unique(borders.begin(), borders.end()), borders.end());
    std::vector<std::vector<const Piece*>> of(borders.size());
    const auto index = [&](int64_t token) {
      return std::lower_bound(borders.begin(), borders.end(), token) - borders.begin();
    };
    for (const Piece& p : *pieces) {
      for (auto i = index(p.begin); i < index(p.end); ++i) of[i].push_back(&p);
    }
    for (size_t i = 0; i + 1 < borders.size(); ++i) {
      const int64_t r = RequestOf(borders[i]);
      const Seen first = SeenBy(r, borders[i]), last = SeenBy(r, borders[i + 1] - 1);
      std::sort(of[i].begin(), of[i].end(),
                [](const Piece* a, const Piece* b) { return a->kv_begin < b->kv_begin; });
      const auto where = [&] {
        return Text("tokens [%lld, %lld) of request %lld: ", static_cast<long long>(borders[i]),
                    static_cast<long long>(borders[i + 1]), static_cast<long long>(r));
      };
      if (of[i].empty()) return where() + "in no item";
      for (size_t k = 1; k < of[i].size(); ++k) {
        if (of[i][k - 1]->kv_end != of[i][k]->kv_begin) return where() + "a gap, or keys twice";
      }
      const int64_t begin = of[i].front()->kv_begin, end = of[i].back()->kv_end;
      if (end > c_.kv_lens[r]) return where() + "keys beyond kv_len";
      for (const Seen& seen : {first, last}) {
        if (seen.begin < seen.end && (seen.begin < begin || seen.end > end)) {
          return where() + Text("[%lld, %lld) of [%lld, %lld)", static_cast<long long>(begin),
                                static_cast<long long>(end), static_cast<long long>(seen.begin),
                                static_cast<long long>(seen.end));
        }
      }
    }
    return "";
  }

  // The class in a map of the keys [kv_begin, kv_end) for a token, a row of q.
  uint8_t ClassOf(int64_t token, int64_t kv_begin, int64_t kv_end) const {
    uint8_t found = 0;
    for (int64_t i = kv_begin / c_.kv_block; i * c_.kv_block < kv_end; ++i) {
      found |= c_.map_classes[token / c_.q_block * c_.map_columns + i];
    }
    return found;
  }

  // With step lists: every token has each step in which it may see a key, once, marked if a key may
  // be hidden. No step is listed in which no token of its tile may see a key.
  std::string CheckLists(const std::vector<Piece>& pieces) const {
    const int64_t step_tokens = problem_.config.tile_kv;
    const int32_t* steps = plan_ + layout_.steps;
    for (int64_t token = 0; token < c_.qo_indptr.back(); ++token) {
      const int64_t r = RequestOf(token), num_steps = CeilDivide(c_.kv_lens[r], step_tokens);
      const auto where = [&](int64_t step) {
        return Text("token %lld of request %lld, step %lld: ", static_cast<long long>(token),
                    static_cast<long long>(r), static_cast<long long>(step));
      };
      std::vector<int> listed(num_steps, -1);  // 1: masked
      bool found = false;
      for (const Piece& p : pieces) {
        if (token < p.begin || token >= p.end) continue;
        found = true;
        if (p.kv_begin % step_tokens != 0 || p.kv_end % step_tokens != 0 ||
            p.kv_end > header_.num_steps * step_tokens) {
          return where(p.kv_begin) + "places that are none";
        }
        for (int64_t e = p.kv_begin / step_tokens; e < p.kv_end / step_tokens; ++e) {
          const int64_t step = steps[e] >> 1;
          if (step < 0 || step >= num_steps) return where(step) + "beyond kv_len";
          if (listed[step] >= 0) return where(step) + "listed twice";
          if (e > p.kv_begin / step_tokens && steps[e - 1] >> 1 >= step) {
            return where(step) + "not ascending";
          }
          listed[step] = steps[e] & 1;
          const int64_t end = std::min<int64_t>(c_.kv_lens[r], (step + 1) * step_tokens);
          uint8_t of_tile = 0;
          for (int64_t t = p.begin; t < p.end; ++t) {
            of_tile |= ClassOf(t, step * step_tokens, end);
          }
          if (!(of_tile & kSomeVisible)) return where(step) + "listed, and nobody sees it";
        }
      }
      if (!found) return where(0) + "in no item";
      const Seen seen = SeenBy(r, token);
      for (int64_t step = seen.begin / step_tokens; step * step_tokens < seen.end; ++step) {
        const uint8_t found = ClassOf(token, std::max(seen.begin, step * step_tokens),
                                      std::min(seen.end, (step + 1) * step_tokens));
        if (!(found & kSomeVisible)) continue;
        if (listed[step] < 0) return where(step) + "not listed";
        if (found & kSomeHidden && listed[step] == 0) return where(step) + "not masked";
      }
    }
    return "";
  }

  struct Range {
    int64_t begin, end;
  };

  // Every row of o is written once.
  std::string CheckFinal(std::vector<Range>* ranges) const {
    std::sort(ranges->begin(), ranges->end(),
              [](const Range& a, const Range& b) { return a.begin < b.begin; });
    int64_t at = 0;
    for (const Range& range : *ranges) {
      if (range.begin != at)
        return Text("row %lld of o is written not once", static_cast<long long>(at));
      at = range.end;
    }
    return at == c_.qo_indptr.back() ? "" : "rows of o that nobody writes";
  }

  struct State {
    int64_t row, end;
    int32_t group;
    int64_t kv_begin;
  };

  const Case& c_;
  const AttentionProblem& problem_;
  const AttentionSpec& spec_;
  const PlanLayout layout_;
  PlanHeader header_;
  const int32_t *queue_indptr_, *partial_rows_, *qo_indices_, *plan_;
  const WorkItem* items_;
  const MergeGroup* groups_;
  std::vector<std::vector<Piece>> pieces_;  // of each kv head
  std::vector<std::vector<Range>> final_;   // likewise
  std::vector<State> states_;
};

// Whether any of the tokens sees a key.
bool SeesAny(const AttentionSpec& spec, int64_t kv_len, int64_t first, int64_t qo_len) {
  for (int64_t at = first; at < first + qo_len; ++at) {
    const int64_t begin = spec.window_left < 0 ? 0 : std::max<int64_t>(0, at - spec.window_left);
    const int64_t end =
        spec.window_right < 0 ? kv_len : std::min<int64_t>(kv_len, at + spec.window_right + 1);
    if (begin < end) return true;
  }
  return false;
}

// The contract of a batch, in terms of the interface.
bool IsLegal(const Case& c, const AttentionSpec& spec) {
  const int64_t limit = int64_t{1} << 30, n = c.batch_size();
  const auto& qo = c.qo_indptr;
  const auto& kv = c.kv_indptr;
  if (n > spec.max_batch || qo[0] != 0 || kv[0] < 0) return false;
  if (qo[n] > spec.max_qo_tokens) return false;
  if (kv[n] > (spec.paged() ? spec.max_kv_pages : spec.max_kv_tokens)) return false;
  if (spec.paged() && kv[n] > static_cast<int64_t>(c.page_indices.size())) return false;
  for (int64_t r = 0; r < n; ++r) {
    if (qo[r + 1] < qo[r] || kv[r + 1] < kv[r]) return false;
    const int64_t kv_len = c.kv_lens[r], qo_len = qo[r + 1] - qo[r];
    if (kv_len < 0 || kv_len >= limit) return false;
    const int64_t first = c.q_offsets.empty() ? kv_len - qo_len : c.q_offsets[r];
    if (first <= -limit || first + qo_len > limit) return false;
    const int64_t page = std::max<int64_t>(1, spec.page_size);
    const int64_t used = (kv_len + page - 1) / page;
    if (used > kv[r + 1] - kv[r]) return false;
    // The last token of a request sees furthest.
    if (spec.max_steps == 0 || qo_len == 0) continue;
    int64_t end = kv_len;
    if (spec.window_right >= 0) end = std::min(end, first + qo_len + spec.window_right);
    if (end > c.map_columns * c.kv_block && SeesAny(spec, kv_len, first, qo_len)) return false;
  }
  if (spec.max_steps > 0) {
    const int64_t rows = CeilDivide(spec.max_qo_tokens, c.q_block);
    if (static_cast<int64_t>(c.map_classes.size()) < rows * c.map_columns) return false;
    if (c.map_columns == 0 && rows > 0) return false;  // in this case there are no rows
  }
  for (int64_t r = 0; r < n && spec.paged(); ++r) {
    for (int64_t i = 0; i * spec.page_size < c.kv_lens[r]; ++i) {
      const int64_t id = c.page_indices[kv[r] + i];
      if (id < 0 || (spec.num_pages >= 0 && id >= spec.num_pages)) return false;
    }
  }
  if (!c.told) return true;
  // Levels: borders, their nesting, lengths, and pages.
  for (int32_t level = 0; level < c.num_levels; ++level) {
    const int32_t* borders = c.request_indptr.data() + int64_t{level} * (c.num_prefixes + 1);
    if (borders[0] != 0 || borders[c.num_prefixes] != n) return false;
    for (int32_t i = 0; i < c.num_prefixes; ++i) {
      if (borders[i + 1] < borders[i]) return false;
    }
    for (int32_t i = 0; level > 0 && i <= c.num_prefixes; ++i) {
      const int32_t outer = borders[i - (c.num_prefixes + 1)];
      if (!std::binary_search(borders, borders + c.num_prefixes + 1, outer)) return false;
    }
  }
  for (int32_t level = 0; level < c.num_levels; ++level) {
    const int32_t* borders = c.request_indptr.data() + int64_t{level} * (c.num_prefixes + 1);
    for (int32_t i = 0; i < c.num_prefixes; ++i) {
      const int64_t len = c.prefix_lens[int64_t{level} * c.num_prefixes + i];
      int32_t before = -1;
      for (int32_t r = borders[i]; r < borders[i + 1]; ++r) {
        if (qo[r + 1] == qo[r]) continue;
        if (len < 0 || len > c.kv_lens[r]) return false;
        for (int64_t p = 0; before >= 0 && p < len / spec.page_size; ++p) {
          if (c.page_indices[kv[r] + p] != c.page_indices[kv[before] + p]) return false;
        }
        before = r;
      }
    }
  }
  return true;
}

bool Contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

std::string CheckCover(const Case& c, const AttentionProblem& problem,
                       const std::vector<int32_t>& plan) {
  return Cover(c, problem, plan).Check();
}

std::string CheckLegal(const Case& c, const AttentionProblem& problem, const Status& refused) {
  const bool is_legal = IsLegal(c, problem.spec);
  if (refused.ok()) return is_legal ? "" : "a batch that is not legal has a plan";
  const std::string& message = refused.message;
  bool named = false;
  for (const char* argument :
       {"qo_indptr", "kv_lens", "kv_indptr", "page_indptr", "page_indices", "q_offsets",
        "prefix_levels", "batch_size", "max_items", "max_partial_rows", "block_map", "max_steps"}) {
    named |= Contains(message, argument);
  }
  if (message.rfind("plan: ", 0) != 0 || !named || !Contains(message, "expected") ||
      !Contains(message, "got") || message.back() != '.') {
    return "a sentence that names no argument: " + message;
  }
  const bool capacity = Contains(message, "raise max_items") ||
                        Contains(message, "raise max_partial_rows") ||
                        Contains(message, "raise kv_split") || Contains(message, "max_steps");
  const bool too_much = Contains(message, "2^25 query tiles") || Contains(message, "2^49");
  if (!is_legal) return "";  // which of its faults is said is up to the planner
  if (too_much) return "";
  if (!capacity) return "a legal batch is refused: " + message;
  if (problem.spec.balances() && !Contains(message, "max_steps") && c.max_items == 0 &&
      c.max_partial_rows == 0) {
    return "capacities that should hold any batch do not: " + message;
  }
  return "";
}

}  // namespace jax_attn::fuzz
