// A variant's program in the order in which the CPU kernels run it: each value where it changes
// least often. Made once a call, for all instruction sets; cpu/kernels/variant.h runs it.
#pragma once

#include "variant/program.h"

namespace jax_attn {

// Where a value is kept, and what the lanes of its vector are.
enum ValueHome : i32 {
  kNoHome,    // nothing needs it
  kRowHome,   // rows of a pass
  kKeyHome,   // keys of a block
  kDiagHome,  // differences of positions in a block: of what depends on q_pos - kv_pos, and perhaps
              // on the head, but on nothing else of row and key
  kLogitHome,  // keys of a block, for one row
};

// Operations beyond those of programs.
enum : i32 {
  kCodeMulAdd = kNumVariantOps,  // a b + c
  kCodeMulSub,                   // a b - c
  kCodeSubMul,                   // c - a b
  kCodeReciprocal,
};

// Values beyond those of programs, as arguments.
enum : i32 {
  kRawScore = kMaxInstructions,  // what the scores' buffer holds
  kScoreScale,                   // of the row: natural logit = scale * raw score
  kDistance,                     // diagonals: q_pos - kv_pos, which stands for q_pos there
  kZeroDistance,                 // diagonals: 0, for kv_pos
  kFirstExtraValue,              // of the code itself
  kNumCodeValues = 3 * kMaxInstructions,
};

struct CodeOp {
  i32 op;        // a VariantOp or one of the above
  i32 type;      // of the result
  i32 arg_type;  // of the arguments, except the condition of a select
  i32 value;     // the value it defines
  i32 operand;   // of a load or dim; of a dim, args[0] is the axis and no value; const: its bits
  i32 num_args;
  i32 args[kMaxOperandRank];  // values
};

struct CodeRange {
  i32 begin, end;
};

struct VariantCode {
  CodeOp ops[4 * kMaxInstructions];
  CodeRange rows, keys, diagonals;
  CodeRange mask;         // gives `visible` where that is per logit
  CodeRange logits;       // gives `logit`, after the mask
  CodeRange only_logits;  // likewise, without the mask before it
  i32 logit;              // a value; kRawScore: nothing changes it
  i32 visible;            // a value; -1: all is visible
  ValueHome home[kNumCodeValues];
  i32 slot[kNumCodeValues];  // index of a value within its home
  i32 num_slots[kLogitHome + 1];
  // Index in ops of the load in only_logits, if only_logits is this load and one sum: score * scale
  // + an element selected by the row and, as last index, the key's position; else -1.
  i32 added;
  bool scales;             // raw scores become natural logits here, with the soft cap
  bool diagonals_by_head;  // diagonal values depend on the head
  bool reads_kv_rows;
  // Row values that the mask reads: rows in which these are equal see the same keys.
  i32 num_mask_rows;
  i32 mask_rows[kMaxInstructions];  // values of rows
  bool mask_has_diagonals;
  // Values of a gradient, all available after `logits`.
  i32 score;  // d logit / d score; -1: 1
  i32 num_elements;
  struct {
    i32 operand, partial, rank;
    i32 indices[kMaxOperandRank];  // values
  } elements[kMaxDerivatives];
};

// Compiles a program that is present. capped: there is a soft cap, after which scores are natural.
// gradient: that of the backward pass, whose program it is, or null.
void MakeVariantCode(const VariantProgram& program, bool capped, const VariantGradient* gradient,
                     VariantCode* code);

}  // namespace jax_attn
