#include "cpu/variant_code.h"

namespace jax_attn {
namespace {

// The inputs that a value depends on, as bits.
enum : i32 {
  kOfRequest = 1,  // the same for all rows of an item
  kOfHead = 2,
  kOfQuery = 4,
  kOfKey = 8,
  kOfDistance = 16,  // q_pos - kv_pos
  kOfScore = 32,
};

i32 FactDependence(i32 op) {
  switch (op) {
    case kOpScore:
      return kOfScore;
    case kOpHead:
    case kOpKvHead:
      return kOfHead;
    case kOpRequest:
    case kOpQLen:
    case kOpKvLen:
      return kOfRequest;
    case kOpQPos:
    case kOpQRow:
      return kOfQuery;
    default:
      return kOfKey;
  }
}

ValueHome HomeOf(i32 depends) {
  if (depends & kOfScore) return kLogitHome;
  if (depends & kOfDistance) return depends & (kOfQuery | kOfKey) ? kLogitHome : kDiagHome;
  if ((depends & kOfKey) == 0) return kRowHome;
  return depends & (kOfQuery | kOfHead) ? kLogitHome : kKeyHome;
}

class CodeMaker {
 public:
  CodeMaker(const VariantProgram& program, bool capped, const VariantGradient* gradient,
            VariantCode* code)
      : p_(program), capped_(capped), gradient_(gradient), c_(*code) {}

  void Make() {
    c_.visible = p_.visible;
    c_.scales = p_.logits >= 0 || capped_ || !p_.normalizes;
    for (i32 i = 0; i < p_.num_instructions; ++i) Place(i);
    c_.logit = p_.logits >= 0 ? Resolve(p_.logits) : kRawScore;
    // Whether the score itself is the result, without an instruction of its own.
    const bool bare = p_.logits < 0 && c_.scales && !capped_;
    if (bare) c_.logit = NewValue(kLogitHome);

    Need(c_.visible, needs_mask_);
    if (!bare) Need(c_.logit, needs_logit_);
    if (gradient_ != nullptr) KeepDerivatives();
    for (i32 i = 0; i < p_.num_instructions; ++i) {
      needed_[i] = needs_mask_[i] || needs_logit_[i];
      if (!needed_[i]) c_.home[i] = kNoHome;
    }
    CountUses();
    c_.rows = Section(kRowHome, needed_, nullptr);
    c_.keys = Section(kKeyHome, needed_, nullptr);
    c_.diagonals = Section(kDiagHome, needed_, nullptr);
    c_.mask = Section(kLogitHome, needs_mask_, nullptr);
    c_.logits = Section(kLogitHome, needs_logit_, needs_mask_);
    c_.only_logits = Section(kLogitHome, needs_logit_, nullptr);
    FindMaskRows();
    if (bare) {
      c_.logits.begin = num_ops_;
      Emit({kOpMul, kVariantF32, kVariantF32, c_.logit, 0, 2, {kRawScore, kScoreScale}});
      c_.logits.end = num_ops_;
      c_.only_logits = c_.logits;
    }
    c_.added = AddsElements() ? c_.only_logits.begin : -1;
    // Loops over rows need reciprocals that were found on the way: these come after the other rows'
    // ops.
    const i32 first = num_ops_;
    for (i32 i = c_.rows.begin; i < c_.rows.end; ++i) Emit(c_.ops[i]);
    for (i32 i = 0; i < num_reciprocals_; ++i) {
      Emit({kCodeReciprocal,
            kVariantF32,
            kVariantF32,
            reciprocals_[i].value,
            0,
            1,
            {reciprocals_[i].of}});
    }
    c_.rows = {first, num_ops_};
    for (i32 i = 0; i < num_values_; ++i) {
      if (c_.home[i] != kNoHome) c_.slot[i] = c_.num_slots[c_.home[i]]++;
    }
  }

 private:
  const Instruction& At(i32 value) const { return p_.instructions[value]; }
  i32 NumArgs(i32 value) const { return NumValueArgs(p_, At(value)); }
  i32 Arg(i32 value, i32 i) const { return At(value).args[FirstValueArg(At(value)) + i]; }

  i32 NewValue(ValueHome home) {
    c_.home[num_values_] = home;
    return num_values_++;
  }

