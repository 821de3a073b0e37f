// One row of an item by one warp, token by token, straight from global memory: for rows that the
// tiled kernels cannot do exactly.
#pragma once

#include "cuda/common/e4m3.cuh"
#include "cuda/common/state.cuh"
#include "cuda/common/types.cuh"
#include "cuda/common/variant.cuh"
#include "cuda/common/work.cuh"

namespace jax_attn {

// Elements of keys and values; of e4m3 but for the scale of their head.
template <class Traits>
using KvBits = typename Choose<Traits::kKvIsE4m3, unsigned char, u16>::Type;
template <class Traits>
__device__ __forceinline__ float KvToFloat(KvBits<Traits> bits) {
  if constexpr (Traits::kKvIsE4m3) {
    return __uint_as_float(E4m3HighBytes<kElementBf16>(bits << 8) << 16);
  } else {
    return Element<Traits::kDtype>::ToFloat(bits);
  }
}

// Writes the result or, for a split item, the state of row `row` of item `index`. Only tokens that
// the row sees are read. Called by a whole warp; 16-bit elements.
template <class Traits>
__device__ __noinline__ void ComputeRow(const AttentionParams& p, int index, int row, int lane) {
  using E = Element<Traits::kDtype>;
  using Variant = typename BuiltInVariant<Traits::kHasSoftCap>::Type;
  constexpr int kDimQk = Traits::kHeadDimQk, kDimVo = Traits::kHeadDimVo;
  constexpr int kQ = CeilDiv(kDimQk, kWarpSize), kO = CeilDiv(kDimVo, kWarpSize);
  const ItemRecord item(p, index);
  const Variant variant(p);
  using Kv = KvBits<Traits>;
  KvPools pools = FindPools<Traits, sizeof(Kv)>(p);
  const QueryRows<Traits::kGroupSize> rows(p, item.qo_begin(), item.kv_head(), item.num_groups());
  const int token = row / Traits::kGroupSize;
  const VisibleSpan span =
      SpanOfTokens<Traits>(p, item.kv_begin(), item.kv_end(), item.q_pos(), token, token);

  // Element i of a lane is column lane + 32 * i.
  const u16* from = static_cast<const u16*>(p.q) + rows.Index(row) * kDimQk;
  float q[kQ], o[kO];
#pragma unroll
  for (int i = 0; i < kQ; ++i) {
    const int column = lane + i * kWarpSize;
    q[i] = column < kDimQk ? E::ToFloat(from[column]) : 0.0f;
  }
#pragma unroll
  for (int i = 0; i < kO; ++i) o[i] = 0.0f;
  RowState state = {-Infinity(), 0.0f};
#pragma unroll 1
  for (int pos = span.any_begin; pos < span.any_end; ++pos) {
    i64 at = static_cast<i64>(item.kv_base()) + pos;
    if constexpr (Traits::kPageSize > 0) {
      at = PoolRow<Traits::kPageSize>(LoadPage<Traits::kPageSize>(p, item.kv_base(), pos), pos);
    }
    if constexpr (Traits::kHasFreshKv) {
      const FreshTokens fresh(p, item.request());
      if (pos >= fresh.begin) {  // and so are all that follow
        at = fresh.Row(pos);
        pools = {static_cast<const char*>(p.k_new), static_cast<const char*>(p.v_new)};
      }
    }
    at = at * p.num_kv_heads + item.kv_head();
    const Kv* k = reinterpret_cast<const Kv*>(pools.k) + at * kDimQk;
    const Kv* v = reinterpret_cast<const Kv*>(pools.v) + at * kDimVo;
    float qk = 0.0f;
#pragma unroll
    for (int i = 0; i < kQ; ++i) {
      const int column = lane + i * kWarpSize;
      if (column < kDimQk) qk = fmaf(q[i], KvToFloat<Traits>(k[column]), qk);
    }
#pragma unroll
    for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2) {
      qk += __shfl_xor_sync(kFullWarp, qk, lanes);
    }
    if constexpr (Traits::kKvIsE4m3) qk *= LogitScaleOfHead(p.k_scale, item.kv_head());
    const float logit = Variant::kTransformsLogits ? variant.Logit(qk) : qk * (p.sm_scale * kLog2E);
    const float max_log2 = fmaxf(state.max_log2, logit);
    const float factor = StateWeight(state.max_log2, max_log2);
    const float weight = StateWeight(logit, max_log2);
    state = {max_log2, fmaf(state.sum, factor, weight)};
#pragma unroll
    for (int i = 0; i < kO; ++i) {
      const int column = lane + i * kWarpSize;
      if (column < kDimVo) o[i] = fmaf(weight, KvToFloat<Traits>(v[column]), o[i] * factor);
    }
  }

  const RowMap<Traits::kGroupSize> map(p, item.qo_begin(), item.kv_head());
  const int partial_row = item.partial_row();
  const bool final = partial_row < 0;
  const i64 at = final ? map.Index(row) : partial_row + row;
  float o_scale = WriteState(p, final, at, map.QoHead(row), lane == 0, state);
  if constexpr (Traits::kKvIsE4m3) o_scale = WithValueScale<Traits>(p, item.kv_head(), o_scale);
#pragma unroll
  for (int i = 0; i < kO; ++i) {
    const int column = lane + i * kWarpSize;
    if (column >= kDimVo) continue;
    if (final) {
      static_cast<u16*>(p.o)[at * kDimVo + column] =
          static_cast<u16>(E::Pack(o[i] * o_scale, 0.0f));
    } else {
      p.partial_o[at * kDimVo + column] = o[i];
    }
  }
}

}  // namespace jax_attn
