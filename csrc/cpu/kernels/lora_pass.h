// Low-rank products of adapters (lora.h): h = x a^T, then y += h b, for rows of one adapter.
// Internal linkage: see kernels.h.
#pragma once

#include "cpu/kernels.h"
#include "cpu/simd/simd_types.h"

namespace jax_attn {
namespace {

inline void Narrow(float x, float* y) { *y = x; }
inline void Narrow(float x, Bf16* y) { *y = ToBf16(x); }
inline void Narrow(float x, F16* y) { *y = ToF16(x); }

template <class Isa, typename T>
struct Lora {
  using Vec = typename Isa::Vec;
  static constexpr i64 kWidth = Isa::kWidth;
  static constexpr int kRowTile = 4;  // rows of x whose sums are in registers together
  static constexpr int kRankTile = Isa::kRows * Isa::kVecs >= 24 ? 4 : 2;
  static constexpr int kVecs = 2;  // vectors of y's columns
  static constexpr i64 kLine = 64 / sizeof(T);
  // One row alone waits for a and b to come from memory. Their rows are short, or far apart, so
  // hardware prefetchers find too little. 256 elements: 0.9 of the time; 128 and 512 are similar.
  static constexpr i64 kAhead = 256;

  static void Shrink(const LoraParams& p, const LoraRows& rows, i64 part, i64 begin, i64 end) {
    const T* a =
        static_cast<const T*>(p.a) + ((rows.adapter * p.num_parts + part) * p.max_rank) * p.depth;
    float* h = p.h + part * p.max_rank;
    const i64 h_stride = p.num_parts * p.max_rank;
    i64 i = 0;
    for (; i + kRowTile <= rows.num; i += kRowTile) {
      ShrinkRanks<kRowTile, kRankTile>(p, rows.rows + i, a, begin, end, h, h_stride);
    }
    // One row alone has more ranks at a time, for as many independent chains.
    for (; i < rows.num; ++i) {
      ShrinkRanks<1, 2 * kRankTile>(p, rows.rows + i, a, begin, end, h, h_stride);
    }
  }

  static void Expand(const LoraParams& p, const LoraRows& rows, i64 part, i64 begin, i64 end) {
    i64 i = 0;
    for (; i + kRowTile <= rows.num; i += kRowTile) {
      ExpandRows<kRowTile>(p, rows, rows.rows + i, part, begin, end);
    }
    for (; i < rows.num; ++i) ExpandRows<1>(p, rows, rows.rows + i, part, begin, end);
  }

 private:
  template <int kRows, int kRanks>
  static void ShrinkRanks(const LoraParams& p, const int32_t* rows, const T* a, i64 begin, i64 end,
                          float* h, i64 h_stride) {
    i64 r = begin;
    for (; r + kRanks <= end; r += kRanks) {
      Dots<kRows, kRanks>(p, rows, a + r * p.depth, h + r, h_stride);
    }
    for (; r < end; ++r) Dots<kRows, 1>(p, rows, a + r * p.depth, h + r, h_stride);
  }

  // Every sum has one chain for each lane, whatever tile it is in.
  template <int kRows, int kRanks>
  JAX_ATTN_KERNEL static void Dots(const LoraParams& p, const int32_t* rows, const T* a, float* h,
                                   i64 h_stride) {
    const T* x[kRows];
    Vec sums[kRows][kRanks];
    JAX_ATTN_UNROLL
    for (int i = 0; i < kRows; ++i) {
      x[i] = static_cast<const T*>(p.x) + rows[i] * p.depth;
      JAX_ATTN_UNROLL
      for (int r = 0; r < kRanks; ++r) sums[i][r] = Isa::Zero();
    }
    i64 k = 0;
    for (; k + kWidth <= p.depth; k += kWidth) {
      Vec wide[kRows];
      JAX_ATTN_UNROLL
      for (int i = 0; i < kRows; ++i) wide[i] = Isa::Load(x[i] + k);
      if constexpr (kRows == 1) {
        if (k % kLine == 0) {
          JAX_ATTN_UNROLL
          for (int r = 0; r < kRanks; ++r) __builtin_prefetch(a + r * p.depth + k + kAhead);
        }
      }
      JAX_ATTN_UNROLL
      for (int r = 0; r < kRanks; ++r) {
        const Vec weight = Isa::Load(a + r * p.depth + k);
        JAX_ATTN_UNROLL
        for (int i = 0; i < kRows; ++i) sums[i][r] = Isa::Fma(wide[i], weight, sums[i][r]);
      }
    }
    JAX_ATTN_UNROLL
    for (int i = 0; i < kRows; ++i) {
      JAX_ATTN_UNROLL
      for (int r = 0; r < kRanks; ++r) {
        float sum = Isa::ReduceAdd(sums[i][r]);
        for (i64 j = k; j < p.depth; ++j) sum += ToF32(x[i][j]) * ToF32(a[r * p.depth + j]);
        h[rows[i] * h_stride + r] = sum;
      }
    }
  }

  template <int kRows>
  JAX_ATTN_KERNEL static void ExpandRows(const LoraParams& p, const LoraRows& rows,
                                         const int32_t* which, i64 part, i64 begin, i64 end) {
    const i64 rank = rows.ranks[part];
    const T* b = static_cast<const T*>(p.b) + rows.adapter * p.max_rank * p.columns;
    const float* h[kRows];
    T* y[kRows];
    JAX_ATTN_UNROLL
    for (int i = 0; i < kRows; ++i) {
      h[i] = p.h + (which[i] * p.num_parts + part) * p.max_rank;
      y[i] = static_cast<T*>(p.y) + which[i] * p.columns;
    }
    i64 j = begin;
    for (; j + kVecs * kWidth <= end; j += kVecs * kWidth) {
      Vec sums[kRows][kVecs];
      JAX_ATTN_UNROLL
      for (int i = 0; i < kRows; ++i) {
        JAX_ATTN_UNROLL
        for (int v = 0; v < kVecs; ++v) sums[i][v] = Isa::Load(y[i] + j + v * kWidth);
      }
      for (i64 r = 0; r < rank; ++r) {
        Vec weights[kVecs];
        JAX_ATTN_UNROLL
        for (int v = 0; v < kVecs; ++v) weights[v] = Isa::Load(b + r * p.columns + j + v * kWidth);
        if constexpr (kRows == 1) __builtin_prefetch(b + r * p.columns + j + kAhead);
        JAX_ATTN_UNROLL
        for (int i = 0; i < kRows; ++i) {
          const Vec factor = Isa::Set(h[i][r]);
          JAX_ATTN_UNROLL
          for (int v = 0; v < kVecs; ++v) sums[i][v] = Isa::Fma(factor, weights[v], sums[i][v]);
        }
      }
      JAX_ATTN_UNROLL
      for (int i = 0; i < kRows; ++i) {
        JAX_ATTN_UNROLL
        for (int v = 0; v < kVecs; ++v) Isa::Store(y[i] + j + v * kWidth, sums[i][v]);
      }
    }
    for (; j < end; ++j) {
      JAX_ATTN_UNROLL
      for (int i = 0; i < kRows; ++i) {
        float sum = ToF32(y[i][j]);
        for (i64 r = 0; r < rank; ++r) sum += h[i][r] * ToF32(b[r * p.columns + j]);
        Narrow(sum, y[i] + j);
      }
    }
  }
};

}  // namespace
}  // namespace jax_attn
