// The backward pass on sm_90a: wgmma, TMA, one pass of five products. It takes 16-bit elements and
// head dims up to 256. sm80/backward.cuh has the formulas and does everything else.
//
// A unit of work is a block of keys of a kv head, for which it writes dk and dv. Tiles of query
// tokens of each query head of the group stream by:
//   S^T = k q^T    dP^T = v d_o^T    dv += P^T d_o    dk += dS^T q    dq = dS k
// P^T and dS^T are operand a from registers. dS^T also goes to shared memory, for dq.
//
// Up to head_dim 128 a block has 128 keys, and in the first four products each of two consumers has
// 64 of them. Of dq each consumer computes half: half of the columns, or half of the rows (head_dim
// 64). Beyond, backward_wide.cuh divides the work in another way.
//
// Where registers allow it, dq is that of the step before (kSumsLater): its products need no
// barrier then, and run while dS^T is computed.
//
// A head_dim between these sizes is padded with zeros in shared memory: TMA tiles are whole blocks
// of 64 columns. S^T and dP^T sum over the columns that exist, up to 15 more.
//
// dq leaves through shared memory: bulk copies add it to f32 sums in global memory. Blocks of keys
// add to a tile one after the other, the last block first, so the order of the sums is fixed. Units
// are numbered in this order and taken in the order of numbers. So a unit that another one waits
// for is already running, whatever the grid, and there is no deadlock. A causal block begins at its
// diagonal, where the blocks behind it have been before, so it rarely waits. One head has the
// opposite order (HopperBackwardUnit::is_mirrored).
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
#include "cuda/sm90/backward_wide.cuh"

namespace jax_attn {

// --- producer: one warp ---

template <class Traits>
class HopperBackwardProducer : HopperBackwardRole<Traits> {
 public:
  using Base = HopperBackwardRole<Traits>;
  using Base::Base, Base::kGroup, Base::kKeys, Base::kPage, Base::kRows;
  using Base::kQkDim, Base::kVoDim;
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
      for (int i = part.tile_begin; i < part.tile_end; ++i) {
        LoadTile(part, part.TileAt(i), g);
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
    if constexpr (Unit::kMirrors) {
      unit.is_mirrored = request == batch_size - 1 && unit.kv_head == f_.num_kv_heads - 1;
      if (unit.is_mirrored) unit.block = static_cast<int>(unit_index % blocks);
    }
    const auto tiles = Pairs{f_, unit.source}.TilesOf(unit.block);
    unit.tile_begin = tiles.begin;
    unit.tile_end = tiles.end;
    unit.first_tile = unit.source.qo_begin / kRows + request;
    return unit;
  }

