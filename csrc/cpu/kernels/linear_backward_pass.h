// Gradients of linear attention (linear_attention.h). Internal linkage: see kernels.h.
//
// The states before chunks are computed again, then chunks are taken from the last to the first. In
// the words of linear_pass.h, with R = beta (V - exp(G) (K S)), so that V' = (I + A)^-1 R, and dS
// the gradient of the state after the chunk:
//   dV' = exp(G_last - G) (K dS) + (tril(Q K^T * D))^T dO,  dR = (I + A)^-T dV',  dV = beta dR
//   dS <- exp(G_last) dS - K^T (beta exp(G) dR) + Q^T (exp(G) dO)
//   dK  = -beta exp(G) (dR S^T) + exp(G_last - G) (V' dS^T) + a K + a^T K + b^T Q
//   dQ  = exp(G) (dO S^T) + b K,  a = -beta D * tril(dR V'^T, -1),  b = D * tril(dO V'^T)
// The gradient of a decay follows from the same products with k and q.
#pragma once

#include "cpu/kernels/linear_pass.h"
#include "cpu/linear_kernels.h"

namespace jax_attn {
namespace {

template <class Isa, typename T>
class LinearBackward : LinearPass<Isa, T> {
  using Base = LinearPass<Isa, T>;
  using Vec = typename Isa::Vec;
  using Base::At;
  using Base::at_;
  using Base::dim_;
  using Base::kColumns;
  using Base::kRows;
  using Base::kTokens;
  using Base::kVecs;
  using Base::kWidth;
  using Base::p_;
  using Base::row_;
  using Base::task_;

 public:
  static size_t ScratchBytes(const LinearBackwardParams& p, const LinearBackwardTask& task) {
    return More(p, task).size * sizeof(float);
  }

  static void Run(const LinearBackwardParams& p, const LinearBackwardTask& task, void* scratch) {
    LinearBackward pass(p, task, static_cast<float*>(scratch));
    if (p.forward.has_bf16_states) {
      pass.template RunTask<Bf16>();
    } else {
      pass.template RunTask<float>();
    }
  }

 private:
  // Chunks whose states are in memory at a time. Those before are computed twice.
  static constexpr i64 kSegment = 64;

  // More arrays in scratch, behind those of the forward pass.
  struct More {
    i64 state_size;  // f32 of a head
    i64 num_segments;
    i64 borders;                  // [segments, heads, state]: states before segments
    i64 saved, fresh;             // [kSegment, state], [kSegment, panels, kTokens, kColumns]: V'
    i64 d_states;                 // [heads, state]
    i64 d_q, d_k;                 // [kSegment, kTokens, row]: sums of heads
    i64 d_o, d_r, d_m;            // [kTokens, kColumns]
    i64 fresh_t, d_o_t, d_r_t;    // [kColumns, kTokens]
    i64 x_t, y_t, w_t, x, y, w;   // [row, kTokens] and [kTokens, row]: dR S^T, dO S^T, V' dS^T
    i64 d_lower, d_upper, a, b;   // [kTokens, kTokens]
    i64 d_beta, d_sums, d_decay;  // [kTokens]; [kTokens] or [kTokens, row]; [row]
    i64 size;

