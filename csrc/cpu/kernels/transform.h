// Runs a transform of keys or values where a pass loads their rows. Internal linkage: see
// kernels.h.
//
// An operation covers kTransformRows rows at once, so that finding it costs little. The result of a
// row does not depend on the rows beside it.
#pragma once

#include "cpu/kernels.h"
#include "cpu/kernels/variant_ops.h"
#include "cpu/transform_code.h"

namespace jax_attn {
namespace {

// The tokens [begin, end) of the block at position `start` of a request.
struct TransformTokens {
  const AttentionParams* params;
  const WorkItem* item;
  i64 start, begin, end;
};

template <class Isa, typename T>
class TransformRun {
 public:
  TransformRun() = default;
  // On a null scratch it only counts bytes.
  TransformRun(const TransformCode* code, char* scratch) : c_(code) {
    if (code == nullptr) return;
    for (int home = kOnceHome; home <= kHeadHome; ++home) {
      homes_[home] = Take<i32>(scratch, code->sizes[home]);
    }
    row_ = Take<float>(scratch, code->dim + Isa::kWidth);
  }

  size_t bytes() const { return bytes_; }
  explicit operator bool() const { return c_ != nullptr; }

  // For a new pass. item: any with the request of the pass.
  void Begin(const AttentionParams& params, const WorkItem& item) {
    tokens_ = {&params, &item, -1, 0, 0};
    for (i32 i = 0; i < c_->num_once; ++i) RunLine(c_->lines[i], 0, 1, nullptr);
  }

  // Writes the transforms of `tokens` of one head, `stride` elements apart. rows: of the block's
  // tokens; the head is at `offset` bytes.
  JAX_ATTN_KERNEL void Rows(const char* const* rows, i64 offset, i64 kv_head, i64 start,
                            Range tokens, T* to, i64 stride) {
    kv_head_ = kv_head;
    for (i64 t = tokens.begin; t < tokens.end; t += kTransformTokens) {
      const i64 end = Min(tokens.end, t + kTransformTokens);
      StartTokens(start, t, end);
      if (c_->rotation.half > 0) {
        for (i64 i = t; i < end; ++i, to += stride) {
          Rotate(reinterpret_cast<const T*>(rows[i] + offset), factors_[0][i - t],
                 factors_[1][i - t], to);
        }
        continue;
      }
      for (i64 first = t; first < end; first += kTransformRows) {
        const i64 n = Min(kTransformRows, end - first);
        Source source{rows + first, offset};
        for (i32 i = c_->num_token; i < c_->num_lines; ++i) {
          RunLine(c_->lines[i], first - t, n, &source);
        }
        for (i64 r = 0; r < n; ++r, to += stride) StoreRow(first - t, r, to);
      }
    }
  }

 private:
  struct Source {
    const char* const* rows;
    i64 offset;
  };

  template <typename U>
  U* Take(char* scratch, i64 count) {
    U* at = reinterpret_cast<U*>(scratch + bytes_);
    bytes_ += static_cast<size_t>(RoundUp(count * i64{sizeof(U)}, kCacheLine));
    return at;
  }

  // Values of kTokenHome: kept from one head to the next.
  void StartTokens(i64 start, i64 begin, i64 end) {
    if (tokens_.start == start && tokens_.begin == begin && tokens_.end == end) return;
    tokens_.start = start;
    tokens_.begin = begin;
    tokens_.end = end;
    const TransformRotation& rotation = c_->rotation;
    for (i32 i = c_->num_once; i < c_->num_token; ++i) {
      const bool is_direct = rotation.half > 0 && ((rotation.direct[0] && rotation.lines[0] == i) ||
                                                   (rotation.direct[1] && rotation.lines[1] == i));
      if (!is_direct) RunLine(c_->lines[i], 0, end - begin, nullptr);
    }
    if (rotation.half == 0) return;
    for (int which = 0; which < 2; ++which) {
      const TransformCodeLine& x = c_->lines[rotation.lines[which]];
      for (i64 r = 0; r < end - begin; ++r) {
        factors_[which][r] = rotation.direct[which] ? RowOfOperand(x, r) : Factors(x, r);
      }
    }
  }

