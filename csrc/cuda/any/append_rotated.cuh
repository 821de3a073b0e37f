// Rotates new queries and keys, and writes keys and values to their rows of the page pools.
#pragma once

#include "cuda/any/append.cuh"
#include "cuda/common/types.cuh"

namespace jax_attn {

template <class Traits>
struct AppendRotatedBody {
  static constexpr int kNumThreads = 256;
  static constexpr int kSmemBytes = 0;
  static constexpr int kDtype = Traits::kDtype;
  static constexpr bool kHasOwnScales = FormatOf(Traits::kKvFormat).scale_bytes > 0;
  static constexpr int kMinCtasPerSm = kHasOwnScales ? 5 : 6;  // 48 or 40 registers are enough

  __device__ __forceinline__ static void Run(const AppendParams& p) {
    if constexpr (kHasOwnScales) {
      RunHeads(p);
    } else {
      RunQuads(p);
    }
  }

 private:
  // A thread has four neighbouring elements of a token and the four that they pair with: first
  // quads of q, then of k, then, without pairs, of v. A warp stays within one token.
  __device__ __forceinline__ static void RunQuads(const AppendParams& p) {
    const int lane = threadIdx.x % kWarpSize;
    const int num_warps = gridDim.x * (kNumThreads / kWarpSize);
    const int q_quads = p.num_qo_heads * p.head_dim_qk / 8;
    const int rotated_quads = q_quads + p.num_kv_heads * p.head_dim_qk / 8;
    const int num_quads = rotated_quads + p.num_kv_heads * p.head_dim_vo / 4;
    const i64 row_dim = rotated_quads * 8 + (num_quads - rotated_quads) * 4;
    const int half = p.head_dim_qk / 2;
    const int warps_a_token = AppendRotatedWarps(p);
    const i64 num_tasks = i64{p.max_qo_tokens} * warps_a_token;
    for (i64 task = blockIdx.x * (kNumThreads / kWarpSize) + threadIdx.x / kWarpSize;
         task < num_tasks; task += num_warps) {
      const int token = static_cast<int>(task / warps_a_token);
      const int first = static_cast<int>(task % warps_a_token) * kWarpSize;
      if (!AppendToken::MayBeOne(p, token)) return;
      const AppendToken position(p, token);
      const int quad = first + lane;
      const bool is_rotated = quad < rotated_quads;
      const i64 from = token * row_dim;
      // All loads are in flight before the row is looked up, which takes longer.
      Bits low = {}, high = {};
      float4 c = {}, s = {};
      if (is_rotated) {
        const i64 angle = i64{token} * half + quad % (half / 4) * 4;
        low = Quad(p.qkv, from + LowElement(p, quad));
        high = Quad(p.qkv, from + LowElement(p, quad) + half);
        c = *reinterpret_cast<const float4*>(p.cos + angle);
        s = *reinterpret_cast<const float4*>(p.sin + angle);
      } else if (quad < num_quads) {
        low = Quad(p.qkv, from + (quad + rotated_quads) * 4);
      }
      const HeaderCounts plan(p.header, p);
      if (token >= plan.nnz_qo) return;
      // A warp that has only queries needs no row.
      const i64 row = first + kWarpSize > q_quads ? position.Row(p, plan) : -1;
      if (is_rotated) {
        const float4 a = Floats(low), b = Floats(high);
        const Pair pair = {{a.x * c.x - b.x * s.x, a.y * c.y - b.y * s.y, a.z * c.z - b.z * s.z,
                            a.w * c.w - b.w * s.w},
                           {b.x * c.x + a.x * s.x, b.y * c.y + a.y * s.y, b.z * c.z + a.z * s.z,
                            b.w * c.w + a.w * s.w}};
        if (quad < q_quads) {
          StorePair(p, p.q, token * i64{8} * q_quads, quad, pair);
        } else if (row >= 0) {
          StoreKeys(p, row * 8 * (rotated_quads - q_quads), quad - q_quads, pair);
        }
      } else if (row >= 0 && quad < num_quads) {
        const int v_quads = num_quads - rotated_quads;
        StoreValues(p, row * 4 * v_quads + (quad - rotated_quads) * 4, quad - rotated_quads, low);
      }
    }
  }