    More(const LinearBackwardParams& p, const LinearBackwardTask& task) {
      const typename Base::Layout base(p.forward, task.forward);
      i64 at = base.size;
      const auto take = [&](i64 num) {
        const i64 begin = at;
        at += RoundUp(num, kCacheLine / 4);
        return begin;
      };
      const i64 row = RoundUp(p.forward.dim_k, kColumns), rows = kTokens * row;
      const i64 heads = task.forward.end_head - task.forward.begin_head;
      const i64 pieces = Min(kSegment, task.num_pieces);
      state_size = base.panels * p.forward.dim_k * kColumns;
      num_segments = CeilDiv(task.num_pieces, kSegment);
      borders = take(num_segments * heads * state_size);
      saved = take(pieces * state_size);
      fresh = take(pieces * base.panels * kTokens * kColumns);
      d_states = take(heads * state_size);
      d_q = take(pieces * rows);
      d_k = take(pieces * rows);
      i64* const of_columns[] = {&d_o, &d_r, &d_m, &fresh_t, &d_o_t, &d_r_t};
      for (i64* array : of_columns) *array = take(kTokens * kColumns);
      i64* const of_rows[] = {&x_t, &y_t, &w_t, &x, &y, &w};
      for (i64* array : of_rows) *array = take(rows);
      i64* const of_tokens[] = {&d_lower, &d_upper, &a, &b};
      for (i64* array : of_tokens) *array = take(kTokens * kTokens);
      d_beta = take(kTokens);
      d_sums = take(p.forward.has_channel_decay ? rows : kTokens);
      d_decay = take(row);
      size = at;
    }
  };

  LinearBackward(const LinearBackwardParams& p, const LinearBackwardTask& task, float* scratch)
      : Base(p.forward, task.forward, scratch),
        grad_(p),
        pieces_(task.pieces),
        num_pieces_(task.num_pieces),
        more_(p, task) {}

  i64 HeadNumber(i64 head) const { return head - task_.begin_head; }
  float* StateAt(i64 array, i64 number) const { return At(array + number * more_.state_size); }
  float* FreshAt(i64 number, i64 panel) const {
    return At(more_.fresh + (number * at_.panels + panel) * kTokens * kColumns);
  }
  float* RowsAt(i64 array, i64 number) const { return At(array + number * kTokens * row_); }

  template <typename S>
  void RunTask() {
    const i64 heads = task_.end_head - task_.begin_head;
    memset(At(more_.d_states), 0, heads * more_.state_size * sizeof(float));
    this->template ReadStates<S>(task_.chunks[0].read_slot);
    for (i64 segment = 0; segment < more_.num_segments; ++segment) {
      memcpy(StateAt(more_.borders, segment * heads), At(at_.states),
             heads * more_.state_size * sizeof(float));
      if (segment == more_.num_segments - 1) break;
      for (i64 i = segment * kSegment; i < (segment + 1) * kSegment; ++i) {
        const StatePiece& piece = pieces_[i];
        if (piece.num == 0) continue;
        this->LoadTokens(piece.begin, piece.num, kTokens);
        for (i64 head = task_.begin_head; head < task_.end_head; ++head) {
          this->LoadHead(piece.begin, piece.num, kTokens, head);
          for (i64 panel = 0; panel < at_.panels; ++panel)
            Forward(piece, head, panel, At(at_.fresh));
        }
      }
    }
    for (i64 segment = more_.num_segments - 1; segment >= 0; --segment) RunSegment<S>(segment);
    const i64 slot = task_.chunks[0].read_slot;
    if (slot < 0) return;
    for (i64 head = task_.begin_head; head < task_.end_head; ++head) {
      ForRows<S>(slot, head, [&](S* pool, float* own, i64 num) {
        alignas(64) float sum[kColumns];
        this->LoadColumns(pool, num, sum);
        for (i64 j = 0; j < kColumns; ++j) sum[j] += own[j];
        this->StoreColumns(sum, num, pool);
      });
    }
  }

  // V' of a panel of the piece, and the state after it.
  void Forward(const StatePiece& piece, i64 head, i64 panel, float* fresh) {
    this->Fresh(piece.begin, piece.num, kTokens, head, panel, fresh);
    this->Advance(kTokens, this->Panel(head, panel), fresh);
  }

