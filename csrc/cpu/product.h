// Matmuls of activations with a weight matrix in panels, for few rows and for many.
#pragma once

#include <cstdint>

#include "cpu/kernels.h"
#include "cpu/threads/task_pool.h"

namespace jax_attn {

// y = x w of `dtype` (spec.h), see ProductParams. The bits of a row of y do not depend on how many
// rows there are, nor on the number of threads.
void ProductCpu(int64_t dtype, const ProductParams& params, TaskPool& pool);

}  // namespace jax_attn
