// The common part of decode and prefill: buffers, visibility, softmax steps, results. Internal
// linkage: see kernels.h.
//
// Both process kv in blocks of tile_kv that start at absolute multiples of it, take one online
// softmax step per block, and add products in the order of kv positions. Keys that a row does not
// see add exact zeros or nothing. So the bits of a row depend on its own span alone: not on the
// rows and heads beside it, nor on tile M.
#pragma once

#include "cpu/kernels.h"
#include "cpu/kernels/codec.h"
#include "cpu/kernels/pack.h"
#include "cpu/kernels/quantized_softmax.h"
#include "cpu/kernels/reduce.h"
#include "cpu/kernels/softmax.h"
#include "cpu/kernels/transform.h"
#include "cpu/kernels/variant.h"

namespace jax_attn {
namespace {

// Addresses of the key and value of each token of a block, for the run's first kv head. Entries
// outside the block's valid tokens repeat a valid one, so that whole panels can be loaded.
struct BlockRows {
  const char** k;
  const char** v;
  Range valid;
};

// Which of the two arrays rows belong to.
enum RowsOf : int { kOfKeys = 0, kOfValues = 1 };

// Rows of a whole pass of decode.
constexpr i64 kMaxLowPassRows = 256;

// One thread's buffers. On a null scratch it only counts their bytes.
template <class Isa, typename T, typename Kv, bool kLow>
struct Buffers {
  static constexpr Format kKeys = kKeyFormat<Isa, T, Kv, kLow>,
                          kValues = kValueFormat<Isa, T, Kv, kLow>;
  // Decode packs keys of this many tokens of two heads at once.
  static constexpr i64 kKeyTokens = Min(2 * kTileRows, 64 / static_cast<i64>(sizeof(Kv)));

  float* q;          // [rows, q_lanes]
  float* o;          // [rows, o_columns]
  RowState* states;  // [rows]
  float* scales;     // [rows] extra factor of the logits: per head, else 1
  // [rows] of one head: each row's query token, ascending, and its head in the group.
  i32 *tokens, *group_heads;
  // [score_rows, tile_kv] scores, then P unless that is at p. With int8 dot products i32 first.
  float* s;
  float* p;           // [score_rows, p_lanes]
  float* alpha;       // [score_rows]
  CodeBuffers codes;  // for int8 dot products
  char* k_panels;     // [tile_kv / kPanel, k_panel_bytes]; decode: panels of 2 kKeyTokens
  char* v_panels;     // [o_columns / kPanel, v_panel_bytes]
  BlockRows blocks[2];
  i64 q_lanes, p_lanes, o_columns, k_panel_bytes, v_panel_bytes, tile_kv;
  size_t bytes = 0;
  VariantRun<Isa> variant;
  Range* seen;      // [rows] what each row sees of a block in which the variant hides something
  i32* is_stretch;  // [rows] whether the row sees all of that
  // [tokens, heads, head_dim] decoded keys or values. Decode with tiles: [tokens, depth] of one
  // head, also for keys that are not stored as tiles of a.
  T* stage;
  const char** staged;                 // [tile_kv] its row for each token
  TransformRun<Isa, T> transforms[2];  // of keys and values

  // Whether rows can have a transform: if they are stored as T.
  static constexpr bool kTransforms = !IsCode<Kv> && !IsInt8<Kv>;

  // Depth that a matmul processes for `depth`.
  static constexpr i64 Depth(i64 depth) {
    return kUsesTiles<Isa, T, Kv> ? RoundUp(depth, kTileSteps * StepDepth(kKeys)) : depth;
  }

  // Whether quantized values that kernels could use directly are decoded to rows of T nevertheless,
  // because tables are faster.
  static constexpr bool StagesCodes() {
    return IsCode<Kv> && kLow && (kUsesTiles<Isa, T, Kv> || kLooksUp<Isa, T>);
  }

  Buffers(const AttentionParams& params, const CpuGeometry& g, void* scratch)
      : q_lanes(Lanes(kKeys, Depth(params.head_dim_qk))),
        p_lanes(Lanes(kValues, g.tile_kv)),
        o_columns(SumColumns<Isa, kValues>(params.head_dim_vo)),
        k_panel_bytes(PanelBytes<Isa, kKeys>(Depth(params.head_dim_qk))),
        // One line more than the panel: panels a power of two apart would share cache sets.
        v_panel_bytes(PanelBytes<Isa, kValues>(g.tile_kv) + kCacheLine),
        tile_kv(g.tile_kv) {
    // Matmuls with tiles may write a whole tile.
    const i64 rows = kLow                     ? kMaxLowPassRows
                     : kUsesTiles<Isa, T, Kv> ? RoundUp(g.max_rows, 2 * kTileRows)
                                              : g.max_rows;
    const i64 score_rows = kLow ? kMaxLowPassRows : kScoreRows;
    char* base = static_cast<char*>(scratch);
    q = Take<float>(base, rows * q_lanes);
    o = Take<float>(base, rows * o_columns);
    states = Take<RowState>(base, rows);
    scales = Take<float>(base, rows);
    tokens = Take<i32>(base, rows);
    group_heads = Take<i32>(base, rows);
    s = Take<float>(base, score_rows * tile_kv);
    p = kUsesDot<Isa, T, Kv> || IsInt8<Kv> ? Take<float>(base, score_rows * p_lanes) : s;
    alpha = Take<float>(base, score_rows);
    if constexpr (IsInt8<Kv>) TakeCodes(params, base, rows, score_rows);
    k_panels =
        Take<char>(base, CeilDiv(kLow ? 2 * kKeyTokens : tile_kv, kPanel<Isa>) * k_panel_bytes);
    v_panels = Take<char>(base, o_columns / kPanel<Isa> * v_panel_bytes);
    for (BlockRows& block : blocks) {
      block.k = Take<const char*>(base, tile_kv);
      block.v = Take<const char*>(base, tile_kv);
    }
    const i64 heads = kLow ? Min(rows, params.num_qo_heads) : i64{params.group_size};
    variant = VariantRun<Isa>(g.program, g.code, rows, kLow ? kMaxLowRows : rows, heads, tile_kv,
                              base + bytes);
    bytes += variant.bytes();
    seen = Take<Range>(base, g.code == nullptr ? 0 : rows);
    is_stretch = Take<i32>(base, g.code == nullptr ? 0 : rows);
    bool transforms_rows = false;
    if constexpr (kTransforms) {
      for (int i = 0; i < 2; ++i) {
        transforms[i] = TransformRun<Isa, T>(g.transforms[i], base + bytes);
        bytes += transforms[i].bytes();
        transforms_rows |= static_cast<bool>(transforms[i]);
      }
    }
    constexpr bool kTiles = kLow && kUsesTiles<Isa, T, Kv>;
    const bool stages = kTiles || StagesCodes() || transforms_rows ||
                        (!IsCode<Kv> && !IsInt8<Kv> && params.kv_format != kPlainFormat);
    // Two heads of keys are transformed at once.
    const i64 stage_rows = kTiles && !transforms_rows ? 2 * kTileRows
                           : kLow                     ? 2 * kKeyTokens
                                                      : tile_kv;
    stage =
        Take<T>(base, stages ? stage_rows * Depth(Max(params.head_dim_qk, params.head_dim_vo)) : 0);
    staged = Take<const char*>(base, stages ? tile_kv : 0);
  }

