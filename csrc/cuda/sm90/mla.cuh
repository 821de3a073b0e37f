// Multi-head latent attention on Hopper, for tiles of 64 rows: a producer warpgroup feeds wgmma.
//
// As in sm80/wide.cuh k has one head, v is the first columns of k, heads are rows of the tile, and
// blocks of heads count as kv heads. o of 64 rows and 512 columns fills the registers of two
// warpgroups: each consumer has all rows and half of the columns (FlashMLA's arrangement).
//
// kv steps have 64 tokens. In a pair of steps one consumer owns the first and the other the second:
// the owner computes logits and P. Both consumers multiply P of every step with their half of its
// values. So the owner hands over P, as register fragments for the same thread of the other
// consumer, and the running maxima, which go from step to step in order.
//
// Only one ring of two steps fits beside q. So it matters how soon the memory of a step is
// released, and how soon the rows that land there are multiplied. Therefore a step is divided into
// units by columns: each consumer's values, which that consumer releases by itself, and the columns
// beyond v, which are free after the logits. Logits are summed unit by unit, as the units land.
//
// The critical path from one step's P to the next step's P is: handing over, P V, Q K^T, the
// softmax. So the owner of a step starts its logits before it takes over P of the step before. It
// starts with the columns that land first: its own half, as the other half is released later. And P
// is handed over in halves of the step: the first half is multiplied while the second is
// exponentiated.
//
// Partial states lie in the workspace in the order of registers. If a tile has two items, the CTA
// that comes last adds the other's state to its own, which it still has in registers. More states
// are reduced in slices.
#pragma once

#include "cuda/common/logits.cuh"
#include "cuda/common/partials.cuh"
#include "cuda/sm90/mla_producer.cuh"
#include "cuda/sm90/tile_rows.cuh"

namespace jax_attn {

// Registers for a producer that keeps a step and its rows in them.
struct HopperMlaRoles : HopperRoles {
  static constexpr int kProducerRegisters = 56;
  static constexpr int kConsumerRegisters = 224;
};

template <class Traits>
struct HopperMlaShape : LatentShape<Traits> {
  using Base = LatentShape<Traits>;
  using Base::kBlocks, Base::kStep, Base::kValueBlocks;
  static constexpr int kSlots = 2;           // steps in the ring
  static constexpr bool kReadsOnce = false;  // other blocks of heads read the rows, too
  static_assert(Traits::kTileQ0 == 64 && Traits::kNumTiles == 1, "as select/cuda.cc has it");
  using Q = SwizzledTile<Traits::kHeadDimQk, 64>;
  using Ring = SwizzledTile<Traits::kHeadDimQk, kSlots * kStep>;
  static constexpr int kColumns = Traits::kHeadDimVo / 2;  // columns of o that a consumer has
  static_assert(kColumns % 64 == 0, "whole blocks of columns");

  // The consumer that owns the step at a step offset (LatentSteps). The order of a step's units
  // depends on it, and so do bits. Therefore it must not depend on anything else.
  __device__ static int Owner(int step_offset) { return step_offset / kStep % 2; }
  // Units of a step, in the order in which they are loaded and multiplied: the columns beyond v,
  // which are released first; the values of its owner; those of the other consumer.
  static constexpr int kUnits = 3, kBeyond = 0, kOwners = 1, kOthers = 2;
  __device__ static constexpr int NumBlocks(int unit) {
    return unit == kBeyond ? kBlocks - kValueBlocks : kValueBlocks / 2;
  }
  // The part of the ring, and its barrier, that a unit is in: 0 and 1 are the values of consumers 0
  // and 1, 2 is the columns beyond v.
  __device__ static constexpr int Part(int unit, int owner) {
    return unit == kBeyond ? 2 : (unit == kOwners) == (owner == 1);
  }
  __device__ static constexpr int FirstBlock(int part) { return part * (kValueBlocks / 2); }
  struct RingPosition {
    RingCursor<kSlots> cursor;
    int owner = 0;
    __device__ __forceinline__ void StartStep(int step_offset) { owner = Owner(step_offset); }
    __device__ int FirstBlock(int unit) const {
      return HopperMlaShape::FirstBlock(Part(unit, owner));
    }
    __device__ int Barrier(int unit) const { return cursor.slot * kUnits + Part(unit, owner); }
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
    // Data that the owner of a step hands over. A thread overwrites only what it has read itself.
    uint4 probabilities[kStep / 16][128];
    float2 running_maxima[128];
    u32 grows[4];  // whether a warp's running maxima changed in the step
    Barriers barriers;
    MergeScratch merge;
    bool timed_out;  // the wait for the other of two items ended without it
  };

