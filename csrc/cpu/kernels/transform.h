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

// Neighbouring heads of a token: the first one is kv_head, `offset` bytes into the token's rows.
struct TransformHeads {
  i64 kv_head, num, offset, bytes;
  i64 to_stride;  // elements from the result of one head to that of the next
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

  // Writes the transforms of `tokens` of some heads. rows: of the block's tokens. Prefetches for
  // `bytes` of work a head and token, after each token where it can.
  template <class Fetch>
  void Rows(const char* const* rows, const TransformHeads& heads, i64 start, Range tokens, T* to,
            i64 stride, i64 bytes, Fetch& fetch) {
    for (i64 t = tokens.begin; t < tokens.end; t += kTransformTokens) {
      const i64 end = Min(tokens.end, t + kTransformTokens);
      StartTokens(start, t, end);
      if (c_->rotation.half > 0) {
        Rotate(rows + t, end - t, heads, to, stride, heads.num * bytes, fetch);
      } else {
        for (i64 h = 0; h < heads.num; ++h) {
          RunHead(rows + t, end - t, heads, h, to, stride);
          fetch.Bytes((end - t) * bytes);
        }
      }
      to += (end - t) * stride;
    }
  }

 private:
  struct Source {
    const char* const* rows;
    i64 offset;
  };

  // n tokens of head h of some.
  JAX_ATTN_KERNEL void RunHead(const char* const* rows, i64 n, const TransformHeads& heads, i64 h,
                               T* to, i64 stride) {
    kv_head_ = heads.kv_head + h;
    to += h * heads.to_stride;
    for (i64 first = 0; first < n; first += kTransformRows) {
      const i64 num = Min(kTransformRows, n - first);
      Source source{rows + first, heads.offset + h * heads.bytes};
      for (i32 i = c_->num_token; i < c_->num_lines; ++i) {
        RunLine(c_->lines[i], first, num, &source);
      }
      for (i64 r = 0; r < num; ++r, to += stride) StoreRow(first, r, to);
    }
  }

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
      FindFactors(c_->lines[rotation.lines[which]], rotation.direct[which], end - begin,
                  factors_[which]);
    }
  }

  // The lanes of cos or sin for each of n tokens: in the buffer, or where they are in memory unless
  // the operand has fewer.
  void FindFactors(const TransformCodeLine& x, bool direct, i64 n, const float** to) {
    i32* own = homes_[x.home] + x.at;
    for (i64 t = 0; t < n; ++t) to[t] = reinterpret_cast<const float*>(own + t * x.stride);
    if (!direct) return;
    const VariantOperand& operand = tokens_.params->variant_operands[x.op.operand];
    const i32 last = x.num_args - 1;
    const i64 first = *Lanes(x.args[last], 0, 0), columns = operand.dims[last];
    if (first + x.length > columns) {
      for (i64 t = 0; t < n; ++t) Load(x, 0, t, own + t * x.stride);
      return;
    }
    i64 at[kTransformTokens] = {};
    for (i32 a = 0; a < last; ++a) {
      const i32* index = Lanes(x.args[a], 0, 0);
      const i64 stride = c_->lines[x.args[a].value].stride, length = operand.dims[a];
      for (i64 t = 0; t < n; ++t) at[t] = at[t] * length + Clamp(index[t * stride], length);
    }
    const float* data = static_cast<const float*>(operand.data) + first;
    for (i64 t = 0; t < n; ++t) to[t] = data + at[t] * columns;
  }

  // Rotates n tokens. The heads of a token take its cosines and sines from registers.
  template <class Fetch>
  JAX_ATTN_KERNEL void Rotate(const char* const* rows, i64 n, const TransformHeads& heads, T* to,
                              i64 stride, i64 bytes, Fetch& fetch) const {
    const TransformHeads of = heads;  // keeps it in registers, like the fetch
    Fetch ahead = fetch;
    const i64 half = c_->rotation.half;
    for (i64 t = 0; t < n; ++t, to += stride) {
      ahead.Bytes(bytes);
      RotateToken(rows[t] + of.offset, of, half, factors_[0][t], factors_[1][t], to);
    }
    fetch = ahead;
  }

  JAX_ATTN_INLINE static void RotateToken(const char* row, const TransformHeads& heads, i64 half,
                                          const float* cos, const float* sin, T* to) {
    using Vec = typename Isa::Vec;
    constexpr i64 kWidth = Isa::kWidth;
    // (a, b) becomes the rotated pair.
    const auto rotate = [](Vec c, Vec s, Vec& a, Vec& b) __attribute__((always_inline)) {
      const Vec low = Isa::Sub(Isa::Mul(a, c), Isa::Mul(b, s));
      b = Isa::Fma(b, c, Isa::Mul(a, s));
      a = low;
    };
    i64 d = 0;
    for (; d + 2 * kWidth <= half; d += 2 * kWidth) {
      Vec c[2], s[2];
      Isa::LoadTwo(cos + d, c);
      Isa::LoadTwo(sin + d, s);
      const T* x = reinterpret_cast<const T*>(row) + d;
      T* out = to + d;
      for (i64 h = 0; h < heads.num; ++h) {
        Vec a[2], b[2];
        Isa::LoadTwo(x, a);
        Isa::LoadTwo(x + half, b);
        rotate(c[0], s[0], a[0], b[0]);
        rotate(c[1], s[1], a[1], b[1]);
        Isa::StoreTwo(out, a[0], a[1]);
        Isa::StoreTwo(out + half, b[0], b[1]);
        x += heads.bytes / i64{sizeof(T)};
        out += heads.to_stride;
      }
    }
    for (; d < half; d += kWidth) {
      const Vec c = Isa::Load(cos + d), s = Isa::Load(sin + d);
      const T* x = reinterpret_cast<const T*>(row) + d;
      T* out = to + d;
      for (i64 h = 0; h < heads.num; ++h) {
        Vec a = Isa::Load(x), b = Isa::Load(x + half);
        rotate(c, s, a, b);
        Isa::Store(out, a);
        Isa::Store(out + half, b);
        x += heads.bytes / i64{sizeof(T)};
        out += heads.to_stride;
      }
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
