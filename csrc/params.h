// Plain arguments of every kernel, and the records of a plan.
//
// Host C++ and NVRTC both read this file, so it includes nothing and uses only built-in types.
// Every pointer has its shape beside it, in the words of docs/api.md, "Shapes". Indices are int32
// in storage. Addresses are computed in 64 bits.
#pragma once

namespace jax_attn {

using i32 = int;
using i64 = long long;
using u64 = unsigned long long;

inline constexpr i32 kPlanMagic = 0x6a61706c;        // "japl"
inline constexpr i32 kFaultyPlanMagic = 0x6a617066;  // "japf": a device planner met a PlanFault
inline constexpr i32 kPlanVersion = 4;
inline constexpr int kMaxTiles = 3;  // tile sizes that one plan may mix
inline constexpr int kMaxVariantOperands = 8;

// How elements of q, k or v are stored.
enum FormatCode : i32 {
  kPlainFormat = 0,  // the spec's dtype
  kE4m3Format,       // 8 bits, 4 of exponent and 3 of mantissa, without infinities (float8_e4m3fn)
  kE5m2Format,       // 8 bits, 5 of exponent and 2 of mantissa (float8_e5m2)
  kInt8Format,       // integers of [-127, 127]
  kMxfp4Format,      // 4 bits, 2 of exponent and 1 of mantissa, with scales that are powers of two:
                     // OCP Microscaling Formats 1.0
  kNvfp4Format,      // the same values, with scales of e4m3
  kInt4Format,       // integers of [-8, 7], with scales of f16
  kNumFormats
};

struct KvFormat {
  const char* name;     // as in kernel names
  i32 bits;             // of a quantized value; 0: the spec's dtype
  bool has_head_scale;  // each head has a scale (q_scale, k_scale, v_scale)
  i32 scale_bytes;      // of each scale behind the values of a token and head; 0: no such scales
  i32 block;            // values that share such a scale; 0: the whole row
  i32 span;             // 4 bits: byte i of every n <= span values has values i and n / 2 + i
};
// static, here and below: objects compiled for different CPU instruction sets must share no
// function.
static constexpr KvFormat FormatOf(i64 code) {
  return code == kE4m3Format    ? KvFormat{"e4m3", 8, true, 0, 0, 0}
         : code == kE5m2Format  ? KvFormat{"e5m2", 8, true, 0, 0, 0}
         : code == kInt8Format  ? KvFormat{"int8", 8, false, 4, 0, 0}
         : code == kMxfp4Format ? KvFormat{"mxfp4", 4, false, 1, 32, 32}
         : code == kNvfp4Format ? KvFormat{"nvfp4", 4, true, 1, 16, 64}
         : code == kInt4Format  ? KvFormat{"int4", 4, false, 2, 32, 64}
                                : KvFormat{"", 0, false, 0, 0, 0};
}

// Scales behind the quantized values of a row, and the bytes of one head's row with both. Not for
// kPlainFormat.
static constexpr i64 NumRowScales(i64 code, i64 head_dim) {
  const KvFormat format = FormatOf(code);
  return format.scale_bytes == 0 ? 0
         : format.block == 0     ? 1
                                 : (head_dim + format.block - 1) / format.block;
}
static constexpr i64 QuantizedRowBytes(i64 code, i64 head_dim) {
  const KvFormat format = FormatOf(code);
  return head_dim * format.bits / 8 + NumRowScales(code, head_dim) * format.scale_bytes;
}

// Whether CUDA kernels convert these quantized rows to the spec's dtype before they multiply them.
static constexpr bool DequantizesRows(i64 code) {
  return code != kPlainFormat && code != kE4m3Format;
}

// Why a batch has no plan, in the order in which planners check. A device planner cannot raise: it
// leaves a faulty plan, and plan/fault.cc turns its words into the host planner's sentence.
enum PlanFaultCode : i32 {
  kNoFault = 0,
  kFaultQoIndptrBegin,   // qo_indptr[0] is not 0
  kFaultQoIndptrOrder,   // at: entry; expected: the entry before
  kFaultQoTokens,        // max_qo_tokens
  kFaultKvIndptrBegin,   // page_indptr[0], or ragged kv_indptr[0], is negative
  kFaultKvIndptrOrder,   // at: entry; expected: the entry before
  kFaultKvLenNegative,   // at: request, here and below
  kFaultKvLenTooLarge,   // 2^30
  kFaultQueryPositions,  // got: q_offset
  kFaultKvCapacity,      // max_kv_pages, or ragged max_kv_tokens
  kFaultPageIndices,     // got: entries; expected: page_indptr[-1]
  kFaultKvOfRequest,     // paged: got pages, expected kv_len; ragged: got kv_len, expected rows
  kFaultPageId,          // at: entry of page_indices; expected: its request
  kFaultTiles,           // got: query tiles; limit 2^25
  kFaultCost,            // got: kv tokens that query tiles read, over all heads of a partition;
                         // limit 2^32
  kFaultChunks,          // got: chunks of kFixedSplit; limit 2^26
  kFaultItems,           // max_items
  kFaultMergeGroups,     // max_items
  kFaultPartials,        // max_items
  kFaultPartialRows,     // max_partial_rows
  // For PrefixLevels. at: entry * kMaxLevels + level, except for the last one.
  kFaultPrefixBegin,    // request_indptr[0] is not 0
  kFaultPrefixOrder,    // expected: the entry before
  kFaultPrefixEnd,      // expected: batch_size
  kFaultPrefixNesting,  // expected: border `entry` of the level before, which is missing here
  kFaultPrefixLen,      // at: request; got: tokens; expected: at most its kv_len
  kFaultPrefixPages,    // at: entry of page_indices; expected: that of the request before
  // For a BlockMap.
  kFaultMapColumns,  // at: request; got: columns; expected: positions that its queries may see
  kFaultSteps,       // max_steps
};

struct PlanFault {
  i32 code, at, got, expected;
};

// One batch, as planners read it.
struct PlanInputs {
  const i32* qo_indptr;     // [batch_size + 1] tokens
  const i32* kv_lens;       // [batch_size] tokens, new ones included
  const i32* kv_indptr;     // [batch_size + 1] pages (page_indptr); ragged: first rows of k and v
  const i32* page_indices;  // [num_page_indices]
  const i32* q_offsets;     // [batch_size] kv position of the first query token, or null: kv_len -
                            // qo_len
  i64 batch_size;
  i64 num_page_indices;
};

// Prefixes that requests share, as the user gives them: level by level, the outermost first. The
// first prefix_lens[l, i] tokens of requests [request_indptr[l, i], request_indptr[l, i + 1]) lie
// in the same pages. Every level divides the prefixes of the level before. Requests without query
// tokens are skipped.
struct PrefixLevels {
  const i32* request_indptr;  // [num_levels, num_prefixes + 1] requests, 0 to batch_size
  const i32* prefix_lens;     // [num_levels, num_prefixes] tokens
  i32 num_levels;             // at most kMaxLevels
  i32 num_prefixes;           // of each level, fewer than 2^23; the last ones may be empty
};
enum : i32 {
  kMaxLevels = 8
};  // enough for an agent's tools, a document, a conversation, its
    // forks

// The effect of a mask on blocks of q_block query tokens and kv_block positions. Row block i has
// rows [i * q_block, (i + 1) * q_block) of q, each with the positions of its own request.
struct BlockMap {
  const unsigned char* classes;  // [num_rows, num_columns] kSomeVisible | kSomeHidden
  i64 num_rows, num_columns;
  i32 q_block, kv_block;
};
// Whether any element of the block may be visible, and whether any may be hidden. OR of the classes
// of parts is the class of the whole.
enum : unsigned char { kSomeVisible = 1, kSomeHidden = 2 };

enum Schedule : i64 { kBalanced = 0, kFixedSplit = 1, kNoSplit = 2, kAuto = 3 };

// Parameters of planners: AttentionSpec and KernelConfig (spec.h) as numbers that a kernel can
// take.
struct PlanRules {
  i32 schedule;  // a Schedule; kAuto is kBalanced with fewer_splits
  i32 num_kv_heads;
  i32 group_size;
  i32 state_bytes;        // for each query token and kv head
  i32 shares_reductions;  // 1: CTAs share the reduction of a merge group, so no group needs a
                          // parent
  i32 window_left;        // -1: unlimited
  i32 window_right;       // -1: unlimited; causal is 0
  i32 kv_split;           // kFixedSplit: tokens of a chunk; kNoSplit: 2^30, no limit
  i32 page_size;          // 0: ragged
  i32 max_steps;          // capacity of the tiles' step lists, see WorkItem; 0: there are none

