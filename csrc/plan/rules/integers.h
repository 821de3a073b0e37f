// The planners' integers: their bounds and arithmetic.
//
// Each file of this folder has decisions of the planners. They use integers only, and each function
// takes few numbers, because two programs follow them and must write the same bits: the host
// planner (plan/schedule.cc) sequentially and the device planner (cuda/plan/plan.cuh) in parallel.
// NVRTC compiles these files, too, so they include nothing but params.h and each other.
#pragma once

#include "params.h"

namespace jax_attn {

inline constexpr i64 kMaxInt32 = 2147483647;

// Bounds. plan/check.h checks those of a problem: heads 2^16, queues 2^20, items 2^28, kv_cost and
// fixed costs 2^12. checks.h checks those of a batch:
//   kv_len, |position|            2^30   CheckRequest; kernels add positions and windows in 32 bits
//   query tiles                   2^25   CheckTiles; also bounds items of tiles that are not split
//   cost of a tile                2^42   kv_len * kv_cost, may overflow a key: see ChunkKey
//   cost of all, of a partition   2^53   CheckCost; with shared tiles, states and items below 2^57
//   chunks                        2^26   kFixedSplit: kFaultChunks; kBalanced: 2^25 tiles and, of
//                                        split tiles, 8 per queue (LongestChunkCost)
//   partial states, rows          2^31   CheckCapacities, before numbering
// A cost times a number of queues would overflow: see IsBalanced and BorderOffset.
inline constexpr i64 kPositionLimit = 1ll << 30;
inline constexpr i64 kMaxQueryTiles = 1ll << 25;
inline constexpr i64 kMaxTotalCost = 1ll << 53;
inline constexpr i64 kMaxChunks = 1ll << 26;

constexpr i64 CeilDivide(i64 a, i64 b) { return (a + b - 1) / b; }
constexpr i64 Least(i64 a, i64 b) { return a < b ? a : b; }
constexpr i64 Largest(i64 a, i64 b) { return a > b ? a : b; }

// Last i in [0, n) with values[i] <= x, values never decreasing; 0 if there is none.
template <class T, class X>
inline i32 LastAtMost(const T* values, i32 n, X x) {
  i32 first = 0, count = n;
  while (count > 1) {
    const i32 half = count / 2;
    if (values[first + half] <= x) {
      first += half;
      count -= half;
    } else {
      count = half;
    }
  }
  return first;
}

}  // namespace jax_attn
