// The attention kernel of sm_90a, without a GPU: keys and values copied row by row, and by the copy
// engine where its boxes tile the pages.
#include "cuda_emulation.h"
#include "cuda_emulation_sm90.h"
// The above stand in for CUDA and come first.
#include "attention_cuda_cases.h"
#include "cuda/sm90/attention.cuh"

namespace jax_attn {
namespace {

// As select/cuda.cc has it. kTiles: 1 is decodes alone.
template <bool kBoxes, int kSmallTile, int kTiles = 2>
struct Sm90Kernel {
  template <class Shape>
  struct Traits : Shape {
    static constexpr int kArch = 90;
    static constexpr int kNumConsumers = Shape::kHeadDimVo > 64 ? 2 : 3;
    static constexpr int kNumTiles = kTiles, kTileQ0 = kSmallTile;
    static constexpr int kTileQ1 = kTiles == 1 ? 0 : 64 * kNumConsumers, kTileQ2 = 0;
    static constexpr int kNumWarps = kTiles == 1 ? 16 : 4 + 4 * kNumConsumers;
    static constexpr int kTileKv = Shape::kHeadDimVo > 128 ? 64 : 128;
    static constexpr int kNumStages = 0;
  };
  template <class Shape>
  using Body = HopperAttentionBody<Traits<Shape>>;

  template <class Shape>
  static void AddTensorMaps(const AttentionSpec& spec, i64 num_rows, AttentionParams* p) {
    constexpr int kBoxRows = HopperShape<Traits<Shape>>::kBoxRows;
    p->num_layers = 1;
    p->has_tensor_maps = kBoxes && kBoxRows > 0;
    auto map = [&](const void* array, i64 head_dim, i64 rows) {
      const emulation::BoxedArray boxed = {
          static_cast<const u16*>(array), 1,
          static_cast<u64>(rows),         static_cast<u64>(spec.num_kv_heads),
          static_cast<u64>(head_dim),     kBoxRows};
      TensorMap bits = {};
      std::memcpy(&bits, &boxed, sizeof(boxed));
      return bits;
    };
    p->k_map = map(p->k, spec.head_dim_qk, num_rows);
    p->v_map = map(p->v, spec.head_dim_vo, num_rows);
    p->k_new_map = map(p->k_new, spec.head_dim_qk, spec.max_qo_tokens);
    p->v_new_map = map(p->v_new, spec.head_dim_vo, spec.max_qo_tokens);
  }
};

}  // namespace
}  // namespace jax_attn

int main() {
  using namespace jax_attn;
  return RunAllCases<Sm90Kernel<false, 32>>() | RunAllCases<Sm90Kernel<true, 32>>() |
         RunAllCases<Sm90Kernel<true, 64>>() | RunAllCases<Sm90Kernel<false, 32, 1>>();
}
