// The threads that help callers: owned by the process, asleep between calls.
//
// They replace XLA's pool. It is unknown which thread of that pool will take a task, so its
// processor cannot be set. If no processor is idle, Linux wakes a thread on the one it slept on,
// even if that is the caller's processor. There it would wait for as long as the caller computes.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "cpu/threads/task_pool.h"

namespace jax_attn {

class HelperPool final : public TaskPool {
 public:
  // num_threads: threads that work for one call, including the caller; at most the processors that
  // the process may use at a time.
  explicit HelperPool(int64_t num_threads);
  int num_threads() const override { return num_threads_; }
  // Gives the task to an idle helper, away from the caller's processor; else to a new helper; else
  // to the next helper that becomes idle.
  void Schedule(std::function<void()> task) override;

 private:
  int num_threads_;
};

// CPU limit of the process's cgroup, in processors, rounded up; a large number if there is no
// limit. root: where cgroups are mounted.
int64_t ProcessorQuota(const std::string& root);

}  // namespace jax_attn
