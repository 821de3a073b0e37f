// Cases of variant_*_test.cc: generated variants run in emulation on plans of the real planner and
// must agree with their definition (variant_oracle.h).
//
// Include cuda_emulation.h and the kernel before this file.
#pragma once

#include "cuda/attention_cuda_cases.h"
#include "part.h"
#include "plan/rules/integers.h"
#include "printed_variants.h"
#include "variant/variant_operands.h"
#include "variant/variant_oracle.h"

namespace jax_attn {
namespace {

struct VariantCase {
  Case base;
  VariantProgram program;
  int range = 60;  // i32 operands are in [0, range)
  float tolerance = 0.03f;
  // With step lists: the map alone hides every other block of this many keys.
  int hidden_keys = 0;
  // With step lists: the map shows this many first keys, whatever the mask says.
  int shown_keys = 0;
  // If not 0: the first half of the last axis of float operands has it instead of other numbers.
  // Scores should be 0 (base.sharpness), as the oracle does not round their sum.
  float low_bias = 0;

  bool Hides(int pos) const { return hidden_keys > 0 && pos / hidden_keys % 2 == 0; }
  bool Shows(int pos) const { return pos < shown_keys; }
};

// One element of an array of bf16 or e4m3.
double ElementAt(const std::vector<uint16_t>& array, int64_t format, i64 at) {
  if (format == kPlainFormat) return Bf16ToFloat(array[at]);
  return E4m3ToFloat(reinterpret_cast<const unsigned char*>(array.data())[at]);
}

// Row of the pool with key `pos` of a request.
i64 KvRowOf(const AttentionSpec& spec, const Batch& b, int request, int pos) {
  if (!spec.paged()) return b.kv_indptr[request] + pos;
  return i64{b.page_indices[b.kv_indptr[request] + pos / spec.page_size]} * spec.page_size +
         pos % spec.page_size;
}

Fact FactOf(const VariantCase& c, const AttentionProblem& problem, const Batch& b, int request,
            int token, int head, int pos, double score) {
  const AttentionSpec& spec = problem.spec;
  const int q_len = c.base.requests[request].qo_len, kv_len = c.base.requests[request].kv_len;
  Fact fact = {score, {}};
  fact.of[kOpHead] = head;
  fact.of[kOpKvHead] = spec.mla ? 0 : head / static_cast<int>(spec.group_size());
  fact.of[kOpRequest] = request;
  fact.of[kOpQPos] = kv_len - q_len + token;
  fact.of[kOpKvPos] = pos;
  fact.of[kOpQRow] = b.qo_indptr[request] + token;
  fact.of[kOpKvRow] = static_cast<i32>(KvRowOf(spec, b, request, pos));
  fact.of[kOpQLen] = q_len;
  fact.of[kOpKvLen] = kv_len;
  return fact;
}

// The mask's exact classes of blocks, except where the map alone hides or shows keys.
constexpr int kMapTokens = 8, kMapKeys = 32;
std::vector<uint8_t> MakeBlockMap(const VariantCase& c, const AttentionProblem& problem,
                                  const Batch& b, const VariantOperand* operands, BlockMap* map) {
  int64_t columns = 1;
  for (const Request& r : c.base.requests) columns = std::max<int64_t>(columns, r.kv_len);
  *map = {nullptr, CeilDivide(problem.spec.max_qo_tokens, int64_t{kMapTokens}),
          CeilDivide(columns, int64_t{kMapKeys}), kMapTokens, kMapKeys};
  std::vector<uint8_t> classes(map->num_rows * map->num_columns);
  VariantOracle oracle(problem.program, operands);
  for (int r = 0; r < static_cast<int>(c.base.requests.size()); ++r) {
    for (int token = 0; token < c.base.requests[r].qo_len; ++token) {
      for (int i = 0; i < c.base.requests[r].kv_len * problem.spec.num_qo_heads; ++i) {
        const int pos = i / static_cast<int>(problem.spec.num_qo_heads);
        const int head = i % static_cast<int>(problem.spec.num_qo_heads);
        double logit;
        bool visible;
        oracle.Run(FactOf(c, problem, b, r, token, head, pos, 0), &logit, &visible);
        const int64_t row = (b.qo_indptr[r] + token) / kMapTokens;
        classes[row * map->num_columns + pos / kMapKeys] |=
            (visible || c.Shows(pos)) && !c.Hides(pos) ? kSomeVisible : kSomeHidden;
      }
    }
  }
  map->classes = classes.data();
  return classes;
}

struct RowOfOracle {
  std::vector<double> o;
  double lse;
};

// A row by definition. Hidden keys are not read.
RowOfOracle RunOracle(const VariantCase& c, const AttentionProblem& problem, const Batch& b,
                      const VariantOperand* operands, const float* sinks, int request, int token,
                      int head) {
  const AttentionSpec& spec = problem.spec;
  const int group = static_cast<int>(spec.group_size());
  const i64 kv_head = spec.mla ? 0 : head / group;
  const int q_len = c.base.requests[request].qo_len, kv_len = c.base.requests[request].kv_len;
  const int q_pos = kv_len - q_len + token;
  const i64 q_row = b.qo_indptr[request] + token;
  const double q_scale = b.q_scale.size() > 0 ? b.q_scale[head] : 1;
  const double k_scale = b.k_scale.size() > 0 ? b.k_scale[kv_head] : 1;
  const double v_scale = b.v_scale.size() > 0 ? b.v_scale[kv_head] : 1;
  VariantOracle oracle(problem.program, operands);
  std::vector<double> logits;
  std::vector<i64> rows;
  for (int pos = 0; pos < kv_len; ++pos) {
    if (c.Hides(pos)) continue;
    if (spec.window_left >= 0 && pos < q_pos - spec.window_left) continue;
    if (spec.window_right >= 0 && pos > q_pos + spec.window_right) continue;
    const i64 row = KvRowOf(spec, b, request, pos);
    double score = 0;
    for (i64 d = 0; d < spec.head_dim_qk; ++d) {
      score +=
          ElementAt(b.q, spec.q_format, (q_row * spec.num_qo_heads + head) * spec.head_dim_qk + d) *
          ElementAt(b.k, spec.kv_format,
                    (row * spec.num_stored_heads() + kv_head) * spec.head_dim_qk + d);
    }
    score *= spec.sm_scale * q_scale * k_scale;
    if (spec.logits_soft_cap > 0) {
      score = spec.logits_soft_cap * std::tanh(score / spec.logits_soft_cap);
    }
    const Fact fact = FactOf(c, problem, b, request, token, head, pos, score);
    double logit;
    bool visible;
    oracle.Run(fact, &logit, &visible);
    if (!visible && !c.Shows(pos)) continue;
    logits.push_back(logit);
    rows.push_back(row);
  }
  RowOfOracle result = {std::vector<double>(spec.head_dim_vo), -INFINITY};
  double max = sinks != nullptr && !logits.empty() ? sinks[head] : -INFINITY;
  for (double x : logits) max = std::max(max, x);
  double sum = sinks != nullptr && !logits.empty() ? std::exp(sinks[head] - max) : 0;
  const bool normalizes = problem.program.normalizes != 0;
  // If all logits are -inf, all weights are 0.
  bool sees_nothing = max == -INFINITY;
  for (double x : logits) sees_nothing = sees_nothing && x == -INFINITY;  // nor NaN
  for (double x : logits) sum += sees_nothing ? 0 : std::exp(x - max);
  const std::vector<uint16_t>& values = spec.mla ? b.k : b.v;
  const i64 row_length = spec.mla ? spec.head_dim_qk : spec.head_dim_vo;
  for (size_t i = 0; i < rows.size(); ++i) {
    const double weight = !normalizes    ? logits[i]
                          : sees_nothing ? 0
                                         : std::exp(logits[i] - max) / sum;
    for (i64 d = 0; d < spec.head_dim_vo; ++d) {
      result.o[d] += weight * v_scale *
                     ElementAt(values, spec.kv_format,
                               (rows[i] * spec.num_stored_heads() + kv_head) * row_length + d);
    }
  }
  if (!sees_nothing) result.lse = max + std::log(sum);
  return result;
}

// Makes MLA's keys and values NaN where the map hides them.
void PoisonHidden(const VariantCase& c, const AttentionSpec& spec, Batch* b) {
  for (size_t r = 0; r < c.base.requests.size(); ++r) {
    for (int pos = 0; pos < c.base.requests[r].kv_len; ++pos) {
      if (!c.Hides(pos)) continue;
      const i64 row = KvRowOf(spec, *b, static_cast<int>(r), pos);
      const i64 bytes = spec.head_dim_qk * (spec.quantized() ? 1 : 2);
      std::memset(reinterpret_cast<char*>(b->k.data()) + row * bytes, 0xff, bytes);
    }
  }
}

template <class Kernel, class Shape>
void RunVariantInPart(const VariantCase& c, unsigned seed) {
  using Traits = typename Kernel::template Traits<Shape>;
  using Body = typename Kernel::template Body<Shape>;
  std::mt19937 random(seed);
  AttentionProblem problem = MakeProblem<Traits>(c.base);
  problem.program = c.program;
  const AttentionSpec& spec = problem.spec;
  Batch b = MakeBatch<Traits>(c.base, spec, random);
  PoisonHidden(c, spec, &b);
  VariantOperand operands[kMaxVariantOperands] = {};
  auto data = MakeVariantOperands(c.program, c.range, random, operands);
  if (c.low_bias != 0) {
    for (i32 i = 0; i < c.program.num_operands; ++i) {
      const auto [type, rank] = c.program.operands[i];
      const size_t bytes = type == kOperandF32 ? 4 : 2, axis = operands[i].dims[rank - 1];
      const u32 bits = type == kOperandF32 ? __float_as_uint(c.low_bias) : FloatToBf16(c.low_bias);
      for (size_t at = 0; at < data[i].size() / bytes; ++at) {
        if (at % axis <= axis / 2) std::memcpy(data[i].data() + at * bytes, &bits, bytes);
      }
    }
  }
  BlockMap map;
  std::vector<uint8_t> classes;
  if (Traits::kHasSteps) classes = MakeBlockMap(c, problem, b, operands, &map);
  const std::vector<int32_t> plan =
      MakePlan(c.base, problem, b, Traits::kHasSteps ? &map : nullptr);
  if (plan.empty()) return;
  std::vector<float> sinks(spec.num_qo_heads);
  for (float& x : sinks) x = static_cast<float>(random() % 4) - 1.0f;
  const Batch in_pages = b;
  if (spec.fresh_kv) MoveNewTokens(c.base, spec, &b);
  AttentionParams p = MakeParams(problem, b, plan, c.base.sinks ? sinks.data() : nullptr);
  std::copy_n(operands, kMaxVariantOperands, p.variant_operands);
  const i64 num_rows = spec.paged() ? b.num_pages * spec.page_size : spec.max_kv_tokens;
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
  }
  if (!SameBits(got[0], got[1])) {
    std::printf("FAILED %s: bits depend on the order of execution\n", c.base.name);
    ++g_failures;
  }
  if (c.base.prefix > 0 && p.header->num_shared_tokens == 0) {
    std::printf("FAILED %s: expected a plan with shared items\n", c.base.name);
    ++g_failures;
  }
  // With lists of kFixedSplit the bits of a request do not depend on the lists before its own. The
  // first list, whose tokens are a block row, is made empty.
  if (c.hidden_keys > 0 && c.base.kv_split > 0 && c.base.requests[0].qo_len == kMapTokens) {
    std::fill_n(classes.begin(), map.num_columns, kSomeHidden);
    const std::vector<int32_t> shorter = MakePlan(c.base, problem, b, &map);
    AttentionParams other = MakeParams(problem, b, shorter, p.sinks);
    std::copy_n(operands, kMaxVariantOperands, other.variant_operands);
    const Outputs out = MakeOutputs(problem, &other);
    emulation::machine.Launch(other.num_ctas, Body::kNumThreads, 1, [&other] { Body::Run(other); });
    const i64 o_row = spec.num_qo_heads * spec.head_dim_vo, end = b.qo_indptr.back();
    if ((p.header->num_steps - other.header->num_steps) % 2 == 0 ||
        !std::equal(out.o.begin() + kMapTokens * o_row, out.o.begin() + end * o_row,
                    got[0].o.begin() + kMapTokens * o_row)) {
      std::printf("FAILED %s: bits depend on the list of another request\n", c.base.name);
      ++g_failures;
    }
  }
  for (size_t r = 0; r < c.base.requests.size(); ++r) {
    for (int token = 0; token < c.base.requests[r].qo_len; ++token) {
      for (int head = 0; head < spec.num_qo_heads; ++head) {
        const RowOfOracle want =
            RunOracle(c, problem, in_pages, operands, p.sinks, static_cast<int>(r), token, head);
        const size_t at = (b.qo_indptr[r] + token) * spec.num_qo_heads + head;
        for (int64_t d = 0; d < spec.head_dim_vo; ++d) {
          const size_t i = at * spec.head_dim_vo + d;
          const float x = static_cast<float>(want.o[d]);
          const float tolerance =
              c.tolerance * (std::isfinite(x) ? std::max(1.0f, std::abs(x)) : 1);
          Compare(c.base, "o", i, Bf16ToFloat(got[0].o[i]), x, tolerance);
        }
        if (c.program.normalizes) {
          const float lse = static_cast<float>(want.lse);
          Compare(c.base, "lse", at, got[0].lse[at], lse,
                  2e-3f + (c.low_bias != 0 ? 1e-6f * std::abs(lse) : 0.0f));
        }
      }
    }
  }
  std::printf("%s: %d items, %d merge groups\n", c.base.name, p.header->num_items,
              p.header->num_merge_groups);
  if (Traits::kHasSteps) {
    int num_masked = 0;
    for (int i = 0; i < p.header->num_steps; ++i) num_masked += p.steps[i] & 1;
    std::printf("  %d steps, %d masked\n", p.header->num_steps, num_masked);
  }
}

template <class Kernel, class Shape>
void RunVariant(const VariantCase& c, unsigned seed) {
  g_part.has_asked = true;
  if constexpr (InPart<Kernel, Shape>()) {
    if (TakesCase<Kernel, Shape>()) RunVariantInPart<Kernel, Shape>(c, seed);
  }
}

template <int kDim, int kGroup, int kPage, bool kLeft, bool kCap, class V>
using ShapeWith = With<ShapeOf<kDim, kDim, kGroup, kPage, kLeft, true, kCap>, V>;
template <int kDim, int kGroup, int kPage, class V>
using FullWith = With<ShapeOf<kDim, kDim, kGroup, kPage, false, false, false>, V>;

// Plans with step lists: whole steps are hidden, shown, and both.
template <class Kernel>
void RunListedCases() {
  const std::vector<Request> requests = {{70, 400}, {300, 300}, {2, 700}, {0, 9}, {1, 0}, {1, 300}};
  RunVariant<Kernel, Listed<FullWith<64, 4, 16, variant::CausalVariant>>>(
      {{.name = "lists, causal", .requests = requests, .window_right = -1, .sinks = true},
       Causal()},
      50);
  RunVariant<Kernel, Listed<FullWith<64, 4, 5, variant::CausalVariant>>>(
      {{.name = "lists, causal, page 5, NaN values, splits",
        .requests = requests,
        .window_right = -1,
        .nan_values = true,
        .infinite_values = true,
        .kv_split = 128},
       Causal()},
      51);
  RunVariant<Kernel, Listed<FullWith<64, 2, 0, variant::SigmoidVariant>>>(
      {{.name = "lists, sigmoid, window by mask, ragged",
        .requests = requests,
        .window_right = -1,
        .nan_values = true},
       Sigmoid()},
      52);
  RunVariant<Kernel, Listed<ShapeWith<64, 4, 16, true, false, variant::DocumentsVariant>>>(
      {{.name = "lists, documents, causal, window",
        .requests = requests,
        .window_left = 150,
        .nan_values = true,
        .kv_split = 128},
       Documents(),
       2},
      53);
  RunVariant<Kernel, Listed<ShapeWith<128, 1, 1, false, false, variant::AlibiVariant>>>(
      {{.name = "lists, alibi", .requests = requests}, Alibi()}, 54);
  RunVariant<Kernel, Listed<Fresh<FullWith<64, 4, 16, variant::CausalVariant>>>>(
      {{.name = "lists, fresh", .requests = requests, .window_right = -1}, Causal()}, 55);
  RunVariant<Kernel, Listed<E4m3Of<FullWith<64, 4, 16, variant::CausalVariant>, false>>>(
      {{.name = "lists, e4m3", .requests = requests, .window_right = -1, .nan_values = true},
       Causal()},
      56);
  // A plan trusts its map even if the mask disagrees.
  RunVariant<Kernel, Listed<FullWith<64, 4, 16, variant::CausalVariant>>>(
      {.base = {.name = "lists, causal, shown by the map alone",
                .requests = requests,
                .window_right = -1,
                .sinks = true},
       .program = Causal(),
       .shown_keys = 256},
      58);
  RunVariant<Kernel, Listed<ShapeWith<64, 4, 16, true, false, variant::DocumentsVariant>>>(
      {.base = {.name = "lists, documents, window, shown by the map alone, NaN values",
                .requests = requests,
                .window_left = 150,
                .nan_values = true},
       .program = Documents(),
       .range = 9,
       .shown_keys = 256},
      59);
  // Steps that all rows see in full, though the mask depends on rows.
  RunVariant<Kernel, Listed<FullWith<64, 4, 16, variant::CausalVariant>>>(
      {{.name = "lists, causal, shared prefixes, NaN values",
        .requests = kForest,
        .window_right = -1,
        .nan_values = true,
        .prefix = 256,
        .half_prefix = 64},
       Causal()},
      57);
}

// Logits that are multiples of scores plus a bias, and masks of positions.
template <class Kernel>
void RunFormCases() {
  const std::vector<Request> long_ones = {{40, 900}, {3, 700}, {130, 300},
                                          {0, 9},    {1, 0},   {1, 400}};
  RunVariant<Kernel, ShapeWith<64, 4, 16, false, false, variant::RisingVariant>>(
      {{.name = "rising bias", .requests = long_ones, .sinks = true}, Rising(1.25f)}, 60);
  RunVariant<Kernel, FullWith<64, 4, 0, variant::RisingVariant>>(
      {{.name = "rising bias, full", .requests = long_ones, .window_right = -1, .nan_values = true},
       Rising(1.25f)},
      61);
  RunVariant<Kernel, ShapeWith<64, 2, 16, true, false, variant::SharpVariant>>(
      {{.name = "rising bias, scores that fall, window",
        .requests = long_ones,
        .window_left = 260,
        .kv_split = 256},
       Rising(400.0f)},
      62);
  RunVariant<Kernel, FullWith<64, 4, 16, variant::SharpVariant>>(
      {{.name = "rising bias, scores that fall", .requests = long_ones, .window_right = -1},
       Rising(400.0f)},
      63);
  RunVariant<Kernel, ShapeWith<64, 4, 16, false, false, variant::HeadBiasVariant>>(
      {{.name = "bias of heads", .requests = long_ones, .nan_values = true}, HeadBias()}, 64);
#define JAX_ATTN_FORM(i)                                                                        \
  RunVariant<Kernel, ShapeWith<64, 4, i % 2 == 0 ? 16 : 0, false, i == 3, variant::Affine##i>>( \
      {{.name = "affine " #i, .requests = long_ones, .soft_cap = i == 3 ? 4.0 : 0.0},           \
       RandomAffine(i)},                                                                        \
      70 + i);                                                                                  \
  RunVariant<Kernel, FullWith<64, 4, i % 2 == 0 ? 0 : 16, variant::Mask##i>>(                   \
      {{.name = "mask of positions " #i,                                                        \
        .requests = long_ones,                                                                  \
        .window_right = -1,                                                                     \
        .nan_values = true},                                                                    \
       RandomMask(i),                                                                           \
       600},                                                                                    \
      80 + i)
  JAX_ATTN_FORM(0);
  JAX_ATTN_FORM(1);
  JAX_ATTN_FORM(2);
  JAX_ATTN_FORM(3);
#undef JAX_ATTN_FORM
}

