// Shared prefixes inside the graph: what plan/prefix.cc does with levels that the user gives, by
// one CTA.
#pragma once

#include "cuda/common/math.cuh"
#include "plan/rules/prefix_levels.h"
#include "plan/rules/sharing.h"

namespace jax_attn {

// The tiles of a batch with shared prefixes, as in plan/schedule.h.
struct SharedTiling {
  i32 num_tiles;                    // tiles of the batch, then shared tiles
  QueryTile* tiles;                 // [num_tiles]
  const TileSharing* sharing;       // [num_tiles]
  i64 span_cost, shared_span_cost;  // of tiles that are not shared, and of shared ones
  i32 num_units, num_levels;
  const i32* unit_tiles;  // [num_units]
  // Where the states of a unit's tokens are among those of a shared tile. tile -1: the unit has
  // none at this level.
  struct Place {
    i32 tile, token;
  };
  const Place* places;  // [num_levels, num_units]
};

// Threads: a PlanCta. seen_ends: as in plan/prefix.h.
template <class Threads>
class PrefixForest {
  static constexpr int kNumThreads = Threads::kNumThreads;
  static constexpr int kNumWarps = Threads::kNumWarps;

 public:
  __device__ PrefixForest(Threads& threads, const PlanParams& p, const QueryTile* flat,
                          i32 num_flat, const i32* seen_ends)
      : threads_(threads),
        rules_(p.rules),
        sharing_(p.sharing),
        in_(p.inputs),
        levels_(p.levels),
        flat_(flat),
        num_flat_(num_flat),
        seen_ends_(seen_ends),
        thread_(threadIdx.x) {}

  // first_tile: [batch_size + 1] first tile of each request. Returns false if sharing gains
  // nothing.
  __device__ bool Share(const i32* first_tile, SharedTiling* out) {
    num_nodes_ = levels_.num_levels * levels_.num_prefixes;
    if (num_nodes_ == 0) return false;
    FindCandidates(first_tile);
    if (num_candidates_ < 2) return false;
    MakeNodes();
    Choose();
    if (!DropBeyondLimits()) return false;
    Write(out);
    return true;
  }

 private:
  // A prefix of a level, with candidates [begin, end). It ends at kv_end, not before its parent,
  // the prefix around it of the level before.
  struct Node {
    i32 begin, end;
    i32 kv_end;
    i32 shared;
    i32 num_tiles;
    i64 kv_cost;  // sum over its tiles
    i64 fixed;    // sum of what they cost whatever their length
  };

  // Calls fn(i) for i in [0, n), one thread each, and waits for all.
  template <class Fn>
  __device__ void ForAll(i32 n, Fn fn) {
#pragma unroll 1
    for (i32 i = thread_; i < n; i += kNumThreads) fn(i);
    __syncthreads();
  }

  __device__ Node& NodeAt(i32 level, i32 i) const {
    return nodes_[level * levels_.num_prefixes + i];
  }
  __device__ const QueryTile& Unit(i32 candidate) const { return flat_[candidates_[candidate]]; }
  __device__ bool IsEmpty(i32 level, i32 i) const {
    return BordersOf(levels_, level)[i] == BordersOf(levels_, level)[i + 1];
  }
  // The prefix of `level` around prefix i of a deeper level.
  __device__ __noinline__ const Node& Ancestor(i32 level, i32 deeper, i32 i) const {
    return NodeAt(level, PrefixOf(levels_, level, BordersOf(levels_, deeper)[i]));
  }

  __device__ i64 Shareable(i32 tile) const {
    const i64 limit = ShareableTokens(rules_, sharing_, in_, flat_[tile]);
    return seen_ends_ == nullptr ? limit : Least(limit, seen_ends_[tile]);
  }

  // Not inlined, like the following: each runs once, and code is read from memory, too.
  __device__ __noinline__ void FindCandidates(const i32* first_tile) {
    const i32 batch_size = static_cast<i32>(in_.batch_size);
    candidates_before_ = threads_.template Take<i32>(batch_size + 1);
    num_candidates_ = static_cast<i32>(threads_.Prefix(batch_size, candidates_before_, [&](i32 r) {
      if (first_tile[r + 1] - first_tile[r] != 1) return 0ll;
      return Shareable(first_tile[r]) >= sharing_.alignment ? 1ll : 0ll;
    }));
    candidates_ = threads_.template Take<i32>(num_candidates_);
    ForAll(batch_size, [&](i32 r) {
      const i32 at = candidates_before_[r];
      if (candidates_before_[r + 1] > at) candidates_[at] = first_tile[r];
    });
  }

