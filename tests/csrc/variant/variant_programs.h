// Programs of variants that tests of the generated CUDA run: published ones, and random ones.
// print_variants.cc writes their text, which the tests compile.
#pragma once

#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <random>
#include <string>
#include <vector>

#include "variant/words.h"

namespace jax_attn {

// Builds a program; a value is given by its number.
class ProgramBuilder {
 public:
  ProgramBuilder() = default;
  // Continues a program.
  explicit ProgramBuilder(const VariantProgram& program) : p_(program) {}

  i32 Operand(i32 type, i32 rank) {
    p_.operands[p_.num_operands] = {type, rank};
    return p_.num_operands++;
  }
  i32 F(float x) {
    i32 bits;
    std::memcpy(&bits, &x, 4);
    return Add(kOpConst, kVariantF32, {bits});
  }
  i32 I(i32 x) { return Add(kOpConst, kVariantI32, {x}); }
  i32 At(i32 op) { return Add(op, op == kOpScore ? kVariantF32 : kVariantI32, {}); }
  i32 Load(i32 operand, std::initializer_list<i32> indices) {
    const i32 type = p_.operands[operand].type;
    std::vector<i32> args = {operand};
    args.insert(args.end(), indices);
    return Add(kOpLoad,
               type == kOperandBool  ? kVariantBool
               : type >= kOperandI32 ? kVariantI32
                                     : kVariantF32,
               args);
  }
  i32 Dim(i32 operand, i32 axis) { return Add(kOpDim, kVariantI32, {operand, axis}); }
  i32 Cast(i32 type, i32 x) { return Add(kOpCast, type, {x}); }
  i32 Select(i32 which, i32 yes, i32 no) { return Add(kOpSelect, TypeOf(yes), {which, yes, no}); }
  i32 Do(i32 op, i32 x) { return Add(op, TypeOf(x), {x}); }
  i32 Do(i32 op, i32 x, i32 y) {
    const bool compares = kVariantOps[op].rule == kRuleCompare;
    return Add(op, compares ? i32{kVariantBool} : TypeOf(x), {x, y});
  }
  i32 Arg(i32 value, i32 i) const { return p_.instructions[value].args[i]; }
  i32 TypeOf(i32 value) const { return p_.instructions[value].type; }
  i32 size() const { return p_.num_instructions; }

  // logits, visible: values, or -1.
  VariantProgram Finish(i32 logits, i32 visible, bool normalizes = true) {
    p_.present = 1;
    p_.normalizes = normalizes;
    p_.logits = logits;
    p_.visible = visible;
    const std::vector<int64_t> words = EncodeProgram(p_);
    VariantProgram checked;
    if (!DecodeProgram(words.data(), words.size(), &checked).ok()) std::abort();
    return checked;
  }

 private:
  i32 Add(i32 op, i32 type, const std::vector<i32>& args) {
    Instruction& x = p_.instructions[p_.num_instructions];
    x = {op, type, {}, 0};
    std::copy(args.begin(), args.end(), x.args);
    return p_.num_instructions++;
  }

