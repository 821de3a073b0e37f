#include <string>

#include "plan/plan.h"
#include "plan/rules/integers.h"

namespace jax_attn {
namespace {

std::string At(const char* name, int64_t i) {
  return std::string(name) + "[" + std::to_string(i) + "]";
}

std::string Refuse(const std::string& argument, const std::string& expected, int64_t got) {
  return "plan: " + argument + ": expected " + expected + ", got " + std::to_string(got) + ".";
}

std::string RefuseCapacity(const char* what, const char* capacity, int64_t max, int64_t need) {
  return "plan: " + std::string(what) + ": expected at most " + capacity + " = " +
         std::to_string(max) + ", got " + std::to_string(need) + "; raise " + capacity +
         " of the AttentionSpec.";
}

std::string LevelOf(const PlanFault& f) { return At("prefix_levels", f.at % kMaxLevels); }

std::string Borders(const PlanFault& f) {
  return LevelOf(f) + " " + At("request_indptr", f.at / kMaxLevels);
}

std::string RefuseOrder(const char* name, const PlanFault& f) {
  return Refuse(At(name, f.at),
                "offsets that never decrease (" + At(name, f.at - 1) + " is " +
                    std::to_string(f.expected) + ")",
                f.got);
}

}  // namespace

Status CheckBatchSize(const AttentionProblem& problem, int64_t batch_size) {
  const int64_t max_batch = problem.spec.max_batch;
  if (batch_size <= max_batch) return Status::Ok();
  return {RefuseCapacity("batch_size", "max_batch", max_batch, batch_size)};
}

Status DescribeFault(const AttentionProblem& problem, const PlanFault& f) {
  const AttentionSpec& spec = problem.spec;
  const KernelConfig& config = problem.config;
  const char* kv_indptr = spec.paged() ? "page_indptr" : "kv_indptr";
  switch (f.code) {
    case kNoFault:
      return Status::Ok();
    case kFaultQoIndptrBegin:
      return {Refuse("qo_indptr[0]", "0", f.got)};
    case kFaultQoIndptrOrder:
      return {RefuseOrder("qo_indptr", f)};
    case kFaultQoTokens:
      return {RefuseCapacity("qo_indptr[-1] (query tokens)", "max_qo_tokens", spec.max_qo_tokens,
                             f.got)};
    case kFaultKvIndptrBegin:
      return {Refuse(At(kv_indptr, 0), "an offset >= 0", f.got)};
    case kFaultKvIndptrOrder:
      return {RefuseOrder(kv_indptr, f)};
    case kFaultKvLenNegative:
      return {Refuse(At("kv_lens", f.at), "a length >= 0", f.got)};
    case kFaultKvLenTooLarge:
      return {Refuse(At("kv_lens", f.at), "a length below 2^30", f.got)};
    case kFaultQueryPositions:
      return {Refuse(At("q_offsets", f.at) + " (kv_len - qo_len unless given)",
                     "query positions in (-2^30, 2^30)", f.got)};
    case kFaultKvCapacity:
      if (spec.paged()) {
        return {
            RefuseCapacity("page_indptr[-1] (pages)", "max_kv_pages", spec.max_kv_pages, f.got)};
      }
      return {RefuseCapacity("kv_indptr[-1] (rows of k, v)", "max_kv_tokens", spec.max_kv_tokens,
                             f.got)};
    case kFaultPageIndices:
      return {Refuse("page_indices",
                     "at least page_indptr[-1] = " + std::to_string(f.expected) + " entries",
                     f.got)};
    case kFaultKvOfRequest:
      if (!spec.paged()) {
        return {Refuse(At("kv_lens", f.at),
                       "at most the request's rows of k, v, " + std::to_string(f.expected), f.got)};
      }
      return {Refuse("page_indptr: request " + std::to_string(f.at),
                     "at least " + std::to_string(CeilDivide(f.expected, spec.page_size)) +
                         " pages for kv_len " + std::to_string(f.expected) + " at page_size " +
                         std::to_string(spec.page_size),
                     f.got)};
    case kFaultPageId:
      return {Refuse(At("page_indices", f.at) + " of request " + std::to_string(f.expected),
                     spec.num_pages >= 0
                         ? "a page id in [0, " + std::to_string(spec.num_pages) + ")"
                         : "a page id >= 0",
                     f.got)};
    case kFaultTiles:
      return {Refuse("qo_indptr", "fewer than 2^25 query tiles; plan fewer query tokens at a time",
                     f.got)};
    case kFaultCost:
      return {
          "plan: kv_lens: expected at most 2^49 kv tokens to be read by all query tiles and kv "
          "heads, got " +
          std::to_string(f.got) + " * 2^32; plan fewer query tokens at a time."};
    case kFaultChunks:
      return {Refuse("kv_lens",
                     "fewer than 2^26 chunks of kv_split = " + std::to_string(spec.kv_split) +
                         " tokens; raise kv_split of the AttentionSpec",
                     f.got)};
    case kFaultItems:
      return {RefuseCapacity("work items", "max_items", config.max_items, f.got)};
    case kFaultMergeGroups:
      return {RefuseCapacity("merge groups", "max_items", config.max_items, f.got)};
    case kFaultPartials:
      return {RefuseCapacity("partial states", "max_items", config.max_items, f.got)};
    case kFaultPartialRows:
      return {RefuseCapacity("rows of partial states", "max_partial_rows", config.max_partial_rows,
                             f.got)};
    case kFaultPrefixBegin:
      return {Refuse(Borders(f), "0", f.got)};
    case kFaultPrefixOrder:
      return {Refuse(
          Borders(f),
          "offsets that never decrease (the one before is " + std::to_string(f.expected) + ")",
          f.got)};
    case kFaultPrefixEnd:
      return {Refuse(Borders(f), "batch_size = " + std::to_string(f.expected), f.got)};
    case kFaultPrefixNesting:
      return {Refuse(LevelOf(f) + " request_indptr",
                     "every border of the level before, such as " + std::to_string(f.expected),
                     f.got)};
    case kFaultPrefixLen:
      return {Refuse(LevelOf(f) + " prefix_lens: request " + std::to_string(f.at / kMaxLevels),
                     "0 to its kv_len = " + std::to_string(f.expected) + " tokens", f.got)};
    case kFaultPrefixPages:
      return {Refuse(At("page_indices", f.at),
                     "page " + std::to_string(f.expected) +
                         ", as in the request before with the same prefix (prefix_levels)",
                     f.got)};
    case kFaultMapColumns:
      return {Refuse(
          "block_map: request " + std::to_string(f.at),
          "columns for the " + std::to_string(f.expected) + " positions that its queries may see",
          f.got)};
    case kFaultSteps:
      return {RefuseCapacity("entries of step lists", "max_steps", spec.max_steps, f.got)};
    default:
      return {"plan: fault " + std::to_string(f.code) + " of another version of jax_attn."};
  }
}

}  // namespace jax_attn
