#include "cpu/attention.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <limits>
#include <memory>

#include "cpu/kernels.h"
#include "cpu/thread_scratch.h"
#include "cpu/variant_code.h"
#include "select/devices.h"

namespace jax_attn {
namespace {

// Items a kernel call may take together: enough for every kv head count in use, small on the stack.
constexpr int64_t kMaxRun = 64;

// Items from `items` on that a kernel call takes together: the same rows and span, consecutive
// heads.
int64_t RunLength(const WorkItem* items, int64_t max_items, int64_t group_size) {
  const WorkItem& a = items[0];
  if (a.qo_len * group_size > kMaxLowRows) return 1;
  int64_t n = 1;
  for (; n < std::min(max_items, kMaxRun); ++n) {
    const WorkItem& b = items[n];
    const bool same = b.kv_head == a.kv_head + n && b.first_token == a.first_token &&
                      b.qo_len == a.qo_len && b.kv_begin == a.kv_begin && b.kv_end == a.kv_end &&
                      b.kv_base == a.kv_base && b.q_pos == a.q_pos && IsShared(b) == IsShared(a);
    if (!same) break;
  }
  return n;
}

// Counts an arrival at each of the item's merge groups, folds those that it completes, and arrives
// at their parents.
void Arrive(const CpuTypeKernels& kernels, const AttentionParams& p, const WorkItem& item) {
  for (i32 i = item.merge_idx; i < item.merge_idx + item.num_groups; ++i) {
    for (i32 g = i; g >= 0; g = p.merge_groups[g].parent) {
      const MergeGroup& group = p.merge_groups[g];
      // acq_rel: our partial is visible to whoever folds, and all partials to us if it is us.
      const i32 arrived = __atomic_fetch_add(&p.merge_counters[g], 1, __ATOMIC_ACQ_REL);
      if (arrived + 1 < group.num_partials) break;
      kernels.merge_group(p, group);
    }
  }
}

// The plan's queues, from which threads take runs of items: first those of a queue of their own,
// then what is left in the others. So a thread that comes late or is slow holds nobody up, and the
// plan needs no more queues than threads.
class Queues {
 public:
  // few: of items of up to few_rows rows.
  Queues(const CpuTypeKernels& kernels, const CpuTypeKernels& few, int64_t few_rows,
         const AttentionParams& params, const CpuGeometry& geometry)
      : kernels_(kernels),
        few_(few),
        few_rows_(few_rows),
        p_(params),
        geometry_(geometry),
        num_queues_(params.header->num_items > 0 ? params.num_ctas : 0),
        next_(new std::atomic<i32>[num_queues_]) {
    for (int64_t q = 0; q < num_queues_; ++q) next_[q] = params.queue_indptr[q];
  }

  int64_t num_queues() const { return num_queues_; }

  // Runs items until none is left to take, beginning with queue `first`.
  void Drain(int64_t first) {
    void* scratch = ThreadScratch(
        std::max(kernels_.scratch_bytes(p_, geometry_), few_.scratch_bytes(p_, geometry_)));
    for (int64_t i = 0; i < num_queues_; ++i) {
      const int64_t queue = (first + i) % num_queues_;
      i32 begin;
      while (const int64_t run = Take(queue, &begin)) {
        const i64 start = p_.item_times ? NowNs() : 0;
        const bool few = p_.items[begin].qo_len * p_.group_size <= few_rows_;
        (few ? few_ : kernels_).attend(p_, geometry_, p_.items + begin, run, scratch);
        for (int64_t j = 0; j < run; ++j) Arrive(kernels_, p_, p_.items[begin + j]);
        if (p_.item_times) RecordTimes(begin, run, start);
      }
    }
  }

 private:
  static i64 NowNs() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
  }

  // Of items that ran together each has an equal share.
  void RecordTimes(i32 begin, int64_t run, i64 start) {
    const i64 all = NowNs() - start;
    for (int64_t j = 0; j < run; ++j) {
      p_.item_times[2 * (begin + j)] = start + all * j / run;
      p_.item_times[2 * (begin + j) + 1] = start + all * (j + 1) / run;
    }
  }

  // Takes the next run of the queue; 0 if it is empty.
  int64_t Take(int64_t queue, i32* begin) {
    *begin = next_[queue].load(std::memory_order_relaxed);
    for (;;) {
      const int64_t left = p_.queue_indptr[queue + 1] - *begin;
      if (left <= 0) return 0;
      const int64_t run = RunLength(p_.items + *begin, left, p_.group_size);
      if (next_[queue].compare_exchange_weak(*begin, static_cast<i32>(*begin + run),
                                             std::memory_order_relaxed)) {
        return run;
      }
    }
  }

  const CpuTypeKernels& kernels_;
  const CpuTypeKernels& few_;
  const int64_t few_rows_;
  const AttentionParams& p_;
  const CpuGeometry& geometry_;
  const int64_t num_queues_;
  const std::unique_ptr<std::atomic<i32>[]> next_;  // first item not taken
};

// Rows beyond the live tokens: o = 0, lse = -inf.
void FillPadding(const AttentionParams& p, int64_t dtype) {
  const int64_t begin = int64_t{p.header->nnz_qo} * p.num_qo_heads;
  const int64_t end = int64_t{p.max_qo_tokens} * p.num_qo_heads;
  const int64_t row_bytes = p.head_dim_vo * ElementBytes(dtype);
  std::memset(static_cast<char*>(p.o) + begin * row_bytes, 0, (end - begin) * row_bytes);
  std::fill(p.lse + begin, p.lse + end, -std::numeric_limits<float>::infinity());
}

}  // namespace

CpuGeometry MakeGeometry(const KernelConfig& config) {
  CpuGeometry geometry{};
  geometry.tile_kv = config.tile_kv;
  for (int64_t i = 0; i < config.num_tiles; ++i) {
    geometry.max_rows = std::max<i64>(geometry.max_rows, config.tile_q[i]);
  }
  return geometry;
}

void AttentionCpu(const AttentionProblem& problem, const AttentionParams& params, TaskPool& pool) {
  const int64_t dtype = problem.spec.dtype;
  const CpuItemKernels of = KernelsOf(problem.spec);
  const auto kernels_of = [&](const CpuKernels& isa) -> const CpuTypeKernels& {
    if (problem.spec.eight_bit_products) return *isa.codes[dtype];
    return *isa.of[CpuReadFormat(problem.spec)][dtype];
  };
  const CpuTypeKernels &kernels = kernels_of(*of.many), &few = kernels_of(*of.few);
  CpuGeometry geometry = MakeGeometry(problem.config);
  VariantCode code;
  if (problem.program.present) {
    MakeVariantCode(problem.program, problem.spec.logits_soft_cap > 0, nullptr, &code);
    geometry.program = &problem.program;
    geometry.code = &code;
  }
  std::fill_n(params.merge_counters, params.header->num_merge_groups, 0);
  Queues queues(kernels, few, of.few_rows, params, geometry);
  // The queues, then the padding rows.
  ParallelFor(pool, queues.num_queues() + 1, [&](int64_t i) {
    if (i == queues.num_queues()) return FillPadding(params, dtype);
    queues.Drain(i);
  });
}

}  // namespace jax_attn
