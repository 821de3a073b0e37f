// The producer of quantized keys and values: they are quantized in memory and on their way, and
// consumers find 16-bit ones in shared memory.
//
// Two warpgroups produce, one K and one V. Each warp copies its rows of a step into a ring of
// quantized slots. Once later steps are on their way, it converts the rows to the slots that
// consumers read. A warp converts only rows that it copied itself, so no barrier says when a
// quantized slot may be overwritten. Two warpgroups, because a conversion is a chain of latencies:
// one warp a scheduler would wait for its own.
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

// Whether two warpgroups convert. With values of more than 192 columns a consumer needs more
// registers than 512 threads leave.
template <class Traits>
inline constexpr bool kTwoConvert =
    Traits::kKvFormat != kPlainFormat && !Traits::kFp8Matmul && Traits::kHeadDimVo <= 192;
// Whether rows carry their own scales behind their values. Such rows begin anywhere in a vector of
// 16 bytes. Other quantized rows are copied like 16-bit rows of half as many columns.
template <class Traits>
inline constexpr bool kHasRowScales = Traits::kKvFormat > kE5m2Format;
// Bytes of one head's row of keys or values in memory.
template <class Traits, int kHeadDim>
inline constexpr int kKvRowBytes =
    static_cast<int>(Traits::kKvFormat == kPlainFormat
                         ? kHeadDim * 2
                         : QuantizedRowBytes(Traits::kKvFormat, kHeadDim));

// --- shared memory ---

// A slot of quantized rows, 128 bytes a block. Two values are a 16-bit column.
template <class Traits, int kStep>
struct QuantizedTiles {
  using K = SwizzledTile<Traits::kHeadDimQk / 2, kStep>;
  using V = SwizzledTile<Traits::kHeadDimVo / 2, kStep>;
  static constexpr int kSlotBytes = K::kBytes + V::kBytes;
};
// A slot of V alone.
template <class Traits, int kStep>
struct QuantizedValueTiles {
  using V = SwizzledTile<Traits::kHeadDimVo / 2, kStep>;
  static constexpr int kSlotBytes = V::kBytes;
};

// A slot of rows with their own scales, in the 16-byte vectors that hold them.
template <class Traits, int kTokens>
struct QuantizedRowTiles {
  template <int kHeadDim>
  struct Tile {
    using Layout = QuantizedRowLayout<Traits::kKvFormat, kHeadDim>;
    static constexpr int kBytes = kTokens * Layout::kPitch;
  };
  using K = Tile<Traits::kHeadDimQk>;
  using V = Tile<Traits::kHeadDimVo>;
  static constexpr int kSlotBytes = K::kBytes + V::kBytes;
};

inline constexpr int kMaxQuantizedSlots = 4;

template <class Quantized, int kSlots>
struct QuantizedRings {
  alignas(1024) unsigned char k_quantized[kSlots][Quantized::K::kBytes];
  alignas(1024) unsigned char v_quantized[kSlots][Quantized::V::kBytes];
};
template <class Quantized>
struct QuantizedRings<Quantized, 0> {};
template <class Traits, int kStep, int kSlots>
struct QuantizedRings<QuantizedValueTiles<Traits, kStep>, kSlots> {
  alignas(1024) unsigned char v_quantized[kSlots][QuantizedValueTiles<Traits, kStep>::V::kBytes];
};

template <bool kIsQuantized>
struct QuantizedBarriers {
  u64 full_k_quantized[kMaxQuantizedSlots], full_v_quantized[kMaxQuantizedSlots];
};
template <>
struct QuantizedBarriers<false> {};

// --- conversion ---

// Converts a warp's rows of float8 tiles, kNumRows from first_row on, padding columns included.
// Eight rows of 64 columns at a time: a lane has 16 values. Shared memory serves eight neighbouring
// lanes at once; their rows are chosen so that reads and writes hit different banks.
template <class Traits, int kNumRows>
class Float8Dequantizer {
 public:
  __device__ __forceinline__ Float8Dequantizer(int first_row, int lane) {
    const int row = lane / 8 ^ lane / 4 % 2 * 5, chunk = lane % 4;
    from_ = (first_row + row) * 128 + (chunk ^ row) * 16;
    to_ = (first_row + row) * 128 + (2 * chunk ^ row) * 16;
  }