 private:
  void TakeCodes(const AttentionParams& params, char* base, i64 rows, i64 score_rows) {
    const i64 heads = kLow ? Min(rows, params.num_kv_heads) : 1;
    codes.factors = Take<float>(base, score_rows);
    codes.bias = Take<i32>(base, rows);
    codes.sums = Take<float>(base, (kLow ? score_rows : kScoreRows) * o_columns);
    codes.key_scales = Take<float>(base, heads * tile_kv);
    codes.value_scales = Take<float>(base, tile_kv);
    codes.largest_scales = Take<float>(base, tile_kv);
    codes.query = Take<float>(base, RoundUp(params.head_dim_qk, kCacheLine));
    const i64 k_bytes = QuantizedRowBytes(kInt8Format, params.head_dim_qk);
    const i64 v_bytes = QuantizedRowBytes(kInt8Format, params.head_dim_vo);
    const bool has_fresh = params.k_new != nullptr;
    codes.fresh = Take<char>(base, has_fresh ? tile_kv * heads * (k_bytes + v_bytes) : 0);
  }

  template <typename U>
  U* Take(char* base, i64 count) {
    U* at = reinterpret_cast<U*>(base + bytes);
    bytes += static_cast<size_t>(RoundUp(count * static_cast<i64>(sizeof(U)), kCacheLine));
    return at;
  }
};

// One pass over some items. With kLow (decode, see decode_pass.h): items of consecutive heads with
// the same rows and span. Else tiles of one head, see CpuTypeKernels::attend; their rows are those
// of one item with gaps between its tokens. T: the type of o, and of q unless q is quantized; Kv:
// the type of keys and values. For Int8, T is float and `elements` knows the type.
template <class Isa, typename T, typename Kv, bool kLow>
class PassBase {
 public:
  PassBase(const AttentionParams& params, const CpuGeometry& g, const WorkItem* items,
           i64 num_items, void* scratch, const ElementRows* elements = nullptr)
      : params_(params),
        elements_(elements),
        items_(items),
        item_(kLow ? items[0] : WholeOf(items, num_items)),
        num_heads_(kLow ? num_items : 1),
        num_tiles_(kLow ? 1 : num_items),
        rows_(CountTokens(items, num_tiles_) * params.group_size),
        span_(SpanOf(params, item_)),
        rule_(MakeLogitRule(params.sm_scale, params.logits_soft_cap)),
        buf_(params, g, scratch) {}

 protected:
  static constexpr Format kKeys = kKeyFormat<Isa, T, Kv, kLow>,
                          kValues = kValueFormat<Isa, T, Kv, kLow>;
  static constexpr bool kPairs = kUsesDot<Isa, T, Kv>;
  static constexpr bool kTiled = kUsesTiles<Isa, T, Kv>;
  static constexpr bool kCodes = IsInt8<Kv>;
  static constexpr bool kBias = kKeys == Format::kKeyQuads && !kTiled;  // in sums with keys
  static constexpr bool kTurnsQueries = kTiled && kLow;                 // keys are a, and q is b
  static constexpr i64 kUnit = kPanel<Isa>;                             // tokens of a panel of keys
  static constexpr i64 kStep = StepDepth(kValues);  // tokens of a step through values
  static constexpr i64 kTileTokens = kTileSteps * kStep;
  static constexpr bool kTransforms = Buffers<Isa, T, Kv, kLow>::kTransforms;
  static constexpr bool kStagesCodes = Buffers<Isa, T, Kv, kLow>::StagesCodes();
  using RowElement = typename Conditional<kStagesCodes, T, Kv>::Type;  // of the matmul operands
  static constexpr i64 kBytes = sizeof(Kv);
  static constexpr i64 kFetchTokens = 4;

  // An item from the first token of the tiles to the last one, over the union of what they see.
  static WorkItem WholeOf(const WorkItem* tiles, i64 num_tiles) {
    WorkItem whole = tiles[0];
    const WorkItem& last = tiles[num_tiles - 1];
    whole.qo_len = last.first_token + last.qo_len - whole.first_token;
    for (i64 i = 1; i < num_tiles; ++i) {
      whole.kv_begin = static_cast<i32>(Min(whole.kv_begin, tiles[i].kv_begin));
      whole.kv_end = static_cast<i32>(Max(whole.kv_end, tiles[i].kv_end));
    }
    return whole;
  }
  static i64 CountTokens(const WorkItem* tiles, i64 num_tiles) {
    i64 tokens = 0;
    for (i64 i = 0; i < num_tiles; ++i) tokens += tiles[i].qo_len;
    return tokens;
  }

  // ---- q, and the states' initial values

  void LoadQueries() {
    const i64 group = params_.group_size;
    for (i64 i = 0, r = 0; i < num_tiles_; ++i) {
      const i64 first = items_[i].first_token - item_.first_token;
      for (i64 token = first; token < first + items_[i].qo_len; ++token) {
        for (i64 g = 0; g < group; ++g, ++r) {
          buf_.tokens[r] = static_cast<i32>(token);
          buf_.group_heads[r] = static_cast<i32>(g);
        }
      }
    }
    const bool q_codes = IsCode<Kv> && params_.q_format == kE4m3Format;
    const i64 q_bytes = params_.head_dim_qk * (q_codes ? 1 : ElementBytes());
    for (i64 h = 0; h < num_heads_; ++h) {
      for (i64 r = 0; r < rows_; ++r) {
        FetchRows(params_.q, q_bytes, h, r);
        const i64 row = OutputRow(h, r);
        float* to =
            kTurnsQueries ? buf_.s + r * buf_.q_lanes : buf_.q + (h * rows_ + r) * buf_.q_lanes;
        if constexpr (kCodes) {
          LoadCodes(row, h * rows_ + r, to);
          continue;
        }
        if (q_codes) {
          LoadQuery<E4m3>(row, to);
        } else {
          LoadQuery<T>(row, to);
        }
        buf_.scales[h * rows_ + r] =
            HeadScale(params_.q_scale, Head(h, r)) * HeadScale(params_.k_scale, items_[h].kv_head);
      }
      if constexpr (kTurnsQueries) TurnQueries(buf_.s, buf_.q + h * rows_ * buf_.q_lanes);
    }
    for (i64 r = 0; r < num_heads_ * rows_; ++r) {
      buf_.states[r] = params_.sums_weights ? RowState{0.0f, 1.0f} : RowState{kNegInf, 0.0f};
      for (i64 d = 0; d < buf_.o_columns; d += Isa::kWidth)
        Isa::Store(buf_.o + r * buf_.o_columns + d, Isa::Zero());
    }
    if constexpr (kTransforms) {
      for (auto& transform : buf_.transforms) {
        if (transform) transform.Begin(params_, item_);
      }
    }
    if (buf_.variant) {
      const float magnitude = params_.sm_scale < 0 ? -params_.sm_scale : params_.sm_scale;
      buf_.variant.Begin({&params_, items_, num_heads_, rows_}, magnitude > 0 ? magnitude : 1.0f,
                         buf_.scales, [&](i64 token) { return QueryRow(token); });
    }
  }

