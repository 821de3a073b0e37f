// The register tile of both matmuls. Internal linkage: see kernels.h.
//
// c (+)= a b, where a is row major and b comes in panels of kPanel columns from a source. Every
// element of c is one chain of multiply-adds in the order of depth, whatever the tile around it, so
// its bits depend neither on how rows and columns are grouped into tiles nor on the source.
#pragma once

#include "cpu/kernels/matrix_tiles.h"
#include "cpu/simd/simd_types.h"

namespace jax_attn {
namespace {

// Columns of a panel.
template <class Isa>
constexpr int kPanel = Isa::kVecs * Isa::kWidth;

// Contents of one step through a panel in memory.
enum class Format {
  kF32,          // kPanel f32
  kDepthPairs,   // kPanel pairs of bf16: (depth 2 k, depth 2 k + 1) of each column
  kColumnPairs,  // kPanel bf16 in the order of the columns
  kDot,          // as kDepthPairs, multiplied with pairs of bf16 of a in one instruction
  // 8-bit quantized values of a and b, summed in i32, whose bits are lanes of c.
  kShorts,      // kPanel pairs of values, as 16 bits each, in a too
  kKeyQuads,    // kPanel quads of values; a is signed
  kValueQuads,  // kPanel quads of values; a is unsigned
};
constexpr bool IsCodes(Format format) { return format >= Format::kShorts; }

// acc + a times b, lane by lane; lanes of b are as in a panel.
template <class Isa, Format kFormat>
JAX_ATTN_INLINE typename Isa::Vec MultiplyAdd(typename Isa::Vec a, typename Isa::Vec b,
                                              typename Isa::Vec acc) {
  if constexpr (kFormat == Format::kDot) {
    return Isa::DotBf16(a, b, acc);
  } else if constexpr (kFormat == Format::kShorts) {
    return Isa::DotShorts(a, b, acc);
  } else if constexpr (kFormat == Format::kKeyQuads) {
    return Isa::DotKeys(a, b, acc);
  } else if constexpr (kFormat == Format::kValueQuads) {
    return Isa::DotValues(a, b, acc);
  } else {
    return Isa::Fma(a, b, acc);
  }
}

// An Isa whose tiles multiply a format.
template <class Isa, Format kFormat>
struct TilesOf : Isa {
  template <int kC, int kA, int kB>
  JAX_ATTN_INLINE static void TileDot() {
    if constexpr (kFormat == Format::kKeyQuads) {
      Isa::template TileDotKeys<kC, kA, kB>();
    } else if constexpr (kFormat == Format::kValueQuads) {
      Isa::template TileDotValues<kC, kA, kB>();
    } else {
      Isa::template TileDot<kC, kA, kB>();
    }
  }
};

template <class Isa, Format kFormat>
constexpr i64 kStepBytes = kPanel<Isa> * (kFormat == Format::kColumnPairs ? 2 : 4);

// A source defines
//   kParts           depths of a step, each with its own lane of a
//   kProduct         the format whose MultiplyAdd takes a's lanes: kF32, or as in the panels
//   kBytes           bytes a step reads of each panel
//   Skip(n)          skips n steps
//   Load<part>(k, j) vectors [0, kVecs) of panel j at step k
// Sources of bf16 columns return the even columns of 2 * kWidth before the odd ones: unpacking them
// that way is one operation per vector. OrderColumns restores the order of c at the end.
template <class Isa, Format kFormat>
struct PanelSource {
  using Vec = typename Isa::Vec;
  static constexpr int kParts = kFormat == Format::kDepthPairs ? 2 : 1;
  static constexpr Format kProduct =
      kFormat == Format::kDot || IsCodes(kFormat) ? kFormat : Format::kF32;
  static constexpr i64 kBytes = kStepBytes<Isa, kFormat>;

  const char* panels;
  i64 panel_bytes;

  void Skip(i64 steps) { panels += steps * kBytes; }

  template <int kPart>
  JAX_ATTN_INLINE void Load(i64 k, i64 j, Vec* x) const {
    const float* step = reinterpret_cast<const float*>(panels + j * panel_bytes + k * kBytes);
    JAX_ATTN_UNROLL
    for (int v = 0; v < Isa::kVecs; ++v) {
      if constexpr (kFormat == Format::kColumnPairs) {
        const Vec pairs = Isa::Load(step + v / 2 * Isa::kWidth);
        x[v] = v % 2 == 0 ? Isa::PairLow(pairs) : Isa::PairHigh(pairs);
      } else if constexpr (kFormat == Format::kDepthPairs) {
        const Vec pairs = Isa::Load(step + v * Isa::kWidth);
        x[v] = kPart == 0 ? Isa::PairLow(pairs) : Isa::PairHigh(pairs);
      } else {
        x[v] = Isa::Load(step + v * Isa::kWidth);
      }
    }
  }
};

// Rows of T in place: depth k is at rows[k] + offset. With kPairs a step is a pair of rows.
template <class Isa, typename T, bool kPairs>
struct RowSource {
  using Vec = typename Isa::Vec;
  static constexpr int kParts = 1;
  static constexpr Format kProduct = kPairs ? Format::kDot : Format::kF32;
  static constexpr i64 kBytes = kPanel<Isa> * static_cast<i64>(sizeof(T)) * (kPairs ? 2 : 1);

