// The first stage of the device planner: checks a batch and makes query tiles.
#pragma once

#include "cuda/common/math.cuh"
#include "cuda/plan/context.cuh"
#include "plan/rules/checks.h"

namespace jax_attn {

// Loads all lengths at once, on their way into the plan. What is checked and used later is then
// near.
template <class Context>
__device__ __forceinline__ void CopyLengths(Context& c) {
  const PlanInputs& in = c.in;
  const PlanParams& p = c.p;
#pragma unroll 1
  for (i32 r = c.thread(); r <= in.batch_size; r += Context::kNumThreads) {
    const i32 qo = in.qo_indptr[r], kv = in.kv_indptr[r];
    const i32 kv_len = r < in.batch_size ? in.kv_lens[r] : 0;
    p.qo_indptr[r] = qo;
    p.kv_indptr[r] = kv;
    if (r < in.batch_size) p.kv_lens[r] = kv_len;
  }
}

template <class Context>
__device__ __forceinline__ PlanFault CheckLengths(Context& c) {
  CopyLengths(c);
  return c.cta.FirstFault(
      static_cast<i32>(c.in.batch_size), [&](i32 r) { return CheckRequest(c.rules, c.in, r); },
      CheckBatch(c.rules, c.in));
}

template <class Context>
__device__ __forceinline__ PlanFault CheckLevels(Context& c) {
  const PrefixLevels& levels = c.p.levels;
  const i32 num_borders = levels.num_prefixes + 1;
  const PlanFault fault = c.cta.FirstFault(levels.num_levels * num_borders, [&](i32 i) {
    return CheckBorder(c.in, levels, i / num_borders, i % num_borders);
  });
  if (fault.code != kNoFault || levels.num_levels == 0) return fault;
  return c.cta.FirstFault(static_cast<i32>(c.in.batch_size),
                          [&](i32 r) { return CheckPrefixLens(c.in, levels, r); });
}

// The tiles of the batch, after the checks above.
template <class Context>
__device__ __forceinline__ PlanFault MakeTiles(Context& c, typename Context::Tiles* out) {
  using Totals = typename Context::Cta::Totals;
  const PlanRules& rules = c.rules;
  const i32 batch_size = static_cast<i32>(c.in.batch_size);
  i32* first_tile = c.template Take<i32>(batch_size + 1);
  const i64 all_tiles = c.cta.Prefix(batch_size, first_tile, [&](i32 r) {
    return static_cast<i64>(NumTilesOf(rules, c.in.qo_indptr[r + 1] - c.in.qo_indptr[r]));
  });
  if (const PlanFault f = CheckTiles(rules, all_tiles); f.code != kNoFault) return f;
  const i32 num_tiles = static_cast<i32>(all_tiles);
  QueryTile* tiles = c.template Take<QueryTile>(num_tiles);
  const Totals totals = c.cta.Total(num_tiles, [&](i32 i, Totals* mine) {
    i32 request = i;  // if every request before it has one tile
    if (i >= batch_size || first_tile[i] != i || first_tile[i + 1] == i) {
      request = LastAtMost(first_tile, batch_size, i);
    }
    const QueryTile t = MakeTile(rules, LengthsOf(c.in, request), request, i - first_tile[request]);
    tiles[i] = t;
    const i64 cost = SpanCost(t);
    mine->sum += cost;
    mine->most[0] = static_cast<u32>(Largest(mine->most[0], ClampToWord(cost)));
    mine->most[1] = static_cast<u32>(Largest(mine->most[1], t.tile));
    mine->most[2] = static_cast<u32>(Largest(mine->most[2], kMaxTiles - t.tile));
  });
  *out = {};
  out->num_tiles = num_tiles;
  out->tiles = tiles;
  out->first_tile = first_tile;
  out->span_cost = totals.sum;
  out->longest_span_cost = totals.most[0];
  out->several_tile_sizes = num_tiles > 0 && totals.most[1] + totals.most[2] != kMaxTiles;
  if (!MayCostTooMuch(rules, num_tiles, totals.most[0])) return {};
  i64 longest = 0;
  const i64 coarse_cost = c.cta.Sum(num_tiles, [&](i32 i) {
    longest = Largest(longest, SpanCost(tiles[i]));
    return CoarseSpanCost(tiles[i]);
  });
  out->longest_span_cost = c.cta.MostOf(longest);
  return CheckCost(rules, coarse_cost);
}

}  // namespace jax_attn
