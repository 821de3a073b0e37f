// The backward pass of sm_90a without pages and without a GPU: in emulation, with tiles by TMA or
// by rows; the portable kernel recomputes non-finite results.
#include "emulation/cuda_emulation.h"
#include "emulation/cuda_emulation_sm90.h"
// The headers above stand in for CUDA and must come first.
#include "sm90/backward_sm90_cases.h"

namespace jax_attn {
namespace {

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
       {kNanQ, kInfiniteQ, kInfiniteDo, kNanLse, kInfiniteLse, kNanD, kNanK, kInfiniteV}) {
    const Case c = {.name = "not finite", .requests = {{30, 40}, {60, 70}}, .kv_heads = 1};
    Run<Causal64>(c, 20 + poison, true, poison);
  }
  // With a soft cap an infinite logit becomes finite, and its gradient is 0. So d_q of the row and
  // d_k of the key are 0 here. But d_k of the keys that the row sees, and d_q of the rows that see
  // the key, are 0 times an infinity.
  for (const Poison poison : {kInfiniteQ, kInfiniteK}) {
    Case c = odd;
    c.name = "infinite, soft cap";
    c.requests = {{40, 200}, {100, 130}};
    Run<Odd64>(c, 30 + poison, true, poison);
    Run<Odd128>(c, 30 + poison, true, poison);
  }
  RunDamaged<Causal128>();
  if (g_failures > 0) std::printf("%d failures\n", g_failures);
  return g_failures > 0;
}

}  // namespace
}  // namespace jax_attn

int main() { return jax_attn::RunAll(); }