  template <typename S>
  void RunSegment(i64 segment) {
    const i64 heads = task_.end_head - task_.begin_head, first = segment * kSegment;
    const i64 num = Min(kSegment, num_pieces_ - first);
    memset(At(more_.d_q), 0, num * kTokens * row_ * sizeof(float));
    memset(At(more_.d_k), 0, num * kTokens * row_ * sizeof(float));
    for (i64 head = task_.begin_head; head < task_.end_head; ++head) {
      memcpy(this->Panel(head, 0), StateAt(more_.borders, segment * heads + HeadNumber(head)),
             more_.state_size * sizeof(float));
      for (i64 i = 0; i < num; ++i) {
        const StatePiece& piece = pieces_[first + i];
        memcpy(StateAt(more_.saved, i), this->Panel(head, 0), more_.state_size * sizeof(float));
        if (piece.num == 0) continue;
        this->LoadTokens(piece.begin, piece.num, kTokens);
        this->LoadHead(piece.begin, piece.num, kTokens, head);
        for (i64 panel = 0; panel < at_.panels; ++panel)
          Forward(piece, head, panel, FreshAt(i, panel));
      }
      for (i64 i = num - 1; i >= 0; --i) {
        const StatePiece& piece = pieces_[first + i];
        if (piece.write_slot >= 0) TakeGradient<S>(piece.write_slot, head);
        if (piece.num > 0) Backward(piece, i, head);
      }
    }
    for (i64 i = 0; i < num; ++i) {
      for (i64 t = 0; t < pieces_[first + i].num; ++t) {
        const i64 token = pieces_[first + i].begin + t;
        StoreRow(p_.q, p_.scale, token, RowsAt(more_.d_q, i) + t * row_, grad_.d_q);
        StoreRow(p_.k, 1.0f, token, RowsAt(more_.d_k, i) + t * row_, grad_.d_k);
      }
    }
  }

  // Calls fn(columns of the pool of gradients, those of the task's gradient, their number).
  template <typename S, typename Fn>
  void ForRows(i64 slot, i64 head, const Fn& fn) const {
    S* pool = static_cast<S*>(grad_.d_states) + (slot * p_.num_v_heads + head) * dim_ * p_.dim_v;
    float* own = StateAt(more_.d_states, HeadNumber(head));
    for (i64 column = 0; column < p_.dim_v; column += kColumns) {
      for (i64 d = 0; d < dim_; ++d, own += kColumns) {
        fn(pool + d * p_.dim_v + column, own, Min(kColumns, p_.dim_v - column));
      }
    }
  }

  // The gradient of a slot that is written moves to the state that is written there.
  template <typename S>
  void TakeGradient(i64 slot, i64 head) {
    ForRows<S>(slot, head, [&](S* pool, float* own, i64 num) {
      alignas(64) float taken[kColumns];
      this->LoadColumns(pool, num, taken);
      for (i64 j = 0; j < kColumns; ++j) own[j] += taken[j];
      memset(pool, 0, num * sizeof(S));
    });
  }

  using Base::Tile;
  using Base::TransposedTile;

  // to [columns, kTokens] = the transpose of rows [kTokens, columns] that are `stride` apart.
  static void TransposeTokens(const float* rows, i64 stride, i64 columns, float* to) {
    for (i64 t = 0; t < kTokens; t += kWidth) {
      for (i64 c = 0; c < columns; c += kWidth) {
        Vec x[kWidth];
        for (i64 i = 0; i < kWidth; ++i) x[i] = Isa::Load(rows + (t + i) * stride + c);
        Isa::Transpose(x);
        for (i64 i = 0; i < kWidth; ++i) Isa::Store(to + (c + i) * kTokens + t, x[i]);
      }
    }
  }
  static void TransposeBack(const float* from, i64 columns, i64 stride, float* rows) {
    for (i64 t = 0; t < kTokens; t += kWidth) {
      for (i64 c = 0; c < columns; c += kWidth) {
        Vec x[kWidth];
        for (i64 i = 0; i < kWidth; ++i) x[i] = Isa::Load(from + (c + i) * kTokens + t);
        Isa::Transpose(x);
        for (i64 i = 0; i < kWidth; ++i) Isa::Store(rows + (t + i) * stride + c, x[i]);
      }
    }
  }

