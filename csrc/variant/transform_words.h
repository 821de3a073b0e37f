// The words of a transform, its form in attributes, files and Python:
//
//   kTransformVersion, dim, num_lines, num_results, num_pool,
//   (op, type, length, own, num_args, (value, offset, length)[kMaxTransformArgs]) of each line,
//   (value, offset, length) of each result, the pool
//
// No words mean that vectors stay as they are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "status.h"
#include "variant/transform.h"

namespace jax_attn {

inline constexpr int64_t kTransformVersion = 1;

struct Transform {
  i32 dim = 0;
  std::vector<TransformLine> lines;
  std::vector<TransformLanes> results;
  std::vector<i32> pool;

  bool present() const { return dim > 0; }
  TransformView View(const VariantProgram& program) const;  // valid as long as both are
};

// Accepts words from any source. In an accepted transform every index is in range and every type is
// right. operands: those of the variant.
Status DecodeTransform(const int64_t* words, size_t num_words, const ProgramOperand* operands,
                       i32 num_operands, Transform* transform);
std::vector<int64_t> EncodeTransform(const Transform& transform);

// Whether a value differs between the rows of a shared prefix.
bool NeedsOwnRows(const Transform& transform);

}  // namespace jax_attn
