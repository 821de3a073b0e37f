// Items of few rows, with the operands of both products swapped. The 64 rows of a wgmma are tokens
// in S^T = K Q^T and columns of v in O^T = V^T P^T; the rows of the item are its n columns. So a
// step needs exponentials for the rows that exist, not for 64, and little more than reading K and
// V. Up to 8 rows, one token of a group of heads, have a smaller copy of the code.
#pragma once

#include "cuda/common/logits.cuh"
#include "cuda/common/partials.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/recompute_nan_rows.cuh"
#include "cuda/sm90/tile_rows.cuh"

namespace jax_attn {

// Shared memory of a consumer for an item of up to kRows rows.
template <class Traits>
struct DecodeShared {
  static constexpr int kRows = kHopperDecodeRows;
  using Q = SwizzledTile<Traits::kHeadDimQk, kRows>;
  using O = SwizzledTile<Traits::kHeadDimVo, kRows>;
  using P = SwizzledTile<Traits::kTileKv, kRows>;

  alignas(1024) unsigned char q[Max(Q::kBytes, O::kBytes)];  // at the end 16-bit results
  alignas(1024) unsigned char p[P::kBytes];
};

// Data that the warps of a consumer exchange for each row.
struct DecodeExchange {
  float of_warps[4][32];  // maxima or sums
  float running_maxima[32], o_scales[32];
  u32 nan_rows[4];  // one bit a row, for each warp
};

// State of an item's rows after the kv tokens seen so far, without o. In accumulators [64, kRows] a
// thread has rows 8j + 2 * (lane % 4) + {0, 1} of the item. 64b + 16 * warp + 8h + lane / 4 is its
// token in S^T and its column in O^T.
template <class Traits, int kMostRows>
class DecodeRows {
 public:
  using E = Element<Traits::kDtype>;
  using Shared = DecodeShared<Traits>;
  static constexpr int kRows = kMostRows;
  static constexpr int kTiles = kRows / 8;
  static constexpr int kBlocks = Traits::kTileKv / 64;
  static constexpr int kOBlocks = Shared::O::kBlocks;
  using Scores = float[kBlocks][kTiles][4];
  using Output = float[kOBlocks][kTiles][4];