  void Backward(const StatePiece& piece, i64 number, i64 head) {
    this->LoadTokens(piece.begin, piece.num, kTokens);
    this->LoadHead(piece.begin, piece.num, kTokens, head);
    const i64 sums[] = {more_.x_t, more_.y_t, more_.w_t};
    for (const i64 array : sums) {
      memset(At(array), 0, kTokens * row_ * sizeof(float));
    }
    memset(At(more_.d_lower), 0, kTokens * kTokens * sizeof(float));
    memset(At(more_.d_upper), 0, kTokens * kTokens * sizeof(float));
    memset(At(more_.d_beta), 0, kTokens * sizeof(float));
    memset(At(more_.d_decay), 0, row_ * sizeof(float));
    for (i64 panel = 0; panel < at_.panels; ++panel) BackwardColumns(piece, number, head, panel);
    TransposeBack(At(more_.x_t), row_, row_, At(more_.x));
    TransposeBack(At(more_.y_t), row_, row_, At(more_.y));
    TransposeBack(At(more_.w_t), row_, row_, At(more_.w));
    AmongTokens();
    float *d_q = RowsAt(more_.d_q, number), *d_k = RowsAt(more_.d_k, number);
    if (p_.has_channel_decay) {
      ChannelRows(piece.num, d_q, d_k);
    } else {
      HeadRows(piece.num, d_q, d_k);
    }
    const i64 heads = p_.num_v_heads;
    for (i64 t = 0; t < piece.num; ++t) {
      const i64 at = (piece.begin + t) * heads + head;
      if (grad_.d_beta) grad_.d_beta[at] = At(more_.d_beta)[t];
    }
    if (grad_.d_g) StoreDecays(piece, head);
  }

  // The gradient of G becomes that of g: each g is in all later sums of the chunk.
  void StoreDecays(const StatePiece& piece, i64 head) {
    if (!p_.has_channel_decay) {
      float sum = 0;
      for (i64 t = piece.num - 1; t >= 0; --t) {
        sum += At(more_.d_sums)[t];
        grad_.d_g[(piece.begin + t) * p_.num_v_heads + head] = sum;
      }
      return;
    }
    this->ForChannels([&](i64 d, int lanes) {
      Vec sum = Isa::Zero();
      for (i64 t = piece.num - 1; t >= 0; --t) {
        sum = Isa::Add(sum, Isa::LoadFirst(At(more_.d_sums) + t * row_ + d, lanes));
        float* to = grad_.d_g + ((piece.begin + t) * p_.num_v_heads + head) * dim_ + d;
        Isa::StoreFirst(to, sum, lanes);
      }
    });
  }

