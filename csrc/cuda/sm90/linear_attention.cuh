// Chunked linear attention on Hopper: products by wgmma, see common/linear_scan.cuh.
#pragma once

#include "cuda/sm80/linear_attention.cuh"
#include "cuda/sm90/ptx.cuh"

namespace jax_attn {

// As MmaProducts. A warpgroup reads a tile once for its 64 rows.
template <int kDtype>
struct WgmmaProducts {
  // In kLinearOutputs a warpgroup copies tiles to a ring, so that those that multiply wait for
  // tiles alone and not for each other.
  static constexpr bool kHasProducer = true;
  template <int kStages>
  struct Ring {
    alignas(8) u64 full[kStages], empty[kStages];

    __device__ __forceinline__ void Init(int producer_threads, int consumer_warps) {
#pragma unroll
      for (int i = 0; i < kStages; ++i) {
        InitBarrier(SharedAddress(full + i), producer_threads);
        InitBarrier(SharedAddress(empty + i), consumer_warps);
      }
    }
    // Turn `n` of the ring.
    __device__ __forceinline__ void WaitFull(int n) const {
      WaitBarrier(SharedAddress(full + n % kStages), n / kStages % 2);
    }
    __device__ __forceinline__ void WaitEmpty(int n) const {
      WaitBarrier(SharedAddress(empty + n % kStages), n / kStages % 2 ^ 1);
    }
    __device__ __forceinline__ void ArriveFull(int n) const {
      ArriveBarrierAfterCopies(SharedAddress(full + n % kStages));
    }
    __device__ __forceinline__ void ArriveEmpty(int n) const {
      __syncwarp();
      if (threadIdx.x % kWarpSize == 0) ArriveBarrier(SharedAddress(empty + n % kStages));
    }
  };
  __device__ __forceinline__ static void BecomeProducer() { LowerRegisterLimit<40>(); }
  __device__ __forceinline__ static void BecomeConsumer() { RaiseRegisterLimit<232>(); }

  __device__ __forceinline__ static void Start() { WgmmaFence(); }
  template <class T, int kTiles>
  __device__ __forceinline__ static void Pin(T (&x)[kTiles][4]) {
    PinRegisters(x);
  }
  __device__ __forceinline__ static void Commit() { WgmmaCommit(); }
  template <int kPending>
  __device__ __forceinline__ static void Wait() {
    WgmmaWait<kPending>();
  }
  // Before the barrier behind which tiles are read, in each thread that copied a part of them.
  __device__ __forceinline__ static void FenceTiles() { FenceSharedForWgmma(); }

  __device__ __forceinline__ static void StoreTransposed(unsigned char* tile, int row, int column,
                                                         u32 first, u32 second) {
    const int lane = Opaque(static_cast<int>(threadIdx.x)) % kWarpSize;
    StoreMatrix2Transposed(
        SharedAddress(tile) + SwizzledByte(row + lane % 8, column + lane / 8 % 2 * 8), first,
        second);
  }

  template <bool kAdds, bool kLower, int kSteps>
  __device__ __forceinline__ static void Rows(float (&x)[8][4], const u32 (&a)[kSteps][4],
                                              u32 tile) {
    const u64 b = MatrixDescriptor(tile, 16, kBlockBytes);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      Wgmma<64, kDtype>::RegistersA(x, a[k], MoveDescriptor(b, k / 4 * kPartBytes + k % 4 * 32),
                                    kAdds || k > 0);
    }
  }

  template <bool kAdds, bool kLower, int kTiles>
  __device__ __forceinline__ static void Columns(float (&x)[kTiles][4], const u32 (&a)[4][4],
                                                 u32 tile) {
    const u64 b = MatrixDescriptor(tile, kPartBytes, kBlockBytes);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      Wgmma<8 * kTiles, kDtype>::RegistersATransposedB(
          x, a[k], MoveDescriptor(b, k * 2 * kBlockBytes), kAdds || k > 0);
    }
  }

 private:
  static constexpr int kBlockBytes = 8 * 128;  // of 8 rows
};

template <class Traits>
using HopperLinearChunksBody = LinearPhaseBody<Traits, WgmmaProducts<Traits::kDtype>>;

}  // namespace jax_attn
