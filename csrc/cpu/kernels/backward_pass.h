// The backward pass of one item. Internal linkage: see kernels.h.
//
// FlashAttention-2 (arXiv 2307.08691, Algorithm 2) with rows and keys exchanged: logits are stored
// key by key. For each block of keys, with D = sum(d_o * o) - d_lse of each row:
//   P = exp(logits - lse)        dv += P^T d_o
//   dS = P * (d_o v^T - D)       dk += scale dS^T q        dq += scale dS k
// So q and d_o are transposed, once per item, and a block of keys is only copied.
//
// A variant's program (cpu/kernels/variant.h) needs logits row by row. So rows of logits and of
// d_o v^T are copied to a buffer where their keys are contiguous, and P and dS back, with
//   dS = P * (d_o v^T - D) * d logit / d score
// and without softmax P = logit, dS = d_o v^T * d logit / d score.
//
// Non-finite numbers never enter a matmul. If a row has one in q, d_o, lse or D, its dq becomes
// NaN, and so do dk and dv of each key that it sees. If a key has one in k or v, its dk and dv
// become NaN, and so does dq of each row that sees it. Rows that saw no key, lse = -inf, contribute
// nothing.
#pragma once

#include "cpu/kernels.h"
#include "cpu/kernels/pack.h"
#include "cpu/kernels/reduce.h"
#include "cpu/kernels/softmax.h"
#include "cpu/kernels/variant.h"
#include "cpu/simd/simd_math.h"

namespace jax_attn {
namespace {

// Rows whose logits are in the cache at once: a multiple of every panel.
constexpr i64 kBackwardRows = 128;

// Rows that a variant processes at once: one cache line of each key's logits.
constexpr i64 kTurnedRows = 16;

template <class Isa, typename T>
struct BackwardBuffers {
  static constexpr Format kPacked = kUsesDot<Isa, T, T> ? Format::kDot : Format::kF32;
  static constexpr bool kTiled = kUsesTiles<Isa, T, T>;
  // Depth may be cut at multiples of this: what one step of a tile multiplies.
  static constexpr i64 kCut = kTiled ? kTileDepth : StepDepth(kPacked);

  i64 max_rows, tile_kv;
  i64 token_lanes;           // of a row of pairs of keys; one line more
  i64 k_lanes, v_lanes;      // between rows of k, v; one line more than they have
  i64 k_columns, v_columns;  // whole panels
  i64 q_t_bytes, d_o_t_bytes, row_panel_bytes, key_panel_bytes;  // bytes of one panel

  // Rows of the item.
  const char** q_rows;    // [max_rows] where they are; zeros for rows that do not count
  const char** d_o_rows;  // [max_rows]
  i32* tokens;            // [max_rows] query token of the item
  i64* heads;             // [max_rows] row of lse, and of q in units of head_dim
  float* lse_log2;        // [max_rows] inf for rows that do not count; see far_shift
  float* far_shift;       // [max_rows] scores of a far row are taken relative to it; otherwise 0
  char* is_far;           // [max_rows] 1: BackwardTask::far_rows
  float* d;               // [max_rows]
  char* is_nan;           // [max_rows] 1: it has a number that is not finite
  char* q_t;              // [max_rows / kPanel, q_t_bytes] columns are rows, depth is head_dim_qk;
                          // kTiled: zeros to a multiple of kCut
  char* d_o_t;            // the same for d_o
  char* q;                // [k_columns / kPanel, row_panel_bytes] depth are the rows
  char* d_o;              // [v_columns / kPanel, row_panel_bytes]
  float* d_q;             // [max_rows, k_columns]
  // One block of keys.
  const char** k_rows;  // [tile_kv]
  const char** v_rows;  // [tile_kv]
  i64* kv_rows;         // [tile_kv] row of d_k and d_v
  char* key_is_nan;     // [tile_kv]
  float* k;             // [tile_kv, k_lanes] kTiled: with zeros as q_t
  float* v;             // [tile_kv, v_lanes]
  char* k_panels;       // [k_columns / kPanel, key_panel_bytes] depth are the keys
  float* d_k;           // [tile_kv, k_columns]
  float* d_v;           // [tile_kv, v_columns]
  // Logits of a block and of kBackwardRows rows.
  static constexpr i64 kLogitLanes = kBackwardRows + 16;  // between keys
  float* s;                                               // [tile_kv, kLogitLanes] logits, then P
  float* d_s;                                             // [tile_kv, kLogitLanes]
  float* p_pairs;    // kDot: P in pairs of rows, [tile_kv, kLogitLanes / 2]
  float* d_s_pairs;  // kDot: dS in the same way
  // kDot: dS in pairs of keys, [tile_kv / 2, kLogitLanes]; kTiled: row by row, [kBackwardRows,
  // token_lanes].
  float* d_s_token_pairs;
  char* zeros;  // one row
  // Only with a variant.
  VariantRun<Isa> variant;
  float* ones;      // [max_rows]
  float* scores;    // [kTurnedRows, tile_kv] then P
  float* slopes;    // [kTurnedRows, tile_kv] d_o v^T, then dS
  float* logits;    // [tile_kv] of a row
  float* of_score;  // [tile_kv] d logit / d score
  float* d_logits;  // [tile_kv]
  i32* seen;        // [tile_kv]
  size_t bytes = 0;

