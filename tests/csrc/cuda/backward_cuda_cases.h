// Cases of backward_cuda_test.cc and backward*_sm90_test.cc: kernels of the backward pass run in
// emulation on plans of the real planner and must agree with the CPU kernels, which have their own
// tests.
//
// Include cuda_emulation.h before this file.
#pragma once

#include "cpu/backward.h"
#include "cuda/attention_cuda_cases.h"
#include "plan/damaged_headers.h"
#include "plan/rules/integers.h"
#include "variant/variant_operands.h"

namespace jax_attn {
namespace {

// Traits of a forward kernel for kTarget, whose shared memory decides on the backward tiles.
template <class Shape, int kTarget, int kElement = kElementBf16>
struct Kernel {
  struct Traits : Shape {
    static constexpr int kArch = kTarget, kDtype = kElement;
    static constexpr int kNumTiles = 2, kTileQ0 = 16, kTileQ1 = 128, kTileQ2 = 0;
    static constexpr int kTileKv = 64, kNumWarps = 4, kNumStages = 4;
    static constexpr int kStepKeys = Shape::kHasSteps ? kTileKv : 0;
  };
};

// The poison that a case puts into one of its arrays.
enum Poison {
  kNone,
  kNanQ,
  kInfiniteQ,
  kInfiniteDo,
  kNanLse,
  kInfiniteLse,
  kNanD,
  kNanK,
  kInfiniteK,
  kInfiniteV
};

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

// Checks that each row of `head_dim` is within a few roundings of its largest expected element.
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
      // CPU kernels have no weights that small.
      Compare(c, what, row + i, got.At(row + i), expected.At(row + i),
              tolerance * largest + 1e-35f);
    }
  }
}

// Sharing of pages between page tables.
// kOfCase: as the case says.
// kScattered: every table has pages of the first request at other positions, some of them twice.
// kAllButTheFirst: every table has all full pages of the first request except its first one.
// kGroupsOfThree: of three requests, the second and third begin with the previous one's pages,
// except its last shared one.
// kTrees: every table begins as that of an earlier request.
enum Tables { kOfCase, kScattered, kAllButTheFirst, kGroupsOfThree, kTrees };

void ScatterPages(const Case& c, int64_t page_size, Batch* b) {
  const int64_t whole = c.requests[0].kv_len / page_size;
  for (size_t r = 1; r < c.requests.size(); ++r) {
    for (int64_t i = b->kv_indptr[r]; i < b->kv_indptr[r + 1]; ++i) {
      const auto slot = i - b->kv_indptr[r];
      if (slot % 4 != 3) b->page_indices[i] = b->page_indices[(slot * (r + 1) / 2 + r) % whole];
    }
  }
}

void SharePagesBehindTheFirst(const Case& c, int64_t page_size, Batch* b) {
  for (size_t r = 1; r < c.requests.size(); ++r) {
    const int64_t whole = std::min(c.requests[0].kv_len, c.requests[r].kv_len) / page_size;
    for (int64_t slot = 1; slot < whole; ++slot) {
      b->page_indices[b->kv_indptr[r] + slot] = b->page_indices[slot];
    }
  }
}

void GroupPages(const Case& c, int64_t page_size, Batch* b) {
  for (size_t r = 1; r < c.requests.size(); ++r) {
    if (r % 3 == 0) continue;
    const int64_t whole = std::min(c.requests[r - 1].kv_len, c.requests[r].kv_len) / page_size;
    const int64_t shared = std::max<int64_t>(0, whole - 1);
    std::copy_n(b->page_indices.begin() + b->kv_indptr[r - 1], shared,
                b->page_indices.begin() + b->kv_indptr[r]);
  }
}

void PlantPages(const Case& c, int64_t page_size, std::mt19937& random, Batch* b) {
  for (size_t r = 1; r < c.requests.size(); ++r) {
    const size_t other = random() % r;
    // Its last page is not full; the request's own last page may be partial, too.
    const int64_t full = c.requests[other].kv_len / page_size;
    const int64_t own = (c.requests[r].kv_len + page_size - 1) / page_size;
    std::copy_n(b->page_indices.begin() + b->kv_indptr[other], random() % (std::min(full, own) + 1),
                b->page_indices.begin() + b->kv_indptr[r]);
  }
}

// Random classes of blocks, unrelated to any mask: a plan trusts its map.
BlockMap RandomMap(const Case& c, const AttentionSpec& spec, std::mt19937& random,
                   std::vector<uint8_t>* classes) {
  int64_t most = 1;
  for (const Request& r : c.requests) most = std::max<int64_t>(most, r.kv_len);
  BlockMap map = {nullptr, CeilDivide(spec.max_qo_tokens, int64_t{8}),
                  CeilDivide(most, int64_t{32}), 8, 32};
  constexpr uint8_t kClasses[] = {kSomeVisible, kSomeHidden, kSomeVisible | kSomeHidden};
  for (int64_t i = 0; i < map.num_rows * map.num_columns; ++i) {
    const unsigned dice = random() % 20;
    classes->push_back(kClasses[dice < 2 ? 0 : dice < 18 ? 1 : 2]);
  }
  map.classes = classes->data();
  return map;
}

