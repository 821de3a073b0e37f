#include "plan/prefix.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace jax_attn {
namespace {

// A request that is one query tile, and how far its pages may be shared.
struct Candidate {
  const int32_t* pages;
  int32_t num_pages;  // that hold shareable tokens only
  int32_t tile_idx;   // into the flat tiles
};

// A stretch of pages that candidates [begin, end) of the forest's order have in common, between
// where its parent ends and position kv_end.
struct Node {
  int32_t begin, end;
  int32_t parent;  // -1: a root
  int32_t level;   // ancestors
  int32_t kv_end;
  bool shared = false;
};

// Branches on the way to a unit: an agent's tools, a document, a conversation, its forks.
constexpr int kMaxLevels = 8;

// Cost of an item whose state goes through the workspace, as it does in all tiles that share.
int64_t PartialCost(const PlanRules& rules, const QueryTile& t, int32_t state_cost,
                    int64_t kv_tokens) {
  return ItemCost(rules, t, kv_tokens, true) + int64_t{state_cost} * rules.kv_cost[0];
}

// Equal entries of a and b from `begin` on, at most up to `end`.
int32_t EqualUntil(const int32_t* a, const int32_t* b, int32_t begin, int32_t end) {
  constexpr int32_t kBlock = 64;  // memcmp is as fast as memory
  int32_t at = begin;
  while (at + kBlock <= end && std::memcmp(a + at, b + at, kBlock * sizeof(int32_t)) == 0) {
    at += kBlock;
  }
  while (at < end && a[at] == b[at]) ++at;
  return at;
}

class Forest {
 public:
  Forest(const AttentionProblem& problem, const PlanRules& rules, const PlanInputs& in,
         const std::vector<QueryTile>& flat)
      : spec_(problem.spec), config_(problem.config), rules_(rules), in_(in), flat_(flat) {}

  // False if no two requests have a first page in common, which is what most batches ask.
  bool Find() {
    FindCandidates();
    if (!AnyFirstPageTwice()) return false;
    SortByPage(0, static_cast<int32_t>(order_.size()), 0);
    ForEqualPages(0, static_cast<int32_t>(order_.size()), 0,
                  [&](int32_t begin, int32_t end) { AddNode(begin, end, 0, -1); });
    return !nodes_.empty();
  }

  // Sets Node::shared. False if no node pays.
  bool Choose() {
    best_.assign(nodes_.size() * (kMaxLevels + 1), -1);
    pays_.assign(best_.size(), false);
    for (size_t n = 0; n < nodes_.size(); ++n) {
      if (nodes_[n].parent < 0) {
        Cost(static_cast<int32_t>(n), 0);
        Mark(static_cast<int32_t>(n), 0);
      }
    }
    DropBeyondLimits();
    return std::any_of(nodes_.begin(), nodes_.end(), [](const Node& n) { return n.shared; });
  }

  void Write(Tiling* out) const {
    out->tiles = flat_;
    out->sharing.assign(flat_.size(), {});
    out->unit_tiles.clear();
    out->qo_indices.clear();
    std::vector<int32_t> unit_of(order_.size(), -1);  // of candidates
    // Parents come before their children, so the last word is that of the deepest node.
    for (size_t n = 0; n < nodes_.size(); ++n) {
      const Node& node = nodes_[n];
      if (!node.shared) continue;
      const int32_t kv_begin = SharedBegin(node);
      for (int32_t i = node.begin; i < node.end; ++i) {
        if (unit_of[i] < 0) {
          unit_of[i] = static_cast<int32_t>(out->unit_tiles.size());
          out->unit_tiles.push_back(order_[i].tile_idx);
        }
        QueryTile& unit = out->tiles[order_[i].tile_idx];
        unit.kv_begin = node.kv_end;
        TileSharing& sharing = out->sharing[order_[i].tile_idx];
        sharing.unit = unit_of[i];
        sharing.state_cost = StateCost(unit.qo_len);
      }
      ForTiles(node, [&](int32_t begin, int32_t end, int32_t tokens) {
        out->tiles.push_back(MakeSharedTile(begin, tokens, kv_begin, node.kv_end));
        out->sharing.push_back({StateCost(tokens), -1, unit_of[begin], end - begin});
        QueryTile& t = out->tiles.back();
        const QueryTile& first = flat_[order_[begin].tile_idx];
        t.qo_begin =
            end - begin == 1 ? first.qo_begin : static_cast<int32_t>(out->qo_indices.size());
        for (int32_t i = begin; i < end && end - begin > 1; ++i) {
          const QueryTile& unit = flat_[order_[i].tile_idx];
          for (int32_t k = 0; k < unit.qo_len; ++k) out->qo_indices.push_back(unit.qo_begin + k);
        }
      });
    }
  }