  BackwardBuffers(const AttentionParams& p, const CpuGeometry& g, void* scratch)
      : max_rows(RoundUp(g.max_rows, kBackwardRows)),
        tile_kv(g.tile_kv),
        token_lanes(tile_kv / 2 + 16),
        k_lanes(Lanes(kPacked, RoundUp(p.head_dim_qk, kCut)) + 16),
        v_lanes(Lanes(kPacked, RoundUp(p.head_dim_vo, kCut)) + 16),
        k_columns(RoundUp(p.head_dim_qk, kPanel<Isa>)),
        v_columns(RoundUp(p.head_dim_vo, kPanel<Isa>)),
        q_t_bytes(PanelBytes<Isa, kPacked>(RoundUp(p.head_dim_qk, kCut))),
        d_o_t_bytes(PanelBytes<Isa, kPacked>(RoundUp(p.head_dim_vo, kCut))),
        row_panel_bytes(PanelBytes<Isa, kPacked>(max_rows) + kCacheLine),
        key_panel_bytes(PanelBytes<Isa, kPacked>(tile_kv) + kCacheLine) {
    char* base = static_cast<char*>(scratch);
    const i64 row_panels = max_rows / kPanel<Isa>;
    q_rows = Take<const char*>(base, max_rows);
    d_o_rows = Take<const char*>(base, max_rows);
    tokens = Take<i32>(base, max_rows);
    heads = Take<i64>(base, max_rows);
    lse_log2 = Take<float>(base, max_rows);
    far_shift = Take<float>(base, max_rows);
    is_far = Take<char>(base, max_rows);
    d = Take<float>(base, max_rows);
    is_nan = Take<char>(base, max_rows);
    q_t = Take<char>(base, row_panels * q_t_bytes);
    d_o_t = Take<char>(base, row_panels * d_o_t_bytes);
    q = Take<char>(base, k_columns / kPanel<Isa> * row_panel_bytes);
    d_o = Take<char>(base, v_columns / kPanel<Isa> * row_panel_bytes);
    d_q = Take<float>(base, max_rows * k_columns);
    k_rows = Take<const char*>(base, tile_kv);
    v_rows = Take<const char*>(base, tile_kv);
    kv_rows = Take<i64>(base, tile_kv);
    key_is_nan = Take<char>(base, tile_kv);
    k = Take<float>(base, tile_kv * k_lanes);
    v = Take<float>(base, tile_kv * v_lanes);
    k_panels = Take<char>(base, k_columns / kPanel<Isa> * key_panel_bytes);
    d_k = Take<float>(base, tile_kv * k_columns);
    d_v = Take<float>(base, tile_kv * v_columns);
    s = Take<float>(base, tile_kv * kLogitLanes);
    d_s = Take<float>(base, tile_kv * kLogitLanes);
    constexpr bool kPairs = kPacked == Format::kDot;
    p_pairs = kPairs ? Take<float>(base, tile_kv * kLogitLanes / 2) : s;
    d_s_pairs = kPairs ? Take<float>(base, tile_kv * kLogitLanes / 2) : d_s;
    d_s_token_pairs = kTiled   ? Take<float>(base, kBackwardRows * token_lanes)
                      : kPairs ? Take<float>(base, CeilDiv(tile_kv, 2) * kLogitLanes)
                               : d_s;
    zeros = Take<char>(base, 4 * Max(p.head_dim_qk, p.head_dim_vo));
    if (g.code == nullptr) return;
    variant =
        VariantRun<Isa>(g.program, g.code, max_rows, max_rows, p.group_size, tile_kv, base + bytes);
    bytes += variant.bytes();
    ones = Take<float>(base, max_rows);
    scores = Take<float>(base, kTurnedRows * tile_kv);
    slopes = Take<float>(base, kTurnedRows * tile_kv);
    logits = Take<float>(base, tile_kv);
    of_score = Take<float>(base, tile_kv);
    d_logits = Take<float>(base, tile_kv);
    seen = Take<i32>(base, tile_kv);
  }

 private:
  template <typename U>
  U* Take(char* base, i64 count) {
    U* at = reinterpret_cast<U*>(base + bytes);
    bytes += static_cast<size_t>(RoundUp(count * static_cast<i64>(sizeof(U)), kCacheLine));
    return at;
  }
};

// The row of a layer's k and v that holds position `pos` of the item's sequence.
inline i64 KvRow(const AttentionParams& p, const WorkItem& item, i64 pos) {
  if (p.page_size == 0) return item.kv_base + pos;
  return i64{p.page_indices[item.kv_base + pos / p.page_size]} * p.page_size + pos % p.page_size;
}

template <class Isa, typename T>
class BackwardPass {
  using Vec = typename Isa::Vec;
  using Buffers = BackwardBuffers<Isa, T>;
  static constexpr Format kPacked = Buffers::kPacked;
  static constexpr bool kPairs = kPacked == Format::kDot;
  static constexpr bool kTiled = Buffers::kTiled;
  static constexpr i64 kUnit = kPanel<Isa>, kStep = StepDepth(kPacked), kCut = Buffers::kCut;
  static constexpr i64 kSize = sizeof(T), kLanes = Buffers::kLogitLanes;

 public:
  BackwardPass(const BackwardParams& params, const CpuGeometry& g, const BackwardTask& task,
               void* scratch)
      : params_(params),
        p_(params.forward),
        task_(task),
        item_(task.item),
        rows_(i64{task.item.qo_len} * params.forward.group_size),
        span_(SpanOf(params.forward, task.item)),
        key_uses_(task.key_uses),
        rule_(MakeRule(params.forward)),
        buf_(params.forward, g, scratch) {}

  void Run() {
    LoadRows();
    if (task_.finds_sums && !any_far_row_) return;
    for (i64 i = item_.kv_begin / buf_.tile_kv; i * buf_.tile_kv < item_.kv_end; ++i) {
      const i64 entry = p_.steps != nullptr ? p_.steps[i] : 2 * i + 1;  // see WorkItem
      is_masked_ = (entry & 1) != 0;
      AddBlock((entry >> 1) * buf_.tile_kv);
    }
    if (task_.finds_sums) return;
    for (i64 r = 0; r < rows_; ++r) {
      PutRow(buf_.d_q + r * buf_.k_columns, p_.head_dim_qk, task_.row_uses[buf_.tokens[r]],
             task_.d_q, buf_.heads[r] / p_.num_qo_heads, r % p_.group_size);
    }
  }

