// Which instruction set the CPU kernels use: the best one this machine has, unless told otherwise.
#pragma once

#include <string>
#include <vector>

#include "status.h"

namespace jax_attn {

// Names: "baseline", "avx2", "avx512", "avx512_bf16", "amx" on x86-64; "baseline", "neon" on
// AArch64. Best last; only those this build contains and this machine runs.
std::vector<std::string> SupportedCpuIsas();

// The one in use.
std::string CpuIsa();

// Uses `name` from the next call on; "" goes back to the best. An error names what is supported.
Status SetCpuIsa(const std::string& name);

}  // namespace jax_attn
