// The device planner hands out chunks: each goes to the queue that has the least then.
#pragma once

#include "cuda/any/plan_trials.cuh"

namespace jax_attn {

template <class Traits, bool kGeneral>
class PlanDealer : public PlanTrials<Traits, kGeneral> {
  using Base = PlanTrials<Traits, kGeneral>;

 public:
  using Base::Base;

 protected:
  using Base::rules_, Base::SourceOf, Base::thread_, Base::WarpMax64;
  using typename Base::Trial;

  // By one warp: every chunk, once for each unit, goes to the least loaded queue, the first of
  // equal ones. Returns the load of the fullest.
  __device__ i64 Deal(const Trial& t) {
    if constexpr (kGeneral) return DealOnce(t);
    return DealInline(t);
  }

 private:
  __device__ __noinline__ i64 DealOnce(const Trial& t) { return DealInline(t); }
  __device__ i64 DealInline(const Trial& t) {
    if (t.key_bits >= 0) {
      if (rules_.num_queues <= 2 * kWarpSize) return DealInRegisters<2>(t);
      if (rules_.num_queues <= 9 * kWarpSize) return DealInRegisters<9>(t);
    }
    return DealInMemory(t.arrays, t.num_chunks);
  }

  // A lane holds queues lane, lane + 32, ... as load << bits | queue, so that the least key is the
  // queue that takes the next chunk. Many take theirs at once: with the queues in order, one that
  // has less than every queue would have after taking a chunk (the first the first, the second the
  // second, ...) takes its own whatever the others do. Where that are few, one after the other.
  template <int kQueues>
  __device__ i64 DealInRegisters(const Trial& t) {
    constexpr i32 kFew = 4, kAlone = 16;
    const int lane = thread_ % kWarpSize;
    const PlanTrial& trial = t.arrays;
    const i32 num_queues = rules_.num_queues, bits = t.key_bits;
    const i32 num_slots = t.num_chunks * rules_.num_units;
    u32* shown = reinterpret_cast<u32*>(trial.loads);  // [num_queues, to a multiple of 4] all keys
    u32 keys[kQueues];
    i32 filled[kQueues];
#pragma unroll
    for (int j = 0; j < kQueues; ++j) {
      const i32 queue = lane + j * kWarpSize;
      keys[j] = queue < num_queues ? static_cast<u32>(queue) : ~0u;
      filled[j] = 0;
    }
    auto cost_of = [&](i32 slot) { return trial.slots[slot].cost; };
    auto take = [&](int j, i32 slot, u32 cost) {
      PlanSlot taken;
      taken.queue = lane + j * kWarpSize;
      taken.place = filled[j]++;
      trial.slots[slot] = taken;
      keys[j] += cost;
    };
    i32 next = 0;
#pragma unroll 1
    while (next < num_slots) {
      const i32 last = Min(num_queues, num_slots - next);
#pragma unroll
      for (int j = 0; j < kQueues; ++j) {
        if (lane + j * kWarpSize < (num_queues + 3) / 4 * 4) shown[lane + j * kWarpSize] = keys[j];
      }
      __syncwarp();
      i32 rank[kQueues] = {};
      constexpr int kTogether = kQueues == 2 ? 1 : kQueues;
#pragma unroll kTogether == 1 ? 3 : 1
      for (i32 q = 0; q < num_queues; q += 4) {
        const uint4 four = *reinterpret_cast<const uint4*>(shown + q);
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
          rank[j] += (four.x < keys[j]) + (four.y < keys[j]);
          rank[j] += (four.z < keys[j]) + (four.w < keys[j]);
        }
      }
      if constexpr (kQueues == 2) {  // second queues: of one lane on Hopper, which has 33 a head
        rank[1] = num_queues;
#pragma unroll 2
        for (i32 owner = 0; owner < num_queues - kWarpSize; ++owner) {
          const u32 key = __shfl_sync(kFullWarp, keys[1], owner);
          const i32 below = __popc(__ballot_sync(kFullWarp, keys[0] < key)) +
                            __popc(__ballot_sync(kFullWarp, keys[1] < key));
          if (lane == owner) rank[1] = below;
        }
      }
      u32 costs[kQueues], least = ~0u;
#pragma unroll
      for (int j = 0; j < kQueues; ++j) {
        costs[j] = rank[j] < last ? cost_of(next + rank[j]) : 0;
        if (rank[j] < last && keys[j] + costs[j] < least) least = keys[j] + costs[j];
      }
      least = WarpMin(least);
      i32 taken = 0;
#pragma unroll
      for (int j = 0; j < kQueues; ++j) {
        const bool takes = rank[j] < last && (keys[j] < least || rank[j] == 0);
        if (takes) take(j, next + rank[j], costs[j]);
        taken += __popc(__ballot_sync(kFullWarp, takes));
      }
      next += taken;
      if (taken > kFew) continue;
      const i32 count = Min(kAlone, num_slots - next);
      const u32 mine = lane < count ? cost_of(next + lane) : 0;
#pragma unroll 1
      for (i32 i = 0; i < count; ++i) {
        const u32 cost = __shfl_sync(kFullWarp, mine, i);
        u32 first = keys[0];
#pragma unroll
        for (int j = 1; j < kQueues; ++j) first = first < keys[j] ? first : keys[j];
        first = WarpMin(first);
#pragma unroll
        for (int j = 0; j < kQueues; ++j) {
          if (keys[j] == first) take(j, next + i, cost);
        }
      }
      next += count;
    }
    u32 fullest = 0;
#pragma unroll
    for (int j = 0; j < kQueues; ++j) {
      const i32 queue = lane + j * kWarpSize;
      if (queue >= num_queues) continue;
      trial.filled[queue] = filled[j];
      fullest = fullest > keys[j] ? fullest : keys[j];
    }
    return WarpMax(fullest) >> bits;
  }