 private:
  // How a dot product becomes a base-2 logit, and the factor of its gradient.
  struct Rule {
    float scale_log2;        // without a cap
    float cap_in, cap_log2;  // with a cap; otherwise cap_log2 is 0
    float sm_scale;
  };
  static Rule MakeRule(const AttentionParams& p) {
    const float cap = p.logits_soft_cap > 0 ? p.logits_soft_cap : 0.0f;
    const float scale =
        p.sm_scale < 0 ? -Finite(-p.sm_scale * kLog2e) : Finite(p.sm_scale * kLog2e);
    return {scale, cap > 0 ? p.sm_scale / cap : 0.0f, Finite(cap * kLog2e), p.sm_scale};
  }

  // ---- rows

  void LoadRows() {
    const i64 group = p_.group_size, padded = RoundUp(rows_, kBackwardRows);
    const auto q_row = [&](i64 token) { return QueryRow(item_, p_.qo_indices, token); };
    const i64 row_bytes = Max(p_.head_dim_qk, p_.head_dim_vo) * kSize;
    for (i64 i = 0; i < row_bytes; ++i) buf_.zeros[i] = 0;
    any_nan_row_ = any_far_row_ = false;
    for (i64 r = 0; r < padded; ++r) {
      buf_.q_rows[r] = buf_.d_o_rows[r] = buf_.zeros;
      buf_.lse_log2[r] = __builtin_inff();
      buf_.d[r] = 0;
      buf_.far_shift[r] = 0;
      buf_.is_nan[r] = buf_.is_far[r] = 0;
      if (r >= rows_) continue;
      const i64 token = r / group, head = item_.kv_head * group + r % group;
      const i64 at = q_row(token) * p_.num_qo_heads + head;
      buf_.tokens[r] = static_cast<i32>(token);
      buf_.heads[r] = at;
      const float lse = p_.sums_weights ? 0.0f : params_.lse[at];
      const float d = p_.sums_weights ? 0.0f : params_.d[at];
      if (lse == kNegInf) continue;
      const char* q = static_cast<const char*>(p_.q) + at * p_.head_dim_qk * kSize;
      const char* d_o = static_cast<const char*>(params_.d_o) + at * p_.head_dim_vo * kSize;
      FetchRowAhead(reinterpret_cast<const T*>(q), p_.num_qo_heads, p_.head_dim_qk);
      FetchRowAhead(reinterpret_cast<const T*>(d_o), p_.num_qo_heads, p_.head_dim_vo);
      // x - x is 0, or NaN if x is not finite.
      if (lse - lse != 0 || d - d != 0 || !IsFinite(q, p_.head_dim_qk) ||
          !IsFinite(d_o, p_.head_dim_vo)) {
        buf_.is_nan[r] = 1;
        any_nan_row_ = true;
        continue;
      }
      buf_.q_rows[r] = q;
      buf_.d_o_rows[r] = d_o;
      buf_.lse_log2[r] = lse * kLog2e;
      buf_.d[r] = d;
      if (task_.far_rows != nullptr && IsFarLse(lse)) SetFarRow(r, task_.far_rows[at], lse);
    }
    const HeadRows q{buf_.q_rows, 0}, d_o{buf_.d_o_rows, 0};
    NoFetch no_fetch;
    for (i64 u = 0; u < CeilDiv(rows_, kUnit); ++u) {
      const auto pack = [&](const HeadRows& rows, i64 dim, char* panel) {
        PackKeyPanel<Isa, kPacked, T>(rows, u * kUnit, dim, panel);
        ClearSteps<Isa, kPacked>(panel, dim / kStep, RoundUp(dim, kCut) / kStep);
      };
      pack(q, p_.head_dim_qk, buf_.q_t + u * buf_.q_t_bytes);
      pack(d_o, p_.head_dim_vo, buf_.d_o_t + u * buf_.d_o_t_bytes);
    }
    const i64 depth = kTiled ? RoundUp(rows_, kCut) : rows_;
    PackValues<Isa, kPacked, T>(q, 0, 0, depth, p_.head_dim_qk, buf_.row_panel_bytes, buf_.q,
                                no_fetch);
    PackValues<Isa, kPacked, T>(d_o, 0, 0, depth, p_.head_dim_vo, buf_.row_panel_bytes, buf_.d_o,
                                no_fetch);
    Clear(buf_.d_q, rows_ * buf_.k_columns);
    if (buf_.variant) {
      for (i64 r = 0; r < rows_; ++r) buf_.ones[r] = 1.0f;
      buf_.variant.Begin({&p_, &item_, 1, rows_}, p_.sm_scale, buf_.ones, q_row,
                         params_.d_operands);
    }
  }

  // ---- far rows

  // Base-2 logits of one unit of a far row's scores, positive. Without a cap or a variant the score
  // is the dot product, with the sign of sm_scale; otherwise the logit.
  float FarScale() const {
    if (buf_.variant) return kLog2e;
    if (rule_.cap_log2 != 0) return 1.0f;
    return rule_.scale_log2 < 0 ? -rule_.scale_log2 : rule_.scale_log2;
  }
  float FarScore(float product) const {
    if (buf_.variant) return product;  // the logit already
    if (rule_.cap_log2 == 0) return rule_.scale_log2 < 0 ? -product : product;
    return Rounded(rule_.cap_log2 * Isa::First(Tanh<Isa>(Isa::Set(rule_.cap_in * product))));
  }

