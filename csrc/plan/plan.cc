#include "plan/plan.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "plan/prefix.h"
#include "plan/rules/checks.h"
#include "plan/rules/prefix_levels.h"
#include "plan/schedule.h"

namespace jax_attn {
namespace {

// Largest value as unsigned, so that negative ids are larger than any limit. Several maxima,
// because each step of one chain would wait for the previous one.
inline __attribute__((always_inline)) uint32_t LargestOf(const int32_t* ids, int64_t n) {
  constexpr int kLanes = 32;
  uint32_t largest[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      largest[lane] = std::max(largest[lane], static_cast<uint32_t>(ids[i + lane]));
    }
  }
  for (; i < n; ++i) largest[0] = std::max(largest[0], static_cast<uint32_t>(ids[i]));
  return *std::max_element(largest, largest + kLanes);
}

#if defined(__x86_64__)  // baseline x86-64 has no 32-bit maximum
__attribute__((target("avx2"))) uint32_t LargestByAvx2(const int32_t* ids, int64_t n) {
  return LargestOf(ids, n);
}
#endif

uint32_t LargestId(const int32_t* ids, int64_t n) {
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2");
  if (has_avx2) return LargestByAvx2(ids, n);
#endif
  return LargestOf(ids, n);
}

PlanFault FirstBadPage(const PlanRules& rules, const PlanInputs& in) {
  const int64_t limit = PageIdLimit(rules);
  for (int64_t r = 0; r < in.batch_size; ++r) {
    const int32_t begin = in.kv_indptr[r], end = begin + NumPages(rules, in.kv_lens[r]);
    for (int32_t i = begin; i < end; ++i) {
      const int32_t id = in.page_indices[i];
      if (static_cast<uint32_t>(id) >= limit) return MakeFault(kFaultPageId, i, id, r);
    }
  }
  return {};
}

// Checks only pages that hold one of a request's kv_len tokens: the rest of its list is reserved
// space and may hold anything. Requests whose pages are contiguous form one run.
PlanFault CheckPages(const PlanRules& rules, const PlanInputs& in, int32_t* max_page_id) {
  uint32_t largest = 0;
  int64_t num_pages = 0;
  for (int64_t r = 0; r < in.batch_size;) {
    const int32_t begin = in.kv_indptr[r];
    int32_t end = begin;
    do {
      end += NumPages(rules, in.kv_lens[r]);
      ++r;
    } while (r < in.batch_size && in.kv_indptr[r] == end);
    largest = std::max(largest, LargestId(in.page_indices + begin, end - begin));
    num_pages += end - begin;
  }
  if (largest >= PageIdLimit(rules)) return FirstBadPage(rules, in);
  if (num_pages > 0) *max_page_id = static_cast<int32_t>(largest);
  return {};
}

PlanFault CheckLevels(const PlanInputs& in, const PrefixLevels& levels) {
  PlanFault fault = {};
  for (i32 level = 0; level < levels.num_levels; ++level) {
    for (i32 i = 0; i <= levels.num_prefixes; ++i) {
      const PlanFault f = CheckBorder(in, levels, level, i);
      if (IsBefore(f, fault)) fault = f;
    }
  }
  if (fault.code != kNoFault) return fault;
  for (int64_t r = 0; r < in.batch_size && levels.num_levels > 0; ++r) {
    const PlanFault f = CheckPrefixLens(in, levels, r);
    if (IsBefore(f, fault)) fault = f;
  }
  return fault;
}

PlanFault CheckPrefixPages(const PlanRules& rules, const PlanInputs& in,
                           const PrefixLevels& levels) {
  for (i32 r = 1; r < in.batch_size; ++r) {
    const CommonPages common = CommonPagesOf(rules, in, levels, r);
    if (common.num_pages == 0) continue;
    const i32 *mine = in.page_indices + in.kv_indptr[r],
              *theirs = in.page_indices + in.kv_indptr[common.request];
    const auto at = std::mismatch(mine, mine + common.num_pages, theirs);
    if (at.first == mine + common.num_pages) continue;
    return MakeFault(kFaultPrefixPages, at.first - in.page_indices, *at.first, *at.second);
  }
  return {};
}

PlanFault MakeTiles(const PlanRules& rules, const PlanInputs& in, std::vector<QueryTile>* tiles) {
  int64_t num_tiles = 0;
  for (int64_t r = 0; r < in.batch_size; ++r) {
    num_tiles += NumTilesOf(rules, in.qo_indptr[r + 1] - in.qo_indptr[r]);
  }
  if (PlanFault f = CheckTiles(rules, num_tiles); f.code) return f;
  tiles->resize(num_tiles);
  QueryTile* next = tiles->data();
  int64_t coarse_cost = 0;
  for (int64_t r = 0; r < in.batch_size; ++r) {
    const RequestLengths request = LengthsOf(in, r);
    const i32 num_tiles_of_request = NumTilesOf(rules, request.qo_len);
    for (i32 i = 0; i < num_tiles_of_request; ++i) {
      *next = MakeTile(rules, request, static_cast<i32>(r), i);
      coarse_cost += CoarseSpanCost(*next++);
    }
  }
  return CheckCost(rules, coarse_cost);
}

// Makes the step lists of a batch's tiles, and `shared` with its own lists. shares: whether there
// are shared tiles. Their lists are not longer, as they hold once what each of their requests has.
PlanFault MakeLists(const AttentionProblem& problem, const PlanRules& rules, const PlanInputs& in,
                    const PrefixLevels* levels, const BlockMap& map, Tiling* flat, int32_t* steps,
                    int32_t* num_steps, Tiling* shared, std::vector<int32_t>* shared_steps,
                    bool* shares) {
  thread_local std::vector<QueryTile> spans;
  thread_local std::vector<int32_t> seen_ends;
  spans = flat->tiles;
  seen_ends.clear();
  PlanFault f = ListSteps(rules, map, flat, steps, num_steps, &seen_ends);
  if (f.code) return f;
  *shares = SharePrefixes(problem, rules, in, levels, spans, &seen_ends, shared);
  if (!*shares) return {};
  PlanRules bounded = rules;
  bounded.max_steps = *num_steps;
  shared_steps->resize(*num_steps);
  int32_t num_shared_steps = 0;
  f = ListSteps(bounded, map, shared, shared_steps->data(), &num_shared_steps, nullptr);
  shared_steps->resize(num_shared_steps);
  return f;
}

// Zeroes everything after the live part of each section, so that equal plans are equal words.
void ZeroPadding(const PlanLayout& layout, const PlanHeader& header, int64_t num_ctas,
                 int64_t nnz_page_indices, int32_t* buffer) {
  int32_t* live_end = buffer;
  const auto section = [&](int64_t begin, int64_t num_words) {
    std::fill(live_end, buffer + begin, 0);
    live_end = buffer + begin + num_words;
  };
  section(layout.header, sizeof(PlanHeader) / 4);
  section(layout.queue_indptr, num_ctas + 1);
  section(layout.qo_indptr, header.batch_size + 1);
  section(layout.kv_lens, header.batch_size);
  section(layout.kv_indptr, header.batch_size + 1);
  section(layout.merge_groups, header.num_merge_groups * int64_t{sizeof(MergeGroup) / 4});
  section(layout.partial_rows, header.num_partials);
  section(layout.qo_indices, header.num_shared_tokens);
  section(layout.items, header.num_items * int64_t{sizeof(WorkItem) / 4});
  section(layout.page_indices, nnz_page_indices);
  section(layout.steps, header.num_steps);
  section(layout.num_words, 0);
}

}  // namespace

