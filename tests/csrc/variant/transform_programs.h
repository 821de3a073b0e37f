// Transforms that tests run in emulation, as jax_attn/_variant/transform.py would write them.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "variant/transform_words.h"

namespace jax_attn {
namespace {

struct NamedTransform {
  const char* name;  // of the generated struct
  Transform transform;
};

// The operands of all of them: a table of rows, weights, a mask and places.
VariantProgram TransformOperands() {
  VariantProgram program = {};
  program.normalizes = 1;
  program.logits = program.visible = -1;
  program.num_operands = 4;
  program.operands[0] = {kOperandF32, 2};
  program.operands[1] = {kOperandBF16, 1};
  program.operands[2] = {kOperandBool, 1};
  program.operands[3] = {kOperandI32, 1};
  return program;
}

class TransformMaker {
 public:
  explicit TransformMaker(i32 dim) { t_.dim = dim; }

  TransformLanes Add(i32 op, i32 type, i32 length, const std::vector<TransformLanes>& args = {},
                     i32 own = 0) {
    TransformLine x = {};
    x.op = op;
    x.type = type;
    x.length = length;
    x.own = own;
    x.num_args = static_cast<i32>(args.size());
    for (i32 a = 0; a < x.num_args; ++a) x.args[a] = args[a];
    t_.lines.push_back(x);
    return {static_cast<i32>(t_.lines.size()) - 1, 0, length};
  }
  TransformLanes F32(float x) {
    i32 bits;
    std::memcpy(&bits, &x, sizeof(bits));
    return Add(kOpConst, kVariantF32, 1, {}, bits);
  }
  TransformLanes I32(i32 x) { return Add(kOpConst, kVariantI32, 1, {}, x); }
  TransformLanes Binary(i32 op, TransformLanes a, TransformLanes b) {
    return Add(op, t_.lines[a.value].type, std::max(a.length, b.length), {a, b});
  }
  i32 Pool(const std::vector<i32>& words) {
    t_.pool.insert(t_.pool.end(), words.begin(), words.end());
    return static_cast<i32>(t_.pool.size() - words.size());
  }
  static TransformLanes Part(TransformLanes x, i32 offset, i32 length) {
    return {x.value, x.offset + offset, length};
  }

  // Through the words, which also checks it.
  Transform Done(const std::vector<TransformLanes>& results) {
    t_.results = results;
    const std::vector<int64_t> words = EncodeTransform(t_);
    const VariantProgram program = TransformOperands();
    Transform read;
    const Status s =
        DecodeTransform(words.data(), words.size(), program.operands, program.num_operands, &read);
    if (!s.ok()) {
      std::fprintf(stderr, "%s\n", s.message.c_str());
      std::abort();
    }
    return read;
  }

