// Work sharing on a pool of threads.
//
// The threads may all be busy with other calls, so no function here waits for a scheduled task to
// start. A task that starts after its work is done touches only its shared state.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

namespace jax_attn {

// The pool interface that the kernels need. Schedule puts the task in the pool's queue and returns.
class TaskPool {
 public:
  virtual ~TaskPool() = default;
  virtual int num_threads() const = 0;
  virtual void Schedule(std::function<void()> task) = 0;
};

// Calls fn(i) once for every i in [0, n), on the caller and on up to num_threads() - 1 pool
// threads, each taking the next i when it is free; returns when all are done. fn must not throw.
void ParallelFor(TaskPool& pool, int64_t n, const std::function<void(int64_t)>& fn);

// Runs everything in the caller.
class InlinePool final : public TaskPool {
 public:
  int num_threads() const override { return 1; }
  void Schedule(std::function<void()> task) override { task(); }
};

}  // namespace jax_attn
