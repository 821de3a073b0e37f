// The parts of a generated transform of K or V (jit/transform_source.cc), which a warp runs on a
// row in shared memory. Lane l of the warp has lanes l + 32 j of a value in its register j; a value
// of one lane is the same in all lanes of the warp. The meaning is that of variant/transform.h.
#pragma once

#include "cuda/common/variant.cuh"

namespace jax_attn {

namespace variant {

// Lane `from` of a register of the warp.
template <class T>
__device__ __forceinline__ T OfLane(T x, int from) {
  return __shfl_sync(kFullWarp, x, from);
}
__device__ __forceinline__ bool OfLane(bool x, int from) {
  return __shfl_sync(kFullWarp, static_cast<int>(x), from) != 0;
}

// Lanes that begin `by` lanes into register `low`, which `high` follows.
template <int kBy, class T>
__device__ __forceinline__ T Shifted(T low, T high, int lane) {
  const T x = OfLane(low, (lane + kBy) % kWarpSize), y = OfLane(high, (lane + kBy) % kWarpSize);
  return lane + kBy < kWarpSize ? x : y;
}

// x's lane `at` if it is one of the register, else y.
template <class T>
__device__ __forceinline__ T Taken(T y, T x, int at) {
  const T taken = OfLane(x, at & (kWarpSize - 1));
  return static_cast<u32>(at) < kWarpSize ? taken : y;
}

// The sum, largest or smallest of the warp, in all lanes. Min and Max give NaN if either is.
struct SumOf {
  __device__ static float None() { return 0.0f; }
  __device__ static float Do(float x, float y) { return x + y; }
};
struct LargestOf {
  __device__ static float None() { return F32(0xff800000u); }
  __device__ static float Do(float x, float y) { return Max(x, y); }
};
struct SmallestOf {
  __device__ static float None() { return F32(0x7f800000u); }
  __device__ static float Do(float x, float y) { return Min(x, y); }
};
// A function, so that all lanes compute x, which may take lanes of others.
template <class Op>
__device__ __forceinline__ float Counted(float x, bool counts) {
  return counts ? x : Op::None();
}
template <class Op>
__device__ __forceinline__ float Reduced(float x) {
#pragma unroll
  for (int other = kWarpSize / 2; other > 0; other /= 2) {
    x = Op::Do(x, __shfl_xor_sync(kFullWarp, x, other));
  }
  return x;
}

// Facts that a transform may ask about the key at position `pos` of an item's request.
template <class Traits>
class RowOfKeyFacts {
 public:
  __device__ __forceinline__ RowOfKeyFacts(const AttentionParams& p, const WorkItem* item, int pos)
      : p_(p), item_(item), pos_(pos) {}

  __device__ int kv_head() const { return Field(&item_->kv_head); }
  __device__ int request() const { return Field(&item_->request); }
  __device__ int kv_pos() const { return pos_; }
  __device__ int kv_row() const {
    constexpr int kPage = jax_attn::Max(Traits::kPageSize, 1);
    const i64 entry = Field(&item_->kv_base) + static_cast<i64>(pos_ / kPage);
    return static_cast<int>(PoolRow<kPage>(Field(p_.page_indices + entry), pos_));
  }
  __device__ int q_len() const {
    const i32* begin = p_.qo_indptr + request();
    return Field(begin + 1) - Field(begin);
  }
  __device__ int kv_len() const { return Field(p_.kv_lens + request()); }

 private:
  const AttentionParams& p_;
  const WorkItem* item_;
  const int pos_;
};

}  // namespace variant

// Transforms a row of kHeadDim elements in shared memory; a whole warp calls it.
template <class Traits, class Transform, int kHeadDim, class Facts>
__device__ __forceinline__ void TransformRow(const AttentionParams& p, const Facts& facts, int lane,
                                             u16* row) {
  using E = Element<Traits::kDtype>;
  constexpr int kRegisters = CeilDiv(kHeadDim, kWarpSize);
  float x[kRegisters];
#pragma unroll
  for (int j = 0; j < kRegisters; ++j) {
    const int at = lane + j * kWarpSize;
    x[j] = at < kHeadDim ? E::ToFloat(row[at]) : 0.0f;
  }
  __syncwarp();
  Transform::Run(p, facts, lane, x);
#pragma unroll
  for (int j = 0; j < kRegisters; ++j) {
    const int at = lane + j * kWarpSize;
    if (at < kHeadDim) row[at] = static_cast<u16>(E::Pack(x[j], 0.0f));
  }
}

}  // namespace jax_attn
