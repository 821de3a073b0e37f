// A user's function of the vectors of a head as a program: a list of operations on vectors in which
// every value is written once. jax_attn/_variant/transform.py traces the functions to it.
//
// Those of k and v run in the kernels, where rows are loaded. Those of q and o run outside, in jnp.
// Like program.h, this file includes no C++ standard header.
#pragma once

#include "variant/program.h"

namespace jax_attn {

// Operations beyond those of programs: X(name, word). Elementwise ones have the numbers of
// program.h. Saved plans have an operation by its number, so new ones are added at the end.
#define JAX_ATTN_TRANSFORM_OPS(Op)                                               \
  Op(X, "x") Op(Iota, "iota") Op(Table, "table") Op(Pick, "pick") Op(Sum, "sum") \
      Op(Largest, "largest") Op(Smallest, "smallest") Op(Product, "product")     \
          Op(ProductT, "product_t")

// x: lanes [own, own + length) of the argument. iota: lane i is i. table: lane i is pool[own + i].
// pick: lane i is lane pool[own + i] of the arguments, one after the other. sum, largest, smallest:
// of the lanes of the argument, with NaN if one is. product: the first argument times the matrix of
// operand `own` that the others select, or its transpose; in q and o only.
inline constexpr i32 kFirstTransformOp = 1000;
enum TransformOp : i32 {
  kBeforeTransformOps = kFirstTransformOp - 1,
#define JAX_ATTN_OP(name, word) kVector##name,
  JAX_ATTN_TRANSFORM_OPS(JAX_ATTN_OP)
#undef JAX_ATTN_OP
      kEndOfTransformOps
};

inline constexpr i32 kMaxTransformArgs = kMaxOperandRank;
inline constexpr i32 kMaxTransformValues = 128;
inline constexpr i32 kMaxTransformLanes = 2048;  // of a value
inline constexpr i32 kMaxTransformResults = 4;
inline constexpr i32 kMaxTransformPool = 8192;

// Lanes [offset, offset + length) of a value. Where other arguments or the result have more lanes,
// one stands for all of them.
struct TransformLanes {
  i32 value, offset, length;
};

struct TransformLine {
  i32 op;      // a VariantOp or a TransformOp
  i32 type;    // VariantType
  i32 length;  // lanes
  i32 own;     // bits of a const; see TransformOp; operand of a load
  i32 num_args;
  TransformLanes args[kMaxTransformArgs];
};

// A program as kernels read it. dim 0: the vectors stay as they are.
struct TransformView {
  i32 dim, num_lines, num_results;
  const TransformLine* lines;
  const TransformLanes* results;  // the lanes of the result, one after the other
  const i32* pool;
  const ProgramOperand* operands;
};

}  // namespace jax_attn
