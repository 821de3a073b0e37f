#include "jit/variant_source.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <sstream>
#include <vector>

namespace jax_attn {
namespace {

// Where values are computed. Those of the call, of which there are few, are with rows, which keep
// them for logits, and again with keys, where these need them.
enum Place { kConstant, kOfCall, kOfRow, kOfKey, kOfLogit };

const char* TypeText(i32 type) {
  return type == kVariantF32 ? "float" : type == kVariantI32 ? "int" : "bool";
}
const char* ElementText(i32 operand_type) {
  static constexpr const char* kNames[] = {"OfF32", "OfBF16", "OfF16", "OfI32", "OfU8", "OfBool"};
  return kNames[operand_type];
}
const char* OpText(i32 op) {
  static constexpr const char* kNames[kNumVariantOps] = {
#define JAX_ATTN_OP(name, word, rule, num_args, types) #name,
      JAX_ATTN_VARIANT_OPS(JAX_ATTN_OP)
#undef JAX_ATTN_OP
  };
  return kNames[op];
}

std::string Hex(i32 bits) {
  char text[16];
  std::snprintf(text, sizeof(text), "0x%08xu", static_cast<unsigned>(bits));
  return text;
}

class Writer {
 public:
  // gradient: of the program; null: none.
  Writer(const VariantProgram& program, const VariantGradient* gradient, std::string name)
      : p_(program), gradient_(gradient), name_(std::move(name)), used_(program.num_instructions) {
    for (i32 result : {p_.logits, p_.visible}) MarkUsed(result);
    if (gradient_ == nullptr) return;
    MarkUsed(gradient_->score);
    for (i32 i = 0; i < gradient_->num_elements; ++i) {
      MarkUsed(gradient_->elements[i].load);
      MarkUsed(gradient_->elements[i].partial);
    }
  }

  std::string Write() {
    std::ostringstream row, key, row_members, key_members;
    WriteValues(kOfRow, &row, &row_members);
    WriteValues(kOfKey, &key, &key_members);
    std::ostringstream out;
    out << "struct " << name_ << " {\n"
        << "  static constexpr bool kHasLogits = " << Bool(p_.logits >= 0) << ";\n"
        << "  static constexpr bool kHasMask = " << Bool(p_.visible >= 0) << ";\n"
        << "  static constexpr bool kLogitsFollowKeys = " << Bool(DependsOnKey(p_.logits)) << ";\n"
        << "  static constexpr bool kNormalizes = " << Bool(p_.normalizes != 0) << ";\n\n"
        << "  struct Row {\n"
        << row_members.str() << "  };\n"
        << "  template <class Facts>\n"
        << Function("Row OfRow", "const Facts& at, int first") << "    Row row;\n"
        << row.str() << "    return row;\n  }\n\n"
        << "  struct Key {\n"
        << key_members.str() << "  };\n"
        << "  template <class Facts>\n"
        << Function("Key OfKey", "const Facts& at") << "    Key key;\n"
        << key.str() << "    return key;\n  }\n\n"
        << (gradient_ != nullptr ? Derivative()
                                 : Result("float Logit", ", float score", p_.logits, "score"))
        << "\n"
        << Result("bool IsVisible", "", p_.visible, "true") << "};\n";
    return out.str();
  }

 private:
  static const char* Bool(bool x) { return x ? "true" : "false"; }
  static std::string Number(const char* prefix, i32 i) { return prefix + std::to_string(i); }

  std::string Function(const std::string& what, const std::string& more) const {
    return "  __device__ __forceinline__ static " + what + "(const AttentionParams& p, " + more +
           ") {\n";
  }

  const Instruction& At(i32 value) const { return p_.instructions[value]; }

  Place PlaceOf(i32 value) const {
    const Instruction& x = At(value);
    if (x.op == kOpConst) return kConstant;
    static constexpr Place kPlaces[] = {kOfCall, kOfRow, kOfKey, kOfLogit};
    return kPlaces[x.level];
  }

  void MarkUsed(i32 value) {
    if (value < 0 || used_[value]) return;
    used_[value] = true;
    const Instruction& x = At(value);
    for (i32 i = 0; i < NumValueArgs(p_, x); ++i) MarkUsed(x.args[FirstValueArg(x) + i]);
  }

  // Whether the value is computed from a key's position or row.
  bool DependsOnKey(i32 value) const {
    std::vector<bool> depends(p_.num_instructions);
    for (i32 i = 0; i <= value; ++i) {
      const Instruction& x = At(i);
      depends[i] = x.op == kOpKvPos || x.op == kOpKvRow;
      for (i32 a = 0; a < NumValueArgs(p_, x); ++a) {
        if (depends[x.args[FirstValueArg(x) + a]]) depends[i] = true;
      }
    }
    return value >= 0 && depends[value];
  }

