// Writes the rows of k_new and v_new to their places in the page pools.
#pragma once

#include "cuda/common/codec.cuh"
#include "cuda/common/header.cuh"

namespace jax_attn {

// The request of query token `token`: the last r with qo_indptr[r] <= token, found by a whole warp
// in steps of 32 requests. Requests without tokens are passed over.
__device__ __forceinline__ int FindRequest(const i32* qo_indptr, int batch_size, int token) {
  const int lane = threadIdx.x % kWarpSize;
  int first = 0, count = batch_size;  // it is in [first, first + count)
  while (count > 1) {
    const int stride = CeilDiv(count, kWarpSize);
    const int probe = lane * stride;
    const bool not_after = probe < count && LoadConstant(qo_indptr + first + probe) <= token;
    const int step = (__popc(__ballot_sync(kFullWarp, not_after)) - 1) * stride;
    first += step;
    count = Min(stride, count - step);
  }
  return first;
}

// The row of the pools where query token `token` goes, found by a whole warp; -1: it has none.
__device__ __forceinline__ i64 FindRow(const AppendParams& p, int batch_size, int token) {
  const int request = FindRequest(p.qo_indptr, batch_size, token);
  const i64 page_begin = LoadConstant(p.page_indptr + request);
  const i64 layer = p.layer != nullptr ? LoadConstant(p.layer) : 0;
  const int pos =
      LoadConstant(p.kv_lens + request) - LoadConstant(p.qo_indptr + request + 1) + token;
  if (pos < 0) return -1;
  const i64 page =
      layer * p.num_pages + LoadConstant(p.page_indices + page_begin + pos / p.page_size);
  return page * p.page_size + pos % p.page_size;
}

template <class Traits>
struct AppendBody {
  static constexpr int kNumThreads = 256;
  static constexpr int kSmemBytes = 0;
  static constexpr int kMinCtasPerSm = 5;  // 48 registers are enough for four vectors under way

  // A warp copies one row: even tasks k, odd tasks v of token task / 2; without v a task a token.
  __device__ __forceinline__ static void Run(const AppendParams& p) {
    const int num_warps = gridDim.x * (kNumThreads / kWarpSize);
    const HeaderCounts plan(p.header, p);
    const int tasks_log2 = p.v_pages != nullptr ? 1 : 0;  // of a token
    const i64 num_tasks = static_cast<i64>(plan.nnz_qo) << tasks_log2;
    for (i64 task = blockIdx.x * (kNumThreads / kWarpSize) + threadIdx.x / kWarpSize;
         task < num_tasks; task += num_warps) {
      const int token = static_cast<int>(task >> tasks_log2);
      const bool is_v = (task & tasks_log2) != 0;
      const i64 row = FindRow(p, plan.batch_size, token);
      if (row < 0) continue;
      if constexpr (Traits::kKvFormat != kPlainFormat) {
        if (is_v) {
          WriteCodes(p, p.v_pages, row, p.v_new, token, p.head_dim_vo, p.v_scale);
        } else {
          WriteCodes(p, p.k_pages, row, p.k_new, token, p.head_dim_qk, p.k_scale);
        }
        continue;
      }
      if (is_v) {
        CopyRow(p.v_pages, row, p.v_new, token, p.v_row_bytes);
      } else {
        CopyRow(p.k_pages, row, p.k_new, token, p.k_row_bytes);
      }
    }
  }

  // Rows are whole 16-byte vectors, because head dims are multiples of 8.
  __device__ __forceinline__ static void CopyRow(void* pool, i64 row, const void* fresh, i64 token,
                                                 i64 row_bytes) {
    const char* from = static_cast<const char*>(fresh) + token * row_bytes;
    char* to = static_cast<char*>(pool) + row * row_bytes;
    const int num_vectors = static_cast<int>(row_bytes / 16);
#pragma unroll 4
    for (int i = threadIdx.x % kWarpSize; i < num_vectors; i += kWarpSize) {
      *reinterpret_cast<uint4*>(to + i * 16) = LoadConstant16(from + i * 16);
    }
  }

  __device__ __forceinline__ static void WriteCodes(const AppendParams& p, void* pool, i64 row,
                                                    const void* fresh, i64 token, int head_dim,
                                                    const float* scales) {
    if constexpr (FormatOf(Traits::kKvFormat).scale == kHeadScale) {
      QuantizeRow(p, pool, row, fresh, token, head_dim, scales);
    } else {
      EncodeHeads(p, pool, row, fresh, token, head_dim);
    }
  }

  // One head after the other.
  __device__ __forceinline__ static void EncodeHeads(const AppendParams& p, void* pool, i64 row,
                                                     const void* fresh, i64 token, int head_dim) {
    constexpr int kFormat = Traits::kKvFormat, kDtype = Traits::kDtype;
    const int first = threadIdx.x % kWarpSize * 8;
    const i64 heads = p.num_kv_heads, row_bytes = CodeRowBytes(kFormat, head_dim);
    const u16* from = static_cast<const u16*>(fresh) + token * heads * head_dim + first;
    unsigned char* to = static_cast<unsigned char*>(pool) + row * heads * row_bytes;
#pragma unroll 1
    for (int head = 0; head < heads; ++head, from += head_dim, to += row_bytes) {
      float x[8] = {};
      if (first < head_dim) EightElements<kDtype>(LoadConstant16(from), x);
      EncodeRow<kFormat, kDtype>(x, head_dim, to);
    }
  }

  // 8 elements at a time, which are of one head.
  __device__ __forceinline__ static void QuantizeRow(const AppendParams& p, void* pool, i64 row,
                                                     const void* fresh, i64 token, int head_dim,
                                                     const float* scales) {
    using E = Element<Traits::kDtype>;
    const i64 row_dim = static_cast<i64>(p.num_kv_heads) * head_dim;
    const u16* from = static_cast<const u16*>(fresh) + token * row_dim;
    unsigned char* to = static_cast<unsigned char*>(pool) + row * row_dim;
#pragma unroll 1
    for (int i = threadIdx.x % kWarpSize * 8; i < row_dim; i += kWarpSize * 8) {
      const float scale = scales != nullptr ? scales[i / head_dim] : 1.0f;
      const uint4 x = LoadConstant16(from + i);
      const u32 pairs[4] = {x.x, x.y, x.z, x.w};
      u32 codes[2] = {0, 0};
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float element = E::ToFloat(static_cast<u16>(pairs[j / 2] >> j % 2 * 16));
        codes[j / 4] |= ToCode<Traits::kKvFormat>(element / scale) << j % 4 * 8;
      }
      *reinterpret_cast<uint2*>(to + i) = make_uint2(codes[0], codes[1]);
    }
  }
};

}  // namespace jax_attn