  // Rows with scales of their own: a warp has one head of a token, a lane eight neighbouring
  // elements.
  __device__ __forceinline__ static void RunHeads(const AppendParams& p) {
    const int lane = threadIdx.x % kWarpSize, first = 8 * lane;
    const int num_warps = gridDim.x * (kNumThreads / kWarpSize);
    const int num_rotated = p.num_qo_heads + p.num_kv_heads;
    const int num_heads = num_rotated + p.num_kv_heads;
    const i64 row_dim = num_rotated * i64{p.head_dim_qk} + p.num_kv_heads * i64{p.head_dim_vo};
    const i64 num_tasks = i64{p.max_qo_tokens} * num_heads;
    for (i64 task = blockIdx.x * (kNumThreads / kWarpSize) + threadIdx.x / kWarpSize;
         task < num_tasks; task += num_warps) {
      const int token = static_cast<int>(task / num_heads);
      const int head = static_cast<int>(task % num_heads);
      if (!AppendToken::MayBeOne(p, token)) return;
      const AppendToken position(p, token);
      const bool is_v = head >= num_rotated;
      const int head_dim = is_v ? p.head_dim_vo : p.head_dim_qk;
      const i64 begin = token * row_dim + i64{Min(head, num_rotated)} * p.head_dim_qk +
                        i64{Max(head - num_rotated, 0)} * p.head_dim_vo;
      uint4 bits = {};
      if (first < head_dim) bits = is_v ? Eight(p, begin + first) : Rotated(p, token, begin, first);
      const HeaderCounts plan(p.header, p);
      if (token >= plan.nnz_qo) return;
      if (head < p.num_qo_heads) {
        const i64 to = (i64{token} * p.num_qo_heads + head) * p.head_dim_qk + first;
        if (first < head_dim) *reinterpret_cast<uint4*>(static_cast<u16*>(p.q) + to) = bits;
        continue;
      }
      const i64 row = position.Row(p, plan);
      if (row < 0) continue;
      float x[8];
      EightElements<kDtype>(bits, x);
      const int kv_head = head - (is_v ? num_rotated : p.num_qo_heads);
      const i64 at = row * p.num_kv_heads + kv_head;
      QuantizeRowByWarp<Traits::kKvFormat, kDtype>(
          x, head_dim, HeadScaleOf<Traits::kKvFormat>(is_v ? p.v_scale : p.k_scale, kv_head),
          static_cast<unsigned char*>(is_v ? p.v_pages : p.k_pages) +
              at * QuantizedRowBytes(Traits::kKvFormat, head_dim));
    }
  }
  __device__ __forceinline__ static uint4 Eight(const AppendParams& p, i64 at) {
    return LoadConstant16(static_cast<const u16*>(p.qkv) + at);
  }
  // Eight rotated elements from `first` on of the head that begins at `begin`.
  __device__ __forceinline__ static uint4 Rotated(const AppendParams& p, int token, i64 begin,
                                                  int first) {
    using E = Element<kDtype>;
    const int half = p.head_dim_qk / 2;
    const bool is_high = first >= half;
    const int angle = is_high ? first - half : first;
    float a[8], b[8], x[8];
    EightElements<kDtype>(Eight(p, begin + angle), a);
    EightElements<kDtype>(Eight(p, begin + angle + half), b);
    const float* cos = p.cos + i64{token} * half + angle;
    const float* sin = p.sin + i64{token} * half + angle;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float low = a[i] * cos[i] - b[i] * sin[i], high = b[i] * cos[i] + a[i] * sin[i];
      x[i] = is_high ? high : low;
    }
    return make_uint4(E::Pack(x[0], x[1]), E::Pack(x[2], x[3]), E::Pack(x[4], x[5]),
                      E::Pack(x[6], x[7]));
  }

  using Bits = typename Conditional<kDtype == kElementF32, uint4, uint2>::Type;  // of four elements

  struct Pair {
    float4 low, high;  // elements i and i + head_dim_qk / 2 of a head
  };

  __device__ __forceinline__ static Bits Quad(const void* array, i64 at) {
    return static_cast<const Bits*>(array)[at / 4];
  }

  __device__ __forceinline__ static float4 Floats(Bits x) {
    if constexpr (kDtype == kElementF32) {
      return make_float4(__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z),
                         __uint_as_float(x.w));
    } else {
      using E = Element<kDtype>;
      return make_float4(E::ToFloat(static_cast<u16>(x.x)), E::ToFloat(static_cast<u16>(x.x >> 16)),
                         E::ToFloat(static_cast<u16>(x.y)),
                         E::ToFloat(static_cast<u16>(x.y >> 16)));
    }
  }

  // The index of the low elements of quad `quad` among heads of head_dim_qk.
  __device__ __forceinline__ static int LowElement(const AppendParams& p, int quad) {
    const int head_quads = p.head_dim_qk / 8;
    return quad / head_quads * p.head_dim_qk + quad % head_quads * 4;
  }

  __device__ __forceinline__ static void StorePair(const AppendParams& p, void* to, i64 begin,
                                                   int quad, const Pair& pair) {
    const i64 at = begin + LowElement(p, quad);
    Store4<kDtype>(to, at, pair.low);
    Store4<kDtype>(to, at + p.head_dim_qk / 2, pair.high);
  }

  __device__ __forceinline__ static void StoreKeys(const AppendParams& p, i64 begin, int quad,
                                                   const Pair& pair) {
    if constexpr (Traits::kKvFormat != kPlainFormat) {
      const i64 at = begin + LowElement(p, quad);
      const float scale = Scale(p.k_scale, LowElement(p, quad) / p.head_dim_qk);
      StoreFour(p.k_pages, at, pair.low, scale);
      StoreFour(p.k_pages, at + p.head_dim_qk / 2, pair.high, scale);
    } else {
      StorePair(p, p.k_pages, begin, quad, pair);
    }
  }

  // Stores values unchanged, NaN as well.
  __device__ __forceinline__ static void StoreValues(const AppendParams& p, i64 at, int quad,
                                                     Bits bits) {
    if constexpr (Traits::kKvFormat != kPlainFormat) {
      StoreFour(p.v_pages, at, Floats(bits), Scale(p.v_scale, quad * 4 / p.head_dim_vo));
    } else {
      static_cast<Bits*>(p.v_pages)[at / 4] = bits;
    }
  }

  __device__ __forceinline__ static float Scale(const float* scales, int head) {
    return scales != nullptr ? scales[head] : 1.0f;
  }

  // Quantizes x, rounded to kDtype first, and stores it.
  __device__ __forceinline__ static void StoreFour(void* pool, i64 at, float4 x, float scale) {
    using E = Element<kDtype>;
    const u32 pairs[2] = {E::Pack(x.x, x.y), E::Pack(x.z, x.w)};
    u32 quantized = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float element = E::ToFloat(static_cast<u16>(pairs[j / 2] >> j % 2 * 16));
      quantized |= ToFloat8<Traits::kKvFormat>(element / scale) << j * 8;
    }
    static_cast<u32*>(pool)[at / 4] = quantized;
  }
};

}  // namespace jax_attn