  // NaN if the scale is not positive: the maximum of the dot products would not be that of the
  // logits.
  static float HeadScale(const float* scales, i64 head) {
    if (scales == nullptr) return 1.0f;
    return scales[head] > 0 ? scales[head] : __builtin_nanf("");
  }

  // The row of q of a token of the item.
  i64 QueryRow(i64 token) const { return jax_attn::QueryRow(item_, params_.qo_indices, token); }

  // Row r of head h of the pass: its head, and its offset in q and o, in units of their rows.
  i64 Head(i64 h, i64 r) const {
    return i64{items_[h].kv_head} * params_.group_size + buf_.group_heads[r];
  }
  i64 OutputRow(i64 h, i64 r) const {
    return QueryRow(buf_.tokens[r]) * params_.num_qo_heads + Head(h, r);
  }

  // Bytes of an element of q (unless quantized) and o.
  i64 ElementBytes() const { return kCodes ? elements_->bytes : i64{sizeof(T)}; }

  // Called every kRowsAtOnce rows: prefetches kRowsAtOnce rows of q or o, of this many bytes, two
  // groups ahead. The rows are num_qo_heads rows apart, too far for the hardware to detect a
  // pattern, and most have pages of their own. A core looks up several pages at once but stalls
  // meanwhile. Inline: GCC drops calls of functions that only prefetch.
  JAX_ATTN_INLINE void FetchRows(const void* rows, i64 bytes, i64 h, i64 r) const {
    constexpr i64 kRowsAtOnce = 8;
    const i64 first = r + kRowsAtOnce;
    if (r % kRowsAtOnce != 0 || first >= rows_) return;
    const char* next[kRowsAtOnce];
    for (i64 i = 0; i < kRowsAtOnce; ++i) {
      next[i] = static_cast<const char*>(rows) + OutputRow(h, Min(first + i, rows_ - 1)) * bytes;
    }
    for (i64 at = 0; at < bytes; at += kCacheLine) {
      JAX_ATTN_UNROLL
      for (i64 i = 0; i < kRowsAtOnce; ++i) __builtin_prefetch(next[i] + at, 1);
    }
  }

  template <typename Q>
  void LoadQuery(i64 row, float* to) const {
    const i64 dim = params_.head_dim_qk;
    const Q* from = static_cast<const Q*>(params_.q) + row * dim;
    for (i64 d = 0; d < dim; d += Isa::kWidth) {
      const int n = static_cast<int>(Min(Isa::kWidth, dim - d));
      const auto x = Isa::Mul(Isa::LoadFirst(from + d, n), Isa::Set(rule_.q_sign));
      if constexpr (kPairs) {
        Isa::StoreFirst(reinterpret_cast<Bf16*>(to) + d, x, n);
      } else {
        Isa::StoreFirst(to + d, x, n);
      }
    }
    if constexpr (kTiled) {
      Bf16* row_to = reinterpret_cast<Bf16*>(to);
      for (i64 d = dim; d < 2 * buf_.q_lanes; ++d) row_to[d] = Bf16{0};
    }
  }

  // Quantizes row `at` of the pass, with its scale and bias.
  void LoadCodes(i64 row, i64 at, float* to) const {
    const i64 dim = params_.head_dim_qk;
    const i64 bytes = dim * elements_->bytes;
    elements_->load(static_cast<const char*>(params_.q) + row * bytes, dim, buf_.codes.query);
    for (i64 d = 0; d < dim; d += Isa::kWidth) {
      float* x = buf_.codes.query + d;
      Isa::Store(x, Isa::Mul(Isa::Load(x), Isa::Set(rule_.q_sign)));
    }
    i32 sum;
    buf_.scales[at] = EncodeQuery<Isa>(buf_.codes.query, dim, buf_.q_lanes * Isa::kLaneCodes,
                                       reinterpret_cast<char*>(to), &sum);
    if constexpr (kBias) buf_.codes.bias[at] = Isa::kKeyBias * sum;
  }

  // Copies the rows of a head of q as a tile of b needs them: lane by lane.
  void TurnQueries(const float* rows, float* q) const {
    for (i64 r = 0; r < rows_; ++r, rows += buf_.q_lanes) {
      for (i64 i = 0; i < buf_.q_lanes; ++i) q[i * rows_ + r] = rows[i];
    }
  }

  // Depth of a dot product over head_dim, in steps of keys.
  i64 KeySteps() const {
    return Buffers<Isa, T, Kv, kLow>::Depth(params_.head_dim_qk) / StepDepth(kKeys);
  }

  // Writes zeros that packing does not write in the panels of keys: beyond head_dim.
  template <class PanelIsa>
  void ClearKeyPanels(i64 num_panels, i64 panel_bytes) const {
    const i64 begin = params_.head_dim_qk / StepDepth(kKeys), end = KeySteps();
    if (begin == end) return;
    for (i64 u = 0; u < num_panels; ++u) {
      ClearSteps<PanelIsa, kKeys>(buf_.k_panels + u * panel_bytes, begin, end);
    }
  }

  // The tokens that a matmul with values must process to cover `tokens`.
  static Range Whole(Range tokens) {
    if constexpr (!kTiled) return tokens;
    return {tokens.begin / kTileTokens * kTileTokens, RoundUp(tokens.end, kTileTokens)};
  }

  // Packs the panels of values from token `first` on; the padding that a tile multiplies is 0.
  template <typename Element = RowElement, class Fetch>
  void PackBlockValues(const HeadRows& values, i64 first, Range tokens, Fetch& fetch) const {
    if constexpr (kCodes) {  // for padding P is 0, and so are the products
      PackCodeValues<Isa>(values, first, tokens.begin, tokens.end, params_.head_dim_vo,
                          buf_.v_panel_bytes, buf_.v_panels, fetch);
    } else {
      PackRows<Element>(values, first, tokens, fetch);
    }
  }
  template <typename Element, class Fetch>
  void PackRows(const HeadRows& values, i64 first, Range tokens, Fetch& fetch) const {
    PackValues<Isa, kValues, Element>(values, first, tokens.begin, tokens.end, params_.head_dim_vo,
                                      buf_.v_panel_bytes, buf_.v_panels, fetch);
    if constexpr (kTiled) ClearBeside(first, tokens);
  }
  void ClearBeside(i64 first, Range tokens) const {
    const Range whole = Whole(tokens);
    for (i64 j = 0; j < buf_.o_columns / kUnit; ++j) {
      char* panel = buf_.v_panels + j * buf_.v_panel_bytes;
      ClearSteps<Isa, kValues>(panel, (whole.begin - first) / kStep,
                               (tokens.begin - first) / kStep);
      ClearSteps<Isa, kValues>(panel, CeilDiv(tokens.end - first, kStep),
                               (whole.end - first) / kStep);
    }
  }

