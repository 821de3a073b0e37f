// Variants in the MLA kernels of sm_90a, without a GPU.
#include "emulation/cuda_emulation.h"
#include "emulation/cuda_emulation_sm90.h"
// The headers above stand in for CUDA and must come first.
#include "cuda/attention_cuda_cases.h"
#include "emulation/sm90_kernels.h"
#include "variant/variant_cuda_cases.h"

int main() {
  using namespace jax_attn;
  // With more than 32 heads only functions of logits are supported, see select/cuda.cc.
  RunVariant<Sm90Mla, With<MlaShapeOf<128, 128, 48, 16, false, true, true>, variant::AlibiVariant>>(
      {{.name = "mla, 48 heads, alibi, soft cap",
        .requests = {{1, 330}, {1, 64}, {2, 200}, {1, 0}},
        .soft_cap = 3.0,
        .num_ctas = 2,
        .kv_heads = 1,
        .kv_split = 128,
        .qo_heads = 48},
       Alibi()},
      1);
  RunVariant<Sm90Mla, With<MlaShapeOf<192, 128, 39, 1, false, true, false>, variant::CapVariant>>(
      {{.name = "mla, 77 heads in 2 blocks, soft cap by hand",
        .requests = {{1, 130}, {3, 90}},
        .kv_heads = 2,
        .qo_heads = 77,
        .sharpness = 5},
       Cap()},
      2);
  // Step lists, also with splits: consumers alternate from an item's first step on. Only the last
  // two rows of the first case see non-finite values.
  RunVariant<Sm90Mla,
             Listed<With<MlaShapeOf<128, 128, 48, 1, false, true, false>, variant::AlibiVariant>>>(
      {{.name = "mla, 48 heads, lists, alibi, infinities",
        .requests = {{5, 7}, {1, 776}, {2, 400}, {1, 0}, {1, 64}, {3, 250}},
        .infinite_values = true,
        .num_ctas = 2,
        .kv_heads = 1,
        .qo_heads = 48},
       Alibi(),
       60,
       0.03f,
       64},
      3);
  RunVariant<Sm90Mla,
             Listed<With<MlaShapeOf<192, 128, 39, 16, true, true, false>, variant::CapVariant>>>(
      {{.name = "mla, 77 heads in 2 blocks, lists, window, splits",
        .requests = {{8, 71}, {1, 500}, {3, 290}, {1, 1000}},
        .window_left = 700,
        .kv_heads = 2,
        .kv_split = 192,
        .qo_heads = 77,
        .sharpness = 5},
       Cap(),
       60,
       0.03f,
       64},
      4);
  // Rows of float8 with lists, whose steps the producer must know ahead.
  RunVariant<Sm90MlaDecode, Listed<E4m3Of<With<MlaShapeOf<192, 128, 5, 16, false, true, false>,
                                               variant::DocumentsVariant>,
                                          false>>>(
      {{.name = "mla, 5 heads, lists, documents, e4m3",
        .requests = {{1, 130}, {1, 1}, {4, 90}, {0, 9}, {1, 0}, {2, 200}},
        .kv_heads = 1,
        .kv_split = 128,
        .qo_heads = 5},
       Documents(),
       2},
      6);
  return RunVariantMlaCases<Sm90MlaDecode, 192>();
}
