// Multi-head latent attention on Hopper, for tiles of 64 rows: wgmma fed by a producer warpgroup.
//
// As in sm80/mla.cuh k has one head, v is the first columns of k, heads are rows of the tile, and
// blocks of heads count as kv heads. o of 64 rows and 512 columns fills the registers of two
// warpgroups: each consumer has all rows and half of the columns (FlashMLA's arrangement).
//
// kv steps have 64 tokens. Consumer 0 computes logits and probabilities of the first, third, ...
// step of an item, consumer 1 those of the others; both multiply the probabilities of every step
// with their half of its values. So they hand over: probabilities, as the fragments that they are
// in the registers of the same thread of the other consumer, and the references of the rows, which
// go from step to step in order.
//
// The cache's rows lie in one ring of two steps beside q, which is all that fits, so what counts is
// how soon the memory of a step is given back, and how soon what lands there is multiplied. Hence
// the units of a step are columns: each consumer's values, which it gives back by itself, and the
// columns beyond v, which are through with the logits. Logits are summed up unit by unit, as they
// land. And both consumers multiply what they can before they wait for what is to come.
#pragma once

#include "cuda/common/partials.cuh"
#include "cuda/sm90/latent_rows.cuh"
#include "cuda/sm90/tile_rows.cuh"

namespace jax_attn {

template <class Traits>
struct HopperMlaShape : LatentShape<Traits> {
  using Base = LatentShape<Traits>;
  using Base::kBlocks, Base::kStep, Base::kValueBlocks;
  static constexpr int kSlots = 2;  // steps in the ring
  static_assert(Traits::kTileQ0 == 64 && Traits::kNumTiles == 1, "as select/cuda.cc has it");
  using Q = SwizzledTile<Traits::kHeadDimQk, 64>;
  using Ring = SwizzledTile<Traits::kHeadDimQk, kSlots * kStep>;
  static constexpr int kColumns = Traits::kHeadDimVo / 2;  // of o that a consumer has
  static_assert(kColumns % 64 == 0, "whole blocks of columns");

  // Parts of a step that are loaded and given back by themselves: the values of consumers 0 and 1,
  // and the columns beyond v, which come first, as they are given back first.
  static constexpr int kUnits = 3, kBeyond = 2;
  __device__ static constexpr int UnitInOrder(int i) { return (i + kBeyond) % kUnits; }
  __device__ static constexpr int FirstBlock(int unit) { return unit * (kValueBlocks / 2); }
  __device__ static constexpr int NumBlocks(int unit) {
    return unit == kBeyond ? kBlocks - kValueBlocks : kValueBlocks / 2;
  }
  struct RingPlace {
    RingCursor<kSlots> cursor;
    __device__ int Barrier(int unit) const { return cursor.slot * kUnits + unit; }
    __device__ u32 parity() const { return cursor.parity; }
    __device__ int Block(int unit, int i) const {
      return cursor.slot * kStep * 128 + (FirstBlock(unit) + i) * Ring::kBlockBytes;
    }
    __device__ __forceinline__ void NextUnit() {}
    __device__ __forceinline__ void NextStep() { cursor.Advance(); }
  };

  struct Barriers {
    u64 full_q, empty_q;
    u64 full[kSlots * kUnits], empty[kSlots * kUnits];
  };
  struct Shared {
    alignas(1024) unsigned char q[Q::kBytes];
    alignas(1024) unsigned char ring[Ring::kBytes];
    // What the consumers hand over. A thread overwrites only what it has read itself.
    uint4 probabilities[kStep / 16][128];
    float2 max_log2[128];
    Barriers barriers;
    MergeScratch merge;
  };

  __device__ __forceinline__ static void InitBarriers(Shared& shared) {
    Barriers& b = shared.barriers;
    InitBarrier(SharedAddress(&b.full_q), HopperRoles::kProducerThreads);
    InitBarrier(SharedAddress(&b.empty_q), HopperRoles::kConsumerWarps);
    for (int i = 0; i < kSlots * kUnits; ++i) {
      InitBarrier(SharedAddress(b.full + i), HopperRoles::kProducerThreads);
      InitBarrier(SharedAddress(b.empty + i), HopperRoles::kConsumerWarps / 2);
    }
  }
};

// --- producer ---

template <class Traits>
class HopperMlaProducer {
 public:
  using Shape = HopperMlaShape<Traits>;
  using Shared = typename Shape::Shared;
  using E = Element<Traits::kDtype>;