  // The same for a quantized head, decoded on the way; false if the format or these tokens need
  // Stage.
  template <class Fetch>
  bool PackCoded(const char* const* rows, i64 h, i64 start, i64 first, Range tokens,
                 Fetch& fetch) const {
    if constexpr (kTiled && kValues == Format::kDot && kLooksUp<Isa, T>) {
      if (tokens.begin % 2 != 0 || tokens.end % 2 != 0 || tokens.end > FirstFresh(start) ||
          params_.head_dim_vo % 64 != 0) {
        return false;
      }
      const HeadRows values{rows, h * ValueHeadBytes()};
      switch (params_.kv_format) {
        case kE4m3Format:
          return PackPairs<BytePairs<kE4m3Table>>(values, first, tokens, fetch);
        case kE5m2Format:
          return PackPairs<BytePairs<kE5m2Table>>(values, first, tokens, fetch);
        case kInt8Format:
          return PackPairs<Int8Pairs>(values, first, tokens, fetch);
        case kMxfp4Format:
          return PackPairs<Mxfp4>(values, first, tokens, fetch);
        case kNvfp4Format:
          return PackPairs<Nvfp4>(values, first, tokens, fetch);
        case kInt4Format:
          return PackPairs<Int4>(values, first, tokens, fetch);
      }
    }
    return false;
  }
  template <class Codec, class Fetch>
  bool PackPairs(const HeadRows& values, i64 first, Range tokens, Fetch& fetch) const {
    return WithDim(params_.head_dim_vo, [&](auto dim) __attribute__((always_inline)) {
      return PackPairsOf<Codec>(dim, values, first, tokens, fetch);
    });
  }
  template <class Codec, typename Dim, class Fetch>
  JAX_ATTN_KERNEL bool PackPairsOf(Dim dim, const HeadRows& values, i64 first, Range tokens,
                                   Fetch& fetch) const {
    const i64 bytes = kFetchTokens * (StageBytes(dim) + 2 * dim);
    Fetch ahead = fetch;  // keeps it in registers
    char* out = buf_.v_panels + (tokens.begin - first) / 2 * kStepBytes<Isa, kValues>;
    for (i64 t = tokens.begin; t < tokens.end; t += 2, out += kStepBytes<Isa, kValues>) {
      const char *row = values.Row(t), *next = values.Row(t + 1);
      if (!Codec::CanPair(row, dim) || !Codec::CanPair(next, dim)) return false;
      if (t % kFetchTokens == 0) ahead.Bytes(bytes);
      Codec::template LookUpPair<Isa>(
          row, next, dim, [&](i64 column, typename Isa::Vec x) __attribute__((always_inline)) {
            char* to = out + column / kUnit * buf_.v_panel_bytes;
            Isa::Store(reinterpret_cast<float*>(to) + column % kUnit, x);
          });
    }
    fetch = ahead;
    ClearBeside(first, tokens);
    return true;
  }

  // ---- blocks and what is visible of them

  // Calls fn(start, block, next block) for every block of the span; after the last block, next is
  // the same block.
  template <typename Fn>
  void ForBlocks(Fn&& fn) {
    const i64 end = CeilDiv(item_.kv_end, buf_.tile_kv);
    i64 i = item_.kv_begin / buf_.tile_kv;
    if (item_.kv_begin >= item_.kv_end) return;
    BlockRows block = buf_.blocks[0], next = buf_.blocks[1];
    i64 start = StartOfStep(i);
    FindRows(start, &block);
    while (i < end) {
      const bool last = ++i >= end;
      const i64 next_start = last ? start : StartOfStep(i);
      if (!last) FindRows(next_start, &next);
      is_masked_ = params_.steps == nullptr || (params_.steps[i - 1] & 1) != 0;
      fn(start, block, last ? block : next);
      const BlockRows swap = block;
      block = next;
      next = swap;
      start = next_start;
    }
  }

  // The position of the i-th step of the span, or of the step lists.
  i64 StartOfStep(i64 i) const {
    return (params_.steps != nullptr ? params_.steps[i] >> 1 : i) * buf_.tile_kv;
  }

  // Calls fn(first row, rows, union of what they see) for tiles of at most max_rows of the rows
  // [begin, end) that see anything of the block. Tile sizes differ by at most one row.
  template <typename Fn>
  void ForRowTiles(i64 begin, i64 end, i64 max_rows, i64 start, Range valid, Fn&& fn) const {
    const i64 tiles = CeilDiv(end - begin, max_rows);
    const i64 low = (end - begin) / tiles, higher = end - begin - tiles * low;
    for (i64 i = 0, r = begin; i < tiles; ++i) {
      const i64 n = low + (i < higher);
      const Range seen = VisibleToAny(r, r + n - 1, start, valid);
      if (seen.begin < seen.end) fn(r, n, seen);
      r += n;
    }
  }

  // Whether keys and values are quantized and decoded to rows of T, not in panels.
  bool Decodes() const {
    return IsCode<Kv> ? kStagesCodes : !kCodes && params_.kv_format != kPlainFormat;
  }
  // Whether they become other rows of T before they are used.
  bool Stages(RowsOf rows) const { return Transforms(rows) || Decodes(); }
  bool Transforms(RowsOf rows) const {
    return kTransforms && static_cast<bool>(buf_.transforms[rows]);
  }

  // Work of decoding a row during a prefetch, only in passes with tiles: as much as packing and
  // multiplying its elements.
  static i64 StageBytes(i64 head_dim) { return 4 * head_dim; }

  // Bytes of a head's row as stored.
  i64 HeadBytes(i64 head_dim) const {
    return Decodes() || kCodes ? QuantizedRowBytes(params_.kv_format, head_dim) : head_dim * kBytes;
  }
  i64 KeyHeadBytes() const { return HeadBytes(params_.head_dim_qk); }
  i64 ValueHeadBytes() const { return HeadBytes(params_.head_dim_vo); }

  // The first token of the block whose key and value are in k_new and v_new; tile_kv if there is
  // none.
  i64 FirstFresh(i64 start) const {
    if (params_.k_new == nullptr) return buf_.tile_kv;
    const i32* qo = params_.qo_indptr + item_.request;
    return params_.kv_lens[item_.request] - (qo[1] - qo[0]) - start;
  }

