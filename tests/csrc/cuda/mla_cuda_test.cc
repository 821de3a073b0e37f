// The portable MLA kernel of csrc/cuda, without a GPU.
#include "emulation/cuda_emulation.h"
// The header above stands in for CUDA and must come first.
#include "emulation/sm80_kernels.h"

int main() {
  using namespace jax_attn;
  return RunMlaCases<Sm80Mla, 144, 176>() | RunMlaCases<Sm86Mla, 144, 176>();
}
