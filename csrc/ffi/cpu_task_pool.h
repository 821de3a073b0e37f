// XLA's intra-op thread pool behind the interface of csrc/cpu.
#pragma once

#include <functional>
#include <utility>

#include "cpu/task_pool.h"
#include "xla/ffi/api/ffi.h"

namespace jax_attn {

class XlaTaskPool final : public TaskPool {
 public:
  explicit XlaTaskPool(xla::ffi::ThreadPool pool) : pool_(std::move(pool)) {}
  int num_threads() const override { return static_cast<int>(pool_.num_threads()); }
  void Schedule(std::function<void()> task) override { pool_.Schedule(std::move(task)); }

 private:
  xla::ffi::ThreadPool pool_;
};

}  // namespace jax_attn
