// Step lists of the device planner: as ListSteps in plan/steps.cc makes them.
#pragma once

#include "cuda/any/plan_tiles.cuh"

namespace jax_attn {

template <class Traits, bool kGeneral>
class PlanSteps : public PlanTiles<Traits, kGeneral> {
  using Base = PlanTiles<Traits, kGeneral>;

 public:
  using Base::Base;

 protected:
  using Base::FirstFault, Base::kNumThreads, Base::kNumWarps, Base::longest_span_cost_,
      Base::MostOf, Base::num_tiles_, Base::p_, Base::Prefix, Base::rules_, Base::span_cost_,
      Base::Sum, Base::thread_, Base::tiles_;

  // Writes the lists, and replaces the spans of tiles by ranges of these.
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
    // Words of all tiles in one line, so that one long tile keeps as many warps busy as many short
    // ones.
    i32* first_word = this->template Take<i32>(num_tiles_ + 1);
    const i32 num_words = static_cast<i32>(Prefix(num_tiles_, first_word, [&](i32 i) {
      const StepSpan span = StepsOf(rules_, tiles_[i]);
      return CeilDivide(span.end - span.begin, kWarpSize);
    }));
    StepWord* words = this->template Take<StepWord>(num_words);
#pragma unroll 1
    for (i32 w = thread_ / kWarpSize; w < num_words; w += kNumWarps) {
      const i32 i = LastAtMost(first_word, num_tiles_, w);
      const StepSpan span = StepsOf(rules_, tiles_[i]);
      const i32 first = span.begin + (w - first_word[i]) * kWarpSize;
      const i32 step = first + thread_ % kWarpSize;
      const u32 classes = step < span.end ? ClassesOf(map, tiles_[i], step) : 0;
      const u32 listed = __ballot_sync(kFullWarp, (classes & kSomeVisible) != 0);
      const u32 masked = __ballot_sync(kFullWarp, (classes & kSomeHidden) != 0);
      if (thread_ % kWarpSize == 0) words[w] = {listed, masked, first};
    }
    __syncthreads();
    i32* first_entry = this->template Take<i32>(num_words + 1);
    const i64 total = Prefix(num_words, first_entry,
                             [&](i32 w) { return static_cast<i64>(__popc(words[w].listed)); });
    if (const PlanFault f = CheckSteps(rules_, total); f.code != kNoFault) return f;
    if (thread_ == 0) p_.header->num_steps = static_cast<i32>(total);
#pragma unroll 1
    for (i32 w = thread_ / kWarpSize; w < num_words; w += kNumWarps) {
      const StepWord word = words[w];
      const i32 lane = thread_ % kWarpSize;
      if (!(word.listed >> lane & 1)) continue;
      const i32 before = __popc(word.listed & ((1u << lane) - 1));
      p_.steps[first_entry[w] + before] = StepEntry(word.first + lane, word.masked >> lane & 1);
    }
    i64 longest = 0;
    span_cost_ = Sum(num_tiles_, [&](i32 i) {
      QueryTile& t = tiles_[i];
      TakeList(rules_, first_entry[first_word[i]], first_entry[first_word[i + 1]], &t);
      longest = Largest(longest, SpanCost(t));
      return SpanCost(t);
    });
    longest_span_cost_ = MostOf(longest);
    return {};
  }

 private:
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