  // Decodes or transforms `tokens` of heads [head, head + heads) of the pass to rows of T, to which
  // buf_.staged points: entries [first, first + num); those outside of `tokens` repeat one inside.
  template <class Fetch = NoFetch>
  void Stage(RowsOf of, const char* const* rows, i64 start, i64 first, i64 num, Range tokens,
             i64 head = 0, i64 heads = 1, Fetch&& fetch = {}) {
    const i64 head_dim = of == kOfKeys ? params_.head_dim_qk : params_.head_dim_vo;
    const i64 row_dim = heads * head_dim;
    StageTokens(of, rows, start, tokens, head, heads, buf_.stage + (tokens.begin - first) * row_dim,
                row_dim, head_dim, fetch);
    for (i64 t = first; t < first + num; ++t) {
      const i64 row = Max(tokens.begin, Min(t, tokens.end - 1)) - first;
      buf_.staged[t] = reinterpret_cast<const char*>(buf_.stage + row * row_dim);
    }
  }

  // The same with rows `stride` elements apart, those of the next head `head_stride`.
  template <class Fetch>
  void StageTokens(RowsOf of, const char* const* rows, i64 start, Range tokens, i64 head, i64 heads,
                   T* to, i64 stride, i64 head_stride, Fetch& fetch) {
    const i64 head_dim = of == kOfKeys ? params_.head_dim_qk : params_.head_dim_vo;
    if constexpr (kTransforms) {
      if (buf_.transforms[of]) {
        const i64 bytes = head_dim * i64{sizeof(T)};
        buf_.transforms[of].Rows(rows,
                                 {item_.kv_head + head, heads, head * bytes, bytes, head_stride},
                                 start, tokens, to, stride, StageBytes(head_dim), fetch);
        return;
      }
    }
    for (i64 h = 0; h < heads; ++h) {
      DecodeTokens(rows, of == kOfKeys ? params_.k_scale : params_.v_scale, head_dim, start, tokens,
                   head + h, to + h * head_stride, stride, fetch);
    }
  }

  // Decodes `tokens` of one head of the pass, with rows `stride` elements apart. Fresh rows become
  // what append_kv would have stored. Prefetches once per kFetchTokens of the other rows, since a
  // mispredicted branch takes as long as half a row.
  template <class Fetch>
  JAX_ATTN_KERNEL void DecodeTokens(const char* const* rows, const float* scales, i64 head_dim,
                                    i64 start, Range tokens, i64 head, T* to, i64 stride,
                                    Fetch& fetch) const {
    const i32 format = params_.kv_format;
    const i64 offset = head * QuantizedRowBytes(format, head_dim), fresh = FirstFresh(start);
    const Range cached = {tokens.begin, Min(tokens.end, fresh)};
    const auto decode_cached = [&](auto dim) __attribute__((always_inline)) {
      DecodeRows<Isa, T>(format, dim, [&](auto decode) __attribute__((always_inline)) {
        DecodeCached(decode, rows, offset, head_dim, cached, to, stride, fetch);
      });
    };
    if constexpr (kLooksUp<Isa, T>) {
      WithDim(head_dim, decode_cached);
    } else {
      decode_cached(head_dim);
    }
    if (tokens.end <= fresh) return;
    if (cached.begin < cached.end) to += (cached.end - cached.begin) * stride;
    DecodeRows<Isa, T>(format, head_dim, [&](auto decode) __attribute__((always_inline)) {
      char codes[kMaxCodeRowBytes];
      for (i64 t = Max(tokens.begin, fresh); t < tokens.end; ++t, to += stride) {
        EncodeRow(format, reinterpret_cast<const T*>(rows[t]) + head * head_dim, head_dim,
                  scales ? scales[item_.kv_head + head] : 1.0f, codes);
        decode(codes, to);
      }
    });
  }

  template <class Decode, class Fetch>
  JAX_ATTN_KERNEL void DecodeCached(Decode decode, const char* const* rows, i64 offset,
                                    i64 head_dim, Range tokens, T* to, i64 stride,
                                    Fetch& fetch) const {
    const i64 bytes = kFetchTokens * StageBytes(head_dim);
    auto ahead = fetch;  // keeps it in registers
    for (i64 t = tokens.begin; t < tokens.end; ++t, to += stride) {
      if (t % kFetchTokens == 0) ahead.Bytes(bytes);
      decode(rows[t] + offset, to);
    }
    fetch = ahead;
  }

  // Valid tokens of the block that starts at position `start`.
  Range ValidTokens(i64 start) const {
    return {Max(span_.begin - start, 0), Min(span_.end - start, buf_.tile_kv)};
  }

  // The part of `valid` that the query token sees, a range relative to `start`; possibly empty.
  Range VisibleTo(i64 token, i64 start, Range valid) const {
    const i64 position = item_.q_pos + token - start;
    Range range = valid;
    if (params_.window_left >= 0) range.begin = Max(range.begin, position - params_.window_left);
    if (params_.window_right >= 0) range.end = Min(range.end, position + params_.window_right + 1);
    return range;
  }

  // The part that a row sees, possibly including some keys that a variant hides from it.
  Range RowSees(i64 row, i64 start, Range valid) const {
    return narrows_ ? buf_.seen[row] : VisibleTo(buf_.tokens[row], start, valid);
  }

  // The part that any row of [first, last] sees; windows move to the right with the token.
  Range VisibleToAny(i64 first, i64 last, i64 start, Range valid) const {
    if (narrows_) {
      Range all = buf_.seen[first];
      for (i64 r = first + 1; r <= last; ++r) {
        const Range one = buf_.seen[r];
        if (all.begin >= all.end) all = one;
        if (one.begin < one.end) all = {Min(all.begin, one.begin), Max(all.end, one.end)};
      }
      return all;
    }
    return {VisibleTo(buf_.tokens[first], start, valid).begin,
            VisibleTo(buf_.tokens[last], start, valid).end};
  }

  // Whether some row of the item does not see some token of `valid`.
  bool IsMixed(i64 start, Range valid) const {
    if (buf_.variant && buf_.variant.masks()) return true;
    return VisibleTo(item_.qo_len - 1, start, valid).begin > valid.begin ||
           VisibleTo(0, start, valid).end < valid.end;
  }

  void FindRows(i64 start, BlockRows* found) const {
    const Range valid = found->valid = ValidTokens(start);
    const BlockRows& block = *found;
    Range cached = valid;  // the other tokens are fresh
    if (params_.k_new != nullptr) {
      const i64 border = FirstFresh(start);
      cached.end = Max(valid.begin, Min(valid.end, border));
      const i64 bytes = kCodes ? elements_->bytes : kBytes;
      SetRows(params_.k_new, params_.v_new, params_.head_dim_qk * bytes,
              params_.head_dim_vo * bytes, params_.qo_indptr[item_.request] - border,
              {cached.end, valid.end}, block);
    }
    if (params_.page_size == 0) {
      SetRows(params_.k, params_.v, KeyHeadBytes(), ValueHeadBytes(), item_.kv_base + start, cached,
              block);
    } else {
      const i64 page_size = params_.page_size;
      const i64 first_page = params_.layer ? *params_.layer * params_.num_pages : 0;
      i64 page = (start + cached.begin) / page_size, slot = (start + cached.begin) % page_size;
      for (i64 t = cached.begin; t < cached.end; ++page, slot = 0) {
        const i64 row = (first_page + params_.page_indices[item_.kv_base + page]) * page_size;
        const i64 page_end = Min(cached.end, t + page_size - slot);
        SetRows(params_.k, params_.v, KeyHeadBytes(), ValueHeadBytes(), row + slot - t,
                {t, page_end}, block);
        t = page_end;
      }
    }
    const auto repeat = [&](i64 begin, i64 end) {
      for (i64 t = begin; t < end; ++t) {
        block.k[t] = block.k[valid.begin];
        block.v[t] = block.v[valid.begin];
      }
    };
    repeat(0, valid.begin);
    repeat(valid.end, buf_.tile_kv);
  }

