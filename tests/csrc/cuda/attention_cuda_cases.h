// Cases of attention_cuda_test.cc and attention_*sm90_test.cc: attention kernels run in emulation
// on plans of the real planner and must agree with the CPU kernels, which have their own tests.
//
// Keys and values outside of the requests, page ids in the tail, workspace, outputs and shared
// memory start as NaN or nonsense.
//
// Include cuda_emulation.h and the kernel before this file.
#pragma once

#include <functional>
#include <string>

#include "cpu/append.h"
#include "cpu/attention.h"
#include "cuda/common/types.cuh"
#include "cuda/common/variant.cuh"
#include "part.h"
#include "plan/merge_trees.h"
#include "plan/plan.h"
#include "select/select.h"

namespace jax_attn {
namespace {

int g_failures = 0;

struct Request {
  int qo_len, kv_len;
};

// A batch, without what the kernel's template arguments say.
struct Case {
  const char* name;
  std::vector<Request> requests;
  int64_t window_left = -1;
  int64_t window_right = 0;
  double soft_cap = 0;
  bool sinks = false;
  // In visible values (mla: keys, too); they must reach exactly the rows that see them.
  bool nan_values = false, infinite_values = false;
  int64_t num_ctas = 3;  // few, so that queues are long and loads cross from item to item
  int64_t kv_heads = 2;
  int64_t kv_split = 0;  // chunk of kFixedSplit; 0: kBalanced
  int64_t qo_heads = 0;  // mla: they form kv_heads blocks
  double sharpness = 1;  // of the softmax; above 5 the running max also grows in later steps
  int late_keys = 0;     // scales late keys (second half; mla: columns beyond v) by 2^late_keys
  bool low = false;      // all logits are far below 0
  int far = 0;           // 1 to kFarPatterns: logits of FarSize, see FarFactor
  // Tokens that all requests share, and further ones that every second request shares.
  int64_t prefix = 0, half_prefix = 0;
};

// Template arguments of every kernel. A kernel under test is
//   struct Kernel {
//     template <class Shape> struct Traits : Shape {...};  // and its configuration
//     template <class Shape> using Body = ...;             // static Run, kNumThreads, kSmemBytes
//     template <class Shape> static void AddTensorMaps(const AttentionSpec&, i64 num_rows,
//                                                      AttentionParams*);  // if it reads any
//   };
template <int kDimQk, int kDimVo, int kGroup, int kPage, bool kLeft, bool kRight, bool kCap>
struct ShapeOf {
  static constexpr int kDtype = kElementBf16;
  static constexpr int kHeadDimQk = kDimQk, kHeadDimVo = kDimVo;
  static constexpr int kGroupSize = kGroup, kPageSize = kPage;
  static constexpr bool kHasWindowLeft = kLeft, kHasWindowRight = kRight, kHasSoftCap = kCap;
  static constexpr bool kPositiveScale = true;
  static constexpr bool kIsMla = false, kHasFreshKv = false, kRecordsTimes = true;
  static constexpr int kQFormat = kPlainFormat, kKvFormat = kPlainFormat;
  static constexpr bool kFp8Matmul = false;
  static constexpr bool kHasSteps = false;
  using Variant = NoVariant;
  using TransformOfK = NoTransform;
  using TransformOfV = NoTransform;
};

// k_new and v_new hold the query tokens' keys and values.
template <class Shape>
struct Fresh : Shape {
  static constexpr bool kHasFreshKv = true;
};

// Items are ranges of step lists.
template <class Shape>
struct Listed : Shape {
  static constexpr bool kHasSteps = true;
};

// Keys, values and (kQ) queries of e4m3.
template <class Shape, bool kQ>
struct E4m3Of : Shape {
  static constexpr int kQFormat = kQ ? kE4m3Format : kPlainFormat, kKvFormat = kE4m3Format;
};

// Keys and values of another format.
template <class Shape, int kFormat>
struct CodesOf : Shape {
  static constexpr int kKvFormat = kFormat;
};

// A block of kGroup query heads over a latent cache.
template <int kDimQk, int kDimVo, int kGroup, int kPage, bool kLeft, bool kRight, bool kCap>
struct MlaShapeOf : ShapeOf<kDimQk, kDimVo, kGroup, kPage, kLeft, kRight, kCap> {
  static constexpr bool kIsMla = true;
};

// The size of a row's logits: denormals, what models have, what masks add, and nearly the end of
// f32. Key `pos` has a factor: all the same, left padding, its opposite, or steps up and down.
float FarSize(int64_t i) {
  constexpr float kSizes[] = {1e-38f, 3.0f,  1e4f,  1e6f,  3e7f, 4.2e9f,
                              1e10f,  1e12f, 1e20f, 1e30f, 1e37f};
  return kSizes[i % 11] * (i / 11 % 2 == 0 ? 1.0f : -1.0f);
}
constexpr int kFarPatterns = 4;
float FarFactor(int pattern, int64_t pos) {
  constexpr float kSteps[] = {-1.0f, -0.5f, 1.0f, 0.25f};
  if (pattern == 1) return 1.0f;
  if (pattern == 4) return kSteps[pos / 24 % 4];
  return (pos < 70) == (pattern == 2) ? 1.0f : 0.0f;
}
// Replaces the last element of each head, which is no value of mla.
void SetLast(int64_t head_dim, const std::function<float(int64_t)>& of_head,
             std::vector<uint16_t>* row) {
  const int64_t heads = static_cast<int64_t>(row->size()) / head_dim;
  for (int64_t h = 0; h < heads; ++h) {
    (*row)[(h + 1) * head_dim - 1] = static_cast<uint16_t>(FloatToBf16(of_head(h)));
  }
}

std::vector<uint16_t> RandomBf16(size_t n, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<uint16_t> x(n);
  for (uint16_t& bits : x) bits = static_cast<uint16_t>(FloatToBf16(normal(random)));
  return x;
}

// append_kv's result for a bf16 row of heads of head_dim elements. scales: of heads, or null.
void EncodeRowOnCpu(const std::vector<uint16_t>& row, int64_t format, int64_t head_dim, char* to,
                    const float* scales = nullptr) {
  PlanHeader header = {};
  header.batch_size = header.nnz_qo = 1;
  const i32 one = 1, zero = 0, indptr[] = {0, 1};
  AppendParams p = {};
  p.header = &header;
  p.k_new = row.data();
  p.k_pages = to;
  p.qo_indptr = p.page_indptr = indptr;
  p.kv_lens = &one;
  p.page_indices = &zero;
  p.page_size = 1;
  p.num_pages = 1;
  p.kv_format = static_cast<i32>(format);
  p.dtype = kBF16;
  p.head_dim_qk = static_cast<i32>(head_dim);
  p.num_kv_heads = static_cast<i32>(row.size() / head_dim);
  p.k_row_bytes = p.num_kv_heads * QuantizedRowBytes(format, head_dim);
  p.k_scale = scales;
  InlinePool pool;
  AppendCpu(p, pool);
}

// Writes row `at` of an array of bf16 or quantized values, in heads of head_dim.
void PutRow(const std::vector<uint16_t>& row, int64_t format, int64_t head_dim, int64_t at,
            std::vector<uint16_t>* array) {
  char* to = reinterpret_cast<char*>(array->data());
  const int64_t n = static_cast<int64_t>(row.size());
  if (format > kE4m3Format) {
    EncodeRowOnCpu(row, format, head_dim,
                   to + at * (n / head_dim) * QuantizedRowBytes(format, head_dim));
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    if (format == kE4m3Format) {
      to[at * n + i] = static_cast<char>(FloatToE4m3(Bf16ToFloat(row[i])));
    } else {
      std::memcpy(to + (at * n + i) * 2, &row[i], 2);
    }
  }
}

// std::vector's memory is aligned to 16 bytes, which the kernels need.
template <typename T>
std::vector<T> Poisoned(size_t n) {
  std::vector<T> x(n);
  if (n > 0) std::memset(x.data(), 0xff, n * sizeof(T));
  return x;
}

// The transform of which a kernel has the text, and the operands that it reads.
template <class Text>
struct TransformGiven {
  static void Set(VariantProgram*, Transform*) {}
};
VariantOperand g_operands[kMaxVariantOperands] = {};

template <class Traits>
AttentionProblem MakeProblem(const Case& c) {
  AttentionProblem problem;
  AttentionSpec& spec = problem.spec;
  spec.num_kv_heads = c.kv_heads;
  spec.num_qo_heads = c.qo_heads > 0 ? c.qo_heads : c.kv_heads * Traits::kGroupSize;
  spec.mla = Traits::kIsMla;
  spec.q_format = Traits::kQFormat;
  spec.kv_format = Traits::kKvFormat;
  spec.eight_bit_products = Traits::kFp8Matmul;
  spec.head_dim_qk = Traits::kHeadDimQk;
  spec.head_dim_vo = Traits::kHeadDimVo;
  spec.window_left = c.window_left;
  spec.window_right = c.window_right;
  spec.logits_soft_cap = c.soft_cap;
  spec.sm_scale = c.sharpness / std::sqrt(static_cast<double>(Traits::kHeadDimQk));
  spec.page_size = Traits::kPageSize;
  spec.share_prefixes = c.prefix > 0;
  spec.fresh_kv = Traits::kHasFreshKv;
  spec.max_batch = static_cast<int64_t>(c.requests.size()) + 2;
  spec.arch = Traits::kArch;
  spec.num_processors = 2;
  for (const Request& r : c.requests) spec.max_qo_tokens += r.qo_len;
  spec.max_qo_tokens += 3;  // padding rows
  for (const Request& r : c.requests) {
    if (spec.paged()) {
      spec.max_kv_pages += (r.kv_len + spec.page_size - 1) / spec.page_size;
    } else {
      spec.max_kv_tokens += r.kv_len + 1;
    }
  }
  if (spec.paged()) spec.max_kv_pages += 5;
  spec.max_steps = Traits::kHasSteps ? 1000 : 0;
  KernelConfig& config = problem.config;
  SelectCuda(spec, &config);
  config.num_tiles = Traits::kNumTiles;
  config.record_times = Traits::kRecordsTimes;
  config.tile_q[0] = Traits::kTileQ0;
  config.tile_q[1] = Traits::kTileQ1;
  config.tile_kv = Traits::kTileKv;
  config.num_ctas = c.num_ctas;
  config.item_cost = config.split_cost = 64;  // low, so that sharing short prefixes pays
  if (c.kv_split > 0) {
    spec.schedule = kFixedSplit;
    spec.kv_split = c.kv_split;
    config.max_items = config.max_merge_groups = 1000;
    config.max_partial_rows = 10000;
  }
  TransformGiven<typename Traits::TransformOfK>::Set(&problem.program, &problem.transforms[0]);
  TransformGiven<typename Traits::TransformOfV>::Set(&problem.program, &problem.transforms[1]);
  FillCapacities(&problem);
  config.max_merge_groups *= 3;  // for trees with few partial states a group
  return problem;
}

// Host data of a batch, in the layout that kernels read.
struct Batch {
  std::vector<int32_t> qo_indptr{0}, kv_lens, kv_indptr{0}, page_indices;
  std::vector<uint16_t> q, k, v;                 // or quantized values
  std::vector<uint16_t> k_new, v_new;            // with fresh_kv
  std::vector<float> q_scale, k_scale, v_scale;  // of heads
  int64_t num_pages = 1;
};

template <class Traits>
Batch MakeBatch(const Case& c, const AttentionSpec& spec, std::mt19937& random) {
  Batch b;
  const int64_t page = std::max<int64_t>(1, spec.page_size);
  for (const Request& r : c.requests) {
    b.qo_indptr.push_back(b.qo_indptr.back() + r.qo_len);
    b.kv_lens.push_back(r.kv_len);
    // Ragged: an unused row after each request.
    const int64_t units = spec.paged() ? (r.kv_len + page - 1) / page : r.kv_len + 1;
    b.kv_indptr.push_back(static_cast<int32_t>(b.kv_indptr.back() + units));
  }
  const int64_t units = b.kv_indptr.back();
  if (spec.paged()) {
    b.num_pages = units + 2;
    b.page_indices.resize(b.num_pages);
    std::iota(b.page_indices.begin(), b.page_indices.end(), 0);
    std::shuffle(b.page_indices.begin(), b.page_indices.end(), random);
    for (size_t r = 0; r < c.requests.size(); ++r) {
      if (c.requests[r].kv_len < page) continue;
      // Some request reads the pool's last row: see MakeParams.
      std::iter_swap(std::find(b.page_indices.begin(), b.page_indices.end(), b.num_pages - 1),
                     b.page_indices.begin() + b.kv_indptr[r]);
      break;
    }
    b.page_indices.resize(units);
    for (size_t r = 1; r < c.requests.size(); ++r) {
      const int64_t shared =
          std::min<int64_t>(c.requests[r].kv_len, r % 2 == 0 ? c.prefix + c.half_prefix : c.prefix);
      std::copy_n(b.page_indices.begin(), shared / page, b.page_indices.begin() + b.kv_indptr[r]);
    }
  }
  const int64_t k_row = spec.num_stored_heads() * Traits::kHeadDimQk;
  const int64_t v_row = spec.num_stored_heads() * Traits::kHeadDimVo;
  const int64_t num_rows = spec.paged() ? b.num_pages * page : spec.max_kv_tokens;
  const auto pool = [&](int64_t row, int64_t head_dim) {
    const int64_t format = spec.kv_format;
    if (format != kPlainFormat) row = row / head_dim * QuantizedRowBytes(format, head_dim);
    return Poisoned<uint16_t>(num_rows * row / (format != kPlainFormat ? 2 : 1));
  };
  b.k = pool(k_row, spec.head_dim_qk);
  b.v = pool(v_row, spec.head_dim_vo);
  for (size_t r = 0; r < c.requests.size(); ++r) {
    for (int64_t i = 0; i < c.requests[r].kv_len; ++i) {
      const int64_t at = spec.paged() ? b.page_indices[b.kv_indptr[r] + i / page] * page + i % page
                                      : b.kv_indptr[r] + i;
      std::vector<uint16_t> k = RandomBf16(k_row, random), v = RandomBf16(v_row, random);
      if (2 * i >= c.requests[r].kv_len) {
        // Not the columns that are also mla's values: o is compared unscaled.
        for (size_t j = spec.mla ? Traits::kHeadDimVo : 0; j < k.size(); ++j) {
          k[j] += (k[j] & 0x7fff) != 0 ? c.late_keys << 7 : 0;
        }
      }
      for (uint16_t& x : k) x |= c.low ? 0x8000 : 0;
      if (c.far > 0) {
        SetLast(spec.head_dim_qk, [&](int64_t) { return FarFactor(c.far, i); }, &k);
      }
      std::vector<uint16_t>& values = spec.mla ? k : v;
      const bool late = i == c.requests[r].kv_len - 2, middle = i == c.requests[r].kv_len / 3 * 2;
      if (c.nan_values && middle) values[5] = 0x7fff;
      if (c.infinite_values && middle) values[5] = 0x7f80;
      if (c.infinite_values && (middle || late)) values[9] = 0xff80;
      PutRow(k, spec.kv_format, spec.head_dim_qk, at, &b.k);
      PutRow(v, spec.kv_format, spec.head_dim_vo, at, &b.v);
    }
  }
  b.q = Poisoned<uint16_t>(spec.max_qo_tokens * spec.num_qo_heads * Traits::kHeadDimQk);
  for (int64_t i = 0; i < b.qo_indptr.back(); ++i) {
    std::vector<uint16_t> q = RandomBf16(spec.num_qo_heads * Traits::kHeadDimQk, random);
    for (uint16_t& x : q) x &= c.low ? 0x7fff : 0xffff;
    if (c.far > 0) {
      std::fill(q.begin(), q.end(), uint16_t{0});
      SetLast(spec.head_dim_qk, [&](int64_t h) { return FarSize(5 * i + 3 * h); }, &q);
    }
    PutRow(q, spec.q_format, spec.head_dim_qk, i, &b.q);
  }
  const auto scales = [&](int64_t format, int64_t n) {
    std::vector<float> x(FormatOf(format).has_head_scale ? n : 0);
    for (float& scale : x) scale = 0.7f + 0.1f * static_cast<float>(random() % 8);
    return x;
  };
  b.q_scale = scales(spec.q_format, spec.num_qo_heads);
  b.k_scale = scales(spec.kv_format, spec.num_stored_heads());
  b.v_scale = spec.mla ? b.k_scale : scales(spec.kv_format, spec.num_kv_heads);
  return b;
}

// Moves the query tokens' keys and values from their pages to k_new and v_new, and poisons the
// pages there.
void MoveNewTokens(const Case& c, const AttentionSpec& spec, Batch* b) {
  const auto move = [&](std::vector<uint16_t>* pool, int64_t head_dim) {
    const int64_t row = spec.num_kv_heads * head_dim;
    std::vector<uint16_t> fresh = Poisoned<uint16_t>(spec.max_qo_tokens * row);
    for (size_t r = 0; r < c.requests.size(); ++r) {
      const Request& request = c.requests[r];
      for (int64_t i = std::max(0, request.qo_len - request.kv_len); i < request.qo_len; ++i) {
        const int64_t pos = request.kv_len - request.qo_len + i;
        const int64_t page = b->page_indices[b->kv_indptr[r] + pos / spec.page_size];
        const auto from = pool->begin() + (page * spec.page_size + pos % spec.page_size) * row;
        std::copy_n(from, row, fresh.begin() + (b->qo_indptr[r] + i) * row);
        std::fill_n(from, row, uint16_t{0xffff});
      }
    }
    return fresh;
  };
  b->k_new = move(&b->k, spec.head_dim_qk);
  b->v_new = move(&b->v, spec.head_dim_vo);
}

struct Outputs {
  std::vector<uint16_t> o;
  std::vector<float> lse;
  std::vector<int32_t> workspace;
};

// Points `params` at new, poisoned outputs.
Outputs MakeOutputs(const AttentionProblem& problem, AttentionParams* params) {
  const AttentionSpec& spec = problem.spec;
  const WorkspaceLayout layout = MakeWorkspaceLayout(problem);
  Outputs out;
  out.o = Poisoned<uint16_t>(spec.max_qo_tokens * spec.num_qo_heads * spec.head_dim_vo);
  out.lse = Poisoned<float>(spec.max_qo_tokens * spec.num_qo_heads);
  out.workspace = Poisoned<int32_t>(layout.num_words);
  params->o = out.o.data();
  params->lse = out.lse.data();
  params->merge_counters = out.workspace.data() + layout.merge_counters;
  params->partial_states =
      reinterpret_cast<RowState*>(out.workspace.data() + layout.partial_states);
  params->partial_o = reinterpret_cast<float*>(out.workspace.data() + layout.partial_o);
  if (problem.config.record_times) {
    params->item_times = reinterpret_cast<i64*>(out.workspace.data() + layout.item_times);
  }
  std::fill_n(params->merge_counters, problem.config.max_merge_groups, 0);
  return out;
}

void Compare(const Case& c, const char* what, size_t i, float got, float expected,
             float tolerance) {
  const bool same = std::isfinite(expected) ? std::abs(got - expected) <= tolerance
                    : std::isnan(expected)  ? std::isnan(got)
                                            : got == expected;
  if (same || ++g_failures > 20) return;
  std::printf("FAILED %s: %s[%zu]: expected %g, got %g\n", c.name, what, i, expected, got);
}

bool SameBits(const Outputs& a, const Outputs& b) {
  return a.o == b.o && std::memcmp(a.lse.data(), b.lse.data(), a.lse.size() * sizeof(float)) == 0;
}

// The plan of a batch, in a buffer that is poisoned where nothing is written; empty if refused.
std::vector<int32_t> MakePlan(const Case& c, const AttentionProblem& problem, const Batch& b,
                              const BlockMap* map = nullptr) {
  std::vector<int32_t> plan = Poisoned<int32_t>(MakePlanLayout(problem).num_words);
  PlanInputs inputs = {};
  inputs.qo_indptr = b.qo_indptr.data();
  inputs.kv_lens = b.kv_lens.data();
  inputs.kv_indptr = b.kv_indptr.data();
  inputs.page_indices = b.page_indices.data();
  inputs.batch_size = static_cast<int64_t>(c.requests.size());
  inputs.num_page_indices = static_cast<int64_t>(b.page_indices.size());
  if (const Status s = Plan(problem, inputs, nullptr, plan.data(), map); !s.ok()) {
    std::printf("FAILED %s: %s\n", c.name, s.message.c_str());
    ++g_failures;
    plan.clear();
  }
  return plan;
}

// The same plan with its merges as trees (mla's never are). The queues are unchanged.
std::vector<int32_t> WithMergeTrees(const AttentionProblem& problem, std::vector<int32_t> plan) {
  if (problem.spec.mla) return plan;
  const PlanLayout layout = MakePlanLayout(problem);
  PlanHeader header;
  std::memcpy(&header, plan.data() + layout.header, sizeof(header));
  const auto* groups = reinterpret_cast<const MergeGroup*>(plan.data() + layout.merge_groups);
  std::vector<MergeGroup> all(groups, groups + header.num_merge_groups);
  const auto* rows = plan.data() + layout.partial_rows;
  MakeMergeTrees({rows, rows + header.num_partials},
                 reinterpret_cast<WorkItem*>(plan.data() + layout.items), header.num_items, &all);
  header.num_merge_groups = static_cast<i32>(all.size());
  if (header.num_merge_groups > problem.config.max_merge_groups) std::abort();
  std::copy(all.begin(), all.end(),
            reinterpret_cast<MergeGroup*>(plan.data() + layout.merge_groups));
  std::memcpy(plan.data() + layout.header, &header, sizeof(header));
  return plan;
}

void UsePlan(const AttentionProblem& problem, const std::vector<int32_t>& plan,
             AttentionParams* params) {
  const AttentionParams p = MakeAttentionParams(problem, plan.data());
  params->header = p.header;
  params->items = p.items;
  params->merge_groups = p.merge_groups;
}

// All parameters but the outputs, for kernels that must not read past the pools. sinks: may be
// null.
AttentionParams MakeParams(const AttentionProblem& problem, const Batch& b,
                           const std::vector<int32_t>& plan, const float* sinks) {
  emulation::ends_of_pools = {b.k.data() + b.k.size(), b.v.data() + b.v.size()};
  AttentionParams p = MakeAttentionParams(problem, plan.data());
  p.q = b.q.data();
  p.k = b.k.data();
  p.v = problem.spec.mla ? b.k.data() : b.v.data();
  p.sinks = sinks;
  if (problem.spec.fresh_kv) {
    p.k_new = b.k_new.data();
    p.v_new = b.v_new.data();
  }
  p.q_scale = b.q_scale.empty() ? nullptr : b.q_scale.data();
  p.k_scale = b.k_scale.empty() ? nullptr : b.k_scale.data();
  p.v_scale = b.v_scale.empty() ? nullptr : b.v_scale.data();
  p.num_pages = b.num_pages;
  std::copy(std::begin(g_operands), std::end(g_operands), p.variant_operands);
  return p;
}

// A kernel's results for the batch with a plan.
template <class Body>
Outputs RunOnPlan(const Case& c, const AttentionProblem& problem, const Batch& batch,
                  const std::vector<int32_t>& plan) {
  static_assert(Body::kSmemBytes <= static_cast<int>(sizeof(smem)), "fits a multiprocessor");
  const std::vector<float> sinks(problem.spec.num_qo_heads, 0.5f);
  AttentionParams p = MakeParams(problem, batch, plan, c.sinks ? sinks.data() : nullptr);
  Outputs out = MakeOutputs(problem, &p);
  emulation::machine.Launch(p.num_ctas, Body::kNumThreads, 5, [&p] { Body::Run(p); });
  return out;
}

// The CPU kernels' results, with all tokens in pages. The plan is the same, except for mla, whose
// heads the CPU takes all at once.
Outputs ExpectedOutputs(const Case& c, const AttentionProblem& given, const Batch& b,
                        const float* sinks) {
  AttentionProblem problem = given;
  problem.spec.fresh_kv = 0;
  if (problem.spec.mla || problem.config.tile_kv < 64) {  // no whole panel of keys
    problem = {};
    problem.spec = given.spec;
    problem.spec.fresh_kv = 0;
    if (problem.spec.mla) problem.spec.num_kv_heads = 1;
    problem.spec.schedule = kNoSplit;
    problem.spec.share_prefixes = 0;
    SelectCpu(problem.spec, &problem.config);
    FillCapacities(&problem);
  }
  const std::vector<int32_t> plan = MakePlan(c, problem, b);
  if (plan.empty()) return {};
  AttentionParams p = MakeParams(problem, b, plan, sinks);
  Outputs out = MakeOutputs(problem, &p);
  InlinePool pool;
  AttentionCpu(problem, p, pool);
  return out;
}

// Stands in for CounterPool over several launches: the first launch's counters are zero, the second
// one's are nonsense.
class Counters {
 public:
  explicit Counters(const AttentionProblem& problem)
      : num_(problem.config.max_merge_groups),
        words_(2 * num_ + problem.config.num_ctas),
        launches_(0) {
    std::fill_n(words_.begin() + num_, num_, -1);
  }
  void Use(AttentionParams* p) {
    p->merge_counters = words_.data();
    p->counter_parity = words_.data() + 2 * num_;
    ++launches_;
  }
  // True if the counters are ready for the next launch.
  bool AreReady() const {
    const auto all = [](auto begin, auto end, i32 x) {
      return std::count(begin, end, x) == end - begin;
    };
    const auto mine = words_.begin() + launches_ % 2 * num_;
    return all(mine, mine + num_, 0) && all(words_.begin() + 2 * num_, words_.end(), launches_ % 2);
  }

