#include <algorithm>

#include "plan/schedule.h"

namespace jax_attn {

// FlashInfer, Algorithm 1 (arXiv 2501.01005, section 3.3.1): no chunk is longer than an ideally
// balanced queue, L = total cost / queues, so that handing chunks out heaviest first leaves every
// queue close to L. The remainder of a cut tile stays short on purpose: it fills gaps.
void CutBalanced(const AttentionProblem& problem, const std::vector<QueryTile>& tiles,
                 double divisor, std::vector<Chunk>* chunks) {
  const KernelConfig& config = problem.config;
  const int64_t units_per_tile = problem.spec.num_kv_heads / config.heads_per_unit;
  int64_t total = 0;
  for (const QueryTile& t : tiles) total += (t.kv_end - t.kv_begin) * config.kv_cost[t.tile];
  const double limit = static_cast<double>(total * units_per_tile) / (config.num_ctas * divisor);

  for (size_t i = 0; i < tiles.size(); ++i) {
    const QueryTile& t = tiles[i];
    const int64_t len = t.kv_end - t.kv_begin;
    const int64_t tokens = static_cast<int64_t>(limit / config.kv_cost[t.tile]) + 1;
    const int64_t rounded = (tokens + config.tile_kv - 1) / config.tile_kv * config.tile_kv;
    const int64_t chunk = std::max(rounded, config.min_chunk);
    const int64_t num_splits = std::max<int64_t>(1, (len + chunk - 1) / chunk);
    for (int64_t s = 0; s < num_splits; ++s) {
      const int64_t begin = t.kv_begin + s * chunk;
      const int64_t end = std::min<int64_t>(t.kv_end, begin + chunk);
      chunks->push_back({static_cast<int32_t>(i), static_cast<int32_t>(begin),
                         static_cast<int32_t>(end), static_cast<int32_t>(s),
                         static_cast<int32_t>(num_splits),
                         ItemCost(config, t.tile, end - begin, num_splits > 1)});
    }
  }
}

}  // namespace jax_attn