  VariantProgram p_ = {};
};

struct NamedProgram {
  const char* name;  // of the generated struct
  VariantProgram program;
};
struct NamedGradient {
  const char* name;
  VariantGradient gradient;
};

// The gradient of a program whose logit has the derivative 1 by the score.
inline VariantGradient PlainGradient(const VariantProgram& program) {
  VariantGradient gradient = {};
  gradient.program = program;
  gradient.score = -1;
  return gradient;
}
// d_score(builder that continues the program) returns the derivative.
template <typename Derivative>
VariantGradient GradientBy(const VariantProgram& program, const Derivative& d_score) {
  ProgramBuilder b(program);
  const i32 score = d_score(b);
  VariantGradient gradient = {};
  gradient.program = b.Finish(program.logits, program.visible, program.normalizes != 0);
  gradient.score = score;
  return gradient;
}
// Adds a derivative by an operand's elements: `load` is a value of the program, and
// partial(builder) returns the derivative.
template <typename Derivative>
VariantGradient WithElement(VariantGradient gradient, i32 load, const Derivative& partial) {
  ProgramBuilder b(gradient.program);
  const i32 value = partial(b);
  const VariantProgram& p = gradient.program;
  gradient.program = b.Finish(p.logits, p.visible, p.normalizes != 0);
  gradient.elements[gradient.num_elements++] = {load, value};
  return gradient;
}

// score - slopes[head] * (q_pos - kv_pos)
inline VariantProgram Alibi() {
  ProgramBuilder b;
  const i32 slopes = b.Operand(kOperandF32, 1);
  const i32 distance = b.Do(kOpSub, b.At(kOpQPos), b.At(kOpKvPos));
  const i32 penalty = b.Do(kOpMul, b.Load(slopes, {b.At(kOpHead)}), b.Cast(kVariantF32, distance));
  return b.Finish(b.Do(kOpSub, b.At(kOpScore), penalty), -1);
}

// score + bias[bucket of the distance, head], half precision
inline VariantProgram RelativeBias() {
  ProgramBuilder b;
  const i32 bias = b.Operand(kOperandF16, 2);
  const i32 distance = b.Do(kOpMax, b.Do(kOpSub, b.At(kOpQPos), b.At(kOpKvPos)), b.I(0));
  const i32 bucket = b.Select(b.Do(kOpLt, distance, b.I(8)), distance,
                              b.Do(kOpAdd, b.I(8), b.Do(kOpShiftRight, distance, b.I(4))));
  const i32 term = b.Load(bias, {b.Do(kOpMin, bucket, b.I(15)), b.At(kOpHead)});
  return b.Finish(b.Do(kOpAdd, b.At(kOpScore), term), -1);
}

// bias[request, head, q_pos, kv_pos], whose axes may have length 1
inline VariantProgram DenseBias() {
  ProgramBuilder b;
  const i32 bias = b.Operand(kOperandBF16, 4);
  const i32 term = b.Load(bias, {b.At(kOpRequest), b.At(kOpHead), b.At(kOpQPos), b.At(kOpKvPos)});
  return b.Finish(b.Do(kOpAdd, b.At(kOpScore), term), -1);
}

// A second soft cap.
inline VariantProgram Cap() {
  ProgramBuilder b;
  const i32 cap = b.F(2.5f);
  return b.Finish(b.Do(kOpMul, cap, b.Do(kOpTanh, b.Do(kOpDiv, b.At(kOpScore), cap))), -1);
}

// score + 0.1 * (a sum of functions of the C library, by row and key)
inline VariantProgram Functions() {
  ProgramBuilder b;
  const i32 by_row = b.Operand(kOperandF32, 1), by_key = b.Operand(kOperandBF16, 1);
  const i32 y = b.Load(by_key, {b.At(kOpKvPos)});
  const i32 x = b.Do(kOpMul, b.F(3.0f), b.Do(kOpSub, b.Load(by_row, {b.At(kOpQRow)}), y));
  i32 sum = b.Do(kOpAtan2, x, b.Do(kOpSub, y, b.F(0.5f)));
  sum = b.Do(kOpAdd, sum, b.Do(kOpPow, b.Do(kOpAdd, b.F(0.1f), b.Do(kOpAbs, x)), y));
  for (i32 op : {kOpExpm1, kOpSin, kOpCos, kOpErf, kOpErfc}) sum = b.Do(kOpAdd, sum, b.Do(op, x));
  return b.Finish(b.Do(kOpAdd, b.At(kOpScore), b.Do(kOpMul, sum, b.F(0.1f))), -1);
}

// FlashSigmoid, with a window by mask.
inline VariantProgram Sigmoid() {
  ProgramBuilder b;
  const i32 weight = b.Do(kOpLogistic, b.Do(kOpSub, b.At(kOpScore), b.F(2.0f)));
  const i32 distance = b.Do(kOpSub, b.At(kOpQPos), b.At(kOpKvPos));
  return b.Finish(weight, b.Do(kOpLt, distance, b.I(90)), false);
}

// The plain sum of scores times values.
inline VariantProgram Linear() {
  ProgramBuilder b;
  return b.Finish(-1, -1, false);
}

// q_doc[q_row] == kv_doc[kv_row]
inline VariantProgram Documents() {
  ProgramBuilder b;
  const i32 q_doc = b.Operand(kOperandI32, 1), kv_doc = b.Operand(kOperandU8, 1);
  return b.Finish(-1,
                  b.Do(kOpEq, b.Load(q_doc, {b.At(kOpQRow)}), b.Load(kv_doc, {b.At(kOpKvRow)})));
}

// (kv_pos < prefix[request] or kv_pos <= q_pos), without the keys that a head drops.
inline VariantProgram PrefixLm() {
  ProgramBuilder b;
  const i32 prefix = b.Operand(kOperandI32, 1), dropped = b.Operand(kOperandBool, 2);
  const i32 kv_pos = b.At(kOpKvPos), q_pos = b.At(kOpQPos);
  const i32 in_prefix = b.Do(kOpLt, kv_pos, b.Load(prefix, {b.At(kOpRequest)}));
  const i32 sees = b.Do(kOpOr, in_prefix, b.Do(kOpLe, kv_pos, q_pos));
  const i32 drops = b.Load(dropped, {b.At(kOpHead), b.Do(kOpRem, kv_pos, b.Dim(dropped, 1))});
  return b.Finish(-1, b.Do(kOpAnd, sees, b.Do(kOpNot, drops)));
}

// The same for every head and key.
inline VariantProgram Causal() {
  ProgramBuilder b;
  const i32 prefix = b.Operand(kOperandI32, 1);
  const i32 in_prefix = b.Do(kOpLt, b.At(kOpKvPos), b.Load(prefix, {b.At(kOpRequest)}));
  return b.Finish(-1, b.Do(kOpOr, in_prefix, b.Do(kOpLe, b.At(kOpKvPos), b.At(kOpQPos))));
}

// Drafts see the context and their ancestors, a bit each; a temperature for each head and row.
inline VariantProgram Tree() {
  ProgramBuilder b;
  const i32 bits = b.Operand(kOperandI32, 1), temperature = b.Operand(kOperandF32, 2);
  const i32 context = b.Do(kOpSub, b.At(kOpKvLen), b.At(kOpQLen));
  const i32 place = b.Do(kOpSub, b.At(kOpKvPos), context);
  const i32 bit =
      b.Do(kOpAnd, b.Do(kOpShiftRightLogical, b.Load(bits, {b.At(kOpQRow)}), place), b.I(1));
  const i32 sees = b.Do(kOpOr, b.Do(kOpLt, place, b.I(0)), b.Do(kOpNe, bit, b.I(0)));
  const i32 scale = b.Load(temperature, {b.At(kOpHead), b.At(kOpQRow)});
  return b.Finish(b.Do(kOpDiv, b.At(kOpScore), scale), sees);
}

// A bias of keys alone, which rows of a shared prefix have in common.
inline VariantProgram KeyBias() {
  ProgramBuilder b;
  const i32 bias = b.Operand(kOperandF32, 2);
  const i32 term = b.Load(bias, {b.At(kOpKvHead), b.At(kOpKvRow)});
  const i32 even = b.Do(kOpEq, b.Do(kOpAnd, b.At(kOpKvPos), b.I(1)), b.I(0));
  const i32 first = b.Do(kOpEq, b.At(kOpHead), b.I(0));
  return b.Finish(b.Do(kOpAdd, b.At(kOpScore), term), b.Do(kOpOr, even, first));
}

// score * factor + 0.2 * slopes[head] * (kv_pos - q_pos) + 0.5: the bias rises by up to 48 log2
// units a step of 128 keys, and with a large factor scores fall by more than that.
inline VariantProgram Rising(float factor) {
  ProgramBuilder b;
  const i32 slopes = b.Operand(kOperandF32, 1);
  const i32 distance = b.Cast(kVariantF32, b.Do(kOpSub, b.At(kOpKvPos), b.At(kOpQPos)));
  const i32 slope = b.Do(kOpMul, b.Load(slopes, {b.At(kOpHead)}), b.F(0.2f));
  const i32 bias = b.Do(kOpAdd, b.Do(kOpMul, distance, slope), b.F(0.5f));
  return b.Finish(b.Do(kOpAdd, b.Do(kOpMul, b.At(kOpScore), b.F(factor)), bias), -1);
}

// 1.5 * score + bias[head], which does not depend on keys otherwise.
inline VariantProgram HeadBias() {
  ProgramBuilder b;
  const i32 bias = b.Operand(kOperandF32, 1);
  const i32 score = b.Do(kOpMul, b.At(kOpScore), b.F(1.5f));
  return b.Finish(b.Do(kOpAdd, score, b.Load(bias, {b.At(kOpHead)})), -1);
}

// Sums, differences, and multiples (by values of rows) of the score and of terms by key.
inline VariantProgram RandomAffine(unsigned seed) {
  std::mt19937 random(seed);
  const auto any = [&](size_t n) { return static_cast<i32>(random() % n); };
  ProgramBuilder b;
  const i32 of_head = b.Load(b.Operand(kOperandF32, 1), {b.At(kOpHead)});
  const i32 of_row = b.Load(b.Operand(kOperandBF16, 1), {b.At(kOpQRow)});
  const i32 of_key = b.Load(b.Operand(kOperandF32, 1), {b.At(kOpKvPos)});
  const i32 rows[] = {of_head, b.F(-0.75f), b.Do(kOpAdd, of_row, b.F(0.25f))};
  std::vector<i32> values = {b.At(kOpScore), of_head, of_key};
  const auto add_distance = [&](i32 distance) {
    values.push_back(b.Do(kOpMul, b.Cast(kVariantF32, distance), b.F(0.01f)));
  };
  const i32 q_pos = b.At(kOpQPos), kv_pos = b.At(kOpKvPos);
  add_distance(b.Do(kOpSub, q_pos, kv_pos));
  add_distance(b.Do(kOpSub, kv_pos, b.Do(kOpSub, b.At(kOpKvLen), b.At(kOpQLen))));
  add_distance(b.Do(kOpAdd, kv_pos, b.I(7)));
  add_distance(b.Do(kOpAbs, b.Do(kOpSub, q_pos, kv_pos)));
  const auto one = [&] { return values[any(values.size())]; };
  for (i32 i = 0; i < 10; ++i) {
    switch (any(5)) {
      case 0:
        values.push_back(b.Do(kOpAdd, one(), one()));
        break;
      case 1:
        values.push_back(b.Do(kOpSub, one(), one()));
        break;
      case 2:
        values.push_back(b.Do(kOpNeg, one()));
        break;
      case 3:
        values.push_back(b.Do(kOpMul, rows[any(3)], one()));
        break;
      default:
        values.push_back(b.Do(kOpDiv, one(), b.F(any(2) == 0 ? 1.7f : -0.9f)));
    }
  }
  const i32 rest = b.Do(kOpAdd, b.Do(kOpMul, values.back(), b.F(0.25f)), values[values.size() - 2]);
  return b.Finish(b.Do(kOpAdd, b.At(kOpScore), b.Do(kOpMul, rest, b.F(0.5f))), -1);
}

// Comparisons of positions in any combination; keys near the row are visible.
inline VariantProgram RandomMask(unsigned seed) {
  std::mt19937 random(seed);
  const auto any = [&](size_t n) { return static_cast<i32>(random() % n); };
  ProgramBuilder b;
  const i32 border = b.Load(b.Operand(kOperandI32, 1), {b.At(kOpRequest)});
  const i32 q_pos = b.At(kOpQPos), kv_pos = b.At(kOpKvPos), kv_len = b.At(kOpKvLen);
  const i32 distance = b.Do(kOpSub, q_pos, kv_pos);
  const i32 of_keys[] = {kv_pos, distance, b.Do(kOpSub, kv_pos, b.Do(kOpSub, kv_len, b.I(40))),
                         b.Do(kOpAdd, kv_pos, q_pos)};
  const i32 of_rows[] = {border, q_pos, b.I(100), b.Do(kOpSub, border, b.I(30)), kv_len};
  std::vector<i32> bools;
  const auto one = [&] { return bools[any(bools.size())]; };
  for (i32 i = 0; i < 12; ++i) {
    const i32 x = of_keys[any(4)], y = of_rows[any(5)], op = any(2) == 0 ? kOpLt : kOpLe;
    const i32 compared = any(2) == 0 ? b.Do(op, x, y) : b.Do(op, y, x);
    bools.push_back(i < 3 || any(2) == 0 ? compared
                    : any(3) == 0        ? b.Do(kOpNot, one())
                                         : b.Do(any(2) == 0 ? kOpAnd : kOpOr, one(), one()));
  }
  const i32 near = b.Do(kOpLe, b.Do(kOpAbs, distance), b.I(2));
  return b.Finish(-1, b.Do(kOpOr, near, bools.back()));
}
inline constexpr int kNumRandomForms = 4;  // of each

// Integer operations in any order on facts, operands and constants; the final logit is bounded.
inline VariantProgram RandomProgram(unsigned seed) {
  std::mt19937 random(seed);
  const auto any = [&](size_t n) { return static_cast<i32>(random() % n); };
  ProgramBuilder b;
  const i32 operands[] = {b.Operand(kOperandI32, 0), b.Operand(kOperandU8, 1),
                          b.Operand(kOperandI32, 2), b.Operand(kOperandBool, 3),
                          b.Operand(kOperandF32, 1)};
  std::vector<i32> ints = {b.I(any(9) - 4), b.I(any(100)), b.I(-2147483647 - 1)};
  for (i32 op = kOpHead; op <= kOpKvLen; ++op) ints.push_back(b.At(op));
  std::vector<i32> bools;
  const auto one = [&](const std::vector<i32>& of) { return of[any(of.size())]; };
  ints.push_back(b.Load(operands[0], {}));
  ints.push_back(b.Dim(operands[2], 1));
  bools.push_back(b.Do(kOpLt, one(ints), one(ints)));
  const i32 binary[] = {kOpAdd, kOpSub, kOpMul,       kOpDiv,        kOpRem, kOpMin,
                        kOpMax, kOpAnd, kOpShiftLeft, kOpShiftRight, kOpXor, kOpShiftRightLogical};
  const i32 unary[] = {kOpNeg, kOpAbs, kOpSign, kOpNot};
  const i32 compare[] = {kOpEq, kOpNe, kOpLt, kOpLe};
  const i32 logical[] = {kOpAnd, kOpOr, kOpXor};
  for (i32 i = 0; i < 24; ++i) {
    switch (any(8)) {
      case 0:
        ints.push_back(b.Load(operands[1], {one(ints)}));
        break;
      case 1:
        ints.push_back(b.Load(operands[2], {one(ints), one(ints)}));
        break;
      case 2:
        bools.push_back(b.Load(operands[3], {one(ints), one(ints), one(ints)}));
        break;
      case 3:
        bools.push_back(b.Do(compare[any(4)], one(ints), one(ints)));
        break;
      case 4:
        bools.push_back(any(2) == 0 ? b.Do(kOpNot, one(bools))
                                    : b.Do(logical[any(3)], one(bools), one(bools)));
        break;
      case 5:
        ints.push_back(b.Select(one(bools), one(ints), one(ints)));
        break;
      case 6:
        ints.push_back(b.Do(unary[any(4)], one(ints)));
        break;
      default:
        ints.push_back(b.Do(binary[any(12)], one(ints), one(ints)));
    }
  }
  const i32 of_1000 = b.Cast(kVariantF32, b.Do(kOpRem, ints.back(), b.I(1000)));
  const i32 size = b.Do(kOpMul, of_1000, b.F(1e-3f));
  const i32 far = b.Load(operands[4], {ints[ints.size() - 2]});
  const i32 tame =
      b.Do(kOpTanh, b.Do(kOpAdd, far, b.Select(bools[1 % bools.size()], size, b.Do(kOpAbs, size))));
  // About half of the keys are visible, whatever the value is.
  const i32 thing = b.Do(kOpXor, ints.back(), b.Do(kOpAdd, b.At(kOpKvPos), b.At(kOpQPos)));
  const i32 visible = b.Do(kOpOr, b.Do(kOpEq, b.Do(kOpAnd, thing, b.I(1)), b.I(0)), bools.back());
  return b.Finish(b.Do(kOpAdd, b.At(kOpScore), tame), any(2) == 0 ? visible : -1);
}
inline constexpr int kNumRandomPrograms = 6;

inline std::vector<NamedProgram> VariantPrograms() {
  std::vector<NamedProgram> all = {
      {"AlibiVariant", Alibi()},         {"RelativeBiasVariant", RelativeBias()},
      {"DenseBiasVariant", DenseBias()}, {"CapVariant", Cap()},
      {"SigmoidVariant", Sigmoid()},     {"LinearVariant", Linear()},
      {"DocumentsVariant", Documents()}, {"PrefixLmVariant", PrefixLm()},
      {"CausalVariant", Causal()},       {"TreeVariant", Tree()},
      {"KeyBiasVariant", KeyBias()},     {"RisingVariant", Rising(1.25f)},
      {"SharpVariant", Rising(400.0f)},  {"HeadBiasVariant", HeadBias()},
      {"FunctionsVariant", Functions()},
  };
  for (int i = 0; i < kNumRandomForms; ++i) {
    static const char* const kAffine[] = {"Affine0", "Affine1", "Affine2", "Affine3"};
    static const char* const kMasks[] = {"Mask0", "Mask1", "Mask2", "Mask3"};
    all.push_back({kAffine[i], RandomAffine(static_cast<unsigned>(i))});
    all.push_back({kMasks[i], RandomMask(static_cast<unsigned>(i))});
  }
  static const char* const kNames[kNumRandomPrograms] = {"RandomVariant0", "RandomVariant1",
                                                         "RandomVariant2", "RandomVariant3",
                                                         "RandomVariant4", "RandomVariant5"};
  for (int i = 0; i < kNumRandomPrograms; ++i) {
    all.push_back({kNames[i], RandomProgram(static_cast<unsigned>(i))});
  }
  return all;
}

inline VariantGradient CapGradient() {
  const VariantProgram cap = Cap();
  return GradientBy(cap, [&](ProgramBuilder& b) {
    const i32 tanh = b.Arg(cap.logits, 1);
    return b.Do(kOpSub, b.F(1), b.Do(kOpMul, tanh, tanh));
  });
}

inline VariantGradient SigmoidGradient() {
  const VariantProgram sigmoid = Sigmoid();
  return GradientBy(sigmoid, [&](ProgramBuilder& b) {
    return b.Do(kOpMul, sigmoid.logits, b.Do(kOpSub, b.F(1), sigmoid.logits));
  });
}

// Also by the temperatures: -score / temperature^2.
inline VariantGradient TreeGradient() {
  const VariantProgram tree = Tree();
  const ProgramBuilder of(tree);
  const i32 temperature = of.Arg(tree.logits, 1);
  const VariantGradient gradient =
      GradientBy(tree, [&](ProgramBuilder& b) { return b.Do(kOpDiv, b.F(1), temperature); });
  return WithElement(gradient, temperature, [&](ProgramBuilder& b) {
    return b.Do(kOpNeg, b.Do(kOpDiv, tree.logits, temperature));
  });
}

// By slopes: -distance.
inline VariantGradient AlibiGradient() {
  const VariantProgram alibi = Alibi();
  const ProgramBuilder of(alibi);
  const i32 penalty = of.Arg(alibi.logits, 1);
  return WithElement(PlainGradient(alibi), of.Arg(penalty, 0),
                     [&](ProgramBuilder& b) { return b.Do(kOpNeg, b.Arg(penalty, 1)); });
}

// The gradient of score + an element.
inline VariantGradient BiasGradient(const VariantProgram& bias) {
  return WithElement(PlainGradient(bias), ProgramBuilder(bias).Arg(bias.logits, 1),
                     [](ProgramBuilder& b) { return b.F(1); });
}

inline std::vector<NamedGradient> VariantGradients() {
  std::vector<NamedGradient> all = {
      {"AlibiGradient", AlibiGradient()},
      {"AlibiOfScores", PlainGradient(Alibi())},
      {"RelativeBiasGradient", BiasGradient(RelativeBias())},
      {"DenseBiasGradient", BiasGradient(DenseBias())},
      {"CapGradient", CapGradient()},
      {"SigmoidGradient", SigmoidGradient()},
      {"LinearGradient", PlainGradient(Linear())},
      {"DocumentsGradient", PlainGradient(Documents())},
      {"PrefixLmGradient", PlainGradient(PrefixLm())},
      {"TreeGradient", TreeGradient()},
      {"KeyBiasGradient", BiasGradient(KeyBias())},
      {"FunctionsGradient", PlainGradient(Functions())},
  };
  static const char* const kNames[kNumRandomPrograms] = {"RandomGradient0", "RandomGradient1",
                                                         "RandomGradient2", "RandomGradient3",
                                                         "RandomGradient4", "RandomGradient5"};
  for (int i = 0; i < kNumRandomPrograms; ++i) {
    all.push_back({kNames[i], PlainGradient(RandomProgram(static_cast<unsigned>(i)))});
  }
  return all;
}

}  // namespace jax_attn
