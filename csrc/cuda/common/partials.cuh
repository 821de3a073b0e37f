// Split items: each leaves its state in the workspace, and whoever completes a merge group folds
// the group's states in kv order, in the same launch, and arrives at the group's parent, if it has
// one. The bits do not depend on who that is. Nobody waits for anybody.
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

// A batch of the states of a row, for the columns of a lane.
struct FoldPlace {
  int row;
  int round;  // of columns
  int first;  // partial
};

// Folds one group by the whole team. A warp takes a row, its lanes four columns each, in as many
// rounds as that takes, and kFoldBatch states at a time. The next batch is on its way while one is
// added up: a multiprocessor gets up to 64 bytes a clock from L2, and an answer takes 600 to 800
// clocks, of which 8 warps with 4 KB each and nothing else to do use half. Not inlined: one copy
// serves all tile heights.
// partial_rows: first rows of the partial states, `step` apart.
template <class Traits, class Team>
__device__ __noinline__ void FoldMergeGroup(const AttentionParams& p, const MergeGroup& group,
                                            const i32* partial_rows, int step) {
  constexpr int kDim = Traits::kHeadDimVo, kVectors = kDim / 4;
  constexpr int kRounds = (kVectors + kWarpSize - 1) / kWarpSize;
  const int num_rows = group.qo_len * Traits::kGroupSize;
  const int num_partials = group.num_partials;
  const bool few = num_partials + group.first_place <= kFewStates;
  const bool is_final = group.parent < 0, is_parent = group.partials_step > 1;
  const int lane = Team::thread() % kWarpSize, num_warps = Team::num_threads() / kWarpSize;
  const RowMap<Traits::kGroupSize> map(p, group.qo_begin, group.kv_head);
  auto skip_dead_rows = [&](int row) {  // the last of mla's blocks of heads may not be full
    while (Traits::kIsMla && row < num_rows && map.QoHead(row) >= map.num_qo_heads) {
      row += num_warps;
    }
    return row;
  };
  const int first_place = group.first_place;
  FoldPlace next = {skip_dead_rows(Team::thread() / kWarpSize), 0, -first_place - kFoldBatch};
  if (next.row >= num_rows) return;
  PartialState all = IdentityState();
  // Asks for the batch behind the one at `next`, and adds that up; false: it is the last.
  auto turn = [&](const PartialState(&batch)[kFoldBatch], PartialState(&ahead)[kFoldBatch]) {
    const FoldPlace at = next;
    const int vector = at.round * kWarpSize + lane;
    const bool last_batch = at.first + kFoldBatch >= num_partials;
    const bool last_round = at.round == kRounds - 1;
    next.first = last_batch ? -first_place : at.first + kFoldBatch;
    if (last_batch) next.round = last_round ? 0 : at.round + 1;
    if (last_batch && last_round) next.row = skip_dead_rows(at.row + num_warps);
    const int count = next.row < num_rows ? num_partials : 0;
    const int next_vector = next.round * kWarpSize + lane;
    auto load = [&](int i) {
      const int partial = next.first + i;
      const bool is_there = partial >= 0 && partial < count;
      const i64 row = partial_rows[is_there ? partial * step : 0] + i64{next.row};
      ahead[i].row = LoadCoherentIf(is_there, p.partial_states + row, {-Infinity(), 0.0f});
      ahead[i].o = LoadCoherent16If(is_there && next_vector < kVectors,
                                    p.partial_o + row * kDim + 4 * next_vector);
    };
#pragma unroll
    for (int i = 0; i < kFewStates; ++i) load(i);
    if (!few) {
#pragma unroll
      for (int i = kFewStates; i < kFoldBatch; ++i) load(i);
    }
    if (is_parent) {
#pragma unroll
      for (int i = 0; i < kFoldBatch; ++i) Combine(all, batch[i]);
    } else {
      Combine(all, SumOfStates(batch, few));
    }
    if (last_batch) {
      // The whole warp has read the row's states, one of which may lie where this one goes.
      __syncwarp();
      const i64 row = is_final ? map.Index(at.row) : partial_rows[0] + i64{at.row};
      const float o_scale =
          WriteState(p, is_final, row, map.QoHead(at.row), lane == 0 && last_round, all.row);
      if (vector < kVectors && is_final) {
        Scale(all.o, WithValueScale<Traits>(p, group.kv_head, o_scale));
        Store4<Traits::kDtype>(p.o, row * kDim + 4 * vector, all.o);
      } else if (vector < kVectors) {
        Store4<kElementF32>(p.partial_o, row * kDim + 4 * vector, all.o);
      }
      all = IdentityState();
    }
    return next.row < num_rows;
  };
  // By turns, because a copy of what is on its way would wait for it.
  PartialState even[kFoldBatch], odd[kFoldBatch];
#pragma unroll
  for (int i = 0; i < kFoldBatch; ++i) even[i] = odd[i] = IdentityState();
#pragma unroll 1
  while (turn(even, odd) && turn(odd, even)) {
  }
}

