// From a problem to the kernel that runs it: policy lives here, kernels have none.
#pragma once

#include "spec.h"

namespace jax_attn {

// Every field of the configuration but the capacities, which follow from it (plan/plan.h).
KernelConfig SelectAttention(const AttentionSpec& spec);

void SelectCpu(const AttentionSpec& spec, KernelConfig* config);   // cpu.cc
void SelectCuda(const AttentionSpec& spec, KernelConfig* config);  // cuda.cc

}  // namespace jax_attn
