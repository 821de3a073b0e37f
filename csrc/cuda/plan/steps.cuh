// Step lists of the device planner, as MakeLists in plan/plan.cc makes them. Those of the batch's
// tiles and those of a shared tiling stay in shared memory until it is known which are written.
#pragma once

#include "cuda/plan/context.cuh"
#include "cuda/plan/prefix.cuh"
#include "plan/rules/checks.h"
#include "plan/rules/steps.h"

namespace jax_attn {

// OR of the classes of the blocks of the tile's rows and a step's columns.
__device__ __forceinline__ u32 ClassesOf(const PlanRules& rules, const BlockMap& map,
                                         const QueryTile& t, i32 step) {
  const MapColumns columns = ColumnsOf(rules, map, t, step);
  const i32 last_row = (t.first_token + t.qo_len - 1) / map.q_block;
  u32 found = 0;
#pragma unroll 1
  for (i32 row = t.first_token / map.q_block; row <= last_row; ++row) {
    const unsigned char* classes = map.classes + row * map.num_columns;
    for (i32 i = columns.begin; i < columns.end; ++i) found |= classes[i];
  }
  return found;
}

// Makes lists number `which`, for tiles with spans, and returns the number of their entries.
// sharing: as in SharedTiling, or null.
template <class Context>
__device__ __noinline__ i64 FindSteps(Context& c, const QueryTile* tiles, i32 num_tiles,
                                      const TileSharing* sharing, i32 which) {
  const PlanRules& rules = c.rules;
  const int thread = c.thread();
  // The words of all tiles are in one line, so that one long tile keeps as many warps busy as many
  // short ones.
  i32* first_word = c.template Take<i32>(num_tiles + 1);
  const i32 num_words = static_cast<i32>(c.cta.Prefix(num_tiles, first_word, [&](i32 i) {
    const StepSpan span = StepsOf(rules, tiles[i]);
    return CeilDivide(span.end - span.begin, kWarpSize);
  }));
  StepWord* words = c.template Take<StepWord>(num_words);
#pragma unroll 1
  for (i32 w = thread / kWarpSize; w < num_words; w += Context::Cta::kNumWarps) {
    const i32 i = LastAtMost(first_word, num_tiles, w);
    const StepSpan span = StepsOf(rules, tiles[i]);
    const i32 first = span.begin + (w - first_word[i]) * kWarpSize;
    const i32 step = first + thread % kWarpSize;
    const bool is_shared = sharing != nullptr && sharing[i].shared();
    const u32 classes = step >= span.end ? 0
                        : is_shared      ? u32{kSomeVisible}
                                         : ClassesOf(rules, c.p.block_map, tiles[i], step);
    const u32 listed = __ballot_sync(kFullWarp, (classes & kSomeVisible) != 0);
    const u32 masked = __ballot_sync(kFullWarp, (classes & kSomeHidden) != 0);
    if (thread % kWarpSize == 0) words[w] = {listed, masked, first};
  }
  __syncthreads();
  i32* first_entry = c.template Take<i32>(num_words + 1);
  const i64 total = c.cta.Prefix(num_words, first_entry,
                                 [&](i32 w) { return static_cast<i64>(__popc(words[w].listed)); });
  if (thread == 0) {
    c.shared.lists[which] = {num_words, static_cast<i32>(total), first_word, words, first_entry};
  }
  __syncthreads();
  return total;
}

template <class Context>
__device__ __forceinline__ void TakeListsOf(Context& c, QueryTile* tiles, i32 num_tiles,
                                            i32 which) {
  const StepLists& lists = c.shared.lists[which];
#pragma unroll 1
  for (i32 i = c.thread(); i < num_tiles; i += Context::kNumThreads) {
    TakeList(c.rules, lists.first_entry[lists.first_word[i]],
             lists.first_entry[lists.first_word[i + 1]], &tiles[i]);
  }
  __syncthreads();
}

// Finds the steps of the tiles, ignoring shared prefixes. The tiles keep their spans.
template <class Context>
__device__ __noinline__ PlanFault ListSteps(Context& c, const typename Context::Tiles& flat) {
  const BlockMap& map = c.p.block_map;
  PlanFault fault = c.cta.FirstFault(flat.num_tiles, [&](i32 i) {
    PlanFault f = CheckMapColumns(map, flat.tiles[i]);
    f.at = i;  // tiles of a request may have different errors
    return f;
  });
  if (fault.code != kNoFault) {
    fault.at = flat.tiles[fault.at].request;
    return fault;
  }
  return CheckSteps(c.rules, FindSteps(c, flat.tiles, flat.num_tiles, nullptr, 0));
}

// Call it after ListSteps. [num_tiles] the end of the steps, from position 0 on, that the map shows
// in full to the tile.
template <class Context>
__device__ __noinline__ const i32* SeenEnds(Context& c, const typename Context::Tiles& flat) {
  const PlanRules& rules = c.rules;
  i32* ends = c.template Take<i32>(flat.num_tiles);
  const StepLists& lists = c.shared.lists[0];
#pragma unroll 1
  for (i32 i = c.thread(); i < flat.num_tiles; i += Context::kNumThreads) {
    const StepSpan span = StepsOf(rules, flat.tiles[i]);
    i32 end = span.begin == 0 ? flat.tiles[i].kv_end : 0;
#pragma unroll 1
    for (i32 w = lists.first_word[i]; w < lists.first_word[i + 1]; ++w) {
      const StepWord word = lists.words[w];
      const u32 others = ~(word.listed & ~word.masked);
      const i32 first_other = __ffs(others) - 1;  // -1: none; may lie behind the tile's steps
      if (first_other < 0) continue;
      end = Min(end, (word.first + first_other) * rules.tile_kv);
      break;
    }
    ends[i] = end;
  }
  __syncthreads();
  return ends;
}

// Replaces the spans of tiles by ranges of the lists. shares: also those of the tiling.
template <class Context>
__device__ __noinline__ void TakeLists(Context& c, bool shares, typename Context::Tiles* flat,
                                       SharedTiling* tiling) {
  const i32 num_flat = flat->num_tiles;
  if (shares) {
    SharedTiling& shared = *tiling;
    FindSteps(c, shared.tiles, shared.num_tiles, shared.sharing, 1);
    TakeListsOf(c, shared.tiles, shared.num_tiles, 1);
    shared.span_cost = c.cta.Sum(num_flat, [&](i32 i) { return SpanCost(shared.tiles[i]); });
    shared.shared_span_cost = c.cta.Sum(
        shared.num_tiles - num_flat, [&](i32 i) { return SpanCost(shared.tiles[num_flat + i]); });
  }
  TakeListsOf(c, flat->tiles, num_flat, 0);
  i64 longest = 0;
  flat->span_cost = c.cta.Sum(num_flat, [&](i32 i) {
    longest = Largest(longest, SpanCost(flat->tiles[i]));
    return SpanCost(flat->tiles[i]);
  });
  flat->longest_span_cost = c.cta.MostOf(longest);
}

// Writes the list entries of the chosen tiles, which are those with shared prefixes if `shares`.
// Returns their number.
template <class Context>
__device__ __noinline__ i32 WriteSteps(Context& c, bool shares) {
  const int thread = c.thread();
  const StepLists& lists = c.shared.lists[shares];
#pragma unroll 1
  for (i32 w = thread / kWarpSize; w < lists.num_words; w += Context::Cta::kNumWarps) {
    const StepWord word = lists.words[w];
    const i32 lane = thread % kWarpSize;
    if (!(word.listed >> lane & 1)) continue;
    const i32 before = __popc(word.listed & ((1u << lane) - 1));
    c.p.steps[lists.first_entry[w] + before] =
        StepEntry(word.first + lane, word.masked >> lane & 1);
  }
  return lists.num_steps;
}

}  // namespace jax_attn