  // Sets rows for `tokens` of the block, which are consecutive rows of the arrays k and v, with
  // this many bytes per head; first_row: the row of token 0.
  void SetRows(const void* k, const void* v, i64 k_bytes, i64 v_bytes, i64 first_row, Range tokens,
               const BlockRows& block) const {
    const i64 k_row_bytes = params_.num_kv_heads * k_bytes,
              v_row_bytes = params_.mla ? k_row_bytes : params_.num_kv_heads * v_bytes;
    const char* from_k = static_cast<const char*>(k) + item_.kv_head * k_bytes;
    const char* from_v = static_cast<const char*>(v) + item_.kv_head * v_bytes;
    for (i64 t = tokens.begin; t < tokens.end; ++t) {
      block.k[t] = from_k + (first_row + t) * k_row_bytes;
      block.v[t] = from_v + (first_row + t) * v_row_bytes;
    }
  }

  // Quantizes the fresh rows of a block as append_kv would have stored them.
  void EncodeFresh(i64 start, Range valid, const BlockRows& block) const {
    const i64 fresh = Max(valid.begin, FirstFresh(start));
    if (fresh >= valid.end) return;
    char* to = buf_.codes.fresh;
    const auto encode = [&](const char** rows, i64 dim) {
      for (i64 t = fresh; t < valid.end; ++t) {
        const char* from = rows[t];
        rows[t] = to;
        for (i64 h = 0; h < num_heads_; ++h, to += QuantizedRowBytes(kInt8Format, dim)) {
          elements_->encode(from + h * dim * elements_->bytes, dim, to);
        }
      }
      for (i64 t = 0; t < valid.begin; ++t) rows[t] = rows[valid.begin];
      for (i64 t = valid.end; t < buf_.tile_kv; ++t) rows[t] = rows[valid.begin];
    };
    encode(block.k, params_.head_dim_qk);
    encode(block.v, params_.head_dim_vo);
  }

  // ---- softmax

  // Turns the scores of rows [first, first + n) of head h, which are rows [score_row, ...) of the
  // buffer, into P; `seen` covers what any of them sees.
  template <class Fetch = NoFetch>
  void Softmax(i64 h, i64 first, i64 n, i64 score_row, i64 start, Range valid, Range seen,
               Fetch&& fetch = {}) {
    seen = Whole(seen);
    const i64 begin = seen.begin / Isa::kWidth * Isa::kWidth, end = RoundUp(seen.end, Isa::kWidth);
    Range visible[kMaxTileRows];
    for (i64 r = 0; r < n; ++r) visible[r] = RowSees(first + r, start, valid);
    float* s = buf_.s + score_row * buf_.tile_kv;
    RowState* states = buf_.states + h * rows_ + first;
    float* alpha = buf_.alpha + score_row;
    const float* scales = buf_.scales + h * rows_ + first;
    LogitRule rule = rule_;
    if (buf_.variant) {
      Transform(h * rows_ + first, n, begin, end, s);
      if (params_.sums_weights) {
        if constexpr (kPairs) {
          return KeepWeights<Isa>(n, begin, end, visible, s, buf_.tile_kv,
                                  reinterpret_cast<Bf16*>(buf_.p + score_row * buf_.p_lanes),
                                  2 * buf_.p_lanes, alpha);
        } else {
          return KeepWeights<Isa>(n, begin, end, visible, s, buf_.tile_kv, s, buf_.tile_kv, alpha);
        }
      }
      if (buf_.variant.scales()) {
        rule = kNaturalRule;
        scales = kNoScales;
      }
    }
    if constexpr (kPairs) {
      SoftmaxTile<Isa>(rule, scales, n, begin, end, visible, s, buf_.tile_kv,
                       reinterpret_cast<Bf16*>(buf_.p + score_row * buf_.p_lanes), 2 * buf_.p_lanes,
                       states, alpha, fetch);
    } else {
      SoftmaxTile<Isa>(rule, scales, n, begin, end, visible, s, buf_.tile_kv, s, buf_.tile_kv,
                       states, alpha, fetch);
    }
  }

  // Loads the scales of keys for `tokens` of the head that begins `offset` bytes into the rows.
  static void LoadKeyScales(const char* const* rows, i64 offset, i64 dim, Range tokens, float* to) {
    for (i64 t = tokens.begin; t < tokens.end; ++t) to[t] = ScaleOfRow(rows[t] + offset, dim);
  }

  // The same for values, applied to P; returns whether all scales are finite and not negative.
  bool LoadValueScales(const char* const* rows, i64 offset, Range tokens) const {
    bool all = true;
    float largest = 0;
    for (i64 t = 0; t < buf_.tile_kv; ++t) {
      float scale = 0;
      if (t >= tokens.begin && t < tokens.end) {
        scale = ScaleOfRow(rows[t] + offset, params_.head_dim_vo);
        if (!IsScale(scale)) {
          scale = 0;
          all = false;
        }
      }
      largest = scale > largest ? scale : largest;
      buf_.codes.value_scales[t] = scale;
      buf_.codes.largest_scales[t] = largest;
    }
    return all;
  }
  static bool IsScale(float scale) { return scale >= 0 && scale < __builtin_inff(); }

  // Softmax for int8 dot products.
  template <class Fetch = NoFetch>
  void WeighTile(i64 h, i64 first, i64 n, i64 score_row, i64 start, Range valid, Range seen,
                 const float* key_scales, Fetch&& fetch = {}) {
    seen = Whole(seen);
    const i64 begin = seen.begin / Isa::kWidth * Isa::kWidth, end = RoundUp(seen.end, Isa::kWidth);
    const i64 at = h * rows_ + first;
    const bool scales = buf_.variant && buf_.variant.scales();
    for (i64 r = 0; r < n; ++r) {
      fetch.Bytes(2 * (end - begin));
      float* s = buf_.s + (score_row + r) * buf_.tile_kv;
      const LogitRule rule = scales ? kNaturalRule : rule_.Scaled(buf_.scales[at + r]);
      WeighRow<Isa, kBias>(
          rule, static_cast<bool>(buf_.variant), [&] { Transform(at + r, 1, begin, end, s); },
          begin, end, RowSees(first + r, start, valid), kBias ? buf_.codes.bias[at + r] : 0,
          key_scales, {buf_.codes.value_scales, buf_.codes.largest_scales, valid.begin}, s,
          reinterpret_cast<char*>(buf_.p + (score_row + r) * buf_.p_lanes), buf_.states + at + r,
          buf_.alpha + score_row + r, buf_.codes.factors + score_row + r);
    }
  }

