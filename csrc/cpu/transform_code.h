// A transform in the order in which the CPU kernels run it: what is the same for all rows first,
// then what is the same for all heads of a row. Made once a call, for all instruction sets;
// cpu/kernels/transform.h runs it.
#pragma once

#include "cpu/variant_code.h"
#include "variant/transform.h"

namespace jax_attn {

// Where a value is kept. A value of one lane has one for each row, next to each other; a longer one
// has its lanes, rounded up to whole vectors, for each row.
enum TransformHome : i32 {
  kOnceHome,   // the same for all rows of a pass
  kTokenHome,  // the same for all heads of a token
  kHeadHome,
};

struct TransformCodeLine {
  CodeOp op;   // its args are not used
  i32 length;  // lanes
  i32 num_args;
  TransformLanes args[kMaxTransformArgs];  // values are code lines
  TransformHome home;
  i64 at;      // its first lane in the buffer of its home, in f32
  i64 stride;  // from one row to the next
};

// The rotation of two halves, as RoPE has it: (a, b) becomes (a cos - b sin, b cos + a sin). It is
// worth code of its own, because a decode waits for memory only as long as its arithmetic is
// little.
struct TransformRotation {
  i32 half;        // elements; 0: the transform is another one
  i32 lines[2];    // cos and sin, the same for all heads of a token
  bool direct[2];  // they are f32 rows of an operand, which are read where they are
};

// In order of homes. An x with only a part of the vector is a value of its own, without args.
struct TransformCode {
  const TransformCodeLine* lines;
  i32 num_once, num_token, num_lines;  // lines[0, num_once), ..., [num_token, num_lines)
  i32 dim, num_results;
  TransformLanes results[kMaxTransformResults];
  TransformRotation rotation;  // if it is one, lines has only what cos and sin need
  const i32* pool;
  const ProgramOperand* operands;
  i64 sizes[3];  // f32 in the buffers of homes
};

// Rows that kernels transform together, so that their values stay in the L1 cache; and tokens whose
// values of kTokenHome are kept for all heads.
inline constexpr i64 kTransformRows = 8, kTransformTokens = 64;

constexpr i64 MaxCodeLines(const TransformView& t) {
  return i64{t.num_lines} * (1 + kMaxTransformArgs) + kMaxTransformResults;
}

// Compiles a transform. lines: room for MaxCodeLines of it.
void MakeTransformCode(const TransformView& transform, TransformCodeLine* lines,
                       TransformCode* code);

}  // namespace jax_attn
