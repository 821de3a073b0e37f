// Packs rows of keys and values into panels of the formats of gemm.h. Internal linkage: kernels.h.
//
// Rows of one head are num_kv_heads rows apart, often a multiple of 4096 bytes, so that they
// compete for the same few lines of the L1 cache: each row is read once, line by line, and used
// from a panel.
#pragma once

#include "cpu/kernels/gemm.h"

namespace jax_attn {
namespace {

// Panel formats by Kv, the type of keys and values, and T, the type of results. kLow: few rows
// multiply a panel, so it is cheapest to keep bf16; for many rows it is converted once. Quantized
// values are always converted: to bf16, which holds all of their values, where pairs of bf16 are
// multiplied. Int8 values are multiplied as int8.
template <class Isa, typename T, typename Kv>
constexpr bool kUsesDot = Isa::kBf16Dot && IsBf16<T>;
template <class Isa, typename T, typename Kv, bool kLow>
constexpr Format kKeyFormat =
    IsInt8<Kv>             ? Isa::kLaneCodes == 4 ? Format::kKeyQuads : Format::kShorts
    : kUsesDot<Isa, T, Kv> ? Format::kDot
    : IsBf16<Kv> && kLow   ? Format::kDepthPairs
                           : Format::kF32;
template <class Isa, typename T, typename Kv, bool kLow>
constexpr Format kValueFormat =
    IsInt8<Kv>             ? Isa::kLaneCodes == 4 ? Format::kValueQuads : Format::kShorts
    : kUsesDot<Isa, T, Kv> ? Format::kDot
    : IsBf16<Kv> && kLow   ? Format::kColumnPairs
                           : Format::kF32;

// Whether matmuls use tiles, for which depth comes in multiples of kTileSteps steps.
template <class Isa, typename T, typename Kv>
constexpr bool kUsesTiles = Isa::kTiles && (kUsesDot<Isa, T, Kv> || IsInt8<Kv>);

// Depths (head dims of keys, tokens of values) that a step of a panel holds.
constexpr i64 StepDepth(Format format) {
  return format == Format::kKeyQuads || format == Format::kValueQuads                           ? 4
         : format == Format::kDot || format == Format::kDepthPairs || format == Format::kShorts ? 2
                                                                                                : 1;
}
// 32-bit lanes that a row of a needs for this depth.
constexpr i64 Lanes(Format format, i64 depth) {
  return format == Format::kDot || IsCodes(format) ? depth / StepDepth(format) : depth;
}

template <class Isa, Format kFormat>
constexpr i64 PanelBytes(i64 depth) {
  return CeilDiv(depth, StepDepth(kFormat)) * kStepBytes<Isa, kFormat>;
}

// Writes zeros to steps [begin, end) of a panel.
template <class Isa, Format kFormat>
void ClearSteps(char* panel, i64 begin, i64 end) {
  constexpr i64 kLanes = kStepBytes<Isa, kFormat> / 4;
  float* lanes = reinterpret_cast<float*>(panel);
  for (i64 i = begin * kLanes; i < end * kLanes; i += Isa::kWidth) {
    Isa::Store(lanes + i, Isa::Zero());
  }
}

// Puts the columns of c, a row of whole panels, in their order.
template <class Isa, Format kFormat>
void OrderColumns(float* c, i64 columns) {
  if constexpr (kFormat == Format::kColumnPairs) {
    for (i64 i = 0; i < columns; i += 2 * Isa::kWidth) {
      typename Isa::Vec first, second;
      Isa::Interleave(Isa::Load(c + i), Isa::Load(c + i + Isa::kWidth), &first, &second);
      Isa::Store(c + i, first);
      Isa::Store(c + i + Isa::kWidth, second);
    }
  }
  if constexpr (kFormat == Format::kValueQuads && Isa::kCodeColumns > Isa::kWidth) {
    for (i64 i = 0; i < columns; i += Isa::kCodeColumns) Isa::OrderCodeColumns(c + i);
  }
}

// Columns of a row of sums, for values of head_dim.
template <class Isa, Format kFormat>
constexpr i64 SumColumns(i64 head_dim) {
  return RoundUp(head_dim, IsCodes(kFormat) ? Max(kPanel<Isa>, Isa::kCodeColumns) : kPanel<Isa>);
}

// The rows of one head in a block: token t's row starts at rows[t] + offset.
struct HeadRows {
  const char* const* rows;
  i64 offset;

