// Turns Q K^T into logits and masks them. This is the only place between the two products where a
// kernel knows positions. A plain softmax pays nothing for it.
#pragma once

#include "cuda/common/head_scales.cuh"
#include "cuda/common/variant.cuh"
#include "cuda/common/work.cuh"

namespace jax_attn {

// --- layouts ---

// A Layout tells which logits of a tile a thread has: exactly those of kRows rows by kKeys keys.
//   At(s, r, k): the register of row r and key k
//   Row(r): its row in the item
//   FirstKey() + Key(k): its kv position within the tile; Key is known at compile time
//   FirstEight(): FirstKey(), rounded down to a multiple of 8, so that Key(k) / 8 * 8 may be added
//   to it; the tile begins at a multiple of 8
//   Has(r): false from the first row on that holds nothing
struct LayoutBase {
  __device__ static constexpr bool Has(int) { return true; }
};

// Accumulators of mma.sync, and of wgmma whose rows are rows of the item, 16 a tile.
template <int kMTiles, int kNTiles>
struct RowMajorLayout : LayoutBase {
  static constexpr int kRows = 2 * kMTiles, kKeys = 2 * kNTiles;
  int first_row, lane;

  __device__ __forceinline__ RowMajorLayout(int first_row, int lane)
      : first_row(first_row), lane(lane) {}
  __device__ static float& At(float (&s)[kMTiles][kNTiles][4], int r, int k) {
    return s[r / 2][k / 2][r % 2 * 2 + k % 2];
  }
  __device__ static float& At(float (&s)[kNTiles][4], int r, int k) {
    static_assert(kMTiles == 1, "one tile of 16 rows");
    return s[k / 2][r * 2 + k % 2];
  }
  __device__ int Row(int r) const { return first_row + r / 2 * 16 + r % 2 * 8 + lane / 4; }
  __device__ int FirstKey() const { return 2 * (lane % 4); }
  __device__ static int FirstEight() { return 0; }
  __device__ static constexpr int Key(int k) { return 8 * (k / 2) + k % 2; }
};

// Accumulators of wgmma whose rows are keys, 64 a block, and whose columns are rows of the item.
template <int kBlocks, int kRowTiles>
struct KeyMajorLayout {
  static constexpr int kRows = 2 * kRowTiles, kKeys = 2 * kBlocks;
  int warp, lane;
  int num_row_tiles;

  __device__ __forceinline__ KeyMajorLayout(int warp, int lane, int num_row_tiles = kRowTiles)
      : warp(warp), lane(lane), num_row_tiles(num_row_tiles) {}
  __device__ static float& At(float (&s)[kBlocks][kRowTiles][4], int r, int k) {
    return s[k / 2][r / 2][k % 2 * 2 + r % 2];
  }
  __device__ static float& At(float (&s)[kRowTiles][4], int r, int k) {
    static_assert(kBlocks == 1, "one block of keys");
    return s[r / 2][k * 2 + r % 2];
  }
  __device__ bool Has(int r) const { return r / 2 < num_row_tiles; }
  __device__ int Row(int r) const { return 8 * (r / 2) + 2 * (lane % 4) + r % 2; }
  __device__ int FirstKey() const { return 16 * warp + lane / 4; }
  __device__ int FirstEight() const { return 16 * warp; }
  __device__ static constexpr int Key(int k) { return 64 * (k / 2) + 8 * (k % 2); }
};

// One row, and every kStride-th key.
template <int kNumKeys, int kStride>
struct OneRowLayout : LayoutBase {
  static constexpr int kRows = 1, kKeys = kNumKeys;
  int row, first_key;

  __device__ __forceinline__ OneRowLayout(int row, int first_key)
      : row(row), first_key(first_key) {}
  __device__ static float& At(float (&s)[kNumKeys], int, int k) { return s[k]; }
  __device__ int Row(int) const { return row; }
  __device__ int FirstKey() const { return first_key; }
  __device__ int FirstEight() const { return first_key / 8 * 8; }
  __device__ static constexpr int Key(int k) { return k * kStride; }
};

// One key and any rows.
template <int kNumRows>
struct OneKeyLayout : LayoutBase {
  static constexpr int kRows = kNumRows, kKeys = 1;
  int rows[kNumRows];

