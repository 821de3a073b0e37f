// Split items. Each leaves its partial state in the workspace. The last CTA to finish a merge group
// reduces the group's states in kv order, in the same launch, and arrives at the group's parent, if
// it has one. The bits do not depend on which CTA that is.
//
// MLA states are large, so CTAs share the reduction of a group in slices. The CTA that completed
// the group takes one slice after the other until none is left. Idle CTAs help: a CTA waits at the
// group of its last item for a bounded time, so progress never depends on co-residency.
#pragma once

#include "cuda/common/head_scales.cuh"
#include "cuda/common/state.cuh"
#include "cuda/common/types.cuh"
#include "cuda/common/work.cuh"

namespace jax_attn {

// Shared memory of a CTA for the merge groups of the item that it just finished: an
// arrival empties L1.
struct MergeScratch {
  static constexpr int kMaxGroups = 192;   // of an item, as a tile has up to 192 rows
  static constexpr int kMaxKept = 64;      // partials
  MergeGroup group;                        // the item's only group
  alignas(16) i32 partial_rows[kMaxKept];  // of that group
  u32 completed[kMaxGroups / kWarpSize];   // one bit a group: this CTA came last
  int slices[2];                           // MLA: slices taken, in alternating entries
  i32* counters;                           // LaunchCounters, from the beginning on
};

// The kernel parameters that a reduction reads. They are passed by value: a function that is not
// inlined would read them from memory through a reference, one after the other, each with a trip to
// L2, because the arrival before it emptied L1. In inlined code they are constants.
struct ReduceParams {
  RowState* partial_states;
  float* partial_o;
  const i32* partial_rows;
  void* o;
  float* lse;
  const float* sinks;
  const float* v_scale;
  i32 num_qo_heads;

  __device__ __forceinline__ ReduceParams(const AttentionParams& p)
      : partial_states(p.partial_states),
        partial_o(p.partial_o),
        partial_rows(p.partial_rows),
        o(p.o),
        lse(p.lse),
        sinks(p.sinks),
        v_scale(p.v_scale),
        num_qo_heads(p.num_qo_heads) {}
  // Only these fields are set.
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

// The threads that execute an item together, and how they pass parameters to a reduction. The
// portable kernels have few registers left: they pass a reference instead of ReduceParams, and a
// warp takes one strip at a time.
struct WholeCta {
  using Params = const AttentionParams&;
  static constexpr bool kTakesStripsTogether = false;
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

// The strips of a merge group. A strip is the columns of a row that a warp reduces at once, four a
// lane. Strips of row 0 come first, from left to right, then those of row 1.
template <class Traits>
struct ReduceStrips {
  static constexpr int kVectors = Traits::kHeadDimVo / 4;
  static constexpr int kOfRow = CeilDiv(kVectors, kWarpSize);
  int num_heads;  // heads of the kv head; the last block of MLA heads may not be full