// Returns the test's exit status.
template <class Kernel>
int RunVariantCases() {
  RunListedCases<Kernel>();
  RunFormCases<Kernel>();
  const std::vector<Request> mixed = {{45, 70}, {3, 5}, {1, 200}, {5, 2}, {0, 9}, {1, 0}, {2, 300}};
  const std::vector<Request> decode = {{1, 130}, {1, 1},  {1, 64}, {0, 9},
                                       {1, 0},   {1, 65}, {2, 300}};
  const std::vector<Request> prompts = {{70, 70}, {150, 300}, {3, 200}, {17, 17}};
  RunVariant<Kernel, ShapeWith<64, 4, 16, false, false, variant::AlibiVariant>>(
      {{.name = "alibi", .requests = mixed, .sinks = true}, Alibi()}, 1);
  RunVariant<Kernel, ShapeWith<64, 4, 16, false, false, variant::AlibiVariant>>(
      {{.name = "alibi, splits", .requests = prompts, .kv_split = 64}, Alibi()}, 2);
  RunVariant<Kernel, ShapeWith<40, 5, 5, true, true, variant::RelativeBiasVariant>>(
      {{.name = "relative bias, window, soft cap, page 5",
        .requests = mixed,
        .window_left = 50,
        .window_right = 3,
        .soft_cap = 3.0,
        .kv_split = 64},
       RelativeBias()},
      3);
  RunVariant<Kernel, FullWith<48, 1, 0, variant::DenseBiasVariant>>(
      {{.name = "dense bias, ragged", .requests = prompts, .window_right = -1}, DenseBias()}, 4);
  for (const float low : {-1e9f, -1e12f, -3.3e38f}) {  // rows of padding see nothing else
    RunVariant<Kernel, FullWith<48, 1, 0, variant::DenseBiasVariant>>(
        {.base = {.name = "dense bias that hides keys",
                  .requests = prompts,
                  .window_right = -1,
                  .kv_split = 64,
                  .sharpness = 0},
         .program = DenseBias(),
         .low_bias = low},
        61);
  }
  RunVariant<Kernel, ShapeWith<64, 4, 16, false, false, variant::CapVariant>>(
      {{.name = "soft cap by hand", .requests = decode, .sharpness = 5}, Cap()}, 5);
  RunVariant<Kernel, ShapeWith<64, 4, 16, false, false, variant::FunctionsVariant>>(
      {{.name = "functions of the C library", .requests = mixed}, Functions()}, 18);
  RunVariant<Kernel, FullWith<64, 4, 16, variant::SigmoidVariant>>(
      {{.name = "sigmoid, window by mask", .requests = prompts, .window_right = -1, .kv_split = 64},
       Sigmoid()},
      6);
  RunVariant<Kernel, ShapeWith<64, 4, 16, false, false, variant::SigmoidVariant>>(
      {{.name = "sigmoid, NaN values", .requests = mixed, .nan_values = true}, Sigmoid()}, 7);
  RunVariant<Kernel, ShapeWith<64, 4, 1, false, false, variant::LinearVariant>>(
      {{.name = "linear", .requests = decode, .kv_split = 64}, Linear(), 60, 0.06f}, 8);
  RunVariant<Kernel, FullWith<64, 2, 0, variant::DocumentsVariant>>(
      {{.name = "documents, ragged", .requests = prompts, .window_right = -1}, Documents(), 3}, 9);
  RunVariant<Kernel, ShapeWith<64, 4, 16, false, false, variant::DocumentsVariant>>(
      {{.name = "documents, causal, pages, NaN values",
        .requests = mixed,
        .sinks = true,
        .nan_values = true,
        .kv_split = 64},
       Documents(),
       3},
      10);
  RunVariant<Kernel, FullWith<128, 8, 5, variant::DocumentsVariant>>(
      {{.name = "documents, decode, page 5, infinities",
        .requests = decode,
        .window_right = -1,
        .infinite_values = true},
       Documents(),
       3},
      11);
  RunVariant<Kernel, FullWith<64, 4, 16, variant::PrefixLmVariant>>(
      {{.name = "prefix-LM", .requests = mixed, .window_right = -1}, PrefixLm()}, 12);
  RunVariant<Kernel, FullWith<64, 4, 16, variant::TreeVariant>>(
      {{.name = "tree of drafts", .requests = {{7, 300}, {16, 90}, {1, 40}}, .window_right = -1},
       Tree(),
       1 << 30},
      13);
  RunVariant<Kernel, Fresh<ShapeWith<64, 4, 16, false, false, variant::DocumentsVariant>>>(
      {{.name = "documents, fresh", .requests = mixed, .nan_values = true}, Documents(), 3}, 14);
  RunVariant<Kernel, ShapeWith<64, 4, 16, false, false, variant::KeyBiasVariant>>(
      {{.name = "bias of keys, shared prefixes",
        .requests = kForest,
        .prefix = 256,
        .half_prefix = 64},
       KeyBias()},
      15);
  RunVariant<Kernel, E4m3Of<ShapeWith<64, 4, 16, false, true, variant::AlibiVariant>, false>>(
      {{.name = "e4m3, alibi, soft cap", .requests = mixed, .soft_cap = 3.0}, Alibi()}, 16);
  RunVariant<Kernel, E4m3Of<ShapeWith<64, 4, 16, false, false, variant::DocumentsVariant>, false>>(
      {{.name = "e4m3, documents", .requests = mixed, .nan_values = true}, Documents(), 3}, 17);
#define JAX_ATTN_RANDOM(i)                                                                         \
  RunVariant<Kernel,                                                                               \
             ShapeWith<40, 4, i % 2 == 0 ? 16 : 5, false, i % 3 == 0, variant::RandomVariant##i>>( \
      {{.name = "random " #i,                                                                      \
        .requests = i % 2 == 0 ? mixed : decode,                                                   \
        .window_right = 40,                                                                        \
        .soft_cap = i % 3 == 0 ? 4.0 : 0.0,                                                        \
        .sinks = i % 2 == 1,                                                                       \
        .kv_split = 64},                                                                           \
       RandomProgram(i)},                                                                          \
      30 + i)
  JAX_ATTN_RANDOM(0);
  JAX_ATTN_RANDOM(1);
  JAX_ATTN_RANDOM(2);
  JAX_ATTN_RANDOM(3);
  JAX_ATTN_RANDOM(4);
  JAX_ATTN_RANDOM(5);