  // Copies kNumRows rows of kDim columns of one head. The first num_live exist, the others and what
  // pads them become zeros.
  template <class Tile, int kDim, int kNumRows>
  __device__ __forceinline__ void CopyRows(u32 to, const void* array, int num_heads, int row,
                                           int head, int num_live) const {
    constexpr int kChunks = Tile::kPadded / 8, kLive = kDim / 8;  // vectors of 16 bytes
    const u16* from =
        static_cast<const u16*>(array) + (static_cast<i64>(row) * num_heads + head) * kDim;
    const i64 stride = static_cast<i64>(num_heads) * kDim;
#pragma unroll 1
    for (int i = Lane(); i < kNumRows * kChunks; i += kWarpSize) {
      const int r = i / kChunks, c = i % kChunks;
      const bool live = r < num_live && (kLive == kChunks || c < kLive);
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
  // Loads rows as CopyRows does, by TMA if boxed. ArriveLoaded comes after it.
  template <class Tile, int kDim, int kNumRows>
  __device__ __forceinline__ void Load(u32 barrier, bool boxed, u32 to, const void* from,
                                       const TensorMap& map, int num_heads, int row, int head,
                                       int num_live) const {
    if (!boxed) {
      CopyRows<Tile, kDim, kNumRows>(to, from, num_heads, row, head, num_live);
    } else if (Lane() == 0) {
      ExpectBytes(barrier, Tile::kBytes);
      CopyByTma<Tile>(to, map, row, head, barrier);
    }
  }
  // What this lane copied and stored before arrives with it.
  __device__ __forceinline__ static void ArriveLoaded(u32 barrier, bool boxed) {
    if (!boxed) ArriveBarrierAfterCopies(barrier);
    ArriveBarrier(barrier, boxed ? 2 : 1);
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
    const int row = unit.source.kv_begin + first, num_live = unit.source.kv_len - first;
    Load<typename Shape::K, kQkDim, kKeys>(full, boxed, SharedAddress(shared_.k), f_.k, f_.k_map,
                                           f_.num_kv_heads, row, unit.kv_head, num_live);
    Load<typename Shape::V, kVoDim, kKeys>(full, boxed, SharedAddress(shared_.v), f_.v, f_.v_map,
                                           f_.num_kv_heads, row, unit.kv_head, num_live);
    ArriveLoaded(full, boxed);
    this->kv_.Advance();
  }

  // Loads the owner's keys from `first` on, with those before its own; zeros for what no request
  // reads.
  __device__ __forceinline__ void LoadPages(const Unit& owner, int first, u32 full) const {
    using K = typename Shape::K;
    using V = typename Shape::V;
    constexpr int kBox = HopperBackwardTmaRows(kPage, kKeys);
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
        ExpectBytes(full, kBox * (K::kPadded + V::kPadded) * 2);
#pragma unroll
        for (int block = 0; block < Max(K::kBlocks, V::kBlocks); ++block) {
          const int at = Lane() * kBox * 128;
          if (block < K::kBlocks) {
            LoadTmaTile(k_to + block * K::kBlockBytes + at, f_.k_map, 64 * block, owner.kv_head,
                        row, layer, full);
          }
          if (block < V::kBlocks) {
            LoadTmaTile(v_to + block * V::kBlockBytes + at, f_.v_map, 64 * block, owner.kv_head,
                        row, layer, full);
          }
        }
      }
      ArriveBarrier(full, 2);
      return;
    }
    const KvPools pools = FindPools<Traits, 2>(f_);
    CopyPages<K, kQkDim>(k_to, pools.k, owner, first, end);
    CopyPages<V, kVoDim>(v_to, pools.v, owner, first, end);
    ArriveLoaded(full, false);
  }
  // Copies rows of the owner's keys from `first` on; zeros from `end` on.
  template <class Tile, int kDim>
  __device__ __forceinline__ void CopyPages(u32 to, const char* pool, const Unit& owner, int first,
                                            int end) const {
    constexpr int kChunks = Tile::kPadded / 8, kLive = kDim / 8;
#pragma unroll 1
    for (int i = Lane(); i < kKeys * kChunks; i += kWarpSize) {
      const int r = i / kChunks, c = i % kChunks, pos = first + r;
      const bool live = pos < end && (kLive == kChunks || c < kLive);
      i64 from = 0;
      if (live) {
        const int page = LoadPage<kPage>(f_, owner.source.kv_begin, pos);
        from = (static_cast<i64>(PoolRow<kPage>(page, pos)) * f_.num_kv_heads + owner.kv_head) *
                   (kDim * 2) +
               c * 16;
      }
      CopyAsync16(to + c / 8 * Tile::kBlockBytes + r * 128 + (c % 8 ^ r % 8) * 16, pool + from,
                  live);
    }
  }

  __device__ __forceinline__ void LoadTile(const Unit& unit, int tile, int g) {
    auto& barriers = this->Barriers();
    const int slot = this->slot_.slot;
    WaitBarrier(SharedAddress(barriers.empty + slot), this->slot_.parity ^ 1);
    const u32 full = SharedAddress(barriers.full + slot);
    const int first = tile * kRows, head = unit.kv_head * kGroup + g;
    const int row = unit.source.qo_begin + first, num_live = unit.source.qo_len - first;
    const bool boxed = this->FitsTma(first, kRows, unit.source.qo_len);
    Load<typename Shape::Q, kQkDim, kRows>(full, boxed, SharedAddress(shared_.q[slot]), f_.q,
                                           p_.q_map, f_.num_qo_heads, row, head, num_live);
    if constexpr (Shape::kIsWide) {
      LoadRowValues<true, false>(slot, row, head, num_live);
      ArriveLoaded(full, boxed);
      const int o_slot = this->o_slot_.slot;
      WaitBarrier(SharedAddress(this->WideBarriers().empty_o + o_slot), this->o_slot_.parity ^ 1);
      const u32 full_o = SharedAddress(this->WideBarriers().full_o + o_slot);
      LoadOutputs(full_o, boxed, o_slot, row, head, num_live);
      LoadRowValues<false, true>(o_slot, row, head, num_live);
      ArriveLoaded(full_o, boxed);
      this->o_slot_.Advance();
    } else {
      LoadOutputs(full, boxed, slot, row, head, num_live);
      LoadRowValues<true, true>(slot, row, head, num_live);
      ArriveLoaded(full, boxed);
    }
    this->slot_.Advance();
  }

