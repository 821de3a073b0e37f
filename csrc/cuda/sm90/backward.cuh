// The backward pass on sm_90a: wgmma, TMA, one pass of five products. It takes 16-bit elements and
// head_dim_qk = head_dim_vo of 64 or 128. sm80/backward.cuh has the formulas and does everything
// else.
//
// A unit of work is a block of 128 keys of a kv head, for which it writes dk and dv. Tiles of query
// tokens of each query head of the group stream by:
//   S^T = k q^T    dP^T = v d_o^T    dv += P^T d_o    dk += dS^T q    dq = dS k
// In the first four products each of two consumers has 64 keys. P^T and dS^T are operand a from
// registers. dS^T also goes to shared memory, for dq, of which each consumer computes half: half of
// the columns (head_dim 128) or half of the rows (64).
//
// Where registers allow it, dq is that of the step before (kSumsLater): its products need no
// barrier then, and run while dS^T is computed.
//
// dq leaves through shared memory: bulk copies add it to f32 sums in global memory. Blocks of keys
// add to a tile one after the other, the last block first, so the order of the sums is fixed. Units
// are numbered in this order and taken in the order of numbers. So a unit that another one waits
// for is already running, whatever the grid, and there is no deadlock. A causal block begins at its
// diagonal, where the blocks behind it have been before, so it rarely waits.
//
// Pages that several requests read belong to the first of them (BackwardIndex). A block of its own
// keys goes through all requests that read some of them, the owner first, in their order. A block
// in which its own keys begin is a unit of each owner. dk and dv stay in registers meanwhile. Units
// of the first request come first, so owners add to a tile in their order, and the blocks of each
// as above. A tile counts the keys that have added to it, not the blocks, so no owners need to be
// counted.
//
// A value that is not finite makes a result that is not finite. Then needs_portable is set, and the
// portable kernel, which handles such values, computes everything again. It also does so if shared
// pages are no prefixes, which is known before this kernel begins.
#pragma once

#include "cuda/any/backward_index.cuh"
#include "cuda/common/variant.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/tile_rows.cuh"

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
};

// Which keys and which tiles of query tokens see each other. Both directions must agree: a tile
// counts its progress by it.
template <class Traits>
struct HopperBackwardPairs {
  static constexpr int kKeys = kHopperBackwardKeys;
  static constexpr int kRows = HopperBackwardRows(Traits::kHeadDimQk);
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
  static_assert(Traits::kHeadDimQk == Traits::kHeadDimVo);
  static constexpr int kDim = Traits::kHeadDimQk;
  static_assert(kDim == 64 || kDim == 128);
  static constexpr int kKeys = HopperBackwardPairs<Traits>::kKeys;
  static constexpr int kRows = HopperBackwardPairs<Traits>::kRows;
  static constexpr int kSlots = 2, kUnits = 2;
  static constexpr int kSumWords = kRows * kDim;  // f32 words of a tile's dq
  static constexpr int kConsumerWarps = 8;
  static constexpr bool kIsWide = kDim == 128 && !Traits::kHasSoftCap && !Traits::kHasWindowLeft;
  // Whether the product for dk runs into the next step. Where registers allow it, as kSumsLater.
  static constexpr bool kCarries = kIsWide && Traits::kPageSize > 0;
  // Whether dq of a step is computed in the next step, behind its dS^T, beside dv and dk. Otherwise
  // in the same step, behind a barrier of all consumers, ahead of dk.
  static constexpr bool kSumsLater = kDim == 128 && !kCarries;
  static constexpr int kWriters = 2;
  using K = SwizzledTile<kDim, kKeys>;   // of k and v
  using Q = SwizzledTile<kDim, kRows>;   // of q and d_o
  using S = SwizzledTile<kRows, kKeys>;  // of dS^T

  struct Slot {
    unsigned char q[Q::kBytes], d_o[Q::kBytes];
  };
  struct Barriers {
    u64 full_kv, empty_kv;
    u64 full[kSlots], empty[kSlots];
    u64 full_slopes[2];
    u64 full_sums[2], empty_sums[2];  // of a tile's dq, which is added in order
    u64 full_unit[kUnits], empty_unit[kUnits];
  };
  struct alignas(1024) Shared {
    unsigned char k[K::kBytes], v[K::kBytes];
    Slot slots[kSlots];
    unsigned char d_s[2][S::kBytes];
    float sums[kSlots][kSumWords];
    float lse_log2[kSlots][kRows];  // inf: the row does not count
    float d[kSlots][kRows];
    HopperBackwardUnit<Traits> units[kUnits];
    Barriers barriers;
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
    for (int i = 0; i < 2; ++i) {
      InitBarrier(SharedAddress(b.full_slopes + i), kConsumerWarps);
      InitBarrier(SharedAddress(b.full_sums + i), kConsumerWarps);
      InitBarrier(SharedAddress(b.empty_sums + i), 1);
    }
    for (int i = 0; i < kUnits; ++i) {
      InitBarrier(SharedAddress(b.full_unit + i), 1);
      InitBarrier(SharedAddress(b.empty_unit + i), kConsumerWarps + kWriters);
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
  static constexpr int kGroup = Traits::kGroupSize, kDim = Shape::kDim;
  static constexpr int kRows = Shape::kRows, kKeys = Shape::kKeys;
  static constexpr int kPage = Traits::kPageSize;

  __device__ __forceinline__ HopperBackwardRole(const BackwardCudaParams& p, Shared& shared)
      : p_(p), f_(p.forward), shared_(shared) {}

 protected:
  __device__ typename Shape::Barriers& Barriers() const { return shared_.barriers; }
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
  RingCursor<1> kv_;
};

// --- producer: one warp ---

template <class Traits>
class HopperBackwardProducer : HopperBackwardRole<Traits> {
 public:
  using Base = HopperBackwardRole<Traits>;
  using Base::Base, Base::kDim, Base::kGroup, Base::kKeys, Base::kPage, Base::kRows;
  using typename Base::Pairs;
  using typename Base::Shape;
  using typename Base::Unit;

