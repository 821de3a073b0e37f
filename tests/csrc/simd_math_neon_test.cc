#if defined(__aarch64__)
#include "cpu/simd_neon.h"
#include "simd_math_cases.h"

int main() {
  using namespace jax_attn;
  return Report("neon", true, CheckMath<Neon>);
}
#else
int main() {}
#endif
