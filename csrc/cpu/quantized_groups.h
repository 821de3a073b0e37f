// Matmuls of activations with a stack of quantized matrices, as experts have them.
#pragma once

#include <cstdint>

#include "cpu/threads/task_pool.h"
#include "params.h"

namespace jax_attn {

// Each row of x times the matrix of its group: x has the rows of group 0, then those of group 1 and
// so on. An element of a matrix is (code - zero) * scale.
struct QuantizedGroupsParams {
  const float* x;        // [num_rows, depth]
  const uint8_t* codes;  // [num_groups, depth, columns]; of 4 bits [.., depth / 2, ..], the first
                         // of two rows in the low half
  bool is_int8;          // codes are signed integers of 8 bits; else they have `format`
  WeightFormat format;
  const void* scales;    // [num_groups, ceil(depth / group_size), columns] f32, or u8: exponents
  bool has_exponents;    // a scale is 2^(u8 - 127)
  const uint8_t* zeros;  // as scales; null: 0
  float* y;              // [num_rows, columns]
  const int32_t* group_rows;  // [num_groups], each >= 0, sum at most num_rows
  int64_t num_rows, depth, columns, num_groups, group_size;
};

// The rows of y beyond those of all groups are 0. Reads the matrices of groups with rows only. The
// bits of a row of y do not depend on how many rows there are, nor on the number of threads.
void QuantizedGroupsCpu(const QuantizedGroupsParams& params, TaskPool& pool);

}  // namespace jax_attn
