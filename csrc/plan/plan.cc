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

std::string At(const char* name, int64_t i) {
  return std::string(name) + "[" + std::to_string(i) + "]";
}

Status Refuse(const std::string& argument, const std::string& expected, int64_t got) {
  return Status::Error("plan: " + argument + ": expected " + expected + ", got " +
                       std::to_string(got) + ".");
}

Status RefuseCapacity(const char* what, const char* capacity, int64_t max, int64_t need) {
  return Status::Error("plan: " + std::string(what) + ": expected at most " + capacity + " = " +
                       std::to_string(max) + ", got " + std::to_string(need) + "; raise " +
                       capacity + " of the AttentionSpec.");
}

Status CheckIndptr(const char* name, const int32_t* indptr, int64_t batch_size) {
  if (indptr[0] < 0) return Refuse(At(name, 0), "an offset >= 0", indptr[0]);
  for (int64_t r = 0; r < batch_size; ++r) {
    if (indptr[r + 1] < indptr[r]) {
      return Refuse(
          At(name, r + 1),
          "offsets that never decrease (" + At(name, r) + " is " + std::to_string(indptr[r]) + ")",
          indptr[r + 1]);
    }
  }
  return Status::Ok();
}

// Only pages that hold one of a request's kv_len tokens are looked at: the rest of its list is
// reserved space and may hold anything.
Status CheckPages(const AttentionSpec& spec, const PlanInputs& in, int32_t* max_page_id) {
  const int64_t limit = spec.num_pages >= 0 ? spec.num_pages : kMaxInt32 + 1;
  for (int64_t r = 0; r < in.batch_size; ++r) {
    const int64_t num_pages = (in.kv_lens[r] + spec.page_size - 1) / spec.page_size;
    const int64_t given = in.kv_indptr[r + 1] - in.kv_indptr[r];
    if (num_pages > given) {
      return Refuse("page_indptr: request " + std::to_string(r),
                    "at least " + std::to_string(num_pages) + " pages for kv_len " +
                        std::to_string(in.kv_lens[r]) + " at page_size " +
                        std::to_string(spec.page_size),
                    given);
    }
    const int32_t* pages = in.page_indices + in.kv_indptr[r];
    uint32_t largest = 0;  // negative ids become larger than any limit
    for (int64_t i = 0; i < num_pages; ++i) {
      largest = std::max(largest, static_cast<uint32_t>(pages[i]));
    }
    if (num_pages > 0 && largest >= limit) {
      for (int64_t i = 0; i < num_pages; ++i) {
        if (static_cast<uint32_t>(pages[i]) >= limit) {
          return Refuse(
              At("page_indices", in.kv_indptr[r] + i) + " of request " + std::to_string(r),
              spec.num_pages >= 0 ? "a page id in [0, " + std::to_string(spec.num_pages) + ")"
                                  : "a page id >= 0",
              pages[i]);
        }
      }
    }
    if (num_pages > 0) *max_page_id = std::max(*max_page_id, static_cast<int32_t>(largest));
  }
  return Status::Ok();
}

