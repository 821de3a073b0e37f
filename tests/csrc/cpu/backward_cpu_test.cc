// The backward pass on CPUs against a double-precision reference: see attention_cpu_cases.h.
#include "cpu/attention_cpu_cases.h"
#include "cpu/backward.h"
#include "cpu/thread_pool.h"

namespace jax_attn {
namespace {

// d_o and d_lse of a problem, NaN in padding rows.
struct Cotangents {
  Array d_o;
  std::vector<float> d_lse;

  explicit Cotangents(const Problem& p)
      : d_o(p.c.dtype, p.max_qo * p.c.num_qo_heads * p.c.dvo), d_lse(p.max_qo * p.c.num_qo_heads) {
    std::mt19937 rng(2);
    std::normal_distribution<float> normal;
    for (int64_t row = 0; row < static_cast<int64_t>(d_lse.size()); ++row) {
      const bool is_live = row < p.nnz_qo * p.c.num_qo_heads;
      d_lse[row] = is_live ? normal(rng) : kNan;
      for (int i = 0; i < p.c.dvo; ++i) d_o.Set(row * p.c.dvo + i, is_live ? normal(rng) : kNan);
    }
  }
};

// A gradient, and the sum of its terms' absolute values, also for terms that are differences.
struct Gradient {
  std::vector<double> value, size;
  explicit Gradient(int64_t n) : value(n), size(n) {}
  void Add(int64_t i, double x, double size_of_x) {
    value[i] += x;
    size[i] += size_of_x;
  }
};

struct Gradients {
  Gradient d_q, d_k, d_v;
  std::vector<float> lse, d;  // forward results that the backward pass reads
};

Gradients ReferenceGradients(const Problem& p, const Cotangents& of) {
  const Case& c = p.c;
  const int group = c.num_qo_heads / c.num_kv_heads;
  const auto elements = [](const Array& x) {
    return static_cast<int64_t>(x.bytes.size()) / ElementBytes(x.dtype);
  };
  Output forward = Reference(p);
  Gradients g{Gradient(elements(p.q)), Gradient(elements(p.k)), Gradient(elements(p.v)),
              forward.lse, std::vector<float>(forward.lse.size(), kNan)};
  for (size_t r = 0; r < c.requests.size(); ++r) {
    for (int i = 0; i < c.requests[r].qo_len; ++i) {
      const int pos = c.requests[r].kv_len - c.requests[r].qo_len + i;
      for (int h = 0; h < c.num_qo_heads; ++h) {
        const int64_t row = (p.qo_indptr[r] + i) * int64_t{c.num_qo_heads} + h;
        double d = -of.d_lse[row];
        for (int x = 0; x < c.dvo; ++x) {
          d += of.d_o.Get(row * c.dvo + x) * forward.o.Get(row * c.dvo + x);
        }
        g.d[row] = static_cast<float>(d);
        for (int j = 0; j < c.requests[r].kv_len; ++j) {
          if (c.window_left >= 0 && j < pos - c.window_left) continue;
          if (c.window_right >= 0 && j > pos + c.window_right) continue;
          const int64_t slot = p.slots[p.slot_begin[r] + j] * c.num_kv_heads + h / group;
          double s = 0, d_p = 0, d_p_size = 0, slope = p.scale();
          for (int x = 0; x < c.dqk; ++x) s += p.q.Get(row * c.dqk + x) * p.k.Get(slot * c.dqk + x);
          s *= p.scale();
          if (c.soft_cap > 0) {
            const double tanh = std::tanh(s / c.soft_cap);
            s = c.soft_cap * tanh;
            slope *= 1 - tanh * tanh;
          }
          for (int x = 0; x < c.dvo; ++x) {
            const double term = of.d_o.Get(row * c.dvo + x) * p.v.Get(slot * c.dvo + x);
            d_p += term;
            d_p_size += std::fabs(term);
          }
          const double w = std::exp(s - forward.lse[row]), d_s = w * (d_p - d) * slope;
          const double d_s_size = w * (d_p_size + std::fabs(d)) * slope;
          for (int x = 0; x < c.dvo; ++x) {
            const double term = w * of.d_o.Get(row * c.dvo + x);
            g.d_v.Add(slot * c.dvo + x, term, std::fabs(term));
          }
          for (int x = 0; x < c.dqk; ++x) {
            const double q = p.q.Get(row * c.dqk + x), k = p.k.Get(slot * c.dqk + x);
            g.d_k.Add(slot * c.dqk + x, d_s * q, d_s_size * std::fabs(q));
            g.d_q.Add(row * c.dqk + x, d_s * k, d_s_size * std::fabs(k));
          }
        }
      }
    }
  }
  return g;
}

struct Results {
  Array d_q, d_k, d_v;
  bool operator==(const Results& other) const {
    return d_q.bytes == other.d_q.bytes && d_k.bytes == other.d_k.bytes &&
           d_v.bytes == other.d_v.bytes;
  }
};

// Results and sums are NaN at entry.
Results RunBackward(Problem& p, const PlanData& plan, const Cotangents& of, const Gradients& read,
                    TaskPool& pool) {
  const Case& c = p.c;
  AttentionSpec& spec = p.problem.spec;
  spec.page_size = c.page_size;
  spec.max_qo_tokens = p.max_qo;
  spec.logits_soft_cap = c.soft_cap;
  const auto rows =
      static_cast<int64_t>(p.k.bytes.size()) / ElementBytes(c.dtype) / (c.num_kv_heads * c.dqk);
  spec.max_kv_tokens = c.page_size ? 0 : rows;
  const auto poisoned = [&](const Array& like) {
    Array x = like;
    const auto n = static_cast<int64_t>(x.bytes.size()) / ElementBytes(c.dtype);
    for (int64_t i = 0; i < n; ++i) x.Set(i, kNan);
    return x;
  };
  Results results{poisoned(p.q), poisoned(p.k), poisoned(p.v)};
  std::vector<float> sums(BackwardSums(spec, p.num_pages), kNan);
  BackwardParams params{};
  params.forward = ParamsOf(p, plan);
  params.lse = read.lse.data();
  params.d = read.d.data();
  params.d_o = of.d_o.bytes.data();
  BackwardCpu(p.problem, VariantGradient{}, params,
              {results.d_q.bytes.data(),
               results.d_k.bytes.data(),
               results.d_v.bytes.data(),
               sums.data(),
               {}},
              pool);
  return results;
}

void Compare(const Problem& p, const char* isa, const char* what, const Array& got,
             const Gradient& want) {
  const double eps = p.c.dtype == kF32 ? 4e-6 : p.c.dtype == kBF16 ? 2e-2 : 2.5e-3;
  const double largest =
      want.size.empty() ? 0 : *std::max_element(want.size.begin(), want.size.end());
  for (size_t i = 0; i < want.value.size(); ++i) {
    const double x = got.Get(static_cast<int64_t>(i));
    // Exactly 0 where nothing is read.
    const double allowed = want.size[i] == 0 ? 0 : eps * (want.size[i] + 1e-3 * largest) + 1e-30;
    const bool is_close = std::fabs(x - want.value[i]) <= allowed;
    CHECK(is_close, "%s %s: %s[%zu]: got %g want %g of terms of %g", p.c.name.c_str(), isa, what, i,
          x, want.value[i], want.size[i]);
    if (!is_close) return;
  }
}

void TestCase(const Case& c, TaskPool& threads) {
  InlinePool inline_pool;
  Problem p(c);
  const Cotangents of(p);
  const Gradients want = ReferenceGradients(p, of);
  for (const std::string& isa : Isas()) {
    if (isa == kKernelsAmxEmulated.name && c.dtype != kBF16) continue;
    UseIsa(isa);
    const PlanData plan = RandomPlan(p, c.in_order ? 1 : 2, 7);
    const Results got = RunBackward(p, plan, of, want, inline_pool);
    Compare(p, isa.c_str(), "d_q", got.d_q, want.d_q);
    Compare(p, isa.c_str(), "d_k", got.d_k, want.d_k);
    Compare(p, isa.c_str(), "d_v", got.d_v, want.d_v);
    CHECK(got == RunBackward(p, plan, of, want, threads), "%s %s: bits depend on the threads",
          c.name.c_str(), isa.c_str());
  }
}

std::vector<Case> Cases() {
  std::vector<Case> cases;
  const auto add = [&](const char* name, auto&& edit) {
    Case c;
    c.name = name;
    c.requests = {{1, 1}, {0, 33}, {37, 97}, {17, 16}, {5, 0}, {65, 65}, {129, 150}};
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
  add("cap", [](Case& c) { c.soft_cap = 5; });
  add("ragged", [](Case& c) { c.page_size = 0, c.split = -1, c.in_order = true; });
  add("layers", [](Case& c) { c.num_layers = 3, c.page_size = 7; });
  add("empty", [](Case& c) { c.requests = {}; });
  for (const auto& d : {std::pair{8, 8}, {16, 40}, {72, 24}, {80, 80}, {128, 128}}) {
    add("dim", [&](Case& c) {
      c.dqk = d.first, c.dvo = d.second;
      c.name += std::to_string(d.first) + "x" + std::to_string(d.second);
      c.requests = {{21, 70}, {4, 131}};
    });
  }
  // More rows and keys than a task has, for items that are joined and for one that is not.
  for (int window_left : {-1, 300}) {
    add("joined", [&](Case& c) {
      c.window_left = window_left, c.name += std::to_string(window_left);
      c.dqk = c.dvo = 32, c.num_qo_heads = 3, c.num_kv_heads = 1, c.split = -1, c.in_order = true;
      c.requests = {{1, 40}, {300, 700}, {90, 90}};
    });
  }
  return cases;
}

}  // namespace

// Runs every `step`-th case: all dtypes, unless it is a multiple of 3.
int TestMain(size_t step) {
  ThreadPool threads(3);
  const std::vector<Case> cases = Cases();
  for (size_t i = 0; i < cases.size(); i += step) TestCase(cases[i], threads);
  std::printf("%s\n", g_failures ? "FAILED" : "ok");
  return g_failures ? 1 : 0;
}

}  // namespace jax_attn

int main(int argc, char** argv) { return jax_attn::TestMain(argc > 1 ? std::stoul(argv[1]) : 1); }
