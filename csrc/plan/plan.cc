#include "plan/plan.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "plan/prefix.h"
#include "plan/schedule.h"

namespace jax_attn {
namespace {

// Only pages that hold one of a request's kv_len tokens are looked at: the rest of its list is
// reserved space and may hold anything.
PlanFault CheckPages(const PlanRules& rules, const PlanInputs& in, int32_t* max_page_id) {
  const int64_t limit = PageIdLimit(rules);
  for (int64_t r = 0; r < in.batch_size; ++r) {
    const int64_t num_pages = NumPages(rules, in.kv_lens[r]);
    const int32_t* pages = in.page_indices + in.kv_indptr[r];
    uint32_t largest = 0;  // negative ids become larger than any limit
    for (int64_t i = 0; i < num_pages; ++i) {
      largest = std::max(largest, static_cast<uint32_t>(pages[i]));
    }
    if (num_pages > 0 && largest >= limit) {
      for (int64_t i = 0; i < num_pages; ++i) {
        if (static_cast<uint32_t>(pages[i]) >= limit) {
          return MakeFault(kFaultPageId, in.kv_indptr[r] + i, pages[i], r);
        }
      }
    }
    if (num_pages > 0) *max_page_id = std::max(*max_page_id, static_cast<int32_t>(largest));
  }
  return {};
}

PlanFault CheckInputs(const PlanRules& rules, const PlanInputs& in, int32_t* max_page_id) {
  PlanFault fault = CheckBatch(rules, in);
  for (int64_t r = 0; r < in.batch_size; ++r) {
    const PlanFault f = CheckRequest(rules, in, r);
    if (IsBefore(f, fault)) fault = f;
  }
  if (fault.code != kNoFault || rules.page_size == 0) return fault;
  return CheckPages(rules, in, max_page_id);
}

void MakeTiles(const PlanRules& rules, const PlanInputs& in, std::vector<QueryTile>* tiles) {
  tiles->clear();
  for (int64_t r = 0; r < in.batch_size; ++r) {
    const RequestLengths request = LengthsOf(in, r);
    const i32 num_tiles = NumTilesOf(rules, request.qo_len);
    for (i32 i = 0; i < num_tiles; ++i) {
      tiles->push_back(MakeTile(rules, request, static_cast<i32>(r), i));
    }
  }
}

}  // namespace

Status Plan(const AttentionProblem& problem, const PlanInputs& in, int32_t* buffer) {
  const AttentionSpec& spec = problem.spec;
  const PlanLayout layout = MakePlanLayout(problem);
  const PlanRules rules = MakePlanRules(problem);
  if (Status s = CheckBatchSize(problem, in.batch_size); !s.ok()) return s;
  int32_t max_page_id = -1;
  if (PlanFault f = CheckInputs(rules, in, &max_page_id); f.code) return DescribeFault(problem, f);

  PlanHeader header = {};
  header.magic = kPlanMagic;
  header.version = kPlanVersion;
  header.batch_size = static_cast<i32>(in.batch_size);
  header.nnz_qo = in.qo_indptr[in.batch_size];
  header.nnz_kv = in.kv_indptr[in.batch_size];
  header.max_page_id = max_page_id;

  thread_local Tiling flat, shared;
  MakeTiles(rules, in, &flat.tiles);
  const bool shares = SharePrefixes(problem, rules, in, flat.tiles, &shared);
  ScheduleOutput out;
  out.queue_indptr = buffer + layout.queue_indptr;
  out.items = reinterpret_cast<WorkItem*>(buffer + layout.items);
  out.merge_groups = reinterpret_cast<MergeGroup*>(buffer + layout.merge_groups);
  out.partial_rows = buffer + layout.partial_rows;
  out.qo_indices = buffer + layout.qo_indices;
  if (PlanFault f = WriteSchedule(rules, flat, shares ? &shared : nullptr, &out); f.code) {
    return DescribeFault(problem, f);
  }
  header.num_items = out.num_items;
  header.num_merge_groups = out.num_merge_groups;
  header.num_partials = out.num_partials;
  header.num_shared_tokens = out.num_shared_tokens;
  header.num_partial_rows = out.num_partial_rows;

  std::memcpy(buffer + layout.header, &header, sizeof(header));
  std::copy_n(in.qo_indptr, in.batch_size + 1, buffer + layout.qo_indptr);
  std::copy_n(in.kv_lens, in.batch_size, buffer + layout.kv_lens);
  std::copy_n(in.kv_indptr, in.batch_size + 1, buffer + layout.kv_indptr);
  if (spec.paged()) std::copy_n(in.page_indices, header.nnz_kv, buffer + layout.page_indices);
  return Status::Ok();
}

}  // namespace jax_attn