  __device__ __forceinline__ HopperMlaProducer(const AttentionParams& p, Shared& shared)
      : p_(p), shared_(shared), steps_(p), rows_(p, shared) {}

  // q of an item goes ahead of its first step.
  __device__ __forceinline__ void Run(int begin, int end) {
    steps_.Start(begin, end);
    while (steps_.has_item()) {
      const ItemRecord item(p_, steps_.index());
      const bool has_step = steps_.has_step();
      const u32 row = has_step ? steps_.Row(item) : kNoRow;
      if (has_step && steps_.is_first(item)) LoadQ(item);
      if (has_step) rows_.PrefetchPages(steps_.index(), steps_.pos(), end);
      steps_.Next();
      if (has_step) rows_.LoadStep(row);
    }
  }

 private:
  static constexpr int kRowsPerCopy = 4;  // eight lanes copy 128 bytes of a row

  __device__ static int Lane() { return threadIdx.x % kWarpSize; }
  __device__ static int Warp() { return threadIdx.x / kWarpSize; }

  // Zeros where there is no row.
  __device__ __forceinline__ void LoadQ(const ItemRecord& item) {
    using Q = typename Shape::Q;
    WaitBarrier(SharedAddress(&shared_.barriers.empty_q), q_parity_ ^ 1);
    const int num_rows = item.qo_len() * Traits::kGroupSize;
    const QueryRows<Traits::kGroupSize> rows(p_, item.qo_begin(), item.kv_head(),
                                             item.num_groups());
    const int chunk = Lane() % 8;
#pragma unroll 1
    for (int row = Warp() * 16 + Lane() / 8; row < Warp() * 16 + 16; row += kRowsPerCopy) {
      const bool valid = row < num_rows && rows.map.QoHead(row) < p_.num_qo_heads;
      const u16* from = static_cast<const u16*>(p_.q) + chunk * 8;
      if (valid) from += rows.Index(row) * Traits::kHeadDimQk;
      const u32 to = SharedAddress(shared_.q) + row * 128 + (chunk ^ row % 8) * 16;
#pragma unroll
      for (int block = 0; block < Q::kBlocks; ++block) {
        CopyAsync16(to + block * Q::kBlockBytes, from + block * 64, valid);
      }
    }
    ArriveBarrierAfterCopies(SharedAddress(&shared_.barriers.full_q));
    q_parity_ ^= 1;
  }

  const AttentionParams& p_;
  Shared& shared_;
  QueueSteps<Traits, Shape> steps_;
  LatentRows<Traits, Shape> rows_;
  u32 q_parity_ = 0;
};

// --- consumers ---

template <class Traits>
class HopperMlaConsumer {
 public:
  using Shape = HopperMlaShape<Traits>;
  using Shared = typename Shape::Shared;
  using E = Element<Traits::kDtype>;
  using Rows = TileRows<Traits>;
  using Q = typename Shape::Q;
  using Ring = typename Shape::Ring;

  __device__ __forceinline__ HopperMlaConsumer(const AttentionParams& p, Shared& shared)
      : p_(p),
        shared_(shared),
        group_(__shfl_sync(kFullWarp, threadIdx.x / 128, 0) - 1),  // the same in the whole warp
        thread_(threadIdx.x % 128) {}

  __device__ __forceinline__ void Run(int begin, int end) {
    for (int index = begin; index < end; ++index) RunItem(index);
  }