  // The value, where values of `place` are computed.
  std::string Value(i32 value, Place place) const {
    const Instruction& x = At(value);
    if (x.op == kOpConst) {
      if (x.type == kVariantF32) return "F32(" + Hex(x.args[0]) + ")";
      if (x.type == kVariantBool) return Bool(x.args[0] != 0);
      return "static_cast<int>(" + Hex(x.args[0]) + ")";
    }
    if (x.op == kOpScore) return "score";
    const Place at = PlaceOf(value);
    const bool is_here = at == place || (at == kOfCall && place != kOfLogit);
    return (is_here ? "" : at == kOfKey ? "key." : "row.") + Number("v", value);
  }

  // --- distances: a value of rows plus or minus the key's position, as f32 ---

  // The sign of kv_pos in such a value, or 0. The other term is far from what wraps around.
  i32 SignOfPosition(i32 value, i32* other) const {
    const Instruction& x = At(value);
    if ((x.op != kOpAdd && x.op != kOpSub) || x.type != kVariantI32) return 0;
    const bool second = At(x.args[1]).op == kOpKvPos;
    *other = x.args[second ? 0 : 1];
    if (!second && At(x.args[0]).op != kOpKvPos) return 0;
    const i32 op = At(*other).op;
    if (op != kOpQPos && op != kOpKvLen && op != kOpQLen) return 0;
    return second && x.op == kOpSub ? -1 : 1;
  }
  // Whether the instruction makes such a value f32. A conversion is as slow as an exponential, so
  // one a row does, to which the key's offset is added.
  bool IsDistance(const Instruction& x) const {
    i32 other;
    return x.op == kOpCast && x.type == kVariantF32 && SignOfPosition(x.args[0], &other) != 0;
  }

  // The argument of a product that is such a value, where the other one is of the row; else -1. A
  // row has its product with the first key's, to which that with the key's place, a constant, is
  // added in one operation. Its error is that of the product itself. A factor that is not finite
  // makes NaN of the row.
  i32 DistanceOfProduct(const Instruction& x) const {
    if (x.op != kOpMul || x.type != kVariantF32) return -1;
    for (i32 i : {1, 0}) {
      if (IsDistance(At(x.args[i])) && PlaceOf(x.args[1 - i]) <= kOfRow) return i;
    }
    return -1;
  }

  // --- values ---

  std::string Expression(i32 value, Place place) const {
    const Instruction& x = At(value);
    switch (kVariantOps[x.op].rule) {
      case kRuleConst:
        return Value(value, place);
      case kRuleAt:
        return std::string("at.") + kVariantOps[x.op].word + "()";
      case kRuleDim:
        return "Dim<" + std::to_string(x.args[0]) + ">(p, " + std::to_string(x.args[1]) + ")";
      case kRuleLoad:
        return LoadText(value, place);
      case kRuleCast: {
        const char* to = x.type == kVariantF32   ? "ToFloat"
                         : x.type == kVariantI32 ? "ToInt"
                                                 : "ToBool";
        return std::string(to) + "(" + Value(x.args[0], place) + ")";
      }
      default:
        break;
    }
    if (x.op == kOpDiv && x.type == kVariantF32 && At(x.args[1]).op == kOpConst) {
      // By a power of two, whose inverse is exact.
      float divisor;
      std::memcpy(&divisor, &At(x.args[1]).args[0], sizeof(divisor));
      int exponent;
      const float inverse = 1.0f / divisor;
      if (std::abs(std::frexp(divisor, &exponent)) == 0.5f && std::isnormal(inverse)) {
        i32 bits;
        std::memcpy(&bits, &inverse, sizeof(bits));
        return "Mul(" + Value(x.args[0], place) + ", F32(" + Hex(bits) + "))";
      }
    }
    std::string text = std::string(OpText(x.op)) + "(";
    for (i32 i = 0; i < kVariantOps[x.op].num_args; ++i) {
      text += (i > 0 ? ", " : "") + Value(x.args[i], place);
    }
    return text + ")";
  }

