#include "cpu/append.h"

#include <algorithm>
#include <cstring>

#include "cpu/simd_types.h"
#include "spec.h"

namespace jax_attn {
namespace {

// Bytes of k and v a task copies: less is not worth waking a thread for.
constexpr int64_t kTaskBytes = 64 << 10;

// to = from / scale, head by head.
template <typename T>
void QuantizeRow(const T* from, const float* scales, int64_t num_heads, int64_t head_dim,
                 E4m3* to) {
  for (int64_t h = 0; h < num_heads; ++h) {
    const float scale = scales ? scales[h] : 1.0f;
    for (int64_t d = 0; d < head_dim; ++d) *to++ = ToE4m3(ToF32(*from++) / scale);
  }
}

// Row `row` of k_new or v_new into `slot` of its pages, whose rows are of row_bytes.
void AppendRow(const AppendParams& p, const void* from, int64_t row, const float* scales,
               int64_t head_dim, int64_t row_bytes, int64_t slot, void* pages) {
  char* to = static_cast<char*>(pages) + slot * row_bytes;
  if (!p.kv_is_e4m3) {
    std::memcpy(to, static_cast<const char*>(from) + row * row_bytes, row_bytes);
    return;
  }
  const auto quantize = [&](auto* elements) {
    QuantizeRow(elements + row * p.num_kv_heads * head_dim, scales, p.num_kv_heads, head_dim,
                reinterpret_cast<E4m3*>(to));
  };
  switch (p.dtype) {
    case kBF16:
      return quantize(static_cast<const Bf16*>(from));
    case kF16:
      return quantize(static_cast<const F16*>(from));
    default:
      return quantize(static_cast<const float*>(from));
  }
}

// Writes rows [begin, end) of k_new, v_new.
void AppendRows(const AppendParams& p, int64_t begin, int64_t end) {
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
    if (position < 0) continue;
    const int64_t page = p.page_indices[p.page_indptr[request] + position / p.page_size];
    const int64_t slot = first_slot + page * p.page_size + position % p.page_size;
    AppendRow(p, p.k_new, row, p.k_scale, p.head_dim_qk, p.k_row_bytes, slot, p.k_pages);
    if (p.v_pages == nullptr) continue;
    AppendRow(p, p.v_new, row, p.v_scale, p.head_dim_vo, p.v_row_bytes, slot, p.v_pages);
  }
}

}  // namespace

void AppendCpu(const AppendParams& params, TaskPool& pool) {
  const int64_t rows = params.header->nnz_qo;
  if (rows == 0) return;
  const int64_t row_bytes = std::max<int64_t>(1, params.k_row_bytes + params.v_row_bytes);
  const int64_t task_rows = std::max<int64_t>(1, kTaskBytes / row_bytes);
  ParallelFor(pool, (rows + task_rows - 1) / task_rows, [&](int64_t task) {
    AppendRows(params, task * task_rows, std::min(rows, (task + 1) * task_rows));
  });
}

}  // namespace jax_attn