 private:
  static constexpr int kStep = Shape::kStep;
  static constexpr int kUnits = Shape::kUnits;
  static constexpr int kColumns = Shape::kColumns;
  static constexpr int kOTiles = kColumns / 8;
  static constexpr bool kRowsMayDiffer = Traits::kHasWindowLeft || Traits::kHasWindowRight;
  static constexpr int kBoth = HopperRoles::kConsumerThreads;
  // Named barriers: what consumer 0 or 1 hands over is there; a consumer by itself.
  static constexpr int kHandOver = 1, kAlone = 4;
  using Logits = float[kStep / 8][4];
  using Probabilities = u32[kStep / 16][4];
  using Output = float[kOTiles][4];
  using Cursor = RingCursor<Shape::kSlots>;

  __device__ int Lane() const { return thread_ % kWarpSize; }
  __device__ int Warp() const { return thread_ / kWarpSize; }

  // --- ring ---

  __device__ __forceinline__ void WaitFull(const Cursor& cursor, int unit) const {
    WaitBarrier(SharedAddress(shared_.barriers.full + cursor.slot * kUnits + unit), cursor.parity);
    FenceSharedForWgmma();
  }
  // One arrival a warp: the others may still read.
  __device__ __forceinline__ void ReleaseUnit(const Cursor& cursor, int unit) const {
    __syncwarp();
    if (Lane() == 0) {
      ArriveBarrier(SharedAddress(shared_.barriers.empty + cursor.slot * kUnits + unit));
    }
  }
  __device__ __forceinline__ void ReleaseQ() const {
    __syncwarp();
    if (Lane() == 0) ArriveBarrier(SharedAddress(&shared_.barriers.empty_q));
  }

  // --- products ---

  // Logits of a step, each unit as soon as it has landed.
  __device__ __forceinline__ void MultiplyQk(const Cursor& cursor, Logits& s) const {
    const u64 q = Q::Descriptor(Anew(SharedAddress(shared_.q)), 0);
    const u64 k = Ring::Descriptor(Anew(SharedAddress(shared_.ring)), cursor.slot * kStep);
    PinRegisters(s);
#pragma unroll
    for (int order = 0; order < kUnits; ++order) {
      const int unit = Shape::UnitInOrder(order);
      if (Shape::NumBlocks(unit) == 0) continue;
      WaitFull(cursor, unit);
      WgmmaFence();
#pragma unroll
      for (int i = 0; i < 4 * Shape::NumBlocks(unit); ++i) {
        const int kk = 4 * Shape::FirstBlock(unit) + i;
        Wgmma<kStep, Traits::kDtype>::SharedA(s, Q::AlongK(q, kk), Ring::AlongK(k, kk), true);
      }
    }
    WgmmaCommit();
    WgmmaWait<0>();
    PinRegisters(s);
    if (Shape::NumBlocks(Shape::kBeyond) > 0) ReleaseUnit(cursor, Shape::kBeyond);
  }

  // Adds the consumer's columns of a step to o, and gives them back.
  __device__ __forceinline__ void MultiplyPv(const Cursor& cursor, Probabilities& p,
                                             Output& o) const {
    PinRegisters(p);
    PinRegisters(o);
    WgmmaFence();
    const u32 half = SharedAddress(shared_.ring) + group_ * (kColumns / 64) * Ring::kBlockBytes;
    const u64 v = Ring::TransposedDescriptor(Anew(half), cursor.slot * kStep);
#pragma unroll
    for (int kk = 0; kk < kStep / 16; ++kk) {
      Wgmma<kColumns, Traits::kDtype>::RegistersATransposedB(o, p[kk], Ring::AlongRows(v, kk),
                                                             true);
    }
    WgmmaCommit();
    WgmmaWait<0>();
    PinRegisters(o);
    ReleaseUnit(cursor, group_);
  }

  // --- handing over ---