  void SetFarRow(i64 r, RowSum row, float lse) {
    buf_.is_far[r] = 1;
    any_far_row_ = true;
    if (task_.finds_sums || row.sum == 0) return;
    const bool is_negative = !buf_.variant && rule_.cap_log2 == 0 && rule_.scale_log2 < 0;
    buf_.far_shift[r] = is_negative ? -row.max : row.max;
    buf_.lse_log2[r] = log2f(row.sum);
    // lse may include other keys and a sink. The difference counts where it is more than rounding.
    const float own = row.max * (0.5f * FarScale()) * kLn4 + buf_.lse_log2[r] * kLn2;
    const float more = lse - own, magnitude = lse < 0 ? -lse : lse;
    if (more > 0x1p-20f * magnitude) buf_.lse_log2[r] += more * kLog2e;
  }

  // Adds keys to the sum of far row r. score(i): the i-th score, -inf if the row does not see it.
  template <class Score>
  void AddToFarSum(i64 r, i64 n, const Score& score) {
    RowSum& row = task_.far_rows[buf_.heads[r]];
    const float scale = FarScale();
    float max = row.max;
    for (i64 i = 0; i < n; ++i) max = score(i) > max ? score(i) : max;
    if (max == kNegInf) return;
    float sum = row.max == kNegInf ? 0.0f : row.sum * exp2f((row.max - max) * scale);
    for (i64 i = 0; i < n; ++i) sum += exp2f((score(i) - max) * scale);
    row = {max, sum};
  }

  // Adds the keys `valid` of a block to the sums of far rows among [begin, end), from s.
  JAX_ATTN_KERNEL void FindFarSums(i64 start, Range valid, i64 begin, i64 end) {
    for (i64 r = begin; r < end; ++r) {
      if (!buf_.is_far[r]) continue;
      const Range keys = KeysOf(buf_.tokens[r], start, valid);
      AddToFarSum(r, keys.end - keys.begin,
                  [&](i64 i) { return FarScore(buf_.s[(keys.begin + i) * kLanes + r - begin]); });
    }
  }

  // Whether a row's numbers are finite and it saw a key.
  bool Counts(i64 r) const { return buf_.q_rows[r] != buf_.zeros; }

  static bool IsFinite(const char* row, i64 n) {
    Vec sum = Isa::Zero();
    for (i64 i = 0; i < n; i += Isa::kWidth) {
      const int lanes = static_cast<int>(Min(Isa::kWidth, n - i));
      sum = Isa::Fma(Isa::LoadFirst(reinterpret_cast<const T*>(row) + i, lanes), Isa::Zero(), sum);
    }
    return !Isa::AnyNan(sum);
  }

  static void Clear(float* x, i64 n) {
    for (i64 i = 0; i < n; i += Isa::kWidth) Isa::Store(x + i, Isa::Zero());
  }

  // Adds or writes `from`, part of a sum of n elements, to the sum of row `row`, head `head` of its
  // heads.
  static void PutRow(const float* from, i64 n, uint8_t use, const BackwardRows& to, i64 row,
                     i64 head) {
    float* const sum = to.sums + row * to.sums_stride + head * n;
    T* const result = static_cast<T*>(to.results) + row * to.stride + head * n;
    if (use & kAddsToSum) FetchRowAhead(sum, to.sums_stride / n, n);
    if (use & kEndsSum) FetchRowAhead(result, to.stride / n, n);
    for (i64 i = 0; i < n; i += Isa::kWidth) {
      const int lanes = static_cast<int>(Min(Isa::kWidth, n - i));
      Vec x = Isa::Load(from + i);
      if (use & kAddsToSum) x = Isa::Add(Isa::LoadFirst(sum + i, lanes), x);
      if (use & kEndsSum) {
        Isa::StoreFirst(result + i, x, lanes);
      } else {
        Isa::StoreFirst(sum + i, x, lanes);
      }
    }
  }

  static void Fill(float* row, i64 n, float x) {
    for (i64 i = 0; i < n; ++i) row[i] = x;
  }

  // ---- visibility

  // Keys of the block at `start`, within `valid`, that query token `token` sees.
  Range KeysOf(i64 token, i64 start, Range valid) const {
    const i64 position = item_.q_pos + token - start;
    Range range = valid;
    if (p_.window_left >= 0) range.begin = Max(range.begin, position - p_.window_left);
    if (p_.window_right >= 0) range.end = Min(range.end, position + p_.window_right + 1);
    return range;
  }

  // Rows of the item that see key t of the block at `start`: the inverse of KeysOf.
  Range RowsOf(i64 t, i64 start) const {
    const i64 token = start + t - item_.q_pos;  // the token at the key's position
    Range range = {0, rows_};
    if (p_.window_right >= 0) {
      range.begin = Max(range.begin, (token - p_.window_right) * p_.group_size);
    }
    if (p_.window_left >= 0) {
      range.end = Min(range.end, (token + p_.window_left + 1) * p_.group_size);
    }
    return range;
  }

  // Calls fn(first key, keys, rows of [begin, end) that see any of these keys) for register tiles
  // of the keys of `valid` that any row sees.
  template <typename Fn>
  void ForKeyTiles(i64 start, Range valid, i64 begin, i64 end, Fn&& fn) const {
    const i64 num = valid.end - valid.begin, tiles = CeilDiv(num, Isa::kRows);
    const i64 low = num / tiles, higher = num - tiles * low;
    for (i64 i = 0, t = valid.begin; i < tiles; ++i) {
      const i64 n = low + (i < higher);
      const Range seen{Max(begin, RowsOf(t, start).begin), Min(end, RowsOf(t + n - 1, start).end)};
      if (seen.begin < seen.end) fn(t, n, seen);
      t += n;
    }
  }

  // ---- blocks of keys

