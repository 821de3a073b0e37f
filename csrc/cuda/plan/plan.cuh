// The planner inside the graph. It follows plan/rules/ and writes the same bits as
// plan/schedule.cc.
//
// CTA 0 schedules. The others check page ids and copy them into the plan, which is most of its
// bytes. The CTA that finishes last writes the header; mostly that is CTA 0, which has seen the
// others done before. A batch that the host planner would refuse leaves a faulty plan:
// kFaultyPlanMagic, no items, and the fault in the header.
//
// Scheduling has stages. context.cuh has what they pass to each other: the context (the CTA,
// memory, the rules, the batch), tiles, trials, schedules. Each stage is a file, here in the order
// in which they run:
//   tiles     checked lengths          -> tiles
//   steps     tiles                    -> step lists, and tiles whose spans are ranges of lists
//   prefix    tiles                    -> a tiling with shared prefixes
//   choice    tiles                    -> a schedule, the best of what it tries:
//     trials    tiles, longest chunk   -> a trial: chunks in the order of queues
//     deal      a trial                -> the queues of its chunks
//     ranges    tiles                  -> a schedule by ranges, stream-K
//   results   a schedule, its tiles    -> counts, merge groups, items
// cta.cuh has what a whole CTA does at once: memory, sums, sorting. pages.cuh has what the other
// CTAs do.
//
// All threads work at once, except when chunks are dealt: each chunk goes to the queue with the
// least load. All kv heads have the same lengths, so that is a few hundred chunks for the 33 queues
// of a head (H200). Four warps hold them in registers, while the others prepare the items without
// their positions.
#pragma once

#include "cuda/plan/choice.cuh"
#include "cuda/plan/context.cuh"
#include "cuda/plan/pages.cuh"
#include "cuda/plan/results.cuh"
#include "cuda/plan/steps.cuh"
#include "cuda/plan/tiles.cuh"

namespace jax_attn {

// --- the scheduler ---

// Numbers for the header.
struct PlanTotals {
  PlanCounts counts;
  i32 num_shared_tokens;
};

// Runs the stages in CTA 0. Returns the fault; without one, its `got` is the number of steps.
template <class Context>
__device__ __forceinline__ PlanFault MakePlan(Context& c, PlanTotals* totals) {
  PlanFault fault = CheckLengths(c);
  if (fault.code != kNoFault) return fault;
  if constexpr (Context::kGeneral) {
    fault = CheckLevels(c);
    if (fault.code != kNoFault) return fault;
  }
  typename Context::Tiles tiles = {};
  fault = MakeTiles(c, &tiles);
  if (fault.code != kNoFault) return fault;
  const bool has_lists = Context::kGeneral && c.rules.max_steps > 0;
  if constexpr (Context::kGeneral) {
    if (has_lists) fault = ListSteps(c, tiles);
    if (fault.code != kNoFault) return fault;
  }
  SharedTiling tiling = {};
  PlanSchedule schedule = {};
  PlanResults<Context> results(c, tiles, tiling, schedule);
  PlanCounts counts = {};
  if constexpr (Context::kGeneral) {
    fault = ChooseGeneral(c, &tiles, &tiling, &schedule);
    if (fault.code != kNoFault) return fault;
    counts = results.Count();
  } else {
    const auto prepare = [&] {
      const PlanCounts n = results.Count();
      if (c.thread() == 0) c.shared.counts = n;
    };
    const auto record = [&](i32 first, i32 step) { results.MakeRecords(first, step); };
    fault = ChooseFlat(c, tiles, &schedule, prepare, record);
    if (fault.code != kNoFault) return fault;
    counts = c.shared.counts;
  }
  fault = CheckCapacities(c.rules, counts);
  *totals = {counts, results.num_shared_tokens()};
  if (fault.code != kNoFault) return fault;
  if constexpr (Context::kGeneral) {
    if (has_lists) NumSteps(fault) = WriteSteps(c, tiles.shares());
    results.MakeRecords(c.thread(), Context::kNumThreads);
  }
  results.Write(counts);
  return fault;
}

// Writes everything except the header's magic, version, max_page_id and num_steps. Returns the
// result of MakePlan, whether the other CTAs were seen done, and what they found.
struct PlanEnd {
  PlanFault fault;
  bool others_done;
  PageFindings found;
};
template <class Context>
__device__ __forceinline__ PlanEnd Schedule(Context& c) {
  PlanTotals totals = {};
  const PlanFault fault = MakePlan(c, &totals);
  if (c.thread() == 0) {
    PlanHeader& h = *c.p.header;
    h.fault = fault.code;
    h.fault_at = fault.at;
    h.fault_got = fault.got;
    h.fault_expected = fault.expected;
    h.batch_size = static_cast<i32>(c.in.batch_size);
    h.nnz_qo = c.in.qo_indptr[c.in.batch_size];
    h.nnz_kv = c.in.kv_indptr[c.in.batch_size];
    h.num_items = static_cast<i32>(totals.counts.num_items);
    h.num_merge_groups = static_cast<i32>(totals.counts.num_merge_groups);
    h.num_partials = static_cast<i32>(totals.counts.num_partials);
    h.num_partial_rows = static_cast<i32>(totals.counts.num_partial_rows);
    if constexpr (Context::kGeneral) h.num_shared_tokens = totals.num_shared_tokens;
  }
  if (fault.code != kNoFault) return {fault, false, {}};
  return {fault, c.shared.others_done, c.shared.found};
}

// --- the kernel ---

template <class Traits, bool kGeneral>
struct PlanBodyOf {
  static constexpr int kNumThreads = Traits::kNumThreads;
  static constexpr int kSmemBytes = Traits::kSmemBytes;
  static constexpr int kMinCtasPerSm = 1;

