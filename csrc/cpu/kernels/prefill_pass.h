// Items of more than kMaxLowRows rows. Internal linkage: see kernels.h.
//
// Arithmetic is the limit. A block of keys and values is packed once and stays in the L2 cache
// while it is multiplied with the rows of all tiles of the pass, kScoreRows at a time, so that
// their scores stay there too.
#pragma once

#include "cpu/kernels/pass_base.h"

namespace jax_attn {
namespace {

template <class Isa, typename T, typename Kv>
class PrefillPass : PassBase<Isa, T, Kv, false> {
  using Base = PassBase<Isa, T, Kv, false>;
  using Base::buf_, Base::params_, Base::rows_;
  using Base::kCodes, Base::kKeys, Base::kStep, Base::kUnit, Base::kValues;
  using RowTile = typename Base::RowTile;

 public:
  using Base::Base;

  void Run() {
    this->LoadQueries();
    this->template ClearKeyPanels<Isa>(buf_.tile_kv / kUnit, buf_.k_panel_bytes);
    this->ForBlocks([&](i64 start, const BlockRows& block, const BlockRows& next) {
      AddBlock(start, block, next);
    });
    this->StoreStates();
  }

 private:
  void AddBlock(i64 start, const BlockRows& block, const BlockRows& next) {
    const Range valid = this->ValidTokens(start);
    if (buf_.variant && !StartVariant(start, valid)) return;
    if constexpr (kCodes) this->EncodeFresh(start, valid, block);
    const bool stages_keys = this->Stages(kOfKeys), stages_values = this->Stages(kOfValues);
    const HeadRows keys{stages_keys ? buf_.staged : block.k, 0};
    const HeadRows values{stages_values ? buf_.staged : block.v, 0};
    NoFetch no_fetch;
    if (stages_keys) this->Stage(kOfKeys, block.k, start, 0, buf_.tile_kv, valid);
    for (i64 u = valid.begin / kUnit; u < CeilDiv(valid.end, kUnit); ++u) {
      char* panel = buf_.k_panels + u * buf_.k_panel_bytes;
      if constexpr (kCodes) {
        PackCodePanel<Isa>(keys, u * kUnit, params_.head_dim_qk, panel, no_fetch);
      } else {
        PackKeyPanel<Isa, kKeys, Kv>(keys, u * kUnit, params_.head_dim_qk, panel);
      }
    }
    if (stages_values) this->Stage(kOfValues, block.v, start, 0, buf_.tile_kv, valid);
    this->PackBlockValues(values, 0, valid, no_fetch);
    bool finite;
    if constexpr (kCodes) {
      this->LoadKeyScales(block.k, 0, params_.head_dim_qk, valid, buf_.codes.key_scales);
      finite = this->LoadValueScales(block.v, 0, valid);
    } else {
      finite = !this->IsMixed(start, valid) || this->ValuesAreFinite(0, valid);
    }
    // Prefetches the next block's rows, a few lines per register tile.
    fetch_.Start(next.k, buf_.tile_kv, this->KeyHeadBytes());
    fetch_values_.Start(next.v, buf_.tile_kv, this->ValueHeadBytes());
    if constexpr (Base::kTiled) {
      if (!params_.sums_weights && (finite || kCodes)) {
        AddTiles(start, valid);
        if (kCodes && !finite) this->SpoilRows(0, block.v, 0, start, valid);
        return;
      }
    }
    this->ForRowTiles(0, rows_, kScoreRows, start, valid, [&](i64 begin, i64 n, Range seen) {
      if (buf_.variant && !NarrowRows(begin, n, start, valid, &seen)) return;
      FindTiles(begin, begin + n, start, valid);
      MultiplyKeys(seen);
      for (const RowTile& tile : tiles_) {
        if constexpr (kCodes) {
          this->WeighTile(0, tile.row, tile.n, tile.score_row, start, valid, tile.seen,
                          buf_.codes.key_scales);
        } else {
          this->Softmax(0, tile.row, tile.n, tile.score_row, start, valid, tile.seen);
        }
      }
      if constexpr (kCodes) {
        MultiplyCodes();
      } else {
        MultiplyValues(start, valid, finite);
      }
      this->narrows_ = false;
    });
    if constexpr (kCodes) {
      if (!finite) this->SpoilRows(0, block.v, 0, start, valid);
    }
  }