  i32 num_tiles;
  i32 tile_tokens[kMaxTiles];  // query tokens of a tile, ascending: tile_q / group_size
  i32 tile_kv;
  i32 min_chunk[kMaxTiles];  // of each tile M
  i32 item_cost;
  i32 split_cost[kMaxTiles];
  i32 kv_cost[kMaxTiles];
  i32 cached_tokens;  // see GoesByWeight

  // Queues and kv heads are divided into equal partitions with the same schedule. Every head has
  // the same lengths, so one partition is planned and the others are copies.
  i32 num_ctas;        // queues of the plan, num_partitions * num_queues
  i32 num_partitions;  // the largest number that divides both queues and head units
  i32 num_queues;      // of a partition
  i32 num_units;       // head units of a partition
  i32 heads_per_unit;  // kv heads that stay together in a queue
  i32 fewer_splits;    // 1: what kBalanced would do is compared with longer chunks and with no
                       // splits

  i64 max_qo_tokens;
  i64 max_kv;     // paged: entries of page_indices; ragged: rows of k, v
  i64 num_pages;  // page ids are below it; -1: unknown
  i64 max_items;
  i64 max_merge_groups;
  i64 max_partials;
  i64 max_partial_rows;
  i64 max_balanced_partials;  // kBalanced: the most that any of its schedules may have
};

// Further parameters, for shared prefixes.
struct SharingRules {
  i32 alignment;             // borders of shared spans are multiples of it
  i32 token_bytes;           // of one head's kv token
  i32 fresh_kv;              // as in AttentionSpec
  i32 cost_by_rows;          // as in KernelConfig
  i32 tile_rows[kMaxTiles];  // tile_q
};

// Live counts of a plan. Everything behind them in the buffer is padding that is never read.
struct PlanHeader {
  i32 magic;
  i32 version;
  i32 batch_size;
  i32 nnz_qo;  // live query tokens; rows [nnz_qo, max_qo_tokens) of o, lse are padding
  i32 num_items;
  i32 num_merge_groups;
  i32 num_partial_rows;
  i32 nnz_kv;             // paged: live entries of page_indices; ragged: live rows of k, v
  i32 max_page_id;        // largest entry of page_indices, -1 if there is none
  i32 num_partials;       // live entries of partial_rows
  i32 num_shared_tokens;  // live entries of qo_indices
  // With kFaultyPlanMagic, whose plan has no items, tokens or requests; else 0.
  i32 fault;  // a PlanFaultCode
  i32 fault_at;
  i32 fault_got;
  i32 fault_expected;
  i32 num_steps;  // live entries of steps
};
static_assert(sizeof(PlanHeader) == 64, "the plan header is 16 words");

// Capacities of a launch. Kernels compare the counts of a header with it (HeaderCounts in
// cuda/common/header.cuh) before they read anything behind the header.
struct PlanLimits {
  i64 num_pages;  // pages of a layer's pool; 1 when ragged
  i32 max_batch;
  i32 max_qo_tokens;
  i32 max_items;
  i32 max_merge_groups;
  i32 max_partial_rows;
  i32 max_kv;  // paged: entries of page_indices; ragged: rows of k, v
  i32 max_partials;
  i32 max_shared_tokens;
  i32 max_steps;
};

// One partial attention state: (qo_len query tokens) x (one kv head) x (kv span [kv_begin,
// kv_end)).
//
// Rows of the item: row = token * group_size + g, for token in [0, qo_len), g in [0, group_size).
// It reads q[QueryRow(token), kv_head * group_size + g]. Query token `token` has kv position q_pos
// + token and sees position j of the span iff
//     q_pos + token - window_left <= j <= q_pos + token + window_right   (-1: unlimited on that
//     side).
// Merge groups [merge_idx, merge_idx + num_groups) cover the item's tokens in order. Their number
// tells three kinds of items apart:
//   0: IsFinal. The item writes o and lse itself; partial_row and merge_idx are -1.
//   1: its tokens are consecutive rows of q, as in a final item.
//   several: IsShared. Its tokens belong to several requests, and every row sees the whole span;
//   q_pos is chosen so that the inequality holds.
//
// kv_begin and kv_end are kv offsets. Without step lists the offset of a key is its position. An
// empty span (kv_begin == kv_end) is legal and yields the identity (0, -inf). Main-loop steps lie
// at absolute multiples of tile_kv, whatever kv_begin is, so a row meets its keys in the same
// groups in any tile. Slots outside the span are not read.
//
// With step lists (masks that save work) the main loop runs the steps that the tile's list names.
// Entry e of `steps` is 2 * step + masked. Step i has positions [i * tile_kv, (i + 1) * tile_kv),
// and `masked` tells whether the element mask hides anything there. kv offsets then count along the
// lists of all tiles, one behind the other, tile_kv for each entry: an item has entries [kv_begin /
// tile_kv, kv_end / tile_kv), whose steps ascend. So planners cut and balance lists like spans of
// keys.
struct WorkItem {
  i32 first_token;  // as QueryRow counts: a row of q, or if shared an entry of qo_indices
  i32 qo_len;       // query tokens, qo_len * group_size <= tile_q[tile]
  i32 kv_head;
  i32 tile;      // index into KernelConfig.tile_q
  i32 kv_begin;  // kv offsets, clipped to what any row of the tile can see
  i32 kv_end;
  i32 kv_base;  // where the request's position 0 is. paged: its page is this entry of page_indices;
                // ragged: this row of k and v
  i32 q_pos;    // kv position of query token 0 of the item; may be negative
  i32 partial_row;  // first row of its state in the workspace; final: -1
  i32 merge_idx;    // its first merge group; final: -1
  i32 request;      // request of its first token; kernels read it only for k_new and v_new
  i32 num_groups;   // merge groups
};
static_assert(sizeof(WorkItem) == 48, "a work item is three 16-byte loads");

// static, here and below: see FormatOf.
static constexpr bool IsShared(i32 num_groups) { return num_groups > 1; }
static constexpr bool IsFinal(const WorkItem& item) { return item.num_groups == 0; }
static constexpr bool IsShared(const WorkItem& item) { return IsShared(item.num_groups); }
// The row of q of query token `token` of an item. qo_indices: the plan's.
static constexpr i64 QueryRow(const WorkItem& item, const i32* qo_indices, i64 token) {
  return IsShared(item) ? qo_indices[item.first_token + token] : item.first_token + token;
}

// Softmax state of a row after some keys: 4^(base-4 logit), summed over the keys, is sum *
// 4^max_log4. (-inf, 0): no key. max_log4 is the running max: the maximum, or a value so near that
// nothing overflows and nothing that counts vanishes. Logits of any size keep their differences
// this way; in the logarithm of the sum in f32 they would not.
// The base is 4 because log4(e) is below 1: the base-4 logit is finite in f32 if the logit is,
// where the base-2 logit overflows from 2.36e38 on. Twice a base-4 logit is the base-2 logit,
// exactly.
struct RowState {
  float max_log4;
  float sum;
};

// A reduction takes so many states at a time: enough in flight for one trip to memory, few enough
// for registers. The states of a batch are reduced to one, and these are added one after the other.
inline constexpr i32 kReduceBatch = 8;

// Consecutive query tokens of one request and one kv head, whose state is split over num_partials
// items. Partial i is at rows [first, first + qo_len * group_size) of the workspace with first =
// partial_rows[partials_begin + i * partials_step], in kv order. The last CTA to finish reduces the
// partials in that order, so bits do not depend on which CTA it is.
// Large reductions are shared by several CTAs. MLA states are large: CTAs take slices of a group's
// rows. Otherwise each batch is a group of its own. Its result is written to the rows of its first
// partial, and the CTA that did it arrives at the parent. A parent adds the states of batches, so
// bits are those of a single group.
struct MergeGroup {
  i32 qo_begin;  // a row of q
  i32 qo_len;
  i32 kv_head;
  i32 num_partials;
  i32 partials_begin;
  i32 partials_step;  // parent: kReduceBatch, the entries of a child; else 1
  i32 parent;         // merge group that continues with the result; -1: the result is final, o and
                      // lse
  i32 first_offset;   // offset of its first partial in a batch; only windows of kFixedSplit have
                      // another than 0
};
static_assert(sizeof(MergeGroup) == 32, "a merge group is two 16-byte loads");

// Whether the group's partials are results of other groups.
static constexpr bool IsParent(const MergeGroup& group) { return group.partials_step != 1; }

// A CUtensorMap: the description of an array for TMA.
struct alignas(64) TensorMap {
  unsigned long long words[16];
};

// An array that a variant's program reads (variant/program.h), row major.
struct VariantOperand {
  const void* data;
  i32 dims[4];  // one for each axis; each at least 1
};

// Operands, results, plan sections and workspace of one attention call. The layer stride of k and v
// is num_pages * page_size * row.
struct AttentionParams : PlanLimits {
  const void* q;       // [max_qo_tokens, num_qo_heads, head_dim_qk]
  const void* k;       // paged: [num_layers, num_pages, page_size, num_kv_heads, head_dim_qk]
  const void* v;       //   ... head_dim_vo]; ragged: [max_kv_tokens, num_kv_heads, head_dim_*]
  const float* sinks;  // [num_qo_heads] natural-log units, or null
  const i32* layer;    // [1] index of the layer in k, v; null: 0