  // What indices of `of` add to the place of an element; "" if there are none.
  std::string PlaceOfIndices(const Instruction& x, Place of, bool* only_last) const {
    const i32 rank = p_.operands[x.args[0]].rank;
    std::string text;
    *only_last = true;
    for (i32 axis = 0; axis < rank; ++axis) {
      const i32 index = x.args[1 + axis];
      Place place = PlaceOf(index);
      if (place <= kOfCall) place = x.level == kPerKey ? kOfKey : kOfRow;
      if (place != of) continue;
      const std::string arguments = std::to_string(axis) + ", " + Value(index, of) + ")";
      const std::string operand = std::to_string(x.args[0]);
      if (!text.empty()) text += " + ";
      if (axis == rank - 1) {
        text += "InLastAxis<" + operand + ">(p, " + arguments;
      } else {
        text += "InAxis<" + operand + ", " + std::to_string(rank) + ">(p, " + arguments;
        *only_last = false;
      }
    }
    return text;
  }
  std::string Elements(const Instruction& x) const {
    return "Elements<" + std::to_string(x.args[0]) + ", " +
           ElementText(p_.operands[x.args[0]].type) + ">(p, ";
  }
  std::string LoadText(i32 value, Place place) const {
    const Instruction& x = At(value);
    const std::string load = std::string("Load<") + ElementText(p_.operands[x.args[0]].type) + ">(";
    bool only_last;
    const std::string mine = PlaceOfIndices(x, place, &only_last);
    if (PlaceOf(value) == kOfCall || place == kOfRow) {
      bool ignored;
      const std::string all = PlaceOfIndices(x, kOfRow, &ignored);
      return load + Elements(x) + (all.empty() ? "0" : all) + "), 0)";
    }
    if (place == kOfKey) return load + Elements(x) + "0), " + mine + ")";
    std::string elements = "row." + Number("elements", value);
    std::string rest = mine;
    if (place == kOfLogit && !PlaceOfIndices(x, kOfKey, &only_last).empty()) {
      rest = "key." + Number("place", value) + (mine.empty() ? "" : " + " + mine);
    }
    return load + elements + ", " + rest + ")";
  }

  static void Member(const std::string& type, const std::string& name, const std::string& text,
                     const char* of, std::ostringstream* out, std::ostringstream* members) {
    *members << "    " << type << " " << name << ";\n";
    *out << "    " << of << "." << name << " = " << text << ";\n";
  }

  // The statements of all values of `place`, and the members that keep them for others.
  void WriteValues(Place place, std::ostringstream* out, std::ostringstream* members) const {
    const char* const of = place == kOfRow ? "row" : "key";
    std::vector<bool> for_keys(p_.num_instructions);
    for (i32 i = p_.num_instructions - 1; i >= 0; --i) {
      const Instruction& x = At(i);
      const bool needs = used_[i] && (PlaceOf(i) == kOfKey || for_keys[i]);
      for (i32 a = 0; needs && a < NumValueArgs(p_, x); ++a) {
        for_keys[x.args[FirstValueArg(x) + a]] = true;
      }
    }
    for (i32 i = 0; i < p_.num_instructions; ++i) {
      if (!used_[i]) continue;
      const Instruction& x = At(i);
      const Place at = PlaceOf(i);
      bool only_last;
      i32 other;
      // What loads further in can have ahead.
      if (x.op == kOpLoad && at == kOfLogit && place == kOfRow) {
        const std::string text = PlaceOfIndices(x, kOfRow, &only_last);
        Member("const char*", Number("elements", i),
               Elements(x) + (text.empty() ? "0" : text) + ")", of, out, members);
      }
      if (x.op == kOpLoad && at == kOfLogit && place == kOfKey) {
        const std::string text = PlaceOfIndices(x, kOfKey, &only_last);
        if (!text.empty()) {
          Member(only_last ? "int" : "i64", Number("place", i), text, of, out, members);
        }
      }
      if (IsDistance(x) && place == kOfRow) {
        const i32 sign = SignOfPosition(x.args[0], &other);
        Member("float", Number("distance", i),
               std::string("ToFloat(") + (sign < 0 ? "Sub" : "Add") + "(" + Value(other, place) +
                   ", first))",
               of, out, members);
      }
      if (const i32 d = DistanceOfProduct(x); d >= 0 && place == kOfRow) {
        Member(
            "float", Number("scaled", i),
            "Mul(" + Value(x.args[1 - d], place) + ", row." + Number("distance", x.args[d]) + ")",
            of, out, members);
      }
      if (at != place && (at != kOfCall || (place == kOfKey && !for_keys[i]))) continue;
      *out << "    const " << TypeText(x.type) << " " << Number("v", i) << " = "
           << Expression(i, place) << ";\n";
      if (at == kOfCall && place == kOfKey) continue;
      Member(TypeText(x.type), Number("v", i), Number("v", i), of, out, members);
    }
  }

  std::string Result(const std::string& what, const std::string& more, i32 value,
                     const char* otherwise) const {
    std::ostringstream out;
    out << "  template <class Facts>\n"
        << Function(what, "const Row& row, const Key& key, const Facts& at" + more);
    WriteNeeded({value}, &out);
    out << "    return " << (value < 0 ? otherwise : Value(value, kOfLogit)) << ";\n  }\n";
    return out.str();
  }

  // Whether a derivative is 1 of every logit; -1 says so, too.
  bool IsOne(i32 value) const {
    const float one = 1.0f;
    return value < 0 || (At(value).op == kOpConst && std::memcmp(&At(value).args[0], &one, 4) == 0);
  }

