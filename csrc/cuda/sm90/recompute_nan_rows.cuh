// Recomputes rows that a product gave a value which they do not see: 0 * NaN and 0 * inf are NaN.
//
// Products of sm90 read values from shared memory directly, so no instruction can check them
// before. The results tell instead. Where a result is not finite, either the row saw such a value,
// and the result is right. Or it did not, and the columns in question are recomputed here, straight
// from global memory. Only rows that need it pay for it:
//   - Rows of a tile see the same tokens, except some at the ends of their spans, at most as many
//   as the tile has query tokens. If all values there are finite, nothing is wrong.
//   - A row is computed from its last token backwards, until none of its columns is finite any
//   more. Behind a NaN that is soon. Only the few rows of a tile that lie before the first NaN go
//   back to their first token.
#pragma once

#include "cuda/common/logits.cuh"
#include "cuda/common/state.cuh"
#include "cuda/common/types.cuh"
#include "cuda/sm90/quantized_producer.cuh"

namespace jax_attn {

__device__ __forceinline__ float E4m3ToFloat32(u32 code) {
  return __uint_as_float(E4m3HighBytes<kElementBf16>(code << 8) << 16);
}

__device__ __forceinline__ bool IsFinite(float x) {
  return (__float_as_uint(x) & 0x7f800000) != 0x7f800000;
}

// Recomputes rows of an item, by one warp.
template <class Traits>
class NanRowRecomputer {
 public:
  __device__ __forceinline__ NanRowRecomputer(const AttentionParams& p, int index, int first_row,
                                              int lane)
      : p_(p), index_(index), first_row_(first_row), lane_(lane) {}

  // rows: one bit for each row, from first_row on; their sums are not NaN. max_log4 (the running
  // max), o_scale: lane i has those of row first_row + i.
  __device__ __forceinline__ void Run(u32 rows, float max_log4, float o_scale) {
    if (rows == 0) return;
    const u32 columns = UnseenColumns(rows);
    if (!__any_sync(kFullWarp, columns != 0)) return;
#pragma unroll 1
    while (rows != 0) {
      int few[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        few[i] = rows != 0 ? __ffs(rows) - 1 : kNone;
        rows &= rows - 1;
      }
      RecomputeFew(few, columns, max_log4, o_scale);
    }
  }

 private:
  using E = Element<Traits::kDtype>;
  static constexpr int kFormat = Traits::kKvFormat;
  static constexpr bool kHasFp8Query = Traits::kQFormat == kE4m3Format;
  using QueryBits = typename Conditional<kHasFp8Query, unsigned char, u16>::Type;
  static constexpr int kRows = 2;  // rows at a time: they share loads
  static constexpr int kNone = -1;
  static constexpr int kColumns = 8;  // columns of a lane
  static constexpr int kDimQk = Traits::kHeadDimQk, kDimVo = Traits::kHeadDimVo;
  // So many lanes have all columns of v. The other lanes have those of other tokens.
  static constexpr int kWidth = kDimVo > 128 ? 32 : kDimVo > 64 ? 16 : kDimVo > 32 ? 8 : 4;
  static constexpr int kTokens = kWarpSize / kWidth;
  static_assert(kDimVo <= kWidth * kColumns, "a warp has all columns");

  __device__ int Column() const { return lane_ % kWidth * kColumns; }
  __device__ bool HasColumns() const { return Column() < kDimVo; }

  __device__ __forceinline__ VisibleSpan SpanOf(int first, int last) const {
    const ItemRecord item(p_, index_);
    return SpanOfTokens<Traits>(p_, FirstOfItem<Traits>(item), EndOfItem<Traits>(p_, item),
                                item.q_pos(), (first_row_ + first) / Traits::kGroupSize,
                                (first_row_ + last) / Traits::kGroupSize);
  }

  // The kv position at a kv offset of the item, see KvStep.
  __device__ __forceinline__ int PositionOf(int offset) const {
    if constexpr (!Traits::kHasSteps) return offset;
    return KvStep<Traits>(p_, offset, offset + 1).begin() + offset % Traits::kTileKv;
  }
  // Whether there is a token at the position of an offset in [begin, end).
  __device__ __forceinline__ bool Exists(int pos) const {
    return !Traits::kHasSteps || pos < EndOfItem<Traits>(p_, ItemRecord(p_, index_));
  }

