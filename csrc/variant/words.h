// The words of a program: how it travels through attributes, files and Python.
//
//   kProgramVersion, normalizes, logits, visible, num_operands, (type, rank) of each operand,
//   num_instructions, (op, type, args[0 ... kMaxInstructionArgs)) of each instruction
// No words at all: no variant.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "status.h"
#include "variant/program.h"

namespace jax_attn {

inline constexpr int64_t kProgramVersion = 1;

// Words from anywhere: of a program that is accepted, every index is in range, every type is right,
// and EncodeProgram gives the same words back.
Status DecodeProgram(const int64_t* words, size_t num_words, VariantProgram* program);
std::vector<int64_t> EncodeProgram(const VariantProgram& program);

// Those of a gradient: score, num_elements, (load, partial) of each, and the words of its program.
// of: the program that it must be the gradient of, as far as operands and softmax go; without one
// there are no words.
Status DecodeGradient(const int64_t* words, size_t num_words, const VariantProgram& of,
                      VariantGradient* gradient);
std::vector<int64_t> EncodeGradient(const VariantGradient& gradient);

}  // namespace jax_attn