  __device__ __forceinline__ void LoadOutputs(u32 full, bool boxed, int slot, int row, int head,
                                              int num_live) const {
    Load<typename Shape::O, kVoDim, kRows>(full, boxed, SharedAddress(shared_.d_o[slot]), p_.d_o,
                                           p_.d_o_map, f_.num_qo_heads, row, head, num_live);
  }

  // Loads lse and d of a tile's rows, or one of them.
  template <bool kLse, bool kD>
  __device__ __forceinline__ void LoadRowValues(int slot, int row, int head, int num_live) const {
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
          if constexpr (kD) d[i] = __uint_as_float(LoadOperand32(p_.d + at));
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int r = begin + i * kWarpSize + Lane();
        const bool counts = lse[i] != -Infinity();
        if constexpr (kD) shared_.d[slot][r] = counts ? d[i] : 0.0f;
        if constexpr (kLse) {
          // NaN for +inf, and for lse that only the portable kernel can use: see needs_portable.
          const float lse_log2 = (lse[i] - lse[i]) + lse[i] * kLog2E;
          const bool is_far = !(fabsf(lse_log2) < kFarLseLog2);
          shared_.lse_log2[slot][r] = !counts  ? Infinity()
                                      : is_far ? __uint_as_float(kFullWarp)
                                               : lse_log2;
        }
      }
    }
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
        for (int i = unit.tile_begin; i < unit.tile_end; ++i) {
          if (this->slot_.slot % Shape::kWriters == writer) Write(unit, unit.TileAt(i), g);
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
      const auto blocks = Pairs{this->f_, unit.source}.BlocksOf(tile);
      before = Unit::kMirrors && unit.is_mirrored ? unit.block - blocks.begin
                                                  : blocks.end - 1 - unit.block;
    }
    float* to = this->p_.d_q_sums + at * Shape::kSumWords;
    i32* progress = this->p_.tile_progress + at;
    // Asked early as well: behind the sums it takes a trip to memory.
    bool may_add = before == 0 || LoadAcquire(progress) >= before;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const Part part = PartOf(i);
      WaitBarrier(SharedAddress(this->Barriers().full_sums + part.full), part.parity);
      if (before == 0) {
        StoreBulk(to + part.word, part.from, kPartBytes);
      } else {
        // With pages the unit that is waited for may go through many requests first.
        constexpr int kMost = Base::kPage > 0 ? 16 * kMostNaps : kMostNaps;
        int naps = 0;
        while (!may_add && LoadAcquire(progress) < before && naps < kMost) {
          Nap();
          ++naps;
        }
        if (naps == kMost) MaxRelaxed(this->p_.needs_portable, 1);
        may_add = true;
        FenceGlobalForBulk();
        AddBulk(to + part.word, part.from, kPartBytes);
      }
      CommitStores();
      WaitStoresRead();
      ArriveBarrier(SharedAddress(this->Barriers().empty_sums + part.empty));
    }
    WaitStores();
    FenceGlobalForBulk();
    AddAcquireRelease(progress, share);
  }

  // What leaves at once: a tile; of wide heads a block.
  struct Part {
    int full, empty;  // barriers
    u32 parity, from;
    int word;
  };
  static constexpr int kParts = Shape::kIsWide ? Shape::kNumBlocks : 1;
  static constexpr int kPartBytes = Shape::kSumWords * 4 / kParts;

  // Consumer 1 hands over a step before consumer 0 does (backward_wide.cuh), so its blocks come
  // first.
  __device__ __forceinline__ Part PartOf(int i) const {
    const int slot = this->slot_.slot;
    if constexpr (Shape::kIsWide) {
      const int consumer = i < Shape::kBlocks1 ? 1 : 0;
      const int block = consumer == 1 ? i : i - Shape::kBlocks1;  // of the consumer's
      const int num_blocks = consumer == 1 ? Shape::kBlocks1 : Shape::kBlocks0;
      const u32 parity = num_blocks == 1 ? this->slot_.parity : static_cast<u32>(block);
      const int column_block = block + (consumer == 1 ? Shape::kBlocks0 : 0);
      return {2 * slot + consumer, consumer, parity, SharedAddress(this->shared_.sums[consumer]),
              column_block * Shape::kBlockWords};
    }
    return {slot, slot, this->slot_.parity, SharedAddress(this->shared_.sums[slot]), 0};
  }
};