  __device__ __forceinline__ DecodeRows(const AttentionParams& p, int index, int thread,
                                        Shared& shared, DecodeExchange& exchange)
      : p_(p),
        index_(index),
        warp_(thread / kWarpSize),
        lane_(thread % kWarpSize),
        lane_offset_(lane_ % 8 * 128 + ((2 * warp_ + lane_ / 8 % 2) ^ lane_ % 8) * 16),
        k_scale_(KeyScale<Traits>(p, index)),
        shared_(shared),
        exchange_(exchange) {
    const ItemRecord item(p, index);
    num_rows_ = Uniform(item.qo_len() * Traits::kGroupSize);
    const VisibleSpan span =
        SpanOfTokens<Traits>(p, FirstOfItem<Traits>(item), EndOfItem<Traits>(p, item), item.q_pos(),
                             0, item.qo_len() - 1);
    all_begin_ = span.all_begin;
    all_end_ = span.all_end;
    differ_ =
        span.all_begin > span.any_begin || span.all_end < span.any_end || Traits::Variant::kHasMask;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        SetMax(j, c, -Infinity());
        sum_[j][c] = 0.0f;
      }
    }
  }

  // Turns K Q^T of a step into logits, without their scale.
  __device__ __forceinline__ void MakeLogits(KvStep<Traits> step, Scores& s) const {
    const int begin = step.begin();
    const bool seen_by_all = begin >= all_begin_ && begin + 64 * kBlocks <= all_end_;
    const KeyMajorLayout<kBlocks, kTiles> layout(warp_, lane_, num_tiles());
    Stage().Apply(layout, begin, seen_by_all, step.is_masked(), s);
  }

  // p = 2^(logit - running max); StoreP writes it to shared memory. Returns whether a logit of this
  // thread exceeds its running max by more than kMaxSlack, or a row is far (logits.cuh). Then the
  // caller calls Grow and repeats.
  template <bool kRepeats = false>
  __device__ __forceinline__ bool Exponentiate(const Scores& s) {
    const float scale = Stage().scale();
    float highest = -Infinity();
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      if (j >= num_tiles()) break;
      step_sum_[j][0] = step_sum_[j][1] = 0.0f;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float x[2];
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            if constexpr (LogitStage<Traits>::kNormalizes) {
              x[c] = fmaf(s[b][j][2 * h + c], scale, -running_max_[j][c]);
              if (kRepeats && IsFarRow(j, c))
                x[c] = FarExponent(s[b][j][2 * h + c], scale, FiniteMax(running_max_[j][c]));
              highest = fmaxf(highest, x[c]);
              x[c] = Exp2(x[c]);
            } else {
              x[c] = s[b][j][2 * h + c];
            }
            step_sum_[j][c] += x[c];
          }
          step_p_[b][j][h] = E::Pack(x[0], x[1]);
        }
      }
    }
    return highest > kMaxSlack || far_rows_ != 0;
  }

  // A value that depends on all exponentials and is not negative; for KeepBefore.
  __device__ __forceinline__ float LastWritten() const {
    float all = 0.0f;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      if (j >= num_tiles()) break;
      all += step_sum_[j][0] + step_sum_[j][1];
    }
    return all;
  }

  __device__ __forceinline__ void StoreP() const {
    const u32 to = SharedAddress(shared_.p) + lane_offset_;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      if (j >= num_tiles()) break;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        StoreMatrix2Transposed(to + b * Shared::P::kBlockBytes + j * 1024, step_p_[b][j][0],
                               step_p_[b][j][1]);
      }
    }
  }

  __device__ __forceinline__ void AddSums() {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      if (j >= num_tiles()) break;
#pragma unroll
      for (int c = 0; c < 2; ++c) sum_[j][c] += step_sum_[j][c];
    }
  }

  // Moves running maxima to the maxima of the step, and rescales o and sums. The whole consumer
  // calls it. It must have met since any thread read its exchange, and must meet again before the
  // next use of it.
  __device__ __forceinline__ void Grow(const Scores& s, Output& o) {
    if constexpr (!LogitStage<Traits>::kNormalizes) return;
    const float scale = Stage().scale();
    float maxima[kTiles][2] = {};
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      if (j >= num_tiles()) break;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float x = fmaxf(s[0][j][c], s[0][j][2 + c]);
#pragma unroll
        for (int b = 1; b < kBlocks; ++b) x = fmaxf(x, fmaxf(s[b][j][c], s[b][j][2 + c]));
#pragma unroll
        for (int lanes = 4; lanes < kWarpSize; lanes *= 2) {
          x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, lanes));
        }
        maxima[j][c] = x;
      }
    }
    Publish(maxima);
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      if (j >= num_tiles()) break;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int row = Row(j, c);
        const float x = fmaxf(fmaxf(exchange_.of_warps[0][row], exchange_.of_warps[1][row]),
                              fmaxf(exchange_.of_warps[2][row], exchange_.of_warps[3][row]));
        const float before_log4 = MaxLog4(j, c), step_log4 = x * (0.5f * scale);
        // The same test as in Exponentiate, so that the result does not depend on other rows.
        const bool grows = IsFarRow(j, c) ? step_log4 > before_log4
                                          : fmaf(x, scale, -running_max_[j][c]) > kMaxSlack;
        const float new_log4 = grows ? step_log4 : before_log4;
        const float factor = StateWeight(before_log4, new_log4);
        SetMax(j, c, new_log4);
        sum_[j][c] *= factor;
