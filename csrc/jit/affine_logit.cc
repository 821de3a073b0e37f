#include "jit/affine_logit.h"

#include <cstring>

#include "jit/source_text.h"

namespace jax_attn {

namespace {

bool IsTamePosition(const VariantProgram& program, i32 value) {
  const auto is_simple = [&](i32 v) {
    const Instruction& x = program.instructions[v];
    if (x.op == kOpConst) return x.args[0] > -(1 << 24) && x.args[0] < 1 << 24;
    return x.op == kOpQPos || x.op == kOpKvLen || x.op == kOpQLen;
  };
  const Instruction& x = program.instructions[value];
  if (x.op != kOpAdd && x.op != kOpSub) return is_simple(value);
  return is_simple(x.args[0]) && is_simple(x.args[1]);
}

}  // namespace

KeyPosition FindKeyPosition(const VariantProgram& program, i32 value) {
  const Instruction& x = program.instructions[value];
  if (x.op == kOpKvPos) return {1, -1, false};
  if ((x.op != kOpAdd && x.op != kOpSub) || x.type != kVariantI32) return {};
  const bool second = program.instructions[x.args[1]].op == kOpKvPos;
  if (!second && program.instructions[x.args[0]].op != kOpKvPos) return {};
  const i32 other = x.args[second ? 0 : 1];
  if (!IsTamePosition(program, other)) return {};
  return {second && x.op == kOpSub ? -1 : 1, other, !second && x.op == kOpSub};
}

std::string TextAtKey(const KeyPosition& position, const std::string& other,
                      const std::string& key) {
  if (position.other < 0) return key;
  if (position.takes_other) return "Sub(" + key + ", " + other + ")";
  return (position.sign < 0 ? "Sub(" : "Add(") + other + ", " + key + ")";
}

namespace {

class Finder {
 public:
  explicit Finder(const VariantProgram& program) : p_(program) {}

  AffineLogit Find() {
    if (p_.logits < 0) return {{true, Constant(1.0f), {}, {}, {}}, ""};  // the score
    std::vector<bool> needed(p_.num_instructions);
    needed[p_.logits] = true;
    for (i32 i = p_.logits; i >= 0; --i) {
      for (i32 a = 0; needed[i] && a < NumValueArgs(p_, At(i)); ++a) {
        needed[At(i).args[FirstValueArg(At(i)) + a]] = true;
      }
    }
    std::vector<AffineValue> values(p_.num_instructions);
    for (i32 i = 0; i <= p_.logits; ++i) {
      if (needed[i]) values[i] = One(i, values);
    }
    AffineValue logit = values[p_.logits];
    logit.is_affine = logit.is_affine && logit.factor;
    return {logit, statements_};
  }

 private:
  const Instruction& At(i32 value) const { return p_.instructions[value]; }
  bool IsOfRow(i32 value) const { return At(value).level <= kPerRow && At(value).op != kOpScore; }

  static RowNumber Constant(float x) { return {RowNumber::kConstant, x, ""}; }
  static RowNumber Named(const std::string& name) { return {RowNumber::kNamed, 0.0f, name}; }
  static std::string Text(const RowNumber& x) {
    return x.kind == RowNumber::kConstant ? FloatText(x.constant) : x.name;
  }
  RowNumber Name(const std::string& text) {
    const std::string name = "n" + std::to_string(num_names_++);
    statements_ += "    const float " + name + " = " + text + ";\n";
    return Named(name);
  }
  // The f32 value of a row.
  RowNumber Of(i32 value) const {
    if (At(value).op != kOpConst) return Named("row.v" + std::to_string(value));
    float x;
    std::memcpy(&x, &At(value).args[0], sizeof(x));
    return Constant(x);
  }

  RowNumber Times(const RowNumber& x, const RowNumber& y) {
    if (!x || !y) return {};
    if (x.kind == RowNumber::kConstant && y.kind == RowNumber::kConstant) {
      return Constant(x.constant * y.constant);
    }
    if (x.kind == RowNumber::kConstant && x.constant == 1.0f) return y;
    if (y.kind == RowNumber::kConstant && y.constant == 1.0f) return x;
    return Name("Mul(" + Text(x) + ", " + Text(y) + ")");
  }
  RowNumber Plus(const RowNumber& x, const RowNumber& y) {
    if (!x) return y;
    if (!y) return x;
    if (x.kind == RowNumber::kConstant && y.kind == RowNumber::kConstant) {
      return Constant(x.constant + y.constant);
    }
    return Name("Add(" + Text(x) + ", " + Text(y) + ")");
  }

