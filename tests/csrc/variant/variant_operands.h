// Operands of variant_programs.h's programs, and kernel shapes with the generated text.
#pragma once

#include <random>
#include <vector>

#include "variant/variant_programs.h"

namespace jax_attn {
namespace {

template <class Shape, class V>
struct With : Shape {
  using Variant = V;
};

// Arrays whose lengths may be smaller than indices. 32-bit integers are in [0, range).
std::vector<std::vector<char>> MakeVariantOperands(const VariantProgram& program, int range,
                                                   std::mt19937& random, VariantOperand* operands) {
  std::vector<std::vector<char>> data(program.num_operands);
  for (i32 i = 0; i < program.num_operands; ++i) {
    const auto [type, rank] = program.operands[i];
    constexpr int kLongest[kMaxOperandRank] = {300, 40, 8, 4};  // the last axis first
    i64 size = 1;
    for (i32 axis = 0; axis < rank; ++axis) {
      operands[i].dims[axis] = 1 + static_cast<i32>(random() % kLongest[rank - 1 - axis]);
      size *= operands[i].dims[axis];
    }
    const auto put = [&](auto x) {
      const char* bytes = reinterpret_cast<const char*>(&x);
      data[i].insert(data[i].end(), bytes, bytes + sizeof(x));
    };
    for (i64 at = 0; at < size; ++at) {
      const float uniform = static_cast<float>(random() % 1024) / 1024;
      switch (type) {
        case kOperandF32:
          put(0.3f + uniform);
          break;
        case kOperandBF16:
          put(static_cast<u16>(FloatToBf16(uniform)));
          break;
        case kOperandF16:
          put(static_cast<u16>(FloatToF16(uniform)));
          break;
        case kOperandI32:
          put(static_cast<i32>(random() % static_cast<unsigned>(range)));
          break;
        case kOperandU8:
          put(static_cast<unsigned char>(random() % 3));
          break;
        default:
          put(static_cast<unsigned char>(random() % 4 == 0));
      }
    }
    operands[i].data = data[i].data();
  }
  return data;
}

}  // namespace
}  // namespace jax_attn