  const PlanHeader* header;  // [1]
  const i32*
      queue_indptr;       // [num_ctas + 1] items of queue c: [queue_indptr[c], queue_indptr[c + 1])
  const WorkItem* items;  // [max_items]
  const MergeGroup* merge_groups;  // [max_merge_groups]
  const i32* partial_rows;         // [max_partials]
  const i32* qo_indices;           // [max_shared_tokens]
  const i32* page_indices;         // [max_kv_pages]; not read when ragged

  void* o;     // [max_qo_tokens, num_qo_heads, head_dim_vo]
  float* lse;  // [max_qo_tokens, num_qo_heads] natural log

  // [max_merge_groups] states of each group that arrived, zero at entry. With MLA on CUDA, then the
  // slices of its reduction that were taken (SliceCounter).
  i32* merge_counters;
  // With counter_parity there are two such arrays, one behind the other, and launches alternate:
  // each counts in one and zeroes the other for the next launch, whatever the last one left there.
  i32* counter_parity;       // [num_ctas] 0 or 1, the same for all; null: there is one array
  RowState* partial_states;  // [max_partial_rows]
  float* partial_o;          // [max_partial_rows, head_dim_vo] unnormalised: sum of p * v
  i64* item_times;           // [max_items, 2] begin and end, ns from any origin; null: not recorded