  // Pool row of a position. A row of k_new and v_new has kFreshRow added.
  __device__ __forceinline__ u32 RowOf(int pos) const {
    const ItemRecord item(p_, index_);
    if constexpr (Traits::kHasFreshKv) {
      const FreshTokens fresh(p_, item.request());
      if (pos >= fresh.begin) return kFreshRow | fresh.Row(pos);
    }
    if constexpr (Traits::kPageSize > 0) {
      return PoolRow<Traits::kPageSize>(LoadPage<Traits::kPageSize>(p_, item.kv_base(), pos), pos);
    }
    return static_cast<u32>(item.kv_base()) + pos;
  }
  // The same for an offset; kNoRow if there is no token.
  __device__ __forceinline__ u32 RowAt(int offset) const {
    if constexpr (!Traits::kHasSteps) return RowOf(offset);
    const int pos = PositionOf(offset);
    return Exists(pos) ? RowOf(pos) : kNoRow;
  }
  template <int kHeadDim>
  __device__ __forceinline__ const char* At(const char* pool, const void* fresh, u32 row) const {
    if (Traits::kHasFreshKv && row >= kFreshRow) {
      pool = static_cast<const char*>(fresh);
      row -= kFreshRow;
    }
    const i64 head = static_cast<i64>(row) * p_.num_kv_heads + ItemRecord(p_, index_).kv_head();
    return pool + head * kKvRowBytes<Traits, kHeadDim>;
  }
  __device__ __forceinline__ KvPools Pools() const {
    return FindPoolsOfRows<Traits, kKvRowBytes<Traits, kDimQk>, kKvRowBytes<Traits, kDimVo>>(
        p_, LoadLayer<Traits>(p_));
  }
  // Loads eight elements of a row, without the scale of its head.
  template <int kHeadDim>
  __device__ __forceinline__ static void Load(const char* row, int column, float (&x)[8]) {
    if constexpr (kFormat == kPlainFormat) {
      Unpack(LoadConstant16(row + column * 2), x);
    } else if constexpr (kFormat == kE4m3Format) {
      LoadE4m3(row + column, x);
    } else {
      using Unit = QuantizedUnit<Traits, kHeadDim>;
      int unit = column / 8, v = 0;
      if constexpr (Unit::kVectors == 2) {
        constexpr int kSpan = FormatOf(kFormat).span;
        const int begin = column / kSpan * kSpan, half = Min(kSpan, kHeadDim - begin) / 2;
        v = column - begin < half ? 0 : 1;
        unit = (begin / 2 + column - begin - v * half) / 8;
      }
      typename Unit::Vectors vectors;
      Unit(reinterpret_cast<const unsigned char*>(row), unit).Dequantize(vectors);
      Unpack(v == 0 ? vectors[0] : vectors[Unit::kVectors - 1], x);
    }
  }
  __device__ __forceinline__ static void LoadE4m3(const void* from, float (&x)[8]) {
    const uint2 quantized = *static_cast<const uint2*>(from);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x[i] = E4m3ToFloat32((i < 4 ? quantized.x : quantized.y) >> i % 4 * 8 & 0xff);
    }
  }
  // Loads eight elements of q. 16-bit q is taken as it is, also where the kernel rounds it to e4m3.
  __device__ __forceinline__ static void LoadQuery(const QueryBits* from, float (&x)[8]) {
    if constexpr (kHasFp8Query) {
      LoadE4m3(from, x);
    } else {
      Unpack(LoadConstant16(from), x);
    }
  }
  __device__ __forceinline__ static void Unpack(uint4 pairs, float (&x)[8]) {
    const u32 words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = E::ToFloat(static_cast<u16>(words[i / 2] >> i % 2 * 16));
  }

