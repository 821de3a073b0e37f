// Rows of quantized keys and values in shared memory. cp.async copies the 16-byte vectors that hold
// them as they are. Then a step of them is dequantized to the kernel's 16-bit type, in the layout
// of 16-bit keys and values. The loops multiply the same tiles as for 16-bit rows, so bits are the
// same. (e4m3 comes this way only in sm80/wide.cuh.)
#pragma once

#include "cuda/common/codec.cuh"

namespace jax_attn {

// A quantized row begins anywhere in its first vector, unless rows are whole vectors.
template <int kFormat, int kHeadDim>
struct QuantizedRowLayout {
  static constexpr int kRowBytes = static_cast<int>(QuantizedRowBytes(kFormat, kHeadDim));
  static constexpr int kAlignment =
      PowerOfTwoDivisor(kRowBytes, 16);  // alignment of rows in memory
  static constexpr int kChunks = CeilDiv(kRowBytes + 16 - kAlignment, 16);  // vectors of 16 bytes
                                                                            // that are copied
  static constexpr int kPitch = 16 * (kChunks | 1);                         // bytes
  static constexpr int kQuantizedBytes = kHeadDim * FormatOf(kFormat).bits / 8;

  // Whether the chunk-th vector holds anything of the row at address `row`. The last one may hold
  // nothing, and may then lie behind the pool.
  __device__ __forceinline__ static bool Holds(u64 row, int chunk) {
    constexpr bool kAll = 16 * (kChunks - 1) < kRowBytes;
    return kAll || 16 * chunk < static_cast<int>(row % 16) + kRowBytes;
  }
};

// Where in a 16-byte vector the row of a kv position begins, for one kv head of a layer. Pages are
// whole vectors.
template <class Layout>
class QuantizedRowOffsets {
 public:
  __device__ __forceinline__ QuantizedRowOffsets(const AttentionParams& p, int kv_head)
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
__device__ __forceinline__ u32 LoadBytes4(const unsigned char* from) {
  if constexpr (kAlignment >= 4) return *reinterpret_cast<const u32*>(from);
  const int shift = static_cast<int>(reinterpret_cast<u64>(from) % 4);
  const u32* words = reinterpret_cast<const u32*>(from - shift);
  return __byte_perm(words[0], words[1], 0x3210u + 0x1111u * static_cast<u32>(shift));
}

// Eight bytes of quantized values, the unit-th of a row, with their scales. Dequantized they are
// one 16-byte vector of the row, or two with values of four bits.
template <class Traits, int kHeadDim>
class QuantizedUnit {
  static constexpr int kFormat = Traits::kKvFormat, kDtype = Traits::kDtype;
  static constexpr bool kHasNibbles = FormatOf(kFormat).bits == 4;
  using Layout = QuantizedRowLayout<kFormat, kHeadDim>;

 public:
  static constexpr int kVectors = kHasNibbles ? 2 : 1;
  static constexpr int kUnits = Layout::kQuantizedBytes / 8;  // in a row
  using Vectors = uint4[kVectors];

  QuantizedUnit() = default;
  __device__ __forceinline__ QuantizedUnit(const unsigned char* row, int unit)
      : low_(LoadBytes4<Layout::kAlignment>(row + 8 * unit)),
        high_(LoadBytes4<Layout::kAlignment>(row + 8 * unit + 4)) {
    const unsigned char* scales = row + Layout::kQuantizedBytes;
    if constexpr (kHasNibbles) {
      constexpr int kBlock = FormatOf(kFormat).block;
      scales_ = LoadBlockScales<kFormat>(scales, VectorIndex(unit, 0) * 8 / kBlock,
                                         VectorIndex(unit, 1) * 8 / kBlock);
    } else if constexpr (kFormat == kInt8Format) {
      scales_ = *reinterpret_cast<const u32*>(scales);
    }
  }

  // The index in the dequantized row of the unit's v-th vector.
  __device__ static int VectorIndex(int unit, int v) {
    if constexpr (!kHasNibbles) return unit;
    constexpr int kSpan = FormatOf(kFormat).span;
    const int begin = unit / (kSpan / 16) * kSpan, half = Min(kSpan, kHeadDim - begin) / 2;
    return (begin + unit % (kSpan / 16) * 8 + v * half) / 8;
  }

  __device__ __forceinline__ void Dequantize(Vectors& vectors) const {
    if constexpr (kHasNibbles) {
      DequantizeNibbles<kFormat, kDtype>(low_, high_, scales_, vectors[0], vectors[1]);
    } else if constexpr (kFormat == kInt8Format) {
      vectors[0] = DequantizeInt8<kDtype>(low_, high_, __uint_as_float(scales_));
    } else {
      vectors[0] = DequantizeFloat8<Traits>(low_, high_);
    }
  }

 private:
  u32 low_, high_, scales_;
};

// Quantizes row `from` of k_new or v_new as append_kv does, by one warp. scale: of its head, where
// the format has one.
template <class Traits, int kHeadDim>
__device__ __forceinline__ void QuantizeFreshRow(const u16* from, float scale, unsigned char* to) {
  constexpr int kFormat = Traits::kKvFormat, kDtype = Traits::kDtype;
  const int first = threadIdx.x % kWarpSize * 8;
  uint4 bits = make_uint4(0, 0, 0, 0);
  if (first < kHeadDim) bits = LoadConstant16(from + first);
  if constexpr (FormatOf(kFormat).scale_bytes == 0) {
    const uint2 quantized = QuantizeEight<kFormat, kDtype>(bits, scale);
    if (first < kHeadDim) *reinterpret_cast<uint2*>(to + first) = quantized;
  } else {
    float x[8];
    EightElements<kDtype>(bits, x);
    QuantizeRowByWarp<kFormat, kDtype>(x, kHeadDim, scale, to);
  }
}

}  // namespace jax_attn
