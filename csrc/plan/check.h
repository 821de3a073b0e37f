// Plans and problems are data from outside: files, exported executables, buffers that somebody
// wrote. Whatever these checks accept makes no kernel read or write out of bounds, or wait forever.
//
// Messages begin with the argument, for example "plan: items[3].kv_end: expected ..., got ...";
// callers put the name of their op before it.
#pragma once

#include <cstdint>

#include "spec.h"
#include "status.h"

namespace jax_attn {

// Checks that every enum, count and dimension is in range, so that nothing computed from them
// overflows. CheckSpec needs only a spec, before a configuration is chosen for it.
Status CheckSpec(const AttentionSpec& spec);
Status CheckProblem(const AttentionProblem& problem);

// The next two expect a valid problem. plan: [MakePlanLayout(problem).num_words]. num_pages: pages
// of one layer's pool; -1 if unknown.

// Checks what append reads: the plan's header, counts against capacities, lengths and page ids. A
// faulty plan returns the sentence of its fault.
Status CheckPlanBatch(const AttentionProblem& problem, const int32_t* plan, int64_t num_pages);

// Checks everything that kernels follow, in O(items + tokens + pages + rows of partial states):
// queues hold every item once; items fit their tiles and read what their request has; every row of
// o and lse is written once, from all the keys that it sees; merge groups get as many arrivals as
// they wait for, from states that do not overlap.
Status CheckPlan(const AttentionProblem& problem, const int32_t* plan, int64_t num_pages);

}  // namespace jax_attn