  void AddBlock(i64 start) {
    const Range valid{Max(span_.begin - start, 0), Min(span_.end - start, buf_.tile_kv)};
    LoadKeys(start, valid);
    if (buf_.variant) buf_.variant.StartBlock(start, valid, is_masked_);
    bool is_first = true;
    for (i64 begin = 0; begin < rows_; begin += kBackwardRows) {
      const i64 end = Min(rows_, begin + kBackwardRows);
      const Range seen{KeysOf(buf_.tokens[begin], start, valid).begin,
                       KeysOf(buf_.tokens[end - 1], start, valid).end};
      if (seen.begin >= seen.end || HidesAll(begin, end, seen)) continue;
      if (task_.finds_sums) {
        AddTile(start, seen, begin, end, Onto::kZero);
        continue;
      }
      if (is_first) {  // also sets what it sees
        ClearKeys(valid.begin, seen.begin);
        ClearKeys(seen.end, valid.end);
      }
      AddTile(start, seen, begin, end, is_first ? Onto::kZero : Onto::kOld);
      is_first = false;
    }
    if (task_.finds_sums) return;
    if (is_first) ClearKeys(valid.begin, valid.end);
    if (any_nan_row_ || any_nan_key_) SpreadNan(start, valid);
    for (i64 t = valid.begin; t < valid.end; ++t) {
      const uint8_t use = *key_uses_++;
      const i64 row = buf_.kv_rows[t];
      PutRow(buf_.d_k + t * buf_.k_columns, p_.head_dim_qk, use, task_.d_k, row, 0);
      PutRow(buf_.d_v + t * buf_.v_columns, p_.head_dim_vo, use, task_.d_v, row, 0);
    }
  }

  // Whether a variant is known to hide the keys from rows [begin, end).
  bool HidesAll(i64 begin, i64 end, Range keys) {
    if (!buf_.variant) return false;
    const auto share = buf_.variant.Sees(begin, end - 1, keys.begin, keys.end);
    buf_.variant.SetHides(!share.all);
    return share.none;
  }

  void ClearKeys(i64 begin, i64 end) {
    if (begin >= end) return;
    Clear(buf_.d_k + begin * buf_.k_columns, (end - begin) * buf_.k_columns);
    Clear(buf_.d_v + begin * buf_.v_columns, (end - begin) * buf_.v_columns);
  }

  void LoadKeys(i64 start, Range valid) {
    const i64 first = p_.page_size > 0 && p_.layer ? *p_.layer * p_.num_pages * p_.page_size : 0;
    any_nan_key_ = false;
    for (i64 t = valid.begin; t < valid.end; ++t) {
      const i64 row = KvRow(p_, item_, start + t);
      const i64 at = (first + row) * p_.num_kv_heads + item_.kv_head;
      const char* k = static_cast<const char*>(p_.k) + at * p_.head_dim_qk * kSize;
      const char* v = static_cast<const char*>(p_.v) + at * p_.head_dim_vo * kSize;
      FetchRowAhead(reinterpret_cast<const T*>(k), p_.num_kv_heads, p_.head_dim_qk);
      FetchRowAhead(reinterpret_cast<const T*>(v), p_.num_kv_heads, p_.head_dim_vo);
      buf_.kv_rows[t] = row;
      buf_.key_is_nan[t] = !IsFinite(k, p_.head_dim_qk) || !IsFinite(v, p_.head_dim_vo);
      if (buf_.key_is_nan[t]) {
        any_nan_key_ = true;
        k = v = buf_.zeros;
      }
      buf_.k_rows[t] = k;
      buf_.v_rows[t] = v;
      CopyRow(k, p_.head_dim_qk, buf_.k + t * buf_.k_lanes);
      CopyRow(v, p_.head_dim_vo, buf_.v + t * buf_.v_lanes);
    }
    // The partner in a pair at the border; its values have factor 0.
    if (valid.begin > 0) buf_.k_rows[valid.begin - 1] = buf_.zeros;
    if (valid.end < buf_.tile_kv) buf_.k_rows[valid.end] = buf_.zeros;
    NoFetch no_fetch;
    PackValues<Isa, kPacked, T>({buf_.k_rows, 0}, 0, valid.begin, valid.end, p_.head_dim_qk,
                                buf_.key_panel_bytes, buf_.k_panels, no_fetch);
    if constexpr (kTiled) {
      const Range whole = Whole(valid);
      for (i64 j = 0; j < buf_.k_columns / kUnit; ++j) {
        char* panel = buf_.k_panels + j * buf_.key_panel_bytes;
        ClearSteps<Isa, kPacked>(panel, whole.begin / kStep, valid.begin / kStep);
        ClearSteps<Isa, kPacked>(panel, CeilDiv(valid.end, kStep), whole.end / kStep);
      }
    }
  }

  // The depth that a matmul processes to cover depth `range`.
  static Range Whole(Range range) { return {range.begin / kCut * kCut, RoundUp(range.end, kCut)}; }

  // Copies a row as lanes of a matmul: f32, or pairs of bf16 unchanged.
  static void CopyRow(const char* from, i64 n, float* to) {
    for (i64 i = 0; i < n; i += Isa::kWidth) {
      const int lanes = static_cast<int>(Min(Isa::kWidth, n - i));
      const Vec x = Isa::LoadFirst(reinterpret_cast<const T*>(from) + i, lanes);
      if constexpr (kPairs) {
        Isa::StoreFirst(reinterpret_cast<Bf16*>(to) + i, x, lanes);
      } else {
        Isa::StoreFirst(to + i, x, lanes);
      }
    }
    if constexpr (kTiled) {
      for (i64 i = n; i < RoundUp(n, kCut); ++i) reinterpret_cast<Bf16*>(to)[i] = Bf16{0};
    }
  }

  // ---- a block of keys and some rows

