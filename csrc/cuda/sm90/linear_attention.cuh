// Chunked linear attention on Hopper: products by wgmma, see common/linear_scan.cuh.
#pragma once

#include "cuda/sm80/linear_attention.cuh"
#include "cuda/sm90/ptx.cuh"

namespace jax_attn {

// As MmaProducts. A warpgroup reads a tile once for its 64 rows.
template <int kDtype>
struct WgmmaProducts {
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
        SharedAddress(tile) + SwizzledByte(row + lane % 8, column + lane / 8 % 2 * 8), first, second);
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
