// A user's logits and mask functions as a program: a list of scalar operations in which every value
// is written once. jax_attn/_variant/trace.py traces the functions to it.
//
// A program is a plain struct of fixed size for host code and for the CPU kernels of every
// instruction set, so this file includes no C++ standard header. words.cc reads and checks
// programs.
#pragma once

#include "params.h"

namespace jax_attn {

enum VariantType : i32 { kVariantF32 = 0, kVariantI32 = 1, kVariantBool = 2 };

// Element type of an operand in memory. f32, bf16 and f16 load as f32, i32 and u8 as i32, bool as
// bool.
enum OperandType : i32 {
  kOperandF32 = 0,
  kOperandBF16 = 1,
  kOperandF16 = 2,
  kOperandI32 = 3,
  kOperandU8 = 4,
  kOperandBool = 5,
};

// How often a value is computed: once per call, or per row, key or both that it depends on. Bits.
enum VariantLevel : i32 { kPerCall = 0, kPerRow = 1, kPerKey = 2, kPerLogit = 3 };

// The arguments and the result of an operation.
enum VariantRule : i32 {
  kRuleConst,    // args[0]: the bits of the value, bool 0 or 1
  kRuleAt,       // no arguments: a fact about the logit
  kRuleLoad,     // args[0]: an operand, args[1 ...]: one i32 index per axis
  kRuleDim,      // args[0]: an operand, args[1]: an axis; the result is its length, i32
  kRuleSame,     // arguments and result have one type
  kRuleCompare,  // two arguments of one type; the result is bool
  kRuleSelect,   // bool, value if true, value if false
  kRuleCast,     // one argument of any type
};

// Types that arguments may have, as bits (1 << VariantType).
enum : i32 { kF = 1, kI = 2, kFI = 3, kB = 4, kIB = 6, kAny = 7 };

// The one table of operations: X(name, word, rule, number of arguments, types). Saved plans and
// exported executables have an operation by its number, so new ones are added at the end.
// f32 is IEEE; min and max give NaN if either argument is NaN. i32 wraps around; division
// truncates, x / 0 is -1 and x rem 0 is x; shifts by 32 bits or more leave 0, or the sign (sar). A
// cast to i32 truncates and saturates, and NaN becomes 0; a cast to bool is x != 0. The indices of
// a load are clamped to [0, length), so nothing outside is read. An operand with an axis of length
// 0 is refused before anything runs.
#define JAX_ATTN_VARIANT_OPS(X)                 \
  X(Const, "const", kRuleConst, 0, kAny)        \
  X(Score, "score", kRuleAt, 0, kF)             \
  X(Head, "head", kRuleAt, 0, kI)               \
  X(KvHead, "kv_head", kRuleAt, 0, kI)          \
  X(Request, "request", kRuleAt, 0, kI)         \
  X(QPos, "q_pos", kRuleAt, 0, kI)              \
  X(KvPos, "kv_pos", kRuleAt, 0, kI)            \
  X(QRow, "q_row", kRuleAt, 0, kI)              \
  X(KvRow, "kv_row", kRuleAt, 0, kI)            \
  X(QLen, "q_len", kRuleAt, 0, kI)              \
  X(KvLen, "kv_len", kRuleAt, 0, kI)            \
  X(Load, "load", kRuleLoad, 0, kAny)           \
  X(Dim, "dim", kRuleDim, 0, kI)                \
  X(Neg, "neg", kRuleSame, 1, kFI)              \
  X(Abs, "abs", kRuleSame, 1, kFI)              \
  X(Sign, "sign", kRuleSame, 1, kFI)            \
  X(Floor, "floor", kRuleSame, 1, kF)           \
  X(Ceil, "ceil", kRuleSame, 1, kF)             \
  X(Round, "round", kRuleSame, 1, kF)           \
  X(Exp, "exp", kRuleSame, 1, kF)               \
  X(Exp2, "exp2", kRuleSame, 1, kF)             \
  X(Log, "log", kRuleSame, 1, kF)               \
  X(Log1p, "log1p", kRuleSame, 1, kF)           \
  X(Tanh, "tanh", kRuleSame, 1, kF)             \
  X(Logistic, "logistic", kRuleSame, 1, kF)     \
  X(Sqrt, "sqrt", kRuleSame, 1, kF)             \
  X(Rsqrt, "rsqrt", kRuleSame, 1, kF)           \
  X(Not, "not", kRuleSame, 1, kIB)              \
  X(Cast, "cast", kRuleCast, 1, kAny)           \
  X(Add, "add", kRuleSame, 2, kFI)              \
  X(Sub, "sub", kRuleSame, 2, kFI)              \
  X(Mul, "mul", kRuleSame, 2, kFI)              \
  X(Div, "div", kRuleSame, 2, kFI)              \
  X(Rem, "rem", kRuleSame, 2, kFI)              \
  X(Min, "min", kRuleSame, 2, kFI)              \
  X(Max, "max", kRuleSame, 2, kFI)              \
  X(And, "and", kRuleSame, 2, kIB)              \
  X(Or, "or", kRuleSame, 2, kIB)                \
  X(Xor, "xor", kRuleSame, 2, kIB)              \
  X(ShiftLeft, "shl", kRuleSame, 2, kI)         \
  X(ShiftRight, "sar", kRuleSame, 2, kI)        \
  X(ShiftRightLogical, "shr", kRuleSame, 2, kI) \
  X(Eq, "eq", kRuleCompare, 2, kAny)            \
  X(Ne, "ne", kRuleCompare, 2, kAny)            \
  X(Lt, "lt", kRuleCompare, 2, kFI)             \
  X(Le, "le", kRuleCompare, 2, kFI)             \
  X(Select, "select", kRuleSelect, 3, kAny)     \
  X(Expm1, "expm1", kRuleSame, 1, kF)           \
  X(Sin, "sin", kRuleSame, 1, kF)               \
  X(Cos, "cos", kRuleSame, 1, kF)               \
  X(Erf, "erf", kRuleSame, 1, kF)               \
  X(Erfc, "erfc", kRuleSame, 1, kF)             \
  X(Atan2, "atan2", kRuleSame, 2, kF)           \
  X(Pow, "pow", kRuleSame, 2, kF)

enum VariantOp : i32 {
#define JAX_ATTN_OP(name, word, rule, num_args, types) kOp##name,
  JAX_ATTN_VARIANT_OPS(JAX_ATTN_OP)
#undef JAX_ATTN_OP
      kNumVariantOps
};

struct VariantOpInfo {
  const char* word;
  VariantRule rule;
  i32 num_args;  // arguments that are values, of kRuleSame, kRuleCompare, kRuleSelect, kRuleCast
  i32 types;
};

inline constexpr VariantOpInfo kVariantOps[kNumVariantOps] = {
#define JAX_ATTN_OP(name, word, rule, num_args, types) {word, rule, num_args, types},
    JAX_ATTN_VARIANT_OPS(JAX_ATTN_OP)
#undef JAX_ATTN_OP
};

inline constexpr i32 kMaxInstructions = 128;
inline constexpr i32 kMaxOperandRank = 4;
inline constexpr i32 kMaxInstructionArgs = 1 + kMaxOperandRank;

// Value i of a program is the result of instruction i. Arguments are earlier values unless the rule
// says otherwise. Unused arguments are 0.
struct Instruction {
  i32 op;    // a VariantOp
  i32 type;  // VariantType of the result
  i32 args[kMaxInstructionArgs];
  i32 level;  // a VariantLevel, derived from the other fields
};

struct ProgramOperand {
  i32 type;  // an OperandType
  i32 rank;  // 0 to kMaxOperandRank
};

struct VariantProgram {
  i32 present;  // 0: logits and mask are those of the spec; only operands of transforms may be here
  i32 normalizes;  // 1: softmax; 0: o is the sum of logits times v
  i32 logits;      // the value that becomes the logit (normalizes 0: the weight); -1: the score
  i32 visible;     // the bool value that says whether the row sees the key; -1: true
  i32 num_operands;
  ProgramOperand operands[kMaxVariantOperands];
  i32 num_instructions;
  Instruction instructions[kMaxInstructions];
};

// A program with the derivatives of its logit, for the backward pass. Derivatives are values, too.
inline constexpr i32 kMaxDerivatives = 16;
struct VariantGradient {
  VariantProgram program;  // with the same logit and mask
  i32 score;               // the value that is d logit / d score; -1: it is 1
  i32 num_elements;
  struct {
    i32 load;     // an instruction that loads an element of a float operand
    i32 partial;  // the value that is d logit / d element
  } elements[kMaxDerivatives];
};

// The arguments of an instruction that are values: args[FirstValueArg ... + NumValueArgs).
constexpr i32 FirstValueArg(const Instruction& x) {
  return kVariantOps[x.op].rule == kRuleLoad ? 1 : 0;
}
constexpr i32 NumValueArgs(const VariantProgram& program, const Instruction& x) {
  return kVariantOps[x.op].rule == kRuleLoad ? program.operands[x.args[0]].rank
                                             : kVariantOps[x.op].num_args;
}

// Whether the result differs between the rows of a shared prefix. Items of shared prefixes do not
// have these facts: positions, rows and lengths of the queries.
constexpr bool IsOfOwnRows(i32 op) {
  return op == kOpRequest || op == kOpQPos || op == kOpQRow || op == kOpQLen || op == kOpKvLen;
}
constexpr bool NeedsOwnRows(const VariantProgram& program) {
  for (i32 i = 0; i < program.num_instructions; ++i) {
    if (IsOfOwnRows(program.instructions[i].op)) return true;
  }
  return false;
}

// The same for the logits alone. Nothing else counts where the mask hides nothing.
constexpr bool LogitsNeedOwnRows(const VariantProgram& program) {
  bool is_read[kMaxInstructions] = {};
  for (i32 i = program.num_instructions - 1; i >= 0; --i) {
    if (i != program.logits && !is_read[i]) continue;
    const Instruction& x = program.instructions[i];
    if (IsOfOwnRows(x.op)) return true;
    const i32 first = FirstValueArg(x);
    for (i32 a = first; a < first + NumValueArgs(program, x); ++a) is_read[x.args[a]] = true;
  }
  return false;
}

}  // namespace jax_attn