  // ---- with tiles: matmuls, interleaved with the softmax step of the rows between them

  // Rows of a tile of q and the part of the block that they see, in whole tiles of tokens.
  struct TileOfRows {
    i64 row = 0, n = 0;
    Range seen{};
    i64 slot = 0;  // of s and p
    // With a variant: whether it may hide something of `seen`, and whether buf_.seen is for these
    // rows.
    bool hides = false, narrows = false;
  };

  // Computes the logits of a tile with a variant.
  struct TileLogits {
    PrefillPass* pass;  // null: no variant
    TileOfRows tile;
    float* s;
    bool adds;  // for all rows: see VariantRun::Adds

    JAX_ATTN_INLINE void operator()(i64 r) const {
      if (pass == nullptr) return;
      float* row = s + r * pass->buf_.tile_kv;
      if (adds) {
        pass->buf_.variant.Add(tile.row + r, tile.seen.begin, tile.seen.end, row);
      } else {
        pass->Transform(tile.row + r, 1, tile.seen.begin, tile.seen.end, row);
      }
    }
  };

  template <bool, typename Unused = void>
  struct SoftmaxOf {
    using Type = SoftmaxRows<Isa, Bf16, TileLogits>;
  };
  template <typename Unused>
  struct SoftmaxOf<true, Unused> {
    using Type = CodeRows<Isa, Base::kBias, TileLogits>;
  };

  // The softmax step of a tile, spread evenly over the steps of concurrent matmuls.
  struct SpreadRows {
    typename SoftmaxOf<kCodes>::Type rows;
    i64 steps, left;  // of the matmuls

    JAX_ATTN_INLINE void Step() {
      --left;
      while (rows.done * steps < rows.n * (steps - left)) rows.Row();
    }
    void Finish() {
      while (rows.done < rows.n) rows.Row();
    }
  };

  // Three tiles are in flight: the keys of one and the values of the tile before the last are
  // multiplied while the tile between them has its softmax step. Matrix tiles and vectors use
  // different units.
  void AddTiles(i64 start, Range valid) {
    UseTilesOf<Isa>(2 * kTileRows);
    TileOfRows first, second, third;  // the tile entered last is `first`
    for (i64 row = NextTile(0, start, valid, &first); first.n + second.n + third.n > 0;) {
      const i64 key_panels =
          first.n > 0 ? CeilDiv(first.seen.end, kUnit) - first.seen.begin / kUnit : 0;
      const i64 key_steps = this->KeySteps() / kTileSteps * key_panels;
      const i64 value_steps = (third.seen.end - third.seen.begin) / Base::kTileTokens;
      SpreadRows work;
      Range visible[2 * kTileRows];
      StartSoftmax(second, start, valid, visible, &work);
      work.steps = work.left = Max(1, key_steps + value_steps * (buf_.o_columns / kUnit));
      if (first.n > 0) MultiplyTileKeys(first, work);
      if (third.n > 0) MultiplyTileValues(third, work);
      work.Finish();
      third = second;
      second = first;
      first = TileOfRows{};
      row = NextTile(row, start, valid, &first);
    }
    this->narrows_ = false;
  }

  // Finds the first tile from a row on that sees anything of the block; returns the row after it.
  i64 NextTile(i64 row, i64 start, Range valid, TileOfRows* tile) {
    while (row < rows_) {
      const i64 n = Min(2 * kTileRows, rows_ - row);
      this->narrows_ = false;
      Range seen = this->VisibleToAny(row, row + n - 1, start, valid);
      row += n;
      if (seen.begin >= seen.end) continue;
      if (buf_.variant && !NarrowRows(row - n, n, start, valid, &seen)) continue;
      *tile = {row - n,
               n,
               this->Whole(seen),
               (row - n) / (2 * kTileRows) % 2,
               buf_.variant && buf_.variant.masks(),
               this->narrows_};
      break;
    }
    return row;
  }

