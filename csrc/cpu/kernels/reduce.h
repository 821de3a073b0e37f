// Finishes rows: merges partial states, adds the sink, normalizes, stores. Internal linkage:
// kernels.h.
#pragma once

#include <math.h>

#include "cpu/kernels.h"
#include "cpu/simd/simd_types.h"

namespace jax_attn {
namespace {

// Prefetches the same head's row of q or o some tokens ahead: rows of a head are num_heads rows
// apart, too far for the hardware to detect a pattern. It is a hint, so the address may be beyond
// the end.
template <typename T>
JAX_ATTN_INLINE void FetchRowAhead(const T* row, i64 num_heads, i64 head_dim) {
  constexpr i64 kTokensAhead = 4;
  const char* ahead = reinterpret_cast<const char*>(row) +
                      kTokensAhead * num_heads * head_dim * static_cast<i64>(sizeof(T));
  for (i64 at = 0; at < head_dim * static_cast<i64>(sizeof(T)); at += kCacheLine)
    __builtin_prefetch(ahead + at, 1);
}

struct RowResult {
  float o_scale;  // result o = o_scale * (o before normalization)
  float lse;      // natural log
};

// log(sum * 4^max_log4), finite where both are: constants are rounded, so the largest finite logits
// could leave the range of f32.
inline float LogOfState(RowState state) {
  constexpr float kLargest = 3.4028234663852886e38f;
  const float lse = state.max_log4 * kLn4 + log2f(state.sum) * kLn2;
  if (lse > kLargest && state.max_log4 <= kLargest) return kLargest;
  return lse < -kLargest ? -kLargest : lse;
}

// A row's result. The sink is one more key with value 0; -inf: no sink. A row that sees no key
// becomes (0, -inf) without a sink.
inline RowResult FinishRow(RowState state, float sink_log4) {
  if (state.sum == 0) return {0.0f, kNegInf};
  if (sink_log4 == kNegInf) return {1.0f / state.sum, LogOfState(state)};
  const float max = sink_log4 > state.max_log4 ? sink_log4 : state.max_log4;
  const float own = exp2f(2.0f * (state.max_log4 - max));
  const float sum = own * state.sum + exp2f(2.0f * (sink_log4 - max));
  return {own / sum, LogOfState({max, sum})};
}

// to[0, n) = scale * from[0, n).
template <class Isa, typename T>
void StoreScaled(float scale, const float* from, i64 n, T* to) {
  for (i64 d = 0; d < n; d += Isa::kWidth) {
    const int lanes = static_cast<int>(Min(Isa::kWidth, n - d));
    Isa::StoreFirst(to + d, Isa::Mul(Isa::Set(scale), Isa::LoadFirst(from + d, lanes)), lanes);
  }
}

// Writes the result of one row. o is not yet normalized.
template <class Isa, typename T>
void StoreRow(const AttentionParams& params, i64 token, i64 head, RowState state, const float* o) {
  RowResult result = params.sums_weights
                         ? RowResult{1.0f, 0.0f}
                         : FinishRow(state, params.sinks ? params.sinks[head] * kLog4e : kNegInf);
  if (params.v_scale) result.o_scale *= params.v_scale[head / params.group_size];
  const i64 row = token * params.num_qo_heads + head, dim = params.head_dim_vo;
  StoreScaled<Isa>(result.o_scale, o, dim, static_cast<T*>(params.o) + row * dim);
  params.lse[row] = result.lse;
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

// Factor of a state in a sum of states with maximum `max_log4`. -inf: no state saw a key.
inline float StateWeight(float state_max_log4, float max_log4) {
  return exp2f(2.0f * (state_max_log4 - (max_log4 == kNegInf ? 0.0f : max_log4)));
}

// Columns of o on the stack. An attention row has all columns there, at most what CheckSpec allows;
// a merge call, whose head_dim is unlimited, has those that are added at once.
constexpr i64 kMaxHeadDim = 512;

// The partial states of one row of a merge group.
template <class Isa>
class RowReducer {
 public:
  RowReducer(const AttentionParams& params, const MergeGroup& group, i64 row)
      : params_(params),
        first_rows_(params.partial_rows + group.partials_begin),
        step_(group.partials_step),
        row_(row) {}

  // Their sum. Batches of kReduceBatch states are each reduced to one state, and these are added
  // one after the other. So a row has the same bits whether batches are reduced here or by groups
  // of their own. o: [head_dim_vo], not normalized.
  RowState Reduce(const MergeGroup& group, float* o) const {
    alignas(64) float batch_o[kMaxHeadDim];
    const i64 n = group.num_partials;
    if (IsParent(group)) {
      RowState all = SumOf(0, 1, o);
      for (i64 i = 1; i < n; ++i) Add(State(i), Columns(i), &all, o);
      return all;
    }
    i64 end = Min(n, kReduceBatch - group.first_offset);
    RowState all = SumOf(0, end, o);
    for (i64 begin = end; begin < n; begin = end) {
      end = Min(n, begin + kReduceBatch);
      const RowState batch = SumOf(begin, end, batch_o);
      Add(batch, batch_o, &all, o);
    }
    return all;
  }

 private:
  i64 At(i64 i) const { return first_rows_[i * step_] + row_; }
  RowState State(i64 i) const { return params_.partial_states[At(i)]; }
  const float* Columns(i64 i) const { return params_.partial_o + At(i) * params_.head_dim_vo; }

  // Sum of partials [begin, end). A single state is returned unchanged.
  RowState SumOf(i64 begin, i64 end, float* o) const {
    RowState sum = {kNegInf, 0.0f};
    for (i64 i = begin; i < end; ++i) {
      const float max = State(i).max_log4;
      sum.max_log4 = max > sum.max_log4 ? max : sum.max_log4;
    }
    for (i64 d = 0; d < params_.head_dim_vo; ++d) o[d] = 0;
    for (i64 i = begin; i < end; ++i) {
      const RowState state = State(i);
      const float weight = StateWeight(state.max_log4, sum.max_log4);
      sum.sum += weight * state.sum;
      AddScaled<Isa>(weight, Columns(i), params_.head_dim_vo, o);
    }
    return sum;
  }

  // One function for both paths of Reduce: the same instructions give the same bits.
  __attribute__((noinline)) void Add(RowState state, const float* columns, RowState* all,
                                     float* o) const {
    const float max = state.max_log4 > all->max_log4 ? state.max_log4 : all->max_log4;
    const float factor = StateWeight(all->max_log4, max);
    const float weight = StateWeight(state.max_log4, max);
    *all = {max, factor * all->sum + weight * state.sum};
    StoreScaled<Isa>(factor, o, params_.head_dim_vo, o);
    AddScaled<Isa>(weight, columns, params_.head_dim_vo, o);
  }

  const AttentionParams& params_;
  const i32* first_rows_;
  const i64 step_, row_;
};

template <class Isa, typename T>
void MergeGroupRows(const AttentionParams& params, const MergeGroup& group) {
  alignas(64) float o[kMaxHeadDim];
  const i64 rows = i64{group.qo_len} * params.group_size, dim = params.head_dim_vo;
  for (i64 r = 0; r < rows; ++r) {
    const RowState state = RowReducer<Isa>(params, group, r).Reduce(group, o);
    if (group.parent < 0) {
      const i64 token = group.qo_begin + r / params.group_size;
      const i64 head = group.kv_head * params.group_size + r % params.group_size;
      FetchRowAhead(static_cast<T*>(params.o) + (token * params.num_qo_heads + head) * dim,
                    params.num_qo_heads, dim);
      StoreRow<Isa, T>(params, token, head, state, o);
    } else {
      const i64 at = params.partial_rows[group.partials_begin] + r;
      params.partial_states[at] = state;
      StoreScaled<Isa>(1.0f, o, dim, params.partial_o + at * dim);
    }
  }
}

// Rows of a merge call: states (o, lse). lse stays a natural log, so that a single state other than
// the identity is returned exactly.
template <class Isa, typename T>
void MergeStateRows(const MergeParams& params, i64 begin, i64 end) {
  alignas(64) float o[kMaxHeadDim];
  const i64 dim = params.head_dim_vo;
  for (i64 r = begin; r < end; ++r) {
    const auto lse = [&](i64 i) { return params.lse_parts[i * params.num_rows + r]; };
    float max = kNegInf;
    for (i64 i = 0; i < params.num_states; ++i) max = lse(i) > max ? lse(i) : max;
    for (i64 first = 0; first < dim; first += kMaxHeadDim) {
      const i64 columns = Min(kMaxHeadDim, dim - first);
      float sum = 0;
      for (i64 d = 0; d < columns; ++d) o[d] = 0;
      for (i64 i = 0; i < params.num_states; ++i) {
        if (lse(i) == kNegInf) continue;  // its o is not read
        const float weight = exp2f((lse(i) - max) * kLog2e);
        sum += weight;
        const T* part =
            static_cast<const T*>(params.o_parts) + (i * params.num_rows + r) * dim + first;
        AddScaled<Isa>(weight, part, columns, o);
      }
      const RowResult result = FinishRow({0.0f, sum}, kNegInf);
      params.lse[r] = max + result.lse;
      StoreScaled<Isa>(result.o_scale, o, columns, static_cast<T*>(params.o) + r * dim + first);
    }
  }
}

}  // namespace
}  // namespace jax_attn
