// Linear attention with recurrent states (linear_attention.h). Internal linkage: see kernels.h.
//
// One or two tokens are the recurrence itself, which reads the state twice and writes it once. More
// are chunks (arXiv 2412.06464, section 3.3) of up to kTokens: with the decays G summed from the
// start of a chunk, D[i, j] = exp(G_i - G_j) for i >= j, and strengths beta,
//   V' = (I + tril(beta K K^T * D, -1))^-1 beta (V - exp(G) (K S)), by forward substitution
//   o  = scale * (exp(G) (Q S) + tril(Q K^T * D) V')
//   S <- exp(G_last) S + K^T (exp(G_last - G) V')
// All of it is independent for each column of V, so a panel of columns, whose state stays in the
// first-level cache, goes through a chunk on its own. Sums are f32. Every element is one chain of
// multiply-adds, so its bits depend neither on the panel nor on other requests.
#pragma once

#include <math.h>

#include "cpu/kernels/gemm.h"
#include "cpu/linear_kernels.h"
#include "cpu/simd/simd_math.h"
#include "cpu/simd/simd_types.h"

namespace jax_attn {
namespace {

template <class Isa, typename T>
class LinearPass {
 protected:
  using Vec = typename Isa::Vec;
  static constexpr i64 kWidth = Isa::kWidth, kColumns = kPanel<Isa>;
  static constexpr int kVecs = Isa::kVecs;
  // Rows of register tiles: they divide head_dim_k and padded chunks, so tiles have no other size.
  static constexpr int kRows = Isa::kRows >= 8 ? 8 : 4;
  static constexpr i64 kTokens = kChunkTokens;
  // Up to so many tokens are recurrences.
  static constexpr i64 kFewTokens = 2;
  // Vectors of columns of a recurrence whose two sums are in registers.
  static constexpr int kWideVecs = Isa::kRows * kVecs >= 24 ? 8 : 4;

 public:
  static size_t ScratchBytes(const LinearParams& p, const LinearTask& task) {
    return Layout(p, task).size * sizeof(float);
  }

  static void Run(const LinearParams& p, const LinearTask& task, void* scratch) {
    if (p.has_bf16_states) {
      LinearPass(p, task, static_cast<float*>(scratch)).template RunTask<Bf16>();
    } else {
      LinearPass(p, task, static_cast<float*>(scratch)).template RunTask<float>();
    }
  }

 protected:
  // f32 offsets of the arrays in scratch. [rows] arrays have one row a token of a chunk.
  struct Layout {
    i64 panels, states;  // [heads, panels, dim_k, kColumns]
    i64 k, q;  // [rows, row], normalized, q with scale; row: dim_k, and zeros up to whole panels
    i64 k_columns;     // [kTokens / kColumns, dim_k, kColumns]: k transposed
    i64 products;      // [2 rows, kTokens]: K K^T and Q K^T; with a decay a channel, times D
    i64 decays;        // [rows, kTokens]: D; with a decay a channel, 1 where D is not 0
    i64 lower, upper;  // [rows, kTokens]: -tril(beta K K^T D, -1), tril(Q K^T D)
    // [kTokens], or with a decay a channel [rows, row]: G in base-2 units, exp(G), exp(G_last - G)
    i64 sums, since, until;
    i64 k_since, q_since, k_until;      // [rows, row]: k and q times these; a decay a channel
    i64 beta, decay, k_first, q_first;  // [kTokens]; [row]
    i64 products_of_state;              // [2 rows, kColumns]: K S and Q S, then o
    i64 fresh, kept;                    // [rows, kColumns]: V', exp(G_last - G) V'
    i64 size;

