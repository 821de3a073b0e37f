// Matmuls with quantized matrices on Hopper, without a GPU: cuda/sm90/quantized_product.cuh runs in
// emulation.
#include "emulation/cuda_emulation.h"
#include "emulation/cuda_emulation_sm90.h"
// The headers above stand in for CUDA and must come first.
#include "cuda/quantized_product_cases.h"
#include "cuda/sm90/quantized_product.cuh"

namespace jax_attn {
namespace {

template <class Traits>
void RunCase(const Case& c) {
  RunCase<Traits, HopperQuantizedProductBody>(c);
}

template <int kFormat>
void RunFormat() {
  constexpr bool kIsInt4 = kFormat == kInt4Weights;
  for (const bool is_exact : {true, false}) {
    // Fewer rows, columns and depth than a tile; whole tiles; partial tiles.
    RunCase<TraitsOf<kFormat, 8, 128, 1>>({1, 64, 16, 64, 1, kIsInt4, true, is_exact});
    RunCase<TraitsOf<kFormat, 8, 128, 1>>({8, 200, 144, 128, 2, kIsInt4, true, is_exact});
    RunCase<TraitsOf<kFormat, 16, 128, 1>>({9, 448, 96, 128, 3, kIsInt4, true, is_exact});
    RunCase<TraitsOf<kFormat, 8, 128, 1>>({5, 168, 64, 168, 1, false, false, is_exact});
    RunCase<TraitsOf<kFormat, 16, 128, 2>>({13, 712, 112, 32, 3, kIsInt4, false, is_exact});
    RunCase<TraitsOf<kFormat, 32, 128, 2>>({40, 136, 48, 32, 5, kIsInt4, true, is_exact});
    RunCase<TraitsOf<kFormat, 64, 128, 1>>({65, 256, 128, 128, 2, kIsInt4, true, is_exact});
  }
  // The tiles on GPUs.
  RunCase<TraitsOf<kFormat, 64, 256, 1>>({64, 1024, 272, 128, 1, kIsInt4, false, true});
  RunCase<TraitsOf<kFormat, 8, 256, 2>>({3, 1056, 448, 32, 2, kIsInt4, true, true});
}

}  // namespace
}  // namespace jax_attn

int main() {
  using namespace jax_attn;
  RunFormat<kInt4Weights>();
  RunFormat<kE2m1Weights>();
  RunFormat<kE4m3Weights>();
  if (g_failures == 0) std::printf("quantized_product_sm90_test: ok\n");
  return g_failures != 0;
}
