// Split items: each leaves its state in the workspace, and whoever completes a merge group folds
// the group's states in kv order, in the same launch, and arrives at the group's parent, if it has
// one. The bits do not depend on who that is.
//
// States of mla are large, and CTAs share the fold of a group in slices: whoever completed it takes
// one after the other until none is left, and who has nothing else left to do helps with its share.
// For that a CTA waits at the group of its last item, but not for long, so nobody depends on
// anybody's running.
#pragma once

#include "cuda/common/head_scales.cuh"
#include "cuda/common/state.cuh"
#include "cuda/common/types.cuh"
#include "cuda/common/work.cuh"

namespace jax_attn {

// What a CTA keeps of the merge groups of an item that it just finished, in shared memory: an
// arrival empties L1.
struct MergeScratch {
  static constexpr int kMaxGroups = 192;   // of an item: a tile has up to 192 rows
  static constexpr int kMaxKept = 64;      // partials
  MergeGroup group;                        // the item's, if it has one
  alignas(16) i32 partial_rows[kMaxKept];  // of it
  u32 completed[kMaxGroups / kWarpSize];   // a bit each: we came last
  int slices[2];                           // of mla: taken, by turns
  i32* counters;                           // LaunchCounters, since the beginning
};

// What a fold of attention reads of the kernel's parameters. Passed by value: a function that is
// not inlined would read a reference to them from memory, one after the other, each a trip to L2
// because the arrival before it emptied L1; inlined code has them as constants.
struct FoldParams {
  RowState* partial_states;
  float* partial_o;
  const i32* partial_rows;
  void* o;
  float* lse;
  const float* sinks;
  const float* v_scale;
  i32 num_qo_heads;

  __device__ __forceinline__ FoldParams(const AttentionParams& p)
      : partial_states(p.partial_states),
        partial_o(p.partial_o),
        partial_rows(p.partial_rows),
        o(p.o),
        lse(p.lse),
        sinks(p.sinks),
        v_scale(p.v_scale),
        num_qo_heads(p.num_qo_heads) {}
  // These, and nothing else.
  __device__ __forceinline__ operator AttentionParams() const {
    AttentionParams p;
    p.partial_states = partial_states;
    p.partial_o = partial_o;
    p.partial_rows = partial_rows;
    p.o = o;
    p.lse = lse;
    p.sinks = sinks;
    p.v_scale = v_scale;
    p.num_qo_heads = num_qo_heads;
    return p;
  }
};

// The threads that execute an item together, and how they pass parameters to a fold. The portable
// kernels have no registers left for that: by reference.
struct WholeCta {
  using Params = const AttentionParams&;
  __device__ static int thread() { return threadIdx.x; }
  __device__ static int num_threads() { return blockDim.x; }
  __device__ static void Sync() { __syncthreads(); }
};

__device__ __forceinline__ MergeGroup LoadGroup(const MergeGroup* group) {
  const uint4 a = LoadConstant16(group), b = LoadConstant16(&group->partials_begin);
  return {static_cast<i32>(a.x), static_cast<i32>(a.y), static_cast<i32>(a.z),
          static_cast<i32>(a.w), static_cast<i32>(b.x), static_cast<i32>(b.y),
          static_cast<i32>(b.z), static_cast<i32>(b.w)};
}

// The strips of a merge group: of a row the columns that a warp adds up at once, four a lane; those
// of row 0 from left to right, then row 1's.
template <class Traits>
struct FoldStrips {
  static constexpr int kVectors = Traits::kHeadDimVo / 4;
  static constexpr int kOfRow = CeilDiv(kVectors, kWarpSize);
  int num_heads;  // of the kv head; the last of mla's blocks of heads may not be full