#undef JAX_ATTN_RANDOM
  if (g_failures > 0) std::printf("%d failures\n", g_failures);
  return g_failures > 0;
}

// Few rows, for kernels that support nothing else.
template <class Kernel>
void RunVariantDecodes() {
  const std::vector<Request> decode = {{1, 130}, {1, 1},  {1, 64}, {0, 9},
                                       {1, 0},   {1, 65}, {2, 300}};
  RunVariant<Kernel, ShapeWith<64, 4, 16, false, false, variant::AlibiVariant>>(
      {{.name = "decodes alone, alibi", .requests = decode, .sinks = true, .kv_split = 64},
       Alibi()},
      1);
  RunVariant<Kernel, ShapeWith<64, 4, 5, false, false, variant::DocumentsVariant>>(
      {{.name = "decodes alone, documents, NaN", .requests = decode, .nan_values = true},
       Documents(),
       3},
      2);
  RunVariant<Kernel, FullWith<64, 8, 16, variant::SigmoidVariant>>(
      {{.name = "decodes alone, sigmoid", .requests = decode, .window_right = -1, .kv_split = 64},
       Sigmoid()},
      3);
}

// MLA with step lists.
template <class Kernel, int kDim>
void RunListedMlaCases() {
  const std::vector<Request> requests = {{1, 330}, {4, 90}, {0, 9}, {1, 0}, {2, 500}, {5, 7}};
  const auto shape = [](auto v) {
    return Listed<With<MlaShapeOf<kDim, 128, 5, 16, false, true, false>, decltype(v)>>();
  };
  RunVariant<Kernel, decltype(shape(variant::DocumentsVariant()))>(
      {{.name = "mla, lists, documents, NaN, splits",
        .requests = requests,
        .nan_values = true,
        .kv_heads = 1,
        .kv_split = 128,
        .qo_heads = 5},
       Documents(),
       2},
      60);
  RunVariant<
      Kernel,
      Listed<With<MlaShapeOf<kDim, 128, 16, 1, false, false, false>, variant::PrefixLmVariant>>>(
      {{.name = "mla, lists, prefix-LM, page 1, infinities",
        .requests = requests,
        .window_right = -1,
        .infinite_values = true,
        .num_ctas = 2,
        .kv_heads = 1,
        .qo_heads = 16},
       PrefixLm()},
      61);
  RunVariant<Kernel,
             Listed<With<MlaShapeOf<kDim, 128, 26, 0, true, true, false>, variant::AlibiVariant>>>(
      {{.name = "mla, lists, alibi, window, ragged, hidden by the map alone",
        .requests = requests,
        .window_left = 200,
        .num_ctas = 1,
        .kv_heads = 1,
        .qo_heads = 26},
       Alibi(),
       60,
       0.03f,
       64},
      62);
  RunVariant<Kernel, decltype(shape(variant::CausalVariant()))>(
      {{.name = "mla, lists, causal, shared prefixes",
        .requests = {{1, 300}, {1, 290}, {2, 330}, {1, 257}, {1, 400}, {1, 310}},
        .num_ctas = 2,
        .kv_heads = 1,
        .qo_heads = 5,
        .prefix = 256},
       Causal()},
      63);
}

