// The producer warpgroup of mla.cuh and mla_decode.cuh. It copies the latent rows of a queue's
// steps to shared memory, as swizzled blocks of 64 columns.
#pragma once

#include "cuda/sm90/pipeline.cuh"

namespace jax_attn {

// A producer's walk over the kv steps of a queue, as QueueSteps. What a step needs of its item
// stays in registers: slots are released late, so a producer that loads it in every step is too
// late.
template <class Traits, class Shape>
class LatentSteps : ListedStep<Traits> {
 public:
  __device__ __forceinline__ explicit LatentSteps(const AttentionParams& p) : p_(p) {}

  __device__ __forceinline__ void Start(int begin, int end) {
    index_ = begin - 1;
    end_ = end;
    pos_ = 0;
    end_pos_ = 0;
    Next();
  }

  __device__ bool has_item() const { return index_ < end_; }
  __device__ int index() const { return index_; }  // of the step's item
  // Decides which consumer owns the step: the offset of the step in the pool, or with step lists
  // within its item, so that bits do not depend on the lists before.
  __device__ int step_offset() const { return Traits::kHasSteps ? pos_ - begin_pos_ : pos_; }
  // The walk also passes items without a span, which have no step.
  __device__ bool has_step() const { return pos_ < end_pos_; }
  __device__ bool is_first() const { return pos_ <= begin_pos_; }

  // Moves to the next step. Its page is asked for at once and used one step later.
  __device__ __forceinline__ void Next() {
    pos_ += Shape::kStep;
    if constexpr (Traits::kHasSteps) {
      this->step = this->next;
      this->next =
          KvStep<Traits>(p_, pos_ + Shape::kStep, end_pos_);  // early, as the load takes time
    }
    if (pos_ >= end_pos_) {
      ++index_;
      if (index_ >= end_) return;
      const ItemRecord item(p_, index_);
      begin_pos_ = item.kv_begin();
      end_pos_ = item.kv_end();
      base_ = item.kv_base();
      pos_ = FirstStep<Shape::kStep>(item);
      if constexpr (Traits::kHasSteps) {
        const VisibleSpan span = SpanOfItem<Traits>(p_, item);
        seen_begin_ = span.any_begin;
        seen_end_ = span.any_end;
        this->step = KvStep<Traits>(p_, pos_, end_pos_);
        this->next = KvStep<Traits>(p_, pos_ + Shape::kStep, end_pos_);
      }
    }
    if constexpr (Traits::kPageSize > 0) {
      const int pos = Shape::LanePosition(this->Begin(pos_));
      page_ = 0;
      if (Sees(pos)) page_ = LoadPage<Traits::kPageSize>(p_, base_, pos);
    }
  }

  // Pool row of this lane's token; kNoRow where no row of the item sees it.
  __device__ __forceinline__ u32 Row() const {
    const int pos = Shape::LanePosition(this->Begin(pos_));
    if (!Sees(pos)) return kNoRow;
    if constexpr (Traits::kPageSize > 0) return PoolRow<Traits::kPageSize>(page_, pos);
    return static_cast<u32>(base_) + pos;
  }

  // Prefetches the page ids of later steps into L2. With pages of one token a step needs as many
  // cache lines as it has groups of 16 tokens, and each id is read once. So they come from memory,
  // which under load answers in about the time of a step.
  __device__ __forceinline__ void PrefetchPages() const {
    if (Traits::kPageSize == 0 || threadIdx.x / kWarpSize != 0) return;
    constexpr int kSteps = 3;  // steps ahead: 6 us, while L2 keeps a line for some 10
    if (is_first()) {
      PrefetchPages<kSteps + 1>(pos_, end_pos_, base_, seen_end_);
    } else {
      PrefetchPages<1>(pos_ + kSteps * Shape::kStep, end_pos_, base_, seen_end_);
    }
    if (pos_ + Shape::kStep < end_pos_ || index_ + 1 == end_) return;
    const ItemRecord next(p_, index_ + 1);
    PrefetchPages<kSteps + 1>(FirstStep<Shape::kStep>(next), next.kv_end(), next.kv_base(),
                              EndOfItem<Traits>(p_, next));
  }

 private:
  __device__ bool Sees(int pos) const {
    if constexpr (Traits::kHasSteps) return pos >= seen_begin_ && pos < seen_end_;
    return pos >= begin_pos_ && pos < end_pos_;
  }

  // Prefetches the ids of kSteps steps from `pos` on. Ids of 16 positions are 64 bytes, or less
  // with larger pages. With step lists pos and end_pos are offsets in the lists, and positions end
  // at seen_end.
  template <int kSteps>
  __device__ __forceinline__ void PrefetchPages(int pos, int end_pos, int base,
                                                int seen_end) const {
    if constexpr (Traits::kPageSize > 0) {
      const int lane = threadIdx.x % kWarpSize;
      int at = pos + lane * 16;
      if (at >= end_pos || lane * 16 >= kSteps * Shape::kStep) return;
      if constexpr (Traits::kHasSteps) {
        at = KvStep<Traits>(p_, at, end_pos).begin() + lane * 16 % Shape::kStep;
        if (at >= seen_end) return;
      }
      PrefetchL2(p_.page_indices + (base + static_cast<i64>(at / Traits::kPageSize)));
    }
  }

