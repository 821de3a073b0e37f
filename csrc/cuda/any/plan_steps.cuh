// Step lists of the device planner: as MakeLists in plan/plan.cc makes them.
#pragma once

#include "cuda/any/plan_ranges.cuh"

namespace jax_attn {

template <class Traits, bool kGeneral>
class PlanSteps : public PlanRanges<Traits, kGeneral> {
  using Base = PlanRanges<Traits, kGeneral>;

 public:
  using Base::Base;

 protected:
  using Base::FirstFault, Base::kNumThreads, Base::kNumWarps, Base::longest_span_cost_,
      Base::MostOf, Base::num_tiles_, Base::p_, Base::Prefix, Base::rules_, Base::shared_,
      Base::shared_tiling_, Base::span_cost_, Base::Sum, Base::thread_, Base::tiles_;

  // Finds the steps of the tiles, without regard to shared prefixes. They keep their spans.
  __device__ __noinline__ PlanFault ListSteps() {
    const BlockMap& map = p_.block_map;
    PlanFault fault = FirstFault(num_tiles_, [&](i32 i) {
      PlanFault f = CheckMapColumns(map, tiles_[i]);
      f.at = i;  // tiles of a request may have different ones
      return f;
    });
    if (fault.code != kNoFault) {
      fault.at = tiles_[fault.at].request;
      return fault;
    }
    return CheckSteps(rules_, FindSteps(tiles_, num_tiles_, nullptr, 0));
  }

  // Behind ListSteps. [num_tiles] Where those steps end, from position 0 on, that the map shows in
  // full to the tile.
  __device__ __noinline__ const i32* SeenEnds() {
    i32* ends = this->template Take<i32>(num_tiles_);
    const StepLists& lists = shared_.lists[0];
#pragma unroll 1
    for (i32 i = thread_; i < num_tiles_; i += kNumThreads) {
      const StepSpan span = StepsOf(rules_, tiles_[i]);
      i32 end = span.begin == 0 ? tiles_[i].kv_end : 0;
#pragma unroll 1
      for (i32 w = lists.first_word[i]; w < lists.first_word[i + 1]; ++w) {
        const StepWord word = lists.words[w];
        const u32 others = ~(word.listed & ~word.masked);
        const i32 first_other = __ffs(others) - 1;  // -1: none; perhaps behind the tile's steps
        if (first_other < 0) continue;
        end = Min(end, (word.first + first_other) * rules_.tile_kv);
        break;
      }
      ends[i] = end;
    }
    __syncthreads();
    return ends;
  }

  // Replaces the spans of tiles by ranges of the lists. shares: of those of the shared tiling, too.
  __device__ __noinline__ void TakeLists(bool shares) {
    if (shares) {
      SharedTiling& shared = shared_tiling_;
      FindSteps(shared.tiles, shared.num_tiles, shared.sharing, 1);
      TakeListsOf(shared.tiles, shared.num_tiles, 1);
      shared.span_cost = Sum(num_tiles_, [&](i32 i) { return SpanCost(shared.tiles[i]); });
      shared.shared_span_cost = Sum(shared.num_tiles - num_tiles_,
                                    [&](i32 i) { return SpanCost(shared.tiles[num_tiles_ + i]); });
    }
    TakeListsOf(tiles_, num_tiles_, 0);
    i64 longest = 0;
    span_cost_ = Sum(num_tiles_, [&](i32 i) {
      longest = Largest(longest, SpanCost(tiles_[i]));
      return SpanCost(tiles_[i]);
    });
    longest_span_cost_ = MostOf(longest);
  }

  // Entries of the lists of the tiles that were chosen, which are those with shared prefixes if
  // `shares`; returns how many there are.
  __device__ __noinline__ i32 WriteSteps(bool shares) {
    const StepLists& lists = shared_.lists[shares];
#pragma unroll 1
    for (i32 w = thread_ / kWarpSize; w < lists.num_words; w += kNumWarps) {
      const StepWord word = lists.words[w];
      const i32 lane = thread_ % kWarpSize;
      if (!(word.listed >> lane & 1)) continue;
      const i32 before = __popc(word.listed & ((1u << lane) - 1));
      p_.steps[lists.first_entry[w] + before] =
          StepEntry(word.first + lane, word.masked >> lane & 1);
    }
    return lists.num_steps;
  }

 private:
  // The lists number `which` of shared_, of tiles with spans; returns the number of their entries.
  // sharing: as in SharedTiling, or null.
  __device__ __noinline__ i64 FindSteps(const QueryTile* tiles, i32 num_tiles,
                                        const TileSharing* sharing, i32 which) {
    // Words of all tiles in one line, so that one long tile keeps as many warps busy as many short
    // ones.
    i32* first_word = this->template Take<i32>(num_tiles + 1);
    const i32 num_words = static_cast<i32>(Prefix(num_tiles, first_word, [&](i32 i) {
      const StepSpan span = StepsOf(rules_, tiles[i]);
      return CeilDivide(span.end - span.begin, kWarpSize);
    }));
    StepWord* words = this->template Take<StepWord>(num_words);
#pragma unroll 1
    for (i32 w = thread_ / kWarpSize; w < num_words; w += kNumWarps) {
      const i32 i = LastAtMost(first_word, num_tiles, w);
      const StepSpan span = StepsOf(rules_, tiles[i]);
      const i32 first = span.begin + (w - first_word[i]) * kWarpSize;
      const i32 step = first + thread_ % kWarpSize;
      const bool is_shared = sharing != nullptr && sharing[i].shared();
      const u32 classes = step >= span.end ? 0
                          : is_shared      ? u32{kSomeVisible}
                                           : ClassesOf(p_.block_map, tiles[i], step);
      const u32 listed = __ballot_sync(kFullWarp, (classes & kSomeVisible) != 0);
      const u32 masked = __ballot_sync(kFullWarp, (classes & kSomeHidden) != 0);
      if (thread_ % kWarpSize == 0) words[w] = {listed, masked, first};
    }
    __syncthreads();
    i32* first_entry = this->template Take<i32>(num_words + 1);
    const i64 total = Prefix(num_words, first_entry,
                             [&](i32 w) { return static_cast<i64>(__popc(words[w].listed)); });
    if (thread_ == 0) {
      shared_.lists[which] = {num_words, static_cast<i32>(total), first_word, words, first_entry};
    }
    __syncthreads();
    return total;
  }

  __device__ void TakeListsOf(QueryTile* tiles, i32 num_tiles, i32 which) {
    const StepLists& lists = shared_.lists[which];
#pragma unroll 1
    for (i32 i = thread_; i < num_tiles; i += kNumThreads) {
      TakeList(rules_, lists.first_entry[lists.first_word[i]],
               lists.first_entry[lists.first_word[i + 1]], &tiles[i]);
    }
    __syncthreads();
  }

  // OR over the blocks of the tile's rows and a step's columns.
  __device__ u32 ClassesOf(const BlockMap& map, const QueryTile& t, i32 step) const {
    const MapColumns columns = ColumnsOf(rules_, map, t, step);
    const i32 last_row = (t.qo_begin + t.qo_len - 1) / map.q_block;
    u32 found = 0;
#pragma unroll 1
    for (i32 row = t.qo_begin / map.q_block; row <= last_row; ++row) {
      const unsigned char* classes = map.classes + row * map.num_columns;
      for (i32 i = columns.begin; i < columns.end; ++i) found |= classes[i];
    }
    return found;
  }
};

}  // namespace jax_attn
