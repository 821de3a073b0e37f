#include "cpu/append.h"

#include <algorithm>
#include <cstring>

namespace jax_attn {
namespace {

// Bytes of k and v a task copies: less is not worth waking a thread for.
constexpr int64_t kTaskBytes = 64 << 10;

// Copies rows [begin, end) of k_new, v_new.
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
    std::memcpy(static_cast<char*>(p.k_pages) + slot * p.k_row_bytes,
                static_cast<const char*>(p.k_new) + row * p.k_row_bytes, p.k_row_bytes);
    if (p.v_pages == nullptr) continue;
    std::memcpy(static_cast<char*>(p.v_pages) + slot * p.v_row_bytes,
                static_cast<const char*>(p.v_new) + row * p.v_row_bytes, p.v_row_bytes);
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