  // Sets rows of head h that see a value with an invalid scale to NaN.
  JAX_ATTN_KERNEL void SpoilRows(i64 h, const char* const* rows, i64 offset, i64 start,
                                 Range valid) {
    if (buf_.variant) buf_.variant.SetHides(true);
    const bool masks = buf_.variant && buf_.variant.masks();
    for (i64 r = 0; r < rows_; ++r) {
      const Range seen = VisibleTo(buf_.tokens[r], start, valid);
      if (seen.begin >= seen.end) continue;
      const i32* mask =
          masks ? buf_.variant.Mask(h * rows_ + r, seen.begin / Isa::kWidth * Isa::kWidth,
                                    RoundUp(seen.end, Isa::kWidth))
                : nullptr;
      bool spoils = false;
      for (i64 t = seen.begin; t < seen.end; ++t) {
        spoils |= (mask == nullptr || mask[t]) &&
                  !IsScale(ScaleOfRow(rows[t] + offset, params_.head_dim_vo));
      }
      float* o = buf_.o + (h * rows_ + r) * buf_.o_columns;
      for (i64 d = 0; spoils && d < buf_.o_columns; ++d) o[d] = __builtin_nanf("");
    }
  }

  // Finds what rows [first, first + n) see of the block if a variant hides something: from the
  // first to the last key. A row that sees all keys between them needs no mask.
  JAX_ATTN_KERNEL void Narrow(i64 first, i64 n, i64 start, Range valid) {
    narrows_ = false;
    const i32* mask = nullptr;
    Range shown = valid;  // by the mask alone, which rows often share
    bool is_stretch = true;
    for (i64 r = first; r < first + n; ++r) {
      if (r == first || !buf_.variant.MasksAlike(r - 1, r)) {
        mask = buf_.variant.Mask(r, valid.begin / Isa::kWidth * Isa::kWidth,
                                 RoundUp(valid.end, Isa::kWidth));
        shown = Trim(mask, valid);
        is_stretch = ShowsAll(mask, shown);
      }
      Range seen = VisibleTo(buf_.tokens[r], start, valid);
      seen = {Max(seen.begin, shown.begin), Min(seen.end, shown.end)};
      if (seen.begin < seen.end && !is_stretch) seen = Trim(mask, seen);
      buf_.is_stretch[r] = is_stretch || ShowsAll(mask, seen);
      if (seen.begin >= seen.end) seen = {valid.begin, valid.begin};
      buf_.seen[r] = seen;
    }
    narrows_ = true;
  }

  // The range from the first to the last of `tokens` that the mask shows.
  static Range Trim(const i32* mask, Range tokens) {
    constexpr i64 kMany = 16;
    const auto shows_none = [&](i64 t) {
      i32 any = 0;
      for (i64 i = 0; i < kMany; ++i) any |= mask[t + i];
      return any == 0;
    };
    auto [begin, end] = tokens;
    while (begin + kMany <= end && shows_none(begin)) begin += kMany;
    while (begin < end && !mask[begin]) ++begin;
    while (begin + kMany <= end && shows_none(end - kMany)) end -= kMany;
    while (begin < end && !mask[end - 1]) --end;
    return {begin, end};
  }

  static bool ShowsAll(const i32* mask, Range tokens) {
    i32 all = -1;
    for (i64 t = tokens.begin; t < tokens.end; ++t) all &= mask[t];
    return all != 0;
  }

  // Applies the variant to the scores of n rows of the pass.
  JAX_ATTN_KERNEL void Transform(i64 first, i64 n, i64 begin, i64 end, float* s) {
    const float cap = params_.logits_soft_cap;
    for (i64 r = 0; r < n; ++r, s += buf_.tile_kv) {
      const bool masks = buf_.variant.masks() && !(narrows_ && buf_.is_stretch[first + r]);
      if (!masks && buf_.variant.Adds(end)) {
        buf_.variant.Add(first + r, begin, end, s);
        continue;
      }
      if (cap > 0 && buf_.variant.scales()) {
        const float cap_in = rule_.Scaled(buf_.scales[first + r]).cap_in;
        for (i64 j = begin; j < end; j += Isa::kWidth) {
          const auto x = Tanh<Isa>(Isa::Mul(Isa::Set(cap_in), Isa::Load(s + j)));
          Isa::Store(s + j, Isa::Mul(Isa::Set(cap), x));
        }
      }
      buf_.variant.Transform(first + r, begin, end, masks, params_.sums_weights ? 0.0f : kNegInf,
                             s);
    }
  }

  // ---- values

  PanelSource<Isa, kValues> PackedValues() const { return {buf_.v_panels, buf_.v_panel_bytes}; }

  // A register tile: rows [row, row + n) of o and [score_row, ...) of p, which see `seen` of the
  // block.
  struct RowTile {
    i64 row, score_row, n;
    Range seen;
  };

  // o = alpha o + p v for a row tile, the tokens of a unit, and panels [panel, panel + panels) of a
  // source that starts at token `first`. alpha is applied once, with the first token seen.
  template <class Source, class Fetch>
  void AddValues(const RowTile& tile, i64 first, Range tokens, Source source, i64 panel, i64 panels,
                 Fetch& ahead) {
    const Range seen = Whole(tile.seen);
    tokens = Whole(tokens);
    const i64 begin = Max(seen.begin, tokens.begin), end = Min(seen.end, tokens.end);
    if (begin >= end) return;
    const i64 step = begin / kStep, steps = CeilDiv(end, kStep) - step;
    source.Skip(step - first / kStep);
    GemmRows<Isa>(tile.n, buf_.p + tile.score_row * buf_.p_lanes + step, buf_.p_lanes, source,
                  panel, panels, steps, Onto::kOld,
                  seen.begin >= tokens.begin ? buf_.alpha + tile.score_row : nullptr,
                  buf_.o + tile.row * buf_.o_columns + panel * kUnit, buf_.o_columns, ahead);
  }

  bool ValuesAreFinite(i64 first, Range tokens) const {
    const i64 skip = (tokens.begin - first) / kStep;
    return AllFinite<Isa, kValues>(buf_.v_panels + skip * kStepBytes<Isa, kValues>,
                                   buf_.v_panel_bytes, buf_.o_columns / kUnit,
                                   CeilDiv(tokens.end, kStep) - tokens.begin / kStep);
  }

  // The same for one row if a value that some rows do not see is not finite, so that even 0 times
  // it is NaN: the row multiplies only what it sees, in the same order.
  template <class Fetch>
  void AddVisibleValues(const RowTile& row, i64 first, Range tokens, Fetch& ahead) {
    const i64 panels = buf_.o_columns / kUnit;
    if constexpr (kTiled) {
      AddSeenTiles(row, first, tokens, nullptr);
    } else if constexpr (kPairs) {
      AddVisiblePairs(row, first, tokens, panels, ahead);
    } else {
      AddValues(row, first, tokens, PackedValues(), 0, panels, ahead);
    }
  }