  const char* Row(i64 t) const { return rows[t] + offset; }
};

// Prefetches rows line by line, in memory order, as many bytes per step as the step reads, or 1 /
// kShare of that: neither memory nor arithmetic waits for the other. Into the L2 cache: lines on
// their way to the L1 cache would delay the arithmetic's own reads. kPages: pages looked up at
// once. A core can look up four; one at a time needs fewer registers.
template <int kShare, i64 kPages>
struct RowFetch {
  const char* line = nullptr;
  const char* row_end = nullptr;
  const char* const* next_row = nullptr;
  const char* const* touch_row =
      nullptr;  // the first row that is not touched, if several are touched at once
  const char* const* rows_end = nullptr;
  i64 row_bytes = 0;

  // Starts on the first `bytes` of rows[0, num_rows).
  void Start(const char* const* rows, i64 num_rows, i64 bytes) {
    next_row = rows + 1;
    rows_end = rows + num_rows;
    row_bytes = bytes;
    line = rows[0];
    row_end = line + row_bytes;
    touch_row = rows + Min(kRowsAhead, num_rows);
    for (const char* const* row = rows + 1; row < touch_row; ++row) Touch(*row);
  }

  template <i64 kStepBytes>
  JAX_ATTN_INLINE void Step(i64 k) {
    constexpr i64 kBytes = kStepBytes / kShare;
    if constexpr (kBytes >= kCacheLine) {
      JAX_ATTN_UNROLL
      for (i64 i = 0; i < kBytes; i += kCacheLine) Line();
    } else {
      if (k % (kCacheLine / kBytes) == 0) Line();
    }
  }

  // Prefetches for a step of n bytes.
  void Bytes(i64 n) { Lines(n / kShare / kCacheLine); }

  void Lines(i64 n) {
    for (i64 i = 0; i < n; ++i) Line();
  }

  // Looks up the page of a row some rows before its lines are prefetched, because accesses after
  // the first prefetch of a page wait for the translation.
  static void Touch(const char* row) { __builtin_prefetch(row, 0, 2); }
  static constexpr i64 kRowsAhead = 4;

  // Prefetches the next line; the last one again when all are done.
  JAX_ATTN_INLINE void Line() {
    __builtin_prefetch(line, 0, 2);
    line += kCacheLine;
    if (line >= row_end) {
      if (next_row < rows_end) {
        line = *next_row++;
        row_end = line + row_bytes;
        if constexpr (kPages == 1) {
          if (rows_end - next_row >= kRowsAhead) Touch(next_row[kRowsAhead - 1]);
        } else if (touch_row - next_row < kRowsAhead / 2) {
          const i64 n = Min(kPages, rows_end - touch_row);
          for (i64 i = 0; i < n; ++i) Touch(*touch_row++);
        }
      } else {
        line -= kCacheLine;
      }
    }
  }
};

// Keys of kWidth tokens, transposed: a vector for each lane of their rows.
template <class Isa, Format kFormat, typename T>
struct KeyColumns {
  using Vec = typename Isa::Vec;
  static constexpr int kWidth = Isa::kWidth;
  static constexpr bool kMove =
      sizeof(T) == 4 || IsBf16<T>;  // loaded as 32-bit lanes; other types are converted first
  static constexpr bool kSplit = IsBf16<T> && kFormat == Format::kF32;  // one lane becomes two
  static constexpr bool kJoin = IsCode<T> && kFormat == Format::kDot;   // two lanes become one
  static constexpr i64 kLaneBytes = kMove ? 4 : sizeof(T) * (kJoin ? 2 : 1);

  static i64 Lanes(i64 head_dim) { return head_dim * static_cast<i64>(sizeof(T)) / kLaneBytes; }

