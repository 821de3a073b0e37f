#include <algorithm>

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
      chunks->push_back({static_cast<int32_t>(i), begin, end, s, cut.num_splits,
                         ItemCost(rules, t, end - begin, cut.num_splits > 1)});
    }
  }
}

void CutByRanges(const PlanRules& rules, const std::vector<QueryTile>& tiles,
                 std::vector<Chunk>* chunks, std::vector<int32_t>* queue_of) {
  chunks->clear();
  queue_of->clear();
  thread_local std::vector<int64_t> places;  // start of every tile on the line, and the line's end
  places.assign(1, 0);
  for (const QueryTile& t : tiles) {
    places.push_back(places.back() + ItemCost(rules, t, t.kv_end - t.kv_begin, false));
  }
  const RangeCut ranges = MakeRangeCut(rules, tiles[0], places.back());
  auto tile_at = [&](int64_t place) {
    const auto after = std::upper_bound(places.begin(), places.end() - 1, place);
    return static_cast<size_t>(after - places.begin()) - 1;
  };

  thread_local std::vector<int32_t> cut_tiles;  // F of every border; border 0 does not exist
  cut_tiles.assign(1, 0);
  size_t last = tiles.size();
  for (i32 b = 1; b < ranges.num_ranges; ++b) {
    const size_t tile = tile_at(BorderOffset(ranges, b, b, ranges.num_ranges - 1));
    cut_tiles.push_back(cut_tiles.back() + (tile != last));
    last = tile;
  }

  i32 border = 1;
  size_t border_tile =
      tiles.size();  // tile that holds `border`; past the last tile if there is none
  int32_t border_at = 0;
  auto find_border = [&] {
    border_tile = tiles.size();
    if (border >= ranges.num_ranges) return;
    const int64_t place = BorderOffset(ranges, border, cut_tiles[border], cut_tiles.back());
    border_tile = tile_at(place);
    border_at = BorderPosition(rules, tiles[border_tile], places[border_tile], place);
  };
  find_border();
  for (size_t i = 0; i < tiles.size(); ++i) {
    const QueryTile& t = tiles[i];
    const size_t first_chunk = chunks->size();
    int32_t begin = t.kv_begin;
    do {
      // Borders in this tile, and at the end of the previous tile.
      while (border_tile < i || (border_tile == i && border_at <= begin)) {
        ++border;
        find_border();
      }
      const int32_t end = border_tile == i ? std::min(border_at, t.kv_end) : t.kv_end;
      chunks->push_back({static_cast<int32_t>(i), begin, end,
                         static_cast<int32_t>(chunks->size() - first_chunk), 0, 0});
      queue_of->push_back(border - 1);
      begin = end;
    } while (begin < t.kv_end);
    const auto num_splits = static_cast<int32_t>(chunks->size() - first_chunk);
    for (size_t c = first_chunk; c < chunks->size(); ++c) {
      Chunk& chunk = (*chunks)[c];
      chunk.num_splits = num_splits;
      chunk.cost = ItemCost(rules, t, chunk.kv_end - chunk.kv_begin, num_splits > 1);
    }
  }
}

}  // namespace jax_attn