  // One panel of columns: d_v, the gradient of the state before the chunk, and the panel's part of
  // everything that is a sum over columns.
  void BackwardColumns(const StatePiece& piece, i64 number, i64 head, i64 panel) {
    const bool by_channel = p_.has_channel_decay;
    const i64 column = panel * kColumns, num_columns = Min(kColumns, p_.dim_v - column);
    const i64 in_state = panel * dim_ * kColumns;
    const float* state = StateAt(more_.saved, number) + in_state;
    float* d_state = StateAt(more_.d_states, HeadNumber(head)) + in_state;
    const float* fresh = FreshAt(number, panel);
    const float *k = At(by_channel ? at_.k_since : at_.k),
                *q = At(by_channel ? at_.q_since : at_.q);
    const float *k_until = At(by_channel ? at_.k_until : at_.k), *beta = At(at_.beta);
    float *d_o = At(more_.d_o), *d_r = At(more_.d_r), *d_m = At(more_.d_m);
    const auto since = [&](i64 t) { return by_channel ? 1.0f : At(at_.since)[t]; };
    const auto until = [&](i64 t) { return by_channel ? 1.0f : At(at_.until)[t]; };
    for (i64 t = 0; t < kTokens; ++t) {
      const T* from = static_cast<const T*>(grad_.d_o) +
                      ((piece.begin + t) * p_.num_v_heads + head) * p_.dim_v + column;
      this->LoadColumns(t < piece.num ? from : nullptr, num_columns, d_o + t * kColumns);
    }
    for (i64 row = 0; row < kTokens; row += kRows) {
      Tile(k_until + row * row_, row_, d_state, kColumns, dim_, Onto::kZero, d_r + row * kColumns,
           kColumns);
      for (i64 t = row; t < row + kRows; ++t)
        Scale(until(t), d_r + t * kColumns, d_r + t * kColumns);
      TransposedTile(At(at_.upper) + row * kTokens + row, kTokens, d_o + row * kColumns, kColumns,
                     kTokens - row, Onto::kOld, nullptr, d_r + row * kColumns, kColumns);
    }
    if (p_.has_delta_rule) SubstituteBack(At(at_.lower), d_r);
    for (i64 t = 0; t < kTokens; ++t) {
      Scale(-beta[t] * since(t), d_r + t * kColumns, d_m + t * kColumns);
      if (t >= piece.num) continue;
      alignas(64) float d_v[kColumns], v[kColumns];
      const i64 at = ((piece.begin + t) * p_.num_v_heads + head) * p_.dim_v + column;
      Scale(beta[t], d_r + t * kColumns, d_v);
      this->StoreColumns(d_v, num_columns, static_cast<T*>(grad_.d_v) + at);
      this->LoadColumns(static_cast<const T*>(p_.v) + at, num_columns, v);
      At(more_.d_beta)[t] += Dot(d_r + t * kColumns, v);
    }
    TransposeTokens(fresh, kColumns, kColumns, At(more_.fresh_t));
    TransposeTokens(d_o, kColumns, kColumns, At(more_.d_o_t));
    if (p_.has_delta_rule) TransposeTokens(d_r, kColumns, kColumns, At(more_.d_r_t));
    for (i64 d = 0; d < dim_; d += kRows) {
      const i64 to = d * kTokens;
      TokenTiles(state + d * kColumns, At(more_.d_o_t), kTokens, At(more_.y_t) + to);
      TokenTiles(d_state + d * kColumns, At(more_.fresh_t), kTokens, At(more_.w_t) + to);
      if (p_.has_delta_rule) {
        TokenTiles(state + d * kColumns, At(more_.d_r_t), kTokens, At(more_.x_t) + to);
      }
    }
    for (i64 row = 0; row < kTokens; row += kRows) {
      const i64 to = row * kTokens;
      TokenTiles(d_o + row * kColumns, At(more_.fresh_t), row + kRows, At(more_.d_upper) + to);
      if (p_.has_delta_rule) {
        TokenTiles(d_r + row * kColumns, At(more_.fresh_t), row + kRows, At(more_.d_lower) + to);
      }
    }
    for (i64 d = 0; d < dim_; ++d) {
      At(more_.d_decay)[d] += Dot(state + d * kColumns, d_state + d * kColumns);
    }
    for (i64 t = 0; t < kTokens; ++t) Scale(since(t), d_o + t * kColumns, d_o + t * kColumns);
    for (i64 d = 0; d < dim_; d += kRows) {
      float* to = d_state + d * kColumns;
      TransposedTile(q + d, row_, d_o, kColumns, kTokens, Onto::kOld, At(at_.decay) + d, to,
                     kColumns);
      if (p_.has_delta_rule) {
        TransposedTile(k + d, row_, d_m, kColumns, kTokens, Onto::kOld, nullptr, to, kColumns);
      }
    }
  }

  // Adds to kRows rows of tokens [0, num): a [kRows, kColumns] times b [kColumns, kTokens].
  static void TokenTiles(const float* a, const float* b, i64 num, float* to) {
    for (i64 t = 0; t < num; t += kColumns) {
      Tile(a, kColumns, b + t, kTokens, kColumns, Onto::kOld, to + t, kTokens);
    }
  }