    Layout(const LinearParams& p, const LinearTask& task) {
      i64 at = 0;
      const auto take = [&](i64 num) {
        const i64 begin = at;
        at += RoundUp(num, kCacheLine / 4);
        return begin;
      };
      const i64 row = RoundUp(p.dim_k, kColumns), rows = kTokens * row;
      panels = CeilDiv(task.end_column - task.begin_column, kColumns);
      states = take((task.end_head - task.begin_head) * panels * p.dim_k * kColumns);
      k = take(rows);
      q = take(rows);
      k_columns = take(rows);
      products = take(2 * kTokens * kTokens);
      decays = take(kTokens * kTokens);
      lower = take(kTokens * kTokens);
      upper = take(kTokens * kTokens);
      const i64 decays = p.has_channel_decay ? rows : kTokens;
      sums = take(decays);
      since = take(decays);
      until = take(decays);
      k_since = take(p.has_channel_decay ? rows : 0);
      q_since = take(p.has_channel_decay ? rows : 0);
      k_until = take(p.has_channel_decay ? rows : 0);
      beta = take(kTokens);
      decay = take(row);
      k_first = take(row);
      q_first = take(row);
      products_of_state = take(2 * kTokens * kColumns);
      fresh = take(kTokens * kColumns);
      kept = take(kTokens * kColumns);
      size = at;
    }
  };

  LinearPass(const LinearParams& p, const LinearTask& task, float* scratch)
      : p_(p),
        task_(task),
        at_(p, task),
        scratch_(scratch),
        dim_(p.dim_k),
        row_(RoundUp(p.dim_k, kColumns)) {}

  float* At(i64 offset) const { return scratch_ + offset; }

  template <typename S>
  void RunTask() {
    const StateChunk& only = task_.chunks[0];
    if (task_.num_chunks == 1 && only.length == 1 && only.read_slot >= 0 && only.write_slot >= 0) {
      return DecodeInPool<S>(only);
    }
    for (i64 i = 0; i < task_.num_chunks; ++i) {
      const StateChunk& chunk = task_.chunks[i];
      if (chunk.is_first) ReadStates<S>(chunk.read_slot);
      const i64 most = p_.has_channel_decay ? kChannelChunkTokens : kChunkTokens;
      for (i64 done = 0; done < chunk.length; done += most) {
        const i64 num = Min(most, chunk.length - done);
        if (num <= kFewTokens) {
          for (i64 t = 0; t < num; ++t) OneToken(chunk.begin + done + t);
        } else {
          ManyTokens(chunk.begin + done, num);
        }
      }
      if (chunk.write_slot >= 0) WriteStates<S>(chunk.write_slot);
    }
  }

  // ---- states -----------------------------------------------------------------------------------

  template <typename S>
  S* StateOf(i64 slot, i64 head) const {
    const i64 dim_v = p_.dim_v;
    return static_cast<S*>(p_.states) + (slot * p_.num_v_heads + head) * dim_ * dim_v;
  }
  float* Panel(i64 head, i64 panel) const {
    const i64 number = (head - task_.begin_head) * at_.panels + panel;
    return At(at_.states) + number * dim_ * kColumns;
  }

  // Calls fn(head, panel, the pool's columns of it, their number).
  template <typename S, typename Fn>
  void ForPanels(i64 slot, const Fn& fn) const {
    for (i64 head = task_.begin_head; head < task_.end_head; ++head) {
      for (i64 panel = 0; panel < at_.panels; ++panel) {
        const i64 column = task_.begin_column + panel * kColumns;
        S* columns = slot < 0 ? nullptr : StateOf<S>(slot, head) + column;
        fn(Panel(head, panel), columns, Min(kColumns, task_.end_column - column));
      }
    }
  }

  template <typename S>
  void ReadStates(i64 slot) {
    ForPanels<S>(slot, [&](float* to, const S* from, i64 num) {
      for (i64 d = 0; d < dim_; ++d)
        LoadColumns(from ? from + d * p_.dim_v : from, num, to + d * kColumns);
    });
  }
  template <typename S>
  void WriteStates(i64 slot) {
    ForPanels<S>(slot, [&](const float* from, S* to, i64 num) {
      for (i64 d = 0; d < dim_; ++d) StoreColumns(from + d * kColumns, num, to + d * p_.dim_v);
    });
  }