  __device__ __forceinline__ static void Init(Shared& shared, i32* counters) {
    shared.merge.counters = counters;
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

// Loads q of an item, by 128 threads. Rows that do not exist are zeros.
template <class Traits>
__device__ __forceinline__ void LoadHopperMlaQ(const AttentionParams& p,
                                               typename HopperMlaShape<Traits>::Shared& shared,
                                               int index, int thread) {
  using Q = typename HopperMlaShape<Traits>::Q;
  constexpr int kRowsPerCopy = 4;  // eight lanes copy 128 bytes of a row
  const ItemRecord item(p, index);
  const RowMap<Traits::kGroupSize> map(p, item.first_token(), item.kv_head());
  const int lane = thread % kWarpSize, chunk = lane % 8, first = thread / kWarpSize * 16;
#pragma unroll 1
  for (int row = first + lane / 8; row < first + 16; row += kRowsPerCopy) {
    const bool valid = row < Traits::kGroupSize && map.QoHead(row) < p.num_qo_heads;
    const u16* from = static_cast<const u16*>(p.q) + chunk * 8;
    if (valid) from += map.Index(row) * Traits::kHeadDimQk;
    const u32 to = SharedAddress(shared.q) + row * 128 + (chunk ^ row % 8) * 16;
#pragma unroll
    for (int block = 0; block < Q::kBlocks; ++block) {
      CopyAsync16(to + block * Q::kBlockBytes, from + block * 64, valid);
    }
  }
  ArriveBarrierAfterCopies(SharedAddress(&shared.barriers.full_q));
}

template <class Traits>
class HopperMlaProducer {
 public:
  using Shape = HopperMlaShape<Traits>;
  using Shared = typename Shape::Shared;

  __device__ __forceinline__ HopperMlaProducer(const AttentionParams& p, Shared& shared)
      : p_(p), shared_(shared) {}

  // q of an item is copied ahead of its first step. A consumer loads the queue's first q, as it has
  // nothing else to do yet.
  __device__ __forceinline__ void Run(int begin, int end) {
    LatentSteps<Traits, Shape> steps(p_);
    steps.Start(begin, end);
    LatentRows<Traits, Shape> rows(p_, shared_);  // the layer is loaded beside the first page
    bool is_first_q = true;
    u32 q_parity = 0;
    while (steps.has_item()) {
      const bool has_step = steps.has_step();
      const int step_offset = steps.step_offset();
      const u32 row = has_step ? steps.Row() : kNoRow;
      if (has_step && steps.is_first()) {
        if (!is_first_q) {
          WaitBarrier(SharedAddress(&shared_.barriers.empty_q), q_parity);
          q_parity ^= 1;
          LoadHopperMlaQ<Traits>(p_, shared_, steps.index(), threadIdx.x);
        }
        is_first_q = false;
      }
      if (has_step) steps.PrefetchPages();
      steps.Next();
      if (has_step) rows.LoadStep(row, step_offset);
    }
  }

 private:
  const AttentionParams& p_;
  Shared& shared_;
};

// --- partial states ---

// A tile has one query token, so its rows belong to one merge group. This is where the consumers'
// registers of eight rows lie behind the first row of a state: chunks of 16 columns, each with four
// words a lane, in the layout of TileRows. Like RowStrips, with one chunk a strip.
template <class Traits>
struct HopperMlaStrips {
  static constexpr int kRows = Traits::kGroupSize, kDim = Traits::kHeadDimVo;
  static_assert(kRows > 32 && kRows <= 64, "one token a tile, as select/cuda.cc has it");
  static constexpr int kChunks = kDim / 16;
  int num_heads;  // the last block of heads may not be full

  __device__ __forceinline__ HopperMlaStrips(const AttentionParams& p, int kv_head)
      : num_heads(Min(kRows, p.num_qo_heads - kv_head * kRows)) {}

  // For the eight rows from `row` on: how many exist, words of a chunk of them, and the offset of
  // the lane's words.
  __device__ static int NumRows(int row) { return kRows % 8 == 0 ? 8 : Min(8, kRows - row); }
  __device__ static int ChunkWords(int row) { return NumRows(row) * 16; }
  __device__ static int InEight(int row, int chunk, int lane) {
    return chunk * ChunkWords(row) + lane * 4;
  }

  __device__ int Count(int) const { return CeilDiv(num_heads, 8) * kChunks; }
  __device__ static int Row(int strip, int lane) { return strip / kChunks * 8 + lane / 4; }
  __device__ static int At(int strip, int lane) {
    const int row = strip / kChunks * 8;
    return row * kDim + InEight(row, strip % kChunks, lane);
  }
  __device__ bool Has(int strip, int lane) const { return Row(strip, lane) < num_heads; }
  __device__ __forceinline__ void Store(const AttentionParams& p, const MergeGroup& group,
                                        int strip, int lane, PartialState& all) const {
    using E = Element<Traits::kDtype>;
    if (!Has(strip, lane)) return;
    const RowMap<kRows> map(p, group.qo_begin, group.kv_head);
    const int row = Row(strip, lane), chunk = strip % kChunks;
    const i64 at = map.Index(row);
    Scale(all.o,
          WriteState<Traits>(p, true, at, map.QoHead(row), chunk == 0 && lane % 4 == 0, all.row));
    u16* o = static_cast<u16*>(p.o) + at * kDim + chunk * 16 + lane % 4 * 2;
    *reinterpret_cast<u32*>(o) = E::Pack(all.o.x, all.o.y);
    *reinterpret_cast<u32*>(o + 8) = E::Pack(all.o.z, all.o.w);
  }
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
        group_(Uniform(threadIdx.x / 128) - 1),
        thread_(threadIdx.x % 128) {}

  __device__ __forceinline__ void Run(int begin, int end) {
    for (int index = Uniform(begin); index < QueueEnd(p_); ++index) RunItem(index);
  }

 private:
  static constexpr int kStep = Shape::kStep;
  static constexpr int kUnits = Shape::kUnits;
  static constexpr int kColumns = Shape::kColumns;
  static constexpr int kOTiles = kColumns / 8;
  static constexpr int kBoth = HopperRoles::kConsumerThreads;
  // Named barriers: a half of P that consumer 0 or 1 hands over is there.
  static constexpr int kHandOver[2] = {1, 6};
  using StepLogits = float[kStep / 8][4];
  // One half of a step.
  static constexpr int kHalf = kStep / 2;
  using Probabilities = u32[kHalf / 16][4];
  using Output = float[kOTiles][4];
  using Cursor = RingCursor<Shape::kSlots>;

  // The tokens that all rows of an item see. They are rows of one query token, so they see the
  // same.
  struct SeenByAll {
    int begin, end;
    __device__ __forceinline__ SeenByAll(const AttentionParams& p, const ItemRecord& item) {
      const VisibleSpan span = SpanOfItem<Traits>(p, item);
      begin = span.all_begin;
      end = span.all_end;
    }
    __device__ bool Has(int pos) const { return pos >= begin && pos + kStep <= end; }
  };

  __device__ int Lane() const { return thread_ % kWarpSize; }
  __device__ int Warp() const { return thread_ / kWarpSize; }
  // Moves a descriptor in uniform registers, where wgmma needs it, instead of four moves a product.
  __device__ static u64 UniformDescriptor(u64 x) {
    return (x & 0xffffffff00000000ull) | static_cast<u32>(Uniform(static_cast<int>(x)));
  }

  // --- ring ---

  __device__ __forceinline__ void WaitFull(const Cursor& cursor, int part) const {
    WaitBarrier(SharedAddress(shared_.barriers.full + cursor.slot * kUnits + part), cursor.parity);
    FenceSharedForWgmma();
  }
  // One arrival a warp: other warps may still read.
  __device__ __forceinline__ void Release(const Cursor& cursor, int part) const {
    __syncwarp();
    if (Lane() == 0) {
      ArriveBarrier(SharedAddress(shared_.barriers.empty + cursor.slot * kUnits + part));
    }
  }
  __device__ __forceinline__ void ReleaseQ() const {
    __syncwarp();
    if (Lane() == 0) ArriveBarrier(SharedAddress(&shared_.barriers.empty_q));
  }

  // --- products ---

  // Adds Q K^T over the columns of a unit of the consumer's own step, once they have landed.
  template <int kUnit>
  __device__ __forceinline__ void StartQk(const Cursor& cursor, StepLogits& s) const {
    if constexpr (Shape::NumBlocks(kUnit) > 0) {
      const int part = Shape::Part(kUnit, group_), block = Shape::FirstBlock(part);
      const u64 q = UniformDescriptor(
          Q::Descriptor(Opaque(SharedAddress(shared_.q)) + block * Q::kBlockBytes, 0));
      const u64 k = UniformDescriptor(Ring::Descriptor(
          Opaque(SharedAddress(shared_.ring)) + block * Ring::kBlockBytes, cursor.slot * kStep));
      WaitFull(cursor, part);
      WgmmaFence();
#pragma unroll
      for (int kk = 0; kk < 4 * Shape::NumBlocks(kUnit); ++kk) {
        Wgmma<kStep, Traits::kDtype>::SharedA(s, Q::AlongK(q, kk), Ring::AlongK(k, kk), true);
      }
    }
  }

  // Adds P V of half of a step to o, in the consumer's columns.
  template <int kPart>
  __device__ __forceinline__ void StartPv(const Cursor& cursor, Probabilities& p, Output& o) const {
    const u32 half = SharedAddress(shared_.ring) + group_ * (kColumns / 64) * Ring::kBlockBytes;
    const u64 v = Ring::TransposedDescriptor(Opaque(half), cursor.slot * kStep + kPart * kHalf);
    PinRegisters(p);
    if (kPart == 0) PinRegisters(o);
    WgmmaFence();
#pragma unroll
    for (int kk = 0; kk < kHalf / 16; ++kk) {
      Wgmma<kColumns, Traits::kDtype>::RegistersATransposedB(o, p[kk], Ring::AlongRows(v, kk),
                                                             true);
    }
  }

  // --- handing over ---

  // Hands over half of P. The first half also carries the running maxima. grows: whether those of
  // the warp's rows changed in this step.
  template <int kPart>
  __device__ __forceinline__ void HandOver(const Rows& rows, bool grows, const Probabilities& p) {
#pragma unroll
    for (int kk = 0; kk < kHalf / 16; ++kk) {
      shared_.probabilities[kPart * (kHalf / 16) + kk][thread_] =
          make_uint4(p[kk][0], p[kk][1], p[kk][2], p[kk][3]);
    }
    if (kPart == 0) {
      if (grows) shared_.running_maxima[thread_] = make_float2(rows.MaxLog4(0), rows.MaxLog4(1));
      shared_.grows[Warp()] = grows;  // the same in all lanes
    }
    ArriveNamed(kHandOver[kPart] + group_, kBoth);
  }
  template <int kPart>
  __device__ __forceinline__ void TakeOver(Probabilities& p) const {
    SyncNamed(kHandOver[kPart] + 1 - group_, kBoth);
#pragma unroll
    for (int kk = 0; kk < kHalf / 16; ++kk) {
      const uint4 x = shared_.probabilities[kPart * (kHalf / 16) + kk][thread_];
      p[kk][0] = x.x;
      p[kk][1] = x.y;
      p[kk][2] = x.z;
      p[kk][3] = x.w;
    }
  }
  // Takes the new running maxima after the first half was taken over, and rescales o, which no
  // product in flight may use. This is rare.
  __device__ __forceinline__ void FollowRunningMax(Rows& rows, Output& o) const {
    if (shared_.grows[Warp()] == 0) return;
    const float2 running_maxima = shared_.running_maxima[thread_];
    rows.Follow(running_maxima.x, running_maxima.y);
    rows.Rescale(o);
  }
  // Issues P V of the other consumer's step, half by half, as its owner hands P over.
  __device__ __forceinline__ void TakeOverAndStartPv(const Cursor& other, Rows& rows,
                                                     Probabilities (&p)[2], Output& o) const {
    WaitFull(other, group_);  // the owner waited for K before it handed over
    TakeOver<0>(p[0]);
    FollowRunningMax(rows, o);
    StartPv<0>(other, p[0], o);
    TakeOver<1>(p[1]);
    StartPv<1>(other, p[1], o);
    WgmmaCommit();
  }

  // --- probabilities of the own step ---

  // P of half of a step. The second half continues the sums of the first.
  template <int kPart>
  __device__ __forceinline__ void Exponentiate(Rows& rows, StepLogits& s, float (&odd)[2]) const {
    const float scale = rows.Scale();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float running_max = rows.running_max[h];
      float sums[2] = {rows.sum[h], kPart == 0 ? 0.0f : odd[h]};
#pragma unroll
      for (int j = kPart * (kHalf / 8); j < (kPart + 1) * (kHalf / 8); ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          s[j][2 * h + c] = Exp2(fmaf(s[j][2 * h + c], scale, -running_max));
          sums[c] += s[j][2 * h + c];
        }
      }
      rows.sum[h] = kPart == 0 ? sums[0] : sums[0] + sums[1];
      odd[h] = sums[1];
    }
  }
  template <int kPart>
  __device__ __forceinline__ void Pack(const StepLogits& s, Probabilities& p) const {
#pragma unroll
    for (int j = 0; j < kHalf / 8; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float (&x)[4] = s[kPart * (kHalf / 8) + j];
        p[j / 2][j % 2 * 2 + h] = E::Pack(x[2 * h], x[2 * h + 1]);
      }
    }
  }

