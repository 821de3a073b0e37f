// Writes the rows of k_new and v_new to their rows of the page pools.
#pragma once

#include "cuda/common/codec.cuh"
#include "cuda/common/header.cuh"

namespace jax_attn {

// The request of query token `token`: the last r with qo_indptr[r] <= token, found by a whole warp
// in steps of 32 requests. Requests without tokens are skipped.
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

// Words that give the position of a token.
struct TokenPosition {
  i32 qo_begin, qo_end, kv_len, page_begin;  // those of its request
  i32 layer;

  // Assumes that request `request` has the token. Nothing waits for these loads.
  __device__ __forceinline__ TokenPosition(const AppendParams& p, int request)
      : qo_begin(LoadConstant(p.qo_indptr + request)),
        qo_end(LoadConstant(p.qo_indptr + request + 1)),
        kv_len(LoadConstant(p.kv_lens + request)),
        page_begin(LoadConstant(p.page_indptr + request)),
        layer(p.layer != nullptr ? LoadConstant(p.layer) : 0) {}
};

// Where a query token goes, and whether it exists. In a batch of decodes the request of a token has
// the token's own number. So its words are loaded beside the header and the new rows, before any of
// them arrives. Wrong guesses stay within the arrays, whose capacities bound them.
class AppendToken {
 public:
  // Tokens that no batch of decodes has are not loaded before the header says that there are so
  // many.
  __device__ __forceinline__ static bool MayBeOne(const AppendParams& p, int token) {
    return token < p.max_batch || token < HeaderCounts(p.header, p).nnz_qo;
  }

  __device__ __forceinline__ AppendToken(const AppendParams& p, int token)
      : token_(token), guess_(p, Min(token, p.max_batch - 1)) {}

  // The pool row where it goes, found by a whole warp; -1: none.
  __device__ __forceinline__ i64 Row(const AppendParams& p, const HeaderCounts& plan) const {
    TokenPosition position = guess_;
    if (token_ < guess_.qo_begin || token_ >= guess_.qo_end || token_ >= plan.batch_size) {
      position = TokenPosition(p, FindRequest(p.qo_indptr, plan.batch_size, token_));
    }
    const int pos = position.kv_len - position.qo_end + token_;
    if (pos < 0) return -1;
    const i32* pages = p.page_indices + position.page_begin;
    const i64 page = i64{position.layer} * p.num_pages + LoadConstant(pages + pos / p.page_size);
    return page * p.page_size + pos % p.page_size;
  }

 private:
  int token_;
  TokenPosition guess_;
};

template <class Traits>
struct AppendBody {
  static constexpr int kNumThreads = 256;
  static constexpr int kSmemBytes = 0;
  static constexpr int kMinCtasPerSm = 4;  // 64 registers: four vectors and a header in flight

  // A warp copies one row: even tasks k, odd tasks v of token task / 2. Without v each token has
  // one task.
  __device__ __forceinline__ static void Run(const AppendParams& p) {
    const int num_warps = gridDim.x * (kNumThreads / kWarpSize);
    const int tasks_log2 = p.v_pages != nullptr ? 1 : 0;  // tasks of a token
    const i64 num_tasks = static_cast<i64>(p.max_qo_tokens) << tasks_log2;
    for (i64 task = blockIdx.x * (kNumThreads / kWarpSize) + threadIdx.x / kWarpSize;
         task < num_tasks; task += num_warps) {
      const int token = static_cast<int>(task >> tasks_log2);
      const bool is_v = (task & tasks_log2) != 0;
      if (!AppendToken::MayBeOne(p, token)) return;
      const AppendToken position(p, token);
      if constexpr (Traits::kKvFormat != kPlainFormat) {
        const HeaderCounts plan(p.header, p);
        if (token >= plan.nnz_qo) return;
        const i64 row = position.Row(p, plan);
        if (row < 0) continue;
        if (is_v) {
          WriteQuantized(p, p.v_pages, row, p.v_new, token, p.head_dim_vo, p.v_scale);
        } else {
          WriteQuantized(p, p.k_pages, row, p.k_new, token, p.head_dim_qk, p.k_scale);
        }
      } else {
        const i64 row_bytes = is_v ? p.v_row_bytes : p.k_row_bytes;
        const RowCopy copy(is_v ? p.v_new : p.k_new, token, row_bytes);
        const HeaderCounts plan(p.header, p);
        if (token >= plan.nnz_qo) return;
        const i64 row = position.Row(p, plan);
        if (row >= 0) copy.Store(is_v ? p.v_pages : p.k_pages, row);
      }
    }
  }