  // The same if a variant hides keys from the row: the stretches that it sees, one by one.
  template <class Fetch>
  void AddSeenValues(const RowTile& row, i64 first, Range tokens, Fetch& ahead) {
    const i64 begin = Max(row.seen.begin, tokens.begin), end = Min(row.seen.end, tokens.end);
    if (begin >= end) return;
    if constexpr (kTiled) {
      return AddSeenTiles(
          row, first, tokens,
          buf_.variant.Mask(row.row, begin / Isa::kWidth * Isa::kWidth, RoundUp(end, Isa::kWidth)));
    }
    if (row.seen.begin >= tokens.begin) {  // applies alpha once
      float* o = buf_.o + row.row * buf_.o_columns;
      const auto alpha = Isa::Set(buf_.alpha[row.score_row]);
      for (i64 d = 0; d < buf_.o_columns; d += Isa::kWidth) {
        Isa::Store(o + d, Isa::Mul(alpha, Isa::Load(o + d)));
      }
    }
    buf_.alpha[row.score_row] = 1.0f;  // otherwise each stretch would apply alpha again
    const i32* mask =
        buf_.variant.Mask(row.row, begin / Isa::kWidth * Isa::kWidth, RoundUp(end, Isa::kWidth));
    for (i64 t = begin; t < end;) {
      i64 stop = t;
      while (stop < end && mask[stop]) ++stop;
      if (stop > t) AddVisibleValues({row.row, row.score_row, 1, {t, stop}}, first, tokens, ahead);
      t = stop + 1;
    }
  }

  // Tile by tile of tokens, with zeros for values that the row does not see. mask: for the tokens
  // of row.seen; null: it sees all.
  JAX_ATTN_KERNEL void AddSeenTiles(const RowTile& row, i64 first, Range tokens, const i32* mask) {
    const i64 begin = Max(row.seen.begin, tokens.begin), end = Min(row.seen.end, tokens.end);
    const auto sees = [&](i64 t) { return t >= begin && t < end && (mask == nullptr || mask[t]); };
    NoFetch none;
    for (i64 t = begin / kTileDepth * kTileDepth; t < end; t += kTileDepth) {
      const bool rescale = row.seen.begin >= tokens.begin && t <= begin;
      for (i64 j = 0; j < buf_.o_columns / kUnit; ++j) {
        const float* from = reinterpret_cast<const float*>(
            buf_.v_panels + j * buf_.v_panel_bytes + (t - first) / 2 * kStepBytes<Isa, kValues>);
        alignas(64) float steps[kTileSteps * kUnit];
        for (i64 k = 0; k < kTileSteps; ++k) {
          const uint32_t lanes =
              (sees(t + 2 * k) ? 0x0000ffff : 0) | (sees(t + 2 * k + 1) ? 0xffff0000 : 0);
          for (int v = 0; v < Isa::kVecs; ++v) {
            const i64 at = k * kUnit + v * Isa::kWidth;
            Isa::Store(steps + at, Isa::MaskLanes(Isa::Load(from + at), lanes));
          }
        }
        GemmRows<Isa>(1, buf_.p + row.score_row * buf_.p_lanes + t / 2, buf_.p_lanes,
                      PanelSource<Isa, kValues>{reinterpret_cast<const char*>(steps), 0}, 0, 1,
                      kTileSteps, Onto::kOld, rescale ? buf_.alpha + row.score_row : nullptr,
                      buf_.o + row.row * buf_.o_columns + j * kUnit, buf_.o_columns, none);
      }
    }
  }

  // Pair by pair, because in a pair at the border of `seen` the outer token must not count.
  template <class Fetch>
  void AddVisiblePairs(const RowTile& row, i64 first, Range tokens, i64 panels, Fetch& ahead) {
    const i64 begin = Max(row.seen.begin, tokens.begin), end = Min(row.seen.end, tokens.end);
    for (i64 t = begin / 2 * 2; t < end; t += 2) {
      const uint32_t mask = (t < begin ? 0 : 0x0000ffff) | (t + 1 < end ? 0xffff0000 : 0);
      for (i64 j = 0; j < panels; ++j) {
        const float* from = reinterpret_cast<const float*>(
            buf_.v_panels + j * buf_.v_panel_bytes + (t - first) / 2 * kStepBytes<Isa, kValues>);
        alignas(64) float step[kPanel<Isa>];
        for (int v = 0; v < Isa::kVecs; ++v) {
          Isa::Store(step + v * Isa::kWidth,
                     Isa::MaskLanes(Isa::Load(from + v * Isa::kWidth), mask));
        }
        const bool rescale = row.seen.begin >= tokens.begin && t <= begin;
        GemmRows<Isa>(1, buf_.p + row.score_row * buf_.p_lanes + t / 2, buf_.p_lanes,
                      PanelSource<Isa, kValues>{reinterpret_cast<const char*>(step), 0}, 0, 1, 1,
                      Onto::kOld, rescale ? buf_.alpha + row.score_row : nullptr,
                      buf_.o + row.row * buf_.o_columns + j * kUnit, buf_.o_columns, ahead);
      }
    }
  }

  // ---- results

  void StoreStates() {
    const i64 dim = params_.head_dim_vo;
    for (i64 h = 0; h < num_heads_; ++h) {
      const WorkItem& item = items_[h];
      for (i64 r = 0; r < rows_; ++r) {
        const i64 at = h * rows_ + r;
        float* o = buf_.o + at * buf_.o_columns;
        OrderColumns<Isa, kValues>(o, buf_.o_columns);
        if (item.partial_row < 0) {
          FetchRows(params_.o, dim * ElementBytes(), h, r);
          const i64 token = item_.first_token + buf_.tokens[r], head = Head(h, r);
          if constexpr (kCodes) {
            elements_->store(params_, token, head, buf_.states[at], o);
          } else {
            StoreRow<Isa, T>(params_, token, head, buf_.states[at], o);
          }
        } else {
          params_.partial_states[item.partial_row + r] = buf_.states[at];
          StoreScaled<Isa>(1.0f, o, dim, params_.partial_o + (i64{item.partial_row} + r) * dim);
        }
      }
    }
  }

  const AttentionParams& params_;
  const ElementRows* const elements_;
  const WorkItem* items_;
  const WorkItem item_;  // the first of several heads; WholeOf several tiles
  const i64 num_heads_, num_tiles_;
  const i64 rows_;         // per head
  const Range span_;       // see SpanOf
  bool is_masked_ = true;  // of the block: the element mask may hide something
  const LogitRule rule_;
  Buffers<Isa, T, Kv, kLow> buf_;
  bool narrows_ = false;  // whether buf_.seen is for the current rows and block
};

}  // namespace
}  // namespace jax_attn
