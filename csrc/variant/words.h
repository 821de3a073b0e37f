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

}  // namespace jax_attn
