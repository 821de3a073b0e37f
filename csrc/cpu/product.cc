#include "cpu/product.h"

#include <algorithm>

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

}  // namespace

void ProductCpu(int64_t dtype, const ProductParams& p, TaskPool& pool) {
  const CpuProductKernels& kernels = *ActiveKernels().product[dtype];
  const float* x = static_cast<const float*>(p.x);
  if (const int64_t row_bytes = kernels.row_bytes(p.depth); row_bytes > 0) {
    char* lanes = static_cast<char*>(ThreadScratch(p.num_rows * row_bytes));
    const int64_t x_bytes = p.depth * (dtype == kF32 ? 4 : 2);
    const int64_t task_rows = std::max<int64_t>(1, kTaskBytes / row_bytes);
    ParallelFor(pool, CeilDiv(p.num_rows, task_rows), [&](int64_t task) {
      const int64_t end = std::min<int64_t>(p.num_rows, (task + 1) * task_rows);
      for (int64_t row = task * task_rows; row < end; ++row) {
        kernels.widen_row(static_cast<const char*>(p.x) + row * x_bytes, p.depth,
                          lanes + row * row_bytes);
      }
    });
    x = reinterpret_cast<const float*>(lanes);
  }
  const int64_t num_panels = CeilDiv(p.columns, kWeightColumns);
  const int64_t task_panels =
      kTaskPanels *
      CeilDiv(num_panels, kTaskPanels * kThreadTasks * std::max(1, pool.num_threads()));
  ParallelFor(pool, CeilDiv(num_panels, task_panels), [&](int64_t task) {
    kernels.run(p, x, task * task_panels, std::min(num_panels, (task + 1) * task_panels));
  });
}

}  // namespace jax_attn
