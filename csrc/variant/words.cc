#include "variant/words.h"

#include <string>

namespace jax_attn {
namespace {

const char* TypeName(i32 type) {
  return type == kVariantF32 ? "f32" : type == kVariantI32 ? "i32" : "bool";
}

i32 LoadedType(i32 operand_type) {
  if (operand_type == kOperandBool) return kVariantBool;
  return operand_type == kOperandI32 || operand_type == kOperandU8 ? kVariantI32 : kVariantF32;
}

i32 LevelOfFact(i32 op) {
  if (op == kOpScore) return kPerLogit;
  return op == kOpKvPos || op == kOpKvRow ? kPerKey : kPerRow;
}

class Reader {
 public:
  Reader(const int64_t* words, size_t num_words, VariantProgram* program)
      : words_(words), num_words_(num_words), p_(program) {}

  Status Read() {
    int64_t version;
    JAX_ATTN_RETURN_IF_ERROR(Take("version", kProgramVersion, kProgramVersion, &version));
    JAX_ATTN_RETURN_IF_ERROR(Take("normalizes", 0, 1, &p_->normalizes));
    JAX_ATTN_RETURN_IF_ERROR(Take("logits", -1, kMaxInstructions - 1, &p_->logits));
    JAX_ATTN_RETURN_IF_ERROR(Take("visible", -1, kMaxInstructions - 1, &p_->visible));
    JAX_ATTN_RETURN_IF_ERROR(Take("num_operands", 0, kMaxVariantOperands, &p_->num_operands));
    for (i32 i = 0; i < p_->num_operands; ++i) {
      ProgramOperand& operand = p_->operands[i];
      JAX_ATTN_RETURN_IF_ERROR(
          Take("type of an operand", kOperandF32, kOperandBool, &operand.type));
      JAX_ATTN_RETURN_IF_ERROR(Take("axes of an operand", 0, kMaxOperandRank, &operand.rank));
    }
    JAX_ATTN_RETURN_IF_ERROR(Take("num_instructions", 0, kMaxInstructions, &p_->num_instructions));
    for (i32 i = 0; i < p_->num_instructions; ++i) JAX_ATTN_RETURN_IF_ERROR(ReadInstruction(i));
    if (at_ != num_words_) {
      return Refuse("words", std::to_string(at_), static_cast<int64_t>(num_words_));
    }
    JAX_ATTN_RETURN_IF_ERROR(CheckResult("logits", p_->logits, kVariantF32));
    JAX_ATTN_RETURN_IF_ERROR(CheckResult("visible", p_->visible, kVariantBool));
    // Without results it only declares the operands of transforms.
    p_->present = p_->logits >= 0 || p_->visible >= 0 || !p_->normalizes;
    if (!p_->present && p_->num_instructions > 0) {
      return Refuse("num_instructions", "0 without a result", p_->num_instructions);
    }
    return Status::Ok();
  }

 private:
  static Status Refuse(const std::string& what, const std::string& expected, int64_t got) {
    return Status::Error("program: " + what + ": expected " + expected + ", got " +
                         std::to_string(got) + ".");
  }

  template <typename T>
  Status Take(const char* what, int64_t least, int64_t most, T* to) {
    if (at_ >= num_words_) {
      return Refuse("words", "at least " + std::to_string(at_ + 1),
                    static_cast<int64_t>(num_words_));
    }
    const int64_t word = words_[at_++];
    if (word < least || word > most) {
      return Refuse(what,
                    least == most ? std::to_string(least)
                                  : std::to_string(least) + " to " + std::to_string(most),
                    word);
    }
    *to = static_cast<T>(word);
    return Status::Ok();
  }