  void Place(i32 i) {
    const Instruction& x = At(i);
    i32 depends = 0;
    if (kVariantOps[x.op].rule == kRuleAt) {
      depends = FactDependence(x.op);
    } else {
      for (i32 a = 0; a < NumArgs(i); ++a) depends |= depends_[Arg(i, a)];
      if (IsDistance(i)) depends = kOfDistance;
    }
    depends_[i] = depends;
    c_.home[i] = HomeOf(depends);
    c_.diagonals_by_head |= c_.home[i] == kDiagHome && (depends & kOfHead);
    c_.reads_kv_rows |= x.op == kOpKvRow;
  }

  // Whether instruction i is a difference or comparison of q_pos and kv_pos.
  bool IsDistance(i32 i) const {
    const i32 op = At(i).op;
    if (op != kOpSub && op != kOpEq && op != kOpNe && op != kOpLt && op != kOpLe) return false;
    const i32 a = At(Arg(i, 0)).op, b = At(Arg(i, 1)).op;
    return (a == kOpQPos && b == kOpKvPos) || (a == kOpKvPos && b == kOpQPos);
  }

  void Need(i32 value, bool* needs) {
    if (value < 0 || value >= p_.num_instructions) return;
    needs[value] = true;
    for (i32 i = value; i >= 0; --i) {
      if (!needs[i]) continue;
      for (i32 a = 0; a < NumArgs(i); ++a) needs[Arg(i, a)] = true;
    }
  }

  // Derivatives are results, so no other value may reuse their slots.
  void KeepDerivatives() {
    const auto keep = [&](i32 value) {
      Need(value, needs_logit_);
      uses_[value] += 2;
      return Resolve(value);
    };
    c_.score = gradient_->score < 0 ? -1 : keep(gradient_->score);
    c_.num_elements = gradient_->num_elements;
    for (i32 i = 0; i < c_.num_elements; ++i) {
      const auto [load, partial] = gradient_->elements[i];
      auto& element = c_.elements[i];
      element.operand = At(load).args[0];
      element.partial = keep(partial);
      element.rank = NumArgs(load);
      for (i32 a = 0; a < element.rank; ++a) element.indices[a] = keep(Arg(load, a));
    }
  }

  // See VariantCode::added.
  bool AddsElements() const {
    const auto [begin, end] = c_.only_logits;
    if (end - begin != 2) return false;
    const CodeOp &load = c_.ops[begin], &sum = c_.ops[begin + 1];
    if (load.op != kOpLoad || load.num_args == 0 || sum.op != kCodeMulAdd) return false;
    for (i32 a = 0; a + 1 < load.num_args; ++a) {
      if (c_.home[load.args[a]] != kRowHome) return false;
    }
    return At(load.args[load.num_args - 1]).op == kOpKvPos && sum.value == c_.logit &&
           sum.args[0] == kRawScore && sum.args[1] == kScoreScale && sum.args[2] == load.value;
  }

  // Finds the values from outside that the mask of a row reads.
  void FindMaskRows() {
    bool takes[kNumCodeValues] = {};
    if (c_.visible >= 0) takes[c_.visible] = true;
    for (i32 i = c_.mask.begin; i < c_.mask.end; ++i) {
      for (i32 a = 0; a < c_.ops[i].num_args; ++a) takes[c_.ops[i].args[a]] = true;
    }
    for (i32 i = 0; i < p_.num_instructions; ++i) {
      if (takes[i] && c_.home[i] == kRowHome) c_.mask_rows[c_.num_mask_rows++] = i;
      c_.mask_has_diagonals |= takes[i] && c_.home[i] == kDiagHome;
    }
  }

  void CountUses() {
    for (i32 i = 0; i < p_.num_instructions; ++i) {
      if (!needed_[i]) continue;
      for (i32 a = 0; a < NumArgs(i); ++a) ++uses_[Arg(i, a)];
    }
    if (p_.logits >= 0) uses_[p_.logits] += 2;
    if (p_.visible >= 0) uses_[p_.visible] += 2;
  }

  CodeRange Section(ValueHome home, const bool* needs, const bool* done) {
    section_ = num_ops_;
    for (i32 i = 0; i < p_.num_instructions; ++i) {
      if (needs[i] && c_.home[i] == home && !(done && done[i])) EmitValue(i, home);
    }
    return {section_, num_ops_};
  }