  // kColumns columns from num of them, or from none if null; the others are 0.
  template <typename S>
  static void LoadColumns(const S* from, i64 num, float* to) {
    JAX_ATTN_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      const i64 lanes = from ? Min(kWidth, num - v * kWidth) : 0;
      Isa::Store(to + v * kWidth, lanes <= 0
                                      ? Isa::Zero()
                                      : Isa::LoadFirst(from + v * kWidth, static_cast<int>(lanes)));
    }
  }
  template <typename S>
  static void StoreColumns(const float* from, i64 num, S* to) {
    JAX_ATTN_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      const i64 lanes = Min(kWidth, num - v * kWidth);
      if (lanes > 0) {
        Isa::StoreFirst(to + v * kWidth, Isa::Load(from + v * kWidth), static_cast<int>(lanes));
      }
    }
  }

  // ---- rows of tokens ---------------------------------------------------------------------------

  // Calls fn(d, lanes) for vectors of a row of k.
  template <typename Fn>
  JAX_ATTN_INLINE void ForChannels(const Fn& fn) const {
    for (i64 d = 0; d < dim_; d += kWidth) fn(d, static_cast<int>(Min(kWidth, dim_ - d)));
  }

  // A row of q or k: normalized if the call asks for it, times scale.
  void LoadRow(const void* rows, i64 token, float scale, float* to) const {
    const T* from = static_cast<const T*>(rows) + (token * p_.num_qk_heads + task_.qk_head) * dim_;
    if (p_.has_l2_norm) {
      Vec squares = Isa::Zero();
      ForChannels([&](i64 d, int lanes) {
        const Vec x = Isa::LoadFirst(from + d, lanes);
        squares = Isa::Fma(x, x, squares);
      });
      scale /= sqrtf(Isa::ReduceAdd(squares) + kL2NormEpsilon);
    }
    const Vec factor = Isa::Set(scale);
    ForChannels([&](i64 d, int lanes) {
      Isa::StoreFirst(to + d, Isa::Mul(factor, Isa::LoadFirst(from + d, lanes)), lanes);
    });
    memset(to + dim_, 0, (row_ - dim_) * sizeof(float));
  }

  const T* ValuesOf(i64 token, i64 head) const {
    return static_cast<const T*>(p_.v) + (token * p_.num_v_heads + head) * p_.dim_v;
  }
  T* OutputOf(i64 token, i64 head) const {
    return static_cast<T*>(p_.o) + (token * p_.num_v_heads + head) * p_.dim_v;
  }
  float BetaOf(i64 token, i64 head) const {
    return p_.beta ? p_.beta[token * p_.num_v_heads + head] : 1.0f;
  }
  // The log of a token's decay in base-2 units; d: channel.
  static float Log2Of(float g) { return (g < kLowestDecayLog ? kLowestDecayLog : g) * kLog2e; }
  static Vec Log2Of(Vec g) {
    return Isa::Mul(Isa::Max(Isa::Set(kLowestDecayLog), g), Isa::Set(kLog2e));
  }
  const float* ChannelDecaysOf(i64 token, i64 head) const {
    return p_.g + (token * p_.num_v_heads + head) * dim_;
  }

  // ---- the recurrence ---------------------------------------------------------------------------

  // The token's decays, and k and q times these.
  void FirstRows(i64 token, i64 head) {
    float *decay = At(at_.decay), *k = At(at_.k), *q = At(at_.q);
    Vec of_head = Isa::Set(1.0f);
    if (p_.g && !p_.has_channel_decay) {
      of_head = Exp2<Isa>(Isa::Set(Log2Of(p_.g[token * p_.num_v_heads + head])));
    }
    ForChannels([&](i64 d, int lanes) {
      Vec factor = of_head;
      if (p_.has_channel_decay) {
        factor = Exp2<Isa>(Log2Of(Isa::LoadFirst(ChannelDecaysOf(token, head) + d, lanes)));
      }
      Isa::StoreFirst(decay + d, factor, lanes);
      const auto times = [&](const float* x, float* to) {
        Isa::StoreFirst(to + d, Isa::Mul(factor, Isa::LoadFirst(x + d, lanes)), lanes);
      };
      times(k, At(at_.k_first));
      times(q, At(at_.q_first));
    });
  }

  float Dot(const float* a, const float* b) const {
    Vec sum = Isa::Zero();
    ForChannels([&](i64 d, int lanes) {
      sum = Isa::Fma(Isa::LoadFirst(a + d, lanes), Isa::LoadFirst(b + d, lanes), sum);
    });
    return Isa::ReduceAdd(sum);
  }