PlanFault CheckInputs(const PlanRules& rules, const PlanInputs& in, int32_t* max_page_id) {
  PlanFault fault = CheckBatch(rules, in);
  for (int64_t r = 0; r < in.batch_size; ++r) {
    const PlanFault f = CheckRequest(rules, in, r);
    if (IsBefore(f, fault)) fault = f;
  }
  if (fault.code != kNoFault || rules.page_size == 0) return fault;
  return CheckPages(rules, in, max_page_id);
}

Status Plan(const AttentionProblem& problem, const PlanInputs& in, const PrefixLevels* levels,
            int32_t* buffer, const BlockMap* map) {
  const AttentionSpec& spec = problem.spec;
  const PlanLayout layout = MakePlanLayout(problem);
  const PlanRules rules = MakePlanRules(problem);
  JAX_ATTN_RETURN_IF_ERROR(CheckBatchSize(problem, in.batch_size));
  JAX_ATTN_RETURN_IF_ERROR(CheckBlockMap(problem, map));
  int32_t max_page_id = -1;
  if (PlanFault f = CheckInputs(rules, in, &max_page_id); f.code) return DescribeFault(problem, f);
  if (levels != nullptr) {
    if (PlanFault f = CheckLevels(in, *levels); f.code) return DescribeFault(problem, f);
  }

  PlanHeader header = {};
  header.magic = kPlanMagic;
  header.version = kPlanVersion;
  header.batch_size = static_cast<i32>(in.batch_size);
  header.nnz_qo = in.qo_indptr[in.batch_size];
  header.nnz_kv = in.kv_indptr[in.batch_size];
  header.max_page_id = max_page_id;

  thread_local Tiling flat, shared;
  if (PlanFault f = MakeTiles(rules, in, &flat.tiles); f.code) return DescribeFault(problem, f);
  thread_local std::vector<int32_t> shared_steps;
  int32_t* const steps = buffer + layout.steps;
  bool shares = false;
  if (map == nullptr) {
    shares = SharePrefixes(problem, rules, in, levels, flat.tiles, nullptr, &shared);
  } else {
    PlanFault f = MakeLists(problem, rules, in, levels, *map, &flat, steps, &header.num_steps,
                            &shared, &shared_steps, &shares);
    if (f.code && levels != nullptr) {
      const PlanFault pages = CheckPrefixPages(rules, in, *levels);
      if (IsBefore(pages, f)) f = pages;
    }
    if (f.code) return DescribeFault(problem, f);
  }
  ScheduleOutput out;
  out.queue_indptr = buffer + layout.queue_indptr;
  out.items = reinterpret_cast<WorkItem*>(buffer + layout.items);
  out.merge_groups = reinterpret_cast<MergeGroup*>(buffer + layout.merge_groups);
  out.partial_rows = buffer + layout.partial_rows;
  out.qo_indices = buffer + layout.qo_indices;
  if (PlanFault f = WriteSchedule(rules, flat, shares ? &shared : nullptr, &out); f.code) {
    return DescribeFault(problem, f);
  }
  if (map != nullptr && out.shares) {
    header.num_steps = static_cast<i32>(shared_steps.size());
    std::copy(shared_steps.begin(), shared_steps.end(), steps);
  }
  if (levels != nullptr) {
    if (PlanFault f = CheckPrefixPages(rules, in, *levels); f.code)
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
  const int64_t nnz_page_indices = spec.paged() ? header.nnz_kv : 0;
  std::copy_n(in.page_indices, nnz_page_indices, buffer + layout.page_indices);
  ZeroPadding(layout, header, rules.num_ctas, nnz_page_indices, buffer);
  return Status::Ok();
}

}  // namespace jax_attn
