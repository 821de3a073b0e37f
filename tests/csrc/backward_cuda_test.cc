// The kernels of the backward pass, without a GPU: in emulation, on plans of the real planner, and
// against the CPU kernels, which have tests of their own.
#include "cuda_emulation.h"
// The above stands in for CUDA and comes first.
#include "attention_cuda_cases.h"
#include "cpu/backward.h"
#include "cuda/sm80/backward.cuh"

namespace jax_attn {
namespace {

// Of which kernel: shared memory decides on tiles.
template <class Shape, int kTarget, int kElement = kElementBf16>
struct Kernel {
  struct Traits : Shape {
    static constexpr int kArch = kTarget, kDtype = kElement;
    static constexpr int kNumTiles = 2, kTileQ0 = 16, kTileQ1 = 128, kTileQ2 = 0;
    static constexpr int kTileKv = 64, kNumWarps = 4, kNumStages = 4;
  };
};

// What the arrays of a case have besides.
enum Poison { kNone, kNanQ, kInfiniteDo, kNanLse, kInfiniteLse, kNanD, kNanK, kInfiniteV };

// An array of the element type.
class Array {
 public:
  Array(int dtype, size_t n) : dtype_(dtype), bytes_(n * ElementBytes(dtype)) {}
  Array(int dtype, const std::vector<uint16_t>& bf16) : Array(dtype, bf16.size()) {
    for (size_t i = 0; i < bf16.size(); ++i) Put(i, Bf16ToFloat(bf16[i]));
  }
  size_t size() const { return bytes_.size() / ElementBytes(dtype_); }
  char* data() { return bytes_.data(); }
  const std::vector<char>& bytes() const { return bytes_; }
  float At(size_t i) const {
    if (dtype_ == kF32) return Word<float>(i);
    return Bf16ToFloat(Word<uint16_t>(i));
  }
  void Put(size_t i, float x) {
    if (dtype_ == kF32) {
      std::memcpy(bytes_.data() + 4 * i, &x, 4);
    } else {
      const auto bits = static_cast<uint16_t>(FloatToBf16(x));
      std::memcpy(bytes_.data() + 2 * i, &bits, 2);
    }
  }