  void LoadToken(i64 token) {
    LoadRow(p_.k, token, 1.0f, At(at_.k));
    LoadRow(p_.q, token, p_.scale, At(at_.q));
  }

  template <typename S>
  void DecodeInPool(const StateChunk& chunk) {
    LoadToken(chunk.begin);
    const float qk = Dot(At(at_.q), At(at_.k));
    for (i64 head = task_.begin_head; head < task_.end_head; ++head) {
      FirstRows(chunk.begin, head);
      const i64 column = task_.begin_column;
      Recur(chunk.begin, head, qk, column, task_.end_column,
            StateOf<S>(chunk.read_slot, head) + column, StateOf<S>(chunk.write_slot, head) + column,
            p_.dim_v);
    }
  }

  void OneToken(i64 token) {
    LoadToken(token);
    const float qk = Dot(At(at_.q), At(at_.k));
    for (i64 head = task_.begin_head; head < task_.end_head; ++head) {
      FirstRows(token, head);
      for (i64 panel = 0; panel < at_.panels; ++panel) {
        const i64 column = task_.begin_column + panel * kColumns;
        float* state = Panel(head, panel);
        Recur(token, head, qk, column, Min(task_.end_column, column + kColumns), state, state,
              kColumns);
      }
    }
  }

  // One token for columns [begin, end); from and to: those of the state, `stride` apart.
  template <typename S>
  void Recur(i64 token, i64 head, float qk, i64 begin, i64 end, const S* from, S* to, i64 stride) {
    const T* v = ValuesOf(token, head);
    T* o = OutputOf(token, head);
    const float beta = BetaOf(token, head);
    for (i64 j = begin; j < end;) {
      if (j + kWideVecs * kWidth <= end) {
        RecurColumns<S, kWideVecs>(beta, qk, kWidth, v + j, from, to, stride, o + j);
        j += kWideVecs * kWidth, from += kWideVecs * kWidth, to += kWideVecs * kWidth;
      } else {
        const i64 lanes = Min(kWidth, end - j);
        RecurColumns<S, 1>(beta, qk, static_cast<int>(lanes), v + j, from, to, stride, o + j);
        j += lanes, from += lanes, to += lanes;
      }
    }
  }

  template <typename S, int kNum>
  JAX_ATTN_KERNEL void RecurColumns(float beta, float qk, int lanes, const T* v, const S* from,
                                    S* to, i64 stride, T* o) {
    const float *decay = At(at_.decay), *k = At(at_.k);
    const float *k_first = At(at_.k_first), *q_first = At(at_.q_first);
    const auto load = [&](const auto* x, int i) __attribute__((always_inline)) {
      if constexpr (kNum == 1) return Isa::LoadFirst(x, lanes);
      return Isa::Load(x + i * kWidth);
    };
    const auto store = [&](auto* x, int i, Vec y) __attribute__((always_inline)) {
      if constexpr (kNum == 1) {
        Isa::StoreFirst(x, y, lanes);
      } else {
        Isa::Store(x + i * kWidth, y);
      }
    };
    Vec of_k[kNum], of_q[kNum];  // S^T k and S^T q with the decayed state
    JAX_ATTN_UNROLL
    for (int i = 0; i < kNum; ++i) of_k[i] = of_q[i] = Isa::Zero();
    const S* row = from;
    for (i64 d = 0; d < dim_; ++d, row += stride) {
      const Vec key = Isa::Set(k_first[d]), query = Isa::Set(q_first[d]);
      JAX_ATTN_UNROLL
      for (int i = 0; i < kNum; ++i) {
        const Vec s = load(row, i);
        of_k[i] = Isa::Fma(key, s, of_k[i]);
        of_q[i] = Isa::Fma(query, s, of_q[i]);
      }
    }
    JAX_ATTN_UNROLL
    for (int i = 0; i < kNum; ++i) {
      Vec change = load(v, i);
      if (p_.has_delta_rule) change = Isa::Sub(change, of_k[i]);
      change = Isa::Mul(Isa::Set(beta), change);
      store(o, i, Isa::Fma(Isa::Set(qk), change, of_q[i]));
      of_k[i] = change;
    }
    row = from;
    for (i64 d = 0; d < dim_; ++d, row += stride, to += stride) {
      const Vec key = Isa::Set(k[d]), factor = Isa::Set(decay[d]);
      JAX_ATTN_UNROLL
      for (int i = 0; i < kNum; ++i) {
        store(to, i, Isa::Fma(key, of_k[i], Isa::Mul(factor, load(row, i))));
      }
    }
  }

