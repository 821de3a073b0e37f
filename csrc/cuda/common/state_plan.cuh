// Plans over pools of recurrent states, as kernels read them. Words out of range are a fault, so
// that a damaged plan writes no memory but results and the pool.
#pragma once

#include "cuda/common/math.cuh"
#include "cuda/common/types.cuh"

namespace jax_attn {

struct StatePlanView {
  const StateChunk* chunks;
  i64 layer;
  i32 num_chunks, num_tokens;  // 0 with a fault
  i32 num_slots;
  bool is_faulty;  // results are NaN

  __device__ __forceinline__ explicit StatePlanView(const StatePlanParams& p)
      : chunks(p.chunks), layer(LoadConstant(p.layer)), num_slots(p.num_slots) {
    const i32 tokens = LoadConstant(p.header + kStatePlanTokens);
    const i32 of_plan = LoadConstant(p.header + kStatePlanChunks);
    const i32 fault = LoadConstant(p.header + kStatePlanFault);
    is_faulty = fault != 0 || tokens < 0 || tokens > p.max_tokens || of_plan < 0 ||
                of_plan > p.max_chunks || layer < 0 || layer >= p.num_layers;
    num_chunks = is_faulty ? 0 : of_plan;
    num_tokens = is_faulty ? 0 : tokens;
  }

  // Chunk `i` < num_chunks. One that names rows or slots out of range has none.
  __device__ __forceinline__ StateChunk Chunk(i32 i) const {
    const i32* words = &chunks[i].begin;
    StateChunk c = {LoadConstant(words),     LoadConstant(words + 1), LoadConstant(words + 2),
                    LoadConstant(words + 3), LoadConstant(words + 4), LoadConstant(words + 5)};
    if (c.begin < 0 || c.length < 0 || c.length > num_tokens - c.begin) c.begin = c.length = 0;
    if (c.read_slot >= num_slots) c.read_slot = -1;
    if (c.write_slot >= num_slots) c.write_slot = -1;
    return c;
  }

  // Whether chunk i begins a request.
  __device__ __forceinline__ bool IsFirst(i32 i) const {
    return i == 0 || LoadConstant(&chunks[i].is_first) == 1;
  }

  // The first chunk from `chunk` on that begins a request and for which fn(chunk) is true;
  // num_chunks if there is none. For all threads of a CTA of kWarps warps, which have `maxima`
  // [kWarps] in shared memory.
  template <int kWarps, class Fn>
  __device__ __forceinline__ i32 FirstRequest(i32 chunk, int* maxima, const Fn& fn) const {
    // So many chunks a thread looks at, in one trip to memory.
    constexpr int kAhead = 8, kNumThreads = kWarps * kWarpSize, kLength = kAhead * kNumThreads;
    for (; chunk < num_chunks; chunk += kLength) {
      int found = 0;  // chunks from the first one that is found to the end of these
#pragma unroll
      for (int i = kAhead - 1; i >= 0; --i) {
        const int offset = i * kNumThreads + static_cast<int>(threadIdx.x);
        const i32 at = chunk + offset;
        if (at < num_chunks && IsFirst(at) && fn(at)) found = kLength - offset;
      }
      found = BlockMax<kWarps>(found, maxima);
      if (found > 0) return chunk + kLength - found;
    }
    return num_chunks;
  }

  // All CTAs together: rows of a result that no token has become 0, and NaN with a fault.
  // row_elements: a multiple of kWidth, which is 1, 4 or, of 16-bit types, 8.
  template <int kDtype, int kWidth>
  __device__ __forceinline__ void FillOtherRows(void* result, i32 max_tokens,
                                                i64 row_elements) const {
    FillRows<kDtype, kWidth>(result, max_tokens, row_elements,
                             is_faulty ? __int_as_float(0x7fffffff) : 0.0f);
  }
  // The same with a value.
  template <int kDtype, int kWidth>
  __device__ __forceinline__ void FillRows(void* result, i32 max_tokens, i64 row_elements,
                                           float x) const {
    const i64 end = max_tokens * row_elements;
    // So many CTAs that the number of threads has 32 bits; 64 take registers from all of a kernel.
    const int ctas = Min(static_cast<int>(gridDim.x), 1 << 16);
    if (static_cast<int>(blockIdx.x) >= ctas) return;
    const int threads = ctas * static_cast<int>(blockDim.x);
    const int thread = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    i64 at = num_tokens * row_elements + static_cast<i64>(thread) * kWidth;
    for (; at < end; at += static_cast<i64>(threads) * kWidth)
      StoreElements<kDtype, kWidth>(result, at, x);
  }

  template <int kDtype, int kWidth>
  __device__ __forceinline__ static void StoreElements(void* result, i64 at, float x) {
    if constexpr (kWidth == 8) {
      const u32 pair = Element<kDtype>::Pack(x, x);
      StoreVector(static_cast<u16*>(result) + at, make_uint4(pair, pair, pair, pair));
    } else if constexpr (kWidth == 4) {
      Store4<kDtype>(result, at, make_float4(x, x, x, x));
    } else if constexpr (kDtype == kElementF32) {
      static_cast<float*>(result)[at] = x;
    } else {
      static_cast<u16*>(result)[at] = static_cast<u16>(Element<kDtype>::Pack(x, 0.0f));
    }
  }
};

// An element of q, k, v or x as f32.
template <int kDtype>
__device__ __forceinline__ float LoadElement(const void* array, i64 at) {
  if constexpr (kDtype == kElementF32) {
    return __uint_as_float(LoadOperand32(static_cast<const float*>(array) + at));
  } else {
    const u32 bits = LoadOperand16(static_cast<const u16*>(array) + at);
    return Element<kDtype>::ToFloat(static_cast<u16>(bits));
  }
}

}  // namespace jax_attn