  static void Scale(float factor, const float* from, float* to) {
    JAX_ATTN_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      Isa::Store(to + v * kWidth, Isa::Mul(Isa::Set(factor), Isa::Load(from + v * kWidth)));
    }
  }
  static float Dot(const float* a, const float* b) {
    Vec sum = Isa::Zero();
    JAX_ATTN_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      sum = Isa::Fma(Isa::Load(a + v * kWidth), Isa::Load(b + v * kWidth), sum);
    }
    return Isa::ReduceAdd(sum);
  }

  // x <- (I - lower)^-T x, from the last row.
  JAX_ATTN_KERNEL static void SubstituteBack(const float* lower, float* x) {
    constexpr int kTile = 4;
    for (i64 row = kTokens - kTile; row >= 0; row -= kTile) {
      Vec sums[kTile][kVecs];
      JAX_ATTN_UNROLL
      for (int r = 0; r < kTile; ++r) {
        JAX_ATTN_UNROLL
        for (int v = 0; v < kVecs; ++v) {
          sums[r][v] = Isa::Load(x + (row + r) * kColumns + v * kWidth);
        }
      }
      const auto add = [&](int r, i64 t, const Vec* later) __attribute__((always_inline)) {
        const Vec factor = Isa::Set(lower[t * kTokens + row + r]);
        JAX_ATTN_UNROLL
        for (int v = 0; v < kVecs; ++v) sums[r][v] = Isa::Fma(factor, later[v], sums[r][v]);
      };
      for (i64 t = row + kTile; t < kTokens; ++t) {
        Vec later[kVecs];
        JAX_ATTN_UNROLL
        for (int v = 0; v < kVecs; ++v) later[v] = Isa::Load(x + t * kColumns + v * kWidth);
        JAX_ATTN_UNROLL
        for (int r = 0; r < kTile; ++r) add(r, t, later);
      }
      JAX_ATTN_UNROLL
      for (int r = kTile - 1; r >= 0; --r) {
        JAX_ATTN_UNROLL
        for (int s = r + 1; s < kTile; ++s) add(r, row + s, sums[s]);
        JAX_ATTN_UNROLL
        for (int v = 0; v < kVecs; ++v) {
          Isa::Store(x + (row + r) * kColumns + v * kWidth, sums[r][v]);
        }
      }
    }
  }

  // a and b from the gradients of products among tokens; their part of d_beta and, with a decay a
  // head, of the gradient of G, which this begins.
  void AmongTokens() {
    const float *of_k = At(at_.products), *of_q = of_k + kTokens * kTokens,
                *decays = At(at_.decays);
    float* d_sums = At(more_.d_sums);
    alignas(64) float columns[kTokens] = {};
    for (i64 row = 0; row < kTokens; ++row) {
      const Vec beta = Isa::Set(-At(at_.beta)[row]);
      Vec of_row = Isa::Zero(), of_beta = Isa::Zero();
      for (i64 t = 0; t < kTokens; t += kWidth) {
        const i64 at = row * kTokens + t;
        if (t > row) {  // of later tokens, whose products may not have been computed
          Isa::Store(At(more_.a) + at, Isa::Zero());
          Isa::Store(At(more_.b) + at, Isa::Zero());
          continue;
        }
        const Vec b = Isa::Mul(Isa::Load(decays + at), Isa::Load(At(more_.d_upper) + at));
        Vec a = Isa::Zero(), change = Isa::Mul(b, Isa::Load(of_q + at));
        if (p_.has_delta_rule) {
          // The inverse has no token's product with itself.
          if (row < t + kWidth) At(more_.d_lower)[row * kTokens + row] = 0;
          const Vec inner = Isa::Mul(Isa::Load(decays + at), Isa::Load(At(more_.d_lower) + at));
          const Vec times_key = Isa::Mul(inner, Isa::Load(of_k + at));
          of_beta = Isa::Sub(of_beta, times_key);
          a = Isa::Mul(beta, inner);
          change = Isa::Fma(beta, times_key, change);
        }
        Isa::Store(At(more_.a) + at, a);
        Isa::Store(At(more_.b) + at, b);
        of_row = Isa::Add(of_row, change);
        Isa::Store(columns + t, Isa::Add(Isa::Load(columns + t), change));
      }
      At(more_.d_beta)[row] += Isa::ReduceAdd(of_beta);
      if (!p_.has_channel_decay) d_sums[row] = Isa::ReduceAdd(of_row);
    }
    if (p_.has_channel_decay) return;
    for (i64 t = 0; t < kTokens; ++t) d_sums[t] -= columns[t];
  }

