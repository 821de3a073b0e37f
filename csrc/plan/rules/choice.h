// Which schedules are tried, and which of them is kept.
#pragma once

#include "plan/rules/cuts.h"

namespace jax_attn {

// An imbalance within 1 % of the mean is below the noise of a launch.
inline bool IsBalanced(i64 makespan, i64 total_cost, i64 num_queues) {
  return makespan <= 101 * total_cost / (100 * num_queues);
}

// More splits of large tiles write large states. Measured (H200, decodes and prefill chunks, 714 us
// at FlashInfer): 256 splits of 128 rows balance 3 % better but cost 674 -> 857 us.
inline bool IsWorthMoreSplits(i64 makespan, i64 than) { return 10 * makespan < 9 * than; }

// Whether any retry can be worth it. A retry has at least as many chunks, so its costs add up to at
// least total_cost, the cost of the first split, and no schedule's fullest queue is below the mean.
inline bool MayBeWorthMoreSplits(i64 total_cost, i64 num_queues, i64 than) {
  return 10 * total_cost / (9 * num_queues) < than;
}

// kAuto. Algorithm 1 splits every tile above its limit, even where the other queues would wait for
// less than a split costs. So a schedule of longer chunks and one of whole tiles are predicted and
// compared, too. Returns the longest chunks of trial r.
enum : i32 { kNumFewerSplits = 2 };
inline i64 LongestOfFewer(const PlanRules& rules, i64 total_span_cost, i32 r) {
  return r == 0 ? LongestChunkCost(rules, total_span_cost, 1) : kUncut;
}

// Twice the divisors for the retries of Algorithm 1, in order, while queues are uneven.
inline constexpr int kNumRetries = 4;
constexpr i32 RetryDivisor(i32 r) { return r == 0 ? 3 : r == 1 ? 4 : r == 2 ? 6 : 8; }

}  // namespace jax_attn
