// From query tiles to queues of work items: where planners differ.
#pragma once

#include <cstdint>
#include <vector>

#include "spec.h"
#include "status.h"

namespace jax_attn {

// Query tokens of one request that one item per kv head could serve over the whole span.
struct QueryTile {
  int32_t qo_begin, qo_len, request;
  int32_t tile;              // index into KernelConfig.tile_q
  int32_t kv_begin, kv_end;  // positions any row of the tile sees
  int32_t kv_base, q_pos;    // as in WorkItem
};

// A piece of a tile's span, for every kv head.
struct Chunk {
  int32_t tile_idx;  // index into the tiles
  int32_t kv_begin, kv_end;
  int32_t split;  // position among the tile's chunks, in kv order
  int32_t num_splits;
  int64_t cost;  // 1/16 kv token of tile_q[0]
};

// Appends the chunks of every tile, in kv order. One function per planner:
// no_split.cc, fixed_split.cc, balanced.cc.
void CutNoSplit(const AttentionProblem& problem, const std::vector<QueryTile>& tiles,
                std::vector<Chunk>* chunks);
void CutFixedSplit(const AttentionProblem& problem, const std::vector<QueryTile>& tiles,
                   std::vector<Chunk>* chunks);
// divisor >= 1: chunks of at most 1 / divisor of the load of an ideally balanced queue.
void CutBalanced(const AttentionProblem& problem, const std::vector<QueryTile>& tiles,
                 double divisor, std::vector<Chunk>* chunks);

// Chunks and the queue of each, for one kv head unit. stream_k.cc.
void CutStreamK(const AttentionProblem& problem, const std::vector<QueryTile>& tiles,
                int64_t num_queues, std::vector<Chunk>* chunks, std::vector<int32_t>* queue_of);

// Algorithm 1 cuts a tile of cost l into ceil(l / L) chunks with L = total / num_ctas, so the tiles
// that are cut at all have at most 2 * num_ctas chunks, times the heads that stay together; so do
// the ranges of stream-K, which cut at most num_ctas - 1 times.
inline int64_t MaxBalancedPartials(const KernelConfig& config) {
  return 2 * config.num_ctas * config.heads_per_unit;
}

// Of kv_tokens for a tile; split: the state goes through the workspace and a merge.
int64_t ItemCost(const KernelConfig& config, int tile, int64_t kv_tokens, bool split);

struct ScheduleOutput {
  int32_t* queue_indptr;     // [num_ctas + 1]
  WorkItem* items;           // [max_items]
  MergeGroup* merge_groups;  // [max_merge_groups]
  int32_t* partial_rows;     // [max_partials]
  int32_t num_items = 0;
  int32_t num_merge_groups = 0;
  int32_t num_partials = 0;
  int32_t num_partial_rows = 0;
};

// Cuts the tiles by the spec's schedule, gives every chunk to the least loaded queue, heaviest
// first, and writes items, merge groups and queues.
Status WriteSchedule(const AttentionProblem& problem, const std::vector<QueryTile>& tiles,
                     ScheduleOutput* out);

}  // namespace jax_attn
