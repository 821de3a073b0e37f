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
  __device__ __forceinline__ static void Finish() {
    WgmmaCommit();
    WgmmaWait<0>();
  }
  // Before the barrier behind which tiles are read, in each thread that copied a part of them.
  __device__ __forceinline__ static void FenceTiles() { FenceSharedForWgmma(); }

  template <bool kLower, int kSteps>
  __device__ __forceinline__ static void Rows(float (&x)[8][4], const u32 (&a)[kSteps][4],
                                              u32 tile) {
    const u64 b = MatrixDescriptor(tile, 16, kBlockBytes);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      Wgmma<64, kDtype>::RegistersA(x, a[k], MoveDescriptor(b, k / 4 * kPartBytes + k % 4 * 32),
                                    true);
    }
  }

  template <bool kLower, int kTiles>
  __device__ __forceinline__ static void Columns(float (&x)[kTiles][4], const u32 (&a)[4][4],
                                                 u32 tile) {
    const u64 b = MatrixDescriptor(tile, kPartBytes, kBlockBytes);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      Wgmma<8 * kTiles, kDtype>::RegistersATransposedB(
          x, a[k], MoveDescriptor(b, k * 2 * kBlockBytes), true);
    }
  }

 private:
  static constexpr int kBlockBytes = 8 * 128;  // of 8 rows
};

template <class Traits>
using HopperLinearChunksBody = LinearPhaseBody<Traits, WgmmaProducts<Traits::kDtype>>;

}  // namespace jax_attn