  __device__ __forceinline__ void Run(int batch_size) {
    UnitSearch search = {0, 0};
#pragma unroll 1
    for (;;) {
      WaitForFreeSlot();
      const Unit unit = Take(batch_size, search);
      if constexpr (kPage > 0) {
        if (unit.block >= 0) RunReaders(unit);
      }
      HandOut(unit);
      if (unit.block < 0) break;
      if constexpr (kPage == 0) LoadTiles(unit, unit, false);
    }
  }

 private:
  using Base::f_, Base::p_, Base::shared_;
  __device__ static int Lane() { return static_cast<int>(threadIdx.x) % kWarpSize; }

  __device__ __forceinline__ void WaitForFreeSlot() const {
    WaitBarrier(SharedAddress(this->Barriers().empty_unit + this->unit_.slot),
                this->unit_.parity ^ 1);
  }
  // Hands out a unit; after WaitForFreeSlot.
  __device__ __forceinline__ void HandOut(const Unit& unit) {
    if (Lane() == 0) {
      shared_.units[this->unit_.slot] = unit;
      ArriveBarrier(SharedAddress(this->Barriers().full_unit + this->unit_.slot));
    }
    this->unit_.Advance();
  }

  // Hands out the parts of a unit; after WaitForFreeSlot. One more slot is free afterwards.
  __device__ __forceinline__ void RunReaders(const Unit& owner) {
    const int first = Max(owner.block * kKeys, owner.key_begin);
    int entry = owner.source.kv_begin + first / kPage;  // page table entry of the first one of the
                                                        // block's own pages
    bool has_kv = false;
#pragma unroll 1
    for (; entry >= 0; entry = LoadConstant(p_.next_entries + entry) - 1) {
      const int reader = LoadConstant(p_.readers + entry);
      Unit part = owner;
      part.source = BackwardSource(p_, reader);
      part.key_end = LoadConstant(p_.run_ends + entry);
      const int end = Min(owner.block * kKeys + kKeys, part.key_end);
      if (first >= end) continue;
      const auto tiles = Pairs{f_, part.source}.TilesOf(first, end);
      if (tiles.begin >= tiles.end) continue;
      part.tile_begin = tiles.begin;
      part.tile_end = tiles.end;
      part.first_tile = part.source.qo_begin / kRows + reader;
      HandOut(part);
      LoadTiles(part, owner, has_kv);
      has_kv = true;
      WaitForFreeSlot();
    }
  }

  // Loads the tiles of a part of the owner's unit, and the unit's keys unless has_kv.
  __device__ __forceinline__ void LoadTiles(const Unit& part, const Unit& owner, bool has_kv) {
#pragma unroll 1
    for (int g = 0; g < kGroup; ++g) {
#pragma unroll 1
      for (int tile = part.tile_begin; tile < part.tile_end; ++tile) {
        LoadTile(part, tile, g);
        if (has_kv) continue;
        LoadKv(owner);  // behind the first tile, whose slot is free earlier
        has_kv = true;
      }
    }
  }

  // The end of a request's own keys, in whole pages: another request may have more tokens in the
  // last one.
  __device__ __forceinline__ int OwnEnd(int request) const {
    return CeilDiv(LoadConstant(f_.kv_lens + request), kPage) * kPage;
  }

  // Takes the next unit; with pages without its parts.
  __device__ __forceinline__ Unit Take(int batch_size, UnitSearch& search) const {
    const auto blocks_of = [&](int request) -> u32 {
      if constexpr (kPage > 0) {
        const int begin = LoadConstant(p_.own_begins + request), end = OwnEnd(request);
        return begin < end ? CeilDiv(end, kKeys) - begin / kKeys : 0;
      }
      return CeilDiv(LoadConstant(f_.kv_lens + request), kKeys);
    };
    u32 unit_index = 0;
    const int request =
        search.Find(TakeNumber(p_.num_blocks_taken), batch_size, unit_index,
                    [&](int r) { return blocks_of(r) * static_cast<u32>(f_.num_kv_heads); });
    Unit unit = {};
    unit.block = -1;
    if (request < 0) return unit;
    const u32 blocks = blocks_of(request);
    unit.source = BackwardSource(p_, request);
    unit.kv_head = static_cast<int>(unit_index / blocks);
    unit.block = static_cast<int>(blocks - 1 - unit_index % blocks);
    if constexpr (kPage > 0) {
      unit.key_begin = LoadConstant(p_.own_begins + request);
      unit.key_end = OwnEnd(request);
      unit.block += unit.key_begin / kKeys;
      return unit;
    }
    const auto tiles = Pairs{f_, unit.source}.TilesOf(unit.block);
    unit.tile_begin = tiles.begin;
    unit.tile_end = tiles.end;
    unit.first_tile = unit.source.qo_begin / kRows + request;
    return unit;
  }

  // Loads kRows rows of one head. The first num_live exist, the others become zeros.
  template <class Tile, int kNumRows>
  __device__ __forceinline__ void CopyRows(u32 to, const void* array, int num_heads, int row,
                                           int head, int num_live) const {
    constexpr int kChunks = kDim / 8;  // vectors of 16 bytes
    const u16* from =
        static_cast<const u16*>(array) + (static_cast<i64>(row) * num_heads + head) * kDim;
    const i64 stride = static_cast<i64>(num_heads) * kDim;
#pragma unroll 1
    for (int i = Lane(); i < kNumRows * kChunks; i += kWarpSize) {
      const int r = i / kChunks, c = i % kChunks;
      const bool live = r < num_live;
      CopyAsync16(to + c / 8 * Tile::kBlockBytes + r * 128 + (c % 8 ^ r % 8) * 16,
                  live ? from + r * stride + c * 8 : from, live);
    }
  }
  template <class Tile>
  __device__ __forceinline__ void CopyByTma(u32 to, const TensorMap& map, int row, int head,
                                            u32 barrier) const {
#pragma unroll
    for (int block = 0; block < Tile::kBlocks; ++block) {
      LoadTmaTile(to + block * Tile::kBlockBytes, map, 64 * block, head, row, 0, barrier);
    }
  }
  // Loads the same rows of two arrays. What this lane stored before arrives with them.
  template <class Tile, int kNumRows>
  __device__ __forceinline__ void Load(u32 barrier, bool boxed, u32 to1, u32 to2, const void* from1,
                                       const void* from2, const TensorMap& map1,
                                       const TensorMap& map2, int num_heads, int row, int head,
                                       int num_live) const {
    if (boxed) {
      if (Lane() == 0) {
        ExpectBytes(barrier, 2 * Tile::kBytes);
        CopyByTma<Tile>(to1, map1, row, head, barrier);
        CopyByTma<Tile>(to2, map2, row, head, barrier);
      }
    } else {
      CopyRows<Tile, kNumRows>(to1, from1, num_heads, row, head, num_live);
      CopyRows<Tile, kNumRows>(to2, from2, num_heads, row, head, num_live);
      ArriveBarrierAfterCopies(barrier);
    }
  }

