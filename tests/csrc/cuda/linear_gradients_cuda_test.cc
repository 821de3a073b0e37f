// Gradients of linear attention by the portable loop, without a GPU.
#include "emulation/cuda_emulation.h"
// The header above stands in for CUDA and must come first.
#include "cuda/linear_chunks_cases.h"
#include "cuda/sm80/linear_attention.cuh"

int main() {
  using namespace jax_attn;
  RunLinearGradientCases<LinearChunksBody>();
  if (g_failures == 0) std::printf("linear_gradients_cuda_test: ok\n");
  return g_failures != 0;
}
