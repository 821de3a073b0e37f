#include "cpu/product.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/simd/simd_types.h"
#include "cpu/threads/thread_scratch.h"
#include "spec.h"

namespace jax_attn {
namespace {

// Tasks per thread. Several, so that the other threads can take over the part of a thread that
// begins late.
constexpr int64_t kThreadTasks = 8;
constexpr int64_t kTaskPanels = 4;  // panels that kernels take at once for few rows
// Bytes of x that one task widens: less is not worth waking a thread for.
constexpr int64_t kTaskBytes = 256 << 10;

int64_t TypeBytes(int64_t dtype) { return dtype == kF32 ? 4 : 2; }

// The rows of x as the kernels read them.
const float* WidenedRows(int64_t dtype, const ProductParams& p, TaskPool& pool) {
  const CpuProductKernels& kernels = *ActiveKernels().product[dtype];
  const int64_t row_bytes = kernels.row_bytes(p.depth);
  if (row_bytes == 0) return static_cast<const float*>(p.x);
  char* lanes = static_cast<char*>(ThreadScratch(p.num_rows * row_bytes));
  const int64_t x_bytes = p.depth * TypeBytes(dtype);
  const int64_t task_rows = std::max<int64_t>(1, kTaskBytes / row_bytes);
  ParallelFor(pool, CeilDiv(p.num_rows, task_rows), [&](int64_t task) {
    const int64_t end = std::min<int64_t>(p.num_rows, (task + 1) * task_rows);
    for (int64_t row = task * task_rows; row < end; ++row) {
      kernels.widen_row(static_cast<const char*>(p.x) + row * x_bytes, p.depth,
                        lanes + row * row_bytes);
    }
  });
  return reinterpret_cast<const float*>(lanes);
}

}  // namespace

void ProductCpu(int64_t dtype, const ProductParams& p, TaskPool& pool) {
  const CpuProductKernels& kernels = *ActiveKernels().product[dtype];
  const float* x = WidenedRows(dtype, p, pool);
  const int64_t num_panels = CeilDiv(p.columns, kWeightColumns);
  const int64_t task_panels =
      kTaskPanels *
      CeilDiv(num_panels, kTaskPanels * kThreadTasks * std::max(1, pool.num_threads()));
  ParallelFor(pool, CeilDiv(num_panels, task_panels), [&](int64_t task) {
    kernels.run(p, x, task * task_panels, std::min(num_panels, (task + 1) * task_panels));
  });
}

void GroupedProductCpu(int64_t dtype, const ProductParams& p, const int32_t* group_rows,
                       int64_t num_groups, TaskPool& pool) {
  const CpuProductKernels& kernels = *ActiveKernels().product[dtype];
  const float* x = WidenedRows(dtype, p, pool);
  const int64_t row_bytes = kernels.row_bytes(p.depth);
  const int64_t lanes = row_bytes > 0 ? row_bytes : p.depth * TypeBytes(dtype);
  const int64_t num_panels = CeilDiv(p.columns, kWeightColumns);
  const bool is_bf16 = dtype == kBF16;
  const int64_t panel_bytes =
      WeightSteps(is_bf16, p.depth) * kWeightColumns * (is_bf16 ? 4 : TypeBytes(dtype));
  const int64_t y_bytes = p.columns * (p.is_wide ? 4 : TypeBytes(dtype));
  struct Part {
    ProductParams product;
    const float* x;
  };
  std::vector<Part> parts;
  int64_t row = 0;
  for (int64_t group = 0; group < num_groups; row += group_rows[group++]) {
    if (group_rows[group] == 0) continue;
    ProductParams own = p;
    own.panels = static_cast<const char*>(p.panels) + group * num_panels * panel_bytes;
    own.y = static_cast<char*>(p.y) + row * y_bytes;
    own.num_rows = group_rows[group];
    parts.push_back({own, x + row * lanes / 4});
  }
  std::memset(static_cast<char*>(p.y) + row * y_bytes, 0, (p.num_rows - row) * y_bytes);
  if (parts.empty()) return;
  const int64_t num_tasks = std::max<int64_t>(
      1,
      CeilDiv(kThreadTasks * std::max(1, pool.num_threads()), static_cast<int64_t>(parts.size())));
  const int64_t task_panels = kTaskPanels * CeilDiv(num_panels, kTaskPanels * num_tasks);
  const int64_t tasks_each = CeilDiv(num_panels, task_panels);
  ParallelFor(pool, static_cast<int64_t>(parts.size()) * tasks_each, [&](int64_t task) {
    const Part& part = parts[task / tasks_each];
    const int64_t begin = task % tasks_each * task_panels;
    kernels.run(part.product, part.x, begin, std::min(num_panels, begin + task_panels));
  });
}

}  // namespace jax_attn