  __device__ static float& At(float (&s)[kNumRows], int r, int) { return s[r]; }
  __device__ int Row(int r) const { return rows[r]; }
  __device__ static int FirstKey() { return 0; }
  __device__ static int FirstEight() { return 0; }
  __device__ static constexpr int Key(int) { return 0; }
};

// --- far logits ---

// The exponent of a weight is fmaf(score, scale, -base), where base is the rounded base-2 logit of
// the running max. The product is not rounded, so the running max itself gets the rounding error of
// base: below 2^-4 while |base| < kFarLog2, and the same factor in P, sums and lse, so results stay
// exact. Of larger logits the error would be anything up to the range of f32, and beyond 2.36e38
// base itself overflows. Rows whose running max is that far from 0 take a slower path, in which
// the logits are rounded like the running max, in base 4, where they do not overflow.
inline constexpr float kFarLog2 = 0x1p20f;
// Up to here the error is at most 2, and the product is not rounded in that path, either. Beyond,
// logits that differ at all differ by 8.
inline constexpr float kUnitLog4 = 0x1p25f;

__device__ __forceinline__ bool IsFar(float max_log4) {
  return fabsf(max_log4) >= 0.5f * kFarLog2 && max_log4 != -Infinity();
}
// What the exponents subtract: 0 if the running max is far, or if no key was seen.
__device__ __forceinline__ float BaseOf(float max_log4) {
  return fabsf(max_log4) < 0.5f * kFarLog2 ? 2.0f * max_log4 : 0.0f;
}
// The exponent of a weight if the running max is far. scale: base-2 logits of a score.
__device__ __forceinline__ float FarExponent(float score, float scale, float max_log4) {
  const float scale_log4 = 0.5f * scale;
  // As intrinsics: the compiler would make one multiply-add of the two.
  const float rounded = __fsub_rn(__fmul_rn(score, scale_log4), max_log4);
  const float exact = fmaf(score, scale_log4, -max_log4);
  return 2.0f * (fabsf(max_log4) < kUnitLog4 ? exact : rounded);
}
// A score whose usual exponent, fmaf(score, scale, -BaseOf(max_log4)), is the far one.
// inverse: 1 / scale.
__device__ __forceinline__ float FarScore(float score, float scale, float inverse, float max_log4) {
  return FarExponent(score, scale, max_log4) * inverse;
}

// --- the stage ---

// Whether rows of an item may see different tokens.
template <class Traits>
inline constexpr bool kRowsMayDiffer =
    Traits::kHasWindowLeft || Traits::kHasWindowRight || Traits::Variant::kHasMask;

// Replaces a softmax weight if the row does not see the token, whose value then must not count, not
// even times 0. It is a NaN that no arithmetic gives.
inline constexpr u32 kUnseenP = 0x7fc0ffeeu;
__device__ __forceinline__ float UnseenP() { return __uint_as_float(kUnseenP); }
__device__ __forceinline__ bool IsUnseenP(float weight) {
  return __float_as_uint(weight) == kUnseenP;
}

// The kv positions that a row of an item sees.
template <class Traits>
__device__ __forceinline__ VisibleSpan SpanOfRow(const AttentionParams& p, const ItemRecord& item,
                                                 int row) {
  const int token = row / Traits::kGroupSize;
  return SpanOfTokens<Traits>(p, FirstOfItem<Traits>(item), EndOfItem<Traits>(p, item),
                              item.q_pos(), token, token);
}

// cap * tanh(sm_scale * qk / cap), times `unit`. tanh(x) = 1 - 2 / (exp(2x) + 1) is within 2e-7 of
// exact, that is 1e-5 of a logit for caps up to 50. tanh.approx would be off by 0.02.
struct SoftCap {
  float slope, cap;
  __device__ __forceinline__ SoftCap(const AttentionParams& p, float unit)
      : slope(2.0f * kLog2E * p.sm_scale / p.logits_soft_cap), cap(p.logits_soft_cap * unit) {}
  __device__ __forceinline__ float Logit(float qk) const {
    return cap * fmaf(-2.0f, Reciprocal(Exp2(slope * qk) + 1.0f), 1.0f);
  }
};

// The logits of an item. They leave without a factor, scale(), which takes them to log2 units and
// is applied in the exponent of the softmax, where large logits are not rounded. The user's
// function takes and returns natural units.
template <class Traits>
class LogitStage {
 public:
  using Variant = typename Traits::Variant;
  static constexpr bool kNormalizes = Variant::kNormalizes;
  // kCalls: the user's function is called for each logit. If a logit is a multiple of the score and
  // a bias, one multiply-add does instead; a factor that all rows share goes into the scale.
  static constexpr bool kCalls = !Variant::kIsAffine;
  static constexpr bool kHasBias = Variant::kHasTerm || Variant::kHasSlope || Variant::kHasRest;
  static constexpr bool kMultiplies = Variant::kHasFactor || kHasBias;
  // Whether the user's functions or a soft cap make finite logits of infinite scores.
  static constexpr bool kChangesScores =
      Traits::kHasSoftCap || kCalls || kMultiplies || !kNormalizes;
  // Whether a logit that is not hidden may be below every number in log2 units.
  static constexpr bool kMayBeLowest = kNormalizes && (kCalls || kHasBias);
  static constexpr float kFactor = Variant::kFactor;
  // Whether a mask is first asked about a whole tile. In other loops it would cost registers.
  static constexpr bool kAsksFirst = Variant::kMayShowAll && Traits::kArch == 90;
  // Whether Transform leaves visible scores as they are, and maxima compare Q K^T. A scale that is
  // not positive would reverse the order, so it is applied at once.
  static constexpr bool kScalesLater =
      !Traits::kHasSoftCap && Traits::kPositiveScale && !kCalls && !kMultiplies && kNormalizes;