  AffineValue Times(const AffineValue& x, const RowNumber& by) {
    AffineValue product = {
        x.is_affine, Times(x.factor, by), Times(x.term, by), Times(x.slope, by), {}};
    for (const auto& [value, number] : x.rest) {
      product.rest.emplace_back(value, Times(number, by));
    }
    return product;
  }
  AffineValue Plus(const AffineValue& x, const AffineValue& y) {
    AffineValue sum = {x.is_affine && y.is_affine, Plus(x.factor, y.factor), Plus(x.term, y.term),
                       Plus(x.slope, y.slope), x.rest};
    for (const auto& [value, number] : y.rest) {
      bool is_new = true;
      for (auto& [mine, of_mine] : sum.rest) {
        if (mine != value) continue;
        of_mine = Plus(of_mine, number);
        is_new = false;
      }
      if (is_new) sum.rest.emplace_back(value, number);
    }
    return sum;
  }

  static AffineValue Opaque(i32 value) { return {true, {}, {}, {}, {{value, Constant(1.0f)}}}; }
  // A position that contains kv_pos, as f32: exact for the first key, plus the key's offset.
  AffineValue Distance(i32 value) {
    const KeyPosition position = FindKeyPosition(p_, value);
    if (position.sign == 0) return {};
    std::string other;
    if (position.other >= 0) {
      const Instruction& x = At(position.other);
      other = x.op == kOpConst ? "static_cast<int>(" + HexText(x.args[0]) + ")"
                               : "row.v" + std::to_string(position.other);
    }
    return {true,
            {},
            Name("ToFloat(" + TextAtKey(position, other, "first") + ")"),
            Constant(static_cast<float>(position.sign)),
            {}};
  }

  AffineValue One(i32 value, const std::vector<AffineValue>& values) {
    const Instruction& x = At(value);
    if (x.op == kOpScore) return {true, Constant(1.0f), {}, {}, {}};
    if (x.type != kVariantF32) return WithoutScore(value, values);
    if (IsOfRow(value)) return {true, {}, Of(value), {}, {}};
    AffineValue result = {};
    const i32 a = x.args[0], b = x.args[1];
    switch (x.op) {
      case kOpCast:
        result = Distance(a);
        break;
      case kOpNeg:
        result = Times(values[a], Constant(-1.0f));
        break;
      case kOpAdd:
        result = Plus(values[a], values[b]);
        break;
      case kOpSub:
        result = Plus(values[a], Times(values[b], Constant(-1.0f)));
        break;
      case kOpMul:
        if (IsOfRow(a)) result = Times(values[b], Of(a));
        if (!IsOfRow(a) && IsOfRow(b)) result = Times(values[a], Of(b));
        break;
      case kOpDiv:
        if (IsOfRow(b)) result = Times(values[a], Inverse(Of(b)));
        break;
      default:
        break;
    }
    // A value computed once per key is split only if all of it follows from the key's offset.
    if (x.level == kPerKey && !result.rest.empty()) return Opaque(value);
    return result.is_affine ? result : WithoutScore(value, values);
  }
  RowNumber Inverse(const RowNumber& x) {
    if (x.kind == RowNumber::kConstant) return Constant(1.0f / x.constant);
    return Name("Div(1.0f, " + Text(x) + ")");
  }

  // The value as one term of `rest`, if it does not depend on the score.
  AffineValue WithoutScore(i32 value, const std::vector<AffineValue>& values) const {
    const Instruction& x = At(value);
    for (i32 i = 0; i < NumValueArgs(p_, x); ++i) {
      const AffineValue& arg = values[x.args[FirstValueArg(x) + i]];
      if (!arg.is_affine || arg.factor) return {};
    }
    return Opaque(value);
  }

  const VariantProgram& p_;
  std::string statements_;
  i32 num_names_ = 0;
};

}  // namespace

AffineLogit FindAffineLogit(const VariantProgram& program) { return Finder(program).Find(); }

}  // namespace jax_attn
