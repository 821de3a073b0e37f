// Work sharing on a pool of threads: everything runs once, and is done when the call returns.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <thread>
#include <vector>

#include "thread_pool.h"

namespace jax_attn {
namespace {

int g_failures = 0;

#define CHECK(condition, ...)                                           \
  do {                                                                  \
    if (!(condition)) {                                                 \
      std::printf("FAILED %s:%d %s: ", __FILE__, __LINE__, #condition); \
      std::printf(__VA_ARGS__);                                         \
      std::printf("\n");                                                \
      ++g_failures;                                                     \
    }                                                                   \
  } while (0)

void TestParallelFor(TaskPool& threads) {
  for (int64_t n : {0, 1, 2, 3, 100}) {
    for (int round = 0; round < 50; ++round) {
      std::vector<std::atomic<int>> counts(n);
      std::vector<int64_t> results(n, -1);  // no atomics, and looked at first: the call orders them
      const auto caller = std::this_thread::get_id();
      ParallelFor(threads, n, [&](int64_t i) {
        // The caller runs out of work first, and has to wait.
        const bool is_helper = std::this_thread::get_id() != caller;
        std::this_thread::sleep_for(std::chrono::microseconds(is_helper ? 500 : 20));
        results[i] = i;
        counts[i]++;
      });
      for (int64_t i = 0; i < n; ++i) CHECK(results[i] == i, "no result");
      for (auto& count : counts) CHECK(count == 1, "index run %d times", count.load());
    }
  }
  // Nested on a pool with fewer threads than calls: nobody may wait for a task that has not
  // started.
  ParallelFor(threads, 40, [&](int64_t) {
    std::atomic<int> sum{0};
    ParallelFor(threads, 40, [&](int64_t i) { sum += static_cast<int>(i); });
    CHECK(sum == 780, "sum %d", sum.load());
  });
}

}  // namespace
}  // namespace jax_attn

int main() {
  jax_attn::ThreadPool threads(3);
  jax_attn::TestParallelFor(threads);
  std::printf("task_pool_test: %s\n", jax_attn::g_failures ? "FAILED" : "ok");
  return jax_attn::g_failures ? 1 : 0;
}