  // The lane's columns, one bit each, in which a token that not all of the rows see has a value
  // that is not finite.
  __device__ __forceinline__ u32 UnseenColumns(u32 rows) const {
    const ItemRecord item(p_, index_);
    const VisibleSpan span = SpanOf(__ffs(rows) - 1, 31 - __clz(static_cast<int>(rows)));
    const int begin = item.kv_begin(), end = item.kv_end();
    const bool all = Traits::kHasSteps || Traits::Variant::kHasMask;
    const int all_begin = all ? end : span.all_begin, all_end = all ? end : span.all_end;
    u32 columns = NotFinite(begin, Min(all_begin, end)) | NotFinite(Max(all_end, begin), end);
#pragma unroll
    for (int lanes = kWidth; lanes < kWarpSize; lanes *= 2) {
      columns |= __shfl_xor_sync(kFullWarp, columns, lanes);
    }
    return columns;
  }
  // The same for the tokens at offsets [begin, end); this lane checks every kTokens-th. 32 pool
  // rows are looked up at a time, one a lane, so that their values are loaded together.
  __device__ __forceinline__ u32 NotFinite(int begin, int end) const {
    const KvPools pools = Pools();
    u32 columns = 0;
#pragma unroll 1
    for (int first = begin; first < end; first += kWarpSize) {
      const u32 row = first + lane_ < end ? RowAt(first + lane_) : 0;
#pragma unroll 2
      for (int t = 0; t < kWarpSize; t += kTokens) {
        const int token = t + lane_ / kWidth;
        const u32 token_row = __shfl_sync(kFullWarp, row, token);
        float x[8] = {};
        if (first + token < end && HasColumns() && !(Traits::kHasSteps && token_row == kNoRow)) {
          Load<kDimVo>(At<kDimVo>(pools.v, p_.v_new, token_row), Column(), x);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) columns |= static_cast<u32>(!IsFinite(x[i])) << i;
      }
    }
    return columns;
  }

  // Recomputes columns of few rows; kNone: no row.
  __device__ __forceinline__ void RecomputeFew(const int (&few)[kRows], u32 columns, float max_log4,
                                               float o_scale) const {
    const KvPools pools = Pools();
    VisibleSpan spans[kRows];
    float maxima_log4[kRows];
    float o[kRows][kColumns] = {};
    int begin = 0x7fffffff, end = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      spans[i] = {0, 0, 0, 0};
      if (few[i] != kNone) {
        spans[i] = SpanOf(few[i], few[i]);
        begin = Min(begin, spans[i].any_begin);
        end = Max(end, spans[i].any_end);
      }
      maxima_log4[i] = __shfl_sync(kFullWarp, max_log4, few[i] & 31);
    }
    if constexpr (Traits::kHasSteps) {
      begin = ItemRecord(p_, index_).kv_begin();
      end = ItemRecord(p_, index_).kv_end();
    }
#pragma unroll 1
    while (end > begin) {
      const int first = Max(begin, end - kWarpSize), num_tokens = end - first;
      const int offset = first + (Traits::kHasSteps ? Min(lane_, num_tokens - 1) : lane_);
      const int pos = PositionOf(offset);
      const bool is_masked = KvStep<Traits>(p_, offset, offset + 1).is_masked();
      u32 row = 0;
      float weights[kRows];
      if (lane_ < num_tokens && Exists(pos)) {
        row = RowOf(pos);
        Weights(few, pos, is_masked, At<kDimQk>(pools.k, p_.k_new, row), maxima_log4, weights);
      }
      bool sees[kRows][1];
      Stage(p_, index_).Look(LayoutOf(few), pos, is_masked, [&](int i) { return spans[i]; }, sees);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (!sees[i][0]) weights[i] = UnseenP();
      }
#pragma unroll 1
      for (int t = 0; t < kWarpSize; t += kTokens) {
        const int token = t + lane_ / kWidth;
        const u32 token_row = __shfl_sync(kFullWarp, row, token);
        float v[8] = {};
        if (token < num_tokens && HasColumns()) {
          Load<kDimVo>(At<kDimVo>(pools.v, p_.v_new, token_row), Column(), v);
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const float weight = __shfl_sync(kFullWarp, weights[i], token);
          if (token >= num_tokens || IsUnseenP(weight)) continue;  // must not add 0 * v
#pragma unroll
          for (int c = 0; c < kColumns; ++c) o[i][c] = fmaf(weight, v[c], o[i][c]);
        }
      }
      end = first;
      if (__all_sync(kFullWarp, AreSettled(few, columns, o))) break;
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float scale = __shfl_sync(kFullWarp, o_scale, few[i] & 31);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
#pragma unroll
        for (int lanes = kWidth; lanes < kWarpSize; lanes *= 2) {
          o[i][c] += __shfl_xor_sync(kFullWarp, o[i][c], lanes);
        }
      }
      if (few[i] != kNone && lane_ < kWidth) Store(first_row_ + few[i], columns, scale, o[i]);
    }
  }

  using Stage = LogitStage<Traits>;
  using Layout = OneKeyLayout<kRows>;
  __device__ __forceinline__ Layout LayoutOf(const int (&few)[kRows]) const {
    Layout layout;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      layout.rows[i] = first_row_ + (few[i] != kNone ? few[i] : few[0]);
    }
    return layout;
  }

  // Softmax weights of the token at `pos`, whether or not the rows see it. is_masked: of its step.
  __device__ __forceinline__ void Weights(const int (&few)[kRows], int pos, bool is_masked,
                                          const char* k, const float (&maxima_log4)[kRows],
                                          float (&weights)[kRows]) const {
    const ItemRecord item(p_, index_);
    const QueryRows<Traits::kGroupSize> rows(p_, item.first_token(), item.kv_head(),
                                             item.is_shared());
    const Layout layout = LayoutOf(few);
    const QueryBits* q[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      q[i] = static_cast<const QueryBits*>(p_.q) + rows.Index(layout.Row(i)) * kDimQk;
    }
    float s[kRows] = {};
#pragma unroll 1
    for (int column = 0; column < kDimQk; column += 8) {
      float x[8];
      Load<kDimQk>(k, column, x);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        float y[8];
        LoadQuery(q[i] + column, y);
#pragma unroll
        for (int c = 0; c < 8; ++c) s[i] = fmaf(x[c], y[c], s[i]);
      }
    }
    if constexpr (kHasFp8Query) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int head = item.kv_head() * Traits::kGroupSize;
        s[i] *= LogitScaleOfHead(p_.q_scale, head + layout.Row(i) % Traits::kGroupSize);
      }
    }
    const Stage stage(p_, index_, KeyScale<Traits>(p_, index_));
    stage.Transform(layout, pos, is_masked, s);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float x = Stage::kNormalizes && IsFar(maxima_log4[i])
                          ? FarScore(s[i], stage.scale(), 1.0f / stage.scale(), maxima_log4[i])
                          : s[i];
      weights[i] = Stage::Weight(x, stage.scale(), BaseOf(maxima_log4[i]));
    }
  }

  // Whether no column that is asked for is finite in any of the rows.
  __device__ __forceinline__ bool AreSettled(const int (&few)[kRows], u32 columns,
                                             const float (&o)[kRows][kColumns]) const {
    bool all = true;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      u32 open = 0;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) open |= static_cast<u32>(IsFinite(o[i][c])) << c;
