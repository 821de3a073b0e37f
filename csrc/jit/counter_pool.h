// Counters of arrivals at merge groups that no launch has to zero first.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <utility>

#include "jit/cuda_api.h"
#include "params.h"

namespace jax_attn {

// Words of one device. A call has two arrays of counters, and its launches alternate: each counts
// in one, which is zero, and zeroes the other for the next (params.h: counter_parity). So a call
// needs no memset, which takes 1.5 us of a CUDA graph, as long as nobody else counts with its
// counters at the same time, and a launch of a damaged plan, whatever it leaves in its array,
// does no harm to the next. What a call has for itself while it runs, in whatever stream or branch
// of a graph, is its workspace: counters are found by its address.
//
// Nothing is ever given back, because a captured graph may count again at any time. Addresses
// recur, as allocators have it; a call that finds the pool used up zeroes counters in its workspace
// instead.
class CounterPool {
 public:
  // In the current context, not while this thread captures. Null: no memory, or no stream.
  static std::unique_ptr<CounterPool> Make(const CudaDriver& driver) {
    CUdeviceptr counters = 0;
    CUstream stream = nullptr;
    if (driver.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS) return nullptr;
    const bool has_memory =
        driver.cuMemAlloc(&counters, kNumCounters * sizeof(i32)) == CUDA_SUCCESS;
    const bool made = has_memory &&
                      driver.cuMemsetD32Async(counters, 0, kNumCounters, stream) == CUDA_SUCCESS &&
                      driver.cuStreamSynchronize(stream) == CUDA_SUCCESS;
    driver.cuStreamDestroy(stream);
    if (!made) {
      if (has_memory) driver.cuMemFree(counters);
      return nullptr;
    }
    return std::unique_ptr<CounterPool>(new CounterPool(reinterpret_cast<i32*>(counters)));
  }

  // As AttentionParams has them.
  struct Counters {
    i32* merge_counters = nullptr;  // [2, num_counters]
    i32* parity = nullptr;          // [num_ctas]
  };
  // Of calls with this workspace; null: there are none left.
  Counters Find(const void* workspace, int64_t num_counters, int64_t num_ctas) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto [it, is_new] = found_.try_emplace({workspace, num_counters, num_ctas});
    if (is_new) {
      i32* words = Take((2 * num_counters + num_ctas + kLine - 1) / kLine * kLine);
      if (words != nullptr) it->second = {words, words + 2 * num_counters};
    }
    return it->second;
  }

  static constexpr int64_t kNumCounters = 1 << 19;  // of 250 to 1,200 for a workspace

 private:
  static constexpr int64_t kLine = 32;  // of a cache, 128 bytes

  explicit CounterPool(i32* counters) : next_(counters) {}

  i32* Take(int64_t num_counters) {
    if (num_counters > num_left_) return nullptr;
    num_left_ -= num_counters;
    return std::exchange(next_, next_ + num_counters);
  }

  std::mutex mutex_;
  std::map<std::tuple<const void*, int64_t, int64_t>, Counters> found_;
  i32* next_;
  int64_t num_left_ = kNumCounters;
};

}  // namespace jax_attn
