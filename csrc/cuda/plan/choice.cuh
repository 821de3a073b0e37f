// The device planner chooses a schedule, as WriteSchedule in plan/schedule.cc does. Input: tiles.
// Output: a schedule, and the tiles that it cuts.
#pragma once

#include "cuda/plan/context.cuh"
#include "cuda/plan/deal.cuh"
#include "cuda/plan/prefix.cuh"
#include "cuda/plan/ranges.cuh"
#include "cuda/plan/steps.cuh"
#include "cuda/plan/trials.cuh"
#include "plan/rules/choice.h"
#include "plan/rules/sharing.h"

namespace jax_attn {

// Called by a team.
template <class Context>
__device__ __forceinline__ void DealTrial(Context& c, i32 r) {
  const PlanTrial& t = c.shared.trials[r];
  const i64 makespan = t.num_chunks < 0 ? 0 : Deal(c, t);
  if (c.thread() % Context::kTeamThreads == 0) c.shared.makespan[r] = makespan;
}

// Replaces a schedule by the best of the retries [first, end), up to the first that leaves it
// balanced. Returns whether it did.
template <class Context>
__device__ __forceinline__ bool TakeRetry(const Context& c, i32 first, i32 end, i64 total_cost,
                                          PlanSchedule* schedule) {
  const auto& shared = c.shared;
  i32 best = 0;
  i64 makespan = schedule->makespan;
#pragma unroll 1
  for (i32 r = first; r < end; ++r) {
    if (shared.trials[r].num_chunks < 0) continue;
    if (IsWorthMoreSplits(shared.trials[r].margin, shared.makespan[r], makespan)) {
      best = r;
      makespan = shared.makespan[r];
    }
    if (IsBalanced(makespan, total_cost, c.rules.num_queues)) break;
  }
  if (best > 0) *schedule = ScheduleOf(c, best);
  return best > 0;
}

// As TryFewerSplits in plan/schedule.cc. first: the first trial that was made.
template <class Context>
__device__ __forceinline__ bool TakeFewerSplits(const Context& c, i32 first,
                                                PlanSchedule* schedule) {
  bool takes = false;
#pragma unroll 1
  for (i32 r = first; r < kNumFlatTrials; ++r) {
    if (c.shared.makespan[r] >= schedule->makespan) continue;
    *schedule = ScheduleOf(c, r);
    takes = true;
  }
  return takes;
}

// Chooses for tiles that share nothing, as WriteSchedule and Rebalance in plan/schedule.cc do: the
// first trial if it is good enough; otherwise ranges, or the retries of Algorithm 1, a round at
// once, a team each; then fewer splits. All threads call prepare(); threads that do not deal call
// record(first, step) for what is in `schedule`: for the first trial, and again for another one.
template <class Context, class Prepare, class Record>
__device__ __forceinline__ PlanFault ChooseFlat(Context& c, const typename Context::Tiles& tiles,
                                                PlanSchedule* schedule, Prepare prepare,
                                                Record record) {
  constexpr i32 kTeamThreads = Context::kTeamThreads, kNumTeams = Context::kNumTeams;
  const PlanRules& rules = c.rules;
  const int thread = c.thread();
  const i64 total_cost = WholeCost(rules, tiles.num_tiles, tiles.span_cost);
  const bool several = tiles.several_tile_sizes;
  i32 first = 0, end = 1;  // trials to make; none are left if one is chosen
  bool replaced = false;   // the first schedule is not the one that is chosen
#pragma unroll 1
  while (true) {
#pragma unroll 1
    for (i32 r = first; r < end; ++r) {
      const i64 than = first == 0 || first >= kFirstOfFewer ? 0 : schedule->makespan;
      if (const PlanFault f = MakeTrial(c, tiles, r, than); f.code != kNoFault) return f;
    }
    if (first == 0) *schedule = ScheduleOf(c, 0);
    const bool chosen = first == end, records = first == 0 || (chosen && replaced);
    if (records) prepare();
#pragma unroll 1
    for (i32 r = first + thread / kTeamThreads; r < end; r += kNumTeams) DealTrial(c, r);
    const i32 dealers = kNumTeams > 1 ? (end - first) * kTeamThreads : 0;
    if (records && thread >= dealers) record(thread - dealers, Context::kNumThreads - dealers);
    __syncthreads();
    if (first == 0) schedule->makespan = c.shared.makespan[0];
    if (chosen || rules.schedule != kBalanced) return {};
    // What was made, and what comes next.
    i32 retry = kFirstOfFewer;  // the first one of the next round
    if (first == 0) {
      const i64 margin = MarginOfSplits(HaveLargeStates(several, tiles.tiles[0]));
      if (!IsBalanced(schedule->makespan, total_cost, rules.num_queues)) {
        if (MayHaveRanges(rules, tiles.num_tiles) &&
            AreRangesWorthIt(rules, several, margin, total_cost / rules.num_queues,
                             schedule->makespan)) {
          replaced = TryRanges(c, tiles, schedule->makespan, schedule);
        }
        retry = 1;
      }
    } else if (first < kFirstOfFewer) {
      replaced |= TakeRetry(c, first, end, total_cost, schedule);
      retry = end;
    } else {
      replaced |= TakeFewerSplits(c, first, schedule);
    }
    if (retry < kFirstOfFewer && !IsBalanced(schedule->makespan, total_cost, rules.num_queues) &&
        MayBeWorthMoreSplits(kLeastMargin, total_cost, rules.num_queues, schedule->makespan)) {
      first = retry;
      end = Min(first + kRetriesOfRound, kFirstOfFewer);
      continue;
    }
    const i32 fewer = kFirstOfFewer + FirstOfFewer(rules);
    const bool may_gain =
        schedule->has_ranges() || schedule->by_weight || schedule->num_chunks > tiles.num_tiles;
    const bool may_take_fewer = first < kFirstOfFewer && may_gain &&
                                MayBeWorthFewerSplits(rules, FirstOfFewer(rules),
                                                      tiles.longest_span_cost, schedule->makespan);
    first = may_take_fewer ? fewer : kNumFlatTrials;
    end = kNumFlatTrials;
  }
}

// --- shared prefixes, as WriteSchedule in plan/schedule.cc decides ---

// found: whether any trial is a valid plan.
template <class Context>
__device__ __forceinline__ PlanFault ChooseShared(Context& c, const typename Context::Tiles& tiles,
                                                  PlanSchedule* schedule, bool* found) {
  const i32 num_trials = c.rules.schedule == kBalanced ? kNumSharedTrials : 1;
#pragma unroll 1
  for (i32 r = 0; r < num_trials; ++r) {
    if (const PlanFault f = MakeSharedTrial(c, tiles, r); f.code != kNoFault) return f;
  }
#pragma unroll 1
  for (i32 r = c.thread() / Context::kTeamThreads; r < num_trials; r += Context::kNumTeams) {
    DealTrial(c, r);
  }
  __syncthreads();
  i32 best = -1;
#pragma unroll 1
  for (i32 r = 0; r < num_trials; ++r) {
    if (c.shared.trials[r].num_chunks < 0) continue;
    if (best < 0 || c.shared.makespan[r] < c.shared.makespan[best]) best = r;
  }
  *found = best >= 0;
  if (*found) *schedule = ScheduleOf(c, best);
  __syncthreads();  // the trials of a flat schedule use the same memory
  return {};
}

// The tiles of a tiling, or `flat`.
template <class Tiles>
__device__ __forceinline__ Tiles SharedTilesOf(const SharedTiling& tiling, const Tiles& flat) {
  Tiles tiles = flat;
  tiles.num_tiles = tiling.num_tiles;
  tiles.tiles = tiling.tiles;
  tiles.span_cost = tiling.span_cost;
  tiles.sharing = tiling.sharing;
  tiles.shared_span_cost = tiling.shared_span_cost;
  return tiles;
}

// tiles: in, those of the batch; out, those of the schedule, which belong to the tiling if they
// share. If there are step lists, those of both have been made before.
template <class Context>
__device__ __forceinline__ PlanFault ChooseGeneral(Context& c, typename Context::Tiles* tiles,
                                                   SharedTiling* tiling, PlanSchedule* schedule) {
  using Tiles = typename Context::Tiles;
  const PlanRules& rules = c.rules;
  const bool has_lists = rules.max_steps > 0;
  const i32* seen_ends = has_lists && HasLevels(c.p) ? SeenEnds(c, *tiles) : nullptr;
  PrefixForest<typename Context::Cta> forest(c.cta, c.p, tiles->tiles, tiles->num_tiles, seen_ends);
  bool shares = rules.schedule != kNoSplit && forest.Share(tiles->first_tile, tiling);
  if (has_lists) TakeLists(c, shares, tiles, tiling);
  Tiles shared_tiles = {};
  PlanSchedule shared_schedule = {};
  if (shares) {
    const i64 flat_cost = c.cta.Sum(tiles->num_tiles, [&](i32 i) {
      return ItemCost(rules, tiles->tiles[i], 0, false) + SpanCost(tiles->tiles[i]);
    });
    shared_tiles = SharedTilesOf(*tiling, *tiles);
    const PlanFault f = ChooseShared(c, shared_tiles, &shared_schedule, &shares);
    if (f.code != kNoFault) return f;
    if (shares && shared_schedule.makespan <= flat_cost * rules.num_units / rules.num_queues) {
      *tiles = shared_tiles;
      *schedule = shared_schedule;
      return {};
    }
  }
  const PlanFault f = ChooseFlat(c, *tiles, schedule, [] {}, [](i32, i32) {});
  if (!shares || (f.code == kNoFault && schedule->makespan < shared_schedule.makespan)) return f;
  *tiles = shared_tiles;
  *schedule = shared_schedule;
  return {};
}

}  // namespace jax_attn