  // Calls fn(begin, end, tokens) for the tiles of a node, as in plan/prefix.cc.
  template <class Fn>
  __device__ void ForTiles(const Node& node, Fn fn) const {
    i32 begin = node.begin, tokens = 0;
#pragma unroll 1
    for (i32 i = node.begin; i <= node.end; ++i) {
      const i32 more = i < node.end ? Unit(i).qo_len : rules_.tile_tokens[rules_.num_tiles - 1] + 1;
      if (tokens + more > TallestTileTokens(rules_)) {
        fn(begin, i, tokens);
        begin = i;
        tokens = 0;
      }
      tokens += more;
    }
  }

  __device__ __noinline__ void MakeNodes() {
    nodes_ = threads_.template Take<Node>(num_nodes_);
    const i32 num_prefixes = levels_.num_prefixes;
    const int lane = thread_ % kWarpSize;
    // The tokens that all of a node's candidates can share; one warp a node.
#pragma unroll 1
    for (i32 n = thread_ / kWarpSize; n < num_nodes_; n += kNumWarps) {
      const i32 level = n / num_prefixes, i = n % num_prefixes;
      const i32* borders = BordersOf(levels_, level);
      const i32 begin = candidates_before_[borders[i]], end = candidates_before_[borders[i + 1]];
      const i32 len = PrefixLen(levels_, level, i) / rules_.page_size * rules_.page_size;
      u32 least = end > begin ? static_cast<u32>(len) : 0u;
#pragma unroll 1
      for (i32 c = begin + lane; c < end; c += kWarpSize) {
        const u32 shareable = static_cast<u32>(Shareable(candidates_[c]));
        least = least < shareable ? least : shareable;
      }
      least = WarpMin(least);
      if (lane == 0) nodes_[n] = {begin, end, SharedEnd(sharing_, least), 0, 0, 0, 0};
    }
    __syncthreads();
#pragma unroll 1
    for (i32 level = 1; level < levels_.num_levels; ++level) {
      ForAll(num_prefixes, [&](i32 i) {
        if (IsEmpty(level, i)) return;
        Node& node = NodeAt(level, i);
        node.kv_end = Max(node.kv_end, Ancestor(level - 1, level, i).kv_end);
      });
    }
    ForAll(num_nodes_, [&](i32 n) {
      Node& node = nodes_[n];
      if (node.end - node.begin < 2) return;
      ForTiles(node, [&](i32 begin, i32, i32 tokens) {
        const QueryTile t = MakeSharedTile(rules_, sharing_, Unit(begin), tokens, 0, node.kv_end);
        ++node.num_tiles;
        node.kv_cost += t.kv_cost;
        node.fixed += PartialCost(rules_, t, StateCost(rules_, sharing_, tokens), 0);
      });
    });
  }

  // --- what pays, as in plan/prefix.cc, but that nodes without a span of their own stay ---

  __device__ __noinline__ i32 PositionOf(i32 level, i32 i, i32 border) const {
    if (border == 0) return 0;
    return border > level ? NodeAt(level, i).kv_end : Ancestor(border - 1, level, i).kv_end;
  }

  __device__ i64 UnitsCost(const Node& node, i64 kv_begin) const {
    if (kv_begin == 0) return whole_[node.end] - whole_[node.begin];
    return partial_[node.end] - partial_[node.begin] -
           kv_begin * (kv_cost_[node.end] - kv_cost_[node.begin]);
  }

  __device__ void SumUnits() {
    whole_ = threads_.template Take<i64>(num_candidates_ + 1);
    partial_ = threads_.template Take<i64>(num_candidates_ + 1);
    kv_cost_ = threads_.template Take<i64>(num_candidates_ + 1);
    threads_.Prefix(num_candidates_, whole_,
                    [&](i32 c) { return ItemCost(rules_, Unit(c), Unit(c).kv_end, false); });
    threads_.Prefix(num_candidates_, partial_, [&](i32 c) {
      const QueryTile& t = Unit(c);
      return PartialCost(rules_, t, StateCost(rules_, sharing_, t.qo_len), t.kv_end);
    });
    threads_.Prefix(num_candidates_, kv_cost_,
                    [&](i32 c) { return static_cast<i64>(Unit(c).kv_cost); });
  }

