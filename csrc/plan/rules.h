// The decisions of the planners: how a batch falls into query tiles, how tiles are cut, what a
// piece costs. Integers alone, and each function of few numbers, because two programs follow them
// and must write the same bits: the host planner (schedule.cc), one after the other, and the device
// planner (cuda/any/plan.cuh), all at once. Read by NVRTC, too, so it includes nothing but
// params.h.
#pragma once

#include "params.h"

namespace jax_attn {

inline constexpr i64 kMaxInt32 = 2147483647;

// What bounds the planners' integers. Of a problem, by plan/check.h: heads 2^16, queues 2^20, items
// 2^28, kv_cost and fixed costs 2^12. Of a batch, by the checks below:
//   kv_len, |position|            2^30   CheckRequest; kernels add positions and windows in 32 bits
//   query tiles                   2^25   CheckTiles; so items of tiles that are not cut
//   cost of a tile                2^42   kv_len * kv_cost, more than a key holds: see ChunkKey
//   cost of all, of a partition   2^53   CheckCost; with shared tiles, states and items below 2^57
//   chunks                        2^26   kFixedSplit: kFaultChunks; kBalanced: 2^25 tiles and, of
//                                        those that are cut, 8 a queue (LongestChunkCost)
//   partial states, rows          2^31   CheckCapacities, before any is numbered
// Products of a cost and a number of queues would not fit: see IsBalanced and BorderPlace.
inline constexpr i64 kPositionLimit = 1ll << 30;
inline constexpr i64 kMaxQueryTiles = 1ll << 25;
inline constexpr i64 kMaxTotalCost = 1ll << 53;
inline constexpr i64 kMaxChunks = 1ll << 26;

// What one request brings to a plan.
struct RequestLengths {
  i32 qo_begin, qo_len;
  i32 kv_len;
  i32 kv_base;   // kv_indptr
  i32 q_offset;  // kv position of its first query token
};

// Query tokens of one request that one item per kv head could serve over the whole span.
struct QueryTile {
  i32 first_token, qo_len, request;  // as in WorkItem; of a unit or a flat tile a row of q
  i32 tile;                          // index into tile_q
  i32 kv_cost;                       // of 16 kv tokens
  i32 kv_begin, kv_end;              // places, as in WorkItem: what any row of the tile sees
  i32 kv_base, q_pos;                // as in WorkItem
  i32 section;                       // see SectionKey; 0: the request has no other tile
};

constexpr i64 CeilDivide(i64 a, i64 b) { return (a + b - 1) / b; }
constexpr i64 Least(i64 a, i64 b) { return a < b ? a : b; }
constexpr i64 Largest(i64 a, i64 b) { return a > b ? a : b; }

inline RequestLengths LengthsOf(const PlanInputs& in, i64 r) {
  RequestLengths request;
  request.qo_begin = in.qo_indptr[r];
  request.qo_len = in.qo_indptr[r + 1] - request.qo_begin;
  request.kv_len = in.kv_lens[r];
  request.kv_base = in.kv_indptr[r];
  request.q_offset = in.q_offsets != nullptr ? in.q_offsets[r] : request.kv_len - request.qo_len;
  return request;
}

// --- checks ---

inline PlanFault MakeFault(PlanFaultCode code, i64 at, i64 got, i64 expected = 0) {
  return {code, static_cast<i32>(Least(at, kMaxInt32)), static_cast<i32>(Least(got, kMaxInt32)),
          static_cast<i32>(expected)};
}

// The fault that planners report is the one with the smallest (code, at).
inline bool IsBefore(const PlanFault& a, const PlanFault& b) {
  if (b.code == kNoFault) return a.code != kNoFault;
  return a.code != kNoFault && (a.code < b.code || (a.code == b.code && a.at < b.at));
}

// Of the batch as a whole.
inline PlanFault CheckBatch(const PlanRules& rules, const PlanInputs& in) {
  const i64 first_qo = in.qo_indptr[0], first_kv = in.kv_indptr[0];
  const i64 nnz_qo = in.qo_indptr[in.batch_size], nnz_kv = in.kv_indptr[in.batch_size];
  if (first_qo != 0) return MakeFault(kFaultQoIndptrBegin, 0, first_qo);
  if (nnz_qo > rules.max_qo_tokens) return MakeFault(kFaultQoTokens, 0, nnz_qo);
  if (first_kv < 0) return MakeFault(kFaultKvIndptrBegin, 0, first_kv);
  if (nnz_kv > rules.max_kv) return MakeFault(kFaultKvCapacity, 0, nnz_kv);
  if (rules.page_size > 0 && nnz_kv > in.num_page_indices) {
    return MakeFault(kFaultPageIndices, 0, in.num_page_indices, nnz_kv);
  }
  return {};
}

inline i32 NumPages(const PlanRules& rules, i32 kv_len) {
  return kv_len > 0 ? (kv_len - 1) / rules.page_size + 1 : 0;
}

// Of request r, with its entries r + 1 of the offsets.
inline PlanFault CheckRequest(const PlanRules& rules, const PlanInputs& in, i64 r) {
  const i64 qo_begin = in.qo_indptr[r], qo_end = in.qo_indptr[r + 1];
  const i64 kv_begin = in.kv_indptr[r], kv_end = in.kv_indptr[r + 1];
  const i64 kv_len = in.kv_lens[r];
  if (qo_end < qo_begin) return MakeFault(kFaultQoIndptrOrder, r + 1, qo_end, qo_begin);
  if (kv_end < kv_begin) return MakeFault(kFaultKvIndptrOrder, r + 1, kv_end, kv_begin);
  if (kv_len < 0) return MakeFault(kFaultKvLenNegative, r, kv_len);
  if (kv_len >= kPositionLimit) return MakeFault(kFaultKvLenTooLarge, r, kv_len);
  const i64 qo_len = qo_end - qo_begin;
  const i64 first = in.q_offsets != nullptr ? in.q_offsets[r] : kv_len - qo_len;
  if (first <= -kPositionLimit || first + qo_len > kPositionLimit) {
    return MakeFault(kFaultQueryPositions, r, first);
  }
  if (rules.page_size > 0) {
    if (NumPages(rules, static_cast<i32>(kv_len)) > kv_end - kv_begin) {
      return MakeFault(kFaultKvOfRequest, r, kv_end - kv_begin, kv_len);
    }
  } else if (kv_len > kv_end - kv_begin) {
    return MakeFault(kFaultKvOfRequest, r, kv_len, kv_end - kv_begin);
  }
  return {};
}

// Last i in [0, n) with values[i] <= x, values never decreasing; 0 if there is none.
template <class T, class X>
inline i32 LastAtMost(const T* values, i32 n, X x) {
  i32 first = 0, count = n;
  while (count > 1) {
    const i32 half = count / 2;
    if (values[first + half] <= x) {
      first += half;
      count -= half;
    } else {
      count = half;
    }
  }
  return first;
}

inline const i32* BordersOf(const PrefixLevels& levels, i32 level) {
  return levels.request_indptr + static_cast<i64>(level) * (levels.num_prefixes + 1);
}
// The prefix of a level that request r has.
inline i32 PrefixOf(const PrefixLevels& levels, i32 level, i64 r) {
  return LastAtMost(BordersOf(levels, level), levels.num_prefixes, r);
}
inline i32 PrefixLen(const PrefixLevels& levels, i32 level, i32 i) {
  return levels.prefix_lens[static_cast<i64>(level) * levels.num_prefixes + i];
}

inline PlanFault MakeLevelFault(PlanFaultCode code, i32 level, i64 entry, i64 got, i64 expected) {
  return MakeFault(code, entry * kMaxLevels + level, got, expected);
}

// Of entry i of a level's request_indptr.
inline PlanFault CheckBorder(const PlanInputs& in, const PrefixLevels& levels, i32 level, i32 i) {
  const i32* borders = BordersOf(levels, level);
  const i32 n = levels.num_prefixes, border = borders[i];
  if (i == 0 && border != 0) return MakeLevelFault(kFaultPrefixBegin, level, i, border, 0);
  if (i > 0 && border < borders[i - 1]) {
    return MakeLevelFault(kFaultPrefixOrder, level, i, border, borders[i - 1]);
  }
  if (i == n && border != in.batch_size) {
    return MakeLevelFault(kFaultPrefixEnd, level, i, border, in.batch_size);
  }
  if (level == 0) return {};
  const i32 outer = BordersOf(levels, level - 1)[i];
  const i32 nearest = borders[LastAtMost(borders, n + 1, outer)];
  if (nearest == outer) return {};
  return MakeLevelFault(kFaultPrefixNesting, level, i, nearest, outer);
}

// Of request r, at every level.
inline PlanFault CheckPrefixLens(const PlanInputs& in, const PrefixLevels& levels, i64 r) {
  if (in.qo_indptr[r + 1] == in.qo_indptr[r]) return {};
  for (i32 level = 0; level < levels.num_levels; ++level) {
    const i32 len = PrefixLen(levels, level, PrefixOf(levels, level, r));
    if (len < 0 || len > in.kv_lens[r]) {
      return MakeLevelFault(kFaultPrefixLen, level, r, len, in.kv_lens[r]);
    }
  }
  return {};
}

// A request before r, and the pages that both have at their beginning.
struct CommonPages {
  i32 request, num_pages;
};
inline CommonPages CommonPagesOf(const PlanRules& rules, const PlanInputs& in,
                                 const PrefixLevels& levels, i32 r) {
  CommonPages common = {r - 1, 0};
  if (in.qo_indptr[r + 1] == in.qo_indptr[r]) return common;
  while (common.request >= 0 && in.qo_indptr[common.request + 1] == in.qo_indptr[common.request]) {
    --common.request;
  }
  for (i32 level = 0; level < levels.num_levels && common.request >= 0; ++level) {
    const i32 i = PrefixOf(levels, level, r);
    if (common.request < BordersOf(levels, level)[i]) break;  // so it is at every deeper level
    const i32 num_pages = PrefixLen(levels, level, i) / rules.page_size;
    common.num_pages = static_cast<i32>(Largest(common.num_pages, num_pages));
  }
  return common;
}

// Page ids are below it, seen as unsigned.
inline i64 PageIdLimit(const PlanRules& rules) {
  return rules.num_pages >= 0 ? rules.num_pages : kMaxInt32 + 1;
}

// What a schedule needs of a plan's sections.
struct PlanCounts {
  i64 num_items, num_merge_groups, num_partials, num_partial_rows;
};

inline PlanFault CheckCapacities(const PlanRules& rules, const PlanCounts& n) {
  if (n.num_items > rules.max_items) return MakeFault(kFaultItems, 0, n.num_items);
  if (n.num_merge_groups > rules.max_merge_groups) {  // half of the items at most
    return MakeFault(kFaultMergeGroups, 0, 2 * n.num_merge_groups);
  }
  if (n.num_partials > rules.max_partials) return MakeFault(kFaultPartials, 0, n.num_partials);
  if (n.num_partial_rows > rules.max_partial_rows) {
    return MakeFault(kFaultPartialRows, 0, n.num_partial_rows);
  }
  return {};
}

// --- tiles ---

// Smallest tile that holds the whole request, else the largest.
inline i32 PickTile(const PlanRules& rules, i32 qo_len) {
  for (i32 tile = 0; tile < rules.num_tiles - 1; ++tile) {
    if (qo_len <= rules.tile_tokens[tile]) return tile;
  }
  return rules.num_tiles - 1;
}

inline i32 NumTilesOf(const PlanRules& rules, i32 qo_len) {
  const i32 tokens = rules.tile_tokens[PickTile(rules, qo_len)];
  return qo_len <= tokens ? qo_len > 0 : (qo_len - 1) / tokens + 1;
}

inline QueryTile MakeTile(const PlanRules& rules, const RequestLengths& r, i32 request, i32 index) {
  QueryTile t;
  t.tile = PickTile(rules, r.qo_len);
  t.kv_cost = rules.kv_cost[t.tile];
  const i32 tokens = rules.tile_tokens[t.tile];
  // The first tile has what whole ones leave: under a causal mask it sees the fewest keys, and a
  // step takes as long for a few rows as for all.
  const i32 token_end = r.qo_len - (NumTilesOf(rules, r.qo_len) - 1 - index) * tokens;
  const i32 token = static_cast<i32>(Largest(0, token_end - tokens));
  const i64 first = static_cast<i64>(r.q_offset) + token;
  t.first_token = r.qo_begin + token;
  t.qo_len = token_end - token;
  t.request = request;
  t.kv_base = r.kv_base;
  t.q_pos = static_cast<i32>(first);
  const i64 last = first + t.qo_len - 1;
  i64 begin = 0, end = r.kv_len;
  if (rules.window_left >= 0) begin = Largest(begin, first - rules.window_left);
  if (rules.window_right >= 0) end = Least(end, last + rules.window_right + 1);
  if (end <= begin) begin = end = 0;
  t.kv_begin = static_cast<i32>(begin);
  t.kv_end = static_cast<i32>(end);
  t.section = r.qo_len > tokens ? r.kv_len : 0;
  return t;
}

// Of a batch's query tiles, before any is made. Each is an item a head at least; where they are
// few, what the schedule needs is found out, to be said exactly.
inline PlanFault CheckTiles(const PlanRules& rules, i64 num_tiles) {
  constexpr i64 kFew = 1 << 16;
  if (num_tiles >= kMaxQueryTiles) return MakeFault(kFaultTiles, 0, num_tiles);
  const i64 num_items = num_tiles * rules.num_kv_heads;
  if (num_tiles <= kFew || num_items <= rules.max_items) return {};
  return MakeFault(kFaultItems, 0, num_items);
}

// --- costs: 1/16 kv token of tile_q[0] ---
//
// The planners' model of time. An item takes item_cost + kv tokens * kv_cost[tile] / 16, and
// split_cost more if its state is merged, in kv tokens of tile_q[0]; a queue takes the sum of its
// items, a schedule what its fullest queue takes.
// FlashInfer's (arXiv 2501.01005, section 3.3.1, Algorithm 1) is alpha * l_q + beta * l_kv of a
// tile: here l_q is put into kv_cost, because the height of a tile decides whether memory or
// arithmetic is its limit, and item_cost is what is left of alpha * l_q. LeanAttention's (arXiv
// 2405.10480, section 4) is the number of its iterations over tiles of equal size: kv_cost alone.
// Neither has a price for states. The numbers are data of each device, with what they were measured
// by: csrc/select.

// Of kv_tokens for a tile; split: the state goes through the workspace and a merge.
inline i64 ItemCost(const PlanRules& rules, const QueryTile& t, i64 kv_tokens, bool split) {
  const i64 fixed = rules.item_cost + (split ? rules.split_cost : 0);
  return fixed * rules.kv_cost[0] + kv_tokens * t.kv_cost;
}

// What a tile adds to the total that CutTile's chunks are a part of.
inline i64 SpanCost(const QueryTile& t) {
  return static_cast<i64>(t.kv_end - t.kv_begin) * t.kv_cost;
}

// SpanCost of all tiles of a batch may exceed 64 bits; sums of this do not.
inline constexpr int kCoarseBits = 16;
inline i64 CoarseSpanCost(const QueryTile& t) { return SpanCost(t) >> kCoarseBits; }
// coarse_cost: the sum over all tiles.
inline PlanFault CheckCost(const PlanRules& rules, i64 coarse_cost) {
  if (coarse_cost <= (kMaxTotalCost >> kCoarseBits) / rules.num_units) return {};
  constexpr int kGotBits = 32 + 4 - kCoarseBits;  // 2^32 kv tokens of 16 each
  return MakeFault(kFaultCost, 0, (coarse_cost >> kGotBits) * rules.num_units);
}
// Whether there is anything to be summed. longest: what a tile costs at most; 2^32 - 1: or more.
inline bool MayCostTooMuch(const PlanRules& rules, i64 num_tiles, i64 longest) {
  return longest == 0xffffffffll || num_tiles * longest > kMaxTotalCost / rules.num_units;
}

// --- order ---

// Chunks are handed out in the order of their keys: descending cost, ascending chunk. Requests of
// several tiles go before all others, the longest first, in sections: all tiles of a request and
// head one after the other, because they read the same keys, which the cache holds meanwhile, and
// the last first, because under a causal mask it is the heaviest. Measured (H200, wgmma): 4 x 4096
// tokens without mask 586 -> 626 TFLOP/s, causal 487 -> 538.
inline constexpr i32 kChunkBits = 26;
inline constexpr u64 kMaxRank = (1ull << 38) - 1;
inline constexpr i64 kSharedFirst = 1ll << 37;  // beside the cost of a chunk of a shared prefix
inline constexpr i64 kSectionFirst = 1ll << 36;
inline constexpr u64 kChunkMask = (1u << kChunkBits) - 1;

// Chunks that cost 2^36 and more, 115 million kv tokens of the costliest tile that there is, are
// alike.
inline u64 ChunkKey(i64 cost, i64 chunk, bool shared = false) {
  const i64 rank = Largest(0, Least(cost, kSectionFirst - 1)) + (shared ? kSharedFirst : 0);
  return (kMaxRank - static_cast<u64>(rank)) << kChunkBits | static_cast<u64>(chunk);
}
// section: of the chunk's tile, the request's kv_len.
inline u64 SectionKey(i32 section, i64 chunk) {
  return (kMaxRank - static_cast<u64>(kSectionFirst + section)) << kChunkBits |
         (kChunkMask - static_cast<u64>(chunk));
}
inline bool IsSectionKey(u64 key) {
  const u64 rank = kMaxRank - (key >> kChunkBits);
  return rank >= static_cast<u64>(kSectionFirst) && rank < static_cast<u64>(kSharedFirst);
}
// Keys of shared chunks are not above it, all others are.
constexpr u64 LastSharedKey() { return (kMaxRank - kSharedFirst) << kChunkBits | kChunkMask; }
inline i32 ChunkOfKey(u64 key) {
  const u64 low = key & kChunkMask;
  return static_cast<i32>(IsSectionKey(key) ? kChunkMask - low : low);
}
// Whether the last section goes tile by tile for all heads, the heaviest first, where no chunk
// comes behind it that would fill the gaps which its last heads leave: the keys of all of them have
// to stay in the cache. section: of its tiles. Measured (H200, causal, 16 heads): 1 x 2048 tokens
// 42.2 -> 34.9 us, 16 x 1024 150 -> 145; with all sections so 147, and 4 x 4096 402 -> 412.
inline bool GoesByWeight(const PlanRules& rules, i32 section) {
  return section <= rules.cached_tokens;
}

// When heights mix, half of the queues take their items from the other end: large tiles wait for
// the tensor cores, small ones for memory, and so both are busy all the time. Neighbours differ,
// since by its speeds the grid lies on the device GPC by GPC, and who reads keys that L2 does not
// have slows all others that read through the same half of it. Measured (H200, 1 x 4096 of 8192
// beside 128 decodes at 8192, with the grid's second half the other way around): where 50 of 66
// multiprocessors decode they get 47 bytes/ns each and a step of 128 rows takes 1.74 us, where 16
// do it is 59 and 1.44.
// CTAs half a grid apart differ, too: they share a multiprocessor where it has two.
inline bool BeginsWithSmallTiles(i64 num_ctas, i64 cta) {
  return ((cta + (cta >= num_ctas / 2)) & 1) != 0;
}

// --- cuts by length ---

// Borders of a tile's chunks lie at first + i * length.
struct TileCut {
  i32 first, length, num_splits;

