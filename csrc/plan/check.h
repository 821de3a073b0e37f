// Plans and problems are data from outside: files, exported executables, buffers that somebody
// wrote. What is accepted here makes no kernel read or write out of bounds, or wait for ever.
//
// Messages begin with what is wrong, of a plan "plan: items[3].kv_end: expected ..., got ...";
// callers put their op before it.
#pragma once

#include <cstdint>

#include "spec.h"
#include "status.h"

namespace jax_attn {

// Every enum, count and dimension in range, so that nothing that is computed from them overflows.
// CheckSpec asks for no more than a spec, before a configuration is chosen for it.
Status CheckSpec(const AttentionSpec& spec);
Status CheckProblem(const AttentionProblem& problem);

// The next two are of a valid problem. plan: [MakePlanLayout(problem).num_words]. num_pages: of a
// layer's pool; -1: not known.

// What append follows: whose plan it is, counts against capacities, lengths and page ids. A faulty
// plan gives the sentence of its fault.
Status CheckPlanBatch(const AttentionProblem& problem, const int32_t* plan, int64_t num_pages);

// All that kernels follow, in O(items + tokens + pages + rows of partial states): that queues hold
// every item once, that items fit their tiles and read what their request has, that every row of o
// and lse is written once and from all the keys that it sees, and that merge groups get as many
// arrivals as they wait for, of states that do not overlap.
Status CheckPlan(const AttentionProblem& problem, const int32_t* plan, int64_t num_pages);

}  // namespace jax_attn