 private:
  int64_t MaxTileTokens() const {
    return config_.tile_q[config_.num_tiles - 1] / spec_.group_size();
  }

  // Borders of shared spans are at multiples of it: whole steps, and for fixed_split whole chunks,
  // so that partial states are the same as without sharing.
  int64_t Alignment() const {
    return spec_.schedule == kFixedSplit ? spec_.kv_split : config_.tile_kv;
  }

  // ---- the forest

  void FindCandidates() {
    order_.clear();
    nodes_.clear();
    for (size_t i = 0; i < flat_.size(); ++i) {
      const QueryTile& t = flat_[i];
      if (t.qo_len != in_.qo_indptr[t.request + 1] - in_.qo_indptr[t.request]) continue;
      const int64_t limit = ShareableTokens(t) / spec_.page_size;
      if (limit <= 0) continue;
      order_.push_back(
          {in_.page_indices + t.kv_base, static_cast<int32_t>(limit), static_cast<int32_t>(i)});
    }
  }

  // Positions [0, n) that every row of the tile sees, and that the made-up q_pos of a shared tile
  // lets every row see. At least one token of a unit stays its own, and so do fresh ones.
  int64_t ShareableTokens(const QueryTile& t) const {
    int64_t n = t.kv_end - 1;
    if (spec_.fresh_kv) n = std::min<int64_t>(n, in_.kv_lens[t.request] - t.qo_len);
    if (spec_.window_right >= 0) n = std::min(n, t.q_pos + spec_.window_right + 1);
    if (spec_.window_left >= 0) {
      if (t.q_pos + t.qo_len - 1 > spec_.window_left) return 0;
      n = std::min(n, spec_.window_left + 2 - MaxTileTokens());
    }
    return n;
  }

  bool AnyFirstPageTwice() {
    if (order_.size() < 2) return false;
    int bits = 1;
    while (size_t{1} << bits < 2 * order_.size()) ++bits;
    table_.assign(size_t{1} << bits, -1);
    const size_t mask = table_.size() - 1;
    for (const Candidate& c : order_) {
      const int32_t page = c.pages[0];
      size_t at = static_cast<uint32_t>(page) * 0x9e3779b1u >> (32 - bits);
      for (; table_[at] >= 0; at = (at + 1) & mask) {
        if (table_[at] == page) return true;
      }
      table_[at] = page;
    }
    return false;
  }

  // Candidates [begin, end) by page number `at`, those that end before it first; ties keep their
  // order.
  void SortByPage(int32_t begin, int32_t end, int32_t at) {
    const auto page = [at](const Candidate& c) { return at < c.num_pages ? c.pages[at] : -1; };
    std::stable_sort(order_.begin() + begin, order_.begin() + end,
                     [&](const Candidate& a, const Candidate& b) { return page(a) < page(b); });
  }

  // Calls fn(begin, end) for runs of at least two equal pages, of a sorted range.
  template <typename Fn>
  void ForEqualPages(int32_t begin, int32_t end, int32_t at, Fn&& fn) {
    while (begin < end && order_[begin].num_pages <= at) ++begin;
    while (begin < end) {
      const int32_t page = order_[begin].pages[at];
      int32_t run = begin + 1;
      while (run < end && order_[run].pages[at] == page) ++run;
      if (run - begin >= 2) fn(begin, run);
      begin = run;
    }
  }

  // Candidates [begin, end) have pages [0, depth] in common.
  void AddNode(int32_t begin, int32_t end, int32_t depth, int32_t parent) {
    int32_t common = order_[begin].num_pages;
    for (int32_t i = begin + 1; i < end; ++i) {
      common = EqualUntil(order_[begin].pages, order_[i].pages, depth,
                          std::min(common, order_[i].num_pages));
    }
    const int64_t tokens = int64_t{common} * spec_.page_size;
    const auto kv_end = static_cast<int32_t>(tokens / Alignment() * Alignment());
    int32_t level = parent < 0 ? 0 : nodes_[parent].level + 1;
    if (kv_end > (parent < 0 ? 0 : nodes_[parent].kv_end)) {  // else too short to be a node
      if (level == kMaxLevels) return;
      nodes_.push_back({begin, end, parent, level, kv_end});
      parent = static_cast<int32_t>(nodes_.size()) - 1;
    }
    SortByPage(begin, end, common);
    ForEqualPages(begin, end, common,
                  [&](int32_t first, int32_t last) { AddNode(first, last, common, parent); });
  }

  // ---- what it costs, in units of ItemCost