  __device__ __forceinline__ FoldStrips(const AttentionParams& p, int kv_head)
      : num_heads(Traits::kIsMla
                      ? Min(Traits::kGroupSize, p.num_qo_heads - kv_head * Traits::kGroupSize)
                      : Traits::kGroupSize) {}
  __device__ int Count(int qo_len) const { return qo_len * num_heads * kOfRow; }
  __device__ int Row(int strip) const {
    const int i = strip / kOfRow;
    return i / num_heads * Traits::kGroupSize + i % num_heads;
  }
  __device__ static int Vector(int strip, int lane) { return strip % kOfRow * kWarpSize + lane; }
};

// A state of a strip, but where there is none. vector: the lane's columns.
template <class Traits>
__device__ __forceinline__ PartialState LoadState(const AttentionParams& p, bool is_there, i64 row,
                                                  int vector) {
  PartialState state;
  state.row = LoadCoherentIf(is_there, p.partial_states + row, {-Infinity(), 0.0f});
  state.o = LoadCoherent16If(is_there && vector < FoldStrips<Traits>::kVectors,
                             p.partial_o + row * Traits::kHeadDimVo + 4 * vector);
  return state;
}

// Stores what all states of a strip come to, in o and lse or at row `partial_row` of the workspace.
template <class Traits>
__device__ __forceinline__ void WriteStrip(const AttentionParams& p, bool is_final, int qo_begin,
                                           int kv_head, i64 partial_row, int strip,
                                           int row_in_group, int lane, PartialState& all) {
  using Strips = FoldStrips<Traits>;
  constexpr int kDim = Traits::kHeadDimVo;
  const RowMap<Traits::kGroupSize> map(p, qo_begin, kv_head);
  const i64 row = is_final ? map.Index(row_in_group) : partial_row;
  const bool last_strip = (strip + 1) % Strips::kOfRow == 0;
  const float o_scale = WriteState<Traits>(p, is_final, row, map.QoHead(row_in_group),
                                           lane == 0 && last_strip, all.row);
  const int vector = Strips::Vector(strip, lane);
  if (vector < Strips::kVectors && is_final) {
    Scale(all.o, WithValueScale<Traits>(p, kv_head, o_scale));
    Store4<Traits::kDtype>(p.o, row * kDim + 4 * vector, all.o);
  } else if (vector < Strips::kVectors) {
    Store4<kElementF32>(p.partial_o, row * kDim + 4 * vector, all.o);
  }
}

// How strips of MLA are found and what they come to is stored, see FoldSlice: row by row.
template <class Traits>
struct RowStrips : FoldStrips<Traits> {
  using FoldStrips<Traits>::FoldStrips;
  __device__ int Row(int strip, int) const { return FoldStrips<Traits>::Row(strip); }
  __device__ int At(int strip, int lane) const {
    return Row(strip, lane) * Traits::kHeadDimVo + 4 * this->Vector(strip, lane);
  }
  __device__ bool Has(int strip, int lane) const {
    return this->Vector(strip, lane) < FoldStrips<Traits>::kVectors;
  }
  __device__ __forceinline__ void Store(const AttentionParams& p, const MergeGroup& group,
                                        int strip, int lane, PartialState& all) const {
    WriteStrip<Traits>(p, true, group.qo_begin, group.kv_head, 0, strip, Row(strip, lane), lane,
                       all);
  }
};

// Folds an item's only group, whose states are one batch and make the result, by the whole team:
// what decodes of few requests wait for. Until the states are asked for, every instruction counts.
template <class Traits, class Team>
__device__ __forceinline__ void FoldOneBatchHere(const AttentionParams& p,
                                                 const MergeScratch& scratch) {
  using Strips = FoldStrips<Traits>;
  const MergeGroup& group = scratch.group;
  const int lane = Team::thread() % kWarpSize, num_warps = Team::num_threads() / kWarpSize;
  const int num_partials = Uniform(group.num_partials);
  const Strips strips(p, group.kv_head);
  const int num_strips = Uniform(strips.Count(group.qo_len));
  int first_rows[kFoldBatch];  // anything beyond num_partials
#pragma unroll
  for (int i = 0; i < kFoldBatch; i += 4) {
    const uint4 four = *reinterpret_cast<const uint4*>(scratch.partial_rows + i);
    first_rows[i] = static_cast<int>(four.x);
    first_rows[i + 1] = static_cast<int>(four.y);
    first_rows[i + 2] = static_cast<int>(four.z);
    first_rows[i + 3] = static_cast<int>(four.w);
  }
#pragma unroll 1
  for (int strip = Uniform(Team::thread() / kWarpSize); strip < num_strips; strip += num_warps) {
    const int row = strips.Row(strip), vector = Strips::Vector(strip, lane);
    // Anew: one multiplication makes the address of a state, which the compiler would share out.
    const char* const columns = Anew(reinterpret_cast<const char*>(p.partial_o + 4 * vector));
    // The batch's other places, wherever they are, have the identity.
    PartialState batch[kFoldBatch];
#pragma unroll
    for (int i = 0; i < kFoldBatch; ++i) {
      const bool is_there = i < num_partials;
      const i64 at = first_rows[i] + row;
      batch[i].row = LoadCoherentIf(is_there, p.partial_states + at, {-Infinity(), 0.0f});
      batch[i].o =
          LoadCoherent16If(is_there && vector < Strips::kVectors,
                           reinterpret_cast<const float*>(columns + at * (4 * Traits::kHeadDimVo)));
    }
    __syncwarp();  // or ptxas would ask for half of them behind the first answers
    PartialState all = SumOfStates(batch, num_partials <= kFewStates);
    WriteStrip<Traits>(p, true, group.qo_begin, group.kv_head, 0, strip, row, lane, all);
  }
}
// Not inlined: one copy serves all tile heights, where there are several.
template <class Traits, class Team>
__device__ __noinline__ void FoldOneBatch(typename Team::Params params,
                                          const MergeScratch& scratch) {
  FoldOneBatchHere<Traits, Team>(params, scratch);
}

// A batch of the states of a strip.
struct FoldPlace {
  int group;  // the lane that knows it; kWarpSize: none is left
  int strip;
  int row;
  int first;  // place of the first state
};

// Folds merge groups by the whole team: of 32 groups those that `completed` has a bit of. They have
// a kv head in common, and a parent only where they are one. Their strips are dealt to the warps in
// turn, because a group of a decode has fewer rows than there are warps, and an item may complete
// 32 such groups. A warp takes kFoldBatch states at a time, and the next batch is on its way while
// one is added up: a multiprocessor gets up to 64 bytes a clock from L2, and an answer takes 600 to
// 800 clocks, of which 8 warps with 4 KB each and nothing else to do use half. Not inlined: one
// copy serves all tile heights.
// only: has the group that is an item's only one; else null.
template <class Traits, class Team>
__device__ __noinline__ void FoldMergeGroups(typename Team::Params params, const MergeGroup* groups,
                                             u32 completed, const MergeScratch* only) {
  const AttentionParams& p = params;
  using Strips = FoldStrips<Traits>;
  // Strips that a warp takes before others have their turn: a result that goes where one of the
  // row's states lies has to wait for the whole row.
  constexpr int kRun = Strips::kOfRow;
  const int lane = Team::thread() % kWarpSize, num_warps = Team::num_threads() / kWarpSize;
  const bool kept = only != nullptr && only->group.num_partials <= MergeScratch::kMaxKept;
  MergeGroup mine = {};  // that of the lane
  if (only != nullptr) {
    mine = only->group;
  } else if ((completed >> lane & 1) != 0) {
    mine = LoadGroup(groups + lane);
  }
  auto of = [](int x, int group) { return __shfl_sync(kFullWarp, x, group); };
  const int first_group = __ffs(completed) - 1;
  const int kv_head = of(mine.kv_head, first_group);
  const int first_place = of(mine.first_place, first_group);
  const int group_step = of(mine.partials_step, first_group);
  const bool is_parent = group_step > 1;
  const bool is_final = of(mine.parent, first_group) < 0;
  const int step = kept ? 1 : group_step;
  auto rows_of = [&](int group) {
    return kept ? only->partial_rows : p.partial_rows + of(mine.partials_begin, group);
  };
  const Strips strips(p, kv_head);
  // To what lies place.strip strips behind the begin of place.group.
  auto settle = [&](FoldPlace& place) {
#pragma unroll 1
    while (place.group < kWarpSize) {
      const int count = strips.Count(of(mine.qo_len, place.group));
      if (place.strip < count) break;
      place.strip -= count;
      const u32 left = completed >> place.group >> 1;
      place.group = left == 0 ? kWarpSize : place.group + __ffs(left);
    }
    place.row = strips.Row(place.strip);
  };
  const int warp = Team::thread() / kWarpSize;
  FoldPlace next = {first_group, warp * kRun, 0, -kFoldBatch};  // of nothing
  settle(next);
  if (next.group == kWarpSize) return;
  const i32* partial_rows = rows_of(next.group);
  PartialState all = IdentityState();
  // Asks for the batch behind the one at `next`, and adds that up; false: it is the last.
  auto turn = [&](const PartialState(&batch)[kFoldBatch], PartialState(&ahead)[kFoldBatch]) {
    const FoldPlace at = next;
    const int num_places = of(mine.num_partials, at.group) + first_place;
    const bool last_batch = at.first + kFoldBatch >= num_places;
    next.first = last_batch ? 0 : at.first + kFoldBatch;
    if (last_batch) {
      ++next.strip;
      if (next.strip % kRun == 0) next.strip += (num_warps - 1) * kRun;
      settle(next);
    }
    const bool more = next.group < kWarpSize;
    const int next_places = more ? of(mine.num_partials, next.group) + first_place : 0;
    if (more && next.group != at.group) partial_rows = rows_of(next.group);
    const int next_vector = Strips::Vector(next.strip, lane);
    auto load = [&](int i) {
      const int place = next.first + i;
      const bool is_there = place >= first_place && place < next_places;
      const i64 row = partial_rows[is_there ? (place - first_place) * step : 0] + i64{next.row};
      ahead[i] = LoadState<Traits>(p, is_there, row, next_vector);
    };
#pragma unroll
    for (int i = 0; i < kFewStates; ++i) load(i);
    if (next_places > kFewStates) {
#pragma unroll
      for (int i = kFewStates; i < kFoldBatch; ++i) load(i);
    }
    if (is_parent) {
#pragma unroll
      for (int i = 0; i < kFoldBatch; ++i) Combine(all, batch[i]);
    } else {
      Combine(all, SumOfStates(batch, num_places <= kFewStates));
    }
    if (last_batch) {
      // The whole warp has read the row's states, one of which may lie where this one goes.
      __syncwarp();
      // What is not final is the only group.
      WriteStrip<Traits>(p, is_final, of(mine.qo_begin, at.group), kv_head,
                         partial_rows[0] + i64{at.row}, at.strip, at.row, lane, all);
      all = IdentityState();
    }
    return more;
  };
  // By turns, because a copy of what is on its way would wait for it.
  PartialState even[kFoldBatch], odd[kFoldBatch];
#pragma unroll
  for (int i = 0; i < kFoldBatch; ++i) even[i] = odd[i] = IdentityState();
#pragma unroll 1
  while (turn(even, odd) && turn(odd, even)) {
  }
}

// Folds strips [begin, end) of a merge group of MLA by the whole team, a strip a warp, a batch of
// states at a time; the next batch is on its way while one is added up.
// Strips: as RowStrips. partial_rows: those of the group.
template <class Traits, class Team, class Strips>
__device__ __forceinline__ void FoldSlice(const AttentionParams& p, const MergeGroup& group,
                                          const i32* partial_rows, int begin, int end) {
  const int lane = Team::thread() % kWarpSize, num_warps = Team::num_threads() / kWarpSize;
  const int first_place = Uniform(group.first_place);
  const int num_places = first_place + Uniform(group.num_partials);
  const Strips strips(p, group.kv_head);
  end = Uniform(Min(end, strips.Count(group.qo_len)));
  int strip = Uniform(begin + Team::thread() / kWarpSize), first = -kFoldBatch;  // of nothing
  if (strip >= end) return;
  const RowState* const row_states = p.partial_states;
  const float* const columns = p.partial_o;
  int row, at;  // the lane's of the strip, in a state that begins at row 0
  bool has_columns;
  auto find = [&] {
    row = strips.Row(strip, lane);
    at = strips.At(strip, lane);
    has_columns = strips.Has(strip, lane);
  };
  find();
  PartialState all = IdentityState();
  // Asks for the batch behind the one at `first`, and adds that up; false: it is the last.
  auto turn = [&](const PartialState(&batch)[kFoldBatch], PartialState(&ahead)[kFoldBatch]) {
    const int folded = strip;
    const bool last_batch = first + kFoldBatch >= num_places;
    first = last_batch ? 0 : first + kFoldBatch;
    if (last_batch) {
      strip += num_warps;
      find();
    }
    const bool more = strip < end;
    const int places_ahead = more ? num_places : 0;
#pragma unroll
    for (int i = 0; i < kFoldBatch; ++i) {
      const int place = first + i;
      const bool is_there = place >= first_place && place < places_ahead;
      const i64 first_row = partial_rows[is_there ? place - first_place : 0];
      ahead[i].row = LoadCoherentIf(is_there, row_states + (first_row + row), {-Infinity(), 0.0f});
      ahead[i].o = LoadCoherent16If(is_there && has_columns,
                                    columns + (first_row * Traits::kHeadDimVo + at));
    }
    Combine(all, SumOfStates(batch, false));
    if (last_batch) {
      strips.Store(p, group, folded, lane, all);
      all = IdentityState();
    }
    return more;
  };
  // By turns, because a copy of what is on its way would wait for it.
  PartialState even[kFoldBatch], odd[kFoldBatch];
#pragma unroll
  for (int i = 0; i < kFoldBatch; ++i) even[i] = odd[i] = IdentityState();
#pragma unroll 1
  while (turn(even, odd) && turn(odd, even)) {
  }
}

// The slices of a merge group of MLA, taken from its counter, which goes on from arrivals to
// slices: whoever makes the last arrival has slice 0.
struct SliceCounter {
  i32* counter;
  int num_partials, num_slices;

