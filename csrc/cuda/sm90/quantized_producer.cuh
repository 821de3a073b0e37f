// Keys and values of codes on the loop of wgmma: they stay codes in memory and on their way, and
// the consumers find 16-bit ones.
//
// Two warpgroups produce, one K and one V. Each of their warps copies its rows of a step into a
// ring of codes and converts them to the slots that the consumers read once later steps are on
// their way. It reads only codes that it copied, so nobody has to be told when they may be
// overwritten. Two, because a conversion is a
// chain of latencies: one warp a scheduler would wait for its own.
#pragma once

#include "cuda/common/codec.cuh"
#include "cuda/common/quantized_rows.cuh"
#include "cuda/sm90/fp8_matmul.cuh"
#include "cuda/sm90/pipeline.cuh"

namespace jax_attn {

template <class Traits>
struct HopperShape;
template <class Traits>
class HopperProducer;

// With values of more than 192 columns a consumer needs more registers than 512 threads have.
template <class Traits>
inline constexpr bool kTwoConvert =
    Traits::kKvFormat != kPlainFormat && !Traits::kMultipliesCodes && Traits::kHeadDimVo <= 192;
// Whether rows have scales of their own behind their codes, so that they begin anywhere in a vector
// of 16 bytes. Others are copied as if they were 16-bit rows of half as many columns.
template <class Traits>
inline constexpr bool kHasCodeRows = Traits::kKvFormat > kE5m2Format;
// Bytes of a head's row of keys or values in memory.
template <class Traits, int kHeadDim>
inline constexpr int kKvRowBytes = static_cast<int>(
    Traits::kKvFormat == kPlainFormat ? kHeadDim * 2 : CodeRowBytes(Traits::kKvFormat, kHeadDim));

// --- shared memory ---

// Rows of codes, 128 a block; two are a column of 16 bits.
template <class Traits, int kStep>
struct CodeTiles {
  using K = SwizzledTile<Traits::kHeadDimQk / 2, kStep>;
  using V = SwizzledTile<Traits::kHeadDimVo / 2, kStep>;
  static constexpr int kSlotBytes = K::kBytes + V::kBytes;
};
// Of values alone.
template <class Traits, int kStep>
struct ValueCodeTiles {
  using V = SwizzledTile<Traits::kHeadDimVo / 2, kStep>;
  static constexpr int kSlotBytes = V::kBytes;
};

// Rows with scales of their own, in vectors that hold them.
template <class Traits, int kTokens>
struct CodeRowTiles {
  template <int kHeadDim>
  struct Tile {
    using Layout = CodeRowLayout<Traits::kKvFormat, kHeadDim>;
    static constexpr int kBytes = kTokens * Layout::kPitch;
  };
  using K = Tile<Traits::kHeadDimQk>;
  using V = Tile<Traits::kHeadDimVo>;
  static constexpr int kSlotBytes = K::kBytes + V::kBytes;
};

inline constexpr int kMaxCodeSlots = 4;

template <class Codes, int kSlots>
struct CodeRings {
  alignas(1024) unsigned char k_codes[kSlots][Codes::K::kBytes];
  alignas(1024) unsigned char v_codes[kSlots][Codes::V::kBytes];
};
template <class Codes>
struct CodeRings<Codes, 0> {};
template <class Traits, int kStep, int kSlots>
struct CodeRings<ValueCodeTiles<Traits, kStep>, kSlots> {
  alignas(1024) unsigned char v_codes[kSlots][ValueCodeTiles<Traits, kStep>::V::kBytes];
};

template <bool kHasCodes>
struct CodeBarriers {
  u64 full_k_codes[kMaxCodeSlots], full_v_codes[kMaxCodeSlots];
};
template <>
struct CodeBarriers<false> {};

// --- conversion ---

// Converts a warp's rows of tiles, kNumRows from first_row on, columns of padding included. Eight
// rows of 64 columns at a time: a lane has 16 of them, and the rows of eight neighbouring lanes,
// which shared memory serves at once, are such that they meet in no bank, neither here nor there.
template <class Traits, int kNumRows>
class RowConverter {
 public:
  __device__ __forceinline__ RowConverter(int first_row, int lane) {
    const int row = lane / 8 ^ lane / 4 % 2 * 5, chunk = lane % 4;
    from_ = (first_row + row) * 128 + (chunk ^ row) * 16;
    to_ = (first_row + row) * 128 + (2 * chunk ^ row) * 16;
  }

