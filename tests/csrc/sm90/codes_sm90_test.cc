// Keys and values as e5m2, int8 and 4-bit values in the WGMMA main loop, without a GPU: the CPU
// kernels' results, and the bits of plain pages dequantized by the portable kernel (which
// formats_cuda_test.cc tests).
#include "emulation/cuda_emulation.h"
#include "emulation/cuda_emulation_sm90.h"
// The headers above stand in for CUDA and must come first.
#include "cuda/attention_cuda_cases.h"
#include "cuda/common/quantized_rows.cuh"
#include "cuda/sm80/quantized_kv.cuh"
#include "emulation/sm90_kernels.h"
#include "part.h"

namespace jax_attn {
namespace {

template <class Traits, int kHeadDim>
std::vector<uint16_t> PlainRows(const AttentionSpec& spec, i64 num_rows,
                                const std::vector<uint16_t>& codes) {
  constexpr i64 kRowBytes = QuantizedRowBytes(Traits::kKvFormat, kHeadDim);
  AttentionParams p = {};
  p.num_kv_heads = 1;
  const QuantizedRowOffsets<QuantizedRowLayout<Traits::kKvFormat, kHeadDim>> offsets(p, 0);
  std::vector<uint16_t> plain(num_rows * spec.num_kv_heads * kHeadDim);
  const auto* from = reinterpret_cast<const char*>(codes.data());
  emulation::machine.Launch(1, kWarpSize, 1, [&] {
    for (i64 i = 0; i < num_rows * spec.num_kv_heads; ++i) {
      __syncwarp();
      if (threadIdx.x == 0) std::memcpy(smem, from + i * kRowBytes, kRowBytes);
      __syncwarp();
      DequantizeRows<Traits, kHeadDim, 1>(smem, offsets, 0, threadIdx.x, smem + 1024);
      __syncwarp();
      if (threadIdx.x == 0) std::memcpy(&plain[i * kHeadDim], smem + 1024, kHeadDim * 2);
    }
  });
  return plain;
}

// RunCase; and the bits of 16-bit keys on the same plan, if these have the same tiles and
// consumers.
template <class Kernel, class Shape, int kFormat>
void RunCodesInPart(const Case& c, unsigned seed) {
  using Traits = typename Kernel::template Traits<CodesOf<Shape, kFormat>>;
  using PlainTraits = typename Kernel::template Traits<Shape>;
  RunCase<Kernel, CodesOf<Shape, kFormat>>(c, seed);
  if constexpr (Traits::kTileKv == PlainTraits::kTileKv &&
                Traits::kNumConsumers == PlainTraits::kNumConsumers) {
    std::mt19937 random(seed);
    AttentionProblem problem = MakeProblem<Traits>(c);
    Batch b = MakeBatch<Traits>(c, problem.spec, random);
    b.k_scale.clear();
    b.v_scale.clear();
    const std::vector<int32_t> plan = MakePlan(c, problem, b);
    if (plan.empty()) return;
    const i64 rows = b.num_pages * problem.spec.page_size;
    Batch plain = b;
    plain.k = PlainRows<Traits, Shape::kHeadDimQk>(problem.spec, rows, b.k);
    plain.v = PlainRows<Traits, Shape::kHeadDimVo>(problem.spec, rows, b.v);
    if (!SameBits(RunOnPlan<HopperAttentionBody<Traits>>(c, problem, b, plan),
                  RunOnPlan<HopperAttentionBody<PlainTraits>>(c, problem, plain, plan))) {
      std::printf("FAILED %s: not the bits of plain pages\n", c.name);
      ++g_failures;
    }
  }
}

template <class Kernel, class Shape, int kFormat>
void RunCodes(const Case& c, unsigned seed) {
  g_part.has_asked = true;
  if constexpr (InPart<Kernel, Shape, std::integral_constant<int, kFormat>>()) {
    if (TakesCase<Kernel, Shape, std::integral_constant<int, kFormat>>())
      RunCodesInPart<Kernel, Shape, kFormat>(c, seed);
  }
}

template <class Kernel, int kFormat>
void RunFormat(const std::string& format) {
  const auto run = [&](auto shape, Case c, const char* name, unsigned seed) {
    const std::string full = format + ", " + name;
    c.name = full.c_str();
    RunCodes<Kernel, decltype(shape), kFormat>(c, seed);
  };
  const std::vector<Request> decode = {{1, 130}, {1, 1}, {0, 9}, {1, 0}, {1, 65}, {2, 300}};
  const std::vector<Request> mixed = {{45, 70}, {3, 5}, {1, 200}, {5, 2}};
  // Items of all three kinds, with more steps than both rings have slots, and some with none.
  const std::vector<Request> by_turns = {{45, 600}, {12, 300},  {1, 917},  {20, 150}, {4, 0},
                                         {16, 700}, {100, 100}, {3, 1400}, {12, 12},  {10, 640}};
  using Usual = ShapeOf<128, 128, 4, 16, false, true, false>;
  run(Usual(), {.requests = decode, .sinks = true, .kv_split = 64}, "decode", 1);
  run(Usual(), {.requests = by_turns, .num_ctas = 1, .kv_heads = 3}, "by turns, three heads", 2);
  run(Usual(), {.requests = kForest, .kv_split = 64, .prefix = 256, .half_prefix = 64},
      "shared prefixes", 3);
  // Rows of 84, 52, 43, 26 and other bytes, padding, pages shorter than a warp's copies.
  using Odd = ShapeOf<80, 48, 5, 8, true, true, true>;
  run(Odd(), {.requests = mixed, .window_left = 30, .soft_cap = 3.0, .sinks = true, .kv_split = 64},
      "window, soft cap, odd sizes", 4);
  run(Odd(), {.requests = mixed, .window_left = 50, .soft_cap = 3.0, .nan_values = true},
      "NaN values", 5);
  run(ShapeOf<192, 128, 2, 4, false, true, false>(),
      {.requests = {{100, 300}, {64, 70}}, .kv_heads = 4}, "long chunk, pages of 4", 6);
}

}  // namespace
}  // namespace jax_attn

int main() {
  using namespace jax_attn;
  RunFormat<Sm90Kernel<true, 32>, kE5m2Format>("e5m2");
  RunFormat<Sm90Kernel<false, 32>, kInt8Format>("int8");
  RunFormat<Sm90Kernel<false, 32>, kMxfp4Format>("mxfp4");
  RunFormat<Sm90Kernel<false, 32>, kNvfp4Format>("nvfp4");
  RunFormat<Sm90Kernel<false, 32>, kInt4Format>("int4");
  if (g_failures == 0) std::printf("codes_sm90_test: ok\n");
  return g_failures > 0;
}
