#include "cpu/merge.h"

#include <algorithm>

#include "cpu/kernels.h"

namespace jax_attn {

void MergeCpu(int64_t dtype, const MergeParams& params, TaskPool& pool) {
  const CpuTypeKernels& kernels = *ActiveKernels().of[kPlainFormat][dtype];
  // About 64 KiB of f32 read per task and state; less is not worth waking a thread for.
  const int64_t task_rows = std::max<int64_t>(1, (16 << 10) / std::max<i32>(1, params.head_dim_vo));
  ParallelFor(pool, (params.num_rows + task_rows - 1) / task_rows, [&](int64_t task) {
    kernels.merge_rows(params, task * task_rows,
                       std::min<int64_t>(params.num_rows, (task + 1) * task_rows));
  });
}

}  // namespace jax_attn
