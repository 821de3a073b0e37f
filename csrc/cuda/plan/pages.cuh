// The device planner checks page ids and copies them into the plan.
#pragma once

#include "cuda/common/math.cuh"
#include "plan/rules/checks.h"

namespace jax_attn {

// The request whose page table has entry `at` of page_indices.
__device__ __forceinline__ i32 RequestOfPage(const PlanInputs& in, i32 at) {
  return LastAtMost(in.kv_indptr, static_cast<i32>(in.batch_size), at);
}

__device__ __forceinline__ bool HasLevels(const PlanParams& p) { return p.levels.num_levels > 0; }

// CommonPagesOf, for levels that may be wrong.
__device__ __noinline__ CommonPages CommonPagesWithin(const PlanParams& p, i32 request) {
  if (!HasLevels(p)) return {0, 0};
  return CommonPagesOf(p.rules, p.inputs, p.levels, request);
}

// Results of CTAs 1 and up.
struct PageFindings {
  i32 largest;      // largest id + 1
  i32 first_bad;    // complement of the first entry out of range; 0: none
  i32 first_other;  // with levels: the same for entries that differ from the request before
};

// Words of the header have other meanings until the last CTA writes it. All are 0 at entry.
struct UnwrittenHeader {
  __device__ static i32* NumDone(PlanHeader* h) {
    return &h->magic;
  }  // number of CTAs that are done
  // PageFindings.
  __device__ static i32* Largest(PlanHeader* h) { return &h->max_page_id; }
  __device__ static i32* FirstBad(PlanHeader* h) { return &h->version; }
  __device__ static i32* FirstOther(PlanHeader* h) { return &h->num_steps; }
};

// The number of steps is returned in the fault's place if there is none.
__device__ __forceinline__ i32& NumSteps(PlanFault& no_fault) { return no_fault.got; }

// Called when all of them are done.
template <bool kGeneral>
__device__ __forceinline__ PageFindings FindingsOf(const PlanParams& p) {
  using Words = UnwrittenHeader;
  return {LoadCoherent(Words::Largest(p.header)), LoadCoherent(Words::FirstBad(p.header)),
          kGeneral ? LoadCoherent(Words::FirstOther(p.header)) : 0};
}

// The first fault, of pages and `fault`.
template <bool kGeneral>
__device__ __forceinline__ PlanFault FirstFaultOf(const PlanParams& p, const PageFindings& found,
                                                  PlanFault fault) {
  if (found.first_bad != 0) {
    const i32 at = ~found.first_bad;
    const PlanFault page =
        MakeFault(kFaultPageId, at, p.inputs.page_indices[at], RequestOfPage(p.inputs, at));
    if (IsBefore(page, fault)) fault = page;
  }
  if (kGeneral && found.first_other != 0) {
    const i32 at = ~found.first_other;
    const i32 request = RequestOfPage(p.inputs, at);
    const CommonPages common = CommonPagesWithin(p, request);
    const i64 other = i64{p.inputs.kv_indptr[common.request]} + at - p.inputs.kv_indptr[request];
    const PlanFault page =
        MakeFault(kFaultPrefixPages, at, p.inputs.page_indices[at], p.inputs.page_indices[other]);
    if (IsBefore(page, fault)) fault = page;
  }
  return fault;
}

template <bool kGeneral>
__device__ __forceinline__ void CopyPages(const PlanParams& p) {
  const PlanInputs& in = p.inputs;
  const i32 batch_size = static_cast<i32>(in.batch_size);
  const i64 limit = PageIdLimit(p.rules);
  const i64 capacity = Least(p.rules.max_kv, in.num_page_indices);
  const i32 count = static_cast<i32>(Largest(0, Least(capacity, in.kv_indptr[batch_size])));
  u32 largest = 0, first_bad = 0;
  const i64 step = 4ll * (gridDim.x - 1) * blockDim.x;
#pragma unroll 1
  for (i64 base = 4ll * ((blockIdx.x - 1) * blockDim.x + threadIdx.x); base < count; base += step) {
    const i32 at = static_cast<i32>(base);
    i32 ids[4];
    const i32 num = Min(4, count - at);
    if (num == 4) {
      const uint4 v = LoadConstant16(in.page_indices + at);
      *reinterpret_cast<uint4*>(p.page_indices + at) = v;
      ids[0] = static_cast<i32>(v.x);
      ids[1] = static_cast<i32>(v.y);
      ids[2] = static_cast<i32>(v.z);
      ids[3] = static_cast<i32>(v.w);
    } else {
#pragma unroll
      for (i32 j = 0; j < 3; ++j) {
        if (j >= num) continue;
        ids[j] = in.page_indices[at + j];
        p.page_indices[at + j] = ids[j];
      }
    }
    if (batch_size == 0) continue;
    i32 request = RequestOfPage(in, at);
    CommonPages common = {};
    if constexpr (kGeneral) common = CommonPagesWithin(p, request);
#pragma unroll
    for (i32 j = 0; j < 4; ++j) {
      if (j >= num) continue;
#pragma unroll 1
      while (request + 1 < batch_size && in.kv_indptr[request + 1] <= at + j) {
        ++request;
        if constexpr (kGeneral) common = CommonPagesWithin(p, request);
      }
      const i64 mine = static_cast<i64>(at) + j - in.kv_indptr[request];
      if (mine < 0 || mine >= NumPages(p.rules, in.kv_lens[request])) continue;
      const u32 id = static_cast<u32>(ids[j]);
      if constexpr (kGeneral) {
        const i64 other = mine < common.num_pages ? in.kv_indptr[common.request] + mine : at + j;
        if (other >= 0 && other < count && in.page_indices[other] != ids[j]) {
          MaxRelaxed(UnwrittenHeader::FirstOther(p.header), ~static_cast<u32>(at + j));
        }
      }
      if (id < limit) {
        largest = largest > id + 1 ? largest : id + 1;
      } else {
        const u32 complement = ~static_cast<u32>(at + j);
        first_bad = first_bad > complement ? first_bad : complement;
      }
    }
  }
  largest = WarpMax(largest);
  first_bad = WarpMax(first_bad);
  if (threadIdx.x % kWarpSize != 0) return;
  if (largest > 0) MaxRelaxed(UnwrittenHeader::Largest(p.header), largest);
  if (first_bad > 0) MaxRelaxed(UnwrittenHeader::FirstBad(p.header), first_bad);
}

}  // namespace jax_attn