  i32 num_ctas;
  i32 num_qo_heads;
  i32 num_kv_heads;
  i32 group_size;  // num_qo_heads / num_kv_heads
  i32 head_dim_qk;
  i32 head_dim_vo;
  i32 mla;                // 1: v is the first head_dim_vo columns of k, which has one head
  i32 page_size;          // 0: ragged
  i32 window_left;        // -1: unlimited
  i32 window_right;       // -1: unlimited; causal is 0
  float sm_scale;         // logits = sm_scale * (q . k)
  float logits_soft_cap;  // 0: off; else logits = cap * tanh(logits / cap), before masks

  // Hopper: TMA maps of k and v, [num_layers, rows of a layer, num_kv_heads, head_dim], whose tiles
  // are HopperTmaRows rows and 64 columns of a head. 0: there are none.
  i32 has_tensor_maps;
  i32 num_layers;
  TensorMap k_map, v_map;
  // The same for o, [max_qo_tokens, num_qo_heads, head_dim_vo]; its tiles are the 16 rows of a
  // warp, in a kv head's group of heads.
  i32 has_o_map;
  TensorMap o_map;

  // Keys and values of the batch's query tokens, which are then not read from pages. Row i of
  // request r, row qo_indptr[r] + i, is position kv_len - qo_len + i. Null: pages have all of them.
  const void* k_new;               // [max_qo_tokens, num_kv_heads, head_dim_qk]
  const void* v_new;               // [max_qo_tokens, num_kv_heads, head_dim_vo]
  const i32* qo_indptr;            // [max_batch + 1]
  const i32* kv_lens;              // [max_batch]
  TensorMap k_new_map, v_new_map;  // if has_tensor_maps

  // Scales of formats with has_head_scale: an element is its stored value times the scale of its
  // head. Scales of q and k are > 0, all are finite.
  const float* q_scale;  // [num_qo_heads], or null: 1
  const float* k_scale;  // [num_kv_heads], or null: 1; mla: [1]
  const float* v_scale;  // [num_kv_heads], or null: 1; mla: k_scale
  i32 q_format;          // FormatCode; plain: the type of o
  i32 kv_format;         // the same for k and v

