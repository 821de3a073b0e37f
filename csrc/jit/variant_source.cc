#include "jit/variant_source.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <sstream>
#include <vector>

#include "jit/affine_logit.h"

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
      if (x.type == kVariantF32) return "F32(" + HexText(x.args[0]) + ")";
      if (x.type == kVariantBool) return Bool(x.args[0] != 0);
      return "static_cast<int>(" + HexText(x.args[0]) + ")";
    }
    if (x.op == kOpScore) return "score";
    const Place at = PlaceOf(value);
    const bool is_here = at == place || (at == kOfCall && place != kOfLogit);
    return (is_here ? "" : at == kOfKey ? "key." : "row.") + Number("v", value);
  }

  // --- distances: a value of rows plus or minus the key's position, as f32 ---

  // Whether the instruction makes such a value f32. A conversion is as slow as an exponential, so
  // one a row does, to which the key's offset is added.
  bool IsDistance(const Instruction& x) const {
    return x.op == kOpCast && x.type == kVariantF32 && FindKeyPosition(p_, x.args[0]).other >= 0;
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
        return "Mul(" + Value(x.args[0], place) + ", " + FloatText(inverse) + ")";
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
        const KeyPosition position = FindKeyPosition(p_, x.args[0]);
        Member("float", Number("distance", i),
               "ToFloat(" + TextAtKey(position, Value(position.other, place), "first") + ")", of,
               out, members);
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
    // What all rows have in common waits for the exponent, if it neither turns logits around nor
    // comes near the end of f32.
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
  // kHas<name>, and the number of a row that has it.
  static std::string RowNumberText(const std::string& name, const RowNumber& x,
                                   std::ostringstream* row, std::ostringstream* row_members) {
    if (x) Member("float", "of" + name, NumberText(x), "row", row, row_members);
    return "  static constexpr bool kHas" + name + " = " + Bool(static_cast<bool>(x)) + ";\n" +
           "  __device__ __forceinline__ static float " + name + "(const Row& row) { return " +
           (x ? "row.of" + name : "0.0f") + "; }\n";
  }

  // --- masks ---

  // Whether the mask is known to show all keys of a range to a row, by its comparisons of
  // positions.
  std::string ShowsAll() const {
    const std::string proof = p_.visible < 0 ? "true" : Proof(p_.visible, true);
    return std::string("  static constexpr bool kMayShowAll = ") +
           Bool(p_.visible >= 0 && proof != "false") + ";\n" +
           "  __device__ __forceinline__ static bool ShowsAll(const Row& row, int first, int last) "
           "{\n    return " +
           proof + ";\n  }\n";
  }

  // Text of a condition of rows on which the bool is `wanted` for all keys of [first, last];
  // "false" where none is known.
  std::string Proof(i32 value, bool wanted) const {
    const Instruction& x = At(value);
    if (PlaceOf(value) <= kOfRow) {
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
        // The largest one on the left against the smallest one on the right, or the opposite.
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
    if (x.size() + y.size() > 2000) return "false";  // values that are used again and again
    return "(" + x + (all ? " && " : " || ") + y + ")";
  }
  // The largest, or smallest, that the i32 is for keys of [first, last]; "" if that is not known.
  std::string Extreme(i32 value, bool largest) const {
    if (PlaceOf(value) <= kOfRow) return Value(value, kOfLogit);
    const KeyPosition position = FindKeyPosition(p_, value);
    if (position.sign == 0) return "";
    const bool at_last = (position.sign > 0) == largest;
    return TextAtKey(position, position.other < 0 ? "" : Value(position.other, kOfLogit),
                     at_last ? "last" : "first");
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
