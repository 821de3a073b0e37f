// From a problem to the kernel that runs it: policy lives here, kernels have none.
#pragma once

#include "spec.h"

namespace jax_attn {

// mla: sets num_kv_heads, which the user gives as 1, to the blocks of query heads that tiles are
// made of. Each block counts as a kv head to the planner, and all of them read the same latent
// rows.
void SettleHeadBlocks(AttentionSpec* spec);

// Every field of the configuration but the capacities, which follow from it (plan/plan.h).
KernelConfig SelectAttention(const AttentionSpec& spec);

void SelectCpu(const AttentionSpec& spec, KernelConfig* config);   // cpu.cc
void SelectCuda(const AttentionSpec& spec, KernelConfig* config);  // cuda.cc

// Rows of the tallest tile of the MLA kernel: no block of query heads is larger.
int64_t MaxMlaRows(int64_t arch);  // cuda.cc

}  // namespace jax_attn
