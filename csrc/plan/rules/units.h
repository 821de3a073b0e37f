// Head units: the kv heads of a chunk, and the order of units on the line of stream-K.
#pragma once

#include "plan/rules/integers.h"

namespace jax_attn {

// A chunk for the heads of all units, as cuts by length make them.
inline constexpr i32 kEveryUnit = -1;

// The number of kv heads that have a chunk, over all partitions.
inline i32 NumHeadsOf(const PlanRules& rules, i32 unit) {
  return unit == kEveryUnit ? rules.num_kv_heads : rules.num_partitions * rules.heads_per_unit;
}

// The kv head of index i among those that have a chunk.
inline i32 HeadOf(const PlanRules& rules, i32 unit, i32 i) {
  if (unit == kEveryUnit) return i;
  return (i / rules.heads_per_unit * rules.num_units + unit) * rules.heads_per_unit +
         i % rules.heads_per_unit;
}

// A query tile for one head unit. They are numbered in the order of the line of stream-K: request
// by request, since neighbouring heads of a token are neighbours in memory, too; in a request unit
// by unit, since its tiles read the same keys.
struct UnitTile {
  i32 tile, unit;
};

// first_tile, num_tiles: of a request. i: index among its tiles of units.
inline UnitTile UnitTileOf(const PlanRules& rules, i32 first_tile, i32 num_tiles, i32 i) {
  if (num_tiles == 1) return {first_tile, i};
  return {first_tile + i % num_tiles, i / num_tiles};
}

}  // namespace jax_attn
