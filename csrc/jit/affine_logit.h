// Logits that are a multiple of the score and a bias, as most that users write are.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "variant/program.h"

namespace jax_attn {

// A number that a row has once: absent, a constant, or the name of a variable of Row's function.
struct RowNumber {
  enum Kind { kAbsent, kConstant, kNamed };
  Kind kind = kAbsent;
  float constant = 0.0f;
  std::string name;

  explicit operator bool() const { return kind != kAbsent; }
};

// A value as
//   factor * score + term + slope * place + sum over rest of (number * value)
// where place is the key's within the tile, and values of `rest` depend on keys, but not on the
// score.
struct AffineValue {
  bool is_affine = false;
  RowNumber factor, term, slope;
  std::vector<std::pair<i32, RowNumber>> rest;
};

// The form of a program's logit, and what it takes to compute its numbers.
struct AffineLogit {
  AffineValue value;       // is_affine: with a factor
  std::string statements;  // of Row's function, behind those of the program's values
};
AffineLogit FindAffineLogit(const VariantProgram& program);

// --- what a program says of positions ---

// A value of i32 that is kv_pos, and a position of the row that is added to it, or from which it is
// taken, or that is taken from it. The other position is a fact of the row, such as q_pos or a
// length, a small constant, or the sum or difference of two of these: far from what wraps around.
struct KeyPosition {
  i32 sign = 0;              // of kv_pos; 0: the value is none
  i32 other = -1;            // a value, or -1
  bool takes_other = false;  // kv_pos - other
};
KeyPosition FindKeyPosition(const VariantProgram& program, i32 value);

// Text of such a value at the key `key`. other: text of the other position.
std::string TextAtKey(const KeyPosition& position, const std::string& other,
                      const std::string& key);

// C++ text of numbers.
std::string HexText(i32 bits);
std::string FloatText(float x);

}  // namespace jax_attn
