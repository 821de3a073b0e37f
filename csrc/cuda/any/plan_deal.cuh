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
  using Base::kMostQueues, Base::kTeamWarps, Base::rules_, Base::thread_, Base::WarpMax64;
  using typename Base::Trial;

  static constexpr int kTeamThreads = kTeamWarps * kWarpSize;
  static constexpr int kNumTeams = Base::kNumWarps / kTeamWarps;

  // By one team: every chunk, once for each unit, goes to the least loaded queue, the first of
  // equal ones. Returns, to the first warp, the load of the fullest.
  __device__ i64 Deal(const Trial& t) {
    if constexpr (kGeneral) return DealOnce(t);
    return DealInline(t);
  }

 private:
  __device__ __noinline__ i64 DealOnce(const Trial& t) { return DealInline(t); }
  __device__ i64 DealInline(const Trial& t) {
    if (t.key_bits >= 0) {
      if (rules_.num_queues <= 2 * kWarpSize) return DealInRegisters<2>(t);
      return DealInRegisters<kMostQueues>(t);
    }
    return thread_ % kTeamThreads < kWarpSize ? DealInMemory(t) : 0;
  }

  __device__ void SyncTeam() const { SyncNamed(1 + thread_ / kTeamThreads, kTeamThreads); }

  // Every warp has all queues: a lane those of lane, lane + 32, ... as load << bits | queue, so
  // that the least key is the queue that takes the next chunk. Many take theirs at once: with the
  // queues in order, one that has less than every queue would have after taking a chunk (the first
  // the first, the second the second, ...) takes its own whatever the others do. Where few do, one
  // after the other. For places in that order each warp counts a part of the queues below.
  template <int kQueues>
  __device__ i64 DealInRegisters(const Trial& t) {
    constexpr i32 kFew = 4, kAlone = 16;
    constexpr u32 kClosed = 0x7fffffff;  // above all keys: a queue that takes no more
    constexpr int kShare = kWarpSize / kTeamWarps;
    constexpr int kWords = (kQueues + 1) / 2;    // counts of two queues each
    const int lane = Anew(thread_ % kWarpSize);  // what follows from it is not kept by all warps
    const int warp = Uniform(thread_ / kWarpSize % kTeamWarps);
    const PlanTrial trial = t.arrays;
    const i32 num_queues = rules_.num_queues, bits = t.key_bits;
    const i32 num_slots = Uniform(t.num_chunks * rules_.num_units);
    u32 keys[kQueues];
    i32 filled[kQueues];
#pragma unroll
    for (int j = 0; j < kQueues; ++j) {
      const i32 queue = lane + j * kWarpSize;
      keys[j] = queue < num_queues ? static_cast<u32>(queue) : ~0u;
      filled[j] = 0;
    }
    const auto take = [&](bool takes, int j, i32 slot, u32 cost) {
      if (takes && warp == 0) trial.slots[slot] = {lane + j * kWarpSize, filled[j]};
      filled[j] += takes;
      keys[j] += takes ? cost : 0;
    };
    // [2, kWords, 32, kTeamWarps]: while this round's counts are read, the next one's are written.
    u32* counts = trial.counts + lane * kTeamWarps;
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
      for (int j = 0; j < kQueues; ++j) {  // queues j * 32 and on, which are in others[0] then
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
      SyncTeam();
      i32 places[kQueues];
      u32 costs[kQueues], least = ~0u;
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const u32 sum = SumOfTeam(counts + w * kWarpSize * kTeamWarps);
#pragma unroll
        for (int j = 2 * w; j < 2 * w + 2 && j < kQueues; ++j) {
          const i32 place = static_cast<i32>(sum >> (16 * (j % 2)) & 0xffff);
          places[j] = lane + j * kWarpSize < num_queues ? place : num_queues;
          costs[j] = 0;
          if (places[j] >= last) continue;
          costs[j] = trial.weights[next + places[j]];
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
      const u32 mine = lane < count ? trial.weights[next + lane] : 0;
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
      if (warp == 0) trial.filled[queue] = filled[j];
      if (kGeneral && filled[j] == 0) continue;
      fullest = fullest > keys[j] ? fullest : keys[j];
    }
    return WarpMax(fullest) >> bits;
  }

  __device__ static u32 SumOfTeam(const u32* counts) {
    if constexpr (kTeamWarps == 4) {
      const uint4 four = *reinterpret_cast<const uint4*>(counts);
      return (four.x + four.y) + (four.z + four.w);
    }
    u32 sum = 0;
#pragma unroll
    for (int i = 0; i < kTeamWarps; ++i) sum += counts[i];
    return sum;
  }

  // Any loads, any number of queues.
  __device__ i64 DealInMemory(const Trial& t) {
    const PlanTrial& trial = t.arrays;
    const int lane = thread_ % kWarpSize;
    const i32 each = static_cast<i32>(CeilDivide(rules_.num_queues, kWarpSize));
    const i32 begin = Min(lane * each, rules_.num_queues);
    const i32 end = Min(begin + each, rules_.num_queues);
#pragma unroll 1
    for (i32 q = begin; q < end; ++q) trial.loads[q] = trial.filled[q] = 0;
    const i32 num_slots = t.num_chunks * rules_.num_units;
    constexpr i64 kClosed = i64{1} << 62;
#pragma unroll 1
    for (i32 s = 0; s < num_slots; ++s) {
      if (kGeneral && s == t.leaves_empty_from) {
#pragma unroll 1
        for (i32 q = begin; q < end; ++q) {
          if (trial.filled[q] == 0) trial.loads[q] = kClosed;
        }
      }
      const i64 cost = trial.costs[trial.weights[s]];
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
      if (kGeneral && trial.filled[q] == 0) continue;
      fullest = static_cast<u64>(Largest(static_cast<i64>(fullest), trial.loads[q]));
    }
    return WarpMax64(static_cast<i64>(fullest));
  }
};

}  // namespace jax_attn
