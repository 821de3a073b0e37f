// The backward pass of attention on CPUs.
#pragma once

#include "cpu/task_pool.h"
#include "params.h"
#include "spec.h"

namespace jax_attn {

// What the backward pass leaves, in the element type of the problem.
struct BackwardResults {
  void* d_q;  // [max_qo_tokens, num_qo_heads, head_dim_qk]
  void* d_k;  // as k, all layers
  void* d_v;  // as v
  // f32 sums of one layer, where the type is not f32: of d_q, then d_k, then d_v.
  float* sums;
};

// Elements of BackwardResults::sums. num_pages: of a layer's pool.
int64_t BackwardSums(const AttentionSpec& spec, int64_t num_pages);

// operands: without d_q, d_k and d_v, which are set here. Every sum is in the order of one list of
// tasks, which follows from the plan, so the bits do not depend on the pool.
void BackwardCpu(const AttentionProblem& problem, const BackwardParams& operands,
                 const BackwardResults& results, TaskPool& pool);

}  // namespace jax_attn