Status CheckInputs(const AttentionSpec& spec, const PlanInputs& in, int32_t* max_page_id) {
  if (in.batch_size > spec.max_batch) {
    return RefuseCapacity("batch_size", "max_batch", spec.max_batch, in.batch_size);
  }
  if (in.qo_indptr[0] != 0) return Refuse("qo_indptr[0]", "0", in.qo_indptr[0]);
  if (Status s = CheckIndptr("qo_indptr", in.qo_indptr, in.batch_size); !s.ok()) return s;
  if (in.qo_indptr[in.batch_size] > spec.max_qo_tokens) {
    return RefuseCapacity("qo_indptr[-1] (query tokens)", "max_qo_tokens", spec.max_qo_tokens,
                          in.qo_indptr[in.batch_size]);
  }
  const char* kv_indptr = spec.paged() ? "page_indptr" : "kv_indptr";
  if (Status s = CheckIndptr(kv_indptr, in.kv_indptr, in.batch_size); !s.ok()) return s;
  for (int64_t r = 0; r < in.batch_size; ++r) {
    if (in.kv_lens[r] < 0) return Refuse(At("kv_lens", r), "a length >= 0", in.kv_lens[r]);
    if (in.kv_lens[r] >= kPositionLimit) {
      return Refuse(At("kv_lens", r), "a length below 2^30", in.kv_lens[r]);
    }
    if (in.q_offsets == nullptr) continue;
    const int64_t offset = in.q_offsets[r];
    const int64_t end = offset + in.qo_indptr[r + 1] - in.qo_indptr[r];
    if (offset <= -kPositionLimit || end > kPositionLimit) {
      return Refuse(At("q_offsets", r), "query positions in (-2^30, 2^30)", offset);
    }
  }
  const int64_t nnz_kv = in.kv_indptr[in.batch_size];
  if (spec.paged()) {
    if (nnz_kv > spec.max_kv_pages) {
      return RefuseCapacity("page_indptr[-1] (pages)", "max_kv_pages", spec.max_kv_pages, nnz_kv);
    }
    if (nnz_kv > in.num_page_indices) {
      return Refuse("page_indices",
                    "at least page_indptr[-1] = " + std::to_string(nnz_kv) + " entries",
                    in.num_page_indices);
    }
    return CheckPages(spec, in, max_page_id);
  }
  if (nnz_kv > spec.max_kv_tokens) {
    return RefuseCapacity("kv_indptr[-1] (rows of k, v)", "max_kv_tokens", spec.max_kv_tokens,
                          nnz_kv);
  }
  for (int64_t r = 0; r < in.batch_size; ++r) {
    const int64_t rows = in.kv_indptr[r + 1] - in.kv_indptr[r];
    if (in.kv_lens[r] > rows) {
      return Refuse(At("kv_lens", r), "at most the request's rows of k, v, " + std::to_string(rows),
                    in.kv_lens[r]);
    }
  }
  return Status::Ok();
}

void MakeTiles(const PlanRules& rules, const PlanInputs& in, std::vector<QueryTile>* tiles) {
  tiles->clear();
  for (int64_t r = 0; r < in.batch_size; ++r) {
    RequestLengths request;
    request.qo_begin = in.qo_indptr[r];
    request.qo_len = in.qo_indptr[r + 1] - in.qo_indptr[r];
    request.kv_len = in.kv_lens[r];
    request.kv_base = in.kv_indptr[r];
    request.q_offset = in.q_offsets != nullptr ? in.q_offsets[r] : request.kv_len - request.qo_len;
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
  int32_t max_page_id = -1;
  if (Status s = CheckInputs(spec, in, &max_page_id); !s.ok()) return s;

  PlanHeader header = {};
  header.magic = kPlanMagic;
  header.version = kPlanVersion;
  header.batch_size = static_cast<i32>(in.batch_size);
  header.nnz_qo = in.qo_indptr[in.batch_size];
  header.nnz_kv = in.kv_indptr[in.batch_size];
  header.max_page_id = max_page_id;

  const PlanRules rules = MakePlanRules(problem);
  thread_local Tiling flat, shared;
  MakeTiles(rules, in, &flat.tiles);
  const bool shares = SharePrefixes(problem, rules, in, flat.tiles, &shared);
  ScheduleOutput out;
  out.queue_indptr = buffer + layout.queue_indptr;
  out.items = reinterpret_cast<WorkItem*>(buffer + layout.items);
  out.merge_groups = reinterpret_cast<MergeGroup*>(buffer + layout.merge_groups);
  out.partial_rows = buffer + layout.partial_rows;
  out.qo_indices = buffer + layout.qo_indices;
  if (Status s = WriteSchedule(rules, flat, shares ? &shared : nullptr, &out); !s.ok()) return s;
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
