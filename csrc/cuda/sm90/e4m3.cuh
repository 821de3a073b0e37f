// Keys and values of e4m3 on the loop of wgmma: they stay codes in memory and on their way, and the
// consumers find 16-bit ones.
//
// Two warpgroups produce, one K and one V. Each of their warps copies its rows of a step into a
// ring of codes, as if they were 16-bit rows of half as many columns, and converts them to the
// slots that the consumers read once later steps are on their way. It reads only codes that it
// copied, so nobody has to be told when they may be overwritten. Two, because a conversion is a
// chain of latencies: one warp a scheduler would wait for its own.
#pragma once

#include "cuda/common/e4m3.cuh"
#include "cuda/sm90/e4m3_products.cuh"
#include "cuda/sm90/pipeline.cuh"

namespace jax_attn {

template <class Traits>
struct HopperShape;
template <class Traits>
class HopperProducer;

// With values of more than 192 columns a consumer needs more registers than 512 threads have.
template <class Traits>
inline constexpr bool kTwoConvert =
    Traits::kKvFormat == kE4m3Format && !Traits::kMultipliesCodes && Traits::kHeadDimVo <= 192;

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
          uint4 y;
          UnpackE4m3<Traits>(words[2 * i], y.x, y.y);
          UnpackE4m3<Traits>(words[2 * i + 1], y.z, y.w);
          *reinterpret_cast<uint4*>(to[i] + block * Tile::kBlockBytes + eight * 1024) = y;
        }
      }
    }
  }

 private:
  int from_, to_;  // bytes from the begin of a tile
};

// --- producer ---

template <class Traits>
class E4m3Producer : public HopperProducer<Traits> {
 public:
  using Base = HopperProducer<Traits>;

  __device__ __forceinline__ E4m3Producer(const AttentionParams& p, typename Base::Shared& shared)
      : Base(p, shared),
        converter_(Base::Warp() * HopperShape<Traits>::kWarpTokens, Base::Lane()) {}

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

  // A turn takes a step from codes to 16 bits, and fills its place with the step that is kCodeSlots
  // ahead; the first turns only fill, the last only take. q of an item goes ahead of its first
  // rows: consumers that pass an item rely on it that what they wait for next, q, comes behind all
  // rows before it (HopperConsumer::Pass).
  template <class... Halves>
  __device__ __forceinline__ void TakeTurns(int begin, Halves&... halves) {
    int num_codes = 0;                // steps on their way or there
    u32 begins_item = 0, fences = 0;  // of them, a bit each, the first one's the lowest
    int q_index = begin;              // of the item whose q came last
    while (true) {
      while (steps_.has_item() && !steps_.has_step()) steps_.Next();
      const bool copies = steps_.has_item();
      const bool converts = num_codes == Shape::kCodeSlots || !copies;
      if (converts && num_codes == 0) break;
      u32 row = kNoRow;
      int head = 0;
      if (copies) {
        head = this->Head(steps_.item());
        row = steps_.Row();
        begins_item |= u32{steps_.index() > begin && steps_.is_first()} << num_codes;
        fences |= u32{(head & Base::kByBoxes) != 0} << num_codes;
        ++num_codes;
        steps_.Next();
      }
      if (converts && (begins_item & 1) != 0) {
        do ++q_index;
        while (ItemRecord(p_, q_index).kv_begin() >= ItemRecord(p_, q_index).kv_end());
        this->LoadQ(ItemRecord(p_, q_index));
      }
      (Turn(halves, converts, (fences & 1) != 0, copies, row, head), ...);
      if (converts) {
        begins_item >>= 1;
        fences >>= 1;
        --num_codes;
        codes_.Advance();
        slots_.Advance();
      }
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

  // Waits for a slot that consumers give back once they have V of the steps before it, which is
  // there: the ring of K is no shorter than that of codes.
  __device__ __forceinline__ void Turn(CopiedKeys&, bool, bool, bool copies, u32 row, int head) {
    if (!copies) return;
    this->template Fill<Traits::kHeadDimQk / 2, typename Shape::K>(
        this->k_cursor_, this->Barriers().full_k, this->Barriers().empty_k,
        shared_.k[this->k_cursor_.slot], this->pools_.k, p_.k_map, nullptr, p_.k_map, row, head);
  }

  using Converter =
      typename Choose<Traits::kMultipliesCodes, ValueTransposer<Traits, Shape::kWarpTokens>,
                      RowConverter<Traits, Shape::kWarpTokens>>::Type;
  Converter converter_;
  RingCursor<Shape::kCodeSlots> codes_;
  RingCursor<Shape::kSlots> slots_;
};

}  // namespace jax_attn
