// The interface between the drivers of products (product.cc, quantized_groups.cc) and their
// kernels, as kernels.h for those of attention.
#pragma once

#include "cpu/kernels.h"

namespace jax_attn {

// What becomes of the elements of a product. kGelu is by erf, kGeluTanh its approximation by tanh.
enum class Activation : i64 { kNone = 0, kGelu, kGeluTanh, kRelu };
inline constexpr i64 kNumActivations = 4;

// y = f(x w + bias), where the columns of w are stored in panels of kWeightColumns, one step of
// depth after the other; a bf16 step has two depths of each column, (2 k, 2 k + 1). Padding columns
// of the last panel and padding depths of the last steps are 0.
struct ProductParams {
  const void* x;       // [num_rows, depth]
  const void* panels;  // [num_panels, steps, kWeightColumns] or [.., kWeightColumns, 2]
  void* y;             // [num_rows, columns], of x's type or f32
  i64 num_rows, depth, columns;
  bool is_wide;                               // y is f32
  const void* bias = nullptr;                 // [columns] of x's type; null: none
  Activation activation = Activation::kNone;  // f
};

inline constexpr i64 kWeightColumns = 32;
// The depth of a bf16 panel is padded to a multiple of what a tile multiplies.
inline constexpr i64 kWeightPairs = 16;

static inline i64 WeightSteps(bool is_bf16, i64 depth) {
  if (!is_bf16) return depth;
  return (depth + 2 * kWeightPairs - 1) / (2 * kWeightPairs) * kWeightPairs;
}

// Matmuls for one type of x and w. Every element of y is one chain of sums in the order of depth,
// to which the bias is added, in f32; y is rounded once. So its bits depend neither on the other
// rows nor on how panels are divided among threads.
struct CpuProductKernels {
  // Bytes of a row of x as run reads it, a multiple of 4; 0: unchanged.
  size_t (*row_bytes)(i64 depth);
  void (*widen_row)(const void* row, i64 depth, void* lanes);

  // Computes the columns of panels [begin, end). x: contiguous rows from widen_row.
  void (*run)(const ProductParams& p, const float* x, i64 begin, i64 end);
};

}  // namespace jax_attn
