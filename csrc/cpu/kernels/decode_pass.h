// Items of at most kMaxLowRows rows. Internal linkage: see kernels.h.
//
// A key or value is used only a few times, so memory is the limit. Keys and values are processed a
// few tokens at a time: all kv heads of these tokens before the next tokens, which is the order in
// memory. Meanwhile the following data is prefetched, spread evenly over the arithmetic: with tiles
// as in block_fetch.h, else the tokens kTokensAhead later. Both distances are short: a core with
// enough misses in flight drops further prefetches, and its hardware prefetchers make up for these
// only if reads follow the order in memory closely.
#pragma once

#include "cpu/kernels/block_fetch.h"
#include "cpu/kernels/pass_base.h"

namespace jax_attn {
namespace {

// Panels of at most 16 keys, for short units.
template <class Isa>
struct ShortPanels : Isa {
  static constexpr int kVecs = Isa::kWidth < 16 ? Isa::kVecs : 1;
};

template <class Isa, typename T, typename Kv>
class DecodePass : PassBase<Isa, T, Kv, true> {
  using Base = PassBase<Isa, T, Kv, true>;
  using Base::buf_, Base::item_, Base::num_heads_, Base::params_, Base::rows_;
  using Base::kBytes, Base::kCodes, Base::kKeys, Base::kStep, Base::kUnit, Base::kValues;
  using RowElement = typename Base::RowElement;
  using RowTile = typename Base::RowTile;

 public:
  using Base::Base;

  void Run() {
    this->LoadQueries();
    if constexpr (!Base::kTiled) {
      this->template ClearKeyPanels<KeyIsa>(2 * kKeyPanels, KeyPanelBytes());
    }
    this->ForBlocks([&](i64 start, const BlockRows& block, const BlockRows& next) {
      if constexpr (Base::kTiled) StartFetch(block, next);
      AddBlock(start, block, next);
    });
    this->StoreStates();
  }

 private:
  // Tokens of a unit, whose heads follow each other: few, so that reads follow the order in memory,
  // but enough for a whole panel of keys and to load and store o rarely. With twice as many f32 or
  // bf16 values a decode is a tenth faster from caches and a tenth slower from memory. Quantized
  // values are limited by arithmetic, so their units are long.
  static constexpr i64 kKeyTokens = Buffers<Isa, T, Kv, true>::kKeyTokens;
  i64 ValueTokens() const {
    if (Base::kTiled) return Base::kTileTokens;
    if (kCodes) return 64;
    return this->Stages(kOfValues) ? kKeyTokens : Min(8, 16 / kBytes);
  }
  // For quantized values a whole block: scales of values are applied when P is quantized, before
  // the matmul.
  static constexpr i64 kTokensAhead = Base::kCodes ? 0 : kKeyTokens;
  using KeyIsa = ShortPanels<Isa>;
  static constexpr i64 kKeyPanel = kPanel<KeyIsa>;
  // A row of f32 is often a page of its own, so several pages are looked up at once.
  static constexpr i64 kFetchPages = kBytes == 4 ? 4 : 1;
  // Without tiles only matmuls prefetch, one line for each line that they read, for quantized
  // values, too: with bursts of prefetches after each decoded row a decode from memory takes 1.3
  // times as long. Int8 values are read twice, from their rows and from panels.
  using KeyFetch = RowFetch<kCodes ? 2 : 1, kFetchPages>;
  using ValueFetch = RowFetch<1, kFetchPages>;
  static constexpr int kKeyPanels = kKeyTokens / kKeyPanel;
  // Rows of a head whose keys are multiplied together with those of the next head.
  static constexpr int kMaxPairRows = Isa::kRows * Isa::kVecs / (2 * kKeyPanels * KeyIsa::kVecs);
  static_assert(kKeyTokens % kKeyPanel == 0);
  // Up to this many rows of one head, or of each of two heads, keys are multiplied without panels:
  // there are registers for the sums beside the keys of a vector of tokens.
  static constexpr int kMaxKeyRows = kCodes ? 0 : 8, kMaxKeyPairRows = kMaxKeyRows / 2;
  // Whether a decode is limited by loading keys. Then one head at a time is as fast as two or, from
  // memory, faster: reads follow the order of heads in memory.
  static constexpr bool kKeysAreLate = kBytes == 4 || Base::kPairs;

