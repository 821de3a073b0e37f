// The device planner decides on a schedule, as WriteSchedule in plan/schedule.cc does.
#pragma once

#include "cuda/any/plan_steps.cuh"

namespace jax_attn {

template <class Traits, bool kGeneral>
class PlanChoice : public PlanSteps<Traits, kGeneral> {
  using Base = PlanSteps<Traits, kGeneral>;

 public:
  using Base::Base;

 protected:
  using Base::by_ranges_, Base::chosen_, Base::CutByLength, Base::Deal, Base::first_tile_,
      Base::kNumTeams, Base::kNumThreads, Base::kTeamThreads, Base::MakeSharedTrial,
      Base::makespan_, Base::MakeTrial, Base::num_chunks_, Base::num_tiles_, Base::p_, Base::rules_,
      Base::SeenEnds, Base::several_heights_, Base::shared_, Base::shared_tiling_, Base::sharing_,
      Base::SortChunks, Base::span_cost_, Base::Sum, Base::TakeChunks, Base::TakeLists,
      Base::TakeTiles, Base::TakeTrial, Base::thread_, Base::tiles_, Base::TryRanges,
      Base::UseSharedTiles;
  using typename Base::Cta;
  using typename Base::Trial;

  // Decides on a schedule, as WriteSchedule and Rebalance in plan/schedule.cc do: the first trial
  // if it will do, else ranges, or all retries of Algorithm 1 at once, a team each. prepare(), by
  // all, and record(first, step), by threads that have nothing to deal, for what is chosen: for the
  // first trial, and again for another one.
  template <class Prepare, class Record>
  __device__ PlanFault Choose(Prepare prepare, Record record) {
    i32 first = 0, num_trials = 1;  // trials to be made; none: one is chosen
#pragma unroll 1
    while (true) {
#pragma unroll 1
      for (i32 r = first; r < num_trials; ++r) {
        if (const PlanFault f = MakeTrial(r); f.code != kNoFault) return f;
      }
      if (first == 0) TakeTrial(0);
      const bool chosen = first == num_trials, records = first == 0 || chosen;
      if (records) prepare();
#pragma unroll 1
      for (i32 r = first + thread_ / kTeamThreads; r < num_trials; r += kNumTeams) DealTrial(r);
      const i32 dealers = kNumTeams > 1 ? (num_trials - first) * kTeamThreads : 0;
      if (records && thread_ >= dealers) record(thread_ - dealers, kNumThreads - dealers);
      __syncthreads();
      if (chosen) return {};
      if (first == 0) {
        const i64 makespan = shared_.makespan[0];
        if constexpr (kGeneral) makespan_ = makespan;
        const i64 total_cost = shared_.trials[0].cost;
        if (rules_.schedule != kBalanced || IsBalanced(makespan, total_cost, rules_.num_queues)) {
          return {};
        }
        if (rules_.num_units == 1 && !several_heights_) {
          TryRanges(makespan);
          if (!by_ranges_) return {};
          first = num_trials;
          continue;
        }
        if (!MayBeWorthMoreSplits(total_cost, rules_.num_queues, makespan)) return {};
        first = 1;
        num_trials = 1 + kNumRetries;
        continue;
      }
      const i32 best = ChooseTrial(num_trials);
      if (best == 0) return {};
      TakeTrial(best);
      first = num_trials;
    }
  }

  // By a team.
  __device__ void DealTrial(i32 r) {
    const Trial& t = shared_.trials[r];
    const i64 makespan = t.num_chunks < 0 ? 0 : Deal(t);
    if (thread_ % kTeamThreads == 0) shared_.makespan[r] = makespan;
  }

