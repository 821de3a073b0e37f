// From a problem to the kernel that runs it: policy lives here, kernels have none. What was tuned
// for a device is in devices.cc.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "spec.h"

namespace jax_attn {

// mla: sets num_kv_heads, which the user gives as 1, to the blocks of query heads that tiles are
// made of. Each block counts as a kv head to the planner, and all of them read the same latent
// rows.
void SettleHeadBlocks(AttentionSpec* spec);

// (what, why) of a choice, in order: "device", then fields of KernelConfig.
using Reasons = std::vector<std::pair<std::string, std::string>>;

// Every field of the configuration but the capacities, which follow from it (plan/plan.h). program:
// the spec's variant, if it has one.
KernelConfig SelectAttention(const AttentionSpec& spec, Reasons* reasons = nullptr,
                             const VariantProgram* program = nullptr);

void SelectCpu(const AttentionSpec& spec, KernelConfig* config,
               Reasons* reasons = nullptr);  // cpu.cc
void SelectCuda(const AttentionSpec& spec, KernelConfig* config, Reasons* reasons = nullptr,
                const VariantProgram* program = nullptr);  // cuda.cc

// mla, CUDA: query heads that a tile may have.
int64_t MostHeadsOfBlock(const AttentionSpec& spec);

// Multiprocessors of a target that does not say how many: those of the usual part.
int64_t DefaultProcessors(int64_t arch);

// Whether the backward pass runs cuda/sm90/backward.cuh, and not the portable kernel alone.
bool RunsHopperBackward(const AttentionProblem& problem);

// What a CUDA device does without, in a sentence; empty for one that has all there is.
std::string DescribeFallback(int64_t arch, int64_t q_format);

}  // namespace jax_attn