#pragma unroll
        for (int m = 0; m < kOBlocks; ++m) {
          o[m][j][c] *= factor;
          o[m][j][2 + c] *= factor;
        }
      }
    }
  }

  // Stores lse or partial states while the last products run. The whole consumer calls it, as Grow.
  __device__ __forceinline__ void FinishStates() {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      if (j >= num_tiles()) break;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
#pragma unroll
        for (int lanes = 4; lanes < kWarpSize; lanes *= 2) {
          sum_[j][c] += __shfl_xor_sync(kFullWarp, sum_[j][c], lanes);
        }
        if (warp_ == 0 && lane_ < 4) exchange_.running_maxima[Row(j, c)] = MaxLog4(j, c);
      }
    }
    Publish(sum_);
    const int row = lane_;
    if (warp_ != 0 || row >= num_rows_) return;
    const ItemRecord item(p_, index_);
    const RowMap<Traits::kGroupSize> map(p_, item.first_token(), item.kv_head());
    const int partial_row = item.partial_row();
    const bool final = partial_row < 0;
    const float (&sums)[4][32] = exchange_.of_warps;
    const RowState state = {exchange_.running_maxima[row],
                            sums[0][row] + sums[1][row] + sums[2][row] + sums[3][row]};
    float o_scale = WriteState<Traits>(p_, final, final ? map.Index(row) : partial_row + row,
                                       map.QoHead(row), true, state);
    if constexpr (Traits::kKvFormat != kPlainFormat) {
      o_scale = WithValueScale<Traits>(p_, item.kv_head(), o_scale);
    }
    exchange_.o_scales[row] = o_scale;
  }

  // Stores o. Final rows are staged in q, which no product may read any more.
  __device__ __forceinline__ void Write(const Output& o) {
    if (ItemRecord(p_, index_).partial_row() < 0) {
      WriteFinalRows(o);
    } else {
      WritePartialRows(o);
    }
    if (kRowsMayDiffer<Traits> && differ_) RecomputeRows(NanRows(o));
  }

 private:
  __device__ int Row(int j, int c) const { return 8 * j + 2 * (lane_ % 4) + c; }
  // The thread's token in S^T, or column in O^T, within 64.
  __device__ int Token() const { return 16 * warp_ + lane_ / 4; }
  // Live tiles of 8 rows. Others hold anything.
  __device__ int num_tiles() const { return kTiles == 1 ? 1 : CeilDiv(num_rows_, 8); }
  // As in TileRows.
  __device__ bool IsFarRow(int j, int c) const { return (far_rows_ >> (2 * j + c) & 1) != 0; }
  __device__ __forceinline__ float MaxLog4(int j, int c) const {
    if (IsFarRow(j, c)) return running_max_[j][c];
    return running_max_[j][c] == kInitialMax ? -Infinity() : 0.5f * running_max_[j][c];
  }
  __device__ __forceinline__ void SetMax(int j, int c, float max_log4) {
    const bool needs_none =
        max_log4 == -Infinity() && !(LogitStage<Traits>::kMayBeLowest && Row(j, c) < num_rows_);
    const bool is_far = !(fabsf(max_log4) < 0.5f * kFarLog2) && !needs_none;
    far_rows_ = (far_rows_ & ~(1u << (2 * j + c))) | u32{is_far} << (2 * j + c);
    running_max_[j][c] = needs_none ? kInitialMax : is_far ? max_log4 : 2.0f * max_log4;
  }
  // Shares one number for each row of each warp with all warps.
  __device__ __forceinline__ void Publish(const float (&x)[kTiles][2]) {
    if (lane_ < 4) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        if (j >= num_tiles()) break;
#pragma unroll
        for (int c = 0; c < 2; ++c) exchange_.of_warps[warp_][Row(j, c)] = x[j][c];
      }
    }
    OneHopperConsumer::Sync();
  }

  __device__ __forceinline__ LogitStage<Traits> Stage() const {
    return LogitStage<Traits>(p_, index_, k_scale_);
  }

  // Each thread stores 16 bytes; neighbouring threads store all columns of a row.
  __device__ __forceinline__ void WriteFinalRows(const Output& o) const {
    using O = typename Shared::O;
    OneHopperConsumer::Sync();  // wait for the scales
    const u32 to = SharedAddress(shared_.q) + lane_offset_;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      if (j >= num_tiles()) break;
      const float scales[2] = {exchange_.o_scales[Row(j, 0)], exchange_.o_scales[Row(j, 1)]};
#pragma unroll
      for (int m = 0; m < kOBlocks; ++m) {
        u32 x[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          x[h] = E::Pack(o[m][j][2 * h] * scales[0], o[m][j][2 * h + 1] * scales[1]);
        }
        StoreMatrix2Transposed(to + m * O::kBlockBytes + j * 1024, x[0], x[1]);
      }
    }
    OneHopperConsumer::Sync();
    const ItemRecord item(p_, index_);
    const RowMap<Traits::kGroupSize> map(p_, item.first_token(), item.kv_head());