  __device__ __noinline__ void Choose() {
    SumUnits();
    const i32 num_prefixes = levels_.num_prefixes, stride = levels_.num_levels + 1;
    i64* costs = threads_.template Take<i64>(num_nodes_ * stride);  // [node, border] lowest costs
    i32* pays = threads_.template Take<i32>(num_nodes_ * stride);
    const auto at = [&](i32 level, i32 i, i32 border) {
      return (level * num_prefixes + i) * stride + border;
    };
#pragma unroll 1
    for (i32 level = levels_.num_levels - 1; level >= 0; --level) {
      const i32 num_borders = level + 2;
      // The cost if the node itself is not shared; at the last border, of what is left below it.
      ForAll(num_prefixes * num_borders, [&](i32 task) {
        const i32 i = task / num_borders, border = task % num_borders;
        const i32 kv_begin = PositionOf(level, i, border);
        i64 cost = UnitsCost(NodeAt(level, i), kv_begin);
        if (level + 1 < levels_.num_levels && !IsEmpty(level, i)) {
          const i32 end = BordersOf(levels_, level)[i + 1];
#pragma unroll 1
          for (i32 child = PrefixOf(levels_, level + 1, BordersOf(levels_, level)[i]);
               child < num_prefixes && BordersOf(levels_, level + 1)[child] < end; ++child) {
            if (IsEmpty(level + 1, child)) continue;
            cost +=
                costs[at(level + 1, child, border)] - UnitsCost(NodeAt(level + 1, child), kv_begin);
          }
        }
        costs[at(level, i, border)] = cost;
      });
      ForAll(num_prefixes * (level + 1), [&](i32 task) {
        const i32 i = task / (level + 1), border = task % (level + 1);
        const Node& node = NodeAt(level, i);
        const i32 kv_begin = PositionOf(level, i, border);
        const i64 shared =
            node.fixed + (node.kv_end - kv_begin) * node.kv_cost + costs[at(level, i, level + 1)];
        const bool longer = node.kv_end > PositionOf(level, i, level);
        const bool yes = node.num_tiles > 0 && longer && shared < costs[at(level, i, border)];
        pays[at(level, i, border)] = yes;
        if (yes) costs[at(level, i, border)] = shared;
      });
    }
#pragma unroll 1
    for (i32 level = 0; level < levels_.num_levels; ++level) {
      ForAll(num_prefixes, [&](i32 i) {
        NodeAt(level, i).shared = pays[at(level, i, SharedAncestor(level, i) + 1)];
      });
    }
  }

  // The level of the nearest shared ancestor; -1: none.
  __device__ i32 SharedAncestor(i32 level, i32 i) const {
    if (IsEmpty(level, i)) return -1;
    i32 outer = level - 1;
#pragma unroll 1
    while (outer >= 0 && !Ancestor(outer, level, i).shared) --outer;
    return outer;
  }
  __device__ i32 SharedBegin(i32 level, i32 i) const {
    return PositionOf(level, i, SharedAncestor(level, i) + 1);
  }

  // Returns false if nothing is left.
  __device__ __noinline__ bool DropBeyondLimits() {
    const auto num_tiles = [&](i32 n) {
      return nodes_[n].shared ? static_cast<i64>(nodes_[n].num_tiles) : 0ll;
    };
    const i64 limit = MaxSharedTiles(num_candidates_);
    const i64 total = threads_.Sum(num_nodes_, num_tiles);
    if (total <= limit) return total > 0;
    const i32 size = Threads::SortSize(num_nodes_);
    u64* keys = threads_.template Take<u64>(size);
    ForAll(size, [&](i32 n) {
      keys[n] = ~0ull;
      if (n >= num_nodes_ || !nodes_[n].shared) return;
      const i32 level = n / levels_.num_prefixes;
      const i64 len = nodes_[n].kv_end - SharedBegin(level, n % levels_.num_prefixes);
      keys[n] = ChunkKey(SharingWeight(len, nodes_[n].end - nodes_[n].begin), n);
    });
    threads_.Sort(keys, size);
    if (thread_ == 0) {
      i64 left = limit;
#pragma unroll 1
      for (i32 k = 0; k < size && keys[k] != ~0ull; ++k) {
        Node& node = nodes_[ChunkOfKey(keys[k])];
        node.shared = node.num_tiles <= left;
        if (node.shared) left -= node.num_tiles;
      }
    }
    __syncthreads();
    return threads_.Sum(num_nodes_, num_tiles) > 0;
  }

  // --- tiles ---

