// Low-rank products of adapters (LoRA: arXiv 2106.09685), each row of a batch with its own adapter.
#pragma once

#include <cstdint>

#include "cpu/kernels.h"
#include "cpu/threads/task_pool.h"

namespace jax_attn {

// y += (x a^T) b of `dtype` (spec.h) for rows that have an adapter, see LoraParams. The bits of a
// row depend neither on the other rows nor on the number of threads.
//
// adapters: [num_rows], the adapter of each row; negative: none, and the row of y stays.
// ranks: [num_adapters, num_parts], 0 to max_rank. Only so many rows of a and b are read.
// ends: [num_parts], the end of each part's columns of y.
// p.h is ignored.
void LoraCpu(int64_t dtype, LoraParams p, const int32_t* adapters, const int32_t* ranks,
             const int64_t* ends, TaskPool& pool);

}  // namespace jax_attn