  // --- one item ---

  __device__ __forceinline__ void RunItem(int index) {
    RecordBegin<Traits>(p_, index, HopperConsumers::thread());
    const ItemRecord item(p_, index);
    Rows rows(p_, index, 0, thread_, -Infinity());
    Output o;
#pragma unroll
    for (int j = 0; j < kOTiles; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) o[j][c] = 0.0f;
    }
    const int begin = Uniform(FirstStep<kStep>(item)), end = Uniform(item.kv_end());
    const bool has_steps = begin < end;
    if (has_steps && num_q_ == 0 && group_ == 0) {
      LoadHopperMlaQ<Traits>(p_, shared_, index, thread_);
    }
    const bool is_split = item.num_groups() > 0;
    if (is_split) {
      HopperConsumers::Sync();  // what was kept of the item before is not needed any more
      if (HopperConsumers::thread() < kWarpSize) {
        KeepGroup(p_, item.merge_idx(), Lane(), shared_.merge);
        __syncwarp();
      }
    }
    if (has_steps) {
      WaitBarrier(SharedAddress(&shared_.barriers.full_q), num_q_++ % 2);
      RunSteps(index, begin, end, rows, o);
    }
    const int came_before = is_split ? AnnounceArrival(item.merge_idx()) : 0;
    rows.FinishSums();
    AddSums(rows);
    int is_final = 1;
    if (is_split) {
      const int own_row = item.partial_row();
      const bool is_last = Arrive(item.merge_idx(), came_before, own_row, rows, o);
      is_final = is_last && shared_.merge.group.num_partials == 2;
      if (is_final) AddOther(own_row, rows, o);
    }
    if (Opaque(is_final) != 0)
      Write(ItemRecord(p_, index), rows, o);  // Opaque: one copy of the code
    if (is_split && shared_.merge.group.num_partials > 2) {
      HelpReduce(index, ItemRecord(p_, index).merge_idx());
    }
    RecordEnd<Traits>(p_, index, HopperConsumers::thread());
  }

  // Runs a step that this consumer owns. kFollows: and the other consumer's step before it.
  template <bool kFollows>
  __device__ __forceinline__ void RunOwn(const SeenByAll& seen, KvStep<Traits> step, bool is_last,
                                         Rows& rows, Output& o) {
    const Cursor other = cursor_;
    if (kFollows) cursor_.Advance();
    const Cursor own = cursor_;
    cursor_.Advance();
    StepLogits s = {};
    Probabilities p[2];
    PinRegisters(s);
    StartQk<Shape::kBeyond>(own, s);
    StartQk<Shape::kOwners>(own, s);
    WgmmaCommit();
    WgmmaWait<0>();
    PinRegisters(s);
    if (Shape::NumBlocks(Shape::kBeyond) > 0) Release(own, Shape::Part(Shape::kBeyond, group_));
    if (kFollows) TakeOverAndStartPv(other, rows, p, o);
    StartQk<Shape::kOthers>(own, s);
    WgmmaCommit();
    if (kFollows) {
      WgmmaWait<1>();
      PinRegisters(o);
      Release(other, group_);
    }
    WgmmaWait<0>();
    PinRegisters(s);
    // Nearly always no row needs a mask or another running max.
    bool plain = false, grows = false;
    if constexpr (LogitStage<Traits>::kScalesLater && !Traits::Variant::kHasMask)
      plain = seen.Has(step.begin()) & !rows.AnyGrows(s);
    float odd_sums[2];
    if (plain) {
      Exponentiate<0>(rows, s, odd_sums);
    } else {
      rows.MakeLogits(step, s);
      grows = rows.ExponentiateByMaxima(s);
    }
    Pack<0>(s, p[0]);
    HandOver<0>(rows, grows, p[0]);
    if (grows) rows.Rescale(o);
    StartPv<0>(own, p[0], o);
    if (is_last) ReleaseQ();
    if (plain) Exponentiate<1>(rows, s, odd_sums);
    Pack<1>(s, p[1]);
    HandOver<1>(rows, grows, p[1]);
    StartPv<1>(own, p[1], o);
    WgmmaCommit();
    WgmmaWait<0>();
    PinRegisters(o);
    Release(own, group_);
  }
  __device__ __forceinline__ void RunOther(Rows& rows, Output& o) {
    Probabilities p[2];
    TakeOverAndStartPv(cursor_, rows, p, o);
    WgmmaWait<0>();
    PinRegisters(o);
    Release(cursor_, group_);
    cursor_.Advance();
  }

  __device__ __forceinline__ void RunSteps(int index, int begin, int end, Rows& rows, Output& o) {
    const SeenByAll seen(p_, ItemRecord(p_, index));
    int pos = begin;
    const auto step_at = [&](int offset) { return KvStep<Traits>(p_, offset, end); };
    if (Shape::Owner(Traits::kHasSteps ? 0 : begin) == group_) {
      RunOwn<false>(seen, step_at(pos), pos + 2 * kStep >= end, rows, o);
      pos += kStep;
    } else if (begin + kStep >= end) {
      ReleaseQ();  // this consumer owns no step
    }
#pragma unroll 1
    for (; pos + kStep < end; pos += 2 * kStep) {
      RunOwn<true>(seen, step_at(pos + kStep), pos + 3 * kStep >= end, rows, o);
    }
    if (pos < end) RunOther(rows, o);
  }

  // --- results ---

  // Adds the sums of P of both consumers, each of which summed its own steps.
  __device__ __forceinline__ void AddSums(Rows& rows) {
    float2(*sums)[128] = reinterpret_cast<float2(*)[128]>(shared_.probabilities);
    HopperConsumers::Sync();  // P has been taken over everywhere
    sums[group_][thread_] = make_float2(rows.sum[0], rows.sum[1]);
    HopperConsumers::Sync();
    // in the same order for both
    const float2 a = sums[0][thread_], b = sums[1][thread_];
    rows.sum[0] = a.x + b.x;
    rows.sum[1] = a.y + b.y;
    HopperConsumers::Sync();  // before the next item's P is handed over
  }

  // Final rows: a row's four lanes store 64 neighbouring bytes at a time. With 16 bytes, half a
  // sector, it took as long as three steps (profiled, H200).
  __device__ __forceinline__ void Write(const ItemRecord& item, const Rows& rows,
                                        const Output& o) const {
    const RowMap<Traits::kGroupSize> map(p_, item.first_token(), item.kv_head());
    const int column = Lane() % 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = RowOf(h);
      const bool exists = row < Traits::kGroupSize && map.QoHead(row) < p_.num_qo_heads;
      float o_scale = 0.0f;
      i64 at = 0;
      if (exists) {
        at = map.Index(row);
        o_scale = WriteState<Traits>(p_, true, at, map.QoHead(row), group_ == 0 && column == 0,
                                     rows.state(h));
      }
      uint4* to = reinterpret_cast<uint4*>(static_cast<u16*>(p_.o) + at * Traits::kHeadDimVo +
                                           group_ * kColumns) +
                  column;
#pragma unroll
      for (int j = 0; j < kOTiles; j += 4) {
        u32 x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          x[i] = E::Pack(o[j + i][2 * h] * o_scale, o[j + i][2 * h + 1] * o_scale);
        }
        const uint4 tile = TransposeQuad(x, Lane());
        if (exists) to[j] = tile;
      }
    }
  }

  using Strips = HopperMlaStrips<Traits>;
  static constexpr int kChunks = kColumns / 16;

  __device__ int RowOf(int h) const { return Warp() * 16 + 8 * h + Lane() / 4; }
  // The lane's words of row h in the state that begins at `partial_row`. ChunkWords(h): from there
  // to the same words of the next chunk.
  __device__ float* PartialWords(i64 partial_row, int h) const {
    return p_.partial_o + (partial_row + Warp() * 16) * Traits::kHeadDimVo +
           h * (8 * Traits::kHeadDimVo) +
           Strips::InEight(Warp() * 16 + 8 * h, group_ * kChunks, Lane());
  }
  __device__ int ChunkWords(int h) const { return Strips::ChunkWords(Warp() * 16 + 8 * h); }

  __device__ __forceinline__ void WritePartial(int partial_row, const Rows& rows,
                                               const Output& o) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (RowOf(h) >= Traits::kGroupSize) continue;
      if (group_ == 0 && Lane() % 4 == 0) {
        p_.partial_states[partial_row + RowOf(h)] = rows.state(h);
      }
      float* to = PartialWords(partial_row, h);
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        const float (&a)[4] = o[2 * i], (&b)[4] = o[2 * i + 1];
        *reinterpret_cast<float4*>(to + i * ChunkWords(h)) =
            make_float4(a[2 * h], a[2 * h + 1], b[2 * h], b[2 * h + 1]);
      }
    }
  }

  // If a tile has two items, the CTA that comes first writes its state, and the other one waits
  // until it is there. The wait is short, as the state is being written, and the other CTA writes
  // none. Returns to the first thread how many came before. The counter grows by one again when the
  // state is there.
  __device__ __forceinline__ int AnnounceArrival(int merge_idx) const {
    if (HopperConsumers::thread() > 0 || shared_.merge.group.num_partials != 2) return 0;
    return AddRelaxed(shared_.merge.counters + merge_idx, 1);
  }
  // Leaves the item's state to the CTA that comes last in its merge group. Returns whether that is
  // this CTA.
  __device__ __forceinline__ bool Arrive(int merge_idx, int came_before, int own_row, Rows& rows,
                                         const Output& o) {
    MergeScratch& merge = shared_.merge;
    const bool is_first_thread = HopperConsumers::thread() == 0;
    const bool are_two = merge.group.num_partials == 2;
    i32* counter = merge.counters + merge_idx;
    if (are_two) {
      if (is_first_thread) {
        merge.completed[0] = came_before > 0;
        int naps = 0;
        if (came_before > 0) {
          while (LoadAcquire(counter) < 3 && ++naps < kMostNaps) Nap();
        }
        shared_.timed_out = naps == kMostNaps;
      }
      HopperConsumers::Sync();
      if (merge.completed[0] != 0) {
        if (shared_.timed_out) rows.sum[0] = rows.sum[1] = __int_as_float(0x7fffffff);
        return true;
      }
    }
    WritePartial(own_row, rows, o);
    HopperConsumers::Sync();
    if (is_first_thread) {
      const int arrival = AddAcquireRelease(counter, 1);
      merge.completed[0] = !are_two && arrival == merge.group.num_partials - 1;
    }
    HopperConsumers::Sync();
    return merge.completed[0] != 0;
  }

  // Both products are rounded before they are added, so it does not matter which CTA adds.
  __device__ static float Add(float own_weight, float own, float other_weight, float other) {
    return fmaf(own_weight, own, 0.0f) + fmaf(other_weight, other, 0.0f);
  }
  // Adds the state of the other one of two items to the own state.
  __device__ __forceinline__ void AddOther(int own_row, Rows& rows, Output& o) const {
    const i32(&partial_rows)[MergeScratch::kMaxKept] = shared_.merge.partial_rows;
    const int other_row = partial_rows[0] == own_row ? partial_rows[1] : partial_rows[0];
    RowState states[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      states[h] = LoadCoherentIf(RowOf(h) < Traits::kGroupSize,
                                 p_.partial_states + other_row + RowOf(h), {-Infinity(), 0.0f});
    }
    constexpr int kAhead = 16, kAll = 2 * kChunks;  // loads in flight, as many as there are
                                                    // registers for
    float4 others[kAhead];
    const float* from = nullptr;
    auto load = [&](int n) {
      const int h = n / kChunks, i = n % kChunks;
      if (i == 0) from = PartialWords(Opaque(other_row), h);
      others[n % kAhead] =
          LoadCoherent16If(RowOf(h) < Traits::kGroupSize, from + i * ChunkWords(h));
    };
#pragma unroll
    for (int n = 0; n < kAhead; ++n) load(n);
    float own_weight[2], other_weight[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const RowState own = rows.state(h);
      const float max_log4 = fmaxf(own.max_log4, states[h].max_log4);
      own_weight[h] = StateWeight(own.max_log4, max_log4);
      other_weight[h] = StateWeight(states[h].max_log4, max_log4);
      rows.SetMax(h, max_log4);
      rows.sum[h] = Add(own_weight[h], own.sum, other_weight[h], states[h].sum);
    }
    auto add = [&](int h, float own, float other) {
      return Add(own_weight[h], own, other_weight[h], other);
    };
#pragma unroll
    for (int n = 0; n < kAll; ++n) {
      const int h = n / kChunks, i = n % kChunks;
      const float4 x = others[n % kAhead];
      if (n + kAhead < kAll) load(n + kAhead);
      float (&a)[4] = o[2 * i], (&b)[4] = o[2 * i + 1];
      a[2 * h] = add(h, a[2 * h], x.x);
      a[2 * h + 1] = add(h, a[2 * h + 1], x.y);
      b[2 * h] = add(h, b[2 * h], x.z);
      b[2 * h + 1] = add(h, b[2 * h + 1], x.w);
    }
  }

  __device__ __forceinline__ void HelpReduce(int index, int merge_idx) {
    MergeScratch& merge = shared_.merge;
    const bool completed = merge.completed[0] != 0;
    if (completed || index + 1 == QueueEnd(p_)) {
      ReduceSlices<Traits, HopperConsumers, Strips>(p_, merge_idx, completed, true, merge);
    }
  }

  const AttentionParams& p_;
  Shared& shared_;
  const int group_;   // 0 or 1
  const int thread_;  // within the consumer
  Cursor cursor_;     // next step to be multiplied
  u32 num_q_ = 0;     // q that were waited for
};

// --- kernel ---

template <class Traits>
using HopperMlaBody =
    HopperBody<Traits, HopperMlaShape<Traits>,
               HopperTeams<HopperMlaProducer<Traits>, HopperMlaConsumer<Traits>, HopperMlaRoles>>;

}  // namespace jax_attn