  // Makes RowSees and the variant use the rows of this tile.
  void UseTile(const TileOfRows& tile) {
    this->narrows_ = tile.narrows;
    buf_.variant.SetHides(tile.hides);
  }

  void StartSoftmax(const TileOfRows& tile, i64 start, Range valid, Range* visible,
                    SpreadRows* work) {
    auto& rows = work->rows;
    rows.n = tile.n;
    rows.done = 0;
    if (tile.n == 0) return;
    UseTile(tile);
    for (i64 r = 0; r < tile.n; ++r) visible[r] = this->RowSees(tile.row + r, start, valid);
    const i64 score_row = 2 * kTileRows * tile.slot;
    const bool scales = buf_.variant && buf_.variant.scales();
    rows.logits = {buf_.variant ? this : nullptr, tile, buf_.s + score_row * buf_.tile_kv,
                   buf_.variant && !tile.hides && buf_.variant.Adds(tile.seen.end)};
    rows.rule = scales ? &kNaturalRule : &this->rule_;
    rows.scales = scales ? kNoScales : buf_.scales + tile.row;
    rows.begin = tile.seen.begin;
    rows.end = tile.seen.end;
    rows.seen = visible;
    rows.s = buf_.s + score_row * buf_.tile_kv;
    rows.lds = buf_.tile_kv;
    rows.states = buf_.states + tile.row;
    if constexpr (kCodes) {
      rows.bias = buf_.codes.bias + tile.row;
      rows.key_scales = buf_.codes.key_scales;
      rows.values = {buf_.codes.value_scales, buf_.codes.largest_scales, valid.begin};
      rows.p = reinterpret_cast<char*>(buf_.p + score_row * buf_.p_lanes);
      rows.p_bytes = 4 * buf_.p_lanes;
      rows.alpha = buf_.alpha + score_row;
      rows.factors = buf_.codes.factors + score_row;
    } else {
      rows.p = reinterpret_cast<Bf16*>(buf_.p + score_row * buf_.p_lanes);
      rows.ldp = 2 * buf_.p_lanes;
      rows.o = buf_.o + tile.row * buf_.o_columns;
      rows.o_columns = buf_.o_columns;
    }
    rows.Start();
  }

  JAX_ATTN_KERNEL void MultiplyTileKeys(const TileOfRows& tile, SpreadRows& work) {
    const i64 begin = tile.seen.begin / kUnit, end = CeilDiv(tile.seen.end, kUnit);
    for (i64 u = begin; u < end; ++u) {
      FetchLines(&fetch_);
      MultiplyTiles<TilesOf<Isa, kKeys>, false>(
          tile.n, buf_.q + tile.row * buf_.q_lanes, buf_.q_lanes,
          buf_.k_panels + u * buf_.k_panel_bytes, 4 * kUnit, this->KeySteps(), true,
          buf_.s + 2 * kTileRows * tile.slot * buf_.tile_kv + u * kUnit, buf_.tile_kv, work);
    }
  }

  JAX_ATTN_KERNEL void MultiplyTileValues(const TileOfRows& tile, SpreadRows& work) {
    const i64 step = tile.seen.begin / kStep, score_row = 2 * kTileRows * tile.slot;
    for (i64 j = 0; j < buf_.o_columns / kUnit; ++j) {
      FetchLines(&fetch_values_);
      float* o = buf_.o + tile.row * buf_.o_columns + j * kUnit;
      MultiplyTiles<TilesOf<Isa, kValues>, false>(
          tile.n, buf_.p + score_row * buf_.p_lanes + step, buf_.p_lanes,
          buf_.v_panels + j * buf_.v_panel_bytes + step * 4 * kUnit, 4 * kUnit,
          (tile.seen.end - tile.seen.begin) / kStep, kCodes,
          kCodes ? buf_.codes.sums + j * kUnit : o, buf_.o_columns, work);
    }
    if constexpr (kCodes) {
      AddSums<Isa>(tile.n, buf_.o_columns, buf_.alpha + score_row, buf_.codes.factors + score_row,
                   buf_.codes.sums, buf_.o_columns, buf_.o + tile.row * buf_.o_columns,
                   buf_.o_columns);
    }
  }

