// Attention on CPUs: executes the queues of a plan.
#pragma once

#include "cpu/threads/task_pool.h"
#include "params.h"
#include "spec.h"

namespace jax_attn {

struct CpuGeometry;

// The fields of a configuration that the kernels need.
CpuGeometry MakeGeometry(const KernelConfig& config);

// Writes every row of params.o and params.lse: live rows by the plan's items, the others 0 and
// -inf. params.merge_counters may hold anything at entry. The bits do not depend on the pool.
// problem.spec.dtype is the element type of q, k, v and o; problem.config is the plan's.
void AttentionCpu(const AttentionProblem& problem, const AttentionParams& params, TaskPool& pool);

}  // namespace jax_attn