  __device__ __forceinline__ void HandOver(const Rows& rows, const Probabilities& p) {
#pragma unroll
    for (int kk = 0; kk < kStep / 16; ++kk) {
      shared_.probabilities[kk][thread_] = make_uint4(p[kk][0], p[kk][1], p[kk][2], p[kk][3]);
    }
    shared_.max_log2[thread_] = make_float2(rows.max_log2[0], rows.max_log2[1]);
    ArriveNamed(kHandOver + group_, kBoth);
  }
  __device__ __forceinline__ void TakeOver(Rows& rows, Probabilities& p) const {
    SyncNamed(kHandOver + 1 - group_, kBoth);
#pragma unroll
    for (int kk = 0; kk < kStep / 16; ++kk) {
      const uint4 x = shared_.probabilities[kk][thread_];
      p[kk][0] = x.x;
      p[kk][1] = x.y;
      p[kk][2] = x.z;
      p[kk][3] = x.w;
    }
    const float2 max_log2 = shared_.max_log2[thread_];
    rows.Follow(max_log2.x, max_log2.y);
  }

  // --- one item ---

  __device__ __forceinline__ void RunItem(int index) {
    RecordBegin<Traits>(p_, index, HopperConsumers::thread());
    const ItemRecord item(p_, index);
    Rows rows(p_, index, 0, thread_);
    PrefetchMergeGroup(p_, item.merge_idx());
    Output o;
#pragma unroll
    for (int j = 0; j < kOTiles; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) o[j][c] = 0.0f;
    }
    const int begin = FirstStep<kStep>(item), end = item.kv_end();
    if (begin < end) {
      WaitBarrier(SharedAddress(&shared_.barriers.full_q), q_parity_);
      q_parity_ ^= 1;
      RunSteps(item, begin, end, rows, o);
      rows.FinishSums();
      AddSums(rows);
    }
    Write(item, rows, o);
    const int num_groups = item.num_groups();
    if (num_groups > 0) {
      ArriveAndMerge<Traits, HopperConsumers>(p_, item.merge_idx(), num_groups, shared_.merge);
    }
    RecordEnd<Traits>(p_, index, HopperConsumers::thread());
  }

  // A step of the consumer's own: its probabilities are handed over before they are multiplied.
  __device__ __forceinline__ void RunOwn(const ItemRecord& item, int pos, bool is_last, Rows& rows,
                                         Output& o) {
    Logits s = {};
    MultiplyQk(cursor_, s);
    if (is_last) ReleaseQ();
    Mend(item, pos, cursor_);
    Probabilities p;
    rows.MakeLogits(pos, s);
    rows.ExponentiateByMaxima(s, p);
    HandOver(rows, p);
    rows.Rescale(o);
    MultiplyPv(cursor_, p, o);
    cursor_.Advance();
  }
  __device__ __forceinline__ void RunOther(Rows& rows, Output& o) {
    Probabilities p;
    TakeOver(rows, p);
    WaitFull(cursor_, group_);  // for the other consumer it was so before it handed over
    rows.Rescale(o);
    MultiplyPv(cursor_, p, o);
    cursor_.Advance();
  }

  // Steps are consumer 0's and consumer 1's in turns. To begin the logits of the next step ahead of
  // the other's probabilities would cost more than it gains: the next step is not there yet
  // (benchmarks/NOTES.md has a model).
  __device__ __forceinline__ void RunSteps(const ItemRecord& item, int begin, int end, Rows& rows,
                                           Output& o) {
    if (group_ == 1 && begin + kStep >= end) ReleaseQ();  // no step is its own
    int pos = begin;
    if (group_ == 1) {
      RunOther(rows, o);
      pos += kStep;
    }
#pragma unroll 1
    for (; pos < end; pos += 2 * kStep) {
      RunOwn(item, pos, pos + 2 * kStep >= end, rows, o);
      if (pos + kStep < end) RunOther(rows, o);
    }
  }