  template <class Tile, class Quantized>
  __device__ __forceinline__ void Convert(const unsigned char* quantized,
                                          unsigned char* tile) const {
    // Source: 16 values in the left or right half of a block. Destination: two vectors of 8
    // elements.
    const unsigned char* const from[2] = {quantized + from_, quantized + (from_ ^ 4 * 16)};
    unsigned char* const to[2] = {tile + to_, tile + (to_ ^ 16)};
    // Loads are issued ahead of the stores; the compiler would keep them behind.
    constexpr int kBlocks = Tile::kBlocks, kUnits = kNumRows / 8 * kBlocks;
    constexpr int kBatch = PowerOfTwoDivisor(kUnits, 2);
    uint4 batches[2][kBatch];
    auto load = [&](int first) {
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        const int block = (first + u) % kBlocks, eight = (first + u) / kBlocks;
        batches[first / kBatch % 2][u] = *reinterpret_cast<const uint4*>(
            from[block % 2] + block / 2 * Quantized::kBlockBytes + eight * 1024);
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
              DequantizeFloat8<Traits>(words[2 * i], words[2 * i + 1]);
        }
      }
    }
  }

 private:
  int from_, to_;  // bytes from the beginning of a tile
};

// The same for rows with scales of their own. kNumRows: rows in a part of a step. A lane handles
// the same vectors in all of its rows, so offsets are computed once. A power of two of lanes has a
// row.
template <class Traits, int kNumRows>
class RowDequantizer {
 public:
  __device__ __forceinline__ RowDequantizer(int warp, int lane) : warp_(warp), lane_(lane) {}

  // Converts the warp's quantized rows to rows [first_row, first_row + kNumRows) of the tile.
  // first_row: a multiple of 8. kv_head: the head, or the head modulo 16.
  template <int kHeadDim, class Tile>
  __device__ __forceinline__ void Convert(const AttentionParams& p, const unsigned char* quantized,
                                          unsigned char* tile, int first_row, int kv_head) const {
    using Layout = QuantizedRowLayout<Traits::kKvFormat, kHeadDim>;
    using Unit = QuantizedUnit<Traits, kHeadDim>;
    constexpr int kLanes = PowerOfTwoFrom(Unit::kUnits), kRows = kWarpSize / kLanes;
    static_assert(kRows > 0 && kNumRows % kRows == 0, "a warp has whole rows at once");
    const QuantizedRowOffsets<Layout> offsets(p, kv_head);
    const int row = lane_ / kLanes, unit = lane_ % kLanes;
    const unsigned char* from = quantized + (warp_ * kNumRows + row) * Layout::kPitch;
    u32 to[Unit::kVectors];
#pragma unroll
    for (int v = 0; v < Unit::kVectors; ++v) {
      to[v] = Offset<Tile>(first_row + row, Unit::VectorIndex(unit, v));
    }
    // Loads are issued ahead of the stores; the compiler would keep them behind.
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
          batches[first / kBatch % 2][u].Dequantize(vectors);
#pragma unroll
          for (int v = 0; v < Unit::kVectors; ++v) {
            *reinterpret_cast<uint4*>(tile + (to[v] ^ down % 8 * 16) + down * 128) = vectors[v];
          }
        }
      }
    }
    if constexpr (Tile::kLiveChunks < 8 * Tile::kBlocks) {  // zeros in padding columns
      constexpr int kChunks = 8 * Tile::kBlocks - Tile::kLiveChunks;
      for (int i = lane_; i < kNumRows * kChunks; i += kWarpSize) {
        const u32 offset = Offset<Tile>(first_row + i / kChunks, Tile::kLiveChunks + i % kChunks);
        *reinterpret_cast<uint4*>(tile + offset) = make_uint4(0, 0, 0, 0);
      }
    }
  }

 private:
  // Byte offset in a tile of a row's i-th vector.
  template <class Tile>
  __device__ static u32 Offset(u32 row, u32 i) {
    return i / 8 * Tile::kBlockBytes + row * 128 + (i % 8 ^ row % 8) * 16;
  }

  int warp_, lane_;
};

// --- producer ---

template <class Traits>
class QuantizedProducer : public HopperProducer<Traits> {
 public:
  using Base = HopperProducer<Traits>;