// Runs a case. launch: void(const Case&, const AttentionSpec&, const BackwardCudaParams&,
// std::mt19937&) launches the backward pass. gradient: of the Traits' variant. range: of the
// integers that it reads.
template <class Traits, class Launch>
void RunBackward(const Case& c, unsigned seed, Poison poison, Tables tables, const Launch& launch,
                 const VariantGradient& gradient = {}, int range = 3) {
  std::mt19937 random(seed);
  AttentionProblem problem = MakeProblem<Traits>(c);
  AttentionSpec& spec = problem.spec;
  spec.dtype = Traits::kDtype;
  problem.program = gradient.program;
  Batch b = MakeBatch<Traits>(c, spec, random);
  if (tables == kScattered) ScatterPages(c, spec.page_size, &b);
  if (tables == kAllButTheFirst) SharePagesBehindTheFirst(c, spec.page_size, &b);
  if (tables == kGroupsOfThree) GroupPages(c, spec.page_size, &b);
  if (tables == kTrees) PlantPages(c, spec.page_size, random, &b);
  std::vector<uint8_t> classes;
  BlockMap map = {};
  if (Traits::kHasSteps) map = RandomMap(c, spec, random, &classes);
  const std::vector<int32_t> plan = MakePlan(c, problem, b, Traits::kHasSteps ? &map : nullptr);
  if (plan.empty()) return;
  const int dtype = Traits::kDtype;
  Array q(dtype, b.q), k(dtype, b.k), v(dtype, b.v);
  Array d_o(dtype, RandomBf16(spec.max_qo_tokens * spec.num_qo_heads * spec.head_dim_vo, random));
  std::vector<float> sinks(spec.num_qo_heads);
  for (float& x : sinks) x = static_cast<float>(random() % 4) - 1.0f;

  // The forward pass, with clean operands.
  InlinePool pool;
  AttentionParams p = MakeParams(problem, b, plan, c.sinks ? sinks.data() : nullptr);
  const auto read = MakeVariantOperands(gradient.program, range, random, p.variant_operands);
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
  // Poisons one row or key in the middle of the batch.
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
    if (poison == kInfiniteQ) q.Put(row * spec.head_dim_qk + 3, -INFINITY);
    if (poison == kInfiniteDo) d_o.Put(row * spec.head_dim_vo + 4, INFINITY);
    if (poison == kNanLse) lse[row] = NAN;
    if (poison == kInfiniteLse) lse[row] = INFINITY;
    if (poison == kNanD) d[row] = NAN;
    if (poison == kNanK) k.Put(key * spec.head_dim_qk + 1, NAN);
    if (poison == kInfiniteK) k.Put(key * spec.head_dim_qk + 1, INFINITY);
    if (poison == kInfiniteV) v.Put(key * spec.head_dim_vo + 2, -INFINITY);
  }

  BackwardParams on_cpu = {};
  on_cpu.forward = p;
  on_cpu.lse = lse.data();
  on_cpu.d = d.data();
  on_cpu.d_o = d_o.data();
  Gradients expected = {{dtype, q.size()}, {dtype, k.size()}, {dtype, v.size()}};
  std::vector<float> sums(BackwardSums(spec, p.num_pages));
  const std::vector<i32> differentiated = OperandsOf(gradient);
  BackwardResults results = {
      expected.d_q.data(), expected.d_k.data(), expected.d_v.data(), sums.data(), {}};
  std::vector<std::vector<float>> of_operands;
  for (const i32 operand : differentiated) {
    i64 size = 1;
    for (i32 axis = 0; axis < gradient.program.operands[operand].rank; ++axis) {
      size *= p.variant_operands[operand].dims[axis];
    }
    of_operands.emplace_back(size);
    results.operands.push_back({of_operands.back().data(), 1, size});
  }
  BackwardCpu(problem, gradient, on_cpu, results, pool);

  // Other orders of warps and CTAs give the same bits.
  Gradients got[2] = {{{dtype, q.size()}, {dtype, k.size()}, {dtype, v.size()}},
                      {{dtype, q.size()}, {dtype, k.size()}, {dtype, v.size()}}};
  std::vector<std::vector<i64>> operand_sums[2];
  for (Gradients& g : got) {
    std::vector<int32_t> words(BackwardWorkspaceWords(problem, p.num_pages));
    BackwardCudaParams params = MakeBackwardParams(problem, p, plan.data(), words.data());
    params.lse = lse.data();
    params.d = d.data();
    params.d_o = d_o.data();
    params.d_q = g.d_q.data();
    params.d_k = g.d_k.data();
    params.d_v = g.d_v.data();
    std::vector<std::vector<i64>>& of_all = operand_sums[&g - got];
    for (size_t i = 0; i < differentiated.size(); ++i) {
      of_all.emplace_back(of_operands[i].size());
      params.operand_sums[differentiated[i]] = of_all[i].data();
      params.num_operand_elements[differentiated[i]] = static_cast<i64>(of_all[i].size());
    }
    launch(c, spec, params, random);
  }
  if (got[0].d_q.bytes() != got[1].d_q.bytes() || got[0].d_k.bytes() != got[1].d_k.bytes() ||
      got[0].d_v.bytes() != got[1].d_v.bytes() || operand_sums[0] != operand_sums[1]) {
    std::printf("FAILED %s: bits depend on the order of execution\n", c.name);
    ++g_failures;
  }
  if (Traits::kHasSteps) {
    int num_masked = 0;
    for (int i = 0; i < p.header->num_steps; ++i) num_masked += p.steps[i] & 1;
    std::printf("  %d steps, %d masked\n", p.header->num_steps, num_masked);
  }
  const float tolerance = dtype == kF32 ? 1e-4f : 0.03f;
  CompareRows(c, "d_q", got[0].d_q, expected.d_q, spec.head_dim_qk, tolerance);
  CompareRows(c, "d_k", got[0].d_k, expected.d_k, spec.head_dim_qk, tolerance);
  CompareRows(c, "d_v", got[0].d_v, expected.d_v, spec.head_dim_vo, tolerance);
  // The forward pass ran without the non-finite key. For rows that see it, the CPU computes some
  // numbers and CUDA computes NaN.
  if (poison == kNanK || poison == kInfiniteK || poison == kInfiniteV) return;
  for (size_t i = 0; i < differentiated.size(); ++i) {
    Array found(kF32, of_operands[i].size()), sum(kF32, of_operands[i].size());
    for (size_t at = 0; at < found.size(); ++at) {
      std::memcpy(found.data() + 4 * at, &operand_sums[0][i][at], 4);
      sum.Put(at, of_operands[i][at]);
    }
    CompareRows(c, "d_operand", found, sum, static_cast<int64_t>(sum.size()), 1e-4f);
  }
}

