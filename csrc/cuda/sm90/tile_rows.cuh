// The 16 rows of a warp in registers: softmax of the logits that wgmma leaves there, and results.
#pragma once

#include "cuda/common/logits.cuh"
#include "cuda/common/partials.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/recompute_nan_rows.cuh"

namespace jax_attn {

// The running max of a row follows a logit only when the logit exceeds it by more than this, in
// log2. Until then sums are far from overflow, and nearly every step skips the rescaling of o
// (FlashAttention-4's observation). Each row decides for itself, so its bits do not depend on its
// neighbours. A row that keeps its running max has a factor of exactly 1.
inline constexpr float kMaxSlack = 8.0f;

// The running max of a row that has not seen any logit. It is below all logits, and finite, so that
// -inf is still below it.
inline constexpr float kInitialMax = -3.402823466e38f;

// State of a warp's 16 rows after the kv tokens seen so far, without o. Index h is row 8h + lane /
// 4. Of this row the lane has columns 8j + 2 * (lane % 4) + {0, 1} in logits and o.
template <class Traits>
class TileRows {
 public:
  using E = Element<Traits::kDtype>;

  // Subtracted in the exponents, see Exponentiate. In log2, or in base 4 in a far row (logits.cuh),
  // for which every step is recomputed. Other loops read it by MaxLog4.
  float running_max[2];
  float sum[2] = {0.0f, 0.0f};  // over this lane's columns only, until FinishSums
  float factor[2];              // from the running maxima before the last step to those after it

  // first_row: the warpgroup's first row within the item. first_max: initial running max of all
  // rows; -inf: none.
  __device__ __forceinline__ TileRows(const AttentionParams& p, int index, int first_row,
                                      int thread, float first_max)
      : p_(p),
        index_(index),
        first_row_(first_row + thread / kWarpSize * 16),
        lane_(thread % 32),
        k_scale_(KeyScale<Traits>(p, index)) {
    const ItemRecord item(p, index);
    const int num_rows = item.qo_len() * Traits::kGroupSize;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      far_[h] = false;
      running_max[h] = first_max;
      if (first_max == -Infinity()) SetMax(h, first_max);
    }
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
    // A warp may have rows of one token: the last one of an item, which may see less on the left
    // than others, and any with 16 heads and more. Its products have the keys of all rows.
    if constexpr (Traits::kHasWindowLeft || (Traits::kHasWindowRight && Traits::kGroupSize >= 16)) {
      const VisibleSpan all = SpanOfItem<Traits>(p, item);
      differ_ = differ_ || span.all_begin > all.any_begin || span.all_end < all.any_end;
    }
  }

  // FP8 products: sets the scales of q of the thread's two rows.
  __device__ __forceinline__ void SetQueryScales(const float (&scales)[2]) {
    q_scales_[0] = scales[0];
    q_scales_[1] = scales[1];
  }

  // Softmax scale, the same for every row.
  __device__ __forceinline__ float Scale() const {
    if constexpr (kAddsLines) return Stage().ScaleOfScores();
    return Stage().scale();
  }

  // Finds the bias of a step's logits if the exponents add it (kAddsLines). Call it before
  // MakeLogits; it needs no logits.
  template <int kTiles>
  __device__ __forceinline__ void FindBias(KvStep<Traits> step) {
    if constexpr (kAddsLines) FindLines<kTiles>(step.begin());
  }