#pragma unroll 1
    for (int i = warp_ * kWarpSize + lane_; i < num_rows_ * O::kLiveChunks;
         i += OneHopperConsumer::num_threads()) {
      const int row = i / O::kLiveChunks, chunk = i % O::kLiveChunks;
      const unsigned char* from =
          shared_.q + chunk / 8 * O::kBlockBytes + row * 128 + (chunk % 8 ^ row % 8) * 16;
      u16* to_row = static_cast<u16*>(p_.o) + map.Index(row) * Traits::kHeadDimVo;
      reinterpret_cast<uint4*>(to_row)[chunk] = *reinterpret_cast<const uint4*>(from);
    }
  }

  // Eight lanes store 32 neighbouring bytes.
  __device__ __forceinline__ void WritePartialRows(const Output& o) const {
    const int partial_row = ItemRecord(p_, index_).partial_row();
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      if (j >= num_tiles()) break;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int row = Row(j, c);
        if (row >= num_rows_) continue;
        float* to = p_.partial_o + static_cast<i64>(partial_row + row) * Traits::kHeadDimVo;
#pragma unroll
        for (int m = 0; m < kOBlocks; ++m) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int column = 64 * m + 8 * h + Token();
            if (column < Traits::kHeadDimVo) to[column] = o[m][j][2 * h + c];
          }
        }
      }
    }
  }

  // The rows in which this thread has a NaN, one bit each.
  __device__ __forceinline__ u32 NanRows(const Output& o) const {
    u32 rows = 0;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      if (j >= num_tiles()) break;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float nan_or_zero = 0.0f;
#pragma unroll
        for (int m = 0; m < kOBlocks; ++m) {
          nan_or_zero = fmaf(o[m][j][c], 0.0f, fmaf(o[m][j][2 + c], 0.0f, nan_or_zero));
        }
        if (nan_or_zero != 0.0f) rows |= 1u << Row(j, c);
      }
    }
    return rows;
  }

  // The same as TileRows::RecomputeRows; each warp does a quarter of the rows.
  __device__ __forceinline__ void RecomputeRows(u32 nan_rows) {
#pragma unroll
    for (int lanes = 1; lanes < kWarpSize; lanes *= 2) {
      nan_rows |= __shfl_xor_sync(kFullWarp, nan_rows, lanes);
    }
    if (lane_ == 0) exchange_.nan_rows[warp_] = nan_rows;
    OneHopperConsumer::Sync();  // other warps' rows are about to be overwritten, too
    nan_rows = exchange_.nan_rows[0] | exchange_.nan_rows[1] | exchange_.nan_rows[2] |
               exchange_.nan_rows[3];
    if (nan_rows == 0) return;
    const float (&sums)[4][32] = exchange_.of_warps;
    const float sum = sums[0][lane_] + sums[1][lane_] + sums[2][lane_] + sums[3][lane_];
    nan_rows &= __ballot_sync(kFullWarp, lane_ < num_rows_ && sum == sum) & 0x11111111u << warp_;
    RecomputeNonFiniteRows<Traits>(p_, index_, 0, nan_rows, exchange_.running_maxima[lane_],
                                   exchange_.o_scales[lane_], lane_);
  }

  const AttentionParams& p_;
  const int index_;  // of the item
  const int warp_, lane_;
  const u32 lane_offset_;  // offset in a tile of the row of an 8x8 matrix that this lane addresses
  const float k_scale_;
  Shared& shared_;
  DecodeExchange& exchange_;
  int num_rows_;
  int all_begin_, all_end_;       // inside it every row sees everything
  bool differ_;                   // some rows see tokens that others do not
  float running_max_[kTiles][2];  // as in TileRows
  u32 far_rows_ = 0;              // bit 2j + c: far row
  float sum_[kTiles][2],
      step_sum_[kTiles][2] = {};         // over this thread's tokens only, until FinishStates
  u32 step_p_[kBlocks][kTiles][2] = {};  // P of the last step, packed
};

}  // namespace jax_attn