  __device__ __forceinline__ QuantizedProducer(const AttentionParams& p,
                                               typename Base::Shared& shared)
      : Base(p, shared),
        converter_(
            kHasRowScales<Traits> ? Base::Warp() : Base::Warp() * HopperShape<Traits>::kWarpTokens,
            Base::Lane()) {}

  __device__ __forceinline__ void Run(int begin, int end) {
    this->Start(begin, end);
    RunHalves(begin);
    this->Finish();
  }

 private:
  using Shape = HopperShape<Traits>;
  using Quantized = typename Shape::Quantized;
  using Base::p_;
  using Base::shared_;
  using Base::steps_;

  __device__ __forceinline__ void RunHalves(int begin) {
    auto& b = this->Barriers();
    if constexpr (Traits::kFp8Matmul) {
      for (unsigned char (&tile)[Shape::V::kBytes] : shared_.v) {
        Converter::AddSumColumns(tile, threadIdx.x);
      }
      FenceSharedForWgmma();
      CopiedKeys k;
      Half<Traits::kHeadDimVo, typename Shape::V, typename Quantized::V> v = {
          b.full_v_quantized, b.full_v,       b.empty_v, shared_.v_quantized[0],
          shared_.v[0],       this->pools_.v, p_.v_map};
      RunPipeline(begin, v, k);
    } else {
      RunConverted(begin, b);
    }
  }

  template <class Barriers>
  __device__ __forceinline__ void RunConverted(int begin, Barriers& b) {
    Half<Traits::kHeadDimQk, typename Shape::K, typename Quantized::K> k = {
        b.full_k_quantized, b.full_k,       b.empty_k, shared_.k_quantized[0],
        shared_.k[0],       this->pools_.k, p_.k_map};
    Half<Traits::kHeadDimVo, typename Shape::V, typename Quantized::V> v = {
        b.full_v_quantized, b.full_v,       b.empty_v, shared_.v_quantized[0],
        shared_.v[0],       this->pools_.v, p_.v_map};
    if constexpr (!kTwoConvert<Traits>) {
      RunPipeline(begin, k, v);
    } else {
      const bool is_v = Uniform(threadIdx.x / 128) != 0;
      if constexpr (Traits::kHeadDimQk == Traits::kHeadDimVo) {  // one copy of the code for both
        decltype(k) mine = {is_v ? v.full_quantized : k.full_quantized,
                            is_v ? v.full : k.full,
                            is_v ? v.empty : k.empty,
                            is_v ? v.quantized : k.quantized,
                            is_v ? v.tiles : k.tiles,
                            is_v ? v.pool : k.pool,
                            is_v ? v.map : k.map};
        RunPipeline(begin, mine);
      } else if (is_v) {
        RunPipeline(begin, v);
      } else {
        RunPipeline(begin, k);
      }
    }
  }

  // K or V: its barriers, the first slots of its rings, and its pool.
  template <int kDim, class TileType, class QuantizedTileType>
  struct Half {
    static constexpr int kHeadDim = kDim;
    using Tile = TileType;
    using QuantizedTile = QuantizedTileType;
    const u64 *full_quantized, *full, *empty;
    unsigned char *quantized, *tiles;
    const char* pool;
    const TensorMap& map;
    RingCursor<Shape::kQuantizedSlots> copied = {};
  };
  // K that is multiplied as e4m3: it is copied to its slots directly.
  struct CopiedKeys {};

