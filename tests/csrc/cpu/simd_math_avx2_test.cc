#if defined(__x86_64__)
#include "cpu/simd/simd_avx2.h"
#include "cpu/simd_math_cases.h"

int main() {
  using namespace jax_attn;
  return Report("avx2", __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"),
                CheckMath<Avx2>);
}
#else
int main() {}
#endif
