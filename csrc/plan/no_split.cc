#include "plan/schedule.h"

namespace jax_attn {

// FlashAttention-2 (arXiv 2307.08691, section 3.2): one item per query tile and head.
void CutNoSplit(const AttentionProblem& problem, const std::vector<QueryTile>& tiles,
                std::vector<Chunk>* chunks) {
  for (size_t i = 0; i < tiles.size(); ++i) {
    const QueryTile& t = tiles[i];
    chunks->push_back({static_cast<int32_t>(i), t.kv_begin, t.kv_end, 0, 1,
                       ItemCost(problem.config, t.tile, t.kv_end - t.kv_begin, false)});
  }
}

}  // namespace jax_attn
