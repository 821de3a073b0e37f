// The exponentials of kernels with tiles, which no tile takes part in: they need AVX-512 alone.
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
