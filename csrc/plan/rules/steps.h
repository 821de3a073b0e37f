// Lists of the kv steps that a block map lets a tile see.
#pragma once

#include "plan/rules/tiles.h"

namespace jax_attn {

// Steps [begin, end) that rows of a tile may see; empty if begin == end.
struct StepSpan {
  i32 begin, end;
};
inline StepSpan StepsOf(const PlanRules& rules, const QueryTile& t) {
  if (t.kv_begin == t.kv_end) return {0, 0};
  return {t.kv_begin / rules.tile_kv, (t.kv_end - 1) / rules.tile_kv + 1};
}

// Columns [begin, end) of a map that cover the positions of a step which rows of the tile may see.
struct MapColumns {
  i32 begin, end;
};
inline MapColumns ColumnsOf(const PlanRules& rules, const BlockMap& map, const QueryTile& t,
                            i32 step) {
  const i32 begin = step * rules.tile_kv, end = begin + rules.tile_kv;
  const i32 first = begin > t.kv_begin ? begin : t.kv_begin;
  const i32 last = (end < t.kv_end ? end : t.kv_end) - 1;
  return {first / map.kv_block, last / map.kv_block + 1};
}

// 32 steps of a tile from `first` on: bit i is step first + i.
struct StepWord {
  unsigned listed, masked;
  i32 first;
};

// One entry of a step list.
inline i32 StepEntry(i32 step, bool some_hidden) { return 2 * step + some_hidden; }

// Gives a tile the list entries [begin, end).
inline void TakeList(const PlanRules& rules, i32 begin, i32 end, QueryTile* t) {
  t->kv_begin = begin * rules.tile_kv;
  t->kv_end = end * rules.tile_kv;
}

}  // namespace jax_attn