  void EmitValue(i32 i, ValueHome home) {
    const Instruction& x = At(i);
    if (x.op == kOpScore) {
      if (capped_) return;
      return Emit({kOpMul, kVariantF32, kVariantF32, i, 0, 2, {kRawScore, kScoreScale}});
    }
    CodeOp op = {x.op, x.type, x.type, i, 0, NumArgs(i), {}};
    const VariantRule rule = kVariantOps[x.op].rule;
    if (rule == kRuleConst) op.operand = x.args[0];
    if (rule == kRuleLoad || rule == kRuleDim) op.operand = x.args[0];
    if (rule == kRuleDim) op.args[0] = x.args[1];
    for (i32 a = 0; a < op.num_args; ++a) {
      op.args[a] = IsDistance(i) ? DistanceArg(Arg(i, a)) : Resolve(Arg(i, a));
    }
    if (op.num_args > 0) op.arg_type = At(Arg(i, op.num_args == 3 ? 1 : 0)).type;
    if (home == kLogitHome && x.type == kVariantF32) Improve(i, &op);
    Emit(op);
  }

  // The buffer holds the score after a soft cap.
  i32 Resolve(i32 value) const { return At(value).op == kOpScore && capped_ ? kRawScore : value; }

  i32 DistanceArg(i32 value) const { return At(value).op == kOpQPos ? kDistance : kZeroDistance; }

  void Improve(i32 i, CodeOp* op) {
    // A value that depends on a score is rounded anyway: one reciprocal per row replaces one
    // division per logit.
    if (op->op == kOpDiv && (depends_[Arg(i, 0)] & kOfScore) && c_.home[op->args[1]] == kRowHome) {
      op->op = kOpMul;
      op->args[1] = ReciprocalOf(op->args[1]);
      return;
    }
    if (op->op != kOpAdd && op->op != kOpSub) return;
    for (i32 a = 0; a < 2; ++a) {  // a product that only this sum uses
      const i32 value = op->args[a];
      if (value >= p_.num_instructions || uses_[value] != 1) continue;
      i32 at = num_ops_ - 1;
      while (at >= section_ && c_.ops[at].value != value) --at;
      const CodeOp product = at >= section_ ? c_.ops[at] : CodeOp{};
      if (at < section_ || product.op != kOpMul) continue;
      const i32 other = op->args[1 - a];
      op->op = op->op == kOpAdd ? i32{kCodeMulAdd} : a == 0 ? i32{kCodeMulSub} : i32{kCodeSubMul};
      op->args[0] = product.args[0];
      op->args[1] = product.args[1];
      op->args[2] = other;
      op->num_args = 3;
      for (--num_ops_; at < num_ops_; ++at) c_.ops[at] = c_.ops[at + 1];
      return;
    }
  }

  i32 ReciprocalOf(i32 value) {
    for (i32 i = 0; i < num_reciprocals_; ++i) {
      if (reciprocals_[i].of == value) return reciprocals_[i].value;
    }
    reciprocals_[num_reciprocals_] = {value, NewValue(kRowHome)};
    return reciprocals_[num_reciprocals_++].value;
  }

  void Emit(const CodeOp& op) { c_.ops[num_ops_++] = op; }

  const VariantProgram& p_;
  const bool capped_;
  const VariantGradient* const gradient_;
  VariantCode& c_;
  i32 num_ops_ = 0;
  i32 num_values_ = kFirstExtraValue;
  i32 section_ = 0;  // where the section begins
  i32 depends_[kMaxInstructions] = {};
  i32 uses_[kMaxInstructions] = {};
  bool needs_mask_[kMaxInstructions] = {}, needs_logit_[kMaxInstructions] = {};
  bool needed_[kMaxInstructions] = {};
  struct {
    i32 of, value;
  } reciprocals_[kMaxInstructions];
  i32 num_reciprocals_ = 0;
};

}  // namespace

void MakeVariantCode(const VariantProgram& program, bool capped, const VariantGradient* gradient,
                     VariantCode* code) {
  *code = VariantCode{};
  CodeMaker(program, capped, gradient, code).Make();
}

}  // namespace jax_attn
