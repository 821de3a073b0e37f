// Transforms of K and V in the portable attention kernel of csrc/cuda, without a GPU: the results
// of the CPU kernels, which tests/variant/test_transforms.py compares with the users' functions.
#include "emulation/cuda_emulation.h"
// The header above stands in for CUDA and must come first.
#include "emulation/sm80_kernels.h"
#include "printed_variants.h"
#include "variant/transform_programs.h"
#include "variant/variant_operands.h"

namespace jax_attn {
namespace {

template <class Shape, class K, class V>
struct Transformed : Shape {
  using TransformOfK = K;
  using TransformOfV = V;
};

const Transform& Find(const char* name) {
  static const std::vector<NamedTransform> all = Transforms();
  for (const NamedTransform& x : all) {
    if (std::string(x.name) == name) return x.transform;
  }
  std::abort();
}

#define JAX_ATTN_GIVEN(name)                                     \
  template <>                                                    \
  struct TransformGiven<variant::name> {                         \
    static void Set(VariantProgram* program, Transform* given) { \
      *program = TransformOperands();                            \
      *given = Find(#name);                                      \
    }                                                            \
  };
JAX_ATTN_GIVEN(Rope64)
JAX_ATTN_GIVEN(Rope128)
JAX_ATTN_GIVEN(Norm64)
JAX_ATTN_GIVEN(Norm128)
JAX_ATTN_GIVEN(Odd64)
JAX_ATTN_GIVEN(Odd104)
#undef JAX_ATTN_GIVEN

template <class Shape, class K, class V>
void Run(const Case& c, unsigned seed) {
  std::mt19937 random(seed);
  const auto data = MakeVariantOperands(TransformOperands(), 100, random, g_operands);
  RunCase<Sm80Kernel, Transformed<Shape, K, V>>(c, seed);
}

int RunAll() {
  using namespace variant;
  const std::vector<Request> mixed = {{1, 130}, {45, 170}, {3, 5}, {1, 64}, {70, 90}, {1, 257}};
  Run<ShapeOf<64, 64, 4, 16, false, true, false>, Rope64, NoTransform>(
      {.name = "RoPE at load", .requests = mixed, .sinks = true}, 1);
  Run<ShapeOf<128, 128, 4, 5, true, true, false>, Rope128, Norm128>(
      {.name = "RoPE, norm of values, page 5, window", .requests = mixed, .window_left = 40}, 2);
  Run<Fresh<ShapeOf<64, 64, 4, 16, false, true, false>>, Odd64, Norm64>(
      {.name = "odd, fresh", .requests = mixed, .num_ctas = 2}, 3);
  Run<ShapeOf<64, 104, 3, 7, false, true, false>, NoTransform, Odd104>(
      {.name = "odd values of 104, NaN", .requests = mixed, .nan_values = true, .kv_split = 64}, 4);
  Run<ShapeOf<128, 128, 4, 16, false, true, false>, Rope128, NoTransform>({.name = "RoPE, a forest",
                                                                           .requests = kForest,
                                                                           .num_ctas = 2,
                                                                           .prefix = 192,
                                                                           .half_prefix = 64},
                                                                          5);
  if (g_failures > 0) std::printf("%d failures\n", g_failures);
  return g_failures > 0;
}

}  // namespace
}  // namespace jax_attn

int main() { return jax_attn::RunAll(); }
