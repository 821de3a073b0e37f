// Matmuls of activations with a weight matrix in panels, for few rows and for many.
#pragma once

#include <cstdint>

#include "cpu/product_kernels.h"
#include "cpu/threads/task_pool.h"

namespace jax_attn {

// y = x w of `dtype` (spec.h), see ProductParams. The bits of a row of y do not depend on how many
// rows there are, nor on the number of threads.
void ProductCpu(int64_t dtype, const ProductParams& params, TaskPool& pool);

// Each row of x times the matrix of its group: x has the rows of group 0, then those of group 1 and
// so on. panels: of all matrices, one after the other. group_rows: [num_groups], each >= 0, sum at
// most num_rows; the rows of y beyond it are 0. Reads the matrices of groups with rows only.
void GroupedProductCpu(int64_t dtype, const ProductParams& params, const int32_t* group_rows,
                       int64_t num_groups, TaskPool& pool);

}  // namespace jax_attn
