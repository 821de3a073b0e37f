// The planner: turns lengths and page tables into a list of work in one int32 buffer.
//
// Pure C++ without CUDA and XLA. Its only policy is the numbers in KernelConfig.
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

// Bytes of scratch that the device planner may need (cuda/plan/plan.cuh). num_prefixes: per level.
// map: null without step lists; its classes are not read.
int64_t PlanScratchBytes(const AttentionProblem& problem, int64_t num_levels, int64_t num_prefixes,
                         const BlockMap* map = nullptr);

// Arguments of the device planner. levels: null if the caller gives none. plan: [layout.num_words],
// zeros. scratch: PlanScratchBytes bytes. map: null without step lists.
PlanParams MakePlanParams(const AttentionProblem& problem, const PlanInputs& inputs,
                          const PrefixLevels* levels, i32* plan, void* scratch,
                          const BlockMap* map = nullptr);

// num_pages: pages of one layer's pool; 1 when ragged.
PlanLimits MakePlanLimits(const AttentionProblem& problem, int64_t num_pages);

// Fills every parameter of an attention call that its problem and plan determine. The caller sets
// operands, results, workspace and the sizes of k and v. plan: [layout.num_words].
AttentionParams MakeAttentionParams(const AttentionProblem& problem, const i32* plan);

// Workspace of a backward pass on CUDA devices, in 4-byte words, aligned to 16 bytes. num_pages:
// pages of one layer's pool.
int64_t BackwardWorkspaceWords(const AttentionProblem& problem, int64_t num_pages);

// How many of these words, from the first on, must be 0 at entry.
int64_t BackwardZeroWords(const AttentionProblem& problem, int64_t num_pages);

// Fills the parameters of a backward pass on CUDA devices except lse, d, d_o and the results.
// forward: with operands. workspace: BackwardWorkspaceWords words.
BackwardCudaParams MakeBackwardParams(const AttentionProblem& problem,
                                      const AttentionParams& forward, const i32* plan,
                                      i32* workspace);

// Sets the capacities of a valid spec (plan/check.h) so that they hold any batch within max_batch
// and max_qo_tokens (for kFixedSplit: any decode batch within the kv capacity). Nonzero values set
// by the user are kept.
void FillCapacities(AttentionProblem* problem);

struct Tiling;  // plan/schedule.h

// Refuses a map that does not fit the problem, a missing map, and one that the problem does not
// use.
Status CheckBlockMap(const AttentionProblem& problem, const BlockMap* map);

// Writes the step lists that tiles need, and replaces the spans of `tiles` by ranges of these
// lists. Tiles of shared prefixes (plan/schedule.h) have all steps of their spans, without the
// mask. seen_ends: null, or for each tile the end of its leading positions that the map hides from
// none of its rows.
PlanFault ListSteps(const PlanRules& rules, const BlockMap& map, Tiling* tiling, int32_t* steps,
                    int32_t* num_steps, std::vector<int32_t>* seen_ends);

// Refuses a batch of more than max_batch requests.
Status CheckBatchSize(const AttentionProblem& problem, int64_t batch_size);

// Returns the first fault of a batch, except faults of prefix levels. max_page_id: the largest page
// id that the kv_lens need, if there is one.
PlanFault CheckInputs(const PlanRules& rules, const PlanInputs& inputs, int32_t* max_page_id);

// Describes a fault as "plan: argument: expected ..., got ..."; ok for kNoFault.
Status DescribeFault(const AttentionProblem& problem, const PlanFault& fault);

// Writes all of buffer[0, layout.num_words). On error the buffer's contents are unspecified and the
// message names the argument, what was expected and what was got. levels: the prefixes that
// requests share, only with share_prefixes; null: found from the page tables. map: null without
// step lists.
Status Plan(const AttentionProblem& problem, const PlanInputs& inputs, const PrefixLevels* levels,
            int32_t* buffer, const BlockMap* map = nullptr);

}  // namespace jax_attn