  const char* const* rows;
  i64 offset;

  void Skip(i64 steps) { rows += kPairs ? 2 * steps : steps; }

  template <int kPart>
  JAX_ATTN_INLINE void Load(i64 k, i64 j, Vec* x) const {
    const i64 column = j * kPanel<Isa>;
    const T* row = reinterpret_cast<const T*>(rows[kPairs ? 2 * k : k] + offset) + column;
    if constexpr (kPairs) {
      const T* next = reinterpret_cast<const T*>(rows[2 * k + 1] + offset) + column;
      JAX_ATTN_UNROLL
      for (int v = 0; v < Isa::kVecs; v += 2) {
        Isa::PairRows(row + v * Isa::kWidth, next + v * Isa::kWidth, x + v);
      }
      return;
    }
    JAX_ATTN_UNROLL
    for (int v = 0; v < Isa::kVecs; ++v) {
      if constexpr (IsBf16<T>) {
        const Vec pairs = Isa::LoadLanes(row + v / 2 * 2 * Isa::kWidth, Isa::kWidth);
        x[v] = v % 2 == 0 ? Isa::PairLow(pairs) : Isa::PairHigh(pairs);
      } else {
        x[v] = Isa::Load(row + v * Isa::kWidth);
      }
    }
  }
};

// Initial value of the sum: zero, or the old contents.
enum class Onto { kZero, kOld };

// Register tiles with few rows are wide, so that there are enough independent chains.
template <class Isa, int kRows>
constexpr int kPanelsAtOnce = kRows * 4 <= Isa::kRows   ? 4
                              : kRows * 2 <= Isa::kRows ? 2
                                                        : 1;

// Extra work of a register tile: Step<bytes>() is called once per step, which reads this many
// bytes. The kernels use it to spread prefetches evenly over the arithmetic.
struct NoFetch {
  template <i64 kBytes>
  void Step(i64) {}
  void Lines(i64) {}
  void Bytes(i64) {}
  void Line() {}
};

// Steps for which a Fetch is called once.
template <class Fetch>
constexpr int kStepsOfFetch = 1;

// c[kRows, kPanels * kPanel] = a b, or c + a b, or scale[r] * c + a b if scale is not null, for the
// panels from `panel` on. lda, ldc: f32 lanes between rows. kSets: the panels form this many sets
// of equal size; each set has its own kRows rows of a and of c, right after those of the previous
// set. kTransposed: a is stored column by column, lda lanes apart.
template <class Isa, int kRows, int kPanels, int kSets = 1, bool kTransposed = false, class Source,
          class Fetch>
JAX_ATTN_KERNEL void GemmTile(const float* a, i64 lda, const Source& b, i64 panel, i64 steps,
                              Onto onto, const float* scale, float* c, i64 ldc, Fetch& fetch) {
  using Vec = typename Isa::Vec;
  constexpr int kWidth = Isa::kWidth, kVecs = kPanels * Isa::kVecs;
  constexpr int kSetVecs = kVecs / kSets;
  const auto element = [&](int r, int v) __attribute__((always_inline)) {
    return c + (v / kSetVecs * kRows + r) * ldc + v % kSetVecs * kWidth;
  };
  Vec acc[kRows][kVecs];
  JAX_ATTN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    JAX_ATTN_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      acc[r][v] = onto == Onto::kOld ? Isa::Load(element(r, v)) : Isa::Zero();
      if (scale) acc[r][v] = Isa::Mul(Isa::Set(scale[r]), acc[r][v]);
    }
  }
  // Lane `at` of a's rows times the vectors x.
  const auto multiply = [&](const Vec* x, i64 at) __attribute__((always_inline)) {
    JAX_ATTN_UNROLL
    for (int r = 0; r < kRows; ++r) {
      Vec ar;
      JAX_ATTN_UNROLL
      for (int v = 0; v < kVecs; ++v) {
        if (v % kSetVecs == 0) {
          const i64 row = v / kSetVecs * kRows + r;
          ar = Isa::Broadcast(kTransposed ? a + at * lda + row : a + row * lda + at);
        }
        acc[r][v] = MultiplyAdd<Isa, Source::kProduct>(ar, x[v], acc[r][v]);
      }
    }
  };
  Fetch ahead = fetch;  // and the source: keeps them in registers
  Source from = b;
  constexpr int kAtOnce = kStepsOfFetch<Fetch>;
  if constexpr (kAtOnce == 1) {
#pragma GCC unroll 4
    for (i64 k = 0; k < steps; ++k) {
      ahead.template Step<kPanels * Source::kBytes>(k);
      Vec x[kVecs];
      JAX_ATTN_UNROLL
      for (int j = 0; j < kPanels; ++j) from.template Load<0>(k, panel + j, x + j * Isa::kVecs);
      multiply(x, Source::kParts * k);
      if constexpr (Source::kParts == 2) {
        asm("" : "+r"(k));  // forces a second load: the registers do not hold both halves
        JAX_ATTN_UNROLL
        for (int j = 0; j < kPanels; ++j) from.template Load<1>(k, panel + j, x + j * Isa::kVecs);
        multiply(x, 2 * k + 1);
      }
    }
  } else {
    // As above, in a form that unrolls into as many steps as a call of the Fetch is for.
    const auto step = [&](i64& k) __attribute__((always_inline)) {
      Vec x[kVecs];
      JAX_ATTN_UNROLL
      for (int j = 0; j < kPanels; ++j) from.template Load<0>(k, panel + j, x + j * Isa::kVecs);
      multiply(x, Source::kParts * k);
      if constexpr (Source::kParts == 2) {
        asm("" : "+r"(k));
        JAX_ATTN_UNROLL
        for (int j = 0; j < kPanels; ++j) from.template Load<1>(k, panel + j, x + j * Isa::kVecs);
        multiply(x, 2 * k + 1);
      }
    };
    i64 k = 0;
    while (k + kAtOnce <= steps) {
      ahead.template Step<kAtOnce * kPanels * Source::kBytes>(k);
      JAX_ATTN_UNROLL
      for (int i = 0; i < kAtOnce; ++i, ++k) step(k);
    }
    for (; k < steps; ++k) step(k);
  }
  fetch = ahead;
  JAX_ATTN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    JAX_ATTN_UNROLL
    for (int v = 0; v < kVecs; ++v) Isa::Store(element(r, v), acc[r][v]);
  }
}

