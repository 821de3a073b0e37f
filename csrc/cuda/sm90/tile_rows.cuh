// The rows of a warp in registers: softmax of the logits that wgmma leaves there, and results.
#pragma once

#include "cuda/common/logits.cuh"
#include "cuda/common/partials.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/recompute_nan_rows.cuh"

namespace jax_attn {

// The running max of a row follows a logit only when that exceeds it by more than this, in log2:
// until then sums are far from overflow, and nearly every step is spared the rescaling of o
// (FlashAttention-4's observation). Each row decides for itself, so its bits do not depend on its
// neighbours. A row that keeps its running max has a factor of exactly 1.
inline constexpr float kMaxSlack = 8.0f;

// The running max of a row that has not seen any logit: below all of them, and finite, so that -inf
// is still below.
inline constexpr float kInitialMax = -3.402823466e38f;

// Lane i of a quad gives x[j] of column pair i of tile j, and gets tile i: all four pairs.
__device__ __forceinline__ uint4 TransposeQuad(const u32 (&x)[4], int lane) {
  const bool odd = lane % 2 != 0, upper = lane % 4 >= 2;
  // Tiles odd and 2 + odd, of this lane and its neighbour.
  const u32 kept[2] = {odd ? x[1] : x[0], odd ? x[3] : x[2]};
  const u32 got[2] = {__shfl_xor_sync(kFullWarp, odd ? x[0] : x[1], 1),
                      __shfl_xor_sync(kFullWarp, odd ? x[2] : x[3], 1)};
  u32 pair[2][2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    pair[i][0] = odd ? got[i] : kept[i];
    pair[i][1] = odd ? kept[i] : got[i];
  }
  // Of these the one that this lane is for, of both halves of the quad.
  u32 mine[2], others[2];
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    mine[c] = upper ? pair[1][c] : pair[0][c];
    others[c] = __shfl_xor_sync(kFullWarp, upper ? pair[0][c] : pair[1][c], 2);
  }
  return upper ? make_uint4(others[0], others[1], mine[0], mine[1])
               : make_uint4(mine[0], mine[1], others[0], others[1]);
}

// What a warp knows of its 16 rows after the kv tokens it has seen, besides o. Index h is row 8h +
// lane / 4, of which the lane has columns 8j + 2 * (lane % 4) + {0, 1} in logits and o.
template <class Traits>
class TileRows {
 public:
  using E = Element<Traits::kDtype>;

  float reference[2];           // of the exponents, see Exponentiate
  float sum[2] = {0.0f, 0.0f};  // over this lane's columns only, until FinishSums
  float factor[2];              // from the references before the last step to those after it

  // first_row: of this warpgroup, within the item. first_reference: of all rows.
  __device__ __forceinline__ TileRows(const AttentionParams& p, int index, int first_row,
                                      int thread, float first_reference)
      : reference{first_reference, first_reference},
        p_(p),
        index_(index),
        first_row_(first_row + thread / kWarpSize * 16),
        lane_(thread % 32),
        k_scale_(KeyScale<Traits>(p, index)) {
    const ItemRecord item(p, index);
    const int num_rows = item.qo_len() * Traits::kGroupSize;
    live_ = first_row_ < num_rows;
    if constexpr (kAddsLines) {
#pragma unroll
      for (int h = 0; h < 2; ++h) of_rows_[h] = Stage().OfRow(first_row_ + lane_ / 4 + 8 * h);
    }
    const VisibleSpan span = SpanOfTokens<Traits>(
        p, FirstOfItem<Traits>(item), EndOfItem<Traits>(p, item), item.q_pos(),
        first_row_ / Traits::kGroupSize, Min(first_row_ + 15, num_rows - 1) / Traits::kGroupSize);
    all_begin_ = span.all_begin;
    all_end_ = span.all_end;
    differ_ =
        span.all_begin > span.any_begin || span.all_end < span.any_end || Traits::Variant::kHasMask;
  }

  // Of products of codes: what q of the thread's two rows is multiplied by.
  __device__ __forceinline__ void SetQueryScales(const float (&scales)[2]) {
    q_scales_[0] = scales[0];
    q_scales_[1] = scales[1];
  }

  // That of all rows.
  __device__ __forceinline__ float Scale() const {
    if constexpr (kAddsLines) return Stage().ScaleOfScores();
    return Stage().scale();
  }

