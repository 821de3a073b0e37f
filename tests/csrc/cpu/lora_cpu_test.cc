// Low-rank products of adapters: every instruction set of this machine against sums in f64; a row
// has the same bits beside other rows and with threads; nothing beyond an adapter's rank is read.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "cpu/dispatch.h"
#include "cpu/lora.h"
#include "cpu/simd/simd_types.h"
#include "cpu/thread_pool.h"
#include "spec.h"

namespace jax_attn {
namespace {

int g_failures = 0;

struct Random {
  uint32_t state = 1;
  uint32_t Next() { return state = state * 1664525u + 1013904223u; }
  float operator()() { return static_cast<float>(static_cast<int32_t>(Next())) * 0x1p-31f; }
};

struct Case {
  i64 depth;
  std::vector<int64_t> ends;
};

// threads: more than there are adapters. two: fewer.
void Check(const std::string& isa, const Case& c, TaskPool& threads, TaskPool& two) {
  constexpr i64 kRows = 70, kAdapters = 3, kRank = 9;
  const i64 parts = static_cast<i64>(c.ends.size()), columns = c.ends.back();
  Random random;
  std::vector<float> x(kRows * c.depth), a(kAdapters * parts * kRank * c.depth, NAN);
  std::vector<float> b(kAdapters * kRank * columns, NAN), y(kRows * columns);
  std::vector<int32_t> adapters(kRows), ranks(kAdapters * parts);
  for (float& value : x) value = random();
  for (float& value : y) value = random();
  for (int32_t& value : adapters) value = static_cast<int32_t>(random.Next() >> 8) % 4 - 1;
  for (int32_t& value : ranks) value = static_cast<int32_t>(random.Next() >> 8) % (kRank + 1);
  std::vector<double> expected(y.begin(), y.end());
  for (i64 s = 0; s < kAdapters; ++s) {
    for (i64 part = 0; part < parts; ++part) {
      for (i64 r = 0; r < ranks[s * parts + part]; ++r) {
        float* of_a = &a[((s * parts + part) * kRank + r) * c.depth];
        float* of_b = &b[(s * kRank + r) * columns];
        const i64 begin = part == 0 ? 0 : c.ends[part - 1];
        for (i64 k = 0; k < c.depth; ++k) of_a[k] = random();
        for (i64 j = begin; j < c.ends[part]; ++j) of_b[j] = random();
        for (i64 row = 0; row < kRows; ++row) {
          if (adapters[row] != s) continue;
          double h = 0;
          for (i64 k = 0; k < c.depth; ++k) h += double{x[row * c.depth + k]} * of_a[k];
          for (i64 j = begin; j < c.ends[part]; ++j) expected[row * columns + j] += h * of_b[j];
        }
      }
    }
  }
  const auto run = [&](i64 rows, TaskPool& pool) {
    std::vector<float> out(y.begin(), y.begin() + rows * columns);
    out.push_back(7);
    LoraCpu(
        kF32,
        {x.data(), a.data(), b.data(), out.data(), nullptr, rows, c.depth, columns, parts, kRank},
        adapters.data(), ranks.data(), c.ends.data(), pool);
    return out;
  };
  const auto fail = [&](const char* what, i64 at) {
    std::printf("FAILED %s depth %lld columns %lld at %lld: %s\n", isa.c_str(),
                static_cast<long long>(c.depth), static_cast<long long>(columns),
                static_cast<long long>(at), what);
    ++g_failures;
  };
  const std::vector<float> all = run(kRows, threads);
  for (i64 i = 0; i < kRows * columns; ++i) {
    if (!(std::fabs(all[i] - expected[i]) < 1e-4)) return fail("is not the sum", i);
  }
  InlinePool alone;
  for (i64 rows : {0, 1, 2, 5, 7, 9, 16, 33, 70}) {
    for (TaskPool* pool : {static_cast<TaskPool*>(&alone), &two}) {
      const std::vector<float> some = run(rows, *pool);
      if (std::memcmp(some.data(), all.data(), rows * columns * sizeof(float)) != 0) {
        return fail("other bits beside other rows", rows);
      }
      if (some[rows * columns] != 7) return fail("wrote behind the last row", rows);
    }
  }
}

}  // namespace
}  // namespace jax_attn

int main() {
  using namespace jax_attn;
  ThreadPool threads(3), two(1);
  for (const std::string& isa : SupportedCpuIsas()) {
    SetCpuIsa(isa);
    for (const Case& c :
         {Case{1, {1}}, Case{33, {40, 57, 91}}, Case{700, {1024, 1300}}, Case{3000, {30000}}}) {
      Check(isa, c, threads, two);
    }
  }
  std::printf("lora_cpu_test: %s\n", g_failures ? "FAILED" : "ok");
  return g_failures ? 1 : 0;
}