  // ---- chunks -----------------------------------------------------------------------------------

  // Rows of f32 in place, `stride` apart.
  struct Source {
    static constexpr int kParts = 1;
    static constexpr Format kProduct = Format::kF32;
    static constexpr i64 kBytes = kColumns * 4;
    const float* rows;
    i64 stride;

    template <int kPart>
    JAX_ATTN_INLINE void Load(i64 k, i64, Vec* x) const {
      JAX_ATTN_UNROLL
      for (int v = 0; v < kVecs; ++v) x[v] = Isa::Load(rows + k * stride + v * kWidth);
    }
  };

  // c (+)= a b for kRows rows of a and kColumns columns.
  static void Tile(const float* a, i64 lda, const float* b, i64 ldb, i64 steps, Onto onto, float* c,
                   i64 ldc) {
    NoFetch fetch;
    GemmTile<Isa, kRows, 1>(a, lda, Source{b, ldb}, 0, steps, onto, nullptr, c, ldc, fetch);
  }
  // c (+)= a^T b for kRows columns of a, or scale c + a^T b for a scale of each row of c.
  static void TransposedTile(const float* a, i64 lda, const float* b, i64 ldb, i64 steps, Onto onto,
                             const float* scale, float* c, i64 ldc) {
    NoFetch fetch;
    GemmTile<Isa, kRows, 1, 1, true>(a, lda, Source{b, ldb}, 0, steps, onto, scale, c, ldc, fetch);
  }

  void ManyTokens(i64 token, i64 num) {
    const i64 num_rows = RoundUp(num, 8);
    LoadTokens(token, num, num_rows);
    for (i64 head = task_.begin_head; head < task_.end_head; ++head) {
      LoadHead(token, num, num_rows, head);
      for (i64 panel = 0; panel < at_.panels; ++panel) {
        Fresh(token, num, num_rows, head, panel, At(at_.fresh));
        Output(token, num, num_rows, head, panel);
        Advance(num_rows, Panel(head, panel), At(at_.fresh));
      }
    }
  }

  // q and k of a chunk, 0 behind its last token, and their products. num_rows: a multiple of 8.
  void LoadTokens(i64 token, i64 num, i64 num_rows) {
    for (i64 t = 0; t < num; ++t) {
      LoadRow(p_.k, token + t, 1.0f, At(at_.k) + t * row_);
      LoadRow(p_.q, token + t, p_.scale, At(at_.q) + t * row_);
    }
    const i64 padded = RoundUp(num_rows, Max(kWidth, kColumns));
    memset(At(at_.k) + num * row_, 0, (padded - num) * row_ * sizeof(float));
    memset(At(at_.q) + num * row_, 0, (padded - num) * row_ * sizeof(float));
    if (!p_.has_channel_decay) ProductsOfTokens(num_rows, padded);
  }

  // What a chunk computes for a v head without its columns.
  void LoadHead(i64 token, i64 num, i64 num_rows, i64 head) {
    memset(At(at_.beta), 0, kTokens * sizeof(float));
    for (i64 t = 0; t < num; ++t) At(at_.beta)[t] = BetaOf(token + t, head);
    if (p_.has_channel_decay) {
      ChannelDecays(token, num, num_rows, head);
    } else {
      HeadDecays(token, num, num_rows, head);
    }
  }

