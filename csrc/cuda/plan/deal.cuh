// The device planner deals the chunks of a trial: each goes to the queue with the least load.
// Input: keys, costs and weights. Output: slots, and the number of chunks of each queue.
#pragma once

#include "cuda/plan/context.cuh"
#include "plan/rules/integers.h"

namespace jax_attn {

template <class Context>
__device__ __forceinline__ void SyncTeam(const Context& c) {
  SyncNamed(1 + c.thread() / Context::kTeamThreads, Context::kTeamThreads);
}

template <int kTeamWarps>
__device__ __forceinline__ u32 SumOfTeam(const u32* counts) {
  if constexpr (kTeamWarps == 4) {
    const uint4 four = *reinterpret_cast<const uint4*>(counts);
    return (four.x + four.y) + (four.z + four.w);
  }
  u32 sum = 0;
#pragma unroll
  for (int i = 0; i < kTeamWarps; ++i) sum += counts[i];
  return sum;
}

// Every warp holds all queues: a lane has queues lane, lane + 32, ... as load << bits | queue, so
// the smallest key is the queue that gets the next chunk. Many queues take chunks at once. In the
// order of queues, a queue whose load is below what every queue would have after taking a chunk
// (the first queue takes the first chunk, the second the second, ...) takes its chunk whatever the
// others do. If only few can, chunks are dealt one by one. For ranks in that order each warp counts
// a part of the smaller keys.
template <int kQueues, class Context>
__device__ __forceinline__ i64 DealInRegisters(Context& c, const PlanTrial& t) {
  constexpr bool kGeneral = Context::kGeneral;
  constexpr int kTeamWarps = Context::kTeamWarps;
  constexpr i32 kFew = 4, kAlone = 16;
  constexpr u32 kClosed = 0x7fffffff;  // above all keys: the queue takes no more
  constexpr int kShare = kWarpSize / kTeamWarps;
  constexpr int kWords = (kQueues + 1) / 2;         // each holds counts of two queues
  const int lane = Opaque(c.thread() % kWarpSize);  // Opaque: not all warps keep what follows from
                                                    // it
  const int warp = Uniform(c.thread() / kWarpSize % kTeamWarps);
  const PlanRules& rules = c.rules;
  const PlanChunks chunks = t.chunks;
  const i32 num_queues = rules.num_queues, bits = t.key_bits;
  const i32 num_slots = Uniform(t.num_chunks * rules.num_units);
  u32 keys[kQueues];
  i32 filled[kQueues];
#pragma unroll
  for (int j = 0; j < kQueues; ++j) {
    const i32 queue = lane + j * kWarpSize;
    keys[j] = queue < num_queues ? static_cast<u32>(queue) : ~0u;
    filled[j] = 0;
  }
  const auto take = [&](bool takes, int j, i32 slot, u32 cost) {
    if (takes && warp == 0) chunks.slots[slot] = {lane + j * kWarpSize, filled[j]};
    filled[j] += takes;
    keys[j] += takes ? cost : 0;
  };
  // [2, kWords, 32, kTeamWarps]: the next round's counts are written while this round's are read.
  u32* counts = chunks.counts + lane * kTeamWarps;
  i32 other_counts = kWords * kWarpSize * kTeamWarps;
  i32 next = 0, num_open = num_queues;
  i32 end = kGeneral ? Min(t.leaves_empty_from, num_slots) : num_slots;
#pragma unroll 1
  while (next < num_slots) {
    if (kGeneral && next == end) {
      num_open = 0;
#pragma unroll
      for (int j = 0; j < kQueues; ++j) {
        if (filled[j] == 0) keys[j] = kClosed;
        num_open += __popc(__ballot_sync(kFullWarp, filled[j] > 0));
      }
      end = num_slots;
    }
    const i32 last = Min(num_open, end - next);
    u32 below[2 * kWords] = {}, others[kQueues];
#pragma unroll
    for (int j = 0; j < kQueues; ++j) others[j] = keys[j];
#pragma unroll(kQueues == 2 ? 2 : 1)
    for (int j = 0; j < kQueues; ++j) {  // then others[0] has queues j * 32 and up
      const i32 count = Min(kWarpSize, num_queues - j * kWarpSize);
      const auto compare = [&](i32 owner) {
        const u32 other = __shfl_sync(kFullWarp, others[0], owner);
#pragma unroll
        for (int k = 0; k < kQueues; ++k) {
          below[k] += (other - keys[k]) >> 31;  // keys have 31 bits
        }
      };
      if (kQueues == 2 && j == 0 && count == kWarpSize) {
#pragma unroll
        for (int i = 0; i < kShare; ++i) compare(warp + i * kTeamWarps);
      } else {
#pragma unroll 1
        for (i32 owner = warp; owner < count; owner += kTeamWarps) compare(owner);
      }
      const u32 first = others[0];
#pragma unroll
      for (int k = 0; k + 1 < kQueues; ++k) others[k] = others[k + 1];
      others[kQueues - 1] = first;
    }
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      counts[w * kWarpSize * kTeamWarps + warp] = below[2 * w + 1] << 16 | below[2 * w];
    }
    SyncTeam(c);
    i32 places[kQueues];
    u32 costs[kQueues], least = ~0u;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const u32 sum = SumOfTeam<kTeamWarps>(counts + w * kWarpSize * kTeamWarps);
#pragma unroll
      for (int j = 2 * w; j < 2 * w + 2 && j < kQueues; ++j) {
        const i32 place = static_cast<i32>(sum >> (16 * (j % 2)) & 0xffff);
        places[j] = lane + j * kWarpSize < num_queues ? place : num_queues;
        costs[j] = 0;
        if (places[j] >= last) continue;
        costs[j] = chunks.weights[next + places[j]];
        if (keys[j] + costs[j] < least) least = keys[j] + costs[j];
      }
    }
    least = WarpMin(least);
    i32 taken = 0;
#pragma unroll
    for (int j = 0; j < kQueues; ++j) {
      const bool takes = places[j] < last && (keys[j] < least || places[j] == 0);
      take(takes, j, next + places[j], costs[j]);
      taken += __popc(__ballot_sync(kFullWarp, takes));
    }
    next += taken;
    counts += other_counts;
    other_counts = -other_counts;
    if (taken > kFew) continue;
    const i32 count = Min(kAlone, end - next);
    const u32 mine = lane < count ? chunks.weights[next + lane] : 0;
#pragma unroll 1
    for (i32 i = 0; i < count; ++i) {
      const u32 cost = __shfl_sync(kFullWarp, mine, i);
      u32 first = keys[0];
#pragma unroll
      for (int j = 1; j < kQueues; ++j) first = first < keys[j] ? first : keys[j];
      first = WarpMin(first);
#pragma unroll
      for (int j = 0; j < kQueues; ++j) {
        take(keys[j] == first, j, next + i, cost);
      }
    }
    next += count;
  }
  u32 fullest = 0;