  // Copies one row. Rows are whole 16-byte vectors, because head dims are multiples of 8. The first
  // vectors of each lane are in flight before it is known where they go.
  class RowCopy {
   public:
    __device__ __forceinline__ RowCopy(const void* fresh, i64 token, i64 row_bytes)
        // Opaque: else each vector's address would be computed from the beginning.
        : from_(Opaque(static_cast<const char*>(fresh) + token * row_bytes + Lane() * 16)),
          row_bytes_(row_bytes),
          num_vectors_(static_cast<int>(row_bytes / 16) - Lane()) {
      Load(0, first_);
    }

    __device__ __forceinline__ void Store(void* pool, i64 row) const {
      char* to = static_cast<char*>(pool) + row * row_bytes_ + Lane() * 16;
      StoreVectors(to, 0, first_);
#pragma unroll 1
      for (int i = kBatch; i * kWarpSize < num_vectors_; i += kBatch) {
        uint4 vectors[kBatch];
        Load(i, vectors);
        StoreVectors(to, i, vectors);
      }
    }

   private:
    static constexpr int kBatch = 4;
    __device__ static int Lane() { return threadIdx.x % kWarpSize; }

    __device__ __forceinline__ void Load(int begin, uint4 (&vectors)[kBatch]) const {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if ((begin + i) * kWarpSize < num_vectors_) {
          vectors[i] = LoadConstant16(from_ + (begin + i) * kWarpSize * 16);
        }
      }
    }
    __device__ __forceinline__ void StoreVectors(char* to, int begin,
                                                 const uint4 (&vectors)[kBatch]) const {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if ((begin + i) * kWarpSize < num_vectors_) {
          *reinterpret_cast<uint4*>(to + (begin + i) * kWarpSize * 16) = vectors[i];
        }
      }
    }

    const char* from_;
    i64 row_bytes_;
    int num_vectors_;  // from this lane's first one on
    uint4 first_[kBatch];
  };

  __device__ __forceinline__ static void WriteQuantized(const AppendParams& p, void* pool, i64 row,
                                                        const void* fresh, i64 token, int head_dim,
                                                        const float* scales) {
    if constexpr (FormatOf(Traits::kKvFormat).scale_bytes == 0) {
      QuantizeRow(p, pool, row, fresh, token, head_dim, scales);
    } else {
      QuantizeHeads(p, pool, row, fresh, token, head_dim, scales);
    }
  }

  // One head after the other.
  __device__ __forceinline__ static void QuantizeHeads(const AppendParams& p, void* pool, i64 row,
                                                       const void* fresh, i64 token, int head_dim,
                                                       const float* scales) {
    constexpr int kFormat = Traits::kKvFormat, kDtype = Traits::kDtype;
    const int first = threadIdx.x % kWarpSize * 8;
    const i64 heads = p.num_kv_heads, row_bytes = QuantizedRowBytes(kFormat, head_dim);
    const u16* from = static_cast<const u16*>(fresh) + token * heads * head_dim + first;
    unsigned char* to = static_cast<unsigned char*>(pool) + row * heads * row_bytes;
#pragma unroll 1
    for (int head = 0; head < heads; ++head, from += head_dim, to += row_bytes) {
      float x[8] = {};
      if (first < head_dim) EightElements<kDtype>(LoadConstant16(from), x);
      QuantizeRowByWarp<kFormat, kDtype>(x, head_dim, HeadScaleOf<kFormat>(scales, head), to);
    }
  }

  // Quantizes 8 elements at a time, all of one head.
  __device__ __forceinline__ static void QuantizeRow(const AppendParams& p, void* pool, i64 row,
                                                     const void* fresh, i64 token, int head_dim,
                                                     const float* scales) {
    const i64 row_dim = static_cast<i64>(p.num_kv_heads) * head_dim;
    const u16* from = static_cast<const u16*>(fresh) + token * row_dim;
    unsigned char* to = static_cast<unsigned char*>(pool) + row * row_dim;
#pragma unroll 1
    for (int i = threadIdx.x % kWarpSize * 8; i < row_dim; i += kWarpSize * 8) {
      const float scale = scales != nullptr ? scales[i / head_dim] : 1.0f;
      *reinterpret_cast<uint2*>(to + i) =
          QuantizeEight<Traits::kKvFormat, Traits::kDtype>(LoadConstant16(from + i), scale);
    }
  }
};

}  // namespace jax_attn
