// Shared prefixes: query rows of many requests over the kv span that they have in common.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/plan.h"
#include "plan/schedule.h"

namespace jax_attn {

// Finds equal leading pages (a radix forest over page ids), decides by the costs in KernelConfig
// which of its nodes pay, and rewrites `flat`, the tiles of a batch, into `shared`: units that
// begin where their last shared span ends, and shared tiles. False: nothing to gain, `shared` is
// undefined.
bool SharePrefixes(const AttentionProblem& problem, const PlanRules& rules, const PlanInputs& in,
                   const std::vector<QueryTile>& flat, Tiling* shared);

// Chunks of the tiles, like CutByLength. twice_divisor: own chunks of kBalanced are at most 2 /
// twice_divisor of what a queue has of them.
void CutShared(const PlanRules& rules, const Tiling& tiling, i32 twice_divisor,
               std::vector<Chunk>* chunks);

// Shared tiles of a plan for that many requests.
int64_t MaxSharedTiles(int64_t num_requests);

// Rows of all partial states of a plan of kBalanced that shares: as many as without.
inline int64_t MaxSharedRows(const PlanRules& rules) {
  return rules.max_balanced_partials * rules.tile_tokens[rules.num_tiles - 1] * rules.group_size;
}

}  // namespace jax_attn
