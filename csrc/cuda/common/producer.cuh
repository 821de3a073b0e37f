// What a producer of kv steps keeps, on any architecture: its position in a ring of slots in shared
// memory, and its walk over the steps of a queue.
#pragma once

#include "cuda/common/work.cuh"

namespace jax_attn {

// Position in a ring of slots. The parity is that of the slot's current phase.
template <int kSlots>
struct RingCursor {
  int slot = 0;
  u32 parity = 0;
  __device__ __forceinline__ void Advance() {
    if (++slot == kSlots) {
      slot = 0;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ void Advance(int num_slots) {
    slot += num_slots;
    parity ^= slot / kSlots & 1;
    slot %= kSlots;
  }
};

// A producer's way through the kv steps of a queue, across the borders of items. Every lane looks
// up the pool row of one token of each step, the one at Shape::LanePosition(step). What steps have
// to know of their item is in registers: read from L1 in each step it would be five answers, one
// asked for after the other, a quarter of the time that a producer had a step of decodes in.
template <class Traits, class Shape>
class QueueSteps : ListedStep<Traits> {
 public:
  __device__ __forceinline__ explicit QueueSteps(const AttentionParams& p) : p_(p) {}

  __device__ __forceinline__ void Start(int begin, int end) {
    index_ = begin - 1;
    end_ = end;
    pos_ = 0;
    end_pos_ = 0;
    Next();
  }
  // The same, but that item blockIdx.x is known.
  __device__ __forceinline__ void Start(int begin, int end, const ItemCopy& item) {
    index_ = begin;
    end_ = end;
    if (begin >= end) return;
    item_ = item;
    if (begin != static_cast<int>(blockIdx.x)) item_ = ItemCopy(p_, begin);
    BeginItem();
    AskForPages();
  }

  __device__ bool has_item() const { return index_ < end_; }
  __device__ int index() const { return index_; }  // of the item
  __device__ const ItemCopy& item() const { return item_; }
  __device__ int pos() const { return pos_; }  // of the step
  // An item without a span is passed, too, but has no step.
  __device__ bool has_step() const { return pos_ < end_pos_; }
  // Of its item.
  __device__ bool is_first() const { return pos_ == FirstStep<Shape::kStep>(item_); }

  // Of its item, with itself.
  __device__ int NumLeft() const { return CeilDiv(end_pos_ - pos_, Shape::kStep); }

  // On to the next step; what its pages are is asked at once and used one step later.
  __device__ __forceinline__ void Next() {
    bool asks = Advance();
    if (pos_ >= end_pos_) {
      ++index_;
      if (index_ >= end_) return;
      item_ = ItemCopy(p_, index_);
      BeginItem();
      asks = true;
    }
    if (asks) AskForPages();
  }
  // The same where the item has a next step.
  __device__ __forceinline__ void NextOfItem() {
    if (Advance()) AskForPages();
  }

  // Row of this lane's token in the pool, or kFreshRow and that of k_new and v_new; kNoRow outside
  // of the item's span.
  __device__ __forceinline__ u32 Row() const {
    const int pos = Shape::LanePosition(this->Begin(pos_));
    i32 page = page_;
    if constexpr (kHasGroups) {
      page = __shfl_sync(kFullWarp, page_, static_cast<u32>(pos) / Traits::kPageSize % kWarpSize);
    }
    if (!IsInSpan(pos)) return kNoRow;
    if constexpr (Traits::kHasFreshKv) {
      const FreshTokens fresh(p_, item_.request());
      if (pos >= fresh.begin) return kFreshRow | fresh.Row(pos);
    }
    if constexpr (Traits::kPageSize > 0) return PoolRow<Traits::kPageSize>(page, pos);
    return static_cast<u32>(item_.kv_base()) + pos;
  }

 private:
  // Steps whose pages are asked for at the same time: those of a group of 32 entries of a page
  // table, one a lane, or one step, whose lanes ask for the pages of their tokens.
  static constexpr int kWarpPages = kWarpSize * Traits::kPageSize;  // tokens
  static constexpr bool kHasGroups = kWarpPages > 0 && kWarpPages % Shape::kStep == 0;
  static constexpr int kGroupTokens = kHasGroups ? kWarpPages : Shape::kStep;

  // Whether the step has other pages.
  __device__ __forceinline__ bool Advance() {
    pos_ += Shape::kStep;
    if constexpr (Traits::kHasSteps) {
      const u32 group = static_cast<u32>(this->Begin(pos_)) / kGroupTokens;
      this->step = this->next;
      this->next = KvStep<Traits>(p_, pos_ + Shape::kStep, end_pos_);  // ahead: it takes its time
      return static_cast<u32>(this->Begin(pos_)) / kGroupTokens != group;
    }
    return static_cast<u32>(pos_) % kGroupTokens == 0;
  }
  __device__ bool IsInSpan(int pos) const {
    if constexpr (Traits::kHasSteps) return pos < this->kv_len;
    return pos >= item_.kv_begin() && pos < item_.kv_end();
  }
  __device__ __forceinline__ void BeginItem() {
    pos_ = FirstStep<Shape::kStep>(item_);
    // As consumers see it, who ask whether there is a span; of decodes alone nobody asks.
    end_pos_ = item_.kv_begin() < item_.kv_end() ? item_.kv_end() : pos_;
    if constexpr (Traits::kHasSteps) {
      this->kv_len = EndOfItem<Traits>(p_, item_);
      this->step = KvStep<Traits>(p_, pos_, end_pos_);
      this->next = KvStep<Traits>(p_, pos_ + Shape::kStep, end_pos_);
    }
  }
  __device__ __forceinline__ void AskForPages() {
    if constexpr (Traits::kPageSize > 0) {
      const int step = this->Begin(pos_);
      int pos = Shape::LanePosition(step);
      bool needed = IsInSpan(pos);
      if constexpr (kHasGroups) {
        const int lane = threadIdx.x % kWarpSize;
        const int place = static_cast<int>(static_cast<u32>(step) % kGroupTokens);
        pos = step - place + lane * Traits::kPageSize;
        needed = Traits::kHasSteps
                     ? IsInSpan(pos)
                     : pos + Traits::kPageSize > item_.kv_begin() && pos < item_.kv_end();
      }
      page_ = needed ? LoadPage<Traits::kPageSize>(p_, item_.kv_base(), pos) : 0;
    }
  }

  const AttentionParams& p_;
  int index_, end_;  // item of the step
  ItemCopy item_;
  int pos_, end_pos_;  // kv position, or place, of the step; end of its item's span
  i32 page_ = 0;       // what this lane asked for
};

// What a queue probably begins with: queues of small batches have one item each, which is item
// blockIdx.x of the plan. Asked for beside the borders of the queue it is there two trips to memory
// earlier.
template <class Traits>
struct FirstItem {
  ItemCopy item;
  int layer;
  __device__ __forceinline__ explicit FirstItem(const AttentionParams& p)
      : item(p, blockIdx.x), layer(LoadLayer<Traits>(p)) {}
};

}  // namespace jax_attn
