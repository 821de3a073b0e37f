// Which schedules are tried, and which of them is kept.
#pragma once

#include "plan/rules/cuts.h"

namespace jax_attn {

// Cost of all tiles of a partition if none is split.
inline i64 WholeCost(const PlanRules& rules, i64 num_tiles, i64 total_span_cost) {
  return (num_tiles * rules.item_cost * rules.kv_cost[0] + total_span_cost) * rules.num_units;
}

// An imbalance within 1 % of the mean is below the noise of a launch.
inline bool IsBalanced(i64 makespan, i64 total_cost, i64 num_queues) {
  return makespan <= 101 * total_cost / (100 * num_queues);
}

// How much more splits must gain, in percent. Measured (H200, decodes and prefill chunks, 714 us at
// FlashInfer): 256 splits of 128 rows balance 3 % better but cost 674 -> 857 us. On a CPU splits of
// short prompts cost up to 11 % of the processor's time. Gains below 2 % are not worth the
// planner's time: 20 -> 52 us on the host for 256 uniform decodes, to no avail.
inline constexpr i64 kLeastMargin = 2;
inline i64 MarginOfSplits(bool large_states) { return large_states ? 10 : kLeastMargin; }

// How much whole tiles by weight must gain: a request's tiles are not kept together, which costs
// time that the model does not know (rules/order.h).
inline constexpr i64 kMarginOfOrder = 10;

// Large states are those of requests with more rows than the smallest tile, or than any.
// several_tile_sizes: whether tile M varies. t: any of the tiles.
inline bool HaveLargeStates(bool several_tile_sizes, const QueryTile& t) {
  return several_tile_sizes || t.tile > 0 || t.section > 0;
}

inline bool IsWorthMoreSplits(i64 margin, i64 makespan, i64 than) {
  return (100 + margin) * makespan < 100 * than;
}

// The largest makespan that is worth it, for makespans that are not negative.
inline i64 MostWorthMoreSplits(i64 margin, i64 than) { return (100 * than - 1) / (100 + margin); }

// Whether any retry can be worth it: no schedule's fullest queue is below the mean of whole tiles.
inline bool MayBeWorthMoreSplits(i64 margin, i64 total_cost, i64 num_queues, i64 than) {
  return IsWorthMoreSplits(margin, total_cost / num_queues, than);
}

// Ranges are for few tiles: at most this many for each queue, where there are several head units.
inline constexpr i64 kMostTilesOfRanges = 64;

// Whether the planner may cut ranges. With so many tiles a queue Algorithm 1 leaves
// queues uneven by less than a tile, and the line, which has each tile once for every unit, would
// take much memory.
inline bool MayHaveRanges(const PlanRules& rules, i64 num_tiles) {
  return rules.num_units == 1 ||
         num_tiles * rules.num_units <= kMostTilesOfRanges * rules.num_queues;
}

// Whether a schedule of ranges is taken instead of one of Algorithm 1. With one unit and one tile M
// no margin was needed. Where tile M varies, a queue should begin with its large tiles and fill up
// with small ones, which ranges do not: 736 us instead of 674 for the batch of MarginOfSplits.
// So they are tried wherever the mean load would be worth it.
inline bool AreRangesWorthIt(const PlanRules& rules, bool several_tile_sizes, i64 margin,
                             i64 makespan, i64 than) {
  if (rules.num_units == 1 && !several_tile_sizes) return makespan < than;
  return IsWorthMoreSplits(margin, makespan, than);
}

// Algorithm 1 splits every tile above its limit, even where the other queues would wait for less
// than a split costs. So a schedule of whole tiles is predicted and compared, too, and with kAuto
// one of chunks twice as long. Returns the longest chunks of trial r.
enum : i32 { kNumFewerSplits = 2 };
inline i32 FirstOfFewer(const PlanRules& rules) { return rules.fewer_splits ? 0 : 1; }
inline i64 LongestOfFewer(const PlanRules& rules, i64 total_span_cost, i32 r) {
  return r == 0 ? LongestChunkCost(rules, total_span_cost, 1) : kUncut;
}

// Whether trial r can have a smaller makespan: no queue takes less than its longest whole tile.
inline bool MayBeWorthFewerSplits(const PlanRules& rules, i32 r, i64 longest_span_cost, i64 than) {
  return r == 0 || i64{rules.item_cost} * rules.kv_cost[0] + longest_span_cost < than;
}

// Retries of Algorithm 1, in order, while queues are uneven. With large states the first ones are
// whole tiles and the chunks of the first schedule, by weight: not by sections (rules/order.h).
struct Retry {
  i64 longest_cost;
  bool by_weight;
  i64 margin;  // what it must gain, in percent
};
// The device planner makes the retries of a round at once (cuda/plan/choice.cuh).
inline constexpr int kNumRetries = 9, kRetriesOfRound = 5;

// The chunks of FlashDecoding, in tokens, are the last retries. So no fixed split of these lengths
// is predicted to be faster than kBalanced by more than a margin.
inline constexpr int kNumFixedChunks = 4;
inline constexpr i32 kFixedChunks[kNumFixedChunks] = {2048, 1024, 512, 256};

// Chunks of the others, in sixths of the usual length L. 0: L if the first schedule splits no tile,
// else what RetryOf says.
inline constexpr i32 kNumSixths = kNumRetries - kNumFixedChunks;
inline constexpr i32 kSixths[kNumSixths] = {0, 7, 8, 3, 4};
inline constexpr i32 kSixthsOfLarge[kNumSixths] = {0, 0, 0, 3, 2};

// first_longest_cost: of the first schedule. If LongestWholeCost made it kUncut, chunks of the
// usual length L are tried, too. Shorter chunks fill queues; chunks somewhat longer than L may fill
// each queue once, where two pieces of L would not.
inline Retry RetryOf(const PlanRules& rules, i64 total_span_cost, i64 first_longest_cost,
                     bool large_states, i32 r) {
  const i64 margin = MarginOfSplits(large_states);
  if (r >= kNumSixths) return {ChunksOfTokens(kFixedChunks[r - kNumSixths]), false, margin};
  const bool is_usual = first_longest_cost == kUncut;
  const i64 usual = LongestChunkCost(rules, total_span_cost, 2);
  if (large_states && r == 0) return {kUncut, true, kMarginOfOrder};
  if (large_states && r == 1) {
    return {is_usual ? usual : first_longest_cost, true, kMarginOfOrder};
  }
  const i32 sixths = large_states ? kSixthsOfLarge[r] : kSixths[r];
  const i32 otherwise = large_states ? 4 : 5;
  return {usual * (sixths > 0 ? sixths : is_usual ? 6 : otherwise) / 6, false, margin};
}

}  // namespace jax_attn
