#include "select/select.h"

namespace jax_attn {

void SettleHeadBlocks(AttentionSpec* spec) {
  if (!spec->mla) return;
  // CPU: one block, so that each kv block is packed once for all heads.
  const int64_t most_heads = spec->arch == 0 ? spec->num_qo_heads : MostHeadsOfBlock(*spec);
  spec->num_kv_heads = (spec->num_qo_heads + most_heads - 1) / most_heads;
}

KernelConfig SelectAttention(const AttentionSpec& spec, Reasons* reasons,
                             const VariantProgram* program, bool transforms) {
  KernelConfig config;
  if (spec.arch == 0) {
    SelectCpu(spec, &config, reasons);
  } else {
    SelectCuda(spec, &config, reasons, program, transforms);
  }
  return config;
}

}  // namespace jax_attn