  const i32* steps;  // [max_steps] step lists, see WorkItem; null: there are none
  VariantOperand variant_operands[kMaxVariantOperands];  // of the problem's program
  i32 sums_weights;  // 1: a variant without softmax: o = sum of logit times v, lse = 0
};

// Rules of the Hopper kernel of the forward pass, cuda/sm90/attention.cuh.

// Largest number of rows of items that cuda/sm90/decode.cuh computes; and whether a kernel has no
// other items.
enum : i32 { kHopperDecodeRows = 32 };
constexpr bool HopperOnlyDecodes(bool mla, i64 num_tiles, i64 tile_q0) {
  return !mla && num_tiles == 1 && tile_q0 == kHopperDecodeRows;
}

// Rows of K or V in one TMA tile: what one of a producer's four warps copies of a step of tile_kv
// tokens, or a page. 0: no TMA. Rows with scales of their own are no vectors of 16 bytes. Tiles of
// fewer than 8 rows are impossible, as a swizzle repeats after 8. Decodes copy row by row (see
// UsesTma).
constexpr i32 HopperTmaRows(i64 kv_format, i64 page_size, i64 tile_kv, bool only_decodes) {
  const i64 warp_tokens = tile_kv / 4;
  if (only_decodes || FormatOf(kv_format).scale_bytes != 0) return 0;
  if (page_size % warp_tokens == 0) return static_cast<i32>(warp_tokens);  // ragged as well
  return page_size % 8 == 0 && warp_tokens % page_size == 0 ? static_cast<i32>(page_size) : 0;
}

// Whether a CTA has one consumer, whose tiles have 64 rows. CTAs share a multiprocessor then, so
// that one computes while another begins or ends an item: as many as registers and shared memory
// hold.
constexpr i64 kHopperShortWarps = 8;  // a producer and a consumer
constexpr bool HopperHasOneConsumer(i64 num_warps) { return num_warps == kHopperShortWarps; }
constexpr i32 HopperCtasPerSm(i64 num_warps, i64 larger_head_dim) {
  return !HopperHasOneConsumer(num_warps) ? 1 : larger_head_dim <= 64 ? 3 : 2;
}

// Query tokens in one TMA tile of o, which is a warp's 16 rows. 0: 16 rows are not whole tokens of
// a kv head's group, and o is stored without TMA.
constexpr i32 HopperOutputTmaTokens(i64 group_size) {
  return 16 % group_size == 0 ? static_cast<i32>(16 / group_size) : 0;
}

// The backward pass of an attention call. `forward` has its operands and plan; o, lse, sinks and
// the workspace are not read there.
struct BackwardParams {
  AttentionParams forward;
  const float* lse;  // [max_qo_tokens, num_qo_heads] natural log, of the forward pass
  const float* d;    // [max_qo_tokens, num_qo_heads] sum over head_dim_vo of d_o * o, minus d_lse
  const void* d_o;   // [max_qo_tokens, num_qo_heads, head_dim_vo]
  // Sums for a variant's operands, in their shapes, 0 at entry. Null: the operand has no floats, or
  // its gradient is not wanted.
  float* d_operands[kMaxVariantOperands];
};

// Rules of the Hopper kernel of the backward pass, cuda/sm90/backward.cuh, for the head dims of q
// and k, and of v. Wide ones have a loop of their own, backward_wide.cuh.
constexpr bool IsHopperBackwardWide(i32 dim_qk, i32 dim_vo) { return dim_qk > 128 || dim_vo > 128; }
// Keys of a block, and query tokens of a tile.
constexpr i32 HopperBackwardKeys(i32 dim_qk, i32 dim_vo) {
  return IsHopperBackwardWide(dim_qk, dim_vo) ? 64 : 128;
}
constexpr i32 HopperBackwardRows(i32 dim_qk, i32 dim_vo) {
  return dim_qk <= 64 && dim_vo <= 64 ? 128 : 64;
}
// Columns of q and k in shared memory, and of the sums that become d_q; the last ones are zeros.
// 64 at a time swizzle together, and each of two consumers sums as many.
constexpr i32 HopperBackwardColumns(i32 dim_qk, i32 dim_vo) {
  if (IsHopperBackwardWide(dim_qk, dim_vo)) return (dim_qk + 63) / 64 * 64;
  return HopperBackwardRows(dim_qk, dim_vo) == 128 ? 64 : 128;
}
// Rows of k and v in one TMA tile: all keys of a block, or the largest power of two that divides
// pages and blocks. 0: that would be fewer than the 8 rows after which a swizzle repeats.
constexpr i32 HopperBackwardTmaRows(i32 page_size, i32 block_keys) {
  if (page_size == 0) return block_keys;
  i32 rows = 1;
  while (rows < block_keys && page_size % (2 * rows) == 0) rows *= 2;
  return rows < 8 ? 0 : rows;
}

// Launches of the backward pass on CUDA devices, in their order.
enum BackwardPhase : i32 {
  kBackwardReadPlan = 0,   // portable
  kBackwardLinkPages = 1,  // portable, if paged
  kBackwardSums = 2,       // Hopper: d_k, d_v, and the sums that become d_q
  kBackwardRound = 3,      // Hopper: d_q from these
  kBackwardRows = 4,       // portable: all results; with the Hopper kernel, if needs_portable
  // For a variant's operands that are differentiated:
  kBackwardBounds = 5,      // operand_bounds and num_terms
  kBackwardOperands = 6,    // operand_sums
  kBackwardToOperands = 7,  // converts operand_sums to f32
};

// The backward pass on CUDA devices. It uses lengths and page tables, not the schedule.
struct BackwardCudaParams {
  AttentionParams forward;  // as in BackwardParams; with the Hopper kernel, k_map and v_map
  const float* lse;         // as in BackwardParams, likewise d and d_o
  const float* d;
  const void* d_o;
  // Results, in the element type. 0 at entry; with the Hopper kernel only d_k and d_v, and only
  // with pages.
  void* d_q;             // [max_qo_tokens, num_qo_heads, head_dim_qk]
  void* d_k;             // as k, all layers
  void* d_v;             // as v
  i64 num_elements[3];   // of d_q, d_k and d_v
  const i32* kv_indptr;  // [max_batch + 1] pages (page_indptr); ragged: first rows
  i32 max_entries;       // of page_indices
  i32 phase;             // BackwardPhase
  // Workspace, 0 at entry.
  i32* num_taken;      // [1] units that CTAs took
  i32* q_begins;       // [max_batch] kv position of a request's first query token
  i32* next_entries;   // [max_entries] 1 + the next entry with the same page; 0: none
  i32* is_read;        // [max_entries] 1: its request has tokens there
  i32* first_entries;  // [num_pages] max_entries - the first entry that is read; 0: none
  i32* last_entries;   // [num_pages] 1 + the last entry that is read; 0: none
  // Only with step lists: the list of the tile that a query token belongs to. All 0: it sees
  // nothing.
  i32* list_begins;  // [max_qo_tokens] max_steps - the first entry of its list
  i32* list_ends;    // [max_qo_tokens] 1 + the last one
  i32* tile_ends;    // [max_qo_tokens] 1 + its last row of q
  // Only with the Hopper kernel, else null. A request's first tile is qo_indptr / tile rows +
  // request, so max_tiles = max_qo_tokens / tile rows + max_batch are enough.
  i32* num_blocks_taken;  // [1] blocks of keys that CTAs took
  // [1] 1: kBackwardRows must compute all results again, as some are not finite, or shared pages
  // are not prefixes.
  i32* needs_portable;
  // [max_tiles, num_qo_heads] key blocks that have added to a tile; with pages: keys
  i32* tile_progress;
  // Not 0 at entry. In the order of registers, with the columns of HopperBackwardColumns.
  float* d_q_sums;  // [max_tiles, num_qo_heads, tile rows * columns]
  i32 max_tiles;
  // [1, max_qo_tokens, num_qo_heads, head_dim], TMA tiles of a tile's rows; if
  // forward.has_tensor_maps
  TensorMap q_map, d_o_map;
  // Only for the Hopper kernel with pages. A request's own keys begin at its first page that no
  // earlier request has. 0 at entry:
  i32* own_begins;  // [max_batch] where they begin, tokens, a multiple of page_size
  i32* page_lens;   // [num_pages] tokens of the request that has the most in it
  // Not 0 at entry.
  i32* readers;   // [max_entries] the entry's request
  i32* run_ends;  // [max_entries] where the request's keys with the entry's owner end, tokens
  // For a variant's operands that are differentiated, else null: [num_operand_elements]. Sums of
  // integers in the unit of OperandScale, 0 at entry. At the end pairs of words: the f32 gradient
  // and 0.
  i64* operand_sums[kMaxVariantOperands];
  i64 num_operand_elements[kMaxVariantOperands];
  // Workspace, 0 at entry.
  i64* num_terms;          // [1] most terms in the sum of one element
  i32* num_operand_units;  // [2] units that CTAs took of kBackwardBounds and of kBackwardOperands
  i32* operand_bounds;     // [kMaxVariantOperands] largest finite term of each, f32
};

// Appends k_new and v_new of the batch's query tokens at positions kv_len - qo_len + i of their
// requests.
struct AppendParams : PlanLimits {
  void* k_pages;      // [num_layers, num_pages, page_size, num_kv_heads, head_dim_qk], in place
  void* v_pages;      // [num_layers, num_pages, page_size, num_kv_heads, head_dim_vo], in place;
                      // null with MLA, whose k_pages also hold the values
  const void* k_new;  // [max_qo_tokens, num_kv_heads, head_dim_qk]
  const void* v_new;  // [max_qo_tokens, num_kv_heads, head_dim_vo]
  const i32* layer;   // [1] or null: 0
  const PlanHeader* header;
  const i32* qo_indptr;     // [max_batch + 1]
  const i32* kv_lens;       // [max_batch]
  const i32* page_indptr;   // [max_batch + 1]
  const i32* page_indices;  // [max_kv_pages]
  i64 k_row_bytes;          // num_kv_heads * head_dim_qk * element size
  i64 v_row_bytes;
  i32 page_size;

  // Scales of heads. A float8 value is new / scale, rounded to nearest, ties to even, at most the
  // format's largest; NaN stays NaN. cpu/kernels/codec.h has the other formats.
  const float* k_scale;  // [num_kv_heads], or null: 1
  const float* v_scale;  // [num_kv_heads], or null: 1
  i32 kv_format;         // FormatCode; plain: pages have the type of k_new and v_new
  i32 dtype;             // the DType of these
  i32 num_kv_heads;
  i32 head_dim_qk;
  i32 head_dim_vo;

