#if defined(__x86_64__)
#include "cpu/simd/simd_avx512.h"
#include "cpu/simd_math_cases.h"

int main() {
  using namespace jax_attn;
  return Report("avx512", __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq"),
                CheckMath<Avx512>);
}
#else
int main() {}
#endif