  const AttentionParams& p_;
  int index_, end_;                    // item of the step; end of the queue
  int pos_;                            // kv offset of the step
  int begin_pos_ = 0, end_pos_;        // span of its item, likewise
  int seen_begin_ = 0, seen_end_ = 0;  // with step lists: kv positions that the item's rows see
  int base_ = 0;                       // first entry of its page table; ragged: first row
  i32 page_ = 0;                       // page of this lane's token
};

template <class Traits>
inline constexpr bool kQuantizedLatent = Traits::kKvFormat != kPlainFormat;
// Bytes of the one row that a token has.
template <class Traits>
inline constexpr int kLatentRowBytes =
    kQuantizedLatent<Traits>
        ? static_cast<int>(QuantizedRowBytes(Traits::kKvFormat, Traits::kHeadDimQk))
        : Traits::kHeadDimQk * 2;

// Row 0 of the layer.
template <class Traits>
__device__ __forceinline__ const char* LatentPool(const AttentionParams& p) {
  const char* pool = static_cast<const char*>(p.k);
  if (Traits::kPageSize > 0 && p.layer != nullptr) {
    pool += LoadConstant(p.layer) * p.num_pages * (Traits::kPageSize * kLatentRowBytes<Traits>);
  }
  return pool;
}

// Copies latent rows to the ring. A Shape divides a step into kUnits units, which are loaded one
// after the other: NumBlocks(unit) blocks of 64 columns. Its RingPosition tells, after StartStep,
// where they are: blocks from FirstBlock(unit) on; entry Barrier(unit) of Shared::full and empty,
// with phase parity(); the byte offset Block(unit, i) in the ring. NextUnit and NextStep move it
// on. kReadsOnce: usually no other CTA reads the row.
template <class Traits, class Shape>
class LatentRows {
 public:
  using Shared = typename Shape::Shared;

  __device__ __forceinline__ LatentRows(const AttentionParams& p, Shared& shared)
      : shared_(shared), pool_(LatentPool<Traits>(p)) {}

  // Copies this warp's rows of a step, each unit once its slot is free. lane_row: pool row of the
  // token that the lane looked up, or kNoRow. step_offset: that of the step.
  __device__ __forceinline__ void LoadStep(u32 lane_row, int step_offset) {
    place_.StartStep(step_offset);
    const Sources sources = FindSources(lane_row);
#pragma unroll
    for (int unit = 0; unit < Shape::kUnits; ++unit) {
      if (Shape::NumBlocks(unit) == 0) continue;
      const u32 full = SharedAddress(shared_.barriers.full + place_.Barrier(unit));
      WaitBarrier(SharedAddress(shared_.barriers.empty + place_.Barrier(unit)),
                  place_.parity() ^ 1);
      CopyRows(unit, sources);
      ArriveBarrierAfterCopies(full);
      place_.NextUnit();
    }
    place_.NextStep();
  }

 private:
  static constexpr int kRowBytes = kLatentRowBytes<Traits>;
  static constexpr int kWarpTokens = Shape::kStep / 4;
  static constexpr int kRowsPerCopy = 4;  // eight lanes copy 128 bytes of a row
  static constexpr int kCopies = kWarpTokens / kRowsPerCopy;
  // Sources of the lane's copies, in the first block of columns.
  struct Sources {
    const char* from[kCopies];
    bool valid[kCopies];
  };

  __device__ static int Lane() { return threadIdx.x % kWarpSize; }
  __device__ static int Warp() { return threadIdx.x / kWarpSize; }

  __device__ __forceinline__ const char* RowAt(u32 row) const {
    return pool_ + static_cast<u64>(row) * kRowBytes;
  }

  __device__ __forceinline__ Sources FindSources(u32 lane_row) const {
    Sources x;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const u32 row = __shfl_sync(kFullWarp, lane_row, i * kRowsPerCopy + Lane() / 8);
      x.valid[i] = row != kNoRow;
      // A copy that reads nothing still needs an address within the pool.
      x.from[i] = RowAt(x.valid[i] ? row : 0) + Lane() % 8 * 16;
    }
    return x;
  }

  // Copies this warp's rows of a unit one by one.
  __device__ __forceinline__ void CopyRows(int unit, const Sources& sources) const {
    const int lane_token = Lane() / 8, chunk = Lane() % 8;
    const u32 ring = SharedAddress(shared_.ring) + (Warp() * kWarpTokens + lane_token) * 128;
    const u32 swizzled[2] = {ring + (chunk ^ lane_token) * 16,
                             ring + (chunk ^ (lane_token + 4)) * 16};
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const char* from = Opaque(sources.from[i] + place_.FirstBlock(unit) * 128);
      const u32 to = swizzled[i % 2] + i * kRowsPerCopy * 128 + place_.Block(unit, 0);
#pragma unroll
      for (int b = 0; b < Shape::NumBlocks(unit); ++b) {
        if constexpr (Shape::kReadsOnce) {
          CopyAsync16(to + b * Shape::Ring::kBlockBytes, from + b * 128, sources.valid[i],
                      EvictFirst());
        } else {
          CopyAsync16(to + b * Shape::Ring::kBlockBytes, from + b * 128, sources.valid[i]);
        }
      }
    }
  }

  Shared& shared_;
  const char* pool_;  // row 0 of the layer
  typename Shape::RingPosition place_;
};

// The common part of the Shapes of both kernels.
template <class Traits>
struct LatentShape {
  static constexpr int kStep = 64;  // kv tokens
  static_assert(Traits::kTileKv == kStep, "as select/cuda.cc has it");
  static constexpr int kBlocks = Traits::kHeadDimQk / 64;  // of 64 columns
  static constexpr int kValueBlocks = Traits::kHeadDimVo / 64;
  static_assert(Traits::kHeadDimQk % 64 == 0 && Traits::kHeadDimVo % 64 == 0, "whole blocks");

  static constexpr int kWarpTokens = kStep / 4;  // tokens that one warp of the producer copies
  // kv position of the token that a lane of the producer looks up in the step at `pos`.
  __device__ static int LanePosition(int pos) {
    return pos + threadIdx.x / kWarpSize * kWarpTokens + threadIdx.x % kWarpTokens;
  }
};

}  // namespace jax_attn
