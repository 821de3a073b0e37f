#include "plan/rules/steps.h"

#include <algorithm>
#include <string>
#include <vector>

#include "plan/plan.h"
#include "plan/rules/checks.h"
#include "plan/schedule.h"

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

PlanFault ListSteps(const PlanRules& rules, const BlockMap& map, Tiling* tiling, int32_t* steps,
                    int32_t* num_steps, std::vector<int32_t>* seen_ends) {
  thread_local std::vector<uint8_t> line;  // classes of a tile by column
  int64_t count = 0;
  const auto entry = [&] { return static_cast<i32>(std::min<int64_t>(count, rules.max_steps)); };
  const auto add = [&](i32 step, bool masked) {
    if (count < rules.max_steps) steps[count] = StepEntry(step, masked);
    ++count;
  };
  for (size_t tile_idx = 0; tile_idx < tiling->tiles.size(); ++tile_idx) {
    QueryTile& t = tiling->tiles[tile_idx];
    const i32 list_begin = entry();
    const StepSpan span = StepsOf(rules, t);
    i32 seen_end = span.begin == 0 ? t.kv_end : 0;
    if (tiling->SharingOf(static_cast<int32_t>(tile_idx)).shared()) {
      for (i32 step = span.begin; step < span.end; ++step) add(step, false);
    } else if (span.begin < span.end) {
      if (const PlanFault f = CheckMapColumns(map, t); f.code) return f;
      const i32 first = ColumnsOf(rules, map, t, span.begin).begin;
      const i32 end = ColumnsOf(rules, map, t, span.end - 1).end;
      line.assign(end - first, 0);
      const int64_t last_row = (t.first_token + int64_t{t.qo_len} - 1) / map.q_block;
      for (int64_t row = t.first_token / map.q_block; row <= last_row; ++row) {
        const uint8_t* classes = map.classes + row * map.num_columns + first;
        for (i32 i = 0; i < end - first; ++i) line[i] |= classes[i];
      }
      for (i32 step = span.begin; step < span.end; ++step) {
        const MapColumns columns = ColumnsOf(rules, map, t, step);
        uint8_t found = 0;
        for (i32 i = columns.begin; i < columns.end; ++i) found |= line[i - first];
        if (found != kSomeVisible) seen_end = std::min(seen_end, step * rules.tile_kv);
        if (found & kSomeVisible) add(step, found & kSomeHidden);
      }
    }
    if (seen_ends != nullptr) seen_ends->push_back(seen_end);
    TakeList(rules, list_begin, entry(), &t);
  }
  *num_steps = entry();
  return CheckSteps(rules, count);
}

}  // namespace jax_attn
