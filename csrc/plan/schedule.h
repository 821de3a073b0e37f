// Turns query tiles into queues of work items; this is where planners differ.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "plan/rules/sharing.h"
#include "plan/rules/units.h"
#include "spec.h"

namespace jax_attn {

// The tiles of a batch.
struct Tiling {
  std::vector<QueryTile> tiles;
  // Empty, or with shared prefixes:
  std::vector<TileSharing> sharing;  // of each tile
  std::vector<int32_t> unit_tiles;   // tile of each unit
  std::vector<int32_t> qo_indices;   // rows of q of the tokens of shared tiles

  TileSharing SharingOf(int32_t tile_idx) const {
    return sharing.empty() ? TileSharing{0, -1, 0, 0} : sharing[tile_idx];
  }
};

// One piece of a tile's span, for every kv head or for those of one head unit.
struct Chunk {
  int32_t tile_idx;  // index into the tiles
  int32_t unit;      // kEveryUnit: cut by length, the same for all heads
  int32_t kv_begin, kv_end;
  int32_t split;  // position among the tile's chunks, in kv order
  int32_t num_splits;
  int64_t cost;  // in 1/16 kv token of tile_q[0]
};

// The chunks of every tile, in kv order: pieces of equal length. longest_cost: for kBalanced, see
// CutTile.
void CutByLength(const PlanRules& rules, const std::vector<QueryTile>& tiles, i64 longest_cost,
                 std::vector<Chunk>* chunks);

// What CutByLength makes of tiles that share nothing, without its chunks; for kBalanced.
struct CutTotals {
  // Chunks of each tile size, in tokens; all 0 if no tile is split. Equal lengths cut equally.
  std::array<int32_t, kMaxTiles> lengths;
  int64_t num_chunks, num_split_chunks;  // split: of tiles with several
  int64_t cost;                          // of all chunks, for one head unit
  int64_t least_cost;                    // of any chunk
};
CutTotals TotalsOfCut(const PlanRules& rules, const std::vector<QueryTile>& tiles,
                      i64 longest_cost);

// Chunks and their queues, for tiles that share nothing: ranges of equal cost of one line, on which
// every tile lies once for each head unit. Returns false if ranges would not take less than
// `makespan`.
bool CutByRanges(const PlanRules& rules, const std::vector<QueryTile>& tiles, i64 makespan,
                 std::vector<Chunk>* chunks, std::vector<int32_t>* queue_of);

// Algorithm 1 splits a tile of cost l into ceil(l / L) chunks with L = total / num_ctas. So the
// tiles that are split have at most 2 * num_ctas chunks, times the heads that stay together. The
// same bound holds for the ranges of stream-K, for any number of heads: the line of a partition is
// cut at most num_queues - 1 times, and k cuts of a tile of one head unit make k + 1 <= 2 * k
// states.
inline int64_t MaxBalancedPartials(const KernelConfig& config) {
  return 2 * config.num_ctas * config.heads_per_unit;
}

struct ScheduleOutput {
  int32_t* queue_indptr;     // [num_ctas + 1]
  WorkItem* items;           // [max_items]
  MergeGroup* merge_groups;  // [max_merge_groups]
  int32_t* partial_rows;     // [max_partials]
  int32_t* qo_indices;       // [max_shared_tokens]
  int32_t num_items = 0;
  int32_t num_merge_groups = 0;
  int32_t num_partials = 0;
  int32_t num_shared_tokens = 0;
  int32_t num_partial_rows = 0;
  bool shares = false;  // the schedule uses the tiles with shared prefixes
};

// Splits the tiles by the spec's schedule, gives every chunk to the least loaded queue, heaviest
// first, and writes items, merge groups and queues. shared: the same batch with shared prefixes, or
// null; used unless it is predicted to be slower.
PlanFault WriteSchedule(const PlanRules& rules, const Tiling& flat, const Tiling* shared,
                        ScheduleOutput* out);

}  // namespace jax_attn
