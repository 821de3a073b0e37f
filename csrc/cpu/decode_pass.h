// Items of at most kMaxLowRows rows. Internal linkage: see kernels.h.
//
// A key or value is used a few times only, so memory is the limit. Keys and values are taken a few
// tokens at a time: all kv heads of these tokens before the next tokens, which is the order in
// memory. Meanwhile the tokens kTokensAhead after them are fetched, spread evenly over the
// arithmetic. Both are short: a core that has enough misses under way drops further prefetches, and
// its own prefetchers make up for these only where reads follow the order in memory closely.
#pragma once

#include "cpu/pass_base.h"

namespace jax_attn {
namespace {

// Panels of at most 16 keys, for short units.
template <class Isa>
struct ShortPanels : Isa {
  static constexpr int kVecs = Isa::kWidth < 16 ? Isa::kVecs : 1;
};

template <class Isa, typename T>
class DecodePass : PassBase<Isa, T, true> {
  using Base = PassBase<Isa, T, true>;
  using Base::buf_, Base::item_, Base::num_heads_, Base::params_, Base::rows_;
  using Base::kBytes, Base::kKeys, Base::kStep, Base::kUnit, Base::kValues;
  using RowTile = typename Base::RowTile;

 public:
  using Base::Base;

  void Run() {
    this->LoadQueries();
    this->ForBlocks([&](i64 start, const BlockRows& block, const BlockRows& next) {
      AddBlock(start, block, next);
    });
    this->StoreStates();
  }

 private:
  // Tokens of a unit, whose heads follow each other: few, so that reads follow memory, and enough
  // for a whole panel of keys and not to load and store o too often. On two Zen 5 cores twice as
  // many f32 values a unit cost 7 %; half as many save 7 %, but cost 12 % with AVX2.
  static constexpr i64 kKeyTokens = 64 / kBytes, kValueTokens = 16 / kBytes;
  static constexpr i64 kTokensAhead = kKeyTokens;
  using KeyIsa = ShortPanels<Isa>;
  static constexpr i64 kKeyPanel = kPanel<KeyIsa>;
  static_assert(kKeyTokens % kKeyPanel == 0 && kValueTokens % kStep == 0);

  void AddBlock(i64 start, const BlockRows& block, const BlockRows& next) {
    const Range valid = this->ValidTokens(start);
    const i64 k_bytes = this->KeyHeadBytes(), v_bytes = this->ValueHeadBytes();
    RowFetch<1> fetch;
    for (i64 first = valid.begin / kKeyTokens * kKeyTokens; first < valid.end;
         first += kKeyTokens) {
      StartFetch(block.k, k_bytes, block.v, v_bytes, first, kKeyTokens, valid, &fetch);
      for (i64 h = 0; h < num_heads_; ++h) {
        const HeadRows keys{block.k, h * k_bytes};
        MultiplyKeys(h, start, valid, Unit(first, kKeyTokens, valid), keys, fetch);
      }
    }
    for (i64 h = 0; h < num_heads_; ++h) {
      ForTiles(h, start, valid, [&](const RowTile& tile) {
        this->Softmax(h, tile.row - h * rows_, tile.n, tile.score_row, start, valid, tile.seen);
      });
    }
    for (i64 first = valid.begin / kValueTokens * kValueTokens; first < valid.end;
         first += kValueTokens) {
      StartFetch(block.v, v_bytes, next.k, k_bytes, first, kValueTokens, valid, &fetch);
      for (i64 h = 0; h < num_heads_; ++h) {
        const HeadRows values{block.v, h * v_bytes};
        MultiplyValues(h, start, valid, first, values, fetch);
      }
    }
  }

  // Tokens of the unit that starts at `first`.
  static Range Unit(i64 first, i64 tokens, Range valid) {
    return {Max(valid.begin, first), Min(valid.end, first + tokens)};
  }

  // All heads of the unit kTokensAhead after that at `first`, of `rows` or else of what follows.
  void StartFetch(const char* const* rows, i64 head_bytes, const char* const* then,
                  i64 then_head_bytes, i64 first, i64 tokens, Range valid,
                  RowFetch<1>* fetch) const {
    const i64 at = first + kTokensAhead;
    if (at < valid.end) {
      fetch->Start(rows + at, tokens, num_heads_ * head_bytes);
    } else {
      fetch->Start(then + at % buf_.tile_kv, tokens, num_heads_ * then_head_bytes);
    }
  }

  // Calls fn(tile) for the register tiles of head h.
  template <typename Fn>
  void ForTiles(i64 h, i64 start, Range valid, Fn&& fn, i64 max_rows = Isa::kRows) const {
    this->ForRowTiles(0, rows_, max_rows, start, valid, [&](i64 r, i64 n, Range seen) {
      fn(RowTile{h * rows_ + r, h * rows_ + r, n, seen});
    });
  }

  // s = q k for the panels that hold `tokens`.
  void MultiplyKeys(i64 h, i64 start, Range valid, Range tokens, const HeadRows& keys,
                    RowFetch<1>& fetch) {
    const PanelSource<KeyIsa, kKeys> panel{buf_.k_panels, 0};
    for (i64 u = tokens.begin / kKeyPanel; u < CeilDiv(tokens.end, kKeyPanel); ++u) {
      PackKeyPanel<KeyIsa, kKeys, T>(keys, u * kKeyPanel, params_.head_dim_qk, buf_.k_panels);
      ForTiles(h, start, valid, [&](const RowTile& tile) {
        if (tile.seen.begin >= (u + 1) * kKeyPanel || tile.seen.end <= u * kKeyPanel) return;
        GemmRows<KeyIsa>(tile.n, buf_.q + tile.row * buf_.q_lanes, buf_.q_lanes, panel, 0, 1,
                         params_.head_dim_qk / StepDepth(kKeys), Onto::kZero, nullptr,
                         buf_.s + tile.score_row * buf_.tile_kv + u * kKeyPanel, buf_.tile_kv,
                         fetch);
      });
    }
  }

  // o = alpha o + p v for the unit that starts at token `first`.
  void MultiplyValues(i64 h, i64 start, Range valid, i64 first, const HeadRows& values,
                      RowFetch<1>& fetch) {
    const Range tokens = Unit(first, kValueTokens, valid);
    const i64 panels = buf_.o_columns / kUnit;
    const bool mixed = this->IsMixed(start, valid);
    // Each value is read once a row tile, so straight from its row, where whole panels and steps do
    // not reach into what is beside it and every row sees every token.
    const bool whole =
        params_.head_dim_vo % kUnit == 0 && tokens.begin % kStep == 0 && tokens.end % kStep == 0;
    if (whole && !mixed) {
      const RowSource<Isa, T> rows{values.rows + tokens.begin, values.offset};
      ForTiles(h, start, valid, [&](const RowTile& tile) {
        this->AddValues(tile, tokens.begin, tokens, rows, 0, panels, fetch);
      });
      return;
    }
    PackValues<Isa, kValues, T>(values, first, tokens.begin, tokens.end, params_.head_dim_vo,
                                buf_.v_panel_bytes, buf_.v_panels);
    if (!mixed || this->ValuesAreFinite(first, tokens)) {
      ForTiles(h, start, valid, [&](const RowTile& tile) {
        this->AddValues(tile, first, tokens, this->PackedValues(), 0, panels, fetch);
      });
    } else {
      ForTiles(
          h, start, valid,
          [&](const RowTile& row) { this->AddVisibleValues(row, first, tokens, fetch); }, 1);
    }
  }
};

}  // namespace
}  // namespace jax_attn
