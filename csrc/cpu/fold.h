// Finishing rows: fold partial states, add the sink, normalise, store. Internal linkage: kernels.h.
#pragma once

#include <math.h>

#include "cpu/kernels.h"
#include "cpu/simd_types.h"

namespace jax_attn {
namespace {

// Fetches the same head's row of q or o some tokens on: rows of a head lie num_heads rows apart,
// too far for the hardware to see a pattern. A hint, so it may point beyond the end.
template <typename T>
JAX_ATTN_INLINE void FetchRowAhead(const T* row, i64 num_heads, i64 head_dim) {
  constexpr i64 kTokensAhead = 4;
  const char* ahead = reinterpret_cast<const char*>(row) +
                      kTokensAhead * num_heads * head_dim * static_cast<i64>(sizeof(T));
  for (i64 at = 0; at < head_dim * static_cast<i64>(sizeof(T)); at += kCacheLine)
    __builtin_prefetch(ahead + at, 1);
}

struct RowResult {
  float o_scale;  // result o = o_scale * (o that is not normalised)
  float lse_log2;
};

// A row's result. The sink is one more key with value 0; -inf: none. A row without visible key
// becomes (0, -inf) and gets no sink.
inline RowResult FinishRow(RowState state, float sink_log2) {
  if (state.sum == 0) return {0.0f, kNegInf};
  if (sink_log2 == kNegInf) return {1.0f / state.sum, state.max_log2 + log2f(state.sum)};
  const float max = sink_log2 > state.max_log2 ? sink_log2 : state.max_log2;
  const float own = exp2f(state.max_log2 - max);
  const float sum = own * state.sum + exp2f(sink_log2 - max);
  return {own / sum, max + log2f(sum)};
}

// to[0, n) = scale * from[0, n).
template <class Isa, typename T>
void StoreScaled(float scale, const float* from, i64 n, T* to) {
  for (i64 d = 0; d < n; d += Isa::kWidth) {
    const int lanes = static_cast<int>(Min(Isa::kWidth, n - d));
    Isa::StoreFirst(to + d, Isa::Mul(Isa::Set(scale), Isa::LoadFirst(from + d, lanes)), lanes);
  }
}

// Writes the result of one row. o is not normalised.
template <class Isa, typename T>
void StoreRow(const AttentionParams& params, i64 token, i64 head, RowState state, const float* o) {
  RowResult result = FinishRow(state, params.sinks ? params.sinks[head] * kLog2e : kNegInf);
  if (params.v_scale) result.o_scale *= params.v_scale[head / params.group_size];
  const i64 row = token * params.num_qo_heads + head, dim = params.head_dim_vo;
  T* to = static_cast<T*>(params.o) + row * dim;
  FetchRowAhead(to, params.num_qo_heads, dim);
  StoreScaled<Isa>(result.o_scale, o, dim, to);
  params.lse[row] = result.lse_log2 * kLn2;
}

// o += weight * part.
template <class Isa, typename T>
void AddScaled(float weight, const T* part, i64 n, float* o) {
  for (i64 d = 0; d < n; d += Isa::kWidth) {
    const int lanes = static_cast<int>(Min(Isa::kWidth, n - d));
    Isa::StoreFirst(
        o + d,
        Isa::Fma(Isa::Set(weight), Isa::LoadFirst(part + d, lanes), Isa::LoadFirst(o + d, lanes)),
        lanes);
  }
}

// Folds the states of row `row` of a group's items in order into o, not normalised.
template <class Isa>
RowState FoldPartials(const AttentionParams& params, const MergeGroup& group, i64 row, float* o) {
  const i32* first_rows = params.partial_rows + group.partials_begin;
  const i64 dim = params.head_dim_vo;
  RowState all = {kNegInf, 0.0f};
  for (i64 i = 0; i < group.num_partials; ++i) {
    const float max = params.partial_states[first_rows[i] + row].max_log2;
    all.max_log2 = max > all.max_log2 ? max : all.max_log2;
  }
  for (i64 d = 0; d < dim; ++d) o[d] = 0;
  for (i64 i = 0; i < group.num_partials; ++i) {
    const RowState state = params.partial_states[first_rows[i] + row];
    if (state.sum == 0) continue;
    const float weight = exp2f(state.max_log2 - all.max_log2);
    all.sum += weight * state.sum;
    AddScaled<Isa>(weight, params.partial_o + (first_rows[i] + row) * dim, dim, o);
  }
  return all;
}

// Rows of o that fit on the stack, above every supported head dim.
constexpr i64 kMaxHeadDim = 1024;

template <class Isa, typename T>
void MergeGroupRows(const AttentionParams& params, const MergeGroup& group) {
  alignas(64) float o[kMaxHeadDim];
  const i64 rows = i64{group.qo_len} * params.group_size;
  for (i64 r = 0; r < rows; ++r) {
    const RowState state = FoldPartials<Isa>(params, group, r, o);
    StoreRow<Isa, T>(params, group.qo_begin + r / params.group_size,
                     group.kv_head * params.group_size + r % params.group_size, state, o);
  }
}

// Rows of a merge call: states (o, lse) with lse in natural log, which stays so: a single state
// that is not the identity comes out exactly.
template <class Isa, typename T>
void MergeStateRows(const MergeParams& params, i64 begin, i64 end) {
  alignas(64) float o[kMaxHeadDim];
  const i64 dim = params.head_dim_vo;
  for (i64 r = begin; r < end; ++r) {
    const auto lse = [&](i64 i) { return params.lse_parts[i * params.num_rows + r]; };
    float max = kNegInf, sum = 0;
    for (i64 i = 0; i < params.num_states; ++i) max = lse(i) > max ? lse(i) : max;
    for (i64 d = 0; d < dim; ++d) o[d] = 0;
    for (i64 i = 0; i < params.num_states; ++i) {
      if (lse(i) == kNegInf) continue;  // its o is not read
      const float weight = exp2f((lse(i) - max) * kLog2e);
      sum += weight;
      AddScaled<Isa>(
          weight, static_cast<const T*>(params.o_parts) + (i * params.num_rows + r) * dim, dim, o);
    }
    const RowResult result = FinishRow({0.0f, sum}, kNegInf);
    params.lse[r] = max + result.lse_log2 * kLn2;
    StoreScaled<Isa>(result.o_scale, o, dim, static_cast<T*>(params.o) + r * dim);
  }
}

}  // namespace
}  // namespace jax_attn
