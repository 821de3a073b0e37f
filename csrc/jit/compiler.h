// NVRTC: a translation unit in, a cubin for its exact architecture out.
#pragma once

#include <string>
#include <vector>

#include "jit/kernel_source.h"
#include "status.h"

namespace jax_attn {

// All that changes the binary.
struct KernelIdentity {
  std::string op;                // "attention"
  std::vector<KeyField> fields;  // of the kernel struct
  std::string sources;  // hash of the device sources in this extension, the translation unit and
                        // the options
  std::string nvrtc;    // its version and build: "13.5 <build IDs>"
};
KernelIdentity IdentityFor(const KernelSource& source, const std::string& nvrtc);
// With the NVRTC in use.
Status Identify(const KernelSource& source, KernelIdentity* identity);

// Hash of `sources`, which says everything that `fields` say, and `nvrtc`.
std::string CacheKey(const KernelIdentity& identity);

// Includes are answered from the sources inside this extension, never from the file system.
// `log` gets NVRTC's output, also on success.
Status Compile(const KernelSource& source, std::string* cubin, std::string* log);

}  // namespace jax_attn