  // In a step that some rows see more of than others, 0 times a value that is not finite must not
  // reach the rows that do not see it. Those that do have it in their logits already, all of whose
  // columns take part in them; so it becomes 0, for everybody. The logits of the step are complete,
  // its values are not read by anyone before its probabilities are handed over.
  __device__ __forceinline__ void Mend(const ItemRecord& item, int pos, const Cursor& cursor) {
    if (!kRowsMayDiffer || item.qo_len() == 1) return;
    const VisibleSpan span = SpanOfTokens<Traits>(p_, item.kv_begin(), item.kv_end(), item.q_pos(),
                                                  0, item.qo_len() - 1);
    if (pos >= span.all_begin && pos + kStep <= span.all_end) return;
    SyncNamed(kAlone + group_, 128);  // the products of the other warps have read the keys, too
    unsigned char* slot = shared_.ring + cursor.slot * kStep * 128;
    // A thread looks after half of a row of 64 columns. Columns beyond v do no harm.
#pragma unroll 1
    for (int block = 0; block < Traits::kHeadDimVo / 64; ++block) {
      unsigned char* from = slot + block * Ring::kBlockBytes + thread_ * 64;
#pragma unroll 1
      for (int i = 0; i < 4; ++i) {
        uint4 x = *reinterpret_cast<const uint4*>(from + i * 16);
        x = make_uint4(FiniteOrZero(x.x), FiniteOrZero(x.y), FiniteOrZero(x.z), FiniteOrZero(x.w));
        *reinterpret_cast<uint4*>(from + i * 16) = x;
      }
    }
    FenceSharedForWgmma();
    SyncNamed(kAlone + group_, 128);
  }
  __device__ static u32 FiniteOrZero(u32 x) {
    const u32 not_finite = E::FmaX2(x, 0, 0);  // 0 * x is NaN unless x is finite
    return ((not_finite & 0x7fff) != 0 ? 0 : x & 0xffff) |
           ((not_finite & 0x7fff0000) != 0 ? 0 : x & 0xffff0000);
  }

  // --- results ---

  // Each consumer has summed up the probabilities of its own steps.
  __device__ __forceinline__ void AddSums(Rows& rows) {
    float2(*sums)[128] = reinterpret_cast<float2(*)[128]>(shared_.probabilities);
    HopperConsumers::Sync();  // nobody takes over any more
    sums[group_][thread_] = make_float2(rows.sum[0], rows.sum[1]);
    HopperConsumers::Sync();
    // In the same order for both.
    const float2 a = sums[0][thread_], b = sums[1][thread_];
    rows.sum[0] = a.x + b.x;
    rows.sum[1] = a.y + b.y;
    HopperConsumers::Sync();  // before the next item's probabilities
  }

  // A row's four lanes store 16 or 32 neighbouring bytes at a time.
  __device__ __forceinline__ void Write(const ItemRecord& item, const Rows& rows,
                                        const Output& o) const {
    const int num_rows = item.qo_len() * Traits::kGroupSize;
    const RowMap<Traits::kGroupSize> map(p_, item.qo_begin(), item.kv_head());
    const int partial_row = item.partial_row();
    const bool final = partial_row < 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = Warp() * 16 + 8 * h + Lane() / 4;
      if (row >= num_rows || map.QoHead(row) >= p_.num_qo_heads) continue;
      const i64 at = final ? map.Index(row) : partial_row + row;
      const float o_scale =
          WriteState(p_, final, at, map.QoHead(row), group_ == 0 && Lane() % 4 == 0,
                     rows.state(h));
      const i64 first = at * Traits::kHeadDimVo + group_ * kColumns + 2 * (Lane() % 4);
      float* partial = p_.partial_o + first;
      u16* to = static_cast<u16*>(p_.o) + first;
#pragma unroll
      for (int j = 0; j < kOTiles; ++j) {
        const float left = o[j][2 * h] * o_scale;
        const float right = o[j][2 * h + 1] * o_scale;
        if (final) {
          *reinterpret_cast<u32*>(to + 8 * j) = E::Pack(left, right);
        } else {
          *reinterpret_cast<float2*>(partial + 8 * j) = make_float2(left, right);
        }
      }
    }
  }

  const AttentionParams& p_;
  Shared& shared_;
  const int group_;   // 0 or 1
  const int thread_;  // of the group
  Cursor cursor_;     // next step to be multiplied
  u32 q_parity_ = 0;
};

// --- kernel ---

template <class Traits>
using HopperMlaBody = HopperBody<Traits, HopperMlaShape<Traits>, HopperMlaProducer<Traits>,
                                 HopperMlaConsumer<Traits>>;

}  // namespace jax_attn