  // index: of the item. k_scale: KeyScale of the item.
  __device__ __forceinline__ LogitStage(const AttentionParams& p, int index, float k_scale = 1.0f)
      : p_(p), index_(index), k_scale_(k_scale) {}

  __device__ __forceinline__ float scale() const {
    if constexpr (kScalesLater) return ScaleOfScores();
    return kNormalizes ? kLog2E : 1.0f;
  }

  // The softmax weight of a logit without its scale. Without softmax the logit is the weight.
  __device__ __forceinline__ static float Weight(float s, float scale, float running_max) {
    if constexpr (!kNormalizes) return s;
    return Exp2(fmaf(s, scale, -running_max));
  }
  // The running max of a row that has not seen any logit, in loops that compute maxima.
  __device__ __forceinline__ static float InitialMax() { return kNormalizes ? -Infinity() : 0.0f; }
  // The logit of a key that its row does not see.
  __device__ __forceinline__ static float Hidden() { return kNormalizes ? -Infinity() : 0.0f; }

  // Turns Q K^T of a tile into logits. begin: kv position of its first key. seen_by_all: every row
  // sees every key, except for the user's mask, which hides no key unless is_masked. Hidden logits
  // become Hidden().
  template <class Layout, class Tile>
  __device__ __forceinline__ void Apply(const Layout& layout, int begin, bool seen_by_all,
                                        bool is_masked, Tile& s) const {
    Scale(layout, s);
    constexpr bool kChanges = kCalls || kMultiplies;
    if constexpr (Variant::kHasMask) {
      bool asks = !Traits::kHasSteps || is_masked;
      if constexpr (kAsksFirst) asks = asks && !ShowsAll(layout, begin);
      if (asks) {
        Call<true>(layout, begin, s);
      } else if constexpr (kChanges) {
        Call<false>(layout, begin, s);
      }
    } else if constexpr (kChanges) {
      Call<false>(layout, begin, s);
    }
    if (!seen_by_all) Mask(layout, begin, s);
  }

  // The first half of Apply: scale and the user's functions.
  template <class Layout, class Tile>
  __device__ __forceinline__ void Transform(const Layout& layout, int begin, bool is_masked,
                                            Tile& s) const {
    Apply(layout, begin, true, is_masked, s);
  }

  // The second half of Apply: windows, and the end of the item's span.
  template <class Layout, class Tile>
  __device__ __forceinline__ void Mask(const Layout& layout, int begin, Tile& s) const {
    const ItemRecord item(p_, index_);
    const auto span_of = [&](int r) __attribute__((always_inline)) {
      return SpanOfRow<Traits>(p_, item, layout.Row(r));
    };
    LookAtSpans(layout, begin, span_of,
                [&](int r, int k, bool sees) __attribute__((always_inline)) {
                  if (!sees) Layout::At(s, r, k) = Hidden();
                });
  }

