// Attention with a variant by its definition: one logit after the other, in double.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "variant/program.h"

namespace jax_attn {

struct Fact {
  double score;
  i32 of[kOpKvLen + 1];  // by operation
};

// A value; bools are 0 or 1.
struct VariantValue {
  double f;
  i32 i;
};

class VariantOracle {
 public:
  VariantOracle(const VariantProgram& program, const VariantOperand* operands)
      : p_(program), operands_(operands) {}

  // Computes the logit, or the weight without softmax, and whether the key is visible.
  void Run(const Fact& fact, double* logit, bool* visible) {
    for (i32 n = 0; n < p_.num_instructions; ++n) values_[n] = One(p_.instructions[n], fact);
    *logit = p_.logits < 0 ? fact.score : values_[p_.logits].f;
    *visible = p_.visible < 0 || values_[p_.visible].i != 0;
  }

 private:
  VariantValue One(const Instruction& x, const Fact& fact) const {
    const auto arg = [&](i32 n) { return values_[x.args[n]]; };
    switch (kVariantOps[x.op].rule) {
      case kRuleConst: {
        float f;
        std::memcpy(&f, &x.args[0], 4);
        return {f, x.args[0]};
      }
      case kRuleAt:
        return {fact.score, fact.of[x.op]};
      case kRuleDim:
        return {0, operands_[x.args[0]].dims[x.args[1]]};
      case kRuleLoad:
        return Load(x);
      case kRuleCast: {
        const i32 from = p_.instructions[x.args[0]].type;
        const VariantValue v = arg(0);
        const double f = from == kVariantF32 ? v.f : v.i;
        if (x.type == kVariantF32) return {static_cast<float>(f), 0};
        if (x.type == kVariantBool) return {0, f != 0};
        if (std::isnan(f)) return {0, 0};
        return {0, static_cast<i32>(std::max(-2147483648.0, std::min(2147483647.0, f)))};
      }
      case kRuleSelect:
        return arg(0).i != 0 ? arg(1) : arg(2);
      default:
        break;
    }
    const i32 type = p_.instructions[x.args[0]].type;
    if (type == kVariantF32) return OfFloats(x.op, arg(0).f, arg(1).f);
    return {0, OfInts(x.op, type, arg(0).i, arg(1).i)};
  }

  VariantValue Load(const Instruction& x) const {
    const VariantOperand& operand = operands_[x.args[0]];
    i64 place = 0;
    for (i32 axis = 0; axis < p_.operands[x.args[0]].rank; ++axis) {
      const i32 length = operand.dims[axis], index = values_[x.args[1 + axis]].i;
      place = place * length + (index < 0 ? 0 : index < length ? index : length - 1);
    }
    const char* data = static_cast<const char*>(operand.data);
    const auto as = [&](auto element) {
      std::memcpy(&element, data + place * static_cast<i64>(sizeof(element)), sizeof(element));
      return element;
    };
    switch (p_.operands[x.args[0]].type) {
      case kOperandF32:
        return {as(0.0f), 0};
      case kOperandBF16:
        return {Bf16ToFloat(as(u16{0})), 0};
      case kOperandF16:
        return {F16ToFloat(as(u16{0})), 0};
      case kOperandI32:
        return {0, as(i32{0})};
      default:
        return {0, as(static_cast<unsigned char>(0))};
    }
  }

  static VariantValue OfFloats(i32 op, double x, double y) {
    switch (op) {
      case kOpNeg:
        return {-x, 0};
      case kOpAbs:
        return {std::abs(x), 0};
      case kOpTanh:
        return {std::tanh(x), 0};
      case kOpLogistic:
        return {1 / (1 + std::exp(-x)), 0};
      case kOpExpm1:
        return {std::expm1(x), 0};
      case kOpSin:
        return {std::sin(x), 0};
      case kOpCos:
        return {std::cos(x), 0};
      case kOpErf:
        return {std::erf(x), 0};
      case kOpErfc:
        return {std::erfc(x), 0};
      case kOpAtan2:
        return {std::atan2(x, y), 0};
      case kOpPow:
        return {std::pow(x, y), 0};
      case kOpAdd:
        return {x + y, 0};
      case kOpSub:
        return {x - y, 0};
      case kOpMul:
        return {x * y, 0};
      case kOpDiv:
        return {x / y, 0};
      case kOpLt:
        return {0, x < y};
      default:
        std::abort();  // no program here has it
    }
  }

  static i32 OfInts(i32 op, i32 type, i32 x, i32 y) {
    const i64 a = x, b = y;
    const bool is_shift = static_cast<u32>(y) < 32;
    const auto wrapped = [](i64 z) { return static_cast<i32>(static_cast<u32>(z)); };
    switch (op) {
      case kOpNeg:
        return wrapped(-a);
      case kOpAbs:
        return wrapped(a < 0 ? -a : a);
      case kOpSign:
        return (x > 0) - (x < 0);
      case kOpNot:
        return type == kVariantBool ? x == 0 : ~x;
      case kOpAdd:
        return wrapped(a + b);
      case kOpSub:
        return wrapped(a - b);
      case kOpMul:
        return wrapped(static_cast<i64>(static_cast<u64>(a) * static_cast<u64>(b)));
      case kOpDiv:
        return y == 0 ? -1 : wrapped(a / b);
      case kOpRem:
        return y == 0 ? x : wrapped(a % b);
      case kOpMin:
        return std::min(x, y);
      case kOpMax:
        return std::max(x, y);
      case kOpAnd:
        return x & y;
      case kOpOr:
        return x | y;
      case kOpXor:
        return x ^ y;
      case kOpShiftLeft:
        return is_shift ? wrapped(static_cast<i64>(static_cast<u64>(static_cast<u32>(x)) << y)) : 0;
      case kOpShiftRight:
        return is_shift ? x >> y : x < 0 ? -1 : 0;
      case kOpShiftRightLogical:
        return is_shift ? wrapped(static_cast<i64>(static_cast<u32>(x) >> y)) : 0;
      case kOpEq:
        return x == y;
      case kOpNe:
        return x != y;
      case kOpLt:
        return x < y;
      case kOpLe:
        return x <= y;
      default:
        std::abort();
    }
  }

  const VariantProgram& p_;
  const VariantOperand* operands_;
  VariantValue values_[kMaxInstructions];
};

}  // namespace jax_attn