  // Lanes [lane, lane + n) of the rows that start at offset; 0 beyond.
  JAX_ATTN_INLINE static void Load(const char* const* rows, i64 offset, i64 lane, int n,
                                   Vec* column) {
    if constexpr (kMove) {
      Isa::TransposeLoad(rows, offset + lane * kLaneBytes, n, column);
    } else {
      JAX_ATTN_UNROLL
      for (int t = 0; t < kWidth; ++t) {
        const T* row = reinterpret_cast<const T*>(rows[t] + offset);
        if constexpr (kJoin) {
          column[t] = Isa::LoadPairs(row + 2 * lane, n);
        } else {
          column[t] = Isa::LoadFirst(row + lane, n);
        }
      }
      Isa::Transpose(column);
    }
  }
};

// A panel of keys: columns are the tokens [first, first + kPanel), depth is head_dim.
template <class Isa, Format kFormat, typename T>
JAX_ATTN_KERNEL void PackKeyPanel(const HeadRows& keys, i64 first, i64 head_dim, char* panel) {
  using Columns = KeyColumns<Isa, kFormat, T>;
  constexpr int kWidth = Isa::kWidth;
  constexpr bool kSplit = Columns::kSplit;
  const i64 lanes = Columns::Lanes(head_dim);
  for (int v = 0; v < Isa::kVecs; ++v) {
    const char* rows[kWidth];
    for (int t = 0; t < kWidth; ++t) rows[t] = keys.Row(first + v * kWidth + t);
    float* out = reinterpret_cast<float*>(panel) + v * kWidth;
    typename Isa::Vec column[kWidth];
    const auto store = [&](int i) __attribute__((always_inline)) {
      if constexpr (kSplit) {
        Isa::Store(out + 2 * i * kPanel<Isa>, Isa::PairLow(column[i]));
        Isa::Store(out + (2 * i + 1) * kPanel<Isa>, Isa::PairHigh(column[i]));
      } else {
        Isa::Store(out + i * kPanel<Isa>, column[i]);
      }
    };
    i64 lane = 0;
    for (; lane + kWidth <= lanes; lane += kWidth, out += (kSplit ? 2 : 1) * kWidth * kPanel<Isa>) {
      Columns::Load(rows, 0, lane, kWidth, column);
      JAX_ATTN_UNROLL
      for (int i = 0; i < kWidth; ++i) store(i);
    }
    if (lane < lanes) {
      Columns::Load(rows, 0, lane, static_cast<int>(lanes - lane), column);
      for (int i = 0; i < lanes - lane; ++i) store(i);
    }
  }
}

// c = a b without a panel: b has the keys of kWidth tokens from `first` on, transposed in
// registers. With so few rows a vector of keys is used too rarely to be worth a store and a load.
// kSets heads at once, whose keys are set_bytes apart; rows of a and c as in GemmTile, with the
// same sums.
template <class Isa, Format kFormat, typename T, int kRows, int kSets, class Fetch>
JAX_ATTN_KERNEL void MultiplyKeyRows(const float* a, i64 lda, const HeadRows& keys, i64 set_bytes,
                                     i64 first, i64 head_dim, float* c, i64 ldc, Fetch& fetch) {
  using Vec = typename Isa::Vec;
  using Columns = KeyColumns<Isa, kFormat, T>;
  constexpr int kWidth = Isa::kWidth;
  constexpr bool kTwo = kFormat == Format::kDepthPairs;  // depths of one lane, taken one by one
  constexpr Format kProduct = kFormat == Format::kDot ? kFormat : Format::kF32;
  static_assert(!Columns::kSplit);
  const char* const* const rows = keys.rows + first;
  const i64 lanes = Columns::Lanes(head_dim);
  Fetch ahead = fetch;  // keeps it in registers
  Vec acc[kSets][kRows];
  JAX_ATTN_UNROLL
  for (int i = 0; i < kSets * kRows; ++i) acc[i / kRows][i % kRows] = Isa::Zero();
  const auto multiply = [&](int set, Vec x, i64 at) __attribute__((always_inline)) {
    JAX_ATTN_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const Vec ar = Isa::Broadcast(a + (set * kRows + r) * lda + at);
      acc[set][r] = MultiplyAdd<Isa, kProduct>(x, ar, acc[set][r]);
    }
  };
  const auto add = [&](int set, Vec x, i64 lane) __attribute__((always_inline)) {
    if constexpr (kTwo) {
      multiply(set, Isa::PairLow(x), 2 * lane);
      multiply(set, Isa::PairHigh(x), 2 * lane + 1);
    } else {
      multiply(set, x, lane);
    }
  };
  i64 lane = 0;
  for (; lane + kWidth <= lanes; lane += kWidth) {
    JAX_ATTN_UNROLL
    for (int set = 0; set < kSets; ++set) {
      Vec column[kWidth];
      Columns::Load(rows, keys.offset + set * set_bytes, lane, kWidth, column);
      JAX_ATTN_UNROLL
      for (int i = 0; i < kWidth; ++i) {
        add(set, column[i], lane + i);
        ahead.template Step<kWidth * Columns::kLaneBytes>(lane + i);
      }
    }
  }
  if (lane < lanes) {
    JAX_ATTN_UNROLL
    for (int set = 0; set < kSets; ++set) {
      Vec column[kWidth];
      Columns::Load(rows, keys.offset + set * set_bytes, lane, static_cast<int>(lanes - lane),
                    column);
      for (int i = 0; i < lanes - lane; ++i) add(set, column[i], lane + i);
    }
  }
  fetch = ahead;
  JAX_ATTN_UNROLL
  for (int i = 0; i < kSets * kRows; ++i) Isa::Store(c + i * ldc, acc[i / kRows][i % kRows]);
}

// MultiplyKeyRows of 1 to kMaxRows rows.
template <class Isa, Format kFormat, typename T, int kMaxRows, int kSets, class Fetch>
void MultiplyFewRows(i64 rows, const float* a, i64 lda, const HeadRows& keys, i64 set_bytes,
                     i64 first, i64 head_dim, float* c, i64 ldc, Fetch& fetch) {
  if constexpr (kMaxRows > 0) {
    if (rows != kMaxRows) {
      return MultiplyFewRows<Isa, kFormat, T, kMaxRows - 1, kSets>(rows, a, lda, keys, set_bytes,
                                                                   first, head_dim, c, ldc, fetch);
    }
    MultiplyKeyRows<Isa, kFormat, T, kMaxRows, kSets>(a, lda, keys, set_bytes, first, head_dim, c,
                                                      ldc, fetch);
  }
}

// Panels of values: columns are head dims, zeros beyond head_dim; depth is the tokens [begin, end),
// in steps from that of token `first` on. In a pair of tokens at the border the outer one is 0.
// Prefetches as it reads.
template <class Isa, Format kFormat, typename T, class Fetch>
JAX_ATTN_KERNEL void PackValues(const HeadRows& values, i64 first, i64 begin, i64 end, i64 head_dim,
                                i64 panel_bytes, char* panels, Fetch& fetch) {
  using Vec = typename Isa::Vec;
  constexpr i64 kStep = StepDepth(kFormat);
  // bf16 in column order moves as 32-bit lanes, two columns each.
  constexpr bool kMove = kFormat == Format::kColumnPairs;
  constexpr int kColumns = kMove ? 2 * Isa::kWidth : Isa::kWidth;  // of one vector
  const i64 whole = head_dim / kPanel<Isa>;
  Fetch ahead = fetch;  // keeps it in registers
  for (i64 t = begin / kStep * kStep; t < end; t += kStep) {
    ahead.Bytes(kStep * head_dim * static_cast<i64>(sizeof(T)));
    const T* row = reinterpret_cast<const T*>(values.Row(t));
    const T* next = reinterpret_cast<const T*>(values.Row(t + kStep - 1));
    char* out = panels + (t - first) / kStep * kStepBytes<Isa, kFormat>;
    // Columns [column, column + n) as a vector.
    const auto load = [&](i64 column, int n) __attribute__((always_inline)) {
      if constexpr (kFormat == Format::kDot) {
        Vec x = Isa::PairRows(row + column, next + column, n);
        if (t < begin) x = Isa::MaskLanes(x, 0xffff0000);
        if (t + 1 >= end) x = Isa::MaskLanes(x, 0x0000ffff);
        return x;
      } else if constexpr (kMove) {
        return Isa::LoadLanes(row + column, n / 2);
      } else {
        return Isa::LoadFirst(row + column, n);
      }
    };
    const bool both = t >= begin && t + kStep <= end;
    for (i64 j = 0; j < whole; ++j, out += panel_bytes) {
      if constexpr (kFormat == Format::kDot) {
        if (both) {
          float* to = reinterpret_cast<float*>(out);
          JAX_ATTN_UNROLL
          for (int v = 0; v < Isa::kVecs; v += 2) {
            const i64 column = j * kPanel<Isa> + v * Isa::kWidth;
            Vec x[2];
            Isa::PairRows(row + column, next + column, x);
            Isa::Store(to + v * Isa::kWidth, x[0]);
            Isa::Store(to + (v + 1) * Isa::kWidth, x[1]);
          }
          continue;
        }
      }
      JAX_ATTN_UNROLL
      for (int at = 0; at < kPanel<Isa>; at += kColumns) {
        Isa::Store(reinterpret_cast<float*>(out) + at / kColumns * Isa::kWidth,
                   load(j * kPanel<Isa> + at, kColumns));
      }
    }
    for (i64 column = whole * kPanel<Isa>; column < RoundUp(head_dim, kPanel<Isa>);
         column += kColumns) {
      const i64 n = Min(kColumns, head_dim - column);
      Isa::Store(
          reinterpret_cast<float*>(out) + (column - whole * kPanel<Isa>) / kColumns * Isa::kWidth,
          n > 0 ? load(column, static_cast<int>(n)) : Isa::Zero());
    }
  }
  fetch = ahead;
}

// PackKeyPanel for quantized values.
template <class Isa, class Fetch>
JAX_ATTN_KERNEL void PackCodePanel(const HeadRows& keys, i64 first, i64 head_dim, char* panel,
                                   Fetch& fetch) {
  using Vec = typename Isa::Vec;
  constexpr int kWidth = Isa::kWidth;
  constexpr i64 kCodes = Isa::kLaneCodes * kWidth;  // of one vector
  Fetch ahead = fetch;
  for (int v = 0; v < Isa::kVecs; ++v) {
    const char* rows[kWidth];
    for (int t = 0; t < kWidth; ++t) rows[t] = keys.Row(first + v * kWidth + t);
    float* out = reinterpret_cast<float*>(panel) + v * kWidth;
    for (i64 d = 0; d < head_dim; d += kCodes) {
      Vec column[kWidth];
      const i64 n = Min(kCodes, head_dim - d);
      if (n == kCodes) {
        JAX_ATTN_UNROLL
        for (int t = 0; t < kWidth; ++t) column[t] = Isa::LoadCodes(rows[t] + d);
      } else {
        for (int t = 0; t < kWidth; ++t) {
          char codes[kCodes] = {};
          memcpy(codes, rows[t] + d, static_cast<size_t>(n));
          column[t] = Isa::LoadCodes(codes);
        }
      }
      Isa::Transpose(column);
      const i64 steps = CeilDiv(n, Isa::kLaneCodes);
      for (i64 i = 0; i < steps; ++i, out += kPanel<Isa>) Isa::Store(out, column[i]);
      ahead.Lines(n * kWidth / kCacheLine);
    }
  }
  fetch = ahead;
}

// PackValues for quantized values: the steps of depth [begin, end) that exist. The columns are in
// the order of Isa::PairCodes.
template <class Isa, class Fetch>
JAX_ATTN_KERNEL void PackCodeValues(const HeadRows& values, i64 first, i64 begin, i64 end,
                                    i64 head_dim, i64 panel_bytes, char* panels, Fetch& fetch) {
  constexpr i64 kStep = Isa::kLaneCodes, kColumns = Isa::kCodeColumns, kBytes = 4 * kPanel<Isa>;
  constexpr i64 kVecs = kColumns / Isa::kWidth, kVecBytes = 4 * Isa::kWidth;
  Fetch ahead = fetch;
  for (i64 t = begin / kStep * kStep; t < end; t += kStep) {
    const char* rows[kStep];
    for (i64 i = 0; i < kStep; ++i) rows[i] = values.Row(t + i);
    char* step = panels + (t - first) / kStep * kBytes;
    for (i64 d = 0; d < head_dim; d += kColumns) {
      typename Isa::Vec x[kVecs];
      Isa::PairCodes(rows, d, static_cast<int>(Min(kColumns, head_dim - d)), x);
      JAX_ATTN_UNROLL
      for (i64 i = 0; i < kVecs; ++i) {
        const i64 column = d + i * Isa::kWidth;
        char* to = step + column / kPanel<Isa> * panel_bytes + column % kPanel<Isa> * 4;
        static_assert(kPanel<Isa> * 4 % kVecBytes == 0);
        Isa::Store(reinterpret_cast<float*>(to), x[i]);
      }
    }
    ahead.Lines(CeilDiv(kStep * head_dim, kCacheLine) + 1);
  }
  fetch = ahead;
}

// Whether the first `steps` steps of the panels hold neither NaN nor inf, so that 0 times them is
// 0.
template <class Isa, Format kFormat>
bool AllFinite(const char* panels, i64 panel_bytes, i64 num_panels, i64 steps) {
  using Vec = typename Isa::Vec;
  constexpr i64 kLanes = kStepBytes<Isa, kFormat> / 4;
  Vec sum = Isa::Zero();
  for (i64 j = 0; j < num_panels; ++j) {
    const float* panel = reinterpret_cast<const float*>(panels + j * panel_bytes);
    for (i64 i = 0; i < steps * kLanes; i += Isa::kWidth) {
      const Vec x = Isa::Load(panel + i);
      if constexpr (kFormat == Format::kF32) {
        sum = Isa::Fma(x, Isa::Zero(), sum);
      } else {
        sum = Isa::Fma(Isa::PairLow(x), Isa::Zero(), sum);
        sum = Isa::Fma(Isa::PairHigh(x), Isa::Zero(), sum);
      }
    }
  }
  return !Isa::AnyNan(sum);
}

}  // namespace
}  // namespace jax_attn
