// Shared memory that a kernel may use.
#pragma once

#include "cuda/common/math.cuh"

namespace jax_attn {

// Bytes of one CTA when `num_ctas` share a multiprocessor, which needs 1 KB more for each CTA.
constexpr __host__ __device__ int CtaSmemBudget(int arch, int num_ctas) {
  const int sm_kb = arch == 80 || arch == 87 ? 164 : arch >= 90 && arch < 120 ? 228 : 100;
  return (sm_kb / num_ctas - 1) * 1024;
}

}  // namespace jax_attn