  Status ReadInstruction(i32 i) {
    Instruction& x = p_->instructions[i];
    const std::string name = "instruction " + std::to_string(i);
    JAX_ATTN_RETURN_IF_ERROR(Take("operation", 0, kNumVariantOps - 1, &x.op));
    JAX_ATTN_RETURN_IF_ERROR(Take("type of a value", kVariantF32, kVariantBool, &x.type));
    for (i32& arg : x.args) {
      JAX_ATTN_RETURN_IF_ERROR(Take("argument", INT32_MIN, INT32_MAX, &arg));
    }
    const VariantOpInfo& info = kVariantOps[x.op];
    i32 used = info.num_args;  // entries of args in use
    switch (info.rule) {
      case kRuleConst:
        used = 1;
        if (x.type == kVariantBool && (x.args[0] < 0 || x.args[0] > 1)) {
          return Refuse(name, "a bool of 0 or 1", x.args[0]);
        }
        break;
      case kRuleAt:
        JAX_ATTN_RETURN_IF_ERROR(
            CheckType(name, x.type, info.types == kF ? kVariantF32 : kVariantI32));
        x.level = LevelOfFact(x.op);
        break;
      case kRuleLoad:
      case kRuleDim: {
        if (x.args[0] < 0 || x.args[0] >= p_->num_operands) {
          return Refuse(name, "an operand below " + std::to_string(p_->num_operands), x.args[0]);
        }
        const ProgramOperand& operand = p_->operands[x.args[0]];
        const bool loads = info.rule == kRuleLoad;
        const i32 type = loads ? LoadedType(operand.type) : i32{kVariantI32};
        JAX_ATTN_RETURN_IF_ERROR(CheckType(name, x.type, type));
        used = loads ? 1 + operand.rank : 2;
        if (!loads && (x.args[1] < 0 || x.args[1] >= operand.rank)) {
          return Refuse(name, "an axis below " + std::to_string(operand.rank), x.args[1]);
        }
        for (i32 a = 1; loads && a < used; ++a) {
          JAX_ATTN_RETURN_IF_ERROR(CheckValue(name, i, x.args[a], kVariantI32));
        }
        break;
      }
      case kRuleSame:
      case kRuleCompare:
      case kRuleSelect:
      case kRuleCast:
        JAX_ATTN_RETURN_IF_ERROR(CheckOperation(name, i, x, info));
        break;
    }
    for (i32 a = used; a < kMaxInstructionArgs; ++a) {
      if (x.args[a] != 0) return Refuse(name, "0 where there is no argument", x.args[a]);
    }
    if (info.rule == kRuleDim || info.rule == kRuleConst) return Status::Ok();
    for (i32 a = 0; a < NumValueArgs(*p_, x); ++a) {
      x.level |= p_->instructions[x.args[FirstValueArg(x) + a]].level;
    }
    return Status::Ok();
  }

  Status CheckOperation(const std::string& name, i32 i, const Instruction& x,
                        const VariantOpInfo& info) {
    const i32 first = info.rule == kRuleSelect ? 1 : 0;  // the argument that has the type of all
    JAX_ATTN_RETURN_IF_ERROR(CheckValue(name, i, x.args[first], -1));
    const i32 type = p_->instructions[x.args[first]].type;
    if ((info.types >> type & 1) == 0) {
      return Status::Error("program: " + name + ": expected another type of argument for " +
                           info.word + ", got " + TypeName(type) + ".");
    }
    if (info.rule == kRuleSelect) {
      JAX_ATTN_RETURN_IF_ERROR(CheckValue(name, i, x.args[0], kVariantBool));
    }
    for (i32 a = first; a < info.num_args; ++a) {
      JAX_ATTN_RETURN_IF_ERROR(CheckValue(name, i, x.args[a], type));
    }
    if (info.rule == kRuleCast) return Status::Ok();
    return CheckType(name, x.type, info.rule == kRuleCompare ? i32{kVariantBool} : type);
  }

  // Checks that `value` comes before instruction i and has the type; -1: any type.
  Status CheckValue(const std::string& name, i32 i, i32 value, i32 type) {
    if (value < 0 || value >= i) {
      return Refuse(name, "an argument that is a value before it", value);
    }
    if (type < 0) return Status::Ok();
    return CheckType(name + ", argument " + std::to_string(value), p_->instructions[value].type,
                     type);
  }

  static Status CheckType(const std::string& name, i32 got, i32 expected) {
    if (got == expected) return Status::Ok();
    return Status::Error("program: " + name + ": expected type " + TypeName(expected) + ", got " +
                         TypeName(got) + ".");
  }

