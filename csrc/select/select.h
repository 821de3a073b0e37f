// Chooses the kernel for a problem. Policy lives here; kernels have none. Numbers tuned for a
// device are in devices.cc.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "spec.h"

namespace jax_attn {

// MLA: sets num_kv_heads, which the user gives as 1, to the number of blocks of query heads that
// tiles are made of. The planner treats each block as a kv head; all of them read the same latent
// rows.
void SettleHeadBlocks(AttentionSpec* spec);

// (what, why) of a choice, in order: "device", then fields of KernelConfig.
using Reasons = std::vector<std::pair<std::string, std::string>>;

// Fills every field of the configuration except capacities, which follow from it (plan/plan.h).
// program: the spec's variant, if it has one. transforms: whether it has transforms of k or v.
KernelConfig SelectAttention(const AttentionSpec& spec, Reasons* reasons = nullptr,
                             const VariantProgram* program = nullptr, bool transforms = false);

void SelectCpu(const AttentionSpec& spec, KernelConfig* config,
               Reasons* reasons = nullptr);  // cpu.cc
void SelectCuda(const AttentionSpec& spec, KernelConfig* config, Reasons* reasons = nullptr,
                const VariantProgram* program = nullptr,
                bool transforms = false);  // cuda.cc

// On CUDA, without mla: the largest head dim, and the most query heads of a kv head, that kernels
// have room for. Both depend on the target, the dtype and the format alone, and the group on the
// head dims, too.
int64_t LargestCudaHeadDim(const AttentionSpec& spec);
int64_t LargestCudaGroup(const AttentionSpec& spec);

// MLA on CUDA: the most query heads that a tile may have.
int64_t MostHeadsOfBlock(const AttentionSpec& spec);

// Multiprocessors of a target that does not give their number: those of the most common part.
int64_t DefaultProcessors(int64_t arch);

// The largest head dim of the backward pass's kernels, with float keys and values.
int64_t LargestCudaBackwardHeadDim(int64_t arch);

// Whether the backward pass runs cuda/sm90/backward.cuh and not only the portable kernel.
bool RunsHopperBackward(const AttentionProblem& problem);

// A sentence on what a CUDA device lacks; empty if it lacks nothing.
std::string DescribeFallback(int64_t arch, int64_t q_format);

}  // namespace jax_attn
