// Linear attention over a pool of recurrent states, see jax_attn/_spec/state_spec.py.
#pragma once

#include <cstdint>

#include "cpu/linear_kernels.h"
#include "cpu/threads/task_pool.h"

namespace jax_attn {

// Computes o of all tokens of the chunks, and writes the states that they name. dtype: of q, k, v
// and o (spec.h). Other rows of o and other slots stay. The bits of a request depend neither on the
// other requests nor on the number of threads.
//
// chunks: [num_chunks], those of a request in order and together, the first of each is_first.
void LinearAttentionCpu(int64_t dtype, const LinearParams& p, const StateChunk* chunks,
                        int64_t num_chunks, TaskPool& pool);

// Computes the gradients of all tokens of the chunks. p.d_states has the gradient of the states
// after the call, and gets that of the states before it. Other rows stay. Bits do not depend on the
// number of threads.
void LinearAttentionBackwardCpu(int64_t dtype, const LinearBackwardParams& p,
                                const StateChunk* chunks, int64_t num_chunks, TaskPool& pool);

}  // namespace jax_attn
