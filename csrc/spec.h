// The static description of an attention problem and of the kernel chosen for it.
//
// Python gives both to the planner (nanobind) and to the handlers (one int64 FFI attribute). So an
// executable restored in a fresh process finds or rebuilds its kernel from its own attributes.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "params.h"
#include "status.h"
#include "variant/program.h"
#include "variant/transform_words.h"

namespace jax_attn {

enum DType : int64_t { kBF16 = 0, kF16 = 1, kF32 = 2 };

// Families of attention kernels: portable is csrc/cuda/sm80 and the CPU, Hopper is csrc/cuda/sm90.
enum MainLoop : int64_t { kPortable = 0, kHopper = 1 };

inline int64_t ElementBytes(int64_t dtype) { return dtype == kF32 ? 4 : 2; }

// Kernels for 16-bit types on CUDA whose rows may be longer than this: cuda/sm80/wide.cuh.
inline constexpr int64_t kWideHeadDim = 256;

// Length of the last axis of an array of k or v: elements in kPlainFormat, else bytes of a
// quantized row with its scales.
inline int64_t StoredDim(int64_t format, int64_t head_dim) {
  return format == kPlainFormat ? head_dim : QuantizedRowBytes(format, head_dim);
}

// The problem that the user asked for. Units are tokens unless stated.
struct AttentionSpec {
  int64_t num_qo_heads = 0;
  int64_t num_kv_heads = 0;  // mla: blocks of query heads; all read the one latent head
  int64_t head_dim_qk = 0;
  int64_t head_dim_vo = 0;
  int64_t mla = 0;        // 1: v is the first head_dim_vo columns of k, which has one head
  int64_t dtype = kBF16;  // DType of o, k_new, v_new, and of q, k, v in kPlainFormat
  int64_t q_format = kPlainFormat;
  int64_t kv_format = kPlainFormat;
  int64_t window_left = -1;   // -1: unlimited
  int64_t window_right = -1;  // -1: unlimited; causal is 0
  double logits_soft_cap = 0.0;
  double sm_scale = 0.0;
  int64_t page_size = 0;  // 0: ragged
  int64_t max_batch = 0;
  int64_t max_qo_tokens = 0;
  int64_t max_kv_pages = 0;   // paged: capacity of page_indices
  int64_t max_kv_tokens = 0;  // ragged: rows of k, v
  int64_t num_pages = -1;  // pages of one layer's pool; -1: unknown, ids are only checked for sign
  int64_t schedule = kBalanced;
  int64_t kv_split = 0;        // kFixedSplit: tokens per chunk
  int64_t share_prefixes = 0;  // 1: equal leading pages are attended once for all their requests
  int64_t max_steps = 0;       // capacity of step lists; 0: spans of keys instead of lists
  int64_t typical_kv_len = 0;  // keys of most requests, which choose among kernels; 0: unknown
  int64_t fresh_kv = 0;        // 1: k, v of the query tokens come from k_new, v_new, not from pages
  int64_t eight_bit_products = 0;  // 1: q and P are rounded to kv_format; both products are 8-bit
  int64_t arch = 0;                // 0: cpu; else compute capability, 90 for sm_90
  int64_t num_processors = 0;      // streaming multiprocessors, or cpu threads