  i32 Begin(const QueryTile& t, i32 split) const {
    return static_cast<i32>(Largest(t.kv_begin, first + split * i64{length}));
  }
  i32 End(const QueryTile& t, i32 split) const {
    return static_cast<i32>(Least(t.kv_end, first + (split + i64{1}) * length));
  }
};

// kBalanced: FlashInfer, Algorithm 1 (arXiv 2501.01005, section 3.3.1): no chunk is longer than an
// ideally balanced queue, L = total cost / queues, so that handing chunks out heaviest first leaves
// every queue close to L. The remainder of a cut tile stays short on purpose: it fills gaps.
// total_span_cost: of all tiles. twice_divisor: chunks of at most 2 / twice_divisor of L. No
// smaller limit in any case: tiles that are cut have at most twice_divisor chunks a queue, which is
// what capacities and a device planner's scratch have room for.
inline i64 LongestChunkCost(const PlanRules& rules, i64 total_span_cost, i32 twice_divisor) {
  const i64 queues = static_cast<i64>(rules.num_queues) * twice_divisor;
  return 2 * total_span_cost * rules.num_units / queues;
}
inline constexpr i64 kUncut = 1ll << 62;  // longest chunks where no tile is cut

// longest_cost: of kBalanced.
// kFixedSplit counts from position 0, or from the beginning of a step list: borders depend on
// nothing but the position, so a request has the same partial states, and after the ordered merge
// the same bits, in any batch. kNoSplit: FlashAttention-2 (arXiv 2307.08691, section 3.2), one item
// per query tile and head.
inline TileCut CutTile(const PlanRules& rules, i64 longest_cost, const QueryTile& t) {
  TileCut cut = {t.kv_begin, rules.kv_split, 1};
  if (rules.schedule == kBalanced) {
    const i32 tokens = static_cast<i32>(Least(kPositionLimit, longest_cost / t.kv_cost + 1));
    const i32 rounded = (tokens + rules.tile_kv - 1) / rules.tile_kv * rules.tile_kv;
    cut.length = static_cast<i32>(Largest(rounded, rules.min_chunk));
  } else if (rules.schedule == kFixedSplit) {
    if (rules.max_steps == 0) cut.first = t.kv_begin / rules.kv_split * rules.kv_split;
  }
  if (t.kv_end - cut.first > cut.length) {
    cut.num_splits = (t.kv_end - cut.first - 1) / cut.length + 1;
  }
  return cut;
}

// What any tile's span may cost where kBalanced cuts none at first; -1: it does. Where tiles are no
// more than queues, queues are uneven by what the longest tile is above the mean, and to even that
// out costs every queue an item and two states. Measured (H200, mla/128x4096/16): 187 us with 118
// of 128 tiles cut in two, 156 us without.
inline i64 LongestWholeCost(const PlanRules& rules, i64 num_tiles, i64 longest_cost) {
  if (num_tiles * rules.num_units > rules.num_queues) return -1;
  const i64 fixed = i64{rules.item_cost} + 2 * rules.split_cost;
  return longest_cost + fixed * rules.kv_cost[0];
}
// Longest chunks of the first schedule, if it were longest_cost for what is cut. longest_span_cost:
// of all tiles.
inline i64 FirstLongestCost(const PlanRules& rules, i64 num_tiles, i64 longest_span_cost,
                            i64 longest_cost) {
  return longest_span_cost > LongestWholeCost(rules, num_tiles, longest_cost) ? longest_cost
                                                                              : kUncut;
}

// --- step lists ---

// Steps [begin, end) that rows of a tile may see; none where begin == end.
struct StepSpan {
  i32 begin, end;
};
inline StepSpan StepsOf(const PlanRules& rules, const QueryTile& t) {
  if (t.kv_begin == t.kv_end) return {0, 0};
  return {t.kv_begin / rules.tile_kv, (t.kv_end - 1) / rules.tile_kv + 1};
}

// Columns [begin, end) of a map that have the positions of a step which rows of the tile may see.
struct MapColumns {
  i32 begin, end;
};
inline MapColumns ColumnsOf(const PlanRules& rules, const BlockMap& map, const QueryTile& t,
                            i32 step) {
  const i32 begin = step * rules.tile_kv, end = begin + rules.tile_kv;
  const i32 first = begin > t.kv_begin ? begin : t.kv_begin;
  const i32 last = (end < t.kv_end ? end : t.kv_end) - 1;
  return {first / map.kv_block, last / map.kv_block + 1};
}

// Whether the map has all positions that rows of the tile may see.
inline PlanFault CheckMapColumns(const BlockMap& map, const QueryTile& t) {
  if (t.kv_begin == t.kv_end || (t.kv_end - 1) / map.kv_block < map.num_columns) return {};
  return MakeFault(kFaultMapColumns, t.request, map.num_columns, t.kv_end);
}

// What the lists of all tiles need, behind CheckMapColumns.
inline PlanFault CheckSteps(const PlanRules& rules, i64 num_steps) {
  return num_steps > rules.max_steps ? MakeFault(kFaultSteps, 0, num_steps) : PlanFault{};
}

// Of a tile, 32 steps from `first` on: bit i for step first + i.
struct StepWord {
  unsigned listed, masked;
  i32 first;
};

// An entry of a list.
inline i32 StepEntry(i32 step, bool some_hidden) { return 2 * step + some_hidden; }

// A tile whose list has entries [begin, end).
inline void TakeList(const PlanRules& rules, i32 begin, i32 end, QueryTile* t) {
  t->kv_begin = begin * rules.tile_kv;
  t->kv_end = end * rules.tile_kv;
}

// --- merges ---

// One CTA folds a group at 80 to 100 bytes/ns (H200, reasoned from 64 bytes a clock between L2 and
// a multiprocessor; 50 before a batch was asked for ahead of its use), while the others wait or are
// done. Beyond this many bytes, some 6 us, batches are shared out; a second level costs 2 to 3 us
// of an arrival, a record and the first answer from L2. Decodes of few rows stay below: their folds
// wait for answers, not for bytes.
//
// With shares_folds each CTA has two rows of 64 states of 512 columns, 5 us (H200,
// mla/1x65536/128: 63 us; 134 as a tree, whose first level has whole batches).
inline constexpr i64 kOneFoldBytes = 512 << 10;

// The place of a tile's first partial state among the batches of a fold. With kFixedSplit a chunk
// has the same place in any tile, because a row has the same bits in any tile.
inline i32 FirstFoldPlace(const PlanRules& rules, const QueryTile& t) {
  if (rules.max_steps > 0) return 0;
  return rules.schedule == kFixedSplit ? t.kv_begin / rules.kv_split % kFoldBatch : 0;
}

// Merge groups of a tile that is cut, for one kv head: one, or a parent and one for each batch, but
// for a last batch of one state, whose item arrives at the parent itself. Fewer than two full
// batches gain nothing, and what does not begin with a full one is rare.
inline i32 NumMergeGroups(const PlanRules& rules, const QueryTile& t, i32 num_splits) {
  const i64 bytes = static_cast<i64>(num_splits) * t.qo_len * rules.state_bytes;
  if (rules.shares_folds || num_splits < 2 * kFoldBatch || bytes <= kOneFoldBytes) return 1;
  if (FirstFoldPlace(rules, t) > 0) return 1;
  return 1 + (num_splits + kFoldBatch - 2) / kFoldBatch;
}

// The merge group of a chunk, among those of its tile and kv head: the first is the parent, if
// there is one.
inline i32 MergeGroupOfSplit(i32 num_groups, i32 split) {
  const i32 group = 1 + split / kFoldBatch;
  return group < num_groups ? group : 0;
}

// Of any plan: final ones, at most one for a tile and kv head, and of n >= 16 partial states at
// most n / 6 that have a parent. Each has at least two partial states.
inline i64 MaxMergeGroups(i64 max_final, i64 max_partials) {
  return Least(max_partials / 2 + 1, max_final + max_partials / 6);
}

// --- cuts by ranges ---

// LeanAttention (arXiv 2405.10480, section 4), the stream-K of attention: all tiles in one line,
// cut into as many contiguous ranges of equal cost as there are queues. A range ends inside a tile,
// so queues are balanced to a kv step, at the price of at most one more partial state a queue.
//
// The line measures every tile as one whole item. A border adds one item, and what is cut at all
// pays for a merge: with F(b) the number of different tiles among those of borders 1 to b,
//     cost left of border b = place(b) + (b - 1) * cut + F(b) * split,
// which shall be b / ranges of the total. F comes from a first guess that every border lies in a
// tile of its own; a better one would move a border by less than a split costs.
struct RangeCut {
  i64 line;        // length of the line
  i32 num_ranges;  // at most the number of queues, at least 1
  i64 cut, split;  // costs of the item that a border adds, and of a tile's being cut
};

// t: any of the tiles, which are of one height.
inline RangeCut MakeRangeCut(const PlanRules& rules, const QueryTile& t, i64 line) {
  RangeCut r;
  r.line = line;
  r.cut = ItemCost(rules, t, 0, true);
  r.split = r.cut - ItemCost(rules, t, 0, false);
  // Ranges not shorter than the shortest chunk, and places that never decrease.
  const i64 shortest = Largest(1, Largest(static_cast<i64>(rules.min_chunk) * t.kv_cost, r.split));
  r.num_ranges = static_cast<i32>(Largest(1, Least(rules.num_queues, (line - r.cut) / shortest)));
  return r;
}

// Place of border b, 0 < b < num_ranges, on the line. cut_tiles: F(b); all_cut_tiles: that of the
// last border.
inline i64 BorderPlace(const RangeCut& r, i32 b, i32 cut_tiles, i32 all_cut_tiles) {
  const i64 total = r.line + (r.num_ranges - 1) * r.cut + all_cut_tiles * r.split;
  const i64 each = total / r.num_ranges, left = total % r.num_ranges;
  const i64 part = b * each + b * left / r.num_ranges;  // b * total / num_ranges, in 64 bits
  return Largest(0, part - (b - 1) * r.cut - cut_tiles * r.split);
}

// The kv position of a border that lies at `place`, in a tile that begins at tile_place: the
// nearest step; the tile's nearer end where a piece too short to be worth it would be cut off.
inline i32 BorderPosition(const PlanRules& rules, const QueryTile& t, i64 tile_place, i64 place) {
  const i64 whole = ItemCost(rules, t, 0, false);
  const i64 fits = t.kv_begin + Largest(0, place - tile_place - whole) / t.kv_cost;
  const i64 border = (fits + rules.tile_kv / 2) / rules.tile_kv * rules.tile_kv;
  const bool near_begin = border - t.kv_begin < rules.min_chunk;
  const bool near_end = t.kv_end - border < rules.min_chunk;
  if (near_begin && near_end)
    return border - t.kv_begin < t.kv_end - border ? t.kv_begin : t.kv_end;
  return near_begin ? t.kv_begin : near_end ? t.kv_end : static_cast<i32>(border);
}

// --- shared prefixes ---

// What a tile is besides, in a batch with shared prefixes. A unit is the one tile of a request, or
// what of it nobody shares.
struct TileSharing {
  i32 state_cost;             // of a state beyond split_cost, likewise in kv tokens of tile_q[0]
  i32 unit;                   // its index, if shared tiles have a part of its span; else -1
  i32 first_unit, num_units;  // shared tile: whose tokens it has, in order; else 0

