// What the roles of the backward pass on sm_90a share (backward.cuh): units of work, which keys and
// tiles see each other, shared memory.
#pragma once

#include "cuda/any/backward_index.cuh"
#include "cuda/sm90/pipeline.cuh"

namespace jax_attn {

// The owner's keys that a request reads, in all of the owner's blocks.
struct HopperBackwardSpan {
  int key_begin, key_end;
};
struct HopperBackwardNoSpan {};

// A unit, as the producer hands it out. With pages: one part for each request that reads the unit's
// keys, and behind them a part without tiles, with the owner and all of its keys; there the results
// are complete.
template <class Traits>
struct HopperBackwardUnit
    : Conditional<(Traits::kPageSize > 0), HopperBackwardSpan, HopperBackwardNoSpan>::Type {
  BackwardSource source;
  int kv_head;
  int block;  // block of keys; -1: there are no more units
  // The request's tiles of query tokens that see the block, and the request's first tile.
  int tile_begin, tile_end, first_tile;
  // Whether tiles come in descending order, and blocks of keys add to a tile in ascending order.
  // True for one head, the last one of a ragged causal batch: otherwise its longest units, those of
  // the first blocks, would run last, and most CTAs would wait for them.
  bool is_mirrored;

  static constexpr bool kMirrors =
      Traits::kPageSize == 0 && Traits::kHasWindowRight && !Traits::kHasWindowLeft;
  // The tile that comes at place i, in [tile_begin, tile_end).
  __device__ __forceinline__ int TileAt(int i) const {
    return kMirrors && is_mirrored ? tile_begin + tile_end - 1 - i : i;
  }
};

// Which keys and which tiles of query tokens see each other. Both directions must agree: a tile
// counts its progress by it.
template <class Traits>
struct HopperBackwardPairs {
  static constexpr int kKeys = HopperBackwardKeys(Traits::kHeadDimQk, Traits::kHeadDimVo);
  static constexpr int kRows = HopperBackwardRows(Traits::kHeadDimQk, Traits::kHeadDimVo);
  static constexpr int kFar = 1 << 30;
  struct Range {
    int begin, end;
  };
  const AttentionParams& p;
  const BackwardSource& source;

  __device__ __forceinline__ i64 Left() const { return Min(p.window_left, kFar); }
  __device__ __forceinline__ i64 Right() const { return Min(p.window_right, kFar); }

  __device__ __forceinline__ Range TilesOf(int block) const {
    return TilesOf(block * kKeys, Min(block * kKeys + kKeys, source.kv_len));
  }
  // The same for keys [first_key, end_key), one or more.
  __device__ __forceinline__ Range TilesOf(int first_key, int end_key) const {
    const int last_key = end_key - 1;
    int begin = 0, end = source.qo_len;
    if constexpr (Traits::kHasWindowRight) {
      begin = Clamp(static_cast<i64>(first_key) - Right() - source.q_begin, 0, source.qo_len);
    }
    if constexpr (Traits::kHasWindowLeft) {
      end = Clamp(last_key + Left() + 1 - source.q_begin, 0, source.qo_len);
    }
    if (begin >= end) return {0, 0};
    return {begin / kRows, CeilDiv(end, kRows)};
  }
  __device__ __forceinline__ Range BlocksOf(int tile) const {
    const Range keys = KeysOf(tile);
    return {keys.begin / kKeys, CeilDiv(keys.end, kKeys)};
  }
  __device__ __forceinline__ Range KeysOf(int tile) const {
    const int last_token = Min(tile * kRows + kRows, source.qo_len) - 1;
    int begin = 0, end = source.kv_len;
    if constexpr (Traits::kHasWindowLeft) {
      begin = Clamp(static_cast<i64>(source.q_begin) + tile * kRows - Left(), 0, source.kv_len);
    }
    if constexpr (Traits::kHasWindowRight) {
      end = Clamp(static_cast<i64>(source.q_begin) + last_token + Right() + 1, 0, source.kv_len);
    }
    if (begin >= end) return {0, 0};
    return {begin, end};
  }
};

template <class Traits>
struct HopperBackwardShape {
  static constexpr int kQkDim = Traits::kHeadDimQk, kVoDim = Traits::kHeadDimVo;
  static_assert(kQkDim <= 256 && kVoDim <= 256);
  static constexpr bool kIsWide = IsHopperBackwardWide(kQkDim, kVoDim);
  static constexpr int kKeys = HopperBackwardPairs<Traits>::kKeys;
  static constexpr int kRows = HopperBackwardPairs<Traits>::kRows;
  static constexpr int kColumns = HopperBackwardColumns(kQkDim, kVoDim);
  using K = SwizzledTile<kColumns, kKeys>;
  using V = SwizzledTile<kVoDim, kKeys>;
  using Q = SwizzledTile<kColumns, kRows>;
  using O = SwizzledTile<kVoDim, kRows>;  // of d_o
  using S = SwizzledTile<kRows, kKeys>;   // of dS^T
  // Columns of dk and dv in registers.
  static constexpr int SumColumns(int dim) {
    return dim <= 128 ? CeilDiv(dim, 16) * 16 : CeilDiv(dim, 64) * 64;
  }
  static constexpr int kQkSums = SumColumns(kQkDim), kVoSums = SumColumns(kVoDim);

