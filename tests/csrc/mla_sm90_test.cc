// The MLA kernels of sm_90a, without a GPU.
#include "cuda_emulation.h"
#include "cuda_emulation_sm90.h"
// The above stand in for CUDA and come first.
#include "attention_cuda_cases.h"
#include "cuda/sm90/mla.cuh"
#include "cuda/sm90/mla_decode.cuh"

namespace jax_attn {
namespace {

// As select/cuda.cc has it.
struct Sm90Mla : NoTensorMaps {
  template <class Shape>
  struct Traits : Shape {
    static constexpr int kArch = 90;
    static constexpr int kNumTiles = 1, kTileQ0 = 64, kTileQ1 = 0, kTileQ2 = 0;
    static constexpr int kTileKv = 64, kNumWarps = 12, kNumStages = 0;
  };
  template <class Shape>
  using Body = HopperMlaBody<Traits<Shape>>;
};

// Likewise.
struct Sm90MlaDecode : NoTensorMaps {
  template <class Shape>
  struct Traits : Shape {
    static constexpr int kArch = 90;
    static constexpr int kNumTiles = Shape::kGroupSize > 16 ? 1 : 2;
    static constexpr int kTileQ0 = Shape::kGroupSize > 16 ? 32 : 16;
    static constexpr int kTileQ1 = kNumTiles == 2 ? 32 : 0, kTileQ2 = 0;
    static constexpr int kTileKv = 64, kNumWarps = 12, kNumStages = 0;
  };
  template <class Shape>
  using Body = HopperMlaDecodeBody<Traits<Shape>>;
};

// Numbers of heads and page sizes, with one query token and several.
template <class Kernel, int kHeads, int kPage>
void RunDecodeCase(const char* name) {
  RunCase<Kernel, MlaShapeOf<576, 512, kHeads, kPage, false, true, false>>(
      {.name = name,
       .requests = {{1, 300}, {2, 131}, {5, 70}, {0, 3}, {1, 64}},
       .num_ctas = 2,
       .kv_heads = 1,
       .qo_heads = kHeads,
       .sharpness = 8},
      31);
}

// References that have to follow, some of them in every step, and logits that are far below 0.
template <class Kernel, int kHeads, int kPage>
void RunReferenceCases() {
  using Shape = MlaShapeOf<576, 512, kHeads, kPage, false, true, false>;
  Case c = {.name = "mla, very sharp",
            .requests = {{1, 700}, {1, 130}, {2, 390}},
            .num_ctas = 1,
            .kv_heads = 1,
            .qo_heads = kHeads,
            .sharpness = 250};
  RunCase<Kernel, Shape>(c, 32);
  c.name = "mla, maxima that rise late";
  c.sharpness = 10;
  c.late_keys = 5;
  RunCase<Kernel, Shape>(c, 33);
  c.name = "mla, logits far below 0";
  c.sharpness = 30;
  c.late_keys = 0;
  c.low = true;
  RunCase<Kernel, Shape>(c, 34);
}

}  // namespace
}  // namespace jax_attn

int main() {
  using namespace jax_attn;
  RunDecodeCase<Sm90MlaDecode, 1, 1>("mla decode, 1 head");
  RunDecodeCase<Sm90MlaDecode, 8, 64>("mla decode, 8 heads, page 64");
  RunDecodeCase<Sm90MlaDecode, 17, 64>("mla decode, 17 heads, page 64");
  RunDecodeCase<Sm90MlaDecode, 32, 1>("mla decode, 32 heads, page 1");
  RunDecodeCase<Sm90MlaDecode, 16, 1>("mla decode, 16 heads, page 1");
  RunDecodeCase<Sm90MlaDecode, 16, 64>("mla decode, 16 heads, page 64");
  RunDecodeCase<Sm90MlaDecode, 32, 16>("mla decode, 32 heads, page 16");
  RunDecodeCase<Sm90Mla, 64, 64>("mla, 64 heads, page 64");
  RunReferenceCases<Sm90Mla, 64, 3>();
  RunReferenceCases<Sm90MlaDecode, 16, 64>();
  return RunMlaCases<Sm90MlaDecode, 128, 192>() | RunMlaCases<Sm90Mla, 128, 192>();
}