  bool shared() const { return num_units > 0; }
  bool partial() const { return unit >= 0 || shared(); }  // never final, even if it is not cut
};

inline i32 TallestTileTokens(const PlanRules& rules) {
  return rules.tile_tokens[rules.num_tiles - 1];
}

// Positions [0, n) that every row of the tile sees, and that the made-up q_pos of a shared tile
// lets every row see. At least one token of a unit stays its own, and so do fresh ones.
inline i64 ShareableTokens(const PlanRules& rules, const SharingRules& sharing,
                           const PlanInputs& in, const QueryTile& t) {
  i64 n = static_cast<i64>(t.kv_end) - 1;
  if (sharing.fresh_kv) n = Least(n, static_cast<i64>(in.kv_lens[t.request]) - t.qo_len);
  if (rules.window_right >= 0) n = Least(n, static_cast<i64>(t.q_pos) + rules.window_right + 1);
  if (rules.window_left >= 0) {
    if (static_cast<i64>(t.q_pos) + t.qo_len - 1 > rules.window_left) return 0;
    n = Least(n, static_cast<i64>(rules.window_left) + 2 - TallestTileTokens(rules));
  }
  return n;
}

// Where a shared span ends at the latest that may end at `tokens`.
inline i32 SharedEnd(const SharingRules& sharing, i64 tokens) {
  return static_cast<i32>(tokens / sharing.alignment * sharing.alignment);
}

// Writing and reading back a state, in kv tokens of tile_q[0]. Half of what its bytes would cost:
// it stays in a cache.
inline i32 StateCost(const PlanRules& rules, const SharingRules& sharing, i64 num_tokens) {
  return static_cast<i32>(num_tokens * rules.state_bytes / sharing.token_bytes);
}

// Of an item whose state goes through the workspace, as it does in all tiles that share.
inline i64 PartialCost(const PlanRules& rules, const QueryTile& t, i32 state_cost, i64 kv_tokens) {
  return ItemCost(rules, t, kv_tokens, true) + static_cast<i64>(state_cost) * rules.kv_cost[0];
}

// Of `tokens` query tokens over [kv_begin, kv_end); first_token is still to be set. first: the tile
// of its first request.
inline QueryTile MakeSharedTile(const PlanRules& rules, const SharingRules& sharing,
                                const QueryTile& first, i32 tokens, i32 kv_begin, i32 kv_end) {
  QueryTile t = first;
  t.qo_len = tokens;
  t.tile = PickTile(rules, tokens);
  t.kv_begin = kv_begin;
  t.kv_end = kv_end;
  t.q_pos = kv_end - 1;
  t.kv_cost = rules.kv_cost[t.tile];
  if (sharing.cost_by_rows) {
    const i64 rows = static_cast<i64>(tokens) * rules.group_size;
    t.kv_cost =
        static_cast<i32>(Largest(rules.kv_cost[0], t.kv_cost * rows / sharing.tile_rows[t.tile]));
  }
  return t;
}

inline i64 ChunkCost(const PlanRules& rules, const QueryTile& t, const TileSharing& s,
                     i32 num_splits, i64 kv_tokens) {
  if (!s.partial()) return ItemCost(rules, t, kv_tokens, num_splits > 1);
  return PartialCost(rules, t, s.state_cost, kv_tokens);
}

// What CutSharedTile is tried with. Own chunks of kBalanced are at most 2 / twice_divisor of what a
// queue has of them. Shared chunks are at most what a queue has of them, so some queues have two;
// or, with `fewer`, about as much on average, so that hardly any has.
//
// With `leaves_empty` queues without a shared chunk stay empty. Own chunks that such a queue is
// done with early leave their folds to the last chunk of what they share, which ends while all
// others begin to read keys of their own: each step of a fold waits behind those. Measured (H200):
// where 4 of 132 queues had none, one of four such chunks took 8 us longer at prefix/128x8192+256,
// and 14 us at 64x32768+256, and what came behind it ended last.
struct SharedTrial {
  i32 twice_divisor;
  bool fewer, leaves_empty;
};
inline constexpr int kNumSharedTrials = 7;
inline constexpr SharedTrial kSharedTrials[kNumSharedTrials] = {
    {2, false, false}, {1, false, false}, {4, false, false}, {2, true, true},
    {2, true, false},  {1, true, true},   {1, true, false}};

// total_span_cost: of all shared tiles if t is one, of all others if it is not. Shared chunks and
// own chunks are spread over the queues apart from each other, because queues begin with the
// former: each gets its part of both.
inline TileCut CutSharedTile(const PlanRules& rules, const QueryTile& t, const TileSharing& s,
                             i64 total_span_cost, SharedTrial trial) {
  TileCut cut = CutTile(rules, 0, t);
  if (rules.schedule != kBalanced) return cut;
  const i64 queues = static_cast<i64>(rules.num_queues) * (s.shared() ? 2 : trial.twice_divisor);
  const i64 fair = 2 * total_span_cost * rules.num_units / (queues * t.kv_cost) + 1;
  // A large state costs as much as many keys.
  const i64 fixed = 2 * PartialCost(rules, t, s.partial() ? s.state_cost : 0, 0) / t.kv_cost;
  const bool fewer = s.shared() && trial.fewer;
  const i64 longest = Largest(Largest(fair, rules.min_chunk), s.shared() && !fewer ? fixed : 0);
  const i64 len = static_cast<i64>(t.kv_end) - t.kv_begin;
  // Of equal length: a short remainder costs as much in states as a long one.
  const i64 pieces = Largest(1, fewer ? len / longest : CeilDivide(len, longest));
  const i64 steps = CeilDivide(CeilDivide(len, pieces), rules.tile_kv);
  cut.length = static_cast<i32>(Largest(1, steps) * rules.tile_kv);
  cut.num_splits = static_cast<i32>(Largest(1, CeilDivide(len, cut.length)));
  return cut;
}

// Where there are more shared tiles than may be, those nodes stay that save the most: the length of
// a node's span times its units.
inline i64 SharingWeight(i64 kv_tokens, i64 num_units) {
  return Least(kSectionFirst - 1, kv_tokens * num_units);
}

// Shared tiles of a plan for that many requests.
inline i64 MaxSharedTiles(i64 num_requests) {
  return Least(Largest(64, num_requests / 2), kMaxLevels * num_requests);
}

// Rows of all partial states of a plan of kBalanced that shares: as many as without.
inline i64 MaxSharedRows(const PlanRules& rules) {
  return rules.max_balanced_partials * TallestTileTokens(rules) * rules.group_size;
}

// --- which schedule ---

// Within 1 % of the mean the fullest queue is below the noise of a launch.
inline bool IsBalanced(i64 makespan, i64 total_cost, i64 num_queues) {
  return makespan <= 101 * total_cost / (100 * num_queues);
}

// Large tiles leave large states. Measured (H200, decodes and prefill chunks, 714 us at
// FlashInfer): 3 % better balance by 256 splits of 128 rows cost 674 -> 857 us.
inline bool IsWorthMoreSplits(i64 makespan, i64 than) { return 10 * makespan < 9 * than; }

// Whether any retry can be. Shorter chunks are at least as many, so their costs add up to no less
// than total_cost, that of the first cut, and no schedule's fullest queue is below the mean.
inline bool MayBeWorthMoreSplits(i64 total_cost, i64 num_queues, i64 than) {
  return 10 * total_cost / (9 * num_queues) < than;
}

// kAuto. Algorithm 1 splits whatever exceeds its limit, also where the rest of the queues would
// wait less than a split costs: what a schedule of longer chunks, and one of whole tiles, is
// predicted to take is compared, too. Longest chunks of trial r.
enum : i32 { kNumFewerSplits = 2 };
inline i64 LongestOfFewer(const PlanRules& rules, i64 total_span_cost, i32 r) {
  return r == 0 ? LongestChunkCost(rules, total_span_cost, 1) : kUncut;
}

// Twice the divisors by which Algorithm 1 is tried again, in order, while queues are uneven.
inline constexpr int kNumRetries = 4;
constexpr i32 RetryDivisor(i32 r) { return r == 0 ? 3 : r == 1 ? 4 : r == 2 ? 6 : 8; }

}  // namespace jax_attn