  // Adds rows [begin, end) and the keys `valid` of the block, which are the keys that any of these
  // rows sees. Onto: for d_k and d_v.
  void AddTile(i64 start, Range valid, i64 begin, i64 end, Onto onto) {
    NoFetch none;
    const PanelSource<Isa, kPacked> q_t{buf_.q_t, buf_.q_t_bytes};
    const PanelSource<Isa, kPacked> d_o_t{buf_.d_o_t, buf_.d_o_t_bytes};
    for (i64 u = begin / kUnit; u < CeilDiv(end, kUnit); ++u) {
      const auto product = [&](const float* a, i64 lanes, i64 dim,
                               const PanelSource<Isa, kPacked>& b, float* c) {
        ForKeyTiles(start, valid, begin, end, [&](i64 t, i64 n, Range seen) {
          if (seen.begin >= (u + 1) * kUnit || seen.end <= u * kUnit) return;
          GemmRows<Isa>(n, a + t * lanes, lanes, b, u, 1, RoundUp(dim, kCut) / kStep, Onto::kZero,
                        nullptr, c + t * kLanes + u * kUnit - begin, kLanes, none);
        });
      };
      product(buf_.k, buf_.k_lanes, p_.head_dim_qk, q_t, buf_.s);
      if (!task_.finds_sums) product(buf_.v, buf_.v_lanes, p_.head_dim_vo, d_o_t, buf_.d_s);
    }
    if (buf_.variant) {
      VariantWeights(start, valid, begin, end);
    } else if (task_.finds_sums) {
      FindFarSums(start, valid, begin, end);
    }
    if (task_.finds_sums) return;
    for (i64 t = valid.begin / kCut * kCut; t < valid.end; t += kCut) {
      for (i64 i = t; i < t + kCut; ++i) {
        if (any_far_row_) {
          Weights<true>(i, start, valid, begin, end);
        } else {
          Weights<false>(i, start, valid, begin, end);
        }
      }
      if constexpr (kPairs) PairTokens(t, begin, end);
    }
    const i64 step = begin / kStep;
    const auto add_keys = [&](const float* a, const char* rows, i64 columns, float* c) {
      PanelSource<Isa, kPacked> source{rows, buf_.row_panel_bytes};
      for (i64 j = 0; j < columns / kUnit; ++j) {
        ForKeyTiles(start, valid, begin, end, [&](i64 t, i64 n, Range seen) {
          const Range depth = Whole(seen);
          const i64 first = depth.begin / kStep, steps = depth.end / kStep - first;
          PanelSource<Isa, kPacked> from = source;
          from.Skip(first);
          GemmRows<Isa>(n, a + t * kLanes / kStep + first - step, kLanes / kStep, from, j, 1, steps,
                        onto, nullptr, c + t * columns + j * kUnit, columns, none);
        });
      }
    };
    add_keys(buf_.p_pairs, buf_.d_o, buf_.v_columns, buf_.d_v);
    add_keys(buf_.d_s_pairs, buf_.q, buf_.k_columns, buf_.d_k);
    const i64 tiles = CeilDiv(end - begin, Isa::kRows);
    const i64 low = (end - begin) / tiles, higher = end - begin - tiles * low;
    for (i64 j = 0; j < buf_.k_columns / kUnit; ++j) {
      for (i64 i = 0, r = begin; i < tiles; ++i) {
        const i64 n = low + (i < higher);
        const Range seen{KeysOf(buf_.tokens[r], start, valid).begin,
                         KeysOf(buf_.tokens[r + n - 1], start, valid).end};
        if (seen.begin < seen.end) {
          const Range depth = Whole(seen);
          const i64 first = depth.begin / kStep, steps = depth.end / kStep - first;
          PanelSource<Isa, kPacked> from{buf_.k_panels, buf_.key_panel_bytes};
          from.Skip(first);
          const i64 lanes = kTiled ? buf_.token_lanes : kLanes;
          const float* a = buf_.d_s_token_pairs +
                           (kTiled ? (r - begin) * lanes + first : first * lanes + r - begin);
          GemmRows<Isa, Isa::kRows, !kTiled>(n, a, lanes, from, j, 1, steps, Onto::kOld, nullptr,
                                             buf_.d_q + r * buf_.k_columns + j * kUnit,
                                             buf_.k_columns, none);
        }
        r += n;
      }
    }
  }

  // P and dS of the keys `valid` and rows [begin, end), in place of the matmul results; 0 where a
  // row does not see the key.
  JAX_ATTN_KERNEL void VariantWeights(i64 start, Range valid, i64 begin, i64 end) {
    const i64 tile = buf_.tile_kv;
    for (i64 first = begin; first < end; first += kTurnedRows) {
      const i64 n = Min(kTurnedRows, end - first), lane = first - begin;
      Turn<true>(valid, n, buf_.s + lane, buf_.scores);
      Turn<true>(valid, n, buf_.d_s + lane, buf_.slopes);
      for (i64 i = 0; i < n; ++i) {
        WeighRow(first + i, start, valid, buf_.scores + i * tile, buf_.slopes + i * tile);
      }
      for (i64 i = n * tile; i < kTurnedRows * tile; ++i) buf_.scores[i] = buf_.slopes[i] = 0;
      Turn<false>(valid, kTurnedRows, buf_.s + lane, buf_.scores);
      Turn<false>(valid, kTurnedRows, buf_.d_s + lane, buf_.slopes);
    }
  }

  // Copies n rows of a tile, which is stored key by key, to rows of keys, or back.
  template <bool kToRows>
  void Turn(Range keys, i64 n, float* by_key, float* by_row) const {
    for (i64 t = keys.begin; t < keys.end; ++t) {
      for (i64 i = 0; i < n; ++i) {
        float& of_key = by_key[t * kLanes + i];
        float& of_row = by_row[i * buf_.tile_kv + t];
        (kToRows ? of_row : of_key) = kToRows ? of_key : of_row;
      }
    }
  }