  // K K^T and Q K^T of the chunk.
  void ProductsOfTokens(i64 num_rows, i64 padded) {
    const float *k = At(at_.k), *q = At(at_.q);
    float* columns = At(at_.k_columns);
    for (i64 t = 0; t < padded; t += kWidth) {
      const char* rows[kWidth];
      for (i64 i = 0; i < kWidth; ++i) rows[i] = reinterpret_cast<const char*>(k + (t + i) * row_);
      float* to = columns + t / kColumns * dim_ * kColumns + t % kColumns;
      ForChannels([&](i64 d, int lanes) {
        Vec out[kWidth];
        Isa::TransposeLoad(rows, d * 4, lanes, out);
        for (int i = 0; i < lanes; ++i) Isa::Store(to + (d + i) * kColumns, out[i]);
      });
    }
    for (i64 row = 0; row < num_rows; row += kRows) {
      for (i64 t = 0; t < Min(padded, row + kRows); t += kColumns) {
        const float* panel = columns + t * dim_;
        float *to = At(at_.products) + row * kTokens + t, *of_q = to + kTokens * kTokens;
        if (p_.has_delta_rule) {
          Tile(k + row * row_, row_, panel, kColumns, dim_, Onto::kZero, to, kTokens);
        }
        Tile(q + row * row_, row_, panel, kColumns, dim_, Onto::kZero, of_q, kTokens);
      }
    }
  }

  void HeadDecays(i64 token, i64 num, i64 num_rows, i64 head) {
    float *sums = At(at_.sums), sum = 0;
    for (i64 t = 0; t < kTokens; ++t) {
      if (p_.g && t < num) sum += Log2Of(p_.g[(token + t) * p_.num_v_heads + head]);
      sums[t] = sum;
    }
    const Vec last = Isa::Set(sum);
    for (i64 t = 0; t < num_rows; t += kWidth) {
      const Vec own = Isa::Load(sums + t);
      Isa::Store(At(at_.since) + t, Exp2<Isa>(own));
      Isa::Store(At(at_.until) + t, Exp2<Isa>(Isa::Sub(last, own)));
    }
    ForChannels(
        [&](i64 d, int lanes) { Isa::StoreFirst(At(at_.decay) + d, Exp2<Isa>(last), lanes); });
    const float* products = At(at_.products);
    for (i64 row = 0; row < num_rows; ++row) {
      const Vec own = Isa::Set(sums[row]), beta = Isa::Set(-At(at_.beta)[row]);
      for (i64 t = 0; t < num_rows; t += kWidth) {
        const i64 at = row * kTokens + t;
        if (t > row) {  // of later tokens, whose products may not have been computed
          Isa::Store(At(at_.decays) + at, Isa::Zero());
          Isa::Store(At(at_.upper) + at, Isa::Zero());
          continue;
        }
        const int live = static_cast<int>(Min(kWidth, row + 1 - t));
        const Vec log = Isa::KeepLanes(Isa::Sub(own, Isa::Load(sums + t)), 0, live);
        const Vec decay = Exp2<Isa>(log);
        Isa::Store(At(at_.decays) + at, decay);
        Isa::Store(At(at_.upper) + at,
                   Isa::Mul(decay, Isa::Load(products + kTokens * kTokens + at)));
        if (!p_.has_delta_rule) continue;
        const Vec key = Isa::Mul(decay, Isa::Load(products + at));
        Isa::Store(At(at_.lower) + at, Isa::Mul(beta, key));
      }
    }
  }