#pragma unroll
      for (int lanes = kWidth; lanes < kWarpSize; lanes *= 2) {
        open &= __shfl_xor_sync(kFullWarp, open, lanes);
      }
      all &= few[i] == kNone || (open & columns) == 0;
    }
    return all;
  }

  // Stores columns of a row: its result, or o of its partial state.
  __device__ __forceinline__ void Store(int row, u32 columns, float o_scale,
                                        const float (&o)[kColumns]) const {
    const ItemRecord item(p_, index_);
    const RowMap<Traits::kGroupSize> map(p_, item.first_token(), item.kv_head());
    const int partial_row = item.partial_row();
    const bool final = partial_row < 0;
    const i64 at = (final ? map.Index(row) : partial_row + row) * kDimVo + Column();
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if ((columns >> c & 1) == 0) continue;
      if (final) {
        static_cast<u16*>(p_.o)[at + c] = static_cast<u16>(E::Pack(o[c] * o_scale, 0.0f));
      } else {
        p_.partial_o[at + c] = o[c];
      }
    }
  }

  const AttentionParams& p_;
  const int index_;  // of the item
  const int first_row_, lane_;
};

// Call it with a whole warp once results that are not finite are written. See
// NanRowRecomputer::Run.
template <class Traits>
__device__ __noinline__ void RecomputeNonFiniteRows(const AttentionParams& p, int index,
                                                    int first_row, u32 rows, float max_log4,
                                                    float o_scale, int lane) {
  NanRowRecomputer<Traits>(p, index, first_row, lane).Run(rows, max_log4, o_scale);
}

}  // namespace jax_attn