  __device__ __noinline__ void Write(SharedTiling* out) {
    i32* own_begin = threads_.template Take<i32>(num_candidates_);
    i32* unit_of = threads_.template Take<i32>(num_candidates_ + 1);
    out->num_units = static_cast<i32>(threads_.Prefix(num_candidates_, unit_of, [&](i32 c) {
      i32 level = levels_.num_levels - 1;
#pragma unroll 1
      while (level >= 0 && !NodeAt(level, PrefixOf(levels_, level, Unit(c).request)).shared)
        --level;
      own_begin[c] =
          level < 0 ? 0 : NodeAt(level, PrefixOf(levels_, level, Unit(c).request)).kv_end;
      return level < 0 ? 0ll : 1ll;
    }));
    i32* first_tile = threads_.template Take<i32>(num_nodes_ + 1);
    const i32 num_shared_tiles =
        static_cast<i32>(threads_.Prefix(num_nodes_, first_tile, [&](i32 n) {
          return nodes_[n].shared ? static_cast<i64>(nodes_[n].num_tiles) : 0ll;
        }));
    out->num_tiles = num_flat_ + num_shared_tiles;
    out->num_levels = levels_.num_levels;
    QueryTile* tiles = threads_.template Take<QueryTile>(out->num_tiles);
    TileSharing* sharing = threads_.template Take<TileSharing>(out->num_tiles);
    i32* unit_tiles = threads_.template Take<i32>(out->num_units);
    const i32 num_places = levels_.num_levels * out->num_units;
    auto* places = threads_.template Take<SharedTiling::Place>(num_places);
    ForAll(num_flat_, [&](i32 i) {
      tiles[i] = flat_[i];
      sharing[i] = {0, -1, 0, 0};
    });
    ForAll(num_candidates_, [&](i32 c) {
      if (own_begin[c] == 0) return;
      const i32 i = candidates_[c];
      tiles[i].kv_begin = own_begin[c];
      sharing[i] = {StateCost(rules_, sharing_, tiles[i].qo_len), unit_of[c], 0, 0};
      unit_tiles[unit_of[c]] = i;
    });
    ForAll(num_places, [&](i32 i) { places[i] = {-1, 0}; });
    ForAll(num_nodes_, [&](i32 n) {
      const Node& node = nodes_[n];
      if (!node.shared) return;
      const i32 level = n / levels_.num_prefixes;
      const i32 kv_begin = SharedBegin(level, n % levels_.num_prefixes);
      i32 i = num_flat_ + first_tile[n];
      ForTiles(node, [&](i32 begin, i32 end, i32 tokens) {
        tiles[i] = MakeSharedTile(rules_, sharing_, Unit(begin), tokens, kv_begin, node.kv_end);
        sharing[i] = {StateCost(rules_, sharing_, tokens), -1, unit_of[begin], end - begin};
        i32 token = 0;
#pragma unroll 1
        for (i32 c = begin; c < end; ++c) {
          places[level * out->num_units + unit_of[c]] = {i, token};
          token += Unit(c).qo_len;
        }
        ++i;
      });
    });
    PlaceTokens(tiles, sharing, num_shared_tiles);
    out->tiles = tiles;
    out->sharing = sharing;
    out->unit_tiles = unit_tiles;
    out->places = places;
    out->span_cost = threads_.Sum(num_flat_, [&](i32 i) { return SpanCost(tiles[i]); });
    out->shared_span_cost =
        threads_.Sum(num_shared_tiles, [&](i32 i) { return SpanCost(tiles[num_flat_ + i]); });
  }

  // Gives shared tiles of several requests their first entry of qo_indices.
  __device__ void PlaceTokens(QueryTile* tiles, const TileSharing* sharing, i32 num_shared_tiles) {
    i32* tokens_before = threads_.template Take<i32>(num_shared_tiles + 1);
    threads_.Prefix(num_shared_tiles, tokens_before, [&](i32 i) {
      const bool several = sharing[num_flat_ + i].num_units > 1;
      return several ? static_cast<i64>(tiles[num_flat_ + i].qo_len) : 0ll;
    });
    ForAll(num_shared_tiles, [&](i32 i) {
      if (sharing[num_flat_ + i].num_units > 1) tiles[num_flat_ + i].first_token = tokens_before[i];
    });
  }

  Threads& threads_;
  const PlanRules& rules_;
  const SharingRules& sharing_;
  const PlanInputs& in_;
  const PrefixLevels& levels_;
  const QueryTile* flat_;
  i32 num_flat_;
  const i32* seen_ends_;  // [num_flat] or null
  int thread_;

  i32 num_candidates_ = 0, num_nodes_ = 0;
  i32* candidates_before_ = nullptr;  // [batch_size + 1] candidates before each request
  i32* candidates_ = nullptr;         // [num_candidates] their tiles
  Node* nodes_ = nullptr;             // [num_levels, num_prefixes]
  // Sums over the candidates before each one.
  i64* whole_ = nullptr;    // [num_candidates + 1] cost of the whole candidate by itself
  i64* partial_ = nullptr;  // [num_candidates + 1] cost as a unit
  i64* kv_cost_ = nullptr;  // [num_candidates + 1]
};

}  // namespace jax_attn
