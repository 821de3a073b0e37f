// Split items: each leaves its state in the workspace, and whoever completes a merge group folds
// the group's states in kv order, in the same launch. The bits do not depend on who that is.
#pragma once

#include "cuda/common/state.cuh"
#include "cuda/common/types.cuh"
#include "cuda/common/work.cuh"

namespace jax_attn {

// Folds one group by the whole CTA. A thread takes four columns of a row, and with them the states
// of the row, kBatch at a time: all of a batch is under way before the first of it is used. Not
// inlined: one copy serves all tile heights.
template <class Traits>
__device__ __noinline__ void FoldMergeGroup(const AttentionParams& p, const MergeGroup& group) {
  constexpr int kDim = Traits::kHeadDimVo, kVectors = kDim / 4, kBatch = 8;
  const int num_rows = group.qo_len * Traits::kGroupSize;
  const int num_partials = group.num_partials;
  const RowMap<Traits::kGroupSize> map(p, group.qo_begin, group.kv_head);
#pragma unroll 1
  for (int e = threadIdx.x; e < num_rows * kVectors; e += blockDim.x) {
    const int row = e / kVectors, column = 4 * (e % kVectors);
    const i64 first_row = static_cast<i64>(group.partial_row) + row;
    RowState all = {-Infinity(), 0.0f};
    float4 o = make_float4(0, 0, 0, 0);
#pragma unroll 1
    for (int first = 0; first < num_partials; first += kBatch) {
      RowState states[kBatch];
      float4 x[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        // Beyond the last partial: the last one again, with weight 0.
        const i64 at = first_row + static_cast<i64>(Min(first + i, num_partials - 1)) * num_rows;
        states[i] = LoadCoherent(p.partial_states + at);
        x[i] = LoadCoherent16(p.partial_o + at * kDim + column);
      }
      float max_log2 = all.max_log2;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) max_log2 = fmaxf(max_log2, states[i].max_log2);
      const float factor = StateWeight(all.max_log2, max_log2);
      all = {max_log2, all.sum * factor};
      Scale(o, factor);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (first + i >= num_partials) continue;
        const float weight = StateWeight(states[i].max_log2, max_log2);
        all.sum = fmaf(weight, states[i].sum, all.sum);
        Accumulate(o, weight, x[i]);
      }
    }
    const i64 at = map.Index(row);
    Scale(o, WriteState(p, true, at, map.QoHead(row), column == 0, all));
    Store4<Traits::kDtype>(p.o, at * kDim + column, o);
  }
}

// Called by the whole CTA after it wrote the state of an item of group `merge_idx`.
// last_to_arrive: shared memory.
template <class Traits>
__device__ __forceinline__ void ArriveAndMerge(const AttentionParams& p, int merge_idx,
                                               int* last_to_arrive) {
  const MergeGroup& group = p.merge_groups[merge_idx];
  // One thread arrives for all: the barrier before it makes their writes part of what it releases,
  // the barrier after it makes what it acquired theirs. The others wait for no fence, and neither
  // do their loads for the next item.
  __syncthreads();
  if (threadIdx.x == 0) {
    *last_to_arrive = AddAcquireRelease(p.merge_counters + merge_idx, 1) == group.num_partials - 1;
  }
  __syncthreads();
  if (*last_to_arrive) FoldMergeGroup<Traits>(p, group);
}

}  // namespace jax_attn
