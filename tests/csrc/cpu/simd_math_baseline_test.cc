#include "cpu/simd/simd_baseline.h"
#include "cpu/simd_math_cases.h"

int main() {
  using namespace jax_attn;
  return Report("baseline", true, CheckMath<Baseline>);
}
