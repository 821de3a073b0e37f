// Which instruction set the CPU kernels use: the best one this machine has, unless told otherwise.
#pragma once

#include <string>
#include <vector>

#include "spec.h"
#include "status.h"

namespace jax_attn {

// Names: "baseline", "avx2", "avx512", "avx512_bf16", "amx" on x86-64; "baseline", "neon" on
// AArch64. Best last; only those this build contains and this machine runs.
std::vector<std::string> SupportedCpuIsas();

// The instruction set in use. Items of few rows may use another one, see DescribeCpuIsas.
std::string CpuIsa();

// Describes which instruction sets an attention call uses, and why. select/devices.cc chooses,
// unless SetCpuIsa did.
std::string DescribeCpuIsas(const AttentionSpec& spec);

// Uses only `name` from the next call on; "" restores the default choice of select/. An error lists
// the supported names.
Status SetCpuIsa(const std::string& name);

}  // namespace jax_attn
