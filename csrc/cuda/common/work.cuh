// Plan access that every attention kernel needs: check the plan, read the items of its queue, find
// rows of the kv pool, and fill the padding rows of the results.
#pragma once

#include "cuda/common/header.cuh"

namespace jax_attn {

// One work item of the plan. A field is read from L1 whenever it is needed, which costs less than
// the registers that would hold it.
class ItemRecord {
 public:
  __device__ __forceinline__ ItemRecord(const AttentionParams& p, int index)
      : item_(p.items + Opaque(index)) {}

  __device__ int first_token() const { return LoadConstant(&item_->first_token); }
  __device__ int qo_len() const { return LoadConstant(&item_->qo_len); }
  __device__ int kv_head() const { return LoadConstant(&item_->kv_head); }
  __device__ int tile() const { return LoadConstant(&item_->tile); }
  __device__ int kv_begin() const { return LoadConstant(&item_->kv_begin); }
  __device__ int kv_end() const { return LoadConstant(&item_->kv_end); }
  __device__ int kv_base() const { return LoadConstant(&item_->kv_base); }
  __device__ int q_pos() const { return LoadConstant(&item_->q_pos); }
  __device__ int partial_row() const { return LoadConstant(&item_->partial_row); }
  __device__ int merge_idx() const { return LoadConstant(&item_->merge_idx); }
  __device__ int request() const { return LoadConstant(&item_->request); }
  __device__ int num_groups() const { return LoadConstant(&item_->num_groups); }
  __device__ bool is_shared() const { return IsShared(num_groups()); }

 private:
  const WorkItem* item_;
};

// A work item in registers. Fields that are not read take none.
class ItemCopy {
 public:
  ItemCopy() = default;
  __device__ __forceinline__ ItemCopy(const AttentionParams& p, int index)
      : words_{LoadConstant16(&p.items[index].first_token),
               LoadConstant16(&p.items[index].kv_begin),
               LoadConstant16(&p.items[index].partial_row)} {}

  __device__ int qo_len() const { return static_cast<int>(words_[0].y); }
  __device__ int kv_head() const { return static_cast<int>(words_[0].z); }
  __device__ int kv_begin() const { return static_cast<int>(words_[1].x); }
  __device__ int kv_end() const { return static_cast<int>(words_[1].y); }
  __device__ int kv_base() const { return static_cast<int>(words_[1].z); }
  __device__ int request() const { return static_cast<int>(words_[2].z); }

 private:
  uint4 words_[3];
};

// One past the last item of this CTA's queue.
__device__ __forceinline__ int QueueEnd(const AttentionParams& p) {
  return LoadConstant(p.queue_indptr + blockIdx.x + 1);
}

// The first item of this CTA's queue. QueueEnd if there is no plan, or the queue is not one of its
// items.
__device__ __forceinline__ int QueueBegin(const AttentionParams& p) {
  const int begin = LoadConstant(p.queue_indptr + blockIdx.x), end = QueueEnd(p);
  const HeaderCounts plan(p.header, p);
  const bool is_queue = static_cast<u32>(begin) <= static_cast<u32>(end) &&
                        static_cast<u32>(end) <= static_cast<u32>(plan.num_items);
  return plan.is_plan && is_queue ? begin : end;
}

// Result rows of a merge group, or of an item that is not shared.
template <int kGroupSize>
struct RowMap {
  int qo_begin;       // a row of q
  int first_qo_head;  // of the kv head's group
  int num_qo_heads;

  __device__ RowMap(const AttentionParams& p, int qo_begin, int kv_head)
      : qo_begin(qo_begin), first_qo_head(kv_head * kGroupSize), num_qo_heads(p.num_qo_heads) {}

  __device__ int QoHead(int row) const { return first_qo_head + row % kGroupSize; }
  // Index into [max_qo_tokens, num_qo_heads] of row `row` of the item.
  __device__ i64 Index(int row) const {
    return static_cast<i64>(qo_begin + row / kGroupSize) * num_qo_heads + QoHead(row);
  }
};

// Rows of an item in q.
template <int kGroupSize>
struct QueryRows {
  const i32* qo_indices;   // of the item's tokens; null: they are consecutive rows
  RowMap<kGroupSize> map;  // if they are consecutive

  __device__ QueryRows(const AttentionParams& p, int first_token, int kv_head, bool is_shared)
      : qo_indices(is_shared ? p.qo_indices + first_token : nullptr),
        map(p, first_token, kv_head) {}

