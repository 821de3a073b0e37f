// fresh_kv over quantized pages in the portable attention kernel, without a GPU: the bits of calls
// whose pages hold the query tokens' keys and values as append_kv writes them.
#include "emulation/cuda_emulation.h"
// The header above stands in for CUDA and must come first.
#include "emulation/sm80_kernels.h"
#include "part.h"

namespace jax_attn {
namespace {

// Calls visit(token, row of the pool) for each query token with a position.
template <class Visit>
void ForNewTokens(const Case& c, const AttentionSpec& spec, const Batch& b, Visit visit) {
  for (size_t r = 0; r < c.requests.size(); ++r) {
    const Request& request = c.requests[r];
    for (int64_t i = std::max(0, request.qo_len - request.kv_len); i < request.qo_len; ++i) {
      const int64_t pos = request.kv_len - request.qo_len + i;
      const int64_t page = b.page_indices[b.kv_indptr[r] + pos / spec.page_size];
      visit(b.qo_indptr[r] + i, page * spec.page_size + pos % spec.page_size);
    }
  }
}

// Fills `fresh` with rows, every seventh with NaN or an infinity, and writes append_kv's result for
// them to their rows of `pool`.
std::vector<uint16_t> AppendNewTokens(const Case& c, const AttentionSpec& spec, const Batch& b,
                                      int64_t head_dim, const std::vector<float>& scales,
                                      std::vector<uint16_t>* pool, std::mt19937& random) {
  const int64_t row_dim = spec.num_kv_heads * head_dim;
  std::vector<uint16_t> fresh = Poisoned<uint16_t>(spec.max_qo_tokens * row_dim);
  ForNewTokens(c, spec, b, [&](int64_t token, int64_t pool_row) {
    std::vector<uint16_t> row = RandomBf16(row_dim, random);
    if (c.nan_values && token % 7 == 3) row[9] = token % 2 == 0 ? 0x7fc0 : 0xff80;
    std::copy(row.begin(), row.end(), fresh.begin() + token * row_dim);
    EncodeRowOnCpu(row, spec.kv_format, head_dim,
                   reinterpret_cast<char*>(pool->data()) +
                       pool_row * spec.num_kv_heads * QuantizedRowBytes(spec.kv_format, head_dim),
                   scales.empty() ? nullptr : scales.data());
  });
  return fresh;
}

template <class Kernel, class Shape, int kFormat>
void RunFreshCodesInPart(Case c, unsigned seed) {
  using Appended = CodesOf<Shape, kFormat>;
  using Beside = Fresh<Appended>;
  const std::string name = std::string(FormatOf(kFormat).name) + ", " + c.name;
  c.name = name.c_str();
  std::mt19937 random(seed);
  const AttentionProblem problem = MakeProblem<typename Kernel::template Traits<Beside>>(c);
  const AttentionSpec& spec = problem.spec;
  Batch b = MakeBatch<typename Kernel::template Traits<Beside>>(c, spec, random);
  b.k_new = AppendNewTokens(c, spec, b, spec.head_dim_qk, b.k_scale, &b.k, random);
  b.v_new = AppendNewTokens(c, spec, b, spec.head_dim_vo, b.v_scale, &b.v, random);
  const std::vector<int32_t> plan = MakePlan(c, problem, b);
  if (plan.empty()) return;
  const Outputs want = RunOnPlan<typename Kernel::template Body<Appended>>(c, problem, b, plan);
  const auto poison = [&](std::vector<uint16_t>* pool, int64_t head_dim) {
    const int64_t bytes = spec.num_kv_heads * QuantizedRowBytes(spec.kv_format, head_dim);
    ForNewTokens(c, spec, b, [&](int64_t, int64_t row) {
      std::memset(reinterpret_cast<char*>(pool->data()) + row * bytes, 0xff, bytes);
    });
  };
  poison(&b.k, spec.head_dim_qk);
  poison(&b.v, spec.head_dim_vo);
  const Outputs got = RunOnPlan<typename Kernel::template Body<Beside>>(c, problem, b, plan);
  if (!SameBits(got, want)) {
    std::printf("FAILED %s: not the bits of pages with the new tokens\n", c.name);
    ++g_failures;
  }
  std::printf("%s\n", c.name);
}

template <class Kernel, class Shape, int kFormat>
void RunFreshCodes(Case c, unsigned seed) {
  g_part.has_asked = true;
  if constexpr (InPart<Kernel, Shape, std::integral_constant<int, kFormat>>()) {
    if (TakesCase<Kernel, Shape, std::integral_constant<int, kFormat>>())
      RunFreshCodesInPart<Kernel, Shape, kFormat>(c, seed);
  }
}

template <int kFormat>
void RunFormat() {
  const std::vector<Request> mixed = {{45, 70}, {3, 5}, {1, 200}, {0, 30},
                                      {5, 2},   {1, 1}, {2, 131}, {1, 0}};
  RunFreshCodes<Sm80Kernel, ShapeOf<128, 128, 4, 16, false, true, false>, kFormat>(
      {.name = "decodes", .requests = {{1, 130}, {1, 1}, {1, 65}, {2, 300}}, .sinks = true}, 1);
  RunFreshCodes<Sm80Kernel, ShapeOf<64, 64, 4, 16, false, true, false>, kFormat>(
      {.name = "mixed, NaN, three heads", .requests = mixed, .nan_values = true, .kv_heads = 3}, 2);
  // Rows that begin at any byte of 16, blocks of 16, pages shorter than a warp's slice.
  RunFreshCodes<Sm80Kernel, ShapeOf<80, 48, 5, 8, true, true, true>, kFormat>(
      {.name = "window, soft cap, odd sizes",
       .requests = mixed,
       .window_left = 30,
       .window_right = 4,
       .soft_cap = 3.0,
       .sinks = true,
       .kv_split = 64},
      3);
  RunFreshCodes<OneHeightKernel, ShapeOf<64, 64, 4, 16, false, true, false>, kFormat>(
      {.name = "shared prefixes, fixed split", .requests = kForest, .kv_split = 64, .prefix = 256},
      4);
  RunFreshCodes<Sm80Kernel, ShapeOf<192, 128, 2, 4, false, true, false>, kFormat>(
      {.name = "long chunk, pages of 4", .requests = {{100, 300}, {64, 70}}, .kv_heads = 4}, 5);
}

}  // namespace
}  // namespace jax_attn

int main() {
  using namespace jax_attn;
  RunFormat<kE4m3Format>();
  RunFormat<kE5m2Format>();
  RunFormat<kInt8Format>();
  RunFormat<kMxfp4Format>();
  RunFormat<kNvfp4Format>();
  RunFormat<kInt4Format>();
  if (g_failures == 0) std::printf("fresh_codes_cuda_test: ok\n");
  return g_failures > 0;
}