  __device__ __forceinline__ static void Run(const PlanParams& p) {
    extern __shared__ __align__(128) unsigned char smem[];
    PlanEnd end = {};
    if (blockIdx.x == 0) {
      PlanContext<Traits, kGeneral> context(p, smem);
      end = Schedule(context);
    } else {
      CopyPages<kGeneral>(p);
    }
    if (!end.others_done) {
      __syncthreads();
      i32* const num_done = UnwrittenHeader::NumDone(p.header);
      const bool last =
          threadIdx.x == 0 && AddAcquireRelease(num_done, 1) == static_cast<i32>(gridDim.x) - 1;
      if (!__syncthreads_or(last)) return;
    }
    Finish(p, end);
  }

  __device__ __forceinline__ static void Finish(const PlanParams& p, PlanEnd end) {
    PlanHeader& h = *p.header;
    if (threadIdx.x == 0) {
      if (!end.others_done) {
        end.fault = {LoadCoherent(&h.fault), LoadCoherent(&h.fault_at), LoadCoherent(&h.fault_got),
                     LoadCoherent(&h.fault_expected)};
        end.found = FindingsOf<kGeneral>(p);
      }
      end.fault = FirstFaultOf<kGeneral>(p, end.found, end.fault);
    }
    const bool faulty = __syncthreads_or(end.fault.code != kNoFault);
    if (faulty) {
#pragma unroll 1
      for (i32 cta = threadIdx.x; cta <= p.rules.num_ctas; cta += kNumThreads) {
        p.queue_indptr[cta] = 0;
      }
    }
    if (threadIdx.x != 0) return;
    if (faulty) {
      h = {};
      h.fault = end.fault.code;
      h.fault_at = end.fault.at;
      h.fault_got = end.fault.got;
      h.fault_expected = end.fault.expected;
      h.max_page_id = -1;
    } else {
      if constexpr (kGeneral) {
        h.num_steps = NumSteps(end.fault);
        h.fault_got = 0;
      }
      h.max_page_id = static_cast<i32>(static_cast<u32>(end.found.largest) - 1);
    }
    h.magic = faulty ? kFaultyPlanMagic : kPlanMagic;
    h.version = kPlanVersion;
  }
};

template <class Traits>
using PlanBody = PlanBodyOf<Traits, false>;
template <class Traits>
using GeneralPlanBody = PlanBodyOf<Traits, true>;

}  // namespace jax_attn
