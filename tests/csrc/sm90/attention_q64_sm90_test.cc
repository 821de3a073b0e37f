// The attention kernel of sm_90a with small tiles of 64 rows, without a GPU.
#include "emulation/cuda_emulation.h"
#include "emulation/cuda_emulation_sm90.h"
// The headers above stand in for CUDA and must come first.
#include "sm90/attention_sm90_cases.h"

int main() {
  using namespace jax_attn;
  RunEarlyCases<Sm90Kernel<true, 64>>();
  RunE4m3Cases<Sm90Kernel<true, 64>>();
  return RunAllCases<Sm90Kernel<true, 64>>();
}