  template <class Tile, class Codes>
  __device__ __forceinline__ void Convert(const unsigned char* codes, unsigned char* tile) const {
    // Of 16 codes in the left or right half of a block, and of the two times 8 elements they
    // become.
    const unsigned char* const from[2] = {codes + from_, codes + (from_ ^ 4 * 16)};
    unsigned char* const to[2] = {tile + to_, tile + (to_ ^ 16)};
    // Codes are loaded ahead of the stores, which the compiler would keep them behind.
    constexpr int kBlocks = Tile::kBlocks, kUnits = kNumRows / 8 * kBlocks;
    constexpr int kBatch = PowerOfTwoDivisor(kUnits, 2);
    uint4 batches[2][kBatch];
    auto load = [&](int first) {
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        const int block = (first + u) % kBlocks, eight = (first + u) / kBlocks;
        batches[first / kBatch % 2][u] = *reinterpret_cast<const uint4*>(
            from[block % 2] + block / 2 * Codes::kBlockBytes + eight * 1024);
      }
    };
    load(0);
#pragma unroll
    for (int first = 0; first < kUnits; first += kBatch) {
      if (first + kBatch < kUnits) load(first + kBatch);
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        const int block = (first + u) % kBlocks, eight = (first + u) / kBlocks;
        const uint4 x = batches[first / kBatch % 2][u];
        const u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          *reinterpret_cast<uint4*>(to[i] + block * Tile::kBlockBytes + eight * 1024) =
              DecodeFloat8<Traits>(words[2 * i], words[2 * i + 1]);
        }
      }
    }
  }

 private:
  int from_, to_;  // bytes from the begin of a tile
};

// The same of rows with scales of their own. kNumRows: of a part of a step. A lane has the same
// vectors of all its rows, so that places are found once; a row has a power of two of lanes.
template <class Traits, int kNumRows>
class CodeRowConverter {
 public:
  __device__ __forceinline__ CodeRowConverter(int warp, int lane) : warp_(warp), lane_(lane) {}