  // The lanes of cos or sin for a token.
  const float* Factors(const TransformCodeLine& x, i64 token) const {
    return reinterpret_cast<const float*>(homes_[x.home] + x.at + token * x.stride);
  }

  // The same where they are in memory; in the buffer if the operand has fewer.
  const float* RowOfOperand(const TransformCodeLine& x, i64 token) {
    const VariantOperand& operand = tokens_.params->variant_operands[x.op.operand];
    const i32 last = x.num_args - 1;
    const i64 first = *Lanes(x.args[last], token, 0);
    if (first + x.length > operand.dims[last]) {
      Load(x, token, 0, homes_[x.home] + x.at + token * x.stride);
      return Factors(x, token);
    }
    i64 at = 0;
    for (i32 a = 0; a < last; ++a) {
      at = at * operand.dims[a] + Clamp(*Lanes(x.args[a], token, 0), operand.dims[a]);
    }
    return static_cast<const float*>(operand.data) + at * operand.dims[last] + first;
  }

  JAX_ATTN_INLINE void Rotate(const T* x, const float* cos, const float* sin, T* to) const {
    using Vec = typename Isa::Vec;
    constexpr i64 kWidth = Isa::kWidth;
    const i64 half = c_->rotation.half;
    const auto rotate = [&](i64 d, Vec* low, Vec* high) __attribute__((always_inline)) {
      const Vec a = Isa::Load(x + d), b = Isa::Load(x + half + d);
      const Vec c = Isa::Load(cos + d), s = Isa::Load(sin + d);
      *low = Isa::Sub(Isa::Mul(a, c), Isa::Mul(b, s));
      *high = Isa::Fma(b, c, Isa::Mul(a, s));
    };
    Vec low[2], high[2];
    i64 d = 0;
    for (; d + 2 * kWidth <= half; d += 2 * kWidth) {
      rotate(d, low, high);
      rotate(d + kWidth, low + 1, high + 1);
      Isa::StoreTwo(to + d, low[0], low[1]);
      Isa::StoreTwo(to + half + d, high[0], high[1]);
    }
    for (; d < half; d += kWidth) {
      rotate(d, low, high);
      Isa::Store(to + d, low[0]);
      Isa::Store(to + half + d, high[0]);
    }
  }

  // The lanes of a value for a row of the tokens, or for a row of the kTransformRows.
  const i32* Lanes(const TransformLanes& lanes, i64 token, i64 row) const {
    const TransformCodeLine& x = c_->lines[lanes.value];
    const i64 r = x.home == kTokenHome ? token + row : row;
    return homes_[x.home] + x.at + lanes.offset + r * x.stride;
  }

  // Computes a line for n rows, of which the first is `token` after tokens_.begin.
  void RunLine(const TransformCodeLine& x, i64 token, i64 n, const Source* source) {
    i32* to = homes_[x.home] + x.at;
    if (x.op.op >= kFirstTransformOp) return RunVector(x, token, n, source, to);
    switch (kVariantOps[x.op.op < kNumVariantOps ? x.op.op : kOpAdd].rule) {
      case kRuleConst:
        *to = x.op.type == kVariantBool ? -x.op.operand : x.op.operand;
        return;
      case kRuleAt:
        return Fact(x.op.op, n, to);
      case kRuleLoad:
        for (i64 r = 0; r < n; ++r, to += x.stride) Load(x, token, r, to);
        return;
      default:
        return Elementwise(x, token, n, to);
    }
  }

  void Fact(i32 op, i64 n, i32* to) const {
    const AttentionParams& params = *tokens_.params;
    const WorkItem& item = *tokens_.item;
    for (i64 r = 0; r < n; ++r) {
      const i64 position = tokens_.start + tokens_.begin + r;
      switch (op) {
        case kOpKvPos:
          to[r] = static_cast<i32>(position);
          break;
        case kOpKvRow:
          to[r] = static_cast<i32>(
              i64{params.page_indices[item.kv_base + position / params.page_size]} *
                  params.page_size +
              position % params.page_size);
          break;
        case kOpKvHead:
          to[r] = static_cast<i32>(kv_head_);
          break;
        case kOpRequest:
          to[r] = item.request;
          break;
        case kOpQLen:
          to[r] = params.qo_indptr[item.request + 1] - params.qo_indptr[item.request];
          break;
        default:
          to[r] = params.kv_lens[item.request];
      }
    }
  }