  __device__ __forceinline__ void LoadKv(const Unit& unit) {
    auto& barriers = this->Barriers();
    WaitBarrier(SharedAddress(&barriers.empty_kv), this->kv_.parity ^ 1);
    const u32 full = SharedAddress(&barriers.full_kv);
    const int first = unit.block * kKeys;
    if constexpr (kPage > 0) {
      LoadPages(unit, first, full);
      this->kv_.Advance();
      return;
    }
    const bool boxed = this->FitsTma(first, kKeys, unit.source.kv_len);
    Load<typename Shape::K, kKeys>(full, boxed, SharedAddress(shared_.k), SharedAddress(shared_.v),
                                   f_.k, f_.v, f_.k_map, f_.v_map, f_.num_kv_heads,
                                   unit.source.kv_begin + first, unit.kv_head,
                                   unit.source.kv_len - first);
    ArriveBarrier(full, boxed ? 2 : 1);
    this->kv_.Advance();
  }

  // Loads the owner's keys from `first` on, with those before its own; zeros for what no request
  // reads.
  __device__ __forceinline__ void LoadPages(const Unit& owner, int first, u32 full) const {
    using K = typename Shape::K;
    constexpr int kBox = HopperBackwardTmaRows(kPage), kChunks = kDim / 8;
    const u32 k_to = SharedAddress(shared_.k), v_to = SharedAddress(shared_.v);
    const auto page_at = [&](int pos) { return LoadPage<kPage>(f_, owner.source.kv_begin, pos); };
    // The last page counts up to the tokens of the request that has the most there.
    const int last = owner.key_end - kPage;
    const int end = last + LoadConstant(p_.page_lens + page_at(last));
    if (kBox > 0 && f_.has_tensor_maps != 0 && first + kKeys <= end) {
      if (Lane() < kKeys / Max(kBox, 1)) {
        const int pos = first + Lane() * kBox;
        const int row = static_cast<int>(PoolRow<kPage>(page_at(pos), pos));
        const int layer = LoadLayer<Traits>(f_);
        ExpectBytes(full, 2 * kBox * kDim * 2);
#pragma unroll
        for (int block = 0; block < K::kBlocks; ++block) {
          const u32 at = block * K::kBlockBytes + Lane() * kBox * 128;
          LoadTmaTile(k_to + at, f_.k_map, 64 * block, owner.kv_head, row, layer, full);
          LoadTmaTile(v_to + at, f_.v_map, 64 * block, owner.kv_head, row, layer, full);
        }
      }
      ArriveBarrier(full, 2);
      return;
    }
    const KvPools pools = FindPools<Traits, 2>(f_);
#pragma unroll 1
    for (int i = Lane(); i < kKeys * kChunks; i += kWarpSize) {
      const int r = i / kChunks, c = i % kChunks, pos = first + r;
      const bool live = pos < end;
      i64 from = 0;
      if (live) {
        from = (static_cast<i64>(PoolRow<kPage>(page_at(pos), pos)) * f_.num_kv_heads +
                owner.kv_head) *
                   (kDim * 2) +
               c * 16;
      }
      const u32 at = c / 8 * K::kBlockBytes + r * 128 + (c % 8 ^ r % 8) * 16;
      CopyAsync16(k_to + at, pools.k + from, live);
      CopyAsync16(v_to + at, pools.v + from, live);
    }
    ArriveBarrierAfterCopies(full);
    ArriveBarrier(full, 1);
  }

  __device__ __forceinline__ void LoadTile(const Unit& unit, int tile, int g) {
    auto& barriers = this->Barriers();
    const int slot = this->slot_.slot;
    WaitBarrier(SharedAddress(barriers.empty + slot), this->slot_.parity ^ 1);
    const u32 full = SharedAddress(barriers.full + slot);
    const int first = tile * kRows, head = unit.kv_head * kGroup + g;
    const int row = unit.source.qo_begin + first, num_live = unit.source.qo_len - first;
    const bool boxed = this->FitsTma(first, kRows, unit.source.qo_len);
    typename Shape::Slot& to = shared_.slots[slot];
    Load<typename Shape::Q, kRows>(full, boxed, SharedAddress(to.q), SharedAddress(to.d_o), f_.q,
                                   p_.d_o, p_.q_map, p_.d_o_map, f_.num_qo_heads, row, head,
                                   num_live);
    // Two of each at a time: the producer has few registers.
#pragma unroll 1
    for (int begin = 0; begin < kRows; begin += 2 * kWarpSize) {
      float lse[2], d[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int r = begin + i * kWarpSize + Lane();
        lse[i] = -Infinity();
        d[i] = 0.0f;
        if (r < num_live) {
          const i64 at = static_cast<i64>(row + r) * f_.num_qo_heads + head;
          lse[i] = __uint_as_float(LoadOperand32(p_.lse + at));
          d[i] = __uint_as_float(LoadOperand32(p_.d + at));
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int r = begin + i * kWarpSize + Lane();
        const bool counts = lse[i] != -Infinity();
        // NaN for +inf, and for lse that only the portable kernel can use: see needs_portable.
        const float lse_log2 = (lse[i] - lse[i]) + lse[i] * kLog2E;
        const bool is_far = !(fabsf(lse_log2) < kFarLseLog2);
        shared_.lse_log2[slot][r] = !counts  ? Infinity()
                                    : is_far ? __uint_as_float(kFullWarp)
                                             : lse_log2;
        shared_.d[slot][r] = counts ? d[i] : 0.0f;
      }
    }
    ArriveBarrier(full, boxed ? 2 : 1);
    this->slot_.Advance();
  }
};

// --- writers of sums: one thread each; they take alternate tiles ---

template <class Traits>
class HopperBackwardWriter : HopperBackwardRole<Traits> {
 public:
  using Base = HopperBackwardRole<Traits>;
  using Base::Base, Base::kGroup;
  using typename Base::Pairs;
  using typename Base::Shape;
  using typename Base::Unit;

