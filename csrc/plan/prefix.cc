#include "plan/prefix.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "plan/rules/prefix_levels.h"

namespace jax_attn {
namespace {

// A request that is one query tile, and how far its pages may be shared.
struct Candidate {
  const int32_t* pages;
  int32_t num_pages;  // pages that hold shareable tokens only
  int32_t tile_idx;   // index into the flat tiles
};

// A run of pages that candidates [begin, end) of the forest's order have in common, from the end of
// the parent's run to position kv_end.
struct Node {
  int32_t begin, end;
  int32_t parent;  // precedes its children; -1: a root
  int32_t level;   // number of ancestors
  int32_t kv_end;
  bool shared = false;
};

// End of the equal entries of a and b from `begin` on, at most `end`.
int32_t EqualUntil(const int32_t* a, const int32_t* b, int32_t begin, int32_t end) {
  constexpr int32_t kBlock = 64;  // with this block memcmp is as fast as memory
  int32_t at = begin;
  while (at + kBlock <= end && std::memcmp(a + at, b + at, kBlock * sizeof(int32_t)) == 0) {
    at += kBlock;
  }
  while (at < end && a[at] == b[at]) ++at;
  return at;
}

class Forest {
 public:
  Forest(const PlanRules& rules, const SharingRules& sharing, const PlanInputs& in,
         const std::vector<QueryTile>& flat, const std::vector<int32_t>* seen_ends)
      : rules_(rules), sharing_(sharing), in_(in), flat_(flat), seen_ends_(seen_ends) {}

  // Finds the nodes from the page tables. False if no two requests have a first page in common, as
  // in most batches.
  bool Find() {
    FindCandidates(rules_.page_size);
    if (!AnyFirstPageTwice()) return false;
    SortByPage(0, static_cast<int32_t>(order_.size()), 0);
    ForEqualPages(0, static_cast<int32_t>(order_.size()), 0,
                  [&](int32_t begin, int32_t end) { AddNode(begin, end, 0, -1); });
    return !nodes_.empty();
  }

  // Takes the nodes that the user gave, level by level. False if there is nothing to share.
  bool Take(const PrefixLevels& levels) {
    FindCandidates(sharing_.alignment);
    std::vector<int32_t> before;  // [batch_size + 1] number of candidates among earlier requests
    size_t candidate = 0;
    for (int32_t r = 0; r <= in_.batch_size; ++r) {
      while (candidate < order_.size() && flat_[order_[candidate].tile_idx].request < r) {
        ++candidate;
      }
      before.push_back(static_cast<int32_t>(candidate));
    }
    std::vector<int32_t> outer,
        nodes;  // nodes of the prefixes of two levels, or their nearest ancestors
    for (int32_t level = 0; level < levels.num_levels; ++level) {
      const i32* borders = BordersOf(levels, level);
      nodes.assign(levels.num_prefixes, -1);
      for (int32_t i = 0; i < levels.num_prefixes; ++i) {
        if (borders[i] == borders[i + 1]) continue;
        if (level > 0) nodes[i] = outer[PrefixOf(levels, level - 1, borders[i])];
        const int32_t begin = before[borders[i]], end = before[borders[i + 1]];
        const int32_t kv_end = EndOfPrefix(begin, end, PrefixLen(levels, level, i));
        AddNode({begin, end, nodes[i], 0, kv_end}, &nodes[i]);
      }
      std::swap(outer, nodes);
    }
    return !nodes_.empty();
  }

  // Sets Node::shared. False if no node pays.
  bool Choose() {
    SumUnits();
    const size_t num_costs = nodes_.size() * kBorders;
    below_.resize(num_costs);
    pays_.assign(num_costs, false);
    for (size_t n = 0; n < nodes_.size(); ++n) {
      for (int32_t border = 0; border < nodes_[n].level + 2; ++border) {
        const int32_t kv_begin = PositionOf(static_cast<int32_t>(n), border);
        below_[n * kBorders + border] = UnitsCost(nodes_[n], kv_begin);
      }
    }
    for (int32_t n = static_cast<int32_t>(nodes_.size()) - 1; n >= 0; --n) ChooseFor(n);
    std::vector<int32_t> borders(nodes_.size(), 0);
    for (size_t n = 0; n < nodes_.size(); ++n) {
      const int32_t parent = nodes_[n].parent;
      if (parent >= 0) borders[n] = nodes_[parent].shared ? nodes_[n].level : borders[parent];
      nodes_[n].shared = pays_[n * kBorders + borders[n]];
    }
    DropBeyondLimits();
    return std::any_of(nodes_.begin(), nodes_.end(), [](const Node& n) { return n.shared; });
  }