  // The next one; num_slices: none is left.
  __device__ int Take() const {
    const int slice = AddAcquireRelease(counter, 1) - num_partials + 1;
    return slice >= 1 && slice < num_slices ? slice : num_slices;
  }
  // Whether the group is complete, or will be within some 50 us, and slices may be left.
  __device__ bool IsCompleteSoon() const {
#pragma unroll 1
    for (int naps = 0; naps < 256; ++naps) {
      const int count = LoadCoherent(counter);
      if (count >= num_partials) return count < num_partials + num_slices - 1;
      Nap();
    }
    return false;
  }
};

// Folds what others leave of a merge group of MLA, by the whole team, which completed it or else
// waits for that. is_only: scratch has the group, which is an item's only one.
template <class Traits, class Team, class Strips>
__device__ __noinline__ void FoldSlices(const AttentionParams& p, int merge_idx, bool completed,
                                        bool is_only, MergeScratch& scratch) {
  // Slices of fewer bytes take as long to take as to fold, and eight warps have a strip each. They
  // go by the group alone, so that all say the same.
  constexpr int kBytes = 64 << 10, kStrips = 8;
  constexpr int kMost = kBytes / (4 * Traits::kHeadDimVo / FoldStrips<Traits>::kOfRow);
  int (&slices)[2] = scratch.slices;
  const MergeGroup group = is_only ? scratch.group : LoadGroup(p.merge_groups + merge_idx);
  const bool kept = is_only && group.num_partials <= MergeScratch::kMaxKept;
  const i32* partial_rows = kept ? scratch.partial_rows : p.partial_rows + group.partials_begin;
  const int length = Max(1, kMost / group.num_partials / kStrips) * kStrips;
  const int num_strips = Strips(p, group.kv_head).Count(group.qo_len);
  const SliceCounter counter = {scratch.counters + merge_idx, group.num_partials,
                                CeilDiv(num_strips, length)};
  const bool is_first_thread = Team::thread() == 0;
  if (!completed && counter.num_slices == 1) return;
  int slice = completed ? 0 : -1;
  // Whoever completed the group takes all that nobody else does.
  int share = completed ? counter.num_slices : CeilDiv(counter.num_slices, group.num_partials);
#pragma unroll 1
  for (int turn = 0;; ++turn) {
    if (slice >= 0) {
      FoldSlice<Traits, Team, Strips>(p, group, partial_rows, slice * length, (slice + 1) * length);
      if (--share == 0) break;
    }
    if (is_first_thread) {
      const bool is_complete = slice >= 0 || counter.IsCompleteSoon();
      slices[turn % 2] = is_complete ? counter.Take() : counter.num_slices;
    }
    Team::Sync();
    slice = slices[turn % 2];
    if (slice >= counter.num_slices) break;
  }
}

// Keeps what a fold of a merge group begins with, by one warp.
__device__ __forceinline__ void KeepGroup(const AttentionParams& p, int merge_idx, int lane,
                                          MergeScratch& scratch) {
  const MergeGroup group = LoadGroup(p.merge_groups + merge_idx);
  if (lane == 0) scratch.group = group;
#pragma unroll
  for (int i = lane; i < MergeScratch::kMaxKept; i += kWarpSize) {
    if (i < group.num_partials) {
      scratch.partial_rows[i] =
          LoadConstant(p.partial_rows + group.partials_begin + i * group.partials_step);
    }
  }
}

// Called by the whole team after it wrote the state of item `index`, of groups [merge_idx,
// merge_idx + num_groups), which have a parent only where they are one. scratch: shared memory.
template <class Traits, class Team = WholeCta>
__device__ __forceinline__ void ArriveAndMerge(const AttentionParams& p, int index, int merge_idx,
                                               int num_groups, MergeScratch& scratch) {
  static_assert(Max(Traits::kTileQ0, Max(Traits::kTileQ1, Traits::kTileQ2)) / Traits::kGroupSize <=
                    MergeScratch::kMaxGroups,
                "a group has at least one token");
  static_assert(Traits::kNumWarps >= 2, "the second warp keeps what a fold begins with");
  const int thread = Team::thread(), lane = thread % kWarpSize;
#pragma unroll 1
  for (;;) {
    const MergeGroup* groups = p.merge_groups + merge_idx;
    i32* const counters = scratch.counters + merge_idx;
    // One thread a group arrives for all: the barrier before it makes their writes part of what it
    // releases, the barrier after it makes what it acquired theirs. The others wait for no fence,
    // and neither do their loads for the next item. An arrival takes a trip to L2 and more;
    // meanwhile the second warp brings what a fold begins with.
    Team::Sync();
    if (thread / kWarpSize != 1 || num_groups > 1) {
#pragma unroll 1
      for (int first = thread - lane; first < num_groups; first += Team::num_threads()) {
        const int i = first + lane;
        bool last = false;
        if (i < num_groups) {
          const int num_partials = LoadConstant(&groups[i].num_partials);
          last = AddAcquireRelease(counters + i, 1) == num_partials - 1;
        }
        const u32 completed = __ballot_sync(kFullWarp, last);
        if (lane == 0) scratch.completed[first / kWarpSize] = completed;
      }
    } else {
      KeepGroup(p, merge_idx, lane, scratch);
    }
    Team::Sync();
    if (num_groups > 1) break;
    const bool completed = scratch.completed[0] != 0;
    if constexpr (Traits::kIsMla) {
      if (completed || index + 1 == QueueEnd(p)) {
        FoldSlices<Traits, Team, RowStrips<Traits>>(p, merge_idx, completed, true, scratch);
      }
      return;
    } else {
      if (!completed) return;
      const MergeGroup& group = scratch.group;
      if (group.first_place + group.num_partials <= kFoldBatch && group.parent < 0 &&
          !IsParent(group)) {
        if constexpr (Traits::kNumTiles == 1) {
          FoldOneBatchHere<Traits, Team>(p, scratch);
        } else {
          FoldOneBatch<Traits, Team>(p, scratch);
        }
        return;
      }
      FoldMergeGroups<Traits, Team>(p, groups, 1, &scratch);
      merge_idx = group.parent;
      if (merge_idx < 0) return;
    }
  }
#pragma unroll 1
  for (int first = 0; first < num_groups; first += kWarpSize) {
    u32 completed = scratch.completed[first / kWarpSize];
    if constexpr (Traits::kIsMla) {
#pragma unroll 1
      for (; completed != 0; completed &= completed - 1) {
        FoldSlices<Traits, Team, RowStrips<Traits>>(p, merge_idx + first + __ffs(completed) - 1,
                                                    true, false, scratch);
        Team::Sync();  // the next one takes slices anew
      }
    } else if (completed != 0) {
      FoldMergeGroups<Traits, Team>(p, p.merge_groups + merge_idx + first, completed, nullptr);
    }
  }
}

}  // namespace jax_attn