  __device__ __forceinline__ void Run(int writer) {
#pragma unroll 1
    for (;;) {
      const Unit& unit = this->WaitForUnit();
      if (unit.block < 0) break;
#pragma unroll 1
      for (int g = 0; g < kGroup; ++g) {
#pragma unroll 1
        for (int tile = unit.tile_begin; tile < unit.tile_end; ++tile) {
          if (this->slot_.slot % Shape::kWriters == writer) Write(unit, tile, g);
          this->slot_.Advance();
        }
      }
      this->PassUnit();
    }
  }

 private:
  __device__ __forceinline__ void Write(const Unit& unit, int tile, int g) {
    const i64 at = this->TileAt(unit, tile, g);
    int before, share = 1;  // what is added ahead of this block, and by it
    if constexpr (Base::kPage > 0) {
      const auto seen = Pairs{this->f_, unit.source}.KeysOf(tile);
      const auto count = [&](int begin, int end) {
        return Max(0, Min(end, seen.end) - Max(begin, seen.begin));
      };
      // Keys that add before this block: those of earlier owners, and those of the owner's later
      // blocks. And the keys of the block.
      const int first = unit.block * Base::kKeys, next = first + Base::kKeys;
      before = count(0, unit.key_begin) + count(Max(next, unit.key_begin), unit.key_end);
      share = count(Max(first, unit.key_begin), Min(next, unit.key_end));
    } else {
      before = Pairs{this->f_, unit.source}.BlocksOf(tile).end - 1 - unit.block;
    }
    float* to = this->p_.d_q_sums + at * Shape::kSumWords;
    i32* progress = this->p_.tile_progress + at;
    const int slot = this->slot_.slot;
    const u32 from = SharedAddress(this->shared_.sums[slot]);
    constexpr int kBytes = Shape::kSumWords * 4;
    // Asked early as well: behind the sums it takes a trip to memory.
    const bool may_add = before == 0 || LoadAcquire(progress) >= before;
    WaitBarrier(SharedAddress(this->Barriers().full_sums + slot), this->slot_.parity);
    if (before == 0) {
      StoreBulk(to, from, kBytes);
    } else {
      // With pages the unit that is waited for may go through many requests first.
      constexpr int kMost = Base::kPage > 0 ? 16 * kMostNaps : kMostNaps;
      int naps = 0;
      while (!may_add && LoadAcquire(progress) < before && naps < kMost) {
        Nap();
        ++naps;
      }
      if (naps == kMost) MaxRelaxed(this->p_.needs_portable, 1);
      FenceGlobalForBulk();
      AddBulk(to, from, kBytes);
    }
    CommitStores();
    WaitStoresRead();
    ArriveBarrier(SharedAddress(this->Barriers().empty_sums + slot));
    WaitStores();
    FenceGlobalForBulk();
    AddAcquireRelease(progress, share);
  }
};

// --- consumers: two warpgroups ---

template <class Traits>
class HopperBackwardConsumer : HopperBackwardRole<Traits> {
 public:
  using Base = HopperBackwardRole<Traits>;
  using Base::kDim, Base::kGroup, Base::kKeys, Base::kPage, Base::kRows;
  using typename Base::Shape;
  using typename Base::Shared;
  using typename Base::Unit;
  using E = Element<Traits::kDtype>;
  using K = typename Shape::K;
  using Q = typename Shape::Q;
  using S = typename Shape::S;
  static constexpr int kNamedBarrier = 1, kConsumerThreads = 256;

  __device__ __forceinline__ HopperBackwardConsumer(const BackwardCudaParams& p, Shared& shared)
      : Base(p, shared),
        consumer_(Uniform(static_cast<int>(threadIdx.x) / 128 - 1)),
        warp_(Uniform(static_cast<int>(threadIdx.x) % 128 / kWarpSize)),
        thread_(static_cast<int>(threadIdx.x) % 128) {}

  __device__ __forceinline__ void Run() {
#pragma unroll 1
    for (;;) {
      const Unit& unit = this->WaitForUnit();
      if (unit.block < 0) break;
      RunUnit(unit);
      PassUnitByWarp();
    }
  }

 private:
  using Base::f_, Base::p_, Base::shared_;
  using Sums = float[kDim / 8][4];
  using Tile = float[kRows / 8][4];      // S^T or dP^T, keys are rows
  using Fragments = u32[kRows / 16][4];  // the same, packed
  // Opaque: registers are few, so nothing derived from it stays in them from step to step.
  __device__ int Lane() const { return Opaque(thread_) % kWarpSize; }
  // The first of this warp's 16 keys in the block.
  __device__ int FirstKey() const { return 64 * consumer_ + 16 * warp_; }
  __device__ __forceinline__ void Arrive(const u64* barrier) const {
    __syncwarp();
    if (Lane() == 0) ArriveBarrier(SharedAddress(barrier));
  }

  __device__ __forceinline__ void PassUnitByWarp() {
    __syncwarp();
    if (Lane() == 0) {
      this->PassUnit();
    } else {
      this->unit_.Advance();
    }
  }

