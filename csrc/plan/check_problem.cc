#include <cmath>
#include <limits>
#include <string>

#include "plan/check.h"
#include "plan/plan.h"
#include "plan/rules/integers.h"
#include "select/select.h"

namespace jax_attn {
namespace {

// More than any model has; products of head counts with an int32 fit int64.
constexpr int64_t kMaxHeads = 1 << 16;
// The planner stores a queue number in 20 bits.
constexpr int64_t kMaxQueues = 1 << 20;
// Bound that keeps the costs of a batch within 64 bits (plan/rules/integers.h).
constexpr int64_t kMaxCost = 1 << 12;

struct Field {
  const char* name;
  int64_t value, least, most;
};

Status Refuse(const char* name, const std::string& expected, int64_t got) {
  return Status::Error(std::string(name) + ": expected " + expected + ", got " +
                       std::to_string(got) + ".");
}

template <size_t kNum>
Status CheckFields(const Field (&fields)[kNum]) {
  for (const Field& f : fields) {
    if (f.value < f.least || f.value > f.most) {
      return Refuse(f.name, std::to_string(f.least) + " to " + std::to_string(f.most), f.value);
    }
  }
  return Status::Ok();
}

Status CheckConfig(const AttentionSpec& s, const KernelConfig& c) {
  const Field fields[] = {
      {"main_loop", c.main_loop, kPortable, kHopper},
      {"num_tiles", c.num_tiles, 1, kMaxTiles},
      {"tile_kv", c.tile_kv, 8, 1 << 16},
      {"num_warps", c.num_warps, 0, 32},
      {"num_stages", c.num_stages, 0, 64},
      {"num_ctas", c.num_ctas, 1, kMaxQueues},
      {"heads_per_unit", c.heads_per_unit, 1, s.num_kv_heads},
      {"min_chunk", c.min_chunk, 0, kPositionLimit},
      {"min_tall_chunk", c.min_tall_chunk, 0, kPositionLimit},
      {"item_cost", c.item_cost, 0, kMaxCost},
      {"split_cost", c.split_cost, 0, kMaxCost},
      {"tall_split_cost", c.tall_split_cost, 0, kMaxCost},
      {"kv_cost_0", c.kv_cost[0], 1, kMaxCost},
      {"kv_cost_1", c.kv_cost[1], 1, kMaxCost},
      {"kv_cost_2", c.kv_cost[2], 1, kMaxCost},
      {"cached_tokens", c.cached_tokens, 0, kMaxInt32},
      {"cost_by_rows", c.cost_by_rows, 0, 1},
      {"max_items", c.max_items, 0, kMaxInt32},
      {"max_merge_groups", c.max_merge_groups, 0, kMaxInt32},
      {"max_partials", c.max_partials, 0, kMaxInt32},
      {"max_shared_tokens", c.max_shared_tokens, 0, kMaxInt32},
      {"max_partial_rows", c.max_partial_rows, 0, kMaxInt32},
      {"record_times", c.record_times, 0, 1},
  };
  JAX_ATTN_RETURN_IF_ERROR(CheckFields(fields));
  static constexpr const char* kTileNames[] = {"tile_q_0", "tile_q_1", "tile_q_2"};
  int64_t least = s.group_size();
  for (int i = 0; i < c.num_tiles; least = c.tile_q[i++]) {
    if (c.tile_q[i] < least || c.tile_q[i] > 1 << 12) {
      return Refuse(kTileNames[i], std::to_string(least) + " to 4096 rows", c.tile_q[i]);
    }
  }
  // CPU: whole panels of keys. CUDA: fragments of mma, which the f32 kernel does not use.
  const int64_t step = s.arch == 0 ? 64 : s.dtype == kF32 ? 8 : 16;
  if (c.tile_kv % step != 0) {
    return Refuse("tile_kv", "a multiple of " + std::to_string(step), c.tile_kv);
  }
  // Offsets in step lists are counted in tokens.
  if (s.max_steps > kPositionLimit / c.tile_kv) {
    return Refuse("max_steps",
                  "at most 2^30 / tile_kv = " + std::to_string(kPositionLimit / c.tile_kv),
                  s.max_steps);
  }
  if (s.num_kv_heads % c.heads_per_unit != 0) {
    return Refuse("heads_per_unit", "a divisor of num_kv_heads", c.heads_per_unit);
  }
  if (s.schedule == kFixedSplit && s.kv_split % c.tile_kv != 0) {
    return Refuse("kv_split", "a multiple of tile_kv = " + std::to_string(c.tile_kv), s.kv_split);
  }
  return Status::Ok();
}

// Formats for ragged and for paged k and v; each set includes those before it. With mla, v is part
// of k's rows, so formats with a scale behind each row's quantized values are not supported.
int64_t MaxFormat(const AttentionSpec& s) {
  return s.paged() && !s.mla ? kNumFormats - 1 : kE5m2Format;
}

// Formats whose quantized values the hardware multiplies: int8 with AMX and VNNI, e4m3 with
// Hopper's wgmma.
bool HasEightBitProducts(const AttentionSpec& s) {
  if (s.mla) return false;
  // Wider values leave no registers beside o for the sums of P (cuda/sm90/attention.cuh).
  if (s.arch == 90 && s.head_dim_vo > 192) return false;
  return s.arch == 0 ? s.kv_format == kInt8Format : s.arch == 90 && s.kv_format == kE4m3Format;
}

// CUDA kernels copy quantized pages in vectors of 16 bytes, so a page must be whole vectors.
bool HasWholeVectors(const AttentionSpec& s, int64_t head_dim) {
  return s.page_size % 16 * (s.num_kv_heads % 16) * (s.kv_row_bytes(head_dim) % 16) % 16 == 0;
}

}  // namespace

Status CheckSpec(const AttentionSpec& s) {
  const bool mla = s.mla != 0, cpu = s.arch == 0;
  const int64_t largest_dim = mla || cpu ? 512 : LargestCudaHeadDim(s);
  const Field fields[] = {
      {"mla", s.mla, 0, 1},
      {"num_qo_heads", s.num_qo_heads, 1, kMaxHeads},
      {"num_kv_heads", s.num_kv_heads, 1, s.num_qo_heads},
      {"head_dim_qk", s.head_dim_qk, 8, mla ? 576 : largest_dim},
      {"head_dim_vo", s.head_dim_vo, 8, largest_dim},
      {"dtype", s.dtype, kBF16, kF32},
      {"kv_format", s.kv_format, kPlainFormat, MaxFormat(s)},
      {"q_format", s.q_format, kPlainFormat,
       s.kv_format == kE4m3Format && !s.fresh_kv && !mla ? kE4m3Format : kPlainFormat},
      {"window_left", s.window_left, -1, kMaxInt32},
      {"window_right", s.window_right, -1, kMaxInt32},
      {"page_size", s.page_size, 0, kMaxInt32},
      {"max_batch", s.max_batch, 1, kMaxInt32},
      {"max_qo_tokens", s.max_qo_tokens, 1, kMaxInt32},
      {"max_kv_pages", s.max_kv_pages, 0, s.paged() ? kMaxInt32 : 0},
      {"max_kv_tokens", s.max_kv_tokens, 0, s.paged() ? 0 : kMaxInt32},
      {"num_pages", s.num_pages, -1, kMaxInt32},
      {"schedule", s.schedule, kBalanced, kAuto},
      {"kv_split", s.kv_split, s.schedule == kFixedSplit, kMaxInt32},
      {"share_prefixes", s.share_prefixes, 0, s.paged() ? 1 : 0},
      {"max_steps", s.max_steps, 0, !s.share_prefixes || s.balances() ? kPositionLimit : 0},
      {"typical_kv_len", s.typical_kv_len, 0, kMaxInt32},
      {"fresh_kv", s.fresh_kv, 0, s.paged() && !mla && (cpu || !s.eight_bit_products) ? 1 : 0},
      {"eight_bit_products", s.eight_bit_products, 0, HasEightBitProducts(s) ? 1 : 0},
      {"arch", s.arch, cpu ? 0 : 80, 999},
      {"num_processors", s.num_processors, 1, kMaxQueues},
  };
  JAX_ATTN_RETURN_IF_ERROR(CheckFields(fields));
  const int64_t group = s.group_size();
  const int64_t largest_group = mla || cpu ? 128 : LargestCudaGroup(s);
  if (group > largest_group) {
    return Refuse("num_qo_heads / num_kv_heads", "1 to " + std::to_string(largest_group), group);
  }
  // On CUDA the last block of mla's heads may be partial: the kernels handle it.
  if (s.num_qo_heads % s.num_kv_heads != 0 && (!mla || cpu)) {
    return Refuse("num_qo_heads", "a multiple of num_kv_heads", s.num_qo_heads);
  }
  if (s.head_dim_qk % 8 != 0) return Refuse("head_dim_qk", "a multiple of 8", s.head_dim_qk);
  if (s.head_dim_vo % 8 != 0) return Refuse("head_dim_vo", "a multiple of 8", s.head_dim_vo);
  if (mla && s.head_dim_vo > s.head_dim_qk) {
    return Refuse("head_dim_vo", "at most head_dim_qk with mla", s.head_dim_vo);
  }
  if (!cpu && DequantizesRows(s.kv_format)) {
    if (s.dtype == kF32) return Refuse("dtype", "16 bits with codes on CUDA", s.dtype);
    for (int64_t dim : {s.head_dim_qk, s.head_dim_vo}) {
      if (dim % 16 != 0) return Refuse("head_dim", "a multiple of 16 with codes on CUDA", dim);
      if (!HasWholeVectors(s, dim)) {
        return Refuse("page_size", "pages of whole 16-byte vectors with codes on CUDA",
                      s.page_size);
      }
    }
  }
  // Same limits as in the kernels. Comparisons with NaN are false.
  constexpr double kMaxFloat = std::numeric_limits<float>::max();
  if (!(std::abs(s.sm_scale) <= kMaxFloat)) {
    return Status::Error("sm_scale: expected a number that is finite in float32.");
  }
  if (!(s.logits_soft_cap >= 0 && s.logits_soft_cap <= kMaxFloat)) {
    return Status::Error("logits_soft_cap: expected a number >= 0 that is finite in float32.");
  }
  return Status::Ok();
}

// The transforms that the kernels of k and v can run.
static Status CheckTransforms(const AttentionProblem& problem) {
  const AttentionSpec& s = problem.spec;
  if (!problem.transforms_rows()) return Status::Ok();
  if (s.mla || s.quantized() || s.page_size == 0) {
    return Status::Error("transforms: expected plain pages without mla.");
  }
  const int64_t dims[2] = {s.head_dim_qk, s.head_dim_vo};
  if (s.arch != 0 && (s.dtype == kF32 || std::max(dims[0], dims[1]) > kWideHeadDim)) {
    return Status::Error("transforms: expected a 16-bit dtype and head dims up to " +
                         std::to_string(kWideHeadDim) + " on CUDA.");
  }
  for (int i = 0; i < 2; ++i) {
    const Transform& transform = problem.transforms[i];
    if (!transform.present()) continue;
    if (transform.dim != dims[i]) return Refuse("transforms", "one of head_dim", transform.dim);
    for (const TransformLine& x : transform.lines) {
      const bool runs = x.op != kVectorProduct && x.op != kVectorProductT && x.op != kOpHead &&
                        x.op != kOpQPos && x.op != kOpQRow;
      if (!runs) return Refuse("transforms", "operations on rows of k and v", x.op);
    }
  }
  return Status::Ok();
}

Status CheckProblem(const AttentionProblem& problem) {
  JAX_ATTN_RETURN_IF_ERROR(CheckSpec(problem.spec));
  // With step lists, requests share only positions that the mask hides from none of their rows.
  bool needs_own_rows = problem.spec.max_steps > 0 ? LogitsNeedOwnRows(problem.program)
                                                   : NeedsOwnRows(problem.program);
  for (const Transform& transform : problem.transforms) {
    needs_own_rows |= NeedsOwnRows(transform);
  }
  if (problem.spec.share_prefixes && needs_own_rows) {
    return Refuse("share_prefixes", "0 with a variant that asks for what queries do not share",
                  problem.spec.share_prefixes);
  }
  if (problem.spec.eight_bit_products && problem.program.present && !problem.program.normalizes) {
    return Refuse("eight_bit_products", "0 with a variant without softmax",
                  problem.spec.eight_bit_products);
  }
  JAX_ATTN_RETURN_IF_ERROR(CheckTransforms(problem));
  JAX_ATTN_RETURN_IF_ERROR(CheckConfig(problem.spec, problem.config));
  const int64_t num_words = MakePlanLayout(problem).num_words;
  if (num_words <= kMaxInt32) return Status::Ok();
  return Refuse("capacities",
                "a plan of at most 2^31 - 1 words; lower max_batch, max_qo_tokens, max_kv_pages or "
                "max_items",
                num_words);
}

}  // namespace jax_attn
