// CPU kernels against a double-precision reference: see attention_cpu_cases.h.
#include "cpu/append.h"
#include "cpu/attention_cpu_cases.h"
#include "cpu/merge.h"
#include "cpu/thread_pool.h"
#include "cpu/threads/task_pool.h"
#include "plan/merge_trees.h"

namespace jax_attn {
namespace {

Output Run(const Problem& p, const PlanData& plan, TaskPool& pool) {
  const Case& c = p.c;
  Output out{Array(c.dtype, p.max_qo * c.num_qo_heads * c.dvo),
             std::vector<float>(p.max_qo * c.num_qo_heads, kNan)};
  for (int64_t i = 0; i < p.max_qo * c.num_qo_heads * c.dvo; ++i) out.o.Set(i, kNan);
  std::vector<float> partial_o(plan.header.num_partial_rows * int64_t{c.dvo}, kNan);
  std::vector<RowState> partial_states(plan.header.num_partial_rows, {kNan, kNan});
  std::vector<i32> counters(plan.groups.size(), -1);
  AttentionParams a = ParamsOf(p, plan);
  a.o = out.o.bytes.data();
  a.lse = out.lse.data();
  a.merge_counters = counters.data();
  a.partial_states = partial_states.data();
  a.partial_o = partial_o.data();
  AttentionCpu(p.problem, a, pool);
  return out;
}

bool SameBits(const Output& a, const Output& b) {
  return a.o.bytes == b.o.bytes && std::memcmp(a.lse.data(), b.lse.data(), a.lse.size() * 4) == 0;
}

void Compare(const Problem& p, const Output& got, const Output& want, const char* what) {
  // bf16 and f16: rounding of o, and for bf16 of P where the instruction set multiplies bf16 pairs.
  // f32: sums of up to 8191 products.
  const double rel = p.c.dtype == kF32 ? 1e-5 : p.c.dtype == kBF16 ? 8e-3 : 1e-3;
  // With large keys, the rounding error of a logit is a relative error of its exponential.
  const double logit_error = p.c.k_magnitude > 1 ? 2e-6 * p.c.k_magnitude : 0;
  const double abs = (p.c.dtype == kF32 ? 2e-6 : p.c.dtype == kBF16 ? 4e-3 : 2e-4) + logit_error;
  const int64_t dvo = p.c.dvo;
  for (size_t row = 0; row < want.lse.size(); ++row) {
    const float x = got.lse[row], y = want.lse[row];
    const bool same = x == y || std::fabs(x - y) <= 1e-4 + logit_error + 1e-6 * std::fabs(y) ||
                      (x != x && y != y);
    CHECK(same, "%s %s lse row %zu head %zu: got %g want %g", p.c.name.c_str(), what,
          row / p.c.num_qo_heads, row % p.c.num_qo_heads, x, y);
    if (!same) return;
    for (int64_t d = 0; d < dvo; ++d) {
      const double a = got.o.Get(row * dvo + d), b = want.o.Get(row * dvo + d);
      const bool close = (a != a && b != b) || std::fabs(a - b) <= abs + rel * std::fabs(b);
      CHECK(close, "%s %s o row %zu head %zu d %lld: got %g want %g", p.c.name.c_str(), what,
            row / p.c.num_qo_heads, row % p.c.num_qo_heads, static_cast<long long>(d), a, b);
      if (!close) return;
    }
  }
}

PlanData WithMergeTrees(PlanData plan) {
  MakeMergeTrees(plan.partial_rows, plan.items.data(), plan.header.num_items, &plan.groups);
  plan.header.num_merge_groups = static_cast<i32>(plan.groups.size());
  return plan;
}

void TestCase(const Case& c, TaskPool& threads) {
  InlinePool inline_pool;
  const Problem p(c);
  const Output want = Reference(p);
  for (const std::string& isa : Isas()) {
    UseIsa(isa);
    const PlanData plan = RandomPlan(p, 5, 7);
    const Output got = Run(p, plan, inline_pool);
    Compare(p, got, want, isa.c_str());
    for (int i = 0; i < 3; ++i) {
      CHECK(SameBits(got, Run(p, plan, threads)), "%s %s: bits depend on the threads",
            c.name.c_str(), isa.c_str());
    }
    CHECK(SameBits(got, Run(p, WithMergeTrees(plan), threads)), "%s %s: bits depend on the tree",
          c.name.c_str(), isa.c_str());
  }
}

// int8 dot products: sums are the same integers on all instruction sets. So results differ only by
// the last bits of exponentials and, where these decide the rounding of P, by one quantization
// step. tests/ops/test_eight_bit_products.py compares them with a reference.
void TestCodes(const Case& c, TaskPool& threads) {
  const Problem p(c);
  const PlanData plan = RandomPlan(p, 5, 7);
  const std::vector<std::string> isas = Isas();
  UseIsa(isas[0]);
  const Output want = Run(p, plan, threads);
  for (const std::string& isa : isas) {
    UseIsa(isa);
    const Output got = Run(p, plan, threads);
    for (size_t row = 0; row < want.lse.size(); ++row) {
      const float x = got.lse[row], y = want.lse[row];
      CHECK(x == y || std::fabs(x - y) <= 1e-5 * (1 + std::fabs(y)),
            "%s %s lse row %zu: %g want %g", c.name.c_str(), isa.c_str(), row, x, y);
      for (int d = 0; d < c.dvo; ++d) {
        const double a = got.o.Get(row * c.dvo + d), b = want.o.Get(row * c.dvo + d);
        CHECK(std::fabs(a - b) <= 2.0 / 255 + 0.01 * std::fabs(b),
              "%s %s o row %zu d %d: %g want %g", c.name.c_str(), isa.c_str(), row, d, a, b);
      }
    }
    CHECK(SameBits(got, Run(p, WithMergeTrees(plan), threads)), "%s %s: bits depend on the tree",
          c.name.c_str(), isa.c_str());
  }
}

// The bits of a request must not depend on tiles or neighbours once chunk borders are fixed.
void TestInvariance(Case c, TaskPool& threads) {
  for (const std::string& isa : Isas()) {
    UseIsa(isa);
    c.split = 96;
    c.max_tile_tokens = 1 << 30;
    const Problem tall(c);
    const Output want = Run(tall, RandomPlan(tall, 3, 1), threads);
    for (int tokens : {1, 2, 3, 7}) {
      c.max_tile_tokens = tokens;
      const Problem low(c);
      CHECK(SameBits(want, Run(low, RandomPlan(low, 4, tokens), threads)),
            "%s %s: tiles of %d tokens differ", c.name.c_str(), isa.c_str(), tokens);
    }
    c.max_tile_tokens = 1 << 30;
    c.split = -1;  // one chunk equals its merge with identities
  }
}

// The bits must also not depend on whether tiles of a head pass over the keys together. Tiles of
// one queue do; in plans with a queue per tile none can. Includes a poisoned value, for which rows
// are handled separately.
void TestTilesTogether(Case c, TaskPool& threads) {
  c.split = -1;
  c.in_order = true;
  c.tile_q1 = 64;
  for (const std::string& isa : Isas()) {
    UseIsa(isa);
    for (bool poisoned : {false, true}) {
      Problem p(c);
      if (poisoned && !c.codes) {
        p.v.Set((p.slots[c.requests[0].kv_len - 70] * c.num_kv_heads + 1) * c.dvo + 3, kNan);
      }
      const Output want = Run(p, RandomPlan(p, 1000, 1), threads);
      for (int num_ctas : {1, 2, 3}) {
        PlanData plan = RandomPlan(p, num_ctas, 1);
        CHECK(SameBits(want, Run(p, plan, threads)), "%s %s: tiles of %d queues differ",
              c.name.c_str(), isa.c_str(), num_ctas);
        if (num_ctas > 1) continue;
        std::reverse(plan.items.begin(), plan.items.end());  // the order of planners
        for (size_t i = 0; i < plan.items.size(); i += c.num_kv_heads) {
          std::reverse(plan.items.begin() + i, plan.items.begin() + i + c.num_kv_heads);
        }
        CHECK(SameBits(want, Run(p, plan, threads)), "%s %s: the last tile first differs",
              c.name.c_str(), isa.c_str());
      }
    }
  }
}

// A NaN or inf in one visible key or value reaches the rows that see it, and changes no other bit.
void TestPoisonedToken(const Case& c, TaskPool& threads) {
  for (const std::string& isa : Isas()) {
    UseIsa(isa);
    Problem p(c);
    const PlanData plan = RandomPlan(p, 3, 5);
    const Output clean = Run(p, plan, threads);
    const int group = c.num_qo_heads / c.num_kv_heads;
    for (int in_v = 0; in_v < 2; ++in_v) {
      for (float poison : {kNan, kInf}) {
        if (!in_v && poison == kInf) continue;
        const int j = c.requests[0].kv_len - 5;
        Problem bad(c);
        const int dim = in_v ? c.dvo : c.dqk;
        (in_v ? bad.v : bad.k).Set((bad.slots[j] * c.num_kv_heads + 1) * dim + 3, poison);
        const Output got = Run(bad, plan, threads);
        for (int i = 0; i < c.requests[0].qo_len; ++i) {
          const int pos = c.requests[0].kv_len - c.requests[0].qo_len + i;
          for (int h = 0; h < c.num_qo_heads; ++h) {
            const bool sees =
                h / group == 1 && pos >= j && (c.window_left < 0 || pos - c.window_left <= j);
            const int64_t row = int64_t{i} * c.num_qo_heads + h;
            const double o = got.o.Get(row * c.dvo + 3);
            if (sees) {
              CHECK(!std::isfinite(o) && (in_v || got.lse[row] != got.lse[row]),
                    "%s %s: token %d head %d lost a NaN", c.name.c_str(), isa.c_str(), i, h);
            } else {
              const int64_t bytes = c.dvo * ElementBytes(c.dtype);
              CHECK(!std::memcmp(&got.o.bytes[row * bytes], &clean.o.bytes[row * bytes], bytes) &&
                        Bits(got.lse[row]) == Bits(clean.lse[row]),
                    "%s %s: token %d head %d changed by a token it does not see", c.name.c_str(),
                    isa.c_str(), i, h);
            }
          }
        }
      }
    }
  }
}

void TestAppend(TaskPool& threads) {
  Case c;
  c.dtype = kBF16;
  c.num_layers = 2;
  c.dqk = 40;
  c.dvo = 24;
  c.page_size = 3;
  c.requests = {{2, 5}, {0, 4}, {7, 7}, {1, 1}, {0, 0}, {3, 100}};
  Problem p(c);
  const int64_t k_bytes = c.num_kv_heads * c.dqk * 2, v_bytes = c.num_kv_heads * c.dvo * 2;
  std::vector<char> k_new(p.max_qo * k_bytes), v_new(p.max_qo * v_bytes);
  std::mt19937 rng(3);
  for (char& x : k_new) x = static_cast<char>(rng());
  for (char& x : v_new) x = static_cast<char>(rng());
  std::vector<char> k = p.k.bytes, v = p.v.bytes;
  for (size_t r = 0; r < c.requests.size(); ++r) {
    const Request& request = c.requests[r];
    for (int i = 0; i < request.qo_len; ++i) {
      const int64_t slot = p.slots[p.slot_begin[r] + request.kv_len - request.qo_len + i];
      std::memcpy(&k[slot * k_bytes], &k_new[(p.qo_indptr[r] + i) * k_bytes], k_bytes);
      std::memcpy(&v[slot * v_bytes], &v_new[(p.qo_indptr[r] + i) * v_bytes], v_bytes);
    }
  }
  PlanHeader header{};
  header.batch_size = static_cast<i32>(c.requests.size());
  header.nnz_qo = static_cast<i32>(p.nnz_qo);
  AppendParams a{};
  a.k_pages = p.k.bytes.data();
  a.v_pages = p.v.bytes.data();
  a.k_new = k_new.data();
  a.v_new = v_new.data();
  a.layer = p.layer.data();
  a.header = &header;
  a.qo_indptr = p.qo_indptr.data();
  a.kv_lens = p.kv_lens.data();
  a.page_indptr = p.page_indptr.data();
  a.page_indices = p.page_indices.data();
  a.num_pages = p.num_pages;
  a.k_row_bytes = k_bytes;
  a.v_row_bytes = v_bytes;
  a.page_size = c.page_size;
  a.max_qo_tokens = static_cast<i32>(p.max_qo);
  AppendCpu(a, threads);
  CHECK(p.k.bytes == k && p.v.bytes == v, "append wrote the wrong rows");
}

void TestMerge(TaskPool& threads) {
  std::mt19937 rng(3);
  std::normal_distribution<float> normal;
  for (const std::string& isa : Isas()) {
    UseIsa(isa);
    for (int64_t dtype : {kBF16, kF16, kF32}) {
      for (int dim : {8, 72, 128, 512}) {
        for (int states : {1, 2, 5}) {
          const int64_t rows = 333;
          Array parts(dtype, states * rows * dim), o(dtype, rows * dim);
          std::vector<float> lse_parts(states * rows), lse(rows, kNan);
          for (int64_t i = 0; i < states * rows; ++i) {
            lse_parts[i] = rng() % 3 == 0 ? -kInf : 20 * normal(rng);
            // The o of an identity is never read.
            for (int d = 0; d < dim; ++d)
              parts.Set(i * dim + d, lse_parts[i] == -kInf ? kNan : normal(rng));
          }
          MergeParams m{
              parts.bytes.data(), lse_parts.data(), o.bytes.data(), lse.data(), rows, states, dim};
          MergeCpu(dtype, m, threads);
          for (int64_t r = 0; r < rows; ++r) {
            double max = -INFINITY, sum = 0;
            for (int i = 0; i < states; ++i) max = std::fmax(max, lse_parts[i * rows + r]);
            for (int i = 0; i < states; ++i)
              sum += max == -INFINITY ? 0 : std::exp(lse_parts[i * rows + r] - max);
            const float want_lse = sum == 0 ? -kInf : static_cast<float>(max + std::log(sum));
            CHECK(lse[r] == want_lse || std::fabs(lse[r] - want_lse) < 1e-4,
                  "merge lse row %lld: %g want %g", static_cast<long long>(r), lse[r], want_lse);
            for (int d = 0; d < dim; ++d) {
              double want = 0;
              for (int i = 0; i < states; ++i) {
                const float l = lse_parts[i * rows + r];
                if (l != -kInf)
                  want += std::exp(l - max) / sum * parts.Get((i * rows + r) * dim + d);
              }
              const double tolerance = dtype == kF32 ? 1e-5 : dtype == kF16 ? 2e-3 : 1.6e-2;
              CHECK(std::fabs(o.Get(r * dim + d) - want) < tolerance,
                    "merge o row %lld d %d: %g want %g", static_cast<long long>(r), d,
                    o.Get(r * dim + d), want);
            }
          }
        }
      }
    }
  }
}

std::vector<Case> Cases() {
  std::vector<Case> cases;
  const auto add = [&](const char* name, auto&& edit) {
    Case c;
    c.name = name;
    c.requests = {{1, 1},   {0, 33}, {37, 97}, {1, 200},  {2, 17},
                  {17, 16}, {5, 0},  {65, 65}, {129, 150}};
    edit(c);
    for (int64_t dtype : {kF32, kBF16, kF16}) {
      c.dtype = dtype;
      cases.push_back(c);
      cases.back().name += dtype == kF32 ? "/f32" : dtype == kBF16 ? "/bf16" : "/f16";
    }
  };
  add("causal", [](Case&) {});
  add("full", [](Case& c) { c.window_right = -1; });
  add("window", [](Case& c) { c.window_left = 20, c.window_right = 7; });
  add("window_left0", [](Case& c) { c.window_left = 0; });
  add("cap_sinks", [](Case& c) { c.soft_cap = 5, c.sinks = true; });
  add("sinks_no_split", [](Case& c) { c.sinks = true, c.split = -1; });
  add("ragged", [](Case& c) { c.page_size = 0; });
  add("layers", [](Case& c) { c.num_layers = 3, c.page_size = 7; });
  add("negative_scale", [](Case& c) { c.sm_scale = -0.2f; });
  add("scale0", [](Case& c) { c.sm_scale = 1e-30f; });
  add("large_logits", [](Case& c) { c.k_magnitude = 3e3f, c.sm_scale = 1.0f; });
  add("empty", [](Case& c) { c.requests = {}; });
  add("empty_kv", [](Case& c) { c.requests = {{3, 0}, {1, 0}}, c.sinks = true; });
  add("no_padding", [](Case& c) { c.padding_tokens = 0; });
  for (int page_size : {1, 3, 5, 48, 64}) {
    add("page", [&](Case& c) { c.page_size = page_size, c.name += std::to_string(page_size); });
  }
  for (int group : {1, 2, 3, 5, 6, 7, 8, 11, 13, 16}) {
    add("group", [&](Case& c) {
      c.num_kv_heads = 3, c.num_qo_heads = 3 * group, c.name += std::to_string(group);
      c.requests = {{1, 97}, {3, 130}, {23, 23}, {1, 1}};
    });
  }
  const int dims[][2] = {{8, 8},     {16, 40},   {72, 24},   {80, 80},   {96, 96},
                         {112, 120}, {128, 128}, {192, 128}, {256, 256}, {576, 512}};
  for (const auto& d : dims) {
    add("dim", [&](Case& c) {
      c.dqk = d[0], c.dvo = d[1], c.name += std::to_string(d[0]) + "x" + std::to_string(d[1]);
      c.requests = {{1, 99}, {21, 70}, {4, 131}};
    });
  }
  add("every_kv_len", [](Case& c) {
    c.requests.clear(), c.dqk = c.dvo = 16, c.num_qo_heads = 2, c.num_kv_heads = 1;
    for (int n = 1; n <= 2 * 128 + 1; ++n) c.requests.push_back({1 + n % 3, n});
  });
  add("long", [](Case& c) {
    c.requests = {{1, 8191}, {7, 1025}, {577, 1023}}, c.dqk = c.dvo = 32, c.num_qo_heads = 2,
    c.num_kv_heads = 1;
  });
  return cases;
}

}  // namespace

// Runs every `step`-th case: all dtypes, unless it is a multiple of 3. Invariance only if 1.
int TestMain(size_t step) {
  ThreadPool threads(3);
  TestAppend(threads);
  TestMerge(threads);
  const std::vector<Case> cases = Cases();
  for (size_t i = 0; i < cases.size(); i += step) TestCase(cases[i], threads);
  for (size_t i = 0; i < cases.size(); i += std::max<size_t>(step, 4)) {  // cases of all dtypes
    Case c = cases[i];
    c.codes = true;
    if (c.page_size > 0 && c.dqk <= 256 && c.k_magnitude == 1) TestCodes(c, threads);
  }
  for (int64_t dtype : {kF32, kBF16, kF16}) {
    if (step > 1) break;  // minutes in an emulator
    Case c;
    c.dtype = dtype;
    c.requests = {{64, 300}, {1, 97}, {40, 40}, {1, 250}, {9, 500}};
    c.name = "invariance";
    c.sinks = true;
    TestInvariance(c, threads);
    c.codes = true;
    TestInvariance(c, threads);
    c.codes = false;
    c.window_left = 100;
    c.dqk = 72, c.dvo = 40;
    TestInvariance(c, threads);
    c.requests = {{60, 1900}};  // more than a batch of states; tiles begin anywhere in a batch
    c.window_left = 1100;
    TestInvariance(c, threads);
    for (int window_left : {-1, 40}) {
      Case tall;
      tall.dtype = dtype;
      tall.name = "tiles_together";
      tall.requests = {{190, 300}, {9, 9}, {130, 130}};
      tall.window_left = window_left;
      TestTilesTogether(tall, threads);
      tall.window_right = window_left;  // no limit, or to both sides
      tall.num_qo_heads = 6, tall.num_kv_heads = 3;
      tall.page_size = 0;
      TestTilesTogether(tall, threads);
      tall.codes = true;
      tall.num_qo_heads = 2, tall.num_kv_heads = 1;
      TestTilesTogether(tall, threads);
    }
    c.requests = {{40, 170}};
    c.name = "poisoned_token";
    for (int tokens : {100, 3}) {
      c.max_tile_tokens = tokens;
      TestPoisonedToken(c, threads);
    }
  }
  std::printf("%s; instruction sets:", g_failures ? "FAILED" : "ok");
  for (const std::string& isa : Isas()) std::printf(" %s", isa.c_str());
  std::printf("\n");
  return g_failures ? 1 : 0;
}

}  // namespace jax_attn

int main(int argc, char** argv) { return jax_attn::TestMain(argc > 1 ? std::stoul(argv[1]) : 1); }