  Status CheckResult(const char* name, i32 value, i32 type) {
    if (value < 0) return Status::Ok();
    if (value >= p_->num_instructions) {
      return Refuse(name, "a value below " + std::to_string(p_->num_instructions), value);
    }
    return CheckType(name, p_->instructions[value].type, type);
  }

  const int64_t* words_;
  const size_t num_words_;
  size_t at_ = 0;
  VariantProgram* p_;
};

}  // namespace

Status DecodeProgram(const int64_t* words, size_t num_words, VariantProgram* program) {
  *program = VariantProgram{};
  if (num_words == 0) return Status::Ok();
  Status s = Reader(words, num_words, program).Read();
  if (!s.ok()) *program = VariantProgram{};
  return s;
}

Status DecodeGradient(const int64_t* words, size_t num_words, const VariantProgram& of,
                      VariantGradient* gradient) {
  *gradient = VariantGradient{};
  const auto refuse = [](const char* what) {
    return Status::Error(std::string("gradient: ") + what + ".");
  };
  if (!of.present) return num_words == 0 ? Status::Ok() : refuse("expected none without a variant");
  if (num_words < 2 || words[1] < 0 || words[1] > kMaxDerivatives ||
      num_words < 2 + 2 * static_cast<size_t>(words[1])) {
    return refuse("expected the words of one");
  }
  VariantProgram& p = gradient->program;
  const size_t first = 2 + 2 * static_cast<size_t>(words[1]);
  JAX_ATTN_RETURN_IF_ERROR(DecodeProgram(words + first, num_words - first, &p));
  bool fits = p.present && p.normalizes == of.normalizes && p.num_operands == of.num_operands;
  for (i32 i = 0; fits && i < of.num_operands; ++i) {
    fits = p.operands[i].type == of.operands[i].type && p.operands[i].rank == of.operands[i].rank;
  }
  if (!fits) return refuse("expected that of the variant");
  const auto is_float = [&](int64_t value) {
    return value >= 0 && value < p.num_instructions && p.instructions[value].type == kVariantF32;
  };
  if (words[0] != -1 && !is_float(words[0])) return refuse("expected a derivative that is a float");
  gradient->score = static_cast<i32>(words[0]);
  gradient->num_elements = static_cast<i32>(words[1]);
  for (i32 i = 0; i < gradient->num_elements; ++i) {
    const int64_t load = words[2 + 2 * i], partial = words[3 + 2 * i];
    if (!is_float(load) || p.instructions[load].op != kOpLoad || !is_float(partial)) {
      return refuse("expected elements of floats, and derivatives that are floats");
    }
    gradient->elements[i] = {static_cast<i32>(load), static_cast<i32>(partial)};
  }
  return Status::Ok();
}

std::vector<int64_t> EncodeGradient(const VariantGradient& gradient) {
  if (!gradient.program.present) return {};
  std::vector<int64_t> words = {gradient.score, gradient.num_elements};
  for (i32 i = 0; i < gradient.num_elements; ++i) {
    words.insert(words.end(), {gradient.elements[i].load, gradient.elements[i].partial});
  }
  const std::vector<int64_t> program = EncodeProgram(gradient.program);
  words.insert(words.end(), program.begin(), program.end());
  return words;
}

std::vector<int64_t> EncodeProgram(const VariantProgram& p) {
  if (!p.present && p.num_operands == 0) return {};
  std::vector<int64_t> words = {kProgramVersion, p.normalizes, p.logits, p.visible, p.num_operands};
  for (i32 i = 0; i < p.num_operands; ++i) {
    words.insert(words.end(), {p.operands[i].type, p.operands[i].rank});
  }
  words.push_back(p.num_instructions);
  for (i32 i = 0; i < p.num_instructions; ++i) {
    const Instruction& x = p.instructions[i];
    words.insert(words.end(), {x.op, x.type});
    words.insert(words.end(), x.args, x.args + kMaxInstructionArgs);
  }
  return words;
}

}  // namespace jax_attn
