// Functions of the device planner for a whole CTA: memory, sums, sorting.
#pragma once

#include "cuda/common/math.cuh"
#include "plan/rules/checks.h"

namespace jax_attn {

// Each thread has one object. All threads of the CTA call every function, with the same arguments
// except those described as a thread's own. kOnce: functions with many callers exist once in the
// code. Otherwise the object stays in registers.
template <int kThreads, bool kOnce>
class PlanCta {
 public:
  static constexpr int kNumThreads = kThreads;
  static constexpr int kNumWarps = kNumThreads / kWarpSize;
  // Sums, and the largest, of three numbers over threads.
  struct Totals {
    i64 sum;
    u32 most[3];
  };
  using WarpTotals = Totals[2][kNumWarps];  // in shared memory

  // arena: shared memory to be handed out. scratch: as in PlanParams.
  __device__ PlanCta(unsigned char* arena, int arena_bytes, unsigned char* scratch,
                     WarpTotals& warp_totals)
      : thread_(threadIdx.x), memory_{arena, arena_bytes, scratch}, warp_totals_(warp_totals) {}

  __device__ int thread() const { return thread_; }

  // Takes shared memory while there is some, then scratch. The same for every thread.
  template <class T>
  __device__ T* Take(i64 count) {
    const i64 bytes = (count * static_cast<i64>(sizeof(T)) + 15) & ~15ll;
    if constexpr (kOnce) return reinterpret_cast<T*>(TakeOnce(memory_, bytes));
    return reinterpret_cast<T*>(TakeInline(memory_, bytes));
  }

  // sums[i] = of(0) + ... + of(i - 1) for i in [0, n]; returns sums[n].
  template <class T, class Of>
  __device__ i64 Prefix(i32 n, T* sums, Of of) {
    const i64 total = StartPrefix(n, sums, of);
    __syncthreads();
    return total;
  }

  // The same without the barrier behind which other threads may read `sums`.
  template <class T, class Of>
  __device__ i64 StartPrefix(i32 n, T* sums, Of of) {
    i64 carry = 0;
#pragma unroll 1
    for (i32 first = 0; first < n; first += kNumThreads) {
      const i32 i = first + thread_;
      const Sums all = Scan(i < n ? of(i) : 0);
      if (i < n) sums[i] = static_cast<T>(carry + all.before);
      carry += all.total;
    }
    if (thread_ == 0) sums[n] = static_cast<T>(carry);
    return carry;
  }

  // of(0) + ... + of(n - 1). `of` may also do something for each index.
  template <class Of>
  __device__ i64 Sum(i32 n, Of of) {
    return Total(n, [&](i32 i, Totals* mine) { mine->sum += of(i); }).sum;
  }

  // Calls add(i, mine) for i in [0, n), which adds to a thread's own totals, and returns the totals
  // of all threads. Afterwards all threads see what `add` wrote.
  template <class Add>
  __device__ Totals Total(i32 n, Add add) {
    Totals mine = {};
#pragma unroll 1
    for (i32 i = thread_; i < n; i += kNumThreads) add(i, &mine);
    phase_ ^= 1;  // as in Scan
    return TotalOfThreads(mine, warp_totals_[phase_]);
  }

  // The array size that Sort needs.
  __device__ static i32 SortSize(i32 num_keys) {
    i32 size = 4;
#pragma unroll 1
    while (size < num_keys) size *= 2;
    return size;
  }

  // The rank of a key among distinct keys: the number of smaller ones. Key thread_ is compared, if
  // there are so many threads; with twice as many threads, two share a key's comparisons. keys:
  // whole 16 bytes, filled up with keys that are not smaller than any; 32-bit keys use 31 bits.
  // counts: [num_keys]. A barrier lies between reading the keys and returning.
  template <class Key>
  __device__ i32 PlaceOf(const Key* keys, i32 num_keys, i32* counts) {
    constexpr int kKeys = 16 / sizeof(Key);
    const bool shared = 2 * num_keys <= kNumThreads, helper = shared && thread_ >= kNumThreads / 2;
    const i32 key = helper ? thread_ - kNumThreads / 2 : thread_;
    const i32 end = (num_keys + kKeys - 1) / kKeys, border = shared ? end / 2 : end;
    u32 place = 0;
    if (key < num_keys) {
      const Key mine = keys[key];
      const uint4* groups = reinterpret_cast<const uint4*>(keys);
      const i32 last = helper ? end : border;
#pragma unroll 4
      for (i32 k = helper ? border : 0; k < last; ++k) {
        const uint4 four = groups[k];
        if constexpr (kKeys == 4) {
          place += ((four.x - mine) >> 31) + ((four.y - mine) >> 31);
          place += ((four.z - mine) >> 31) + ((four.w - mine) >> 31);
        } else {
          place += (static_cast<u64>(four.y) << 32 | four.x) < mine;
          place += (static_cast<u64>(four.w) << 32 | four.z) < mine;
        }
      }
      if (helper) counts[key] = static_cast<i32>(place);
    }
    __syncthreads();
    if (shared && !helper && key < num_keys) place += static_cast<u32>(counts[key]);
    return static_cast<i32>(place);
  }