  __device__ __forceinline__ void RunUnit(const Unit& unit) {
    Sums d_k = {}, d_v = {};
    const Unit* last = &unit;
    if constexpr (kPage > 0) {
      last = RunParts(last, d_k, d_v);
    } else {
      const int begin = Uniform(unit.tile_begin), end = Uniform(unit.tile_end);
      if (begin < end) {
        WaitForKv();
        bool is_first = true;
        RunTiles(unit, begin, end, is_first, d_k, d_v);
        Finish(d_k);
        Arrive(&this->Barriers().empty_kv);
      }
    }
    bool is_finite = Write(p_.d_k, *last, f_.sm_scale, d_k);
    is_finite &= Write(p_.d_v, *last, 1.0f, d_v);
    if (!is_finite) MaxRelaxed(p_.needs_portable, 1);
  }

  // Returns the part behind the last one, which the caller passes.
  __device__ __forceinline__ const Unit* RunParts(const Unit* part, Sums& d_k, Sums& d_v) {
    if (Uniform(part->tile_begin) == Uniform(part->tile_end)) return part;
    WaitForKv();
    bool is_first = true;
#pragma unroll 1
    for (;;) {
      const int begin = Uniform(part->tile_begin), end = Uniform(part->tile_end);
      if (begin == end) break;
      RunTiles(*part, begin, end, is_first, d_k, d_v);
      PassUnitByWarp();
      part = &this->WaitForUnit();
    }
    Finish(d_k);
    Arrive(&this->Barriers().empty_kv);
    return part;
  }

  __device__ __forceinline__ void WaitForKv() {
    WaitBarrier(SharedAddress(&this->Barriers().full_kv), this->kv_.parity);
    this->kv_.Advance();
    FenceSharedForWgmma();  // some rows may not have come by TMA
  }

  // is_first: whether the first tile is the unit's first one.
  __device__ __forceinline__ void RunTiles(const Unit& unit, int begin, int end, bool& is_first,
                                           Sums& d_k, Sums& d_v) {
    int tile = begin;
#pragma unroll 1
    for (int left = (end - begin) * kGroup; left > 0; --left) {
      RunStep(unit, tile, is_first, d_k, d_v);
      is_first = false;
      if (++tile == unit.tile_end) tile = unit.tile_begin;
    }
  }

  // At the end the product for dk still runs, and reads this tile of q, until the next step or
  // Finish.
  __device__ __forceinline__ void RunStep(const Unit& unit, int tile, bool is_first, Sums& d_k,
                                          Sums& d_v) {
    const int slot = this->slot_.slot;
    const u32 q_at = Uniform(SharedAddress(shared_.slots[slot].q));
    const u32 d_o_at = Uniform(SharedAddress(shared_.slots[slot].d_o));
    const u32 d_s_at = Uniform(SharedAddress(shared_.d_s[slot]));
    const bool boxed = this->FitsTma(tile * kRows, kRows, unit.source.qo_len);
    WaitBarrier(SharedAddress(this->Barriers().full + slot), this->slot_.parity);
    if (!boxed) FenceSharedForWgmma();

    // S^T and dP^T.
    Tile s = {}, d_p = {};
    WgmmaFence();
    Dot(SharedAddress(shared_.k), q_at, s);
    WgmmaCommit();
    Dot(SharedAddress(shared_.v), d_o_at, d_p);
    WgmmaCommit();
    const bool seen_by_all = IsSeenByAll(unit, tile);
    WgmmaWait<1>();
    PinRegisters(s);
    if constexpr (Shape::kCarries) {
      PinRegisters(d_k);
      if (!is_first) ArriveBefore();
    }

    // P^T.
    Fragments p;
    if (seen_by_all) {
      Weigh<false>(unit, tile, slot, s, p);
    } else {
      Weigh<true>(unit, tile, slot, s, p);
    }

    PinRegisters(s);

    // dS^T.
    float d_q[8][4] = {};
    WgmmaWait<0>();
    PinRegisters(d_p);
    Fragments d_s;
    MakeSlopes(slot, s, d_p, p, d_s);
    // The buffer of two steps ago is free once all consumers have come as far as this wait
    // requires.
    if constexpr (Shape::kSumsLater) WaitForSlopesBefore();
    StoreSlopes(d_s_at, d_s);
    FenceSharedForWgmma();
    PinRegisters(p);
    PinRegisters(d_s);
    if constexpr (Shape::kSumsLater) DotSlopesBefore(d_q);

    // dv and dk, with dq beside them.
    PinRegisters(d_v);
    PinRegisters(d_k);
    WgmmaFence();
    Add(p, d_o_at, d_v);
    WgmmaCommit();
    if constexpr (!Shape::kSumsLater) {
      SyncNamed(kNamedBarrier, kConsumerThreads);
      WgmmaFence();
      DotSlopes(d_s_at, d_q);
      WgmmaCommit();
    }
    Add(d_s, q_at, d_k);
    WgmmaCommit();
    WgmmaWait<Shape::kSumsLater ? 2 : 1>();
    PinRegisters(d_q);
    if constexpr (Shape::kSumsLater) {
      Arrive(this->Barriers().full_slopes + slot);
      if (!is_first) HandOver(Base::Before(this->slot_), d_q);
      WgmmaWait<Shape::kCarries ? 1 : 0>();
    } else {
      HandOver(this->slot_, d_q);
      if constexpr (!Shape::kCarries) WgmmaWait<0>();
    }
    PinRegisters(d_v);
    if constexpr (!Shape::kCarries) {
      PinRegisters(d_k);
      Arrive(this->Barriers().empty + slot);
    }
    this->slot_.Advance();
  }

  // Called behind the last step of a unit.
  __device__ __forceinline__ void Finish(Sums& d_k) {
    if constexpr (Shape::kSumsLater) {
      float d_q[8][4] = {};
      DotSlopesBefore(d_q);
      WgmmaWait<0>();
      PinRegisters(d_q);
      HandOver(Base::Before(this->slot_), d_q);
    } else {
      WgmmaWait<0>();
    }
    if constexpr (Shape::kCarries) {
      PinRegisters(d_k);
      ArriveBefore();
    }
  }