  // Each iteration converts one step, or one part of a step of rows with their own scales, and
  // copies the one that is kQuantizedSlots ahead into the freed slot. The first iterations only
  // copy, the last ones only convert. q of an item is copied ahead of its first rows: consumers
  // that skip an item rely on it that q, their next wait, comes behind all rows before it
  // (HopperConsumer::Pass).
  template <class... Halves>
  __device__ __forceinline__ void RunPipeline(int begin, Halves&... halves) {
    int num_quantized = 0;            // parts whose quantized rows are there or on their way
    u32 begins_item = 0, fences = 0;  // one bit for each of them, the oldest one's the lowest
    u32 heads = 0;                    // kv head of each of them, four bits each
    int q_index = begin;              // the item whose q was copied last
    u32 row = kNoRow;
    int head = 0;
    int copied = 0, converted = 0;  // parts of a step
    while (true) {
      while (steps_.has_item() && !steps_.has_step()) steps_.Next();
      if constexpr (!Traits::kFp8Matmul) {  // FP8: consumers take longer, no fast path is
                                            // needed
        if (num_quantized == Shape::kQuantizedSlots && converted == 0 && begins_item == 0 &&
            steps_.has_item() && !steps_.is_first()) {
          head = this->Head(steps_.item());
          RunStepsOfItem((fences & 1) != 0, row, head, halves...);
        }
      }
      const bool copies = steps_.has_item();
      const bool converts = num_quantized == Shape::kQuantizedSlots || !copies;
      if (converts && num_quantized == 0) break;
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
        begins_item |= u32{part == 0 && steps_.index() > begin && steps_.is_first()}
                       << num_quantized;
        fences |= u32{(head & Base::kByTma) != 0} << num_quantized;
        if constexpr (kHasRowScales<Traits>) heads |= (head & 15u) << 4 * num_quantized;
        ++num_quantized;
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
      if constexpr (kHasRowScales<Traits>) {
        (ConvertAndCopyRows(halves, converts, converted, static_cast<int>(heads & 15), copies, part,
                            row, head),
         ...);
      } else {
        (ConvertAndCopy(halves, converts, (fences & 1) != 0, copies, row, head), ...);
      }
      if (converts) {
        begins_item >>= 1;
        fences >>= 1;
        heads >>= 4;
        --num_quantized;
        quantized_cursor_.Advance();
        if (kParts == 1 || ++converted == kParts) {
          slot_cursor_.Advance();
          converted = 0;
        }
      }
    }
  }

