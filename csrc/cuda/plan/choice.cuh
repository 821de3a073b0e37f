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

// Considers the trials up to the first one that is balanced or has too many splits.
template <class Context>
__device__ __forceinline__ i32 ChooseTrial(const Context& c, i32 num_trials) {
  const auto& shared = c.shared;
  const i64 total_cost = shared.trials[0].cost;
  i32 best = 0;
#pragma unroll 1
  for (i32 r = 1; r < num_trials && shared.trials[r].num_chunks >= 0; ++r) {
    if (IsWorthMoreSplits(shared.makespan[r], shared.makespan[best])) best = r;
    if (IsBalanced(shared.makespan[best], total_cost, c.rules.num_queues)) break;
  }
  return best;
}

// Chooses for tiles that share nothing, as WriteSchedule and Rebalance in plan/schedule.cc do: the
// first trial if it is good enough; otherwise ranges, or all retries of Algorithm 1 at once, a team
// each. All threads call prepare(); threads that do not deal call record(first, step) for what is
// in `schedule`: for the first trial, and again for another one.
template <class Context, class Prepare, class Record>
__device__ __forceinline__ PlanFault ChooseFlat(Context& c, const typename Context::Tiles& tiles,
                                                PlanSchedule* schedule, Prepare prepare,
                                                Record record) {
  constexpr i32 kTeamThreads = Context::kTeamThreads, kNumTeams = Context::kNumTeams;
  const PlanRules& rules = c.rules;
  const int thread = c.thread();
  i32 first = 0, num_trials = 1;  // trials to make; 0: one is chosen
#pragma unroll 1
  while (true) {
#pragma unroll 1
    for (i32 r = first; r < num_trials; ++r) {
      if (const PlanFault f = MakeTrial(c, tiles, r); f.code != kNoFault) return f;
    }
    if (first == 0) *schedule = ScheduleOf(c, 0);
    const bool chosen = first == num_trials, records = first == 0 || chosen;
    if (records) prepare();
#pragma unroll 1
    for (i32 r = first + thread / kTeamThreads; r < num_trials; r += kNumTeams) DealTrial(c, r);
    const i32 dealers = kNumTeams > 1 ? (num_trials - first) * kTeamThreads : 0;
    if (records && thread >= dealers) record(thread - dealers, Context::kNumThreads - dealers);
    __syncthreads();
    if (chosen) return {};
    if (first == 0) {
      const i64 makespan = c.shared.makespan[0];
      schedule->makespan = makespan;
      const i64 total_cost = c.shared.trials[0].cost;
      if (rules.schedule != kBalanced || IsBalanced(makespan, total_cost, rules.num_queues)) {
        return {};
      }
      if (rules.num_units == 1 && !tiles.several_tile_sizes) {
        if (!TryRanges(c, tiles, makespan, schedule)) return {};
        first = num_trials;
        continue;
      }
      if (!MayBeWorthMoreSplits(total_cost, rules.num_queues, makespan)) return {};
      first = 1;
      num_trials = 1 + kNumRetries;
      continue;
    }
    const i32 best = ChooseTrial(c, num_trials);
    if (best == 0) return {};
    *schedule = ScheduleOf(c, best);
    first = num_trials;
  }
}

// As in plan/schedule.cc. Replaces a schedule of these tiles, which share nothing.
template <class Context>
__device__ __forceinline__ void TryFewerSplits(Context& c, const typename Context::Tiles& tiles,
                                               PlanSchedule* schedule) {
#pragma unroll 1
  for (i32 r = 0; r < kNumFewerSplits && schedule->num_chunks > tiles.num_tiles; ++r) {
    MakeTrialOfFewer(c, tiles, r);
    if (c.thread() < Context::kTeamThreads) DealTrial(c, r);
    __syncthreads();
    if (c.shared.makespan[r] < schedule->makespan) *schedule = ScheduleOf(c, r);
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
  if (f.code == kNoFault && rules.fewer_splits) TryFewerSplits(c, *tiles, schedule);
  if (!shares || (f.code == kNoFault && schedule->makespan < shared_schedule.makespan)) return f;
  *tiles = shared_tiles;
  *schedule = shared_schedule;
  return {};
}

}  // namespace jax_attn