  // Index into [max_qo_tokens, num_qo_heads] of row `row` of the item.
  __device__ i64 Index(int row) const {
    if (qo_indices == nullptr) return map.Index(row);
    const i64 token = LoadConstant(qo_indices + row / kGroupSize);
    return token * map.num_qo_heads + map.QoHead(row);
  }
};

// The kv positions that the rows of an item, or of some of its tokens, may see.
struct VisibleSpan {
  int any_begin, any_end;  // outside it no row sees anything
  int all_begin, all_end;  // inside it every row sees everything
};

// The span of the rows of tokens [first_token, last_token] of an item. The planner checks that
// positions are below 2^30, so sums of two stay in range.
template <class Traits>
__device__ __forceinline__ VisibleSpan SpanOfTokens(const AttentionParams& p, int kv_begin,
                                                    int kv_end, int q_pos, int first_token,
                                                    int last_token) {
  constexpr int kFar = 1 << 30;
  VisibleSpan span = {kv_begin, kv_end, kv_begin, kv_end};
  if constexpr (Traits::kHasWindowLeft) {
    const int left = q_pos - Min(p.window_left, kFar);
    span.any_begin = Max(left + first_token, kv_begin);
    span.all_begin = Max(left + last_token, kv_begin);
  }
  if constexpr (Traits::kHasWindowRight) {
    const int right = q_pos + Min(p.window_right, kFar - 1) + 1;
    span.any_end = Min(right + last_token, kv_end);
    span.all_end = Min(right + first_token, kv_end);
  }
  return span;
}

// The kv offset of an item's first main-loop step of kStep keys. Steps lie at absolute multiples of
// kStep, from the first one that the item's span touches.
template <int kStep, class Item>
__device__ __forceinline__ int FirstStep(const Item& item) {
  return item.kv_begin() / kStep * kStep;
}

// The kv positions that an item may read: its span, or with step lists those of its request.
template <class Traits, class Item>
__device__ __forceinline__ int FirstOfItem(const Item& item) {
  return Traits::kHasSteps ? 0 : item.kv_begin();
}
template <class Traits, class Item>
__device__ __forceinline__ int EndOfItem(const AttentionParams& p, const Item& item) {
  if constexpr (Traits::kHasSteps) return LoadConstant(p.kv_lens + item.request());
  return item.kv_end();
}

// The span of all rows of an item. Keys that a user's mask hides count as visible.
template <class Traits>
__device__ __forceinline__ VisibleSpan SpanOfItem(const AttentionParams& p,
                                                  const ItemRecord& item) {
  return SpanOfTokens<Traits>(p, FirstOfItem<Traits>(item), EndOfItem<Traits>(p, item),
                              item.q_pos(), 0, item.qo_len() - 1);
}

// A main-loop step of an item at a kv offset. Without step lists that is its kv position; with them
// the list's entry there tells.
template <class Traits>
class KvStep {
 public:
  KvStep() = default;
  // end: end of the item's offsets. Behind it is a step that no row sees.
  __device__ __forceinline__ KvStep(const AttentionParams& p, int offset, int end) : word_(offset) {
    if constexpr (Traits::kHasSteps) {
      constexpr int kFar = 1 << 30;
      word_ = offset < end ? LoadConstant(p.steps + static_cast<u32>(offset) / Traits::kTileKv)
                           : 2 * (kFar / Traits::kTileKv);
    }
  }
  __device__ int begin() const {
    return Traits::kHasSteps ? (word_ >> 1) * Traits::kTileKv : word_;
  }
  // Whether the user's mask may hide any of it.
  __device__ bool is_masked() const { return !Traits::kHasSteps || (word_ & 1) != 0; }

 private:
  int word_;
};

// The step that a loader is at. Without step lists its offset is enough.
template <class Traits, bool kHasSteps = Traits::kHasSteps>
struct ListedStep {
  __device__ static int Begin(int offset) { return offset; }
};
template <class Traits>
struct ListedStep<Traits, true> {
  KvStep<Traits> step, next;
  int kv_len;  // of the item's request
  __device__ int Begin(int) const { return step.begin(); }
};

// With kRecordsTimes, records when an item begins and ends. thread: index among those that execute
// the item.
template <class Traits>
__device__ __forceinline__ void RecordBegin(const AttentionParams& p, int index, int thread) {
  if constexpr (Traits::kRecordsTimes) {
    if (thread == 0) p.item_times[2 * index] = GlobalTimer();
  }
}
template <class Traits>
__device__ __forceinline__ void RecordEnd(const AttentionParams& p, int index, int thread) {
  if constexpr (Traits::kRecordsTimes) {
    if (thread == 0) p.item_times[2 * index + 1] = GlobalTimer();
  }
}

inline constexpr u32 kNoRow = 0xffffffffu;
inline constexpr u32 kFreshRow = 1u << 31;  // with fresh_kv: flag of a row of k_new and v_new

// The page of position `pos` in the request whose page table starts at page_indices[kv_base].
template <int kPageSize>
__device__ __forceinline__ i32 LoadPage(const AttentionParams& p, int kv_base, int pos) {
  return LoadConstant(p.page_indices +
                      (kv_base + static_cast<i64>(static_cast<u32>(pos) / kPageSize)));
}

// The row in a layer's kv pool of position `pos`, which lies in page `page`. The host checks that a
// layer has fewer than 2^32 - 1 rows, with fresh_kv at most 2^31. Bytes are counted in 64 bits.
template <int kPageSize>
__device__ __forceinline__ u32 PoolRow(i32 page, int pos) {
  return static_cast<u32>(page) * kPageSize + static_cast<u32>(pos) % kPageSize;
}

// The layer that this call reads; 0 if there is only one.
template <class Traits>
__device__ __forceinline__ int LoadLayer(const AttentionParams& p) {
  return Traits::kPageSize > 0 && p.layer != nullptr ? LoadConstant(p.layer) : 0;
}

// k and v of a layer: row 0, head 0.
struct KvPools {
  const char *k, *v;
};

template <class Traits, int kKRowBytes, int kVRowBytes>
__device__ __forceinline__ KvPools FindPoolsOfRows(const AttentionParams& p, int layer) {
  KvPools pools = {static_cast<const char*>(p.k), static_cast<const char*>(p.v)};
  if (Traits::kPageSize > 0 && p.layer != nullptr) {
    const i64 rows_times_heads = layer * p.num_pages * (Traits::kPageSize * p.num_kv_heads);
    pools.k += rows_times_heads * kKRowBytes;
    pools.v += rows_times_heads * kVRowBytes;
  }
  return pools;
}
template <class Traits, int kElementBytes>
__device__ __forceinline__ KvPools FindPools(const AttentionParams& p, int layer) {
  return FindPoolsOfRows<Traits, Traits::kHeadDimQk * kElementBytes,
                         Traits::kHeadDimVo * kElementBytes>(p, layer);
}
template <class Traits, int kElementBytes>
__device__ __forceinline__ KvPools FindPools(const AttentionParams& p) {
  return FindPools<Traits, kElementBytes>(p, LoadLayer<Traits>(p));
}

// The tokens of a request whose k and v come from k_new and v_new: positions from `begin` on.
struct FreshTokens {
  int begin;
  int first_row;  // row of position 0; may be negative