  // Query heads per kv head. The last block of mla may reach beyond num_qo_heads.
  int64_t group_size() const { return (num_qo_heads + num_kv_heads - 1) / num_kv_heads; }
  // Heads of k and v in memory.
  int64_t num_stored_heads() const { return mla ? 1 : num_kv_heads; }
  // Bytes of one row of k or v of one head.
  int64_t kv_row_bytes(int64_t head_dim) const {
    return StoredDim(kv_format, head_dim) * (quantized() ? 1 : ElementBytes(dtype));
  }
  bool quantized() const { return kv_format != kPlainFormat; }
  bool paged() const { return page_size > 0; }
  bool causal() const { return window_right == 0; }
  // Whether the planner derives chunk lengths from the load per queue. The number of chunks is
  // bounded then.
  bool balances() const { return schedule == kBalanced || schedule == kAuto; }
};

// The choices of select/: the shape of the launch and the planner's cost model.
struct KernelConfig {
  int64_t main_loop = kPortable;
  int64_t num_tiles = 1;                  // entries of tile_q in use, ascending
  int64_t tile_q[kMaxTiles] = {0, 0, 0};  // tile M: rows of a query tile (tokens * group_size)
  int64_t tile_kv = 0;                    // kv tokens per main-loop step
  int64_t num_warps = 0;                  // CUDA only
  int64_t num_stages = 0;                 // CUDA only: depth of the kv pipeline
  int64_t num_ctas = 0;                   // queues of the plan = grid of the launch
  int64_t heads_per_unit = 1;  // kv heads of one tile that the planner keeps in one queue
  int64_t min_chunk = 0;       // shortest kv chunk worth a split, tokens
  int64_t min_tall_chunk = 0;  // the same of tiles after the first; 0: min_chunk
  int64_t item_cost = 0;       // fixed cost of an item, in kv tokens of tile_q[0]
  int64_t split_cost = 0;  // extra cost of an item that writes a partial state, in the same unit
  int64_t tall_split_cost = 0;             // the same of tiles after the first; 0: split_cost
  int64_t kv_cost[kMaxTiles] = {1, 1, 1};  // cost of 16 kv tokens for tile_q[i]; tile_q[0]: 16
  int64_t cached_tokens = 0;  // tokens of a request, k and v of all heads, that fit in a cache
  int64_t cost_by_rows = 0;   // 1: a tile costs by its live rows, at least tile_q[0] of them
  int64_t max_items = 0;      // capacity of a section of the plan; likewise the next four
  int64_t max_merge_groups = 0;
  int64_t max_partials = 0;
  int64_t max_shared_tokens = 0;
  int64_t max_partial_rows = 0;
  int64_t record_times = 0;  // 1: kernels write begin and end of every item to the workspace
};

// The one list of all fields. Dictionaries, attribute words and error messages are made from it.
template <typename Visitor>
void VisitFields(AttentionSpec& s, Visitor&& visit) {
  visit("num_qo_heads", s.num_qo_heads);
  visit("num_kv_heads", s.num_kv_heads);
  visit("head_dim_qk", s.head_dim_qk);
  visit("head_dim_vo", s.head_dim_vo);
  visit("mla", s.mla);
  visit("dtype", s.dtype);
  visit("q_format", s.q_format);
  visit("kv_format", s.kv_format);
  visit("window_left", s.window_left);
  visit("window_right", s.window_right);
  visit("logits_soft_cap", s.logits_soft_cap);
  visit("sm_scale", s.sm_scale);
  visit("page_size", s.page_size);
  visit("max_batch", s.max_batch);
  visit("max_qo_tokens", s.max_qo_tokens);
  visit("max_kv_pages", s.max_kv_pages);
  visit("max_kv_tokens", s.max_kv_tokens);
  visit("num_pages", s.num_pages);
  visit("schedule", s.schedule);
  visit("kv_split", s.kv_split);
  visit("share_prefixes", s.share_prefixes);
  visit("max_steps", s.max_steps);
  visit("typical_kv_len", s.typical_kv_len);
  visit("fresh_kv", s.fresh_kv);
  visit("eight_bit_products", s.eight_bit_products);
  visit("arch", s.arch);
  visit("num_processors", s.num_processors);
}

template <typename Visitor>
void VisitFields(KernelConfig& c, Visitor&& visit) {
  visit("main_loop", c.main_loop);
  visit("num_tiles", c.num_tiles);
  visit("tile_q_0", c.tile_q[0]);
  visit("tile_q_1", c.tile_q[1]);
  visit("tile_q_2", c.tile_q[2]);
  visit("tile_kv", c.tile_kv);
  visit("num_warps", c.num_warps);
  visit("num_stages", c.num_stages);
  visit("num_ctas", c.num_ctas);
  visit("heads_per_unit", c.heads_per_unit);
  visit("min_chunk", c.min_chunk);
  visit("min_tall_chunk", c.min_tall_chunk);
  visit("item_cost", c.item_cost);
  visit("split_cost", c.split_cost);
  visit("tall_split_cost", c.tall_split_cost);
  visit("kv_cost_0", c.kv_cost[0]);
  visit("kv_cost_1", c.kv_cost[1]);
  visit("kv_cost_2", c.kv_cost[2]);
  visit("cached_tokens", c.cached_tokens);
  visit("cost_by_rows", c.cost_by_rows);
  visit("max_items", c.max_items);
  visit("max_merge_groups", c.max_merge_groups);
  visit("max_partials", c.max_partials);
  visit("max_shared_tokens", c.max_shared_tokens);
  visit("max_partial_rows", c.max_partial_rows);
  visit("record_times", c.record_times);
}

// A problem and its kernel: everything that a handler or the planner needs besides the data.
struct AttentionProblem {
  AttentionSpec spec;
  KernelConfig config;
  VariantProgram program = {};  // the spec's variant
  // Those of k and v, as they run in the kernels on rows of `dtype`.
  Transform transforms[2];

  bool transforms_rows() const { return transforms[0].present() || transforms[1].present(); }
};

inline constexpr int64_t kProblemVersion = 9;

// The words of the FFI attribute "problem": the version, every field in the order of VisitFields,
// the words of the transforms of k and v (variant/transform_words.h), each after their number, and
// the words of the program (variant/words.h; none without a variant).
std::vector<int64_t> EncodeProblem(AttentionProblem problem);

// Refuses the words of another version of this library and those of a bad program. Does not check
// the fields: CheckProblem does.
Status DecodeProblem(const int64_t* words, size_t num_words, AttentionProblem* problem);

}  // namespace jax_attn