  // Ahead of MakeLogits, for which it needs no logits: the bias of a step's logits, where it is one
  // that the exponents add.
  template <int kTiles>
  __device__ __forceinline__ void FindBias(KvStep<Traits> step) {
    if constexpr (kAddsLines) FindLines<kTiles>(step.begin());
  }

  // From q . k of the tokens of a step to logits, but for their scale, and for a bias that FindBias
  // has found.
  template <int kTiles>
  __device__ __forceinline__ void MakeLogits(KvStep<Traits> step, float (&s)[kTiles][4]) const {
    if constexpr (kAddsLines) {
      if (SeenByAll<kTiles>(step.begin())) return;
      Stage().Mask(RowMajorLayout<1, kTiles>(first_row_, lane_), step.begin(), s);
    } else {
      MakeLogits(step.begin(), s, step.is_masked());
    }
  }
  // The same of `begin` and the tokens behind it, with any bias. For ExponentiateByMaxima.
  template <int kTiles>
  __device__ __forceinline__ void MakeLogits(int begin, float (&s)[kTiles][4],
                                             bool is_masked = true) const {
    if constexpr (kFitsCodes && !kScalesRowsLater) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) s[j][c] *= q_scales_[c / 2];
      }
    }
    Stage().Apply(RowMajorLayout<1, kTiles>(first_row_, lane_), begin, SeenByAll<kTiles>(begin),
                  is_masked, s);
  }

  // p = 2^(logit - reference), packed: the accumulators of two neighbouring 8-column tiles are
  // operand a of the second product as they are. s is lost. p is written behind between(): until
  // then products of the step before may read it.
  //
  // Maxima are not looked for, which would take as long as the exponentials. Any reference is as
  // good as the maximum while nothing overflows or vanishes; so it is 0 until the sums of a step
  // say that it does not do. Then this returns true for some of the row's four lanes, and
  // ExponentiateAnew comes next, with the same logits. Each row decides for itself, so its bits do
  // not depend on its neighbours.
  // scale: that of the logits, which the caller loads ahead of them.
  //
  // Weights of products of codes are fitted to these ahead of packing, see FitCodes; then o follows
  // by Rescale, too.
  template <int kTiles, int kFragments, class Between>
  __device__ __forceinline__ bool Exponentiate(float scale, bool is_first, float (&s)[kTiles][4],
                                               u32 (&p)[kFragments][4], const Between& between) {
    constexpr int kHalf = kTiles / 4 * 2;
    grows_ = false;
    if constexpr (kMoves) FollowLogits(scale, is_first, s);
    StepSums sums = {};
    Weights<0, kHalf>(scale, s, sums);
    KeepBefore(sums[0][0] + sums[0][1] + sums[1][0] + sums[1][1]);
    between();
    if constexpr (!kFitsCodes) Pack<0, kHalf>(s, p);
    Weights<kHalf, kTiles>(scale, s, sums);
    if constexpr (!kFitsCodes) Pack<kHalf, kTiles>(s, p);
#pragma unroll
    for (int h = 0; h < 2; ++h) step_sum_[h] = sums[h][0] + sums[h][1];
    if constexpr (!kNormalizes) return false;
    bool again = IsTooMuch(0) || IsTooMuch(1);
    if (is_first) again |= IsTooLittle(0) | IsTooLittle(1);
    if constexpr (kFitsCodes) {
      FitCodes(is_first, s);
      PackCodes(s, p);
    }
    if (kAddsLines && kMoves && !is_first && grows_) again |= IsLost(0) | IsLost(1);
    return again;
  }

  // The same with the maxima of the step as references of the rows that need it.
  template <int kTiles, int kFragments>
  __device__ __forceinline__ void ExponentiateAnew(bool is_first, float (&s)[kTiles][4],
                                                   u32 (&p)[kFragments][4]) {
    bool keeps[2] = {false, false};
    const float fits[2] = {factor[0], factor[1]};
    const float scale = Scale();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float step_max = kAddsLines ? QuadMax(LaneMaxWithBias<1>(scale, s, h))
                                        : QuadMax(LaneMax(s, h)) * ScaleOfRow(scale, h);
      const bool too_little = is_first && IsTooLittle(h);
      const bool is_lost = kAddsLines && kMoves && !is_first && IsLost(h);
      const u32 lanes = __ballot_sync(kFullWarp, too_little || is_lost || IsTooMuch(h));
      factor[h] = 1.0f;
      keeps[h] = (lanes >> lane_ / 4 * 4 & 0xf) == 0;
      if (keeps[h]) continue;
      const float before = is_lost ? reference[h] - kFarthest : reference[h];
      const float new_max = fmaxf(is_first ? kInitialMax : before, step_max);
      if (!is_first) factor[h] = Exp2(reference[h] - new_max);
      reference[h] = new_max;
      sum[h] *= factor[h];
      if constexpr (kAddsLines && kMoves) lift_[h] = new_max - highest_bias_[h];
    }
    StepSums sums = {};
    if constexpr (kFitsCodes) {
      FitCodesAnew(keeps, fits, scale, s);
      PackCodes(s, p);
    } else {
      Weights<0, kTiles>(scale, s, sums);
      Pack<0, kTiles>(s, p);
#pragma unroll
      for (int h = 0; h < 2; ++h) step_sum_[h] = sums[h][0] + sums[h][1];
    }
    grows_ = true;
  }
  // After either, once it is the last of a step.
  __device__ __forceinline__ void AddSums() {
#pragma unroll
    for (int h = 0; h < 2; ++h) sum[h] += step_sum_[h];
  }

  // Whether exponents add the bias of FindBias. f16 has no room for references that are not the
  // maximum; a user's mask may hide the keys of the highest bias.
  static constexpr bool kAddsLines = LogitStage<Traits>::kIsLine &&
                                     Traits::kDtype == kElementBf16 && !Traits::Variant::kHasMask &&
                                     !Traits::kIsMla && !Traits::kMultipliesCodes;
  // Whether Exponentiate may change references, of steps behind the first one, so that o has to
  // follow by Rescale.
  static constexpr bool kMoves =
      LogitStage<Traits>::kNormalizes && Traits::Variant::kLogitsFollowKeys;
  // Whether weights become codes.
  static constexpr bool kFitsCodes = Traits::kMultipliesCodes;

  // For loops that look for maxima; the rows begin with kInitialMax. s becomes p. A reference
  // follows when a logit exceeds it by kMaxSlack; whether any of the warp's rows did.
  template <int kTiles>
  __device__ __forceinline__ bool ExponentiateByMaxima(float (&s)[kTiles][4]) {
    const float scale = Stage().scale();
    grows_ = kNormalizes && AnyGrows(s);
    if (grows_) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float step_max = QuadMax(LaneMax(s, h));
        const bool row_grows = fmaf(step_max, scale, -reference[h]) > kMaxSlack;
        const float new_max = row_grows ? step_max * scale : reference[h];
        factor[h] = Exp2(reference[h] - new_max);
        reference[h] = new_max;
        sum[h] *= factor[h];
      }
    }
    StepSums sums = {{sum[0], 0.0f}, {sum[1], 0.0f}};
    Weights<0, kTiles>(scale, s, sums);
