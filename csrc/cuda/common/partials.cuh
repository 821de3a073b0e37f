// Split items: each leaves its state in the workspace, and whoever completes a merge group folds
// the group's states in kv order, in the same launch. The bits do not depend on who that is.
#pragma once

#include "cuda/common/state.cuh"
#include "cuda/common/types.cuh"
#include "cuda/common/work.cuh"

namespace jax_attn {

template <int kMaxRows>
struct MergeScratch {
  float max_log2[kMaxRows];  // of the folded state of each row
  float o_scale[kMaxRows];
  int last_to_arrive;
};

// Folds one group by the whole CTA: first the states of every row, then, knowing the weights, o.
// max_log2, o_scale: shared memory, one float a row. Not inlined: one copy serves all tile heights.
template <class Traits>
__device__ __noinline__ void FoldMergeGroup(const AttentionParams& p, const MergeGroup& group,
                                            float* max_log2, float* o_scale) {
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int num_warps = blockDim.x / kWarpSize;
  const int num_rows = group.qo_len * Traits::kGroupSize;
  const int num_partials = group.num_partials;
  const RowMap<Traits::kGroupSize> map(p, group.qo_begin, group.kv_head);
  const RowState* states = p.partial_states + group.partial_row;

  for (int row = warp; row < num_rows; row += num_warps) {
    const RowState all = FoldStates(num_partials, [&](int i) {
      return LoadCoherent(states + static_cast<i64>(i) * num_rows + row);
    });
    if (lane == 0) {
      max_log2[row] = all.max_log2;
      o_scale[row] = WriteState(p, true, map.Index(row), map.QoHead(row), true, all);
    }
  }
  __syncthreads();

  constexpr int kDim = Traits::kHeadDimVo, kVectors = kDim / 4;
  for (int e = threadIdx.x; e < num_rows * kVectors; e += blockDim.x) {
    const int row = e / kVectors, column = 4 * (e % kVectors);
    const RowState* row_states = states + row;
    const float* row_o = p.partial_o + (static_cast<i64>(group.partial_row) + row) * kDim + column;
    float4 o = make_float4(0, 0, 0, 0);
#pragma unroll 8
    for (int i = 0; i < num_partials; ++i) {
      const i64 state = static_cast<i64>(i) * num_rows;
      const float weight = StateWeight(LoadCoherent(row_states + state).max_log2, max_log2[row]);
      Accumulate(o, weight, LoadCoherent16(row_o + state * kDim));
    }
    Scale(o, o_scale[row]);
    Store4<Traits::kDtype>(p.o, map.Index(row) * kDim + column, o);
  }
}

// Called by the whole CTA after it wrote the state of an item of group `merge_idx`.
template <class Traits, int kMaxRows>
__device__ __forceinline__ void ArriveAndMerge(const AttentionParams& p, int merge_idx,
                                               MergeScratch<kMaxRows>& scratch) {
  const MergeGroup& group = p.merge_groups[merge_idx];
  // One thread arrives for all: the barrier before it makes their writes part of what it releases,
  // the barrier after it makes what it acquired theirs. The others wait for no fence, and neither
  // do their loads for the next item.
  __syncthreads();
  if (threadIdx.x == 0) {
    scratch.last_to_arrive =
        AddAcquireRelease(p.merge_counters + merge_idx, 1) == group.num_partials - 1;
  }
  __syncthreads();
  if (scratch.last_to_arrive) {
    FoldMergeGroup<Traits>(p, group, scratch.max_log2, scratch.o_scale);
  }
}

}  // namespace jax_attn