  // Runs whole steps up to the item's last one, where all quantized rows on their way are also the
  // item's. Only slots change from step to step. Testing what changes took a producer a quarter of
  // its time.
  template <class... Halves>
  __device__ __forceinline__ void RunStepsOfItem(bool is_fenced, u32& row, int head,
                                                 Halves&... halves) {
#pragma unroll 1
    for (int n = steps_.NumLeft() - 1; n > 0; --n) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const int copied = (part + Shape::kQuantizedSlots) % kParts;
        if (copied == 0) row = steps_.Row();
        if constexpr (kHasRowScales<Traits>) {
          (ConvertAndCopyRows(halves, true, part, head & 15, true, copied, row, head), ...);
        } else {
          (ConvertAndCopy(halves, true, is_fenced, true, row, head), ...);
        }
        if (copied == kParts - 1) steps_.NextOfItem();
        quantized_cursor_.Advance();
      }
      slot_cursor_.Advance();
    }
  }

  template <class Half>
  __device__ __forceinline__ void ConvertAndCopy(Half& half, bool converts, bool is_fenced,
                                                 bool copies, u32 row, int head) {
    using Tile = typename Half::Tile;
    using QuantizedTile = typename Half::QuantizedTile;
    if (converts) {
      WaitBarrier(SharedAddress(half.full_quantized + quantized_cursor_.slot),
                  quantized_cursor_.parity);
      WaitBarrier(SharedAddress(half.empty + slot_cursor_.slot), slot_cursor_.parity ^ 1);
      converter_.template Convert<Tile, QuantizedTile>(
          half.quantized + quantized_cursor_.slot * QuantizedTile::kBytes,
          half.tiles + slot_cursor_.slot * Tile::kBytes);
      // Consumers fence what they read, unless they expect it from TMA. The fence is not issued
      // twice: it could wait for rows on their way.
      if (is_fenced) FenceSharedForWgmma();
      __syncwarp();
      if (Base::Lane() == 0) ArriveBarrier(SharedAddress(half.full + slot_cursor_.slot));
    }
    if (copies) {
      this->template Copy<Half::kHeadDim / 2, QuantizedTile>(
          half.copied, half.full_quantized,
          half.quantized + half.copied.slot * QuantizedTile::kBytes, half.pool, half.map, nullptr,
          half.map, row, head);
    }
  }

  template <class Half>
  __device__ __forceinline__ void ConvertAndCopyRows(Half& half, bool converts, int converted,
                                                     int kv_head, bool copies, int copied, u32 row,
                                                     int head) {
    using Tile = typename Half::Tile;
    using QuantizedTile = typename Half::QuantizedTile;
    if (converts) {
      WaitBarrier(SharedAddress(half.full_quantized + quantized_cursor_.slot),
                  quantized_cursor_.parity);
      if (converted == 0)
        WaitBarrier(SharedAddress(half.empty + slot_cursor_.slot), slot_cursor_.parity ^ 1);
      converter_.template Convert<Half::kHeadDim, Tile>(
          p_, half.quantized + quantized_cursor_.slot * QuantizedTile::kBytes,
          half.tiles + slot_cursor_.slot * Tile::kBytes,
          Base::Warp() * Shape::kWarpTokens + converted * kPartTokens, kv_head);
      __syncwarp();
      if (converted == kParts - 1 && Base::Lane() == 0) {
        ArriveBarrier(SharedAddress(half.full + slot_cursor_.slot));
      }
    }
    if (copies) {
      CopyQuantizedRows<Half::kHeadDim>(half.quantized + half.copied.slot * QuantizedTile::kBytes,
                                        half.pool, copied * kPartTokens, row, head);
      ArriveBarrierAfterCopies(SharedAddress(half.full_quantized + half.copied.slot));
      half.copied.Advance();
    }
  }

  // Copies the vectors that hold kPartTokens of this warp's rows, from the first_row-th on.
  // Neighbouring lanes copy neighbouring vectors.
  template <int kHeadDim>
  __device__ __forceinline__ void CopyQuantizedRows(unsigned char* quantized, const char* pool,
                                                    int first_row, u32 row, int head) const {
    using Layout = QuantizedRowLayout<Traits::kKvFormat, kHeadDim>;
    constexpr int kVectors = kPartTokens * Layout::kChunks;
    const u32 to = SharedAddress(quantized) + Base::Warp() * kPartTokens * Layout::kPitch;
    const char* from_head = pool + (head & Base::kHead) * Layout::kRowBytes;
    const u32 pitch = static_cast<u32>(p_.num_kv_heads) * Layout::kRowBytes;
    const u64 policy = (head & Base::kReadAgain) != 0 ? EvictNormal() : EvictFirst();
    const u32 live = __ballot_sync(kFullWarp, row != kNoRow) >> first_row;  // tokens, a bit each
    // Rows of a page lie at equal distances, so the offset of one row tells all.
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
      // A copy that reads nothing still needs an address within the pool.
      const bool valid = (live >> token & 1) != 0 && Layout::Holds(at, chunk);
      if (kVectors % kWarpSize == 0 || token < kPartTokens) {
        CopyAsync16(to + token * Layout::kPitch + chunk * 16, valid ? from : pool, valid, policy);
      }
    }
  }

  // K that needs no conversion. Waits for a slot that consumers release once they have V of the
  // steps before; V is there, as the ring of K is no shorter than that of quantized V.
  __device__ __forceinline__ void ConvertAndCopy(CopiedKeys&, bool, bool, bool copies, u32 row,
                                                 int head) {
    if (!copies) return;
    this->template Fill<Traits::kHeadDimQk / 2, typename Shape::K>(
        this->k_cursor_, this->Barriers().full_k, this->Barriers().empty_k,
        shared_.k[this->k_cursor_.slot], this->pools_.k, p_.k_map, nullptr, p_.k_map, row, head);
  }

  // The part of a step, in a warp's rows, that one iteration handles.
  static constexpr int kParts = Shape::kQuantizedParts;
  static constexpr int kPartTokens = Shape::kWarpTokens / kParts;
  // Pages that a part lies in, one or two, and tokens in each. 0: in more, or in any number.
  static constexpr int kRunTokens = Min(kPartTokens, Shape::kPageSize);
  static constexpr int kPageRuns = Traits::kHasSteps || kRunTokens == 0  ? 0
                                   : Shape::kPageSize % kPartTokens == 0 ? 1
                                   : kPartTokens == 2 * Shape::kPageSize ? 2
                                                                         : 0;

  using ToTiles = typename Conditional<kHasRowScales<Traits>, RowDequantizer<Traits, kPartTokens>,
                                       Float8Dequantizer<Traits, Shape::kWarpTokens>>::Type;
  using Converter =
      typename Conditional<Traits::kFp8Matmul, ValueTransposer<Traits, Shape::kWarpTokens>,
                           ToTiles>::Type;
  Converter converter_;
  RingCursor<Shape::kQuantizedSlots> quantized_cursor_;
  RingCursor<Shape::kSlots> slot_cursor_;
};

}  // namespace jax_attn