#pragma unroll
    for (int h = 0; h < 2; ++h) sum[h] = sums[h][0] + sums[h][1];
    return grows_;
  }
  // Whether it would change a reference of the warp's rows. A row's does if and only if one of its
  // lanes says so.
  template <int kTiles>
  __device__ __forceinline__ bool AnyGrows(const float (&s)[kTiles][4]) const {
    const float scale = Stage().scale();
    const float excess =
        fmaxf(fmaf(LaneMax(s, 0), scale, -reference[0]), fmaf(LaneMax(s, 1), scale, -reference[1]));
    return __any_sync(kFullWarp, excess > kMaxSlack);
  }

  // Takes over the references after a step that another warp exponentiated, and that changed some.
  __device__ __forceinline__ void Follow(float new_max_0, float new_max_1) {
    const float new_max[2] = {new_max_0, new_max_1};
    grows_ = true;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      factor[h] = Exp2(reference[h] - new_max[h]);
      reference[h] = new_max[h];
      sum[h] *= factor[h];
    }
  }

  // o of the steps before the last Exponentiate, or Follow, follows its references.
  template <int kTiles>
  __device__ __forceinline__ void Rescale(float (&o)[kTiles][4]) {
    if (!grows_) return;
    if constexpr (kFitsCodes) {
      rounded_[0] *= factor[0];
      rounded_[1] *= factor[1];
    }
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) o[j][c] *= factor[c / 2];
    }
  }

  // Products of a step of weights that are codes, with sums of these behind (kSumColumns).
  template <int kTiles, int kStepTiles>
  __device__ __forceinline__ void AddStep(const float (&step_o)[kStepTiles][4],
                                          float (&o)[kTiles][4]) {
    static_assert(kStepTiles == kTiles + 1, "one tile of sums");
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) o[j][c] += step_o[j][c];
    }
    rounded_[0] += step_o[kTiles][0];
    rounded_[1] += step_o[kTiles][2];
  }

  __device__ __forceinline__ void FinishSums() {
#pragma unroll
    for (int h = 0; h < 2; ++h) sum[h] = QuadSum(sum[h]);
  }

  __device__ __forceinline__ RowState state(int h) const {
    return {sum[h] == 0.0f ? -Infinity() : reference[h], sum[h]};  // the identity
  }

  // Final rows: a row's four lanes store 64 neighbouring bytes at a time. Measured (H200): by 16
  // bytes a row 16 x 1024 tokens took 204 us instead of 181.
  template <int kTiles>
  __device__ __forceinline__ void Write(const float (&o)[kTiles][4]) const {
    if (!live_) return;
    constexpr int kLiveTiles = Traits::kHeadDimVo / 8, kPaddedTiles = CeilDiv(kLiveTiles, 8) * 8;
    const ItemRecord item(p_, index_);
    const int num_rows = item.qo_len() * Traits::kGroupSize;
    const RowMap<Traits::kGroupSize> map(p_, item.first_token(), item.kv_head());
    const int partial_row = item.partial_row();
    const bool final = partial_row < 0;
    const int column = lane_ % 4;
    u32 nan_rows[2];
    float o_scales[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row_ + 8 * h + lane_ / 4;
      const bool exists = row < num_rows;
      float nan_or_zero = 0.0f, fit = 1.0f;
      if constexpr (kFitsCodes) fit = SumOverRounded(h);
      float& o_scale = o_scales[h];
      o_scale = 0.0f;
      i64 at = 0;
      if (exists) {
        at = final ? map.Index(row) : partial_row + row;
        o_scale = WriteState<Traits>(p_, final, at, map.QoHead(row), column == 0, state(h));
        if constexpr (Traits::kKvFormat != kPlainFormat) {
          o_scale = WithValueScale<Traits>(p_, item.kv_head(), o_scale);
        }
      }
      if (final) {
        uint4* to = reinterpret_cast<uint4*>(static_cast<u16*>(p_.o) + at * Traits::kHeadDimVo);
        const float scale = o_scale * fit;
#pragma unroll
        for (int j = 0; j < kPaddedTiles; j += 4) {
          u32 x[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float left = o[j + i][2 * h] * scale, right = o[j + i][2 * h + 1] * scale;
            nan_or_zero = fmaf(left, 0.0f, fmaf(right, 0.0f, nan_or_zero));
            x[i] = E::Pack(left, right);
          }
          const uint4 tile = TransposeQuad(x, lane_);
          if (exists && j + column < kLiveTiles) to[j + column] = tile;
        }
      } else if (exists) {
        float* to = p_.partial_o + at * Traits::kHeadDimVo + 2 * column;
#pragma unroll
        for (int j = 0; j < kLiveTiles; ++j) {
          float left = o[j][2 * h], right = o[j][2 * h + 1];
          if constexpr (kFitsCodes) {
            left *= fit;
            right *= fit;
          }
          nan_or_zero = fmaf(left, 0.0f, fmaf(right, 0.0f, nan_or_zero));
          *reinterpret_cast<float2*>(to + 8 * j) = make_float2(left, right);
        }
      }
      nan_rows[h] = kMayDiffer ? __ballot_sync(kFullWarp, exists && nan_or_zero != 0.0f) : 0;
    }
    if (kMayDiffer && differ_ && (nan_rows[0] | nan_rows[1]) != 0) Mend(nan_rows, o_scales);
  }

  // Whether WriteBoxes does for the rows: they are final, and none of the 16 is missing.
  __device__ __forceinline__ bool AreWhole() const {
    const ItemRecord item(p_, index_);
    const int partial_row = item.partial_row(), num_rows = item.qo_len() * Traits::kGroupSize;
    return p_.has_o_map && partial_row < 0 && first_row_ + 16 <= num_rows;
  }

  // Writes lse of such rows, and tells by what their o is to be multiplied.
  __device__ __forceinline__ void WriteStates(float (&o_scale)[2]) const {
    constexpr int kGroup = Traits::kGroupSize;
    const ItemRecord item(p_, index_);
    const RowMap<kGroup> map(p_, item.first_token(), item.kv_head());
    const int row = first_row_ + lane_ / 4;
    RowResult results[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) results[h] = FinishAttentionRow<Traits>(state(h), -Infinity());
    if (p_.sinks != nullptr) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        results[h] = FinishAttentionRow<Traits>(state(h), SinkLog2(p_, map.QoHead(row + 8 * h)));
      }
    }
    // A lane each; eight rows further are other tokens of the same head, or heads of the token.
    const bool second = lane_ % 4 == 1;
    const i64 at = map.Index(row) + (second ? Max(8 / kGroup * p_.num_qo_heads, 8 % kGroup) : 0);
    if (lane_ % 4 < 2) p_.lse[at] = (second ? results[1] : results[0]).lse_log2 * kLn2;