  // Turns Q K^T of a step into logits, without their scale and without the bias of FindBias.
  template <int kTiles>
  __device__ __forceinline__ void MakeLogits(KvStep<Traits> step, float (&s)[kTiles][4]) const {
    if constexpr (kAddsLines) {
      if (SeenByAll<kTiles>(step.begin())) return;
      Stage().Mask(RowMajorLayout<1, kTiles>(first_row_, lane_), step.begin(), s);
    } else {
      MakeLogits(step.begin(), s, step.is_masked());
    }
  }
  // The same for the tokens from `begin` on, with any bias. For ExponentiateByMaxima.
  template <int kTiles>
  __device__ __forceinline__ void MakeLogits(int begin, float (&s)[kTiles][4],
                                             bool is_masked = true) const {
    if constexpr (kFp8P && !kScalesRowsLater) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) s[j][c] *= q_scales_[c / 2];
      }
    }
    Stage().Apply(RowMajorLayout<1, kTiles>(first_row_, lane_), begin, SeenByAll<kTiles>(begin),
                  is_masked, s);
  }

  // p = 2^(logit - running max), packed: the accumulators of two neighbouring 8-column tiles are
  // operand a of P V as they are. s is overwritten. p is written only after between(): until then
  // products of the step before may read it.
  //
  // No maxima are computed: that would take as long as the exponentials. Any running max is as good
  // as the true one while nothing overflows or vanishes. So it stays 0 until the sums of a step
  // show that it does not do. Then this returns true in some of the row's four lanes, and the
  // caller calls RecomputeP with the same logits. Each row decides for itself, so its bits do not
  // depend on its neighbours.
  // scale: Scale(), which the caller loads before the logits are there.
  //
  // FP8: P is fitted to the range of e4m3 before packing, see FitToFp8. Call Rescale afterwards.
  template <int kTiles, int kFragments, class Between>
  __device__ __forceinline__ bool Exponentiate(float scale, bool is_first, float (&s)[kTiles][4],
                                               u32 (&p)[kFragments][4], const Between& between) {
    constexpr int kHalf = kTiles / 4 * 2;
    grows_ = false;
    if constexpr (kMoves) FollowLogits(scale, is_first, s);
    StepSums sums = {};
    ComputeP<0, kHalf>(scale, s, sums);
    KeepBefore(sums[0][0] + sums[0][1] + sums[1][0] + sums[1][1]);
    between();
    if constexpr (!kFp8P) Pack<0, kHalf>(s, p);
    ComputeP<kHalf, kTiles>(scale, s, sums);
    if constexpr (!kFp8P) Pack<kHalf, kTiles>(s, p);
#pragma unroll
    for (int h = 0; h < 2; ++h) step_sum_[h] = sums[h][0] + sums[h][1];
    if constexpr (!kNormalizes) return false;
    bool again = IsTooMuch(0) || IsTooMuch(1) || far_[0] || far_[1];
    if (is_first) again |= IsTooLittle(0) | IsTooLittle(1);
    if constexpr (kFp8P) {
      FitToFp8(is_first, s);
      PackFp8(s, p);
    }
    if (kAddsLines && kMoves && !is_first && grows_) again |= IsLost(0) | IsLost(1);
    return again;
  }

  // The same for a step whose first try failed: rows that need it take the step's maximum as
  // running max.
  template <int kTiles, int kFragments>
  __device__ __forceinline__ void RecomputeP(bool is_first, float (&s)[kTiles][4],
                                             u32 (&p)[kFragments][4]) {
    bool keeps[2] = {false, false};
    const float fits[2] = {factor[0], factor[1]};
    const float scale = Scale();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float step_max = kAddsLines ? 0.5f * QuadMax(LaneMaxWithBias<1>(scale, s, h))
                                        : QuadMax(LaneMax(s, h)) * (0.5f * ScaleOfRow(scale, h));
      const bool too_little = is_first && IsTooLittle(h);
      const bool is_lost = kAddsLines && kMoves && !is_first && IsLost(h);
      const u32 lanes = __ballot_sync(kFullWarp, too_little || is_lost || IsTooMuch(h) || far_[h]);
      factor[h] = 1.0f;
      keeps[h] = (lanes >> lane_ / 4 * 4 & 0xf) == 0;
      if (keeps[h]) continue;
      const float before = MaxLog4(h), least = is_lost ? before - 0.5f * kFarthest : before;
      const float new_max = fmaxf(is_first ? -Infinity() : least, step_max);
      if (!is_first) factor[h] = StateWeight(before, new_max);
      SetMax(h, new_max);
      sum[h] *= factor[h];
      if constexpr (kAddsLines && kMoves)
        lift_[h] = far_[h] ? 0.0f : running_max[h] - highest_bias_[h];
    }
    StepSums sums = {};
    if constexpr (kFp8P) {
      RefitFp8P(keeps, fits, scale, s);
      PackFp8(s, p);
    } else {
      ComputeP<0, kTiles, true>(scale, s, sums);
      Pack<0, kTiles>(s, p);
#pragma unroll
      for (int h = 0; h < 2; ++h) step_sum_[h] = sums[h][0] + sums[h][1];
    }
    grows_ = true;
  }
  // The running max of row h in base 4; -inf: none.
  __device__ __forceinline__ float MaxLog4(int h) const {
    if (far_[h]) return running_max[h];
    return running_max[h] == kInitialMax ? -Infinity() : 0.5f * running_max[h];
  }
  // A row without a running max needs none in later steps, either, if every logit that it may see
  // is so far above kInitialMax that IsTooMuch tells.
  __device__ __forceinline__ void SetMax(int h, float max_log4) {
    const bool exists =
        first_row_ + 8 * h + lane_ / 4 < ItemRecord(p_, index_).qo_len() * Traits::kGroupSize;
    const bool needs_none =
        max_log4 == -Infinity() && !(LogitStage<Traits>::kMayBeLowest && !kAddsLines && exists);
    far_[h] = !(fabsf(max_log4) < 0.5f * kFarLog2) && !needs_none;
    running_max[h] = needs_none ? kInitialMax : far_[h] ? max_log4 : 2.0f * max_log4;
  }
  // Adds the sums of the step. Call it after the last Exponentiate or RecomputeP of a step.
  __device__ __forceinline__ void AddSums() {
#pragma unroll
    for (int h = 0; h < 2; ++h) sum[h] += step_sum_[h];
  }

  // Whether exponents add the bias of FindBias. Not in f16, whose range needs the true maximum as
  // running max, and not with a user's mask, which may hide the keys of the highest bias.
  static constexpr bool kAddsLines = LogitStage<Traits>::kIsLine &&
                                     Traits::kDtype == kElementBf16 && !Traits::Variant::kHasMask &&
                                     !Traits::kIsMla && !Traits::kFp8Matmul;
  // Whether Exponentiate may change running maxima in steps after the first one, so that o must
  // follow by Rescale.
  static constexpr bool kMoves =
      LogitStage<Traits>::kNormalizes && Traits::Variant::kLogitsFollowKeys;
  // Whether P becomes e4m3.
  static constexpr bool kFp8P = Traits::kFp8Matmul;

  // For loops that compute maxima; rows begin without one. s becomes P. A running max follows
  // when a logit exceeds it by kMaxSlack. Returns whether any of the warp's rows did.
  template <int kTiles>
  __device__ __forceinline__ bool ExponentiateByMaxima(float (&s)[kTiles][4]) {
    const float scale = Stage().scale();
    grows_ = kNormalizes && AnyGrows(s);
    if (grows_) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float step_max = QuadMax(LaneMax(s, h)), step_log4 = step_max * (0.5f * scale);
        const float before = MaxLog4(h);
        const bool row_grows =
            far_[h] ? step_log4 > before : fmaf(step_max, scale, -running_max[h]) > kMaxSlack;
        const float new_max = row_grows ? step_log4 : before;
        factor[h] = StateWeight(before, new_max);
        SetMax(h, new_max);
        sum[h] *= factor[h];
      }
    }
    StepSums sums = {{sum[0], 0.0f}, {sum[1], 0.0f}};
    if (grows_) {
      ComputeP<0, kTiles, true>(scale, s, sums);
    } else {
      ComputeP<0, kTiles>(scale, s, sums);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) sum[h] = sums[h][0] + sums[h][1];
    return grows_;
  }
  // Whether ExponentiateByMaxima would change a running max of the warp's rows. A row's changes if
  // and only if one of its lanes says so.
  template <int kTiles>
  __device__ __forceinline__ bool AnyGrows(const float (&s)[kTiles][4]) const {
    const float scale = Stage().scale();
    const float excess = fmaxf(fmaf(LaneMax(s, 0), scale, -running_max[0]),
                               fmaf(LaneMax(s, 1), scale, -running_max[1]));
    return __any_sync(kFullWarp, excess > kMaxSlack || far_[0] || far_[1]);
  }

  // Takes the running maxima, in base 4, of a step that another warp exponentiated, and that
  // changed some.
  __device__ __forceinline__ void Follow(float new_max_0, float new_max_1) {
    const float new_max[2] = {new_max_0, new_max_1};
    grows_ = true;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      factor[h] = StateWeight(MaxLog4(h), new_max[h]);
      SetMax(h, new_max[h]);
      sum[h] *= factor[h];
    }
  }

  // Rescales o of earlier steps to the running maxima of the last Exponentiate or Follow.
  template <int kTiles>
  __device__ __forceinline__ void Rescale(float (&o)[kTiles][4]) {
    if (!grows_) return;
    if constexpr (kFp8P) {
      rounded_[0] *= factor[0];
      rounded_[1] *= factor[1];
    }
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) o[j][c] *= factor[c / 2];
    }
  }

  // Adds the FP8 P V of a step to o, and its sums of P (kSumColumns) to rounded_.
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
    return {sum[h] == 0.0f ? -Infinity() : MaxLog4(h), sum[h]};  // sum 0: the identity
  }

  // Final rows: a row's four lanes store 64 neighbouring bytes at a time. Measured (H200): with 16
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
      if constexpr (kFp8P) fit = SumOverRounded(h);
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
          if constexpr (kFp8P) {
            left *= fit;
            right *= fit;
          }
          nan_or_zero = fmaf(left, 0.0f, fmaf(right, 0.0f, nan_or_zero));
          *reinterpret_cast<float2*>(to + 8 * j) = make_float2(left, right);
        }
      }
      nan_rows[h] = kMayDiffer ? __ballot_sync(kFullWarp, exists && nan_or_zero != 0.0f) : 0;
    }
    if (kMayDiffer && differ_ && (nan_rows[0] | nan_rows[1]) != 0)
      RecomputeRows(nan_rows, o_scales);
  }

  // Whether WriteByTma can write the rows: all 16 exist and are final.
  __device__ __forceinline__ bool AreWhole() const {
    const ItemRecord item(p_, index_);
    const int partial_row = item.partial_row(), num_rows = item.qo_len() * Traits::kGroupSize;
    return p_.has_o_map && partial_row < 0 && first_row_ + 16 <= num_rows;
  }

  // Writes lse of rows that WriteByTma writes, and returns the factors of their o.
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
        results[h] = FinishAttentionRow<Traits>(state(h), SinkLog4(p_, map.QoHead(row + 8 * h)));
      }
    }
    // One lane writes each row. Eight rows further are other tokens of the same head, or other
    // heads of the token.
    const bool second = lane_ % 4 == 1;
    const i64 at = map.Index(row) + (second ? Max(8 / kGroup * p_.num_qo_heads, 8 % kGroup) : 0);
    if (lane_ % 4 < 2) p_.lse[at] = (second ? results[1] : results[0]).lse;
