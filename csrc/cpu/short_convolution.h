// Short causal convolutions over a pool of states, see jax_attn/_ops/short_convolution.py.
#pragma once

#include <cstdint>

#include "cpu/linear_kernels.h"
#include "cpu/threads/task_pool.h"

namespace jax_attn {

// Computes y of all tokens of the chunks, and writes the states that they name. dtype: of x, y and
// states (spec.h). Other rows of y and other slots stay.
void ShortConvolutionCpu(int64_t dtype, const ConvolutionParams& p, TaskPool& pool);

}  // namespace jax_attn
