// Counters of arrivals at merge groups. No launch has to zero them first.
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

// The counters of one device. A call has two arrays of counters, and its launches alternate: each
// launch counts in one array, which is 0, and zeroes the other for the next launch (counter_parity
// in params.h). So a call needs no memset, which takes 1.5 us in a CUDA graph. A launch of a
// damaged plan may leave anything in its array without harm to the next launch.
//
// No two calls may count with the same counters at the same time. While a call runs, in any stream
// or branch of a graph, its workspace is its own. So counters are found by the workspace's address.
//
// Counters are never given back, because a captured graph may count again at any time. Allocators
// return the same addresses again, so few workspaces are seen. If the pool is used up, a call
// zeroes counters in its workspace instead.
class CounterPool {
 public:
  // Allocates in the current context. Must not be called while this thread captures. Null if there
  // is no memory or no stream.
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

  // The pointers of AttentionParams.
  struct Counters {
    i32* merge_counters = nullptr;  // [2, num_counters]
    i32* parity = nullptr;          // [num_ctas]
  };
  // The counters of calls with this workspace. Null pointers if the pool has too few left.
  Counters Find(const void* workspace, int64_t num_counters, int64_t num_ctas) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto [it, is_new] = found_.try_emplace({workspace, num_counters, num_ctas});
    if (is_new) {
      i32* words = Take((2 * num_counters + num_ctas + kLine - 1) / kLine * kLine);
      if (words != nullptr) it->second = {words, words + 2 * num_counters};
    }
    return it->second;
  }

  static constexpr int64_t kNumCounters = 1 << 19;  // a workspace takes 250 to 1,200

 private:
  static constexpr int64_t kLine = 32;  // words of a cache line of 128 bytes

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