  // Releases the tile of the step before.
  __device__ __forceinline__ void ArriveBefore() const {
    Arrive(this->Barriers().empty + Base::Before(this->slot_).slot);
  }

  // --- products ---

  // c = this consumer's rows of `own` (k or v) times rows of a tile (q or d_o).
  __device__ __forceinline__ void Dot(u32 own, u32 tile, Tile& c) const {
    const u64 a = K::Descriptor(own, 64 * consumer_), b = Q::Descriptor(tile, 0);
#pragma unroll
    for (int kk = 0; kk < kDim / 16; ++kk) {
      Wgmma<kRows, Traits::kDtype>::SharedA(c, K::AlongK(a, kk), Q::AlongK(b, kk), kk > 0);
    }
  }
  // sums += fragments times rows of a tile.
  __device__ __forceinline__ static void Add(const Fragments& a, u32 tile, Sums& sums) {
    const u64 b = Q::TransposedDescriptor(tile, 0);
#pragma unroll
    for (int kk = 0; kk < kRows / 16; ++kk) {
      Wgmma<kDim, Traits::kDtype>::RegistersATransposedB(sums, a[kk], Q::AlongRows(b, kk), true);
    }
  }
  // dq: this consumer's half of dS k.
  __device__ __forceinline__ void DotSlopes(u32 d_s_at, float (&d_q)[8][4]) const {
    u64 a = S::TransposedDescriptor(d_s_at, 0);
    u64 b = K::TransposedDescriptor(SharedAddress(shared_.k), 0);
    if constexpr (kRows == 128) {
      a = S::Right(a, consumer_);
    } else {
      b = K::Right(b, consumer_);
    }
#pragma unroll
    for (int kk = 0; kk < kKeys / 16; ++kk) {
      Wgmma<64, Traits::kDtype>::TransposedSharedATransposedB(d_q, S::AlongRows(a, kk),
                                                              K::AlongRows(b, kk), kk > 0);
    }
  }

  // The same for the step before, behind all consumers' dS^T. Meaningless in a unit's first step.
  __device__ __forceinline__ void DotSlopesBefore(float (&d_q)[8][4]) const {
    WaitForSlopesBefore();
    WgmmaFence();
    DotSlopes(Uniform(SharedAddress(shared_.d_s[Base::Before(this->slot_).slot])), d_q);
    WgmmaCommit();
  }

  // --- between them ---

  // Waits until all consumers' dS^T of the step before is there, and their dq of two steps ago is
  // complete.
  __device__ __forceinline__ void WaitForSlopesBefore() const {
    const RingCursor<2> before = Base::Before(this->slot_);
    WaitBarrier(SharedAddress(this->Barriers().full_slopes + before.slot), before.parity);
  }

  __device__ __forceinline__ static int KeyEnd(const Unit& unit) {
    if constexpr (kPage > 0) {
      return unit.key_end;
    } else {
      return unit.source.kv_len;
    }
  }
  // Whether the request has such a key, and with pages whether the owner owns it.
  __device__ __forceinline__ static bool IsOwn(const Unit& unit, int key) {
    bool is_own = key < KeyEnd(unit);
    if constexpr (kPage > 0) is_own &= key >= unit.key_begin;
    return is_own;
  }

  // Whether all of the tile's tokens see all of this warp's keys.
  __device__ __forceinline__ bool IsSeenByAll(const Unit& unit, int tile) const {
    const i64 key = unit.block * kKeys + FirstKey();
    const i64 pos = static_cast<i64>(unit.source.q_begin) + tile * kRows;
    bool all = key + 16 <= KeyEnd(unit);
    if constexpr (kPage > 0) all &= key >= unit.key_begin;
    if constexpr (Traits::kHasWindowRight) all &= key + 15 <= pos + f_.window_right;
    if constexpr (Traits::kHasWindowLeft) all &= key >= pos + kRows - 1 - f_.window_left;
    return Uniform(static_cast<int>(all)) != 0;
  }