  // Rows [first_row, first_row + kNumRows) of the tile from the warp's rows of codes; first_row: a
  // multiple of 8; kv_head: of these, or what it leaves by 16.
  template <int kHeadDim, class Tile>
  __device__ __forceinline__ void Convert(const AttentionParams& p, const unsigned char* codes,
                                          unsigned char* tile, int first_row, int kv_head) const {
    using Layout = CodeRowLayout<Traits::kKvFormat, kHeadDim>;
    using Unit = CodeUnit<Traits, kHeadDim>;
    constexpr int kLanes = PowerOfTwoFrom(Unit::kUnits), kRows = kWarpSize / kLanes;
    static_assert(kRows > 0 && kNumRows % kRows == 0, "a warp has whole rows at once");
    const CodeRowOffsets<Layout> offsets(p, kv_head);
    const int row = lane_ / kLanes, unit = lane_ % kLanes;
    const unsigned char* from = codes + (warp_ * kNumRows + row) * Layout::kPitch;
    u32 to[Unit::kVectors];
#pragma unroll
    for (int v = 0; v < Unit::kVectors; ++v) {
      to[v] = Offset<Tile>(first_row + row, Unit::Place(unit, v));
    }
    // Codes are loaded ahead of the stores, which the compiler would keep them behind.
    constexpr int kTimes = kNumRows / kRows;
    constexpr int kBatch = PowerOfTwoDivisor(kTimes, 4 / Unit::kVectors);
    Unit batches[2][kBatch];
    auto load = [&](int first) {
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        const int down = (first + u) * kRows;
        batches[first / kBatch % 2][u] =
            Unit(from + down * Layout::kPitch + offsets.At(first_row + row + down), unit);
      }
    };
    if (kLanes == Unit::kUnits || unit < Unit::kUnits) {
      load(0);
#pragma unroll
      for (int first = 0; first < kTimes; first += kBatch) {
        if (first + kBatch < kTimes) load(first + kBatch);
#pragma unroll
        for (int u = 0; u < kBatch; ++u) {
          const int down = (first + u) * kRows;
          typename Unit::Vectors vectors;
          batches[first / kBatch % 2][u].Decode(vectors);
#pragma unroll
          for (int v = 0; v < Unit::kVectors; ++v) {
            *reinterpret_cast<uint4*>(tile + (to[v] ^ down % 8 * 16) + down * 128) = vectors[v];
          }
        }
      }
    }
    if constexpr (Tile::kLiveChunks < 8 * Tile::kBlocks) {  // padding
      constexpr int kChunks = 8 * Tile::kBlocks - Tile::kLiveChunks;
      for (int i = lane_; i < kNumRows * kChunks; i += kWarpSize) {
        const u32 offset = Offset<Tile>(first_row + i / kChunks, Tile::kLiveChunks + i % kChunks);
        *reinterpret_cast<uint4*>(tile + offset) = make_uint4(0, 0, 0, 0);
      }
    }
  }

 private:
  // Bytes from the begin of a tile to a row's i-th vector.
  template <class Tile>
  __device__ static u32 Offset(u32 row, u32 i) {
    return i / 8 * Tile::kBlockBytes + row * 128 + (i % 8 ^ row % 8) * 16;
  }

  int warp_, lane_;
};

// --- producer ---

template <class Traits>
class E4m3Producer : public HopperProducer<Traits> {
 public:
  using Base = HopperProducer<Traits>;

  __device__ __forceinline__ E4m3Producer(const AttentionParams& p, typename Base::Shared& shared)
      : Base(p, shared),
        converter_(
            kHasCodeRows<Traits> ? Base::Warp() : Base::Warp() * HopperShape<Traits>::kWarpTokens,
            Base::Lane()) {}

  __device__ __forceinline__ void Run(int begin, int end) {
    this->Start(begin, end);
    RunHalves(begin);
    this->Finish();
  }

 private:
  using Shape = HopperShape<Traits>;
  using Codes = typename Shape::Codes;
  using Base::p_;
  using Base::shared_;
  using Base::steps_;

  __device__ __forceinline__ void RunHalves(int begin) {
    auto& b = this->Barriers();
    if constexpr (Traits::kMultipliesCodes) {
      for (unsigned char (&tile)[Shape::V::kBytes] : shared_.v) {
        Converter::AddSumColumns(tile, threadIdx.x);
      }
      FenceSharedForWgmma();
      CopiedKeys k;
      Half<Traits::kHeadDimVo, typename Shape::V, typename Codes::V> v = {
          b.full_v_codes, b.full_v,       b.empty_v, shared_.v_codes[0],
          shared_.v[0],   this->pools_.v, p_.v_map};
      TakeTurns(begin, v, k);
    } else {
      RunConverted(begin, b);
    }
  }

  template <class Barriers>
  __device__ __forceinline__ void RunConverted(int begin, Barriers& b) {
    Half<Traits::kHeadDimQk, typename Shape::K, typename Codes::K> k = {
        b.full_k_codes, b.full_k,       b.empty_k, shared_.k_codes[0],
        shared_.k[0],   this->pools_.k, p_.k_map};
    Half<Traits::kHeadDimVo, typename Shape::V, typename Codes::V> v = {
        b.full_v_codes, b.full_v,       b.empty_v, shared_.v_codes[0],
        shared_.v[0],   this->pools_.v, p_.v_map};
    if constexpr (!kTwoConvert<Traits>) {
      TakeTurns(begin, k, v);
    } else {
      const bool is_v = Uniform(threadIdx.x / 128) != 0;
      if constexpr (Traits::kHeadDimQk == Traits::kHeadDimVo) {  // one piece of code for both
        decltype(k) mine = {is_v ? v.full_codes : k.full_codes,
                            is_v ? v.full : k.full,
                            is_v ? v.empty : k.empty,
                            is_v ? v.codes : k.codes,
                            is_v ? v.tiles : k.tiles,
                            is_v ? v.pool : k.pool,
                            is_v ? v.map : k.map};
        TakeTurns(begin, mine);
      } else if (is_v) {
        TakeTurns(begin, v);
      } else {
        TakeTurns(begin, k);
      }
    }
  }