  // kIsLine: the bias depends on the kv offset alone, linearly, and can wait for the exponent like
  // the scale. ScaleOfScores is the factor of Q K^T there, LineAt the line of a row in the tile at
  // `begin`.
  static constexpr bool kIsLine = kNormalizes && kHasBias && !Variant::kHasRest &&
                                  !Variant::kHasFactor && !Traits::kHasSoftCap &&
                                  Traits::kPositiveScale;
  __device__ __forceinline__ float ScaleOfScores() const {
    return p_.sm_scale * (kLog2E * kFactor) * k_scale_;
  }
  // The values that LineAt needs of a row of the item.
  __device__ __forceinline__ typename Variant::Row OfRow(int row) const {
    return Variant::OfRow(p_, variant::RowFacts<Traits>(p_, p_.items + index_, row), 0);
  }
  __device__ __forceinline__ static BiasLine LineAt(const typename Variant::Row& row, int begin) {
    const BiasLine line = Variant::LineAt(row, begin);
    return {line.term * kLog2E, line.slope * kLog2E};
  }

  // Fills sees[r][k] for each logit of the layout: whether its row sees its key. span_of(r):
  // SpanOfRow of the layout's row r. is_masked: see Apply.
  template <class Layout, class SpanOf>
  __device__ __forceinline__ void Look(const Layout& layout, int begin, bool is_masked,
                                       const SpanOf& span_of,
                                       bool (&sees)[Layout::kRows][Layout::kKeys]) const {
    LookAtSpans(layout, begin, span_of, [&](int r, int k, bool in_span) { sees[r][k] = in_span; });
    if constexpr (Variant::kHasMask) {
      if (Traits::kHasSteps && !is_masked) return;
      VisitFacts(layout, begin,
                 [&](int r, int k, const auto& row, const auto& key, const auto& facts)
                     __attribute__((always_inline)) {
                       sees[r][k] = sees[r][k] && Variant::IsVisible(p_, row, key, facts);
                     });
    }
  }

 private:
  // Applies the scale that does not wait, and the built-in soft cap.
  template <class Layout, class Tile>
  __device__ __forceinline__ void Scale(const Layout& layout, Tile& s) const {
    if constexpr (Traits::kHasSoftCap) {
      const SoftCap cap(p_, kMultiplies ? 1.0f : kFactor);
      ForEach(layout, s,
              [&](float& x) __attribute__((always_inline)) { x = cap.Logit(x * k_scale_); });
    } else if constexpr (!kScalesLater && !kMultiplies) {
      ForEach(layout, s, [&](float& x) __attribute__((always_inline)) {
        x *= p_.sm_scale * kFactor * k_scale_;
      });
    }
  }

  template <class Row, class Key, class Facts>
  __device__ __forceinline__ float LogitOf(const Row& row, const Key& key, const Facts& facts,
                                           float x) const {
    if constexpr (kCalls) {
      return Variant::Logit(p_, row, key, facts, x);
    } else if constexpr (kMultiplies) {
      float factor = (Traits::kHasSoftCap ? 1.0f : p_.sm_scale * k_scale_) * kFactor;
      if constexpr (Variant::kHasFactor) factor *= Variant::Factor(row);
      if constexpr (!kHasBias) return x * factor;
      float bias = Variant::Term(row);
      if constexpr (Variant::kHasSlope) {
        bias = fmaf(Variant::Slope(row), static_cast<float>(facts.offset()), bias);
      }
      return fmaf(x, factor, Variant::Rest(p_, row, key, facts, bias));
    } else {
      return x;
    }
  }

  // Whether the user's mask certainly shows all keys of the tile to the thread's rows.
  template <class Layout>
  __device__ __forceinline__ bool ShowsAll(const Layout& layout, int begin) const {
    const WorkItem* const item = p_.items + Opaque(index_);
    const int first = begin + layout.FirstKey();
    bool all = true;
#pragma unroll
    for (int r = 0; r < Layout::kRows; ++r) {
      if (!layout.Has(r)) break;
      const variant::RowFacts<Traits> facts(p_, item, layout.Row(r));
      all = all && Variant::ShowsAll(Variant::OfRow(p_, facts, first), first,
                                     first + Layout::Key(Layout::kKeys - 1));
    }
    return all;
  }