  void Write(Tiling* out) const {
    out->tiles = flat_;
    out->sharing.assign(flat_.size(), {0, -1, 0, 0});
    out->unit_tiles.clear();
    out->qo_indices.clear();
    std::vector<int32_t> own_begin(order_.size(), 0);  // by candidate: where its unit begins
    for (const Node& node : nodes_) {                  // the deepest node is written last
      if (node.shared) std::fill_n(&own_begin[node.begin], node.end - node.begin, node.kv_end);
    }
    std::vector<int32_t> unit_of(order_.size(), -1);
    for (size_t i = 0; i < order_.size(); ++i) {
      if (own_begin[i] == 0) continue;
      const int32_t tile_idx = order_[i].tile_idx;
      unit_of[i] = static_cast<int32_t>(out->unit_tiles.size());
      out->unit_tiles.push_back(tile_idx);
      out->tiles[tile_idx].kv_begin = own_begin[i];
      out->sharing[tile_idx] = {StateCost(rules_, sharing_, flat_[tile_idx].qo_len), unit_of[i], 0,
                                0};
    }
    for (const Node& node : nodes_) {
      if (!node.shared) continue;
      ForTiles(node, [&](int32_t begin, int32_t end, int32_t tokens) {
        QueryTile t = MakeSharedTile(rules_, sharing_, flat_[order_[begin].tile_idx], tokens,
                                     SharedBegin(node), node.kv_end);
        if (end - begin > 1) t.first_token = static_cast<int32_t>(out->qo_indices.size());
        out->tiles.push_back(t);
        out->sharing.push_back(
            {StateCost(rules_, sharing_, tokens), -1, unit_of[begin], end - begin});
        for (int32_t i = begin; i < end && end - begin > 1; ++i) {
          const QueryTile& unit = flat_[order_[i].tile_idx];
          for (int32_t k = 0; k < unit.qo_len; ++k) out->qo_indices.push_back(unit.first_token + k);
        }
      });
    }
  }

 private:
  static constexpr int32_t kBorders = kMaxLevels + 1;

  // ---- the forest

  int64_t Shareable(int64_t tile_idx) const {
    const int64_t limit = ShareableTokens(rules_, sharing_, in_, flat_[tile_idx]);
    return seen_ends_ == nullptr ? limit : std::min<int64_t>(limit, (*seen_ends_)[tile_idx]);
  }

