#include "cpu/append.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/kernels/codec.h"
#include "spec.h"

namespace jax_attn {
namespace {

// Bytes of k and v that one task copies: less is not worth waking a thread for.
constexpr int64_t kTaskBytes = 64 << 10;

// Copies row `row` of k_new or v_new into `slot` of its pages, whose rows have row_bytes bytes.
void AppendRow(const AppendParams& p, const void* from, int64_t row, const float* scales,
               int64_t head_dim, int64_t row_bytes, int64_t slot, void* pages) {
  char* to = static_cast<char*>(pages) + slot * row_bytes;
  if (p.kv_format == kPlainFormat) {
    std::memcpy(to, static_cast<const char*>(from) + row * row_bytes, row_bytes);
    return;
  }
  const auto encode = [&](auto* elements) {
    elements += row * p.num_kv_heads * head_dim;
    for (i64 h = 0; h < p.num_kv_heads;
         ++h, elements += head_dim, to += row_bytes / p.num_kv_heads) {
      EncodeRow(p.kv_format, elements, head_dim, scales ? scales[h] : 1.0f, to);
    }
  };
  switch (p.dtype) {
    case kBF16:
      return encode(static_cast<const Bf16*>(from));
    case kF16:
      return encode(static_cast<const F16*>(from));
    default:
      return encode(static_cast<const float*>(from));
  }
}

// Calls write(row, slot) for new rows [begin, end). slot: where the row's keys and values go, or
// -1.
template <typename Write>
void ForRows(const AppendParams& p, int64_t begin, int64_t end, Write write) {
  const int64_t layer = p.layer ? *p.layer : 0;
  const int64_t first_slot = layer * p.num_pages * p.page_size;
  const i32 batch_size = p.header->batch_size;
  // The request of row `begin`: the last one that starts at or before it.
  int64_t request =
      std::upper_bound(p.qo_indptr, p.qo_indptr + batch_size + 1, static_cast<i32>(begin)) -
      p.qo_indptr - 1;
  for (int64_t row = begin; row < end; ++row) {
    while (row >= p.qo_indptr[request + 1]) ++request;
    const int64_t position = p.kv_lens[request] - (p.qo_indptr[request + 1] - row);
    if (position < 0) {
      write(row, -1);
      continue;
    }
    const int64_t page = p.page_indices[p.page_indptr[request] + position / p.page_size];
    write(row, first_slot + page * p.page_size + position % p.page_size);
  }
}

// Calls write(row, slot) for all rows, of row_bytes each, on the threads of the pool.
template <typename Write>
void ForAllRows(const AppendParams& p, int64_t row_bytes, TaskPool& pool, Write write) {
  const int64_t rows = p.header->nnz_qo;
  if (rows == 0) return;
  const int64_t task_rows = std::max<int64_t>(1, kTaskBytes / std::max<int64_t>(1, row_bytes));
  ParallelFor(pool, (rows + task_rows - 1) / task_rows, [&](int64_t task) {
    ForRows(p, task * task_rows, std::min(rows, (task + 1) * task_rows), write);
  });
}

inline void Store(float x, float* to) { *to = x; }
inline void Store(float x, Bf16* to) { *to = ToBf16(x); }
inline void Store(float x, F16* to) { *to = ToF16(x); }

// Rotates element i of a head with i + head_dim / 2, by angle i of the token. `to` must not equal
// `from`.
template <typename T>
void RotateHeads(const T* from, const float* cos, const float* sin, int64_t num_heads,
                 int64_t head_dim, T* to) {
  const int64_t half = head_dim / 2;
  for (int64_t h = 0; h < num_heads; ++h, from += head_dim, to += head_dim) {
    for (int64_t i = 0; i < half; ++i) {
      const float a = ToF32(from[i]), b = ToF32(from[i + half]);
      Store(a * cos[i] - b * sin[i], to + i);
      Store(b * cos[i] + a * sin[i], to + i + half);
    }
  }
}

template <typename T>
void AppendRotated(const AppendParams& p, TaskPool& pool) {
  const int64_t q_dim = int64_t{p.num_qo_heads} * p.head_dim_qk, half = p.head_dim_qk / 2;
  const int64_t k_dim = int64_t{p.num_kv_heads} * p.head_dim_qk;
  const int64_t v_dim = int64_t{p.num_kv_heads} * p.head_dim_vo, row_dim = q_dim + k_dim + v_dim;
  const int64_t row_bytes = row_dim * static_cast<int64_t>(sizeof(T));
  ForAllRows(p, row_bytes, pool, [&](int64_t row, int64_t slot) {
    const T* from = static_cast<const T*>(p.qkv) + row * row_dim;
    const float *cos = p.cos + row * half, *sin = p.sin + row * half;
    RotateHeads(from, cos, sin, p.num_qo_heads, p.head_dim_qk, static_cast<T*>(p.q) + row * q_dim);
    if (slot < 0) return;
    if (p.kv_format != kPlainFormat) {
      std::vector<T> keys(k_dim);
      RotateHeads(from + q_dim, cos, sin, p.num_kv_heads, p.head_dim_qk, keys.data());
      AppendRow(p, keys.data(), 0, p.k_scale, p.head_dim_qk, p.k_row_bytes, slot, p.k_pages);
    } else {
      RotateHeads(from + q_dim, cos, sin, p.num_kv_heads, p.head_dim_qk,
                  static_cast<T*>(p.k_pages) + slot * k_dim);
    }
    AppendRow(p, from + q_dim + k_dim, 0, p.v_scale, p.head_dim_vo, p.v_row_bytes, slot, p.v_pages);
  });
}

}  // namespace

void AppendCpu(const AppendParams& p, TaskPool& pool) {
  ForAllRows(p, p.k_row_bytes + p.v_row_bytes, pool, [&](int64_t row, int64_t slot) {
    if (slot < 0) return;
    AppendRow(p, p.k_new, row, p.k_scale, p.head_dim_qk, p.k_row_bytes, slot, p.k_pages);
    if (p.v_pages == nullptr) return;
    AppendRow(p, p.v_new, row, p.v_scale, p.head_dim_vo, p.v_row_bytes, slot, p.v_pages);
  });
}

void AppendRotatedCpu(const AppendParams& p, TaskPool& pool) {
  switch (p.dtype) {
    case kBF16:
      return AppendRotated<Bf16>(p, pool);
    case kF16:
      return AppendRotated<F16>(p, pool);
    default:
      return AppendRotated<float>(p, pool);
  }
}

}  // namespace jax_attn
