// What grouped_product.cuh and the host share: like params.h, without includes of the system.
#pragma once

#include "params.h"

namespace jax_attn {

// The kernel has the borders of all groups in shared memory.
inline constexpr i32 kMaxProductGroups = 1024;

// Depth of a step.
inline constexpr i32 kGroupedProductStep = 64;

// y = x @ W, each row with the matrix of its group. Rows are sorted by group. Sizes below 0 count
// as 0, and rows of groups beyond num_rows do not exist; rows behind all groups become zeros.
struct GroupedProductParams {
  TensorMap x_map, weights_map;  // the launch makes them
  const void* x;                 // [num_rows, depth]
  const void* weights;     // [num_groups, depth, columns], transposed [num_groups, columns, depth]
  const i32* group_sizes;  // [num_groups]
  void* y;                 // [num_rows, columns]
  i32 num_rows;
  i32 depth;  // a multiple of 8, as are columns
  i32 columns;
  i32 num_groups;
};

// At least as many tiles of y as there are, whatever the sizes. The kernel counts them in 32 bits.
constexpr i64 MostGroupedTiles(const GroupedProductParams& p, i64 tile_rows, i64 tile_columns) {
  return (p.num_rows / tile_rows + p.num_groups + 1) *
         ((p.columns + tile_columns - 1) / tile_columns);
}

}  // namespace jax_attn
