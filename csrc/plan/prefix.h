// Shared prefixes: query rows of many requests over the kv span that they have in common.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/plan.h"
#include "plan/rules/sharing.h"
#include "plan/schedule.h"

namespace jax_attn {

// Finds equal leading pages (a radix forest over page ids), or trusts the prefixes of `levels`;
// decides by the costs in KernelConfig which nodes pay; and rewrites `flat`, the tiles of a batch,
// into `shared`: units that begin where their last shared span ends, and shared tiles. seen_ends:
// for each flat tile, the latest end of what may be shared; null: no limit. Returns false if there
// is nothing to gain; then `shared` is undefined.
bool SharePrefixes(const AttentionProblem& problem, const PlanRules& rules, const PlanInputs& in,
                   const PrefixLevels* levels, const std::vector<QueryTile>& flat,
                   const std::vector<int32_t>* seen_ends, Tiling* shared);

// Chunks of the tiles, like CutByLength.
void CutShared(const PlanRules& rules, const Tiling& tiling, SharedTrial trial,
               std::vector<Chunk>* chunks);

}  // namespace jax_attn
