// The planner: lengths and page tables in, a list of work in one int32 buffer out.
//
// Pure C++: no CUDA, no XLA, no policy of its own beyond the numbers in KernelConfig.
#pragma once

#include <cstdint>
#include <vector>

#include "spec.h"
#include "status.h"

namespace jax_attn {

// Where the sections of a plan buffer start, in int32 words. Depends on capacities alone.
struct PlanLayout {
  int64_t header = 0;        // PlanHeader
  int64_t queue_indptr = 0;  // [num_ctas + 1]
  int64_t qo_indptr = 0;     // [max_batch + 1]
  int64_t kv_lens = 0;       // [max_batch]
  int64_t kv_indptr = 0;     // [max_batch + 1] pages (page_indptr) or, ragged, first rows
  int64_t merge_groups = 0;  // MergeGroup [max_merge_groups]
  int64_t partial_rows = 0;  // [max_partials]
  int64_t qo_indices = 0;    // [max_shared_tokens]
  int64_t items = 0;         // WorkItem [max_items]
  int64_t page_indices = 0;  // [max_kv_pages]
  int64_t steps = 0;         // [max_steps], see WorkItem
  int64_t num_words = 0;
};
PlanLayout MakePlanLayout(const AttentionProblem& problem);

// Sizes of the workspace of one attention call, in 4-byte words.
struct WorkspaceLayout {
  int64_t merge_counters = 0;  // i32 [max_merge_groups]
  int64_t partial_states = 0;  // RowState [max_partial_rows]
  int64_t partial_o = 0;       // f32 [max_partial_rows, head_dim_vo]
  int64_t item_times = 0;      // i64 [max_items, 2], with record_times
  int64_t num_words = 0;
};
WorkspaceLayout MakeWorkspaceLayout(const AttentionProblem& problem);

// The rules that the planners of this problem follow.
PlanRules MakePlanRules(const AttentionProblem& problem);
SharingRules MakeSharingRules(const AttentionProblem& problem);

// Bytes of scratch that the device planner may need, cuda/plan/plan.cuh. num_prefixes: of each
// level; map: null without step lists, its classes are not read.
int64_t PlanScratchBytes(const AttentionProblem& problem, int64_t num_levels, int64_t num_prefixes,
                         const BlockMap* map = nullptr);

// Arguments of the device planner. levels: null if none are told; plan: [layout.num_words], zeros;
// scratch: of PlanScratchBytes; map: null without step lists.
PlanParams MakePlanParams(const AttentionProblem& problem, const PlanInputs& inputs,
                          const PrefixLevels* levels, i32* plan, void* scratch,
                          const BlockMap* map = nullptr);

// num_pages: of a layer's pool; 1 when ragged.
PlanLimits MakePlanLimits(const AttentionProblem& problem, int64_t num_pages);

// Of an attention call all that its problem and its plan determine: operands, results, workspace
// and the sizes of k, v are left to the caller. plan: [layout.num_words].
AttentionParams MakeAttentionParams(const AttentionProblem& problem, const i32* plan);

// 4-byte words of workspace of a backward pass on CUDA devices, aligned to 16 bytes. num_pages: of
// a layer's pool.
int64_t BackwardWorkspaceWords(const AttentionProblem& problem, int64_t num_pages);

// How many of them, the first ones, are 0 at entry.
int64_t BackwardZeroWords(const AttentionProblem& problem, int64_t num_pages);

// Of a backward pass on CUDA devices all but lse, d, d_o and the results. forward: with operands.
// workspace: of BackwardWorkspaceWords.
BackwardCudaParams MakeBackwardParams(const AttentionProblem& problem,
                                      const AttentionParams& forward, const i32* plan,
                                      i32* workspace);

// Of a valid spec (plan/check.h). Capacities that hold any batch within max_batch, max_qo_tokens
// (and for kFixedSplit any decode batch within the kv capacity); a nonzero value set by the user is
// kept.
void FillCapacities(AttentionProblem* problem);

struct Tiling;  // plan/schedule.h

// Refuses a map that does not fit the problem, or none where there should be one.
Status CheckBlockMap(const AttentionProblem& problem, const BlockMap* map);

// Writes the lists of steps that tiles need, and replaces the spans of `tiles` by ranges of these.
// Tiles of shared prefixes (plan/schedule.h) have all steps of their spans, without the mask.
// seen_ends: null, or what becomes of each tile the end of the leading positions of which the map
// hides none from its rows.
PlanFault ListSteps(const PlanRules& rules, const BlockMap& map, Tiling* tiling, int32_t* steps,
                    int32_t* num_steps, std::vector<int32_t>* seen_ends);

// Refuses a batch of more requests than max_batch.
Status CheckBatchSize(const AttentionProblem& problem, int64_t batch_size);

// The first fault of a batch, prefix levels apart. max_page_id: of all that its kv_lens need, where
// there is one.
PlanFault CheckInputs(const PlanRules& rules, const PlanInputs& inputs, int32_t* max_page_id);

// "plan: argument: expected ..., got ..." of a fault; ok for kNoFault.
Status DescribeFault(const AttentionProblem& problem, const PlanFault& fault);

// Writes all of buffer[0, layout.num_words). On error the buffer's contents are unspecified
// and the message names the argument, what was expected and what was got. levels: the prefixes that
// requests share; null: found from the page tables. Only with share_prefixes. map: null without
// step lists.
Status Plan(const AttentionProblem& problem, const PlanInputs& inputs, const PrefixLevels* levels,
            int32_t* buffer, const BlockMap* map = nullptr);

}  // namespace jax_attn