  // Turns S into P, and with a soft cap into P times the cap's slope: the factor of dP - d. p: P,
  // packed; without a soft cap MakeSlopes packs it.
  template <bool kMasks>
  __device__ __forceinline__ void Weigh(const Unit& unit, int tile, int slot, Tile& s,
                                        Fragments& p) const {
    const float scale = f_.sm_scale * kLog2E;
    const float slope = Traits::kHasSoftCap ? 2.0f * scale / f_.logits_soft_cap : 0.0f;
    const float cap = f_.logits_soft_cap * kLog2E;
    const int lane = Lane();
    const float* lse_log2 = shared_.lse_log2[slot] + 2 * (lane % 4);
    // Rows [low, high) of the tile see the lane's keys.
    int low[2] = {0, 0}, high[2] = {kRows, kRows};
    if constexpr (kMasks) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int key = unit.block * kKeys + FirstKey() + 8 * h + lane / 4;
        const i64 row = static_cast<i64>(key) - unit.source.q_begin - tile * kRows;
        if constexpr (Traits::kHasWindowRight) low[h] = Clamp(row - f_.window_right, 0, kRows);
        if constexpr (Traits::kHasWindowLeft) high[h] = Clamp(row + f_.window_left + 1, 0, kRows);
        if (!IsOwn(unit, key)) high[h] = 0;
      }
    }
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      const float2 lse = *reinterpret_cast<const float2*>(lse_log2 + 8 * j);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float weights[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = s[j][2 * h + c];
          const float row_lse = c == 0 ? lse.x : lse.y;
          float factor = 1.0f;
          if constexpr (Traits::kHasSoftCap) {  // as class SoftCap
            const float tanh = fmaf(-2.0f, Reciprocal(Exp2(slope * x) + 1.0f), 1.0f);
            factor = fmaf(-tanh, tanh, 1.0f);
            weights[c] = Exp2(fmaf(cap, tanh, -row_lse));
          } else {
            weights[c] = Exp2(fmaf(x, scale, -row_lse));
          }
          if constexpr (kMasks) {
            const int row = 8 * j + 2 * (lane % 4) + c;
            if (row < low[h] || row >= high[h]) weights[c] = 0.0f;
          }
          x = Traits::kHasSoftCap ? weights[c] * factor : weights[c];
        }
        if constexpr (Traits::kHasSoftCap) {
          p[j / 2][j % 2 * 2 + h] = E::Pack(weights[0], weights[1]);
        }
      }
    }
  }

  __device__ __forceinline__ void MakeSlopes(int slot, const Tile& s, const Tile& d_p, Fragments& p,
                                             Fragments& d_s) const {
    const float* d = shared_.d[slot] + 2 * (Lane() % 4);
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      const float2 x = *reinterpret_cast<const float2*>(d + 8 * j);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if constexpr (!Traits::kHasSoftCap) {
          p[j / 2][j % 2 * 2 + h] = E::Pack(s[j][2 * h], s[j][2 * h + 1]);
        }
        d_s[j / 2][j % 2 * 2 + h] = E::Pack(s[j][2 * h] * (d_p[j][2 * h] - x.x),
                                            s[j][2 * h + 1] * (d_p[j][2 * h + 1] - x.y));
      }
    }
  }

  __device__ __forceinline__ void StoreSlopes(u32 d_s_at, const Fragments& d_s) const {
    const int lane = Lane();
    const u32 to = d_s_at + (FirstKey() + lane % 16) * 128 + (lane / 16 ^ lane % 8) * 16;
#pragma unroll
    for (int kk = 0; kk < kRows / 16; ++kk) {
      StoreMatrix4((to ^ kk % 4 * 32) + kk / 4 * S::kBlockBytes, d_s[kk]);
    }
  }

  // --- results ---

  // Hands dq over to the writers. at: the step's position in the ring of tiles, which is as long as
  // that of sums.
  __device__ __forceinline__ void HandOver(const RingCursor<2>& at,
                                           const float (&d_q)[8][4]) const {
    // The buffer is free once the sums of two steps ago have left it.
    const RingCursor<2> last = {at.slot, at.parity ^ 1};
    WaitBarrier(SharedAddress(this->Barriers().empty_sums + last.slot), last.parity);
    float* to = shared_.sums[at.slot] + consumer_ * (Shape::kSumWords / 2) + Opaque(thread_) * 4;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      *reinterpret_cast<float4*>(to + j * 512) =
          make_float4(d_q[j][0], d_q[j][1], d_q[j][2], d_q[j][3]);
    }
    FenceSharedForWgmma();
    Arrive(this->Barriers().full_sums + at.slot);
  }

  // Writes rows of dk or dv. Returns whether all of them are finite.
  __device__ __forceinline__ bool Write(void* result, const Unit& unit, float scale,
                                        const Sums& sums) const {
    const int lane = Lane();
    bool is_finite = true;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int key = unit.block * kKeys + FirstKey() + 8 * h + lane / 4;
      const bool is_own = IsOwn(unit, key);
      i64 row = unit.source.kv_begin + key;
      if constexpr (kPage > 0) {
        row = LoadLayer<Traits>(f_) * f_.num_pages * kPage;
        if (is_own) row += PoolRow<kPage>(LoadPage<kPage>(f_, unit.source.kv_begin, key), key);
      }
      u16* to = static_cast<u16*>(result) + (row * f_.num_kv_heads + unit.kv_head) * kDim;
#pragma unroll
      for (int j = 0; j < kDim / 8; j += 4) {
        u32 packed[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float left = sums[j + i][2 * h] * scale, right = sums[j + i][2 * h + 1] * scale;
          is_finite &= left - left == 0.0f && right - right == 0.0f;
          packed[i] = E::Pack(left, right);
        }
        const uint4 x = TransposeQuad(packed, lane);
        if (is_own) {
          *reinterpret_cast<uint4*>(to + 8 * (j + lane % 4)) = x;
        }
      }
    }
    return is_finite;
  }

  const int consumer_, warp_, thread_;
};

// --- the sums become dq ---

template <class Traits>
class HopperBackwardRounding {
 public:
  using Shape = HopperBackwardShape<Traits>;
  using Pairs = HopperBackwardPairs<Traits>;
  using E = Element<Traits::kDtype>;
  static constexpr int kDim = Shape::kDim, kRows = Shape::kRows;

  __device__ __forceinline__ HopperBackwardRounding(const BackwardCudaParams& p, int batch_size)
      : p_(p), f_(p.forward), batch_size_(batch_size) {}

  // Called by all threads of the grid; CTAs run side by side.
  __device__ __forceinline__ void Run() const {
    const i64 num_items = static_cast<i64>(p_.max_tiles) * f_.num_qo_heads * kTileItems;
    const i64 per_cta = (num_items + gridDim.x - 1) / gridDim.x;
    const i64 begin = per_cta * blockIdx.x, end = begin + per_cta;
    int slot = -1, request = 0;
#pragma unroll 1
    for (i64 i = begin + threadIdx.x; i < end && i < num_items; i += blockDim.x) {
      const i64 tile_and_head = i / kTileItems;
      const int now = static_cast<int>(tile_and_head / f_.num_qo_heads);
      if (now != slot) request = RequestOf(now);
      slot = now;
      if (request < 0) continue;
      Round(request, slot - FirstTile(request), tile_and_head, static_cast<int>(i % kTileItems));
    }
  }