  static constexpr int kSumWords = kRows * kColumns;  // f32 words of a tile's dq
  static constexpr int kBlockWords = 64 * 64;         // of 64 rows by 64 columns of it
  static constexpr int kNumBlocks = kSumWords / kBlockWords;
  // Blocks of a tile's dq that consumers 0 and 1 compute. Consumer 0 has the first ones.
  static constexpr int kBlocks0 = CeilDiv(kNumBlocks, 2), kBlocks1 = kNumBlocks - kBlocks0;

  // Tiles of q and of d_o. Two of each fit up to six blocks of 64 columns.
  static constexpr int kSlots = 2;
  static constexpr int kOSlots = K::kBlocks + V::kBlocks > 6 ? 1 : 2;
  static constexpr int kUnits = 2;
  static constexpr int kConsumerWarps = 8;
  static constexpr int kWriters = 2;
  // Whether the product for dk runs into the next step. Like kSumsLater, it needs registers.
  static constexpr bool kCarries = kRows == 64 && !kIsWide && Traits::kPageSize > 0 &&
                                   !Traits::kHasSoftCap && !Traits::kHasWindowLeft;
  // Whether dq of a step is computed in the next step, behind its dS^T, beside dv and dk. Otherwise
  // in the same step, behind a barrier of all consumers, ahead of dk.
  static constexpr bool kSumsLater = kRows == 64 && !kIsWide && !kCarries;

  struct Barriers {
    u64 full_kv, empty_kv;
    u64 full[kSlots], empty[kSlots];  // of q and d_o; of wide heads only of q
    u64 full_slopes[2];
    // Sums of dq. Wide heads: full_sums has one for each writer and consumer, empty_sums one for
    // each consumer. Others: both have one for each buffer.
    u64 full_sums[kIsWide ? 2 * kWriters : 2], empty_sums[2];
    u64 full_unit[kUnits], empty_unit[kUnits];
  };
  struct WideBarriers {
    u64 full_o[kOSlots], empty_o[kOSlots];
    u64 full_weights, empty_weights;
  };
  // What consumer 0 hands to consumer 1, in the order of registers.
  struct WideShared {
    alignas(1024) float weights[kKeys * kRows];
    WideBarriers wide_barriers;
  };
  struct NoWideShared {};
  struct alignas(1024) Shared {
    unsigned char k[K::kBytes], v[V::kBytes];
    unsigned char q[kSlots][Q::kBytes], d_o[kOSlots][O::kBytes];
    unsigned char d_s[2][S::kBytes];
    // What leaves at once: a tile of two, or a block of each of two consumers.
    float sums[2][kIsWide ? kBlockWords : kSumWords];
    float lse_log2[kSlots][kRows];  // inf: the row does not count
    float d[kOSlots][kRows];
    HopperBackwardUnit<Traits> units[kUnits];
    Barriers barriers;
    typename Conditional<kIsWide, WideShared, NoWideShared>::Type wide;
  };