  void AddBlock(i64 start, const BlockRows& block, const BlockRows& next) {
    const Range valid = this->ValidTokens(start);
    if (buf_.variant) {
      buf_.variant.StartBlock(start, valid, this->is_masked_);
      const i64 last = num_heads_ * rows_ - 1;
      const auto share = buf_.variant.Sees(0, last, valid.begin, valid.end);
      if (share.none) {
        if constexpr (Base::kTiled) ResetFetch();
        return;
      }
      buf_.variant.SetHides(!share.all);
    }
    if constexpr (kCodes) this->EncodeFresh(start, valid, block);
    const i64 k_bytes = this->KeyHeadBytes(), v_bytes = this->ValueHeadBytes();
    KeyFetch key_fetch;
    ValueFetch unit_fetch;
    NoFetch no_fetch;
    auto& value_fetch = EitherOf<Base::kTiled>(fetch_, unit_fetch);
    auto& beside_fetch = EitherOf<Base::kTiled>(fetch_, no_fetch);
    const bool stages = this->Stages(kOfValues);
    if constexpr (Base::kTiled) ShareKeys(valid);
    for (i64 first = valid.begin / kKeyTokens * kKeyTokens; first < valid.end;
         first += kKeyTokens) {
      if constexpr (!Base::kTiled) {
        StartUnit(kCodes ? block.v : block.k, kCodes ? v_bytes : k_bytes, block.v, v_bytes, first,
                  kKeyTokens, valid, &key_fetch);
      }
      if constexpr (Base::kTiled) {
        MultiplyTileKeys(start, valid, first, block.k);
      } else {
        const Range tokens = Unit(first, kKeyTokens, valid);
        for (i64 h = 0; h < num_heads_;) {
          h += MultiplyKeys(h, start, valid, tokens, block.k, key_fetch);
        }
      }
    }
    if constexpr (Base::kTiled) ShareSoftmax(valid);
    bool finite = true;  // whether all scales of values are
    for (i64 h = 0; h < num_heads_; ++h) {
      if constexpr (kCodes) finite &= this->LoadValueScales(block.v, h * v_bytes, valid);
      ForTiles(h, start, valid, [&](const RowTile& tile) {
        if constexpr (kCodes) {
          this->WeighTile(h, tile.row - h * rows_, tile.n, tile.score_row, start, valid, tile.seen,
                          buf_.codes.key_scales + h * buf_.tile_kv, beside_fetch);
        } else {
          this->Softmax(h, tile.row - h * rows_, tile.n, tile.score_row, start, valid, tile.seen,
                        beside_fetch);
        }
      });
    }
    if constexpr (Base::kTiled) ShareValues(valid);
    const i64 unit = ValueTokens();
    for (i64 first = valid.begin / unit * unit; first < valid.end; first += unit) {
      if constexpr (!Base::kTiled) {
        StartUnit(kCodes ? next.k : block.v, kCodes ? k_bytes : v_bytes, next.k, k_bytes, first,
                  unit, valid, &unit_fetch);
      }
      const Range tokens = Unit(first, unit, valid);
      for (i64 h = 0; h < num_heads_; ++h) {
        if (!stages) {
          MultiplyValues(h, start, valid, first, tokens, {block.v, h * v_bytes}, value_fetch);
          continue;
        }
        if (this->PackCoded(block.v, h, start, first, tokens, value_fetch)) {
          MultiplyValues(h, start, valid, first, tokens, {nullptr, 0}, value_fetch);
          continue;
        }
        this->Stage(kOfValues, block.v, start, first, unit, tokens, h, 1, beside_fetch);
        MultiplyValues(h, start, valid, first, tokens, {buf_.staged, 0}, value_fetch);
      }
    }
    if constexpr (kCodes) AddBlockSums(start, valid, block, finite);
  }

