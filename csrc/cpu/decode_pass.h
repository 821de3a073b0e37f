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

template <class Isa, typename T>
class DecodePass : PassBase<Isa, T, true> {
  using Base = PassBase<Isa, T, true>;
  using Base::buf_, Base::item_, Base::num_heads_, Base::params_, Base::rows_;
  using Base::kKeys, Base::kValues, Base::kUnit, Base::kStep;
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
  // Tokens of a unit, whose heads follow each other: of keys whole panels, of values fewer. On a
  // Zen 5 core with f32 units of 8 values read 48 GB/s, of 32 40 GB/s.
  static constexpr i64 kKeyTokens = 32, kValueTokens = 8;
  static constexpr i64 kTokensAhead = kKeyTokens;
  static_assert(kKeyTokens % kUnit == 0 && kValueTokens % kStep == 0);

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
                  i64 then_head_bytes, i64 first, i64 tokens, Range valid, RowFetch<1>* fetch) const {
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

  // s = q k for the panels that hold `tokens`, as many panels at once as the register tile takes.
  void MultiplyKeys(i64 h, i64 start, Range valid, Range tokens, const HeadRows& keys,
                    RowFetch<1>& fetch) {
    const i64 at_once = rows_ * 4 <= Isa::kRows ? 4 : rows_ * 2 <= Isa::kRows ? 2 : 1;
    const PanelSource<Isa, kKeys> panels{buf_.k_panels, buf_.k_panel_bytes};
    const i64 end = CeilDiv(tokens.end, kUnit);
    for (i64 u = tokens.begin / kUnit; u < end; u += at_once) {
      const i64 n = Min(at_once, end - u);
      for (i64 j = 0; j < n; ++j) {
        PackKeyPanel<Isa, kKeys, T>(keys, (u + j) * kUnit, params_.head_dim_qk,
                                    buf_.k_panels + j * buf_.k_panel_bytes);
      }
      ForTiles(h, start, valid, [&](const RowTile& tile) {
        if (tile.seen.begin >= (u + n) * kUnit || tile.seen.end <= u * kUnit) return;
        GemmRows<Isa>(tile.n, buf_.q + tile.row * buf_.q_lanes, buf_.q_lanes, panels, 0, n,
                      params_.head_dim_qk / StepDepth(kKeys), Onto::kZero, nullptr,
                      buf_.s + tile.score_row * buf_.tile_kv + u * kUnit, buf_.tile_kv, fetch);
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
