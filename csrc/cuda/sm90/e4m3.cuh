// Keys and values of e4m3 on the loop of wgmma: they stay codes in memory and on their way, and the
// consumers find 16-bit ones.
//
// Two warpgroups produce. Each of their warps copies its rows of a step into rings of codes, as if
// they were 16-bit rows of half as many columns, and converts them to the slots that the consumers
// read once later steps are on their way. It reads only codes that it copied, so nobody has to be
// told when they may be overwritten. Two, because a conversion is a chain of latencies: one warp a
// scheduler would wait for its own.
#pragma once

#include "cuda/common/e4m3.cuh"
#include "cuda/sm90/pipeline.cuh"

namespace jax_attn {

template <class Traits>
struct HopperShape;
template <class Traits>
class HopperProducer;

// With values of more than 192 columns a consumer needs more registers than 512 threads have.
template <class Traits>
inline constexpr bool kTwoConvert = Traits::kKvIsE4m3 && Traits::kHeadDimVo <= 192;

// --- shared memory ---

// Rows of codes, 128 a block; two are a column of 16 bits.
template <class Traits, int kStep>
struct CodeTiles {
  using K = SwizzledTile<Traits::kHeadDimQk / 2, kStep>;
  using V = SwizzledTile<Traits::kHeadDimVo / 2, kStep>;
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

template <bool kE4m3>
struct CodeBarriers {
  u64 full_k_codes[kMaxCodeSlots], full_v_codes[kMaxCodeSlots];
};
template <>
struct CodeBarriers<false> {};

// --- conversion ---

// Rows [first_row, first_row + kNumRows) of a tile by one warp, columns of padding included. Eight
// rows of 64 columns at a time: a lane has 16 of them, and the rows of eight neighbouring lanes,
// which shared memory serves at once, are such that they meet in no bank, neither here nor there.
template <class Traits, class Tile, class Codes, int kNumRows>
__device__ __forceinline__ void ConvertRows(const unsigned char* codes, unsigned char* tile,
                                            int first_row, int lane) {
  const int row = lane / 8 ^ lane / 4 % 2 * 5, chunk = lane % 4;
  const int row_offset = (first_row + row) * 128;
  // Of 16 codes in the left or right half of a block, and of the two times 8 elements they become.
  const unsigned char* from[2];
  unsigned char* to[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    from[i] = codes + row_offset + ((4 * i + chunk) ^ row) * 16;
    to[i] = tile + row_offset + ((2 * chunk + i) ^ row) * 16;
  }
  // Codes are loaded ahead of the stores, which the compiler would keep them behind.
  constexpr int kBlocks = Tile::kBlocks, kUnits = kNumRows / 8 * kBlocks;
  constexpr int kBatch = PowerOfTwoDivisor(kUnits, 4);
#pragma unroll
  for (int first = 0; first < kUnits; first += kBatch) {
    uint4 x[kBatch];
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      const int block = (first + u) % kBlocks, eight = (first + u) / kBlocks;
      x[u] = *reinterpret_cast<const uint4*>(from[block % 2] + block / 2 * Codes::kBlockBytes +
                                             eight * 1024);
    }
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      const int block = (first + u) % kBlocks, eight = (first + u) / kBlocks;
      const u32 words[4] = {x[u].x, x[u].y, x[u].z, x[u].w};
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

// --- producer ---

template <class Traits>
class E4m3Producer : public HopperProducer<Traits> {
 public:
  using Base = HopperProducer<Traits>;
  using Base::Base;

  // A turn takes a step from codes to 16 bits, and fills its place with the step that is kCodeSlots
  // ahead; the first turns only fill, the last only take. q of an item goes behind its first K, as
  // it does among 16-bit keys.
  __device__ __forceinline__ void Run(int begin, int end) {
    this->Start(begin, end);
    int num_codes = 0;                // steps on their way or there
    u32 begins_item = 0, fences = 0;  // of them, a bit each, the first one's the lowest
    int q_index = begin;              // of the item whose q came last
    while (true) {
      while (steps_.has_item() && !steps_.has_step()) steps_.Next();
      const bool copies = steps_.has_item();
      const bool converts = num_codes == Shape::kCodeSlots || !copies;
      if (converts && num_codes == 0) break;
      const bool comes_q = converts && (begins_item & 1) != 0;
      const bool is_fenced = (fences & 1) != 0;
      if (converts) {
        begins_item >>= 1;
        fences >>= 1;
        --num_codes;
        Convert<typename Shape::K, typename Codes::K>(
            Barriers().full_k_codes, shared_.k_codes[codes_.slot], Barriers().full_k,
            Barriers().empty_k, shared_.k[slots_.slot], is_fenced);
      }
      u32 row = kNoRow;
      int head = 0;
      if (copies) {
        head = this->Head(steps_.item());
        row = steps_.Row();
        begins_item |= u32{steps_.index() > begin && steps_.is_first()} << num_codes;
        fences |= u32{(head & Base::kByBoxes) != 0} << num_codes;
        ++num_codes;
        steps_.Next();
        this->template Copy<Traits::kHeadDimQk / 2, typename Codes::K>(
            k_copies_, Barriers().full_k_codes, shared_.k_codes[k_copies_.slot], this->pools_.k,
            p_.k_map, nullptr, p_.k_map, row, head);
      }
      if (comes_q) {
        do ++q_index;
        while (ItemRecord(p_, q_index).kv_begin() >= ItemRecord(p_, q_index).kv_end());
        this->LoadQ(ItemRecord(p_, q_index));
      }
      if (converts) {
        Convert<typename Shape::V, typename Codes::V>(
            Barriers().full_v_codes, shared_.v_codes[codes_.slot], Barriers().full_v,
            Barriers().empty_v, shared_.v[slots_.slot], is_fenced);
        codes_.Advance();
        slots_.Advance();
      }
      if (copies) {
        this->template Copy<Traits::kHeadDimVo / 2, typename Codes::V>(
            v_copies_, Barriers().full_v_codes, shared_.v_codes[v_copies_.slot], this->pools_.v,
            p_.v_map, nullptr, p_.v_map, row, head);
      }
    }
    this->Finish();
  }

 private:
  using Shape = HopperShape<Traits>;
  using Codes = typename Shape::Codes;
  using Base::Barriers;
  using Base::p_;
  using Base::shared_;
  using Base::steps_;

  // This warp's rows of the first step that is codes. Consumers fence what they read but where they
  // expect it from the copy engine. Not here as well: the fence could wait for rows on their way.
  template <class Tile, class CodeTile>
  __device__ __forceinline__ void Convert(const u64* full_codes, const unsigned char* codes,
                                          const u64* full, const u64* empty, unsigned char* tile,
                                          bool is_fenced) const {
    WaitBarrier(SharedAddress(full_codes + codes_.slot), codes_.parity);
    WaitBarrier(SharedAddress(empty + slots_.slot), slots_.parity ^ 1);
    const int thread = Anew(threadIdx.x);  // or registers would keep addresses from turn to turn
    ConvertRows<Traits, Tile, CodeTile, Shape::kWarpTokens>(
        codes, tile, thread / kWarpSize * Shape::kWarpTokens, thread % kWarpSize);
    if (is_fenced) FenceSharedForWgmma();
    __syncwarp();
    if (Base::Lane() == 0) ArriveBarrier(SharedAddress(full + slots_.slot));
  }

  // K and V of a step have the same place in their rings.
  RingCursor<Shape::kCodeSlots> codes_, k_copies_, v_copies_;
  RingCursor<Shape::kSlots> slots_;
};

}  // namespace jax_attn
