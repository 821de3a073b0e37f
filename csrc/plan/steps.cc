#include <algorithm>
#include <string>
#include <vector>

#include "plan/plan.h"

namespace jax_attn {

Status CheckBlockMap(const AttentionProblem& problem, const BlockMap* map) {
  const AttentionSpec& spec = problem.spec;
  const auto refuse = [](const std::string& expected, const std::string& got) {
    return Status::Error("plan: block_map: expected " + expected + ", got " + got + ".");
  };
  if (map == nullptr) {
    return spec.max_steps > 0 ? refuse("one with max_steps", "none") : Status::Ok();
  }
  if (spec.max_steps == 0) return refuse("none without max_steps", "one");
  if (map->q_block < 1 || map->kv_block < 1) {
    return refuse("blocks of at least one token",
                  std::to_string(map->q_block) + " x " + std::to_string(map->kv_block));
  }
  const int64_t num_rows = CeilDivide(spec.max_qo_tokens, map->q_block);
  if (map->num_rows >= num_rows) return Status::Ok();
  return refuse(std::to_string(num_rows) +
                    " rows of blocks for max_qo_tokens = " + std::to_string(spec.max_qo_tokens) +
                    " at q_block = " + std::to_string(map->q_block),
                std::to_string(map->num_rows));
}

PlanFault ListSteps(const AttentionProblem& problem, const BlockMap& map,
                    std::vector<QueryTile>* tiles, int32_t* steps, int32_t* num_steps) {
  const int64_t tile_kv = problem.config.tile_kv, kv_block = map.kv_block;
  const int64_t max_steps = problem.spec.max_steps;
  thread_local std::vector<uint8_t> line;  // classes of a tile by column
  int64_t count = 0;
  for (QueryTile& t : *tiles) {
    const int64_t list_begin = count;
    if (t.kv_begin < t.kv_end) {
      const int64_t first = t.kv_begin / kv_block, end = CeilDivide(t.kv_end, kv_block);
      if (end > map.num_columns) {
        return MakeFault(kFaultMapColumns, t.request, map.num_columns, t.kv_end);
      }
      line.assign(end - first, 0);
      const int64_t last_row = (t.qo_begin + int64_t{t.qo_len} - 1) / map.q_block;
      for (int64_t row = t.qo_begin / map.q_block; row <= last_row; ++row) {
        const uint8_t* classes = map.classes + row * map.num_columns + first;
        for (int64_t i = 0; i < end - first; ++i) line[i] |= classes[i];
      }
      for (int64_t step = t.kv_begin / tile_kv; step * tile_kv < t.kv_end; ++step) {
        const int64_t from = std::max<int64_t>(t.kv_begin, step * tile_kv) / kv_block;
        const int64_t to = CeilDivide(std::min<int64_t>(t.kv_end, (step + 1) * tile_kv), kv_block);
        uint8_t found = 0;
        for (int64_t i = from; i < to; ++i) found |= line[i - first];
        if (!(found & kSomeVisible)) continue;
        if (count < max_steps) {
          steps[count] = static_cast<int32_t>(2 * step + ((found & kSomeHidden) != 0));
        }
        ++count;
      }
    }
    t.kv_begin = static_cast<i32>(std::min(list_begin, max_steps) * tile_kv);
    t.kv_end = static_cast<i32>(std::min(count, max_steps) * tile_kv);
  }
  *num_steps = static_cast<int32_t>(std::min(count, max_steps));
  return count > max_steps ? MakeFault(kFaultSteps, 0, count) : PlanFault{};
}

}  // namespace jax_attn
