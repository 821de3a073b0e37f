// Parts that the loops of sm90 share: tiles as wgmma reads them, the roles of warpgroups, and the
// kernel around producer and consumers.
#pragma once

#include "cuda/common/budget.cuh"
#include "cuda/common/partials.cuh"
#include "cuda/common/producer.cuh"
#include "cuda/common/work.cuh"
#include "cuda/sm90/ptx.cuh"

namespace jax_attn {

// Whether decode.cuh computes all items of a kernel; and up to how many rows it has a smaller copy
// of its code.
template <class Traits>
inline constexpr bool kOnlyDecodes =
    HopperOnlyDecodes(Traits::kIsMla, Traits::kNumTiles, Traits::kTileQ0);
inline constexpr int kFewRows = 8;

// A tile of 16-bit rows in shared memory as wgmma reads it: blocks of 64 columns, in each block
// rows of 128 bytes, swizzled. head_dim is padded with zeros to a multiple of 64.
template <int kHeadDim, int kRows>
struct SwizzledTile {
  static constexpr int kBlocks = CeilDiv(kHeadDim, 64);
  static constexpr int kPadded = 64 * kBlocks;
  static constexpr int kLiveChunks = kHeadDim / 8;  // vectors of 16 bytes in a row that hold data
  static constexpr int kBlockBytes = kRows * 128;
  static constexpr int kBytes = kBlocks * kBlockBytes;

  // Descriptor of rows from `row` on as operand a or b, columns along k. AlongK(.., kk) moves it to
  // the columns [16 * kk, 16 * kk + 16).
  __device__ __forceinline__ static u64 Descriptor(u32 tile, int row) {
    return MatrixDescriptor(tile + row * 128, 16, 1024);
  }
  __device__ __forceinline__ static u64 AlongK(u64 descriptor, int kk) {
    return MoveDescriptor(descriptor, kk / 4 * kBlockBytes + kk % 4 * 32);
  }
  __device__ __forceinline__ static u64 Down(u64 descriptor, int num_rows) {
    return MoveDescriptor(descriptor, num_rows * 128);
  }
  // Descriptor of transposed rows, from `row` on along k: all columns along n as operand b, or 64
  // columns along m as operand a. AlongRows(.., kk) moves it to the rows [row + 16 * kk, row + 16 *
  // kk + 16), Right(.., block) to the columns from 64 * block on.
  __device__ __forceinline__ static u64 TransposedDescriptor(u32 tile, int row) {
    return MatrixDescriptor(tile + row * 128, kBlockBytes, 1024);
  }
  __device__ __forceinline__ static u64 AlongRows(u64 descriptor, int kk) {
    return MoveDescriptor(descriptor, kk * 16 * 128);
  }
  __device__ __forceinline__ static u64 Right(u64 descriptor, int block) {
    return MoveDescriptor(descriptor, block * kBlockBytes);
  }
};

// PinRegisters for the accumulators of several products.
template <class T, int kBlocks, int kTiles>
__device__ __forceinline__ void PinBlocks(T (&d)[kBlocks][kTiles][4]) {
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) PinRegisters(d[b]);
}

// CTAs of a kernel that share a multiprocessor.
template <class Traits>
inline constexpr int kCtasPerSm =
    Traits::kIsMla
        ? 1
        : HopperCtasPerSm(Traits::kNumWarps, Max(Traits::kHeadDimQk, Traits::kHeadDimVo));

// The roles of a CTA's warpgroups: the first ones, usually one, are producers, the others
// consumers. kConverts: producers also convert what they copied, and need registers for it. kCtas:
// CTAs that share a multiprocessor.
template <int kConsumers, int kProducers = 1, bool kConverts = false, int kCtas = 1>
struct HopperRolesOf {
  static_assert(kCtas == 1 ? kConsumers + kProducers == 3 || kConsumers + kProducers == 4
                           : kConsumers == 1 && kProducers == 1 && kCtas <= 3);
  static constexpr int kNumConsumers = kConsumers;
  static constexpr int kNumProducers = kProducers;
  static constexpr int kProducerThreads = 128 * kProducers;
  static constexpr int kProducerWarps = kProducerThreads / kWarpSize;
  static constexpr int kConsumerThreads = 128 * kNumConsumers;
  static constexpr int kNumThreads = kProducerThreads + kConsumerThreads;
  static constexpr int kConsumerWarps = kConsumerThreads / kWarpSize;
  // The CTAs of a multiprocessor have 64K registers. Consumers hold o, logits and P, a producer a
  // few addresses.
  static constexpr int kProducerRegisters = kProducers == 2 || kConverts       ? 56
                                            : kNumConsumers == 2 || kCtas == 2 ? 40
                                                                               : 32;
  static constexpr int kConsumerRegisters = kCtas == 3           ? 128
                                            : kCtas == 2         ? 216
                                            : kProducers == 2    ? 200
                                            : kConverts          ? 224
                                            : kNumConsumers == 2 ? 232
                                                                 : 160;
};
using HopperRoles = HopperRolesOf<2>;

