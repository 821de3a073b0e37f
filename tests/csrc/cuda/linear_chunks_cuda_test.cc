// The portable chunked loop of linear attention, without a GPU.
#include "emulation/cuda_emulation.h"
// The header above stands in for CUDA and must come first.
#include "cuda/linear_chunks_cases.h"
#include "cuda/sm80/linear_attention.cuh"

int main() {
  using namespace jax_attn;
  RunLinearCases<LinearChunksBody>();
  RunLinearF16Cases<LinearChunksBody>();
  if (g_failures == 0) std::printf("linear_chunks_cuda_test: ok\n");
  return g_failures != 0;
}
