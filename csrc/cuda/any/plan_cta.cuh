// What the planner of cuda/any/plan.cuh does by a whole CTA: memory, sums, sorting.
#pragma once

#include "cuda/common/math.cuh"
#include "plan/rules.h"

namespace jax_attn {

// One object a thread; every function is called by all threads of the CTA, with the same arguments
// but for what is said to be a thread's own.
// kOnce: what is used at many places is in the code once. Else the object stays in registers.
template <int kThreads, bool kOnce>
class PlanCta {
 public:
  static constexpr int kNumThreads = kThreads;
  static constexpr int kNumWarps = kNumThreads / kWarpSize;
  using WarpSums = i64[2][kNumWarps];  // in shared memory

  // arena: shared memory to be handed out; scratch: as in PlanParams.
  __device__ PlanCta(unsigned char* arena, int arena_bytes, unsigned char* scratch,
                     WarpSums& warp_sums)
      : thread_(threadIdx.x), memory_{arena, arena + arena_bytes, scratch}, warp_sums_(warp_sums) {}

  // Shared memory as long as there is some, then scratch. The same for every thread.
  template <class T>
  __device__ T* Take(i64 count) {
    const i64 bytes = CeilDivide(count * static_cast<i64>(sizeof(T)), 16) * 16;
    if constexpr (kOnce) return reinterpret_cast<T*>(TakeOnce(memory_, bytes));
    return reinterpret_cast<T*>(TakeInline(memory_, bytes));
  }

  // sums[i] = of(0) + ... + of(i - 1) for i in [0, n]; returns sums[n].
  template <class T, class Of>
  __device__ i64 Prefix(i32 n, T* sums, Of of) {
    i64 carry = 0;
#pragma unroll 1
    for (i32 first = 0; first < n; first += kNumThreads) {
      const i32 i = first + thread_;
      const Sums all = Scan(i < n ? of(i) : 0);
      if (i < n) sums[i] = static_cast<T>(carry + all.before);
      carry += all.total;
    }
    if (thread_ == 0) sums[n] = static_cast<T>(carry);
    __syncthreads();
    return carry;
  }

  // of(0) + ... + of(n - 1); `of` may also do something for each of them.
  template <class Of>
  __device__ i64 Sum(i32 n, Of of) {
    i64 mine = 0;
#pragma unroll 1
    for (i32 i = thread_; i < n; i += kNumThreads) mine += of(i);
    phase_ ^= 1;  // as in Scan
    return SumThreads(mine, warp_sums_[phase_]);
  }

  // The size of an array of keys that Sort takes.
  __device__ static i32 SortSize(i32 num_keys) {
    i32 size = 2;
#pragma unroll 1
    while (size < num_keys) size *= 2;
    return size;
  }

  // Ascending; a key for each thread at most, no two alike: its place is the number of smaller
  // ones. keys: [num_keys, to an even number].
  __device__ void SortFew(u64* keys, i32 num_keys) {
    const u64 mine = thread_ < num_keys ? keys[thread_] : 0;
    if (thread_ == 0 && num_keys % 2 != 0) keys[num_keys] = ~0ull;
    __syncthreads();
    i32 place = 0;
    if (thread_ < num_keys) {
#pragma unroll 4
      for (i32 k = 0; k < num_keys; k += 2) {
        const uint4 two = *reinterpret_cast<const uint4*>(keys + k);
        place += (static_cast<u64>(two.y) << 32 | two.x) < mine;
        place += (static_cast<u64>(two.w) << 32 | two.z) < mine;
      }
    }
    __syncthreads();
    if (thread_ < num_keys) keys[place] = mine;
    __syncthreads();
  }

  // Ascending, bitonic. size: a power of two, at least 2. Strides of up to 32 stay within the 64
  // keys of a warp.
  __device__ void Sort(u64* keys, int size) {
#pragma unroll 1
    for (int run = 2; run <= size; run *= 2) {
#pragma unroll 1
      for (int stride = run / 2; stride > 0; stride /= 2) {
#pragma unroll 1
        for (int i = thread_; i < size / 2; i += kNumThreads) {
          const int low = 2 * i - (i & (stride - 1)), high = low + stride;
          const u64 a = keys[low], b = keys[high];
          if ((a > b) == ((low & run) == 0)) {
            keys[low] = b;
            keys[high] = a;
          }
        }
        const int next = stride > 1 ? stride / 2 : run;
        if (stride > kWarpSize || next > kWarpSize) {
          __syncthreads();
        } else {
          __syncwarp();
        }
      }
    }
    __syncthreads();
  }