  __device__ __forceinline__ ReduceStrips(const AttentionParams& p, int kv_head)
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

// Loads the state of a strip, or the identity if there is none. vector: the lane's columns.
template <class Traits>
__device__ __forceinline__ PartialState LoadState(const AttentionParams& p, bool is_there, i64 row,
                                                  int vector) {
  PartialState state;
  state.row = LoadCoherentIf(is_there, p.partial_states + row, {-Infinity(), 0.0f});
  state.o = LoadCoherent16If(is_there && vector < ReduceStrips<Traits>::kVectors,
                             p.partial_o + row * Traits::kHeadDimVo + 4 * vector);
  return state;
}

// Stores the reduced state of a strip: to o and lse, or at row `partial_row` of the workspace.
template <class Traits>
__device__ __forceinline__ void WriteStrip(const AttentionParams& p, bool is_final, int qo_begin,
                                           int kv_head, i64 partial_row, int strip,
                                           int row_in_group, int lane, PartialState& all) {
  using Strips = ReduceStrips<Traits>;
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

// The strips of ReduceSlice, row by row: where their states are, and where the result goes.
template <class Traits>
struct RowStrips : ReduceStrips<Traits> {
  using ReduceStrips<Traits>::ReduceStrips;
  __device__ int Row(int strip, int) const { return ReduceStrips<Traits>::Row(strip); }
  __device__ int At(int strip, int lane) const {
    return Row(strip, lane) * Traits::kHeadDimVo + 4 * this->Vector(strip, lane);
  }
  __device__ bool Has(int strip, int lane) const {
    return this->Vector(strip, lane) < ReduceStrips<Traits>::kVectors;
  }
  __device__ __forceinline__ void Store(const AttentionParams& p, const MergeGroup& group,
                                        int strip, int lane, PartialState& all) const {
    WriteStrip<Traits>(p, true, group.qo_begin, group.kv_head, 0, strip, Row(strip, lane), lane,
                       all);
  }
};

// Reduces an item's only group, if its states are one batch and make the final result, with the
// whole team. Decodes of few requests wait for this, so every instruction before the loads counts.
template <class Traits, class Team>
__device__ __forceinline__ void ReduceOneBatchInline(const AttentionParams& p,
                                                     const MergeScratch& scratch) {
  using Strips = ReduceStrips<Traits>;
  const MergeGroup& group = scratch.group;
  const int lane = Team::thread() % kWarpSize, num_warps = Team::num_threads() / kWarpSize;
  const int num_partials = Uniform(group.num_partials);
  const Strips strips(p, group.kv_head);
  const int num_strips = Uniform(strips.Count(group.qo_len));
  int first_rows[kReduceBatch];  // anything behind num_partials
#pragma unroll
  for (int i = 0; i < kReduceBatch; i += 4) {
    const uint4 four = *reinterpret_cast<const uint4*>(scratch.partial_rows + i);
    first_rows[i] = static_cast<int>(four.x);
    first_rows[i + 1] = static_cast<int>(four.y);
    first_rows[i + 2] = static_cast<int>(four.z);
    first_rows[i + 3] = static_cast<int>(four.w);
  }
#pragma unroll 1
  for (int strip = Uniform(Team::thread() / kWarpSize); strip < num_strips; strip += num_warps) {
    const int row = strips.Row(strip), vector = Strips::Vector(strip, lane);
    // Opaque: the address of a state is one multiplication, which the compiler would split up.
    const char* const columns = Opaque(reinterpret_cast<const char*>(p.partial_o + 4 * vector));
    // Missing states of the batch are the identity, wherever they are.
    PartialState batch[kReduceBatch];
#pragma unroll
    for (int i = 0; i < kReduceBatch; ++i) {
      const bool is_there = i < num_partials;
      const i64 at = first_rows[i] + row;
      batch[i].row = LoadCoherentIf(is_there, p.partial_states + at, {-Infinity(), 0.0f});
      batch[i].o =
          LoadCoherent16If(is_there && vector < Strips::kVectors,
                           reinterpret_cast<const float*>(columns + at * (4 * Traits::kHeadDimVo)));
    }
    __syncwarp();  // else ptxas would issue half of the loads behind the first answers
    PartialState all = SumOfStates(batch, num_partials <= kFewStates);
    WriteStrip<Traits>(p, true, group.qo_begin, group.kv_head, 0, strip, row, lane, all);
  }
}
// The same for at most kStates states of many strips: a warp takes kTogether of them at a time, so
// that as many loads are on their way as with kReduceBatch states. An answer takes longer than its
// arithmetic: with one strip at a time two states of 128 rows of 256 columns took 20 us.
template <class Traits, class Team, int kStates, int kTogether>
__device__ __forceinline__ void ReduceFewStates(const AttentionParams& p,
                                                const MergeScratch& scratch) {
  using Strips = ReduceStrips<Traits>;
  const MergeGroup& group = scratch.group;
  const int lane = Team::thread() % kWarpSize, num_warps = Team::num_threads() / kWarpSize;
  const int num_partials = Uniform(group.num_partials);
  const Strips strips(p, group.kv_head);
  const int num_strips = Uniform(strips.Count(group.qo_len));
  int first_rows[kStates];  // anything behind num_partials
#pragma unroll
  for (int i = 0; i < kStates; ++i) first_rows[i] = scratch.partial_rows[i];
#pragma unroll 1
  for (int first = Uniform(Team::thread() / kWarpSize); first < num_strips;
       first += kTogether * num_warps) {
    PartialState states[kTogether][kStates];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const int strip = first + j * num_warps;
      const int row = strips.Row(strip), vector = Strips::Vector(strip, lane);
#pragma unroll
      for (int i = 0; i < kStates; ++i) {
        states[j][i] = LoadState<Traits>(p, i < num_partials && strip < num_strips,
                                         i64{first_rows[i]} + row, vector);
      }
    }
    __syncwarp();  // else ptxas would issue half of the loads behind the first answers
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const int strip = first + j * num_warps;
      PartialState all = SumOfStates(states[j]);
      if (strip >= num_strips) break;
      WriteStrip<Traits>(p, true, group.qo_begin, group.kv_head, 0, strip, strips.Row(strip), lane,
                         all);
    }
  }
}

// Not inlined: one copy of the code serves all tile sizes.
template <class Traits, class Team>
__device__ __noinline__ void ReduceOneBatch(typename Team::Params params,
                                            const MergeScratch& scratch) {
  if constexpr (Team::kTakesStripsTogether) {
    const int num_partials = scratch.group.num_partials;
    if (num_partials <= 2) return ReduceFewStates<Traits, Team, 2, 4>(params, scratch);
    if (num_partials <= kFewStates) {
      return ReduceFewStates<Traits, Team, kFewStates, 2>(params, scratch);
    }
  }
  ReduceOneBatchInline<Traits, Team>(params, scratch);
}

// A batch of the states of a strip.
struct ReduceCursor {
  int group;  // the lane that holds the group; kWarpSize: none is left
  int strip;
  int row;
  int first;  // offset of the first state
};

// Reduces merge groups with the whole team: those of 32 groups whose bit `completed` has. They have
// the same kv head; only a single group may have a parent. Their strips are dealt to the warps one
// by one, as a group of a decode has fewer rows than there are warps, and an item may complete 32
// such groups. A warp takes kReduceBatch states at a time, and loads the next batch while it adds
// one up. A multiprocessor gets up to 64 bytes a clock from L2, and an answer takes 600 to 800
// clocks; 8 warps with 4 KB in flight each use half of that. Not inlined: one copy of the code
// serves all tile sizes. only: has the group if it is an item's only one; else null.
template <class Traits, class Team>
__device__ __noinline__ void ReduceMergeGroups(typename Team::Params params,
                                               const MergeGroup* groups, u32 completed,
                                               const MergeScratch* only) {
  const AttentionParams& p = params;
  using Strips = ReduceStrips<Traits>;
  // Strips that a warp takes in a row: a result may overwrite one of the row's states, so it has to
  // wait for the whole row.
  constexpr int kRun = Strips::kOfRow;
  const int lane = Team::thread() % kWarpSize, num_warps = Team::num_threads() / kWarpSize;
  const bool kept = only != nullptr && only->group.num_partials <= MergeScratch::kMaxKept;
  MergeGroup mine = {};  // the lane's group
  if (only != nullptr) {
    mine = only->group;
  } else if ((completed >> lane & 1) != 0) {
    mine = LoadGroup(groups + lane);
  }
  auto of = [](int x, int group) { return __shfl_sync(kFullWarp, x, group); };
  const int first_group = __ffs(completed) - 1;
  const int kv_head = of(mine.kv_head, first_group);
  const int first_offset = of(mine.first_offset, first_group);
  const int group_step = of(mine.partials_step, first_group);
  const bool is_parent = group_step > 1;
  const bool is_final = of(mine.parent, first_group) < 0;
  const int step = kept ? 1 : group_step;
  auto rows_of = [&](int group) {
    return kept ? only->partial_rows : p.partial_rows + of(mine.partials_begin, group);
  };
  const Strips strips(p, kv_head);
  // Moves a cursor that is cursor.strip strips behind the beginning of cursor.group to the group it
  // falls into.
  auto settle = [&](ReduceCursor& cursor) {
#pragma unroll 1
    while (cursor.group < kWarpSize) {
      const int count = strips.Count(of(mine.qo_len, cursor.group));
      if (cursor.strip < count) break;
      cursor.strip -= count;
      const u32 left = completed >> cursor.group >> 1;
      cursor.group = left == 0 ? kWarpSize : cursor.group + __ffs(left);
    }
    cursor.row = strips.Row(cursor.strip);
  };
  const int warp = Team::thread() / kWarpSize;
  ReduceCursor next = {first_group, warp * kRun, 0, -kReduceBatch};  // before the first batch
  settle(next);
  if (next.group == kWarpSize) return;
  const i32* partial_rows = rows_of(next.group);
  PartialState all = IdentityState();
  // Loads the batch behind the one at `next`, and adds up the loaded one. false: it was the last.
  auto advance = [&](const PartialState(&batch)[kReduceBatch], PartialState(&ahead)[kReduceBatch]) {
    const ReduceCursor at = next;
    const int end_offset = of(mine.num_partials, at.group) + first_offset;
    const bool last_batch = at.first + kReduceBatch >= end_offset;
    next.first = last_batch ? 0 : at.first + kReduceBatch;
    if (last_batch) {
      ++next.strip;
      if (next.strip % kRun == 0) next.strip += (num_warps - 1) * kRun;
      settle(next);
    }
    const bool more = next.group < kWarpSize;
    const int next_end = more ? of(mine.num_partials, next.group) + first_offset : 0;
    if (more && next.group != at.group) partial_rows = rows_of(next.group);
    const int next_vector = Strips::Vector(next.strip, lane);
    auto load = [&](int i) {
      const int offset = next.first + i;
      const bool is_there = offset >= first_offset && offset < next_end;
      const i64 row = partial_rows[is_there ? (offset - first_offset) * step : 0] + i64{next.row};
      ahead[i] = LoadState<Traits>(p, is_there, row, next_vector);
    };
#pragma unroll
    for (int i = 0; i < kFewStates; ++i) load(i);
    if (next_end > kFewStates) {
#pragma unroll
      for (int i = kFewStates; i < kReduceBatch; ++i) load(i);
    }
    if (is_parent) {
#pragma unroll
      for (int i = 0; i < kReduceBatch; ++i) Combine(all, batch[i]);
    } else {
      Combine(all, SumOfStates(batch, end_offset <= kFewStates));
    }
    if (last_batch) {
      // The whole warp has read the row's states, one of which the result may overwrite.
      __syncwarp();
      // Only a single group is not final.
      WriteStrip<Traits>(p, is_final, of(mine.qo_begin, at.group), kv_head,
                         partial_rows[0] + i64{at.row}, at.strip, at.row, lane, all);
      all = IdentityState();
    }
    return more;
  };
  // Two buffers in alternation: copying states in flight would wait for them.
  PartialState even[kReduceBatch], odd[kReduceBatch];
#pragma unroll
  for (int i = 0; i < kReduceBatch; ++i) even[i] = odd[i] = IdentityState();
#pragma unroll 1
  while (advance(even, odd) && advance(odd, even)) {
  }
}

// Reduces strips [begin, end) of an MLA merge group with the whole team: a strip a warp, a batch of
// states at a time; the next batch is loaded while one is added up. Strips: as RowStrips.
// partial_rows: those of the group.
template <class Traits, class Team, class Strips>
__device__ __forceinline__ void ReduceSlice(const AttentionParams& p, const MergeGroup& group,
                                            const i32* partial_rows, int begin, int end) {
  const int lane = Team::thread() % kWarpSize, num_warps = Team::num_threads() / kWarpSize;
  const int first_offset = Uniform(group.first_offset);
  const int end_offset = first_offset + Uniform(group.num_partials);
  const Strips strips(p, group.kv_head);
  end = Uniform(Min(end, strips.Count(group.qo_len)));
  int strip = Uniform(begin + Team::thread() / kWarpSize),
      first = -kReduceBatch;  // before the first batch
  if (strip >= end) return;
  const RowState* const row_states = p.partial_states;
  const float* const columns = p.partial_o;
  int row, at;  // the strip's row and offset for this lane, in a state that begins at row 0
  bool has_columns;
  auto find = [&] {
    row = strips.Row(strip, lane);
    at = strips.At(strip, lane);
    has_columns = strips.Has(strip, lane);
  };
  find();
  PartialState all = IdentityState();
  // Loads the batch behind the one at `first`, and adds up the loaded one. false: it was the last.
  auto advance = [&](const PartialState(&batch)[kReduceBatch], PartialState(&ahead)[kReduceBatch]) {
    const int folded = strip;
    const bool last_batch = first + kReduceBatch >= end_offset;
    first = last_batch ? 0 : first + kReduceBatch;
    if (last_batch) {
      strip += num_warps;
      find();
    }
    const bool more = strip < end;
    const int end_ahead = more ? end_offset : 0;
#pragma unroll
    for (int i = 0; i < kReduceBatch; ++i) {
      const int offset = first + i;
      const bool is_there = offset >= first_offset && offset < end_ahead;
      const i64 first_row = partial_rows[is_there ? offset - first_offset : 0];
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
  // Two buffers in alternation: copying states in flight would wait for them.
  PartialState even[kReduceBatch], odd[kReduceBatch];
#pragma unroll
  for (int i = 0; i < kReduceBatch; ++i) even[i] = odd[i] = IdentityState();
#pragma unroll 1
  while (advance(even, odd) && advance(odd, even)) {
  }
}

// The slices of an MLA merge group, taken from its counter, which counts first arrivals and then
// slices. The last one to arrive has slice 0.
struct SliceCounter {
  i32* counter;
  int num_partials, num_slices;

  // Takes the next slice; num_slices: none is left.
  __device__ int Take() const {
    const int slice = AddAcquireRelease(counter, 1) - num_partials + 1;
    return slice >= 1 && slice < num_slices ? slice : num_slices;
  }
  // Whether the group is complete, or becomes so within some 50 us, and slices may be left.
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

// Reduces slices of an MLA merge group with the whole team, which completed the group or else waits
// for it. is_only: scratch has the group, which is an item's only one.
template <class Traits, class Team, class Strips>
__device__ __noinline__ void ReduceSlices(const AttentionParams& p, int merge_idx, bool completed,
                                          bool is_only, MergeScratch& scratch) {
  // Smaller slices would take longer to take than to reduce, and eight warps have a strip each. The
  // size depends on the group alone, so that all CTAs agree.
  constexpr int kBytes = 64 << 10, kStrips = 8;
  constexpr int kMost = kBytes / (4 * Traits::kHeadDimVo / ReduceStrips<Traits>::kOfRow);
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
  // The CTA that completed the group takes all slices that no other takes.
  int share = completed ? counter.num_slices : CeilDiv(counter.num_slices, group.num_partials);
#pragma unroll 1
  for (int round = 0;; ++round) {
    if (slice >= 0) {
      ReduceSlice<Traits, Team, Strips>(p, group, partial_rows, slice * length,
                                        (slice + 1) * length);
      if (--share == 0) break;
    }
    if (is_first_thread) {
      const bool is_complete = slice >= 0 || counter.IsCompleteSoon();
      slices[round % 2] = is_complete ? counter.Take() : counter.num_slices;
    }
    Team::Sync();
    slice = slices[round % 2];
    if (slice >= counter.num_slices) break;
  }
}

// Keeps what the reduction of a merge group needs first, by one warp.
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

// Call it with the whole team after it wrote the state of item `index`, which belongs to groups
// [merge_idx, merge_idx + num_groups). Only a single group may have a parent. scratch: shared
// memory.
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
    // One thread a group arrives for all threads: the barrier before it includes their writes in
    // what it releases, and the barrier after it shows them what it acquired. The other threads
    // issue no fence, so their loads for the next item do not wait. An arrival takes a trip to L2
    // or more. Meanwhile the second warp loads what a reduction needs first.
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
        ReduceSlices<Traits, Team, RowStrips<Traits>>(p, merge_idx, completed, true, scratch);
      }
      return;
    } else {
      if (!completed) return;
      const MergeGroup& group = scratch.group;
      if (group.first_offset + group.num_partials <= kReduceBatch && group.parent < 0 &&
          !IsParent(group)) {
        if constexpr (Traits::kNumTiles == 1) {
          ReduceOneBatchInline<Traits, Team>(p, scratch);
        } else {
          ReduceOneBatch<Traits, Team>(p, scratch);
        }
        return;
      }
      ReduceMergeGroups<Traits, Team>(p, groups, 1, &scratch);
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
        ReduceSlices<Traits, Team, RowStrips<Traits>>(p, merge_idx + first + __ffs(completed) - 1,
                                                      true, false, scratch);
        Team::Sync();  // before the next group's slices are taken
      }
    } else if (completed != 0) {
      ReduceMergeGroups<Traits, Team>(p, p.merge_groups + merge_idx + first, completed, nullptr);
    }
  }
}

}  // namespace jax_attn
