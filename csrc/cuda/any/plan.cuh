// The planner inside the graph. Follows plan/rules.h and writes the bits that plan/schedule.cc
// does.
//
// CTA 0 schedules; the others check page ids and copy them into the plan, which is most of its
// bytes. The CTA that finishes last writes the header, mostly CTA 0, which has seen the others done
// before. A batch that the host planner would refuse leaves a faulty plan: kFaultyPlanMagic, no
// items, and the fault in the header.
//
// The scheduler is one class in layers, a file each, every layer over the one before:
//   plan_cta      what a whole CTA does at once: memory, sums, sorting
//   plan_tiles    requests checked, their tiles, cuts and costs
//   plan_trials   ways to cut: chunks, in the order in which queues take them
//   plan_deal     chunks to queues
//   plan_ranges   stream-K
//   plan_steps    step lists
//   plan_choice   which schedule
//   plan_results  counts, merge groups, items
// Beside it: prefix (shared prefixes), plan_pages (what the other CTAs do).
//
// Everything is done by all threads at once but one thing: each chunk goes to the queue that has
// the least then. All kv heads have the same lengths, so that is a few hundred chunks for the 33
// queues of a head (H200), held in the registers of four warps, while the others prepare the items
// but for their places.
#pragma once

#include "cuda/any/plan_pages.cuh"
#include "cuda/any/plan_results.cuh"

namespace jax_attn {

template <class Traits, bool kGeneral>
class PlanScheduler : PlanResults<Traits, kGeneral> {
  using Base = PlanResults<Traits, kGeneral>;

 public:
  using Base::Base;

  // Writes everything but the header's magic, version, max_page_id and num_steps. Returns the
  // fault, and, of a batch without one, in its `got` the number of steps, and whether the other
  // CTAs were seen done, and what they found.
  struct End {
    PlanFault fault;
    bool others_done;
    PageFindings found;
  };
  __device__ End Run() {
    PlanFault fault = Check();
    if constexpr (kGeneral) {
      if (fault.code == kNoFault) fault = CheckLevels();
    }
    PlanCounts counts = {};
    if (fault.code == kNoFault) fault = MakeTiles();
    if constexpr (kGeneral) {
      if (fault.code == kNoFault && rules_.max_steps > 0) fault = ListSteps();
    }
    if (fault.code == kNoFault) {
      if constexpr (kGeneral) {
        fault = ChooseGeneral();
        if (fault.code == kNoFault) counts = Count();
      } else {
        const auto prepare = [&] {
          const PlanCounts n = Count();
          if (thread_ == 0) shared_.counts = n;
          TakeRecords();
        };
        fault = Choose(prepare, [&](i32 first, i32 step) { MakeRecords(first, step); });
        if (fault.code == kNoFault) counts = shared_.counts;
      }
      if (fault.code == kNoFault) fault = CheckCapacities(rules_, counts);
      if (fault.code == kNoFault) Write(counts);
      if constexpr (kGeneral) {
        if (fault.code == kNoFault) fault.got = num_steps_;
      }
    }
    if (thread_ == 0) {
      PlanHeader& h = *p_.header;
      h.fault = fault.code;
      h.fault_at = fault.at;
      h.fault_got = fault.got;
      h.fault_expected = fault.expected;
      h.batch_size = static_cast<i32>(in_.batch_size);
      h.nnz_qo = in_.qo_indptr[in_.batch_size];
      h.nnz_kv = in_.kv_indptr[in_.batch_size];
      h.num_items = static_cast<i32>(counts.num_items);
      h.num_merge_groups = static_cast<i32>(counts.num_merge_groups);
      h.num_partials = static_cast<i32>(counts.num_partials);
      h.num_partial_rows = static_cast<i32>(counts.num_partial_rows);
      if constexpr (kGeneral) h.num_shared_tokens = num_shared_tokens_;
    }
    if (fault.code != kNoFault) return {fault, false, {}};
    return {fault, shared_.others_done, shared_.found};
  }

 private:
  using Base::Check, Base::CheckLevels, Base::Choose, Base::ChooseGeneral, Base::Count,
      Base::ListSteps, Base::MakeRecords, Base::TakeRecords, Base::in_, Base::MakeTiles,
      Base::num_shared_tokens_, Base::num_steps_, Base::p_, Base::rules_, Base::shared_,
      Base::thread_, Base::Write;
};

// --- the kernel ---

template <class Traits, bool kGeneral>
struct PlanBodyOf {
  static constexpr int kNumThreads = Traits::kNumThreads;
  static constexpr int kSmemBytes = Traits::kSmemBytes;
  static constexpr int kMinCtasPerSm = 1;

  __device__ __forceinline__ static void Run(const PlanParams& p) {
    extern __shared__ __align__(128) unsigned char smem[];
    typename PlanScheduler<Traits, kGeneral>::End end = {};
    if (blockIdx.x == 0) {
      end = PlanScheduler<Traits, kGeneral>(p, smem).Run();
    } else {
      CopyPages<kGeneral>(p);
    }
    if (!end.others_done) {
      __syncthreads();
      // `magic` counts arrivals until then.
      const bool last = threadIdx.x == 0 &&
                        AddAcquireRelease(&p.header->magic, 1) == static_cast<i32>(gridDim.x) - 1;
      if (!__syncthreads_or(last)) return;
    }
    Finish(p, end);
  }

  template <class End>
  __device__ __forceinline__ static void Finish(const PlanParams& p, End end) {
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
        h.num_steps = end.fault.got;
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
