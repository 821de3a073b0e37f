#include "cpu/threads/helper_pool.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <fstream>
#include <limits>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "cpu/threads/spin.h"

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace jax_attn {
namespace {

#if defined(__linux__)
// First version of the kernel's struct sched_attr, which not every C library has.
struct SchedAttr {
  uint32_t size, policy;
  uint64_t flags;
  int32_t nice;
  uint32_t priority;
  uint64_t runtime_ns, deadline_ns, period_ns;
};

// Requests the shortest time slices. They give a thread no more time. But since Linux 6.12 a waking
// thread with short slices preempts a thread with longer slices (e.g. one of lower priority) at
// once, instead of waiting for the end of its slice. No effect before 6.12.
void AskForShortSlices() {
  constexpr uint64_t kShortestNs = 100'000;
  SchedAttr attr{};
  if (syscall(SYS_sched_getattr, 0, &attr, sizeof(attr), 0) != 0 || attr.policy != SCHED_OTHER) {
    return;
  }
  attr.size = sizeof(attr);
  attr.runtime_ns = kShortestNs;
  syscall(SYS_sched_setattr, 0, &attr, 0);  // a sandbox may forbid it
}
#endif

// One helper thread. The caller that took it from the idle list may place it and give it a task.
class Helper {
 public:
  // Called by the thread itself, before it is in the list.
  void Begin() {
#if defined(__linux__)
    thread_ = static_cast<pid_t>(syscall(SYS_gettid));
    pthread_setname_np(pthread_self(), "jax_attn");
    AskForShortSlices();
#endif
  }

  // Restricts the thread to the processors that the process may use, except the caller's.
  void PlaceApart() {
#if defined(__linux__)
    const int processor = sched_getcpu();
    if (processor < 0 || processor == avoided_) return;
    cpu_set_t allowed;  // fails beyond 1024 processors; then the thread stays where it is
    if (sched_getaffinity(getpid(), sizeof(allowed), &allowed) != 0) return;
    CPU_CLR(processor, &allowed);
    if (CPU_COUNT(&allowed) == 0) return;
    if (sched_setaffinity(thread_, sizeof(allowed), &allowed) == 0) avoided_ = processor;
#endif
  }

  void Give(std::function<void()> task) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      task_ = std::move(task);
      given_at_ = std::chrono::steady_clock::now();
      has_task_.store(true, std::memory_order_release);
    }
    given_.notify_one();
  }

  // Spins first if the last wait was so short that spinning paid, then sleeps.
  std::function<void()> Wait() {
    const SteadyTime begin = std::chrono::steady_clock::now();
    const auto has_task = [this] { return has_task_.load(std::memory_order_acquire); };
    if (spins_) Spin(begin, has_task);
    std::unique_lock<std::mutex> lock(mutex_);
    given_.wait(lock, has_task);
    spins_ = given_at_ - begin < kSpinTime;
    has_task_.store(false, std::memory_order_relaxed);
    return std::exchange(task_, nullptr);
  }

 private:
#if defined(__linux__)
  pid_t thread_ = 0;
  int avoided_ = -1;  // the processor that it must avoid
#endif
  bool spins_ = false;
  std::mutex mutex_;
  std::condition_variable given_;
  std::atomic<bool> has_task_{false};
  std::function<void()> task_;
  SteadyTime given_at_;
};

class Helpers {
 public:
  void Schedule(std::function<void()> task, int max_helpers) {
    Helper* helper;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      helper = TakeIdle();
      if (helper == nullptr) {
        waiting_.push_back(std::move(task));
        if (num_helpers_ >= max_helpers) return;
        ++num_helpers_;
      }
    }
    if (helper == nullptr) return Start();
    helper->PlaceApart();
    helper->Give(std::move(task));
  }

 private:
  // The helper that became idle last, because it may still be awake.
  Helper* TakeIdle() {
    if (idle_.empty()) return nullptr;
    Helper* const helper = idle_.back();
    idle_.pop_back();
    return helper;
  }

  void Start() {
    try {
      std::thread([this] { Work(); }).detach();
    } catch (const std::system_error&) {
      // If no thread can be created, the callers do the work.
      std::lock_guard<std::mutex> lock(mutex_);
      if (--num_helpers_ == 0) waiting_.clear();
    }
  }

  void Work() {
    Helper helper;
    helper.Begin();
    for (;;) {
      std::function<void()> task;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        if (waiting_.empty()) {
          idle_.push_back(&helper);
        } else {
          task = std::move(waiting_.front());
          waiting_.pop_front();
        }
      }
      if (!task) task = helper.Wait();
      task();
    }
  }

  std::mutex mutex_;
  std::vector<Helper*> idle_;
  std::deque<std::function<void()>> waiting_;
  int num_helpers_ = 0;
};

// Never destroyed: helpers live as long as the process.
Helpers* g_helpers;

Helpers& TheHelpers() {
  static const bool made = [] {
    g_helpers = new Helpers;
#if defined(__linux__)
    // A forked child has no helpers, and perhaps a locked mutex.
    pthread_atfork(nullptr, nullptr, [] { g_helpers = new Helpers; });
#endif
    return true;
  }();
  static_cast<void>(made);
  return *g_helpers;
}

}  // namespace

int64_t ProcessorQuota(const std::string& root) {
  double quota = -1, period = 0;  // microseconds; text that is not a number leaves 0 or -1
  if (std::ifstream v2(root + "/cpu.max"); v2) {
    v2 >> quota >> period;
  } else {
    std::ifstream(root + "/cpu/cpu.cfs_quota_us") >> quota;
    std::ifstream(root + "/cpu/cpu.cfs_period_us") >> period;
  }
  if (quota <= 0 || period <= 0) return std::numeric_limits<int32_t>::max();
  return static_cast<int64_t>((quota + period - 1) / period);
}

HelperPool::HelperPool(int64_t num_threads) {
  static const int64_t quota = ProcessorQuota("/sys/fs/cgroup");
  num_threads_ = static_cast<int>(std::min(num_threads, quota));
}

void HelperPool::Schedule(std::function<void()> task) {
  TheHelpers().Schedule(std::move(task), num_threads_ - 1);
}

}  // namespace jax_attn