  // Writing and reading back a state, in kv tokens of tile_q[0]. Half of what its bytes would cost:
  // it stays in a cache.
  int32_t StateCost(int64_t num_tokens) const {
    const int64_t token_bytes = (spec_.head_dim_qk + spec_.head_dim_vo) * ElementBytes(spec_.dtype);
    return static_cast<int32_t>(num_tokens * spec_.group_size() * 4 * spec_.head_dim_vo /
                                token_bytes);
  }

  // Calls fn(begin, end, tokens) for the tiles of a node: candidates [begin, end) each. Full ones
  // of the tallest height, then the least that holds the rest.
  template <typename Fn>
  void ForTiles(const Node& node, Fn&& fn) const {
    int32_t begin = node.begin;
    int64_t tokens = 0;
    for (int32_t i = node.begin; i < node.end; ++i) {
      const int32_t more = flat_[order_[i].tile_idx].qo_len;
      if (tokens + more > MaxTileTokens()) {
        fn(begin, i, static_cast<int32_t>(tokens));
        begin = i;
        tokens = 0;
      }
      tokens += more;
    }
    fn(begin, node.end, static_cast<int32_t>(tokens));
  }

  QueryTile MakeSharedTile(int32_t begin, int32_t tokens, int32_t kv_begin, int32_t kv_end) const {
    QueryTile t = flat_[order_[begin].tile_idx];
    const int64_t rows = int64_t{tokens} * rules_.group_size;
    t.qo_len = tokens;
    t.tile = PickTile(rules_, tokens);
    t.kv_begin = kv_begin;
    t.kv_end = kv_end;
    t.q_pos = kv_end - 1;
    t.kv_cost = rules_.kv_cost[t.tile];
    if (config_.cost_by_rows) {
      const int64_t cost = t.kv_cost * rows / config_.tile_q[t.tile];
      t.kv_cost = std::max(rules_.kv_cost[0], static_cast<int32_t>(cost));
    }
    return t;
  }

  // Where the nearest shared ancestor ends.
  int32_t SharedBegin(const Node& node) const {
    for (int32_t n = node.parent; n >= 0; n = nodes_[n].parent) {
      if (nodes_[n].shared) return nodes_[n].kv_end;
    }
    return 0;
  }

  // Of the node's ancestors, which one has kv_end as its end, counted from 1; 0: none, and
  // position 0.
  int32_t BeginOf(int32_t n, int32_t border) const {
    while (nodes_[n].level >= border) n = nodes_[n].parent;
    return nodes_[n].kv_end;
  }

  // The best cost of all units of node n over what follows kv position `border`: 0 or the end of
  // its ancestor number border (of level border - 1).
  int64_t Cost(int32_t n, int32_t border) {
    const size_t key = n * (kMaxLevels + 1) + border;
    if (best_[key] >= 0) return best_[key];
    const Node& node = nodes_[n];
    const int32_t kv_begin = border == 0 ? 0 : BeginOf(n, border);
    int64_t shared = 0;
    ForTiles(node, [&](int32_t begin, int32_t, int32_t tokens) {
      const QueryTile t = MakeSharedTile(begin, tokens, kv_begin, node.kv_end);
      shared += PartialCost(rules_, t, StateCost(tokens), node.kv_end - kv_begin);
    });
    shared += CostBelow(n, node.level + 1, node.kv_end);
    const int64_t apart = CostBelow(n, border, kv_begin);
    pays_[key] = shared < apart;
    return best_[key] = std::min(shared, apart);
  }

  // Of what is below node n once everything before kv_begin is paid for.
  int64_t CostBelow(int32_t n, int32_t border, int32_t kv_begin) {
    int64_t cost = 0;
    int32_t i = nodes_[n].begin;
    const auto units_until = [&](int32_t end) {
      for (; i < end; ++i) {
        const QueryTile& unit = flat_[order_[i].tile_idx];
        const int32_t len = unit.kv_end - kv_begin;
        cost += kv_begin > 0 ? PartialCost(rules_, unit, StateCost(unit.qo_len), len)
                             : ItemCost(rules_, unit, len, false);
      }
    };
    for (size_t c = n + 1; c < nodes_.size() && nodes_[c].level > nodes_[n].level; ++c) {
      if (nodes_[c].parent != n) continue;
      units_until(nodes_[c].begin);
      cost += Cost(static_cast<int32_t>(c), border);
      i = nodes_[c].end;
    }
    units_until(nodes_[n].end);
    return cost;
  }

  void Mark(int32_t n, int32_t border) {
    nodes_[n].shared = pays_[n * (kMaxLevels + 1) + border];
    const int32_t next = nodes_[n].shared ? nodes_[n].level + 1 : border;
    for (size_t c = n + 1; c < nodes_.size() && nodes_[c].level > nodes_[n].level; ++c) {
      if (nodes_[c].parent == n) Mark(static_cast<int32_t>(c), next);
    }
  }

