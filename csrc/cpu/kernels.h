// The interface between the drivers (attention.cc, merge.cc) and the kernels of one instruction
// set.
//
// A kernels_<isa>.cc is compiled with that instruction set's flags and exports one table. No
// function compiled with these flags may be linked into code that runs elsewhere. So these files
// include no C++ standard header, and everything they define is a template on their Isa struct.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "params.h"

namespace jax_attn {

struct AttentionSpec;
struct VariantProgram;
struct VariantCode;
struct TransformCode;

// The fields of a problem, besides AttentionParams, that the kernels need.
struct CpuGeometry {
  i64 max_rows;  // rows of the largest query tile, or of tiles that a kernel call takes together
  i64 tile_kv;   // kv tokens of an online softmax step, which starts at a multiple of it
  const VariantProgram* program;  // a variant's program, and the same in execution order; or null
  const VariantCode* code;
  const TransformCode* transforms[2];  // of keys and of values; null: they stay as they are
};

struct Range {
  i64 begin, end;
};

// Positions that any row of the item sees; if the item is a span of keys, only those. static: see
// above.
static inline Range SpanOf(const AttentionParams& p, const WorkItem& item) {
  if (p.steps == nullptr) return {item.kv_begin, item.kv_end};
  Range span{0, p.kv_lens[item.request]};
  const i64 begin = i64{item.q_pos} - p.window_left;
  const i64 end = i64{item.q_pos} + item.qo_len + p.window_right;
  if (p.window_left >= 0 && begin > span.begin) span.begin = begin;
  if (p.window_right >= 0 && end < span.end) span.end = end;
  return span;
}

// Up to this many rows (decode), packing and memory outweigh arithmetic: the kernels take all kv
// heads of the same rows and span together.
inline constexpr i64 kMaxLowRows = 16;

// Rows of scores that the kernels for more rows keep at once.
inline constexpr i64 kScoreRows = 128;

// The kernels for one type of o, and one type of keys and values.
struct CpuTypeKernels {
  // Bytes of scratch that attend needs, 64-byte aligned, per thread.
  size_t (*scratch_bytes)(const AttentionParams& p, const CpuGeometry& g);

  // Computes items[0, num_items). Items of up to kMaxLowRows rows differ only in kv_head,
  // partial_row and merge_idx and have consecutive kv heads. Larger items come alone, or are final
  // tiles of one request and kv head, in the order of their tokens, of at most g.max_rows rows
  // together. Direct items write o and lse; the others write partial_o and partial_states.
  void (*attend)(const AttentionParams& p, const CpuGeometry& g, const WorkItem* items,
                 i64 num_items, void* scratch);

  // Merges the complete merge group into o and lse, or into the rows of its first partial.
  void (*merge_group)(const AttentionParams& p, const MergeGroup& group);

  // Computes rows [begin, end) of a merge call.
  void (*merge_rows)(const MergeParams& p, i64 begin, i64 end);
};

// How a task of the backward pass uses the sum of a row.
enum SumUse : uint8_t {
  kAddsToSum = 1,  // earlier tasks left a sum; else this task is the first
  kEndsSum = 2,    // this task is the last, and writes the result instead
};

// Sums and results of the task's head. Rows of d_q belong to a token and include all heads of the
// group.
struct BackwardRows {
  float* sums;      // row i is at sums + i * sums_stride
  i64 sums_stride;  // f32
  void* results;    // in the type of q
  i64 stride;       // elements
};

// The logits of a row as the backward pass computes them: sum of 2^(logit - max) over its keys, in
// base-2 units, where max is in the units of the scores (BackwardPass::FarScore). (-inf, 0): no
// key.
struct RowSum {
  float max, sum;
};

// P of a row is 2^(base-2 logit - base-2 lse). If lse is at least so far from 0, its rounding alone
// would make P wrong by more than 2^-16; from 2^24 on, lse is the maximum, without the sum.
constexpr float kFarLseLog2 = 0x1p9f;
static inline bool IsFarLse(float lse) {
  constexpr float kFar = kFarLseLog2 / 1.44269504f, kLargest = 3.4028234663852886e38f;
  const float magnitude = lse < 0 ? -lse : lse;
  return magnitude >= kFar && magnitude <= kLargest;
}

// An item, or a part of its span or step list.
struct BackwardTask {
  WorkItem item;
  // [max_qo_tokens, num_qo_heads] for rows of which lse is far, in place of lse; null: there are
  // none. finds_sums: the task adds its keys to these sums, and computes nothing else.
  RowSum* far_rows;
  bool finds_sums;
  BackwardRows d_q, d_k, d_v;  // of k and v: rows of one layer
  const uint8_t* row_uses;     // [qo_len] SumUse, of d_q
  const uint8_t* key_uses;     // SumUse, of d_k and d_v, of keys in the order of blocks
};

// The backward pass for one type of q, k and v.
struct CpuBackwardKernels {
  // Bytes of scratch that run needs, 64-byte aligned, per thread.
  size_t (*scratch_bytes)(const AttentionParams& p, const CpuGeometry& g);

