// The backward pass of attention on CPUs.
#pragma once

#include <vector>

#include "cpu/threads/task_pool.h"
#include "params.h"
#include "spec.h"
#include "variant/program.h"

namespace jax_attn {

// Outputs of the backward pass, in the element type of the problem.
struct BackwardResults {
  void* d_q;  // [max_qo_tokens, num_qo_heads, head_dim_qk]
  void* d_k;  // as k, all layers
  void* d_v;  // as v
  // Memory for f32 sums of one layer, if the type is not f32: d_q, then d_k, then d_v.
  float* sums;
  // f32 sums for the operands that a variant's gradient has elements of, in order of operands:
  // [num_kv_heads or 1, as the operand].
  struct OfOperand {
    float* data;
    int64_t num_copies, size;  // elements of one copy
  };
  std::vector<OfOperand> operands;
};

// The operands of a gradient's elements, in order.
std::vector<i32> OperandsOf(const VariantGradient& gradient);

// Elements of BackwardResults::sums. num_pages: pages of one layer's pool.
int64_t BackwardSums(const AttentionSpec& spec, int64_t num_pages);

// operands: without d_q, d_k, d_v and d_operands, which are set here. gradient: that of the
// problem's variant, if it has one. Every sum follows the order of one list of tasks, which depends
// on the plan alone, so the bits do not depend on the pool.
void BackwardCpu(const AttentionProblem& problem, const VariantGradient& gradient,
                 const BackwardParams& operands, const BackwardResults& results, TaskPool& pool);

}  // namespace jax_attn
