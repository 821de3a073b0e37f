// The words of a program, its form in attributes, files and Python:
//
//   kProgramVersion, normalizes, logits, visible, num_operands, (type, rank) of each operand,
//   num_instructions, (op, type, args[0 ... kMaxInstructionArgs)) of each instruction
//
// No words mean no variant.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "status.h"
#include "variant/program.h"

namespace jax_attn {

inline constexpr int64_t kProgramVersion = 1;

// Accepts words from any source. In an accepted program every index is in range and every type is
// right, and EncodeProgram returns the same words.
Status DecodeProgram(const int64_t* words, size_t num_words, VariantProgram* program);
std::vector<int64_t> EncodeProgram(const VariantProgram& program);

// The words of a gradient: score, num_elements, (load, partial) of each element, and the words of
// its program. of: the program of the gradient; its operands and `normalizes` must match. Without a
// variant there are no words.
Status DecodeGradient(const int64_t* words, size_t num_words, const VariantProgram& of,
                      VariantGradient* gradient);
std::vector<int64_t> EncodeGradient(const VariantGradient& gradient);

}  // namespace jax_attn
