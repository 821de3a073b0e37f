// The backward pass of sm_90a, without a GPU: in emulation, tiles by boxes or by rows, and what is
// not finite by the portable kernel behind it.
#include "cuda_emulation.h"
#include "cuda_emulation_sm90.h"
// The above stand in for CUDA and come first.
#include "backward_cuda_cases.h"
#include "cuda/sm80/backward.cuh"
#include "cuda/sm90/backward.cuh"

namespace jax_attn {
namespace {

void AddMaps(const AttentionSpec& spec, BackwardCudaParams* p) {
  AttentionParams& f = p->forward;
  const auto map = [&](const void* array, int64_t rows, int64_t heads, int64_t box_rows) {
    const emulation::BoxedArray boxed = {static_cast<u16*>(const_cast<void*>(array)),
                                         1,
                                         static_cast<u64>(rows),
                                         static_cast<u64>(heads),
                                         static_cast<u64>(spec.head_dim_qk),
                                         static_cast<u64>(box_rows),
                                         1};
    TensorMap bits = {};
    std::memcpy(&bits, &boxed, sizeof(boxed));
    return bits;
  };
  const int64_t tile = HopperBackwardRows(static_cast<i32>(spec.head_dim_qk));
  p->q_map = map(f.q, spec.max_qo_tokens, spec.num_qo_heads, tile);
  p->d_o_map = map(p->d_o, spec.max_qo_tokens, spec.num_qo_heads, tile);
  f.k_map = map(f.k, spec.max_kv_tokens, spec.num_kv_heads, 128);
  f.v_map = map(f.v, spec.max_kv_tokens, spec.num_kv_heads, 128);
  f.has_tensor_maps = 1;
}

// Poisoned, the portable kernel has to compute everything again.
template <class Shape>
void Run(const Case& c, unsigned seed, bool boxes, Poison poison = kNone) {
  using Traits = typename Kernel<Shape, 90>::Traits;
  using Portable = BackwardBody<Traits>;
  using Hopper = HopperBackwardBody<Traits>;
  RunBackward<Traits>(
      c, seed, poison, false,
      [=](const Case& c, const AttentionSpec& spec, const BackwardCudaParams& given,
          std::mt19937& random) {
        BackwardCudaParams params = given;
        if (!RunsHopperBackward({spec, {}})) {
          std::printf("FAILED %s: not a case of the Hopper kernel\n", c.name);
          ++g_failures;
          return;
        }
        // As XLA hands them over.
        void* const results[] = {params.d_q, params.d_k, params.d_v};
        for (int i = 0; i < 3; ++i) std::memset(results[i], 0x7f, 2 * params.num_elements[i]);
        const i64 num_sums =
            static_cast<i64>(params.max_tiles) * spec.num_qo_heads * Hopper::Shape::kSumWords;
        if (num_sums > 0) std::memset(params.d_q_sums, 0xff, 4 * num_sums);
        if (boxes) AddMaps(spec, &params);
        Emulate<Portable>(c, params, kBackwardReadPlan, random);
        Emulate<Hopper>(c, params, kBackwardSums, random);
        Emulate<Hopper>(c, params, kBackwardRound, random);
        if (*params.is_not_finite != (poison != kNone)) {
          std::printf("FAILED %s: is_not_finite is %d\n", c.name, *params.is_not_finite);
          ++g_failures;
        }
        Emulate<Portable>(c, params, kBackwardRows, random);
      });
  std::printf("%s%s: %d bytes of shared memory\n", c.name, boxes ? ", boxes" : "",
              Hopper::kSmemBytes);
}

template <class Shape>
void RunDamaged() {
  using Traits = typename Kernel<Shape, 90>::Traits;
  const Case c = {.name = "damaged headers", .requests = {{150, 150}, {3, 17}}, .kv_heads = 1};
  RunDamagedHeaders<Traits>(
      c, [&](const AttentionSpec& spec, BackwardCudaParams params, std::mt19937& random) {
        AddMaps(spec, &params);
        Emulate<BackwardBody<Traits>>(c, params, kBackwardReadPlan, random);
        Emulate<HopperBackwardBody<Traits>>(c, params, kBackwardSums, random);
        Emulate<HopperBackwardBody<Traits>>(c, params, kBackwardRound, random);
        Emulate<BackwardBody<Traits>>(c, params, kBackwardRows, random);
      });
}

int RunAll() {
  const std::vector<Request> mixed = {{45, 70}, {3, 5}, {1, 200}, {0, 9}, {5, 2}, {1, 0}};
  const std::vector<Request> documents = {{150, 150}, {1, 1}, {260, 260}};
  using Causal64 = ShapeOf<64, 64, 2, 0, false, true, false>;
  using Causal128 = ShapeOf<128, 128, 1, 0, false, true, false>;
  using Full128 = ShapeOf<128, 128, 3, 0, false, false, false>;
  using Odd64 = ShapeOf<64, 64, 5, 0, true, true, true>;
  using Odd128 = ShapeOf<128, 128, 2, 0, true, true, true>;
  Run<Causal128>({.name = "documents, d128", .requests = documents, .kv_heads = 1}, 1, true);
  Run<Causal64>({.name = "documents, d64", .requests = documents, .kv_heads = 1}, 2, true);
  Run<Causal128>({.name = "documents, d128", .requests = {{150, 150}, {70, 70}}}, 3, false);
  Run<Causal64>({.name = "mixed, sinks, d64", .requests = mixed, .sinks = true}, 4, true);
  Run<Causal128>({.name = "mixed, sinks, d128", .requests = mixed, .sinks = true}, 5, true);
  Run<Causal64>({.name = "empty", .requests = {}}, 6, true);
  const Case full = {.name = "full, d128",
                     .requests = {{45, 270}, {130, 30}},
                     .window_right = -1,
                     .num_ctas = 5,
                     .kv_heads = 1};
  Run<Full128>(full, 7, true);
  const Case odd = {.name = "windows, soft cap, sinks",
                    .requests = {{100, 330}, {7, 3}, {0, 9}, {40, 200}, {1, 0}},
                    .window_left = 30,
                    .window_right = 3,
                    .soft_cap = 3.0,
                    .sinks = true,
                    .kv_heads = 1};
  Run<Odd64>(odd, 8, true);
  Run<Odd128>(odd, 9, true);
  for (const Poison poison :
       {kNanQ, kInfiniteDo, kNanLse, kInfiniteLse, kNanD, kNanK, kInfiniteV}) {
    const Case c = {.name = "not finite", .requests = {{30, 40}, {60, 70}}, .kv_heads = 1};
    Run<Causal64>(c, 20 + poison, true, poison);
  }
  RunDamaged<Causal128>();
  if (g_failures > 0) std::printf("%d failures\n", g_failures);
  return g_failures > 0;
}

}  // namespace
}  // namespace jax_attn

int main() { return jax_attn::RunAll(); }