  // K or V: its barriers, the first slots of its rings, and where its rows are.
  template <int kDim, class TileType, class CodeTileType>
  struct Half {
    static constexpr int kHeadDim = kDim;
    using Tile = TileType;
    using CodeTile = CodeTileType;
    const u64 *full_codes, *full, *empty;
    unsigned char *codes, *tiles;
    const char* pool;
    const TensorMap& map;
    RingCursor<Shape::kCodeSlots> copied = {};
  };
  // K that is multiplied as it comes: its copies go to the slots at once.
  struct CopiedKeys {};

  // A turn takes a step, or of rows with scales of their own a part of one, from codes to 16 bits,
  // and fills its place with what is kCodeSlots ahead; the first turns only fill, the last only
  // take. q of an item goes ahead of its first rows: consumers that pass an item rely on it that
  // what they wait for next, q, comes behind all rows before it (HopperConsumer::Pass).
  template <class... Halves>
  __device__ __forceinline__ void TakeTurns(int begin, Halves&... halves) {
    int num_codes = 0;                // turns' codes on their way or there
    u32 begins_item = 0, fences = 0;  // of them, a bit each, the first one's the lowest
    u32 heads = 0;                    // four bits each, of kv heads
    int q_index = begin;              // of the item whose q came last
    u32 row = kNoRow;
    int head = 0;
    int copied = 0, converted = 0;  // parts of a step
    while (true) {
      while (steps_.has_item() && !steps_.has_step()) steps_.Next();
      if constexpr (!Traits::kMultipliesCodes) {  // whose consumers take longer
        if (num_codes == Shape::kCodeSlots && converted == 0 && begins_item == 0 &&
            steps_.has_item() && !steps_.is_first()) {
          head = this->Head(steps_.item());
          TakeStepsOfItem((fences & 1) != 0, row, head, halves...);
        }
      }
      const bool copies = steps_.has_item();
      const bool converts = num_codes == Shape::kCodeSlots || !copies;
      if (converts && num_codes == 0) break;
      if (kParts == 1) {
        row = kNoRow;
        head = 0;
      }
      const int part = copied;
      if (copies) {
        if (part == 0) {
          head = this->Head(steps_.item());
          row = steps_.Row();
        }
        begins_item |= u32{part == 0 && steps_.index() > begin && steps_.is_first()} << num_codes;
        fences |= u32{(head & Base::kByBoxes) != 0} << num_codes;
        if constexpr (kHasCodeRows<Traits>) heads |= (head & 15u) << 4 * num_codes;
        ++num_codes;
        if (kParts == 1 || ++copied == kParts) {
          steps_.Next();
          copied = 0;
        }
      }
      if (converts && (begins_item & 1) != 0) {
        do ++q_index;
        while (ItemRecord(p_, q_index).kv_begin() >= ItemRecord(p_, q_index).kv_end());
        this->LoadQ(ItemRecord(p_, q_index));
      }
      if constexpr (kHasCodeRows<Traits>) {
        (TurnOfRows(halves, converts, converted, static_cast<int>(heads & 15), copies, part, row,
                    head),
         ...);
      } else {
        (Turn(halves, converts, (fences & 1) != 0, copies, row, head), ...);
      }
      if (converts) {
        begins_item >>= 1;
        fences >>= 1;
        heads >>= 4;
        --num_codes;
        codes_.Advance();
        if (kParts == 1 || ++converted == kParts) {
          slots_.Advance();
          converted = 0;
        }
      }
    }
  }

