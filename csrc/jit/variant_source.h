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
//   ShowsAll(row, first, last)      whether the row is known to see all keys from first to last, kv
//                                  positions; kMayShowAll: not false of all rows
// kIsAffine: there are, in place of Logit, the parts of
//   (kFactor * Factor(row)) * score + (Term(row) + Slope(row) * place of the key) + rest
//   kHasFactor, kHasTerm ...        which of them there are; Factor counts as 1 otherwise
//   Rest(params, row, key, facts of the key, x)
//                                  x + rest, what depends on keys otherwise
//   LineAt(row, first)             Term and Slope where `first` is another one; there is neither
//                                  Factor nor rest
// The place is counted from `first`. present is 1.
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
