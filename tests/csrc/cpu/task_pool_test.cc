// Work sharing on a pool of threads: everything runs once, and is done when the call returns.
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <limits>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "checks.h"
#include "cpu/thread_pool.h"
#include "cpu/threads/helper_pool.h"

namespace jax_attn {
namespace {

void TestParallelFor(TaskPool& threads) {
  for (int64_t n : {0, 1, 2, 3, 100}) {
    for (int round = 0; round < 50; ++round) {
      std::vector<std::atomic<int>> counts(n);
      std::vector<int64_t> results(n, -1);  // not atomic, and read first: the call orders accesses
      const auto caller = std::this_thread::get_id();
      ParallelFor(threads, n, [&](int64_t i) {
        // Makes the caller run out of work first, so that it has to wait.
        const bool is_helper = std::this_thread::get_id() != caller;
        std::this_thread::sleep_for(std::chrono::microseconds(is_helper ? 500 : 20));
        results[i] = i;
        counts[i]++;
      });
      for (int64_t i = 0; i < n; ++i) CHECK(results[i] == i, "no result");
      for (auto& count : counts) CHECK(count == 1, "index run %d times", count.load());
    }
  }
  // Nested on a pool with fewer threads than calls: no call may wait for a task that has not
  // started.
  ParallelFor(threads, 40, [&](int64_t) {
    std::atomic<int> sum{0};
    ParallelFor(threads, 40, [&](int64_t i) { sum += static_cast<int>(i); });
    CHECK(sum == 780, "sum %d", sum.load());
  });
}

constexpr auto kLong = std::chrono::seconds(20);

// Runs fn on the caller and on `helpers` threads, all at the same time; returns whether that many
// threads came. began: set when the caller has offered the work.
bool RunTogether(TaskPool& pool, int helpers, const std::function<void(bool is_caller)>& fn,
                 std::atomic<bool>* began = nullptr) {
  std::atomic<int> here{0}, in_time{0};
  const auto caller = std::this_thread::get_id();
  const auto end = std::chrono::steady_clock::now() + kLong;
  ParallelFor(pool, 1 + helpers, [&](int64_t) {
    ++here;
    if (began) *began = true;
    while (here <= helpers && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    in_time += here > helpers;
    fn(std::this_thread::get_id() == caller);
  });
  return in_time == 1 + helpers;
}

void TestHelpers() {
  HelperPool pool(4);
  const int helpers = pool.num_threads() - 1;  // fewer if the test has a CPU quota
  // After a short wait helpers spin, after a long one they sleep.
  std::set<std::thread::id> threads;
  std::mutex mutex;
  for (int round = 0; round < 60; ++round) {
    std::this_thread::sleep_for(std::chrono::microseconds(round % 3 == 0 ? 2000 : 10));
    const bool came = RunTogether(pool, helpers, [&](bool) {
      std::lock_guard<std::mutex> lock(mutex);
      threads.insert(std::this_thread::get_id());
    });
    CHECK(came, "round %d: not all helpers", round);
  }
  CHECK(static_cast<int>(threads.size()) == 1 + helpers, "%zu threads", threads.size());
  // Many callers at once, more than helpers.
  std::vector<std::thread> callers;
  std::atomic<int64_t> sum{0};
  for (int i = 0; i < 6; ++i) {
    callers.emplace_back([&] {
      for (int round = 0; round < 200; ++round) ParallelFor(pool, 10, [&](int64_t j) { sum += j; });
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK(sum == 6 * 200 * 45, "sum %lld", static_cast<long long>(sum));
}

// A call whose helpers are all busy gets help as soon as they are free.
void TestBusyHelpers() {
  HelperPool pool(4);
  const int helpers = pool.num_threads() - 1;
  if (helpers == 0) return;
  std::atomic<int> busy{0};
  std::atomic<bool> other_began{false};
  std::thread other([&] {
    while (busy < helpers) std::this_thread::yield();
    CHECK(RunTogether(pool, 1, [](bool) {}, &other_began), "no helper came");
  });
  RunTogether(pool, helpers, [&](bool is_caller) {
    if (is_caller) return;
    ++busy;
    while (!other_began) std::this_thread::yield();
  });
  other.join();
}

// A helper runs on any processor of the process except its caller's.
void TestPlacement() {
  cpu_set_t all;
  if (sched_getaffinity(0, sizeof(all), &all) != 0 || CPU_COUNT(&all) < 2) return;
  HelperPool pool(2);
  if (pool.num_threads() < 2) return;
  RunTogether(pool, 1, [](bool) {});  // the first task of a helper is not placed
  for (int on = 0; on < CPU_SETSIZE; ++on) {
    if (!CPU_ISSET(on, &all)) continue;
    std::thread([&] {
      cpu_set_t one;
      CPU_ZERO(&one);
      CPU_SET(on, &one);
      if (sched_setaffinity(0, sizeof(one), &one) != 0) return;
      // Waits until the helper is idle again.
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      const bool came = RunTogether(pool, 1, [&](bool is_caller) {
        cpu_set_t mine;
        if (is_caller || sched_getaffinity(0, sizeof(mine), &mine) != 0) return;
        CHECK(!CPU_ISSET(on, &mine), "on the processor of its caller, %d", on);
        CHECK(CPU_COUNT(&mine) == CPU_COUNT(&all) - 1, "%d processors", CPU_COUNT(&mine));
      });
      CHECK(came, "no helper");
    }).join();
  }
}

void TestQuota() {
  namespace fs = std::filesystem;
  constexpr int64_t kNone = std::numeric_limits<int32_t>::max();
  const fs::path root = fs::temp_directory_path() / ("quota_" + std::to_string(getpid()));
  const auto write = [&](const char* name, const char* text) {
    std::ofstream(root / name) << text;
  };
  fs::create_directories(root / "cpu");
  CHECK(ProcessorQuota(root) == kNone, "no files");
  write("cpu/cpu.cfs_quota_us", "-1\n");
  write("cpu/cpu.cfs_period_us", "100000\n");
  CHECK(ProcessorQuota(root) == kNone, "version 1, no limit");
  write("cpu/cpu.cfs_quota_us", "250000\n");
  CHECK(ProcessorQuota(root) == 3, "version 1");
  for (const auto& [text, want] : {std::pair("max 100000\n", kNone),
                                   {"50000 100000\n", 1},
                                   {"400000 100000\n", 4},
                                   {"", kNone},
                                   {"nonsense\n", kNone}}) {
    write("cpu.max", text);
    CHECK(ProcessorQuota(root) == want, "version 2, %s", text);
  }
  fs::remove_all(root);
}

// A child has helpers of its own. Not under ThreadSanitizer, which allows a child no threads.
void TestFork() {
#if !defined(__SANITIZE_THREAD__)
  HelperPool pool(2);
  const int helpers = pool.num_threads() - 1;
  const pid_t child = fork();
  if (child == 0) _exit(RunTogether(pool, helpers, [](bool) {}) ? 0 : 1);
  int status = -1;
  waitpid(child, &status, 0);
  CHECK(status == 0, "the child ended with %d", status);
#endif
}

}  // namespace
}  // namespace jax_attn

int main() {
  {
    jax_attn::ThreadPool threads(3);
    jax_attn::TestParallelFor(threads);
  }
  jax_attn::HelperPool helpers(4);
  jax_attn::TestParallelFor(helpers);
  jax_attn::TestHelpers();
  jax_attn::TestBusyHelpers();
  jax_attn::TestPlacement();
  jax_attn::TestQuota();
  jax_attn::TestFork();
  std::printf("task_pool_test: %s\n", jax_attn::g_failures ? "FAILED" : "ok");
  return jax_attn::g_failures ? 1 : 0;
}
