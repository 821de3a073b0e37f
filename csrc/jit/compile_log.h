// Why a kernel was compiled, for people: JAX_ATTN_LOG_COMPILE=1 prints a line for each kernel that
// is compiled or read from the disk cache.
#pragma once

#include <string>
#include <vector>

#include "jit/compiler.h"

namespace jax_attn {

void SetCompileLog(bool is_on);
bool CompileLogIsOn();

// An identity as lines of text, for the disk cache, and back. Lines of other kinds are skipped, and
// without these lines the identity is empty.
std::string DescribeIdentity(const KernelIdentity& identity);
KernelIdentity ParseIdentity(const std::string& lines);

// How `kernel` differs from the nearest of `cached`, the one of the same operation with the fewest
// other fields: "nearest key differs in: dtype f16 -> bf16". If no field differs, it is the sources
// or NVRTC.
std::string DescribeNearest(const KernelIdentity& kernel,
                            const std::vector<KernelIdentity>& cached);

// Print a line on stderr, at once, so that lines of several threads stay whole.
void LogCompiled(const std::string& name, double milliseconds, const std::string& why);
void LogDiskHit(const std::string& name, double milliseconds);

}  // namespace jax_attn
