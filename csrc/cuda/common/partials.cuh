// Split items: each leaves its state in the workspace, and whoever completes a merge group folds
// the group's states in kv order, in the same launch. The bits do not depend on who that is.
#pragma once

#include "cuda/common/e4m3.cuh"
#include "cuda/common/state.cuh"
#include "cuda/common/types.cuh"
#include "cuda/common/work.cuh"

namespace jax_attn {

// What a CTA keeps of the merge groups of an item that it just finished, in shared memory.
struct MergeScratch {
  static constexpr int kMaxGroups = 128;  // of an item: a tile has up to 128 rows
  static constexpr int kMaxKept = 32;     // partials
  MergeGroup group;                       // the item's first
  i32 partial_rows[kMaxKept];             // of it
  u32 completed[kMaxGroups / kWarpSize];  // a bit each: we came last
};

// The threads that execute an item together.
struct WholeCta {
  __device__ static int thread() { return threadIdx.x; }
  __device__ static int num_threads() { return blockDim.x; }
  __device__ static void Sync() { __syncthreads(); }
};

// Folds one group by the whole team. A thread takes four columns of a row, and with them the states
// of the row, kBatch at a time: all of a batch is under way before the first of it is used. Not
// inlined: one copy serves all tile heights.
// partial_rows: [group.num_partials].
template <class Traits, class Team>
__device__ __noinline__ void FoldMergeGroup(const AttentionParams& p, const MergeGroup& group,
                                            const i32* partial_rows) {
  constexpr int kDim = Traits::kHeadDimVo, kVectors = kDim / 4, kBatch = 8;
  const int num_rows = group.qo_len * Traits::kGroupSize;
  const int num_partials = group.num_partials;
  const RowMap<Traits::kGroupSize> map(p, group.qo_begin, group.kv_head);
#pragma unroll 1
  for (int e = Team::thread(); e < num_rows * kVectors; e += Team::num_threads()) {
    const int row = e / kVectors, column = 4 * (e % kVectors);
    // The last of mla's blocks of heads may not be full.
    if (Traits::kIsMla && map.QoHead(row) >= map.num_qo_heads) continue;
    RowState all = {-Infinity(), 0.0f};
    float4 o = make_float4(0, 0, 0, 0);
#pragma unroll 1
    for (int first = 0; first < num_partials; first += kBatch) {
      RowState states[kBatch];
      float4 x[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        // Beyond the last partial: the last one again, with weight 0.
        const i64 at = static_cast<i64>(partial_rows[Min(first + i, num_partials - 1)]) + row;
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
    const float o_scale = WriteState(p, true, at, map.QoHead(row), column == 0, all);
    Scale(o, WithValueScale<Traits>(p, group.kv_head, o_scale));
    Store4<Traits::kDtype>(p.o, at * kDim + column, o);
  }
}

// Brings the record of an item's first merge group near, ahead of ArriveAndMerge.
__device__ __forceinline__ void PrefetchMergeGroup(const AttentionParams& p, int merge_idx) {
  if (merge_idx >= 0) LoadConstant(&p.merge_groups[merge_idx].num_partials);
}

// Called by the whole team after it wrote the state of an item of groups [merge_idx, merge_idx +
// num_groups). scratch: shared memory.
template <class Traits, class Team = WholeCta>
__device__ __forceinline__ void ArriveAndMerge(const AttentionParams& p, int merge_idx,
                                               int num_groups, MergeScratch& scratch) {
  static_assert(Max(Traits::kTileQ0, Max(Traits::kTileQ1, Traits::kTileQ2)) / Traits::kGroupSize <=
                    MergeScratch::kMaxGroups,
                "a group has at least one token");
  static_assert(Traits::kNumWarps >= 2, "the second warp keeps what the first will need");
  const int thread = Team::thread();
  const MergeGroup* groups = p.merge_groups + merge_idx;
  // One thread a group arrives for all: the barrier before it makes their writes part of what it
  // releases, the barrier after it makes what it acquired theirs. The others wait for no fence, and
  // neither do their loads for the next item. An arrival takes a trip to L2 and more; meanwhile the
  // second warp brings what a fold begins with.
  Team::Sync();
  if (thread / kWarpSize != 1 || num_groups > 1) {
    const int warp_begin = thread / kWarpSize * kWarpSize;
#pragma unroll 1
    for (int first = warp_begin; first < num_groups; first += Team::num_threads()) {
      const int i = first + thread - warp_begin;
      bool last = false;
      if (i < num_groups) {
        const int num_partials = LoadConstant(&groups[i].num_partials);
        last = AddAcquireRelease(p.merge_counters + merge_idx + i, 1) == num_partials - 1;
      }
      const u32 completed = __ballot_sync(kFullWarp, last);
      if (thread == warp_begin) scratch.completed[first / kWarpSize] = completed;
    }
  } else {
    constexpr int kWords = sizeof(MergeGroup) / sizeof(i32);
    const int lane = thread % kWarpSize;
    const int num_partials = LoadConstant(&groups->num_partials);
    const i32* partial_rows = p.partial_rows + LoadConstant(&groups->partials_begin);
    if (lane < kWords) {
      reinterpret_cast<i32*>(&scratch.group)[lane] =
          LoadConstant(reinterpret_cast<const i32*>(groups) + lane);
    }
    if (lane < Min(num_partials, MergeScratch::kMaxKept)) {
      scratch.partial_rows[lane] = LoadConstant(partial_rows + lane);
    }
  }
  Team::Sync();
  if (num_groups == 1) {
    if (scratch.completed[0] == 0) return;
    const bool kept = scratch.group.num_partials <= MergeScratch::kMaxKept;
    FoldMergeGroup<Traits, Team>(
        p, scratch.group,
        kept ? scratch.partial_rows : p.partial_rows + scratch.group.partials_begin);
    return;
  }
#pragma unroll 1
  for (int i = 0; i < num_groups; ++i) {
    if ((scratch.completed[i / kWarpSize] >> i % kWarpSize & 1) == 0) continue;
    FoldMergeGroup<Traits, Team>(p, groups[i], p.partial_rows + groups[i].partials_begin);
  }
}

}  // namespace jax_attn