  // Of the trials up to the first that is balanced or has too many splits.
  __device__ i32 ChooseTrial(i32 num_trials) const {
    const i64 total_cost = shared_.trials[0].cost;
    i32 best = 0;
#pragma unroll 1
    for (i32 r = 1; r < num_trials && shared_.trials[r].num_chunks >= 0; ++r) {
      if (IsWorthMoreSplits(shared_.makespan[r], shared_.makespan[best])) best = r;
      if (IsBalanced(shared_.makespan[best], total_cost, rules_.num_queues)) break;
    }
    return best;
  }

  // --- shared prefixes, as WriteSchedule in plan/schedule.cc decides ---

  __device__ PlanFault ChooseGeneral() {
    QueryTile* flat = tiles_;
    const i32 num_flat = num_tiles_;
    const bool has_lists = rules_.max_steps > 0;
    const i32* seen_ends = has_lists && HasLevels(p_) ? SeenEnds() : nullptr;
    PrefixForest<Cta> forest(*this, p_, flat, num_flat, seen_ends);
    bool shares = rules_.schedule != kNoSplit && forest.Share(first_tile_, &shared_tiling_);
    if (has_lists) TakeLists(shares);
    PlanTrial chosen = {};
    i32 num_chunks = 0;
    i64 makespan = 0;
    if (shares) {
      const i64 flat_cost = Sum(
          num_flat, [&](i32 i) { return ItemCost(rules_, flat[i], 0, false) + SpanCost(flat[i]); });
      UseSharedTiles();
      if (const PlanFault f = ChooseShared(&shares); f.code != kNoFault) return f;
      if (shares && makespan_ <= flat_cost * rules_.num_units / rules_.num_queues) return {};
      chosen = chosen_;
      num_chunks = num_chunks_;
      makespan = makespan_;
      tiles_ = flat;
      num_tiles_ = num_flat;
      sharing_ = nullptr;
    }
    const PlanFault f = Choose([] {}, [](i32, i32) {});
    if (f.code == kNoFault && rules_.fewer_splits) TryFewerSplits();
    if (!shares || (f.code == kNoFault && makespan_ < makespan)) return f;
    UseSharedTiles();
    chosen_ = chosen;
    num_chunks_ = num_chunks;
    by_ranges_ = false;
    return {};
  }

  // As in plan/schedule.cc.
  __device__ void TryFewerSplits() {
#pragma unroll 1
    for (i32 r = 0; r < kNumFewerSplits && num_chunks_ > num_tiles_; ++r) {
      Trial t = {};
      t.leaves_empty_from = Base::kNoSlot;
      t.arrays = TakeTiles();
      const i64 longest_cost = LongestOfFewer(rules_, span_cost_, r);
      t.num_chunks = static_cast<i32>(CutByLength(t.arrays, longest_cost));
      TakeChunks(&t.arrays, t.num_chunks);
      SortChunks(&t);
      if (thread_ == 0) shared_.trials[r] = t;
      __syncthreads();
      if (thread_ < kTeamThreads) DealTrial(r);
      __syncthreads();
      if (shared_.makespan[r] >= makespan_) continue;
      TakeTrial(r);
      by_ranges_ = false;
    }
  }

  __device__ PlanFault ChooseShared(bool* found) {
    const i32 num_trials = rules_.schedule == kBalanced ? kNumSharedTrials : 1;
#pragma unroll 1
    for (i32 r = 0; r < num_trials; ++r) {
      if (const PlanFault f = MakeSharedTrial(r); f.code != kNoFault) return f;
    }
#pragma unroll 1
    for (i32 r = thread_ / kTeamThreads; r < num_trials; r += kNumTeams) DealTrial(r);
    __syncthreads();
    i32 best = -1;
#pragma unroll 1
    for (i32 r = 0; r < num_trials; ++r) {
      if (shared_.trials[r].num_chunks < 0) continue;
      if (best < 0 || shared_.makespan[r] < shared_.makespan[best]) best = r;
    }
    *found = best >= 0;
    if (*found) TakeTrial(best);
    __syncthreads();  // the trials of a flat schedule come to the same place
    return {};
  }
};

}  // namespace jax_attn