  void AddBlockSums(i64 start, Range valid, const BlockRows& block, bool finite) {
    for (i64 h = 0; h < num_heads_; ++h) {
      ForTiles(h, start, valid, [&](const RowTile& tile) {
        AddSums<Isa>(tile.n, buf_.o_columns, buf_.alpha + tile.score_row,
                     buf_.codes.factors + tile.score_row,
                     buf_.codes.sums + tile.score_row * buf_.o_columns, buf_.o_columns,
                     buf_.o + tile.row * buf_.o_columns, buf_.o_columns);
      });
      if (!finite) this->SpoilRows(h, block.v, h * this->ValueHeadBytes(), start, valid);
    }
  }

  // ---- with tiles: prefetches during each phase of a block

  // The softmax of n rows per head takes n / (n + kSoftmaxRows) of a block's time; keys take
  // kKeyTime of the rest. Enough of the next block is prefetched that its keys never wait, and
  // kLead of it more; for quantized values also enough that its values do not wait, since the
  // softmax reads their scales. Measured: with kKeyTime 0.4 GQA is 2 % slower, without kLead 3 %.
  static constexpr float kSoftmaxRows = 70, kKeyTime = 0.5f, kLead = 0.125f;
  static constexpr float kBeforeSoftmax = kCodes ? 1 : 0.5f;  // part of a block

  void StartFetch(const BlockRows& block, const BlockRows& next) {
    if (fetch_.pieces == nullptr) {
      fetch_.pieces = &pieces_;
      AppendBlock(block);
    }
    const bool is_last = next.k == block.k;
    if (!is_last) AppendBlock(next);
    const float rows = static_cast<float>(rows_);
    const float softmax = rows / (rows + kSoftmaxRows), keys = kKeyTime * (1 - softmax);
    const auto part = [](i64 lines, float share) {
      return static_cast<i64>(static_cast<float>(lines) * share);
    };
    end_ += BlockLines(block);
    const i64 ahead = is_last ? 0 : part(BlockLines(next), kLead + kBeforeSoftmax - keys);
    const i64 lines = Max(0, end_ + ahead - fetch_.fetched() / kCacheLine + NumRuns(block));
    key_lines_ = part(lines, keys);
    softmax_lines_ = part(lines, softmax);
    value_lines_ = lines - key_lines_ - softmax_lines_;
  }

  // After a skipped block: its remaining prefetches are dropped.
  void ResetFetch() {
    pieces_ = PagePieces{};
    fetch_ = BesideFetch{};
    end_ = 0;
  }

  void AppendBlock(const BlockRows& block) {
    const Range valid = block.valid;
    const i64 tokens = valid.end - valid.begin;
    pieces_.Append(block.k + valid.begin, tokens, num_heads_ * this->KeyHeadBytes());
    if (params_.mla) return;  // values share the keys' lines
    pieces_.Append(block.v + valid.begin, tokens, num_heads_ * this->ValueHeadBytes());
  }

  i64 BlockLines(const BlockRows& block) const {
    const i64 bytes = this->KeyHeadBytes() + (params_.mla ? 0 : this->ValueHeadBytes());
    return (block.valid.end - block.valid.begin) * num_heads_ * bytes / kCacheLine;
  }

  // Number of runs of rows that are contiguous in memory: each run may have one line more than its
  // bytes need.
  i64 NumRuns(const BlockRows& block) const {
    const i64 tokens = block.valid.end - block.valid.begin;
    return 2 * (params_.page_size > 0 ? CeilDiv(tokens, params_.page_size) : 1);
  }

