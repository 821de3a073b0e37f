// The decode kernel of sm_90a, without a GPU.
#include "emulation/cuda_emulation.h"
#include "emulation/cuda_emulation_sm90.h"
// The headers above stand in for CUDA and must come first.
#include "sm90/attention_sm90_cases.h"

int main() {
  using namespace jax_attn;
  return RunAllCases<Sm90Kernel<false, 32, 1>>();
}
