// Work sharing on a pool of threads.
//
// Its threads may all be busy with other calls, so nothing here ever waits for a scheduled task to
// start. A task that starts after its work is gone touches only its shared state.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

namespace jax_attn {

// What the kernels need of a pool. Schedule puts the task in the pool's queue and returns.
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