// MLA: every head reads the one head of k.
template <class Kernel, int kDimA>
int RunVariantMlaCases() {
  const std::vector<Request> requests = {{1, 130}, {1, 1}, {4, 90}, {0, 9}, {1, 0}, {2, 200}};
  const auto shape = [](auto v) {
    return With<MlaShapeOf<kDimA, 128, 5, 16, false, true, false>, decltype(v)>();
  };
  RunVariant<Kernel, decltype(shape(variant::AlibiVariant()))>(
      {{.name = "mla, alibi", .requests = requests, .sinks = true, .kv_heads = 1, .qo_heads = 5},
       Alibi()},
      1);
  RunVariant<Kernel, decltype(shape(variant::DocumentsVariant()))>({{.name = "mla, documents, NaN",
                                                                     .requests = requests,
                                                                     .nan_values = true,
                                                                     .kv_heads = 1,
                                                                     .kv_split = 64,
                                                                     .qo_heads = 5},
                                                                    Documents(),
                                                                    3},
                                                                   2);
  RunVariant<Kernel, decltype(shape(variant::PrefixLmVariant()))>(
      {{.name = "mla, prefix-LM, some heads, infinities",
        .requests = requests,
        .infinite_values = true,
        .kv_heads = 1,
        .qo_heads = 5},
       PrefixLm()},
      3);
  RunVariant<Kernel, decltype(shape(variant::KeyBiasVariant()))>(
      {{.name = "mla, bias of keys, shared prefixes",
        .requests = {{1, 300}, {1, 290}, {2, 330}, {1, 257}, {1, 400}, {1, 310}},
        .num_ctas = 2,
        .kv_heads = 1,
        .qo_heads = 5,
        .prefix = 256},
       KeyBias()},
      4);
  RunListedMlaCases<Kernel, kDimA>();
  RunVariant<Kernel, decltype(shape(variant::SigmoidVariant()))>(
      {{.name = "mla, sigmoid", .requests = requests, .kv_heads = 1, .qo_heads = 5}, Sigmoid()}, 5);
  if (g_failures > 0) std::printf("%d failures\n", g_failures);
  return g_failures > 0;
}

}  // namespace
}  // namespace jax_attn