  void (*run)(const BackwardParams& p, const CpuGeometry& g, const BackwardTask& task,
              void* scratch);
};

// y += (x a^T) b with matrices of low rank, of the adapter of each row. The columns of y have
// parts, each with its own a: those of q, k and v, for example.
struct LoraParams {
  const void* x;  // [num_rows, depth]
  const void* a;  // [num_adapters, num_parts, max_rank, depth]
  const void* b;  // [num_adapters, max_rank, columns]
  void* y;        // [num_rows, columns]
  float* h;       // [num_rows, num_parts, max_rank]: x a^T
  i64 num_rows, depth, columns, num_parts, max_rank;
};

// The rows of one adapter.
struct LoraRows {
  const int32_t* rows;  // [num]
  i64 num, adapter;
  const int32_t* ranks;  // [num_parts]
};

// The two products for one type of x, a, b and y; sums are f32.
struct CpuLoraKernels {
  // Computes ranks [begin, end) of a part of h.
  void (*shrink)(const LoraParams& p, const LoraRows& rows, i64 part, i64 begin, i64 end);
  // Adds to columns [begin, end) of y, which are of the part. Bits are the same for any begin that
  // is a multiple of 32 columns after the part's.
  void (*expand)(const LoraParams& p, const LoraRows& rows, i64 part, i64 begin, i64 end);
};

struct CpuProductKernels;  // product_kernels.h

struct CpuKernels {
  const char* name;
  // By DType of spec.h: bf16, f16, f32. [kE4m3Format]: for e4m3 keys and values, used directly.
  // [kPlainFormat]: for those of the same dtype, and for any quantized format, decoded to it.
  const CpuTypeKernels* of[2][3];
  // For int8, with eight_bit_products.
  const CpuTypeKernels* codes[3];
  const CpuBackwardKernels* backward[3];  // by DType
  const CpuProductKernels* product[3];    // by DType
  const CpuLoraKernels* lora[3];          // by DType
};

extern const CpuKernels kKernelsBaseline;
// Products have files of their own (product_<isa>.cc), which compile in seconds.
extern const CpuProductKernels kBaselineProductBf16, kBaselineProductF16, kBaselineProductF32;
#if defined(__x86_64__)
extern const CpuProductKernels kAvx2ProductBf16, kAvx2ProductF16, kAvx2ProductF32;
extern const CpuProductKernels kAvx512ProductBf16, kAvx512ProductF16, kAvx512ProductF32;
extern const CpuProductKernels kAvx512Bf16ProductBf16, kAmxProductBf16;
// Shared by the AVX-512 tables, and by those with dot products of bf16 pairs.
extern const CpuTypeKernels kAvx512F16, kAvx512F32, kAvx512F16E4m3, kAvx512F32E4m3;
extern const CpuBackwardKernels kAvx512BackwardF16, kAvx512BackwardF32, kAvx512Bf16BackwardBf16;
extern const CpuLoraKernels kAvx512LoraBf16, kAvx512LoraF16, kAvx512LoraF32;
extern const CpuKernels kKernelsAvx2;
extern const CpuKernels kKernelsAvx512;
extern const CpuKernels kKernelsAvx512Bf16;
extern const CpuKernels kKernelsAmx;
#elif defined(__aarch64__)
extern const CpuProductKernels kNeonProductBf16, kNeonProductF16, kNeonProductF32;
extern const CpuKernels kKernelsNeon;
#endif

// The table in use (dispatch.h). SetActiveKernels sets the one that runs all items from now on.
const CpuKernels& ActiveKernels();
void SetActiveKernels(const CpuKernels& kernels);

// The tables of an attention call.
struct CpuItemKernels {
  const CpuKernels* few;  // for items of up to few_rows rows
  i64 few_rows;
  const CpuKernels* many;
};
CpuItemKernels KernelsOf(const AttentionSpec& spec);

}  // namespace jax_attn
