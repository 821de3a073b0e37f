// x @ W for few rows of x and a quantized W on Hopper: the portable kernel with wgmma, whose
// operand a, the dequantized weights, stays in registers. wgmma multiplies 64 rows of x as fast as
// 8, where mma.sync takes as long as all else, and reads x from shared memory by itself.
#pragma once

#include "cuda/sm80/quantized_product.cuh"
#include "cuda/sm90/ptx.cuh"

namespace jax_attn {

// Products of a warpgroup: of 128 columns and 32 of the depth of a step. Each warp has the same 32
// columns as in MmaProducts, as 16 of two times 64 rows of W^T.
template <class Traits>
class WgmmaProducts {
 public:
  static constexpr int kRows = Traits::kTileRows, kRowTiles = kRows / 8;
  static constexpr int kXPitch = kProductStep;  // swizzled rows of 128 bytes
  static constexpr int kXAlignment = 1024;
  static constexpr int kColumnWarps = 4;

  __device__ __forceinline__ static u32 XOffset(u32 row, u32 chunk) {
    return row * (kXPitch * 2) + (chunk ^ row % 8) * 16;
  }
  __device__ __forceinline__ static void Publish() { FenceSharedForWgmma(); }

  template <class Weights>
  __device__ __forceinline__ static void Multiply(float (&y)[2][kRowTiles][4], u32 x, int depth,
                                                  int, Weights weights) {
    const u64 rows = MatrixDescriptor(x + static_cast<u32>(depth * 2), 16, 1024);
    u32 w[2][2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      weights(2 * half, w[half]);
      PinRegisters(w[half]);
      PinRegisters(y[0]);
      PinRegisters(y[1]);
      WgmmaFence();
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        Product::RegistersA(y[tile], w[half][tile], MoveDescriptor(rows, half * 32), true);
      }
      WgmmaCommit();
    }
    // None is in flight across the loop over steps, for which ptxas would serialize all of them.
    WgmmaWait<0>();
    PinRegisters(y[0]);
    PinRegisters(y[1]);
  }

 private:
  using Product = Wgmma<kRows, Traits::kDtype>;
};

template <class Traits>
using HopperQuantizedProductBody = QuantizedProductBody<Traits, WgmmaProducts<Traits>>;

}  // namespace jax_attn
