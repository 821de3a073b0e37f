// The exponentials of kernels with tiles. They use no tile, so AVX-512 is enough to run them.
#if defined(__x86_64__)
#include "cpu/simd/simd_amx.h"
#include "cpu/simd_math_cases.h"

int main() {
  using namespace jax_attn;
  return Report("amx", __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi"),
                CheckMath<Amx>);
}
#else
int main() {}
#endif