  void Load(const TransformCodeLine& x, i64 token, i64 row, i32* to) {
    Index indices[kMaxOperandRank];
    for (i32 a = 0; a < x.num_args; ++a) {
      const bool is_iota = c_->lines[x.args[a].value].op.op == kVectorIota;
      indices[a] = {Lanes(x.args[a], token, row), x.args[a].length > 1, is_iota};
    }
    const VariantOperand& operand = tokens_.params->variant_operands[x.op.operand];
    const i32* found = LoadOperand<Isa>(c_->operands[x.op.operand].type, operand, x.num_args,
                                        indices, x.length, &last_[x.op.operand], to);
    if (found != to) memcpy(to, found, static_cast<size_t>(x.length) * sizeof(i32));
  }

  // One call for all rows where lanes follow each other, else one a row.
  void Elementwise(const TransformCodeLine& x, i64 token, i64 n, i32* to) const {
    const bool scalar = x.length == 1;
    const i32* args[3] = {to, to, to};
    i64 strides[3] = {};
    bool together = true;
    int vectors = 0;
    for (i32 a = 0; a < x.num_args; ++a) {
      const TransformCodeLine& of = c_->lines[x.args[a].value];
      args[a] = Lanes(x.args[a], token, 0);
      strides[a] = of.stride;
      const bool same = scalar ? of.length == 1 : x.args[a].length > 1;
      const bool varies = of.stride > 0;
      if (same && varies) vectors |= 1 << a;
      // All rows at once: the argument is one value for all rows, or its lanes lie as the result's.
      const bool one_value = !varies && x.args[a].length == 1;
      together &= one_value || (same && of.stride == x.stride && x.args[a].offset == 0);
    }
    if (together && vectors != 0) {
      const i64 lanes = RoundUp(scalar ? n : n * x.stride, Isa::kWidth);
      return FindFn<Isa>(x.op, vectors)(to, args[0], args[1], args[2], lanes);
    }
    vectors = 0;
    for (i32 a = 0; a < x.num_args; ++a) {
      if (x.args[a].length > 1 || scalar) vectors |= 1 << a;
    }
    const auto fn = FindFn<Isa>(x.op, vectors);
    if (scalar) {  // lanes beyond the first are not read
      alignas(64) i32 result[Isa::kWidth];
      for (i64 r = 0; r < n; ++r) {
        fn(result, args[0] + r * strides[0], args[1] + r * strides[1], args[2] + r * strides[2],
           Isa::kWidth);
        to[r] = result[0];
      }
      return;
    }
    for (i64 r = 0; r < n; ++r, to += x.stride) {
      fn(to, args[0] + r * strides[0], args[1] + r * strides[1], args[2] + r * strides[2],
         RoundUp(x.length, Isa::kWidth));
    }
  }

  void RunVector(const TransformCodeLine& x, i64 token, i64 n, const Source* source, i32* to) {
    switch (x.op.op) {
      case kVectorX:
        for (i64 r = 0; r < n; ++r, to += x.stride) {
          const T* from = reinterpret_cast<const T*>(source->rows[r] + source->offset);
          LoadRow(from + x.op.operand, x.length, reinterpret_cast<float*>(to));
        }
        return;
      case kVectorIota:
        for (i32 i = 0; i < x.length; ++i) to[i] = i;
        return;
      case kVectorTable:
        for (i32 i = 0; i < x.length; ++i) {
          const i32 word = c_->pool[x.op.operand + i];
          to[i] = x.op.type == kVariantBool ? -word : word;
        }
        return;
      case kVectorPick:
        for (i64 r = 0; r < n; ++r, to += x.stride) Pick(x, token, r, to);
        return;
      default:
        for (i64 r = 0; r < n; ++r) {
          const float* from = reinterpret_cast<const float*>(Lanes(x.args[0], token, r));
          reinterpret_cast<float*>(to)[r] = Reduce(x.op.op, from, x.args[0].length);
        }
    }
  }