  __device__ __forceinline__ FreshTokens(const AttentionParams& p, int request) {
    const int qo_begin = LoadConstant(p.qo_indptr + request);
    const int qo_end = LoadConstant(p.qo_indptr + request + 1);
    const int kv_len = LoadConstant(p.kv_lens + request);
    begin = kv_len - (qo_end - qo_begin);
    first_row = qo_end - kv_len;
  }
  __device__ u32 Row(int pos) const { return static_cast<u32>(first_row + pos); }
};

// The counters in which this launch counts arrivals.
__device__ __forceinline__ i32* LaunchCounters(const AttentionParams& p) {
  if (p.counter_parity == nullptr) return p.merge_counters;
  return p.merge_counters +
         (LoadConstant(p.counter_parity + blockIdx.x) != 0 ? p.max_merge_groups : 0);
}
// Zeroes the counters of the next launch and makes it use them. One warp of every CTA calls it,
// once no thread of the CTA needs LaunchCounters any more.
__device__ __forceinline__ void PassCounters(const AttentionParams& p, int lane) {
  if (p.counter_parity == nullptr) return;
  i32* parity = p.counter_parity + blockIdx.x;
  const bool second = LoadConstant(parity) != 0;
  i32* next = p.merge_counters + (second ? 0 : p.max_merge_groups);
#pragma unroll 1
  for (int i = blockIdx.x * kWarpSize + lane; i < p.max_merge_groups; i += gridDim.x * kWarpSize) {
    next[i] = 0;
  }
  __syncwarp();  // all lanes have read it
  if (lane == 0) *parity = second ? 0 : 1;
}

// Does what a launch does besides its items, with num_threads threads of every CTA: PassCounters,
// and o = 0 and lse = -inf in padding rows [nnz_qo, max_qo_tokens). Without a plan all rows become
// NaN: a device planner could not make it, or it does not belong to these parameters.
template <class Traits, int kElementBytes>
__device__ __forceinline__ void FinishLaunch(const AttentionParams& p, u32 thread,
                                             u32 num_threads) {
  if (thread < kWarpSize) PassCounters(p, static_cast<int>(thread));
  const HeaderCounts plan(p.header, p);
  const i64 first = static_cast<i64>(blockIdx.x) * num_threads + thread;
  const i64 step = static_cast<i64>(gridDim.x) * num_threads;
  const i64 begin = static_cast<i64>(plan.nnz_qo) * p.num_qo_heads;
  const i64 end = static_cast<i64>(p.max_qo_tokens) * p.num_qo_heads;
  const u32 o_word = plan.is_plan ? 0 : kFullWarp;  // all bits set are NaN in every type
  const float lse = plan.is_plan ? -Infinity() : __uint_as_float(kFullWarp);
#pragma unroll 1
  for (i64 i = begin + first; i < end; i += step) p.lse[i] = lse;
  constexpr int kVectors = Traits::kHeadDimVo * kElementBytes / 16;  // head dims are multiples of 8
  uint4* o = static_cast<uint4*>(p.o);
#pragma unroll 1
  for (i64 i = begin * kVectors + first; i < end * kVectors; i += step) {
    o[i] = make_uint4(o_word, o_word, o_word, o_word);
  }
}

}  // namespace jax_attn
