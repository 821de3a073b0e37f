// Finds logits that are a multiple of the score plus a bias, as most of users' are.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "variant/program.h"

namespace jax_attn {

// A number computed once per row: absent, a constant, or the name of a variable in Row's function.
struct RowNumber {
  enum Kind { kAbsent, kConstant, kNamed };
  Kind kind = kAbsent;
  float constant = 0.0f;
  std::string name;

  explicit operator bool() const { return kind != kAbsent; }
};

// A value of the form
//   factor * score + term + slope * offset + sum over rest of (number * value)
// with the key's offset in the tile. The values of `rest` depend on keys, but not on the score.
struct AffineValue {
  bool is_affine = false;
  RowNumber factor, term, slope;
  std::vector<std::pair<i32, RowNumber>> rest;
};

// The form of a program's logit and the statements that compute its numbers.
struct AffineLogit {
  AffineValue value;       // if is_affine, it has a factor
  std::string statements;  // in Row's function, after those of the program's values
};
AffineLogit FindAffineLogit(const VariantProgram& program);

// --- positions in a program ---

// An i32 value of the form kv_pos, other + kv_pos, other - kv_pos or kv_pos - other. `other` is a
// fact of the row such as q_pos or a length, a small constant, or the sum or difference of two of
// these, so the value does not wrap around.
struct KeyPosition {
  i32 sign = 0;              // of kv_pos; 0: the value has another form
  i32 other = -1;            // a value of the program, or -1
  bool takes_other = false;  // the form is kv_pos - other
};
KeyPosition FindKeyPosition(const VariantProgram& program, i32 value);

// The text of such a value at the key `key`. other: text of `other`.
std::string TextAtKey(const KeyPosition& position, const std::string& other,
                      const std::string& key);

}  // namespace jax_attn
