// The attention kernel of sm_90a, without a GPU: keys and values copied row by row, and by TMA
// where its tiles divide the pages.
#include "emulation/cuda_emulation.h"
#include "emulation/cuda_emulation_sm90.h"
// The headers above stand in for CUDA and must come first.
#include "sm90/attention_sm90_cases.h"

int main() {
  using namespace jax_attn;
  RunEarlyCases<Sm90Kernel<false, 32>>();
  RunEarlyCases<Sm90Kernel<true, 32>>();
  RunE4m3Cases<Sm90Kernel<false, 32>>();
  RunE4m3Cases<Sm90Kernel<true, 32>>();
  return RunAllCases<Sm90Kernel<false, 32>>() | RunAllCases<Sm90Kernel<true, 32>>();
}
