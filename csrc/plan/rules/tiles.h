// How requests are divided into query tiles.
#pragma once

#include "plan/rules/integers.h"

namespace jax_attn {

// Lengths of one request in a batch.
struct RequestLengths {
  i32 qo_begin, qo_len;
  i32 kv_len;
  i32 kv_base;   // kv_indptr
  i32 q_offset;  // kv position of its first query token
};

inline RequestLengths LengthsOf(const PlanInputs& in, i64 r) {
  RequestLengths request;
  request.qo_begin = in.qo_indptr[r];
  request.qo_len = in.qo_indptr[r + 1] - request.qo_begin;
  request.kv_len = in.kv_lens[r];
  request.kv_base = in.kv_indptr[r];
  request.q_offset = in.q_offsets != nullptr ? in.q_offsets[r] : request.kv_len - request.qo_len;
  return request;
}

inline i32 NumPages(const PlanRules& rules, i32 kv_len) {
  return kv_len > 0 ? (kv_len - 1) / rules.page_size + 1 : 0;
}

// Page ids must be below this limit, compared as unsigned.
inline i64 PageIdLimit(const PlanRules& rules) {
  return rules.num_pages >= 0 ? rules.num_pages : kMaxInt32 + 1;
}

// Query tokens of one request that one item per kv head could process over the whole span.
struct QueryTile {
  i32 first_token, qo_len, request;  // as in WorkItem; of a unit or a flat tile a row of q
  i32 tile;                          // index into tile_q
  i32 kv_cost;                       // cost of 16 kv tokens
  i32 kv_begin, kv_end;              // positions, as in WorkItem, that any row of the tile sees
  i32 kv_base, q_pos;                // as in WorkItem
  i32 section;                       // see SectionKey; 0: the request has only this tile
};

// The smallest tile that holds the whole request, else the largest.
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
  // The first tile gets the remainder: under a causal mask it sees the fewest keys, and a step
  // takes as long for a few rows as for all.
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

}  // namespace jax_attn
