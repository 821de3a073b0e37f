#include "jit/variant_source.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <sstream>
#include <vector>

#include "jit/affine_logit.h"
#include "jit/source_text.h"

namespace jax_attn {
namespace {

// Where a value is computed. The few values of the call are computed with rows, which keep them for
// logits, and once more with keys that need them.
enum Scope { kConstant, kOfCall, kOfRow, kOfKey, kOfLogit };

class Writer {
 public:
  // gradient: the program's; null: none.
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
    std::string logit;
    if (gradient_ == nullptr) logit = Logit(&row, &row_members);
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
        << (gradient_ != nullptr ? Derivative() : logit) << "\n"
        << Result("bool IsVisible", "", p_.visible, "true")
        << (gradient_ != nullptr ? "" : "\n" + ShowsAll()) << "};\n";
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

  Scope ScopeOf(i32 value) const {
    const Instruction& x = At(value);
    if (x.op == kOpConst) return kConstant;
    static constexpr Scope kScopes[] = {kOfCall, kOfRow, kOfKey, kOfLogit};
    return kScopes[x.level];
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

  // The expression for the value in code of `scope`.
  std::string Value(i32 value, Scope scope) const {
    const Instruction& x = At(value);
    if (x.op == kOpConst) return ConstantText(x.type, x.args[0]);
    if (x.op == kOpScore) return "score";
    const Scope at = ScopeOf(value);
    const bool is_here = at == scope || (at == kOfCall && scope != kOfLogit);
    return (is_here ? "" : at == kOfKey ? "key." : "row.") + Number("v", value);
  }

  // --- distances: a row's value plus or minus the key's position, as f32 ---

  // Whether the instruction converts such a value to f32. A conversion is as slow as an
  // exponential, so a row converts once and adds the key's offset.
  bool IsDistance(const Instruction& x) const {
    return x.op == kOpCast && x.type == kVariantF32 && FindKeyPosition(p_, x.args[0]).other >= 0;
  }

  // For a product of a distance and a value of the row, the argument that is the distance; else -1.
  // The row keeps its product with the first key's distance. One fma adds the factor times the
  // key's offset, which is a constant. The error is no larger than the product's own. A factor that
  // is not finite makes the row NaN.
  i32 DistanceOfProduct(const Instruction& x) const {
    if (x.op != kOpMul || x.type != kVariantF32) return -1;
    for (i32 i : {1, 0}) {
      if (IsDistance(At(x.args[i])) && ScopeOf(x.args[1 - i]) <= kOfRow) return i;
    }
    return -1;
  }

  // --- values ---

  std::string Expression(i32 value, Scope scope) const {
    const Instruction& x = At(value);
    switch (kVariantOps[x.op].rule) {
      case kRuleConst:
        return Value(value, scope);
      case kRuleAt:
        return std::string("at.") + kVariantOps[x.op].word + "()";
      case kRuleDim:
        return "Dim<" + std::to_string(x.args[0]) + ">(p, " + std::to_string(x.args[1]) + ")";
      case kRuleLoad:
        return LoadText(value, scope);
      case kRuleCast:
        return CastText(x.type) + "(" + Value(x.args[0], scope) + ")";
      default:
        break;
    }
    if (x.op == kOpDiv && x.type == kVariantF32 && At(x.args[1]).op == kOpConst) {
      // Division by a power of two becomes a multiplication, because the inverse is exact.
      float divisor;
      std::memcpy(&divisor, &At(x.args[1]).args[0], sizeof(divisor));
      int exponent;
      const float inverse = 1.0f / divisor;
      if (std::abs(std::frexp(divisor, &exponent)) == 0.5f && std::isnormal(inverse)) {
        return "Mul(" + Value(x.args[0], scope) + ", " + FloatText(inverse) + ")";
      }
    }
    std::string text = std::string(OpText(x.op)) + "(";
    for (i32 i = 0; i < kVariantOps[x.op].num_args; ++i) {
      text += (i > 0 ? ", " : "") + Value(x.args[i], scope);
    }
    return text + ")";
  }

  // The part of an element's offset that comes from indices computed in `of`; "" if there are none.
  std::string OffsetOfIndices(const Instruction& x, Scope of, bool* only_last) const {
    const i32 rank = p_.operands[x.args[0]].rank;
    std::string text;
    *only_last = true;
    for (i32 axis = 0; axis < rank; ++axis) {
      const i32 index = x.args[1 + axis];
      Scope scope = ScopeOf(index);
      if (scope <= kOfCall) scope = x.level == kPerKey ? kOfKey : kOfRow;
      if (scope != of) continue;
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
  std::string LoadText(i32 value, Scope scope) const {
    const Instruction& x = At(value);
    const std::string load = std::string("Load<") + ElementText(p_.operands[x.args[0]].type) + ">(";
    bool only_last;
    const std::string mine = OffsetOfIndices(x, scope, &only_last);
    if (ScopeOf(value) == kOfCall || scope == kOfRow) {
      bool ignored;
      const std::string all = OffsetOfIndices(x, kOfRow, &ignored);
      return load + Elements(x) + (all.empty() ? "0" : all) + "), 0)";
    }
    if (scope == kOfKey) return load + Elements(x) + "0), " + mine + ")";
    std::string elements = "row." + Number("elements", value);
    std::string rest = mine;
    if (scope == kOfLogit && !OffsetOfIndices(x, kOfKey, &only_last).empty()) {
      rest = "key." + Number("place", value) + (mine.empty() ? "" : " + " + mine);
    }
    return load + elements + ", " + rest + ")";
  }

  static void Member(const std::string& type, const std::string& name, const std::string& text,
                     const char* of, std::ostringstream* out, std::ostringstream* members) {
    *members << "    " << type << " " << name << ";\n";
    *out << "    " << of << "." << name << " = " << text << ";\n";
  }

  // Writes the statements of all values of `scope`, and the members that keep them for other
  // scopes.
  void WriteValues(Scope scope, std::ostringstream* out, std::ostringstream* members) const {
    const char* const of = scope == kOfRow ? "row" : "key";
    std::vector<bool> for_keys(p_.num_instructions);
    for (i32 i = p_.num_instructions - 1; i >= 0; --i) {
      const Instruction& x = At(i);
      const bool needs = used_[i] && (ScopeOf(i) == kOfKey || for_keys[i]);
      for (i32 a = 0; needs && a < NumValueArgs(p_, x); ++a) {
        for_keys[x.args[FirstValueArg(x) + a]] = true;
      }
    }
    for (i32 i = 0; i < p_.num_instructions; ++i) {
      if (!used_[i]) continue;
      const Instruction& x = At(i);
      const Scope at = ScopeOf(i);
      bool only_last;
      // The part of a load's address that this scope can compute ahead.
      if (x.op == kOpLoad && at == kOfLogit && scope == kOfRow) {
        const std::string text = OffsetOfIndices(x, kOfRow, &only_last);
        Member("const char*", Number("elements", i),
               Elements(x) + (text.empty() ? "0" : text) + ")", of, out, members);
      }
      if (x.op == kOpLoad && at == kOfLogit && scope == kOfKey) {
        const std::string text = OffsetOfIndices(x, kOfKey, &only_last);
        if (!text.empty()) {
          Member(only_last ? "int" : "i64", Number("place", i), text, of, out, members);
        }
      }
      if (IsDistance(x) && scope == kOfRow) {
        const KeyPosition position = FindKeyPosition(p_, x.args[0]);
        Member("float", Number("distance", i),
               "ToFloat(" + TextAtKey(position, Value(position.other, scope), "first") + ")", of,
               out, members);
      }
      if (const i32 d = DistanceOfProduct(x); d >= 0 && scope == kOfRow) {
        Member(
            "float", Number("scaled", i),
            "Mul(" + Value(x.args[1 - d], scope) + ", row." + Number("distance", x.args[d]) + ")",
            of, out, members);
      }
      if (at != scope && (at != kOfCall || (scope == kOfKey && !for_keys[i]))) continue;
      *out << "    const " << TypeText(x.type) << " " << Number("v", i) << " = "
           << Expression(i, scope) << ";\n";
      if (at == kOfCall && scope == kOfKey) continue;
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

  // --- logits ---

  std::string Logit(std::ostringstream* row, std::ostringstream* row_members) const {
    const AffineLogit affine = FindAffineLogit(p_);
    std::ostringstream out;
    out << "  static constexpr bool kIsAffine = " << Bool(affine.value.is_affine) << ";\n";
    if (!affine.value.is_affine) {
      out << "  static constexpr float kFactor = 1.0f;\n"
          << "  static constexpr bool kHasFactor = false, kHasTerm = false, kHasSlope = false, "
             "kHasRest = false;\n"
          << Result("float Logit", ", float score", p_.logits, "score");
      return out.str();
    }
    *row << affine.statements;
    const AffineValue& x = affine.value;
    // A factor that is the same for all rows is applied in the exponent, if it is positive and far
    // from the limits of f32.
    const bool is_common = x.factor.kind == RowNumber::kConstant && x.factor.constant > 0x1p-60f &&
                           x.factor.constant < 0x1p60f;
    const bool is_line = is_common && x.rest.empty();
    char common[32];
    std::snprintf(common, sizeof(common), "%af", is_common ? x.factor.constant : 1.0f);
    out << "  static constexpr float kFactor = " << common << ";\n"
        << RowNumberText("Factor", is_common ? RowNumber{} : x.factor, row, row_members)
        << RowNumberText("Term", x.term, row, row_members)
        << RowNumberText("Slope", x.slope, row, row_members)
        << "  __device__ __forceinline__ static BiasLine LineAt(const Row& row, int first) {\n"
        << (is_line ? affine.statements : "") << "    return {"
        << (is_line && x.term ? NumberText(x.term) : "0.0f") << ", "
        << (is_line && x.slope ? NumberText(x.slope) : "0.0f") << "};\n  }\n"
        << "  static constexpr bool kHasRest = " << Bool(!x.rest.empty()) << ";\n"
        << "  template <class Facts>\n"
        << Function("float Rest", "const Row& row, const Key& key, const Facts& at, float x");
    std::vector<i32> values;
    for (const auto& [value, number] : x.rest) values.push_back(value);
    WriteNeeded(values, &out);
    for (size_t i = 0; i < x.rest.size(); ++i) {
      const auto& [value, number] = x.rest[i];
      const std::string text = Value(value, kOfLogit);
      const bool is_first = i == 0 && !x.term && !x.slope;  // x is 0
      if (number.kind == RowNumber::kConstant && number.constant == 1.0f) {
        out << "    x " << (is_first ? "= " : "+= ") << text << ";\n";
        continue;
      }
      const std::string name = Number("rest", static_cast<i32>(i));
      Member("float", name, NumberText(number), "row", row, row_members);
      if (is_first) {
        out << "    x = row." << name << " * " << text << ";\n";
      } else {
        out << "    x = fmaf(row." << name << ", " << text << ", x);\n";
      }
    }
    out << "    return x;\n  }\n";
    return out.str();
  }

  static std::string NumberText(const RowNumber& x) {
    return x.kind == RowNumber::kConstant ? FloatText(x.constant) : x.name;
  }
  // Writes kHas<name> and the function that gives a row's number.
  static std::string RowNumberText(const std::string& name, const RowNumber& x,
                                   std::ostringstream* row, std::ostringstream* row_members) {
    if (x) Member("float", "of" + name, NumberText(x), "row", row, row_members);
    return "  static constexpr bool kHas" + name + " = " + Bool(static_cast<bool>(x)) + ";\n" +
           "  __device__ __forceinline__ static float " + name + "(const Row& row) { return " +
           (x ? "row.of" + name : "0.0f") + "; }\n";
  }

  // --- masks ---

  // Writes ShowsAll, which proves from the mask's comparisons of positions that a row sees all keys
  // of a range.
  std::string ShowsAll() const {
    const std::string proof = p_.visible < 0 ? "true" : Proof(p_.visible, true);
    return std::string("  static constexpr bool kMayShowAll = ") +
           Bool(p_.visible >= 0 && proof != "false") + ";\n" +
           "  __device__ __forceinline__ static bool ShowsAll(const Row& row, int first, int last) "
           "{\n    return " +
           proof + ";\n  }\n";
  }

  // The text of a condition on the row under which the bool is `wanted` for all keys of [first,
  // last]; "false" if no condition is known.
  std::string Proof(i32 value, bool wanted) const {
    const Instruction& x = At(value);
    if (ScopeOf(value) <= kOfRow) {
      return std::string(wanted ? "" : "!") + Value(value, kOfLogit);
    }
    switch (x.op) {
      case kOpNot:
        return Proof(x.args[0], !wanted);
      case kOpAnd:
        return Both(Proof(x.args[0], wanted), Proof(x.args[1], wanted), wanted);
      case kOpOr:
        return Both(Proof(x.args[0], wanted), Proof(x.args[1], wanted), !wanted);
      case kOpLt:
      case kOpLe: {
        if (At(x.args[0]).type != kVariantI32) return "false";
        // Compares the largest value on the left with the smallest on the right, or the opposite.
        const std::string left = Extreme(x.args[0], wanted);
        const std::string right = Extreme(x.args[1], !wanted);
        if (left.empty() || right.empty()) return "false";
        const bool or_equal = (x.op == kOpLe) == wanted;
        return (wanted ? left : right) + (or_equal ? " <= " : " < ") + (wanted ? right : left);
      }
      default:
        return "false";
    }
  }
  static std::string Both(const std::string& x, const std::string& y, bool all) {
    if (all && (x == "false" || y == "false")) return "false";
    if (!all && x == "false") return y;
    if (!all && y == "false") return x;
    if (x.size() + y.size() > 2000) return "false";  // else texts could grow exponentially
    return "(" + x + (all ? " && " : " || ") + y + ")";
  }
  // The largest or smallest value of the i32 over keys of [first, last]; "" if it is not known.
  std::string Extreme(i32 value, bool largest) const {
    if (ScopeOf(value) <= kOfRow) return Value(value, kOfLogit);
    const KeyPosition position = FindKeyPosition(p_, value);
    if (position.sign == 0) return "";
    const bool at_last = (position.sign > 0) == largest;
    return TextAtKey(position, position.other < 0 ? "" : Value(position.other, kOfLogit),
                     at_last ? "last" : "first");
  }

  // Whether a derivative is 1 for every logit. The value -1 means so, too.
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

  // Writes the operand elements that a logit reads and its derivatives by them.
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
      std::string offset;
      for (i32 axis = 0; axis < rank; ++axis) {
        needed.push_back(x.args[1 + axis]);
        offset += (axis > 0 ? " + " : "") +
                  (axis == rank - 1 ? "InLastAxis<" + operand
                                    : "InAxis<" + operand + ", " + std::to_string(rank)) +
                  ">(p, " + std::to_string(axis) + ", " + Value(x.args[1 + axis], kOfLogit) + ")";
      }
      operands += (i > 0 ? ", " : "") + operand;
      results += "    places" + to_i + (offset.empty() ? "0" : offset) + ";\n";
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

  // Writes the statements of all values that the results need per logit. -1: no result.
  void WriteNeeded(const std::vector<i32>& results, std::ostringstream* to) const {
    std::ostringstream& out = *to;
    std::vector<bool> needed(p_.num_instructions);
    for (i32 value : results) {
      if (value >= 0) MarkNeeded(value, &needed);
    }
    for (i32 i = 0; i < p_.num_instructions; ++i) {
      if (!needed[i]) continue;
      const Instruction& x = At(i);
      out << "    const " << TypeText(x.type) << " " << Number("v", i) << " = ";
      if (IsDistance(x)) {
        const i32 sign = FindKeyPosition(p_, x.args[0]).sign;
        out << "row." << Number("distance", i) << (sign < 0 ? " - " : " + ")
            << "ToFloat(at.offset());\n";
      } else if (const i32 d = DistanceOfProduct(x); d >= 0) {
        const i32 sign = FindKeyPosition(p_, At(x.args[d]).args[0]).sign;
        out << "fmaf(" << Value(x.args[1 - d], kOfLogit) << ", ToFloat(" << (sign < 0 ? "-" : "")
            << "at.offset()), row." << Number("scaled", i) << ");\n";
      } else {
        out << Expression(i, kOfLogit) << ";\n";
      }
    }
  }
  // Marks the values that a result needs per logit.
  void MarkNeeded(i32 value, std::vector<bool>* needed) const {
    const Instruction& x = At(value);
    if (ScopeOf(value) != kOfLogit || x.op == kOpScore || (*needed)[value]) return;
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
