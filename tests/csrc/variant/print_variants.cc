// Writes the text of variant_programs.h's programs as kernels get it.
#include <cstdio>

#include "jit/transform_source.h"
#include "jit/variant_source.h"
#include "variant/transform_programs.h"
#include "variant/variant_programs.h"

int main() {
  using namespace jax_attn;
  std::printf(
      "#pragma once\n\n#include \"cuda/common/transform.cuh\"\n\nnamespace jax_attn {\nnamespace "
      "variant {\n\n");
  for (const NamedProgram& x : VariantPrograms()) {
    std::printf("%s\n", VariantText(x.program, x.name).c_str());
  }
  for (const NamedGradient& x : VariantGradients()) {
    std::printf("%s\n", VariantText(x.gradient, x.name).c_str());
  }
  const VariantProgram operands = TransformOperands();
  for (const NamedTransform& x : Transforms()) {
    std::printf("%s\n", TransformText(x.transform.View(operands), x.name).c_str());
  }
  std::printf("}  // namespace variant\n}  // namespace jax_attn\n");
  return 0;
}
