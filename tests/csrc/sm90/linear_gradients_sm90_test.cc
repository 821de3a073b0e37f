// Gradients of linear attention by Hopper's loop, without a GPU.
#include "emulation/cuda_emulation.h"
#include "emulation/cuda_emulation_sm90.h"
// The headers above stand in for CUDA and must come first.
#include "cuda/linear_chunks_cases.h"
#include "cuda/sm90/linear_attention.cuh"

int main() {
  using namespace jax_attn;
  RunLinearGradientCases<HopperLinearChunksBody>();
  if (g_failures == 0) std::printf("linear_gradients_sm90_test: ok\n");
  return g_failures != 0;
}