  // False if the variant hides the block from all rows.
  bool StartVariant(i64 start, Range valid) {
    buf_.variant.StartBlock(start, valid, this->is_masked_);
    const auto share = buf_.variant.Sees(0, rows_ - 1, valid.begin, valid.end);
    buf_.variant.SetHides(!share.all);
    item_hides_ = !share.all;
    return !share.none;
  }

  // Finds what rows [begin, begin + n) see, and narrows `seen` to it; false if that is nothing.
  bool NarrowRows(i64 begin, i64 n, i64 start, Range valid, Range* seen) {
    if (!item_hides_) return true;
    const auto share = buf_.variant.Sees(begin, begin + n - 1, seen->begin, seen->end);
    buf_.variant.SetHides(!share.all);
    if (share.all || share.none) return !share.none;
    this->Narrow(begin, n, start, valid);
    *seen = this->VisibleToAny(begin, begin + n - 1, start, valid);
    if (seen->begin < seen->end) return true;
    this->narrows_ = false;
    return false;
  }

  // Register tiles of the rows in one group of kScoreRows.
  template <i64 kMax>
  struct TileList {
    RowTile tiles[kMax];
    i64 num = 0;

    const RowTile* begin() const { return tiles; }
    const RowTile* end() const { return tiles + num; }
  };

  // Finds the tiles of rows [begin, end), whose scores start at row 0. Each softmax step covers one
  // tile of tiles_, of which wide tiles consist: outside of it there are scores but no P.
  void FindTiles(i64 begin, i64 end, i64 start, Range valid) {
    const auto find = [&](i64 first, i64 last, i64 max_rows, auto* list) {
      this->ForRowTiles(first, last, max_rows, start, valid, [&](i64 r, i64 n, Range seen) {
        list->tiles[list->num++] = {r, r - begin, n, seen};
      });
    };
    tiles_.num = wide_tiles_.num = 0;
    find(begin, end, Isa::kRows, &tiles_);
    if constexpr (Isa::kWidePanels > 1) {
      for (const RowTile& tile : tiles_) {
        find(tile.row, tile.row + tile.n, Isa::kRows / Isa::kWidePanels, &wide_tiles_);
      }
    }
  }

  // Calls fn(tile, u, n) for panels [u, u + n) of [begin, end): as many as a wide tile multiplies
  // at once, then the rest one by one.
  template <typename Fn>
  void ForPanels(i64 begin, i64 end, Fn&& fn) const {
    constexpr i64 kWide = Isa::kWidePanels;
    i64 u = begin;
    if constexpr (kWide > 1) {
      for (; u + kWide <= end; u += kWide) {
        for (const RowTile& tile : wide_tiles_) fn(tile, u, kWide);
      }
    }
    for (; u < end; ++u) {
      for (const RowTile& tile : tiles_) fn(tile, u, 1);
    }
  }

  // s = q k for the panels that contain what the rows see.
  void MultiplyKeys(Range seen) {
    const PanelSource<Isa, kKeys> panels{buf_.k_panels, buf_.k_panel_bytes};
    NoFetch none;
    ForPanels(seen.begin / kUnit, CeilDiv(seen.end, kUnit), [&](const RowTile& tile, i64 u, i64 n) {
      const i64 first = Max(u, tile.seen.begin / kUnit);
      n = Min(u + n, CeilDiv(tile.seen.end, kUnit)) - first;
      if (n <= 0) return;
      FetchLines(&fetch_);
      GemmRows<Isa>(tile.n, buf_.q + tile.row * buf_.q_lanes, buf_.q_lanes, panels, first, n,
                    this->KeySteps(), Onto::kZero, nullptr,
                    buf_.s + tile.score_row * buf_.tile_kv + first * kUnit, buf_.tile_kv, none);
    });
  }