#pragma unroll
    for (int h = 0; h < 2; ++h) o_scale[h] = results[h].o_scale;
  }

  // Writes o of such rows by the copy engine: in `room` 16 rows of 128 bytes for each 64 columns,
  // swizzled, which are read until lane 0 has waited for it.
  template <int kTiles>
  __device__ __forceinline__ void WriteBoxes(const float (&o)[kTiles][4], const float (&o_scale)[2],
                                             u32 room) const {
    const ItemRecord item(p_, index_);
    const int head = Uniform(item.kv_head()) * Traits::kGroupSize;
    const int token = Uniform(item.first_token() + first_row_ / Traits::kGroupSize);
    const u32 to = room + lane_ % 16 * 128 + (lane_ / 16 ^ lane_ % 8) * 16;
    u32 nan_or_zero[2] = {};
#pragma unroll
    for (int j = 0; j < kTiles; j += 2) {
      u32 x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int h = i % 2;
        const float (&pair)[4] = o[j + i / 2];
        x[i] = E::Pack(pair[2 * h] * o_scale[h], pair[2 * h + 1] * o_scale[h]);
        if (kMayDiffer) nan_or_zero[h] = E::FmaX2(x[i], 0, nan_or_zero[h]);
      }
      StoreMatrix4((to ^ j % 8 * 16) + j / 8 * kBoxBytes, x);
    }
    FenceSharedForWgmma();
    __syncwarp();
    if (lane_ == 0) {
#pragma unroll
      for (int block = 0; block < kTiles / 8; ++block) {
        StoreBox(p_.o_map, 64 * block, head, token, room + block * kBoxBytes);
      }
      CommitStores();
    }
    if constexpr (kMayDiffer) {
      u32 nan_rows[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {  // -0 is not NaN
        nan_rows[h] = __ballot_sync(kFullWarp, (nan_or_zero[h] & 0x7fff7fff) != 0);
      }
      if (differ_ && (nan_rows[0] | nan_rows[1]) != 0) {
        if (lane_ == 0) WaitStores();
        Mend(nan_rows, o_scale);
      }
    }
  }

 private:
  static constexpr int kBoxBytes = 16 * 128;
  static constexpr bool kMayDiffer = kRowsMayDiffer<Traits>;
  static constexpr bool kNormalizes = LogitStage<Traits>::kNormalizes;
  using StepSums = float[2][2];  // of a row's even and odd columns: two chains

  // Of row h, over this lane's columns.
  template <int kTiles>
  __device__ __forceinline__ static float LaneMax(const float (&s)[kTiles][4], int h) {
    float maxima[4];  // four chains: one would wait for its own latency
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const float pair_max = fmaxf(s[j][2 * h], s[j][2 * h + 1]);
      maxima[j % 4] = j < 4 ? pair_max : fmaxf(maxima[j % 4], pair_max);
    }
    return fmaxf(fmaxf(maxima[0], maxima[1]), fmaxf(maxima[2], maxima[3]));
  }

  template <int kTiles>
  __device__ __forceinline__ void FindLines(int begin) {
    const RowMajorLayout<1, kTiles> layout(first_row_, lane_);
    float lowest[2] = {0.0f, 0.0f}, highest[2] = {8 * kTiles - 1, 8 * kTiles - 1};  // places
    if (kHasSlope && !SeenByAll<kTiles>(begin)) {
      const ItemRecord item(p_, index_);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const VisibleSpan span = SpanOfRow<Traits>(p_, item, layout.Row(h));
        lowest[h] = fmaxf(lowest[h], static_cast<float>(span.any_begin - begin));
        highest[h] = fminf(highest[h], static_cast<float>(span.any_end - 1 - begin));
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      bias_[h] = LogitStage<Traits>::LineAt(of_rows_[h], begin);
      if constexpr (kHasSlope) {
        const float slope = bias_[h].slope;
        highest_bias_[h] = fmaf(slope, slope > 0.0f ? highest[h] : lowest[h], bias_[h].term);
        bias_[h].term = fmaf(slope, static_cast<float>(layout.FirstKey()), bias_[h].term);
      }
    }
  }

  // Of row h, over this lane's columns of every kStride-th tile from the last one downwards, the
  // logits with their scale and bias.
  template <int kStride, int kTiles>
  __device__ __forceinline__ float LaneMaxWithBias(float scale, const float (&s)[kTiles][4],
                                                   int h) const {
    float maxima[2] = {-Infinity(), -Infinity()};
#pragma unroll
    for (int j = kTiles - 1; j >= 0; j -= kStride) {
      maxima[0] = fmaxf(maxima[0], fmaf(s[j][2 * h], scale, BiasAt(h, 8 * j)));
      maxima[1] = fmaxf(maxima[1], fmaf(s[j][2 * h + 1], scale, BiasAt(h, 8 * j + 1)));
    }
    return fmaxf(maxima[0], maxima[1]);
  }
  __device__ __forceinline__ float BiasAt(int h, int place) const {
    if constexpr (!kHasSlope) return bias_[h].term;
    return fmaf(bias_[h].slope, static_cast<float>(place), bias_[h].term);
  }

  // Logits with a term of their key, such as a slope times its position, may rise from step to step
  // for ever, and would be exponentiated twice in each. So references follow before. Of a bias that
  // is a line, the highest one of the step is known: what scores add is as in the step that was
  // exponentiated anew last (lift_). Only where that would be far away, and lose what there is, a
  // sample of the logits tells, a quarter, as with every other bias: what is left of the range is
  // enough for the others.
  template <int kTiles>
  __device__ __forceinline__ void FollowLogits(float scale, bool is_first,
                                               const float (&s)[kTiles][4]) {
    constexpr float kSlack = kAddsLines ? 40.0f : kWide ? 30.0f : 2.0f;
    float highest[2];
    if constexpr (kAddsLines) {
      float rise[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        highest[h] = highest_bias_[h] + lift_[h];
        rise[h] = is_first ? 0.0f : highest[h] - reference[h];
        factor[h] = 1.0f;
      }
      if (!is_first && !__any_sync(kFullWarp, rise[0] > kSlack || rise[1] > kSlack)) return;
      if (__any_sync(kFullWarp, rise[0] > kFarthest || rise[1] > kFarthest)) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float sample = QuadMax(LaneMaxWithBias<4>(scale, s, h));
          if (rise[h] > kFarthest) highest[h] = sample;
        }
      }
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float sample[2] = {s[1][2 * h], s[3][2 * h]};
#pragma unroll
        for (int j = 5; j < kTiles; j += 2) {
          sample[j / 2 % 2] = fmaxf(sample[j / 2 % 2], s[j][2 * h]);
        }
        highest[h] = QuadMax(fmaxf(sample[0], sample[1])) * ScaleOfRow(scale, h);
      }
    }
    bool moves = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float before = reference[h];
      const bool follows = is_first ? highest[h] > kInitialMax : highest[h] - before > kSlack;
      if (follows) reference[h] = highest[h];
      factor[h] = 1.0f;
      if (follows && !is_first) factor[h] = Exp2(before - highest[h]);
      sum[h] *= factor[h];
      moves |= follows;
    }
    grows_ = __any_sync(kFullWarp, moves);
  }

  // Of the tiles [kFirst, kEnd): logits become weights.
  template <int kFirst, int kEnd, int kTiles>
  __device__ __forceinline__ void Weights(float scale, float (&s)[kTiles][4],
                                          StepSums& sums) const {
    float terms[2];
    if constexpr (kAddsLines) {
#pragma unroll
      for (int h = 0; h < 2; ++h) terms[h] = bias_[h].term - reference[h];
    }
    const float scales[2] = {ScaleOfRow(scale, 0), ScaleOfRow(scale, 1)};
#pragma unroll
    for (int j = kFirst; j < kEnd; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if constexpr (kAddsLines && kHasSlope) {
          const float bias =
              fmaf(bias_[c / 2].slope, static_cast<float>(8 * j + c % 2), terms[c / 2]);
          s[j][c] = Exp2(fmaf(s[j][c], scale, bias));
        } else if constexpr (kAddsLines) {
          s[j][c] = Exp2(fmaf(s[j][c], scale, terms[c / 2]));
        } else {
          s[j][c] = LogitStage<Traits>::Weight(s[j][c], scales[c / 2], reference[c / 2]);
        }
        sums[c / 2][c % 2] += s[j][c];
      }
    }
  }
  // Scores of products of codes are multiplied by the scale of their row's q at once, or with that
  // of the logits in the exponent.
  static constexpr bool kScalesRowsLater = kFitsCodes && LogitStage<Traits>::kScalesLater;
  __device__ __forceinline__ float ScaleOfRow(float scale, int h) const {
    if constexpr (kScalesRowsLater) return scale * q_scales_[h];
    return scale;
  }

  // What o of codes of weights is multiplied by so that it belongs to the sum of the weights
  // themselves, which is the row's in lse and merges. The first of a row's lanes has the former.
  __device__ __forceinline__ float SumOverRounded(int h) const {
    const float rounded = __shfl_sync(kFullWarp, rounded_[h], lane_ / 4 * 4);
    return sum[h] == 0.0f ? 1.0f : sum[h] * Reciprocal(rounded);
  }

  // Codes of weights end at 448, and what is below 2^-10 becomes 0. So a row whose largest sum of a
  // lane's weights exceeds that has them divided by a power of two, and with them all that came
  // before; in a first step, where the reference is still any, they may be multiplied. What is left
  // of 448 then, a factor of 2 to 4, spares nearly every step behind it the same. No logit is
  // compared: a lane's weights are at most their sum, and if that is of many, what is lost at the
  // lower end is as small beside it.
  template <int kTiles>
  __device__ __forceinline__ void FitCodes(bool is_first, float (&s)[kTiles][4]) {
    grows_ = false;
    factor[0] = factor[1] = 1.0f;
    before_fit_[0] = reference[0];
    before_fit_[1] = reference[1];
    const bool fit = step_sum_[0] <= kLargestCode && step_sum_[1] <= kLargestCode;
    if (!__any_sync(kFullWarp, is_first || !fit)) return;
    grows_ = true;
#pragma unroll
    for (int h = 0; h < 2; ++h) FitRow(is_first, h, QuadMax(step_sum_[h]), s);
  }
  template <int kTiles>
  __device__ __forceinline__ void FitRow(bool always, int h, float most, float (&s)[kTiles][4]) {
    // What is beyond these comes again, with another reference.
    if (!(most >= 0x1p-64f && most <= 0x1p64f) || !(always || most > kLargestCode)) return;
    // The power of two that takes it to between 0.875 and 1.75 * 2^kFitted, 1.75 * 2^8 being 448.
    const int power = kFitted + 127 - static_cast<int>((__float_as_uint(most) + 0x200000) >> 23);
    const float fit = __uint_as_float(static_cast<u32>(127 + power) << 23);
    reference[h] -= static_cast<float>(power);
    step_sum_[h] *= fit;
    sum[h] *= fit;
    factor[h] *= fit;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      s[j][2 * h] *= fit;
      s[j][2 * h + 1] *= fit;
    }
  }
  // The weights of ExponentiateAnew. keeps: of each row whether it needed none: it is given those
  // of Exponentiate again, bit for bit, which it fitted by `fits`.
  template <int kTiles>
  __device__ __forceinline__ void FitCodesAnew(const bool (&keeps)[2], const float (&fits)[2],
                                               float scale, float (&s)[kTiles][4]) {
    float fitted[2];
    StepSums sums = {};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      fitted[h] = reference[h];
      if (keeps[h]) reference[h] = before_fit_[h];
    }
    Weights<0, kTiles>(scale, s, sums);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      step_sum_[h] = sums[h][0] + sums[h][1];
      const float most = QuadMax(step_sum_[h]);
      if (!keeps[h]) {
        FitRow(true, h, most, s);
        continue;
      }
      reference[h] = fitted[h];
      step_sum_[h] *= fits[h];
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        s[j][2 * h] *= fits[h];
        s[j][2 * h + 1] *= fits[h];
      }
    }
  }
  // Tiles 2i and 2i + 1 of 8 tokens are 4 bytes of a row's fragment: ValueTransposer has the tokens
  // in that order.
  template <int kTiles>
  __device__ __forceinline__ static void PackCodes(const float (&s)[kTiles][4],
                                                   u32 (&p)[kTiles / 4][4]) {
#pragma unroll
    for (int j = 0; j < kTiles; j += 2) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        p[j / 4][j / 2 % 2 * 2 + h] =
            PackE4m3(s[j][2 * h], s[j][2 * h + 1], s[j + 1][2 * h], s[j + 1][2 * h + 1]);
      }
    }
  }

  template <int kFirst, int kEnd, int kTiles>
  __device__ __forceinline__ static void Pack(const float (&s)[kTiles][4],
                                              u32 (&p)[kTiles / 2][4]) {
#pragma unroll
    for (int j = kFirst; j < kEnd; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) p[j / 2][j % 2 * 2 + h] = E::Pack(s[j][2 * h], s[j][2 * h + 1]);
    }
  }

  // Bounds of a step's sum of weights. bf16 has the exponents of f32: up to 2^60 neither sums nor o
  // come near infinity, and from 2^-60 on nothing that counts becomes zero. f16 ends at 2^16, and
  // loses bits below 2^-14.
  static constexpr bool kWide = Traits::kDtype == kElementBf16 || kFitsCodes;
  static constexpr float kMost = kWide ? 0x1p60f : 0x1p8f;
  static constexpr float kLeast = kAddsLines ? 0x1p-40f : kWide ? 0x1p-60f : 1.0f;
  // Of codes of weights, and log2 of what a row's largest sum of a lane is fitted to, see FitRow.
  static constexpr float kLargestCode = 448.0f;
  static constexpr int kFitted = 7;
  // Of this lane's columns; true for NaN.
  __device__ bool IsTooMuch(int h) const { return !(step_sum_[h] <= kMost); }
  // Of the row, by all of its lanes. True as well for a row that sees nothing in the step.
  __device__ bool IsTooLittle(int h) const { return QuadSum(step_sum_[h]) < kLeast; }
  // How far references follow a bias at once, log2. What kLeast leaves of a row is still there
  // behind it.
  static constexpr float kFarthest = 80.0f;
  // Whether the row's reference has followed a bias, and scores fall short of what they were: by
  // all of its lanes.
  __device__ bool IsLost(int h) const {
    return (QuadSum(sum[h] + step_sum_[h]) < kLeast) & (factor[h] != 1.0f);
  }

  static constexpr bool kHasSlope = Traits::Variant::kHasSlope;
  template <int kTiles>
  __device__ __forceinline__ bool SeenByAll(int begin) const {
    return begin >= all_begin_ && begin + 8 * kTiles <= all_end_;
  }

  // Rows with a result that is not finite may have it from a value that they do not see. A row with
  // a NaN among its logits does not: it is NaN. nan_rows: of each row the lanes that have such a
  // result.
  __device__ __forceinline__ void Mend(const u32 (&nan_rows)[2], const float (&o_scale)[2]) const {
    __syncwarp();  // what the lanes wrote is about to be overwritten by others
    u32 rows = 0;
    float references[2], o_scales[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const u32 has_sum = __ballot_sync(kFullWarp, sum[h] == sum[h]);
#pragma unroll
      for (int r = 0; r < 8; ++r) {
        const u32 lanes = 0xfu << 4 * r;
        rows |= u32{(nan_rows[h] & has_sum & lanes) != 0} << (8 * h + r);
      }
      references[h] = __shfl_sync(kFullWarp, reference[h], lane_ % 8 * 4);
      o_scales[h] = __shfl_sync(kFullWarp, o_scale[h], lane_ % 8 * 4);
    }
    const int h = lane_ / 8 % 2;
    MendRows<Traits>(p_, index_, first_row_, rows, h == 0 ? references[0] : references[1],
                     h == 0 ? o_scales[0] : o_scales[1], lane_);
  }

  __device__ __forceinline__ LogitStage<Traits> Stage() const {
    return LogitStage<Traits>(p_, index_, k_scale_);
  }

  const AttentionParams& p_;
  const int index_;  // of the item
  const int first_row_, lane_;
  const float k_scale_;
  int all_begin_, all_end_;  // inside of it every row of the warp sees everything
  bool live_, differ_;       // differ_: some rows see tokens that others do not
  bool grows_ = false;
  float step_sum_[2];  // of the last Exponentiate
  // Of kFitsCodes: what q of the rows is multiplied by, and references of the last Exponentiate
  // ahead of FitCodes.
  float q_scales_[2], before_fit_[2];
  float rounded_[2] = {0.0f, 0.0f};  // of its first lane: the sum of a row's codes in o
  // Of kAddsLines, log2: the bias of the step at the lane's first column, the highest one of keys
  // that the row sees, and by how much the reference is to exceed that.
  BiasLine bias_[2];
  typename Traits::Variant::Row of_rows_[2];
  float highest_bias_[2], lift_[2] = {0.0f, 0.0f};
};

}  // namespace jax_attn