  // In the units of work that callers report: see BesideFetch::Bytes.
  void ShareKeys(Range valid) {
    const i64 bytes = this->Stages(kOfKeys)
                          ? this->StageBytes(params_.head_dim_qk) + StagedProduct()
                          : this->KeyHeadBytes();
    fetch_.Share(key_lines_, (valid.end - valid.begin) * num_heads_ * bytes);
  }
  // Work of the matmul of a decoded row of keys, with tiles: a third of the time of decoding and
  // matmul.
  i64 StagedProduct() const { return 2 * params_.head_dim_qk; }
  void ShareSoftmax(Range valid) {
    fetch_.Share(softmax_lines_, 2 * (valid.end - valid.begin) * num_heads_ * rows_);
  }
  void ShareValues(Range valid) {
    const i64 dim = params_.head_dim_vo;
    const i64 packing = kCodes ? (CeilDiv(4 * dim, kCacheLine) + 1) * kCacheLine / 4 : 2 * dim;
    const i64 product = kCodes ? dim : 2 * dim;
    const i64 bytes = packing + product + (this->Stages(kOfValues) ? this->StageBytes(dim) : 0);
    fetch_.Share(value_lines_, (valid.end - valid.begin) * num_heads_ * bytes);
  }

  // Tokens of the unit that starts at `first`.
  static Range Unit(i64 first, i64 tokens, Range valid) {
    return {Max(valid.begin, first), Min(valid.end, first + tokens)};
  }

