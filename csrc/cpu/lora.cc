#include "cpu/lora.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "cpu/simd/simd_types.h"
#include "cpu/threads/thread_scratch.h"
#include "spec.h"

namespace jax_attn {
namespace {

// Rows of an adapter up to which one task computes both of its products: no thread waits for others
// in between, and a and b are read once. Of more rows, tasks share what is in their caches.
constexpr i64 kFewRows = 4;
constexpr i64 kTaskRanks = 8;      // of a part, in one task of the first product
constexpr i64 kTaskColumns = 512;  // of y, in one task of the second; a multiple of all tiles
// Multiplications of a call that are not worth waking a thread for.
constexpr i64 kAloneProducts = 256 << 10;

struct Task {
  const LoraRows* rows;
  i64 part, begin, end;
};

}  // namespace

void LoraCpu(int64_t dtype, LoraParams p, const int32_t* adapters, const int32_t* ranks,
             const int64_t* ends, TaskPool& pool) {
  std::vector<int32_t> order;
  for (i64 row = 0; row < p.num_rows; ++row) {
    if (adapters[row] >= 0) order.push_back(static_cast<int32_t>(row));
  }
  if (order.empty()) return;
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return adapters[a] < adapters[b]; });

  std::vector<LoraRows> groups;
  for (size_t begin = 0, end = 0; begin < order.size(); begin = end) {
    const int32_t adapter = adapters[order[begin]];
    while (end < order.size() && adapters[order[end]] == adapter) ++end;
    groups.push_back({order.data() + begin, static_cast<i64>(end - begin), adapter,
                      ranks + adapter * p.num_parts});
  }
  p.h = static_cast<float*>(ThreadScratch(p.num_rows * p.num_parts * p.max_rank * sizeof(float)));
  const CpuLoraKernels& kernels = *ActiveKernels().lora[dtype];
  const auto first_column = [&](i64 part) { return part == 0 ? 0 : ends[part - 1]; };

  i64 products = 0, most = 0;
  for (const LoraRows& group : groups) {
    most = std::max(most, group.num);
    for (i64 part = 0; part < p.num_parts; ++part) {
      products += group.num * group.ranks[part] * (p.depth + ends[part] - first_column(part));
    }
  }
  InlinePool alone;
  TaskPool& threads = products < kAloneProducts ? alone : pool;
  if (most <= kFewRows && static_cast<i64>(groups.size()) >= threads.num_threads()) {
    ParallelFor(threads, static_cast<int64_t>(groups.size()), [&](int64_t i) {
      const LoraRows& group = groups[i];
      for (i64 part = 0; part < p.num_parts; ++part) {
        if (group.ranks[part] == 0) continue;
        kernels.shrink(p, group, part, 0, group.ranks[part]);
        kernels.expand(p, group, part, first_column(part), ends[part]);
      }
    });
    return;
  }

  std::vector<Task> shrink, expand;
  for (const LoraRows& group : groups) {
    for (i64 part = 0; part < p.num_parts; ++part) {
      const i64 rank = group.ranks[part];
      if (rank == 0) continue;
      for (i64 r = 0; r < rank; r += kTaskRanks) {
        shrink.push_back({&group, part, r, std::min(rank, r + kTaskRanks)});
      }
      for (i64 j = first_column(part); j < ends[part]; j += kTaskColumns) {
        expand.push_back({&group, part, j, std::min<i64>(ends[part], j + kTaskColumns)});
      }
    }
  }
  const auto run = [&](const std::vector<Task>& tasks, decltype(kernels.shrink) kernel) {
    ParallelFor(threads, static_cast<int64_t>(tasks.size()), [&](int64_t i) {
      const Task& task = tasks[i];
      kernel(p, *task.rows, task.part, task.begin, task.end);
    });
  };
  run(shrink, kernels.shrink);
  run(expand, kernels.expand);
}

}  // namespace jax_attn