// How consumers pass parameters to a merge. Three consumers have no registers left for them: by
// value, they would push what the steps need onto the stack.
template <int kConsumers>
struct HopperReduce {
  using Params = ReduceParams;
  static constexpr bool kTakesStripsTogether = true;
};
template <>
struct HopperReduce<3> {
  using Params = const AttentionParams&;
  static constexpr bool kTakesStripsTogether = false;
};

// All consumers as one group of threads.
template <class Roles>
struct HopperConsumersOf : HopperReduce<Roles::kNumConsumers> {
  static constexpr int kNamedBarrier = 3;
  __device__ static int thread() { return Opaque(threadIdx.x) - Roles::kProducerThreads; }
  __device__ static int num_threads() { return Roles::kConsumerThreads; }
  __device__ static void Sync() { SyncNamed(kNamedBarrier, Roles::kConsumerThreads); }
};
using HopperConsumers = HopperConsumersOf<HopperRoles>;

// Named barrier of kernels that only decode: a consumer initialises the mbarriers, and producers
// wait here until they are there.
inline constexpr int kBarriersMade = 7;

// The threads of one consumer.
struct OneHopperConsumer {
  static constexpr int kNamedBarrier = 4;  // also 5, and 6 with a third consumer
  __device__ static int thread() { return Opaque(threadIdx.x) % 128; }
  __device__ static int num_threads() { return 128; }
  __device__ static int barrier() { return kNamedBarrier - 1 + threadIdx.x / 128; }
  __device__ static void Sync() { SyncNamed(barrier(), num_threads()); }
  // Whether x holds for any thread.
  __device__ static bool SyncOr(bool x) { return SyncNamedOr(barrier(), num_threads(), x); }
};

// Runs a producer and its consumers as the warpgroups of a CTA. first: what the producer already
// knows of its first item.
template <class Producer, class Consumer, class Roles = HopperRoles>
struct HopperTeams {
  static constexpr int kNumThreads = Roles::kNumThreads;

  template <class Shared, class... First>
  __device__ __forceinline__ static void Run(const AttentionParams& p, Shared& shared, int begin,
                                             int end, const First&... first) {
    if (threadIdx.x < Roles::kProducerThreads) {
      LowerRegisterLimit<Roles::kProducerRegisters>();
      Producer(p, shared).Run(begin, end, first...);
    } else {
      RaiseRegisterLimit<Roles::kConsumerRegisters>();
      Consumer(p, shared).Run(begin, end);
    }
  }
};

// The kernel around the warpgroups. Teams::Run executes a queue's items [begin, end). A Shape has
// the struct Shared and its Init, which initialises barriers and says where the counters are.
template <class Traits, class Shape, class Teams>
struct HopperBody {
  using Shared = typename Shape::Shared;
  static constexpr int kNumThreads = Teams::kNumThreads;
  static constexpr int kMinCtasPerSm = kCtasPerSm<Traits>;
  static constexpr int kSmemBytes = sizeof(Shared);
  static_assert(kSmemBytes <= CtaSmemBudget(Traits::kArch, kMinCtasPerSm),
                "the CTAs fit a multiprocessor");

  __device__ __forceinline__ static void Run(const AttentionParams& p) {
    extern __shared__ __align__(1024) unsigned char smem[];
    Shared& shared = *reinterpret_cast<Shared*>(smem);
    if constexpr (kOnlyDecodes<Traits>) {
      const FirstItem<Traits> first(p);
      const int begin = QueueBegin(p);
      // A consumer thread does it while the producers ask for the first page.
      if (threadIdx.x == kNumThreads - 1) Shape::Init(shared, LaunchCounters(p));
      Teams::Run(p, shared, begin, QueueEnd(p), first);
    } else {
      if (threadIdx.x == kNumThreads - 1 && p.has_tensor_maps) {
        PrefetchTensorMap(p.k_map);
        PrefetchTensorMap(p.v_map);
      }
      const int begin = QueueBegin(p);
      if (threadIdx.x == 0) Shape::Init(shared, LaunchCounters(p));
      __syncthreads();
      Teams::Run(p, shared, begin, QueueEnd(p));
    }
    if constexpr (Traits::kIsMla) FinishLaunch<Traits, 2>(p, threadIdx.x, blockDim.x);
  }
};

}  // namespace jax_attn
