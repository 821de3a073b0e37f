// Every handler symbol, for bindings.cc.
#pragma once

#include <vector>

#include "xla/ffi/api/c_api.h"

namespace jax_attn {

// One custom call target. CUDA handlers are staged: kernels compile at instantiate, load on their
// device at initialize, and execute only launches, so that XLA may capture it into a command
// buffer.
struct Target {
  const char* name;
  const char* platform;  // "cpu" or "CUDA", as jax.ffi.register_ffi_target wants it
  XLA_FFI_Handler* instantiate;
  XLA_FFI_Handler* initialize;
  XLA_FFI_Handler* execute;
};

extern const std::vector<Target> kPlanTargets;
extern const std::vector<Target> kAttentionTargets;
extern const std::vector<Target> kBackwardTargets;
extern const std::vector<Target> kAppendTargets;
extern const std::vector<Target> kMergeTargets;
extern const std::vector<Target> kAllReduceTargets;
extern const std::vector<Target> kProductTargets;
extern const std::vector<Target> kLinearAttentionTargets;
extern const std::vector<Target> kLoraTargets;
extern const std::vector<Target> kQuantizedGroupsTargets;
extern const std::vector<Target> kQuantizedProductTargets;
extern const std::vector<Target> kGroupedProductTargets;
extern const std::vector<Target> kShortConvolutionTargets;

}  // namespace jax_attn