  // append_rotated: new rows come as one array, and its queries and keys are rotated on the way.
  // k_new and v_new are null.
  const void* qkv;   // [max_qo_tokens, (num_qo_heads + num_kv_heads) * head_dim_qk + num_kv_heads *
                     // head_dim_vo]: heads of q, of k, of v
  const float* cos;  // [max_qo_tokens, head_dim_qk / 2]
  const float* sin;
  void* q;  // [max_qo_tokens, num_qo_heads, head_dim_qk]
  i32 num_qo_heads;
};

// Warps that share a token of append_rotated. Each has 32 quads of v, or of q and k with the quads
// they are rotated with.
constexpr i32 AppendRotatedWarps(const AppendParams& p) {
  const i32 quads =
      (p.num_qo_heads + p.num_kv_heads) * p.head_dim_qk / 8 + p.num_kv_heads * p.head_dim_vo / 4;
  return (quads + 31) / 32;
}

// The device planner. All words of the plan buffer, whose sections these are, are 0 at entry.
struct PlanParams {
  PlanInputs inputs;
  PlanRules rules;
  PlanHeader* header;
  i32* queue_indptr;         // [num_ctas + 1]
  i32* qo_indptr;            // [max_batch + 1]
  i32* kv_lens;              // [max_batch]
  i32* kv_indptr;            // [max_batch + 1]
  MergeGroup* merge_groups;  // [max_merge_groups]
  i32* partial_rows;         // [max_partials]
  WorkItem* items;           // [max_items]
  i32* page_indices;         // [max_kv_pages]
  unsigned char* scratch;    // for what shared memory does not hold; 16-byte aligned
  // With prefix levels:
  PrefixLevels levels;
  SharingRules sharing;
  i32* qo_indices;  // [max_shared_tokens]
  // With step lists:
  BlockMap block_map;
  i32* steps;  // [max_steps]
};

// o = sum_i exp(lse_i - lse) * o_i with lse = log sum_i exp(lse_i); (0, -inf) is the identity.
struct MergeParams {
  const void* o_parts;     // [num_states, num_rows, head_dim_vo]
  const float* lse_parts;  // [num_states, num_rows] natural log
  void* o;                 // [num_rows, head_dim_vo]
  float* lse;              // [num_rows]
  i64 num_rows;            // tokens * heads
  i32 num_states;
  i32 head_dim_vo;
};

// How a quantized weight is stored (models/quantized.py): an unsigned integer of 4 bits, or an
// element of OCP floating point of 4 or 8 bits.
enum WeightFormat : i32 { kInt4Weights = 0, kE2m1Weights, kE4m3Weights, kNumWeightFormats };

constexpr i32 WeightsPerByte(i64 weight_format) { return weight_format == kE4m3Weights ? 1 : 2; }

// Depth of a step of the quantized matmul.
inline constexpr i32 kProductStep = 64;

// x @ W, as sums over num_splits parts of the depth, where W is (quantized - zero) * scale.
struct QuantizedProductParams {
  const void* x;               // [num_rows, depth]
  const unsigned char* codes;  // [depth / WeightsPerByte, columns]; two values of 4 bits are rows 2
                               // i, in the low half, and 2 i + 1
  const void* scales;          // [groups, columns] f32; kE2m1Weights: u8 of 2^(scale - 127)
  const unsigned char* zeros;  // [groups, columns]; null: 0. Only for kInt4Weights
  void* y;                     // [num_splits, num_rows, columns]
  i32 num_rows;
  i32 depth;
  i32 columns;
  i32 group_size;  // rows of a scale; the last group may be shorter
  i32 num_splits;
  i32 split_depth;  // depth of a split, a multiple of kProductStep; the last ones may be shorter
  i32 is_wide;      // 1: y is f32, else it has the type of x
};

// Rows that a thread of merge has at a time.
constexpr i32 MergeRows(const MergeParams& p) { return p.num_states <= 2 ? 2 : 1; }

// ---- recurrent states ----
// jax_attn/_spec/state_spec.py has the recurrence.

// A row of a plan's chunks (jax_attn/_plan/state_plan.py).
struct StateChunk {
  i32 begin, length;  // rows of q, k, v and o
  i32 is_first;       // 1: the state before it is that of read_slot, else that of the chunk before
  i32 read_slot, write_slot, request;  // slot -1: zeros; nowhere
};

// Words of a plan's header.
enum StatePlanWord : i32 {
  kStatePlanBatch = 0,
  kStatePlanTokens,
  kStatePlanChunks,
  kStatePlanFault,  // not 0: there are no chunks, and results are NaN
  kStatePlanHeaderWords = 8
};

// A plan and a pool as kernels on devices read them. Chunks of a request follow each other, and
// requests follow each other in the order of their tokens. Read it by cuda/common/state_plan.cuh,
// which takes words out of range for a fault.
struct StatePlanParams {
  const i32* header;         // [kStatePlanHeaderWords]
  const StateChunk* chunks;  // [max_chunks], 4-byte aligned
  const i32* layer;          // []
  i32 max_chunks;
  i32 max_tokens;  // rows of q, k, v and o; those behind the plan's tokens become 0
  i32 num_slots;
  i32 num_layers;  // of the pool; 1 if it is not stacked
};

enum LinearDecay : i32 { kNoDecay = 0, kHeadDecay, kChannelDecay };

// The loops of linear attention on devices.
enum LinearLoop : i32 {
  kRecurrence = 0,  // cuda/any/linear_attention.cuh: token by token, the state in registers
  kPortableChunks,  // cuda/sm80/linear_attention.cuh: chunks, by mma.sync
  kHopperChunks,    // cuda/sm90/linear_attention.cuh: chunks, by wgmma
  kNumLinearLoops
};

// The part of a state that a CTA of the recurrence has. A lane has vectors of 16 bytes of it. A
// warp has 8 of them side by side, which are lines of 128 bytes, in four rows at a time.
struct RecurrenceTile {
  i32 vector;  // elements
  i32 column_warps, row_warps;
  i32 rows;  // of a lane
  constexpr i32 num_threads() const { return column_warps * row_warps * 32; }
};
inline constexpr i32 kRecurrenceColumnLanes = 8, kRecurrenceRowLanes = 4;
// Registers of a lane that hold the state: with f32 sums and what changes them they fit 128, so
// that 512 threads share a multiprocessor.
inline constexpr i32 kRecurrenceElements = 64, kRecurrenceResidentThreads = 512;
constexpr RecurrenceTile RecurrenceTileOf(i64 dim_k, i64 dim_v, bool has_bf16_states,
                                          i64 tile_columns) {
  const auto ceil = [](i64 a, i64 b) { return static_cast<i32>((a + b - 1) / b); };
  RecurrenceTile tile = {};
  tile.vector = has_bf16_states ? 8 : 4;
  const i64 columns = dim_v < tile_columns ? dim_v : tile_columns;
  tile.column_warps = ceil(columns, kRecurrenceColumnLanes * tile.vector);
  tile.row_warps = ceil(dim_k, kRecurrenceRowLanes * (kRecurrenceElements / tile.vector));
  tile.rows = ceil(dim_k, kRecurrenceRowLanes * tile.row_warps);
  return tile;
}

// Arrays are contiguous and aligned to 16 bytes. Head dims, types and the kind of the decay are
// Traits of a kernel.
struct LinearAttentionParams {
  const void *q, *k;  // [max_tokens, num_qk_heads, dim_k]
  const void* v;      // [max_tokens, num_v_heads, dim_v]
  const float* g;     // [max_tokens, num_v_heads] or [.., dim_k], natural log; null: no decay
  const float* beta;  // [max_tokens, num_v_heads]; null: 1
  void* states;       // [num_layers, num_slots, num_v_heads, dim_k, dim_v], f32 or bf16
  void* o;            // like v
  StatePlanParams plan;
  float scale;
  i32 num_qk_heads, num_v_heads;
  // Chunked loops alone. A request of more chunks than segment_chunks is split into segments of so
  // many; 0: requests are not split.
  i32 segment_chunks;
  void* workspace;  // [workspace_words], 32 bits each, 128-byte aligned
};

// The launches of a chunked loop, in this order.
enum LinearPhase : i32 {
  kLinearTerms = 0,  // what each chunk computes without a state
  kLinearMaps,       // the map of states of each segment that another one follows
  kLinearStarts,     // the states before these others
  kLinearOutputs,    // o, and the states behind chunks
  // The gradients of a call are launches of their own.
  kLinearGradientTerms,   // kLinearTerms, as LinearGradientTerms
  kLinearStates,          // the states before chunks
  kLinearStateGradients,  // the gradients of the states behind chunks, and of the pool
  kLinearGradients        // the gradients of q, k, v, g and beta
};
// Whether a launch may begin while the one before it, of the same call, still runs. Its CTAs wait
// for that one's results (common/linear_places.cuh).
constexpr bool OverlapsLaunchBefore(i64 arch, i64 phase) {
  return arch >= 90 && phase != kLinearTerms && phase != kLinearGradientTerms;
}

// A log of a decay below it makes the decay 0 in f32. Sums of larger ones keep their precision.
inline constexpr float kLowestDecayLog = -88.0f;
// Under the root of l2_norm, as in transformers.
inline constexpr float kL2NormEpsilon = 1e-6f;

// Tokens of a chunk of the chunked loops, at most; a tile in shared memory has as many rows.
inline constexpr i32 kLinearTokens = 64;
// Tokens of a plan's chunk with a decay a channel.
inline constexpr i32 kChannelTokens = 16;

// A lower triangle of kLinearTokens rows without the blocks of 16 x 16 above its diagonal.
inline constexpr i32 kLowerElements = 16 * 16 * 10;
// Index of an element of such a triangle: rows of 16, 32, 48 and 64 elements.
constexpr i32 LowerIndex(i32 row, i32 column) {
  const i32 block = row / 16;
  return 128 * block * (block + 1) + row % 16 * 16 * (block + 1) + column;
}

// What kLinearTerms computes of a chunk for one v head. G is the sum of log decays from the start
// of the chunk; n(k) and n(q) are the l2 norm factors, or 1. Elements are in spec.dtype.
struct LinearTerms {
  unsigned short solve[kLowerElements];  // (I + A)^-1 diag(beta); not without delta rule
  unsigned short qk[kLowerElements];     // scale n(q_i) n(k_j) q_i k_j exp(G_i - G_j), i >= j
  float since_k[kLinearTokens];          // exp(G_j) n(k_j); without delta rule beta_j
  float since_q[kLinearTokens];          // scale exp(G_j) n(q_j)
  float until_k[kLinearTokens];          // exp(G_last - G_j) n(k_j)
  float decay[32];                       // [0]: exp(G_last)
};

// The same with a decay a channel, for rows of q and k that have their decays and norms
// (LinearChannelWorkspace): factors are 1 but for beta. Behind it, or with gradients behind
// LinearGradientTerms, is f32 exp(G_last)[dim_k].
struct LinearChannelTerms : LinearTerms {
  static constexpr i64 Bytes(i64 dim_k) {
    return static_cast<i64>(sizeof(LinearTerms)) + 4 * dim_k;
  }
};

// The same for gradients; solve is (I + A)^-1.
struct LinearGradientTerms : LinearTerms {
  float beta[kLinearTokens];
  float sums[kLinearTokens];  // G in units of log2; not with a decay a channel
  // With a decay a channel.
  static constexpr i64 ChannelBytes(i64 dim_k) {
    return static_cast<i64>(sizeof(LinearTerms)) + 8 * kLinearTokens + 4 * dim_k;
  }
};

// Segments of a call, in the order of their chunks.
struct LinearSegment {
  i32 begin;        // its first chunk
  i32 first;        // the first chunk of its request
  i32 is_followed;  // by another one: it has segment_chunks chunks
};

// Offsets, in bytes, in the workspace of a chunked loop. dims: padded to whole tiles.
struct LinearWorkspace {
  i64 num_segments;  // one word; not written where a plan has no chunks
  i64 segments;      // LinearSegment[max_chunks]
  i64 terms;         // LinearTerms[max_chunks][num_v_heads]
  // A segment that another one follows is number begin / segment_chunks of these. It maps the state
  // S before it to M S + B. The state before the first segment of a request is copied, since the
  // last one may overwrite it in the pool while others read it.
  i64 is_zero;  // i32[max_maps][num_v_heads]: M is 0
  i64 m;        // u16[max_maps][num_v_heads][2][dim_k][dim_k]: M = [0] + [1], in tiles
  i64 b;        // f32[max_maps][num_v_heads][dim_k][dim_v]; then the state behind the segment
  i64 states;   // like b
  i64 size;

