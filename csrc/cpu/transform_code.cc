#include "cpu/transform_code.h"

#include <cstddef>
#include <vector>

namespace jax_attn {
namespace {

// Whole vectors of every instruction set.
constexpr i64 kVectorLanes = 16;

i64 RoundUpLanes(i64 lanes) { return (lanes + kVectorLanes - 1) / kVectorLanes * kVectorLanes; }

class CodeMaker {
 public:
  CodeMaker(const TransformView& transform, TransformCodeLine* lines, TransformCode* code)
      : t_(transform), to_(lines), c_(*code) {}

  void Make() {
    for (i32 i = 0; i < t_.num_lines; ++i) Append(i);
    for (i32 i = 0; i < t_.num_results; ++i) c_.results[i] = Part(t_.results[i]);
    if (!FindRotation()) FuseProducts();
    Order();
    c_.dim = t_.dim;
    c_.num_results = t_.num_results;
    c_.pool = t_.pool;
    c_.operands = t_.operands;
  }

 private:
  void Append(i32 i) {
    const TransformLine& x = t_.lines[i];
    TransformCodeLine line = {};
    line.length = x.length;
    line.num_args = x.num_args;
    line.home = kOnceHome;
    if (x.op == kOpKvPos || x.op == kOpKvRow) line.home = kTokenHome;
    if (x.op == kOpKvHead || x.op == kVectorX) line.home = kHeadHome;
    for (i32 a = 0; a < x.num_args; ++a) line.args[a] = Part(x.args[a]);
    for (i32 a = 0; a < x.num_args; ++a) {
      const TransformHome home = lines_[line.args[a].value].home;
      if (home > line.home) line.home = home;
    }
    line.op.op = x.op;
    line.op.type = x.type;
    line.op.operand = x.own;
    if (x.num_args > 0) {
      line.op.arg_type = lines_[line.args[x.num_args == 3 ? 1 : 0].value].op.type;
    }
    numbers_.push_back(static_cast<i32>(lines_.size()));
    lines_.push_back(line);
  }

  // Lanes in terms of code lines. A part of x becomes a value, so that its rows follow each other.
  TransformLanes Part(const TransformLanes& lanes) {
    const TransformLine& x = t_.lines[lanes.value];
    const i32 value = numbers_[lanes.value];
    if (x.op != kVectorX || lanes.length == x.length) return {value, lanes.offset, lanes.length};
    const i32 first = x.own + lanes.offset;
    for (std::size_t i = 0; i < lines_.size(); ++i) {
      const TransformCodeLine& line = lines_[i];
      if (line.op.op == kVectorX && line.op.operand == first && line.length == lanes.length) {
        return {static_cast<i32>(i), 0, lanes.length};
      }
    }
    TransformCodeLine part = {};
    part.op.op = kVectorX;
    part.op.type = kVariantF32;
    part.op.operand = first;
    part.length = lanes.length;
    part.home = kHeadHome;
    lines_.push_back(part);
    return {static_cast<i32>(lines_.size()) - 1, 0, lanes.length};
  }

  // Whether the lanes are half 0 or 1 of the vector; -1: neither.
  i32 HalfOf(const TransformLanes& lanes) const {
    const TransformCodeLine& x = lines_[lanes.value];
    const i32 half = t_.dim / 2;
    if (x.op.op != kVectorX || lanes.length != half) return -1;
    const i32 first = x.op.operand + lanes.offset;
    return first == 0 ? 0 : first == half ? 1 : -1;
  }

  // The line that a half is multiplied by in a product; -1: it is no such product.
  i32 FactorOf(const TransformLanes& lanes, i32 half) const {
    const TransformCodeLine& x = lines_[lanes.value];
    if (x.op.op != kOpMul || lanes.length != t_.dim / 2) return -1;
    for (i32 a = 0; a < 2; ++a) {
      const TransformLanes factor = x.args[1 - a];
      const TransformCodeLine& of = lines_[factor.value];
      if (HalfOf(x.args[a]) == half && of.home != kHeadHome && of.length == x.length &&
          factor.length == x.length) {
        return factor.value;
      }
    }
    return -1;
  }

  bool FindRotation() {
    const i32 half = t_.dim / 2;
    if (t_.num_results != 2 || t_.dim % (2 * kVectorLanes) != 0) return false;
    for (i32 i = 0; i < 2; ++i) {
      if (c_.results[i].length != half || lines_[c_.results[i].value].length != half) return false;
    }
    const TransformCodeLine &low = lines_[c_.results[0].value], &high = lines_[c_.results[1].value];
    if (low.op.op != kOpSub || high.op.op != kOpAdd) return false;
    const i32 cos = FactorOf(low.args[0], 0), sin = FactorOf(low.args[1], 1);
    const bool turns = (FactorOf(high.args[0], 1) == cos && FactorOf(high.args[1], 0) == sin) ||
                       (FactorOf(high.args[1], 1) == cos && FactorOf(high.args[0], 0) == sin);
    if (cos < 0 || sin < 0 || !turns) return false;
    c_.rotation = {half, {cos, sin}, {IsRow(cos), IsRow(sin)}};
    return true;
  }