// Runs one phase.
template <class Body>
void Emulate(const Case& c, const BackwardCudaParams& of_all, i32 phase, std::mt19937& random) {
  static_assert(Body::kSmemBytes <= static_cast<int>(sizeof(smem)), "fits a multiprocessor");
  BackwardCudaParams params = of_all;
  params.phase = phase;
  emulation::machine.Launch(static_cast<int>(c.num_ctas), Body::kNumThreads,
                            static_cast<unsigned>(random()), [&params] { Body::Run(params); });
}

// Invalid headers: all gradients are NaN, and nothing after the header is read. phases: runs all
// phases, void(const AttentionSpec&, const BackwardCudaParams&, std::mt19937&).
template <class Traits, class Phases>
void RunDamagedHeaders(const Case& c, const Phases& phases) {
  std::mt19937 random(1);
  AttentionProblem problem = MakeProblem<Traits>(c);
  AttentionSpec& spec = problem.spec;
  spec.dtype = Traits::kDtype;
  const Batch b = MakeBatch<Traits>(c, spec, random);
  const std::vector<int32_t> good = MakePlan(c, problem, b);
  const PlanLayout layout = MakePlanLayout(problem);
  const auto& header = *reinterpret_cast<const PlanHeader*>(good.data() + layout.header);
  for (const DamagedHeader& damaged :
       DamagedHeaders(header, MakePlanLimits(problem, b.num_pages))) {
    std::vector<int32_t> plan(good.size(), 0x7f7f7f70);
    std::memcpy(plan.data() + layout.header, &damaged.header, sizeof(damaged.header));
    AttentionParams p = MakeParams(problem, b, plan, nullptr);
    p.num_layers = 1;
    std::vector<int32_t> words(BackwardWorkspaceWords(problem, p.num_pages));
    BackwardCudaParams params = MakeBackwardParams(problem, p, plan.data(), words.data());
    std::vector<float> row(spec.max_qo_tokens * spec.num_qo_heads);
    Array d_o(Traits::kDtype, spec.max_qo_tokens * spec.num_qo_heads * spec.head_dim_vo);
    params.lse = params.d = row.data();
    params.d_o = d_o.data();
    std::vector<Array> results;
    for (const i64 num : params.num_elements) {
      results.emplace_back(Traits::kDtype, static_cast<size_t>(num));
    }
    params.d_q = results[0].data();
    params.d_k = results[1].data();
    params.d_v = results[2].data();
    phases(spec, params, random);
    for (const Array& x : results) {
      const auto is_set = [](char byte) { return byte == static_cast<char>(0xff); };
      if (std::all_of(x.bytes().begin(), x.bytes().end(), is_set)) continue;
      std::printf("FAILED %s, %s: not all gradients are NaN\n", c.name, damaged.what.c_str());
      ++g_failures;
    }
  }
}

}  // namespace
}  // namespace jax_attn