  // Any loads, any number of queues.
  __device__ i64 DealInMemory(const PlanTrial& trial, i32 num_chunks) {
    const int lane = thread_ % kWarpSize;
    const i32 each = static_cast<i32>(CeilDivide(rules_.num_queues, kWarpSize));
    const i32 begin = Min(lane * each, rules_.num_queues);
    const i32 end = Min(begin + each, rules_.num_queues);
#pragma unroll 1
    for (i32 q = begin; q < end; ++q) trial.loads[q] = trial.filled[q] = 0;
    const i32 num_slots = num_chunks * rules_.num_units;
#pragma unroll 1
    for (i32 s = 0; s < num_slots; ++s) {
      const i64 cost = trial.costs[SourceOf(trial, num_chunks, s).key];
      u64 least = ~0ull;
      i32 queue = 0;
#pragma unroll 1
      for (i32 q = begin; q < end; ++q) {
        if (static_cast<u64>(trial.loads[q]) >= least) continue;
        least = static_cast<u64>(trial.loads[q]);
        queue = q;
      }
      const u32 high = WarpMin(static_cast<u32>(least >> 32));
      const bool near = least >> 32 == high;
      const u32 low = WarpMin(near ? static_cast<u32>(least) : ~0u);
      const u32 winners = __ballot_sync(kFullWarp, near && static_cast<u32>(least) == low);
      if ((winners >> lane & 1) != 0 && (winners & ((1u << lane) - 1)) == 0) {
        trial.slots[s].queue = queue;
        trial.slots[s].place = trial.filled[queue]++;
        trial.loads[queue] += cost;
      }
    }
    u64 fullest = 0;
#pragma unroll 1
    for (i32 q = begin; q < end; ++q) {
      fullest = static_cast<u64>(Largest(static_cast<i64>(fullest), trial.loads[q]));
    }
    return WarpMax64(static_cast<i64>(fullest));
  }
};

}  // namespace jax_attn
