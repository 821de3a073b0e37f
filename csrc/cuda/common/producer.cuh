// State of a producer of kv steps, on any architecture: its position in a ring of slots in shared
// memory, and its walk over the steps of a queue.
#pragma once

#include "cuda/common/work.cuh"

namespace jax_attn {

// Position in a ring of slots. parity: that of the slot's current phase.
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

// A producer's walk over the kv steps of a queue, across the borders of items. Every lane looks up
// the pool row of one token of each step, the one at Shape::LanePosition(step). Registers hold what
// steps need of their item: read from L1 in each step it would be five dependent loads, a quarter
// of the time that a producer has for a step of decodes.
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
  // The same, if item blockIdx.x is already loaded.
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
  __device__ int index() const { return index_; }  // of the step's item
  __device__ const ItemCopy& item() const { return item_; }
  __device__ int pos() const { return pos_; }  // of the step
  // The walk also passes items without a span, which have no step.
  __device__ bool has_step() const { return pos_ < end_pos_; }
  // Whether the step is the first of its item.
  __device__ bool is_first() const { return pos_ == FirstStep<Shape::kStep>(item_); }

  // Steps left in the item, this one included.
  __device__ int NumLeft() const { return CeilDiv(end_pos_ - pos_, Shape::kStep); }

  // Moves to the next step. Its pages are asked for at once and used one step later.
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
  // The same, if the item is known to have a next step.
  __device__ __forceinline__ void NextOfItem() {
    if (Advance()) AskForPages();
  }

  // Pool row of this lane's token. A row of k_new and v_new has kFreshRow added. kNoRow: outside of
  // the item's span.
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
  // Pages are asked for in groups: 32 entries of a page table, one a lane; or, if these are no
  // whole steps, those of one step, where each lane asks for the page of its token.
  static constexpr int kWarpPages = kWarpSize * Traits::kPageSize;  // tokens
  static constexpr bool kHasGroups = kWarpPages > 0 && kWarpPages % Shape::kStep == 0;
  static constexpr int kGroupTokens = kHasGroups ? kWarpPages : Shape::kStep;

  // Returns whether the next step has other pages.
  __device__ __forceinline__ bool Advance() {
    pos_ += Shape::kStep;
    if constexpr (Traits::kHasSteps) {
      const u32 group = static_cast<u32>(this->Begin(pos_)) / kGroupTokens;
      this->step = this->next;
      this->next =
          KvStep<Traits>(p_, pos_ + Shape::kStep, end_pos_);  // early, as the load takes time
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
    // An empty span has no step, as consumers decide it too. Kernels that only decode do not ask.
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
        const int offset = static_cast<int>(static_cast<u32>(step) % kGroupTokens);
        pos = step - offset + lane * Traits::kPageSize;
        needed = Traits::kHasSteps
                     ? IsInSpan(pos)
                     : pos + Traits::kPageSize > item_.kv_begin() && pos < item_.kv_end();
      }
      page_ = needed ? LoadPage<Traits::kPageSize>(p_, item_.kv_base(), pos) : 0;
    }
  }

  const AttentionParams& p_;
  int index_, end_;  // of the step's item; end of the queue
  ItemCopy item_;
  int pos_, end_pos_;  // kv offset of the step, and end of its item's span
  i32 page_ = 0;       // page id that this lane asked for
};

// The first item of most queues: queues of small batches have one item each, item blockIdx.x of the
// plan. Loading it beside the borders of the queue saves two trips to memory.
template <class Traits>
struct FirstItem {
  ItemCopy item;
  int layer;
  __device__ __forceinline__ explicit FirstItem(const AttentionParams& p)
      : item(p, blockIdx.x), layer(LoadLayer<Traits>(p)) {}
};

}  // namespace jax_attn
