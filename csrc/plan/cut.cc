#include <algorithm>
#include <limits>

#include "plan/rules/units.h"
#include "plan/schedule.h"

namespace jax_attn {

void CutByLength(const PlanRules& rules, const std::vector<QueryTile>& tiles, i64 longest_cost,
                 std::vector<Chunk>* chunks) {
  chunks->clear();
  for (size_t i = 0; i < tiles.size(); ++i) {
    const QueryTile& t = tiles[i];
    const TileCut cut = CutTile(rules, longest_cost, t);
    for (int32_t s = 0; s < cut.num_splits; ++s) {
      const int32_t begin = cut.Begin(t, s), end = cut.End(t, s);
      chunks->push_back({static_cast<int32_t>(i), kEveryUnit, begin, end, s, cut.num_splits,
                         ItemCost(rules, t, end - begin, cut.num_splits > 1)});
    }
  }
}

CutTotals TotalsOfCut(const PlanRules& rules, const std::vector<QueryTile>& tiles,
                      i64 longest_cost) {
  CutTotals totals = {};
  for (int32_t i = 0; i < rules.num_tiles; ++i) {
    totals.lengths[i] = ChunkLength(rules, longest_cost, i, rules.kv_cost[i]);
  }
  totals.least_cost = std::numeric_limits<int64_t>::max();
  for (const QueryTile& t : tiles) {
    const int32_t tokens = t.kv_end - t.kv_begin, length = totals.lengths[t.tile];
    const int32_t num_splits = tokens > length ? (tokens - 1) / length + 1 : 1;
    const bool split = num_splits > 1;
    const int32_t last = tokens - (num_splits - 1) * length;  // no other chunk is shorter
    totals.num_chunks += num_splits;
    totals.num_split_chunks += split ? num_splits : 0;
    totals.cost += num_splits * ItemCost(rules, t, 0, split) + SpanCost(t);
    totals.least_cost = std::min<int64_t>(totals.least_cost, ItemCost(rules, t, last, split));
  }
  if (totals.num_split_chunks == 0) totals.lengths = {};
  return totals;
}

bool CutByRanges(const PlanRules& rules, const std::vector<QueryTile>& tiles, i64 makespan,
                 std::vector<Chunk>* chunks, std::vector<int32_t>* queue_of) {
  chunks->clear();
  queue_of->clear();
  // The line: tiles of units, their starts, and the line's end.
  thread_local std::vector<UnitTile> line;
  thread_local std::vector<i64> places;
  line.clear();
  places.assign(1, 0);
  const auto num_tiles = static_cast<int32_t>(tiles.size());
  for (int32_t first = 0, end; first < num_tiles; first = end) {
    end = first + 1;
    while (end < num_tiles && tiles[end].request == tiles[first].request) ++end;
    for (int32_t i = 0; i < (end - first) * rules.num_units; ++i) {
      const UnitTile u = UnitTileOf(rules, first, end - first, i);
      const QueryTile& t = tiles[u.tile];
      line.push_back(u);
      places.push_back(places.back() + ItemCost(rules, t, t.kv_end - t.kv_begin, false));
    }
  }
  const auto num = static_cast<int32_t>(line.size());
  const auto tile_at = [&](int32_t i) -> const QueryTile& { return tiles[line[i].tile]; };
  const auto capacity = [&](i32 c) { return RangeCapacity(rules, places.back(), makespan, c); };
  const i32 least = LeastCapacity(
      [&](i32 c) { return RangesFit(rules, places.data(), num, tile_at, capacity(c)); });
  if (least == kNumCapacities) return false;

  RangeStart at = {0, tile_at(0).kv_begin};
  size_t first_chunk = 0;  // of the tile at `at`
  for (int32_t queue = 0; at.tile < num; ++queue) {
    const RangeStart end = RangeEndOf(rules, places.data(), num, tile_at, at, capacity(least));
    while (at.tile < num) {
      const QueryTile& t = tile_at(at.tile);
      const bool ends = at.tile < end.tile;
      if (!ends && at.kv == end.kv) break;
      const UnitTile u = line[at.tile];
      chunks->push_back({u.tile, u.unit, at.kv, ends ? t.kv_end : end.kv,
                         static_cast<int32_t>(chunks->size() - first_chunk), 0, 0});
      queue_of->push_back(queue);
      if (!ends) {
        at = end;
        break;
      }
      const auto num_splits = static_cast<int32_t>(chunks->size() - first_chunk);
      for (; first_chunk < chunks->size(); ++first_chunk) {
        Chunk& chunk = (*chunks)[first_chunk];
        chunk.num_splits = num_splits;
        chunk.cost = ItemCost(rules, t, chunk.kv_end - chunk.kv_begin, num_splits > 1);
      }
      ++at.tile;
      at.kv = at.tile < num ? tile_at(at.tile).kv_begin : 0;
    }
  }
  return true;
}

}  // namespace jax_attn