  float RowDot(const float* a, const float* b) const {
    Vec sum = Isa::Zero();
    for (i64 d = 0; d < row_; d += kWidth) sum = Isa::Fma(Isa::Load(a + d), Isa::Load(b + d), sum);
    return Isa::ReduceAdd(sum);
  }

  void HeadRows(i64 num, float* d_q, float* d_k) {
    const float *since = At(at_.since), *until = At(at_.until), *beta = At(at_.beta);
    float *d_sums = At(more_.d_sums), *d_beta = At(more_.d_beta), last = 0;
    for (i64 t = 0; t < num; ++t) {
      const i64 row = t * row_;
      const float *k = At(at_.k) + row, *q = At(at_.q) + row;
      const float *x = At(more_.x) + row, *y = At(more_.y) + row, *w = At(more_.w) + row;
      const float of_x = since[t] * RowDot(k, x), of_y = since[t] * RowDot(q, y);
      const float of_w = until[t] * RowDot(k, w);
      d_sums[t] += of_y - of_w;
      last += of_w;
      if (p_.has_delta_rule) {
        d_sums[t] -= beta[t] * of_x;
        d_beta[t] -= of_x;
      }
      const Vec by_x = Isa::Set(p_.has_delta_rule ? -beta[t] * since[t] : 0.0f);
      const Vec by_y = Isa::Set(since[t]), by_w = Isa::Set(until[t]);
      for (i64 d = 0; d < row_; d += kWidth) {
        Vec sum = Isa::Fma(by_w, Isa::Load(w + d), Isa::Load(d_k + row + d));
        sum = Isa::Fma(by_x, Isa::Load(x + d), sum);
        Isa::Store(d_k + row + d, sum);
        Isa::Store(d_q + row + d, Isa::Fma(by_y, Isa::Load(y + d), Isa::Load(d_q + row + d)));
      }
    }
    for (i64 d = 0; d < dim_; ++d) last += At(at_.decay)[d] * At(more_.d_decay)[d];
    d_sums[num - 1] += last;
    const float *a = At(more_.a), *b = At(more_.b), *k = At(at_.k), *q = At(at_.q);
    for (i64 row = 0; row < kTokens; row += kRows) {
      for (i64 d = 0; d < row_; d += kColumns) {
        float *of_q = d_q + row * row_ + d, *of_k = d_k + row * row_ + d;
        const i64 here = row * kTokens, down = here + row, rest = kTokens - row;
        Tile(b + here, kTokens, k + d, row_, row + kRows, Onto::kOld, of_q, row_);
        TransposedTile(b + down, kTokens, q + row * row_ + d, row_, rest, Onto::kOld, nullptr, of_k,
                       row_);
        if (!p_.has_delta_rule) continue;
        Tile(a + here, kTokens, k + d, row_, row + kRows, Onto::kOld, of_k, row_);
        TransposedTile(a + down, kTokens, k + row * row_ + d, row_, rest, Onto::kOld, nullptr, of_k,
                       row_);
      }
    }
  }

