// Matmuls of e4m3 values on Hopper, without a GPU: results are within the bound of rounding q and
// the weights to e4m3, and bits do not depend on the order of execution.
#include "emulation/cuda_emulation.h"
#include "emulation/cuda_emulation_sm90.h"
// The headers above stand in for CUDA and must come first.
#include "emulation/sm90_kernels.h"
#include "part.h"

namespace jax_attn {
namespace {

template <class Shape, bool kQ>
struct CodeProductsOf : E4m3Of<Shape, kQ> {
  static constexpr bool kFp8Matmul = true;
};
template <int kDimQk, int kDimVo, int kGroup, int kPage, bool kLeft, bool kRight, bool kCap,
          bool kQ = false>
using Products = CodeProductsOf<ShapeOf<kDimQk, kDimVo, kGroup, kPage, kLeft, kRight, kCap>, kQ>;

// --- the transposition ---

template <int kHeadDim>
struct Transposed {
  static constexpr int kHeadDimVo = kHeadDim;
};

// Every value of a step is at the position of the weights' order.
template <int kHeadDim, int kStep>
void TestTransposition() {
  using Traits = Transposed<kHeadDim>;
  using Codes = typename QuantizedValueTiles<Traits, kStep>::V;
  constexpr int kPadded = PaddedValues<Traits>();
  using Tile = SwizzledTile<kStep / 2, kPadded + kSumColumns>;
  constexpr int kTile = CeilDiv(Codes::kBytes, 1024) * 1024;
  const auto code_of = [](int token, int column) { return (token * 37 + column * 11 + 5) % 251; };
  const auto swizzled = [](int row, int byte) { return row * 128 + (byte ^ row % 8 * 16); };
  emulation::machine.Launch(1, 128, 1, [&] {
    if (threadIdx.x == 0) {
      for (int token = 0; token < kStep; ++token) {
        for (int column = 0; column < Codes::kPadded * 2; ++column) {
          smem[column / 128 * Codes::kBlockBytes + swizzled(token, column % 128)] =
              column < kHeadDim ? static_cast<unsigned char>(code_of(token, column)) : 0;
        }
      }
    }
    __syncthreads();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    using Transposer = ValueTransposer<Traits, kStep / 4>;
    Transposer::AddSumColumns(smem + kTile, threadIdx.x);
    Transposer(warp * (kStep / 4), lane).template Convert<Tile, Codes>(smem, smem + kTile);
  });
  for (int column = 0; column < kPadded + kSumColumns; ++column) {
    for (int token = 0; token < kStep; ++token) {
      const int of_16 = token % 16;
      const int byte = token / 16 * 16 + of_16 % 8 / 2 * 4 + of_16 / 8 * 2 + of_16 % 2;
      const int want = column < kHeadDim ? code_of(token, column) : column == kPadded ? 0x38 : 0;
      const int got = smem[kTile + swizzled(column, byte)];
      if (got == want || ++g_failures > 20) continue;
      std::printf("FAILED transposition %d, %d: column %d, token %d: expected %d, got %d\n",
                  kHeadDim, kStep, column, token, want, got);
    }
  }
}

// --- attention ---

// q as the kernel rounds it, in f32: quantized values times the scale of their row.
template <class Traits>
std::vector<float> RoundedQueries(const AttentionSpec& spec, const Batch& b) {
  constexpr int kDim = Traits::kHeadDimQk;
  const i64 num_rows = spec.max_qo_tokens * spec.num_qo_heads;
  std::vector<float> q(num_rows * kDim);
  for (i64 r = 0; r < num_rows; ++r) {
    if constexpr (Traits::kQFormat == kE4m3Format) {
      const auto* codes = reinterpret_cast<const unsigned char*>(b.q.data()) + r * kDim;
      const float scale = b.q_scale.empty() ? 1.0f : b.q_scale[r % spec.num_qo_heads];
      for (int d = 0; d < kDim; ++d) q[r * kDim + d] = E4m3ToFloat(codes[d]) * scale;
    } else {
      float most = 0x1p-100f;
      for (int d = 0; d < kDim; ++d) most = fmaxf(most, std::abs(Bf16ToFloat(b.q[r * kDim + d])));
      const float quantized_one = 448.0f * Reciprocal(most), scale = most * (1.0f / 448.0f);
      for (int d = 0; d < kDim; ++d) {
        const float x = Bf16ToFloat(b.q[r * kDim + d]) * quantized_one;
        q[r * kDim + d] = E4m3ToFloat(FloatToE4m3(x)) * scale;
      }
    }
  }
  return q;
}

// A row of o for the rounded q, in f64.
struct Exact {
  std::vector<double> o;
  std::vector<double> tolerance;
  double lse;
};

// The result of a query token and head, and the bound for rounding its weights to e4m3. A rounded
// weight is within 2^-4 of w, or within 2^-10 if w is below the normal numbers. o is divided by the
// sum W of rounded weights, which is at least 15/16 of the weights' sum, so
//   |o - exact| <= sum of |rounding| * (|v| + |exact|) / W
//               <= 1/15 * (mean of |v| + |exact|) + 2^-10 * (sum of |v| + tokens * |exact|) / W.
// A row's scale makes a lane's sum of a step at least 0.875 * 2^7, and so is 16/15 W. The parts of
// a split row add up, each with a share of the mean and its own W. o has 8 bits.
template <class Traits>
Exact ExactRow(const Case& c, const AttentionSpec& spec, const Batch& b,
               const std::vector<float>& q, const float* sinks, size_t request, int64_t i,
               int64_t head) {
  constexpr int kDimQk = Traits::kHeadDimQk, kDimVo = Traits::kHeadDimVo;
  const Request& r = c.requests[request];
  const int64_t kv_head = head / Traits::kGroupSize, page = std::max<int64_t>(1, spec.page_size);
  const int64_t pos = r.kv_len - r.qo_len + i;
  const int64_t begin = c.window_left < 0 ? 0 : std::max<int64_t>(0, pos - c.window_left);
  const int64_t end =
      c.window_right < 0 ? r.kv_len : std::min<int64_t>(r.kv_len, pos + c.window_right + 1);
  const auto codes_of = [&](const std::vector<uint16_t>& array, int64_t j, int64_t dim) {
    const int64_t row = spec.paged()
                            ? b.page_indices[b.kv_indptr[request] + j / page] * page + j % page
                            : b.kv_indptr[request] + j;
    return reinterpret_cast<const unsigned char*>(array.data()) +
           (row * spec.num_kv_heads + kv_head) * dim;
  };
  static const std::vector<double> kValues = [] {
    std::vector<double> values;
    for (u32 code = 0; code < 256; ++code) values.push_back(E4m3ToFloat(code));
    return values;
  }();
  const float* of_q = &q[((b.qo_indptr[request] + i) * spec.num_qo_heads + head) * kDimQk];
  std::vector<double> logits;
  double most = -INFINITY;
  for (int64_t j = begin; j < end; ++j) {
    const unsigned char* k = codes_of(b.k, j, kDimQk);
    double s = 0;
    for (int d = 0; d < kDimQk; ++d) s += of_q[d] * kValues[k[d]];
    s *= spec.sm_scale * b.k_scale[kv_head];
    if (c.soft_cap > 0) s = c.soft_cap * std::tanh(s / c.soft_cap);
    logits.push_back(s);
    most = std::max(most, s);
  }
  Exact exact = {std::vector<double>(kDimVo), std::vector<double>(kDimVo), -INFINITY};
  if (logits.empty()) return exact;
  double sum = 0;
  for (double s : logits) sum += std::exp(s - most);
  const double all = sum + (sinks != nullptr ? std::exp(sinks[head] - most) : 0.0);
  exact.lse = most + std::log(all);
  std::vector<double> means(kDimVo), sizes(kDimVo);
  for (size_t at = 0; at < logits.size(); ++at) {
    const unsigned char* v = codes_of(b.v, begin + static_cast<int64_t>(at), kDimVo);
    const double weight = std::exp(logits[at] - most) / all;
    for (int d = 0; d < kDimVo; ++d) {
      const double x = kValues[v[d]] * b.v_scale[kv_head];
      exact.o[d] += weight * x;
      means[d] += weight * std::abs(x);
      sizes[d] += std::abs(x);
    }
  }
  const double least_sum = 0.875 * 128 * 15 / 16;
  for (int d = 0; d < kDimVo; ++d) {
    const double size = std::abs(exact.o[d]), tokens = static_cast<double>(logits.size());
    exact.tolerance[d] = (means[d] + size) / 15 + 0x1p-10 * (sizes[d] + tokens * size) / least_sum +
                         size * 0x1p-8 + 1e-4;
  }
  return exact;
}

template <class Kernel, class Shape>
void RunProductsInPart(const Case& c, unsigned seed) {
  using Traits = typename Kernel::template Traits<Shape>;
  using Body = typename Kernel::template Body<Shape>;
  static_assert(Body::kSmemBytes <= static_cast<int>(sizeof(smem)), "fits a multiprocessor");
  std::mt19937 random(seed);
  const AttentionProblem problem = MakeProblem<Traits>(c);
  const AttentionSpec& spec = problem.spec;
  const Batch b = MakeBatch<Traits>(c, spec, random);
  const std::vector<int32_t> plan = MakePlan(c, problem, b);
  if (plan.empty()) return;
  std::vector<float> sinks(spec.num_qo_heads);
  for (float& x : sinks) x = static_cast<float>(random() % 4) - 1.0f;
  const float* const given_sinks = c.sinks ? sinks.data() : nullptr;
  AttentionParams p = MakeParams(problem, b, plan, given_sinks);
  const i64 num_rows = spec.paged() ? b.num_pages * spec.page_size : spec.max_kv_tokens;
  Outputs got[2];
  for (Outputs& out : got) {
    out = MakeOutputs(problem, &p);
    Kernel::template AddTensorMaps<Shape>(spec, num_rows, &p);
    emulation::machine.Launch(p.num_ctas, Body::kNumThreads, static_cast<unsigned>(random()),
                              [&p] { Body::Run(p); });
  }
  if (!SameBits(got[0], got[1])) {
    std::printf("FAILED %s: bits depend on the order of execution\n", c.name);
    ++g_failures;
  }
  CheckTimes(c, p);
  const std::vector<float> q = RoundedQueries<Traits>(spec, b);
  double error = 0, size = 0;
  for (size_t request = 0; request < c.requests.size(); ++request) {
    for (int64_t i = 0; i < c.requests[request].qo_len; ++i) {
      for (int64_t head = 0; head < spec.num_qo_heads; ++head) {
        const Exact exact = ExactRow<Traits>(c, spec, b, q, given_sinks, request, i, head);
        const size_t row = (b.qo_indptr[request] + i) * spec.num_qo_heads + head;
        Compare(c, "lse", row, got[0].lse[row], static_cast<float>(exact.lse), 1e-3f);
        for (size_t d = 0; d < exact.o.size(); ++d) {
          const size_t at = row * exact.o.size() + d;
          const float have = Bf16ToFloat(got[0].o[at]);
          Compare(c, "o", at, have, static_cast<float>(exact.o[d]),
                  static_cast<float>(exact.tolerance[d]));
          if (!std::isfinite(exact.o[d])) continue;
          error += (have - exact.o[d]) * (have - exact.o[d]);
          size += exact.o[d] * exact.o[d];
        }
      }
    }
  }
  std::printf("%s: %d items, %d merge groups, relative error of o %.2f %%\n", c.name,
              p.header->num_items, p.header->num_merge_groups,
              size > 0 ? 100 * std::sqrt(error / size) : 0.0);
}

template <class Kernel, class Shape>
void RunProducts(const Case& c, unsigned seed) {
  g_part.has_asked = true;
  if constexpr (InPart<Kernel, Shape>()) {
    if (TakesCase<Kernel, Shape>()) RunProductsInPart<Kernel, Shape>(c, seed);
  }
}

template <class Kernel>
void RunAll() {
  const std::vector<Request> decode = {{1, 130}, {1, 1}, {0, 9}, {1, 0}, {1, 65}, {2, 300}};
  const std::vector<Request> mixed = {{45, 70}, {3, 5}, {1, 200}, {5, 2}};
  // Joint and single items, with more steps than the rings have slots, and some with none.
  const std::vector<Request> by_turns = {{45, 600}, {12, 300},  {1, 917},  {20, 150}, {4, 0},
                                         {16, 700}, {100, 100}, {3, 1400}, {12, 12},  {10, 640}};
  RunProducts<Kernel, Products<128, 128, 4, 16, false, true, false>>(
      {.name = "products, tall and low items by turns", .requests = by_turns, .num_ctas = 1}, 2);
  RunProducts<Kernel, Products<128, 128, 4, 16, false, true, false>>(
      {.name = "products, decode", .requests = decode, .sinks = true, .kv_split = 128}, 1);
  RunProducts<Kernel, Products<128, 128, 1, 0, false, true, false, true>>(
      {.name = "products, q of e4m3, ragged", .requests = {{300, 300}, {64, 70}}, .sinks = true},
      3);
  RunProducts<Kernel, Products<64, 64, 4, 64, false, true, false>>(
      {.name = "products, head_dim 64, page 64", .requests = by_turns, .num_ctas = 2}, 4);
  RunProducts<Kernel, Products<48, 80, 5, 5, true, true, true, true>>(
      {.name = "products, q of e4m3, window, soft cap, odd sizes",
       .requests = mixed,
       .window_left = 30,
       .soft_cap = 3.0,
       .sinks = true,
       .kv_split = 128},
      5);
  RunProducts<Kernel, Products<48, 48, 5, 5, true, true, false>>(
      {.name = "products, NaN values", .requests = mixed, .window_left = 50, .nan_values = true},
      6);
  RunProducts<Kernel, Products<96, 96, 1, 16, true, true, false, true>>(
      {.name = "products, q of e4m3, NaN values, TMA",
       .requests = {{150, 400}, {70, 70}},
       .window_left = 50,
       .nan_values = true},
      7);
  RunProducts<Kernel, Products<192, 128, 2, 0, false, false, false>>(
      {.name = "products, 192 and 128, full",
       .requests = {{150, 900}, {64, 70}},
       .window_right = -1,
       .kv_heads = 1},
      8);
  RunProducts<Kernel, Products<192, 192, 1, 16, false, true, false>>(
      {.name = "products, head_dim 192", .requests = {{80, 300}, {1, 500}}}, 9);
  RunProducts<Kernel, Products<128, 128, 2, 16, false, true, false>>(
      {.name = "products, maxima that rise late",
       .requests = {{70, 600}, {3, 500}, {1, 900}, {20, 300}},
       .num_ctas = 2,
       .sharpness = 10,
       .late_keys = 3},
      10);
  RunProducts<Kernel, Products<128, 128, 2, 1, true, true, false>>(
      {.name = "products, logits far below 0, page 1",
       .requests = {{70, 600}, {3, 500}, {1, 300}, {20, 300}},
       .window_left = 200,
       .num_ctas = 2,
       .sharpness = 30,
       .low = true},
      11);
  RunProducts<Kernel, Products<64, 64, 4, 16, false, true, false>>(
      {.name = "products, shared prefixes",
       .requests = kForest,
       .kv_split = 128,
       .prefix = 256,
       .half_prefix = 128},
      12);
}

}  // namespace
}  // namespace jax_attn

int main() {
  using namespace jax_attn;
  TestTransposition<128, 128>();
  TestTransposition<64, 128>();
  TestTransposition<80, 128>();
  TestTransposition<192, 64>();
  RunAll<Sm90Kernel<false, 64>>();
  RunAll<Sm90Kernel<true, 64>>();
  if (g_failures == 0) std::printf("formats_sm90_test: ok\n");
  return g_failures > 0;
}