  // Writes zeros to rows of no request. Pages are zeros at entry.
  __device__ __forceinline__ void ClearRest() const {
    const i64 q_row = static_cast<i64>(f_.num_qo_heads) * kDim;
    const i64 kv_row = static_cast<i64>(f_.num_kv_heads) * kDim;
    Clear(p_.d_q, batch_size_ > 0 ? LoadConstant(f_.qo_indptr + batch_size_) * q_row : 0,
          p_.num_elements[0]);
    if constexpr (Traits::kPageSize > 0) return;
#pragma unroll 1
    for (int r = -1; r < batch_size_; ++r) {
      i64 begin = 0, end = p_.num_elements[1];
      if (r >= 0) begin = (LoadConstant(p_.kv_indptr + r) + LoadConstant(f_.kv_lens + r)) * kv_row;
      if (r + 1 < batch_size_) end = LoadConstant(p_.kv_indptr + r + 1) * kv_row;
      Clear(p_.d_k, begin, end);
      Clear(p_.d_v, begin, end);
    }
  }

 private:
  // A work item is two rows, 8 apart, by 8 columns.
  static constexpr int kTileItems = Shape::kSumWords / 16;

  __device__ __forceinline__ int FirstTile(int request) const {
    return LoadConstant(f_.qo_indptr + request) / kRows + request;
  }
  // The request of a tile slot; -1: none.
  __device__ __forceinline__ int RequestOf(int slot) const {
    int low = 0, high = batch_size_;  // the last request that begins at it or before
#pragma unroll 1
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (FirstTile(middle) <= slot) {
        low = middle;
      } else {
        high = middle;
      }
    }
    if (batch_size_ == 0 || FirstTile(low) > slot) return -1;
    const int tokens = LoadConstant(f_.qo_indptr + low + 1) - LoadConstant(f_.qo_indptr + low);
    return (slot - FirstTile(low)) * kRows < tokens ? low : -1;
  }

  __device__ __forceinline__ void Round(int request, int tile, i64 tile_and_head, int item) const {
    const BackwardSource source(p_, request);
    const auto keys = Pairs{f_, source}.KeysOf(tile);
    // The order of HandOver: column tile, row of 8, warp, consumer.
    const int j = item % 8, row_of_8 = item / 8 % 8, warp = item / 64 % 4, part = item / 256;
    float4 x[4] = {};
    if (keys.begin < keys.end) {
      const float* from = p_.d_q_sums + tile_and_head * Shape::kSumWords +
                          part * (Shape::kSumWords / 2) + j * 512 + (warp * 32 + row_of_8 * 4) * 4;
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = reinterpret_cast<const float4*>(from)[i];
    }
    const int row = tile * kRows + (kRows == 128 ? 64 * part : 0) + 16 * warp + row_of_8;
    const int column = (kRows == 128 ? 0 : 64 * part) + 8 * j;
    const int head = static_cast<int>(tile_and_head % f_.num_qo_heads);
    bool is_finite = true;
    u32 packed[2][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float y[4] = {x[i].x * f_.sm_scale, x[i].y * f_.sm_scale, x[i].z * f_.sm_scale,
                          x[i].w * f_.sm_scale};
#pragma unroll
      for (int c = 0; c < 4; ++c) is_finite &= y[c] - y[c] == 0.0f;
      packed[0][i] = E::Pack(y[0], y[1]);
      packed[1][i] = E::Pack(y[2], y[3]);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (row + 8 * h >= source.qo_len) continue;
      const i64 at = static_cast<i64>(source.qo_begin + row + 8 * h) * f_.num_qo_heads + head;
      *reinterpret_cast<uint4*>(static_cast<u16*>(p_.d_q) + at * kDim + column) =
          make_uint4(packed[h][0], packed[h][1], packed[h][2], packed[h][3]);
    }
    if (!is_finite) MaxRelaxed(p_.needs_portable, 1);
  }

  // Clears elements [begin, end), multiples of 8.
  __device__ __forceinline__ static void Clear(void* array, i64 begin, i64 end) {
    const i64 thread = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    const i64 num_threads = static_cast<i64>(gridDim.x) * blockDim.x;
#pragma unroll 1
    for (i64 i = begin / 8 + thread; i < end / 8; i += num_threads) {
      static_cast<uint4*>(array)[i] = make_uint4(0, 0, 0, 0);
    }
  }

  const BackwardCudaParams& p_;
  const AttentionParams& f_;
  const int batch_size_;
};

// --- kernel ---

template <class Traits>
struct HopperBackwardBody {
  using Shape = HopperBackwardShape<Traits>;
  using Shared = typename Shape::Shared;
  static constexpr int kNumThreads = 384;
  static constexpr int kMinCtasPerSm = 1;
  static constexpr int kSmemBytes = sizeof(Shared);
  static_assert(kSmemBytes <= CtaSmemBudget(Traits::kArch, 1), "one CTA fits a multiprocessor");
  // In total at most what the CTA begins with, 168 a thread. Consumers hold dk, dv, and S and dP or
  // dq.
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = 240;

  __device__ __forceinline__ static void Run(const BackwardCudaParams& p) {
    extern __shared__ __align__(1024) unsigned char smem[];
    Shared& shared = *reinterpret_cast<Shared*>(smem);
    const HeaderCounts plan(p.forward.header, p.forward);
    if (!plan.is_plan) return;  // the portable kernel writes the results
    if (p.phase == kBackwardRound) {
      const HopperBackwardRounding<Traits> rounding(p, plan.batch_size);
      rounding.Run();
      rounding.ClearRest();
      return;
    }
    if (Traits::kPageSize > 0 && LoadAcquire(p.needs_portable) != 0) return;
    if (threadIdx.x == 0) Shape::Init(shared);
    __syncthreads();
    if (threadIdx.x < 128) {
      LowerRegisterLimit<kProducerRegisters>();
      const int warp = Uniform(static_cast<int>(threadIdx.x) / kWarpSize);
      if (warp == 0) HopperBackwardProducer<Traits>(p, shared).Run(plan.batch_size);
      if (warp > 0 && warp <= Shape::kWriters && threadIdx.x % kWarpSize == 0) {
        HopperBackwardWriter<Traits>(p, shared).Run(warp - 1);
      }
    } else {
      RaiseRegisterLimit<kConsumerRegisters>();
      HopperBackwardConsumer<Traits>(p, shared).Run();
    }
  }
};

}  // namespace jax_attn