  // Calls the user's functions.
  template <bool kMasks, class Layout, class Tile>
  __device__ __forceinline__ void Call(const Layout& layout, int begin, Tile& s) const {
    VisitFacts(layout, begin,
               [&](int r, int k, const auto& row, const auto& key, const auto& facts)
                   __attribute__((always_inline)) {
                     float& x = Layout::At(s, r, k);
                     x = LogitOf(row, key, facts, x);
                     if constexpr (kMasks) {
                       if (!Variant::IsVisible(p_, row, key, facts)) x = Hidden();
                     }
                   });
  }

  template <class Layout, class SpanOf, class Looker>
  __device__ __forceinline__ static void LookAtSpans(const Layout& layout, int begin,
                                                     const SpanOf& span_of, const Looker& look) {
#pragma unroll
    for (int r = 0; r < Layout::kRows; ++r) {
      if (!layout.Has(r)) break;
      const VisibleSpan span = span_of(r);
      const int first = begin + layout.FirstKey();
      const int low = span.any_begin - first, high = span.any_end - first;
#pragma unroll
      for (int k = 0; k < Layout::kKeys; ++k) {
        look(r, k, !(Layout::Key(k) < low || Layout::Key(k) >= high));
      }
    }
  }

  // Calls visit(r, k, row, key, facts) for each logit, with what the user's functions compute once
  // for its row and once for its key. Of rows and keys, the kind of which the thread has fewer is
  // kept in registers.
  template <class Layout, class Visitor>
  __device__ __forceinline__ void VisitFacts(const Layout& layout, int begin,
                                             const Visitor& visit) const {
    const WorkItem* const item = p_.items + Opaque(index_);
    const int first = begin + layout.FirstKey();
    const auto row_of = [&](int r) __attribute__((always_inline)) {
      const variant::RowFacts<Traits> facts(p_, item, layout.Row(r));
      return Variant::OfRow(p_, facts, first);
    };
    const auto facts_of = [&](int k) __attribute__((always_inline)) {
      const int eight = begin + layout.FirstEight() + Layout::Key(k) / 8 * 8;
      return variant::KeyFacts<Traits>(p_, item, first, Layout::Key(k), eight);
    };
    if constexpr (Layout::kRows <= Layout::kKeys) {
      typename Variant::Row rows[Layout::kRows];
#pragma unroll
      for (int r = 0; r < Layout::kRows; ++r) rows[r] = row_of(r);
#pragma unroll
      for (int k = 0; k < Layout::kKeys; ++k) {
        const auto facts = facts_of(k);
        const auto key = Variant::OfKey(p_, facts);
#pragma unroll
        for (int r = 0; r < Layout::kRows; ++r) {
          if (!layout.Has(r)) break;
          visit(r, k, rows[r], key, facts);
        }
      }
    } else {
      typename Variant::Key keys[Layout::kKeys];
#pragma unroll
      for (int k = 0; k < Layout::kKeys; ++k) keys[k] = Variant::OfKey(p_, facts_of(k));
#pragma unroll
      for (int r = 0; r < Layout::kRows; ++r) {
        if (!layout.Has(r)) break;
        const auto row = row_of(r);
#pragma unroll
        for (int k = 0; k < Layout::kKeys; ++k) visit(r, k, row, keys[k], facts_of(k));
      }
    }
  }

  template <class Layout, class Tile, class Change>
  __device__ __forceinline__ static void ForEach(const Layout& layout, Tile& s,
                                                 const Change& change) {
#pragma unroll
    for (int r = 0; r < Layout::kRows; ++r) {
      if (!layout.Has(r)) break;
#pragma unroll
      for (int k = 0; k < Layout::kKeys; ++k) change(Layout::At(s, r, k));
    }
  }

  const AttentionParams& p_;
  const int index_;
  const float k_scale_;
};

// The scale of an item's keys: that of their head, where the format has one.
template <class Traits>
__device__ __forceinline__ float KeyScale(const AttentionParams& p, int index) {
  if constexpr (FormatOf(Traits::kKvFormat).has_head_scale)
    return LogitScaleOfHead(p.k_scale, StoredHead<Traits>(ItemRecord(p, index).kv_head()));
  return 1.0f;
}

}  // namespace jax_attn
