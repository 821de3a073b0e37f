// NVRTC compiles a translation unit to a cubin for one exact architecture.
#pragma once

#include <string>
#include <vector>

#include "jit/kernel_source.h"
#include "status.h"

namespace jax_attn {

// Everything that changes the binary.
struct KernelIdentity {
  std::string op;                // "attention"
  std::vector<KeyField> fields;  // the kernel struct's
  std::string sources;  // hash of the device sources in this extension, the translation unit and
                        // the options
  std::string nvrtc;    // its version and build: "13.5 <build IDs>"
};
KernelIdentity IdentityFor(const KernelSource& source, const std::string& nvrtc);
// With the NVRTC in use.
Status Identify(const KernelSource& source, KernelIdentity* identity);

// Hash of `sources` and `nvrtc`. `sources` contains what the fields say.
std::string CacheKey(const KernelIdentity& identity);

// Takes include files from the sources inside this extension, never from the file system. `log`
// gets NVRTC's output, also on success.
Status Compile(const KernelSource& source, std::string* cubin, std::string* log);

}  // namespace jax_attn