  constexpr LinearWorkspace(i64 max_chunks, i64 num_v_heads, i64 dim_k, i64 dim_v,
                            i64 segment_chunks, i64 terms_bytes = sizeof(LinearTerms))
      : num_segments(0), segments(128), terms(0), is_zero(0), m(0), b(0), states(0), size(0) {
    const i64 max_maps = segment_chunks > 0 ? max_chunks / segment_chunks + 1 : 0;
    const i64 maps = max_maps * num_v_heads;
    terms = TermsBegin(max_chunks);
    is_zero = terms + max_chunks * num_v_heads * terms_bytes;
    m = RoundUpTo128(is_zero + maps * 4);
    b = m + maps * 4 * dim_k * dim_k;
    states = b + maps * 4 * dim_k * dim_v;
    size = states + maps * 4 * dim_k * dim_v;
  }
  static constexpr i64 TermsBegin(i64 max_chunks) {
    return RoundUpTo128(128 + max_chunks * static_cast<i64>(sizeof(LinearSegment)));
  }
  static constexpr i64 RoundUpTo128(i64 bytes) { return (bytes + 127) / 128 * 128; }
};

// With a decay a channel.
struct LinearChannelWorkspace {
  LinearWorkspace base;  // with LinearChannelTerms, without maps
  // [max_tokens][num_v_heads][own_dim_k], in spec.dtype: n(k) k exp(G), scale n(q) q exp(G) and
  // n(k) k exp(G_last - G).
  i64 k_since, q_since, k_until;
  i64 size;