// Brings the record of an item's first merge group near, ahead of ArriveAndMerge.
__device__ __forceinline__ void PrefetchMergeGroup(const AttentionParams& p, int merge_idx) {
  if (merge_idx >= 0) LoadConstant(&p.merge_groups[merge_idx].num_partials);
}

// Called by the whole team after it wrote the state of an item of groups [merge_idx, merge_idx +
// num_groups), which have a parent only where they are one. scratch: shared memory.
template <class Traits, class Team = WholeCta>
__device__ __forceinline__ void ArriveAndMerge(const AttentionParams& p, int merge_idx,
                                               int num_groups, MergeScratch& scratch) {
  static_assert(Max(Traits::kTileQ0, Max(Traits::kTileQ1, Traits::kTileQ2)) / Traits::kGroupSize <=
                    MergeScratch::kMaxGroups,
                "a group has at least one token");
  static_assert(Traits::kNumWarps >= 2, "the second warp keeps what the first will need");
  const int thread = Team::thread();
#pragma unroll 1
  for (;;) {
    const MergeGroup* groups = p.merge_groups + merge_idx;
    // One thread a group arrives for all: the barrier before it makes their writes part of what it
    // releases, the barrier after it makes what it acquired theirs. The others wait for no fence,
    // and neither do their loads for the next item. An arrival takes a trip to L2 and more;
    // meanwhile the second warp brings what a fold begins with.
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
      const int step = LoadConstant(&groups->partials_step);
      const i32* partial_rows = p.partial_rows + LoadConstant(&groups->partials_begin);
      if (lane < kWords) {
        reinterpret_cast<i32*>(&scratch.group)[lane] =
            LoadConstant(reinterpret_cast<const i32*>(groups) + lane);
      }
      if (lane < Min(num_partials, MergeScratch::kMaxKept)) {
        scratch.partial_rows[lane] = LoadConstant(partial_rows + lane * step);
      }
    }
    Team::Sync();
    if (num_groups > 1) break;
    if (scratch.completed[0] == 0) return;
    const MergeGroup& group = scratch.group;
    const bool kept = group.num_partials <= MergeScratch::kMaxKept;
    FoldMergeGroup<Traits, Team>(
        p, group, kept ? scratch.partial_rows : p.partial_rows + group.partials_begin,
        kept ? 1 : group.partials_step);
    merge_idx = group.parent;
    if (merge_idx < 0) return;
  }
#pragma unroll 1
  for (int i = 0; i < num_groups; ++i) {
    if ((scratch.completed[i / kWarpSize] >> i % kWarpSize & 1) == 0) continue;
    const MergeGroup& group = p.merge_groups[merge_idx + i];
    FoldMergeGroup<Traits, Team>(p, group, p.partial_rows + group.partials_begin, 1);
  }
}

}  // namespace jax_attn
