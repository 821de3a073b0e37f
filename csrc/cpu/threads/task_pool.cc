#include "cpu/threads/task_pool.h"

#include <algorithm>

#include "cpu/threads/spin.h"

namespace jax_attn {
namespace {

// State shared by the caller and its helpers. It outlives the call, because a helper may start
// late.
struct Share {
  explicit Share(int64_t n, const std::function<void(int64_t)>* fn) : n(n), fn(fn) {}

  // Takes indices until none is left. `fn` is only touched while a taken index is unfinished, and
  // the caller does not return before all are finished.
  void Drain() {
    int64_t finished = 0;
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n; ++finished) (*fn)(i);
    if (finished == 0) return;
    if (done.fetch_add(finished, std::memory_order_acq_rel) + finished == n) {
      std::lock_guard<std::mutex> lock(mutex);
      all_done.notify_one();
    }
  }

  const int64_t n;
  const std::function<void(int64_t)>* const fn;
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};
  std::mutex mutex;
  std::condition_variable all_done;
};

}  // namespace

void ParallelFor(TaskPool& pool, int64_t n, const std::function<void(int64_t)>& fn) {
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), n) - 1;
  if (helpers <= 0) {
    for (int64_t i = 0; i < n; ++i) fn(i);
    return;
  }
  auto share = std::make_shared<Share>(n, &fn);
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([share] { share->Drain(); });
  share->Drain();
  // Every remaining index was taken by a helper that is running now, so this wait always ends.
  const auto all_done = [&] { return share->done.load(std::memory_order_acquire) == n; };
  if (Spin(std::chrono::steady_clock::now(), all_done)) return;
  std::unique_lock<std::mutex> lock(share->mutex);
  share->all_done.wait(lock, all_done);
}

}  // namespace jax_attn