 private:
  Transform t_;
};

// RoPE: halves rotate by rows of a table, cos in its first half.
Transform RopeOf(i32 dim) {
  TransformMaker m(dim);
  const i32 half = dim / 2;
  const auto x = m.Add(kVectorX, kVariantF32, dim);
  const auto a = m.Part(x, 0, half), b = m.Part(x, half, half);
  const auto pos = m.Add(kOpKvPos, kVariantI32, 1);
  const auto lanes = m.Add(kVectorIota, kVariantI32, dim);
  const auto cos = m.Add(kOpLoad, kVariantF32, half, {pos, m.Part(lanes, 0, half)});
  const auto sin = m.Add(kOpLoad, kVariantF32, half, {pos, m.Part(lanes, half, half)});
  const auto low = m.Binary(kOpSub, m.Binary(kOpMul, a, cos), m.Binary(kOpMul, b, sin));
  const auto high = m.Binary(kOpAdd, m.Binary(kOpMul, b, cos), m.Binary(kOpMul, a, sin));
  return m.Done({low, high});
}

// RMS norm with weights of bf16.
Transform NormOf(i32 dim) {
  TransformMaker m(dim);
  const auto x = m.Add(kVectorX, kVariantF32, dim);
  const auto sum = m.Add(kVectorSum, kVariantF32, 1, {m.Binary(kOpMul, x, x)});
  const auto mean = m.Binary(kOpDiv, sum, m.F32(static_cast<float>(dim)));
  const auto inverse = m.Add(kOpRsqrt, kVariantF32, 1, {m.Binary(kOpAdd, mean, m.F32(1e-6f))});
  const auto lanes = m.Add(kVectorIota, kVariantI32, dim);
  const auto weights = m.Add(kOpLoad, kVariantF32, dim, {lanes}, 1);
  return m.Done({m.Binary(kOpMul, m.Binary(kOpMul, x, inverse), weights)});
}

// Everything else: picks of two values, lanes from the midst of a register, one lane for all,
// bools, tables, gathers, facts, and results that begin within a register.
Transform OddOf(i32 dim) {
  TransformMaker m(dim);
  const i32 half = dim / 2, rest = dim - half - 8;
  const auto x = m.Add(kVectorX, kVariantF32, dim);
  const auto part = m.Add(kVectorX, kVariantF32, half, {}, 5);
  std::vector<i32> order, signs;
  for (i32 i = 0; i < dim; ++i) {
    order.push_back(i % 2 == 0 ? dim - 1 - i : dim + i % half);  // of x and part
    signs.push_back(i % 3 == 0);
  }
  const auto picked = m.Add(kVectorPick, kVariantF32, dim, {x, part}, m.Pool(order));
  const auto which = m.Add(kVectorTable, kVariantBool, dim, {}, m.Pool(signs));
  const auto chosen = m.Add(kOpSelect, kVariantF32, dim, {which, x, picked});
  const auto row = m.Add(kOpKvRow, kVariantI32, 1);
  const auto place = m.Add(kOpLoad, kVariantI32, 1, {row}, 3);
  const auto lanes = m.Add(kVectorIota, kVariantI32, dim + 11);
  const auto far = m.Binary(kOpMul, m.Part(lanes, 11, dim), m.I32(7));
  const auto gathered = m.Add(kOpLoad, kVariantF32, dim, {place, far});
  const auto seen = m.Add(kOpLoad, kVariantBool, 1, {m.Add(kOpKvPos, kVariantI32, 1)}, 2);
  const auto facts = m.Binary(
      kOpSub, m.Add(kOpRequest, kVariantI32, 1),
      m.Binary(kOpAdd, m.Add(kOpKvHead, kVariantI32, 1),
               m.Binary(kOpRem, m.Add(kOpKvLen, kVariantI32, 1), m.Add(kOpQLen, kVariantI32, 1))));
  const auto number = m.Add(kOpCast, kVariantF32, 1, {facts});
  const auto factor =
      m.Add(kOpSelect, kVariantF32, 1, {seen, m.Binary(kOpMul, number, m.F32(0.03f)), m.F32(0.5f)});
  const auto largest = m.Add(kVectorLargest, kVariantF32, 1, {m.Part(x, 9, half)});
  const auto smallest = m.Add(kVectorSmallest, kVariantF32, 1, {x});
  const auto sum = m.Binary(kOpAdd, m.Binary(kOpMul, largest, m.F32(0.1f)),
                            m.Binary(kOpMul, smallest, m.Part(x, 37, 1)));
  const auto all = m.Binary(kOpAdd, m.Binary(kOpMul, chosen, gathered), factor);
  const auto shifted = m.Binary(kOpAdd, m.Part(all, 3, half), sum);
  const auto tanh = m.Add(kOpTanh, kVariantF32, dim, {all});
  return m.Done({m.Part(tanh, 1, 8), shifted, m.Part(tanh, 7, rest)});
}

std::vector<NamedTransform> Transforms() {
  return {{"Rope64", RopeOf(64)},   {"Rope128", RopeOf(128)}, {"Norm64", NormOf(64)},
          {"Norm128", NormOf(128)}, {"Odd64", OddOf(64)},     {"Odd104", OddOf(104)}};
}

}  // namespace
}  // namespace jax_attn