// --- consumers: two warpgroups ---

template <class Traits>
class HopperBackwardConsumer : HopperBackwardConsumerBase<Traits> {
 public:
  using Base = HopperBackwardConsumerBase<Traits>;
  using Base::Base, Base::kKeys, Base::kRows;
  using typename Base::E;
  using typename Base::Fragments;
  using typename Base::K;
  using typename Base::O;
  using typename Base::Q;
  using typename Base::S;
  using typename Base::Shape;
  using typename Base::SumsOfK;
  using typename Base::SumsOfV;
  using typename Base::Tile;
  using typename Base::Unit;
  using typename Base::V;
  static constexpr int kNamedBarrier = 1, kConsumerThreads = 256;

  __device__ __forceinline__ void Run() {
    this->RunUnits([&](const Unit& unit) { RunUnit(unit); });
  }

 private:
  using Base::Arrive;
  using Base::p_, Base::f_, Base::shared_, Base::consumer_, Base::thread_;

  __device__ __forceinline__ void RunUnit(const Unit& unit) {
    SumsOfK d_k = {};
    SumsOfV d_v = {};
    const Unit* last = this->RunSteps(
        unit,
        [&](const Unit& part, int tile, bool is_first) { RunStep(part, tile, is_first, d_k, d_v); },
        [&] { Finish(d_k); });
    bool is_finite = this->template Write<Shape::kQkDim>(p_.d_k, *last, f_.sm_scale, d_k);
    is_finite &= this->template Write<Shape::kVoDim>(p_.d_v, *last, 1.0f, d_v);
    if (!is_finite) MaxRelaxed(p_.needs_portable, 1);
  }

