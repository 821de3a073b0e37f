// Hopper's chunked loop of linear attention, without a GPU.
#include "emulation/cuda_emulation.h"
#include "emulation/cuda_emulation_sm90.h"
// The headers above stand in for CUDA and must come first.
#include "cuda/linear_chunks_cases.h"
#include "cuda/sm90/linear_attention.cuh"

int main() {
  using namespace jax_attn;
  RunLinearCases<HopperLinearChunksBody>();
  if (g_failures == 0) std::printf("linear_chunks_sm90_test: ok\n");
  return g_failures != 0;
}