  std::string Derivative() const {
    std::ostringstream out;
    out << "  static constexpr bool kHasSlope = " << Bool(!IsOne(gradient_->score)) << ";\n"
        << "  template <class Facts>\n"
        << Function("float Differentiate",
                    "const Row& row, const Key& key, const Facts& at, float score, float& slope");
    WriteNeeded({p_.logits, gradient_->score}, &out);
    out << "    slope = " << (gradient_->score < 0 ? "1.0f" : Value(gradient_->score, kOfLogit))
        << ";\n    return " << (p_.logits < 0 ? "score" : Value(p_.logits, kOfLogit)) << ";\n  }\n";
    WriteElements(&out);
    return out.str();
  }

  // Elements of operands that a logit reads, and its derivatives by them.
  void WriteElements(std::ostringstream* to) const {
    std::ostringstream& out = *to;
    const i32 num = gradient_->num_elements;
    out << "\n  static constexpr int kNumElements = " << num << ";\n";
    if (num == 0) return;
    std::vector<i32> needed;
    std::string operands, results;
    for (i32 i = 0; i < num; ++i) {
      const auto [load, partial] = gradient_->elements[i];
      const Instruction& x = At(load);
      const i32 rank = p_.operands[x.args[0]].rank;
      const std::string operand = std::to_string(x.args[0]),
                        to_i = "[" + std::to_string(i) + "] = ";
      needed.push_back(partial);
      std::string place;
      for (i32 axis = 0; axis < rank; ++axis) {
        needed.push_back(x.args[1 + axis]);
        place += (axis > 0 ? " + " : "") +
                 (axis == rank - 1 ? "InLastAxis<" + operand
                                   : "InAxis<" + operand + ", " + std::to_string(rank)) +
                 ">(p, " + std::to_string(axis) + ", " + Value(x.args[1 + axis], kOfLogit) + ")";
      }
      operands += (i > 0 ? ", " : "") + operand;
      results += "    places" + to_i + (place.empty() ? "0" : place) + ";\n";
      results += "    partials" + to_i + Value(partial, kOfLogit) + ";\n";
    }
    out << "  __device__ static constexpr int OperandOf(int element) {\n"
        << "    constexpr int kOperands[] = {" << operands << "};\n"
        << "    return kOperands[element];\n  }\n"
        << "  template <class Facts>\n"
        << Function("void Partials",
                    "const Row& row, const Key& key, const Facts& at, float score, i64 "
                    "(&places)[kNumElements], float (&partials)[kNumElements]");
    WriteNeeded(needed, &out);
    out << results << "  }\n";
  }

  // The statements of all that results compute for each logit. -1: no result.
  void WriteNeeded(const std::vector<i32>& results, std::ostringstream* to) const {
    std::ostringstream& out = *to;
    std::vector<bool> needed(p_.num_instructions);
    for (i32 value : results) {
      if (value >= 0) MarkNeeded(value, &needed);
    }
    for (i32 i = 0; i < p_.num_instructions; ++i) {
      if (!needed[i]) continue;
      const Instruction& x = At(i);
      i32 other;
      out << "    const " << TypeText(x.type) << " " << Number("v", i) << " = ";
      if (IsDistance(x)) {
        const i32 sign = SignOfPosition(x.args[0], &other);
        out << "row." << Number("distance", i) << (sign < 0 ? " - " : " + ")
            << "ToFloat(at.offset());\n";
      } else if (const i32 d = DistanceOfProduct(x); d >= 0) {
        const i32 sign = SignOfPosition(At(x.args[d]).args[0], &other);
        out << "fmaf(" << Value(x.args[1 - d], kOfLogit) << ", ToFloat(" << (sign < 0 ? "-" : "")
            << "at.offset()), row." << Number("scaled", i) << ");\n";
      } else {
        out << Expression(i, kOfLogit) << ";\n";
      }
    }
  }
  // Values that a result computes for each logit.
  void MarkNeeded(i32 value, std::vector<bool>* needed) const {
    const Instruction& x = At(value);
    if (PlaceOf(value) != kOfLogit || x.op == kOpScore || (*needed)[value]) return;
    (*needed)[value] = true;
    if (IsDistance(x) || DistanceOfProduct(x) >= 0) return;
    for (i32 i = 0; i < NumValueArgs(p_, x); ++i) {
      MarkNeeded(x.args[FirstValueArg(x) + i], needed);
    }
  }

  const VariantProgram& p_;
  const VariantGradient* const gradient_;
  const std::string name_;
  std::vector<bool> used_;
};

}  // namespace

std::string VariantText(const VariantProgram& program, const std::string& name) {
  return Writer(program, nullptr, name).Write();
}

std::string VariantText(const VariantGradient& gradient, const std::string& name) {
  return Writer(gradient.program, &gradient, name).Write();
}

}  // namespace jax_attn