  // Prefetches all heads of the unit kTokensAhead after the one at `first`, of `rows` or of what
  // follows them. For quantized values `rows` are those that are multiplied next.
  template <class Fetch>
  void StartUnit(const char* const* rows, i64 head_bytes, const char* const* then,
                 i64 then_head_bytes, i64 first, i64 tokens, Range valid, Fetch* fetch) const {
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

  // s = q k for the panels that hold `tokens`, for head h and perhaps the next; returns the number
  // of heads.
  i64 MultiplyKeys(i64 h, i64 start, Range valid, Range tokens, const char* const* rows,
                   KeyFetch& fetch) {
    const i64 begin = tokens.begin / kKeyPanel, end = CeilDiv(tokens.end, kKeyPanel);
    const i64 panel_bytes = KeyPanelBytes(), steps = this->KeySteps();
    const PanelSource<KeyIsa, kKeys> panels{buf_.k_panels, panel_bytes};
    const bool few = rows_ <= kMaxKeyRows;
    const bool stages = this->Stages(kOfKeys);
    const bool pairs = few ? rows_ <= kMaxKeyPairRows && (stages || !kKeysAreLate)
                           : end - begin == kKeyPanels && rows_ <= kMaxPairRows;
    const i64 heads = pairs && h + 1 < num_heads_ ? 2 : 1;
    if (stages) {
      this->Stage(kOfKeys, rows, start, tokens.begin / kKeyTokens * kKeyTokens, kKeyTokens, tokens,
                  h, heads);
    }
    const i64 row_bytes = params_.head_dim_qk * i64{sizeof(RowElement)};
    const i64 head_bytes = stages ? row_bytes : this->KeyHeadBytes();
    if constexpr (kMaxKeyRows > 0) {
      if (few) {
        const HeadRows keys{stages ? buf_.staged : rows, stages ? 0 : h * head_bytes};
        MultiplyRows(h, heads, start, valid, tokens, keys, head_bytes, fetch);
        return heads;
      }
    }
    char* panel = buf_.k_panels;
    for (i64 i = 0; i < heads; ++i) {
      const HeadRows keys{stages ? buf_.staged : rows, (stages ? i : h + i) * head_bytes};
      for (i64 u = begin; u < end; ++u, panel += panel_bytes) {
        if constexpr (kCodes) {
          PackCodePanel<KeyIsa>(keys, u * kKeyPanel, params_.head_dim_qk, panel, fetch);
        } else {
          PackKeyPanel<KeyIsa, kKeys, RowElement>(keys, u * kKeyPanel, params_.head_dim_qk, panel);
        }
      }
      if constexpr (kCodes) SaveKeyScales(rows, h + i, tokens);
    }
    ForTiles(h, start, valid, [&](const RowTile& tile) {
      const i64 first = Max(begin, tile.seen.begin / kKeyPanel);
      const i64 num = Min(end, CeilDiv(tile.seen.end, kKeyPanel)) - first;
      if (num <= 0) return;
      const float* q = buf_.q + tile.row * buf_.q_lanes;
      float* s = buf_.s + tile.score_row * buf_.tile_kv + first * kKeyPanel;
      if (heads == 2) {
        GemmTwoSets<KeyIsa, kKeyPanels, kMaxPairRows>(
            tile.n, q, buf_.q_lanes, panels, steps, Onto::kZero,
            buf_.s + tile.score_row * buf_.tile_kv + begin * kKeyPanel, buf_.tile_kv, fetch);
      } else {
        GemmRows<KeyIsa>(tile.n, q, buf_.q_lanes, panels, first - begin, num, steps, Onto::kZero,
                         nullptr, s, buf_.tile_kv, fetch);
      }
    });
    return heads;
  }

  // The same without panels, for few rows of one or two heads.
  template <class Fetch>
  void MultiplyRows(i64 h, i64 heads, i64 start, Range valid, Range tokens, const HeadRows& keys,
                    i64 head_bytes, Fetch& fetch) {
    const Range seen = this->VisibleToAny(0, rows_ - 1, start, valid);
    const Range both = {Max(seen.begin, tokens.begin), Min(seen.end, tokens.end)};
    const float* q = buf_.q + h * rows_ * buf_.q_lanes;
    float* s = buf_.s + h * rows_ * buf_.tile_kv;
    constexpr i64 kWidth = Isa::kWidth;
    for (i64 t = both.begin / kWidth * kWidth; t < both.end; t += kWidth) {
      if (heads == 2) {
        MultiplyFewRows<Isa, kKeys, RowElement, kMaxKeyPairRows, 2>(
            rows_, q, buf_.q_lanes, keys, head_bytes, t, params_.head_dim_qk, s + t, buf_.tile_kv,
            fetch);
      } else {
        MultiplyFewRows<Isa, kKeys, RowElement, kMaxKeyRows, 1>(rows_, q, buf_.q_lanes, keys,
                                                                head_bytes, t, params_.head_dim_qk,
                                                                s + t, buf_.tile_kv, fetch);
      }
    }
  }

  void SaveKeyScales(const char* const* rows, i64 h, Range tokens) const {
    this->LoadKeyScales(rows, h * this->KeyHeadBytes(), params_.head_dim_qk, tokens,
                        buf_.codes.key_scales + h * buf_.tile_kv);
  }

  // s = q k for all heads and the tokens [first, first + kKeyTokens) that any row sees.
  void MultiplyTileKeys(i64 start, Range valid, i64 first, const char* const* rows) {
    BesideFetch fetch = fetch_;
    const Range seen = this->VisibleToAny(0, rows_ - 1, start, valid);
    const Range tokens = {Max(seen.begin, first), Min(seen.end, first + kKeyTokens)};
    if (tokens.begin >= tokens.end) return;
    UseTilesOf<Isa>(2 * kTileRows, rows_);
    // If no row sees one of the tiles, only the other is multiplied.
    const i64 low = tokens.begin < first + kTileRows ? first : first + kTileRows;
    const i64 high = tokens.end > first + kTileRows ? first + kTileRows : first;
    const i64 depth = StepDepth(kKeys) * buf_.q_lanes, steps = this->KeySteps();
    const i64 head_bytes = this->KeyHeadBytes();
    const bool whole = !this->Stages(kOfKeys) && depth == params_.head_dim_qk &&
                       IsTile(rows + low) && IsTile(rows + high);
    KeyTiles keys;
    if (whole) {
      keys = {{rows[low], rows[high]}, {rows[low + 1] - rows[low], rows[high + 1] - rows[high]}};
    } else {
      const char* stage = reinterpret_cast<const char*>(buf_.stage);
      const i64 bytes = 4 * buf_.q_lanes;
      keys = {{stage + (low - first) * bytes, stage + (high - first) * bytes}, {bytes, bytes}};
    }
    // Heads that are staged together, as tiles one after the other.
    const i64 staged_heads = this->Transforms(kOfKeys) ? 2 : 1;
    const i64 product = whole || kCodes ? head_bytes : this->Stages(kOfKeys) ? StagedProduct() : 0;
    const i64 step_bytes = kKeyTokens * product * kTileSteps / (4 * steps);
    alignas(64) float columns[2 * kTileRows * kTileRows] = {};
    const i64 heads_at_once = kTileRows / rows_;
    for (i64 h = 0; h < num_heads_; h += heads_at_once) {
      const i64 heads = Min(heads_at_once, num_heads_ - h);
      for (i64 i = 0; i < heads; ++i) {
        const i64 slot = (h + i) % staged_heads;
        if (!whole && slot == 0) {
          StageKeys(rows, start, first, tokens, h + i, Min(staged_heads, num_heads_ - h - i),
                    fetch);
        }
        KeyTiles tiles = keys;
        for (const char*& row : tiles.rows) row += slot * kKeyTokens * tiles.bytes[0];
        MultiplyKeyTiles<TilesOf<Isa, kKeys>>(tiles, buf_.q + (h + i) * rows_ * buf_.q_lanes, rows_,
                                              steps, columns + i * rows_,
                                              [&] { fetch.Bytes(step_bytes); });
        if (whole) {
          keys.rows[0] += head_bytes;
          keys.rows[1] += head_bytes;
        }
        if constexpr (kCodes) SaveKeyScales(rows, h + i, tokens);
      }
      StoreTurned(columns, heads * rows_, buf_.s + h * rows_ * buf_.tile_kv + first);
    }
    fetch_ = fetch;
  }

  // Whether kTileRows rows are equally far apart.
  static bool IsTile(const char* const* rows) {
    const i64 bytes = rows[1] - rows[0];
    bool same = true;
    for (i64 t = 2; t < kTileRows; ++t) same &= rows[t] - rows[t - 1] == bytes;
    return same;
  }

  // Copies `tokens` of the keys of some heads to rows of tiles, from the row of token `first` on;
  // several only if they are transformed.
  void StageKeys(const char* const* rows, i64 start, i64 first, Range tokens, i64 h, i64 heads,
                 BesideFetch& fetch) {
    const i64 dim = params_.head_dim_qk, depth = StepDepth(kKeys) * buf_.q_lanes;
    if constexpr (kCodes) {
      char* codes = reinterpret_cast<char*>(buf_.stage) + (tokens.begin - first) * depth;
      for (i64 t = tokens.begin; t < tokens.end; ++t, codes += depth) {
        memcpy(codes, rows[t] + h * this->KeyHeadBytes(), static_cast<size_t>(dim));
        memset(codes + dim, 0, static_cast<size_t>(depth - dim));
      }
      return;
    }
    T* to = buf_.stage + (tokens.begin - first) * depth;
    if (this->Stages(kOfKeys)) {
      this->StageTokens(kOfKeys, rows, start, tokens, h, heads, to, depth, kKeyTokens * depth,
                        fetch);
    } else {
      const i64 bytes = dim * i64{sizeof(T)};
      for (i64 t = tokens.begin; t < tokens.end; ++t) {
        fetch.Bytes(bytes);
        memcpy(buf_.stage + (t - first) * depth, rows[t] + h * bytes, static_cast<size_t>(bytes));
      }
    }
    for (i64 i = 0; i < heads; ++i, to += kKeyTokens * depth) {
      for (i64 t = 0; depth > dim && t < tokens.end - tokens.begin; ++t) {
        memset(to + t * depth + dim, 0, static_cast<size_t>(depth - dim) * sizeof(T));
      }
    }
  }

  // to[i, t] = columns[t, i] for i < n and the tokens of two tiles.
  JAX_ATTN_KERNEL void StoreTurned(const float* columns, i64 n, float* to) const {
    constexpr int kWidth = Isa::kWidth;
    for (i64 t = 0; t < 2 * kTileRows; t += kWidth) {
      for (i64 i = 0; i < n; i += kWidth) {
        typename Isa::Vec x[kWidth];
        for (int j = 0; j < kWidth; ++j) x[j] = Isa::Load(columns + (t + j) * kTileRows + i);
        Isa::Transpose(x);
        for (i64 j = 0; j < Min(kWidth, n - i); ++j) {
          Isa::Store(to + (i + j) * buf_.tile_kv + t, x[j]);
        }
      }
    }
  }

  // Without tiles, only matmuls prefetch, as they read the panels.
  template <class Fetch>
  void PackFetched(const HeadRows& values, i64 first, Range tokens, Fetch& fetch) const {
    if constexpr (Base::kTiled) {
      this->template PackBlockValues<T>(values, first, tokens, fetch);
    } else {
      NoFetch none;
      this->PackBlockValues(values, first, tokens, none);
    }
  }

  // Starts the sums of the block, to which the tokens of a unit are added.
  template <class Fetch>
  void AddCodes(const RowTile& tile, i64 first, Range tokens, Fetch& fetch) {
    const Range seen = this->Whole(tile.seen);
    tokens = this->Whole(tokens);
    const i64 begin = Max(seen.begin, tokens.begin), end = Min(seen.end, tokens.end);
    if (begin >= end) return;
    const bool is_first = seen.begin >= tokens.begin;
    const i64 step = begin / kStep, steps = CeilDiv(end, kStep) - step;
    auto panels = this->PackedValues();
    panels.Skip(step - first / kStep);
    GemmRows<Isa>(tile.n, buf_.p + tile.score_row * buf_.p_lanes + step, buf_.p_lanes, panels, 0,
                  buf_.o_columns / kUnit, steps, is_first ? Onto::kZero : Onto::kOld, nullptr,
                  buf_.codes.sums + tile.score_row * buf_.o_columns, buf_.o_columns, fetch);
  }

  i64 KeyPanelBytes() const {
    return PanelBytes<KeyIsa, kKeys>(this->KeySteps() * StepDepth(kKeys));
  }

  // o = alpha o + p v for `tokens`, those of the unit that starts at token `first`; without rows,
  // panels have the values.
  template <class Fetch>
  void MultiplyValues(i64 h, i64 start, Range valid, i64 first, Range tokens,
                      const HeadRows& values, Fetch& fetch) {
    const i64 panels = buf_.o_columns / kUnit;
    const bool mixed = this->IsMixed(start, valid);
    // Each value is read once per row tile, so directly from its row, if whole panels and steps do
    // not reach beyond it and every row sees every token.
    if constexpr (!Base::kTiled && !kCodes) {
      const bool whole =
          params_.head_dim_vo % kUnit == 0 && tokens.begin % kStep == 0 && tokens.end % kStep == 0;
      if (whole && !mixed) {
        const RowSource<Isa, RowElement, Base::kPairs> rows{values.rows + tokens.begin,
                                                            values.offset};
        ForTiles(h, start, valid, [&](const RowTile& tile) {
          this->AddValues(tile, tokens.begin, tokens, rows, 0, panels, fetch);
        });
        return;
      }
    }
    if (values.rows != nullptr) PackFetched(values, first, tokens, fetch);
    if constexpr (kCodes) {
      ForTiles(h, start, valid, [&](const RowTile& tile) { AddCodes(tile, first, tokens, fetch); });
      return;
    }
    if (!mixed || this->ValuesAreFinite(first, tokens)) {
      ForTiles(h, start, valid, [&](const RowTile& tile) {
        this->AddValues(tile, first, tokens, this->PackedValues(), 0, panels, fetch);
      });
    } else {
      ForTiles(
          h, start, valid,
          [&](const RowTile& row) {
            if (buf_.variant && buf_.variant.masks()) {
              this->AddSeenValues(row, first, tokens, fetch);
            } else {
              this->AddVisibleValues(row, first, tokens, fetch);
            }
          },
          1);
    }
  }

  PagePieces pieces_;
  BesideFetch fetch_;
  // Lines of all blocks up to the current one, and lines to prefetch during its phases.
  i64 end_ = 0, key_lines_ = 0, softmax_lines_ = 0, value_lines_ = 0;
};

}  // namespace
}  // namespace jax_attn