  __device__ __forceinline__ static void Init(Shared& shared) {
    Barriers& b = shared.barriers;
    // Each lane of the producer arrives twice: for its copies, and for what it stored.
    InitBarrier(SharedAddress(&b.full_kv), 2 * kWarpSize);
    InitBarrier(SharedAddress(&b.empty_kv), kConsumerWarps);
    for (int i = 0; i < kSlots; ++i) {
      InitBarrier(SharedAddress(b.full + i), 2 * kWarpSize);
      InitBarrier(SharedAddress(b.empty + i), kConsumerWarps);
    }
    constexpr int kOneConsumer = kConsumerWarps / 2;
    for (int i = 0; i < 2; ++i) {
      InitBarrier(SharedAddress(b.full_slopes + i), kIsWide ? kOneConsumer : kConsumerWarps);
      InitBarrier(SharedAddress(b.empty_sums + i), 1);
    }
    for (u64& full : b.full_sums) {
      InitBarrier(SharedAddress(&full), kIsWide ? kOneConsumer : kConsumerWarps);
    }
    for (int i = 0; i < kUnits; ++i) {
      InitBarrier(SharedAddress(b.full_unit + i), 1);
      InitBarrier(SharedAddress(b.empty_unit + i), kConsumerWarps + kWriters);
    }
    if constexpr (kIsWide) {
      WideBarriers& wide = shared.wide.wide_barriers;
      for (int i = 0; i < kOSlots; ++i) {
        InitBarrier(SharedAddress(wide.full_o + i), 2 * kWarpSize);
        InitBarrier(SharedAddress(wide.empty_o + i), kConsumerWarps);
      }
      InitBarrier(SharedAddress(&wide.full_weights), kOneConsumer);
      InitBarrier(SharedAddress(&wide.empty_weights), kOneConsumer);
    }
  }
};

// The base of producer, consumers and the writers of sums: their walk through the units.
template <class Traits>
class HopperBackwardRole {
 public:
  using Shape = HopperBackwardShape<Traits>;
  using Shared = typename Shape::Shared;
  using Pairs = HopperBackwardPairs<Traits>;
  using Unit = HopperBackwardUnit<Traits>;
  static constexpr int kGroup = Traits::kGroupSize;
  static constexpr int kQkDim = Shape::kQkDim, kVoDim = Shape::kVoDim;
  static constexpr int kRows = Shape::kRows, kKeys = Shape::kKeys;
  static constexpr int kPage = Traits::kPageSize;

  __device__ __forceinline__ HopperBackwardRole(const BackwardCudaParams& p, Shared& shared)
      : p_(p), f_(p.forward), shared_(shared) {}

 protected:
  __device__ typename Shape::Barriers& Barriers() const { return shared_.barriers; }
  __device__ auto& WideBarriers() const { return shared_.wide.wide_barriers; }
  // The next unit. It stays until the caller passes it.
  __device__ __forceinline__ const Unit& WaitForUnit() const {
    WaitBarrier(SharedAddress(Barriers().full_unit + unit_.slot), unit_.parity);
    return shared_.units[unit_.slot];
  }
  __device__ __forceinline__ void PassUnit() {
    ArriveBarrier(SharedAddress(Barriers().empty_unit + unit_.slot));
    unit_.Advance();
  }
  // The previous position in a ring of two.
  __device__ __forceinline__ static RingCursor<2> Before(const RingCursor<2>& at) {
    return {at.slot ^ 1, at.parity ^ static_cast<u32>(at.slot ^ 1)};
  }
  // Index of a tile of a query head in [max_tiles, num_qo_heads].
  __device__ __forceinline__ i64 TileAt(const Unit& unit, int tile, int g) const {
    return static_cast<i64>(unit.first_tile + tile) * f_.num_qo_heads + unit.kv_head * kGroup + g;
  }
  // Whether TMA can copy rows [row, row + num) of `len`: all of them exist.
  __device__ __forceinline__ bool FitsTma(int row, int num, int len) const {
    return f_.has_tensor_maps != 0 && row + num <= len;
  }

  const BackwardCudaParams& p_;
  const AttentionParams& f_;
  Shared& shared_;
  RingCursor<Shape::kUnits> unit_;
  RingCursor<Shape::kSlots> slot_;
  RingCursor<Shape::kOSlots> o_slot_;  // of wide heads; else slot_ is
  RingCursor<1> kv_;
};

}  // namespace jax_attn