  // The largest x >= 0 of all threads.
  __device__ i64 MostOf(i64 x) {
    phase_ ^= 1;  // as in Scan
    i64* warps = warp_sums_[phase_];
    x = WarpMax64(x);
    if (thread_ % kWarpSize == 0) warps[thread_ / kWarpSize] = x;
    __syncthreads();
#pragma unroll 1
    for (int w = 0; w < kNumWarps; ++w) x = Largest(x, warps[w]);
    return x;
  }

  // Of those of(0), ..., of(n - 1), and `fault`, which every thread has.
  template <class Of>
  __device__ PlanFault FirstFault(i32 n, Of of, PlanFault fault = {}) {
#pragma unroll 1
    for (int every = kNumThreads;; every = 1) {  // if one thread finds a fault, all find the first
#pragma unroll 1
      for (i32 i = every > 1 ? thread_ : 0; i < n; i += every) {
        const PlanFault f = of(i);
        if (IsBefore(f, fault)) fault = f;
      }
      if (!__syncthreads_or(fault.code != kNoFault) || every == 1) return fault;
    }
  }

  // The largest x >= 0 of a warp.
  __device__ static i64 WarpMax64(i64 x) {
    const u64 bits = static_cast<u64>(x);
    const u32 high = WarpMax(static_cast<u32>(bits >> 32));
    const u32 low = WarpMax(bits >> 32 == high ? static_cast<u32>(bits) : 0u);
    return static_cast<i64>(static_cast<u64>(high) << 32 | low);
  }

  // The sum of x >= 0 of a warp; 32 numbers of 27 bits have 32.
  __device__ static i64 WarpSum64(i64 x) {
    constexpr u32 kMask = (1u << 27) - 1;
    const u64 bits = static_cast<u64>(x);
    const u64 low = WarpSum(static_cast<u32>(bits) & kMask);
    const u64 middle = WarpSum(static_cast<u32>(bits >> 27) & kMask);
    const u64 high = WarpSum(static_cast<u32>(bits >> 54));
    return static_cast<i64>(low + (middle << 27) + (high << 54));
  }

 protected:
  const int thread_;

 private:
  struct Memory {
    unsigned char *arena, *arena_end, *scratch;
  };
  __device__ __noinline__ static unsigned char* TakeOnce(Memory& m, i64 bytes) {
    return TakeInline(m, bytes);
  }
  __device__ static unsigned char* TakeInline(Memory& m, i64 bytes) {
    unsigned char* array = m.scratch;
    if (bytes <= m.arena_end - m.arena) {
      array = m.arena;
      m.arena += bytes;
    } else {
      m.scratch += bytes;
    }
    return array;
  }

  struct Sums {
    i64 before, total;  // over the threads before this one, over all of them
  };

  // Called by every thread. Not inlined: code is read from memory, too, and most of it runs once.
  __device__ __noinline__ static Sums ScanThreads(i64 x, i64* warp_sums) {
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    i64 sum = x;
#pragma unroll
    for (int d = 1; d < kWarpSize; d *= 2) {
      const i64 other = ShuffleUp(sum, d);
      if (lane >= d) sum += other;
    }
    if (lane == kWarpSize - 1) warp_sums[warp] = sum;
    __syncthreads();
    i64 before = 0, total = 0;
#pragma unroll 4
    for (int w = 0; w < kNumWarps; ++w) {
      const i64 s = warp_sums[w];
      if (w < warp) before += s;
      total += s;
    }
    return {before + sum - x, total};
  }

  __device__ __noinline__ static i64 SumThreads(i64 x, i64* warp_sums) {
    const i64 sum = WarpSum64(x);
    if (threadIdx.x % kWarpSize == 0) warp_sums[threadIdx.x / kWarpSize] = sum;
    __syncthreads();
    i64 total = 0;
#pragma unroll
    for (int w = 0; w < kNumWarps; ++w) total += warp_sums[w];
    return total;
  }

  __device__ Sums Scan(i64 x) {
    phase_ ^= 1;  // whoever writes these sums again has met a barrier after all have read them
    return ScanThreads(x, warp_sums_[phase_]);
  }

  __device__ static i64 ShuffleUp(i64 x, int d) {
    const u32 low = __shfl_up_sync(kFullWarp, static_cast<u32>(x), d);
    const u32 high = __shfl_up_sync(kFullWarp, static_cast<u32>(x >> 32), d);
    return static_cast<i64>(static_cast<u64>(high) << 32 | low);
  }

  Memory memory_;
  WarpSums& warp_sums_;
  int phase_ = 0;
};

}  // namespace jax_attn
