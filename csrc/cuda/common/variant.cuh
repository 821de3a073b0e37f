// The parts of a generated variant (jit/variant_source.cc): its operations, what it may ask about a
// logit, and its operands. The meaning is that of variant/program.h, except that f32 functions have
// errors of some 2^-21, like the softmax itself.
#pragma once

#include "cuda/common/work.cuh"

namespace jax_attn {

// A row's bias in a tile: term + slope * (key's offset in the tile).
struct BiasLine {
  float term, slope;
};

// The variant without user functions.
struct NoVariant {
  struct Row {};
  static constexpr bool kHasLogits = false, kHasMask = false;
  static constexpr bool kLogitsFollowKeys = false;  // logits have terms of their keys
  static constexpr bool kNormalizes = true;         // false: softmax weights are the logits, and o
                                                    // is their sum
  static constexpr bool kMayShowAll = false;        // for some ranges of keys the mask is known to
                                                    // show all
  static constexpr bool kIsAffine = true;           // logits are affine in the score; these are the
                                                    // parts
  static constexpr float kFactor = 1.0f;
  static constexpr bool kHasFactor = false, kHasTerm = false, kHasSlope = false, kHasRest = false;
  static constexpr int kNumElements = 0;  // elements of operands that have derivatives
};

// The transform of K or V without one: rows stay as they are.
struct NoTransform {
  static constexpr bool kIsPresent = false;
};

namespace variant {

__device__ __forceinline__ float F32(u32 bits) { return __uint_as_float(bits); }

// --- f32 ---

__device__ __forceinline__ float Neg(float x) { return -x; }
__device__ __forceinline__ float Abs(float x) { return fabsf(x); }
__device__ __forceinline__ float Sign(float x) {
  return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x;  // zeros and NaN as they are
}
__device__ __forceinline__ float Floor(float x) { return floorf(x); }
__device__ __forceinline__ float Ceil(float x) { return ceilf(x); }
__device__ __forceinline__ float Round(float x) { return rintf(x); }
__device__ __forceinline__ float Exp2(float x) { return jax_attn::Exp2(x); }
__device__ __forceinline__ float Exp(float x) { return jax_attn::Exp2(x * kLog2E); }
__device__ __forceinline__ float Log(float x) { return Log2(x) * kLn2; }
__device__ __forceinline__ float Log1p(float x) { return log1pf(x); }
__device__ __forceinline__ float Logistic(float x) {
  return Reciprocal(1.0f + jax_attn::Exp2(x * -kLog2E));
}
// Within 2e-7.
__device__ __forceinline__ float Tanh(float x) {
  return fmaf(-2.0f, Reciprocal(jax_attn::Exp2(x * (2.0f * kLog2E)) + 1.0f), 1.0f);
}
__device__ __forceinline__ float Sqrt(float x) { return sqrtf(x); }
__device__ __forceinline__ float Rsqrt(float x) { return ReciprocalRoot(x); }
__device__ __forceinline__ float Expm1(float x) { return expm1f(x); }
__device__ __forceinline__ float Sin(float x) { return sinf(x); }
__device__ __forceinline__ float Cos(float x) { return cosf(x); }
__device__ __forceinline__ float Erf(float x) { return erff(x); }
__device__ __forceinline__ float Erfc(float x) { return erfcf(x); }
__device__ __forceinline__ float Atan2(float y, float x) { return atan2f(y, x); }
__device__ __forceinline__ float Pow(float x, float y) { return powf(x, y); }
__device__ __forceinline__ float Add(float x, float y) { return x + y; }
__device__ __forceinline__ float Sub(float x, float y) { return x - y; }
__device__ __forceinline__ float Mul(float x, float y) { return x * y; }
__device__ __forceinline__ float Div(float x, float y) { return Quotient(x, y); }
__device__ __forceinline__ float Rem(float x, float y) { return fmodf(x, y); }
// NaN if either is.
__device__ __forceinline__ float Min(float x, float y) { return x != x || x < y ? x : y; }
__device__ __forceinline__ float Max(float x, float y) { return x != x || x > y ? x : y; }

// --- i32, which wraps around ---

__device__ __forceinline__ int Neg(int x) { return static_cast<int>(0u - static_cast<u32>(x)); }
__device__ __forceinline__ int Abs(int x) { return x < 0 ? Neg(x) : x; }
__device__ __forceinline__ int Sign(int x) { return (x > 0) - (x < 0); }
__device__ __forceinline__ int Add(int x, int y) {
  return static_cast<int>(static_cast<u32>(x) + static_cast<u32>(y));
}
__device__ __forceinline__ int Sub(int x, int y) {
  return static_cast<int>(static_cast<u32>(x) - static_cast<u32>(y));
}
__device__ __forceinline__ int Mul(int x, int y) {
  return static_cast<int>(static_cast<u32>(x) * static_cast<u32>(y));
}
__device__ __forceinline__ int Div(int x, int y) { return y == 0 ? -1 : y == -1 ? Neg(x) : x / y; }
__device__ __forceinline__ int Rem(int x, int y) { return y == 0 ? x : y == -1 ? 0 : x % y; }
__device__ __forceinline__ int Min(int x, int y) { return x < y ? x : y; }
__device__ __forceinline__ int Max(int x, int y) { return x > y ? x : y; }
__device__ __forceinline__ int Not(int x) { return ~x; }
__device__ __forceinline__ int And(int x, int y) { return x & y; }
__device__ __forceinline__ int Or(int x, int y) { return x | y; }
__device__ __forceinline__ int Xor(int x, int y) { return x ^ y; }
__device__ __forceinline__ int ShiftLeft(int x, int y) {
  return static_cast<u32>(y) < 32 ? static_cast<int>(static_cast<u32>(x) << y) : 0;
}
__device__ __forceinline__ int ShiftRight(int x, int y) {
  return x >> (static_cast<u32>(y) < 32 ? y : 31);
}
__device__ __forceinline__ int ShiftRightLogical(int x, int y) {
  return static_cast<u32>(y) < 32 ? static_cast<int>(static_cast<u32>(x) >> y) : 0;
}

// --- bool ---

__device__ __forceinline__ bool Not(bool x) { return !x; }
__device__ __forceinline__ bool And(bool x, bool y) { return x && y; }
__device__ __forceinline__ bool Or(bool x, bool y) { return x || y; }
__device__ __forceinline__ bool Xor(bool x, bool y) { return x != y; }

// --- of several types ---

template <class T>
__device__ __forceinline__ bool Eq(T x, T y) {
  return x == y;
}
template <class T>
__device__ __forceinline__ bool Ne(T x, T y) {
  return x != y;
}
template <class T>
__device__ __forceinline__ bool Lt(T x, T y) {
  return x < y;
}
template <class T>
__device__ __forceinline__ bool Le(T x, T y) {
  return x <= y;
}
template <class T>
__device__ __forceinline__ T Select(bool which, T yes, T no) {
  return which ? yes : no;
}
__device__ __forceinline__ float ToFloat(float x) { return x; }
__device__ __forceinline__ float ToFloat(int x) { return static_cast<float>(x); }
__device__ __forceinline__ float ToFloat(bool x) { return x ? 1.0f : 0.0f; }
__device__ __forceinline__ int ToInt(float x) { return SaturatedInt(x); }
__device__ __forceinline__ int ToInt(int x) { return x; }
__device__ __forceinline__ int ToInt(bool x) { return x ? 1 : 0; }
template <class T>
__device__ __forceinline__ bool ToBool(T x) {
  return x != T{0};
}

// --- operands ---

template <int kOperand>
__device__ __forceinline__ int Dim(const AttentionParams& p, int axis) {
  return p.variant_operands[kOperand].dims[axis];
}

// The amount that an index of an axis adds to an element's offset. An index outside counts as the
// nearest one inside. Elements of the last axis, which is less than 2^31 long, lie side by side.
template <int kOperand>
__device__ __forceinline__ int InLastAxis(const AttentionParams& p, int axis, int index) {
  const int length = Dim<kOperand>(p, axis);
  return index < 0 ? 0 : index < length ? index : length - 1;
}
template <int kOperand, int kRank>
__device__ __forceinline__ i64 InAxis(const AttentionParams& p, int axis, int index) {
  i64 offset = InLastAxis<kOperand>(p, axis, index);
#pragma unroll
  for (int a = 1; a < kRank; ++a) {
    if (a > axis) offset *= Dim<kOperand>(p, a);
  }
  return offset;
}

// Loads an element of each OperandType.
struct OfF32 {
  static constexpr int kBytes = 4;
  __device__ static float Load(const void* at) { return __uint_as_float(LoadOperand32(at)); }
};
struct OfBF16 {
  static constexpr int kBytes = 2;
  __device__ static float Load(const void* at) { return __uint_as_float(LoadOperand16(at) << 16); }
};
struct OfF16 {
  static constexpr int kBytes = 2;
  __device__ static float Load(const void* at) {
    return F16ToFloat(static_cast<u16>(LoadOperand16(at)));
  }
};
struct OfI32 {
  static constexpr int kBytes = 4;
  __device__ static int Load(const void* at) { return static_cast<int>(LoadOperand32(at)); }
};
struct OfU8 {
  static constexpr int kBytes = 1;
  __device__ static int Load(const void* at) { return static_cast<int>(LoadOperand8(at)); }
};
struct OfBool {
  static constexpr int kBytes = 1;
  __device__ static bool Load(const void* at) { return LoadOperand8(at) != 0; }
};

template <int kOperand, class Element>
__device__ __forceinline__ const char* Elements(const AttentionParams& p, i64 offset) {
  return static_cast<const char*>(p.variant_operands[kOperand].data) + offset * Element::kBytes;
}
template <class Element>
__device__ __forceinline__ auto Load(const char* elements, i64 offset) {
  return Element::Load(elements + offset * Element::kBytes);
}
template <class Element>
__device__ __forceinline__ auto Load(const char* elements, int offset) {
  return Element::Load(elements + static_cast<i64>(offset) * Element::kBytes);
}

// --- what a program may ask ---

// A field of an item, or of its request. The compiler may read it anywhere and repeatedly.
__device__ __forceinline__ int Field(const i32* field) {
  return static_cast<int>(LoadOperand32(field));
}

// Facts that a program may ask about a row of an item. In a shared item only the head may be asked
// for.
template <class Traits>
class RowFacts {
 public:
  __device__ __forceinline__ RowFacts(const AttentionParams& p, const WorkItem* item, int row)
      : p_(p), item_(item), row_(row) {}