#pragma unroll
    for (int h = 0; h < 2; ++h) o_scale[h] = results[h].o_scale;
  }

  // Writes o of such rows by TMA. `staging`: for each 64 columns 16 rows of 128 bytes, swizzled.
  // TMA reads them until lane 0 has waited for it.
  template <int kTiles>
  __device__ __forceinline__ void WriteByTma(const float (&o)[kTiles][4], const float (&o_scale)[2],
                                             u32 staging) const {
    const ItemRecord item(p_, index_);
    const int head = Uniform(item.kv_head()) * Traits::kGroupSize;
    const int token = Uniform(item.first_token() + first_row_ / Traits::kGroupSize);
    const u32 to = staging + lane_ % 16 * 128 + (lane_ / 16 ^ lane_ % 8) * 16;
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
      StoreMatrix4((to ^ j % 8 * 16) + j / 8 * kTmaTileBytes, x);
    }
    FenceSharedForWgmma();
    __syncwarp();
    if (lane_ == 0) {
#pragma unroll
      for (int block = 0; block < kTiles / 8; ++block) {
        StoreTmaTile(p_.o_map, 64 * block, head, token, staging + block * kTmaTileBytes);
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
        RecomputeRows(nan_rows, o_scale);
      }
    }
  }

 private:
  static constexpr int kTmaTileBytes = 16 * 128;
  static constexpr bool kMayDiffer = kRowsMayDiffer<Traits>;
  static constexpr bool kNormalizes = LogitStage<Traits>::kNormalizes;
  using StepSums = float[2][2];  // of a row's even and odd columns: two chains of additions

  // The maximum of row h over this lane's columns.
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
    float lowest[2] = {0.0f, 0.0f},
          highest[2] = {8 * kTiles - 1, 8 * kTiles - 1};  // offsets in the step
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

  // The maximum of row h's logits with scale and bias, over this lane's columns of every kStride-th
  // tile from the last one downwards.
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
  __device__ __forceinline__ float BiasAt(int h, int offset) const {
    if constexpr (!kHasSlope) return bias_[h].term;
    return fmaf(bias_[h].slope, static_cast<float>(offset), bias_[h].term);
  }

  // Moves running maxima before the exponentials. Logits with a term of their key, such as a slope
  // times its position, may rise from step to step without end; each step would be exponentiated
  // twice. If the bias is a line, its highest value in the step is known, and the scores are
  // assumed to add what they added in the last recomputed step (lift_). Only if that would move the
  // running max so far that what is there is lost, a sample decides: a quarter of the logits, as
  // with every other bias. The rest of the range is enough for the other logits.
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
        rise[h] = is_first ? 0.0f : highest[h] - running_max[h];
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
      const float before = running_max[h];
      const bool follows =
          !far_[h] && fabsf(highest[h]) < kFarLog2 && (is_first || highest[h] - before > kSlack);
      if (follows) running_max[h] = highest[h];
      factor[h] = 1.0f;
      if (follows && !is_first) factor[h] = Exp2(before - highest[h]);
      sum[h] *= factor[h];
      moves |= follows;
    }
    grows_ = __any_sync(kFullWarp, moves);
  }

  // Turns logits of the tiles [kFirst, kEnd) into P, not packed. Without kMayBeFar, P of far rows
  // is anything.
  template <int kFirst, int kEnd, bool kMayBeFar = false, int kTiles>
  __device__ __forceinline__ void ComputeP(float scale, float (&s)[kTiles][4],
                                           StepSums& sums) const {
    float terms[2];
    if constexpr (kAddsLines) {
#pragma unroll
      for (int h = 0; h < 2; ++h) terms[h] = bias_[h].term - running_max[h];
    }
    const float scales[2] = {ScaleOfRow(scale, 0), ScaleOfRow(scale, 1)};
#pragma unroll
    for (int j = kFirst; j < kEnd; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (kMayBeFar && far_[c / 2]) {
          s[j][c] = Exp2(ExponentInFarRow(scales[c / 2], s[j][c], c / 2, 8 * j + c % 2));
        } else if constexpr (kAddsLines && kHasSlope) {
          const float bias =
              fmaf(bias_[c / 2].slope, static_cast<float>(8 * j + c % 2), terms[c / 2]);
          s[j][c] = Exp2(fmaf(s[j][c], scale, bias));
        } else if constexpr (kAddsLines) {
          s[j][c] = Exp2(fmaf(s[j][c], scale, terms[c / 2]));
        } else {
          s[j][c] = LogitStage<Traits>::Weight(s[j][c], scales[c / 2], running_max[c / 2]);
        }
        sums[c / 2][c % 2] += s[j][c];
      }
    }
  }
  __device__ __forceinline__ float ExponentInFarRow(float scale, float s, int h, int offset) const {
    const float max_log4 = FiniteMax(running_max[h]);
    if constexpr (kAddsLines)
      return 2.0f * __fsub_rn(0.5f * fmaf(s, scale, BiasAt(h, offset)), max_log4);
    return LogitStage<Traits>::kNormalizes ? FarExponent(s, scale, max_log4) : s;
  }
  // FP8: scores are multiplied by the scale of their row's q at once, or together with the softmax
  // scale in the exponent (kScalesRowsLater).
  static constexpr bool kScalesRowsLater = kFp8P && LogitStage<Traits>::kScalesLater;
  __device__ __forceinline__ float ScaleOfRow(float scale, int h) const {
    if constexpr (kScalesRowsLater) return scale * q_scales_[h];
    return scale;
  }

  // FP8: o is a sum of rounded P. This factor makes it fit the sum of P itself, which lse and
  // merges use. The first of a row's lanes has the rounded sum.
  __device__ __forceinline__ float SumOverRounded(int h) const {
    const float rounded = __shfl_sync(kFullWarp, rounded_[h], lane_ / 4 * 4);
    return sum[h] == 0.0f ? 1.0f : sum[h] * Reciprocal(rounded);
  }

  // Fits P to e4m3, whose largest value is 448 and which rounds values below 2^-10 to 0. If a
  // lane's sum of a row's P exceeds 448, the row's P is divided by a power of two, with everything
  // summed before. In a first step, where the running max is arbitrary, P may also be multiplied.
  // The result leaves a factor of 2 to 4 below 448, so nearly every later step needs no fit. No
  // logit is compared: each P of a lane is at most their sum, and if that is a sum of many, what is
  // lost at the lower end is small beside it.
  template <int kTiles>
  __device__ __forceinline__ void FitToFp8(bool is_first, float (&s)[kTiles][4]) {
    grows_ = false;
    factor[0] = factor[1] = 1.0f;
    before_fit_[0] = running_max[0];
    before_fit_[1] = running_max[1];
    const bool fit = step_sum_[0] <= kLargestE4m3 && step_sum_[1] <= kLargestE4m3;
    if (!__any_sync(kFullWarp, is_first || !fit)) return;
    grows_ = true;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float most = QuadMax(step_sum_[h]);
      if (!far_[h]) FitRow(is_first, h, most, s);
    }
  }
  template <int kTiles>
  __device__ __forceinline__ void FitRow(bool always, int h, float most, float (&s)[kTiles][4]) {
    // Sums outside of these bounds are recomputed with another running max.
    if (!(most >= 0x1p-64f && most <= 0x1p64f) || !(always || most > kLargestE4m3)) return;
    // The power of two that takes it to between 0.875 and 1.75 * 2^kFitted; 1.75 * 2^8 is 448.
    const int power = kFitted + 127 - static_cast<int>((__float_as_uint(most) + 0x200000) >> 23);
    const float fit = __uint_as_float(static_cast<u32>(127 + power) << 23);
    running_max[h] -= static_cast<float>(power);
    step_sum_[h] *= fit;
    sum[h] *= fit;
    factor[h] *= fit;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      s[j][2 * h] *= fit;
      s[j][2 * h + 1] *= fit;
    }
  }
  // P of RecomputeP. keeps: whether the row needs no other running max. Such a row gets the P of
  // Exponentiate again, bit for bit, which was fitted by `fits`.
  template <int kTiles>
  __device__ __forceinline__ void RefitFp8P(const bool (&keeps)[2], const float (&fits)[2],
                                            float scale, float (&s)[kTiles][4]) {
    float fitted[2];
    StepSums sums = {};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      fitted[h] = running_max[h];
      if (keeps[h]) running_max[h] = before_fit_[h];
    }
    ComputeP<0, kTiles, true>(scale, s, sums);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      step_sum_[h] = sums[h][0] + sums[h][1];
      const float most = QuadMax(step_sum_[h]);
      if (!keeps[h]) {
        if (!far_[h]) FitRow(true, h, most, s);  // P of far rows is at most 4
        continue;
      }
      running_max[h] = fitted[h];
      step_sum_[h] *= fits[h];
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        s[j][2 * h] *= fits[h];
        s[j][2 * h + 1] *= fits[h];
      }
    }
  }
  // Tiles 2i and 2i + 1 of 8 tokens are 4 bytes of a row's fragment. ValueTransposer puts the
  // tokens in the same order.
  template <int kTiles>
  __device__ __forceinline__ static void PackFp8(const float (&s)[kTiles][4],
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

  // Bounds of a step's sum of P. bf16 has the exponents of f32: up to 2^60 neither sums nor o come
  // near infinity, and from 2^-60 on nothing that counts becomes zero. f16 ends at 2^16, and loses
  // bits below 2^-14.
  static constexpr bool kWide = Traits::kDtype == kElementBf16 || kFp8P;
  static constexpr float kMost = kWide ? 0x1p60f : 0x1p8f;
  static constexpr float kLeast = kAddsLines ? 0x1p-40f : kWide ? 0x1p-60f : 1.0f;
  // The largest e4m3, and log2 of what FitRow fits a row's largest lane sum to.
  static constexpr float kLargestE4m3 = 448.0f;
  static constexpr int kFitted = 7;
  // Whether this lane's sum may overflow; true for NaN.
  __device__ bool IsTooMuch(int h) const { return !(step_sum_[h] <= kMost); }
  // Whether the row's sum over all of its lanes vanishes. Also true for a row that sees nothing in
  // the step.
  __device__ bool IsTooLittle(int h) const { return QuadSum(step_sum_[h]) < kLeast; }
  // How far running maxima follow a bias at once, log2. What kLeast leaves of a row is still there
  // after such a move.
  static constexpr float kFarthest = 80.0f;
  // Whether the row's running max followed a bias, and its scores are too far below. All of the
  // row's lanes call it.
  __device__ bool IsLost(int h) const {
    return (QuadSum(sum[h] + step_sum_[h]) < kLeast) & (factor[h] != 1.0f);
  }

  static constexpr bool kHasSlope = Traits::Variant::kHasSlope;
  template <int kTiles>
  __device__ __forceinline__ bool SeenByAll(int begin) const {
    return begin >= all_begin_ && begin + 8 * kTiles <= all_end_;
  }

  // Recomputes rows whose result is not finite because of a value that they do not see. A row with
  // a NaN among its logits is NaN rightly and stays. nan_rows: for each h, the lanes that have such
  // a result.
  __device__ __forceinline__ void RecomputeRows(const u32 (&nan_rows)[2],
                                                const float (&o_scale)[2]) const {
    __syncwarp();  // other lanes are about to overwrite what the lanes wrote
    u32 rows = 0;
    float maxima_log4[2], o_scales[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const u32 has_sum = __ballot_sync(kFullWarp, sum[h] == sum[h]);
#pragma unroll
      for (int r = 0; r < 8; ++r) {
        const u32 lanes = 0xfu << 4 * r;
        rows |= u32{(nan_rows[h] & has_sum & lanes) != 0} << (8 * h + r);
      }
      maxima_log4[h] = __shfl_sync(kFullWarp, MaxLog4(h), lane_ % 8 * 4);
      o_scales[h] = __shfl_sync(kFullWarp, o_scale[h], lane_ % 8 * 4);
    }
    const int h = lane_ / 8 % 2;
    RecomputeNonFiniteRows<Traits>(p_, index_, first_row_, rows,
                                   h == 0 ? maxima_log4[0] : maxima_log4[1],
                                   h == 0 ? o_scales[0] : o_scales[1], lane_);
  }

  __device__ __forceinline__ LogitStage<Traits> Stage() const {
    return LogitStage<Traits>(p_, index_, k_scale_);
  }

  const AttentionParams& p_;
  const int index_;  // of the item
  const int first_row_, lane_;
  const float k_scale_;
  int all_begin_, all_end_;  // inside it every row of the warp sees everything
  bool live_, differ_;       // differ_: some rows see tokens that others do not
  bool grows_ = false;
  bool far_[2];
  float step_sum_[2];  // of P in the last Exponentiate
  // kFp8P: scales of q of the rows, and running maxima of the last Exponentiate before FitToFp8.
  float q_scales_[2], before_fit_[2];
  float rounded_[2] = {0.0f, 0.0f};  // in a row's first lane: the sum of its rounded P
  // kAddsLines, in log2: the bias of the step at the lane's first column; the highest bias of keys
  // that the row sees; and by how much the running max should exceed that.
  BiasLine bias_[2];
  typename Traits::Variant::Row of_rows_[2];
  float highest_bias_[2], lift_[2] = {0.0f, 0.0f};
};

}  // namespace jax_attn
