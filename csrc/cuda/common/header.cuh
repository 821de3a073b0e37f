// Checks that a plan belongs to the launch. Kernels read the plan header only here.
#pragma once

#include "cuda/common/math.cuh"

namespace jax_attn {

// The counts that kernels use. All are 0 unless the buffer is a plan for these parameters: not if
// it is damaged, of another version, of larger capacities, for a larger pool, or a device planner
// could not make it.
struct HeaderCounts {
  bool is_plan;
  int batch_size, nnz_qo, num_items;

  // Every thread that needs the counts reads them. The words are one trip to memory.
  __device__ __forceinline__ HeaderCounts(const PlanHeader* header, const PlanLimits& most) {
    const uint4 begin = LoadConstant16(&header->magic);
    const uint4 counts = LoadConstant16(&header->num_items);
    const uint4 more = LoadConstant16(&header->max_page_id);
    const i32 num_steps = LoadConstant(&header->num_steps);
    // Unsigned: a negative count is too large.
    const auto fits = [](u32 count, i32 most) { return count <= static_cast<u32>(most); };
    is_plan = begin.x == kPlanMagic && begin.y == kPlanVersion && fits(begin.z, most.max_batch) &&
              fits(begin.w, most.max_qo_tokens) && fits(counts.x, most.max_items) &&
              fits(counts.y, most.max_merge_groups) && fits(counts.z, most.max_partial_rows) &&
              fits(counts.w, most.max_kv) && more.x + 1 <= static_cast<u64>(most.num_pages) &&
              fits(more.y, most.max_partials) && fits(more.z, most.max_shared_tokens) &&
              fits(num_steps, most.max_steps);
    batch_size = is_plan ? static_cast<int>(begin.z) : 0;
    nnz_qo = is_plan ? static_cast<int>(begin.w) : 0;
    num_items = is_plan ? static_cast<int>(counts.x) : 0;
  }
};

}  // namespace jax_attn