  void ChannelDecays(i64 token, i64 num, i64 num_rows, i64 head) {
    float* sums = At(at_.sums);
    const auto load = [&](i64 array, i64 at) { return Isa::Load(At(array) + at); };
    for (i64 t = 0; t < num_rows; ++t) {
      const float* before = sums + (t - 1) * row_;
      float* own = sums + t * row_;
      for (i64 d = 0; d < row_; d += kWidth) {
        Isa::Store(own + d, t == 0 ? Isa::Zero() : Isa::Load(before + d));
      }
      if (t >= num) continue;
      ForChannels([&](i64 d, int lanes) {
        const Vec log = Log2Of(Isa::LoadFirst(ChannelDecaysOf(token + t, head) + d, lanes));
        Isa::StoreFirst(own + d, Isa::Add(Isa::LoadFirst(own + d, lanes), log), lanes);
      });
    }
    const i64 last = (num_rows - 1) * row_;
    for (i64 d = 0; d < row_; d += kWidth) {
      const Vec end = load(at_.sums, last + d);
      Isa::Store(At(at_.decay) + d, Exp2<Isa>(end));
      for (i64 t = 0; t < num_rows; ++t) {
        const i64 at = t * row_ + d;
        const Vec own = load(at_.sums, at), since = Exp2<Isa>(own);
        const Vec until = Exp2<Isa>(Isa::Sub(end, own));
        Isa::Store(At(at_.k_since) + at, Isa::Mul(load(at_.k, at), since));
        Isa::Store(At(at_.q_since) + at, Isa::Mul(load(at_.q, at), since));
        Isa::Store(At(at_.k_until) + at, Isa::Mul(load(at_.k, at), until));
      }
    }
    const i64 squares[] = {at_.decays, at_.lower, at_.upper, at_.products};
    for (const i64 array : squares) {
      memset(At(array), 0, num_rows * kTokens * sizeof(float));
    }
    float* of_queries = At(at_.products) + kTokens * kTokens;
    memset(of_queries, 0, num_rows * kTokens * sizeof(float));
    for (i64 row = 0; row < num; ++row) {
      for (i64 t = 0; t <= row; ++t) {
        Vec of_k = Isa::Zero(), of_q = Isa::Zero();
        for (i64 d = 0; d < row_; d += kWidth) {
          const i64 own = row * row_ + d, other = t * row_ + d;
          const Vec decay = Exp2<Isa>(Isa::Sub(load(at_.sums, own), load(at_.sums, other)));
          const Vec key = Isa::Mul(decay, load(at_.k, other));
          of_k = Isa::Fma(key, load(at_.k, own), of_k);
          of_q = Isa::Fma(key, load(at_.q, own), of_q);
        }
        const i64 at = row * kTokens + t;
        At(at_.decays)[at] = 1.0f;
        At(at_.products)[at] = Isa::ReduceAdd(of_k);
        At(at_.lower)[at] = -At(at_.beta)[row] * At(at_.products)[at];
        At(at_.upper)[at] = of_queries[at] = Isa::ReduceAdd(of_q);
      }
    }
  }

  // V' of one panel of columns: [num_rows, kColumns].
  void Fresh(i64 token, i64 num, i64 num_rows, i64 head, i64 panel, float* fresh) {
    const bool by_channel = p_.has_channel_decay;
    const float *k = At(by_channel ? at_.k_since : at_.k), *state = Panel(head, panel);
    float* of_k = At(at_.products_of_state);
    for (i64 row = 0; p_.has_delta_rule && row < num_rows; row += kRows) {
      Tile(k + row * row_, row_, state, kColumns, dim_, Onto::kZero, of_k + row * kColumns,
           kColumns);
    }
    const i64 column = task_.begin_column + panel * kColumns;
    const i64 num_columns = Min(kColumns, task_.end_column - column);
    for (i64 t = 0; t < num_rows; ++t) {
      LoadColumns(t < num ? ValuesOf(token + t, head) + column : nullptr, num_columns,
                  fresh + t * kColumns);
      const Vec beta = Isa::Set(At(at_.beta)[t]);
      const Vec since = Isa::Set(by_channel ? 1.0f : At(at_.since)[t]);
      JAX_ATTN_UNROLL
      for (int v = 0; v < kVecs; ++v) {
        const i64 at = t * kColumns + v * kWidth;
        Vec x = Isa::Load(fresh + at);
        if (p_.has_delta_rule) x = Isa::Sub(x, Isa::Mul(since, Isa::Load(of_k + at)));
        Isa::Store(fresh + at, Isa::Mul(beta, x));
      }
    }
    if (p_.has_delta_rule) Substitute(At(at_.lower), num_rows, fresh);
  }

