// Parts of generated CUDA C++.
#pragma once

#include <string>

#include "variant/program.h"

namespace jax_attn {

// Numbers.
std::string HexText(i32 bits);
std::string FloatText(float x);
std::string ConstantText(i32 type, i32 bits);

// Names in cuda/common/variant.cuh: of a VariantType, an OperandType, a VariantOp, and a cast.
const char* TypeText(i32 type);
const char* ElementText(i32 operand_type);
const char* OpText(i32 op);
std::string CastText(i32 type);

}  // namespace jax_attn
