// A variant's program as CUDA C++.
#pragma once

#include <string>

#include "variant/program.h"

namespace jax_attn {

// Text of `struct <name>`, of cuda/common/variant.cuh's operations, one a line:
//   struct Row, struct Key          what is computed once for a row, or a key, of a tile
//   OfRow(params, facts, first)     first: kv position of the tile's first key
//   OfKey(params, facts)
//   Logit(params, row, key, facts of the key, score)
//   IsVisible(params, row, key, facts of the key)
// present is 1.
std::string VariantText(const VariantProgram& program, const std::string& name);

// The same for the backward pass, with, in place of Logit,
//   Differentiate(params, row, key, facts of the key, score, slope)
//                                  the logit, and its derivative by the score
//   kHasSlope                      whether that is not 1 everywhere
//   kNumElements                   of operands that a logit reads, and has derivatives by
//   OperandOf(element)
//   Partials(params, row, key, facts of the key, score, places, partials)
//                                  of each its place in the operand, and the derivative
std::string VariantText(const VariantGradient& gradient, const std::string& name);

}  // namespace jax_attn