  void LoadRow(const T* from, i64 n, float* to) const {
    i64 d = 0;
    for (; d + Isa::kWidth <= n; d += Isa::kWidth) Isa::Store(to + d, Isa::Load(from + d));
    for (; d < n; ++d) to[d] = ToF32(from[d]);
  }

  void Pick(const TransformCodeLine& x, i64 token, i64 row, i32* to) const {
    const i32* from[kMaxTransformArgs];
    i32 ends[kMaxTransformArgs], end = 0;
    for (i32 a = 0; a < x.num_args; ++a) {
      from[a] = Lanes(x.args[a], token, row) - end;
      ends[a] = end += x.args[a].length;
    }
    const i32* lanes = c_->pool + x.op.operand;
    if (x.num_args == 1) {
      for (i32 i = 0; i < x.length; ++i) to[i] = from[0][lanes[i]];
      return;
    }
    for (i32 i = 0; i < x.length; ++i) {
      i32 a = 0;
      while (lanes[i] >= ends[a]) ++a;
      to[i] = from[a][lanes[i]];
    }
  }

  // In an order that depends on the number of lanes alone.
  static float Reduce(i32 op, const float* x, i64 n) {
    constexpr i64 kLanes = 16;
    float lanes[kLanes];
    const float none = op == kVectorSum ? 0.0f : *x;
    for (i64 i = 0; i < kLanes; ++i) lanes[i] = none;
    const auto add = [op](float a, float b) {
      if (op == kVectorSum) return a + b;
      if (op == kVectorLargest) return a > b || a != a ? a : b;
      return a < b || a != a ? a : b;
    };
    i64 d = 0;
    for (; d + kLanes <= n; d += kLanes) {
      for (i64 i = 0; i < kLanes; ++i) lanes[i] = add(lanes[i], x[d + i]);
    }
    for (i64 i = 0; d < n; ++d, ++i) lanes[i] = add(lanes[i], x[d]);
    for (i64 half = kLanes / 2; half > 0; half /= 2) {
      for (i64 i = 0; i < half; ++i) lanes[i] = add(lanes[i], lanes[i + half]);
    }
    return lanes[0];
  }

  void StoreRow(i64 token, i64 row, T* to) const {
    const TransformLanes* results = c_->results;
    bool whole = true;
    for (i32 i = 0; i < c_->num_results; ++i) whole &= results[i].length % Isa::kWidth == 0;
    i64 at = 0;
    for (i32 i = 0; i < c_->num_results; ++i) {
      const float* from = reinterpret_cast<const float*>(Lanes(results[i], token, row));
      if (whole) {
        StoreLanes(from, results[i].length, to + at);
      } else {
        memcpy(row_ + at, from, static_cast<size_t>(results[i].length) * sizeof(float));
      }
      at += results[i].length;
    }
    if (!whole) StoreLanes(row_, c_->dim, to);
  }

  // n: a multiple of 8.
  static void StoreLanes(const float* from, i64 n, T* to) {
    i64 d = 0;
    for (; d + 2 * Isa::kWidth <= n; d += 2 * Isa::kWidth) {
      Isa::StoreTwo(to + d, Isa::Load(from + d), Isa::Load(from + d + Isa::kWidth));
    }
    for (; d < n; d += Isa::kWidth) {
      Isa::StoreFirst(to + d, Isa::Load(from + d), static_cast<int>(Min(Isa::kWidth, n - d)));
    }
  }

  const TransformCode* c_ = nullptr;
  size_t bytes_ = 0;
  i32* homes_[3] = {};
  float* row_ = nullptr;
  TransformTokens tokens_ = {};
  i64 kv_head_ = 0;
  intptr_t last_[kMaxVariantOperands] = {};         // see LoadElements
  const float* factors_[2][kTransformTokens] = {};  // of tokens_: cos and sin of a rotation
};

}  // namespace
}  // namespace jax_attn
