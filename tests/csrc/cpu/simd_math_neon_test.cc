#if defined(__aarch64__)
#include "cpu/simd/simd_neon.h"
#include "cpu/simd_math_cases.h"

int main() {
  using namespace jax_attn;
  return Report("neon", true, CheckMath<Neon>);
}
#else
int main() {}
#endif
