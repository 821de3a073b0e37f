// The threads that help callers: our own, of the process, asleep between calls.
//
// Not those of XLA's pool. Of these nobody knows which one will take a task, so nobody can say
// where it should run; and Linux, where no processor is idle, wakes a thread on the one it slept
// on, even if that is the processor of the caller. There it waits for as long as the caller
// computes.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "cpu/threads/task_pool.h"

namespace jax_attn {

class HelperPool final : public TaskPool {
 public:
  // num_threads: how many work for one call, with the caller; no more than the processors that the
  // process may use at a time.
  explicit HelperPool(int64_t num_threads);
  int num_threads() const override { return num_threads_; }
  // Gives the task to a helper that is idle, away from the processor of the caller; else to a new
  // one; else to whichever helper is idle next.
  void Schedule(std::function<void()> task) override;

 private:
  int num_threads_;
};

// Processors' worth of time that the cgroup of the process has, rounded up; a large number if it
// has no limit. root: where cgroups are mounted.
int64_t ProcessorQuota(const std::string& root);

}  // namespace jax_attn
