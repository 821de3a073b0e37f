// NVRTC: a translation unit in, a cubin for its exact architecture out.
#pragma once

#include <string>

#include "jit/kernel_source.h"
#include "status.h"

namespace jax_attn {

// Hash of all that changes the binary: the device sources in this extension, the translation unit,
// the options and which NVRTC it is.
std::string CacheKeyFor(const KernelSource& source, const std::string& nvrtc);
// With the version and the build of the NVRTC in use.
Status CacheKey(const KernelSource& source, std::string* key);

// Includes are answered from the sources inside this extension, never from the file system.
// `log` gets NVRTC's output, also on success.
Status Compile(const KernelSource& source, std::string* cubin, std::string* log);

}  // namespace jax_attn