  // The same for row r. s: q k of the row and the keys; d_s: d_o v.
  void WeighRow(i64 r, i64 start, Range valid, float* s, float* d_s) {
    using L = VectorOf<Isa>;
    const Range keys = KeysOf(buf_.tokens[r], start, valid);
    const bool is_nan = buf_.is_nan[r] && buf_.variant.has_elements();
    if (task_.finds_sums && !buf_.is_far[r]) return;
    if (keys.begin >= keys.end || !(Counts(r) || is_nan)) {
      for (i64 j = valid.begin; j < valid.end; ++j) s[j] = d_s[j] = 0;
      return;
    }
    const i64 begin = keys.begin / Isa::kWidth * Isa::kWidth, end = RoundUp(keys.end, Isa::kWidth);
    const float cap = p_.logits_soft_cap;
    if (cap > 0) {
      for (i64 j = begin; j < end; j += Isa::kWidth) {
        const Vec x = Tanh<Isa>(Isa::Mul(Isa::Set(rule_.cap_in), Isa::Load(s + j)));
        Isa::Store(s + j, Isa::Mul(Isa::Set(cap), x));
      }
    } else if (!buf_.variant.scales()) {
      for (i64 j = begin; j < end; j += Isa::kWidth) {
        Isa::Store(s + j, Isa::Mul(Isa::Set(rule_.sm_scale), Isa::Load(s + j)));
      }
    }
    buf_.variant.Differentiate(r, begin, end, buf_.variant.masks(), s,
                               {buf_.logits, buf_.of_score, buf_.seen});
    for (i64 j = begin; j < end; ++j) {
      if (j < keys.begin || j >= keys.end) buf_.seen[j] = 0;
    }
    if (task_.finds_sums) {
      return AddToFarSum(r, keys.end - keys.begin, [&](i64 i) {
        return buf_.seen[keys.begin + i] ? buf_.logits[keys.begin + i] : kNegInf;
      });
    }
    const auto where_seen = [&](i64 j, Vec x) __attribute__((always_inline)) {
      return (Vec)(L::Load(buf_.seen + j) & (typename L::Int)x);
    };
    const Vec minus_lse = Isa::Set(-buf_.lse_log2[r]), d = Isa::Set(buf_.d[r]);
    const Vec shift = Isa::Set(buf_.far_shift[r]);
    for (i64 j = begin; j < end; j += Isa::kWidth) {
      const Vec logit = Isa::Load(buf_.logits + j), d_p = Isa::Load(d_s + j);
      Vec p = logit, d_logit = d_p;
      if (!p_.sums_weights) {
        p = Exp2<Isa>(Isa::Fma(Isa::Set(kLog2e), Isa::Sub(logit, shift), minus_lse));
        d_logit = Isa::Mul(p, Isa::Sub(d_p, d));
      }
      if (buf_.is_nan[r]) d_logit = Isa::Set(__builtin_nanf(""));
      Isa::Store(buf_.logits + j, where_seen(j, p));
      Isa::Store(buf_.d_logits + j, where_seen(j, d_logit));
    }
    buf_.variant.AddElements(begin, end, buf_.d_logits);
    for (i64 j = begin; j < end; j += Isa::kWidth) {
      Vec slope = Isa::Mul(Isa::Set(rule_.sm_scale), Isa::Load(buf_.of_score + j));
      if (cap > 0) {
        const Vec x = Isa::Mul(Isa::Set(1 / cap), Isa::Load(s + j));
        slope = Isa::Mul(slope, Isa::Sub(Isa::Set(1.0f), Isa::Mul(x, x)));
      }
      Isa::Store(d_s + j, where_seen(j, Isa::Mul(slope, Isa::Load(buf_.d_logits + j))));
      Isa::Store(s + j, Isa::Load(buf_.logits + j));
    }
    const bool counts = Counts(r);  // otherwise SpreadNan sets the NaNs
    for (i64 j = valid.begin; j < valid.end; ++j) {
      if (!counts || j < begin || j >= end) s[j] = d_s[j] = 0;
    }
  }

