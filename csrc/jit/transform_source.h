// Writes a transform of K or V as CUDA C++.
#pragma once

#include <string>

#include "variant/transform.h"

namespace jax_attn {

// Returns the text of `struct <name>`, with one operation of cuda/common/variant.cuh or
// transform.cuh a line and register:
//   Run(params, facts, lane, x)  a warp transforms a row; lane l has its elements l + 32 j in x[j]
// The transform must be present, and without products.
std::string TransformText(const TransformView& transform, const std::string& name);

}  // namespace jax_attn
