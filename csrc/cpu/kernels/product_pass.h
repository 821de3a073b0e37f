// Matmuls of activations with a weight matrix stored in panels (product.h). Internal linkage: see
// kernels.h.
#pragma once

#include "cpu/kernels/gemm.h"
#include "cpu/kernels/matrix_tiles.h"
#include "cpu/product_kernels.h"
#include "cpu/simd/simd_math.h"
#include "cpu/simd/simd_types.h"

namespace jax_attn {
namespace {

// The panels as the register tile reads them: kPanel columns of a weight panel, one depth per step,
// for bf16 two.
template <class Isa, typename T>
struct WeightSource {
  using Vec = typename Isa::Vec;
  static constexpr bool kPairs = IsBf16<T>;
  static constexpr bool kDot = kPairs && Isa::kBf16Dot;
  static constexpr Format kProduct = kDot ? Format::kDot : Format::kF32;
  static constexpr int kParts = kPairs && !kDot ? 2 : 1;
  // Bytes of one column in a step.
  static constexpr i64 kLane = kPairs ? 4 : static_cast<i64>(sizeof(T));
  static constexpr i64 kBytes = kPanel<Isa> * kLane;
  static constexpr i64 kEach = kWeightColumns / kPanel<Isa>;  // register panels in a weight panel

  const char* panels;
  i64 panel_bytes;

  template <int kPart>
  JAX_ATTN_INLINE void Load(i64 k, i64 j, Vec* x) const {
    const char* step =
        panels + j / kEach * panel_bytes + (k * kWeightColumns + j % kEach * kPanel<Isa>)*kLane;
    JAX_ATTN_UNROLL
    for (int v = 0; v < Isa::kVecs; ++v, step += Isa::kWidth * kLane) {
      if constexpr (!kPairs) {
        x[v] = Isa::Load(reinterpret_cast<const T*>(step));
      } else {
        const Vec pairs = Isa::Load(reinterpret_cast<const float*>(step));
        x[v] = kDot ? pairs : kPart == 0 ? Isa::PairLow(pairs) : Isa::PairHigh(pairs);
      }
    }
  }
};

// Prefetches what a step will read some steps later, across page borders, where the processor's own
// prefetching stops. kStep: bytes of a panel's step.
template <i64 kStep>
struct WeightFetch {
  const char* panels;
  i64 panel_bytes;

  template <i64 kBytes>
  JAX_ATTN_INLINE void Step(i64 k) {
    JAX_ATTN_UNROLL
    for (i64 at = 0; at < kBytes; at += kCacheLine) {
      __builtin_prefetch(panels + at / kStep * panel_bytes + k * kStep + at % kStep + kAhead, 0, 2);
    }
  }
  void Bytes(i64) {}  // for tiles, whose rows are contiguous: no gain

 private:
  static constexpr i64 kAhead = 4096;
};

template <i64 kRowLines>
struct SpreadFetch;
template <i64 kRowLines>
constexpr int kStepsOfFetch<SpreadFetch<kRowLines>> = 4;

// Fetches lines beside the products of a block of rows, a few at a time: those of y that it will
// write, because stores wait for lines that come from beyond the second cache, and a share of the
// next panels. kRowLines: lines of a row of y in the block.
template <i64 kRowLines>
struct SpreadFetch {
  const char* y;
  i64 y_stride, y_lines;
  const char* next;
  i64 next_lines, next_at_once;

  // y: the rows of the block, y_stride bytes apart; steps: of its products.
  SpreadFetch(const char* y, i64 y_stride, i64 y_rows, const char* next, i64 next_lines, i64 steps)
      : y(y),
        y_stride(y_stride),
        y_lines(y_rows * kRowLines),
        next(next),
        next_lines(next_lines),
        next_at_once(CeilDiv(next_lines, Max(i64{1}, steps / kStepsOfFetch<SpreadFetch>))) {}