  void ChannelRows(i64 num, float* d_q, float* d_k) {
    const float *sums = At(at_.sums), *beta = At(at_.beta), *a = At(more_.a), *b = At(more_.b);
    float* d_sums = At(more_.d_sums);
    const i64 end = (num - 1) * row_;
    memset(d_sums, 0, kTokens * row_ * sizeof(float));
    if (p_.has_delta_rule) {
      for (i64 t = 0; t < num; ++t) {
        At(more_.d_beta)[t] -= RowDot(At(at_.k_since) + t * row_, At(more_.x) + t * row_);
      }
    }
    for (i64 d = 0; d < row_; d += kWidth) {
      const auto add = [&](float* to, Vec x) { Isa::Store(to, Isa::Add(Isa::Load(to), x)); };
      const Vec of_end = Isa::Load(sums + end + d);
      Vec last = Isa::Mul(Isa::Load(At(at_.decay) + d), Isa::Load(At(more_.d_decay) + d));
      for (i64 t = 0; t < num; ++t) {
        const i64 at = t * row_ + d;
        const Vec own = Isa::Load(sums + at), k = Isa::Load(At(at_.k) + at),
                  q = Isa::Load(At(at_.q) + at);
        const Vec since = Exp2<Isa>(own), until = Exp2<Isa>(Isa::Sub(of_end, own));
        Vec of_k = Isa::Zero(), of_q = Isa::Mul(since, Isa::Load(At(more_.y) + at));
        if (p_.has_delta_rule) {
          of_k = Isa::Mul(Isa::Set(-beta[t]), Isa::Mul(since, Isa::Load(At(more_.x) + at)));
        }
        const Vec of_w = Isa::Mul(until, Isa::Load(At(more_.w) + at));
        last = Isa::Fma(k, of_w, last);
        for (i64 s = 0; s <= t; ++s) {
          const i64 other = s * row_ + d;
          const Vec decay = Exp2<Isa>(Isa::Sub(own, Isa::Load(sums + other)));
          const Vec key = Isa::Mul(decay, Isa::Load(At(at_.k) + other));
          const Vec by_a = Isa::Set(a[t * kTokens + s]), by_b = Isa::Set(b[t * kTokens + s]);
          of_k = Isa::Fma(by_a, key, of_k);
          of_q = Isa::Fma(by_b, key, of_q);
          const Vec back = Isa::Mul(decay, Isa::Fma(by_a, k, Isa::Mul(by_b, q)));
          add(d_k + other, back);
          const Vec key_back = Isa::Mul(back, Isa::Load(At(at_.k) + other));
          Isa::Store(d_sums + other, Isa::Sub(Isa::Load(d_sums + other), key_back));
        }
        add(d_sums + at, Isa::Sub(Isa::Fma(k, of_k, Isa::Mul(q, of_q)), Isa::Mul(k, of_w)));
        add(d_k + at, Isa::Add(of_k, of_w));
        add(d_q + at, of_q);
      }
      add(d_sums + end + d, last);
    }
  }

  // Stores the gradient of a row of q or k from that of the row as LoadRow gives it.
  void StoreRow(const void* rows, float scale, i64 token, const float* d_row, void* to) const {
    const i64 at = (token * p_.num_qk_heads + task_.qk_head) * dim_;
    const T* from = static_cast<const T*>(rows) + at;
    Vec inner = Isa::Zero(), squares = Isa::Zero();
    this->ForChannels([&](i64 d, int lanes) {
      const Vec x = Isa::LoadFirst(from + d, lanes);
      inner = Isa::Fma(x, Isa::LoadFirst(d_row + d, lanes), inner);
      squares = Isa::Fma(x, x, squares);
    });
    float less = 0;
    if (p_.has_l2_norm) {
      const float sum = Isa::ReduceAdd(squares) + kL2NormEpsilon;
      scale /= sqrtf(sum);
      less = Isa::ReduceAdd(inner) / sum;
    }
    this->ForChannels([&](i64 d, int lanes) {
      Vec x = Isa::LoadFirst(d_row + d, lanes);
      if (p_.has_l2_norm)
        x = Isa::Sub(x, Isa::Mul(Isa::Set(less), Isa::LoadFirst(from + d, lanes)));
      Isa::StoreFirst(static_cast<T*>(to) + at + d, Isa::Mul(Isa::Set(scale), x), lanes);
    });
  }

  const LinearBackwardParams& grad_;
  const StatePiece* pieces_;
  const i64 num_pieces_;
  const More more_;
};

}  // namespace
}  // namespace jax_attn