// The same for 1 to Isa::kRows rows and panels [panel, panel + panels).
template <class Isa, int kRows = Isa::kRows, bool kTransposed = false, class Source, class Fetch>
void GemmRows(i64 rows, const float* a, i64 lda, const Source& b, i64 panel, i64 panels, i64 steps,
              Onto onto, const float* scale, float* c, i64 ldc, Fetch& fetch) {
  if constexpr (Isa::kTiles && Source::kProduct != Format::kF32 && !kTransposed) {
    GemmTiles<TilesOf<Isa, Source::kProduct>, kPanel<Isa>>(
        rows, a, lda, b.panels + panel * b.panel_bytes, b.panel_bytes, panels, steps,
        onto == Onto::kZero, scale, c, ldc, fetch);
  } else if constexpr (kRows > 0) {
    if (rows != kRows) {
      return GemmRows<Isa, kRows - 1, kTransposed>(rows, a, lda, b, panel, panels, steps, onto,
                                                   scale, c, ldc, fetch);
    }
    constexpr int kAtOnce = kPanelsAtOnce<Isa, kRows>;
    const i64 end = panel + panels;
    for (; panel + kAtOnce <= end; panel += kAtOnce, c += kAtOnce * kPanel<Isa>) {
      GemmTile<Isa, kRows, kAtOnce, 1, kTransposed>(a, lda, b, panel, steps, onto, scale, c, ldc,
                                                    fetch);
    }
    for (; panel < end; ++panel, c += kPanel<Isa>) {
      GemmTile<Isa, kRows, 1, 1, kTransposed>(a, lda, b, panel, steps, onto, scale, c, ldc, fetch);
    }
  }
}

// kPanels panels each for two sets of 1 to kMaxRows rows, the second right after the first: with
// few rows and panels, one set has too few independent chains.
template <class Isa, int kPanels, int kMaxRows, class Source, class Fetch>
void GemmTwoSets(i64 rows, const float* a, i64 lda, const Source& b, i64 steps, Onto onto, float* c,
                 i64 ldc, Fetch& fetch) {
  if constexpr (kMaxRows > 0) {
    if (rows != kMaxRows) {
      return GemmTwoSets<Isa, kPanels, kMaxRows - 1>(rows, a, lda, b, steps, onto, c, ldc, fetch);
    }
    GemmTile<Isa, kMaxRows, 2 * kPanels, 2>(a, lda, b, 0, steps, onto, nullptr, c, ldc, fetch);
  }
}

}  // namespace
}  // namespace jax_attn
