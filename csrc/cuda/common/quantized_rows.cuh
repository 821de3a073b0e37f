// Rows of codes in shared memory: they come as they are, by asynchronous copies of the 16-byte
// vectors that hold them, and a step of them becomes rows of the kernel's 16-bit type, in the
// layout of plain keys and values. All that multiplies them is what plain ones have, so the bits
// are, too. (e4m3 only in mla.cuh.)
#pragma once

#include "cuda/common/codec.cuh"

namespace jax_attn {

// A row begins anywhere in its first vector, unless rows are whole vectors.
template <int kFormat, int kHeadDim>
struct CodeRowLayout {
  static constexpr int kRowBytes = static_cast<int>(CodeRowBytes(kFormat, kHeadDim));
  static constexpr int kAlignment = PowerOfTwoDivisor(kRowBytes, 16);       // of rows in memory
  static constexpr int kChunks = CeilDiv(kRowBytes + 16 - kAlignment, 16);  // of 16 bytes, copied
  static constexpr int kPitch = 16 * (kChunks | 1);                         // bytes
  static constexpr int kCodeBytes = kHeadDim * FormatOf(kFormat).bits / 8;

  // Whether the chunk-th of the vectors holds anything of the row at address `row`. The last one
  // may not, and may then be behind the pool.
  __device__ __forceinline__ static bool Holds(u64 row, int chunk) {
    constexpr bool kAll = 16 * (kChunks - 1) < kRowBytes;
    return kAll || 16 * chunk < static_cast<int>(row % 16) + kRowBytes;
  }
};

// What a layer's rows of one kv head have in common: where in a 16-byte vector the row of a kv
// position begins. Pages are whole vectors.
template <class Layout>
class CodeRowOffsets {
 public:
  __device__ __forceinline__ CodeRowOffsets(const AttentionParams& p, int kv_head)
      : head_bytes_(kv_head * Layout::kRowBytes),
        token_bytes_(p.num_kv_heads * Layout::kRowBytes) {}
  __device__ __forceinline__ int At(int position) const {
    if constexpr (Layout::kAlignment == 16) return 0;
    return (position * token_bytes_ + head_bytes_) & 15;
  }

 private:
  u32 head_bytes_, token_bytes_;
};

// Four bytes from an address that is a multiple of kAlignment.
template <int kAlignment>
__device__ __forceinline__ u32 LoadCodes4(const unsigned char* from) {
  if constexpr (kAlignment >= 4) return *reinterpret_cast<const u32*>(from);
  const int shift = static_cast<int>(reinterpret_cast<u64>(from) % 4);
  const u32* words = reinterpret_cast<const u32*>(from - shift);
  return __byte_perm(words[0], words[1], 0x3210u + 0x1111u * static_cast<u32>(shift));
}

// Eight bytes of codes, the unit-th of a row, and the scales of what they become: a vector of 16
// bytes of the decoded row, or two of codes of four bits.
template <class Traits, int kHeadDim>
class CodeUnit {
  static constexpr int kFormat = Traits::kKvFormat, kDtype = Traits::kDtype;
  static constexpr bool kHasNibbles = FormatOf(kFormat).bits == 4;
  using Layout = CodeRowLayout<kFormat, kHeadDim>;

 public:
  static constexpr int kVectors = kHasNibbles ? 2 : 1;
  static constexpr int kUnits = Layout::kCodeBytes / 8;  // of a row
  using Vectors = uint4[kVectors];

  CodeUnit() = default;
  __device__ __forceinline__ CodeUnit(const unsigned char* row, int unit)
      : low_(LoadCodes4<Layout::kAlignment>(row + 8 * unit)),
        high_(LoadCodes4<Layout::kAlignment>(row + 8 * unit + 4)) {
    const unsigned char* scales = row + Layout::kCodeBytes;
    if constexpr (kHasNibbles) {
      constexpr int kBlock = FormatOf(kFormat).block;
      scales_ = LoadBlockScales<kFormat>(scales, Place(unit, 0) * 8 / kBlock,
                                         Place(unit, 1) * 8 / kBlock);
    } else if constexpr (kFormat == kInt8Format) {
      scales_ = *reinterpret_cast<const u32*>(scales);
    }
  }

  // Which vector of the row the unit's v-th one is.
  __device__ static int Place(int unit, int v) {
    if constexpr (!kHasNibbles) return unit;
    constexpr int kSpan = FormatOf(kFormat).span;
    const int begin = unit / (kSpan / 16) * kSpan, half = Min(kSpan, kHeadDim - begin) / 2;
    return (begin + unit % (kSpan / 16) * 8 + v * half) / 8;
  }

  __device__ __forceinline__ void Decode(Vectors& vectors) const {
    if constexpr (kHasNibbles) {
      DecodeNibbles<kFormat, kDtype>(low_, high_, scales_, vectors[0], vectors[1]);
    } else if constexpr (kFormat == kInt8Format) {
      vectors[0] = DecodeInt8<kDtype>(low_, high_, __uint_as_float(scales_));
    } else {
      vectors[0] = DecodeFloat8<Traits>(low_, high_);
    }
  }

 private:
  u32 low_, high_, scales_;
};

// Row `from` of k_new or v_new becomes what append_kv makes of it, by a warp. scale: of its head,
// where the format has it.
template <class Traits, int kHeadDim>
__device__ __forceinline__ void EncodeFreshRow(const u16* from, float scale, unsigned char* to) {
  constexpr int kFormat = Traits::kKvFormat, kDtype = Traits::kDtype;
  const int first = threadIdx.x % kWarpSize * 8;
  uint4 bits = make_uint4(0, 0, 0, 0);
  if (first < kHeadDim) bits = LoadConstant16(from + first);
  if constexpr (FormatOf(kFormat).scale_bytes == 0) {
    const uint2 codes = EncodeEight<kFormat, kDtype>(bits, scale);
    if (first < kHeadDim) *reinterpret_cast<uint2*>(to + first) = codes;
  } else {
    float x[8];
    EightElements<kDtype>(bits, x);
    EncodeRow<kFormat, kDtype>(x, kHeadDim, scale, to);
  }
}

}  // namespace jax_attn
