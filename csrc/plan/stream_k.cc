#include <algorithm>

#include "plan/schedule.h"

namespace jax_attn {

// LeanAttention (arXiv 2405.10480, section 4), the stream-K of attention: all tiles in one line,
// cut into as many contiguous ranges of equal cost as there are queues. A range ends inside a tile,
// so queues are balanced to a kv step, at the price of at most one more partial state a queue.
void CutStreamK(const AttentionProblem& problem, const std::vector<QueryTile>& tiles,
                int64_t num_queues, std::vector<Chunk>* chunks, std::vector<int32_t>* queue_of) {
  const KernelConfig& config = problem.config;
  const int64_t cut_cost = ItemCost(config, 0, 0, true);
  // Each cut makes one item more, and the two that it makes pay for the merge.
  int64_t total = (num_queues - 1) * (2 * cut_cost - ItemCost(config, 0, 0, false));
  for (const QueryTile& t : tiles) total += ItemCost(config, t.tile, t.kv_end - t.kv_begin, false);
  const int64_t range = (total + num_queues - 1) / num_queues;

  int64_t queue = 0, room = range;
  for (size_t i = 0; i < tiles.size(); ++i) {
    const QueryTile& t = tiles[i];
    const int64_t kv_cost = config.kv_cost[t.tile];
    const size_t first_chunk = chunks->size();
    int64_t begin = t.kv_begin;
    do {
      const bool last_queue = queue == num_queues - 1;
      // The border nearest to where the room ends; pieces too short to be worth it are not cut off.
      const int64_t fits = begin + std::max<int64_t>(0, room - cut_cost) / kv_cost;
      const int64_t border = (fits + config.tile_kv / 2) / config.tile_kv * config.tile_kv;
      int64_t end = t.kv_end;
      if (!last_queue && t.kv_end - border >= config.min_chunk) end = border;
      if (end != t.kv_end && end - begin < config.min_chunk) {
        ++queue;
        room += range;
        continue;
      }
      const bool whole = begin == t.kv_begin && end == t.kv_end;
      const int64_t cost = ItemCost(config, t.tile, end - begin, !whole);
      chunks->push_back({static_cast<int32_t>(i), static_cast<int32_t>(begin),
                         static_cast<int32_t>(end),
                         static_cast<int32_t>(chunks->size() - first_chunk), 0, cost});
      queue_of->push_back(static_cast<int32_t>(queue));
      room -= cost;
      if (!last_queue && room < cut_cost) {
        ++queue;
        room += range;
      }
      begin = end;
    } while (begin < t.kv_end);
    for (size_t c = first_chunk; c < chunks->size(); ++c) {
      (*chunks)[c].num_splits = static_cast<int32_t>(chunks->size() - first_chunk);
    }
  }
}

}  // namespace jax_attn