  // Sorts in ascending order, bitonic. size: a power of two, at least 2. Strides of up to 32 stay
  // within the 64 keys of a warp.
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

  // The largest x >= 0 over all threads.
  __device__ i64 MostOf(i64 x) {
    phase_ ^= 1;  // as in Scan
    Totals* warps = warp_totals_[phase_];
    x = WarpMax64(x);
    if (thread_ % kWarpSize == 0) warps[thread_ / kWarpSize].sum = x;
    __syncthreads();
    return WarpMax64(thread_ % kWarpSize < kNumWarps ? warps[thread_ % kWarpSize].sum : 0);
  }

  // The first fault of of(0), ..., of(n - 1) and `fault`, which every thread has.
  template <class Of>
  __device__ PlanFault FirstFault(i32 n, Of of, PlanFault fault = {}) {
#pragma unroll 1
    for (int every = kNumThreads;; every = 1) {  // if one thread finds a fault, all look for the
                                                 // first one
#pragma unroll 1
      for (i32 i = every > 1 ? thread_ : 0; i < n; i += every) {
        const PlanFault f = of(i);
        if (IsBefore(f, fault)) fault = f;
      }
      if (!__syncthreads_or(fault.code != kNoFault) || every == 1) return fault;
    }
  }

  // The largest x >= 0 over a warp.
  __device__ static i64 WarpMax64(i64 x) {
    const u64 bits = static_cast<u64>(x);
    const u32 high = WarpMax(static_cast<u32>(bits >> 32));
    const u32 low = WarpMax(bits >> 32 == high ? static_cast<u32>(bits) : 0u);
    return static_cast<i64>(static_cast<u64>(high) << 32 | low);
  }

  // The sum of x >= 0 over a warp; 32 numbers of 27 bits have 32 bits.
  __device__ static i64 WarpSum64(i64 x) {
    constexpr u32 kMask = (1u << 27) - 1;
    const u64 bits = static_cast<u64>(x);
    const u64 low = WarpSum(static_cast<u32>(bits) & kMask);
    const u64 middle = WarpSum(static_cast<u32>(bits >> 27) & kMask);
    const u64 high = WarpSum(static_cast<u32>(bits >> 54));
    return static_cast<i64>(low + (middle << 27) + (high << 54));
  }

 private:
  struct Memory {
    unsigned char* arena;
    i32 arena_bytes;
    unsigned char* scratch;
  };
  __device__ __noinline__ static unsigned char* TakeOnce(Memory& m, i64 bytes) {
    return TakeInline(m, bytes);
  }
  __device__ static unsigned char* TakeInline(Memory& m, i64 bytes) {
    if (bytes <= m.arena_bytes) {  // from the end of the arena
      m.arena_bytes -= static_cast<i32>(bytes);
      return m.arena + m.arena_bytes;
    }
    unsigned char* array = m.scratch;
    m.scratch += bytes;
    return array;
  }

  struct Sums {
    i64 before, total;  // over the threads before this one; over all threads
  };

  // Every thread calls it. Not inlined: code is read from memory, too, and most of it runs once.
  __device__ __noinline__ static Sums ScanThreads(i64 x, Totals* warps) {
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    i64 sum = x;
#pragma unroll
    for (int d = 1; d < kWarpSize; d *= 2) {
      const i64 other = ShuffleUp(sum, d);
      if (lane >= d) sum += other;
    }
    if (lane == kWarpSize - 1) warps[warp].sum = sum;
    __syncthreads();
    const i64 other = lane < kNumWarps ? warps[lane].sum : 0;
    return {WarpSum64(lane < warp ? other : 0) + sum - x, WarpSum64(other)};
  }

  __device__ __noinline__ static Totals TotalOfThreads(Totals mine, Totals* warps) {
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    mine = TotalOfWarp(mine);
    if (lane == 0) warps[warp] = mine;
    __syncthreads();
    return TotalOfWarp(lane < kNumWarps ? warps[lane] : Totals{});
  }

  __device__ static Totals TotalOfWarp(Totals t) {
    t.sum = WarpSum64(t.sum);
#pragma unroll
    for (int i = 0; i < 3; ++i) t.most[i] = WarpMax(t.most[i]);
    return t;
  }

  __device__ Sums Scan(i64 x) {
    phase_ ^= 1;  // before these sums are written again, all threads meet a barrier behind their
                  // reads
    return ScanThreads(x, warp_totals_[phase_]);
  }

  __device__ static i64 ShuffleUp(i64 x, int d) {
    const u32 low = __shfl_up_sync(kFullWarp, static_cast<u32>(x), d);
    const u32 high = __shfl_up_sync(kFullWarp, static_cast<u32>(x >> 32), d);
    return static_cast<i64>(static_cast<u64>(high) << 32 | low);
  }

  const int thread_;
  Memory memory_;
  WarpTotals& warp_totals_;
  int phase_ = 0;
};

}  // namespace jax_attn