#pragma unroll
  for (int j = 0; j < kQueues; ++j) {
    const i32 queue = lane + j * kWarpSize;
    if (queue >= num_queues) continue;
    if (warp == 0) chunks.filled[queue] = filled[j];
    if (kGeneral && filled[j] == 0) continue;
    fullest = fullest > keys[j] ? fullest : keys[j];
  }
  return WarpMax(fullest) >> bits;
}

// The same for any loads and any number of queues.
template <class Context>
__device__ __forceinline__ i64 DealInMemory(Context& c, const PlanTrial& t) {
  constexpr bool kGeneral = Context::kGeneral;
  const PlanRules& rules = c.rules;
  const PlanChunks& chunks = t.chunks;
  const int lane = c.thread() % kWarpSize;
  const i32 each = static_cast<i32>(CeilDivide(rules.num_queues, kWarpSize));
  const i32 begin = Min(lane * each, rules.num_queues);
  const i32 end = Min(begin + each, rules.num_queues);
#pragma unroll 1
  for (i32 q = begin; q < end; ++q) chunks.loads[q] = chunks.filled[q] = 0;
  const i32 num_slots = t.num_chunks * rules.num_units;
  constexpr i64 kClosed = i64{1} << 62;
#pragma unroll 1
  for (i32 s = 0; s < num_slots; ++s) {
    if (kGeneral && s == t.leaves_empty_from) {
#pragma unroll 1
      for (i32 q = begin; q < end; ++q) {
        if (chunks.filled[q] == 0) chunks.loads[q] = kClosed;
      }
    }
    const i64 cost = chunks.costs[chunks.weights[s]];
    u64 least = ~0ull;
    i32 queue = 0;
#pragma unroll 1
    for (i32 q = begin; q < end; ++q) {
      if (static_cast<u64>(chunks.loads[q]) >= least) continue;
      least = static_cast<u64>(chunks.loads[q]);
      queue = q;
    }
    const u32 high = WarpMin(static_cast<u32>(least >> 32));
    const bool near = least >> 32 == high;
    const u32 low = WarpMin(near ? static_cast<u32>(least) : ~0u);
    const u32 winners = __ballot_sync(kFullWarp, near && static_cast<u32>(least) == low);
    if ((winners >> lane & 1) != 0 && (winners & ((1u << lane) - 1)) == 0) {
      chunks.slots[s].queue = queue;
      chunks.slots[s].place = chunks.filled[queue]++;
      chunks.loads[queue] += cost;
    }
  }
  u64 fullest = 0;
#pragma unroll 1
  for (i32 q = begin; q < end; ++q) {
    if (kGeneral && chunks.filled[q] == 0) continue;
    fullest = static_cast<u64>(Largest(static_cast<i64>(fullest), chunks.loads[q]));
  }
  return Context::Cta::WarpMax64(static_cast<i64>(fullest));
}

template <class Context>
__device__ __forceinline__ i64 DealInline(Context& c, const PlanTrial& t) {
  if (t.key_bits >= 0) {
    if (c.rules.num_queues <= 2 * kWarpSize) return DealInRegisters<2>(c, t);
    return DealInRegisters<Context::kMostQueues>(c, t);
  }
  return c.thread() % Context::kTeamThreads < kWarpSize ? DealInMemory(c, t) : 0;
}
template <class Context>
__device__ __noinline__ i64 DealOnce(Context& c, const PlanTrial& t) {
  return DealInline(c, t);
}
// Called by one team. Every chunk, once for each unit, goes to the least loaded queue, the first
// one of equal ones. Returns the load of the fullest queue to the first warp.
template <class Context>
__device__ __forceinline__ i64 Deal(Context& c, const PlanTrial& t) {
  if constexpr (Context::kGeneral) return DealOnce(c, t);
  return DealInline(c, t);
}

}  // namespace jax_attn
