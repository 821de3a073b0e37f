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
constexpr int64_t kPartBytes = 512 << 10;  // of x, as the kernels read it
// Whole register tiles of all instruction sets, and enough rows for each read of the weights.
constexpr int64_t kPartRows = 192;

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

// Rows of x times one matrix.
struct Part {
  ProductParams product;
  const float* x;
};

// Adds the rows of p as parts that fit in the second cache, where every panel finds them again.
void AddParts(const ProductParams& p, const float* x, int64_t row_lanes, int64_t y_bytes,
              std::vector<Part>* parts) {
  const int64_t bytes = std::max<int64_t>(1, 4 * row_lanes * kPartRows);
  const int64_t rows = std::max<int64_t>(1, kPartBytes / bytes) * kPartRows;
  for (int64_t row = 0; row < p.num_rows; row += rows) {
    ProductParams own = p;
    own.y = static_cast<char*>(p.y) + row * y_bytes;
    own.num_rows = std::min<int64_t>(rows, p.num_rows - row);
    parts->push_back({own, x + row * row_lanes});
  }
}

void RunParts(const CpuProductKernels& kernels, const std::vector<Part>& parts, int64_t num_panels,
              TaskPool& pool) {
  if (parts.empty()) return;
  const int64_t num_parts = static_cast<int64_t>(parts.size());
  const int64_t num_tasks = CeilDiv(kThreadTasks * std::max(1, pool.num_threads()), num_parts);
  const int64_t task_panels = kTaskPanels * CeilDiv(num_panels, kTaskPanels * num_tasks);
  const int64_t tasks_each = CeilDiv(num_panels, task_panels);
  ParallelFor(pool, num_parts * tasks_each, [&](int64_t task) {
    const Part& part = parts[task / tasks_each];
    const int64_t begin = task % tasks_each * task_panels;
    kernels.run(part.product, part.x, begin, std::min(num_panels, begin + task_panels));
  });
}

// f32 lanes of a row from WidenedRows.
int64_t RowLanes(int64_t dtype, const ProductParams& p) {
  const int64_t row_bytes = ActiveKernels().product[dtype]->row_bytes(p.depth);
  return row_bytes > 0 ? row_bytes / 4 : p.depth * TypeBytes(dtype) / 4;
}

int64_t ResultBytes(int64_t dtype, const ProductParams& p) {
  return p.columns * (p.is_wide ? 4 : TypeBytes(dtype));
}

}  // namespace

void ProductCpu(int64_t dtype, const ProductParams& p, TaskPool& pool) {
  const float* x = WidenedRows(dtype, p, pool);
  std::vector<Part> parts;
  AddParts(p, x, RowLanes(dtype, p), ResultBytes(dtype, p), &parts);
  RunParts(*ActiveKernels().product[dtype], parts, CeilDiv(p.columns, kWeightColumns), pool);
}

void GroupedProductCpu(int64_t dtype, const ProductParams& p, const int32_t* group_rows,
                       int64_t num_groups, TaskPool& pool) {
  const float* x = WidenedRows(dtype, p, pool);
  const int64_t row_lanes = RowLanes(dtype, p), y_bytes = ResultBytes(dtype, p);
  const int64_t num_panels = CeilDiv(p.columns, kWeightColumns);
  const bool is_bf16 = dtype == kBF16;
  const int64_t panel_bytes =
      WeightSteps(is_bf16, p.depth) * kWeightColumns * (is_bf16 ? 4 : TypeBytes(dtype));
  std::vector<Part> parts;
  int64_t row = 0;
  for (int64_t group = 0; group < num_groups; row += group_rows[group++]) {
    ProductParams own = p;
    own.panels = static_cast<const char*>(p.panels) + group * num_panels * panel_bytes;
    own.y = static_cast<char*>(p.y) + row * y_bytes;
    own.num_rows = group_rows[group];
    AddParts(own, x + row * row_lanes, row_lanes, y_bytes, &parts);
  }
  std::memset(static_cast<char*>(p.y) + row * y_bytes, 0, (p.num_rows - row) * y_bytes);
  RunParts(*ActiveKernels().product[dtype], parts, num_panels, pool);
}

}  // namespace jax_attn