 private:
  const i64 num_;
  std::vector<i32> words_;
  int launches_;
};

// Checks that every item ends after its beginning.
void CheckTimes(const Case& c, const AttentionParams& p) {
  for (i32 i = 0; i < p.header->num_items; ++i) {
    const i64 begin = p.item_times[2 * i], end = p.item_times[2 * i + 1];
    if (begin > 0 && begin < end) continue;
    std::printf("FAILED %s: item %d: from %lld to %lld\n", c.name, i, begin, end);
    ++g_failures;
  }
}

// A kernel without tensor maps. Kernels have Traits and Body for a Shape.
struct NoTensorMaps {
  template <class Shape>
  static void AddTensorMaps(const AttentionSpec&, i64, AttentionParams*) {}
};

template <class Kernel, class Shape>
void RunCaseInPart(const Case& c, unsigned seed) {
  using Traits = typename Kernel::template Traits<Shape>;
  using Body = typename Kernel::template Body<Shape>;
  static_assert(Body::kSmemBytes <= static_cast<int>(sizeof(smem)), "fits a multiprocessor");
  std::mt19937 random(seed);
  const AttentionProblem problem = MakeProblem<Traits>(c);
  const AttentionSpec& spec = problem.spec;
  Batch b = MakeBatch<Traits>(c, spec, random);
  const std::vector<int32_t> plan = MakePlan(c, problem, b);
  if (plan.empty()) return;

  std::vector<float> sinks(spec.num_qo_heads);
  for (float& x : sinks) x = static_cast<float>(random() % 4) - 1.0f;
  const Outputs expected = ExpectedOutputs(c, problem, b, c.sinks ? sinks.data() : nullptr);
  if (spec.fresh_kv) MoveNewTokens(c, spec, &b);
  AttentionParams p = MakeParams(problem, b, plan, c.sinks ? sinks.data() : nullptr);
  const i64 num_rows = spec.paged() ? b.num_pages * spec.page_size : spec.max_kv_tokens;

  // Other orders of warps and CTAs, and merges as trees, give the same bits. All launches use the
  // same counters: a launch zeroes those of the next one.
  Outputs got[2];
  Counters counters(problem);
  const std::vector<int32_t> with_trees = WithMergeTrees(problem, plan);
  for (Outputs& out : got) {
    if (&out != got) UsePlan(problem, with_trees, &p);
    out = MakeOutputs(problem, &p);
    counters.Use(&p);
    Kernel::template AddTensorMaps<Shape>(spec, num_rows, &p);
    emulation::machine.Launch(p.num_ctas, Body::kNumThreads, static_cast<unsigned>(random()),
                              [&p] { Body::Run(p); });
    if (!counters.AreReady()) {
      std::printf("FAILED %s: a counter is not 0 for the next launch\n", c.name);
      ++g_failures;
    }
  }
  UsePlan(problem, plan, &p);
  if (!SameBits(got[0], got[1])) {
    std::printf("FAILED %s: bits depend on the order of execution, or on the tree of merges\n",
                c.name);
    ++g_failures;
  }
  if (c.prefix > 0 && p.header->num_shared_tokens == 0) {
    std::printf("FAILED %s: expected a plan with shared items\n", c.name);
    ++g_failures;
  }
  CheckTimes(c, p);
  for (size_t i = 0; i < expected.o.size(); ++i) {
    Compare(c, "o", i, Bf16ToFloat(got[0].o[i]), Bf16ToFloat(expected.o[i]), 0.03f);
  }
  for (size_t i = 0; i < expected.lse.size(); ++i) {
    const float size = std::isfinite(expected.lse[i]) ? std::abs(expected.lse[i]) : 0.0f;
    Compare(c, "lse", i, got[0].lse[i], expected.lse[i], 1e-3f + (c.far > 0 ? 1e-6f * size : 0.0f));
  }
  std::printf("%s: %d items, %d merge groups\n", c.name, p.header->num_items,
              p.header->num_merge_groups);
  // A request's bits do not depend on other requests with the same prefix. Kernels for kFixedSplit
  // have one tile M.
  if (c.prefix == 0 || c.kv_split == 0 || Traits::kNumTiles > 1) return;
  AttentionProblem apart = problem;
  apart.spec.share_prefixes = 0;
  const std::vector<int32_t> flat = MakePlan(c, apart, b);
  p = MakeParams(apart, b, flat,
                 c.sinks ? sinks.data() : nullptr);  // counters that a memset zeroed
  const Outputs without = MakeOutputs(apart, &p);
  emulation::machine.Launch(p.num_ctas, Body::kNumThreads, 1, [&p] { Body::Run(p); });
  if (p.header->num_shared_tokens != 0 || !SameBits(got[0], without)) {
    std::printf("FAILED %s: bits depend on shared prefixes\n", c.name);
    ++g_failures;
  }
}

template <class Kernel, class Shape>
void RunCase(const Case& c, unsigned seed) {
  g_part.has_asked = true;
  if constexpr (InPart<Kernel, Shape>()) {
    if (TakesCase<Kernel, Shape>()) RunCaseInPart<Kernel, Shape>(c, seed);
  }
}

// Decodes, speculation and a longer chunk, for trees of prefixes.
const std::vector<Request> kForest = {{1, 300}, {1, 421}, {1, 330}, {1, 257},
                                      {2, 401}, {1, 270}, {3, 390}, {60, 350}};

// Logits of any finite size, which the loops take out of their usual way.
template <class Kernel, class Shape>
void RunFarCase(Case c, unsigned seed) {
  for (c.far = 1; c.far <= kFarPatterns; ++c.far) RunCase<Kernel, Shape>(c, seed);
}
template <class Kernel>
void RunFarCases() {
  const std::vector<Request> requests = {{45, 170}, {3, 5}, {1, 300}, {70, 90}, {2, 131}};
  RunFarCase<Kernel, ShapeOf<64, 64, 4, 16, false, true, false>>(
      {.name = "far logits", .requests = requests}, 30);
  RunFarCase<Kernel, ShapeOf<64, 64, 4, 16, false, true, false>>(
      {.name = "far logits, splits, sinks", .requests = requests, .sinks = true, .kv_split = 64},
      31);
  RunFarCase<Kernel, ShapeOf<128, 128, 4, 16, false, true, false>>(
      {.name = "far logits of decodes",
       .requests = {{1, 300}, {1, 71}, {1, 130}, {2, 400}},
       .num_ctas = 1},
      32);
  RunFarCase<Kernel, ShapeOf<40, 40, 5, 5, true, true, false>>(
      {.name = "far logits, window", .requests = requests, .window_left = 50}, 33);
  RunFarCase<Kernel, ShapeOf<128, 128, 1, 16, false, true, true>>(
      {.name = "far scores, soft cap", .requests = requests, .soft_cap = 20.0}, 34);
}

// MLA kernels, with two values of head_dim_qk besides DeepSeek's. Returns the test's exit status.
template <class Kernel, int kDimA, int kDimB>
int RunMlaCases() {
  const std::vector<Request> decode = {{1, 130}, {1, 1},  {1, 64}, {0, 9},
                                       {1, 0},   {1, 65}, {2, 200}};
  RunCase<Kernel, MlaShapeOf<kDimA, 128, 5, 16, false, true, false>>(
      {.name = "mla, 5 heads", .requests = decode, .kv_heads = 1, .qo_heads = 5}, 1);
  RunCase<Kernel, MlaShapeOf<kDimA, 128, 5, 16, false, true, false>>(
      {.name = "mla, empty", .requests = {}, .kv_heads = 1, .qo_heads = 5}, 2);
  RunCase<Kernel, MlaShapeOf<kDimA, 128, 16, 1, false, true, false>>(
      {.name = "mla, 16 heads, many tokens, page 1, NaN",
       .requests = {{4, 90}, {30, 70}, {1, 40}, {3, 2}},
       .sinks = true,
       .nan_values = true,
       .num_ctas = 2,
       .kv_heads = 1,
       .qo_heads = 16},
      3);
  RunCase<Kernel, MlaShapeOf<kDimA, 128, 16, 1, false, true, false>>(
      {.name = "mla, infinities",
       .requests = {{4, 90}, {30, 70}, {1, 40}, {9, 20}},
       .infinite_values = true,
       .num_ctas = 2,
       .kv_heads = 1,
       .qo_heads = 16},
      11);
  RunCase<Kernel, MlaShapeOf<kDimB, 128, 26, 7, true, true, true>>(
      {.name = "mla, 77 heads in 3 blocks, window, soft cap",
       .requests = {{2, 150}, {1, 33}, {3, 20}},
       .window_left = 60,
       .window_right = 3,
       .soft_cap = 3.0,
       .kv_heads = 3,
       .kv_split = 64,
       .qo_heads = 77},
      4);
  RunCase<Kernel, MlaShapeOf<kDimA, 128, 26, 3, false, true, false>>(
      {.name = "mla, sharp",
       .requests = {{1, 700}, {1, 400}, {3, 333}},
       .num_ctas = 1,
       .kv_heads = 1,
       .qo_heads = 26,
       .sharpness = 10},
      7);
  RunCase<Kernel, MlaShapeOf<576, 512, 16, 64, false, true, false>>(
      {.name = "mla, DeepSeek's, 16 heads",
       .requests = {{1, 200}, {2, 65}},
       .kv_heads = 1,
       .qo_heads = 16},
      5);
  RunCase<Kernel, MlaShapeOf<576, 512, 32, 0, false, true, false>>(
      {.name = "mla, large states, shared out",
       .requests = {{1, 1400}},
       .num_ctas = 20,
       .kv_heads = 2,
       .qo_heads = 63},
      9);
  RunCase<Kernel, MlaShapeOf<576, 512, 32, 0, false, true, false>>(
      {.name = "mla, DeepSeek's, 64 heads, ragged",
       .requests = {{1, 100}, {1, 40}},
       .kv_heads = 2,
       .qo_heads = 64},
      6);
  RunFarCase<Kernel, MlaShapeOf<kDimA, 128, 16, 1, false, true, false>>(
      {.name = "mla, far logits",
       .requests = {{1, 300}, {2, 150}, {1, 71}},
       .num_ctas = 2,
       .kv_heads = 1,
       .qo_heads = 16},
      12);
  RunCase<Kernel, MlaShapeOf<kDimA, 128, 5, 16, false, true, false>>(
      {.name = "mla, shared prefixes",
       .requests = {{1, 300}, {1, 290}, {2, 330}, {1, 257}, {1, 400}, {1, 310}},
       .num_ctas = 2,
       .kv_heads = 1,
       .qo_heads = 5,
       .prefix = 256},
      8);
  RunCase<Kernel, MlaShapeOf<576, 512, 16, 64, false, true, false>>(
      {.name = "mla, shared prefixes, large states, shared out",
       .requests = {{1, 1054}, {1, 1060}, {1, 1055}, {1, 1030}, {1, 1100}, {1, 1056}},
       .num_ctas = 6,
       .kv_heads = 1,
       .qo_heads = 16,
       .prefix = 1024},
      10);
  if (g_failures > 0) std::printf("%d failures\n", g_failures);
  return g_failures > 0;
}

// k and v of the query tokens are outside the pages.
template <class Kernel>
void RunFreshCases() {
  const std::vector<Request> mixed = {{45, 70}, {3, 5}, {1, 200}, {0, 30},
                                      {5, 2},   {1, 1}, {2, 131}, {1, 0}};
  using Page16 = Fresh<ShapeOf<64, 64, 4, 16, false, true, false>>;
  RunCase<Kernel, Page16>({.name = "fresh, mixed, page 16", .requests = mixed}, 21);
  RunCase<Kernel, Page16>({.name = "fresh, decode", .requests = {{1, 100}, {1, 65}, {1, 128}}}, 22);
  RunCase<Kernel, Fresh<ShapeOf<128, 128, 8, 1, false, true, false>>>(
      {.name = "fresh, page 1", .requests = {{1, 100}, {4, 20}}, .sinks = true}, 23);
  RunCase<Kernel, Fresh<ShapeOf<40, 40, 5, 5, true, true, true>>>(
      {.name = "fresh, windows over the border, soft cap, sinks",
       .requests = mixed,
       .window_left = 30,
       .window_right = 4,
       .soft_cap = 3.0,
       .sinks = true,
       .kv_split = 64},
      24);
  RunCase<Kernel, Fresh<ShapeOf<40, 40, 5, 5, true, true, false>>>(
      {.name = "fresh, NaN values", .requests = mixed, .window_left = 50, .nan_values = true}, 25);
  // The border lies more steps into the item than rings have slots, and inside a TMA tile.
  RunCase<Kernel, Fresh<ShapeOf<128, 128, 1, 64, false, false, false>>>(
      {.name = "fresh, long chunk, full, page 64",
       .requests = {{201, 1010}, {130, 130}},
       .window_right = -1,
       .num_ctas = 1,
       .kv_heads = 1},
      26);
  RunCase<Kernel, Page16>({.name = "fresh, shared prefixes", .requests = kForest, .prefix = 256},
                          27);
}

// Returns the test's exit status.
template <class Kernel>
int RunAllCases() {
  const std::vector<Request> decode = {{1, 130}, {1, 1},  {1, 64}, {0, 9},
                                       {1, 0},   {1, 65}, {2, 300}};
  const std::vector<Request> mixed = {{45, 70}, {3, 5}, {1, 200}, {5, 2}};
  using Page16 = ShapeOf<64, 64, 4, 16, false, true, false>;
  RunCase<Kernel, Page16>({.name = "decode, page 16", .requests = decode, .kv_split = 64}, 1);
  RunCase<Kernel, Page16>({.name = "mixed, page 16", .requests = mixed}, 2);
  RunCase<Kernel, Page16>({.name = "many partial states",
                           .requests = {{1, 700}, {17, 590}, {3, 330}},
                           .sinks = true,
                           .kv_split = 32},
                          13);
  RunCase<Kernel, Page16>({.name = "empty", .requests = {}}, 3);
  RunCase<Kernel, ShapeOf<128, 128, 8, 1, false, true, false>>(
      {.name = "decode, page 1", .requests = {{1, 100}, {1, 20}}, .sinks = true}, 4);
  // Items with more steps than a ring has slots.
  RunCase<Kernel, ShapeOf<128, 128, 4, 16, false, true, false>>(
      {.name = "long decodes",
       .requests = {{1, 900}, {1, 650}, {2, 1100}, {1, 130}, {1, 700}, {1, 1000}}},
      12);
  // Up to 32 rows, 28 in the last item; maxima that rise late.
  const std::vector<Request> speculation = {{8, 300}, {1, 517}, {3, 260}, {5, 400},
                                            {2, 390}, {6, 130}, {7, 900}};
  RunCase<Kernel, Page16>(
      {.name = "speculation, sharp", .requests = speculation, .num_ctas = 2, .sharpness = 10}, 13);
  // Consumers share an item of more than 64 rows, and take one each of the smaller ones.
  RunCase<Kernel, Page16>({.name = "tall and low items by turns",
                           .requests = {{45, 600},
                                        {12, 300},
                                        {1, 517},
                                        {20, 150},
                                        {16, 700},
                                        {100, 100},
                                        {3, 400},
                                        {12, 12},
                                        {10, 640}},
                           .num_ctas = 1},
                          17);
  // Weights would be infinite if the running max did not follow.
  RunCase<Kernel, ShapeOf<128, 128, 2, 16, false, true, false>>(
      {.name = "maxima that rise late",
       .requests = {{70, 600}, {3, 500}, {1, 900}, {20, 300}},
       .num_ctas = 2,
       .sharpness = 10,
       .late_keys = 5},
      15);
  // Weights would be 0 if the running max did not follow.
  RunCase<Kernel, ShapeOf<128, 128, 2, 16, true, true, false>>(
      {.name = "logits far below 0",
       .requests = {{70, 600}, {3, 500}, {1, 300}, {20, 300}},
       .window_left = 200,
       .num_ctas = 2,
       .sharpness = 30,
       .low = true},
      16);
  RunCase<Kernel, ShapeOf<128, 128, 1, 16, false, true, true>>(
      {.name = "up to 32 tokens, soft cap",
       .requests = {{9, 300}, {32, 270}, {17, 150}, {24, 500}, {33, 140}},
       .soft_cap = 20.0,
       .sinks = true,
       .sharpness = 20},
      14);
  RunCase<Kernel, ShapeOf<40, 40, 5, 5, true, true, true>>(
      {.name = "windows, soft cap, sinks, odd sizes",
       .requests = mixed,
       .window_left = 30,
       .window_right = 4,
       .soft_cap = 3.0,
       .sinks = true,
       .kv_split = 64},
      5);
  RunCase<Kernel, ShapeOf<48, 48, 1, 0, false, false, false>>(
      {.name = "ragged, full", .requests = {{130, 100}, {1, 33}, {20, 0}}, .window_right = -1}, 6);
  RunCase<Kernel, ShapeOf<40, 40, 5, 5, true, true, false>>(
      {.name = "NaN values", .requests = mixed, .window_left = 50, .nan_values = true}, 7);
  RunCase<Kernel, ShapeOf<40, 40, 5, 5, true, true, false>>({.name = "infinite values, window",
                                                             .requests = mixed,
                                                             .window_left = 50,
                                                             .infinite_values = true},
                                                            7);
  RunCase<Kernel, Page16>(
      {.name = "infinite values", .requests = mixed, .infinite_values = true, .kv_split = 64}, 7);
  RunCase<Kernel, ShapeOf<192, 128, 2, 0, false, true, false>>(
      {.name = "long chunk, 192 and 128", .requests = {{150, 900}, {64, 70}}, .kv_heads = 1}, 8);
  RunCase<Kernel, ShapeOf<256, 256, 3, 7, false, true, false>>(
      {.name = "head_dim 256, page 7", .requests = {{1, 300}, {50, 130}}, .kv_split = 64}, 9);
  RunCase<Kernel, Page16>(
      {.name = "shared prefixes", .requests = kForest, .prefix = 256, .half_prefix = 64}, 10);
  RunCase<Kernel, ShapeOf<40, 40, 5, 5, true, true, false>>(
      {.name = "shared prefixes in a window, page 5, sinks",
       .requests = kForest,
       .window_left = 400,
       .sinks = true,
       .prefix = 330},
      12);
  // The last CTA of a shared chunk completes many groups, each with fewer rows than warps.
  std::vector<Request> many;
  for (int i = 0; i < 100; ++i) many.push_back({i % 7 == 3 ? 2 : 1, 260 + i * 37 % 50});
  RunCase<Kernel, ShapeOf<40, 40, 1, 16, false, true, false>>(
      {.name = "shared prefixes, many requests", .requests = many, .num_ctas = 8, .prefix = 256},
      28);
  RunFreshCases<Kernel>();
  RunFarCases<Kernel>();
  if (g_failures > 0) std::printf("%d failures\n", g_failures);
  return g_failures > 0;
}

}  // namespace
}  // namespace jax_attn
