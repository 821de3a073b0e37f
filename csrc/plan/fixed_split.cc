#include <algorithm>

#include "plan/schedule.h"

namespace jax_attn {

// Borders at absolute multiples of kv_split: they depend on nothing but the position, so a request
// has the same partial states, and after the ordered merge the same bits, in any batch.
void CutFixedSplit(const AttentionProblem& problem, const std::vector<QueryTile>& tiles,
                   std::vector<Chunk>* chunks) {
  const int64_t split = problem.spec.kv_split;
  for (size_t i = 0; i < tiles.size(); ++i) {
    const QueryTile& t = tiles[i];
    const int64_t first = t.kv_begin / split;
    const int64_t last = std::max<int64_t>(first + 1, (t.kv_end + split - 1) / split);
    for (int64_t c = first; c < last; ++c) {
      const int64_t begin = std::max<int64_t>(t.kv_begin, c * split);
      const int64_t end = std::min<int64_t>(t.kv_end, (c + 1) * split);
      chunks->push_back({static_cast<int32_t>(i), static_cast<int32_t>(begin),
                         static_cast<int32_t>(end), static_cast<int32_t>(c - first),
                         static_cast<int32_t>(last - first),
                         ItemCost(problem.config, t.tile, end - begin, last - first > 1)});
    }
  }
}

}  // namespace jax_attn