  template <i64 kBytes>
  JAX_ATTN_INLINE void Step(i64 k) {
    const i64 i = k / kStepsOfFetch<SpreadFetch>;
    if (i < y_lines) {
      __builtin_prefetch(y + i / kRowLines * y_stride + i % kRowLines * kCacheLine, 1, 3);
    }
    const i64 begin = i * next_at_once, end = Min(next_lines, begin + next_at_once);
    for (i64 line = begin; line < end; ++line) {
      __builtin_prefetch(next + line * kCacheLine, 0, 2);
    }
  }
};

template <class Isa, Activation kActivation>
JAX_ATTN_INLINE typename Isa::Vec Activate(typename Isa::Vec x) {
  using Vec = typename Isa::Vec;
  if constexpr (kActivation == Activation::kNone) {
    return x;
  } else if constexpr (kActivation == Activation::kRelu) {
    return Isa::SelectLess(x, Isa::Zero(), Isa::Zero(), x);  // keeps NaN
  } else {
    const Vec half = Isa::Mul(Isa::Set(0.5f), x);
    if constexpr (kActivation == Activation::kGelu) {
      return Isa::Fma(half, Erf<Isa>(Isa::Mul(Isa::Set(0.70710678f), x)), half);
    } else {
      const Vec cubed = Isa::Fma(Isa::Mul(Isa::Mul(Isa::Set(0.044715f), x), x), x, x);
      return Isa::Fma(half, Tanh<Isa>(Isa::Mul(Isa::Set(0.79788456f), cubed)), half);
    }
  }
}

template <class Isa, typename T>
struct Product {
  using Source = WeightSource<Isa, T>;
  static constexpr i64 kRows = Isa::kRows;

  static i64 Steps(i64 depth) { return WeightSteps(IsBf16<T>, depth); }
  // f32 lanes of a row of x as the register tile reads it.
  static i64 RowLanes(i64 depth) { return Steps(depth) * Source::kParts; }

  static size_t RowBytes(i64 depth) {
    const bool in_place = sizeof(T) == 4 || (Source::kDot && 2 * RowLanes(depth) == depth);
    return in_place ? 0 : 4 * static_cast<size_t>(RowLanes(depth));
  }

  static void WidenRow(const void* row, i64 depth, void* lanes) {
    const T* x = static_cast<const T*>(row);
    if constexpr (Source::kDot) {
      memcpy(lanes, x, 2 * depth);
      memset(static_cast<char*>(lanes) + 2 * depth, 0, 4 * RowLanes(depth) - 2 * depth);
    } else {
      float* wide = static_cast<float*>(lanes);
      for (i64 i = 0; i < depth; ++i) wide[i] = ToF32(x[i]);
      for (i64 i = depth; i < RowLanes(depth); ++i) wide[i] = 0;
    }
  }

  static void Run(const ProductParams& p, const float* x, i64 begin, i64 end) {
    if constexpr (kSpreads) {
      if (p.num_rows > kRows) {
        return p.is_wide ? RunSpread<float>(p, x, begin, end) : RunSpread<T>(p, x, begin, end);
      }
    }
    const i64 at_once = PanelsAtOnce(p);
    for (i64 panel = begin; panel < end; panel += at_once) {
      for (i64 row = 0; row < p.num_rows; row += kRows) {
        Block(p, x, panel, Min(at_once, end - panel), row);
      }
    }
    ReleaseTiles<Isa>();
  }

 private:
  // Whether blocks of many rows are wide and few rows high, and fetch what the next ones need. Not
  // if elements of panels are widened, because each block does that again.
  static constexpr bool kSpreads = Isa::kWidePanels > 1 && (sizeof(T) == 4 || Source::kDot);
  static constexpr i64 kWidePanels = Isa::kWidePanels, kWideRows = kRows / kWidePanels;

  template <typename To>
  static void RunSpread(const ProductParams& p, const float* x, i64 begin, i64 end) {
    constexpr i64 kColumnBytes = sizeof(To);
    constexpr i64 kRowLines = kWidePanels * kWeightColumns * kColumnBytes / kCacheLine;
    alignas(64) float sums[kWideRows * kWidePanels * kWeightColumns];
    const i64 steps = Steps(p.depth), lanes = RowLanes(p.depth), y_bytes = p.columns * kColumnBytes;
    const i64 panel_bytes = steps * kWeightColumns * Source::kLane;
    for (i64 panel = begin; panel < end; panel += kWidePanels) {
      const i64 panels = Min(kWidePanels, end - panel), width = panels * kWeightColumns;
      const i64 column = panel * kWeightColumns, columns = Min(width, p.columns - column);
      const Source source{static_cast<const char*>(p.panels) + panel * panel_bytes, panel_bytes};
      const char* next = source.panels + panels * panel_bytes;
      const i64 next_bytes = Min(kWidePanels, end - panel - panels) * panel_bytes;
      const i64 share = CeilDiv(next_bytes, kCacheLine * CeilDiv(p.num_rows, kWideRows));
      for (i64 row = 0; row < p.num_rows; row += kWideRows) {
        const i64 rows = Min(kWideRows, p.num_rows - row);
        const auto multiply = [&](auto fetch) {
          GemmRows<Isa, kWideRows>(rows, x + row * lanes, lanes, source, 0, panels * Source::kEach,
                                   steps, Onto::kZero, nullptr, sums, width, fetch);
        };
        if (panel == begin && row == 0) {  // nothing has fetched the first panels
          multiply(WeightFetch<kWeightColumns * Source::kLane>{source.panels, panel_bytes});
        } else {
          const char* y = static_cast<const char*>(p.y) + row * y_bytes + column * kColumnBytes;
          multiply(SpreadFetch<kRowLines>(y, y_bytes, rows, next, share, steps));
        }
        next += share * kCacheLine;
        StoreBlock<To>(p, sums, row, rows, column, columns, width);
      }
    }
  }

