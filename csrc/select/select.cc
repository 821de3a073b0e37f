#include "select/select.h"

namespace jax_attn {

KernelConfig SelectAttention(const AttentionSpec& spec) {
  KernelConfig config;
  if (spec.arch == 0) {
    SelectCpu(spec, &config);
  } else {
    SelectCuda(spec, &config);
  }
  return config;
}

}  // namespace jax_attn
