// Merges attention states, row by row.
#pragma once

#include "cpu/threads/task_pool.h"
#include "params.h"

namespace jax_attn {

// o = sum_i exp(lse_i - lse) o_i, lse = log sum_i exp(lse_i), added in the order of the states.
// dtype (spec.h, DType) is the element type of o_parts and o; lse is f32, natural log. States with
// lse = -inf are not read, so their o may hold anything.
void MergeCpu(int64_t dtype, const MergeParams& params, TaskPool& pool);

}  // namespace jax_attn
