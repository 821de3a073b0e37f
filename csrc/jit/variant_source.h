// Writes a variant's program as CUDA C++.
#pragma once

#include <string>

#include "variant/program.h"

namespace jax_attn {

// Returns the text of `struct <name>`, with one operation of cuda/common/variant.cuh per line:
//   struct Row, struct Key          values computed once per row, or per key, of a tile
//   OfRow(params, facts, first)     computes a Row; first: kv position of the tile's first key
//   OfKey(params, facts)            computes a Key
//   Logit(params, row, key, facts of the key, score)
//   IsVisible(params, row, key, facts of the key)
//   ShowsAll(row, first, last)      whether the row is known to see all kv positions from first to
//                                  last; kMayShowAll: this can be true
// With kIsAffine there is no Logit, but the parts of
//   (kFactor * Factor(row)) * score + (Term(row) + Slope(row) * offset of the key) + rest
//   kHasFactor, kHasTerm ...        which parts exist; a Factor that does not counts as 1
//   Rest(params, row, key, facts of the key, x)
//                                  x + rest; rest is all else that depends on the key
//   LineAt(row, first)             Term and Slope for another `first`, without Factor and rest
// The offset of a key is its position minus `first`. The program's `present` must be 1.
std::string VariantText(const VariantProgram& program, const std::string& name);

// The same for the backward pass. Instead of Logit it has
//   Differentiate(params, row, key, facts of the key, score, slope)
//                                  the logit; slope: its derivative by the score
//   kHasSlope                      whether that derivative may differ from 1
//   kNumElements                   operand elements that a logit reads and has derivatives by
//   OperandOf(element)             the operand of such an element
//   Partials(params, row, key, facts of the key, score, places, partials)
//                                  each element's index in its operand, and the derivative by it
std::string VariantText(const VariantGradient& gradient, const std::string& name);

}  // namespace jax_attn
