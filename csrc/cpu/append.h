// Writes new keys and values into the pages of their requests, in place.
#pragma once

#include "cpu/threads/task_pool.h"
#include "params.h"

namespace jax_attn {

// Writes row qo_indptr[r] + i of k_new, v_new to position kv_lens[r] - qo_len + i of request r.
// Rows whose position would be negative do not exist in a valid plan and are skipped.
void AppendCpu(const AppendParams& params, TaskPool& pool);

// Appends the new keys and values in qkv, and rotates queries (into q) and keys on the way.
void AppendRotatedCpu(const AppendParams& params, TaskPool& pool);

}  // namespace jax_attn