  // o = alpha o + p v.
  void MultiplyValues(i64 start, Range valid, bool finite) {
    NoFetch none;
    if (!finite) {
      for (const RowTile& tile : tiles_) MultiplyNotFinite(tile, start, valid);
      return;
    }
    ForPanels(0, buf_.o_columns / kUnit, [&](const RowTile& tile, i64 j, i64 n) {
      FetchLines(&fetch_values_);
      this->AddValues(tile, 0, valid, this->PackedValues(), j, n, none);
    });
  }

  // The same for int8 dot products.
  void MultiplyCodes() {
    NoFetch none;
    for (i64 j = 0; j < buf_.o_columns / kUnit; ++j) {
      for (const RowTile& tile : tiles_) {
        FetchLines(&fetch_values_);
        const i64 step = tile.seen.begin / kStep, steps = CeilDiv(tile.seen.end, kStep) - step;
        auto panels = this->PackedValues();
        panels.Skip(step);
        GemmRows<Isa>(tile.n, buf_.p + tile.score_row * buf_.p_lanes + step, buf_.p_lanes, panels,
                      j, 1, steps, Onto::kZero, nullptr, buf_.codes.sums, kUnit, none);
        AddSums<Isa>(tile.n, kUnit, buf_.alpha + tile.score_row,
                     buf_.codes.factors + tile.score_row, buf_.codes.sums, kUnit,
                     buf_.o + tile.row * buf_.o_columns + j * kUnit, buf_.o_columns);
      }
    }
  }

  // The same for a block with a value that is not finite and that some rows do not see: first what
  // all rows of the tile see, then the rest row by row. Under a causal mask the rest is a few
  // tokens at the end of the block, so that a NaN costs little.
  void MultiplyNotFinite(const RowTile& tile, i64 start, Range valid) {
    NoFetch none;
    if (buf_.variant && buf_.variant.masks()) {
      for (i64 i = 0; i < tile.n; ++i) {
        const Range seen = this->RowSees(tile.row + i, start, valid);
        this->AddSeenValues({tile.row + i, tile.score_row + i, 1, seen}, 0, valid, none);
      }
      return;
    }
    const i64 last = tile.row + tile.n - 1;
    const bool begin_together =
        this->VisibleTo(buf_.tokens[last], start, valid).begin == valid.begin;
    const i64 end_of_first = this->VisibleTo(buf_.tokens[tile.row], start, valid).end;
    constexpr i64 kWhole = Base::kTiled ? Base::kTileTokens : kStep;
    const i64 border =
        begin_together ? Max(valid.begin, end_of_first / kWhole * kWhole) : valid.begin;
    if (border > valid.begin) {
      const RowTile common{tile.row, tile.score_row, tile.n, {valid.begin, border}};
      this->AddValues(common, 0, {valid.begin, border}, this->PackedValues(), 0,
                      buf_.o_columns / kUnit, none);
    }
    for (i64 i = 0; i < tile.n; ++i) {
      const Range seen = this->VisibleTo(buf_.tokens[tile.row + i], start, valid);
      const RowTile row{tile.row + i, tile.score_row + i, 1, seen};
      if (seen.begin < seen.end) this->AddVisibleValues(row, 0, {border, valid.end}, none);
    }
  }

  using Fetch = RowFetch<1, 4>;
  void FetchLines(Fetch* fetch) const {
    for (int i = 0; i < kLinesPerTile; ++i) fetch->Line();
  }

  // A block of 128 tokens has 1024 lines of f32 keys of 128 dims. With AVX2 there are 176 register
  // tiles per kScoreRows; with AVX-512 44, where prefetching enough lines per tile to cover all
  // gained nothing.
  static constexpr int kLinesPerTile = 4;
  Fetch fetch_, fetch_values_;
  static constexpr i64 kMaxTiles = CeilDiv(kScoreRows, Isa::kRows);
  TileList<kMaxTiles> tiles_;
  TileList<Isa::kWidePanels * kMaxTiles> wide_tiles_;
  bool item_hides_ = true;  // whether the variant may hide some of the block from some row
};

}  // namespace
}  // namespace jax_attn