  __device__ int head() const {
    return Field(&item_->kv_head) * Traits::kGroupSize +
           static_cast<int>(row_ % Traits::kGroupSize);
  }
  __device__ int kv_head() const { return Traits::kIsMla ? 0 : Field(&item_->kv_head); }
  __device__ int request() const { return Field(&item_->request); }
  __device__ int q_pos() const { return Field(&item_->q_pos) + Token(); }
  __device__ int q_row() const { return Field(&item_->first_token) + Token(); }
  __device__ int q_len() const {
    const i32* begin = p_.qo_indptr + request();
    return Field(begin + 1) - Field(begin);
  }
  __device__ int kv_len() const { return Field(p_.kv_lens + request()); }

 private:
  __device__ int Token() const { return static_cast<int>(row_ / Traits::kGroupSize); }

  const AttentionParams& p_;
  const WorkItem* item_;
  const u32 row_;  // unsigned, which makes divisions cheap
};

// Facts that a program may ask about a key, the one `offset` behind kv position `first`. In
// unrolled loops over logits offset is known at compile time. eight: kv position, a multiple of 8,
// where the key's group of eight begins.
template <class Traits>
class KeyFacts {
 public:
  __device__ __forceinline__ KeyFacts(const AttentionParams& p, const WorkItem* item, int first,
                                      int offset, int eight)
      : p_(p), item_(item), first_(first), offset_(offset), eight_(eight) {}

  __device__ int offset() const { return offset_; }
  __device__ int kv_pos() const { return first_ + offset_; }
  // The key's row in pages, if there are pages, with or without fresh_kv. 0 behind the item's last
  // page.
  __device__ int kv_row() const {
    constexpr int kPage = Traits::kPageSize;
    if constexpr (kPage == 0) return Field(&item_->kv_base) + kv_pos();
    // The compiler sees that keys of one group of eight are in the same page.
    const int pos = kv_pos(), in_page = kPage % 8 == 0 ? eight_ : pos;
    const u32 entry = static_cast<u32>(in_page) / jax_attn::Max(kPage, 1);
    const i32* page = p_.page_indices + (Field(&item_->kv_base) + static_cast<i64>(entry));
    const i32* end = &item_->kv_end;
    if constexpr (Traits::kHasSteps) end = p_.kv_lens + Field(&item_->request);
    const bool exists = in_page < Field(end);
    return static_cast<int>(PoolRow<jax_attn::Max(kPage, 1)>(exists ? Field(page) : 0, pos));
  }

 private:
  const AttentionParams& p_;
  const WorkItem* item_;
  const int first_, offset_, eight_;
};

}  // namespace variant
}  // namespace jax_attn