  // o of one panel, from V' in at_.fresh.
  void Output(i64 token, i64 num, i64 num_rows, i64 head, i64 panel) {
    const bool by_channel = p_.has_channel_decay;
    const float* q = At(by_channel ? at_.q_since : at_.q);
    float* o = At(at_.products_of_state) + kTokens * kColumns;
    const i64 column = task_.begin_column + panel * kColumns;
    const i64 num_columns = Min(kColumns, task_.end_column - column);
    for (i64 row = 0; row < num_rows; row += kRows) {
      float* to = o + row * kColumns;
      Tile(q + row * row_, row_, Panel(head, panel), kColumns, dim_, Onto::kZero, to, kColumns);
      ScaleRows(by_channel ? nullptr : At(at_.since) + row, to);
      Tile(At(at_.upper) + row * kTokens, kTokens, At(at_.fresh), kColumns, row + kRows, Onto::kOld,
           to, kColumns);
    }
    for (i64 t = 0; t < num; ++t) {
      StoreColumns(o + t * kColumns, num_columns, OutputOf(token + t, head) + column);
    }
  }

  // kRows rows times a factor each; null: 1.
  static void ScaleRows(const float* factors, float* x) {
    for (i64 t = 0; factors && t < kRows; ++t) {
      const Vec factor = Isa::Set(factors[t]);
      JAX_ATTN_UNROLL
      for (int v = 0; v < kVecs; ++v) {
        const i64 at = t * kColumns + v * kWidth;
        Isa::Store(x + at, Isa::Mul(factor, Isa::Load(x + at)));
      }
    }
  }

  // The state of a panel after the chunk.
  void Advance(i64 num_rows, float* state, const float* fresh) {
    const bool by_channel = p_.has_channel_decay;
    float* kept = At(at_.kept);
    for (i64 t = 0; t < num_rows; ++t) {
      const Vec until = Isa::Set(by_channel ? 1.0f : At(at_.until)[t]);
      JAX_ATTN_UNROLL
      for (int v = 0; v < kVecs; ++v) {
        const i64 at = t * kColumns + v * kWidth;
        Isa::Store(kept + at, Isa::Mul(until, Isa::Load(fresh + at)));
      }
    }
    const float* k = At(by_channel ? at_.k_until : at_.k);
    for (i64 d = 0; d < dim_; d += kRows) {
      TransposedTile(k + d, row_, kept, kColumns, num_rows, Onto::kOld, At(at_.decay) + d,
                     state + d * kColumns, kColumns);
    }
  }

  // x <- (I - lower)^-1 x, row by row.
  JAX_ATTN_KERNEL static void Substitute(const float* lower, i64 num_rows, float* x) {
    constexpr int kTile = 4;
    for (i64 row = 0; row < num_rows; row += kTile) {
      const float* factors = lower + row * kTokens;
      Vec sums[kTile][kVecs];
      JAX_ATTN_UNROLL
      for (int r = 0; r < kTile; ++r) {
        JAX_ATTN_UNROLL
        for (int v = 0; v < kVecs; ++v)
          sums[r][v] = Isa::Load(x + (row + r) * kColumns + v * kWidth);
      }
      for (i64 t = 0; t < row; ++t) {
        Vec past[kVecs];
        JAX_ATTN_UNROLL
        for (int v = 0; v < kVecs; ++v) past[v] = Isa::Load(x + t * kColumns + v * kWidth);
        JAX_ATTN_UNROLL
        for (int r = 0; r < kTile; ++r) {
          const Vec factor = Isa::Set(factors[r * kTokens + t]);
          JAX_ATTN_UNROLL
          for (int v = 0; v < kVecs; ++v) sums[r][v] = Isa::Fma(factor, past[v], sums[r][v]);
        }
      }
      JAX_ATTN_UNROLL
      for (int r = 0; r < kTile; ++r) {
        JAX_ATTN_UNROLL
        for (int s = 0; s < r; ++s) {
          const Vec factor = Isa::Set(factors[r * kTokens + row + s]);
          JAX_ATTN_UNROLL
          for (int v = 0; v < kVecs; ++v) sums[r][v] = Isa::Fma(factor, sums[s][v], sums[r][v]);
        }
        JAX_ATTN_UNROLL
        for (int v = 0; v < kVecs; ++v)
          Isa::Store(x + (row + r) * kColumns + v * kWidth, sums[r][v]);
      }
    }
  }

  const LinearParams& p_;
  const LinearTask& task_;
  const Layout at_;
  float* const scratch_;
  const i64 dim_, row_;
};

}  // namespace
}  // namespace jax_attn
