// A matmul with a quantized matrix in emulation, beside float64. Results must be exact if all sums
// are f32 numbers, and otherwise within the rounding bound.
#pragma once

#include <cstring>
#include <random>

#include "cuda/sm80/quantized_product.cuh"
#include "spec.h"

namespace jax_attn {

inline int g_failures = 0;

template <int kFormatCode, int kRows, int kColumns, int kGroups, int kOfArch = 90>
struct TraitsOf {
  static constexpr int kArch = kOfArch, kDtype = kElementBf16, kFormat = kFormatCode;
  static constexpr int kTileRows = kRows, kTileColumns = kColumns, kScaleRows = kGroups;
};

inline const char* Name(int format) {
  return format == kInt4Weights ? "int4" : format == kE2m1Weights ? "e2m1" : "e4m3";
}

inline double ValueOf(int format, u32 code) {
  static constexpr double kE2m1[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return format == kInt4Weights   ? code
         : format == kE2m1Weights ? (code & 8 ? -1 : 1) * kE2m1[code & 7]
                                  : static_cast<double>(E4m3ToFloat(code));
}

struct Case {
  int num_rows, depth, columns, group_size, num_splits;
  bool has_zeros, is_wide, is_exact;
};

// Body: QuantizedProductBody of Traits.
template <class Traits, template <class> class Body>
void RunCase(const Case& c) {
  constexpr int kFormat = Traits::kFormat;
  constexpr bool kIsE2m1 = kFormat == kE2m1Weights;
  std::mt19937 rng(static_cast<unsigned>(c.num_rows * 7919 + c.depth * 31 + c.columns));
  std::normal_distribution<float> normal;
  const int groups = CeilDiv(c.depth, c.group_size), per_byte = WeightsPerByte(kFormat);

  std::vector<u16> x(c.num_rows * c.depth);
  for (u16& element : x) {
    const float value =
        c.is_exact ? static_cast<float>(static_cast<int>(rng() % 9) - 4) : normal(rng);
    element = static_cast<u16>(FloatToBf16(value));
  }
  std::vector<unsigned char> codes(c.depth / per_byte * c.columns), zeros(groups * c.columns);
  for (unsigned char& code : codes) {
    code = static_cast<unsigned char>(rng());
    // Magnitudes for which f32 sums stay exact, and no NaN.
    if (kFormat == kE4m3Weights) code = c.is_exact ? (code & 0x9f) | 0x20 : code & 0xf7;
  }
  for (unsigned char& zero : zeros) zero = static_cast<unsigned char>(rng() % 17);
  std::vector<float> scales(groups * c.columns);
  std::vector<unsigned char> exponents(groups * c.columns);
  for (size_t i = 0; i < scales.size(); ++i) {
    exponents[i] = static_cast<unsigned char>(125 + rng() % 5);
    scales[i] = c.is_exact || kIsE2m1 ? std::ldexp(1.0f, exponents[i] - 127)
                                      : 0.02f * (1 + 0.5f * normal(rng));
  }

  // One more row, which the kernel must not write.
  const int elements = c.num_splits * c.num_rows * c.columns, bytes = c.is_wide ? 4 : 2;
  std::vector<unsigned char> y((elements + c.columns) * bytes, 0x7b);
  QuantizedProductParams p = {};
  p.x = x.data();
  p.codes = codes.data();
  p.scales = kIsE2m1 ? static_cast<const void*>(exponents.data()) : scales.data();
  p.zeros = c.has_zeros ? zeros.data() : nullptr;
  p.y = y.data();
  p.num_rows = c.num_rows;
  p.depth = c.depth;
  p.columns = c.columns;
  p.group_size = c.group_size;
  p.num_splits = c.num_splits;
  p.split_depth = CeilDiv(CeilDiv(c.depth, kProductStep), c.num_splits) * kProductStep;
  p.is_wide = c.is_wide;
  const int num_ctas = CeilDiv(c.num_rows, Traits::kTileRows) *
                       CeilDiv(c.columns, Traits::kTileColumns) * c.num_splits;
  emulation::machine.Launch(num_ctas, Body<Traits>::kNumThreads, 1, [&] { Body<Traits>::Run(p); });

  int wrong = 0;
  double worst = 0;
  const auto got_at = [&](int i) {
    if (c.is_wide) {
      float value;
      std::memcpy(&value, &y[i * 4], 4);
      return static_cast<double>(value);
    }
    u16 bits;
    std::memcpy(&bits, &y[i * 2], 2);
    return static_cast<double>(Bf16ToFloat(bits));
  };
  for (int column = 0; column < c.columns; ++column) {
    std::vector<double> w(c.depth);
    for (int k = 0; k < c.depth; ++k) {
      const u32 byte = codes[k / per_byte * c.columns + column];
      const u32 code = per_byte == 1 ? byte : k % 2 == 0 ? byte & 15 : byte >> 4;
      const int at = k / c.group_size * c.columns + column;
      w[k] = (ValueOf(kFormat, code) - (c.has_zeros ? zeros[at] : 0)) *
             static_cast<double>(scales[at]);
    }
    for (int row = 0; row < c.num_rows; ++row) {
      for (int split = 0; split < c.num_splits; ++split) {
        double sum = 0, size = 0;
        const int end = std::min(c.depth, (split + 1) * p.split_depth);
        for (int k = split * p.split_depth; k < end; ++k) {
          const double term = static_cast<double>(Bf16ToFloat(x[row * c.depth + k])) * w[k];
          sum += term;
          size += std::abs(term);
        }
        const double got = got_at((split * c.num_rows + row) * c.columns + column);
        // Each weight is rounded to 8 bits, after an error of 2^-14. Sums are f32, in any order.
        // The result may be rounded to 8 bits.
        double bound = size * (0x1p-8 * (1 + 0x1p-6) + 0x1p-14 + c.depth * 0x1p-24);
        if (!c.is_wide) bound += (std::abs(sum) + bound) * 0x1p-8;
        if (c.is_exact) {
          bound = 0;
          if (!c.is_wide) sum = Bf16ToFloat(FloatToBf16(static_cast<float>(sum)));
        }
        worst = std::max(worst, bound > 0 ? std::abs(got - sum) / bound : got != sum);
        wrong += !(std::abs(got - sum) <= bound);
      }
    }
  }
  for (size_t i = elements * bytes; i < y.size(); ++i) wrong += y[i] != 0x7b;
  if (wrong == 0) return;
  ++g_failures;
  std::printf(
      "FAILED %s, tile %d x %d, [%d, %d] x [%d, %d], groups of %d, %d splits: %d values differ, by "
      "%.3g times the bound at most\n",
      Name(kFormat), Traits::kTileRows, Traits::kTileColumns, c.num_rows, c.depth, c.depth,
      c.columns, c.group_size, c.num_splits, wrong, worst);
}

}  // namespace jax_attn