  // shortest: tokens that a request must be able to share.
  void FindCandidates(int32_t shortest) {
    order_.clear();
    nodes_.clear();
    for (size_t i = 0; i < flat_.size(); ++i) {
      const QueryTile& t = flat_[i];
      if (t.qo_len != in_.qo_indptr[t.request + 1] - in_.qo_indptr[t.request]) continue;
      const int64_t limit = Shareable(i);
      if (limit < shortest) continue;
      order_.push_back({in_.page_indices + t.kv_base,
                        static_cast<int32_t>(limit / rules_.page_size), static_cast<int32_t>(i)});
    }
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

  // Sorts candidates [begin, end) by their page number `at`. Candidates with fewer pages come
  // first; ties keep their order.
  void SortByPage(int32_t begin, int32_t end, int32_t at) {
    const auto page = [at](const Candidate& c) { return at < c.num_pages ? c.pages[at] : -1; };
    std::stable_sort(order_.begin() + begin, order_.begin() + end,
                     [&](const Candidate& a, const Candidate& b) { return page(a) < page(b); });
  }

  // Calls fn(begin, end) for runs of at least two equal pages in a sorted range.
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

  // Adds a node for candidates [begin, end), which have pages [0, depth] in common.
  void AddNode(int32_t begin, int32_t end, int32_t depth, int32_t parent) {
    int32_t common = order_[begin].num_pages;
    for (int32_t i = begin + 1; i < end; ++i) {
      common = EqualUntil(order_[begin].pages, order_[i].pages, depth,
                          std::min(common, order_[i].num_pages));
    }
    const int32_t kv_end = SharedEnd(sharing_, int64_t{common} * rules_.page_size);
    if (!AddNode({begin, end, parent, 0, kv_end}, &parent)) return;
    SortByPage(begin, end, common);
    ForEqualPages(begin, end, common,
                  [&](int32_t first, int32_t last) { AddNode(first, last, common, parent); });
  }

  // Adds a node, whose index replaces that of its parent, unless it is too short or too narrow.
  // False: it would be too deep.
  bool AddNode(Node node, int32_t* parent) {
    if (node.end - node.begin < 2) return true;
    if (node.kv_end <= (node.parent < 0 ? 0 : nodes_[node.parent].kv_end)) return true;
    node.level = node.parent < 0 ? 0 : nodes_[node.parent].level + 1;
    if (node.level == kMaxLevels) return false;
    *parent = static_cast<int32_t>(nodes_.size());
    nodes_.push_back(node);
    return true;
  }

  // End of the part of a prefix of len tokens that all candidates [begin, end) can share.
  int32_t EndOfPrefix(int32_t begin, int32_t end, int64_t len) const {
    len = len / rules_.page_size * rules_.page_size;
    for (int32_t i = begin; i < end; ++i) {
      len = std::min(len, Shareable(order_[i].tile_idx));
    }
    return SharedEnd(sharing_, len);
  }

  // ---- costs, in units of ItemCost

  // Calls fn(begin, end, tokens) for the tiles of a node, each with candidates [begin, end). Full
  // tiles have the largest tile M; the last tile is the smallest that holds the rest.
  template <typename Fn>
  void ForTiles(const Node& node, Fn&& fn) const {
    int32_t begin = node.begin;
    int64_t tokens = 0;
    for (int32_t i = node.begin; i < node.end; ++i) {
      const int32_t more = flat_[order_[i].tile_idx].qo_len;
      if (tokens + more > TallestTileTokens(rules_)) {
        fn(begin, i, static_cast<int32_t>(tokens));
        begin = i;
        tokens = 0;
      }
      tokens += more;
    }
    fn(begin, node.end, static_cast<int32_t>(tokens));
  }

  // Where the nearest shared ancestor ends.
  int32_t SharedBegin(const Node& node) const {
    for (int32_t n = node.parent; n >= 0; n = nodes_[n].parent) {
      if (nodes_[n].shared) return nodes_[n].kv_end;
    }
    return 0;
  }

  // Border 0 of a node is position 0, border b the end of its ancestor of level b - 1, or its own.
  int32_t PositionOf(int32_t n, int32_t border) const {
    if (border == 0) return 0;
    while (nodes_[n].level >= border) n = nodes_[n].parent;
    return nodes_[n].kv_end;
  }

  // Sums over all earlier candidates, so that UnitsCost needs no loop.
  struct UnitSums {
    int64_t whole = 0;    // cost of the whole request, without sharing
    int64_t partial = 0;  // cost as a unit
    int64_t kv_cost = 0;
  };
  void SumUnits() {
    sums_.assign(1, {});
    for (const Candidate& c : order_) {
      const QueryTile& t = flat_[c.tile_idx];
      UnitSums sum = sums_.back();
      sum.whole += ItemCost(rules_, t, t.kv_end, false);
      sum.partial += PartialCost(rules_, t, StateCost(rules_, sharing_, t.qo_len), t.kv_end);
      sum.kv_cost += t.kv_cost;
      sums_.push_back(sum);
    }
  }

  // Cost of the node's units if everything before kv_begin is shared.
  int64_t UnitsCost(const Node& node, int64_t kv_begin) const {
    const UnitSums &a = sums_[node.begin], &b = sums_[node.end];
    return kv_begin > 0 ? b.partial - a.partial - kv_begin * (b.kv_cost - a.kv_cost)
                        : b.whole - a.whole;
  }

  // Decides whether sharing node n pays, for each choice of its shared ancestors. Its descendants
  // have been decided.
  void ChooseFor(int32_t n) {
    const Node& node = nodes_[n];
    int64_t fixed = 0, kv_cost = 0;  // of the node's tiles
    ForTiles(node, [&](int32_t begin, int32_t, int32_t tokens) {
      const QueryTile& first = flat_[order_[begin].tile_idx];
      const QueryTile t = MakeSharedTile(rules_, sharing_, first, tokens, 0, node.kv_end);
      fixed += PartialCost(rules_, t, StateCost(rules_, sharing_, tokens), 0);
      kv_cost += t.kv_cost;
    });
    const int64_t* below = &below_[n * kBorders];
    for (int32_t border = 0; border <= node.level; ++border) {
      const int32_t kv_begin = PositionOf(n, border);
      const int64_t shared = fixed + (node.kv_end - kv_begin) * kv_cost + below[node.level + 1];
      pays_[n * kBorders + border] = shared < below[border];
      if (node.parent < 0) continue;
      below_[node.parent * kBorders + border] +=
          std::min(shared, below[border]) - UnitsCost(node, kv_begin);
    }
  }

  // Keeps the nodes with the most tokens to share, within the capacity of the plan's sections.
  void DropBeyondLimits() {
    thread_local std::vector<int32_t> chosen;
    chosen.clear();
    for (size_t n = 0; n < nodes_.size(); ++n) {
      if (nodes_[n].shared) chosen.push_back(static_cast<int32_t>(n));
    }
    const auto weight = [&](int32_t n) {
      const Node& node = nodes_[n];
      return SharingWeight(node.kv_end - SharedBegin(node), node.end - node.begin);
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

  const PlanRules& rules_;
  const SharingRules& sharing_;
  const PlanInputs& in_;
  const std::vector<QueryTile>& flat_;
  const std::vector<int32_t>* seen_ends_;
  std::vector<Candidate> order_;  // units of any node are contiguous
  std::vector<Node> nodes_;
  std::vector<int32_t> table_;
  std::vector<UnitSums> sums_;  // [candidate + 1]
  // Lowest cost of what is below node n, once everything before a border is paid for; and
  // whether sharing the node pays then.
  std::vector<int64_t> below_;  // [node, border]
  std::vector<bool> pays_;      // [node, border]
};

}  // namespace

void CutShared(const PlanRules& rules, const Tiling& tiling, SharedTrial trial,
               std::vector<Chunk>* chunks) {
  chunks->clear();
  int64_t total[2] = {0, 0};
  for (size_t i = 0; i < tiling.tiles.size(); ++i) {
    total[tiling.sharing[i].shared()] += SpanCost(tiling.tiles[i]);
  }
  for (size_t i = 0; i < tiling.tiles.size(); ++i) {
    const QueryTile& t = tiling.tiles[i];
    const TileSharing& s = tiling.sharing[i];
    const TileCut cut = CutSharedTile(rules, t, s, total[s.shared()], trial);
    for (i32 split = 0; split < cut.num_splits; ++split) {
      const i32 begin = cut.Begin(t, split), end = cut.End(t, split);
      chunks->push_back({static_cast<int32_t>(i), kEveryUnit, begin, end, split, cut.num_splits,
                         ChunkCost(rules, t, s, cut.num_splits, end - begin)});
    }
  }
}

bool SharePrefixes(const AttentionProblem& problem, const PlanRules& rules, const PlanInputs& in,
                   const PrefixLevels* levels, const std::vector<QueryTile>& flat,
                   const std::vector<int32_t>* seen_ends, Tiling* shared) {
  const AttentionSpec& spec = problem.spec;
  if (!spec.share_prefixes || !spec.paged() || spec.schedule == kNoSplit) return false;
  const SharingRules sharing = MakeSharingRules(problem);
  Forest forest(rules, sharing, in, flat, seen_ends);
  if (!(levels != nullptr ? forest.Take(*levels) : forest.Find())) return false;
  if (!forest.Choose()) return false;
  forest.Write(shared);
  return true;
}

}  // namespace jax_attn