  // At the end the product for dk still runs, and reads this tile of q, until the next step or
  // Finish.
  __device__ __forceinline__ void RunStep(const Unit& unit, int tile, bool is_first, SumsOfK& d_k,
                                          SumsOfV& d_v) {
    const int slot = this->slot_.slot;
    const u32 q_at = Uniform(SharedAddress(shared_.q[slot]));
    const u32 d_o_at = Uniform(SharedAddress(shared_.d_o[slot]));
    const u32 d_s_at = Uniform(SharedAddress(shared_.d_s[slot]));
    const bool boxed = this->FitsTma(tile * kRows, kRows, unit.source.qo_len);
    WaitBarrier(SharedAddress(this->Barriers().full + slot), this->slot_.parity);
    if (!boxed) FenceSharedForWgmma();

    // S^T and dP^T.
    Tile s = {}, d_p = {};
    WgmmaFence();
    Base::template Dot<Shape::kQkDim, K, Q>(SharedAddress(shared_.k), 64 * consumer_, q_at, s);
    WgmmaCommit();
    Base::template Dot<Shape::kVoDim, V, O>(SharedAddress(shared_.v), 64 * consumer_, d_o_at, d_p);
    WgmmaCommit();
    const bool seen_by_all = this->IsSeenByAll(unit, tile);
    WgmmaWait<1>();
    PinRegisters(s);
    if constexpr (Shape::kCarries) {
      PinRegisters(d_k);
      if (!is_first) ArriveBefore();
    }

    // P^T.
    Fragments p;
    if (seen_by_all) {
      this->template Weigh<false>(unit, tile, slot, s, p);
    } else {
      this->template Weigh<true>(unit, tile, slot, s, p);
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
    this->StoreSlopes(d_s_at, d_s);
    FenceSharedForWgmma();
    PinRegisters(p);
    PinRegisters(d_s);
    if constexpr (Shape::kSumsLater) DotSlopesBefore(d_q);

    // dv and dk, with dq beside them.
    PinRegisters(d_v);
    PinRegisters(d_k);
    WgmmaFence();
    Base::template Add<O>(p, d_o_at, d_v);
    WgmmaCommit();
    if constexpr (!Shape::kSumsLater) {
      SyncNamed(kNamedBarrier, kConsumerThreads);
      WgmmaFence();
      DotSlopes(d_s_at, d_q);
      WgmmaCommit();
    }
    Base::template Add<Q>(d_s, q_at, d_k);
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
  __device__ __forceinline__ void Finish(SumsOfK& d_k) {
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

  __device__ __forceinline__ void MakeSlopes(int slot, const Tile& s, const Tile& d_p, Fragments& p,
                                             Fragments& d_s) const {
    const float* d = shared_.d[slot] + 2 * (this->Lane() % 4);
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
};

// --- the sums become dq ---

template <class Traits>
class HopperBackwardRounding {
 public:
  using Shape = HopperBackwardShape<Traits>;
  using Pairs = HopperBackwardPairs<Traits>;
  using E = Element<Traits::kDtype>;
  static constexpr int kQkDim = Shape::kQkDim, kRows = Shape::kRows;

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
    Clear(p_.d_q,
          batch_size_ > 0 ? LoadConstant(f_.qo_indptr + batch_size_) *
                                (static_cast<i64>(f_.num_qo_heads) * kQkDim)
                          : 0,
          p_.num_elements[0]);
    if constexpr (Traits::kPageSize > 0) return;
    ClearKv(p_.d_k, p_.num_elements[1], static_cast<i64>(f_.num_kv_heads) * kQkDim);
    ClearKv(p_.d_v, p_.num_elements[2], static_cast<i64>(f_.num_kv_heads) * Shape::kVoDim);
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
    // The order of HandOver: column tile, row of 8, warp, block of 64 rows by 64 columns.
    const int j = item % 8, row_of_8 = item / 8 % 8, warp = item / 64 % 4, part = item / 256;
    float4 x[4] = {};
    if (keys.begin < keys.end) {
      const float* from = p_.d_q_sums + tile_and_head * Shape::kSumWords +
                          part * Shape::kBlockWords + j * 512 + (warp * 32 + row_of_8 * 4) * 4;
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
      if (row + 8 * h >= source.qo_len || column >= kQkDim) continue;
      const i64 at = static_cast<i64>(source.qo_begin + row + 8 * h) * f_.num_qo_heads + head;
      *reinterpret_cast<uint4*>(static_cast<u16*>(p_.d_q) + at * kQkDim + column) =
          make_uint4(packed[h][0], packed[h][1], packed[h][2], packed[h][3]);
    }
    if (!is_finite) MaxRelaxed(p_.needs_portable, 1);
  }

  // Clears what is between the requests' rows of dk or dv.
  __device__ __forceinline__ void ClearKv(void* array, i64 num_elements, i64 row) const {
#pragma unroll 1
    for (int r = -1; r < batch_size_; ++r) {
      i64 begin = 0, end = num_elements;
      if (r >= 0) begin = (LoadConstant(p_.kv_indptr + r) + LoadConstant(f_.kv_lens + r)) * row;
      if (r + 1 < batch_size_) end = LoadConstant(p_.kv_indptr + r + 1) * row;
      Clear(array, begin, end);
    }
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
  using Consumer = typename Conditional<Shape::kIsWide, HopperBackwardWideConsumer<Traits>,
                                        HopperBackwardConsumer<Traits>>::Type;
  static constexpr int kNumThreads = 384;
  static constexpr int kMinCtasPerSm = 1;
  static constexpr int kSmemBytes = sizeof(Shared);
  static_assert(kSmemBytes <= CtaSmemBudget(Traits::kArch, 1), "one CTA fits a multiprocessor");
  // In total at most what the CTA begins with, 168 a thread. Consumers hold dk, dv, and S and dP or
  // dq; of wide heads one of each.
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
      Consumer(p, shared).Run();
    }
  }
};

}  // namespace jax_attn