  // dim_k, dim_v: with the padding of tiles. own_dim_k: k's.
  constexpr LinearChannelWorkspace(i64 max_chunks, i64 max_tokens, i64 num_v_heads, i64 dim_k,
                                   i64 dim_v, i64 own_dim_k)
      : base(max_chunks, num_v_heads, dim_k, dim_v, 0, LinearChannelTerms::Bytes(dim_k)),
        k_since(LinearWorkspace::RoundUpTo128(base.size)),
        q_since(LinearWorkspace::RoundUpTo128(k_since + max_tokens * num_v_heads * own_dim_k * 2)),
        k_until(q_since + q_since - k_since),
        size(k_until + q_since - k_since) {}
};

// The gradients of a call of linear attention. The workspace of `forward` is that of the gradients;
// its o is not read, and its requests are not split.
struct LinearGradientParams {
  LinearAttentionParams forward;
  const void* d_o;      // like v
  void *d_q, *d_k;      // like q
  void* d_v;            // like v
  float *d_g, *d_beta;  // like g and beta; null: none
  void* d_states;       // like states: from that of the states after the call to that before it
};

struct LinearGradientWorkspace {
  LinearWorkspace base;  // with LinearGradientTerms, without maps
  // The state before each chunk and the gradient of the state behind it, of each v head, in 16
  // bits, transposed [dim_v, dim_k], in tiles. A chunk without tokens has no state before it.
  i64 states, d_states;
  i64 fresh, d_r;  // like v: V' and the gradient of (I + A) V'
  i64 size;

  // dim_k, dim_v: with the padding of tiles. own_dim_v: v's.
  constexpr LinearGradientWorkspace(i64 max_chunks, i64 max_tokens, i64 num_v_heads, i64 dim_k,
                                    i64 dim_v, i64 own_dim_v,
                                    i64 terms_bytes = sizeof(LinearGradientTerms))
      : base(max_chunks, num_v_heads, dim_k, dim_v, 0, terms_bytes),
        states(LinearWorkspace::RoundUpTo128(base.size)),
        d_states(states + max_chunks * num_v_heads * dim_k * dim_v * 2),
        fresh(d_states + max_chunks * num_v_heads * dim_k * dim_v * 2),
        d_r(LinearWorkspace::RoundUpTo128(fresh + max_tokens * num_v_heads * own_dim_v * 2)),
        size(LinearWorkspace::RoundUpTo128(d_r + max_tokens * num_v_heads * own_dim_v * 2)) {}
};

// Whether kLinearGradients with a decay a channel has sums over v heads in shared memory, else in
// the workspace. dim_k: with the padding of tiles.
constexpr bool KeepsChannelSums(i64 arch, i64 dim_k) { return arch >= 90 || dim_k <= 64; }

// With a decay a channel.
struct LinearChannelGradientWorkspace {
  LinearGradientWorkspace base;
  i64 k_since, q_since, k_until;  // as in LinearChannelWorkspace
  // i32[max_chunks]. Of the first one of the plan's chunks that are computed together, the first of
  // those before; of a request's first one, the first of its last ones. -1: none of these.
  i64 previous;
  i64 sums;  // f32[max_tokens][num_qk_heads][2][dim_k], of dQ and dK, where KeepsChannelSums is not
  i64 size;

  // As above.
  constexpr LinearChannelGradientWorkspace(i64 arch, i64 max_chunks, i64 max_tokens,
                                           i64 num_qk_heads, i64 num_v_heads, i64 dim_k, i64 dim_v,
                                           i64 own_dim_k, i64 own_dim_v)
      : base(max_chunks, max_tokens, num_v_heads, dim_k, dim_v, own_dim_v,
             LinearGradientTerms::ChannelBytes(dim_k)),
        k_since(base.size),
        q_since(LinearWorkspace::RoundUpTo128(k_since + max_tokens * num_v_heads * own_dim_k * 2)),
        k_until(q_since + q_since - k_since),
        previous(k_until + q_since - k_since),
        sums(LinearWorkspace::RoundUpTo128(previous + max_chunks * 4)),
        size(sums +
             (KeepsChannelSums(arch, dim_k) ? 0 : max_tokens * num_qk_heads * 2 * dim_k * 4)) {}
};

// A causal depthwise convolution of the requests of a plan (jax_attn/_ops/short_convolution.py).
struct ShortConvolutionParams {
  const void* x;        // [max_tokens, num_channels]
  const float* weight;  // [num_channels, width]
  const float* bias;    // [num_channels]
  void* states;         // [num_layers, num_slots, width - 1, num_channels], in x's type
  void* y;              // like x
  StatePlanParams plan;
  i32 num_channels;
  i32 tile_rows;  // tokens of a chunk that one thread takes together
  i32 row_tiles;  // threads that share the tokens of a chunk
};

// Neighbouring channels of a thread: 16 bytes, or 8 where the taps of so many channels do not fit
// the registers, or 1 if rows are no multiple of these.
constexpr i32 ConvolutionVector(i64 dtype, i64 width, i64 num_channels) {
  const i32 channels = dtype != 2 && width <= 4 ? 8 : 4;  // 2: f32
  return num_channels % channels == 0 ? channels : 1;
}

}  // namespace jax_attn