 private:
  template <typename T>
  T Word(size_t i) const {
    T x;
    std::memcpy(&x, bytes_.data() + i * sizeof(T), sizeof(T));
    return x;
  }
  int dtype_;
  std::vector<char> bytes_;
};

struct Gradients {
  Array d_q, d_k, d_v;
};

// Whether each row of `head_dim` is within a few roundings of its largest expected element.
void CompareRows(const Case& c, const char* what, const Array& got, const Array& expected,
                 int64_t head_dim, float tolerance) {
  for (size_t row = 0; row < expected.size(); row += head_dim) {
    float largest = 0;
    for (int64_t i = 0; i < head_dim; ++i) {
      if (std::isfinite(expected.At(row + i))) {
        largest = std::max(largest, std::abs(expected.At(row + i)));
      }
    }
    for (int64_t i = 0; i < head_dim; ++i) {
      Compare(c, what, row + i, got.At(row + i), expected.At(row + i), tolerance * largest);
    }
  }
}

// Every table names pages of the first request, at other places, some of them twice.
void ScatterPages(const Case& c, int64_t page_size, Batch* b) {
  const int64_t whole = c.requests[0].kv_len / page_size;
  for (size_t r = 1; r < c.requests.size(); ++r) {
    for (int64_t i = b->kv_indptr[r]; i < b->kv_indptr[r + 1]; ++i) {
      const auto slot = i - b->kv_indptr[r];
      if (slot % 4 != 3) b->page_indices[i] = b->page_indices[(slot * (r + 1) / 2 + r) % whole];
    }
  }
}

template <class Traits>
void RunBackward(const Case& c, unsigned seed, Poison poison = kNone, bool scatters = false) {
  using Body = BackwardBody<Traits>;
  static_assert(Body::kSmemBytes <= static_cast<int>(sizeof(smem)), "fits a multiprocessor");
  std::mt19937 random(seed);
  AttentionProblem problem = MakeProblem<Traits>(c);
  AttentionSpec& spec = problem.spec;
  spec.dtype = Traits::kDtype;
  Batch b = MakeBatch<Traits>(c, spec, random);
  if (scatters) ScatterPages(c, spec.page_size, &b);
  const std::vector<int32_t> plan = MakePlan(c, problem, b);
  if (plan.empty()) return;
  const int dtype = Traits::kDtype;
  Array q(dtype, b.q), k(dtype, b.k), v(dtype, b.v);
  Array d_o(dtype, RandomBf16(spec.max_qo_tokens * spec.num_qo_heads * spec.head_dim_vo, random));
  std::vector<float> sinks(spec.num_qo_heads);
  for (float& x : sinks) x = static_cast<float>(random() % 4) - 1.0f;

  // The forward pass, of clean operands.
  InlinePool pool;
  AttentionParams p = MakeParams(problem, b, plan, c.sinks ? sinks.data() : nullptr);
  p.q = q.data();
  p.k = k.data();
  p.v = v.data();
  p.num_layers = 1;
  Outputs workspace = MakeOutputs(problem, &p);
  Array o(dtype, spec.max_qo_tokens * spec.num_qo_heads * spec.head_dim_vo);
  p.o = o.data();
  AttentionCpu(problem, p, pool);
  std::vector<float> lse = workspace.lse, d(lse.size());
  std::normal_distribution<float> normal;
  for (size_t i = 0; i < d.size(); ++i) {
    d[i] = normal(random);
    for (int64_t j = 0; j < spec.head_dim_vo; ++j) {
      d[i] += o.At(i * spec.head_dim_vo + j) * d_o.At(i * spec.head_dim_vo + j);
    }
  }
  // Of a row and a key in the middle of the batch.
  if (poison != kNone) {
    const size_t token = b.qo_indptr.back() / 2, head = spec.num_qo_heads - 1;
    const size_t row = token * spec.num_qo_heads + head;
    const size_t last = c.requests.size() - 1, pos = c.requests[last].kv_len / 2;
    size_t key = b.kv_indptr[last] + pos;
    if (spec.paged()) {
      key = b.page_indices[b.kv_indptr[last] + pos / spec.page_size] * spec.page_size +
            pos % spec.page_size;
    }
    key = key * spec.num_kv_heads + spec.num_kv_heads - 1;
    if (poison == kNanQ) q.Put(row * spec.head_dim_qk + 3, NAN);
    if (poison == kInfiniteDo) d_o.Put(row * spec.head_dim_vo + 4, INFINITY);
    if (poison == kNanLse) lse[row] = NAN;
    if (poison == kInfiniteLse) lse[row] = INFINITY;
    if (poison == kNanD) d[row] = NAN;
    if (poison == kNanK) k.Put(key * spec.head_dim_qk + 1, NAN);
    if (poison == kInfiniteV) v.Put(key * spec.head_dim_vo + 2, -INFINITY);
  }

  BackwardParams on_cpu = {};
  on_cpu.forward = p;
  on_cpu.lse = lse.data();
  on_cpu.d = d.data();
  on_cpu.d_o = d_o.data();
  Gradients expected = {{dtype, q.size()}, {dtype, k.size()}, {dtype, v.size()}};
  std::vector<float> sums(BackwardSums(spec, p.num_pages));
  BackwardCpu(problem, on_cpu,
              {expected.d_q.data(), expected.d_k.data(), expected.d_v.data(), sums.data()}, pool);

  // Other orders of warps and CTAs: the same bits.
  Gradients got[2] = {{{dtype, q.size()}, {dtype, k.size()}, {dtype, v.size()}},
                      {{dtype, q.size()}, {dtype, k.size()}, {dtype, v.size()}}};
  for (Gradients& g : got) {
    std::vector<int32_t> words(BackwardWorkspaceWords(spec, p.num_pages));
    BackwardCudaParams params = MakeBackwardParams(problem, p, plan.data(), words.data());
    params.lse = lse.data();
    params.d = d.data();
    params.d_o = d_o.data();
    params.d_q = g.d_q.data();
    params.d_k = g.d_k.data();
    params.d_v = g.d_v.data();
    for (params.phase = 0; params.phase < 3; ++params.phase) {
      if (params.phase == 1 && !spec.paged()) continue;
      emulation::machine.Launch(static_cast<int>(c.num_ctas), Body::kNumThreads,
                                static_cast<unsigned>(random()), [&params] { Body::Run(params); });
    }
  }
  if (got[0].d_q.bytes() != got[1].d_q.bytes() || got[0].d_k.bytes() != got[1].d_k.bytes() ||
      got[0].d_v.bytes() != got[1].d_v.bytes()) {
    std::printf("FAILED %s: bits depend on the order of execution\n", c.name);
    ++g_failures;
  }
  const float tolerance = dtype == kF32 ? 1e-4f : 0.03f;
  CompareRows(c, "d_q", got[0].d_q, expected.d_q, spec.head_dim_qk, tolerance);
  CompareRows(c, "d_k", got[0].d_k, expected.d_k, spec.head_dim_qk, tolerance);
  CompareRows(c, "d_v", got[0].d_v, expected.d_v, spec.head_dim_vo, tolerance);
  std::printf("%s: %d warps, keys %d by %d, queries %d by %d\n", c.name,
              Body::kNumThreads / kWarpSize, Body::KeysPass::kOwned, Body::KeysPass::kStep,
              Body::QueriesPass::kOwned, Body::QueriesPass::kStep);
}

int RunAll() {
  const std::vector<Request> mixed = {{45, 70}, {3, 5}, {1, 200}, {0, 9}, {5, 2}, {1, 0}};
  const std::vector<Request> documents = {{70, 70}, {150, 150}, {1, 1}};
  // A prompt and answers to it, of which one has a query before its first key.
  const std::vector<Request> group = {{96, 96}, {20, 116}, {33, 129}, {40, 136}, {20, 110}};
  // Tables of more than one block name the first one's pages.
  const std::vector<Request> scattered = {{70, 170}, {20, 116}, {33, 129}, {9, 90}, {40, 64}};
  using Ragged64 = Kernel<ShapeOf<64, 64, 4, 0, false, true, false>, 90>::Traits;
  using Ragged128 = Kernel<ShapeOf<128, 128, 2, 0, false, true, false>, 90>::Traits;
  using Page16 = Kernel<ShapeOf<64, 64, 2, 16, false, true, false>, 90>::Traits;
  using OddShape = ShapeOf<40, 72, 5, 5, true, true, true>;
  using Odd = Kernel<OddShape, 90>::Traits;
  using OddF32 = Kernel<OddShape, 120, kElementF32>::Traits;
  // Two warps, and a turn for dk and one for dv.
  using Wide = Kernel<ShapeOf<256, 256, 1, 16, false, true, false>, 120>::Traits;
  RunBackward<Ragged64>({.name = "documents, d64", .requests = documents}, 1);
  RunBackward<Ragged128>({.name = "documents, d128", .requests = documents}, 2);
  RunBackward<Ragged64>({.name = "mixed, sinks", .requests = mixed, .sinks = true}, 3);
  RunBackward<Ragged64>({.name = "empty", .requests = {}}, 4);
  RunBackward<Ragged64>(
      {.name = "full", .requests = {{45, 70}, {130, 30}}, .window_right = 1 << 29}, 5);
  RunBackward<Page16>({.name = "pages", .requests = mixed}, 6);
  RunBackward<Page16>({.name = "a prompt's pages", .requests = group, .prefix = 96}, 7);
  RunBackward<Page16>({.name = "a tree of prefixes, split",
                       .requests = kForest,
                       .kv_split = 64,
                       .prefix = 256,
                       .half_prefix = 64},
                      8);
  RunBackward<Page16>({.name = "pages at other places", .requests = scattered}, 9, kNone, true);
  const Case odd = {.name = "windows, soft cap, sinks, odd sizes",
                    .requests = {{100, 130}, {7, 3}, {0, 9}, {40, 200}, {1, 0}},
                    .window_left = 30,
                    .window_right = 3,
                    .soft_cap = 3.0,
                    .sinks = true};
  RunBackward<Odd>(odd, 10);
  RunBackward<OddF32>(odd, 11);
  const Case odd_pages = {.name = "odd pages at other places",
                          .requests = scattered,
                          .window_left = 40,
                          .soft_cap = 3.0};
  RunBackward<Odd>(odd_pages, 12, kNone, true);
  RunBackward<OddF32>(odd_pages, 13, kNone, true);
  RunBackward<Wide>({.name = "d256", .requests = {{40, 90}, {20, 20}}, .kv_heads = 1}, 14);
  for (const Poison poison :
       {kNanQ, kInfiniteDo, kNanLse, kInfiniteLse, kNanD, kNanK, kInfiniteV}) {
    RunBackward<Ragged64>({.name = "not finite", .requests = {{30, 40}, {60, 70}}, .kv_heads = 1},
                          20 + poison, poison);
  }
  for (const Poison poison : {kNanQ, kNanK, kInfiniteV}) {
    const Case windows = {.name = "not finite, window, pages",
                          .requests = {{80, 90}, {60, 70}},
                          .window_left = 9,
                          .soft_cap = 3.0,
                          .kv_heads = 1};
    RunBackward<Odd>(windows, 30 + poison, poison);
    RunBackward<OddF32>(windows, 40 + poison, poison);
  }
  if (g_failures > 0) std::printf("%d failures\n", g_failures);
  return g_failures > 0;
}

}  // namespace
}  // namespace jax_attn

int main() { return jax_attn::RunAll(); }