  // The turns of whole steps up to the item's last, where all codes on their way are the item's,
  // too. Nothing but places changes from step to step. To ask what does took a producer a quarter
  // of its time.
  template <class... Halves>
  __device__ __forceinline__ void TakeStepsOfItem(bool is_fenced, u32& row, int head,
                                                  Halves&... halves) {
#pragma unroll 1
    for (int n = steps_.NumLeft() - 1; n > 0; --n) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const int copied = (part + Shape::kCodeSlots) % kParts;
        if (copied == 0) row = steps_.Row();
        if constexpr (kHasCodeRows<Traits>) {
          (TurnOfRows(halves, true, part, head & 15, true, copied, row, head), ...);
        } else {
          (Turn(halves, true, is_fenced, true, row, head), ...);
        }
        if (copied == kParts - 1) steps_.NextOfItem();
        codes_.Advance();
      }
      slots_.Advance();
    }
  }

  template <class Half>
  __device__ __forceinline__ void Turn(Half& half, bool converts, bool is_fenced, bool copies,
                                       u32 row, int head) {
    using Tile = typename Half::Tile;
    using CodeTile = typename Half::CodeTile;
    if (converts) {
      WaitBarrier(SharedAddress(half.full_codes + codes_.slot), codes_.parity);
      WaitBarrier(SharedAddress(half.empty + slots_.slot), slots_.parity ^ 1);
      converter_.template Convert<Tile, CodeTile>(half.codes + codes_.slot * CodeTile::kBytes,
                                                  half.tiles + slots_.slot * Tile::kBytes);
      // Consumers fence what they read but where they expect it from the copy engine. Not here as
      // well: the fence could wait for rows on their way.
      if (is_fenced) FenceSharedForWgmma();
      __syncwarp();
      if (Base::Lane() == 0) ArriveBarrier(SharedAddress(half.full + slots_.slot));
    }
    if (copies) {
      this->template Copy<Half::kHeadDim / 2, CodeTile>(
          half.copied, half.full_codes, half.codes + half.copied.slot * CodeTile::kBytes, half.pool,
          half.map, nullptr, half.map, row, head);
    }
  }

  template <class Half>
  __device__ __forceinline__ void TurnOfRows(Half& half, bool converts, int converted, int kv_head,
                                             bool copies, int copied, u32 row, int head) {
    using Tile = typename Half::Tile;
    using CodeTile = typename Half::CodeTile;
    if (converts) {
      WaitBarrier(SharedAddress(half.full_codes + codes_.slot), codes_.parity);
      if (converted == 0) WaitBarrier(SharedAddress(half.empty + slots_.slot), slots_.parity ^ 1);
      converter_.template Convert<Half::kHeadDim, Tile>(
          p_, half.codes + codes_.slot * CodeTile::kBytes, half.tiles + slots_.slot * Tile::kBytes,
          Base::Warp() * Shape::kWarpTokens + converted * kPartTokens, kv_head);
      __syncwarp();
      if (converted == kParts - 1 && Base::Lane() == 0) {
        ArriveBarrier(SharedAddress(half.full + slots_.slot));
      }
    }
    if (copies) {
      CopyCodeRows<Half::kHeadDim>(half.codes + half.copied.slot * CodeTile::kBytes, half.pool,
                                   copied * kPartTokens, row, head);
      ArriveBarrierAfterCopies(SharedAddress(half.full_codes + half.copied.slot));
      half.copied.Advance();
    }
  }

  // The vectors that hold kPartTokens of this warp's rows, from the first_row-th on: neighbouring
  // lanes copy neighbouring vectors.
  template <int kHeadDim>
  __device__ __forceinline__ void CopyCodeRows(unsigned char* codes, const char* pool,
                                               int first_row, u32 row, int head) const {
    using Layout = CodeRowLayout<Traits::kKvFormat, kHeadDim>;
    constexpr int kVectors = kPartTokens * Layout::kChunks;
    const u32 to = SharedAddress(codes) + Base::Warp() * kPartTokens * Layout::kPitch;
    const char* from_head = pool + (head & Base::kHead) * Layout::kRowBytes;
    const u32 pitch = static_cast<u32>(p_.num_kv_heads) * Layout::kRowBytes;
    const u64 policy = (head & Base::kReadAgain) != 0 ? EvictNormal() : EvictFirst();
    const u32 live = __ballot_sync(kFullWarp, row != kNoRow) >> first_row;  // tokens, a bit each
    // Of rows of a page the place of one says all.
    u64 runs[kPageRuns > 0 ? kPageRuns : 1];
#pragma unroll
    for (int r = 0; r < kPageRuns; ++r) {
      const u32 of_run = live >> r * kRunTokens;
      const int some = of_run == 0 ? 0 : __ffs(of_run) - 1;
      const u32 some_row =
          __shfl_sync(kFullWarp, row, (first_row + r * kRunTokens + some) % kWarpSize);
      runs[r] = reinterpret_cast<u64>(from_head) +
                (static_cast<u64>(some_row) - (r * kRunTokens + some)) * pitch;
    }
#pragma unroll
    for (int first = 0; first < kVectors; first += kWarpSize) {
      const int token = (first + Base::Lane()) / Layout::kChunks;
      const int chunk = (first + Base::Lane()) % Layout::kChunks;
      u64 at;
      if constexpr (kPageRuns > 0) {
        at = runs[token < kRunTokens ? 0 : kPageRuns - 1] +
             static_cast<u64>(static_cast<u32>(token)) * pitch;
      } else {
        const u32 token_row = __shfl_sync(kFullWarp, row, (first_row + token) % kWarpSize);
        at = reinterpret_cast<u64>(from_head) + static_cast<u64>(token_row) * pitch;
      }
      const char* from = reinterpret_cast<const char*>(at / 16 * 16) + chunk * 16;
      // The address of a copy that reads nothing still is one of the pool.
      const bool valid = (live >> token & 1) != 0 && Layout::Holds(at, chunk);
      if (kVectors % kWarpSize == 0 || token < kPartTokens) {
        CopyAsync16(to + token * Layout::kPitch + chunk * 16, valid ? from : pool, valid, policy);
      }
    }
  }

  // Waits for a slot that consumers give back once they have V of the steps before it, which is
  // there: the ring of K is no shorter than that of codes.
  __device__ __forceinline__ void Turn(CopiedKeys&, bool, bool, bool copies, u32 row, int head) {
    if (!copies) return;
    this->template Fill<Traits::kHeadDimQk / 2, typename Shape::K>(
        this->k_cursor_, this->Barriers().full_k, this->Barriers().empty_k,
        shared_.k[this->k_cursor_.slot], this->pools_.k, p_.k_map, nullptr, p_.k_map, row, head);
  }

  // What a turn has of a step, of a warp's rows.
  static constexpr int kParts = Shape::kCodeParts;
  static constexpr int kPartTokens = Shape::kWarpTokens / kParts;
  // Pages that a part is of, one or two, and tokens of each; 0: more, or any.
  static constexpr int kRunTokens = Min(kPartTokens, Shape::kPageSize);
  static constexpr int kPageRuns = Traits::kHasSteps || kRunTokens == 0  ? 0
                                   : Shape::kPageSize % kPartTokens == 0 ? 1
                                   : kPartTokens == 2 * Shape::kPageSize ? 2
                                                                         : 0;

  using ToTiles = typename Choose<kHasCodeRows<Traits>, CodeRowConverter<Traits, kPartTokens>,
                                  RowConverter<Traits, Shape::kWarpTokens>>::Type;
  using Converter = typename Choose<Traits::kMultipliesCodes,
                                    ValueTransposer<Traits, Shape::kWarpTokens>, ToTiles>::Type;
  Converter converter_;
  RingCursor<Shape::kCodeSlots> codes_;
  RingCursor<Shape::kSlots> slots_;
};

}  // namespace jax_attn