  // Several if there are few rows, so that there are enough independent chains. Tiles are done with
  // a block so soon that they wait for the lines of y: longer pieces of its rows take two thirds of
  // the time, while the panels fit in the second cache beside the rows of x.
  static i64 PanelsAtOnce(const ProductParams& p) {
    constexpr i64 kFewPanelBytes = 256 << 10;
    if constexpr (Isa::kTiles) {
      const i64 bytes = Steps(p.depth) * kWeightColumns * Source::kLane;
      if (4 * bytes <= kFewPanelBytes) return 4;
    }
    return p.num_rows * 4 <= kRows ? 4 : p.num_rows * 2 <= kRows ? 2 : 1;
  }

  static void Block(const ProductParams& p, const float* x, i64 panel, i64 panels, i64 row) {
    alignas(64) float sums[kRows * 4 * kWeightColumns];
    const i64 rows = Min(kRows, p.num_rows - row), width = panels * kWeightColumns;
    const i64 lanes = RowLanes(p.depth), bytes = Steps(p.depth) * kWeightColumns * Source::kLane;
    const char* first = static_cast<const char*>(p.panels) + panel * bytes;
    WeightFetch<kWeightColumns * Source::kLane> fetch{first, bytes};
    GemmRows<Isa>(rows, x + row * lanes, lanes, Source{first, bytes}, 0, panels * Source::kEach,
                  Steps(p.depth), Onto::kZero, nullptr, sums, width, fetch);
    const i64 column = panel * kWeightColumns, columns = Min(width, p.columns - column);
    if (p.is_wide) {
      StoreBlock<float>(p, sums, row, rows, column, columns, width);
    } else {
      StoreBlock<T>(p, sums, row, rows, column, columns, width);
    }
  }

  template <typename To>
  static void StoreBlock(const ProductParams& p, const float* sums, i64 row, i64 rows, i64 column,
                         i64 columns, i64 width) {
    alignas(64) float bias[4 * kWeightColumns];
    if (p.bias) {
      const T* own = static_cast<const T*>(p.bias) + column;
      for (i64 j = 0; j < width; ++j) bias[j] = j < columns ? ToF32(own[j]) : 0.0f;
    }
    const float* added = p.bias ? bias : nullptr;
    To* y = static_cast<To*>(p.y) + row * p.columns + column;
    switch (p.activation) {
      case Activation::kNone:
        return StoreRows<Activation::kNone>(sums, added, rows, columns, width, y, p.columns);
      case Activation::kGelu:
        return StoreRows<Activation::kGelu>(sums, added, rows, columns, width, y, p.columns);
      case Activation::kGeluTanh:
        return StoreRows<Activation::kGeluTanh>(sums, added, rows, columns, width, y, p.columns);
      case Activation::kRelu:
        return StoreRows<Activation::kRelu>(sums, added, rows, columns, width, y, p.columns);
    }
  }

  // y[r, j] = f(sums[r, j] + bias[j]). bias: null: none.
  template <Activation kActivation, typename To>
  JAX_ATTN_KERNEL static void StoreRows(const float* sums, const float* bias, i64 rows, i64 columns,
                                        i64 width, To* y, i64 y_stride) {
    for (i64 r = 0; r < rows; ++r, sums += width, y += y_stride) {
      for (i64 j = 0; j < columns; j += Isa::kWidth) {
        auto value = Isa::Load(sums + j);
        if (bias) value = Isa::Add(value, Isa::Load(bias + j));
        value = Activate<Isa, kActivation>(value);
        if (columns - j >= Isa::kWidth) {
          Isa::Store(y + j, value);
        } else {
          To last[Isa::kWidth];
          Isa::Store(last, value);
          memcpy(y + j, last, (columns - j) * sizeof(To));
        }
      }
    }
  }
};

}  // namespace
}  // namespace jax_attn
