// Which of the schedules that were tried is kept, and what is tried.
#pragma once

#include "plan/rules/cuts.h"

namespace jax_attn {

// Within 1 % of the mean the fullest queue is below the noise of a launch.
inline bool IsBalanced(i64 makespan, i64 total_cost, i64 num_queues) {
  return makespan <= 101 * total_cost / (100 * num_queues);
}

// Large tiles leave large states. Measured (H200, decodes and prefill chunks, 714 us at
// FlashInfer): 3 % better balance by 256 splits of 128 rows cost 674 -> 857 us.
inline bool IsWorthMoreSplits(i64 makespan, i64 than) { return 10 * makespan < 9 * than; }

// Whether any retry can be. Shorter chunks are at least as many, so their costs add up to no less
// than total_cost, that of the first cut, and no schedule's fullest queue is below the mean.
inline bool MayBeWorthMoreSplits(i64 total_cost, i64 num_queues, i64 than) {
  return 10 * total_cost / (9 * num_queues) < than;
}

// kAuto. Algorithm 1 splits whatever exceeds its limit, also where the rest of the queues would
// wait less than a split costs: what a schedule of longer chunks, and one of whole tiles, is
// predicted to take is compared, too. Longest chunks of trial r.
enum : i32 { kNumFewerSplits = 2 };
inline i64 LongestOfFewer(const PlanRules& rules, i64 total_span_cost, i32 r) {
  return r == 0 ? LongestChunkCost(rules, total_span_cost, 1) : kUncut;
}

// Twice the divisors by which Algorithm 1 is tried again, in order, while queues are uneven.
inline constexpr int kNumRetries = 4;
constexpr i32 RetryDivisor(i32 r) { return r == 0 ? 3 : r == 1 ? 4 : r == 2 ? 6 : 8; }

}  // namespace jax_attn