  // P and dS of key t and rows [begin, end); 0 where a row does not see the key, and for the rest
  // of the depth up to the next cut. kFar: some rows are far.
  template <bool kFar>
  void Weights(i64 t, i64 start, Range valid, i64 begin, i64 end) {
    const i64 num = RoundUp(end - begin, Isa::kWidth), n = RoundUp(num, kCut);
    float* s = buf_.s + t * kLanes;
    float* d_s = buf_.d_s + t * kLanes;
    Range seen = RowsOf(t, start);
    seen = {Max(0, seen.begin - begin), Min(end, seen.end) - begin};
    if (t < valid.begin || t >= valid.end || seen.begin >= seen.end) seen = {0, 0};
    const auto store = [&](i64 i, Vec p, Vec ds) __attribute__((always_inline)) {
      if constexpr (kPairs) {
        Isa::Store(reinterpret_cast<Bf16*>(buf_.p_pairs + t * kLanes / 2) + i, p);
        Isa::Store(reinterpret_cast<Bf16*>(buf_.d_s_pairs + t * kLanes / 2) + i, ds);
      } else {
        Isa::Store(s + i, p);
        Isa::Store(d_s + i, ds);
      }
    };
    if (buf_.variant) {
      i64 i = 0;
      if (t >= valid.begin && t < valid.end) {
        if constexpr (kPairs) {
          for (; i < num; i += Isa::kWidth) store(i, Isa::Load(s + i), Isa::Load(d_s + i));
        } else {
          i = num;
        }
      }
      for (; i < n; i += Isa::kWidth) store(i, Isa::Zero(), Isa::Zero());
      return;
    }
    const i64 first = seen.begin / Isa::kWidth * Isa::kWidth;
    const i64 last = RoundUp(seen.end, Isa::kWidth);
    for (i64 i = 0; i < first; i += Isa::kWidth) store(i, Isa::Zero(), Isa::Zero());
    const Vec scale = Isa::Set(rule_.sm_scale);
    const auto weigh = [&](i64 i, bool whole) __attribute__((always_inline)) {
      const Vec product = Isa::Load(s + i);
      const Vec minus_lse = Isa::Sub(Isa::Zero(), Isa::Load(buf_.lse_log2 + begin + i));
      const Vec shift = kFar ? Isa::Load(buf_.far_shift + begin + i) : Isa::Zero();
      Vec factor = scale, logit;
      if (rule_.cap_log2 != 0) {
        const Vec x = Tanh<Isa>(Isa::Mul(Isa::Set(rule_.cap_in), product));
        const Vec cap_log2 = Isa::Set(rule_.cap_log2);
        logit = kFar ? Isa::Add(Isa::Sub(Rounded(Isa::Mul(cap_log2, x)), shift), minus_lse)
                     : Isa::Fma(cap_log2, x, minus_lse);
        factor = Isa::Mul(scale, Isa::Sub(Isa::Set(1.0f), Isa::Mul(x, x)));
      } else {
        const Vec score = kFar ? Isa::Sub(product, shift) : product;
        logit = Isa::Fma(Isa::Set(rule_.scale_log2), score, minus_lse);
      }
      if (!whole) {
        logit =
            Isa::KeepLanes(logit, static_cast<int>(seen.begin - i), static_cast<int>(seen.end - i));
      }
      const Vec p = Exp2<Isa>(logit);
      const Vec ds = Isa::Mul(p, Isa::Sub(Isa::Load(d_s + i), Isa::Load(buf_.d + begin + i)));
      store(i, p, Isa::Mul(factor, ds));
    };
    if (first == seen.begin && last == seen.end) {
      for (i64 i = first; i < last; i += Isa::kWidth) weigh(i, true);
    } else {
      for (i64 i = first; i < last; i += Isa::kWidth) weigh(i, false);
    }
    for (i64 i = Max(first, last); i < n; i += Isa::kWidth) store(i, Isa::Zero(), Isa::Zero());
  }

  // Converts dS of keys [t, t + kCut) to pairs.
  void PairTokens(i64 t, i64 begin, i64 end) {
    const auto pair = [&](i64 at, i64 i) __attribute__((always_inline)) {
      const float* keys = buf_.d_s_pairs + at * kLanes / 2;
      return Isa::PairRows(reinterpret_cast<const Bf16*>(keys) + i,
                           reinterpret_cast<const Bf16*>(keys + kLanes / 2) + i, Isa::kWidth);
    };
    for (i64 i = 0; i < end - begin; i += Isa::kWidth) {
      if constexpr (kTiled) {
        for (i64 at = t; at < t + kCut; at += 2 * Isa::kWidth) {
          Vec x[Isa::kWidth];
          JAX_ATTN_UNROLL
          for (int v = 0; v < Isa::kWidth; ++v) x[v] = pair(at + 2 * v, i);
          Isa::Transpose(x);
          JAX_ATTN_UNROLL
          for (int v = 0; v < Isa::kWidth; ++v) {
            Isa::Store(buf_.d_s_token_pairs + (i + v) * buf_.token_lanes + at / 2, x[v]);
          }
        }
      } else {
        Isa::Store(buf_.d_s_token_pairs + t / 2 * kLanes + i, pair(t, i));
      }
    }
  }

  void SpreadNan(i64 start, Range valid) {
    const float nan = __builtin_nanf("");
    constexpr char kSpreads = 2;  // a bit of key_is_nan
    for (i64 r = 0; r < rows_; ++r) {
      const Range keys = KeysOf(buf_.tokens[r], start, valid);
      if (keys.begin >= keys.end || !(buf_.is_nan[r] || Counts(r))) continue;
      const i32* mask = nullptr;
      if (buf_.variant && buf_.variant.has_mask() && is_masked_) {
        mask = buf_.variant.Mask(r, keys.begin / Isa::kWidth * Isa::kWidth,
                                 RoundUp(keys.end, Isa::kWidth));
      }
      bool is_nan = false;
      for (i64 t = keys.begin; t < keys.end; ++t) {
        if (!(buf_.is_nan[r] || (buf_.key_is_nan[t] & 1)) || (mask && !mask[t])) continue;
        is_nan = true;
        buf_.key_is_nan[t] |= kSpreads;
      }
      if (is_nan) Fill(buf_.d_q + r * buf_.k_columns, p_.head_dim_qk, nan);
    }
    for (i64 t = valid.begin; t < valid.end; ++t) {
      if (!(buf_.key_is_nan[t] & kSpreads)) continue;
      Fill(buf_.d_k + t * buf_.k_columns, p_.head_dim_qk, nan);
      Fill(buf_.d_v + t * buf_.v_columns, p_.head_dim_vo, nan);
    }
  }

  const BackwardParams& params_;
  const AttentionParams& p_;
  const BackwardTask& task_;
  const WorkItem& item_;
  const i64 rows_;
  const Range span_;
  const uint8_t* key_uses_;  // for the next key
  const Rule rule_;
  BackwardBuffers<Isa, T> buf_;
  bool is_masked_ = true;  // of the block: the element mask may hide something
  bool any_nan_row_ = false, any_nan_key_ = false, any_far_row_ = false;
};

template <class Isa, typename T>
size_t BackwardScratchBytes(const AttentionParams& params, const CpuGeometry& g) {
  return BackwardBuffers<Isa, T>(params, g, nullptr).bytes;
}

template <class Isa, typename T>
void RunBackward(const BackwardParams& params, const CpuGeometry& g, const BackwardTask& task,
                 void* scratch) {
  BackwardPass<Isa, T>(params, g, task, scratch).Run();
  ReleaseTiles<Isa>();
}

}  // namespace
}  // namespace jax_attn
