// Constants and small functions for one thread or one warp.
#pragma once

#include "cuda/common/ptx.cuh"

namespace jax_attn {

inline constexpr float kLog2E = 1.44269504088896341f;
inline constexpr float kLn2 = 0.69314718055994531f;
inline constexpr float kLog4E = 0.5f * kLog2E, kLn4 = 2.0f * kLn2;
inline constexpr float kLargestFloat = 3.402823466e38f;
inline constexpr int kWarpSize = 32;
inline constexpr u32 kFullWarp = 0xffffffffu;

__device__ __forceinline__ float Infinity() { return __int_as_float(0x7f800000); }

constexpr __host__ __device__ int Min(int a, int b) { return a < b ? a : b; }
constexpr __host__ __device__ int Max(int a, int b) { return a > b ? a : b; }
constexpr __host__ __device__ int CeilDiv(int a, int b) { return (a + b - 1) / b; }
constexpr __host__ __device__ int Clamp(i64 x, int low, int high) {
  return x < low ? low : x > high ? high : static_cast<int>(x);
}

template <bool kFirst, class A, class B>
struct Conditional {
  using Type = A;
};
template <class A, class B>
struct Conditional<false, A, B> {
  using Type = B;
};

// The largest power of two that divides x, at most `limit`.
constexpr __host__ __device__ int PowerOfTwoDivisor(int x, int limit) {
  int p = 1;
  while (x % (2 * p) == 0 && 2 * p <= limit) p *= 2;
  return p;
}

// The smallest power of two that is at least x.
constexpr __host__ __device__ int PowerOfTwoFrom(int x) {
  int p = 1;
  while (p < x) p *= 2;
  return p;
}

// Tells the compiler that x is the same in all lanes. What is computed from it is computed once for
// the warp, in uniform registers, and branches on it do not diverge.
template <class T>
__device__ __forceinline__ T Uniform(T x) {
  return __shfl_sync(kFullWarp, x, 0);
}

// Reductions over the four lanes that hold a row of an mma.sync accumulator.
__device__ __forceinline__ float QuadMax(float x) {
  x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, 1));
  return fmaxf(x, __shfl_xor_sync(kFullWarp, x, 2));
}
__device__ __forceinline__ float QuadSum(float x) {
  x += __shfl_xor_sync(kFullWarp, x, 1);
  return x + __shfl_xor_sync(kFullWarp, x, 2);
}

// Transposes 4 x 4 words of a quad. Lane i gives x[j], column pair i of tile j, and gets all four
// pairs of tile i.
__device__ __forceinline__ uint4 TransposeQuad(const u32 (&x)[4], int lane) {
  const bool odd = lane % 2 != 0, upper = lane % 4 >= 2;
  // Tiles odd and 2 + odd, of this lane and of its neighbour.
  const u32 kept[2] = {odd ? x[1] : x[0], odd ? x[3] : x[2]};
  const u32 got[2] = {__shfl_xor_sync(kFullWarp, odd ? x[0] : x[1], 1),
                      __shfl_xor_sync(kFullWarp, odd ? x[2] : x[3], 1)};
  u32 pair[2][2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    pair[i][0] = odd ? got[i] : kept[i];
    pair[i][1] = odd ? kept[i] : got[i];
  }
  // Keep the tile of this lane's half of the quad, and swap the other one with the other half.
  u32 mine[2], others[2];
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    mine[c] = upper ? pair[1][c] : pair[0][c];
    others[c] = __shfl_xor_sync(kFullWarp, upper ? pair[0][c] : pair[1][c], 2);
  }
  return upper ? make_uint4(others[0], others[1], mine[0], mine[1])
               : make_uint4(mine[0], mine[1], others[0], others[1]);
}

// The sum over a warp.
__device__ __forceinline__ float WarpSumOf(float x) {
#pragma unroll
  for (int mask = kWarpSize / 2; mask > 0; mask /= 2) x += __shfl_xor_sync(kFullWarp, x, mask);
  return x;
}

// The largest of the numbers >= 0 of a CTA of kWarps warps. maxima: [kWarps], in shared memory.
template <int kWarps>
__device__ __forceinline__ int BlockMax(int x, int* maxima) {
  const u32 of_warp = WarpMax(static_cast<u32>(x));
  __syncthreads();
  if (threadIdx.x % kWarpSize == 0) maxima[threadIdx.x / kWarpSize] = static_cast<int>(of_warp);
  __syncthreads();
  int most = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) most = Max(most, maxima[w]);
  __syncthreads();
  return most;
}

// A maximum of -inf means that no key was seen; 0 in its place keeps -inf - (-inf) out of exp2.
__device__ __forceinline__ float FiniteMax(float max) { return max == -Infinity() ? 0.0f : max; }

}  // namespace jax_attn