  // Whether a line loads neighbouring f32 of an operand.
  bool IsRow(i32 line) const {
    const TransformCodeLine& x = lines_[line];
    if (x.op.op != kOpLoad || x.num_args == 0) return false;
    if (t_.operands[x.op.operand].type != kOperandF32) return false;
    for (i32 a = 0; a + 1 < x.num_args; ++a) {
      if (x.args[a].length != 1) return false;
    }
    return lines_[x.args[x.num_args - 1].value].op.op == kVectorIota;
  }

  // Sums of products that nothing else reads become one operation.
  void FuseProducts() {
    std::vector<i32> uses(lines_.size());
    for (const TransformCodeLine& x : lines_) {
      for (i32 a = 0; a < x.num_args; ++a) ++uses[x.args[a].value];
    }
    for (i32 i = 0; i < t_.num_results; ++i) ++uses[c_.results[i].value];
    for (TransformCodeLine& x : lines_) {
      const bool sums = (x.op.op == kOpAdd || x.op.op == kOpSub) && x.op.type == kVariantF32;
      for (i32 a = 0; sums && a < 2; ++a) {
        const TransformLanes arg = x.args[a], other = x.args[1 - a];
        const TransformCodeLine& product = lines_[arg.value];
        if (product.op.op != kOpMul || uses[arg.value] != 1 || product.length != x.length ||
            arg.length != x.length || product.home != x.home) {
          continue;
        }
        x.op.op = x.op.op == kOpAdd ? i32{kCodeMulAdd}
                  : a == 0          ? i32{kCodeMulSub}
                                    : i32{kCodeSubMul};
        x.num_args = 3;
        x.args[0] = product.args[0];
        x.args[1] = product.args[1];
        x.args[2] = other;
        break;
      }
    }
  }

  // Writes the lines that the results need, in order of homes.
  void Order() {
    std::vector<bool> needed(lines_.size());
    if (c_.rotation.half > 0) {
      for (const i32 line : c_.rotation.lines) needed[line] = true;
    } else {
      for (i32 i = 0; i < t_.num_results; ++i) needed[c_.results[i].value] = true;
    }
    for (std::size_t i = lines_.size(); i-- > 0;) {
      for (i32 a = 0; needed[i] && a < lines_[i].num_args; ++a) {
        needed[lines_[i].args[a].value] = true;
      }
    }
    std::vector<i32> numbers(lines_.size());
    i32 num = 0;
    for (i32 home = kOnceHome; home <= kHeadHome; ++home) {
      const i64 rows = home == kOnceHome    ? 1
                       : home == kTokenHome ? kTransformTokens
                                            : kTransformRows;
      i64 at = 0;
      for (std::size_t i = 0; i < lines_.size(); ++i) {
        TransformCodeLine x = lines_[i];
        if (!needed[i] || x.home != home) continue;
        x.at = at;
        x.stride = home == kOnceHome ? 0 : x.length == 1 ? 1 : RoundUpLanes(x.length);
        at += RoundUpLanes(x.length == 1 ? rows : rows * RoundUpLanes(x.length));
        for (i32 a = 0; a < x.num_args; ++a) x.args[a].value = numbers[x.args[a].value];
        numbers[i] = num;
        to_[num++] = x;
      }
      c_.sizes[home] = at + kVectorLanes;  // arguments may begin in the midst of a vector
      if (home == kOnceHome) c_.num_once = num;
      if (home == kTokenHome) c_.num_token = num;
    }
    for (i32 i = 0; i < t_.num_results; ++i) c_.results[i].value = numbers[c_.results[i].value];
    for (i32& line : c_.rotation.lines) line = c_.rotation.half > 0 ? numbers[line] : 0;
    c_.lines = to_;
    c_.num_lines = num;
  }

  const TransformView& t_;
  TransformCodeLine* const to_;
  TransformCode& c_;
  std::vector<TransformCodeLine> lines_;
  std::vector<i32> numbers_;  // of the transform's values
};

}  // namespace

void MakeTransformCode(const TransformView& transform, TransformCodeLine* lines,
                       TransformCode* code) {
  *code = TransformCode{};
  CodeMaker(transform, lines, code).Make();
}

}  // namespace jax_attn