  // Keeps the nodes with the most tokens to share; the sections of a plan are finite.
  void DropBeyondLimits() {
    thread_local std::vector<int32_t> chosen;
    chosen.clear();
    for (size_t n = 0; n < nodes_.size(); ++n) {
      if (nodes_[n].shared) chosen.push_back(static_cast<int32_t>(n));
    }
    const auto weight = [&](int32_t n) {
      const Node& node = nodes_[n];
      return int64_t{node.kv_end - SharedBegin(node)} * (node.end - node.begin);
    };
    thread_local std::vector<int64_t> weights;
    weights.assign(nodes_.size(), 0);
    for (int32_t n : chosen) weights[n] = weight(n);
    std::stable_sort(chosen.begin(), chosen.end(),
                     [&](int32_t a, int32_t b) { return weights[a] > weights[b]; });
    int64_t left = MaxSharedTiles(static_cast<int64_t>(order_.size()));
    for (int32_t n : chosen) {
      int64_t num_tiles = 0;
      ForTiles(nodes_[n], [&](int32_t, int32_t, int32_t) { ++num_tiles; });
      if (num_tiles > left) {
        nodes_[n].shared = false;
      } else {
        left -= num_tiles;
      }
    }
  }

  const AttentionSpec& spec_;
  const KernelConfig& config_;
  const PlanRules& rules_;
  const PlanInputs& in_;
  const std::vector<QueryTile>& flat_;
  std::vector<Candidate> order_;  // units of any node are neighbours
  std::vector<Node> nodes_;       // in depth-first order
  std::vector<int32_t> table_;
  std::vector<int64_t> best_;  // [node, border]
  std::vector<bool> pays_;
};

}  // namespace

int64_t MaxSharedTiles(int64_t num_requests) {
  return std::min(std::max<int64_t>(64, num_requests / 2), kMaxLevels * num_requests);
}

// Shared chunks and own chunks are spread over the queues apart from each other, because queues
// begin with the former: each gets its part of both.
void CutShared(const PlanRules& rules, const Tiling& tiling, i32 twice_divisor,
               std::vector<Chunk>* chunks) {
  chunks->clear();
  int64_t total[2] = {0, 0};
  for (size_t i = 0; i < tiling.tiles.size(); ++i) {
    total[tiling.sharing[i].shared()] += SpanCost(tiling.tiles[i]);
  }
  for (size_t i = 0; i < tiling.tiles.size(); ++i) {
    const QueryTile& t = tiling.tiles[i];
    const TileSharing& sharing = tiling.sharing[i];
    const int32_t state_cost = sharing.partial() ? sharing.state_cost : 0;
    TileCut cut = CutTile(rules, 0, t);
    if (rules.schedule == kBalanced) {
      const int64_t queues = int64_t{rules.num_queues} * (sharing.shared() ? 2 : twice_divisor);
      const int64_t fair = 2 * total[sharing.shared()] * rules.num_units / (queues * t.kv_cost) + 1;
      // A large state costs as much as many keys.
      const int64_t fixed = 2 * PartialCost(rules, t, state_cost, 0) / t.kv_cost;
      const int64_t longest = std::max({fair, int64_t{rules.min_chunk}, sharing.shared() * fixed});
      const int64_t len = t.kv_end - t.kv_begin;
      // Of equal length: a short remainder costs as much in states as a long one.
      const int64_t pieces = Largest(1, CeilDivide(len, longest));
      const int64_t steps = CeilDivide(CeilDivide(len, pieces), rules.tile_kv);
      cut.length = static_cast<i32>(Largest(1, steps) * rules.tile_kv);
      cut.num_splits = static_cast<i32>(Largest(1, CeilDivide(len, cut.length)));
    }
    for (i32 s = 0; s < cut.num_splits; ++s) {
      const i32 begin = cut.Begin(t, s), end = cut.End(t, s);
      const bool partial = sharing.partial() || cut.num_splits > 1;
      const int64_t cost = partial ? PartialCost(rules, t, state_cost, end - begin)
                                   : ItemCost(rules, t, end - begin, false);
      chunks->push_back({static_cast<int32_t>(i), begin, end, s, cut.num_splits, cost});
    }
  }
}

bool SharePrefixes(const AttentionProblem& problem, const PlanRules& rules, const PlanInputs& in,
                   const std::vector<QueryTile>& flat, Tiling* shared) {
  const AttentionSpec& spec = problem.spec;
  if (!spec.share_prefixes || !spec.paged() || spec.schedule == kNoSplit) return false;
  Forest forest(problem, rules, in, flat);
  if (!forest.Find() || !forest.Choose()) return false;
  forest.Write(shared);
  return true;
}

}  // namespace jax_attn
